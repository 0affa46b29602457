"""Every file format once: read, checked key by key and written; nothing is computed here."""

from __future__ import annotations

__all__: list[str] = []

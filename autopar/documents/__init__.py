"""File formats, one module each: reading, key-by-key validation and writing, no computation."""

from __future__ import annotations

__all__: list[str] = []

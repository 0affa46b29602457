"""Launches written for the trainers that run them: what `search.launches` reads, the way back."""

from __future__ import annotations

__all__: list[str] = []

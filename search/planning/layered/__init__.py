"""Exact search for per-layer plans: the C++ core turns cost tables into the best plan and proof."""

from __future__ import annotations

__all__: list[str] = []

"""Launches of trainers, read as what memory depends on: no plans, which are `search.engines`."""

from __future__ import annotations

__all__: list[str] = []

"""Runs or dry-runs one plan with torch-native parallelism, to check it; not a trainer."""

from __future__ import annotations

__all__: list[str] = []

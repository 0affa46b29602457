"""Checks of one plan by arithmetic, a dry run or a run with PyTorch; not for real training."""

from __future__ import annotations

__all__: list[str] = []

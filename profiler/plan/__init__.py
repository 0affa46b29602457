"""Run or dry-run one plan with torch-native parallelism to check it; not for real training."""

from __future__ import annotations

__all__: list[str] = []

"""Plans as configurations of engines that train: one module per engine."""

from __future__ import annotations

__all__: list[str] = []

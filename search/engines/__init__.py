"""Export, import and check of plans and runs for training engines, one folder per engine."""

from __future__ import annotations

__all__: list[str] = []

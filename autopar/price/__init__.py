"""The memory of a rank of a training launch, bottom-up: no measured profile, no plan, no torch."""

from __future__ import annotations

__all__: list[str] = []

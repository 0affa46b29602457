"""Memory and step time of a training run, bottom-up: no measured profile, no plan, no torch."""

from __future__ import annotations

__all__: list[str] = []

"""Memory and step time of a training run, estimated bottom-up without measured profiles."""

from __future__ import annotations

__all__: list[str] = []

"""Pieces of a step's time: operations, mixtures, adapters, replicas of weights, the optimizer."""

from __future__ import annotations

__all__: list[str] = []

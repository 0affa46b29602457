"""Measured layers as torch modules: the only nn.Module code of the profiler."""

from __future__ import annotations

__all__: list[str] = []

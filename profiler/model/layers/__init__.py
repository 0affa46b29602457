"""torch modules of the reference layers, embedding and head that the profiler measures."""

from __future__ import annotations

__all__: list[str] = []

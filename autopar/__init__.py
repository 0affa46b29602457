"""The documents that profiler, search and users exchange; no torch, no planner."""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]

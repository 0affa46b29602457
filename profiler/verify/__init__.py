"""autopar-verify: profile this machine, search, run plans, and say how well they were predicted."""

from __future__ import annotations

__all__: list[str] = []

"""autopar-verify: profile this machine, search, run plans, and report the prediction errors."""

from __future__ import annotations

__all__: list[str] = []

"""Analysis of a user's run: faster alternatives."""

from __future__ import annotations

__all__: list[str] = []

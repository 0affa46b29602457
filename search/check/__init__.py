"""Analysis of a user's run: faster alternatives, and the gain or loss of low precision."""

from __future__ import annotations

__all__: list[str] = []

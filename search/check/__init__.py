"""A launch of somebody's own: what it says, what it needs and takes, and what would be better."""

from __future__ import annotations

__all__: list[str] = []

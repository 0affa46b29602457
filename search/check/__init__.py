"""Suggestions for a launch script: faster alternatives, and patches of the file."""

from __future__ import annotations

__all__: list[str] = []

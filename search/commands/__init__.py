"""Commands of the planner: they read options, call the library and print; nothing imports them."""

from __future__ import annotations

__all__: list[str] = []

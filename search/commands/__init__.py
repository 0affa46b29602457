"""The planner's commands: they read options, call the library and print; nothing imports them."""

from __future__ import annotations

__all__: list[str] = []

"""Commands of the planner: they read options, call the library and print results.

They are imported only as entry points, by name.
"""

from __future__ import annotations

__all__: list[str] = []

"""The exact search: tables in, the best plan and its proof out, solved by the C++ core."""

from __future__ import annotations

__all__: list[str] = []

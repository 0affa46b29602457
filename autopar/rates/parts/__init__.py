"""Parts of the step time: operations, experts, adapters, data parallelism, the optimizer."""

from __future__ import annotations

__all__: list[str] = []

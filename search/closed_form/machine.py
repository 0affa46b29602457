"""What an analytic model runs on: rates that depend on the size of an operation, and networks.

Plain numbers in base units; the compiled engine times operations with them. An operation takes
`amount / (peak * efficiency(amount))`, where the efficiency is a step function of its own FLOP or
bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["OPERATIONS", "Collective", "Rate", "Tier"]

OPERATIONS = ("p2p", "reduce_scatter", "all_gather", "all_reduce")
"""Names of what a network tier can do, in the order of the compiled tables."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Work per second of a processor or a memory, by the size of one operation."""

    peak_per_s: float
    """FLOP/s or bytes/s."""
    curve: tuple[tuple[float, float], ...]
    """(smallest size, efficiency), descending; sizes in FLOP or bytes, the last is 0."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Traffic of a collective over g ranks: bytes * scalar * (1 + offset / g)."""

    scalar: float
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One network, such as NVLink inside a node; collectives run on one tier."""

    bytes_per_s: float
    """Bandwidth that is reached, efficiency included."""
    latency_s: float
    """Once per operation, even of one without bytes."""
    size: int
    """Processors that the tier reaches."""
    must_be_filled: bool
    processor_usage: float
    """Share of the processor that a running operation occupies."""
    collectives: Mapping[str, Collective]

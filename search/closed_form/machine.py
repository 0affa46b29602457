"""What an analytic model runs on: rates that depend on the size of an operation, and networks.

Shared by the closed-form models. An operation takes `amount / (peak * efficiency(amount))`, where
the efficiency is a step function of the operation's own FLOP or bytes.
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

    def efficiency(self, amount: float) -> float:
        """Return the share of the peak that an operation of this size reaches."""
        for smallest, efficiency in self.curve:
            if amount >= smallest:
                return efficiency
        raise AssertionError("the last step of a curve starts at 0")

    def seconds(self, amount: float) -> float:
        """Return the time of one operation; none takes none."""
        return amount / (self.peak_per_s * self.efficiency(amount)) if amount else 0.0


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Traffic of a collective over g ranks: bytes * scalar * (1 + offset / g)."""

    scalar: float
    offset: float = 0.0

    def traffic_bytes(self, size_bytes: float, ranks: int) -> float:
        """Return what crosses the slowest link, for a buffer of `size_bytes`."""
        return size_bytes * self.scalar * (1.0 + self.offset / ranks)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One network, such as NVLink inside a node; collectives run on one tier."""

    bytes_per_s: float
    """Bandwidth that is reached, efficiency included."""
    latency_s: float
    """Once per operation."""
    size: int
    """Processors that the tier reaches."""
    must_be_filled: bool
    processor_usage: float
    """Share of the processor that a running operation occupies."""
    collectives: Mapping[str, Collective]

    def seconds(self, operation: str, size_bytes: float, ranks: int) -> float:
        """Return the time of one operation; one without bytes still has the latency."""
        traffic = self.collectives[operation].traffic_bytes(size_bytes, ranks)
        return self.latency_s + traffic / self.bytes_per_s

"""Times of single operations: rates that depend on the size of an operation, and networks.

An operation takes `amount / (peak * efficiency(amount))`, where the efficiency is a step function
of the operation's own FLOP or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from search.closed_form import native as machine

__all__ = ["Collective", "Rate", "Tier", "rate_of", "tier_of"]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Work per second of a processor or a memory, by the size of one operation."""

    peak_per_s: float
    curve: tuple[tuple[float, float], ...]

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
    offset: float

    def traffic_bytes(self, size_bytes: float, ranks: int) -> float:
        """Return what crosses the slowest link, for a buffer of `size_bytes`."""
        return size_bytes * self.scalar * (1.0 + self.offset / ranks)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One network; collectives run on one."""

    bytes_per_s: float
    latency_s: float
    processor_usage: float
    collectives: Mapping[str, Collective]

    def seconds(self, operation: str, size_bytes: float, ranks: int) -> float:
        """Return the time of one operation; one without bytes still has the latency."""
        traffic = self.collectives[operation].traffic_bytes(size_bytes, ranks)
        return self.latency_s + traffic / self.bytes_per_s


def rate_of(rate: machine.Rate) -> Rate:
    """Return a rate of a document."""
    return Rate(peak_per_s=rate.peak_per_s, curve=rate.curve)


def tier_of(tier: machine.Tier) -> Tier:
    """Return a network of a document."""
    return Tier(
        bytes_per_s=tier.bytes_per_s,
        latency_s=tier.latency_s,
        processor_usage=tier.processor_usage,
        collectives={
            name: Collective(scalar=one.scalar, offset=one.offset)
            for name, one in tier.collectives.items()
        },
    )

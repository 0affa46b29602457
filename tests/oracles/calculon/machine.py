"""Times of single operations: rates that depend on the size of an operation, and networks.

An operation takes `amount / (peak * efficiency(amount))`, where the efficiency is a step function
of the operation's own FLOP or bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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
        """Return the seconds of one operation; an amount of 0 takes no time."""
        return amount / (self.peak_per_s * self.efficiency(amount)) if amount else 0.0


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Traffic of a collective over g ranks: bytes * scalar * (1 + offset / g)."""

    scalar: float
    offset: float

    def traffic_bytes(self, size_bytes: float, ranks: int) -> float:
        """Return the bytes that cross the slowest link, for a buffer of `size_bytes`."""
        return size_bytes * self.scalar * (1.0 + self.offset / ranks)


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One network tier; a collective runs on exactly one."""

    bytes_per_s: float
    latency_s: float
    processor_usage: float
    collectives: Mapping[str, Collective]

    def seconds(self, operation: str, size_bytes: float, ranks: int) -> float:
        """Return the seconds of one operation; one without bytes still pays the latency."""
        traffic = self.collectives[operation].traffic_bytes(size_bytes, ranks)
        return self.latency_s + traffic / self.bytes_per_s


def engine_rate(engine: Any) -> Rate:
    """Return the rate of an engine of a document: TFLOP/s, sizes in GFLOP."""
    curve = tuple((size * 1e9, share) for size, share in engine.gflops_efficiency)
    return Rate(peak_per_s=engine.tflops * 1e12, curve=curve)


def memory_rate(memory: Any) -> Rate:
    """Return the rate of a memory of a document: GB/s of 1e9 bytes, sizes in 1e6 bytes."""
    curve = tuple((size * 1e6, share) for size, share in memory.MB_efficiency)
    return Rate(peak_per_s=memory.GBps * 1e9, curve=curve)


def tier_of(network: Any) -> Tier:
    """Return a network of a document: GB/s of 1e9 bytes, multiplied by its efficiency."""
    return Tier(
        bytes_per_s=network.bandwidth * 1e9 * network.efficiency,
        latency_s=network.latency,
        processor_usage=network.processor_usage,
        collectives={
            name: Collective(scalar=scalar, offset=offset or 0.0)
            for name, (scalar, offset) in network.ops.items()
        },
    )

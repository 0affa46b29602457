"""What PyTorch's caching allocator makes of a request: blocks, in bytes; no terms of a launch.

From the rules of `CUDACachingAllocator` (torch 2.x): requests are rounded up to 512 bytes and take
the smallest hole that fits. Those of at most 1 MiB have a pool of their own. Others share segments
of 20 MiB or, from 10 MiB on, get one of a multiple of 2 MiB; what is left of a hole is split off
only where it is more than 1 MiB. With expandable segments it always is.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable

from autopar.units import MIB

RESERVED_RATIOS = (1.02, 1.04, 1.11)
"""Reserved over allocated: lowest, median and highest of 32 published pairs, 23 of them of the
fullest rank of a stage (`benchmarks.published_peaks`); all had room for more."""

# all in bytes
_UNIT = 512
_OWN_SEGMENT = 10 * MIB
_SHARED_SEGMENT = 20 * MIB
_SEGMENT = 2 * MIB
_LEAST_REST = MIB


def recycled_bytes(size_bytes: float, *, expandable: bool, hole_bytes: int = 0) -> int:
    """Return the bytes of the block of an allocation that comes and goes with every micro-batch.

    It lands where one like it has been: segments are multiples of 2 MiB, and so are most holes in
    them, whose rest of at most 1 MiB is not split off. What is not above 1 MiB lies in a pool of
    its own, and is split to 512 bytes.

    hole_bytes : a hole that is there just before it, which it takes where the rest stays with it.
    """
    size = _units(size_bytes)
    if expandable or size <= _LEAST_REST:
        return size
    if size <= hole_bytes <= size + _LEAST_REST:
        return hole_bytes
    segment = -(-size // _SEGMENT) * _SEGMENT
    return size if segment - size > _LEAST_REST else segment


class Pool:
    """Blocks that are given out one after the other, in the order of their requests.

    Nothing is given back: what is laid here stays as long as the rank runs, such as weights,
    gradient buffers and the states of the optimizer. Holes are then only what is left of segments.
    """

    def __init__(self, *, expandable: bool) -> None:
        self._expandable = expandable
        self._holes: list[int] = []
        self.allocated_bytes = 0
        self.requested_bytes = 0

    def take(self, size_bytes: float) -> None:
        """Give out the smallest hole that is large enough, else a part of a new segment."""
        size = _units(size_bytes)
        self.requested_bytes += int(size_bytes)
        if not self._expandable and size > _LEAST_REST:
            size = self._block(size)
        self.allocated_bytes += size

    def _block(self, size: int) -> int:
        at = bisect_left(self._holes, size)
        if at < len(self._holes):
            hole = self._holes.pop(at)
        elif size < _OWN_SEGMENT:
            hole = _SHARED_SEGMENT
        else:
            hole = -(-size // _SEGMENT) * _SEGMENT
        if hole - size <= _LEAST_REST:
            return hole
        insort(self._holes, hole - size)
        return size

    @property
    def rounding_bytes(self) -> int:
        """How much more was given out than was asked for, in bytes."""
        return self.allocated_bytes - self.requested_bytes


def rounding_bytes(sizes_bytes: Iterable[float], *, expandable: bool) -> int:
    """Return how much larger blocks are than requests that follow one another and all stay."""
    pool = Pool(expandable=expandable)
    for size in sizes_bytes:
        pool.take(size)
    return pool.rounding_bytes


def reserved_bytes(allocated_bytes: int) -> tuple[int, int]:
    """Return what is reserved from the device for so many allocated bytes, at least and at most.

    Holes and rests of segments are in it; communicators and the context of CUDA are not.
    """
    low, _, high = RESERVED_RATIOS
    return int(allocated_bytes * low), int(allocated_bytes * high)


def _units(size_bytes: float) -> int:
    return -(-int(size_bytes) // _UNIT) * _UNIT

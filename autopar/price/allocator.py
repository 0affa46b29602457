"""Block sizes of PyTorch's caching allocator, in bytes.

The rules are those of `CUDACachingAllocator` (torch 2.x). Requests are rounded up to 512 bytes and
use the smallest free block that fits. Requests of at most 1 MiB have a separate pool. Requests of
less than 10 MiB share segments of 20 MiB; larger ones get a segment rounded up to 2 MiB. The
remainder of a free block is split off if it exceeds 1 MiB, with expandable segments always.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import groupby

from autopar.units import MIB

RESERVED_RATIOS = (1.02, 1.04, 1.11)
"""Reserved over allocated: lowest, median and highest of 32 published pairs, 23 of them of the peak
rank of a stage (`benchmarks.published_peaks`). None of these runs was short of memory."""

# all sizes in bytes
_UNIT = 512
_OWN_SEGMENT = 10 * MIB
_SHARED_SEGMENT = 20 * MIB
_SEGMENT = 2 * MIB
_LEAST_REST = MIB


def recycled_bytes(size_bytes: float, *, expandable: bool, hole_bytes: int = 0) -> int:
    """Return the block bytes of an allocation that is made and freed with every micro-batch.

    It reuses the free block of its predecessor. Segments are multiples of 2 MiB, and so are most
    free blocks in them; a remainder of at most 1 MiB is not split off. Requests of at most 1 MiB
    are in a separate pool and rounded to 512 bytes.

    hole_bytes : free block just before the allocation, used whole if its remainder is not split
        off.
    """
    size = _units(size_bytes)
    if expandable or size <= _LEAST_REST:
        return size
    if size <= hole_bytes <= size + _LEAST_REST:
        return hole_bytes
    segment = -(-size // _SEGMENT) * _SEGMENT
    return size if segment - size > _LEAST_REST else segment


class Pool:
    """Model of the caching allocator for consecutive requests that are never freed.

    Examples are weights, gradient buffers and optimizer states. The only free blocks are remainders
    of segments.
    """

    def __init__(self, *, expandable: bool) -> None:
        self._expandable = expandable
        self._holes: list[int] = []
        """Sizes of free blocks, ascending and without duplicates."""
        self._numbers: dict[int, int] = {}
        """Size -> number of free blocks."""
        self.allocated_bytes = 0
        self.requested_bytes = 0

    def take(self, size_bytes: float, number: int = 1) -> None:
        """Allocate `number` blocks, each from the smallest free block that is large enough.

        If none is, a new segment is used.
        """
        size = _units(size_bytes)
        self.requested_bytes += int(size_bytes) * number
        if self._expandable or size <= _LEAST_REST:
            self.allocated_bytes += size * number
            return
        while number:
            at = bisect_left(self._holes, size)
            old = at < len(self._holes)
            if old:
                hole = self._holes[at]
            elif size < _OWN_SEGMENT:
                hole = _SHARED_SEGMENT
            else:
                hole = -(-size // _SEGMENT) * _SEGMENT
            there = self._numbers[hole] if old else number
            # Blocks are split off a hole until its rest is too small, so equal holes end equal.
            most = hole // size
            times = min(there, number // most) or 1
            blocks = min(most, number)
            rest = hole - blocks * size
            if old:
                self._change(hole, -times)
            if rest > _LEAST_REST:
                self._change(rest, times)
                rest = 0
            self.allocated_bytes += times * (blocks * size + rest)
            number -= times * blocks

    def _change(self, hole: int, number: int) -> None:
        """Add free blocks of a size, or remove them."""
        left = self._numbers.get(hole, 0) + number
        if not left:
            self._holes.remove(hole)
        elif hole not in self._numbers:
            insort(self._holes, hole)
        self._numbers[hole] = left
        if not left:
            del self._numbers[hole]

    @property
    def rounding_bytes(self) -> int:
        """Allocated minus requested bytes."""
        return self.allocated_bytes - self.requested_bytes


def rounding_bytes(sizes_bytes: Iterable[float], *, expandable: bool) -> int:
    """Return allocated minus requested bytes of consecutive requests that are never freed."""
    pool = Pool(expandable=expandable)
    # Experts have thousands of equal tensors.
    for size, same in groupby(sizes_bytes):
        pool.take(size, sum(1 for _ in same))
    return pool.rounding_bytes


def reserved_bytes(allocated_bytes: int) -> tuple[int, int]:
    """Return (low, high) reserved bytes for `allocated_bytes` under PyTorch's caching allocator.

    Free blocks and segment remainders are included; NCCL buffers and the CUDA context are not.
    """
    low, _, high = RESERVED_RATIOS
    return int(allocated_bytes * low), int(allocated_bytes * high)


def _units(size_bytes: float) -> int:
    return -(-int(size_bytes) // _UNIT) * _UNIT

"""How likely a launch runs out of memory: what a device reserves, from what is predicted.

The prediction itself is `autopar.memory.account`'s. What is reserved differs from it by the error
of the allocated peak and by what the allocator holds beside it.
"""

from __future__ import annotations

import math
from statistics import NormalDist

from autopar.memory.account import RESERVED_RATIOS

__all__ = ["CONTEXT_BYTES", "odds_of_more", "reserved_interval"]

CONTEXT_BYTES = 1 << 30
"""CUDA's context and NCCL's buffers, which no allocator counts."""
_PEAK_SPREAD = 0.02
"""Standard deviation of the logarithm of measured over predicted peaks: 19 of 20 of the measured
runs are within 5 % (docs/memory.md)."""
_LOW, _MEDIAN, _HIGH = map(math.log, RESERVED_RATIOS)
_NORMAL = NormalDist()
_TAIL = _NORMAL.inv_cdf(0.95)
# the published ratios are nine pairs: their ends are taken for its 5th and 95th percentile
_RESERVED_SPREAD = (_HIGH - _LOW) / (2.0 * _TAIL)
_SPREAD = math.hypot(_PEAK_SPREAD, _RESERVED_SPREAD)


def reserved_interval(peak_bytes: float) -> tuple[float, float]:
    """Return the bytes between which 9 of 10 launches reserve whose peak is predicted so."""
    middle = math.log(peak_bytes) + _MEDIAN
    return math.exp(middle - _TAIL * _SPREAD), math.exp(middle + _TAIL * _SPREAD)


def odds_of_more(peak_bytes: float, capacity_bytes: float) -> float:
    """Return the probability that a launch needs more than a device has, its context included.

    ln(reserved / predicted peak) is taken as normal around the published median of 1.03.
    """
    left = capacity_bytes - CONTEXT_BYTES
    if left <= 0:
        return 1.0
    return 1.0 - _NORMAL.cdf((math.log(left / peak_bytes) - _MEDIAN) / _SPREAD)

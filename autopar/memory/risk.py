"""How likely a launch runs out of memory: what a device reserves, from the peak that is predicted.

The prediction itself is `autopar.memory.account`'s. What a device reserves at the peak differs from
it by the error of that prediction, known by kind of launch from measured runs (docs/memory.md), and
by what PyTorch's allocator holds beside the tensors, known from published pairs of both figures.
Both are taken as normal in the logarithm, and as independent of each other. Nothing here counts a
byte of a launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import NormalDist
from typing import Literal, NamedTuple

from autopar.memory.allocator import RESERVED_RATIOS
from autopar.memory.launch import Launch

__all__ = [
    "CONTEXT_BYTES",
    "PEAK_RATIOS",
    "LaunchKind",
    "kind_of",
    "odds_of_any",
    "odds_of_kind",
    "odds_of_more",
    "reserve_share",
    "reserved_interval",
]

LaunchKind = Literal["dense", "experts", "fp8 or fsdp"]

CONTEXT_BYTES = 1 << 30
"""CUDA's context and NCCL's buffers, which no allocator counts: the planner's default, too."""

PEAK_RATIOS: Mapping[LaunchKind, tuple[float, float]] = {
    "dense": (0.9937, 1.0054),
    "experts": (0.9955, 1.0128),
    "fp8 or fsdp": (0.9495, 1.0976),
}
"""Between which 9 of 10 measured peaks of the last stage lie, over the predicted one; made by
`benchmarks.memory_goldens.intervals_of` from the shipped runs."""

_NORMAL = NormalDist()
_TAIL = _NORMAL.inv_cdf(0.95)
"""Standard deviations from the middle to either end of a 90 % interval."""


class _Spread(NamedTuple):
    """A normal error of a logarithm."""

    middle: float
    deviation: float


def kind_of(launch: Launch) -> LaunchKind:
    """Return the kind whose errors are those of a launch: what routing and blocks can change."""
    if launch.precision.fp8 or launch.optimizer.sharding == "fsdp":
        return "fp8 or fsdp"
    return "dense" if launch.model.experts is None else "experts"


def reserved_interval(launch: Launch, peak_bytes: float) -> tuple[float, float]:
    """Return the bytes between which 9 of 10 devices reserve at such a predicted peak."""
    spread = _reserved(kind_of(launch))
    middle = math.log(peak_bytes) + spread.middle
    reach = _TAIL * spread.deviation
    return math.exp(middle - reach), math.exp(middle + reach)


def odds_of_more(launch: Launch, peak_bytes: float, capacity_bytes: float) -> float:
    """Return the probability that a device of so many bytes is too small for a predicted peak.

    P = 1 - Phi((ln(left / peak) - mu) / sigma), where left is what the context leaves, and mu and
    sigma are of ln(reserved / peak): 1 where the context takes all.
    """
    return odds_of_kind(kind_of(launch), peak_bytes, capacity_bytes - CONTEXT_BYTES)


def odds_of_kind(kind: LaunchKind, peak_bytes: float, left_bytes: float) -> float:
    """Return the same for what a device has left beside its context, of a kind of launch."""
    if left_bytes <= 0:
        return 1.0
    if peak_bytes <= 0:
        return 0.0
    spread = _reserved(kind)
    distance = math.log(left_bytes / peak_bytes) - spread.middle
    return 1.0 - _NORMAL.cdf(distance / spread.deviation)


def reserve_share(kind: LaunchKind, odds: float) -> float:
    """Return the share of a predicted peak to leave free beside it, for odds of running out.

    exp(mu + sigma * z) - 1, at the z of 1 - odds: what `odds_of_kind` gives for these odds.
    """
    spread = _reserved(kind)
    return math.exp(spread.middle + spread.deviation * _NORMAL.inv_cdf(1.0 - odds)) - 1.0


def odds_of_any(launch: Launch, peaks_bytes: Iterable[float], capacity_bytes: float) -> float:
    """Return the probability that one of the stages with these predicted peaks is too full.

    Stages share their error (one allocator, one trainer), so the fullest decides. Raises ValueError
    without a stage.
    """
    return odds_of_more(launch, max(peaks_bytes), capacity_bytes)


def _reserved(kind: LaunchKind) -> _Spread:
    """Return the error of reserved over predicted bytes: that of the peak, then of the reserve."""
    low, high = map(math.log, PEAK_RATIOS[kind])
    least, median, most = map(math.log, RESERVED_RATIOS)
    # the published ratios are nine pairs, whose ends stand for the 5th and the 95th percentile
    peak = _Spread((low + high) / 2.0, (high - low) / (2.0 * _TAIL))
    reserve = _Spread(median, (most - least) / (2.0 * _TAIL))
    return _Spread(peak.middle + reserve.middle, math.hypot(peak.deviation, reserve.deviation))

"""Statistics of repeated timings: robust summaries, and warnings in plain words.

Timings are positive, skewed and have outliers, so the median stands for a cell, and its interval
comes from order statistics, which ask nothing about the shape of the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.units import format_seconds

__all__ = [
    "USABLE_SPREAD",
    "Summary",
    "median_half_width",
    "relative_spread",
    "summarize",
    "warnings_of",
]

USABLE_SPREAD = 0.5
"""A relative spread above this is wider than the time itself: nothing follows from it."""

_CONFIDENCE = 0.95
_SCATTER = 0.2  # std/mean; quiet links stay below 0.05
_CLUSTER_SAMPLES = 8
_CLUSTER_RATIO = 1.2
_DRIFT_SAMPLES = 18  # thirds of fewer than six are too often apart by chance
_DRIFT_RATIO = 1.05
_DRIFT_DEVIATIONS = 2.85  # 2.88 is six samples all above six others


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a set of samples says about one time, in seconds."""

    num_samples: int
    median_s: float
    low_s: float
    """5th percentile, linear between samples."""
    high_s: float
    """95th percentile, linear between samples."""
    mad_s: float
    """Median absolute deviation from the median, not scaled to a standard deviation."""
    mean_s: float
    variation: float
    """Standard deviation (of n - 1) over mean."""
    half_width: float
    """Half the 95 % confidence interval of the median over the median; inf below 6 samples."""


def summarize(samples: Sequence[float]) -> Summary:
    """Return the summary of samples in seconds: at least one, finite and not negative."""
    return _summary(tuple(_values(samples).tolist()))


@lru_cache(maxsize=1 << 14)  # files are derived again after every cell, which changes one
def _summary(samples: tuple[float, ...]) -> Summary:
    values = _values(samples)
    median = float(np.median(values))
    low, high = np.percentile(values, (5.0, 95.0))
    return Summary(
        num_samples=len(values),
        median_s=median,
        low_s=float(low),
        high_s=float(high),
        mad_s=float(np.median(np.abs(values - median))),
        mean_s=float(values.mean()),
        variation=_variation(values),
        half_width=median_half_width(samples),
    )


def median_half_width(samples: Sequence[float]) -> float:
    """Return half the 95 % confidence interval of the median over the median; inf below 6 samples.

    The interval reaches from the k-th smallest to the k-th largest sample, k the largest whole
    number for which the binomial distribution (n, 1/2) leaves at most 2.5 % below it (the sign
    test inverted), so it holds for every continuous distribution.
    """
    values = np.sort(_values(samples))
    rank = _interval_rank(len(values))
    if rank == 0:
        return math.inf
    width = float(values[-rank] - values[rank - 1])
    if width == 0.0:
        return 0.0
    median = float(np.median(values))
    return width / (2.0 * median) if median > 0.0 else math.inf


def relative_spread(low_s: float, middle_s: float, high_s: float) -> float:
    """Return half the width of an interval over its middle; inf around 0."""
    return (high_s - low_s) / 2.0 / middle_s if middle_s > 0.0 else math.inf


def warnings_of(samples: Sequence[float]) -> tuple[str, ...]:
    """Return what is suspicious about samples in the order they were taken, in plain words.

    Scatter: the variation is above 0.2.
    Clusters: of 8 or more samples, the split of their logarithms with the least scatter inside
    has at least 3 samples and 15 % on either side, centres a factor of 1.2 apart, and more than
    4.5 + 12/n standard deviations (pooled inside the clusters) between them. Half a bell curve
    each gives 2.65, and small samples scatter around it: that is what 12/n covers.
    Drift: of 18 or more, the medians of the first and the last third are a factor of 1.05 apart,
    and the rank sum of the one within the other is 2.85 standard deviations from its mean.
    Steady noise causes each of the last two in less than one of a hundred cells.
    """
    values = _values(samples)
    found = []
    variation = _variation(values)
    if variation > _SCATTER:
        found.append(f"the samples scatter: variation {variation:.2f}")
    centres = _clusters(values)
    if centres is not None:
        first, second = (format_seconds(float(f"{centre:.3g}")) for centre in centres)
        found.append(f"the samples fall in two clusters: {first} and {second}")
    ends = _drift(values)
    if ends is not None:
        first, last = (format_seconds(float(f"{end:.3g}")) for end in ends)
        found.append(f"the samples drift: {first} in the first third, {last} in the last")
    return tuple(found)


def _values(samples: Sequence[float]) -> NDArray[np.float64]:
    values = np.asarray(samples, dtype=np.float64)
    assert values.ndim == 1, "samples are a flat sequence of seconds"
    assert len(values) > 0, "a cell without samples has no statistics"
    assert np.isfinite(values).all(), "samples are finite"
    assert (values >= 0.0).all(), "samples are durations"
    return values


def _variation(values: NDArray[np.float64]) -> float:
    mean = float(values.mean())
    # the difference of equal numbers is exactly 0, which a rounded mean would hide
    if len(values) < 2 or float(np.ptp(values)) == 0.0:
        return 0.0
    return float(values.std(ddof=1)) / mean if mean > 0.0 else 0.0


@lru_cache(maxsize=4096)
def _interval_rank(count: int) -> int:
    """Return the rank of the interval's lower end among `count` sorted samples, 0 for none."""
    rank, term, below = 0, 1, 1
    # 2 * P(B < rank + 1) <= 1 - confidence, in whole numbers
    while 2 * below <= (1.0 - _CONFIDENCE) * (1 << count):
        rank += 1
        term = term * (count - rank + 1) // rank
        below += term
    return rank


def _clusters(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the medians of two clusters in seconds, None where there is one."""
    count = len(values)
    smallest = float(values.min())
    if count < _CLUSTER_SAMPLES or smallest <= 0.0:
        return None
    logs = np.sort(np.log(values) - math.log(smallest))
    fewest = max(3, math.ceil(0.15 * count))
    sizes = np.arange(fewest, count - fewest + 1)
    sums, squares = np.cumsum(logs), np.cumsum(logs * logs)
    low = sums[sizes - 1] / sizes
    high = (sums[-1] - sums[sizes - 1]) / (count - sizes)
    inside = squares[-1] - sizes * low * low - (count - sizes) * high * high
    best = int(np.argmin(inside))
    distance = float(high[best] - low[best])
    deviation = math.sqrt(max(0.0, float(inside[best])) / (count - 2))
    if distance <= math.log(_CLUSTER_RATIO) or distance <= (4.5 + 12.0 / count) * deviation:
        return None
    ordered, split = np.sort(values), int(sizes[best])
    return float(np.median(ordered[:split])), float(np.median(ordered[split:]))


def _drift(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the medians of the first and the last third in seconds, None where they agree."""
    if len(values) < _DRIFT_SAMPLES:
        return None
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    ends = float(np.median(first)), float(np.median(last))
    if max(ends) <= _DRIFT_RATIO * min(ends):
        return None
    # Mann and Whitney's U and its deviation under the hypothesis of no drift, without ties
    difference = np.sign(last[:, None] - first[None, :]).sum() / 2.0
    deviation = third * math.sqrt((2 * third + 1) / 12.0)
    return ends if abs(float(difference)) >= _DRIFT_DEVIATIONS * deviation else None

"""Statistics of repeated timings: robust summaries, fits and their uncertainty.

`profiler.measure` decides how often something is timed.

Timings are positive, skewed and have outliers. So the median represents a cell, and its interval
comes from order statistics, which make no assumption about the shape of the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import F64
from autopar.documents.sidecar import Form, Term
from autopar.records import Record
from autopar.units import format_seconds

# --------------------------------------------------------------------------------------------------
# Small non-negative least squares, exact and without scipy.
#
# Measured times are non-negative combinations of a few effects (launch, per token, per token
# squared). With at most three unknowns every set of active effects can be tried, so the optimum is
# found exactly and deterministically.


class LatencyBandwidth(Record):
    """The line time = latency_s + size * seconds_per_byte through measured times."""

    latency_s: float
    seconds_per_byte: float
    residual: float
    """Largest |fitted / measured - 1|."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the slope in bytes/s; inf if the time does not grow with size."""
        return 1.0 / self.seconds_per_byte if self.seconds_per_byte > 0.0 else math.inf


_SHORTEST_S = 1e-12


def latency_bandwidth_fit(
    sizes_bytes: Sequence[float], times_s: Sequence[float]
) -> LatencyBandwidth:
    """Return the non-negative fit of times as latency + size * seconds per byte.

    All sizes and times must be above 0. If all sizes are equal, the latency is 0.

    Weights are relative, 1/time: sizes span four decades, and noise grows with the time. With equal
    weights the largest message alone would decide. The latency, which only small messages show,
    would then be its rounding error.
    """
    sizes = np.asarray(sizes_bytes, dtype=np.float64)
    times = np.asarray(times_s, dtype=np.float64)
    assert sizes.shape == times.shape, "one time per size"
    assert sizes.ndim == 1, "sizes and times are flat sequences"
    assert len(sizes) > 0, "a line needs a point"
    assert (sizes > 0.0).all(), "sizes are above 0"
    assert (times > 0.0).all(), "times are above 0"
    # No machine is that fast. A wrong unit could make times so small that weights are infinite.
    times = np.maximum(times, _SHORTEST_S)
    design = np.stack((np.ones_like(sizes), sizes), axis=1)
    if np.ptp(sizes) == 0.0:  # a constant would fit as well: attribute the time to bandwidth
        design[:, 0] = 0.0
    # Do not use relative_weights: its floor for targets near 0 would ignore the small messages.
    latency_s, seconds_per_byte = nonnegative_fit(design, times, 1.0 / times)
    fitted = latency_s + sizes * seconds_per_byte
    return LatencyBandwidth(
        latency_s=float(latency_s),
        seconds_per_byte=float(seconds_per_byte),
        residual=float(np.abs(fitted / times - 1.0).max()),
    )


def rising_fit(times_s: F64) -> F64:
    """Return the nearest non-decreasing times, shape (n,), for times above 0.

    Distance is the sum of squared log ratios, so falling runs become their geometric mean; rising
    times are returned unchanged. If every time of a row is at least that of another row, the same
    holds for the fits. Source: pool adjacent violators, Ayer et al., Ann. Math. Statist. 26 (1955)
    641.
    """
    blocks: list[tuple[float, int]] = []
    # Logarithms make the mean of a run geometric and weigh a factor equally up and down.
    for value in np.log(times_s).tolist():
        mean, count = value, 1
        # A joint mean may in turn be below the previous run.
        while blocks and blocks[-1][0] > mean:
            before, number = blocks.pop()
            mean = (before * number + mean * count) / (number + count)
            count += number
        blocks.append((mean, count))
    fitted = times_s.copy()
    first = 0
    for mean, count in blocks:
        # A single value keeps its bits, which exp(log) would change.
        if count > 1:
            fitted[first : first + count] = np.exp(mean)
        first += count
    rising: F64 = np.maximum.accumulate(fitted)  # for the last bit of the means
    return rising


def relative_weights(target: F64) -> F64:
    """Return weights 1/target, so that every measurement counts by its relative error.

    target : (..., n) non-negative; values below a thousandth of the largest get its weight
    """
    scale = target.max(axis=-1, initial=0.0, keepdims=True)
    # Without a floor, a time near 0 would weigh more than all others together.
    floor = np.where(scale > 0.0, 1e-3 * scale, 1.0)
    weights: F64 = 1.0 / np.maximum(target, floor)
    return weights


def nonnegative_fit(design: F64, target: F64, weights: F64 | None = None) -> F64:
    """Return the x >= 0 that minimises |weights * (design @ x - target)|^2, shape (k,).

    design : (n, k) with k <= 3.
    target : (n,).
    weights : (n,), relative by default. Of equal optima, the one with the fewest and first unknowns
        is returned.
    """
    num_unknowns = design.shape[1]
    assert num_unknowns <= 3, "active sets are enumerated: at most three unknowns"
    weights = relative_weights(target) if weights is None else weights
    matrix = design * weights[:, None]
    goal = target * weights
    # Unit columns: lstsq judges the rank by size, and squared tokens are much larger than 1.
    scale = np.sqrt((matrix * matrix).sum(axis=0))
    scale[scale == 0.0] = 1.0
    matrix = matrix / scale
    # The first candidate has no effects.
    best = np.zeros(num_unknowns)
    best_residual = float(goal @ goal)
    everything = tuple(range(num_unknowns))
    several = num_unknowns > 1
    whole = _solved(matrix, goal, everything) if several else None
    if whole is not None and _needs_all(matrix, whole[0], best_residual):
        alone: F64 = whole[0] / scale
        return alone
    for count in range(1, num_unknowns + 1):
        for active in combinations(range(num_unknowns), count):
            done = several and active == everything
            found = whole if done else _solved(matrix, goal, active)
            if found is None:
                continue
            solution, residual = found
            # A margin for rounding: of equally good sets, the smaller one, which came first, is
            # kept.
            if residual < best_residual * (1.0 - 1e-12):
                best_residual = residual
                best = np.zeros(num_unknowns)
                best[list(active)] = solution
    fitted: F64 = best / scale
    return fitted


def _solved(matrix: F64, goal: F64, active: tuple[int, ...]) -> tuple[F64, float] | None:
    """Return the least-squares fit of the `active` unknowns, and its squared error.

    None if the columns are linearly dependent or a coefficient is negative.
    """
    columns = matrix[:, active]
    solution: F64
    solution, _, rank, _ = np.linalg.lstsq(columns, goal, rcond=None)  # type: ignore[assignment]
    # Negative effects are not allowed; the set without that effect is tried as well.
    if rank < len(active) or (solution < 0.0).any():
        return None
    error = columns @ solution - goal
    return solution, float(error @ error)


def _needs_all(matrix: F64, solution: F64, scale: float) -> bool:
    """Return True if the fit is clearly worse without any one of its unknowns, (k,) >= 0.

    Without x_i, the squared error rises by x_i^2 over the i-th diagonal entry of the inverse normal
    matrix. Without several unknowns it rises further.

    scale : squared length of the goal; its rounding error is far below one millionth of it
    """
    try:
        inverse = np.linalg.inv(matrix.T @ matrix)
    except np.linalg.LinAlgError:
        return False
    return bool((solution * solution > 1e-6 * scale * np.diagonal(inverse)).all())


def nonnegative_fits(design: F64, targets: F64) -> F64:
    """Return the relatively weighted `nonnegative_fit` of every row of targets, shape (r, k).

    design : (n, k) with k <= 3.
    targets : (r, n). All rows are solved at once.
    """
    num_unknowns = design.shape[1]
    assert num_unknowns <= 3, "active sets are enumerated: at most three unknowns"
    # The steps of `nonnegative_fit`, with separate weights per row.
    weights = relative_weights(targets)
    matrix = design * weights[:, :, None]
    goal = targets * weights
    scale = np.sqrt((matrix * matrix).sum(axis=1))
    scale[scale == 0.0] = 1.0
    matrix = matrix / scale[:, None, :]
    best = np.zeros((len(targets), num_unknowns))
    best_residual = (goal * goal).sum(axis=1)
    for count in range(1, num_unknowns + 1):
        for active in combinations(range(num_unknowns), count):
            columns = matrix[:, :, active]
            usable = np.linalg.matrix_rank(columns) == count
            if not usable.any():
                continue
            solution = np.zeros((len(targets), count))
            # numpy's lstsq accepts no stacks. QR does, and the columns are independent here.
            orthogonal, upper = np.linalg.qr(columns[usable])
            projected = orthogonal.transpose(0, 2, 1) @ goal[usable, :, None]
            solution[usable] = np.linalg.solve(upper, projected)[:, :, 0]
            error = (columns @ solution[:, :, None])[:, :, 0] - goal
            residual = (error * error).sum(axis=1)
            better = usable & (solution >= 0.0).all(axis=1)
            # The margin of `nonnegative_fit`, so that both choose the same effects.
            better &= residual < best_residual * (1.0 - 1e-12)
            best_residual[better] = residual[better]
            best[better] = 0.0
            best[np.ix_(better, active)] = solution[better]
    fitted: F64 = best / scale
    return fitted


# --------------------------------------------------------------------------------------------------
# Fit of measured times as a sum of effects of batch and sequence length, and its uncertainty.
#
# A time is t = c0 + b*(c1*s + c2*s^2): a constant launch, work that grows with the tokens, and
# attention that grows with their square. The terms that a set of times can distinguish are
# determined here for both the planner and the profiler. Source: cost-model.md, "Compute".


BAD_FIT = 0.1
"""A fit is reported as bad if its relative error at one of its times exceeds this."""
REACH = 2.0
"""A fit may be used up to this factor times its largest batch and its longest sequence."""
INTERVAL = (0.05, 0.95)
"""Quantiles of the replicas at the ends of an interval."""
_NUM_REPLICAS = 200
_SEED = 20240901

_POWERS: dict[Term, tuple[int, int]] = {
    "launch_s": (0, 0),
    "s_per_sample": (1, 0),
    "s_per_token": (1, 1),
    "s_per_token_squared": (1, 2),
}
"""Exponents of batch and sequence length."""


class FittedTimes(Record, eq=False):
    """Fit of times: a non-negative coefficient for each term, and the relative errors."""

    terms: tuple[Term, ...]
    coefficients: F64
    """Coefficients, shape (k,), in the unit in the name of each term."""
    fitted_s: F64
    """Fitted time at every measured cell, shape (n,), seconds."""
    errors: F64
    """Fitted over measured time, minus 1, shape (n,); times below a thousandth of the longest count
    as that, as in the fit."""

    @property
    def launch_s(self) -> float:
        """Seconds independent of batch and length; 0 if the times cannot determine them."""
        return self.coefficient("launch_s")

    @property
    def worst(self) -> int:
        """Index of the cell with the largest relative error."""
        return int(np.abs(self.errors).argmax())

    def coefficient(self, term: Term) -> float:
        """Return a coefficient; 0 for a term that is not fitted."""
        return float(self.coefficients[self.terms.index(term)]) if term in self.terms else 0.0

    def sample_s(self, length: float) -> float:
        """Return the seconds of one additional sample of this length."""
        return sum(
            float(x) * length ** _POWERS[term][1]
            for term, x in zip(self.terms, self.coefficients, strict=True)
            if term != "launch_s"
        )


def terms_of(
    form: Form, batches: Iterable[int], lengths: Iterable[int], *, quadratic: bool
) -> tuple[Term, ...]:
    """Return the terms that times of these batches and sequence lengths can distinguish.

    form : static: proportional to the batch; batch: with a launch cost; both at one length.
        sequence: also over lengths.
    quadratic : True for layers, whose attention grows with the square of the length; False for
        embedding, head and loss, which have a part per sample instead
    """
    if form == "static":
        return ("s_per_sample",)
    launch: tuple[Term, ...] = ("launch_s",)
    if form == "batch":
        return (*launch, "s_per_sample")
    # One batch size cannot separate the launch from the work.
    terms = launch if len(set(batches)) > 1 else ()
    # One length cannot separate work per token from attention.
    if len(set(lengths)) == 1:
        return (*terms, "s_per_token")
    if quadratic:
        return (*terms, "s_per_token", "s_per_token_squared")
    # Embedding, head and loss have no attention, but a part per sample.
    return (*terms, "s_per_sample", "s_per_token")


def fit_times(
    batches: Sequence[int],
    lengths: Sequence[int],
    times_s: Sequence[float],
    terms: tuple[Term, ...],
) -> FittedTimes:
    """Return the non-negative, relatively weighted fit of times of whole batches, in seconds."""
    design = _design(batches, lengths, terms)
    measured = np.array(times_s, dtype=np.float64)
    weights = relative_weights(measured)
    coefficients = nonnegative_fit(design, measured, weights)
    fitted = design @ coefficients
    return FittedTimes(
        terms=terms,
        coefficients=coefficients,
        fitted_s=fitted,
        errors=(fitted - measured) * weights,
    )


def bootstrap_times(
    batches: Sequence[int],
    lengths: Sequence[int],
    samples_s: Sequence[Sequence[float]],
    terms: tuple[Term, ...],
) -> tuple[F64, F64]:
    """Return replicas of the coefficients (r, k) and of the fit at every cell (r, n), in seconds.

    Each replica draws from every cell, with replacement, as many samples as the cell has, and fits
    their medians; equal cells give equal replicas. Replicas show the uncertainty due to the scatter
    of the samples. The errors of the fit show whether the form is right.
    """
    design = _design(batches, lengths, terms)
    # A fixed seed, because equal cells must give equal bytes.
    generator = np.random.default_rng(_SEED)
    medians = np.stack(
        [
            np.median(generator.choice(np.array(cell), (_NUM_REPLICAS, len(cell))), axis=1)
            for cell in samples_s
        ],
        axis=1,
    )
    coefficients = nonnegative_fits(design, medians)
    return coefficients, coefficients @ design.T


def _design(batches: Sequence[int], lengths: Sequence[int], terms: tuple[Term, ...]) -> F64:
    batch = np.array(batches, dtype=np.float64)
    length = np.array(lengths, dtype=np.float64)
    powers = (_POWERS[term] for term in terms)
    return np.stack([batch**p * length**q for p, q in powers], axis=1)


# --------------------------------------------------------------------------------------------------
# Fits of times over batch and length, and limits of their use.


USABLE_SPREAD = 0.5
"""Limit of a usable relative spread; above it the interval is wider than the time itself."""

_CONFIDENCE = 0.95
_SCATTER = 0.2  # std/mean; quiet links stay below 0.05
_CLUSTER_SAMPLES = 8
_CLUSTER_RATIO = 1.2
_DRIFT_SAMPLES = 18  # thirds of fewer than six samples differ too often by chance
_DRIFT_RATIO = 1.05
_DRIFT_DEVIATIONS = 2.85  # 2.88 is six samples all above six others


class Summary(Record):
    """Summary of samples of one time, in seconds."""

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

    @property
    def spread(self) -> float:
        """Half of the range from 5th to 95th percentile over the median; inf for a median of 0."""
        return relative_spread(self.low_s, self.median_s, self.high_s)


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

    The interval is from the k-th smallest to the k-th largest sample. Here k is the largest integer
    for which the binomial distribution (n, 1/2) leaves at most 2.5 % below it (the sign test
    inverted), so the interval holds for every continuous distribution.
    """
    values = np.sort(_values(samples))
    rank = _interval_rank(len(values))
    # Below 6 samples, even the full range contains the median less often than 95 %.
    if rank == 0:
        return math.inf
    width = float(values[-rank] - values[rank - 1])
    # Before the division, because equal samples of 0 s agree as well.
    if width == 0.0:
        return 0.0
    median = float(np.median(values))
    return width / (2.0 * median) if median > 0.0 else math.inf


def relative_spread(low_s: float, middle_s: float, high_s: float) -> float:
    """Return half the width of an interval over its middle; inf for a middle of 0."""
    return (high_s - low_s) / 2.0 / middle_s if middle_s > 0.0 else math.inf


def warnings_of(samples: Sequence[float]) -> tuple[str, ...]:
    """Return warnings about samples, given in the order of measurement: scatter, clusters, drift.

    Scatter: the coefficient of variation is above 0.2.

    Clusters, from 8 samples: the logarithms are split where the scatter inside the parts is
    smallest, with at least 3 samples and 15 % in each part. The means of the parts differ by more
    than a factor of 1.2, and by more than 4.5 + 12/n pooled standard deviations. The halves of a
    normal distribution differ by 2.65; the term 12/n covers the scatter of small samples.

    Drift, from 18 samples: the medians of the first and the last third differ by more than a factor
    of 1.05, and the rank sum is at least 2.85 standard deviations from its mean (Mann-Whitney).

    Under stationary noise, clusters and drift are each reported for less than 1 % of the cells.
    """
    values = _values(samples)
    found = []
    variation = _variation(values)
    if variation > _SCATTER:
        found.append(f"the samples scatter: variation {variation:.2f}")
    centres = _clusters(values)
    if centres is not None:
        first, second = (format_seconds(float(f"{centre:.3g}")) for centre in centres)
        found.append(f"the samples form two clusters: {first} and {second}")
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
    # The difference of equal numbers is exactly 0, which a rounded mean would hide.
    if len(values) < 2 or float(np.ptp(values)) == 0.0:
        return 0.0
    return float(values.std(ddof=1)) / mean if mean > 0.0 else 0.0


@lru_cache(maxsize=4096)
def _interval_rank(count: int) -> int:
    """Return the rank of the interval's lower end among `count` sorted samples, 0 for none."""
    rank, term, below = 0, 1, 1
    # 2 * P(B < rank + 1) <= 1 - confidence, in integers
    while 2 * below <= (1.0 - _CONFIDENCE) * (1 << count):
        rank += 1
        # C(n, k) from C(n, k-1), without a remainder
        term = term * (count - rank + 1) // rank
        below += term
    return rank


def _clusters(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the medians of two clusters in seconds, None for one cluster; see `warnings_of`."""
    count = len(values)
    smallest = float(values.min())
    # A time of 0 has no logarithm.
    if count < _CLUSTER_SAMPLES or smallest <= 0.0:
        return None
    # Relative to the smallest, so that sums of squares of small numbers lose no digits.
    logs = np.sort(np.log(values) - math.log(smallest))
    fewest = max(3, math.ceil(0.15 * count))
    sizes = np.arange(fewest, count - fewest + 1)
    sums, squares = np.cumsum(logs), np.cumsum(logs * logs)
    low = sums[sizes - 1] / sizes
    high = (sums[-1] - sums[sizes - 1]) / (count - sizes)
    # Squared scatter inside both parts, sum of squares minus n * mean^2, for every split at once.
    inside = squares[-1] - sizes * low * low - (count - sizes) * high * high
    best = int(np.argmin(inside))
    distance = float(high[best] - low[best])
    # n - 2, because both means come from the same samples; rounding may give a negative sum.
    deviation = math.sqrt(max(0.0, float(inside[best])) / (count - 2))
    if distance <= math.log(_CLUSTER_RATIO) or distance <= (4.5 + 12.0 / count) * deviation:
        return None
    ordered, split = np.sort(values), int(sizes[best])
    return float(np.median(ordered[:split])), float(np.median(ordered[split:]))


def _drift(values: NDArray[np.float64]) -> tuple[float, float] | None:
    """Return the medians of the first and last third in seconds, None without drift.

    `warnings_of` describes the test.
    """
    if len(values) < _DRIFT_SAMPLES:
        return None
    third = len(values) // 3
    first, last = values[:third], values[-third:]
    ends = float(np.median(first)), float(np.median(last))
    if max(ends) <= _DRIFT_RATIO * min(ends):
        return None
    # Mann and Whitney's U and its deviation under the hypothesis of no drift, without ties.
    difference = np.sign(last[:, None] - first[None, :]).sum() / 2.0
    deviation = third * math.sqrt((2 * third + 1) / 12.0)
    return ends if abs(float(difference)) >= _DRIFT_DEVIATIONS * deviation else None

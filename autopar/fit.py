"""Small non-negative least squares, exact and without scipy.

Measured times are non-negative combinations of a few effects (launch, per token, per token
squared); with at most three unknowns every set of active effects can be tried, so the optimum is
found exactly and deterministically.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LatencyBandwidth",
    "latency_bandwidth_fit",
    "nonnegative_fit",
    "nonnegative_fits",
    "relative_weights",
    "rising_fit",
]

F64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LatencyBandwidth:
    """The line time = latency_s + size * seconds_per_byte through measured times."""

    latency_s: float
    seconds_per_byte: float
    residual: float
    """Largest |fitted / measured - 1|."""

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of the slope in bytes/s; inf where the time does not grow with size."""
        return 1.0 / self.seconds_per_byte if self.seconds_per_byte > 0.0 else math.inf


def latency_bandwidth_fit(
    sizes_bytes: Sequence[float], times_s: Sequence[float]
) -> LatencyBandwidth:
    """Return the non-negative line through times over sizes, all above 0; one size: latency 0.

    Weights are relative, 1/time: sizes span four decades, and noise grows with the time. With
    equal weights the largest message alone would decide, and the latency, which only the small
    ones show, would be its rounding error.
    """
    sizes = np.asarray(sizes_bytes, dtype=np.float64)
    times = np.asarray(times_s, dtype=np.float64)
    assert sizes.shape == times.shape, "one time per size"
    assert sizes.ndim == 1, "sizes and times are flat sequences"
    assert len(sizes) > 0, "a line needs a point"
    assert (sizes > 0.0).all(), "sizes are above 0"
    assert (times > 0.0).all(), "times are above 0"
    design = np.stack((np.ones_like(sizes), sizes), axis=1)
    if np.ptp(sizes) == 0.0:  # a constant would fit as well: say that it is bandwidth
        design[:, 0] = 0.0
    # not relative_weights: its floor, for targets near 0, would silence the small messages
    latency_s, seconds_per_byte = nonnegative_fit(design, times, 1.0 / times)
    fitted = latency_s + sizes * seconds_per_byte
    return LatencyBandwidth(
        latency_s=float(latency_s),
        seconds_per_byte=float(seconds_per_byte),
        residual=float(np.abs(fitted / times - 1.0).max()),
    )


def rising_fit(times_s: F64) -> F64:
    """Return the times nearest to these, all above 0, that never fall, shape (n,).

    Nearest by the squares of log ratios, so runs that fall become their geometric mean; times that
    rise already are returned as they are. If one row is nowhere below another, neither is its fit.
    Source: pool adjacent violators, Ayer et al., Ann. Math. Statist. 26 (1955) 641.
    """
    blocks: list[tuple[float, int]] = []
    for value in np.log(times_s).tolist():
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, number = blocks.pop()
            mean = (before * number + mean * count) / (number + count)
            count += number
        blocks.append((mean, count))
    fitted = times_s.copy()
    first = 0
    for mean, count in blocks:
        if count > 1:
            fitted[first : first + count] = np.exp(mean)
        first += count
    rising: F64 = np.maximum.accumulate(fitted)  # for the last bit of the means
    return rising


def relative_weights(target: F64) -> F64:
    """Return weights 1/target, so that every measurement counts by its relative error.

    target : (..., n) non-negative; values below a thousandth of the largest are weighted as that.
    """
    scale = target.max(axis=-1, initial=0.0, keepdims=True)
    floor = np.where(scale > 0.0, 1e-3 * scale, 1.0)
    weights: F64 = 1.0 / np.maximum(target, floor)
    return weights


def nonnegative_fit(design: F64, target: F64, weights: F64 | None = None) -> F64:
    """Return the x >= 0 that minimises |weights * (design @ x - target)|^2, shape (k,).

    design : (n, k) with k <= 3; target : (n,); weights : (n,), relative ones by default. Of equal
    optima the one with the fewest and first unknowns is returned.
    """
    num_unknowns = design.shape[1]
    assert num_unknowns <= 3, "active sets are enumerated: at most three unknowns"
    weights = relative_weights(target) if weights is None else weights
    matrix = design * weights[:, None]
    goal = target * weights
    scale = np.sqrt((matrix * matrix).sum(axis=0))
    scale[scale == 0.0] = 1.0
    matrix = matrix / scale
    best = np.zeros(num_unknowns)
    best_residual = float(goal @ goal)
    for count in range(1, num_unknowns + 1):
        for active in combinations(range(num_unknowns), count):
            columns = matrix[:, active]
            solution, _, rank, _ = np.linalg.lstsq(columns, goal, rcond=None)
            if rank < count or (solution < 0.0).any():
                continue
            error = columns @ solution - goal
            residual = float(error @ error)
            if residual < best_residual * (1.0 - 1e-12):
                best_residual = residual
                best = np.zeros(num_unknowns)
                best[list(active)] = solution
    fitted: F64 = best / scale
    return fitted


def nonnegative_fits(design: F64, targets: F64) -> F64:
    """Return the relatively weighted `nonnegative_fit` of every row of targets, shape (r, k).

    design : (n, k) with k <= 3; targets : (r, n). All rows are solved at once.
    """
    num_unknowns = design.shape[1]
    assert num_unknowns <= 3, "active sets are enumerated: at most three unknowns"
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
            orthogonal, upper = np.linalg.qr(columns[usable])
            projected = orthogonal.transpose(0, 2, 1) @ goal[usable, :, None]
            solution[usable] = np.linalg.solve(upper, projected)[:, :, 0]
            error = (columns @ solution[:, :, None])[:, :, 0] - goal
            residual = (error * error).sum(axis=1)
            better = usable & (solution >= 0.0).all(axis=1)
            better &= residual < best_residual * (1.0 - 1e-12)
            best_residual[better] = residual[better]
            best[better] = 0.0
            best[np.ix_(better, active)] = solution[better]
    fitted: F64 = best / scale
    return fitted

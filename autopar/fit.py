"""Small non-negative least squares, exact and without scipy.

Measured times are non-negative combinations of a few effects (launch, per token, per token
squared); with at most three unknowns every set of active effects can be tried, so the optimum is
found exactly and deterministically.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

__all__ = ["nonnegative_fit", "relative_weights"]

F64 = NDArray[np.float64]


def relative_weights(target: F64) -> F64:
    """Return weights 1/target, so that every measurement counts by its relative error.

    target : (n,) non-negative; values below a thousandth of the largest are weighted as that.
    """
    scale = float(target.max(initial=0.0))
    if scale <= 0.0:
        return np.ones_like(target)
    weights: F64 = 1.0 / np.maximum(target, 1e-3 * scale)
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

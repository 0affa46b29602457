"""Fits the calibration: factors that bring predictions nearest to what was measured.

A predicted step is T(c, k) of the factors of computation and communication. It is homogeneous of
degree 1 (both twice, twice the time) and piecewise linear, because exchanges hide behind
computation; so at any point T = c*a + k*b with a, b its derivatives (Euler). The columns a and b
come from pricing the plans again with another factor of communication, and the fit

    measured = c*a + k*b + fixed,   MOST >= c, k >= LEAST, MOST_S >= fixed >= 0

weighs relative errors, large ones less (Huber, Ann. Math. Statist. 35 (1964) 73).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.calibration import MOST, MOST_S
from autopar.fit import nonnegative_fit

__all__ = ["LEAST", "Fitted", "TimeColumns", "fit_bytes", "fit_times", "left_out_s"]

F64 = NDArray[np.float64]

LEAST = 0.1
"""No factor is smaller: a tenth of the profile is no correction but another machine."""
_HUBER = 1.345
"""Of 95 % efficiency for normal errors."""
_TURNS = 30
_SMALL = 1e-3
"""A column below this share of the measured times determines nothing."""


@dataclass(frozen=True, kw_only=True)
class TimeColumns:
    """What each plan's step is made of, in seconds at factors of 1; (n,) each."""

    computation: F64
    communication: F64


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Factors; None where the plans say nothing of one."""

    computation: float
    communication: float | None
    fixed_s: float

    def times_s(self, columns: TimeColumns) -> F64:
        """Return the calibrated times of plans."""
        k = 1.0 if self.communication is None else self.communication
        result: F64 = (
            self.computation * columns.computation + k * columns.communication + self.fixed_s
        )
        return result


def fit_times(columns: TimeColumns, measured_s: F64) -> Fitted:
    """Return the factors; at least as many plans as unknowns, else fixed seconds are left at 0.

    What is above the most that a calibration holds is set to that.
    """
    communicates = bool((columns.communication > _SMALL * measured_s).any())
    base = LEAST * columns.computation
    parts = [columns.computation]
    if communicates:
        base = base + LEAST * columns.communication
        parts.append(columns.communication)
    else:
        base = base + columns.communication
    if len(measured_s) > len(parts):
        parts.append(np.ones_like(measured_s))
    design = np.stack(parts, axis=1)
    # what the least factors explain already is taken off; never below 0, which nothing could fit
    found = _robust(design, measured_s, np.minimum(base, measured_s))
    has_fixed = len(parts) == 2 + communicates
    return Fitted(
        computation=min(LEAST + float(found[0]), MOST),
        communication=min(LEAST + float(found[1]), MOST) if communicates else None,
        fixed_s=min(float(found[-1]), MOST_S) if has_fixed else 0.0,
    )


def left_out_s(columns: TimeColumns, measured_s: F64) -> F64:
    """Return the time of every plan by the factors that all others give, (n,) seconds."""
    count = len(measured_s)
    result = np.empty(count)
    for k in range(count):
        rest = np.arange(count) != k
        others = TimeColumns(
            computation=columns.computation[rest], communication=columns.communication[rest]
        )
        result[k] = fit_times(others, measured_s[rest]).times_s(columns)[k]
    return result


def fit_bytes(predicted: F64, counted: F64) -> float:
    """Return the factor of memory: the median ratio, at most MOST; few odd plans do not move it.

    Most stages are predicted within a percent and a few are far above; those say something of
    their kind of plan and nothing of the others.
    """
    return min(float(np.median(counted / predicted)), MOST)


def _robust(design: F64, target: F64, base: F64) -> F64:
    """Return x >= 0 for base + design @ x ~ target, by Huber's weights of relative errors."""
    weights = np.ones_like(target)
    found = np.zeros(design.shape[1])
    for _ in range(_TURNS):
        before = found
        found = nonnegative_fit(design, target - base, weights / target)
        errors = np.abs((base + design @ found) / target - 1.0)
        # 1.4826 makes a deviation of normal errors of their median; below 1e-4 all are good
        limit = _HUBER * max(1.4826 * float(np.median(errors)), 1e-4)
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
        if np.allclose(found, before, rtol=1e-6, atol=1e-12):
            break
    return found

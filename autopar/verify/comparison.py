"""Predicted against measured: errors, ranks, and how sure they are after so few rounds.

A round starts every plan once, so what disturbs the machine for a while disturbs neighbours alike.
Intervals come from resampling rounds (the same for all plans) and steps inside them; with fewer
than six rounds they understate what another day would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.verify.measured import MeasuredPlan

__all__ = [
    "NUM_RESAMPLES",
    "Comparison",
    "Row",
    "compare",
    "interval_of",
    "ranks_of",
    "resampled_s",
    "spearman",
]

F64 = NDArray[np.float64]

NUM_RESAMPLES = 1000
_SEED = 20240617  # any; the same figures for the same runs
_ENDS = (2.5, 97.5)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan: predicted, measured, and the ranks of both, 1 the fastest."""

    plan: MeasuredPlan
    measured_s: float
    """Median of the steps of all rounds."""
    interval_s: tuple[float, float]
    """95 % interval of the median."""
    error: float
    """predicted / measured - 1"""
    predicted_rank: float
    measured_rank: float
    predicted_bytes: int
    """Allocated on the fullest stage."""
    peak_bytes: int | None
    """Most on a rank; None where it was not said."""

    @property
    def memory_error(self) -> float | None:
        """predicted / counted - 1; None where nothing was counted."""
        return None if self.peak_bytes is None else self.predicted_bytes / self.peak_bytes - 1.0


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All plans and what follows from them together."""

    rows: tuple[Row, ...]
    """As predicted, the fastest first."""
    median_error: float
    """Median of |error|."""
    median_error_interval: tuple[float, float]
    worst_error: float
    """The error that is largest in size."""
    spearman: float | None
    """Rank correlation of predicted and measured times; None for one plan, or equal ones."""
    spearman_interval: tuple[float, float] | None
    best_predicted: str
    best_measured: str
    regret: float
    """How much longer the predicted best takes than the measured best, as a share."""
    regret_interval: tuple[float, float]
    spread: float
    """Longest over shortest measured time: how much there was to rank."""
    noise: float
    """Median over plans of half an interval over its median."""
    median_memory_error: float | None
    """Median of |memory error|."""


def compare(plans: Sequence[MeasuredPlan]) -> Comparison:
    """Return the comparison of plans, at least one, each with at least one run."""
    order = sorted(plans, key=lambda plan: plan.predicted_s)
    predicted = np.array([plan.predicted_s for plan in order])
    measured = np.array([_median(plan) for plan in order])
    drawn = resampled_s(order)
    low, high = np.percentile(drawn, _ENDS, axis=0)
    errors = predicted / measured - 1.0
    predicted_ranks, measured_ranks = ranks_of(predicted), ranks_of(measured)
    rows = tuple(
        Row(
            plan=plan,
            measured_s=float(measured[k]),
            interval_s=(min(float(low[k]), measured[k]), max(float(high[k]), measured[k])),
            error=float(errors[k]),
            predicted_rank=float(predicted_ranks[k]),
            measured_rank=float(measured_ranks[k]),
            predicted_bytes=max(plan.predicted_bytes),
            peak_bytes=max(plan.peak_bytes, default=None),
        )
        for k, plan in enumerate(order)
    )
    correlation = spearman(predicted, measured)
    others = [spearman(predicted, row) for row in drawn]
    known = [value for value in others if value is not None]
    regret = float(measured[0] / measured.min() - 1.0)
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None]
    return Comparison(
        rows=rows,
        median_error=float(np.median(np.abs(errors))),
        median_error_interval=interval_of(np.median(np.abs(predicted / drawn - 1.0), axis=1)),
        worst_error=float(errors[np.argmax(np.abs(errors))]),
        spearman=correlation,
        spearman_interval=None if correlation is None else interval_of(np.array(known)),
        best_predicted=order[0].name,
        best_measured=order[int(np.argmin(measured))].name,
        regret=regret,
        regret_interval=interval_of(drawn[:, 0] / drawn.min(axis=1) - 1.0),
        spread=float(measured.max() / measured.min()),
        noise=float(np.median((high - low) / 2.0 / measured)),
        median_memory_error=float(np.median(memory)) if memory else None,
    )


def resampled_s(plans: Sequence[MeasuredPlan], count: int = NUM_RESAMPLES) -> F64:
    """Return the median step of every plan in every resample, in seconds, (count, plans).

    Each resample draws rounds with replacement, the same for all plans, and then steps of them.
    """
    generator = np.random.default_rng(_SEED)
    found = np.empty((count, len(plans)))
    fewest = min(len(plan.rounds) for plan in plans)
    for n in range(count):
        turns = generator.integers(0, fewest, fewest)
        for k, plan in enumerate(plans):
            steps = [np.asarray(plan.rounds[t].step_s) for t in turns]
            picked = [s[generator.integers(0, len(s), len(s))] for s in steps]
            found[n, k] = np.median(np.concatenate(picked))
    return found


def ranks_of(values: F64) -> F64:
    """Return the ranks of values from 1, equal values sharing the mean of theirs."""
    below = (values[None, :] < values[:, None]).sum(axis=1)
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    return np.asarray(below + (equal + 1) / 2.0, dtype=np.float64)


def spearman(first: F64, second: F64) -> float | None:
    """Return the rank correlation of two columns; None where one of them has a single rank."""
    left, right = (ranks_of(values) for values in (first, second))
    left, right = left - left.mean(), right - right.mean()
    scale = float(np.sqrt((left @ left) * (right @ right)))
    return float(left @ right) / scale if scale > 0.0 else None


def interval_of(values: F64) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentile."""
    low, high = np.percentile(values, _ENDS)
    return float(low), float(high)


def _median(plan: MeasuredPlan) -> float:
    return float(np.median(np.concatenate([run.step_s for run in plan.rounds])))

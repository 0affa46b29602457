"""Predicted against measured: errors, ranks, and their intervals from few rounds.

A round starts every plan once, so a temporary disturbance of the machine affects all plans of the
round. Intervals come from resampling rounds (common to all plans) and steps inside them. With fewer
than six rounds they underestimate the variation between days.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.arrays import F64
from autopar.documents.json import load_object
from autopar.documents.plan import PlanDocument, StageEntry
from autopar.errors import DocumentError
from autopar.records import Record, shorten

# --------------------------------------------------------------------------------------------------
# Measured samples of the plans, and their predictions.


class RunSamples(Record):
    """Samples of one start of one plan."""

    step_s: tuple[float, ...]
    """Seconds of every timed step, on the slowest rank."""
    peak_bytes: tuple[int, ...]
    """Peak bytes by rank; empty if unknown."""
    peak_source: str = "counted"


class MeasuredPlan(Record):
    """A plan with its prediction and its runs, one per round."""

    name: str
    label: str
    chosen: str
    predicted_s: float
    predicted_bytes: tuple[int, ...]
    """Predicted peak bytes by stage, comparable with `peak_bytes`."""
    rounds: tuple[RunSamples, ...]
    strategy: Mapping[str, Any]
    """Content of the strategy file."""
    interval_s: tuple[float, float] | None = None
    """Interval of the predicted step time by the spread of the profiles, s; None if unknown."""

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes by stage, maximum over ranks and rounds; empty if unknown."""
        columns = [run.peak_bytes for run in self.rounds if run.peak_bytes]
        if not columns:
            return ()
        by_rank = [max(values) for values in zip(*columns, strict=True)]
        # Ranks of a stage are consecutive.
        each = len(by_rank) // len(self.predicted_bytes)
        return tuple(
            max(by_rank[stage * each : (stage + 1) * each])
            for stage in range(len(self.predicted_bytes))
        )

    @property
    def peak_source(self) -> str:
        """Source of the peaks: `allocated` by the device's allocator, or `counted`."""
        return self.rounds[0].peak_source


def read_priced(path: Path) -> tuple[PlanDocument, float]:
    """Return the document of `autopar-search --evaluate --json`, and its step time in seconds.

    Raises DocumentError: the document has no step time.
    """
    document = PlanDocument.read(path)
    if not document.step_time_s:
        raise DocumentError(
            path,
            f"expected a time above 0, got {shorten(document.step_time_s)}",
            key="step_time_s",
            remedy="Run again with --no-resume",
        )
    return document, document.step_time_s


def predicted_bytes(path: Path, priced: PlanDocument, peak_source: str) -> tuple[int, ...]:
    """Return the predicted peak bytes of each stage.

    A count includes only the tensors of the model, so `fixed` (receive buffers and, for estimates,
    communicators) is excluded. A CUDA allocator also holds the receive buffers, so everything is
    included there: memory of communicators outside the allocator is predicted for estimates only.

    Raises DocumentError: the document lacks the memory of a stage.
    """
    found = [_peak_bytes(stage, peak_source) for stage in priced.stages]
    sizes = tuple(size for size in found if size)
    if not sizes or len(sizes) < len(found):
        raise DocumentError(
            path,
            "expected allocated_bytes and memory_bytes of every stage, got "
            f"{shorten([stage.content() for stage in priced.stages])}",
            key="prediction.stages",
            remedy="Run again with --no-resume",
        )
    return sizes


def _peak_bytes(stage: StageEntry, peak_source: str) -> int | None:
    if peak_source != "counted":
        return stage.allocated_bytes
    return stage.tensor_bytes if "fixed" in stage.memory_bytes else None


def read_run(path: Path, num_ranks: int) -> RunSamples:
    """Return the samples in a document of `profile-plan --mode run --json`.

    Raises DocumentError: it has no times, or peaks of another number of ranks.
    """
    data = load_object(path).data
    times, peaks = data.get("step_time_s"), data.get("peak_bytes") or []
    if not isinstance(times, list) or not times or not all(map(_is_time, times)):
        raise DocumentError(
            path,
            f"expected times above 0, got {shorten(times)}",
            key="step_time_s",
            remedy="Run again with --no-resume",
        )
    if not isinstance(peaks, list) or len(peaks) not in (0, num_ranks):
        raise DocumentError(
            path,
            f"expected a number for each of {num_ranks} ranks, got {shorten(peaks)}",
            key="peak_bytes",
        )
    known = all(isinstance(peak, int) and peak > 0 for peak in peaks)
    return RunSamples(
        step_s=tuple(float(time) for time in times),
        peak_bytes=tuple(peaks) if known else (),
        peak_source=str(data.get("peak_source", "counted")),
    )


def _is_time(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value > 0.0


# --------------------------------------------------------------------------------------------------
# The comparison: errors, order, intervals.


NUM_RESAMPLES = 1000
_SEED = 20240617  # arbitrary, but fixed so that equal runs give equal figures
_ENDS = (2.5, 97.5)


class ComparedPlan(Record):
    """One plan: predicted and measured values, and the rank of both, 1 for the fastest."""

    plan: MeasuredPlan
    measured_s: float
    """Median of the steps of all rounds, seconds."""
    interval_s: tuple[float, float]
    """95 % interval of the median, seconds."""
    error: float
    """predicted / measured - 1"""
    predicted_rank: float
    measured_rank: float
    predicted_bytes: int
    """Predicted peak bytes of the peak stage."""
    peak_bytes: int | None
    """Largest peak of a rank, bytes; None if unknown."""

    @property
    def memory_error(self) -> float | None:
        """predicted / counted - 1; None if no memory was counted."""
        return None if self.peak_bytes is None else self.predicted_bytes / self.peak_bytes - 1.0


class Comparison(Record):
    """All plans and their joint statistics."""

    plans: tuple[ComparedPlan, ...]
    """Plans in predicted order, fastest first."""
    median_error: float
    """Median of |error|."""
    median_error_interval: tuple[float, float]
    worst_error: float
    """Signed error of the largest magnitude."""
    spearman: float | None
    """Rank correlation of predicted and measured times; None for one plan, or equal times."""
    spearman_interval: tuple[float, float] | None
    best_predicted: str
    best_measured: str
    regret: float
    """Measured time of the predicted best over that of the measured best, minus 1."""
    regret_interval: tuple[float, float]
    measured_spread: float
    """Longest over shortest measured time: the range to be ranked."""
    measured_noise: float
    """Median over plans of half the interval over the measured time."""
    median_memory_error: float | None
    """Median of |memory error|; None if no memory was counted."""


def compare(plans: Sequence[MeasuredPlan]) -> Comparison:
    """Return the comparison of plans, at least one, each with at least one run."""
    order = sorted(plans, key=lambda plan: plan.predicted_s)
    predicted = np.array([plan.predicted_s for plan in order])
    measured = np.array(
        [np.median(np.concatenate([run.step_s for run in plan.rounds])) for plan in order]
    )
    drawn = resampled_s(order)
    low, high = np.percentile(drawn, _ENDS, axis=0)
    errors = predicted / measured - 1.0
    predicted_ranks, measured_ranks = ranks_of(predicted), ranks_of(measured)
    rows = tuple(
        ComparedPlan(
            plan=plan,
            measured_s=float(measured[k]),
            # Resamples of few rounds may all miss the median of all steps.
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
    # Plans are in predicted order, so the first is the predicted best.
    regret = float(measured[0] / measured.min() - 1.0)
    memory = [abs(row.memory_error) for row in rows if row.memory_error is not None]
    return Comparison(
        plans=rows,
        median_error=float(np.median(np.abs(errors))),
        median_error_interval=interval_of(np.median(np.abs(predicted / drawn - 1.0), axis=1)),
        worst_error=float(errors[np.argmax(np.abs(errors))]),
        spearman=correlation,
        spearman_interval=None if correlation is None else interval_of(np.array(known)),
        best_predicted=order[0].name,
        best_measured=order[int(np.argmin(measured))].name,
        regret=regret,
        regret_interval=interval_of(drawn[:, 0] / drawn.min(axis=1) - 1.0),
        measured_spread=float(measured.max() / measured.min()),
        measured_noise=float(np.median((high - low) / 2.0 / measured)),
        median_memory_error=float(np.median(memory)) if memory else None,
    )


def resampled_s(plans: Sequence[MeasuredPlan], count: int = NUM_RESAMPLES) -> F64:
    """Return the median step of every plan in every resample, seconds, shape (count, plans).

    Each resample draws rounds with replacement, common to all plans, and then steps of them.
    """
    generator = np.random.default_rng(_SEED)
    found = np.empty((count, len(plans)))
    # Rounds are drawn jointly, so only rounds present in all plans count.
    fewest = min(len(plan.rounds) for plan in plans)
    for n in range(count):
        turns = generator.integers(0, fewest, fewest)
        for k, plan in enumerate(plans):
            steps = [np.asarray(plan.rounds[t].step_s) for t in turns]
            picked = [s[generator.integers(0, len(s), len(s))] for s in steps]
            found[n, k] = np.median(np.concatenate(picked))
    return found


def ranks_of(values: F64) -> F64:
    """Return the ranks of values from 1; equal values share their mean rank."""
    below = (values[None, :] < values[:, None]).sum(axis=1)
    # Equal values have the ranks below + 1 to below + equal.
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    return np.asarray(below + (equal + 1) / 2.0, dtype=np.float64)


def spearman(first: F64, second: F64) -> float | None:
    """Return the rank correlation of two columns; None if all values of one are equal."""
    left, right = (ranks_of(values) for values in (first, second))
    left, right = left - left.mean(), right - right.mean()
    scale = float(np.sqrt((left @ left) * (right @ right)))
    # Pearson's correlation of ranks, which allows for equal ranks.
    return float(left @ right) / scale if scale > 0.0 else None


def interval_of(values: F64) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentile."""
    low, high = np.percentile(values, _ENDS)
    return float(low), float(high)

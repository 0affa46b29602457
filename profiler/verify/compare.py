"""Predicted against measured: errors, ranks, and how sure they are after so few rounds.

A round starts every plan once, so what disturbs the machine for a while disturbs neighbours alike.
Intervals come from resampling rounds (the same for all plans) and steps inside them; with fewer
than six rounds they understate what another day would show.
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
# What the runs of the plans found, beside what was predicted of them.


class RunSamples(Record):
    """One start of one plan."""

    step_s: tuple[float, ...]
    """Of every timed step, the slowest rank's."""
    peak_bytes: tuple[int, ...]
    """By rank; empty where it was not said."""
    peak_source: str = "counted"


class MeasuredPlan(Record):
    """A plan with its prediction and its runs, one per round."""

    name: str
    label: str
    chosen: str
    predicted_s: float
    predicted_bytes: tuple[int, ...]
    """By stage, of what `peak_bytes` holds."""
    rounds: tuple[RunSamples, ...]
    strategy: Mapping[str, Any]
    """The strategy file."""
    interval_s: tuple[float, float] | None = None
    """Of the prediction, by the spread of the profiles."""

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """By stage: the most on one of its ranks in any round; empty where it was not said."""
        columns = [run.peak_bytes for run in self.rounds if run.peak_bytes]
        if not columns:
            return ()
        by_rank = [max(values) for values in zip(*columns, strict=True)]
        # ranks of a stage are consecutive
        each = len(by_rank) // len(self.predicted_bytes)
        return tuple(
            max(by_rank[stage * each : (stage + 1) * each])
            for stage in range(len(self.predicted_bytes))
        )

    @property
    def peak_source(self) -> str:
        """Who said the peaks: `allocated` by the device's allocator, or `counted`."""
        return self.rounds[0].peak_source


def read_priced(path: Path) -> tuple[PlanDocument, float]:
    """Return what `autopar-search --evaluate --json` wrote, and the step time in it.

    Raises
    ------
    DocumentError : the plan has no price.
    """
    document = PlanDocument.read(path)
    if not document.step_time_s:
        raise DocumentError(
            path,
            f"expected a time above 0, got {shorten(document.step_time_s)}",
            key="step_time_s",
            remedy="run again with --no-resume",
        )
    return document, document.step_time_s


def predicted_bytes(path: Path, priced: PlanDocument, peak_source: str) -> tuple[int, ...]:
    """Return what is predicted of the peak of each stage, in bytes.

    A count has the tensors of the model alone, so `fixed` (receive buffers and, of estimates,
    communicators) is left out. A CUDA allocator has the receive buffers too: there all counts, as
    what communicators take beside the allocator is predicted of estimates only.

    Raises
    ------
    DocumentError : the price says nothing of a stage.
    """
    found = [_peak_bytes(stage, peak_source) for stage in priced.stages]
    sizes = tuple(size for size in found if size)
    if not sizes or len(sizes) < len(found):
        raise DocumentError(
            path,
            "expected allocated_bytes and memory_bytes of every stage, got "
            f"{shorten([stage.content() for stage in priced.stages])}",
            key="prediction.stages",
            remedy="run again with --no-resume",
        )
    return sizes


def _peak_bytes(stage: StageEntry, peak_source: str) -> int | None:
    if peak_source != "counted":
        return stage.allocated_bytes
    return stage.tensor_bytes if "fixed" in stage.memory_bytes else None


def read_run(path: Path, num_ranks: int) -> RunSamples:
    """Return what `profile-plan --mode run --json` wrote.

    Raises
    ------
    DocumentError : it has no times, or figures of another number of ranks.
    """
    data = load_object(path).data
    times, peaks = data.get("step_time_s"), data.get("peak_bytes") or []
    if not isinstance(times, list) or not times or not all(map(_is_time, times)):
        raise DocumentError(
            path,
            f"expected times above 0, got {shorten(times)}",
            key="step_time_s",
            remedy="run again with --no-resume",
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
_SEED = 20240617  # any; the same figures for the same runs
_ENDS = (2.5, 97.5)


class ComparedPlan(Record):
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


class Comparison(Record):
    """All plans and what follows from them together."""

    plans: tuple[ComparedPlan, ...]
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
    measured_spread: float
    """Longest over shortest measured time: how much there was to rank."""
    measured_noise: float
    """Median over plans of half an interval over its median."""
    median_memory_error: float | None
    """Median of |memory error|."""


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
            # resamples of few rounds may all miss the median of all steps
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
    # in the order of predictions the first is the predicted best
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
    """Return the median step of every plan in every resample, in seconds, (count, plans).

    Each resample draws rounds with replacement, the same for all plans, and then steps of them.
    """
    generator = np.random.default_rng(_SEED)
    found = np.empty((count, len(plans)))
    # the same rounds are drawn of all plans, so all must have them
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
    # equal values have the places below + 1 to below + equal: their mean
    equal = (values[None, :] == values[:, None]).sum(axis=1)
    return np.asarray(below + (equal + 1) / 2.0, dtype=np.float64)


def spearman(first: F64, second: F64) -> float | None:
    """Return the rank correlation of two columns; None where one of them has a single rank."""
    left, right = (ranks_of(values) for values in (first, second))
    left, right = left - left.mean(), right - right.mean()
    scale = float(np.sqrt((left @ left) * (right @ right)))
    # Pearson's correlation of ranks, which allows for equal ones
    return float(left @ right) / scale if scale > 0.0 else None


def interval_of(values: F64) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentile."""
    low, high = np.percentile(values, _ENDS)
    return float(low), float(high)

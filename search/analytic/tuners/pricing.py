"""Prices points of a space, and says how good they are as one number that a tuner can learn from.

A point that cannot run has no time, but a tuner needs a number for it. Costs of points that run
are in (0, 1): their figure x against a scale r of the same unit, as x / (x + r). A point that
lacks memory costs 1 to 1.1, by the share that it lacks, so that a tuner is led to smaller ones;
any other refusal costs 1.2, since the order of the checks says nothing of how far off a point is.
So no refused point looks better than one that runs, and none is so bad that differences between
good ones vanish beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search.analytic.calculon.documents import Application, System
from search.analytic.calculon.engine import open_model, unpack_execution
from search.analytic.calculon.exploration import Found, Objective
from search.analytic.calculon.quirks import Quirks
from search.analytic.calculon.reasons import REASONS
from search.analytic.tuners.domains import TuningSpace

__all__ = ["Priced", "Pricer", "Record"]

_LACKS_FIRST, _LACKS_SECOND = (
    REASONS.index(f"Mem tier{tier} needs more than it has") for tier in (1, 2)
)


@dataclass(frozen=True, kw_only=True)
class Priced:
    """Points with their figures, in the order they were asked for."""

    executions: NDArray[Any]
    outcomes: NDArray[Any]
    scores: NDArray[np.float64]
    """Shape (points, 2): what counts and what decides ties, smaller is better; inf if refused."""


@dataclass(frozen=True, kw_only=True)
class Pricer:
    """A model, a space and what is asked of it; can be sent to another process."""

    application: Application
    system: System
    space: TuningSpace
    objective: Objective
    compat: bool | Quirks = False
    threads: int = 1

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_model"}

    @cached_property
    def _model(self) -> Any:
        return open_model(self.application, self.system, self.compat)

    @cached_property
    def scale(self) -> float:
        """Return what costs are relative to: the step at the machine's peak, or its memory.

        Seconds per sample, seconds or bytes, by objective; a rough figure is enough.
        """
        if self.objective == "memory":
            return self.system.memory(1)[0] or 1.0
        peak_per_s = max(engine.tflops for engine in self.system.matrix.values()) * 1e12
        passes = 3 if self.space.training else 1
        flops = 2.0 * passes * self.application.num_parameters * self.application.seq_size
        sample_s = flops / (self.space.num_procs * peak_per_s)
        batches = next(d.values for d in self.space.domains if d.name == "batch_size")
        return sample_s * (int(batches[-1]) if self.objective == "time" else 1)

    def price(self, digits: NDArray[np.int64]) -> Priced:
        """Return points, given as rows of digits, with their figures."""
        executions = self.space.executions(digits)
        outcomes, _ = self._model.evaluate_many(executions, self.threads, False)
        time_s, first_bytes = outcomes["total_time_s"], outcomes["tier1_bytes"]
        sample_s = time_s / executions["batch_size"]
        order = {
            "rate": (sample_s, first_bytes),
            "time": (time_s, first_bytes),
            "memory": (first_bytes, sample_s),
        }[self.objective]
        scores = np.stack(order, axis=1)
        scores[outcomes["ok"] == 0] = np.inf
        return Priced(executions=executions, outcomes=outcomes, scores=scores)

    def costs(self, priced: Priced) -> NDArray[np.float64]:
        """Return what a tuner minimises; the head of this file says how refusals count."""
        figures, outcomes = priced.scores[:, 0], priced.outcomes
        costs = np.full(len(figures), 1.2)
        for tier, code in ((1, _LACKS_FIRST), (2, _LACKS_SECOND)):
            lacks = outcomes["reason"] == code
            need = outcomes[f"tier{tier}_bytes"][lacks]
            has = self.system.memory(1 if tier == 1 else 2)[0]
            costs[lacks] = 1.0 + 0.1 * (1.0 - has / need)
        runs = outcomes["ok"] != 0
        costs[runs] = figures[runs] / (figures[runs] + self.scale)
        return costs


@dataclass(kw_only=True)
class Record:
    """What came of the points that were priced so far; records of parts add up to one."""

    evaluations: int = 0
    counts: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(len(REASONS), dtype=np.int64)
    )
    """Points by the code of the reason why they are refused, 0 for those that run."""
    best: Found | None = None
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    """(evaluations, score, tie) whenever a better point was found."""

    @property
    def last(self) -> tuple[float, float]:
        """Return the score and tie of the best point."""
        return self.steps[-1][1:] if self.steps else (np.inf, np.inf)

    def add(self, priced: Priced) -> None:
        """Take in points in their order; of equal ones the first is kept."""
        first = priced.scores[:, 0]
        least = np.minimum.accumulate(np.minimum(first, self.last[0]))
        better = None
        for row in np.flatnonzero((first == least) & np.isfinite(first)).tolist():
            score = (float(first[row]), float(priced.scores[row, 1]))
            if score < self.last:
                self.steps.append((self.evaluations + row + 1, *score))
                better = row
        if better is not None:
            outcome = priced.outcomes[better]
            self.best = Found(
                execution=unpack_execution(priced.executions[better]),
                **{
                    name: float(outcome[name])
                    for name in ("total_time_s", "sample_rate_per_s", "tier1_bytes", "tier2_bytes")
                },
            )
        self.evaluations += len(first)
        self.counts += np.bincount(priced.outcomes["reason"], minlength=len(REASONS))

    def join(self, part: Record) -> None:
        """Take in the record of the points that come after these."""
        for count, *score in part.steps:
            if tuple(score) < self.last:
                self.steps.append((self.evaluations + count, score[0], score[1]))
                self.best = part.best
        self.evaluations += part.evaluations
        self.counts += part.counts

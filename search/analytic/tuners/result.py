"""What a tuner found, and how it got there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from search.analytic.calculon.exploration import Found, Objective
from search.analytic.calculon.reasons import REASONS
from search.analytic.tuners.domains import TuningSpace
from search.analytic.tuners.pricing import Record

__all__ = ["TraceStep", "TuningResult", "result_of"]


@dataclass(frozen=True, kw_only=True)
class TraceStep:
    """After so many evaluations, this was the best figure of the objective."""

    evaluations: int
    value: float
    """Samples per second, seconds or bytes, by objective."""


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """The best point of those that were priced; `best` is None where none of them runs."""

    tuner: str
    objective: Objective
    best: Found | None
    evaluations: int
    space_size: int
    feasible: int
    refused: Mapping[str, int]
    """Points by the reason why they cannot run, most frequent first."""
    trace: tuple[TraceStep, ...]
    """A step whenever the objective got better."""

    @property
    def feasible_share(self) -> float:
        """Return the share of priced points that can run."""
        return self.feasible / self.evaluations if self.evaluations else 0.0

    @property
    def exhaustive(self) -> bool:
        """Return whether nothing in the space can be better."""
        # points drawn at random are drawn once each; those that learn may ask for one again
        every = self.tuner == "random" and self.evaluations >= self.space_size
        return every or self.tuner == "exhaustive"


def result_of(tuner: str, objective: Objective, space: TuningSpace, record: Record) -> TuningResult:
    """Return the answer that a record holds."""
    trace: list[TraceStep] = []
    last = float("inf")
    for evaluations, score, _ in record.steps:
        if score < last:  # not only the tie
            value = 1.0 / score if objective == "rate" else score
            trace.append(TraceStep(evaluations=evaluations, value=value))
            last = score
    refused = {REASONS[code]: int(n) for code, n in enumerate(record.counts) if code and n}
    return TuningResult(
        tuner=tuner,
        objective=objective,
        best=record.best,
        evaluations=record.evaluations,
        space_size=space.size,
        feasible=int(record.counts[0]),
        refused=dict(sorted(refused.items(), key=lambda item: -item[1])),
        trace=tuple(trace),
    )

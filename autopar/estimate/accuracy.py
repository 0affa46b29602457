"""How far estimated step times were from published runs, and what that says of the next estimate.

`hardware_configs/accuracy/published.json` is written by `python -m benchmarks.ledger --write`: for
every class of runs (the trainer's stack, experts or none, the cluster's own figures known or not)
the spread of measured over estimated time. Here an estimate gets its interval from it, and a
comparison of two plans its probability. Nothing here prices a plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from autopar.documents import catalog
from autopar.documents.checks import StrictObject, Value, published, validate_document
from autopar.documents.json import load_object
from autopar.records import dataclass

__all__ = [
    "COVERAGE",
    "Accuracy",
    "AccuracyDocument",
    "RunClass",
    "load_accuracy",
    "probability_faster",
    "quantile_interval",
    "read_accuracy",
]

COVERAGE = 0.90
"""Share of runs whose measured time the interval of their estimate contains."""

_FEW_SOURCES = 3
"""Fewer say how estimates miss these clusters, not how they miss the next one: left out of the
classes, BLOOM's rows were all but outside of an interval from two tuned clusters."""
_MOST = 100.0
"""No estimate is further off."""


def _within(least: float) -> Value:
    def legal(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return least <= value <= _MOST

    schema = {"type": "number", "minimum": least, "maximum": _MOST}
    return Value(f"a number from {least:g} to {_MOST:g}", legal, schema)


_Ratio = Annotated[float, _within(1.0 / _MOST)]
_Spread = Annotated[float, _within(0.0)]


class _Class(StrictObject):
    """One class of published runs."""

    stack: str
    experts: bool
    site_known: bool
    rows: int
    sources: int
    low: _Ratio
    """Of measured over estimated time, the lower end of the interval."""
    high: _Ratio
    plan_spread: _Spread
    """Standard deviation of ln(measured / estimated) among plans of one model on one cluster."""


@published("accuracy")
class AccuracyDocument(StrictObject):
    """Errors of estimated step times, by class of runs."""

    format: Literal["autopar-accuracy"]
    version: Literal[1]
    source: str
    classes: list[_Class]


@dataclass(frozen=True, kw_only=True)
class RunClass:
    """The errors of one class of runs."""

    stack: str
    experts: bool
    site_known: bool
    rows: int
    sources: int
    low: float
    high: float
    plan_spread: float

    def interval_s(self, estimated_s: float) -> tuple[float, float]:
        """Return the seconds between which 9 of 10 measured steps lie."""
        return self.low * estimated_s, self.high * estimated_s


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """All classes, and the choice among them."""

    classes: tuple[RunClass, ...]
    path: Path

    def of(self, stack: str, *, experts: bool, site_known: bool) -> RunClass:
        """Return the class that is nearest to a job: same stack and experts, else the widest.

        What was never measured is as uncertain as the worst that was, and so is the next cluster
        where all runs of a class are of one or two.
        """
        same = [c for c in self.classes if c.stack == stack and c.experts == experts]
        exact = [c for c in same if c.site_known == site_known]
        # a known site never makes an estimate less certain
        candidates = exact or (same if site_known else [c for c in same if not c.site_known])
        if not candidates:
            candidates = [c for c in self.classes if c.experts == experts] or [*self.classes]
        found = max(candidates, key=_width)
        if found.sources >= _FEW_SOURCES:
            return found
        others = [c for c in self.classes if c.sources > 1]
        alike = [c for c in others if c.experts == experts and c.site_known == site_known]
        widest = max([found, *alike], key=_width)
        return replace(found, low=min(found.low, widest.low), high=max(found.high, widest.high))


def _width(entry: RunClass) -> float:
    return entry.high / entry.low


def load_accuracy() -> Accuracy:
    """Return the shipped errors; raises InputError."""
    return read_accuracy(catalog.find_document("accuracy", "accuracy file", "published"))


def read_accuracy(path: Path) -> Accuracy:
    """Return the errors of a file; raises DocumentError naming file, key and value."""
    document: Any = validate_document(AccuracyDocument, path, load_object(path).data)
    classes = (RunClass(**dict(entry)) for entry in document.classes)
    return Accuracy(classes=tuple(classes), path=path)


def probability_faster(one_s: float, other_s: float, plan_spread: float) -> float:
    """Return the probability that the plan of `one_s` is the faster one.

    Errors of the machine and the trainer are in both estimates and cancel; each plan has its own
    besides, of standard deviation `plan_spread` in the logarithm.
    """
    if plan_spread == 0.0:
        return 0.5 if one_s == other_s else float(one_s < other_s)
    gap = math.log(other_s / one_s) / (plan_spread * math.sqrt(2.0))
    return 0.5 * (1.0 + math.erf(gap / math.sqrt(2.0)))


def quantile_interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the interval that holds 90 % of ratios, never narrower than they are few.

    The quantiles at (n + 1) p of n values, so that the next value lies inside with that share; with
    fewer than 19 values the ends are the extremes, moved out by what the next one may add.
    """
    values = sorted(math.log(ratio) for ratio in ratios)
    number = len(values)
    tail = (1.0 - COVERAGE) / 2.0
    ends = []
    for side in (tail, 1.0 - tail):
        place = side * (number + 1) - 1
        index = min(max(place, 0.0), number - 1.0)
        below = math.floor(index)
        above = min(below + 1, number - 1)
        found = values[below] + (index - below) * (values[above] - values[below])
        # beyond the extremes: as far again as the missing share of a place
        if place < 0 or place > number - 1:
            spread = (values[-1] - values[0]) / max(1, number - 1)
            found += math.copysign(spread * abs(place - index), side - 0.5)
        ends.append(found)
    return math.exp(ends[0]), math.exp(ends[1])

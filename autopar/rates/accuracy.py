"""How far estimated step times were from published runs, and what that says of the next estimate.

`hardware_configs/accuracy/published.json` is written by `python -m benchmarks.ledger --write`: for
every class of runs (the trainer's stack, experts or none, the cluster's own figures known or not)
the spread of measured over estimated time. Here an estimate gets its interval from it, and a
comparison of two plans its probability. Nothing here prices a plan.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from autopar.documents import catalog
from autopar.documents.checks import published
from autopar.documents.json import load_object, read_record
from autopar.records import KeyFault, Record, number, replace, whole_number
from autopar.sources import Source, stacks_of

COVERAGE = 0.90
"""Share of runs whose measured time the interval of their estimate contains."""

_FEW_SOURCES = 3
"""Fewer say how estimates miss these clusters, not how they miss the next one: left out of the
classes, BLOOM's rows were all but outside of an interval from two tuned clusters."""
_MOST = 100.0
"""No estimate is further off."""


_Ratio = Annotated[float, number(1.0 / _MOST, _MOST)]
_Spread = Annotated[float, number(0.0, _MOST)]
_Count = Annotated[int, whole_number(1)]


class RunClass(Record):
    """The errors of one class of published runs."""

    stack: str
    experts: bool
    site_known: bool
    rows: _Count
    sources: _Count
    low: _Ratio
    """Of measured over estimated time, the lower end of the interval."""
    high: _Ratio
    plan_spread: _Spread
    """Standard deviation of ln(measured / estimated) among plans of one model on one cluster."""

    def __post_init__(self) -> None:
        if self.low > self.high:
            problem = f"the value is {self.low:g}, expected at most {self.high:g}"
            raise KeyFault("low", problem)

    def interval_s(self, estimated_s: float) -> tuple[float, float]:
        """Return the seconds between which 9 of 10 measured steps lie."""
        return self.low * estimated_s, self.high * estimated_s


@published("accuracy")
class AccuracyDocument(Record):
    """Errors of estimated step times, by class of runs."""

    format: Literal["autopar-accuracy"]
    version: Literal[1]
    source: str
    classes: Annotated[tuple[RunClass, ...], Meta(min_length=1)]


class Accuracy(Record):
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


def class_of_sources(sources: Iterable[Source], *, experts: bool) -> RunClass:
    """Return the class of estimates that were made from these documents; raises InputError.

    The stack is the document of its role; estimates that do not name one are of the widest class.
    A site of nominal figures alone is as unknown as none.
    """
    sources = tuple(sources)
    stacks = stacks_of(sources)
    site = next((source for source in sources if source.role == "site"), None)
    # files of two trainers are of neither
    return _shipped().of(
        stacks[0] if len(stacks) == 1 else "",
        experts=experts,
        site_known=site is not None and not site.estimated,
    )


@cache
def _shipped() -> Accuracy:
    return load_accuracy()


def load_accuracy() -> Accuracy:
    """Return the shipped errors; raises InputError."""
    return read_accuracy(catalog.find_document("accuracy", "accuracy file", "published"))


def read_accuracy(path: Path) -> Accuracy:
    """Return the errors of a file; raises DocumentError naming file, key and value."""
    document = read_record(AccuracyDocument, path, load_object(path).data)
    return Accuracy(classes=document.classes, path=path)


def probability_faster(one_s: float, other_s: float, plan_spread: float) -> float:
    """Return the probability that the plan of `one_s` is the faster one.

    Errors of the machine and the trainer are in both estimates and cancel; each plan has its own
    besides, of standard deviation `plan_spread` in the logarithm.
    """
    if plan_spread == 0.0:
        return 0.5 if one_s == other_s else float(one_s < other_s)
    gap = math.log(other_s / one_s) / (plan_spread * math.sqrt(2.0))
    return 0.5 * (1.0 + math.erf(gap / math.sqrt(2.0)))


_ENOUGH = 19
"""Values from which on both quantiles lie between the least and the greatest."""
# fmt: off
_STUDENT = (
    6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833,
    1.812, 1.796, 1.782, 1.771, 1.761, 1.753, 1.746, 1.740,
)
# fmt: on
"""Quantile 0.95 of Student's t by degrees of freedom, from 1."""


def quantile_interval(
    ratios: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, float]:
    """Return the ends of the interval in which the next of these ratios lies with 90 %.

    The quantiles at (n + 1) p of n values; with weights, where the sum of weights up to a value is
    p of their sum and one mean weight. Fewer than 19 values do not show them: then at least
    mean +- t s sqrt(1 + 1/n) of the logarithms, which holds the next value of a normal error. One
    value says nothing of a spread, and the ends are the limits of the document.
    """
    number = len(ratios)
    if number <= 1:
        return 1.0 / _MOST, _MOST
    pairs = sorted(zip(map(math.log, ratios), weights or (1.0,) * number, strict=True))
    values = [value for value, _ in pairs]
    mean_weight = math.fsum(weight for _, weight in pairs) / number
    sums = list(accumulate(weight / mean_weight for _, weight in pairs))
    tail = (1.0 - COVERAGE) / 2.0
    low, high = (_at(values, sums, side * (number + 1)) for side in (tail, 1.0 - tail))
    if number < _ENOUGH:
        mean = math.fsum(values) / number
        square = math.fsum((value - mean) ** 2 for value in values) / (number - 1)
        reach = _STUDENT[number - 2] * math.sqrt(square * (1 + 1 / number))
        low, high = min(low, mean - reach), max(high, mean + reach)
    return math.exp(low), math.exp(high)


def _at(values: Sequence[float], sums: Sequence[float], place: float) -> float:
    """Return the value at a place among ascending sums, between two of them, or the nearest end."""
    above = bisect_left(sums, place)
    if above in (0, len(sums)):
        return values[min(above, len(sums) - 1)]
    share = (place - sums[above - 1]) / (sums[above] - sums[above - 1])
    return values[above - 1] + share * (values[above] - values[above - 1])

"""Reliability of peak intervals and OOM probabilities, each run judged with itself held out.

Takes ratios of measured over counted peaks from any source; counts nothing. Errors are those of
`autopar.price.oom_risk`: nine of ten within an interval about the median, Student's t beyond.
`benchmarks.memory_goldens --left-out` prints these results.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from autopar.price.oom_risk import probability_of_ratio
from benchmarks.intervals import Covered

__all__ = [
    "COVERAGE",
    "EDGES",
    "UNSEEN",
    "Ratio",
    "Reliable",
    "binned",
    "by_configuration",
    "classes_left_out",
    "configurations_left_out",
    "covered",
    "interval_of",
    "intervals_of",
    "likelihoods",
    "odds_table",
    "reliability",
]

UNSEEN = "few runs"
"""Kind of a launch that no measured run resembles."""
COVERAGE = 0.9
_LEAST = 9
"""Fewest values for an interval of nine tenths; smaller kinds use the pooled ones."""
EDGES = (0.0, 0.001, 0.01, 0.1, 0.3, 0.7, 0.9, 0.99, 0.999, 1.0)
"""Edges of the bins of probability."""
_REACH = 0.06
_STEPS = 121
"""Number of fictitious capacities per peak, evenly spaced within `_REACH` of it."""


class Ratio(NamedTuple):
    """One measured peak over the counted one."""

    kind: str
    config: str
    classes: frozenset[str]
    ratio: float


class Reliable(NamedTuple):
    """Predicted probability and observed frequency."""

    low: float
    high: float
    number: int
    """Pairs of a configuration and a fictitious capacity."""
    predicted: float
    """Mean of the predicted probabilities."""
    happened: float
    """Share whose measured peak was above the capacity."""


def _farthest(ratios: Sequence[float]) -> float:
    """Return the ninth decile by distance from 1, so that one bad repetition does not decide."""
    ordered = sorted(ratios, key=lambda ratio: abs(math.log(ratio)))
    return ordered[(9 * (len(ordered) - 1)) // 10]


def by_configuration(ratios: Iterable[Ratio]) -> dict[str, list[float]]:
    """Return one ratio per configuration by kind, as its rows repeat each other; also `pooled`."""
    grouped: dict[tuple[str, str], list[float]] = defaultdict(list)
    for each in ratios:
        grouped[each.kind, each.config].append(each.ratio)
        grouped["pooled", each.config].append(each.ratio)
    found: dict[str, list[float]] = defaultdict(list)
    for (kind, _), members in grouped.items():
        found[kind].append(_farthest(members))
    return found


def interval_of(ratios: Sequence[float]) -> tuple[float, float]:
    """Return the interval that contains the next of these ratios with 90 % probability.

    It is centred on the median, with the distance of logarithms that (n + 1) 0.9 of n have at most:
    the next of equals is as likely at any place among them.
    """
    logs = np.log(ratios)
    middle = float(np.median(logs))
    distances = np.sort(np.abs(logs - middle))
    place = min(COVERAGE * (len(logs) + 1) - 1, len(logs) - 1)
    below = math.floor(place)
    above = min(below + 1, len(logs) - 1)
    reach = float(distances[below] + (place - below) * (distances[above] - distances[below]))
    return math.exp(middle - reach), math.exp(middle + reach)


Intervals = Mapping[str, tuple[float, float]]
"""90 % interval of measured over counted peaks by kind."""
NO_INTERVALS: Intervals = MappingProxyType({})


def intervals_of(
    ratios: Iterable[Ratio], at_least: Intervals = NO_INTERVALS
) -> dict[str, tuple[float, float]]:
    """Return the 90 % interval by kind; `pooled` covers all, for kinds without an interval.

    Kinds of fewer than nine configurations have no separate interval.

    at_least : intervals that contain those of their kinds.
    """
    found = dict(at_least)
    for kind, members in by_configuration(ratios).items():
        if len(members) >= _LEAST or kind == "pooled":
            low, high = interval_of(members)
            least, most = at_least.get(kind, (low, high))
            found[kind] = min(low, least), max(high, most)
    return found


def covered(each: Ratio, intervals: Mapping[str, tuple[float, float]]) -> bool:
    """Return True if a measured peak is inside the interval of its kind."""
    low, high = intervals.get(each.kind, intervals["pooled"])
    return low <= each.ratio <= high


def _without(
    ratios: Sequence[Ratio], out: Callable[[Ratio], bool], at_least: Intervals
) -> tuple[list[Ratio], dict[str, tuple[float, float]]]:
    """Return the held-out ratios, and the intervals of the others."""
    others = [each for each in ratios if not out(each)]
    return [each for each in ratios if out(each)], intervals_of(others, at_least)


def configurations_left_out(
    ratios: Sequence[Ratio], at_least: Intervals = NO_INTERVALS
) -> list[Covered]:
    """Return by kind how many rows are in the intervals of all other configurations."""
    found: dict[str, list[tuple[str, bool, float]]] = defaultdict(list)
    for config in dict.fromkeys(each.config for each in ratios):
        out, intervals = _without(
            ratios,
            lambda each, config=config: each.config == config,
            at_least,  # type: ignore[misc]
        )
        for each in out:
            low, high = intervals.get(each.kind, intervals["pooled"])
            width = math.log(high / low)
            found[each.kind].append((config, covered(each, intervals), width))
    return [
        Covered(
            name=kind,
            rows=len(rows),
            sources=len({config for config, _, _ in rows}),
            inside=sum(inside for _, inside, _ in rows),
            width=float(np.mean([width for _, _, width in rows])),
        )
        for kind, rows in sorted(found.items())
    ]


def classes_left_out(
    ratios: Sequence[Ratio], at_least: Intervals = NO_INTERVALS
) -> Iterator[tuple[str, int, float, float]]:
    """Yield (class, rows, coverage as its own kind, coverage as a kind with few runs).

    Intervals exclude the rows of the class. The first coverage is that of a launch not known to be
    unmeasured, the second one that of a launch known to be.
    """
    for name in dict.fromkeys(name for each in ratios for name in sorted(each.classes)):
        out, intervals = _without(
            ratios,
            lambda each, name=name: name in each.classes,
            at_least,  # type: ignore[misc]
        )
        if len(out) == len(ratios):
            continue
        own = [covered(each, intervals) for each in out]
        unseen = [covered(each._replace(kind=UNSEEN), intervals) for each in out]
        yield name, len(out), float(np.mean(own)), float(np.mean(unseen))


def reliability(
    ratios: Sequence[Ratio],
    reserve: tuple[float, float, float] | None = None,
    at_least: Intervals = NO_INTERVALS,
) -> list[Reliable]:
    """Return by bins of probability how often a peak was above a fictitious capacity.

    Capacities are evenly spaced about every counted peak. The farthest repetition of each
    configuration counts, with the interval of the others. Empty bins are skipped.
    """
    pairs: list[tuple[float, bool]] = []
    configs = dict.fromkeys((each.kind, each.config) for each in ratios)
    for kind, config in configs:
        inside, intervals = _without(
            ratios,
            lambda each, config=config: each.config == config,
            at_least,  # type: ignore[misc]
        )
        measured = _farthest([each.ratio for each in inside if each.kind == kind])
        ends = intervals.get(kind, intervals["pooled"])
        for log_capacity in np.linspace(-_REACH, _REACH, _STEPS):
            capacity = math.exp(log_capacity)
            pairs.append((probability_of_ratio(capacity, ends, reserve), measured > capacity))
    return list(binned(pairs))


def binned(pairs: Sequence[tuple[float, bool]]) -> Iterator[Reliable]:
    """Yield the bins of (probability, True if it happened)."""
    for low, high in pairwise(EDGES):
        last = high == EDGES[-1]
        inside = [pair for pair in pairs if low <= pair[0] < high or (last and pair[0] == high)]
        if inside:
            yield Reliable(
                low=low,
                high=high,
                number=len(inside),
                predicted=float(np.mean([odds for odds, _ in inside])),
                happened=float(np.mean([was for _, was in inside])),
            )


def odds_table(bins: Sequence[Reliable]) -> str:
    """Return predicted probabilities and observed frequencies, for docs/concepts/memory.md."""
    lines = ["| OOM probability | pairs | mean | ran out |", "|---|---|---|---|"]
    lines += [
        f"| {100 * each.low:g} to {100 * each.high:g} % | {each.number} "
        f"| {100 * each.predicted:.1f} % | {100 * each.happened:.1f} % |"
        for each in bins
    ]
    return "\n".join(lines) + "\n"


def likelihoods(ratios: Sequence[Ratio]) -> dict[str, tuple[float, float]]:
    """Return by kind the mean log density of held-out configurations: Student's t, normal.

    Both have the same nine tenths; the larger density describes the tails better.
    """
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    values = by_configuration(ratios)
    for kind, members in values.items():
        for at, own in enumerate(members):
            others = members[:at] + members[at + 1 :]
            if not others:
                continue
            low, high = map(math.log, interval_of(others))
            middle, reach = (low + high) / 2.0, (high - low) / 2.0
            distance = math.log(own) - middle
            found[kind].append((_student(distance, reach), _gauss(distance, reach)))
    return {
        kind: (float(np.mean([a for a, _ in m])), float(np.mean([b for _, b in m])))
        for kind, m in found.items()
    }


def _student(distance: float, reach: float) -> float:
    """Return the log density of Student's t of two degrees with nine tenths within a reach."""
    scale = reach / 2.919985580353726
    # (1 + t^2 / 2)^(-3/2) / (2 sqrt 2)
    tail = -1.5 * math.log1p((distance / scale) ** 2 / 2.0)
    return tail - math.log(2.0 * math.sqrt(2.0) * scale)


def _gauss(distance: float, reach: float) -> float:
    scale = reach / 1.6448536269514722
    return -0.5 * (distance / scale) ** 2 - math.log(scale * math.sqrt(2.0 * math.pi))

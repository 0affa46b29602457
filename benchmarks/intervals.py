"""90 % intervals of the errors of runs that were not used, by class of runs.

An error is the logarithm of measured over estimated. It is the level of its source, the median of
all of its errors, plus a deviation from it. The next run is of another source: its level is like
those of all sources alike, and its deviation like those within the sources of its class. A level is
a fact about a cluster, such as its clock and its network, whatever runs on it. A deviation is a
fact about kernels and schedules of the class.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autopar.rates.accuracy import COVERAGE

__all__ = [
    "LEAST",
    "Covered",
    "Error",
    "covered_table",
    "deviations_of",
    "interval_of",
    "levels_of",
    "widest_of",
]

LEAST = 20
"""Fewest values that show a 90 % interval: one value in each tail."""

Deviations = Sequence[tuple[float, float]]
"""Deviations from the level of their source, with weights."""


class Error(NamedTuple):
    """Logarithm of measured over estimated for one run, or a weighted one for a source."""

    kind: Hashable
    source: str
    log: float


class Covered(NamedTuple):
    """Held-out rows of a class, and the intervals that were made without their sources."""

    name: str
    rows: int
    sources: int
    inside: int
    width: float
    """Mean of ln(high / low)."""

    @property
    def coverage(self) -> float:
        """Share of the rows inside of their intervals."""
        return self.inside / self.rows

    @property
    def product(self) -> float:
        """Coverage times width, which a change must not worsen."""
        return self.coverage * self.width


def levels_of(errors: Iterable[Error]) -> dict[tuple[Hashable, str], float]:
    """Return the median error of each source of each class."""
    by_source: dict[tuple[Hashable, str], list[float]] = defaultdict(list)
    for each in errors:
        by_source[each.kind, each.source].append(each.log)
    return {key: float(np.median(found)) for key, found in by_source.items()}


def deviations_of(errors: Sequence[Error]) -> dict[Hashable, Deviations]:
    """Return by class the deviations of rows from the level of their source.

    A source weighs the square root of its rows, as in the fit. A single row has no deviation.
    """
    levels = levels_of(errors)
    rows = Counter((each.kind, each.source) for each in errors)
    found: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)
    for each in errors:
        key = each.kind, each.source
        if rows[key] > 1:
            found[each.kind].append((each.log - levels[key], 1.0 / math.sqrt(rows[key])))
    return dict(found)


def interval_of(levels: Iterable[float], deviations: Deviations) -> tuple[float, float]:
    """Return the ends of the 90 % interval of measured over estimated.

    They are quantiles of all sums of a level and a deviation. The level of the next source is as
    likely in each gap between n levels: one more is counted, half of it at each extreme.
    """
    known = np.sort(np.fromiter(levels, dtype=float))
    weights = np.ones(len(known))
    weights[0] += 0.5
    weights[-1] += 0.5
    own, shares = np.array(deviations).T
    sums = np.add.outer(known, own).ravel()
    masses = np.multiply.outer(weights, shares).ravel()
    order = np.argsort(sums)
    places = np.cumsum(masses[order]) - masses[order] / 2.0
    tail = (1.0 - COVERAGE) / 2.0
    ends = np.interp([tail, 1.0 - tail], places / masses.sum(), sums[order])
    return math.exp(ends[0]), math.exp(ends[1])


def widest_of(
    levels: Sequence[float], own: Deviations, others: Mapping[Hashable, Deviations]
) -> tuple[float, float]:
    """Return the interval of a class, or the widest one of classes alike.

    own : deviations of the class; they decide alone if there are `LEAST` of them.
    others : deviations of the classes alike, by class.
    """
    if len(own) >= LEAST:
        return interval_of(levels, own)
    shown = [found for found in others.values() if len(found) >= LEAST]
    ends = [interval_of(levels, found) for found in [*shown, own] if found]
    if not ends:
        raise ValueError("no class has enough rows for an interval")
    return max(ends, key=lambda pair: pair[1] / pair[0])


def covered_table(classes: Iterable[Covered], sources: str) -> str:
    """Return the coverage and the width of left-out intervals, for the pages of documentation.

    Classes of fewer than `LEAST` rows have counts in place of a share.

    sources : word for what is left out, such as `sources`.
    """
    found = list(classes)
    total = Covered(
        name="all",
        rows=sum(each.rows for each in found),
        sources=sum(each.sources for each in found),
        inside=sum(each.inside for each in found),
        width=sum(each.width * each.rows for each in found) / sum(each.rows for each in found),
    )
    lines = [
        f"| class | rows | {sources} | inside | width, % | product |",
        "|---|---|---|---|---|---|",
    ]
    for each in [*found, total]:
        enough = each.rows >= LEAST
        inside = f"{100 * each.coverage:.0f} %" if enough else f"{each.inside} of {each.rows}"
        lines.append(
            f"| {each.name} | {each.rows} | {each.sources} | {inside} "
            f"| {100 * math.expm1(each.width):.1f} | {each.product:.3f} |"
        )
    return "\n".join(lines) + "\n"

"""Holds out one source after the other from the fit, and prices its rows as those of a new cluster.

Without a source, every fitted constant starts from tables of kernels or from a round assumption
(`Constant.neutral`). Its cluster has the defaults of its card, and intervals are made of the errors
of the other rows. Figures that were counted or chosen by hand with all rows in sight do not change:
bytes per element, the shape of the formulas, GEMM surfaces.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.price.step import step_time
from autopar.rates.accuracy import Accuracy, RunClass
from autopar.rates.collectives import SiteFactors
from autopar.rates.parts.operations import Machine
from autopar.records import replace
from benchmarks.intervals import Covered, Error, deviations_of, levels_of, widest_of
from benchmarks.ledger import (
    ClassKey,
    Compared,
    architectures_of,
    class_key,
    interval_s,
    statistics_of,
)
from benchmarks.ledger_constants import (
    CONSTANTS,
    FITTED,
    Entry,
    Sensitivity,
    fit,
    groups_of,
    load_entries,
    put,
)
from benchmarks.ledger_rows import Run

__all__ = ["LEFT_OUT", "Case", "classes_left_out", "classes_of", "leave_out_each", "left_out_rows"]

LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "BLOOM": ("BLOOM",),
    "Korthikanti and Narayanan": ("Korthikanti", "Narayanan"),
    "MPT A100": ("MPT A100",),
    "MPT H100, fp8 too": ("MPT H100", "MPT fp8"),
    "Megatron-Bridge dense": ("Megatron-Bridge dense",),
    "Megatron-Bridge mixtures": ("Megatron-Bridge mixtures",),
    "NeMo": ("NeMo",),
    "SimuMax": ("SimuMax dense", "SimuMax context", "SimuMax mixtures"),
    "torchtitan": ("torchtitan", "torchao", "torchao eager", "torchtitan GB200"),
    "NeMo benchmarks": ("NeMo benchmarks dense",),
    "MLPerf 5.1": ("MLPerf 5.1 dense",),
    "Megatron-Bridge cards": ("Megatron-Bridge cards",),
    "Megatron-MoE-ModelZoo": ("Megatron-MoE-ModelZoo",),
}
"""Groups of the ledger that are one source."""
_SOURCE_OF = {group: source for source, groups in LEFT_OUT.items() for group in groups}

_NODES = 6
_DEVIATIONS = 1.5
"""Range of grids beyond the shipped and the neutral value, in narrower deviations."""
_FACTORS = np.geomspace(0.2, 1.0, 9)
"""Grid of measured over nominal bandwidth of a cluster's links."""
_USUAL_FACTOR = 0.65
"""Networks reach .4 to 1.0 of nominal across nodes."""


class Estimated(NamedTuple):
    """A run and its estimated time, for statistics of the ledger."""

    group: str
    run: Run
    total_s: float

    @property
    def error(self) -> float:
        """Estimated over measured time, less one."""
        return self.total_s / self.run.measured_s - 1.0


class Case(NamedTuple):
    """The rows of a source, priced with the source held out."""

    name: str
    found: Mapping[str, float]
    """Errors in the format of `statistics_of`."""
    mape_with: float
    """Mean absolute error of the same rows with the shipped constants and sites."""


class Fit(NamedTuple):
    """A source that was held out, and the constants that were fitted without it."""

    values: list[float]
    known: list[Entry]
    """Its rows, with what is known of their cluster."""
    rows: list[tuple[Entry, Estimated]]
    """Its rows as on an unknown cluster, priced with `values`."""


def fits_without_each() -> dict[str, Fit]:
    """Return the fit without each source of `LEFT_OUT`."""
    entries = load_entries()
    neutral = [constant.neutral for constant in CONSTANTS]
    ranges = [_range(c.shipped, c.neutral, c.width) for c in CONSTANTS]
    sensitivity = Sensitivity(entries, neutral, ranges, _NODES)
    unknown = {entry.line: entry for entry in load_entries(use_site=False)}
    priors = [(math.log(constant.neutral), constant.doubt) for constant in CONSTANTS]
    found = {}
    for name, left in LEFT_OUT.items():
        groups = groups_of(entries, [group for group in FITTED if group not in left])
        values = [float(value) for value in np.exp(fit(sensitivity, groups, priors))]
        known = [entry for entry in entries if entry.group in left]
        without = [unknown[entry.line] for entry in known]
        rows = [(e, _estimated(e.run, put(e.run, values), e.group)) for e in without]
        found[name] = Fit(values, known, rows)
    return found


def leave_out_each(fits: Mapping[str, Fit], everything: Sequence[Compared]) -> Iterator[Case]:
    """Yield each source of `LEFT_OUT`; clusters with a site again without and with it.

    everything : the rows of `left_out_rows`.
    """
    shipped = [(e.line, _estimated(e.run, e.run.machine, e.group)) for e in load_entries()]
    for name, left in LEFT_OUT.items():
        values, rows, estimated = fits[name].values, fits[name].known, fits[name].rows
        accuracy = _accuracy_without(everything, name)
        mape = float(np.mean([abs(row.error) for line, row in shipped if row.group in left]))
        without, exact = zip(*estimated, strict=True)
        yield Case(name, _statistics(exact, accuracy), mape)
        if name == "BLOOM":
            # datasheet figures are no fit: its nodes have four adapters of 100 Gb/s
            machines = [replace(put(e.run, values), factors=SiteFactors()) for e in rows]
            # the knowledge of the site stays that of `without`
            known = [_estimated(e.run, m) for e, m in zip(without, machines, strict=True)]
            yield Case(
                f"{name}, its adapters' nominal rate known", _statistics(known, accuracy), mape
            )
            few = list(_from_three_runs(rows, machines))
            yield Case(
                f"{name}, two factors of its network from 3 runs", _statistics(few, accuracy), mape
            )


def left_out_rows(
    shipped: Iterable[tuple[int, Compared]], fits: Mapping[str, Fit]
) -> list[Compared]:
    """Return rows with errors of constants that were fitted without their source.

    Rows of sources that no fit uses keep the errors of the shipped constants. A row of a known site
    counts twice: with the figures of its site, and as on an unknown cluster.

    shipped : rows with their line numbers, priced with the shipped constants.
    """
    own: dict[int, list[Compared]] = defaultdict(list)
    for one in fits.values():
        for entry in one.known:
            if entry.run.site_known:
                machine = put(entry.run, one.values)
                own[entry.line].append(_estimated(entry.run, machine, entry.group))
        for entry, row in one.rows:
            own[entry.line].append(row)
    return [row for line, given in shipped for row in own.get(line, [given])]


# --------------------------------------------------------------------------------------------------
# Intervals by class


def source_of(row: Compared) -> str:
    """Return the source of a row; groups that are excluded from one fit together are one source."""
    return _SOURCE_OF.get(row.group, row.group)


def classes_of(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """Return the errors of every class of runs, as `autopar.rates.accuracy` reads them.

    Doubtful rows and rows on an architecture of a single source are excluded, and so are classes
    without two rows of one source, which have no spread.
    """
    by_class: dict[ClassKey, list[Error]] = defaultdict(list)
    for row in _counted(rows):
        key = class_key(row)
        by_class[key].append(Error(key, row.group, -math.log1p(row.error)))
    found = []
    for key, own in sorted(by_class.items()):
        stack, experts, adapters, site_known = key
        # a level is a fact about a cluster, whatever software runs on it
        alike = [
            each
            for (_, _, adapted, known), errors in by_class.items()
            if known == site_known and (adapters or not adapted)
            for each in errors
        ]
        deviations = deviations_of(alike)
        if key not in deviations:
            continue
        levels = list(levels_of(alike).values())
        low, high = widest_of(levels, deviations[key], deviations)
        found.append(
            {
                "stack": stack,
                "experts": experts,
                "adapters": adapters,
                "site_known": site_known,
                "rows": len(own),
                "sources": len({each.source for each in own}),
                "low": round(low, 4),
                "high": round(high, 4),
                "plan_spread": round(_plan_spread([value for value, _ in deviations[key]]), 4),
            }
        )
    return found


def _counted(rows: Sequence[Compared]) -> list[Compared]:
    """Return the rows that intervals are made of."""
    known = architectures_of(rows)
    return [
        row
        for row in rows
        if row.run.machine.card.architecture in known and not row.group.endswith(", doubtful")
    ]


def _plan_spread(deviations: Sequence[float]) -> float:
    """Return the standard deviation of ln(measured / estimated) within sources.

    It is a robust one: 1.48 medians of the distances from each source's own median.
    """
    return 1.4826 * float(np.median(np.abs(deviations)))


def _accuracy_without(rows: Sequence[Compared], source: str) -> Accuracy:
    """Return the classes of all rows but those of a source."""
    others = [row for row in rows if source_of(row) != source]
    return Accuracy(
        classes=tuple(RunClass(**found) for found in classes_of(others)),
        path=Path("without a source"),
    )


def classes_left_out(rows: Sequence[Compared]) -> list[Covered]:
    """Return by class how many rows are in the intervals that the other sources make.

    rows : those of `left_out_rows`.
    """
    counted = _counted(rows)
    by_class: dict[ClassKey, list[tuple[str, bool, float]]] = defaultdict(list)
    for source in dict.fromkeys(map(source_of, counted)):
        accuracy = _accuracy_without(rows, source)
        for row in counted:
            if source_of(row) == source:
                low, high = interval_s(row, accuracy)
                inside = low <= row.run.measured_s <= high
                by_class[class_key(row)].append((source, inside, math.log(high / low)))
    return [
        Covered(
            name=_class_name(key),
            rows=len(found),
            sources=len({source for source, _, _ in found}),
            inside=sum(inside for _, inside, _ in found),
            width=float(np.mean([width for _, _, width in found])),
        )
        for key, found in sorted(by_class.items())
    ]


def _class_name(key: ClassKey) -> str:
    stack, experts, adapters, known = key
    words = [stack, *("MoE",) * experts, *("adapters",) * adapters, *("site known",) * known]
    return ", ".join(words)


def _range(shipped: float, neutral: float, width: float) -> tuple[float, float]:
    reach = _DEVIATIONS * width
    ends = math.log(shipped), math.log(neutral)
    return min(ends) - reach, max(ends) + reach


def _estimated(run: Run, machine: Machine, group: str = "left out") -> Estimated:
    return Estimated(group, run, step_time(machine, run.job).total_s)


def _statistics(rows: Iterable[Estimated], accuracy: Accuracy) -> Mapping[str, float]:
    return statistics_of([row._replace(group="left out") for row in rows], accuracy)["left out"]


def _from_three_runs(entries: Sequence[Entry], machines: Sequence[Machine]) -> Iterator[Estimated]:
    """Yield every row as predicted from each three rows that are far apart in the table.

    The factors in and across nodes minimize the mean error of the three with a weak prior; effects
    of both are added in seconds. No row is predicted from itself.
    """
    grid: dict[str, NDArray[np.float64]] = {}
    for key in ("in_node", "cross_node"):
        columns = []
        for factor in _FACTORS:
            factors = SiteFactors(**{key: float(factor)})
            columns.append(
                [
                    step_time(replace(machine, factors=factors), entry.run.job).total_s
                    for entry, machine in zip(entries, machines, strict=True)
                ]
            )
        grid[key] = np.array(columns)
    # the last factor is 1: the card's own
    base = grid["in_node"][-1]
    times = grid["in_node"][:, None, :] + grid["cross_node"][None, :, :] - base
    measured = np.array([entry.run.measured_s for entry in entries])
    errors = np.abs(np.log(times / measured))
    doubt = (np.log(_FACTORS / _USUAL_FACTOR) / 0.5) ** 2
    prior = 0.002 * (doubt[:, None] + doubt[None, :])
    number = len(entries) // 3
    for first in range(number):
        seen = [first, first + number, first + 2 * number]
        losses = errors[:, :, seen].mean(axis=2) + prior
        inside, across = np.unravel_index(int(np.argmin(losses)), losses.shape)
        for place, entry in enumerate(entries):
            if place not in seen:
                yield Estimated("left out", entry.run, float(times[inside, across, place]))

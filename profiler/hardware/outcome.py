"""From the times of groups to the measurement of a cell: who counts, and who is slow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autopar.measurements import Measurement, Straggler
from profiler.hardware.cells import Cell, Group

__all__ = [
    "STRAGGLER_RATIO",
    "GroupTimes",
    "combined",
    "identity",
    "stragglers",
    "unmeasured",
]

STRAGGLER_RATIO = 1.5
"""A group whose median is so much above the median group's is slow, and its ranks are named."""


def identity(cell: Cell) -> dict[str, Any]:
    """Return the fields of a measurement that say which cell it is of."""
    return {
        "key": cell.key,
        "operation": cell.operation,
        "group_size": cell.group_size,
        "consecutive": cell.consecutive,
        "size_bytes": float(cell.size_bytes),
        "scope": cell.scope,
    }


def unmeasured(cell: Cell, status: Literal["failed", "skipped"], reason: str) -> Measurement:
    """Return the measurement of a cell that gave no samples, with the reason in words."""
    return Measurement(**identity(cell), status=status, reason=reason)


def stragglers(
    groups: Sequence[Group], medians_s: NDArray[np.float64], hosts: Sequence[str]
) -> list[Straggler]:
    """Return the ranks that are only in groups much slower than the others.

    Ranks of one group wait for each other, so that a group is what can be slow; of two groups the
    quicker one is taken for normal.
    """
    if len(groups) < 2:
        return []
    normal_s = float(np.median(medians_s) if len(groups) > 2 else medians_s.min())
    ratios: dict[int, list[float]] = {}
    for group, median_s in zip(groups, medians_s, strict=True):
        for rank in group:
            ratios.setdefault(rank, []).append(float(median_s) / normal_s)
    return [
        Straggler(rank=rank, host=hosts[rank], ratio=max(of_rank))
        for rank, of_rank in sorted(ratios.items())
        if min(of_rank) > STRAGGLER_RATIO
    ]


@dataclass(frozen=True, kw_only=True)
class GroupTimes:
    """What the repetitions of one group took."""

    group: Group
    samples_s: NDArray[np.float64]
    """Seconds of one operation on the slowest rank, by repetition."""
    loops: int
    """Operations in a repetition; rounds decide for themselves."""


def combined(
    cell: Cell, found: Sequence[GroupTimes], hosts: Sequence[str], *, checked: bool
) -> Measurement:
    """Return the measurement of a cell: the samples of the slowest group, and what all took."""
    ordered = sorted(found, key=lambda times: times.group)
    medians = np.array([np.median(times.samples_s) for times in ordered])
    worst = ordered[int(medians.argmax())]
    return Measurement(
        **identity(cell),
        status="ok",
        samples_s={"time": [float(v) for v in worst.samples_s]},
        loops=worst.loops,
        worst_group=list(worst.group),
        group_medians_s=[float(v) for v in medians],
        stragglers=stragglers([times.group for times in ordered], medians, hosts),
        checked=checked,
    )

"""Numbers that no machine has: times that fall with size, links faster than memory, wrong units."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from autopar.sidecar import sidecar_path
from autopar.units import GB, format_seconds
from profiler.show.findings import Finding, finding
from profiler.show.frame import format_size
from profiler.show.load import Entry, Folder, HardwareFile, Profile
from profiler.show.series import (
    Point,
    Series,
    point_key,
    reference_cell,
    scope_by_shape,
    series_of,
)

__all__ = ["monotone", "plausible"]

_DROP = 0.05
"""Larger messages may be this much faster before it is said, whatever the spread."""
_UNIT_FACTOR = 4.0
"""Bandwidth and times of one group differ by more than this only where units are mixed up."""
_MAX_BYTES_PER_S = 1e14
"""A collective faster than this (100,000 GB/s) was timed in another unit."""
_BUSY = 2.5
"""A slow-down above this says that the host was busy with something else."""


def monotone(folder: Folder, profile: Profile) -> Iterator[Finding]:
    """Yield where a larger message takes less time, by more than the samples scatter."""
    for series in series_of(profile).values():
        for small, large in pairwise(series.points):
            drop = small.time_s / large.time_s - 1.0
            if drop > max(_DROP, math.hypot(small.spread, large.spread)):
                path, key = _place(folder, profile, series, large)
                yield finding(
                    "warning",
                    path,
                    key,
                    f"the time is {format_seconds(large.time_s)}, but "
                    f"{format_size(small.size_bytes)} takes {format_seconds(small.time_s)}",
                    "larger messages take longer: measure both again",
                )


def _place(folder: Folder, profile: Profile, series: Series, point: Point) -> tuple[Path, str]:
    """Return file and key of a point: a document's, else the sidecar whose cell or curve it is."""
    for file in profile.files:
        for entry in file.entries:
            of_entry = (entry.operation, entry.group_size, entry.consecutive)
            if of_entry == series.key and entry.size_bytes == point.size_bytes:
                return file.path, entry.key
    key = point_key(series, point)
    for file in profile.files:
        if file.sidecar is None:
            continue
        cells = (cell.key for run in file.sidecar.runs for cell in run.measurements)
        curves = ((c.operation, c.group_size, c.consecutive) for c in file.sidecar.curves)
        if key in cells or series.key in curves:
            return sidecar_path(file.path), key
    return folder.path, key


def plausible(folder: Folder, profile: Profile) -> Iterator[Finding]:
    """Yield values that are unlikely, with the mistake that explains them."""
    for kind in ("allreduce", "p2p"):
        file = profile.file(kind)
        if file is not None:
            yield from _faster_than_memory(file, profile)
            yield from _at_odds_with_times(file, profile)
    file = profile.file("allreduce")
    if file is not None:
        yield from _slow_neighbours(file, profile)
    file = profile.file("sp_time")
    if file is not None:
        yield from _too_fast(file)
    file = profile.file("overlap")
    if file is not None:
        yield from _coefficient(file)


def _faster_than_memory(file: HardwareFile, profile: Profile) -> Iterator[Finding]:
    known = [s.memory_bytes_per_s for s in profile.sidecars if s.memory_bytes_per_s is not None]
    for entry in file.entries if known else ():
        if entry.value > known[0]:
            yield finding(
                "error",
                file.path,
                entry.key,
                f"the value is {entry.written:.4g} {file.unit}, more than the memory of a device "
                f"({known[0] / GB:.4g} GB/s)",
                "it is probably in another unit, such as Gbit/s: measure it again",
            )


def _at_odds_with_times(file: HardwareFile, profile: Profile) -> Iterator[Finding]:
    """Bandwidths of documents and the times beside them, where no samples decide."""
    series = series_of(profile)
    for entry in file.entries:
        found = series.get((entry.operation, entry.group_size, entry.consecutive))
        if found is None or reference_cell(profile, entry) is not None:
            continue
        rates = [found.bus_bytes_per_s(point) for point in found.points]
        ratio = entry.value / max(rates)
        if not 1.0 / _UNIT_FACTOR <= ratio <= _UNIT_FACTOR:
            yield finding(
                "warning",
                file.path,
                entry.key,
                f"the value is {entry.written:.4g} {file.unit}, but the times of the same group "
                f"reach {max(rates) / GB:.4g} GB/s",
                "one of the two is in another unit: measure them again",
            )


def _slow_neighbours(file: HardwareFile, profile: Profile) -> Iterator[Finding]:
    """Groups inside a node that are slower than groups across nodes."""
    by_key: dict[tuple[int, bool], Entry] = {
        (entry.group_size, entry.consecutive): entry for entry in file.entries
    }
    for (group_size, consecutive), near in by_key.items():
        far = by_key.get((group_size, False))
        scopes = [
            scope_by_shape(profile, ("allreduce", group_size, kind)) for kind in (True, False)
        ]
        if not consecutive or far is None or scopes != ["intra-node", "inter-node"]:
            continue
        if near.value < far.value / (1.0 + _DROP):
            yield finding(
                "warning",
                file.path,
                near.key,
                f"the value is {near.written:.4g} {file.unit} inside a node, but "
                f"{far.key} is {far.written:.4g} across nodes",
                "the two may be swapped, or links inside the nodes are not used",
            )


def _too_fast(file: HardwareFile) -> Iterator[Finding]:
    for entry in file.entries:
        if entry.size_bytes is not None and entry.size_bytes / entry.value > _MAX_BYTES_PER_S:
            yield finding(
                "error",
                file.path,
                entry.key,
                f"the value is {entry.written:.4g} ms, which means "
                f"{entry.size_bytes / entry.value / GB:.3g} GB/s",
                "it is probably in seconds: write it in ms",
            )


def _coefficient(file: HardwareFile) -> Iterator[Finding]:
    for entry in file.entries:
        if entry.value < 1.0:
            problem = f"the value is {entry.written:.4g} and is read as 1"
            remedy = "nothing gets faster by sharing a device: measure it again"
        elif entry.value > _BUSY:
            problem = f"the value is {entry.written:.4g}, and 1.1 to 1.3 is usual"
            remedy = "the hosts may have been busy: measure it again"
        else:
            continue
        yield finding("warning", file.path, entry.key, problem, remedy)

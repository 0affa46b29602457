"""Hardware files of Galvatron (bandwidths, times, overlap) derived from measured cells.

The results depend only on the measurements. A file can therefore be derived again from its
sidecar, and runs with equal samples write identical bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from msgspec import field

from autopar.documents.checks import DOCUMENTS
from autopar.documents.json import read_record
from autopar.documents.schemas import allreduce_key, p2p_key, sp_time_key
from autopar.documents.sidecar import CurveData, DocumentKind, Measurement, Run, newest
from autopar.errors import DocumentError
from autopar.rates.measured import bus_bytes_per_s
from autopar.records import Record
from autopar.statistics import latency_bandwidth_fit, summarize
from autopar.units import GB, MIB, MS, format_count, format_exact_size
from profiler.hardware.options import SP_TIME_SIZES, Cluster, HardwareOptions
from profiler.hardware.overlap import SIDES, slowdown

# --------------------------------------------------------------------------------------------------
# The files that use each measurement, and the selection of measurements among several runs.


KINDS: tuple[DocumentKind, ...] = ("allreduce", "p2p", "overlap", "sp_time")
"""Kinds of hardware files, in writing order."""
MEASURED_FOR: dict[DocumentKind, tuple[str, ...]] = {
    "allreduce": ("allreduce",),
    "p2p": ("p2p",),
    "overlap": ("overlap",),
    "sp_time": ("allreduce", "all2all", "allgather", "reducescatter"),
}
"""Operations of the command line that each kind of file depends on."""
REPLACES = "replaces"
"""Metadata key of a run: comma-separated operations whose earlier measurements it replaces.
Replaced measurements stay in the sidecar, but are not used."""


def family(operation: str) -> str:
    """Return the command-line operation (`overlap`, `p2p`, ...) that measures this operation."""
    if operation.startswith("overlap_") or operation == "memcopy":
        return "overlap"
    return operation.removesuffix("_bidirectional")


def kinds_of(measurement: Measurement) -> tuple[DocumentKind, ...]:
    """Return the kinds of files whose values or curves depend on a measurement."""
    operation = family(measurement.operation)
    if operation == "allreduce":
        # Galvatron's file of times has no keys for strided groups.
        return ("allreduce", "sp_time") if measurement.consecutive else ("allreduce",)
    if operation == "p2p":
        return ("p2p",)
    return ("overlap",) if operation == "overlap" else ("sp_time",)


def newest_measurements(runs: Iterable[Run]) -> dict[str, Measurement]:
    """Return the current measurement of each cell, by key.

    runs : runs in order of time; their metadata may contain `REPLACES`.
    """
    found: dict[str, Measurement] = {}
    for run in runs:
        replaced = set(str(run.metadata.get(REPLACES, "")).split(","))
        # A run replaces only earlier measurements, never later ones.
        left = (m for m in found.values() if family(m.operation) not in replaced)
        found = newest((*left, *run.measurements))
    return found


def requested_kinds(options: HardwareOptions, cluster: Cluster) -> frozenset[DocumentKind]:
    """Return the kinds of files that depend on the requested operations."""
    asked = {kind for kind in KINDS if set(MEASURED_FOR[kind]) & set(options.operations)}
    if cluster.world_size == 1 and "allreduce" in asked:
        asked.add("p2p")  # it has no keys, but the planner expects the file
    return frozenset(asked)


# --------------------------------------------------------------------------------------------------
# Values of the files from cells.


_MAX_OVERLAP = 10.0
"""Largest `overlap_coe` that readers accept; larger slowdowns are noise or a busy host."""
# Galvatron's file has keys for these two only; others are stored as curves in the sidecar.
_SP_TIME = ("allreduce", "all2all")
_OTHERS = ("all2all", "allgather", "reducescatter")
MIN_SP_TIME_SIZES = 8
"""Smallest number of sizes per group that Galvatron accepts in a file of collective times."""


class Documents(Record):
    """Contents of the hardware files, derived from the measurements so far."""

    data: Mapping[DocumentKind, dict[str, float] | None]
    """Values by kind of file, in GB/s, ms or as a factor; None if nothing was measured for it."""
    curves: Mapping[DocumentKind, list[CurveData]]
    """Time curves by kind of file, for its sidecar."""
    memory_bytes_per_s: float | None = None
    """Bytes read and written per second by a copy on one device; None if unknown."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about missing and replaced values."""


_Series = dict[tuple[int, bool], dict[int, Measurement]]
"""Cells of one operation by (group size, consecutive) and size in bytes."""


def derive(
    measurements: Mapping[str, Measurement], cluster: Cluster, reference_bytes: int
) -> Documents:
    """Return the contents of all hardware files of a cluster.

    For a single device, the all-reduce and point-to-point files are empty.

    measurements : current measurement of each cell, by key.
    reference_bytes : message size of the bandwidths.
    """
    warnings: list[str] = []
    series = {name: _series(measurements, name) for name in ("allreduce", "p2p", *_OTHERS)}
    curves = {name: _curves(name, found) for name, found in series.items()}
    coefficient = _overlap(measurements, warnings)
    data: dict[DocumentKind, dict[str, float] | None] = {
        "allreduce": _allreduce(series["allreduce"], cluster, reference_bytes, warnings),
        "p2p": _p2p(series["p2p"], reference_bytes, warnings),
        "overlap": None if coefficient is None else {"overlap_coe": coefficient},
        "sp_time": _sp_time(series, warnings),
    }
    lone = (m for m in measurements.values() if m.operation == "allreduce" and _median(m))
    if cluster.world_size == 1 and any(lone):
        # The planner requires both files; a single device has no communication.
        data["allreduce"], data["p2p"] = {}, {}
    warnings += _refused(data)
    copies = [m for m in measurements.values() if m.operation == "memcopy" and _median(m)]
    # The largest copy, since small ones fit in caches.
    copy = max(copies, key=lambda m: m.size_bytes, default=None)
    return Documents(
        data=data,
        curves={
            "allreduce": curves["allreduce"],
            "p2p": curves["p2p"],
            "overlap": [],
            "sp_time": [
                curve
                for name in ("allreduce", *_OTHERS)
                for curve in curves[name]
                # As in its keys; curves of strided groups are stored with the bandwidths.
                if curve.consecutive
            ],
        },
        memory_bytes_per_s=None if copy is None else _rate(copy),
        warnings=warnings,
    )


def _refused(data: Mapping[DocumentKind, dict[str, float] | None]) -> list[str]:
    """Return a warning for each file that readers would reject, with their error."""
    found = []
    for kind, values in data.items():
        if not values:
            continue
        try:
            read_record(DOCUMENTS[kind], Path(kind), values)
        except DocumentError as error:
            found.append(f"{error}; autopar refuses this file")
    return found


def _median(measurement: Measurement) -> float:
    """Return the median time of a cell in seconds; 0 if it has no samples."""
    samples = measurement.samples_s.get("time")
    if measurement.status != "ok" or not samples:
        return 0.0
    return summarize(samples).median_s


def _rate(cell: Measurement) -> float:
    """Return the bus bandwidth of a measured cell, bytes/s."""
    return bus_bytes_per_s(cell.operation, cell.group_size, cell.size_bytes, _median(cell))


def _series(measurements: Mapping[str, Measurement], operation: str) -> _Series:
    """Return the cells of an operation with groups of several ranks, including failed cells."""
    found: _Series = {}
    cells = [m for m in measurements.values() if m.operation == operation and m.group_size > 1]
    # Documents list large groups first, and consecutive groups before strided ones.
    for m in sorted(cells, key=lambda m: (-m.group_size, not m.consecutive, m.size_bytes)):
        found.setdefault((m.group_size, m.consecutive), {})[int(m.size_bytes)] = m
    return found


def _curves(operation: str, series: _Series) -> list[CurveData]:
    """Return the curve of every group: times by size, their percentiles, and a linear fit."""
    result = []
    for (group_size, consecutive), cells in series.items():
        measured = {size: m for size, m in cells.items() if _median(m)}
        if not measured:
            continue
        summaries = [summarize(m.samples_s["time"]) for m in measured.values()]
        sizes = [float(size) for size in measured]
        times = [summary.median_s for summary in summaries]
        # A line needs two points: one point cannot separate latency from bandwidth.
        fit = latency_bandwidth_fit(sizes, times) if len(sizes) > 1 else None
        result.append(
            CurveData(
                operation=operation,
                group_size=group_size,
                consecutive=consecutive,
                sizes_bytes=sizes,
                times_s=times,
                low_s=[summary.low_s for summary in summaries],
                high_s=[summary.high_s for summary in summaries],
                latency_s=None if fit is None else fit.latency_s,
                seconds_per_byte=None if fit is None else fit.seconds_per_byte,
            )
        )
    return result


def _at_reference(
    key: str, cells: Mapping[int, Measurement], reference_bytes: int, warnings: list[str]
) -> Measurement | None:
    """Return the cell at the reference size, else the largest below it with a warning, else
    None."""
    wanted = cells.get(reference_bytes)
    if wanted is not None and _median(wanted):
        return wanted
    reason = (wanted.reason or wanted.status) if wanted is not None else "not measured"
    below = [size for size, m in cells.items() if size < reference_bytes and _median(m)]
    where = f"{key}: {format_exact_size(reference_bytes, in_words=True)} is missing ({reason}) and "
    if not below:
        warnings.append(where + "no smaller size was measured, so the file has no such key")
        return None
    warnings.append(where + f"the value of {format_exact_size(max(below), in_words=True)} is used")
    return cells[max(below)]


def _allreduce(
    series: _Series, cluster: Cluster, reference_bytes: int, warnings: list[str]
) -> dict[str, float] | None:
    """Return all-reduce bus bandwidths in GB/s, by key; None if nothing was measured.

    The group of all ranks has only a consecutive key.
    """
    world = cluster.world_size
    data = {}
    for (group_size, consecutive), cells in series.items():
        if group_size == world and not consecutive:
            continue
        key = allreduce_key(group_size, consecutive)
        cell = _at_reference(key, cells, reference_bytes, warnings)
        if cell is not None:
            data[key] = _rate(cell) / GB
    needed = allreduce_key(world, True)
    if data and needed not in data:
        warnings.append(
            f"{needed} is missing, but a plan for {world} devices needs it. "
            "Measure again with --resume and without --groups, or with --groups "
            f"{world}"
        )
    return data or None


def _p2p(series: _Series, reference_bytes: int, warnings: list[str]) -> dict[str, float] | None:
    """Return point-to-point bandwidths between pipeline stages in GB/s; None if not measured."""
    data = {}
    # A series lists large groups first, this file few stages first.
    for (stages, _), cells in reversed(series.items()):
        key = p2p_key(stages)
        cell = _at_reference(key, cells, reference_bytes, warnings)
        if cell is not None:
            data[key] = _rate(cell) / GB
    return data or None


def _sp_time(series: Mapping[str, _Series], warnings: list[str]) -> dict[str, float] | None:
    """Return times of all-reduce and all-to-all in ms, by key; None if nothing was measured.

    Only sizes of whole MiB in groups of consecutive ranks have keys.
    """
    data = {}
    for operation in _SP_TIME:
        for (group_size, consecutive), cells in series[operation].items():
            if not consecutive:
                continue
            # Keys name whole MiB; other sizes are stored in the curves only.
            whole = {size: m for size, m in cells.items() if size % MIB == 0}
            group = f"sp_time: {operation} in groups of {group_size}"
            times = {size: time for size, m in whole.items() if (time := _median(m))}
            for size, time_s in times.items():
                # The file contains ms; its MB are 2^20 bytes.
                data[sp_time_key(operation, group_size, size)] = time_s / MS
            left_out: dict[str, list[str]] = {}
            for size in sorted(set(whole) - set(times)):
                reason = whole[size].reason or whole[size].status
                left_out.setdefault(reason, []).append(format_exact_size(size, in_words=True))
            for reason, sizes in left_out.items():
                warnings.append(f"{group} has no value for {', '.join(sizes)}: {reason}")
            if len(times) < MIN_SP_TIME_SIZES:
                warnings.append(
                    f"{group} has {format_count(len(times), 'size')} of whole "
                    f"MiB, but Galvatron needs at least {MIN_SP_TIME_SIZES}. "
                    f"Measure with --resume --sizes {SP_TIME_SIZES}"
                )
    return data or None


def _overlap(measurements: Mapping[str, Measurement], warnings: list[str]) -> float | None:
    """Return `overlap_coe`, the largest slowdown by overlap, limited to 1..10; None without one."""
    slowdowns: dict[str, float] = {}
    failed: dict[str, list[str]] = {}
    emulated = False
    for key, m in sorted(measurements.items()):
        if not m.operation.startswith("overlap_"):
            continue
        # The larger slowdown of GEMMs and communication counts.
        found = [slowdown(m.samples_s, side) for side in SIDES if m.status == "ok"]
        if found and None not in found:
            slowdowns[key] = max(one.ratio for one in found if one is not None)
            emulated = emulated or m.emulated
        elif m.status != "ok":
            failed.setdefault(m.reason or m.status, []).append(key)
    # Cells that fail on a busy machine have one reason, which is reported once.
    warnings += [f"overlap_coe ignores {', '.join(keys)}: {why}" for why, keys in failed.items()]
    if not slowdowns:
        return None
    worst = max(slowdowns, key=lambda key: slowdowns[key])
    if slowdowns[worst] > _MAX_OVERLAP:
        warnings.append(
            f"overlap_coe is limited to {_MAX_OVERLAP:g}, the largest accepted "
            f"value, but {worst} was slowed down {slowdowns[worst]:.3g} times: "
            "the host may be busy"
        )
    if emulated:
        warnings.append(
            "overlap_coe was measured on one device, with a copy instead of communication"
        )
    # Concurrent work is never faster than alone: a value below 1 is noise.
    return min(max(1.0, slowdowns[worst]), _MAX_OVERLAP)

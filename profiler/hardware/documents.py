"""Documents derived from measured cells: bandwidths, times, overlap, and their curves.

All functions depend only on the measurements. A document can therefore always be derived again from
its sidecar, and two runs with equal samples write equal bytes.
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
from profiler.hardware.options import Cluster, HardwareOptions
from profiler.hardware.overlap import SIDES, slowdown

# --------------------------------------------------------------------------------------------------
# Assignment of measurements to sidecars, and selection among several runs.


KINDS: tuple[DocumentKind, ...] = ("allreduce", "p2p", "overlap", "sp_time")
"""Documents of a cluster, in the order they are written."""
MEASURED_FOR: dict[DocumentKind, tuple[str, ...]] = {
    "allreduce": ("allreduce",),
    "p2p": ("p2p",),
    "overlap": ("overlap",),
    "sp_time": ("allreduce", "all2all", "allgather", "reducescatter"),
}
"""Operations measured for each document, as spelled on the command line."""
REPLACES = "replaces"
"""Key of a run's metadata: comma list of operations whose earlier measurements it replaces.
Replaced measurements stay in the sidecar, unused."""


def family(operation: str) -> str:
    """Return the command-line operation that includes this one."""
    if operation.startswith("overlap_") or operation == "memcopy":
        return "overlap"
    return operation.removesuffix("_bidirectional")


def kinds_of(measurement: Measurement) -> tuple[DocumentKind, ...]:
    """Return the documents whose numbers or curves depend on a measurement."""
    operation = family(measurement.operation)
    if operation == "allreduce":
        # Documented times are those of consecutive ranks only.
        return ("allreduce", "sp_time") if measurement.consecutive else ("allreduce",)
    if operation == "p2p":
        return ("p2p",)
    return ("overlap",) if operation == "overlap" else ("sp_time",)


def newest_measurements(runs: Iterable[Run]) -> dict[str, Measurement]:
    """Return the current measurement per cell of ordered runs; a run may replace operations."""
    found: dict[str, Measurement] = {}
    for run in runs:
        replaced = set(str(run.metadata.get(REPLACES, "")).split(","))
        # A run replaces only earlier measurements, never later ones.
        left = (m for m in found.values() if family(m.operation) not in replaced)
        found = newest((*left, *run.measurements))
    return found


def requested_kinds(options: HardwareOptions, cluster: Cluster) -> frozenset[DocumentKind]:
    """Return the documents that depend on the requested operations."""
    asked = {kind for kind in KINDS if set(MEASURED_FOR[kind]) & set(options.operations)}
    if cluster.world_size == 1 and "allreduce" in asked:
        asked.add("p2p")  # it has no keys, but the planner expects the file
    return frozenset(asked)


# --------------------------------------------------------------------------------------------------
# Documents from cells: the value of each documented key.


_MAX_OVERLAP = 10.0
"""Largest coefficient that readers accept; a larger slowdown is noise or a broken host."""
# Documented keys exist for these two only; the others are stored in the curves of the sidecar.
_SP_TIME = ("allreduce", "all2all")
_OTHERS = ("all2all", "allgather", "reducescatter")
MIN_SP_TIME_SIZES = 8
"""Minimum number of sizes per group; Galvatron refuses a file of collective times with fewer."""


class Documents(Record):
    """Documents that the measurements of a cluster support so far."""

    data: Mapping[DocumentKind, dict[str, float] | None]
    """Content of every document in documented units; None while no measurement supports it."""
    curves: Mapping[DocumentKind, list[CurveData]]
    """Curves of every sidecar."""
    memory_bytes_per_s: float | None = None
    """Bytes read and written per second by a copy on one device; None if unknown."""
    warnings: list[str] = field(default_factory=list)
    """Messages on missing values and their replacements."""


_Series = dict[tuple[int, bool], dict[int, Measurement]]
"""Cells of one operation by (group size, consecutive) and size in bytes."""


def derive(
    measurements: Mapping[str, Measurement], cluster: Cluster, reference_bytes: int
) -> Documents:
    """Return the documents of a cluster's measurements, at most one per cell.

    Bandwidths are those at `reference_bytes`. Cells of a single rank support only the overlap
    document: on one device, all-reduce and point-to-point documents have no keys.
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
    """Return the errors that readers would raise for values outside the plausible range."""
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
    """Return the median of the samples in seconds, 0 if the cell has none."""
    samples = measurement.samples_s.get("time")
    if measurement.status != "ok" or not samples:
        return 0.0
    return summarize(samples).median_s


def _rate(cell: Measurement) -> float:
    """Return the bus bandwidth of a measured cell, bytes/s."""
    return bus_bytes_per_s(cell.operation, cell.group_size, cell.size_bytes, _median(cell))


def _series(measurements: Mapping[str, Measurement], operation: str) -> _Series:
    """Return the cells of an operation in groups of more than one rank, whatever their status."""
    found: _Series = {}
    cells = [m for m in measurements.values() if m.operation == operation and m.group_size > 1]
    # Documents list large groups first, and consecutive groups before strided ones.
    for m in sorted(cells, key=lambda m: (-m.group_size, not m.consecutive, m.size_bytes)):
        found.setdefault((m.group_size, m.consecutive), {})[int(m.size_bytes)] = m
    return found


def _curves(operation: str, series: _Series) -> list[CurveData]:
    """Return the curve of every group, with percentiles and the line fitted to the medians."""
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
    """Return the cell at the reference size, or the largest measured one below it."""
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
    """Return bus bandwidths in GB/s.

    The group of all ranks has no strided key, since it contains the same ranks.
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
    """Return bandwidths of a message to the next stage in GB/s, fewest stages first."""
    data = {}
    # A series lists large groups first, this file few stages first.
    for (stages, _), cells in reversed(series.items()):
        key = p2p_key(stages)
        cell = _at_reference(key, cells, reference_bytes, warnings)
        if cell is not None:
            data[key] = _rate(cell) / GB
    return data or None


def _sp_time(series: Mapping[str, _Series], warnings: list[str]) -> dict[str, float] | None:
    """Return times in ms for sizes of whole MiB in groups of consecutive ranks."""
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
                    "Measure with --resume --sizes 1M:1G:x2"
                )
    return data or None


def _overlap(measurements: Mapping[str, Measurement], warnings: list[str]) -> float | None:
    """Return the largest slowdown of computation or communication, 1 to 10, or None."""
    slowdowns: dict[str, float] = {}
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
            warnings.append(f"overlap_coe ignores {key}: {m.reason or m.status}")
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

"""Output of `profile-show`: header of a profile, its tables, a comparison, findings.

Every section of a profile is a function in `SECTIONS` and prints nothing if it has no data.
`profile-model` ends with the table of fitted times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autopar.command.console import Console
from autopar.command.show import (
    OPERATION_NAMES,
    format_rate,
    print_heading,
    print_line,
    print_note,
    print_pair,
    print_table,
)
from autopar.documents.hardware import HardwareEntry
from autopar.documents.sidecar import Measurement, TimeFit, newest_cells, read_sidecar
from autopar.rates.measured import COLLECTIVES, bus_bytes_per_s
from autopar.statistics import BAD_FIT, USABLE_SPREAD, relative_spread
from autopar.units import GB, GIB, MIB, MS, format_count, format_seconds, format_size
from profiler.hardware.overlap import slowdowns
from profiler.model.documents import bad_fits, fit_cells, largest_cell
from profiler.show.checks import Change, Comparison
from profiler.show.pictures import ASCII, UNICODE, Quantity, show_curves
from profiler.show.read import (
    Finding,
    Folder,
    Point,
    Profile,
    Series,
    SeriesKey,
    cell_warnings,
    kind_of,
    reference_cell,
    scope_by_shape,
    series_of,
    stamps,
    stragglers,
)

# --------------------------------------------------------------------------------------------------
# Fitted times of a model as a table, printed by `profile-model` and `profile-show`.


_COLUMNS = [
    "part",
    "pass",
    "sharding",
    "mode",
    "batch x seq",
    "ms/sample",
    "90 %",
    "launch",
    "error",
]
_LEGEND = (
    "batch x seq: the cell with the most tokens, with its fitted time and 90 % interval (none: "
    "wider than the time itself); launch: time independent of the batch; error: largest error of "
    "the fit (exact: as many terms as cells)"
)

_EXACT = 1e-9


def show_fits(console: Console, fits: Sequence[TimeFit]) -> None:
    """Print one row per fit; fits far from a measured time are coloured."""
    if not fits:
        return
    print_heading(console, "Fitted times")
    print_table(
        console,
        _COLUMNS,
        [_fit_row(fit) for fit in fits],
        left=5,
        ruled=False,
        styles=["yellow" if abs(fit.worst_relative) > BAD_FIT else None for fit in fits],
    )
    print_note(console, _LEGEND)


def _fit_row(fit: TimeFit) -> list[str]:
    cell = largest_cell(fit)
    per_sample = MS * cell.batch
    interval = ""
    if cell.fitted_low_s is not None and cell.fitted_high_s is not None:
        ends = (cell.fitted_low_s / per_sample, cell.fitted_high_s / per_sample)
        spread = relative_spread(cell.fitted_low_s, cell.fitted_s, cell.fitted_high_s)
        interval = "none" if spread > USABLE_SPREAD else "-".join(f"{end:.4g}" for end in ends)
    launch_s = fit.coefficients.launch_s
    return [
        "other" if fit.layer_type is None else f"layer type {fit.layer_type}",
        fit.time,
        "" if fit.degree == 1 else f"{fit.kind} {fit.degree}",
        fit.form,
        f"{cell.batch} x {','.join(map(str, cell.seq_lengths))}",
        f"{cell.fitted_s / per_sample:.4g}",
        interval,
        "" if launch_s is None else format_seconds(float(f"{launch_s:.3g}")),
        # With as few cells as terms, the fit is exact, which proves nothing.
        f"{100 * fit.worst_relative:+.1f} %" if abs(fit.worst_relative) > _EXACT else "exact",
    ]


# --------------------------------------------------------------------------------------------------
# Model files: data of a computation file in addition to Galvatron's keys.


def has_fits(path: Path) -> bool:
    """Return True if a model file contains times and has a sidecar.

    Raises DocumentError: the sidecar is damaged.
    """
    found = kind_of(path)
    if found is None or found[0] != "computation":
        return False
    return read_sidecar(path, "computation") is not None


def show_model(console: Console, path: Path) -> None:
    """Print the source of a model's times, and the quality of the fits.

    Fits missing in an older sidecar are computed from its samples.
    """
    sidecar = read_sidecar(path, "computation")
    assert sidecar is not None, "the caller asks has_fits"
    print_heading(console, "Layer times" + (f" of {sidecar.name}" if sidecar.name else ""))
    print_pair(console, "File", str(path))
    print_pair(console, "Source", f"{sidecar.source} ({sidecar.tool})")
    cells = [m for m in newest_cells(sidecar.runs).values() if m.status == "ok"]
    fits = sidecar.fits or fit_cells(cells)
    if not fits:
        print_line(console, "no samples, so no fit")
    show_fits(console, fits)
    for sentence in bad_fits(fits):
        print_line(console, sentence, style="yellow")


# --------------------------------------------------------------------------------------------------
# Source of a profile, by key of its metadata.


_LABELS: dict[str, dict[str, str]] = {
    "measured": {"time_utc": "", "command": ""},
    "hosts": {"hosts": "", "world_size": "ranks: ", "ranks_per_gpu": "ranks per GPU: "},
    "device": {"device": "", "driver": "driver "},
    "software": {
        "torch": "torch ",
        "cuda": "CUDA ",
        "nccl": "NCCL ",
        "python": "Python ",
        "autopar": "autopar ",
    },
    "method": {
        "backend": "backend ",
        "dtype": "",
        "isolated": "one group at a time",
        "cuda_graph": "CUDA graphs",
    },
}
"""Lines of the header: metadata keys and the text before each value."""
_LISTED = 8
"""Maximum cells listed by name; the rest is counted."""


def show_head(console: Console, folder: Folder, profile: Profile) -> None:
    """Print the shape of a profile, where and how it was measured, and its limitations."""
    name = next((sidecar.name for sidecar in profile.sidecars if sidecar.name), None)
    print_heading(console, f"Hardware profile of {profile.title}" + (f": {name}" if name else ""))
    for stamp in stamps(profile):
        print_line(console, stamp, style="bold yellow")
    print_pair(console, "Folder", str(folder.path))
    kinds = ", ".join(file.kind for file in profile.files)
    print_pair(console, "Files", kinds)
    units = {file.unit for file in profile.files if file.kind in ("allreduce", "p2p")}
    if not profile.sidecars:
        print_pair(
            console,
            "Measured",
            "unknown: no sidecar files"
            + (f"; unit of bandwidths: {' and '.join(sorted(units))}" if units else ""),
        )
    source = "; ".join(dict.fromkeys(sidecar.source for sidecar in profile.sidecars))
    if source:
        tools = ", ".join(dict.fromkeys(sidecar.tool for sidecar in profile.sidecars))
        print_pair(console, "Source", f"{source} ({tools})")
    data = dict(profile.metadata)
    # The source already contains the command.
    if str(data.get("command")) in source:
        del data["command"]
    for label, keys in _LABELS.items():
        parts = [text for key, words in keys.items() if (text := _worded(words, data.get(key)))]
        if parts:
            print_pair(console, label.capitalize(), ", ".join(parts))
    memory = [s.memory_bytes_per_s for s in profile.sidecars if s.memory_bytes_per_s is not None]
    size = [s.memory_bytes for s in profile.sidecars if s.memory_bytes is not None]
    if memory or size:
        parts = [f"{size[0] / GIB:.4g} GiB"] if size else []
        parts += [f"{memory[0] / GB:.4g} GB/s"] if memory else []
        print_pair(console, "Memory", ", ".join(parts))
    if len(profile.runs) > 1:
        print_pair(console, "Runs", f"{len(profile.runs)}; the newest is described here")


def _worded(words: str, value: str | float | bool | None) -> str:
    """Return a metadata value as text; empty if it is unknown or false."""
    if value is None or value is False:
        return ""
    return words if value is True else f"{words}{value}"


def show_troubles(console: Console, profile: Profile) -> None:
    """Print cells that failed or were skipped, stragglers, and suspicious samples."""
    for status in ("failed", "skipped"):
        reasons: dict[str, list[str]] = {}
        for cell in profile.cells.values():
            if cell.status == status:
                reasons.setdefault(cell.reason or "no reason recorded", []).append(cell.key)
        if reasons:
            print_heading(console, f"{status.capitalize()} measurements")
        for reason, keys in reasons.items():
            print_line(console, f"{_listed(keys, _LISTED)}: {reason}")
    slow = stragglers(profile)
    if slow:
        print_heading(console, "Stragglers")
    for (rank, host), found in slow.items():
        key, ratio = max(found, key=lambda item: item[1])
        cells = format_count(len(found), "measurement")
        print_line(
            console,
            f"rank {rank} on {host}: slow in {cells}, up to {ratio:.3g}x the others ({key})",
        )
    warnings = cell_warnings(profile.cells.values())
    if warnings:
        print_heading(console, "Suspicious samples")
    for key, text in warnings[:_LISTED]:
        print_line(console, f"{key}: {text}")
    if len(warnings) > _LISTED:
        print_line(console, f"{len(warnings) - _LISTED} more: --validate")


def _listed(keys: Sequence[str], most: int) -> str:
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


# --------------------------------------------------------------------------------------------------
# Hardware sections.


_TIME_COLUMNS = 6


def show_bandwidth(console: Console, profile: Profile) -> None:
    """Print the bus bandwidth of collectives by group size and kind."""
    series = series_of(profile)
    file = profile.file("allreduce")
    documented = {
        (entry.operation, entry.group_size, entry.consecutive): entry
        for entry in (file.entries if file is not None else ())
    }
    keys = [key for key in {**documented, **series} if key[0] in COLLECTIVES]
    keys.sort(key=lambda key: (COLLECTIVES.index(key[0]), key[1], not key[2]))
    rows = []
    size_bytes = _reference_bytes(profile)
    for key in keys:
        line = _bandwidth_row(profile, key, documented.get(key), series.get(key), size_bytes)
        if line is not None:
            rows.append([OPERATION_NAMES[key[0]], str(key[1]), _kind(profile, key), *line])
    if not rows:
        return
    print_heading(console, "Bus bandwidth of collectives")
    columns = ["operation", "group", "ranks", "link"]
    print_table(
        console,
        [*columns, "GB/s", "p5-p95", "n", "latency", "slope"],
        rows,
        left=4,
        ruled=False,
    )
    if size_bytes is not None:
        print_note(
            console,
            f"GB/s: bus bandwidth at {format_size(size_bytes)}, with percentiles and number of "
            "samples; latency and slope (GB/s): fitted over all sizes",
        )


def _reference_bytes(profile: Profile) -> float | None:
    """Return the message size of the bandwidth keys in bytes, None if unknown."""
    named = profile.metadata.get("reference_bytes")
    if isinstance(named, int | float) and named:
        return float(named)
    for file in profile.files:
        for entry in file.entries:
            point = reference_cell(profile, entry)
            if point is not None:
                return point.size_bytes
    return None


def _kind(profile: Profile, key: SeriesKey) -> str:
    if key[1] == profile.world_size:
        return "all"
    return "consec." if key[2] else "strided"


def _bandwidth_row(
    profile: Profile,
    key: SeriesKey,
    entry: HardwareEntry | None,
    series: Series | None,
    size_bytes: float | None,
) -> list[str] | None:
    point = next((p for p in (series.points if series else ()) if p.size_bytes == size_bytes), None)
    if entry is not None:
        value = entry.value
        point = reference_cell(profile, entry)
    elif point is not None and point.low_s is not None:
        value = bus_bytes_per_s(key[0], key[1], point.size_bytes, point.time_s)
    else:
        return None  # without bandwidth, shown in the table of times
    return _link(profile, key, series, value, point)


def _link(
    profile: Profile, key: SeriesKey, series: Series | None, value: float, point: Point | None
) -> list[str]:
    """Return scope, bandwidth, its percentiles and samples, and latency and slope of the fit."""
    scope = (series.scope if series else None) or scope_by_shape(profile, key) or ""
    spread, count, latency, slope = "", "", "", ""
    if point is not None and point.low_s is not None and point.high_s is not None:
        slow, fast = (
            bus_bytes_per_s(key[0], key[1], point.size_bytes, time)
            for time in (point.high_s, point.low_s)
        )
        spread = f"{format_rate(slow)}-{format_rate(fast)}"
        count = str(point.num_samples) if point.num_samples is not None else ""
    if series is not None and series.fit is not None:
        # Three digits: a fit is not more precise.
        latency = format_seconds(float(f"{series.fit[0]:.3g}"))
        if series.slope_bytes_per_s is not None:
            slope = format_rate(series.slope_bytes_per_s)
    return [scope.removesuffix("-node"), format_rate(value), spread, count, latency, slope]


def show_p2p(console: Console, profile: Profile) -> None:
    """Print the bandwidth between neighbouring pipeline stages by number of stages."""
    file = profile.file("p2p")
    series = series_of(profile)
    both = {key[1]: item for key, item in series.items() if key[0] == "p2p_bidirectional"}
    rows = []
    for entry in file.entries if file is not None else ():
        key = ("p2p", entry.group_size, True)
        back = both.get(entry.group_size)
        link = _link(profile, key, series.get(key), entry.value, reference_cell(profile, entry))
        both_ways = format_rate(back.bus_bytes_per_s(back.points[-1])) if back else ""
        rows.append([str(entry.group_size), *link, both_ways])
    copies = series.get(("memcopy", 1, True))
    if rows:
        print_heading(console, "Bandwidth between pipeline stages")
        columns = ["stages", "link", "GB/s", "p5-p95", "n", "latency", "slope", "both ways, GB/s"]
        print_table(console, columns, rows, left=2, ruled=False)
    if copies is not None:
        point = copies.points[-1]
        print_line(
            console,
            f"device memory: {format_rate(copies.bus_bytes_per_s(point))} GB/s read and written "
            f"by a copy of {format_size(point.size_bytes)}",
        )


def show_times(console: Console, profile: Profile) -> None:
    """Print the times of collectives in the file by group and message size."""
    file = profile.file("sp_time")
    entries = file.entries if file is not None else ()
    for operation in ("allreduce", "all2all"):
        table: dict[int, dict[int, float]] = {}
        for entry in entries:
            if entry.operation == operation and entry.size_bytes is not None:
                table.setdefault(entry.group_size, {})[entry.size_bytes] = entry.value
        if not table:
            continue
        name = OPERATION_NAMES[operation]
        print_heading(console, f"Time of one {name}, ms, by group and MiB")
        sizes = sorted({size for times in table.values() for size in times})
        for start in range(0, len(sizes), _TIME_COLUMNS):
            if start:
                console.print()
            chosen = sizes[start : start + _TIME_COLUMNS]
            print_table(
                console,
                ["group", *(f"{size // MIB}" for size in chosen)],
                [
                    [str(group), *(_ms(times.get(size)) for size in chosen)]
                    for group, times in sorted(table.items())
                ],
                ruled=False,
            )


def _ms(time_s: float | None) -> str:
    if time_s is None:
        return "-"
    value_ms = time_s / MS
    return f"{value_ms:.3g}" if value_ms < 100.0 else f"{value_ms:.0f}"


def show_overlap(console: Console, profile: Profile) -> None:
    """Print the mutual slowdown of computation and communication."""
    file = profile.file("overlap")
    entry = next(iter(file.entries), None) if file is not None else None
    cells = [
        cell
        for cell in profile.cells.values()
        if cell.operation.startswith("overlap_") and cell.status == "ok"
    ]
    if entry is None and not cells:
        return
    print_heading(console, "Overlap of compute and communication")
    if entry is not None:
        print_line(
            console,
            f"overlap_coe {entry.value:.4g}: slowdown of each while both run",
        )
    if cells:
        columns = ["communication", "size", "compute", "comm"]
        print_table(
            console,
            [*columns, "hidden", "samples", ""],
            [_overlap_row(cell) for cell in cells],
            ruled=False,
        )
        print_note(
            console,
            "compute, comm: time while both run over time alone; hidden: overlapped share of the "
            "shorter one",
        )


def _overlap_row(cell: Measurement) -> list[str]:
    name = OPERATION_NAMES.get(cell.operation.removeprefix("overlap_"), cell.operation)
    try:
        found = slowdowns(cell.samples_s)
    except (KeyError, ValueError) as error:
        return [name, format_size(cell.size_bytes), "", "", "", "", f"without samples ({error})"]
    return [
        name,
        format_size(cell.size_bytes),
        f"{found.compute:.3f}",
        f"{found.communication:.3f}",
        f"{100 * found.efficiency:.0f} %",
        str(min(len(samples) for samples in cell.samples_s.values())),
        "emulated" if cell.emulated else "",
    ]


SECTIONS: tuple[Callable[[Console, Profile], None], ...] = (
    show_bandwidth,
    show_p2p,
    show_times,
    show_overlap,
)
"""Tables of a profile in the order they are printed."""


# --------------------------------------------------------------------------------------------------
# Output of the three modes of `profile-show`: a profile, a comparison, findings.


_ONE_SIDE = 12
"""Maximum keys of one side listed by name; the rest is counted."""
_STYLES = {"regression": "bold red", "improvement": "green"}


def show_folder(console: Console, folder: Folder, quantity: Quantity | None) -> None:
    """Print every profile of a folder: header, tables, curves, problems."""
    marks = UNICODE if console.encoding.lower().startswith("utf") else ASCII
    for profile in folder.profiles:
        show_head(console, folder, profile)
        for section in SECTIONS:
            section(console, profile)
        if quantity is not None:
            show_curves(console, series_of(profile), quantity, marks)
        show_troubles(console, profile)


def show_comparison(
    console: Console,
    comparison: Comparison,
    *,
    title: str,
    threshold: float,
    circumstances: Sequence[str],
) -> None:
    """Print the file keys and curve points that changed."""
    print_heading(console, title)
    for clause in circumstances:
        print_pair(console, "Different", clause)
    counts = {
        verdict: comparison.count(verdict)
        for verdict in ("regression", "improvement", "within the spread", "unchanged")
    }
    print_line(
        console,
        f"{format_count(len(comparison.changes), 'value')}: "
        f"{format_count(counts['regression'], 'regression')}, "
        f"{format_count(counts['improvement'], 'improvement')}, "
        f"{counts['within the spread']} within the spread, {counts['unchanged']} unchanged "
        f"(at most {100 * threshold:g} %)",
    )
    listed = [
        change
        for change in comparison.changes
        # Curve points are many, so only changed ones are listed.
        if change.kind != "time" or change.verdict in ("regression", "improvement")
    ]
    if listed:
        console.print()
        print_table(
            console,
            ["key", "old", "new", "new/old", "spread", "verdict"],
            [_change_row(change) for change in listed],
            styles=[_STYLES.get(change.verdict) for change in listed],
            ruled=False,
        )
    if len(listed) < len(comparison.changes):
        rest = len(comparison.changes) - len(listed)
        print_note(console, f"{rest} unchanged times are not listed")
    for side, keys in (("old", comparison.only_old), ("new", comparison.only_new)):
        if keys:
            print_pair(console, f"Only {side}", _listed(keys, _ONE_SIDE))


def _change_row(change: Change) -> list[str]:
    loud = change.verdict == "regression"
    return [
        change.key,
        _value(change, change.old),
        _value(change, change.new),
        f"{change.ratio:.3f}",
        f"+-{100 * change.spread:.1f} %" if change.spread else "",
        change.verdict.upper() if loud else change.verdict,
    ]


def _value(change: Change, value: float) -> str:
    if change.kind == "bandwidth":
        return f"{format_rate(value)} GB/s"
    return format_seconds(value) if change.kind == "time" else f"{value:.4g}"


def show_findings(console: Console, findings: Sequence[Finding], num_files: int) -> None:
    """Print one line per finding, and their number."""
    for item in findings:
        console.print(f"{item.severity}: {item.sentence}", markup=False, soft_wrap=True)
    errors = sum(item.severity == "error" for item in findings)
    files = format_count(num_files, "file")
    if findings:
        count = (
            f"{format_count(errors, 'error')}, {format_count(len(findings) - errors, 'warning')}"
        )
        console.print(f"{count} in {files}", markup=False)
    else:
        console.print(f"{files}: no findings", markup=False)

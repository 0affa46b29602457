"""The head of a profile: what it is, where and how it was measured, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console

from autopar.command.show import print_heading, print_line, print_pair, print_table
from autopar.documents.sidecar import Measurement, TimeFit
from autopar.statistics import BAD_FIT, USABLE_SPREAD, relative_spread, warnings_of
from autopar.units import GB, GIB, MS, format_count, format_seconds
from profiler.model.documents import largest_cell
from profiler.show.read import Folder, Profile

__all__ = [
    "cell_warnings",
    "show_fits",
    "show_head",
    "show_troubles",
    "stamps",
    "stragglers",
]


# --------------------------------------------------------------------------------------------------
# Fitted times of a model as a table; `profile-model` ends with it, `profile-show` shows all.


_COLUMNS = ["part", "pass", "sharding", "mode", "largest", "ms/sample", "90 %", "launch", "worst"]
_LEGEND = (
    "largest: the cell with the most tokens, batch x sequence length, and the fitted time there "
    "with its 90 % interval by the scatter of the samples (none: wider than the time itself, so "
    "that nothing follows from it); launch: the part that no batch changes; "
    "worst: what the fit is off by at its worst cell, exact where too few cells could tell"
)

_EXACT = 1e-9


def show_fits(console: Console, fits: Sequence[TimeFit]) -> None:
    """Print a row for every fit, those that are far from a time in another colour."""
    if not fits:
        return
    print_heading(console, "fitted times")
    print_table(
        console,
        _COLUMNS,
        [_row(fit) for fit in fits],
        left=5,
        styles=["yellow" if abs(fit.worst_relative) > BAD_FIT else None for fit in fits],
    )
    print_line(console, _LEGEND, style="dim")


def _row(fit: TimeFit) -> list[str]:
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
        # as few cells as terms are met exactly, which says nothing
        f"{100 * fit.worst_relative:+.1f} %" if abs(fit.worst_relative) > _EXACT else "exact",
    ]


# --------------------------------------------------------------------------------------------------
# Where a profile comes from, by key of its metadata.


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
"""Lines of the head: the metadata they show and the words before each."""
_LISTED = 8
"""Cells listed by name before the rest is counted."""


def stamps(profile: Profile) -> list[str]:
    """Return what keeps the numbers from being measurements of a machine, in words."""
    sidecars = profile.sidecars
    found = []
    if any(sidecar.estimated for sidecar in sidecars):
        found.append("ESTIMATED from datasheets, not measured")
    if any(sidecar.synthetic for sidecar in sidecars):
        found.append("SYNTHETIC: exercises the code, describes no machine")
    if any(cell.emulated for cell in profile.cells.values()):
        found.append("EMULATED in part: one device played both sides")
    return found


def stragglers(profile: Profile) -> dict[tuple[int, str], list[tuple[str, float]]]:
    """Return cells and ratios to the median rank, by rank and host that were much slower."""
    found: dict[tuple[int, str], list[tuple[str, float]]] = {}
    for cell in profile.cells.values():
        for straggler in cell.stragglers:
            found.setdefault((straggler.rank, straggler.host), []).append(
                (cell.key, straggler.ratio)
            )
    return dict(sorted(found.items()))


def cell_warnings(cells: Iterable[Measurement]) -> list[tuple[str, str]]:
    """Return what is suspicious about the samples of cells: (key, sentence)."""
    found = []
    for cell in cells:
        for quantity, samples in cell.samples_s.items() if cell.status == "ok" else ():
            of = "" if quantity == "time" else f"{quantity.replace('_', ' ')}: "
            found += [(cell.key, of + text) for text in warnings_of(samples)] if samples else []
    return found


def show_head(console: Console, folder: Folder, profile: Profile) -> None:
    """Print what a profile is, where and how it was measured, and what it is not."""
    name = next((sidecar.name for sidecar in profile.sidecars if sidecar.name), None)
    print_heading(console, f"hardware profile of {profile.title}" + (f": {name}" if name else ""))
    for stamp in stamps(profile):
        print_line(console, stamp, style="bold yellow")
    print_pair(console, "read from", str(folder.path))
    kinds = ", ".join(file.kind for file in profile.files)
    print_pair(console, "files", kinds)
    units = {file.unit for file in profile.files if file.kind in ("allreduce", "p2p")}
    if not profile.sidecars:
        print_pair(
            console,
            "measured",
            "unknown: no sidecar is beside these files"
            + (f"; bandwidths were read as {' and '.join(sorted(units))}" if units else ""),
        )
    source = "; ".join(dict.fromkeys(sidecar.source for sidecar in profile.sidecars))
    if source:
        tools = ", ".join(dict.fromkeys(sidecar.tool for sidecar in profile.sidecars))
        print_pair(console, "source", f"{source} ({tools})")
    data = dict(profile.metadata)
    # the source says the command already
    if str(data.get("command")) in source:
        del data["command"]
    for label, keys in _LABELS.items():
        parts = [text for key, words in keys.items() if (text := _worded(words, data.get(key)))]
        if parts:
            print_pair(console, label, ", ".join(parts))
    memory = [s.memory_bytes_per_s for s in profile.sidecars if s.memory_bytes_per_s is not None]
    size = [s.memory_bytes for s in profile.sidecars if s.memory_bytes is not None]
    if memory or size:
        parts = [f"{size[0] / GIB:.4g} GiB"] if size else []
        parts += [f"{memory[0] / GB:.4g} GB/s"] if memory else []
        print_pair(console, "device memory", ", ".join(parts))
    if len(profile.runs) > 1:
        print_pair(console, "runs", f"{len(profile.runs)}; the newest is described here")


def _worded(words: str, value: str | float | bool | None) -> str:
    """Return a circumstance in words; empty for what is unknown or does not hold."""
    if value is None or value is False:
        return ""
    return words if value is True else f"{words}{value}"


def show_troubles(console: Console, profile: Profile) -> None:
    """Print cells that failed or were skipped, stragglers, and suspicious samples."""
    for status in ("failed", "skipped"):
        reasons: dict[str, list[str]] = {}
        for cell in profile.cells.values():
            if cell.status == status:
                reasons.setdefault(cell.reason or "no reason was recorded", []).append(cell.key)
        if reasons:
            print_heading(console, f"{status} cells")
        for reason, keys in reasons.items():
            print_line(console, f"{_listed(keys)}: {reason}")
    slow = stragglers(profile)
    if slow:
        print_heading(console, "stragglers")
    for (rank, host), found in slow.items():
        key, ratio = max(found, key=lambda item: item[1])
        cells = format_count(len(found), "cell")
        print_line(
            console,
            f"rank {rank} on {host}: in {cells}, at worst {ratio:.3g} times the others ({key})",
        )
    warnings = cell_warnings(profile.cells.values())
    if warnings:
        print_heading(console, "suspicious samples")
    for key, text in warnings[:_LISTED]:
        print_line(console, f"{key}: {text}")
    if len(warnings) > _LISTED:
        print_line(console, f"and {len(warnings) - _LISTED} more; --validate lists all")


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - _LISTED} more" if len(keys) > _LISTED else ""
    return ", ".join(keys[:_LISTED]) + more

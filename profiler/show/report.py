"""What the three questions to `profile-show` print: a profile, a comparison, findings."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from autopar.units import format_count, format_seconds
from profiler.show.compare import Change, Comparison
from profiler.show.curves import ASCII, UNICODE, Quantity, show_curves
from profiler.show.findings import Finding
from profiler.show.frame import format_rate, print_heading, print_line, print_pair, print_table
from profiler.show.load import Folder
from profiler.show.provenance import show_head, show_troubles
from profiler.show.series import series_of
from profiler.show.tables import SECTIONS

__all__ = ["show_comparison", "show_findings", "show_folder"]

_ONE_SIDE = 12
"""Keys of one side that are named before the rest is counted."""
_STYLES = {"regression": "bold red", "improvement": "green"}


def show_folder(console: Console, folder: Folder, quantity: Quantity | None) -> None:
    """Print every profile of a folder: head, tables, curves, troubles."""
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
    """Print documented keys, and of the points of curves those that changed."""
    print_heading(console, title)
    for clause in circumstances:
        print_pair(console, "different", clause)
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
        if change.kind != "time" or change.verdict in ("regression", "improvement")
    ]
    if listed:
        console.print()
        print_table(
            console,
            ["key", "old", "new", "new/old", "spread", "verdict"],
            [_row(change) for change in listed],
            styles=[_STYLES.get(change.verdict) for change in listed],
        )
    if len(listed) < len(comparison.changes):
        rest = len(comparison.changes) - len(listed)
        print_line(console, f"{rest} times that did not change are not listed", style="dim")
    for side, keys in (("old", comparison.only_old), ("new", comparison.only_new)):
        if keys:
            more = f" and {len(keys) - _ONE_SIDE} more" if len(keys) > _ONE_SIDE else ""
            print_pair(console, f"only {side}", ", ".join(keys[:_ONE_SIDE]) + more)


def _row(change: Change) -> list[str]:
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
    """Print one line per finding, and how many there are."""
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

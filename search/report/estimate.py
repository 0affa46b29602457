"""Shows one priced execution to a person: time, memory, rates, requirements, assumptions.

Every table is at most 80 columns wide, and says the same without colours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from autopar.units import format_bytes, format_seconds
from search.analytic.validation import SOURCE, Check, errors_of
from search.report.estimate_parts import Part
from search.report.sections import make_table, print_heading, print_item, print_line

__all__ = [
    "format_rate",
    "show_layers",
    "show_lists",
    "show_memory_parts",
    "show_pairs",
    "show_time_parts",
    "show_title",
    "show_validation",
]

_PEERS = {"step time": 3.65, "states": 8.5, "activations": 2.1}
"""Mean errors of the published Calculon model, in percent, with the system it ships."""


def format_rate(per_s: float) -> str:
    """Return what is done per second, without an exponent."""
    return f"{per_s:,.0f}" if per_s >= 1e4 else f"{per_s:.5g}"


def show_title(console: Console, title: str, speed: str) -> None:
    """Print what was priced and how fast it is."""
    print_line(console, title, style="bold")
    print_line(console, speed, style="bold")


def show_time_parts(console: Console, parts: Sequence[Part], total_s: float) -> None:
    """Print the parts of a step; `on the network` includes what is hidden."""
    print_heading(console, "step time")
    linked = any(part.whole is not None for part in parts)
    table = make_table("part", "time", "share", *(("on the network",) if linked else ()), left=1)
    for part in parts:
        row = [part.name, format_seconds(part.amount), _percent(part.amount / total_s)]
        if linked:
            row.append("" if part.whole is None else format_seconds(part.whole))
        table.add_row(*row)
    table.add_row("step", format_seconds(total_s), _percent(1.0), style="bold")
    console.print(table)


def show_memory_parts(
    console: Console,
    parts: Sequence[Part],
    capacity_bytes: float,
    *,
    second: tuple[float, float] | None = None,
) -> None:
    """Print the parts of the fullest processor's memory against its capacity.

    second : needed and existing bytes of a second memory that is used.
    """
    print_heading(console, "memory per processor")
    table = make_table("part", "size", "of capacity", left=1)
    for part in parts:
        table.add_row(part.name, format_bytes(part.amount), _percent(part.amount / capacity_bytes))
    needed = sum(part.amount for part in parts)
    table.add_row("needed", format_bytes(needed), _percent(needed / capacity_bytes), style="bold")
    table.add_row("capacity", format_bytes(capacity_bytes), _percent(1.0))
    if second is not None:
        table.add_row("second memory needed", format_bytes(second[0]), _percent(_share(*second)))
        table.add_row("second memory capacity", format_bytes(second[1]), _percent(1.0))
    console.print(table)


def show_pairs(console: Console, heading: str, rows: Sequence[tuple[str, ...]]) -> None:
    """Print names and values, and behind them what the machine has; nothing without rows."""
    if not rows:
        return
    print_heading(console, heading)
    table = make_table(*("what", "value", "of the machine")[: len(rows[0])], left=1)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def show_layers(
    console: Console,
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, tuple[str, str]],
    *,
    heading: str = "one layer, one micro-batch",
) -> None:
    """Print a row per operation of a layer.

    columns : key of a row -> (heading, 's', 'B', 'FLOP' or '').
    """
    print_heading(console, heading)
    table = make_table(*(heading for heading, _ in columns.values()), left=1)
    for row in rows:
        table.add_row(*(_cell(row[key], unit) for key, (_, unit) in columns.items()))
    console.print(table)


def show_lists(console: Console, lists: Mapping[str, Sequence[str]]) -> None:
    """Print lists of sentences under their headings, empty ones left out."""
    for heading, items in lists.items():
        if items:
            print_heading(console, heading)
            for item in items:
                print_item(console, item)


def show_validation(
    console: Console, checks: Sequence[Check], compat: Sequence[Check], *, system: str
) -> None:
    """Print published figures with the errors of the default and of the published model.

    Errors are signed: above 0 where a model says more than was published.
    """
    print_line(console, f"published figures of {SOURCE}, and the model on {system}", style="bold")
    print_item(console, "table 5: measured step times, A100 80 GB")
    print_item(console, "figures 1 and 7: that paper's own counts of bytes, not measurements")
    print_item(console, "no constant of the model or of the shipped system was fitted to them")
    for group in dict.fromkeys(check.group for check in checks):
        print_heading(console, group)
        table = make_table(
            "model", "mode", "published", "default", "error", "--compat", "error", left=2
        )
        for mine, theirs in zip(checks, compat, strict=True):
            if mine.group == group:
                table.add_row(
                    mine.model,
                    mine.mode,
                    f"{mine.published:.4g} {mine.unit}",
                    f"{mine.computed:.4g}",
                    _signed(mine.error),
                    f"{theirs.computed:.4g}",
                    _signed(theirs.error),
                )
        console.print(table)
    print_heading(console, "errors")
    ours, kept = errors_of(tuple(checks)), errors_of(tuple(compat))
    table = make_table("figures", "model", "mean size", "mean", "worst", "published", left=2)
    for group in ours:
        peer = f"{_PEERS[group]:g} %" if group in _PEERS else ""
        for name, errors, mean in (("default", ours, ""), ("--compat", kept, peer)):
            e = errors[group]
            table.add_row(group, name, _percent(e.mean, 2), _signed(e.bias), _signed(e.worst), mean)
    console.print(table)
    print_line(
        console,
        "published: mean size of the errors that the published model has on its own A100",
        style="dim",
    )


def _cell(value: object, unit: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _cell(sum(value), unit)
    assert isinstance(value, int | float), value
    if not value:
        return "0"
    if unit == "s":
        return format_seconds(value)
    if unit == "B":
        return format_bytes(value)
    return f"{value / 1e9:.4g}" if unit == "GFLOP" else f"{value:.4g}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.inf


def _percent(share: float, digits: int = 1) -> str:
    return f"{share * 100:.{digits}f} %"


def _signed(share: float) -> str:
    return f"{share * 100:+.2f} %"

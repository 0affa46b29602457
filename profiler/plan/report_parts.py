"""Small parts of the tables of `profile-plan`: figures, differences, rows that are too many."""

from __future__ import annotations

from rich.console import Console

from autopar.units import format_bytes, format_seconds
from profiler.show.frame import print_line, print_table

__all__ = ["difference", "no_prediction", "optional_bytes", "optional_seconds", "print_some"]

_MOST_ROWS = 24
"""Ranks or stages that a table lists before it says how many there are more."""


def print_some(
    console: Console, columns: list[str], rows: list[list[str]], *, left: int = 1
) -> None:
    """Print the first rows of a table, and how many there are more."""
    print_table(console, columns, rows[:_MOST_ROWS], left=left)
    if len(rows) > _MOST_ROWS:
        print_line(console, f"and {len(rows) - _MOST_ROWS} more, which --json has", style="dim")


def optional_seconds(value: float | None) -> str:
    """Return a duration for people, nothing for None."""
    return "" if value is None else format_seconds(value)


def optional_bytes(value: float | None) -> str:
    """Return a byte count for people, nothing for None."""
    return "" if value is None else format_bytes(value)


def difference(predicted: float | None, measured: float) -> str:
    """Return how much more was predicted than measured, nothing where that has no meaning."""
    if predicted is None or measured <= 0:
        return ""
    return f"{100 * (predicted / measured - 1):+.1f} %"


def no_prediction(what: str) -> str:
    """Return a sentence on why there is nothing to compare with."""
    return (
        f"no predicted {what} to compare with: a plan file of autopar-search has them, a strategy "
        "file and a scaled-down plan do not"
    )

"""Shows what a tuner found: the best execution, how it was reached, and what was refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from autopar.units import format_bytes, format_seconds
from search.analytic.calculon.exploration import Objective
from search.analytic.tuners import TuningResult
from search.report.sections import make_table, print_heading, print_line

__all__ = ["show_tuning", "tuning_document"]

_STEPS = 8
"""Improvements that are shown, the last ones."""
_REFUSALS = 5


def show_tuning(console: Console, result: TuningResult) -> None:
    """Print a result whose best execution exists."""
    assert result.best is not None
    best = result.best
    print_heading(console, "best of all" if result.exhaustive else "best found")
    print_line(
        console,
        f"{best.sample_rate_per_s:.5g} samples/s, {format_seconds(best.total_time_s)} a step, "
        f"{format_bytes(best.tier1_bytes)}",
    )
    table = make_table("field", "value", left=1)
    for name, value in best.execution.items():
        table.add_row(name, str(value).lower() if isinstance(value, bool) else str(value))
    console.print(table)
    print_heading(console, "how it was reached")
    table = make_table("after", _HEADS[result.objective])
    for step in result.trace[-_STEPS:]:
        table.add_row(f"{step.evaluations:,}", _figure(result.objective, step.value))
    console.print(table)
    print_line(
        console,
        f"{result.evaluations:,} evaluations of {result.space_size:,} points; "
        f"{result.feasible_share * 100:.1f} % can run",
    )
    for reason, count in list(result.refused.items())[:_REFUSALS]:
        print_line(console, f"{count:,} refused: {reason}", style="dim")
    if not result.exhaustive:
        print_line(console, "not every point was priced: a better one may exist", style="dim")


def tuning_document(result: TuningResult) -> dict[str, Any]:
    """Return a result as the object of `--json`, in seconds and bytes."""
    return {**asdict(result), "feasible_share": result.feasible_share}


_HEADS: dict[Objective, str] = {"rate": "samples/s", "time": "step", "memory": "memory"}


def _figure(objective: Objective, value: float) -> str:
    if objective == "rate":
        return f"{value:.5g}"
    return format_seconds(value) if objective == "time" else format_bytes(value)

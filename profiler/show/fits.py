"""Fitted times of a model as a table; `profile-model` ends with it, `profile-show` shows all."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from autopar.model_measurements import TimeFit
from autopar.stats import USABLE_SPREAD, relative_spread
from autopar.time_fits import BAD_FIT
from autopar.units import MS, format_seconds
from profiler.model.fits import largest_cell
from profiler.show.frame import print_heading, print_line, print_table

__all__ = ["show_fits"]

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

"""Shows a verification to a person, in 100 columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autopar import __version__
from autopar.documents.calibration import device_of
from autopar.units import MIB, format_count, format_seconds
from profiler.verify.calibrate import Calibrated, Subject
from profiler.verify.compare import Comparison, Row
from profiler.verify.options import MINIMUM_PLANS, VerifyOptions

__all__ = [
    "FORMAT",
    "VERSION",
    "show_verification",
    "verify_document",
]


# --------------------------------------------------------------------------------------------------
# The JSON document of `autopar-verify`; docs/verify.md explains its keys.


FORMAT = "autopar-verify"
# 1: first version.
VERSION = 1


def verify_document(
    options: VerifyOptions,
    subject: Subject,
    comparison: Comparison,
    calibrated: Calibrated | None,
    calibration_path: Path | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return what was predicted and measured, and what follows; times in s, memory in bytes."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "tool": f"autopar {__version__}",
        "hardware": subject.hardware,
        "world_size": subject.world_size,
        "model": subject.model,
        "num_layers": subject.num_layers,
        "seq_length": list(subject.seq_length),
        "precision": subject.precision,
        "global_batch": options.batch,
        "num_rounds": options.repeats,
        "steps_per_round": options.steps,
        "summary": _summary_document(comparison),
        "plans": [_row(row) for row in comparison.rows],
        "calibration": None if calibrated is None else _calibration(calibrated, calibration_path),
        "inputs": [
            {"role": role, "path": path, "sha256": digest} for role, path, digest in subject.inputs
        ],
        "notes": list(notes),
    }


def _summary_document(comparison: Comparison) -> dict[str, Any]:
    interval = comparison.spearman_interval
    return {
        "num_plans": len(comparison.rows),
        "median_error": comparison.median_error,
        "median_error_interval": list(comparison.median_error_interval),
        "worst_error": comparison.worst_error,
        "spearman": comparison.spearman,
        "spearman_interval": None if interval is None else list(interval),
        "best_predicted": comparison.best_predicted,
        "best_measured": comparison.best_measured,
        "regret": comparison.regret,
        "regret_interval": list(comparison.regret_interval),
        "measured_spread": comparison.spread,
        "measured_noise": comparison.noise,
        "median_memory_error": comparison.median_memory_error,
    }


def _row(row: Row) -> dict[str, Any]:
    plan = row.plan
    return {
        "name": plan.name,
        "label": plan.label,
        "chosen": plan.chosen,
        "predicted_s": plan.predicted_s,
        "predicted_interval_s": None if plan.interval_s is None else list(plan.interval_s),
        "measured_s": row.measured_s,
        "measured_interval_s": list(row.interval_s),
        "error": row.error,
        "predicted_rank": row.predicted_rank,
        "measured_rank": row.measured_rank,
        "predicted_bytes": list(plan.predicted_bytes),
        "peak_bytes": list(plan.peak_bytes) or None,
        "peak_source": plan.peak_source,
        "memory_error": row.memory_error,
        "rounds_s": [list(run.step_s) for run in plan.rounds],
        "plan": dict(plan.strategy),
    }


def _calibration(found: Calibrated, path: Path | None) -> dict[str, Any]:
    return {
        "path": None if path is None else str(path),
        "computation": found.times.computation,
        "communication": found.times.communication,
        "fixed_s": found.times.fixed_s,
        "memory": found.memory,
        "median_error_before": found.error(found.before_s),
        "median_error_after": found.error(found.after_s),
        "median_error_left_out": found.error(found.left_out_s),
        "advised": found.is_advised,
    }


# --------------------------------------------------------------------------------------------------
# On the terminal.


_WITHIN = 0.05
"""A predicted best that takes so much longer than the measured best is as good as it."""


def show_verification(
    console: Console,
    subject: Subject,
    comparison: Comparison,
    calibrated: Calibrated | None,
    calibration_path: Path | None,
    notes: Sequence[str],
) -> None:
    """Print the table of plans, the summary, and the calibration."""
    ranks = format_count(subject.world_size, "rank")
    console.print(
        f"{escape(subject.model)} ({subject.num_layers} layers, {subject.precision}) on "
        f"{escape(subject.hardware)}, {ranks}",
        style="bold",
    )
    console.print()
    console.print(_table(comparison.rows))
    console.print()
    for line in _summary(comparison):
        console.print(line)
    if calibrated is not None:
        console.print("\ncalibration", style="bold")
        for line in _factors(calibrated):
            console.print(line)
        if calibration_path is not None:
            for line in _advice(calibrated, subject, calibration_path):
                console.print(line)
    if notes:
        console.print("\nnotes", style="bold")
        for note in notes:
            console.print(f"  - {escape(note)}")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    table.add_column("plan", overflow="fold", min_width=16)
    for name in ("predicted", "measured", "", "error", "ranks", "MiB", "counted", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        low, high = row.interval_s
        table.add_row(
            escape(row.plan.label),
            _ms(row.plan.predicted_s),
            _ms(row.measured_s),
            f"{_ms(low, 3)}-{_ms(high, 3)}",
            _percent(row.error),
            f"{row.predicted_rank:g}/{row.measured_rank:g}",
            f"{row.predicted_bytes / MIB:.1f}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / MIB:.1f}",
            "-" if row.memory_error is None else _percent(row.memory_error),
        )
    table.caption = (
        "times in ms, measured with its 95 % interval; error: predicted / measured - 1; ranks as\n"
        "predicted and as measured; memory predicted and counted on the fullest stage"
    )
    table.caption_justify = "left"
    return table


def _summary(c: Comparison) -> list[str]:
    count = len(c.rows)
    spread = f"spread by a factor of {c.spread:.2f}, noise +-{c.noise:.1%}"
    worst = f"worst {_percent(c.worst_error)}"
    lines = [
        f"{format_count(count, 'plan')}, measured times {spread}",
        f"median |error|: {c.median_error:.1%} ({_span(c.median_error_interval)}), {worst}",
    ]
    if c.spearman is None or c.spearman_interval is None:
        lines.append("rank correlation: none, the plans are equally fast or there is one")
    else:
        low, high = c.spearman_interval
        few = "" if count >= MINIMUM_PLANS else f"; {count} plans say little"
        lines.append(
            f"rank correlation (Spearman) of predicted and measured: {c.spearman:.2f} "
            f"({low:.2f} to {high:.2f} over repeats{few})"
        )
    labels = {row.plan.name: row.plan.label for row in c.rows}
    best = escape(labels[c.best_predicted])
    if c.best_predicted == c.best_measured:
        lines.append(f"the predicted best is the measured best: {best}")
    else:
        verdict = "as good as" if c.regret <= _WITHIN else "slower than"
        lines.append(
            f"the predicted best ({best}) is {verdict} the measured best "
            f"({escape(labels[c.best_measured])}): {_percent(c.regret)} "
            f"({_span(c.regret_interval)})"
        )
    if c.median_memory_error is not None:
        lines.append(f"median |error| of memory: {c.median_memory_error:.1%}")
    return lines


def _factors(found: Calibrated) -> list[str]:
    times = found.times
    low, high = found.computation_interval
    lines = [f"computation x {times.computation:.3f} ({low:.3f} to {high:.3f})"]
    if times.communication is not None and found.communication_interval is not None:
        low, high = found.communication_interval
        lines.append(f"communication x {times.communication:.3f} ({low:.3f} to {high:.3f})")
    low, high = found.fixed_interval_s
    lines.append(
        f"{format_seconds(times.fixed_s)} more per step ({format_seconds(low)} to "
        f"{format_seconds(high)})"
    )
    if found.memory is not None and found.memory_interval is not None:
        low, high = found.memory_interval
        lines.append(f"memory x {found.memory:.3f} ({low:.3f} to {high:.3f})")
    lines.append(
        f"median |error| of times: {found.error(found.before_s):.1%} before, "
        f"{found.error(found.after_s):.1%} after, {found.error(found.left_out_s):.1%} for a plan "
        "that is left out of the fit"
    )
    if found.memory_before is not None and found.memory_after is not None:
        worse = "" if found.memory_after < found.memory_before else ", which is no better"
        lines.append(
            f"median |error| of memory by stage: {found.memory_before:.1%} before, "
            f"{found.memory_after:.1%} after{worse}"
        )
    return lines


def _advice(found: Calibrated, subject: Subject, path: Path) -> list[str]:
    """Return whether to use the calibration, and with what."""
    name, device = escape(str(path)), escape(device_of(subject.hardware))
    if not found.is_advised:
        return [
            f"do not use {name}:",
            "a plan that is left out of the fit is predicted no better than without it;",
            "measure again on an idle machine, or with more --repeats",
        ]
    return [
        f"autopar-search --calibration {name} applies it,",
        f"with files measured on {device}; a card and files of another device are refused",
    ]


def _ms(time_s: float, digits: int = 4) -> str:
    # seconds to ms
    value = time_s * 1e3
    return f"{value:.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _percent(share: float) -> str:
    return f"{share:+.1%}"


def _span(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.1%} to {ends[1]:.1%}"

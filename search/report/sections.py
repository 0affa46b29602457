"""Sections of a report: the plan, the step time, memory, alternatives, and how they are set.

Reads `SearchResult` and `Prediction` only. `search.report.terminal` puts the sections together.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from autopar.plan import LayerStrategy, Plan
from autopar.units import format_bytes, format_seconds
from search.predict import strategy_label
from search.result import Prediction, SearchResult

__all__ = [
    "make_table",
    "one_line",
    "plan_runs",
    "print_heading",
    "print_item",
    "print_line",
    "show_alternatives",
    "show_memory",
    "show_plan",
    "show_waterfall",
]

_BAR = 44
_COMPUTE = ("forward", "backward", "recompute")
_PER_STEP = ("tail", "optimizer")
_PARTS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recomputation",
    "vocab": "embedding, head",
    "tp": "tensor parallel",
    "ulysses": "Ulysses",
    "cp": "context parallel",
    "zero3": "ZeRO-3 gather",
    "redistribution": "redistribution",
    "bubble": "pipeline bubble",
    "transfer": "stage transfer",
    "gradient_sync": "gradient sync",
    "optimizer": "optimizer",
    "fixed": "fixed, by calibration",
}
"""Parts of a step in the order in which they are shown, and their names."""


def show_plan(console: Console, plan: Plan, prediction: Prediction) -> None:
    """Print the plan per stage and layer run, with the time of one micro-batch."""
    print_heading(console, "plan")
    samples = plan.global_batch / plan.num_microbatches
    schedule = "GPipe" if plan.pipeline_type == "gpipe" else "1F1B"
    stages = _count(plan.num_stages, "stage")
    print_line(
        console,
        f"{_count(plan.world_size, 'GPU')} = {stages} of {plan.world_size // plan.num_stages}, "
        f"{schedule}, global batch {plan.global_batch} = "
        f"{_count(plan.num_microbatches, 'micro-batch')} of {_count(samples, 'sample')}",
    )
    vocab = plan.vocab
    kind = "vsp" if vocab.ulysses else "vtp"
    print_line(
        console,
        f"embedding and head: {kind}{vocab.tp}"
        f"-dp{plan.world_size // max(plan.num_stages * vocab.tp, 1)}"
        + ("-zero3" if vocab.zero3 else "")
        + f"; layers without zero3: {plan.default_dp_type}",
    )
    table = make_table("stage", "layers", "strategy", "compute", "other", "once per step", left=3)
    if any(stage.runs for stage in prediction.stages):
        for stage in prediction.stages:
            for run in stage.runs:
                table.add_row(
                    str(stage.stage),
                    _range(run.first_layer, run.num_layers),
                    escape(run.label),
                    *_split(run.time_s, sum(run.time_s.get(key, 0.0) for key in _PER_STEP)),
                )
            send = f", send {format_seconds(stage.send_s)}" if stage.send_s else ""
            table.add_row(
                str(stage.stage),
                "all",
                f"fwd {format_seconds(stage.forward_s)}, bwd "
                f"{format_seconds(stage.backward_s)}{send}",
                *_split(stage.time_s, stage.tail_s),
                style="bold",
            )
    else:
        for index, first, count, strategy in plan_runs(plan):
            label = strategy_label(strategy, plan.data_degree(first), plan.default_dp_type)
            table.add_row(str(index), _range(first, count), label, "", "", "")
    console.print(table)
    if any(stage.runs for stage in prediction.stages):
        print_line(
            console, "compute and other (communication, vocabulary): one micro-batch", style="dim"
        )


def _split(time_s: Mapping[str, float], once_s: float) -> tuple[str, str, str]:
    """Return computation and the rest of one micro-batch, and what comes once per step."""
    compute = sum(time_s.get(key, 0.0) for key in _COMPUTE)
    rest = sum(v for key, v in time_s.items() if key not in (*_COMPUTE, *_PER_STEP))
    return format_seconds(compute), format_seconds(rest), format_seconds(once_s)


def show_waterfall(console: Console, prediction: Prediction) -> None:
    """Print the step time as its parts, each bar starting where the last one ended."""
    total = prediction.step_time_s
    if not prediction.waterfall_s or not math.isfinite(total):
        return
    print_heading(console, "step time")
    table = make_table("part", "time", "share", "", left=1)
    width = min(_BAR, console.width - 42)
    start = 0.0
    parts = prediction.waterfall_s
    for name in (*(key for key in _PARTS if key in parts), *(k for k in parts if k not in _PARTS)):
        value = parts[name]
        table.add_row(
            escape(_PARTS.get(name, name.replace("_", " "))),
            format_seconds(value),
            _percent(value / total) if total else "",
            _bar(console, start / total, (start + value) / total, width) if total else "",
        )
        start += value
    bar = _bar(console, 0.0, 1.0, width)
    table.add_row("step", format_seconds(total), "100.0 %", bar, style="bold")
    console.print(table)


def show_memory(console: Console, prediction: Prediction) -> None:
    """Print what every stage allocates and reserves against its budget."""
    if not prediction.stages:
        return
    print_heading(console, "memory per GPU")
    table = make_table("stage", "allocated", "reserved", "budget", "used", "")
    for stage in prediction.stages:
        budget = max(stage.budget_bytes, 1)
        share = stage.reserved_bytes / budget
        over = " !" if share > 1 else ""
        table.add_row(
            str(stage.stage),
            format_bytes(stage.allocated_bytes),
            format_bytes(stage.reserved_bytes),
            format_bytes(stage.budget_bytes),
            _percent(share) + over,
            _bar(console, 0.0, min(share, 1.0), min(30, console.width - 55), track=True),
            style="bold red" if share > 1 else None,
        )
    console.print(table)


def show_alternatives(console: Console, result: SearchResult) -> None:
    """Print the best plans of other kinds and how much slower they are."""
    if not result.alternatives or result.prediction is None:
        return
    print_heading(console, "alternatives")
    best = result.prediction.samples_per_s
    # how likely measuring again would put it first; only where computation's spread is known
    likely = any(item.probability_faster is not None for item in result.alternatives)
    columns = ["differs by", "samples/s", "vs best", *(["faster in"] if likely else []), "plan"]
    table = make_table(*columns, left=1)
    for alternative in result.alternatives:
        share = alternative.probability_faster
        table.add_row(
            escape(alternative.differs_by),
            f"{alternative.samples_per_s:.4g}",
            f"{(alternative.samples_per_s / best - 1) * 100:+.2f} %",
            *(["" if share is None else f"{share * 100:.0f} %"] if likely else []),
            escape(one_line(alternative.plan)),
        )
    console.print(table)


def plan_runs(plan: Plan) -> Iterator[tuple[int, int, int, LayerStrategy]]:
    """Yield (stage, first layer, number of layers, strategy) of layers that are alike."""
    stages = plan.stage_of_layer()
    first = 0
    for i in range(1, len(plan.layers) + 1):
        same = i < len(plan.layers) and (
            plan.layers[i] == plan.layers[first] and stages[i : i + 1] == stages[first : first + 1]
        )
        if not same:
            yield stages[first] if first < len(stages) else -1, first, i - first, plan.layers[first]
            first = i


def one_line(plan: Plan) -> str:
    """Return a plan in one line: stages, micro-batches, strategies with their layer counts."""
    counts: dict[str, int] = {}
    for layer, strategy in enumerate(plan.layers):
        label = strategy_label(strategy, plan.data_degree(layer), plan.default_dp_type)
        counts[label] = counts.get(label, 0) + 1
    runs = " + ".join(f"{n}x {label}" for label, n in counts.items())
    return f"pp{plan.num_stages} m{plan.num_microbatches} G{plan.global_batch}: {runs}"


def print_heading(console: Console, text: str) -> None:
    """Print the heading of a section after a blank line."""
    console.print()
    print_line(console, text, style="bold cyan")


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a line of plain text, wrapped where the console ends."""
    console.print(escape(text), style=style)


def print_item(console: Console, text: str) -> None:
    """Print an item of a list, wrapped under its first word."""
    wrapped = textwrap.fill(
        text, console.width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
    )
    console.print(wrapped, markup=False)


def make_table(*columns: str, left: int = 0) -> Table:
    """Return a table; the first `left` columns and the last (plan, bar) are left-aligned."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, expand=False)
    for index, name in enumerate(columns):
        text = index < left or (index == len(columns) - 1 and name in ("", "plan"))
        table.add_column(
            name, justify="left" if text else "right", no_wrap=not text, overflow="fold"
        )
    return table


def _bar(console: Console, start: float, end: float, width: int, *, track: bool = False) -> str:
    """Return a bar from `start` to `end` (shares of the width); at least one cell when not 0."""
    full, empty = ("█", "░") if "utf" in (console.encoding or "").lower() else ("#", ".")
    first = min(int(start * width + 0.5), width - 1)
    last = max(min(int(end * width + 0.5), width), first + (1 if end > start else 0))
    rest = (empty if track else " ") * (width - last)
    return " " * first + full * (last - first) + rest


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _count(number: float, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}{plural}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"

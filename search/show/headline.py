"""First block of an answer in 80 columns: a plan in one line and the figures of its step.

`search.show.terminal` prints the tables of stages, terms and alternatives that follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.command.console import Console, escape
from autopar.command.show import (
    make_table,
    print_heading,
    print_line,
    print_plain,
    wrapped,
)
from autopar.records import Record
from autopar.units import GIB, format_bytes, format_figure, format_odds, format_seconds
from search.engines.table import ALIKE

if TYPE_CHECKING:
    from autopar.answer import EngineBest, Price, Priced
    from autopar.training.throughput import Throughput

SCREEN_WIDTH, SCREEN_HEIGHT = 80, 24
"""Columns and lines of the default screen."""
NEXT = "autopar-explain FILE (why), autopar-export FILE (run), --verbose"
"""Commands and options that usually follow an answer."""


# --------------------------------------------------------------------------------------------------
# Figures


Rows = list[tuple[str, str]]
"""Labels and their texts."""


class Headline(Record):
    """Printed summary of a plan with its figures."""

    heading: str
    line: str
    """Plan in one line."""
    rows: Rows

    def height(self, console: Console) -> int:
        """Return the number of printed lines, without the blank line before."""
        return 1 + len(wrapped(self.line, console.width - 2)) + rows_height(console, self.rows)

    def show(self, console: Console) -> None:
        """Print the summary after a blank line."""
        print_heading(console, self.heading)
        print_line(console, self.line, style="bold")
        print_rows(console, self.rows)


_LABEL = 11
"""Width of a label with the blank after it, columns."""


def rows_height(console: Console, rows: Rows) -> int:
    """Return the number of lines that rows take."""
    return sum(len(wrapped(text, console.width - 2 - _LABEL)) for _, text in rows)


def print_rows(console: Console, rows: Rows) -> None:
    """Print rows, each text to the right of its label."""
    for label, text in rows:
        for index, line in enumerate(wrapped(text, console.width - 2 - _LABEL)):
            left = label if index == 0 else ""
            console.print(f"  {left:<{_LABEL}}{escape(line)}", soft_wrap=True)


def figure_rows(found: Throughput, samples_per_s: float, price: float | None = None) -> Rows:
    """Return the step time and throughput as rows, each figure with its 90 % interval.

    price : price of a GPU-hour.
    """
    step = format_seconds(found.step_s)
    if found.interval_s is not None:
        low, high = map(format_seconds, found.interval_s)
        step += f" ({low} to {high})" if low != high else f" (stays {low})"
    return [
        ("step", f"{step}, {format_figure(samples_per_s, 5)} samples/s"),
        *throughput_rows(found, price),
    ]


def throughput_rows(found: Throughput, price: float | None = None) -> Rows:
    """Return a throughput as rows: rates per GPU, MFU, and GPU-hours per billion tokens.

    price : price of a GPU-hour, which adds the cost of a billion tokens.
    """
    ends = found.ends
    rates = [f"{found.tokens_per_s:,.0f} tokens/s{_between(found.tokens_per_s, ends, ',.0f')}"]
    if found.flop_per_s is not None:
        tera = found.flop_per_s / 1e12
        rates.append(f"{format_figure(tera)} TFLOP/s{_between(tera, ends, 3)}")
    lines = [("per GPU", ", ".join(rates))]
    shares = [("MFU", found.mfu)]
    if found.computes_again:
        shares.append(("HFU", found.hfu))
    words = [
        f"{'' if name == 'MFU' else 'HFU '}{value * 100:.1f} %{_between(value * 100, ends, '.1f')}"
        for name, value in shares
        if value is not None
    ]
    if words:
        lines.append(("MFU", ", ".join(words) + " of the 16-bit peak" * (len(words) == 1)))
    slow = None if ends is None else (1.0 / ends[1], 1.0 / ends[0])
    hours = f"{format_figure(found.gpu_hours)}{_between(found.gpu_hours, slow, 4)} a billion tokens"
    if price is not None:
        cost = found.cost(price)
        hours += f", ${format_figure(cost)}{_between(cost, slow, 4, '$')}"
    lines.append(("GPU-hours", hours))
    return lines


def _between(
    value: float, ends: tuple[float, float] | None, style: str | int, unit: str = ""
) -> str:
    """Return ` (low to high)` of a value over an interval; empty without an interval.

    ends : factors of the value at both ends. style : format, or number of digits.
    """
    if ends is None:
        return ""
    low, high = (
        format(value * end, style) if isinstance(style, str) else format_figure(value * end, style)
        for end in ends
    )
    return f" ({unit}{low} to {unit}{high})"


def memory_row(price: Price) -> tuple[str, str]:
    """Return the row with the memory of the peak stage, the budget and the OOM probability."""
    full = price.fullest
    low, high = full.reserved_bytes
    reserved = f"{high / GIB:.2f}" if low == high else f"{low / GIB:.4g} to {high / GIB:.4g}"
    odds = f"out of memory {format_odds(price.oom_probability)}"
    used = f"{full.peak_bytes / GIB:.2f} of {format_bytes(full.budget_bytes)}"
    return "memory", f"{used} ({reserved} reserved); {odds}"


def headline_of(priced: Priced, heading: str, gpu_hour_price: float | None) -> Headline:
    """Return the summary of a plan; the name of the engine follows the heading."""
    price = priced.price
    rows = [("step", "has no step time, because it cannot run")]
    if price.throughput is not None:
        rows = figure_rows(price.throughput, price.samples_per_s, gpu_hour_price)
    if price.stages:
        rows.append(memory_row(price))
    name = f": {priced.title}" if priced.title else ""
    return Headline(heading=heading + name, line=priced.words, rows=[*rows, *priced.rows])


# --------------------------------------------------------------------------------------------------
# Engines


_PLAN_COLUMN = 44
"""Width of the plan column of an 80-column table with engine, rate and share."""


def show_engines(
    console: Console,
    engines: Sequence[EngineBest],
    tokens: float | None = None,
    *,
    room: int | None = None,
) -> None:
    """Print the fastest plan of each engine, or the reason why it has none.

    tokens : tokens of a sample over the number of GPUs, for rates in tokens/s/GPU; None prints
    samples/s. room : maximum number of lines, in which plans are shortened; None means no limit.
    """
    console.print()
    whole = room is None
    best = max((line.samples_per_s or 0.0 for line in engines), default=0.0)
    rate = "samples/s" if tokens is None else "tokens/s/GPU"
    table = make_table("engine", rate, "vs best", "plan", words_last=True)
    # Two lines are column names, and one contains the number of engines not shown.
    shown_engines = engines if room is None or room >= len(engines) + 2 else engines[: room - 3]
    for line in shown_engines:
        words = line.words if line.samples_per_s is not None else f"none: {line.reason}"
        shown = escape(words if whole else shortened(words, _PLAN_COLUMN))
        if line.samples_per_s is None:
            table.add_row(line.engine, "", "", shown, style="dim")
            continue
        share = (line.samples_per_s / best - 1.0) * 100.0
        speed = f"{line.samples_per_s:.4g}"
        if tokens is not None:
            speed = f"{line.samples_per_s * tokens:,.0f}"
        table.add_row(line.engine, speed, f"{share:+.1f} %" if share else "", shown)
    console.print(table)
    if len(shown_engines) < len(engines):
        print_plain(console, f"{len(engines) - len(shown_engines)} more: --verbose", style="dim")
    for line in engines[:1]:
        if whole and line.plan is not None:
            print_plain(console, f"{line.engine}'s is found by {line.options or 'no option more'}")


def shortened(words: str, width: int) -> str:
    """Return a plan shortened to whole words that fit into a column, with ` ..` at the end."""
    if len(words) <= width:
        return words
    return words[: width - 3].rpartition(" ")[0].rstrip(",:;") + " .."


def layers_line(engines: Sequence[EngineBest]) -> str:
    """Return the gain of the best per-layer plan over the fastest uniform plan, in a few words.

    Empty if one of the two is missing.
    """
    launch = next((line for line in engines if line.launch is not None), None)
    plan = next((line for line in engines if line.plan is not None), None)
    if launch is None or plan is None:
        return ""
    assert launch.samples_per_s is not None, "a launch has a rate"
    assert plan.samples_per_s is not None, "a plan has a rate"
    share = plan.samples_per_s / launch.samples_per_s - 1.0
    if share <= 0:
        return f"{plan.engine}'s plan is {-share * 100:.1f} % slower"
    found = f"{plan.engine}'s plan is {share * 100:.1f} % faster"
    return found + (", which their prices may differ by" if share <= ALIKE else "")

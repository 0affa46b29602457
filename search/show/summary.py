"""Summary at the top of a report: the plan in one line, step time, throughput and memory.

`search.show.terminal` prints the tables of stages, terms and alternatives that follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from autopar.command.console import Console, escape
from autopar.command.show import (
    make_table,
    print_plain,
    wrapped,
)
from autopar.records import Record
from autopar.units import (
    GIB,
    format_bytes,
    format_figure,
    format_probability,
    format_range_s,
    format_seconds,
)
from search.engines.table import ALIKE
from search.show.terms import time_name

if TYPE_CHECKING:
    from autopar.answer import EngineBest, OtherPrecision, Price, Priced
    from autopar.training.throughput import Throughput
    from search.planning.uniform.answer import UniformResult

SCREEN_WIDTH, SCREEN_HEIGHT = 80, 24
"""Columns and lines of the default screen."""


# --------------------------------------------------------------------------------------------------
# Figures


Rows = list[tuple[str, str]]
"""Pairs (label, text)."""


class Figure(NamedTuple):
    """One row of the figures of a plan."""

    label: str
    estimate: str
    interval: str = ""
    """Ends of the 90 % interval in the unit of the estimate; empty for none."""
    more: str = ""
    """Further figures, with their intervals in parentheses."""


class Headline(Record):
    """Printed summary of a plan with its figures."""

    heading: str
    """Kind of the plan, then the plan in one line."""
    figures: Sequence[Figure]
    rows: Rows
    """Labels and texts below the figures."""

    def lines(self, width: int) -> list[str]:
        """Return the printed lines, without the blank line before."""
        figures = figure_lines(self.figures, width)
        return [*wrapped(self.heading, width), *figures, *row_lines(self.rows, width, _LABEL, 2)]

    def show(self, console: Console) -> None:
        """Print the summary after a blank line."""
        lines = self.lines(console.width)
        console.print()
        for at, line in enumerate(lines):
            bold = at < len(wrapped(self.heading, console.width))
            console.print(escape(line), style="bold" if bold else None, soft_wrap=True)


_LABEL = 16
"""Width of the label of a figure with the blanks after it, columns."""
_FOOTER_LABEL = 11
"""Width of the label of a footer row with the blanks after it, columns."""


def figure_lines(figures: Sequence[Figure], width: int) -> list[str]:
    """Return figures as lines under the headings `estimate` and `90 % interval`.

    Without any interval there are no headings. Further figures that do not fit next to the interval
    follow on a separate line.
    """
    told = any(one.interval for one in figures)
    first = max((len(one.estimate) for one in figures), default=0)
    second = max((len(one.interval) for one in figures), default=0)
    lines = []
    if told:
        first, second = max(first, len("estimate")), max(second, len("90 % interval"))
        lines.append(f"  {'':{_LABEL}}{'estimate':>{first}}   90 % interval")
    for one in figures:
        line = f"  {one.label:<{_LABEL}}{one.estimate:>{first}}   {one.interval:<{second}}"
        start = len(line) + 3 if told else len(line.rstrip()) + 3
        if one.more and start + len(one.more) > width:
            lines.append(line.rstrip())
            line, start = "", 2 + _LABEL + first + 3
        lines.append(f"{line.rstrip():<{start}}{one.more}".rstrip())
    return lines


def row_lines(rows: Rows, width: int, label_width: int, indent: int = 0) -> list[str]:
    """Return rows as lines, each text to the right of its label."""
    lines = []
    for label, text in rows:
        for at, line in enumerate(wrapped(text, width - indent - label_width)):
            left = label if at == 0 else ""
            lines.append(f"{'':{indent}}{left:<{label_width}}{line}")
    return lines


def footer_lines(rows: Rows, width: int) -> list[str]:
    """Return the rows at the end of a screen as lines."""
    return row_lines(rows, width, _FOOTER_LABEL)


def print_footer(console: Console, rows: Rows) -> None:
    """Print the rows at the end of a screen: basis, optimality, defaults, next commands."""
    for line in footer_lines(rows, console.width):
        console.print(escape(line), soft_wrap=True)


def print_figures(console: Console, figures: Sequence[Figure]) -> None:
    """Print figures in columns."""
    for line in figure_lines(figures, console.width):
        console.print(escape(line), soft_wrap=True)


def step_figures(
    found: Throughput, samples_per_s: float, price: float | None = None
) -> list[Figure]:
    """Return the step time and the throughput of a plan.

    price : price of a GPU-hour, which adds the cost of a billion tokens.
    """
    interval = ""
    if found.interval_s is not None:
        interval = format_range_s(*found.interval_s, like_s=found.step_s)
    rate = f"{format_figure(samples_per_s, 5)} samples/s"
    step = Figure("Step time", format_seconds(found.step_s), interval, rate)
    return [step, *rate_figures(found, price)]


def rate_figures(found: Throughput, price: float | None = None) -> list[Figure]:
    """Return a throughput as figures: rates per GPU, MFU, and GPU-hours per billion tokens.

    price : price of a GPU-hour, which adds the cost of a billion tokens.
    """
    ends = found.ends
    slow = None if ends is None else (1.0 / ends[1], 1.0 / ends[0])
    hours = f"{format_figure(found.gpu_hours)} GPU-h/1e9 tok{_between(found.gpu_hours, slow, 3)}"
    tokens = _span(found.tokens_per_s, ends, ",.0f")
    figures = [Figure("Tokens/s/GPU", f"{found.tokens_per_s:,.0f}", tokens, hours)]
    if found.flop_per_s is not None:
        tera, share = found.flop_per_s / 1e12, ""
        if found.mfu is not None:
            mfu = found.mfu * 100
            share = f"{mfu:.1f} % MFU{_between(mfu, ends, '.1f')} of {found.peak_precision}"
        figures.append(Figure("TFLOP/s/GPU", format_figure(tera), _span(tera, ends, 3), share))
    if found.computes_again and found.hfu is not None:
        hfu = found.hfu * 100
        span = _span(hfu, ends, ".1f")
        figures.append(Figure("HFU", f"{hfu:.1f} %", span, "MFU with recomputation"))
    if price is not None:
        cost = found.cost(price)
        span = _span(cost, slow, 4)
        figures.append(Figure("Cost", f"${format_figure(cost)}", span, "per 1e9 tokens"))
    return figures


def _span(value: float, ends: tuple[float, float] | None, style: str | int) -> str:
    """Return `low to high` of a value over an interval; empty without an interval.

    ends : factors of the value at both ends.
    style : format, or number of digits.
    """
    if ends is None:
        return ""
    found = (
        format(value * end, style) if isinstance(style, str) else format_figure(value * end, style)
        for end in ends
    )
    return " to ".join(dict.fromkeys(found))


def _between(value: float, ends: tuple[float, float] | None, style: str | int) -> str:
    """Return ` (low-high)` of a value over an interval; empty without an interval."""
    span = _span(value, ends, style).replace(" to ", "-")
    return f" ({span})" if span else ""


PEAK = "Peak allocated"
"""Label of the memory of the peak stage."""


def memory_figures(price: Price) -> list[Figure]:
    """Return the memory of the peak stage against its budget, and the OOM probability.

    The estimate is the peak allocated. The interval is of the bytes reserved for it by the
    allocator, which are the larger ones and decide about OOM.
    """
    full = price.fullest
    low, high = full.reserved_bytes
    budget = f"of {format_bytes(full.budget_bytes)}"
    reserved, more = "", f"{high / GIB:.2f} reserved, {budget}"
    if low != high:
        reserved = f"{low / GIB:.2f} to {high / GIB:.2f}"
        more = f"reserved, {budget}"
    return [
        Figure(PEAK, format_bytes(full.peak_bytes), reserved, more),
        Figure("OOM probability", format_probability(price.oom_probability)),
    ]


def headline_of(
    priced: Priced, heading: str, gpu_hour_price: float | None, *, whole: bool = True
) -> Headline:
    """Return the summary of a plan; the name of the engine follows the heading.

    whole : False for the step time and the memory only.
    """
    price = priced.price
    figures = [Figure("Step time", "none", "", "the plan cannot run")]
    if price.throughput is not None:
        figures = step_figures(price.throughput, price.samples_per_s, gpu_hour_price)
    if price.stages:
        figures += memory_figures(price)
    if not whole:
        figures = [one for one in figures if one.label in ("Step time", PEAK)]
    words = ", ".join(filter(None, (priced.title, priced.words)))
    rows = [*priced.rows] if whole else []
    if whole and priced.other_precision is not None:
        rows.insert(0, ("Precision", _precision_words(priced.other_precision, price)))
    return Headline(heading=f"{heading}: {words}", figures=figures, rows=rows)


def _precision_words(other: OtherPrecision, price: Price) -> str:
    """Return the slowdown of the fastest plan in the other precision, and its largest terms."""
    least = _LEAST_TERM * sum(price.terms_s.values())
    shown = sorted(other.terms_s.items(), key=lambda item: -abs(item[1]))[:_PRECISION_TERMS]
    differing = ", ".join(
        f"{time_name(name)} {'+' if value > 0 else '-'}{format_seconds(abs(value))}"
        for name, value in shown
        if abs(value) >= least
    )
    return f"the fastest {other.precision} plan is {other.gain * 100:.1f} % slower: {differing}"


_PRECISION_TERMS = 4
"""Largest number of terms printed for the difference of two precisions."""
_LEAST_TERM = 0.0005
"""Share of the step time below which a difference is not printed."""


# --------------------------------------------------------------------------------------------------
# Engines


def show_engines(
    console: Console,
    engines: Sequence[EngineBest],
    tokens: float | None = None,
    *,
    room: int | None = None,
) -> None:
    """Print the fastest plan of each engine, or the reason why it has none.

    tokens : tokens of a sample over the number of GPUs, for rates in tokens/s/GPU; None prints
        samples/s.
    room : maximum number of lines, in which plans are shortened; None means no limit.
    """
    console.print()
    print_plain(console, "Fastest plan per engine", style="bold")
    whole = room is None
    best = max((line.samples_per_s or 0.0 for line in engines), default=0.0)
    rate = "samples/s" if tokens is None else "tokens/s/GPU"
    table = make_table("engine", rate, "vs best", "plan", words_last=True, ruled=False)
    # Two lines are headings, and one contains the number of engines not shown.
    shown_engines = engines if room is None or room >= len(engines) + 2 else engines[: room - 3]
    names = max(len("engine"), *(len(line.engine) for line in shown_engines))
    # Columns are separated by two blanks.
    width = console.width - names - len(rate) - len("-99.9 %") - 6
    for line in shown_engines:
        words = line.words if line.samples_per_s is not None else f"none: {line.reason}"
        shown = escape(words if whole else shortened(in_table(words), width))
        if line.samples_per_s is None:
            table.add_row(line.engine, "", "", shown, style="dim")
            continue
        share = (line.samples_per_s / best - 1.0) * 100.0
        gap = f"{share:+.1f} %" if abs(share) >= 0.05 else "0.0 %" if share else ""
        speed = f"{line.samples_per_s:.4g}"
        if tokens is not None:
            speed = f"{line.samples_per_s * tokens:,.0f}"
        table.add_row(line.engine, speed, gap, shown)
    console.print(table)
    if len(shown_engines) < len(engines):
        number = len(engines) - len(shown_engines)
        print_plain(console, f"{number} more: --verbose", style="dim")
    for line in engines[:1]:
        if whole and line.plan is not None:
            options = line.options or "no further options"
            print_plain(console, f"The plan of {line.engine} is found with {options}")


def in_table(words: str) -> str:
    """Return a plan with the abbreviation of micro-batch sizes that tables use."""
    return words.replace("micro-batch ", "mbs ")


def shortened(words: str, width: int) -> str:
    """Return a plan shortened to whole words that fit into a column, with ` ..` at the end."""
    if len(words) <= width:
        return words
    return words[: width - 3].rpartition(" ")[0].rstrip(",:;") + " .."


def uniform_gain(engines: Sequence[EngineBest], best: Priced, uniform: Priced) -> str:
    """Return the gain of a per-layer plan over the fastest uniform plan in words.

    engines : fastest plans of several engines; empty if one was searched.
    """
    # Rates of engines are those of the plan as the engine runs it.
    launch = next((line.samples_per_s for line in engines if line.launch is not None), None)
    plan = next((line.samples_per_s for line in engines if line.plan is not None), None)
    if launch is None or plan is None:
        launch, plan = uniform.price.samples_per_s, best.price.samples_per_s
    share = plan / launch - 1.0
    text = f"per-layer plan: {share * 100:+.1f} %"
    # The models of both searches differ by this share for one plan.
    return text + (", less than the error of the models" if engines and share <= ALIKE else "")


def near_miss(found: UniformResult) -> str:
    """Return a sentence on a smallest plan that may fit, with the limit that accepts it."""
    plans = [
        (one.solved.smallest.assessment.odds_of_oom, one.engine.name)
        for one in found.engines
        if one.solved is not None
        and one.solved.smallest is not None
        and one.solved.shortage is not None
        and not one.solved.shortage.host
    ]
    odds, engine = min(plans, default=(1.0, ""))
    if odds > _NEAR:
        return ""
    limit = math.ceil(100 * odds) / 100
    return (
        f" The smallest plan of {engine} has an OOM probability of {format_probability(odds)}: "
        f"--oom-risk {limit:g} accepts it."
    )


_NEAR = 0.1
"""Largest OOM probability of a plan that an answer without plans offers."""

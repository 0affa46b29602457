"""autopar-compare: two plans side by side, or a plan and a measured trace."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.command.console import Console, escape, make_console
from autopar.command.fields import option
from autopar.command.options import Command
from autopar.command.run import say
from autopar.command.show import make_table, print_item, print_line, print_plain, wrapped
from autopar.units import GIB, format_bytes, format_count, format_probability, format_seconds
from search.commands.app import SCRIPT, ScriptSpec, emit, with_script, working
from search.request.options import PANELS
from search.request.request import FILLS, build_request
from search.show.terms import memory_name, time_name

if TYPE_CHECKING:
    from search.questions.compare import Comparison, ComparisonSide

_NAME = "autopar-compare"


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """The two plans, or plan and trace, to compare."""

    first: str = option(
        help="plan, strategy file, launch script or configuration",
        panel="Question",
        positional=True,
    )
    second: str = option(
        help="a second one, or a torch.profiler trace of a run", panel="Question", positional=True
    )


COMMAND = Command(
    name=_NAME,
    usage="FIRST SECOND [OPTIONS]",
    fills=(CompareSpec, ScriptSpec, *FILLS),
    without=frozenset(
        {
            *("evaluate", "frontier", "plot", "html", "trace", "output-config-path", "engine"),
            # Options of searches; this command does not search.
            *("goal", "tokens-per-s", "use", "price", "top", "time-limit", "gap"),
        }
    ),
    panels=("Question", SCRIPT, *PANELS),
    first=("Question",),
    family="search",
    intro="""Compare two plans, or a plan and a measured trace of it, by time and memory terms.

Both plans are estimated again with the options of their files; options given here replace those of
both. Launch scripts need --hardware CARD[:NODESxGPUS]. A trace is a torch.profiler file of one rank
(.gz too); it is compared with the predicted trace of the plan.

Exit codes: 0 done, 2 invalid input.
""",
)
_WIDTH = 80
"""Width without a terminal, columns."""
_FEW = 0.005
"""Fraction of a step or of a peak below which differences of a term are not shown."""


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, with_script(_execute))


def _execute(raw: dict[str, Any]) -> int:
    from search.planning.uniform.imports import with_cluster
    from search.questions.compare import both_sides, comparison_document

    paths = [str(raw.pop("first")), str(raw.pop("second"))]
    raw = with_cluster(paths[1], with_cluster(paths[0], raw))
    request = build_request(raw)
    found = working(
        "comparing", lambda: both_sides(paths, request, raw, lambda text: say(f"{_NAME}: {text}"))
    )
    json_path = request.output.json_path
    if json_path is not None:
        emit(json_path, comparison_document(found), command=_NAME)
    if json_path != "-":
        show(make_console(sys.stdout, _WIDTH), found, verbose=request.output.verbose)
    return 0


def show(console: Console, found: Comparison, *, verbose: bool = False) -> None:
    """Print both step times, and the terms of time and memory that differ.

    verbose : True to print also all degrees that differ, and terms that differ little.
    """
    first, second = found.first, found.second
    for number, side in enumerate((first, second), start=1):
        _show_side(console, number, side)
    one, two = (sum(pair[side] for pair in found.terms_s.values()) for side in (0, 1))
    console.print()
    _show_totals(console, found, one, two)
    # Words of a plan contain its degrees; model, cluster and batch are not in them.
    degrees = {
        name: pair for name, pair in found.degrees.items() if verbose or name in _NOT_IN_LINE
    }
    if degrees:
        _show_degrees(console, degrees)
    elif first.degrees and first.line == second.line and not found.degrees:
        print_plain(console, "Both have the same degrees, model and cluster")
    _show_times(console, found, one, two, verbose=verbose)
    _show_memory(console, found, verbose=verbose)
    for note in found.notes:
        print_item(console, note)


_LEAST = 0.0005
"""Figure below which a column of three decimals shows zero."""
_NOT_IN_LINE = ("model", "cluster", "seq_length", "engine", "global_batch_size", "global_batch")
"""Differences that the summary of a plan does not show."""


def _show_side(console: Console, number: int, side: ComparisonSide) -> None:
    """Print the name of a side, and its plan on the same line if there is room."""
    head = f"{number}  {side.name}"
    words = side.line or "measured trace"
    if len(head) + 2 + len(words) <= console.width:
        console.print(escape(f"{head}  {words}"), style="bold", soft_wrap=True)
        return
    # A path is not wrapped, so that it can be pasted.
    console.print(escape(head), style="bold", soft_wrap=True)
    for line in wrapped(words, console.width - 3):
        console.print(escape(f"   {line}"), soft_wrap=True)


def _show_totals(console: Console, found: Comparison, one: float, two: float) -> None:
    """Print step time, throughput, peak memory and OOM probability of both sides."""
    first, second = found.first, found.second
    table = make_table("", "1", "2", "difference", spaced=True, ruled=False)
    time = "time per sequence" if found.per_sample else "step time"
    share = f"{(two / one - 1) * 100:+.2f} %" if one > 0 else ""
    table.add_row(time, format_seconds(one), format_seconds(two), share)
    if first.tokens_per_s is not None and second.tokens_per_s is not None:
        rates = (first.tokens_per_s, second.tokens_per_s)
        share = f"{(rates[1] / rates[0] - 1) * 100:+.2f} %"
        table.add_row("tokens/s/GPU", *(f"{rate:,.0f}" for rate in rates), share)
    if first.peak_bytes is not None and second.peak_bytes is not None:
        more = second.peak_bytes - first.peak_bytes
        peaks = (format_bytes(first.peak_bytes), format_bytes(second.peak_bytes))
        table.add_row("peak allocated", *peaks, _signed_gib(more))
    if first.odds_of_oom is not None and second.odds_of_oom is not None:
        odds = (format_probability(first.odds_of_oom), format_probability(second.odds_of_oom))
        fails = [str(at) for at, side in ((1, first), (2, second)) if side.fits is False]
        misfit = f"{' and '.join(fails)} {'do' if len(fails) > 1 else 'does'} not fit"
        table.add_row("OOM probability", *odds, misfit if fails else "")
    console.print(table)


def _signed_gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:+.2f} GiB"


def _show_times(
    console: Console, found: Comparison, one: float, two: float, *, verbose: bool
) -> None:
    """Print the terms of the time that differ, all in one unit."""
    unit, scale = ("s", 1.0) if max(one, two) >= 1.0 else ("ms", 1e-3)
    table = make_table(
        "Time per sequence by term" if found.per_sample else "Step time by term",
        *("1", "2", "difference", "of 1"),
        spaced=True,
        ruled=False,
    )
    least = _FEW * max(one, two)
    shown = [
        (name, pair)
        for name, pair in found.terms_s.items()
        if abs(pair[1] - pair[0]) >= least or (verbose and max(pair) >= _LEAST * scale)
    ]
    for name, (a, b) in shown:
        table.add_row(
            escape(time_name(name)),
            f"{a / scale:.3f} {unit}",
            f"{b / scale:.3f} {unit}",
            f"{(b - a) / scale:+.3f} {unit}",
            f"{(b - a) / one * 100:+.2f} %" if one > 0 else "",
        )
    differ = sum(pair[0] != pair[1] for pair in found.terms_s.values())
    others = differ - sum(pair[0] != pair[1] for _, pair in shown)
    if shown or others:
        console.print()
    if shown:
        console.print(table)
    if others and not verbose:
        number = format_count(others, "time term differs", "time terms differ")
        print_plain(console, f"{number} by less than {_FEW * 100:g} % of the step (--verbose)")


def _show_memory(console: Console, found: Comparison, *, verbose: bool) -> None:
    """Print the terms of the peak memory that differ, in GiB."""
    peaks = (found.first.peak_bytes or 0.0, found.second.peak_bytes or 0.0)
    differ = [(name, pair) for name, pair in found.memory_bytes.items() if pair[0] != pair[1]]
    least = 0.0 if verbose else _FEW * max(peaks)
    shown = [(name, (a, b)) for name, (a, b) in differ if abs(b - a) >= least]
    table = make_table("Peak memory by term", "1", "2", "difference", spaced=True, ruled=False)
    for name, (a, b) in shown:
        sizes = (f"{a / GIB:.2f} GiB", f"{b / GIB:.2f} GiB")
        table.add_row(escape(memory_name(name)), *sizes, _signed_gib(b - a))
    if shown:
        console.print()
        console.print(table)
    if len(shown) < len(differ):
        others = len(differ) - len(shown)
        number = format_count(others, "memory term differs", "memory terms differ")
        print_plain(console, f"{number} by less than {_FEW * 100:g} % of the peak (--verbose)")


_CELL = 24
"""Columns of a value in the table of degrees; longer values are printed below it."""


def _show_degrees(console: Console, degrees: Mapping[str, tuple[Any, Any]]) -> None:
    """Print the settings that differ as a table; long values below it, one line per side."""
    console.print()
    said = {
        name.replace("_", " "): [_folded(value) for value in pair] for name, pair in degrees.items()
    }
    table = make_table("Settings that differ", "1", "2", spaced=True, ruled=False)
    long = {name for name, words in said.items() if max(map(len, words)) > _CELL}
    for name in (name for name in said if name not in long):
        table.add_row(name, *map(escape, said[name]))
    if len(long) < len(said):
        console.print(table)
    for name in (name for name in said if name in long):
        for number, words in enumerate(said[name], start=1):
            print_line(console, f"{name if number == 1 else '':<{len(name)}}  {number}: {words}")


def _folded(value: Any) -> str:
    """Return a setting as text; a list of chunk sizes as each size with its number of chunks."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else "yes" if value else "no"
    if not isinstance(value, list):
        return str(value)
    sizes = [size for stage in value for size in (stage if isinstance(stage, list) else [stage])]
    counts = Counter(sizes).most_common()
    if len(counts) == 1:
        return f"{sizes[0]} each"
    return ", ".join(f"{size} in {number}" for size, number in counts)

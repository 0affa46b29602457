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
from autopar.command.show import make_table, print_heading, print_item, print_line, print_plain
from autopar.units import format_bytes, format_odds, format_seconds
from search.commands.app import emit, leave, working
from search.request.options import PANELS
from search.request.request import FILLS, build_request

if TYPE_CHECKING:
    from search.questions.compare import Comparison

_NAME = "autopar-compare"


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """The two plans, or plan and trace, to compare."""

    first: str = option(
        help="launch, plan or strategy file, or a trainer's script or configuration",
        panel="Question",
        positional=True,
    )
    second: str = option(
        help="another one, or a trace of torch.profiler of a run", panel="Question", positional=True
    )


COMMAND = Command(
    name=_NAME,
    usage="FIRST SECOND [OPTIONS]",
    fills=(CompareSpec, *FILLS),
    without=frozenset(
        {
            *("evaluate", "frontier", "plot", "html", "trace", "output-config-path", "engine"),
            # Options of searches; this command does not search.
            *("goal", "tokens-per-s", "price", "top", "time-limit", "verbose"),
        }
    ),
    panels=("Question", *PANELS),
    first=("Question",),
    family="search",
    intro="""Say what differs between two plans, or between a plan and a measured trace of it:
degrees, time by term, memory by term of the fullest stage, and which terms make the difference.

Plans are priced again as their files ask; options given here replace those of both files. Scripts
and configurations of trainers say neither cluster nor card, so that --hardware CARD:NxG does. A
trace is a file of torch.profiler (.gz too) of one rank; the plan is beside it as its predicted
trace.

Exit codes: 0 done, 2 an input is unusable.
""",
)
_WIDTH = 80
"""Width without a terminal, like other first screens, in columns."""
_FEW = 0.005
"""Fraction of a step below which differences of a term are not shown."""


def main() -> None:
    """Entry point of `autopar-compare`."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _execute)


def _execute(raw: dict[str, Any]) -> int:
    from search.questions.compare import both_sides, comparison_document

    paths = [str(raw.pop("first")), str(raw.pop("second"))]
    request = build_request(raw)
    found = working(
        "comparing", lambda: both_sides(paths, request, raw, lambda text: say(f"{_NAME}: {text}"))
    )
    json_path = request.output.json_path
    if json_path is not None:
        emit(json_path, comparison_document(found), command=_NAME)
    if json_path != "-":
        show(make_console(sys.stdout, _WIDTH), found)
    return 0


def show(console: Console, found: Comparison) -> None:
    """Print both step times, the degrees that differ, and the differences per term."""
    first, second = found.first, found.second
    for number, side in enumerate((first, second), start=1):
        name = escape(f"{number}: {side.name} ({side.kind})")
        # A path is not wrapped, so that it can be pasted.
        console.print(name, style="bold", soft_wrap=True)
        if side.line:
            print_line(console, side.line)
    per = "sequence" if found.per_sample else "step"
    one, two = (sum(pair[side] for pair in found.terms_s.values()) for side in (0, 1))
    share = f", {(two / one - 1) * 100:+.2f} %" if one > 0 else ""
    rows = [(per, f"{format_seconds(one)} and {format_seconds(two)}{share}")]
    if first.tokens_per_s is not None and second.tokens_per_s is not None:
        rates = (first.tokens_per_s, second.tokens_per_s)
        rows.append(("per GPU", f"{rates[0]:,.0f} and {rates[1]:,.0f} tokens/s"))
    fits = (first.fits, second.fits)
    if None not in fits:
        words = " and ".join(
            f"{format_odds(side.odds_of_oom or 0.0)}{'' if side.fits else ' (does not fit)'}"
            for side in (first, second)
        )
        rows.append(("out of memory", words))
    console.print()
    for label, text in rows:
        print_line(console, f"{label:<14} {text}", style="bold")
    if found.degrees:
        _show_degrees(console, found.degrees)
    elif first.degrees and first.line == second.line:
        print_plain(console, "both have the same degrees, model and cluster")
    print_heading(console, f"time of a {per}")
    table = make_table("term", "1", "2", "difference", "of 1", spaced=True)
    shown = [
        (name, pair)
        for name, pair in found.terms_s.items()
        if abs(pair[1] - pair[0]) >= _FEW * max(one, two)
    ]
    for name, (a, b) in shown:
        table.add_row(
            escape(name.replace("_", " ")),
            format_seconds(a),
            format_seconds(b),
            f"{(b - a) * 1e3:+.4g} ms",
            f"{(b - a) / one * 100:+.2f} %" if one > 0 else "",
        )
    if shown:
        console.print(table)
    if len(shown) < len(found.terms_s):
        others = len(found.terms_s) - len(shown)
        more = "more " if shown else ""
        words = "term differs" if others == 1 else "terms differ"
        print_item(console, f"{others} {more}{words} by less than {_FEW * 100:g} % of it")
    if found.memory_bytes:
        differ = [(name, pair) for name, pair in found.memory_bytes.items() if pair[0] != pair[1]]
        if differ:
            print_heading(console, "memory of the fullest stage")
        table = make_table("term", "1", "2", "difference", spaced=True)
        for name, (a, b) in differ[:8]:
            sign = "-" if b < a else "+"
            table.add_row(
                escape(name.replace("_", " ")),
                format_bytes(a),
                format_bytes(b),
                sign + format_bytes(abs(b - a)),
            )
        if differ:
            console.print(table)
    peaks = [first.peak_bytes, second.peak_bytes]
    if None not in peaks:
        print_plain(console, f"peak {' and '.join(format_bytes(peak or 0) for peak in peaks)}")
    for note in found.notes:
        print_item(console, note)


_CELL = 24
"""Columns of a value in the table of degrees; longer values are printed below it."""


def _show_degrees(console: Console, degrees: Mapping[str, tuple[Any, Any]]) -> None:
    """Print the differences, one degree per row; long values get one line per side."""
    print_heading(console, "what differs")
    said = {
        name.replace("_", " "): [_folded(value) for value in pair] for name, pair in degrees.items()
    }
    table = make_table("", "1", "2", spaced=True)
    long = {name for name, words in said.items() if max(map(len, words)) > _CELL}
    for name in (name for name in said if name not in long):
        table.add_row(name, *map(escape, said[name]))
    if len(long) < len(said):
        console.print(table)
    for name in (name for name in said if name in long):
        for number, words in enumerate(said[name], start=1):
            print_line(console, f"{name if number == 1 else '':<{len(name)}}  {number}: {words}")


def _folded(value: Any) -> str:
    """Return a degree as text; for layers of chunks, each size with its number of chunks."""
    if isinstance(value, bool) or value is None:
        return "" if value is None else "yes" if value else "no"
    if not isinstance(value, list):
        return str(value)
    sizes = [size for stage in value for size in (stage if isinstance(stage, list) else [stage])]
    counts = Counter(sizes).most_common()
    if len(counts) == 1:
        return f"{sizes[0]} each"
    return ", ".join(f"{size} in {number}" for size, number in counts)


if __name__ == "__main__":
    main()

"""Shows what searches of an analytic model found: the best, where their time goes, what scales.

Every table is at most 80 columns wide, and says the same without colours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from autopar.units import format_bytes, format_count, format_seconds
from search.analytic.answers import Answer, Point
from search.report.sections import make_table, print_heading, print_item, print_line

__all__ = [
    "WIDTH",
    "by_strategy",
    "efficiencies",
    "none_sentence",
    "show_answer",
    "show_assumed",
    "show_frontier",
    "show_scaling",
    "show_sweep",
    "subject",
]

WIDTH = 80
_BROKEN_DOWN = 6
"""Executions whose time and memory are taken apart, at most."""
_SHOWN = 30
"""Points of a frontier that a table has, at most."""


def subject(answer: Answer, unit: str) -> str:
    """Return what was searched: the processors and the strategy."""
    text = format_count(answer.processors, unit)
    return text if answer.strategy is None else f"{text}, {answer.strategy}"


def show_answer(
    console: Console, answer: Answer, *, unit: str, legend: str, alone: bool = True
) -> None:
    """Print the best executions of one search, their time and memory, and what was left out.

    unit : what is counted, 'processor' or 'GPU'. legend : what the letters of executions mean.
    alone : no other search follows, which would say where time and memory go.
    """
    print_heading(console, subject(answer, unit))
    if answer.best:
        table = _table("#", "samples/s", "step", "memory", "of all", "execution", left=1)
        for place, point in enumerate(answer.best, 1):
            table.add_row(
                str(place),
                f"{point.rate_per_s:.5g}",
                format_seconds(point.time_s),
                format_bytes(point.memory_bytes),
                _percent(point.memory_bytes / answer.capacity_bytes),
                f"{point.degrees}, {point.switches}",
            )
        console.print(table)
        if legend:
            print_line(console, legend, style="dim")
    _show_counts(console, answer)
    if alone:
        best = {f"#{place}": (answer, point) for place, point in enumerate(answer.best, 1)}
        _show_parts(console, dict(list(best.items())[:_BROKEN_DOWN]))


def show_frontier(console: Console, answer: Answer) -> None:
    """Print what nothing beats in both time per sample and memory, fastest first."""
    if not answer.frontier:
        return
    shown = _spread(answer.frontier)
    print_heading(console, "frontier: less memory only for more time")
    table = _table("memory", "of all", "samples/s", "step", "execution")
    for point in shown:
        table.add_row(
            format_bytes(point.memory_bytes),
            _percent(point.memory_bytes / answer.capacity_bytes),
            f"{point.rate_per_s:.5g}",
            format_seconds(point.time_s),
            point.degrees,
        )
    console.print(table)
    if len(shown) < len(answer.frontier):
        print_line(
            console, f"{len(shown)} of {len(answer.frontier)} points; --json has all", style="dim"
        )


def show_scaling(console: Console, answers: Sequence[Answer], *, unit: str) -> None:
    """Print the best of every search side by side, and how well more processors are used."""
    if len(answers) < 2:
        return
    named = any(answer.strategy for answer in answers)
    if len({answer.processors for answer in answers}) > 1:
        print_heading(console, "scaling")
        heads = (f"{unit}s", *(["strategy"] if named else []))
        table = _table(*heads, "samples/s", "of each", "efficiency", "step", "execution")
        for group in by_strategy(answers):
            for answer, share in zip(group, efficiencies(group), strict=True):
                table.add_row(*_scaled(answer, share, named=named))
        console.print(table)
        print_line(
            console,
            f"of each: samples/s per {unit}; efficiency: that against the first with an answer",
            style="dim",
        )
    _show_parts(
        console,
        {
            f"{answer.processors}" + (f" {answer.strategy}" if named else ""): (answer, best)
            for answer in answers
            for best in answer.best[:1]
        },
    )


def _scaled(answer: Answer, share: float | None, *, named: bool) -> list[str]:
    head = [str(answer.processors), *([answer.strategy or ""] if named else [])]
    if share is None:
        return [*head, "", "", "", "", "none can run"]
    best = answer.best[0]
    return [
        *head,
        f"{best.rate_per_s:.5g}",
        f"{best.rate_per_s / answer.processors:.4g}",
        _percent(share),
        format_seconds(best.time_s),
        best.degrees,
    ]


def show_sweep(
    console: Console, answers: Sequence[Answer], paths: Sequence[str], *, unit: str
) -> None:
    """Print the best execution at every setting of a sweep, of one number of processors."""
    print_heading(console, f"sweep on {subject(answers[0], unit)}")
    heads = ["value" if len(paths) == 1 else f"value {n}" for n, _ in enumerate(paths, 1)]
    for head, path in zip(heads, paths, strict=True):
        print_line(console, f"{head} = {path}")
    table = _table(*heads, "samples/s", "change", "step", "memory", "of all", "best")
    first = next((answer.best[0] for answer in answers if answer.best), None)
    names: dict[str, str] = {}
    for answer in answers:
        values = [f"{value:.6g}" for value in answer.values]
        if not answer.best or first is None:
            table.add_row(*values, "", "", "", "", "", "none can run")
            continue
        best = answer.best[0]
        words = f"{best.degrees}, {best.switches}"
        table.add_row(
            *values,
            f"{best.rate_per_s:.5g}",
            f"{(best.rate_per_s / first.rate_per_s - 1) * 100:+.1f} %",
            format_seconds(best.time_s),
            format_bytes(best.memory_bytes),
            _percent(best.memory_bytes / answer.capacity_bytes),
            names.setdefault(words, _letters(len(names))),
        )
    console.print(table)
    table = _table("best", "execution", left=1)
    for words, name in names.items():
        table.add_row(name, words)
    console.print()
    console.print(table)


def show_assumed(console: Console, lists: Mapping[str, Sequence[str]]) -> None:
    """Print lists of sentences under their headings, empty ones left out."""
    for heading, items in lists.items():
        if items:
            print_heading(console, heading)
            for item in items:
                print_item(console, item)


def none_sentence(answers: Sequence[Answer], name: str, system: str, unit: str) -> str:
    """Return why nothing can run, from the search that came closest, and what may help."""
    answer = max(answers, key=lambda one: one.considered)
    count = format_count(answer.processors, unit)
    if answer.strategy is not None:
        name = f"{name} with {answer.strategy}"
    if not answer.considered:
        return (
            f"no way to divide {name} over {count} of {system} was found; choose "
            f"another number of {unit}s, or a batch that it divides"
        )
    why = "; ".join(f"{some:,} {_because(text)}" for text, some in answer.rejected.items())
    return (
        f"none of {answer.considered:,} executions of {name} can run on {count} of "
        f"{system}: {why}; give more {unit}s, more memory, or another batch"
    )


def by_strategy(answers: Iterable[Answer]) -> list[list[Answer]]:
    """Return the answers of every strategy, by their number of processors."""
    groups: dict[str | None, list[Answer]] = {}
    for answer in sorted(answers, key=lambda one: one.processors):
        groups.setdefault(answer.strategy, []).append(answer)
    return list(groups.values())


def efficiencies(answers: Sequence[Answer]) -> list[float | None]:
    """Return rates per processor as shares of the first that there is; None without an answer."""
    rates = [a.best[0].rate_per_s / a.processors if a.best else None for a in answers]
    first = next((rate for rate in rates if rate is not None), None)
    return [None if rate is None or first is None else rate / first for rate in rates]


def _show_parts(console: Console, columns: Mapping[str, tuple[Answer, Point]]) -> None:
    """Print the parts of time and memory of executions, as many side by side as there is room."""
    for name, heading in (
        ("time", "where the time goes, in % of the step"),
        ("memory", "where the memory goes, in % of the capacity"),
    ):
        rows = {
            head: {
                part.name: part.amount / (point.time_s if name == "time" else answer.capacity_bytes)
                for part in getattr(point, name)
            }
            for head, (answer, point) in columns.items()
        }
        names = dict.fromkeys(part for shares in rows.values() for part in shares)
        room = console.width - max((len(part) for part in names), default=0)
        wide = max((max(len(head), 5) for head in rows), default=5) + 3
        heads = list(rows)
        if heads:
            print_heading(console, heading)
        for start in range(0, len(heads), room // wide):
            shown = heads[start : start + room // wide]
            table = make_table("part", *shown, left=1)
            for part in names:
                table.add_row(part, *(f"{rows[h].get(part, 0.0) * 100:.1f}" for h in shown))
            if name == "memory":
                sums = (f"{sum(rows[head].values()) * 100:.1f}" for head in shown)
                table.add_row("in all", *sums, style="bold")
            if start:
                console.print()
            console.print(table)


def _show_counts(console: Console, answer: Answer) -> None:
    if not answer.complete:
        print_line(console, "stopped before its end; this is what was found until then")
    if not answer.considered:
        print_line(console, "no degrees divide both the model and the batch")
        return
    others = "; the others:" if answer.rejected else ""
    print_line(console, f"{answer.feasible:,} of {answer.considered:,} executions can run{others}")
    for text, count in answer.rejected.items():
        print_item(console, f"{count:,} ({_percent(count / answer.considered)}): {text}")


def _table(*columns: str, left: int = 0) -> Table:
    """Return a table whose last column is words, which wrap."""
    table = make_table(*columns, left=left)
    table.columns[-1].justify, table.columns[-1].no_wrap = "left", False
    return table


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _letters(place: int) -> str:
    """Return A, B, ..., Z, AA, AB, ..."""
    more, last = divmod(place, 26)
    return (_letters(more - 1) if more else "") + chr(ord("A") + last)


def _because(text: str) -> str:
    return f"because {text}" if not text.startswith("needs ") else text.replace("needs", "need", 1)


def _spread(points: Sequence[Point]) -> list[Point]:
    """Return at most so many points of a frontier, its ends among them."""
    if len(points) <= _SHOWN:
        return list(points)
    step = (len(points) - 1) / (_SHOWN - 1)
    return [points[round(n * step)] for n in range(_SHOWN)]

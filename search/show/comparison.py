"""Report of plans in several cost models: tables of step parts, and the largest differences.

`search.closed_form.comparison` computes the results of the models.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from autopar.command.console import Console, escape
from autopar.command.show import make_table, print_heading, print_item, print_plain
from autopar.units import format_count, format_seconds
from search.closed_form.comparison import KINDS, MODELS, TERMS
from search.show.terms import time_name

if TYPE_CHECKING:
    from autopar.rates.accuracy import RunClass
    from search.closed_form.comparison import Column, Comparison, Difference

_FIRST = "bottom_up"
"""Reference model of the overview of several plans."""
_NAME_WIDTH = 24
_UNSEEN = 1e-6
"""Share of a step below which a part is not printed."""


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Print the step of one plan by part in all models, its interval and the differences."""
    print_plain(console, _title(comparison), style="bold")
    print_heading(console, "Step time by model")
    table = make_table("term", *MODELS.values(), spaced=True, ruled=False)
    columns = comparison.columns
    for name, cells in _rows(columns):
        if any(value is not None for value in cells):
            indent = " " * (len(name) - len(name.lstrip()))
            table.add_row(escape(indent + time_name(name.strip())), *map(_seconds, cells))
    table.add_row("total", *(_seconds(column.total_s, "none") for column in columns), style="bold")
    console.print(table)
    for column in columns:
        if column.runs is not None:
            print_plain(console, _interval(column, column.runs, comparison.question.stack.name))
    _show_differences(console, comparison.differences)
    _show_lists(console, [comparison], named=False)


def show_overview(console: Console, comparisons: Sequence[Comparison]) -> None:
    """Print the steps of several plans in all models, each with the part that differs most."""
    table = make_table("plan", *MODELS.values(), spaced=True)
    for comparison in comparisons:
        first = comparison.columns[0]
        from_first = {gap.other: gap for gap in comparison.differences if gap.one == _FIRST}
        steps = [_seconds(column.total_s, "none") for column in comparison.columns]
        shares, terms = [], []
        for column in comparison.columns:
            gap = from_first.get(column.model)
            shares.append("" if gap is None else f"{gap.share * 100:+.1f} %")
            terms.append("" if gap is None else time_name(gap.term))
        if first.runs is not None:
            shares[0] = _percents(first.runs)
        # The name of a plan is wrapped over several lines next to its figures.
        name = [*_wrapped(comparison), "", ""]
        for index, cells in enumerate((steps, shares, terms)):
            table.add_row(escape(name[index]), *map(escape, cells))
        for more in name[3:]:
            if more:
                table.add_row(escape(more), *("" for _ in MODELS))
    console.print(table)
    print_plain(
        console,
        "below a step: its 90 % interval (bottom-up), or the difference to bottom-up and the term "
        "that differs most",
        style="dim",
    )
    _show_lists(console, comparisons, named=True)


def _wrapped(comparison: Comparison) -> list[str]:
    return textwrap.wrap(_subject(comparison), _NAME_WIDTH)


def _subject(comparison: Comparison) -> str:
    question = comparison.question
    plan = question.plan
    degrees = f"pp{plan.num_stages} " if plan.num_stages > 1 else ""
    labels = dict.fromkeys(
        strategy.label(plan.data_degree(layer), plan.default_dp_type)
        for layer, strategy in enumerate(plan.layers)
    )
    several = f" and {len(labels) - 1} more" if len(labels) > 1 else ""
    return (
        f"{question.spec.name}, {plan.world_size} {question.card.name}, "
        f"{degrees}{next(iter(labels))}{several}"
    )


def _title(comparison: Comparison) -> str:
    question = comparison.question
    plan, layer = question.plan, question.spec.layers[0]
    batches = format_count(plan.num_microbatches, "micro-batch", "micro-batches")
    return (
        f"{_subject(comparison)}: {batches} of "
        f"{plan.global_batch / plan.num_microbatches:g} x {layer.seq_length:,} tokens, stack "
        f"{question.stack.name}"
    )


def _rows(columns: Sequence[Column]) -> list[tuple[str, list[float | None]]]:
    """Return the rows of the step table, with the kinds of computation below `compute`."""
    rows = []
    for term in TERMS:
        rows.append((term, [_seen(column, column.terms_s.get(term)) for column in columns]))
        if term == "compute":
            rows += [(f"  {kind}", [c.kinds_s.get(kind) for c in columns]) for kind in KINDS]
    return rows


def _seen(column: Column, value: float | None) -> float | None:
    """Return a part, or None if it is too small to be printed."""
    return None if value is None or abs(value) < _UNSEEN * (column.total_s or 0.0) else value


def _seconds(value: float | None, absent: str = "") -> str:
    return absent if value is None else format_seconds(value)


def _interval(column: Column, found: RunClass, stack: str) -> str:
    assert column.total_s is not None, "it has an interval"
    low_s, high_s = found.interval_s(column.total_s)
    other = "" if found.stack == stack or found.unlike else f" (none with {stack})"
    return (
        f"Basis: bottom-up is a datasheet estimate; 90 % interval {format_seconds(low_s)} to "
        f"{format_seconds(high_s)} ({_percents(found)}) of {found.basis}{other}"
    )


def _percents(found: RunClass) -> str:
    return f"{(found.low - 1) * 100:+.0f} to {(found.high - 1) * 100:+.0f} %"


def _show_differences(console: Console, differences: Sequence[Difference]) -> None:
    if not differences:
        return
    print_heading(console, "Differences")
    table = make_table(
        "model", "minus", "step", "share", "largest term", "", left=2, spaced=True, ruled=False
    )
    for gap in differences:
        table.add_row(
            MODELS[gap.other],
            MODELS[gap.one],
            _signed(gap.seconds),
            f"{gap.share * 100:+.1f} %",
            escape(time_name(gap.term)),
            _signed(gap.term_s),
        )
    console.print(table)


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _show_lists(console: Console, comparisons: Sequence[Comparison], *, named: bool) -> None:
    """Print why models have no step time, and how the priced plan differs from the given one.

    named : True to print the plans that a line applies to, if these are not all.
    """
    reasons: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    for comparison in comparisons:
        for column in comparison.columns:
            start, plan = f"{MODELS[column.model]}: ", comparison.question.spec.name
            if column.reason:
                reasons.setdefault(start + column.reason, []).append(plan)
            for note in column.notes:
                notes.setdefault(start + note, []).append(plan)
    for heading, found in (("Not estimated", reasons), ("Notes", notes)):
        if found:
            print_heading(console, heading)
        for text, plans in found.items():
            some = named and len(plans) < len(comparisons)
            print_item(console, f"{text} ({', '.join(plans)})" if some else text)


# --------------------------------------------------------------------------------------------------
# The object of `--json`.


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Return the object of `--json` for one plan: seconds by model and part."""
    question = comparison.question
    plan = question.plan
    return {
        "plan": question.path,
        "model": question.spec.name,
        "system": question.card.name,
        "stack": question.stack.name,
        "num_gpus": plan.world_size,
        "global_batch": plan.global_batch,
        "models": {column.model: _column(column) for column in comparison.columns},
        "differences": [asdict(gap) for gap in comparison.differences],
    }


def _column(column: Column) -> Mapping[str, Any]:
    return {
        "step_time_s": column.total_s,
        "reason": column.reason or None,
        "terms_s": dict(column.terms_s),
        "kinds_s": dict(column.kinds_s),
        "own_s": dict(column.own_s),
        "interval": _ends(column),
        "notes": list(column.notes),
    }


def _ends(column: Column) -> dict[str, Any] | None:
    if column.runs is None or column.total_s is None:
        return None
    low_s, high_s = column.runs.interval_s(column.total_s)
    names = ("stack", "experts", "rows", "low", "high")
    return {
        "low_s": low_s,
        "high_s": high_s,
        **{name: getattr(column.runs, name) for name in names},
    }

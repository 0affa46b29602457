"""Report of `autopar explore`: ranking per model, its certainty, and effects of options.

Tables, the object of `--json` and the picture show the results of `search.questions.explore`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.command.console import escape
from autopar.command.fields import words_of
from autopar.command.show import (
    COLOURS,
    GRID,
    QUIET,
    make_table,
    print_heading,
    print_item,
    print_plain,
    save_figures,
    wrapped,
)
from autopar.output import Aside
from autopar.units import GIB, format_count, format_range_s, format_seconds
from search.questions.explore import AXES, TRAINED, By, effects, leads
from search.request.request import ROWS
from search.show.summary import in_table, row_lines

if TYPE_CHECKING:
    from autopar.command.console import Console
    from autopar.exploration import LeadEntry
    from search.questions.explore import Combination, CombinationResult, ComparableGroup

PICTURE = "what_if"
"""File name of the picture without suffix."""
_COLUMNS = {"global-batch-size": "batch"}
"""Column names of options, if they differ from the option."""
_SAME = 1.005
"""Ratio below which two answers count as equal."""
_ORDER = {"tokens": "tokens/s/GPU", "step": "step time", "cost": "price of a million tokens"}
_LABEL = 11
"""Width of the label of a footer row with the blanks after it, columns."""


# --------------------------------------------------------------------------------------------------
# The tables.


def show_answers(
    console: Console, groups: Sequence[ComparableGroup], by: By, *, verbose: bool = False
) -> None:
    """Print every group with its ranking, and the effects of options over all groups.

    verbose : True to print also the number of GPUs, all defaults and the definitions of columns.
    """
    answers = [answer for group in groups for answer in (*group.ranked, *group.left)]
    found = [answer for group in groups for answer in group.ranked]
    varied = varied_axes([answer.choice for answer in answers])
    batch = _common_batch(answers, varied)
    counts = f"{format_count(len(answers), 'combination')}, {len(found)} feasible"
    title = f"{_title(groups[0])}{batch}: {counts}" if len(groups) == 1 else f"{counts}{batch}"
    print_plain(console, title, style="bold")
    print_plain(console, f"{_basis(found)}Sorted by {_ORDER[by]}.")
    same = _same_words(answers, varied)
    if same:
        print_plain(console, f"Same for all: {', '.join(same)}")
    for group in groups:
        _show_group(console, group, by, varied, headed=len(groups) > 1, verbose=verbose)
    _show_effects(console, answers, by)
    if verbose and found:
        _show_definitions(console, found)
        _show_defaults(console, found)
    _show_next(console, groups, verbose=verbose)


def _show_next(console: Console, groups: Sequence[ComparableGroup], *, verbose: bool) -> None:
    """Print the search of the best answer of each group."""
    first = [group.ranked[0] for group in groups if group.ranked]
    if not first:
        return
    console.print()
    for at, answer in enumerate(first):
        label = "" if at else "Next"
        # Not wrapped, so that the command can be copied.
        console.print(escape(f"{label:<{_LABEL}}{command_of(answer.choice)}"), soft_wrap=True)
    if not verbose:
        console.print(f"{'':<{_LABEL}}--verbose (definitions, defaults, GPUs)", soft_wrap=True)


def _common_batch(answers: Sequence[CombinationResult], varied: Sequence[str]) -> str:
    """Return the global batch that all combinations share, as a part of a title."""
    batch = answers[0].choice.words.get("global-batch-size")
    shared = batch is not None and "global-batch-size" not in varied
    return f", global batch {batch}" if shared else ""


def _basis(found: Sequence[CombinationResult]) -> str:
    """Return a sentence on estimated or synthetic times, with the hardware if not all have them."""
    parts = []
    for kind, of in (
        ("SYNTHETIC timings", [answer for answer in found if answer.synthetic]),
        ("ESTIMATES from datasheets", [answer for answer in found if answer.estimated]),
    ):
        names = ", ".join(dict.fromkeys(answer.choice.words["hardware"] for answer in of))
        if of:
            parts.append(kind + ("" if len(of) == len(found) else f" for {names}"))
    return f"{'; '.join(parts)}. " if parts else ""


def varied_axes(asked: Iterable[Combination]) -> tuple[str, ...]:
    """Return the options with several values in these combinations, in the order of `AXES`."""
    values: dict[str, set[str]] = {}
    for choice in asked:
        for name, word in choice.words.items():
            values.setdefault(name, set()).add(word)
    return tuple(name for name in AXES if len(values.get(name, ())) > 1)


def _same_words(answers: Sequence[CombinationResult], varied: Sequence[str]) -> list[str]:
    """Return the option values that all answers share, without model, length and hardware."""
    words = answers[0].choice.words
    same = [
        f"{_COLUMNS.get(name, name)} {words[name]}"
        for name in AXES
        if name in words and name not in (*varied, *TRAINED, "hardware", "global-batch-size")
    ]
    rows = {row.name: row for row in ROWS}
    given = answers[0].choice.request.given
    same += [
        " ".join(words_of(rows[name], value)) for name, value in given.items() if name not in AXES
    ]
    if "stack" not in words and all(answer.engine is None for answer in answers):
        # With an engine, the stack is that of the engine and not the default of the option.
        shown = next(row.shown for row in ROWS if row.name == "stack")
        same.append(f"stack {shown} (default)")
    return same


def _title(group: ComparableGroup) -> str:
    tokens = sorted({a.figures.tokens_per_sample for a in group.ranked if a.figures is not None})
    names = [a.session.spec.name for a in group.ranked if a.session is not None]
    model = group.trained.get("model", names[0] if names else "")
    if tokens:
        return f"{model}, {tokens[0]:,} tokens"
    length = group.trained.get("seq-length")
    return model if length is None else f"{model}, {length} tokens"


def _show_group(
    console: Console,
    group: ComparableGroup,
    by: By,
    varied: Sequence[str],
    *,
    headed: bool,
    verbose: bool,
) -> None:
    """Print the answers of one model and sequence length.

    headed : True to print the model as a heading.
    """
    console.print()
    if headed:
        print_plain(console, _title(group), style="bold cyan")
    axes = [name for name in varied if name not in TRAINED and name != "hardware"]
    if group.ranked:
        columns = _show_table(console, group, axes, verbose=verbose)
        # The plan already contains the engine, and its batch if that varies.
        rest = [name for name in axes if name not in (*columns, "global-batch-size")]
        _show_plans(console, group, rest, columns)
    left: dict[tuple[str, str], list[str]] = {}
    for answer in group.left:
        left.setdefault((answer.status, answer.reason), []).append(_name(answer, axes))
    for (status, reason), names in left.items():
        print_item(console, f"{status}: {', '.join(names)}: {reason}")
    ahead = leads(group, by)
    if ahead:
        console.print()
    for one in ahead:
        print_plain(console, _lead_words(group, one, by))


def _show_table(
    console: Console, group: ComparableGroup, axes: Sequence[str], *, verbose: bool
) -> tuple[str, ...]:
    """Print the figures of every answer; return the options whose columns fit on the screen."""
    priced = any(a.figures is not None and a.figures.cost_per_mtoken for a in group.ranked)
    last = ["step", "90 % interval", "tokens/s/GPU", "MFU", "peak GiB", *["/Mtok"] * priced]
    rows = [
        (str(place), answer.choice.words["hardware"], answer, _cells(answer, priced=priced))
        for place, answer in enumerate(group.ranked, 1)
    ]
    for kept in range(len(axes), -1, -1):
        shown = tuple(axes[:kept])
        heads = ("#", "hardware", *(_COLUMNS.get(name, name) for name in shown), *last)
        lines = [
            (place, hardware, *(answer.choice.words.get(name, "") for name in shown), *cells)
            for place, hardware, answer, cells in rows
        ]
        widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
        # Columns are separated by two blanks.
        if not shown or sum(widths) + 2 * (len(widths) - 1) <= console.width:
            break
    table = make_table(*heads, left=2 + len(shown), ruled=False)
    for line in lines:
        table.add_row(*map(escape, line))
    console.print(table)
    if verbose:
        numbers = ", ".join(
            f"#{place} {answer.figures.num_gpus}"
            for place, answer in enumerate(group.ranked, 1)
            if answer.figures is not None
        )
        print_plain(console, f"GPUs: {numbers}")
    return shown


def _show_plans(
    console: Console, group: ComparableGroup, axes: Sequence[str], columns: Sequence[str]
) -> None:
    """Print the plan of every answer with its values of `axes`; equal plans are printed once."""
    plans: dict[str, list[str]] = {}
    for place, answer in enumerate(group.ranked, 1):
        early = f"; {answer.reason}" if answer.reason else ""
        words = ", ".join(_words(answer, axes))
        number = f"{place}" + (f" ({words})" if words else "")
        named = "engine" in columns and answer.choice.words.get("engine") == answer.engine
        assert answer.priced is not None, "a plan was found"
        plan = in_table(answer.priced.words if named else _summary(answer))
        plans.setdefault(plan + early, []).append(number)
    print_heading(console, "Plans")
    width = max(len(", ".join(numbers)) for numbers in plans.values()) + 2
    for text, numbers in plans.items():
        label = ", ".join(numbers)
        if width <= _MOST_NUMBERS:
            lines = row_lines([(label, text)], console.width, width)
        else:
            lines = wrapped(f"{label}: {text}", console.width - 4)
            lines = [("    " if at else "") + line for at, line in enumerate(lines)]
        for line in lines:
            console.print(escape(line), soft_wrap=True)


_MOST_NUMBERS = 12
"""Largest width of the numbers before a plan, columns."""


def _summary(answer: CombinationResult) -> str:
    """Return the engine and the plan of an answer in one line."""
    assert answer.priced is not None, "a plan was found"
    return " ".join(filter(None, (answer.priced.engine, answer.priced.words)))


def _cells(answer: CombinationResult, *, priced: bool) -> list[str]:
    figures = answer.figures
    assert figures is not None
    interval = ""
    if figures.step_time_interval_s is not None:
        ends = figures.step_time_interval_s
        interval = format_range_s(*ends, like_s=figures.step_time_s, digits=3)
    cells = [
        format_seconds(figures.step_time_s),
        interval,
        _number(figures.tokens_per_s_per_gpu),
        "" if figures.mfu is None else f"{figures.mfu * 100:.0f} %",
        f"{figures.reserved_bytes / GIB:.1f}/{figures.budget_bytes / GIB:>5.1f}",
    ]
    if priced:
        price = figures.cost_per_mtoken
        cells.append("" if price is None else f"{price:.4g}")
    return cells


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def _words(answer: CombinationResult, axes: Sequence[str]) -> list[str]:
    """Return the values of these options in words."""
    words = answer.choice.words
    found = []
    for name in (name for name in axes if name in words):
        if words[name].lower() == "none":
            found.append(f"no {name}")
        else:
            found.append(f"{_COLUMNS[name]} {words[name]}" if name in _COLUMNS else words[name])
    return found


def _name(answer: CombinationResult, axes: Sequence[str]) -> str:
    named = _words(answer, axes)
    return answer.choice.words["hardware"] + (f" with {' and '.join(named)}" if named else "")


def _lead_words(group: ComparableGroup, ahead: LeadEntry, by: By) -> str:
    """Return the ratio of the best result to another one, and its certainty, in one line."""
    best, one = group.ranked[0], group.ranked[ahead.over - 1]
    words, others = best.choice.words, one.choice.words
    differ = [name for name in AXES if name in others and words.get(name) != others[name]]
    told = ", ".join(others[name] for name in differ)
    other = f"#{ahead.over}" + (f" ({told})" if told else "")
    if ahead.ratio < _SAME:
        return f"#1 and {other} are equal"
    than = {
        "tokens": f"#1 has {ahead.ratio:.3g}x the throughput of {other}",
        "step": f"{other} takes {ahead.ratio:.3g}x the step time of #1",
        "cost": f"{other} costs {ahead.ratio:.3g}x as much as #1",
    }[by]
    if ahead.probability_faster is not None:
        sure = f"probability that #1 is better: {ahead.probability_faster * 100:.0f} %"
    elif ahead.intervals_overlap is None:
        sure = "certainty unknown"
    elif ahead.intervals_overlap:
        sure = "intervals overlap, uncertain"
    else:
        sure = "90 % intervals do not overlap"
    return f"{than}: {sure}"


def _show_effects(console: Console, answers: Sequence[CombinationResult], by: By) -> None:
    """Print the effect of each option: ratio of its best to its worst value, others being equal."""
    worth = effects(answers, by)
    if not worth:
        return
    parts = [
        f"{_COLUMNS.get(one.option, one.option)} {one.ratio:.3g}x "
        f"({one.best} is best in {one.wins} of {one.comparisons})"
        if one.ratio >= _SAME
        else f"{_COLUMNS.get(one.option, one.option)} none"
        for one in worth
    ]
    label = f"Effect on {_ORDER[by]}: "
    console.print()
    rows = [("" if at else label, part) for at, part in enumerate(parts)]
    for line in row_lines(rows, console.width, len(label)):
        console.print(escape(line), soft_wrap=True)


def _show_definitions(console: Console, found: Sequence[CombinationResult]) -> None:
    """Print the definitions of the columns."""
    print_heading(console, "Definitions")
    lines = [
        "MFU: model FLOP over the card's dense peak in the precision of the GEMMs",
        "peak GiB: memory of the peak stage / budget of a GPU",
        "effect: best over worst value of an option, with all others equal",
    ]
    if any(answer.runs is not None for answer in found):
        lines.append("90 % interval: step times, from the errors on published runs")
    if any(a.figures is not None and a.figures.cost_per_mtoken for a in found):
        lines.append("/Mtok: price of a million tokens")
    for line in lines:
        print_item(console, line)


def _show_defaults(console: Console, found: Sequence[CombinationResult]) -> None:
    """Print the defaults that all answers share."""
    lines = [[line for line in answer.defaults_used if line.startswith("--")] for answer in found]
    shared = [line for line in lines[0] if all(line in own for own in lines)] if lines else []
    if shared:
        print_heading(console, "Defaults")
    for line in shared:
        print_item(console, line)


def command_of(choice: Combination) -> str:
    """Return the `autopar search` command line of a combination."""
    rows = {row.name: row for row in ROWS}
    given = dict(choice.request.given)
    words = [word for name, value in given.items() for word in words_of(rows[name], value)]
    if choice.request.engine is not None:
        words += ["--engine", choice.request.engine]
    return " ".join(["autopar search", *words])


# --------------------------------------------------------------------------------------------------
# Files: names of plans, the object of `--json`, the picture.


def slugs(asked: Sequence[Combination]) -> list[str]:
    """Return a unique file name for each combination, built from cards and stems of paths."""
    found: list[str] = []
    for choice in asked:
        parts = [
            f"{'s' if name == 'seq-length' else 'b'}{word}"
            if name in ("seq-length", "global-batch-size")
            else Path(word).name.removesuffix(".json")
            for name, word in choice.words.items()
            if word.lower() != "none"
        ]
        slug = "_".join("".join(c if c.isalnum() or c in ".-" else "-" for c in p) for p in parts)
        number = 1 + sum(other == slug or other.startswith(f"{slug}~") for other in found)
        found.append(slug if number == 1 else f"{slug}~{number}")
    return found


def exploration(
    groups: Sequence[ComparableGroup],
    by: By,
    *,
    choices: Mapping[str, Sequence[str]],
    request: Mapping[str, object],
    plan_files: Mapping[int, str],
    complete: bool,
) -> dict[str, Any]:
    """Return the object of `--json`.

    choices, request : options as typed.
    plan_files : path of the plan file, by the `id` of the answer's choice.
    """
    from autopar.documents.plan import plain
    from autopar.exploration import (
        ChoiceEntry,
        ExplorationDocument,
        GroupEntry,
    )

    answers = [answer for group in groups for answer in (*group.ranked, *group.left)]

    def entry(answer: CombinationResult, rank: int | None) -> ChoiceEntry:
        there: dict[str, Any] = {}
        if answer.figures is not None:
            there = {
                "rank": rank,
                "engine": answer.engine,
                **plain(answer.figures._asdict()),
                "summary": _summary(answer),
                **_plan_entry(answer),
                "plan_file": plan_files.get(id(answer.choice)),
                "estimated": answer.estimated,
            }
        if answer.result is not None or answer.launches is not None:
            there["defaults_used"] = list(answer.defaults_used)
            there["notes"] = list(answer.notes)
        return ChoiceEntry(
            choice=dict(answer.choice.words), status=answer.status, reason=answer.reason, **there
        )

    return ExplorationDocument(
        format="autopar-exploration",
        version=1,
        by=by,
        complete=complete,
        choices={name: list(values) for name, values in choices.items()},
        request={key: plain(value) for key, value in sorted(request.items())},
        groups=[
            GroupEntry(
                trained=dict(group.trained),
                leads=list(leads(group, by)),
                answers=[
                    *(entry(answer, place) for place, answer in enumerate(group.ranked, 1)),
                    *(entry(answer, None) for answer in group.left),
                ],
            )
            for group in groups
        ],
        effects=list(effects(answers, by)),
    ).content()


def _plan_entry(answer: CombinationResult) -> dict[str, Any]:
    """Return the degrees of a uniform plan, or the strategies of a per-layer plan."""
    launch = answer.launch
    if launch is not None:
        from search.planning.uniform.files import degrees_entry

        assert launch.best is not None, "it is the fastest"
        assert answer.launches is not None, "the launch is of them"
        world = answer.launches.question.job.world
        return {"degrees": degrees_entry(launch.best.choice, world)}
    from autopar.documents.strategy import strategy_document

    assert answer.result is not None, "a plan was found"
    assert answer.result.plan is not None, "a plan was found"
    return {"plan": strategy_document(answer.result.plan)}


def save_picture(
    folder: str,
    groups: Sequence[ComparableGroup],
    formats: Sequence[str],
    aside: Aside | None = None,
) -> list[Path]:
    """Write bars of tokens/s/GPU with 90 % intervals, one plot per group; return the files.

    aside : see `autopar.output`.

    Raises the errors of `save_figures`.
    """
    shown = [group for group in groups if group.ranked]
    asked = [answer.choice for group in groups for answer in (*group.ranked, *group.left)]
    axes = [name for name in ("hardware", *varied_axes(asked)) if name not in TRAINED]

    def draw(figure_of: Any) -> Any:
        rows = [len(group.ranked) for group in shown]
        figure = figure_of(figsize=(8.0, 0.8 * len(shown) + 0.32 * sum(rows)), layout="constrained")
        plots = figure.subplots(len(shown), 1, squeeze=False, height_ratios=[n + 1 for n in rows])
        for group, (plot,) in zip(shown, plots, strict=True):
            for place, answer in enumerate(group.ranked):
                assert answer.figures is not None
                figures = answer.figures
                speed, ends = figures.tokens_per_s_per_gpu, figures.interval_tokens_per_s_per_gpu
                plot.barh(place, speed, color=COLOURS[0], height=0.6)
                if ends is not None:
                    plot.plot(ends, (place, place), color=COLOURS[7], linewidth=1.5)
            names = [
                ", ".join(dict.fromkeys(a.choice.words[n] for n in axes if n in a.choice.words))
                for a in group.ranked
            ]
            plot.set_yticks(range(len(names)), names)
            plot.invert_yaxis()  # best answer on top
            plot.set_title(_title(group), loc="left")
            plot.grid(axis="x", color=GRID)
            plot.set_axisbelow(True)
        plots[-1][0].set_xlabel("tokens/s/GPU; line: 90 % interval", color=QUIET)
        return figure

    return save_figures(folder, {PICTURE: draw}, formats, aside)


def first_commands(groups: Sequence[ComparableGroup], plan_files: Mapping[int, str]) -> list[str]:
    """Return the command that explains the plan file of the best answer of each group."""
    first = [group.ranked[0] for group in groups if group.ranked]
    return [
        f"autopar explain {shlex.quote(plan_files[id(answer.choice)])}"
        for answer in first
        if id(answer.choice) in plan_files
    ]

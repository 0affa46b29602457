"""Report of an exploration: a table per model, the certainty of its order, effects of options.

The tables, the object of `--json` and the picture show the answers of `search.questions.explore`.
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
)
from autopar.output import Aside
from autopar.units import GIB, format_count, format_seconds
from search.questions.explore import AXES, TRAINED, By, effects, leads
from search.request.request import ROWS

if TYPE_CHECKING:
    from autopar.command.console import Console
    from autopar.exploration import LeadEntry
    from search.questions.explore import Answer, Choice, Group

PICTURE = "what_if"
"""File name of the picture without suffix."""
_COLUMNS = {"global-batch-size": "batch"}
"""Column names of options, if they differ from the option."""
_FLAG = {"SYNTHETIC": "synthetic", "ESTIMATES": "estimated"}
"""Field of an answer for each printed basis."""
_SAME = 1.005
"""Ratio below which two answers count as equal."""
_WORTH = {"tokens": "tokens/s/GPU", "step": "time of a step", "cost": "price of a token"}
_ORDER = {
    "tokens": "by tokens per second and GPU",
    "step": "by time of a step",
    "cost": "by price of a token",
}


# --------------------------------------------------------------------------------------------------
# The tables.


def show_answers(console: Console, groups: Sequence[Group], by: By) -> None:
    """Print every group with its ranking, and the effects of options over all groups."""
    answers = [answer for group in groups for answer in (*group.ranked, *group.left)]
    found = [answer for group in groups for answer in group.ranked]
    varied = varied_axes([answer.choice for answer in answers])
    title = f"{format_count(len(answers), 'combination')}, {len(found)} with a plan, {_ORDER[by]}"
    print_plain(console, title, style="bold")
    _show_basis(console, found)
    same = _same_words(answers, varied)
    if same:
        print_plain(console, f"all with {', '.join(same)}")
    for group in groups:
        _show_group(console, group, by, varied)
    _show_effects(console, answers, by)
    if found:
        _legend(console, found)
    _show_defaults(console, found)
    if any(group.ranked for group in groups):
        print_heading(console, "the first of each, whole: its step by parts, memory, alternatives")
        for group in groups:
            for answer in group.ranked[:1]:
                # Not wrapped, so that the command can be copied.
                console.print(escape(command_of(answer.choice)), soft_wrap=True)


def _show_basis(console: Console, found: Sequence[Answer]) -> None:
    """Print which answers are estimated or synthetic: all, or those of some hardware."""
    for kind, whence, style in (
        ("SYNTHETIC", " timings, which exercise the code and describe no machine", "bold red"),
        ("ESTIMATES", " from datasheets, not on measurements", "yellow"),
    ):
        of = [answer for answer in found if getattr(answer, _FLAG[kind])]
        names = ", ".join(dict.fromkeys(answer.choice.words["hardware"] for answer in of))
        if of:
            whose = "" if len(of) == len(found) else f"of {names} "
            print_plain(console, f"rests {whose}on {kind}{whence}", style=style)


def varied_axes(asked: Iterable[Choice]) -> tuple[str, ...]:
    """Return the options with several values in these combinations, in the order of `AXES`."""
    values: dict[str, set[str]] = {}
    for choice in asked:
        for name, word in choice.words.items():
            values.setdefault(name, set()).add(word)
    return tuple(name for name in AXES if len(values.get(name, ())) > 1)


def _same_words(answers: Sequence[Answer], varied: Sequence[str]) -> list[str]:
    """Return the option values that all answers share, without model, length and hardware."""
    words = answers[0].choice.words
    same = [
        f"{_COLUMNS.get(name, name)} {words[name]}"
        for name in AXES
        if name in words and name not in (*varied, *TRAINED, "hardware")
    ]
    rows = {row.name: row for row in ROWS}
    given = answers[0].choice.request.given
    same += [
        " ".join(words_of(rows[name], value)) for name, value in given.items() if name not in AXES
    ]
    if "stack" not in words and all(answer.engine is None for answer in answers):
        # With an engine, the stack is that of the engine and not the default of the option.
        shown = next(row.shown for row in ROWS if row.name == "stack")
        same.append(f"stack {shown} (the default)")
    return same


def _title(group: Group) -> str:
    tokens = sorted({a.figures.tokens_per_sample for a in group.ranked if a.figures is not None})
    names = [a.session.spec.name for a in group.ranked if a.session is not None]
    model = group.trained.get("model", names[0] if names else "")
    if tokens:
        return f"{model}, {tokens[0]:,} tokens a sample"
    length = group.trained.get("seq-length")
    return model if length is None else f"{model}, {length} tokens a sample"


def _show_group(console: Console, group: Group, by: By, varied: Sequence[str]) -> None:
    print_heading(console, _title(group), style="bold cyan")
    axes = [name for name in varied if name not in TRAINED and name != "hardware"]
    if group.ranked:
        columns = _show_table(console, group, axes)
        # The plan already contains the batch.
        rest = [name for name in axes if name not in (*columns, "global-batch-size")]
        _show_plans(console, group, rest)
    left: dict[tuple[str, str], list[str]] = {}
    for answer in group.left:
        left.setdefault((answer.status, answer.reason), []).append(_name(answer, axes))
    for (status, reason), names in left.items():
        print_item(console, f"{status}: {', '.join(names)}: {reason}")
    ahead = leads(group, by)
    if ahead:
        best = f"best is {_name(group.ranked[0], axes)}: "
        text = best + "; ".join(_lead_words(group, one, by) for one in ahead)
        print_plain(console, text, style="bold")


def _show_table(console: Console, group: Group, axes: Sequence[str]) -> tuple[str, ...]:
    """Print the figures of every answer; return the options whose columns fit on the screen."""
    priced = any(a.figures is not None and a.figures.cost_per_mtoken for a in group.ranked)
    last = ["GPUs", "step", "90 %", "tokens/s/GPU", "MFU", "GiB used"]
    last += ["/Mtoken"] if priced else []
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
    table = make_table(*heads, left=2 + len(shown))
    for line in lines:
        table.add_row(*map(escape, line))
    console.print(table)
    return shown


def _show_plans(console: Console, group: Group, axes: Sequence[str]) -> None:
    """Print the plan of every answer with its values of `axes`; equal plans are printed once."""
    plans: dict[str, list[str]] = {}
    for place, answer in enumerate(group.ranked, 1):
        early = f"; {answer.reason}" if answer.reason else ""
        words = ", ".join(_words(answer, axes))
        number = f"#{place}" + (f" ({words})" if words else "")
        plans.setdefault(_summary(answer) + early, []).append(number)
    for text, numbers in plans.items():
        print_item(console, f"{', '.join(numbers)}: {text}")


def _summary(answer: Answer) -> str:
    """Return the engine and the plan of an answer in one line."""
    assert answer.priced is not None, "a plan was found"
    return " ".join(filter(None, (answer.priced.engine, answer.priced.words)))


def _cells(answer: Answer, *, priced: bool) -> list[str]:
    figures = answer.figures
    assert figures is not None
    used = f"{figures.reserved_bytes / GIB:.1f}/{figures.budget_bytes / GIB:.1f}"
    cells = [
        str(figures.num_gpus),
        format_seconds(figures.step_time_s),
        _span(figures.step_time_interval_s),
        _number(figures.tokens_per_s_per_gpu),
        "" if figures.mfu is None else f"{figures.mfu * 100:.0f} %",
        used,
    ]
    if priced:
        price = figures.cost_per_mtoken
        cells.append("" if price is None else f"{price:.4g}")
    return cells


def _span(interval: tuple[float, float] | None) -> str:
    """Return two times in the unit of the longer one; empty without an interval."""
    if interval is None:
        return ""
    unit = format_seconds(interval[1]).rpartition(" ")[2]
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
    return f"{interval[0] / scale:.3g}-{interval[1] / scale:.3g} {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"


def _words(answer: Answer, axes: Sequence[str]) -> list[str]:
    """Return the values of these options in words."""
    words = answer.choice.words
    found = []
    for name in (name for name in axes if name in words):
        if words[name].lower() == "none":
            found.append(f"no {name}")
        else:
            found.append(f"{_COLUMNS[name]} {words[name]}" if name in _COLUMNS else words[name])
    return found


def _name(answer: Answer, axes: Sequence[str]) -> str:
    named = _words(answer, axes)
    return answer.choice.words["hardware"] + (f" with {' and '.join(named)}" if named else "")


def _lead_words(group: Group, ahead: LeadEntry, by: By) -> str:
    other = f"#{ahead.over}"
    words = [group.ranked[place].choice.words["hardware"] for place in (0, ahead.over - 1)]
    if words[0] != words[1]:
        other += f" on {words[1]}"
    if ahead.ratio < _SAME:
        return f"{other} is as good"
    than = {
        "tokens": f"{ahead.ratio:.3g} times the tokens/s/GPU of {other}",
        "step": f"{other} takes {ahead.ratio:.3g} times as long",
        "cost": f"{other} costs {ahead.ratio:.3g} times as much",
    }[by]
    if ahead.probability_faster is not None:
        sure = f"better with {ahead.probability_faster * 100:.0f} % on this cluster and trainer"
    elif ahead.intervals_overlap is None:
        sure = "how sure is not known"
    elif ahead.intervals_overlap:
        sure = "not sure, their 90 % intervals overlap"
    else:
        sure = "their 90 % intervals do not overlap"
    return f"{than} ({sure})"


def _show_effects(console: Console, answers: Sequence[Answer], by: By) -> None:
    worth = effects(answers, by)
    if not worth:
        return
    parts = [
        f"{_COLUMNS.get(one.option, one.option)} {one.ratio:.3g} times "
        f"({one.best} is best in {one.wins} of {one.comparisons})"
        if one.ratio >= _SAME
        else f"{_COLUMNS.get(one.option, one.option)} nothing"
        for one in worth
    ]
    print_heading(console, "what moves it most")
    print_plain(console, f"{_WORTH[by]}, best over worst with all else equal: {'; '.join(parts)}")


def _legend(console: Console, found: Sequence[Answer]) -> None:
    published = any(answer.runs is not None for answer in found)
    text = "MFU: FLOP of the model over the dense peak of the card; GiB used: of the fullest GPU"
    if any(answer.launch is None for answer in found):
        text += (
            "; plans: pp stages, m micro-batches, G samples a step, then layers x how they are "
            "divided"
        )
    if any(a.figures is not None and a.figures.cost_per_mtoken for a in found):
        text += "; /Mtoken: price of a million tokens"
    if published:
        text = "90 %: where 9 of 10 published runs lay around such an estimate; " + text
    console.print()
    print_plain(console, text, style="dim")


def _show_defaults(console: Console, found: Sequence[Answer]) -> None:
    """Print the defaults that all answers share."""
    lines = [[line for line in answer.defaults_used if line.startswith("--")] for answer in found]
    shared = [line for line in lines[0] if all(line in own for own in lines)] if lines else []
    if shared:
        print_heading(console, "defaults used")
    for line in shared:
        print_item(console, line)


def command_of(choice: Choice) -> str:
    """Return the `autopar-search` command line of a combination."""
    rows = {row.name: row for row in ROWS}
    given = dict(choice.request.given)
    words = [word for name, value in given.items() for word in words_of(rows[name], value)]
    if choice.request.engine is not None:
        words += ["--engine", choice.request.engine]
    return " ".join(["autopar-search", *words])


# --------------------------------------------------------------------------------------------------
# Files: names of plans, the object of `--json`, the picture.


def slugs(asked: Sequence[Choice]) -> list[str]:
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
    groups: Sequence[Group],
    by: By,
    *,
    choices: Mapping[str, Sequence[str]],
    request: Mapping[str, object],
    plan_files: Mapping[int, str],
    complete: bool,
) -> dict[str, Any]:
    """Return the object of `--json`.

    choices, request : options as typed. plan_files : path of the plan file, by the `id` of the
    answer's choice.
    """
    from autopar.documents.plan import plain
    from autopar.exploration import (
        ChoiceEntry,
        ExplorationDocument,
        GroupEntry,
    )

    answers = [answer for group in groups for answer in (*group.ranked, *group.left)]

    def entry(answer: Answer, rank: int | None) -> ChoiceEntry:
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


def _plan_entry(answer: Answer) -> dict[str, Any]:
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
    folder: str, groups: Sequence[Group], formats: Sequence[str], aside: Aside | None = None
) -> list[Path]:
    """Write bars of tokens/s/GPU with 90 % intervals, one plot per group; return the files.

    aside : see `autopar.output`. Raises the errors of `save_figures`.
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


def first_commands(groups: Sequence[Group], plan_files: Mapping[int, str]) -> list[str]:
    """Return the command that explains the plan file of the best answer of each group."""
    first = [group.ranked[0] for group in groups if group.ranked]
    return [
        f"autopar-explain {shlex.quote(plan_files[id(answer.choice)])}"
        for answer in first
        if id(answer.choice) in plan_files
    ]

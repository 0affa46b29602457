"""Terminal report of an `Answer`, for every kind of plan: one screen or all details."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from autopar.command.console import Console, escape
from autopar.command.show import (
    make_table,
    print_heading,
    print_item,
    print_line,
    print_plain,
    wrapped,
)
from autopar.records import replace
from autopar.units import GIB, format_bytes, format_odds, format_seconds
from search.show.headline import (
    NEXT,
    SCREEN_HEIGHT,
    Headline,
    Rows,
    headline_of,
    layers_line,
    print_rows,
    rows_height,
    shortened,
    show_engines,
)

if TYPE_CHECKING:
    from autopar.answer import Answer, Asked, Gain, Price, Priced, StagePrice
    from autopar.run.plan import LayerStrategy, Plan, Prediction
    from search.planning.uniform.answer import Answer as Launches
    from search.questions.suggestions import Remedy

_LEAST_TABLE = 4
"""Lines of the smallest table: its heading, column names and one row."""
_PLAN_COLUMN = 48
"""Width of a plan in a table of alternatives on 80 columns."""
_STYLES = {"synthetic": "bold red", "estimated": "yellow", "exact": "yellow"}
_UNSEEN = 0.0005
"""Share of the step below which a term is not printed."""
_SMALL = 0.005
"""Share of the peak below which terms are merged into one row."""


def show_answer(console: Console, answer: Answer, *, verbose: bool = True, goal: str = "") -> None:
    """Print the best plan, the best plan of each engine, and the basis of the estimates.

    verbose : True to print also terms, stages, other degrees and the search space; else one screen.
    goal : sentence with the clusters among which this one was chosen.
    """
    used = _show_title(console, answer)
    first = _headlines(answer)
    for one in first:
        one.show(console)
    footer = _footer(answer, goal)
    # A blank line precedes each headline, the table and the footer.
    used += sum(1 + one.height(console) for one in first) + 2 + rows_height(console, footer)
    room = None if verbose else max(SCREEN_HEIGHT - used, 0)
    if answer.by_engine:
        lines = None if room is None else max(room, _LEAST_TABLE)
        show_engines(console, answer.by_engine, answer.tokens, room=lines)
    elif room is None or room >= _LEAST_TABLE:
        _show_alternatives(console, answer, room)
    console.print()
    print_rows(console, footer)
    for text in answer.unfinished:
        print_plain(console, text)
    if not verbose:
        return
    show_terms(console, answer.best)
    show_layers(console, answer.best)
    show_memory(console, answer.best.price)
    if answer.by_engine:
        _show_alternatives(console, answer)
    _show_space(console, answer)


def show_given(
    console: Console, answer: Answer, *, path: str | None = None, explained: bool = False
) -> None:
    """Print the time and memory of a given plan, and if it is legal and fits.

    path : file of the plan. explained : True to print also the terms of the peak of a uniform plan,
    or of all stages and layers of a per-layer plan.
    """
    if path is not None:
        # Not wrapped, so that the path can be copied.
        console.print(path, markup=False, soft_wrap=True)
    _show_title(console, answer)
    given, price = answer.best, answer.best.price
    kind = "launch" if given.layered is None else "plan"
    headline_of(given, kind, answer.gpu_hour_price).show(console)
    verdict = price.verdict
    if price.stages:
        verdict += f": out of memory {format_odds(price.oom_probability)}"
    if price.oom_risk is not None:
        verdict += f", {format_odds(price.oom_risk)} is asked for"
    print_line(console, verdict, style="bold")
    print_rows(console, [("rests on", text) for text in price.basis])
    for problem in price.problems:
        print_item(console, problem)
    show_terms(console, given)
    show_layers(console, given)
    show_memory(console, price)
    if explained and given.layered is None:
        show_peak(console, price.fullest)
    for heading, found in (("assumed", answer.assumed), ("notes", answer.notes)):
        if found:
            print_heading(console, heading)
        for text in found:
            print_item(console, text)
    if explained and given.layered is not None:
        show_categories(console, given.layered[1])


def _show_title(console: Console, answer: Answer) -> int:
    """Print the question and the inputs that were not measured; return the number of lines."""
    console.print(escape(answer.title), style="bold", soft_wrap=True)
    lines: list[tuple[str, str]] = []
    for kind, text in answer.warnings:
        joined = f"{lines[-1][0]}; {text}" if lines else text
        if kind == "exact" and lines and len(joined) <= console.width:
            lines[-1] = (joined, lines[-1][1])
        else:
            lines.append((text, _STYLES[kind]))
    for text, style in lines:
        print_plain(console, text, style=style)
    return 1 + sum(len(wrapped(text, console.width)) for text, _ in lines)


def _headlines(answer: Answer) -> list[Headline]:
    """Return the headline of the best plan, after that of the uniform plan if layers differ."""
    best, uniform, gain = answer.best, answer.uniform, layers_line(answer.by_engine)
    price = answer.gpu_hour_price
    if uniform is None:
        heading = "fastest uniform plan" if best.uniform else "fastest plan"
        found = headline_of(best, heading, price)
        return [replace(found, rows=[*found.rows, ("per layer", gain)]) if gain else found]
    if not gain:
        share = best.price.samples_per_s / uniform.price.samples_per_s - 1.0
        gain = f"{share * 100:.1f} % faster"
    found = headline_of(best, "", price)
    # Only the uniform plan, which is easier to describe, has all rows.
    rows = [row for row in found.rows if row[0] in ("step", "memory")]
    return [
        headline_of(uniform, "fastest uniform plan", price),
        replace(found, heading=f"layers may differ: {gain}", rows=rows),
    ]


def _footer(answer: Answer, goal: str) -> Rows:
    rows = [("rests on", text) for text in answer.best.price.basis]
    rows.append(("fastest of", answer.searched))
    # Other lines do not belong to an option.
    assumed = [text.partition(" (")[0] for text in answer.assumed if text.startswith("--")]
    if assumed:
        rows.append(("assumed", ", ".join(assumed)))
    if answer.notes:
        rows.append(("notes", f"{len(answer.notes)} on the inputs: --verbose"))
    if goal:
        rows.append(("goal", goal))
    return [*rows, ("next", NEXT)]


# --------------------------------------------------------------------------------------------------
# Sections: terms, layers, memory, alternatives, search space.


def terms_line(terms_s: Mapping[str, float]) -> str:
    """Return the terms of a step as percentages of it, largest first."""
    total = sum(terms_s.values())
    terms = sorted(terms_s.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name.replace('_', ' ')} {value / total * 100:.1f} %"
        for name, value in terms
        if value / total >= _UNSEEN
    )


def show_terms(console: Console, priced: Priced) -> None:
    """Print the terms of the step time, and the layers per stage if stages differ."""
    # A plan that cannot run has neither time nor terms.
    if priced.price.throughput is None or not priced.price.terms_s:
        return
    print_heading(console, "where the time goes")
    print_line(console, terms_line(priced.price.terms_s))
    if priced.unequal_stages:
        print_line(console, f"layers of stages: {priced.unequal_stages}")
    for note in priced.price.notes if priced.layered is not None else ():
        print_line(console, note)


_COMPUTE = ("forward", "backward", "recompute")
_PER_STEP = ("tail", "optimizer")


def show_layers(console: Console, priced: Priced) -> None:
    """Print a per-layer plan by stage and group of layers, with times per micro-batch."""
    if priced.layered is None:
        return
    plan, prediction = priced.layered
    print_heading(console, "plan")
    schedule = "GPipe" if plan.pipeline_type == "gpipe" else "1F1B"
    stages = _count(plan.num_stages, "stage")
    print_line(
        console,
        f"{_count(plan.world_size, 'GPU')} = {stages} of {plan.world_size // plan.num_stages}, "
        f"{schedule}, global batch {plan.global_batch} = "
        f"{_count(plan.num_microbatches, 'micro-batch')} of {_samples(plan)}",
    )
    vocab = plan.vocab
    kind = "vsp" if vocab.ulysses else "vtp"
    print_line(
        console,
        f"embedding and head: {kind}{vocab.tp}"
        + (f"-cp{vocab.cp}" if vocab.cp > 1 else "")
        + f"-dp{plan.world_size // max(plan.num_stages * vocab.tp * vocab.cp, 1)}"
        + ("-zero3" if vocab.zero3 else "")
        + f"; layers without zero3: {plan.default_dp_type}",
    )
    table = make_table("stage", "layers", "strategy", "compute", "other", "per step", left=3)
    timed = any(stage.runs for stage in prediction.stages)
    for stage in prediction.stages if timed else ():
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
            f"fwd {format_seconds(stage.forward_s)}, bwd {format_seconds(stage.backward_s)}{send}",
            *_split(stage.time_s, stage.tail_s),
            style="bold",
        )
    for index, first, count, strategy in () if timed else plan_runs(plan):
        label = strategy.label(plan.data_degree(first), plan.default_dp_type)
        table.add_row(str(index), _range(first, count), label, "", "", "")
    console.print(table)
    if timed:
        text = "compute and other (communication, vocabulary): one micro-batch"
        if len({*priced.price.stage_s}) > 1:
            slow = max(prediction.stages, key=lambda one: one.forward_s + one.backward_s)
            text += f"; stage {slow.stage} sets the pace"
        print_line(console, text, style="dim")


def _samples(plan: Plan) -> str:
    """Return the samples of a micro-batch, per data rank if all layers have one data degree."""
    whole = plan.global_batch / plan.num_microbatches
    degrees = {plan.data_degree(layer) for layer in range(len(plan.layers))}
    dp = degrees.pop() or 1
    if degrees or dp == 1:
        return _count(whole, "sample")
    return f"{_count(whole / dp, 'sample')} on each of {dp} data ranks"


def _split(time_s: Mapping[str, float], once_s: float) -> tuple[str, str, str]:
    """Return computation and other time of one micro-batch, and the time once per step."""
    compute = sum(time_s.get(key, 0.0) for key in _COMPUTE)
    rest = sum(v for key, v in time_s.items() if key not in (*_COMPUTE, *_PER_STEP))
    return format_seconds(compute), format_seconds(rest), format_seconds(once_s)


def plan_runs(plan: Plan) -> Iterator[tuple[int, int, int, LayerStrategy]]:
    """Yield (stage, first layer, number of layers, strategy) of each group of equal layers."""
    stages = plan.stage_of_layer()
    first = 0
    for i in range(1, len(plan.layers) + 1):
        same = i < len(plan.layers) and (
            plan.layers[i] == plan.layers[first] and stages[i : i + 1] == stages[first : first + 1]
        )
        if not same:
            yield stages[first] if first < len(stages) else -1, first, i - first, plan.layers[first]
            first = i


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _count(number: float, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}{plural}"


def show_memory(console: Console, price: Price, note: str = "") -> None:
    """Print the memory of the first, the peak and the last stage against the budget.

    note : remark on the measured runs that the interval is based on.
    """
    if not price.stages:
        return
    print_heading(console, "memory of a GPU")
    exact = all(low == high for low, high in (one.reserved_bytes for one in price.stages))
    reserved = "reserved" if exact else "9 of 10 reserve"
    table = make_table("stage", "after a step", "peak", reserved, "out of memory", spaced=True)
    for one in _shown(price):
        low, high = map(format_bytes, one.reserved_bytes)
        table.add_row(
            str(one.stage),
            format_bytes(one.steady_bytes),
            format_bytes(one.peak_bytes),
            high if exact else f"{low} to {high}",
            format_odds(one.oom_probability),
            style="bold red" if exact and one.reserved_bytes[1] > one.budget_bytes else None,
        )
    console.print(table)
    few = ", ".join(price.few_runs)
    wide = f"wider than most, as few measured runs have {few}" if few else ""
    budget = f"of {format_bytes(price.fullest.budget_bytes)}"
    budget += f", {price.reserve_bytes / GIB:.3g} GiB of it for {price.reserve_of}"
    print_line(console, "; ".join(filter(None, (budget, note, wide))), style="dim")
    if price.host_bytes:
        there = price.host_room_bytes
        has = "" if there is None else f", which has {format_bytes(there)} for each"
        line = f"{format_bytes(price.host_bytes)} more of each GPU lie on the host{has}"
        print_line(console, line, style="dim")


def _shown(price: Price) -> list[StagePrice]:
    """Return the first, the peak and the last stage, each once."""
    found = {one.stage: one for one in (price.stages[0], price.fullest, price.stages[-1])}
    return [found[stage] for stage in sorted(found)]


def show_peak(console: Console, fullest: StagePrice, worded: Callable[[str], str] = str) -> None:
    """Print the memory terms at the peak of a stage.

    worded : function that returns a setting in the spelling of an engine.
    """
    print_heading(console, f"peak of stage {fullest.stage}")
    table = make_table("term", "size", "changed by", words_last=True, spaced=True)
    small = 0.0
    for name, num_bytes, switch in sorted(fullest.terms, key=lambda term: -abs(term[1])):
        if abs(num_bytes) < _SMALL * fullest.peak_bytes:
            small += num_bytes
        else:
            table.add_row(escape(name), format_bytes(num_bytes), escape(worded(switch)))
    if small:
        table.add_row("others", format_bytes(small), "")
    console.print(table)


def _show_alternatives(console: Console, answer: Answer, room: int | None = None) -> None:
    """Print plans of other degrees, without empty columns.

    room : maximum number of lines, in which plans are shortened; None means no limit.
    """
    best, others = answer.best, answer.others
    if not others:
        return
    print_heading(console, "other degrees" + (f" of {best.title}" if best.title else ""))
    likely = any(one.probability_faster is not None for one in others)
    counted = any(one.peak_bytes is not None for one in others)
    columns = ["slower", *["faster in"] * likely, *["peak"] * counted, "plan"]
    table = make_table(*columns, words_last=True)
    # Heading and column names take three lines.
    for one in others[: None if room is None else max(room - 3, 1)]:
        odds, peak = one.probability_faster, one.peak_bytes
        table.add_row(
            f"{(best.price.samples_per_s / one.samples_per_s - 1.0) * 100:.2f} %",
            *["" if odds is None else format_odds(odds)] * likely,
            *["" if peak is None else format_bytes(peak)] * counted,
            escape(one.words if room is None else shortened(one.words, _PLAN_COLUMN)),
        )
    console.print(table)
    if room is None and likely:
        print_line(console, "faster in: odds of being the faster one all the same", style="dim")


def _show_space(console: Console, answer: Answer) -> None:
    """Print the search space, options not searched, assumptions, notes and inputs."""
    print_heading(console, "what it is the fastest of")
    print_line(console, answer.space)
    for text in answer.not_searched:
        print_item(console, f"left out: {text}")
    for text in answer.assumed:
        print_item(console, f"assumed: {text}")
    for text in answer.notes:
        print_item(console, f"note: {text}")
    for text in answer.inputs:
        # Not wrapped, so that paths can be copied.
        console.print(f"  - input: {text}", markup=False, soft_wrap=True)
    print_line(console, answer.effort, style="dim")


def show_categories(console: Console, prediction: Prediction) -> None:
    """Print the time and memory of every stage and group of layers by category."""
    for stage in prediction.stages:
        print_heading(console, f"stage {stage.stage}")
        _print(console, "  one micro-batch: " + _seconds(stage.time_s))
        if stage.send_s:
            _print(console, f"  transfer to the next stage: {format_seconds(stage.send_s)}")
        _print(console, f"  once per step, not hidden: {format_seconds(stage.tail_s)}")
        flight = f"{stage.in_flight} micro-batch{'es' if stage.in_flight != 1 else ''} in flight"
        _print(console, f"  memory, {flight}: " + _gibibytes(stage.memory_bytes))
        for run in stage.runs:
            last = run.first_layer + run.num_layers - 1
            which = f"layers {run.first_layer}-{last}" if run.num_layers > 1 else f"layer {last}"
            _print(console, f"  {which} {run.label}")
            _print(console, "      time: " + _seconds(run.time_s))
            _print(console, "      memory: " + _gibibytes(run.memory_bytes))
    if prediction.widest_cell is not None:
        cell = prediction.widest_cell
        print_heading(console, "what to measure again")
        _print(
            console,
            f"  {cell.name}: {cell.share * 100:.0f} % of what the spread of computation adds to "
            "the step time's variance",
        )


def _seconds(values: Mapping[str, float]) -> str:
    return _sorted(values, format_seconds)


def _gibibytes(values: Mapping[str, float]) -> str:
    return _sorted(values, lambda value: f"{value / GIB:.2f} GiB")


def _sorted(values: Mapping[str, float], text: Callable[[float], str]) -> str:
    """Return the nonzero categories in one line, largest first."""
    items = sorted(values.items(), key=lambda item: -item[1])
    named = (f"{name.replace('_', ' ')} {text(value)}" for name, value in items if value)
    return ", ".join(named) or "nothing"


def _print(console: Console, text: str) -> None:
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    console.print(
        textwrap.fill(text, console.width, subsequent_indent=indent, break_on_hyphens=False),
        markup=False,
    )


# --------------------------------------------------------------------------------------------------
# Comparisons with other plans.


_SHOWN_TERMS = 4
"""Number of printed terms in which two plans differ most."""


def show_explained(
    console: Console,
    answer: Answer,
    others: Sequence[Asked],
    fastest: Asked,
    gains: Sequence[Gain],
    *,
    best: Priced | None = None,
    path: str | None = None,
) -> None:
    """Print a given plan in full, its comparison with others, and gains of more resources.

    others : plans that the user asked for, printed first. best : plan that they are compared with;
    None means the given plan.
    """
    for asked in others:
        what = "this one" if best is None else "the best plan"
        show_against(console, asked, best or answer.best, what)
    if others:
        console.print()
    show_given(console, answer, path=path, explained=True)
    show_against(console, fastest, answer.best)
    show_more(console, gains)


def show_against(console: Console, asked: Asked, one: Priced, what: str = "this one") -> None:
    """Print the comparison of another plan with `one`, and the terms that differ most.

    what : short name of `one`.
    """
    other = asked.plan
    print_heading(console, asked.heading)
    if other is None:
        print_line(console, asked.reason)
        return
    if other.key == one.key:
        print_line(console, f"is {what}")
        return
    print_line(console, other.words, style="bold")
    rate = other.price.samples_per_s
    share = ""
    # A plan that cannot run has no throughput to compare with.
    if one.price.samples_per_s > 0:
        share = f", {(rate / one.price.samples_per_s - 1.0) * 100:+.2f} % against {what}"
    peak = format_bytes(other.price.fullest.peak_bytes)
    print_line(console, f"{rate:,.5g} samples/s{share}, peak {peak}")
    terms = other.price.terms_against(one.price)
    differ = sorted(terms.items(), key=lambda item: -abs(item[1]))[:_SHOWN_TERMS]
    words = [
        f"{name.replace('_', ' ')} {value * 1e3:+.3g} ms"
        for name, value in differ
        if abs(value) >= 1e-6
    ]
    rest = sum(terms.values()) - sum(value for _, value in differ)
    if abs(rest) >= 1e-6:
        words.append(f"others {rest * 1e3:+.3g} ms")
    if words and one.price.terms_s:
        print_line(console, f"of a sequence: {', '.join(words)}")


def show_more(console: Console, gains: Sequence[Gain]) -> None:
    """Print the gains of more memory or bandwidth for the fastest plan."""
    if not gains:
        return
    print_heading(console, "what more would bring")
    for gain in gains:
        same = "the same plan" if gain.same_plan else "with another plan"
        share = f"{gain.gain * 100:+.3f} % for the fastest plan"
        print_line(console, f"{gain.name}: {share}, {same}")
    if len(gains) > 1:
        best = max(gains, key=lambda one: one.gain)
        helps = f"{best.name} helps most"
        none = f"none of these brings {_WORTH * 100:g} %: computation binds"
        print_line(console, helps if best.gain >= _WORTH else none)


_WORTH = 1e-3
"""Smallest gain, as a share of throughput, at which a resource is called a bottleneck."""


# --------------------------------------------------------------------------------------------------
# Infeasible requests.


def show_infeasible(console: Console, found: Launches, ways: Sequence[Remedy]) -> None:
    """Print the reason of each engine and the suggestions that make a plan fit, on one screen.

    ways : suggestions, smallest change of the training first.
    """
    _, *reasons = infeasible_lines(found)
    for reason in reasons:
        print_item(console, reason)
    if not ways:
        print_heading(console, "no single change of the training or of the cluster makes it fit")
        return
    print_heading(console, "what would fit, what changes least first")
    hosts = any(one.host_bytes > 0 for one in ways)
    table = make_table(
        "with", "trainer", "tokens/s/GPU", "GiB of a GPU", *["and of its host"] * hosts, left=2
    )
    for one in ways:
        assessment = one.solution.assessment
        host = f"{one.host_bytes / GIB:.2f}" if one.host_bytes > 0 else ""
        table.add_row(
            escape(one.words),
            one.engine.name,
            f"{assessment.tokens_per_s or 0.0:,.0f}",
            f"{assessment.fullest.peak_bytes / GIB:.2f}",
            *[host] * hosts,
        )
    console.print(table)


def infeasible_lines(found: Launches) -> tuple[str, ...]:
    """Return a line that no plan fits, and one line with the reason of each engine."""
    reasons: dict[str, str] = {line.engine: line.reason for line in found.lines}
    reasons = reasons or {one.engine.name: one.reason for one in found.engines}
    what = "launch or plan" if found.lines else "launch"
    return (
        f"no {what} of {found.question.title} {_outcome(found)}",
        *(f"{engine}: {reason}" for engine, reason in reasons.items()),
    )


def _outcome(found: Launches) -> str:
    in_time = all(one.solved is None or one.solved.complete for one in found.engines)
    return "fits or is legal" if in_time else "was found in time"


def remedy_line(remedy: Remedy) -> str:
    """Return a suggestion with its throughput and host memory in one sentence."""
    rate = remedy.solution.assessment.tokens_per_s or 0.0
    host = f", {format_bytes(remedy.host_bytes)} of each GPU on the host" * (remedy.host_bytes > 0)
    return f"fits with {remedy.words}: {rate:,.0f} tokens/s per GPU, {remedy.engine.name}{host}"

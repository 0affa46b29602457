"""Terminal report of an `Answer` for uniform and per-layer plans: one screen or all details."""

from __future__ import annotations

import math
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
from autopar.units import GIB, format_bytes, format_probability, format_seconds
from search.show.summary import (
    SCREEN_HEIGHT,
    Headline,
    Rows,
    footer_lines,
    headline_of,
    in_table,
    near_miss,
    print_footer,
    row_lines,
    shortened,
    show_engines,
    uniform_gain,
)
from search.show.terms import FEATURE_NAMES, memory_name, time_name

if TYPE_CHECKING:
    from pathlib import Path

    from autopar.answer import Answer, EngineBest, Gain, Price, Priced, RequestedPlan, StagePrice
    from autopar.run.plan import LayerStrategy, Plan, Prediction
    from search.planning.uniform.answer import UniformResult as Launches
    from search.questions.suggestions import Suggestion

_LEAST_TABLE = 4
"""Lines of the smallest table: its heading, column names and one row."""
_PLAN_COLUMN = 48
"""Width of a plan in a table of alternatives on 80 columns."""
_STYLES = {"synthetic": "bold red", "estimated": "yellow", "exact": "yellow"}
_UNSEEN = 0.0005
"""Share of the step below which a term is not printed."""
_SMALL = 0.005
"""Share of the peak below which terms are merged into one row."""


def show_answer(
    console: Console,
    answer: Answer,
    *,
    verbose: bool = True,
    part: str = "",
    path: Path | None = None,
) -> None:
    """Print the best plan, the best plan of each engine, and the basis of the estimates.

    verbose : True to print also terms, stages, other degrees and the search space.
    part : sentence on the chosen part of the cluster; empty if all of it was given.
    path : plan file.
    """
    used = _show_title(console, answer)
    if part:
        print_plain(console, part)
        used += len(wrapped(part, console.width))
    first = _headlines(answer, whole=verbose)
    for one in first:
        one.show(console)
    footer = _footer(answer, path, verbose=verbose)
    # A blank line precedes each headline, the table and the footer; the last line is the path.
    used += sum(1 + len(one.lines(console.width)) for one in first) + 2
    used += len(footer_lines(footer, console.width))
    # A path that is too long for a line is on stderr alone if the screen is full.
    told = path is not None and (
        verbose
        or used + 1 + _LEAST_TABLE <= SCREEN_HEIGHT
        or len(_path_line(path)) <= console.width
    )
    room = None if verbose else max(SCREEN_HEIGHT - used - told, 0)
    if answer.by_engine:
        lines = None if room is None else max(room, _LEAST_TABLE)
        show_engines(console, answer.by_engine, answer.tokens, room=lines)
    elif room is None or room >= _LEAST_TABLE:
        _show_alternatives(console, answer, room)
    console.print()
    print_footer(console, footer)
    if path is not None and told:
        _show_path(console, path)
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


def _path_line(path: Path) -> str:
    return f"PLAN is {path}"


def _show_path(console: Console, path: Path) -> None:
    """Print the path of the plan file in one line, shortened if it exceeds the width."""
    line = _path_line(path)
    if len(line) > console.width:
        end = "...json  (full path on stderr)"
        line = line[: console.width - len(end)] + end
    console.print(escape(line), soft_wrap=True)


def show_given(
    console: Console, answer: Answer, *, path: str | None = None, explained: bool = False
) -> None:
    """Print verdict, time and memory of a given plan.

    path : plan file.
    explained : True to print also the peak memory by term (uniform plan), or time and memory of all
        stages and layers by category (per-layer plan).
    """
    if path is not None:
        # Not wrapped, so that the path can be copied.
        console.print(path, markup=False, soft_wrap=True)
    _show_title(console, answer)
    given, price = answer.best, answer.best.price
    headline_of(given, "Plan", answer.gpu_hour_price).show(console)
    verdict = price.verdict
    if price.oom_risk is not None:
        verdict += f"; allowed OOM probability: {format_probability(price.oom_risk)}"
    console.print()
    rows = [("Verdict", verdict), *(("Basis", text) for text in price.basis)]
    print_footer(console, rows)
    for problem in price.problems:
        print_item(console, problem)
    show_terms(console, given)
    show_layers(console, given)
    show_memory(console, price)
    if explained and given.layered is None:
        show_peak(console, price.fullest)
    for heading, found in (("Defaults", answer.assumed), ("Notes", answer.notes)):
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


def _headlines(answer: Answer, *, whole: bool) -> list[Headline]:
    """Return the summaries of the best plan and, if it is per-layer, of the best uniform plan.

    whole : False to include only step time and memory of the uniform plan.
    """
    best, uniform = answer.best, answer.uniform
    if best.layered is not None and answer.by_engine:
        best = replace(best, title=answer.by_engine[0].engine)
    price = answer.gpu_hour_price
    if uniform is None:
        return [headline_of(best, "Fastest plan" if best.fastest else "Chosen plan", price)]
    gain = uniform_gain(answer.by_engine, best, uniform)
    return [
        headline_of(best, "Fastest plan", price),
        headline_of(uniform, f"Fastest uniform plan ({gain})", price, whole=whole),
    ]


def _defaults_row(assumed: Sequence[str]) -> Rows:
    """Return the row of options that were not given, with their values; empty if all were."""
    # Other lines do not belong to an option.
    options = [text.partition(" (")[0] for text in assumed if text.startswith("--")]
    return [("Defaults", ", ".join(options))] if options else []


def _footer(answer: Answer, path: Path | None, *, verbose: bool) -> Rows:
    rows = [("Basis", text) for text in answer.best.price.basis]
    rows.append(("Optimality", answer.searched))
    rows += _defaults_row(answer.assumed)
    if answer.notes and not verbose:
        rows.append(("Notes", f"{len(answer.notes)} about the inputs (--verbose)"))
    commands = ["autopar export PLAN", "autopar explain PLAN"] if path is not None else []
    commands += ["--verbose"] * (not verbose)
    if commands:
        rows.append(("Next", " | ".join(commands)))
    return rows


# --------------------------------------------------------------------------------------------------
# Sections: terms, layers, memory, alternatives, search space.


def terms_line(terms_s: Mapping[str, float]) -> str:
    """Return the terms of a step as percentages of it, largest first."""
    total = sum(terms_s.values())
    terms = sorted(terms_s.items(), key=lambda item: -item[1])
    return ", ".join(
        f"{time_name(name)} {value / total * 100:.1f} %"
        for name, value in terms
        if value / total >= _UNSEEN
    )


def show_terms(console: Console, priced: Priced) -> None:
    """Print the terms of the step time, and the layers per stage if stages differ."""
    # A plan that cannot run has neither time nor terms.
    if priced.price.throughput is None or not priced.price.terms_s:
        return
    print_heading(console, "Step time by term")
    print_line(console, terms_line(priced.price.terms_s))
    if priced.unequal_stages:
        print_line(console, f"Layers per stage: {priced.unequal_stages}")
    for note in priced.price.notes if priced.layered is not None else ():
        print_line(console, note)


_COMPUTE = ("forward", "backward", "recompute")
_PER_STEP = ("tail", "optimizer")


def show_layers(console: Console, priced: Priced) -> None:
    """Print a per-layer plan by stage and group of layers, with times per micro-batch."""
    if priced.layered is None:
        return
    plan, prediction = priced.layered
    print_heading(console, "Layers by stage")
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
    columns = ("stage", "layers", "strategy", "compute", "other", "per step")
    table = make_table(*columns, left=3, ruled=False)
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
        text = "compute, other (communication, vocabulary): time of one micro-batch"
        if len({*priced.price.stage_s}) > 1:
            slow = max(prediction.stages, key=lambda one: one.forward_s + one.backward_s)
            text += f"; stage {slow.stage} is the slowest"
        print_line(console, text, style="dim")


def _samples(plan: Plan) -> str:
    """Return the size of a micro-batch in words, per data-parallel rank if layers agree on it."""
    whole = plan.global_batch / plan.num_microbatches
    degrees = {plan.data_degree(layer) for layer in range(len(plan.layers))}
    dp = degrees.pop() or 1
    if degrees or dp == 1:
        return _count(whole, "sample")
    return f"{_count(whole / dp, 'sample')} on each of {dp} data ranks"


def _split(time_s: Mapping[str, float], once_s: float) -> tuple[str, str, str]:
    """Return three formatted times: compute and others per micro-batch, and once per step."""
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


def show_memory(console: Console, price: Price) -> None:
    """Print the memory of the first, the peak and the last stage against the budget."""
    if not price.stages:
        return
    print_heading(console, "Memory per GPU")
    exact = all(low == high for low, high in (one.reserved_bytes for one in price.stages))
    reserved = "reserved" if exact else "reserved (90 %)"
    columns = ("stage", "steady state", "peak allocated", reserved, "OOM probability")
    table = make_table(*columns, ruled=False)
    for one in _shown(price):
        low, high = one.reserved_bytes
        span = f"{low / GIB:.2f} to {format_bytes(high)}"
        table.add_row(
            str(one.stage),
            format_bytes(one.steady_bytes),
            format_bytes(one.peak_bytes),
            format_bytes(high) if exact else span,
            format_probability(one.oom_probability),
            style="bold red" if exact and one.reserved_bytes[1] > one.budget_bytes else None,
        )
    console.print(table)
    few = ", ".join(FEATURE_NAMES.get(one, one) for one in price.few_runs)
    wide = f"interval wider than most: few measured runs have {few}" if few else ""
    budget = f"of {format_bytes(price.fullest.budget_bytes)}"
    budget += f", {price.reserve_bytes / GIB:.3g} GiB of it for {price.reserve_of}"
    print_line(console, "; ".join(filter(None, (budget, wide))), style="dim")
    if price.host_bytes:
        there = price.host_capacity_bytes
        room = "" if there is None else f" of {format_bytes(there)}"
        line = f"Host memory: {format_bytes(price.host_bytes)}{room} per GPU"
        print_line(console, line, style="dim")


def _shown(price: Price) -> list[StagePrice]:
    """Return the first, the peak and the last stage, each once."""
    found = {one.stage: one for one in (price.stages[0], price.fullest, price.stages[-1])}
    return [found[stage] for stage in sorted(found)]


def show_peak(console: Console, fullest: StagePrice) -> None:
    """Print the memory terms at the peak of a stage."""
    print_heading(console, f"Peak memory of stage {fullest.stage} by term")
    table = make_table("term", "size", "changed by", words_last=True, spaced=True, ruled=False)
    small = 0.0
    for name, num_bytes, switch in sorted(fullest.terms, key=lambda term: -abs(term[1])):
        if abs(num_bytes) < _SMALL * fullest.peak_bytes:
            small += num_bytes
        else:
            table.add_row(escape(memory_name(name)), format_bytes(num_bytes), escape(switch))
    if small:
        table.add_row("others", format_bytes(small), "")
    console.print(table)


def _show_alternatives(console: Console, answer: Answer, room: int | None = None) -> None:
    """Print a table of plans with other degrees.

    room : maximum number of lines; plans are then shortened to the column. None: no limit.
    """
    best, others = answer.best, answer.others
    if not others:
        return
    print_heading(console, "Other degrees" + (f" of {best.title}" if best.title else ""))
    likely = any(one.probability_faster is not None for one in others)
    counted = any(one.peak_bytes is not None for one in others)
    columns = ["slower", *["P(faster)"] * likely, *["peak"] * counted, "plan"]
    table = make_table(*columns, words_last=True, ruled=False)
    # Heading and column names take two lines.
    for one in others[: None if room is None else max(room - 2, 1)]:
        odds, peak = one.probability_faster, one.peak_bytes
        table.add_row(
            f"{(best.price.samples_per_s / one.samples_per_s - 1.0) * 100:.2f} %",
            *["" if odds is None else format_probability(odds)] * likely,
            *["" if peak is None else format_bytes(peak)] * counted,
            escape(one.words if room is None else shortened(in_table(one.words), _PLAN_COLUMN)),
        )
    console.print(table)
    if room is None and likely:
        text = "P(faster): probability that the plan is faster than the fastest one"
        print_line(console, text, style="dim")


def _show_space(console: Console, answer: Answer) -> None:
    """Print the search space, options not searched, assumptions, notes and inputs."""
    print_heading(console, "Search space")
    print_line(console, answer.space)
    for text in answer.not_searched:
        print_item(console, f"not searched: {text}")
    for text in answer.assumed:
        print_item(console, f"default: {text}")
    for text in answer.notes:
        print_item(console, f"note: {text}")
    for text in answer.inputs:
        # Not wrapped, so that paths can be copied.
        console.print(f"  - input: {text}", markup=False, soft_wrap=True)
    print_line(console, answer.effort, style="dim")


def show_categories(console: Console, prediction: Prediction) -> None:
    """Print the time and memory of every stage and group of layers by category."""
    for stage in prediction.stages:
        print_heading(console, f"Stage {stage.stage}")
        _print(console, "  per micro-batch: " + _seconds(stage.time_s))
        if stage.send_s:
            _print(console, f"  PP comm to the next stage: {format_seconds(stage.send_s)}")
        _print(console, f"  per step, exposed: {format_seconds(stage.tail_s)}")
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
        print_heading(console, "Largest source of uncertainty")
        _print(
            console,
            f"  {cell.name}: {cell.share * 100:.0f} % of the variance that the spread of "
            "computation adds to the step time; measure it again",
        )


def _seconds(values: Mapping[str, float]) -> str:
    seen = {time_name(name): value for name, value in values.items() if value >= _LEAST_S}
    return _sorted(seen, format_seconds)


def _gibibytes(values: Mapping[str, float]) -> str:
    named = {memory_name(name): value for name, value in values.items()}
    return _sorted(named, lambda value: f"{value / GIB:.2f} GiB")


def _sorted(values: Mapping[str, float], text: Callable[[float], str]) -> str:
    """Return the nonzero categories in one line, largest first."""
    items = sorted(values.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {text(value)}" for name, value in items if value) or "none"


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
_OPEN = 0.05
"""Probability below which a plan counts as slower than another one."""


def show_explained(
    console: Console,
    answer: Answer,
    others: Sequence[RequestedPlan],
    fastest: RequestedPlan,
    gains: Sequence[Gain],
    *,
    best: Priced | None = None,
    path: str | None = None,
    verbose: bool = True,
) -> None:
    """Print the report of `autopar explain`: requested plans, then the given plan with details.

    others : plans of `--why-not` rules, compared with `best` (None: the given plan).
    fastest : fastest plan, compared with the given one.
    gains : gains of more resources.
    verbose : False to omit the given plan if there are `others`.
    """
    same = best is None or best.key == answer.best.key
    if others:
        _show_title(console, answer)
        for asked in others:
            show_why_not(console, asked, best or answer.best, "this plan" if same else "fastest")
        if not verbose:
            options = [f"autopar search ... {one.options}" for one in others[:1] if one.options]
            console.print()
            print_footer(console, [("Next", " | ".join([*options, "--verbose (this plan)"]))])
            return
        console.print()
    show_given(console, answer, path=path, explained=True)
    show_why_not(console, fastest, answer.best)
    show_more(console, gains)


def show_why_not(
    console: Console, asked: RequestedPlan, one: Priced, name: str = "this plan"
) -> None:
    """Print the comparison of another plan with `one`, and the terms that differ most.

    name : short name of `one`.
    """
    other, rule = asked.plan, asked.rule
    freed = f" (without {asked.freed})" if asked.freed else ""
    heading = f"Why not {rule}{freed}" if rule else "Fastest plan"
    if other is None:
        print_heading(console, f"{heading}: no plan")
        print_line(console, asked.reason)
        return
    if other.key == one.key:
        print_heading(console, f"{heading}: it is {name if name == 'this plan' else 'chosen'}")
        return
    rates = (one.price.samples_per_s, other.price.samples_per_s)
    # A plan that cannot run has no throughput to compare with.
    share = rates[1] / rates[0] - 1.0 if rates[0] > 0 else None
    if share is not None:
        heading += f": {abs(share) * 100:.2f} % {'slower' if share < 0 else 'faster'}"
    print_heading(console, heading)
    names = (name, rule or "fastest")
    _show_pair(console, names, (one, other), share)
    _show_term_differences(console, names, one.price, other.price)
    if asked.probability_faster is not None:
        _show_probability(console, names[1], asked.probability_faster)


def _show_pair(
    console: Console, names: tuple[str, str], plans: tuple[Priced, Priced], share: float | None
) -> None:
    """Print two plans, and their throughput and memory side by side."""
    width = max(len(name) for name in names) + 2
    for name, plan in zip(names, plans, strict=True):
        for line in row_lines([(name, plan.words)], console.width, width, 2):
            console.print(escape(line), soft_wrap=True)
    console.print()
    table = make_table("", *names, "difference", ruled=False)
    one, other = (plan.price for plan in plans)
    rates = [f"{price.samples_per_s:,.5g}" for price in (one, other)]
    table.add_row("  samples/s", *rates, "" if share is None else f"{share * 100:+.2f} %")
    # A plan that cannot be estimated has no memory either.
    if one.stages and other.stages:
        peaks = [price.fullest.peak_bytes for price in (one, other)]
        more = peaks[1] - peaks[0]
        table.add_row(
            f"  peak memory, of {format_bytes(other.fullest.budget_bytes)}",
            *map(format_bytes, peaks),
            f"{'-' if more < 0 else '+'}{format_bytes(abs(more))}",
        )
    console.print(table)


def _show_term_differences(
    console: Console, names: tuple[str, str], one: Price, other: Price
) -> None:
    """Print the terms of time per sequence in which two plans differ most."""
    terms = other.term_differences(one)
    differ = sorted(terms.items(), key=lambda item: -abs(item[1]))[:_SHOWN_TERMS]
    rows = [(time_name(name), value) for name, value in differ if abs(value) >= _LEAST_S]
    if not rows or not one.terms_s:
        return
    rest = sum(terms.values()) - sum(value for _, value in differ)
    if abs(rest) >= _LEAST_S:
        rows.append(("other terms", rest))
    rows.append(("total", sum(terms.values())))
    print_heading(console, f"Difference per sequence, {names[1]} minus {names[0]}")
    width = max(len(name) for name, _ in rows)
    figures = [f"{value * 1e3:+,.2f} ms" for _, value in rows]
    right = max(map(len, figures))
    for (name, _), figure in zip(rows, figures, strict=True):
        console.print(escape(f"  {name:<{width}}   {figure:>{right}}"), soft_wrap=True)


_LEAST_S = 1e-6
"""Seconds below which a category or a difference per sequence is not printed."""


def _show_probability(console: Console, name: str, probability: float) -> None:
    text = f"{name} is faster with a probability of {format_probability(probability)}"
    if _OPEN < probability < 1.0 - _OPEN:
        text = f"The spread of published runs leaves the order of both plans open: {text}"
    console.print()
    print_plain(console, text)


def show_more(console: Console, gains: Sequence[Gain]) -> None:
    """Print the gains of more memory or bandwidth for the fastest plan."""
    if not gains:
        return
    print_heading(console, "Effect of more resources on the fastest plan")
    for gain in gains:
        same = "same plan" if gain.same_plan else "another plan"
        print_line(console, f"{gain.name}: {gain.gain * 100:+.3f} % throughput, {same}")
    if len(gains) > 1:
        best = max(gains, key=lambda one: one.gain)
        helps = f"Largest effect: {best.name}"
        none = f"None reaches {_WORTH * 100:g} %: computation limits the throughput"
        print_line(console, helps if best.gain >= _WORTH else none)


_WORTH = 1e-3
"""Smallest gain, as a share of throughput, at which a resource is called a bottleneck."""


# --------------------------------------------------------------------------------------------------
# Infeasible requests.


def show_infeasible(
    console: Console, found: Launches, ways: Sequence[Suggestion], *, verbose: bool = False
) -> None:
    """Print the plan with the least memory of each engine, and options that make a plan fit.

    ways : suggestions, the smallest change first.
    verbose : True to print also the full reason of each engine, and the memory of the smallest plan
        by term.
    """
    lines = _smallest_first(found)
    _show_smallest(console, lines)
    if ways:
        _show_ways(console, ways)
    else:
        print_heading(console, "No single option makes a plan fit")
    memory = f"Memory of each GPU: {format_bytes(found.question.card.memory_bytes)}."
    if any("--lora " in one.words for one in ways):
        memory += " LoRA trains adapters, not all weights."
    memory += near_miss(found)
    console.print()
    print_plain(console, memory)
    options = "add one of these options" if ways else "use more or larger GPUs"
    more = "" if verbose else " | --verbose (all reasons, memory by term)"
    defaults = _defaults_row(found.question.assumed)
    print_footer(console, [*defaults, ("Next", options + more)])
    if verbose:
        print_heading(console, "Reasons per engine")
        for line in lines:
            print_item(console, f"{line.engine}: {line.reason}")
        _show_smallest_memory(console, found)


def _smallest_first(found: Launches) -> list[EngineBest]:
    """Return the engines sorted by missing memory; those without counted memory are last."""
    from search.planning.uniform.summary import best_of

    lines = found.lines or tuple(best_of(found.question, one) for one in found.engines)
    return sorted(
        lines, key=lambda one: math.inf if one.missing_bytes is None else one.missing_bytes
    )


def _show_smallest(console: Console, lines: Sequence[EngineBest]) -> None:
    """Print the missing memory of each engine, and the reasons of those without a plan."""
    counted = any(line.missing_bytes is not None for line in lines)
    print_heading(console, "Smallest plan per engine" if counted else "Reason per engine")
    if not counted:
        for line in lines:
            print_item(console, f"{line.engine}: {line.reason}")
        return
    table = make_table("engine", "needs more", "smallest plan", words_last=True, ruled=False)
    names = max(len("engine"), *(len(line.engine) for line in lines))
    # Columns are separated by two blanks.
    width = console.width - names - len("1,000.00 GiB") - 4

    def short_reason(line: EngineBest) -> str:
        return line.reason if len(line.reason) <= width else ""

    for line in lines:
        missing = "-" if line.missing_bytes is None else format_bytes(line.missing_bytes)
        words = in_table(line.smallest) or short_reason(line)
        if words:
            table.add_row(line.engine, missing, escape(shortened(words, width)))
    console.print(table)
    # A reason is a sentence, which a column would cut.
    for line in lines:
        if not line.smallest and line.reason and not short_reason(line):
            print_item(console, f"{line.engine}: {line.reason}")


def _show_ways(console: Console, ways: Sequence[Suggestion]) -> None:
    """Print the options that make a plan fit, with the fastest plan under each."""
    print_heading(console, "Configurations that fit, smallest change first")
    hosts = any(one.host_bytes > 0 for one in ways)
    columns = ["add this option", "engine", "tokens/s/GPU", "GPU GiB", *["host GiB/GPU"] * hosts]
    table = make_table(*columns, left=2, ruled=False)
    for one in ways:
        assessment = one.solution.assessment
        host = f"{one.host_bytes / GIB:.2f}" if one.host_bytes > 0 else "-"
        table.add_row(
            escape(one.words),
            one.engine.name,
            f"{assessment.tokens_per_s or 0.0:,.0f}",
            f"{assessment.fullest.peak_bytes / GIB:.2f}",
            *[host] * hosts,
        )
    console.print(table)


def _show_smallest_memory(console: Console, found: Launches) -> None:
    """Print the memory by term of the plan with the least missing memory."""
    from search.planning.uniform.summary import price_of

    counted = [
        (one.solved.shortage.missing_bytes, one)
        for one in found.engines
        if one.solved is not None
        and one.solved.smallest is not None
        and one.solved.shortage is not None
        and not one.solved.shortage.host
    ]
    if not counted:
        return
    _, one = min(counted, key=lambda pair: pair[0])
    assert one.solved is not None, "it was counted"
    assert one.solved.smallest is not None, "it was counted"
    price = price_of(one.solved.smallest.assessment, one.target)
    print_heading(console, f"Smallest plan of {one.engine.title}")
    show_memory(console, price)
    show_peak(console, price.fullest)


def infeasible_lines(found: Launches) -> tuple[str, ...]:
    """Return the outcome of an infeasible search, then one line per engine with its reason."""
    lines = _smallest_first(found)
    return (
        f"{_outcome(found, lines)}: {found.question.title}",
        *(f"{line.engine}: {line.reason}" for line in lines),
    )


def _outcome(found: Launches, lines: Sequence[EngineBest]) -> str:
    if any(one.solved is not None and not one.solved.complete for one in found.engines):
        return "no plan was found within the time limit"
    counted = any(line.missing_bytes is not None for line in lines)
    return "no plan fits" if counted else "no plan fits or is legal"


def remedy_line(remedy: Suggestion) -> str:
    """Return a suggestion with its throughput and host memory in one sentence."""
    rate = remedy.solution.assessment.tokens_per_s or 0.0
    host = f", {format_bytes(remedy.host_bytes)} of host memory per GPU" * (remedy.host_bytes > 0)
    return f"fits with {remedy.words}: {rate:,.0f} tokens/s/GPU, {remedy.engine.name}{host}"

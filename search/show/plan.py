"""Shows a result to a person: speed, sections, binding constraint and inputs, in 100 columns.

Reads `SearchResult` and `Prediction` only. Without a terminal the same text has no colours.
"""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.command import show
from autopar.command.console import Console, escape
from autopar.command.show import (
    COLOURS,
    GRID,
    MARKERS,
    QUIET,
    drawn,
    make_table,
    print_item,
    print_line,
    print_plain,
    save_figure,
    wrapped,
)
from autopar.output import Aside
from autopar.records import replace
from autopar.run.plan import PUBLISHED_RUNS
from autopar.sources import stack_source, stacks_of
from autopar.units import GIB, format_bytes, format_odds, format_seconds
from search.show.headline import (
    NEXT,
    SCREEN_HEIGHT,
    Headline,
    Rows,
    figure_rows,
    layers_line,
    one_line,
    plan_memory_rows,
    print_rows,
    rows_height,
    shortened,
    show_engines,
)

if TYPE_CHECKING:
    from autopar.run.plan import LayerStrategy, Plan, Prediction
    from autopar.sources import Source
    from autopar.training.throughput import Throughput
    from search.planning.best_plan import EngineBest
    from search.planning.layered.prediction import Infeasibility, SearchResult

# --------------------------------------------------------------------------------------------------
# Sections of a report: the plan, the step time, memory, alternatives, and how they are set.
#
# Reads `SearchResult` and `Prediction` only. `search.show.plan` puts the sections together.


_BAR = 44
_COMPUTE = ("forward", "backward", "recompute")
_PER_STEP = ("tail", "optimizer")
PARTS = {
    "forward": "forward",
    "backward": "backward",
    "recompute": "recomputation",
    "vocab": "embedding, head",
    "tp": "tensor parallel",
    "ulysses": "Ulysses",
    "cp": "context parallel",
    "zero3": "ZeRO-3 gather",
    "host": "host",
    "stragglers": "slowest node",
    "redistribution": "redistribution",
    "bubble": "pipeline bubble",
    "transfer": "stage transfer",
    "gradient_sync": "gradient sync",
    "optimizer": "optimizer",
    "fixed": "fixed, by calibration",
}
"""Parts of a step in the order in which they are shown, and their names."""


def show_plan(console: Console, plan: Plan, prediction: Prediction) -> None:
    """Print the plan per stage and layer run, with the time of one micro-batch."""
    print_heading(console, "plan")
    schedule = "GPipe" if plan.pipeline_type == "gpipe" else "1F1B"
    stages = _count(plan.num_stages, "stage")
    print_plain(
        console,
        f"{_count(plan.world_size, 'GPU')} = {stages} of {plan.world_size // plan.num_stages}, "
        f"{schedule}, global batch {plan.global_batch} = "
        f"{_count(plan.num_microbatches, 'micro-batch')} of {_samples(plan)}",
    )
    vocab = plan.vocab
    kind = "vsp" if vocab.ulysses else "vtp"
    print_plain(
        console,
        f"embedding and head: {kind}{vocab.tp}"
        + (f"-cp{vocab.cp}" if vocab.cp > 1 else "")
        + f"-dp{plan.world_size // max(plan.num_stages * vocab.tp * vocab.cp, 1)}"
        + ("-zero3" if vocab.zero3 else "")
        + f"; layers without zero3: {plan.default_dp_type}",
    )
    table = make_table("stage", "layers", "strategy", "compute", "other", "per step", left=3)
    if any(stage.runs for stage in prediction.stages):
        for stage in prediction.stages:
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
                f"fwd {format_seconds(stage.forward_s)}, bwd "
                f"{format_seconds(stage.backward_s)}{send}",
                *_split(stage.time_s, stage.tail_s),
                style="bold",
            )
    else:
        for index, first, count, strategy in plan_runs(plan):
            label = strategy.label(plan.data_degree(first), plan.default_dp_type)
            table.add_row(str(index), _range(first, count), label, "", "", "")
    console.print(table)
    if any(stage.runs for stage in prediction.stages):
        print_plain(
            console, "compute and other (communication, vocabulary): one micro-batch", style="dim"
        )


def _samples(plan: Plan) -> str:
    """Return the samples of a micro-batch: of a data rank, where all layers have as many."""
    whole = plan.global_batch / plan.num_microbatches
    degrees = {plan.data_degree(layer) for layer in range(len(plan.layers))}
    dp = degrees.pop() or 1
    if degrees or dp == 1:
        return _count(whole, "sample")
    return f"{_count(whole / dp, 'sample')} on each of {dp} data ranks"


def _split(time_s: Mapping[str, float], once_s: float) -> tuple[str, str, str]:
    """Return computation and the rest of one micro-batch, and what comes once per step."""
    compute = sum(time_s.get(key, 0.0) for key in _COMPUTE)
    rest = sum(v for key, v in time_s.items() if key not in (*_COMPUTE, *_PER_STEP))
    return format_seconds(compute), format_seconds(rest), format_seconds(once_s)


_UNSEEN = 1e-6
"""Of a step: parts below it are not shown."""


def show_waterfall(console: Console, prediction: Prediction) -> None:
    """Print the step time as its parts, each bar starting where the last one ended."""
    total = prediction.step_time_s
    # a plan that cannot run has neither a time nor parts
    if not prediction.waterfall_s or not math.isfinite(total):
        return
    print_heading(console, "step time")
    table = make_table("part", "time", "share", "", words_last=True, spaced=True)
    # the other columns and their blanks take 42
    width = min(_BAR, console.width - 42)
    start = 0.0
    parts = prediction.waterfall_s
    # a part that has no name yet is shown, too, behind the others
    for name in (*(key for key in PARTS if key in parts), *(k for k in parts if k not in PARTS)):
        value = parts[name]
        if abs(value) < _UNSEEN * total:
            continue  # no bar, and a share of 0.0 %
        table.add_row(
            escape(PARTS.get(name, name.replace("_", " "))),
            format_seconds(value),
            _percent(value / total) if total else "",
            _bar(console, start / total, (start + value) / total, width) if total else "",
        )
        start += value
    bar = _bar(console, 0.0, 1.0, width)
    table.add_row("step", format_seconds(total), "100.0 %", bar, style="bold")
    console.print(table)


def show_memory(console: Console, prediction: Prediction) -> None:
    """Print what every stage allocates and reserves against its budget."""
    if not prediction.stages:
        return
    print_heading(console, "memory per GPU")
    table = make_table(
        *("stage", "allocated", "reserved", "budget", "out of memory", "used", ""),
        left=0,
        words_last=True,
        spaced=True,
    )
    for stage in prediction.stages:
        # nothing has a share of a budget of 0
        budget = max(stage.budget_bytes, 1)
        share = stage.reserved_bytes / budget
        over = " !" if share > 1 else ""
        table.add_row(
            str(stage.stage),
            format_bytes(stage.allocated_bytes),
            format_bytes(stage.reserved_bytes),
            format_bytes(stage.budget_bytes),
            format_odds(stage.odds_of_oom),
            _percent(share) + over,
            _bar(console, 0.0, min(share, 1.0), min(30, console.width - 72), track=True),
            style="bold red" if share > 1 else None,
        )
    console.print(table)


def show_alternatives(console: Console, result: SearchResult, room: int | None = None) -> None:
    """Print the best plans of other kinds and how much slower they are.

    room : lines of all, in which plans are cut to their first words; None: as many as it takes.
    """
    if not result.alternatives or result.prediction is None:
        return
    print_heading(console, "alternatives")
    best = result.prediction.samples_per_s
    # how likely measuring again would put it first; only where computation's spread is known
    likely = any(item.probability_faster is not None for item in result.alternatives)
    columns = ["samples/s", "vs best", *(["faster in"] if likely else []), "plan"]
    table = make_table(*columns, left=0, words_last=True)
    batches = {item.plan.global_batch for item in result.alternatives}
    several = bool(batches - {result.plan.global_batch if result.plan is not None else 0})
    # beside the plans stand the heading and the names of the columns
    for alternative in result.alternatives[: None if room is None else max(room - 3, 1)]:
        share = alternative.probability_faster
        words = one_line(alternative.plan, batch=several)
        table.add_row(
            f"{alternative.samples_per_s:.4g}",
            f"{(alternative.samples_per_s / best - 1) * 100:+.2f} %",
            *(["" if share is None else f"{share * 100:.0f} %"] if likely else []),
            escape(words if room is None else shortened(words, _PLAN_COLUMN)),
        )
    console.print(table)


_LEAST_TABLE = 4
"""Lines of one with names of columns and a row."""
_PLAN_COLUMN = 48
"""Beside rate, share and odds in 80 columns."""


def plan_runs(plan: Plan) -> Iterator[tuple[int, int, int, LayerStrategy]]:
    """Yield (stage, first layer, number of layers, strategy) of layers that are alike."""
    stages = plan.stage_of_layer()
    first = 0
    for i in range(1, len(plan.layers) + 1):
        same = i < len(plan.layers) and (
            plan.layers[i] == plan.layers[first] and stages[i : i + 1] == stages[first : first + 1]
        )
        if not same:
            yield stages[first] if first < len(stages) else -1, first, i - first, plan.layers[first]
            first = i


print_heading = partial(show.print_heading, style="bold cyan")
"""Prints the heading of a section, in the colour of the planner's reports."""


def _bar(console: Console, start: float, end: float, width: int, *, track: bool = False) -> str:
    """Return a bar from `start` to `end` (shares of the width); at least one cell when not 0."""
    # plain characters where the stream cannot write blocks
    full, empty = ("█", "░") if "utf" in (console.encoding or "").lower() else ("#", ".")
    # rounded, and never behind the last cell
    first = min(int(start * width + 0.5), width - 1)
    last = max(min(int(end * width + 0.5), width), first + (1 if end > start else 0))
    rest = (empty if track else " ") * (width - last)
    return " " * first + full * (last - first) + rest


def _range(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"


def _count(number: float, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}{plural}"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


# --------------------------------------------------------------------------------------------------
# The report, from its head to its inputs.


_NAMED = 6
"""Restricting options that a sentence names, at most."""
_MODEL_ROLES = ("model", "computation", "memory")
"""What the roles of the inputs that describe the model begin with."""
_COUNTED = "counted exactly"
"""How the sidecar of a memory file that rests on no device begins to say where it comes from."""
_ROOMY = 0.1
"""Share of the budget that must be free before memory is said not to bind."""


def plan_headline(
    heading: str,
    plan: Plan,
    prediction: Prediction,
    throughput: Throughput | None,
    price: float | None = None,
) -> Headline:
    """Return a plan and its figures; throughput : of it, None where it cannot run."""
    rows = []
    if throughput is not None:
        rows = figure_rows(throughput, prediction.samples_per_s, price)
    else:
        rows.append(("step", "has no step time, because it cannot run"))
    rows += plan_memory_rows(prediction)
    return Headline(
        heading=heading, line=one_line(plan), rows=rows, samples_per_s=prediction.samples_per_s
    )


def show_result(
    console: Console,
    result: SearchResult,
    *,
    title: str,
    engines: Sequence[EngineBest] = (),
    tokens: float | None = None,
    throughput: Throughput | None = None,
    price: float | None = None,
    uniform: Headline | None = None,
    verbose: bool = True,
    goal: str = "",
) -> None:
    """Print the best uniform plan, the best one whose layers may differ, and what they rest on.

    Parameters
    ----------
    engines : each one's own plan, where several were asked. tokens : as `show_engines` has it.
    throughput : of the plan. price : of a GPU-hour. uniform : the best plan with one strategy for
        all layers, where the plan is another one.
    verbose : with stages, terms, memory and inputs; else what is on one screen. goal : of what
        clusters this one was chosen, in a sentence.
    """
    plan, prediction = result.plan, result.prediction
    if plan is None or prediction is None:
        return
    batch = f", global batch {plan.global_batch}"
    warnings = _title(
        console,
        title + batch,
        result.sources,
        estimated=result.estimated,
        synthetic=result.synthetic,
    )
    used = warnings
    heading = "fastest uniform plan" if len({*plan.layers}) == 1 else "fastest plan"
    best = plan_headline(heading, plan, prediction, throughput, price)
    if uniform is not None:
        uniform.show(console)
        used += 1 + uniform.height(console)
        gain = f"layers may differ: {layers_line(engines) or _gain(uniform, prediction)}"
        # what one can say aloud has the long rows
        rows = [row for row in best.rows if row[0] in ("step", "memory")]
        best = replace(best, heading=gain, rows=rows)
    best.show(console)
    footer = _footer(result, prediction, goal)
    used += 3 + best.height(console) + rows_height(console, footer)
    room = None if verbose else max(SCREEN_HEIGHT - used, 0)
    if engines:
        show_engines(
            console, engines, tokens, room=None if room is None else max(room, _LEAST_TABLE)
        )
    elif room is not None and room >= _LEAST_TABLE:
        show_alternatives(console, result, room)
    console.print()
    print_rows(console, footer)
    _unfinished(console, result)
    if not verbose:
        return
    if prediction.replay_s > 0 and math.isfinite(prediction.replay_s):
        print_plain(console, _replay(prediction))
    show_plan(console, plan, prediction)
    show_waterfall(console, prediction)
    show_memory(console, prediction)
    print_plain(console, _binding(plan, prediction))
    show_alternatives(console, result)
    _lists(console, result)
    stats = result.stats
    print_plain(
        console,
        f"searched {stats.candidates} combinations of batch, micro-batches, stages and vocabulary "
        f"degree, {stats.opened} of them exactly, in {format_seconds(stats.cpu_s)} of CPU time",
        style="dim",
    )


def _gain(uniform: Headline, prediction: Prediction) -> str:
    """Return what layers that may differ bring, in a sentence."""
    share = prediction.samples_per_s / uniform.samples_per_s - 1.0
    return f"{share * 100:.1f} % faster"


def _footer(result: SearchResult, prediction: Prediction, goal: str) -> Rows:
    rows = [("rests on", text) for text in _spread(prediction, result.sources, result.estimated)]
    rows.append(("fastest of", _proof(result)))
    assumed = [text.partition(" (")[0] for text in result.defaults_used if text.startswith("--")]
    if assumed:
        rows.append(("assumed", ", ".join(assumed)))
    if notes := _notes(result):
        rows.append(("notes", f"{len(notes)} on the inputs: --verbose"))
    if goal:
        rows.append(("goal", goal))
    return [*rows, ("next", NEXT)]


def show_evaluation(
    console: Console,
    plan: Plan,
    prediction: Prediction,
    *,
    title: str,
    estimated: bool,
    synthetic: bool = False,
    path: str | None = None,
    defaults: Sequence[str] = (),
    notes: Sequence[str] = (),
    sources: Sequence[Source] = (),
    throughput: Throughput | None = None,
    price: float | None = None,
) -> None:
    """Print the price of a given plan and why it is illegal or does not fit.

    Parameters
    ----------
    throughput : of the plan, None where it cannot run. price : of a GPU-hour.
    notes : on the inputs. sources : the inputs, to say which of them are estimated or synthetic.
    """
    if path is not None:
        # one line however long, so that it can be copied
        console.print(path, markup=False, soft_wrap=True)
    _title(console, title, sources, estimated=estimated, synthetic=synthetic)
    plan_headline("plan", plan, prediction, throughput, price).show(console)
    verdict = f"legal: {_yes(prediction.legal)}   fits: {_yes(prediction.fits)}"
    print_line(console, verdict, style="bold")
    spread = _spread(prediction, sources, estimated)
    print_rows(console, [("rests on", text) for text in spread])
    for problem in prediction.problems:
        print_item(console, problem)
    show_plan(console, plan, prediction)
    show_waterfall(console, prediction)
    show_memory(console, prediction)
    _items(console, "defaults used", defaults)
    _items(console, "notes", notes)


def show_frontier(console: Console, results: list[SearchResult]) -> None:
    """Print the best throughput by memory budget."""
    print_heading(console, "throughput by memory budget")
    table = make_table(
        "GiB per GPU", "samples/s", "step", "plan", left=0, words_last=True, spaced=True
    )
    for result in results:
        if result.plan is None or result.prediction is None:
            continue
        budget = result.options.get("memory_constraint_bytes")
        table.add_row(
            f"{budget / GIB:.2f}" if isinstance(budget, int | float) else "-",
            f"{result.prediction.samples_per_s:.4g}",
            format_seconds(result.prediction.step_time_s),
            escape(one_line(result.plan, batch=True)),
        )
    console.print(table)


def save_frontier(
    results: Sequence[SearchResult], path: Path, title: str, aside: Aside | None = None
) -> None:
    """Draw the best throughput over the memory of a GPU, as .png or .svg.

    From one budget to the next larger one the same plan is the best. aside : as `autopar.output`
    has it. Raises OptionError where the file cannot be written, InstallError without matplotlib.
    """
    points: list[tuple[float, float, str]] = []
    for result in results:
        budget = result.options.get("memory_constraint_bytes")
        if result.plan is None or result.prediction is None or not isinstance(budget, int | float):
            continue
        words = textwrap.shorten(one_line(result.plan), 48, placeholder=" ..")
        points.append((budget / GIB, result.prediction.samples_per_s, words))
    points.sort()
    with drawn("--plot") as figure_of:
        figure = figure_of(figsize=(8.0, 4.5), layout="constrained")
        plot = figure.subplots()
        gib, speed = [one[0] for one in points], [one[1] for one in points]
        plot.step(gib, speed, where="post", color=COLOURS[0], marker=MARKERS[0], markersize=4)
        # names of many plans would lie upon each other: those of both ends and the largest steps
        gains = [b - a for a, b in pairwise(speed)]
        steps = sorted(range(len(gains)), key=lambda at: -gains[at])[:_NAMED_POINTS]
        for at in {0, len(points) - 1, *(step + 1 for step in steps)} if points else ():
            left = gib[at] < (gib[0] + gib[-1]) / 2
            plot.annotate(
                points[at][2],
                (gib[at], speed[at]),
                xytext=(6 if left else -6, -9),
                textcoords="offset points",
                ha="left" if left else "right",
                fontsize=7,
                color=QUIET,
            )
        plot.set_title(title, loc="left")
        plot.set_xlabel("memory of a GPU, GiB", color=QUIET)
        plot.set_ylabel("samples/s", color=QUIET)
        plot.set_ylim(bottom=0.0)
        plot.grid(color=GRID)
        plot.set_axisbelow(True)
        save_figure(figure, path, "--plot", aside)


_NAMED_POINTS = 3
"""Plans that a picture of a frontier names beside the first."""


def infeasible_sentence(
    infeasibility: Infeasibility,
    budget_bytes: float,
    *,
    options: Mapping[str, object] | None = None,
    subject: str = "",
) -> str:
    """Return why nothing fits: stage, missing bytes, smallest budget that works.

    Parameters
    ----------
    options : those of the search; the ones that restrict it are named where no budget helps.
    subject : what was planned for, such as `gpt2-xl (25 heads) on 8 GPUs`.
    """
    smallest = infeasibility.smallest_budget_bytes
    # 0: no budget helps
    if smallest <= 0:
        restricting = _restricting(options or {})
        what = (f" for {subject}" if subject else "") + (
            f" with {' '.join(restricting)}" if restricting else ""
        )
        return f"there is no plan{what}, with any --memory-constraint: {infeasibility.reason}"
    stages = infeasibility.num_stages
    where = "the one stage" if stages == 1 else f"stage {infeasibility.stage} of 0-{stages - 1}"
    missing = (
        f"no plan fits in {budget_bytes / GIB:.4g} GiB per GPU: {where} of the smallest plan "
        f"misses {format_bytes(infeasibility.missing_bytes)} ({infeasibility.missing_bytes} bytes)"
    )
    # Rounded up, so that the number shown does work.
    gib = math.ceil(smallest / GIB * 100) / 100
    return missing + f"; the smallest that works is --memory-constraint {gib:.2f}"


def _restricting(options: Mapping[str, object]) -> list[str]:
    """Return the options that leave parts of the search space out, as they are written."""
    found = []
    if options.get("search_space", "full") != "full":
        found.append(f"--search-space {options['search_space']}")
    found += [
        f"--{name.replace('_', '-')}"
        for name, value in options.items()
        if name.startswith("disable_") and value is True
    ]
    for name in ("pin", "forbid"):
        rules = options.get(name)
        if isinstance(rules, list | tuple):
            found += [f"--{name} {shlex.quote(str(rule))}" for rule in rules]
    if len(found) > _NAMED:
        found[_NAMED:] = [f"and {len(found) - _NAMED} more"]
    return found


def _proof(result: SearchResult) -> str:
    """Return of what a plan is the fastest, and whether that is proven."""
    what = f"{result.stats.candidates:,} combinations of batch, stages and embedding"
    # one stage that is too large to be searched ends a search without any limit of time
    early = "stopped early" if result.too_large else "stopped at the time limit"
    if not math.isfinite(result.gap):
        return f"{what}; {early}: how far below the best is not known"
    if result.status == "time_limit":
        return f"{what}; {early}: at most {result.gap * 100:.3g} % below the best"
    if result.gap > 0:
        return f"{what}; at most {result.gap * 100:.3g} % below the best"
    return f"{what}, proven: gap 0 %"


def _unfinished(console: Console, result: SearchResult) -> None:
    for text in result.unfinished:
        print_plain(console, text)


def _replay(prediction: Prediction) -> str:
    ratio = prediction.replay_s / prediction.step_time_s - 1
    return f"event replay of the step: {format_seconds(prediction.replay_s)}, {ratio * 100:+.2f} %"


def _spread(prediction: Prediction, sources: Sequence[Source], estimated: bool) -> list[str]:
    """Return what a plan's interval is made of, or why there is none; nothing without a step."""
    if prediction.step_time_interval_s is not None:
        if PUBLISHED_RUNS in prediction.interval_of:
            return [f"in ( ): 9 of 10 published runs; {_software(sources)}"]
        return [f"in ( ): the measured spread of {' and '.join(prediction.interval_of)}"]
    if math.isfinite(prediction.step_time_s) and "calibration" not in {s.role for s in sources}:
        # published runs say how far estimates are off, which is not how far measurements are
        why = "of software that no file names; --stack names it" if estimated else "without spread"
        return [f"no interval: times were measured {why}"]
    return []


def _software(sources: Sequence[Source]) -> str:
    """Return whose software estimates are of and from where that is known, in words."""
    stacks = stacks_of(sources)
    if len(stacks) > 1:
        return f"the widest class: files are of {' and '.join(stacks)}"
    known = stack_source(sources)
    if known is None:
        return "the widest class: no file names its software; --stack names it"
    return ", ".join((f"software: {stacks[0]}", *known.notes[:1]))


def _binding(plan: Plan, prediction: Prediction) -> str:
    """Return the tightest stage in memory and the slowest in time."""
    if not prediction.stages:
        return ""
    full = max(prediction.stages, key=lambda s: s.reserved_bytes / max(s.budget_bytes, 1))
    slow = max(prediction.stages, key=lambda s: s.forward_s + s.backward_s)
    spare = full.budget_bytes - full.reserved_bytes
    room = f"{format_bytes(spare)} of {format_bytes(full.budget_bytes)} spare"
    if spare > _ROOMY * full.budget_bytes:
        text = f"memory does not bind: {room} on stage {full.stage}, the fullest"
    else:
        text = f"memory of stage {full.stage} binds: {room}"
    if plan.num_stages > 1:
        busy = format_seconds(slow.forward_s + slow.backward_s)
        text += f"; stage {slow.stage} sets the pace ({busy} per micro-batch)"
    return text


def _notes(result: SearchResult) -> list[str]:
    """Return what is odd; what is estimated or synthetic stands beside the title and inputs."""
    return [note for note in result.notes if not note.startswith(("estimated: ", "synthetic: "))]


def _lists(console: Console, result: SearchResult) -> None:
    _items(console, "defaults used", result.defaults_used)
    _items(console, "notes", _notes(result))
    if result.sources:
        print_heading(console, "inputs")
        for source in dict.fromkeys(result.sources):
            marks = [name for name in ("estimated", "synthetic") if getattr(source, name)]
            mark = f" ({', '.join(marks)})" if marks else ""
            # One line each however long, so that paths can be copied.
            console.print(f"  - {source.role}: {source.path}{mark}", markup=False, soft_wrap=True)


def _items(console: Console, heading: str, items: Sequence[str]) -> None:
    if items:
        print_heading(console, heading)
    for item in items:
        print_item(console, item)


def _title(
    console: Console, title: str, sources: Sequence[Source], *, estimated: bool, synthetic: bool
) -> int:
    """Print the question and what is not measured of it, each on a line of its own; their count."""
    lines: list[tuple[str, str]] = [(title, "bold")]
    if synthetic:
        whose = _whose(s.role for s in sources if s.synthetic)
        lines.append((f"rests on SYNTHETIC timings{whose}, which describe no machine", "bold red"))
    if estimated:
        whose = _whose(s.role for s in sources if s.estimated)
        what = f"rests on ESTIMATES{whose} from datasheets, not on measurements"
        lines.append((what, "yellow"))
    times = any(s.role in ("computation", "model spec") and s.estimated for s in sources)
    counted = any(s.role == "memory sidecar" and s.notes[0].startswith(_COUNTED) for s in sources)
    own = next((s.path for s in sources if s.role == "memory" and s.estimated), None)
    if own is not None:
        lines.append((f"memory is that of {own}", "yellow"))
    elif times and counted:
        exact, (before, style) = "memory is counted exactly", lines[-1]
        if len(f"{before}; {exact}") <= console.width:
            lines[-1] = (f"{before}; {exact}", style)
        else:
            lines.append((exact, style))
    for text, style in lines:
        print_plain(console, text, style=style)
    return sum(len(wrapped(text, console.width)) for text, _ in lines)


def _whose(roles: Iterable[str]) -> str:
    """Return ` of the model` or ` of the hardware` where only inputs of one have these roles."""
    names = {"model" if role.startswith(_MODEL_ROLES) else "hardware" for role in roles}
    return f" of the {names.pop()}" if len(names) == 1 else ""


def _yes(value: bool) -> str:
    return "yes" if value else "NO"

"""What a page shows of a plan whose layers may differ: strategies, step, memory, other plans.

Figures are those of its `Prediction`, which is `search.planning.layered.prediction`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from autopar.documents.catalog import shipped_path
from autopar.run.plan import PUBLISHED_RUNS, Plan, Prediction
from autopar.units import GIB, format_bytes, format_odds, format_seconds
from search.show.headline import one_line
from search.show.pictures.charts import Point, Series, scatter, table
from search.show.pictures.memory import plan_memory
from search.show.pictures.page import Fact, Page, Section
from search.show.pictures.timeline import plan_timeline
from search.show.plan import PARTS

if TYPE_CHECKING:
    from search.planning.layered.prediction import Alternative, SearchResult
    from search.planning.question import Session


def plan_page(
    session: Session,
    plan: Plan,
    prediction: Prediction,
    *,
    state: str,
    result: SearchResult | None = None,
    frontier: Sequence[SearchResult] = (),
) -> Page:
    """Return the page of a plan; raises InputError for one that cannot run.

    result : of the search that found it, with its alternatives. frontier : results by budget.
    """
    timeline = plan_timeline(plan, prediction)
    fullest = max(prediction.stages, key=lambda stage: stage.reserved_bytes)
    sections = []
    if result is not None and result.alternatives:
        content = _alternatives(session, plan, prediction, result)
        sections.append(Section(heading="Alternatives", content=content))
    if len(frontier) > 1:
        sections.append(Section(heading="Throughput by memory", content=_frontier(frontier)))
    parts = prediction.waterfall_s
    order = [*(name for name in PARTS if name in parts), *(n for n in parts if n not in PARTS)]
    reserved = fullest.reserved_bytes - fullest.allocated_bytes
    return Page(
        title=session.title,
        line=one_line(plan),
        state=state,
        facts=tuple(_facts(session, plan, prediction)),
        timeline=timeline,
        memory=plan_memory(prediction, timeline),
        budget_bytes=fullest.budget_bytes - reserved,
        budget_words=(
            f"The limit is what {format_bytes(fullest.budget_bytes)} leave beside "
            f"{format_bytes(reserved)} that the context and the allocator keep."
        ),
        waterfall=tuple(
            (name, PARTS.get(name, name.replace("_", " ")), parts[name]) for name in order
        ),
        layers=_layers(prediction),
        bounds=tuple(_bounds(plan, prediction)),
        sections=tuple(sections),
        assumptions=(*session.defaults, *session.calibrated),
        inputs=tuple(
            # a page is sent to others, who have no use for where something is installed
            (source.role, (shipped_path(source.path) or source.path) + _mark(source.estimated))
            for source in session.sources
        ),
        intervals=tuple(_intervals(session, prediction)),
        left_out=(
            "the timeline has one rank of each stage: all ranks of a stage are taken to be alike",
            *session.notes,
        ),
    )


def _mark(estimated: bool) -> str:
    return " (estimated)" if estimated else ""


def _facts(session: Session, plan: Plan, prediction: Prediction) -> Iterator[Fact]:
    interval = prediction.step_time_interval_s
    note = ""
    if interval is not None:
        low, high = map(format_seconds, interval)
        note = f"{low} to {high}"
    yield Fact(label="step", value=format_seconds(prediction.step_time_s), note=note)
    rate = prediction.samples_per_s
    yield Fact(label="samples/s", value=f"{rate:,.4g}", note=f"global batch {plan.global_batch:,}")
    found = session.throughput(plan, prediction)
    if found is not None:
        least, most = found.ends or (1.0, 1.0)
        tokens, between = found.tokens_per_s, ""
        if least < most:
            between = f"{tokens * least:,.0f} to {tokens * most:,.0f}; "
        yield Fact(
            label="tokens/s per GPU",
            value=f"{tokens:,.0f}",
            note=f"{between}{tokens * plan.world_size:,.0f} on {plan.world_size:,} GPUs",
        )
        if found.mfu is not None:
            share = found.mfu * 100
            between = f"{share * least:.1f} to {share * most:.1f}, " if least < most else ""
            yield Fact(label="MFU", value=f"{share:.1f} %", note=f"{between}of the 16-bit peak")
    fullest = max(prediction.stages, key=lambda stage: stage.reserved_bytes)
    yield Fact(
        label="peak memory",
        value=format_bytes(fullest.allocated_bytes),
        note=f"reserved {format_bytes(fullest.reserved_bytes)} of "
        f"{format_bytes(fullest.budget_bytes)}",
    )
    odds = max(stage.odds_of_oom for stage in prediction.stages)
    fits = "fits" if prediction.fits else "does not fit"
    yield Fact(label="out of memory", value=format_odds(odds), note=f"odds; {fits}")


def _layers(prediction: Prediction) -> str:
    rows = []
    for stage in prediction.stages:
        for run in stage.runs:
            last = run.first_layer + run.num_layers - 1
            span = str(last) if run.num_layers == 1 else f"{run.first_layer}-{last}"
            once = run.time_s.get("tail", 0.0) + run.time_s.get("optimizer", 0.0)
            rows.append(
                (
                    str(stage.stage),
                    span,
                    run.label,
                    format_seconds(sum(run.time_s.values()) - once),
                    format_seconds(once),
                    format_bytes(run.memory_bytes.get("states", 0.0)),
                    format_bytes(run.memory_bytes.get("activations", 0.0)),
                )
            )
    heads = (
        *("stage", "layers", "strategy", "a micro-batch", "once a step", "states"),
        "activations in flight",
    )
    return table(heads, rows, words=(0, 1, 2))


def _bounds(plan: Plan, prediction: Prediction) -> Iterator[str]:
    total = prediction.step_time_s
    ranked = sorted(prediction.waterfall_s.items(), key=lambda item: -item[1])[:3]
    told = ", ".join(f"{PARTS.get(name, name)} {s / total * 100:.0f} %" for name, s in ranked)
    yield f"time: {told} of the step"
    times = [stage.forward_s + stage.backward_s for stage in prediction.stages]
    if len(times) > 1:
        longest = max(range(len(times)), key=times.__getitem__)
        mean = sum(times) / len(times)
        bubble = prediction.waterfall_s.get("bubble", 0.0) / total
        yield (
            f"pipeline: stage {longest} is the longest, {(times[longest] / mean - 1) * 100:.1f} % "
            f"above the mean; the bubble is {bubble * 100:.1f} % of the step with "
            f"{plan.num_microbatches:,} micro-batches"
        )
    fullest = max(prediction.stages, key=lambda stage: stage.reserved_bytes)
    free = fullest.budget_bytes - fullest.reserved_bytes
    room = f"{format_bytes(free)} are free" if free >= 0 else f"{format_bytes(-free)} are missing"
    yield f"memory: stage {fullest.stage} is the fullest, {room}"
    yield from prediction.problems


def _intervals(session: Session, prediction: Prediction) -> Iterator[str]:
    interval = prediction.step_time_interval_s
    if interval is None:
        yield "no interval: nothing says how far these times are off"
    else:
        low, high = map(format_seconds, interval)
        of = " and ".join(prediction.interval_of)
        spread = "of 10 published runs 9 were" if of == PUBLISHED_RUNS else f"spread of {of}:"
        yield f"step: {spread} within {low} to {high}"
    if session.estimated:
        yield "rests on estimates from datasheets, not on measurements"
    if session.synthetic:
        yield "rests on synthetic timings, which describe no machine"
    replayed = prediction.replay_s
    share = replayed / prediction.step_time_s - 1
    yield f"the replay, event by event, takes {format_seconds(replayed)} ({share * 100:+.2f} %)"


def _alternatives(
    session: Session, plan: Plan, prediction: Prediction, result: SearchResult
) -> str:
    """Return other plans as a chart over their memory, and as a table."""
    tried: list[tuple[str, Plan, Prediction, Alternative | None]] = [
        ("the plan", plan, prediction, None)
    ]
    tried += [
        (other.differs_by, other.plan, session.planner.evaluate(other.plan), other)
        for other in result.alternatives
    ]
    points, rows = [], []
    for name, each, found, other in tried:
        peak = max(stage.reserved_bytes for stage in found.stages)
        slower = prediction.samples_per_s / found.samples_per_s - 1
        line = one_line(each)
        points.append(
            Point(
                x=peak / GIB,
                y=found.samples_per_s,
                words=f"{line}: {found.samples_per_s:,.4g} samples/s, {format_bytes(peak)}",
                chosen=each is plan,
            )
        )
        odds = None if other is None else other.probability_faster
        rows.append(
            (
                line,
                name,
                f"{found.samples_per_s:,.4g}",
                "" if each is plan else f"{slower * 100:.2f} %",
                "" if odds is None else format_odds(odds),
                format_bytes(peak),
            )
        )
    chart = scatter(
        [Series(name="", points=tuple(points))],
        title="Throughput over memory",
        x_label="reserved on the fullest stage, GiB",
        y_label="samples/s",
        limit=(prediction.stages[0].budget_bytes / GIB, "budget"),
    )
    heads = ("plan", "differs by", "samples/s", "slower", "odds of being faster", "reserved")
    return f'<div class="charts">{chart}</div>{table(heads, rows, words=(0, 1))}'


def _frontier(frontier: Sequence[SearchResult]) -> str:
    points, rows = [], []
    for result in frontier:
        if result.plan is None or result.prediction is None:
            continue
        budget = result.prediction.stages[0].budget_bytes
        line = one_line(result.plan)
        rate = result.prediction.samples_per_s
        points.append(Point(x=budget / GIB, y=rate, words=f"{format_bytes(budget)}: {line}"))
        rows.append((format_bytes(budget), f"{rate:,.4g}", line))
    chart = scatter(
        [Series(name="", points=tuple(points))],
        title="Best throughput by memory budget",
        x_label="budget, GiB",
        y_label="samples/s",
    )
    listed = table(("budget", "samples/s", "plan"), rows, words=(2,))
    return f'<div class="charts">{chart}</div>{listed}'

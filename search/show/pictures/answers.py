"""Pages of answers: searched, evaluated or checked, with a uniform or a per-layer plan.

The figures come from a `Price`. The timeline and the layers come from the assessed run or from the
planner's prediction. Plans for other batches and clusters are searched here on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from autopar.answer import Price, Priced
from autopar.documents.catalog import shipped_path
from autopar.errors import InputError
from autopar.price.account import account_of
from autopar.price.assessment import Assessment, Target
from autopar.price.oom_risk import oom_probability_any_stage
from autopar.records import replace
from autopar.units import GIB, format_bytes, format_probability, format_seconds
from search.planning.uniform.choice import avoided
from search.planning.uniform.summary import price_of, priced_of, proof_of
from search.show.pictures.charts import Point, Series, lines, scatter, table
from search.show.pictures.memory import StageMemory, launch_memory, plan_memory
from search.show.pictures.page import Fact, Page, Section
from search.show.pictures.terms import TERMS, sends
from search.show.pictures.timeline import Timeline, launch_timeline, plan_timeline
from search.show.summary import PEAK
from search.show.terms import FEATURE_NAMES, memory_name, time_name

if TYPE_CHECKING:
    from autopar.run.plan import Plan, Prediction
    from search.planning.layered.prediction import SearchResult
    from search.planning.session import Session
    from search.planning.uniform.answer import (
        EngineResult,
        UniformRequest,
        UniformResult as Launches,
    )
    from search.planning.uniform.best_first import PricedRun

_BATCHES = (0.25, 0.5, 2.0, 4.0)
_CLUSTERS = (0.25, 0.5, 2.0, 4.0)
"""Factors of global batch and number of nodes for which the fastest plan is searched."""
_SECONDS = 5.0
"""CPU seconds that each of these searches may take."""
_ALIKE = "the timeline shows one rank per stage and assumes that all ranks of a stage are equal"


def answer_page(found: Launches, *, curves: bool, frontier: Sequence[SearchResult] = ()) -> Page:
    """Return the page of the best uniform plan of a search, or of an evaluated uniform plan.

    curves : True to search also plans for other batches and numbers of nodes.
    frontier : results by memory budget.
    """
    one, question = found.engines[0], found.question
    solution = one.best
    assert solution is not None, "there is a launch to show"
    assert one.solved is not None, "it was searched"
    searched = one.solved.effort.degrees > 1
    candidates: list[tuple[Priced, float | None]] = [
        (priced_of(found, each, other), None)
        for each in found.engines
        for other in (each.solved.solutions if each.solved is not None else ())
    ]
    if one.chosen is not None and one.chosen not in one.solved.solutions:
        candidates.insert(0, (priced_of(found, one), None))
    none = [each for each in found.engines if each.best is None]
    refused = "".join(f"<p>{each.engine.title}: no plan: {each.reason}</p>" for each in none)
    sections = _alternatives(candidates, solution.choice, refused)
    sections += _frontier(frontier)
    if curves:
        sections += _curves(question, one, solution)
    left_out = [f"{_ALIKE}; stragglers are one wait"]
    if searched:
        left_out.insert(
            0,
            "not searched: CUDA graphs, and degrees, recomputation or offload by layer",
        )
    page = checked_page(
        solution.assessment,
        one.target,
        title=question.title,
        line=f"{one.engine.title}: {solution.line}",
        state=_state(found, one) if searched else "given plan",
    )
    return replace(
        page,
        sections=tuple(sections),
        assumptions=question.assumed,
        inputs=tuple(_inputs(question, one)),
        left_out=tuple(left_out),
    )


def checked_page(
    assessment: Assessment,
    target: Target,
    *,
    title: str,
    line: str,
    state: str = "launch script, read and estimated, not run",
) -> Page:
    """Return the page of an assessed run; raises InputError for a run without a step time."""
    found = _counted(assessment, target)
    timeline = launch_timeline(found, target)
    price = price_of(found, target)
    odds = [stage.oom_probability for stage in price.stages]
    return _page(
        price,
        timeline,
        launch_memory(found.run, found.accounts, timeline, odds),
        _stages(found),
        title=title,
        line=line,
        state=state,
    )


def plan_page(
    session: Session,
    plan: Plan,
    prediction: Prediction,
    *,
    state: str,
    result: SearchResult | None = None,
    frontier: Sequence[SearchResult] = (),
) -> Page:
    """Return the page of a per-layer plan; raises InputError if it cannot run.

    result : result of the search that found the plan, with alternatives.
    frontier : results by memory budget.
    """
    timeline = plan_timeline(plan, prediction)
    priced = session.priced(plan, prediction)
    candidates: list[tuple[Priced, float | None]] = [(priced, None)]
    candidates += [
        (session.priced(one.plan, session.planner.evaluate(one.plan)), one.probability_faster)
        for one in (result.alternatives if result is not None else ())
    ]
    sections = _alternatives(candidates, plan)
    sections += _frontier(frontier)
    page = _page(
        priced.price,
        timeline,
        plan_memory(prediction, timeline),
        _layers(prediction),
        title=session.title,
        line=priced.words,
        state=state,
    )
    based = [text for kind, text in session.warnings if kind != "exact"]
    return replace(
        page,
        sections=tuple(sections),
        assumptions=(*session.defaults, *session.calibrated),
        inputs=tuple(
            # Pages are shared, so shipped files appear without the path of the installation.
            (
                source.role,
                (shipped_path(source.path) or source.path) + " (estimated)" * source.estimated,
            )
            for source in session.sources
        ),
        intervals=(*page.intervals, *based),
        left_out=(_ALIKE, *session.notes),
    )


def _state(found: Launches, best: EngineResult) -> str:
    solved = best.solved
    assert solved is not None, "it was searched"
    fit = f"{solved.effort.choices:,} plans that fits"
    number = f"fastest of {fit}"
    if best.chosen is not None and best.fastest is not None:
        traits = " and ".join(avoided(best.fastest, best.chosen))
        number = f"without {traits}, as fast as the fastest of {fit}"
    return f"{number}, {proof_of(found, solved)}"


def _counted(assessment: Assessment, target: Target) -> Assessment:
    """Return an assessment with the memory of all stages; a search counts only some of them."""
    run = assessment.run
    if len(assessment.accounts) == run.strategy.pp:
        return assessment
    known = {account.stage: account for account in assessment.accounts}
    accounts = tuple(known.get(stage) or account_of(run, stage) for stage in range(run.strategy.pp))
    peaks = [account.peak_bytes for account in accounts]
    odds = oom_probability_any_stage(run, peaks, target.capacity_bytes)
    return replace(assessment, accounts=accounts, odds_of_oom=odds)


# --------------------------------------------------------------------------------------------------
# Content of every page


def _page(
    price: Price,
    timeline: Timeline,
    memory: tuple[StageMemory, ...],
    layers: str,
    *,
    title: str,
    line: str,
    state: str,
) -> Page:
    fullest = price.fullest
    known = [name for name in TERMS if name in price.terms_s]
    names = [*known, *(name for name in price.terms_s if name not in TERMS)]
    return Page(
        title=title,
        line=line,
        state=state,
        facts=tuple(_facts(price)),
        timeline=timeline,
        memory=memory,
        budget_bytes=fullest.budget_bytes - price.reserve_bytes,
        budget_words=(
            f"Bars: allocated memory. Limit: {format_bytes(fullest.budget_bytes)} less "
            f"{format_bytes(price.reserve_bytes)} for {price.reserve_of}."
        ),
        waterfall=tuple((name, time_name(name), price.terms_s[name]) for name in names),
        layers=layers,
        bounds=tuple(_bounds(price)),
        intervals=tuple(_intervals(price)),
    )


def _facts(price: Price) -> Iterator[Fact]:
    found, fullest = price.throughput, price.fullest
    assert found is not None, "a timeline is of a step"
    step, note = format_seconds(found.step_s), ""
    if found.interval_s is not None:
        low, high = map(format_seconds, found.interval_s)
        note = f"{low} to {high}, 90 % interval"
    yield Fact(label="Step time", value=step, note=note)
    # The slowest step has the lowest throughput.
    least, most = found.ends or (1.0, 1.0)
    tokens, between = found.tokens_per_s, ""
    if least < most:
        between = f"{tokens * least:,.0f} to {tokens * most:,.0f}; "
    yield Fact(
        label="Tokens/s/GPU",
        value=f"{tokens:,.0f}",
        note=f"{between}{tokens * found.gpus:,.0f} on {found.gpus:,} GPUs",
    )
    if found.mfu is not None:
        share = found.mfu * 100
        between = f"{share * least:.1f} to {share * most:.1f}, " if least < most else ""
        yield Fact(
            label="MFU", value=f"{share:.1f} %", note=f"{between}of the {found.peak_precision} peak"
        )
    lowest, highest = fullest.reserved_bytes
    ends = (highest,) if lowest == highest else (lowest, highest)
    reserved = " to ".join(map(format_bytes, ends))
    yield Fact(
        label=PEAK,
        value=format_bytes(fullest.peak_bytes),
        note=f"reserved {reserved} of {format_bytes(fullest.budget_bytes)}",
    )
    allowed = "" if price.oom_risk is None else f"; {format_probability(price.oom_risk)} is allowed"
    yield Fact(
        label="OOM probability",
        value=format_probability(price.oom_probability),
        note=f"{price.verdict}{allowed}",
    )


def _bounds(price: Price) -> Iterator[str]:
    terms, total = price.terms_s, sum(price.terms_s.values())
    ranked = sorted(terms.items(), key=lambda item: -item[1])[:3]
    told = ", ".join(f"{time_name(name)} {s / total * 100:.0f} %" for name, s in ranked)
    yield f"time: {told} of the step"
    times = price.stage_s
    if len(times) > 1:
        longest = max(range(len(times)), key=times.__getitem__)
        mean = sum(times) / len(times)
        yield (
            f"pipeline: stage {longest} is the slowest, {(times[longest] / mean - 1) * 100:.1f} % "
            f"above the mean; the bubble is {terms.get('bubble', 0.0) / total * 100:.1f} % of the "
            f"step with {price.micro_batches:,} micro-batches"
        )
    moved = sum(value for name, value in terms.items() if sends(name))
    yield f"exposed communication: {moved / total * 100:.1f} % of the step"
    fullest = price.fullest
    largest = sorted(fullest.terms, key=lambda term: -term.num_bytes)[:2]
    parts = " and ".join(
        f"{memory_name(one.name)} {format_bytes(one.num_bytes)}" for one in largest
    )
    free = fullest.budget_bytes - price.reserve_bytes - fullest.peak_bytes
    yield (
        f"memory: the peak stage is stage {fullest.stage}, with {parts}; "
        + (f"{format_bytes(free)} are free" if free >= 0 else f"{format_bytes(-free)} are missing")
    )
    yield from price.problems


def _intervals(price: Price) -> Iterator[str]:
    if price.interval:
        yield f"step: {price.interval}"
    else:
        yield "no interval: no published or measured errors apply to these times"
    low, high = price.fullest.reserved_bytes
    if low != high:
        few = ", ".join(FEATURE_NAMES.get(one, one) for one in price.few_runs)
        wide = f"; wider than most: few measured runs have {few}" if few else ""
        yield f"reserved memory: {format_bytes(low)} to {format_bytes(high)} (90 %){wide}"
    yield from price.notes


def _stages(assessment: Assessment) -> str:
    stages = assessment.run.strategy.stages
    step = assessment.step
    assert step is not None, "a timeline is of a step"
    rows = []
    for at, stage in enumerate(stages):
        parts = []
        for embeds, layers, mtp, head in stage:
            span = "no layer" if not layers else f"{layers[0]}-{layers[-1]}"
            span = span if len(layers) != 1 else f"{layers[0]}"
            ends = [*(["embedding"] if embeds else []), span, *(["MTP"] if mtp else [])]
            parts.append(" + ".join([*ends, *(["head"] if head else [])]))
        number = sum(len(chunk.layers) for chunk in stage)
        longest = step.stage_s[at] / max(step.stage_s)
        rows.append((str(at), str(number), f"{longest * 100:.1f} %", "; ".join(parts)))
    return table(("stage", "layers", "time over the slowest", "chunks"), rows, words=(0, 3))


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
        *("stage", "layers", "strategy", "per micro-batch", "per step", "model states"),
        "saved activations",
    )
    return table(heads, rows, words=(0, 1, 2))


# --------------------------------------------------------------------------------------------------
# Alternatives and curves


def _alternatives(
    candidates: Sequence[tuple[Priced, float | None]], chosen: object, below: str = ""
) -> list[Section]:
    """Return a section with plans as a chart over peak memory and as a table.

    The result is empty for a single plan. candidates : plans with their probability of being faster
    than the answer. chosen : key of the answer. below : HTML after the table.
    """
    if len(candidates) < 2:
        return []
    best = next(one for one, _ in candidates if one.key == chosen)
    points: dict[str, list[Point]] = {}
    rows = []
    for one, odds in sorted(candidates, key=lambda each: -each[0].price.samples_per_s):
        price = one.price
        tokens = 0.0 if price.throughput is None else price.throughput.tokens_per_s
        peak, rate = price.fullest.peak_bytes, f"{tokens:,.0f}"
        name = f"{one.engine}: " if one.engine else ""
        words = f"{name}{one.words}, {rate} tokens/s/GPU, {format_bytes(peak)}"
        point = Point(x=peak / GIB, y=tokens, words=words, chosen=one is best)
        points.setdefault(one.title, []).append(point)
        share = price.samples_per_s / best.price.samples_per_s - 1
        rows.append(
            (
                one.words,
                one.engine,
                rate,
                "" if one is best else f"{share * 100:+.2f} %",
                "" if odds is None else format_probability(odds),
                format_bytes(peak),
                format_probability(price.oom_probability),
            )
        )
    heads = ("plan", "engine", "tokens/s/GPU", "vs best", "P(faster)", "peak", "OOM probability")
    # Empty columns are not shown.
    kept = [at for at in range(len(heads)) if any(row[at] for row in rows)]
    listed = table(
        [heads[at] for at in kept],
        [[row[at] for at in kept] for row in rows],
        words={kept.index(at) for at in (0, 1) if at in kept},
    )
    fullest = best.price.fullest
    chart = scatter(
        [Series(name=name, points=tuple(own)) for name, own in points.items()],
        title="Throughput over peak memory",
        x_label="peak allocated, GiB",
        y_label="tokens/s/GPU",
        limit=((fullest.budget_bytes - best.price.reserve_bytes) / GIB, "limit"),
    )
    content = f'<div class="charts">{chart}</div>{listed}{below}'
    return [Section(heading="Alternatives", content=content)]


def _frontier(frontier: Sequence[SearchResult]) -> list[Section]:
    if len(frontier) < 2:
        return []
    points, rows = [], []
    for result in frontier:
        if result.plan is None or result.prediction is None:
            continue
        budget = result.options["memory_constraint_bytes"]
        assert isinstance(budget, int | float), "it is an option of every search"
        line = result.words()
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
    content = f'<div class="charts">{chart}</div>{listed}'
    return [Section(heading="Throughput by memory", content=content)]


def _curves(question: UniformRequest, best: EngineResult, solution: PricedRun) -> list[Section]:
    """Return a section with the fastest plan for other batches and numbers of nodes."""
    batch = solution.choice.global_batch
    here = (solution, question)
    batches = [(float(batch), *here)]
    batches += _searched(
        (batch * factor, _asked(question, best, question.num_nodes, round(batch * factor)))
        for factor in _BATCHES
        if (batch * factor).is_integer()
    )
    nodes = question.num_nodes
    clusters = [(float(question.job.world), *here)]
    clusters += _searched(
        (question.job.world * factor, _asked(question, best, round(nodes * factor), batch))
        for factor in _CLUSTERS
        if (nodes * factor).is_integer()
    )
    charts = []
    for found, title, label in (
        (batches, "Throughput over the global batch", "global batch, sequences"),
        (clusters, f"Throughput over GPUs, global batch {batch:,}", "GPUs"),
    ):
        if len(found) < 2:
            continue
        found.sort(key=lambda one: one[0])
        points = tuple(
            Point(
                x=x,
                y=one.assessment.tokens_per_s or 0.0,
                words=f"{x:,.0f}: {one.line}, "
                f"{one.assessment.tokens_per_s or 0.0:,.0f} tokens/s/GPU",
                chosen=one is solution,
            )
            for x, one, asked in found
        )
        chart = lines(
            [Series(name="", points=points)],
            title=title,
            x_label=label,
            y_label="tokens/s/GPU",
        )
        rows = [
            (
                f"{x:,.0f}",
                f"{one.assessment.tokens_per_s or 0.0:,.0f}",
                format_seconds(one.choice.global_batch / one.samples_per_s),
                one.line,
            )
            for x, one, asked in found
        ]
        heads = (label, "tokens/s/GPU", "step", f"fastest plan of {best.engine.title}")
        charts.append(f"<div>{chart}{table(heads, rows, words=(3,))}</div>")
    if not charts:
        return []
    content = f'<div class="charts">{"".join(charts)}</div>'
    return [Section(heading="Other batches, other clusters", content=content)]


def _searched(
    asked: Iterable[tuple[float, UniformRequest]],
) -> list[tuple[float, PricedRun, UniformRequest]]:
    """Return the fastest plan of each question, for questions that have one."""
    from search.planning.uniform.answer import answer

    found = []
    for x, question in asked:
        try:
            best = answer(question).fastest
        except InputError:
            continue  # for example a batch that no data-parallel degree divides
        if best is not None:
            found.append((x, best, question))
    return found


def _asked(question: UniformRequest, best: EngineResult, nodes: int, batch: int) -> UniformRequest:
    """Return the question for one engine with another number of nodes or global batch."""
    world = nodes * question.gpus_per_node
    job = replace(question.job, world=world, global_batches=(batch,))
    return replace(
        question,
        job=job,
        num_nodes=nodes,
        engines=(best.engine,),
        seconds=_SECONDS,
        top=0,
        within=0.0,
    )


def _inputs(question: UniformRequest, best: EngineResult) -> Iterator[tuple[str, str]]:
    spec, job = question.spec, question.job
    yield "model", f"{spec.name}, {spec.num_layers} layers, {job.seq:,} tokens per sequence"
    world = f"{question.num_nodes} x {question.gpus_per_node} {question.card.name}"
    yield "hardware", f"{world}, {format_bytes(question.card.memory_bytes)} each"
    yield "software stack", best.target.machine.stack.name
    yield "site", "none" if question.site is None else question.site.name
    yield "allowed OOM probability", format_probability(question.oom_risk)
    if words := " ".join(job.training.options):
        yield "training", words

"""What a page shows of launches with one set of degrees: searched, evaluated or checked.

The step and the memory are those of one `Assessment`; beside it stand the other launches that a
search has found, and what other batches and clusters would give, which is priced here on demand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from autopar.errors import InputError
from autopar.price.account import account_of
from autopar.price.risk import few_runs_of, odds_of_any, reserved_interval
from autopar.records import replace
from autopar.units import GIB, format_bytes, format_odds, format_seconds
from search.check.assessment import Assessment, Target
from search.show.pictures.charts import Point, Series, lines, scatter, table
from search.show.pictures.memory import launch_memory
from search.show.pictures.page import Fact, Page, Section
from search.show.pictures.timeline import launch_timeline

if TYPE_CHECKING:
    from search.planning.uniform.answer import Answer, EngineAnswer, Question
    from search.planning.uniform.solve import Solution

_TERMS = {
    "gemm": "products",
    "attention": "attention",
    "memory": "elementwise kernels",
    "cast": "casts to 8 bits or fewer",
    "recompute": "recomputation",
    "tensor": "tensor parallel",
    "context": "context parallel",
    "experts": "dispatch and combine",
    "transfer": "transfers between stages",
    "host": "waits for the host",
    "offload": "copies to and from the host",
    "sharding": "gather and scatter of weights (ZeRO-3)",
    "bubble": "pipeline bubble",
    "gradients": "gradients and new weights",
    "optimizer": "optimizer",
    "stragglers": "stragglers",
}
_BATCHES = (0.25, 0.5, 2.0, 4.0)
_CLUSTERS = (0.25, 0.5, 2.0, 4.0)
"""Other batches and numbers of machines whose fastest launch is looked for, over the question's."""
_SECONDS = 5.0
"""Of CPU that each of these searches may take."""


def answer_page(answer: Answer, *, curves: bool) -> Page:
    """Return the page of the best launch of a search, or of the one that was evaluated.

    curves : also search for other batches and numbers of machines.
    """
    best = answer.best
    assert best is not None, "there is a launch to show"
    solution = best.best
    assert solution is not None, "the best trainer has one"
    searched = best.solved is not None and best.solved.effort.degrees > 1
    question = answer.question
    page = _page(
        _counted(solution.assessment, best.target),
        best.target,
        title=question.title,
        line=f"{best.engine.title}: {_line(question, solution)}",
        state=_state(best) if searched else "a launch that was given, priced",
    )
    sections = [
        Section(heading="Alternatives", content=content)
        for content in [_alternatives(answer, best, solution)]
        if content
    ]
    if curves:
        sections += _curves(question, best, solution)
    return replace(
        page,
        sections=tuple(sections),
        assumptions=question.assumed,
        inputs=tuple(_inputs(question, best)),
        left_out=_left_out(searched=searched),
    )


def checked_page(assessment: Assessment, target: Target, *, title: str, line: str) -> Page:
    """Return the page of a launch that a file holds; raises InputError where it has no step."""
    found = _counted(assessment, target)
    return _page(found, target, title=title, line=line, state="a launch that was read, not run")


def _line(question: Question, solution: Solution) -> str:
    return solution.choice.line(question.job.world, experts=question.job.model.experts is not None)


def _state(best: EngineAnswer) -> str:
    solved = best.solved
    assert solved is not None, "it was searched"
    number = f"{solved.effort.choices:,} launches"
    if solved.complete:
        return f"the fastest of {number} that fits, proven"
    return f"of {number}; time was up: at most {solved.gap * 100:.1f} % slower than the fastest"


def _counted(assessment: Assessment, target: Target) -> Assessment:
    """Return an assessment with the memory of every stage; a search counts the fullest ones."""
    launch = assessment.launch
    if len(assessment.accounts) == launch.degrees.pp:
        return assessment
    known = {account.stage: account for account in assessment.accounts}
    accounts = tuple(
        known.get(stage) or account_of(launch, stage) for stage in range(launch.degrees.pp)
    )
    peaks = [account.peak_bytes for account in accounts]
    odds = odds_of_any(launch, peaks, target.capacity_bytes)
    return replace(assessment, accounts=accounts, odds_of_oom=odds)


def _page(assessment: Assessment, target: Target, *, title: str, line: str, state: str) -> Page:
    launch, step = assessment.launch, assessment.step
    timeline = launch_timeline(assessment, target)
    assert step is not None, "a timeline is of a step"
    odds = [target.odds(launch, account.peak_bytes) for account in assessment.accounts]
    capacity = target.capacity_bytes
    return Page(
        title=title,
        line=line,
        state=state,
        facts=tuple(_facts(assessment, target)),
        timeline=timeline,
        memory=launch_memory(launch, assessment.accounts, timeline, odds),
        budget_bytes=capacity - GIB,
        budget_words=(
            f"The limit is what {format_bytes(capacity)} leave beside 1 GiB for CUDA and NCCL; "
            "bars are what is allocated, and an allocator reserves more."
        ),
        waterfall=tuple(
            (term, _TERMS.get(term, term), value) for term, value in step.terms_s.items()
        ),
        layers=_layers(assessment),
        bounds=tuple(_bounds(assessment, target)),
        intervals=tuple(_intervals(assessment, target)),
    )


def _facts(assessment: Assessment, target: Target) -> Iterator[Fact]:
    step, interval = assessment.step, assessment.interval_s
    assert step is not None, "a timeline is of a step"
    low, high = map(format_seconds, interval or (step.total_s, step.total_s))
    yield Fact(
        label="step",
        value=format_seconds(step.total_s),
        note=f"{low} to {high} for 9 of 10 published runs" if interval else "",
    )
    degrees = assessment.launch.degrees
    gpus = degrees.tp * degrees.cp * degrees.pp * degrees.dp
    rate = assessment.tokens_per_s or 0.0
    between = ""
    if interval is not None:
        # the slowest step has the lowest rate
        least, most = (step.total_s / end for end in reversed(interval))
        between = f"{rate * least:,.0f} to {rate * most:,.0f}; "
    yield Fact(
        label="tokens/s per GPU",
        value=f"{rate:,.0f}",
        note=f"{between}{rate * gpus:,.0f} on {gpus:,} GPUs",
    )
    if assessment.mfu is not None:
        share = assessment.mfu * 100
        between = "" if interval is None else f"{share * least:.1f} to {share * most:.1f}, "
        yield Fact(label="MFU", value=f"{share:.1f} %", note=f"{between}of the 16-bit peak")
    fullest = assessment.fullest
    low, high = map(format_bytes, reserved_interval(assessment.launch, fullest.peak_bytes))
    yield Fact(
        label="peak memory",
        value=format_bytes(fullest.peak_bytes),
        note=f"reserved {low} to {high} of {format_bytes(target.capacity_bytes)}",
    )
    yield Fact(
        label="out of memory",
        value=format_odds(assessment.odds_of_oom),
        note=f"odds; {format_odds(target.oom_risk)} is asked for",
    )


def _layers(assessment: Assessment) -> str:
    degrees = assessment.launch.degrees
    step = assessment.step
    assert step is not None, "a timeline is of a step"
    rows = []
    for at, stage in enumerate(degrees.chunks):
        parts = []
        for embeds, layers, mtp, head in stage:
            span = "no layer" if not layers else f"{layers[0]}-{layers[-1]}"
            span = span if len(layers) != 1 else f"{layers[0]}"
            ends = [*(["embedding"] if embeds else []), span, *(["MTP"] if mtp else [])]
            parts.append(" + ".join([*ends, *(["head"] if head else [])]))
        number = sum(len(chunk[1]) for chunk in stage)
        longest = step.stage_s[at] / max(step.stage_s)
        rows.append((str(at), str(number), f"{longest * 100:.1f} %", "; ".join(parts)))
    return table(("stage", "layers", "time of the longest", "chunks"), rows, words=(0, 3))


def _bounds(assessment: Assessment, target: Target) -> Iterator[str]:
    step = assessment.step
    assert step is not None, "a timeline is of a step"
    total = step.total_s
    ranked = sorted(step.terms_s.items(), key=lambda item: -item[1])[:3]
    told = ", ".join(f"{_TERMS.get(name, name)} {s / total * 100:.0f} %" for name, s in ranked)
    yield f"time: {told} of the step"
    times = step.stage_s
    if len(times) > 1:
        longest = max(range(len(times)), key=times.__getitem__)
        mean = sum(times) / len(times)
        yield (
            f"pipeline: stage {longest} is the longest, {(times[longest] / mean - 1) * 100:.1f} % "
            f"above the mean; the bubble is {step.terms_s['bubble'] / total * 100:.1f} % of the "
            f"step with {assessment.launch.micro_batches:,} micro-batches"
        )
    sends = ("tensor", "context", "experts", "transfer", "sharding", "gradients")
    moved = sum(step.terms_s[name] for name in sends)
    yield f"communication that nothing hides: {moved / total * 100:.1f} % of the step"
    fullest = assessment.fullest
    largest = sorted(fullest.peak, key=lambda term: -term.num_bytes)[:2]
    parts = " and ".join(f"{term.name} {format_bytes(term.num_bytes)}" for term in largest)
    free = target.capacity_bytes - GIB - fullest.peak_bytes
    yield (
        f"memory: stage {fullest.stage} is the fullest, with {parts}; "
        + (f"{format_bytes(free)} are free" if free >= 0 else f"{format_bytes(-free)} are missing")
    )


def _intervals(assessment: Assessment, target: Target) -> Iterator[str]:
    runs, interval = assessment.runs, assessment.interval_s
    if runs is not None and interval is not None:
        low, high = map(format_seconds, interval)
        kind = "mixtures" if runs.experts else "dense models"
        yield (
            f"step: {low} to {high}, as 9 of 10 of {runs.rows} published runs of {kind} with "
            f"{runs.stack} were off ({runs.sources} sources)"
        )
    fullest = assessment.fullest
    low, high = map(format_bytes, reserved_interval(assessment.launch, fullest.peak_bytes))
    seldom = ", ".join(few_runs_of(assessment.launch))
    wide = f"; wider than most, as few measured runs have {seldom}" if seldom else ""
    yield f"memory: 9 of 10 launches with such a peak reserve {low} to {high}{wide}"
    if not target.site_known:
        yield "the cluster was not probed: times are those of its datasheet (autopar profile site)"


# --------------------------------------------------------------------------------------------------
# What else there is


def _alternatives(answer: Answer, best: EngineAnswer, chosen: Solution) -> str:
    """Return the other launches as a chart and a table, empty where there are none."""
    question, series, rows = answer.question, [], []
    for engine in answer.engines:
        if engine.solved is None or engine.best is None:
            continue
        points = []
        for solution in engine.solved.solutions:
            rate = solution.assessment.tokens_per_s or 0.0
            peak = solution.assessment.fullest.peak_bytes
            line = _line(question, solution)
            words = f"{engine.engine.name}: {line}, {rate:,.0f} tokens/s per GPU"
            points.append(
                Point(
                    x=peak / GIB,
                    y=rate,
                    words=f"{words}, {format_bytes(peak)}",
                    chosen=solution is chosen,
                )
            )
            share = solution.samples_per_s / chosen.samples_per_s - 1
            rows.append(
                (
                    -share,
                    (
                        line,
                        engine.engine.name,
                        f"{rate:,.0f}",
                        "" if solution is chosen else f"{share * 100:+.2f} %",
                        format_bytes(peak),
                        format_odds(solution.assessment.odds_of_oom),
                    ),
                )
            )
        series.append(Series(name=engine.engine.title, points=tuple(points)))
    if len(rows) < 2:
        return ""
    rows.sort(key=lambda row: row[0])
    heads = ("launch", "trainer", "tokens/s/GPU", "vs best", "peak", "OOM")
    listed = table(heads, [row for _, row in rows], words=(0, 1))
    chart = scatter(
        series,
        title="Throughput over peak memory",
        x_label="allocated at the peak, GiB",
        y_label="tokens/s per GPU",
        limit=((best.target.capacity_bytes - GIB) / GIB, "limit"),
    )
    none = [one for one in answer.engines if one.best is None]
    refused = "".join(f"<p>{one.engine.title} has none: {one.reason}</p>" for one in none)
    return f'<div class="charts">{chart}</div>{listed}{refused}'


def _curves(question: Question, best: EngineAnswer, solution: Solution) -> list[Section]:
    """Return what other batches and numbers of machines give, each with its own fastest launch."""
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
        if (nodes * factor).is_integer() and nodes * factor >= 1
    )
    charts = []
    for found, title, label in (
        (batches, "Throughput over the global batch", "sequences of a step"),
        (clusters, f"Throughput over GPUs, global batch {batch:,}", "GPUs"),
    ):
        if len(found) < 2:
            continue
        found.sort(key=lambda one: one[0])
        points = tuple(
            Point(
                x=x,
                y=one.assessment.tokens_per_s or 0.0,
                words=f"{x:,.0f}: {_line(asked, one)}, "
                f"{one.assessment.tokens_per_s or 0.0:,.0f} tokens/s per GPU",
                chosen=one is solution,
            )
            for x, one, asked in found
        )
        chart = lines(
            [Series(name="", points=points)],
            title=title,
            x_label=label,
            y_label="tokens/s per GPU",
        )
        rows = [
            (
                f"{x:,.0f}",
                f"{one.assessment.tokens_per_s or 0.0:,.0f}",
                format_seconds(one.choice.global_batch / one.samples_per_s),
                _line(asked, one),
            )
            for x, one, asked in found
        ]
        heads = (label, "tokens/s/GPU", "step", f"fastest launch of {best.engine.title}")
        charts.append(f"<div>{chart}{table(heads, rows, words=(3,))}</div>")
    if not charts:
        return []
    content = f'<div class="charts">{"".join(charts)}</div>'
    return [Section(heading="Other batches, other clusters", content=content)]


def _searched(
    asked: Iterable[tuple[float, Question]],
) -> list[tuple[float, Solution, Question]]:
    """Return the fastest launch of each question that has one."""
    from search.planning.uniform.answer import answer

    found = []
    for x, question in asked:
        try:
            best = answer(question).best
        except InputError:
            continue  # such as a batch that no data degree divides
        if best is not None and best.best is not None:
            found.append((x, best.best, question))
    return found


def _asked(question: Question, best: EngineAnswer, nodes: int, batch: int) -> Question:
    """Return the question of one trainer with another cluster or batch."""
    world = nodes * question.gpus_per_node
    job = replace(question.job, world=world, global_batches=(batch,))
    return replace(
        question, job=job, num_nodes=nodes, engines=(best.engine,), seconds=_SECONDS, top=0
    )


def _inputs(question: Question, best: EngineAnswer) -> Iterator[tuple[str, str]]:
    spec, job = question.spec, question.job
    yield "model", f"{spec.name}, {spec.num_layers} layers, {job.seq:,} tokens a sequence"
    world = f"{question.num_nodes} x {question.gpus_per_node} {question.card.name}"
    yield "hardware", f"{world}, {format_bytes(question.card.memory_bytes)} each"
    yield "software", best.target.machine.stack.name
    yield "site", "none" if question.site is None else question.site.name
    yield "odds of running out of memory, at most", format_odds(question.oom_risk)
    if words := job.training.words:
        yield "training", words


def _left_out(*, searched: bool) -> tuple[str, ...]:
    drawn = (
        "the timeline has one rank of each stage: all ranks of a stage are taken to be alike, "
        "stragglers are one wait"
    )
    if not searched:
        return (drawn,)
    return (
        "CUDA graphs, and degrees, recomputation or offloading by layer, were not searched",
        drawn,
    )

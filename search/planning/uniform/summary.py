"""Conversion of uniform search results into `autopar.answer.Answer`, the input of all reports."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import asdict

from autopar.answer import (
    Alternative,
    Answer,
    EngineBest,
    MemoryTerm,
    OtherPrecision,
    Price,
    Priced,
    StagePrice,
)
from autopar.price.account import Account
from autopar.price.assessment import Assessment, Target
from autopar.price.oom_risk import SAFE_RISK, rarely_validated, reserved_range
from autopar.rates.accuracy import probability_faster
from autopar.records import replace
from autopar.run.run import Run
from autopar.units import GIB, format_bytes, format_count, format_probability, format_seconds
from search.engines.candidate import PRECISIONS, Constraints
from search.engines.space import adapter_limits
from search.planning.uniform.answer import (
    EngineResult,
    UniformRequest,
    UniformResult as Launches,
)
from search.planning.uniform.best_first import PricedRun, VariantResult, family_of
from search.planning.uniform.choice import OOM_TRAIT, avoided
from search.planning.uniform.space import CONTEXT_KINDS, MICRO_BATCHES


def proof_of(found: Launches, solved: VariantResult) -> str:
    """Return the proven gap to the best plan of all engines in words; solved : of the fastest."""
    if solved.complete:
        return f"proven (gap {found.gap * 100:.3g} %)"
    return f"stopped by the time limit, at most {solved.gap * 100:.1f} % slower than the best"


def summary_of(
    found: Launches, more: Sequence[tuple[str, str]] = (), *, full: bool = False
) -> Answer:
    """Return the answer of a uniform search, or of the evaluation of one uniform plan.

    more : (label, text) of further figures of the best plan.
    full : True if the search compares plans with full rows, and rows of the run have many lengths.
    """
    one = found.engines[0]
    solved = one.solved
    assert solved is not None, "the fastest engine has a plan"
    question, effort = found.question, solved.effort
    proof = proof_of(found, solved)
    if full and solved.complete and not found.gap:
        proof = "proven for full rows"
    not_searched = _not_searched(found, one)
    options = format_count(len(not_searched), "option")
    return Answer(
        title=question.title,
        best=_with_rows(priced_of(found, one), more),
        others=tuple(_alternatives(found, one)),
        by_engine=found.lines,
        tokens=question.job.seq / question.job.world,
        gpu_hour_price=question.price,
        searched=f"best of {_number(effort.choices)} plans, {proof}; {options} not searched",
        space=(
            f"All uniform plans of {one.engine.title} with {_micro_batches(question.fixed)}, "
            f"{', '.join(question.fixed.precision)}: {effort.degrees:,} legal combinations of "
            f"degrees, {effort.choices:,} plans with their stages, schedules, ZeRO stages and "
            f"recomputation; {proof}. Estimated: {effort.timed:,} step times and "
            f"{effort.counted:,} memories; bounds exclude the others."
        ),
        not_searched=not_searched,
        assumed=question.assumed,
        effort=f"CPU time of all engines: {found.cpu_s:.2g} s",
    )


def _with_rows(plan: Priced, more: Sequence[tuple[str, str]]) -> Priced:
    return replace(plan, rows=(*plan.rows, *more)) if more else plan


def _number(plans: int) -> str:
    """Return a number of plans as text, in billions from 10^9."""
    billion = 10**9
    return f"{plans:,}" if plans < billion else f"{plans / billion:,.1f} billion"


def best_of(question: UniformRequest, one: EngineResult) -> EngineBest:
    """Return the fastest plan of an engine, or if none fits, the reason and the smallest plan."""
    from search.planning.uniform.files import degrees_entry

    if one.fastest is not None:
        return EngineBest(
            engine=one.engine.name,
            samples_per_s=one.fastest.samples_per_s,
            launch=asdict(degrees_entry(one.fastest.choice, question.job.world)),
            words=one.fastest.line,
            broken=adapter_limits(one.engine, question.job),
        )
    line = EngineBest(
        engine=one.engine.name, samples_per_s=None, reason=one.reason, broken=one.broken
    )
    solved = one.solved
    if solved is None or solved.smallest is None or solved.shortage is None or solved.shortage.host:
        return line
    return replace(
        line,
        missing_bytes=solved.shortage.missing_bytes,
        smallest=solved.smallest.line,
    )


def priced_of(found: Launches, one: EngineResult, solution: PricedRun | None = None) -> Priced:
    """Return a uniform plan of an engine with time and memory; by default that of the answer."""
    solution = solution or one.best
    assert solution is not None, "the engine has a plan"
    rows = []
    if one.chosen is not None and solution is one.chosen:
        rows.append(("Fastest plan", _why_not_fastest(one, one.chosen)))
    other = None
    if one.other_precision is not None and solution is one.best:
        other = _other_precision(solution, one.other_precision)
    if solution.assessment.host_bytes > 0 and solution is one.best:
        without, there = "", f"{format_bytes(solution.assessment.host_bytes)} per GPU"
        if one.without_host is not None:
            share = solution.samples_per_s / one.without_host.samples_per_s - 1.0
            # a plan that the choice found less safe is the fastest one, which has its own row
            without = f"; --offload-activations none is {share * 100:.1f} % slower" * (share > 0)
        rows.append(("Host memory", there + without))
    if one.safer is not None and solution is one.best:
        share = solution.samples_per_s / one.safer.samples_per_s - 1.0
        peak = format_bytes(one.safer.assessment.fullest.peak_bytes)
        safer = f"--oom-risk {SAFE_RISK} is {share * 100:.1f} % slower and needs {peak}"
        rows.append(("Safer plan", safer))
    return Priced(
        engine=one.engine.name,
        title=one.engine.title,
        words=solution.line,
        uniform=True,
        price=price_of(solution.assessment, one.target),
        rows=tuple(rows),
        other_precision=other,
        unequal_stages=_unequal_stages(solution),
        key=solution.choice,
        fastest=solution is not one.chosen,
    )


def _why_not_fastest(one: EngineResult, chosen: PricedRun) -> str:
    """Return the gain of the fastest plan over the chosen one, and its costs."""
    fastest = one.fastest
    assert fastest is not None, "the chosen plan is nearly as fast"
    share = fastest.samples_per_s / chosen.samples_per_s - 1.0
    gain = f"{share * 100:.1f} % faster" if share >= 0.0005 else "as fast"
    risk = f"an {OOM_TRAIT} of {format_probability(fastest.assessment.odds_of_oom)}"
    costs = [risk if name == OOM_TRAIT else name for name in avoided(fastest, chosen)]
    return f"{gain}, with {' and '.join(costs)} (--within 0)"


def _alternatives(found: Launches, one: EngineResult) -> list[Alternative]:
    """Return the other plans of an engine, each with the probability that the best is faster."""
    assert one.solved is not None, "the engine has a plan"
    best = one.best
    assert best is not None, "the engine has a plan"
    runs = best.assessment.runs
    listed = []
    for other in one.solved.solutions:
        if family_of(other.choice) == family_of(best.choice):
            continue
        share = best.samples_per_s / other.samples_per_s
        odds = None if runs is None else probability_faster(share, 1.0, runs.plan_spread)
        peak = other.assessment.fullest.peak_bytes
        listed.append(Alternative(other.line, other.samples_per_s, odds, peak))
    return listed


def _other_precision(solution: PricedRun, other: PricedRun) -> OtherPrecision:
    """Return the throughput gain and the saved step seconds of a plan over another precision."""
    own, its = solution.assessment.step, other.assessment.step
    assert own is not None, "a solution has a step time"
    assert its is not None, "every solution has one"
    # Global batches may differ: times are scaled to the same number of sequences.
    scale = solution.choice.global_batch / other.choice.global_batch
    return OtherPrecision(
        precision=other.choice.precision,
        gain=solution.samples_per_s / other.samples_per_s - 1.0,
        terms_s={name: scale * its.terms_s[name] - own.terms_s[name] for name in own.terms_s},
    )


def _unequal_stages(solution: PricedRun) -> str:
    """Return the layers of every stage and chunk as text; empty if all chunks are equal."""
    stages = [[len(chunk[1]) for chunk in stage] for stage in solution.choice.chunks]
    if len(stages) == 1 or len({size for stage in stages for size in stage}) == 1:
        return ""
    return ", ".join("+".join(map(str, stage)) for stage in stages)


def _micro_batches(fixed: Constraints) -> str:
    """Return the searched micro-batch sizes as text."""
    if fixed.micro_batch is None:
        return f"micro-batch sizes of powers of two up to {MICRO_BATCHES[-1]}"
    return f"micro-batch sizes {', '.join(map(str, sorted({*fixed.micro_batch})))}"


def _not_searched(found: Launches, one: EngineResult) -> tuple[str, ...]:
    """Return the kinds of uniform plans that were not searched, as text."""
    fixed, engine = found.question.fixed, one.engine
    kinds = []
    has = engine.precisions(found.question.card.gpu)
    others = [name for name in PRECISIONS if name in has and name not in fixed.precision]
    if others:
        kinds.append(f"GEMMs in {', '.join(others)} (--precision any)")
    if fixed.micro_batch is None:
        kinds.append("micro-batch sizes other than powers of two (--micro-batch-size)")
    if fixed.cp_kind is None and found.question.job.model.first_sparse is None:
        context = [name for name in engine.context if name not in CONTEXT_KINDS]
        kinds += [f"context parallelism by {name} (--cp-kind {name})" for name in context]
    named = [f"--{name}" for name in fixed.options]
    if named:
        kinds.append(f"plans excluded by {', '.join(named)}")
    limits = (f"{one.problem} ({one.id})" for one in adapter_limits(engine, found.question.job))
    return (*kinds, *limits, *engine.left_out)


PATCHES = "tokens: patches, and text of joint blocks; no text encoder, no VAE"
"""Tokens of models of images and videos, and models around them that are not part of a plan."""


def price_of(assessment: Assessment, target: Target) -> Price:
    """Return step time, interval and memory of an assessment as a record for reports."""
    run, step, runs = assessment.run, assessment.step, assessment.runs
    verdict = "fits" if assessment.fits(target) else "does not fit"
    if not target.host_fits(assessment.host_bytes):
        verdict += ": offload needs more host memory than there is"
    basis, interval, notes = [], "", []
    if runs is not None and assessment.interval_s is not None:
        # Short enough for one line of a first screen.
        estimate = "datasheets" if runs.experts else "datasheet estimate"
        links = "links of a measured site" if target.site_known else estimate
        basis = [f"{links}; interval from {runs.basis}"]
        if run.model.has_patches:
            basis.append(PATCHES)
        low, high = map(format_seconds, assessment.interval_s)
        what = "MoE" if runs.experts else "dense"
        interval = (
            f"{low} to {high} (90 %), {runs.basis}"
            if runs.unlike
            else f"{low} to {high} (90 %), from the errors on {runs.rows} published {runs.stack} "
            f"runs of {what} models ({runs.sources} sources)"
        )
    if not target.site_known:
        notes.append("the cluster was not probed: times use its datasheet (autopar profile site)")
    return Price(
        throughput=assessment.throughput,
        samples_per_s=0.0 if step is None else run.strategy.global_batch / step.total_s,
        terms_s={} if step is None else step.terms_s,
        stage_s=() if step is None else tuple(step.stage_s),
        global_batch=run.strategy.global_batch,
        micro_batches=run.strategy.micro_batches,
        stages=tuple(_stage_price(run, one, target) for one in assessment.accounts),
        oom_probability=assessment.odds_of_oom,
        oom_risk=target.oom_risk,
        verdict=verdict,
        host_bytes=assessment.host_bytes,
        host_capacity_bytes=target.host_capacity_bytes,
        basis=tuple(basis),
        interval=interval,
        notes=tuple(notes),
        reserve_bytes=GIB,
        reserve_of="CUDA and NCCL",
        few_runs=tuple(rarely_validated(run)),
    )


def _stage_price(run: Run, account: Account, target: Target) -> StagePrice:
    return StagePrice(
        stage=account.stage,
        steady_bytes=account.states_bytes,
        peak_bytes=account.peak_bytes,
        reserved_bytes=reserved_range(run, account.peak_bytes),
        budget_bytes=target.capacity_bytes,
        oom_probability=target.oom_probability(run, account.peak_bytes),
        terms=tuple(MemoryTerm(one.name, one.num_bytes, one.switch) for one in account.peak),
    )

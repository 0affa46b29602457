"""The answer of a uniform search as the record that reports, pages and documents share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autopar.answer import Alternative, Answer, MemoryTerm, Price, Priced, StagePrice
from autopar.price.account import Account
from autopar.price.assessment import Assessment, Target
from autopar.price.risk import few_runs_of, reserved_interval
from autopar.rates.accuracy import probability_faster
from autopar.run.run import Run
from autopar.units import GIB, format_bytes, format_seconds
from search.engines.choice import PRECISIONS, Fixed
from search.planning.uniform.space import CONTEXT_KINDS, MICRO_BATCHES

if TYPE_CHECKING:
    from search.planning.uniform.answer import Answer as Launches, EngineAnswer, Question
    from search.planning.uniform.solve import Solution

_SHOWN_TERMS = 4
"""Largest number of step-time terms shown for the difference of two precisions."""


def summary_of(found: Launches) -> Answer:
    """Return the record of a uniform search, or of one uniform plan that was priced."""
    one = found.engines[0]
    solved = one.solved
    assert solved is not None, "the fastest engine has a plan"
    question, effort = found.question, solved.effort
    proof = "proven"
    whole = "bound and gap: 0 %"
    if not solved.complete:
        share = f"at most {solved.gap * 100:.1f} % slower than the fastest"
        proof, whole = f"time was up, {share}", f"time was up: {share}"
    not_searched = _not_searched(found, one)
    searched = f"{effort.choices:,} launches, {proof}"
    return Answer(
        title=question.title,
        best=priced_of(found, one),
        others=tuple(_alternatives(found, one)),
        by_engine=found.lines,
        tokens=question.job.seq / question.job.world,
        gpu_hour_price=question.price,
        searched=f"{searched}; {len(not_searched)} kinds of them left out",
        space=(
            f"all launches of {one.engine.title} with one set of degrees, "
            f"{_micro_batches(question.fixed)}, {', '.join(question.fixed.precision)}: "
            f"{effort.degrees:,} legal combinations of degrees, {effort.choices:,} launches with "
            f"their stages, schedules, ZeRO stages and recomputation; {whole} "
            f"({effort.timed:,} steps priced, {effort.counted:,} memories counted, the others "
            "excluded by bounds)"
        ),
        not_searched=not_searched,
        assumed=question.assumed,
        effort=f"{found.cpu_s:.2g} s of CPU for all engines",
    )


def words_of(question: Question, solution: Solution) -> str:
    """Return a uniform plan in one line."""
    job = question.job
    return solution.choice.line(job.world, experts=job.model.experts is not None)


def priced_of(found: Launches, one: EngineAnswer, solution: Solution | None = None) -> Priced:
    """Return a uniform plan of an engine with its price; by default its fastest."""
    solution = solution or one.best
    assert solution is not None, "the engine has a plan"
    rows = []
    if one.other_precision is not None and solution is one.best:
        rows.append(("precision", _precision_words(solution, one.other_precision)))
    if one.without_host is not None and solution is one.best:
        share = solution.samples_per_s / one.without_host.samples_per_s - 1.0
        there = format_bytes(solution.assessment.host_bytes)
        without = f"with none {share * 100:.1f} % slower: --offload-activations none"
        rows.append(("host", f"{there} a GPU; {without}"))
    return Priced(
        engine=one.engine.name,
        title=one.engine.title,
        words=words_of(found.question, solution),
        uniform=True,
        price=price_of(solution.assessment, one.target),
        rows=tuple(rows),
        unequal_stages=_unequal_stages(solution),
        key=solution.choice,
    )


def _alternatives(found: Launches, one: EngineAnswer) -> list[Alternative]:
    assert one.solved is not None, "the engine has a plan"
    first, *others = one.solved.solutions
    runs = first.assessment.runs
    listed = []
    for other in others:
        share = first.samples_per_s / other.samples_per_s
        odds = None if runs is None else probability_faster(share, 1.0, runs.plan_spread)
        peak = other.assessment.fullest.peak_bytes
        listed.append(Alternative(words_of(found.question, other), other.samples_per_s, odds, peak))
    return listed


def _precision_words(solution: Solution, other: Solution) -> str:
    """Return the gain of the chosen precision over the other kind, and the terms that make it."""
    own, its = solution.assessment.step, other.assessment.step
    assert own is not None, "a solution has a step time"
    assert its is not None, "every solution has one"
    # global batches may differ: times are scaled to the same number of sequences
    scale = solution.choice.global_batch / other.choice.global_batch
    later = {name: scale * its.terms_s[name] - own.terms_s[name] for name in own.terms_s}
    shown = sorted(later, key=lambda name: -abs(later[name]))[:_SHOWN_TERMS]
    differing = ", ".join(
        f"{name} {'+' if later[name] > 0 else '-'}{format_seconds(abs(later[name]))}"
        for name in shown
        if abs(later[name]) >= 0.0005 * own.total_s
    )
    share = solution.samples_per_s / other.samples_per_s - 1.0
    return f"in {other.choice.precision} the fastest is {share * 100:.1f} % slower: {differing}"


def _unequal_stages(solution: Solution) -> str:
    stages = [[len(chunk[1]) for chunk in stage] for stage in solution.choice.chunks]
    if len(stages) == 1 or len({size for stage in stages for size in stage}) == 1:
        return ""
    return ", ".join("+".join(map(str, stage)) for stage in stages)


def _micro_batches(fixed: Fixed) -> str:
    """Return the micro-batches that were searched."""
    if fixed.micro_batch is None:
        return f"micro-batches of powers of two up to {MICRO_BATCHES[-1]}"
    return f"micro-batches of {', '.join(map(str, sorted({*fixed.micro_batch})))}"


def _not_searched(found: Launches, one: EngineAnswer) -> tuple[str, ...]:
    """Return the kinds of uniform plans that were not searched."""
    fixed, engine = found.question.fixed, one.engine
    kinds = []
    has = engine.precisions(found.question.card.name)
    others = [name for name in PRECISIONS if name in has and name not in fixed.precision]
    if others:
        kinds.append(f"products in {', '.join(others)} (--precision any)")
    if fixed.micro_batch is None:
        kinds.append("micro-batches that are no power of two (--micro-batch-size)")
    if fixed.cp_kind is None:
        context = [name for name in engine.context if name not in CONTEXT_KINDS]
        kinds += [f"{name} of context ranks (--cp-kind {name})" for name in context]
    named = [f"--{name}" for name in fixed.options]
    if named:
        kinds.append(f"what {', '.join(named)} exclude{'s' if len(named) == 1 else ''}")
    return (*kinds, *engine.left_out)


def price_of(assessment: Assessment, target: Target) -> Price:
    """Return an assessment as the record that reports share."""
    run, step, runs = assessment.run, assessment.step, assessment.runs
    verdict = "fits" if assessment.fits(target) else "does not fit"
    if not target.host_fits(assessment.host_bytes):
        verdict += ": the host has no room for what is to lie there"
    basis, interval, notes = [], "", []
    if runs is not None and assessment.interval_s is not None:
        links = "measured links" if target.site_known else "estimates"
        what = "mixtures" if runs.experts else "runs"
        basis = [f"{links}; in ( ): 9 of 10 of {runs.rows} published {runs.stack} {what}"]
        low, high = map(format_seconds, assessment.interval_s)
        what = "mixtures" if runs.experts else "dense models"
        interval = (
            f"{low} to {high}, as 9 of 10 of {runs.rows} published runs of {what} with "
            f"{runs.stack} were off ({runs.sources} sources)"
        )
    if not target.site_known:
        notes.append(
            "the cluster was not probed: times are those of its datasheet (autopar profile site)"
        )
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
        host_room_bytes=target.host_room_bytes,
        basis=tuple(basis),
        interval=interval,
        notes=tuple(notes),
        reserve_bytes=GIB,
        reserve_of="CUDA and NCCL",
        few_runs=tuple(few_runs_of(run)),
    )


def _stage_price(run: Run, account: Account, target: Target) -> StagePrice:
    low, high = reserved_interval(run, account.peak_bytes)
    return StagePrice(
        stage=account.stage,
        steady_bytes=account.states_bytes,
        peak_bytes=account.peak_bytes,
        reserved_bytes=(low, high),
        budget_bytes=target.capacity_bytes,
        oom_probability=target.odds(run, account.peak_bytes),
        terms=tuple(MemoryTerm(one.name, one.num_bytes, one.switch) for one in account.peak),
    )

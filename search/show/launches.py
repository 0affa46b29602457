"""Shows the answer of a search over launches to a person, from its first screen to all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.command.console import Console, escape
from autopar.command.show import make_table, print_heading, print_item, print_line
from autopar.price.risk import few_runs_of, reserved_interval
from autopar.rates.accuracy import probability_faster
from autopar.records import replace
from autopar.units import GIB, format_bytes, format_odds, format_seconds
from search.engines.choice import PRECISIONS, Fixed
from search.planning.uniform.space import CONTEXT_KINDS, MICRO_BATCHES
from search.show.check import show_peak
from search.show.headline import (
    NEXT,
    SCREEN_HEIGHT,
    Headline,
    figure_rows,
    layers_line,
    print_rows,
    rows_height,
    shortened,
    show_engines,
)

if TYPE_CHECKING:
    from autopar.price.account import Account
    from search.check.assessment import Target
    from search.planning.uniform.answer import Answer, EngineAnswer
    from search.planning.uniform.solve import Solution
    from search.questions.suggestions import Remedy


def show_answer(console: Console, answer: Answer, *, verbose: bool = True, goal: str = "") -> None:
    """Print the best launch in the units of logs, each engine's own, and what they rest on.

    verbose : with terms, stages, other degrees and the whole of what was searched; else what is on
    one screen. goal : of what clusters this one was chosen, in a sentence.
    """
    best = answer.best
    assert best is not None, "there is a launch to show"
    solution = best.best
    assert solution is not None, "the best trainer has one"
    console.print(escape(answer.question.title), style="bold", soft_wrap=True)
    first = launch_headline(answer, best, f"fastest uniform plan: {best.engine.title}")
    if gain := layers_line(answer.lines):
        first = replace(first, rows=[*first.rows, ("per layer", gain)])
    first.show(console)
    footer = [("rests on", rests_on(best, solution)), ("fastest of", _searched(answer, best))]
    if answer.question.assumed:
        assumed = (text.partition(" (")[0] for text in answer.question.assumed)
        footer.append(("assumed", ", ".join(assumed)))
    if goal:
        footer.append(("goal", goal))
    footer.append(("next", NEXT))
    # blank lines in front of headline, table and footer, and the title
    used = 4 + first.height(console) + rows_height(console, footer)
    room = None if verbose else SCREEN_HEIGHT - used
    if answer.lines:
        job = answer.question.job
        show_engines(console, answer.lines, job.seq / job.world, room=room)
    else:
        _show_alternatives(console, answer, best, room)
    console.print()
    print_rows(console, footer)
    if not verbose:
        return
    _show_terms(console, solution)
    _show_memory(console, best, solution)
    if answer.lines:
        _show_alternatives(console, answer, best)
    _show_space(console, answer, best)


def show_evaluated(console: Console, answer: Answer, *, explained: bool = False) -> None:
    """Print one launch that somebody has, its time and memory, and whether it fits.

    explained : with the terms of the fullest stage.
    """
    (one,) = answer.engines
    assert one.best is not None, "a launch is shown"
    console.print(escape(answer.question.title), style="bold", soft_wrap=True)
    launch_headline(answer, one, f"launch: {one.engine.title}").show(console)
    assessment, risk = one.best.assessment, one.target.oom_risk
    odds = format_odds(assessment.odds_of_oom)
    says = "fits" if assessment.fits(one.target) else "does not fit"
    if not one.target.host_fits(assessment.host_bytes):
        says += ": the host has no room for what is to lie there"
    print_line(
        console, f"{says}: out of memory {odds}, {format_odds(risk)} is asked for", style="bold"
    )
    print_rows(console, [("rests on", rests_on(one, one.best))])
    _show_terms(console, one.best)
    _show_memory(console, one, one.best)
    if explained:
        show_peak(console, one.best.assessment.fullest)


def _line(answer: Answer, solution: Solution) -> str:
    job = answer.question.job
    return solution.choice.line(job.world, experts=job.model.experts is not None)


def launch_headline(answer: Answer, one: EngineAnswer, heading: str) -> Headline:
    """Return a trainer's fastest launch and its figures."""
    solution = one.best
    assert solution is not None, "the trainer has one"
    found = solution.assessment.throughput
    assert found is not None, "a solution has a step time"
    rows = figure_rows(found, solution.samples_per_s, answer.question.price)
    rows.append(_memory_row(one, solution))
    if one.other_precision is not None:
        rows.append(("precision", _precision_words(solution, one.other_precision)))
    if one.without_host is not None:
        share = solution.samples_per_s / one.without_host.samples_per_s - 1.0
        there = format_bytes(solution.assessment.host_bytes)
        without = f"with none {share * 100:.1f} % slower: --offload-activations none"
        rows.append(("host", f"{there} a GPU; {without}"))
    return Headline(
        heading=heading,
        line=_line(answer, solution),
        rows=rows,
        samples_per_s=solution.samples_per_s,
    )


def _memory_row(one: EngineAnswer, solution: Solution) -> tuple[str, str]:
    """Return what the fullest stage needs, what there is, and the odds of too little."""
    fullest = solution.assessment.fullest
    low, high = reserved_interval(solution.launch, fullest.peak_bytes)
    words = (
        f"{fullest.peak_bytes / GIB:.2f} of {format_bytes(one.target.capacity_bytes)} "
        f"({low / GIB:.4g} to {high / GIB:.4g} reserved); out of memory "
        f"{format_odds(solution.assessment.odds_of_oom)}"
    )
    return "memory", words


def rests_on(one: EngineAnswer, solution: Solution) -> str:
    """Return what figures are made of, and what their intervals are."""
    runs = solution.assessment.runs
    assert runs is not None, "what has a step time has them"
    what = "mixtures" if runs.experts else "runs"
    links = "measured links" if one.target.site_known else "estimates"
    return f"{links}; in ( ): 9 of 10 of {runs.rows} published {runs.stack} {what}"


def _searched(answer: Answer, best: EngineAnswer) -> str:
    """Return of what a launch is the fastest, in a sentence; all of it is `_show_space`'s."""
    solved = best.solved
    assert solved is not None, "it has a launch"
    proof = (
        "proven"
        if solved.complete
        else f"time was up, at most {solved.gap * 100:.1f} % slower than the fastest"
    )
    left_out = len(_left_out(answer, best))
    return f"{solved.effort.choices:,} launches, {proof}; {left_out} kinds of them left out"


def _show_terms(console: Console, solution: Solution) -> None:
    """Print where the time of a step goes, and the layers of stages where they differ."""
    step = solution.assessment.step
    assert step is not None, "a solution has a step time"
    print_heading(console, "where the time goes")
    terms = sorted(step.terms_s.items(), key=lambda item: -item[1])
    shown = [(name, value / step.total_s) for name, value in terms]
    print_line(
        console,
        ", ".join(f"{name} {share * 100:.1f} %" for name, share in shown if share >= 0.0005),
    )
    layers = _stages(solution)
    if layers:
        print_line(console, f"layers of stages: {layers}")


_SHOWN_TERMS = 4
"""Terms of a step in which two precisions differ most."""


def _precision_words(solution: Solution, other: Solution) -> str:
    """Return what the chosen precision brings, and in which terms, against the other kind."""
    own, its = solution.assessment.step, other.assessment.step
    assert own is not None, "a solution has a step time"
    assert its is not None, "every solution has one"
    # of global batches that differ the time of a sequence counts
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


def _stages(solution: Solution) -> str:
    """Return the layers of stages where they differ, chunk by chunk."""
    stages = [[len(chunk[1]) for chunk in stage] for stage in solution.choice.chunks]
    if len(stages) == 1 or len({size for stage in stages for size in stage}) == 1:
        return ""
    return ", ".join("+".join(map(str, stage)) for stage in stages)


def _show_memory(console: Console, best: EngineAnswer, solution: Solution) -> None:
    print_heading(console, "memory of a GPU")
    table = make_table(
        "stage", "after a step", "peak", "9 of 10 reserve", "out of memory", spaced=True
    )
    launch, target = solution.launch, best.target
    for account in _shown(solution.assessment.accounts):
        low, high = reserved_interval(launch, account.peak_bytes)
        table.add_row(
            str(account.stage),
            format_bytes(account.states_bytes),
            format_bytes(account.peak_bytes),
            f"{format_bytes(low)} to {format_bytes(high)}",
            format_odds(target.odds(launch, account.peak_bytes)),
        )
    console.print(table)
    seldom = ", ".join(few_runs_of(launch))
    capacity = f"of {format_bytes(target.capacity_bytes)}, 1 GiB of it for CUDA and NCCL"
    wide = f"; wider than most, as few measured runs have {seldom}" if seldom else ""
    print_line(console, capacity + wide, style="dim")
    host = solution.assessment.host_bytes
    if host:
        line = f"{format_bytes(host)} more of each GPU lie on the host{_of_host(target)}"
        print_line(console, line, style="dim")


def _of_host(target: Target) -> str:
    there = target.machine.card.more.get("host.memory_bytes")
    return "" if there is None else f", which has {format_bytes(there)} for each"


def _shown(accounts: Sequence[Account]) -> list[Account]:
    fullest = max(accounts, key=lambda account: account.peak_bytes)
    found = {account.stage: account for account in (accounts[0], fullest, accounts[-1])}
    return [found[stage] for stage in sorted(found)]


def _show_alternatives(
    console: Console, answer: Answer, best: EngineAnswer, room: int | None = None
) -> None:
    """Print launches of other degrees.

    room : lines of all, in which launches are cut to their first words; None: as many as it takes.
    """
    assert best.solved is not None, "it has a launch"
    first, *others = best.solved.solutions
    if not others:
        return
    print_heading(console, f"other degrees of {best.engine.title}")
    table = make_table("slower", "faster in", "peak", "launch", words_last=True)
    runs, step = first.assessment.runs, first.assessment.step
    # beside the launches stand the heading and the names of the columns
    for other in others[: None if room is None else max(room - 3, 1)]:
        later = other.assessment.step
        if step is None or later is None:
            continue
        # of global batches that differ the time of a sequence counts
        share = first.samples_per_s / other.samples_per_s - 1.0
        odds = ""
        if runs is not None:
            odds = format_odds(probability_faster(1.0 + share, 1.0, runs.plan_spread))
        words = _line(answer, other)
        table.add_row(
            f"{share * 100:.2f} %",
            odds,
            format_bytes(other.assessment.fullest.peak_bytes),
            escape(words if room is None else shortened(words, _LAUNCH_COLUMN)),
        )
    console.print(table)
    if room is None:
        print_line(console, "faster in: odds of being the faster one all the same", style="dim")


_LAUNCH_COLUMN = 48
"""Beside share, odds and peak of 80 columns."""


def _show_space(console: Console, answer: Answer, best: EngineAnswer) -> None:
    print_heading(console, "what it is the fastest of")
    question, engine = answer.question, best.engine
    assert best.solved is not None, "it has a launch"
    solved = best.solved
    effort = solved.effort
    proof = (
        "bound and gap: 0 %"
        if solved.complete
        else f"time was up: at most {solved.gap * 100:.1f} % slower than the fastest"
    )
    print_line(
        console,
        f"all launches of {engine.title} with one set of degrees, "
        f"{_micro_batches(question.fixed)}, {', '.join(question.fixed.precision)}: "
        f"{effort.degrees:,} legal combinations of degrees, {effort.choices:,} launches with their "
        "stages, schedules, ZeRO stages and recomputation; "
        f"{proof} ({effort.timed:,} steps priced, {effort.counted:,} memories counted, the others "
        "excluded by bounds)",
    )
    for text in _left_out(answer, best):
        print_item(console, f"left out: {text}")
    for text in question.assumed:
        print_item(console, f"assumed: {text}")
    print_line(console, f"{answer.cpu_s:.2g} s of CPU for all engines", style="dim")


def _micro_batches(fixed: Fixed) -> str:
    """Return which micro-batches were tried."""
    if fixed.micro_batch is None:
        return f"micro-batches of powers of two up to {MICRO_BATCHES[-1]}"
    return f"micro-batches of {', '.join(map(str, sorted({*fixed.micro_batch})))}"


def _left_out(answer: Answer, best: EngineAnswer) -> list[str]:
    fixed, engine = answer.question.fixed, best.engine
    found = []
    has = engine.precisions(answer.question.card.name)
    others = [name for name in PRECISIONS if name in has and name not in fixed.precision]
    if others:
        found.append(f"products in {', '.join(others)} (--precision any)")
    if fixed.micro_batch is None:
        found.append("micro-batches that are no power of two (--micro-batch-size)")
    if fixed.cp_kind is None:
        kinds = [one for one in engine.context if one not in CONTEXT_KINDS]
        found += [f"{one} of context ranks (--cp-kind {one})" for one in kinds]
    named = [f"--{name}" for name in fixed.options]
    if named:
        found.append(f"what {', '.join(named)} exclude{'s' if len(named) == 1 else ''}")
    return [*found, *engine.left_out]


def show_infeasible(console: Console, answer: Answer, ways: Sequence[Remedy]) -> None:
    """Print each trainer's reason, and what would make something fit, on one screen.

    ways : what fits, with what changes the training least first.
    """
    _, *reasons = infeasible_lines(answer)
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


def infeasible_lines(answer: Answer) -> tuple[str, ...]:
    """Return that no trainer has a launch, nor anybody a plan, and each one's reason."""
    reasons: dict[str, str] = {line.engine: line.reason for line in answer.lines}
    reasons = reasons or {one.engine.name: one.reason for one in answer.engines}
    what = "launch or plan" if answer.lines else "launch"
    return (
        f"no {what} of {answer.question.title} {_outcome(answer)}",
        *(f"{engine}: {reason}" for engine, reason in reasons.items()),
    )


def _outcome(answer: Answer) -> str:
    in_time = all(one.solved is None or one.solved.complete for one in answer.engines)
    return "fits or is legal" if in_time else "was found in time"


def show_against(
    console: Console, answer: Answer, what: str, other: Solution | None, reason: str
) -> None:
    """Print how another launch compares with the one that is shown, and the terms that differ.

    what : the other in words. reason : why there is none.
    """
    (one,) = answer.engines
    assert one.best is not None, "a launch is shown"
    print_heading(console, what)
    if other is None:
        print_line(console, reason)
        return
    if other.choice == one.best.choice:
        print_line(console, "is this one")
        return
    print_line(console, _line(answer, other), style="bold")
    share = other.samples_per_s / one.best.samples_per_s - 1.0
    peak = format_bytes(other.assessment.fullest.peak_bytes)
    print_line(
        console,
        f"{other.samples_per_s:,.5g} samples/s, {share * 100:+.2f} % against this one, peak {peak}",
    )
    terms = other.terms_against(one.best)
    differ = sorted(terms.items(), key=lambda item: -abs(item[1]))[:4]
    words = [f"{name} {value * 1e3:+.3g} ms" for name, value in differ if abs(value) >= 1e-6]
    rest = sum(terms.values()) - sum(value for _, value in differ)
    if abs(rest) >= 1e-6:
        words.append(f"others {rest * 1e3:+.3g} ms")
    if words:
        print_line(console, f"of a sequence: {', '.join(words)}")


def show_more_memory(console: Console, best: Solution | None, more: Solution | None) -> None:
    """Print what one more GiB of every GPU would bring to the fastest launch."""
    if best is None or more is None:
        return
    share = more.samples_per_s / best.samples_per_s - 1.0
    same = "the same launch" if more.choice == best.choice else "with another launch"
    print_heading(console, "what more would bring")
    print_line(
        console, f"+1 GiB of memory per GPU: {share * 100:+.3f} % for the fastest launch, {same}"
    )


def remedy_line(remedy: Remedy) -> str:
    """Return a change with which something fits, and what it gives, in one sentence."""
    rate = remedy.solution.assessment.tokens_per_s or 0.0
    host = f", {format_bytes(remedy.host_bytes)} of each GPU on the host" * (remedy.host_bytes > 0)
    return f"fits with {remedy.words}: {rate:,.0f} tokens/s per GPU, {remedy.engine.name}{host}"

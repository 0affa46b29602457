"""autopar-explain: time and memory of a plan, and why another one is not chosen."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from autopar.answer import Gain, RequestedPlan
from autopar.command.fields import option, rows_of
from autopar.command.options import Command
from autopar.command.run import say
from autopar.errors import InputError, OptionError
from autopar.records import replace
from autopar.run.rules import Notice, RuleError
from autopar.units import GIB
from search.commands.app import (
    SCRIPT,
    ScriptSpec,
    emit,
    files_read,
    with_script,
    working,
    write_pictures,
)
from search.request.options import PANELS
from search.request.request import FILLS, build_request, stored_request

if TYPE_CHECKING:
    from search.planning.layered.prediction import SearchResult
    from search.planning.session import ConstrainedResult
    from search.planning.uniform.answer import UniformRequest
    from search.planning.uniform.best_first import PricedRun

_NAME = "autopar-explain"


@dataclass(frozen=True, kw_only=True)
class ExplainSpec:
    """Plan to explain, and constraints of the plans that it is compared with."""

    plan: str = option(
        help="plan, strategy file or launch script",
        panel="Question",
        positional=True,
    )
    why_not: tuple[str, ...] = option(
        (),
        help="constraint such as tp=8: compare with its best plan (repeatable)",
        panel="Question",
        metavar="RULE",
        brief="compare with the best plan of e.g. tp=8",
    )


COMMAND = Command(
    name=_NAME,
    usage="PLAN.json [OPTIONS]",
    fills=(ExplainSpec, ScriptSpec, *FILLS),
    without=frozenset(
        {"evaluate", "frontier", "plot", "output-config-path", "goal", "tokens-per-s", "use"}
    ),
    panels=("Question", SCRIPT, *PANELS),
    first=("Question",),
    family="search",
    intro="""Break down a plan by time and memory, and compare it with the best plan under a
constraint (--why-not).

PLAN.json is a plan file of autopar-search, or a strategy file with the options of autopar-search
for model and hardware, or a launch script with --hardware CARD[:NODESxGPUS].
Options given here replace those of the file, such as memory, cluster or batch.

Exit codes: 0 done, 2 invalid input.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, with_script(_execute))


def _execute(raw: dict[str, Any]) -> int:
    from autopar.documents.plan import PlanDocument

    def notice(text: str) -> None:
        say(f"{_NAME}: {text}")

    path = str(raw.pop("plan"))
    why_not = tuple(raw.pop("why-not", ()))
    from search.planning.uniform.imports import holds_launch, with_cluster

    if holds_launch(path):
        return _explain_launch(path, with_cluster(path, raw), why_not, notice)
    document = PlanDocument.read(path)
    stored = stored_request(path, document, raw, notice)
    request = build_request({**stored, **raw})
    _check_rules(why_not)

    from autopar.command.console import make_console
    from autopar.output import refuse_clashes
    from search.planning.layered.summary import found_or_reason
    from search.planning.session import ConstrainedResult, ask_why_not
    from search.questions.gains import gains_of
    from search.questions.given import given_plan
    from search.show.files import explanation_document
    from search.show.pictures.files import pictures_of
    from search.show.summary import SCREEN_WIDTH
    from search.show.terminal import show_explained

    pictures = pictures_of(request.output.html_path, request.output.trace_path)
    json_path = request.output.json_path
    refuse_clashes(
        {"--json": json_path, **pictures.outputs}, files_read([path, request.inputs.model])
    )
    given = given_plan(path, request, notice, document)
    session = given.session
    write_pictures(pictures, lambda: given.draw(pictures), command=_NAME)

    def search_again() -> tuple[
        SearchResult, list[tuple[str, ConstrainedResult]], tuple[Gain, ...]
    ]:
        best = session.planner.solve()
        pinned = [(rule, ask_why_not(session, rule, best)) for rule in why_not]
        return best, pinned, gains_of(session, best)

    baseline, pinned, gains = working("searching again", search_again)
    if json_path is not None:
        told = given.document(given.request) | explanation_document(baseline, pinned, gains)
        emit(json_path, told, command=_NAME)
    if json_path == "-":
        return 0
    console = make_console(sys.stdout, SCREEN_WIDTH)
    budget = session.options.memory_constraint_bytes
    others = []
    for rule, found in pinned:
        plan, reason = found_or_reason(found, baseline, budget)
        freed = " and ".join(found.left_out)
        options = f"--pin {shlex.quote(rule)}"
        others.append(RequestedPlan(rule, plan, reason, freed=freed, options=options))
    fastest = found_or_reason(ConstrainedResult(result=baseline), baseline, budget)
    show_explained(
        console,
        given.answer,
        others,
        RequestedPlan("", *fastest),
        gains,
        best=fastest[0],
        path=path,
        verbose=request.output.verbose,
    )
    return 0


def _explain_launch(
    path: str, raw: dict[str, Any], why_not: Sequence[str], notice: Callable[[str], None]
) -> int:
    """Explain a uniform plan and compare it with other plans of its engine; return the exit code.

    why_not : constraints such as `tp=8`, each compared with the fastest plan under it
    """
    from autopar.command.console import make_console
    from autopar.output import refuse_clashes
    from search.planning.choose import refuse_options_of_plans
    from search.planning.uniform.answer import answer
    from search.planning.uniform.summary import priced_of
    from search.questions.given import given_launch
    from search.request.interface import fixed_by_rule
    from search.show.pictures.files import pictures_of
    from search.show.summary import SCREEN_WIDTH
    from search.show.terminal import show_explained
    from search.show.uniform_files import against_entry

    request = build_request(raw)
    if request.engine is not None:
        raise OptionError(f"--engine: {path} names its engine", remedy="Remove --engine")
    refuse_options_of_plans(path, request)
    given = given_launch(path, request.given, notice, request.output.price)
    shown, one = given.found, given.one
    question = shown.question
    rules = [(rule, fixed_by_rule(rule, question.fixed)) for rule in why_not]
    pictures = pictures_of(request.output.html_path, request.output.trace_path)
    json_path = request.output.json_path
    refuse_clashes({"--json": json_path, **pictures.outputs}, files_read([path]))

    def solved(question: UniformRequest) -> tuple[PricedRun | None, str, tuple[Notice, ...]]:
        try:
            (found,) = answer(question).engines
        except RuleError as error:  # no such plan, whatever the memory
            return None, str(error), error.broken
        except InputError as error:
            return None, str(error), ()
        return found.best, found.reason, found.broken

    write_pictures(pictures, lambda: given.draw(pictures), command=_NAME)
    larger = replace(question.card, memory_bytes=question.card.memory_bytes + GIB)
    best = working("searching again", lambda: solved(question))
    more, _, _ = working("searching again", lambda: solved(replace(question, card=larger)))
    others = [
        (rule, fixed, working("searching again", partial(solved, replace(question, fixed=fixed))))
        for rule, fixed in rules
    ]
    if json_path is not None:
        document = given.document(given.request) | {
            "best": against_entry(shown, *best),
            "one_more_gib": None if more is None else against_entry(shown, more, ""),
            "why_not": [
                {"rule": rule, **against_entry(shown, *other)} for rule, _, other in others
            ],
        }
        emit(json_path, document, command=_NAME)
    if json_path == "-":
        return 0

    def told(
        rule: str,
        solution: PricedRun | None,
        reason: str,
        freed: Sequence[str] = (),
    ) -> RequestedPlan:
        if solution is None:
            return RequestedPlan(rule, None, reason, freed=" and ".join(freed))
        return RequestedPlan(
            rule,
            priced_of(shown, one, solution),
            reason,
            freed=" and ".join(freed),
            probability_faster=_probability_faster(solution, one.best),
            options=_options_of(rule),
        )

    asked = []
    for rule, fixed, (solution, reason, _) in others:
        freed = [f"--{name}" for name in question.fixed.options if name not in fixed.options]
        asked.append(told(rule, solution, reason, freed))
    gains = []
    if best[0] is not None and more is not None:
        gain = more.samples_per_s / best[0].samples_per_s - 1.0
        same = more.choice == best[0].choice
        gains.append(Gain("+1 GiB of memory per GPU", more.samples_per_s, gain, same))
    console = make_console(sys.stdout, SCREEN_WIDTH)
    fastest = told("", *best[:2])
    verbose = request.output.verbose
    show_explained(console, given.answer, asked, fastest, gains, verbose=verbose)
    return 0


def _probability_faster(other: PricedRun, given: PricedRun | None) -> float | None:
    """Return the probability that a plan is faster than the given one; None if unknown."""
    from autopar.rates.accuracy import probability_faster

    runs = other.assessment.runs
    # A given plan that cannot run has no throughput.
    if runs is None or given is None or not given.samples_per_s > 0:
        return None
    return probability_faster(
        1.0 / other.samples_per_s, 1.0 / given.samples_per_s, runs.plan_spread
    )


def _options_of(rule: str) -> str:
    """Return a rule such as `tp=8,pp=2` as search options."""
    from search.request.degrees import DegreeOptions

    flags = {row.name for row in rows_of(DegreeOptions) if row.flaglike}
    words = []
    for part in filter(None, rule.split(",")):
        name, _, value = (text.strip() for text in part.partition("="))
        name = name.replace("_", "-")
        if name in flags and value in ("0", "1"):
            words.append(f"--{name}" if value == "1" else f"--no-{name}")
        else:
            words.append(f"--{name} {shlex.quote(value)}")
    return " ".join(words)


def _check_rules(rules: Sequence[str]) -> None:
    """Raise OptionError for a rule with a syntax error."""
    from search.planning.space import parse_rules

    for rule in rules:
        try:
            parse_rules([rule], [])
        except OptionError as error:
            raise OptionError(str(error).replace("--pin", "--why-not", 1)) from None

"""autopar-explain: where the time and the memory of a plan go, and why not another one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from autopar.command.fields import option, rows_of
from autopar.command.options import Command
from autopar.command.run import say
from autopar.errors import InputError, OptionError, did_you_mean
from autopar.records import replace
from autopar.run.rules import Notice, RuleError
from autopar.units import GIB
from search.commands.app import emit, files_read, leave, working, write_results
from search.engines.choice import Fixed
from search.request.options import PANELS
from search.request.request import FILLS, build_request, stored_request

if TYPE_CHECKING:
    from search.planning.layered.prediction import SearchResult
    from search.planning.question import WhyNot
    from search.planning.uniform.answer import Question
    from search.planning.uniform.solve import Solution
    from search.show.explain import Perturbation

_NAME = "autopar-explain"


@dataclass(frozen=True, kw_only=True)
class ExplainSpec:
    """What is explained."""

    plan: str = option(
        help="launch, plan or strategy file, or a trainer's script",
        panel="Question",
        positional=True,
    )
    why_not: tuple[str, ...] = option(
        (),
        help="rule such as tp=8: the best plan with it; repeats",
        panel="Question",
        metavar="RULE",
    )


COMMAND = Command(
    name=_NAME,
    usage="PLAN.json [OPTIONS]",
    fills=(ExplainSpec, *FILLS),
    without=frozenset(
        {"evaluate", "frontier", "plot", "output-config-path", "verbose", "goal", "tokens-per-s"}
    ),
    panels=("Question", *PANELS),
    first=("Question",),
    family="search",
    intro="""Explain a plan: time and memory per stage and layer run, what binds, why not another.

PLAN.json is a launch or plan file of ours, which names its inputs and options, or anyone's strategy
file, with the options of autopar-search that describe model and hardware. A script or configuration
of a trainer is explained as the launch that it is, with --hardware CARD:NxG.
Options given here replace those of the file: another budget, cluster or batch.

Exit codes: 0 done, 2 an input is unusable.
""",
)


def main() -> None:
    """Entry point of `autopar-explain`."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return COMMAND.run(arguments, _execute)


def _execute(raw: dict[str, Any]) -> int:
    from autopar.documents.plan import PlanDocument

    path = str(raw.pop("plan"))
    why_not = tuple(raw.pop("why-not", ()))
    from search.planning.uniform.imported import holds_launch

    if holds_launch(path):
        return _explain_launch(path, raw, why_not)
    document = PlanDocument.read(path)
    stored = stored_request(path, document, raw, lambda text: say(f"{_NAME}: {text}"))
    request = build_request({**stored, **raw})
    _check_rules(why_not)

    from autopar.command.console import make_console
    from autopar.output import refuse_clashes
    from search.planning.question import ask_why_not, evaluate_file, open_session
    from search.request.options import option_record
    from search.show.explain import (
        explanation_document,
        perturb,
        show_best,
        show_explanation,
        show_why_not,
    )
    from search.show.files import evaluation_document
    from search.show.headline import SCREEN_WIDTH
    from search.show.pictures.files import pictures_of
    from search.show.plan import show_evaluation

    pictures = pictures_of(request.output.html_path, request.output.trace_path)
    json_path = request.output.json_path
    refuse_clashes(
        {"--json": json_path, **pictures.outputs}, files_read([path, request.inputs.model])
    )
    session = open_session(request.inputs, request.options, request.given, has_plan=True)
    for notice in session.notices:
        say(f"{_NAME}: {notice}")
    for name in document.changed_inputs(session.sources):
        say(f"{_NAME}: {name} has changed since the plan was made")
    plan, prediction = evaluate_file(document, session, path=path)
    planner = session.planner
    # before anything is printed, which somebody may not read to its end
    drawn = pictures.of_plan(session, plan, prediction, state=f"{path}, explained")
    write_results(drawn, None, {}, pictures.refusal(lambda error: error), command=_NAME)
    for picture in drawn:
        say(f"{_NAME}: wrote {picture}")

    def search_again() -> tuple[SearchResult, list[tuple[str, WhyNot]], tuple[Perturbation, ...]]:
        best = planner.solve()
        pinned = [(rule, ask_why_not(session, rule, best)) for rule in why_not]
        return best, pinned, perturb(session, best)

    baseline, pinned, perturbations = working("searching again", search_again)
    if json_path is not None:
        priced = evaluation_document(
            plan,
            prediction,
            defaults=(*session.defaults, *session.calibrated),
            synthetic=session.synthetic,
            estimated=session.estimated,
            options=option_record(session.options, session.options.memory_constraint_bytes),
            request={**session.named, **request.given},
        ).content()
        told = priced | explanation_document(baseline, pinned, perturbations)
        emit(json_path, told, command=_NAME)
    if json_path == "-":
        return 0
    console = make_console(sys.stdout, SCREEN_WIDTH)
    # what was asked comes before what is told of every plan
    for rule, found in pinned:
        show_why_not(console, rule, baseline, found, session.options.memory_constraint_bytes)
    if pinned:
        console.print()
    show_evaluation(
        console,
        plan,
        prediction,
        path=path,
        title=session.title,
        estimated=session.estimated,
        synthetic=session.synthetic,
        defaults=(*session.defaults, *session.calibrated),
        notes=session.notes,
        sources=session.sources,
        throughput=session.throughput(plan, prediction),
        price=request.output.price,
    )
    show_explanation(console, prediction, perturbations=perturbations)
    show_best(console, plan, prediction, baseline, session.options.memory_constraint_bytes)
    return 0


def _explain_launch(path: str, raw: dict[str, Any], why_not: Sequence[str]) -> int:
    """Explain a launch: its terms, the best launch of its trainer, and what others would take."""
    from autopar.command.console import make_console
    from autopar.output import refuse_clashes
    from search.engines.spaces import engine_space
    from search.planning.route import refuse_options_of_plans
    from search.planning.uniform.answer import Answer, answer, evaluated
    from search.planning.uniform.files import against_entry, launch_document
    from search.planning.uniform.imported import launch_in
    from search.show.headline import SCREEN_WIDTH
    from search.show.launches import show_against, show_evaluated, show_more_memory
    from search.show.pictures.files import pictures_of

    request = build_request(raw)
    if request.engine is not None:
        raise OptionError(f"--engine: {path} is a launch of its trainer; leave it out")
    refuse_options_of_plans(path, request)
    stored = launch_in(path, request.given, lambda text: say(f"{_NAME}: {text}"))
    engine = engine_space(stored.engine)
    question = replace(stored.question, engines=(engine,), top=0, price=request.output.price)
    asked = [(rule, _fixed(rule, question.fixed)) for rule in why_not]
    pictures = pictures_of(request.output.html_path, request.output.trace_path)
    json_path = request.output.json_path
    refuse_clashes({"--json": json_path, **pictures.outputs}, files_read([path]))
    one = evaluated(question, engine, stored.choice, stored.launch)

    def solved(question: Question) -> tuple[Solution | None, str, tuple[Notice, ...]]:
        try:
            (found,) = answer(question).engines
        except RuleError as error:  # no such launch, whatever the memory
            return None, str(error), error.broken
        except InputError as error:
            return None, str(error), ()
        return found.best, found.reason, found.broken

    shown = Answer(question=question, engines=(one,))
    if pictures.any:
        # before anything is printed, which somebody may not read to its end
        drawn = working("drawing", lambda: pictures.of_answer(shown, curves=False))
        write_results(drawn, None, {}, pictures.refusal(lambda error: error), command=_NAME)
        for picture in drawn:
            say(f"{_NAME}: wrote {picture}")
    larger = replace(question.card, memory_bytes=question.card.memory_bytes + GIB)
    best = working("searching again", lambda: solved(question))
    more, _, _ = working("searching again", lambda: solved(replace(question, card=larger)))
    others = [
        (rule, fixed, working("searching again", partial(solved, replace(question, fixed=fixed))))
        for rule, fixed in asked
    ]
    if json_path is not None:
        document = launch_document(shown, stored.request).model_dump() | {
            "status": "evaluated",
            "best": against_entry(shown, *best),
            "one_more_gib": None if more is None else against_entry(shown, more, ""),
            "why_not": [
                {"rule": rule, **against_entry(shown, *other)} for rule, _, other in others
            ],
        }
        emit(json_path, document, command=_NAME)
    if json_path == "-":
        return 0
    console = make_console(sys.stdout, SCREEN_WIDTH)
    # what was asked comes before what is told of every launch
    for rule, fixed, other in others:
        freed = [f"--{name}" for name in question.fixed.options if name not in fixed.options]
        heading = f"why not {rule}: the fastest launch with it"
        if freed:
            heading += f", without {' and '.join(freed)} of the search"
        show_against(console, shown, heading, *other[:2])
    if others:
        console.print()
    show_evaluated(console, shown, explained=True)
    show_against(console, shown, "the fastest launch", *best[:2])
    show_more_memory(console, best[0], more)
    return 0


def _fixed(rule: str, fixed: Fixed) -> Fixed:
    """Return what a search over all launches keeps to with a rule such as `tp=8,pp=2`.

    fixed : of the search that made the launch; of it the precision stays. Raises OptionError.
    """
    from search.request.degrees import DegreeOptions, fixed_of

    known = {row.name for row in rows_of(DegreeOptions)}
    typed: dict[str, str] = {}
    for part in rule.split(","):
        name, _, value = (text.strip() for text in part.partition("="))
        name = name.replace("_", "-")
        if name not in known or not value:
            hint = did_you_mean(name, known, 0.5)
            raise OptionError(
                f"--why-not: expected degrees of a launch such as tp=8,pp=2, got {part!r:.60}{hint}"
            )
        typed[name] = value
    try:
        asked = fixed_of(build_request(typed).degrees)
    except OptionError as error:
        raise OptionError(f"--why-not: {error}") from None
    names = {name for name in Fixed.__struct_fields__ if getattr(asked, name) is not None}
    if "precision" not in typed:
        names.discard("precision")
    whole = Fixed(precision=fixed.precision)
    return replace(whole, **{name: getattr(asked, name) for name in names})


def _check_rules(rules: Sequence[str]) -> None:
    """Raise OptionError for a rule that does not follow the grammar."""
    from search.planning.space import parse_rules

    for rule in rules:
        try:
            parse_rules([rule], [])
        except OptionError as error:
            raise OptionError(str(error).replace("--pin", "--why-not", 1)) from None


if __name__ == "__main__":
    main()

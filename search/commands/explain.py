"""autopar-explain: where the time and the memory of a plan go, and why not another one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.command.fields import option, rows_of
from autopar.command.options import Command
from autopar.command.run import say
from autopar.errors import InputError, OptionError, did_you_mean
from autopar.records import dataclass
from search.commands.app import files_read, leave, working, write_results
from search.options import PANELS
from search.request import FILLS, build_request, stored_request
from search.uniform.choice import Fixed

if TYPE_CHECKING:
    from search.planner.prediction import SearchResult
    from search.report.explain import Perturbation
    from search.uniform.solve import Solution

__all__ = ["COMMAND", "ExplainSpec", "main", "run"]

_NAME = "autopar-explain"


@dataclass(frozen=True, kw_only=True)
class ExplainSpec:
    """What is explained."""

    plan: str = option(help="plan or strategy file", panel="Question", positional=True)
    why_not: str | None = option(
        None, help="rule such as tp=8: the best plan with it", panel="Question", metavar="RULE"
    )


COMMAND = Command(
    name=_NAME,
    usage="PLAN.json [OPTIONS]",
    fills=(ExplainSpec, *FILLS),
    without=frozenset({"evaluate", "json", "frontier", "output-config-path"}),
    panels=("Question", *PANELS),
    family="search",
    intro="""Explain a plan: time and memory per stage and layer run, what binds, why not another.

PLAN.json is a launch or plan file of ours, which names its inputs and options, or anyone's strategy
file, with the options of autopar-search that describe model and hardware.
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
    why_not = raw.pop("why-not", None)
    if path.endswith(".json") and Path(path).is_file():
        from search.uniform.files import is_launch

        if is_launch(path):
            return _explain_launch(path, raw, why_not)
    document = PlanDocument.read(path)
    stored = stored_request(path, document, raw, lambda text: say(f"{_NAME}: {text}"))
    request = build_request({**stored, **raw})
    rules = _rules(why_not)

    from autopar.command.show import make_console
    from autopar.output import refuse_clashes
    from search.pictures.files import pictures_of
    from search.question import evaluate_file, open_session
    from search.report.explain import perturb, show_best, show_explanation, show_why_not
    from search.report.plan import show_evaluation

    pictures = pictures_of(request.output.html_path, request.output.trace_path)
    refuse_clashes(pictures.outputs, files_read([path, request.inputs.model]))
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

    def search_again() -> tuple[
        SearchResult, list[tuple[str, SearchResult]], tuple[Perturbation, ...]
    ]:
        best = planner.solve()
        return best, [(rule, planner.why_not(rule, best)) for rule in rules], perturb(session, best)

    baseline, pinned, perturbations = working("searching again", search_again)
    console = make_console(sys.stdout)
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
    )
    show_explanation(console, prediction, perturbations=perturbations)
    show_best(console, plan, prediction, baseline, session.options.memory_constraint_bytes)
    for rule, result in pinned:
        show_why_not(console, rule, baseline, result, session.options.memory_constraint_bytes)
    return 0


def _explain_launch(path: str, raw: dict[str, Any], why_not: str | None) -> int:
    """Explain a launch: its terms, the best launch of its trainer, and what others would take."""
    from autopar.command.show import make_console
    from search.report.launches import show_against, show_evaluated
    from search.route import refuse_options_of_plans
    from search.uniform.answer import Answer, answer, evaluated
    from search.uniform.engines import engine_space
    from search.uniform.files import read_launch

    request = build_request(raw)
    if request.engine is not None:
        raise OptionError(f"--engine: {path} is a launch of its trainer; leave it out")
    refuse_options_of_plans(path, request)
    stored = read_launch(path, request.given)
    engine = engine_space(stored.engine)
    question = replace(stored.question, engines=(engine,), top=0)
    asked = None if why_not is None else _fixed(why_not, question.fixed)
    one = evaluated(question, engine, stored.choice, stored.launch)

    def solved(fixed: Fixed) -> tuple[Solution | None, str]:
        try:
            (found,) = answer(replace(question, fixed=fixed)).engines
        except InputError as error:  # no such launch, whatever the memory
            return None, str(error)
        return found.best, found.reason

    best = working("searching again", lambda: solved(question.fixed))
    console = make_console(sys.stdout)
    shown = Answer(question=question, engines=(one,))
    show_evaluated(console, shown, explained=True)
    show_against(console, shown, "the fastest launch", *best)
    if asked is not None:
        other = working("searching again", lambda: solved(asked))
        show_against(console, shown, f"why not {why_not}: the fastest launch with it", *other)
    return 0


def _fixed(rule: str, fixed: Fixed) -> Fixed:
    """Return what a search keeps to with a rule such as `tp=8,pp=2`; raises OptionError."""
    from search.degrees import DegreeOptions, fixed_of

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
    names = {field.name for field in fields(Fixed) if getattr(asked, field.name) is not None}
    if "precision" not in typed:
        names.discard("precision")
    return replace(fixed, **{name: getattr(asked, name) for name in names})


def _rules(why_not: str | None) -> list[str]:
    from search.space import parse_rules

    if why_not is None:
        return []
    try:
        parse_rules([why_not], [])
    except OptionError as error:
        raise OptionError(str(error).replace("--pin", "--why-not", 1)) from None
    return [why_not]


if __name__ == "__main__":
    main()

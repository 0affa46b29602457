"""autopar-explain: where the time and the memory of a plan go, and why not another one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.command.fields import option
from autopar.command.options import Command
from autopar.command.run import say
from autopar.errors import OptionError
from autopar.records import dataclass
from search.commands.app import files_read, leave, working, write_results
from search.options import PANELS
from search.request import FILLS, build_request, stored_request

if TYPE_CHECKING:
    from search.planner.prediction import SearchResult
    from search.report.explain import Perturbation

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

PLAN.json is a plan file of ours (autopar_plan_*.json), which names its inputs and options, or
anyone's strategy file, with the options of autopar-search that describe model and hardware.
Options given here replace those of the plan file.

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
    write_results(drawn, None, {}, pictures.refusal(lambda error: error))
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

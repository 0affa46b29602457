"""autopar-explain: where the time and the memory of a plan go, and why not another one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autopar.errors import OptionError
from search.cli_options import OPTIONS, OptionRow
from search.cli_parse import build_request
from search.commands.app import guarded, leave, make_app, talk, working
from search.request import changed_inputs, stored_request

if TYPE_CHECKING:
    import typer

    from search.planner.result import SearchResult
    from search.report.explain import Perturbation

__all__ = ["main", "run"]

_COMMAND = "autopar-explain"
_HELP = """Explain a plan: time and memory per stage and layer run, what binds, why not another.

PLAN.json is a plan file of ours (autopar_plan_*.json), which names its inputs and options, or
anyone's strategy file, with the options of autopar-search that describe model and hardware.
Options given here replace those of the plan file.

Exit codes: 0 done, 2 an input is unusable.
"""
_OUTPUTS = frozenset({"evaluate", "json", "frontier", "output-config-path"})
_ROWS = (
    OptionRow("why-not", "text", "rule such as tp=8: the best plan with it", "Question"),
    *(row for row in OPTIONS if row.name not in _OUTPUTS),
)


def main() -> None:
    """Entry point of `autopar-explain`."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return guarded(_COMMAND, _app, arguments, _ROWS, _HELP, "PLAN.json [OPTIONS]")


def _app() -> typer.Typer:
    return make_app(_COMMAND, _ROWS, _execute, [("plan", "plan or strategy file")])


def _execute(raw: dict[str, Any]) -> int:
    from autopar.documents.plan import PlanDocument

    path = str(raw.pop("plan"))
    why_not = raw.pop("why-not")
    document = PlanDocument.read(path)
    stored = stored_request(path, document)
    flags = {row.name for row in _ROWS if row.kind == "flag"}  # False unless somebody gave them
    given = {
        name: value
        for name, value in raw.items()
        if value is not None and value != [] and not (value is False and name in flags)
    }
    request = build_request({**stored, **given})
    rules = _rules(why_not)

    from autopar.command.show import make_console
    from search.question import evaluate_file, open_session
    from search.report.explain import perturb, show_best, show_explanation, show_why_not
    from search.report.plan import show_evaluation

    session = open_session(request.inputs, request.options, request.given)
    for notice in session.notices:
        talk(f"{_COMMAND}: {notice}")
    for name in changed_inputs(document, session.sources):
        talk(f"{_COMMAND}: {name} has changed since the plan was made")
    plan, prediction = evaluate_file(document, session, path=path)
    planner = session.planner

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

"""autopar-explain: where the time and the memory of a plan go, and why not another one."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import DocumentError
from search.cli_app import guarded, make_app, progress, talk
from search.cli_options import OPTIONS, OptionRow
from search.cli_parse import build_request

if TYPE_CHECKING:
    import typer

__all__ = ["main", "run"]

_COMMAND = "autopar-explain"
_HELP = """Explain a plan: time and memory per stage and layer run, what binds, why not another.

Our own plan files name their inputs and options; for a strategy file of anyone, and to change
something, give the options of autopar-search."""
_OUTPUTS = frozenset({"evaluate", "json", "frontier", "output-config-path"})
_ROWS = (
    OptionRow("why-not", "text", "rule such as tp=8: the best plan with it", "Question"),
    *(row for row in OPTIONS if row.name not in _OUTPUTS),
)


def main() -> None:
    """Entry point of `autopar-explain`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return guarded(_COMMAND, _app, arguments, _ROWS)


def _app() -> typer.Typer:
    return make_app(_COMMAND, _ROWS, _execute, _HELP, [("plan", "plan or strategy file")])


def _execute(raw: dict[str, Any]) -> int:
    from autopar.plan_files import read_plan_document

    path = str(raw.pop("plan"))
    why_not = raw.pop("why-not")
    document = read_plan_document(path)
    stored = _stored_request(path, document)
    given = {name: value for name, value in raw.items() if value not in (None, False, [])}
    request = build_request({**stored, **given})
    rules = _rules(why_not)

    from search.evaluate_file import evaluate_file
    from search.report.explain import perturb, show_explanation, show_why_not
    from search.report.terminal import make_console, show_evaluation
    from search.session import open_session

    session = open_session(request.inputs, request.options)
    for notice in session.notices:
        talk(f"{_COMMAND}: {notice}")
    _warn_changed(document, session.sources)
    plan, prediction = evaluate_file(path, session)
    planner = session.planner
    with progress("searching"):
        baseline = planner.solve()
        pinned = [(rule, planner.why_not(rule, baseline)) for rule in rules]
        perturbations = perturb(session, baseline)
    console = make_console(sys.stdout)
    show_evaluation(
        console, plan, prediction, title=f"{path}: {session.title}", estimated=session.estimated
    )
    show_explanation(console, prediction, perturbations=perturbations)
    if baseline.prediction is not None and baseline.plan != plan:
        gain = baseline.prediction.samples_per_s / prediction.samples_per_s - 1
        console.print(
            f"\nthe best plan of this search space is {gain * 100:+.2f} % faster than this one",
            markup=False,
        )
    for rule, result in pinned:
        show_why_not(console, rule, baseline, result, request.options.memory_constraint_bytes)
    return 0


def _rules(why_not: str | None) -> list[str]:
    from search.pins import parse_rules

    if why_not is None:
        return []
    parse_rules([why_not], [])
    return [why_not]


def _stored_request(path: str, document: Mapping[str, object]) -> dict[str, object]:
    """Return the options that a plan file of ours was made with, empty for other files."""
    stored = document.get("request", {})
    if not isinstance(stored, Mapping):
        raise DocumentError(path, f"expected an object, got {stored!r:.60}", key="request")
    known = {row.name: row for row in OPTIONS}
    for name, value in stored.items():
        kind = known[name].kind if name in known else None
        legal = {
            None: False,
            "flag": isinstance(value, bool),
            "switch": isinstance(value, bool),
            "texts": isinstance(value, list) and all(isinstance(item, str) for item in value),
        }.get(kind, isinstance(value, str))
        if not legal:
            raise DocumentError(
                path,
                f"holds the option {name!r} with the unusable value {value!r:.60}",
                key="request",
                remedy="write the plan again with autopar-search",
            )
    return dict(stored)


def _warn_changed(document: Mapping[str, object], sources: Sequence[Any]) -> None:
    """Say on stderr which inputs are no longer those that the plan file was made from."""
    then = document.get("inputs")
    if not isinstance(then, list):
        return
    digests = {
        str(item.get("role")): item.get("sha256") for item in then if isinstance(item, Mapping)
    }
    for source in sources:
        old = digests.get(source.role)
        if old and source.sha256 and old != source.sha256:
            name = Path(source.path).name
            talk(f"{_COMMAND}: {name} has changed since the plan was made")


if __name__ == "__main__":
    main()

"""autopar-search: profiles in, the fastest plan that fits out."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from search.cli_app import guarded, make_app, progress, talk
from search.cli_options import OPTIONS
from search.cli_parse import Request, build_request

if TYPE_CHECKING:
    import typer

    from search.result import SearchResult
    from search.session import Session

__all__ = ["main", "run"]

_COMMAND = "autopar-search"
_HELP = """Find the fastest parallel training plan that fits in memory.

Without arguments the shipped default is planned. Name measured files by the path options or a
folder of them, or estimate: --hardware h100:4x8 --model llama3-70b.

Exit code 2: an input is unusable. 3: nothing fits.
"""


def main() -> None:
    """Entry point of `autopar-search`."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    return guarded(_COMMAND, _app, arguments, OPTIONS)


def _app() -> typer.Typer:
    return make_app(_COMMAND, OPTIONS, lambda raw: _execute(build_request(raw)), _HELP)


def _execute(request: Request) -> int:
    from search.session import open_session

    session = open_session(request.inputs, request.options)
    for notice in session.notices:
        talk(f"{_COMMAND}: {notice}")
    if request.output.evaluate is not None:
        return _evaluate(request, session)
    with progress("searching"):
        result = session.planner.solve()
        frontier = session.planner.frontier() if request.output.frontier else None
    document = _json(result, frontier)
    if result.infeasibility is not None:
        from search.report.terminal import infeasible_sentence

        _emit(request, document)
        budget = request.options.memory_constraint_bytes
        talk(f"{_COMMAND}: {infeasible_sentence(result.infeasibility, budget)}")
        return 3
    _write(request, session, result)
    if request.output.json_path != "-":
        from search.report.terminal import make_console, show_frontier, show_result

        console = make_console(sys.stdout)
        show_result(console, result, title=session.title)
        if frontier is not None:
            show_frontier(console, frontier)
    _emit(request, document)
    _report_pins(request, session, result)
    return 0


def _evaluate(request: Request, session: Session) -> int:
    from search.evaluate_file import evaluate_file
    from search.report.files import evaluation_document

    path = request.output.evaluate
    assert path is not None
    plan, prediction = evaluate_file(path, session)
    if request.output.json_path != "-":
        from search.report.terminal import make_console, show_evaluation

        show_evaluation(
            make_console(sys.stdout),
            plan,
            prediction,
            title=f"{path}: {session.title}",
            estimated=session.estimated,
        )
    _emit(request, evaluation_document(plan, prediction))
    return 0


def _json(result: SearchResult, frontier: list[SearchResult] | None) -> dict[str, Any]:
    from search.report.files import frontier_document, json_document

    document = json_document(result)
    if frontier is not None:
        document["frontier"] = frontier_document(frontier)
    return document


def _emit(request: Request, document: dict[str, Any]) -> None:
    path = request.output.json_path
    if path == "-":
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
    elif path is not None:
        from autopar.plan_files import write_document

        write_document(path, document)


def _write(request: Request, session: Session, result: SearchResult) -> None:
    if request.output.config_path is None:
        return
    from search.report.files import write_outputs

    paths = write_outputs(
        result,
        spec=session.spec,
        options=request.options,
        num_nodes=session.hardware.num_nodes,
        gpus_per_node=session.hardware.gpus_per_node,
        config_path=request.output.config_path,
        request=request.given,
    )
    for path in paths:
        talk(f"{_COMMAND}: wrote {path}")


def _report_pins(request: Request, session: Session, result: SearchResult) -> None:
    """Say on stderr what the pins cost, against the same search without them."""
    options = request.options
    if not (options.pin or options.forbid) or result.prediction is None:
        return
    free = session.rebuilt(options=dataclasses.replace(options, pin=(), forbid=())).solve()
    if free.prediction is None:  # stopped by the time limit
        talk(f"{_COMMAND}: what the pins cost is unknown, the search without them found nothing")
        return
    best, pinned = free.prediction.samples_per_s, result.prediction.samples_per_s
    talk(
        f"{_COMMAND}: the pins cost {(1 - pinned / best) * 100:.2f} % "
        f"({pinned:.5g} instead of {best:.5g} samples/s)"
    )


if __name__ == "__main__":
    main()

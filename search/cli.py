"""autopar-search: profiles in, the fastest plan that fits out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from autopar.errors import OptionError
from search.cli_app import guarded, make_app, talk
from search.cli_options import OPTIONS
from search.cli_parse import Request, build_request

if TYPE_CHECKING:
    import typer

    from search.planner import Planner
    from search.result import SearchResult

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
    planner, title = prepare(request)
    if request.output.evaluate is not None:
        return _evaluate(request, planner, title)
    with progress("searching"):
        result = planner.solve()
        frontier = planner.frontier() if request.output.frontier else None
    document = _json(result, frontier)
    if result.infeasibility is not None:
        from search.report.terminal import infeasible_sentence

        _emit(request, document)
        budget = request.options.memory_constraint_bytes
        talk(f"{_COMMAND}: {infeasible_sentence(result.infeasibility, budget)}")
        return 3
    _write(request, planner, result)
    if request.output.json_path != "-":
        from search.report.terminal import make_console, show_frontier, show_result

        console = make_console(sys.stdout)
        show_result(console, result, title=title)
        if frontier is not None:
            show_frontier(console, frontier)
    _emit(request, document)
    _report_pins(request, planner, result)
    return 0


def prepare(request: Request) -> tuple[Planner, str]:
    """Return the planner of a request and a title that names model and cluster."""
    from search.inputs import DEFAULT_HARDWARE, DEFAULT_MODEL, load_inputs

    inputs = request.inputs
    for unnamed, option, name in (
        (inputs.uses_default_model, "--model", DEFAULT_MODEL),
        (inputs.uses_default_hardware, "--hardware", DEFAULT_HARDWARE),
    ):
        if unnamed:
            talk(f"{_COMMAND}: no {option} given, planning for the shipped {name} (estimated)")
    spec, profile, hardware = load_inputs(inputs, request.options)

    from search.planner import Planner

    title = (
        f"{spec.name} ({spec.num_layers} layers) on {hardware.name}, {hardware.num_nodes} x "
        f"{hardware.gpus_per_node} GPUs"
    )
    return Planner(spec, profile, hardware, request.options), title


@contextlib.contextmanager
def progress(text: str) -> Iterator[None]:
    """Show a spinner on stderr while something takes long, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def _evaluate(request: Request, planner: Planner, title: str) -> int:
    from search.evaluate_file import evaluate_file
    from search.report.files import evaluation_document

    path = request.output.evaluate
    assert path is not None
    plan, prediction = evaluate_file(path, planner)
    if request.output.json_path != "-":
        from search.report.terminal import make_console, show_evaluation

        estimated = planner.hardware.estimated or planner.model_profile.estimated
        show_evaluation(
            make_console(sys.stdout),
            plan,
            prediction,
            title=f"{path}: {title}",
            estimated=estimated,
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


def _write(request: Request, planner: Planner, result: SearchResult) -> None:
    if request.output.config_path is None:
        return
    from search.report.files import write_outputs

    paths = write_outputs(
        result,
        spec=planner.spec,
        options=request.options,
        num_nodes=planner.hardware.num_nodes,
        gpus_per_node=planner.hardware.gpus_per_node,
        config_path=request.output.config_path,
        request=request.given,
    )
    for path in paths:
        talk(f"{_COMMAND}: wrote {path}")


def _report_pins(request: Request, planner: Planner, result: SearchResult) -> None:
    """Say on stderr what the pins cost, against the same search without them."""
    options = request.options
    if not (options.pin or options.forbid) or result.prediction is None:
        return
    free = dataclasses.replace(options, pin=(), forbid=())
    planner_class = type(planner)
    other = planner_class(planner.spec, planner.model_profile, planner.hardware, free).solve()
    if other.prediction is None:
        raise OptionError("--pin: the search without pins found nothing, which cannot be")
    best, pinned = other.prediction.samples_per_s, result.prediction.samples_per_s
    talk(
        f"{_COMMAND}: the pins cost {(1 - pinned / best) * 100:.2f} % "
        f"({pinned:.5g} instead of {best:.5g} samples/s)"
    )


if __name__ == "__main__":
    main()

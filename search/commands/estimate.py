"""autopar-estimate: one execution in closed form, as a table of where time and memory go."""

from __future__ import annotations

import difflib
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import DocumentError, InputError, OptionError
from search.cli_options import OptionRow
from search.commands.app import guarded, leave, make_app

if TYPE_CHECKING:
    import typer

    from search.closed_form.validation import Check

__all__ = [
    "COMMAND",
    "JSON",
    "SYSTEM",
    "main",
    "no_model",
    "refuse_nonsense",
    "run",
    "write_answer",
]

COMMAND = "autopar-estimate"
_HELP = """Price one training step in closed form: where its time and memory go.

autopar-estimate calculon [OPTIONS]: tensor, pipeline and data parallelism with interleaving,
recomputation, offload and overlap.

autopar-estimate tensor2d [OPTIONS]: tensor parallelism over heads, over rows and columns, and
context parallelism, with groups placed in fast domains.

Each has its own --help.

autopar-estimate --validate compares the first model with published figures.

Exit codes: 0 done, 2 an input is unusable, 3 the execution cannot run.
"""
JSON = OptionRow(
    "json", "text", "file for the statistics (.gz compresses), - for stdout, no tables", "Output"
)
SYSTEM = OptionRow(
    "system", "text", "file, or shipped name such as a100, h100, h200, b200", "Inputs"
)
_ROWS = (
    OptionRow("validate", "flag", "compare with published step times and memory", "Question"),
    SYSTEM,
    JSON,
)


def main() -> None:
    """Entry point of `autopar-estimate`."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    from search.commands import (
        estimate_calculon as cli_estimate_calculon,
    )
    from search.commands import (
        estimate_tensor2d as cli_estimate_tensor2d,
    )

    model, *rest = list(arguments) or ["--help"]
    for module in (cli_estimate_calculon, cli_estimate_tensor2d):
        if model == module.MODEL:
            return guarded(
                COMMAND, module.app, rest, module.ROWS, module.HELP, f"{model} [OPTIONS]"
            )
    app = _app if model.startswith("-") else no_model(model)
    return guarded(COMMAND, app, [model, *rest], _ROWS, _HELP, "calculon|tensor2d [OPTIONS]")


def write_answer(path: str, document: dict[str, Any]) -> None:
    """Write the object of `--json` to a file, atomically, or to stdout for `-`.

    A bandwidth that nothing could provide is the text "Infinity".
    """
    from autopar.documents.json import write_json

    plain = _plain(document)
    if path == "-":
        sys.stdout.write(json.dumps(plain, indent=2, allow_nan=False) + "\n")
        return
    try:
        write_json(Path(path), plain)
    except OSError as error:
        raise DocumentError(
            path,
            f"the file cannot be written ({error.strerror or error})",
            remedy="choose another path, or - for stdout",
        ) from None


def refuse_nonsense(system: str, statistics: Mapping[str, Any], total: str) -> None:
    """Raise InputError where numbers of a system are so extreme that a step has no finite time."""
    bad = [k for k, v in statistics.items() if isinstance(v, float) and math.isnan(v)]
    if bad or not math.isfinite(statistics[total]):
        raise InputError(
            f"{system}: {(bad or [total])[0]} is no finite number with the rates of this system; "
            "correct the smallest and the largest of them"
        )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return "Infinity" if isinstance(value, float) and math.isinf(value) else value


def _app() -> typer.Typer:
    return make_app(COMMAND, _ROWS, _validate)


def _validate(raw: dict[str, Any]) -> int:
    if not raw["validate"]:
        raise OptionError("say what to price with, calculon or tensor2d, or give --validate")

    from autopar.command.show import make_console
    from search.closed_form.files import calculon_system
    from search.closed_form.validation import validate
    from search.report.closed_form import show_validation

    name = raw["system"] or "a100-80gb"
    system = calculon_system(name)
    answers = {"default": validate(system), "compat": validate(system, compat=True)}
    if raw["json"] is not None:
        write_answer(raw["json"], {key: _rows(checks) for key, checks in answers.items()})
    if raw["json"] != "-":
        console = make_console(sys.stdout)
        show_validation(console, answers["default"], answers["compat"], system=name)
    return 0


def _rows(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [{**vars(check), "error": check.error} for check in checks]


def no_model(word: str) -> Callable[[], typer.Typer]:
    def fail() -> typer.Typer:
        if word.startswith("-"):
            raise OptionError("say which model, calculon or tensor2d, before the options")
        near = difflib.get_close_matches(word, ("calculon", "tensor2d"), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise OptionError(f"expected the model calculon or tensor2d, got {word!r:.60}{hint}")

    return fail


if __name__ == "__main__":
    main()

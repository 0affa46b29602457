"""autopar-estimate: one execution in closed form, as a table of where time and memory go."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.command.options import Command, make, option, read_values
from autopar.errors import OptionError
from search.commands.app import leave, no_model, write_answer

if TYPE_CHECKING:
    from search.closed_form.validation import Check

__all__ = [
    "COMMAND",
    "EstimateSpec",
    "main",
    "run",
]

_NAME = "autopar-estimate"


@dataclass(frozen=True, kw_only=True)
class EstimateSpec:
    """What `autopar-estimate` is asked without a model."""

    validate: bool = option(
        False, help="compare with published step times and memory", panel="Question"
    )
    system: str = option(
        "a100-80gb", help="file, or shipped name such as a100, h100, h200, b200", panel="Inputs"
    )
    json: str | None = option(
        None,
        help="file for the statistics (.gz compresses), - for stdout, no tables",
        panel="Output",
    )


COMMAND = Command(
    name=_NAME,
    usage="calculon|tensor2d [OPTIONS]",
    fills=(EstimateSpec,),
    intro="""Price one training step in closed form: where its time and memory go.

autopar-estimate calculon [OPTIONS]: tensor, pipeline and data parallelism with interleaving,
recomputation, offload and overlap.

autopar-estimate tensor2d [OPTIONS]: tensor parallelism over heads, over rows and columns, and
context parallelism, with groups placed in fast domains.

Each has its own --help.

autopar-estimate --validate compares the first model with published figures.

Exit codes: 0 done, 2 an input is unusable, 3 the execution cannot run.
""",
)


def main() -> None:
    """Entry point of `autopar-estimate`."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    from search.commands import (
        estimate_calculon as cli_estimate_calculon,
        estimate_tensor2d as cli_estimate_tensor2d,
    )

    model, *rest = list(arguments) or ["--help"]
    for module in (cli_estimate_calculon, cli_estimate_tensor2d):
        if model == module.MODEL:
            command: Command = module.COMMAND
            return command.run(rest, module.execute)
    if model.startswith("-"):
        return COMMAND.run([model, *rest], _validate)
    asked = [word for word in rest if word in ("--help", "-h")]
    return COMMAND.run(asked, lambda _: no_model(model))


def _validate(raw: dict[str, Any]) -> int:
    asked = make(EstimateSpec, read_values(COMMAND.rows, raw))
    if not asked.validate:
        raise OptionError("say what to price with, calculon or tensor2d, or give --validate")

    from autopar.command.show import make_console
    from search.closed_form.files import calculon_system
    from search.closed_form.validation import validate
    from search.report.closed_form import show_validation

    system = calculon_system(asked.system)
    answers = {"default": validate(system), "compat": validate(system, compat=True)}
    if asked.json is not None:
        write_answer(asked.json, {key: _rows(checks) for key, checks in answers.items()})
    if asked.json != "-":
        console = make_console(sys.stdout)
        show_validation(console, answers["default"], answers["compat"], system=asked.system)
    return 0


def _rows(checks: Sequence[Check]) -> list[dict[str, Any]]:
    return [{**vars(check), "error": check.error} for check in checks]


if __name__ == "__main__":
    main()

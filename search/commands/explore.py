"""autopar-explore: the whole space of an analytic model, the best executions of it out."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from autopar.command.options import Command
from search.commands import (
    explore_calculon as cli_explore_calculon,
    explore_tensor2d as cli_explore_tensor2d,
)
from search.commands.app import leave, no_model

__all__ = ["COMMAND", "main", "run"]

_NAME = "autopar-explore"
COMMAND = Command(
    name=_NAME,
    usage="calculon|tensor2d [OPTIONS]",
    intro="""Search every way to run a training step, priced in closed form, for the best.

autopar-explore calculon [OPTIONS]: tensor, pipeline and data parallelism with interleaving,
recomputation, offload and overlap.

autopar-explore tensor2d [OPTIONS]: tensor parallelism over heads, over rows and columns, and
context parallelism, with groups placed in fast domains.

Each has its own --help.

Exit codes: 0 done, 2 an input is unusable, 3 no execution can run, 130 stopped by Ctrl-C, which
shows the best found until then.
""",
)


def main() -> None:
    """Entry point of `autopar-explore`."""
    leave(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    model, *rest = list(arguments) or ["--help"]
    for module in (cli_explore_calculon, cli_explore_tensor2d):
        if model == module.MODEL:
            command: Command = module.COMMAND
            return command.run(rest, module.execute)
    # an option without a model is not unknown: what lacks is the model
    asked = [word for word in (model, *rest) if word in ("--help", "-h")]
    return COMMAND.run(asked, lambda _: no_model(model))


if __name__ == "__main__":
    main()

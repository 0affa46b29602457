"""Entry points of commands: a module that imports next to nothing, so that Ctrl-C is always seen.

`autopar.command.run.guarded` cannot see it while a command's own modules are imported, which
takes a third of a second and more.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

__all__ = [
    "enter",
    "estimate",
    "explain",
    "explore",
    "export",
    "hardware",
    "model",
    "plan",
    "profile_estimate",
    "search",
    "show",
    "verify",
]


def enter(command: str, module: str, *, speaks: bool = True) -> None:
    """Run `main` of a module as the entry point of a command; it ends the process.

    Parameters
    ----------
    speaks : whether Ctrl-C is said; of several processes one does.
    """
    try:
        import_module(module).main()
    except KeyboardInterrupt:
        if speaks:
            sys.stderr.write(f"{command}: interrupted\n")
        sys.exit(130)  # `autopar.command.run.INTERRUPTED`


def profile_estimate() -> None:
    """Run `autopar-profile-estimate`."""
    enter("autopar-profile-estimate", "autopar.estimate.command")


def verify() -> None:
    """Run `autopar-verify`."""
    enter("autopar-verify", "profiler.verify.command")


# --------------------------------------------------------------------------------------------------
# Entry points of the planner's commands, quick to import: see `autopar.entry`.


def estimate() -> None:
    """Run `autopar-estimate`."""
    enter("autopar-estimate", "search.commands.estimate")


def explain() -> None:
    """Run `autopar-explain`."""
    enter("autopar-explain", "search.commands.explain")


def explore() -> None:
    """Run `autopar-explore`."""
    enter("autopar-explore", "search.commands.explore")


def export() -> None:
    """Run `autopar-export`."""
    enter("autopar-export", "search.commands.export")


def search() -> None:
    """Run `autopar-search`."""
    enter("autopar-search", "search.commands.search")


# --------------------------------------------------------------------------------------------------
# Entry points of the profilers, quick to import: see `autopar.entry`.


def hardware() -> None:
    """Run `torchrun -m profiler.hardware`; Ctrl-C reaches every rank, and the first one says it."""
    enter("autopar", "profiler.hardware.command", speaks=os.environ.get("RANK", "0") == "0")


def model() -> None:
    """Run `profile-model`."""
    enter("profile-model", "profiler.model.command")


def plan() -> None:
    """Run `profile-plan` or `torchrun -m profiler.plan`; the first rank says Ctrl-C."""
    enter("profile-plan", "profiler.plan.command", speaks=os.environ.get("RANK", "0") == "0")


def show() -> None:
    """Run `profile-show`."""
    enter("profile-show", "profiler.show.command")

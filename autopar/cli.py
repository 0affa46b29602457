"""Entry points: `autopar COMMAND`, and the separate executables of the commands.

This module imports almost nothing, so that Ctrl-C is always handled. Importing the modules of a
command takes a third of a second or more, and `autopar.command.run.guarded` handles Ctrl-C only
afterwards. `SUBCOMMANDS` lists the module of each command.
"""

from __future__ import annotations

import gc
import os
import sys
from functools import partial
from importlib import import_module

SUBCOMMANDS = {  # name: executable, module, and description of the command
    "search": (
        "autopar-search",
        "search.commands.search",
        "find the fastest plan for a model and a cluster",
    ),
    "explain": (
        "autopar-explain",
        "search.commands.explain",
        "break down a plan; why it beats another (--why-not)",
    ),
    "check": (
        "autopar-check",
        "search.commands.check",
        "check a launch script: fits? how fast? what to change",
    ),
    "compare": (
        "autopar-compare",
        "search.commands.compare",
        "compare two plans, or a plan and a measured trace",
    ),
    "estimate": (
        "autopar-estimate",
        "search.commands.estimate",
        "closed-form models (Calculon, tensor2d) of one step",
    ),
    "explore": (
        "autopar-explore",
        "search.commands.explore",
        "compare models, clusters and engines",
    ),
    "export": (
        "autopar-export",
        "search.commands.export",
        "write the launch files of an engine, or import them",
    ),
    "verify": (
        "autopar-verify",
        "profiler.verify.command",
        "run plans here and compare with the prediction",
    ),
    "plan": (
        "profile-plan",
        "profiler.plan.command",
        "check a plan by arithmetic, dry run or a scaled run",
    ),
    "profile model": (
        "profile-model",
        "profiler.model.command",
        "memory of a model without a GPU, layer times on a GPU",
    ),
    "profile hardware": (
        "autopar",
        "profiler.hardware.command",
        "bandwidths of a cluster: torchrun -m profiler.hardware",
    ),
    "profile site": (
        "autopar",
        "profiler.site.command",
        "achieved share of the card: torchrun -m profiler.site",
    ),
    "profile show": ("profile-show", "profiler.show.command", "print, check and compare profiles"),
    "profile estimate": (
        "autopar-profile-estimate",
        "autopar.rates.command",
        "write estimated profiles from a card and a model",
    ),
    "serve": (
        "autopar serve",
        "autopar.command.serve",
        "MCP server for agents",
    ),
    "models": ("autopar models", "autopar.command.lists", "shipped models"),
    "cards": ("autopar cards", "autopar.command.lists", "shipped GPUs"),
    "sites": ("autopar sites", "autopar.command.lists", "measured clusters"),
    "stacks": ("autopar stacks", "autopar.command.lists", "software stacks of engines"),
}
COMPLETION = "_AUTOPAR_COMPLETE"
"""Environment variable that the completion script of a shell sets, named by typer."""
_INTERRUPTED = 130
"""Exit code after Ctrl-C, `autopar.errors.INTERRUPTED`."""
_RANKS = {"plan", "profile hardware", "profile site"}
"""Commands run as several processes by torchrun; only one process reports Ctrl-C."""


def enter(command: str, module: str, *, speaks: bool = True) -> None:
    """Run `run` of a module with the arguments of the process, and end the process.

    speaks : True if this process reports Ctrl-C; only one of several processes does
    """
    try:
        code = import_module(module).run(sys.argv[1:])
        if code == _INTERRUPTED and module.startswith("search."):
            # The process does not wait for an interrupted search.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        sys.exit(code)
    except KeyboardInterrupt:
        if speaks:
            sys.stderr.write(f"{command}: interrupted\n")
        sys.exit(_INTERRUPTED)


def run_subcommand(name: str) -> None:
    """Run a command of the table with the arguments of the process, and end the process."""
    command, module, _ = SUBCOMMANDS[name]
    if module.startswith("search."):
        start_quickly()
    speaks = name not in _RANKS or os.environ.get("RANK", "0") == "0"
    enter(command, module, speaks=speaks)


def start_quickly() -> None:
    """Avoid start-up costs that exceed the time of most searches."""
    # NumPy's threads spin while they wait for work, and planning has no work for them. A value set
    # by the user is kept.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Objects made by imports stay alive: collecting them every 700 allocations finds no garbage.
    gc.set_threshold(100_000, 50, 100)


search = partial(run_subcommand, "search")
explain = partial(run_subcommand, "explain")
check = partial(run_subcommand, "check")
compare = partial(run_subcommand, "compare")
estimate = partial(run_subcommand, "estimate")
explore = partial(run_subcommand, "explore")
export = partial(run_subcommand, "export")
verify = partial(run_subcommand, "verify")
plan = partial(run_subcommand, "plan")
model = partial(run_subcommand, "profile model")
hardware = partial(run_subcommand, "profile hardware")
site = partial(run_subcommand, "profile site")
show = partial(run_subcommand, "profile show")
profile_estimate = partial(run_subcommand, "profile estimate")


def main() -> None:
    """Run the command that the first words name; entry point of `autopar`."""
    arguments = sys.argv[1:]
    # Try two words first: `profile show` is no command `profile`.
    for words in () if COMPLETION in os.environ else (2, 1):
        name = " ".join(arguments[:words])
        if name in SUBCOMMANDS:
            # A command reads the words after this name; the name also tells the lists apart.
            sys.argv[:] = [f"autopar {name}", *arguments[words:]]
            run_subcommand(name)
            return
    enter("autopar", "autopar.command.parser")

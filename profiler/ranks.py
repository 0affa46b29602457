"""Commands started by torchrun: selection of the reporting rank, and one report per failure."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from autopar.command.options import Command
from autopar.command.run import (
    answer_failure,
    closed_pipe_exit_code,
    describe_failure,
    environment_rank,
    make_stdout_usable,
    rank_exit_code,
    say,
)
from autopar.errors import InputError

_Options = TypeVar("_Options")


class Rank:
    """One process as a rank of a command; the only rank outside of torchrun."""

    def __init__(self, name: str) -> None:
        """Read the rank from torchrun's environment; `name` is the prefix of messages."""
        self.name = name
        self.number = environment_rank("RANK")
        self.speaks = self.number == 0
        """True if this rank prints messages common to several ranks; initially rank 0 only."""

    def say(self, text: str) -> None:
        """Print a message on stderr, unless another rank prints it."""
        say(text, command=self.name, speaks=self.speaks)

    def speak_of_machine(self) -> None:
        """Let the first rank of every machine report, for problems of one machine."""
        self.speaks = environment_rank("LOCAL_RANK") == 0


def run_rank(
    command: Command,
    arguments: Sequence[str],
    body: Callable[[dict[str, Any], Rank], int],
    *,
    name: str,
) -> int:
    """Run a command on this rank; return its exit code.

    Every failure is one message on stderr. Rank 0 alone reports failures common to all ranks; the
    first rank of a machine reports problems of that machine.

    body : function that runs the command with the given options.
    name : name of the command, printed before its messages.
    """
    rank = Rank(name)
    if rank.number and {"--help", "-h"} & set(arguments):
        return 0
    make_stdout_usable()
    try:
        raw = command.read(arguments, rank.say)
        if raw is None:
            sys.stdout.flush()  # detects a closed pipe while it can still be handled
            return 0
        return body(raw, rank)
    except BrokenPipeError:
        return closed_pipe_exit_code()
    except (Exception, KeyboardInterrupt) as error:
        failure = describe_failure(error)
        # An internal error may affect only this rank, so this rank reports it.
        if failure.internal:
            text = f"rank {rank.number}: {failure.text}"
            return rank_exit_code(text, failure.exit_code, command=name, speaks=True)
        if isinstance(error, KeyboardInterrupt):
            rank.speaks = rank.number == 0
        answer_failure(error, failure)
        return rank_exit_code(failure.text, failure.exit_code, command=name, speaks=rank.speaks)


def run_measuring(
    command: Command,
    arguments: Sequence[str],
    *,
    build: Callable[..., _Options],
    check: Callable[[_Options, int], None],
    start: Callable[[_Options], int],
    module: str,
) -> int:
    """Run a command that measures between ranks; return the exit code of this rank.

    build : returns the options object of the parsed arguments.
    check : raises OptionError if options and number of ranks disagree, before torch is loaded.
    start : performs the heavy imports and measures.
    module : module that torchrun starts, for messages.
    """

    def body(raw: dict[str, Any], rank: Rank) -> int:
        options = build(**raw)
        # Avoid heavy imports for --help and invalid options.
        from profiler.environment import launched_ranks, require_torch

        # Checked before torch is loaded: torchrun's variables contain the number of ranks.
        check(options, _check_launched(launched_ranks(), arguments, module))
        rank.speak_of_machine()
        require_torch()
        return start(options)

    return run_rank(command, arguments, body, name="autopar")


def torchrun_line(count: int | str, module: str, arguments: Sequence[str]) -> str:
    """Return the command line that starts `count` ranks of a module on one machine."""
    own = "".join(f" {shlex.quote(argument)}" for argument in arguments)
    return f"torchrun --standalone --nproc-per-node {count} -m {module}{own}"


def _check_launched(launched: int | None, arguments: Sequence[str], module: str) -> int:
    """Return the number of ranks that torchrun started.

    Raises InputError: this process was not started by torchrun.
    """
    if launched is None:
        raise InputError(
            "this command measures between processes",
            remedy=(
                f"Run `{torchrun_line('N', module, arguments)}` (N: number of GPUs "
                "of this node, or of processes on CPUs; with several nodes, on each "
                "of them with --nnodes and --rdzv-endpoint instead of --standalone)"
            ),
        )
    return launched

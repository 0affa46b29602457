"""Commands whose ranks torchrun starts: which rank speaks, and how a failure is said once."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from autopar.command.options import Command
from autopar.command.run import (
    answer_failure,
    describe_failure,
    end_of_rank,
    environment_rank,
    make_stdout_usable,
    reader_left,
    say,
)
from autopar.errors import InputError

_Options = TypeVar("_Options")


class Rank:
    """This process as one of the ranks of a command; outside of torchrun the only one."""

    def __init__(self, name: str) -> None:
        """Read the numbers that torchrun gave this process; `name` is in front of sentences."""
        self.name = name
        self.number = environment_rank("RANK")
        self.speaks = self.number == 0
        """Whether this rank says what several ranks have to say: at first rank 0 alone."""

    def say(self, text: str) -> None:
        """Say a sentence on stderr, unless another rank says it."""
        say(text, command=self.name, speaks=self.speaks)

    def speak_of_machine(self) -> None:
        """From here on the first rank of every machine speaks: of what that machine lacks."""
        self.speaks = environment_rank("LOCAL_RANK") == 0


def run_rank(
    command: Command,
    arguments: Sequence[str],
    body: Callable[[dict[str, Any], Rank], int],
    *,
    name: str,
) -> int:
    """Run a command on this rank; return its exit code.

    Whatever goes wrong is one sentence on stderr. What is the same on every rank is said by rank
    0 alone; what a machine lacks, by the first rank of that machine.

    Parameters
    ----------
    body : does what the options given ask for.
    name : of the command, in front of its sentences.
    """
    rank = Rank(name)
    if rank.number and {"--help", "-h"} & set(arguments):
        return 0
    make_stdout_usable()
    try:
        raw = command.read(arguments, rank.say)
        if raw is None:
            sys.stdout.flush()  # whoever left is noticed here, while it can still be answered
            return 0
        return body(raw, rank)
    except BrokenPipeError:
        return reader_left()
    except (Exception, KeyboardInterrupt) as error:
        failure = describe_failure(error)
        # an internal error may be this rank's alone, so it speaks for itself
        if failure.internal:
            text = f"rank {rank.number}: {failure.text}"
            return end_of_rank(text, failure.exit_code, command=name, speaks=True)
        if isinstance(error, KeyboardInterrupt):
            rank.speaks = rank.number == 0
        answer_failure(error, failure)
        return end_of_rank(failure.text, failure.exit_code, command=name, speaks=rank.speaks)


def run_measuring(
    command: Command,
    arguments: Sequence[str],
    *,
    build: Callable[..., _Options],
    check: Callable[[_Options, int], None],
    start: Callable[[_Options], int],
    module: str,
) -> int:
    """Run a command that measures between ranks; return the exit code of this one.

    Parameters
    ----------
    build : makes the options of what is given.
    check : raises OptionError where they do not fit the number of ranks, before torch is loaded.
    start : imports what is heavy and measures.
    module : what torchrun is to start, in messages.
    """

    def body(raw: dict[str, Any], rank: Rank) -> int:
        options = build(**raw)
        # heavy imports stay out of --help and of bad options
        from profiler.environment import launched_ranks, require_torch

        # said before torch is loaded, since torchrun's variables tell the number
        check(options, _check_launched(launched_ranks(), arguments, module))
        rank.speak_of_machine()
        require_torch()
        return start(options)

    return run_rank(command, arguments, body, name="autopar")


def torchrun_line(count: int | str, module: str, arguments: Sequence[str]) -> str:
    """Return the command line that starts so many ranks of a module on one machine."""
    own = "".join(f" {shlex.quote(argument)}" for argument in arguments)
    return f"torchrun --standalone --nproc-per-node {count} -m {module}{own}"


def _check_launched(launched: int | None, arguments: Sequence[str], module: str) -> int:
    """Return the number of ranks that torchrun started.

    Raises
    ------
    InputError: it was not torchrun that started this process.
    """
    if launched is None:
        raise InputError(
            "this measures between processes; start it as "
            f"`{torchrun_line('N', module, arguments)}` "
            "(N: the number of GPUs of this machine, or of processes to measure on CPUs; with "
            "several machines, on each of them with --nnodes and --rdzv-endpoint in place of "
            "--standalone)"
        )
    return launched

"""`torchrun -m profiler.hardware`: measures a cluster and writes the documented hardware files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from autopar.command.options import Command
from autopar.command.run import (
    describe_failure,
    end_of_rank,
    environment_rank,
    make_stdout_usable,
    reader_left,
    say,
)
from autopar.errors import InputError
from profiler.hardware.options import (
    PANELS,
    DocumentedSizes,
    HardwareOptions,
    build_options,
    check_world,
)

_NAME, _MODULE = "autopar", "profiler.hardware"
_Options = TypeVar("_Options")
COMMAND = Command(
    name="torchrun ... -m profiler.hardware",
    usage="[OPERATION...] [OPTIONS]",
    fills=(HardwareOptions, DocumentedSizes),
    panels=PANELS,
    first=(),
    family="profile-hardware",
    intro="""Measure the communication of a cluster and write the files that autopar-search plans
with.

One process per GPU, started by torchrun on every machine:

torchrun --standalone --nproc-per-node 8 -m profiler.hardware --out hardware

Exit codes: 0 done; 1 something failed, the rest is kept; 2 unusable option.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""

    def start(options: HardwareOptions) -> int:
        from profiler.hardware.run import run as measure_all

        return measure_all(options, list(arguments))

    return run_rank(
        COMMAND, arguments, build=build_options, check=check_world, start=start, module=_MODULE
    )


def run_rank(
    command: Command,
    arguments: Sequence[str],
    *,
    build: Callable[..., _Options],
    check: Callable[[_Options, int], None],
    start: Callable[[_Options], int],
    module: str,
) -> int:
    """Run a command of ranks that torchrun starts; return the exit code of this one.

    Whatever goes wrong is one sentence on stderr. What is the same on every rank is said by rank
    0 alone; what a machine lacks, by the first rank of that machine.

    Parameters
    ----------
    build : makes the options of what is given.
    check : raises OptionError where they do not fit the number of ranks, before torch is loaded.
    start : imports what is heavy and measures.
    module : what torchrun is to start, in messages.
    """
    rank, local_rank = environment_rank("RANK"), environment_rank("LOCAL_RANK")
    if rank and {"--help", "-h"} & set(arguments):
        return 0
    speaks = rank == 0
    make_stdout_usable()
    try:
        raw = command.read(arguments, lambda text: say(text, command=_NAME, speaks=speaks))
        if raw is None:
            sys.stdout.flush()  # whoever left is noticed here, while it can still be answered
            return 0
        options = build(**raw)
        # heavy imports stay out of --help and of bad options
        from profiler.environment import launched_ranks, require_torch

        # said before torch is loaded, since torchrun's variables tell the number
        check(options, _check_launched(launched_ranks(), arguments, module))
        speaks = local_rank == 0
        require_torch()
        return start(options)
    except BrokenPipeError:
        return reader_left()
    except (Exception, KeyboardInterrupt) as error:
        failure = describe_failure(error)
        # an internal error may be this rank's alone, so it speaks for itself
        if failure.internal:
            return end_of_rank(
                f"rank {rank}: {failure.text}", failure.exit_code, command=_NAME, speaks=True
            )
        if isinstance(error, KeyboardInterrupt):
            speaks = rank == 0
        return end_of_rank(failure.text, failure.exit_code, command=_NAME, speaks=speaks)


def _check_launched(launched: int | None, arguments: Sequence[str], module: str) -> int:
    """Return the number of ranks that torchrun started.

    Raises
    ------
    InputError: it was not torchrun that started this process.
    """
    if launched is None:
        own = "".join(f" {shlex.quote(argument)}" for argument in arguments)
        raise InputError(
            "this measures between processes; start it as "
            f"`torchrun --standalone --nproc-per-node N -m {module}{own}` "
            "(N: the number of GPUs of this machine, or of processes to measure on CPUs; with "
            "several machines, on each of them with --nnodes and --rdzv-endpoint in place of "
            "--standalone)"
        )
    return launched


def main() -> None:
    """Entry point of `torchrun -m profiler.hardware`."""
    sys.exit(run(sys.argv[1:]))

"""`torchrun -m profiler.hardware`: measures a cluster and writes the documented hardware files."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

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

__all__ = ["COMMAND", "main", "run"]

_NAME = "autopar"
COMMAND = Command(
    name="torchrun ... -m profiler.hardware",
    usage="[OPERATION...] [OPTIONS]",
    fills=(HardwareOptions, DocumentedSizes),
    panels=PANELS,
    family="profile-hardware",
    intro="""Measure the communication of a cluster and write the files that autopar-search plans
with.

One process per GPU, started by torchrun on every machine:

torchrun --standalone --nproc-per-node 8 -m profiler.hardware --out hardware

Exit codes: 0 done; 1 something failed, the rest is kept; 2 unusable option.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code.

    Whatever goes wrong is one sentence on stderr. What is the same on every rank is said by rank
    0 alone; what a machine lacks, by the first rank of that machine.
    """
    rank, local_rank = environment_rank("RANK"), environment_rank("LOCAL_RANK")
    if rank and {"--help", "-h"} & set(arguments):
        return 0
    speaks = rank == 0
    make_stdout_usable()
    try:
        raw = COMMAND.read(arguments, lambda text: say(text, command=_NAME, speaks=speaks))
        if raw is None:
            sys.stdout.flush()  # whoever left is noticed here, while it can still be answered
            return 0
        options = build_options(**raw)
        # heavy imports stay out of --help and of bad options
        from profiler.environment import launched_ranks, require_torch

        # said before torch is loaded, since torchrun's variables tell the number
        check_world(options, _check_launched(launched_ranks(), arguments))
        speaks = local_rank == 0
        require_torch()
        from profiler.hardware.run import run as measure_all

        return measure_all(options, list(arguments))
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


def _check_launched(launched: int | None, arguments: Sequence[str]) -> int:
    """Return the number of ranks that torchrun started.

    Raises
    ------
    InputError: it was not torchrun that started this process.
    """
    if launched is None:
        own = "".join(f" {shlex.quote(argument)}" for argument in arguments)
        raise InputError(
            "this measures between processes; start it as "
            f"`torchrun --standalone --nproc-per-node N -m profiler.hardware{own}` "
            "(N: the number of GPUs of this machine, or of processes to measure on CPUs; with "
            "several machines, on each of them with --nnodes and --rdzv-endpoint in place of "
            "--standalone)"
        )
    return launched


def main() -> None:
    """Entry point of `torchrun -m profiler.hardware`."""
    sys.exit(run(sys.argv[1:]))

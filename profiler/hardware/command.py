"""`torchrun -m profiler.hardware`: measures a cluster and writes the documented hardware files."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence

from autopar.command.run import describe_failure, one_line, reader_left
from autopar.errors import InputError
from profiler.hardware.options import HardwareOptions
from profiler.hardware.parse import build_options, check_world
from profiler.option_table import DRY_RUN, FILES, HOW, REPETITIONS, OptionRow, make_app

__all__ = ["app", "main", "run"]

_COMMAND = "autopar"
_PROGRAM = "torchrun ... -m profiler.hardware"
_LAUNCHER_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
_LAUNCHER_VARIABLES = (*_LAUNCHER_NUMBERS, "MASTER_ADDR")
_GRACE_S = 2.0
"""torchrun ends all ranks as soon as one of them fails: the silent ones give rank 0 the time to
say why."""
_WHAT, _WHERE = "What to measure", "Machine"

_OPTIONS = (
    OptionRow(
        "operations",
        "OPERATION",
        "allreduce, p2p, all2all, allgather, reducescatter, overlap; or all, the default.",
    ),
    OptionRow(
        "sizes",
        "SIZES",
        "Message sizes: FROM:TO:xFACTOR or a comma list; K, M, G are powers of 1024.",
        _WHAT,
    ),
    OptionRow("reference_size", "SIZE", "Size whose bandwidth the documented files hold.", _WHAT),
    OptionRow(
        "groups",
        "SIZES",
        "Group sizes such as 2,4,8, or all divisors of the number of ranks.",
        _WHAT,
    ),
    OptionRow(
        "dtype",
        "auto|bf16|fp16|fp32",
        "Elements of the messages; auto: bf16 on GPUs, fp32 on CPUs.",
        _WHAT,
    ),
    OptionRow(
        "isolated",
        None,
        "One group at a time; otherwise all groups of a size at once, as in training.",
        _WHAT,
    ),
    *REPETITIONS,
    OptionRow(
        "timeout", "S", "A single operation that takes longer has failed, and ends the run.", HOW
    ),
    OptionRow(
        "check", None, "Compare the result of every operation with the expected one, once.", HOW
    ),
    OptionRow(
        "cuda_graph",
        None,
        "Launch from CUDA graphs, which takes the launch cost out of small messages.",
        HOW,
    ),
    OptionRow(
        "backend",
        "auto|nccl|gloo",
        "auto: nccl where torch finds a GPU, otherwise gloo on the CPU.",
        _WHERE,
    ),
    OptionRow(
        "allow_shared_gpu",
        None,
        "Run several ranks on one GPU to exercise the code; files are marked synthetic.",
        _WHERE,
    ),
    OptionRow("out", "DIR", "Folder of the files, for --hardware of autopar-search.", FILES),
    OptionRow("resume", None, "Measure only what DIR does not have yet.", FILES),
    OptionRow("force", None, "Measure again and replace what DIR has.", FILES),
    DRY_RUN,
)
_HELP = """
Measure the communication of a cluster and write the files that autopar-search plans with.

One process per GPU, started by torchrun on every machine:

torchrun --standalone --nproc-per-node 8 -m profiler.hardware --out hardware

Exit codes: 0 done; 1 something failed, the rest is kept; 2 unusable option.
Underscores and hyphens in the names of options mean the same.
"""

app = make_app(_OPTIONS, build_options, _HELP)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code.

    Whatever goes wrong is one sentence on stderr. What is the same on every rank is said by rank
    0 alone; what a machine lacks, by the first rank of that machine.
    """
    rank, local_rank = _environment_rank("RANK"), _environment_rank("LOCAL_RANK")
    normal = [_hyphens(argument) for argument in arguments]
    if rank and {"--help", "-h"} & set(normal):
        return 0
    speaks = rank == 0
    try:
        options = app(args=normal, prog_name=_PROGRAM, standalone_mode=False)
        if not isinstance(options, HardwareOptions):  # --help
            return options if isinstance(options, int) else 0
        check_world(options, _launched(arguments))
        speaks = local_rank == 0
        # heavy imports stay out of --help and of bad options
        from profiler.environment import require_torch

        require_torch()
        from profiler.hardware.run import run as measure_all

        return measure_all(options, list(arguments))
    except BrokenPipeError:
        return reader_left()
    except (Exception, KeyboardInterrupt) as error:
        failure = describe_failure(error)
        if failure.internal:
            return _end(f"rank {rank}: {failure.text}", failure.exit_code, speaks=True)
        if isinstance(error, KeyboardInterrupt):
            speaks = rank == 0
        return _end(failure.text, failure.exit_code, speaks=speaks)


def _launched(arguments: Sequence[str]) -> int:
    """Return the number of ranks that torchrun started.

    Raises
    ------
    InputError: it was not torchrun that started this process.
    """
    if any(name not in os.environ for name in _LAUNCHER_VARIABLES):
        own = "".join(f" {shlex.quote(argument)}" for argument in arguments)
        raise InputError(
            "this measures between processes; start it as "
            f"`torchrun --standalone --nproc-per-node N -m profiler.hardware{own}` "
            "(N: the number of GPUs of this machine, or of processes to measure on CPUs; with "
            "several machines, on each of them with --nnodes and --rdzv-endpoint in place of "
            "--standalone)"
        )
    for name in _LAUNCHER_NUMBERS:
        if not os.environ[name].isdecimal():
            raise InputError(
                f"the environment variable {name} is {os.environ[name]!r}, expected a number; "
                "let torchrun set it"
            )
    return max(1, int(os.environ["WORLD_SIZE"]))


def _environment_rank(name: str) -> int:
    text = os.environ.get(name, "0")
    return int(text) if text.isdecimal() else 0


def _hyphens(argument: str) -> str:
    """Return an option with the hyphens that typer knows it by."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _end(text: str, code: int, *, speaks: bool) -> int:
    if speaks:
        sys.stderr.write(f"{_COMMAND}: {one_line(text)}\n")
        sys.stderr.flush()
    else:
        time.sleep(_GRACE_S)
    return code


def main() -> None:
    """Entry point of `torchrun -m profiler.hardware`."""
    sys.exit(run(sys.argv[1:]))

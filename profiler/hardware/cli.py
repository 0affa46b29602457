"""`torchrun -m profiler.hardware`: measures a cluster and writes the documented hardware files."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from autopar.errors import AutoparError, InputError
from profiler.hardware.options import HardwareOptions
from profiler.hardware.parse import DEFAULT_OUT, DEFAULT_SIZES, build_options, check_world

__all__ = ["app", "main", "run"]

_COMMAND = "autopar"
_PROGRAM = "torchrun ... -m profiler.hardware"
_DEBUG_VARIABLE = "AUTOPAR_DEBUG"
_INTERRUPTED = 130
_LAUNCHER_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
_LAUNCHER_VARIABLES = (*_LAUNCHER_NUMBERS, "MASTER_ADDR")
_GRACE_S = 2.0
"""torchrun ends all ranks as soon as one of them fails: the silent ones give rank 0 the time to
say why."""

_WHAT, _HOW, _WHERE, _FILES = "What to measure", "How to measure", "Machine", "Files"

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 100},
)


@app.command()
def measure(
    operations: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OPERATION",
            help="allreduce, p2p, all2all, allgather, reducescatter, overlap; or all, the default.",
            show_default=False,
        ),
    ] = None,
    sizes: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WHAT,
            metavar="SIZES",
            help="Message sizes: FROM:TO:xFACTOR or a comma list; K, M, G are powers of 1024.",
        ),
    ] = DEFAULT_SIZES,
    reference_size: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WHAT,
            metavar="SIZE",
            help="Size whose bandwidth the documented files hold.",
        ),
    ] = "32M",
    groups: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WHAT,
            metavar="SIZES",
            help="Group sizes such as 2,4,8, or all divisors of the number of ranks.",
        ),
    ] = "all",
    dtype: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WHAT,
            metavar="auto|bf16|fp16|fp32",
            help="Elements of the messages; auto: bf16 on GPUs, fp32 on CPUs.",
        ),
    ] = "auto",
    isolated: Annotated[
        bool,
        typer.Option(
            "--isolated",
            rich_help_panel=_WHAT,
            help="One group at a time; otherwise all groups of a size at once, as in training.",
        ),
    ] = False,
    iters: Annotated[
        int, typer.Option(rich_help_panel=_HOW, metavar="N", help="Most timed repetitions.")
    ] = 50,
    warmup: Annotated[
        int, typer.Option(rich_help_panel=_HOW, metavar="N", help="Most untimed repetitions.")
    ] = 5,
    max_seconds: Annotated[
        float,
        typer.Option(
            rich_help_panel=_HOW,
            metavar="S",
            help="After so long no further repetition of the same measurement begins.",
        ),
    ] = 2.0,
    timeout: Annotated[
        float,
        typer.Option(
            rich_help_panel=_HOW,
            metavar="S",
            help="A single operation that takes longer has failed, and ends the run.",
        ),
    ] = 60.0,
    check: Annotated[
        bool,
        typer.Option(
            "--check/--no-check",
            rich_help_panel=_HOW,
            help="Compare the result of every operation with the expected one, once.",
        ),
    ] = True,
    cuda_graph: Annotated[
        bool,
        typer.Option(
            "--cuda-graph",
            rich_help_panel=_HOW,
            help="Launch from CUDA graphs, which takes the launch cost out of small messages.",
        ),
    ] = False,
    backend: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WHERE,
            metavar="auto|nccl|gloo",
            help="auto: nccl where torch finds a GPU, otherwise gloo on the CPU.",
        ),
    ] = "auto",
    allow_shared_gpu: Annotated[
        bool,
        typer.Option(
            "--allow-shared-gpu",
            rich_help_panel=_WHERE,
            help="Run several ranks on one GPU to exercise the code; files are marked synthetic.",
        ),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            rich_help_panel=_FILES,
            metavar="DIR",
            help="Folder of the files, for --hardware of autopar-search.",
        ),
    ] = DEFAULT_OUT,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", rich_help_panel=_FILES, help="Measure only what DIR does not have yet."
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", rich_help_panel=_FILES, help="Measure again and replace what DIR has."
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel=_FILES,
            help="Print what would be measured and how long it takes; write nothing.",
        ),
    ] = False,
) -> HardwareOptions:
    """Measure the communication of a cluster and write the files that autopar-search plans with.

    One process per GPU, started by torchrun on every machine:

    torchrun --standalone --nproc-per-node 8 -m profiler.hardware --out hardware

    Exit codes: 0 done; 1 something failed, the rest is kept; 2 unusable option.
    Underscores and hyphens in the names of options mean the same.
    """
    return build_options(
        operations=operations or (),
        out=out,
        sizes=sizes,
        reference_size=reference_size,
        iters=iters,
        warmup=warmup,
        max_seconds=max_seconds,
        timeout=timeout,
        backend=backend,
        dtype=dtype,
        groups=groups,
        isolated=isolated,
        check=check,
        resume=resume,
        force=force,
        dry_run=dry_run,
        cuda_graph=cuda_graph,
        allow_shared_gpu=allow_shared_gpu,
    )


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
    except AutoparError as error:
        if os.environ.get(_DEBUG_VARIABLE):
            raise
        return _end(str(error), error.exit_code, speaks=speaks)
    except KeyboardInterrupt:
        return _end("interrupted", _INTERRUPTED, speaks=rank == 0)
    except BrokenPipeError:  # the reader of --help left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        message = getattr(error, "format_message", None)
        if callable(message):  # typer's own usage errors, whose classes it does not export
            return _end(f"{str(message()).rstrip('.')}; see --help", 2, speaks=speaks)
        if os.environ.get(_DEBUG_VARIABLE):
            raise
        text = (
            f"rank {rank}: internal error, please report it: {type(error).__name__}: {error} "
            f"(set {_DEBUG_VARIABLE}=1 for the traceback)"
        )
        return _end(text, 1, speaks=True)


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
        sys.stderr.write(f"{_COMMAND}: {' '.join(text.split())}\n")
        sys.stderr.flush()
    else:
        time.sleep(_GRACE_S)
    return code


def main() -> None:
    """Entry point of `torchrun -m profiler.hardware`."""
    sys.exit(run(sys.argv[1:]))

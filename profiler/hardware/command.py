"""`torchrun -m profiler.hardware`: measure a cluster and write its hardware files."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.command.options import Command
from profiler.hardware.options import (
    PANELS,
    DocumentedSizes,
    HardwareOptions,
    build_options,
    check_world,
)
from profiler.ranks import run_measuring

_MODULE = "profiler.hardware"
COMMAND = Command(
    name=f"torchrun ... -m {_MODULE}",
    usage="[OPERATION...] [OPTIONS]",
    fills=(HardwareOptions, DocumentedSizes),
    panels=PANELS,
    first=(),
    family="profile-hardware",
    intro="""Measure the collectives of a cluster and write its hardware profile for
autopar-search.

One process per GPU, started by torchrun on every machine:

torchrun --standalone --nproc-per-node 8 -m profiler.hardware --out hardware

Exit codes: 0 done; 1 a measurement failed, the others are kept; 2 invalid option.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""

    def start(options: HardwareOptions) -> int:
        from profiler.hardware.run import run as measure_all

        return measure_all(options, list(arguments))

    return run_measuring(
        COMMAND, arguments, build=build_options, check=check_world, start=start, module=_MODULE
    )

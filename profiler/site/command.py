"""`torchrun -m profiler.site`: measure a cluster relative to its card, in about three minutes."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.command.options import Command
from profiler.ranks import run_measuring
from profiler.site.options import PANELS, SiteOptions, build_options, check_world

_MODULE = "profiler.site"
COMMAND = Command(
    name=f"torchrun ... -m {_MODULE}",
    fills=(SiteOptions,),
    panels=PANELS,
    first=(),
    intro="""Measure the achieved share of the card on this cluster, and write a site file.

Measured are GEMMs until the clock is stable, copies, collectives within and across nodes with all
GPUs at once, and the host time of a small layer, in about three minutes. torchrun starts one
process per GPU on every node:

torchrun --standalone --nproc-per-node 8 -m profiler.site --out sites

Exit codes: 0 done; 1 a measurement failed, the others are kept; 2 invalid option.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""

    def start(options: SiteOptions) -> int:
        from profiler.site.run import run as measure_all

        return measure_all(options, list(arguments))

    return run_measuring(
        COMMAND, arguments, build=build_options, check=check_world, start=start, module=_MODULE
    )

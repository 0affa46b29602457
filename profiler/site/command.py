"""`torchrun -m profiler.site`: measure a cluster relative to its card, in about three minutes."""

from __future__ import annotations

import sys
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
    intro="""Measure what this cluster reaches of what its card says, and write a site file.

Matrix products until the clock has settled, copies, collectives in a node and across nodes with all
GPUs at once, and the time of the host for a small layer: about three minutes. One process per GPU,
started by torchrun on every machine:

torchrun --standalone --nproc-per-node 8 -m profiler.site --out sites

Exit codes: 0 done; 1 something failed, the rest is kept; 2 unusable option.
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


def main() -> None:
    """Entry point of `torchrun -m profiler.site`."""
    sys.exit(run(sys.argv[1:]))

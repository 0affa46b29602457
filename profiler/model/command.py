"""`profile-model`: measure a model and write its computation and memory files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.command.options import Command
from profiler.model.options import PANELS, DocumentedRanges, ModelOptions, build_options
from profiler.options import SizeOptions

_RESUME = "interrupted; resume with the same command and --resume"

COMMAND = Command(
    name="profile-model",
    fills=(ModelOptions, DocumentedRanges, SizeOptions),
    panels=PANELS,
    first=(),
    family="profile-model",
    intro="""Measure a model and write its computation and memory profile for autopar-search.

profile-model --model llama2-7b --mode batch --bsz 1:12 --out profiles

Memory is counted exactly and needs no GPU; layer times are measured on one device.

Exit codes: 0 done; 1 a measurement failed, the others are kept; 2 invalid option or model; 130
interrupted.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code.

    Errors are printed as one sentence on stderr.
    """
    return COMMAND.run(arguments, lambda raw: _execute(raw, list(arguments)), interrupted=_RESUME)


def _execute(raw: dict[str, Any], arguments: list[str]) -> int:
    options = build_options(COMMAND.warn, **raw)
    # heavy imports are delayed, so that --help and errors in options are fast
    if not options.model.startswith(("hf:", "py:")):
        from profiler.model.sources import load_source

        load_source(
            options.model, sizes=options.sizes
        )  # reports a bad file or name before torch is imported
    from profiler.environment import require_torch

    require_torch()
    from profiler.model.run import run as profile_all

    return profile_all(options, arguments)

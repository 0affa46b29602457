"""Options that the profilers of clusters and of models share.

What only one of them is asked stands in `hardware.options` and `model.options`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autopar.command.fields import option, validate
from autopar.errors import OptionError

__all__ = ["FILES", "HOW", "SECONDS", "MeasuringOptions", "check_out"]

HOW, FILES = "How to measure", "Files"
"""Headings of the help that both have."""
SECONDS = "seconds above {above} up to {high}"
"""How an error says the bounds of a duration."""
_MAX_REPETITIONS = 10**6


@dataclass(frozen=True, kw_only=True)
class MeasuringOptions:
    """How often to measure, and what becomes of the files that are there."""

    iters: int = option(
        50,
        help="most timed repetitions",
        panel=HOW,
        between=(1, _MAX_REPETITIONS),
        of="repetitions",
    )
    """Of a cell."""
    warmup: int = option(
        5,
        help="most untimed repetitions",
        panel=HOW,
        between=(1, _MAX_REPETITIONS),
        of="repetitions",
    )
    """Of a cell; slow cells take fewer, at least one."""
    max_seconds: float = option(
        2.0,
        help="after so long no further repetition of the same measurement begins",
        panel=HOW,
        metavar="S",
        above=0,
        high=100_000,
        expects=SECONDS,
    )
    """A cell goes on until it has the fewest repetitions allowed."""
    resume: bool = option(
        False, help="measure only what the files do not have yet", panel=FILES, most_used=True
    )
    force: bool = option(False, help="measure again and replace what there is", panel=FILES)
    dry_run: bool = option(
        False,
        help="print what would be measured and how long it takes; write nothing",
        panel=FILES,
        most_used=True,
    )

    host_names: bool = option(
        False, help="store the names of hosts instead of labels such as host-3fa2", panel=FILES
    )

    def __post_init__(self) -> None:
        validate(self)
        if self.resume and self.force:
            raise OptionError(
                "--resume keeps what is measured and --force measures it again; give one of them"
            )


def check_out(out: Path | None) -> None:
    """Raise OptionError where files are to go into a file."""
    if out is not None and out.exists() and not out.is_dir():
        raise OptionError(f"--out: {out} is a file; name a folder")

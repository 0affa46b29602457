"""Tells the person at rank 0 how far a run is: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from autopar.command.run import say
from autopar.documents.sidecar import Measurement
from autopar.hardware import OPERATIONS
from autopar.statistics import summarize
from autopar.units import GB, format_exact_size, format_seconds
from profiler.hardware.overlap import slowdowns

__all__ = ["Progress", "describe"]


def describe(measurement: Measurement) -> str:
    """Return one line that says what a cell gave."""
    m = measurement
    group = (
        f"{m.group_size} stages" if m.operation.startswith("p2p") else f"groups of {m.group_size}"
    )
    if not m.consecutive:
        group = f"strided {group}"
    name = f"{m.operation:<23s} {group:<20s} {format_exact_size(int(m.size_bytes or 0)):>5s}"
    if m.status != "ok":
        return f"{name}  {m.status}: {m.reason}"
    if "time" not in m.samples_s:
        found = slowdowns(m.samples_s)
        return (
            f"{name}  computation x{found.compute:.2f}, communication x{found.communication:.2f}, "
            f"{100 * found.efficiency:.0f} % hidden"
        )
    summary = summarize(m.samples_s["time"])
    # half of what 90 % of the samples lie in, as a share of the median
    spread = (summary.high_s - summary.low_s) / 2.0 / summary.median_s
    line = f"{name}  {format_seconds(summary.median_s):>9s} +-{100 * spread:3.0f} %"
    traffic = OPERATIONS[m.operation].bus_factor(m.group_size) * (m.size_bytes or 0.0)
    # a rank alone has no traffic
    return f"{line}  {traffic / summary.median_s / GB:8.3f} GB/s" if traffic else line


class Progress:
    """Reports finished cells to stderr; a context manager."""

    def __init__(self, num_cells: int, *, enabled: bool) -> None:
        self._num_cells = num_cells
        self._done = 0
        self._begun_s = time.monotonic()
        self._enabled = enabled
        self._bar: object | None = None

    def __enter__(self) -> Self:
        if self._enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress as Bar,
                TextColumn,
                TimeElapsedColumn,
            )

            bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            bar.add_task("measuring", total=self._num_cells)
            bar.start()
            self._bar = bar
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away, so that what follows is readable."""
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]
            self._bar = None

    def begin(self, name: str) -> None:
        """Show what is being measured."""
        if self._bar is not None:
            self._bar.update(0, description=name)  # type: ignore[attr-defined]

    def done(self, measurement: Measurement) -> None:
        """Report a finished cell."""
        self.report(describe(measurement) if self._enabled else "")

    def report(self, line: str) -> None:
        """Report a finished cell in these words."""
        self._done += 1
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)  # type: ignore[attr-defined]
            self._bar.advance(0)  # type: ignore[attr-defined]
        else:
            count = f"[{self._done:>{len(str(self._num_cells))}d}/{self._num_cells}]"
            say(f"{count} {line}")

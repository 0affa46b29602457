"""Report of the frontier: the best throughput by memory budget."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.command.console import Console, escape
from autopar.command.show import (
    COLOURS,
    GRID,
    MARKERS,
    QUIET,
    drawn,
    make_table,
    print_heading,
    save_figure,
)
from autopar.output import Aside
from autopar.units import GIB, format_seconds

if TYPE_CHECKING:
    from search.planning.layered.prediction import SearchResult


def show_frontier(console: Console, results: Sequence[SearchResult]) -> None:
    """Print a table of the best throughput and plan for each memory budget."""
    print_heading(console, "Throughput by memory budget")
    columns = ("GiB/GPU", "samples/s", "step time", "plan")
    table = make_table(*columns, left=0, words_last=True, spaced=True, ruled=False)
    for result in results:
        if result.plan is None or result.prediction is None:
            continue
        budget = result.options.get("memory_constraint_bytes")
        table.add_row(
            f"{budget / GIB:.2f}" if isinstance(budget, int | float) else "-",
            f"{result.prediction.samples_per_s:.4g}",
            format_seconds(result.prediction.step_time_s),
            escape(result.words(batch=True)),
        )
    console.print(table)


def save_frontier(
    results: Sequence[SearchResult], path: Path, title: str, aside: Aside | None = None
) -> None:
    """Draw the best throughput over the memory of a GPU, as .png or .svg.

    A plan is the best from its budget up to the next larger one. aside : see `autopar.output`.
    Raises OptionError if the file cannot be written, and InstallError without matplotlib.
    """
    points: list[tuple[float, float, str]] = []
    for result in results:
        budget = result.options.get("memory_constraint_bytes")
        if result.plan is None or result.prediction is None or not isinstance(budget, int | float):
            continue
        words = textwrap.shorten(result.words(), 48, placeholder=" ..")
        points.append((budget / GIB, result.prediction.samples_per_s, words))
    points.sort()
    with drawn("--plot") as figure_of:
        figure = figure_of(figsize=(8.0, 4.5), layout="constrained")
        plot = figure.subplots()
        gib, speed = [one[0] for one in points], [one[1] for one in points]
        plot.step(gib, speed, where="post", color=COLOURS[0], marker=MARKERS[0], markersize=4)
        # Labels of many plans would overlap: only both ends and the largest steps are labelled.
        gains = [b - a for a, b in pairwise(speed)]
        steps = sorted(range(len(gains)), key=lambda at: -gains[at])[:_NAMED_POINTS]
        for at in {0, len(points) - 1, *(step + 1 for step in steps)} if points else ():
            left = gib[at] < (gib[0] + gib[-1]) / 2
            plot.annotate(
                points[at][2],
                (gib[at], speed[at]),
                xytext=(6 if left else -6, -9),
                textcoords="offset points",
                ha="left" if left else "right",
                fontsize=7,
                color=QUIET,
            )
        plot.set_title(title, loc="left")
        plot.set_xlabel("memory budget, GiB/GPU", color=QUIET)
        plot.set_ylabel("samples/s", color=QUIET)
        plot.set_ylim(bottom=0.0)
        plot.grid(color=GRID)
        plot.set_axisbelow(True)
        save_figure(figure, path, "--plot", aside)


_NAMED_POINTS = 3
"""Number of labelled steps of a frontier, in addition to both ends."""

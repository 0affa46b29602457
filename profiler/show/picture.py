"""Latency-bandwidth curves as a picture (PNG or SVG); matplotlib is optional."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.errors import InputError, OptionError
from autopar.pictures import COLOURS, GRID, MARKERS, QUIET, drawn, save_figure
from autopar.units import GB, format_seconds
from profiler.show.curves import Quantity, plots, value_of
from profiler.show.frame import format_size
from profiler.show.load import Folder
from profiler.show.provenance import stamps
from profiler.show.series import Point, Series, series_of

__all__ = ["check_suffix", "save_picture"]

_SUFFIXES = (".png", ".svg")
_FEW_DECADES = 300.0
"""Below this ratio of the ends of an axis 2 and 5 are labelled too."""


def check_suffix(path: Path) -> None:
    """Raise OptionError unless the picture's name ends in .png or .svg."""
    if path.suffix.lower() not in _SUFFIXES:
        raise OptionError(f"--plot is {str(path)!r}, expected a file that ends in .png or .svg")


def save_picture(folder: Folder, path: Path) -> None:
    """Write times and bus bandwidths over message size, one row of plots per operation.

    Raises
    ------
    OptionError: another suffix, or the file cannot be written.
    InstallError: matplotlib is not installed.
    InputError: nothing was measured at more than one size.
    """
    check_suffix(path)
    rows = [
        (profile, name, found)
        for profile in folder.profiles
        for name, found in plots(series_of(profile)).items()
    ]
    if not rows:
        raise InputError(
            f"{folder.path}: no operation has times of two sizes, so there is no curve to draw; "
            "a sidecar or a sp_time file has them"
        )
    with drawn("--plot") as Figure:
        figure = Figure(figsize=(11.0, 0.7 + 3.1 * len(rows)), layout="constrained")
        axes = figure.subplots(len(rows), 2, squeeze=False)
        figure.suptitle(_title(folder), fontsize=11)
        figure.supxlabel(_caption([s for row in rows for s in row[2]]), fontsize=8, color=QUIET)
        for (profile, name, found), (left, right) in zip(rows, axes, strict=True):
            prefix = f"{profile.title}: " if len(folder.profiles) > 1 else ""
            _plot(left, found, "time", f"{prefix}{name}, time")
            _plot(right, found, "bandwidth", f"{prefix}{name}, bus bandwidth")
        save_figure(figure, path, "--plot")


def _title(folder: Folder) -> str:
    marks = dict.fromkeys(stamp for profile in folder.profiles for stamp in stamps(profile))
    names = dict.fromkeys(s.name for p in folder.profiles for s in p.sidecars if s.name)
    shapes = ", ".join(profile.title for profile in folder.profiles)
    devices = dict.fromkeys(str(d) for p in folder.profiles if (d := p.metadata.get("device")))
    title = f"{', '.join(names) or folder.path.resolve().name}: {', '.join([shapes, *devices])}"
    return "\n".join([title, *(["; ".join(marks)] if marks else [])])


def _caption(drawn: Sequence[Series]) -> str:
    """Return what points, bars and lines mean, as far as they are drawn."""
    parts = ["lines: fitted latency + size / bandwidth"]
    if any(point.low_s is not None for series in drawn for point in series.points):
        parts[:0] = ["points: medians", "bars: 5th to 95th percentile"]
    if any(not series.consecutive for series in drawn):
        parts.append("hollow points and dashed lines: strided groups")
    return "; ".join(parts)


def _plot(axes: Any, found: Sequence[Series], quantity: Quantity, title: str) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    groups = sorted({series.group_size for series in found})
    for series in found:
        place = groups.index(series.group_size)
        colour = COLOURS[place % len(COLOURS)]
        values = [value_of(quantity, series, point) for point in series.points]
        sizes = [point.size_bytes for point in series.points]
        middle = [value[0] for value in values]
        bars = None
        if any(value[1] is not None for value in values):
            bars = [
                [max(0.0, m - (m if low is None else low)) for m, low, _ in values],
                [max(0.0, (m if high is None else high) - m) for m, _, high in values],
            ]
        axes.errorbar(
            sizes,
            middle,
            yerr=bars,
            fmt=MARKERS[place % len(MARKERS)],
            color=colour,
            markerfacecolor=colour if series.consecutive else "white",
            markersize=4.5,
            elinewidth=1.0,
            capsize=2.0,
            label=series.label,
        )
        line = _line(series, quantity)
        if line is not None:
            axes.plot(
                *line, color=colour, linewidth=1.0, linestyle="-" if series.consecutive else "--"
            )
    axes.set_title(title, loc="left")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: format_size(value))
    if quantity == "time":
        axes.yaxis.set_major_formatter(lambda value, _: format_seconds(float(f"{value:.3g}")))
    else:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value / GB:g} GB/s")
    low, high = axes.get_ylim()
    if high / low < _FEW_DECADES:
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(visible=True, which="major", color=GRID, linewidth=0.6)
    axes.set_xlabel("message size")
    axes.legend(
        fontsize=8,
        edgecolor=GRID,
        loc="best",
        title=None if found[0].operation == "p2p" else "ranks",
    )


def _line(series: Series, quantity: Quantity) -> tuple[list[float], list[float]] | None:
    """Return sizes and values of the fitted line, 60 points between the ends of the series."""
    if series.fit is None:
        return None
    latency, per_byte = series.fit
    low, high = series.points[0].size_bytes, series.points[-1].size_bytes
    sizes = [low * math.exp(math.log(high / low) * i / 59) for i in range(60)]
    points = [Point(size_bytes=s, time_s=latency + s * per_byte) for s in sizes]
    kept = [point for point in points if point.time_s > 0.0]
    return (
        [point.size_bytes for point in kept],
        [value_of(quantity, series, point)[0] for point in kept],
    )

"""Latency-bandwidth curves as a picture (PNG or SVG); matplotlib is optional."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from autopar.command.console import Console
from autopar.command.show import (
    COLOURS,
    GRID,
    MARKERS,
    OPERATION_NAMES,
    QUIET,
    drawn,
    print_heading,
    save_figure,
)
from autopar.errors import InputError, OptionError
from autopar.output import Aside
from autopar.rates.measured import OPERATIONS, bus_bytes_per_s
from autopar.records import Record
from autopar.units import GB, format_seconds, format_size
from profiler.show.read import (
    Folder,
    Point,
    Series,
    SeriesKey,
    series_of,
    stamps,
)

# --------------------------------------------------------------------------------------------------
# Latency-bandwidth curves in characters: points, p5-p95 bars and fitted lines, both axes log.


Quantity = Literal["time", "bandwidth"]

_WIDTH = 80
_ROWS = 17
_LABEL = 9
_MANY = 8
"""Maximum series per plot; with more, strided groups get a separate plot."""
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


class Marks(Record):
    """Characters of a plot."""

    points: str
    line: str
    bar: str
    axis: str
    tick: str
    floor: str
    corner: str
    foot: str


UNICODE = Marks(
    points="●■▲◆○□△◇✚✖★☆",
    line="·",
    bar="│",
    axis="│",
    tick="┤",
    floor="─",
    corner="└",
    foot="┬",
)
ASCII = Marks(
    points="oxa#*@dvsznw", line=".", bar=":", axis="|", tick="+", floor="-", corner="+", foot="+"
)


def plots(series: Mapping[SeriesKey, Series]) -> dict[str, list[Series]]:
    """Return the series with at least two points, by the title of their plot."""
    result: dict[str, list[Series]] = {}
    for operation in OPERATIONS:
        found = [s for s in series.values() if s.operation == operation and len(s.points) > 1]
        name = OPERATION_NAMES[operation]
        if len(found) > _MANY:
            result[name] = [s for s in found if s.consecutive]
            result[f"{name}, strided groups"] = [s for s in found if not s.consecutive]
        else:
            result[name] = found
    return {name: found for name, found in result.items() if found}


def value_of(
    quantity: Quantity, series: Series, point: Point
) -> tuple[float, float | None, float | None]:
    """Return the value to draw, in s or bytes/s, and the lower and upper end of its bar."""
    times = (point.time_s, point.low_s, point.high_s)
    if quantity == "time":
        return times
    # The longest time is the lowest bandwidth, so the ends of a bar are swapped.
    middle, high, low = (
        None
        if time is None
        else bus_bytes_per_s(series.operation, series.group_size, point.size_bytes, time)
        for time in times
    )
    assert middle is not None
    return middle, low, high


def show_curves(
    console: Console, series: Mapping[SeriesKey, Series], quantity: Quantity, marks: Marks
) -> None:
    """Print one plot per operation, with one series per group size and kind."""
    what = "time" if quantity == "time" else "bus bandwidth in GB/s"
    for name, found in plots(series).items():
        print_heading(console, f"{name}: {what} over message size")
        for line in draw(found, quantity, marks):
            console.print(line, soft_wrap=True)


def draw(series: Sequence[Series], quantity: Quantity, marks: Marks) -> list[Text]:
    """Return the lines of one plot, at most 80 columns wide, legend included."""
    size_range = _range(point.size_bytes for s in series for point in s.points)
    values = [
        value
        for s in series
        for point in s.points
        for value in value_of(quantity, s, point)
        if value is not None and 0.0 < value < math.inf
    ]
    columns = _WIDTH - _LABEL - 2
    across = _scale(*size_range, columns - 1)
    lowest, highest = _range(values)
    up = _scale(lowest, highest, _ROWS - 1)
    grid: list[list[tuple[str, str]]] = [[(" ", "")] * columns for _ in range(_ROWS)]

    def put(column: float, row: float, mark: str, style: str) -> None:
        # An implausibly short time gives an infinite bandwidth.
        if not (math.isfinite(column) and math.isfinite(row)):
            return
        if 0 <= round(column) < columns and 0 <= round(row) < _ROWS:
            grid[_ROWS - 1 - round(row)][round(column)] = (mark, style)

    styled = [(s, _COLOURS[index % len(_COLOURS)]) for index, s in enumerate(series)]
    for s, style in styled:
        first, last = (round(across(s.points[i].size_bytes)) for i in (0, -1))
        growth = size_range[1] / size_range[0]
        # Equal column steps are equal size factors.
        steps = (size_range[0] * growth ** (c / (columns - 1)) for c in range(first, last + 1))
        for size, value in _fitted(s, quantity, steps):
            put(across(size), up(value), marks.line, style)
    for s, style in styled:
        for point in s.points:
            _, low, high = value_of(quantity, s, point)
            if low is not None and high is not None and low > 0.0:
                for row in range(math.ceil(up(low)), math.floor(up(high)) + 1):
                    put(across(point.size_bytes), row, marks.bar, style)
    # Points are drawn last, so that neither lines nor bars hide them.
    for index, (s, style) in enumerate(styled):
        mark = marks.points[index % len(marks.points)]
        for point in s.points:
            value, _, _ = value_of(quantity, s, point)
            put(across(point.size_bytes), up(value), mark, style)

    ticks = {round(up(value)): _label(quantity, value) for value in _ticks(lowest, highest)}
    lines = []
    for index, cells in enumerate(grid):
        label = ticks.get(_ROWS - 1 - index, "")
        line = Text(f"{label:>{_LABEL}} {marks.tick if label else marks.axis}")
        for mark, style in cells:
            line.append(mark, style or None)
        line.rstrip()
        lines.append(line)
    lines += _foot(size_range, columns, across, marks)
    lines += _legend(styled, marks)
    return lines


_SPAN = 1e-15


def _range(values: Iterable[float]) -> tuple[float, float]:
    """Return the smallest and largest value, far enough apart for a logarithmic axis."""
    found = list(values)
    high = max(found)
    low = max(min(found), high * _SPAN)  # smaller values would hide the others
    # Equal ends would have no length on a logarithmic axis.
    return (low, high) if high > low * 1.05 else (low / 1.2, high * 1.2)


def _scale(low: float, high: float, steps: int) -> Callable[[float], float]:
    """Return the function from a value to its position on a logarithmic axis, 0 to `steps`."""
    factor = steps / math.log(high / low)
    return lambda value: math.log(value / low) * factor


def _fitted(
    series: Series, quantity: Quantity, sizes: Iterable[float]
) -> Iterator[tuple[float, float]]:
    """Yield (size, value) on the fitted line; nothing without a fit."""
    if series.fit is None:
        return
    latency, per_byte = series.fit
    for size in sizes:
        time_s = latency + size * per_byte
        if time_s > 0.0:
            yield size, value_of(quantity, series, Point(size_bytes=size, time_s=time_s))[0]


def _ticks(low: float, high: float) -> list[float]:
    """Return round values of an axis: 1, 2, 5 per decade, or decades only on a long axis."""
    steps = (1,) if high / low > 300 else (1, 2, 5)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [step * 10.0**exponent for exponent in exponents for step in steps]
    return [value for value in found if low <= value <= high] or [low, high]


def _label(quantity: Quantity, value: float) -> str:
    rounded = float(f"{value:.2g}")
    return format_seconds(rounded) if quantity == "time" else f"{rounded / GB:g}"


def _foot(
    size_range: tuple[float, float], columns: int, across: Callable[[float], float], marks: Marks
) -> list[Text]:
    """Return the size axis, with a tick per factor of 4 or 16, and its labels."""
    low, high = (round(math.log2(size)) for size in size_range)
    step = 2 if high - low <= 18 else 4
    exponents = [e for e in range(low, high + 1) if e % step == 0] or [low]
    axis, names = [marks.floor] * columns, [" "] * (columns + 4)
    for exponent in exponents:
        column = round(across(2.0**exponent))
        if not 0 <= column < columns:
            continue
        axis[column] = marks.foot
        name = format_size(2.0**exponent)
        start = max(0, min(column - len(name) // 2, columns - len(name)))
        if all(character == " " for character in names[max(0, start - 1) : start + len(name)]):
            names[start : start + len(name)] = name
    pad = " " * (_LABEL + 1)
    return [
        Text(pad + marks.corner + "".join(axis)),
        Text((pad + " " + "".join(names)).rstrip()),
    ]


def _legend(styled: Sequence[tuple[Series, str]], marks: Marks) -> list[Text]:
    """Return the legend of the marks, in as many lines as needed."""
    what = "" if styled[0][0].operation.startswith("p2p") else "ranks: "
    items: list[tuple[str, str]] = [
        (f"{marks.points[index % len(marks.points)]} {series.label}", style)
        for index, (series, style) in enumerate(styled)
    ]
    if any(series.fit is not None for series, _ in styled):
        items.append((f"{marks.line * 3} fit", ""))
    if any(point.low_s is not None for series, _ in styled for point in series.points):
        items.append((f"{marks.bar} p5-p95", ""))
    lines = [Text(" " * (_LABEL + 2) + what)]
    for text, style in items:
        if len(lines[-1]) + len(text) > _WIDTH:
            lines.append(Text(" " * (_LABEL + 2)))
        lines[-1].append(text, style or None)
        lines[-1].append("   ")
    for line in lines:
        line.rstrip()
    return lines


# --------------------------------------------------------------------------------------------------
# The picture file: curves by operation.


_SUFFIXES = (".png", ".svg")
_FEW_DECADES = 300.0
"""Ratio of the ends of an axis below which 2 and 5 are labelled too."""


def check_suffix(path: Path) -> None:
    """Raise OptionError unless the picture's name ends in .png or .svg."""
    if path.suffix.lower() not in _SUFFIXES:
        raise OptionError(f"--plot is {str(path)!r}, expected a file that ends in .png or .svg")


def save_picture(folder: Folder, path: Path, aside: Aside | None = None) -> None:
    """Write times and bus bandwidths over message size, one row of plots per operation.

    Raises OptionError: wrong suffix, or the file cannot be written. Raises InstallError: matplotlib
    is not installed. Raises InputError: no operation was measured at more than one size.
    """
    check_suffix(path)
    rows = [
        (profile, name, found)
        for profile in folder.profiles
        for name, found in plots(series_of(profile)).items()
    ]
    if not rows:
        raise InputError(
            f"{folder.path}: no operation has times of two sizes, so there is no curve to draw",
            remedy="Use a folder with a sidecar or a sp_time file",
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
        save_figure(figure, path, "--plot", aside)


def _title(folder: Folder) -> str:
    marks = dict.fromkeys(stamp for profile in folder.profiles for stamp in stamps(profile))
    names = dict.fromkeys(s.name for p in folder.profiles for s in p.sidecars if s.name)
    shapes = ", ".join(profile.title for profile in folder.profiles)
    devices = dict.fromkeys(str(d) for p in folder.profiles if (d := p.metadata.get("device")))
    title = f"{', '.join(names) or folder.path.resolve().name}: {', '.join([shapes, *devices])}"
    return "\n".join([title, *(["; ".join(marks)] if marks else [])])


def _caption(drawn: Sequence[Series]) -> str:
    """Return the explanation of the points, bars and lines that are drawn."""
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
                # errorbar expects the lengths of bars, not their ends.
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
        # 60 points between the ends of the series.
        steps = (sizes[0] * (sizes[-1] / sizes[0]) ** (i / 59) for i in range(60))
        line = list(_fitted(series, quantity, steps))
        if line:
            style = "-" if series.consecutive else "--"
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=1.0, linestyle=style)
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

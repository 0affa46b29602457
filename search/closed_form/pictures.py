"""Charts of search results: scaling, breakdown, frontier, map of degrees and sweeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autopar.command.show import COLOURS, GRID, MARKERS, QUIET, save_figures
from autopar.output import Aside
from autopar.units import GIB, format_seconds
from search.closed_form.answers import Answer, Part, Point
from search.show.closed_form import by_strategy, efficiencies

PICTURES = ("breakdown", "scaling", "frontier", "degrees", "sweep")
"""File names of the charts, without suffix."""

_LINES = ("-", "--", "-.", ":")
_HATCHES = ("", "///", "...", "\\\\\\", "xxx", "---", "ooo", "+++")
_BARS = 12
"""Maximum number of bars in the breakdown."""
_THIN = 5e-3
"""Minimum length of a drawn part, as a fraction of the longest bar."""
_CURVES = 8
"""Maximum curves in one plot."""
_MAPS = 6
"""Maximum number of maps in one chart."""
_WIDE = 8.0
"""Ratio of largest to smallest value above which an axis is logarithmic."""


def save_pictures(
    folder: str,
    answers: Sequence[Answer],
    *,
    title: str,
    unit: str,
    paths: Sequence[str],
    formats: Sequence[str],
    aside: Aside | None = None,
) -> list[Path]:
    """Write all charts for which there are data to a folder; return the paths of the files.

    If `paths` contains swept numbers, only the sweep is drawn. Raises the errors of `save_figures`.

    unit : word for one device, 'processor' or 'GPU'.
    formats : file suffixes, such as 'svg'.
    aside : called if an existing file is replaced (see `autopar.output`).
    """
    found = [answer for answer in answers if answer.best]
    pictures: dict[str, Callable[[Any], Any]] = {}
    if paths:
        pictures["sweep"] = lambda Figure: _sweep(Figure, found, paths, unit)
    else:
        pictures["breakdown"] = lambda Figure: _breakdown(Figure, found, unit)
        if len({answer.processors for answer in found}) > 1:
            pictures["scaling"] = lambda Figure: _scaling(Figure, found, unit)
        if any(len(answer.frontier) > 1 for answer in found):
            pictures["frontier"] = lambda Figure: _frontier(Figure, found, unit)
        if any(answer.degrees for answer in found):
            pictures["degrees"] = lambda Figure: _degrees(Figure, found, unit)
    assert set(pictures) <= set(PICTURES), pictures

    def titled(draw: Callable[[Any], Any], Figure: Any) -> Any:
        figure = draw(Figure)
        figure.suptitle(title, fontsize=11)
        return figure

    drawings = {name: partial(titled, draw) for name, draw in pictures.items()}
    return save_figures(folder, drawings, formats, aside)


def _scaling(Figure: Any, answers: Sequence[Answer], unit: str) -> Any:
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(9.0, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, group in enumerate(by_strategy(answers)):
        counts = [answer.processors for answer in group]
        rates = [answer.best[0].rate_per_s for answer in group]
        look = _look(place)
        left.plot(counts, rates, label=group[0].strategy or "best execution", **look)
        right.plot(counts, [(share or 0.0) * 100 for share in efficiencies(group)], **look)
        if place == 0:
            ideal = [rates[0] * count / counts[0] for count in counts]
            left.plot(counts, ideal, color=QUIET, linewidth=0.8, linestyle=(0, (1, 2)))
            words = "dotted: in proportion to the first"
            look = {"xycoords": "axes fraction", "color": QUIET, "ha": "right"}
            left.annotate(words, (1.0, 0.02), fontsize=8, **look)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        ticks = sorted({answer.processors for answer in answers})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel(f"{unit}s")
        _grid(axes)
    left.set_yscale("log")
    low, high = left.get_ylim()
    left.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 300 else (1.0,)))
    left.yaxis.set_minor_locator(NullLocator())
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    left.set_ylabel("samples/s")
    left.set_title("rate of the best execution", loc="left")
    right.set_ylim(0, right.get_ylim()[1] * 1.05)
    right.set_ylabel(f"% of the rate per {unit} of the first")
    right.set_title("efficiency", loc="left")
    if any(answer.strategy for answer in answers):
        left.legend(fontsize=8, edgecolor=GRID, loc="upper left")
    return figure


def _breakdown(Figure: Any, answers: Sequence[Answer], unit: str) -> Any:
    bars: list[tuple[str, Point]]
    alone = len(answers) == 1
    if alone:
        best = enumerate(answers[0].best, 1)
        bars = [(f"#{place}  {point.degrees}", point) for place, point in best]
    else:
        bars = [(f"{_named(a, unit)}\n{a.best[0].degrees}", a.best[0]) for a in answers]
    bars = bars[:_BARS]
    figure = Figure(figsize=(11.0, 2.2 + (0.4 if alone else 0.52) * len(bars)))
    figure.set_layout_engine("constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    # With one number of processors, steps are compared in seconds, otherwise in percent.
    wholes = [1.0 if alone else point.time_s / 100.0 for _, point in bars]
    _stack(left, [point.time for _, point in bars], wholes)
    _stack(right, [point.memory for _, point in bars], [GIB] * len(bars))
    for place, ((_, point), whole) in enumerate(zip(bars, wholes, strict=True)):
        end = (point.time_s / whole, place)
        _note(left, format_seconds(point.time_s), end, (4, 0), va="center")
    # Space for the labels; automatic margins would depend on parts that only some bars have.
    left.set_xlim(0, 1.14 * max(p.time_s / w for (_, p), w in zip(bars, wholes, strict=True)))
    left.set_yticks(range(len(bars)), [name for name, _ in bars])
    left.invert_yaxis()
    left.set_xlabel("seconds of a step" if alone else "% of the step, with its length behind it")
    left.set_title("where the time goes", loc="left")
    right.set_xlabel(f"GiB of one {unit}")
    right.set_title("where the memory goes", loc="left")
    capacity = answers[0].capacity_bytes / GIB
    _mark_capacity(right, capacity)
    for axes, what, side in ((left, "time", "left"), (right, "memory", "right")):
        # Below the plots, where there are no bars.
        title = f"{what}, without parts under {_THIN * 100:.1f} % of the longest bar"
        _legend(figure, axes, f"lower {side}", title, ncols=3)
    return figure


def _stack(axes: Any, bars: Sequence[Sequence[Part]], wholes: Sequence[float]) -> None:
    """Draw stacked bars, without parts that are too short in all bars (`_THIN`).

    bars : parts of each bar.
    wholes : amount that is drawn as 1, per bar.
    """
    names = dict.fromkeys(part.name for parts in bars for part in parts)
    amounts = [
        {part.name: part.amount / whole for part in parts}
        for parts, whole in zip(bars, wholes, strict=True)
    ]
    longest = max((sum(parts.values()) for parts in amounts), default=0.0)
    shown = [n for n in names if max(parts.get(n, 0.0) for parts in amounts) > longest * _THIN]
    starts = [0.0] * len(bars)
    for place, name in enumerate(shown):
        values = [parts.get(name, 0.0) for parts in amounts]
        axes.barh(
            range(len(bars)),
            values,
            left=starts,
            height=0.7,
            color=COLOURS[place % len(COLOURS)],
            # Repeated colours get a different hatch.
            hatch=_HATCHES[(place + place // len(COLOURS)) % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.4,
            label=name,
        )
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    axes.grid(visible=True, axis="x", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)


def _frontier(Figure: Any, answers: Sequence[Answer], unit: str) -> Any:
    groups = by_strategy(answers)
    figure = Figure(figsize=(2.5 + 4.5 * len(groups), 4.6), layout="constrained")
    plots = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    capacity = answers[0].capacity_bytes / GIB
    for axes, group in zip(plots, groups, strict=True):
        for place, answer in enumerate(group[:_CURVES]):
            memory = [point.memory_bytes / GIB for point in answer.frontier]
            rates = [point.rate_per_s for point in answer.frontier]
            look = _look(place) | {"markersize": 3.5, "linestyle": "-"}
            name = f"{answer.processors:,}"
            # An execution that fits in less memory fits in more, so the curve is a step function.
            axes.step(memory[::-1], rates[::-1], where="post", label=name, **look)
        _mark_capacity(axes, capacity)
        axes.set_xlim(0, capacity * 1.03)
        axes.set_xlabel(f"GiB that one {unit} needs")
        axes.set_title(group[0].strategy or "", loc="left")
        _grid(axes)
    plots[0].set_ylim(0, None)
    plots[0].set_ylabel("most samples/s")
    if any(len(group) > 1 for group in groups):
        longest = max(groups, key=len)
        title = f"{unit}s" + _left_out(len(longest))
        _legend(figure, plots[groups.index(longest)], "right center", title)
    return figure


def _degrees(Figure: Any, answers: Sequence[Answer], unit: str) -> Any:
    """Draw the best samples per second by tensor and pipeline degree, one map per search."""
    from matplotlib.patches import Patch

    shown = answers[:_MAPS]
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(2.0 + 4.4 * columns, 1.2 + 3.9 * rows), layout="constrained")
    plots = figure.subplots(rows, columns, squeeze=False).ravel()
    refused = False
    for axes, answer in zip(plots, shown, strict=False):
        refused = _map(figure, axes, answer) or refused
        axes.set_xlabel("pipeline degree, stages")
        axes.set_ylabel(f"tensor degree, {unit}s")
        axes.set_title(_named(answer, unit), loc="left", fontsize=10)
    for axes in plots[len(shown) :]:
        axes.remove()
    keys = [Patch(facecolor="none", edgecolor="black", linewidth=2.0, label="the best of all")]
    if refused:
        keys.append(Patch(facecolor="0.85", edgecolor="0.45", hatch="///", label="none can run"))
    # A tensor2d search does not report the degrees of infeasible candidates.
    empty = "none there, or none can run" if shown[0].strategy else "no such pair in the space"
    keys.append(Patch(facecolor="white", edgecolor=GRID, label=empty))
    left_out = f"; the first {_MAPS} of {len(answers)}" if len(answers) > _MAPS else ""
    title = f"samples/s of the best execution of every pair of degrees{left_out}"
    _legend(figure, None, "lower center", title, handles=keys, ncols=len(keys))
    return figure


def _map(figure: Any, axes: Any, answer: Answer) -> bool:
    """Draw one map; return True if any pair of degrees has no feasible execution."""
    from matplotlib.patches import Rectangle

    tensor = sorted({t for t, _ in answer.degrees})
    stages = sorted({p for _, p in answer.degrees})
    rates = {pair: rate for pair, rate in answer.degrees.items() if rate is not None}
    cells = [[rates.get((t, p), float("nan")) for p in stages] for t in tensor]
    image = axes.imshow(cells, origin="lower", aspect="auto", cmap="viridis", vmin=0.0)
    top = max(rates, key=lambda pair: rates[pair])
    small = len(tensor) <= 10 and len(stages) <= 8
    for row, t in enumerate(tensor):
        for column, p in enumerate(stages):
            corner = (column - 0.5, row - 0.5)
            if (rate := rates.get((t, p))) is not None:
                if small:
                    dark = rate < 0.6 * rates[top]
                    look = {"color": "white" if dark else "black", "fontsize": 7}
                    axes.text(column, row, f"{rate:.3g}", ha="center", va="center", **look)
            elif (t, p) in answer.degrees:
                grey: dict[str, Any] = {"facecolor": "0.85", "edgecolor": "0.45", "hatch": "///"}
                axes.add_patch(Rectangle(corner, 1, 1, linewidth=0.0, **grey))
            if (t, p) == top:
                frame: dict[str, Any] = {
                    "fill": False,
                    "edgecolor": "black",
                    "linewidth": 2.0,
                    "zorder": 3,
                }
                axes.add_patch(Rectangle(corner, 1, 1, **frame))
    axes.set_xticks(range(len(stages)), [str(p) for p in stages])
    axes.set_yticks(range(len(tensor)), [str(t) for t in tensor])
    figure.colorbar(image, ax=axes).set_label("samples/s")
    return len(rates) < len(answer.degrees)


def _sweep(Figure: Any, answers: Sequence[Answer], paths: Sequence[str], unit: str) -> Any:
    curves: dict[str, list[Answer]] = {}
    several = len({(answer.processors, answer.strategy) for answer in answers}) > 1
    for answer in answers:
        rest = zip(paths[1:], answer.values[1:], strict=True)
        words = [f"{path.split('.', 1)[1]} = {value:g}" for path, value in rest]
        name = ", ".join([*([_named(answer, unit)] if several or not words else []), *words])
        curves.setdefault(name, []).append(answer)
    figure = Figure(figsize=(12.0, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, (name, found) in enumerate(list(curves.items())[:_CURVES]):
        values = [answer.values[0] for answer in found]
        look = _look(place)
        left.plot(values, [a.best[0].rate_per_s for a in found], label=name, **look)
        right.plot(values, [a.best[0].memory_bytes / GIB for a in found], **look)
        before = None
        for answer in found:
            best = answer.best[0]
            if best.degrees != before and len(curves) <= 2:
                place_of = (answer.values[0], best.rate_per_s)
                _note(left, best.degrees, place_of, (4, -11), color=look["color"])
            before = best.degrees
    swept = sorted({answer.values[0] for answer in answers})
    for axes in (left, right):
        if swept[0] > 0 and swept[-1] / swept[0] > _WIDE:
            axes.set_xscale("log")
            axes.minorticks_off()
            axes.set_xticks(swept[:: -(-len(swept) // 8)])
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.4g}")
        axes.set_xlabel(paths[0])
        axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
        _grid(axes)
    left.margins(x=0.12)  # space for the last labels
    left.set_ylabel("samples/s")
    left.set_title("rate of the best execution", loc="left")
    right.set_ylabel(f"GiB that one {unit} needs")
    right.set_title("memory of the best execution", loc="left")
    if len(curves) > 1:
        _legend(figure, left, "right center", _left_out(len(curves)).strip() or None)
    return figure


def _mark_capacity(axes: Any, capacity: float) -> None:
    axes.axvline(capacity, color="black", linewidth=1.0, linestyle="--")
    top: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "right"}
    _note(axes, f"capacity {capacity:.4g} GiB", (capacity, 1.0), (0, 3), **top)


def _note(
    axes: Any, words: str, at: tuple[float, float], away: tuple[int, int], **look: Any
) -> None:
    """Annotate a position in data coordinates; away : offset of the text, points (1/72 inch)."""
    axes.annotate(words, at, xytext=away, textcoords="offset points", fontsize=8, **look)


def _legend(figure: Any, axes: Any, where: str, title: str | None, **more: Any) -> None:
    """Add a legend outside of the plots.

    axes : plot whose labels are listed; None to list the `handles` in `more`.
    where : location as in Matplotlib, such as 'lower center'.
    """
    named = () if axes is None else axes.get_legend_handles_labels()
    look: dict[str, Any] = {"fontsize": 8, "title_fontsize": 8, "edgecolor": GRID}
    figure.legend(*named, loc=f"outside {where}", title=title, **look, **more)


def _left_out(curves: int) -> str:
    return f" (the first {_CURVES} of {curves})" if curves > _CURVES else ""


def _look(place: int) -> dict[str, Any]:
    """Return colour, marker and line style of curve number `place`; each differs between curves."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[place % len(MARKERS)],
        "linestyle": _LINES[place % len(_LINES)],
        "markersize": 5.0,
        "linewidth": 1.3,
    }


def _named(answer: Answer, unit: str) -> str:
    words = [f"{answer.processors:,} {unit}s", *([answer.strategy] if answer.strategy else [])]
    return ", ".join(words)


def _grid(axes: Any) -> None:
    axes.grid(visible=True, which="major", color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)

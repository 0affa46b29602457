"""Static charts of a page: bars as HTML, points and lines as SVG, with text alternatives.

Colours are classes of the page's style sheet, so that charts adapt to light mode, dark mode and
print. The title of a mark contains its meaning, for browsers and screen readers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from autopar.records import Record
from search.show.pictures.terms import colour_of

_LONG = 16
_NEAR = 0.7
"""Ratio of lowest to highest value above which a scatter axis does not begin at 0."""
_WIDTH, _HEIGHT = 420, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 44


class Point(Record):
    """One mark of a chart."""

    x: float
    y: float
    words: str
    chosen: bool = False
    """True if the mark is the answer."""


class Series(Record):
    """Marks of one colour, connected in line charts."""

    name: str
    points: tuple[Point, ...]


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, words: Collection[int]) -> str:
    """Return an HTML table; words : indices of text columns, while the others are numbers."""
    rows = [*rows]
    # Columns of long texts keep a minimum width on narrow screens.
    wide = {at for at in words if any(len(row[at]) > _LONG for row in rows)}

    def kind(at: int) -> str:
        return ' class="n"' if at not in words else ' class="w"' if at in wide else ""

    head = "".join(
        f'<th scope="col"{kind(at)}>{escape(text)}</th>' for at, text in enumerate(heads)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<th scope="row"{kind(at)}>{escape(text)}</th>'
            if at == 0
            else f"<td{kind(at)}>{escape(text)}</td>"
            for at, text in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def bars(rows: Sequence[tuple[str, str, float, str]], total: float) -> str:
    """Return a waterfall chart, in which each bar begins where the last one ended.

    rows : (term, name in prose, value, printed value) of each bar.
    total : value of the full width.
    """
    start, found = 0.0, []
    for term, words, value, shown in rows:
        left, width = start / total * 100, max(value / total * 100, 0.0)
        found.append(
            f'<tr><th scope="row">{escape(words)}</th><td class="n">{escape(shown)}</td>'
            f'<td class="n">{value / total * 100:.1f} %</td><td class="bar" aria-hidden="true">'
            f'<span class="{colour_of(term)}" style="left:{left:.3f}%;width:{width:.3f}%"></span>'
            "</td></tr>"
        )
        start += value
    return (
        '<table class="bars"><thead><tr><th scope="col">term</th><th scope="col" class="n">time'
        '</th><th scope="col" class="n">share</th><td></td></tr></thead>'
        f"<tbody>{''.join(found)}</tbody></table>"
    )


class _Stack(NamedTuple):
    """A stacked bar."""

    name: str
    parts: Mapping[str, float]
    words: str
    """Text after the bar."""


def stacks(
    rows: Sequence[tuple[str, Mapping[str, float], str]],
    names: Sequence[str],
    limit: float,
    spoken: Mapping[str, str],
) -> str:
    """Return stacked bars with a line at a limit.

    rows : (label, value by part, text after the bar) of each bar.
    names : names of parts; their order defines the colours.
    spoken : names of parts in prose, if they differ.
    """
    stacked = [_Stack(*row) for row in rows]
    most = max([limit, *(sum(row.parts.values()) for row in stacked)]) * 1.02
    found = []
    for row in stacked:
        left, spans = 0.0, []
        for at, name in enumerate(names):
            width = row.parts.get(name, 0.0) / most * 100
            if width <= 0:
                continue
            spans.append(
                f'<span class="m{at % 10}" style="left:{left:.3f}%;width:{width:.3f}%" '
                f'title="{escape(spoken.get(name, name), quote=True)}"></span>'
            )
            left += width
        mark = f'<i style="left:{limit / most * 100:.3f}%"></i>'
        found.append(
            f'<tr><th scope="row">{escape(row.name)}</th>'
            f'<td class="bar" aria-hidden="true">{"".join(spans)}{mark}</td>'
            f'<td class="n">{escape(row.words)}</td></tr>'
        )
    keys = "".join(
        f'<li><span class="key m{at % 10}"></span>{escape(spoken.get(name, name))}</li>'
        for at, name in enumerate(names)
    )
    return (
        f'<table class="bars stacks"><tbody>{"".join(found)}</tbody></table><ul class="legend">'
        f'{keys}<li><span class="key limit"></span>limit</li></ul>'
    )


# --------------------------------------------------------------------------------------------------
# Points and lines


def ticks(low: float, high: float, number: int = 5) -> list[float]:
    """Return about `number` round values from at most `low` to at least `high`."""
    span = (high - low) or abs(high) or 1.0
    raw = span / max(number - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * unit for unit in (1, 2, 2.5, 5, 10) if power * unit >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [at * step for at in range(first, last + 1)]


def scatter(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    limit: tuple[float, str] | None = None,
) -> str:
    """Return a scatter chart; limit : x position and label of a vertical line."""
    points = [point for one in series for point in one.points]
    xs = [point.x for point in points] + ([limit[0]] if limit else [])
    x_ticks = ticks(min(xs), max(xs))
    low, high = (of(point.y for point in points) for of in (min, max))
    # Points show positions and not lengths, so the axis may start above 0 to separate them.
    y_ticks = ticks(low if low > _NEAR * high else 0.0, high)
    frame = _Frame((x_ticks[0], x_ticks[-1]), (y_ticks[0], y_ticks[-1]))
    inner = [frame.axes([(x, f"{x:g}") for x in x_ticks], y_ticks, x_label, y_label)]
    if limit is not None:
        x = frame.x(limit[0])
        inner.append(
            f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/>'
            f'<text class="note" x="{x - 4:.1f}" y="{_TOP + 10}" text-anchor="end">'
            f"{escape(limit[1])}</text>"
        )
    # The answer is drawn last, on top of the others.
    marks = [(at, point) for at, one in enumerate(series) for point in one.points]
    for at, point in sorted(marks, key=lambda mark: mark[1].chosen):
        inner.append(frame.mark(point, at))
    return _figure(title, "".join(inner), series)


def lines(series: Sequence[Series], *, title: str, x_label: str, y_label: str) -> str:
    """Return a line chart with a logarithmic x axis."""
    points = [point for one in series for point in one.points]
    xs = sorted({point.x for point in points})
    y_ticks = ticks(0.0, max(point.y for point in points))
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    margin = 0.08 * (high - low) or 0.5
    frame = _Frame((low - margin, high + margin), (0.0, y_ticks[-1]))
    axes = frame.axes([(math.log2(x), f"{x:,g}") for x in xs], y_ticks, x_label, y_label)
    inner = [axes]
    for at, one in enumerate(series):
        placed = [
            Point(x=math.log2(point.x), y=point.y, words=point.words, chosen=point.chosen)
            for point in one.points
        ]
        path = " ".join(f"{frame.x(point.x):.1f},{frame.y(point.y):.1f}" for point in placed)
        inner.append(f'<polyline class="line s{at % 6}" points="{path}"/>')
        inner += [frame.mark(point, at) for point in placed]
    return _figure(title, "".join(inner), series)


class _Frame:
    """Conversion of values to chart coordinates, in units of the SVG view box."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float]) -> None:
        self._x, self._y = x, y

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (value - low) / ((high - low) or 1.0) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return (
            _HEIGHT - _BOTTOM - (value - low) / ((high - low) or 1.0) * (_HEIGHT - _TOP - _BOTTOM)
        )

    def axes(
        self, x_ticks: Sequence[tuple[float, str]], y_ticks: Sequence[float], x: str, y: str
    ) -> str:
        bottom = _HEIGHT - _BOTTOM
        found = []
        for value in y_ticks:
            at = self.y(value)
            found.append(
                f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" '
                f'y2="{at:.1f}"/><text x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">'
                f"{value:,g}</text>"
            )
        for value, words in x_ticks:
            at = self.x(value)
            found.append(
                f'<line class="tick" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 4}"/>'
                f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{escape(words)}</text>'
            )
        middle = (_LEFT + _WIDTH - _RIGHT) / 2
        found.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>'
            f'<text class="label" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x)}'
            f'</text><text class="label" x="14" y="{(_TOP + bottom) / 2}" text-anchor="middle" '
            f'transform="rotate(-90 14 {(_TOP + bottom) / 2})">{escape(y)}</text>'
        )
        return "".join(found)

    def mark(self, point: Point, at: int) -> str:
        radius, chosen = (7, " chosen") if point.chosen else (4.5, "")
        return (
            f'<circle class="mark s{at % 6}{chosen}" cx="{self.x(point.x):.1f}" '
            f'cy="{self.y(point.y):.1f}" r="{radius}"><title>{escape(point.words)}</title></circle>'
        )


def _figure(title: str, inner: str, series: Sequence[Series]) -> str:
    named = [one for one in series if one.name]
    keys = "".join(
        f'<li><span class="key s{at % 6}"></span>{escape(one.name)}</li>'
        for at, one in enumerate(named)
    )
    legend = f'<ul class="legend">{keys}</ul>' if len(named) > 1 else ""
    label = escape(title, quote=True)
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{label}">{inner}</svg>{legend}</figure>'
    )

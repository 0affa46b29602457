"""Draw the pictures of the documentation: docs/assets/*.svg, the same bytes in every run.

Timeline, memory and frontier are those of `--html`, of one uniform and one per-layer plan; accuracy
is drawn from the published runs that `benchmarks.ledger` prices. A picture follows the colour
scheme of its reader and loads nothing. `docs.make_answers` writes and checks the files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from itertools import pairwise
from typing import TYPE_CHECKING

from autopar.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from search.show.pictures.page import Page
    from search.show.pictures.timeline import Span, Track

_UNIFORM = {
    "model": "llama3-70b",
    "hardware": "h100:8x8",
    "global-batch-size": "32",
    "engine": "megatron",
    "tp": "4",
    "cp": "1",
    "pp": "4",
    "vpp": "2",
}
"""Options of the plan whose step and memory are drawn: short enough to see its micro-batches."""
_PER_LAYER = {"model": "llama2-7b", "hardware": "a100-80gb:1x8", "global-batch-size": "64"}
"""Options of the plans of the frontier."""
_WIDTH = 860
_LEFT, _RIGHT = 74, 24
_VARIABLES = re.compile(r":root \{([^}]*)\}")
_RULES = """
text { fill: var(--quiet); font: 12px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
.paper { fill: var(--paper); } .title { fill: var(--ink); font-weight: 600; font-size: 14px; }
.ink { fill: var(--ink); } .grid { stroke: var(--rule); } .axis, .tick { stroke: var(--quiet); }
.limit { stroke: var(--limit); stroke-width: 1.5; stroke-dasharray: 5 3; }
.limit-text { fill: var(--limit); } .lane { fill: var(--rule); }
.later { opacity: 0.72; } .number { fill: #fff; }
.mark { stroke: var(--paper); } .line { fill: none; stroke: var(--s0); stroke-width: 2; }
.band { fill: var(--s0); opacity: 0.24; }
"""


# --------------------------------------------------------------------------------------------------
# A file


def _file(title: str, described: str, inner: Iterable[str], height: float) -> str:
    """Return a picture as a file; described : sentence for readers who do not see it."""
    body = "\n".join(inner)
    used = sorted(set(re.findall(r'class="([^"]+)"', body)))
    classes = sorted({name for one in used for name in one.split()})
    # series, kinds of work, terms and memory terms have colours of the page
    fills = " ".join(
        f".{name} {{ fill: var(--{name}); }}"
        for name in classes
        if re.fullmatch(r"k[FBIW]|[cms]\d+", name)
    )
    rules = f"{_RULES.strip()}\n{fills}"
    light, dark = _VARIABLES.findall(
        (files("search.show.pictures") / "page.css").read_text(encoding="utf-8")
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" role="img">\n'
        f"<title>{escape(title)}</title>\n<desc>{escape(described)}</desc>\n"
        f"<style>\n:root {{ {_used(light, rules)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_used(dark, rules)} }} }}\n"
        f"{rules.rstrip()}\n</style>\n"
        f'<rect class="paper" width="{_WIDTH}" height="{height:g}"/>\n'
        f'<text class="title" x="12" y="22">{escape(title)}</text>\n{body}\n</svg>\n'
    )


def _used(variables: str, rules: str) -> str:
    """Return the definitions of colours that rules use."""
    found = re.findall(r"(--\w+): ([^;]+);", variables)
    return " ".join(f"{name}: {value};" for name, value in found if f"var({name})" in rules)


def _rect(name: str, x: float, y: float, width: float, height: float, words: str = "") -> str:
    shape = f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:g}"'
    return f"{shape}><title>{escape(words)}</title></rect>" if words else f"{shape}/>"


def _text(words: str, x: float, y: float, name: str = "", anchor: str = "start") -> str:
    kind = f' class="{name}"' if name else ""
    side = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}"{side}>{escape(words)}</text>'


def _legend(keys: Iterable[tuple[str, str]], y: float) -> Iterator[str]:
    """Yield the keys of colours in a row; keys : (class, words)."""
    x = float(_LEFT)
    for name, words in keys:
        yield _rect(name, x, y - 9, 10, 10)
        yield _text(words, x + 15, y)
        x += _key_width(words)


def _key_width(words: str) -> float:
    """Return the pixels of a key of the legend, with its gap; `words` are of average letters."""
    return 38 + 6.9 * len(words)


def _x_axis(values: Sequence[tuple[float, str]], top: float, bottom: float, label: str) -> str:
    """Return grid lines with values below them, and the label of the axis."""
    lines = [
        f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top:g}" y2="{bottom:g}"/>'
        + _text(words, x, bottom + 16, anchor="middle")
        for x, words in values
    ]
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return "\n".join([*lines, _text(label, middle, bottom + 34, anchor="middle")])


# --------------------------------------------------------------------------------------------------
# A uniform plan


@cache
def _page() -> Page:
    """Return the content of the page of the uniform plan."""
    from search.planning.choose import chosen
    from search.request.request import build_request
    from search.show.pictures.answers import answer_page

    found = chosen(build_request(_UNIFORM)).launches
    assert found is not None, "the options are of a uniform plan"
    return answer_page(found, curves=False)


def _step() -> str:
    from search.show.pictures.charts import ticks
    from search.show.terms import time_name

    page = _page()
    timeline = page.timeline
    scale = (_WIDTH - _LEFT - _RIGHT) / timeline.step_s
    top, row, bar = 62, 46, 36
    bottom = top + row * len(timeline.tracks)
    marks = [at for at in ticks(0, timeline.step_s, 8) if at <= timeline.step_s]
    inner = [
        _text(page.line, 12, 42),
        _x_axis([(_LEFT + at * scale, f"{at:g}") for at in marks], top, bottom, "seconds"),
    ]
    once: dict[str, str] = {}
    for track in timeline.tracks:
        y = top + row * track.stage + (row - bar) / 2
        inner.append(_text(f"stage {track.stage}", _LEFT - 8, y + bar / 2 + 4, anchor="end"))
        inner.append(_rect("lane", _LEFT, y, timeline.step_s * scale, bar))
        inner += _passes(track, y, bar, scale)
        for span in _visible(track):
            name = _colour(span)
            once.setdefault(name, time_name(span.term))
            width = max((span.end_s - span.start_s) * scale, 0.8)
            inner.append(_rect(name, _LEFT + span.start_s * scale, y, width, bar, span.name))
    keys = [("kF", "forward"), ("kB", "backward"), ("lane", "idle"), *once.items()]
    if timeline.chunks > 1:
        keys.insert(2, ("kB later", "later chunk"))
    height = bottom + 58
    for line in _wrapped(keys):
        inner += _legend(line, height)
        height += 20
    described = (
        f"A step of {format_seconds(timeline.step_s)} with {len(timeline.tracks)} pipeline stages, "
        f"{timeline.micro_batches} micro-batches and {timeline.chunks} model chunks per stage: "
        "when each stage computes, waits and communicates. Numbers are micro-batches."
    )
    return _file(f"One training step: {page.title}", described, inner, height)


def _passes(track: Track, y: float, bar: float, scale: float) -> Iterator[str]:
    """Yield the passes of a stage; all model chunks except the first are paler."""
    for work in track.work:
        width = (work.end_s - work.start_s) * scale
        x = _LEFT + work.start_s * scale
        later = " later" if work.chunk else ""
        yield _rect(f"k{work.kind}{later}", x, y, max(width - 0.6, 0.4), bar)
        words = str(work.micro_batch)
        if width > 7 * len(words) + 2:
            yield _text(words, x + width / 2, y + bar / 2 + 4, "number", "middle")


def _visible(track: Track) -> Iterator[Span]:
    """Yield the spans once per step outside of the passes of micro-batches."""
    for span in track.once:
        start = max(span.start_s, track.work[-1].end_s) if _is_late(span, track) else span.start_s
        end = span.end_s if _is_late(span, track) else min(span.end_s, track.work[0].start_s)
        if end > start:
            yield span._replace(start_s=start, end_s=end)


def _is_late(span: Span, track: Track) -> bool:
    return span.end_s > track.work[-1].end_s


def _colour(span: Span) -> str:
    from search.show.pictures.terms import colour_of

    return colour_of(span.term)


def _memory() -> str:
    from search.show.pictures.charts import ticks
    from search.show.terms import memory_name

    page = _page()
    names = list(dict.fromkeys(name for stage in page.memory for name in stage.names))
    names.sort(key=lambda name: name == "others")
    most = max(page.budget_bytes, *(stage.peak_bytes for stage in page.memory)) / GIB
    marks = ticks(0, most, 6)
    scale = (_WIDTH - _LEFT - _RIGHT - 70) / marks[-1]
    top, row, bar = 62, 38, 26
    bottom = top + row * len(page.memory)
    inner = [
        _text(page.line, 12, 42),
        _x_axis([(_LEFT + at * scale, f"{at:g}") for at in marks], top, bottom, "GiB at the peak"),
    ]
    for at, stage in enumerate(page.memory):
        y, x = top + row * at + (row - bar) / 2, float(_LEFT)
        inner.append(_text(f"stage {at}", _LEFT - 8, y + bar / 2 + 4, anchor="end"))
        for place, name in enumerate(names):
            size = stage.fullest.get(name, 0.0)
            if size > 0:
                width = size / GIB * scale
                words = f"{memory_name(name)}: {format_bytes(size)}"
                inner.append(_rect(f"m{place % 10}", x, y, width, bar, words))
                x += width
        inner.append(_text(f"{stage.peak_bytes / GIB:.1f}", x + 6, y + bar / 2 + 4, "ink"))
    x = _LEFT + page.budget_bytes / GIB * scale
    inner.append(
        f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="{top - 4}" y2="{bottom:g}"/>'
        + _text(f"limit {page.budget_bytes / GIB:.1f}", x, top - 8, "limit-text", "middle")
    )
    height = bottom + 58
    shown = [(f"m{place % 10}", memory_name(name)) for place, name in enumerate(names)]
    for line in _wrapped(shown):
        inner += _legend(line, height)
        height += 20
    peak = max(page.memory, key=lambda stage: stage.peak_bytes)
    described = (
        f"Allocated memory of a GPU of each of {len(page.memory)} pipeline stages at its peak, by "
        f"term, with the limit. The largest peak is {format_bytes(peak.peak_bytes)}, the limit "
        f"{format_bytes(page.budget_bytes)}."
    )
    return _file(f"Memory by stage: {page.title}", described, inner, height)


def _wrapped(keys: Sequence[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yield the keys of a legend by line."""
    line: list[tuple[str, str]] = []
    width = 0.0
    for key in keys:
        more = _key_width(key[1])
        if line and width + more > _WIDTH - _LEFT - _RIGHT:
            yield line
            line, width = [], 0.0
        line.append(key)
        width += more
    if line:
        yield line


# --------------------------------------------------------------------------------------------------
# The frontier


def _frontier() -> str:
    from search.planning.session import open_session
    from search.request.request import build_request
    from search.show.pictures.charts import ticks

    request = build_request(_PER_LAYER)
    session = open_session(request.inputs, request.options, request.given)
    points = sorted(
        (float(str(found.options["memory_constraint_bytes"])) / GIB, found.prediction.samples_per_s)
        for found in session.planner.frontier()
        if found.prediction is not None
    )
    x_marks, y_marks = ticks(points[0][0], points[-1][0], 8), ticks(0, points[-1][1], 5)
    top, bottom = 40, 320
    x_scale = (_WIDTH - _LEFT - _RIGHT) / (x_marks[-1] - x_marks[0])
    y_scale = (bottom - top) / y_marks[-1]
    placed = [(_LEFT + (x - x_marks[0]) * x_scale, bottom - y * y_scale) for x, y in points]
    inner = [
        _x_axis(
            [(_LEFT + (x - x_marks[0]) * x_scale, f"{x:g}") for x in x_marks],
            top,
            bottom,
            "memory of a GPU, GiB",
        )
    ]
    for value in y_marks:
        y = bottom - value * y_scale
        inner.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            + _text(f"{value:g}", _LEFT - 8, y + 4, anchor="end")
        )
    middle = (top + bottom) / 2
    inner.append(
        f'<text x="18" y="{middle:g}" text-anchor="middle" '
        f'transform="rotate(-90 18 {middle:g})">samples/s</text>'
    )
    # A plan is the best from its budget up to the next larger one.
    path = f"M{placed[0][0]:.1f} {placed[0][1]:.1f}" + "".join(
        f"H{after[0]:.1f}V{after[1]:.1f}" for _, after in pairwise(placed)
    )
    inner.append(f'<path class="line" d="{path}"/>')
    for (x, y), (budget, rate) in zip(placed, points, strict=True):
        words = f"{budget:g} GiB: {rate:.4g} samples/s"
        inner.append(
            f'<circle class="mark s0" cx="{x:.1f}" cy="{y:.1f}" r="4.5">'
            f"<title>{words}</title></circle>"
        )
    described = (
        f"Best throughput at {len(points)} memory budgets, from {points[0][1]:.3g} samples/s with "
        f"{points[0][0]:g} GiB to {points[-1][1]:.3g} samples/s with {points[-1][0]:g} GiB."
    )
    return _file(f"Throughput by memory: {session.title}", described, inner, bottom + 50)


# --------------------------------------------------------------------------------------------------
# Predicted against measured


def _accuracy() -> str:
    from autopar.rates.accuracy import load_accuracy
    from benchmarks.ledger import Priced, interval_s, price_rows, read_runs
    from benchmarks.ledger_constants import FITTED

    accuracy = load_accuracy()
    by_source: dict[str, dict[tuple[float, float], list[float]]] = {}
    for entry in price_rows(*read_runs()):
        if isinstance(entry, Priced):
            ends = interval_s(entry, accuracy)
            # rows of one class have one interval, as ratios of estimated over measured time
            band = round(entry.total_s / ends[1], 4), round(entry.total_s / ends[0], 4)
            by_source.setdefault(entry.group, {}).setdefault(band, []).append(1.0 + entry.error)
    unseen = sorted(set(by_source) - set(FITTED))
    order = [*sorted(set(by_source) & set(FITTED)), *unseen]
    left, top, row = 200, 40, 22
    marks = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6)
    low = math.log(marks[0])
    scale = (_WIDTH - left - _RIGHT) / (math.log(marks[-1]) - low)

    def place(ratio: float) -> float:
        assert marks[0] <= ratio <= marks[-1], f"{ratio} is outside the axis"
        return left + (math.log(ratio) - low) * scale

    bottom = top + row * len(order) + 12
    axis = [(place(mark), f"{mark:g}") for mark in marks]
    inner = [_x_axis(axis, top, bottom, "estimated over measured step time")]
    inner.append(
        f'<line class="axis" x1="{place(1):.1f}" x2="{place(1):.1f}" y1="{top}" y2="{bottom}"/>'
    )
    for at, source in enumerate(order):
        y = top + row * at + 12.0 * (source in unseen)
        bands = sorted(by_source[source].items())
        number = sum(len(ratios) for _, ratios in bands)
        inner.append(_text(f"{source} ({number})", left - 10, y + row / 2 + 4, anchor="end"))
        height = (row - 4) / len(bands)
        for lane, ((first, last), ratios) in enumerate(bands):
            start = y + 2 + lane * height
            x = place(first)
            inner.append(_rect("band", x, start, place(last) - x, height - 0.5))
            series = "s1" if source in unseen else "s0"
            inner += [
                f'<circle class="{series}" cx="{place(ratio):.1f}" cy="{start + height / 2:.1f}" '
                'r="2.6"/>'
                for ratio in ratios
            ]
    runs = sum(len(ratios) for bands in by_source.values() for ratios in bands.values())
    keys = [
        ("s0", "constants were fitted to this source"),
        ("s1", "no constant was fitted to this source"),
        ("band", "90 % interval"),
    ]
    described = (
        f"Estimated over measured step time of {runs} published runs, one dot each, by source, on "
        "a logarithmic axis. The band is the 90 % interval of the runs of the source."
    )
    inner += _legend(keys, bottom + 58)
    return _file(f"Estimated and measured step time of {runs} runs", described, inner, bottom + 74)


PICTURES: Mapping[str, Callable[[], str]] = {
    "assets/step.svg": _step,
    "assets/memory.svg": _memory,
    "assets/frontier.svg": _frontier,
    "assets/accuracy.svg": _accuracy,
}
"""File in docs/ -> the function that returns its text."""

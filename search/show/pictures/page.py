"""HTML page of one plan: a single file with style, script and numbers, without external resources.

`search.show.pictures.answers` collects the content. Events of the step are packed as binary
columns, so that pipelines with many micro-batches stay small: 8 bytes for each piece of work, and
one column for its memory.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from autopar.records import Record
from autopar.units import GIB, format_bytes, format_probability, format_seconds
from search.show.pictures.charts import bars, stacks, table
from search.show.pictures.layers import Piece
from search.show.pictures.memory import StageMemory
from search.show.pictures.terms import STREAMS, colour_of, stream_of
from search.show.pictures.timeline import Span, Timeline, Track

_FOLDER = Path(__file__).parent
_KINDS = "FBIW"
_LEAST = 5e-4
"""Share of the step below which a term has no bar."""
_TIMELINE_WORDS = {
    "compute": "compute",
    "tensor": "TP comm",
    "context": "CP comm",
    "experts": "EP comm",
    "pipeline": "PP comm",
    "data": "DP comm",
    "host": "host",
}


class Fact(Record):
    """One figure in the header of a page."""

    label: str
    value: str
    note: str = ""


class Section(Record):
    """A section of a page: its heading and HTML content."""

    heading: str
    content: str


class Page(Record):
    """Content of a page."""

    title: str
    """Request in one line."""
    line: str
    """Plan in one line."""
    state: str = ""
    """Origin of the plan: the fastest of a search, or given by the user."""
    facts: tuple[Fact, ...]
    timeline: Timeline
    memory: tuple[StageMemory, ...]
    budget_bytes: float
    """Device memory available for allocations, bytes."""
    budget_words: str
    waterfall: tuple[tuple[str, str, float], ...]
    """(term, its name in prose, seconds) of each term; seconds add up to the step."""
    layers: str
    """Plan by stage, as HTML."""
    bounds: tuple[str, ...]
    """Limits of throughput and memory, one sentence each."""
    sections: tuple[Section, ...] = ()
    """Sections with alternatives and curves."""
    assumptions: tuple[str, ...] = ()
    inputs: tuple[tuple[str, str], ...] = ()
    intervals: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()


def page_text(page: Page) -> str:
    """Return the HTML text of a page."""
    parts = {
        "style": _resource("page.css"),
        "script": _resource("page.js"),
        "title": escape(page.title),
        "line": escape(page.line),
        "state": escape(page.state),
        "facts": "".join(map(_fact, page.facts)),
        "step": escape(format_seconds(page.timeline.step_s)),
        "schedule": escape(_schedule_words(page.timeline)),
        "tracks": _track_table(page.timeline, page.memory),
        "notes": _list(page.timeline.notes),
        "waterfall": _waterfall(page),
        "memory": _memory(page),
        "budget": escape(page.budget_words),
        "layers": page.layers,
        "bounds": _list(page.bounds),
        "sections": "".join(
            f"<section><h2>{escape(one.heading)}</h2>{one.content}</section>"
            for one in page.sections
        ),
        "assumptions": _titled("Defaults", _list(page.assumptions)),
        "intervals": _titled("Basis and 90 % intervals", _list(page.intervals)),
        "left_out": _titled("Not modelled or not searched", _list(page.left_out)),
        "inputs": _titled("Inputs", table(("option", "value"), page.inputs, words=(0, 1)))
        if page.inputs
        else "",
        # A closing tag inside a string would end the script.
        "data": json.dumps(_data(page), separators=(",", ":")).replace("</", "<\\/"),
    }
    pieces = _resource("page.html").split("<!--")
    found = [pieces[0]]
    for piece in pieces[1:]:
        name, behind = piece.split("-->", 1)
        found += [parts[name.strip()], behind]
    return "".join(found)


def _resource(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _fact(fact: Fact) -> str:
    note = f"<small>{escape(fact.note)}</small>" if fact.note else ""
    return f"<div><dt>{escape(fact.label)}</dt><dd>{escape(fact.value)}{note}</dd></div>"


def _list(texts: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>" if texts else ""


def _titled(heading: str, content: str) -> str:
    return f"<section><h2>{escape(heading)}</h2>{content}</section>" if content else ""


def _schedule_words(timeline: Timeline) -> str:
    stages, number = len(timeline.tracks), timeline.micro_batches
    batches = f"{number:,} micro-batch{'es' if number != 1 else ''}"
    if stages == 1:
        return f"no pipeline, {batches}"
    chunks = f" of {timeline.chunks} chunks" if timeline.chunks > 1 else ""
    return f"{timeline.schedule}, {stages} stages{chunks}, {batches}"


def _track_table(timeline: Timeline, memory: Sequence[StageMemory]) -> str:
    rows = []
    for track, stage in zip(timeline.tracks, memory, strict=True):
        lasts: dict[str, float] = {}
        for work in track.work:
            lasts[work.kind] = lasts.get(work.kind, 0.0) + work.end_s - work.start_s
        number = timeline.micro_batches
        forward = lasts.pop("F", 0.0) / number
        rows.append(
            (
                str(track.stage),
                track.ranks,
                _layers(track),
                format_seconds(forward),
                format_seconds(sum(lasts.values()) / number),
                f"{(1 - track.busy_s / timeline.step_s) * 100:.1f} %",
                format_bytes(stage.peak_bytes),
                format_probability(stage.odds_of_oom),
            )
        )
    return table(
        (
            "stage",
            "ranks",
            "layers",
            "forward",
            "backward",
            "idle or per step",
            "peak",
            "OOM probability",
        ),
        rows,
        words=(0, 1, 2),
    )


def _layers(track: Track) -> str:
    """Return the layers of a stage's model chunks as ranges."""
    found = []
    for chunk in track.layers:
        if not chunk:
            found.append("none")
        else:
            found.append(str(chunk[0]) if len(chunk) == 1 else f"{chunk[0]}-{chunk[-1]}")
    return ", ".join(found)


def _waterfall(page: Page) -> str:
    total = page.timeline.step_s
    rows = [
        (term, words, value, format_seconds(value))
        for term, words, value in page.waterfall
        if abs(value) >= _LEAST * total
    ]
    return bars(rows, total)


def _memory(page: Page) -> str:
    names = list(dict.fromkeys(name for stage in page.memory for name in stage.names))
    names.sort(key=lambda name: name == "others")
    rows = [
        (
            f"stage {at}",
            stage.fullest,
            f"{stage.peak_bytes / GIB:.1f} GiB ({format_probability(stage.odds_of_oom)})",
        )
        for at, stage in enumerate(page.memory)
    ]
    return stacks(rows, names, page.budget_bytes, {})


# --------------------------------------------------------------------------------------------------
# Data of the page's script


def _data(page: Page) -> dict[str, Any]:
    timeline = page.timeline
    names = list(dict.fromkeys(name for stage in page.memory for name in stage.names))
    names.sort(key=lambda name: name == "others")
    return {
        "step": timeline.step_s,
        "micro": timeline.micro_batches,
        "chunks": timeline.chunks,
        "detailed": timeline.detailed,
        "streams": [[name, _TIMELINE_WORDS[name]] for name in STREAMS],
        "tracks": [_track(track) for track in timeline.tracks],
        "memory": {
            "budget": page.budget_bytes,
            "names": names,
            "stages": [_stage(stage, names) for stage in page.memory],
        },
    }


def _track(track: Track) -> dict[str, Any]:
    lengths: dict[str, float] = {work.kind: work.end_s - work.start_s for work in track.work}
    starts = np.array([work.start_s for work in track.work], dtype="<f4")
    codes = np.array(
        [(work.micro_batch << 10) + (work.chunk << 2) + _KINDS.index(work.kind)
         for work in track.work],
        dtype="<u4",
    )  # fmt: skip
    return {
        "ranks": track.ranks,
        "start": _packed(starts),
        "code": _packed(codes),
        "length": [lengths.get(kind, 0.0) for kind in _KINDS],
        "pieces": {
            kind: [_piece(piece) for piece in track.pieces.get(kind, ())]
            for kind in _KINDS
            if kind in lengths
        },
        "detail": {
            f"{kind}{chunk}": [_piece(piece) for piece in pieces]
            for (kind, chunk), pieces in track.detail.items()
            if kind in lengths
        },
        "once": [_span(span) for span in track.once],
        "sends": [track.sends.get(kind, 0.0) for kind in _KINDS],
    }


def _piece(piece: Piece) -> list[Any]:
    return [
        STREAMS.index(stream_of(piece.term)),
        piece.name,
        round(piece.share, 6),
        colour_of(piece.term),
        piece.layer,
    ]


def _span(span: Span) -> list[Any]:
    return [
        STREAMS.index(span.stream),
        span.name,
        round(span.start_s, 9),
        round(span.end_s, 9),
        colour_of(span.term),
        round(span.num_bytes),
    ]


def _stage(stage: StageMemory, names: Sequence[str]) -> dict[str, Any]:
    place: Mapping[str, int] = {name: at for at, name in enumerate(stage.names)}
    rows = [
        [round(row[place[name]]) if name in place else 0 for name in names] for row in stage.rows
    ]
    return {"rows": rows, "at": _packed(np.array(stage.at, dtype="<u2"))}


def _packed(column: np.ndarray[Any, Any]) -> str:
    return base64.b64encode(column.tobytes()).decode("ascii")

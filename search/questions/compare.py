"""Comparison of two plans, or of a plan and a measured trace: degrees, time and memory by term.

For a comparison with a trace, the predicted trace of the plan (`search.show.pictures.trace`) is
read by the code that reads the measured one (`search.questions.traces`). `search.show` prints the
results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import field

from autopar.errors import DocumentError, InputError
from autopar.records import Record
from search.questions.traces import Trace, is_trace, read_trace, trace_of

if TYPE_CHECKING:
    from search.request.request import Request
    from search.show.pictures.files import Pictures


class ComparisonSide(Record):
    """One side of a comparison: a uniform plan, a per-layer plan or a measured trace."""

    name: str
    kind: str
    """`launch` (a uniform plan), `plan` (a per-layer plan) or `trace`."""
    line: str = ""
    """Summary of the plan in one line; empty for a trace."""
    subject: Mapping[str, Any] = field(default_factory=dict)
    """Model, cluster and sequence length in tokens; empty for a trace."""
    tokens_per_s: float | None = None
    """Throughput in tokens/s/GPU; None for a trace."""
    fits: bool | None = None
    """True if the plan fits in memory at the requested OOM probability; None for a trace."""
    odds_of_oom: float | None = None
    """OOM probability, 0 to 1; None for a trace."""
    degrees: Mapping[str, Any] = field(default_factory=dict)
    step_time_s: float
    global_batch: int | None = None
    terms_s: Mapping[str, float]
    """Time by term, seconds per step; the terms add up to the step."""
    memory_bytes: Mapping[str, float] = field(default_factory=dict)
    """Memory of the peak stage by term, bytes."""
    peak_bytes: float | None = None
    draw: Callable[[Pictures], Mapping[Path, str]] | None = None
    """Function that draws the predicted step; None for a trace."""


class Comparison(Record):
    """Comparison of two sides: (first, second) value by name, largest difference first."""

    first: ComparisonSide
    second: ComparisonSide
    degrees: Mapping[str, tuple[Any, Any]]
    """Parallel degrees that differ, with the entries of `ComparisonSide.subject` that differ."""
    terms_s: Mapping[str, tuple[float, float]]
    """Seconds by term: per sequence if the global batches differ, else per step."""
    per_sample: bool
    memory_bytes: Mapping[str, tuple[float, float]]
    notes: tuple[str, ...]


def compare(first: ComparisonSide, second: ComparisonSide, notes: Sequence[str] = ()) -> Comparison:
    """Return the comparison of two sides whose terms have common names."""
    batches = (first.global_batch, second.global_batch)
    per_sample = None not in batches and batches[0] != batches[1]
    scales = [1 / (batch or 1) if per_sample else 1.0 for batch in batches]
    terms = _pairs(
        {name: value * scales[0] for name, value in first.terms_s.items()},
        {name: value * scales[1] for name, value in second.terms_s.items()},
    )
    ones: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for one, other in ((first.subject, second.subject), (first.degrees, second.degrees)):
        if one and other:
            ones |= one
            others |= other
    both = bool(first.memory_bytes) and bool(second.memory_bytes)
    return Comparison(
        first=first,
        second=second,
        degrees={
            name: (ones.get(name), others.get(name))
            for name in {**ones, **others}
            if ones.get(name) != others.get(name)
        },
        terms_s=terms,
        per_sample=per_sample,
        memory_bytes=_pairs(first.memory_bytes, second.memory_bytes) if both else {},
        notes=tuple(notes),
    )


def _pairs(
    first: Mapping[str, float], second: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Return name -> (first, second), largest difference first; a missing value is 0."""
    names = dict.fromkeys([*first, *second])
    found = {name: (first.get(name, 0.0), second.get(name, 0.0)) for name in names}
    return dict(sorted(found.items(), key=lambda item: -abs(item[1][1] - item[1][0])))


# --------------------------------------------------------------------------------------------------
# The side of a plan, priced again with the options of its file.


def side_of_plan(
    path: str, request: Request, raw: Mapping[str, object], notice: Callable[[str], None]
) -> ComparisonSide:
    """Return the side of a plan file, strategy file, engine configuration or search answer.

    raw : options given by the user, which override those of the file; an engine configuration
        contains none
    notice : receives messages about the inputs

    Raises InputError: the plan cannot be read or cannot run.
    """
    from autopar.documents.plan import PlanDocument
    from search.planning.uniform.files import is_launch
    from search.planning.uniform.imports import holds_launch
    from search.questions.given import GivenLaunch, GivenPlan, given_launch, given_plan
    from search.request.request import build_request, stored_request

    given: GivenLaunch | GivenPlan
    if holds_launch(path):
        given = given_launch(path, request.given if is_launch(path) else raw, notice)
    else:
        document = PlanDocument.read(path)
        stored = stored_request(path, document, raw, notice)
        asked = build_request({**stored, **raw})
        given = given_plan(path, asked, lambda text: None, document)
    priced = given.answer.best
    price = priced.price
    if price.throughput is None:
        raise InputError(f"{path}: cannot run: {'; '.join(price.problems)}")
    return ComparisonSide(
        name=path,
        kind="launch" if isinstance(given, GivenLaunch) else "plan",
        line=priced.words,
        subject=dict(zip(("model", "cluster", "seq_length"), given.subject, strict=True)),
        tokens_per_s=price.throughput.tokens_per_s,
        fits=price.fits,
        odds_of_oom=price.oom_probability,
        degrees=given.degrees,
        step_time_s=price.throughput.step_s,
        global_batch=price.global_batch,
        terms_s=dict(price.terms_s),
        memory_bytes=price.fullest.terms_bytes,
        peak_bytes=price.fullest.peak_bytes,
        draw=given.draw,
    )


def under_common_names(side: ComparisonSide) -> ComparisonSide:
    """Return a side with the time terms that uniform and per-layer plans share.

    Degrees and memory terms have no common names and are removed.
    """
    from autopar.records import replace
    from search.closed_form.comparison import OF_STEP, OF_WATERFALL, summed

    names = OF_STEP if side.kind == "launch" else OF_WATERFALL
    return replace(side, terms_s=summed(names, side.terms_s), degrees={}, memory_bytes={})


# --------------------------------------------------------------------------------------------------
# A plan and a trace.


def side_of_trace(found: Trace, name: str) -> ComparisonSide:
    """Return the side of a trace."""
    return ComparisonSide(
        name=name,
        kind="trace",
        step_time_s=found.step_s,
        terms_s=found.terms_s,
        peak_bytes=found.peak_bytes,
    )


def beside_trace(side: ComparisonSide, found: Trace, name: str) -> Comparison:
    """Return the comparison of a plan with a trace, for the plan's rank that recorded the trace.

    Raises DocumentError if the plan has no such rank.
    """
    from autopar.records import replace
    from search.show.pictures.files import Pictures

    assert side.draw is not None, "a plan can be drawn"
    (text,) = side.draw(Pictures(None, Path("trace"))).values()
    data = json.loads(text)
    gpus = data["distributedInfo"]["world_size"]
    if found.rank >= gpus:
        raise DocumentError(
            name,
            f"the value is {found.rank}, but {side.name} has {gpus} GPUs",
            key="distributedInfo.rank",
            remedy="Give a plan and a trace of one cluster",
        )
    notes = list(found.notes)
    if found.world_size not in (None, gpus):
        notes.append(f"{name} has {found.world_size} ranks, {side.name} has {gpus} GPUs")
    own = side_of_trace(trace_of(data, side.name, found.rank), side.name)
    left = replace(own, kind=side.kind, degrees={}, peak_bytes=side.peak_bytes)
    return compare(left, side_of_trace(found, name), notes)


def both_sides(
    paths: Sequence[str], request: Request, raw: Mapping[str, object], notice: Callable[[str], None]
) -> Comparison:
    """Return the comparison of two files: two plans, two traces, or a plan and then a trace.

    Raises InputError for a trace that is followed by a plan.
    """
    first, second = paths
    if is_trace(first):
        if not is_trace(second):
            raise InputError(
                f"{first}: is a trace, expected a plan",
                remedy="Give the plan first and the trace second",
            )
        one, other = read_trace(first), read_trace(second)
        sides = side_of_trace(one, first), side_of_trace(other, second)
        return compare(*sides, [*one.notes, *other.notes])
    left = side_of_plan(first, request, raw, notice)
    if is_trace(second):
        return beside_trace(left, read_trace(second), second)
    right = side_of_plan(second, request, raw, notice)
    if left.kind != right.kind:
        notes = ["a uniform plan and a per-layer plan: terms that both have"]
        return compare(under_common_names(left), under_common_names(right), notes)
    return compare(left, right)


def comparison_document(found: Comparison) -> dict[str, Any]:
    """Return the object of `--json` of a comparison; times in seconds, memory in bytes."""

    def side(one: ComparisonSide) -> dict[str, Any]:
        return {
            "name": one.name,
            "kind": one.kind,
            "line": one.line or None,
            "tokens_per_s_per_gpu": one.tokens_per_s,
            "fits": one.fits,
            "odds_of_oom": one.odds_of_oom,
            "step_time_s": one.step_time_s,
            "global_batch_size": one.global_batch,
            "peak_bytes": one.peak_bytes,
        }

    def rows(pairs: Mapping[str, tuple[Any, Any]], unit: str) -> Iterator[dict[str, Any]]:
        for name, (first, second) in pairs.items():
            yield {"name": name, f"first{unit}": first, f"second{unit}": second}

    return {
        "first": side(found.first),
        "second": side(found.second),
        "degrees": list(rows(found.degrees, "")),
        "per": "sample" if found.per_sample else "step",
        "terms": [
            row | {"difference_s": row["second_s"] - row["first_s"]}
            for row in rows(found.terms_s, "_s")
        ],
        "memory": [
            row | {"difference_bytes": row["second_bytes"] - row["first_bytes"]}
            for row in rows(found.memory_bytes, "_bytes")
        ],
        "notes": list(found.notes),
    }

"""Comparison of two plans, or of a plan and a measured trace: degrees, time and memory by term.

For a comparison with a trace, the predicted trace of the plan (`search.show.pictures.trace`) is
read by the code that reads the measured one. `search.show` prints the results.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from autopar.errors import DocumentError, InputError
from autopar.records import Record

if TYPE_CHECKING:
    from search.request.request import Request
    from search.show.pictures.files import Pictures

_F64 = NDArray[np.float64]


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

    Parameters
    ----------
    raw : options given by the user, which override those of the file; an engine configuration
        contains none
    notice : receives messages about the inputs

    Raises
    ------
    InputError: the plan cannot be read or cannot run.
    """
    from autopar.documents.plan import PlanDocument
    from search.planning.uniform.imports import holds_launch
    from search.questions.given import GivenLaunch, GivenPlan, given_launch, given_plan
    from search.request.request import build_request, stored_request

    given: GivenLaunch | GivenPlan
    if holds_launch(path):
        given = given_launch(path, request.given if path.endswith(".json") else raw, notice)
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
# A trace: time by term on one rank, in the trace-event format of PyTorch's profiler (Kineto).

TRACE_TERMS = (
    "products",
    "attention",
    "optimizer",
    "memory-bound",
    "tensor parallel",
    "context parallel",
    "experts",
    "stage transfer",
    "data parallel",
    "collectives",
)
"""Terms of a trace in order of priority: time counts for the first term that is active.

Computation has priority, so communication counts only while it is exposed. Time without an active
term is `idle`.
"""
_OF_TERM = {
    "tensor": "tensor parallel",
    "tp": "tensor parallel",
    "ulysses": "tensor parallel",
    "context": "context parallel",
    "cp": "context parallel",
    "experts": "experts",
    "redistribution": "experts",
    "transfer": "stage transfer",
    "sharding": "data parallel",
    "zero3": "data parallel",
    "gradients": "data parallel",
    "gradient_sync": "data parallel",
    "sync": "data parallel",
}
"""Trace term of each step term in traces that autopar writes."""
_GROUPS = (
    ({"data", "dp", "fsdp", "replicate"}, "data parallel"),
    ({"tensor", "tp"}, "tensor parallel"),
    ({"context", "cp"}, "context parallel"),
    ({"expert", "ep"}, "experts"),
    ({"pipeline", "pp"}, "stage transfer"),
)
"""Words in descriptions of process groups, from Megatron-LM and PyTorch's device meshes."""
_KINDS = (
    (re.compile(r"multi_tensor|adam|optimizer", re.IGNORECASE), "optimizer"),
    (re.compile(r"flash|fmha|attention|attn", re.IGNORECASE), "attention"),
    (re.compile(r"gemm|cutlass|cublas|nvjet|xmma|wgmma|matmul|_mm_", re.IGNORECASE), "products"),
)
_MOST_BYTES = 2 << 30


def is_trace(path: str) -> bool:
    """Return True if the first 64 KiB of a file contain the keys of a Kineto trace."""
    where = Path(path)
    if not where.is_file():
        return False
    try:
        with where.open("rb") as raw:
            opened = gzip.GzipFile(fileobj=raw) if where.suffix == ".gz" else raw
            head = opened.read(1 << 16)
    except OSError:
        return False
    return b'"traceEvents"' in head or (
        b'"schemaVersion"' in head and b'"deviceProperties"' in head
    )


def read_trace(path: str) -> tuple[ComparisonSide, int, list[str]]:
    """Return the side of a trace, its rank and notes about it.

    Times are the mean over the steps of the trace. If a file contains several ranks, the rank that
    it names is read. Raises DocumentError for a file that is no trace or has no kernels.
    """
    where = Path(path)
    try:
        if where.stat().st_size > _MOST_BYTES:
            raise DocumentError(path, "is larger than 2 GiB", remedy="Record fewer steps")
        raw = where.read_bytes()
        data = json.loads(gzip.decompress(raw) if where.suffix == ".gz" else raw)
    except (OSError, EOFError, ValueError) as error:
        raise DocumentError(
            path, f"not a readable trace ({error})", remedy="Use the JSON of torch.profiler"
        ) from None
    info = data.get("distributedInfo") if isinstance(data, dict) else None
    rank = info.get("rank", 0) if isinstance(info, dict) else 0
    return side_of_trace(data, path, rank if isinstance(rank, int) else 0)


def side_of_trace(data: Any, name: str, rank: int) -> tuple[ComparisonSide, int, list[str]]:
    """Return the side of a parsed trace on one rank, the rank and notes; see `read_trace`."""
    events = data.get("traceEvents") if isinstance(data, dict) else data
    events = [one for one in events if isinstance(one, dict)] if isinstance(events, list) else []
    timed = [
        one
        for one in events
        if one.get("ph") == "X" and _is_time(one.get("ts")) and _is_time(one.get("dur"))
    ]
    kernels = [one for one in timed if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not kernels:
        raise DocumentError(
            name,
            "contains no device kernels",
            key="traceEvents",
            remedy="Record a step with ProfilerActivity.CUDA",
        )
    notes = []
    places = {one.get("pid") for one in kernels}
    if len(places) > 1:
        # A trace of one process has one device. Traces of autopar have one rank of every stage.
        below = [place for place in places if isinstance(place, int) and place <= rank]
        place = max(below) if below else kernels[0].get("pid")
        kernels = [one for one in kernels if one.get("pid") == place]
        timed = [one for one in timed if one.get("pid") == place]
    windows = _windows(timed)
    if not windows:
        start = min(one["ts"] for one in kernels)
        windows = [(start, max(one["ts"] + one["dur"] for one in kernels))]
        notes.append(f"{name} marks no steps (ProfilerStep#N): all kernels are treated as one step")
    ends = {term: _ends([one for one in kernels if _term(one) == term]) for term in TRACE_TERMS}
    found = [_exposed(ends, *window) for window in windows]
    step_s = float(np.mean([end - start for start, end in windows])) * 1e-6
    terms = {
        term: float(np.mean([one[term] for one in found])) * 1e-6
        for term in (*TRACE_TERMS, "idle")
        if any(one[term] for one in found)
    }
    peak = max((_allocated(one) for one in events), default=0)
    side = ComparisonSide(
        name=name,
        kind="trace",
        step_time_s=step_s,
        terms_s=terms,
        peak_bytes=peak or None,
    )
    return side, rank, notes


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _windows(timed: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Return start and end of every marked step, microseconds; device marks take precedence."""
    for category in ("gpu_user_annotation", "user_annotation"):
        found = [
            (float(one["ts"]), float(one["ts"] + one["dur"]))
            for one in timed
            if one.get("cat") == category and str(one.get("name")).startswith("ProfilerStep")
        ]
        if found:
            return [window for window in found if window[1] > window[0]]
    return []


def _allocated(event: Mapping[str, Any]) -> int:
    """Return the allocated device bytes of a memory event; 0 for any other event."""
    arguments = event.get("args")
    if event.get("name") != "[memory]" or not isinstance(arguments, dict):
        return 0
    total = arguments.get("Total Allocated")
    # Device type 0 is the host.
    return total if isinstance(total, int) and arguments.get("Device Type") != 0 else 0


def _term(kernel: Mapping[str, Any]) -> str:
    """Return the step-time term of a kernel: by process group for NCCL kernels, else by name."""
    given = kernel.get("args")
    arguments = given if isinstance(given, dict) else {}
    name = str(kernel.get("name"))
    if "nccl" in name.lower():
        own = _OF_TERM.get(str(arguments.get("term")))
        if own is not None:
            return own
        words = re.findall(r"[a-z]+", str(arguments.get("Process Group Description", "")).lower())
        for known, term in _GROUPS:
            if known & set(words):
                return term
        return "stage transfer" if "sendrecv" in name.lower() else "collectives"
    return next((term for pattern, term in _KINDS if pattern.search(name)), "memory-bound")


def _ends(kernels: Sequence[Mapping[str, Any]]) -> _F64:
    """Return start and end of kernels in microseconds, shape (N, 2)."""
    pairs = [(one["ts"], one["ts"] + one["dur"]) for one in kernels]
    return np.array(pairs, dtype=np.float64).reshape(-1, 2)


def _exposed(ends: Mapping[str, _F64], start: float, end: float) -> dict[str, float]:
    """Return the microseconds of a step by term, without time covered by terms of higher
    priority."""
    covered = np.empty((0, 2))
    length, found = 0.0, {}
    for term, own in ends.items():
        inside = np.clip(own, start, end)
        covered = _merged(np.concatenate([covered, inside]))
        more = float(np.sum(covered[:, 1] - covered[:, 0]))
        found[term], length = more - length, more
    return found | {"idle": end - start - length}


def _merged(pairs: _F64) -> _F64:
    """Return the union of intervals as sorted intervals that do not touch, shape (N, 2)."""
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    if not len(pairs):
        return pairs
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(pairs[:, 1])
    first = np.concatenate([[True], pairs[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([pairs[first, 0], reach[last]], axis=1)


def traced(side: ComparisonSide, rank: int) -> ComparisonSide:
    """Return the side of a plan with the terms of its predicted trace on one rank."""
    from autopar.records import replace
    from search.show.pictures.files import Pictures

    assert side.draw is not None, "a plan can be drawn"
    (text,) = side.draw(Pictures(None, Path("trace"))).values()
    found, _, _ = side_of_trace(json.loads(text), side.name, rank)
    return replace(found, kind=side.kind, degrees={}, peak_bytes=side.peak_bytes)


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
        left, _, notes = read_trace(first)
        right, _, more = read_trace(second)
        return compare(left, right, [*notes, *more])
    left = side_of_plan(first, request, raw, notice)
    if is_trace(second):
        right, rank, notes = read_trace(second)
        return compare(traced(left, rank), right, notes)
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

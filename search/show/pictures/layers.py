"""One micro-batch of a stage layer by layer: kernels and transfers in the order in which they run.

Seconds of a layer's parts are those of `autopar.rates.layer`; here is their order, and how they
fill the time that the step model gives a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.price.step import KnownLayers, StageTime, ends_seconds, own_times
from autopar.rates.layer import LayerTimes
from autopar.rates.parts.operations import Part
from autopar.run.job import Block, Job
from autopar.run.strategy import Chunk


class Piece(NamedTuple):
    """A part of a work's time."""

    term: str
    name: str
    share: float
    """Of the work; those of a work add up to 1."""
    layer: int | None = None
    num_bytes: float = 0.0


class _Raw(NamedTuple):
    """Seconds of a piece as its layer has them."""

    term: str
    name: str
    seconds: float
    layer: int | None = None
    num_bytes: float = 0.0


_BETWEEN = ("tensor", "context", "experts")
"""Terms of transfers, of which a part may be hidden."""
_WHOLE = ("transfer", "sharding", "host", "offload")
"""Terms that belong to no layer's parts: they keep the share that they have of the whole."""


def layer_pieces(
    job: Job,
    blocks: Sequence[Block],
    stage: StageTime,
    pieces: Mapping[str, Sequence[Piece]],
    known: KnownLayers,
    chunks: Sequence[Chunk],
    transfer_bytes: float,
) -> dict[tuple[str, int], tuple[Piece, ...]]:
    """Return the pieces of each kind of work and chunk of a stage.

    pieces : of a kind of work by term. What is in no layer, host code and traffic of shards, keeps
    its share; the layers fill the rest in the proportions that their own seconds have.
    """
    queue = [own_times(job, block, known) for block in blocks for _ in range(block.number)]
    visible = {
        term: stage.terms_s[term] / whole if (whole := _sent(queue, term)) else 0.0
        for term in _BETWEEN
    }
    embedding_s, head_s = ends_seconds(job, known)
    again = _again(queue, stage.terms_s["recompute"])
    found: dict[tuple[str, int], tuple[Piece, ...]] = {}
    # layers of modules of further tokens stand, and are counted, behind all others
    first, further = 0, sum(len(chunk.layers) for chunk in chunks)
    number = sum(block.number for block in job.blocks)
    for at, (embeds, own_layers, mtp, has_head) in enumerate(chunks):
        layers = (*own_layers, *range(number, number + mtp))
        times = queue[first : first + len(own_layers)] + queue[further : further + mtp]
        first, further = first + len(own_layers), further + mtp
        forward = [
            raw
            for layer, own in zip(layers, times, strict=True)
            for raw in _forward(job, own, layer, visible)
        ]
        # forwards of embedding and head take a third, as products do
        before = [_Raw("memory", "embedding", embedding_s / 3)] if embeds else []
        behind = [_Raw("gemm", "head and loss", head_s / 3)] if has_head else []
        found["F", at] = _filled([*before, *forward, *behind], pieces["F"], transfer_bytes)
        for kind in "BIW":
            backward = [
                raw
                for layer, own in zip(layers[::-1], times[::-1], strict=True)
                for raw in _backward(job, own, layer, visible, kind, again)
            ]
            weights = 0.5 if kind in "IW" else 1.0
            ends = [raw._replace(seconds=2 * weights * raw.seconds) for raw in behind]
            starts = [raw._replace(seconds=2 * weights * raw.seconds) for raw in before]
            found[kind, at] = _filled([*ends, *backward, *starts], pieces[kind], transfer_bytes)
    return found


def _sent(times: Sequence[LayerTimes], term: str) -> float:
    sends = [getattr(each, term) for each in times]
    return float(sum(send.forward_s + send.backward_s for send in sends))


def _again(times: Sequence[LayerTimes], term_s: float) -> float | None:
    """Return what each of a stage's layers computes again; None: the whole of its kernels."""
    whole = sum(float(part.forward_s) for each in times for part in each.parts)
    # context transfers are sent again, too
    return None if term_s >= whole > 0 else term_s / max(len(times), 1)


def _filled(
    raw: Sequence[_Raw], pieces: Sequence[Piece], transfer_bytes: float
) -> tuple[Piece, ...]:
    """Return pieces that fill the time of a work."""
    whole = [piece for piece in pieces if piece.term in (*_WHOLE, "gradients")]
    left = 1.0 - sum(piece.share for piece in whole)
    total = sum(one.seconds for one in raw)
    if not total or left <= 0:
        return tuple(pieces)
    inner = [
        Piece(one.term, one.name, one.seconds / total * left, one.layer, one.num_bytes)
        for one in raw
        if one.seconds > 0
    ]
    first = [
        piece._replace(num_bytes=transfer_bytes if piece.term == "transfer" else 0.0)
        for piece in whole
        if piece.term in ("transfer", "sharding")
    ]
    return (
        *first,
        *inner,
        *(piece for piece in whole if piece.term not in ("transfer", "sharding")),
    )


def _halves(times: LayerTimes) -> tuple[list[Part], list[Part]]:
    """Return the parts of what mixes tokens, and of what works on each, each from norm to sum."""
    attention, mlp = list[Part](), list[Part]()
    norms = [part for part in times.parts if part.module == "layernorm"]
    sums = [part for part in times.parts if part.module == "residual"]
    for part in times.parts:
        if part.module not in ("layernorm", "residual"):
            in_mlp = part.module in ("mlp", "moe", "moe_act", "shared_experts")
            (mlp if in_mlp else attention).append(part)
    halves = [half for half in (attention, mlp) if half]
    for at, half in enumerate(halves):
        half[:0] = norms[at : at + 1]
        half += sums[at : at + 1]
    rest = [*norms[len(halves) :], *sums[len(halves) :]]
    if halves:
        halves[-1] += rest
    return attention, mlp or ([] if halves else rest)


def _forward(
    job: Job, times: LayerTimes, layer: int, visible: Mapping[str, float]
) -> Iterator[_Raw]:
    attention, mlp = _halves(times)
    halves = [half for half in (attention, mlp) if half]
    tensor = visible["tensor"] * times.tensor.forward_s / max(len(halves), 1)
    for half in halves:
        experts = visible["experts"] * times.experts.forward_s if half is mlp else 0.0
        context = visible["context"] * times.context.forward_s if half is attention else 0.0
        yield from _half(
            job,
            [(part.kind, part.name, float(part.forward_s)) for part in half],
            layer,
            tensor=tensor,
            context=context,
            experts=experts,
        )


def _backward(
    job: Job,
    times: LayerTimes,
    layer: int,
    visible: Mapping[str, float],
    kind: str,
    again: float | None,
) -> Iterator[_Raw]:
    """Yield a layer's backward: of inputs, of weights, or both; what it computes again first.

    again : seconds of what some modules compute again; None: all parts do.
    """
    attention, mlp = _halves(times)
    halves = [half for half in (mlp, attention) if half]
    if kind in "BI" and again is None:
        for half in halves[::-1]:
            for part in half:
                yield _Raw("recompute", f"{part.name} again", float(part.forward_s), layer)
    elif kind in "BI" and again:
        yield _Raw("recompute", "recomputation", again, layer)
    for half in halves:
        seconds = [
            (
                part.kind,
                part.name,
                (float(part.input_s) if kind in "BI" else 0.0)
                + (float(part.weight_s) if kind in "BW" else 0.0),
            )
            for part in reversed(half)
        ]
        sends = kind in "BI"
        tensor = visible["tensor"] * times.tensor.backward_s / len(halves)
        experts = visible["experts"] * times.experts.backward_s if half is mlp else 0.0
        context = visible["context"] * times.context.backward_s if half is attention else 0.0
        yield from _half(
            job,
            seconds,
            layer,
            tensor=tensor * sends,
            context=context * sends,
            experts=experts * sends,
        )


def _half(
    job: Job,
    parts: Sequence[tuple[str, str, float]],
    layer: int,
    *,
    tensor: float,
    context: float,
    experts: float,
) -> Iterator[_Raw]:
    """Yield a half of a layer: gather, dispatch, its kernels, combine, scatter."""
    tokens_bytes = job.tokens * job.blocks[0].hidden * job.element_bytes
    gather, scatter = ("all-gather", "reduce-scatter")
    if not job.sequence_parallel:
        # one all-reduce, behind the half
        gather, scatter, tensor = "", "all-reduce", 2 * tensor
    if tensor and gather:
        yield _Raw("tensor", gather, tensor / 2, layer, tokens_bytes)
    if experts:
        yield _Raw("experts", "dispatch", experts / 2, layer)
    for kind, name, seconds in parts:
        if kind == "attention" and context:
            yield _Raw("context", "keys and values", context, layer)
        yield _Raw(kind, name, seconds, layer)
    if experts:
        yield _Raw("experts", "combine", experts / 2, layer)
    if tensor:
        yield _Raw("tensor", scatter, tensor / 2, layer, tokens_bytes)

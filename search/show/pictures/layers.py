"""Kernels and communication of one micro-batch of a stage, layer by layer in execution order.

`autopar.rates.layer` provides the seconds of each part of a layer. This module orders the parts and
scales them to the time of a model chunk in the step model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from autopar.price.step import LayerTimeCache, StageTime, embedding_and_head_s, kernel_times
from autopar.rates.layer import LayerTimes
from autopar.rates.parts.operations import KernelTime
from autopar.run.job import Block, Job
from autopar.run.strategy import Chunk


class Piece(NamedTuple):
    """Kernel, message or wait within a `Work`, as a share of its time."""

    term: str
    name: str
    share: float
    """Share of the work's time, 0 to 1; the shares of a work add up to 1."""
    layer: int | None = None
    num_bytes: float = 0.0


class _Raw(NamedTuple):
    """A piece with its unscaled seconds from the layer model."""

    term: str
    name: str
    seconds: float
    layer: int | None = None
    num_bytes: float = 0.0


_BETWEEN = ("tensor", "context", "experts")
"""Communication terms of layers, which may be partly overlapped."""
_WHOLE = ("transfer", "sharding", "host", "offload")
"""Terms outside the parts of layers, which keep their share of the work."""


def layer_pieces(
    job: Job,
    blocks: Sequence[Block],
    stage: StageTime,
    pieces: Mapping[str, Sequence[Piece]],
    known: LayerTimeCache,
    chunks: Sequence[Chunk],
    transfer_bytes: float,
) -> dict[tuple[str, int], tuple[Piece, ...]]:
    """Return the pieces of each kind of work and model chunk of a stage.

    pieces : pieces by term for each kind of work. Terms outside layers, such as host overhead and
    ZeRO-3 communication, keep their share. Layers fill the rest in proportion to their seconds.
    """
    queue = [kernel_times(job, block, known) for block in blocks for _ in range(block.number)]
    visible = {
        term: stage.terms_s[term] / whole if (whole := _sent(queue, term)) else 0.0
        for term in _BETWEEN
    }
    embedding_s, head_s = embedding_and_head_s(job, known)
    again = _again(queue, stage.terms_s["recompute"])
    found: dict[tuple[str, int], tuple[Piece, ...]] = {}
    # MTP layers are listed and numbered after all other layers.
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
        # A third of the time of embedding and head is forward, as for GEMMs.
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
    """Return the recomputation seconds per layer of a stage; None if all kernels are recomputed."""
    whole = sum(float(part.forward_s) for each in times for part in each.parts)
    # The term may exceed the kernels, because context communication is repeated too.
    return None if term_s >= whole > 0 else term_s / max(len(times), 1)


def _filled(
    raw: Sequence[_Raw], pieces: Sequence[Piece], transfer_bytes: float
) -> tuple[Piece, ...]:
    """Return pieces whose shares of the work's time add up to 1."""
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


def _halves(times: LayerTimes) -> tuple[list[KernelTime], list[KernelTime]]:
    """Return the parts of attention and of the MLP, each from its norm to its residual sum."""
    attention, mlp = list[KernelTime](), list[KernelTime]()
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
    """Yield the backward pass of a layer, with recomputation first.

    kind : 'I' for input gradients, 'W' for weight gradients, 'B' for both.
    again : seconds of recomputed modules; None if all parts are recomputed.
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
    """Yield half a layer (attention or MLP): gather, dispatch, kernels, combine, scatter."""
    tokens_bytes = job.tokens * job.blocks[0].hidden * job.element_bytes
    gather, scatter = ("all-gather", "reduce-scatter")
    if not job.sequence_parallel:
        # Without sequence parallelism there is one all-reduce after each half.
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

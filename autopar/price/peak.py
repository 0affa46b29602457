"""Live tensors at each event of a stage's step, and the peak allocated bytes among the events.

The execution order of chunks is in `autopar.pipeline.orders`. Sizes of saved activations are in
`autopar.price.activations`. This module adds logits, attention scores, recomputed layers, tokens in
dispatch, and tensors in transfer between stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from autopar.pipeline import orders
from autopar.pipeline.schedules import default_group
from autopar.price.activations import (
    chunk_layers,
    chunk_parts,
    copied_qkv_bytes,
    device_parts,
    head_parts,
    input_bytes,
    kept_parts,
    layer_saved_bytes,
    mixer_bytes,
    offloaded_bytes,
    routed_tokens,
    saved_parts,
    score_count,
    stream_bytes,
)
from autopar.price.allocator import recycled_bytes
from autopar.price.parameters import embedding_and_head_weights, layer_weights
from autopar.records import Record, replace
from autopar.run.run import RankLayer, Run
from autopar.run.strategy import Chunk


class Event(Record):
    """Forward or backward of one chunk and micro-batch, or one half of a split backward."""

    kind: Literal["forward", "backward", "inputs", "weights"]
    chunk: int
    micro_batch: int


class Moment(Record):
    """Live micro-batches during an event."""

    event: Event
    live: tuple[int, ...]
    """Live micro-batches of each chunk, the one of this event included: after its forward has saved
    activations, and before its backward frees them."""
    waiting_logits: bool
    """True if the head's forward has run for a micro-batch whose backward has not finished."""
    partner: int | None = None
    """Chunk of the event that runs merged with this one, layer by layer; None: runs alone."""


def micro_batch_group(run: Run) -> int:
    """Return the number of consecutive micro-batches of a chunk in an interleaved schedule."""
    strategy = run.strategy
    pp, total = strategy.pp, strategy.micro_batches
    if strategy.group:
        return strategy.group
    if not run.kernels.torch_layers:
        # Megatron-Core's microbatch_group_size_per_vp_stage; its last group may be smaller
        return pp
    # torch makes rounds longer if the stages do not divide the micro-batches
    whole = default_group(pp, total)
    return pp if total % whole else whole


def _replayed(run: Run) -> int:
    """Return how many micro-batches a replay needs to reach every state of the pipeline.

    After the warm-up of the first stage, every group of micro-batches repeats the one before it,
    except for a smaller last group. Schedules that run all forwards first need all micro-batches.
    """
    strategy = run.strategy
    total = strategy.micro_batches
    if strategy.schedule in ("gpipe", "looped_bfs"):
        return total
    if strategy.schedule == "dual_pipe_v":
        # DualPipeV's order does not exist for fewer
        total = max(total, 2 * strategy.pp)
    group = micro_batch_group(run)
    first = 2 * strategy.pp + strategy.vpp * group + 1
    groups = first // group + 3
    return min(total, groups * group + total % group)


def warmup_chunks(run: Run, stage: int) -> int:
    """Return the number of chunk forwards that a stage runs before its first backward."""
    strategy = run.strategy
    return orders.warmup_chunks(
        strategy.schedule,
        stage,
        stages=strategy.pp,
        chunks=strategy.vpp,
        micro_batches=_replayed(run),
        group=micro_batch_group(run),
        ahead=int(run.runtime.overlap.experts),
    )


def order(run: Run, stage: int) -> tuple[Event, ...]:
    """Return the events of a stage's step in execution order, truncated once events repeat."""
    strategy = run.strategy
    work = orders.actions(
        strategy.schedule,
        stage,
        stages=strategy.pp,
        chunks=strategy.vpp,
        micro_batches=_replayed(run),
        group=micro_batch_group(run),
        # the next micro-batch's forward overlaps with the backward of a micro-batch
        ahead=int(run.runtime.overlap.experts),
    )
    return tuple(
        Event(kind=_KINDS[kind], chunk=chunk, micro_batch=micro_batch)
        for kind, chunk, micro_batch in work
    )


_KINDS: dict[str, Literal["forward", "backward", "inputs", "weights"]] = {
    "F": "forward",
    "B": "backward",
    "I": "inputs",
    "W": "weights",
}


def moments(run: Run, stage: int) -> Iterator[Moment]:
    """Yield every event of a stage's step with the live micro-batches."""
    chunks = run.strategy.stages[stage]
    live = [0] * len(chunks)
    waiting: set[int] = set()
    events = order(run, stage)
    partners = partners_of(run, stage, events)
    for place, event in enumerate(events):
        if event.kind == "forward":
            live[event.chunk] += 1
        yield Moment(
            event=event,
            live=tuple(live),
            waiting_logits=bool(waiting),
            partner=partners.get(place),
        )
        # a split backward keeps its activations until the weight gradients are computed
        if event.kind in ("backward", "weights"):
            live[event.chunk] -= 1
        if chunks[event.chunk].head:
            if event.kind == "forward":
                waiting.add(event.micro_batch)
            elif event.kind in ("backward", "weights"):
                waiting.discard(event.micro_batch)


def partners_of(run: Run, stage: int, events: Sequence[Event]) -> dict[int, int]:
    """Return the chunk of the merged event by place of an event, for expert-parallel overlap.

    A forward after the warm-up runs merged with the backward that follows it (Megatron-Core
    pipeline_parallel/combined_1f1b.py).
    """
    if not run.runtime.overlap.experts:
        return {}
    found: dict[int, int] = {}
    forwards, warmup = 0, warmup_chunks(run, stage)
    for place, (event, after) in enumerate(pairwise(events)):
        if event.kind != "forward":
            continue
        forwards += 1
        if forwards > warmup and after.kind == "backward":
            found[place], found[place + 1] = after.chunk, event.chunk
    return found


# --------------------------------------------------------------------------------------------------
# Point of peak memory.


class PeakBreakdown(Record):
    """Peak allocated bytes of a stage's step, by component."""

    moment: Moment
    saved_bytes: int
    """Saved activations of all live micro-batches and chunks."""
    rounding_bytes: int
    """Rounding of saved activations to allocator blocks."""
    head_bytes: int
    """Logits and the tensors of the loss."""
    backward_bytes: int
    """Transient memory of one layer's backward: gradients of scores, recomputed layers."""
    freed_bytes: int
    """Activations counted in `saved_bytes` that are already freed or not yet saved."""
    dispatched_bytes: int = 0
    """Tokens in dispatch to experts of other ranks, and in combine."""
    scan_bytes: int = 0
    """States and other tensors of a recurrence; scores and copies of sparse attention."""
    transfer_bytes: int = 0
    """Tensors received from other pipeline stages or being sent to them."""

    @property
    def total_bytes(self) -> int:
        """Sum of all components, less `freed_bytes`."""
        return (
            self.saved_bytes
            + self.rounding_bytes
            + self.head_bytes
            + self.dispatched_bytes
            + self.backward_bytes
            + self.scan_bytes
            + self.transfer_bytes
            - self.freed_bytes
        )


def logits_bytes(run: Run) -> int:
    """Return the bytes of a micro-batch's 16-bit logits on a rank, T*V/t*e."""
    return run.tokens * (run.padded_vocab // run.strategy.ends.tp) * run.element_bytes


def head_bytes(run: Run, mtp: int = 0) -> int:
    """Return the peak bytes of head and loss.

    The unfused loss holds the 16-bit logits and an fp32 copy, in which it computes softmax and
    gradient. Megatron-LM's fused loss (`native`) may hold more fp32 copies. Transformer Engine's
    loss overwrites the logits.

    mtp : number of MTP layers before the head, each with logits.
    """
    logits, loss = logits_bytes(run), run.kernels.loss
    if loss == "te":
        # the gradient overwrites the logits, and lives until the backward has multiplied it
        return logits * (1 + mtp) + _head_gradient_bytes(run)
    kept = kept_logits_bytes(run)
    # fp32 logits need no copy
    peak = kept + (logits if run.element_bytes < 4 else 0)
    if loss == "native":
        # copies are counted in 16 bits but have 32 bits
        peak += (run.kernels.quirks.fused_loss_copies - 3) * kept // 2
    # the fp32 softmax of an MTP layer's logits lives until the backward
    return peak + mtp * kept


def _head_gradient_bytes(run: Run) -> int:
    """Return the bytes of the head's input gradient: T*h*e, plus T'*h*e if sequence parallel.

    It adds to the peak only for a loss without fp32 copies.
    """
    whole = run.tokens * run.model.hidden * run.element_bytes
    return whole + (stream_bytes(run) if run.split.splits_sequence else 0)


def kept_logits_bytes(run: Run) -> int:
    """Return the bytes of fp32 logits kept from the head's forward to its backward."""
    return logits_bytes(run) * 4 // run.element_bytes


def transfer_bytes(run: Run, stage: int, kind: Literal["forward", "backward"]) -> int:
    """Return the bytes of tensors in transfer between stages during an event.

    Both tensors received from other stages and tensors being sent to them count.
    """
    strategy = run.strategy
    if strategy.pp == 1:
        return 0
    one = stream_bytes(run)
    if strategy.vpp > 1:
        # interleaved stages receive in advance
        return 3 * one
    if stage == 0:
        # The first stage receives no activations. It still references the last received gradient,
        # which in a backward is the gradient of the layer's output and is counted there.
        return one if kind == "forward" else 0
    return 2 * one


class _LastLayer(NamedTuple):
    """The last layer of one kind in a chunk."""

    at: RankLayer
    behind_bytes: int
    """Saved bytes of the layers after it: not yet saved in its forward, freed in its backward."""
    unit: tuple[RankLayer, ...]
    """Layers of its recompute unit; itself alone without full recomputation."""


def _last_layers(run: Run, chunk: Chunk) -> Iterator[_LastLayer]:
    """Yield the last layer of each kind and recompute unit in a chunk, from the last one on."""
    layers = chunk_layers(run, chunk)
    kept = [sum(size for _, size in parts) for parts in kept_parts(run, layers)]
    behind, seen = 0, set[tuple[int, ...]]()
    for place in reversed(range(len(layers))):
        at, unit = layers[place], _unit_of(layers, place)
        # the last recompute unit of a chunk may have fewer layers
        kind = (id(at), *map(id, unit))
        if kind not in seen:
            seen.add(kind)
            yield _LastLayer(at, behind, unit)
        behind += kept[place]


def _unit_of(layers: Sequence[RankLayer], place: int) -> tuple[RankLayer, ...]:
    split = layers[place].split
    if split.recompute != "full":
        return (layers[place],)
    first = place - place % split.recompute_unit
    unit = layers[first : first + split.recompute_unit]
    return tuple(at for at in unit if at.split.recompute == "full")


def expert_dispatch_bytes(run: Run, chunk: Chunk) -> int:
    """Return the transient bytes of dispatch and combine in a chunk's last layer."""
    return next((_dispatch_bytes(last.at) for last in _last_layers(run, chunk)), 0)


def _dispatch_bytes(last: RankLayer) -> int:
    """Return the transient bytes of dispatch and combine in a layer.

    The peak of the forward is in the combine. Live are the dispatched input (the caller still
    references it), the experts' output, its copy in sending order, and the shared expert's output.
    The copies of `alltoall` are counted from published peaks of first and last stages; those of the
    other dispatchers, whose published peaks are of stages with a head, are derived in the same way.
    0 for dense layers.
    """
    experts, split, dispatcher = last.layer.experts, last.split, last.run.runtime.experts.dispatcher
    if experts is None:
        return 0
    ranks = split.ep * split.etp
    routed, everyone = routed_tokens(last), last.sequence_parallel_tokens * ranks
    if dispatcher == "alltoall":
        exchanged, sorted_by_expert = ranks > 1, experts.number > split.ep
        # Dispatch: permuted, received and sorted tokens, one of the three is saved. Combine:
        # output, sorted back and sent back, two at a time.
        tokens = routed * (1 + (exchanged and sorted_by_expert))
        tokens += routed * (1 + (exchanged or sorted_by_expert))
    elif dispatcher == "allgather":
        # all tokens arrived in the gather buffer; the output is restored to their order
        tokens = routed + everyone
    else:
        # a token is sent to a rank once, however many of its experts are there
        tokens = routed + 2 * min(routed, everyone)
    shared = input_bytes(last) if experts.shared_width else 0
    return tokens * last.layer.routed_width * last.element_bytes + shared


def gathered_bytes(run: Run, stage: int) -> int:
    """Return the bytes of gathered weights of a ZeRO-3 stage during its head; 0 below ZeRO-3.

    Two layers count, one in use and one prefetched, and the unit of embedding, final norm and head.
    """
    if run.split.zero != 3:
        return 0
    chunks = run.strategy.stages[stage]
    around = sum(
        weight.elements for chunk in chunks for weight in embedding_and_head_weights(run, chunk)
    )
    layers = [run.rank_layers[layer] for chunk in chunks for layer in chunk.layers]
    fetched = sum(weight.elements for at in layers[-2:] for weight in layer_weights(at))
    return (around + fetched) * run.element_bytes


def deferred_head_bytes(run: Run) -> int:
    """Return the bytes of head inputs and logit gradients kept for deferred weight gradients.

    0 if the weight gradients of the head are not deferred.
    """
    deferred = run.kernels.deferred_head
    if deferred is None:
        return 0
    inputs = run.tokens * run.model.hidden * run.element_bytes
    # measured: an input keeps two tensors of its size alive in the graph that made it
    return deferred * (logits_bytes(run) + 3 * inputs)


def backward_bytes(run: Run, chunk: Chunk) -> tuple[int, int]:
    """Return (allocated, freed) bytes of the backward of a chunk.

    Allocated bytes are transient; freed bytes are saved activations that no longer exist at the
    peak.
    """
    peak = _backward(run, chunk)
    return peak.backward_bytes + peak.scan_bytes, peak.freed_bytes


def _backward(run: Run, chunk: Chunk) -> _Extra:
    """Return the transient memory at the peak of a chunk's backward, in its last layers by kind."""
    freed = sum(size for _, size in head_parts(run)) if chunk.head else 0
    moments = (
        moment._replace(freed_bytes=moment.freed_bytes + freed + last.behind_bytes)
        for last in _last_layers(run, chunk)
        for moment in _layer_backward(last)
    )
    return max(moments, key=lambda moment: moment.total_bytes, default=_Extra())


def _layer_backward(last: _LastLayer) -> Iterator[_Extra]:
    """Yield the transient memory of a layer's backward where it may have its peak.

    In the MLP its recomputed part is live, with the gradients of fc1's output and of the layer's
    output. In unfused attention, after the backward of the MLP, several gradients of the size of
    the scores are live. A layer without MLP holds the gradients of its projected input.
    """
    at, run, again = last.at, last.at.run, 0
    if run.offloads_activations:
        # only this layer's offloaded activations are copied back
        again = offloaded_bytes(at)
        at = without_offload(at)
    if at.split.recompute == "full":
        again += sum(map(layer_saved_bytes, last.unit))
    parts = dict(saved_parts(at.recomputing(frozenset())))
    gradients = sum(parts.get(f"{name} fc1 output", 0) for name in ("mlp", "expert"))
    in_scores, behind = _restored(at)
    mixing, number = mixer_bytes(at), score_count(at)
    if any(mixing):
        # a recomputed layer repeats its forward first
        scan = max(mixing) if again else mixing[1]
        freed = sum(_behind_attention(at))
        yield _Extra(backward_bytes=again + input_bytes(at), scan_bytes=scan, freed_bytes=freed)
    if at.layer.mlp is not None:
        yield _Extra(backward_bytes=again + behind + gradients + input_bytes(at))
    elif at.layer.recurrent is None:
        widths = sum(parts.get(name, 0) for name in ("qkv", "query", "key", "value"))
        yield _Extra(backward_bytes=again + widths + input_bytes(at))
    if again or "moe" in at.split.modules:
        # a recomputed MoE layer repeats its dispatch
        yield _Extra(backward_bytes=again + behind + _dispatch_bytes(last.at))
    if number and run.kernels.attention in ("unfused", "local"):
        number *= at.element_bytes * run.kernels.quirks.unfused_backward_copies
        freed = sum(_behind_attention(at))
        yield _Extra(backward_bytes=again + in_scores + number, freed_bytes=freed)


def _largest_layer_bytes(run: Run, chunk: Chunk) -> int:
    """Return the saved bytes of a chunk's largest layer; 0 without layers."""
    return max((layer_saved_bytes(run.rank_layers[layer]) for layer in chunk.layers), default=0)


def without_offload(at: RankLayer) -> RankLayer:
    """Return the layer with all of its activations on the device."""
    return RankLayer(run=at.run, layer=at.layer, split=replace(at.split, offload=frozenset()))


def _restored(at: RankLayer) -> tuple[int, int]:
    """Return (bytes of recomputed core attention, bytes of recomputed parts after attention).

    As measured, latent projections are recomputed after the scores, so they are not in the first.
    """
    modules = at.split.modules
    if not modules:
        return 0, 0
    core, whole = at.recomputing(modules - {"core_attn"}), at.recomputing(frozenset())
    behind = [sum(_behind_attention(one)) for one in (whole, at)]
    layer = [layer_saved_bytes(one) for one in (core, at)]
    return layer[0] - layer[1], behind[0] - behind[1]


def _behind_attention(at: RankLayer) -> Sequence[int]:
    """Return the device bytes of the saved parts of a layer from the norm of its MLP on."""
    if at.layer.mlp is None:
        return []
    # offloaded and empty parts are included, so that the norm's position is correct
    parts = list(device_parts(at))
    inputs = [place for place, (name, _) in enumerate(parts) if name == "norm input"]
    return [size for _, size in parts[inputs[-1] :]]


def _scan_ahead(at: RankLayer) -> int:
    """Return the transient bytes of a layer's mixer beyond those that its MLP saves later."""
    ahead = mixer_bytes(at)[0]
    return max(0, ahead - sum(_behind_attention(at))) if ahead else 0


class _Extra(NamedTuple):
    """Transient bytes at the peak of a chunk's event, in addition to saved activations."""

    head_bytes: int = 0
    dispatched_bytes: int = 0
    backward_bytes: int = 0
    scan_bytes: int = 0
    freed_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Sum of the components, less `freed_bytes`."""
        made = self.head_bytes + self.dispatched_bytes + self.backward_bytes + self.scan_bytes
        return made - self.freed_bytes


def _extras(run: Run, chunk: Chunk) -> dict[str, _Extra]:
    """Return the peak transient memory of a chunk by event kind, "forward" and "backward"."""
    # final norm and head run after the last layer
    ahead = sum(size for _, size in head_parts(run)) if chunk.head else 0
    forward = [
        _Extra(
            dispatched_bytes=_dispatch_bytes(last.at),
            scan_bytes=_scan_ahead(last.at),
            freed_bytes=ahead + last.behind_bytes,
        )
        for last in _last_layers(run, chunk)
    ] or [_Extra()]
    if chunk.head:
        head = head_bytes(run, chunk.mtp) + deferred_head_bytes(run)
        forward.append(_Extra(head_bytes=head, freed_bytes=_late_bytes(run)))
    return {
        "forward": max(forward, key=lambda extra: extra.total_bytes),
        "backward": _backward(run, chunk),
    }


def _late_bytes(run: Run) -> int:
    """Return the bytes of a stage's output that are freed before the peak of the head.

    An in-place loss has its peak in the head's backward, when the output is no longer sent.
    """
    late = run.kernels.loss == "te" and run.strategy.pp > 1 and run.strategy.vpp == 1
    return late * stream_bytes(run)


def peaks(run: Run, stage: int) -> Callable[[Moment], PeakBreakdown]:
    """Return a function from an event of a stage to its allocated bytes by component."""
    chunks = run.strategy.stages[stage]
    expandable = run.runtime.allocator.expandable
    parts = [list(chunk_parts(run, chunk)) for chunk in chunks]
    saved = [sum(size for _, size in sizes) for sizes in parts]
    # a copy of qkv frees the original's block, which the next dropout mask reuses
    holes = {"dropout mask": copied_qkv_bytes(run.rank_layers[0])}
    rounding = [
        sum(
            recycled_bytes(size, expandable=expandable, hole_bytes=holes.get(name, 0)) - size
            for name, size in sizes
        )
        for sizes in parts
    ]
    extras = [_extras(run, chunk) for chunk in chunks]
    kept = kept_logits_bytes(run)
    whole = [sum(sizes) for sizes in zip(saved, rounding, strict=True)]

    def merged(place: int, kind: str, partner: int) -> _Extra:
        """Return the peak of an event that runs merged with one of the chunk `partner`.

        A layer of the forward is saved while one of the backward is freed: beside the other
        micro-batches, one more layer than those of a chunk is live. The head of the forward comes
        last, when the backward is done.
        """
        if kind == "forward":
            extra = extras[place]["forward"]
            return extra._replace(freed_bytes=extra.freed_bytes + whole[partner])
        layers = _largest_layer_bytes(run, chunks[partner])
        absent = max(0, whole[partner] - layers)
        own = extras[place]["backward"]
        moments = [
            own._replace(
                dispatched_bytes=expert_dispatch_bytes(run, chunks[partner]),
                freed_bytes=own.freed_bytes + absent,
            )
        ]
        if chunks[place].head:
            head = head_bytes(run, chunks[place].mtp)
            moments.append(_Extra(head_bytes=head, freed_bytes=whole[partner] + _late_bytes(run)))
        return max(moments, key=lambda extra: extra.total_bytes)

    def at(moment: Moment) -> PeakBreakdown:
        place, kind = moment.event.chunk, moment.event.kind
        assert kind in ("forward", "backward"), "Megatron-LM splits no backward"
        waiting = kept if moment.waiting_logits else 0
        if kind == "backward" and chunks[place].head:
            # the logits of this micro-batch are freed first
            waiting -= kept
        extra = extras[place][kind]
        if moment.partner is not None:
            extra, waiting = merged(place, kind, moment.partner), 0
        return PeakBreakdown(
            moment=moment,
            saved_bytes=sum(n * size for n, size in zip(moment.live, saved, strict=True)),
            rounding_bytes=sum(n * size for n, size in zip(moment.live, rounding, strict=True)),
            head_bytes=waiting + extra.head_bytes,
            dispatched_bytes=extra.dispatched_bytes,
            backward_bytes=extra.backward_bytes,
            scan_bytes=extra.scan_bytes,
            freed_bytes=extra.freed_bytes,
            transfer_bytes=transfer_bytes(run, stage, kind),
        )

    return at


def peak_of(run: Run, stage: int) -> PeakBreakdown:
    """Return the allocated bytes of the event with the highest peak in a stage's step."""
    peak_at = peaks(run, stage)
    best: PeakBreakdown | None = None
    # a steady pipeline repeats the same few states with every micro-batch
    seen = set[tuple[object, ...]]()
    for moment in moments(run, stage):
        same = (
            *(moment.event.kind, moment.event.chunk, moment.live),
            *(moment.waiting_logits, moment.partner),
        )
        if same in seen:
            continue
        seen.add(same)
        found = peak_at(moment)
        if best is None or found.total_bytes > best.total_bytes:
            best = found
    assert best is not None
    return best

"""What is live at each moment of a stage's step, and what is allocated at the fullest one.

The order in which a stage runs its chunks is the schedule's (`autopar.pipeline.orders`), with
groups of micro-batches as Megatron-Core counts them. What lives from one event to the next has the
bytes of `autopar.price.activations`; on top of it come logits, scores and recomputed layers inside
one event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

from autopar.pipeline import orders
from autopar.pipeline.schedules import default_group
from autopar.price.activations import (
    chunk_parts,
    copied_qkv_bytes,
    input_bytes,
    layer_saved_bytes,
    left_parts,
    offloaded_bytes,
    routed_tokens,
    saved_parts,
    scores,
    stream_bytes,
)
from autopar.price.allocator import recycled_bytes
from autopar.price.parameters import ends_weights, layer_weights
from autopar.records import Record, replace
from autopar.run.run import RankLayer, Run
from autopar.run.strategy import Chunk


class Event(Record):
    """One chunk's forward or backward of one micro-batch, or a half of a backward."""

    kind: Literal["forward", "backward", "inputs", "weights"]
    chunk: int
    micro_batch: int


class Moment(Record):
    """What is live while an event runs."""

    event: Event
    live: tuple[int, ...]
    """Micro-batches that each chunk has saved and not freed; with this one, before its backward
    frees it, or after its forward saved it."""
    waiting_logits: bool
    """The head has run for a micro-batch whose backward is still to come, or just begins."""


def micro_batch_group(run: Run) -> int:
    """Return the micro-batches that pass a chunk in a row."""
    strategy = run.strategy
    pp, total = strategy.pp, strategy.micro_batches
    if strategy.group:
        return strategy.group
    if not run.kernels.torch_layers:
        # Megatron-Core's microbatch_group_size_per_vp_stage; its last group may be smaller
        return pp
    # torch makes its rounds longer where micro-batches do not divide by the stages
    whole = default_group(pp, total)
    return pp if total % whole else whole


def _replayed(run: Run) -> int:
    """Return how many micro-batches show everything that a stage of the pipeline ever holds.

    After the warm-up of the first stage, each further group repeats the one before it; the last one
    may be smaller than the others. Where all forwards run first, all of them count.
    """
    strategy = run.strategy
    total = strategy.micro_batches
    if strategy.schedule in ("gpipe", "looped_bfs"):
        return total
    if strategy.schedule == "dual_pipe_v":
        # fewer have no such order
        total = max(total, 2 * strategy.pp)
    group = micro_batch_group(run)
    first = 2 * strategy.pp + strategy.vpp * group + 1
    groups = first // group + 3
    return min(total, groups * group + total % group)


def warmup_chunks(run: Run, stage: int) -> int:
    """Return how many forwards a stage of pairs runs before its first backward."""
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
    """Return the events of a stage's step in the order of its schedule.

    Of many micro-batches so many that nothing new comes.
    """
    strategy = run.strategy
    work = orders.actions(
        strategy.schedule,
        stage,
        stages=strategy.pp,
        chunks=strategy.vpp,
        micro_batches=_replayed(run),
        group=micro_batch_group(run),
        # beside the backward of a micro-batch the next one's forward runs
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
    """Yield every event of a stage's step with what is live."""
    chunks = run.strategy.stages[stage]
    live = [0] * len(chunks)
    waiting: set[int] = set()
    for event in order(run, stage):
        if event.kind == "forward":
            live[event.chunk] += 1
        yield Moment(event=event, live=tuple(live), waiting_logits=bool(waiting))
        # what the gradients of weights need is there until they are made
        if event.kind in ("backward", "weights"):
            live[event.chunk] -= 1
        if chunks[event.chunk].head:
            if event.kind == "forward":
                waiting.add(event.micro_batch)
            elif event.kind in ("backward", "weights"):
                waiting.discard(event.micro_batch)


# --------------------------------------------------------------------------------------------------
# The fullest moment.


class Peak(Record):
    """The fullest moment of a stage's step by what fills it, in bytes."""

    moment: Moment
    saved_bytes: int
    """Activations of all live micro-batches and chunks."""
    rounding_bytes: int
    """How much larger their blocks are."""
    head_bytes: int
    """Logits and what the loss makes of them."""
    backward_bytes: int
    """Of one layer's backward: gradients of scores, layers that are computed again."""
    freed_bytes: int
    """Of the activations counted above what is gone by then, or not there yet."""
    dispatched_bytes: int = 0
    """Tokens on their way to the experts of other ranks and back."""
    transfer_bytes: int = 0
    """Received from other pipeline stages, or on their way to them."""

    @property
    def total_bytes(self) -> int:
        """Of all of them."""
        return (
            self.saved_bytes
            + self.rounding_bytes
            + self.head_bytes
            + self.dispatched_bytes
            + self.backward_bytes
            + self.transfer_bytes
            - self.freed_bytes
        )


def logits_bytes(run: Run) -> int:
    """Return the 16-bit logits of a micro-batch on a rank, T*V/t*e."""
    return run.tokens * (run.padded_vocab // run.strategy.ends.tp) * run.element_bytes


def head_bytes(run: Run, mtp: int = 0) -> int:
    """Return what head and loss allocate at their fullest moment, with so many MTP layers before.

    16-bit logits and an fp32 copy, in which the softmax and its gradient are made: 3X. A fused loss
    keeps further fp32 copies, Transformer Engine's works in place of the logits.
    """
    logits, loss = logits_bytes(run), run.kernels.loss
    if loss == "te":
        # the gradient is written over the logits, and is still there when it is multiplied back
        return logits * (1 + mtp) + _head_gradient_bytes(run)
    kept = kept_logits_bytes(run)
    # logits in fp32 need no copy
    peak = kept + (logits if run.element_bytes < 4 else 0)
    if loss == "native":
        # copies are counted in 16 bits, and are of 32
        peak += (run.kernels.quirks.fused_loss_copies - 3) * kept // 2
    # of an MTP layer's logits the fp32 softmax stays until the backward
    return peak + mtp * kept


def _head_gradient_bytes(run: Run) -> int:
    """Return the gradient of the head's input: T*h*e and, where tokens are scattered, T'*h*e more.

    Only a loss without fp32 copies leaves it at the fullest moment.
    """
    whole = run.tokens * run.model.hidden * run.element_bytes
    return whole + (stream_bytes(run) if run.split.scattered else 0)


def kept_logits_bytes(run: Run) -> int:
    """Return what stays of a micro-batch's logits from its head's forward to its backward, fp32."""
    return logits_bytes(run) * 4 // run.element_bytes


def transfer_bytes(run: Run, stage: int, kind: Literal["forward", "backward"]) -> int:
    """Return tensors received from, or on their way to, other stages during an event."""
    strategy = run.strategy
    if strategy.pp == 1:
        return 0
    one = stream_bytes(run)
    if strategy.vpp > 1:
        # interleaved stages receive ahead
        return 3 * one
    if stage == 0:
        # nothing comes from before: the last gradient that was received is still referred to, and
        # in a backward it is that of the layer's output, which is counted there
        return one if kind == "forward" else 0
    return 2 * one


def _last_layer(run: Run, chunk: Chunk) -> RankLayer | None:
    """Return the last layer of a chunk, which is an MTP layer where it has any."""
    if chunk.mtp:
        return run.mtp_layer
    return run.rank_layers[chunk.layers[-1]] if chunk.layers else None


def dispatched_bytes(run: Run, chunk: Chunk) -> int:
    """Return what tokens on their way through a chunk's last experts hold beside what is saved.

    At the fullest moment of the forward, when they come back: what went in is still referred to by
    the caller, the experts' output and its copy in the order in which it goes back, and what the
    shared expert made. Counted for `alltoall` from published peaks of first and last stages; for
    the other two, whose peaks are of stages with a head, from the same causes.
    """
    last, dispatcher = _last_layer(run, chunk), run.runtime.experts.dispatcher
    if last is None or last.layer.experts is None:
        return 0
    experts, split = last.layer.experts, last.split
    ranks = split.ep * split.etp
    routed, everyone = routed_tokens(last), last.scattered_tokens * ranks
    if dispatcher == "alltoall":
        exchanged, sorted_by_expert = ranks > 1, experts.number > split.ep
        # permuted, received, sorted: of three the last is saved; then made, sorted back, sent back:
        # two at a time
        tokens = routed * (1 + (exchanged and sorted_by_expert))
        tokens += routed * (1 + (exchanged or sorted_by_expert))
    elif dispatcher == "allgather":
        # all tokens came in the gather buffer; the output is put in their order again
        tokens = routed + everyone
    else:
        # a token comes to a rank once, whatever number of its experts are there
        tokens = routed + 2 * min(routed, everyone)
    shared = input_bytes(last) if experts.shared_width else 0
    return tokens * last.layer.hidden * last.element_bytes + shared


def gathered_bytes(run: Run, stage: int) -> int:
    """Return the weights that a fully sharded stage has gathered at the head: its own, two layers.

    One layer is used and the next one fetched; embedding, final norm and head are one unit.
    """
    if run.split.zero != 3:
        return 0
    chunks = run.strategy.stages[stage]
    around = sum(weight.elements for chunk in chunks for weight in ends_weights(run, chunk))
    layers = [run.rank_layers[layer] for chunk in chunks for layer in chunk.layers]
    fetched = sum(weight.elements for at in layers[-2:] for weight in layer_weights(at))
    return (around + fetched) * run.element_bytes


def deferred_head_bytes(run: Run) -> int:
    """Return the inputs and gradients of heads whose weight gradients wait for the end."""
    deferred = run.kernels.deferred_head
    if deferred is None:
        return 0
    inputs = run.tokens * run.model.hidden * run.element_bytes
    # measured: an input holds on to two tensors of its size in the graph that made it
    return deferred * (logits_bytes(run) + 3 * inputs)


def backward_bytes(run: Run, chunk: Chunk) -> tuple[int, int]:
    """Return what the backward of a chunk's last layer allocates, and what it has freed till then.

    At its fullest moment: in the MLP, with what is computed again of it, the gradients of what is
    in front of its activation and of the layer's output; or in attention that is not fused, when
    the MLP behind it is done, several gradients as large as the scores.
    """
    at = _last_layer(run, chunk)
    if at is None:
        return 0, 0
    again = 0
    if run.offloads_activations:
        # what waited on the host is back, the layer's own and no other's
        again = offloaded_bytes(at)
        at = without_offload(at)
    if at.split.recompute == "full":
        again += at.split.recompute_unit * layer_saved_bytes(at)
    freed = 2 * stream_bytes(run) if chunk.head else 0
    parts = dict(saved_parts(at.recomputing(frozenset())))
    gradients = sum(parts.get(f"{name} fc1 output", 0) for name in ("mlp", "expert"))
    in_scores, behind = _restored(at)
    moments = [(again + behind + gradients + input_bytes(at), freed)]
    if again or "moe" in at.split.modules:
        # a mixture that is computed again sends its tokens again
        moments.append((again + behind + dispatched_bytes(run, chunk), freed))
    if run.kernels.attention in ("unfused", "local"):
        number = scores(at) * at.element_bytes * run.kernels.quirks.unfused_backward_copies
        freed += sum(_behind_attention(at))
        moments.append((again + in_scores + number, freed))
    return max(moments, key=lambda moment: moment[0] - moment[1])


def without_offload(at: RankLayer) -> RankLayer:
    """Return the layer with all of its activations on the device."""
    return RankLayer(run=at.run, layer=at.layer, split=replace(at.split, offload=frozenset()))


def _restored(at: RankLayer) -> tuple[int, int]:
    """Return what a backward computes again of a layer: its scores, and what is behind attention.

    Narrow projections are not there yet when the scores are (measured).
    """
    modules = at.split.modules
    if not modules:
        return 0, 0
    core, whole = at.recomputing(modules - {"core_attn"}), at.recomputing(frozenset())
    behind = [sum(_behind_attention(one)) for one in (whole, at)]
    layer = [layer_saved_bytes(one) for one in (core, at)]
    return layer[0] - layer[1], behind[0] - behind[1]


def _behind_attention(at: RankLayer) -> Sequence[int]:
    """Return the sizes of what a layer saves from its second norm on."""
    # what waits on the host, or is of no token, still says where a norm stands
    parts = list(left_parts(at))
    inputs = [place for place, (name, _) in enumerate(parts) if name == "norm input"]
    return [size for _, size in parts[inputs[1] :]]


class _Extra(NamedTuple):
    """What an event of a chunk has at its fullest beside what is live, in bytes."""

    head_bytes: int = 0
    dispatched_bytes: int = 0
    backward_bytes: int = 0
    freed_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Of all of them."""
        return self.head_bytes + self.dispatched_bytes + self.backward_bytes - self.freed_bytes


def _extras(run: Run, chunk: Chunk) -> dict[str, _Extra]:
    """Return the fullest moment of a chunk's forward, and of its backward."""
    own, freed = backward_bytes(run, chunk)
    # final norm and head come behind the last experts
    ahead = 2 * stream_bytes(run) if chunk.head else 0
    forward = [_Extra(dispatched_bytes=dispatched_bytes(run, chunk), freed_bytes=ahead)]
    if chunk.head:
        head = head_bytes(run, chunk.mtp) + deferred_head_bytes(run)
        # a loss in place is at its fullest when the head goes back, and its output is sent no more
        late = run.kernels.loss == "te" and run.strategy.pp > 1 and run.strategy.vpp == 1
        forward.append(_Extra(head_bytes=head, freed_bytes=late * stream_bytes(run)))
    return {
        "forward": max(forward, key=lambda extra: extra.total_bytes),
        "backward": _Extra(backward_bytes=own, freed_bytes=freed),
    }


def peaks(run: Run, stage: int) -> Callable[[Moment], Peak]:
    """Return what says of a moment of a stage what fills it."""
    chunks = run.strategy.stages[stage]
    expandable = run.runtime.allocator.expandable
    parts = [list(chunk_parts(run, chunk)) for chunk in chunks]
    saved = [sum(size for _, size in sizes) for sizes in parts]
    # what is copied out of one tensor leaves its hole to the mask that is made next
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

    def at(moment: Moment) -> Peak:
        place, kind = moment.event.chunk, moment.event.kind
        assert kind in ("forward", "backward"), "Megatron-LM splits no backward"
        waiting = kept if moment.waiting_logits else 0
        if kind == "backward" and chunks[place].head:
            # its own logits go first
            waiting -= kept
        extra = extras[place][kind]
        return Peak(
            moment=moment,
            saved_bytes=sum(n * size for n, size in zip(moment.live, saved, strict=True)),
            rounding_bytes=sum(n * size for n, size in zip(moment.live, rounding, strict=True)),
            head_bytes=waiting + extra.head_bytes,
            dispatched_bytes=extra.dispatched_bytes,
            backward_bytes=extra.backward_bytes,
            freed_bytes=extra.freed_bytes,
            transfer_bytes=transfer_bytes(run, stage, kind),
        )

    return at


def peak_of(run: Run, stage: int) -> Peak:
    """Return the fullest moment of a stage, by replaying the order of its events."""
    peak_at = peaks(run, stage)
    best: Peak | None = None
    # a steady pipeline comes back to the same few moments with every micro-batch
    seen = set[tuple[object, ...]]()
    for moment in moments(run, stage):
        same = (moment.event.kind, moment.event.chunk, moment.live, moment.waiting_logits)
        if same in seen:
            continue
        seen.add(same)
        found = peak_at(moment)
        if best is None or found.total_bytes > best.total_bytes:
            best = found
    assert best is not None
    return best

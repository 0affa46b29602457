"""Time and memory of embedding, head and loss by position in the pipeline.

Source: cost-model.md section 6 and "Memory of a rank". Hidden size and sequence length of the
embedding are those of the first layer, those of the head are those of the last layer. A single
stage has both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np

from autopar.arrays import F64, I64
from autopar.records import Record
from autopar.run.model import LayerSpec, ModelSpec, OtherMemory, padded_vocab_size
from autopar.run.plan import PipelineType, VocabStrategy, data_degree, vocab_problems
from autopar.run.runtime import OverlapFactors
from search.planning.cost.communication import Asking, Message
from search.planning.cost.fits import OtherFits
from search.planning.cost.memory import (
    communicator_bytes,
    gathered_bytes,
    gathered_weight_bytes,
    listed_rows,
    loss_bytes,
    reducing_bytes,
    state_bytes,
    to_bytes,
    token_bytes,
    unit_bytes,
)
from search.planning.cost.overlap import LayerTime, exposed_reduction_s, overlap_s, with_stragglers
from search.planning.cost.state_layouts import Recipe
from search.planning.cost.tables import (
    POSITIONS,
    PricedRows,
    Pricing,
    Rows,
    build_grid,
    rows_at,
    sum_of,
    which_rows,
)
from search.planning.cost.time import (
    BACKWARD_FACTOR,
    OptimizerCurve,
    gradient_messages,
    optimizer_s,
)
from search.planning.space import Table

_STATE_BYTES_DOCUMENTED = 16.0
"""Bytes per parameter of the model states in memory files of Galvatron."""


class VocabModel(Record, eq=False):
    """Architecture, fitted times and measured memory of embedding, head and loss."""

    spec: ModelSpec
    fits: OtherFits
    memory: Mapping[str, OtherMemory]
    """Memory by name in `POSITIONS`."""
    logits_peak_bytes_per_sample: float
    """Additional bytes per sample during the loss, before division by the vocabulary degree."""
    optimizer: OptimizerCurve | None = None
    """Measured optimizer step of layers, also used for embedding and head; None if not measured."""


class VocabRows(PricedRows, eq=False):
    """Time and memory of embedding and head, axes (N, 3, E); `valid` and `priced` have (N, E).

    Categories: forward, tp, zero3; backward, tp, zero3, sync; tail, optimizer, tied (all-reduce of
    tied weights). Estimates add stragglers, a calibration adds fixed. Rows that are not priced
    contain 0. `activations` are live until the backward of the layers ends.
    """

    unmeasured: tuple[int, ...]
    """Degrees that divide the ranks of some table but have no entry in the memory tables."""
    loss: I64
    """Bytes of head and loss in addition to `activations`, freed before the layers' backward."""
    beside_loss: I64
    """Bytes (2, N, 3, E) during the loss, in addition to `activations` and `loss`."""
    beside_half: I64
    """Bytes (2, N, 3, E) during the weight gradient of the head, in addition to `activations` and
    half of `loss`."""
    logits: I64
    """Part of `loss`: logits of the head, freed when the loss is known."""

    def memory(self, pipeline_type: PipelineType) -> tuple[I64, I64]:
        """Return (saved activations (N, 3, E), peak transient memory (2, N, 3, E)), bytes.

        Memory of the loss is transient, because the loss ends before the backward of the layers.
        On the last stage of GPipe it is live for every micro-batch, except the logits.
        """
        kept, passing = self.activations, self.loss
        if pipeline_type == "gpipe":
            last = np.arange(len(POSITIONS))[:, None] == POSITIONS.index("last")
            kept = kept + np.where(last, passing - self.logits, 0)
            passing = np.where(last, self.logits, passing)
        during = np.maximum(passing + self.beside_loss, passing // 2 + self.beside_half)
        # memory held during layers may exceed all of them
        return kept, np.maximum(np.maximum(self.transient, during), 0)


def tied_parameters(model: VocabModel, vocab: VocabStrategy) -> float:
    """Return the number of embedding parameters on a rank that a tied head shares.

    This is padded_vocab*h/vtp, where the vocabulary is padded to a multiple of
    `make_vocab_size_divisible_by`*vtp. If the vocabulary size is unknown, all parameters of the
    embedding's stage other than layers are counted.
    """
    spec = model.spec
    degree = 1 if vocab.ulysses else vocab.tp
    if spec.vocab_size is None:
        states = model.memory["first"].model_state_bytes.get(degree, 0.0)
        return states / _STATE_BYTES_DOCUMENTED
    # all vocabulary ranks hold equally many rows
    return padded_vocab_size(spec, degree) * spec.layers[0].hidden_size / degree


def vocab_rows(
    model: VocabModel,
    vocab: Sequence[VocabStrategy],
    tables: Sequence[Table],
    pricing: Pricing,
    *,
    price_illegal: bool = False,
) -> Asking[VocabRows]:
    """Return time and memory of embedding and head for every table, position and strategy.

    Values are 0 for positions that do not exist in a table (`first` and `last` if p == 1, `only` if
    p > 1) and for rows that are not `priced`.

    price_illegal : True to also price rows that only break a divisibility rule.
    """
    options, spec, recipe = pricing.options, model.spec, pricing.recipe
    sp = options.sequence_parallel
    states, activations = _measured(model, vocab)
    has = ~np.isnan(states) & ~np.isnan(activations)
    # a pipeline needs the tables of both its ends, a single stage a separate one
    measured = (has[0], has[1] & has[2])
    legal = [not any(vocab_problems(spec, v, sequence_parallel=sp)) for v in vocab]
    grid = build_grid([v.as_layer() for v in vocab], tables, pricing, measured)
    allowed, priced = which_rows(
        grid, legal=np.array(legal, dtype=np.bool_), price_illegal=price_illegal
    )
    table, strategy = priced.nonzero()
    # one stage has position `only`, several have `first` and `last`: rows of each, in this order
    single = grid.stages[table] == 1
    alone, ends = single.nonzero()[0], (~single).nonzero()[0]
    order = np.concatenate((alone, ends, ends))
    rows = rows_at(grid, allowed, table[order], strategy[order])
    counts = (len(alone), len(ends), len(ends))
    at = _Positions(
        number=np.repeat(np.arange(len(POSITIONS)), counts),
        rows=[slice(end - n, end) for n, end in zip(counts, accumulate(counts), strict=True)],
    )
    which = (at.number, rows.strategy)
    # the file contains 16 bytes per parameter, whatever the precision of the search
    parameters = states[which] / _STATE_BYTES_DOCUMENTED
    at_once, head = _at_once(states, model), _head(states)
    units = (at_once[which] / _STATE_BYTES_DOCUMENTED, head[which] / _STATE_BYTES_DOCUMENTED)
    times = yield from _time(at, rows, parameters, model, vocab, pricing)
    # input gathered with sequence parallelism, in the shared buffer or in transient memory
    first, last = (token_bytes(layer, recipe) for layer in (spec.layers[0], spec.layers[-1]))
    buffer = gathered_bytes(rows, np.where(at.number == _FIRST, first, last), pricing)
    # Logits are live during the loss. A rank has 1/vtp of the vocabulary's columns, or with Ulysses
    # of the tokens, for the tokens of its context-parallel rank.
    logits = rows.batch * model.logits_peak_bytes_per_sample / rows.shards
    logits[at.rows[_FIRST]] = 0.0
    if not options.global_memory_buffer:
        logits = logits + buffer
    kept = rows.batch * activations[which]
    # measured tables include the logits with the softmax, estimated ones exclude them
    made = np.zeros_like(kept)
    if spec.vocab_size is not None and not model.logits_peak_bytes_per_sample:
        columns = np.array([padded_vocab_size(spec, 1 if v.ulysses else v.tp) for v in vocab])
        made = rows.batch * recipe.element * spec.layers[-1].seq_length * columns[rows.strategy]
        # the softmax has equally many elements of 4 bytes
        made = np.minimum(made / rows.shards, kept * recipe.element / (recipe.element + 4.0))
    staying = rows.batch * _staying(activations)[which]
    # communicators of the vocabulary layers, in addition to those of layers
    opened = communicator_bytes(rows, pricing)
    states_, moments = [], []
    # dummy weight gradients, which ZeRO-3 shards do not have
    held = np.where(rows.zero3, 0.0, _held(model, vocab)[which])
    if any(memory.held_bytes for memory in model.memory.values()):
        # such an engine also has a gather buffer that layers do not share
        held, buffer = held + buffer, np.zeros_like(buffer)
        held[at.rows[_FIRST]] = 0.0
    # for m == 1, then m > 1: with one micro-batch gradients are sharded as they are reduced
    for shard in (True, not options.async_grad_reduce):
        found = _moments(at, rows, (parameters, *units), model, recipe, shard_gradients=shard)
        own = state_bytes(parameters, rows, recipe, shard_gradients=shard)
        states_.append(own + found.held + held + opened)
        moments.append((found.reduced, found.at_loss + logits, found.at_weights + logits / 2.0))
    # a unit is copied out of its gather buffer, and the embedding is prefetched in the backward
    shared = gathered_weight_bytes(units[0], rows, recipe)
    shared = np.where(listed_rows(rows, recipe), 0.0, shared)
    num_bytes = to_bytes(
        np.array(
            (
                *states_,
                staying,
                kept,
                *(moment for now in zip(*moments, strict=True) for moment in now),
                buffer + shared if options.global_memory_buffer else shared,
                made,
            )
        )
    )
    # bytes that are not kept during the layers belong to the loss
    num_bytes[3] -= num_bytes[2]
    shape = (len(tables), len(POSITIONS), len(vocab))
    places = (rows.table, *which)
    full = np.zeros((len(num_bytes), *shape), dtype=np.int64)
    full[(slice(None), *places)] = num_bytes
    world = pricing.hardware.world_size
    return VocabRows(
        at=places,
        shape=shape,
        seconds=(times.forward, times.backward, times.step),
        unpriced_s=0.0,
        rows=rows,
        valid=allowed & priced,
        priced=priced,
        unmeasured=tuple(
            sorted(
                {
                    v.tp
                    for p in {p for p, _, _ in tables}
                    for v, known in zip(vocab, measured[p > 1].tolist(), strict=True)
                    if not known and data_degree(world, p, v.tp * v.cp)
                }
            )
        ),
        states=full[0:2],
        activations=full[2],
        loss=full[3],
        transient=full[4:6],
        beside_loss=full[6:8],
        beside_half=full[8:10],
        shared=full[10],
        logits=full[11],
    )


_ONLY, _FIRST, _LAST = range(len(POSITIONS))


class _Positions(Record, eq=False):
    """Positions of flat rows, which are sorted by position."""

    number: I64
    """(n,) index of the position in POSITIONS."""
    rows: Sequence[slice]
    """Range of rows of each position."""


class _Moments(Record, eq=False):
    """Weights and gradients of embedding and head in addition to states, (n,) bytes."""

    held: F64
    """Bytes throughout the step; the other fields are in addition to it and may be negative."""
    at_loss: F64
    """Bytes during the loss."""
    at_weights: F64
    """Bytes while the weight gradient of the head is computed."""
    reduced: F64
    """Bytes while a ZeRO unit is reduced, or a DDP gradient is added to its sum."""


def _moments(
    at: _Positions,
    rows: Rows,
    units: tuple[F64, F64, F64],
    model: VocabModel,
    recipe: Recipe,
    *,
    shard_gradients: bool,
) -> _Moments:
    """Return the bytes of embedding and head beyond their states, at each point of a step.

    The gradient of the head is reduced first, and its buffer is live until the next reduction in
    the last layer's backward. Tied weights on a single stage are gathered throughout the step, and
    their gradient is reduced after the backward of the embedding.

    units : (n,) parameters of embedding and head, of the larger ZeRO unit, and of the head.
    shard_gradients : True if gradients are sharded in each reduction.
    """
    parameters, unit, head = units
    has_head = at.number != _FIRST
    one = (at.number == _ONLY) & model.spec.tied_embeddings
    gathered = gathered_weight_bytes(unit, rows, recipe)
    gradient = recipe.weight * unit
    reduced = np.maximum(
        reducing_bytes(unit, rows, recipe, shard_gradients=shard_gradients), gradient
    )
    is_first = rows.sharded & rows.several & has_head & ~one
    # unsharded sums, counted as states, make room for the buffer but not for the shard
    divided = rows.divides_gradients(at_once=shard_gradients)
    left = np.where(divided, 1.0, 1.0 / rows.optimizer_shards)
    held = np.where(is_first, recipe.gradient * head * left, 0.0)
    held = np.where(one, gathered + gradient, held)
    listed = listed_rows(rows, recipe)
    held = np.where(listed, 0.0, held)
    # the unit bytes of an engine's layout are live at all points
    own = unit_bytes(unit, rows, recipe, shard_gradients=shard_gradients)
    at_loss = loss_bytes(parameters, unit, rows, recipe, shard=shard_gradients)
    at_weights = np.where(has_head, gathered + gradient, gathered) - held
    # both gradients of a shared table are live at once
    at_reduction = np.where(one, reduced + gradient, reduced) - held
    return _Moments(
        held=held,
        at_loss=np.where(listed, at_loss, gathered - held),
        at_weights=np.where(listed, np.maximum(own, at_loss + gradient), at_weights),
        reduced=np.where(listed, own, at_reduction),
    )


def _at_once(states: F64, model: VocabModel) -> F64:
    """Return the state bytes (16 per parameter) of the largest ZeRO unit of each position, (3, E).

    On a single stage, embedding and head are two units unless their weights are tied.
    """
    if model.spec.tied_embeddings:
        return states
    only, first, last = states
    # fmin and fmax ignore nan, that is, an end that was not measured
    return np.array((np.fmin(only, np.fmax(first, last)), first, last))


def _head(states: F64) -> F64:
    """Return the state bytes of the head, 16 per parameter, by position and strategy, (3, E).

    Positions are the only, the first and the last stage; the first stage has none.
    """
    only, _, last = states
    return np.array((np.fmin(only, last), np.zeros_like(last), last))


def _staying(activations: F64) -> F64:
    """Return the activation bytes per sample that are live in the layers' backward, (3, E).

    Activations of head and loss are freed by then. A single stage has those of a first stage, or
    all activations if a first stage was not measured.
    """
    only, first, last = activations
    # fmin ignores nan, that is, an unmeasured first stage
    return np.array((np.fmin(first, only), first, np.zeros_like(last)))


def _measured(model: VocabModel, vocab: Sequence[VocabStrategy]) -> tuple[F64, F64]:
    """Return (state bytes, activation bytes per sample) on a rank, (3, E); nan if not measured.

    States have 16 bytes per parameter. Ulysses ranks replicate the weights and have 1/t of the
    tokens, so entries of degree 1 are used. Context-parallel ranks replicate the weights and have
    1/c of the tokens.
    """
    states = np.full((len(POSITIONS), len(vocab)), np.nan)
    activations = np.full_like(states, np.nan)
    for i, position in enumerate(POSITIONS):
        memory = model.memory.get(position)
        if memory is None:
            continue
        for k, v in enumerate(vocab):
            # Ulysses replicates the weights, so its states are those of degree 1
            entry = 1 if v.ulysses else v.tp
            states[i, k] = memory.model_state_bytes.get(entry, np.nan)
            kept = memory.activation_bytes_per_sample.get(entry, np.nan)
            activations[i, k] = kept / ((v.tp if v.ulysses else 1) * v.cp)
    return states, activations


def _held(model: VocabModel, vocab: Sequence[VocabStrategy]) -> F64:
    """Return the bytes of persistent buffers (`OtherMemory.held_bytes`), (3, E); 0 if unknown."""
    held = np.zeros((len(POSITIONS), len(vocab)))
    for i, position in enumerate(POSITIONS):
        memory = model.memory.get(position)
        for k, v in enumerate(vocab if memory is not None else ()):
            assert memory is not None
            held[i, k] = memory.held_bytes.get(1 if v.ulysses else v.tp, 0.0)
    return held


def _time(
    at: _Positions,
    rows: Rows,
    parameters: F64,
    model: VocabModel,
    vocab: Sequence[VocabStrategy],
    pricing: Pricing,
) -> Asking[LayerTime]:
    """Return the times of all rows by category, seconds.

    The measured time of embedding, head and loss, over vtp*vcp, is charged to the last (or only)
    stage, except the embedding look-up, which is charged to the first. The backward is measured, or
    else twice the forward; that of the look-up is always twice its forward.

    parameters : (n,) number of parameters on a rank before ZeRO.
    """
    coefficient, rate = pricing.hardware.overlap_coefficient, pricing.hardware.memory_bytes_per_s
    total = model.fits.seconds("forward", rows.batch, rows.table)
    assert total is not None, "forwards are always measured"
    compute = total / rows.shards
    measured = model.fits.seconds("backward", rows.batch, rows.table)
    nothing = np.zeros_like(rows.batch)
    look_up = nothing
    if rate is not None:
        first_bytes = 3.0 * token_bytes(model.spec.layers[0], pricing.recipe)
        # context-parallel ranks look up different tokens
        look_up = rows.batch * first_bytes / (rate * rows.context)
    # part of the measured time that runs on the first stage
    shared = look_up / rows.tensor
    _, first, last = at.rows
    shared[at.rows[_ONLY]] = 0.0
    # The measured total contains the unsharded look-up. Unless vocabulary parallelism shards the
    # sequence, every rank of a vocabulary group looks up all tokens.
    compute[first] = np.where(rows.ulysses[first], shared[first], look_up[first])
    compute[last] = np.maximum(compute[last] - shared[last], 0.0)
    backward = BACKWARD_FACTOR * compute
    if measured is not None:
        # the measured backward includes the look-up's, which runs on the first stage; 0 on the only
        # one
        rest = np.maximum(measured / rows.shards - BACKWARD_FACTOR * shared, 0.0)
        backward = np.where(at.number == _FIRST, backward, rest)
    asked = _messages(at, rows, parameters, model, vocab, pricing)
    seconds = iter((yield [*asked.of_positions, *asked.tied]))
    tp_forward, tp_backward = nothing.copy(), nothing.copy()
    reduce, gather = nothing.copy(), nothing.copy()
    for number, part in enumerate(at.rows):
        if asked.exchanged:
            _exchanged_s(number, seconds, tp_forward[part], tp_backward[part], pricing)
        # the messages of `gradient_messages`
        scattered, gather[part], reduced = next(seconds), next(seconds), next(seconds)
        reduce[part] = scattered + reduced

    tied = nothing
    if asked.tied:
        ends = (at.number != _ONLY).nonzero()[0]
        by_stages = np.array(list(seconds))
        of_stages = np.searchsorted(asked.stages, rows.stages[ends])
        tied = nothing.copy()
        tied[ends] = by_stages[of_stages, rows.strategy[ends]]
    updated = optimizer_s(parameters, rows, pricing, model.optimizer)
    if pricing.hiding is not None:
        return _estimated_time(
            {"forward": compute, "tp": tp_forward},
            {"backward": backward, "tp": tp_backward},
            {"optimizer": updated, "tied": tied},
            (reduce, gather),
            rows,
            pricing,
            pricing.hiding,
        )
    # ZeRO-3 gathers in both passes
    gather3 = np.where(rows.zero3, gather, 0.0)
    with_gather, with_both, with_tail, with_gather3 = overlap_s(
        np.array((backward, backward, compute, compute)),
        np.array((gather3, gather3 + reduce, gather, gather3)),
        coefficient,
    )
    # time that the reduction adds to the gather
    unhidden = np.maximum(with_both - with_gather, 0.0)
    # ZeRO-2's gather follows the optimizer, so it overlaps only with the next forward
    tail = np.where(rows.whole_weights, with_tail - compute, 0.0)
    late = pricing.options.async_grad_reduce
    return LayerTime(
        forward={"forward": compute, "tp": tp_forward, "zero3": with_gather3 - compute},
        backward={
            "backward": backward,
            "tp": tp_backward,
            "zero3": with_gather - backward,
            "sync": nothing if late else unhidden,
        },
        step={
            "tail": tail + unhidden if late else tail,
            "optimizer": updated,
            "tied": tied,
        },
    )


def _estimated_time(
    forward: dict[str, F64],
    backward: dict[str, F64],
    step: dict[str, F64],
    sent: tuple[F64, F64],
    rows: Rows,
    pricing: Pricing,
    hiding: OverlapFactors,
) -> LayerTime:
    """Return the estimated times of all rows by category, seconds.

    With ZeRO-3, embedding and head are one unit that is gathered once per micro-batch. The overlap
    coefficient determines the exposed part of its communication. Other reductions are treated like
    those of layers.

    forward, backward, step : times by category before data-parallel communication.
    sent : seconds of (gradient reduction, all-gather of weights).
    """
    reduce, gather = sent
    late, nothing = pricing.options.async_grad_reduce, np.zeros_like(rows.batch)
    visible = min(1.0, pricing.hardware.overlap_coefficient - 1.0) / hiding.sharded_network
    gathered3, scattered3 = (np.where(rows.zero3, visible * y, 0.0) for y in (gather, reduce))
    microbatch = sum_of(forward) + sum_of(backward)
    summed = np.where(rows.zero3, 0.0, reduce)
    seen = scattered3 + exposed_reduction_s(summed, microbatch, hiding)
    gathered = np.where(rows.whole_weights, gather, 0.0)
    whole = scattered3 + exposed_reduction_s(summed + gathered, microbatch, hiding)
    times = LayerTime(
        forward={**forward, "zero3": gathered3},
        backward={**backward, "zero3": nothing, "sync": nothing if late else seen},
        step={"tail": whole if late else whole - seen, **step},
    )
    return with_stragglers(times, pricing)


class _Messages(Record, eq=False):
    """Messages of embedding and head."""

    of_positions: list[Message]
    """Messages of each position: vocabulary-parallel ones, then those of `gradient_messages`."""
    exchanged: bool
    """True if any row has vocabulary-parallel messages."""
    stages: Sequence[float]
    """Numbers of stages p, above 1, of the rows of a model with tied weights; else empty."""
    tied: list[Message]
    """All-reduce of tied weights for each of `stages`."""


def _messages(
    at: _Positions,
    rows: Rows,
    parameters: F64,
    model: VocabModel,
    vocab: Sequence[VocabStrategy],
    pricing: Pricing,
) -> _Messages:
    exchanged = _communication(at, rows, model, pricing)
    sync = gradient_messages(parameters, rows, pricing)
    stages = []
    # both ends of a pipeline wait for the sum of tied weights
    if model.spec.tied_embeddings:
        stages = sorted(set(rows.stages[at.number != _ONLY].tolist()))
    return _Messages(
        of_positions=[
            message
            for part, own in zip(at.rows, exchanged, strict=True)
            for message in (*own, *_cut(sync, part))
        ],
        exchanged=any(exchanged),
        stages=stages,
        tied=_tied(stages, model, vocab, pricing),
    )


def plan_messages(
    model: VocabModel, vocab: VocabStrategy, found: Rows, pricing: Pricing
) -> list[Message]:
    """Return the messages of embedding and head of one plan, in the order of `vocab_rows`.

    found : one row for a single stage, else two rows, for first and last stage.
    """
    number = np.array([_ONLY] if len(found.batch) == 1 else [_FIRST, _LAST], dtype=np.int64)
    at = _Positions(
        number=number,
        rows=[slice(*np.searchsorted(number, (i, i + 1))) for i in range(len(POSITIONS))],
    )
    parameters = _measured(model, [vocab])[0][number, 0] / _STATE_BYTES_DOCUMENTED
    asked = _messages(at, found, parameters, model, [vocab], pricing)
    return [*asked.of_positions, *asked.tied]


def _cut(messages: Sequence[Message], part: slice) -> list[Message]:
    return [
        Message(
            operation=m.operation,
            num_bytes=m.num_bytes[part],
            group=m.group[part],
            sequence=m.sequence,
        )
        for m in messages
    ]


def _communication(
    at: _Positions, rows: Rows, model: VocabModel, pricing: Pricing
) -> tuple[list[Message], ...]:
    """Return the vocabulary-parallel collectives of every position, in the order of `_exchanged_s`.

    - Embedding: with SP a reduce-scatter and (backward) an all-gather, else an all-reduce.
    - Head: with SP an all-gather and a reduce-scatter, else an all-reduce.
    - Cross-entropy: an all-reduce of 4*b*S/c bytes.

    Those of embedding and head have b*S*h*e/c bytes. Empty if no row has vocabulary parallelism.
    """
    # with Ulysses a rank has the whole table and different tokens
    if not rows.megatron.any():
        return ([],) * len(POSITIONS)
    group = np.where(rows.megatron, rows.tensor_group, 0)
    sequence_parallel = pricing.options.sequence_parallel

    def messages(number: int, part: slice) -> Iterator[Message]:
        # a context-parallel rank has 1/c of the tokens of the group's samples
        mine, batch = group[part], (rows.batch / rows.context)[part]

        def of(layer: LayerSpec, *operations: str) -> Iterator[Message]:
            size = batch * token_bytes(layer, pricing.recipe)
            for name in operations if sequence_parallel else ("allreduce",):
                yield Message(
                    operation=name, num_bytes=size, group=mine, sequence=sequence_parallel
                )

        if number != _LAST:
            yield from of(model.spec.layers[0], "reducescatter", "allgather")
        if number != _FIRST:
            last = model.spec.layers[-1]
            yield from of(last, "allgather", "reducescatter")
            # 4 bytes per token: the largest logit, the sum of exponentials, the target's logit
            per_token = 4.0 * batch * last.seq_length
            yield Message(operation="allreduce", num_bytes=per_token, group=mine)

    return tuple(list(messages(number, part)) for number, part in enumerate(at.rows))


def _exchanged_s(
    number: int, seconds: Iterator[F64], forward: F64, backward: F64, pricing: Pricing
) -> None:
    """Add the exposed times of one position's messages to `forward` and `backward` in place.

    number : index in POSITIONS.
    seconds : times of the messages of `_communication`.
    """
    sequence_parallel = pricing.options.sequence_parallel
    if number != _LAST:
        # a rank looks up only its rows and 0 for others, which gives partial sums
        forward += next(seconds)
        # without SP the backward is free: every rank has the whole gradient of the sum
        if sequence_parallel:
            backward += next(seconds)
    if number != _FIRST:
        if sequence_parallel:
            # the columns of a rank need all tokens, and again in the backward, since inputs are
            # scattered
            gather, scatter = next(seconds), next(seconds)
            forward += gather
            backward += gather + scatter
        else:
            # every rank has the whole input; its gradient is a partial sum over columns
            backward += next(seconds)
        # cross-entropy reduces three numbers per token
        forward += 3.0 * next(seconds)


def _tied(
    stages: Sequence[float], model: VocabModel, vocab: Sequence[VocabStrategy], pricing: Pricing
) -> list[Message]:
    """Return one all-reduce of tied gradients between first and last stage per number of stages."""
    if not stages:
        return []
    world, groups = pricing.hardware.world_size, pricing.groups
    gradients = np.array([tied_parameters(model, v) * pricing.recipe.gradient for v in vocab])
    messages = []
    for p in map(int, stages):
        # a rank of the first stage and its peer on the last are p - 1 stages of W/p ranks apart
        group = np.full(len(vocab), groups.index(2, world - world // p), dtype=np.int64)
        messages.append(Message(operation="allreduce", num_bytes=gradients, group=group))
    return messages

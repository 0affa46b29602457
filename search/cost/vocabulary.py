"""Embedding, head and loss: their time and memory by position in the pipeline.

Source: cost-model.md section 6 and "Memory of a rank". The embedding has the shape of the first
layer, the head that of the last. A single stage holds both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.arrays import F64, I64
from autopar.model import LayerSpec, ModelSpec, OtherMemory, padded_vocab_size
from autopar.plans import PipelineType, VocabStrategy, data_degree, vocab_problems
from search.cost.fits import OtherFits
from search.cost.memory import (
    communicator_bytes,
    gathered_bytes,
    state_bytes,
    to_bytes,
    zero_transient_bytes,
)
from search.cost.tables import POSITIONS, PricedRows, Pricing, Rows, build_rows
from search.cost.time import (
    BACKWARD_FACTOR,
    OptimizerCurve,
    gradient_sync_s,
    optimizer_s,
    overlap_s,
)
from search.space import Table

__all__ = ["VocabModel", "VocabRows", "tied_parameters", "vocab_rows"]


_STATE_BYTES_DOCUMENTED = 16.0
"""Bytes per parameter in the model states of the documented memory file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabModel:
    """What the vocabulary layers are: architecture, fitted time, memory by position."""

    spec: ModelSpec
    fits: OtherFits
    memory: Mapping[str, OtherMemory]
    logits_peak_bytes_per_sample: float
    """Extra bytes per sample while the loss runs, over the vocabulary degree."""
    optimizer: OptimizerCurve | None = None
    """The measured step of layers, which updates parameters of the embedding and head alike."""


@dataclass(frozen=True, kw_only=True, eq=False)
class VocabRows(PricedRows):
    """The vocabulary layers priced; axes (N tables, 3, E), of `valid` and `priced` (N, E).

    Categories: forward, tp, zero3; backward, tp, zero3, sync; tail, optimizer, tied (all-reduce of
    tied weights). What is not priced holds 0 seconds and bytes. `activations` are kept until the
    layers' backward is over.
    """

    unmeasured: tuple[int, ...]
    """Degrees that fit some table but have no entry in the memory tables."""
    largest_batch: float
    """Most samples that a priced vocabulary group processes together, 0 without any."""
    loss: I64
    """What head and loss have beside it, which is gone when the backward of a layer begins."""

    def memory(self, pipeline_type: PipelineType) -> tuple[I64, I64]:
        """Return kept (N, 3, E) and transient (2, N, 3, E) bytes.

        The loss is transient, as it is over before a layer's backward; only GPipe's last stage
        keeps it for every micro-batch.
        """
        kept, passing = self.activations, self.loss
        if pipeline_type == "gpipe":
            last = np.arange(len(POSITIONS))[:, None] == POSITIONS.index("last")
            kept, passing = kept + np.where(last, passing, 0), np.where(last, 0, passing)
        return kept, self.transient + passing


def tied_parameters(model: VocabModel, vocab: VocabStrategy) -> float:
    """Return the embedding parameters on a rank that a tied head shares with it.

    padded_vocab*h/vtp, the vocabulary padded to a multiple of
    `make_vocab_size_divisible_by`*vtp; with an unknown vocabulary, all of the first stage's.
    """
    spec = model.spec
    degree = 1 if vocab.ulysses else vocab.tp
    if spec.vocab_size is None:
        states = model.memory["first"].model_state_bytes.get(degree, 0.0)
        return states / _STATE_BYTES_DOCUMENTED
    # every vocabulary rank holds as many rows as the others
    return padded_vocab_size(spec, degree) * spec.layers[0].hidden_size / degree


def vocab_rows(
    model: VocabModel,
    vocab: Sequence[VocabStrategy],
    tables: Sequence[Table],
    pricing: Pricing,
    *,
    price_illegal: bool = False,
) -> VocabRows:
    """Return every (table, embedding strategy) priced at each position.

    Positions a table does not have (first and last for p == 1, only for p > 1) and rows that are
    not `priced` hold zeros.
    """
    options, spec = pricing.options, model.spec
    sp = options.sequence_parallel
    states, activations = _measured(model, vocab)
    has = ~np.isnan(states) & ~np.isnan(activations)
    # a pipeline needs the tables of both its ends, a single stage one of its own
    measured = (has[0], has[1] & has[2])
    world = pricing.hardware.world_size
    every = build_rows(
        [v.as_layer() for v in vocab],
        tables,
        pricing,
        legal=np.array(
            [not any(vocab_problems(spec, v, sequence_parallel=sp)) for v in vocab], dtype=np.bool_
        ),
        priceable=measured,
        price_illegal=price_illegal,
    )
    shape = (len(tables), len(POSITIONS), len(vocab))
    out = VocabRows(
        valid=every.scatter(every.valid),
        priced=every.scatter(np.ones_like(every.valid)),
        unmeasured=tuple(
            sorted(
                {
                    v.tp
                    for p in {p for p, _, _ in tables}
                    for k, v in enumerate(vocab)
                    if data_degree(world, p, v.tp) and not measured[p > 1][k]
                }
            )
        ),
        largest_batch=float(every.batch.max(initial=0.0)),
        forward={name: np.zeros(shape) for name in ("forward", "tp", "zero3")},
        backward={name: np.zeros(shape) for name in ("backward", "tp", "zero3", "sync")},
        step={name: np.zeros(shape) for name in ("tail", "optimizer", "tied")},
        states=np.zeros((2, *shape), dtype=np.int64),
        activations=np.zeros(shape, dtype=np.int64),
        loss=np.zeros(shape, dtype=np.int64),
        transient=np.zeros((2, *shape), dtype=np.int64),
        shared=np.zeros(shape, dtype=np.int64),
    )
    for number, position in enumerate(POSITIONS):
        # one stage has position `only`, several have `first` and `last`
        rows = every.take(np.flatnonzero((every.stages > 1.0) == (number > 0)))
        if not rows.table.size:
            continue
        which = rows.strategy
        at = (rows.table, np.full_like(rows.table, number), which)
        # the file counts states of 16 bytes a parameter, whatever recipe is planned
        parameters = states[number][which] / _STATE_BYTES_DOCUMENTED
        gathered = _at_once(position, states, model)[which] / _STATE_BYTES_DOCUMENTED
        _time(out, at, position, rows, parameters, model, pricing)
        # what SP with vtp > 1 gathers, in the shared buffer or on its own
        buffer = gathered_bytes(rows, spec.layers[0 if position == "first" else -1], pricing)
        # for m == 1, then m > 1: with one micro-batch gradients are sharded as they are reduced
        for now, shard in enumerate((True, not options.async_grad_reduce)):
            recipe = pricing.recipe
            peak = zero_transient_bytes(gathered, rows, recipe, shard_gradients=shard)
            # logits are where the loss is
            if position != "first":
                logits = model.logits_peak_bytes_per_sample
                # of the columns of the vocabulary, or with Ulysses of the tokens, a rank has 1/vtp
                peak = peak + rows.batch * logits / rows.tensor
            if not options.global_memory_buffer:
                peak = peak + buffer
            kept = state_bytes(parameters, rows, recipe, shard_gradients=shard)
            out.states[now][at], out.transient[now][at] = to_bytes(kept), to_bytes(peak)
        stays = rows.batch * _staying(position, activations)[which]
        out.activations[at] = to_bytes(stays)
        # what does not stay beside the layers belongs to the loss
        out.loss[at] = to_bytes(rows.batch * activations[number][which]) - out.activations[at]
        shared = communicator_bytes(rows, pricing)
        out.shared[at] = to_bytes(buffer + shared if options.global_memory_buffer else shared)
    if spec.tied_embeddings:
        _tie(out, model, vocab, tables, pricing)
    return out


def _at_once(position: str, states: F64, model: VocabModel) -> F64:
    """(E,) documented state bytes of what ZeRO gathers and reduces at one moment.

    On the only stage embedding and head are two units, at work at opposite ends of a micro-batch,
    unless they share their table.
    """
    only, first, last = states
    if position != "only" or model.spec.tied_embeddings:
        whole: F64 = states[POSITIONS.index(position)]
        return whole
    # fmin and fmax pass over nan: an end that was not measured says nothing
    larger: F64 = np.fmin(only, np.fmax(first, last))
    return larger


def _staying(position: str, activations: F64) -> F64:
    """(E,) bytes per sample of a position that are there while layers run backward.

    Head and loss are done by then. On the only stage what the first of several keeps stays, all
    where that was not measured.
    """
    only, first, last = activations
    if position == "last":
        return np.zeros_like(last)
    # fmin passes over nan: without a first stage's table all stays
    stays: F64 = first if position == "first" else np.fmin(first, only)
    return stays


def _measured(model: VocabModel, vocab: Sequence[VocabStrategy]) -> tuple[F64, F64]:
    """(3, E) documented state bytes, and activation bytes per sample; nan where not measured.

    Vocabulary Ulysses replicates the weights and shares the sequence: states[1], activation[1]/t.
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
            activations[i, k] = kept / v.tp if v.ulysses else kept
    return states, activations


def _time(
    out: VocabRows,
    at: tuple[I64, I64, I64],
    position: str,
    rows: Rows,
    parameters: F64,
    model: VocabModel,
    pricing: Pricing,
) -> None:
    """Fill the times of one position.

    `other`(b)/vtp belongs to the last (or only) stage, except the look-up on the first. Backward
    is 2x, or the measured one, of which the look-up takes 2x as well.
    """
    coefficient, rate = pricing.hardware.overlap_coefficient, pricing.hardware.memory_bytes_per_s
    total = model.fits.seconds("forward", rows.batch, rows.table)
    assert total is not None, "forwards are always measured"
    total = total / rows.tensor
    measured = model.fits.seconds("backward", rows.batch, rows.table)
    # the part of the last stage's measurement that runs on the first
    shared = np.zeros_like(total)
    if position == "only":
        compute = total
    else:
        first = model.spec.layers[0]
        look_up = np.zeros_like(total)
        if rate is not None:
            token_bytes = 3.0 * first.seq_length * first.hidden_size * pricing.recipe.element
            look_up = rows.batch * token_bytes / rate
        shared = look_up / rows.tensor
        # The measured total contains the unsharded look-up; without vocabulary parallelism of
        # the sequence every rank of a vocabulary group looks up all tokens.
        compute = (
            np.where(rows.ulysses, shared, look_up)
            if position == "first"
            else np.maximum(total - shared, 0.0)
        )
    backward = BACKWARD_FACTOR * compute
    if measured is not None and position != "first":
        # measured with the look-up's backward, which runs on the first stage; 0 on the only one
        backward = np.maximum(measured / rows.tensor - BACKWARD_FACTOR * shared, 0.0)
    tp_forward, tp_backward = _communication(position, rows, model, pricing)

    reduce, gather = gradient_sync_s(parameters, rows, pricing)
    # ZeRO-3 gathers in both passes
    gather3 = np.where(rows.zero3, gather, 0.0)
    with_gather = overlap_s(backward, gather3, coefficient)
    # what the reduction takes beside the gather
    sync = np.maximum(overlap_s(backward, gather3 + reduce, coefficient) - with_gather, 0.0)
    # behind the optimizer ZeRO-2's gather hides only under the next forward
    tail = np.where(rows.zero2, overlap_s(compute, gather, coefficient) - compute, 0.0)
    if pricing.options.async_grad_reduce:
        tail = tail + sync
    else:
        out.backward["sync"][at] = sync
    out.forward["forward"][at] = compute
    out.forward["tp"][at] = tp_forward
    out.forward["zero3"][at] = overlap_s(compute, gather3, coefficient) - compute
    out.backward["backward"][at] = backward
    out.backward["tp"][at] = tp_backward
    out.backward["zero3"][at] = with_gather - backward
    out.step["tail"][at] = tail
    out.step["optimizer"][at] = optimizer_s(parameters, rows, pricing, model.optimizer)


def _communication(
    position: str, every: Rows, model: VocabModel, pricing: Pricing
) -> tuple[F64, F64]:
    """Vocabulary-parallel messages of one position, forward and backward, all exposed.

    Embedding: forward RS (SP) or AR of b*S*h*e, backward the transposed AG (SP) or nothing.
    Head: forward AG (SP) or nothing, backward RS + re-gather AG (SP) or AR. Cross-entropy: 3 AR
    of 4*b*S bytes forward.
    """
    groups, sequence_parallel = pricing.groups, pricing.options.sequence_parallel
    forward, backward = np.zeros_like(every.batch), np.zeros_like(every.batch)
    # with Ulysses a rank has the whole table, and tokens of its own
    rows = np.flatnonzero(~every.ulysses & (every.tensor > 1.0))
    if not rows.size:
        return forward, backward
    batch, group = every.batch[rows], every.tensor_group[rows]

    def message(layer: LayerSpec) -> F64:
        return batch * (float(layer.seq_length) * layer.hidden_size * pricing.recipe.element)

    if position != "last":
        size = message(model.spec.layers[0])
        # a rank looks up its own words, others are 0 there: partial sums
        if sequence_parallel:
            forward[rows] += groups.seconds("reducescatter", size, group, sequence=True)
            backward[rows] += groups.seconds("allgather", size, group, sequence=True)
        else:
            # backward is free: every rank has the whole gradient of the sum
            forward[rows] += groups.seconds("allreduce", size, group)
    if position != "first":
        last = model.spec.layers[-1]
        size = message(last)
        if sequence_parallel:
            # columns of a rank need all tokens, again in the backward since they are kept scattered
            gather = groups.seconds("allgather", size, group, sequence=True)
            scatter = groups.seconds("reducescatter", size, group, sequence=True)
            forward[rows] += gather
            backward[rows] += gather + scatter
        else:
            # every rank has the whole input; its gradient is a partial sum over columns
            backward[rows] += groups.seconds("allreduce", size, group)
        # 4 bytes a token: the largest logit, the sum of exponentials, the logit of the target
        per_token = 4.0 * batch * last.seq_length
        forward[rows] += 3.0 * groups.seconds("allreduce", per_token, group)
    return forward, backward


def _tie(
    out: VocabRows,
    model: VocabModel,
    vocab: Sequence[VocabStrategy],
    tables: Sequence[Table],
    pricing: Pricing,
) -> None:
    """Add the exposed all-reduce of tied weights between first and last stage, to both."""
    world, groups = pricing.hardware.world_size, pricing.groups
    stages = np.array([p for p, _, _ in tables], dtype=np.int64)
    for p in sorted(set(stages.tolist()) - {1}):
        if world % p:
            continue
        # a rank of the first stage and its peer on the last are p - 1 stages of W/p ranks apart
        group = np.array([groups.index(2, world - world // p)], dtype=np.int64)
        mine = np.flatnonzero(stages == p)
        for k, v in enumerate(vocab):
            gradients = np.array([tied_parameters(model, v) * pricing.recipe.gradient])
            time_s = float(groups.seconds("allreduce", gradients, group)[0])
            # both ends wait for the sum
            for number in (1, 2):
                out.step["tied"][mine, number, k] = np.where(out.priced[mine, k], time_s, 0.0)

"""Device mesh, samples and model states of every rank of a plan, computed without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
from msgspec.structs import asdict

from autopar.documents.sidecar import TensorKind
from autopar.errors import InputError
from autopar.pipeline.formulas import in_flight
from autopar.records import Record
from autopar.run.model import ModelSpec
from autopar.run.plan import LayerStrategy, PipelineType, Plan, violations
from profiler.model.layers.sharding import not_divided
from profiler.plan.job import PlanJob
from profiler.plan.weights import (
    Tensors,
    expert_shapes,
    final_norm,
    first_shapes,
    held,
    last_shapes,
    layer_shapes,
)

# --------------------------------------------------------------------------------------------------
# Rank groups of each layer, on one mesh for the complete plan.
#
# The ranks of every stage form a mesh whose axis sizes are the prime factors of their number (a
# binary hypercube for powers of two). A layer's tensor-parallel group consists of the last axes
# (consecutive ranks) or of the first axes (strided ranks). The remaining axes are its data-parallel
# group. Layers can therefore have different degrees on one mesh.


Axes = tuple[int, ...]
SCHEDULES: tuple[PipelineType, ...] = ("1f1b", "gpipe", "interleaved", "looped_bfs")
"""Pipeline schedules that the executor supports."""


class Cube(Record):
    """Mesh of the ranks of one stage; consecutive ranks differ along the last axis."""

    factors: tuple[int, ...]
    """Sizes of the axes, prime numbers; (1,) for a stage with one rank."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of a stage."""
        return math.prod(self.factors)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Return the mesh coordinates of a rank, given by its index in the stage."""
        # row-major order: the last axis varies fastest
        return tuple(map(int, np.unravel_index(rank, self.factors)))

    def size(self, axes: Axes) -> int:
        """Return the number of ranks along these axes."""
        return math.prod(self.factors[axis] for axis in axes)

    def index(self, rank: int, axes: Axes) -> int:
        """Return the index of a rank in its group along `axes`; `rank` is its index in the
        stage."""
        places = self.coordinates(rank)
        index = 0
        for axis in axes:
            index = index * self.factors[axis] + places[axis]
        return index

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """Return all rank groups of a stage along `axes`, as indices in the stage in mesh order."""
        rest = [axis for axis in range(len(self.factors)) if axis not in axes]
        mesh = np.arange(self.num_ranks).reshape(self.factors).transpose(*rest, *axes)
        return tuple(map(tuple, mesh.reshape(-1, self.size(axes)).tolist()))


class Layout(Record, dict=True):
    """Parallel layout of one layer, or of embedding and head, on the mesh of its stage."""

    cube: Cube
    kind: TensorKind
    tensor_axes: Axes
    zero: str
    """Data parallelism: ddp, zero1, zero2 or zero3."""
    context_axes: Axes = ()
    """Axes of context parallelism, which shard the sequence in the complete layer."""
    expert_axes: Axes | None = None
    """Axes of expert parallelism; None without experts, or if tensor parallelism shards every
    expert."""

    @property
    def degree(self) -> int:
        """Tensor-parallel or Ulysses degree."""
        return self.cube.size(self.tensor_axes)

    @cached_property
    def data_axes(self) -> Axes:
        """Axes of data parallelism, which divide the samples."""
        return self._others({*self.tensor_axes, *self.context_axes})

    @property
    def context_degree(self) -> int:
        """Context-parallel degree: number of ranks over which the sequence is sharded."""
        return self.cube.size(self.context_axes)

    @property
    def expert_degree(self) -> int:
        """Expert-parallel degree: number of ranks over which the experts are distributed."""
        return self.cube.size(self.expert_axes or ())

    @property
    def expert_sync_axes(self) -> Axes:
        """Axes over which gradients of expert-parallel weights are summed."""
        return self._others(set(self.expert_axes or ()))

    def _others(self, axes: set[int]) -> Axes:
        return tuple(axis for axis in range(len(self.cube.factors)) if axis not in axes)

    @property
    def data_degree(self) -> int:
        """Data-parallel degree: number of ranks over which samples are divided."""
        return self.cube.size(self.data_axes)

    @property
    def splits_weights(self) -> bool:
        """True if weights are sharded over the tensor axes."""
        return self.kind != "ulysses" and self.degree > 1

    @property
    def splits_sequence(self) -> bool:
        """True if the residual stream is sharded along the sequence."""
        return self.kind != "tp" and self.degree > 1

    @property
    def sync_axes(self) -> Axes:
        """Axes over which gradients are summed and ZeRO shards, without expert-parallel ones."""
        # Ulysses and context-parallel ranks have unsharded weights: their gradients are summed too
        return self._others(set(self.tensor_axes) if self.splits_weights else set())

    @property
    def sync_degree(self) -> int:
        """Number of ranks over which gradients are summed."""
        return self.cube.size(self.sync_axes)

    @property
    def is_sharded(self) -> bool:
        """True if ZeRO shards weights or gradients; False for ZeRO-1 (optimizer states only)."""
        return self.zero in ("zero2", "zero3") and self.sync_degree > 1


def cube_of(plan: Plan) -> Cube:
    """Return a mesh of the stage whose axes form the groups of every layer.

    Raises InputError: the stages do not divide the ranks, or no mesh contains the groups of all
    degrees, such as consecutive groups of 2 and of 3 among 6 ranks.
    """
    ranks, rest = divmod(plan.world_size, plan.num_stages)
    if rest:
        raise InputError(
            f"world_size({plan.world_size}) % pp({plan.num_stages}) = {rest} != 0",
            remedy="Use a number of stages that divides the ranks",
        )
    # A strided group of t ranks uses the first axes, so the last axes contain ranks / t ranks.
    names: dict[int, str] = {}
    for layer, strategy in enumerate(plan.layers):
        t, c, e = strategy.tp, strategy.cp, strategy.ep
        if t > 1:
            size = ranks // t if strategy.strided else t
            word = "strided" if strategy.strided else "consecutive"
            names.setdefault(size, f"the {word} groups of {t} of layer {layer}")
        if c > 1:
            # context ranks are neighbours among the ranks outside the tensor-parallel group
            size = c if strategy.strided else t * c
            names.setdefault(size, f"the context groups of {c} of layer {layer}")
        if e > 1:
            names.setdefault(e, f"the expert groups of {e} of layer {layer}")
    t, c = plan.vocab.tp, plan.vocab.cp
    if t > 1:
        names.setdefault(t, f"the groups of {t} of embedding and head")
    if c > 1:
        names.setdefault(t * c, f"the context groups of {c} of embedding and head")
    names.setdefault(ranks, f"the {ranks} ranks of a stage")
    factors: list[int] = []
    before = 1
    for size in sorted(names):
        if size % before:
            raise InputError(
                f"{names[before]} and {names[size]} do not fit on one mesh of {ranks} ranks "
                f"({before} does not divide {size})",
                remedy="Use degrees that divide each other",
            )
        # from the last axis to the first: new axes extend the previous size to the next
        factors = [*reversed(_primes(size // before)), *factors]
        before = size
    return Cube(factors=tuple(factors) or (1,))


def layer_layout(job: PlanJob, cube: Cube, layer: int) -> Layout:
    """Return the layout of one layer on the mesh `cube`."""
    strategy = job.plan.layers[layer]
    return _layout(job, cube, strategy, whole_experts=has_whole_experts(job, layer))


def vocab_layout(job: PlanJob, cube: Cube) -> Layout:
    """Return the layout of embedding, head and loss on the mesh `cube`."""
    return _layout(job, cube, job.plan.vocab.as_layer())


def layouts(job: PlanJob, cube: Cube) -> list[Layout]:
    """Return the layout of every layer, then that of embedding and head."""
    layers = (layer_layout(job, cube, layer) for layer in range(len(job.plan.layers)))
    return [*layers, vocab_layout(job, cube)]


# --- streams of activations: an encoder-decoder has two -------------------------------------


def stream_lengths(spec: ModelSpec) -> tuple[int, ...]:
    """Return the sequence length of every stream of activations between pipeline stages.

    A decoder-only model has one stream. An encoder-decoder has two: the decoder's, then the
    encoder's. Both are embedded on the first stage. Encoder layers pass the decoder's stream on
    unchanged. The encoder's output is sent to the last stage, since every decoder layer reads it.
    """
    last = spec.layers[-1]
    return (last.seq_length, spec.layers[0].seq_length)[: 1 + last.cross_attention]


def layer_streams(spec: ModelSpec, layer: int) -> tuple[int, ...]:
    """Return the indices of a layer's input streams; its output replaces the first of them."""
    if not spec.layers[-1].cross_attention:
        return (0,)
    return (1,) if layer < num_encoder_layers(spec) else (0, 1)


def num_encoder_layers(spec: ModelSpec) -> int:
    """Return the number of encoder layers of an encoder-decoder; 0 for other models."""
    if not spec.layers[-1].cross_attention:
        return 0
    return sum(layer.num_layers for layer in spec.layers if not layer.cross_attention)


def entry_layouts(job: PlanJob, cube: Cube, layer: int) -> tuple[Layout, ...]:
    """Return the layout of every stream at the input of a layer, before any exchange."""
    found = [vocab_layout(job, cube)] * len(stream_lengths(job.spec))
    for k in range(layer):
        for stream in layer_streams(job.spec, k):
            found[stream] = layer_layout(job, cube, k)
    return tuple(found)


def _layout(
    job: PlanJob, cube: Cube, strategy: LayerStrategy, *, whole_experts: bool = False
) -> Layout:
    kind: TensorKind = "ulysses" if strategy.ulysses else "sp" if job.sequence_parallel else "tp"
    tensor = _axes(cube, strategy.tp, strided=strategy.strided)
    # consecutive ranks, independent of the other groups, as in Megatron-Core with expert tensor
    # degree 1: its rank grid for experts has no tensor- or context-parallel axis
    experts = _axes(cube, strategy.ep) if whole_experts else None
    return Layout(
        cube=cube,
        kind=kind,
        tensor_axes=tensor,
        zero=_zero(job.plan, strategy),
        context_axes=_axes(cube, strategy.cp, taken=tensor),
        expert_axes=experts,
    )


def has_whole_experts(job: PlanJob, layer: int) -> bool:
    """Return True if a layer's experts are distributed over a separate rank grid.

    False without experts, or if the layer's tensor-parallel group shards every expert.
    """
    strategy = job.plan.layers[layer]
    if strategy.ep == 1 and strategy.expert_tp == _split(strategy):
        return False
    return job.spec.layers[job.spec.layer_types[layer]].num_experts is not None


def _zero(plan: Plan, strategy: LayerStrategy) -> str:
    return "zero3" if strategy.zero3 else plan.default_dp_type


def check_job(job: PlanJob) -> Cube:
    """Return the mesh of a plan after checking that it is legal and that the executor supports it.


    Raises InputError: the plan is illegal, or contains something that the executor does not
    support.
    """
    plan = job.plan
    problems = violations(plan, job.spec, sequence_parallel=job.sequence_parallel)
    if problems:
        raise InputError(f"the plan cannot run: {'; '.join(problems)}")
    if plan.pipeline_type not in SCHEDULES:
        raise InputError(
            f"the plan has schedule {plan.pipeline_type}, and the executor runs "
            f"{', '.join(SCHEDULES)}",
            remedy="Use a plan with one of them",
        )
    for layer, strategy in enumerate(plan.layers):
        _check_layer(job, layer, strategy)
    _check_streams(job)
    return cube_of(plan)


def _check_layer(job: PlanJob, layer: int, strategy: LayerStrategy) -> None:
    """Raise InputError if the executor does not support the legal strategy of a layer."""
    kind = job.spec.layers[job.spec.layer_types[layer]]
    alone = not_divided(kind) if strategy.cp > 1 else None
    if alone is not None:
        raise InputError(
            f"layer {layer} has {alone} and context degree {strategy.cp}, which "
            "the executor does not support",
            remedy="Use context degree 1",
        )
    if not has_whole_experts(job, layer):
        return
    if strategy.expert_tp > 1:
        raise InputError(
            f"layer {layer} has expert tensor degree {strategy.expert_tp} with "
            f"expert degree {strategy.ep} and tensor degree {strategy.tp}, which "
            "the executor does not support",
            remedy=(
                "Use expert tensor degree 1, or that of the tensor group without expert degree"
            ),
        )
    # as in Megatron-Core: otherwise all tensor ranks would dispatch the same tokens
    if strategy.tp > 1 and not (strategy.ulysses or job.sequence_parallel):
        raise InputError(
            f"layer {layer} has whole experts on ranks of a tensor group, which "
            "needs sequence parallelism",
            remedy="Remove --no-sequence-parallel",
        )


def _check_streams(job: PlanJob) -> None:
    """Raise InputError for an unsupported encoder-decoder; other models always pass."""
    spec, plan = job.spec, job.plan
    crosses = [layer.cross_attention for layer in spec.layers]
    if not any(crosses):
        return
    if crosses != sorted(crosses) or all(crosses):
        raise InputError(
            f"model {spec.name!r}: layers with cross-attention need an encoder before them",
            remedy="Put layer types without it first, and all those with it after them",
        )
    widths = [layer.hidden_size for layer in spec.layers]
    if len(set(widths)) > 1:
        raise InputError(
            f"model {spec.name!r}: encoder and decoder have hidden sizes "
            f"{', '.join(map(str, widths))}, expected one",
            remedy="Use one hidden_size",
        )
    length = stream_lengths(spec)[1]
    for layer, strategy in enumerate(plan.layers):
        reads = layer_streams(spec, layer) == (0, 1)
        if reads and (strategy.ulysses or job.sequence_parallel) and length % strategy.tp:
            raise InputError(
                f"layer {layer} reads the encoder's output in pieces, but its "
                f"tensor degree {strategy.tp} does not divide the encoder's "
                f"{length} tokens",
                remedy="Use a --seq that it divides, or another degree",
            )


def _primes(number: int) -> list[int]:
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(factor)
            number //= factor
        factor += 1
    return found


def _axes(cube: Cube, degree: int, *, strided: bool = False, taken: Axes = ()) -> Axes:
    """Return the mesh axes of a group: the last axes, or with `strided` the first.

    degree : number of ranks.
    taken : axes of another group, which are excluded.
    """
    axes: list[int] = []
    order = [axis for axis in range(len(cube.factors)) if axis not in taken]
    for axis in order if strided else reversed(order):
        if cube.size(tuple(axes)) >= degree:
            break
        axes.append(axis)
    assert cube.size(tuple(axes)) == degree, (cube, degree)
    return tuple(sorted(axes))


# --------------------------------------------------------------------------------------------------
# Examination of a plan: model states per stage, and whether the executor can run it.


class Weights(NamedTuple):
    """Parameters of one layer, or of embedding and head, on one rank without ZeRO sharding."""

    shapes: tuple[Tensors, ...]
    zero: str
    """Data parallelism: ddp, zero1, zero2 or zero3."""
    num_ranks: int
    """Number of ranks with equal weights; gradients are summed, and ZeRO shards, over them."""


class Held(Record):
    """Model states of a stage, or of a part of it, on its first rank, which has the most."""

    num_parameters: int = 0
    """Number of parameters in the rank's shards, before any gathering."""
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    """Bytes of gradients when the optimizer steps."""
    optimizer_bytes: int = 0
    """Bytes of AdamW's two moments, and of fp32 copies of bf16 or fp16 weights."""
    gathered_bytes: int = 0
    """Bytes of weights that ZeRO-2 keeps gathered during a step."""
    accumulated_bytes: int = 0
    """Bytes of unsharded gradients that ZeRO-2 and ZeRO-3 accumulate if gradients are reduced once
    per step."""

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters, gradients and optimizer states."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def __add__(self, other: Held) -> Held:
        """Return the sum of each field."""
        return Held(**{key: value + getattr(other, key) for key, value in asdict(self).items()})


class RunArithmetic(Record):
    """Consecutive layers of a stage with equal strategy and type."""

    first_layer: int
    last_layer: int
    strategy: LayerStrategy
    label: str
    data_degree: int
    samples: int
    """Samples per micro-batch on a rank."""
    tensor_axes: tuple[int, ...]
    """Mesh axes of the tensor-parallel group."""
    held: Held


class StageArithmetic(Record):
    """Ranks, layers, live micro-batches and model states of one stage."""

    stage: int
    ranks: tuple[int, int]
    """First and last rank."""
    layers: tuple[int, int]
    in_flight: int
    """Largest number of micro-batches with saved activations."""
    runs: tuple[RunArithmetic, ...]
    held: Held
    """Model states of layers, embedding and head."""
    vocab: Held
    """Model states of embedding and head, which `held` includes."""


class StaticReport(Record):
    """Static properties of a legal plan: stages, mesh, embedding and head, pipeline bubble."""

    stages: tuple[StageArithmetic, ...]
    mesh: tuple[int, ...] | None
    """Sizes of the mesh axes of every stage; None if the executor cannot run the plan."""
    obstacle: str | None
    """Reason why the executor cannot run this legal plan; None if it can."""
    vocab_label: str
    vocab_samples: int
    bubble_share: float
    """Pipeline bubble as a fraction of a step, (p-1) / (v m + p-1), for equal stages and no
    transfer time."""

    @property
    def largest(self) -> int:
        """Index of the stage with the most model states per rank; the first among equals."""
        return max(self.stages, key=lambda s: (s.held.state_bytes, -s.stage)).stage


def examine(job: PlanJob) -> StaticReport:
    """Return stages, model states and pipeline bubble of a legal plan.


    Raises InputError if the model has no heads, MLP width or vocabulary size.
    """
    plan, vocab = job.plan, job.plan.vocab
    obstacle, mesh = None, None
    try:
        cube = check_job(job)
    except InputError as error:
        obstacle = str(error)
        axes: Sequence[Axes] = [()] * len(plan.layers)
    else:
        mesh = cube.factors
        axes = [layer_layout(job, cube, k).tensor_axes for k in range(len(plan.layers))]
    ranks = plan.world_size // plan.num_stages
    stages = []
    places = plan.stage_of_layer()
    for stage in range(plan.num_stages):
        members = [layer for layer, place in enumerate(places) if place == stage]
        runs = _runs(job, members, axes)
        around = _held(job, _vocab_weights(job, stage))
        stages.append(
            StageArithmetic(
                stage=stage,
                ranks=(stage * ranks, (stage + 1) * ranks - 1),
                layers=(members[0], members[-1]),
                in_flight=micro_batches_in_flight(plan, stage),
                runs=runs,
                held=sum((run.held for run in runs), around),
                vocab=around,
            )
        )
    p, m, v = plan.num_stages, plan.num_microbatches, plan.num_chunks
    degree = ranks // (vocab.tp * vocab.cp)
    label = vocab.as_layer().label(degree, plan.default_dp_type)
    return StaticReport(
        stages=tuple(stages),
        mesh=mesh,
        obstacle=obstacle,
        vocab_label=label.replace("tp", "vtp", 1),
        vocab_samples=plan.global_batch // (m * degree),
        # a stage is busy for m of m + (p - 1) / v slots: chunks shorten the bubble v times
        bubble_share=(p - 1) / (v * m + p - 1),
    )


def micro_batches_in_flight(plan: Plan, stage: int) -> int:
    """Return the largest number of micro-batches with saved activations on a stage.

    This is 1 without a pipeline, for every schedule: each backward directly follows its forward, as
    in Megatron-LM and Galvatron.
    """
    found = in_flight(plan.pipeline_type, plan.num_stages, plan.num_chunks, plan.num_microbatches)
    # a chunk is a fraction of a micro-batch: round up to whole ones
    return math.ceil(found[stage])


def stage_weights(job: PlanJob, stage: int) -> tuple[Weights, ...]:
    """Return the weights on a rank of a stage: those of layers, then of embedding and head."""
    places = job.plan.stage_of_layer()
    layers = (w for k, at in enumerate(places) if at == stage for w in _layer_weights(job, k))
    return (*layers, _vocab_weights(job, stage))


def _runs(
    job: PlanJob, layers: Sequence[int], axes: Sequence[tuple[int, ...]]
) -> tuple[RunArithmetic, ...]:
    plan, types = job.plan, job.spec.layer_types
    runs = []
    # layers of one chunk are consecutive: layer number minus position is constant in a chunk
    keys = {k: (plan.layers[k], types[k], k - place) for place, k in enumerate(layers)}
    for (strategy, _, _), group in groupby(layers, lambda k: keys[k]):
        members = list(group)
        degree = plan.data_degree(members[0])
        # a norm may follow the last layer of the run
        one, last = (
            sum((_held(job, weights) for weights in _layer_weights(job, k)), Held())
            for k in (members[0], members[-1])
        )
        runs.append(
            RunArithmetic(
                first_layer=members[0],
                last_layer=members[-1],
                strategy=strategy,
                label=strategy.label(degree, plan.default_dp_type),
                data_degree=degree,
                samples=plan.global_batch // (plan.num_microbatches * degree),
                tensor_axes=axes[members[0]],
                held=sum((one for _ in members[1:]), last),
            )
        )
    return tuple(runs)


def _layer_weights(job: PlanJob, layer: int) -> tuple[Weights, ...]:
    """Return the weights of a layer on a rank; distributed experts are a separate entry."""
    plan, strategy = job.plan, job.plan.layers[layer]
    kind = job.spec.layers[job.spec.layer_types[layer]]
    apart = has_whole_experts(job, layer)
    shapes = layer_shapes(kind, _split(strategy), whole_experts=apart)
    if layer + 1 == num_encoder_layers(job.spec):
        shapes = (*shapes, final_norm(kind))
    found = _weights(plan, strategy, shapes)
    if not apart:
        return (found,)
    width = (kind.ffn_hidden_size or 0) // strategy.expert_tp
    experts = expert_shapes(kind, strategy.ep, width=width)
    same = plan.world_size // (plan.num_stages * strategy.ep * strategy.expert_tp)
    return (found, Weights(experts, _zero(plan, strategy), same))


def _vocab_weights(job: PlanJob, stage: int) -> Weights:
    """Return the weights of embedding and head on a rank of a stage; may be empty."""
    spec, strategy = job.spec, job.plan.vocab.as_layer()
    at_start, at_end = stage == 0, stage == job.plan.num_stages - 1
    # on the only stage a tied table is one tensor
    shared = spec.tied_embeddings and at_start and at_end
    degree = _split(strategy)
    shapes: tuple[Tensors, ...] = first_shapes(spec, degree) if at_start else ()
    if at_end:
        shapes = (*shapes, *last_shapes(spec, degree, own_table=not shared))
    return _weights(job.plan, strategy, shapes)


def _split(strategy: LayerStrategy) -> int:
    """Return the number of shards of weights: the tensor-parallel degree, or 1 for Ulysses."""
    return 1 if strategy.ulysses else strategy.tp


def _weights(plan: Plan, strategy: LayerStrategy, shapes: tuple[Tensors, ...]) -> Weights:
    # gradients are summed over the ranks with the same weights
    same = plan.world_size // plan.num_stages // _split(strategy)
    return Weights(shapes, _zero(plan, strategy), same)


def _held(job: PlanJob, weights: Weights) -> Held:
    """Return the model states of the executor for these weights, in bytes of one rank.

    Bytes per parameter for weight + gradient + optimizer:

        fp32                          4 + 4 + 8
        bf16, fp16: ddp, ZeRO-1       2 + 4 + 12, where ZeRO-1 shards the optimizer states
        bf16, fp16: ZeRO-2, ZeRO-3    4 + 4 + 8, sharded; gathered weights have 2 bytes

    Without `fp32_gradients`, bf16 or fp16 gradients that are not sharded have 2 bytes.
    """
    shapes, zero, z = weights
    whole, wide = held(shapes), job.precision != "fp32"
    gradient = 2 if wide and not job.fp32_gradients else 4
    if zero in ("ddp", "zero1") or z == 1:
        # two moments of 4 bytes, and a 4-byte fp32 copy of bf16 or fp16 weights
        weight, optimizer = (2, 12) if wide else (4, 8)
        return Held(
            num_parameters=whole,
            parameter_bytes=weight * whole,
            gradient_bytes=gradient * whole,
            # equal parts of one buffer
            optimizer_bytes=optimizer * (-(-whole // z) if zero == "zero1" else whole),
        )
    own = held(shapes, z)
    accumulates = job.async_grad_reduce and job.plan.num_microbatches > 1
    return Held(
        num_parameters=own,
        # shards are fp32 in every precision, and the optimizer steps them directly
        parameter_bytes=4 * own,
        gradient_bytes=4 * own,
        optimizer_bytes=8 * own,
        # ZeRO-3 frees gathered weights after every use
        gathered_bytes=(2 if wide else 4) * whole if zero == "zero2" else 0,
        accumulated_bytes=gradient * whole if accumulates else 0,
    )

"""Nearest plan with equal layers, for engines with one set of degrees for the whole model.

Unsupported features are the differences between a plan and the nearest one, so a plan that the
engine runs unchanged has none. Values without effect, such as strided groups of one rank or ZeRO
over one rank, are not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Literal

from msgspec import field

from autopar.errors import InputError, UnsupportedError
from autopar.records import Record, replace
from autopar.run.model import ModelSpec
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, data_degree, violations
from search.engines.exporter_types import UnsupportedFeature
from search.engines.plans import ExportJob
from search.engines.words import per_value

DataMode = Literal["ddp", "zero1", "zero2", "zero3"]


class EngineCapabilities(Record):
    """Capabilities of an engine with one set of degrees for all layers.

    A *shape* is a `LayerStrategy` with only tp, Ulysses and cp set, which all layers share.
    """

    title: str
    """Name of the engine in sentences."""
    ulysses: bool = False
    context: bool = False
    layer_checkpoints: bool = False
    data_mode: Callable[[DataMode, LayerStrategy, int], DataMode] = lambda mode, shape, data: mode
    """Function (mode of the plan, shape, data degree) -> nearest data-parallel mode."""
    problems: Callable[[LayerStrategy, ModelSpec], tuple[str, ...]] = lambda shape, spec: ()
    """Function (shape, model) -> one message per violated rule of the engine, in addition to those
    of `autopar.run.plan`."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Reason by key of the strategy file why the engine changes its value; overrides `_REASONS`."""


_REASONS = {
    "tp_sizes_enc": "has one tensor degree for all layers",
    "use_sp": "has no Ulysses",
    "cp_sizes_enc": "has no context parallelism",
    "tp_consecutive_flags": "places tensor groups on neighbouring ranks",
    "dp_types_enc": "shards all layers alike",
    "checkpoint": "recomputes all layers or none",
    "default_dp_type": "shards all layers alike",
    "vtp": "shards embedding and head by the degree of the layers",
    "vsp": "shards embedding and head as the layers",
    "vcp": "shards embedding and head as the layers",
    "embed_sdp": "shards embedding and head as the layers",
}


def kv_heads_problems(shape: LayerStrategy, spec: ModelSpec) -> tuple[str, ...]:
    """Return one message for each number of key-value heads that tp does not divide."""
    if shape.ulysses:
        # Ulysses replicates key-value heads if there are fewer heads than ranks.
        return ()
    return tuple(
        f"kv_heads({heads}) % tp({shape.tp}) = {heads % shape.tp} != 0"
        # An unknown number of heads is assumed to be divisible.
        for heads in sorted({layer.num_kv_heads or shape.tp for layer in spec.layers})
        if heads % shape.tp
    )


def nearest(
    job: ExportJob, reach: EngineCapabilities
) -> tuple[Plan, tuple[UnsupportedFeature, ...]]:
    """Return (nearest plan that the engine can express, unsupported features of the job's plan).

    A plan with several tensor degrees gets `ExportJob.tensor_degree`, else the largest legal one.
    If any layer has ZeRO-3 or recomputation, all layers get it, so that memory does not grow.

    Raises InputError if no degree is legal.
    """
    refused = ""
    for shape in _shapes(job, reach):
        plan = _plan_of(job, reach, shape)
        problems = reach.problems(shape, job.spec) or violations(
            plan, job.spec, sequence_parallel=job.sequence_parallel
        )
        if not problems:
            return plan, losses_between(job.plan, plan, reach.title, reach.reasons, refused)
        # Report the problem of the first shape, which is the nearest.
        refused = refused or problems[0]
    wanted = f" of tp {job.tensor_degree}" if job.tensor_degree else ""
    raise InputError(
        f"{reach.title} supports neither this plan nor a similar one{wanted}: {refused}",
        remedy="Search again with --fine-grained-mode 0, one strategy for all layers",
    )


def _shapes(job: ExportJob, reach: EngineCapabilities) -> Iterator[LayerStrategy]:
    """Yield the shapes to try, nearest to the plan first."""
    plan = job.plan
    present = {_shape(layer, reach) for layer in plan.layers}
    # Largest tp * cp first, so that weights and activations per rank do not grow.
    ordered = sorted(present, key=lambda s: (s.tp * s.cp, s.tp, not s.ulysses), reverse=True)
    # The requested degree applies only to plans with several degrees.
    if job.tensor_degree is not None and len({s.tp for s in present}) > 1:
        wanted = [s for s in ordered if s.tp == job.tensor_degree]
        tp, most = job.tensor_degree, ordered[0]
        yield from wanted
        if not wanted:
            if most.ulysses and tp > 1:
                yield LayerStrategy(tp=tp, ulysses=True)
            yield LayerStrategy(tp=tp)
        return
    yield from ordered
    largest = ordered[0]
    kinds = (largest.ulysses, not largest.ulysses) if reach.ulysses else (False,)
    # No degree of the plan is legal, so smaller ones are tried.
    for tp in range(largest.tp * largest.cp, 0, -1):
        for cp in sorted({largest.cp, 1}, reverse=True):
            for ulysses in kinds:
                shape = LayerStrategy(tp=tp, ulysses=ulysses and tp > 1, cp=cp)
                fits = data_degree(plan.world_size, plan.num_stages, tp * cp)
                if fits and shape not in present:
                    yield shape


def _shape(layer: LayerStrategy, reach: EngineCapabilities) -> LayerStrategy:
    # Without context parallelism in the engine, context ranks become tensor ranks.
    tp, cp = (layer.tp, layer.cp) if reach.context else (layer.tp * layer.cp, 1)
    return LayerStrategy(tp=tp, ulysses=layer.ulysses and reach.ulysses and tp > 1, cp=cp)


def _plan_of(job: ExportJob, reach: EngineCapabilities, shape: LayerStrategy) -> Plan:
    """Return the plan whose layers, embedding and head all have one shape."""
    plan = job.plan
    ranks = plan.world_size // plan.num_stages
    mode = reach.data_mode(_data_mode(plan), shape, ranks // (shape.tp * shape.cp))
    everywhere = any(layer.checkpoint for layer in plan.layers)
    layers = tuple(
        replace(
            shape,
            ulysses=shape.ulysses if shape.tp > 1 else layer.ulysses,
            zero3=mode == "zero3" if _replicas(ranks, shape) > 1 else layer.zero3,
            checkpoint=layer.checkpoint if reach.layer_checkpoints else everywhere,
            # Striding has no effect on a group of one rank or of all ranks.
            strided=layer.strided and shape.tp in (1, ranks) and layer.tp == shape.tp,
        )
        for layer in plan.layers
    )
    ulysses = shape.ulysses if shape.tp > 1 else plan.vocab.ulysses
    vocab = VocabStrategy(tp=shape.tp, ulysses=ulysses, cp=shape.cp)
    own = _replicas(ranks, vocab)
    zero3 = mode == "zero3" if own > 1 else plan.vocab.zero3
    copies = _replicas(ranks, shape) > 1 or own > 1
    default = plan.default_dp_type if mode == "zero3" or not copies else mode
    return replace(plan, layers=layers, vocab=replace(vocab, zero3=zero3), default_dp_type=default)


def _replicas(ranks: int, shape: LayerStrategy | VocabStrategy) -> int:
    """Return the number of ranks of a stage that hold equal parameters before ZeRO sharding."""
    # Ulysses and context parallelism do not shard weights, so their ranks count as replicas.
    return ranks if shape.ulysses else ranks // shape.tp


def _data_mode(plan: Plan) -> DataMode:
    """Return `zero3` if any layer or vocabulary part with replicas has it, else the default."""
    ranks = plan.world_size // plan.num_stages
    parts: list[LayerStrategy | VocabStrategy] = [*plan.layers, plan.vocab]
    sharded = any(part.zero3 and _replicas(ranks, part) > 1 for part in parts)
    return "zero3" if sharded else plan.default_dp_type


def losses_between(
    plan: Plan, near: Plan, title: str, reasons: Mapping[str, str], refused: str = ""
) -> tuple[UnsupportedFeature, ...]:
    """Return one unsupported feature for each strategy-file key that differs in `near`.

    title : name of the engine.
    reasons : reason for the change by key, overrides `_REASONS`.
    refused : reason why the degrees of the plan are illegal in the engine; empty: they are legal.
    """
    return tuple(_losses(plan, near, title, {**_REASONS, **reasons}, refused))


def _losses(
    plan: Plan, near: Plan, title: str, reasons: Mapping[str, str], refused: str
) -> Iterator[UnsupportedFeature]:
    default = plan.default_dp_type
    of_layers: dict[str, Callable[[LayerStrategy], str]] = {
        "tp_sizes_enc": lambda s: f"degree {s.tp}",
        "use_sp": lambda s: "Ulysses" if s.ulysses else "tensor parallelism",
        "cp_sizes_enc": lambda s: f"context degree {s.cp}",
        "tp_consecutive_flags": lambda s: "strided groups" if s.strided else "neighbours",
        "dp_types_enc": lambda s: "zero3" if s.zero3 else default,
        "checkpoint": lambda s: "checkpoints" if s.checkpoint else "no checkpoints",
    }
    of_plan: dict[str, Callable[[Plan], str]] = {
        "default_dp_type": lambda p: p.default_dp_type,
        "vtp": lambda p: f"degree {p.vocab.tp} for embedding and head",
        "vcp": lambda p: f"context degree {p.vocab.cp} for embedding and head",
        "vsp": lambda p: f"{'Ulysses' if p.vocab.ulysses else 'vocabulary'} sharding",
        "embed_sdp": lambda p: f"{'zero3' if p.vocab.zero3 else default} for embedding and head",
    }

    def loss(key: str, before: str, after: str, because: str = "") -> UnsupportedFeature:
        what = f"the plan has {before}, but {title} {reasons[key]}: it uses {after}{because}"
        return UnsupportedFeature(field=key, what=what)

    for key, text in of_layers.items():
        before, after = [text(s) for s in plan.layers], [text(s) for s in near.layers]
        if before != after:
            because = f" ({refused})" if refused and key == "tp_sizes_enc" else ""
            taken = per_value(after) if len(set(after)) > 1 else after[0]
            yield loss(key, per_value(before), taken, because)
    for key, said in of_plan.items():
        if said(plan) != said(near):
            yield loss(key, said(plan), said(near))


def refuse_stages(job: ExportJob, title: str, how: str) -> None:
    """Raise UnsupportedError for a plan of several stages.

    title : name of the engine.
    how : text appended to the message.
    """
    plan = job.plan
    if plan.num_stages > 1:
        sizes = "+".join(map(str, plan.stage_sizes))
        raise UnsupportedError(
            f"{title} has no pipeline, but the plan has {plan.num_stages} stages "
            f"of {sizes} layers{how}",
            remedy="Search again with --max-pp-deg 1",
        )


def keeps_whole_sequences(plan: Plan) -> bool:
    """Return True if a plan of one shape has tensor parallelism without Ulysses.

    In an engine without sequence parallelism, each tensor rank then stores activations of the
    entire sequence between blocks.
    """
    return plan.layers[0].tp > 1 and not plan.layers[0].ulysses


def summed_in_precision(job: ExportJob, runs: Mapping[str, bool], who: str) -> tuple[str, ...]:
    """Return a note if an engine reduces gradients in bf16 or fp16 but the plan in fp32, else ().

    This is a note and not an unsupported feature: the plan is unchanged and needs less memory and
    time, but gradient sums are less precise.

    runs : value in the engine by field of `ExportJob`.
    who : name of the software that reduces the gradients.
    """
    if not job.fp32_gradients or runs["fp32_gradients"] or job.precision == "fp32":
        return ()
    # Bits of the significand, including the implicit leading bit.
    bits = {"bf16": 8, "fp16": 11}[job.precision]
    note = (
        f"{who} sums gradients of micro-batches and ranks in {job.precision}, "
        f"but the plan is priced for fp32 sums: {bits} binary digits of each sum "
        "are kept, so small gradients are lost in large sums. Memory and "
        "traffic are lower, as predicted with --no-fp32-gradients"
    )
    return (note,)


def whole_sequences(job: ExportJob, near: Plan, title: str) -> tuple[UnsupportedFeature, ...]:
    """Return the unsupported sequence parallelism of a job; empty if it has no effect.

    near : nearest plan.
    title : name of an engine without sequence parallelism.
    """
    if not (job.sequence_parallel and keeps_whole_sequences(near)):
        return ()
    what = (
        f"the plan needs Megatron sequence parallelism, but {title} keeps whole "
        "sequences between the tensor-parallel blocks: activations need more "
        "memory than predicted (predict it with --no-sequence-parallel)"
    )
    return (UnsupportedFeature(field="sequence_parallel", what=what),)

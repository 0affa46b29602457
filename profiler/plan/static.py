"""The arithmetic of a plan, without torch: what every rank holds, its samples, its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from autopar.errors import InputError
from autopar.plan import LayerStrategy, Plan
from profiler.plan.counts import Shape, first_shapes, held, last_shapes, layer_shapes
from profiler.plan.job import PlanJob
from profiler.plan.layout import check_job, layer_layout

__all__ = [
    "Held",
    "Run",
    "StageArithmetic",
    "StaticReport",
    "Weights",
    "examine",
    "micro_batches_in_flight",
    "stage_weights",
    "strategy_label",
]


class Weights(NamedTuple):
    """Parameters that one layer, or embedding and head, have on a rank before ZeRO divides them."""

    shapes: tuple[Shape, ...]
    zero: str
    """ddp, zero2 or zero3."""
    num_ranks: int
    """Ranks with the same weights: gradients are summed over them, and ZeRO divides by them."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What the first rank of a stage, or of a part of it, holds; no other rank holds more."""

    num_parameters: int = 0
    """Elements of its pieces when nothing is gathered."""
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    """As they are when the optimizer steps."""
    optimizer_bytes: int = 0
    """AdamW's two moments, and fp32 copies of the weights where those are not fp32."""
    gathered_bytes: int = 0
    """Weights that ZeRO-2 keeps gathered during a step."""
    accumulated_bytes: int = 0
    """Whole gradients that ZeRO keeps until the last micro-batch, with one reduction per step."""

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and optimizer."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes

    def __add__(self, other: Held) -> Held:
        """Return both together."""
        return Held(**{key: value + getattr(other, key) for key, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Run:
    """Consecutive layers of a stage with one strategy and one type."""

    first_layer: int
    last_layer: int
    strategy: LayerStrategy
    label: str
    data_degree: int
    samples: int
    """Per micro-batch on a rank."""
    tensor_axes: tuple[int, ...]
    """Axes of the mesh that are its tensor group; the others divide the samples."""
    held: Held


@dataclass(frozen=True, kw_only=True)
class StageArithmetic:
    """One stage of a plan."""

    stage: int
    ranks: tuple[int, int]
    """First and last."""
    layers: tuple[int, int]
    in_flight: int
    """Most micro-batches whose activations are kept at once."""
    runs: tuple[Run, ...]
    held: Held
    """Layers, embedding and head."""
    vocab: Held
    """Embedding and head alone."""


@dataclass(frozen=True, kw_only=True)
class StaticReport:
    """What can be said of a legal plan without running anything."""

    stages: tuple[StageArithmetic, ...]
    mesh: tuple[int, ...] | None
    """Sizes of the axes that the ranks of every stage form; None where the executor has none."""
    obstacle: str | None
    """Why the executor does not run the plan, legal as it is; None where it does."""
    vocab_label: str
    vocab_samples: int
    bubble_share: float
    """Idle part of a step with equal stages and free transfers: (p-1) / (m+p-1)."""

    @property
    def largest(self) -> int:
        """The stage whose ranks have the most model states; the first of equals."""
        return max(self.stages, key=lambda s: (s.held.state_bytes, -s.stage)).stage


def examine(job: PlanJob) -> StaticReport:
    """Return the arithmetic of a legal plan.

    Raises InputError where the model does not say heads, MLP width or vocabulary.
    """
    plan, vocab = job.plan, job.plan.vocab
    obstacle, mesh = None, None
    try:
        cube = check_job(job)
    except InputError as error:
        obstacle = str(error)
        axes: Sequence[tuple[int, ...]] = [()] * len(plan.layers)
    else:
        mesh = cube.factors
        axes = [layer_layout(job, cube, k).tensor_axes for k in range(len(plan.layers))]
    ranks = plan.world_size // plan.num_stages
    stages = []
    first = 0
    for stage, size in enumerate(plan.stage_sizes):
        runs = _runs(job, range(first, first + size), axes)
        around = _held(job, _vocab_weights(job, stage))
        stages.append(
            StageArithmetic(
                stage=stage,
                ranks=(stage * ranks, (stage + 1) * ranks - 1),
                layers=(first, first + size - 1),
                in_flight=micro_batches_in_flight(plan, stage),
                runs=runs,
                held=sum((run.held for run in runs), around),
                vocab=around,
            )
        )
        first += size
    p, m = plan.num_stages, plan.num_microbatches
    outer = LayerStrategy(tp=vocab.tp, ulysses=vocab.ulysses, zero3=vocab.zero3)
    return StaticReport(
        stages=tuple(stages),
        mesh=mesh,
        obstacle=obstacle,
        vocab_label=strategy_label(outer, ranks // vocab.tp, plan).replace("tp", "vtp", 1),
        vocab_samples=plan.global_batch // (m * (ranks // vocab.tp)),
        bubble_share=(p - 1) / (m + p - 1),
    )


def micro_batches_in_flight(plan: Plan, stage: int) -> int:
    """Return how many micro-batches a stage keeps activations of at once."""
    if plan.pipeline_type == "gpipe":
        return plan.num_microbatches
    return min(plan.num_microbatches, plan.num_stages - stage)


def stage_weights(job: PlanJob, stage: int) -> tuple[Weights, ...]:
    """Return the weights on a rank of a stage: every layer's, then those of embedding and head."""
    places = job.plan.stage_of_layer()
    layers = (_layer_weights(job, k) for k, place in enumerate(places) if place == stage)
    return (*layers, _vocab_weights(job, stage))


def strategy_label(strategy: LayerStrategy, data_degree: int, plan: Plan) -> str:
    """Return a strategy in short, e.g. `tp2-dp4-zero3-ckpt`; ddp is not said."""
    tensor = f"ulysses{strategy.tp}" if strategy.ulysses else f"tp{strategy.tp}"
    parts = [tensor + ("*" if strategy.strided else "")] if strategy.tp > 1 else []
    parts += [f"cp{strategy.cp}"] if strategy.cp > 1 else []
    zero = "zero3" if strategy.zero3 else plan.default_dp_type
    parts.append(f"dp{data_degree}")
    parts += [zero] if zero != "ddp" else []
    parts += ["ckpt"] if strategy.checkpoint else []
    return "-".join(parts)


def _runs(job: PlanJob, layers: range, axes: Sequence[tuple[int, ...]]) -> tuple[Run, ...]:
    plan, types = job.plan, job.spec.layer_types
    runs = []
    for (strategy, _), group in groupby(layers, lambda k: (plan.layers[k], types[k])):
        members = list(group)
        degree = plan.data_degree(members[0])
        one = _held(job, _layer_weights(job, members[0]))
        runs.append(
            Run(
                first_layer=members[0],
                last_layer=members[-1],
                strategy=strategy,
                label=strategy_label(strategy, degree, plan),
                data_degree=degree,
                samples=plan.global_batch // (plan.num_microbatches * degree),
                tensor_axes=axes[members[0]],
                held=sum((one for _ in members[1:]), one),
            )
        )
    return tuple(runs)


def _layer_weights(job: PlanJob, layer: int) -> Weights:
    strategy = job.plan.layers[layer]
    degree = 1 if strategy.ulysses else strategy.tp
    shapes = layer_shapes(job.spec.layers[job.spec.layer_types[layer]], degree)
    zero = "zero3" if strategy.zero3 else job.plan.default_dp_type
    return Weights(shapes, zero, _sync_degree(job.plan, degree))


def _vocab_weights(job: PlanJob, stage: int) -> Weights:
    """Return the weights of embedding and head on a stage."""
    plan, spec, vocab = job.plan, job.spec, job.plan.vocab
    degree = 1 if vocab.ulysses else vocab.tp
    at_start, at_end = stage == 0, stage == plan.num_stages - 1
    shared = spec.tied_embeddings and at_start and at_end
    shapes: tuple[Shape, ...] = first_shapes(spec, degree) if at_start else ()
    if at_end:
        shapes = (*shapes, *last_shapes(spec, degree, own_table=not shared))
    zero = "zero3" if vocab.zero3 else plan.default_dp_type
    return Weights(shapes, zero, _sync_degree(plan, degree))


def _sync_degree(plan: Plan, weights: int) -> int:
    """Return the ranks that gradients are summed over: those that hold the same weights."""
    return plan.world_size // plan.num_stages // weights


def _held(job: PlanJob, weights: Weights) -> Held:
    """Return the executor's recipe for the parameters of a layer, or of embedding and head.

    fp32 4+4+8 bytes; bf16 without ZeRO 2+2+12, with ZeRO fp32 shards of 4+4+8 and gathered bf16.
    """
    shapes, zero, z = weights
    whole, wide = held(shapes), job.precision == "bf16"
    if zero == "ddp" or z == 1:
        weight, optimizer = (2, 12) if wide else (4, 8)
        return Held(
            num_parameters=whole,
            parameter_bytes=weight * whole,
            gradient_bytes=weight * whole,
            optimizer_bytes=optimizer * whole,
        )
    own = held(shapes, z)
    accumulates = job.async_grad_reduce and job.plan.num_microbatches > 1
    return Held(
        num_parameters=own,
        parameter_bytes=4 * own,
        gradient_bytes=4 * own,
        optimizer_bytes=8 * own,
        gathered_bytes=(2 if wide else 4) * whole if zero == "zero2" else 0,
        accumulated_bytes=4 * whole if accumulates else 0,
    )

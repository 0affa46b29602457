"""Plan: a strategy for every layer, the stages and the batch; and the prediction of one.

Every rule of legality stands here once, as a function that returns its sentence where it is broken;
`violations` asks all of them of a plan, and the search and the engines ask those that they need.
`autopar.documents.plan` reads and writes plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from itertools import groupby
from typing import Literal

from autopar.model import LayerSpec, ModelSpec
from autopar.records import dataclass

__all__ = [
    "PUBLISHED_RUNS",
    "LayerRun",
    "LayerStrategy",
    "PipelineType",
    "Plan",
    "Prediction",
    "StagePrediction",
    "VocabStrategy",
    "WidestCell",
    "ZeroDefault",
    "data_degree",
    "fewest_microbatches",
    "layer_problems",
    "tensor_degrees",
    "violations",
    "vocab_problems",
    "width_problems",
]


PipelineType = Literal["1f1b", "gpipe"]
ZeroDefault = Literal["ddp", "zero2"]


@dataclass(frozen=True, kw_only=True, order=True)
class LayerStrategy:
    """How one layer is parallelised; the data degree follows from world, stages, tp and cp.

    The field order is the canonical order that breaks ties between equally fast plans.
    """

    tp: int = 1
    """Tensor degree: Megatron tensor parallelism, or Ulysses sequence parallelism."""
    ulysses: bool = False
    cp: int = 1
    """Context (ring attention) degree."""
    zero3: bool = False
    checkpoint: bool = False
    strided: bool = False
    """True when the tensor group is ranks i, i+stride, ... instead of neighbours."""

    def label(self, data_degree: int, default_dp: ZeroDefault) -> str:
        """Return a short name such as `tp4-dp2-zero3-ckpt` or `ulysses8`."""
        parts = []
        if self.tp > 1:
            kind = "ulysses" if self.ulysses else "tp"
            parts.append(f"{kind}{self.tp}" + ("-strided" if self.strided else ""))
        if self.cp > 1:
            parts.append(f"cp{self.cp}")
        if data_degree > 1 or not parts:
            parts.append(f"dp{data_degree}")
        if self.zero3:
            parts.append("zero3")
        # without a second rank to reduce with the default shards nothing
        elif default_dp == "zero2" and (data_degree > 1 or self.ulysses or self.cp > 1):
            parts.append("zero2")
        if self.checkpoint:
            parts.append("ckpt")
        return "-".join(parts)


@dataclass(frozen=True, kw_only=True, order=True)
class VocabStrategy:
    """How embedding, head and loss are parallelised."""

    tp: int = 1
    ulysses: bool = False
    zero3: bool = False

    def as_layer(self) -> LayerStrategy:
        """Return the strategy of a layer that is split as embedding and head are."""
        return LayerStrategy(tp=self.tp, ulysses=self.ulysses, zero3=self.zero3)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything a launcher needs to know of a training step."""

    world_size: int
    num_stages: int
    stage_sizes: tuple[int, ...]
    """Layers per stage; sums to the number of layers."""
    layers: tuple[LayerStrategy, ...]
    vocab: VocabStrategy
    global_batch: int
    num_microbatches: int
    pipeline_type: PipelineType = "1f1b"
    default_dp_type: ZeroDefault = "ddp"
    """What a layer without ZeRO-3 does with its data group."""

    def data_degree(self, layer: int) -> int:
        """Return the data degree of a layer (0 when tp*cp does not divide the stage's ranks)."""
        strategy = self.layers[layer]
        return data_degree(self.world_size, self.num_stages, strategy.tp * strategy.cp)

    def stage_of_layer(self) -> tuple[int, ...]:
        """Return the stage index of every layer."""
        return tuple(j for j, n in enumerate(self.stage_sizes) for _ in range(n))


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Consecutive layers of one stage with the same type and strategy, priced together."""

    first_layer: int
    num_layers: int
    layer_type: int
    label: str
    """Short name of the strategy, e.g. `tp4-dp2-zero3-ckpt`."""
    time_s: Mapping[str, float]
    """Seconds of one micro-batch by category (forward, backward, recompute, tp, ulysses, cp,
    zero3, redistribution) and, per step, `tail` and `optimizer`; sums over the run."""
    memory_bytes: Mapping[str, float]
    """Bytes by category (states, activations, backward, transient, shared) on this stage; backward
    and transient are one layer's, and the largest sum of both is the stage's `transient`."""


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """Predicted time and memory of one pipeline stage."""

    stage: int
    forward_s: float
    """One micro-batch, redistribution and vocabulary layers included, transfers excluded."""
    backward_s: float
    send_s: float
    """Transfer of one micro-batch's activation to the next stage (0 for the last)."""
    tail_s: float
    """Exposed gradient synchronisation, parameter gathering and optimizer, once per step."""
    allocated_bytes: int
    reserved_bytes: int
    budget_bytes: int
    odds_of_oom: float
    """Of a device of the budget running out of memory."""
    in_flight: int
    memory_bytes: Mapping[str, int]
    """By category (states, activations, vocab_states, vocab_activations, transient, shared,
    fixed); sums to `allocated_bytes`."""
    time_s: Mapping[str, float]
    """Seconds of one micro-batch by category, vocabulary layers as `vocab`; sums to
    `forward_s + backward_s`."""
    runs: tuple[LayerRun, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WidestCell:
    """The measured time whose spread moves the step time most."""

    name: str
    """In words, e.g. `backward of layer type 0, batch 4, sequence length 2048`."""
    share: float
    """Of the variance of the step time that the spread of computation causes, 0 to 1."""


PUBLISHED_RUNS = "published runs"
"""Of an interval: how far estimates were from runs of others."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan priced: the one objective T, its parts and the replay beside it."""

    step_time_s: float
    samples_per_s: float
    replay_s: float
    stages: tuple[StagePrediction, ...]
    legal: bool
    fits: bool
    problems: tuple[str, ...] = ()
    """Why the plan is illegal or does not fit, each with its arithmetic."""
    waterfall_s: Mapping[str, float] = field(default_factory=dict)
    """The step time split into named parts; sums to `step_time_s`."""
    step_time_interval_s: tuple[float, float] | None = None
    """The step time with all communication at its 5th and at its 95th percentile, widened by that
    of the replicas of computation; None where no spread was measured."""
    interval_of: tuple[str, ...] = ("communication",)
    """What the interval is the measured spread of: communication, computation or both; or
    `PUBLISHED_RUNS`, where nothing was measured here."""
    widest_cell: WidestCell | None = None
    """The measurement of computation to repeat first; None where computation has no spread."""


# --------------------------------------------------------------------------------------------------
# Why a plan cannot run: every rule of legality, each violation with its arithmetic.


def data_degree(world_size: int, num_stages: int, group: int) -> int:
    """Return the data degree beside tensor and context groups of `group` ranks, 0 where none fits.

    Degrees fill a stage: group * data * stages is the world.
    """
    degree, rest = divmod(world_size, num_stages * group)
    return 0 if rest else degree


def fewest_microbatches(pipeline_type: PipelineType, num_stages: int) -> int:
    """Return how many micro-batches a schedule needs."""
    # the first stage of 1F1B holds p micro-batches before the first backward arrives
    return num_stages if pipeline_type == "1f1b" else 1


def tensor_degrees(layer: LayerSpec) -> tuple[int, ...]:
    """Return the tensor degrees that a layer's widths allow; 1 alone where heads are unknown."""
    degrees = range(1, (layer.num_heads or 1) + 1)
    return tuple(t for t in degrees if not any(width_problems(layer, t)))


def width_problems(layer: LayerSpec, degree: int, *, ulysses: bool = False) -> Iterator[str]:
    """Yield why heads and MLP do not split over so many tensor ranks; unknown sizes always do."""
    name = "ulysses" if ulysses else "tp"
    heads, kv_heads, ffn = layer.num_heads, layer.num_kv_heads, layer.ffn_hidden_size
    # every rank has whole heads
    if heads is not None and heads % degree:
        yield f"heads({heads}) % {name}({degree}) = {heads % degree} != 0"
    # fewer key-value heads than ranks are copied, equally often on all of them
    if kv_heads is not None and kv_heads % degree and degree % kv_heads:
        yield (
            f"kv_heads({kv_heads}) % {name}({degree}) = {kv_heads % degree} "
            f"and {name}({degree}) % kv_heads({kv_heads}) = {degree % kv_heads}, "
            "where one must be 0"
        )
    # Ulysses splits tokens and heads, never the width of the MLP
    if not ulysses and ffn is not None and ffn % degree:
        yield f"ffn_hidden_size({ffn}) % tp({degree}) = {ffn % degree} != 0"


def layer_problems(
    layer: LayerSpec, strategy: LayerStrategy, *, sequence_parallel: bool
) -> Iterator[str]:
    """Yield why a layer of this shape cannot have a strategy."""
    t, c, s = strategy.tp, strategy.cp, layer.seq_length
    yield from width_problems(layer, t, ulysses=strategy.ulysses)
    name = "ulysses" if strategy.ulysses else "tp"
    # only these two split the sequence over the tensor group
    shards = t if strategy.ulysses or sequence_parallel else 1
    if c > 1:
        # Zigzag: every rank of the ring holds one early and one late piece of the sequence, so
        # that causal work is even.
        pieces = 2 * c * shards
        factor = f" * {name}({t})" if shards > 1 else ""
        if s % pieces:
            yield f"seq_length({s}) % (2 * cp({c}){factor}) = {s % pieces} != 0"
    elif s % shards:
        yield f"seq_length({s}) % {name}({t}) = {s % shards} != 0"


def vocab_problems(
    spec: ModelSpec, vocab: VocabStrategy, *, sequence_parallel: bool
) -> Iterator[str]:
    """Yield why embedding and head cannot have a strategy.

    The vocabulary itself is padded to a multiple of the degree, so it never restricts it.
    """
    if vocab.ulysses or sequence_parallel:
        for s in sorted({layer.seq_length for layer in spec.layers}):
            if s % vocab.tp:
                name = "vsp" if vocab.ulysses else "vtp"
                yield f"seq_length({s}) % {name}({vocab.tp}) = {s % vocab.tp} != 0"


def violations(plan: Plan, spec: ModelSpec, *, sequence_parallel: bool) -> tuple[str, ...]:
    """Return one sentence per violated rule, empty for a legal plan.

    Parameters
    ----------
    sequence_parallel : whether tensor-parallel layers use Megatron sequence parallelism, which
        shards the sequence and so restricts the tensor degree.
    """
    problems = list(_structure(plan, spec))
    shape_known = len(plan.layers) == spec.num_layers
    # Runs that differ in something else, such as checkpointing, share a sentence.
    where: dict[str, list[tuple[int, int]]] = {}
    for first, last, kind, strategy in _runs(plan, spec):
        t, c = strategy.tp, strategy.cp
        texts = list(_ranks(plan, f"tp({t}) * cp({c})", t * c))
        # with another number of layers no strategy can be told its layer type
        if shape_known:
            layer = spec.layers[kind]
            texts += layer_problems(layer, strategy, sequence_parallel=sequence_parallel)
        for text in texts:
            ranges = where.setdefault(text, [])
            # runs that touch read as one range
            if ranges and ranges[-1][1] == first - 1:
                ranges[-1] = (ranges[-1][0], last)
            else:
                ranges.append((first, last))
    problems += (f"{_layers(ranges)}: {text}" for text, ranges in where.items())
    t = plan.vocab.tp
    ends = [
        *_ranks(plan, f"vtp({t})", t),
        *vocab_problems(spec, plan.vocab, sequence_parallel=sequence_parallel),
    ]
    problems += (f"embedding and head: {text}" for text in ends)
    return tuple(problems)


def _layers(ranges: list[tuple[int, int]]) -> str:
    """Return ranges of layers in words, the first four of them."""
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:4]]
    shown += ["..."] if len(ranges) > 4 else []
    one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return ("layer " if one else "layers ") + ", ".join(shown)


def _structure(plan: Plan, spec: ModelSpec) -> Iterator[str]:
    p, m, num_layers = plan.num_stages, plan.num_microbatches, len(plan.layers)
    if num_layers != spec.num_layers:
        yield f"layers of the plan({num_layers}) != layers of {spec.name}({spec.num_layers})"
    if len(plan.stage_sizes) != p:
        yield f"entries of pp_division({len(plan.stage_sizes)}) != pp({p})"
    if sum(plan.stage_sizes) != num_layers:
        # beyond 16 stages the sum written out is longer than what it proves
        terms = " + ".join(map(str, plan.stage_sizes)) if p <= 16 else "sum of pp_division"
        yield f"{terms} = {sum(plan.stage_sizes)} != layers({num_layers})"
    for stage, size in enumerate(plan.stage_sizes):
        if size < 1:
            yield f"stage {stage} has {size} layers where at least 1 is needed"
    if p > num_layers:
        yield f"pp({p}) > layers({num_layers})"
    if plan.world_size % p:
        yield f"world_size({plan.world_size}) % pp({p}) = {plan.world_size % p} != 0"
    if m < fewest_microbatches(plan.pipeline_type, p):
        yield f"1F1B needs micro-batches({m}) >= pp({p})"
    if plan.global_batch % m:
        yield (
            f"global_batch({plan.global_batch}) % micro-batches({m}) = {plan.global_batch % m} != 0"
        )


def _runs(plan: Plan, spec: ModelSpec) -> Iterator[tuple[int, int, int, LayerStrategy]]:
    """Yield (first, last, layer type, strategy) of consecutive layers that are alike."""
    types = spec.layer_types
    keys = [
        (types[i] if i < len(types) else -1, strategy) for i, strategy in enumerate(plan.layers)
    ]
    first = 0
    for (kind, strategy), group in groupby(keys):
        count = len(list(group))
        yield first, first + count - 1, kind, strategy
        first += count


def _ranks(plan: Plan, degrees: str, group: int) -> Iterator[str]:
    """Degrees fill the stage, and every rank gets whole samples: b = G/(m*d)."""
    p, m, world, batch = plan.num_stages, plan.num_microbatches, plan.world_size, plan.global_batch
    # rounded down, so that the product shows what is left out
    d = world // (p * group)
    if not data_degree(world, p, group):
        yield f"{degrees} * dp({d}) * pp({p}) = {d * p * group} != world_size({world})"
    # a batch that m does not divide is reported once, for the whole plan
    if d > 0 and batch % m == 0 and batch % (m * d):
        yield (
            f"global_batch({batch}) / (micro-batches({m}) * dp({d})) = {batch / (m * d):g} "
            f"samples, which is not an integer"
        )

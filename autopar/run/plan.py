"""Plan: a strategy for every layer, the stages and the batch; and the prediction of one.

Every rule of legality stands here once, as a function that returns its sentence where it is broken;
`violations` asks all of them of a plan, and the search and the engines ask those that they need.
`autopar.documents.plan` reads and writes plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Literal

from msgspec import field

from autopar.pipeline.orders import rank_of
from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.records import Record
from autopar.run.model import LayerSpec, ModelSpec

PipelineType = Schedule
ZeroDefault = Literal["ddp", "zero1", "zero2"]
"""What data ranks share of a layer without ZeRO-3: nothing, the optimizer, or gradients as well."""
Module = Literal["core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"]
"""What selective recomputation can be of, in Megatron-Core's words."""


class LayerStrategy(Record):
    """How one layer is parallelised; the data degree follows from world, stages, tp and cp.

    Strategies are ordered by their fields in turn, the canonical order that breaks ties between
    equally fast plans.
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
    ep: int = 1
    """Expert degree: the experts of the layer are divided over so many ranks of the stage, which
    may be of other tensor, context and data groups: the grid of experts (`expert_tp` * ep * edp)
    shares nothing with that of the other weights (tp * cp * dp) but the stage."""
    etp: int | None = None
    """Expert tensor degree; None: `tp` without expert parallelism, and 1 with it."""
    recompute: tuple[Module, ...] = ()
    """Modules that the backward computes again, sorted; empty beside `checkpoint`, which means the
    whole layer. A module that the layer has not means nothing."""

    def __lt__(self, other: LayerStrategy) -> bool:
        """Return whether this strategy comes first; a degree that is not given is before all."""
        return self._place < other._place

    @property
    def _place(self) -> tuple[object, ...]:
        given = (self.tp, self.ulysses, self.cp, self.zero3, self.checkpoint, self.strided)
        return (*given, self.ep, self.etp or 0, self.recompute)

    @property
    def expert_tp(self) -> int:
        """Ranks among which every expert is divided."""
        if self.etp is not None:
            return self.etp
        # Ulysses divides no weights
        return self.tp if self.ep == 1 and not self.ulysses else 1

    def label(self, data_degree: int, default_dp: ZeroDefault) -> str:
        """Return a short name such as `tp4-dp2-zero3-ckpt` or `ulysses8`."""
        parts = []
        if self.tp > 1:
            kind = "ulysses" if self.ulysses else "tp"
            parts.append(f"{kind}{self.tp}" + ("-strided" if self.strided else ""))
        if self.cp > 1:
            parts.append(f"cp{self.cp}")
        if self.ep > 1:
            parts.append(f"ep{self.ep}")
        if self.etp is not None:
            parts.append(f"etp{self.etp}")
        if data_degree > 1 or not parts:
            parts.append(f"dp{data_degree}")
        if self.zero3:
            parts.append("zero3")
        # without a second rank to reduce with the default shards nothing
        elif default_dp != "ddp" and (data_degree > 1 or self.ulysses or self.cp > 1):
            parts.append(default_dp)
        if self.checkpoint:
            parts.append("ckpt")
        if self.recompute:
            parts.append("+".join(self.recompute))
        return "-".join(parts)


class VocabStrategy(Record, order=True):
    """How embedding, head and loss are parallelised."""

    tp: int = 1
    ulysses: bool = False
    zero3: bool = False
    cp: int = 1
    """Context degree: embedding, head and loss have the tokens of the rank's two pieces."""

    def as_layer(self) -> LayerStrategy:
        """Return the strategy of a layer that is split as embedding and head are."""
        return LayerStrategy(tp=self.tp, ulysses=self.ulysses, cp=self.cp, zero3=self.zero3)


class Plan(Record):
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
    num_chunks: int = 1
    """Chunks of consecutive layers that every stage holds: virtual pipeline stages of each."""
    chunk_sizes: tuple[int, ...] = ()
    """Layers of all chunks in the order in which they run; empty: those of a stage are divided
    evenly."""

    @property
    def chunks(self) -> tuple[int, ...]:
        """Layers of all chunks in the order in which they run; of one chunk a stage, its layers."""
        if self.chunk_sizes or self.num_chunks == 1:
            return self.chunk_sizes or self.stage_sizes
        return tuple(
            self.stage_sizes[stage] // self.num_chunks
            for stage in map(self.stage_of_chunk, range(self.num_stages * self.num_chunks))
        )

    def stage_of_chunk(self, chunk: int) -> int:
        """Return the stage that holds a chunk: from first to last and again, or there and back."""
        return rank_of(self.pipeline_type, chunk, self.num_stages)

    def data_degree(self, layer: int) -> int:
        """Return the data degree of a layer (0 when tp*cp does not divide the stage's ranks)."""
        strategy = self.layers[layer]
        return data_degree(self.world_size, self.num_stages, strategy.tp * strategy.cp)

    def stage_of_layer(self) -> tuple[int, ...]:
        """Return the stage index of every layer."""
        if self.num_chunks == 1:
            return tuple(j for j, n in enumerate(self.stage_sizes) for _ in range(n))
        chunks = enumerate(self.chunks)
        return tuple(self.stage_of_chunk(k) for k, n in chunks for _ in range(n))


class LayerRun(Record):
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


class StagePrediction(Record):
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


class WidestCell(Record):
    """The measured time whose spread moves the step time most."""

    name: str
    """In words, e.g. `backward of layer type 0, batch 4, sequence length 2048`."""
    share: float
    """Of the variance of the step time that the spread of computation causes, 0 to 1."""


PUBLISHED_RUNS = "published runs"
"""Of an interval: how far estimates were from runs of others."""


class Prediction(Record):
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
    # all forwards come before all backwards, however few they are
    if pipeline_type in ("gpipe", "looped_bfs"):
        return 1
    # it fills a pipeline of 2p chunks from its one end (torch's ScheduleDualPipeV)
    if pipeline_type == "dual_pipe_v":
        return 2 * num_stages
    # the first stage of 1F1B holds p micro-batches before the first backward arrives
    return num_stages


def tensor_degrees(layer: LayerSpec) -> tuple[int, ...]:
    """Return the tensor degrees that a layer's widths allow; 1 alone where heads are unknown."""
    degrees = range(1, (layer.num_heads or 1) + 1)
    return tuple(t for t in degrees if not any(width_problems(layer, t)))


def width_problems(
    layer: LayerSpec, degree: int, *, ulysses: bool = False, heads_only: bool = False
) -> Iterator[str]:
    """Yield why heads and MLP do not split over so many tensor ranks; unknown sizes always do.

    heads_only : where the MLP is experts, whose degree is another one.
    """
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
    if not (ulysses or heads_only) and ffn is not None and ffn % degree:
        yield f"ffn_hidden_size({ffn}) % tp({degree}) = {ffn % degree} != 0"
    # what all tokens visit is divided as a dense MLP, wherever the experts are
    shared = layer.shared_expert_width
    if not ulysses and shared % degree:
        yield f"shared_expert_width({shared}) % tp({degree}) = {shared % degree} != 0"


def layer_problems(
    layer: LayerSpec, strategy: LayerStrategy, *, sequence_parallel: bool
) -> Iterator[str]:
    """Yield why a layer of this shape cannot have a strategy."""
    t, c, s = strategy.tp, strategy.cp, layer.seq_length
    own_grid = layer.num_experts is not None and (strategy.ep > 1 or strategy.etp is not None)
    yield from width_problems(layer, t, ulysses=strategy.ulysses, heads_only=own_grid)
    yield from expert_problems(layer, strategy)
    if strategy.checkpoint and strategy.recompute:
        yield (
            f"the whole layer is recomputed, and {'+'.join(strategy.recompute)} of it once more; "
            "choose one"
        )
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


def expert_problems(layer: LayerSpec, strategy: LayerStrategy) -> Iterator[str]:
    """Yield why the experts of a layer do not split so; unknown sizes always do."""
    e, t = strategy.ep, strategy.expert_tp
    if layer.num_experts is None:
        if e > 1:
            yield f"ep({e}) is for layers with experts, and this layer has none"
        # without experts an expert tensor degree of 1 divides nothing, any other one is a mistake
        if strategy.etp is not None and t > 1:
            yield f"etp({t}) is for layers with experts, and this layer has none"
        return
    # every rank of an expert group has as many whole experts
    if layer.num_experts % e:
        yield f"experts({layer.num_experts}) % ep({e}) = {layer.num_experts % e} != 0"
    ffn = layer.ffn_hidden_size
    if strategy.etp is not None and ffn is not None and ffn % t:
        yield f"ffn_hidden_size({ffn}) % etp({t}) = {ffn % t} != 0"


def vocab_problems(
    spec: ModelSpec, vocab: VocabStrategy, *, sequence_parallel: bool
) -> Iterator[str]:
    """Yield why embedding and head cannot have a strategy.

    The vocabulary itself is padded to a multiple of the degree, so it never restricts it.
    """
    splits = vocab.ulysses or sequence_parallel
    name, t, c = "vsp" if vocab.ulysses else "vtp", vocab.tp, vocab.cp
    for s in sorted({layer.seq_length for layer in spec.layers}):
        if c > 1:
            # the two pieces of a rank's tokens are those of the layers' rings
            pieces = 2 * c * (t if splits else 1)
            factor = f" * {name}({t})" if splits and t > 1 else ""
            if s % pieces:
                yield f"seq_length({s}) % (2 * vcp({c}){factor}) = {s % pieces} != 0"
        elif splits and s % t:
            yield f"seq_length({s}) % {name}({t}) = {s % t} != 0"


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
        texts = [*_ranks(plan, f"tp({t}) * cp({c})", t * c), *_expert_ranks(plan, strategy)]
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
    t, c = plan.vocab.tp, plan.vocab.cp
    ends = [
        *_ranks(plan, f"vtp({t})" + (f" * vcp({c})" if c > 1 else ""), t * c),
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
    fewest = fewest_microbatches(plan.pipeline_type, p)
    if m < fewest:
        factor = f"{fewest // p} * " if fewest > p else ""
        name = "1F1B" if plan.pipeline_type == "1f1b" else plan.pipeline_type
        yield f"{name} needs micro-batches({m}) >= {factor}pp({p})"
    yield from chunk_problems(plan)
    if plan.global_batch % m:
        yield (
            f"global_batch({plan.global_batch}) % micro-batches({m}) = {plan.global_batch % m} != 0"
        )


def chunk_problems(plan: Plan) -> Iterator[str]:
    """Yield why stages cannot hold their layers in these chunks, or the schedule not run them."""
    p, v, m, kind = plan.num_stages, plan.num_chunks, plan.num_microbatches, plan.pipeline_type
    facts = SCHEDULES[kind]
    least, most = facts.least_chunks, facts.most_chunks
    if v < least or (most is not None and v > most):
        wanted = "1 chunk" if most == 1 else f"{least}{' or more' * (most != least)} chunks"
        yield f"{kind} has {wanted} a stage, and the plan has num_chunks({v})"
    if kind not in ("1f1b", "gpipe") and p == 1:
        yield f"{kind} needs stages, and pp is 1"
    # micro-batches go through the chunks in rounds of one for every stage
    if kind in ("interleaved", "interleaved_zero_bubble") and m >= p and m % p:
        yield f"{kind} needs micro-batches({m}) % pp({p}) = {m % p} to be 0"
    if v < 1 or len(plan.stage_sizes) != p:
        return
    if not plan.chunk_sizes:
        for stage, size in enumerate(plan.stage_sizes):
            if size % v:
                yield f"layers of stage {stage}({size}) % num_chunks({v}) = {size % v} != 0"
        return
    if len(plan.chunk_sizes) != p * v:
        yield f"entries of chunk_sizes({len(plan.chunk_sizes)}) != pp({p}) * num_chunks({v})"
        return
    for chunk, size in enumerate(plan.chunk_sizes):
        if size < 0:
            yield f"chunk {chunk} has {size} layers where at least 0 are needed"
    held = [0] * p
    for chunk, size in enumerate(plan.chunk_sizes):
        held[plan.stage_of_chunk(chunk)] += size
    for stage, (found, size) in enumerate(zip(held, plan.stage_sizes, strict=True)):
        if found != size:
            yield f"chunks of stage {stage} have {found} layers and the stage has {size}"


def refinements(plan: Plan) -> tuple[str, ...]:
    """Return in words what a plan says beside degrees, ZeRO, whole checkpoints, 1F1B and GPipe.

    For whoever prices or writes plans without it, to be refused in a sentence.
    """
    layers = plan.layers
    found = [f"expert degree {e}" for e in sorted({s.ep for s in layers} - {1})]
    given = {s.etp for s in layers if s.etp is not None}
    found += [f"expert tensor degree {t}" for t in sorted(given)]
    modules = sorted({module for s in layers for module in s.recompute})
    found += [f"recomputation of {', '.join(modules)}"] if modules else []
    found += [f"context degree {plan.vocab.cp} of embedding and head"] if plan.vocab.cp > 1 else []
    found += ["ZeRO-1"] if plan.default_dp_type == "zero1" else []
    # GPipe and 1F1B are the schedules of one chunk a stage
    if plan.pipeline_type not in ("1f1b", "gpipe"):
        found.append(f"schedule {plan.pipeline_type}")
    found += [f"{plan.num_chunks} chunks a stage"] if plan.num_chunks > 1 else []
    return tuple(found)


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


def _expert_ranks(plan: Plan, strategy: LayerStrategy) -> Iterator[str]:
    """Experts fill the stage by a grid of their own."""
    if strategy.ep == 1 and strategy.etp is None:
        return
    p, e, t = plan.num_stages, strategy.ep, strategy.expert_tp
    d = plan.world_size // (p * e * t)
    if not data_degree(plan.world_size, p, e * t):
        product = f"etp({t}) * ep({e}) * edp({d}) * pp({p}) = {t * e * d * p}"
        yield f"{product} != world_size({plan.world_size})"


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

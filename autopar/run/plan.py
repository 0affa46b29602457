"""Plan (one strategy per layer, stages and batch), and the prediction of a plan.

Rules of legality are rows of `autopar.run.rules`. `plan_notices` applies them to a plan; the search
and the engines apply those that they need. `autopar.documents.plan` reads and writes plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Literal

from msgspec import field

from autopar.pipeline.orders import rank_of
from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.records import Positive, Record, replace
from autopar.run.model import LayerSpec, ModelSpec
from autopar.run.rules import (
    CHUNKS,
    ENDS,
    GRID,
    LAYER,
    LAYER_BATCH,
    PLAN,
    STAGE,
    VOCABULARY_GRID,
    WIDTHS,
    Notice,
    broken,
)

PipelineType = Schedule
ZeroDefault = Literal["ddp", "zero1", "zero2"]
"""States that data-parallel ranks shard without ZeRO-3: none, optimizer, or also gradients."""
ZERO_DEFAULTS: tuple[ZeroDefault, ...] = ("ddp", "zero1", "zero2")
"""Values of `ZeroDefault` by ZeRO stage, 0 to 2."""
Module = Literal[
    "core_attn",
    "gdn_norm_out",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "moe_act",
    "shared_experts",
]
"""Modules of selective recomputation, named as in Megatron-Core."""


class LayerStrategy(Record, checked=True):
    """Parallelism of one layer; the data-parallel degree follows from world, stages, tp and cp.

    Strategies are ordered by their fields in turn. This canonical order breaks ties between equally
    fast plans.
    """

    tp: Positive = 1
    """Tensor degree: Megatron tensor parallelism, or Ulysses sequence parallelism."""
    ulysses: bool = False
    cp: Positive = 1
    """Context (ring attention) degree."""
    zero3: bool = False
    checkpoint: bool = False
    strided: bool = False
    """True if the tensor group is ranks i, i+stride, ... instead of neighbours."""
    ep: Positive = 1
    """Expert degree: ranks of a stage over which the experts of the layer are distributed. The grid
    of experts (`expert_tp` * ep * edp) and that of other weights (tp * cp * dp) share only the
    stage. So these ranks may belong to different tensor, context and data groups."""
    etp: Positive | None = None
    """Expert tensor degree; None: `tp` without expert parallelism, 1 with it."""
    recompute: tuple[Module, ...] = ()
    """Recomputed modules, sorted; empty with `checkpoint`, which recomputes the whole layer.
    Modules that the layer does not contain have no effect."""

    def __lt__(self, other: LayerStrategy) -> bool:
        """Return True if this strategy sorts before `other`; an `etp` of None sorts first."""
        return self._place < other._place

    @property
    def _place(self) -> tuple[object, ...]:
        given = (self.tp, self.ulysses, self.cp, self.zero3, self.checkpoint, self.strided)
        return (*given, self.ep, self.etp or 0, self.recompute)

    @property
    def expert_tp(self) -> int:
        """Number of tensor ranks per expert."""
        if self.etp is not None:
            return self.etp
        # Ulysses splits no weights.
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
        # With a single rank to reduce over, the default shards nothing.
        elif default_dp != "ddp" and (data_degree > 1 or self.ulysses or self.cp > 1):
            parts.append(default_dp)
        if self.checkpoint:
            parts.append("ckpt")
        if self.recompute:
            parts.append("+".join(self.recompute))
        return "-".join(parts)


class VocabStrategy(Record, checked=True, order=True):
    """Parallelism of embedding, head and loss."""

    tp: Positive = 1
    ulysses: bool = False
    zero3: bool = False
    cp: Positive = 1
    """Context degree; embedding, head and loss process the tokens of the rank's two pieces."""

    def as_layer(self) -> LayerStrategy:
        """Return the strategy of a layer that is split like embedding and head."""
        return LayerStrategy(tp=self.tp, ulysses=self.ulysses, cp=self.cp, zero3=self.zero3)


class Plan(Record, checked=True):
    """Per-layer plan: one strategy per layer, pipeline stages, schedule and batch."""

    world_size: Positive
    num_stages: Positive
    stage_sizes: tuple[int, ...]
    """Layers per stage; the sum is the number of layers."""
    layers: tuple[LayerStrategy, ...]
    vocab: VocabStrategy
    global_batch: Positive
    num_microbatches: Positive
    pipeline_type: PipelineType = "1f1b"
    default_dp_type: ZeroDefault = "ddp"
    """ZeRO stage of layers without ZeRO-3."""
    num_chunks: Positive = 1
    """Virtual pipeline size: model chunks per stage."""
    chunk_sizes: tuple[int, ...] = ()
    """Layers of every chunk in execution order; empty if the layers of a stage are divided
    evenly."""

    @property
    def beyond(self) -> tuple[str, ...]:
        """Settings that only uniform plans have, in words; a per-layer plan has none."""
        return ()

    @property
    def chunks(self) -> tuple[int, ...]:
        """Layers of every chunk in execution order; with one chunk per stage, the stage sizes."""
        if self.chunk_sizes or self.num_chunks == 1:
            return self.chunk_sizes or self.stage_sizes
        return tuple(
            self.stage_sizes[stage] // self.num_chunks
            for stage in map(self.stage_of_chunk, range(self.num_stages * self.num_chunks))
        )

    def stage_of_chunk(self, chunk: int) -> int:
        """Return the stage of a model chunk; V-shaped schedules reverse every second round."""
        return rank_of(self.pipeline_type, chunk, self.num_stages)

    def data_degree(self, layer: int) -> int:
        """Return the data-parallel degree of a layer; 0 if its degrees do not divide the stage."""
        strategy = self.layers[layer]
        return data_degree(self.world_size, self.num_stages, strategy.tp * strategy.cp)

    @property
    def micro_batch(self) -> int:
        """Samples per micro-batch on one data-parallel rank of the first layer."""
        return self.global_batch // (self.num_microbatches * self.data_degree(0))

    def stage_of_layer(self) -> tuple[int, ...]:
        """Return the stage index of every layer."""
        if self.num_chunks == 1:
            return tuple(j for j, n in enumerate(self.stage_sizes) for _ in range(n))
        chunks = enumerate(self.chunks)
        return tuple(self.stage_of_chunk(k) for k, n in chunks for _ in range(n))


class LayerRun(Record):
    """Predicted time and memory of consecutive layers of one stage with equal type and strategy."""

    first_layer: int
    num_layers: int
    layer_type: int
    label: str
    """Short name of the strategy, e.g. `tp4-dp2-zero3-ckpt`."""
    time_s: Mapping[str, float]
    """Seconds of one micro-batch by category (forward, backward, recompute, tp, ulysses, cp, zero3,
    redistribution), and per step `tail` and `optimizer`; sums over all layers."""
    memory_bytes: Mapping[str, float]
    """Bytes by category (states, activations, backward, transient, shared) on this stage. Backward
    and transient are those of one layer; their largest sum is the `transient` of the stage."""


class StagePrediction(Record):
    """Predicted time and memory of one pipeline stage."""

    stage: int
    forward_s: float
    """Seconds of one micro-batch, with redistribution and vocabulary layers, without transfers."""
    backward_s: float
    send_s: float
    """Seconds to send one micro-batch's activation to the next stage (0 for the last)."""
    tail_s: float
    """Exposed seconds per step of gradient reduction, parameter all-gather and optimizer."""
    allocated_bytes: int
    reserved_bytes: int
    budget_bytes: int
    odds_of_oom: float
    """Probability that a device with this budget runs out of memory, 0 to 1."""
    in_flight: int
    """Peak number of live micro-batches; those of a part of the chunks are rounded up together."""
    memory_bytes: Mapping[str, int]
    """Bytes by category (states, activations, vocab_states, vocab_activations, transient, shared,
    fixed); the sum is `allocated_bytes`."""
    time_s: Mapping[str, float]
    """Seconds of one micro-batch by category, vocabulary layers as `vocab`; the sum is `forward_s +
    backward_s`."""
    runs: tuple[LayerRun, ...] = ()


class WidestCell(Record):
    """Measured time that contributes most to the variance of the step time."""

    name: str
    """Name in plain words, e.g. `backward of layer type 0, batch 4, sequence length 2048`."""
    share: float
    """Fraction of the step-time variance due to computation that this time causes, 0 to 1."""


PUBLISHED_RUNS = "published runs"
"""Basis of an interval: errors of estimates against published runs."""


class Prediction(Record):
    """Predicted step time (the objective) and memory of a plan, with the step time of a replay."""

    step_time_s: float
    samples_per_s: float
    replay_s: float
    stages: tuple[StagePrediction, ...]
    legal: bool
    fits: bool
    problems: tuple[str, ...] = ()
    """Reasons why the plan is illegal or does not fit, each with its arithmetic."""
    waterfall_s: Mapping[str, float] = field(default_factory=dict)
    """Step time split into named parts, seconds; the sum is `step_time_s`."""
    step_time_interval_s: tuple[float, float] | None = None
    """Step times in seconds with all communication at its 5th and at its 95th percentile, widened
    by the spread of computation; None if no spread was measured."""
    interval_of: tuple[str, ...] = ("communication",)
    """Basis of the interval: measured spread of communication, computation or both, or
    `PUBLISHED_RUNS` if nothing was measured here."""
    widest_cell: WidestCell | None = None
    """The measurement of computation to repeat first; None if computation has no measured
    spread."""


class Infeasibility(Record):
    """Reason why no plan fits: the plan nearest to fitting and its missing memory."""

    stage: int
    num_stages: int
    missing_bytes: int
    smallest_budget_bytes: int
    """Memory budget per GPU in which the plan with the smallest peak fits, bytes; 0 if unknown."""
    reason: str


# --------------------------------------------------------------------------------------------------
# Legality: every rule, each violation with its arithmetic.


def data_degree(world_size: int, num_stages: int, group: int) -> int:
    """Return the data-parallel degree, world_size / (num_stages * group), or 0.

    group : tensor degree times context degree

    The result is 0 if the division has a remainder.
    """
    degree, rest = divmod(world_size, num_stages * group)
    return 0 if rest else degree


def fewest_microbatches(pipeline_type: PipelineType, num_stages: int) -> int:
    """Return the smallest number of micro-batches that a schedule needs."""
    # All forwards precede all backwards, whatever the number of micro-batches.
    if pipeline_type in ("gpipe", "looped_bfs"):
        return 1
    # It fills a pipeline of 2p chunks from one end (torch's ScheduleDualPipeV).
    if pipeline_type == "dual_pipe_v":
        return 2 * num_stages
    # The first stage of 1F1B holds p micro-batches before the first backward arrives.
    return num_stages


def tensor_degrees(layer: LayerSpec) -> tuple[int, ...]:
    """Return the tensor degrees that the widths of a layer allow; only 1 if heads are unknown."""
    degrees = range(1, (layer.num_heads or 1) + 1)
    return tuple(t for t in degrees if not broken(WIDTHS, _widths(layer, t)))


def _widths(
    layer: LayerSpec, degree: int, *, ulysses: bool = False, heads_only: bool = False
) -> dict[str, Any]:
    """Return the sizes of a layer that `degree` ranks split; unknown sizes break no rule.

    ulysses : True if `degree` is a Ulysses degree, which splits heads and not the MLP
    heads_only : True if the MLP consists of experts with a separate tensor degree
    """
    return {
        "heads": layer.num_heads,
        "kv_heads": layer.num_kv_heads,
        "ffn_hidden_size": None if heads_only else layer.ffn_hidden_size,
        "shared_expert_width": layer.shared_expert_width,
        "tp": 1 if ulysses else degree,
        "ulysses": degree if ulysses else 1,
    }


def layer_problems(
    layer: LayerSpec, strategy: LayerStrategy, *, sequence_parallel: bool
) -> tuple[Notice, ...]:
    """Return one notice per rule that a strategy breaks for a layer of this shape."""
    own_grid = layer.num_experts is not None and (strategy.ep > 1 or strategy.etp is not None)
    values = _widths(layer, strategy.tp, ulysses=strategy.ulysses, heads_only=own_grid)
    given = strategy.etp is not None
    return broken(
        LAYER,
        {
            **values,
            "cp": strategy.cp,
            "ep": strategy.ep,
            "experts": layer.num_experts or 0,
            # A degree of None breaks no rule.
            "etp": strategy.etp,
            "expert_width": layer.ffn_hidden_size if layer.num_experts and given else None,
            "seq_length": layer.seq_length,
            "sequence_parallel": sequence_parallel,
            "checkpoint": strategy.checkpoint,
            "recomputed": "+".join(strategy.recompute),
        },
    )


def vocab_problems(
    spec: ModelSpec, vocab: VocabStrategy, *, sequence_parallel: bool
) -> tuple[Notice, ...]:
    """Return one notice per rule that a strategy of embedding and head breaks."""
    degrees = {
        "vtp": 1 if vocab.ulysses else vocab.tp,
        "vsp": vocab.tp if vocab.ulysses else 1,
        "vcp": vocab.cp,
        "sequence_parallel": sequence_parallel,
    }
    lengths = sorted({layer.seq_length for layer in spec.layers})
    return tuple(one for s in lengths for one in broken(ENDS, {**degrees, "seq_length": s}))


def violations(plan: Plan, spec: ModelSpec, *, sequence_parallel: bool) -> tuple[str, ...]:
    """Return one sentence per broken rule, empty for a legal plan; see `plan_notices`."""
    found = plan_notices(plan, spec, sequence_parallel=sequence_parallel)
    return tuple(one.text for one in found)


def plan_notices(plan: Plan, spec: ModelSpec, *, sequence_parallel: bool) -> tuple[Notice, ...]:
    """Return one notice per broken rule; notices of layers name the layers.

    Parameters
    ----------
    sequence_parallel : True if tensor-parallel layers use Megatron sequence parallelism, which
        shards the sequence and so restricts the tensor degree
    """
    found = [*_structure(plan, spec)]
    shape_known = len(plan.layers) == spec.num_layers
    # Layers that differ only in other settings, such as checkpointing, share a notice.
    where: dict[tuple[object, ...], tuple[Notice, list[tuple[int, int]]]] = {}
    for first, last, kind, strategy in _runs(plan, spec):
        notices = [*_ranks(plan, strategy)]
        # With another number of layers, the layer type of a strategy is unknown.
        if shape_known:
            layer = spec.layers[kind]
            notices += layer_problems(layer, strategy, sequence_parallel=sequence_parallel)
        for one in notices:
            _, ranges = where.setdefault(one.key, (one, []))
            # Adjacent runs are printed as one range.
            if ranges and ranges[-1][1] == first - 1:
                ranges[-1] = (ranges[-1][0], last)
            else:
                ranges.append((first, last))
    found += (_placed(one, _layers(ranges)) for one, ranges in where.values())
    ends = {"world": plan.world_size, "pp": plan.num_stages, "vtp": plan.vocab.tp}
    ends["vcp"] = plan.vocab.cp
    degree = data_degree(plan.world_size, plan.num_stages, plan.vocab.tp * plan.vocab.cp)
    found += (
        _placed(one, "embedding and head")
        for one in (
            *broken(VOCABULARY_GRID, ends),
            *_samples(plan, degree),
            *vocab_problems(spec, plan.vocab, sequence_parallel=sequence_parallel),
        )
    )
    return tuple(found)


def _placed(one: Notice, where: str) -> Notice:
    return replace(one, problem=f"{where}: {one.problem}", values={"where": where, **one.values})


def _layers(ranges: list[tuple[int, int]]) -> str:
    """Return ranges of layers as text."""
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return ("layer " if one else "layers ") + ", ".join(shown)


def _structure(plan: Plan, spec: ModelSpec) -> Iterator[Notice]:
    p, v, num_layers = plan.num_stages, plan.num_chunks, len(plan.layers)
    facts = SCHEDULES[plan.pipeline_type]
    # Beyond 16 stages the written sum would be too long to help.
    terms = " + ".join(map(str, plan.stage_sizes)) if p <= 16 else "sum of pp_division"
    yield from broken(
        PLAN,
        {
            "world": plan.world_size,
            "pp": p,
            "vpp": v,
            "schedule": plan.pipeline_type,
            "micro_batches": plan.num_microbatches,
            "global_batch": plan.global_batch,
            "fewest": fewest_microbatches(plan.pipeline_type, p),
            "least_chunks": facts.least_chunks,
            "most_chunks": facts.most_chunks,
            "plan_layers": num_layers,
            "layers": spec.num_layers,
            "model": spec.name,
            "stage_entries": len(plan.stage_sizes),
            "stage_terms": terms,
            "stage_sum": sum(plan.stage_sizes),
        },
    )
    whole = len(plan.chunk_sizes) == p * v
    laid = v >= 1 and len(plan.stage_sizes) == p
    if laid and plan.chunk_sizes:
        entries = {"chunk_entries": len(plan.chunk_sizes), "pp": p, "vpp": v}
        yield from broken(CHUNKS, entries)
        for chunk, size in enumerate(plan.chunk_sizes) if whole else ():
            yield from broken(CHUNKS, {"chunk": chunk, "chunk_size": size})
    held: list[int | None] = [None] * len(plan.stage_sizes)
    if laid and plan.chunk_sizes and whole:
        held = [0] * p
        for chunk, size in enumerate(plan.chunk_sizes):
            stage = plan.stage_of_chunk(chunk)
            held[stage] = (held[stage] or 0) + size
    for stage, size in enumerate(plan.stage_sizes):
        values = {"stage": stage, "stage_layers": size, "chunk_layers": held[stage]}
        values["even_chunks"] = v if laid and not plan.chunk_sizes else None
        yield from broken(STAGE, values)


def refinements(plan: Plan) -> tuple[str, ...]:
    """Return descriptions of the features of a plan that some engines and file formats lack.

    Tensor, context, data and pipeline degrees, ZeRO-2 and ZeRO-3, full recomputation, 1F1B and
    GPipe are basic features and not listed. Code that supports only basic features raises errors
    with these descriptions.
    """
    layers = plan.layers
    found = [f"expert degree {e}" for e in sorted({s.ep for s in layers} - {1})]
    given = {s.etp for s in layers if s.etp is not None}
    found += [f"expert tensor degree {t}" for t in sorted(given)]
    modules = sorted({module for s in layers for module in s.recompute})
    found += [f"recomputation of {', '.join(modules)}"] if modules else []
    found += [f"context degree {plan.vocab.cp} of embedding and head"] if plan.vocab.cp > 1 else []
    found += ["ZeRO-1"] if plan.default_dp_type == "zero1" else []
    # GPipe and 1F1B have one chunk per stage.
    if plan.pipeline_type not in ("1f1b", "gpipe"):
        found.append(f"schedule {plan.pipeline_type}")
    found += [f"{plan.num_chunks} chunks a stage"] if plan.num_chunks > 1 else []
    return (*found, *plan.beyond)


def _runs(plan: Plan, spec: ModelSpec) -> Iterator[tuple[int, int, int, LayerStrategy]]:
    """Yield (first, last, layer type, strategy) for each run of consecutive equal layers."""
    types = spec.layer_types
    keys = [
        (types[i] if i < len(types) else -1, strategy) for i, strategy in enumerate(plan.layers)
    ]
    first = 0
    for (kind, strategy), group in groupby(keys):
        count = len(list(group))
        yield first, first + count - 1, kind, strategy
        first += count


def _ranks(plan: Plan, strategy: LayerStrategy) -> Iterator[Notice]:
    """Yield notices if degrees do not divide the ranks, or ranks the samples of a micro-batch.

    Expert degrees are checked in the same way, separately from tensor and context degrees.
    """
    t, c, p = strategy.tp, strategy.cp, plan.num_stages
    own = strategy.ep > 1 or strategy.etp is not None
    grid = {"world": plan.world_size, "tp": t, "cp": c, "pp": p}
    if own:
        grid |= {"ep": strategy.ep, "etp": strategy.expert_tp}
    yield from broken(GRID, grid)
    yield from _samples(plan, data_degree(plan.world_size, p, t * c))


def _samples(plan: Plan, data: int) -> tuple[Notice, ...]:
    """Return a notice if the samples of a micro-batch are not a multiple of `data` ranks."""
    values = {"micro_batches": plan.num_microbatches, "global_batch": plan.global_batch, "dp": data}
    return broken(LAYER_BATCH, values)

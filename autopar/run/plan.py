"""Plan: a strategy for every layer, the stages and the batch; and the prediction of one.

Rules of legality are rows of `autopar.run.rules`; `plan_notices` applies them to a plan, and the
search and the engines apply those that they need.
`autopar.documents.plan` reads and writes plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, Literal

from msgspec import field

from autopar.pipeline.orders import rank_of
from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.records import Record, replace
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


class Infeasibility(Record):
    """Why nothing fits: the plan nearest to fitting and what it lacks."""

    stage: int
    num_stages: int
    missing_bytes: int
    smallest_budget_bytes: int
    """The smallest memory constraint per GPU, in bytes, for which a plan exists (0: none)."""
    reason: str


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
) -> tuple[Notice, ...]:
    """Return why heads and MLP do not split over so many tensor ranks; unknown sizes always do.

    heads_only : where the MLP is experts, whose degree is another one.
    """
    return broken(WIDTHS, _widths(layer, degree, ulysses=ulysses, heads_only=heads_only))


def _widths(layer: LayerSpec, degree: int, *, ulysses: bool, heads_only: bool) -> dict[str, Any]:
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
    """Return why a layer of this shape cannot have a strategy."""
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
            # a degree that is not given divides nothing
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
    """Return why embedding and head cannot have a strategy."""
    degrees = {
        "vtp": 1 if vocab.ulysses else vocab.tp,
        "vsp": vocab.tp if vocab.ulysses else 1,
        "vcp": vocab.cp,
        "sequence_parallel": sequence_parallel,
    }
    lengths = sorted({layer.seq_length for layer in spec.layers})
    return tuple(one for s in lengths for one in broken(ENDS, {**degrees, "seq_length": s}))


def violations(plan: Plan, spec: ModelSpec, *, sequence_parallel: bool) -> tuple[str, ...]:
    """Return one sentence per broken rule, empty for a legal plan; parameters as `plan_notices`."""
    found = plan_notices(plan, spec, sequence_parallel=sequence_parallel)
    return tuple(one.text for one in found)


def plan_notices(plan: Plan, spec: ModelSpec, *, sequence_parallel: bool) -> tuple[Notice, ...]:
    """Return one notice per broken rule; those of layers name the layers.

    Parameters
    ----------
    sequence_parallel : whether tensor-parallel layers use Megatron sequence parallelism, which
        shards the sequence and so restricts the tensor degree.
    """
    found = [*_structure(plan, spec)]
    shape_known = len(plan.layers) == spec.num_layers
    # runs that differ in something else, such as checkpointing, share a notice
    where: dict[tuple[object, ...], tuple[Notice, list[tuple[int, int]]]] = {}
    for first, last, kind, strategy in _runs(plan, spec):
        notices = [*_ranks(plan, strategy)]
        # with another number of layers no strategy can be told its layer type
        if shape_known:
            layer = spec.layers[kind]
            notices += layer_problems(layer, strategy, sequence_parallel=sequence_parallel)
        for one in notices:
            _, ranges = where.setdefault(one.key, (one, []))
            # runs that touch read as one range
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
    return replace(one, text=f"{where}: {one.text}", values={"where": where, **one.values})


def _layers(ranges: list[tuple[int, int]]) -> str:
    """Return ranges of layers in words, the first four of them."""
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:4]]
    shown += ["..."] if len(ranges) > 4 else []
    one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return ("layer " if one else "layers ") + ", ".join(shown)


def _structure(plan: Plan, spec: ModelSpec) -> Iterator[Notice]:
    p, v, num_layers = plan.num_stages, plan.num_chunks, len(plan.layers)
    facts = SCHEDULES[plan.pipeline_type]
    # beyond 16 stages the sum written out is longer than what it proves
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


def _ranks(plan: Plan, strategy: LayerStrategy) -> Iterator[Notice]:
    """Yield where degrees do not fill a stage, or ranks get no whole samples.

    Experts fill the stage by a grid of their own.
    """
    t, c, p = strategy.tp, strategy.cp, plan.num_stages
    own = strategy.ep > 1 or strategy.etp is not None
    grid = {"world": plan.world_size, "tp": t, "cp": c, "pp": p}
    if own:
        grid |= {"ep": strategy.ep, "etp": strategy.expert_tp}
    yield from broken(GRID, grid)
    yield from _samples(plan, data_degree(plan.world_size, p, t * c))


def _samples(plan: Plan, data: int) -> tuple[Notice, ...]:
    """Return where data ranks get no whole samples of a micro-batch."""
    values = {"micro_batches": plan.num_microbatches, "global_batch": plan.global_batch, "dp": data}
    return broken(LAYER_BATCH, values)

"""How a model is split: degrees of every layer, pipeline stages, schedule and batch.

A uniform plan has one `SplitGroup`, a per-layer plan several. Which combinations are legal is a
matter of the rules, not of these types.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any, Literal, NamedTuple, get_args

from autopar.errors import InputError
from autopar.pipeline.orders import rank_of
from autopar.pipeline.schedules import Schedule
from autopar.records import Record, replace
from autopar.run.plan import Module
from autopar.run.rules import EVEN_LAYERS, refuse
from autopar.run.runtime import Zero

OffloadModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"
]
"""Of which what autograd saves goes to the host, in Megatron-Core's words
(docs/user-guide/features/fine_grained_activation_offloading.md)."""
OFFLOADED: tuple[OffloadModule, ...] = get_args(OffloadModule)
TensorKind = Literal["megatron", "ulysses"]
"""Ranks of a tensor group split weights (Megatron), or tokens and heads (DeepSpeed Ulysses)."""
ContextKind = Literal["ring", "all-gather", "a2a"]
"""Context ranks pass keys and values on, gather them, or exchange heads for tokens (Ulysses)."""
Recomputation = frozenset[Module] | Literal["full", "op"]
"""Recomputed in the backward pass: modules of a layer (none: empty), the whole layer, or all but
attention and every other GEMM (torchtitan's selective `op`)."""


class Split(Record):
    """Degrees of one layer and its memory savings; the data degree follows from the GPUs."""

    tp: int = 1
    """Tensor degree."""
    tp_kind: TensorKind = "megatron"
    strided: bool = False
    """True if a tensor group is ranks i, i + stride, ... instead of neighbours."""
    sequence_parallel: bool = False
    """True if tensor ranks hold parts of the sequence between GEMMs (Megatron-LM)."""
    cp: int = 1
    """Context degree."""
    cp_kind: ContextKind = "ring"
    rings: int = 1
    """Rings of context ranks, where ranks exchange heads inside groups of `cp / rings`."""
    ep: int = 1
    """Expert degree."""
    etp: int = 1
    """Expert tensor degree."""
    zero: Zero = 0
    """Sharded over data ranks: 0 nothing, 1 optimizer, 2 gradients, 3 weights as well."""
    replicas: int = 1
    """Copies of the sharded states (HSDP, instances of a distributed optimizer)."""
    recompute: Recomputation = frozenset()
    recompute_unit: int = 1
    """Layers that are one unit of full recomputation (`--recompute-method uniform`)."""
    offload: frozenset[OffloadModule] = frozenset()
    """Modules whose saved activations are in host memory."""
    low_precision: bool = True
    """False: computed in 16 bits, whatever the precision of the run."""

    @property
    def scattered(self) -> bool:
        """True if tensor ranks hold parts of the sequence between GEMMs."""
        return self.sequence_parallel and self.tp > 1

    @property
    def modules(self) -> frozenset[Module]:
        """Modules that are recomputed; none where the whole layer is, or torchtitan's `op`."""
        return self.recompute if isinstance(self.recompute, frozenset) else frozenset()

    @property
    def exchanges_heads(self) -> bool:
        """True if context ranks exchange heads for tokens."""
        return self.cp_kind == "a2a"

    @property
    def gathers_keys(self) -> bool:
        """True if context ranks gather keys and values."""
        return self.cp_kind == "all-gather"


class SplitGroup(Record):
    """Consecutive layers that are split alike."""

    count: int
    split: Split


class Chunk(NamedTuple):
    """A model chunk: consecutive layers that a pipeline stage runs as one."""

    embeds: bool
    layers: tuple[int, ...]
    """Numbers of the layers, counted from 0."""
    mtp: int
    """Multi-token prediction layers."""
    head: bool


class Strategy(Record, dict=True):
    """The parallel strategy of a training run."""

    gpus: int
    layers: tuple[SplitGroup, ...]
    """Splits of all layers in execution order."""
    ends: Split
    """Split of embedding, head and loss."""
    stages: tuple[tuple[Chunk, ...], ...]
    """Model chunks of every pipeline stage."""
    schedule: Schedule = "1f1b"
    group: int = 0
    """Micro-batches of a chunk that run in a row; 0: as many as stages."""
    micro_batch: int
    """Sequences of a micro-batch on one data rank of the first layer."""
    global_batch: int
    """Sequences of a step."""

    @cached_property
    def each_layer(self) -> tuple[Split, ...]:
        """Splits of all layers in execution order."""
        return tuple(group.split for group in self.layers for _ in range(group.count))

    @property
    def uniform(self) -> bool:
        """True if all layers are split alike."""
        return len(self.layers) == 1

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return sum(group.count for group in self.layers)

    @property
    def first(self) -> Split:
        """Split of the first layer."""
        return self.layers[0].split

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return len(self.stages)

    @property
    def vpp(self) -> int:
        """Virtual pipeline size: model chunks of a stage."""
        return len(self.stages[0])

    @property
    def dp(self) -> int:
        """Data degree of the first layer; 0 where degrees do not divide the GPUs of a stage."""
        return data_degree(self, self.first)

    @property
    def edp(self) -> int:
        """Replicas of the experts of the first layer; 0 where degrees do not divide."""
        return _degree(self.gpus, self.pp * self.first.ep * self.first.etp)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step in one pipeline; 0 where the batch has none."""
        return self.global_batch // (self.micro_batch * self.dp) if self.dp else 0

    @cached_property
    def recomputed(self) -> Recomputed:
        """What the layers of every chunk recompute; InputError where chunks differ in it."""
        return _recomputed(self)


class Recomputed(NamedTuple):
    """Recomputation of a run whose chunks are alike in it."""

    kind: Literal["none", "modules", "op", "full", "block", "every"]
    """`block` is the first `number` layers of a chunk, `every` every `number`-th layer of one."""
    number: int = 0
    """With `full` the layers of a unit."""
    modules: frozenset[Module] = frozenset()
    """Modules of the layers that are not recomputed whole."""


def _recomputed(strategy: Strategy) -> Recomputed:
    splits = strategy.each_layer
    kinds = {group.split.recompute for group in strategy.layers}
    if kinds == {"op"}:
        return Recomputed("op")
    if kinds == {"full"}:
        return Recomputed("full", strategy.first.recompute_unit)
    modules = [one for one in kinds if isinstance(one, frozenset)]
    if len(modules) == 1 and len(kinds) == 1:
        return Recomputed("modules" if modules[0] else "none", 0, modules[0])
    chunks = [
        tuple(splits[layer].recompute == "full" for layer in chunk.layers)
        for stage in strategy.stages
        for chunk in stage
    ]
    if len(modules) == 1 and "op" not in kinds:
        number = max(map(sum, chunks))
        if all(
            chunk == (True,) * min(number, len(chunk)) + (False,) * (len(chunk) - number)
            for chunk in chunks
        ):
            return Recomputed("block", number, modules[0])
        for every in range(2, max(map(len, chunks)) + 1):
            if all(
                whole == ((place + 1) % every == 0)
                for chunk in chunks
                for place, whole in enumerate(chunk)
            ):
                return Recomputed("every", every, modules[0])
    raise InputError(
        "recomputed are neither the first layers of every chunk nor every n-th, alike in all"
    )


def recomputing(
    strategy: Strategy,
    recompute: Recomputation,
    *,
    unit: int = 1,
    first: int | None = None,
    every: int | None = None,
    others: Recomputation = frozenset(),
) -> Strategy:
    """Return a strategy whose layers recompute otherwise.

    unit : layers of a unit of full recomputation. first, every : of each chunk the first so many
    layers, or every so-manieth one; the rest recompute `others`. None: all layers.
    """
    chosen = {
        layer
        for stage in strategy.stages
        for chunk in stage
        for place, layer in enumerate(chunk.layers)
        if (first is None or place < first) and (every is None or (place + 1) % every == 0)
    }
    if first is None and every is None:
        groups = tuple(
            replace(group, split=replace(group.split, recompute=recompute, recompute_unit=unit))
            for group in strategy.layers
        )
    else:
        # equal splits are one object, so that what is counted of one layer is counted once
        made: dict[tuple[int, bool], Split] = {}
        splits = []
        for layer, split in enumerate(strategy.each_layer):
            key = (id(split), layer in chosen)
            if key not in made:
                own, size = (recompute, unit) if key[1] else (others, 1)
                made[key] = replace(split, recompute=own, recompute_unit=size)
            splits.append(made[key])
        groups = split_groups(splits)
    return replace(strategy, layers=merged(groups))


def merged(groups: Iterable[SplitGroup]) -> tuple[SplitGroup, ...]:
    """Return groups of which no two neighbours have the same split."""
    found: list[SplitGroup] = []
    for group in groups:
        if found and found[-1].split == group.split:
            found[-1] = SplitGroup(count=found[-1].count + group.count, split=group.split)
        else:
            found.append(group)
    return tuple(found)


_OF_ENDS = ("tp", "sequence_parallel", "cp", "cp_kind", "rings", "zero", "replicas")
"""Fields of a split that embedding and head of a uniform plan share with its layers."""


def resplit(strategy: Strategy, **fields: Any) -> Strategy:
    """Return a strategy whose layers have other values of some fields of `Split`.

    Embedding and head take those that concern them.
    """
    layers = merged(
        replace(group, split=replace(group.split, **fields)) for group in strategy.layers
    )
    ends = {name: value for name, value in fields.items() if name in _OF_ENDS}
    return replace(strategy, layers=layers, ends=replace(strategy.ends, **ends))


def relaid(
    strategy: Strategy, stages: tuple[tuple[Chunk, ...], ...], schedule: Schedule
) -> Strategy:
    """Return a strategy with other stages, of whose chunks as much is recomputed as before."""
    kind, number, modules = strategy.recomputed
    own = replace(strategy, stages=stages, schedule=schedule)
    if kind not in ("block", "every"):
        return own
    first, every = (number, None) if kind == "block" else (None, number)
    return recomputing(own, "full", first=first, every=every, others=modules)


def uniform_layers(num_layers: int, split: Split) -> tuple[tuple[SplitGroup, ...], Split]:
    """Return the groups of layers that are split alike, and the split of embedding and head."""
    ends = Split(**{name: getattr(split, name) for name in _OF_ENDS})
    return (SplitGroup(count=num_layers, split=split),), ends


def with_wide_ends(strategy: Strategy, first: int, last: int) -> Strategy:
    """Return a uniform strategy whose first and last so many layers are computed in 16 bits."""
    layers, split = strategy.num_layers, strategy.first
    first = min(first, layers)
    last = min(last, layers - first)
    wide = replace(split, low_precision=False)
    counts = ((first, wide), (layers - first - last, split), (last, wide))
    groups = (SplitGroup(count=count, split=own) for count, own in counts if count)
    return replace(strategy, layers=merged(groups))


def wide_ends(strategy: Strategy) -> tuple[int, int]:
    """Return how many layers at the begin and at the end of a model are computed in 16 bits.

    Raises InputError where others are.
    """
    groups = [(group.split.low_precision, group.count) for group in strategy.layers]
    if all(low for low, _ in groups):
        return 0, 0
    low = [one for one, count in groups for _ in range(count)]
    if not any(low):
        # engines refuse more layers at an end than a stage has
        return (len(low) + 1) // 2, len(low) // 2
    first = len([*takewhile(lambda one: not one, low)])
    last = len([*takewhile(lambda one: not one, reversed(low))])
    if low != [False] * first + [True] * (len(low) - first - last) + [False] * last:
        raise InputError("layers in 16 bits are at the ends of a model alone")
    return first, last


def data_degree(strategy: Strategy, split: Split) -> int:
    """Return the data degree of layers that are split so, 0 where degrees do not divide."""
    return _degree(strategy.gpus, strategy.pp * split.tp * split.cp)


def _degree(gpus: int, others: int) -> int:
    return 0 if gpus % others else gpus // others


def split_groups(splits: Iterable[Split]) -> tuple[SplitGroup, ...]:
    """Return splits of consecutive layers as groups of equal ones."""
    return tuple(SplitGroup(count=len(list(run)), split=split) for split, run in groupby(splits))


# --------------------------------------------------------------------------------------------------
# Layouts


def even_chunks(
    num_layers: int,
    stages: int,
    chunks: int = 1,
    *,
    mtp: int = 0,
    ends: tuple[int, int] = (0, 0),
    schedule: Schedule | None = None,
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage with layers as evenly as an interleaved pipeline has them.

    ends : how many layers fewer the first and the last chunk have than the others, such as 1 where
    the embedding counts as a layer. schedule : as `chunks_of_sizes`. Raises InputError where layers
    do not divide.
    """
    parts = stages * chunks
    total = num_layers + sum(ends)
    refuse((EVEN_LAYERS,), {"layers": total, "pp": stages, "vpp": chunks})
    sizes = [total // parts] * parts
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    if min(sizes) < 0:
        raise InputError(f"{num_layers} layers are too few for {parts} parts of the pipeline")
    return chunks_of_sizes(sizes, stages, mtp=mtp, schedule=schedule)


def chunks_of_sizes(
    sizes: Sequence[int],
    stages: int,
    *,
    mtp: int | Sequence[int] = 0,
    schedule: Schedule | None = None,
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage from the layers of all parts in execution order.

    mtp : MTP layers of the last part, or of each. schedule : places the parts on the stages; None:
    one after the other, and again from the first.
    """
    parts = len(sizes)
    found: list[list[Chunk]] = [[] for _ in range(stages)]
    first = 0
    for part, size in enumerate(sizes):
        layers = tuple(range(first, first + size))
        first += size
        last = part == parts - 1
        stage = part % stages if schedule is None else rank_of(schedule, part, stages)
        further = (mtp if last else 0) if isinstance(mtp, int) else mtp[part]
        found[stage].append(Chunk(part == 0, layers, further, last))
    return tuple(map(tuple, found))

"""Parallel strategy of a run: degrees of every layer, pipeline stages, schedule and batch.

A uniform plan has one `SplitGroup`, a per-layer plan several. These types also represent illegal
combinations; `autopar.run.rules` rejects them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import groupby, takewhile
from typing import Annotated, Any, Literal, NamedTuple, get_args

from msgspec import Meta

from autopar.errors import InputError
from autopar.pipeline.orders import rank_of
from autopar.pipeline.schedules import Schedule
from autopar.records import Count, Few, Positive, Record, replace
from autopar.run.plan import Module
from autopar.run.rules import EVEN_LAYERS, refuse
from autopar.run.runtime import Zero

OffloadModule = Literal[
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"
]
"""Modules whose saved activations are offloaded, named as in Megatron-Core
(docs/user-guide/features/fine_grained_activation_offloading.md)."""
OFFLOADED: tuple[OffloadModule, ...] = get_args(OffloadModule)
TensorKind = Literal["megatron", "ulysses"]
"""Tensor ranks split weights (Megatron), or tokens and heads (DeepSpeed Ulysses)."""
ContextKind = Literal["ring", "all-gather", "a2a"]
"""Context-parallel communication: ring attention, all-gather of keys and values, or all-to-all
(Ulysses)."""
Recomputation = frozenset[Module] | Literal["full", "op"]
"""Parts recomputed in the backward pass: modules of a layer (empty for none), the whole layer
(`full`), or everything except attention and every second GEMM (`op`, torchtitan)."""


_SOME = Meta(min_length=1)


class Split(Record):
    """Degrees and memory savings of one layer; the data-parallel degree follows from the GPUs."""

    tp: Positive = 1
    """Tensor degree."""
    tp_kind: TensorKind = "megatron"
    strided: bool = False
    """True if a tensor group is ranks i, i + stride, ... instead of neighbours."""
    sequence_parallel: bool = False
    """True with sequence parallelism (Megatron-LM): tensor ranks split the sequence between
    GEMMs."""
    cp: Positive = 1
    """Context degree."""
    cp_kind: ContextKind = "ring"
    rings: Positive = 1
    """Ring size if context parallelism combines ring attention with all-to-all in groups of
    `cp / rings` ranks; 1 for no combination."""
    ep: Positive = 1
    """Expert degree."""
    etp: Positive = 1
    """Expert tensor degree."""
    zero: Zero = 0
    """ZeRO stage: data-parallel ranks shard nothing (0), optimizer (1), gradients (2), weights
    (3)."""
    replicas: Positive = 1
    """Number of HSDP replicas, or of distributed-optimizer instances."""
    recompute: Recomputation = frozenset()
    recompute_unit: Positive = 1
    """Layers per unit of full recomputation (`--recompute-method uniform`)."""
    offload: frozenset[OffloadModule] = frozenset()
    """Modules whose saved activations are in host memory."""
    low_precision: bool = True
    """False if the layer computes in 16 bits, whatever the precision of the run."""

    @property
    def splits_sequence(self) -> bool:
        """True if tensor ranks split the sequence between GEMMs (sequence parallelism)."""
        return self.sequence_parallel and self.tp > 1

    @property
    def modules(self) -> frozenset[Module]:
        """Recomputed modules; empty if the whole layer is recomputed, or with torchtitan's `op`."""
        return self.recompute if isinstance(self.recompute, frozenset) else frozenset()

    @property
    def exchanges_heads(self) -> bool:
        """True if context ranks exchange heads for tokens (Ulysses)."""
        return self.cp_kind == "a2a"

    @property
    def gathers_keys(self) -> bool:
        """True if context ranks all-gather keys and values."""
        return self.cp_kind == "all-gather"


class SplitGroup(Record):
    """Consecutive layers with the same split."""

    count: Positive
    split: Split


class Chunk(NamedTuple):
    """A model chunk: consecutive layers that a pipeline stage runs as one unit."""

    embeds: bool
    layers: tuple[Count, ...]
    """Layer indices, from 0."""
    mtp: Few
    """Number of multi-token prediction (MTP) layers."""
    head: bool


class Strategy(Record, dict=True):
    """The parallel strategy of a training run."""

    gpus: Positive
    layers: Annotated[tuple[SplitGroup, ...], _SOME]
    """Splits of all layers in execution order."""
    ends: Split
    """Split of embedding, head and loss."""
    stages: Annotated[tuple[Annotated[tuple[Chunk, ...], _SOME], ...], _SOME]
    """Model chunks of every pipeline stage."""
    schedule: Schedule = "1f1b"
    group: Count = 0
    """Consecutive micro-batches of one chunk; 0 for the number of stages."""
    micro_batch: Positive
    """Sequences per micro-batch on one data-parallel rank of the first layer."""
    global_batch: Positive
    """Global batch size, sequences per step."""

    @cached_property
    def each_layer(self) -> tuple[Split, ...]:
        """Splits of all layers in execution order."""
        return tuple(group.split for group in self.layers for _ in range(group.count))

    @property
    def uniform(self) -> bool:
        """True if all layers have the same split."""
        return len(self.layers) == 1

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""
        return sum(group.count for group in self.layers)

    @property
    def first(self) -> Split:
        """Split of the first layer."""
        return self.layers[0].split

    @property
    def pp(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages)

    @property
    def vpp(self) -> int:
        """Virtual pipeline size: model chunks per stage."""
        return len(self.stages[0])

    @property
    def dp(self) -> int:
        """Data-parallel degree of the first layer; 0 if degrees do not divide the GPUs."""
        return data_degree(self, self.first)

    @property
    def edp(self) -> int:
        """Number of replicas of the first layer's experts; 0 if degrees do not divide the GPUs."""
        return _degree(self.gpus, self.pp * self.first.ep * self.first.etp)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step in one pipeline; 0 if the batch is too small or dp is 0."""
        return self.global_batch // (self.micro_batch * self.dp) if self.dp else 0

    @cached_property
    def recomputed(self) -> Recomputed:
        """Recomputation policy of every chunk; raises InputError if chunks differ in it."""
        return _recomputed(self)


class Recomputed(NamedTuple):
    """Recomputation policy that all chunks of a run share."""

    kind: Literal["none", "modules", "op", "full", "block", "every"]
    """`block`: the first `number` layers of a chunk; `every`: every `number`-th layer of a
    chunk."""
    number: int = 0
    """Number of layers for `block` and `every`; layers per unit for `full`."""
    modules: frozenset[Module] = frozenset()
    """Recomputed modules of the layers without full recomputation."""


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
        "recomputed layers must be the first n of every chunk or every n-th layer, "
        "with one n for all chunks"
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
    """Return a strategy with `recompute` in all layers, or in the selected layers of each chunk.

    Parameters
    ----------
    unit : layers per unit of full recomputation
    first : select only the first `first` layers of each chunk; None: no limit
    every : select only every `every`-th layer of each chunk; None: all
    others : recomputation of the layers that are not selected
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
        # Equal splits are one object, so that results for one layer can be reused by identity.
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
    """Return groups with adjacent groups of equal splits merged."""
    found: list[SplitGroup] = []
    for group in groups:
        if found and found[-1].split == group.split:
            found[-1] = SplitGroup(count=found[-1].count + group.count, split=group.split)
        else:
            found.append(group)
    return tuple(found)


_OF_ENDS = ("tp", "sequence_parallel", "cp", "cp_kind", "rings", "zero", "replicas")
"""Fields of a split that embedding and head of a uniform plan share with its layers."""


def with_split(strategy: Strategy, **fields: Any) -> Strategy:
    """Return a strategy with some fields of `Split` replaced in all layers.

    Fields that apply to embedding and head are replaced there as well.
    """
    layers = merged(
        replace(group, split=replace(group.split, **fields)) for group in strategy.layers
    )
    ends = {name: value for name, value in fields.items() if name in _OF_ENDS}
    return replace(strategy, layers=layers, ends=replace(strategy.ends, **ends))


def with_stages(
    strategy: Strategy, stages: tuple[tuple[Chunk, ...], ...], schedule: Schedule
) -> Strategy:
    """Return a strategy with other stages and the same recomputation policy per chunk."""
    kind, number, modules = strategy.recomputed
    own = replace(strategy, stages=stages, schedule=schedule)
    if kind not in ("block", "every"):
        return own
    first, every = (number, None) if kind == "block" else (None, number)
    return recomputing(own, "full", first=first, every=every, others=modules)


def uniform_layers(num_layers: int, split: Split) -> tuple[tuple[SplitGroup, ...], Split]:
    """Return one group of layers with the same split, and the split of embedding and head."""
    ends = Split(**{name: getattr(split, name) for name in _OF_ENDS})
    return (SplitGroup(count=num_layers, split=split),), ends


def with_wide_ends(strategy: Strategy, first: int, last: int) -> Strategy:
    """Return a uniform strategy with 16-bit computation in its first and last layers.

    first, last : number of 16-bit layers at the beginning and at the end
    """
    layers, split = strategy.num_layers, strategy.first
    first = min(first, layers)
    last = min(last, layers - first)
    wide = replace(split, low_precision=False)
    counts = ((first, wide), (layers - first - last, split), (last, wide))
    groups = (SplitGroup(count=count, split=own) for count, own in counts if count)
    return replace(strategy, layers=merged(groups))


def wide_ends(strategy: Strategy) -> tuple[int, int]:
    """Return the numbers of 16-bit layers at the beginning and at the end of a model.

    If all layers compute in 16 bits, half of them count as each end. Raises InputError if 16-bit
    layers are not at the ends.
    """
    groups = [(group.split.low_precision, group.count) for group in strategy.layers]
    if all(low for low, _ in groups):
        return 0, 0
    low = [one for one, count in groups for _ in range(count)]
    if not any(low):
        # Engines reject more layers at one end than a stage has.
        return (len(low) + 1) // 2, len(low) // 2
    first = len([*takewhile(lambda one: not one, low)])
    last = len([*takewhile(lambda one: not one, reversed(low))])
    if low != [False] * first + [True] * (len(low) - first - last) + [False] * last:
        raise InputError("16-bit layers must be at the ends of the model")
    return first, last


def data_degree(strategy: Strategy, split: Split) -> int:
    """Return the data-parallel degree for `split`; 0 if degrees do not divide the GPUs."""
    return _degree(strategy.gpus, strategy.pp * split.tp * split.cp)


def _degree(gpus: int, others: int) -> int:
    return 0 if gpus % others else gpus // others


def split_groups(splits: Iterable[Split]) -> tuple[SplitGroup, ...]:
    """Return groups of consecutive equal splits."""
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
    """Return the chunks of every stage, with layers spread evenly as in an interleaved pipeline.

    Parameters
    ----------
    ends : layers by which the first and the last chunk are shorter than the others, such as 1 if
        the embedding counts as a layer
    schedule : see `chunks_of_sizes`

    Raises InputError if layers do not divide evenly.
    """
    parts = stages * chunks
    total = num_layers + sum(ends)
    refuse((EVEN_LAYERS,), {"layers": total, "pp": stages, "vpp": chunks})
    sizes = [total // parts] * parts
    sizes[0] -= ends[0]
    sizes[-1] -= ends[1]
    if min(sizes) < 0:
        raise InputError(f"{num_layers} layers are too few for {parts} pipeline chunks")
    return chunks_of_sizes(sizes, stages, mtp=mtp, schedule=schedule)


def chunks_of_sizes(
    sizes: Sequence[int],
    stages: int,
    *,
    mtp: int | Sequence[int] = 0,
    schedule: Schedule | None = None,
) -> tuple[tuple[Chunk, ...], ...]:
    """Return the chunks of every stage from the number of layers per chunk, in execution order.

    Parameters
    ----------
    mtp : MTP layers of the last chunk, or of each chunk
    schedule : pipeline schedule, which assigns chunks to stages; None: round-robin
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

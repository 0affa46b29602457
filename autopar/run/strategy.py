"""How a model is split: degrees of every layer, pipeline stages, schedule and batch.

A uniform plan has one `SplitGroup`, a per-layer plan several. Which combinations are legal is a
matter of the rules, not of these types.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import groupby
from typing import Literal, NamedTuple

from autopar.pipeline.schedules import Schedule
from autopar.records import Record
from autopar.run.plan import Module
from autopar.run.runtime import Zero
from autopar.training.offload import OffloadModule

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


def data_degree(strategy: Strategy, split: Split) -> int:
    """Return the data degree of layers that are split so, 0 where degrees do not divide."""
    return _degree(strategy.gpus, strategy.pp * split.tp * split.cp)


def _degree(gpus: int, others: int) -> int:
    return 0 if gpus % others else gpus // others


def split_groups(splits: Iterable[Split]) -> tuple[SplitGroup, ...]:
    """Return splits of consecutive layers as groups of equal ones."""
    return tuple(SplitGroup(count=len(list(run)), split=split) for split, run in groupby(splits))

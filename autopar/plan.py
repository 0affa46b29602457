"""Plan: a strategy for every layer, the stages and the batch; what a search returns.

`plan_files` reads and writes the documented strategy file and our own plan file;
`legality` says why a plan cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LayerStrategy", "PipelineType", "Plan", "VocabStrategy", "ZeroDefault"]

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


@dataclass(frozen=True, kw_only=True, order=True)
class VocabStrategy:
    """How embedding, head and loss are parallelised."""

    tp: int = 1
    ulysses: bool = False
    zero3: bool = False


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
        ranks, rest = divmod(self.world_size, self.num_stages)
        degree, rest2 = divmod(ranks, strategy.tp * strategy.cp)
        return 0 if rest or rest2 else degree

    def stage_of_layer(self) -> tuple[int, ...]:
        """Return the stage index of every layer."""
        return tuple(j for j, n in enumerate(self.stage_sizes) for _ in range(n))

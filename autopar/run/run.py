"""Run: one training run, planned or measured, in terms common to all engines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

from autopar.records import Positive, Record, replace
from autopar.run.architecture import Layer, Model
from autopar.run.rules import DEGREES, PRECISION, RUN, VOCABULARY_GRID, refuse
from autopar.run.runtime import Kernels, Precision, Runtime
from autopar.run.strategy import Recomputation, Split, Strategy, with_split


class Word(NamedTuple):
    """An argument or key that no field of a run holds, written back as it was read."""

    key: str
    values: tuple[str, ...]


class Run(Record, dict=True):
    """A model, its parallel strategy and the settings of its engine."""

    name: str = ""
    model: Model
    strategy: Strategy
    runtime: Runtime
    seq_length: Positive
    """Sequence length, tokens."""
    gpu: str
    """Name of the GPU model, which determines default kernels."""
    steps: Positive | None = None
    """Number of training steps; None for several thousand. The step with the most uneven expert
    routing determines peak memory."""
    unread: tuple[Word, ...] = ()

    @property
    def split(self) -> Split:
        """Split of the first layer; the degrees are those of all layers in a uniform run."""
        return self.strategy.first

    @property
    def kernels(self) -> Kernels:
        """Kernels of layers and loss."""
        return self.runtime.kernels

    @property
    def syncs_each_batch(self) -> bool:
        """True if accelerate shards gradients and reduces them after each of several
        micro-batches."""
        states = self.runtime.states
        several = self.strategy.micro_batches > 1 and self.split.zero > 0
        return several and states.keeper == "accelerate" and states.each_micro_batch

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch on one context rank of the first layer."""
        return self.strategy.micro_batch * self.seq_length // self.split.cp

    @property
    def sequence_parallel_tokens(self) -> int:
        """Tokens per micro-batch on one tensor rank, outside of tensor-parallel GEMMs."""
        return self.tokens // self.split.tp if self.split.splits_sequence else self.tokens

    @property
    def element_bytes(self) -> int:
        """Bytes per element of activations and weights."""
        return self.runtime.precision.element_bytes

    @property
    def padded_vocab(self) -> int:
        """Rows of the vocabulary, padded to a multiple of the tensor degree times the divisor."""
        unit = self.model.vocab_divisor * self.strategy.ends.tp
        return math.ceil(self.model.vocab / unit) * unit

    @property
    def offloads_activations(self) -> bool:
        """True if activations are offloaded to host memory."""
        offload = self.runtime.offload
        return bool((self.split.offload and offload.fraction > 0) or offload.layers)

    @cached_property
    def rank_layers(self) -> tuple[RankLayer, ...]:
        """All layers on one rank, in execution order; equal layers are one object."""
        made: dict[tuple[Layer, Split, bool], RankLayer] = {}
        found: list[RankLayer] = []
        for count, layer, split, offloaded in self._alike():
            own = RankLayer(run=self, layer=layer, split=split, offloaded=offloaded)
            found += [made.setdefault((layer, split, offloaded), own)] * count
        return tuple(found)

    def _alike(self) -> Iterator[tuple[int, Layer, Split, bool]]:
        """Yield (count, layer, split, is fully offloaded) per run of consecutive equal layers."""
        model, first = self.model, self.runtime.offload.layers
        splits = iter(self.strategy.layers)
        left, at = 0, 0
        for group in model.layers * model.repeat:
            wanted = group.count
            while wanted:
                if not left:
                    own = next(splits)
                    left, split = own.count, own.split
                # Number of layers up to the end of whole-layer offload.
                inside = first - at if at < first else wanted
                count = min(wanted, left, inside)
                yield count, group.layer, split, at < first
                wanted, left, at = wanted - count, left - count, at + count

    @cached_property
    def mtp_layers(self) -> tuple[RankLayer, ...]:
        """Layers of one MTP layer on one rank, in the precision of the run.

        They are never recomputed in full, only in `recomputed_modules`.
        """
        last = self.rank_layers[-1].split
        split = replace(last, recompute=self.recomputed_modules, low_precision=True)
        return tuple(RankLayer(run=self, layer=one, split=split) for one in self.model.each_mtp)

    @property
    def recomputed_modules(self) -> frozenset[Any]:
        """Recomputed modules of the layers without full recomputation."""
        groups = self.strategy.layers
        return next((one.split.modules for one in groups if one.split.modules), frozenset())


class RankLayer(Record, dict=True, eq=False):
    """One layer of a run on one rank: sizes, split and data types."""

    run: Run
    layer: Layer
    split: Split
    offloaded: bool = False
    """True if all its saved activations are offloaded (`--cpu-offloading-num-layers`)."""

    @cached_property
    def tokens(self) -> int:
        """Tokens per micro-batch on one context rank."""
        return self.run.strategy.micro_batch * self.run.seq_length // self.split.cp

    @cached_property
    def sequence_parallel_tokens(self) -> int:
        """Tokens per micro-batch on one tensor rank, outside of tensor-parallel GEMMs."""
        return self.tokens // self.split.tp if self.split.splits_sequence else self.tokens

    @cached_property
    def precision(self) -> Precision:
        """Precision of the layer: that of the run, or with 16-bit GEMMs as `split` requires."""
        own = self.run.runtime.precision
        return own if self.split.low_precision or not own.low_precision else own.plain

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of activations and weights."""
        return self.run.runtime.precision.element_bytes

    def recomputing(self, recompute: Recomputation) -> RankLayer:
        """Return the layer with its recomputation replaced by `recompute`."""
        if recompute == self.split.recompute:
            return self
        split = replace(self.split, recompute=recompute)
        return RankLayer(run=self.run, layer=self.layer, split=split, offloaded=self.offloaded)


def run_with_micro_batch(run: Run, size: int, *, synced: bool) -> Run:
    """Return a run with another micro-batch.

    size : sequences. synced : value of `syncs_each_batch`, if accelerate shards gradients.
    """
    states, strategy = run.runtime.states, replace(run.strategy, micro_batch=size)
    if states.keeper in ("accelerate", "ddp"):
        each = strategy.micro_batches == 1 or (synced and run.split.zero > 0)
        states = replace(states, each_micro_batch=each)
    return replace(run, strategy=strategy, runtime=replace(run.runtime, states=states))


def run_with_split(run: Run, **fields: Any) -> Run:
    """Return a run with some fields of `Split` replaced in all layers."""
    return replace(run, strategy=with_split(run.strategy, **fields))


def mixer_values(model: Model) -> dict[str, Any]:
    """Return the sizes of mixers that the rules of `MIXERS` read; empty with attention alone."""
    mamba, delta, sparse = model.first_mamba, model.first_delta, model.first_sparse
    found: dict[str, Any] = {}
    if model.has_token_inputs:
        found["layer_inputs"] = True
    if model.torch_mixers:
        found["torch_mixers"] = model.torch_mixers
    if sparse is not None and sparse.latent is not None:
        found |= {"sparse_heads": sparse.heads, "sparse_latent": sparse.latent.kv_rank}
    if delta is not None:
        found |= {"delta_keys": delta.key_heads, "delta_values": delta.value_heads}
        found["mixer_projected"] = delta.projected
    if mamba is not None:
        found |= {"mixer_heads": mamba.heads, "mixer_groups": mamba.groups}
        found["mixer_projected"] = mamba.projected
    return found


def _starts_reused(run: Run) -> Iterator[bool]:
    """Yield for each chunk of layers True if the first one reuses the keys of an earlier layer."""
    if run.model.first_sparse is None:  # no layer has keys to reuse
        return
    reused = run.model.reused
    for stage in run.strategy.stages:
        for chunk in stage:
            # a layer outside of the model breaks another rule
            if chunk.layers and chunk.layers[0] < len(reused):
                yield reused[chunk.layers[0]]


def legal(run: Run) -> Run:
    """Return a uniform run; raises RuleError with all engine-independent rules that it breaks."""
    strategy, split, runtime, model = run.strategy, run.split, run.runtime, run.model
    placed = [layer for stage in strategy.stages for chunk in stage for layer in chunk.layers]
    precision, optimizer, offload = runtime.precision, runtime.optimizer, runtime.offload
    experts = model.experts
    # embedding and head mostly have the grid of the layers, whose rules name it
    same = (strategy.ends.tp, strategy.ends.cp) == (split.tp, split.cp)
    ends = () if same else VOCABULARY_GRID
    refuse(
        (*DEGREES, *ends, *PRECISION, *RUN),
        {
            "world": strategy.gpus,
            "tp": split.tp,
            "cp": split.cp,
            "vtp": strategy.ends.tp,
            "vcp": strategy.ends.cp,
            "pp": strategy.pp,
            "ep": split.ep,
            "etp": split.etp,
            "dp": strategy.dp,
            "rings": split.rings,
            "heads_exchanged": split.exchanges_heads,
            "cp_kind": split.cp_kind,
            "chunk_counts": len(set(map(len, strategy.stages))),
            "precision": precision.kind,
            "fp8": precision.fp8,
            "fp4": precision.fp4,
            "fp4_weights": precision.fp4_weights,
            "global_batch": strategy.global_batch,
            "micro_batch": strategy.micro_batch,
            "seq_length": run.seq_length,
            "heads": None if (attention := model.first_attention) is None else attention.heads,
            **mixer_values(model),
            "reused_starts": sum(_starts_reused(run)),
            "layers": model.num_layers,
            "placed_layers": len(placed),
            "misplaced_layers": sorted(placed) != list(range(model.num_layers)),
            "experts": None if experts is None else experts.number,
            "offload_modules": split.offload,
            "offload_fraction": offload.fraction,
            "offload_layers": offload.layers,
            "offload_elements": offload.least_elements,
            "offloads": run.offloads_activations,
            "recomputes": any(group.split.recompute for group in strategy.layers),
            "torch": runtime.kernels.torch_layers,
            "keeper": runtime.states.keeper,
            "zero": split.zero,
            "optimizer": optimizer.kind,
            "offload": optimizer.offload,
            "offload_weights": optimizer.offload_weights,
            "adapters": runtime.adapters is not None,
        },
    )
    return run

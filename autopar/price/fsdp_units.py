"""FSDP units of a rank, and its state layout: elements, moments and bytes of each unit.

`autopar.price.sharded_peak` counts what is live of them during a step. DeepSpeed and DDP have the
same units, which are then groups of weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from autopar.price.parameters import (
    Weight,
    embedding_and_head_weights,
    frozen_bytes,
    layer_weights,
    mixer_weights,
    mlp_weights,
    projections_of,
)
from autopar.price.state_layouts import StateLayout, layout_of
from autopar.records import Record, replace
from autopar.run.run import RankLayer, Run
from autopar.run.runtime import Optimizer, States, Zero
from autopar.run.strategy import Chunk


class FsdpUnit(Record):
    """FSDP unit, gathered and reduced together: a layer, the embedding or the head."""

    name: str
    dense: int
    """Unsharded elements of dense weights."""
    expert: int = 0
    """Unsharded elements of expert weights."""
    own: int
    """Elements of dense and expert weights in this rank's shard; rows are rounded up."""
    layer: RankLayer | None = None
    """The layer of the unit; None for embedding and head."""
    in_root: int = 0
    """Elements of a layer's trained weights that the root contains."""
    moments_bytes: float = 0.0
    """Bytes of the optimizer's moments of this rank's shard, all on the device."""
    largest: int = 0
    """Elements of the largest trained weight in this rank's shard."""
    frozen_bytes: int = 0
    """Bytes of unsharded frozen weights; the numbers of elements exclude frozen weights."""
    own_frozen_bytes: int = 0
    """Bytes of frozen weights in this rank's shard."""

    @property
    def elements(self) -> int:
        """Elements of all trained weights, unsharded."""
        return self.dense + self.expert


def shards_of(run: Run, *, expert: bool = False) -> int:
    """Return the number of ranks over which a weight's states are sharded; 1 if unsharded.

    Context-parallel ranks count as data-parallel. Expert weights are sharded over fewer ranks,
    the expert data-parallel ones.
    """
    strategy, split = run.strategy, run.split
    if split.zero == 0 and not layout_of_run(run).moments.sharded:
        return 1
    ranks = strategy.edp if expert else strategy.dp * split.cp
    return max(ranks // split.replicas, 1)


def layout_of_run(run: Run) -> StateLayout:
    """Return the state layout of a run: bytes per parameter of model states.

    The layout of the engine is adjusted to the run's optimizer and to optimizer offload.
    """
    runtime = run.runtime
    kind, element = runtime.precision.kind, run.element_bytes
    return _recipe(runtime.states, run.split.zero, runtime.optimizer, kind, element)


@lru_cache(maxsize=1024)
def _recipe(
    states: States, zero: Zero, optimizer: Optimizer, precision: str, element_bytes: int
) -> StateLayout:
    """Return the state layout of an engine, adjusted to an optimizer; results are cached."""
    recipe = layout_of(
        states.keeper,
        zero,
        precision,
        fp32_gradients=states.wide_gradients,
        each_micro_batch=states.each_micro_batch,
        buckets=states.buckets,
        # the update of offloaded states is on the host; other temporaries are those of one tensor
        fused=optimizer.fused or optimizer.offload == 1.0 or bool(update_factor(optimizer)),
    )
    moments = replace(recipe.moments, each_bytes=optimizer.state_bytes)
    weights, gradients, master = recipe.weights, recipe.gradients, recipe.master
    passing = recipe.passing
    if optimizer.master_bytes == 0 and element_bytes == 2:
        # weights are trained without an fp32 master, and their gradients have the same precision
        element = float(element_bytes)
        weights = replace(weights, each_bytes=element)
        gradients = replace(gradients, each_bytes=min(gradients.each_bytes, element))
        master = replace(master, each_bytes=0.0)
        # autocast copies fp32 weights alone
        passing = tuple(
            replace(entry, each_bytes=min(entry.each_bytes, element))
            for entry in passing
            if entry.what != "copies of autocast"
        )
    if optimizer.layerwise:
        gradients = replace(gradients, each_bytes=0.0)
    left = 1.0 - optimizer.offload
    if left < 1.0:
        moments, master, gradients = (
            # gradients are offloaded too: DeepSpeed copies them to the host after their reduction
            replace(kept, each_bytes=kept.each_bytes * left)
            for kept in (moments, master, gradients)
        )
    if optimizer.offload_weights:
        weights = replace(weights, each_bytes=0.0)
    # transient copies of the optimizer step are in host memory for offloaded states
    passing = tuple(
        replace(entry, each_bytes=entry.each_bytes * left)
        if entry.during == frozenset({"step"})
        else entry
        for entry in passing
    )
    return replace(
        recipe,
        weights=weights,
        gradients=gradients,
        master=master,
        moments=moments,
        passing=passing,
    )


def _unit(
    name: str,
    run: Run,
    every: Sequence[Weight],
    layer: RankLayer | None = None,
    in_root: int = 0,
) -> FsdpUnit:
    weights = [weight for weight in every if weight.trained]
    frozen = [(frozen_bytes(run, one), one) for one in every if not one.trained]
    return FsdpUnit(
        name=name,
        dense=sum(weight.elements for weight in weights if not weight.expert),
        expert=sum(weight.elements for weight in weights if weight.expert),
        own=sum(_own(run, weight) for weight in weights),
        frozen_bytes=sum(math.ceil(each * one.elements) for each, one in frozen),
        own_frozen_bytes=sum(math.ceil(each * _own(run, one)) for each, one in frozen),
        layer=layer,
        in_root=in_root,
        moments_bytes=sum((_moment_bytes(run, weight, layer) for weight in weights), 0.0),
        largest=max((_own(run, one) // one.number for one in weights), default=0),
    )


_SMALLEST_8BIT = 4096
"""Elements of the smallest tensor with 8-bit moments (`min_8bit_size` of bitsandbytes)."""


def _moment_bytes(run: Run, weight: Weight, layer: RankLayer | None) -> float:
    """Return the bytes of the optimizer's moments of a weight in this rank's shard."""
    optimizer, own, low = run.runtime.optimizer, _own(run, weight), run.runtime.optimizer.low_rank
    if low is not None:
        parts = projections_of(layer, weight) if layer is not None else ()
        matrices = [(rows, target in low.targets) for target, rows in parts]
        if weight.name == "head":
            matrices = [(weight.shape[0], low.head)]
        if any(projected for _, projected in matrices):
            columns = weight.shape[1]
            return weight.number * sum(
                _low_rank_bytes(run, rows, columns)
                if projected
                else optimizer.state_bytes * rows * columns
                for rows, projected in matrices
            )
    if optimizer.kind == "adafactor" and not optimizer.moments_bytes:
        # fp32 sums of the rank's rows and of all columns; vectors are not factored
        columns = weight.shape[-1] if len(weight.shape) > 1 else 0
        return 4.0 * (own / columns + weight.number * columns if columns else own)
    # transformers 5 keeps moments of `nn.Embedding` in fp32 (trainer.py), as bitsandbytes
    # recommends, which itself does so for small tensors. Partitions of DeepSpeed are neither.
    wide = weight.name in ("embedding", "positions") or own < weight.number * _SMALLEST_8BIT
    if wide and run.runtime.states.keeper != "deepspeed":
        return float(optimizer.moments_bytes) * own
    return optimizer.state_bytes * own


def _low_rank_bytes(run: Run, rows: float, columns: float) -> float:
    """Return the bytes of moments and projector of a matrix whose gradient is projected."""
    optimizer = run.runtime.optimizer
    assert optimizer.low_rank is not None, "its gradients are projected"
    small, large = sorted((rows, columns))
    rank, element = min(optimizer.low_rank.rank, small), layout_of_run(run).weights.each_bytes
    return optimizer.state_bytes * rank * large + element * rank * small


def _own(run: Run, weight: Weight) -> int:
    """Return the elements of a weight in this rank's shard."""
    ranks = shards_of(run, expert=weight.expert)
    if run.runtime.states.keeper == "deepspeed" or weight.expert:
        # DeepSpeed shards flat tensors; for grouped experts the rounding of rows is ignored
        return math.ceil(weight.elements / ranks)
    rows, rest = weight.shape[0], weight.size // weight.shape[0]
    return weight.number * -(-rows // ranks) * rest


def is_joined(run: Run) -> bool:
    """Return True if embedding, last norm and head are one unit."""
    transformers = run.kernels.module == "transformers"
    states = run.runtime.states
    return states.one_root or states.least_unit > 0 or transformers or run.model.tied


def units_of(run: Run, chunk: Chunk) -> tuple[FsdpUnit, ...]:
    """Return the FSDP units of a chunk in the order of its forward.

    In torchtitan, each layer is a unit, the embedding is another, and so are final norm with head.
    In transformers only layers are wrapped, so embedding, final norm and head are one unit. This
    also holds for torchtitan before 2025 and for tied embeddings.
    """
    joined, least = is_joined(run), run.runtime.states.least_unit
    around = embedding_and_head_weights(run, chunk)
    found: list[FsdpUnit] = []
    first = [weight for weight in around if weight.name in ("embedding", "positions")]
    last = [weight for weight in around if weight not in first]
    if joined:
        first, last = [], list(around)
    if first:
        found.append(_unit("embedding", run, first))
    layers = [run.rank_layers[layer] for layer in chunk.layers]
    known = {id(at): at for at in layers}
    parts = {key: _parted(at, least) for key, at in known.items()}
    kinds = {
        key: _unit("layer", run, own, known[key], sum(one.elements for one in rest if one.trained))
        for key, (own, rest) in parts.items()
    }
    found += [kinds[id(at)] for at in layers]
    last += [weight for at in layers for weight in parts[id(at)][1]]
    if last:
        found.append(_unit("head", run, last))
    return tuple(found)


def _parted(at: RankLayer, least: int) -> tuple[list[Weight], list[Weight]]:
    """Return (weights of a layer in units, weights in the root).

    Matrices, then attention and MLP, then the layer become units if they contain at least `least`
    elements that are in no unit (`_recursive_wrap` and `size_based_auto_wrap_policy` of
    torch/distributed/fsdp/wrap.py). Units in a layer are counted as one.
    """
    every, rest = layer_weights(at), list[Weight]()
    for weights in (tuple(mixer_weights(at)), tuple(mlp_weights(at))):
        # norms of the layer are next to both
        rest += [one for one in weights if one.name in _NORMS]
        module = [one for one in weights if one.name not in _NORMS]
        largest = max((_largest_module(at, weight) for weight in module), default=0)
        small = [one for one in module if _largest_module(at, one) < least]
        if largest < least <= sum(one.elements for one in module):
            continue
        if sum(one.elements for one in small) < least:
            rest += small
    if sum(one.elements for one in rest) >= least:
        return list(every), []
    names = {one.name for one in rest}
    in_root = [one for one in every if one.name.partition(" adapter ")[0] in names]
    return [one for one in every if one not in in_root], in_root


_NORMS = ("attention norm", "mlp norm", "post-norms")


def _largest_module(at: RankLayer, weight: Weight) -> float:
    """Return the elements of the largest module of torch in a weight; 0 for a vector."""
    parts = [rows for _, rows in projections_of(at, weight)] or [weight.shape[0]]
    return max(parts) * weight.shape[1] if len(weight.shape) > 1 else 0.0


def update_factor(optimizer: Optimizer) -> float:
    """Return the bytes of an update's temporaries per element of the largest tensor; 0: none.

    Adafactor of transformers has two tensors in fp32 (the update, and another one before it), and
    with 16-bit weights the gradient and the weight in fp32. A low rank has the projected update
    of a matrix, and every few hundred steps the matrix and its singular vectors in fp32
    (galore_torch 1.0, galore_projector.py).
    """
    pure = optimizer.master_bytes == 0
    if optimizer.kind == "adafactor":
        return 16.0 if pure else 8.0
    return 12.0 if optimizer.low_rank is not None else 0.0

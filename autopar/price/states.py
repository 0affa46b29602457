"""Weights, gradients and optimizer states of a rank in bytes, without activations and workspaces.

Weights of Megatron-LM are separate tensors or, with the distributed optimizer, in contiguous
buffers whose shards are updated by one rank each. Those of engines with torch layers are in units
(FSDP), whose live tensors `autopar.price.sharded_peak` counts. Sources: Rajbhandari et al., arXiv
1910.02054, section 3 (bytes per parameter); Megatron-Core's documentation of its distributed
optimizer (buffers and padding).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from autopar.price.allocator import rounding_bytes
from autopar.price.parameters import (
    Weight,
    embedding_and_head_weights,
    frozen_bytes,
    layer_weights,
    mixer_weights,
    mlp_weights,
    projections_of,
)
from autopar.price.state_layouts import REDUCED, StateLayout, layout_of
from autopar.records import Record, replace
from autopar.run.run import RankLayer, Run
from autopar.run.runtime import BLACKWELL, Optimizer, States as RunStates, Zero
from autopar.run.strategy import Chunk

_START = 64
"""Alignment of weights in a buffer, elements."""
_END = 128
"""Alignment of each rank's shard of a bucket, elements."""
_NCCL_END = 1 << 16
"""Alignment of bucket ends for NCCL's bandwidth, elements."""
_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000
"""Minimum parameters of a bucket; a larger minimum applies per rank with many ranks."""


def default_bucket(run: Run) -> int:
    """Return Megatron-Core's bucket size in parameters, if none is set and reductions overlap.

    Source: `DistributedDataParallel.__init__`, whose group is that of data parallelism alone.
    """
    return max(_BUCKET, _BUCKET_PER_RANK * run.strategy.dp)


class Buffer(Record):
    """Contiguous weight buffer of a model chunk; its gradient buffer has equally many elements."""

    elements: int
    """Elements with padding."""
    parameters: int
    """Elements without padding."""
    expert: bool
    """True for the weights of experts."""
    replicas: int
    """Number of ranks over which its optimizer states are sharded; 1 if unsharded."""
    spans: tuple[int, ...]
    """Elements that the last rank updates, of each weight that is at least partly in its shard."""
    quantized: int = 0
    """Parameters that have 8-bit copies or are stored in 8 bits."""
    matrices: int = 0
    """Parameters with one Muon momentum instead of two Adam moments."""
    wide: bool = False
    """True for fp32 weights in a run with 16-bit weights."""


class States(Record):
    """Model state bytes of a rank by kind."""

    weights_bytes: int
    gradients_bytes: int
    master_bytes: int
    moments_bytes: int
    copies_bytes: int
    """Low-precision copies of weights, in 8 or 4 bits."""
    unscaled_bytes: int
    """fp32 copies of fp16 gradients for the optimizer, freed before the next forward."""
    allocations: tuple[int, ...]
    """Bytes of every tensor and buffer in order of allocation."""

    @property
    def total_bytes(self) -> int:
        """Sum of all kinds."""
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.master_bytes
            + self.moments_bytes
            + self.copies_bytes
            + self.unscaled_bytes
        )

    def rounding_bytes(self, run: Run) -> int:
        """Return allocated minus requested bytes of all states."""
        return rounding_bytes(self.allocations, expandable=run.runtime.allocator.expandable)


def buffers_of(run: Run, weights: Sequence[Weight]) -> Iterator[Buffer]:
    """Yield the buffers of one chunk's weights: dense weights, fp32 ones, then experts.

    With the distributed optimizer, sizes are those of Megatron-Core's `_ParamAndGradBuffer`.
    Weights are in reverse order of registration, and each starts on a multiple of 64 elements.
    Buckets end on a multiple of lcm(ranks, 128), so that each rank's shard is aligned.
    """
    strategy, split = run.strategy, run.split
    for expert, wide in ((False, False), (False, True), (True, False)):
        group = [one for one in weights if one.expert == expert and one.wide == wide]
        if not group:
            continue
        ranks = strategy.edp if expert else strategy.dp * split.cp
        parts = max(1, ranks // split.replicas)
        sharded = split.zero > 0
        elements, spans = (
            _sharded_buffer(group, run, ranks, parts)
            if sharded
            else (_elements(group), [w.size for w in group for _ in range(w.number)])
        )
        yield Buffer(
            elements=elements,
            parameters=_elements(group),
            expert=expert,
            replicas=parts if sharded else 1,
            spans=tuple(spans),
            quantized=_elements(weight for weight in group if weight.quantized),
            matrices=_elements(weight for weight in group if has_one_moment(weight)),
            wide=wide,
        )


def _elements(weights: Iterable[Weight]) -> int:
    return sum(weight.elements for weight in weights)


def _sharded_buffer(
    weights: Sequence[Weight], run: Run, ranks: int, parts: int
) -> tuple[int, list[int]]:
    """Return (elements of a padded buffer, spans of the last rank).

    A span is the number of elements of one weight in the rank's shard.

    ranks : number of data-parallel ranks, which sets the default bucket size.
    parts : number of shards of every bucket.
    """
    states = run.runtime.states
    unit = math.lcm(parts, _END, _NCCL_END if states.padded_buckets else 1)
    # one bucket per chunk, unless the reduction overlaps with the backward
    limit = math.inf
    if run.runtime.overlap.gradients:
        limit = states.bucket or max(_BUCKET, _BUCKET_PER_RANK * ranks)
    spans: list[int] = []
    bucket: list[tuple[int, int]] = []
    end = begun = 0

    def close() -> int:
        stop = _up(end, unit)
        own = stop - (stop - begun) // parts
        for start, until in reversed(bucket):
            if until > own:
                spans.append(until - max(start, own))
        bucket.clear()
        return stop

    for weight in reversed(weights):
        for _ in range(weight.number):
            if weight.shared and bucket:
                end = begun = close()
            start = _up(end, _START)
            end = start + weight.size
            bucket.append((start, end))
            if end - begun >= limit or weight.shared:
                end = begun = close()
    if bucket:
        end = close()
    return end, spans


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def states_of(run: Run, chunks: Sequence[Sequence[Weight]]) -> States:
    """Return the model state bytes of a rank after a step, for the weights of its chunks."""
    if run.split.zero == 3:
        return _fully_sharded(run, chunks)
    precision, optimizer, zero = run.runtime.precision, run.runtime.optimizer, run.split.zero
    sharded = zero > 0
    element, gradient = precision.element_bytes, precision.gradient_bytes
    frozen = [weight for chunk in chunks for weight in chunk if not weight.trained]
    chunks = [[weight for weight in chunk if weight.trained] for chunk in chunks]
    buffers = [buffer for chunk in chunks for buffer in buffers_of(run, chunk)]
    weights = gradients = master = moments = copies = unscaled = 0
    made: list[int] = []
    for buffer in buffers:
        own = buffer.elements // buffer.replicas
        saved, copied = low_precision_bytes(run, buffer.quantized)
        stored = buffer.elements * (4 if buffer.wide else element) - saved
        copies += copied
        weights += stored
        # ZeRO-2 keeps only the rank's shard of reduced gradients
        summed = own if zero == 2 else buffer.elements
        reduced = 4 if buffer.wide else gradient
        gradients += summed * reduced
        has_master = element == 2 and not buffer.wide
        master += own * optimizer.master_bytes if has_master else 0
        moments += own * optimizer.moments_bytes
        if optimizer.offload:
            gone = math.floor(own * optimizer.offload)
            moments -= gone * optimizer.moments_bytes
            if optimizer.offload_master and has_master:
                master -= gone * optimizer.master_bytes
        if optimizer.kind == "muon":
            # matrices have one momentum instead of two moments
            moments -= buffer.matrices // buffer.replicas * (optimizer.moments_bytes // 2)
        unscaled += own * precision.unscaled_bytes
        made += [stored] * sharded + [summed * reduced]
    # frozen weights are separate tensors without gradients and states
    own_bytes = [math.ceil(one.size * frozen_bytes(run, one)) for one in frozen]
    weights += sum(n * one.number for n, one in zip(own_bytes, frozen, strict=True))
    made += [n for n, one in zip(own_bytes, frozen, strict=True) for _ in range(one.number)]
    if not sharded:
        tensors = (weight for chunk in chunks for weight in chunk)
        made = [w.size * element for w in tensors for _ in range(w.number)] + made
    # dense weights before experts, which have a separate optimizer
    ordered = sorted(buffers, key=lambda b: b.expert)
    spans = [n for buffer in ordered for n in buffer.spans]
    left = _on_device(spans, optimizer.offload)
    if element == 2:
        masters = [n for buffer in ordered if not buffer.wide for n in buffer.spans]
        if optimizer.offload_master:
            masters = _on_device(masters, optimizer.offload)
        made += [n * optimizer.master_bytes for n in masters]
    # the first update allocates both moments of a weight together
    made += [n * optimizer.moments_bytes // 2 for n in left for _ in range(2)]
    if precision.unscaled_bytes:
        made += [n * precision.unscaled_bytes for n in spans]
    return States(
        weights_bytes=weights,
        gradients_bytes=gradients,
        master_bytes=master,
        moments_bytes=moments,
        copies_bytes=copies,
        unscaled_bytes=unscaled,
        allocations=tuple(made),
    )


def low_precision_bytes(run: Run, quantized: int) -> tuple[int, int]:
    """Return (bytes less of stored weights, bytes of copies) that GEMMs of 8 or 4 bits cause.

    Low-precision weights have a second, transposed copy; 16-bit weights have two copies.

    quantized : parameters of such GEMMs
    """
    precision = run.runtime.precision
    low = math.ceil(quantized * precision.low_bytes) if precision.low_precision else 0
    transposed = 0 if _needs_no_transpose(run) else low
    if low and precision.low_weights:
        return quantized * precision.element_bytes - low, transposed
    return 0, low + transposed


def widened_bytes(run: Run, chunks: Sequence[Sequence[Weight]]) -> int:
    """Return the bytes of fp32 copies of narrow moments during the optimizer's step.

    The update of a group of weights first copies the moments of all of them that have fewer than 32
    bits, and frees the copies together (Transformer Engine 04912bf0, pytorch/optimizers/
    fused_adam.py, FusedAdam.step). Groups are dense weights and experts; biases and norms, without
    weight decay, are other groups, and small.
    """
    optimizer = run.runtime.optimizer
    narrow = {8: 0, 6: 1, 5: 1}.get(optimizer.moments_bytes, 2)
    if optimizer.kind != "adam" or optimizer.offload or not narrow or run.split.zero == 3:
        return 0
    own = {False: 0, True: 0}
    for chunk in chunks:
        trained = [weight for weight in chunk if weight.trained]
        for buffer in buffers_of(run, trained):
            own[buffer.expert] += buffer.elements // buffer.replicas
    return 4 * narrow * max(own.values())


def _on_device(spans: list[int], offload: float) -> list[int]:
    """Return the spans whose optimizer states stay on the device.

    The first weights are offloaded, each as a whole, until their elements reach the share `offload`
    (HybridDeviceOptimizer of Megatron-Core).
    """
    wanted, gone = sum(spans) * offload, 0
    for at, span in enumerate(spans):
        if gone >= wanted:
            return spans[at:]
        gone += span
    return []


def _needs_no_transpose(run: Run) -> bool:
    """Return True if GEMMs need no transposed 8-bit weights: Blackwell with per-tensor scales."""
    precision = run.runtime.precision
    return (
        run.gpu.upper().startswith(BLACKWELL)
        and precision.fp8
        and precision.fp8_recipe in ("delayed", "tensorwise")
    )


def has_one_moment(weight: Weight) -> bool:
    """Return True for weights that Muon updates: matrices except embedding and head.

    The input projection of a Mamba-2 mixer combines matrices of several kinds and keeps Adam.
    """
    others = ("embedding", "positions", "head", "mixer in")
    return len(weight.shape) == 2 and weight.name not in others


def _kept_share(run: Run, *, master: bool = False) -> float:
    """Return the share of moments, or with `master` of fp32 weights, that stays on the device."""
    optimizer = run.runtime.optimizer
    return 1.0 if master and not optimizer.offload_master else 1.0 - optimizer.offload


def _fully_sharded(run: Run, chunks: Sequence[Sequence[Weight]]) -> States:
    """Return the model states of Megatron-FSDP at ZeRO-3, all sharded over data-parallel ranks."""
    strategy, precision = run.strategy, run.runtime.precision
    shares = frozen = 0.0
    ranks_of = {True: strategy.edp, False: strategy.dp * run.split.cp}
    for chunk in chunks:
        for weight in chunk:
            ranks = ranks_of[weight.expert]
            if weight.trained:
                shares += weight.elements / ranks
            else:
                frozen += weight.elements / ranks * frozen_bytes(run, weight)
    own = math.ceil(shares)
    element = precision.element_bytes
    return States(
        weights_bytes=own * element + math.ceil(frozen),
        # gradients are fp32 next to fp32 masters, whatever the precision of the weights
        gradients_bytes=own * precision.gradient_bytes,
        master_bytes=math.ceil(own * _kept_share(run, master=True))
        * run.runtime.optimizer.master_bytes
        if element == 2
        else 0,
        moments_bytes=math.ceil(own * _kept_share(run)) * run.runtime.optimizer.moments_bytes,
        copies_bytes=0,
        unscaled_bytes=0,
        allocations=(),
    )


# --------------------------------------------------------------------------------------------------
# Units of engines with torch layers.


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
    persistent_bytes: float = 0.0
    """Bytes of unsharded weights that ZeRO-3 keeps on each rank."""
    in_root: int = 0
    """Elements of a layer's trained weights that the root contains."""
    moments_bytes: float = 0.0
    """Bytes of the optimizer's moments of this rank's shard, all on the device."""
    largest: int = 0
    """Elements of the largest trained weight in this rank's shard."""
    largest_matrix: int = 0
    """Elements of the largest trained matrix, unsharded."""
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
    states: RunStates, zero: Zero, optimizer: Optimizer, precision: str, element_bytes: int
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
        offload=optimizer.offload > 0,
    )
    # paged moments are not in the memory of the allocator
    on_device = 0.0 if optimizer.paged else optimizer.state_bytes
    moments = replace(recipe.moments, each_bytes=on_device)
    weights, gradients, master = recipe.weights, recipe.gradients, recipe.master
    passing = recipe.passing
    if optimizer.master_bytes == 0 and element_bytes == 2:
        # weights are trained without an fp32 master, and their gradients have the same precision
        element = float(element_bytes)
        weights = replace(weights, each_bytes=element)
        gradients = replace(gradients, each_bytes=min(gradients.each_bytes, element))
        master = replace(master, each_bytes=0.0)
        # autocast copies fp32 weights alone; FSDP2 reduces in the type that it is told
        wide = states.keeper == "accelerate" and states.wide_gradients is True
        passing = tuple(
            entry
            if wide and entry.what in REDUCED
            else replace(entry, each_bytes=min(entry.each_bytes, element))
            for entry in passing
            if entry.what != "copies of autocast"
        )
    if optimizer.layerwise:
        gradients = replace(gradients, each_bytes=0.0)
    left = 1.0 - optimizer.offload
    if left < 1.0:
        moments, master = (
            replace(kept, each_bytes=kept.each_bytes * left) for kept in (moments, master)
        )
        if recipe.keeper != "deepspeed":
            gradients = replace(gradients, each_bytes=gradients.each_bytes * left)
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
    # a gather casts to the type of the computation
    most = run.element_bytes if run.split.zero == 3 else math.inf
    return FsdpUnit(
        name=name,
        dense=sum(weight.elements for weight in weights if not weight.expert),
        expert=sum(weight.elements for weight in weights if weight.expert),
        own=sum(_own(run, weight) for weight in weights),
        frozen_bytes=sum(math.ceil(min(each, most) * one.elements) for each, one in frozen),
        own_frozen_bytes=sum(math.ceil(each * _own(run, one)) for each, one in frozen),
        layer=layer,
        in_root=in_root,
        persistent_bytes=_persistent_bytes(run, every, layer),
        moments_bytes=sum((_moment_bytes(run, weight, layer) for weight in weights), 0.0),
        largest=max((_own(run, one) // one.number for one in weights), default=0),
        largest_matrix=max((size for one in weights for size in _sizes(one, layer)), default=0),
    )


def _sizes(weight: Weight, layer: RankLayer | None) -> list[int]:
    """Return the elements of the engine's parameters in a weight: q, k, v or gate, up."""
    parts = [rows for _, rows in projections_of(layer, weight)] if layer is not None else []
    rest = weight.size // weight.shape[0]
    return [math.ceil(rows * rest) for rows in parts or [weight.shape[0]]]


def _persistent_bytes(run: Run, every: Sequence[Weight], layer: RankLayer | None) -> float:
    """Return the bytes of weights that ZeRO-3 keeps whole: parameters up to a number of elements.

    Source: `mark_persistent_parameters` of DeepSpeed, runtime/zero/parameter_offload.py.
    """
    states = run.runtime.states
    if states.keeper != "deepspeed" or run.split.zero < 3:
        return 0.0
    found = 0.0
    for weight in every:
        each = run.element_bytes if weight.trained else frozen_bytes(run, weight)
        for size in _sizes(weight, layer):
            # quantised weights are packed into elements of 16 bits
            packed = size * each / run.element_bytes
            if packed <= states.buckets.persistent:
                found += weight.number * size * each
    return found


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
    if wide and run.runtime.states.keeper != "deepspeed" and not optimizer.torchao:
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
    states = run.runtime.states
    one = states.one_root or (run.kernels.module == "transformers" and not states.apart)
    return one or states.least_unit > 0 or run.model.tied


def units_of(run: Run, chunk: Chunk) -> tuple[FsdpUnit, ...]:
    """Return the FSDP units of a chunk in the order of its forward.

    In torchtitan, each layer is a unit, the embedding is another, and so are final norm with head.
    In transformers only layers are wrapped, so embedding, final norm and head are one unit, unless
    the program wraps both tables. This also holds for torchtitan before 2025 and for tied
    embeddings.
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

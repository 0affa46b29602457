"""Weights, gradients and optimizer states of a rank in bytes, without activations and workspaces.

Only Megatron-LM is covered. Weights are separate tensors or, with the distributed optimizer, in
contiguous buffers whose shards are updated by one rank each. Sources: Rajbhandari et al., arXiv
1910.02054, section 3 (bytes per parameter); Megatron-Core's documentation of its distributed
optimizer (buffers and padding).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from autopar.price.parameters import Weight, frozen_bytes
from autopar.records import Record
from autopar.run.run import Run
from autopar.run.runtime import BLACKWELL

_START = 64
"""Alignment of weights in a buffer, elements."""
_END = 128
"""Alignment of each rank's shard of a bucket, elements."""
_NCCL_END = 1 << 16
"""Alignment of bucket ends for NCCL's bandwidth, elements."""
_BUCKET = 40_000_000
_BUCKET_PER_RANK = 1_000_000
"""Minimum parameters of a bucket; a larger minimum applies per rank with many ranks."""


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
            matrices=_elements(weight for weight in group if _has_one_moment(weight)),
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
        # low-precision weights have a second, transposed copy; 16-bit weights have two copies
        low = buffer.quantized if precision.low_precision else 0
        eighth = math.ceil(low * precision.low_bytes)
        transposed = 0 if _needs_no_transpose(run) else eighth
        stored = buffer.elements * (4 if buffer.wide else element)
        if precision.low_weights:
            stored -= low * element - eighth
            copies += transposed
        elif eighth:
            copies += eighth + transposed
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


def _has_one_moment(weight: Weight) -> bool:
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

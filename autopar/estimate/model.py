"""ModelProfile from a spec and a card: the content of the two documented model files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.documents.spec import head_dim, padded_vocab_size, parameter_count
from autopar.errors import InputError
from autopar.estimate.card import Card, load_card
from autopar.estimate.memory import (
    Kernels,
    activation_bytes,
    checkpoint_bytes,
    logits_peak_bytes,
    other_memory,
)
from autopar.model import (
    LayerMemory,
    LayerProfile,
    LayerSpec,
    ModelProfile,
    ModelSpec,
    OtherMemory,
    OtherTime,
    TimePoint,
)
from autopar.plans import tensor_degrees
from autopar.sources import Source

__all__ = [
    "VOCAB_DEGREES",
    "Attention",
    "Gemm",
    "Traffic",
    "estimate_model",
    "layer_operations",
    "operation_time_s",
    "other_operations",
]


# --------------------------------------------------------------------------------------------------
# Forward time of layers, embedding, head and loss: a roofline per operation.
#
# Matrix products take FLOP / (peak * efficiency * fill), where fill is the share of the last wave
# of output tiles that is busy; everything else takes bytes / (memory bandwidth * efficiency). Every
# kernel adds a launch gap, which becomes the fixed part c0 of a layer's time.


_TILES = ((128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.85), (64, 64, 0.7))
"""Output tiles a library picks from, and their speed relative to the largest: smaller tiles move
more data per FLOP (assumption, after the tile discussion in NVIDIA's "Matrix Multiplication
Background User's Guide")."""
_K_HALF = 64
"""Depth that costs as much as filling and draining the pipeline of a tile (assumption)."""


@dataclass(frozen=True, kw_only=True)
class Gemm:
    """Products of (m, k) and (k, n), `count` of them in one kernel."""

    m: int
    n: int
    k: int
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Flash attention: FLOP already halved where causal, of queries against `kv_length` keys."""

    flop: float
    kv_length: int


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Kernels bound by memory traffic."""

    num_bytes: float
    kernels: int = 1


Operation = Gemm | Attention | Traffic


def operation_time_s(card: Card, operation: Operation, precision: str) -> float:
    """Return the seconds of one operation on one device."""
    peak = _peak(card, precision)
    if isinstance(operation, Traffic):
        rate = card.memory_bytes_per_s * card.memory_efficiency
        return operation.num_bytes / rate + operation.kernels * card.kernel_launch_s
    if isinstance(operation, Attention):
        length = operation.kv_length
        # short rows leave tiles empty: attention_half_seq_length reaches half of the rate
        share = card.attention_efficiency * length / (length + card.attention_half_seq_length)
        return operation.flop / (peak * share) + card.kernel_launch_s
    m, n, k = operation.m, operation.n, operation.k
    count = operation.count
    # a library takes the tile that is fastest for this shape
    fill = max(speed * _wave_fill(m, n, a, b, card.num_sms, count) for a, b, speed in _TILES)
    # filling and draining the pipeline costs as much as _K_HALF of the depth
    rate = peak * card.gemm_efficiency * fill * k / (k + _K_HALF)
    element = _element_bytes(precision)
    # every matrix moves once; thin ones are bound by that and not by FLOP
    traffic = element * (m * k + k * n + m * n) / (card.memory_bytes_per_s * card.memory_efficiency)
    # 2 FLOP per multiply-add; compute and traffic overlap inside a kernel, so the slower counts
    return count * max(2.0 * m * n * k / rate, traffic) + card.kernel_launch_s


def layer_operations(
    layer: LayerSpec,
    *,
    batch: int,
    seq_length: int,
    memory_seq_length: int | None = None,
    kernels: Kernels = "eager",
    element_bytes: int = 2,
) -> Iterator[Operation]:
    """Yield the operations of one layer's forward on one device.

    Bytes per element of the element-wise kernels follow from their reads and writes (e = element):
    norm 2e fused, 26 for RMSNorm in eager fp32 steps (to fp32 6, square-mean 4, scale 8, to bf16
    6, weight 4 minus what stays in cache 2); rotary 2e fused, 5 kernels of 12e in all eager;
    gated activation 3e fused, 5e eager; GELU 2e; residual 3e; layout copies of attention 2e.
    Experts: the router's product and softmax; a token is copied to and summed from each of the c
    experts it visits (2e and e per copy, e for the sum); the experts' products one by one in
    eager, all in one kernel when fused, each with an equal share of the tokens.
    """
    if layer.num_heads is None or layer.ffn_hidden_size is None:
        raise InputError("heads and MLP width are unknown; give a model spec (--model)")
    rows, e = batch * seq_length, element_bytes
    h, width = layer.hidden_size, head_dim(layer)
    q = layer.num_heads * width
    # without key-value heads of their own every head has its keys
    kv = (layer.num_kv_heads or layer.num_heads) * width
    eager = kernels == "eager"
    num_norms = 3 if layer.cross_attention else 2
    # a LayerNorm (weight and bias) is one kernel in eager code, too; an RMSNorm is six steps
    eager_norm = eager and layer.norm_parameters_per_hidden < 2 * num_norms
    norm = Traffic(
        num_bytes=rows * h * (26 if eager_norm else 2 * e), kernels=6 if eager_norm else 1
    )
    # both summands are read, the sum is written
    residual = Traffic(num_bytes=3.0 * rows * h * e)

    yield norm
    yield Gemm(m=rows, n=q + 2 * kv, k=h)
    if layer.gated_mlp:  # rotary positions
        per_element = 12 * e if eager else 2 * e
        # ten in eager code: five steps each for q and for k
        yield Traffic(num_bytes=rows * (q + kv) * per_element, kernels=10 if eager else 1)
    yield _attention(layer, rows, seq_length, width, causal=layer.causal)
    # eager attention copies its output back to sequence-first order
    if eager:
        yield Traffic(num_bytes=rows * 2.0 * q * e)
    yield Gemm(m=rows, n=h, k=q)
    yield residual
    if layer.cross_attention:
        # keys and values come from the other sequence, whose length may differ
        keys = memory_seq_length or seq_length
        yield norm
        yield Gemm(m=rows, n=q, k=h)
        yield Gemm(m=batch * keys, n=2 * kv, k=h)
        # every token of the other sequence is there already: nothing to mask
        yield _attention(layer, rows, keys, width, causal=False)
        yield Gemm(m=rows, n=h, k=q)
        yield residual
    yield norm
    yield from _mlp(layer, rows, eager=eager, element_bytes=e)
    yield residual


def other_operations(
    spec: ModelSpec, *, batch: int, seq_lengths: tuple[int, ...], element_bytes: int = 2
) -> Iterator[Operation]:
    """Yield the operations of embedding, final norm, head and loss of one forward.

    Look-up 3e bytes per element (read row, write, positions or scale); loss 22 bytes per logit:
    to fp32 6, maximum 4, shift and exponential 8, sum 4.
    """
    vocab, e = padded_vocab_size(spec), element_bytes
    for layer, length in zip(spec.layers, seq_lengths, strict=True):
        yield Traffic(num_bytes=3.0 * batch * length * layer.hidden_size * e, kernels=2)
    # head and loss follow the last layer type only; an encoder in front has none
    rows, hidden = batch * seq_lengths[-1], spec.layers[-1].hidden_size
    yield Traffic(num_bytes=rows * hidden * 26.0, kernels=6)
    yield Gemm(m=rows, n=vocab, k=hidden)
    yield Traffic(num_bytes=rows * vocab * 22.0, kernels=8)


def _mlp(layer: LayerSpec, rows: int, *, eager: bool, element_bytes: int) -> Iterator[Operation]:
    """Yield the operations between the norm and the residual: one MLP, or a router and experts."""
    h, ffn, e = layer.hidden_size, layer.ffn_hidden_size or 0, element_bytes
    groups, tokens, copies = 1, rows, rows
    if layer.num_experts is not None:
        visited = layer.experts_per_token or layer.num_experts
        copies = rows * visited
        groups = min(layer.num_experts, copies)  # few tokens leave experts idle
        # the fullest expert sets the time: an equal share, rounded up
        tokens = math.ceil(copies / groups)
        yield Gemm(m=rows, n=layer.num_experts, k=h)
        yield Traffic(num_bytes=rows * layer.num_experts * 12.0, kernels=4)
        yield Traffic(num_bytes=2.0 * copies * h * e)
    # eager code runs one expert after the other, grouped kernels run all at once
    kernels, count = (groups, 1) if eager else (1, groups)
    # a bias that is not fused reads and writes every value once more
    bias_bytes = 2 * e if eager and layer.biases else 0
    activation = ((5 if eager else 3) if layer.gated_mlp else 2) * e + bias_bytes
    up = Gemm(m=tokens, n=ffn * (2 if layer.gated_mlp else 1), k=h, count=count)
    yield from [up] * kernels
    yield Traffic(num_bytes=float(copies * ffn * activation), kernels=2 * kernels if eager else 1)
    yield from [Gemm(m=tokens, n=h, k=ffn, count=count)] * kernels
    if layer.num_experts is not None:
        yield Traffic(num_bytes=(copies + rows) * float(h * e))


def _attention(
    layer: LayerSpec, rows: int, kv_length: int, width: int, *, causal: bool
) -> Attention:
    """Return 4*S*S_kv*a*d FLOP per sample (QK^T and PV), half of it when causal."""
    flop = 4.0 * rows * kv_length * (layer.num_heads or 1) * width
    return Attention(flop=flop / 2 if causal else flop, kv_length=kv_length)


def _wave_fill(m: int, n: int, tile_m: int, tile_n: int, num_sms: int, count: int) -> float:
    """Return useful work / occupied capacity: the edges of tiles and the last wave are idle."""
    tiles = count * math.ceil(m / tile_m) * math.ceil(n / tile_n)
    useful = count * (m * n) / (tiles * tile_m * tile_n)
    return useful * tiles / (math.ceil(tiles / num_sms) * num_sms)


def _peak(card: Card, precision: str) -> float:
    if precision not in card.flop_per_s:
        raise InputError(f"precision must be bf16, fp16 or fp32, got {precision!r}")
    return card.flop_per_s[precision]


def _element_bytes(precision: str) -> int:
    return 4 if precision == "fp32" else 2


# --------------------------------------------------------------------------------------------------
# A whole profile: layer times, vocabulary times, memory tables.


VOCAB_DEGREES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Degrees of embedding and head: the vocabulary is padded, so heads need not be divisible."""


def estimate_model(
    spec: ModelSpec,
    card: str,
    *,
    precision: str = "bf16",
    sequence_parallel: bool = True,
    seq_lengths: Sequence[int] | None = None,
    batches: Sequence[int] = (1, 2, 3, 4, 5, 6, 7, 8),
    kernels: Kernels = "eager",
) -> ModelProfile:
    """Return the estimated profile of a model on one device of a card.

    `seq_lengths` are applied to all layer types; the default is every type's own length.
    `kernels` says what the training code fuses (see `autopar.estimate.memory`). Formulas:
    `autopar.estimate.model` for times, `autopar.estimate.memory` for memory. The backward is
    not estimated: readers take twice the forward. Raises InputError.
    """
    device = load_card(card)
    if precision not in device.flop_per_s:
        raise InputError(f"precision must be bf16, fp16 or fp32, got {precision!r}")
    if not batches or min(batches) < 1 or (seq_lengths and min(seq_lengths) < 1):
        raise InputError("batches and sequence lengths must be whole numbers from 1")
    element = 4 if precision == "fp32" else 2
    own = tuple(layer.seq_length for layer in spec.layers)
    # lengths that are asked for hold for all layer types; else every type has its own
    cases = [tuple(s for _ in spec.layers) for s in seq_lengths] if seq_lengths else [own]

    times: list[list[TimePoint]] = [[] for _ in spec.layers]
    memory: list[dict[int, LayerMemory]] = [{} for _ in spec.layers]
    other_times: list[OtherTime] = []
    others: dict[str, dict[tuple[int, ...], OtherMemory]] = {"only": {}, "first": {}, "last": {}}
    # the vocabulary may be sharded as any layer is
    tensor = {t for layer in spec.layers for t in tensor_degrees(layer)}
    vocab_degrees = tuple(sorted(tensor | set(VOCAB_DEGREES)))
    for lengths in dict.fromkeys(cases):
        for index, (layer, length) in enumerate(zip(spec.layers, lengths, strict=True)):
            # cross-attention reads what the layer type in front of it, the encoder, puts out
            source_length = lengths[index - 1] if layer.cross_attention and index else None
            for batch in batches:
                seconds = sum(
                    operation_time_s(device, operation, precision)
                    for operation in layer_operations(
                        layer,
                        batch=batch,
                        seq_length=length,
                        memory_seq_length=source_length,
                        kernels=kernels,
                        element_bytes=element,
                    )
                )
                times[index].append(TimePoint(batch=batch, seq_length=length, forward_s=seconds))
            memory[index][length] = LayerMemory(
                parameter_count=float(parameter_count(layer)),
                activation_bytes_per_sample={
                    degree: activation_bytes(
                        layer,
                        length,
                        degree,
                        element_bytes=element,
                        sequence_parallel=sequence_parallel,
                        kernels=kernels,
                        memory_seq_length=source_length,
                    )
                    for degree in tensor_degrees(layer)
                },
                checkpoint_bytes_per_sample=checkpoint_bytes(layer, length, element),
            )
        for batch in batches:
            operations = other_operations(
                spec, batch=batch, seq_lengths=lengths, element_bytes=element
            )
            seconds = sum(operation_time_s(device, op, precision) for op in operations)
            other_times.append(OtherTime(batch=batch, seq_lengths=lengths, forward_s=seconds))
        found = other_memory(
            spec,
            lengths,
            vocab_degrees,
            element_bytes=element,
            sequence_parallel=sequence_parallel,
            kernels=kernels,
        )
        for position, value in found.items():
            others[position][lengths] = value
    note = f"estimated: {spec.name} on card {device.name}, {precision}, {kernels} kernels"
    return ModelProfile(
        layers=tuple(
            LayerProfile(times=tuple(t), memory=m) for t, m in zip(times, memory, strict=True)
        ),
        other_times=tuple(other_times),
        other_memory=others,
        sequence_parallel=sequence_parallel,
        precision=precision,
        estimated=True,
        logits_peak_bytes_per_sample=logits_peak_bytes(spec, max(x[-1] for x in cases)),
        sources=(
            Source(role="model spec", path=spec.name, estimated=True),
            device.source,
        ),
        notes=(note,),
    )

"""ModelProfile from a spec and a card: the content of the two documented model files."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import InputError
from autopar.estimate.cards import load_card
from autopar.estimate.memory import (
    Kernels,
    activation_bytes,
    checkpoint_bytes,
    logits_peak_bytes,
    other_memory,
    tensor_degrees,
)
from autopar.estimate.roofline import layer_operations, operation_time_s, other_operations
from autopar.model import (
    LayerMemory,
    LayerProfile,
    ModelProfile,
    ModelSpec,
    OtherMemory,
    OtherTime,
    TimePoint,
)
from autopar.sources import Source
from autopar.specs import parameter_count

__all__ = ["VOCAB_DEGREES", "estimate_model"]


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
    `autopar.estimate.roofline` for times, `autopar.estimate.memory` for memory. The backward is
    not estimated: readers take twice the forward. Raises InputError.
    """
    device = load_card(card)
    if precision not in device.flop_per_s:
        raise InputError(f"precision must be bf16, fp16 or fp32, got {precision!r}")
    if not batches or min(batches) < 1 or (seq_lengths and min(seq_lengths) < 1):
        raise InputError("batches and sequence lengths must be whole numbers from 1")
    element = 4 if precision == "fp32" else 2
    own = tuple(layer.seq_length for layer in spec.layers)
    cases = [tuple(s for _ in spec.layers) for s in seq_lengths] if seq_lengths else [own]

    times: list[list[TimePoint]] = [[] for _ in spec.layers]
    memory: list[dict[int, LayerMemory]] = [{} for _ in spec.layers]
    other_times: list[OtherTime] = []
    others: dict[str, dict[tuple[int, ...], OtherMemory]] = {"only": {}, "first": {}, "last": {}}
    tensor = {t for layer in spec.layers for t in tensor_degrees(layer)}
    vocab_degrees = tuple(sorted(tensor | set(VOCAB_DEGREES)))
    for lengths in dict.fromkeys(cases):
        for index, (layer, length) in enumerate(zip(spec.layers, lengths, strict=True)):
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

"""Memory tables of a `ModelProfile` for layers of Megatron-LM.

The terms are those of `autopar.price.account`, which counts the memory of a run. Here they are
computed for one sample and each tensor degree; `search.planning.cost` adds them up for plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from autopar.price.activations import input_bytes, layer_saved_bytes, stream_bytes
from autopar.price.parameters import head_weight, layer_weights
from autopar.price.peak import backward_bytes, head_bytes, kept_logits_bytes
from autopar.price.workspaces import (
    cublas_bytes,
    dummy_weight_gradient_bytes,
    engine_workspace_bytes,
    rotary_bytes,
)
from autopar.rates.devices import default_attention
from autopar.records import replace
from autopar.run.model import LayerMemory, LayerSpec, ModelProfile, ModelSpec, OtherMemory
from autopar.run.of_plan import model_of_spec, refuse_unlike
from autopar.run.plan import tensor_degrees
from autopar.run.run import Run
from autopar.run.runtime import Kernels, Precision, PrecisionKind, Runtime
from autopar.run.strategy import Chunk, Split, Strategy, even_chunks, uniform_layers
from autopar.sources import Source

_TOKEN_BYTES = 12
"""Bytes per token of a micro-batch: its id, the next id, its position, and its weight in the
loss."""


def megatron_run(
    spec: ModelSpec,
    layer: LayerSpec,
    *,
    tp: int,
    sequence_parallel: bool,
    precision: PrecisionKind,
    gpu: str,
) -> Run:
    """Return a Megatron-LM run of one layer and one sample on `tp` tensor ranks.

    Raises InputError if Megatron-LM does not support the layer, or sizes are unknown.
    """
    one = replace(spec, layers=(replace(layer, num_layers=1),), mtp_layers=0, interleaved=False)
    model = model_of_spec(one)
    refuse_unlike(model)
    # each rank has its share of all experts, and every rank has all tokens
    split = Split(tp=tp, etp=tp, sequence_parallel=sequence_parallel)
    layers, ends = uniform_layers(1, split)
    return Run(
        name=spec.name,
        model=model,
        strategy=Strategy(
            gpus=tp,
            layers=layers,
            ends=ends,
            stages=even_chunks(1, 1),
            micro_batch=1,
            global_batch=1,
        ),
        runtime=Runtime(
            engine="megatron",
            precision=Precision(kind=precision),
            kernels=Kernels(attention=default_attention(gpu, precision=precision)),
            masks=False,
        ),
        seq_length=layer.seq_length,
        gpu=gpu,
    )


def with_megatron_memory(
    profile: ModelProfile,
    spec: ModelSpec,
    *,
    gpu: str,
) -> ModelProfile:
    """Return a profile with the memory of Megatron-LM's layers, head and workspaces.

    Times are unchanged. Experts are sharded by tensor parallelism only (expert degree 1).

    gpu : device such as `h100-80gb`, which determines the workspaces.

    Raises InputError as `megatron_run` does.
    """
    precision = cast(PrecisionKind, profile.precision)
    lengths = tuple(layer.seq_length for layer in spec.layers)

    def run_of(layer: LayerSpec, tp: int) -> Run:
        scattered = profile.sequence_parallel
        return megatron_run(
            spec, layer, tp=tp, sequence_parallel=scattered, precision=precision, gpu=gpu
        )

    layers = tuple(
        replace(measured, memory={layer.seq_length: _layer_memory(layer, partial(run_of, layer))})
        for layer, measured in zip(spec.layers, profile.layers, strict=True)
    )
    first, last = run_of(spec.layers[0], 1), run_of(spec.layers[-1], 1)
    others = _other_memory(last, profile.other_memory, lengths)
    logits = _logits(last, 1)
    return replace(
        profile,
        layers=layers,
        other_memory={position: {lengths: memory} for position, memory in others.items()},
        # memory of the loss in addition to the logits kept for the backward
        logits_peak_bytes_per_sample=float(head_bytes(logits) - kept_logits_bytes(logits)),
        rank_bytes=float(
            cublas_bytes(first)
            + engine_workspace_bytes(first)
            + rotary_bytes(first, first.strategy.stages[0])
        ),
        sources=(
            *(source for source in profile.sources if not source.role.startswith("memory")),
            Source(role="memory", path="Megatron-LM's layers, from their terms", estimated=True),
        ),
    )


def with_memory_of(
    engine: str | None, profile: ModelProfile, spec: ModelSpec, *, gpu: str
) -> ModelProfile:
    """Return a profile with the layer memory of an engine; raises as `with_megatron_memory`.

    For engines other than Megatron-LM the profile is returned unchanged.
    """
    if engine != "megatron":
        return profile
    return with_megatron_memory(profile, spec, gpu=gpu)


def _layer_memory(layer: LayerSpec, run_of: Callable[[int], Run]) -> LayerMemory:
    """Return the memory of one layer type by tensor degree, bytes per sample.

    run_of : function that returns the run of a tensor degree.
    """
    kept: dict[int, float] = {}
    backward: dict[int, float] = {}
    shared: dict[int, float] = {}
    for degree in tensor_degrees(layer):
        run = run_of(degree)
        at = run.rank_layers[0]
        kept[degree] = float(layer_saved_bytes(at))
        needed, freed = backward_bytes(run, Chunk(False, (0,), 0, False))
        backward[degree] = float(needed - freed)
        shared[degree] = float(dummy_weight_gradient_bytes(run, [layer_weights(at)]))
    whole = run_of(1).rank_layers[0]
    return LayerMemory(
        parameter_count=float(sum(weight.elements for weight in layer_weights(whole))),
        activation_bytes_per_sample=kept,
        checkpoint_bytes_per_sample=float(input_bytes(whole)),
        backward_bytes_per_sample=backward,
        shared_bytes=shared,
    )


def _logits(run: Run, degree: int) -> Run:
    """Return a single-rank run whose head has the columns of one of `degree` tensor ranks."""
    unit = run.model.vocab_divisor * degree
    rows = math.ceil(run.model.vocab / unit) * unit // degree
    return replace(run, model=replace(run.model, vocab=rows, vocab_divisor=1))


def _other_memory(
    run: Run,
    measured: Mapping[str, Mapping[tuple[int, ...], OtherMemory]],
    lengths: tuple[int, ...],
) -> dict[str, OtherMemory]:
    """Return the memory of embedding and head by position; model states are unchanged.

    The first stage saves the token inputs. The last stage also saves input and output of the final
    norm and the logits, and has the dummy weight gradient of the head and a buffer of the gradient
    sent back. A single stage has all but that buffer.
    """
    found = {}
    batch, stream = float(_TOKEN_BYTES * run.tokens), stream_bytes(run)
    for position, tables in measured.items():
        memory = tables[lengths]
        kept, held = {}, {}
        for degree in memory.model_state_bytes:
            head = _logits(run, degree)
            tokens = stream / (degree if run.split.sequence_parallel else 1)
            end = position != "first"
            kept[degree] = batch + (2.0 * tokens + kept_logits_bytes(head) if end else 0.0)
            if position == "last":
                # The gradient sent back also has a buffer. The copies of whole sequences are
                # counted with the layers.
                kept[degree] += stream / degree
            held[degree] = (
                float(dummy_weight_gradient_bytes(head, [[head_weight(head)]])) if end else 0.0
            )
        found[position] = replace(memory, activation_bytes_per_sample=kept, held_bytes=held)
    return found

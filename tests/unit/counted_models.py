"""Profiles whose memory is counted and whose times are estimated, for models of any size.

What `profile-model --source exact` writes, without its files.
"""

from __future__ import annotations

from autopar.documents.sidecar import TensorKind
from autopar.rates.model import STATE_BYTES_PER_PARAMETER, estimate_model
from autopar.records import replace
from autopar.run.model import LayerMemory, LayerSpec, ModelProfile, ModelSpec, OtherMemory
from autopar.run.plan import tensor_degrees
from profiler.model.counting import ExactMemory, layer_memory, vocab_memory
from profiler.model.layers.sharding import Sharding

__all__ = ["counted_profile"]


def counted_profile(
    spec: ModelSpec, card: str = "h100", *, sequence_parallel: bool = True, most: int = 8
) -> ModelProfile:
    """Return the profile of a model with tensor and vocabulary degrees of at most `most`."""
    found = estimate_model(spec, card, sequence_parallel=sequence_parallel)
    kind: TensorKind = "sp" if sequence_parallel else "tp"
    lengths = tuple(layer.seq_length for layer in spec.layers)
    encoder = spec.layers[0].seq_length
    return replace(
        found,
        layers=tuple(
            replace(profile, memory={layer.seq_length: _layer(layer, kind, most, encoder)})
            for profile, layer in zip(found.layers, spec.layers, strict=True)
        ),
        other_memory={
            part: {lengths: _other(spec, part, kind, most)} for part in ("only", "first", "last")
        },
        logits_peak_bytes_per_sample=0.0,
    )


def _layer(layer: LayerSpec, kind: TensorKind, most: int, encoder: int) -> LayerMemory:
    degrees = [t for t in tensor_degrees(layer) if t <= most and layer.seq_length % t == 0]

    def count(sharding: Sharding) -> ExactMemory:
        length = encoder if layer.cross_attention else None
        return layer_memory(layer, sharding, encoder_seq_length=length)

    whole = {t: count(Sharding(degree=t, kind=kind)) for t in degrees}
    ulysses = {t: count(Sharding(degree=t, kind="ulysses")) for t in degrees if t > 1}
    saved = count(Sharding(checkpoint="full"))
    return LayerMemory(
        parameter_count=float(whole[1].num_parameters),
        activation_bytes_per_sample={t: float(c.activation_bytes) for t, c in whole.items()},
        checkpoint_bytes_per_sample=float(saved.activation_bytes),
        ulysses_activation_bytes_per_sample={
            t: float(c.activation_bytes) for t, c in ulysses.items()
        },
        backward_bytes_per_sample={t: float(c.peak_bytes) for t, c in whole.items()},
        ulysses_backward_bytes_per_sample={t: float(c.peak_bytes) for t, c in ulysses.items()},
    )


def _other(spec: ModelSpec, part: str, kind: TensorKind, most: int) -> OtherMemory:
    counts = {
        t: vocab_memory(spec, part, degree=t, kind=kind)  # type: ignore[arg-type]
        for t in (1, 2, 4, 8)
        if t <= most
    }
    return OtherMemory(
        model_state_bytes={
            t: float(STATE_BYTES_PER_PARAMETER * c.num_parameters) for t, c in counts.items()
        },
        # the documented tables hold the loss's peak beside what is kept
        activation_bytes_per_sample={
            t: float(c.activation_bytes + (c.peak_bytes if part != "first" else 0))
            for t, c in counts.items()
        },
    )

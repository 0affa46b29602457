"""Memory of shipped models, counted exactly, in the place of an estimate of it.

A file holds one length of the layers, whose memory is exactly proportional to the tokens, and
several of embedding and head, whose peak is not: between two of them it is on a line, which is at
least what is needed, since a peak is the largest of several lines.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from autopar import catalog
from autopar.locate import model_file_name
from autopar.model import LayerMemory, LayerSpec, ModelProfile, ModelSpec, OtherMemory
from autopar.model_files import read_model_memory
from autopar.specs import load_spec

__all__ = ["SHIPPED_PRECISION", "with_shipped_memory"]

SHIPPED_PRECISION: Literal["bf16"] = "bf16"
"""Of the shipped memory files, which hold for everything that has as many bytes per element."""
_PRECISIONS = (SHIPPED_PRECISION, "fp16")


def with_shipped_memory(profile: ModelProfile, spec: ModelSpec, name: str) -> ModelProfile:
    """Return an estimated profile with the memory that is shipped with the model `name`.

    spec : what is planned, of which the profile was estimated. Where it is not the shipped model,
    but for numbers of layers and lengths, memory stays estimated, and a note says why.
    """
    folder = catalog.find_configs(name)
    if folder is None:
        return _with_note(profile, f"{spec.name} is not a shipped model")
    shipped = load_spec(name)
    file = folder / model_file_name("memory", SHIPPED_PRECISION, shipped)
    obstacle = _obstacle(profile, spec, shipped, file)
    if obstacle is not None:
        return _with_note(profile, obstacle)
    memory = read_model_memory(
        file,
        spec=shipped,
        sequence_parallel=profile.sequence_parallel,
        precision=SHIPPED_PRECISION,
    )
    factor = _factor(spec, shipped) or Fraction(1)
    notes = [*profile.notes, *memory.notes]
    if factor != 1:
        own, lengths = (
            ", ".join(str(layer.seq_length) for layer in layers)
            for layers in (shipped.layers, spec.layers)
        )
        notes.append(
            f"scaled: memory of layers linearly from sequence length {own} to {lengths}, which is "
            "exact; embedding and head between counted lengths"
        )
    return dataclasses.replace(
        profile,
        layers=tuple(
            dataclasses.replace(
                layer, memory={new.seq_length: _scaled_layer(table[old.seq_length], float(factor))}
            )
            for layer, table, old, new in zip(
                profile.layers, memory.layers, shipped.layers, spec.layers, strict=True
            )
        ),
        other_memory={
            position: {
                tuple(layer.seq_length for layer in spec.layers): _other_at(table, shipped, factor)
            }
            for position, table in memory.other.items()
        },
        logits_peak_bytes_per_sample=memory.logits_peak_bytes_per_sample,
        sources=(*profile.sources, *memory.sources),
        notes=tuple(notes),
    )


def _with_note(profile: ModelProfile, why: str) -> ModelProfile:
    note = f"memory is estimated: {why}"
    return dataclasses.replace(profile, notes=(*profile.notes, note))


def _obstacle(profile: ModelProfile, spec: ModelSpec, shipped: ModelSpec, file: Path) -> str | None:
    """Return why the shipped file does not say the memory of what is planned."""
    if not file.is_file():
        return f"no counted memory of {shipped.name} is shipped"
    if profile.precision not in _PRECISIONS:
        return f"the shipped file is of {SHIPPED_PRECISION}, not {profile.precision}"
    for key, there, asked in _differences(spec, shipped):
        return f"the shipped file is of {key} {there}, not {asked}"
    if _factor(spec, shipped) is None:
        own, lengths = (
            ", ".join(str(layer.seq_length) for layer in layers)
            for layers in (shipped.layers, spec.layers)
        )
        return f"the shipped file is of sequence lengths {own}, and {lengths} are in no proportion"
    return None


def _differences(spec: ModelSpec, shipped: ModelSpec) -> list[tuple[str, Any, Any]]:
    """Return (field, shipped, asked) of what memory depends on besides the lengths."""
    pairs: list[tuple[ModelSpec | LayerSpec, ModelSpec | LayerSpec]] = [(spec, shipped)]
    pairs += zip(spec.layers, shipped.layers, strict=True)
    return [
        (field.name, getattr(old, field.name), getattr(new, field.name))
        for new, old in pairs
        for field in dataclasses.fields(new)
        if field.name not in ("layers", "num_layers", "seq_length")
        and getattr(old, field.name) != getattr(new, field.name)
    ]


def _factor(spec: ModelSpec, shipped: ModelSpec) -> Fraction | None:
    """Return the one factor by which all lengths differ, None where there are several."""
    factors = {
        Fraction(new.seq_length, old.seq_length)
        for new, old in zip(spec.layers, shipped.layers, strict=True)
    }
    return factors.pop() if len(factors) == 1 else None


def _scaled_layer(memory: LayerMemory, factor: float) -> LayerMemory:
    saved = memory.checkpoint_bytes_per_sample
    return LayerMemory(
        parameter_count=memory.parameter_count,
        activation_bytes_per_sample=_times(memory.activation_bytes_per_sample, factor),
        checkpoint_bytes_per_sample=None if saved is None else saved * factor,
        ulysses_activation_bytes_per_sample=_times(
            memory.ulysses_activation_bytes_per_sample, factor
        ),
        backward_bytes_per_sample=_times(memory.backward_bytes_per_sample, factor),
        ulysses_backward_bytes_per_sample=_times(memory.ulysses_backward_bytes_per_sample, factor),
    )


def _times(values: Mapping[int, float], factor: float) -> dict[int, float]:
    return {degree: value * factor for degree, value in values.items()}


def _other_at(
    table: Mapping[tuple[int, ...], OtherMemory], shipped: ModelSpec, factor: Fraction
) -> OtherMemory:
    """Return the memory of embedding and head at `factor` times the model's own lengths."""
    own = tuple(layer.seq_length for layer in shipped.layers)
    states: dict[int, float] = {}
    points: dict[int, list[tuple[float, float]]] = {}
    for lengths, memory in sorted(table.items()):
        states |= memory.model_state_bytes  # the same at every length
        for degree, value in memory.activation_bytes_per_sample.items():
            points.setdefault(degree, []).append((lengths[0] / own[0], value))
    return OtherMemory(
        model_state_bytes=dict(sorted(states.items())),
        activation_bytes_per_sample={
            degree: _on_line(points[degree], float(factor)) for degree in sorted(points)
        },
    )


def _on_line(points: list[tuple[float, float]], at: float) -> float:
    """Return the value at `at`: between its neighbours, before the first on the first line.

    Behind the last, and with one point, in proportion: the fixed part of a peak only shrinks.
    """
    places = [place for place, _ in points]
    if at >= places[-1] or len(points) == 1:
        return points[-1][1] * (at / places[-1])
    right = max(1, bisect_left(places, at))
    (x0, y0), (x1, y1) = points[right - 1 : right + 1]
    return y0 + (y1 - y0) * ((at - x0) / (x1 - x0))

"""Turns measured cells into the two documented files, and says what is wrong with them.

A pure function of the measurements: whoever wrote them, and in how many runs, the same cells give
the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from autopar.computation_files import computation_keys
from autopar.memory_files import memory_keys
from autopar.model import (
    LayerMemory,
    LayerProfile,
    ModelProfile,
    ModelSpec,
    OtherMemory,
    OtherTime,
    TimePoint,
)
from autopar.model_measurements import LayerTimes, ModelMeasurement, TensorKind
from autopar.stats import summarize, warnings_of
from autopar.units import MS
from profiler.model.options import GALVATRON_BATCHES, Mode
from profiler.model.sizes import seqs_text

__all__ = ["STATE_BYTES_PER_PARAMETER", "ModelDocument", "derive_computation", "derive_memory"]

STATE_BYTES_PER_PARAMETER = 16
"""Of the documented model states: weight, gradient and optimizer, whatever the precision."""
_APART = 0.10
"""A layer measured alone and one by difference may differ by so much without a warning."""
_PARTS = ("only", "first", "last")
_Size = tuple[int, int, int]
"""Layer type, batch, sequence length."""


@dataclass(frozen=True, kw_only=True)
class ModelDocument:
    """One documented file, and what goes into its sidecar."""

    data: Mapping[str, Any]
    """Documented keys; empty when no cell gave one."""
    layer_times: list[LayerTimes] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def derive_computation(
    found: Mapping[str, ModelMeasurement], spec: ModelSpec, mode: Mode
) -> ModelDocument:
    """Return the computation file of measured cells: ms per layer per sample, and raw passes.

    A processed entry is the median forward of a layer measured alone. The raw entries are medians
    of whole forwards in ms per batch, and their difference a check of the former.
    """
    cells = [m for m in found.values() if m.status == "ok" and m.samples_s.get("forward")]
    plain = [m for m in cells if m.degree == 1 and m.num_layers is None]
    layers = [_points(plain, kind) for kind in range(len(spec.layers))]
    stacks = sorted(
        (m for m in cells if m.num_layers is not None),
        key=lambda m: (m.seq_lengths, m.batch, m.num_layers),
    )
    alone = {
        (kind, p.batch, p.seq_length): p.forward_s
        for kind, points in enumerate(layers)
        for p in points
    }
    others = {(tuple(m.seq_lengths), m.batch): _forward(m) for m in plain if m.part != "layer"}
    for m in stacks:  # of a module of somebody's own, which does not say what its rest is
        rest = _rest(m, alone)
        if rest is not None:
            others.setdefault((tuple(m.seq_lengths), m.batch), rest)
    profile = ModelProfile(
        layers=tuple(LayerProfile(times=points, memory={}) for points in layers),
        other_times=tuple(
            OtherTime(batch=batch, seq_lengths=seqs, forward_s=others[seqs, batch])
            for seqs, batch in sorted(others)
        ),
        other_memory={},
        sequence_parallel=True,
    )
    data: dict[str, Any] = dict(computation_keys(profile))
    for m in stacks:
        counts = ",".join(map(str, m.num_layers or ()))
        seqs = seqs_text(tuple(m.seq_lengths))
        data[f"layernum[{counts}]_bsz{m.batch}_seq{seqs}"] = _forward(m) / MS
    warnings = [*_missing(found), *_batch_warnings(layers, mode)]
    warnings += _differences(stacks, alone) + _scatter(cells)
    return ModelDocument(data=data, layer_times=_layer_times(cells), warnings=warnings)


def derive_memory(
    found: Mapping[str, ModelMeasurement], spec: ModelSpec, kinds: tuple[TensorKind, TensorKind]
) -> ModelDocument:
    """Return the memory file of counted cells: MiB per sample, with and without `_sp`.

    kinds : of the cells that the tables with and without `_sp` are made of.

    A layer's activations are what it keeps; those around the layers are what they keep and, on
    the stage of the loss, what its peak needs above that, as the documented tables contain it.
    """
    cells = [m for m in found.values() if m.status == "ok" and m.bytes]
    data: dict[str, Any] = {}
    for sequence_parallel, kind in zip((True, False), kinds, strict=True):
        profile = ModelProfile(
            layers=tuple(
                LayerProfile(times=(), memory=_layer_memory(cells, number, kind))
                for number in range(len(spec.layers))
            ),
            other_times=(),
            other_memory=_other_memory(cells, kind),
            sequence_parallel=sequence_parallel,
        )
        data |= {key: table for key, table in memory_keys(profile).items() if table}
    return ModelDocument(data=data, warnings=_missing(found))


def _forward(measurement: ModelMeasurement) -> float:
    return median(measurement.samples_s["forward"])


def _points(cells: Iterable[ModelMeasurement], kind: int) -> tuple[TimePoint, ...]:
    points = (
        TimePoint(batch=m.batch, seq_length=m.seq_lengths[0], forward_s=_forward(m))
        for m in cells
        if m.part == "layer" and m.layer_type == kind
    )
    return tuple(sorted(points, key=lambda p: (p.seq_length, p.batch)))


def _layer_times(cells: Iterable[ModelMeasurement]) -> list[LayerTimes]:
    result = []
    for m in cells:
        if m.part != "layer" or m.layer_type is None or m.checkpoint != "none":
            continue
        summary = {name: summarize(samples) for name, samples in m.samples_s.items() if samples}
        backward = summary.get("backward")
        rest = {
            f"{name}_s": summary[name].median_s
            for name in ("recompute", "optimizer")
            if name in summary
        }
        result.append(
            LayerTimes(
                layer_type=m.layer_type,
                batch=m.batch,
                seq_length=m.seq_lengths[0],
                degree=m.degree,
                kind=m.kind,
                forward_s=summary["forward"].median_s,
                forward_low_s=summary["forward"].low_s,
                forward_high_s=summary["forward"].high_s,
                backward_s=None if backward is None else backward.median_s,
                backward_low_s=None if backward is None else backward.low_s,
                backward_high_s=None if backward is None else backward.high_s,
                **rest,
            )
        )
    return sorted(result, key=lambda t: (t.layer_type, t.seq_length, t.batch, t.degree, t.kind))


def _layer_memory(
    cells: Iterable[ModelMeasurement], number: int, kind: TensorKind
) -> dict[int, LayerMemory]:
    """Return the memory of one layer type by length; lengths without a whole layer are left out."""
    own = [m for m in cells if m.part == "layer" and m.layer_type == number]
    result: dict[int, LayerMemory] = {}
    for seq in sorted({m.seq_lengths[0] for m in own}):
        here = [m for m in own if m.seq_lengths[0] == seq]
        kept = _by_degree([m for m in here if m.checkpoint == "none"], kind)
        if 1 not in kept:
            continue
        whole = kept[1]
        saved = next((m for m in here if m.checkpoint == "full" and m.degree == 1), None)
        result[seq] = LayerMemory(
            parameter_count=float(whole.num_parameters or 0),
            activation_bytes_per_sample={
                degree: m.bytes["activation"] / m.batch for degree, m in kept.items()
            },
            checkpoint_bytes_per_sample=(
                None if saved is None else saved.bytes["activation"] / saved.batch
            ),
        )
    return result


def _other_memory(
    cells: Iterable[ModelMeasurement], kind: TensorKind
) -> dict[str, dict[tuple[int, ...], OtherMemory]]:
    result: dict[str, dict[tuple[int, ...], OtherMemory]] = {}
    own = [m for m in cells if m.part != "layer"]
    for part in _PARTS:
        for seqs in sorted({tuple(m.seq_lengths) for m in own if m.part == part}):
            here = [m for m in own if m.part == part and tuple(m.seq_lengths) == seqs]
            kept = _by_degree(here, kind)
            if 1 not in kept:
                continue
            result.setdefault(part, {})[seqs] = OtherMemory(
                model_state_bytes={
                    degree: float(STATE_BYTES_PER_PARAMETER * (m.num_parameters or 0))
                    for degree, m in kept.items()
                },
                activation_bytes_per_sample={
                    degree: (
                        m.bytes["activation"]
                        + (m.bytes.get("peak", 0.0) if part != "first" else 0.0)
                    )
                    / m.batch
                    for degree, m in kept.items()
                },
            )
    return result


def _by_degree(cells: Iterable[ModelMeasurement], kind: TensorKind) -> dict[int, ModelMeasurement]:
    """Return the cells of one way to shard, by degree; at degree 1 all ways are the same."""
    return {
        m.degree: m
        for m in sorted(cells, key=lambda m: m.degree)
        if m.degree == 1 or m.kind == kind
    }


def _missing(found: Mapping[str, ModelMeasurement]) -> list[str]:
    """Return sentences on cells that gave nothing, one per reason."""
    by_reason: dict[str, list[str]] = {}
    for m in found.values():
        if m.status != "ok":
            by_reason.setdefault(f"{m.status}: {m.reason}", []).append(m.key)
    return [
        f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''} {reason}"
        for reason, keys in by_reason.items()
    ]


def _batch_warnings(layers: list[tuple[TimePoint, ...]], mode: Mode) -> list[str]:
    if mode != "batch" or not layers or not layers[0]:
        return []
    counts = {p.seq_length: 0 for p in layers[0]}
    for point in layers[0]:
        counts[point.seq_length] += 1
    return [
        f"{count} batch sizes were measured at sequence length {seq}, and Galvatron refuses batch "
        f"mode with fewer than {GALVATRON_BATCHES}: measure with --resume --bsz "
        f"1:{GALVATRON_BATCHES}"
        for seq, count in counts.items()
        if count < GALVATRON_BATCHES
    ]


def _rest(stack: ModelMeasurement, alone: Mapping[_Size, float]) -> float | None:
    """Return the seconds of a whole forward that its layers do not explain, at least 0."""
    sizes = [(kind, stack.batch, seq) for kind, seq in enumerate(stack.seq_lengths)]
    if any(size not in alone for size in sizes):
        return None
    counts = stack.num_layers or []
    layers = sum(n * alone[size] for n, size in zip(counts, sizes, strict=True))
    return max(0.0, _forward(stack) - layers)


def _differences(stacks: list[ModelMeasurement], alone: Mapping[_Size, float]) -> list[str]:
    """Return warnings where a layer alone takes much more or less than one among others."""
    apart: list[tuple[float, str]] = []
    checked = 0
    by_size: dict[tuple[int, tuple[int, ...]], list[ModelMeasurement]] = {}
    for m in stacks:
        by_size.setdefault((m.batch, tuple(m.seq_lengths)), []).append(m)
    for (batch, lengths), runs in by_size.items():
        low = min(runs, key=lambda m: m.num_layers or [])
        for kind, seq in enumerate(lengths):
            direct = alone.get((kind, batch, seq))
            more = max(runs, key=lambda m: (m.num_layers or [])[kind])
            count = (more.num_layers or [])[kind] - (low.num_layers or [])[kind]
            if direct is None or count < 1:
                continue
            checked += 1
            ratio = (_forward(more) - _forward(low)) / count / direct
            if abs(ratio - 1.0) > _APART:
                name = f"layertype_{kind}_bsz{batch}_seq{seq}"
                apart.append((abs(ratio - 1.0), f"{name} (x{ratio:.2f})"))
    if not apart:
        return []
    text = (
        f"{len(apart)} of {checked} layer times differ by more than {100 * _APART:.0f} % from the "
        f"difference of whole forwards, most {max(apart)[1]}: is the machine busy with something "
        "else?"
    )
    return [text]


def _scatter(cells: list[ModelMeasurement]) -> list[str]:
    suspicious = {
        m.key: said[0]
        for m in cells
        if (said := warnings_of(m.samples_s["forward"])) and m.part == "layer" and m.degree == 1
    }
    if not suspicious:
        return []
    key, first = next(iter(suspicious.items()))
    return [f"{len(suspicious)} layer times are unsteady; {key}: {first}"]

"""Turns measured cells into the two documented files, and says what is wrong with them.

A pure function of the measurements: whoever wrote them, and in how many runs, the same cells give
the same bytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
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
from autopar.model_measurements import (
    LayerTimes,
    ModelMeasurement,
    OtherTimes,
    TensorKind,
    TimeFit,
)
from autopar.stats import summarize
from autopar.units import MS
from profiler.model.checks import (
    Size,
    device_differences,
    few_batches,
    forward_s,
    layer_differences,
    missing_cells,
    unsteady_times,
)
from profiler.model.fits import bad_fits, fit_cells, fits_through
from profiler.model.options import Mode
from profiler.model.sizes import seqs_text

__all__ = [
    "STATE_BYTES_PER_PARAMETER",
    "ModelDocument",
    "derive_computation",
    "derive_memory",
]

STATE_BYTES_PER_PARAMETER = 16
"""Of the documented model states: weight, gradient and optimizer, whatever the precision."""
_PARTS = ("only", "first", "last")


@dataclass(frozen=True, kw_only=True)
class ModelDocument:
    """One documented file, and what goes into its sidecar."""

    data: Mapping[str, Any]
    """Documented keys; empty when no cell gave one."""
    layer_times: list[LayerTimes] = field(default_factory=list)
    other_times: list[OtherTimes] = field(default_factory=list)
    fits: list[TimeFit] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def derive_computation(
    found: Mapping[str, ModelMeasurement],
    spec: ModelSpec,
    mode: Mode | None,
    about: Container[str] | None = None,
) -> ModelDocument:
    """Return the computation file of measured cells: ms per layer per sample, and raw passes.

    mode, about : warnings are those of this mode on the cells with these keys; None is none in
    particular, and all cells.

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
    others = {(tuple(m.seq_lengths), m.batch): forward_s(m) for m in plain if m.part != "layer"}
    rests: dict[tuple[tuple[int, ...], int], float] = {}
    for m in stacks:  # of a module of somebody's own, which does not say what its rest is
        rest, size = _rest(m, alone), (tuple(m.seq_lengths), m.batch)
        if rest is not None and size not in others:
            rests.setdefault(size, rest)
    others |= rests
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
        data[f"layernum[{counts}]_bsz{m.batch}_seq{seqs}"] = forward_s(m) / MS
    fits = fit_cells(cells, rests)
    own = {key: m for key, m in found.items() if about is None or key in about}
    warnings = [*missing_cells(own), *few_batches(_at_lengths(layers, own.values()), mode)]
    warnings += layer_differences([m for m in stacks if m.key in own], alone)
    warnings += unsteady_times([m for m in cells if m.key in own])
    warnings += bad_fits(fits_through(fits, own.values()))
    return ModelDocument(
        data=data,
        layer_times=_layer_times(cells),
        other_times=_other_times(plain, rests),
        fits=fits,
        warnings=warnings,
    )


def derive_memory(
    found: Mapping[str, ModelMeasurement],
    spec: ModelSpec,
    kinds: tuple[TensorKind, TensorKind],
    about: Container[str] | None = None,
) -> ModelDocument:
    """Return the memory file of counted cells: MiB per sample, with and without `_sp`.

    kinds : of the cells that the tables with and without `_sp` are made of. about : keys of the
    cells that warnings are of; None is all.

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
    own = {key: m for key, m in found.items() if about is None or key in about}
    warnings = missing_cells(own) + device_differences(m for m in cells if m.key in own)
    return ModelDocument(data=data, warnings=warnings)


def _at_lengths(
    layers: Iterable[tuple[TimePoint, ...]], cells: Iterable[ModelMeasurement]
) -> list[tuple[TimePoint, ...]]:
    """Return the points at sequence lengths that these cells have."""
    lengths = {seq for m in cells for seq in m.seq_lengths}
    return [tuple(p for p in points if p.seq_length in lengths) for points in layers]


def _points(cells: Iterable[ModelMeasurement], kind: int) -> tuple[TimePoint, ...]:
    points = (
        TimePoint(batch=m.batch, seq_length=m.seq_lengths[0], forward_s=forward_s(m))
        for m in cells
        if m.part == "layer" and m.layer_type == kind
    )
    return tuple(sorted(points, key=lambda p: (p.seq_length, p.batch)))


def _layer_times(cells: Iterable[ModelMeasurement]) -> list[LayerTimes]:
    result = [
        LayerTimes(
            layer_type=m.layer_type,
            batch=m.batch,
            seq_length=m.seq_lengths[0],
            degree=m.degree,
            kind=m.kind,
            **_summary(m, ("forward", "backward", "recompute")),
            **_summary(m, ("optimizer",), spread=False),
        )
        for m in cells
        if m.part == "layer" and m.layer_type is not None and m.checkpoint == "none"
    ]
    return sorted(result, key=lambda t: (t.layer_type, t.seq_length, t.batch, t.degree, t.kind))


def _other_times(
    plain: Iterable[ModelMeasurement], rests: Mapping[tuple[tuple[int, ...], int], float]
) -> list[OtherTimes]:
    """Return the times of what is not a layer; of a difference the forward alone, if it has one."""
    result = [
        OtherTimes(
            batch=m.batch,
            seq_lengths=m.seq_lengths,
            **_summary(m, ("forward", "backward")),
        )
        for m in plain
        if m.part != "layer"
    ]
    result += [
        OtherTimes(batch=batch, seq_lengths=list(lengths), forward_s=time_s)
        for (lengths, batch), time_s in rests.items()
        if time_s > 0.0
    ]
    return sorted(result, key=lambda t: (t.seq_lengths, t.batch))


def _summary(
    cell: ModelMeasurement, names: Iterable[str], *, spread: bool = True
) -> dict[str, float]:
    """Return median, 5th and 95th percentile of the samples of these passes, by key."""
    found: dict[str, float] = {}
    for name in names:
        if samples := cell.samples_s.get(name):
            summary = summarize(samples)
            found[f"{name}_s"] = summary.median_s
            if spread:
                found |= {f"{name}_low_s": summary.low_s, f"{name}_high_s": summary.high_s}
    return found


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


def _rest(stack: ModelMeasurement, alone: Mapping[Size, float]) -> float | None:
    """Return the seconds of a whole forward that its layers do not explain, at least 0."""
    sizes = [(kind, stack.batch, seq) for kind, seq in enumerate(stack.seq_lengths)]
    if any(size not in alone for size in sizes):
        return None
    counts = stack.num_layers or []
    layers = sum(n * alone[size] for n, size in zip(counts, sizes, strict=True))
    return max(0.0, forward_s(stack) - layers)

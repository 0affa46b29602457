"""Derive the two profile files of Galvatron (computation, memory) from measured cells.

Also derives their fits and the warnings about suspicious cells. The result depends only on the
cells: equal cells give identical bytes, regardless of how many runs measured them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
from msgspec import field

from autopar.documents.model import memory_keys
from autopar.documents.sidecar import (
    FitCell,
    Form,
    ModelMeasurement,
    TensorKind,
    Term,
    TimeCoefficients,
    TimeFit,
)
from autopar.documents.times import computation_keys, seqs_text
from autopar.records import Record
from autopar.run.model import (
    LayerMemory,
    LayerProfile,
    ModelProfile,
    ModelSpec,
    OtherMemory,
    OtherTime,
    ShardedTime,
    TimePoint,
)
from autopar.statistics import (
    BAD_FIT,
    INTERVAL,
    REACH,
    bootstrap_times,
    fit_times,
    summarize,
    terms_of,
    warnings_of,
)
from autopar.units import MS, format_count
from profiler.model.options import GALVATRON_BATCHES, Mode

# --------------------------------------------------------------------------------------------------
# Fits of measured times, in the forms that the planner uses, and warnings about bad fits.
#
# The planner fits the times again when it reads the files. The fits in a sidecar are equal to
# these and show how accurate the planner's times are.


_Pass = Literal["forward", "backward", "recompute"]
_PASSES: tuple[_Pass, ...] = get_args(_Pass)
_Series = tuple[int | None, int, TensorKind, _Pass]
"""Layer type (None: embedding and head), tensor-parallel degree, sharding kind, pass."""
_Point = tuple[tuple[int, ...], int, tuple[float, ...]]
"""Sequence lengths, batch size, samples in seconds; a single sample has no spread."""
_REMEDY = (
    "Measure again with --force on an idle machine; if it remains, plan with "
    "sizes near the measured ones"
)


def fit_cells(
    cells: Iterable[ModelMeasurement],
    rests: Mapping[tuple[tuple[int, ...], int], float] | None = None,
) -> list[TimeFit]:
    """Return the fits of the measured times of layers and of embedding and head, in a fixed order.

    Each pass and sharding has a joint fit if several lengths were measured. Each length with
    several batch sizes has a fit with a launch overhead. Otherwise, the fit is proportional to
    the batch.

    rests : forward seconds of embedding and head, by (sequence lengths, batch), where they were
    derived by subtraction and not measured.
    """
    series: dict[_Series, list[_Point]] = {}
    for m in cells:
        # whole forwards only check layers, and a backward with recomputation contains two passes
        if m.num_layers is not None or m.checkpoint != "none":
            continue
        for name in _PASSES:
            if samples := m.samples_s.get(name):
                point = (tuple(m.seq_lengths), m.batch, tuple(samples))
                series.setdefault((m.layer_type, m.degree, m.kind, name), []).append(point)
    # subtraction of forward passes gives only a forward time, and only for one rank
    for (lengths, batch), time_s in (rests or {}).items():
        series.setdefault((None, 1, "sp", "forward"), []).append((lengths, batch, (time_s,)))
    return [
        _fit(key, form, tuple(points))
        for key in sorted(series, key=_order)
        for form, points in _forms(sorted(series[key]))
    ]


def bad_fits(fits: Sequence[TimeFit]) -> list[str]:
    """Return one warning about all fits with an error above `BAD_FIT`; empty if there is none."""
    bad = [fit for fit in fits if abs(fit.worst_relative) > BAD_FIT]
    if not bad:
        return []
    worst = max(bad, key=lambda fit: abs(fit.worst_relative))
    cell = max(worst.cells, key=lambda cell: abs(cell.relative))
    said = (
        f"{len(bad)} of {format_count(len(fits), 'fit')} "
        f"{'is' if len(bad) == 1 else 'are'} more than {100 * BAD_FIT:.0f} % off "
        f"a time, most {fit_name(worst)} in mode {worst.form}: "
        f"{100 * cell.relative:+.3g} % at {cell_name(cell)}, the worst of "
        f"{format_count(len(worst.cells), 'time')}. {_REMEDY}"
    )
    return [said]


def fit_name(fit: TimeFit) -> str:
    """Return a label for a fit, such as `layer type 0, backward at tp=2`."""
    part = "embedding and head" if fit.layer_type is None else f"layer type {fit.layer_type}"
    axis = "ulysses" if fit.kind == "ulysses" else "tp"
    return f"{part}, {fit.time}" + (f" at {axis}={fit.degree}" if fit.degree > 1 else "")


def cell_name(cell: FitCell) -> str:
    """Return the size of a cell as text, such as `batch 8, sequence length 2048`."""
    return f"batch {cell.batch}, sequence length {','.join(map(str, cell.seq_lengths))}"


def largest_cell(fit: TimeFit) -> FitCell:
    """Return the cell with the most tokens; among equals, the one with the longest sequence."""
    return max(fit.cells, key=lambda c: (c.batch * sum(c.seq_lengths), sum(c.seq_lengths)))


def fits_through(fits: Sequence[TimeFit], cells: Iterable[ModelMeasurement]) -> list[TimeFit]:
    """Return the fits that contain at least one of these cells."""
    sizes = {(m.layer_type, m.degree, m.kind, m.batch, tuple(m.seq_lengths)) for m in cells}
    return [
        fit
        for fit in fits
        if any(
            (fit.layer_type, fit.degree, fit.kind, cell.batch, tuple(cell.seq_lengths)) in sizes
            for cell in fit.cells
        )
    ]


def main_fits(fits: Sequence[TimeFit], mode: Mode) -> list[TimeFit]:
    """Return the fits of unsharded forward and backward times, in the form of `mode`.

    A time without a fit of that form is represented by its joint fit (form `sequence`), or else by
    all of its fits.
    """
    chosen: dict[tuple[int | None, str], list[TimeFit]] = {}
    for fit in fits:
        # shards and recomputation have separate fits
        if fit.degree == 1 and fit.time != "recompute":
            chosen.setdefault((fit.layer_type, fit.time), []).append(fit)
    found: list[TimeFit] = []
    for own in chosen.values():
        forms: tuple[Form, ...] = (mode, "sequence")
        by_form = ([fit for fit in own if fit.form == form] for form in forms)
        found += next(filter(None, by_form), own)
    return found


def _order(series: _Series) -> tuple[bool, int, int, str, int]:
    layer_type, degree, kind, name = series
    return layer_type is None, layer_type or 0, degree, kind, _PASSES.index(name)


def _forms(points: list[_Point]) -> list[tuple[Form, list[_Point]]]:
    """Return (form, points) for every form that these points can determine."""
    found: list[tuple[Form, list[_Point]]] = []
    # several lengths determine the term that grows with the tokens
    if len({sum(lengths) for lengths, _, _ in points}) > 1:
        found.append(("sequence", points))
    # several batch sizes of one length determine its launch overhead
    for lengths in dict.fromkeys(lengths for lengths, _, _ in points):
        here = [point for point in points if point[0] == lengths]
        if len(here) > 1:
            found.append(("batch", here))
    return found or [("static", points)]


@lru_cache(maxsize=1024)  # files are rewritten after every cell, and few fits change each time
def _fit(series: _Series, form: Form, points: tuple[_Point, ...]) -> TimeFit:
    layer_type, degree, kind, name = series
    tokens = [sum(lengths) for lengths, _, _ in points]
    batches = [batch for _, batch, _ in points]
    samples = [samples for _, _, samples in points]
    measured = [summarize(cell).median_s for cell in samples]
    terms = terms_of(form, batches, tokens, quadratic=layer_type is not None)
    fitted = fit_times(batches, tokens, measured, terms)
    ends: dict[str, TimeCoefficients] = {}
    cells: list[dict[str, Any]] = [
        {
            "batch": batch,
            "seq_lengths": list(lengths),
            "measured_s": time_s,
            "fitted_s": float(fitted_s),
            "relative": float(error),
        }
        for (lengths, batch, _), time_s, fitted_s, error in zip(
            points, measured, fitted.fitted_s, fitted.errors, strict=True
        )
    ]
    # a single sample has no spread
    if min(map(len, samples)) > 1:
        coefficients, times = bootstrap_times(batches, tokens, samples, terms)
        for end, quantile in zip(("low", "high"), INTERVAL, strict=True):
            ends[end] = _coefficients(terms, np.quantile(coefficients, quantile, axis=0).tolist())
            for cell, time_s in zip(cells, np.quantile(times, quantile, axis=0), strict=True):
                cell[f"fitted_{end}_s"] = float(time_s)
    return TimeFit(
        layer_type=layer_type,
        time=name,
        degree=degree,
        kind=kind,
        form=form,
        coefficients=_coefficients(terms, fitted.coefficients.tolist()),
        low=ends.get("low"),
        high=ends.get("high"),
        cells=[FitCell(**cell) for cell in cells],
        worst_relative=float(fitted.errors[fitted.worst]),
        batches=[min(batches), max(batches)],
        tokens=[min(tokens), max(tokens)],
        usable_batch=int(REACH * max(batches)),
        usable_tokens=int(REACH * max(tokens)) if form == "sequence" else tokens[0],
    )


def _coefficients(terms: Sequence[Term], values: Sequence[float]) -> TimeCoefficients:
    return TimeCoefficients(**dict(zip(terms, values, strict=True)))


# --------------------------------------------------------------------------------------------------
# Warnings about the cells of a profile, as sentences.


ON_DEVICE = "% on the device: "
"""Marker in the note of a memory cell whose exact and device results differ."""
Size = tuple[int, int, int]
"""Layer type, batch, sequence length."""
_APART = 0.10
"""Largest relative difference without a warning between two times of one layer: measured
separately, and from the difference of two forward passes with different layer counts."""


def forward_s(measurement: ModelMeasurement) -> float:
    """Return the median forward time of a cell, in seconds for the whole batch."""
    return median(measurement.samples_s["forward"])


def device_differences(cells: Iterable[ModelMeasurement]) -> list[str]:
    """Return one warning about cells whose exact and device memory differ; empty if none do."""
    apart = {m.key: note for m in cells for note in m.notes if ON_DEVICE in note}
    if not apart:
        return []
    key, note = next(iter(apart.items()))
    differ = format_count(len(apart), "cell differs from its", "cells differ from their")
    return [f"{differ} device by over 1 %; {key}: {note}"]


def missing_cells(found: Mapping[str, ModelMeasurement]) -> list[str]:
    """Return one warning per reason for which cells have no result."""
    by_reason: dict[str, list[str]] = {}
    for m in found.values():
        if m.status != "ok":
            by_reason.setdefault(f"{m.status}: {m.reason}", []).append(m.key)
    return [
        f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''} {reason}"
        for reason, keys in by_reason.items()
    ]


def few_batches(layers: list[tuple[TimePoint, ...]], mode: Mode | None) -> list[str]:
    """Return one warning per sequence length with fewer batch sizes than Galvatron accepts.

    Only batch mode has this limit (`GALVATRON_BATCHES`). Batch sizes are those of layer type 0.
    """
    if mode != "batch" or not layers or not layers[0]:
        return []
    counts = {p.seq_length: 0 for p in layers[0]}
    for point in layers[0]:
        counts[point.seq_length] += 1
    return [
        f"{format_count(count, 'batch size was', 'batch sizes were')} measured at sequence length "
        f"{seq}, and Galvatron refuses batch mode with fewer than {GALVATRON_BATCHES}: measure "
        f"with --resume --bsz 1:{GALVATRON_BATCHES}"
        for seq, count in counts.items()
        if count < GALVATRON_BATCHES
    ]


def layer_differences(stacks: list[ModelMeasurement], alone: Mapping[Size, float]) -> list[str]:
    """Return a warning about layers whose separate time differs from that in a forward pass.

    stacks : cells of forward passes with several layers.
    alone : forward seconds of separately measured layers.
    """
    apart: list[tuple[float, str]] = []
    checked = 0
    by_size: dict[tuple[int, tuple[int, ...]], list[ModelMeasurement]] = {}
    for m in stacks:
        by_size.setdefault((m.batch, tuple(m.seq_lengths)), []).append(m)
    for (batch, lengths), runs in by_size.items():
        # the forward with the fewest layers of all types is subtracted from the others
        low = min(runs, key=lambda m: m.num_layers or [])
        for kind, seq in enumerate(lengths):
            direct = alone.get((kind, batch, seq))
            more = max(runs, key=lambda m: (m.num_layers or [])[kind])
            count = (more.num_layers or [])[kind] - (low.num_layers or [])[kind]
            if direct is None or count < 1:
                continue
            checked += 1
            # time of each additional layer over the time of the layer alone
            ratio = (forward_s(more) - forward_s(low)) / count / direct
            if abs(ratio - 1.0) > _APART:
                name = f"layertype_{kind}_bsz{batch}_seq{seq}"
                apart.append((abs(ratio - 1.0), f"{name} (x{ratio:.2f})"))
    if not apart:
        return []
    text = (
        f"{len(apart)} of {format_count(checked, 'layer time')} "
        f"{'differs' if len(apart) == 1 else 'differ'} by more than {100 * _APART:.0f} % from the "
        f"difference of whole forwards, most {max(apart)[1]}: is the machine busy with something "
        "else?"
    )
    return [text]


def unsteady_times(cells: list[ModelMeasurement]) -> list[str]:
    """Return one warning about unsharded layers with suspicious samples; empty if none are."""
    suspicious = {
        m.key: said[0]
        for m in cells
        if (said := warnings_of(m.samples_s["forward"])) and m.part == "layer" and m.degree == 1
    }
    if not suspicious:
        return []
    key, first = next(iter(suspicious.items()))
    are = format_count(len(suspicious), "layer time is", "layer times are")
    return [f"{are} unsteady; {key}: {first}"]


# --------------------------------------------------------------------------------------------------
# The two profile files of Galvatron, derived from the measured cells.


STATE_BYTES_PER_PARAMETER = 16
"""Bytes of model states per parameter (weight, gradient, optimizer) in Galvatron's memory tables,
for every precision."""
_PARTS = ("only", "first", "last")


class ModelDocument(Record):
    """Contents of one profile file in Galvatron's format, and the derived data of its sidecar."""

    data: Mapping[str, Any]
    """Keys and values of the profile file; empty if no cell has a result."""
    layer_times: list[ShardedTime] = field(default_factory=list)
    other_times: list[OtherTime] = field(default_factory=list)
    fits: list[TimeFit] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def derive_computation(
    found: Mapping[str, ModelMeasurement],
    spec: ModelSpec,
    mode: Mode | None,
    about: Container[str] | None = None,
) -> ModelDocument:
    """Return the computation file, in ms, from measured cells.

    Entries per layer and sample are median forward times of separately measured layers. Entries
    with `layernum` are median times of forward passes of the model, per batch; their differences
    check the former.

    mode : profiling mode whose requirements are checked; None checks none.
    about : keys of the cells to warn about; None means all.
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
    # embedding and head of a custom module cannot be measured separately
    for m in stacks:
        rest, size = _rest(m, alone), (tuple(m.seq_lengths), m.batch)
        # a direct measurement is more accurate than a difference
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
        # seconds to the ms of the file, for the whole batch
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
    """Return the memory file from counted cells: parameters in MiB, activations in MiB per sample.

    kinds : sharding kinds of the tables whose keys end with `_sp` (sequence parallelism), and of
        those without the suffix.
    about : keys of the cells to warn about; None means all.

    The activations of a layer are its saved activations. On the stage with the loss, those of
    embedding and head also include the peak above the saved activations, as Galvatron measures
    them.
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
    """Return, per layer type, the points whose sequence length occurs in `cells`."""
    lengths = {seq for m in cells for seq in m.seq_lengths}
    return [tuple(p for p in points if p.seq_length in lengths) for points in layers]


def _points(cells: Iterable[ModelMeasurement], kind: int) -> tuple[TimePoint, ...]:
    points = (
        TimePoint(batch=m.batch, seq_length=m.seq_lengths[0], forward_s=forward_s(m))
        for m in cells
        if m.part == "layer" and m.layer_type == kind
    )
    return tuple(sorted(points, key=lambda p: (p.seq_length, p.batch)))


def _layer_times(cells: Iterable[ModelMeasurement]) -> list[ShardedTime]:
    result = [
        ShardedTime(
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
) -> list[OtherTime]:
    """Return the times of embedding and head, in seconds; derived ones have only a forward time."""
    result = [
        OtherTime(
            batch=m.batch,
            seq_lengths=tuple(m.seq_lengths),
            **_summary(m, ("forward", "backward")),
        )
        for m in plain
        if m.part != "layer"
    ]
    result += [
        OtherTime(batch=batch, seq_lengths=lengths, forward_s=time_s)
        for (lengths, batch), time_s in rests.items()
        if time_s > 0.0
    ]
    return sorted(result, key=lambda t: (t.seq_lengths, t.batch))


def _summary(
    cell: ModelMeasurement, names: Iterable[str], *, spread: bool = True
) -> dict[str, float]:
    """Return the median time of each pass in seconds, and its 5th and 95th percentile if `spread`.

    Keys are `<pass>_s`, `<pass>_low_s` and `<pass>_high_s`; passes without samples are absent.
    """
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
    """Return the memory of one layer type by sequence length.

    Lengths without an unsharded cell are absent.
    """
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
                        # Galvatron's tables add the peak of the loss to the saved activations
                        m.bytes["activation"]
                        + (m.bytes.get("peak", 0.0) if part != "first" else 0.0)
                    )
                    / m.batch
                    for degree, m in kept.items()
                },
            )
    return result


def _by_degree(cells: Iterable[ModelMeasurement], kind: TensorKind) -> dict[int, ModelMeasurement]:
    """Return the cells of one sharding kind, by degree; at degree 1 all kinds are equal."""
    return {
        m.degree: m
        for m in sorted(cells, key=lambda m: m.degree)
        if m.degree == 1 or m.kind == kind
    }


def _rest(stack: ModelMeasurement, alone: Mapping[Size, float]) -> float | None:
    """Return the forward seconds of embedding and head: those of `stack` minus those of its layers.

    At least 0; None if a layer was not measured separately at the size of `stack`.
    """
    sizes = [(kind, stack.batch, seq) for kind, seq in enumerate(stack.seq_lengths)]
    if any(size not in alone for size in sizes):
        return None
    counts = stack.num_layers or []
    layers = sum(n * alone[size] for n, size in zip(counts, sizes, strict=True))
    # noise may make the sum of the layers longer than the whole forward
    return max(0.0, forward_s(stack) - layers)

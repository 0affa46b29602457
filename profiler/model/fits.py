"""Fits of measured cells, in the forms in which a planner uses their times, and what is wrong.

A pure function of the cells, like the documents: the planner fits the same times again on read, so
what stands in a sidecar tells how far its prices can be trusted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np

from autopar.model_measurements import (
    FitCell,
    Form,
    ModelMeasurement,
    TensorKind,
    Term,
    TimeCoefficients,
    TimeFit,
)
from autopar.stats import summarize
from autopar.time_fits import BAD_FIT, INTERVAL, REACH, bootstrap_times, fit_times, terms_of
from autopar.units import format_count
from profiler.model.options import Mode

__all__ = [
    "bad_fits",
    "cell_name",
    "fit_cells",
    "fit_name",
    "fits_through",
    "largest_cell",
    "main_fits",
]

_Pass = Literal["forward", "backward", "recompute"]
_PASSES: tuple[_Pass, ...] = get_args(_Pass)
_Series = tuple[int | None, int, TensorKind, _Pass]
"""Layer type or None, degree, kind, pass."""
_Point = tuple[tuple[int, ...], int, tuple[float, ...]]
"""Sequence lengths, batch, samples in seconds; one number is a time without samples."""
_REMEDY = (
    "measure again with --force on an idle machine; if it stays, plan with sizes near those that "
    "were measured"
)


def fit_cells(
    cells: Iterable[ModelMeasurement],
    rests: Mapping[tuple[tuple[int, ...], int], float] | None = None,
) -> list[TimeFit]:
    """Return the fits of the times of layers and of what surrounds them, in a fixed order.

    Each pass and sharding has a joint fit where several lengths were measured, one with a launch
    cost for every length with several batch sizes, and without either one proportional to the
    batch.

    rests : seconds of what surrounds the layers where no cell of its own tells, by sequence
    lengths and batch.
    """
    series: dict[_Series, list[_Point]] = {}
    for m in cells:
        if m.num_layers is not None or m.checkpoint != "none":
            continue
        for name in _PASSES:
            if samples := m.samples_s.get(name):
                point = (tuple(m.seq_lengths), m.batch, tuple(samples))
                series.setdefault((m.layer_type, m.degree, m.kind, name), []).append(point)
    for (lengths, batch), time_s in (rests or {}).items():
        series.setdefault((None, 1, "sp", "forward"), []).append((lengths, batch, (time_s,)))
    return [
        _fit(key, form, tuple(points))
        for key in sorted(series, key=_order)
        for form, points in _forms(sorted(series[key]))
    ]


def bad_fits(fits: Sequence[TimeFit]) -> list[str]:
    """Return a sentence on the fits that are far from one of their times, if there are."""
    bad = [fit for fit in fits if abs(fit.worst_relative) > BAD_FIT]
    if not bad:
        return []
    worst = max(bad, key=lambda fit: abs(fit.worst_relative))
    cell = max(worst.cells, key=lambda cell: abs(cell.relative))
    said = (
        f"{len(bad)} of {format_count(len(fits), 'fit')} {'is' if len(bad) == 1 else 'are'} more "
        f"than {100 * BAD_FIT:.0f} % off a time, most "
        f"{fit_name(worst)} in mode {worst.form}: {100 * cell.relative:+.3g} % at {cell_name(cell)}"
        f", the worst of {format_count(len(worst.cells), 'time')}; {_REMEDY}"
    )
    return [said]


def fit_name(fit: TimeFit) -> str:
    """Return what a fit is of, such as `layer type 0, backward at tp=2`."""
    part = "embedding and head" if fit.layer_type is None else f"layer type {fit.layer_type}"
    axis = "ulysses" if fit.kind == "ulysses" else "tp"
    return f"{part}, {fit.time}" + (f" at {axis}={fit.degree}" if fit.degree > 1 else "")


def cell_name(cell: FitCell) -> str:
    """Return the size of a cell in words."""
    return f"batch {cell.batch}, sequence length {','.join(map(str, cell.seq_lengths))}"


def largest_cell(fit: TimeFit) -> FitCell:
    """Return the cell with the most tokens, of equal ones that with the longest sequence."""
    return max(fit.cells, key=lambda c: (c.batch * sum(c.seq_lengths), sum(c.seq_lengths)))


def fits_through(fits: Sequence[TimeFit], cells: Iterable[ModelMeasurement]) -> list[TimeFit]:
    """Return the fits that go through at least one of these cells."""
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
    """Return the fits of forward and backward of what is whole, in the form of a mode.

    Times that have no fit of that form have their joint one, or else all that they have.
    """
    chosen: dict[tuple[int | None, str], list[TimeFit]] = {}
    for fit in fits:
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
    """Return the forms that these points can be fitted in, each with its points."""
    found: list[tuple[Form, list[_Point]]] = []
    if len({sum(lengths) for lengths, _, _ in points}) > 1:
        found.append(("sequence", points))
    for lengths in dict.fromkeys(lengths for lengths, _, _ in points):
        here = [point for point in points if point[0] == lengths]
        if len(here) > 1:
            found.append(("batch", here))
    return found or [("static", points)]


@lru_cache(maxsize=1024)  # files are written after every cell, which changes few of the fits
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

"""Calibration from measured plans: prices plans at other factors, fits, and cross-checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import convert
from msgspec.structs import asdict

from autopar.arrays import F64
from autopar.documents.calibration import (
    CALIBRATION_FORMAT,
    CALIBRATION_VERSION,
    MOST,
    MOST_S,
    CalibrationDocument,
    write_calibration,
)
from autopar.records import Record
from autopar.statistics import nonnegative_fit
from profiler.verify.compare import Comparison, interval_of, read_priced, resampled_s
from profiler.verify.folder import Folder
from profiler.verify.plans import Candidate, Lines

# --------------------------------------------------------------------------------------------------
# Fits the calibration: the factors with the smallest errors of the predictions.
#
# A predicted step is T(c, k), with the factors of computation and communication. It is homogeneous
# of degree 1 (both doubled, time doubled) and piecewise linear, because communication overlaps with
# computation. So at any point T = c*a + k*b with the derivatives a, b (Euler). The columns a and b
# come from pricing the plans again with another communication factor. The fit
#
#     measured = c*a + k*b + fixed,   MOST >= c, k >= LEAST, MOST_S >= fixed >= 0
#
# weighs relative errors, and large ones less (Huber, Ann. Math. Statist. 35 (1964) 73).


LEAST = 0.1
"""Lower limit of factors: a tenth of the profile is no correction but another machine."""
_HUBER = 1.345
"""Tuning constant of Huber's weights, with 95 % efficiency for normal errors."""
_FIT_TURNS = 30
_SMALL = 1e-3
"""Fraction of the measured times below which a column determines nothing."""


class TimeColumns(Record):
    """Components of each plan's step, in seconds at factors of 1; shape (n,) each."""

    computation: F64
    communication: F64


class Fitted(Record):
    """Fitted factors; None if the plans do not determine one."""

    computation: float
    communication: float | None
    fixed_s: float

    def times_s(self, columns: TimeColumns) -> F64:
        """Return the calibrated step times of the plans, seconds."""
        k = 1.0 if self.communication is None else self.communication
        result: F64 = (
            self.computation * columns.computation + k * columns.communication + self.fixed_s
        )
        return result


def fit_times(columns: TimeColumns, measured_s: F64) -> Fitted:
    """Return the fitted factors.

    With as many plans as unknown factors or fewer, the fixed seconds stay 0. Values above the
    limits of a calibration file are set to the limit.
    """
    communicates = bool((columns.communication > _SMALL * measured_s).any())
    # No factor is below LEAST: fit the excess, which is never negative.
    base = LEAST * columns.computation
    parts = [columns.computation]
    if communicates:
        base = base + LEAST * columns.communication
        parts.append(columns.communication)
    else:
        # Too little communication to determine its factor, which stays 1.
        base = base + columns.communication
    if len(measured_s) > len(parts):
        parts.append(np.ones_like(measured_s))
    design = np.stack(parts, axis=1)
    # Subtract the part that the minimum factors explain; never below 0, which nothing could fit.
    found = _robust(design, measured_s, np.minimum(base, measured_s))
    has_fixed = len(parts) == 2 + communicates
    return Fitted(
        computation=min(LEAST + float(found[0]), MOST),
        communication=min(LEAST + float(found[1]), MOST) if communicates else None,
        fixed_s=min(float(found[-1]), MOST_S) if has_fixed else 0.0,
    )


def left_out_s(columns: TimeColumns, measured_s: F64) -> F64:
    """Return the time of every plan with the factors fitted to all others, (n,) seconds."""
    count = len(measured_s)
    result = np.empty(count)
    for k in range(count):
        rest = np.arange(count) != k
        others = TimeColumns(
            computation=columns.computation[rest], communication=columns.communication[rest]
        )
        result[k] = fit_times(others, measured_s[rest]).times_s(columns)[k]
    return result


def fit_bytes(predicted: F64, counted: F64) -> float:
    """Return the memory factor: the median ratio, at most MOST, robust against few outliers.

    Most stages are predicted within a percent and a few are far above. Those are typical of their
    kind of plan, not of the others.
    """
    return min(float(np.median(counted / predicted)), MOST)


def _robust(design: F64, target: F64, base: F64) -> F64:
    """Return x >= 0 for base + design @ x ~ target, with Huber's weights of relative errors."""
    weights = np.ones_like(target)
    found = np.zeros(design.shape[1])
    for _ in range(_FIT_TURNS):
        before = found
        # Divided by the target, since errors are relative.
        found = nonnegative_fit(design, target - base, weights / target)
        errors = np.abs((base + design @ found) / target - 1.0)
        # 1.4826 converts the median of normal errors to a deviation; below 1e-4 all are good.
        limit = _HUBER * max(1.4826 * float(np.median(errors)), 1e-4)
        # The root, since residuals are multiplied by it and their squares get Huber's weight.
        weights = np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-12)))
        if np.allclose(found, before, rtol=1e-6, atol=1e-12):
            break
    return found


# --------------------------------------------------------------------------------------------------
# Factors from measured plans: priced, fitted, resampled, and omitted if undetermined.


FEWEST = 4
"""Minimum number of plans; fewer do not determine the three factors of a calibration."""
_STEP = 1e-3
_NEAR = 0.01
_TURNS = 3
_DRAWS = 300
_SEED = 5


class Subject(Record):
    """Hardware and model of a calibration, in the terms of its file."""

    hardware: str
    world_size: int
    model: str
    num_layers: int
    seq_length: tuple[int, ...]
    hidden_size: tuple[int, ...]
    precision: str
    inputs: tuple[tuple[str, str, str], ...] = ()
    """(role, path, SHA-256) of the profiles."""
    estimated: bool = False

    def document(self, **content: object) -> CalibrationDocument:
        """Return the calibration document of this subject with the given content."""
        hardware = {
            "name": self.hardware,
            "world_size": self.world_size,
            "estimated": self.estimated,
        }
        model = {
            "name": self.model,
            "num_layers": self.num_layers,
            "seq_length": list(self.seq_length),
            "hidden_size": list(self.hidden_size),
            "precision": self.precision,
        }
        head = {"format": CALIBRATION_FORMAT, "version": CALIBRATION_VERSION}
        return convert(
            {**head, "hardware": hardware, "model": model, **content}, CalibrationDocument
        )


class Factor(NamedTuple):
    """Fitted factor with its 95 % interval."""

    value: float
    low: float
    high: float


class Calibrated(Record):
    """Fitted factors, their intervals, and the errors before, after and held out."""

    factors: Mapping[str, Factor]
    """Factors of computation, communication, fixed_s and memory that the plans determine."""
    names: tuple[str, ...]
    measured_s: tuple[float, ...]
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    """Step times priced again with the factors, not only with the columns of the fit; seconds."""
    left_out_s: tuple[float, ...]
    """Step times with the factors fitted to all other plans, seconds."""
    memory_before: float | None
    """Median |predicted / counted - 1| over stages; None if no memory was counted."""
    memory_after: float | None
    notes: tuple[str, ...] = ()

    @property
    def is_advised(self) -> bool:
        """True if the factors reduce the error of plans that they were not fitted to."""
        return self.error(self.left_out_s) < self.error(self.before_s)

    def error(self, times_s: Sequence[float]) -> float:
        """Return the median of |time / measured - 1|."""
        return _error(np.array(times_s) / np.array(self.measured_s))


def calibrate(
    comparison: Comparison,
    candidates: Sequence[Candidate],
    subject: Subject,
    lines: Lines,
    folder: Folder,
) -> Calibrated:
    """Return the calibration of at least `FEWEST` plans; prices each of them a few more times.

    Raises CommandError: pricing fails.
    """
    rows = comparison.plans
    paths = {candidate.name: candidate.path for candidate in candidates}
    pricer = _Pricer([paths[row.plan.name] for row in rows], subject, lines, folder)
    measured = np.array([row.measured_s for row in rows])
    before = np.array([row.plan.predicted_s for row in rows])
    c = k = 1.0
    for _ in range(_TURNS):
        columns = pricer.columns(c, k)
        times = fit_times(columns, measured)
        c, k = times.computation, 1.0 if times.communication is None else times.communication
        after = pricer.times_s(c, k) + times.fixed_s
        # T is only piecewise linear: at the new factors other columns may apply.
        if np.allclose(after, times.times_s(columns), rtol=_NEAR):
            break
    drawn, drawn_memory = _draws(comparison, columns)
    refitted = [fit_times(*pair) for pair in drawn]
    notes = []
    if times.communication is None:
        notes.append("these plans communicate too little: its factor stays 1")
    at_least = [
        name
        for name, value in (("computation", c), ("communication", k))
        if value <= LEAST * (1 + 1e-9)
    ]
    if at_least:
        notes.append(
            f"the factor of {' and '.join(at_least)} is at its lower bound: "
            "these plans do not distinguish it from the others"
        )
    predicted, counted = _stages(comparison)
    memory = fit_bytes(predicted, counted) if len(counted) else None
    samples: dict[str, list[float | None]] = {
        name: [getattr(fitted, name) for fitted in refitted] for name in times.__struct_fields__
    }
    samples["memory"] = [*drawn_memory]
    factors = {
        name: _around(value, [x for x in samples[name] if x is not None])
        for name, value in {**asdict(times), "memory": memory}.items()
        if value is not None
    }
    notes += _clipped(factors)
    return Calibrated(
        factors=factors,
        names=tuple(row.plan.name for row in rows),
        measured_s=tuple(measured.tolist()),
        before_s=tuple(before.tolist()),
        after_s=tuple(after.tolist()),
        left_out_s=tuple(left_out_s(columns, measured).tolist()),
        memory_before=None if memory is None else _error(predicted / counted),
        memory_after=None if memory is None else _error(memory * predicted / counted),
        notes=tuple(notes),
    )


def _error(ratios: F64) -> float:
    return float(np.median(np.abs(ratios - 1.0)))


def _clipped(factors: Mapping[str, Factor]) -> list[str]:
    """Return notes on intervals that reach the limits of a calibration file."""
    names = {name: (f"factor of {name}", MOST) for name in factors}
    names["fixed_s"] = ("time of every step", MOST_S)
    return [
        (
            f"{name} is {'' if factors[key].low >= most else 'up to '}{most:g} or "
            "more, limited to it: the profiles contradict the runs. Measure them "
            "again"
        )
        for key, (name, most) in names.items()
        if factors[key].high >= most
    ]


def calibration_document(found: Calibrated, subject: Subject) -> CalibrationDocument:
    """Return the content of `calibration.json`."""
    untold = {"value": 1.0, "low": None, "high": None}
    factors = {name: factor._asdict() for name, factor in found.factors.items()}
    columns = (found.names, found.measured_s, found.before_s, found.after_s, found.left_out_s)
    keys = ("name", "measured_s", "before_s", "after_s", "left_out_s")
    return subject.document(
        factors={"communication": untold, "memory": untold, **factors},
        fit={
            "num_plans": len(found.names),
            "median_error_before": found.error(found.before_s),
            "median_error_after": found.error(found.after_s),
            "median_error_left_out": found.error(found.left_out_s),
            "median_memory_error_before": found.memory_before,
            "median_memory_error_after": found.memory_after,
            "plans": [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)],
        },
        inputs=[
            {"role": role, "path": path, "sha256": digest} for role, path, digest in subject.inputs
        ],
        notes=list(found.notes),
    )


class _Pricer:
    """Prices all plans at other factors, with `autopar-search --evaluate --calibration`."""

    def __init__(
        self, plans: Sequence[Path], subject: Subject, lines: Lines, folder: Folder
    ) -> None:
        self._plans = plans
        self._subject = subject
        self._lines = lines
        self._folder = folder

    def times_s(self, computation: float, communication: float) -> F64:
        """Return the step times in seconds, (n,)."""
        # These prices exist already.
        if computation == communication == 1.0:
            return np.array([read_priced(plan)[1] for plan in self._plans])
        name = f"c{computation:.6g}-k{communication:.6g}"
        probe = self._lines.work / "probes" / f"{name}.json"
        factors = {"computation": computation, "communication": communication}
        factors |= {"fixed_s": 0.0, "memory": 1.0}
        document = self._subject.document(
            factors={factor: {"value": value} for factor, value in factors.items()}
        )
        write_calibration(probe, document)
        found = []
        for plan in self._plans:
            out = self._lines.work / "probes" / name / plan.name
            title = f"pricing {plan.stem} with factors {computation:.4g} and {communication:.4g}"
            command = self._lines.price(plan, out, f"probes/{name}/{plan.stem}", title, probe)
            self._folder.run(command)
            found.append(read_priced(out)[1])
        return np.array(found)

    def columns(self, computation: float, communication: float) -> TimeColumns:
        """Return the derivatives of the step times at these factors."""
        here = self.times_s(computation, communication)
        # A factor above MOST would be refused.
        step = _STEP if communication * (1.0 + _STEP) <= MOST else -_STEP
        there = self.times_s(computation, communication * (1.0 + step))
        # T never decreases with communication, so a negative slope is rounding.
        slope = np.maximum((there - here) / (communication * step), 0.0)
        # Euler: T = c*a + k*b, so a follows from T and b.
        rest = np.maximum((here - communication * slope) / computation, 0.0)
        return TimeColumns(computation=rest, communication=slope)


def _draws(
    comparison: Comparison, columns: TimeColumns
) -> tuple[list[tuple[TimeColumns, F64]], list[float]]:
    """Return resampled inputs of the fit: rounds and plans for times, stages for memory."""
    plans = [row.plan for row in comparison.plans]
    times = resampled_s(plans, _DRAWS)
    generator = np.random.default_rng(_SEED)
    count = len(plans)
    drawn = []
    for n in range(_DRAWS):
        pick = generator.integers(0, count, count)
        part = TimeColumns(
            computation=columns.computation[pick], communication=columns.communication[pick]
        )
        drawn.append((part, times[n, pick]))
    predicted, counted = _stages(comparison)
    memory = []
    for _ in range(_DRAWS if len(counted) else 0):
        pick = generator.integers(0, len(counted), len(counted))
        memory.append(fit_bytes(predicted[pick], counted[pick]))
    return drawn, memory


def _stages(comparison: Comparison) -> tuple[F64, F64]:
    """Return predicted and counted bytes of all stages of all plans with counted memory."""
    pairs = [
        pair
        for row in comparison.plans
        if row.plan.peak_bytes
        for pair in zip(row.plan.predicted_bytes, row.plan.peak_bytes, strict=True)
    ]
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return values[:, 0], values[:, 1]


def _around(value: float, drawn: Sequence[float]) -> Factor:
    low, high = interval_of(np.array(drawn)) if drawn else (value, value)
    # A few draws may all lie on one side of the fit itself.
    return Factor(value, min(low, value), max(high, value))

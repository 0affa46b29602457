"""From measured plans to `calibration.json`: prices them at other factors, fits, and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from autopar.calibration import (
    CALIBRATION_FORMAT,
    CALIBRATION_VERSION,
    MOST,
    MOST_S,
    CalibrationDocument,
    write_calibration,
)
from autopar.verify.choose import Candidate
from autopar.verify.commands import Folder
from autopar.verify.comparison import Comparison, interval_of, resampled_s
from autopar.verify.fitting import LEAST, Fitted, TimeColumns, fit_bytes, fit_times, left_out_s
from autopar.verify.lines import Lines
from autopar.verify.measured import read_priced

__all__ = ["FEWEST", "Calibrated", "Subject", "calibrate", "calibration_document"]

F64 = NDArray[np.float64]

FEWEST = 4
"""With fewer plans three factors would explain anything."""
_STEP = 1e-3
_NEAR = 0.01
_TURNS = 3
_DRAWS = 300
_SEED = 5


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the calibration is of, as its file says it."""

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


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """Fitted factors, their intervals, and the errors before, after and left out."""

    times: Fitted
    memory: float | None
    """None where nothing was counted."""
    computation_interval: tuple[float, float]
    communication_interval: tuple[float, float] | None
    fixed_interval_s: tuple[float, float]
    memory_interval: tuple[float, float] | None
    names: tuple[str, ...]
    measured_s: tuple[float, ...]
    before_s: tuple[float, ...]
    after_s: tuple[float, ...]
    """Priced again with the factors, not only by the columns of the fit."""
    left_out_s: tuple[float, ...]
    """By the factors that all other plans give."""
    memory_before: float | None
    """Median |predicted / counted - 1| over stages."""
    memory_after: float | None
    notes: tuple[str, ...] = ()

    @property
    def is_advised(self) -> bool:
        """Whether the factors bring a plan that they were not fitted to nearer to its time."""
        return self.error(self.left_out_s) < self.error(self.before_s)

    def error(self, times_s: Sequence[float]) -> float:
        """Return the median of |time / measured - 1|."""
        return float(np.median(np.abs(np.array(times_s) / np.array(self.measured_s) - 1.0)))


def calibrate(
    comparison: Comparison,
    candidates: Sequence[Candidate],
    subject: Subject,
    lines: Lines,
    folder: Folder,
) -> Calibrated:
    """Return the calibration of at least `FEWEST` plans; prices each of them a few times more.

    Raises
    ------
    CommandError : pricing fails.
    """
    rows = comparison.rows
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
        if np.allclose(after, times.times_s(columns), rtol=_NEAR):
            break
    drawn, drawn_memory = _draws(comparison, columns)
    factors = [fit_times(*pair) for pair in drawn]
    notes = []
    if times.communication is None:
        notes.append("these plans hardly communicate: its factor is left at 1")
    at_least = [
        name
        for name, value in (("computation", c), ("communication", k))
        if value <= LEAST * (1 + 1e-9)
    ]
    if at_least:
        notes.append(
            f"the factor of {' and '.join(at_least)} is the least one allowed: these plans do not "
            "tell it from the others"
        )
    predicted, counted = _stages(comparison)
    memory = fit_bytes(predicted, counted) if len(counted) else None
    known = memory is not None
    computation, communication, fixed = (
        _around(value, [x for x in drawn_values if x is not None])
        for value, drawn_values in (
            (c, [f.computation for f in factors]),
            (k, [f.communication for f in factors]),
            (times.fixed_s, [f.fixed_s for f in factors]),
        )
    )
    memory_interval = None if memory is None else _around(memory, drawn_memory)
    notes += _clipped(computation, communication, fixed, memory_interval)
    return Calibrated(
        times=times,
        memory=memory,
        computation_interval=computation,
        communication_interval=None if times.communication is None else communication,
        fixed_interval_s=fixed,
        memory_interval=memory_interval,
        names=tuple(row.plan.name for row in rows),
        measured_s=tuple(measured.tolist()),
        before_s=tuple(before.tolist()),
        after_s=tuple(after.tolist()),
        left_out_s=tuple(left_out_s(columns, measured).tolist()),
        memory_before=float(np.median(np.abs(predicted / counted - 1.0))) if known else None,
        memory_after=float(np.median(np.abs(memory * predicted / counted - 1.0)))
        if memory is not None
        else None,
        notes=tuple(notes),
    )


def _clipped(
    computation: tuple[float, float],
    communication: tuple[float, float],
    fixed_s: tuple[float, float],
    memory: tuple[float, float] | None,
) -> list[str]:
    """Return what is to be said of intervals that end at the most that a calibration holds."""
    ends = {
        "factor of computation": (computation, MOST),
        "factor of communication": (communication, MOST),
        "time of every step": (fixed_s, MOST_S),
        "factor of memory": (memory, MOST),
    }
    return [
        f"the {name} is {'' if interval[0] >= most else 'up to '}{most:g} or more, cut there: the "
        "profiles are not of what ran; measure them again"
        for name, (interval, most) in ends.items()
        if interval is not None and interval[1] >= most
    ]


def calibration_document(found: Calibrated, subject: Subject) -> CalibrationDocument:
    """Return the content of `calibration.json`."""

    def entry(value: float | None, ends: tuple[float, float] | None) -> dict[str, float | None]:
        low, high = ends or (None, None)
        return {"value": 1.0 if value is None else value, "low": low, "high": high}

    times = found.times
    return CalibrationDocument.model_validate(
        {
            "format": CALIBRATION_FORMAT,
            "version": CALIBRATION_VERSION,
            "hardware": {
                "name": subject.hardware,
                "world_size": subject.world_size,
                "estimated": subject.estimated,
            },
            "model": {
                "name": subject.model,
                "num_layers": subject.num_layers,
                "seq_length": list(subject.seq_length),
                "hidden_size": list(subject.hidden_size),
                "precision": subject.precision,
            },
            "factors": {
                "computation": entry(times.computation, found.computation_interval),
                "communication": entry(times.communication, found.communication_interval),
                "fixed_s": entry(times.fixed_s, found.fixed_interval_s),
                "memory": entry(found.memory, found.memory_interval),
            },
            "fit": {
                "num_plans": len(found.names),
                "median_error_before": found.error(found.before_s),
                "median_error_after": found.error(found.after_s),
                "median_error_left_out": found.error(found.left_out_s),
                "median_memory_error_before": found.memory_before,
                "median_memory_error_after": found.memory_after,
                "plans": [
                    {
                        "name": name,
                        "measured_s": measured,
                        "before_s": before,
                        "after_s": after,
                        "left_out_s": left,
                    }
                    for name, measured, before, after, left in zip(
                        found.names,
                        found.measured_s,
                        found.before_s,
                        found.after_s,
                        found.left_out_s,
                        strict=True,
                    )
                ],
            },
            "inputs": [
                {"role": role, "path": path, "sha256": digest}
                for role, path, digest in subject.inputs
            ],
            "notes": list(found.notes),
        }
    )


class _Pricer:
    """Prices all plans at other factors, by `autopar-search --evaluate --calibration`."""

    def __init__(
        self, plans: Sequence[Path], subject: Subject, lines: Lines, folder: Folder
    ) -> None:
        self._plans = plans
        self._subject = subject
        self._lines = lines
        self._folder = folder

    def times_s(self, computation: float, communication: float) -> F64:
        """Return the step times in seconds, (n,)."""
        if computation == communication == 1.0:
            return np.array([read_priced(plan)["step_time_s"] for plan in self._plans])
        name = f"c{computation:.6g}-k{communication:.6g}"
        probe = self._lines.work / "probes" / f"{name}.json"
        write_calibration(probe, self._document(computation, communication))
        found = []
        for plan in self._plans:
            out = self._lines.work / "probes" / name / plan.name
            title = f"pricing {plan.stem} with factors {computation:.4g} and {communication:.4g}"
            command = self._lines.price(plan, out, f"probes/{name}/{plan.stem}", title, probe)
            self._folder.run(command)
            found.append(read_priced(out)["step_time_s"])
        return np.array(found)

    def columns(self, computation: float, communication: float) -> TimeColumns:
        """Return the derivatives of the step times at these factors."""
        here = self.times_s(computation, communication)
        step = _STEP if communication * (1.0 + _STEP) <= MOST else -_STEP
        there = self.times_s(computation, communication * (1.0 + step))
        slope = np.maximum((there - here) / (communication * step), 0.0)
        rest = np.maximum((here - communication * slope) / computation, 0.0)
        return TimeColumns(computation=rest, communication=slope)

    def _document(self, computation: float, communication: float) -> CalibrationDocument:
        subject = self._subject
        return CalibrationDocument.model_validate(
            {
                "format": CALIBRATION_FORMAT,
                "version": CALIBRATION_VERSION,
                "hardware": {"name": subject.hardware, "world_size": subject.world_size},
                "model": {
                    "name": subject.model,
                    "num_layers": subject.num_layers,
                    "seq_length": list(subject.seq_length),
                    "hidden_size": list(subject.hidden_size),
                    "precision": subject.precision,
                },
                "factors": {
                    "computation": {"value": computation},
                    "communication": {"value": communication},
                    "fixed_s": {"value": 0.0},
                    "memory": {"value": 1.0},
                },
            }
        )


def _draws(
    comparison: Comparison, columns: TimeColumns
) -> tuple[list[tuple[TimeColumns, F64]], list[float]]:
    """Return what to fit again: other rounds and other plans, and memory of other stages."""
    plans = [row.plan for row in comparison.rows]
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
    """Return predicted and counted bytes of all stages of all plans that were counted."""
    pairs = [
        pair
        for row in comparison.rows
        if row.plan.peak_bytes
        for pair in zip(row.plan.predicted_bytes, row.plan.peak_bytes, strict=True)
    ]
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return values[:, 0], values[:, 1]


def _around(value: float, drawn: Sequence[float]) -> tuple[float, float]:
    low, high = interval_of(np.array(drawn)) if drawn else (value, value)
    return min(low, value), max(high, value)

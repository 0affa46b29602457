"""Calibration: factors from predicted to measured step times and peak memory of plans.

`autopar-verify` fits and writes the file (`calibration.json`); `autopar-search --calibration` reads
and applies it. It contains a factor for all computation, one for all communication, one for memory,
and a time added once per step. A dozen measured plans determine these numbers. They do not depend
on the plan, so they also apply to plans that were not measured.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import field, to_builtins

from autopar import __version__
from autopar.documents.checks import check_version, published
from autopar.documents.json import (
    load_object,
    read_record,
    write_json,
)
from autopar.errors import OptionError
from autopar.records import KeyFault, Record, quantity, whole_number
from autopar.sources import Source
from autopar.units import format_seconds

CALIBRATION_FORMAT = "autopar-calibration"
# Version 1: first version.
CALIBRATION_VERSION = 1

SANE = {"computation": (0.5, 2.0), "communication": (0.25, 4.0), "memory": (0.8, 1.25)}
"""Accepted range (low, high) of each factor.

A factor outside of its range means that the profile was measured under other conditions and should
be measured again. The range is widest for communication, because small messages vary most.
"""
_WIDE = 2.0
"""Minimum ratio of interval ends of an undetermined factor."""

MOST = 1e3
"""Largest factor and largest end of its interval; a larger one indicates another machine."""
MOST_S = 3600.0
"""Largest time added per step, seconds."""

_Factor = Annotated[
    float,
    quantity(
        what="measured over predicted",
        unit="",
        maximum=MOST,
        too_large="is too large for a correction",
    ),
]
_Seconds = Annotated[
    float,
    quantity(
        what="time of every step",
        unit="s",
        maximum=MOST_S,
        exclusive=False,
        too_large="is probably in ms",
    ),
]
_Count = Annotated[int, whole_number(1)]


class _Valued(Record):
    def __post_init__(self) -> None:
        value, low, high = (getattr(self, name) for name in ("value", "low", "high"))
        if (low is None) != (high is None):
            raise KeyFault("low", "only one end of the interval is given")
        if low is not None and not low <= value <= high:
            problem = f"{value:g} is outside of the interval {low:g} to {high:g}"
            raise KeyFault("value", problem)


class _FactorEntry(_Valued):
    """Factor with its 95 % interval; both ends are null if the runs do not determine it."""

    value: _Factor
    low: _Factor | None = None
    high: _Factor | None = None


class _SecondsEntry(_Valued):
    """Seconds with their 95 % interval; both ends are null if the runs do not determine it."""

    value: _Seconds
    low: _Seconds | None = None
    high: _Seconds | None = None


class _Factors(Record):
    computation: _FactorEntry
    communication: _FactorEntry
    fixed_s: _SecondsEntry
    memory: _FactorEntry


class _Machine(Record):
    name: str
    world_size: _Count
    estimated: bool = False


class _Model(Record):
    name: str
    num_layers: _Count
    seq_length: list[_Count]
    hidden_size: list[_Count]
    precision: str


class _Input(Record):
    role: str
    path: str
    sha256: str = ""


_EXAMPLE: dict[str, Any] = {
    "format": CALIBRATION_FORMAT,
    "version": CALIBRATION_VERSION,
    "hardware": {"name": "h100_1x8", "world_size": 8},
    "model": {
        "name": "llama2-7b",
        "num_layers": 32,
        "seq_length": [4096],
        "hidden_size": [4096],
        "precision": "bf16",
    },
    "factors": {
        "computation": {"value": 1.04, "low": 1.01, "high": 1.07},
        "communication": {"value": 1.2, "low": None, "high": None},
        "fixed_s": {"value": 0.002, "low": 0.0, "high": 0.004},
        "memory": {"value": 0.98, "low": 0.97, "high": 0.99},
    },
}


@published("calibration", example=_EXAMPLE)
class CalibrationDocument(Record):
    """Factors of a calibration file, with machine, model and errors of the measured runs."""

    format: Literal["autopar-calibration"]
    version: int
    tool: str = f"autopar {__version__}"
    hardware: _Machine
    model: _Model
    factors: _Factors
    fit: dict[str, Any] = field(default_factory=dict)
    """Errors before and after the fit, held-out and by plan; not used by a search."""
    inputs: list[_Input] = field(default_factory=list)
    """Profiles used for the predictions."""
    notes: list[str] = field(default_factory=list)


class Interval(Record):
    """Fitted number and its 95 % interval; the ends are None if the data do not determine them."""

    value: float
    low: float | None = None
    high: float | None = None


_ONE = Interval(value=1.0)


class Calibration(Record):
    """Correction of predicted times and memory; the default changes nothing."""

    computation: Interval = _ONE
    """Measured over predicted time of computation."""
    communication: Interval = _ONE
    """Measured over predicted time of communication."""
    fixed_s: Interval = Interval(value=0.0)
    """Seconds added once per step."""
    memory: Interval = _ONE
    """Measured over predicted peak memory."""
    hardware: str = ""
    """Name of the hardware profile of the measured runs; empty if unknown."""
    world_size: int = 0
    """Number of GPUs of the measured runs; 0 for a correction that was not fitted."""
    model: str = ""
    precision: str = ""
    estimated: bool = False
    """True if the predictions were based on datasheets."""
    source: Source | None = None

    @property
    def sentence(self) -> str:
        """One-line description of the applied correction."""
        where = "calibration" if self.source is None else f"calibration {self.source.path}"
        return (
            f"{where}: computation x {self.computation.value:.4g}, communication x "
            f"{self.communication.value:.4g}, {format_seconds(self.fixed_s.value)} more per step, "
            f"memory x {self.memory.value:.4g}"
        )

    def doubts(
        self, *, world_size: int, model: str, precision: str, estimated: bool
    ) -> tuple[str, ...]:
        """Return warnings about applying the calibration to a search, one line each.

        Reasons are other settings than in the measured runs, and factors that are implausible or
        poorly determined.

        world_size, model, precision : settings of the search.
        estimated : True if its profiles are estimates.
        """
        said = []
        pairs: tuple[tuple[str, object, object], ...] = (
            ("GPUs", self.world_size, world_size),
            ("model", self.model, model),
            ("precision", self.precision, precision),
        )
        differ = [f"{name} {then} then, {now} now" for name, then, now in pairs if then != now]
        # World size 0: not fitted, so that nothing differs.
        if self.world_size and differ:
            said.append(f"the calibration was fitted on another question ({'; '.join(differ)})")
        if self.world_size and self.estimated != estimated:
            kinds = ["measured", "estimated"]
            said.append(
                f"the calibration corrects {kinds[self.estimated]} profiles, but "
                f"these are {kinds[estimated]}"
            )
        for name, (low, high) in SANE.items():
            factor: Interval = getattr(self, name)
            if not low <= factor.value <= high:
                said.append(
                    f"calibration factor of {name} {factor.value:.3g} is outside "
                    f"of {low:g} to {high:g}: the profile contradicts the runs. "
                    "Measure it again"
                )
            elif factor.low is not None and (factor.high or 0.0) > _WIDE * factor.low:
                said.append(
                    f"calibration factor of {name} is barely known "
                    f"({factor.low:.3g} to {factor.high:.3g})"
                )
        return tuple(said)

    def require_device(self, name: str) -> None:
        """Raise OptionError if the measured runs used another device.

        name : name of the hardware profile of the search.
        """
        if self.hardware and device_of(name) != device_of(self.hardware):
            raise OptionError(
                f"--calibration: fitted on {device_of(self.hardware)!r}, but the "
                f"hardware is {device_of(name)!r}",
                remedy="Run autopar-verify on this hardware",
            )


def device_of(name: str) -> str:
    """Return the device in the name of a hardware profile, such as `cpu` for `cpu_1x2`."""
    # Profiles are named DEVICE_NODESxGPUS, and factors apply to any number of GPUs.
    return re.sub(r"[_:][0-9]+x[0-9]+$", "", name)


def read_calibration(path: Path | str) -> Calibration:
    """Return the calibration in a file.

    Raises DocumentError: the file is missing, invalid or of a newer version, or a factor is
    invalid.
    """
    loaded = load_object(path, remedy="Create it with autopar-verify")
    data = loaded.data
    check_version(
        path,
        data,
        CALIBRATION_FORMAT,
        CALIBRATION_VERSION,
        give="Use the calibration.json of autopar-verify",
        again="run autopar-verify again",
    )
    document = read_record(CalibrationDocument, Path(path), data)
    factors = document.factors
    return Calibration(
        computation=_interval(factors.computation),
        communication=_interval(factors.communication),
        fixed_s=_interval(factors.fixed_s),
        memory=_interval(factors.memory),
        hardware=document.hardware.name,
        world_size=document.hardware.world_size,
        model=document.model.name,
        precision=document.model.precision,
        estimated=document.hardware.estimated,
        source=Source(role="calibration", path=str(path), sha256=loaded.sha256),
    )


def write_calibration(path: Path, document: CalibrationDocument) -> None:
    """Write a calibration file atomically; raises OSError."""
    write_json(path, to_builtins(document), number_rows=True)


def _interval(entry: _FactorEntry | _SecondsEntry) -> Interval:
    return Interval(value=entry.value, low=entry.low, high=entry.high)

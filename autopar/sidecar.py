"""Sidecars: raw samples and metadata beside a documented file, in `<file>.meta.json`.

A documented file holds one number per key and names no unit; its sidecar records the unit, where
the numbers come from, what the documented keys cannot express, and every raw sample. Runs are
append-only: writing a document again keeps the runs that were measured before.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from autopar import __version__
from autopar.errors import DocumentError
from autopar.jsonio import load_object, shorten, write_json
from autopar.measurements import Bytes, BytesOrZero, BytesPerSecond, CurveData, Measurement
from autopar.model_measurements import LayerTimes, ModelMeasurement, OtherTimes, TimeFit
from autopar.patterns import Quantity, StrictObject, key_error, validate_document

__all__ = [
    "REPLACES",
    "SIDECAR_VERSION",
    "DocumentKind",
    "Run",
    "Sidecar",
    "append_run",
    "newest_cells",
    "read_sidecar",
    "sidecar_path",
    "write_sidecar",
]

# History of the format; a reader upgrades older versions in `read_sidecar`.
#   1  first version
#   2  curves of strided groups and of transfers, spread and fit; measurements of a run; synthetic
#   3  times of what is not a layer, spread of recomputation, fits
SIDECAR_VERSION = 3

DocumentKind = Literal["allreduce", "p2p", "overlap", "sp_time", "computation", "memory"]

_UNITS: dict[str, tuple[str, ...]] = {
    "allreduce": ("GB/s", "MiB/ms"),
    "p2p": ("GB/s", "MiB/ms"),
    "overlap": ("1",),
    "sp_time": ("ms",),
    "computation": ("ms",),
    "memory": ("MiB",),
}
"""Units that each document may be in; the first is the documented one."""

_Sample = Annotated[
    float,
    Quantity(
        what="a finite sample", unit="", minimum=-1e18, maximum=1e18, too_large="is no sample"
    ),
]


class Run(StrictObject):
    """One measuring run: what it ran on, and raw samples by documented key or by cell."""

    id: str | None = None
    """Names the run in every sidecar that it wrote."""
    metadata: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    samples: dict[str, list[_Sample]] = Field(default_factory=dict)
    """Raw samples in the unit of the document, by its key."""
    measurements: list[Measurement] = Field(default_factory=list)
    """Raw samples in seconds, by cell of a sweep."""
    model_measurements: list[ModelMeasurement] = Field(default_factory=list)
    """Raw figures of a model, by cell."""


class Sidecar(StrictObject):
    """Metadata and raw samples of one documented file."""

    version: int
    document: DocumentKind
    unit: str
    source: str
    """What the numbers come from, in words: a tool, a datasheet, a publication."""
    estimated: bool = False
    """True when the numbers come from a datasheet and not from a measurement."""
    synthetic: bool = False
    """True when the numbers exercise the code and describe no machine, such as the times of
    several ranks on one GPU."""
    tool: str = f"autopar {__version__}"
    name: str | None = None
    """Name of the hardware or model."""
    parameter_bytes: Literal[2, 4] | None = None
    """Bytes per parameter that `parameter_size` of a memory document counts."""
    memory_bytes: Bytes | None = None
    """Memory of one device."""
    memory_bytes_per_s: BytesPerSecond | None = None
    """Memory bandwidth of one device."""
    logits_peak_bytes_per_sample: BytesOrZero | None = None
    """Extra memory per sample while the loss runs, not contained in the tables."""
    curves: list[CurveData] = Field(default_factory=list)
    layer_times: list[LayerTimes] = Field(default_factory=list)
    """Of a computation file: what was measured beside whole forwards."""
    other_times: list[OtherTimes] = Field(default_factory=list)
    """Of a computation file: embedding, head and loss, backward apart from forward."""
    fits: list[TimeFit] = Field(default_factory=list)
    """Of a computation file: formulas through these times, with residuals and intervals."""
    runs: list[Run] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> Self:
        units = _UNITS[self.document]
        if self.unit not in units:
            raise key_error(
                f"the value is {shorten(self.unit)}, expected {' or '.join(units)}", "unit"
            )
        return self


REPLACES = "replaces"
"""Key of a run's metadata: true where its cells of a model stand in the place of all earlier."""


def newest_cells(runs: Iterable[Run]) -> dict[str, ModelMeasurement]:
    """Return the cells of a model that count, by key: the newest ok one, else the newest."""
    found: dict[str, ModelMeasurement] = {}
    for run in runs:
        if run.metadata.get(REPLACES):
            found = {}
        for m in run.model_measurements:
            earlier = found.get(m.key)
            if m.status == "ok" or earlier is None or earlier.status != "ok":
                found[m.key] = m
    return found


def sidecar_path(document: Path | str) -> Path:
    """Return the path of the sidecar of a documented file."""
    document = Path(document)
    return document.with_name(document.name + ".meta.json")


def read_sidecar(document: Path | str, kind: DocumentKind | None = None) -> Sidecar | None:
    """Return the sidecar of a documented file, None if it has none.

    Raises
    ------
    DocumentError: damaged, written by a newer version, or (with `kind`) of another document.
    """
    path = sidecar_path(document)
    if not path.exists():
        return None
    data = load_object(path).data
    version = data.get("version")
    if type(version) is int and not 1 <= version <= SIDECAR_VERSION:
        raise DocumentError(
            path,
            f"the value is {shorten(version)}, expected 1 to {SIDECAR_VERSION}",
            key="version",
            remedy="update autopar or measure the file again",
        )
    if type(version) is int:
        data = {**data, "version": SIDECAR_VERSION}  # later versions only added keys
    sidecar = validate_document(Sidecar, path, data)
    if kind is not None and sidecar.document != kind:
        raise DocumentError(
            path, f"the value is {sidecar.document!r}, expected {kind!r}", key="document"
        )
    return sidecar


def write_sidecar(document: Path | str, sidecar: Sidecar) -> Path:
    """Write the sidecar of a documented file atomically, keeping the runs it already had."""
    path = sidecar_path(document)
    old = read_sidecar(document)
    if old is not None:
        new = [run for run in sidecar.runs if run not in old.runs]
        sidecar = sidecar.model_copy(update={"runs": [*old.runs, *new]})
    write_json(path, sidecar.model_dump(exclude_none=True))
    return path


def append_run(document: Path | str, run: Run) -> Path:
    """Append a run to the sidecar of a documented file.

    Raises
    ------
    DocumentError: the file has no sidecar yet.
    """
    old = read_sidecar(document)
    if old is None:
        raise DocumentError(
            sidecar_path(document),
            "this file does not exist",
            remedy="write the sidecar with its document first",
        )
    path = sidecar_path(document)
    write_json(
        path, old.model_copy(update={"runs": [*old.runs, run]}).model_dump(exclude_none=True)
    )
    return path

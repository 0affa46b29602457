"""Sidecars: raw samples and metadata beside a documented file, in `<file>.meta.json`.

A documented file holds one number per key and names no unit; its sidecar records the unit, where
the numbers come from, what the documented keys cannot express, and every raw sample. Runs are
append-only: writing a document again keeps the runs that were measured before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from autopar import __version__
from autopar.errors import DocumentError
from autopar.jsonio import load_object, shorten, write_json
from autopar.patterns import Quantity, StrictObject, key_error, validate_document

__all__ = [
    "SIDECAR_VERSION",
    "CurveData",
    "DocumentKind",
    "Run",
    "Sidecar",
    "append_run",
    "read_sidecar",
    "sidecar_path",
    "write_sidecar",
]

# History of the format; a reader upgrades older versions in `read_sidecar`.
#   1  first version
SIDECAR_VERSION = 1

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

_Bytes = Annotated[
    float, Quantity(what="a size", unit="bytes", maximum=1e15, too_large="is beyond any device")
]
_BytesPerSecond = Annotated[
    float,
    Quantity(
        what="a memory bandwidth",
        unit="bytes/s",
        minimum=1e6,
        maximum=1e15,
        too_large="is beyond any device",
        too_small="looks like GB/s or TB/s",
    ),
]
_BytesOrZero = Annotated[
    float,
    Quantity(
        what="a size",
        unit="bytes",
        maximum=1e15,
        exclusive=False,
        too_large="is beyond any device",
    ),
]
_Seconds = Annotated[
    float, Quantity(what="a time", unit="s", maximum=1e5, too_large="looks like milliseconds")
]
_Sample = Annotated[
    float,
    Quantity(
        what="a finite sample", unit="", minimum=-1e18, maximum=1e18, too_large="is no sample"
    ),
]


class CurveData(StrictObject):
    """A measured curve in base units, where the documented keys cannot express it."""

    operation: Literal["allreduce", "all2all", "allgather", "reducescatter"]
    group_size: int
    sizes_bytes: list[_Bytes]
    times_s: list[_Seconds]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 2 <= self.group_size <= 10**9:
            raise key_error(
                f"the value is {self.group_size}, expected a group of at least 2", "group_size"
            )
        if len(self.sizes_bytes) != len(self.times_s) or not self.sizes_bytes:
            raise key_error(
                f"there are {len(self.times_s)} times for {len(self.sizes_bytes)} sizes, "
                "expected one time per size",
                "times_s",
            )
        if any(b <= a for a, b in zip(self.sizes_bytes, self.sizes_bytes[1:], strict=False)):
            raise key_error("the sizes are not increasing", "sizes_bytes")
        return self


class Run(StrictObject):
    """One measuring run: what it ran on, and raw samples by documented key."""

    metadata: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    samples: dict[str, list[_Sample]] = Field(default_factory=dict)
    """Raw samples in the unit of the document, by its key."""


class Sidecar(StrictObject):
    """Metadata and raw samples of one documented file."""

    version: int
    document: DocumentKind
    unit: str
    source: str
    """What the numbers come from, in words: a tool, a datasheet, a publication."""
    estimated: bool = False
    """True when the numbers come from a datasheet and not from a measurement."""
    tool: str = f"autopar {__version__}"
    name: str | None = None
    """Name of the hardware or model."""
    parameter_bytes: Literal[2, 4] | None = None
    """Bytes per parameter that `parameter_size` of a memory document counts."""
    memory_bytes: _Bytes | None = None
    """Memory of one device."""
    memory_bytes_per_s: _BytesPerSecond | None = None
    """Memory bandwidth of one device."""
    logits_peak_bytes_per_sample: _BytesOrZero | None = None
    """Extra memory per sample while the loss runs, not contained in the tables."""
    curves: list[CurveData] = Field(default_factory=list)
    runs: list[Run] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check(self) -> Self:
        units = _UNITS[self.document]
        if self.unit not in units:
            raise key_error(
                f"the value is {shorten(self.unit)}, expected {' or '.join(units)}", "unit"
            )
        return self


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
    if isinstance(version, int) and not isinstance(version, bool) and version != SIDECAR_VERSION:
        raise DocumentError(
            path,
            f"the value is {shorten(version)}, expected {SIDECAR_VERSION}",
            key="version",
            remedy="update autopar or measure the file again",
        )
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

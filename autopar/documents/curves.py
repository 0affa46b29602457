"""Communication time curves in sidecars of hardware files: reading, writing and selection.

A hardware file contains one bandwidth per group of ranks; its sidecar contains times by message
size. If both exist, `priced_curves` selects the one that predicts communication times. The hardware
files are read in `autopar.documents.hardware`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from autopar.documents.schemas import allreduce_key, p2p_key, sp_time_key
from autopar.documents.sidecar import (
    SIDECAR_VERSION,
    CurveData,
    DocumentKind,
    Sidecar,
    documented_unit,
    sidecar_path,
)
from autopar.errors import DocumentError
from autopar.rates.measured import COLLECTIVES, OPERATIONS, Curve, HardwareProfile
from autopar.records import Record
from autopar.sanity_checks import InputWarning
from autopar.sources import Source, stacks_of
from autopar.units import GB, MIB, MS

# --------------------------------------------------------------------------------------------------
# Conversion between sidecars and hardware profiles.
#
# Documented keys contain one bandwidth per group, and times of whole MiB in consecutive groups.
# Other collectives and sizes, strided groups, transfers, latency and spread are curves of the
# sidecars.


class SidecarCurves(Record, eq=False):
    """Curves of one sidecar, or of all files of a profile, by field of `HardwareProfile`."""

    curves: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    strided_curves: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    p2p_curves: Mapping[int, Curve] = field(default_factory=dict)
    sequence_curves: Mapping[int, Curve] = field(default_factory=dict)
    """Curves for sequence parallelism; empty for a single sidecar."""
    notes: tuple[str, ...] = ()
    """Sentences on ignored curves, or on file values that differ from measured times."""


def sidecar_curves(document: Path, sidecar: Sidecar, world_size: int) -> SidecarCurves:
    """Return the curves that the planner reads from the sidecar of a hardware file.

    Curves of operations that the planner does not use are ignored, with a note if the operation is
    unknown. Raises DocumentError for a group that is larger than the cluster or has two curves.

    document : path of the hardware file.
    """
    curves: dict[tuple[str, int], Curve] = {}
    strided: dict[tuple[str, int], Curve] = {}
    transfers: dict[int, Curve] = {}
    # An ordered set.
    unknown: dict[str, None] = {}
    groups: set[tuple[str, int, bool]] = set()
    for data in sidecar.curves:
        group = data.operation, data.group_size, data.consecutive
        if group in groups:
            kind = "consecutive" if data.consecutive else "strided"
            raise DocumentError(
                sidecar_path(document),
                f"{data.operation} in {kind} groups of {data.group_size} has two curves",
                key="curves",
                remedy="Remove one of them",
            )
        groups.add(group)
        if data.group_size > world_size:
            raise DocumentError(
                sidecar_path(document),
                f"a group of {data.group_size} GPUs is larger than the {world_size} GPUs",
                key="curves",
                remedy="Check the number of nodes and of GPUs per node",
            )
        if data.operation == "p2p":
            # For transfers, group_size is the number of stages.
            transfers[data.group_size] = _curve(data)
        elif data.operation in COLLECTIVES:
            target = curves if data.consecutive else strided
            target[data.operation, data.group_size] = _curve(data)
        elif data.operation not in OPERATIONS:
            unknown[data.operation] = None
    return SidecarCurves(
        curves=curves,
        strided_curves=strided,
        p2p_curves=transfers,
        notes=tuple(f"curves of the unknown operation {name!r} are ignored" for name in unknown),
    )


def hardware_sidecar(kind: DocumentKind, profile: HardwareProfile) -> Sidecar:
    """Return the sidecar of one hardware file of a profile.

    The sidecar of the all-reduce file contains the curves of strided groups, that of the p2p file
    the curves of transfers, and that of the sp_time file all other curves that documented keys
    cannot express.
    """
    curves: list[CurveData] = []
    if kind == "allreduce":
        curves = [
            _data(operation, size, curve, consecutive=False)
            for (operation, size), curve in sorted(profile.strided_curves.items())
        ]
    elif kind == "p2p":
        curves = [_data("p2p", size, curve) for size, curve in sorted(profile.p2p_curves.items())]
    elif kind == "sp_time":
        curves = [
            _data(operation, size, curve)
            for (operation, size), curve in sorted(profile.curves.items())
            if not _expressible(operation, curve)
        ]
    return Sidecar(
        version=SIDECAR_VERSION,
        document=kind,
        unit=documented_unit(kind),
        stack=next(iter(stacks_of(profile.sources)), None),
        hiding=profile.hiding if kind == "overlap" else None,
        source="estimated from datasheets" if profile.estimated else profile.name,
        estimated=profile.estimated,
        synthetic=profile.synthetic,
        name=profile.name,
        memory_bytes=profile.memory_bytes,
        memory_bytes_per_s=profile.memory_bytes_per_s,
        domain_gpus=profile.domain_gpus,
        curves=curves,
    )


def _expressible(operation: str, curve: Curve) -> bool:
    """Return True if documented keys of the sp_time file can express all data of a curve."""
    return (
        operation in ("allreduce", "all2all")
        # Documented keys are in whole MiB.
        and not np.any(curve.sizes_bytes % MIB)
        and not curve.has_spread
        and curve.latency_s is None
    )


def _curve(data: CurveData) -> Curve:
    def array(values: list[float]) -> NDArray[np.float64]:
        return np.array(values, dtype=np.float64)

    # A fit over all sizes can miss the smallest; an empty message takes no longer than that one.
    latency = None if data.latency_s is None else min(data.latency_s, data.times_s[0])
    return Curve(
        sizes_bytes=array(data.sizes_bytes),
        times_s=array(data.times_s),
        low_s=None if data.low_s is None else array(data.low_s),
        high_s=None if data.high_s is None else array(data.high_s),
        latency_s=latency,
    )


def _data(operation: str, size: int, curve: Curve, *, consecutive: bool = True) -> CurveData:
    def numbers(values: NDArray[np.float64]) -> list[float]:
        return [float(value) for value in values]

    return CurveData(
        operation=operation,
        group_size=size,
        consecutive=consecutive,
        sizes_bytes=numbers(curve.sizes_bytes),
        times_s=numbers(curve.times_s),
        low_s=None if curve.low_s is None else numbers(curve.low_s),
        high_s=None if curve.high_s is None else numbers(curve.high_s),
        # A line that reaches size 0 at a negative time gives no latency.
        latency_s=curve.latency_s if (curve.latency_s or 0.0) >= 0.0 else None,
    )


class HardwareFile(Record):
    """Validated hardware file with its sidecar and sources."""

    kind: DocumentKind
    path: Path
    sidecar: Sidecar | None
    curves: SidecarCurves
    sources: tuple[Source, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings about the file and its curves, one sentence each."""
        return (*self.sources[0].notes, *self.curves.notes)


# --------------------------------------------------------------------------------------------------
# Selection between the file value and the measured times of a group.
#
# Differences are reported in notes and are no error: a user may edit a value to see the effect, and
# one folder may contain files of two measuring runs.


_ROUNDING = 0.01
"""Relative tolerance for rounding of file values; a larger difference means an edited value."""
_CONFLICT = 0.10
"""Largest relative difference between two measuring runs that is not reported."""


def reference_bytes(file: HardwareFile) -> float | None:
    """Return the message size of a file's bandwidths in bytes, None if unknown."""
    # The newest run wrote the documented values.
    for run in reversed(file.sidecar.runs if file.sidecar is not None else []):
        size = run.metadata.get("reference_bytes")
        if isinstance(size, int | float) and size > 0:
            return float(size)
    return None


def priced_curves(
    files: Mapping[DocumentKind, HardwareFile],
    allreduce_bytes_per_s: Mapping[tuple[int, bool], float],
    p2p_bytes_per_s: Mapping[int, float],
    documented_times: Mapping[tuple[str, int], Curve],
    world_size: int,
) -> SidecarCurves:
    """Return the curves that predict communication times, and notes on contradictions.

    The curve of a sidecar replaces the file values of the same measuring run, because it includes
    latency, more message sizes and spread. Where it differs from the file, the user has edited the
    file, and the file values are used. If the sp_time file is from another run than the bandwidths,
    its times apply only to all-gathers and reduce-scatters of sequence parallelism.

    allreduce_bytes_per_s : file values by (group size, consecutive).
    p2p_bytes_per_s : file values by number of stages.
    documented_times : curves of the keys of the sp_time file, by (operation, group size).
    """
    odd: dict[DocumentKind, list[_Difference]] = {"sp_time": [], "allreduce": [], "p2p": []}
    conflicts: list[_Difference] = []
    curves = {key: curve for file in files.values() for key, curve in file.curves.curves.items()}
    strided = {
        k: curve for file in files.values() for k, curve in file.curves.strided_curves.items()
    }
    transfers = {k: curve for file in files.values() for k, curve in file.curves.p2p_curves.items()}
    bandwidths = files["allreduce"]
    related = "sp_time" in files and _one_run(bandwidths, files["sp_time"])

    times = dict(files["sp_time"].curves.curves) if "sp_time" in files else {}
    for key, documented in documented_times.items():
        curve = curves.get(key) if related else times.get(key)
        differences = [] if curve is None else _times(*key, documented, curve)
        odd["sp_time"] += differences
        times[key] = documented if curve is None or differences else curve
    curves.update(times)

    sequence: dict[int, Curve] = {}
    for (size, consecutive), entry in allreduce_bytes_per_s.items():
        # There is one world group, stored under both keys.
        if not consecutive and size == world_size:
            continue
        key, factor = ("allreduce", size), OPERATIONS["allreduce"].bus_factor(size)
        name = allreduce_key(size, consecutive)
        table = curves if consecutive else strided
        documented_for = times.get(key) if consecutive else None
        # From another run than the bandwidths: only curves in the bandwidths' sidecar can replace
        # them.
        if documented_for is not None and not related:
            table.pop(key)
            if key in bandwidths.curves.curves:
                table[key] = bandwidths.curves.curves[key]
            conflicts += _bandwidth(name, entry, _long(documented_for), factor, None, _CONFLICT)
        if key in table:
            differences = _bandwidth(name, entry, table[key], factor, reference_bytes(bandwidths))
            odd["allreduce"] += differences
            if differences:
                del table[key]
        if documented_for is not None and table.get(key) is not documented_for:
            sequence[size] = documented_for
    for stages, entry in p2p_bytes_per_s.items():
        if stages in transfers:
            factor = OPERATIONS["p2p"].bus_factor(stages)
            reference = reference_bytes(files["p2p"])
            differences = _bandwidth(p2p_key(stages), entry, transfers[stages], factor, reference)
            odd["p2p"] += differences
            if differences:
                del transfers[stages]
    return SidecarCurves(
        curves=curves,
        strided_curves=strided,
        p2p_curves=transfers,
        sequence_curves=sequence,
        notes=(
            *(_edited(files[kind].path, found) for kind, found in odd.items() if found),
            *([_conflict(bandwidths.path, files["sp_time"].path, conflicts)] if conflicts else []),
        ),
    )


def _one_run(first: HardwareFile, second: HardwareFile) -> bool:
    """Return True if the sidecars of both files name a common measuring run or estimate."""
    if first.sidecar is None or second.sidecar is None:
        return False
    named = [{run.id for run in f.sidecar.runs} - {None} for f in (first, second) if f.sidecar]
    if all(named):
        return bool(named[0] & named[1])
    # Estimates have no runs; their name and source identify them.
    return (first.sidecar.name, first.sidecar.source) == (
        second.sidecar.name,
        second.sidecar.source,
    )


_Difference = tuple[float, str, str]
"""(Difference as |log(value / expected)|, text of key and value, text of the expected value)."""


def _bandwidth(
    key: str,
    entry: float,
    curve: Curve,
    factor: float,
    reference: float | None,
    tolerance: float = _ROUNDING,
) -> list[_Difference]:
    # Documented values are bus bandwidths: message times factor over time.
    rates = factor * curve.sizes_bytes / curve.times_s
    below = np.flatnonzero(curve.sizes_bytes <= (reference or 0.0))
    if below.size:
        # For a size that was not measured, the document contains the next smaller one.
        expected = float(rates[below[-1]])
    else:
        # Unknown size: a value that occurs anywhere on the curve agrees with it.
        expected = float(np.clip(entry, rates.min(), rates.max()))
    return _difference(key, entry / GB, expected / GB, "GB/s", tolerance)


def _long(curve: Curve) -> Curve:
    """Return the points of a curve at 16 MiB and more, over which file bandwidths are averaged."""
    kept = curve.sizes_bytes >= min(16.0 * MIB, float(curve.sizes_bytes[-1]))
    return Curve(sizes_bytes=curve.sizes_bytes[kept], times_s=curve.times_s[kept])


def _times(operation: str, group_size: int, documented: Curve, curve: Curve) -> list[_Difference]:
    own = dict(zip(curve.sizes_bytes.tolist(), curve.times_s.tolist(), strict=True))
    found = []
    for size_bytes, time_s in zip(documented.sizes_bytes, documented.times_s, strict=True):
        expected = own.get(float(size_bytes))
        # Only sizes in both can be compared.
        if expected is not None:
            key = sp_time_key(operation, group_size, size_bytes)
            found += _difference(key, float(time_s) / MS, expected / MS, "ms", _ROUNDING)
    return found


def _difference(
    key: str, value: float, expected: float, unit: str, tolerance: float
) -> list[_Difference]:
    if abs(value / expected - 1.0) <= tolerance:
        return []
    # In logarithms, half and double are equally far off.
    distance = abs(float(np.log(value / expected)))
    return [(distance, f"{key} is {value:.4g} {unit}", f"{expected:.4g} {unit}")]


def _worst(differences: list[_Difference]) -> tuple[str, str, str]:
    """Return (value, expected value, number of other differences) of the largest, as texts."""
    _, value, expected = max(differences, key=lambda item: item[0])
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return value, expected, more


def _edited(path: Path, differences: list[_Difference]) -> str:
    value, expected, more = _worst(differences)
    return InputWarning(
        f"contradiction: in {path.name} {value}, but the times of the sidecars "
        f"are {expected}{more}. The values of the file price these messages, "
        "without latency: measure both again in one run"
    )


def _conflict(bandwidths: Path, times: Path, differences: list[_Difference]) -> str:
    value, expected, more = _worst(differences)
    return InputWarning(
        f"contradiction: in {bandwidths.name} {value}, but {times.name} has "
        f"{expected} for messages of 16 MiB and more{more}. Bandwidths price the "
        "all-reduces of gradients and of tensor parallelism, these times its "
        "sequence parallelism"
    )

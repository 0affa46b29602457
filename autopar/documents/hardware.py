"""Reads the documented hardware files: four files make one HardwareProfile.

All published spellings are read (Galvatron, PaddleNLP), the documented one is written. Units are
converted here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from autopar.documents.checks import INT, PatternDocument
from autopar.documents.json import write_json
from autopar.documents.schemas import (
    AllreduceDocument,
    OverlapDocument,
    P2pDocument,
    SpTimeDocument,
)
from autopar.documents.sidecar import (
    SIDECAR_VERSION,
    CurveData,
    DocumentKind,
    Sidecar,
    load_with_sidecar,
    sidecar_path,
    write_sidecar,
)
from autopar.errors import DocumentError
from autopar.hardware import COLLECTIVES, OPERATIONS, Curve, HardwareProfile
from autopar.sources import Source
from autopar.units import GB, MIB, MS

__all__ = [
    "MAKE_HARDWARE",
    "BandwidthUnit",
    "SidecarCurves",
    "hardware_file_name",
    "hardware_shapes",
    "hardware_sidecar",
    "read_hardware",
    "read_hardware_dir",
    "reference_bytes",
    "shape_of_name",
    "sidecar_curves",
    "write_hardware",
]


# --------------------------------------------------------------------------------------------------
# The documented names of the hardware files, and the shape of the cluster that they say.


def hardware_file_name(kind: DocumentKind, num_nodes: int, gpus_per_node: int) -> str:
    """Return the documented name of a hardware file."""
    if kind == "overlap":
        return "overlap_coefficient.json"
    stem = {"allreduce": "allreduce_bandwidth", "p2p": "p2p_bandwidth", "sp_time": "sp_time"}[kind]
    return f"{stem}_{num_nodes}nodes_{gpus_per_node}gpus_per_node.json"


def hardware_shapes(folder: Path | str) -> tuple[tuple[int, int], ...]:
    """Return (nodes, GPUs per node) of every all-reduce file in a folder, increasing.

    Raises
    ------
    DocumentError: the folder cannot be read.
    """
    folder = Path(folder)
    try:
        found = [shape_of_name(path.name) for path in folder.iterdir()]
    except OSError as error:
        raise DocumentError(
            folder, f"this folder cannot be read ({error.strerror})", remedy="check its permissions"
        ) from None
    return tuple(sorted(shape for shape in found if shape is not None))


def shape_of_name(name: str) -> tuple[int, int] | None:
    """Return (nodes, GPUs per node) of the documented name of an all-reduce file, else None."""
    match = re.fullmatch(rf"allreduce_bandwidth_({INT})nodes_({INT})gpus_per_node\.json", name)
    return (int(match[1]), int(match[2])) if match else None


# --------------------------------------------------------------------------------------------------
# The sidecars of the hardware files: what they add to a profile, and what of a profile they hold.
#
# Documented keys hold one bandwidth per group, and times of whole MiB in groups of neighbours.
# Other collectives and sizes, strided groups, transfers, latency and spread are curves of the
# sidecars.


@dataclass(frozen=True, kw_only=True, eq=False)
class SidecarCurves:
    """Curves of one sidecar by where they belong in `HardwareProfile`."""

    curves: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    strided_curves: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    p2p_curves: Mapping[int, Curve] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    """What was left out, in words."""


def sidecar_curves(document: Path, sidecar: Sidecar, world_size: int) -> SidecarCurves:
    """Return the curves that the planner reads from the sidecar of a hardware file.

    Measured operations that no formula uses are left out, unknown ones with a note. Raises
    DocumentError for a group that is larger than the cluster or has two curves.
    """
    curves: dict[tuple[str, int], Curve] = {}
    strided: dict[tuple[str, int], Curve] = {}
    transfers: dict[int, Curve] = {}
    # an ordered set
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
                remedy="remove one of them",
            )
        groups.add(group)
        if data.group_size > world_size:
            raise DocumentError(
                sidecar_path(document),
                f"a group of {data.group_size} does not exist on {world_size} GPUs",
                key="curves",
                remedy="check the number of nodes and of GPUs per node",
            )
        if data.operation == "p2p":
            # for transfers the size of the group is the number of stages
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
        notes=tuple(f"curves of the unknown operation {name!r} were left out" for name in unknown),
    )


def hardware_sidecar(kind: DocumentKind, profile: HardwareProfile) -> Sidecar:
    """Return the sidecar of one hardware file of a profile.

    Strided curves go beside the all-reduce bandwidths, transfers beside theirs, the rest beside
    the collective times unless the documented keys say all of it.
    """
    # the coefficient is a ratio
    unit = {"allreduce": "GB/s", "p2p": "GB/s", "overlap": "1", "sp_time": "ms"}[kind]
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
        unit=unit,
        source="estimated from datasheets" if profile.estimated else profile.name,
        estimated=profile.estimated,
        synthetic=profile.synthetic,
        name=profile.name,
        memory_bytes=profile.memory_bytes,
        memory_bytes_per_s=profile.memory_bytes_per_s,
        curves=curves,
    )


def _expressible(operation: str, curve: Curve) -> bool:
    """Return whether documented keys of the collective times hold all of a curve."""
    return (
        operation in ("allreduce", "all2all")
        # documented keys name whole MiB
        and not np.any(curve.sizes_bytes % MIB)
        and not curve.has_spread
        and curve.latency_s is None
    )


def _curve(data: CurveData) -> Curve:
    def array(values: list[float]) -> NDArray[np.float64]:
        return np.array(values, dtype=np.float64)

    # a fit over all sizes can miss the smallest one; an empty message takes no longer than it
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
        # a line that meets size 0 below time 0 is no latency
        latency_s=curve.latency_s if (curve.latency_s or 0.0) >= 0.0 else None,
    )


# --------------------------------------------------------------------------------------------------
# Writes a HardwareProfile as the four documented files, each with its sidecar.


def write_hardware(profile: HardwareProfile, out_dir: Path | str) -> list[Path]:
    """Write the documented files of a profile and their sidecars; return their paths.

    Bandwidths in GB/s, times in ms. What documented keys cannot express (other collectives,
    sizes that are not whole MiB) goes to the sidecar, in base units.
    """
    out = Path(out_dir)
    shape = (profile.num_nodes, profile.gpus_per_node)
    timed = {("allreduce", size): curve for size, curve in profile.sequence_curves.items()}
    expressible = {
        group: curve
        for group, curve in {**timed, **profile.curves}.items()
        if group[0] in ("allreduce", "all2all")
    }
    documents: list[tuple[DocumentKind, dict[str, float]]] = [
        ("allreduce", _allreduce_keys(profile)),
        (
            "p2p",
            {f"pp_size_{p}": v / GB for p, v in sorted(profile.p2p_bytes_per_s.items())},
        ),
        ("overlap", {"overlap_coe": profile.overlap_coefficient}),
    ]
    if expressible or profile.curves:
        documents.append(("sp_time", _sp_time_keys(expressible)))
    paths = []
    for kind, data in documents:
        path = out / hardware_file_name(kind, *shape)
        write_json(path, data)
        paths += [path, write_sidecar(path, hardware_sidecar(kind, profile))]
    return paths


def _allreduce_keys(profile: HardwareProfile) -> dict[str, float]:
    table = profile.allreduce_bytes_per_s
    world = profile.world_size
    result = {}
    # largest groups first, neighbours before strided ones, as in published files
    for size, consecutive in sorted(table, reverse=True):
        value = table[size, consecutive]
        if size == world and not consecutive and table.get((world, True)) == value:
            continue  # documented files leave the alias out
        # bytes/s -> GB/s of 1e9 bytes
        result[f"allreduce_size_{size}_consec_{int(consecutive)}"] = value / GB
    return result


def _sp_time_keys(curves: Mapping[tuple[str, int], Curve]) -> dict[str, float]:
    result = {}
    for operation, size in sorted(curves, key=lambda g: (g[0] != "allreduce", -g[1])):
        curve = curves[operation, size]
        for size_bytes, time_s in zip(curve.sizes_bytes, curve.times_s, strict=True):
            # what is not whole MiB has no documented key and is in the sidecar
            if size_bytes % MIB == 0:
                key = f"{operation}_size_{size}_{int(size_bytes) // MIB}MB_time"
                # s -> ms
                result[key] = float(time_s) / MS
    return result


# --------------------------------------------------------------------------------------------------
# Documented values beside measured times of the same groups: which of them prices what.
#
# Neither is refused: a person may edit a documented value to see what it changes, and files of two
# runs may lie in one folder. What differs is said in words.


_ROUNDING = 0.01
"""People round documented values; what differs by more has another origin."""
_CONFLICT = 0.10
"""Two runs may differ by this much before it is said."""


def reference_bytes(file: _Loaded) -> float | None:
    """Return the message size that the bandwidths of a document stand for, None if unknown."""
    # the newest run wrote the documented values
    for run in reversed(file.sidecar.runs if file.sidecar is not None else []):
        size = run.metadata.get("reference_bytes")
        if isinstance(size, int | float) and size > 0:
            return float(size)
    return None


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedCurves:
    """Which measured times price what, where documents hold values of the same groups."""

    curves: Mapping[tuple[str, int], Curve]
    strided_curves: Mapping[tuple[str, int], Curve]
    p2p_curves: Mapping[int, Curve]
    sequence_curves: Mapping[int, Curve]
    notes: tuple[str, ...]
    """A sentence for every document that differs from the times beside it."""


def priced_curves(
    files: Mapping[DocumentKind, _Loaded],
    allreduce_bytes_per_s: Mapping[tuple[int, bool], float],
    p2p_bytes_per_s: Mapping[int, float],
    documented_times: Mapping[tuple[str, int], Curve],
    world_size: int,
) -> PricedCurves:
    """Return the curves that price messages, and what the documents say against them.

    Documented values decide: bandwidths price all-reduces and transfers, `sp_time` what its keys
    name. A curve of a sidecar has latency, more sizes and spread, and stands in where it is of the
    same run and says the same; a documented value that differs was edited by a person. Times of an
    `sp_time` file that is not of the run of the bandwidths price the all-gathers and
    reduce-scatters of sequence parallelism, which they are documented for, and nothing else.

    documented_times : curves of the keys of the sp_time document.
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
        differences = [] if curve is None else _times(f"{key[0]}_size_{key[1]}", documented, curve)
        odd["sp_time"] += differences
        times[key] = documented if curve is None or differences else curve
    curves.update(times)

    sequence: dict[int, Curve] = {}
    for (size, consecutive), entry in allreduce_bytes_per_s.items():
        # one world group, stored under both
        if not consecutive and size == world_size:
            continue
        key, factor = ("allreduce", size), OPERATIONS["allreduce"].bus_factor(size)
        name = f"{key[0]}_size_{size}_consec_{int(consecutive)}"
        table = curves if consecutive else strided
        documented_for = times.get(key) if consecutive else None
        # of another run than the bandwidths: only what lies beside these can stand in for them
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
            differences = _bandwidth(
                f"pp_size_{stages}", entry, transfers[stages], factor, reference
            )
            odd["p2p"] += differences
            if differences:
                del transfers[stages]
    return PricedCurves(
        curves=curves,
        strided_curves=strided,
        p2p_curves=transfers,
        sequence_curves=sequence,
        notes=(
            *(_edited(files[kind].path, found) for kind, found in odd.items() if found),
            *([_conflict(bandwidths.path, files["sp_time"].path, conflicts)] if conflicts else []),
        ),
    )


def _one_run(first: _Loaded, second: _Loaded) -> bool:
    """Return whether two files say that one run measured, or one estimate made, both."""
    if first.sidecar is None or second.sidecar is None:
        return False
    named = [{run.id for run in f.sidecar.runs} - {None} for f in (first, second) if f.sidecar]
    if all(named):
        return bool(named[0] & named[1])
    # estimates have no runs: they name what they were made from
    return (first.sidecar.name, first.sidecar.source) == (
        second.sidecar.name,
        second.sidecar.source,
    )


_Difference = tuple[float, str, str]
"""How far a value is from the curve, as |log ratio|; the key with its value; what it should be."""


def _bandwidth(
    key: str,
    entry: float,
    curve: Curve,
    factor: float,
    reference: float | None,
    tolerance: float = _ROUNDING,
) -> list[_Difference]:
    # documented values are bus bandwidths: message times factor over time
    rates = factor * curve.sizes_bytes / curve.times_s
    below = np.flatnonzero(curve.sizes_bytes <= (reference or 0.0))
    if below.size:
        # of a size that was not measured the document holds the next smaller one
        expected = float(rates[below[-1]])
    else:
        # size unknown: a value that occurs anywhere on the curve agrees with it
        expected = float(np.clip(entry, rates.min(), rates.max()))
    return _difference(key, entry / GB, expected / GB, "GB/s", tolerance)


def _long(curve: Curve) -> Curve:
    """Return the part of a curve that documented bandwidths are averages of: 16 MiB and more."""
    kept = curve.sizes_bytes >= min(16.0 * MIB, float(curve.sizes_bytes[-1]))
    return Curve(sizes_bytes=curve.sizes_bytes[kept], times_s=curve.times_s[kept])


def _times(name: str, documented: Curve, curve: Curve) -> list[_Difference]:
    own = dict(zip(curve.sizes_bytes.tolist(), curve.times_s.tolist(), strict=True))
    found = []
    for size_bytes, time_s in zip(documented.sizes_bytes, documented.times_s, strict=True):
        expected = own.get(float(size_bytes))
        # a size that only one of them has cannot be compared
        if expected is not None:
            key = f"{name}_{int(size_bytes) // MIB}MB_time"
            found += _difference(key, float(time_s) / MS, expected / MS, "ms", _ROUNDING)
    return found


def _difference(
    key: str, value: float, expected: float, unit: str, tolerance: float
) -> list[_Difference]:
    if abs(value / expected - 1.0) <= tolerance:
        return []
    # log: half and double are equally far off
    distance = abs(float(np.log(value / expected)))
    return [(distance, f"{key} is {value:.4g} {unit}", f"{expected:.4g} {unit}")]


def _worst(differences: list[_Difference]) -> tuple[str, str, str]:
    """Return the largest difference as two texts, and how many more there are."""
    _, value, expected = max(differences, key=lambda item: item[0])
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return value, expected, more


def _edited(path: Path, differences: list[_Difference]) -> str:
    value, expected, more = _worst(differences)
    return (
        f"at odds: in {path.name} {value}, but the times in the sidecars say {expected}{more}; "
        "the documented values price these messages, without latency: measure again to have both "
        "of one run"
    )


def _conflict(bandwidths: Path, times: Path, differences: list[_Difference]) -> str:
    value, expected, more = _worst(differences)
    return (
        f"at odds: in {bandwidths.name} {value}, but {times.name} says {expected} for messages of "
        f"16 MiB and more{more}; bandwidths price the all-reduces of gradients and of tensor "
        "parallelism, these times its sequence parallelism"
    )


# --------------------------------------------------------------------------------------------------
# The four files together: one profile in base units, from files or folders.


BandwidthUnit = Literal["GB/s", "MiB/ms"]

MAKE_HARDWARE = "`torchrun -m profiler.hardware` makes this file"
# MiB/ms of the file are 2^20 / 1e-3 bytes/s
_FACTORS: dict[str, float] = {"GB/s": GB, "MiB/ms": MIB / MS}
_MAX_BYTES_PER_S = 1e14
"""A collective faster than this (100,000 GB/s) was timed in another unit."""

_Document = TypeVar("_Document", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """One validated file with its sidecar and where it came from."""

    kind: DocumentKind
    path: Path
    sidecar: Sidecar | None
    curves: SidecarCurves
    sources: tuple[Source, ...]

    @property
    def notes(self) -> tuple[str, ...]:
        """What is odd about the file, in words."""
        return (*self.sources[0].notes, *self.curves.notes)


def read_hardware_dir(
    path: Path | str,
    *,
    num_nodes: int,
    gpus_per_node: int,
    bandwidth_unit: BandwidthUnit | None = None,
) -> HardwareProfile:
    """Return the hardware profile in one directory; the sp_time file may be absent.

    Errors as `read_hardware`.
    """
    path = Path(path)
    sp_time = path / hardware_file_name("sp_time", num_nodes, gpus_per_node)
    return read_hardware(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        allreduce=path,
        p2p=path,
        overlap=path,
        sp_time=sp_time if sp_time.exists() else None,
        bandwidth_unit=bandwidth_unit,
    )


def read_hardware(
    *,
    num_nodes: int,
    gpus_per_node: int,
    allreduce: Path,
    p2p: Path,
    overlap: Path,
    sp_time: Path | None,
    bandwidth_unit: BandwidthUnit | None = None,
) -> HardwareProfile:
    """Return the hardware profile of the four documented files, in base units.

    Each path is a file, or a directory that holds the file under its documented name.
    Bandwidths are GB/s (1e9 bytes/s) unless a sidecar or `bandwidth_unit` says MiB/ms.

    Raises
    ------
    DocumentError: a file is missing or unusable, a group does not fit the cluster, a sidecar
        and `bandwidth_unit` or two sidecars disagree.
    """
    world = num_nodes * gpus_per_node
    shape = (num_nodes, gpus_per_node)

    ar_file, ar_doc = _load("allreduce", Path(allreduce), AllreduceDocument, *shape)
    factor = _bandwidth_factor(ar_file, bandwidth_unit)
    bandwidths, ar_notes = _allreduce(ar_file.path, ar_doc, world, *shape)

    p2p_file, p2p_doc = _load("p2p", Path(p2p), P2pDocument, *shape)
    p2p_factor = _bandwidth_factor(p2p_file, bandwidth_unit)
    links = {int(key[0]): v for key, v in _groups(p2p_file.path, p2p_doc, *shape).items()}
    if world > 1 and not links:  # a single GPU has none
        raise DocumentError(
            p2p_file.path,
            "this key is missing and is required",
            key=f"pp_size_{world}",
            remedy=MAKE_HARDWARE,
        )

    overlap_file, overlap_doc = _load("overlap", Path(overlap), OverlapDocument, *shape)
    coefficient = overlap_doc.overlap_coe
    overlap_notes: tuple[str, ...] = ()
    if coefficient < 1.0:  # both would run faster together than alone, which is noise
        overlap_notes = (f"overlap_coe {coefficient:g} is below 1 and was read as 1",)

    files = [
        _with_notes(ar_file, ar_notes),
        p2p_file,
        _with_notes(overlap_file, overlap_notes),
    ]
    documented: dict[tuple[str, int], Curve] = {}
    if sp_time is not None:
        sp_file, sp_doc = _load("sp_time", Path(sp_time), SpTimeDocument, *shape)
        documented = _curves(sp_file.path, sp_doc, *shape)
        files.append(sp_file)
    bytes_per_s = {key: value * factor for key, value in bandwidths.items()}
    transfers_per_s = {key: value * p2p_factor for key, value in links.items()}
    priced = priced_curves(
        {file.kind: file for file in files}, bytes_per_s, transfers_per_s, documented, world
    )
    sidecars = [file.sidecar for file in files if file.sidecar is not None]
    names = [s.name for s in sidecars if s.name is not None]
    return HardwareProfile(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        allreduce_bytes_per_s=bytes_per_s,
        p2p_bytes_per_s=transfers_per_s,
        overlap_coefficient=max(1.0, coefficient),
        curves=priced.curves,
        strided_curves=priced.strided_curves,
        p2p_curves=priced.p2p_curves,
        sequence_curves=priced.sequence_curves,
        memory_bytes=_agreed(files, "memory_bytes"),
        memory_bytes_per_s=_agreed(files, "memory_bytes_per_s"),
        name=names[0] if names else "measured",
        # one estimated file makes an estimate of the whole
        estimated=any(s.estimated for s in sidecars),
        synthetic=any(s.synthetic for s in sidecars),
        sources=tuple(source for file in files for source in file.sources),
        notes=(
            *(f"{file.path.name}: {note}" for file in files for note in file.notes),
            *priced.notes,
        ),
    )


def _load(
    kind: DocumentKind, path: Path, model: type[_Document], num_nodes: int, gpus_per_node: int
) -> tuple[_Loaded, _Document]:
    name = hardware_file_name(kind, num_nodes, gpus_per_node)
    if path.is_dir():
        stem = name.split("_", 1)[0]
        others = sorted(p.name for p in path.glob(f"{stem}_*per_node.json"))
        path = path / name
        if not path.exists():
            near = f" (present: {', '.join(others[:4])})" if others else ""
            raise DocumentError(path, f"this file does not exist{near}", remedy=MAKE_HARDWARE)
    loaded = load_with_sidecar(kind, path, model, remedy=f"{MAKE_HARDWARE}, documented name {name}")
    curves, sources = SidecarCurves(), loaded.sources
    if loaded.sidecar is not None:
        curves = sidecar_curves(path, loaded.sidecar, num_nodes * gpus_per_node)
        first, second = sources
        sources = (first, replace(second, notes=(*second.notes, *curves.notes)))
    file = _Loaded(kind=kind, path=path, sidecar=loaded.sidecar, curves=curves, sources=sources)
    return file, loaded.document


def _with_notes(file: _Loaded, notes: tuple[str, ...]) -> _Loaded:
    first, *rest = file.sources
    return replace(file, sources=(replace(first, notes=notes), *rest))


def _bandwidth_factor(file: _Loaded, unit: BandwidthUnit | None) -> float:
    recorded = file.sidecar.unit if file.sidecar is not None else None
    if unit is not None and recorded is not None and unit != recorded:
        raise DocumentError(
            sidecar_path(file.path),
            f"the value is {recorded!r}, but --bandwidth-unit says {unit!r}",
            key="unit",
            remedy="leave the option out: the file says its unit",
        )
    # documented files are in GB/s unless something says otherwise
    return _FACTORS[unit or recorded or "GB/s"]


def _groups(
    path: Path, document: PatternDocument, num_nodes: int, gpus_per_node: int
) -> dict[tuple[int | str, ...], float]:
    """Return values by what the key's pattern captures: the group size first."""
    world = num_nodes * gpus_per_node
    result: dict[tuple[int | str, ...], float] = {}
    for key, value in document.root.items():
        # validated before, so that every key has its rule
        match = next(m for r in document.rules if (m := r.regex.fullmatch(key)))
        found = match.groupdict()
        size = int(found.pop("size"))
        if not 2 <= size <= world:
            raise DocumentError(
                path,
                f"a group of {size} does not exist on {num_nodes} nodes x {gpus_per_node} GPUs "
                f"= {world}, expected 2 to {world}",
                key=key,
                remedy="check the number of nodes and of GPUs per node",
            )
        result[(size, *found.values())] = value
    return result


def _allreduce(
    path: Path, document: AllreduceDocument, world: int, num_nodes: int, gpus_per_node: int
) -> tuple[dict[tuple[int, bool], float], tuple[str, ...]]:
    values: dict[tuple[int, bool], float] = {}
    unnamed = []
    for (size, *consec), value in _groups(path, document, num_nodes, gpus_per_node).items():
        if not consec:
            unnamed.append((int(size), value))
        else:
            values[int(size), consec[0] == "1"] = value
    for size, value in unnamed:  # after all named keys: a contradiction shows in any order
        if values.get((size, True), value) != value:
            raise DocumentError(
                path,
                f"the value is {value:g}, but the same group has {values[size, True]:g} under "
                f"'allreduce_size_{size}_consec_1'",
                key=f"allreduce_size_{size}",
                remedy="remove one of them",
            )
        values[size, True] = value
    # a single GPU has no groups
    if world > 1:
        if (world, True) not in values and (world, False) not in values:
            raise DocumentError(
                path,
                f"this key is missing and is required for {num_nodes} nodes x {gpus_per_node} GPUs",
                key=f"allreduce_size_{world}_consec_1",
                remedy=MAKE_HARDWARE,
            )
        # one world group: strided or not, it is the same ranks
        values.setdefault((world, True), values.get((world, False), 0.0))
        values.setdefault((world, False), values[world, True])
    notes = ("keys without consec were read as groups of neighbouring ranks",) if unnamed else ()
    return values, notes


def _curves(
    path: Path, document: SpTimeDocument, num_nodes: int, gpus_per_node: int
) -> dict[tuple[str, int], Curve]:
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for key in document.root:
        match = next(m for r in document.rules if (m := r.regex.fullmatch(key)))
        # the MB of these keys are MiB, their times ms
        size_bytes = float(int(match["mib"]) * MIB)
        time_s = document.root[key] * MS
        # seconds written for ms look a thousand times too fast
        if size_bytes / time_s > _MAX_BYTES_PER_S:
            raise DocumentError(
                path,
                f"the value is {document.root[key]:g}, expected the time of one operation in ms "
                f"(it means {size_bytes / time_s / GB:.3g} GB/s: looks like seconds)",
                key=key,
            )
        group = match["operation"], int(match["size"])
        points.setdefault(group, []).append((size_bytes, time_s))
    # called for what it refuses: groups that do not fit the cluster
    _groups(path, document, num_nodes, gpus_per_node)
    return {
        group: Curve(
            # curves are in order of size, keys in any
            sizes_bytes=np.array([size for size, _ in sorted(pairs)], dtype=np.float64),
            times_s=np.array([time for _, time in sorted(pairs)], dtype=np.float64),
        )
        for group, pairs in points.items()
    }


def _agreed(files: list[_Loaded], field: str) -> float | None:
    """Return what the sidecars say of one device, or raise if two of them differ."""
    found: dict[float, Path] = {}
    for file in files:
        value: float | None = getattr(file.sidecar, field, None)
        if value is not None:
            # the first file that says it is the one that is named
            found.setdefault(value, file.path)
    if len(found) > 1:
        (value, path), (other, other_path) = list(found.items())[:2]
        raise DocumentError(
            sidecar_path(other_path),
            f"the value is {other:g}, but {sidecar_path(path).name} says {value:g}",
            key=field,
            remedy="the files are of different devices",
        )
    return next(iter(found), None)

"""Reads and writes the documented hardware files: four files make one HardwareProfile.

All published spellings are read (Galvatron, PaddleNLP), the documented one is written. Units are
converted here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from pydantic import BaseModel

from autopar.documents import AllreduceDocument, OverlapDocument, P2pDocument, SpTimeDocument
from autopar.errors import DocumentError
from autopar.hardware import Curve, HardwareProfile
from autopar.jsonio import load_object, write_json
from autopar.measurements import CurveData
from autopar.patterns import PatternDocument, validate_document
from autopar.sidecar import (
    SIDECAR_VERSION,
    DocumentKind,
    Sidecar,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)
from autopar.sources import Source
from autopar.units import GB, MIB, MS

__all__ = [
    "MAKE_HARDWARE",
    "BandwidthUnit",
    "hardware_file_name",
    "read_hardware",
    "read_hardware_dir",
    "write_hardware",
]

BandwidthUnit = Literal["GB/s", "MiB/ms"]

MAKE_HARDWARE = "`torchrun -m profiler.hardware` makes this file"
_FACTORS: dict[str, float] = {"GB/s": GB, "MiB/ms": MIB / MS}
_MAX_BYTES_PER_S = 1e14
"""A collective faster than this (100,000 GB/s) was timed in another unit."""

_Document = TypeVar("_Document", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """One validated file with its sidecar and where it came from."""

    path: Path
    sidecar: Sidecar | None
    sources: tuple[Source, ...]


def hardware_file_name(kind: DocumentKind, num_nodes: int, gpus_per_node: int) -> str:
    """Return the documented name of a hardware file."""
    if kind == "overlap":
        return "overlap_coefficient.json"
    stem = {"allreduce": "allreduce_bandwidth", "p2p": "p2p_bandwidth", "sp_time": "sp_time"}[kind]
    return f"{stem}_{num_nodes}nodes_{gpus_per_node}gpus_per_node.json"


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
    if world > 1 and not links:
        raise DocumentError(
            p2p_file.path,
            "this key is missing and is required",
            key=f"pp_size_{world}",
            remedy=MAKE_HARDWARE,
        )

    overlap_file, overlap_doc = _load("overlap", Path(overlap), OverlapDocument, *shape)
    coefficient = overlap_doc.overlap_coe
    overlap_notes: tuple[str, ...] = ()
    if coefficient < 1.0:
        overlap_notes = (f"overlap_coe {coefficient:g} is below 1 and was read as 1",)

    files = [
        _with_notes(ar_file, ar_notes),
        p2p_file,
        _with_notes(overlap_file, overlap_notes),
    ]
    curves: dict[tuple[str, int], Curve] = {}
    if sp_time is not None:
        sp_file, sp_doc = _load("sp_time", Path(sp_time), SpTimeDocument, *shape)
        curves.update(_curves(sp_file.path, sp_doc, *shape))
        files.append(sp_file)
    for file in files:
        curves.update(_sidecar_curves(file, world))

    sidecars = [file.sidecar for file in files if file.sidecar is not None]
    names = [s.name for s in sidecars if s.name is not None]
    return HardwareProfile(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        allreduce_bytes_per_s={key: value * factor for key, value in bandwidths.items()},
        p2p_bytes_per_s={key: value * p2p_factor for key, value in links.items()},
        overlap_coefficient=max(1.0, coefficient),
        curves=curves,
        memory_bytes=_agreed(files, "memory_bytes"),
        memory_bytes_per_s=_agreed(files, "memory_bytes_per_s"),
        name=names[0] if names else "measured",
        estimated=any(s.estimated for s in sidecars),
        sources=tuple(source for file in files for source in file.sources),
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
    loaded = load_object(path, remedy=f"{MAKE_HARDWARE}, documented name {name}")
    document = validate_document(model, path, loaded.data)
    sidecar = read_sidecar(path, kind)
    estimated = sidecar is not None and sidecar.estimated
    sources = [Source(role=kind, path=str(path), sha256=loaded.sha256, estimated=estimated)]
    if sidecar is not None:
        meta = load_object(sidecar_path(path))
        sources.append(
            Source(
                role=f"{kind} sidecar",
                path=str(meta.path),
                sha256=meta.sha256,
                estimated=estimated,
                notes=(sidecar.source,),
            )
        )
    return _Loaded(path=path, sidecar=sidecar, sources=tuple(sources)), document


def _with_notes(file: _Loaded, notes: tuple[str, ...]) -> _Loaded:
    first, *rest = file.sources
    noted = Source(
        role=first.role,
        path=first.path,
        sha256=first.sha256,
        estimated=first.estimated,
        notes=notes,
    )
    return _Loaded(path=file.path, sidecar=file.sidecar, sources=(noted, *rest))


def _bandwidth_factor(file: _Loaded, unit: BandwidthUnit | None) -> float:
    recorded = file.sidecar.unit if file.sidecar is not None else None
    if unit is not None and recorded is not None and unit != recorded:
        raise DocumentError(
            sidecar_path(file.path),
            f"the value is {recorded!r}, but --bandwidth-unit says {unit!r}",
            key="unit",
            remedy="leave the option out: the file says its unit",
        )
    return _FACTORS[unit or recorded or "GB/s"]


def _groups(
    path: Path, document: PatternDocument, num_nodes: int, gpus_per_node: int
) -> dict[tuple[int | str, ...], float]:
    """Return values by what the key's pattern captures: the group size first."""
    world = num_nodes * gpus_per_node
    result: dict[tuple[int | str, ...], float] = {}
    for key, value in document.root.items():
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
    for size, value in unnamed:
        if values.get((size, True), value) != value:
            raise DocumentError(
                path,
                f"the value is {value:g}, but the same group has {values[size, True]:g} under "
                f"'allreduce_size_{size}_consec_1'",
                key=f"allreduce_size_{size}",
                remedy="remove one of them",
            )
        values[size, True] = value
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
        size_bytes = float(int(match["mib"]) * MIB)
        time_s = document.root[key] * MS
        if size_bytes / time_s > _MAX_BYTES_PER_S:
            raise DocumentError(
                path,
                f"the value is {document.root[key]:g}, expected the time of one operation in ms "
                f"(it means {size_bytes / time_s / GB:.3g} GB/s: looks like seconds)",
                key=key,
            )
        group = match["operation"], int(match["size"])
        points.setdefault(group, []).append((size_bytes, time_s))
    _groups(path, document, num_nodes, gpus_per_node)
    return {
        group: Curve(
            sizes_bytes=np.array([size for size, _ in sorted(pairs)], dtype=np.float64),
            times_s=np.array([time for _, time in sorted(pairs)], dtype=np.float64),
        )
        for group, pairs in points.items()
    }


def _sidecar_curves(file: _Loaded, world: int) -> dict[tuple[str, int], Curve]:
    result: dict[tuple[str, int], Curve] = {}
    for curve in file.sidecar.curves if file.sidecar is not None else ():
        if curve.group_size > world:
            raise DocumentError(
                sidecar_path(file.path),
                f"a group of {curve.group_size} does not exist on {world} GPUs",
                key="curves",
                remedy="check the number of nodes and of GPUs per node",
            )
        result[curve.operation, curve.group_size] = Curve(
            sizes_bytes=np.array(curve.sizes_bytes, dtype=np.float64),
            times_s=np.array(curve.times_s, dtype=np.float64),
        )
    return result


def _agreed(files: list[_Loaded], field: str) -> float | None:
    """Return what the sidecars say of one device, or raise if two of them differ."""
    found: dict[float, Path] = {}
    for file in files:
        value: float | None = getattr(file.sidecar, field, None)
        if value is not None:
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


def write_hardware(profile: HardwareProfile, out_dir: Path | str) -> list[Path]:
    """Write the documented files of a profile and their sidecars; return their paths.

    Bandwidths in GB/s, times in ms. What documented keys cannot express (other collectives,
    sizes that are not whole MiB) goes to the sidecar, in base units.
    """
    out = Path(out_dir)
    shape = (profile.num_nodes, profile.gpus_per_node)
    expressible = {
        group: curve
        for group, curve in profile.curves.items()
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
    if profile.curves:
        documents.append(("sp_time", _sp_time_keys(expressible)))
    paths = []
    for kind, data in documents:
        path = out / hardware_file_name(kind, *shape)
        write_json(path, data)
        paths += [path, write_sidecar(path, _hardware_sidecar(kind, profile))]
    return paths


def _allreduce_keys(profile: HardwareProfile) -> dict[str, float]:
    table = profile.allreduce_bytes_per_s
    world = profile.world_size
    result = {}
    for size, consecutive in sorted(table, reverse=True):
        value = table[size, consecutive]
        if size == world and not consecutive and table.get((world, True)) == value:
            continue  # documented files leave the alias out
        result[f"allreduce_size_{size}_consec_{int(consecutive)}"] = value / GB
    return result


def _sp_time_keys(curves: Mapping[tuple[str, int], Curve]) -> dict[str, float]:
    result = {}
    for operation, size in sorted(curves, key=lambda g: (g[0] != "allreduce", -g[1])):
        curve = curves[operation, size]
        for size_bytes, time_s in zip(curve.sizes_bytes, curve.times_s, strict=True):
            if size_bytes % MIB == 0:
                key = f"{operation}_size_{size}_{int(size_bytes) // MIB}MB_time"
                result[key] = float(time_s) / MS
    return result


def _hardware_sidecar(kind: DocumentKind, profile: HardwareProfile) -> Sidecar:
    unit = {"allreduce": "GB/s", "p2p": "GB/s", "overlap": "1", "sp_time": "ms"}[kind]
    curves = [
        CurveData(
            operation=operation,
            group_size=size,
            sizes_bytes=[float(v) for v in curve.sizes_bytes],
            times_s=[float(v) for v in curve.times_s],
        )
        for (operation, size), curve in sorted(profile.curves.items())
        if operation not in ("allreduce", "all2all") or np.any(curve.sizes_bytes % MIB)
    ]
    return Sidecar(
        version=SIDECAR_VERSION,
        document=kind,
        unit=unit,
        source="estimated from datasheets" if profile.estimated else profile.name,
        estimated=profile.estimated,
        name=profile.name,
        memory_bytes=profile.memory_bytes,
        memory_bytes_per_s=profile.memory_bytes_per_s,
        curves=curves if kind == "sp_time" else [],
    )

"""Reads the documented hardware files: four files make one HardwareProfile.

All published spellings are read (Galvatron, PaddleNLP), the documented one is written. Units are
converted here and in `hardware_write`, and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from pydantic import BaseModel

from autopar.documents import AllreduceDocument, OverlapDocument, P2pDocument, SpTimeDocument
from autopar.errors import DocumentError
from autopar.hardware import Curve, HardwareProfile
from autopar.hardware_checks import at_odds, reference_bytes
from autopar.hardware_names import hardware_file_name, hardware_shapes, shape_of_name
from autopar.hardware_sidecars import SidecarCurves, sidecar_curves
from autopar.hardware_write import write_hardware
from autopar.jsonio import load_object
from autopar.patterns import PatternDocument, validate_document
from autopar.sidecar import DocumentKind, Sidecar, read_sidecar, sidecar_path
from autopar.sources import Source
from autopar.units import GB, MIB, MS

__all__ = [
    "MAKE_HARDWARE",
    "BandwidthUnit",
    "hardware_file_name",
    "hardware_shapes",
    "read_hardware",
    "read_hardware_dir",
    "shape_of_name",
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
    documented: dict[tuple[str, int], Curve] = {}
    if sp_time is not None:
        sp_file, sp_doc = _load("sp_time", Path(sp_time), SpTimeDocument, *shape)
        documented = _curves(sp_file.path, sp_doc, *shape)
        files.append(sp_file)
    curves = dict(documented)
    strided: dict[tuple[str, int], Curve] = {}
    transfers: dict[int, Curve] = {}
    for file in files:
        curves.update(file.curves.curves)
        strided.update(file.curves.strided_curves)
        transfers.update(file.curves.p2p_curves)

    sidecars = [file.sidecar for file in files if file.sidecar is not None]
    names = [s.name for s in sidecars if s.name is not None]
    profile = HardwareProfile(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        allreduce_bytes_per_s={key: value * factor for key, value in bandwidths.items()},
        p2p_bytes_per_s={key: value * p2p_factor for key, value in links.items()},
        overlap_coefficient=max(1.0, coefficient),
        curves=curves,
        strided_curves=strided,
        p2p_curves=transfers,
        memory_bytes=_agreed(files, "memory_bytes"),
        memory_bytes_per_s=_agreed(files, "memory_bytes_per_s"),
        name=names[0] if names else "measured",
        estimated=any(s.estimated for s in sidecars),
        synthetic=any(s.synthetic for s in sidecars),
        sources=tuple(source for file in files for source in file.sources),
        notes=tuple(f"{file.path.name}: {note}" for file in files for note in file.notes),
    )
    odd = at_odds(
        profile,
        {file.kind: file.path for file in files},
        {file.kind: reference_bytes(file.sidecar) for file in files},
        documented,
    )
    return replace(profile, notes=(*profile.notes, *odd))


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
    first = Source(role=kind, path=str(path), sha256=loaded.sha256)
    if sidecar is None:
        lone = _Loaded(kind=kind, path=path, sidecar=None, curves=SidecarCurves(), sources=(first,))
        return lone, document
    first = replace(first, estimated=sidecar.estimated, synthetic=sidecar.synthetic)
    curves = sidecar_curves(path, sidecar, num_nodes * gpus_per_node)
    meta = load_object(sidecar_path(path))
    second = replace(
        first,
        role=f"{kind} sidecar",
        path=str(meta.path),
        sha256=meta.sha256,
        notes=(sidecar.source, *curves.notes),
    )
    both = _Loaded(kind=kind, path=path, sidecar=sidecar, curves=curves, sources=(first, second))
    return both, document


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

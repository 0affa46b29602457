"""Reader and writer of hardware files: four files in Galvatron's format form a HardwareProfile.

Keys in the spelling of Galvatron and of PaddleNLP are read; Galvatron's are written. Units of files
are converted to base units only here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from autopar.documents.checks import DOCUMENTS, INT, PatternDocument
from autopar.documents.curves import (
    HardwareFile,
    SidecarCurves,
    hardware_sidecar,
    priced_curves,
    sidecar_curves,
)
from autopar.documents.json import write_json
from autopar.documents.schemas import (
    OverlapDocument,
    allreduce_key,
    p2p_key,
    sp_time_key,
)
from autopar.documents.sidecar import (
    DocumentKind,
    documented_unit,
    load_with_sidecar,
    sidecar_path,
    write_sidecar,
)
from autopar.errors import DocumentError
from autopar.rates.measured import Curve, HardwareProfile
from autopar.records import Positive, Record, replace, typed
from autopar.sanity_checks import (
    CurvePoint,
    GrowthLaw,
    SuspiciousValue,
    contradictions,
    doubtful_bandwidths,
    doubtful_link,
    notes_of,
)
from autopar.units import GB, MIB, MS

# --------------------------------------------------------------------------------------------------
# Documented names of the hardware files, and the cluster shape in them.


_STEMS: dict[DocumentKind, str] = {
    "allreduce": "allreduce_bandwidth",
    "p2p": "p2p_bandwidth",
    "sp_time": "sp_time",
}
_OVERLAP_NAME = "overlap_coefficient.json"


def hardware_file_name(kind: DocumentKind, num_nodes: int, gpus_per_node: int) -> str:
    """Return the documented name of a hardware file."""
    if kind == "overlap":
        return _OVERLAP_NAME
    return f"{_STEMS[kind]}_{num_nodes}nodes_{gpus_per_node}gpus_per_node.json"


def kind_of_name(name: str) -> tuple[DocumentKind, tuple[int, int] | None] | None:
    """Return (kind, (nodes, GPUs per node)) of a documented name, None for any other name.

    The shape is None for the overlap file, whose name does not contain it.
    """
    if name == _OVERLAP_NAME:
        return "overlap", None
    for kind, stem in _STEMS.items():
        match = re.fullmatch(rf"{stem}_({INT})nodes_({INT})gpus_per_node\.json", name)
        if match:
            return kind, (int(match[1]), int(match[2]))
    return None


def hardware_shapes(folder: Path | str) -> tuple[tuple[int, int], ...]:
    """Return (nodes, GPUs per node) of every all-reduce file in a folder, sorted.

    Raises DocumentError: the folder cannot be read.
    """
    folder = Path(folder)
    try:
        found = [shape_of_name(path.name) for path in folder.iterdir()]
    except OSError as error:
        raise DocumentError(
            folder, f"this folder cannot be read ({error.strerror})", remedy="Check its permissions"
        ) from None
    return tuple(sorted(shape for shape in found if shape is not None))


def shape_of_name(name: str) -> tuple[int, int] | None:
    """Return (nodes, GPUs per node) of the documented name of an all-reduce file, else None."""
    found = kind_of_name(name)
    return found[1] if found is not None and found[0] == "allreduce" else None


# --------------------------------------------------------------------------------------------------
# Entries of a hardware file: key and value in base units.


BandwidthUnit = Literal["GB/s", "MiB/ms"]

# MiB/ms in a file are 2^20 / 1e-3 bytes/s.
UNIT_FACTORS: dict[str, float] = {"GB/s": float(GB), "MiB/ms": MIB / MS, "ms": MS, "1": 1.0}
"""Factor from a document's unit to the base unit."""
_MAX_BYTES_PER_S = 1e14
"""Limit of plausible bandwidths, 100,000 GB/s; above it a time is in a wrong unit."""
_BUSY = 2.5
"""Limit of plausible overlap coefficients; a larger one indicates a busy host."""


class HardwareEntry(Record):
    """Key of a hardware file with its value in base units."""

    key: str
    operation: str
    group_size: int
    """Ranks of the group; pipeline stages for p2p; 0 for the overlap coefficient."""
    consecutive: bool
    """True for groups of neighbouring ranks, False for strided groups."""
    size_bytes: int | None
    """Message size; None for bandwidths and for the overlap coefficient."""
    value: float
    """Bytes/s, seconds or a ratio."""
    written: float
    """Value in the file's unit, as written there."""


def hardware_entries(
    kind: DocumentKind, document: PatternDocument | OverlapDocument, unit: str
) -> tuple[HardwareEntry, ...]:
    """Return the entries of a validated document in the order of its keys.

    unit : unit of the file's values, a key of `UNIT_FACTORS`.
    """
    if isinstance(document, OverlapDocument):
        found = [("overlap_coe", document.overlap_coe, {"operation": "overlap", "size": "0"})]
    else:
        found = []
        for key, value in document.root.items():
            # Every key was validated before, so that it has a rule.
            match = next(m for rule in document.rules if (m := rule.regex.fullmatch(key)))
            found.append((key, value, match.groupdict()))
    return tuple(
        HardwareEntry(
            key=key,
            operation=says.get("operation") or kind,
            group_size=int(says["size"]),
            # Only keys of all-reduce bandwidths contain it; all others are for neighbours.
            consecutive=says.get("consec") != "0",
            # MB in keys means MiB.
            size_bytes=int(says["mib"]) * MIB if "mib" in says else None,
            # Documented units to bytes/s or seconds.
            value=value * UNIT_FACTORS[unit],
            written=value,
        )
        for key, value, says in found
    )


# --------------------------------------------------------------------------------------------------
# Writing a HardwareProfile as the four documented files, each with its sidecar.


def write_hardware(profile: HardwareProfile, out_dir: Path | str) -> list[Path]:
    """Write the hardware files of a profile and their sidecars, and return the paths.

    Bandwidths in the files are in GB/s, times in ms. Data that documented keys cannot express
    (other collectives, sizes that are not whole MiB) are written to the sidecars in base units.
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
            {p2p_key(p): v / GB for p, v in sorted(profile.p2p_bytes_per_s.items())},
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
    # Largest groups first, neighbours before strided ones, as in published files.
    for size, consecutive in sorted(table, reverse=True):
        value = table[size, consecutive]
        if size == world and not consecutive and table.get((world, True)) == value:
            continue  # documented files omit the alias
        # bytes/s -> GB/s of 1e9 bytes
        result[allreduce_key(size, consecutive)] = value / GB
    return result


def _sp_time_keys(curves: Mapping[tuple[str, int], Curve]) -> dict[str, float]:
    result = {}
    for operation, size in sorted(curves, key=lambda g: (g[0] != "allreduce", -g[1])):
        curve = curves[operation, size]
        for size_bytes, time_s in zip(curve.sizes_bytes, curve.times_s, strict=True):
            # Sizes that are not whole MiB have no documented key; they are in the sidecar.
            if size_bytes % MIB == 0:
                # s -> ms
                result[sp_time_key(operation, size, size_bytes)] = float(time_s) / MS
    return result


# --------------------------------------------------------------------------------------------------
# Reading of a profile from its four files.


MAKE_HARDWARE = "Create it with `torchrun -m profiler.hardware`"


@typed
def read_hardware_dir(
    path: Path | str,
    *,
    num_nodes: Positive,
    gpus_per_node: Positive,
    bandwidth_unit: BandwidthUnit | None = None,
) -> HardwareProfile:
    """Return the hardware profile in a directory; its sp_time file is optional.

    Raises DocumentError like `read_hardware`.
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
    """Return the hardware profile of four hardware files, in base units.

    Each path is a file, or a directory that contains the file under its documented name.

    sp_time : None if there is no such file.
    bandwidth_unit : unit of the bandwidths; None: that of the sidecars, by default GB/s (1e9
        bytes/s).

    Raises DocumentError: a file is missing or unusable, a group does not fit the cluster, a sidecar
    and `bandwidth_unit` or two sidecars disagree.
    """
    world = num_nodes * gpus_per_node
    shape = (num_nodes, gpus_per_node)
    paths: dict[DocumentKind, Path] = {"allreduce": allreduce, "p2p": p2p, "overlap": overlap}
    if sp_time is not None:
        paths["sp_time"] = sp_time
    read: dict[DocumentKind, HardwareFile] = {}
    entries: dict[DocumentKind, tuple[HardwareEntry, ...]] = {}
    for kind, path in paths.items():
        read[kind], document = _load(kind, Path(path), *shape)
        entries[kind] = hardware_entries(kind, document, _unit(read[kind], bandwidth_unit))
        if kind != "overlap":
            _check_groups(read[kind].path, entries[kind], *shape)
    bandwidths, ar_notes = _allreduce(read["allreduce"].path, entries["allreduce"], *shape)
    links = {entry.group_size: entry.value for entry in entries["p2p"]}
    # a single GPU has no links
    if world > 1 and not links:
        raise DocumentError(
            read["p2p"].path,
            "this key is missing and is required",
            key=p2p_key(world),
            remedy=MAKE_HARDWARE,
        )
    coefficient = entries["overlap"][0].value
    # Below 1, both would run faster together than alone, which is noise.
    low = (f"overlap_coe {coefficient:g} is below 1 and was read as 1",) * (coefficient < 1.0)
    read["allreduce"] = _with_notes(read["allreduce"], ar_notes)
    read["overlap"] = _with_notes(read["overlap"], low)
    files = list(read.values())
    memory_speed = _memory_bytes_per_s(read["allreduce"], read["p2p"])
    suspicious = [
        note
        for kind, file in read.items()
        for note in notes_of(file.path, hardware_doubts(kind, entries[kind], shape, memory_speed))
    ]
    documented = _curves(entries.get("sp_time", ()))
    priced = priced_curves(read, bandwidths, links, documented, world)
    sidecars = [file.sidecar for file in files if file.sidecar is not None]
    names = [s.name for s in sidecars if s.name is not None]
    return HardwareProfile(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        allreduce_bytes_per_s=bandwidths,
        p2p_bytes_per_s=links,
        overlap_coefficient=max(1.0, coefficient),
        hiding=None if (beside := read["overlap"].sidecar) is None else beside.hiding,
        curves=priced.curves,
        strided_curves=priced.strided_curves,
        p2p_curves=priced.p2p_curves,
        sequence_curves=priced.sequence_curves,
        domain_gpus=_domain_gpus(files, gpus_per_node),
        memory_bytes=_agreed(files, "memory_bytes"),
        memory_bytes_per_s=_agreed(files, "memory_bytes_per_s"),
        threads=None if (threads := _agreed(files, "threads")) is None else int(threads),
        name=names[0] if names else "measured",
        # One estimated file makes the whole profile an estimate.
        estimated=any(s.estimated for s in sidecars),
        synthetic=any(s.synthetic for s in sidecars),
        # Files of one software stack name it once.
        sources=tuple(dict.fromkeys(source for file in files for source in file.sources)),
        notes=(
            *(f"{file.path.name}: {note}" for file in files for note in file.notes),
            *priced.notes,
            *suspicious,
        ),
    )


def _load(
    kind: DocumentKind, path: Path, num_nodes: int, gpus_per_node: int
) -> tuple[HardwareFile, PatternDocument | OverlapDocument]:
    name = hardware_file_name(kind, num_nodes, gpus_per_node)
    if path.is_dir():
        stem = name.split("_", 1)[0]
        others = sorted(p.name for p in path.glob(f"{stem}_*per_node.json"))
        path = path / name
        if not path.exists():
            near = f" (present: {', '.join(others)})" if others else ""
            raise DocumentError(path, f"this file does not exist{near}", remedy=MAKE_HARDWARE)
    remedy = f"{MAKE_HARDWARE} (documented name {name})"
    loaded = load_with_sidecar(kind, path, DOCUMENTS[kind], remedy=remedy)
    curves, sources = SidecarCurves(), loaded.sources
    if loaded.sidecar is not None:
        curves = sidecar_curves(path, loaded.sidecar, num_nodes * gpus_per_node)
        first, second, *named = sources
        sources = (first, replace(second, notes=(*second.notes, *curves.notes)), *named)
    file = HardwareFile(
        kind=kind, path=path, sidecar=loaded.sidecar, curves=curves, sources=sources
    )
    return file, loaded.document


def _with_notes(file: HardwareFile, notes: tuple[str, ...]) -> HardwareFile:
    first, *rest = file.sources
    return replace(file, sources=(replace(first, notes=notes), *rest))


def _unit(file: HardwareFile, unit: BandwidthUnit | None) -> str:
    """Return the unit of a file's values.

    unit : value of --bandwidth-unit; raises DocumentError if the sidecar contradicts it.
    """
    if file.kind not in ("allreduce", "p2p"):
        return documented_unit(file.kind)
    recorded = file.sidecar.unit if file.sidecar is not None else None
    if unit is not None and recorded is not None and unit != recorded:
        raise DocumentError(
            sidecar_path(file.path),
            f"the unit in the file is {recorded!r}, but --bandwidth-unit is {unit!r}",
            key="unit",
            remedy="Remove --bandwidth-unit",
        )
    return unit or recorded or documented_unit(file.kind)


def _check_groups(
    path: Path, entries: Iterable[HardwareEntry], num_nodes: int, gpus_per_node: int
) -> None:
    """Raise DocumentError for a group of fewer than two ranks or larger than the cluster."""
    world = num_nodes * gpus_per_node
    for entry in entries:
        if not 2 <= entry.group_size <= world:
            raise DocumentError(
                path,
                f"a group of {entry.group_size} GPUs is not possible on "
                f"{num_nodes} nodes x {gpus_per_node} GPUs = {world}, expected 2 "
                f"to {world}",
                key=entry.key,
                remedy="Check the number of nodes and of GPUs per node",
            )


def _allreduce(
    path: Path, entries: Sequence[HardwareEntry], num_nodes: int, gpus_per_node: int
) -> tuple[dict[tuple[int, bool], float], tuple[str, ...]]:
    """Return bandwidths in bytes/s by (group size, consecutive), and notes on PaddleNLP's keys.

    Raises DocumentError for contradicting keys or if the group of all ranks is missing.
    """
    unnamed = [entry for entry in entries if "_consec_" not in entry.key]
    named = [entry for entry in entries if "_consec_" in entry.key]
    values = {(entry.group_size, entry.consecutive): entry for entry in named}
    # After all named keys, so that a contradiction is found in any order of keys.
    for entry in unnamed:
        same = values.setdefault((entry.group_size, True), entry)
        if same.written != entry.written:
            raise DocumentError(
                path,
                f"the value is {entry.written:g}, but {same.key!r} of the same "
                f"group is {same.written:g}",
                key=entry.key,
                remedy="Remove one of them",
            )
    world = num_nodes * gpus_per_node
    # a single GPU has no groups
    if world > 1:
        # There is one world group: strided or not, it consists of all ranks.
        one = values.get((world, True)) or values.get((world, False))
        if one is None:
            raise DocumentError(
                path,
                f"this key is missing and is required for {num_nodes} nodes x {gpus_per_node} GPUs",
                key=allreduce_key(world, True),
                remedy=MAKE_HARDWARE,
            )
        values.setdefault((world, True), one)
        values.setdefault((world, False), one)
    notes = ("keys without consec were read as groups of neighbouring ranks",) if unnamed else ()
    return {group: entry.value for group, entry in values.items()}, notes


def _curves(entries: Sequence[HardwareEntry]) -> dict[tuple[str, int], Curve]:
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for entry in entries:
        group = entry.operation, entry.group_size
        points.setdefault(group, []).append((float(entry.size_bytes or 0), entry.value))
    return {
        group: Curve(
            # Curves are in order of size, keys in any order.
            sizes_bytes=np.array([size for size, _ in sorted(pairs)], dtype=np.float64),
            times_s=np.array([time for _, time in sorted(pairs)], dtype=np.float64),
        )
        for group, pairs in points.items()
    }


_BY_SIZE = GrowthLaw(least=0.0, most=1.0, slack=2.0)
"""Law of time over message size: a larger message takes no less time, and at most proportionally
more. The slack allows for changes of the algorithm with the size; measured times deviate by a
factor of 1.1."""


def hardware_doubts(
    kind: DocumentKind,
    entries: Sequence[HardwareEntry],
    shape: tuple[int, int],
    memory_bytes_per_s: float | None = None,
    *,
    unit: str = "",
) -> Iterator[SuspiciousValue]:
    """Yield implausible values of a hardware file and values that contradict each other.

    shape : (nodes, GPUs per node).
    memory_bytes_per_s : memory bandwidth of a device; None if unknown.
    unit : unit of bandwidths in messages.
    """
    if kind == "overlap":
        yield from _coefficient_doubts(entries)
    elif kind == "sp_time":
        yield from _time_doubts(entries)
    else:
        yield from _bandwidth_doubts(entries, shape, memory_bytes_per_s, unit)


def _coefficient_doubts(entries: Sequence[HardwareEntry]) -> Iterator[SuspiciousValue]:
    for entry in entries:
        if entry.value > _BUSY:
            yield SuspiciousValue(
                key=entry.key,
                problem=f"{entry.written:.4g}; usual are 1.1 to 1.3",
                remedy="The hosts may have been busy: measure it again",
            )


def _bandwidth_doubts(
    entries: Sequence[HardwareEntry],
    shape: tuple[int, int],
    memory_bytes_per_s: float | None,
    unit: str,
) -> Iterator[SuspiciousValue]:
    """Yield bandwidths that exceed those of links or memory, or contradict other group sizes."""
    num_nodes, gpus_per_node = shape
    families: dict[tuple[bool, bool], list[CurvePoint]] = {}
    for entry in entries:
        # Strided groups have members on every node, neighbours only where a node is too small.
        inside = num_nodes == 1 or (
            entry.operation == "allreduce"
            and entry.consecutive
            and entry.group_size <= gpus_per_node
        )
        cell = CurvePoint(
            key=entry.key,
            x=float(entry.group_size),
            y=entry.value,
            written=entry.written,
            unit=unit,
        )
        families.setdefault((inside, entry.consecutive), []).append(cell)
        doubt = doubtful_link(cell, memory_bytes_per_s)
        if doubt is not None:
            yield doubt
    for (inside, consecutive), cells in families.items():
        yield from doubtful_bandwidths(cells, pairs_may_be_faster=inside and consecutive)


def _time_doubts(entries: Sequence[HardwareEntry]) -> Iterator[SuspiciousValue]:
    """Yield collective times in a wrong unit, and times that contradict other message sizes."""
    curves: dict[tuple[str, int], list[CurvePoint]] = {}
    for entry in entries:
        rate = (entry.size_bytes or 0) / entry.value
        # Seconds written instead of ms look a thousand times too fast.
        if rate > _MAX_BYTES_PER_S:
            yield SuspiciousValue(
                key=entry.key,
                problem=(
                    f"{entry.written:g}, expected the time of one operation in ms "
                    f"(it means {rate / GB:.3g} GB/s, probably in seconds)"
                ),
                remedy="Write it in ms",
                impossible=True,
                factor=math.inf,
            )
            continue
        cell = CurvePoint(
            key=entry.key,
            x=float(entry.size_bytes or 1),
            y=entry.value,
            written=entry.written,
            unit="ms",
        )
        curves.setdefault((entry.operation, entry.group_size), []).append(cell)
    for cells in curves.values():
        yield from contradictions(cells, _BY_SIZE)


def _memory_bytes_per_s(*files: HardwareFile) -> float | None:
    known = [f.sidecar.memory_bytes_per_s for f in files if f.sidecar is not None]
    return next((value for value in known if value is not None), None)


def _domain_gpus(files: list[HardwareFile], gpus_per_node: int) -> int | None:
    """Return the number of GPUs of a rack, None if unknown.

    Raises DocumentError if it is no multiple of the GPUs of a node.
    """
    found = _agreed(files, "domain_gpus")
    if found is None:
        return None
    if found % gpus_per_node:
        path = next(f.path for f in files if f.sidecar and f.sidecar.domain_gpus is not None)
        raise DocumentError(
            sidecar_path(path),
            f"the value is {found:g}, expected a multiple of the {gpus_per_node} GPUs of a node",
            key="domain_gpus",
        )
    return int(found)


def _agreed(files: list[HardwareFile], field: str) -> float | None:
    """Return the value of a field in the sidecars, None if no sidecar contains it.

    Raises DocumentError if two sidecars differ.
    """
    found: dict[float, Path] = {}
    for file in files:
        value: float | None = getattr(file.sidecar, field, None)
        if value is not None:
            # An error names the first file that contains the value.
            found.setdefault(value, file.path)
    if len(found) > 1:
        (value, path), (other, other_path) = list(found.items())[:2]
        raise DocumentError(
            sidecar_path(other_path),
            f"the value is {other:g}, but {value:g} in {sidecar_path(path).name}",
            key=field,
            remedy="Use files of the same device",
        )
    return next(iter(found), None)

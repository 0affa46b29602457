"""Reads the hardware files of a folder, or one file, leniently: what is wrong is kept as problems.

`profile-show` raises the first problem, `--validate` reports all of them. Units are those of the
files outside and base units inside, as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path

from autopar.errors import AutoparError, DocumentError, InputError
from autopar.hardware_files import BandwidthUnit
from autopar.jsonio import JsonDocument, load_object
from autopar.measurements import Measurement
from autopar.patterns import PatternDocument, document_errors, validate_document
from autopar.schemas import DOCUMENTS
from autopar.sidecar import DocumentKind, Run, Sidecar, read_sidecar, sidecar_path
from autopar.units import GB, MIB, MS, format_count
from profiler.hardware.routing import newest_measurements
from profiler.show.kinds import KINDS, FileKind, Shape, kind_of

__all__ = ["Entry", "Folder", "HardwareFile", "Profile", "load_folder"]

_FACTORS = {"GB/s": float(GB), "MiB/ms": MIB / MS, "ms": MS, "1": 1.0}
_DEFAULT_UNITS = {"allreduce": "GB/s", "p2p": "GB/s", "sp_time": "ms", "overlap": "1"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One documented key and what it means."""

    key: str
    operation: str
    group_size: int
    """Ranks of the group, pipeline stages for p2p, 0 for the overlap coefficient."""
    consecutive: bool
    size_bytes: int | None
    """Message size; None where the key names none: bandwidths and the coefficient."""
    value: float
    """Bytes/s, seconds or a ratio."""
    written: float
    """As it stands in the file, in the file's unit."""


@dataclass(frozen=True, kw_only=True)
class HardwareFile:
    """One documented file with its sidecar."""

    path: Path
    kind: DocumentKind
    shape: Shape | None
    unit: str
    entries: tuple[Entry, ...]
    sidecar: Sidecar | None
    problems: tuple[DocumentError, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Profile:
    """The files of one shape, the overlap coefficient among them."""

    shape: Shape | None
    """None when no file name says it."""
    files: tuple[HardwareFile, ...]
    runs: tuple[Run, ...]
    """Every run once, the newest last."""
    cells: Mapping[str, Measurement]
    """By key, in the order measured; of a cell measured twice the last that worked."""

    @property
    def world_size(self) -> int:
        """Number of devices; without a shape the largest group that is known."""
        if self.shape is not None:
            return self.shape[0] * self.shape[1]
        groups = [entry.group_size for file in self.files for entry in file.entries]
        return max([1, *groups, *(cell.group_size for cell in self.cells.values())])

    @property
    def sidecars(self) -> tuple[Sidecar, ...]:
        """The sidecars that are there, in the order of the files."""
        return tuple(file.sidecar for file in self.files if file.sidecar is not None)

    @property
    def metadata(self) -> Mapping[str, str | int | float | bool | None]:
        """What the newest run says of itself, empty where nothing was measured."""
        return next((run.metadata for run in reversed(self.runs) if run.metadata), {})

    @property
    def title(self) -> str:
        """Nodes and GPUs in words."""
        if self.shape is None:
            return "shape unknown"
        nodes, gpus = self.shape
        return f"{format_count(nodes, 'node')} x {format_count(gpus, 'GPU')}"

    def file(self, kind: DocumentKind) -> HardwareFile | None:
        """Return the file of this kind, None if there is none."""
        return next((file for file in self.files if file.kind == kind), None)


@dataclass(frozen=True, kw_only=True)
class Folder:
    """What a path holds: a profile per shape, and the files of models."""

    path: Path
    profiles: tuple[Profile, ...]
    model_files: tuple[Path, ...]

    @property
    def problems(self) -> tuple[DocumentError, ...]:
        """Everything that makes a file unusable, each once."""
        files = {file.path: file for profile in self.profiles for file in profile.files}
        return tuple(problem for file in files.values() for problem in file.problems)


def load_folder(path: Path, unit: BandwidthUnit | None = None) -> Folder:
    """Return what a folder or a file holds.

    Parameters
    ----------
    unit : of bandwidths in files without a sidecar; GB/s by default.

    Raises
    ------
    InputError: the path does not exist, or nothing in it is a profile document.
    """
    try:
        if not path.exists():
            raise InputError(f"{path}: this folder or file does not exist")
        paths = sorted(path.iterdir()) if path.is_dir() else [path]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from None
    known = [(found, *kind) for found in paths if (kind := kind_of(found)) is not None]
    if not path.is_dir() and not known:
        known = [_by_content(path)]
    if not known:
        raise InputError(
            f"{path}: no profile document is in this folder, such as "
            "allreduce_bandwidth_1nodes_8gpus_per_node.json; "
            "`torchrun -m profiler.hardware` makes them"
        )
    known.sort(key=lambda item: KINDS.index(item[1]))
    files = [
        _load(found, row.kind, shape, unit)
        for found, row, shape in known
        if row.family == "hardware"
    ]
    shapes: list[Shape | None] = [*sorted({file.shape for file in files if file.shape})]
    return Folder(
        path=path,
        profiles=tuple(
            _profile(shape, [file for file in files if file.shape in (shape, None)])
            for shape in shapes or [None] * bool(files)
        ),
        model_files=tuple(found for found, row, _ in known if row.family == "model"),
    )


def _by_content(path: Path) -> tuple[Path, FileKind, Shape | None]:
    """Return the kind of a file whose name says none: as its sidecar says, else by its keys."""
    if path.name.endswith(".meta.json"):
        document = path.with_name(path.name.removesuffix(".meta.json"))
        raise InputError(f"{path}: this is a sidecar; name the document beside it, {document.name}")
    data = load_object(path).data
    for row in KINDS:
        rules = getattr(DOCUMENTS[row.kind], "rules", ())
        keys = [key for key in data if not key.startswith("_")]
        if (row.kind == "overlap" and "overlap_coe" in data) or (
            keys and rules and all(any(r.regex.fullmatch(key) for r in rules) for key in keys)
        ):
            return path, row, None
    raise InputError(
        f"{path}: neither the name nor the keys are those of a profile document; "
        "a hardware file is named like allreduce_bandwidth_1nodes_8gpus_per_node.json"
    )


def _load(
    path: Path, kind: DocumentKind, shape: Shape | None, unit: BandwidthUnit | None
) -> HardwareFile:
    problems: list[DocumentError] = []
    sidecar: Sidecar | None = None
    try:
        sidecar = read_sidecar(path, kind)
    except DocumentError as error:
        problems += _all_of_sidecar(path) or [error]
    try:
        document: JsonDocument | None = load_object(path)
    except DocumentError as error:
        problems.append(error)
        document = None
    recorded = sidecar.unit if sidecar is not None else None
    chosen = recorded or _DEFAULT_UNITS[kind]
    if unit is not None and kind in ("allreduce", "p2p"):
        chosen = recorded or unit
    entries: tuple[Entry, ...] = ()
    if document is not None:
        found = document_errors(DOCUMENTS[kind], path, document.data)
        problems += found
        wrong = {error.key for error in found}
        values = {key: value for key, value in document.data.items() if key not in wrong}
        entries = _entries(kind, path, values, _FACTORS[chosen])
    return HardwareFile(
        path=path,
        kind=kind,
        shape=shape,
        unit=chosen,
        entries=entries,
        sidecar=sidecar,
        problems=tuple(problems),
    )


def _all_of_sidecar(path: Path) -> list[DocumentError]:
    try:
        data = load_object(sidecar_path(path)).data
    except AutoparError:
        return []
    return list(document_errors(Sidecar, sidecar_path(path), data))


def _entries(
    kind: DocumentKind, path: Path, values: Mapping[str, object], factor: float
) -> tuple[Entry, ...]:
    if kind == "overlap":
        coefficient = values.get("overlap_coe")
        if not isinstance(coefficient, int | float):
            return ()
        return (
            Entry(
                key="overlap_coe",
                operation="overlap",
                group_size=0,
                consecutive=True,
                size_bytes=None,
                value=float(coefficient),
                written=float(coefficient),
            ),
        )
    document = validate_document(DOCUMENTS[kind], path, dict(values))
    assert isinstance(document, PatternDocument)
    result = []
    for key, value in document.root.items():
        match = next(m for rule in document.rules if (m := rule.regex.fullmatch(key)))
        found = match.groupdict()
        result.append(
            Entry(
                key=key,
                operation=found.get("operation") or kind,
                group_size=int(found["size"]),
                consecutive=found.get("consec") != "0",
                size_bytes=int(found["mib"]) * MIB if "mib" in found else None,
                value=value * factor,
                written=value,
            )
        )
    return tuple(sorted(result, key=_order))


def _order(entry: Entry) -> tuple[str, int, bool, int]:
    return entry.operation, entry.group_size, not entry.consecutive, entry.size_bytes or 0


def _profile(shape: Shape | None, files: list[HardwareFile]) -> Profile:
    runs: dict[object, Run] = {}
    cells: dict[str, Measurement] = {}
    for file in files:
        of_file = file.sidecar.runs if file.sidecar is not None else []
        for run in of_file:
            runs[run.id or tuple(sorted(run.metadata.items(), key=itemgetter(0)))] = run
        for key, cell in newest_measurements(of_file).items():
            # the overlap file names no shape: what it holds of other clusters is not of this one
            whole_world = cell.operation.startswith("overlap_")
            if whole_world and shape is not None and cell.group_size != shape[0] * shape[1]:
                continue
            if key not in cells or cells[key].status != "ok":
                cells[key] = cell
    by_time = sorted(runs.values(), key=lambda run: str(run.metadata.get("time_utc", "")))
    return Profile(shape=shape, files=tuple(files), runs=tuple(by_time), cells=cells)

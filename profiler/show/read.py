"""Lenient reader of the hardware files of a folder, or of one file; errors are kept as problems.

`profile-show` raises the first problem, `--validate` reports all of them. Files contain their own
units; values in memory are in base units.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from functools import cached_property, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import asdict

from autopar.documents.checks import DOCUMENTS, document_errors
from autopar.documents.hardware import (
    BandwidthUnit,
    HardwareEntry,
    hardware_entries,
    kind_of_name,
)
from autopar.documents.json import (
    MOST_ERRORS,
    JsonDocument,
    load_object,
    read_record,
)
from autopar.documents.sidecar import (
    DocumentKind,
    Measurement,
    Run,
    Sidecar,
    documented_unit,
    read_sidecar,
    sidecar_path,
)
from autopar.errors import AutoparError, DocumentError, InputError
from autopar.rates.measured import OPERATIONS, bus_bytes_per_s
from autopar.records import Record
from autopar.sanity_checks import SuspiciousValue
from autopar.statistics import (
    Summary,
    latency_bandwidth_fit,
    relative_spread,
    summarize,
    warnings_of,
)
from autopar.units import format_count
from profiler.hardware.documents import newest_measurements
from profiler.hardware.options import cell_key

# --------------------------------------------------------------------------------------------------
# Kinds of file recognised by name, and the cluster shape in a name.


Shape = tuple[int, int]
"""Cluster shape: nodes, GPUs per node."""

_MODEL_FILE = r"(computation|memory)_profiling_.*\.json"
_ORDER: tuple[DocumentKind, ...] = (
    "allreduce",
    "p2p",
    "sp_time",
    "overlap",
    "computation",
    "memory",
)
"""Kinds of file in display order."""


def kind_of(path: Path) -> tuple[DocumentKind, Shape | None] | None:
    """Return the kind and shape of a file from its name, None for any other file."""
    if path.name.endswith(".meta.json"):
        return None
    model = re.fullmatch(_MODEL_FILE, path.name)
    if model:
        return ("computation" if model[1] == "computation" else "memory"), None
    return kind_of_name(path.name)


def is_of_model(kind: DocumentKind) -> bool:
    """Return True if a document describes a model, not hardware."""
    return kind in ("computation", "memory")


# --------------------------------------------------------------------------------------------------
# A finding of `--validate`: one sentence with file, key, value and remedy.


Severity = Literal["error", "warning"]


class Finding(Record):
    """One wrong (error) or suspicious (warning) value."""

    severity: Severity
    sentence: str
    """Message with file, key, value and remedy."""
    key: str | None = None


def finding(severity: Severity, path: Path, key: str | None, problem: str, remedy: str) -> Finding:
    """Return a finding in the format of errors about a file."""
    return error_finding(DocumentError(path, problem, key=key, remedy=remedy), severity)


def error_finding(error: DocumentError, severity: Severity = "error") -> Finding:
    """Return the finding of an error about a file."""
    return Finding(severity=severity, sentence=str(error), key=error.key)


def doubt_finding(path: Path, doubt: SuspiciousValue) -> Finding:
    """Return the finding of an unlikely value of a file."""
    severity: Severity = "error" if doubt.impossible or doubt.certain else "warning"
    return finding(severity, path, doubt.key, f"the value is {doubt.problem}", doubt.remedy)


# --------------------------------------------------------------------------------------------------
# Lenient reading: units, keys and curves, together with their problems.


class HardwareFile(Record):
    """One document with its sidecar."""

    path: Path
    kind: DocumentKind
    shape: Shape | None
    unit: str
    entries: tuple[HardwareEntry, ...]
    """Values in the order of operations, groups and sizes."""
    sidecar: Sidecar | None
    problems: tuple[DocumentError, ...]


class Profile(Record, eq=False):
    """Files of one cluster shape, including the overlap coefficient."""

    shape: Shape | None
    """Cluster shape; None if no file name contains it."""
    files: tuple[HardwareFile, ...]
    runs: tuple[Run, ...]
    """Runs without duplicates, newest last."""
    cells: Mapping[str, Measurement]
    """Cells by key, in measuring order; the last successful one if measured repeatedly."""

    @property
    def world_size(self) -> int:
        """Number of devices; the largest known group if the shape is unknown."""
        if self.shape is not None:
            return self.shape[0] * self.shape[1]
        # Without a shape, the largest group counts as the world.
        groups = [entry.group_size for file in self.files for entry in file.entries]
        return max([1, *groups, *(cell.group_size for cell in self.cells.values())])

    @property
    def sidecars(self) -> tuple[Sidecar, ...]:
        """Existing sidecars, in file order."""
        return tuple(file.sidecar for file in self.files if file.sidecar is not None)

    @property
    def metadata(self) -> Mapping[str, str | int | float | bool | None]:
        """Metadata of the newest run; empty if nothing was measured."""
        return next((run.metadata for run in reversed(self.runs) if run.metadata), {})

    @property
    def title(self) -> str:
        """Number of nodes and GPUs as text."""
        if self.shape is None:
            return "shape unknown"
        nodes, gpus = self.shape
        return f"{format_count(nodes, 'node')} x {format_count(gpus, 'GPU')}"

    def file(self, kind: DocumentKind) -> HardwareFile | None:
        """Return the file of this kind, None if there is none."""
        return next((file for file in self.files if file.kind == kind), None)


class Folder(Record):
    """Content of a path: one profile per shape, and model files."""

    path: Path
    profiles: tuple[Profile, ...]
    model_files: tuple[Path, ...]

    @property
    def problems(self) -> tuple[DocumentError, ...]:
        """All errors that make a file unusable, without duplicates."""
        # A file that belongs to several shapes has its problems once.
        files = {file.path: file for profile in self.profiles for file in profile.files}
        return tuple(problem for file in files.values() for problem in file.problems)


def load_folder(path: Path, unit: BandwidthUnit | None = None) -> Folder:
    """Return the content of a folder or file.

    unit : unit of bandwidths in files without a sidecar; None means GB/s.

    Raises InputError: the path does not exist or contains no profile document.
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
            f"{path}: no profile document in this folder, such as "
            "allreduce_bandwidth_1nodes_8gpus_per_node.json",
            remedy="Create one with `torchrun -m profiler.hardware`",
        )
    known.sort(key=lambda item: _ORDER.index(item[1]))
    files = [
        _load(found, kind, shape, unit) for found, kind, shape in known if not is_of_model(kind)
    ]
    shapes: list[Shape | None] = [*sorted({file.shape for file in files if file.shape})]
    return Folder(
        path=path,
        profiles=tuple(
            # A file without a shape in its name (overlap) belongs to every shape.
            _profile(shape, [file for file in files if file.shape in (shape, None)])
            for shape in shapes or [None] * bool(files)
        ),
        model_files=tuple(found for found, kind, _ in known if is_of_model(kind)),
    )


def _by_content(path: Path) -> tuple[Path, DocumentKind, Shape | None]:
    """Return the kind of a file with an unknown name, determined by its keys."""
    if path.name.endswith(".meta.json"):
        document = path.with_name(path.name.removesuffix(".meta.json"))
        raise InputError(f"{path}: this is a sidecar", remedy=f"Use its document, {document.name}")
    data = load_object(path).data
    for kind in _ORDER:
        rules = getattr(DOCUMENTS[kind], "rules", ())
        keys = [key for key in data if not key.startswith("_")]
        if (kind == "overlap" and "overlap_coe" in data) or (
            keys and rules and all(any(r.regex.fullmatch(key) for r in rules) for key in keys)
        ):
            return path, kind, None
    raise InputError(
        f"{path}: neither the name nor the keys match a profile document",
        remedy="Use a name such as allreduce_bandwidth_1nodes_8gpus_per_node.json",
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
    # The unit recorded in a sidecar takes precedence over the option.
    option = unit if kind in ("allreduce", "p2p") else None
    chosen = recorded or option or documented_unit(kind)
    entries: tuple[HardwareEntry, ...] = ()
    if document is not None:
        found = document_errors(DOCUMENTS[kind], path, document.data)
        problems += found
        wrong = {error.key for error in found}
        # Valid values are shown even next to invalid ones, unless the list of errors is truncated.
        values = {key: value for key, value in document.data.items() if key not in wrong}
        if len(found) <= MOST_ERRORS and (values or kind != "overlap"):
            whole = read_record(DOCUMENTS[kind], path, values)
            entries = tuple(sorted(hardware_entries(kind, whole, chosen), key=_order))
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


def _order(entry: HardwareEntry) -> tuple[str, int, bool, int]:
    return entry.operation, entry.group_size, not entry.consecutive, entry.size_bytes or 0


def _profile(shape: Shape | None, files: list[HardwareFile]) -> Profile:
    runs: dict[object, Run] = {}
    cells: dict[str, Measurement] = {}
    for file in files:
        of_file = file.sidecar.runs if file.sidecar is not None else []
        for run in of_file:
            # A run is in several sidecars.
            runs[run.id or tuple(sorted(run.metadata.items(), key=itemgetter(0)))] = run
        for key, cell in newest_measurements(of_file).items():
            # The overlap file has no shape in its name; skip its cells from other clusters.
            whole_world = cell.operation.startswith("overlap_")
            if whole_world and shape is not None and cell.group_size != shape[0] * shape[1]:
                continue
            if key not in cells or cells[key].status != "ok":
                cells[key] = cell
    by_time = sorted(runs.values(), key=lambda run: str(run.metadata.get("time_utc", "")))
    return Profile(shape=shape, files=tuple(files), runs=tuple(by_time), cells=cells)


def stamps(profile: Profile) -> list[str]:
    """Return labels for numbers that are not measurements of a real machine."""
    sidecars = profile.sidecars
    found = []
    if any(sidecar.estimated for sidecar in sidecars):
        found.append("ESTIMATED from datasheets, not measured")
    if any(sidecar.synthetic for sidecar in sidecars):
        found.append("SYNTHETIC: tests the code, not times of a machine")
    if any(cell.emulated for cell in profile.cells.values()):
        found.append("EMULATED in part: one device acted as both sides")
    return found


def stragglers(profile: Profile) -> dict[tuple[int, str], list[tuple[str, float]]]:
    """Return (cell, ratio to the median) of slow ranks, by rank and host."""
    found: dict[tuple[int, str], list[tuple[str, float]]] = {}
    for cell in profile.cells.values():
        for straggler in cell.stragglers:
            found.setdefault((straggler.rank, straggler.host), []).append(
                (cell.key, straggler.ratio)
            )
    return dict(sorted(found.items()))


def cell_warnings(cells: Iterable[Measurement]) -> list[tuple[str, str]]:
    """Return suspicious properties of the samples of cells: (key, sentence)."""
    found = []
    for cell in cells:
        for quantity, samples in cell.samples_s.items() if cell.status == "ok" else ():
            of = "" if quantity == "time" else f"{quantity.replace('_', ' ')}: "
            found += [(cell.key, of + text) for text in warnings_of(samples)] if samples else []
    return found


# --------------------------------------------------------------------------------------------------
# Times over message size, one series per operation and kind of group, from all sources.
#
# Raw samples take precedence over the curves of a sidecar, and those over documented times: the
# first source with a size gives the point.


SeriesKey = tuple[str, int, bool]
"""Operation, group size (pipeline stages for p2p), consecutive."""

_FIT_POINTS = 3
"""Minimum points of a fitted line."""


class Point(Record):
    """Time of one message size with its spread."""

    size_bytes: float
    time_s: float
    low_s: float | None = None
    """5th percentile of the samples, seconds; None if unknown."""
    high_s: float | None = None
    """95th percentile of the samples, seconds; None if unknown."""
    num_samples: int | None = None

    @property
    def spread(self) -> float:
        """Half the range from the 5th to the 95th percentile over the median; 0 if unknown."""
        if self.low_s is None or self.high_s is None:
            return 0.0
        return relative_spread(self.low_s, self.time_s, self.high_s)


class Series(Record, dict=True):
    """Points of one operation in groups of one size and kind, increasing in size."""

    operation: str
    group_size: int
    consecutive: bool
    points: tuple[Point, ...]
    scope: str | None
    """intra-node or inter-node; None if neither samples nor a shape determine it."""
    given_fit: tuple[float, float] | None = None
    """Latency in s and seconds per byte from a sidecar; None if it has none."""

    @property
    def key(self) -> SeriesKey:
        """Identity of the series in its profile."""
        return self.operation, self.group_size, self.consecutive

    @property
    def label(self) -> str:
        """Label of the group, for a legend."""
        if self.operation.startswith("p2p"):
            return f"{self.group_size} stages"
        return f"{self.group_size}" + ("" if self.consecutive else " strided")

    @cached_property
    def fit(self) -> tuple[float, float] | None:
        """Latency in s and seconds per byte: the sidecar's, or a fit; None below three points."""
        if self.given_fit is not None:
            return self.given_fit
        if len(self.points) < _FIT_POINTS:
            return None
        fit = latency_bandwidth_fit(
            [point.size_bytes for point in self.points], [point.time_s for point in self.points]
        )
        return fit.latency_s, fit.seconds_per_byte

    @property
    def slope_bytes_per_s(self) -> float | None:
        """Asymptotic bus bandwidth from the fit, bytes/s; None without a usable fit."""
        if self.fit is None or self.fit[1] <= 0.0:
            return None
        # Without latency, one byte takes the slope.
        return bus_bytes_per_s(self.operation, self.group_size, 1.0, self.fit[1])

    def bus_bytes_per_s(self, point: Point) -> float:
        """Return the bus bandwidth at a point, bytes/s."""
        return bus_bytes_per_s(self.operation, self.group_size, point.size_bytes, point.time_s)


@lru_cache(maxsize=8)
def series_of(profile: Profile) -> Mapping[SeriesKey, Series]:
    """Return all series of a profile, in the order of operations, groups and kinds."""
    points: dict[SeriesKey, dict[float, Point]] = {}
    scopes: dict[SeriesKey, str] = {}
    fits: dict[SeriesKey, tuple[float, float]] = {}

    def add(key: SeriesKey, point: Point) -> None:
        points.setdefault(key, {}).setdefault(point.size_bytes, point)

    for cell in profile.cells.values():
        summary = time_of(cell)
        if cell.operation in OPERATIONS and summary is not None and cell.size_bytes > 0:
            key = (cell.operation, cell.group_size, cell.consecutive)
            scopes[key] = cell.scope
            add(key, _measured(cell.size_bytes, summary))
    for sidecar in profile.sidecars:
        for curve in sidecar.curves:
            if curve.operation not in OPERATIONS:
                continue
            key = (curve.operation, curve.group_size, curve.consecutive)
            if curve.latency_s is not None and curve.seconds_per_byte is not None:
                fits[key] = (curve.latency_s, curve.seconds_per_byte)
            for index, (size, time) in enumerate(
                zip(curve.sizes_bytes, curve.times_s, strict=True)
            ):
                low = curve.low_s[index] if curve.low_s is not None else None
                high = curve.high_s[index] if curve.high_s is not None else None
                add(key, Point(size_bytes=size, time_s=time, low_s=low, high_s=high))
    for file in profile.files:
        for entry in file.entries:
            if entry.size_bytes is not None:
                key = (entry.operation, entry.group_size, entry.consecutive)
                add(key, Point(size_bytes=float(entry.size_bytes), time_s=entry.value))
    order = list(OPERATIONS)
    return {
        key: Series(
            operation=key[0],
            group_size=key[1],
            consecutive=key[2],
            points=tuple(points[key][size] for size in sorted(points[key])),
            scope=scopes.get(key) or scope_by_shape(profile, key),
            given_fit=fits.get(key),
        )
        for key in sorted(points, key=lambda key: (order.index(key[0]), key[1], not key[2]))
    }


def point_key(series: Series, point: Point) -> str:
    """Return the name of a curve's point, in the format of cell keys."""
    return cell_key(series.operation, series.group_size, series.consecutive, point.size_bytes)


def time_of(cell: Measurement) -> Summary | None:
    """Return the statistics of a collective's or transfer's samples, None if there are none."""
    samples = cell.samples_s.get("time")
    return summarize(samples) if samples and cell.status == "ok" else None


def _measured(size_bytes: float, summary: Summary) -> Point:
    return Point(
        size_bytes=size_bytes,
        time_s=summary.median_s,
        low_s=summary.low_s,
        high_s=summary.high_s,
        num_samples=summary.num_samples,
    )


def scope_by_shape(profile: Profile, key: SeriesKey) -> str | None:
    """Return the scope of groups from the shape, None if it is unknown."""
    if profile.shape is None:
        return None
    nodes, gpus = profile.shape
    operation, group_size, consecutive = key
    if nodes == 1:
        return "intra-node"
    if operation.startswith("p2p") or not consecutive:
        return "inter-node"  # ranks i and i + W/g; for stages, some pair crosses nodes
    # Consecutive ranks stay in a node if the group size divides its GPUs.
    return "intra-node" if gpus % group_size == 0 else "inter-node"


def reference_cell(profile: Profile, entry: HardwareEntry) -> Point | None:
    """Return the measured point for a bandwidth key of a hardware file, None if there is none.

    The newest run contains the message size; without it, the point with the nearest bandwidth is
    used.
    """
    if entry.size_bytes is not None or entry.operation not in OPERATIONS:
        return None
    found = [
        _measured(cell.size_bytes, summary)
        for cell in profile.cells.values()
        if (cell.operation, cell.group_size) == (entry.operation, entry.group_size)
        and (cell.consecutive == entry.consecutive or entry.group_size == profile.world_size)
        and cell.size_bytes > 0
        and (summary := time_of(cell)) is not None
    ]
    named = profile.metadata.get("reference_bytes")
    chosen = [point for point in found if point.size_bytes == named] or found

    def distance(point: Point) -> float:
        rate = bus_bytes_per_s(entry.operation, entry.group_size, point.size_bytes, point.time_s)
        # Distance of ratios, so that half and double are equally far.
        return abs(math.log(rate / entry.value))

    return min(chosen, key=distance, default=None)


def folder_document(folder: Folder) -> dict[str, Any]:
    """Return the content of a folder as a JSON object: seconds, bytes and bytes per second."""
    return {
        "profiles": [_profile_document(profile) for profile in folder.profiles],
        "model_files": [str(path) for path in folder.model_files],
    }


def _profile_document(profile: Profile) -> dict[str, Any]:
    nodes, per_node = profile.shape or (None, None)
    return {
        "num_nodes": nodes,
        "num_gpus_per_node": per_node,
        "measured": dict(profile.metadata),
        "files": [
            {
                "path": str(file.path),
                "kind": file.kind,
                "source": None if file.sidecar is None else file.sidecar.source,
                "values": {entry.key: entry.value for entry in file.entries},
            }
            for file in profile.files
        ],
        "series": [_series_document(series) for series in series_of(profile).values()],
    }


def _series_document(series: Series) -> dict[str, Any]:
    latency_s, seconds_per_byte = series.fit or (None, None)
    return {
        "operation": series.operation,
        "group_size": series.group_size,
        "consecutive": series.consecutive,
        "scope": series.scope,
        "latency_s": latency_s,
        "seconds_per_byte": seconds_per_byte,
        "points": [
            {**asdict(point), "bus_bytes_per_s": series.bus_bytes_per_s(point)}
            for point in series.points
        ],
    }

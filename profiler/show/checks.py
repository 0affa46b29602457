"""Validation of one profile, and comparison of two.

The findings of `--validate` are one sentence each with a remedy. A comparison tests whether two
profiles are comparable, and whether a change exceeds the scatter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import asdict

from autopar.documents.checks import DOCUMENTS, document_errors
from autopar.documents.hardware import (
    MAKE_HARDWARE,
    UNIT_FACTORS,
    HardwareEntry,
    hardware_doubts,
    hardware_file_name,
    read_hardware,
)
from autopar.documents.json import (
    load_object,
    read_record,
)
from autopar.documents.memory import MAKE_MEMORY, memory_content, memory_doubts
from autopar.documents.schemas import (
    ComputationDocument,
    MemoryDocument,
    allreduce_key,
    p2p_key,
)
from autopar.documents.sidecar import (
    DocumentKind,
    Measurement,
    Sidecar,
    documented_unit,
    read_sidecar,
    sidecar_path,
)
from autopar.documents.times import (
    MAKE_COMPUTATION,
    computation_content,
    computation_doubts,
    sidecar_doubts,
)
from autopar.errors import DocumentError
from autopar.records import Record
from autopar.sanity_checks import SuspiciousValue
from autopar.units import GB, divisors, format_count, format_seconds, format_size
from profiler.environment import comparable
from profiler.hardware.documents import KINDS, MIN_SP_TIME_SIZES, derive
from profiler.hardware.options import SP_TIME_SIZES, Cluster
from profiler.hardware.overlap import SIDES, slowdown
from profiler.show.read import (
    Finding,
    Folder,
    HardwareFile,
    Point,
    Profile,
    Series,
    Severity,
    cell_warnings,
    doubt_finding,
    error_finding,
    finding,
    kind_of,
    point_key,
    reference_cell,
    scope_by_shape,
    series_of,
    stragglers,
)

# --------------------------------------------------------------------------------------------------
# Implausible values: times that fall with size, links faster than memory, wrong units.


_DROP = 0.05
"""Tolerated relative decrease of time from a message to a larger one, for any spread."""
_UNIT_FACTOR = 4.0
"""Ratio of bandwidth to times of one group that only a mix-up of units exceeds."""


def monotone(folder: Folder, profile: Profile) -> Iterator[Finding]:
    """Yield points where a larger message takes less time, by more than the scatter."""
    for series in series_of(profile).values():
        for small, large in pairwise(series.points):
            drop = small.time_s / large.time_s - 1.0
            # Both values scatter: independent spreads add in quadrature.
            if drop > max(_DROP, math.hypot(small.spread, large.spread)):
                path, key = _place(folder, profile, series, large)
                yield finding(
                    "warning",
                    path,
                    key,
                    f"the time is {format_seconds(large.time_s)}, but "
                    f"{format_size(small.size_bytes)} takes {format_seconds(small.time_s)}",
                    "Measure both again: larger messages take longer",
                )


def _place(folder: Folder, profile: Profile, series: Series, point: Point) -> tuple[Path, str]:
    """Return file and key of a point in a document, else in the sidecar with its cell or curve."""
    for file in profile.files:
        for entry in file.entries:
            of_entry = (entry.operation, entry.group_size, entry.consecutive)
            if of_entry == series.key and entry.size_bytes == point.size_bytes:
                return file.path, entry.key
    key = point_key(series, point)
    for file in profile.files:
        if file.sidecar is None:
            continue
        cells = (cell.key for run in file.sidecar.runs for cell in run.measurements)
        curves = ((c.operation, c.group_size, c.consecutive) for c in file.sidecar.curves)
        if key in cells or series.key in curves:
            return sidecar_path(file.path), key
    return folder.path, key


def plausible(folder: Folder, profile: Profile) -> Iterator[Finding]:
    """Yield unlikely values, with the mistake that explains them."""
    checks: tuple[tuple[DocumentKind, Callable[[HardwareFile, Profile], Iterator[Finding]]], ...]
    checks = (
        ("allreduce", _at_odds_with_times),
        ("p2p", _at_odds_with_times),
        ("allreduce", _slow_neighbours),
        ("overlap", _coefficient),
    )
    for kind, check in checks:
        file = profile.file(kind)
        if file is not None:
            yield from check(file, profile)


def _at_odds_with_times(file: HardwareFile, profile: Profile) -> Iterator[Finding]:
    """Yield bandwidth keys without samples that contradict the times of their group."""
    series = series_of(profile)
    for entry in file.entries:
        found = series.get((entry.operation, entry.group_size, entry.consecutive))
        # Bandwidths with a cell are compared exactly by `_disagreement`.
        if found is None or reference_cell(profile, entry) is not None:
            continue
        rates = [found.bus_bytes_per_s(point) for point in found.points]
        ratio = entry.value / max(rates)
        if not 1.0 / _UNIT_FACTOR <= ratio <= _UNIT_FACTOR:
            yield finding(
                "warning",
                file.path,
                entry.key,
                f"the value is {entry.written:.4g} {file.unit}, but the times of the same group "
                f"reach {max(rates) / GB:.4g} GB/s",
                "Measure both again: one of them is in another unit",
            )


def _slow_neighbours(file: HardwareFile, profile: Profile) -> Iterator[Finding]:
    """Yield groups inside a node that are slower than groups across nodes."""
    by_key: dict[tuple[int, bool], HardwareEntry] = {
        (entry.group_size, entry.consecutive): entry for entry in file.entries
    }
    for (group_size, consecutive), near in by_key.items():
        far = by_key.get((group_size, False))
        scopes = [
            scope_by_shape(profile, ("allreduce", group_size, kind)) for kind in (True, False)
        ]
        if not consecutive or far is None or scopes != ["intra-node", "inter-node"]:
            continue
        if near.value < far.value / (1.0 + _DROP):
            yield finding(
                "warning",
                file.path,
                near.key,
                f"the value is {near.written:.4g} {file.unit} inside a node, but "
                f"{far.key} is {far.written:.4g} across nodes",
                "Measure both again: they may be swapped, or the links inside nodes unused",
            )


def _coefficient(file: HardwareFile, _: Profile) -> Iterator[Finding]:
    for entry in file.entries:
        if entry.value < 1.0:
            yield finding(
                "warning",
                file.path,
                entry.key,
                f"the value is {entry.written:.4g} and is read as 1",
                "Measure it again: a shared device is not faster",
            )


# --------------------------------------------------------------------------------------------------
# Findings, file by file.


_DISAGREEMENT = 1e-6
"""Relative tolerance: documents are derived from the samples in double precision, so a larger
difference is an edit."""
_MOST_ALIKE = 3
"""Maximum findings of one kind listed per file; more become one finding."""
_AGAIN = "Measure it again with `torchrun -m profiler.hardware ... --resume`"


def validate(folder: Folder) -> list[Finding]:
    """Return all findings without duplicates, errors first."""
    found = [error_finding(problem) for problem in folder.problems]
    for profile in folder.profiles:
        for check in CHECKS:
            found += check(folder, profile)
        # A wrong value also contradicts its neighbours; the check that knows the cause reports it.
        said = {item.key for item in found} - {None}
        found += [
            item
            for item in _doubtful(profile)
            if item.severity == "error" or not any(str(key) in item.sentence for key in said)
        ]
    for path in folder.model_files:
        found += _of_model(path)
    # A file that belongs to several shapes is found several times.
    once = dict.fromkeys(found)
    return sorted(once, key=lambda item: item.severity != "error")


def _of_model(path: Path) -> Iterator[Finding]:
    """Yield errors and contradictions in a model's profile file."""
    known = kind_of(path)
    kind = known[0] if known is not None else None
    problems: tuple[DocumentError, ...] = ()
    doubts: list[SuspiciousValue] = []
    sidecar: Sidecar | None = None
    empty, make = False, MAKE_MEMORY
    try:
        data = load_object(path).data
        if kind is None:
            kind = "computation" if any("bsz" in key for key in data) else "memory"
        problems = tuple(document_errors(DOCUMENTS[kind], path, data))
        sidecar = read_sidecar(path, kind)
        if not problems and kind == "computation":
            times = read_record(ComputationDocument, path, data)
            empty, make = computation_content(times) == "none", MAKE_COMPUTATION
            doubts = [] if empty else computation_doubts(path, times)
        elif not problems:
            memory = read_record(MemoryDocument, path, data)
            empty, make = memory_content(memory) == "none", MAKE_MEMORY
            doubts = [] if empty else memory_doubts(path, memory)
        if not problems and empty:
            problems = (DocumentError(path, "no processed key is in this file", remedy=make),)
    except DocumentError as error:
        problems += (error,)
    yield from map(error_finding, problems)
    beside = [] if sidecar is None else sidecar_doubts(sidecar)
    for where, found in ((path, doubts), (sidecar_path(path), beside)):
        yield from (doubt_finding(where, doubt) for doubt in found)


def _missing_files(folder: Folder, profile: Profile) -> Iterator[Finding]:
    if not folder.path.is_dir() or profile.shape is None:
        return
    for kind in KINDS:
        if kind == "sp_time" and profile.world_size == 1:
            continue  # a single device does not communicate
        if profile.file(kind) is None:
            severity: Severity = "warning" if kind == "sp_time" else "error"
            path = folder.path / hardware_file_name(kind, *profile.shape)
            yield finding(severity, path, None, "this file does not exist", MAKE_HARDWARE)


def _missing_keys(folder: Folder, profile: Profile) -> Iterator[Finding]:
    world = profile.world_size
    series = series_of(profile)
    if profile.shape is None:
        return
    for kind in ("allreduce", "p2p"):
        file = profile.file(kind)
        if file is None or file.problems:
            continue
        keys = {(entry.group_size, entry.consecutive) for entry in file.entries}
        for group in divisors(world)[1:]:
            for consecutive in (True, False) if kind == "allreduce" and group < world else (True,):
                cells = series.get((kind, group, consecutive))
                measured = cells is not None and any(p.num_samples for p in cells.points)
                if (group, consecutive) in keys or measured:
                    continue  # a measured key is missing for another reason
                key = p2p_key(group) if kind == "p2p" else allreduce_key(group, consecutive)
                # Other groups can be derived from one another, the group of all ranks cannot.
                needed = group == world
                yield finding(
                    "error" if needed else "warning",
                    file.path,
                    key,
                    f"this key is missing, and {group} divides the {world} devices",
                    "Measure it with "
                    f"`torchrun -m profiler.hardware {kind} --groups {group} --resume`",
                )


def _missing_times(folder: Folder, profile: Profile) -> Iterator[Finding]:
    file = profile.file("sp_time")
    if file is None or file.problems:
        return
    sizes: dict[tuple[str, int], int] = {}
    for entry in file.entries:
        group = entry.operation, entry.group_size
        sizes[group] = sizes.get(group, 0) + 1
    groups = divisors(profile.world_size)[1:] if profile.shape is not None else ()
    for operation in ("allreduce", "all2all"):
        for size in groups or sorted({size for _, size in sizes}):
            count = sizes.get((operation, size), 0)
            if count < MIN_SP_TIME_SIZES:
                yield finding(
                    "warning",
                    file.path,
                    f"{operation}_size_{size}_*MB_time",
                    f"there {'is' if count == 1 else 'are'} {format_count(count, 'size')}, and "
                    f"Galvatron refuses a file with fewer than {MIN_SP_TIME_SIZES}",
                    "Measure the others with "
                    f"`torchrun -m profiler.hardware --resume --sizes {SP_TIME_SIZES}`",
                )


def _disagreement(folder: Folder, profile: Profile) -> Iterator[Finding]:
    reference = profile.metadata.get("reference_bytes")
    if profile.shape is None or not profile.cells or not isinstance(reference, int):
        return
    nodes, gpus = profile.shape
    # The documents depend on the number of hosts, not on their names.
    hosts = tuple(f"node{node}" for node in range(nodes) for _ in range(gpus))
    derived = derive(profile.cells, Cluster(hosts=hosts), reference).data
    for file in profile.files:
        expected = derived.get(file.kind)
        if expected is None or file.problems:
            continue
        own = {entry.key: entry for entry in file.entries}
        # Derived values are in the unit of Galvatron's format, for files in any unit.
        factor = UNIT_FACTORS[documented_unit(file.kind)]
        for key, value in expected.items():
            entry = own.get(key)
            if entry is None:
                yield finding(
                    "error",
                    file.path,
                    key,
                    "this key is missing, though its sidecar holds the samples",
                    "Write it with `torchrun -m profiler.hardware ... --resume`",
                )
            elif not math.isclose(entry.value, value * factor, rel_tol=_DISAGREEMENT):
                yield finding(
                    "error",
                    file.path,
                    key,
                    f"the value is {entry.written:.6g}{_unit(file)}, but the samples in its "
                    f"sidecar give {value * factor * entry.written / entry.value:.6g}",
                    "`torchrun -m profiler.hardware ... --resume` writes the file again",
                )
        for key in own.keys() - expected.keys():
            yield finding(
                "warning",
                file.path,
                key,
                f"the value is {own[key].written:.6g}, and no samples in its sidecar give it",
                _AGAIN,
            )


def _unit(file: HardwareFile) -> str:
    return "" if file.unit == "1" else f" {file.unit}"


def _readable(folder: Folder, profile: Profile) -> Iterator[Finding]:
    """Yield further errors of the planner's reader: impossible groups, contradicting sidecars."""
    named = {file.kind: file for file in profile.files}
    needed = [named.get(kind) for kind in ("allreduce", "p2p", "overlap")]
    if profile.shape is None or folder.problems or not all(needed):
        return
    found = False
    for file in profile.files:
        for entry in file.entries:
            if file.kind != "overlap" and not 2 <= entry.group_size <= profile.world_size:
                found = True
                yield finding(
                    "error",
                    file.path,
                    entry.key,
                    f"a group of {entry.group_size} does not exist on {profile.title}",
                    "Check the numbers in the file's name",
                )
    if found:
        return  # the reader would report the first of them again
    try:
        read_hardware(
            num_nodes=profile.shape[0],
            gpus_per_node=profile.shape[1],
            allreduce=named["allreduce"].path,
            p2p=named["p2p"].path,
            overlap=named["overlap"].path,
            sp_time=named["sp_time"].path if "sp_time" in named else None,
        )
    except DocumentError as error:
        # Missing keys have already been reported.
        if "this key is missing" not in error.problem:
            yield error_finding(error)


def _doubtful(profile: Profile) -> Iterator[Finding]:
    """Yield values that are unlikely or contradict their neighbours, by the planner's rules."""
    known = (s.memory_bytes_per_s for s in profile.sidecars if s.memory_bytes_per_s is not None)
    memory_bytes_per_s = next(known, None)
    for file in profile.files if profile.shape is not None else ():
        assert profile.shape is not None
        unit = "" if file.kind == "overlap" else file.unit
        doubts = hardware_doubts(
            file.kind, file.entries, profile.shape, memory_bytes_per_s, unit=unit
        )
        yield from (doubt_finding(file.path, doubt) for doubt in doubts)


def _failed(folder: Folder, profile: Profile) -> Iterator[Finding]:
    for file in profile.files:
        for cell in _cells_of(file, profile):
            if cell.status == "failed":
                yield finding(
                    "error",
                    sidecar_path(file.path),
                    cell.key,
                    f"this cell failed: {cell.reason or 'no reason was recorded'}",
                    _AGAIN,
                )


def _samples(folder: Folder, profile: Profile) -> Iterator[Finding]:
    remedy = "measure it again on quiet hosts, or with more --iters"
    for file in profile.files:
        alike: dict[str, list[tuple[str, str]]] = {}
        for key, text in cell_warnings(_cells_of(file, profile)):
            alike.setdefault(text.partition(":")[0], []).append((key, text))
        for found in alike.values():
            # On a busy machine, every cell has this warning.
            shown = found if len(found) <= _MOST_ALIKE else found[:1]
            for key, text in shown:
                more = len(found) - len(shown)
                rest = f" (and so in {format_count(more, 'other cell')})" if more else ""
                yield finding("warning", sidecar_path(file.path), key, text + rest, remedy)


def _stragglers(folder: Folder, profile: Profile) -> Iterator[Finding]:
    for (rank, host), cells in stragglers(profile).items():
        key, ratio = max(cells, key=lambda item: item[1])
        path = next(
            (sidecar_path(f.path) for f in profile.files if key in _own_keys(f)), folder.path
        )
        yield finding(
            "warning",
            path,
            key,
            f"rank {rank} on host {host} took {ratio:.3g} times as long as others do, and "
            f"was slow in {len(cells)} of the cells",
            "Check the clocks, links and load of this host",
        )


def _cells_of(file: HardwareFile, profile: Profile) -> list[Measurement]:
    """Return the current measurements in this file that no earlier file contains."""
    # A consecutive all-reduce is in two sidecars but is reported once.
    earlier: set[str] = set()
    for other in profile.files:
        if other is file:
            break
        earlier |= _own_keys(other)
    own = _own_keys(file) - earlier
    return [cell for key, cell in profile.cells.items() if key in own]


def _own_keys(file: HardwareFile) -> set[str]:
    runs = file.sidecar.runs if file.sidecar is not None else []
    return {cell.key for run in runs for cell in run.measurements}


CHECKS: tuple[Callable[[Folder, Profile], Iterator[Finding]], ...] = (
    _missing_files,
    _missing_keys,
    _missing_times,
    _readable,
    _disagreement,
    _failed,
    monotone,
    plausible,
    _samples,
    _stragglers,
)
"""All checks of a profile except the schema, whose errors are found while reading."""


# --------------------------------------------------------------------------------------------------
# Changes between two profiles, and whether they exceed the scatter.


Verdict = Literal["regression", "improvement", "within the spread", "unchanged"]
Kind = Literal["bandwidth", "time", "ratio"]


class Change(Record):
    """Value that exists in both profiles: a key of a profile file, or a point of a curve."""

    key: str
    kind: Kind
    """bandwidth: bytes/s, higher is better; time: seconds, and ratio: lower is better."""
    documented: bool
    old: float
    new: float
    spread: float
    """Combined relative spread: the root of the sum of squares of half the p5-p95 ranges."""
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """New value over old value."""
        return self.new / self.old


class Comparison(Record):
    """Two profiles of one shape, compared value by value."""

    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    """Keys and curve points that exist only in the old profile."""
    only_new: tuple[str, ...]

    def count(self, verdict: Verdict) -> int:
        """Return the number of values with this verdict."""
        return sum(change.verdict == verdict for change in self.changes)


class _Value(Record):
    kind: Kind
    documented: bool
    value: float
    spread: float


def pairs(old: Folder, new: Folder, *, anyway: bool) -> list[tuple[Profile, Profile]]:
    """Return (old, new) profiles of equal shape; empty if there are none.

    anyway : if no shape is in both folders and each has one profile, pair these two.
    """
    found = [(a, b) for b in new.profiles for a in old.profiles if a.shape == b.shape]
    if not found and len(old.profiles) == len(new.profiles) == 1:
        # An unknown shape may be that of the other profile.
        either = None in (old.profiles[0].shape, new.profiles[0].shape)
        if anyway or either:
            found = [(old.profiles[0], new.profiles[0])]
    return found


def obstacles(old: Profile, new: Profile) -> list[str]:
    """Return the reasons why two profiles cannot be compared; empty if they can."""
    found = []
    if None not in (old.shape, new.shape) and old.shape != new.shape:
        found.append(f"the old one describes {old.title}, the new one {new.title}")
    if bool(old.sidecars) != bool(new.sidecars):
        without = "new" if old.sidecars else "old"
        found.append(f"the {without} one has no sidecars, so its units and machine are unknown")
        return found
    for field, yes, no in (
        ("estimated", "estimated from datasheets", "measured"),
        ("synthetic", "synthetic", "of a machine"),
    ):
        a, b = (any(getattr(s, field) for s in profile.sidecars) for profile in (old, new))
        if a != b:
            found.append(f"the old one is {yes if a else no}, the new one {yes if b else no}")
    if old.metadata and new.metadata:
        found += comparable(old.metadata, new.metadata)
        sizes = [profile.metadata.get("reference_bytes") for profile in (old, new)]
        if sizes[0] != sizes[1]:
            found.append("documented bandwidths are of {} bytes and of {} bytes".format(*sizes))
    return found


def circumstances(old: Profile, new: Profile) -> list[str]:
    """Return other differences, such as a driver, that may be the cause of a change."""
    if not old.metadata or not new.metadata:
        return []
    known = obstacles(old, new)
    found = comparable(old.metadata, new.metadata, resume=True)
    return [clause for clause in found if clause not in known]


def compare(old: Profile, new: Profile, threshold: float) -> Comparison:
    """Return all values of two profiles with their verdicts.

    A change counts if the worse value is more than `threshold` (0.05 is 5 %) above the better one
    and the change exceeds the combined spread of both samples.
    """
    before, after = dict(_values(old)), dict(_values(new))
    changes = []
    for key in after:
        if key in before:
            a, b = before[key], after[key]
            spread = math.hypot(a.spread, b.spread)
            changes.append(
                Change(
                    key=key,
                    kind=b.kind,
                    documented=b.documented,
                    old=a.value,
                    new=b.value,
                    spread=spread,
                    verdict=_verdict(a, b, spread, threshold),
                )
            )
    return Comparison(
        changes=tuple(changes),
        only_old=tuple(key for key in before if key not in after),
        only_new=tuple(key for key in after if key not in before),
    )


def _verdict(old: _Value, new: _Value, spread: float, threshold: float) -> Verdict:
    # A ratio above 1 is worse for every unit.
    slower = new.value / old.value if new.kind != "bandwidth" else old.value / new.value
    # From the better to the worse value, whichever is the new one.
    size = max(slower, 1.0 / slower) - 1.0
    if size <= threshold:
        return "unchanged"
    if size <= spread:
        return "within the spread"
    return "regression" if slower > 1.0 else "improvement"


def _values(profile: Profile) -> Iterator[tuple[str, _Value]]:
    """Yield the keys of a file in file order, then curve points without a key."""
    series = series_of(profile)
    told = set()
    for file in profile.files:
        for entry in file.entries:
            point = reference_cell(profile, entry)
            kind: Kind = "bandwidth"
            if entry.operation == "overlap":
                kind, spread = "ratio", _overlap_spread(profile)
            elif entry.size_bytes is not None:
                kind = "time"
                key = (entry.operation, entry.group_size, entry.consecutive)
                told.add((*key, float(entry.size_bytes)))
                points = series[key].points
                point = next(p for p in points if p.size_bytes == entry.size_bytes)
                spread = point.spread
            else:
                spread = point.spread if point is not None else 0.0
            yield (
                entry.key,
                _Value(kind=kind, documented=True, value=entry.value, spread=spread),
            )
    for key, one in series.items():
        for point in one.points:
            if (*key, point.size_bytes) not in told:
                value = _Value(
                    kind="time", documented=False, value=point.time_s, spread=point.spread
                )
                yield point_key(one, point), value


def _overlap_spread(profile: Profile) -> float:
    """Return the relative spread of the slowdown behind the coefficient, 0 if unknown."""
    found = [
        one
        for cell in profile.cells.values()
        for side in SIDES
        if cell.operation.startswith("overlap_") and cell.status == "ok"
        if (one := slowdown(cell.samples_s, side)) is not None
    ]
    # The coefficient is the largest slowdown.
    return max(found).spread if found else 0.0


def comparison_document(title: str, comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as a JSON object; values in base units.

    title : cluster of the profiles.
    """
    return {
        "title": title,
        "changes": [{**asdict(one), "ratio": one.ratio} for one in comparison.changes],
        "only_old": list(comparison.only_old),
        "only_new": list(comparison.only_new),
    }

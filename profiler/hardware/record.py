"""The files of one measuring run, written after every cell, so that nothing measured is lost.

The sidecars are the truth; documented files are derived from them. Both are replaced atomically,
the sidecar first, so that a killed run leaves at worst a document that lacks its newest cell, and
the next run derives it again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from autopar.documents.hardware import hardware_file_name
from autopar.documents.json import write_json
from autopar.documents.sidecar import (
    SIDECAR_VERSION,
    DocumentKind,
    Measurement,
    Run,
    Sidecar,
    read_sidecar,
    sidecar_path,
)
from autopar.errors import DocumentError, InputError
from profiler.environment import Metadata, comparable
from profiler.hardware.cells import Cell, Cluster
from profiler.hardware.documents import (
    KINDS,
    MEASURED_FOR,
    REPLACES,
    UNITS,
    Documents,
    derive,
    kinds_of,
    newest_measurements,
    requested_kinds,
)
from profiler.hardware.options import HardwareOptions
from profiler.storage import (
    DAMAGED,
    Lock,
    keep_copy,
    move_aside,
    probe,
    read_document,
    refuse_earlier,
    remove_leftovers,
    sentences,
)

__all__ = [
    "Counts",
    "History",
    "Record",
    "check_present",
    "differences",
    "document_paths",
    "is_damage",
    "is_ours",
    "next_run_id",
    "read_history",
]


# --------------------------------------------------------------------------------------------------
# What earlier runs left in a directory: their sidecars, joined by run, and damaged files.
#
# A consecutive all-reduce stands in two sidecars, and a run that was killed may have written only
# one of them; joining the runs of all files by their id makes both whole again.


@dataclass(frozen=True, kw_only=True)
class History:
    """The runs of the four sidecars of a cluster."""

    runs: tuple[Run, ...]
    """Every run that has an id, with its measurements in all files, oldest first."""
    present: Mapping[DocumentKind, frozenset[str]]
    """Ids of the runs that a sidecar names."""
    unnamed: Mapping[DocumentKind, tuple[Run, ...]]
    """Runs without an id, which another program wrote; kept as they are."""
    sidecars: Mapping[DocumentKind, Sidecar]
    damaged: Mapping[DocumentKind, DocumentError]
    """Why a sidecar cannot be read."""


def document_paths(out: Path, cluster: Cluster) -> dict[DocumentKind, Path]:
    """Return the documented files of a cluster in a directory."""
    shape = (cluster.num_nodes, cluster.gpus_per_node)
    return {kind: out / hardware_file_name(kind, *shape) for kind in KINDS}


def read_history(paths: Mapping[DocumentKind, Path]) -> History:
    """Return what the sidecars of these documents hold.

    Raises
    ------
    DocumentError: a sidecar was written by a newer version, or the system refuses to read it.
    """
    sidecars: dict[DocumentKind, Sidecar] = {}
    damaged: dict[DocumentKind, DocumentError] = {}
    for kind, path in paths.items():
        try:
            sidecar = read_sidecar(path, kind)
        except DocumentError as error:
            if not is_damage(error):
                raise
            damaged[kind] = error
        else:
            if sidecar is not None:
                sidecars[kind] = sidecar
    return History(
        runs=_joined(run for sidecar in sidecars.values() for run in sidecar.runs),
        present={
            kind: frozenset(run.id for run in sidecar.runs if run.id is not None)
            for kind, sidecar in sidecars.items()
        },
        unnamed={
            kind: tuple(run for run in sidecar.runs if run.id is None)
            for kind, sidecar in sidecars.items()
        },
        sidecars=sidecars,
        damaged=damaged,
    )


def is_damage(error: DocumentError) -> bool:
    """Return whether the content is at fault, and not its age or the rights of the reader."""
    if error.key == "version" and error.remedy is not None:
        return False  # a newer version wrote it
    # a file that cannot be read at all may be whole
    try:
        Path(error.path).read_bytes()
    except OSError:
        return False
    return True


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return every run once, with the cells of all its copies, in the order of their numbers."""
    metadata: dict[str, Run] = {}
    cells: dict[str, dict[str, Measurement]] = {}
    for run in runs:
        if run.id is None:
            continue
        metadata.setdefault(run.id, run)
        found = cells.setdefault(run.id, {})
        for measurement in run.measurements:
            earlier = found.get(measurement.key)
            # of two copies the one that was measured counts
            if earlier is None or earlier.status != "ok":
                found[measurement.key] = measurement
    return tuple(
        run.model_copy(update={"measurements": list(cells[name].values())})
        for name, run in sorted(metadata.items(), key=lambda item: _number(item[0]))
    )


def _number(run_id: str) -> int:
    head = run_id.split("-", 1)[0]
    return int(head) if head.isdecimal() and len(head) < 10 else 0


def next_run_id(runs: Iterable[Run], token: str) -> str:
    """Return an id behind those of earlier runs: the number of the run and a random token.

    Numbers and not times, since the clocks of two machines that share a directory may differ.
    """
    return f"{1 + max((_number(run.id) for run in runs if run.id is not None), default=0)}-{token}"


def is_ours(path: Path, kind: DocumentKind, history: History) -> bool:
    """Return whether a document, or its sidecar, is the work of an earlier run of this command."""
    # what is damaged, or was moved aside for it, was a sidecar of this command
    if kind in history.damaged or any(path.parent.glob(sidecar_path(path).name + DAMAGED + "*")):
        return True
    return bool(history.present.get(kind))


def check_present(
    paths: Mapping[DocumentKind, Path],
    kinds: Set[DocumentKind],
    history: History,
    options: HardwareOptions,
) -> None:
    """Check that the options allow to touch what there is of these documents.

    Raises
    ------
    InputError: an earlier run wrote a file, or something else did.
    """
    if options.force:
        return
    for kind in KINDS:
        document = paths[kind]
        there = [path for path in (document, sidecar_path(document)) if path.exists()]
        if kind not in kinds or not there:
            continue
        ours = is_ours(document, kind, history)
        refuse_earlier(there[0], ours=ours, resume=options.resume)


def differences(
    history: History,
    kinds: Set[DocumentKind],
    metadata: Metadata,
    synthetic: bool,
) -> list[str]:
    """Return what differs between now and the earlier runs that these documents rest on."""
    active = newest_measurements(history.runs)
    found: list[str] = []
    for run in history.runs:
        # only cells that still count tie a document to their run
        cells = [m for m in run.measurements if active.get(m.key) is m and m.status == "ok"]
        rest_on_it = kinds & {kind for m in cells for kind in kinds_of(m)}
        if rest_on_it:
            found += comparable(run.metadata, metadata, resume=True)
        for kind in rest_on_it:
            sidecar = history.sidecars.get(kind)
            if sidecar is not None and sidecar.synthetic != synthetic:
                was, now = (("real", "synthetic"), ("synthetic", "real"))[sidecar.synthetic]
                found.append(f"what the times are: {was} and {now}")
    return list(dict.fromkeys(found))


# --------------------------------------------------------------------------------------------------
# The record of a run: cells as they come, files after each.


_PATIENCE_S = 10.0


class Counts(NamedTuple):
    """How the cells ended that count now, earlier runs included."""

    ok: int
    failed: int
    skipped: int


@dataclass(frozen=True, kw_only=True)
class _About:
    """What a record knows of its run."""

    cluster: Cluster
    options: HardwareOptions
    memory_bytes: float | None
    synthetic: bool
    name: str


class Record:
    """The measurements of one directory; made by `open`, owned by rank 0."""

    def __init__(
        self,
        out: Path,
        about: _About,
        *,
        lock: Lock,
        history: History,
        metadata: Metadata,
        notes: list[str],
    ) -> None:
        self.out = out
        self.notes = notes
        """Sentences on what was found and done with files of earlier runs."""
        self._about = about
        self._kinds = requested_kinds(about.options, about.cluster)
        self._paths = document_paths(out, about.cluster)
        self._lock = lock
        self._history = history
        self._run = Run(id=next_run_id(history.runs, secrets.token_hex(4)), metadata=metadata)
        self._own: dict[str, Measurement] = {}
        self._written: dict[DocumentKind, dict[str, float]] = {}
        # what another program wrote is copied before it is replaced
        self._to_keep = {
            kind: [path for path in (document, sidecar_path(document)) if path.exists()]
            for kind, document in self._paths.items()
            if not is_ours(document, kind, history)
        }
        self._busy = threading.Lock()

    @classmethod
    def open(
        cls,
        out: Path,
        *,
        cluster: Cluster,
        options: HardwareOptions,
        metadata: Metadata,
        memory_bytes: float | None,
        synthetic: bool,
        name: str,
    ) -> Self:
        """Return the record of a directory, which from now on belongs to this process.

        Raises
        ------
        InputError: the directory cannot be written, another run writes there, it has files that
            neither `--resume` nor `--force` allows to touch, or earlier runs are not comparable.
        """
        about = _About(
            cluster=cluster,
            options=options,
            memory_bytes=memory_bytes,
            synthetic=synthetic,
            name=name,
        )
        # first, since the lock is a file in the directory too
        probe(out)
        lock = Lock(out)
        try:
            return cls._locked(out, about, metadata, lock)
        # an interruption, too, must not leave the directory locked
        except BaseException:
            lock.release()
            raise

    @classmethod
    def _locked(cls, out: Path, about: _About, metadata: Metadata, lock: Lock) -> Self:
        options = about.options
        kinds = requested_kinds(options, about.cluster)
        paths = document_paths(out, about.cluster)
        # under the lock: no other run's file in the making is removed
        remove_leftovers(p for path in paths.values() for p in (path, sidecar_path(path)))
        history = read_history(paths)
        check_present(paths, kinds, history, options)
        found = differences(history, kinds, metadata, about.synthetic)
        if found and not options.force:
            raise InputError(
                f"{out}: the earlier run cannot be continued, since it differs in "
                f"{'; '.join(found)}; --force measures again and keeps the earlier samples as "
                "history, or choose another --out"
            )
        notes = [lock.note] if lock.note is not None else []
        for kind in KINDS:
            if kind in kinds and kind in history.damaged:
                with sentences():
                    target = move_aside(sidecar_path(paths[kind]))
                notes.append(
                    f"{history.damaged[kind]}; it is kept as {target.name} and its cells are "
                    "measured again"
                )
            elif kind not in kinds:
                others = differences(history, {kind}, metadata, about.synthetic)
                if others:
                    notes.append(f"{paths[kind]} is of a run that differs in {'; '.join(others)}")
        described = dict(metadata)
        if options.force and history.runs:
            replaced = set(options.operations)
            if found:  # nothing of another machine may stay beside the new samples
                replaced.update(name for kind in kinds for name in MEASURED_FOR[kind])
            described[REPLACES] = ",".join(sorted(replaced))
        record = cls(out, about, lock=lock, history=history, metadata=described, notes=notes)
        # a killed run may have left sidecars that are newer than their documents
        if options.resume:
            record._repair()
        return record

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs write to the directory; the end of the process does so too."""
        self._lock.release()

    @property
    def measurements(self) -> dict[str, Measurement]:
        """The measurements that count now, by cell, those of earlier runs included."""
        return newest_measurements(self._runs())

    def missing(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells that have no usable measurement yet, in their order."""
        found = self.measurements
        # what failed or was left out is tried again
        return [cell for cell in cells if cell.key not in found or found[cell.key].status != "ok"]

    def put(self, measurement: Measurement) -> None:
        """Add a measurement and write the files that rest on it, sidecars first.

        Raises
        ------
        InputError: a file cannot be written; its old content is intact.
        """
        assert set(kinds_of(measurement)) <= self._kinds, f"{measurement.key} was not asked for"
        # a run that ends early puts its last cell from another thread, while this one may hang
        if not self._busy.acquire(timeout=_PATIENCE_S):
            raise InputError(f"{self.out}: a file is being written for over {_PATIENCE_S:g} s")
        try:
            self._own[measurement.key] = measurement
            documents = self._derive()
            affected = set(kinds_of(measurement))
            # a document without keys rests on no measurement
            affected |= {k for k in self._kinds - set(self._written) if documents.data[k] == {}}
            for kind in KINDS:
                if kind in affected:
                    self._write(kind, documents)
        finally:
            self._busy.release()

    def paths(self) -> list[Path]:
        """Return the files that there are: documents and their sidecars."""
        pairs = ((self._paths[k], sidecar_path(self._paths[k])) for k in KINDS if k in self._kinds)
        return [path for pair in pairs for path in pair if path.exists()]

    def counts(self) -> Counts:
        """Return how many of the cells that count now were measured, failed and were left out."""
        found = [m.status for m in self.measurements.values() if self._kinds & set(kinds_of(m))]
        return Counts(found.count("ok"), found.count("failed"), found.count("skipped"))

    def warnings(self) -> list[str]:
        """Return sentences on what the documents lack, and on values that are not of this run."""
        documents = self._derive()
        return documents.warnings + [
            f"{self._paths[kind]} still has the values of before: nothing was measured in their "
            "place"
            for kind in KINDS
            if kind in self._kinds and documents.data[kind] is None and self._paths[kind].exists()
        ]

    def _runs(self) -> tuple[Run, ...]:
        own = self._run.model_copy(update={"measurements": list(self._own.values())})
        return (*self._history.runs, own)

    def _derive(self) -> Documents:
        # what another command's files rest on is not this run's business
        found = {k: m for k, m in self.measurements.items() if self._kinds & set(kinds_of(m))}
        return derive(found, self._about.cluster, self._about.options.reference_bytes)

    def _repair(self) -> None:
        """Derive the documents again that an earlier run left behind, damaged or not at all."""
        documents = self._derive()
        for kind in KINDS:
            data = documents.data[kind]
            if kind not in self._kinds or data is None:
                continue
            path = self._paths[kind]
            found = read_document(path)
            complete = kind in self._history.sidecars
            if complete and found is not None and found == dict(data):
                self._written[kind] = data
                continue
            state = "was damaged" if path.exists() else "was missing"
            if found is not None:
                state = "did not have the values of its samples" if complete else "had no samples"
            self._write(kind, documents)
            self.notes.append(f"{path} {state} and was derived again")

    def _write(self, kind: DocumentKind, documents: Documents) -> None:
        path, data = self._paths[kind], documents.data[kind]
        while self._to_keep.get(kind):
            old = self._to_keep[kind][0]
            with sentences(old):
                self.notes.append(f"{old} was kept as {keep_copy(old).name}")
            # after the copy, so that one that failed is tried again
            del self._to_keep[kind][0]
        sidecar = self._sidecar(kind, documents).model_dump(exclude_none=True)
        with sentences(sidecar_path(path)):
            write_json(sidecar_path(path), sidecar, number_rows=True)
        # a document whose values stay the same is not replaced after every cell
        if data is not None and self._written.get(kind) != data:
            with sentences(path):
                write_json(path, dict(data))
                self._written[kind] = data

    def _sidecar(self, kind: DocumentKind, documents: Documents) -> Sidecar:
        metadata, about = self._run.metadata, self._about
        hosts = metadata.get("hosts") or ",".join(dict.fromkeys(about.cluster.hosts))
        source = (
            f"measured by `{metadata.get('command', 'torchrun -m profiler.hardware')}` on {hosts}"
        )
        if about.synthetic:
            source = f"synthetic: several ranks share one GPU, no number is a machine's; {source}"
        return Sidecar(
            version=SIDECAR_VERSION,
            document=kind,
            unit=UNITS[kind],
            source=source,
            synthetic=about.synthetic,
            name=about.name,
            memory_bytes=about.memory_bytes,
            memory_bytes_per_s=documents.memory_bytes_per_s if kind == "overlap" else None,
            curves=documents.curves[kind],
            runs=[*self._history.unnamed.get(kind, ()), *self._runs_of(kind)],
        )

    def _runs_of(self, kind: DocumentKind) -> list[Run]:
        """Return the runs that a sidecar names, each with the measurements of its document."""
        present = self._history.present.get(kind, frozenset())
        found = []
        for run in self._runs():
            cells = [m for m in run.measurements if kind in kinds_of(m)]
            # the current run is named without a cell too: it may replace what stands before it
            if cells or run.id in present or run.id == self._run.id:
                found.append(run.model_copy(update={"measurements": cells}))
        return found

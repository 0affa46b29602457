"""Files of one measuring run, written after every cell, so that no measurement is lost.

Documents are derived from their sidecars, which hold the samples. Both are replaced atomically, the
sidecar first. A killed run therefore leaves at worst a document without its newest cell, which the
next run derives again. A directory is probed and locked first, and existing files are kept. A
record is continued only where the earlier runs are comparable. `hardware.record` and `model.record`
define the cells of each file and the values derived from them.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

from filelock import FileLock, Timeout

from autopar.command.run import say, visible
from autopar.documents.json import load_object, write_json, written
from autopar.documents.sidecar import (
    REPLACES,
    DocumentKind,
    Measurement,
    ModelMeasurement,
    Run,
    Sidecar,
    counting_runs,
    read_sidecar,
    sidecar_path,
)
from autopar.errors import DocumentError, InputError, OptionError
from autopar.output import remove_leftovers
from autopar.units import format_count
from profiler.environment import Metadata, comparable

# --------------------------------------------------------------------------------------------------
# File safety: directories are probed and locked, existing files are kept.


_DAMAGED = ".damaged"
"""Suffix of a damaged file that was moved aside; a number may follow."""
_LOCK_NAME = ".profiler.lock"


class Lock:
    """Lock of a directory against other runs, held until release or the end of the process."""

    def __init__(self, out: Path, option: str = "--out") -> None:
        """Acquire the lock of a directory.

        option : command-line option that sets the directory.

        Raises OptionError: another run holds the lock.
        """
        self.note: str | None = None
        """Reason why the directory is not locked; None if it is."""
        # Fail immediately instead of waiting for hours.
        self._lock = FileLock(out / _LOCK_NAME, timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise OptionError(
                f"{option} {out}: another run is writing to it",
                remedy=f"Wait for it, or use another {option}",
            ) from None
        except (NotImplementedError, OSError) as error:  # some cluster file systems have no locks
            self.note = f"{out} cannot be locked ({error}): let no other run write there"

    def release(self) -> None:
        """Release the lock, so that other runs may write."""
        self._lock.release()


def _probe(out: Path) -> None:
    """Check that files can be created in a directory, before hours of measuring.

    Raises OptionError: the file system refuses to write.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        # Write data, since a full disk may still create an empty file.
        with tempfile.NamedTemporaryFile(dir=out, prefix=".profiler.") as stream:
            stream.write(b"\0" * 4096)
            stream.flush()
    except OSError as error:
        raise OptionError(
            f"--out {out}: files cannot be written there ({error.strerror})",
            remedy="Use another --out, or make it writable",
        ) from None


def read_document(path: Path) -> dict[str, object] | None:
    """Return the content of a document, or None if it is missing or damaged."""
    try:
        return load_object(path).data
    except DocumentError:
        return None


def _damaged_name(path: Path) -> Path:
    """Return the first of PATH.damaged, PATH.damaged-1, ... that does not exist."""
    names = (path.name + _DAMAGED + (f"-{number}" if number else "") for number in count())
    return next(found for name in names if not (found := path.with_name(name)).exists())


@contextmanager
def _sentences(path: Path | None = None) -> Iterator[None]:
    """Convert a file system error into an InputError with file and remedy.

    Raises InputError: a file cannot be written; `path` names it if the system does not.
    """
    try:
        yield
    except OSError as error:
        where = path if path is not None else error.filename
        raise InputError(
            f"{where}: the file cannot be written ({error.strerror})",
            remedy=("Free space or make it writable, then measure the rest with --resume"),
        ) from None


# --------------------------------------------------------------------------------------------------
# One document with its sidecar: state left by earlier runs.


@dataclass(kw_only=True)
class DocumentFile:
    """A document with its sidecar, as left by earlier runs and written by this one."""

    kind: DocumentKind
    path: Path
    sidecar: Sidecar | None = None
    damage: DocumentError | None = None
    """Error of reading the sidecar; None if it is readable."""
    written: Mapping[str, object] | None = None
    """Content of the document as last written or verified by this run; None if unknown."""
    to_keep: list[Path] = field(default_factory=list)
    """Files written by another program; kept under another name when replaced."""

    @classmethod
    def read(cls, kind: DocumentKind, path: Path) -> Self:
        """Return the state of a document and its sidecar.

        Raises DocumentError: a newer version wrote the sidecar, or the system refuses to read it.
        """
        file = cls(kind=kind, path=path)
        try:
            file.sidecar = read_sidecar(path, kind)
        except DocumentError as error:
            if not is_damage(error):
                raise
            file.damage = error
        if not file.ours:
            file.to_keep = file.present
        return file

    @property
    def earlier(self) -> Sequence[Run]:
        """Runs listed in the sidecar, oldest first."""
        return self.sidecar.runs if self.sidecar is not None else ()

    @property
    def pair(self) -> tuple[Path, Path]:
        """Paths of the document and its sidecar, whether they exist or not."""
        return self.path, sidecar_path(self.path)

    @property
    def present(self) -> list[Path]:
        """Existing paths of the pair."""
        return [path for path in self.pair if path.exists()]

    @property
    def ours(self) -> bool:
        """True if an earlier run of this command wrote the document or its sidecar."""
        # A damaged or moved file was a sidecar of this command.
        moved = any(self.path.parent.glob(sidecar_path(self.path).name + _DAMAGED + "*"))
        return self.damage is not None or moved or any(run.id is not None for run in self.earlier)

    def check_present(self, *, resume: bool) -> None:
        """Check that a run without `--force` may continue with an existing file.

        Raises InputError: another program wrote the file, or `--resume` is not given.
        """
        if not self.present:
            return
        if not self.ours:
            raise InputError(
                f"{self.present[0]}: another command wrote this file",
                remedy=("Replace it with --force, which keeps a copy, or use another --out"),
            )
        if not resume:
            raise InputError(
                f"{self.present[0]}: an earlier run wrote this file",
                remedy=(
                    "Measure the rest with --resume, measure again with --force, or "
                    "use another --out"
                ),
            )


def is_damage(error: DocumentError) -> bool:
    """Return True if the content is damaged, as opposed to too new or not readable."""
    if error.key == "version" and error.remedy is not None:
        return False  # written by a newer version
    # A file that cannot be read may be intact.
    try:
        Path(error.path).read_bytes()
    except OSError:
        return False
    return True


def run_number(run_id: str) -> int:
    """Return the leading number of a run id, 0 if there is none."""
    head = run_id.split("-", 1)[0]
    return int(head) if head.isdecimal() and len(head) < 10 else 0


def next_run_id(runs: Iterable[Run], token: str) -> str:
    """Return the next run id: one more than the largest earlier number, and a random token.

    Numbers instead of times, since the clocks of machines that share a directory may differ.
    """
    numbers = (run_number(run.id) for run in runs if run.id is not None)
    return f"{1 + max(numbers, default=0)}-{token}"


def incomparable(where: Path, differences: Iterable[str]) -> InputError:
    """Return the error for an earlier run that is not comparable with this one."""
    return InputError(
        f"{where}: the earlier run cannot be resumed: it differs in {'; '.join(differences)}",
        remedy="Measure again with --force, or use another --out",
    )


# --------------------------------------------------------------------------------------------------
# Record of a run: cells are added one by one, files are written after each.


_PATIENCE_S = 10.0

_M = TypeVar("_M", Measurement, ModelMeasurement)


class Keyed(Protocol):
    """Minimal interface of a cell to be measured."""

    @property
    def key(self) -> str:
        """Unique name of the cell in files and messages."""
        ...


_C = TypeVar("_C", bound=Keyed)


class Counts(NamedTuple):
    """Number of current cells by status, earlier runs included."""

    ok: int
    failed: int
    skipped: int


class Content(NamedTuple):
    """New content of a document and its sidecar."""

    file: DocumentFile
    data: Mapping[str, object] | None
    """Content of the document, in its units; None while no measurement supports it."""
    sidecar: Sidecar


class Record(ABC, Generic[_M]):
    """Measurements of this run and earlier ones; its directories are locked by this process."""

    OWN_ROWS: ClassVar[Mapping[str, str]] = {}
    """Metadata keys that must be equal in all runs of a file, in addition to those of
    `profiler.environment`, mapped to their meaning."""

    def __init__(
        self,
        paths: Mapping[DocumentKind, Path],
        metadata: Metadata,
        *,
        asked: Collection[DocumentKind],
        resume: bool,
        force: bool,
    ) -> None:
        """Open the record of these documents; only those in `asked` are written.

        Raises InputError: a directory cannot be written, another run writes there, existing files
        may not be touched without `--resume` or `--force`, or earlier runs are not comparable.
        """
        self.notes: list[str] = []
        """Messages on existing files and their treatment."""
        self._own: dict[str, _M] = {}
        self._busy = threading.Lock()
        # An error or interruption must not leave a directory locked.
        with ExitStack() as stack:
            # Several files may share a directory, which can be locked only once.
            for folder in dict.fromkeys(path.parent for path in paths.values()):
                # Before locking, since the lock is a file in the directory too.
                _probe(folder)
                lock = Lock(folder)
                stack.callback(lock.release)
                self.notes += [lock.note] if lock.note is not None else []
            # Under the lock, so that no temporary file of another run is removed.
            for document in paths.values():
                remove_leftovers(document)
                remove_leftovers(sidecar_path(document))
            self._files = {kind: DocumentFile.read(kind, path) for kind, path in paths.items()}
            self._asked = [file for kind, file in self._files.items() if kind in asked]
            for file in () if force else self._asked:
                file.check_present(resume=resume)
            described = self._continued(metadata, force=force)
            # One run id for all files, greater than every earlier id.
            runs = [run for file in self._files.values() for run in file.earlier]
            self._run = Run(id=next_run_id(runs, secrets.token_hex(4)), metadata=described)
            self._move_damaged_aside()
            # A killed run may have left sidecars that are newer than their documents.
            if resume:
                self._repair()
            # From here on the record owns the locks.
            self._locks = stack.pop_all()

    def _continued(self, metadata: Metadata, *, force: bool) -> Metadata:
        """Return the metadata of this run; with `--force`, marked as replacing all earlier runs.

        Raises InputError: an earlier run that still counts is not comparable, and `--force` is not
        given.
        """
        if force:
            # Earlier runs no longer count; they remain in the sidecar as history.
            replaces = any(self._before(file) for file in self._asked)
            return {**metadata, REPLACES: True} if replaces else metadata
        for file in self._asked:
            found: dict[str, None] = {}
            for run in counting_runs(self._before(file)):
                if "ok" in {cell.status for cell in self._cells(run)}:
                    found |= dict.fromkeys(self._differences(file.kind, run.metadata, metadata))
            if found:
                raise incomparable(file.path, found)
        return metadata

    @abstractmethod
    def _cells(self, run: Run) -> Sequence[_M]:
        """Return the measurements of a run."""

    def _before(self, file: DocumentFile) -> Sequence[Run]:
        """Return the earlier runs that a file is based on."""
        return file.earlier

    def _differences(self, kind: DocumentKind, earlier: Metadata, now: Metadata) -> list[str]:
        """Return why the cells of two runs may not share a file, one clause each."""
        return comparable(earlier, now, resume=True, own=self.OWN_ROWS)

    @abstractmethod
    def _contents(self, measurement: _M | None = None) -> Iterator[Content]:
        """Yield the requested files that depend on a measurement, or all of them if it is None."""

    @property
    @abstractmethod
    def measurements(self) -> dict[str, _M]:
        """Current measurements by cell key, those of earlier runs included."""

    def _lacking(self, file: DocumentFile) -> str | None:
        """Return a message if a document with correct values lacks samples, else None."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the directory locks; the end of the process releases them too."""
        self._locks.close()

    def missing(self, cells: Iterable[_C]) -> list[_C]:
        """Return the cells without a usable measurement, in order."""
        found = self.measurements
        # Failed and skipped cells are measured again.
        return [cell for cell in cells if cell.key not in found or found[cell.key].status != "ok"]

    def put(self, measurement: _M) -> None:
        """Add a measurement and write the files that depend on it, sidecars first.

        Raises InputError: a file cannot be written; its old content is intact.
        """
        # The watch thread adds the last cell of an aborted run, while the main thread may hang.
        if not self._busy.acquire(timeout=_PATIENCE_S):
            where = self._asked[0].path.parent
            raise InputError(f"{where}: a file is being written for over {_PATIENCE_S:g} s")
        try:
            self._own[measurement.key] = measurement
            for content in self._contents(measurement):
                self._write(content)
        finally:
            self._busy.release()

    def paths(self) -> list[Path]:
        """Return the existing files: documents and their sidecars."""
        return [path for file in self._asked for path in file.present]

    def counts(self, cells: Iterable[Keyed] | None = None) -> Counts:
        """Return the number of measured, failed and skipped cells, of `cells` only if given."""
        found = self.measurements
        keys = found if cells is None else [cell.key for cell in cells if cell.key in found]
        statuses = [found[key].status for key in keys]
        return Counts(statuses.count("ok"), statuses.count("failed"), statuses.count("skipped"))

    def conclude(
        self, sentences: Iterable[str], cells: Iterable[Keyed] | None = None, *, more: str = ""
    ) -> int:
        """Print messages, the paths of the files and the number of cells by status.

        cells : cells to count; None counts all.
        more : text appended to the counts.
        Returns 1 if cells failed, else 0.
        """
        counts = self.counts(cells)
        for sentence in sentences:
            say(sentence)
        for path in self.paths():
            sys.stdout.write(visible(f"{path}\n"))
        sys.stdout.flush()
        ok = format_count(counts.ok, "cell")
        say(f"{ok} measured, {counts.failed} failed, {counts.skipped} skipped{more}")
        return 1 if counts.failed else 0

    def _move_damaged_aside(self) -> None:
        for file in self._asked:
            if file.damage is None:
                continue
            with _sentences():
                target = _damaged_name(sidecar_path(file.path))
                sidecar_path(file.path).rename(target)
            self.notes.append(
                f"{file.damage}; it is kept as {target.name} and its cells are measured again"
            )

    def _repair(self) -> None:
        """Derive documents again that an earlier run left outdated, damaged or missing."""
        for content in self._contents():
            file, data, _ = content
            if data is None:
                continue
            found = read_document(file.path)
            if found == dict(data):
                file.written = data
                lacking = self._lacking(file)
                if lacking is not None:
                    self._write(content)
                    self.notes.append(lacking)
                continue
            state = "was damaged" if file.path.exists() else "was missing"
            if found is not None:
                state = "did not have the values of its samples"
                if file.sidecar is None:
                    state = "had no samples"
            self._write(content)
            self.notes.append(f"{file.path} {state} and was derived again")

    def _write(self, content: Content) -> None:
        file, data, sidecar = content
        described = written(sidecar)
        self._write_file(file, sidecar_path(file.path), described, number_rows=True)
        # A document with unchanged values is not rewritten after every cell.
        if data is not None and file.written != data:
            self._write_file(file, file.path, dict(data))
            file.written = data

    def _write_file(
        self, file: DocumentFile, path: Path, data: dict[str, Any], *, number_rows: bool = False
    ) -> None:
        def tell(path: Path, kept: Path) -> None:
            self.notes.append(f"{path} was kept as {kept.name}")

        with _sentences(path):
            aside = tell if path in file.to_keep else None
            write_json(path, data, number_rows=number_rows, aside=aside)
        file.to_keep = [other for other in file.to_keep if other != path]

"""The files of one measuring run, written after every cell, so that nothing measured is lost.

The sidecars are the truth; documented files are derived from them. Both are replaced atomically,
the sidecar first, so that a killed run leaves at worst a document that lacks its newest cell, and
the next run derives it again. A directory is probed and locked first, what stands in the way is
kept, and a record is continued only where the earlier runs measured the same. Which cells a file
rests on, and what is derived of them, is said by `hardware.record` and `model.record`.
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
# Care for files: a directory is probed and locked, and what stands in the way is kept.


_DAMAGED = ".damaged"
"""What the name of a damaged file that was moved aside ends in, but for a number."""
_LOCK_NAME = ".profiler.lock"


class Lock:
    """Keeps other runs out of a directory until it is released or the process ends."""

    def __init__(self, out: Path, option: str = "--out") -> None:
        """Take the lock of a directory.

        option : that names it.

        Raises
        ------
        OptionError: another run has it.
        """
        self.note: str | None = None
        """Why there is no lock."""
        # refused at once instead of waiting for hours
        self._lock = FileLock(out / _LOCK_NAME, timeout=0, thread_local=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise OptionError(
                f"{option} {out}: another run is writing there; wait for its end, or choose "
                f"another {option}"
            ) from None
        except (NotImplementedError, OSError) as error:  # some cluster file systems have no locks
            self.note = f"{out} cannot be locked ({error}): let no other run write there"

    def release(self) -> None:
        """Let other runs write."""
        self._lock.release()


def _probe(out: Path) -> None:
    """Check that files can be made in a directory, before hours go into what fills them.

    Raises
    ------
    OptionError: the system refuses.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        # a full disk, too, refuses a file only when something is written
        with tempfile.NamedTemporaryFile(dir=out, prefix=".profiler.") as stream:
            stream.write(b"\0" * 4096)
            stream.flush()
    except OSError as error:
        raise OptionError(
            f"--out {out}: files cannot be written there ({error.strerror}); choose another --out "
            "or make it writable"
        ) from None


def read_document(path: Path) -> dict[str, object] | None:
    """Return the content of a documented file, None where it is missing or damaged."""
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
    """Turn an error of the file system into a sentence with the file and the remedy.

    Raises
    ------
    InputError: the file, which is `path` where the system does not name it, cannot be written.
    """
    try:
        yield
    except OSError as error:
        where = path if path is not None else error.filename
        raise InputError(
            f"{where}: the file cannot be written ({error.strerror}); free space there or make it "
            "writable, then the same command with --resume measures what is missing"
        ) from None


# --------------------------------------------------------------------------------------------------
# One documented file with its sidecar: what earlier runs left.


@dataclass(kw_only=True)
class DocumentFile:
    """A documented file with its sidecar: what earlier runs left, and what this one wrote."""

    kind: DocumentKind
    path: Path
    sidecar: Sidecar | None = None
    damage: DocumentError | None = None
    """Why the sidecar cannot be read."""
    written: Mapping[str, object] | None = None
    """Content of the document, where this run knows it."""
    to_keep: list[Path] = field(default_factory=list)
    """What another program wrote: kept under another name when it is replaced."""

    @classmethod
    def read(cls, kind: DocumentKind, path: Path) -> Self:
        """Return what there is of a file.

        Raises
        ------
        DocumentError: its sidecar was written by a newer version, or the system refuses to read it.
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
        """The runs that the sidecar names, oldest first."""
        return self.sidecar.runs if self.sidecar is not None else ()

    @property
    def pair(self) -> tuple[Path, Path]:
        """The document and its sidecar, whether they exist or not."""
        return self.path, sidecar_path(self.path)

    @property
    def present(self) -> list[Path]:
        """What there is of the pair."""
        return [path for path in self.pair if path.exists()]

    @property
    def ours(self) -> bool:
        """Whether the document, or its sidecar, is the work of an earlier run of this command."""
        # what is damaged, or was moved aside for it, was a sidecar of this command
        moved = any(self.path.parent.glob(sidecar_path(self.path).name + _DAMAGED + "*"))
        return self.damage is not None or moved or any(run.id is not None for run in self.earlier)

    def check_present(self, *, resume: bool) -> None:
        """Let a run that is not to replace the file go on only if it goes on with that file.

        Raises
        ------
        InputError: it is something else, or nobody asked to go on.
        """
        if not self.present:
            return
        if not self.ours:
            raise InputError(
                f"{self.present[0]}: this file was not measured by this command; --force replaces "
                "it and keeps it under another name, or choose another --out"
            )
        if not resume:
            raise InputError(
                f"{self.present[0]}: an earlier run wrote this file; --resume measures what is "
                "missing, --force measures again and keeps the earlier samples as history, or "
                "choose another --out"
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


def run_number(run_id: str) -> int:
    """Return the number that the id of a run begins with, 0 where it has none."""
    head = run_id.split("-", 1)[0]
    return int(head) if head.isdecimal() and len(head) < 10 else 0


def next_run_id(runs: Iterable[Run], token: str) -> str:
    """Return an id behind those of earlier runs: the number of the run and a random token.

    Numbers and not times, since the clocks of two machines that share a directory may differ.
    """
    numbers = (run_number(run.id) for run in runs if run.id is not None)
    return f"{1 + max(numbers, default=0)}-{token}"


def incomparable(where: Path, differences: Iterable[str]) -> InputError:
    """Return the error for an earlier run that measured something else."""
    return InputError(
        f"{where}: the earlier run cannot be continued, since it differs in "
        f"{'; '.join(differences)}; --force measures again and keeps the earlier samples as "
        "history, or choose another --out"
    )


# --------------------------------------------------------------------------------------------------
# The record of a run: cells as they come, files after each.


_PATIENCE_S = 10.0

_M = TypeVar("_M", Measurement, ModelMeasurement)


class _Keyed(Protocol):
    """A cell that is to be measured, whatever else it has."""

    @property
    def key(self) -> str:
        """Unique name of the cell in files and messages."""
        ...


_C = TypeVar("_C", bound=_Keyed)


class Counts(NamedTuple):
    """How the cells ended that count now, earlier runs included."""

    ok: int
    failed: int
    skipped: int


class Content(NamedTuple):
    """What a file is to hold now."""

    file: DocumentFile
    data: Mapping[str, object] | None
    """Of the document, in its units; None while nothing supports it."""
    sidecar: Sidecar


class Record(ABC, Generic[_M]):
    """The measurements of one run and those before it; its directories belong to this process."""

    OWN_ROWS: ClassVar[Mapping[str, str]] = {}
    """Keys of the metadata besides those of `profiler.environment`, and their meaning; equal in all
    runs of a file."""

    def __init__(
        self,
        paths: Mapping[DocumentKind, Path],
        metadata: Metadata,
        *,
        asked: Collection[DocumentKind],
        resume: bool,
        force: bool,
    ) -> None:
        """Open the record of these documents, of which those `asked` for will be written.

        Raises
        ------
        InputError: a directory cannot be written, another run writes there, there are files that
            neither `--resume` nor `--force` allows to touch, or earlier runs are not comparable.
        """
        self.notes: list[str] = []
        """Sentences on what was found and done with files of earlier runs."""
        self._own: dict[str, _M] = {}
        self._busy = threading.Lock()
        # an error or an interruption must not leave a directory locked
        with ExitStack() as stack:
            # several files may be in one directory, which can be locked once
            for folder in dict.fromkeys(path.parent for path in paths.values()):
                # first, since the lock is a file in the directory too
                _probe(folder)
                lock = Lock(folder)
                stack.callback(lock.release)
                self.notes += [lock.note] if lock.note is not None else []
            # under the lock: no other run's file in the making is removed
            for document in paths.values():
                remove_leftovers(document)
                remove_leftovers(sidecar_path(document))
            self._files = {kind: DocumentFile.read(kind, path) for kind, path in paths.items()}
            self._asked = [file for kind, file in self._files.items() if kind in asked]
            for file in () if force else self._asked:
                file.check_present(resume=resume)
            described = self._continued(metadata, force=force)
            # one number for all files, behind those of any
            runs = [run for file in self._files.values() for run in file.earlier]
            self._run = Run(id=next_run_id(runs, secrets.token_hex(4)), metadata=described)
            self._move_damaged_aside()
            # a killed run may have left sidecars that are newer than their documents
            if resume:
                self._repair()
            # from here on the record releases the locks
            self._locks = stack.pop_all()

    def _continued(self, metadata: Metadata, *, force: bool) -> Metadata:
        """Return the metadata of this run, with what it says of the runs before it.

        Raises
        ------
        InputError: earlier runs that count are not comparable, and not to be replaced.
        """
        if force:
            # all of it counts no more; it stays in the sidecar
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
        """Return the runs before this one that a file rests on."""
        return file.earlier

    def _differences(self, kind: DocumentKind, earlier: Metadata, now: Metadata) -> list[str]:
        """Return why cells of two runs may not stand in one file, one clause each."""
        return comparable(earlier, now, resume=True, own=self.OWN_ROWS)

    @abstractmethod
    def _contents(self, measurement: _M | None = None) -> Iterator[Content]:
        """Yield the files asked for that rest on a measurement, all of them without one."""

    @property
    @abstractmethod
    def measurements(self) -> dict[str, _M]:
        """The measurements that count now, by cell, those of earlier runs included."""

    def _lacking(self, file: DocumentFile) -> str | None:
        """Return what a file lacks whose values are right, in words; None if nothing."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let other runs write to the directories; the end of the process does so too."""
        self._locks.close()

    def missing(self, cells: Iterable[_C]) -> list[_C]:
        """Return the cells that have no usable measurement yet, in their order."""
        found = self.measurements
        # what failed or was left out is tried again
        return [cell for cell in cells if cell.key not in found or found[cell.key].status != "ok"]

    def put(self, measurement: _M) -> None:
        """Add a measurement and write the files that rest on it, sidecars first.

        Raises
        ------
        InputError: a file cannot be written; its old content is intact.
        """
        # a run that ends early puts its last cell from another thread, while this one may hang
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
        """Return the files that there are: documents and their sidecars."""
        return [path for file in self._asked for path in file.present]

    def counts(self, cells: Iterable[_Keyed] | None = None) -> Counts:
        """Return how many cells, or how many of these, were measured, failed and were left out."""
        found = self.measurements
        keys = found if cells is None else [cell.key for cell in cells if cell.key in found]
        statuses = [found[key].status for key in keys]
        return Counts(statuses.count("ok"), statuses.count("failed"), statuses.count("skipped"))

    def conclude(
        self, sentences: Iterable[str], cells: Iterable[_Keyed] | None = None, *, more: str = ""
    ) -> int:
        """Say sentences, print the paths of the files and say how the cells ended.

        cells : those that are counted, all without them; more : what is said behind the counts.
        Returns 1 if cells failed, else 0.
        """
        counts = self.counts(cells)
        for sentence in sentences:
            say(sentence)
        for path in self.paths():
            sys.stdout.write(visible(f"{path}\n"))
        sys.stdout.flush()
        ok = format_count(counts.ok, "cell")
        say(f"{ok} measured, {counts.failed} failed, {counts.skipped} left out{more}")
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
        """Derive the documents again that an earlier run left behind, damaged or not at all."""
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
        # a document whose values stay the same is not replaced after every cell
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

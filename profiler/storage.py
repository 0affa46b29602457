"""Care for files: a directory is probed and locked, and what stands in the way is kept."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from autopar.documents.json import load_object
from autopar.errors import DocumentError, InputError, OptionError

__all__ = [
    "DAMAGED",
    "Lock",
    "keep_copy",
    "move_aside",
    "probe",
    "read_document",
    "refuse_earlier",
    "remove_leftovers",
    "sentences",
]

DAMAGED = ".damaged"
"""What the name of a damaged file that was moved aside ends in, but for a number."""
_BEFORE = ".before"
_LOCK_NAME = ".profiler.lock"


class Lock:
    """Keeps other runs out of a directory until it is released or the process ends."""

    def __init__(self, out: Path) -> None:
        """Take the lock of a directory.

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
                f"--out {out}: another run is writing there; wait for its end, or choose another "
                "--out"
            ) from None
        except (NotImplementedError, OSError) as error:  # some cluster file systems have no locks
            self.note = f"{out} cannot be locked ({error}): let no other run write there"

    def release(self) -> None:
        """Let other runs write."""
        self._lock.release()


def probe(out: Path) -> None:
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


def _free_name(path: Path, suffix: str) -> Path:
    """Return the first of PATH.suffix, PATH.suffix-1, ... that does not exist."""
    number = 0
    while True:
        found = path.with_name(path.name + suffix + (f"-{number}" if number else ""))
        if not found.exists():
            return found
        number += 1


def move_aside(path: Path) -> Path:
    """Rename a damaged file to a free name; return that name."""
    target = _free_name(path, DAMAGED)
    path.rename(target)
    return target


def keep_copy(path: Path) -> Path:
    """Give a file that is about to be replaced a second, free name; return that name."""
    target = _free_name(path, _BEFORE)
    try:
        target.hardlink_to(path)
    except OSError:  # not every file system has links
        try:
            shutil.copy2(path, target)
        except OSError:
            target.unlink(missing_ok=True)
            raise
    return target


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove the temporary files of a run that was killed while it wrote."""
    for path in paths:
        for leftover in path.parent.glob(f".{path.name}.*.tmp"):
            with suppress(OSError):
                leftover.unlink()


@contextmanager
def sentences(path: Path | None = None) -> Iterator[None]:
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


def refuse_earlier(path: Path, *, ours: bool, resume: bool) -> None:
    """Let a run that is not to replace a file go on only if it goes on with that file.

    Parameters
    ----------
    ours : a run of the same command wrote it.
    resume : what it holds is wanted.

    Raises
    ------
    InputError: it is something else, or nobody asked to go on.
    """
    if not ours:
        raise InputError(
            f"{path}: this file was not measured by this command; --force replaces it and "
            "keeps it under another name, or choose another --out"
        )
    if not resume:
        raise InputError(
            f"{path}: an earlier run wrote this file; --resume measures what is missing, "
            "--force measures again and keeps the earlier samples as history, or choose "
            "another --out"
        )

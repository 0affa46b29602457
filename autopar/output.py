"""Output files of commands: written completely or not at all.

The content is defined by documents and reports; this module only writes it. Devices and pipes are
written in place, since renaming a file to `/dev/null` would replace the device. For a symbolic
link, the target is written. Earlier content is kept as `NAME.bak-1` if the caller passes a callback
that reports it.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import IO

from autopar.errors import OptionError

Aside = Callable[[Path, Path], None]
"""Callback that receives the path of a changed file and the path of its earlier content."""

_OPEN = re.compile(r"/dev/(stdout|stderr|fd/([0-9]{1,4}))")
"""Names of descriptors that are already open."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_PART = ".part"
"""Suffix of temporary names."""
_NAME_BYTES = 100
"""Bytes of the file name that its temporary name repeats; file systems allow 255 bytes."""
_FOLDER: ContextVar[Path | None] = ContextVar("folder", default=None)
"""Folder below which all files must be; None for no restriction."""


class OutsideError(OptionError):
    """A file is not below the only folder that may be written to (`only_below`)."""


@contextlib.contextmanager
def only_below(folder: Path) -> Iterator[None]:
    """Within the block, writing files elsewhere than below `folder` raises OutsideError.

    Symbolic links are resolved. Devices, pipes and open descriptors are not below any folder.
    """
    token = _FOLDER.set(Path(os.path.realpath(folder)))
    try:
        yield
    finally:
        _FOLDER.reset(token)


def is_outside(path: Path | str) -> bool:
    """Return True if `only_below` excludes a path: files there are not written or quoted."""
    folder = _FOLDER.get()
    return folder is not None and not Path(os.path.realpath(path)).is_relative_to(folder)


def refuse_outside(path: Path | str, option: str = "") -> None:
    """Raise OutsideError for a file that `only_below` excludes, with its option if any."""
    folder = _FOLDER.get()
    if folder is None or not (is_outside(path) or _is_special(Path(path))):
        return
    raise OutsideError(
        f"{option} {path}: files are written only below {folder}".lstrip(),
        remedy="Use a path in this folder",
    )


def write_text(path: Path | str, text: str) -> None:
    """Write one file atomically: readers see the old content or the new one, never a part.

    The file is compressed if its name ends in .gz; equal texts give equal bytes. Raises OSError.
    """
    write_files({Path(path): text})


def write_files(
    files: Mapping[Path, str | bytes],
    *,
    aside: Aside | None = None,
    replace: Collection[Path] = (),
) -> None:
    """Write all files or none: no name changes before all content is on disk.

    Texts are written as UTF-8; bytes of file names that are not Unicode are escaped. Raises
    OSError, whose `filename` is the file that could not be written.

    aside : called for each file whose earlier content was kept; None keeps no earlier content
    replace : files whose earlier content is never kept
    """
    made: list[PendingFile] = []
    try:
        # Devices and pipes come last, because writing to them cannot be undone.
        for path in sorted(files, key=_is_special):
            raw = _encoded(path, files[path])
            with _named(path):
                made.append(PendingFile(path))
                made[-1].stream.write(raw)
                made[-1].close()
        for file in made:
            with _named(file.asked):
                file.end(aside=None if file.asked in replace else aside)
    finally:
        # Ctrl-C must not leave a temporary file either.
        for file in made:
            file.drop()


def safe_name(text: str, *, most: int = 80) -> str:
    """Return a text as a part of a file name, without characters special to a shell.

    Texts of more than `most` characters are cut and end with a digest. A text without portable
    letters and digits becomes a digest.
    """
    found = _UNSAFE.sub("-", text).strip("-.")
    if 0 < len(found) <= most:
        return found
    import hashlib  # late: most names are short

    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{found[: most - 9]}-{digest}".lstrip("-")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise OSErrors of the block again with this path, since they may name no file or a folder."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def remove_leftovers(path: Path) -> None:
    """Remove temporary files that a killed process left next to a file."""
    for leftover in path.parent.glob(f"{glob.escape(_part_prefix(path))}*{_PART}"):
        _remove(leftover)


def _remove(part: Path) -> None:
    with contextlib.suppress(OSError):
        part.unlink()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _part_prefix(path: Path) -> str:
    return os.fsencode(f".{path.name}")[:_NAME_BYTES].decode("utf-8", "ignore") + "."


class PendingFile:
    """A file that is written under a temporary name and renamed to its path by `end`.

    A device or a pipe is written to directly.
    """

    def __init__(self, path: Path) -> None:
        refuse_outside(path)
        self.asked = path
        """Path as given."""
        self.path = Path(os.path.realpath(path))
        """Path of the target, if the name is a symbolic link."""
        self.part: Path | None = None
        self.stream: IO[bytes]
        if _is_special(path):
            self.stream = os.fdopen(_opened(path), "wb")
            return
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since a file can only be renamed within one file system. The name is
        # unpredictable, since a link prepared there would be followed.
        name = f"{_part_prefix(self.path)}{os.urandom(8).hex()}{_PART}"
        self.part = self.path.with_name(name)
        import weakref  # late: every command imports this module, and few write

        # Before the file exists: a signal may end the command after any instruction.
        self._unfinished = weakref.finalize(self, _remove, self.part)
        self.stream = open(self.part, "xb", opener=_private)  # noqa: SIM115

    def close(self) -> None:
        """Write the remaining content to the disk."""
        self.stream.flush()
        if self.part is not None:
            os.fsync(self.stream.fileno())  # else a power failure may keep a name without content
        self.stream.close()

    def end(self, name: Path | None = None, *, aside: Aside | None = None) -> Path:
        """Rename the temporary file to its final path and return that path.

        Permissions of an existing file are kept. A device or a pipe has no temporary file.

        With `aside`, an existing file with the same content is left unchanged.

        name : other final path, for content that ended early
        aside : as in `write_files`
        """
        if self.part is None:
            return self.path
        target = self.path if name is None else name
        kept = None
        if aside is not None and target.is_file():
            if _alike(self.part, target):
                return target  # `drop` removes the part
            kept = _kept(target)
        try:
            rights = stat.S_IMODE(target.stat().st_mode)
        except FileNotFoundError:
            # The umask can only be read by setting it.
            umask = os.umask(0)
            os.umask(umask)
            rights = 0o666 & ~umask  # temporary files are private; documents are shared
        self.part.chmod(rights)
        self.part.replace(target)
        if aside is not None and kept is not None:
            aside(self.asked if name is None else name, kept)
        return target

    def drop(self) -> None:
        """Remove the content; has no effect on a file that has ended."""
        with contextlib.suppress(OSError):
            self.stream.close()  # a full disk raises here again
        if self.part is not None:
            self.part.unlink(missing_ok=True)
            self._unfinished.detach()


def _alike(one: Path, other: Path) -> bool:
    import filecmp  # late: few files exist already

    return filecmp.cmp(one, other, shallow=False)


def _kept(path: Path) -> Path:
    """Keep the content of a file as the first free `NAME.bak-N`, and return that path.

    If one of these files already has the content, its path is returned.
    """
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.bak-{number}")
        try:
            # Linking is one step and never overwrites. The file keeps its name until it is
            # replaced.
            os.link(path, kept)
        except FileExistsError:
            if kept.is_file() and _alike(path, kept):
                return kept
            continue
        except OSError:
            if os.path.lexists(kept):
                continue
            import shutil

            # For a file system without links.
            shutil.copy2(path, kept)
        return kept
    raise AssertionError("numbers have no end")


def refuse_clashes(
    outputs: Mapping[str, Path | str | None], inputs: Collection[Path | str]
) -> None:
    """Raise OptionError if an output is an input of the command, or if two outputs are one file.

    outputs : path by option, such as `--json`; None and `-` are no files
    inputs : files that the command reads
    """
    read = {os.path.realpath(path): path for path in inputs}
    seen: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None or str(path) == "-" or _is_special(Path(path)):
            continue
        place = os.path.realpath(path)
        if place in read:
            raise OptionError(
                f"{option} {path}: this is an input file of the command",
                remedy="Use another path",
            )
        if place in seen:
            raise OptionError(
                f"{option} {path}: this is also the path of {seen[place]}",
                remedy="Use another path",
            )
        seen[place] = option


def _encoded(path: Path, content: str | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    # JSON uses the same escape for characters that are not Unicode.
    raw = content.encode("utf-8", "backslashreplace")
    if path.suffix.lower() != ".gz":
        return raw
    import gzip

    # mtime=0, because the header would contain the time of writing.
    return gzip.compress(raw, mtime=0)


def _is_special(path: Path) -> bool:
    """Return True if a path exists and is neither file nor folder: a device, a pipe, a socket.

    Open descriptors, such as `/dev/stdout`, count as well: a new file in place of their target
    would not be the file that the remaining output is written to.
    """
    if _OPEN.fullmatch(str(path)):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _opened(path: Path) -> int:
    """Return a file descriptor for writing to a device, a pipe or an open descriptor."""
    found = _OPEN.fullmatch(str(path))
    if found is None:
        # Without O_CREAT and O_TRUNC: a path that vanished meanwhile must not become a file.
        return os.open(path, os.O_WRONLY)
    if sys.stdout is not None:
        sys.stdout.flush()  # earlier output comes first
    # Do not open it again: that would overwrite the beginning of the file.
    return os.dup({"stdout": 1, "stderr": 2}.get(found[1]) or int(found[2]))

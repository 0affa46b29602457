"""Files that commands write: whole or not at all, through links, and never over what is no file.

What a file holds is its document's or report's business; here it only gets to where it was asked
for. Devices and pipes are written to, since a renamed file in the place of `/dev/null` would end
them; a symbolic link keeps its name, and its target gets the content. Where a command says how it
tells somebody, what was there with another content is kept beside it as `NAME.bak-1`.
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
from pathlib import Path
from typing import IO

from autopar.errors import OptionError

Aside = Callable[[Path, Path], None]
"""Takes the path of a file that gets another content, and where the earlier one is from now on."""

_OPEN = re.compile(r"/dev/(stdout|stderr|fd/([0-9]{1,4}))")
"""Names of what is open already."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_PART = ".part"
"""What temporary names end in."""
_NAME_BYTES = 100
"""Of a file's name, how much its temporary name repeats; file systems end at 255 bytes."""


def write_text(path: Path | str, text: str) -> None:
    """Write one file atomically: readers see the old content or the new, never a part.

    Compressed where the name ends in .gz, equal texts to equal bytes. Raises OSError.
    """
    write_files({Path(path): text})


def write_files(
    files: Mapping[Path, str | bytes],
    *,
    aside: Aside | None = None,
    replace: Collection[Path] = (),
) -> None:
    """Write all files or none: no name changes before every byte is on its disk.

    Texts as UTF-8, what is not Unicode in names of the file system as its escape. Raises OSError,
    whose `filename` is the one of these that could not be written.

    Parameters
    ----------
    aside : keeps what is there with another content, and is told; None replaces it.
    replace : those of the files that are replaced all the same.
    """
    with contextlib.ExitStack() as stack:
        made = []
        special = []
        for path, content in files.items():
            raw = _encoded(path, content)
            if _is_special(path):
                special.append((path, raw))
                continue
            with _named(path):
                made.append(stack.enter_context(begun(path)))
                made[-1].stream.write(raw)
                made[-1].close()
        # what cannot be taken back comes when all else is known to fit
        for path, raw in special:
            with _named(path), begun(path) as file:
                file.stream.write(raw)
                file.close()
        for file in made:
            with _named(file.asked):
                file.end(aside=None if file.asked in replace else aside)


def safe_name(text: str, *, most: int = 80) -> str:
    """Return a text as a part of a file's name, without what means something to a shell.

    One that is longer than `most` characters ends with a digest of all of it; nothing but a digest
    is left of one without letters and digits that every file system has.
    """
    found = _UNSAFE.sub("-", text).strip("-.")
    if 0 < len(found) <= most:
        return found
    import hashlib  # most names are short

    digest = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{found[: most - 9]}-{digest}".lstrip("-")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Say in an error which file it is of: a full disk names none, others a folder above it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def remove_leftovers(path: Path) -> None:
    """Remove what a process that was killed while it wrote a file has left beside it."""
    for leftover in path.parent.glob(f"{glob.escape(_part_prefix(path))}*{_PART}"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def _part_prefix(path: Path) -> str:
    return os.fsencode(f".{path.name}")[:_NAME_BYTES].decode("utf-8", "ignore") + "."


class Begun:
    """A file that gets its name with `end`; until then its content has another beside it.

    A device or a pipe is written to as the content comes.
    """

    def __init__(self, path: Path) -> None:
        self.asked = path
        """As it was named."""
        self.path = Path(os.path.realpath(path))
        """Of the target, where the name is a symbolic link."""
        self.part: Path | None = None
        self.stream: IO[bytes]
        if _is_special(path):
            self.stream = os.fdopen(_opened(path), "wb")
            return
        if self.path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # In the same folder, since a file is renamed inside one file system only; a name that
        # nobody can foresee, since a link that waited there would be followed.
        import tempfile  # every command imports this module, and few write

        prefix = _part_prefix(self.path)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=prefix, suffix=_PART)
        self.part = Path(name)
        self.stream = os.fdopen(handle, "wb")

    def close(self) -> None:
        """Write what is left to the disk."""
        self.stream.flush()
        if self.part is not None:
            os.fsync(self.stream.fileno())  # else a power cut may keep a name without content
        self.stream.close()

    def end(self, name: Path | None = None, *, aside: Aside | None = None) -> Path:
        """Give the content its name, and the rights that the file there had; return the path.

        A file of the same content is left as it is.

        Parameters
        ----------
        name : another one, of what ended early.
        aside : as `write_files` has it.
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
            # the umask can only be read by setting it
            umask = os.umask(0)
            os.umask(umask)
            rights = 0o666 & ~umask  # mkstemp makes private files; documents are shared
        self.part.chmod(rights)
        self.part.replace(target)
        if aside is not None and kept is not None:
            aside(self.asked if name is None else name, kept)
        return target

    def drop(self) -> None:
        """Remove the content; nothing happens to a file that has ended."""
        with contextlib.suppress(OSError):
            self.stream.close()  # a full disk is found out once more here
        if self.part is not None:
            self.part.unlink(missing_ok=True)


def _alike(one: Path, other: Path) -> bool:
    import filecmp  # of files that are there already, which few are

    return filecmp.cmp(one, other, shallow=False)


def _kept(path: Path) -> Path:
    """Return where the content of a file is as well: `NAME.bak-N` of the first number for it.

    A content that is kept already is not kept twice.
    """
    for number in itertools.count(1):
        kept = path.with_name(f"{path.name}.bak-{number}")
        try:
            # one step, and never over what is there; the file itself keeps its name until it is
            # replaced
            os.link(path, kept)
        except FileExistsError:
            if kept.is_file() and _alike(path, kept):
                return kept
            continue
        except OSError:
            if os.path.lexists(kept):
                continue
            import shutil

            # a file system without links
            shutil.copy2(path, kept)
        return kept
    raise AssertionError("numbers have no end")


@contextlib.contextmanager
def begun(path: Path) -> Iterator[Begun]:
    """Give a file to fill and `end`; whatever is not ended is gone afterwards."""
    file = Begun(path)
    try:
        yield file
    # Ctrl-C must leave no temporary file either
    finally:
        file.drop()


def refuse_clashes(
    outputs: Mapping[str, Path | str | None], inputs: Collection[Path | str]
) -> None:
    """Raise OptionError where an output is an input of the command, or two are one file.

    Parameters
    ----------
    outputs : path by option, as `--json`; None and `-` are no files.
    inputs : what the command reads.
    """
    read = {os.path.realpath(path): path for path in inputs}
    seen: dict[str, str] = {}
    for option, path in outputs.items():
        if path is None or str(path) == "-" or _is_special(Path(path)):
            continue
        place = os.path.realpath(path)
        if place in read:
            raise OptionError(f"{option}: {path} is what the command reads; choose another file")
        if place in seen:
            raise OptionError(f"{option}: {path} is the file of {seen[place]} too; choose another")
        seen[place] = option


def _encoded(path: Path, content: str | bytes) -> bytes:
    if isinstance(content, bytes):
        return content
    # JSON has the same escape for what is not Unicode
    raw = content.encode("utf-8", "backslashreplace")
    if path.suffix.lower() != ".gz":
        return raw
    import gzip

    # mtime=0: the header would hold the time of writing
    return gzip.compress(raw, mtime=0)


def _is_special(path: Path) -> bool:
    """Return whether a path is there and neither file nor folder: a device, a pipe, a socket.

    So is what is open already, as `/dev/stdout`: a file in the place of what it leads to would be
    another one than that which the rest is written to.
    """
    if _OPEN.fullmatch(str(path)):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def _opened(path: Path) -> int:
    """Return a descriptor that writes to what is special."""
    found = _OPEN.fullmatch(str(path))
    if found is None:
        # without O_CREAT and O_TRUNC: what vanished meanwhile must not come back as a file
        return os.open(path, os.O_WRONLY)
    if sys.stdout is not None:
        sys.stdout.flush()  # what was printed before comes before
    # not opened again: that would write over the file's beginning
    return os.dup({"stdout": 1, "stderr": 2}.get(found[1]) or int(found[2]))

"""The console that every command shows its results on."""

from __future__ import annotations

import re
import shutil
from typing import TextIO, cast

from rich.console import Console

__all__ = ["WIDTH", "make_console"]

WIDTH = 100
"""Most columns of a result, and those of one that no terminal shows."""
_LEAST = 70


def make_console(stream: TextIO) -> Console:
    """Return a console of at most 100 columns, plain when the stream is no terminal."""
    if stream.isatty():
        width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
        return _Console(file=stream, width=max(width, _LEAST), highlight=False)
    return _Console(file=cast("TextIO", _Trimmed(stream)), width=WIDTH, highlight=False)


class _Console(Console):
    """A console whose reader may leave, as `| head` does."""

    def on_broken_pipe(self) -> None:
        """Leave it to `commands.guarded`: rich itself would end the process with 1."""
        raise BrokenPipeError


class _Trimmed:
    """A stream without the blanks that tables leave at the end of lines."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r" +(?=\n|$)", "", text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

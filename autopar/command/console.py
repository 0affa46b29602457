"""The console of results: at most 100 columns, set by rich on a terminal, in plain text elsewhere.

What a pipe or a file takes needs no colours, and rich takes longer to import than the planner to
search. So plain text is written by hand where nothing has to be wrapped, cut or decoded, and by
rich where something has; both write the same characters. What is set is the matter of `show`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO, cast

from msgspec import field

from autopar.command.run import reader_left, visible
from autopar.records import Record

if TYPE_CHECKING:
    import rich.console
    import rich.table

WIDTH = 100
"""Most columns of a result, and those of one that no terminal shows."""
_LEAST = 70
_PLAIN = re.compile(r"[ -Z^-~\n█░]*")
"""What takes one cell each and means nothing to rich: neither `[` nor a backslash."""
_CODE = re.compile(r":\S+:")
"""What may be the name of a picture to rich, such as `:key:`."""
_STEERING = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables that tell rich to take a pipe for a terminal."""


class Column(Record, kw_only=False):
    """How the cells of a column are set."""

    name: str
    """Marked up, as the cells are."""
    words: bool
    """To the left and over several lines, where numbers stand to the right and are not broken."""


class Table(Record, kw_only=False):
    """Cells in columns under a line of names; what is in a cell is marked up: see `escape`."""

    columns: tuple[Column, ...]
    spaced: bool = False
    """Three blanks between columns instead of two, and what is too long is folded."""
    rows: list[tuple[tuple[str, ...], str | None]] = field(default_factory=list)
    """Cells and their style."""

    def add_row(self, *cells: str, style: str | None = None) -> None:
        """Add a row; columns that it says nothing of stay empty."""
        empty = len(self.columns) - len(cells)
        assert empty >= 0, cells
        self.rows.append((cells + ("",) * empty, style))

    def plain(self, width: int) -> str | None:
        """Return the table as text of at most `width` columns; None where that takes rich."""
        lines = [tuple(column.name for column in self.columns), *(cells for cells, _ in self.rows)]
        if len(lines) < 2 or not all(
            _is_plain(cell) and "\n" not in cell for cell in sum(lines, ())
        ):
            return None
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        if len(widths) == 1 or not self.spaced:
            widths[-1] = max(widths[-1], 1)  # no column is empty, be it of a blank alone
        # of rich's SIMPLE_HEAD: blanks on both sides or one, and a column for the rule between
        gap = 3 if self.spaced else 2
        whole = sum(widths) + gap * (len(widths) - 1)
        if whole > width:
            return None
        set_ = [self._line(cells, widths, " " * gap) for cells in lines]
        set_.insert(1, "─" * whole)
        return "\n".join(set_)

    def _line(self, cells: Sequence[str], widths: Sequence[int], gap: str) -> str:
        return gap.join(
            cell.ljust(width) if column.words else cell.rstrip().rjust(width)
            for cell, width, column in zip(cells, widths, self.columns, strict=True)
        )

    def __rich__(self) -> rich.table.Table:
        """Return the table as rich has it, which asks for it by this name."""
        from rich import box
        from rich.table import Table as RichTable

        padding = (0, 1) if self.spaced else (0, 1, 0, 0)
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, padding=padding, show_edge=False)
        for column in self.columns:
            table.add_column(
                column.name,
                justify="left" if column.words else "right",
                no_wrap=not column.words,
                overflow="fold" if self.spaced else "ellipsis",
            )
        for cells, style in self.rows:
            table.add_row(*cells, style=style)
        return table


class Console:
    """Where results are printed; colours and styles are for terminals."""

    def __init__(self, stream: TextIO, piped: int = WIDTH) -> None:
        self._stream = stream
        self._on_terminal = stream.isatty()
        self._quiet = False
        self.width = piped
        if self._on_terminal:
            import shutil

            columns = shutil.get_terminal_size((WIDTH, 24)).columns
            self.width = max(min(WIDTH, columns), _LEAST)

    @property
    def encoding(self) -> str:
        """That of the stream, in lower case."""
        return (getattr(self._stream, "encoding", None) or "utf-8").lower()

    def print(
        self,
        what: Any = "",
        *,
        style: str | None = None,
        markup: bool = True,
        soft_wrap: bool = False,
    ) -> None:
        """Print a text, a table, or what else rich prints.

        Parameters
        ----------
        markup : whether `[...]` in a text steers; what may hold any is given through `escape`.
        soft_wrap : leave lines as long as they are.
        """
        plain = self._plain(what, soft_wrap) if self._writes else None
        if plain is not None:
            self._write(plain)
            return
        self._rich.print(what, style=style, markup=markup, soft_wrap=soft_wrap)

    def _plain(self, what: object, soft_wrap: bool) -> str | None:
        """Return what is printed as text; None where only rich knows."""
        if isinstance(what, Table):
            return what.plain(self.width)
        if not isinstance(what, str) or not _is_plain(what) or what.endswith("\n"):
            return None
        return what if soft_wrap else _wrapped(what, self.width)

    def _write(self, text: str) -> None:
        if self._quiet:
            return
        try:
            self._stream.write(_trimmed(text + "\n"))
            # sentences on stderr come where they belong, even where both are one
            self._stream.flush()
        except BrokenPipeError:
            self.leave()

    def leave(self) -> None:
        """Print nothing more and go on, since files may come after the reader left."""
        self._quiet = True
        reader_left()

    @cached_property
    def _writes(self) -> bool:
        """Whether plain text may be written by hand."""
        # a notebook is no terminal, and shows what rich prints in its own way
        steered = any(name in os.environ for name in _STEERING) or "IPython" in sys.modules
        return not self._on_terminal and not steered and self.encoding.startswith("utf")

    @cached_property
    def _rich(self) -> rich.console.Console:
        from rich.console import Console as RichConsole
        from rich.text import Text

        outer = self

        class Shown(RichConsole):
            """A console that shows what would steer it, and whose reader may leave."""

            def render_str(self, text: str, **others: Any) -> Text:
                """Return a text without control characters: names may hold any."""
                return super().render_str(visible(text), **others)

            def on_broken_pipe(self) -> None:
                """Go on without the reader, as `| head` has it; rich would end the process."""
                self.quiet = True
                outer.leave()

        stream = self._stream
        if not self._on_terminal:
            stream = cast("TextIO", _Trimmed(self._stream))
        console = Shown(file=stream, width=self.width, highlight=False)
        console.quiet = self._quiet
        return console


def make_console(stream: TextIO, piped: int = WIDTH) -> Console:
    """Return a console of at most 100 columns, plain when the stream is no terminal.

    piped : columns where there is no terminal to say them.
    """
    return Console(stream, piped)


def escape(text: str) -> str:
    """Return a text as it is marked up: `[` is a bracket, and nothing else."""
    if "[" not in text and "\\" not in text:
        return text
    from rich.markup import escape as escaped

    return escaped(text)


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None and _CODE.search(text) is None


def _wrapped(text: str, width: int) -> str | None:
    """Return a text in lines of so many columns, as rich has them; None where a word is longer."""
    lines = []
    for line in text.split("\n"):
        start = taken = 0
        for word in re.finditer(r"\s*\S+\s*", line) if len(line) > width else ():
            length = len(word[0].rstrip())
            if length > width:
                return None
            if taken + length > width:
                lines.append(line[start : word.start()])
                start, taken = word.start(), 0
            taken += len(word[0])
        lines.append(line[start:])
    return "\n".join(lines)


def _trimmed(text: str) -> str:
    """Return a text without the blanks that tables leave at the end of lines."""
    return re.sub(r" +(?=\n|$)", "", text)


class _Trimmed:
    """A stream that is written to without blanks at the end of lines."""

    def __init__(self, stream: TextIO, piped: int = WIDTH) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_trimmed(text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

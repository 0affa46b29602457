"""Console of results, at most 100 columns: rich on a terminal, plain text elsewhere.

Pipes and files need no colours, and importing rich takes longer than a search of the planner. So
this module formats text itself except for terminals, markup, unusual characters, and tables or
words wider than a line, which rich formats. Both write the same characters. Headings, sentences and
tables are made in `show`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TextIO, cast

from msgspec import field

from autopar.command.run import closed_pipe_exit_code, visible
from autopar.records import Record

if TYPE_CHECKING:
    import rich.console
    import rich.table

WIDTH = 100
"""Maximum width of a result in columns, and the width without a terminal."""
_LEAST = 70
"""Minimum width of a result on a narrow terminal, columns."""
_PLAIN = re.compile(r"[ -Z^-~\n█░]*")
"""Characters that take one cell each and have no meaning in rich markup (no `[`, no backslash)."""
_CODE = re.compile(r":\S+:")
"""Possible names of emoji in rich markup, such as `:key:`."""
_STEERING = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables that make rich treat a pipe as a terminal."""


class Column(Record, kw_only=False):
    """Format of the cells of a column."""

    name: str
    """Heading in rich markup, like the cells."""
    words: bool
    """True for text: left-aligned, over several lines. False for numbers: right-aligned, not
    broken."""


class Table(Record, kw_only=False):
    """Table for a console. Headings and cells are rich markup; pass other text through `escape`."""

    columns: tuple[Column, ...]
    spaced: bool = False
    """True for three blanks between columns instead of two, and to wrap long cells instead of
    cutting them."""
    ruled: bool = True
    """True for a line under the headings."""
    rows: list[tuple[tuple[str, ...], str | None]] = field(default_factory=list)
    """Cells and style of each row."""

    def add_row(self, *cells: str, style: str | None = None) -> None:
        """Add a row; missing cells are empty."""
        empty = len(self.columns) - len(cells)
        assert empty >= 0, cells
        self.rows.append((cells + ("",) * empty, style))

    def plain(self, width: int) -> str | None:
        """Return the table as text of at most `width` columns; None if rich is needed."""
        lines = [tuple(column.name for column in self.columns), *(cells for cells, _ in self.rows)]
        if len(lines) < 2 or not all(
            _is_plain(cell) and "\n" not in cell for cell in sum(lines, ())
        ):
            return None
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        if len(widths) == 1 or not self.spaced:
            widths[-1] = max(widths[-1], 1)  # rich never makes an empty column
        # Widths of rich's SIMPLE_HEAD: padding on one or both sides, and one column for the rule.
        gap = 3 if self.spaced else 2
        whole = sum(widths) + gap * (len(widths) - 1)
        if whole > width:
            return None
        set_ = [self._line(cells, widths, " " * gap) for cells in lines]
        if self.ruled:
            set_.insert(1, "─" * whole)
        return "\n".join(set_)

    def _line(self, cells: Sequence[str], widths: Sequence[int], gap: str) -> str:
        return gap.join(
            cell.ljust(width) if column.words else cell.rstrip().rjust(width)
            for cell, width, column in zip(cells, widths, self.columns, strict=True)
        )

    def __rich__(self) -> rich.table.Table:
        """Return the table as a rich table; rich calls this method."""
        from rich import box
        from rich.table import Table as RichTable

        padding: tuple[int, ...] = (0, 1) if self.spaced else (0, 1, 0, 0)
        if not self.ruled:
            # Without a box there is no divider, which takes one column.
            padding = (0, 3 if self.spaced else 2, 0, 0)
        edge = box.SIMPLE_HEAD if self.ruled else None
        table = RichTable(box=edge, pad_edge=False, padding=padding, show_edge=False)  # type: ignore[arg-type]
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
    """Console for results; colours and styles appear only on terminals.

    piped : width in columns if the stream is not a terminal
    """

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
        """Encoding of the stream in lower case."""
        return (getattr(self._stream, "encoding", None) or "utf-8").lower()

    def print(
        self,
        what: Any = "",
        *,
        style: str | None = None,
        markup: bool = True,
        soft_wrap: bool = False,
    ) -> None:
        """Print a text, a table, or any object that rich prints.

        style : rich style of the output, such as `bold`; ignored without a terminal
        markup : True if `[...]` in a text is markup; pass other text through `escape`
        soft_wrap : True to print long lines without breaking them
        """
        plain = self._plain(what, soft_wrap) if self._writes else None
        if plain is not None:
            self._write(plain)
            return
        self._rich.print(what, style=style, markup=markup, soft_wrap=soft_wrap)

    def _plain(self, what: object, soft_wrap: bool) -> str | None:
        """Return the text to print, or None if rich has to format it."""
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
            # Flush to keep the order of stdout and stderr where both are the same file.
            self._stream.flush()
        except BrokenPipeError:
            self.mute()

    def mute(self) -> None:
        """Discard all output after the pipe was closed; the command may still write files."""
        self._quiet = True
        closed_pipe_exit_code()

    @cached_property
    def _writes(self) -> bool:
        """True if plain text may be written without rich."""
        # A notebook is no terminal and displays the output of rich itself.
        steered = any(name in os.environ for name in _STEERING) or "IPython" in sys.modules
        return not self._on_terminal and not steered and self.encoding.startswith("utf")

    @cached_property
    def _rich(self) -> rich.console.Console:
        from rich.console import Console as RichConsole
        from rich.text import Text

        outer = self

        class EscapingConsole(RichConsole):
            """A rich console that escapes control characters and survives a closed pipe."""

            def render_str(self, text: str, **others: Any) -> Text:
                """Return rendered markup with control characters of file and model names
                escaped."""
                return super().render_str(visible(text), **others)

            def on_broken_pipe(self) -> None:
                """Continue after the reader closed the pipe; rich would end the process."""
                self.quiet = True
                outer.mute()

        stream = self._stream
        if not self._on_terminal:
            stream = cast("TextIO", _Trimmed(self._stream))
        console = EscapingConsole(file=stream, width=self.width, highlight=False)
        console.quiet = self._quiet
        return console


def make_console(stream: TextIO, piped: int = WIDTH) -> Console:
    """Return a console of at most 100 columns, plain if the stream is no terminal.

    piped : width in columns without a terminal
    """
    return Console(stream, piped)


def escape(text: str) -> str:
    """Return a text as rich markup in which `[` is a literal bracket."""
    if "[" not in text and "\\" not in text:
        return text
    from rich.markup import escape as escaped

    return escaped(text)


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None and _CODE.search(text) is None


def _wrapped(text: str, width: int) -> str | None:
    """Return a text in lines of at most `width` columns, wrapped like rich.

    Returns None if a word is longer than a line.
    """
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
    """Return a text without the trailing blanks that tables leave on lines."""
    return re.sub(r" +(?=\n|$)", "", text)


class _Trimmed:
    """A stream that removes trailing blanks of lines."""

    def __init__(self, stream: TextIO, piped: int = WIDTH) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(_trimmed(text))

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

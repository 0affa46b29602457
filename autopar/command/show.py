"""Formatting of results: headings, sentences, tables, numbers, plots.

The content is defined in `search.show` and the other reports.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from autopar.command.answers import emit_answer, headed
from autopar.command.console import Column, Console, Table, escape
from autopar.command.run import say_kept
from autopar.documents.json import write_json
from autopar.errors import InstallError, OptionError
from autopar.output import Aside, write_files
from autopar.units import GB

# --------------------------------------------------------------------------------------------------
# Plots of commands, PNG or SVG, in one style; matplotlib is optional.


COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#000000")
"""Palette of Okabe and Ito, distinguishable for colour-blind readers."""
MARKERS = "os^Dvph*"
GRID = "#dddddd"
QUIET = "#555555"
_STYLE = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "autopar",  # the same numbers give the same file
    "svg.fonttype": "none",
}


def require_matplotlib(option: str) -> None:
    """Raise InstallError, which names the option, if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InstallError(
            f"{option} needs matplotlib, which is not installed",
            remedy="Run `pip install 'autopar[plot]'`",
        )


@contextlib.contextmanager
def drawn(option: str) -> Iterator[Any]:
    """Yield the Figure class of matplotlib, and apply the common style until the block ends.

    option : option named in the InstallError without matplotlib
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        require_matplotlib(option)
        raise  # installed but broken
    with mpl.rc_context(_STYLE):
        yield Figure


def save_figure(figure: Any, path: Path, option: str, aside: Aside | None = None) -> None:
    """Write a figure in the format of the file suffix; `aside` as in `autopar.output.write_files`.

    option : option that requested the figure, for errors

    Raises OptionError: the file cannot be written.
    """
    # Draw in memory first, so that a failure leaves no partial file.
    content = io.BytesIO()
    kind = path.suffix.lower().removeprefix(".")
    # A date would make equal plots differ.
    undated = {"Date": None} if kind == "svg" else None
    figure.savefig(content, format=kind, dpi=130, metadata=undated)
    try:
        write_files({path: content.getvalue()}, aside=aside)
    except OSError as error:
        raise OptionError(
            f"{option} {path}: the file cannot be written ({error.strerror or error})",
            remedy="Use another file",
        ) from None


def refuse_file(option: str, folder: str) -> None:
    """Raise OptionError if the folder of an option is a file."""
    if Path(folder).exists() and not Path(folder).is_dir():
        raise OptionError(f"{option} {folder}: expected a folder, got a file")


def save_figures(
    folder: str,
    drawings: Mapping[str, Callable[[Any], Any]],
    formats: Sequence[str],
    aside: Aside | None = None,
) -> list[Path]:
    """Write plots into the folder of `--plot`, in each format, and return the files.

    drawings : file name without suffix -> function that draws with the figure class
    aside : as in `autopar.output.write_files`

    Raises InstallError: matplotlib is not installed. Raises OptionError: a file cannot be written.
    """
    refuse_file("--plot", folder)
    written = []
    with drawn("--plot") as figures:
        for name, draw in drawings.items():
            for kind in formats:
                # Draw again: the layout of a figure changes when it is laid out twice.
                written.append(Path(folder) / f"{name}.{kind}")
                save_figure(draw(figures), written[-1], "--plot", aside)
    return written


# --------------------------------------------------------------------------------------------------
# JSON document of a result


def write_result(
    path: str | None, document: Mapping[str, Any], exit_code: int = 0, *, command: str
) -> bool:
    """Write the answer of `--json`; return True if stdout is free for tables.

    Other content of an existing file is kept as `NAME.bak-N`, and a message reports it.

    path : file, written atomically; `-` for stdout, None for no output
    exit_code : exit code of the command, part of the answer

    Raises OptionError: the file cannot be written.
    """
    if path is None:
        return True
    if path == "-":
        emit_answer(document, exit_code)
        return False
    try:
        aside = say_kept(command)
        write_json(Path(path), headed(document, exit_code), number_rows=True, aside=aside)
    except OSError as error:
        raise OptionError(
            f"--json {path}: the file cannot be written ({error.strerror or error})",
            remedy="Use another path, or - for stdout",
        ) from None
    return True


# --------------------------------------------------------------------------------------------------
# Output on the console that all commands share


_LABEL = 14

OPERATION_NAMES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "all2all": "all-to-all",
    "p2p": "point-to-point",
    "p2p_bidirectional": "point-to-point, both ways",
    "memcopy": "memory copy",
}
"""Display names of operations."""


def print_heading(console: Console, text: str) -> None:
    """Print the title of a section after a blank line."""
    console.print()
    print_plain(console, text, style="bold")


def print_plain(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a line of plain text, wrapped at the width of the console."""
    console.print(escape(text), style=style)


def print_line(console: Console, text: str, *, style: str | None = None) -> None:
    """Print a sentence, wrapped and indented like everything under a heading."""
    for line in wrapped(text, console.width - 2):
        console.print("  " + escape(line), style=style, soft_wrap=True)


def print_note(console: Console, text: str) -> None:
    """Print a sentence that explains the output above it."""
    print_line(console, text, style="dim")


def print_item(console: Console, text: str) -> None:
    """Print an item of a list, wrapped under its first word."""
    item = textwrap.fill(
        text, console.width, initial_indent="  - ", subsequent_indent="    ", break_on_hyphens=False
    )
    console.print(item, markup=False)


def print_pair(console: Console, label: str, text: str) -> None:
    """Print a label and its text, wrapped to the right of the label."""
    for index, line in enumerate(wrapped(text, console.width - 2 - _LABEL)):
        left = label if index == 0 else ""
        console.print(f"  {left:<{_LABEL}}{escape(line)}", soft_wrap=True)


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of a text wrapped at `width`, with percentages and long words unbroken."""
    kept = _SHARE.sub(lambda found: found[0].replace(" ", _FIXED), text)
    lines = textwrap.wrap(kept, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace(_FIXED, " ") for line in lines] or [""]


_SHARE = re.compile(r"(?:[<>] )?[0-9.]+ %")
_FIXED = "\u00a0"
"""No-break space."""


def make_table(
    *columns: str,
    left: int = 1,
    words_last: bool = False,
    spaced: bool = False,
    ruled: bool = True,
) -> Table:
    """Return an empty table; the first `left` columns are text, the others numbers.

    words_last : True if the last column is text as well
    spaced : True for three blanks between columns instead of two, and to wrap long cells
    ruled : True for a line under the headings
    """
    last = len(columns) - 1 if words_last else left
    return Table(
        tuple(
            Column(escape(name), index < left or (words_last and index == last))
            for index, name in enumerate(columns)
        ),
        spaced=spaced,
        ruled=ruled,
    )


def print_table(
    console: Console,
    columns: list[str],
    rows: list[list[str]],
    *,
    left: int = 1,
    styles: Sequence[str | None] = (),
    ruled: bool = True,
) -> None:
    """Print a table without its empty columns.

    left : number of text columns at the left; the others are numbers
    styles : rich style of each row; None or missing for plain
    ruled : True for a line under the headings
    """
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    texts = sum(1 for index in kept if index < left)
    table = make_table(*(columns[i] for i in kept), left=texts, ruled=ruled)
    for row, style in zip_longest(rows, styles):
        table.add_row(*(escape(row[i]) for i in kept), style=style)
    console.print(table)


def format_rate(bytes_per_s: float) -> str:
    """Return a bandwidth in GB/s (1e9 bytes/s) with four significant digits, without the unit."""
    return f"{bytes_per_s / GB:.4g}"

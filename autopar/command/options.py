"""Commands and their help: a field of a dataclass is an option, defined once with `option`.

A command names the dataclasses that its command line fills. This module writes its help and returns
the raw values of its options. `fields` defines options and their values, `dialect` rewrites other
spellings, and `parser` passes the words to typer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.command import run as commands
from autopar.command.aliases import alias_tables
from autopar.command.answers import OUTPUTS, answers_stdout, running, running_now
from autopar.command.dialect import NO_FILE, own_name
from autopar.command.fields import Kind, Row, rows_of
from autopar.output import refuse_clashes, refuse_outside
from autopar.records import Record, replace

if TYPE_CHECKING:
    from autopar.command.parser import DialectCommand

MOST_USED = "Most used"
"""Heading of the most used options; it is placed where the first of them would be."""
REPEATED = "Choices: each of them may be given several times"
"""Heading of the options that `Command.repeats` names."""
HELP_WIDTH = 80
_SCREEN_HEIGHT = 24
"""Lines of the first screen of a help."""
_LEFT, _LEFT_OF_SCREEN, _LEFT_OF_GROUPS = 28, 27, 14
"""Widths of the name column in the help, in columns."""
_ALL = "all"
"""Word after `--help` that requests every option."""


class Command(Record, dict=True):
    """A command line: the dataclasses that it fills, and the introduction of its help."""

    name: str
    intro: str
    """Paragraphs of the introduction."""
    fills: tuple[type, ...] = ()
    """Dataclasses whose fields are the options."""
    usage: str = "[OPTIONS]"
    without: frozenset[str] = frozenset()
    """Names of options of the dataclasses that the command does not have."""
    repeats: tuple[str, ...] = ()
    """Names of options that may be repeated with other values. `read` returns lists of texts, which
    the command converts one at a time."""
    panels: tuple[str, ...] = ()
    """Headings that come first, in this order; the others follow the order of the fields."""
    family: str = ""
    """Family of programs whose options the command knows, a key of `AliasTables.families`."""
    first: tuple[str, ...] | None = None
    """Headings whose options are on the first screen of the help, in addition to the most used
    ones; None: all headings, or the whole help if it is one screen."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Options of the command, ordered by heading."""
        return _sorted(self.fills, self.without, self.panels, self.repeats)

    @property
    def help_text(self) -> str:
        """Full help, options grouped by heading, at most 80 columns wide."""
        return _help_text(f"{self.name} {self.usage}", self.intro, self.rows)

    def help_of(self, words: Sequence[str] = ()) -> str:
        """Return the text of `--help`: the first screen of a long help, one group or one option.

        words : what follows `--help`: a heading or an option; `all` for everything
        """
        word = words[0].lstrip("-").replace("_", "-").lower() if words else ""
        whole = self.help_text
        if word == _ALL or (not word and self.first is None and _is_screen(whole)):
            return whole
        first = self.first
        if first is None:
            known = sorted(self.rows, key=lambda row: not row.most_used)
        else:
            known = [row for row in self.rows if row.most_used or row.panel in first]
        groups = _groups(self.rows)
        if word in groups:
            heading, rows = groups[word]
            return _listed(heading, rows)
        table = {row.name: row for row in self.rows}
        name = own_name(word, table).partition("=")[0]
        if name in table:
            return _spelled(table[name], table)
        said, *others = self.intro.strip().split("\n\n")
        # Show how to start the command if that takes one line.
        commands = ("torchrun ", f"{self.name} ")
        started = [one for one in others if one.startswith(commands) and len(one) <= HELP_WIDTH]
        intro = [said, *started[:1]]
        return _screen(f"{self.name} {self.usage}", intro, known, groups)

    @cached_property
    def typed(self) -> DialectCommand:
        """Typer command that parses the command lines."""
        from autopar.command.parser import typer_command

        return typer_command(self)

    def run(
        self,
        arguments: Sequence[str],
        execute: Callable[[dict[str, Any]], int],
        *,
        interrupted: str = "interrupted",
    ) -> int:
        """Run a command line and return its exit code; an error is one message on stderr.

        A Python caller in this process receives the exception instead.

        execute : function that gets the result of `read` and returns the exit code
        interrupted : message for Ctrl-C
        """

        def call() -> int:
            raw = self.read(arguments, self.warn)
            return 0 if raw is None else execute(raw)

        now = running_now()
        if now is not None and now.asked:
            # Errors go to the caller in this process as well.
            now.command = self.name
            return call()
        with running(self.name) as now:
            now.on_stdout = answers_stdout(arguments)
            return commands.guarded(call, self.warn, interrupted=interrupted)

    def warn(self, text: str) -> None:
        """Write a message to stderr, with the name of the command before it."""
        commands.say(text, command=self.name)

    def read(self, arguments: Sequence[str], say: Callable[[str], None]) -> dict[str, Any] | None:
        """Return the given options by name, as text, bool or list of texts; None if help was
        printed.

        say : receives messages about options without effect

        Raises OptionError: an option is unknown or has no value, a word is missing or superfluous,
        or an output file is also an input.
        """
        from typer import Exit  # late: callers from Python need options, not the parser

        try:
            given = self.typed.make_context(self.name, list(arguments), obj=say).params
        except Exit:
            return None
        _refuse_clashes(given)
        now = running_now()
        if now is not None:
            now.asks(given)
        return given


def _refuse_clashes(raw: Mapping[str, Any]) -> None:
    """Raise OptionError if an output file is among the words that name input files.

    Files inside an input folder are not checked here, because only the command knows them.
    """
    words = [
        (name, word)
        for name, value in raw.items()
        for word in (value if isinstance(value, list) else [value])
        if isinstance(word, str) and word.lower() not in NO_FILE
    ]
    outputs = {f"--{name}": word for name, word in words if name in OUTPUTS}
    for option, word in outputs.items():
        refuse_outside(word, option)
    if outputs:
        inputs = (word for name, word in words if name not in OUTPUTS)
        refuse_clashes(outputs, files_among(inputs))


def files_among(words: Iterable[object]) -> list[str]:
    """Return the words of a typed or stored command line that name existing files."""
    texts = [word for word in words if isinstance(word, str)]
    # CARD.json:NxG names a file as well.
    texts += [word.rpartition(":")[0] for word in texts if ":" in word]
    return [word for word in texts if _is_file(word)]


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # not a valid file name
        return False


@cache
def _sorted(
    fills: tuple[type, ...],
    without: frozenset[str],
    panels: tuple[str, ...],
    repeats: tuple[str, ...],
) -> tuple[Row, ...]:
    named: dict[str, Row] = {}
    for row in (row for cls in fills for row in rows_of(cls)):
        named.setdefault(row.name, row)  # the first definition of an option counts
    found = [
        _repeating(row) if name in repeats else row
        for name, row in named.items()
        if name not in without
    ]
    order = list(dict.fromkeys([*panels, *(row.panel for row in found)]))
    return tuple(sorted(found, key=lambda row: (order.index(row.panel), row.place)))


def _repeating(row: Row) -> Row:
    """Return an option that may be repeated, under a separate heading."""
    return replace(
        row,
        kind="texts",
        panel=REPEATED,
        metavar=row.metavar or "|".join(row.choices) or _VALUES.get(row.kind),
        most_used=False,
    )


# --- help -------------------------------------------------------------------------------------

_VALUES: Mapping[Kind, str] = {
    "int": "N",
    "float": "X",
    "ints": "N[,N]",
    "text": "TEXT",
    "texts": "TEXT",
}


def _help_text(usage: str, intro: str, rows: Sequence[Row]) -> str:
    import shutil
    import textwrap

    terminal = sys.stdout.isatty()
    width = min(HELP_WIDTH, shutil.get_terminal_size().columns) if terminal else HELP_WIDTH
    bold = ("\x1b[1m", "\x1b[0m") if terminal else ("", "")
    lines = [f"usage: {usage}", ""]
    for paragraph in intro.strip().split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width), ""]
    if any(row.flaglike for row in rows):
        # Without numbers in the column of options, which is narrow.
        text = "Options shown without a value are flags; they also take 0 or 1 (off or on)."
        lines += [*textwrap.wrap(text, width), ""]
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(MOST_USED if row.most_used else row.panel, []).append(row)
    for panel, own in panels.items():
        lines.append(f"{bold[0]}{panel}{bold[1]}")
        for row in own:
            lines += _help_lines(row, max(width, 60))
        lines.append("")
    lines += textwrap.wrap(
        "--help prints this. Underscores and hyphens are equivalent, and so are "
        "`--name value`, `--name=value` and `name=value`.",
        width,
    )
    return "\n".join(lines) + "\n"


_SMALL = frozenset(
    {"what", "how", "where", "to", "is", "it", "of", "the", "a", "said", "does", "not"}
)
"""Words of headings that do not name a group of options."""


def _groups(rows: Sequence[Row]) -> dict[str, tuple[str, list[Row]]]:
    """Return word after `--help` -> (heading, options) of every group."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.panel, []).append(row)
    found: dict[str, tuple[str, list[Row]]] = {}
    for panel, own in panels.items():
        words = re.findall(r"[\w-]+", panel.partition(":")[0].lower())
        # `What to check` and `Plan settings ...` become check and plan.
        word = next((one for one in words if one not in _SMALL and one not in found), words[0])
        found[word] = (panel, own)
    return found


def _listed(heading: str, rows: Sequence[Row]) -> str:
    """Return the help of a group of options."""
    lines = [line for row in rows for line in _help_lines(row, HELP_WIDTH)]
    return "\n".join([heading, *lines]) + "\n"


def _spelled(row: Row, table: Mapping[str, Row]) -> str:
    """Return the help of one option with its other spellings."""
    import textwrap

    others = [
        f"--{name}" for name in alias_tables().aliases if own_name(name, table) == row.name != name
    ]
    lines = _help_lines(row, HELP_WIDTH)
    lines += textwrap.wrap(
        f"  also: {' '.join(others)}", HELP_WIDTH, subsequent_indent="  ", break_on_hyphens=False
    )
    return "\n".join([row.panel, *lines[: None if others else -1]]) + "\n"


def _screen(
    usage: str,
    intro: Sequence[str],
    rows: Sequence[Row],
    groups: Mapping[str, tuple[str, Sequence[Row]]],
) -> str:
    """Return the help of the first options that fit on a screen, and the list of all groups."""
    import textwrap

    said = [line for text in intro for line in textwrap.wrap(text, HELP_WIDTH)]
    lines = [f"usage: {usage}", *said, ""]
    # One line names the words after --help.
    room = max(_SCREEN_HEIGHT - len(lines) - len(groups) - 1, 0)
    listed = [_brief(row) for row in rows]
    folded = [
        [f"{left if index == 0 else '':<{_LEFT_OF_SCREEN}}{line}" for index, line in enumerate(own)]
        for left, text in listed
        for own in (textwrap.wrap(text, HELP_WIDTH - _LEFT_OF_SCREEN, break_on_hyphens=False),)
    ]
    for wrapped in folded:
        if len(wrapped) > room:
            break
        lines += wrapped
        room -= len(wrapped)
    lines.append("--help GROUP shows more, --help OPTION its spellings, --help all everything:")
    for word, (_, own) in groups.items():
        names = " ".join(row.label for row in own)
        left = f"  {word}".ljust(_LEFT_OF_GROUPS)
        lines.append(left + _cut(names, HELP_WIDTH - _LEFT_OF_GROUPS))
    return "\n".join(lines) + "\n"


def _brief(row: Row) -> tuple[str, str]:
    """Return name and text of an option on the first screen."""
    value = row.metavar or _VALUES.get(row.kind, "") or "|".join(row.choices)
    left = row.label if row.flaglike or row.positional else f"{row.label} {value}"
    if len(left) + 3 > _LEFT_OF_SCREEN:
        # The help of its group lists all words of a choice.
        left = f"{row.label} NAME" if row.choices else row.label
    text = row.brief or row.help
    default = f" [{row.default_text}]" if row.default_text and row.brief is None else ""
    fits = len(text + default) <= HELP_WIDTH - _LEFT_OF_SCREEN
    return f"  {left} ", text + default if fits else text


def _is_screen(text: str) -> bool:
    return text.count("\n") <= _SCREEN_HEIGHT


def _cut(text: str, width: int) -> str:
    """Return a text of at most `width` characters; longer ones end with ` ...` after a word."""
    if len(text) <= width:
        return text
    return text[: width - 3].rpartition(" ")[0] + " ..."


def _help_lines(row: Row, width: int) -> list[str]:
    import textwrap

    value = row.metavar or "|".join(row.choices) or _VALUES.get(row.kind, "")
    if row.positional:
        left = f"  {row.label}"
    elif row.kind == "switch":
        left = f"  --[no-]{row.name}"
    else:
        left = f"  --{row.name}" + (f" {value}" if row.kind != "flag" else "")
    text = row.help + (f" (formerly --{row.also})" if row.also else "")
    if len(left) > width:
        left = f"  --{row.name} NAME"
        text += f": {', '.join(row.choices)}"
    text += f" [default: {row.default_text}]" if row.default_text else ""
    right = textwrap.wrap(text, width - _LEFT, break_on_hyphens=False)
    pad = " " * _LEFT
    if len(left) + 2 > _LEFT:
        return [left, *(pad + text for text in right)]
    return [left.ljust(_LEFT) + right[0], *(pad + text for text in right[1:])]

"""One dialect for all commands: a field of a dataclass is an option, said once with `option`.

Here are the dialect's grammar and its help; what a field says and which values it takes is in
`fields`, other spellings are in `aliases`, and what a command does is the command's.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Any

from autopar.command import run as commands
from autopar.command.aliases import (
    ALIASES,
    AMBIGUOUS,
    FAMILIES,
    JOINED,
    MANUAL,
    SHORT,
    VALUES,
    Family,
)
from autopar.command.answers import OUTPUTS, answers_stdout, running, running_now
from autopar.command.fields import Kind, Row, given_options, missing, rows_of, unknown, written
from autopar.errors import OptionError
from autopar.output import refuse_clashes
from autopar.records import Record, replace

MOST_USED = "Most used"
"""Heading of the options that say they belong there; it comes where the first of them would."""
REPEATED = "Choices: each of them may be given several times"
"""Heading of the options that `Command.repeats` names."""
HELP_WIDTH = 100
SCREEN_WIDTH = 80
_LEFT, _LEFT_OF_SCREEN, _LEFT_OF_GROUPS = 34, 27, 14
"""Columns of the names in a help."""
_ALL = "all"
"""What is asked for behind `--help` for every option."""


class Command(Record):
    """A command line: which dataclasses it fills, and what its help says before the options."""

    name: str
    intro: str
    """Paragraphs."""
    fills: tuple[type, ...] = ()
    usage: str = "[OPTIONS]"
    without: frozenset[str] = frozenset()
    """Names of options of these dataclasses that the command does not have."""
    repeats: tuple[str, ...] = ()
    """Names of those that may be given several times here, each time another choice: `read` returns
    lists of texts, which the dataclass itself reads one at a time."""
    panels: tuple[str, ...] = ()
    """Headings that come first, in this order; the others follow as the fields do."""
    family: str = ""
    """Whose options of the peers are known to it: a key of `aliases.FAMILIES`."""
    first: tuple[str, ...] | None = None
    """Headings whose options are on the first screen of the help, beside those most used; None: the
    help is shown whole."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Its options by heading."""
        return _sorted(self.fills, self.without, self.panels, self.repeats)

    @property
    def help_text(self) -> str:
        """The help, options grouped by heading, at most 100 columns wide."""
        return _help_text(f"{self.name} {self.usage}", self.intro, self.rows)

    def help_of(self, words: Sequence[str] = ()) -> str:
        """Return what `--help` shows: a long help in one screen, a group or an option of it.

        words : what follows it: a heading or an option; `all` for everything.
        """
        word = words[0].lstrip("-").replace("_", "-").lower() if words else ""
        if word == _ALL or self.first is None:
            return self.help_text
        known = [row for row in self.rows if row.most_used or row.panel in self.first]
        groups = _groups(self.rows)
        if word in groups:
            heading, rows = groups[word]
            return _listed(heading, rows)
        table = {row.name: row for row in self.rows}
        name = _own_name(word, table).partition("=")[0]
        if name in table:
            return _spelled(table[name], table)
        said, *others = self.intro.strip().split("\n\n")
        # how it is started is worth a line
        commands = ("torchrun ", f"{self.name} ")
        started = [one for one in others if one.startswith(commands) and len(one) <= HELP_WIDTH]
        intro = [said, *started[:1]]
        return _screen(f"{self.name} {self.usage}", intro, known, groups)

    def run(
        self,
        arguments: Sequence[str],
        execute: Callable[[dict[str, Any]], int],
        *,
        interrupted: str = "interrupted",
    ) -> int:
        """Return the exit code of a command line; whatever goes wrong is one sentence on stderr.

        Parameters
        ----------
        execute : takes what `read` returns.
        interrupted : what is said of Ctrl-C.
        """

        now = running_now()
        if now is not None and now.asked:
            # of whoever asks in this process are the errors too
            now.command, raw = self.name, self.read(arguments, self.say)
            return 0 if raw is None else execute(raw)

        def call() -> int:
            raw = self.read(arguments, self.say)
            return 0 if raw is None else execute(raw)

        with running(self.name) as now:
            now.on_stdout = answers_stdout(arguments)
            return commands.guarded(call, self.say, interrupted=interrupted)

    def say(self, text: str) -> None:
        """Write a sentence to stderr, after the name of the command."""
        commands.say(text, command=self.name)

    def read(self, arguments: Sequence[str], say: Callable[[str], None]) -> dict[str, Any] | None:
        """Return option name -> text, bool or list of texts of what is given; None after the help.

        say : takes sentences on options that do nothing.

        Raises
        ------
        OptionError: an option is unknown or has no value, a word is missing or too much, a file
            to write is one that is read.
        """
        # before any check: help is for command lines that are not right yet
        place = next((i for i, word in enumerate(arguments) if word in _HELP), None)
        if place is not None:
            every = arguments[place] == "--help-all"
            sys.stdout.write(self.help_of([_ALL] if every else arguments[place + 1 : place + 2]))
            return None
        normal, notices = normalise(arguments, self.rows, FAMILIES[self.family])
        for notice in notices:
            say(notice)
        found = _taken(self.rows, normal)
        given = given_options(self.rows, {row.name: found.get(row.name) for row in self.rows})
        _refuse_clashes(given)
        now = running_now()
        if now is not None:
            now.asks(given)
        return given


_HELP = ("--help", "-h", "--help-all")


def _refuse_clashes(raw: Mapping[str, Any]) -> None:
    """Raise OptionError where a file to write is one of the words that name files to read.

    What stands in a folder that is read is known to the command alone.
    """
    words = [
        (name, word)
        for name, value in raw.items()
        for word in (value if isinstance(value, list) else [value])
        if isinstance(word, str) and word.lower() not in _NO_FILE
    ]
    outputs = {f"--{name}": word for name, word in words if name in OUTPUTS}
    if outputs:
        inputs = (word for name, word in words if name not in OUTPUTS)
        refuse_clashes(outputs, files_among(inputs))


def files_among(words: Iterable[object]) -> list[str]:
    """Return the words of a command line, or of a stored one, that name files which are there."""
    texts = [word for word in words if isinstance(word, str)]
    # CARD.json:NxG names a file, too
    texts += [word.rpartition(":")[0] for word in texts if ":" in word]
    return [word for word in texts if _is_file(word)]


def _is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # no name that a file could have
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
        named.setdefault(row.name, row)  # a command's own comes first, and hides another's
    found = [
        _repeating(row) if name in repeats else row
        for name, row in named.items()
        if name not in without
    ]
    order = list(dict.fromkeys([*panels, *(row.panel for row in found)]))
    return tuple(sorted(found, key=lambda row: (order.index(row.panel), row.place)))


def _repeating(row: Row) -> Row:
    """Return an option that may be given several times, under a heading of its own."""
    return replace(
        row,
        kind="texts",
        panel=REPEATED,
        metavar=row.metavar or "|".join(row.choices) or _VALUES.get(row.kind),
        most_used=False,
    )


# --- command lines ----------------------------------------------------------------------------

_ON, _OFF = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_OVERRIDE = re.compile(r"\+{0,2}((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)=(.*)", re.DOTALL)
_NO_FILE = frozenset({"", "none", "null"})
"""What peers write for a file that is not given."""


def normalise(
    arguments: Sequence[str], rows: Sequence[Row], family: Family = FAMILIES[""]
) -> tuple[list[str], list[str]]:
    """Return (arguments in the spelling of `rows`, notices about options that do nothing).

    Raises
    ------
    OptionError
        On an unknown option (with the nearest known one) or a missing value.
    """
    table = {row.name: row for row in rows}
    result: list[str] = []
    notices: list[str] = []
    queue, switches = _without_switches([_with_two_hyphens(word, table) for word in arguments])
    names = {_own_name(name, table, family) for name, _ in map(_split, queue) if name is not None}
    said: dict[str, tuple[str, str]] = {}
    # files of a model that nobody names: the sizes are all that is said of it
    unnamed = names & _OF_FILES and "model" not in names
    unused = {} if unnamed else _unused_sizes(switches)
    while queue:
        token = queue.pop(0)
        written, value = _split(token)
        if written is None:
            result.append(token)
            continue
        name, _, implied = _own_name(written, table, family).partition("=")
        if implied:
            if value is None and queue and _is_switched(queue[0]):
                value = queue.pop(0)
            if value is not None and not _is_switched(value):
                raise OptionError(f"--{written}: takes no value; --{name} does")
            if value is not None and value.lower() in _OFF:
                continue
            value = implied
        row = table.get(name)
        negated = row is None and table.get(name.removeprefix("no-"), _NO_ROW).kind == "switch"
        if negated:
            row = table[name.removeprefix("no-")]
        if row is None:
            _take_foreign(written, name, value, queue, family, table, notices)
            continue
        if row.flaglike:
            value = _take_flag(row, written, value, queue, negated)
            if value is None:
                continue
            _refuse_second(row, written, value, said)
            if row.kind == "switch":
                result.append(f"--{row.name}" if value in _ON else f"--no-{row.name}")
            elif value in _ON and f"--{row.name}" not in result:
                result.append(f"--{row.name}")
            continue
        value = _take_value(row, written, value, queue)
        why = next((unused[one] for one in _meanings(row, written) if one in unused), None)
        if why is not None:
            notices.append(f"--{written} {value} is not used: {why}")
            continue
        if row.kind != "texts":
            _refuse_second(row, written, value, said)
        if not row.positional:
            result += [f"--{row.name}", value]
        elif value.lower() not in _NO_FILE:
            result.append(value)
    return result, notices


def _with_two_hyphens(word: str, table: Mapping[str, Row]) -> str:
    """Return `-tp` and `-o` as options; a negative number and what nobody knows stay."""
    found = re.fullmatch(r"-([A-Za-z][\w-]*)(=.*)?", word, re.DOTALL)
    if found is None:
        return word
    name = found[1].replace("_", "-").lower()
    if SHORT.get(name, name) not in table and not ALIASES.keys() & {name, SHORT.get(name)}:
        return word
    return f"--{SHORT.get(name, found[1])}{found[2] or ''}"


def _refuse_second(row: Row, written: str, value: str, said: dict[str, tuple[str, str]]) -> None:
    """Raise OptionError where an option was given another value before; the same is harmless."""
    before, old = said.setdefault(row.name, (written, value))
    if old == value:
        return
    both = f", or --{row.name} {old},{value} for both" if row.kind == "ints" else ""
    raise OptionError(
        f"--{written} {value}: --{before} {old} was given before, and there can be one; leave one "
        f"of them out{both}"
    )


_OF_FILES = {"time-profiling-path", "memory-profiling-path"}
"""Options that name measured files of a model."""


def _without_switches(arguments: Sequence[str]) -> tuple[list[str], dict[str, bool]]:
    """Return the arguments without `MANUAL` switches, and these with what they say."""
    queue, left = list(arguments), list[str]()
    switches: dict[str, bool] = {}
    while queue:
        token = queue.pop(0)
        written, value = _split(token)
        name = (written or "").replace("_", "-").lower()
        if name not in MANUAL:
            left.append(token)
            continue
        if value is None:
            # alone it is a flag that is on
            value = queue.pop(0) if queue and _is_truth(queue[0]) else "1"
        if not _is_truth(value):
            raise OptionError(f"--{written}: expected 0 or 1, got {value!r:.60}")
        switches[name] = value.lower() in _ON
    return left, switches


def _unused_sizes(switches: Mapping[str, bool]) -> dict[str, str]:
    """Return the options of sizes that the model's own stand in for, each with why."""
    used = {name for switch, on in switches.items() if on for name in MANUAL[switch]}
    return {
        name: f"--{switch.replace('-', '_')} 0 takes the model's own"
        for switch, on in switches.items()
        if not on
        for name in MANUAL[switch]
        if name not in used
    }


def _meanings(row: Row, written: str) -> tuple[str, ...]:
    """Return the names that an option has here and elsewhere: `--seq-length` may be `--seq`."""
    name = written.replace("_", "-").lower()
    return (row.name, name, *ALIASES.get(name, ()))


def _own_name(written: str, table: Mapping[str, Row], family: Family = FAMILIES[""]) -> str:
    """Return what the option is called here, or what is written where it is not known.

    Of `--parallelism.tensor_parallel_degree` the group may be left out.
    """
    name = written.replace("_", "-").lower()
    for spelling in (name, name.rpartition(".")[2]):
        # neither a command's own name is an alias there, nor what the command says of peers
        if spelling in table or _is_foreign(spelling, family):
            return spelling
        if _may_mean(spelling, table):
            return spelling
        for target in ALIASES.get(spelling, ()):
            if target.partition("=")[0] in table:
                return target
    return name


def _is_foreign(name: str, family: Family) -> bool:
    tables = (family.planned, family.refused, family.only_one)
    return any(name in table for table in tables) or _ignored(name, family) is not None


def _may_mean(name: str, table: Mapping[str, Row]) -> tuple[tuple[str, str], ...]:
    """Return the options that a name may mean alike, each with what it counts; maybe none."""
    found = AMBIGUOUS.get(name, ())
    return found if all(one in table for one, _ in found) else ()


def own_names(raw: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return options by the names that `rows` have today; what is not known keeps its own."""
    table = {row.name: row for row in rows}
    return {_own_name(name, table): value for name, value in raw.items()}


def _take_foreign(
    written: str,
    name: str,
    value: str | None,
    queue: list[str],
    family: Family,
    table: Mapping[str, Row],
    notices: list[str],
) -> None:
    """Leave out an option of a peer with its value, or raise OptionError."""
    following = value if value is not None else next(iter(queue), "")
    ignored = _ignored(name, family)
    if ignored is not None:
        is_flag = ignored in family.flags
        is_value = _is_truth(following) if is_flag else not following.startswith("--")
        if value is None and queue and is_value:
            queue.pop(0)
            while name in family.lists and queue and not queue[0].startswith("--"):
                queue.pop(0)
        notices.append(f"--{written} is accepted and ignored: {family.ignored[ignored]}")
        return
    if name in family.only_one:
        if value is None and queue:
            queue.pop(0)
        if following not in ("1", "-1"):
            raise OptionError(
                f"--{name}: {family.only_one[name]}, so expected 1, got {following!r:.60}"
            )
        return
    if name in family.planned and "pin" in table:
        number = following if re.fullmatch(r"[0-9]{1,9}", following) else "N"
        remedy = family.planned[name].format(n=number)
        raise OptionError(f"--{written}: not an option, because the search finds it; {remedy}")
    if name in family.refused:
        raise OptionError(f"--{written}: not an option, because {family.refused[name]}")
    either = _may_mean(name, table)
    if either:
        number = f" {following}" if following and not following.startswith("--") else ""
        ways = " or ".join(f"--{one}{number} ({what})" for one, what in either)
        raise OptionError(f"--{written}: is it {ways}? say which")
    raise unknown(written, name, list(table.values()))


def _ignored(name: str, family: Family) -> str | None:
    """Return the key of `family.ignored` that an option has, itself or by how it begins."""
    if name in family.ignored:
        return name
    return next((key for key in family.ignored if key.endswith("-") and name.startswith(key)), None)


def _take_flag(
    row: Row, written: str, value: str | None, queue: list[str], negated: bool
) -> str | None:
    """Return `1` or `0` of a flag; None where its value says that it is not given."""

    def own(text: str) -> str:
        return VALUES.get((row.name, text), text)

    if value is None and queue and _is_truth(own(queue[0])):
        value = queue.pop(0)
    if value is not None and row.off is not None and value == str(row.off):
        return None
    word = own(value).lower() if value is not None else "1"
    if word not in _ON | _OFF:
        raise OptionError(f"--{written}: expected 0 or 1, got {value!r:.60}")
    return "1" if (word in _ON) != negated else "0"


def _take_value(row: Row, written: str, value: str | None, queue: list[str]) -> str:
    if value is None:
        # a single hyphen may begin a negative number
        if not queue or queue[0].startswith("--"):
            if row.alone is not None:
                return row.alone
            raise OptionError(f"--{written}: a value is missing; it takes: {row.help}")
        value = queue.pop(0)
        # A shell list such as `--layernum_list 24 24` is one list of two numbers.
        while row.kind == "ints" and queue and queue[0].isdigit():
            value += "," + queue.pop(0)
        while written.replace("_", "-").lower() in JOINED and queue and queue[0][:1] != "-":
            value += "+" + queue.pop(0)
    name = written.replace("_", "-").lower()
    value = value.replace(",", "+") if name in JOINED else value
    for spelled in (name, name.rpartition(".")[2], row.name):
        for word in (value, value.lower()):
            if (spelled, word) in VALUES:
                return VALUES[spelled, word]
    return value


def _split(token: str) -> tuple[str | None, str | None]:
    """Return (name, value) of `--name`, `--name=value` and `group.name=value`."""
    if token.startswith("--") and len(token) > 2:
        name, equals, value = token[2:].partition("=")
        return name, value if equals else None
    match = _OVERRIDE.fullmatch(token)
    return (match[1], match[2]) if match else (None, None)


def _is_switched(text: str) -> bool:
    return text.lower() in _ON | _OFF


def _is_truth(text: str) -> bool:
    """Return whether the word after a flag is its value, be it a wrong integer."""
    return text.lower() in _ON | _OFF or re.fullmatch(r"[+-]?[0-9]+", text) is not None


_NO_ROW = Row("", "", "text", "", "")


def _taken(rows: Sequence[Row], arguments: Sequence[str]) -> dict[str, Any]:
    """Return option name -> text, bool or list of texts of normalised arguments.

    Nothing is left to read but names as the rows have them, and values behind them as words of
    their own; a library that reads command lines takes longer to import than most searches take.
    What an option or a flag says last is what it says, a word that repeats says all of it.

    Raises
    ------
    OptionError: a word has no place, or a place has no word.
    """
    valued = {f"--{row.name}": row for row in rows if not row.positional and not row.flaglike}
    flags = {f"--{row.name}": (row.name, True) for row in rows if row.flaglike}
    flags |= {f"--no-{row.name}": (row.name, False) for row in rows if row.kind == "switch"}
    found: dict[str, Any] = {}
    words: list[str] = []
    queue, literal = deque(arguments), False
    while queue:
        token = queue.popleft()
        if literal or token == "-" or token[:1] != "-":
            words.append(token)
        elif token == "--":
            literal = True  # what follows is no option, whatever it begins with
        elif token in valued:
            row = valued[token]
            if row.kind == "texts":
                found.setdefault(row.name, []).append(queue.popleft())
            else:
                found[row.name] = queue.popleft()
        elif token in flags:
            name, found[name] = flags[token][0], flags[token][1]
        else:
            raise OptionError(f"{token}: this option is unknown; see --help")
    places = [row for row in rows if row.positional]
    # a place that takes every word is the last one
    if len(words) > len(places) and not any(row.kind == "texts" for row in places):
        remedy = f"give one {places[-1].label}" if places else "options begin with --"
        extra = words[len(places)]
        raise OptionError(f"{extra!r:.60}: this word is too much; {remedy}, see --help")
    for row in places[len(words) :]:
        if row.default is MISSING:
            raise missing(row)
    for index, row in enumerate(places[: len(words)]):
        found[row.name] = words[index:] if row.kind == "texts" else words[index]
    return found


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
        "--help shows this. Underscores and hyphens mean the same, and so do `--name value`, "
        "`--name=value` and `name=value`.",
        width,
    )
    return "\n".join(lines) + "\n"


_SMALL = frozenset(
    {"what", "how", "where", "to", "is", "it", "of", "the", "a", "said", "does", "not"}
)
"""Words of headings that tell none from another."""


def _groups(rows: Sequence[Row]) -> dict[str, tuple[str, list[Row]]]:
    """Return heading and options of every group, by the word that asks for it."""
    panels: dict[str, list[Row]] = {}
    for row in rows:
        panels.setdefault(row.panel, []).append(row)
    found: dict[str, tuple[str, list[Row]]] = {}
    for panel, own in panels.items():
        words = re.findall(r"[\w-]+", panel.partition(":")[0].lower())
        # `What to check` and `What the plan does not say` are check and plan
        word = next((one for one in words if one not in _SMALL and one not in found), words[0])
        found[word] = (panel, own)
    return found


def _listed(heading: str, rows: Sequence[Row]) -> str:
    """Return a group of options."""
    lines = [line for row in rows for line in _help_lines(row, HELP_WIDTH)]
    return "\n".join([heading, *lines]) + "\n"


def _spelled(row: Row, table: Mapping[str, Row]) -> str:
    """Return one option, and in which other words it is taken."""
    import textwrap

    others = [f"--{name}" for name in ALIASES if _own_name(name, table) == row.name != name]
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
    """Return the options that most questions take, and which groups there are besides."""
    import textwrap

    said = [line for text in intro for line in textwrap.wrap(text, SCREEN_WIDTH)]
    lines = [f"usage: {usage}", *said, ""]
    for row in rows:
        value = row.metavar or _VALUES.get(row.kind, "") or "|".join(row.choices)
        left = row.label if row.flaglike or row.positional else f"{row.label} {value}"
        if len(left) + 3 > _LEFT_OF_SCREEN:
            # all words of a choice are in its group
            left = f"{row.label} NAME" if row.choices else row.label
        left = f"  {left} ".ljust(_LEFT_OF_SCREEN)
        room = SCREEN_WIDTH - len(left)
        text = row.brief or row.help
        default = f" [{_default(row)}]" if _default(row) and row.brief is None else ""
        text += default if len(text + default) <= room else ""
        lines.append(left + _cut(text, room))
    lines.append("--help GROUP shows more, --help OPTION its spellings, --help all everything:")
    for word, (_, own) in groups.items():
        names = " ".join(row.label for row in own)
        left = f"  {word}".ljust(_LEFT_OF_GROUPS)
        lines.append(left + _cut(names, SCREEN_WIDTH - _LEFT_OF_GROUPS))
    return "\n".join(lines) + "\n"


def _cut(text: str, width: int) -> str:
    """Return the first words of a text, as many as fit."""
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
    shown = _default(row)
    text = row.help + (f" (formerly --{row.also})" if row.also else "")
    text += f" [default: {shown}]" if shown else ""
    right = textwrap.wrap(text, width - _LEFT, break_on_hyphens=False)
    pad = " " * _LEFT
    if len(left) + 2 > _LEFT:
        return [left, *(pad + text for text in right)]
    return [left.ljust(_LEFT) + right[0], *(pad + text for text in right[1:])]


def _default(row: Row) -> str:
    """Return the default as it is typed; nothing where there is none to speak of."""
    value = row.default
    if row.shown is not None:
        return row.shown
    if value is None or value is MISSING or value == () or row.kind == "flag":
        return ""
    if row.kind == "switch":
        return "on" if value else "off"
    if isinstance(value, tuple) and row.kind != "choice":
        return ",".join(map(str, value))
    return str(written(row, value))

"""One dialect for all commands: a field of a dataclass is an option, said once with `option`.

Type and default of the field are those of the option; its help, its heading and what it accepts
are the field's metadata. Here are the dialect's grammar, its checks and its help; what a command
does is the command's, other spellings are in `aliases`.
"""

from __future__ import annotations

import dataclasses
import keyword
import math
import re
import sys
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from autopar.command import run as commands
from autopar.command.aliases import ALIASES, FAMILIES, VALUES, Family
from autopar.errors import OptionError, did_you_mean

__all__ = [
    "HELP_WIDTH",
    "MOST_USED",
    "Command",
    "Kind",
    "Row",
    "convert",
    "given_options",
    "make",
    "normalise",
    "option",
    "read_values",
    "rows_of",
    "validate",
    "words_of",
    "written",
]

Kind = Literal["int", "float", "text", "choice", "ints", "texts", "flag", "switch"]
"""`flag`: off unless given; `switch`: has a `--no-` form; `ints`: comma list; `texts`: repeats."""

MOST_USED = "Most used"
"""Heading of the options that say they belong there; it comes where the first of them would."""
HELP_WIDTH = 100
_LEFT = 34
"""Columns of the names in a help."""
_KEY = "option"
"""Of the metadata of a field."""
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Row:
    """One option as commands see it: what a field says, with the name, kind and default of it."""

    name: str
    """As it is written, without the two hyphens."""
    field: str
    kind: Kind
    help: str
    panel: str
    default: Any = None
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Accepted word -> value."""
    low: float | None = None
    """Smallest accepted number."""
    above: float | None = None
    """The number must exceed this."""
    high: float | None = None
    scale: float = 1.0
    """Factor from the unit of the command line to the base unit of the field; so are the bounds."""
    off: int | None = None
    """A number that peers write for `not given`."""
    expects: str | None = None
    """What is expected, instead of the words for its bounds; `{low}`, `{above}`, `{high}` are."""
    parse: Callable[[str], Any] | None = None
    """Reads a text that is no plain number, word or list of them."""
    shown: str | None = None
    """The default in words; None: the value; empty: not shown."""
    metavar: str | None = None
    most_used: bool = False
    positional: bool = False
    place: int = 0
    """Within its panel, lower numbers first."""

    @property
    def key(self) -> str:
        """The name as a Python identifier."""
        key = self.name.replace("-", "_")
        return f"{key}_" if keyword.iskeyword(key) else key

    @property
    def label(self) -> str:
        """The name as the command line and its help have it: `--name`, of a word `NAME`."""
        return (self.metavar or self.name.upper()) if self.positional else f"--{self.name}"

    @property
    def flaglike(self) -> bool:
        """True when it needs no value."""
        return self.kind in ("flag", "switch")


def option(default: Any = MISSING, *, help: str, panel: str = "", **how: Any) -> Any:
    """Return a field of a dataclass that is an option.

    Parameters
    ----------
    default : of the field, in base units; without one the option has to be given.
    help, panel : what the help says, and under which heading.
    how : `name` where it is not that of the field, `switch` for a flag that is off and has a
        `--no-` form, and what `Row` says of `choices` (words, or a mapping of words to values; a
        Literal has its own), `low`, `above`, `high`, `scale`, `off`, `expects`, `parse`, `shown`,
        `metavar`, `most_used`, `positional` and `place`. `between` has `low` and `high` of what is
        counted, and `of` its name, for errors such as `expected 1 to 9 steps`.
    """
    said = {"help": help, "panel": panel, **how}
    if "between" in said:
        said["low"], said["high"] = said.pop("between")
        said["expects"] = f"{{low}} to {{high}} {said.pop('of', '')}".rstrip()
    return dataclasses.field(default=default, metadata={_KEY: said})


def rows_of(cls: type) -> tuple[Row, ...]:
    """Return the options that the fields of a dataclass are, in their order."""
    if cls not in _ROWS:
        _ROWS[cls] = _rows(cls)
    return _ROWS[cls]


_ROWS: dict[type, tuple[Row, ...]] = {}


def _rows(cls: type) -> tuple[Row, ...]:
    # annotations are texts; those of fields that are no options may name what is not imported
    space = vars(sys.modules[cls.__module__])
    return tuple(
        _row(field, field.type if not isinstance(field.type, str) else eval(field.type, space))
        for field in dataclasses.fields(cls)
        if _KEY in field.metadata
    )


def _row(field: dataclasses.Field[Any], hint: Any) -> Row:
    said = dict(field.metadata[_KEY])
    if get_origin(hint) in (Union, types.UnionType):
        # None only says that the option may be absent
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    choices = said.pop("choices", get_args(hint) if get_origin(hint) is Literal else ())
    if not isinstance(choices, Mapping):
        choices = {str(choice): choice for choice in choices}
    # what is on by default needs a form that turns it off
    has_no_form = said.pop("switch", field.default is not False)
    kind: Kind = "text"
    if hint is Path and "parse" not in said:
        said["parse"] = Path
    if "parse" in said:
        if said.get("positional") and get_origin(hint) is tuple:
            kind = "texts"  # every word of the command line; other lists are one text
    elif choices:
        kind = "choice"
    elif hint is bool:
        kind = "switch" if has_no_form else "flag"
    elif hint in (int, float):
        kind = "int" if hint is int else "float"
    elif get_origin(hint) is tuple:
        kind = "ints" if get_args(hint)[0] is int else "texts"
    name = said.pop("name", None) or field.name.replace("_", "-")
    return Row(
        name=name, field=field.name, kind=kind, default=field.default, choices=choices, **said
    )


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command line: which dataclasses it fills, and what its help says before the options."""

    name: str
    intro: str
    """Paragraphs."""
    fills: tuple[type, ...] = ()
    usage: str = "[OPTIONS]"
    without: frozenset[str] = frozenset()
    """Names of options of these dataclasses that the command does not have."""
    panels: tuple[str, ...] = ()
    """Headings that come first, in this order; the others follow as the fields do."""
    family: str = ""
    """Whose options of the peers are known to it: a key of `aliases.FAMILIES`."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """Its options by heading."""
        return _sorted(self.fills, self.without, self.panels)

    @property
    def help_text(self) -> str:
        """The help, options grouped by heading, at most 100 columns wide."""
        return _help_text(f"{self.name} {self.usage}", self.intro, self.rows)

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

        def call() -> int:
            raw = self.read(arguments, self.say)
            return 0 if raw is None else execute(raw)

        return commands.guarded(call, self.say, interrupted=interrupted)

    def say(self, text: str) -> None:
        """Write a sentence to stderr, after the name of the command."""
        commands.say(text, command=self.name)

    def read(self, arguments: Sequence[str], say: Callable[[str], None]) -> dict[str, Any] | None:
        """Return option name -> text, bool or list of texts of what is given; None after the help.

        say : takes sentences on options that do nothing.

        Raises
        ------
        OptionError: an option is unknown or has no value, a word is missing or too much.
        """
        # before any check: help is for command lines that are not right yet
        if {"--help", "-h"} & set(arguments):
            sys.stdout.write(self.help_text)
            return None
        normal, notices = normalise(arguments, self.rows, FAMILIES[self.family])
        for notice in notices:
            say(notice)
        _check_words(self.rows, normal)
        found = self._reader.main(args=normal, prog_name=self.name, standalone_mode=False)
        return given_options(self.rows, {row.name: found[row.key] for row in self.rows})

    @cached_property
    def _reader(self) -> Any:
        # milliseconds to make: programs and tests that read many command lines make it once
        return _reader(self.name, self.rows)


@cache
def _sorted(
    fills: tuple[type, ...], without: frozenset[str], panels: tuple[str, ...]
) -> tuple[Row, ...]:
    named: dict[str, Row] = {}
    for row in (row for cls in fills for row in rows_of(cls)):
        named.setdefault(row.name, row)  # a command's own comes first, and hides another's
    found = [row for name, row in named.items() if name not in without]
    order = list(dict.fromkeys([*panels, *(row.panel for row in found)]))
    return tuple(sorted(found, key=lambda row: (order.index(row.panel), row.place)))


# --- command lines ----------------------------------------------------------------------------

_ON, _OFF = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_OVERRIDE = re.compile(r"\+{0,2}(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)=(.*)", re.DOTALL)
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
    queue = list(arguments)
    while queue:
        token = queue.pop(0)
        written, value = _split(token)
        if written is None:
            result.append(token)
            continue
        name, _, implied = _own_name(written, table).partition("=")
        if implied:
            if value is not None:
                raise OptionError(f"--{written}: takes no value; --{name} does")
            value = implied
        row = table.get(name)
        negated = row is None and table.get(name.removeprefix("no-"), _NO_ROW).kind == "switch"
        if negated:
            row = table[name.removeprefix("no-")]
        if row is None:
            _take_foreign(written, name, value, queue, family, table, notices)
        elif row.flaglike:
            _take_flag(row, written, value, queue, negated, result)
        else:
            value = _take_value(row, written, value, queue)
            if not row.positional:
                result += [f"--{row.name}", value]
            elif value.lower() not in _NO_FILE:
                result.append(value)
    return result, notices


def _own_name(written: str, table: Mapping[str, Row]) -> str:
    """Return what the option is called here, or what is written where it is not known."""
    name = written.replace("_", "-").lower()
    # a command's own name is no alias there
    targets = () if name in table else ALIASES.get(name, ())
    return next((target for target in targets if target.partition("=")[0] in table), name)


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
    if name in family.ignored:
        is_value = _is_truth(following) if name in family.flags else not following.startswith("--")
        if value is None and queue and is_value:
            queue.pop(0)
        notices.append(f"--{written} is accepted and ignored: {family.ignored[name]}")
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
    known = [*table, *(a for a, to in ALIASES.items() if any(one in table for one in to))]
    raise _unknown(written, name, known)


def _unknown(written: str, name: str, known: Collection[str]) -> OptionError:
    hint = did_you_mean(name, known, 0.5, otherwise="see --help", form="--{}", any_case=True)
    return OptionError(f"--{written}: this option is unknown{hint}")


def _take_flag(
    row: Row, written: str, value: str | None, queue: list[str], negated: bool, result: list[str]
) -> None:
    def own(text: str) -> str:
        return VALUES.get((row.name, text), text)

    if value is None and queue and _is_truth(own(queue[0])):
        value = queue.pop(0)
    if value is not None and row.off is not None and value == str(row.off):
        return
    word = own(value).lower() if value is not None else "1"
    if word not in _ON | _OFF:
        raise OptionError(f"--{written}: expected 0 or 1, got {value!r}")
    on = (word in _ON) != negated
    if row.kind == "switch":
        result.append(f"--{row.name}" if on else f"--no-{row.name}")
    else:
        # the last one counts
        result[:] = [item for item in result if item != f"--{row.name}"]
        result += [f"--{row.name}"] if on else []


def _take_value(row: Row, written: str, value: str | None, queue: list[str]) -> str:
    if value is None:
        # a single hyphen may begin a negative number
        if not queue or queue[0].startswith("--"):
            raise OptionError(f"--{written}: a value is missing; it takes: {row.help}")
        value = queue.pop(0)
        # A shell list such as `--layernum_list 24 24` is one list of two numbers.
        while row.kind == "ints" and queue and queue[0].isdigit():
            value += "," + queue.pop(0)
    return VALUES.get((row.name, value), value)


def _split(token: str) -> tuple[str | None, str | None]:
    """Return (name, value) of `--name`, `--name=value` and `group.name=value`."""
    if token.startswith("--") and len(token) > 2:
        name, equals, value = token[2:].partition("=")
        return name, value if equals else None
    match = _OVERRIDE.fullmatch(token)
    return (match[1], match[2]) if match else (None, None)


def _is_truth(text: str) -> bool:
    """Return whether the word after a flag is its value, be it a wrong integer."""
    return text.lower() in _ON | _OFF or re.fullmatch(r"[+-]?[0-9]+", text) is not None


_NO_ROW = Row("", "", "text", "", "")


def _reader(program: str, rows: Sequence[Row]) -> Any:
    """Return what reads normalised arguments: its `main` returns row key -> raw value.

    Words that are missing or too many are said before, in our form; numbers are read by `convert`.
    """
    import inspect

    import typer
    import typer.main

    types_: dict[str, Any] = {"flag": bool, "switch": bool | None, "texts": list[str] | None}
    parameters = []
    for row in rows:
        info: Any
        if row.positional:
            default = ... if row.default is MISSING else None
            info = typer.Argument(default, metavar=row.metavar or row.name.upper())
        else:
            info = typer.Option(
                False if row.kind == "flag" else None,
                f"--{row.name}/--no-{row.name}" if row.kind == "switch" else f"--{row.name}",
            )
        hint = types_.get(row.kind, str | None)
        parameters.append(
            inspect.Parameter(
                row.key, inspect.Parameter.KEYWORD_ONLY, default=info, annotation=hint
            )
        )

    def callback(**values: Any) -> dict[str, Any]:
        return values

    # typer reads the signature; made of the rows, an option is said once.
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {one.name: one.annotation for one in parameters}
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(name=program)(callback)
    return typer.main.get_command(app)


def _check_words(rows: Sequence[Row], arguments: Sequence[str]) -> None:
    """Raise OptionError for a word that has no place, or a place that has no word."""
    valued = {f"--{row.name}" for row in rows if not row.positional and not row.flaglike}
    flags = {f"--{row.name}" for row in rows if row.flaglike}
    flags |= {f"--no-{row.name}" for row in rows if row.kind == "switch"}
    words: list[str] = []
    queue, literal = list(arguments), False
    while queue:
        token = queue.pop(0)
        if literal or token == "-" or token[:1] != "-":
            words.append(token)
        elif token == "--":
            literal = True  # what follows is no option, whatever it begins with
        elif token in valued:
            queue.pop(0)
        elif token not in flags:
            raise OptionError(f"{token}: this option is unknown; see --help")
    places = [row for row in rows if row.positional]
    if len(words) > len(places) and not any(row.kind == "texts" for row in places):
        remedy = f"give one {places[-1].label}" if places else "options begin with --"
        extra = words[len(places)]
        raise OptionError(f"{extra!r:.60}: this word is too much; {remedy}, see --help")
    for row in places[len(words) :]:
        if row.default is MISSING:
            raise _missing(row)


def _missing(row: Row) -> OptionError:
    return OptionError(f"{row.label} is missing; it takes: {row.help}")


def given_options(rows: Sequence[Row], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the raw values of what is given: a flag that is off is not."""
    flags = {row.name for row in rows if row.kind == "flag"}
    return {
        name: value
        for name, value in raw.items()
        if value is not None and value != [] and not (value is False and name in flags)
    }


# --- values -----------------------------------------------------------------------------------


def read_values(rows: Sequence[Row], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return option name -> value in base units of what is given.

    raw : option name -> text, bool, list of texts, or a value that is none of them.

    Raises
    ------
    OptionError: a name is unknown, or a value is not what its option takes.
    """
    names = [row.name for row in rows]
    for name in raw:
        if name not in names:
            raise _unknown(name, name, names)
    found: dict[str, Any] = {}
    for row in rows:
        value = raw.get(row.name)
        if value is None or value == [] or (value is False and row.kind == "flag"):
            continue
        if row.off is not None and not isinstance(value, bool) and str(value) == str(row.off):
            continue
        if row.kind == "texts" and not isinstance(value, str):
            values = tuple(str(item) for item in value)
            found[row.name] = values if row.parse is None else row.parse(values)  # type: ignore[arg-type]
        else:
            found[row.name] = convert(row, value) if isinstance(value, str) else value
    return found


def make(cls: type[_Made], values: Mapping[str, Any], **more: Any) -> _Made:
    """Return a dataclass filled with the values of its options, and with other fields.

    values : option name -> value, as `read_values` returns them.

    Raises
    ------
    OptionError: an option without a default is not given, or a value is refused.
    """
    fields = dict(more)
    for row in rows_of(cls):
        if row.name in values:
            # what the caller gives wins over the command line
            fields.setdefault(row.field, values[row.name])
        elif row.default is MISSING and row.field not in fields:
            raise _missing(row)
    return cls(**fields)


def validate(options: object) -> None:
    """Check every option of a dataclass; `__post_init__` calls it.

    A word of the command line that stands for another value, such as `pipedream_flush`, becomes it.

    Raises
    ------
    OptionError: a value is outside of its bounds, or no word of its choices.
    """
    for row in rows_of(type(options)):
        value = getattr(options, row.field)
        if value is None or row.parse is not None or row.kind in ("text", "texts"):
            continue
        if row.kind == "choice":
            if value in row.choices.values():
                continue
            if not isinstance(value, str) or value not in row.choices:
                raise _no_choice(row, value)
            object.__setattr__(options, row.field, row.choices[value])  # frozen, not made yet
        elif row.flaglike:
            if not isinstance(value, bool | int) or value not in (0, 1):
                raise OptionError(f"--{row.name}: expected 0 or 1, got {value!r:.60}")
        else:
            for number in value if row.kind == "ints" else (value,):
                # bounds are in the unit of the command line, values in base units
                _check_number(row, number / row.scale if row.scale != 1.0 else number, None)


def convert(row: Row, text: str) -> Any:
    """Return the value of an option, in base units.

    Raises
    ------
    OptionError
        When the text is not a value of the row; the message says what was expected.
    """
    if row.kind == "choice":
        # GB/s is not Gb/s: upper case is no matter only for words without it
        word = text if text in row.choices else text.lower()
        if word not in row.choices:
            raise _no_choice(row, text)
        return row.choices[word]
    if row.kind == "int":
        return _integer(row, text)
    if row.kind == "ints":
        return tuple(_integer(row, part.strip()) for part in text.strip("[] ").split(","))
    if row.kind == "float":
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        _check_number(row, number, text)
        return number * row.scale if row.scale != 1.0 else number
    if row.parse is not None:
        return row.parse(text)
    if not text:
        raise OptionError(f"--{row.name}: expected a text, got ''")
    return (text,) if row.kind == "texts" else text


def _integer(row: Row, text: str) -> int:
    # no bound has more digits, and Python refuses to read thousands of them
    digits = 12 if row.high is None else max(12, len(str(int(row.high))))
    valid = re.fullmatch(rf"[+-]?\d{{1,{digits}}}", text) is not None
    _check_number(row, int(text) if valid else math.nan, text)
    return int(text)


def _check_number(row: Row, number: float, text: str | None) -> None:
    """Raise OptionError for a number out of bounds or no number at all; `text` is how it came."""
    inside = (
        (row.low is None or number >= row.low)
        and (row.above is None or number > row.above)
        and (row.high is None or number <= row.high)
    )
    # Python may hand in infinity as a default, nobody may type it
    if inside and (text is None or math.isfinite(number)):
        return
    is_read = text is None or (row.expects is not None and not math.isnan(number))
    got = f"{number:.12g}" if is_read and isinstance(number, float) else f"{number}"
    if not is_read:
        got = f"{text!r:.60}"
    raise OptionError(f"--{row.name}: expected {_expected(row)}, got {got}")


def _expected(row: Row) -> str:
    if row.expects is not None:
        return row.expects.format(low=row.low, above=row.above, high=row.high)
    parts = [f" of at least {row.low:.12g}"] if row.low is not None else []
    parts += [f" above {row.above:.12g}"] if row.above is not None else []
    parts += [f" up to {row.high:.12g}"] if row.high is not None else []
    return ("a number" if row.kind == "float" else "an integer") + " and".join(parts)


def _no_choice(row: Row, value: object) -> OptionError:
    words = list(row.choices)
    listed = ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]
    hint = did_you_mean(str(value), words, 0.6, any_case=True)
    return OptionError(f"--{row.name}: expected {listed}, got {value!r:.60}{hint}")


def written(row: Row, value: Any) -> Any:
    """Return a value as `read_values` takes it: what one would type, a bool, or a list of texts."""
    if row.flaglike:
        return bool(value)
    if row.kind == "texts":
        return list(value)
    if row.kind == "choice":
        return next(word for word, known in row.choices.items() if known == value)
    if row.kind == "ints":
        return ",".join(map(str, value))
    return f"{value / row.scale:.12g}" if row.scale != 1.0 else str(value)


def words_of(row: Row, raw: Any) -> list[str]:
    """Return the words of a command line that give an option a value of `written`."""
    import shlex

    if row.flaglike:
        return [f"--{row.name}" if raw else f"--no-{row.name}"]
    texts = raw if isinstance(raw, list | tuple) else [raw]
    return [word for text in texts for word in (f"--{row.name}", shlex.quote(str(text)))]


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
    text = row.help + (f" [default: {shown}]" if shown else "")
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

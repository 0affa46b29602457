"""What a field of a dataclass says of an option, and what values it takes.

Type and default of the field are those of the option; its help, its heading and what it accepts
are the field's metadata. Command lines and their help are in `options`.
"""

from __future__ import annotations

import dataclasses
import keyword
import math
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from inspect import get_annotations
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from autopar.command.aliases import suggestion
from autopar.errors import OptionError, did_you_mean
from autopar.records import Record

Kind = Literal["int", "float", "text", "choice", "ints", "texts", "flag", "switch"]
"""`flag`: off unless given; `switch`: has a `--no-` form; `ints`: comma list; `texts`: repeats."""

_KEY = "option"
"""Of the metadata of a field."""
_Made = TypeVar("_Made")


class Row(Record, kw_only=False):
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
    too_high: Callable[[float], str] | None = None
    """What is asked of a number above `high`, which may be meant in another unit."""
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
    brief: str | None = None
    """The help on a first screen, of one line; None: its beginning."""
    also: str = ""
    """What it was called before, for those who look for that in a help."""
    alone: str | None = None
    """The value where none follows."""
    most_used: bool = False
    positional: bool = False
    optional: bool = False
    """The field may be None, which is `not given`."""
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
    def default_text(self) -> str:
        """The default as it is typed or described; empty: there is none to show."""
        if self.shown is not None:
            return self.shown
        value = self.default
        if value is None or value is MISSING or value == () or self.kind == "flag":
            return ""
        if self.kind == "switch":
            return "on" if value else "off"
        if isinstance(value, tuple) and self.kind != "choice":
            return ",".join(map(str, value))
        return str(written(self, value))

    @property
    def flaglike(self) -> bool:
        """True when it needs no value."""
        return self.kind in ("flag", "switch")


def option(default: Any = MISSING, *, help: str, **how: Any) -> Any:
    """Return a field of a dataclass that is an option.

    Parameters
    ----------
    default : of the field, in base units; without one the option has to be given.
    help : what the help says.
    how : `panel` is its heading, that of the class (`PANEL`) if none is given; `name` where it is
        not that of the field, `switch` for a flag that is off and has a `--no-` form, and what
        `Row` says of `choices` (words, or a mapping of words to values; a Literal has its own),
        `low`, `above`, `high`, `too_high`, `scale`, `off`, `expects`, `parse`, `shown`, `metavar`,
        `alone`, `brief`, `also`, `most_used`, `positional` and `place`. `between` has `low` and
        `high` of what is counted, and `of` its name, for errors such as `expected 1 to 9 steps`.
    """
    said = {"help": help, **how}
    if "between" in said:
        said["low"], said["high"] = said.pop("between")
        said["expects"] = f"{{low}} to {{high}} {said.pop('of', '')}".rstrip()
    return dataclasses.field(default=default, metadata={_KEY: said})


def json_option(panel: str, **how: Any) -> Any:
    """Return the field of `--json`, which every command with an answer has."""
    return option(
        None,
        help="write the answer as JSON to a file (.gz compresses), or to stdout in place of tables",
        panel=panel,
        metavar="[PATH]",
        alone="-",
        **how,
    )


def rows_of(cls: type) -> tuple[Row, ...]:
    """Return the options that the fields of a dataclass are, in their order."""
    if cls not in _ROWS:
        _ROWS[cls] = _rows(cls)
    return _ROWS[cls]


_ROWS: dict[type, tuple[Row, ...]] = {}


def _rows(cls: type) -> tuple[Row, ...]:
    return tuple(_row(field, cls) for field in dataclasses.fields(cls) if _KEY in field.metadata)


def _row(field: dataclasses.Field[Any], cls: type) -> Row:
    """Return the option of a field of a class, or of a class that it inherits from."""
    owner = next(base for base in cls.__mro__ if field.name in get_annotations(base))
    hint: Any = field.type
    if isinstance(hint, str):
        # annotations are texts; those of fields that are no options may name what is not imported
        hint = eval(hint, vars(sys.modules[owner.__module__]))
    said = {"panel": getattr(owner, "PANEL", ""), **field.metadata[_KEY]}
    if get_origin(hint) in (Union, types.UnionType):
        said["optional"] = True
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


def unknown(written: str, name: str, known: Iterable[str]) -> OptionError:
    """Return the error of an unknown option, with the known one of a similar name."""
    return OptionError(f"--{written}: this option is unknown{suggestion(name, known)}")


def missing(row: Row) -> OptionError:
    """Return the error of a place or an option that nothing is given for."""
    return OptionError(f"{row.label} is missing; it takes: {row.help}")


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
            raise unknown(name, name, names)
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


def read_given(given: Mapping[str, Any], *classes: type) -> dict[str, Any]:
    """Return option name -> value in base units of the options of dataclasses that are given.

    given : option, with hyphens or underscores -> text, or value. Errors as `read_values`.
    """
    raw = {name.replace("_", "-"): value for name, value in given.items()}
    return read_values([row for cls in classes for row in rows_of(cls)], raw)


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
            raise missing(row)
    return cls(**fields)


def validate(options: object) -> None:
    """Check every option of a dataclass; `__post_init__` calls it.

    A word of the command line that stands for another value, such as `pipedream_flush`, becomes
    it; so do numbers of numpy, and lists where tuples are kept.

    Raises
    ------
    OptionError: a value is of another type, outside of its bounds, or no word of its choices.
    """
    for row in rows_of(type(options)):
        value = getattr(options, row.field)
        if row.parse is not None or (value is None and row.optional):
            continue
        checked = _checked(row, value)
        if checked is not value:
            object.__setattr__(options, row.field, checked)  # frozen, not made yet


def _checked(row: Row, value: Any) -> Any:
    """Return a value of Python as its field keeps it, or raise OptionError."""
    if row.kind == "choice":
        # the type first: an array equals nothing, and True is no 1
        if any(type(value) is type(word) and value == word for word in row.choices.values()):
            return value
        if not isinstance(value, str) or value not in row.choices:
            raise _no_choice(row, value)
        return row.choices[value]
    if row.flaglike:
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise OptionError(f"--{row.name}: expected 0 or 1, got {value!r:.60}")
        return bool(value)
    if row.kind == "text":
        if not isinstance(value, str):
            raise OptionError(f"--{row.name}: expected a text, got {value!r:.60}")
        return value
    if row.kind in ("ints", "texts"):
        if not isinstance(value, list | tuple):
            what = "integers" if row.kind == "ints" else "texts"
            raise OptionError(f"--{row.name}: expected a tuple of {what}, got {value!r:.60}")
        if row.kind == "ints":
            return tuple(_checked_number(row, number) for number in value)
        for text in value:
            if not isinstance(text, str):
                raise OptionError(f"--{row.name}: expected a text, got {text!r:.60}")
        return tuple(value)
    return _checked_number(row, value)


def _checked_number(row: Row, value: Any) -> int | float:
    number: int | float
    try:
        if isinstance(value, bool):
            raise TypeError
        # `index` takes the integers of numpy and refuses 8.0, which may have been 8.5
        number = float(value + 0.0) if row.kind == "float" else operator.index(value)
        if row.kind != "float":
            float(number)
    except (TypeError, ValueError, OverflowError):
        raise OptionError(f"--{row.name}: expected {_expected(row)}, got {value!r:.60}") from None
    # bounds are in the unit of the command line, values in base units
    _check_number(row, number / row.scale if row.scale != 1.0 else number, None)
    return number


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
            # Python reads digits of every script
            number = float(text) if text.isascii() else math.nan
        except ValueError:
            number = math.nan
        try:
            _check_number(row, number, text)
        except OptionError as error:
            raise OptionError(f"{error}{_in_gib(row, text)}") from None
        return number * row.scale if row.scale != 1.0 else number
    if row.parse is not None:
        return row.parse(text)
    if not text:
        raise OptionError(f"--{row.name}: expected a text, got ''")
    return (text,) if row.kind == "texts" else text


_UNITS = {"g": 2**30, "gib": 2**30, "m": 2**20, "mib": 2**20, "gb": 10**9, "mb": 10**6}


def _in_gib(row: Row, text: str) -> str:
    """Return what a size with its unit is in GiB, where that is what an option counts."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([A-Za-z]{1,3})", text)
    if found is None or row.scale != 2**30 or found[2].lower() not in _UNITS:
        return ""
    return f"; it is a number of GiB: {float(found[1]) * _UNITS[found[2].lower()] / 2**30:.4g}"


def _integer(row: Row, text: str) -> int:
    # no bound has more digits, and Python refuses to read thousands of them
    digits = 12 if row.high is None else max(12, len(str(int(row.high))))
    valid = re.fullmatch(rf"[+-]?[0-9]{{1,{digits}}}", text) is not None
    try:
        _check_number(row, int(text) if valid else math.nan, text)
    except OptionError as error:
        raise OptionError(f"{error}{_in_full(row, text)}") from None
    return int(text)


def _in_full(row: Row, text: str) -> str:
    """Return what `128k` may be, which is one number to some and another to others."""
    found = re.fullmatch(r"([0-9]{1,6})([kKmM])", text)
    if found is None:
        return ""
    power = 1 if found[2] in "kK" else 2
    unit = ", of samples" if "samples" in row.help else ""
    return f"; give {int(found[1]) * 1024**power} or {int(found[1]) * 1000**power}{unit}"


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
    if row.too_high is not None and row.high is not None and row.high < number < math.inf:
        raise OptionError(f"--{row.name}: {row.too_high(number)}")
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

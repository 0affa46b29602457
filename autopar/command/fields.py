"""Dataclass fields as options: definition, accepted values and conversion.

An option has the type and default of its field; help, heading and accepted values are the metadata
of the field. Command lines and their help are in `options`.
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
from autopar.records import Record, plain, shorten, shown

Kind = Literal["int", "float", "text", "choice", "ints", "texts", "flag", "switch"]
"""`flag`: off unless given; `switch`: has a `--no-` form; `ints`: comma list; `texts`: repeats."""

_KEY = "option"
"""Key in the metadata of a field."""
_Made = TypeVar("_Made")


class Row(Record, kw_only=False):
    """One option of a command, made from a dataclass field and its metadata."""

    name: str
    """Name on the command line, without the two hyphens."""
    field: str
    kind: Kind
    is_str: bool
    """True if the field is a text; `parse` may only change its spelling."""
    help: str
    panel: str
    default: Any = None
    choices: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Accepted word -> value."""
    low: float | None = None
    """Smallest accepted number."""
    above: float | None = None
    """Exclusive lower bound of a number."""
    high: float | None = None
    too_high: Callable[[float], str] | None = None
    """Function that returns the error text for a number above `high`, such as a hint at its
    unit."""
    instead: Callable[[str], str] | None = None
    """Function that returns the remedy for a word that is none of the choices; empty for none."""
    unit: str = ""
    """Unit of the command line in errors; by default that of `scale`."""
    scale: float = 1.0
    """Factor from the unit of the command line, also of the bounds, to the base unit of the
    field."""
    off: int | None = None
    """Number that other programs use for `not given`."""
    expects: str | None = None
    """Text of errors in place of the bounds; may contain `{low}`, `{above}`, `{high}`."""
    parse: Callable[[str], Any] | None = None
    """Function that converts the typed text; None for numbers, words and lists of them."""
    shown: str | None = None
    """Text of the default; None shows the value, empty shows nothing."""
    metavar: str | None = None
    brief: str | None = None
    """One-line help on the first screen; None for the beginning of `help`."""
    also: str = ""
    """Former name of the option, shown in the help."""
    alone: str | None = None
    """Value of the option if the user types only its name; None: a value is required."""
    most_used: bool = False
    positional: bool = False
    optional: bool = False
    """True if the field may be None, meaning `not given`."""
    place: int = 0
    """Position within its panel, lower numbers first."""

    @property
    def key(self) -> str:
        """Name as a Python identifier."""
        key = self.name.replace("-", "_")
        return f"{key}_" if keyword.iskeyword(key) else key

    @property
    def label(self) -> str:
        """Name on the command line and in its help: `--name`, or `NAME` if positional."""
        return (self.metavar or self.name.upper()) if self.positional else f"--{self.name}"

    @property
    def default_text(self) -> str:
        """Default as typed or described; empty if there is none to show."""
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
        """True if the option needs no value."""
        return self.kind in ("flag", "switch")


def option(default: Any = MISSING, *, help: str, **how: Any) -> Any:
    """Return a dataclass field that is an option.

    default : default of the field, in base units; without it the option is required
    help : help text
    how : further metadata. `panel` is the heading, by default that of the class (`PANEL`). `name`
        is needed if it differs from the field. `switch` gives a flag that is off by default a
        `--no-` form. `between` sets `low` and `high` of a count and `of` its noun, for errors such
        as `expected 1 to 9 steps`. The others are fields of `Row`: `choices` (words, or a mapping
        of words to values; a Literal defines its own), `low`, `above`, `high`, `too_high`,
        `instead`, `unit`, `scale`, `off`, `expects`, `parse`, `shown`, `metavar`, `alone`,
        `brief`, `also`, `most_used`, `positional` and `place`.
    """
    said = {"help": help, **how}
    if "between" in said:
        said["low"], said["high"] = said.pop("between")
        said["expects"] = f"{{low}} to {{high}} {said.pop('of', '')}".rstrip()
    return dataclasses.field(default=default, metadata={_KEY: said})


def json_option(panel: str, **how: Any) -> Any:
    """Return the field of `--json`, an option of every command with an answer."""
    return option(
        None,
        help=(
            "write the answer as JSON to a file (.gz compresses), or to stdout instead of tables"
        ),
        panel=panel,
        metavar="[PATH]",
        alone="-",
        brief="write the answer as JSON to a file or stdout",
        **how,
    )


def rows_of(cls: type) -> tuple[Row, ...]:
    """Return the options of a dataclass in the order of its fields."""
    if cls not in _ROWS:
        _ROWS[cls] = _rows(cls)
    return _ROWS[cls]


_ROWS: dict[type, tuple[Row, ...]] = {}


def _rows(cls: type) -> tuple[Row, ...]:
    return tuple(_row(field, cls) for field in dataclasses.fields(cls) if _KEY in field.metadata)


def _row(field: dataclasses.Field[Any], cls: type) -> Row:
    """Return the option of a field of a class or of its base classes."""
    owner = next(base for base in cls.__mro__ if field.name in get_annotations(base))
    hint: Any = field.type
    if isinstance(hint, str):
        # Annotations are texts. Those of fields that are no options may name missing imports.
        hint = eval(hint, vars(sys.modules[owner.__module__]))
    said = {"panel": getattr(owner, "PANEL", ""), **field.metadata[_KEY]}
    if get_origin(hint) in (Union, types.UnionType):
        said["optional"] = True
        # None only marks the option as optional.
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    choices = said.pop("choices", get_args(hint) if get_origin(hint) is Literal else ())
    if not isinstance(choices, Mapping):
        choices = {str(choice): choice for choice in choices}
    # An option that is on by default needs a form that turns it off.
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
        name=name,
        field=field.name,
        kind=kind,
        default=field.default,
        choices=choices,
        is_str=hint is str,
        **said,
    )


def unknown(written: str, name: str, known: Iterable[str]) -> OptionError:
    """Return the error of an unknown option, with the known one of a similar name."""
    return OptionError(f"--{written}: unknown option", remedy=suggestion(name, known))


def missing(row: Row) -> OptionError:
    """Return the error of a missing argument or option."""
    return OptionError(f"missing argument {row.label} ({row.help})")


# --- values -----------------------------------------------------------------------------------


def read_values(rows: Sequence[Row], raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options as option name -> value in base units; others are omitted.

    raw : option name -> text, bool, list of texts, or a converted value; None is not given

    Raises OptionError: a name is unknown, or a value is invalid for its option.
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
        if isinstance(value, list) and row.kind in ("text", "flag", "int", "float"):
            raise OptionError(f"--{row.name}: expected one value, got {shorten(value)}")
        if row.kind == "texts" and not isinstance(value, str):
            values = tuple(str(item) for item in value)
            if row.positional and "" in values:
                raise OptionError(f"{row.label}: expected a path, got ''")
            found[row.name] = values if row.parse is None else row.parse(values)  # type: ignore[arg-type]
        else:
            found[row.name] = convert(row, value) if isinstance(value, str) else value
    return found


def read_given(given: Mapping[str, Any], *classes: type) -> dict[str, Any]:
    """Return the values of `given`, in base units, by option name; `classes` declare the options.

    given : option, with hyphens or underscores -> text or value.

    Raises errors like `read_values`.
    """
    raw = {name.replace("_", "-"): value for name, value in given.items()}
    return read_values([row for cls in classes for row in rows_of(cls)], raw)


def make(cls: type[_Made], values: Mapping[str, Any], **more: Any) -> _Made:
    """Return an instance of a dataclass of options; options that are not given get their defaults.

    values : option name -> value, as returned by `read_values`
    more : values by field name, which take precedence over `values`

    Raises OptionError: an option without a default is not given, or a value is invalid.
    """
    fields = dict(more)
    for row in rows_of(cls):
        if row.name in values:
            # Values from the caller take precedence over the command line.
            fields.setdefault(row.field, values[row.name])
        elif row.default is MISSING and row.field not in fields:
            raise missing(row)
    return cls(**fields)


def validate(options: object) -> None:
    """Check and convert every option of a dataclass in place; called by `__post_init__`.

    A word of the command line for another value, such as `pipedream_flush`, is replaced by that
    value. NumPy numbers and lists for tuple fields are converted.

    Raises OptionError: a value has another type, is out of bounds, or is none of the choices.
    """
    for row in rows_of(type(options)):
        value = getattr(options, row.field)
        parsed = row.parse is not None and not row.is_str
        if parsed or (value is None and row.optional):
            continue
        own = checked(row, value)
        if own is not value:
            object.__setattr__(options, row.field, own)  # frozen, not made yet


def checked(row: Row, value: Any) -> Any:
    """Return a Python value as stored in its field, or raise OptionError."""
    value = plain(value)
    if row.kind == "choice":
        # Compare types first: an array equals nothing, and True must not match 1.
        if any(type(value) is type(word) and value == word for word in row.choices.values()):
            return value
        if not isinstance(value, str) or value not in row.choices:
            raise _no_choice(row, value)
        return row.choices[value]
    if row.flaglike:
        if not isinstance(value, bool | int) or value not in (0, 1):
            raise OptionError(f"--{row.name}: expected 0 or 1, got {shown(value)}")
        return bool(value)
    if row.kind == "text":
        if not isinstance(value, str) or not value:
            raise OptionError(f"--{row.name}: expected a text, got {shown(value)}")
        return value
    if row.kind in ("ints", "texts"):
        if not isinstance(value, list | tuple):
            what = "integers" if row.kind == "ints" else "texts"
            raise OptionError(f"--{row.name}: expected a tuple of {what}, got {shown(value)}")
        if row.kind == "ints":
            return tuple(_checked_number(row, number) for number in value)
        for text in value:
            if not isinstance(text, str):
                raise OptionError(f"--{row.name}: expected a text, got {shown(text)}")
        return tuple(value)
    return _checked_number(row, value)


def _checked_number(row: Row, value: Any) -> int | float:
    number: int | float
    try:
        if isinstance(value, bool):
            raise TypeError
        # `index` accepts integers of NumPy and refuses 8.0, which may have been 8.5.
        number = float(value + 0.0) if row.kind == "float" else operator.index(value)
        if row.kind != "float":
            float(number)
    except (TypeError, ValueError, OverflowError):
        raise OptionError(f"--{row.name}: expected {_expected(row)}, got {shown(value)}") from None
    # Bounds are in the unit of the command line, values in base units.
    _check_number(row, number / row.scale if row.scale != 1.0 else number, None)
    return number


def convert(row: Row, text: str) -> Any:
    """Return the value of a typed text, in base units.

    Raises OptionError: the text is no valid value of the option; the message gives the valid ones.
    """
    if row.kind == "choice":
        # GB/s is not Gb/s: case is ignored only for words without upper case.
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
            # Python accepts digits of every script.
            share = text.endswith("%") and row.high is not None and row.high <= 1
            number = float(text.removesuffix("%")) / 100 if share else float(text)
            number = number if text.isascii() else math.nan
        except ValueError:
            number = math.nan
        try:
            _check_number(row, number, text)
        except OptionError as error:
            raise OptionError(error.problem, remedy=_in_unit(row, text)) from None
        return number * row.scale if row.scale != 1.0 else number
    if not text and (row.is_str or row.parse is None or row.parse is Path):
        raise OptionError(f"{row.label}: expected a text, got ''")
    if row.parse is not None:
        return row.parse(text)
    return (text,) if row.kind == "texts" else text


_UNIT_OF_SCALE = {2.0**30: "GiB", 1e9: "GB/s", 1e12: "TFLOP/s"}
"""Unit of the command line by `Row.scale`."""
_SIZES = {"g": 2**30, "gib": 2**30, "m": 2**20, "mib": 2**20, "gb": 10**9, "mb": 10**6}
_RATES = {"GB/s": 10**9, "TB/s": 10**12, "MB/s": 10**6, "Gb/s": 10**9 / 8, "Gbit/s": 10**9 / 8}
_RATES |= {unit.replace("/s", "ps"): rate for unit, rate in _RATES.items()}


def _in_unit(row: Row, text: str) -> str:
    """Return a hint with the number in the unit of the option for a text such as `400Gb/s`.

    The hint is empty for a text without a known unit, and for options that are neither in GiB nor
    in GB/s.
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,6})?) ?([A-Za-z]{1,4}(?:/s)?)", text)
    if found is None:
        return ""
    factor = {2.0**30: _SIZES.get(found[2].lower()), 1e9: _RATES.get(found[2])}.get(row.scale)
    if factor is None:
        return ""
    number = f"{float(found[1]) * factor / row.scale:.4g}"
    return f"Use {number}, which is {text} in {_UNIT_OF_SCALE[row.scale]}"


def _integer(row: Row, text: str) -> int:
    # No bound has more digits, and Python refuses to read thousands of them.
    digits = 12 if row.high is None else max(12, len(str(int(row.high))))
    valid = re.fullmatch(rf"[+-]?[0-9]{{1,{digits}}}", text) is not None
    try:
        _check_number(row, int(text) if valid else math.nan, text)
    except OptionError as error:
        raise OptionError(error.problem, remedy=_in_full(row, text)) from None
    return int(text)


def _in_full(row: Row, text: str) -> str:
    """Return a hint with both meanings of a text such as `128k`, 128 * 1024 and 128 * 1000.

    Other texts return an empty hint.
    """
    found = re.fullmatch(r"([0-9]{1,6})([kKmM])", text)
    if found is None:
        return ""
    power = 1 if found[2] in "kK" else 2
    unit = ", of samples" if "samples" in row.help else ""
    return f"Use {int(found[1]) * 1024**power} or {int(found[1]) * 1000**power}{unit}"


def _check_number(row: Row, number: float, text: str | None) -> None:
    """Raise OptionError for a number out of bounds or NaN; `text` is the typed form."""
    inside = (
        (row.low is None or number >= row.low)
        and (row.above is None or number > row.above)
        and (row.high is None or number <= row.high)
    )
    # Infinity is allowed as a default in Python, but not on the command line.
    if inside and (text is None or math.isfinite(number)):
        return
    if row.too_high is not None and row.high is not None and row.high < number < math.inf:
        raise OptionError(f"--{row.name}: {row.too_high(number)}")
    is_read = text is None or (row.expects is not None and not math.isnan(number))
    got = f"{number:.12g}" if is_read and isinstance(number, float) else f"{number}"
    if not is_read:
        got = shown(text)
    raise OptionError(f"--{row.name}: expected {_expected(row)}, got {got}")


def _expected(row: Row) -> str:
    if row.expects is not None:
        return row.expects.format(low=row.low, above=row.above, high=row.high)
    parts = [f" of at least {row.low:.12g}"] if row.low is not None else []
    parts += [f" above {row.above:.12g}"] if row.above is not None else []
    parts += [f" up to {row.high:.12g}"] if row.high is not None else []
    unit = row.unit or _UNIT_OF_SCALE.get(row.scale, "")
    what = ("a number" if row.kind == "float" else "an integer") + f" of {unit}" * bool(unit)
    return what + " and".join(parts)


def _in_bytes(value: str, words: Sequence[str]) -> str:
    """Return a hint for a rate in bits where one of `words` is a rate in bytes; else empty."""
    if re.fullmatch(r"[kKmMgGtT]?(?:b|bit)(?:/s|ps)", value) and "GB/s" in words:
        return "b is a bit and B a byte: divide the values by 8, and use GB/s"
    return ""


def _no_choice(row: Row, value: object) -> OptionError:
    words = list(row.choices)
    listed = ", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]
    text = value if isinstance(value, str) else ""
    hint = "" if row.instead is None else row.instead(text)
    hint = hint or _in_bytes(text, words) or did_you_mean(text, words)
    return OptionError(f"--{row.name}: expected {listed}, got {shown(value)}", remedy=hint)


def written(row: Row, value: Any) -> Any:
    """Return the typed form of a value in base units: text, bool or list of texts.

    It is the inverse of `read_values`.
    """
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
    """Return the words of a command line that set an option, quoted for a shell.

    raw : value in the form that `written` returns
    """
    import shlex

    if row.flaglike:
        return [f"--{row.name}" if raw else f"--no-{row.name}"]
    texts = raw if isinstance(raw, list | tuple) else [raw]
    return [word for text in texts for word in (f"--{row.name}", shlex.quote(str(text)))]

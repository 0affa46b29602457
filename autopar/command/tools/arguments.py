"""Arguments of tools: the options of a command by name, checked before the command runs.

A call is answered in full or refused: unknown names, null, values of another type and values
that a command line would take for "not given", such as -1, are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from autopar.cli import SUBCOMMANDS
from autopar.command.aliases import alias_tables
from autopar.command.answers import OUTPUTS
from autopar.command.dialect import as_file, normalise, own_name
from autopar.command.fields import Row, convert
from autopar.command.options import Command
from autopar.errors import OptionError, did_you_mean
from autopar.records import Record

FULL = "full"
"""Value of `detail` that leaves nothing out."""
DETAIL = "detail"
OPTIONS = "options"
_LONGEST = 20_000
"""Maximum characters of a text, which the answer repeats."""
_FORMER = {"write_to": "output_config_path"}
"""Earlier name of an argument -> its name."""
_SCREEN = {
    "json": "The tool returns the answer",
    "verbose": "Use detail for more of the answer",
    "diff": "The answer has the suggested changes",
}
"""Options about the output of a command, which have no effect on an answer -> remedy."""


class RefusedError(OptionError):
    """An argument of a tool is unusable; `id` names the rule that it breaks."""

    def __init__(self, id: str, problem: str, *, remedy: str | None = None) -> None:
        super().__init__(problem, remedy=remedy)
        self.id = id


class Tool(Record):
    """A tool: a command whose options are its arguments."""

    name: str
    asks: str
    """Name of the command."""
    text: str
    """Description of the tool."""
    required: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    """Arguments of the schema after the required ones; others are in `options`."""
    documents: frozenset[str] = frozenset()
    """Arguments that also accept an answer of `search` in place of a path."""

    @property
    def command(self) -> Command | None:
        """Command with the options; None for a tool without arguments."""
        if not self.required:
            return None
        found: Command = import_module(SUBCOMMANDS[self.asks][1]).COMMAND
        return found

    @property
    def rows(self) -> dict[str, Row]:
        """Options by name of the command line."""
        found = () if self.command is None else self.command.rows
        return {row.name: row for row in found if row.name not in _SCREEN}

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments."""
        rows = {row.key: row for row in self.rows.values()}
        names = (*self.required, *self.listed)
        properties = {name: self._property(rows[name]) for name in names}
        if self.command is not None:
            properties[OPTIONS] = {
                "type": "object",
                "description": f"Other options of `autopar {self.asks} --help`, by name with "
                "underscores, such as {'precision': 'any'}.",
            }
        properties[DETAIL] = {
            "anyOf": [{"const": FULL}, {"type": "array", "items": {"type": "string"}}],
            "description": "Parts of the answer to return in full: 'full', or names of "
            "keys that an answer omits.",
        }
        return {
            "type": "object",
            "properties": properties,
            "required": list(self.required),
            "additionalProperties": False,
        }

    def _property(self, row: Row) -> dict[str, Any]:
        found: dict[str, Any] = {"description": row.help[:1].upper() + row.help[1:] + "."}
        whole = {"type": "integer"} | ({} if row.low is None else {"minimum": int(row.low)})
        if row.key in self.documents:
            found["type"] = ["string", "object"]
            found["description"] = "Answer of search, or path of a " + row.help + "."
        elif row.kind == "choice":
            found |= {"type": "string", "enum": list(row.choices)}
        elif row.kind == "int":
            found |= whole
        elif row.kind == "float":
            found["type"] = "number"
        elif row.kind == "ints":
            found["anyOf"] = [whole, {"type": "array", "items": whole}]
        elif row.flaglike:
            found["type"] = "boolean"
        elif row.kind == "texts":
            text = {"type": "string"}
            found["anyOf"] = [text, {"type": "array", "items": text}]
        else:
            found["type"] = "string"
        return found


def read_arguments(tool: Tool, given: Mapping[str, Any]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return (options of the command by keyword, parts of the answer to return in full).

    given : the arguments as received, of any JSON type

    Raises RefusedError: an argument is unknown, missing, null, given twice or has an unusable
    value.
    """
    detail = _detail(given[DETAIL]) if DETAIL in given else frozenset[str]()
    rows = tool.rows
    found: dict[str, Any] = {}
    seen: dict[str, str] = {}
    for written, value in _flat(tool, given):
        written = str(written)
        name, implied = _own(tool, rows, written)
        if name in seen:
            both = f"{seen[name]} and {written} set the same option"
            problem = f"{written} is given twice" if seen[name] == written else both
            raise RefusedError("given-twice", problem, remedy="Remove one of them")
        seen[name] = written
        key = _FORMER.get(written, written)
        if rows[name].key in tool.documents:
            found[rows[name].key] = _document(written, value)
        elif implied:
            if value not in (True, "1", "true", "yes", "on"):
                raise _unusable(written, "true", value)
            found[key] = True
        else:
            # The command reads some values by the spelling of their option.
            row = rows[name]
            if row.key in tool.required or row.kind == "texts" or name in OUTPUTS:
                key = row.key
            if name in OUTPUTS and isinstance(value, str) and value.startswith("~"):
                problem = f"{written} {value:.60}: ~ is not below the folder of the server"
                raise RefusedError("outside-folder", problem)
            found[key] = _value(written, row, value)
    for key in tool.required:
        name = next(row.name for row in rows.values() if row.key == key)
        if name not in seen:
            raise RefusedError(
                "missing-argument", f"{tool.name} needs {key}", remedy=rows[name].help
            )
    return found, detail


def _detail(value: Any) -> frozenset[str]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(one, str) for one in names):
        raise _unusable(DETAIL, "'full' or a list of names", value)
    return frozenset(names)


def _flat(tool: Tool, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arguments, and those in `options`."""
    for name, value in given.items():
        if name == DETAIL:
            continue
        if name != OPTIONS or tool.command is None:
            yield name, value
            continue
        inner = _parsed(value)
        if not isinstance(inner, dict):
            raise _unusable(OPTIONS, "an object", value)
        yield from inner.items()


def _parsed(value: Any) -> Any:
    """Return the list or object in a text of JSON, which some clients send; else the value."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _own(tool: Tool, rows: Mapping[str, Row], written: str) -> tuple[str, bool]:
    """Return (name of the option, True if the written name sets its value).

    Raises RefusedError for a name without an option, with the right one if there is one.
    """
    is_name = re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]{0,80}", written) is not None
    if is_name and tool.command is not None:
        family = alias_tables().families[tool.command.family]
        name, implied, _ = own_name(_FORMER.get(written, written), rows, family).partition("=")
        if name in rows:
            return name, bool(implied)
        positive = name.removeprefix("no-")
        if name != positive and positive in rows and rows[positive].kind == "switch":
            return positive, False
        if name in _SCREEN:
            raise RefusedError(
                "unknown-argument", f"{written}: not an argument of a tool", remedy=_SCREEN[name]
            )
        try:
            normalise([f"--{written}"], list(rows.values()), family)
        except OptionError as error:
            problem = error.problem.replace(f"--{written}", written).replace(f"--{name}", written)
            remedy = spelled(error.remedy or "", rows)
            if "unknown option" in problem:
                problem = f"{written}: not an argument of {tool.name}"
            if remedy == "See --help":
                remedy = f"See `autopar {tool.asks} --help`"
            raise RefusedError("unknown-argument", problem, remedy=remedy) from None
        raise RefusedError(
            "unknown-argument",
            f"{written}: has no effect on {tool.name}",
            remedy="Leave it out",
        )
    known = list(tool.schema["properties"])
    every = f"The arguments are {', '.join(known)}"
    raise RefusedError(
        "unknown-argument",
        f"{written:.60}: not an argument of {tool.name}",
        remedy=did_you_mean(written, known, otherwise=every, form="{}"),
    )


def spelled(text: str, names: Collection[str]) -> str:
    """Return a text with options in argument spelling: `--seq-length` becomes `seq_length`."""

    def own(found: re.Match[str]) -> str:
        return found[1].replace("-", "_") if found[1] in names else found[0]

    return re.sub(r"--([a-z][a-z0-9-]*)", own, text)


def _unusable(name: str, expected: str, value: Any) -> RefusedError:
    try:
        shown = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # also for integers of thousands of digits
        shown = f"{type(value).__name__} that has no text"
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return RefusedError(
        "null-value" if value is None else "unusable-value",
        f"{name:.60}: expected {expected}, got {shown}",
        remedy="Leave it out" if value is None else None,
    )


def _document(name: str, value: Any) -> Any:
    """Return a path or an object for an argument that accepts both; raises RefusedError."""
    found = _parsed(value)
    if isinstance(found, dict) and found:
        try:
            json.dumps(found)
        except (ValueError, RecursionError):  # integers of thousands of digits, or too deep
            raise _unusable(name, "the answer of search", value) from None
        return found
    if not isinstance(value, str):
        raise _unusable(name, "a path or the answer of search", value)
    return _path(name, value)


def _path(name: str, value: str) -> str:
    _refuse_text(name, value)
    return as_file(value)


def _refuse_text(name: str, value: str) -> None:
    if not value.strip() or "\0" in value or len(value) > _LONGEST:
        what = f"a text of 1 to {_LONGEST} characters without NUL"
        raise _unusable(name, what, value)


def _value(name: str, row: Row, value: Any) -> Any:
    """Return a value as `autopar.command.python_api.ask` accepts it; raises RefusedError."""
    expected = _EXPECTED.get(row.kind, "a text")
    if row.kind == "choice":
        expected = " or ".join(row.choices)
    values: Sequence[Any]
    many = row.kind in ("ints", "texts") or (row.kind == "text" and not row.is_str)
    values = _parsed(value) if many else value
    if not isinstance(values, list):
        values = [value]
    elif not values or not many:
        raise _unusable(name, expected, value)
    for one in values:
        _refuse_type(name, row, one, expected)
    if row.positional:
        return [_path(name, one) for one in values] if row.kind == "texts" else _path(name, value)
    return list(values) if isinstance(values, list) and len(values) > 1 else values[0]


_EXPECTED = {
    "int": "an integer",
    "ints": "an integer or a list of integers",
    "float": "a number",
    "texts": "a text or a list of texts",
    "flag": "true or false",
    "switch": "true or false",
}
_NUMBERS = ("int", "ints", "float")
_BITS = 64
"""Maximum bits of an integer; Python refuses to write those of thousands of digits."""


def _refuse_type(name: str, row: Row, value: Any, expected: str) -> None:
    """Raise RefusedError for one value of another type, or for a number out of bounds."""
    if isinstance(value, str):
        _refuse_text(name, value)
        is_number = re.fullmatch(r"\s*[+-]?[0-9.]+(e[+-]?[0-9]+)?\s*", value, re.I) is not None
        if row.kind not in _NUMBERS or not is_number:
            return  # the command reads the text
    elif isinstance(value, bool):
        if row.flaglike:
            return
        raise _unusable(name, expected, value)
    elif not isinstance(value, int | float) or row.kind in ("text", "texts"):
        raise _unusable(name, expected, value)
    elif row.flaglike:
        if type(value) is int and value in (0, 1):
            return
        raise _unusable(name, expected, value)
    elif isinstance(value, int) and value.bit_length() > _BITS:
        raise _unusable(name, expected, value)
    try:
        convert(row, str(value))
    except OptionError as error:
        problem = spelled(error.problem, {row.name}).replace(row.key, name, 1)
        if not isinstance(value, str):
            problem = problem.replace(f"'{value}'", str(value))
        raise RefusedError("unusable-value", problem, remedy=error.remedy) from None

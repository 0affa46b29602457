"""Strict reading and atomic writing of JSON documents, their validation, and JSON Schemas.

The json module accepts duplicate keys, NaN and numbers that overflow; this module rejects them. An
error message is one sentence with file, key and value.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from inspect import cleandoc
from itertools import islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta, ValidationError, convert
from msgspec.structs import FieldInfo

from autopar.errors import DocumentError, InputError, did_you_mean, nearest, with_remedy
from autopar.limits import (
    DEEPEST,
    MOST_DOCUMENT_BYTES,
    read_bytes,
    refuse_deep_values,
    refuse_many_values,
    too_many_digits,
)
from autopar.output import Aside, is_outside, write_files
from autopar.records import (
    Entry,
    KeyFault,
    Record,
    expected_of,
    extra_of,
    fields_of,
    is_record,
    shorten,
)


class JsonDocument(Record):
    """Parsed JSON file: its path, top-level object and the SHA-256 of its bytes."""

    path: Path
    data: dict[str, Any]
    sha256: str


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    # The json module silently keeps the last of equal keys.
    for key, value in pairs:
        if key in result:
            raise _DuplicateKeyError(key)
        result[key] = value
    return result


def load_object(
    path: Path | str, *, remedy: str | None = None, text: str | None = None
) -> JsonDocument:
    """Return the top-level object of a JSON file.

    text : text of the file, if it is known already; None to read it.

    Raises DocumentError: the file is missing, unreadable, too large, empty or not UTF-8. Also for
    invalid JSON, duplicate keys, deep nesting, or no object at top level. The error of a missing or
    empty file contains `remedy`, how to create the file.
    """
    path = Path(path)
    if text is None:
        raw = read_bytes(path, MOST_DOCUMENT_BYTES, "a JSON file", remedy=remedy)
    else:
        raw = text.encode()
    refuse_many_values(path, raw)
    return JsonDocument(
        path=path, data=_parse(path, raw, remedy), sha256=hashlib.sha256(raw).hexdigest()
    )


def _parse(path: Path, raw: bytes, remedy: str | None) -> dict[str, Any]:
    try:
        # -sig: some editors begin files with a byte-order mark.
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DocumentError(
            path, f"byte {error.start} is not UTF-8, expected a JSON text file"
        ) from None
    if not text.strip():
        raise DocumentError(path, "the file is empty, expected a JSON object", remedy=remedy)
    try:
        data = json.loads(text, object_pairs_hook=_unique)
    except _DuplicateKeyError as error:
        raise DocumentError(
            path, "this key appears twice in one object", key=error.key, remedy="Remove one of them"
        ) from None
    except json.JSONDecodeError as error:
        start = text.lstrip()[:40].partition("\n")[0]
        if start[0] not in "[{":
            begins = "" if is_outside(path) else f": it begins with {shorten(start)}"
            raise DocumentError(path, f"this is not a JSON file{begins}", remedy=remedy) from None
        # An error after the last character means that something is missing there.
        end = " (the file seems truncated)" if error.pos >= len(text.rstrip()) else ""
        # Python 3.13 points at a trailing comma, earlier releases behind it.
        before = text[: error.pos + ("trailing comma" in error.msg)].rstrip()
        closing = re.compile(r"[,\s]*([}\]])").match(text, error.pos)
        comma = closing if before.endswith(",") else None
        raise DocumentError(
            path,
            f"not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}{end}",
            remedy=f"Remove the comma before {comma[1]}" if comma else None,
        ) from None
    except ValueError:
        raise too_many_digits(path, text) from None
    except RecursionError:
        raise DocumentError(path, f"brackets nest deeper than {DEEPEST}") from None
    if isinstance(data, dict | list):
        refuse_deep_values(path, data)
    if not isinstance(data, dict):
        raise DocumentError(
            path, f"the top level is {shorten(data)}, expected an object {{key: value, ...}}"
        )
    return data


def write_json(
    path: Path, data: dict[str, Any], *, number_rows: bool = False, aside: Aside | None = None
) -> None:
    """Write an object as indented JSON, atomically, keys in the given order.

    number_rows : True to write lists of numbers in rows of about 100 columns, False for one number
        per line.
    aside : parameter of `autopar.output.write_files`.

    Raises OSError.
    """
    text = rows_text(data) if number_rows else json.dumps(data, indent=4, allow_nan=False) + "\n"
    write_files({Path(path): text}, aside=aside)


def rows_text(data: dict[str, Any]) -> str:
    """Return an object as indented JSON with lists of numbers in rows of about 100 columns."""
    return _with_rows(data, "", 0) + "\n"


_COLUMNS = 100
_INDENT = "    "
_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps makes a new encoder every time


def _with_rows(value: Any, indent: str, column: int) -> str:
    """Return JSON that begins at `column` of a line indented by `indent`."""
    inner = indent + _INDENT
    if isinstance(value, dict) and value:
        parts = []
        for key, item in value.items():
            start = f"{inner}{_encode(key)}: "
            parts.append(start + _with_rows(item, inner, len(start)))
        return "{\n" + ",\n".join(parts) + "\n" + indent + "}"
    if not isinstance(value, list) or not value:
        return _encode(value)
    if any(isinstance(item, bool) or not isinstance(item, int | float) for item in value):
        parts = [inner + _with_rows(item, inner, len(inner)) for item in value]
        return "[\n" + ",\n".join(parts) + "\n" + indent + "]"
    text = _encode(value)
    if column + len(text) < _COLUMNS:
        return text
    rows = [inner]
    for number in text[1:-1].split(" "):
        if len(rows[-1]) + len(number) >= _COLUMNS and rows[-1] != inner:
            rows.append(inner)
        rows[-1] += number if rows[-1] == inner else " " + number
    return "[\n" + "\n".join(rows) + "\n" + indent + "]"


# --------------------------------------------------------------------------------------------------
# Validation of records in a document.
#
# `msgspec.convert` is fast, but stops at the first error. Values are read one by one only after an
# error, and for types that msgspec cannot express. Each error then has its key, its value and the
# expected values.


MOST_ERRORS = 100
"""Largest number of errors listed for one file, and about the largest number looked for."""
Fault = tuple[str, str]
"""(Key such as `layers[0].num_heads`, problem)."""
_Kind = TypeVar("_Kind")
_MISSING = "this key is missing, expected "
_OWN = "x-own"
"""Placeholder key in a schema: index of the type in `_LIKE` whose schema replaces it."""
_LIKE: list[Any] = []
"""Types of the JSON values that `own_reader` functions read."""


def own_reader(
    read: Callable[[Any, str, list[Fault]], Any], like: Any, expected: str | None = None
) -> Meta:
    """Return the annotation of a field whose value is made by a function.

    read : function of (JSON value, key, list to which errors are appended); returns the value.
    like : type of the JSON value, for the schema.
    expected : valid values in words, for errors.
    """
    words = {} if expected is None else {"expected": expected}
    # Made on demand, because a schema takes long to make and few are needed.
    _LIKE.append(like)
    place = {_OWN: len(_LIKE) - 1}
    return Meta(extra={"read": read, "like": like, **words}, extra_json_schema=place)


def value_reader(read: Callable[[Any], Any], expected: str, like: Any = Any) -> Meta:
    """Return the annotation of a field whose value is made by a function that raises KeyFault.

    read : function of the JSON value; returns the value.
    expected : valid values in words, for errors.
    like : type of the JSON value, for the schema.
    """

    def at(value: Any, key: str, found: list[Fault]) -> Any:
        try:
            return read(value)
        except KeyFault as fault:
            found.append((below(key, fault.key), str(fault)))
            return None

    return own_reader(at, like, expected)


def read_record(
    kind: type[_Kind], path: Path | str, data: Mapping[str, Any], *, remedy: str | None = None
) -> _Kind:
    """Return the record of type `kind` in a JSON object; keys that begin with `_` are comments.

    path : file of the object, for errors.
    remedy : remedy for a missing key.

    Raises DocumentError: names file, key and value of one error. An invalid value has priority over
    a missing key.
    """
    whole: Any = kind
    if is_plain(whole):
        try:
            made = convert(data, kind)
            # Numbers that exceed 64 bits are not compared with bounds.
            msgspec.json.encode(data)
            # A value of any type has no bounds that exclude NaN.
            for key, problem in _not_finite(data, "") if _has_any(whole) else ():
                raise DocumentError(path, problem, key=short_key(key))
        except (ValidationError, OverflowError, TypeError, ValueError):
            pass
        else:
            return made
    found: list[Fault] = []
    held: _Kind = converted(kind, data, "", found)
    if not found:
        return held
    key, problem = min(found, key=lambda fault: _order(kind, fault, data))
    if problem.startswith(_MISSING):
        near = _misspelt(kind, key, data)
        remedy = f"Rename the similar key {near!r}" if near else remedy
    raise DocumentError(path, problem, key=short_key(key), remedy=remedy)


def _order(kind: Any, fault: Fault, data: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return a sort key: invalid values first, then misspelt keys, then missing keys."""
    missing = fault[1].startswith(_MISSING)
    return missing, missing and not _misspelt(kind, fault[0], data)


def _misspelt(kind: Any, key: str, data: Mapping[str, Any]) -> str | None:
    """Return the unknown key of a file that is most similar to a missing key, or None."""
    known = fields_of(kind) if is_record(kind) else {}
    others = islice((str(name) for name in data if name not in known), MOST_ERRORS)
    return nearest(key, others, least=0.8)


def short_key(key: str) -> str | None:
    """Return a key cut to 120 characters for a message; None for the empty key of the document."""
    return (key[:120] + "..." if len(key) > 120 else key) or None


def written(value: Any, *, defaults: bool = True) -> Any:
    """Return the JSON value of a record without nulls.

    defaults : False to omit fields with their default value.
    """
    if isinstance(value, Record):
        return {
            one.encode_name: written(item, defaults=defaults)
            for one in fields_of(type(value)).values()
            if (item := getattr(value, one.name)) is not None
            and (defaults or item != default_of(one))
        }
    if isinstance(value, dict):
        return {key: written(item, defaults=defaults) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [written(item, defaults=defaults) for item in value]
    return value


def default_of(one: FieldInfo) -> Any:
    """Return the default value of a record's field, `NODEFAULT` for a required field."""
    return one.default if one.default_factory is NODEFAULT else one.default_factory()


def faults(kind: Any, value: Any) -> list[Fault]:
    """Return all errors of a JSON value of the given type."""
    found: list[Fault] = []
    converted(kind, value, "", found)
    return found


def converted(kind: Any, value: Any, key: str, found: list[Fault]) -> Any:
    """Return a JSON value converted to the type `kind`.

    key : key of the value in the file, for errors.
    found : list to which errors are appended; the result is then not usable.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _taken_annotated(kind, value, key, found)
    if origin in (Union, UnionType):
        kinds = [one for one in inner if one is not NoneType]
        if value is None and len(kinds) < len(inner):
            return None
        one = kinds[0] if len(kinds) == 1 else _tagged(kinds, value)
        if one is not None:
            return converted(one, value, key, found)
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        items = enumerate(value)
        return origin(
            converted(inner[0], item, f"{key}[{place}]", found)
            for place, item in items
            if len(found) < MOST_ERRORS
        )
    elif origin is dict and isinstance(value, Mapping):
        return {
            converted(inner[0], name, below(key, name), found): converted(
                inner[1], item, below(key, name), found
            )
            for name, item in value.items()
            if len(found) < MOST_ERRORS
        }
    elif hasattr(kind, "taken"):
        return kind.taken(value, key, found)
    elif is_record(kind) and isinstance(value, kind):
        return value
    elif is_record(kind) and isinstance(value, Mapping):
        return _taken_object(kind, value, key, found)
    return _taken_plain(kind, value, key, found)


def _tagged(kinds: list[Any], value: Any) -> Any:
    """Return the record type of a union that matches the tag of a JSON object, or None."""
    for kind in filter(is_record, kinds):
        own = kind.__struct_config__
        if own.tag_field and isinstance(value, Mapping) and value.get(own.tag_field) == own.tag:
            return kind
    return None


def _taken_annotated(kind: Any, value: Any, key: str, found: list[Fault]) -> Any:
    inner, *metas = get_args(kind)
    extra = extra_of(kind)
    if "read" in extra:
        if value is None and NoneType in get_args(inner):
            return None
        if isinstance(value, Mapping) or not is_record(extra["like"]):
            return extra["read"](value, key, found)
        found.append((key, f"the value is {shorten(value)}, expected {expected_of(kind)}"))
        return None
    # Errors inside come first, each with its own key.
    whole = get_origin(inner) or inner
    if is_record(whole) and isinstance(value, Mapping):
        return converted(inner, value, key, found)
    if whole not in (list, tuple, dict):
        return _taken_plain(kind, value, key, found)
    number = len(found)
    made = converted(inner, value, key, found)
    if len(found) == number:
        _taken_plain(Annotated[(whole, *metas)], value, key, found)
    return made


def _taken_object(
    kind: type[Record], value: Mapping[str, Any], key: str, found: list[Fault]
) -> Any:
    # A record may change the object of a file before its keys are checked.
    prepared = getattr(kind, "prepared", None)
    if prepared is not None:
        try:
            value = prepared(value)
        except KeyFault as fault:
            found.append((below(key, fault.key), str(fault)))
            return None
    known, number = fields_of(kind), len(found)
    # Other releases or tools may use another name for a field.
    others: Mapping[str, str] = getattr(kind, "other_names", {})
    called = {name: name for name in known}
    called |= {name: o for name, o in others.items() if name not in value and o in value}
    more = {}
    for name in value:
        if len(found) >= MOST_ERRORS:
            break
        # Keys of a file are strings; those of a Python dictionary may be anything.
        if not isinstance(name, str):
            found.append((key, f"a key is {shorten(name)}, expected a string"))
        elif name in known or name.startswith("_") or name == kind.__struct_config__.tag_field:
            continue
        elif _is_closed(kind):
            found.append((below(key, name), unknown_key(name, list(known))))
        elif issubclass(kind, Entry):
            more[name] = value[name]
    values, whole = {}, True
    for name, one in known.items():
        here, before = below(key, called[name]), len(found)
        if called[name] in value:
            values[one.name] = converted(one.type, value[called[name]], here, found)
        elif one.required:
            found.append((here, _MISSING + expected_of(one.type)))
        if len(found) > before:
            values.pop(one.name, None)
            whole = whole and not one.required
    # Constraints between keys are checked even if some optional keys are invalid.
    if not whole:
        return None
    try:
        made = kind(**values, **more)
    except KeyFault as fault:
        found.append((below(key, fault.key), str(fault)))
        return None
    except InputError as error:
        found.append((key, str(error)))
        return None
    return made if len(found) == number else None


def _taken_plain(kind: Any, value: Any, key: str, found: list[Fault]) -> Any:
    if kind is Any:
        found += islice(_not_finite(value, key), 1)
        return value
    extra = extra_of(kind)
    # Numbers that exceed 64 bits are not compared with bounds.
    held = max(_LEAST, min(value, _MOST)) if type(value) is int else value
    if type(value) is float and abs(value) < _NEAREST_TO_0:
        held = 0.0
    try:
        made = convert(held, kind)
    except (ValidationError, UnicodeEncodeError):
        # Half of a surrogate pair is not a character.
        made = math.nan
    if not isinstance(made, float) or math.isfinite(made):
        return value if type(made) is int or "as_written" in extra else made
    problem = extra.get("problem")
    expected = f"the value is {shorten(value)}, expected {expected_of(kind)}"
    found.append((key, expected if problem is None else problem(value)))
    return None


def _not_finite(value: Any, key: str) -> Iterator[Fault]:
    """Yield an error for each NaN or infinity in a JSON value of any type."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _not_finite(item, below(key, name))
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            yield from _not_finite(item, f"{key}[{place}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield key, f"the value is {shorten(value)}, expected a finite number"


_LEAST, _MOST = -(2**63), 2**63 - 1
_NEAREST_TO_0 = 1e-100
"""Smallest number that is not 0 in any unit, and whose inverse is finite in any unit."""


def _is_closed(kind: type[Record]) -> bool:
    return kind.__struct_config__.forbid_unknown_fields


@cache
def is_plain(kind: Any) -> bool:
    """Return True if `msgspec.convert` validates a type completely.

    Floats need bounds, which exclude NaN and infinity; fields with readers are excluded.
    """
    inner = get_args(kind)
    if get_origin(kind) is Annotated:
        bounded = inner[0] is float and any(_has_bounds(meta) for meta in inner[1:])
        return "read" not in extra_of(kind) and (bounded or is_plain(inner[0]))
    if get_origin(kind) in (list, tuple, dict, Union, UnionType):
        return all(one is Ellipsis or is_plain(one) for one in inner)
    if is_record(kind):
        return (
            not hasattr(kind, "prepared")
            and not issubclass(kind, Entry)
            and all(is_plain(one.type) for one in fields_of(kind).values())
        )
    return get_origin(kind) is Literal or kind in (Any, bool, int, str, NoneType)


@cache
def _has_any(kind: Any) -> bool:
    """Return True if a record's field, or an item in it, may have a value of any type."""
    if is_record(kind):
        return any(_has_any(one.type) for one in fields_of(kind).values())
    return kind is Any or any(map(_has_any, get_args(kind)))


def _has_bounds(meta: Any) -> bool:
    if not isinstance(meta, Meta):
        return False
    ends = (meta.ge, meta.gt), (meta.le, meta.lt)
    # 0 is a bound, None is not.
    return all(any(value is not None for value in end) for end in ends)


def below(key: str, name: object) -> str:
    """Return the dotted key of the entry `name` in the object at `key`."""
    return f"{key}.{name}" if key and name != "" else key or str(name)


def unknown_key(key: str, known: list[str]) -> str:
    """Return the error message for an unknown key, with the most similar known key."""
    names = ", ".join(known)
    few = f"Use {names}" if 0 < len(names) <= _MOST_NAMES else "Remove it"
    return with_remedy("this key is unknown", did_you_mean(key, known, otherwise=few))


_MOST_NAMES = 60
"""Maximum characters of the known keys that an error lists."""


def headed(data: Mapping[str, Any], format_: str, what: str) -> Mapping[str, Any]:
    """Return a JSON object after checking its keys `format` and `version`; raises KeyFault.

    `prepared` methods of records call it before validation, because every key of another kind of
    document would be an error.

    format_ : expected value of `format`; the expected `version` is 1.
    what : kind of document with its article, such as `a site`, for errors.
    """
    for key, expected in (("format", format_), ("version", 1)):
        if key not in data:
            start = f'"{key}": {json.dumps(expected)}'
            raise KeyFault(key, f"this key is missing. Begin {what} with {start}")
        # type() as well: true is 1 in Python.
        if data[key] != expected or type(data[key]) is not type(expected):
            given = f"the value is {shorten(data[key])}, expected {expected!r}"
            raise KeyFault(key, f"{given}. Use {what}" if key == "format" else given)
    return data


def record_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a record type."""
    whole = _with_own(msgspec.json.schema(kind, schema_hook=_schema_of))
    definitions = whole.pop("$defs", {})
    if "$ref" in whole:
        whole = definitions.pop(whole["$ref"].rsplit("/", 1)[1])
    text = json.dumps([whole, definitions])
    # Definitions that a custom reader replaces are not needed.
    used = {name: one for name, one in definitions.items() if f'"#/$defs/{name}"' in text}
    return {"$defs": used, **whole} if used else whole


def _schema_of(kind: Any) -> dict[str, Any]:
    schema: dict[str, Any] = kind.json_schema()
    return schema


def _is_described(node: Mapping[str, Any]) -> bool:
    # A document may have a key `description` as well.
    return isinstance(node.get("description"), str)


def _with_own(node: Any) -> Any:
    if isinstance(node, dict):
        if _OWN in node:
            own = inlined(record_schema(_LIKE[node[_OWN]]))
            if own.get("additionalProperties") is False:
                own["patternProperties"] = {"^_": {"description": "A comment; ignored."}}
            return {"anyOf": [own, {"type": "null"}]} if "anyOf" in node else own
        # Docstrings are indented like the code around them.
        text: dict[str, Any] = {}
        if _is_described(node):
            text["description"] = cleandoc(node["description"])
        if node.get("uniqueItems") and "default" in node:
            # A set has no order.
            text["default"] = sorted(node["default"])
        return {key: _with_own(one) for key, one in node.items()} | text
    return [_with_own(one) for one in node] if isinstance(node, list | tuple) else node


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with `$ref` references replaced by the definitions; `schema` is modified."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                target = definitions[node["$ref"].rsplit("/", 1)[1]]
                return resolve({**target, **{k: v for k, v in node.items() if k != "$ref"}})
            return {key: resolve(value) for key, value in node.items()}
        return [resolve(value) for value in node] if isinstance(node, list) else node

    result: dict[str, Any] = resolve(schema)
    return result

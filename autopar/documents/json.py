"""Strict reading and atomic writing of JSON documents and their records, with one-sentence errors.

The json module accepts duplicate keys, NaN and numbers that overflow; a document of ours must
not. Everything that can be wrong before the content is looked at is refused here.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import cache
from inspect import cleandoc
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT, Meta, ValidationError, convert
from msgspec.structs import FieldInfo, fields

from autopar.errors import DocumentError, nearest
from autopar.output import Aside, write_files
from autopar.records import Entry, KeyFault, Record, shorten

_MAX_BYTES = 256 << 20
"""Far above any document; keeps a wrong path from filling the memory."""
_DEEPEST = 64
"""Brackets inside brackets; no document has a dozen."""


class JsonDocument(Record):
    """A parsed file: its path, top-level object and the SHA-256 of its bytes."""

    path: Path
    data: dict[str, Any]
    sha256: str


class _DuplicateKeyError(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    # json itself would keep the last of equal keys without a word
    for key, value in pairs:
        if key in result:
            raise _DuplicateKeyError(key)
        result[key] = value
    return result


def load_object(path: Path | str, *, remedy: str | None = None) -> JsonDocument:
    """Return the top-level object of a JSON file.

    Raises
    ------
    DocumentError: missing (with `remedy`, what makes the file), not a regular file, unreadable,
        empty, not UTF-8, not JSON, truncated, duplicate keys, or no object at top level.
    """
    path = Path(path)
    try:
        if not path.exists():
            raise DocumentError(path, "this file does not exist", remedy=remedy)
        if path.is_dir():
            raise DocumentError(path, "this is a directory, expected a JSON file", remedy=remedy)
        if not path.is_file():
            raise DocumentError(path, "this is not a regular file, expected a JSON file")
        if path.stat().st_size > _MAX_BYTES:
            raise DocumentError(
                path, f"the file is larger than {_MAX_BYTES >> 20} MiB, expected a profile document"
            )
        raw = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DocumentError(path, f"the file cannot be read ({reason})") from None
    return JsonDocument(
        path=path, data=_parse(path, raw, remedy), sha256=hashlib.sha256(raw).hexdigest()
    )


def _parse(path: Path, raw: bytes, remedy: str | None) -> dict[str, Any]:
    try:
        # -sig: some editors begin files with a byte-order mark
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
            path, "this key appears twice in one object", key=error.key, remedy="remove one of them"
        ) from None
    except json.JSONDecodeError as error:
        # an error behind the last character: something is missing there
        end = " (the file seems truncated)" if error.pos >= len(text.rstrip()) else ""
        raise DocumentError(
            path,
            f"not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}{end}",
        ) from None
    except (ValueError, RecursionError):  # numbers of thousands of digits, thousands of brackets
        raise DocumentError(
            path, "not valid JSON: a number is too long or brackets nest too deep"
        ) from None
    # what checks a document calls itself for every bracket, and the interpreter has a limit
    if raw.count(b"[") + raw.count(b"{") > _DEEPEST and _depth(data) > _DEEPEST:
        raise DocumentError(path, f"brackets nest deeper than {_DEEPEST}, expected a document")
    if not isinstance(data, dict):
        raise DocumentError(
            path, f"the top level is {shorten(data)}, expected an object {{key: value, ...}}"
        )
    return data


def _depth(data: object) -> int:
    """Return how many brackets are open at once, at most."""
    depth, level = 0, [data]
    while level:
        depth += 1
        level = [
            item
            for node in level
            if isinstance(node, dict | list)
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
    return depth


def write_json(
    path: Path, data: dict[str, Any], *, number_rows: bool = False, aside: Aside | None = None
) -> None:
    """Write an object as indented JSON, atomically, keys in the given order.

    `number_rows`: lists of numbers take rows of about 100 columns, not a line per number.
    `aside`: as `autopar.output.write_files` has it.
    """
    text = _with_rows(data, "", 0) if number_rows else json.dumps(data, indent=4, allow_nan=False)
    write_files({Path(path): text + "\n"}, aside=aside)


_COLUMNS = 100
_INDENT = "    "
_encode = json.JSONEncoder(allow_nan=False).encode  # json.dumps makes a new one every time


def _with_rows(value: Any, indent: str, column: int) -> str:
    """Return JSON that begins in `column` of a line that is indented by `indent`."""
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
# Records in a document. `msgspec.convert` takes what is right, and stops at the first fault of what
# is not. Only then, and for what it cannot say of a type, values are read one by one, so that each
# fault has its key, its value and what was expected.


Fault = tuple[str, str]
"""Key, such as `layers[0].num_heads`, and what is wrong with it."""
_Kind = TypeVar("_Kind")
_MISSING = "this key is missing, expected "
_OWN = "x-own"
"""Key of a schema, in whose place that of a type of `_LIKE` stands; no document shows it."""
_LIKE: list[Any] = []


def own_reader(
    read: Callable[[Any, str, list[Fault]], Any], like: Any, expected: str | None = None
) -> Meta:
    """Return the annotation of a field that a function reads, whatever type it has in Python.

    read : as `taken`. like : the type of what it reads. expected : the same in words.
    """
    words = {} if expected is None else {"expected": expected}
    # a schema takes long to make, and few are asked for
    _LIKE.append(like)
    place = {_OWN: len(_LIKE) - 1}
    return Meta(extra={"read": read, "like": like, **words}, extra_json_schema=place)


def value_reader(read: Callable[[Any], Any], expected: str, like: Any = Any) -> Meta:
    """Return the annotation of a field whose value a function reads.

    read : raises KeyFault. expected : in words. like : the type of what it reads.
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
    """Return the record in the object of a file; keys that begin with `_` are comments.

    remedy : of a missing key.

    Raises
    ------
    DocumentError : names file, key and value; what is wrong is said before what is missing.
    """
    whole: Any = kind
    if is_plain(whole):
        try:
            made = convert(data, kind)
            # numbers that exceed 64 bits are not held against bounds
            msgspec.json.encode(data)
        except (ValidationError, OverflowError, TypeError, ValueError):
            pass
        else:
            return made
    found: list[Fault] = []
    held: _Kind = taken(kind, data, "", found)
    if not found:
        return held
    key, problem = min(found, key=lambda fault: _order(kind, fault, data))
    if problem.startswith(_MISSING):
        near = _misspelt(kind, key, data)
        remedy = f"the file has the similar key {near!r}" if near else remedy
    raise DocumentError(path, problem, key=short_key(key), remedy=remedy)


def _order(kind: Any, fault: Fault, data: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return what sorts what is wrong first, then what is misspelt, then what is missing."""
    missing = fault[1].startswith(_MISSING)
    return missing, missing and not _misspelt(kind, fault[0], data)


def _misspelt(kind: Any, key: str, data: Mapping[str, Any]) -> str | None:
    """Return what a file that may have any keys has in the place of a missing one."""
    known = _fields(kind) if _is_record(kind) else {}
    return nearest(key, [str(name) for name in data if name not in known], 0.8)


def short_key(key: str) -> str | None:
    """Return a key for a message; None for that of the whole document."""
    return (key[:120] + "..." if len(key) > 120 else key) or None


def written(value: Any, *, defaults: bool = True) -> Any:
    """Return a record as JSON has it, without what is null, and without `defaults` if not asked."""
    if isinstance(value, Record):
        return {
            one.encode_name: written(item, defaults=defaults)
            for one in _fields(type(value)).values()
            if (item := getattr(value, one.name)) is not None
            and (defaults or item != default_of(one))
        }
    if isinstance(value, dict):
        return {key: written(item, defaults=defaults) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [written(item, defaults=defaults) for item in value]
    return value


def default_of(one: FieldInfo) -> Any:
    """Return what a field has that is not given, `NODEFAULT` where it has to be."""
    return one.default if one.default_factory is NODEFAULT else one.default_factory()


def faults(kind: Any, value: Any) -> list[Fault]:
    """Return all faults of a value of JSON that is to be of this type."""
    found: list[Fault] = []
    taken(kind, value, "", found)
    return found


def taken(kind: Any, value: Any, key: str, found: list[Fault]) -> Any:
    """Return what a type holds of a value of JSON; what is wrong with it is added to `found`."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _taken_annotated(kind, value, key, found)
    if origin in (Union, UnionType):
        kinds = [one for one in inner if one is not NoneType]
        if value is None and len(kinds) < len(inner):
            return None
        if len(kinds) == 1:
            return taken(kinds[0], value, key, found)
    elif origin in (list, tuple) and isinstance(value, list | tuple):
        items = enumerate(value)
        return origin(taken(inner[0], item, f"{key}[{place}]", found) for place, item in items)
    elif origin is dict and isinstance(value, Mapping):
        return {
            taken(inner[0], name, below(key, name), found): taken(
                inner[1], item, below(key, name), found
            )
            for name, item in value.items()
        }
    elif hasattr(kind, "taken"):
        return kind.taken(value, key, found)
    elif _is_record(kind) and isinstance(value, kind):
        return value
    elif _is_record(kind) and isinstance(value, Mapping):
        return _taken_object(kind, value, key, found)
    return _taken_plain(kind, value, key, found)


def _taken_annotated(kind: Any, value: Any, key: str, found: list[Fault]) -> Any:
    inner, *metas = get_args(kind)
    extra = _extra(kind)
    if "read" in extra:
        if value is None and NoneType in get_args(inner):
            return None
        if isinstance(value, Mapping) or not _is_record(extra["like"]):
            return extra["read"](value, key, found)
        found.append((key, f"the value is {shorten(value)}, expected {expected_of(kind)}"))
        return None
    # what is inside is said first, and by its own key
    whole = get_origin(inner) or inner
    if _is_record(whole) and isinstance(value, Mapping):
        return taken(inner, value, key, found)
    if whole not in (list, tuple, dict):
        return _taken_plain(kind, value, key, found)
    number = len(found)
    made = taken(inner, value, key, found)
    if len(found) == number:
        _taken_plain(Annotated[(whole, *metas)], value, key, found)
    return made


def _taken_object(
    kind: type[Record], value: Mapping[str, Any], key: str, found: list[Fault]
) -> Any:
    # what a record makes of the object of a file before its keys are looked at
    prepared = getattr(kind, "prepared", None)
    if prepared is not None:
        try:
            value = prepared(value)
        except KeyFault as fault:
            found.append((below(key, fault.key), str(fault)))
            return None
    known, number = _fields(kind), len(found)
    # a field that another release, or another tool, calls otherwise
    others: Mapping[str, str] = getattr(kind, "other_names", {})
    called = {name: name for name in known}
    called |= {name: o for name, o in others.items() if name not in value and o in value}
    more = {}
    for name in value:
        # of a file every key is one; of a dictionary from Python it may be anything
        if not isinstance(name, str):
            found.append((key, f"a key is {shorten(name)}, expected a string"))
        elif name in known or name.startswith("_"):
            continue
        elif _is_closed(kind):
            found.append((below(key, name), unknown_key(name, list(known))))
        elif issubclass(kind, Entry):
            more[name] = value[name]
    values, whole = {}, True
    for name, one in known.items():
        here, before = below(key, called[name]), len(found)
        if called[name] in value:
            values[one.name] = taken(one.type, value[called[name]], here, found)
        elif one.required:
            found.append((here, _MISSING + expected_of(one.type)))
        if len(found) > before:
            values.pop(one.name, None)
            whole = whole and not one.required
    # what holds between several keys is looked at beside what is wrong with others
    if not whole:
        return None
    try:
        made = kind(**values, **more)
    except KeyFault as fault:
        found.append((below(key, fault.key), str(fault)))
        return None
    return made if len(found) == number else None


def _taken_plain(kind: Any, value: Any, key: str, found: list[Fault]) -> Any:
    extra = _extra(kind)
    # numbers that exceed 64 bits are not held against bounds
    held = max(_LEAST, min(value, _MOST)) if type(value) is int else value
    try:
        made = convert(held, kind)
    except (ValidationError, UnicodeEncodeError):
        # half of a surrogate pair is no character
        made = math.nan
    if kind is Any or not isinstance(made, float) or math.isfinite(made):
        return value if type(made) is int or "as_written" in extra else made
    problem = extra.get("problem")
    expected = f"the value is {shorten(value)}, expected {expected_of(kind)}"
    found.append((key, expected if problem is None else problem(value)))
    return None


_LEAST, _MOST = -(2**63), 2**63 - 1


def _is_record(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Record)


@cache
def _fields(kind: type[Record]) -> dict[str, FieldInfo]:
    return {one.encode_name: one for one in fields(kind)}


def _is_closed(kind: type[Record]) -> bool:
    return kind.__struct_config__.forbid_unknown_fields


def _extra(kind: Any) -> Mapping[str, Any]:
    """Return what our own annotation of a type says of it."""
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((meta.extra for meta in metas if isinstance(meta, Meta) and meta.extra), {})


@cache
def is_plain(kind: Any) -> bool:
    """Return whether `convert` alone knows what is right of a type: floats have bounds."""
    inner = get_args(kind)
    if get_origin(kind) is Annotated:
        bounded = inner[0] is float and any(_has_bounds(meta) for meta in inner[1:])
        return "read" not in _extra(kind) and (bounded or is_plain(inner[0]))
    if get_origin(kind) in (list, tuple, dict, Union, UnionType):
        return all(one is Ellipsis or is_plain(one) for one in inner)
    if _is_record(kind):
        return (
            not hasattr(kind, "prepared")
            and not issubclass(kind, Entry)
            and all(is_plain(one.type) for one in fields(kind))
        )
    return get_origin(kind) is Literal or kind in (Any, bool, int, str, NoneType)


def _has_bounds(meta: Any) -> bool:
    if not isinstance(meta, Meta):
        return False
    ends = (meta.ge, meta.gt), (meta.le, meta.lt)
    # 0 is an end, and None none
    return all(any(value is not None for value in end) for end in ends)


def below(key: str, name: object) -> str:
    """Return the key of what is under a name inside another key."""
    return f"{key}.{name}" if key and name != "" else key or str(name)


def unknown_key(key: str, known: list[str]) -> str:
    """Return what is said of a key that is none of the known."""
    near = nearest(key, known, 0.0)
    return "this key is unknown" + (f"; the nearest known key is {near!r}" if near else "")


_WORDS = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}


def expected_of(kind: Any) -> str:
    """Return in words what a type takes."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        extra = _extra(kind)
        if "expected" in extra:
            return str(extra["expected"])
        if "like" in extra:
            return expected_of(extra["like"])
        metas = [meta for meta in inner[1:] if isinstance(meta, Meta)]
        least = next((meta.min_length for meta in metas if meta.min_length is not None), None)
        most = next((meta.max_length for meta in metas if meta.max_length is not None), None)
        words = expected_of(inner[0])
        if least is None:
            return words
        number = f"{least} items" if least == most else f"at least {least} item(s)"
        return f"{words} of {number}"
    if origin is Literal:
        return " or ".join(filter(None, (", ".join(map(repr, inner[:-1])), repr(inner[-1]))))
    if origin in (Union, UnionType):
        # null is nothing that anybody means to write
        return " or ".join(expected_of(one) for one in inner if one is not NoneType)
    if origin in (list, tuple) or kind in (list, tuple):
        return "a list"
    if _is_record(kind):
        required = [name for name, one in _fields(kind).items() if one.required]
        return f"an object of {', '.join(required)}" if required else "an object"
    return _WORDS.get(kind, "an object")


def headed(data: Mapping[str, Any], format_: str, what: str) -> Mapping[str, Any]:
    """Return the object of a document; raises KeyFault where it is of another kind.

    It is for `prepared`: of another document all keys would be wrong. what : such as `a site`.
    """
    for key, expected in (("format", format_), ("version", 1)):
        if key not in data:
            start = f'"{key}": {json.dumps(expected)}'
            raise KeyFault(key, f"this key is missing; {what} starts with {start}")
        # type() too: true is 1 in Python
        if data[key] != expected or type(data[key]) is not type(expected):
            raise KeyFault(key, f"the value is {shorten(data[key])}, expected {expected!r}")
    return data


def record_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a file of records."""
    whole = _with_own(msgspec.json.schema(kind, schema_hook=_schema_of))
    definitions = whole.pop("$defs", {})
    if "$ref" in whole:
        whole = definitions.pop(whole["$ref"].rsplit("/", 1)[1])
    text = json.dumps([whole, definitions])
    # those that a reader of our own stands for
    used = {name: one for name, one in definitions.items() if f'"#/$defs/{name}"' in text}
    return {"$defs": used, **whole} if used else whole


def _schema_of(kind: Any) -> dict[str, Any]:
    schema: dict[str, Any] = kind.json_schema()
    return schema


def _is_described(node: Mapping[str, Any]) -> bool:
    # a key of a document may be called so as well
    return isinstance(node.get("description"), str)


def _with_own(node: Any) -> Any:
    if isinstance(node, dict):
        if _OWN in node:
            own = inlined(record_schema(_LIKE[node[_OWN]]))
            if own.get("additionalProperties") is False:
                own["patternProperties"] = {"^_": {"description": "A comment; ignored."}}
            return {"anyOf": [own, {"type": "null"}]} if "anyOf" in node else own
        # docstrings are indented as they stand in the code
        text = {"description": cleandoc(node["description"])} if _is_described(node) else {}
        return {key: _with_own(one) for key, one in node.items()} | text
    return [_with_own(one) for one in node] if isinstance(node, list | tuple) else node


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with its references written out; nested ones would lose their target."""
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

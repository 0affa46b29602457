"""Strict reading and atomic writing of JSON documents and their records, with one-sentence errors.

The json module accepts duplicate keys, NaN and numbers that overflow; a document of ours must
not. Everything that can be wrong before the content is looked at is refused here.
"""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta, ValidationError, convert
from msgspec.structs import fields

from autopar.errors import DocumentError, nearest
from autopar.output import Aside, write_files
from autopar.records import KeyFault, Record

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


def shorten(value: object, limit: int = 60) -> str:
    """Return a value for a message: one line, at most about `limit` characters."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    short.maxdict = short.maxlist = 3
    text = "null" if value is None else short.repr(value)
    if isinstance(value, bool):
        text = str(value).lower()
    return text if len(text) <= 2 * limit else text[: 2 * limit] + "..."


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
# is not. Only then are keys converted one by one, so that each fault has its key, its value and
# what was expected.


Fault = tuple[str, str]
"""Key, such as `layers[0].num_heads`, and what is wrong with it."""
_Record = TypeVar("_Record", bound=Record)
_MISSING = "this key is missing, expected "


def read_record(kind: type[_Record], path: Path | str, data: Mapping[str, Any]) -> _Record:
    """Return the record in the object of a file; keys that begin with `_` are comments.

    Raises
    ------
    DocumentError : names file, key and value; what is wrong is said before what is missing.
    """
    try:
        return convert(data, kind)
    except ValidationError:
        content = _without_comments(data)
    found = list(faults(kind, content))
    if not found:
        return convert(content, kind)
    key, problem = min(found, key=lambda fault: fault[1].startswith(_MISSING))
    raise DocumentError(path, problem, key=key or None)


def _without_comments(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_comments(v) for k, v in value.items() if not str(k).startswith("_")}
    return [_without_comments(item) for item in value] if isinstance(value, list) else value


def faults(kind: Any, value: Any, key: str = "") -> Iterator[Fault]:
    """Yield all faults of a value of JSON that is to be of this type; `key` is its own."""
    plain = _plain(kind, value)
    if isinstance(plain, type) and issubclass(plain, Record) and isinstance(value, Mapping):
        yield from _of_object(plain, value, key)
        return
    inner = get_args(plain)
    items: Iterable[tuple[str, Any]] = ()
    if get_origin(plain) in (list, tuple) and isinstance(value, list):
        items = ((f"{key}[{place}]", item) for place, item in enumerate(value))
        inner = inner[:1]
    elif get_origin(plain) is dict and isinstance(value, Mapping):
        items = ((_below(key, name), item) for name, item in value.items())
    inside = [fault for name, item in items for fault in faults(inner[-1], item, name)]
    yield from inside
    if not inside and not _accepts(kind, value):
        yield key, f"the value is {shorten(value)}, expected {_expected(kind)}"


def _plain(kind: Any, value: Any) -> Any:
    """Return the type of what is inside a value: without bounds, and null where it is not."""
    if get_origin(kind) is Annotated:
        return _plain(get_args(kind)[0], value)
    if get_origin(kind) in (Union, UnionType) and value is not None:
        kinds = [one for one in get_args(kind) if one is not NoneType]
        return _plain(kinds[0], value) if len(kinds) == 1 else kind
    return kind


def _of_object(kind: type[Record], value: Mapping[str, Any], key: str) -> Iterator[Fault]:
    known = {field.name: field for field in fields(kind)}
    found = []
    for name in value:
        if name not in known:
            near = nearest(str(name), list(known), 0.0)
            hint = f"; the nearest known key is {near!r}" if near else ""
            found.append((_below(key, name), f"this key is unknown{hint}"))
    for name, field in known.items():
        if name in value:
            found += faults(field.type, value[name], _below(key, name))
        elif field.required:
            found.append((_below(key, name), _MISSING + _expected(field.type)))
    yield from found
    if not found:
        try:
            convert(value, kind)
        except ValidationError as error:
            fault = error.__cause__
            if not isinstance(fault, KeyFault):
                raise
            yield _below(key, fault.key), str(fault)


def _accepts(kind: Any, value: Any) -> bool:
    try:
        convert(value, kind)
    except ValidationError:
        return False
    return True


def _below(key: str, name: str) -> str:
    return f"{key}.{name}" if key else str(name)


_WORDS = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}


def _expected(kind: Any) -> str:
    """Return in words what a type takes."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        metas = [meta for meta in inner[1:] if isinstance(meta, Meta)]
        for meta in metas:
            if meta.extra:
                return str(meta.extra["expected"])
            if meta.min_length is not None:
                return f"{_expected(inner[0])} of at least {meta.min_length} item(s)"
        return _expected(inner[0])
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (Union, UnionType):
        # null is nothing that anybody means to write
        return " or ".join(_expected(one) for one in inner if one is not NoneType)
    if origin in (list, tuple):
        return "a list"
    return _WORDS.get(kind, "an object")


def record_schema(kind: type[Record]) -> dict[str, Any]:
    """Return the JSON Schema of a file of records."""
    whole = msgspec.json.schema(kind)
    definitions = whole["$defs"]
    own: dict[str, Any] = definitions.pop(kind.__name__)
    return {"$defs": definitions, **own} if definitions else own

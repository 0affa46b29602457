"""Documents whose keys follow patterns, the registry of all documents, and version checks.

Galvatron's profile files are flat dictionaries with keys such as `allreduce_size_8_consec_1`. A
`PatternDocument` describes them by a table of `Rule`s (pattern, value type, meaning). Validation,
suggestions for misspelt keys and the JSON Schema are derived from that table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from autopar.documents.json import (
    MOST_ERRORS,
    Fault,
    below,
    converted,
    faults,
    inlined,
    load_object,
    read_record,
    record_schema,
    short_key,
    unknown_key,
)
from autopar.errors import DocumentError, InputError
from autopar.records import Record, shorten

INT = "[1-9][0-9]{0,8}"
"""Pattern of a positive integer in a key, of at most nine digits so that `int` accepts it."""


class Rule(Record, kw_only=False, dict=True):
    """Rule for the keys of one kind."""

    pattern: str
    """Regular expression of the whole key."""
    example: str
    """Example of a key."""
    value: Any
    """Type of the value."""
    meaning: str
    """Description of the value in the JSON Schema."""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Compiled pattern, for use with `fullmatch`."""
        return re.compile(self.pattern)


class PatternDocument:
    """Object whose keys follow the patterns of `rules`; keys that begin with `_` are comments."""

    rules: ClassVar[tuple[Rule, ...]] = ()
    unread: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Pairs (pattern, problem) of keys that other programs write and whose values are not read."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root

    @classmethod
    def older(cls, value: Any) -> Any:
        """Return the JSON value of a file of an earlier release converted to the current format."""
        return value

    @classmethod
    def taken(cls, value: Any, key: str, found: list[Fault]) -> Self | None:
        """Return the document in a JSON value, None if the value is not an object.

        key : key of the value in the file, for errors.
        found : list to which errors are appended.
        """
        value = cls.older(value)
        if not isinstance(value, Mapping):
            found.append((key, f"the value is {shorten(value)}, expected an object"))
            return None
        root = {}
        known: list[str] | None = None
        for name, item in value.items():
            if len(found) >= MOST_ERRORS:
                break
            rule = next((r for r in cls.rules if r.regex.fullmatch(name)), None)
            if rule is not None:
                root[name] = converted(rule.value, item, below(key, name), found)
            elif not name.startswith("_"):
                # Finding the known keys passes over all keys, once.
                known = cls.known_keys(value) if known is None else known
                found.append((below(key, name), cls._problem(name, known)))
        return cls(root)

    @classmethod
    def _problem(cls, name: str, known: list[str]) -> str:
        """Return the error message for a key without a rule; known : as `known_keys` returns."""
        # A suggestion would give the value of another quantity a wrong key.
        reason = next((why for one, why in cls.unread if re.fullmatch(one, name)), None)
        return reason or unknown_key(name, known)

    @classmethod
    def known_keys(cls, keys: Iterable[str]) -> list[str]:
        """Return an example of every kind of key, and the valid ones among `keys`.

        They are candidates for suggestions for a misspelt key.
        """
        valid = [key for key in keys if any(rule.regex.fullmatch(key) for rule in cls.rules)]
        return [rule.example for rule in cls.rules] + valid[:200]

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of the object."""
        patterns = {}
        for rule in (r for r in cls.rules if r.pattern):
            value = inlined(record_schema(rule.value))
            # JSON Schema's regular expressions do not support (?P<name>...).
            pattern = re.sub(r"\(\?P<[a-z]+>", "(?:", rule.pattern)
            patterns[f"^(?:{pattern})$"] = {**value, "description": rule.meaning}
        patterns["^_"] = {"description": "A comment; ignored."}
        return {
            "type": "object",
            "title": cls.__name__.strip("_"),
            "description": (cls.__doc__ or "").strip(),
            "patternProperties": patterns,
            "additionalProperties": False,
            "propertyNames": {"examples": [rule.example for rule in cls.rules if rule.pattern]},
        }


_Document = TypeVar("_Document")
_Published = TypeVar("_Published")

DOCUMENTS: dict[str, type[Any]] = {}
"""Record class of every kind of document by role; modules register theirs when imported."""
EXTRAS: dict[str, dict[str, list[Any]]] = {}
"""Additions to the schemas of some documents, by role: examples, required keys."""


def published(
    role: str, example: Mapping[str, Any] | None = None, required: Sequence[str] = ()
) -> Callable[[type[_Published]], type[_Published]]:
    """Return a decorator that registers a record class whose JSON Schema is published.

    role : name of the document in plans, sidecars and docs/schemas.
    example : example for the schema; None if docs/reference/files.md shows one.
    required : keys that a file must contain although the record has defaults for them.
    """

    def known(kind: type[_Published]) -> type[_Published]:
        assert role not in DOCUMENTS, f"two documents are called {role!r}"
        DOCUMENTS[role] = kind
        EXTRAS[role] = {"examples": [] if example is None else [example], "required": [*required]}
        return kind

    return known


def check_version(
    path: Path | str, data: Mapping[str, Any], kind: str, newest: int, *, give: str, again: str
) -> None:
    """Raise DocumentError unless `format` is `kind` and this release can read `version`.

    The check comes before validation of the keys, because every key of another kind of document
    would be an error.

    give : remedy for another kind of document.
    again : alternative to an update of autopar for a newer version, as an imperative.
    """
    if data.get("format") != kind:
        problem = f"expected {kind!r}, got {shorten(data.get('format'))}"
        raise DocumentError(path, problem, key="format", remedy=give)
    version = data.get("version")
    # type() and not isinstance: true is an int in Python.
    if type(version) is not int or version < 1:
        problem = f"expected a positive integer, got {shorten(version)}"
        raise DocumentError(path, problem, key="version")
    if version > newest:
        problem = f"the value is {version}, but this release reads up to {newest}"
        raise DocumentError(path, problem, key="version", remedy=f"Update autopar or {again}")


# --------------------------------------------------------------------------------------------------
# Kinds of JSON files, for errors about a file of the wrong kind. A file that autopar writes has the
# key `format`; the others are recognized by keys that no other kind has.


APPLICATION, CALCULON_SYSTEM = "a Calculon application", "a Calculon system"
EXECUTION = "a Calculon execution"
SIZES, TENSOR2D_SYSTEM = "a tensor2d model", "a tensor2d system"
CONFIG, MODEL = "a config.json of Hugging Face", "a model.json"
STRATEGY = "a strategy file"
_KEYS = {
    APPLICATION: {"feedforward", "num_blocks"},
    CALCULON_SYSTEM: {"matrix", "networks"},
    EXECUTION: {"tensor_par", "pipeline_par"},
    SIZES: {"e", "depth"},
    TENSOR2D_SYSTEM: {"hbm_bandwidth", "nvlink_bandwidth"},
    CONFIG: {"model_type"},
    STRATEGY: {"pp_deg", "tp_sizes_enc"},
    "a configuration of DeepSpeed": {"zero_optimization"},
}
"""Kind of file -> keys that identify it."""


def kind_of(data: Mapping[str, Any]) -> str | None:
    """Return the kind of a JSON object with its article, None if it is not recognized."""
    name = data.get("format")
    if isinstance(name, str):
        return f"a file of format {shorten(name)}"
    return next((kind for kind, keys in _KEYS.items() if keys <= data.keys()), None)


def check_kind(path: Path | str, data: Mapping[str, Any], *expected: str, remedy: str) -> None:
    """Raise DocumentError if a file is recognized as another kind than the expected ones.

    expected : kinds with their articles, as in this module
    remedy : what to use instead
    """
    kind = kind_of(data)
    if kind is not None and kind not in expected:
        problem = f"this is {kind}, expected {' or '.join(expected)}"
        raise DocumentError(path, problem, remedy=remedy)


def document_errors(kind: Any, path: Path, data: Mapping[str, Any]) -> tuple[DocumentError, ...]:
    """Return the errors of a document, at most `MOST_ERRORS`; `read_record` raises only one.

    If there are `MOST_ERRORS` or more, a last error states that the list may be incomplete.
    """
    found = faults(kind, data)
    errors = [
        DocumentError(path, problem, key=short_key(key)) for key, problem in found[:MOST_ERRORS]
    ]
    if len(found) >= MOST_ERRORS:
        errors.append(DocumentError(path, f"more errors than these {MOST_ERRORS}"))
    return tuple(errors)


# --------------------------------------------------------------------------------------------------
# Loading of a document from a record, a mapping or a file.


def load_document(
    kind: type[_Document], source: _Document | Mapping[str, Any] | Path | str
) -> _Document:
    """Return the document in a record, a mapping of its keys, or a JSON file.

    Raises DocumentError: the file or mapping is invalid; names the file (or the kind of document),
    the key and its value. Raises InputError: `source` has another type.
    """
    if isinstance(source, kind):
        return source
    if isinstance(source, Mapping):
        return read_record(kind, Path(kind.__name__.lower()), dict(source))
    if isinstance(source, str | Path):
        return read_record(kind, Path(source), load_object(Path(source)).data)
    raise InputError(f"{kind.__name__.lower()}: the value is {shorten(source)}, expected an object")

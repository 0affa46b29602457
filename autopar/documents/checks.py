"""Pydantic building blocks of the documents: quantities with a plausible range and a unit, and
objects whose keys follow patterns.

The documented files are flat dictionaries with keys such as `allreduce_size_8_consec_1`. A
`PatternDocument` is a table of `Rule`s (pattern, value type, meaning); validation, the nearest
known key of a misspelt one, and the JSON Schema all come from that table.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_args

from msgspec import Meta

from autopar.documents.json import (
    Fault,
    below,
    faults,
    inlined,
    load_object,
    read_record,
    record_schema,
    short_key,
    shorten,
    taken,
    unknown_key,
)
from autopar.errors import DocumentError, InputError, nearest
from autopar.objects import (
    BaseModel,
    ConfigDict,
    model_validator,
    refusal,
)
from autopar.records import Record

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
    from pydantic_core import ErrorDetails, PydanticCustomError, core_schema

INT = "[1-9][0-9]{0,8}"
"""A positive integer inside a key; bounded, so that int() of it cannot fail."""


_HUGE = 1e308
"""Larger integers are no floats."""


class Quantity(Record):
    """A number with its unit and plausible range, used as `Annotated[float, Quantity(...)]`.

    A value outside the range is refused with `suspect`, the unit it was probably written in.
    """

    what: str
    unit: str
    minimum: float = 0.0
    maximum: float
    exclusive: bool = True
    """True when `minimum` itself is refused."""
    too_large: str
    too_small: str | None = None

    def check(self, value: object) -> float:
        """Return the value as a float, or raise the error that says what was expected."""
        bound = f"{'above' if self.exclusive else 'of at least'} {self.minimum:g}"
        unit = f" in {self.unit}" if self.unit else ""
        expected = f"expected {self.what}, a number {bound}{unit}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _problem(f"the value is {shorten(value)}, {expected}")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise _problem(f"the value is {shorten(value)}, {expected}")
        if number < self.minimum or (self.exclusive and number == self.minimum):
            hint = f" (it {self.too_small})" if self.too_small and number > 0 else ""
            raise _problem(f"the value is {number:g}, {expected}{hint}")
        if number > self.maximum:
            raise _problem(
                f"the value is {number:g}, expected {self.what}, at most {self.maximum:g}{unit}"
                f" (it {self.too_large})"
            )
        return number

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.check)

    def reader(self, inner: object) -> Callable[[object], float]:
        """Return what reads a value, for `autopar.objects`; the annotated type adds nothing."""
        return self.check

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        low = "exclusiveMinimum" if self.exclusive else "minimum"
        text = self.what + (f", {self.unit}" if self.unit else "")
        return {"type": "number", low: self.minimum, "maximum": self.maximum, "description": text}


def quantity(
    *,
    what: str,
    unit: str,
    minimum: float = 0.0,
    maximum: float,
    exclusive: bool = True,
    too_large: str,
    too_small: str | None = None,
) -> Meta:
    """Return the bounds of a number with its unit: far outside anything real.

    A value beyond them is refused with the unit that it was probably written in: `too_large`,
    `too_small`. exclusive : `minimum` itself is refused.
    """
    unit_of = f" in {unit}" if unit else ""
    bound = f"{'above' if exclusive else 'of at least'} {minimum:g}"
    expected = f"{what}, a number {bound}{unit_of}"

    def problem(value: Any) -> str:
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not abs(value) < _HUGE:
            return f"the value is {shorten(value)}, expected {expected}"
        number = float(value)
        if number > maximum:
            return (
                f"the value is {number:g}, expected {what}, at most {maximum:g}{unit_of}"
                f" (it {too_large})"
            )
        hint = f" (it {too_small})" if too_small and number > 0 else ""
        return f"the value is {number:g}, expected {expected}{hint}"

    rest: dict[str, Any] = {
        "le": maximum,
        "description": what + (f", {unit}" if unit else ""),
        "extra": {"expected": expected, "problem": problem},
    }
    return Meta(gt=minimum, **rest) if exclusive else Meta(ge=minimum, **rest)


class Value(Record, kw_only=False, eq=False):
    """A value that a function knows, used as `Annotated[bool, Value(...)]`; it stays as it is.

    Unlike pydantic's own kinds it makes no float of an int, so that what is read is what is
    written, and its error is in our words.
    """

    expected: str
    """In words: `the value is 'yes', expected true or false`."""
    accepts: Callable[[Any], bool]
    schema: Mapping[str, Any] | Callable[[], Mapping[str, Any]]
    """The JSON Schema of the same, or what returns it where it is long to make."""
    inside: bool = False
    """True where the annotated type checks what is inside, such as the items of a list."""

    def check(self, value: object) -> object:
        """Return the value, or raise the error that says what was expected."""
        if not self.accepts(value):
            raise _problem(f"the value is {shorten(value)}, expected {self.expected}")
        return value

    def __get_pydantic_core_schema__(
        self, source: type[Any], handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        from pydantic_core import core_schema

        if self.inside:
            return core_schema.no_info_before_validator_function(self.check, handler(source))
        return core_schema.no_info_plain_validator_function(self.check)

    def reader(self, inner: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
        """Return what reads a value, for `autopar.objects`; None where `inner` is unknown."""
        if not self.inside:
            return self.check
        if inner is None:
            return None
        within = inner
        return lambda value: within(self.check(value))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        own = self.schema() if callable(self.schema) else self.schema
        return {**(handler(schema) if self.inside else {}), **own}


FLAG = Value("true or false", lambda value: isinstance(value, bool), {"type": "boolean"})


def whole_number(least: int, most: int) -> Value:
    """Return the check of a whole number in this range."""
    return Value(
        f"a whole number from {least} to {most}",
        # type() and not isinstance: true is an int in Python
        lambda value: type(value) is int and least <= value <= most,
        {"type": "integer", "minimum": least, "maximum": most},
    )


def number(least: float, most: float) -> Value:
    """Return the check of a number in this range, in the place of a `float`'s own bounds."""
    return Value(
        f"a number from {least:g} to {most:g}",
        # NaN is in no range; true is an int in Python
        lambda value: (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and least <= value <= most
        ),
        {"type": "number", "minimum": least, "maximum": most},
        inside=True,
    )


class Rule(Record, kw_only=False, dict=True):
    """One kind of key: the pattern of the whole key, an example, the type and the meaning."""

    pattern: str
    example: str
    value: Any
    meaning: str

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern; use it with `fullmatch`."""
        return re.compile(self.pattern)


class PatternDocument:
    """An object whose keys follow the patterns of `rules`; keys beginning with `_` are comments."""

    rules: ClassVar[tuple[Rule, ...]] = ()

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root

    @classmethod
    def older(cls, value: Any) -> Any:
        """Return what older releases write as this one does."""
        return value

    @classmethod
    def taken(cls, value: Any, key: str, found: list[Fault]) -> Self | None:
        """Return the object of a file; what is wrong with it is added to `found`."""
        value = cls.older(value)
        if not isinstance(value, Mapping):
            found.append((key, f"the value is {shorten(value)}, expected an object"))
            return None
        root = {}
        for name, item in value.items():
            rule = next((r for r in cls.rules if r.regex.fullmatch(name)), None)
            if rule is not None:
                root[name] = taken(rule.value, item, below(key, name), found)
            elif not name.startswith("_"):
                found.append((below(key, name), unknown_key(name, cls.known_keys(value))))
        return cls(root)

    @classmethod
    def known_keys(cls, keys: Iterable[str]) -> list[str]:
        """Return examples of every kind of key, and the valid ones of a file."""
        valid = [key for key in keys if any(rule.regex.fullmatch(key) for rule in cls.rules)]
        return [rule.example for rule in cls.rules] + valid[:200]

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON Schema of the object."""
        patterns = {}
        for rule in (r for r in cls.rules if r.pattern):
            value = inlined(record_schema(rule.value))
            # JSON Schema's regular expressions have no (?P<name>...)
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


class StrictObject(BaseModel):
    """An object with fixed keys; an unknown key is refused with the nearest known one."""

    # made when it is first used: a command reads few of the documents that it knows
    model_config = ConfigDict(
        defer_build=True, strict=True, frozen=True, extra="forbid", allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _only_known_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key in data:
            # of a file every key is one; of a dictionary from Python it may be anything
            if not isinstance(key, str):
                raise key_error(f"a key is {shorten(key)}, expected a string")
            if key not in cls.model_fields and not key.startswith("_"):
                raise key_error(_unknown_key(key, list(cls.model_fields)), key)
        return {key: value for key, value in data.items() if not key.startswith("_")}


_Document = TypeVar("_Document")
_Published = TypeVar("_Published", bound=BaseModel | Record | PatternDocument)

DOCUMENTS: dict[str, type[Any]] = {}
"""Model or record of every kind of document, by its role, as far as their modules are imported."""
EXAMPLES: dict[str, Mapping[str, Any]] = {}
"""Of some, by role."""


def published(
    role: str, example: Mapping[str, Any] | None = None
) -> Callable[[type[_Published]], type[_Published]]:
    """Return the decorator of the model or record of a document, whose JSON Schema is published.

    role : how plans, sidecars and docs/schemas call it.
    example : of what docs/formats.md does not show.
    """

    def known(kind: type[_Published]) -> type[_Published]:
        assert role not in DOCUMENTS, f"two documents are called {role!r}"
        DOCUMENTS[role] = kind
        if example is not None:
            EXAMPLES[role] = example
        return kind

    return known


def validate_document(
    kind: type[_Document],
    path: Path | str,
    data: Mapping[str, Any],
    *,
    remedy: str | None = None,
) -> _Document:
    """Return the validated document, or raise a DocumentError that names key, value and remedy."""
    if issubclass(kind, Record | PatternDocument):
        return read_record(kind, path, data, remedy=remedy)
    model: Any = kind
    try:
        return model.model_validate(data)  # type: ignore[no-any-return]
    except refusal() as error:
        details = error.errors(include_url=False)

    def order(detail: ErrorDetails) -> tuple[bool, bool]:
        missing = detail["type"] == "missing"
        return missing, missing and not _misspelt(model, detail, data)

    # what is wrong is said before what is missing, and what is misspelt first of that
    detail = min(details, key=order)
    problem, location = _sentence(detail), detail["loc"]
    if detail["type"] == "missing":
        expected = _expected(model, location)
        problem = problem if expected is None else f"this key is missing, expected {expected}"
        near = _misspelt(model, detail, data)
        remedy = f"the file has the similar key {near!r}" if near else remedy
    # outside the except, so that no pydantic error hangs behind ours
    raise DocumentError(path, problem, key=_short_key(location), remedy=remedy)


def check_version(
    path: Path | str, data: Mapping[str, Any], kind: str, newest: int, *, give: str, again: str
) -> None:
    """Raise a DocumentError unless `format` is `kind`, and `version` one that this release reads.

    Before anything else is checked: of another document every key would be wrong.

    Parameters
    ----------
    give, again : what to do with another document, and with a newer version besides an update.
    """
    if data.get("format") != kind:
        problem = f"expected {kind!r}, got {shorten(data.get('format'))}"
        raise DocumentError(path, problem, key="format", remedy=give)
    version = data.get("version")
    # type() and not isinstance: true is an int in Python
    if type(version) is not int or version < 1:
        problem = f"expected a positive integer, got {shorten(version)}"
        raise DocumentError(path, problem, key="version")
    if version > newest:
        problem = f"is {version} and this release reads up to {newest}"
        raise DocumentError(path, problem, key="version", remedy=f"update autopar or {again}")


MOST_ERRORS = 100
"""Errors of one file that are listed."""


def document_errors(
    kind: type[BaseModel | Record | PatternDocument], path: Path, data: dict[str, Any]
) -> tuple[DocumentError, ...]:
    """Return the errors of a document, where `validate_document` raises the first.

    After `MOST_ERRORS` of them one more says that there are others.

    A validator stops at the first error of its object; so what is wrong is taken out and the rest
    validated again, until nothing new is found.
    """
    if issubclass(kind, Record | PatternDocument):
        return _errors(path, faults(kind, data))
    rest = copy.deepcopy(data)
    found: dict[tuple[str | int, ...], str] = {}
    while True:
        try:
            kind.model_validate(rest)
            details = []
        except refusal() as error:
            details = error.errors(include_url=False)
        new = [detail for detail in details if detail["loc"] not in found]
        for detail in new:
            found[detail["loc"]] = _sentence(detail)
            _take_out(rest, detail["loc"])
        if not new:  # what was taken out may be missing now: that is no error of the file
            break
        if len(found) >= MOST_ERRORS:  # another kind of file: nobody reads as many
            break
    return _errors(path, [(_short_key(key) or "", problem) for key, problem in found.items()])


def _errors(path: Path, found: Sequence[Fault]) -> tuple[DocumentError, ...]:
    errors = [
        DocumentError(path, problem, key=short_key(key)) for key, problem in found[:MOST_ERRORS]
    ]
    if len(found) >= MOST_ERRORS:
        errors.append(DocumentError(path, f"has more errors than these {MOST_ERRORS}"))
    return tuple(errors)


def _take_out(data: Any, location: tuple[str | int, ...]) -> None:
    """Remove a key of an object; items of a list stay, since the others would be renumbered."""
    for part in location[:-1]:
        if isinstance(data, list) and isinstance(part, int):
            data = data[part]
        else:
            data = data.get(part) if isinstance(data, dict) else None
    if location and isinstance(data, dict):
        data.pop(location[-1], None)


def _problem(text: str) -> PydanticCustomError:
    from pydantic_core import PydanticCustomError

    # braces would be taken for placeholders of the message template
    return PydanticCustomError("document", "{text}", {"text": text})


def _unknown_key(key: str, known: list[str]) -> str:
    near = nearest(key, known, 0.0)
    return "this key is unknown" + (f"; the nearest known key is {near!r}" if near else "")


def key_error(problem: str, *location: str | int) -> ValidationError:
    """Return the error of one key, to be raised inside a validator."""
    from pydantic_core import InitErrorDetails

    detail = InitErrorDetails(type=_problem(problem), loc=location, input=None)
    return refusal().from_exception_data("document", [detail])


def _misspelt(kind: type[BaseModel], detail: ErrorDetails, data: Mapping[str, Any]) -> str | None:
    """Return what a file that may have any keys has in the place of a missing one."""
    unknown = [key for key in data if key not in kind.model_fields]
    return nearest(str(detail["loc"][0]), unknown, 0.8) if len(detail["loc"]) == 1 else None


def _first(error: ValidationError) -> tuple[str, tuple[str | int, ...]]:
    """Return the sentence and the location of the first error of a ValidationError."""
    detail = error.errors(include_url=False)[0]
    return _sentence(detail), detail["loc"]


def _expected(kind: type[BaseModel], location: tuple[str | int, ...]) -> str | None:
    """Return in words what a key takes; None where no `Value` says it."""
    model: type[BaseModel] | None = kind
    field = None
    for part in location:
        if isinstance(part, str):
            field = None if model is None else model.model_fields.get(part)
            model = None if field is None else _model_in(field.annotation)
    values = field.metadata if field is not None else ()
    return next((value.expected for value in values if isinstance(value, Value)), None)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model in a type such as `list[Model] | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for part in get_args(annotation) if (model := _model_in(part))), None)


def _short_key(location: tuple[str | int, ...]) -> str | None:
    key = ".".join(str(part) for part in location if part != "")
    return (key[:120] + "..." if len(key) > 120 else key) or None


def _sentence(detail: ErrorDetails) -> str:
    value = shorten(detail.get("input"))
    kind = detail["type"]
    if kind == "document":
        return detail["msg"]
    if kind == "missing":
        return "this key is missing and is required"
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        return f"the value is {value}, expected an object"
    for limit, words in (("min_length", "at least"), ("max_length", "at most")):
        if kind in ("too_short", "too_long") and limit in detail.get("ctx", {}):
            return f"the value is {value}, expected {words} {detail['ctx'][limit]} item(s)"
    return f"the value is {value}, expected {detail['msg'].removeprefix('Input should be ')}"


# --------------------------------------------------------------------------------------------------
# A document from itself, its keys or its file.


_Loaded = TypeVar("_Loaded", bound=BaseModel)


def load_document(kind: type[_Loaded], source: _Loaded | Mapping[str, Any] | Path | str) -> _Loaded:
    """Return a document from itself, its keys, or a JSON file.

    Raises
    ------
    DocumentError: names the file (or the kind of document), the key, its value and the remedy.
    """
    if isinstance(source, kind):
        return source
    if isinstance(source, Mapping):
        return validate_document(kind, Path(kind.__name__.lower()), dict(source))
    if isinstance(source, str | Path):
        return validate_document(kind, Path(source), load_object(Path(source)).data)
    raise InputError(f"{kind.__name__.lower()}: the value is {shorten(source)}, expected an object")

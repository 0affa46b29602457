"""Records: frozen, keyword-only classes that hold data.

A subclass of `Record` is a `msgspec.Struct`: annotations are its fields, it is compared, hashed and
shown by value, and `asdict` and `fields` of `msgspec.structs` apply. Options of a class:

- `order=True` compares like tuples; `eq=False` compares by identity (records of arrays);
- `dict=True` is needed for a `functools.cached_property`;
- `kw_only=False` also accepts fields by position.

- `checked=True`, for records that users make, checks types and bounds of all fields.

Types and bounds of a field, `Annotated[int, whole_number(1, 8)]`, of other records are checked only
for files (`autopar.documents.json`). `typed` checks the arguments of a public function. Mutable
data and the options of commands are standard `dataclasses.dataclass`; fields of options have
metadata (`autopar.command.fields`).
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import Meta, Struct, StructMeta, ValidationError, convert, field, structs

from autopar.errors import OptionError, input_errors

if TYPE_CHECKING:
    import inspect

    # A type checker uses the standard function, so that it compares changes with fields.
    from dataclasses import replace as replace
else:

    def replace(one, /, **changes):
        """Return a copy with other values of some fields, like `copy.replace` of Python 3.13.

        Accepts a record or a standard dataclass; raises TypeError for an unknown field.
        """
        if isinstance(one, Entry):
            own = {name: getattr(one, name) for name in one.given - one.__dict__["_more"].keys()}
            return type(one)(**{**own, **one.__dict__["_more"], **changes})
        if isinstance(one, Struct):
            return structs.replace(one, **changes)
        import dataclasses

        return dataclasses.replace(one, **changes)


class _RecordType(StructMeta):
    """Metaclass that sets the options of `Record`: subclasses do not inherit `kw_only`."""

    def __new__(
        mcs,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, Any],
        /,
        *,
        frozen: bool = True,
        kw_only: bool = True,
        checked: bool = False,
        **options: Any,
    ) -> _RecordType:
        options |= {"frozen": frozen, "kw_only": kw_only}
        if checked:
            if "__post_init__" in namespace:
                raise TypeError(f"{name}: a checked record cannot have a __post_init__")
            namespace["__post_init__"] = _check_fields
        return super().__new__(mcs, name, bases, namespace, **options)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Record(Struct, metaclass=_RecordType, frozen=True, forbid_unknown_fields=True):
    """Base of all records."""


class _EntryType(_RecordType):
    if not TYPE_CHECKING:  # type checkers know the fields

        def __call__(cls, **values):  # noqa: N805 - a class
            more = {}
            if not cls.__struct_config__.forbid_unknown_fields:
                more = {k: v for k, v in values.items() if k not in cls.__struct_fields__}
            made = super().__call__(**{k: v for k, v in values.items() if k not in more})
            made.__dict__.update(_given=frozenset(values), _more=more)
            return made


class Entry(Record, metaclass=_EntryType, dict=True):
    """A record that stores which fields were given, so that a document is written as it was read.

    With `forbid_unknown_fields=False` unknown keys are stored and written, too.
    """

    @property
    def given(self) -> frozenset[str]:
        """Names of the fields that were given."""
        found: frozenset[str] = self.__dict__["_given"]
        return found

    def content(self) -> dict[str, Any]:
        """Return the JSON object of the entry: the given keys in their order."""
        names = [name for name in self.__struct_fields__ if name in self.given]
        values = {name: getattr(self, name) for name in names} | self.__dict__["_more"]
        return {name: content_of(value) for name, value in values.items()}


def content_of(value: Any, *, whole: bool = False) -> Any:
    """Return a value as JSON data; an `Entry` has its given keys, or all keys if `whole`."""
    if isinstance(value, Entry) and not whole:
        return value.content()
    if isinstance(value, Struct):
        named = {name: getattr(value, name) for name in value.__struct_fields__}
        return {name: content_of(item, whole=whole) for name, item in named.items()}
    if isinstance(value, Mapping):
        return {key: content_of(item, whole=whole) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [content_of(item, whole=whole) for item in value]
    return value


def record_of(
    name: str, kinds: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> Any:
    """Return a record type with the fields `kinds` (name -> annotation).

    defaults : name -> default, for optional fields
    """
    return _RecordType(
        name,
        (Record,),
        {"__annotations__": dict(kinds), "__module__": __name__, **(defaults or {})},
    )


class KeyFault(ValueError):  # noqa: N818 - a fault of a file, reported by a DocumentError
    """Error raised by `__post_init__` of a record of a file: the wrong key and the problem."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


def whole_number(least: int, most: int | None = None) -> Meta:
    """Return msgspec metadata that bounds an integer in a file."""
    above = "" if most is None else f" to {most}"
    return Meta(ge=least, le=most, extra={"expected": f"a whole number from {least}{above}"})


Positive = Annotated[int, whole_number(1, 1 << 40)]
PositiveNumber = Annotated[
    float, Meta(gt=0.0, le=1e18, extra={"expected": "a number above 0, at most 1e18"})
]
Count = Annotated[int, whole_number(0, 1 << 40)]
"""Bounds of sizes and degrees of a run, far above any real value."""
Few = Annotated[int, whole_number(0, 64)]
"""Bounds of counts whose items are estimated one by one, such as MTP layers."""


def number(least: float, most: float, unit: str = "") -> Meta:
    """Return msgspec metadata that bounds a number in a file; NaN is out of bounds.

    unit : unit of the number, for errors
    """
    words = f"a number from {least:g} to {most:g}".replace("e+", "e")
    return Meta(ge=least, le=most, extra={"expected": f"{words} in {unit}" if unit else words})


def some_text() -> Meta:
    """Return msgspec metadata for a non-empty text in a file."""
    return Meta(min_length=1, pattern=r"\S", extra={"expected": "a text that is not empty"})


_HUGE = 1e308
"""Limit of integers that convert to a float."""


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
    """Return msgspec metadata that bounds a quantity, with bounds far outside any real value.

    Parameters
    ----------
    what, unit : noun and unit for errors; an empty unit for a plain number
    exclusive : True if `minimum` itself is out of bounds
    too_large, too_small : clause of the error for such a value, such as its probable unit
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
                f"the value is {number:g}, expected {what}, at most "
                f"{maximum:g}{unit_of} (it {too_large})"
            )
        hint = f" (it {too_small})" if too_small and number > 0 else ""
        return f"the value is {number:g}, expected {expected}{hint}"

    rest: dict[str, Any] = {
        "le": maximum,
        "description": what + (f", {unit}" if unit else ""),
        "extra": {"expected": expected, "problem": problem},
    }
    return Meta(gt=minimum, **rest) if exclusive else Meta(ge=minimum, **rest)


def is_too_long(value: object) -> bool:
    """Return True for an integer that Python refuses to print, or soon would."""
    return isinstance(value, int) and value.bit_length() > 10_000


def plain(value: Any) -> Any:
    """Return a number or an array of NumPy as a Python value; other values are returned as is."""
    is_numpy = hasattr(value, "tolist") and not isinstance(value, type)
    return value.tolist() if is_numpy else value


def shown(value: object, limit: int = 60) -> str:
    """Return the first `limit` characters of a Python value's `repr`, on one line."""
    if is_too_long(value):
        return "an integer of thousands of digits"
    try:
        text = repr(value)
    except Exception:
        text = object.__repr__(value)
    return " ".join(text.split())[:limit]


def shorten(value: object, limit: int = 60) -> str:
    """Return a value as one line for a message, with strings cut to `limit` characters.

    The line has at most 2 * `limit` + 3 characters, that of a list or object `limit` + 3.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    short.maxdict = short.maxlist = 3
    text = "null" if value is None else short.repr(value)
    if isinstance(value, bool):
        text = str(value).lower()
    most = limit if isinstance(value, list | dict) else 2 * limit
    return text if len(text) <= most else text[:most] + "..."


Seconds = Annotated[
    float, quantity(what="a time", unit="s", maximum=1e5, too_large="looks like milliseconds")
]
SecondsOrZero = Annotated[
    float,
    quantity(
        what="a time",
        unit="s",
        maximum=1e5,
        exclusive=False,
        too_large="looks like milliseconds",
    ),
]


# --------------------------------------------------------------------------------------------------
# Types of Python values: fields of `checked` records, and arguments of `typed` functions.

_Called = TypeVar("_Called", bound=Callable[..., Any])


def _check_fields(one: Record) -> None:
    """Check the fields of a record, and convert NumPy numbers, lists and paths in place.

    Raises OptionError for the first field of another type or out of bounds.
    """
    for name, kind in _field_kinds(type(one)):
        value = getattr(one, name)
        made = checked_value(name, kind, value)
        if made is not value:
            structs.force_setattr(one, name, made)


@cache
def _field_kinds(kind: type[Record]) -> tuple[tuple[str, Any], ...]:
    """Return (name, type) of the fields of a record."""
    return tuple((one.name, one.type) for one in structs.fields(kind))


def typed(function: _Called) -> _Called:
    """Return a function that checks its arguments against their annotations.

    NumPy numbers, lists and paths are converted where the annotation names a plain number, a tuple
    or a text. An argument of another type raises OptionError, and a file that the system refuses
    InputError; a wrong number of arguments raises TypeError.
    """

    @wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        signature, kinds = _signature(function)
        bound = signature.bind(*values, **named)
        for name, value in bound.arguments.items():
            if name not in kinds:
                continue
            way = signature.parameters[name].kind
            if way is way.VAR_POSITIONAL:
                made: Any = tuple(checked_value(name, kinds[name], one) for one in value)
            elif way is way.VAR_KEYWORD:
                made = {key: checked_value(key, kinds[name], one) for key, one in value.items()}
            else:
                made = checked_value(name, kinds[name], value)
            bound.arguments[name] = made
        with input_errors():
            return function(*bound.args, **bound.kwargs)

    return cast("_Called", call)


@cache
def _signature(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return the signature and the types of annotated arguments; late, as it takes time."""
    import inspect

    return inspect.signature(function), get_type_hints(function, include_extras=True)


_EXACT = frozenset({int, bool, NoneType})
"""Types whose values msgspec takes as they are."""


def checked_value(name: str, kind: Any, value: Any) -> Any:
    """Return a Python value as a value of a type.

    name : name of the argument or field, for the error.

    Raises OptionError: the value has another type, or is out of bounds.
    """
    try:
        if type(value) in _EXACT:  # most fields, checked faster than by `_taken`
            # NameError: a record imports the types of its fields only for type checkers
            with suppress(ValidationError, TypeError, ValueError, NameError):
                return convert(value, kind)
        return _taken(kind, value)
    except ValidationError:
        raise OptionError(f"{name}: expected {_named(kind)}, got {shown(value)}") from None


def _taken(kind: Any, value: Any) -> Any:
    """Return a value as a value of a type; raises ValidationError."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return value
    if isinstance(value, str | Path) and not is_word(str(value)):
        raise ValidationError
    if origin in (Union, UnionType):
        # A value that has one of the types already is not converted to another.
        for one in sorted(inner, key=lambda one: not _is_instance(one, value)):
            with suppress(ValidationError):
                return _taken(one, value)
        raise ValidationError
    if origin in (tuple, Sequence):
        several = inner[:1] * len(_items(value)) if origin is Sequence or ... in inner else inner
        if len(several) != len(_items(value)):
            raise ValidationError
        return tuple(map(_taken, several, _items(value)))
    if origin is Mapping and isinstance(value, Mapping):
        return {_taken(inner[0], key): _taken(inner[1], one) for key, one in value.items()}
    if kind is Path and isinstance(value, str):
        return Path(value)
    if origin not in (Annotated, Literal) and kind not in _WORDS:
        # Instances of classes; a text is no list of its characters.
        if _is_instance(kind, value) and not isinstance(value, str | bytes):
            return value
        raise ValidationError
    bare = os.fspath(value) if isinstance(value, os.PathLike) else value
    try:
        # NumPy has subclasses of `float`; msgspec 0.23 raises IndexError for its arrays.
        made = convert(plain(bare), kind)
    except ValueError:  # half of a surrogate pair, or too many digits
        raise ValidationError from None
    if isinstance(made, float) and math.isnan(made):
        raise ValidationError
    return made


def is_word(text: str) -> bool:
    """Return True if the operating system accepts a text as a file name or an argument."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def _is_instance(kind: Any, value: Any) -> bool:
    """Return True if a value is an instance of a class, of the origin of a generic type."""
    whole = get_origin(kind) or kind
    return isinstance(whole, type) and isinstance(value, whole)


def _items(value: Any) -> Sequence[Any]:
    """Return the items of a list, a tuple or an array; raises ValidationError."""
    if getattr(value, "ndim", None) == 1:
        return list(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise ValidationError
    return value


def _named(kind: Any) -> str:
    """Return the valid Python values of a type in words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        words = [_named(one) for one in inner if one is not NoneType]
        return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
    if origin in (tuple, Sequence):
        return f"a list, each item {_named(inner[0])}"
    whole = origin or kind
    if isinstance(whole, type) and whole not in _WORDS and origin not in (Annotated, Literal):
        name = "path" if whole is Path else whole.__name__
        return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
    return expected_of(kind)


# --------------------------------------------------------------------------------------------------
# Types in words.


def is_record(kind: Any) -> bool:
    """Return True if a type is a record."""
    return isinstance(kind, type) and issubclass(kind, Record)


@cache
def fields_of(kind: type[Record]) -> dict[str, structs.FieldInfo]:
    """Return the fields of a record by their name in a file."""
    return {one.encode_name: one for one in structs.fields(kind)}


def extra_of(kind: Any) -> Mapping[str, Any]:
    """Return the `extra` of autopar's own annotation of a type."""
    metas = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((meta.extra for meta in metas if isinstance(meta, Meta) and meta.extra), {})


_WORDS = {bool: "true or false", str: "a text", int: "a whole number", float: "a number"}


_NAMED_KEYS = 9
"""Maximum number of required keys that an error names."""


def expected_of(kind: Any) -> str:
    """Return the valid values of a type in words, for error messages."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        extra = extra_of(kind)
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
        # null is optional, so that it is not listed.
        return " or ".join(expected_of(one) for one in inner if one is not NoneType)
    if origin in (list, tuple, frozenset) or (
        isinstance(kind, type) and issubclass(kind, list | tuple)
    ):
        return "a list"
    if is_record(kind):
        if kind.__struct_config__.tag_field:
            return f"{kind.__struct_config__.tag_field} {kind.__struct_config__.tag!r}"
        required = [name for name, one in fields_of(kind).items() if one.required]
        keys = f" with the key{'s' * (len(required) > 1)} {', '.join(required)}"
        if len(required) > _NAMED_KEYS:
            keys = f" with {len(required)} keys, such as {', '.join(required[:3])}"
        return f"an object{keys}" if required else "an object"
    return _WORDS.get(kind, "an object")

"""Records: frozen, keyword-only classes that hold data.

A subclass of `Record` is a `msgspec.Struct`: annotations are its fields, it is compared, hashed and
shown by value, and `asdict` and `fields` of `msgspec.structs` apply. Options of a class:

- `order=True` compares like tuples; `eq=False` compares by identity (records of arrays);
- `dict=True` is needed for a `functools.cached_property`;
- `kw_only=False` also accepts fields by position.

Bounds of a field, `Annotated[int, whole_number(1, 8)]`, are checked only for files
(`autopar.documents.json`), not when Python code makes a record. Mutable data and the options of
commands are standard `dataclasses.dataclass`; fields of options have metadata
(`autopar.command.fields`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, dataclass_transform

from msgspec import Meta, Struct, StructMeta, field, structs

if TYPE_CHECKING:
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
        **options: Any,
    ) -> _RecordType:
        options |= {"frozen": frozen, "kw_only": kw_only}
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


def shorten(value: object, limit: int = 60) -> str:
    """Return a value as one line for a message, with strings cut to `limit` characters.

    The line has at most 2 * `limit` + 3 characters.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = limit
    short.maxdict = short.maxlist = 3
    text = "null" if value is None else short.repr(value)
    if isinstance(value, bool):
        text = str(value).lower()
    return text if len(text) <= 2 * limit else text[: 2 * limit] + "..."


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

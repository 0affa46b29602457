"""The compiled closed forms as Python sees them: their module, columns, threads and switches.

What each model packs and unpacks is in its own `engine`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError, nearest
from autopar.records import Record, shorten
from search.planning.layered.core import core

# --------------------------------------------------------------------------------------------------
# Columns of values by name, as rows that the compiled engines read.


def check_names(where: str, given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise InputError unless exactly the expected columns are given."""
    for name in given:
        if name not in expected:
            raise InputError(f"{where}.{name}: is unknown, expected {', '.join(expected)}")
    for name in expected:
        if name not in given:
            raise InputError(f"{where}.{name}: is missing")


def array_of(where: str, values: Any) -> NDArray[Any]:
    """Return a column as an array; raise InputError where it is none, as lists of other lengths."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise InputError(
            f"{where}: the value is {shorten(values)}, expected a number or a list of numbers"
        ) from None


def integers(where: str, values: Any, largest: int, kinds: str = "iu") -> NDArray[Any]:
    """Return a column of integers from 0 to the largest; `kinds` of its type, as NumPy has them.

    Raises
    ------
    InputError: a value is something else; the sentence has the first one.
    """
    array = array_of(where, values)
    # an empty list is of floats to NumPy
    if array.size == 0:
        return array.astype(np.int64)
    fits = array.dtype.kind in kinds
    # words cannot be compared with a number
    wrong = (array < 0) | (array > largest) if fits else np.ones(array.shape, dtype=np.bool_)
    if wrong.any():
        raise InputError(
            f"{where}: the value is {shorten(array[wrong].tolist()[0])}, expected integers from 0 "
            f"to {largest}"
        )
    return array


def given_rows(
    where: str, values: NDArray[Any], dtype: np.dtype[Any], expected: str
) -> NDArray[Any]:
    """Return rows that are packed already, in memory as the compiled engines read them.

    Raises
    ------
    InputError: they have other fields; `expected` is what has the right ones.
    """
    if _fields(values.dtype) != _fields(dtype):
        raise InputError(
            f"{where}: the array has fields {shorten(values.dtype.names)}, expected those of "
            f"{expected}"
        )
    return np.ascontiguousarray(values, dtype=dtype)


def _fields(dtype: np.dtype[Any]) -> list[tuple[str, np.dtype[Any]]]:
    """Return names and types without the padding, which `np.concatenate` drops."""
    return [(name, dtype[name]) for name in dtype.names or ()]


ABSENT = -1
"""In columns of documents, where one has no such key and needs none."""


class DocumentField(Record):
    """What a key of plain documents takes."""

    largest: int
    """Of integers from 0."""
    flag: bool = False
    """True and false are taken too."""
    words: Mapping[str, int] | None = None
    """Word -> code, of a key that takes words alone."""
    default: int | None = None
    """Of documents without this key; None where it has to be there."""


def plain_columns(
    documents: list[Any], fields: Mapping[str, DocumentField]
) -> dict[str, NDArray[np.int64]] | None:
    """Return the columns of documents that are dictionaries of just what these fields take.

    None where one of them is anything else, right or wrong: then each is to be checked by itself,
    which takes tens of microseconds where this takes one.
    """
    rows = [
        (name, of.largest, of.flag, None if of.words is None else dict(of.words), of.default)
        for name, of in fields.items()
    ]
    columns = core.read_documents(documents, rows)
    return None if columns is None else dict(zip(fields, columns, strict=True))


def packed_rows(
    where: str, dtype: np.dtype[Any], columns: Mapping[str, NDArray[Any]]
) -> NDArray[Any]:
    """Return rows with these fields; what is not given is 1, and columns of one value repeat.

    Raises
    ------
    InputError: the columns have several lengths.
    """
    try:
        shape = np.broadcast_shapes(*(values.shape for values in columns.values()))
    except ValueError:
        lengths = sorted({values.size for values in columns.values()})
        raise InputError(f"{where}: columns have lengths {lengths}, expected one") from None
    rows = np.ones(shape or (1,), dtype=dtype)
    for name, values in columns.items():
        rows[name] = values
    return rows


# The compiled module, and what may be asked of it.


Objective = Literal["rate", "time", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("rate", "time", "memory")
"""Samples per second, seconds of a step, bytes of the first memory."""
LARGEST = 2**31 - 1
"""Of every number in a packed row."""
_MOST_THREADS = 1024
"""More are refused; no machine answers faster with them."""

calculon: Any = core.calculon
tensor2d: Any = core.tensor2d


# --------------------------------------------------------------------------------------------------
# Work that takes long, and Ctrl-C.


Halt = core.Halt
"""Its `ask` gives up compiled work from another thread, which then answers in parts."""
GO_ON = Halt()
"""For work that is over at once."""
_FEW_ROWS = 20_000
"""Are priced in some hundredths of a second."""
_Result = TypeVar("_Result")


def interruptible(work: Callable[[Any], _Result], *, rows: int | None = None) -> _Result:
    """Return what compiled work returns, which takes a `Halt`; Ctrl-C ends it and is raised.

    Python sees signals in its main thread, between its own instructions alone: so the work has a
    thread of its own there. In any other thread it is called as it is.

    rows : how many are priced; few are over before a thread has begun.
    """
    halt = Halt()
    brief = rows is not None and rows < _FEW_ROWS
    if brief or threading.current_thread() is not threading.main_thread():
        return work(halt)
    results: list[_Result] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def target() -> None:
        try:
            results.append(work(halt))
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    threading.Thread(target=target, daemon=True).start()
    try:
        over.wait()
    except BaseException:
        halt.ask()
        over.wait()
        raise
    if errors:
        raise errors[0]
    return results[0]


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise InputError where a word is none of its choices."""
    if value not in choices:
        raise InputError(
            f"{name}: the value is {shorten(value)}, expected one of {', '.join(choices)}"
        )


def check_flag(name: str, value: object) -> None:
    """Raise InputError where a value is neither true nor false: any other word would be true."""
    if not isinstance(value, bool):
        raise InputError(f"{name}: the value is {shorten(value)}, expected true or false")


def check_count(name: str, value: object, expected: str, least: int, most: int) -> None:
    """Raise InputError where a number is no integer between these; `expected` says it in words."""
    # True is an int to Python, and no number of anything
    if type(value) is not int or not least <= value <= most:
        raise InputError(f"{name}: the value is {shorten(value)}, expected {expected}")


def check_threads(threads: object) -> None:
    """Raise InputError where a number of threads is none that can be started."""
    check_count("threads", threads, f"1 to {_MOST_THREADS} threads", 1, _MOST_THREADS)


# --------------------------------------------------------------------------------------------------
# Switches for what the published numbers of a model contain and should not.


class Switches:
    """Defects to reproduce, one switch each; all are off unless given.

    All off is the corrected model and the default; all on reproduces published figures (`compat`).
    A subclass has the list of its model, which csrc/closed_form/quirks.hpp holds.
    """

    meanings: ClassVar[Mapping[str, str]]
    """Name -> what the defect is, which begins with its number in the documentation."""

    def __init__(self, **given: bool) -> None:
        for name in given:
            if name not in self.meanings:
                near = nearest(name, list(self.meanings), 0.0)
                raise TypeError(f"the switch {name!r} is unknown; the nearest one is {near!r}")
        self._on = frozenset(name for name, on in given.items() if on)

    @classmethod
    def of(cls, compat: bool | Self) -> Self:
        """Return the switches of `compat`: True for all, False for none, or they themselves."""
        if isinstance(compat, cls):
            return compat
        check_flag("compat", compat)
        return cls(**dict.fromkeys(cls.meanings, bool(compat)))

    def flags(self) -> dict[str, bool]:
        """Return every switch as the compiled engine takes it."""
        return {name: name in self._on for name in self.meanings}

    def __getattr__(self, name: str) -> bool:
        if name not in type(self).meanings:
            raise AttributeError(f"{type(self).__name__} has no switch {name!r}")
        return name in self._on

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash(self._on)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}=True' for name in sorted(self._on))})"

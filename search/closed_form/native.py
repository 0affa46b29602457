"""Common part of the Python interfaces to the compiled Calculon and tensor2d models.

It checks and packs columns, runs interruptible work, and defines the switches for defects. Each
`engine` module packs the inputs of its model and unpacks the results.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError, did_you_mean
from autopar.records import Record, shorten
from search.planning.layered.core import core

# --------------------------------------------------------------------------------------------------
# Columns of values by name, packed into the rows of the compiled engines.


def check_names(where: str, given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise InputError if a column is unknown or missing.

    where : name of the argument, for messages.
    given, expected : mappings with the column names as keys.
    """
    for name in given:
        if name not in expected:
            raise InputError(f"{where}.{name}: unknown key, expected {', '.join(expected)}")
    for name in expected:
        if name not in given:
            raise InputError(f"{where}.{name}: this key is missing")


def array_of(where: str, values: Any) -> NDArray[Any]:
    """Return a column as an array; raises InputError if it cannot be converted (ragged lists)."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise InputError(
            f"{where}: the value is {shorten(values)}, expected a number or a list of numbers"
        ) from None


def integers(where: str, values: Any, largest: int, kinds: str = "iu") -> NDArray[Any]:
    """Return a column of integers from 0 to `largest`.

    kinds : allowed `dtype.kind` codes of NumPy.

    Raises InputError: a value has another type or is out of range; the message contains the first
    one.
    """
    array = array_of(where, values)
    # NumPy gives an empty list a float type.
    if array.size == 0:
        return array.astype(np.int64)
    fits = array.dtype.kind in kinds
    # Strings cannot be compared with a number.
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
    """Return packed rows in the memory layout of the compiled engines.

    expected : name of the required dtype, for the message.

    Raises InputError: the fields of the array are not those of `dtype`.
    """
    if _fields(values.dtype) != _fields(dtype):
        raise InputError(
            f"{where}: the array has fields {shorten(values.dtype.names)}, expected those of "
            f"{expected}"
        )
    return np.ascontiguousarray(values, dtype=dtype)


def _fields(dtype: np.dtype[Any]) -> list[tuple[str, np.dtype[Any]]]:
    """Return (name, type) of each field; padding is ignored, because `np.concatenate` drops it."""
    return [(name, dtype[name]) for name in dtype.names or ()]


ABSENT = -1
"""Value in a column for a document without this optional key."""


class DocumentField(Record):
    """Accepted values of one key in plain documents."""

    largest: int
    """Maximum of the accepted integers, which start at 0."""
    flag: bool = False
    """True if booleans are accepted too."""
    words: Mapping[str, int] | None = None
    """Word -> code, for a key that accepts only words; None for other keys."""
    default: int | None = None
    """Value for documents without this key; None if it is required."""


def plain_columns(
    documents: list[Any], fields: Mapping[str, DocumentField]
) -> dict[str, NDArray[np.int64]] | None:
    """Return one column per field, if all documents are dictionaries of accepted values.

    Returns None if any document is of another type or has another value, which may still be valid.
    Documents must then be checked one by one, which takes tens of microseconds each instead of one.
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
    """Return columns packed into rows of `dtype`; fields without a column are 1.

    A column with a single value is repeated.

    Raises InputError: the columns have different lengths.
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


# The compiled module, and its limits.


Objective = Literal["rate", "time", "memory"]
OBJECTIVES: tuple[Objective, ...] = ("rate", "time", "memory")
"""Maximum samples per second, minimum step time, minimum bytes of the first memory."""
LARGEST = 2**31 - 1
"""Maximum of every number in a packed row."""
_MOST_THREADS = 1024
"""Maximum threads; more would not be faster on any machine."""

calculon: Any = core.calculon
tensor2d: Any = core.tensor2d


# --------------------------------------------------------------------------------------------------
# Long-running work, and Ctrl-C.


Halt = core.Halt
"""Abort flag: `ask`, called from any thread, makes compiled work return partial results early."""
GO_ON = Halt()
"""Abort flag that is never set, for short work."""
_FEW_ROWS = 20_000
"""Number of rows that take some hundredths of a second to evaluate."""
_Result = TypeVar("_Result")


def interruptible(work: Callable[[Any], _Result], *, rows: int | None = None) -> _Result:
    """Return the result of compiled work; on Ctrl-C, abort it and raise KeyboardInterrupt.

    Python handles signals only in its main thread, between Python instructions. From the main
    thread, the work therefore runs in a separate thread; from any other thread it is called
    directly.

    work : function that receives a `Halt`.
    rows : number of rows to evaluate. Below `_FEW_ROWS` no thread is started, since the work takes
        less time than that; None for unknown.
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
    """Raise InputError if a word is not one of its choices."""
    if value not in choices:
        raise InputError(
            f"{name}: the value is {shorten(value)}, expected one of {', '.join(choices)}"
        )


def check_flag(name: str, value: object) -> None:
    """Raise InputError if a value is not a boolean; any other value would count as true."""
    if not isinstance(value, bool):
        raise InputError(f"{name}: the value is {shorten(value)}, expected true or false")


def check_count(name: str, value: object, expected: str, least: int, most: int) -> None:
    """Raise InputError if a value is not an integer from `least` to `most`.

    expected : description of the range, for the message.
    """
    # True is an int in Python, but not a valid number.
    if type(value) is not int or not least <= value <= most:
        raise InputError(f"{name}: the value is {shorten(value)}, expected {expected}")


def check_threads(threads: object) -> None:
    """Raise InputError if a number of threads is not an integer from 1 to 1,024."""
    check_count("threads", threads, f"1 to {_MOST_THREADS} threads", 1, _MOST_THREADS)


# --------------------------------------------------------------------------------------------------
# Switches for defects of the published models.


class Switches:
    """Switches that reproduce defects of a published model, one per defect; all off by default.

    With all switches off, the model is corrected. With all on (`compat`), it reproduces the
    published results. Subclasses list the defects of one model, as defined in
    csrc/closed_form/quirks.hpp.
    """

    meanings: ClassVar[Mapping[str, str]]
    """Name -> description of the defect, starting with its number in the documentation."""

    def __init__(self, **given: bool) -> None:
        for name in given:
            if name not in self.meanings:
                known = f"Use {', '.join(self.meanings)}"
                hint = did_you_mean(name, self.meanings, otherwise=known)
                raise TypeError(f"unknown switch {name!r}. {hint}")
        self._on = frozenset(name for name, on in given.items() if on)

    @classmethod
    def of(cls, compat: bool | Self) -> Self:
        """Return the switches for `compat`: all on for True, all off for False.

        An instance of this class is returned unchanged. Raises InputError for any other value.
        """
        if isinstance(compat, cls):
            return compat
        check_flag("compat", compat)
        return cls(**dict.fromkeys(cls.meanings, bool(compat)))

    def flags(self) -> dict[str, bool]:
        """Return True or False by switch name, as the compiled engine expects them."""
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

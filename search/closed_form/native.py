"""The compiled engines of the analytic models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.documents.json import shorten
from autopar.errors import InputError
from search.planner.core import core

__all__ = [
    "MOST_THREADS",
    "calculon",
    "check_names",
    "check_threads",
    "integers",
    "packed_rows",
    "tensor2d",
]


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


def integers(where: str, values: Any, largest: int, kinds: str = "iu") -> NDArray[Any]:
    """Return a column of integers from 0 to the largest; `kinds` of its type, as NumPy has them.

    Raises
    ------
    InputError: a value is something else; the sentence has the first one.
    """
    array = np.asarray(values)
    if array.size == 0:
        return array.astype(np.int64)
    fits = array.dtype.kind in kinds
    wrong = (array < 0) | (array > largest) if fits else np.ones(array.shape, dtype=np.bool_)
    if wrong.any():
        raise InputError(
            f"{where}: the value is {shorten(array[wrong].tolist()[0])}, expected integers from 0 "
            f"to {largest}"
        )
    return array


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


# --------------------------------------------------------------------------------------------------


MOST_THREADS = 1024
"""More are refused; no machine answers faster with them."""

calculon: Any = core.calculon
tensor2d: Any = core.tensor2d


def check_threads(threads: object) -> None:
    """Raise InputError where a number of threads is none that can be started."""
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        raise InputError(
            f"threads: the value is {shorten(threads)}, expected 1 to {MOST_THREADS} threads"
        )

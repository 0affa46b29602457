"""The compiled closed forms as Python sees them: their module, columns, threads and machines.

What each model packs and unpacks is in its own `engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.documents.json import shorten
from autopar.errors import InputError
from search.planner.core import core

__all__ = [
    "MOST_THREADS",
    "OPERATIONS",
    "Collective",
    "Rate",
    "Tier",
    "calculon",
    "check_names",
    "check_threads",
    "integers",
    "packed_rows",
    "tensor2d",
]


# --------------------------------------------------------------------------------------------------
# What an analytic model runs on: rates that depend on the size of an operation, and networks.
#
# Plain numbers in base units; the compiled engine times operations with them. An operation takes
# `amount / (peak * efficiency(amount))`, where the efficiency is a step function of its own FLOP or
# bytes.


OPERATIONS = ("p2p", "reduce_scatter", "all_gather", "all_reduce")
"""Names of what a network tier can do, in the order of the compiled tables."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Work per second of a processor or a memory, by the size of one operation."""

    peak_per_s: float
    """FLOP/s or bytes/s."""
    curve: tuple[tuple[float, float], ...]
    """(smallest size, efficiency), descending; sizes in FLOP or bytes, the last is 0."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Traffic of a collective over g ranks: bytes * scalar * (1 + offset / g)."""

    scalar: float
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Tier:
    """One network, such as NVLink inside a node; collectives run on one tier."""

    bytes_per_s: float
    """Bandwidth that is reached, efficiency included."""
    latency_s: float
    """Once per operation, even of one without bytes."""
    size: int
    """Processors that the tier reaches."""
    must_be_filled: bool
    processor_usage: float
    """Share of the processor that a running operation occupies."""
    collectives: Mapping[str, Collective]


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
# The compiled module, and what may be asked of it.


MOST_THREADS = 1024
"""More are refused; no machine answers faster with them."""

calculon: Any = core.calculon
tensor2d: Any = core.tensor2d


def check_threads(threads: object) -> None:
    """Raise InputError where a number of threads is none that can be started."""
    # True is an int to Python and no number of threads
    if type(threads) is not int or not 1 <= threads <= MOST_THREADS:
        raise InputError(
            f"threads: the value is {shorten(threads)}, expected 1 to {MOST_THREADS} threads"
        )

"""Results of a Calculon or tensor2d search, and the callbacks of a running search.

A point is one execution with its step time, memory and samples per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import field
from numpy.typing import NDArray

from autopar.records import Record

Each = Callable[[NDArray[Any], NDArray[Any]], None]
"""Callback that receives (packed executions, results) of feasible points, a part at a time."""


class SearchCallbacks(Record):
    """Callbacks of a running search; None for those that are not used."""

    each: Each | None = None
    """Receives every feasible point."""
    progress: Callable[[int, int], None] | None = None
    """Receives (number of finished parts, number of all parts)."""
    stop: Callable[[], bool] | None = None
    """Called between parts; if it returns True, the remaining parts are skipped."""
    halt: Any = None
    """A `native.Halt` that aborts the running part."""


NOBODY = SearchCallbacks()


class Part(Record):
    """One part of the step time, in seconds, or of the memory, in bytes."""

    name: str
    amount: float
    """Exposed time, seconds, or memory, bytes."""
    whole: float | None = None
    """Network time including its overlapped part, seconds; None for other parts."""


def present(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts that are not 0."""
    return tuple(part for part in parts if part.amount or part.whole)


class Point(Record):
    """One feasible execution with its predicted time and memory."""

    execution: Mapping[str, Any]
    """Execution document, with the keys of its model."""
    degrees: str
    """Parallel degrees, as text for tables."""
    switches: str
    """Other settings of the execution, as text for tables."""
    time_s: float
    rate_per_s: float
    """Samples per second."""
    memory_bytes: float
    second_bytes: float = 0.0
    """Bytes in the second (host) memory; 0 in tensor2d."""
    statistics: Mapping[str, Any]
    """Statistics by published name: all for one of the best points, else time and memory only."""
    time: tuple[Part, ...] = ()
    """Parts that add up to the step time; empty unless it is one of the best points."""
    memory: tuple[Part, ...] = ()
    """Parts that add up to the memory; empty unless it is one of the best points."""


class Answer(Record):
    """Result of one search."""

    processors: int
    strategy: str | None = None
    """Tensor-parallel strategy of tensor2d; None for Calculon."""
    values: tuple[float, ...] = ()
    """Value of each swept number, in the order of the sweep's axes."""
    best: tuple[Point, ...]
    """Best points without duplicates, best first."""
    frontier: tuple[Point, ...] = ()
    """Pareto-optimal points in time per sample and memory, fastest first."""
    considered: int
    """Number of points, feasible or not."""
    feasible: int
    bounded: int = 0
    """Feasible points pruned by a lower bound before evaluation; varies with the thread count."""
    rejected: Mapping[str, int]
    """Number of infeasible points by reason; with `feasible` they add up to `considered`."""
    degrees: Mapping[tuple[int, int], float | None] = field(default_factory=dict)
    """Best samples per second by (tensor, pipeline) degree; empty if not requested.

    A value of None means that no execution with these degrees is feasible.
    """
    capacity_bytes: float
    """Memory capacity of one processor, bytes."""
    complete: bool = True
    """False if the search was stopped before its end."""

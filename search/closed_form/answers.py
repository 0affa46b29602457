"""Results of a search with either closed form: executions with their figures, best first.

Also contains the callbacks of a running search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import field
from numpy.typing import NDArray

from autopar.records import Record

Each = Callable[[NDArray[Any], NDArray[Any]], None]
"""Callback that receives (executions, their figures) of feasible points, in parts."""


class SearchCallbacks(Record):
    """Callbacks of a running search; None for unused ones."""

    each: Each | None = None
    """Receives every feasible point."""
    progress: Callable[[int, int], None] | None = None
    """Receives the number of finished parts and of all parts."""
    stop: Callable[[], bool] | None = None
    """Called between parts; True skips the remaining parts."""
    halt: Any = None
    """A `native.Halt` that aborts the running part."""


NOBODY = SearchCallbacks()


class Part(Record):
    """One part of a step or of memory, in seconds or bytes."""

    name: str
    amount: float
    """Exposed seconds, or bytes."""
    whole: float | None = None
    """Network seconds including overlapped ones; None for all other parts."""


def present(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts that are not 0."""
    return tuple(part for part in parts if part.amount or part.whole)


class Point(Record):
    """One feasible execution with its figures."""

    execution: Mapping[str, Any]
    """Execution document, with the keys of its model."""
    degrees: str
    switches: str
    """Other settings of the execution, as text."""
    time_s: float
    rate_per_s: float
    """Samples per second."""
    memory_bytes: float
    second_bytes: float = 0.0
    statistics: Mapping[str, Any]
    """All statistics of the model for one of the best points, else only the figures above."""
    time: tuple[Part, ...] = ()
    memory: tuple[Part, ...] = ()
    """Parts that add up to the step time and to the memory; only for the best points."""


class Answer(Record):
    """Result of one search."""

    processors: int
    strategy: str | None = None
    """Strategy; None if the model has only one."""
    values: tuple[float, ...] = ()
    """Values of the axes of a sweep."""
    best: tuple[Point, ...]
    """Best points without duplicates, best first."""
    frontier: tuple[Point, ...] = ()
    """Pareto-optimal points in time per sample and memory, fastest first."""
    considered: int
    feasible: int
    bounded: int = 0
    """Feasible points that a bound prunes before pricing; depends on the number of threads."""
    rejected: Mapping[str, int]
    """Infeasible points by reason; with the feasible ones they add up to `considered`."""
    degrees: Mapping[tuple[int, int], float | None] = field(default_factory=dict)
    """Samples per second of the best execution per (tensor, pipeline) degree, if requested; None if
    no execution is feasible."""
    capacity_bytes: float
    complete: bool = True
    """False if the search was stopped before its end."""

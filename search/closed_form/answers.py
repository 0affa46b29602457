"""What a search of either closed form returns: executions with their figures, the best first.

And who follows it while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import field
from numpy.typing import NDArray

from autopar.records import Record

Each = Callable[[NDArray[Any], NDArray[Any]], None]
"""Takes (executions, their figures) of feasible points, in parts."""


class Watched(Record):
    """Who follows a search, and how; nobody where it is not said."""

    each: Each | None = None
    """Takes every feasible point."""
    progress: Callable[[int, int], None] | None = None
    """Takes the parts that are done and all."""
    stop: Callable[[], bool] | None = None
    """Asked between parts whether to leave out the rest."""
    halt: Any = None
    """A `native.Halt` that gives up the part that runs."""


NOBODY = Watched()


class Part(Record):
    """One part: seconds or bytes, and what of it is behind something else."""

    name: str
    amount: float
    """Seconds that nothing hides, or bytes."""
    whole: float | None = None
    """Seconds on the network, hidden ones included; None for everything else."""


def present(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts that are not 0."""
    return tuple(part for part in parts if part.amount or part.whole)


class Point(Record):
    """One execution that can run, with its figures."""

    execution: Mapping[str, Any]
    """Its document, in the names of its model."""
    degrees: str
    switches: str
    """What else it is, in words."""
    time_s: float
    rate_per_s: float
    """Samples per second."""
    memory_bytes: float
    second_bytes: float = 0.0
    statistics: Mapping[str, Any]
    """All of its model where the point is one of the best, else the figures above."""
    time: tuple[Part, ...] = ()
    memory: tuple[Part, ...] = ()
    """Parts that add up to the step and to the memory; of the best points only."""


class Answer(Record):
    """What one search found."""

    processors: int
    strategy: str | None = None
    """None where the model has only one."""
    values: tuple[float, ...] = ()
    """Of the axes of a sweep."""
    best: tuple[Point, ...]
    """Best first, none twice."""
    frontier: tuple[Point, ...] = ()
    """What nothing else beats in both time per sample and memory, fastest first."""
    considered: int
    feasible: int
    bounded: int = 0
    """Feasible ones that a bound excludes before they are priced; differs with threads."""
    rejected: Mapping[str, int]
    """Numbers by reason; with those that can run, all that were considered."""
    degrees: Mapping[tuple[int, int], float | None] = field(default_factory=dict)
    """Samples per second of the best of every tensor and pipeline degree, where asked for; None
    where none can run."""
    capacity_bytes: float
    complete: bool = True
    """False where it was stopped before its end."""

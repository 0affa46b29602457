"""Searches every execution of an application on a system for the best."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec import field
from msgspec.structs import asdict
from numpy.typing import NDArray

from autopar.documents.checks import load_document
from autopar.errors import InputError
from autopar.records import Record
from search.closed_form import (
    MOST_BATCH,
    MOST_KEPT,
    MOST_NUMBERS,
    MOST_POINTS,
    MOST_PROCESSORS,
    MOST_TOP,
    native,
)
from search.closed_form.calculon.documents import CHOICES, Application, Execution, System
from search.closed_form.calculon.engine import Quirks, open_model, unpack_execution
from search.closed_form.native import (
    OBJECTIVES,
    Halt,
    Objective,
    check_choice,
    check_count,
    check_flag,
    check_threads,
)

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

# --------------------------------------------------------------------------------------------------
# Which ranks talk to which: the groups of every processor of an execution.
#
# Ranks count tensor parallelism fastest, then pipeline stages, then data parallelism:
# `(data * p + pipeline) * t + tensor`.


def peers(execution: Execution) -> dict[str, dict[str, Any]]:
    """Return the partners of every rank by its number as text, groups of one left out.

    `tensor` and `data` are the ranks of its group, itself included; `pipeline` is the next stage,
    the first one after the last.
    Raises InputError: the table would have too many numbers.
    """
    t, p, d = execution.tensor_par, execution.pipeline_par, execution.data_par
    numbers = t * p * d * ((t if t > 1 else 0) + (p > 1) + (d if d > 1 else 0))
    if numbers > MOST_NUMBERS or t * p * d > MOST_NUMBERS:
        raise InputError(
            f"the partners of {t * p * d:,} ranks are {numbers:,} numbers, expected "
            f"{MOST_NUMBERS:,} at most; take smaller degrees"
        )

    def rank(data: int, pipeline: int, tensor: int) -> int:
        return (data * p + pipeline) * t + tensor

    found: dict[str, dict[str, Any]] = {}
    for data in range(d):
        for pipeline in range(p):
            for tensor in range(t):
                partners: dict[str, Any] = {}
                if t > 1:
                    partners["tensor"] = [rank(data, pipeline, n) for n in range(t)]
                if p > 1:
                    partners["pipeline"] = rank(data, (pipeline + 1) % p, tensor)
                if d > 1:
                    partners["data"] = [rank(n, pipeline, tensor) for n in range(d)]
                found[str(rank(data, pipeline, tensor))] = partners
    return found


# --------------------------------------------------------------------------------------------------
# The search of all executions.


_WORDS = ("datatype", "attention_type", "structure_type")
_SWITCHES = ("fixed_batch", "uneven", "tensor_overlap", "data_overlap", "offload")
_ROW_BYTES = 200
"""Of a point that waits for `each`: its row in the core, and its copy."""
_WAITING_BYTES = 1.5 * 2**30


class Space(Record):
    """Which executions are tried.

    The published tool's space has `fixed_batch` and `uneven` off.
    """

    num_procs: int
    max_batch: int
    datatype: str = "float16"
    attention_type: str = "multihead"
    structure_type: str = "gpt"
    fused_activation: Literal["true", "false", "both"] = "true"
    fixed_batch: bool = True
    """Every execution has the same batch, so that rates compare; otherwise each has the largest
    multiple of its data degree that is not above."""
    uneven: bool = True
    """Stages may differ by a block."""
    tensor_overlap: bool = True
    data_overlap: bool = True
    offload: bool = True

    def __post_init__(self) -> None:
        for name, most in (("num_procs", MOST_PROCESSORS), ("max_batch", MOST_BATCH)):
            check_count(name, getattr(self, name), f"an integer from 1 to {most}", 1, most)
        for name in _WORDS:
            check_choice(name, getattr(self, name), CHOICES[name])
        check_choice("fused_activation", self.fused_activation, ("true", "false", "both"))
        for name in _SWITCHES:
            check_flag(name, getattr(self, name))

    def native(self) -> dict[str, Any]:
        """Return the space as the compiled engine takes it."""
        fused = self.fused_activation
        return {
            **asdict(self),
            **{name: CHOICES[name].index(getattr(self, name)) for name in _WORDS},
            "fused_on": fused in ("true", "both"),
            "fused_off": fused in ("false", "both"),
        }


class PricedExecution(Record):
    """One execution with its figures."""

    execution: dict[str, Any]
    total_time_s: float
    sample_rate_per_s: float
    tier1_bytes: float
    tier2_bytes: float


class Exploration(Record):
    """What a search found: the best first, and why the rest is not there."""

    top: tuple[PricedExecution, ...]
    frontier: tuple[PricedExecution, ...]
    """What nothing else beats in both time per sample and memory, fastest first."""
    counts: Mapping[str, int]
    """Points that were considered, refused by reason, and feasible."""
    degrees: Mapping[tuple[int, int], PricedExecution | None] = field(default_factory=dict)
    """The best of every tensor and pipeline degree where asked for; None where none can run."""
    complete: bool = True
    """False where `stop` ended the search: then this is what was found until then."""


def explore(
    application: Application | Mapping[str, Any] | Path | str,
    system: System | Mapping[str, Any] | Path | str,
    space: Space,
    *,
    top: int = 10,
    objective: Objective = "rate",
    compat: bool | Quirks = False,
    threads: int = 1,
    frontier: bool = False,
    degrees: bool = False,
    duplicates: bool | None = None,
    each: Callable[[NDArray[Any], NDArray[Any]], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    halt: Any = None,
) -> Exploration:
    """Return the best executions of a space; exact, and independent of the threads.

    degrees : also the best of every tensor and pipeline degree, which takes longer.
    duplicates : keep executions that differ in switches without effect (default: with compat).
    each : called with the arrays (`EXECUTION`, outcomes) of all feasible executions, in parts, in
        the order of their tensor and pipeline degrees.
    progress : called with the parts that are done and all.
    stop : asked before every part; once it is true, the rest is left out.
    halt : a `native.Halt`; asked from another thread, parts that are not whole are left out too.

    Ctrl-C ends the search within a fraction of a second.

    Raises
    ------
    InputError: a document or a number is unusable, or the space is too large.
    """
    check_choice("objective", objective, OBJECTIVES)
    check_threads(threads)
    check_count("top", top, f"1 to {MOST_TOP}", 1, MOST_TOP)
    a, s = load_document(Application, application), load_document(System, system)
    model = open_model(a, s, compat)
    want: dict[str, Any] = {
        "top": top,
        "objective": OBJECTIVES.index(objective),
        "all": each is not None,
        "frontier": frontier,
        "duplicates": compat is True if duplicates is None else duplicates,
    }
    pairs: dict[tuple[int, int], PricedExecution | None] | None = {} if degrees else None
    watched = each, progress, stop
    found, complete = _parts(model, space.native(), want, threads, *watched, halt or Halt(), pairs)
    return Exploration(
        top=_rows(found.top),
        frontier=_rows(found.frontier),
        counts=found.counts,
        degrees=dict(sorted((pairs or {}).items())),
        complete=complete,
    )


def _parts(
    model: Any,
    space: dict[str, Any],
    want: dict[str, Any],
    threads: int,
    each: Callable[[NDArray[Any], NDArray[Any]], None] | None,
    progress: Callable[[int, int], None] | None,
    stop: Callable[[], bool] | None,
    halt: Any,
    best_of: dict[tuple[int, int], PricedExecution | None] | None,
) -> tuple[Any, bool]:
    """Search the pairs of degrees, each with the bound that those before it left.

    best_of : takes the best of every pair, which are then searched without bounds.

    Returns what was found, and whether all pairs were searched.
    """
    pairs = model.degree_pairs(space)
    largest = _check_size(model, space, pairs, kept=each is not None)
    lock = Lock()
    found = native.calculon.Found()
    done = 0

    def one(pair: tuple[int, int]) -> Any:
        nonlocal done
        # between parts only, so that what is reported is whole
        if halt.asked() or (stop is not None and stop()):
            return None
        with lock:
            # skips what cannot be among the best of those before it; no answer changes
            bound = found.bound(want | {"bound": np.inf}) if best_of is None else np.inf
        part = model.explore(space, *pair, want | {"bound": bound}, halt)
        if halt.asked():
            return None
        with lock:
            found.absorb(part, want | {"bound": np.inf})
            if best_of is not None:
                best_of[pair] = next(iter(_rows(part.top)), None)
            done += 1
            if progress is not None:
                progress(done, len(pairs))
        return part.all if each is not None else None

    # parts that wait for `each` fill memory
    most = max(1, min(2 * threads, int(_WAITING_BYTES / (_ROW_BYTES * max(largest, 1)))))
    # it brings logging along, which pricing one execution has no use for
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        try:
            for rows in _ahead(pool, one, pairs, most if each is not None else 2 * threads):
                if each is not None and rows is not None:
                    each(*rows)
        except BaseException:
            # Ctrl-C, which the main thread sees because the core works in others
            halt.ask()
            raise
    return found, done == len(pairs)


def _check_size(
    model: Any, space: dict[str, Any], pairs: list[tuple[int, int]], *, kept: bool
) -> int:
    """Return the points of the largest pair of degrees.

    Raises InputError: all are too many, or those of a pair, which `each` takes at once.
    """
    total = largest = 0
    for pair in pairs:
        points = model.count_points(space, *pair)
        total, largest = total + points, max(largest, points)
        if total > MOST_POINTS:
            raise InputError(
                f"the space on {space['num_procs']} processors has more than {MOST_POINTS:,} "
                "executions; take numbers of processors, samples or blocks with fewer divisors"
            )
        if kept and points > MOST_KEPT:
            raise InputError(
                f"the space on {space['num_procs']} processors has {points:,} executions of "
                f"tensor {pair[0]} and pipeline {pair[1]}, expected {MOST_KEPT:,} at most where "
                "every one is asked for; fix more of them, as without offload or overlap"
            )
    return largest


def _ahead(
    pool: ThreadPoolExecutor,
    call: Callable[[tuple[int, int]], Any],
    pairs: list[tuple[int, int]],
    most: int,
) -> Iterator[Any]:
    """Yield results in order; no more than so many wait, since each may hold millions of points."""
    waiting: deque[Future[Any]] = deque()
    for pair in pairs:
        waiting.append(pool.submit(call, pair))
        if len(waiting) > most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def priced_execution(execution: np.void, outcome: np.void) -> PricedExecution:
    """Return a packed execution with its figures, as a document and plain numbers."""
    names = ("total_time_s", "sample_rate_per_s", "tier1_bytes", "tier2_bytes")
    figures = {name: float(outcome[name]) for name in names}
    return PricedExecution(execution=unpack_execution(execution), **figures)


def _rows(arrays: tuple[NDArray[Any], NDArray[Any]]) -> tuple[PricedExecution, ...]:
    return tuple(map(priced_execution, *arrays))

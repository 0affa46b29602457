"""The whole space of candidates for a number of GPUs, searched by the compiled engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from autopar.documents.json import shorten
from autopar.errors import InputError
from search.closed_form.native import check_threads
from search.closed_form.tensor2d.documents import Model, Strategy, System
from search.closed_form.tensor2d.engine import (
    REASONS,
    STATISTICS,
    Quirks,
    native_engine,
    unpack_candidate,
)

__all__ = [
    "Found",
    "Objective",
    "Survey",
    "assignments",
    "divisors",
    "explore_space",
]


# --------------------------------------------------------------------------------------------------
# How ranks of groups can share fast domains: the placements of one candidate.
#
# Source: arXiv 2410.00273.


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def assignments(dims: tuple[int, ...], domain: int) -> list[tuple[int, ...]]:
    """Return how many ranks of each dimension share a domain; the product is the domain.

    All of them where they fit into one domain; none where no divisors have the product.
    """
    if math.prod(dims) <= domain:
        return [dims]
    found: list[tuple[int, ...]] = [()]
    for n, dim in enumerate(dims):
        # what each choice leaves of the domain to the dimensions behind it
        rest = [(part, domain // math.prod(part)) for part in found]
        if n == len(dims) - 1:
            # the last one has to take all that is left
            found = [(*part, left) for part, left in rest if dim % left == 0]
        else:
            found = [(*part, d) for part, left in rest for d in divisors(left) if dim % d == 0]
    return found


# --------------------------------------------------------------------------------------------------
# The search of all candidates.


Objective = Literal["rate", "time", "memory"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """One candidate of those that were asked for."""

    throughput: float
    """Samples per second."""
    mem: float
    """1e9 bytes of one GPU."""
    config: dict[str, int]
    placement: dict[str, int]
    statistics: dict[str, Any]
    """As `evaluate` returns them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Survey:
    """What a search has seen; `candidates` are `feasible` and `rejected` ones."""

    best: list[Found]
    """Best first; equal ones by the other figure, then by dp, tp1, tp2, pp, mbs, nb, placement."""
    candidates: int
    feasible: int
    bounded: int
    """Feasible ones that a bound excludes before they are priced; differs with threads."""
    rejected: dict[str, int]
    """Numbers by reason."""
    all: NDArray[Any]
    """Fields `candidate`, `time_s` and `memory_gb` of every feasible one, where asked for."""


def explore_space(
    strategy: Strategy,
    model: Model,
    n_gpus: int,
    batch: int,
    system: System,
    quirks: Quirks,
    *,
    top: int,
    threads: int,
    objective: Objective,
    keep_all: bool,
) -> Survey:
    """Return the `top` best of every candidate, exactly, and the numbers of all.

    Raises
    ------
    InputError: a number or a word is not what it can be.
    """
    check_threads(threads)
    if type(top) is not int or top < 0:
        raise InputError(f"top: the value is {shorten(top)}, expected at least 0")
    if objective not in get_args(Objective):
        raise InputError(
            f"objective: the value is {shorten(objective)}, expected one of "
            f"{', '.join(get_args(Objective))}"
        )
    engine = native_engine(strategy, model, n_gpus, batch, system, quirks)
    # a batch is given: the fewest seconds are the most samples per second
    found = engine.explore(top, objective == "memory", keep_all, threads)
    # searches keep candidates only: the best are priced again with all statistics
    packed = np.ascontiguousarray(found["best"]["candidate"])
    _, rows = engine.evaluate_many(packed, 1, True)
    best = []
    for row, figures in zip(packed, rows, strict=True):
        config, placement = unpack_candidate(strategy, row)
        statistics = dict(zip(STATISTICS, figures.tolist(), strict=True)) | placement
        best.append(
            Found(
                throughput=batch / statistics["t"],
                mem=statistics["mem"],
                config=config,
                placement=placement,
                statistics=statistics,
            )
        )
    return Survey(
        best=best,
        candidates=found["candidates"],
        feasible=found["feasible"],
        bounded=found["bounded"],
        rejected={
            reason: int(count)
            for reason, count in zip(REASONS, found["rejected"], strict=True)
            if count
        },
        all=found["all"],
    )

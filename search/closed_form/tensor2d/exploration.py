"""The whole space of candidates for a number of GPUs, searched by the compiled engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from search.closed_form.tensor2d.step import Candidate

__all__ = [
    "Found",
    "Objective",
    "Survey",
    "assignments",
    "candidates",
    "divisors",
    "explore_space",
]


# --------------------------------------------------------------------------------------------------
# Candidates of the two-dimensional model for a number of GPUs: degrees and domain assignments.
#
# Source: arXiv 2410.00273.


_SMALLEST_SHARD = 128
"""Rows or columns that a GPU has at least."""
_SMALLEST_PANEL = 512


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def candidates(
    model: Model,
    strategy: Strategy,
    n_gpus: int,
    batch: int,
    domain: int,
    *,
    repeated_panels: bool = True,
) -> Iterator[Candidate]:
    """Yield every candidate once, with every assignment to fast domains of `domain` GPUs.

    repeated_panels : the defect of that name: panels change figures of one GPU, too. Without it
        their number is 1 there.
    """
    for bare in _degrees(model, strategy, n_gpus, batch):
        if bare.columns == bare.rows == 1 < bare.panels and not repeated_panels:
            continue
        dims = _dimensions(bare, strategy)
        for inside in assignments(dims, domain):
            yield _assigned(bare, strategy, inside)


def assignments(dims: tuple[int, ...], domain: int) -> list[tuple[int, ...]]:
    """Return how many ranks of each dimension share a domain; the product is the domain.

    All of them where they fit into one domain; none where no divisors have the product.
    """
    total = 1
    for dim in dims:
        total *= dim
    if total <= domain:
        return [dims]
    found: list[tuple[int, ...]] = [()]
    for n, dim in enumerate(dims):
        rest = [(part, domain // _product(part)) for part in found]
        if n == len(dims) - 1:
            found = [(*part, left) for part, left in rest if dim % left == 0]
        else:
            found = [(*part, d) for part, left in rest for d in divisors(left) if dim % d == 0]
    return found


def _degrees(model: Model, strategy: Strategy, n: int, batch: int) -> Iterator[Candidate]:
    for columns in divisors(n):
        if model.h % columns or model.e % columns:
            continue
        if strategy == "1d":
            second: tuple[int, ...] = (1,) if 3 * model.e // columns >= _SMALLEST_SHARD else ()
        elif model.e // columns < _SMALLEST_SHARD:
            second = ()
        else:
            second = tuple(
                rows
                for rows in divisors(n // columns)
                if model.l // rows >= _SMALLEST_SHARD and (strategy != "2d" or model.e % rows == 0)
            )
        for rows in second:
            yield from _rest(model, strategy, n, batch, columns, rows)


def _rest(
    model: Model, strategy: Strategy, n: int, batch: int, columns: int, rows: int
) -> Iterator[Candidate]:
    tensor = columns * rows
    split = rows if strategy == "2d" else tensor
    for pipeline in divisors(min(n // tensor, model.depth)):
        if n % (tensor * pipeline) or model.depth % pipeline:
            continue
        data = n // (tensor * pipeline)
        if data > batch or batch % data:
            continue
        for microbatch in divisors(batch // data):
            if microbatch * model.l % split:
                continue
            for panels in _panels(model, columns, rows) if strategy == "2d" else (1,):
                yield Candidate(
                    data=data,
                    columns=columns,
                    rows=rows,
                    pipeline=pipeline,
                    microbatch=microbatch,
                    panels=panels,
                )


def _panels(model: Model, columns: int, rows: int) -> tuple[int, ...]:
    smallest = max(columns, rows)
    if model.e / smallest < _SMALLEST_PANEL:
        return (smallest,)
    found = []
    panels = smallest
    while model.e // panels >= _SMALLEST_PANEL:
        if model.e % panels == 0:
            found.append(panels)
        panels *= 2
    return tuple(found)


def _dimensions(c: Candidate, strategy: Strategy) -> tuple[int, ...]:
    columns = (c.columns,) if strategy == "1d" else (c.columns, c.rows)
    return (*columns, c.data, c.pipeline)


def _assigned(c: Candidate, strategy: Strategy, inside: tuple[int, ...]) -> Candidate:
    columns, *rows, data, pipeline = inside
    return replace(
        c,
        columns_in_domain=columns,
        rows_in_domain=rows[0] if rows else 1,
        data_in_domain=data,
        pipeline_in_domain=pipeline,
    )


def _product(numbers: tuple[int, ...]) -> int:
    result = 1
    for number in numbers:
        result *= number
    return result


# --------------------------------------------------------------------------------------------------


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

"""Searches of the engine: the fastest placement, and every candidate for a number of GPUs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.documents.checks import load_document
from autopar.errors import InputError
from autopar.records import Record
from search.closed_form import (
    MOST_BATCH,
    MOST_KEPT,
    MOST_PLACEMENTS,
    MOST_POINTS,
    MOST_PROCESSORS,
    MOST_TOP,
)
from search.closed_form.native import (
    GO_ON,
    OBJECTIVES,
    Objective,
    check_choice,
    check_count,
    check_threads,
    interruptible,
)
from search.closed_form.tensor2d.documents import Model, Strategy, System
from search.closed_form.tensor2d.engine import (
    REASONS,
    STATISTICS,
    Quirks,
    known_model,
    native_engine,
    unpack_candidate,
)

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


def fastest_placement(
    strategy: Strategy,
    config: Mapping[str, int],
    domain: int,
    price: Callable[[Mapping[str, int]], dict[str, Any]],
) -> dict[str, int]:
    """Return the fastest placement of those that fit into a domain.

    price : takes a placement and returns its statistics, or raises what is wrong with the degrees.
    """
    tensor = ("tp",) if strategy == "1d" else ("tp1", "tp2")
    groups = (*tensor, "dp", "pp")
    names = tuple(f"nv_{group}" for group in groups)
    alone = price(dict.fromkeys(names, 1))  # says what is wrong with the degrees
    dims = tuple(config[group] for group in groups)
    ways = math.prod(len(divisors(dim)) for dim in dims)
    if ways > MOST_PLACEMENTS:
        raise InputError(
            f"degrees with so many divisors have up to {ways:,} placements, expected "
            f"{MOST_PLACEMENTS:,} at most; give the placement"
        )
    # where none fills a domain, all that fit
    inside = assignments(dims, domain) or [
        choice for choice in itertools.product(*map(divisors, dims)) if math.prod(choice) <= domain
    ]
    found = [price(dict(zip(names, choice, strict=True))) for choice in inside]
    best = min([*found, alone], key=lambda statistics: float(statistics["t"]))
    return {name: best[name] for name in names}


# --------------------------------------------------------------------------------------------------
# The search of all candidates.


class PricedCandidate(Record):
    """One candidate of those that were asked for."""

    throughput: float
    """Samples per second."""
    mem: float
    """1e9 bytes of one GPU."""
    config: dict[str, int]
    placement: dict[str, int]
    statistics: dict[str, Any]
    """As `evaluate` returns them."""


class Survey(Record, eq=False):
    """What a search has seen; `candidates` are `feasible` and `rejected` ones."""

    best: list[PricedCandidate]
    """Best first; equal ones by the other figure, then by dp, tp1, tp2, pp, mbs, nb, placement."""
    candidates: int
    feasible: int
    bounded: int
    """Feasible ones that a bound excludes before they are priced; differs with threads."""
    rejected: dict[str, int]
    """Numbers by reason."""
    all: NDArray[Any]
    """Fields `candidate`, `time_s` and `memory_gb` of every feasible one, where asked for."""


def explore(
    strategy: Strategy,
    model: Model | Mapping[str, Any] | Path | str,
    n_gpus: int,
    global_batch_size: int,
    system: System | Mapping[str, Any] | Path | str,
    *,
    top: int = 10,
    compat: bool | Quirks = False,
    threads: int = 1,
    objective: Objective = "rate",
) -> list[PricedCandidate]:
    """Return the best candidates of the whole space, best first; `survey` says more."""
    where = strategy, model, n_gpus, global_batch_size, system
    return survey(*where, top=top, compat=compat, threads=threads, objective=objective).best


def survey(
    strategy: Strategy,
    model: Model | Mapping[str, Any] | Path | str,
    n_gpus: int,
    global_batch_size: int,
    system: System | Mapping[str, Any] | Path | str,
    *,
    top: int = 10,
    compat: bool | Quirks = False,
    threads: int = 1,
    objective: Objective = "rate",
    keep_all: bool = False,
    halt: Any = None,
) -> Survey:
    """Return the best candidates of the whole space, and how many there are of which kind.

    top : how many, exactly the best ones, none twice.
    objective : `rate` and `time` are one order, as the batch is given; `memory` is the least.
    keep_all : add every feasible candidate with its time and memory; none is then skipped.
    halt : a `native.Halt`; asked from another thread, the answer is of a part of the space.

    Raises
    ------
    InputError: a document, a number or a word is not what it can be, or the space is too large.
    """
    known, machine, batch = (
        known_model(model, compat),
        load_document(System, system),
        global_batch_size,
    )
    check_threads(threads)
    check_count("top", top, f"0 to {MOST_TOP}", 0, MOST_TOP)
    for name, value, largest in (
        ("n_gpus", n_gpus, MOST_PROCESSORS),
        ("batch", batch, MOST_BATCH),
    ):
        check_count(name, value, f"an integer from 1 to {largest}", 1, largest)
    check_choice("objective", objective, OBJECTIVES)
    quirks = Quirks.of(compat)
    engine = native_engine(strategy, known, n_gpus, batch, machine, quirks)
    # a batch is given: the fewest seconds are the most samples per second
    most = MOST_KEPT if keep_all else MOST_POINTS

    def search(end: Any) -> Any:
        return engine.explore(top, objective == "memory", keep_all, threads, most, end)

    found = interruptible(search) if halt is None else search(halt)
    if found["too_many"]:
        kept = ", and all are kept (as --all, --frontier and --plot ask)" if keep_all else ""
        raise InputError(
            f"the space of {strategy} on {n_gpus} GPUs has more than {most:,} candidates{kept}; "
            "take numbers of GPUs, samples or layers with fewer divisors, or a smaller nvlink_size"
        )
    # searches keep candidates only: the best are priced again with all statistics
    packed = np.ascontiguousarray(found["best"]["candidate"])
    _, rows = engine.evaluate_many(packed, 1, True, GO_ON)
    best = []
    for row, figures in zip(packed, rows, strict=True):
        config, placement = unpack_candidate(strategy, row)
        statistics = dict(zip(STATISTICS, figures.tolist(), strict=True)) | placement
        best.append(
            PricedCandidate(
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

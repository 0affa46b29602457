"""tensor2d searches: fastest placement of one candidate, and best candidates for a GPU count."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.documents.checks import load_document
from autopar.errors import InputError
from autopar.units import divisors
from search.closed_form import (
    MOST_BATCH,
    MOST_KEPT,
    MOST_PLACEMENTS,
    MOST_POINTS,
    MOST_PROCESSORS,
    MOST_TOP,
)
from search.closed_form.answers import Answer, Each, Part, Point, present
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
# Placements of one candidate: ranks of each group that share an NVLink domain.
#
# Source: arXiv 2410.00273.


@cache
def assignments(dims: tuple[int, ...], domain: int) -> list[tuple[int, ...]]:
    """Return all placements that fill an NVLink domain: ranks per domain, for each dimension.

    dims : group sizes.
    domain : GPUs per NVLink domain.

    Each number of a placement divides its group size, and their product is `domain`. If all ranks
    fit in one domain, the only placement is `dims`. The list is empty if no placement fills the
    domain.
    """
    if math.prod(dims) <= domain:
        return [dims]
    found: list[tuple[int, ...]] = [()]
    for n, dim in enumerate(dims):
        # GPUs of the domain that remain for the following dimensions, for each partial placement.
        rest = [(part, domain // math.prod(part)) for part in found]
        if n == len(dims) - 1:
            # The last dimension has to fill the rest.
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
    """Return the fastest placement in NVLink domains, as ranks per domain by name (`nv_dp`, ...).

    Placements that fill a domain are compared with one rank of each group per domain. If none fills
    a domain, all placements that fit are compared.

    config : degrees by name.
    domain : GPUs per NVLink domain.
    price : returns the statistics of a placement, or raises an error for invalid degrees.

    Raises InputError if there are too many placements, and the errors of `price`.
    """
    tensor = ("tp",) if strategy == "1d" else ("tp1", "tp2")
    groups = (*tensor, "dp", "pp")
    names = tuple(f"nv_{group}" for group in groups)
    alone = price(dict.fromkeys(names, 1))  # raises if the degrees are invalid
    dims = tuple(config[group] for group in groups)
    ways = math.prod(len(divisors(dim)) for dim in dims)
    if ways > MOST_PLACEMENTS:
        raise InputError(
            f"degrees with this many divisors have up to {ways:,} placements, "
            f"expected {MOST_PLACEMENTS:,} at most",
            remedy="Give the placement",
        )
    # If no placement fills a domain, consider all that fit.
    inside = assignments(dims, domain) or [
        choice for choice in itertools.product(*map(divisors, dims)) if math.prod(choice) <= domain
    ]
    found = [price(dict(zip(names, choice, strict=True))) for choice in inside]
    best = min([*found, alone], key=lambda statistics: float(statistics["t"]))
    return {name: best[name] for name in names}


# --------------------------------------------------------------------------------------------------
# The search over all candidates.


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
) -> tuple[Point, ...]:
    """Return the best candidates of the search space, best first.

    Parameters and errors are those of `survey`, which returns more details.
    """
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
    frontier: bool = False,
    degrees: bool = False,
    each: Each | None = None,
    halt: Any = None,
) -> Answer:
    """Return the best candidates of the search space, and the number of candidates by outcome.

    Ties in time are ordered by memory, ties in memory by time. Remaining ties are ordered by dp,
    tp1, tp2, pp, mbs, nb and placement.

    top : number of best candidates, without duplicates.
    compat : True for the published model with its defects, or `Quirks` to reproduce.
    objective : `rate` and `time` give the same order, because the batch is fixed; `memory`
        minimises memory.
    frontier : True to add the Pareto-optimal candidates in time and memory.
    degrees : True to add the best rate per (total tensor, pipeline) degree.
    each : called once with two arrays of all feasible candidates: `CANDIDATE` rows, and results
        with `time_s` and `memory_gb`. With `each`, `frontier` or `degrees`, none is pruned.
    halt : a `native.Halt`. If another thread sets it, the result covers only a part of the space.

    Raises InputError: a document or an argument is invalid, or the space is too large.
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
    # With a fixed batch, the shortest step has the highest rate.
    keep_all = frontier or degrees or each is not None
    most = MOST_KEPT if keep_all else MOST_POINTS

    def search(end: Any) -> Any:
        return engine.explore(top, objective == "memory", keep_all, threads, most, end)

    found = interruptible(search) if halt is None else search(halt)
    if found["too_many"]:
        kept = ", and all are kept (as --all, --frontier and --plot ask)" if keep_all else ""
        raise InputError(
            f"the space of {strategy} on {n_gpus} GPUs has more than {most:,} candidates{kept}",
            remedy=(
                "Use numbers of GPUs, samples or layers with fewer divisors, or a "
                "smaller nvlink_size"
            ),
        )
    every, complete = found["all"], halt is None or not halt.asked()
    if each is not None:
        each(every["candidate"], every)
    # A search returns no statistics, so the best candidates are evaluated again.
    packed = np.ascontiguousarray(found["best"]["candidate"])
    _, figures = engine.evaluate_many(packed, 1, True, GO_ON)
    best = [dict(zip(STATISTICS, row, strict=True)) for row in figures.tolist()]
    edge = every[_undominated(every)] if frontier else every[:0]
    rest = [{"t": float(row["time_s"]), "mem": float(row["memory_gb"])} for row in edge]
    point = partial(_point, strategy, n_gpus, batch)
    return Answer(
        processors=n_gpus,
        strategy=strategy,
        best=tuple(point(*one, whole=True) for one in zip(packed, best, strict=True)),
        frontier=tuple(
            point(*one, whole=False) for one in zip(edge["candidate"], rest, strict=True)
        ),
        considered=found["candidates"],
        feasible=found["feasible"],
        bounded=found["bounded"],
        rejected={
            reason: int(count)
            for reason, count in zip(REASONS, found["rejected"], strict=True)
            if count
        },
        degrees=_best_of_degrees(every, batch) if degrees else {},
        # The document uses 1e9 bytes.
        capacity_bytes=machine.hbm_capacity * 1e9,
        complete=complete,
    )


def _best_of_degrees(rows: NDArray[Any], batch: int) -> dict[tuple[int, int], float | None]:
    """Return the best samples per second by (total tensor, pipeline) degree."""
    c = rows["candidate"]
    pairs = np.stack([c["tp1"].astype(np.int64) * c["tp2"], c["pp"].astype(np.int64)], axis=1)
    found, which = np.unique(pairs, axis=0, return_inverse=True)
    least_s = np.full(len(found), np.inf)
    np.minimum.at(least_s, which.ravel(), rows["time_s"])
    rates = (batch / least_s).tolist()
    return {(t, p): rate for (t, p), rate in zip(found.tolist(), rates, strict=True)}


def _undominated(rows: NDArray[Any]) -> NDArray[np.intp]:
    """Return the indices of the Pareto-optimal rows in time and memory, fastest first."""
    # lexsort sorts by its last key first: time, then memory.
    order = np.lexsort((rows["memory_gb"], rows["time_s"]))
    memory = rows["memory_gb"][order]
    least = np.minimum.accumulate(np.concatenate(([np.inf], memory[:-1])))
    # Less memory than all faster rows.
    return order[memory < least]


# --------------------------------------------------------------------------------------------------
# Conversion of a candidate to a `Point`, with the parts of its time and memory.


_TIME = {
    "computation": "t_comp",
    "memory traffic": "t_mem",
    "tensor parallel": "t_tp_comm",
    "stage transfer": "t_pp_comm",
    "pipeline bubble": "t_bubble",
    "data parallel": "t_dp_comm",
}
_MEMORY = {
    "weights": "wts_mem",
    "weight gradients": "wts_grad_mem",
    "optimizer states": "wts_optimizer_states_mem",
    "activations": "acts_mem",
}
_DOMAINS = ("nv_tp", "nv_tp1", "nv_tp2", "nv_pp", "nv_dp")


def _point(
    strategy: Strategy,
    n_gpus: int,
    batch: int,
    candidate: np.void,
    statistics: dict[str, Any],
    *,
    whole: bool,
) -> Point:
    """Return a packed candidate as a point.

    whole : True if `statistics` is complete; False if it contains only `t` and `mem`.
    """
    config, placement = unpack_candidate(strategy, candidate)
    tensor = config["tp"] if strategy == "1d" else f"{config['tp1']}x{config['tp2']}"
    # In the order of the degrees.
    inside = "/".join(str(placement[name]) for name in _DOMAINS if name in placement)
    panels = [f"nb{config['nb']}"] if "nb" in config else []
    return Point(
        execution={
            "strategy": strategy,
            "config": config,
            "placement": placement,
            "n_gpus": n_gpus,
            "global_batch_size": batch,
        },
        degrees=f"tp{tensor} pp{config['pp']} dp{config['dp']}",
        switches=", ".join([f"mbs{config['mbs']}", *panels, f"domain {inside}"]),
        time_s=statistics["t"],
        rate_per_s=batch / statistics["t"],
        # The model counts in 1e9 bytes.
        memory_bytes=statistics["mem"] * 1e9,
        statistics=statistics | placement if whole else statistics,
        time=time_parts(statistics) if whole else (),
        memory=memory_parts(statistics) if whole else (),
    )


def time_parts(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the nonzero parts of the step time `t`, seconds."""
    return present(Part(name=n, amount=statistics[key]) for n, key in _TIME.items())


def memory_parts(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the nonzero parts of the memory `mem`, bytes."""
    # The model counts in 1e9 bytes.
    return present(Part(name=name, amount=statistics[key] * 1e9) for name, key in _MEMORY.items())

"""Exhaustive Calculon search for the best executions of an application on a system."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec.structs import asdict

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
from search.closed_form.answers import Answer, Each, Part, Point, present
from search.closed_form.calculon.documents import CHOICES, Application, Execution, System
from search.closed_form.calculon.engine import (
    Quirks,
    open_model,
    statistic_names,
    unpack_execution,
)
from search.closed_form.native import (
    GO_ON,
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
# Communication peers: the groups of every rank of an execution.
#
# Ranks count tensor parallelism fastest, then pipeline stages, then data parallelism:
# `(data * p + pipeline) * t + tensor`.


def peers(execution: Execution) -> dict[str, dict[str, Any]]:
    """Return the communication peers of every rank, by rank number as text.

    `tensor` and `data` list all ranks of the group. `pipeline` is the peer in the next stage; the
    first stage follows the last. Groups of a single rank are omitted.
    Raises InputError if the table would have too many entries.
    """
    t, p, d = execution.tensor_par, execution.pipeline_par, execution.data_par
    numbers = t * p * d * ((t if t > 1 else 0) + (p > 1) + (d if d > 1 else 0))
    if numbers > MOST_NUMBERS or t * p * d > MOST_NUMBERS:
        raise InputError(
            f"{t * p * d:,} ranks have {numbers:,} communication partners, "
            f"expected {MOST_NUMBERS:,} at most",
            remedy="Use smaller degrees",
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
# The search over all executions.


_WORDS = ("datatype", "attention_type", "structure_type")
_SWITCHES = ("fixed_batch", "uneven", "tensor_overlap", "data_overlap", "offload")
_ROW_BYTES = 200
"""Memory of a point until `each` receives it, bytes: a row in the engine, and its copy."""
_WAITING_BYTES = 1.5 * 2**30


class Space(Record):
    """Search space of executions.

    For the search space of the published Calculon, `fixed_batch` and `uneven` are False.
    """

    num_procs: int
    max_batch: int
    datatype: str = "float16"
    attention_type: str = "multihead"
    structure_type: str = "gpt"
    fused_activation: Literal["true", "false", "both"] = "true"
    fixed_batch: bool = True
    """True if every execution has the batch size `max_batch`, so that rates are comparable.

    Otherwise each has the largest multiple of its data degree up to `max_batch`.
    """
    uneven: bool = True
    """True if the number of blocks may differ by one between stages."""
    tensor_overlap: bool = True
    """True to include executions with overlapped tensor-parallel communication."""
    data_overlap: bool = True
    """True to include executions with overlapped data-parallel communication."""
    offload: bool = True
    """True to include executions with offload to the second memory."""

    def __post_init__(self) -> None:
        for name, most in (("num_procs", MOST_PROCESSORS), ("max_batch", MOST_BATCH)):
            check_count(name, getattr(self, name), f"an integer from 1 to {most}", 1, most)
        for name in _WORDS:
            check_choice(name, getattr(self, name), CHOICES[name])
        check_choice("fused_activation", self.fused_activation, ("true", "false", "both"))
        for name in _SWITCHES:
            check_flag(name, getattr(self, name))

    def native(self) -> dict[str, Any]:
        """Return the settings of the space in the format of the compiled engine."""
        fused = self.fused_activation
        return {
            **asdict(self),
            **{name: CHOICES[name].index(getattr(self, name)) for name in _WORDS},
            "fused_on": fused in ("true", "both"),
            "fused_off": fused in ("false", "both"),
        }


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
    each: Each | None = None,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
    halt: Any = None,
) -> Answer:
    """Return the best executions of a search space, with all statistics.

    The search is exact, and its result does not depend on the number of threads. Ctrl-C stops it
    within a fraction of a second.

    top : number of best executions.
    frontier : True to add the Pareto-optimal executions, with only the statistics in `FIGURES`.
    degrees : True to add the best rate per (tensor, pipeline) degree, which takes longer.
    duplicates : True to keep executions that differ only in settings without effect. The default is
        True if `compat` is True.
    each : called with two arrays of feasible executions, `EXECUTION` rows and results, once per
        pair of tensor and pipeline degrees, in order.
    progress : called with the number of finished parts and of all parts; a part is such a pair.
    stop : called before every part; if it returns True, the remaining parts are skipped.
    halt : a `native.Halt`. If another thread sets it, unfinished parts are discarded.

    Raises InputError: a document or an argument is invalid, or the space is too large.
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
    pairs: dict[tuple[int, int], float | None] | None = {} if degrees else None
    watched = each, progress, stop
    found, complete = _parts(model, space.native(), want, threads, *watched, halt or Halt(), pairs)
    # Files for the published tool may only have its fields.
    point = partial(point_of, published=compat is True, fixed_batch=space.fixed_batch)
    executions, outcomes = found.top
    _, table = model.evaluate_many(executions, threads, True, GO_ON)
    names = statistic_names(a, compat)
    counts = found.counts
    return Answer(
        processors=space.num_procs,
        best=tuple(
            point(x, o, statistics=dict(zip(names, figures, strict=True)))
            for x, o, figures in zip(
                executions, outcomes, table[:, : len(names)].tolist(), strict=True
            )
        ),
        frontier=tuple(map(point, *found.frontier)),
        considered=counts["considered"],
        feasible=counts["feasible"],
        rejected={text: counts[name] for name, text in _REJECTED.items() if counts[name]},
        degrees=dict(sorted((pairs or {}).items())),
        capacity_bytes=s.memory_bytes(1),
        complete=complete,
    )


def _parts(
    model: Any,
    space: dict[str, Any],
    want: dict[str, Any],
    threads: int,
    each: Each | None,
    progress: Callable[[int, int], None] | None,
    stop: Callable[[], bool] | None,
    halt: Any,
    best_of: dict[tuple[int, int], float | None] | None,
) -> tuple[Any, bool]:
    """Search all pairs of tensor and pipeline degrees, and return (found points, True if complete).

    The best points found so far bound the search of the next pairs.
    want : options of the compiled search.
    best_of : receives the best rate of every pair, which are then searched without bounds; None to
        use bounds.
    """
    pairs = model.degree_pairs(space)
    largest = _check_size(model, space, pairs, kept=each is not None)
    lock = Lock()
    found = native.calculon.Found()
    done = 0

    def one(pair: tuple[int, int]) -> Any:
        nonlocal done
        # Checked between parts only, so that reported parts are complete.
        if halt.asked() or (stop is not None and stop()):
            return None
        with lock:
            # Prunes points worse than the best so far, which does not change the result.
            bound = found.bound(want | {"bound": np.inf}) if best_of is None else np.inf
        part = model.explore(space, *pair, want | {"bound": bound}, halt)
        if halt.asked():
            return None
        with lock:
            found.absorb(part, want | {"bound": np.inf})
            if best_of is not None:
                rates = part.top[1]["sample_rate_per_s"].tolist()
                best_of[pair] = rates[0] if rates else None
            done += 1
            if progress is not None:
                progress(done, len(pairs))
        return part.all if each is not None else None

    # Parts that wait for `each` occupy memory.
    most = max(1, min(2 * threads, int(_WAITING_BYTES / (_ROW_BYTES * max(largest, 1)))))
    # Imported here since it loads logging, which pricing one execution does not need.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads) as pool:
        try:
            for rows in _ahead(pool, one, pairs, most if each is not None else 2 * threads):
                if each is not None and rows is not None:
                    each(*rows)
        except BaseException:
            # Ctrl-C reaches the main thread because the core runs in other threads.
            halt.ask()
            raise
    return found, done == len(pairs)


def _check_size(
    model: Any, space: dict[str, Any], pairs: list[tuple[int, int]], *, kept: bool
) -> int:
    """Return the largest number of points of one pair of tensor and pipeline degrees.

    kept : True if all points of a pair are returned.

    Raises InputError if there are too many points in total, or in one pair if `kept` is True.
    """
    total = largest = 0
    for pair in pairs:
        points = model.count_points(space, *pair)
        total, largest = total + points, max(largest, points)
        if total > MOST_POINTS:
            raise InputError(
                f"the space on {space['num_procs']} processors has more than {MOST_POINTS:,} "
                "executions",
                remedy=("Use numbers of processors, samples or blocks with fewer divisors"),
            )
        if kept and points > MOST_KEPT:
            raise InputError(
                f"the space on {space['num_procs']} processors has {points:,} "
                f"executions of tensor {pair[0]} and pipeline {pair[1]}, "
                f"expected {MOST_KEPT:,} at most if all are returned",
                remedy="Set more of them, such as no offload or no overlap",
            )
    return largest


def _ahead(
    pool: ThreadPoolExecutor,
    call: Callable[[tuple[int, int]], Any],
    pairs: list[tuple[int, int]],
    most: int,
) -> Iterator[Any]:
    """Yield the results of `call` for all pairs, in order.

    most : maximum number of pending results, since each may contain millions of points.
    """
    waiting: deque[Future[Any]] = deque()
    for pair in pairs:
        waiting.append(pool.submit(call, pair))
        if len(waiting) > most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


# --------------------------------------------------------------------------------------------------
# Conversion of an execution to a `Point`, with the parts of its time and memory.
#
# The parts of time add up to the step, those of memory to the bytes per processor.


FIGURES: Mapping[str, str] = {
    "total_time": "total_time_s",
    "sample_rate": "sample_rate_per_s",
    "proc_mem_tier1_cap_req": "tier1_bytes",
    "proc_mem_tier2_cap_req": "tier2_bytes",
}
"""Published name -> field of the results that are known for every point."""
_REJECTED = {
    "network": "a network tier is too small, or not filled",
    "layout": "sizes do not divide, or stages are too short",
    "memory_first": "needs more memory than there is",
    "memory_second": "needs more of the second memory than there is",
}
_SWITCH_WORDS = {
    "optimizer_sharding": "sharded optimizer",
    "data_par_overlap": "dp overlap",
}
_OFFLOADS = ("weight_offload", "activations_offload", "optimizer_offload")
_TIME: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "forward": (("fw_time",), None),
    "backward": (("bw_time",), None),
    "recomputation": (("recompute_time",), None),
    "tensor parallel": (("tp_comm_exposed_time",), "tp_comm_link_time"),
    "tensor parallel, repeated": (("recomm_exposed_time",), "recomm_link_time"),
    "stage transfer": (("pp_comm_exposed_time",), "pp_comm_link_time"),
    "pipeline bubble": (("bubble_time",), None),
    "data parallel": (("dp_comm_exposed_time",), "dp_comm_link_time"),
    "offload": (("fw_offload_exposed_time", "bw_offload_exposed_time"), None),
    "optimizer": (("optim_step_time",), None),
}
"""Part -> (statistics that add up to it, statistic of its network time or None)."""
_VOCAB_TIME = {"embedding": (("embedding_time",), None), "head and loss": (("head_time",), None)}


def execution_fields(*, published: bool) -> list[str]:
    """Return the field names of an execution; published : True for those of published Calculon."""
    unknown = ("structure_type",) if published else ()
    return [name for name in Execution.__struct_fields__ if name not in unknown]


def point_of(
    execution: np.void,
    outcome: np.void,
    *,
    published: bool = False,
    fixed_batch: bool = True,
    statistics: dict[str, Any] | None = None,
) -> Point:
    """Return a packed execution with its result as a point.

    published : True to include only the fields of the published Calculon.
    fixed_batch : True if all executions have the same batch size, which `switches` then omits.
    statistics : all statistics; the parts of time and memory are computed from them. None: the
        point contains only the statistics in `FIGURES`.
    """
    whole = unpack_execution(execution)
    x = {name: whole[name] for name in execution_fields(published=published)}
    return Point(
        execution=x,
        degrees=f"t{x['tensor_par']} p{x['pipeline_par']} d{x['data_par']}",
        switches=", ".join(_switches(x, fixed_batch=fixed_batch)),
        time_s=float(outcome["total_time_s"]),
        rate_per_s=float(outcome["sample_rate_per_s"]),
        memory_bytes=float(outcome["tier1_bytes"]),
        second_bytes=float(outcome["tier2_bytes"]),
        statistics=statistics or {name: float(outcome[key]) for name, key in FIGURES.items()},
        time=() if statistics is None else time_parts(statistics),
        memory=() if statistics is None else memory_parts(statistics, x),
    )


def _switches(x: Mapping[str, Any], *, fixed_batch: bool) -> Iterator[str]:
    """Yield short texts for the settings of an execution other than its degrees."""
    yield f"b{x['microbatch_size']}" + ("" if fixed_batch else f" of {x['batch_size']}")
    if x["pipeline_interleaving"] > 1:
        yield f"v{x['pipeline_interleaving']}"
    yield f"tiers {x['tensor_par_net']}/{x['pipeline_par_net']}/{x['data_par_net']}"
    # without tensor ranks the type changes activations only, and `rs_ag redo` makes them smallest
    if x["tensor_par"] > 1 or (x["tensor_par_comm_type"], x["seq_par_ag_redo"]) != ("rs_ag", True):
        again = " redo" if x["seq_par_ag_redo"] else ""
        overlap = "" if x["tensor_par_overlap"] == "none" else f" {x['tensor_par_overlap']}"
        yield f"{x['tensor_par_comm_type']}{again}{overlap}"
    if x["activation_recompute"] != "none":
        yield f"recompute {x['activation_recompute']}"
    yield from (text for name, text in _SWITCH_WORDS.items() if x[name])
    if not x["fused_activation"]:
        yield "not fused"
    if moved := [name.split("_")[0] for name in _OFFLOADS if x[name]]:
        yield f"offload {'+'.join(moved)}"


def time_parts(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the nonzero parts of the step time `total_time`, seconds."""
    # Without a vocabulary, its statistics do not exist.
    vocab = _VOCAB_TIME if "head_time" in statistics else {}
    return present(
        Part(
            name=name,
            amount=sum(statistics[key] for key in keys),
            whole=None if whole is None else statistics[whole],
        )
        for name, (keys, whole) in {**_TIME, **vocab}.items()
    )


def memory_parts(statistics: Mapping[str, Any], execution: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the nonzero parts of the first memory, `proc_mem_tier1_cap_req`, bytes.

    execution : execution document. Offloaded tensors occupy the first memory for two blocks only.
    """
    s = statistics
    weights, activations, optimizer = (execution[name] for name in _OFFLOADS)

    def size(name: str, offloaded: bool) -> float:
        # B16: published figures of inference contain a null.
        return float(s[f"{name}_with_offload" if offloaded else name] or 0.0)

    sizes = {
        "weights": size("weight_space", weights),
        # Gradients are stored where the optimizer reads them.
        "weight gradients": size("weight_grad_space", optimizer),
        "optimizer states": size("optimizer_space", optimizer),
        "activations": size("act_space", activations),
        "checkpoints": size("act_checkpoint_size", activations),
        "activation gradients": s["act_grad_space"],
        "embedding, head, logits": s.get("outer_space", 0.0),
    }
    return present(Part(name=name, amount=amount) for name, amount in sizes.items())

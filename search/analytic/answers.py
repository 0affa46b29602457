"""One form for what searches of both analytic models find: for tables, files and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search.analytic.calculon import Application, System, evaluate
from search.analytic.calculon.exploration import Found, Objective, Space, explore
from search.analytic.tensor2d import Model, Strategy, survey
from search.analytic.tensor2d import System as Tensor2dSystem
from search.analytic.tensor2d.engine import unpack_candidate
from search.report.estimate_parts import (
    Part,
    calculon_memory,
    calculon_time,
    tensor2d_memory,
    tensor2d_time,
)

__all__ = ["Answer", "Each", "Point", "search_calculon", "search_tensor2d"]

Each = Callable[[NDArray[Any], NDArray[Any]], None]
"""Takes (executions, their figures) of feasible points, in parts."""
_REASONS = {
    "network": "a network tier is too small, or not filled",
    "layout": "sizes do not divide, or stages are too short",
    "memory_first": "needs more memory than there is",
    "memory_second": "needs more of the second memory than there is",
}
_WORDS = {
    "optimizer_sharding": "sharded optimizer",
    "data_par_overlap": "dp overlap",
}
_OFFLOADS = ("weight_offload", "activations_offload", "optimizer_offload")


@dataclass(frozen=True, kw_only=True)
class Point:
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


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one search found."""

    processors: int
    strategy: str | None = None
    """None where the model has only one."""
    values: tuple[float, ...] = ()
    """Of the axes of a sweep."""
    best: tuple[Point, ...]
    frontier: tuple[Point, ...] = ()
    """What nothing else beats in both time per sample and memory, fastest first."""
    considered: int
    feasible: int
    rejected: Mapping[str, int]
    """Numbers by reason; with those that can run, all that were considered."""
    capacity_bytes: float
    complete: bool = True
    """False where it was stopped before its end."""


def search_calculon(
    application: Application,
    system: System,
    space: Space,
    *,
    top: int,
    objective: Objective,
    compat: bool,
    threads: int,
    frontier: bool = False,
    values: tuple[float, ...] = (),
    each: Each | None = None,
    progress: Callable[[int, int], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> Answer:
    """Return what `calculon.explore` finds, the best with all statistics."""
    found = explore(
        application,
        system,
        space,
        top=top,
        objective=objective,
        compat=compat,
        threads=threads,
        frontier=frontier,
        each=each,
        progress=progress,
        stop=stop,
    )

    # files for the published tool have its fields alone
    unknown = ("structure_type",) if compat else ()

    def whole(row: Found) -> Point:
        statistics = evaluate(application, row.execution, system, compat=compat)
        parts = calculon_memory(
            statistics,
            weights=row.execution["weight_offload"],
            activations=row.execution["activations_offload"],
            optimizer=row.execution["optimizer_offload"],
        )
        return _calculon_point(
            row, space, statistics, calculon_time(statistics), parts, unknown=unknown
        )

    return Answer(
        processors=space.num_procs,
        values=values,
        best=tuple(whole(row) for row in found.top),
        frontier=tuple(
            _calculon_point(row, space, None, unknown=unknown) for row in found.frontier
        ),
        considered=found.counts["considered"],
        feasible=found.counts["feasible"],
        rejected={
            text: found.counts[name] for name, text in _REASONS.items() if found.counts[name]
        },
        capacity_bytes=system.memory(1)[0],
        complete=found.complete,
    )


def _calculon_point(
    row: Found,
    space: Space,
    statistics: Mapping[str, Any] | None,
    time: tuple[Part, ...] = (),
    memory: tuple[Part, ...] = (),
    *,
    unknown: tuple[str, ...],
) -> Point:
    x = {k: v for k, v in row.execution.items() if k not in unknown}
    moved = [name.split("_")[0] for name in _OFFLOADS if x[name]]
    words = [
        f"b{x['microbatch_size']}" + (f" of {x['batch_size']}" if not space.fixed_batch else ""),
        *([f"v{x['pipeline_interleaving']}"] if x["pipeline_interleaving"] > 1 else []),
        f"tiers {x['tensor_par_net']}/{x['pipeline_par_net']}/{x['data_par_net']}",
        *([_communication(x)] if x["tensor_par"] > 1 else []),
        *(
            [f"recompute {x['activation_recompute']}"]
            if x["activation_recompute"] != "none"
            else []
        ),
        *(text for name, text in _WORDS.items() if x[name]),
        *(["not fused"] if not x["fused_activation"] else []),
        *([f"offload {'+'.join(moved)}"] if moved else []),
    ]
    return Point(
        execution=x,
        degrees=f"t{x['tensor_par']} p{x['pipeline_par']} d{x['data_par']}",
        switches=", ".join(words),
        time_s=row.total_time_s,
        rate_per_s=row.sample_rate_per_s,
        memory_bytes=row.tier1_bytes,
        second_bytes=row.tier2_bytes,
        statistics=statistics
        or {
            "total_time": row.total_time_s,
            "sample_rate": row.sample_rate_per_s,
            "proc_mem_tier1_cap_req": row.tier1_bytes,
            "proc_mem_tier2_cap_req": row.tier2_bytes,
        },
        time=time,
        memory=memory,
    )


def _communication(x: Mapping[str, Any]) -> str:
    words = [x["tensor_par_comm_type"], *(["redo"] if x["seq_par_ag_redo"] else [])]
    return " ".join([*words, *([o] if (o := x["tensor_par_overlap"]) != "none" else [])])


def search_tensor2d(
    strategy: Strategy,
    model: Model,
    system: Tensor2dSystem,
    *,
    num_gpus: int,
    batch: int,
    top: int,
    objective: Objective,
    compat: bool,
    threads: int,
    frontier: bool = False,
    values: tuple[float, ...] = (),
    each: Each | None = None,
) -> Answer:
    """Return what `tensor2d.survey` finds."""
    found = survey(
        strategy,
        model,
        num_gpus,
        batch,
        system,
        top=top,
        compat=compat,
        threads=threads,
        objective=objective,
        keep_all=frontier or each is not None,
    )
    if each is not None:
        each(found.all["candidate"], found.all)

    def point(
        config: Mapping[str, int], placement: Mapping[str, int], statistics: Mapping[str, Any]
    ) -> Point:
        tensor = config["tp"] if strategy == "1d" else f"{config['tp1']}x{config['tp2']}"
        # in the order of the degrees before it
        inside = "/".join(str(placement[name]) for name in sorted(placement, key=_by_degree))
        panels = [f"nb{config['nb']}"] if "nb" in config else []
        whole = "t_comp" in statistics
        return Point(
            execution={
                "strategy": strategy,
                "config": dict(config),
                "placement": dict(placement),
                "n_gpus": num_gpus,
                "global_batch_size": batch,
            },
            degrees=f"tp{tensor} pp{config['pp']} dp{config['dp']}",
            switches=", ".join([f"mbs{config['mbs']}", *panels, f"domain {inside}"]),
            time_s=statistics["t"],
            rate_per_s=batch / statistics["t"],
            memory_bytes=statistics["mem"] * 1e9,
            statistics=dict(statistics),
            time=tensor2d_time(statistics) if whole else (),
            memory=tensor2d_memory(statistics) if whole else (),
        )

    edge = found.all[_undominated(found.all)] if frontier else ()
    return Answer(
        processors=num_gpus,
        strategy=strategy,
        values=values,
        best=tuple(point(row.config, row.placement, row.statistics) for row in found.best),
        frontier=tuple(
            point(
                *unpack_candidate(strategy, row["candidate"]),
                {"t": float(row["time_s"]), "mem": float(row["memory_gb"])},
            )
            for row in edge
        ),
        considered=found.candidates,
        feasible=found.feasible,
        rejected=found.rejected,
        capacity_bytes=system.hbm_capacity * 1e9,
    )


def _by_degree(name: str) -> int:
    return ("nv_tp", "nv_tp1", "nv_tp2", "nv_pp", "nv_dp").index(name)


def _undominated(rows: NDArray[Any]) -> NDArray[np.intp]:
    """Return the places of what nothing beats in both time and memory, fastest first."""
    order = np.lexsort((rows["memory_gb"], rows["time_s"]))
    memory = rows["memory_gb"][order]
    least = np.minimum.accumulate(np.concatenate(([np.inf], memory[:-1])))
    return order[memory < least]

"""One form for what both closed forms are asked and answer: for tables, files and pictures.

Searching is in the models' `exploration`, printing in `search.report.closed_form`.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from autopar.documents.checks import validate_document
from autopar.errors import OptionError, nearest
from search.closed_form.calculon import Application, System, evaluate
from search.closed_form.calculon.exploration import PricedExecution, Space, explore
from search.closed_form.native import Objective
from search.closed_form.tensor2d import Model, Strategy, System as Tensor2dSystem, survey
from search.closed_form.tensor2d.engine import unpack_candidate

__all__ = [
    "MOST",
    "Answer",
    "Axis",
    "Each",
    "Part",
    "Point",
    "calculon_memory",
    "calculon_time",
    "parse_axis",
    "search_calculon",
    "search_tensor2d",
    "tensor2d_memory",
    "tensor2d_time",
    "variants",
]


# --------------------------------------------------------------------------------------------------
# Questions of the kind "what if": numbers of a document replaced by a range of others.


MOST = 10_000
"""Settings of one command, at most."""
_ROUNDING = 1e-9
"""What rounding may lose of the last step of a range, as a share."""
_GRAMMAR = "PATH=RANGE, such as system.networks.0.bandwidth=300:900:x1.5, 1:5:2 or 300,450"


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A number of a document, by its path, and the values that it takes."""

    path: str
    values: tuple[float, ...]


def parse_axis(text: str) -> Axis:
    """Return the axis of `PATH=RANGE`.

    A range is a list `a,b,c`, or `a:b:step` with both ends where the steps meet them, or
    `a:b:xF` where each value is F times the one before.

    Raises
    ------
    OptionError: the text is none of these, or a range has no end.
    """
    path, equals, words = text.partition("=")
    if not equals or not path.strip() or not words.strip():
        raise OptionError(f"--sweep: expected {_GRAMMAR}, got {text!r:.80}")
    if ":" not in words:
        values = [_number(word, text) for word in words.split(",")]
    else:
        parts = words.split(":")
        if len(parts) != 3:
            raise OptionError(f"--sweep: expected {_GRAMMAR}, got {text!r:.80}")
        first, last = _number(parts[0], text), _number(parts[1], text)
        factor = parts[2].strip().startswith("x")
        step = _number(parts[2].strip().removeprefix("x"), text)
        values = _range(first, last, step, factor=factor, text=text)
    # a value that is met twice is priced once
    return Axis(path=path.strip(), values=tuple(dict.fromkeys(values)))


def variants(
    documents: Mapping[str, BaseModel], axes: Sequence[Axis]
) -> Iterator[tuple[tuple[float, ...], dict[str, Any]]]:
    """Yield (values, the documents that have them), the last axis fastest; once without axes.

    documents : the first word of a path -> document.

    Raises
    ------
    OptionError: a path leads to no number (names the nearest one), appears twice, or there are
        too many combinations.
    DocumentError: a document cannot have a value.
    """
    plain = {name: document.model_dump() for name, document in documents.items()}
    _check(axes, list(_fields(plain)))
    for values in itertools.product(*(axis.values for axis in axes)):
        # what one combination sets must not stay in the next
        changed = copy.deepcopy(plain)
        for axis, value in zip(axes, values, strict=True):
            *folders, last = axis.path.split(".")
            place: Any = changed
            for key in folders:
                place = place[_key(place, key)]
            # a count that is written as 8.0 would be refused, and 2048 is as good a float
            place[_key(place, last)] = int(value) if value.is_integer() else value
        yield (
            values,
            {
                name: validate_document(type(document), Path(f"--sweep: {name}"), changed[name])
                for name, document in documents.items()
            },
        )


def _fields(documents: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of all numbers, and of what is not given and could be one."""

    def walk(path: str, value: Any) -> Iterator[str]:
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from walk(f"{path}.{key}", item)
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                yield from walk(f"{path}.{place}", item)
        elif value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield path

    for name, document in documents.items():
        yield from walk(name, document)


def _check(axes: Sequence[Axis], known: list[str]) -> None:
    for place, axis in enumerate(axes):
        if axis.path not in known:
            raise OptionError(
                f"--sweep: {axis.path!r:.80} is no number of the documents; "
                f"the nearest one is {nearest(axis.path, known, 0.0)!r}"
            )
        if axis.path in (other.path for other in axes[:place]):
            raise OptionError(f"--sweep: {axis.path} is given twice; give one list of values")
    count = math.prod(len(axis.values) for axis in axes)
    if count > MOST:
        raise OptionError(f"--sweep: the ranges have {count} combinations, expected {MOST} at most")


def _key(place: Any, key: str) -> Any:
    return int(key) if isinstance(place, list) else key


def _number(word: str, text: str) -> float:
    word = word.strip()
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    # float also reads inf, nan, 1_000 and spaces
    if not math.isfinite(value) or re.search("[^0-9eE.+-]", word):
        raise OptionError(f"--sweep: {word!r:.40} of {text!r:.80} is not a number")
    return value


def _range(first: float, last: float, step: float, *, factor: bool, text: str) -> list[float]:
    upwards = last >= first
    if factor:
        moves = step > 1 if upwards else 0 < step < 1
        endless = not moves or first <= 0 or last <= 0
    else:
        endless = step == 0 or (step > 0) != upwards
    if endless:
        way = "up" if upwards else "down"
        raise OptionError(
            f"--sweep: {text!r:.80} never ends; its step does not lead {way} to {last:g}"
        )
    # an end that only rounding misses is met
    if factor:
        count = math.floor(math.log(last / first) / math.log(step) + _ROUNDING)
    else:
        count = math.floor((last - first) / step + _ROUNDING)
    if count >= MOST:
        raise OptionError(f"--sweep: {text!r:.80} has {count + 1} values, expected {MOST} at most")
    steps = range(count + 1)
    values = [first * step**n if factor else first + step * n for n in steps]
    # powers and sums leave binary noise in the last digits
    return [float(f"{value:.12g}") for value in values]


# --------------------------------------------------------------------------------------------------
# Where time and memory of one execution go, by part: what tables and pictures are made from.
#
# The parts of time add up to the step, those of memory to what a processor needs.


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part: seconds or bytes, and what of it is behind something else."""

    name: str
    amount: float
    """Seconds that nothing hides, or bytes."""
    whole: float | None = None
    """Seconds on the network, hidden ones included; None for everything else."""


def calculon_time(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of `total_time`, in seconds."""
    s = statistics
    parts = (
        Part(name="forward", amount=s["fw_time"]),
        Part(name="backward", amount=s["bw_time"]),
        Part(name="recomputation", amount=s["recompute_time"]),
        Part(
            name="tensor parallel",
            amount=s["tp_comm_exposed_time"],
            whole=s["tp_comm_link_time"],
        ),
        Part(
            name="tensor parallel, repeated",
            amount=s["recomm_exposed_time"],
            whole=s["recomm_link_time"],
        ),
        Part(name="stage transfer", amount=s["pp_comm_exposed_time"], whole=s["pp_comm_link_time"]),
        Part(name="pipeline bubble", amount=s["bubble_time"]),
        Part(name="data parallel", amount=s["dp_comm_exposed_time"], whole=s["dp_comm_link_time"]),
        Part(name="offload", amount=s["fw_offload_exposed_time"] + s["bw_offload_exposed_time"]),
        Part(name="optimizer", amount=s["optim_step_time"]),
        Part(name="embedding", amount=s.get("embedding_time", 0.0)),
        Part(name="head and loss", amount=s.get("head_time", 0.0)),
    )
    return _present(parts)


def calculon_memory(
    statistics: Mapping[str, Any], *, weights: bool, activations: bool, optimizer: bool
) -> tuple[Part, ...]:
    """Return the parts of `proc_mem_tier1_cap_req`, in bytes.

    weights, activations, optimizer : what is offloaded, of which only two blocks are here.
    """
    s = statistics

    def size(name: str, offloaded: bool) -> float:
        # B16: published figures of inference have a null
        return float(s[f"{name}_with_offload" if offloaded else name] or 0.0)

    parts = (
        Part(name="weights", amount=size("weight_space", weights)),
        # gradients go where the optimizer reads them
        Part(name="weight gradients", amount=size("weight_grad_space", optimizer)),
        Part(name="optimizer states", amount=size("optimizer_space", optimizer)),
        Part(name="activations", amount=size("act_space", activations)),
        Part(name="checkpoints", amount=size("act_checkpoint_size", activations)),
        Part(name="activation gradients", amount=s["act_grad_space"]),
        Part(name="embedding, head, logits", amount=s.get("outer_space", 0.0)),
    )
    return _present(parts)


def tensor2d_time(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of `t`, in seconds."""
    names = {
        "comp": "computation",
        "mem": "memory traffic",
        "tp_comm": "tensor parallel",
        "pp_comm": "stage transfer",
        "bubble": "pipeline bubble",
        "dp_comm": "data parallel",
    }
    return _present(
        tuple(Part(name=text, amount=statistics[f"t_{key}"]) for key, text in names.items())
    )


def tensor2d_memory(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of `mem`, in bytes."""
    names = {
        "wts_mem": "weights",
        "wts_grad_mem": "weight gradients",
        "wts_optimizer_states_mem": "optimizer states",
        "acts_mem": "activations",
    }
    return _present(
        # the model answers in 1e9 bytes
        tuple(Part(name=text, amount=statistics[key] * 1e9) for key, text in names.items())
    )


def _present(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.amount or part.whole)


# --------------------------------------------------------------------------------------------------
# Sweeps: one number of a document over many values.


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

    def whole(row: PricedExecution) -> Point:
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
    row: PricedExecution,
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
        # only the best come with all statistics
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
            # 1e9 bytes of the model are bytes here
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
        # documented in 1e9 bytes
        capacity_bytes=system.hbm_capacity * 1e9,
    )


def _by_degree(name: str) -> int:
    return ("nv_tp", "nv_tp1", "nv_tp2", "nv_pp", "nv_dp").index(name)


def _undominated(rows: NDArray[Any]) -> NDArray[np.intp]:
    """Return the places of what nothing beats in both time and memory, fastest first."""
    # lexsort sorts by its last key first: time, then memory
    order = np.lexsort((rows["memory_gb"], rows["time_s"]))
    memory = rows["memory_gb"][order]
    least = np.minimum.accumulate(np.concatenate(([np.inf], memory[:-1])))
    # less memory than everything faster
    return order[memory < least]

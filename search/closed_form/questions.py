"""One form for what both closed forms are asked and answer: for tables, files and pictures.

How each is searched is in its `exploration`, running and files are in `session`, printing is in
`search.show.closed_form`.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
from msgspec import field
from msgspec.structs import asdict
from numpy.typing import NDArray

from autopar.documents.checks import validate_document
from autopar.errors import OptionError, nearest
from autopar.objects import BaseModel
from autopar.records import Record
from search.closed_form import MOST_SEARCHES, calculon, tensor2d
from search.closed_form.calculon.documents import CHOICES, Execution
from search.closed_form.calculon.engine import open_model, statistic_names
from search.closed_form.calculon.exploration import PricedExecution, Space, explore
from search.closed_form.native import GO_ON, Objective
from search.closed_form.tensor2d.engine import (
    CANDIDATE,
    STATISTICS,
    known_model,
    native_engine,
    unpack_candidate,
)

# --------------------------------------------------------------------------------------------------
# Questions of the kind "what if": numbers of a document replaced by a range of others.


_ROUNDING = 1e-9
"""What rounding may lose of the last step of a range, as a share."""
_GRAMMAR = "PATH=RANGE, such as system.networks.0.bandwidth=300:900:x1.5, 1:5:2 or 300,450"


class Axis(Record):
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
    if words.count(",") >= MOST_SEARCHES:
        raise OptionError(
            f"--sweep: {text!r:.80} has too many values, expected {MOST_SEARCHES} at most"
        )
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
    if count > MOST_SEARCHES:
        raise OptionError(
            f"--sweep: the ranges have {count} combinations, expected {MOST_SEARCHES} at most"
        )


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
    # in logarithms one by one, as a ratio of the ends may be infinite
    if factor:
        length = (math.log(last) - math.log(first)) / math.log(step)
    else:
        length = (last - first) / step
    if not length < MOST_SEARCHES:
        raise OptionError(
            f"--sweep: {text!r:.80} has too many values, expected {MOST_SEARCHES} at most"
        )
    # an end that only rounding misses is met
    steps = range(math.floor(length + _ROUNDING) + 1)
    values = [first * step**n if factor else first + step * n for n in steps]
    # powers and sums leave binary noise in the last digits
    return [float(f"{value:.12g}") for value in values]


# --------------------------------------------------------------------------------------------------
# Where time and memory of one execution go, by part: what tables and pictures are made from.
#
# The parts of time add up to the step, those of memory to what a processor needs.


class Part(Record):
    """One part: seconds or bytes, and what of it is behind something else."""

    name: str
    amount: float
    """Seconds that nothing hides, or bytes."""
    whole: float | None = None
    """Seconds on the network, hidden ones included; None for everything else."""


_CALCULON_TIME: Mapping[str, tuple[tuple[str, ...], str | None]] = {
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
"""Part -> what adds up to it, and its time on the network."""
_VOCAB_TIME = {"embedding": (("embedding_time",), None), "head and loss": (("head_time",), None)}
_TENSOR2D_TIME = {
    "computation": "t_comp",
    "memory traffic": "t_mem",
    "tensor parallel": "t_tp_comm",
    "stage transfer": "t_pp_comm",
    "pipeline bubble": "t_bubble",
    "data parallel": "t_dp_comm",
}
_TENSOR2D_MEMORY = {
    "weights": "wts_mem",
    "weight gradients": "wts_grad_mem",
    "optimizer states": "wts_optimizer_states_mem",
    "activations": "acts_mem",
}


def calculon_time(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of `total_time`, in seconds."""
    # without a vocabulary there are no statistics of it
    vocab = _VOCAB_TIME if "head_time" in statistics else {}
    return _present(
        Part(
            name=name,
            amount=sum(statistics[key] for key in keys),
            whole=None if whole is None else statistics[whole],
        )
        for name, (keys, whole) in {**_CALCULON_TIME, **vocab}.items()
    )


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

    sizes = {
        "weights": size("weight_space", weights),
        # gradients go where the optimizer reads them
        "weight gradients": size("weight_grad_space", optimizer),
        "optimizer states": size("optimizer_space", optimizer),
        "activations": size("act_space", activations),
        "checkpoints": size("act_checkpoint_size", activations),
        "activation gradients": s["act_grad_space"],
        "embedding, head, logits": s.get("outer_space", 0.0),
    }
    return _present(Part(name=name, amount=amount) for name, amount in sizes.items())


def tensor2d_time(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of `t`, in seconds."""
    return _present(Part(name=n, amount=statistics[key]) for n, key in _TENSOR2D_TIME.items())


def tensor2d_memory(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of `mem`, in bytes."""
    # the model answers in 1e9 bytes
    return _present(
        Part(name=name, amount=statistics[key] * 1e9) for name, key in _TENSOR2D_MEMORY.items()
    )


def _present(parts: Iterator[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.amount or part.whole)


# --------------------------------------------------------------------------------------------------
# Searches, and what they find.


Each = Callable[[NDArray[Any], NDArray[Any]], None]
"""Takes (executions, their figures) of feasible points, in parts."""
Columns = dict[str, list[str]]
"""Name -> the texts of all rows."""
_CHUNK = 50_000
"""Rows that are formatted at a time."""
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
_FIGURES = {
    "total_time": "total_time_s",
    "sample_rate": "sample_rate_per_s",
    "proc_mem_tier1_cap_req": "tier1_bytes",
    "proc_mem_tier2_cap_req": "tier2_bytes",
}
"""Published name -> field of what a search knows of every point."""


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


class Answer(Record):
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
    degrees: Mapping[tuple[int, int], float | None] = field(default_factory=dict)
    """Samples per second of the best of every tensor and pipeline degree, where asked for; None
    where none can run."""
    capacity_bytes: float
    complete: bool = True
    """False where it was stopped before its end."""


class Asked(Record):
    """What is asked of a search, whatever its model."""

    top: int = 10
    objective: Objective = "rate"
    compat: bool = False
    threads: int = 1
    frontier: bool = False
    degrees: bool = False


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


@dataclass(frozen=True, kw_only=True)
class Search(ABC):
    """One search of a question: what it is called while it runs, how it and its points are made."""

    asked: Asked
    values: tuple[float, ...] = ()
    """Of the axes of a sweep."""
    figures: ClassVar[Mapping[str, str]]
    """Published name -> field of what a search knows of every point."""

    @property
    @abstractmethod
    def label(self) -> str:
        """Return what is searched."""

    @abstractmethod
    def run(self, watched: Watched = NOBODY) -> Answer:
        """Return what is found, the best with all statistics."""

    @abstractmethod
    def fields(self, executions: NDArray[Any], outcomes: NDArray[Any]) -> Columns:
        """Return the columns of points that are no statistics."""

    @abstractmethod
    def opened(self) -> tuple[Any, Sequence[str]]:
        """Return the compiled model, and the names of its statistics."""

    def columns(
        self, *, statistics: bool
    ) -> Callable[[NDArray[Any], NDArray[Any]], Iterator[Columns]]:
        """Return what turns points into columns piece by piece, with all statistics if asked."""
        model, known = self.opened()

        def columns(executions: NDArray[Any], outcomes: NDArray[Any]) -> Iterator[Columns]:
            for start in range(0, len(executions), _CHUNK):
                x, o = executions[start : start + _CHUNK], outcomes[start : start + _CHUNK]
                found = self.fields(x, o)
                if statistics:
                    _, table = model.evaluate_many(
                        np.ascontiguousarray(x), self.asked.threads, True, GO_ON
                    )
                    yield found | {name: _numbers(table[:, n]) for n, name in enumerate(known)}
                else:
                    yield found | {name: _numbers(o[key]) for name, key in self.figures.items()}

        return columns


@dataclass(frozen=True, kw_only=True)
class CalculonSearch(Search):
    """A search of every execution after Calculon."""

    application: calculon.Application
    system: calculon.System
    space: Space
    figures = _FIGURES

    @property
    def label(self) -> str:
        """Return the processors."""
        return f"{self.space.num_procs} processors"

    @property
    def _names(self) -> list[str]:
        # files for the published tool have its fields alone
        unknown = ("structure_type",) if self.asked.compat else ()
        return [name for name in Execution.model_fields if name not in unknown]

    def run(self, watched: Watched = NOBODY) -> Answer:
        """Return what `calculon.explore` finds, the best with all statistics."""
        found = explore(
            self.application, self.system, self.space, **asdict(self.asked), **asdict(watched)
        )
        counts = found.counts
        return Answer(
            processors=self.space.num_procs,
            values=self.values,
            best=tuple(self._point(row, whole=True) for row in found.top),
            frontier=tuple(self._point(row, whole=False) for row in found.frontier),
            considered=counts["considered"],
            feasible=counts["feasible"],
            rejected={text: counts[name] for name, text in _REASONS.items() if counts[name]},
            degrees={
                pair: None if best is None else best.sample_rate_per_s
                for pair, best in found.degrees.items()
            },
            capacity_bytes=self.system.memory_bytes(1),
            complete=found.complete,
        )

    def _point(self, row: PricedExecution, *, whole: bool) -> Point:
        x = {name: row.execution[name] for name in self._names}
        statistics = {name: getattr(row, field) for name, field in _FIGURES.items()}
        time: tuple[Part, ...] = ()
        memory: tuple[Part, ...] = ()
        if whole:
            statistics = calculon.evaluate(
                self.application, row.execution, self.system, compat=self.asked.compat
            )
            weights, activations, optimizer = (x[name] for name in _OFFLOADS)
            time = calculon_time(statistics)
            memory = calculon_memory(
                statistics, weights=weights, activations=activations, optimizer=optimizer
            )
        return Point(
            execution=x,
            degrees=degrees_of(x),
            switches=switches_of(x, fixed_batch=self.space.fixed_batch),
            time_s=row.total_time_s,
            rate_per_s=row.sample_rate_per_s,
            memory_bytes=row.tier1_bytes,
            second_bytes=row.tier2_bytes,
            statistics=statistics,
            time=time,
            memory=memory,
        )

    def fields(self, executions: NDArray[Any], outcomes: NDArray[Any]) -> Columns:
        """Return the fields of executions."""
        return {name: _field(name, executions[name]) for name in self._names}

    def opened(self) -> tuple[Any, Sequence[str]]:
        """Return the compiled model, and the names of its statistics."""
        model = open_model(self.application, self.system, self.asked.compat)
        return model, statistic_names(self.application, self.asked.compat)


def degrees_of(execution: Mapping[str, Any]) -> str:
    """Return the degrees of an execution, as tables have them."""
    x = execution
    return f"t{x['tensor_par']} p{x['pipeline_par']} d{x['data_par']}"


def switches_of(execution: Mapping[str, Any], *, fixed_batch: bool) -> str:
    """Return what an execution is beside its degrees, in words; with its batch unless it is fixed.

    execution : its document.
    """
    return ", ".join(_switches(execution, fixed_batch=fixed_batch))


def _switches(x: Mapping[str, Any], *, fixed_batch: bool) -> Iterator[str]:
    """Yield what an execution is beside its degrees, in words."""
    yield f"b{x['microbatch_size']}" + ("" if fixed_batch else f" of {x['batch_size']}")
    if x["pipeline_interleaving"] > 1:
        yield f"v{x['pipeline_interleaving']}"
    yield f"tiers {x['tensor_par_net']}/{x['pipeline_par_net']}/{x['data_par_net']}"
    if x["tensor_par"] > 1:
        again = " redo" if x["seq_par_ag_redo"] else ""
        overlap = "" if x["tensor_par_overlap"] == "none" else f" {x['tensor_par_overlap']}"
        yield f"{x['tensor_par_comm_type']}{again}{overlap}"
    if x["activation_recompute"] != "none":
        yield f"recompute {x['activation_recompute']}"
    yield from (text for name, text in _WORDS.items() if x[name])
    if not x["fused_activation"]:
        yield "not fused"
    if moved := [name.split("_")[0] for name in _OFFLOADS if x[name]]:
        yield f"offload {'+'.join(moved)}"


@dataclass(frozen=True, kw_only=True)
class Tensor2dSearch(Search):
    """A search of every candidate of one strategy after arXiv 2410.00273."""

    strategy: tensor2d.Strategy
    model: tensor2d.Model
    system: tensor2d.System
    num_gpus: int
    batch: int
    figures = MappingProxyType({"t": "time_s", "mem": "memory_gb"})

    @property
    def label(self) -> str:
        """Return the GPUs and the strategy."""
        return f"{self.num_gpus} GPUs, {self.strategy}"

    def run(self, watched: Watched = NOBODY) -> Answer:
        """Return what `tensor2d.survey` finds, always all: it takes less than a second."""
        frontier, degrees = self.asked.frontier, self.asked.degrees
        found = tensor2d.survey(
            self.strategy,
            self.model,
            self.num_gpus,
            self.batch,
            self.system,
            top=self.asked.top,
            compat=self.asked.compat,
            threads=self.asked.threads,
            objective=self.asked.objective,
            keep_all=frontier or degrees or watched.each is not None,
            halt=watched.halt,
        )
        stopped = watched.halt is not None and watched.halt.asked()
        if watched.each is not None:
            watched.each(found.all["candidate"], found.all)
        edge = found.all[_undominated(found.all)] if frontier else ()
        return Answer(
            processors=self.num_gpus,
            strategy=self.strategy,
            values=self.values,
            best=tuple(
                self._point(row.config, row.placement, row.statistics, whole=True)
                for row in found.best
            ),
            frontier=tuple(
                self._point(
                    *unpack_candidate(self.strategy, row["candidate"]),
                    {"t": float(row["time_s"]), "mem": float(row["memory_gb"])},
                    whole=False,
                )
                for row in edge
            ),
            considered=found.candidates,
            feasible=found.feasible,
            rejected=found.rejected,
            degrees=_best_of_degrees(found.all, self.batch) if degrees else {},
            # documented in 1e9 bytes
            capacity_bytes=self.system.hbm_capacity * 1e9,
            complete=not stopped,
        )

    def _point(
        self,
        config: Mapping[str, int],
        placement: Mapping[str, int],
        statistics: Mapping[str, Any],
        *,
        whole: bool,
    ) -> Point:
        tensor = config["tp"] if self.strategy == "1d" else f"{config['tp1']}x{config['tp2']}"
        # in the order of the degrees before it
        inside = "/".join(str(placement[name]) for name in _DOMAINS if name in placement)
        panels = [f"nb{config['nb']}"] if "nb" in config else []
        return Point(
            execution={
                "strategy": self.strategy,
                "config": dict(config),
                "placement": dict(placement),
                "n_gpus": self.num_gpus,
                "global_batch_size": self.batch,
            },
            degrees=f"tp{tensor} pp{config['pp']} dp{config['dp']}",
            switches=", ".join([f"mbs{config['mbs']}", *panels, f"domain {inside}"]),
            time_s=statistics["t"],
            rate_per_s=self.batch / statistics["t"],
            # 1e9 bytes of the model are bytes here
            memory_bytes=statistics["mem"] * 1e9,
            statistics=dict(statistics),
            time=tensor2d_time(statistics) if whole else (),
            memory=tensor2d_memory(statistics) if whole else (),
        )

    def fields(self, executions: NDArray[Any], outcomes: NDArray[Any]) -> Columns:
        """Return the fields of candidates and their rates; `1d` has its degree under `tp1`."""
        known = {
            "strategy": self.strategy,
            "n_gpus": str(self.num_gpus),
            "global_batch_size": str(self.batch),
        }
        return {
            **{name: [text] * len(executions) for name, text in known.items()},
            **{name: list(map(str, executions[name].tolist())) for name in CANDIDATE.names or ()},
            "throughput": _numbers(self.batch / outcomes["time_s"]),
        }

    def opened(self) -> tuple[Any, Sequence[str]]:
        """Return the compiled model, and the names of its statistics."""
        compat = self.asked.compat
        known, quirks = known_model(self.model, compat), tensor2d.Quirks.of(compat)
        where = self.num_gpus, self.batch, self.system
        return native_engine(self.strategy, known, *where, quirks), STATISTICS


_DOMAINS = ("nv_tp", "nv_tp1", "nv_tp2", "nv_pp", "nv_dp")


def _best_of_degrees(rows: NDArray[Any], batch: int) -> dict[tuple[int, int], float | None]:
    """Return the most samples per second of every tensor degree, in all, and pipeline degree."""
    c = rows["candidate"]
    pairs = np.stack([c["tp1"].astype(np.int64) * c["tp2"], c["pp"].astype(np.int64)], axis=1)
    found, which = np.unique(pairs, axis=0, return_inverse=True)
    least_s = np.full(len(found), np.inf)
    np.minimum.at(least_s, which.ravel(), rows["time_s"])
    rates = (batch / least_s).tolist()
    return {(t, p): rate for (t, p), rate in zip(found.tolist(), rates, strict=True)}


def _undominated(rows: NDArray[Any]) -> NDArray[np.intp]:
    """Return the places of what nothing beats in both time and memory, fastest first."""
    # lexsort sorts by its last key first: time, then memory
    order = np.lexsort((rows["memory_gb"], rows["time_s"]))
    memory = rows["memory_gb"][order]
    least = np.minimum.accumulate(np.concatenate(([np.inf], memory[:-1])))
    # less memory than everything faster
    return order[memory < least]


def _field(name: str, values: NDArray[Any]) -> list[str]:
    if Execution.model_fields[name].annotation is int:
        return list(map(str, values.tolist()))
    words = np.array(CHOICES.get(name, ("False", "True")), dtype=object)
    found: list[str] = words[values.astype(np.intp)].tolist()
    return found


def _numbers(values: NDArray[Any]) -> list[str]:
    # the shortest text that reads back as the same number
    return [repr(value) for value in values.tolist()]

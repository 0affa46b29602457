"""User-defined spaces, evaluation of their points, and the tuners without optional packages.

The tuners with Ray and SMAC are in `packages`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from autopar import records
from autopar.documents.json import load_object, read_record, value_reader
from autopar.errors import DocumentError
from autopar.records import KeyFault, record_of, shorten
from search.closed_form.answers import Point
from search.closed_form.calculon import EXECUTION
from search.closed_form.calculon.documents import (
    CHOICES,
    WHOLE_NUMBERS,
    Application,
    Execution,
    System,
)
from search.closed_form.calculon.engine import REASONS, Quirks, open_model
from search.closed_form.calculon.exploration import point_of
from search.closed_form.native import GO_ON, LARGEST, Objective

# --------------------------------------------------------------------------------------------------
# Domains of a space, from its file.


_DEGREES = ("tensor_par", "pipeline_par", "data_par")
_FIXED = ("num_procs", "training")
_FLAGS = tuple(
    name
    for name in Execution.__struct_fields__
    if name not in CHOICES and name not in WHOLE_NUMBERS
)
# The engine caches one block, so the fields that determine a block vary slowest.
_ORDER = (
    "datatype",
    "structure_type",
    "attention_type",
    "fused_activation",
    "tensor_par",
    "tensor_par_net",
    "tensor_par_comm_type",
    "tensor_par_overlap",
    "seq_par_ag_redo",
    "activation_recompute",
    "microbatch_size",
    "optimizer_sharding",
    "data_par",
    "pipeline_par",
    "pipeline_interleaving",
    "batch_size",
    "pipeline_par_net",
    "data_par_net",
    "data_par_overlap",
    "weight_offload",
    "activations_offload",
    "optimizer_offload",
)
_MOST_VALUES = 1_000_000
_SPELLING = 'a value, a list of values, or {"from": 1, "to": 64, "times": 2} (or "step")'


class Domain(records.Record, dict=True):
    """Values of one field of an execution: ascending numbers, words or flags."""

    name: str
    values: tuple[int | str | bool, ...]

    @property
    def ordered(self) -> bool:
        """True if the values are numbers, so that neighbouring values are similar."""
        return self.name not in CHOICES and self.name not in _FLAGS

    @cached_property
    def codes(self) -> NDArray[np.int32]:
        """Values as codes of the compiled engine."""
        if self.name in CHOICES:
            return np.array([CHOICES[self.name].index(str(v)) for v in self.values], np.int32)
        return np.array(self.values, np.int32)


class TuningSpace(records.Record):
    """Cartesian product of domains, for a fixed number of processors.

    A point is one combination. It is represented by its digits, the positions of its values in the
    domains, or by its number in counting order.
    """

    num_procs: int
    training: bool
    domains: tuple[Domain, ...]
    """Domains in counting order; the last one varies fastest."""
    derived: str | None
    """Degree computed from the other two and num_procs; None if all three are given."""

    @property
    def size(self) -> int:
        """Number of points."""
        return math.prod(len(domain.values) for domain in self.domains)

    def digits(self, points: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the digits of points given by number, shape (points, domains)."""
        result = np.empty((len(points), len(self.domains)), np.int64)
        rest = points
        # The last domain varies fastest.
        for column in range(len(self.domains) - 1, -1, -1):
            rest, result[:, column] = np.divmod(rest, len(self.domains[column].values))
        return result

    def executions(self, digits: NDArray[np.int64]) -> NDArray[Any]:
        """Return points, given by their digits, as an array of `EXECUTION`."""
        packed = np.empty(len(digits), EXECUTION)
        packed["num_procs"], packed["training"] = self.num_procs, self.training
        for column, domain in enumerate(self.domains):
            packed[domain.name] = domain.codes[digits[:, column]]
        if self.derived is not None:
            # A product of degrees needs 64 bits.
            given = [packed[name].astype(np.int64) for name in _DEGREES if name != self.derived]
            # If the others do not divide num_procs, the product is wrong and the engine refuses it.
            packed[self.derived] = np.maximum(self.num_procs // (given[0] * given[1]), 1)
        return packed


def load_space(
    source: Mapping[str, Any] | Path | str,
    *,
    num_procs: int | None = None,
    structure_type: str = "gpt",
) -> TuningSpace:
    """Return the tuning space in a JSON file or a mapping.

    source : path, or mapping of every field of an execution to a value, a list, or a range such as
        {"from": 1, "to": 64, "times": 2}. One degree may be missing; it is computed from num_procs.
    num_procs : number of processors if the source does not contain it. If neither is given, it is
        the product of three degrees with a single value.
    structure_type : default if the source does not contain it.

    Raises DocumentError: a field is missing, unknown or invalid, or `num_procs` differs from the
    source.
    """
    path = "space" if isinstance(source, Mapping) else str(source)
    keys = dict(source) if isinstance(source, Mapping) else load_object(Path(source)).data
    keys = {"training": True, "structure_type": structure_type, **keys}
    if num_procs is not None:
        keys.setdefault("num_procs", num_procs)
    given = read_record(_Fields, path, keys)
    found: dict[str, tuple[Any, ...]] = {
        name: values for name, values in asdict(given).items() if values
    }
    for name in _FIXED:
        if len(found.get(name, ())) > 1:
            problem = f"the value is {shorten(list(found[name]))}"
            remedy = "Give one value: all points of a space share it"
            raise DocumentError(path, problem, key=name, remedy=remedy)
    absent = [name for name in _ORDER if name not in found]
    if absent and (len(absent) > 1 or absent[0] not in _DEGREES):
        lost = next((name for name in absent if name not in _DEGREES), absent[-1])
        raise DocumentError(path, "this key is missing", key=lost, remedy=f"Give {_SPELLING}")
    single = not absent and all(len(found[name]) == 1 for name in _DEGREES)
    if "num_procs" not in found and not single:
        raise DocumentError(
            path,
            "this key is missing, and degrees with several values do not define it",
            key="num_procs",
            remedy="Give the number of processors",
        )
    # Three single degrees determine the processors too.
    known = ("num_procs",) if "num_procs" in found else _DEGREES
    processors = math.prod(found[name][0] for name in known)
    if num_procs not in (None, processors):
        problem = f"the value is {processors}, but {num_procs} are asked for"
        raise DocumentError(path, problem, key="num_procs", remedy="Remove one of them")
    return TuningSpace(
        num_procs=processors,
        training=bool(found["training"][0]),
        domains=tuple(Domain(name=name, values=found[name]) for name in _ORDER if name in found),
        derived=next((name for name in _DEGREES if name not in found), None),
    )


class _Values(records.Record, kw_only=False, eq=False):
    """Reader of the values of one field: a single value, a list, or a range of integers."""

    expected: str
    """Description of valid values, for messages."""
    accepts: Callable[[Any], bool]
    """Returns True for a valid value."""
    number: bool = False
    """True if the values are integers."""

    def read(self, value: object) -> tuple[Any, ...]:
        """Return the values, numbers in ascending order; raises KeyFault for an invalid value."""
        listed = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            listed = self._range(value)
        if not listed:
            raise KeyFault("", f"the list is empty. Give {_SPELLING}")
        values: list[Any] = listed
        for one in values:
            if not self.accepts(one):
                raise KeyFault("", f"the value is {shorten(one)}, expected {self.expected}")
        if len(set(values)) < len(values):
            raise KeyFault("", f"a value of {shorten(value)} appears twice")
        # Tuners assume that neighbouring numbers are similar; words have no order.
        return tuple(sorted(values)) if self.number else tuple(values)

    def _range(self, written: dict[str, Any]) -> list[int]:
        """Return the integers in a range {"from", "to"} with "step" (default 1) or "times".

        The end is included if a step reaches it. Raises KeyFault for an invalid range.
        """
        problem = f"the value is {shorten(written)}, expected {_SPELLING}"
        if not self.number:
            raise KeyFault("", f"{problem}. Give a list: this field has no range")
        known = {"from", "to", "step", "times"}
        if not {"from", "to"} <= set(written) <= known or len(written) > 3:
            raise KeyFault("", problem)
        for key, value in written.items():
            if type(value) is not int:
                got = f"the value is {shorten(value)}, expected an integer"
                raise KeyFault(key, f"{got}. Use a list for other values")
        first, last = written["from"], written["to"]
        step, factor = written.get("step", 1), written.get("times")
        # Multiples of 0 would be 0 for ever.
        leasts = {"from": first if factor is None else 1, "to": first, "step": 1, "times": 2}
        for key, value in written.items():
            if value < leasts[key]:
                got = f"the value is {shorten(value)}"
                raise KeyFault(
                    key, f"{got}, expected an integer of at least {shorten(leasts[key])}"
                )
        if factor is None and (last - first) // step >= _MOST_VALUES:
            raise KeyFault("", f"the range has more than {_MOST_VALUES} values. Use a larger step")
        # An end beyond the largest value would truncate the range silently.
        if last > LARGEST:
            raise KeyFault(
                "", f"the range ends at {shorten(last)}, expected an end of at most {LARGEST}"
            )
        if factor is None:
            return list(range(first, last + 1, step))
        values = []
        while first <= last:
            values.append(first)
            first *= factor
        return values


def _values_of(name: str) -> _Values:
    if name in CHOICES:
        words = CHOICES[name]
        return _Values(f"one of {', '.join(words)}", lambda value: value in words)
    if name in _FLAGS:
        return _Values("true or false", lambda v: type(v) in (bool, int) and v in (0, 1))
    least = 0 if name.endswith("_net") else 1
    expected = f"an integer from {least} to {LARGEST}"
    fits = lambda value: type(value) is int and least <= value <= LARGEST  # noqa: E731
    return _Values(expected, fits, number=True)


def _kind_of(name: str) -> Any:
    values = _values_of(name)
    return Annotated[Any, value_reader(values.read, values.expected)]


_NAMES = Execution.__struct_fields__
_Fields = record_of("Fields", {name: _kind_of(name) for name in _NAMES}, dict.fromkeys(_NAMES))


# --------------------------------------------------------------------------------------------------
# Evaluation of points of a space, and conversion of the results to costs for tuners.
#
# A tuner needs a cost for infeasible points too. A feasible point with figure x costs x / (x + r),
# in (0, 1), with a scale r in the unit of x. A point that needs too much memory costs 1 to 1.1,
# depending on the missing fraction, which leads a tuner to smaller points. All other infeasible
# points cost 1.2, since the order of the checks does not show how far a point is from feasible.
# Infeasible points thus cost more than feasible ones, but not so much that the differences between
# feasible points vanish.


_LACKS_FIRST, _LACKS_SECOND = (
    REASONS.index(f"Mem tier{tier} needs more than it has") for tier in (1, 2)
)


Progress = Callable[[int, int], None]
"""Callback that receives (number of evaluated points, number of all points to evaluate)."""


class Priced(records.Record):
    """Evaluated points with their results, in the order of the request."""

    executions: NDArray[Any]
    """Array of `EXECUTION`."""
    outcomes: NDArray[Any]
    """Results of the compiled engine, one row per point."""
    scores: NDArray[np.float64]
    """Shape (points, 2): objective and tie-breaker. Smaller is better; inf if infeasible."""


class Pricer(records.Record, dict=True):
    """Evaluator of points: model, space and options. It can be pickled for another process."""

    application: Application
    system: System
    space: TuningSpace
    objective: Objective
    compat: bool | Quirks = False
    threads: int = 1
    top: int = 1
    """Maximum number of best points in a record."""

    def __getstate__(self) -> dict[str, Any]:
        # A compiled model cannot be pickled, so each process opens one.
        return {name: value for name, value in vars(self).items() if name != "_model"}

    @cached_property
    def _model(self) -> Any:
        return open_model(self.application, self.system, self.compat)

    def record(self, whole: int = 0, progress: Progress | None = None) -> Record:
        """Return an empty record; whole : number of points to evaluate, for `progress`."""
        return Record(room=self.top, whole=whole, progress=progress)

    @cached_property
    def scale(self) -> float:
        """Scale r of costs x / (x + r), in the unit of the score of the objective.

        `rate`: seconds per sample at the peak FLOP/s of the system. `time`: the same for the
        largest batch, seconds. `memory`: bytes of the first memory. A rough value is sufficient.
        """
        if self.objective == "memory":
            return self.system.memory_bytes(1) or 1.0
        peak_per_s = max(engine.tflops for engine in self.system.matrix.values()) * 1e12
        # A backward pass counts as two forward passes.
        passes = 3 if self.space.training else 1
        # Two FLOP per parameter and token.
        flops = 2.0 * passes * self.application.num_parameters * self.application.seq_size
        sample_s = flops / (self.space.num_procs * peak_per_s)
        # Numbers ascend: the largest batch has the longest step.
        batches = next(d.values for d in self.space.domains if d.name == "batch_size")
        return sample_s * (int(batches[-1]) if self.objective == "time" else 1)

    def price(self, digits: NDArray[np.int64]) -> Priced:
        """Return the evaluated points; digits : one row per point."""
        executions = self.space.executions(digits)
        outcomes, _ = self._model.evaluate_many(executions, self.threads, False, GO_ON)
        time_s, first_bytes = outcomes["total_time_s"], outcomes["tier1_bytes"]
        sample_s = time_s / executions["batch_size"]
        order = {
            "rate": (sample_s, first_bytes),
            "time": (time_s, first_bytes),
            "memory": (first_bytes, sample_s),
        }[self.objective]
        scores = np.stack(order, axis=1)
        scores[outcomes["ok"] == 0] = np.inf
        return Priced(executions=executions, outcomes=outcomes, scores=scores)

    def costs(self, priced: Priced) -> NDArray[np.float64]:
        """Return the costs that a tuner minimises: below 1 if feasible, else 1 to 1.2."""
        figures, outcomes = priced.scores[:, 0], priced.outcomes
        costs = np.full(len(figures), 1.2)
        for tier, code in ((1, _LACKS_FIRST), (2, _LACKS_SECOND)):
            lacks = outcomes["reason"] == code
            need = outcomes[f"tier{tier}_bytes"][lacks]
            has = self.system.memory_bytes(1 if tier == 1 else 2)
            # Just above 1 if little memory is missing, 1.1 if nearly all is.
            costs[lacks] = 1.0 + 0.1 * (1.0 - has / need)
        runs = outcomes["ok"] != 0
        costs[runs] = figures[runs] / (figures[runs] + self.scale)
        return costs


_Ranked = tuple[float, float, np.void, np.void]
"""(score, tie-breaker, packed execution, result) of a point."""


@dataclass(kw_only=True)
class Record:
    """Summary of the points evaluated so far; records of consecutive parts can be joined."""

    evaluations: int = 0
    """Number of evaluated points."""
    counts: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(len(REASONS), dtype=np.int64)
    )
    """Number of points by index in `REASONS`; index 0 counts feasible points."""
    room: int = 1
    """Maximum length of `ranked`."""
    ranked: list[_Ranked] = field(default_factory=list)
    """Best points without duplicates, best first; ties in the order of evaluation."""
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    """(number of evaluations, score, tie-breaker) of every improvement."""
    whole: int = 0
    """Number of points to evaluate, for `progress`."""
    progress: Progress | None = None
    """Called after each part with `evaluations` and `whole`."""

    @property
    def last(self) -> tuple[float, float]:
        """Score and tie-breaker of the best point; inf if there is no feasible point."""
        return self.steps[-1][1:] if self.steps else (np.inf, np.inf)

    def add(self, priced: Priced) -> None:
        """Add evaluated points in order; of points with equal scores, the first ranks higher."""
        first = priced.scores[:, 0]
        # A row can only be better where the running minimum falls or is tied.
        least = np.minimum.accumulate(np.minimum(first, self.last[0]))
        for row in np.flatnonzero((first == least) & np.isfinite(first)).tolist():
            score = (float(first[row]), float(priced.scores[row, 1]))
            if score < self.last:
                self.steps.append((self.evaluations + row + 1, *score))
        self._rank(self._best_of(priced))
        self.evaluations += len(first)
        self.counts += np.bincount(priced.outcomes["reason"], minlength=len(REASONS))
        self._tell()

    def _best_of(self, priced: Priced) -> list[_Ranked]:
        """Return the points of `priced` that may enter `ranked`, best first."""
        full = len(self.ranked) == self.room
        limit = self.ranked[-1][0] if full else np.inf
        rows = np.flatnonzero((priced.scores[:, 0] <= limit) & np.isfinite(priced.scores[:, 0]))
        # lexsort sorts by its last key first, and is stable.
        order = np.lexsort((priced.scores[rows, 1], priced.scores[rows, 0]))
        # Learning tuners request points repeatedly: twice the number leaves room for duplicates.
        kept = rows[order][: 2 * self.room]
        first, second = priced.scores[kept].T.tolist()
        # Copied, since views would keep all points of their chunk in memory.
        return list(zip(first, second, priced.executions[kept], priced.outcomes[kept], strict=True))

    def _rank(self, points: list[_Ranked]) -> None:
        """Merge points into `ranked`: the best `room` points, without duplicates."""
        ranked: list[_Ranked] = []
        seen: set[Any] = set()
        # A stable sort keeps the first of equal points in front.
        for point in sorted([*self.ranked, *points], key=lambda point: point[:2]):
            if len(ranked) == self.room:
                break
            execution = point[2].item()
            if execution not in seen:
                seen.add(execution)
                ranked.append(point)
        self.ranked = ranked

    def join(self, part: Record) -> None:
        """Append the record of the points that follow those of this record."""
        # A part counts its evaluations from 0.
        for count, *score in part.steps:
            if tuple(score) < self.last:
                self.steps.append((self.evaluations + count, score[0], score[1]))
        self._rank(part.ranked)
        self.evaluations += part.evaluations
        self.counts += part.counts
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.evaluations, self.whole)


# --------------------------------------------------------------------------------------------------
# Tuners without optional packages: every point, or a random sample.


CHUNK = 1 << 17
"""Points evaluated at a time: enough for efficient arrays, few enough to fit in memory."""
_COUNTABLE = 2**62
"""Maximum size of a space whose points are numbered with 64-bit integers."""


def price_range(pricer: Pricer, begin: int, end: int, progress: Progress | None = None) -> Record:
    """Return the record of the points with numbers from `begin` to `end` - 1."""
    record = pricer.record(end - begin, progress)
    for start in range(begin, end, CHUNK):
        points = np.arange(start, min(start + CHUNK, end), dtype=np.int64)
        record.add(pricer.price(pricer.space.digits(points)))
    return record


def price_sample(
    pricer: Pricer,
    evaluations: int,
    seed: int,
    progress: Progress | None = None,
) -> Record:
    """Return the record of a random sample of `evaluations` points, as drawn by `draw_sample`."""
    digits = draw_sample(pricer.space, evaluations, np.random.default_rng(seed))
    record = pricer.record(len(digits), progress)
    for begin in range(0, len(digits), CHUNK):
        record.add(pricer.price(digits[begin : begin + CHUNK]))
    return record


def draw_sample(space: TuningSpace, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the digits of a uniform random sample of points, one row each.

    Points do not repeat, except in spaces of more than 2^62 points, where this is very unlikely. If
    the space has at most `count` points, all are returned.
    """
    if space.size > _COUNTABLE:  # repeats are practically impossible
        return np.stack([rng.integers(len(d.values), size=count) for d in space.domains], axis=1)
    # In such a small space draws would mostly repeat, so shuffle it.
    if space.size <= 4 * count:
        return space.digits(rng.permutation(space.size)[:count])
    points = np.empty(0, np.int64)
    while len(points) < count:
        drawn = np.concatenate([points, rng.integers(space.size, size=count - len(points))])
        # unique sorts by value; the first indices restore the drawing order.
        points = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
    return space.digits(points)


# --------------------------------------------------------------------------------------------------
# Result of a tuner, and its progress.


class TraceStep(records.Record):
    """Best figure of the objective after a number of evaluations."""

    evaluations: int
    value: float
    """Samples per second, seconds or bytes, by objective."""


class TuningResult(records.Record):
    """Result of a tuner: its best points, counts of evaluated points, and the trace."""

    tuner: str
    objective: Objective
    best: Point | None
    """Best point; None if none is feasible."""
    top: tuple[Point, ...] = ()
    """Best points, at most as many as requested, best first."""
    evaluations: int
    """Number of evaluated points."""
    space_size: int
    """Number of points in the space."""
    feasible: int
    """Number of feasible points among the evaluated ones."""
    refused: Mapping[str, int]
    """Number of infeasible points by reason, most frequent first."""
    trace: tuple[TraceStep, ...]
    """One step per improvement of the objective."""

    @property
    def feasible_share(self) -> float:
        """Feasible fraction of the evaluated points, 0 to 1."""
        return self.feasible / self.evaluations if self.evaluations else 0.0

    @property
    def exhaustive(self) -> bool:
        """True if every point of the space was evaluated, so that `best` is the optimum."""
        # Random points are drawn once each, while learning tuners may request a point again.
        every = self.tuner == "random" and self.evaluations >= self.space_size
        return every or self.tuner == "exhaustive"


def result_of(tuner: str, objective: Objective, space: TuningSpace, record: Record) -> TuningResult:
    """Return the result of a tuner from the record of its points."""
    trace: list[TraceStep] = []
    last = float("inf")
    for evaluations, score, _ in record.steps:
        if score < last:  # not only the tie
            # The score of a rate is seconds per sample.
            value = 1.0 / score if objective == "rate" else score
            trace.append(TraceStep(evaluations=evaluations, value=value))
            last = score
    refused = {REASONS[code]: int(n) for code, n in enumerate(record.counts) if code and n}
    # Batch sizes are shown only if they differ.
    fixed = len({int(execution["batch_size"]) for _, _, execution, _ in record.ranked}) == 1
    top = tuple(point_of(x, o, fixed_batch=fixed) for _, _, x, o in record.ranked)
    return TuningResult(
        tuner=tuner,
        objective=objective,
        best=next(iter(top), None),
        top=top,
        evaluations=record.evaluations,
        space_size=space.size,
        feasible=int(record.counts[0]),
        refused=dict(sorted(refused.items(), key=lambda item: -item[1])),
        trace=tuple(trace),
    )

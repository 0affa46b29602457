"""Spaces that a user writes down, their prices, and the tuners that need no package.

Ray and SMAC are in `packages`.
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
# Domains of a space, as its file says them.


_DEGREES = ("tensor_par", "pipeline_par", "data_par")
_FIXED = ("num_procs", "training")
_FLAGS = tuple(
    name
    for name in Execution.__struct_fields__
    if name not in CHOICES and name not in WHOLE_NUMBERS
)
# The engine computes a block once and keeps it: what blocks depend on varies slowest.
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
    """The values that one field of an execution may take; numbers ascend, words do not order."""

    name: str
    values: tuple[int | str | bool, ...]

    @property
    def ordered(self) -> bool:
        """Return whether neighbouring values are alike: numbers, not words and switches."""
        return self.name not in CHOICES and self.name not in _FLAGS

    @cached_property
    def codes(self) -> NDArray[np.int32]:
        """Return the values as the compiled engine has them."""
        if self.name in CHOICES:
            return np.array([CHOICES[self.name].index(str(v)) for v in self.values], np.int32)
        return np.array(self.values, np.int32)


class TuningSpace(records.Record):
    """A product of domains on a fixed number of processors.

    A point is a row of digits, the positions of its values in the domains.
    """

    num_procs: int
    training: bool
    domains: tuple[Domain, ...]
    """In the order in which points are counted, the last one fastest."""
    derived: str | None
    """The degree that follows from the other two and num_procs."""

    @property
    def size(self) -> int:
        """Return the number of points."""
        return math.prod(len(domain.values) for domain in self.domains)

    def digits(self, points: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the digits of points by their number, a row each."""
        result = np.empty((len(points), len(self.domains)), np.int64)
        rest = points
        # the last domain is the fastest
        for column in range(len(self.domains) - 1, -1, -1):
            rest, result[:, column] = np.divmod(rest, len(self.domains[column].values))
        return result

    def executions(self, digits: NDArray[np.int64]) -> NDArray[Any]:
        """Return points as an array of `EXECUTION`."""
        packed = np.empty(len(digits), EXECUTION)
        packed["num_procs"], packed["training"] = self.num_procs, self.training
        for column, domain in enumerate(self.domains):
            packed[domain.name] = domain.codes[digits[:, column]]
        if self.derived is not None:
            # a product of degrees needs 64 bits
            given = [packed[name].astype(np.int64) for name in _DEGREES if name != self.derived]
            # Where the others do not divide num_procs, the product is wrong and the check says so.
            packed[self.derived] = np.maximum(self.num_procs // (given[0] * given[1]), 1)
        return packed


def load_space(
    source: Mapping[str, Any] | Path | str,
    *,
    num_procs: int | None = None,
    structure_type: str = "gpt",
) -> TuningSpace:
    """Return the space of a JSON file or of its keys.

    source : for every field of an execution a value, a list, or a range such as
        {"from": 1, "to": 64, "times": 2}; one degree may be left out, it follows from num_procs.
    num_procs : where the space does not say; without both, three single degrees do.
    structure_type : where the space does not say.

    Raises
    ------
    DocumentError: names the file, the field, its value and the remedy.
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
            remedy = "give one value, a space has one"
            raise DocumentError(path, problem, key=name, remedy=remedy)
    absent = [name for name in _ORDER if name not in found]
    if absent and (len(absent) > 1 or absent[0] not in _DEGREES):
        lost = next((name for name in absent if name not in _DEGREES), absent[-1])
        raise DocumentError(path, "this key is missing", key=lost, remedy=f"give {_SPELLING}")
    single = not absent and all(len(found[name]) == 1 for name in _DEGREES)
    if "num_procs" not in found and not single:
        raise DocumentError(
            path,
            "this key is missing, and degrees with several values do not tell it",
            key="num_procs",
            remedy="give the number of processors",
        )
    # three single degrees say the processors as well
    known = ("num_procs",) if "num_procs" in found else _DEGREES
    processors = math.prod(found[name][0] for name in known)
    if num_procs not in (None, processors):
        problem = f"the value is {processors}, but {num_procs} are asked for"
        raise DocumentError(path, problem, key="num_procs", remedy="drop one")
    return TuningSpace(
        num_procs=processors,
        training=bool(found["training"][0]),
        domains=tuple(Domain(name=name, values=found[name]) for name in _ORDER if name in found),
        derived=next((name for name in _DEGREES if name not in found), None),
    )


class _Values(records.Record, kw_only=False, eq=False):
    """What a field of a space may be: such a value, a list of them, or a range of integers."""

    expected: str
    accepts: Callable[[Any], bool]
    number: bool = False

    def read(self, value: object) -> tuple[Any, ...]:
        """Return the values, numbers in ascending order, or raise what was expected."""
        listed = value if isinstance(value, list) else [value]
        if isinstance(value, dict):
            listed = self._range(value)
        if not listed:
            raise KeyFault("", f"the list is empty; give {_SPELLING}")
        values: list[Any] = listed
        for one in values:
            if not self.accepts(one):
                raise KeyFault("", f"the value is {shorten(one)}, expected {self.expected}")
        if len(set(values)) < len(values):
            raise KeyFault("", f"a value of {shorten(value)} appears twice")
        # neighbours in order are alike, which tuners use; words have no order to bring them into
        return tuple(sorted(values)) if self.number else tuple(values)

    def _range(self, written: dict[str, Any]) -> list[int]:
        """Return the values of {"from", "to"} with "step" or "times", both ends included if met."""
        problem = f"the value is {shorten(written)}, expected {_SPELLING}"
        if not self.number:
            raise KeyFault("", f"{problem}; this field takes no range")
        known = {"from", "to", "step", "times"}
        if not {"from", "to"} <= set(written) <= known or len(written) > 3:
            raise KeyFault("", problem)
        if any(type(value) is not int for value in written.values()):
            raise KeyFault("", f"{problem}; ranges are of integers")
        first, last = written["from"], written["to"]
        step, factor = written.get("step", 1), written.get("times")
        if factor is None and (step < 1 or last < first):
            raise KeyFault("", f"{problem}; let the range ascend")
        if factor is not None and (factor < 2 or not 1 <= first <= last):
            raise KeyFault("", f"{problem}; let the range ascend from 1 or more")
        if factor is None and (last - first) // step >= _MOST_VALUES:
            raise KeyFault("", f"the range has more than {_MOST_VALUES} values; widen its step")
        # an end that no value may have would cut the range where nobody sees it
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
# Prices points of a space, and says how good they are as one number that a tuner can learn from.
#
# A point that cannot run has no time, but a tuner needs a number for it. Costs of points that run
# are in (0, 1): their figure x against a scale r of the same unit, as x / (x + r). A point that
# lacks memory costs 1 to 1.1, by the share that it lacks, so that a tuner is led to smaller ones;
# any other refusal costs 1.2, since the order of the checks says nothing of how far off a point is.
# So no refused point looks better than one that runs, and none is so bad that differences between
# good ones vanish beside it.


_LACKS_FIRST, _LACKS_SECOND = (
    REASONS.index(f"Mem tier{tier} needs more than it has") for tier in (1, 2)
)


Progress = Callable[[int, int], None]
"""Takes the number of priced points and of all that will be priced."""


class Priced(records.Record):
    """Points with their figures, in the order they were asked for."""

    executions: NDArray[Any]
    outcomes: NDArray[Any]
    scores: NDArray[np.float64]
    """Shape (points, 2): what counts and what decides ties, smaller is better; inf if refused."""


class Pricer(records.Record, dict=True):
    """A model, a space and what is asked of it; can be sent to another process."""

    application: Application
    system: System
    space: TuningSpace
    objective: Objective
    compat: bool | Quirks = False
    threads: int = 1
    top: int = 1
    """Points that a record keeps."""

    def __getstate__(self) -> dict[str, Any]:
        # a compiled model cannot be sent: each process opens its own
        return {name: value for name, value in vars(self).items() if name != "_model"}

    @cached_property
    def _model(self) -> Any:
        return open_model(self.application, self.system, self.compat)

    def record(self, whole: int = 0, progress: Progress | None = None) -> Record:
        """Return an empty record, which reports its progress towards `whole` points."""
        return Record(room=self.top, whole=whole, progress=progress)

    @cached_property
    def scale(self) -> float:
        """Return what costs are relative to: the step at the machine's peak, or its memory.

        Seconds per sample, seconds or bytes, by objective; a rough figure is enough.
        """
        if self.objective == "memory":
            return self.system.memory_bytes(1) or 1.0
        peak_per_s = max(engine.tflops for engine in self.system.matrix.values()) * 1e12
        # a backward pass counts as two forward ones
        passes = 3 if self.space.training else 1
        # two FLOP a parameter and token
        flops = 2.0 * passes * self.application.num_parameters * self.application.seq_size
        sample_s = flops / (self.space.num_procs * peak_per_s)
        # numbers ascend: the largest batch has the longest step
        batches = next(d.values for d in self.space.domains if d.name == "batch_size")
        return sample_s * (int(batches[-1]) if self.objective == "time" else 1)

    def price(self, digits: NDArray[np.int64]) -> Priced:
        """Return points, given as rows of digits, with their figures."""
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
        """Return what a tuner minimises; the head of this file says how refusals count."""
        figures, outcomes = priced.scores[:, 0], priced.outcomes
        costs = np.full(len(figures), 1.2)
        for tier, code in ((1, _LACKS_FIRST), (2, _LACKS_SECOND)):
            lacks = outcomes["reason"] == code
            need = outcomes[f"tier{tier}_bytes"][lacks]
            has = self.system.memory_bytes(1 if tier == 1 else 2)
            # just above 1 where hardly anything lacks, 1.1 where nearly all does
            costs[lacks] = 1.0 + 0.1 * (1.0 - has / need)
        runs = outcomes["ok"] != 0
        costs[runs] = figures[runs] / (figures[runs] + self.scale)
        return costs


_Ranked = tuple[float, float, np.void, np.void]
"""(score, tie, execution, outcome) of a point."""


@dataclass(kw_only=True)
class Record:
    """What came of the points that were priced so far; records of parts add up to one."""

    evaluations: int = 0
    counts: NDArray[np.int64] = field(
        default_factory=lambda: np.zeros(len(REASONS), dtype=np.int64)
    )
    """Points by the code of the reason why they are refused, 0 for those that run."""
    room: int = 1
    """Points that are kept."""
    ranked: list[_Ranked] = field(default_factory=list)
    """The best first; of equal ones the first that was priced."""
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    """(evaluations, score, tie) whenever a better point was found."""
    whole: int = 0
    progress: Progress | None = None
    """Called with the numbers of priced points and of all, after each part."""

    @property
    def last(self) -> tuple[float, float]:
        """Return the score and tie of the best point."""
        return self.steps[-1][1:] if self.steps else (np.inf, np.inf)

    def add(self, priced: Priced) -> None:
        """Take in points in their order; of equal ones the first is kept."""
        first = priced.scores[:, 0]
        # only where the least so far falls, or ties with it, can a row be better
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
        """Return the points of these that may be kept, the best first."""
        full = len(self.ranked) == self.room
        limit = self.ranked[-1][0] if full else np.inf
        rows = np.flatnonzero((priced.scores[:, 0] <= limit) & np.isfinite(priced.scores[:, 0]))
        # lexsort sorts by its last key first, and leaves equal ones in their order
        order = np.lexsort((priced.scores[rows, 1], priced.scores[rows, 0]))
        # tuners that learn ask for points again: as many more as there are kept
        kept = rows[order][: 2 * self.room]
        first, second = priced.scores[kept].T.tolist()
        # copied, as rows alone would keep all points of their chunk
        return list(zip(first, second, priced.executions[kept], priced.outcomes[kept], strict=True))

    def _rank(self, points: list[_Ranked]) -> None:
        """Keep the best of what is kept and of these points, none twice."""
        ranked: list[_Ranked] = []
        seen: set[Any] = set()
        # a stable sort: what came first stays in front of its equals
        for point in sorted([*self.ranked, *points], key=lambda point: point[:2]):
            if len(ranked) == self.room:
                break
            execution = point[2].item()
            if execution not in seen:
                seen.add(execution)
                ranked.append(point)
        self.ranked = ranked

    def join(self, part: Record) -> None:
        """Take in the record of the points that come after these."""
        # a part counts from its own begin
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
# Tuners that need nothing else: every point, or a sample of them.


CHUNK = 1 << 17
"""Points that are priced at a time: enough for arrays to pay, few enough to stay in memory."""
_COUNTABLE = 2**62
"""Points of a larger space have no number of 64 bits."""


def price_range(pricer: Pricer, begin: int, end: int, progress: Progress | None = None) -> Record:
    """Return the record of the points from one number to another, the last one left out."""
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
    """Return the record of points drawn evenly, none twice; of all, if there are not more."""
    digits = draw_sample(pricer.space, evaluations, np.random.default_rng(seed))
    record = pricer.record(len(digits), progress)
    for begin in range(0, len(digits), CHUNK):
        record.add(pricer.price(digits[begin : begin + CHUNK]))
    return record


def draw_sample(space: TuningSpace, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the digits of points drawn evenly and without repeats, a row each."""
    if space.size > _COUNTABLE:  # repeats are as good as impossible
        return np.stack([rng.integers(len(d.values), size=count) for d in space.domains], axis=1)
    # of so small a space draws would mostly repeat: shuffled instead
    if space.size <= 4 * count:
        return space.digits(rng.permutation(space.size)[:count])
    points = np.empty(0, np.int64)
    while len(points) < count:
        drawn = np.concatenate([points, rng.integers(space.size, size=count - len(points))])
        # unique sorts by value; first indices bring back the order of drawing
        points = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
    return space.digits(points)


# --------------------------------------------------------------------------------------------------
# What a tuner found, and how it got there.


class TraceStep(records.Record):
    """After so many evaluations, this was the best figure of the objective."""

    evaluations: int
    value: float
    """Samples per second, seconds or bytes, by objective."""


class TuningResult(records.Record):
    """The best point of those that were priced; `best` is None where none of them runs."""

    tuner: str
    objective: Objective
    best: Point | None
    top: tuple[Point, ...] = ()
    """As many as were asked for, the best first."""
    evaluations: int
    space_size: int
    feasible: int
    refused: Mapping[str, int]
    """Points by the reason why they cannot run, most frequent first."""
    trace: tuple[TraceStep, ...]
    """A step whenever the objective got better."""

    @property
    def feasible_share(self) -> float:
        """Return the share of priced points that can run."""
        return self.feasible / self.evaluations if self.evaluations else 0.0

    @property
    def exhaustive(self) -> bool:
        """Return whether nothing in the space can be better."""
        # points drawn at random are drawn once each; those that learn may ask for one again
        every = self.tuner == "random" and self.evaluations >= self.space_size
        return every or self.tuner == "exhaustive"


def result_of(tuner: str, objective: Objective, space: TuningSpace, record: Record) -> TuningResult:
    """Return the answer that a record holds."""
    trace: list[TraceStep] = []
    last = float("inf")
    for evaluations, score, _ in record.steps:
        if score < last:  # not only the tie
            # the score of a rate is seconds per sample
            value = 1.0 / score if objective == "rate" else score
            trace.append(TraceStep(evaluations=evaluations, value=value))
            last = score
    refused = {REASONS[code]: int(n) for code, n in enumerate(record.counts) if code and n}
    # batches are said where they differ
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

"""Exact best-first search for the fastest plans of one engine that fit, by lower bounds.

Every candidate is either evaluated exactly or excluded by a lower bound of its step time or memory.
One queue contains all candidates in the order of their bounds. Partial candidates are expanded
level by level: degrees, stages, chunks, layer layouts with sharding and recomputation. The first
candidate with an exact step time that leaves the queue and fits is the fastest plan.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.arrays import I64
from autopar.errors import InputError
from autopar.price.assessment import Assessment, Target
from autopar.price.oom_risk import kind_of_model
from autopar.price.step import StepTime
from autopar.records import Record, replace
from autopar.run.run import Run
from search.engines.candidate import NONE, Candidate, Constraints
from search.engines.space import EngineContext, EngineSpace
from search.planning.uniform.bounds.blocks import DegreeBlocks, Degrees
from search.planning.uniform.bounds.candidates import DEVICE, ActivationPolicies
from search.planning.uniform.bounds.count import number_of_candidates
from search.planning.uniform.bounds.layer_times import DegreeTimes, arrangement_of
from search.planning.uniform.cost_model import UniformCostModel
from search.planning.uniform.expansion import CandidateExpander
from search.planning.uniform.least_memory import least_memory_plan
from search.planning.uniform.memory import MemoryBudget
from search.planning.uniform.space import UniformSearchSpace


class PricedRun(Record):
    """Candidate with its run, step time and memory."""

    choice: Candidate
    run: Run
    assessment: Assessment

    @property
    def line(self) -> str:
        """Degrees and settings in one line, such as `dp4, ZeRO-3, micro-batch 1`."""
        run = self.run
        line = self.choice.line(run.strategy.gpus, experts=run.model.experts is not None)
        return f"{line}, sync_each_batch" if run.syncs_each_batch else line

    @property
    def samples_per_s(self) -> float:
        """Throughput of the whole cluster, sequences per second."""
        return self.choice.global_batch / self._step_s

    @property
    def sample_s(self) -> float:
        """Step time per sequence of the global batch, seconds."""
        return self._step_s / self.choice.global_batch

    @property
    def _step_s(self) -> float:
        step = self.assessment.step
        assert step is not None, "a solution has a step time"
        return step.total_s


class UniformSearchStats(Record):
    """Counts of candidates in a search, and its CPU time."""

    degrees: int
    """Number of legal combinations of degrees, micro-batch size and precision."""
    choices: int = 1
    """Number of candidates: combinations with stages, chunks, sharding and recomputation.

    The engine may reject some of them. Layouts with equal numbers of chunks count once."""
    opened: int
    """Number of combinations of degrees that were expanded into stages."""
    timed: int
    """Number of candidates with an exact step time."""
    counted: int
    """Number of candidates with an exact memory count."""
    cpu_s: float
    """CPU time, seconds."""


class MemoryShortage(Record):
    """Missing memory of the smallest plan, if no plan fits."""

    stage: int
    """Index of the peak stage."""
    missing_bytes: float
    """Memory of the device, or of the host, that the plan needs beyond what there is, bytes."""
    least_bytes: float
    """Lower bound of the peak of any plan, bytes; equal to the peak if the search was complete.

    If host memory is missing: host memory per GPU of the smallest plan."""
    host: bool = False
    """True if host memory is missing; the plan then fits on the device."""


class VariantResult(Record):
    """Result of a search for the fastest plans of one engine variant."""

    engine: EngineSpace
    solutions: tuple[PricedRun, ...]
    """Fastest plan of each family of degrees, fastest first; empty if nothing fits."""
    smallest: PricedRun | None
    """Plan with the smallest peak found, if nothing fits; None if the search was not complete.

    If some plans fit on the device but not on the host, the one with the least host memory."""
    shortage: MemoryShortage | None = None
    """Missing memory of `smallest`; None without it."""
    least_s: float | None = None
    """Lower bound of step seconds per sequence of any plan that fits; None if none fits."""
    complete: bool = True
    """True if `gap` is at most the accepted one; False if a limit of the search was reached."""
    effort: UniformSearchStats

    @property
    def gap(self) -> float:
        """Upper bound of the relative excess of the best plan's step time over the optimum.

        0 if optimality is proven or nothing was found.
        """
        if not self.solutions or not self.least_s:
            return 0.0
        return self.solutions[0].sample_s / self.least_s - 1.0


LEAST_S = 1.5
"""CPU seconds to improve the smallest plan, without a user's time limit."""
GRACE_S = 5.0
"""CPU seconds after the time limit to find any plan that fits, if none was found before."""
_BOUNDED, _DEGREES, _PIPELINE, _STAGES, _CHUNKS, _LAYOUT, _SETS, _COPIES, _HOSTED, _EXACT = range(
    9, -1, -1
)
"""Levels of queue entries; among equal bounds the lowest level comes first.

`_BOUNDED` is that of known bounds of degrees that were not expanded.

Both `_PIPELINE` and `_STAGES` are numbers of stages, with bounds without and with reductions.

`_EXACT` and `_HOSTED` entries have an exact step time, without and with activation offload."""
_BLOCK = 64
"""Degrees that are bounded at once."""
_MOST_ENTRIES = 4000
"""Entries that a search with a limit of counts expands; they take about 2 s."""
_ROUNDING = 1.0 - 1e-9
"""Rounding factor: differences of sums must not exceed the exact ones."""


class _SearchBudget(NamedTuple):
    """Limits of a search; None for no limit."""

    cpu_s: float | None
    """Process CPU time at which the search ends, seconds."""
    counts: int | None
    """Number of memory counts."""
    entries: int | None
    """Number of expanded entries."""

    def exhausted(self, counted: int, expanded: int) -> bool:
        """Return True if a limit is exceeded after some memory counts and expanded entries."""
        if self.counts is not None and counted >= self.counts:
            return True
        if self.entries is not None and expanded >= self.entries:
            return True
        return self.cpu_s is not None and time.process_time() > self.cpu_s


class _QueueEntry(NamedTuple):
    """Candidate in the queue with its bounds."""

    key: float
    """Order in the queue, at most `seconds` (`_Search.key`)."""
    seconds: float
    """Step seconds per sequence, or a lower bound of them."""
    level: int
    choice: Candidate
    number: int
    """Order of insertion; no two entries are equal."""
    unit: DegreeTimes | None = None
    """Times shared by candidates of equal degrees; None at the level of degrees."""
    options: ActivationPolicies | None = None
    """Activation policies at the levels of layouts and offload sets, else None."""
    at: int = 0
    """Index of the current policy in `options`."""


class UniformSearch:
    """Searches of one engine for one job, which share caches of bounds and step times."""

    def __init__(self, engine: EngineSpace, job: EngineContext, target: Target) -> None:
        self.engine = engine
        self.job = job
        self.target = target
        self.prices = UniformCostModel(engine, job, target)
        self.space = UniformSearchSpace(self.prices)
        self.openings: dict[Constraints, CandidateExpander] = {}
        """Expanders by constraints; their caches that depend on memory are not reused."""
        self.known: dict[Constraints, dict[tuple[int, Candidate], tuple[MemoryBudget, float]]] = {}
        """(level, candidate) -> (memory budget, lower bound of all finer candidates)."""

    def solve(
        self,
        fixed: Constraints | None = None,
        *,
        top: int = 1,
        seconds: float | None = None,
        grace_s: float = GRACE_S,
        counts: int | None = None,
        memory_bytes: float | None = None,
        oom_risk: float | None = None,
        smallest_s: float | None = LEAST_S,
        within_s: float = math.inf,
        numbered: bool = True,
        gap: float = 0.0,
    ) -> VariantResult:
        """Return the fastest plans that fit, the best of each family of degrees.

        Raises InputError if the engine runs no plan of this job at all.

        top : number of families
        seconds : CPU time limit, after which the best plan found is returned with its gap
        grace_s : additional CPU seconds to find any plan that fits, if none was found
        counts : limit of memory counts, for results that do not depend on the speed of the host.
            The expanded entries are limited as well. If no plan was found, as many of both are
            added. The smallest plan is not searched.
        memory_bytes, oom_risk : device memory and OOM probability limit in place of the target's
        smallest_s : CPU seconds to improve the smallest plan, without `seconds`; None: it is not
            searched
        within_s : step seconds per sequence above which plans are not searched
        numbered : False: `UniformSearchStats.choices` is not counted
        gap : accepted relative excess of a plan's step time over the proven lower bound
        """
        began = time.process_time()
        target = self.target
        if memory_bytes is not None:
            card = replace(target.machine.card, memory_bytes=memory_bytes)
            target = replace(target, machine=replace(target.machine, card=card))
        if oom_risk is not None:
            target = replace(target, oom_risk=oom_risk)
        search = _Search(self, target, fixed or Constraints(), top, gap)
        deadline = None if seconds is None else began + seconds
        end = None if seconds is None else began + seconds + grace_s
        search.run(
            _SearchBudget(deadline, counts, None if counts is None else _MOST_ENTRIES),
            _SearchBudget(
                end, *(None, None) if counts is None else (2 * counts, 2 * _MOST_ENTRIES)
            ),
            within_s,
        )
        found = search.solved(began, deadline, smallest_s if counts is None else None)
        number = (
            number_of_candidates(search.openings, self.space, search.degrees) if numbered else 1
        )
        effort = replace(found.effort, choices=number, cpu_s=time.process_time() - began)
        return replace(found, effort=effort)


def solve(
    engine: EngineSpace,
    job: EngineContext,
    target: Target,
    fixed: Constraints | None = None,
    *,
    top: int = 1,
    seconds: float | None = None,
) -> VariantResult:
    """Return the fastest plans of an engine that fit, the best of each family of degrees.

    Raises InputError if the engine runs no plan of this job at all.

    top : number of families
    seconds : CPU time limit, after which the best plan found is returned with its gap
    """
    return UniformSearch(engine, job, target).solve(fixed, top=top, seconds=seconds)


class _Search:
    """One search with given constraints, memory limits and number of families."""

    def __init__(
        self, uniform: UniformSearch, target: Target, fixed: Constraints, top: int, gap: float
    ) -> None:
        self.prices, self.space = uniform.prices, uniform.space
        self.engine, self.job = uniform.engine, uniform.job
        self.target, self.fixed, self.top, self.gap = target, fixed, top, gap
        self.room = MemoryBudget(
            target.capacity_bytes, target.oom_risk, kind_of_model(self.job.model)
        )
        self.queue: list[_QueueEntry] = []
        self.found: dict[object, PricedRun] = {}
        self.opened = self.timed = self.counted = self.expanded = 0
        self.hosted: dict[Candidate, dict[str, bool]] = {}
        """Candidate without offload -> offload sets pushed so far -> True if it did not fit."""
        self.copied: set[Candidate] = set()
        """Candidates with an entry in the queue for larger numbers of HSDP replicas."""
        self.too_much: tuple[float, PricedRun] | None = None
        """(host bytes, plan) with the least host memory of plans that exceed only host memory."""
        self.complete = True
        self.least_s: float | None = None
        openings = uniform.openings
        if fixed not in openings:
            alike = (one for one in openings.values() if one.has_pipelines_of(fixed))
            openings[fixed] = CandidateExpander(self.prices, fixed, self.room, next(alike, None))
        self.openings = openings[fixed].within(self.room)
        self.known = uniform.known.setdefault(fixed, {})
        self.wider = [known for wider, known in uniform.known.items() if wider.includes(fixed)]
        """Bounds of earlier searches with all candidates of this search, its own included."""
        self.degrees = self.space.degrees(fixed)
        self.blocks = DegreeBlocks(self.space, self.openings)

    # ----------------------------------------------------------------------------------------------

    def push(self, seconds: float, level: int, choice: Candidate, **known: object) -> None:
        """Push a candidate with its step seconds per sequence, or a lower bound of them."""
        self.pushed += 1
        self.least_pushed = min(self.least_pushed, seconds)
        heapq.heappush(
            self.queue,
            _QueueEntry(
                self.key(seconds, level),
                seconds,
                level,
                choice,
                self.pushed,
                **known,  # type: ignore[arg-type]
            ),
        )

    def key(self, seconds: float, level: int) -> float:
        """Return the order of an entry in the queue.

        Without a gap it is the bound itself. With a gap g, bounds of finer levels are divided by up
        to 1 + g, and exact step times by 1 + g. An exact step time that leaves the queue first then
        exceeds no bound by more than g.
        """
        finer = 1.0 - max(0, level - _HOSTED) / (_DEGREES - _HOSTED)
        key: float = seconds / (1.0 + self.gap) ** finer
        return key

    def least_of(self, entry: _QueueEntry) -> float:
        """Return a lower bound of an entry that left the queue and of all that did not, s."""
        if not self.gap:
            return entry.seconds
        return min([entry.seconds, self.following_s, *(one.seconds for one in self.queue)])

    pushed = 0
    least_pushed = math.inf
    following_s = math.inf
    """Lower bound of all degrees that were not pushed."""

    def coarse(self, within_s: float) -> Iterator[tuple[float, I64]]:
        """Yield (step seconds per sequence, degrees) of blocks of degrees, in ascending order.

        The seconds are a lower bound for the degrees of this and of later blocks; the degrees are
        indices. Degrees that cannot fit or are slower than `within_s` are omitted.
        """
        seconds, size = self.degrees.seconds, self.degrees.bytes
        at = np.flatnonzero((size <= self.room.most_bytes) & (seconds <= within_s))
        order = at[np.argsort(seconds[at], kind="stable")]
        for first in range(0, len(order), _BLOCK):
            yield float(seconds[order[first]]), order[first : first + _BLOCK]

    def entries(self, within_s: float) -> Iterator[_QueueEntry]:
        """Yield queue entries by bound, including entries that are pushed during iteration."""
        coarse = self.coarse(within_s)
        following = next(coarse, None)
        while self.queue or following:
            while following and (not self.queue or following[0] <= self.queue[0].key):
                self.push_degrees(following[1])
                following = next(coarse, None)
            self.following_s = following[0] if following else math.inf
            if self.queue:
                yield heapq.heappop(self.queue)

    def push_degrees(self, places: I64) -> None:
        """Push degrees with bounds of earlier searches, or else with those of `DegreeBlocks`.

        places : indices of degrees
        """
        new: list[tuple[float, Degrees]] = []
        for place in places.tolist():
            laid, seconds = int(self.degrees.laid[place]), float(self.degrees.seconds[place])
            way = self.space.expert_degrees[self.degrees.way[place]]
            attention = self.space.attention_degrees[laid]
            choice = self.space.choice(way, attention, int(self.degrees.batch[place]))
            least = max(self.bound(level, choice)[1] for level in (_DEGREES, _BOUNDED))
            if least <= seconds:
                new.append((seconds, Degrees(choice, way, laid)))
            elif least < math.inf:
                self.push(least, _DEGREES, choice)
        bounds = self.blocks.seconds([one for _, one in new]).tolist() if new else []
        for (seconds, one), bound in zip(new, bounds, strict=True):
            least = max(seconds, bound)
            self.known[_BOUNDED, one.choice] = self.room, least
            if least < math.inf:
                self.push(least, _DEGREES, one.choice)

    def run(self, limit: _SearchBudget, end: _SearchBudget, within_s: float) -> None:
        """Search until `top` families have a plan or a limit is reached.

        After `limit`, the search continues only if it has no plan, and accepts any plan that fits.
        After `end`, it stops.

        within_s : step seconds per sequence above which plans are not searched
        """
        late = False
        for entry in self.entries(within_s):
            if entry.key > within_s:
                break
            if entry.seconds > within_s:
                continue
            if not late and limit.exhausted(self.counted, self.expanded):
                late, self.complete = True, False
                if not self.found:
                    self.least_s = self.least_of(entry)
            if late and end.exhausted(self.counted, self.expanded):
                break
            if entry.level < _DEGREES and family_of(entry.choice) in self.found:
                continue
            if late:
                self.find_any_feasible(entry, end)
            else:
                self.open(entry)
            if len(self.found) >= self.top or (late and self.found):
                break

    def find_any_feasible(self, entry: _QueueEntry, end: _SearchBudget) -> None:
        """Expand an entry until any plan fits, lowest levels first."""
        others, self.queue = self.queue, [entry]
        while self.queue and not self.found and not end.exhausted(self.counted, self.expanded):
            at = min(
                range(len(self.queue)),
                key=lambda at: (self.queue[at].level, self.queue[at].seconds),
            )
            one = self.queue.pop(at)
            if one.level == _LAYOUT:
                # the slowest recomputation needs the least memory
                assert one.options is not None, "a layout has options"
                # skip to this policy; only those after it are pushed again
                one = one._replace(at=max(one.at, one.options.last_without_offload))
            self.open(one)
        self.queue = [*others, *self.queue]
        heapq.heapify(self.queue)

    def open(self, entry: _QueueEntry) -> None:
        """Expand an entry, or accept it if it has an exact step time and fits."""
        self.expanded += 1
        if entry.level in self.expanders:
            self.open_finer(entry)
        elif entry.level == _LAYOUT:
            self.open_layout(entry)
        elif entry.level == _SETS:
            self.bound_offload_sets(entry)
        elif entry.level == _COPIES:
            self.open_copies(entry)
        else:
            self.accept(entry)

    # ----------------------------------------------------------------------------------------------
    # Degrees, stages, chunks

    @cached_property
    def expanders(self) -> dict[int, Callable[[_QueueEntry], None]]:
        """Methods by level; their results depend only on the entry and the memory budget."""
        return {
            _DEGREES: self.open_degrees,
            _PIPELINE: self.reduce,
            _STAGES: self.open_stages,
            _CHUNKS: self.open_chunks,
        }

    def open_finer(self, entry: _QueueEntry) -> None:
        """Expand an entry, or push it again with a higher bound from an earlier search.

        A bound found with a larger memory budget is valid for a smaller one, which excludes more.
        """
        within, least = self.bound(entry.level, entry.choice)
        if least > entry.seconds:
            if least < math.inf:
                self.pushed += 1
                # a known bound of a number of stages contains the reductions, which count once
                level = _STAGES if entry.level == _PIPELINE else entry.level
                key = self.key(least, level)
                again = entry._replace(key=key, seconds=least, level=level, number=self.pushed)
                heapq.heappush(self.queue, again)
            return
        self.least_pushed = math.inf
        self.expanders[entry.level](entry)
        if not within:
            self.known[entry.level, entry.choice] = self.room, max(entry.seconds, self.least_pushed)

    def open_other_sets(self, choice: Candidate, unit: DegreeTimes) -> None:
        """Push offload sets that do not contain that of a candidate without room on the host."""
        key = replace(choice, offload=NONE)
        known, own = self.hosted.setdefault(key, {}), {*choice.offload.split("+")}
        words = (word for word in self.prices.hosted.words if word not in known)
        others = [word for word in words if not own <= {*word.split("+")}]
        plain = replace(key, recompute=NONE)
        options = self.openings.sets_of(unit, plain, choice.recompute, others)
        known |= {self.prices.hosted.words[at]: False for at in options.sets}
        if len(options.sets):
            self.push(float(options.values[0]), _SETS, key, unit=unit, options=options)

    def bound(self, level: int, choice: Candidate) -> tuple[bool, float]:
        """Return (known, lower bound in s) from earlier searches with at least this budget.

        The bound is known if an earlier search had the same constraints.
        """
        key = level, choice
        of_room = [
            (known is self.known, known[key][1])
            for known in self.wider
            if key in known and self.room.fits_in(known[key][0])
        ]
        return any(own for own, _ in of_room), max((least for _, least in of_room), default=0.0)

    def open_degrees(self, entry: _QueueEntry) -> None:
        """Push the numbers of stages of some degrees that may fit."""
        self.opened += 1
        for degrees in self.openings.overlaps(entry.choice):
            try:
                unit = self.prices.unit(degrees)
            except InputError:
                continue
            for pp, seconds in zip(*self.openings.stages_s(unit, degrees), strict=True):
                if seconds < np.inf:
                    choice = replace(degrees, pp=pp)
                    self.push(float(seconds) / choice.global_batch, _PIPELINE, choice, unit=unit)

    def reduce(self, entry: _QueueEntry) -> None:
        """Push a number of stages with gradient reduction and optimizer in its bound."""
        unit, choice = entry.unit, entry.choice
        assert unit is not None, "stages have a unit"
        seconds = self.openings.reduced_s(unit, choice, entry.seconds * choice.global_batch)
        if seconds < math.inf:
            self.push(seconds / choice.global_batch, _STAGES, choice, unit=unit)

    def open_stages(self, entry: _QueueEntry) -> None:
        """Push the allowed schedules and numbers of chunks that may fit."""
        unit = entry.unit
        assert unit is not None, "stages have a unit"
        for choice, seconds in self.openings.pipelines_s(unit, entry.choice):
            self.push(seconds / choice.global_batch, _CHUNKS, choice, unit=unit)

    def open_chunks(self, entry: _QueueEntry) -> None:
        """Push the layouts of a number of chunks, with the activation policies that may fit."""
        unit = entry.unit
        assert unit is not None, "chunks have a unit"
        for choice in self.openings.layouts(unit, entry.choice):
            options = self.openings.fastest(unit, choice)
            if len(options.places):
                self.push(float(options.values[0]), _LAYOUT, choice, unit=unit, options=options)

    # ----------------------------------------------------------------------------------------------
    # Plans

    def open_layout(self, entry: _QueueEntry) -> None:
        """Compute the step time of a layout's next policy, or expand its offload sets."""
        assert entry.options is not None, "a layout has options"
        options = entry.options
        recompute, offload = self.openings.saving(options, entry.at)
        if offload is None:
            self.push_dominated(entry, options)
            choice = replace(entry.choice, recompute=recompute)
            self.open_sets(choice, entry.unit)
            return
        choice = replace(entry.choice, recompute=recompute, offload=offload)
        step = self.price(choice, entry.unit)
        self.push_dominated(entry, options, step)
        if step is not None and offload == NONE:
            self.push_copies(choice, step, entry)

    def push_dominated(
        self, entry: _QueueEntry, options: ActivationPolicies, step: StepTime | None = None
    ) -> None:
        """Push the policies of a layout after the current one, with raised bounds.

        Policies that recompute all modules of the current one are not faster in schedules that are
        timed by whole stages. Other schedules are timed by forwards and backwards, which share host
        overhead, so their bounds are not raised.

        step : step time of the current policy; None if there is none.
        """
        at = entry.at + 1
        if at >= len(options.places):
            return
        whole = entry.choice.pp == 1 or entry.choice.schedule in ("1f1b", "interleaved")
        if step is not None and whole and options.sets[entry.at] == DEVICE:
            least = step.total_s * _ROUNDING / entry.choice.global_batch
            if len(self.openings.copies(entry.choice)) > 1:
                # the remaining policies may be faster with more replicas
                least = self.copied_s(entry.choice, step)
            which = self.openings.recomputes_superset(options, entry.at)
            options, at = options.dominated(entry.at, which, least), 0
        values, known = options.values, {"unit": entry.unit, "options": options, "at": at}
        self.push(float(values[at]), _LAYOUT, entry.choice, **known)

    def push_copies(self, choice: Candidate, step: StepTime, entry: _QueueEntry) -> None:
        """Push one entry for all larger numbers of HSDP replicas, once per candidate."""
        fewest, *others = self.openings.copies(choice)
        if choice.dp_replicate != fewest or not others or choice in self.copied:
            return
        self.copied.add(choice)
        least = max(entry.seconds, self.copied_s(choice, step))
        self.push(least, _COPIES, choice, unit=entry.unit)

    def copied_s(self, choice: Candidate, step: StepTime) -> float:
        """Return a lower bound of step seconds per sequence for any number of HSDP replicas.

        0 with ZeRO-3, as more replicas also gather weights faster.

        step : step time with the fewest replicas.
        """
        if choice.zero == 3:
            return 0.0
        # more replicas can at most remove the whole exposed reduction
        gone = self.prices.stragglers * step.terms_s["gradients"]
        return (step.total_s - gone) * _ROUNDING / choice.global_batch

    def open_sets(self, choice: Candidate, unit: DegreeTimes | None, seconds: float = 0.0) -> None:
        """Push minimal offload sets that may fit for a candidate that does not fit.

        seconds : lower bound of the candidate's step seconds per sequence. If an earlier search
            found a higher one, the candidate is pushed again with it instead.
        """
        assert unit is not None, "a layout has a unit"
        key = replace(choice, offload=NONE)
        first = key not in self.hosted
        within, least = self.bound(_SETS, key)
        if first and least > seconds:
            if least < math.inf:
                self.push(least, _SETS, key, unit=unit)
            return
        known = self.hosted.setdefault(key, {})
        if known.get(choice.offload):
            return
        known[choice.offload] = True
        recompute, plain = key.recompute, replace(key, recompute=NONE)
        full = [one for one, lacks in known.items() if lacks and one != NONE]
        options = self.openings.fastest_sets(unit, plain, recompute, full)
        names = [self.prices.hosted.words[at] for at in options.sets]
        new = np.array([at for at, one in enumerate(names) if one not in known], dtype=np.int64)
        known |= {names[at]: False for at in new}
        options = options.only(new)
        if first and not within:
            self.known[_SETS, key] = self.room, float(options.values.min(initial=math.inf))
        if len(new):
            self.push(float(options.values[0]), _SETS, key, unit=unit, options=options)

    def bound_offload_sets(self, entry: _QueueEntry) -> None:
        """Push offload sets with bounds raised to the step time without offload."""
        choice, options = entry.choice, entry.options
        if options is None:  # from a bound of an earlier search
            self.open_sets(choice, entry.unit, entry.seconds)
            return
        timing = self.prices.timed(choice)
        if timing is None or timing.step is None:
            return
        self.timed += 1
        least = timing.step.total_s * _ROUNDING / choice.global_batch
        options = options._replace(values=np.maximum(options.values, least))
        plain = replace(choice, recompute=NONE)
        self.push(float(options.values[0]), _LAYOUT, plain, unit=entry.unit, options=options)
        self.push_copies(choice, timing.step, entry)

    def price(self, choice: Candidate, unit: DegreeTimes | None) -> StepTime | None:
        """Push a candidate with its exact step time and return that; None if it is illegal."""
        timing = self.prices.timed(choice)
        if timing is None or timing.step is None:
            return None
        self.timed += 1
        level = _EXACT if choice.offload == NONE else _HOSTED
        self.push(timing.step.total_s / choice.global_batch, level, choice, unit=unit)
        return timing.step

    def open_copies(self, entry: _QueueEntry) -> None:
        """Push step times with more HSDP replicas if these may fit, else their offload sets."""
        assert entry.unit is not None, "a launch has a unit"
        for number in self.openings.copies(entry.choice)[1:]:
            choice = replace(entry.choice, dp_replicate=number)
            if self.openings.device and self.openings.fits(entry.unit, choice):
                self.price(choice, entry.unit)
            elif self.openings.can_offload(choice.recompute):
                self.open_sets(choice, entry.unit)

    def accept(self, entry: _QueueEntry) -> None:
        """Count the memory of a candidate with an exact step time and accept it if it fits."""
        choice = entry.choice
        assert entry.unit is not None, "a launch has a unit"
        # of equal stages the first has the most live micro-batches, so its peak is the largest
        stages = arrangement_of(entry.unit, choice).at
        if not self.fits(choice, entry.unit, stages):
            if self.openings.can_offload(choice.recompute):
                # less offload is no slower, so sets with more are pushed only now
                self.open_sets(choice, entry.unit)
            return
        run = self.prices.run(choice)
        solution = self.solution(choice, run, stages)
        host = solution.assessment.host_bytes
        if not self.target.host_fits(host):
            # sets that contain this one need more host memory; others may need less
            if self.openings.can_offload(choice.recompute):
                self.open_other_sets(choice, entry.unit)
            if self.too_much is None or host < self.too_much[0]:
                self.too_much = host, solution
            return
        if not self.found and self.least_s is None:
            self.least_s = self.least_of(entry)
        self.found[family_of(choice)] = solution

    def fits(self, choice: Candidate, unit: DegreeTimes, stages: Sequence[int]) -> bool:
        """Return True if the exact memory of these stages is within the OOM probability limit."""
        if self.prices.rounding_of(choice) is not None and not self.openings.fits(unit, choice):
            # the bound has risen since the candidate was pushed
            return False
        run = self.prices.run(choice)
        self.counted += 1
        for stage in stages:
            peak = self.prices.account(choice, stage, run).peak_bytes
            if self.target.oom_probability(run, peak) > self.target.oom_risk:
                self.prices.count_rounding(choice, run, stages)
                return False
        return True

    def solution(self, choice: Candidate, run: Run, stages: Sequence[int]) -> PricedRun:
        """Return a candidate with its step time and the memory of these stages."""
        assessment = self.prices.price_run(choice, run, self.target, stages)
        return PricedRun(choice=choice, run=run, assessment=assessment)

    def least_memory_plan(self, deadline: float) -> tuple[PricedRun | None, MemoryShortage | None]:
        """Return the plan that needs the least memory, and its missing memory; else Nones.

        deadline : process CPU time in seconds
        """
        if self.too_much is not None:
            host, solution = self.too_much
            of_stages = solution.assessment.host_bytes_at
            room = self.target.host_capacity_bytes
            assert room is not None, "a host without a size lacks nothing"
            return solution, MemoryShortage(
                stage=max(of_stages, key=lambda stage: of_stages[stage]),
                missing_bytes=host - room,
                least_bytes=host,
                host=True,
            )
        found = least_memory_plan(self.space, self.degrees, self.openings, deadline)
        if found is None:
            return None, None
        solution = self.solution(found.choice, found.run, found.stages)
        fullest = solution.assessment.fullest
        capacity = self.room.capacity_for(found.run, fullest.peak_bytes)
        return solution, MemoryShortage(
            stage=fullest.stage,
            missing_bytes=capacity - self.room.capacity_bytes,
            least_bytes=found.least_bytes,
        )

    def solved(
        self, began: float, deadline: float | None, smallest_s: float | None
    ) -> VariantResult:
        """Return the result of the search.

        began, deadline : process CPU times in seconds
        smallest_s : seconds to improve the smallest plan without a deadline, if nothing fits; None:
            it is not searched
        """
        least, shortage = None, None
        if smallest_s is not None and not self.found and self.complete:
            until = time.process_time() + smallest_s if deadline is None else deadline
            least, shortage = self.least_memory_plan(until)
        return VariantResult(
            engine=self.engine,
            # with a gap, a plan that was found later may be faster
            solutions=tuple(sorted(self.found.values(), key=lambda one: one.sample_s)),
            smallest=least,
            shortage=shortage,
            least_s=self.least_s,
            complete=self.complete,
            effort=UniformSearchStats(
                degrees=len(self.degrees.seconds),
                opened=self.opened,
                timed=self.timed,
                counted=self.counted,
                cpu_s=time.process_time() - began,
            ),
        )


def family_of(choice: Candidate) -> tuple[object, ...]:
    """Return the key of a family: degrees without ZeRO stage, micro-batch size and settings."""
    return (choice.pp, choice.tp, choice.cp, choice.ep, choice.etp)

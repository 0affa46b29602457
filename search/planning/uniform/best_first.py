"""Exact best-first search for the fastest plans of one engine that fit, by lower bounds.

Every candidate is either priced or excluded by a lower bound of its step time or memory. Candidates
wait in one queue, ordered by bound. Coarse ones are expanded into finer ones (degrees, stages,
chunks, layouts with sharding and recomputation). The first exactly priced candidate from the queue
that fits is the fastest plan.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autopar.errors import InputError
from autopar.price.assessment import Assessment, Target
from autopar.price.step import StepTime
from autopar.records import Record, replace
from autopar.run.run import Run
from search.engines.candidate import NONE, Candidate, Constraints
from search.engines.space import EngineContext, EngineSpace
from search.planning.uniform.bounds.layer_times import DegreeTimes, arrangement_of
from search.planning.uniform.cost_model import UniformCostModel
from search.planning.uniform.expansion import DEVICE, ActivationPolicies, CandidateExpander
from search.planning.uniform.least_memory import least_memory_plan
from search.planning.uniform.memory import MemoryBudget
from search.planning.uniform.space import UniformSearchSpace


class PricedRun(Record):
    """Plan with its price."""

    choice: Candidate
    run: Run
    assessment: Assessment

    @property
    def samples_per_s(self) -> float:
        """Throughput of all GPUs together, sequences per second."""
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
    """Statistics of a search."""

    degrees: int
    """Legal combinations of degrees, micro-batch and precision."""
    choices: int = 1
    """All candidates: combinations with their stages, chunks, sharding and recomputation.

    The engine may reject some of them. Layouts with equal numbers of chunks count once."""
    opened: int
    """Degrees that were expanded into stages."""
    timed: int
    """Candidates with an exact step time."""
    counted: int
    """Candidates with an exact memory count."""
    cpu_s: float


class MemoryShortage(Record):
    """Missing memory of the smallest plan, where no plan fits."""

    stage: int
    """Index of the peak stage."""
    missing_bytes: float
    """Missing bytes: device peak above the largest one that fits, or host memory above its size."""
    least_bytes: float
    """Lower bound of the peak of any plan, bytes; the peak itself if the plan is the smallest.

    For host memory: lower bound over all plans that fit on the device."""
    host: bool = False
    """True if host memory is missing; the plan fits on the device then."""


class VariantResult(Record):
    """Best plans of an engine, fastest first; empty if nothing fits."""

    engine: EngineSpace
    solutions: tuple[PricedRun, ...]
    """Plans of different families of degrees."""
    smallest: PricedRun | None
    """Plan with the smallest peak found, if nothing fits; None if time was up before.

    If some plans fit on the device but not on the host, the one with the least host memory."""
    shortage: MemoryShortage | None = None
    """Missing memory of the smallest plan; None without one."""
    least_s: float | None = None
    """Lower bound of step seconds per sequence of any plan that fits; None if none fits."""
    complete: bool = True
    """True if no better plan is possible; False if time was up."""
    effort: UniformSearchStats

    @property
    def gap(self) -> float:
        """Upper bound of the best plan's slowdown over the fastest possible one, as a share.

        0 if the search was complete.
        """
        if not self.solutions or not self.least_s:
            return 0.0
        return self.solutions[0].sample_s / self.least_s - 1.0


_MOST_S = 5.0
"""CPU seconds for the smallest plan, where nothing fits."""
GRACE_S = 5.0
"""CPU seconds after the time limit to search any plan that fits, where none was found."""
_DEGREES, _STAGES, _CHUNKS, _LAYOUT, _SETS, _COPIES, _HOSTED, _EXACT = range(7, -1, -1)
"""Levels of queue entries, lowest first among equal bounds.

Exact entries come first, those without offload before others."""
_ROUNDING = 1.0 - 1e-9
"""Rounding factor: differences of sums must not exceed the exact ones."""


class _SearchBudget(NamedTuple):
    """Limits of a search: CPU seconds and number of memory counts; None for no limit."""

    cpu_s: float | None
    counts: int | None

    def exhausted(self, counted: int) -> bool:
        """Return True if a limit is exceeded after `counted` memory counts."""
        if self.counts is not None and counted >= self.counts:
            return True
        return self.cpu_s is not None and time.process_time() > self.cpu_s


class _QueueEntry(NamedTuple):
    """Candidate in the queue with its bounds."""

    seconds: float
    """Step seconds per sequence, or a lower bound of them."""
    level: int
    choice: Candidate
    number: int
    unit: DegreeTimes | None = None
    options: ActivationPolicies | None = None
    at: int = 0
    """Index of the current policy in `options`."""
    whole_s: float = 0.0
    """Lower bound of whole-model micro-batch seconds; set at the level of stages."""


class UniformSearch:
    """Search space of one engine and job, for any number of searches."""

    def __init__(self, engine: EngineSpace, job: EngineContext, target: Target) -> None:
        self.engine = engine
        self.job = job
        self.target = target
        self.prices = UniformCostModel(engine, job, target)
        self.space = UniformSearchSpace(self.prices)
        self.openings: dict[Constraints, CandidateExpander] = {}
        """Allowed values by constraints, without values that depend on memory."""
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
    ) -> VariantResult:
        """Return the fastest plans that fit, the best of each family of degrees.

        Raises InputError if the engine runs no plan of this job at all.

        seconds : CPU time limit, after which the best plan found is returned with its gap
        grace_s : further CPU seconds to search any plan that fits, if none was found
        counts : limit of memory counts, so that slow machines find the same plans as fast ones.
            The grace is as many counts again, and the smallest plan is not searched then.
        memory_bytes, oom_risk : values of a device in place of the target's
        """
        began = time.process_time()
        target = self.target
        if memory_bytes is not None:
            card = replace(target.machine.card, memory_bytes=memory_bytes)
            target = replace(target, machine=replace(target.machine, card=card))
        if oom_risk is not None:
            target = replace(target, oom_risk=oom_risk)
        search = _Search(self, target, fixed or Constraints(), top)
        deadline = None if seconds is None else began + seconds
        end = None if seconds is None else began + seconds + grace_s
        search.run(
            _SearchBudget(deadline, counts),
            _SearchBudget(end, None if counts is None else 2 * counts),
        )
        return search.solved(began, deadline, smallest=counts is None)


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

    seconds : CPU time limit, after which the best plan found is returned with its gap. Raises
    InputError if the engine runs no plan of this job at all.
    """
    return UniformSearch(engine, job, target).solve(fixed, top=top, seconds=seconds)


class _Search:
    """One search in a space."""

    def __init__(
        self, uniform: UniformSearch, target: Target, fixed: Constraints, top: int
    ) -> None:
        self.prices, self.space = uniform.prices, uniform.space
        self.engine, self.job = uniform.engine, uniform.job
        self.target, self.fixed, self.top = target, fixed, top
        self.room = MemoryBudget(target.capacity_bytes, target.oom_risk)
        self.queue: list[_QueueEntry] = []
        self.found: dict[object, PricedRun] = {}
        self.opened = self.timed = self.counted = 0
        self.hosted: dict[Candidate, dict[str, bool]] = {}
        """Layout with a recomputation -> offload sets pushed so far, True if too large."""
        self.copied: set[Candidate] = set()
        """Candidates whose other numbers of HSDP replicas were pushed."""
        self.too_much: tuple[float, PricedRun] | None = None
        """Plan with the least host memory among those that exceed it, with its bytes; else None."""
        self.complete = True
        self.least_s: float | None = None
        known = uniform.openings.setdefault(fixed, CandidateExpander(self.prices, fixed, self.room))
        self.openings = known.within(self.room)
        self.known = uniform.known.setdefault(fixed, {})
        self.degrees = self.space.degrees(fixed)

    # ----------------------------------------------------------------------------------------------

    def push(self, seconds: float, level: int, choice: Candidate, **known: object) -> None:
        """Push a candidate into the queue."""
        self.pushed += 1
        self.least_pushed = min(self.least_pushed, seconds)
        heapq.heappush(
            self.queue,
            _QueueEntry(seconds, level, choice, self.pushed, **known),  # type: ignore[arg-type]
        )

    pushed = 0
    least_pushed = math.inf

    def coarse(self) -> Iterator[tuple[float, Candidate]]:
        """Yield the degrees that may fit, in the order of their bounds."""
        seconds, size, way, laid, batch = self.degrees
        most = self.room.most_bytes
        at = np.flatnonzero(size <= most)
        for place in at[np.argsort(seconds[at], kind="stable")]:
            choice = self.space.choice(
                self.space.expert_degrees[way[place]],
                self.space.attention_degrees[laid[place]],
                int(batch[place]),
            )
            yield float(seconds[place]), choice

    def entries(self) -> Iterator[_QueueEntry]:
        """Yield the queue's candidates by bound, including those pushed meanwhile."""
        coarse = self.coarse()
        following = next(coarse, None)
        while self.queue or following:
            while following and (not self.queue or following[0] <= self.queue[0].seconds):
                self.push(following[0], _DEGREES, following[1])
                following = next(coarse, None)
            yield heapq.heappop(self.queue)

    def run(self, limit: _SearchBudget, end: _SearchBudget) -> None:
        """Search the best plans until they are found or a limit is exceeded.

        After `limit` any plan that fits is accepted, after `end` the search stops.
        """
        late = False
        for entry in self.entries():
            if not late and limit.exhausted(self.counted):
                late, self.complete = True, False
                if not self.found:
                    self.least_s = entry.seconds
            if late and end.exhausted(self.counted):
                break
            if entry.level < _DEGREES and _family(entry.choice) in self.found:
                continue
            if late:
                self.find_any_feasible(entry, end)
            else:
                self.open(entry)
            if len(self.found) >= self.top or (late and self.found):
                break

    def find_any_feasible(self, entry: _QueueEntry, end: _SearchBudget) -> None:
        """Search any plan of an entry that fits, the finest candidates first."""
        others, self.queue = self.queue, [entry]
        while self.queue and not self.found and not end.exhausted(self.counted):
            at = min(
                range(len(self.queue)),
                key=lambda at: (self.queue[at].level, self.queue[at].seconds),
            )
            one = self.queue.pop(at)
            if one.level == _LAYOUT:
                # the slowest recomputation needs the least memory
                assert one.options is not None, "a layout has options"
                # once it is expanded, the rest of the layout follows it
                one = one._replace(at=max(one.at, one.options.last_without_offload))
            self.open(one)
        self.queue = [*others, *self.queue]
        heapq.heapify(self.queue)

    def open(self, entry: _QueueEntry) -> None:
        """Expand an entry, or accept it if it is a plan."""
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
        """Expansion by level; it depends on the entry and the memory budget only."""
        return {
            _DEGREES: self.open_degrees,
            _STAGES: self.open_stages,
            _CHUNKS: self.open_chunks,
        }

    def open_finer(self, entry: _QueueEntry) -> None:
        """Expand an entry, or push it again with a higher bound of an earlier search.

        Less memory excludes more, so a bound found with more memory stays a bound.
        """
        within, least = self.bound(entry.level, entry.choice)
        if within and least > entry.seconds:
            if least < math.inf:
                self.pushed += 1
                heapq.heappush(self.queue, entry._replace(seconds=least, number=self.pushed))
            return
        self.least_pushed = math.inf
        self.expanders[entry.level](entry)
        if not within:
            self.known[entry.level, entry.choice] = self.room, max(entry.seconds, self.least_pushed)

    def bound(self, level: int, choice: Candidate) -> tuple[bool, float]:
        """Return (reusable, lower bound in s) from an earlier search with at least this budget."""
        room, least = self.known.get((level, choice), (None, 0.0))
        return room is not None and self.room.fits_in(room), least

    def open_degrees(self, entry: _QueueEntry) -> None:
        """Push the numbers of stages of some degrees that may fit."""
        self.opened += 1
        for degrees in self.openings.overlaps(entry.choice):
            try:
                unit = self.prices.unit(degrees)
            except InputError:
                continue
            for pp, seconds, whole in zip(*self.openings.stages_s(unit, degrees), strict=True):
                if whole < np.inf:
                    choice = replace(degrees, pp=pp)
                    least = float(seconds) / choice.global_batch
                    self.push(least, _STAGES, choice, unit=unit, whole_s=float(whole))

    def open_stages(self, entry: _QueueEntry) -> None:
        """Push the allowed schedules and numbers of chunks."""
        unit = entry.unit
        assert unit is not None, "stages have a unit"
        for choice in self.openings.laid(unit, entry.choice):
            sends = self.prices.transfer_s(unit, choice)
            pipeline = (choice.schedule, choice.vpp)
            seconds = self.prices.balanced_stage_bound_s(choice, (pipeline,), entry.whole_s, sends)
            self.push(seconds / choice.global_batch, _CHUNKS, choice, unit=unit)

    def open_chunks(self, entry: _QueueEntry) -> None:
        """Push the layouts of a number of chunks, with the recomputations that may fit."""
        unit = entry.unit
        assert unit is not None, "chunks have a unit"
        for choice in self.openings.layouts(unit, entry.choice):
            options = self.openings.fastest(unit, choice)
            if len(options.places):
                self.push(float(options.values[0]), _LAYOUT, choice, unit=unit, options=options)

    # ----------------------------------------------------------------------------------------------
    # Plans

    def open_layout(self, entry: _QueueEntry) -> None:
        """Price the fastest remaining policy of a layout, or expand its offload sets."""
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
        """Push the policies of a layout after the current one, whose step time is given.

        Policies that recompute as much and more are not faster in schedules timed by whole stages.
        Other schedules are timed by forwards and backwards, which share host overhead.
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
        self.push(
            float(options.values[at]),
            _LAYOUT,
            entry.choice,
            unit=entry.unit,
            options=options,
            at=at,
        )

    def push_copies(self, choice: Candidate, step: StepTime, entry: _QueueEntry) -> None:
        """Push the larger numbers of HSDP replicas with their lower bound."""
        fewest, *others = self.openings.copies(choice)
        if choice.dp_replicate != fewest or not others or choice in self.copied:
            return
        self.copied.add(choice)
        least = max(entry.seconds, self.copied_s(choice, step))
        self.push(least, _COPIES, choice, unit=entry.unit)

    def copied_s(self, choice: Candidate, step: StepTime) -> float:
        """Return a lower bound of seconds per sequence for any replicas, from the fewest's step.

        0 with ZeRO-3: more replicas also gather weights faster.
        """
        if choice.zero == 3:
            return 0.0
        # more replicas can at most remove the whole exposed reduction
        gone = self.prices.stragglers * step.terms_s["gradients"]
        return (step.total_s - gone) * _ROUNDING / choice.global_batch

    def open_sets(self, choice: Candidate, unit: DegreeTimes | None, seconds: float = 0.0) -> None:
        """Push the smallest offload sets that may fit where a candidate does not.

        seconds : lower bound of the candidate; a higher one of an earlier search is pushed first.
        """
        assert unit is not None, "a layout has a unit"
        key = replace(choice, offload=NONE)
        first = key not in self.hosted
        within, least = self.bound(_SETS, key)
        if first and within and least > seconds:
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
        """Push offload sets with the price without offload, which is their lower bound."""
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
        """Push a plan with its step time and return it; None if it has none."""
        timing = self.prices.timed(choice)
        if timing is None or timing.step is None:
            return None
        self.timed += 1
        level = _EXACT if choice.offload == NONE else _HOSTED
        self.push(timing.step.total_s / choice.global_batch, level, choice, unit=unit)
        return timing.step

    def open_copies(self, entry: _QueueEntry) -> None:
        """Price a plan with more HSDP replicas, as far as these may fit."""
        assert entry.unit is not None, "a launch has a unit"
        for number in self.openings.copies(entry.choice)[1:]:
            choice = replace(entry.choice, dp_replicate=number)
            if self.openings.device and self.openings.fits(entry.unit, choice):
                self.price(choice, entry.unit)
            elif self.openings.can_offload(choice.recompute):
                self.open_sets(choice, entry.unit)

    def accept(self, entry: _QueueEntry) -> None:
        """Accept a plan with a step time, if it fits."""
        choice = entry.choice
        run = self.prices.run(choice)
        self.counted += 1
        assert entry.unit is not None, "a launch has a unit"
        # of equal stages the first has the most live micro-batches, so its peak is the largest
        stages = arrangement_of(entry.unit, choice).at
        for stage in stages:
            peak = self.prices.account(choice, stage, run).peak_bytes
            if self.target.oom_probability(run, peak) > self.target.oom_risk:
                if self.openings.can_offload(choice.recompute):
                    # less offload is no slower, so sets with more are pushed only now
                    self.open_sets(choice, entry.unit)
                return
        solution = self.solution(choice, run, stages)
        host = solution.assessment.host_bytes
        if not self.target.host_fits(host):
            # sets that were not pushed contain this one, so they take more host memory
            if self.too_much is None or host < self.too_much[0]:
                self.too_much = host, solution
            return
        if not self.found and self.least_s is None:
            self.least_s = entry.seconds
        self.found[_family(choice)] = solution

    def solution(self, choice: Candidate, run: Run, stages: Sequence[int]) -> PricedRun:
        """Return a candidate with its price."""
        assessment = self.prices.price_run(choice, run, self.target, stages)
        return PricedRun(choice=choice, run=run, assessment=assessment)

    def least_memory_plan(
        self, deadline: float | None
    ) -> tuple[PricedRun | None, MemoryShortage | None]:
        """Return the plan that needs the least memory, and its missing memory."""
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
        until = time.process_time() + _MOST_S if deadline is None else deadline
        found = least_memory_plan(self.space, self.degrees, self.openings, until)
        if found is None:
            return None, None
        solution = self.solution(found.choice, found.run, found.stages)
        fullest = solution.assessment.fullest
        return solution, MemoryShortage(
            stage=fullest.stage,
            missing_bytes=fullest.peak_bytes - self.room.bytes_for(found.run),
            least_bytes=found.least_bytes,
        )

    def solved(self, began: float, deadline: float | None, *, smallest: bool) -> VariantResult:
        """Return the result of the search, with the smallest plan if nothing fits."""
        least, shortage = None, None
        if smallest and not self.found and self.complete:
            least, shortage = self.least_memory_plan(deadline)
        return VariantResult(
            engine=self.engine,
            solutions=tuple(self.found.values()),
            smallest=least,
            shortage=shortage,
            least_s=self.least_s,
            complete=self.complete,
            effort=UniformSearchStats(
                degrees=len(self.degrees.seconds),
                choices=self.openings.number(self.space, self.degrees),
                opened=self.opened,
                timed=self.timed,
                counted=self.counted,
                cpu_s=time.process_time() - began,
            ),
        )


def _family(choice: Candidate) -> tuple[object, ...]:
    """Return the degrees in which alternatives differ; sharding and settings do not count."""
    return (choice.pp, choice.tp, choice.cp, choice.ep, choice.etp)

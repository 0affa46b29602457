"""The fastest launches of one engine that fit: best first by lower bounds, exactly.

Every choice of the space is either priced or excluded by a bound that its step time, or its memory,
cannot be below. Open choices wait in one queue by their bound; coarse ones are opened into finer
ones (degrees, stages, chunks of them, layouts with sharding and recomputation), and the first exact
price that comes out of the queue and fits is that of the fastest launch of all.
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
from search.engines.choice import NONE, Choice, Fixed
from search.engines.space import EngineSpace, Job
from search.planning.uniform.bounds.units import Unit, arrangement_of
from search.planning.uniform.memory import Room
from search.planning.uniform.openings import DEVICE, Openings, Options
from search.planning.uniform.prices import Prices
from search.planning.uniform.smallest import smallest_launch
from search.planning.uniform.space import Space


class Solution(Record):
    """A launch, and its price."""

    choice: Choice
    run: Run
    assessment: Assessment

    @property
    def samples_per_s(self) -> float:
        """Sequences of all GPUs together."""
        return self.choice.global_batch / self._step_s

    @property
    def sample_s(self) -> float:
        """Seconds of a step for each of its sequences."""
        return self._step_s / self.choice.global_batch

    @property
    def _step_s(self) -> float:
        step = self.assessment.step
        assert step is not None, "a solution has a step time"
        return step.total_s


class Effort(Record):
    """What a search has looked at."""

    degrees: int
    """Combinations of degrees, micro-batch and precision that are legal."""
    choices: int = 1
    """All choices: these with their stages, chunks, sharding and recomputation, of which some may
    be refused by the engine; the layouts of as many chunks count once."""
    opened: int
    """Degrees whose stages were looked at."""
    timed: int
    """Choices whose step was priced."""
    counted: int
    """Choices whose memory was counted."""
    cpu_s: float


class Shortage(Record):
    """What a launch lacks where none fits."""

    stage: int
    """The fullest."""
    missing_bytes: float
    """Of its peak, what is above the highest one that leaves enough free; of the host's memory,
    what is above all of it."""
    least_bytes: float
    """No choice has a fullest stage below it; the peak itself where the launch is the smallest.

    Of the host: no choice that fits on the device takes less there.
    """
    host: bool = False
    """It is the host that lacks memory: what is there leaves enough of the device free."""


class Solved(Record):
    """The best launches of an engine, fastest first; none where nothing fits."""

    engine: EngineSpace
    solutions: tuple[Solution, ...]
    """No two of one family of degrees."""
    smallest: Solution | None
    """Where nothing fits, the launch with the smallest peak that was found, or, where the device
    has room for some, that of these with the least on the host; None where time was up before that
    was known."""
    shortage: Shortage | None = None
    """What the smallest one lacks."""
    least_s: float | None = None
    """Seconds for each sequence of a step that no launch that fits is below; None: none fits."""
    complete: bool = True
    """Nothing was left to look at, or nothing that could be better; False: time was up."""
    effort: Effort

    @property
    def gap(self) -> float:
        """By how much the best launch may be slower than the fastest there is, as a share of it.

        0 where the search was complete.
        """
        if not self.solutions or not self.least_s:
            return 0.0
        return self.solutions[0].sample_s / self.least_s - 1.0


_MOST_S = 5.0
"""Of CPU that are spent on the smallest launch where nothing fits."""
GRACE_S = 5.0
"""Of CPU behind a limit in which any launch that fits is looked for where none was found."""
_DEGREES, _STAGES, _CHUNKS, _LAYOUT, _SETS, _COPIES, _HOSTED, _EXACT = range(7, -1, -1)
"""Levels of entries: of equally long ones exact ones come first, with nothing on the host before
others."""
_ROUNDING = 1.0 - 1e-9
"""So that differences of sums are no larger than the exact ones."""


class _Limit(NamedTuple):
    """Of a search: its CPU, and the launches whose memory is counted."""

    cpu_s: float | None
    counts: int | None

    def over(self, counted: int) -> bool:
        """Return whether it is passed after so many launches."""
        if self.counts is not None and counted >= self.counts:
            return True
        return self.cpu_s is not None and time.process_time() > self.cpu_s


class _Entry(NamedTuple):
    """A choice in the queue, and what is known of it."""

    seconds: float
    """For each sequence: the step's, or what it is not below."""
    level: int
    choice: Choice
    number: int
    unit: Unit | None = None
    options: Options | None = None
    at: int = 0
    """Of the options."""
    whole_s: float = 0.0
    """Of stages: seconds of a micro-batch of the whole model at least."""


class Uniform:
    """The launches of one engine for one job, which can be asked for more than once."""

    def __init__(self, engine: EngineSpace, job: Job, target: Target) -> None:
        self.engine = engine
        self.job = job
        self.target = target
        self.prices = Prices(engine, job, target)
        self.space = Space(self.prices)
        self.openings: dict[Fixed, Openings] = {}
        """What is left open by what is fixed, without what depends on the memory."""
        self.known: dict[Fixed, dict[tuple[int, Choice], tuple[Room, float]]] = {}
        """By level and choice, what nothing finer was below in how much memory."""

    def solve(
        self,
        fixed: Fixed | None = None,
        *,
        top: int = 1,
        seconds: float | None = None,
        grace_s: float = GRACE_S,
        counts: int | None = None,
        memory_bytes: float | None = None,
        oom_risk: float | None = None,
    ) -> Solved:
        """Return the fastest launches that fit, the best of each family of degrees.

        seconds : of CPU after which the best that was found is returned, with its gap; where there
        is none yet, any launch that fits is looked for during `grace_s` more. counts : the same
        in launches whose memory is counted, as many again being the grace, so that slow machines
        find what fast ones do; the smallest launch is not looked for then. memory_bytes and
        oom_risk : of a device, instead of the target's. Raises InputError where the engine runs no
        launch of this job at all.
        """
        began = time.process_time()
        target = self.target
        if memory_bytes is not None:
            card = replace(target.machine.card, memory_bytes=memory_bytes)
            target = replace(target, machine=replace(target.machine, card=card))
        if oom_risk is not None:
            target = replace(target, oom_risk=oom_risk)
        search = _Search(self, target, fixed or Fixed(), top)
        deadline = None if seconds is None else began + seconds
        end = None if seconds is None else began + seconds + grace_s
        search.run(_Limit(deadline, counts), _Limit(end, None if counts is None else 2 * counts))
        return search.solved(began, deadline, smallest=counts is None)


def solve(
    engine: EngineSpace,
    job: Job,
    target: Target,
    fixed: Fixed | None = None,
    *,
    top: int = 1,
    seconds: float | None = None,
) -> Solved:
    """Return the fastest launches of an engine that fit, the best of each family of degrees.

    seconds : of CPU after which the best that was found is returned, with its gap. Raises
    InputError where the engine runs no launch of this job at all.
    """
    return Uniform(engine, job, target).solve(fixed, top=top, seconds=seconds)


class _Search:
    """One question to a space."""

    def __init__(self, uniform: Uniform, target: Target, fixed: Fixed, top: int) -> None:
        self.prices, self.space = uniform.prices, uniform.space
        self.engine, self.job = uniform.engine, uniform.job
        self.target, self.fixed, self.top = target, fixed, top
        self.room = Room(target.capacity_bytes, target.oom_risk)
        self.queue: list[_Entry] = []
        self.found: dict[object, Solution] = {}
        self.opened = self.timed = self.counted = 0
        self.hosted: dict[Choice, dict[str, bool]] = {}
        """Layout with a recomputation -> the sets of modules on the host that were in the queue,
        and whether they turned out to be too large."""
        self.copied: set[Choice] = set()
        """Choices whose other numbers of copies were in the queue."""
        self.too_much: tuple[float, Solution] | None = None
        """Of the launches that the host has no room for, the one with the least on it."""
        self.complete = True
        self.least_s: float | None = None
        known = uniform.openings.setdefault(fixed, Openings(self.prices, fixed, self.room))
        self.openings = known.within(self.room)
        self.known = uniform.known.setdefault(fixed, {})
        self.degrees = self.space.degrees(fixed)

    # ----------------------------------------------------------------------------------------------

    def push(self, seconds: float, level: int, choice: Choice, **known: object) -> None:
        """Put a choice into the queue."""
        self.pushed += 1
        self.least_pushed = min(self.least_pushed, seconds)
        heapq.heappush(
            self.queue,
            _Entry(seconds, level, choice, self.pushed, **known),  # type: ignore[arg-type]
        )

    pushed = 0
    least_pushed = math.inf

    def coarse(self) -> Iterator[tuple[float, Choice]]:
        """Yield the degrees that may fit by their bounds."""
        seconds, size, way, laid, batch = self.degrees
        most = self.room.most_bytes
        at = np.flatnonzero(size <= most)
        for place in at[np.argsort(seconds[at], kind="stable")]:
            choice = self.space.choice(
                self.space.ways[way[place]], self.space.laid[laid[place]], int(batch[place])
            )
            yield float(seconds[place]), choice

    def entries(self) -> Iterator[_Entry]:
        """Yield the choices of the queue by their bounds; what is opened meanwhile is in it."""
        coarse = self.coarse()
        following = next(coarse, None)
        while self.queue or following:
            while following and (not self.queue or following[0] <= self.queue[0].seconds):
                self.push(following[0], _DEGREES, following[1])
                following = next(coarse, None)
            yield heapq.heappop(self.queue)

    def run(self, limit: _Limit, end: _Limit) -> None:
        """Look for the best launches until they are found, or time is up.

        Past the limit any launch that fits will do, past the end none is looked for any more.
        """
        late = False
        for entry in self.entries():
            if not late and limit.over(self.counted):
                late, self.complete = True, False
                if not self.found:
                    self.least_s = entry.seconds
            if late and end.over(self.counted):
                break
            if entry.level < _DEGREES and _family(entry.choice) in self.found:
                continue
            if late:
                self.dive(entry, end)
            else:
                self.open(entry)
            if len(self.found) >= self.top or (late and self.found):
                break

    def dive(self, entry: _Entry, end: _Limit) -> None:
        """Look for any launch of an entry that fits, the finest choices first."""
        others, self.queue = self.queue, [entry]
        while self.queue and not self.found and not end.over(self.counted):
            at = min(
                range(len(self.queue)),
                key=lambda at: (self.queue[at].level, self.queue[at].seconds),
            )
            one = self.queue.pop(at)
            if one.level == _LAYOUT:
                # the slowest recomputation leaves the most room
                assert one.options is not None, "a layout has options"
                # once that is opened, what is left of the layout comes behind it
                one = one._replace(at=max(one.at, one.options.slowest))
            self.open(one)
        self.queue = [*others, *self.queue]
        heapq.heapify(self.queue)

    def open(self, entry: _Entry) -> None:
        """Push what is finer than an entry, or take it where it is a launch."""
        if entry.level in self.finer:
            self.open_finer(entry)
        elif entry.level == _LAYOUT:
            self.open_layout(entry)
        elif entry.level == _SETS:
            self.hold_sets(entry)
        elif entry.level == _COPIES:
            self.open_copies(entry)
        else:
            self.take(entry)

    # ----------------------------------------------------------------------------------------------
    # Degrees, stages, chunks

    @cached_property
    def finer(self) -> dict[int, Callable[[_Entry], None]]:
        """By level, what pushes that which is finer; it depends on the entry and the room alone."""
        return {
            _DEGREES: self.open_degrees,
            _STAGES: self.open_stages,
            _CHUNKS: self.open_chunks,
        }

    def open_finer(self, entry: _Entry) -> None:
        """Push what is finer than an entry, or the entry again by what that was not below before.

        With less memory less fits, so that what was the least of an earlier question is a bound.
        """
        within, least = self.bound(entry.level, entry.choice)
        if within and least > entry.seconds:
            if least < math.inf:
                self.pushed += 1
                heapq.heappush(self.queue, entry._replace(seconds=least, number=self.pushed))
            return
        self.least_pushed = math.inf
        self.finer[entry.level](entry)
        if not within:
            self.known[entry.level, entry.choice] = self.room, max(entry.seconds, self.least_pushed)

    def bound(self, level: int, choice: Choice) -> tuple[bool, float]:
        """Return whether an earlier question had as much room, and what nothing finer was below."""
        room, least = self.known.get((level, choice), (None, 0.0))
        return room is not None and self.room.within(room), least

    def open_degrees(self, entry: _Entry) -> None:
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

    def open_stages(self, entry: _Entry) -> None:
        """Push the schedules and numbers of chunks."""
        unit = entry.unit
        assert unit is not None, "stages have a unit"
        for choice in self.openings.laid(unit, entry.choice):
            sends = self.prices.transfer_s(unit, choice)
            pipeline = (choice.schedule, choice.vpp)
            seconds = self.prices.spread_s(choice, (pipeline,), entry.whole_s, sends)
            self.push(seconds / choice.global_batch, _CHUNKS, choice, unit=unit)

    def open_chunks(self, entry: _Entry) -> None:
        """Push the layouts of so many chunks with their recomputations that may fit."""
        unit = entry.unit
        assert unit is not None, "chunks have a unit"
        for choice in self.openings.layouts(unit, entry.choice):
            options = self.openings.fastest(unit, choice)
            if len(options.places):
                self.push(float(options.values[0]), _LAYOUT, choice, unit=unit, options=options)

    # ----------------------------------------------------------------------------------------------
    # Launches

    def open_layout(self, entry: _Entry) -> None:
        """Price the fastest saving of a layout that is left, or open its sets of modules."""
        assert entry.options is not None, "a layout has options"
        options = entry.options
        recompute, offload = self.openings.saving(options, entry.at)
        if offload is None:
            self.push_behind(entry, options)
            choice = replace(entry.choice, recompute=recompute)
            self.open_sets(choice, entry.unit)
            return
        choice = replace(entry.choice, recompute=recompute, offload=offload)
        step = self.price(choice, entry.unit)
        self.push_behind(entry, options, step)
        if step is not None and offload == NONE:
            self.push_copies(choice, step, entry)

    def push_behind(self, entry: _Entry, options: Options, step: StepTime | None = None) -> None:
        """Push the savings of a layout behind the one that was looked at, whose step is given.

        What computes as much again, and more, takes no less under schedules that are timed by whole
        stages; others by forwards and backwards, of which hosts give either a share.
        """
        at = entry.at + 1
        if at >= len(options.places):
            return
        whole = entry.choice.pp == 1 or entry.choice.schedule in ("1f1b", "interleaved")
        if step is not None and whole and options.sets[entry.at] == DEVICE:
            least = step.total_s * _ROUNDING / entry.choice.global_batch
            if len(self.openings.copies(entry.choice)) > 1:
                # the savings behind may be faster in more copies
                least = self.copied_s(entry.choice, step)
            which = self.openings.no_faster(options, entry.at)
            options, at = options.behind(entry.at, which, least), 0
        self.push(
            float(options.values[at]),
            _LAYOUT,
            entry.choice,
            unit=entry.unit,
            options=options,
            at=at,
        )

    def push_copies(self, choice: Choice, step: StepTime, entry: _Entry) -> None:
        """Push more copies of what is sharded than the fewest, by what they take at least."""
        fewest, *others = self.openings.copies(choice)
        if choice.dp_replicate != fewest or not others or choice in self.copied:
            return
        self.copied.add(choice)
        least = max(entry.seconds, self.copied_s(choice, step))
        self.push(least, _COPIES, choice, unit=entry.unit)

    def copied_s(self, choice: Choice, step: StepTime) -> float:
        """Return what any copies take at least for each sequence, by the step of the fewest.

        Of ZeRO-3 a step says nothing: more copies gather weights faster as well.
        """
        if choice.zero == 3:
            return 0.0
        # more copies can take no more than all of what is seen of the reduction
        gone = self.prices.stragglers * step.terms_s["gradients"]
        return (step.total_s - gone) * _ROUNDING / choice.global_batch

    def open_sets(self, choice: Choice, unit: Unit | None, seconds: float = 0.0) -> None:
        """Push the least sets of modules on the host that may fit where a choice does not.

        seconds : what the choice is not below; where an earlier question knows more, that comes
        first.
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

    def hold_sets(self, entry: _Entry) -> None:
        """Hold sets of modules on the host against the price without, which none is below."""
        choice, options = entry.choice, entry.options
        if options is None:  # of an earlier question
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

    def price(self, choice: Choice, unit: Unit | None) -> StepTime | None:
        """Push a launch with its step time, and return it; None where it has none."""
        timing = self.prices.timed(choice)
        if timing is None or timing.step is None:
            return None
        self.timed += 1
        level = _EXACT if choice.offload == NONE else _HOSTED
        self.push(timing.step.total_s / choice.global_batch, level, choice, unit=unit)
        return timing.step

    def open_copies(self, entry: _Entry) -> None:
        """Price a launch with more copies of what is sharded, as far as they may fit."""
        assert entry.unit is not None, "a launch has a unit"
        for number in self.openings.copies(entry.choice)[1:]:
            choice = replace(entry.choice, dp_replicate=number)
            if self.openings.device and self.openings.fits(entry.unit, choice):
                self.price(choice, entry.unit)
            elif self.openings.may_host(choice.recompute):
                self.open_sets(choice, entry.unit)

    def take(self, entry: _Entry) -> None:
        """Take a launch whose step is priced, where it fits."""
        choice = entry.choice
        run = self.prices.run(choice)
        self.counted += 1
        assert entry.unit is not None, "a launch has a unit"
        # of stages that are alike the first has the most micro-batches live, so it is the fullest
        stages = arrangement_of(entry.unit, choice).at
        for stage in stages:
            peak = self.prices.account(choice, stage, run).peak_bytes
            if self.target.odds(run, peak) > self.target.oom_risk:
                if self.openings.may_host(choice.recompute):
                    # less on the host is no slower, so that only now more is worth a look
                    self.open_sets(choice, entry.unit)
                return
        solution = self.solution(choice, run, stages)
        host = solution.assessment.host_bytes
        if not self.target.host_fits(host):
            # sets of modules that were not looked at hold this one, so that they take more
            if self.too_much is None or host < self.too_much[0]:
                self.too_much = host, solution
            return
        if not self.found and self.least_s is None:
            self.least_s = entry.seconds
        self.found[_family(choice)] = solution

    def solution(self, choice: Choice, run: Run, stages: Sequence[int]) -> Solution:
        """Return a choice with its price."""
        assessment = self.prices.assessed(choice, run, self.target, stages)
        return Solution(choice=choice, run=run, assessment=assessment)

    def nearest(self, deadline: float | None) -> tuple[Solution | None, Shortage | None]:
        """Return the launch that needs the least memory, and what it lacks."""
        if self.too_much is not None:
            host, solution = self.too_much
            of_stages = solution.assessment.host_bytes_at
            room = self.target.host_room_bytes
            assert room is not None, "a host without a size lacks nothing"
            return solution, Shortage(
                stage=max(of_stages, key=lambda stage: of_stages[stage]),
                missing_bytes=host - room,
                least_bytes=host,
                host=True,
            )
        until = time.process_time() + _MOST_S if deadline is None else deadline
        found = smallest_launch(self.space, self.degrees, self.openings, until)
        if found is None:
            return None, None
        solution = self.solution(found.choice, found.run, found.stages)
        fullest = solution.assessment.fullest
        return solution, Shortage(
            stage=fullest.stage,
            missing_bytes=fullest.peak_bytes - self.room.bytes_for(found.run),
            least_bytes=found.least_bytes,
        )

    def solved(self, began: float, deadline: float | None, *, smallest: bool) -> Solved:
        """Return what was found, and the smallest launch where that is none."""
        least, shortage = None, None
        if smallest and not self.found and self.complete:
            least, shortage = self.nearest(deadline)
        return Solved(
            engine=self.engine,
            solutions=tuple(self.found.values()),
            smallest=least,
            shortage=shortage,
            least_s=self.least_s,
            complete=self.complete,
            effort=Effort(
                degrees=len(self.degrees.seconds),
                choices=self.openings.number(self.space, self.degrees),
                opened=self.opened,
                timed=self.timed,
                counted=self.counted,
                cpu_s=time.process_time() - began,
            ),
        )


def _family(choice: Choice) -> tuple[object, ...]:
    """Return what alternatives differ in: degrees, not who shards what or other settings."""
    return (choice.pp, choice.tp, choice.cp, choice.ep, choice.etp)

"""The fastest launches of one engine that fit: best first by lower bounds, exactly.

Every choice of the space is either priced or excluded by a bound that its step time, or its memory,
cannot be below. Open choices wait in one queue by their bound, coarse ones (degrees alone) are
opened into finer ones (stages, layouts, sharding, recomputation), and the first exact price that
comes out of the queue and fits is that of the fastest launch of all.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from autopar.errors import InputError
from autopar.memory.launch import Launch
from autopar.records import dataclass
from search.check.assessment import Assessment, Target, Timing
from search.space import divisors
from search.uniform.choice import NONE, Choice, Fixed, kept
from search.uniform.engines import EngineSpace, Job
from search.uniform.layout import layouts
from search.uniform.prices import Prices, Unit

__all__ = ["Effort", "Solution", "Solved", "choices", "solve"]

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A launch that fits, and its price."""

    choice: Choice
    launch: Launch
    assessment: Assessment

    @property
    def samples_per_s(self) -> float:
        """Sequences of all GPUs together."""
        step = self.assessment.step
        assert step is not None, "a solution has a step time"
        return self.choice.global_batch / step.total_s


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What a search has looked at."""

    degrees: int
    """Combinations of degrees, micro-batch and precision that are legal."""
    opened: int
    timed: int
    """Choices whose step was priced."""
    counted: int
    """Choices whose memory was counted to the end."""
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Solved:
    """The best launches of an engine, fastest first; none where nothing fits."""

    engine: EngineSpace
    solutions: tuple[Solution, ...]
    """No two of one family of degrees."""
    smallest: Solution | None
    """Where nothing fits, the launch with the smallest peak."""
    effort: Effort


class _Entry(NamedTuple):
    """A choice in the queue, and what is known of it."""

    seconds: float
    """Per sequence: the step, or what it is not below."""
    level: int
    """What the seconds are: 0 of the step itself, 1 of a choice, 2 of its layout with this and
    every later recomputation, 3 of its degrees. Exact ones come first of equal ones."""
    choice: Choice
    number: int
    unit: Unit | None = None
    at: int = 0
    """Of the recomputations of a layout, in the order of their times."""
    options: tuple[str, ...] = ()
    timing: Timing | None = None
    launch: Launch | None = None


def choices(engine: EngineSpace, job: Job, fixed: Fixed) -> Iterator[Choice]:
    """Yield the legal combinations of degrees, micro-batch and precision, stages still open."""
    model = job.model
    heads = model.attention.heads
    world = job.world
    tensor = kept((t for t in divisors(world) if heads % t == 0), fixed.tp)
    context = kept((c for c in divisors(world) if job.seq % (2 * c) == 0), fixed.cp)
    if not engine.context:
        context = kept((1,), context)
    experts: tuple[int, ...] = (1,)
    if model.experts is not None:
        number = model.experts.number
        found = (e for e in divisors(world) if number % e == 0) if engine.experts else (1,)
        experts = kept(found, fixed.ep)
    precisions = kept(engine.precisions(job.gpu), fixed.precision)
    for tp, cp, ep in product(tensor, context, experts):
        if world % (tp * cp):
            continue
        splits: tuple[int, ...] = (1,)
        if model.experts is not None:
            splits = kept(engine.expert_tensor(tp), fixed.etp)
        dispatchers = kept(engine.dispatchers, fixed.dispatcher) if ep > 1 else ("alltoall",)
        overlaps = [False]
        if ep > 1 and engine.overlaps_experts and fixed.overlap_experts is not False:
            overlaps = [True] if fixed.overlap_experts else [False, True]
        for etp, batch, size, precision, dispatcher, overlap in product(
            splits,
            job.global_batches,
            kept(_MICRO_BATCHES, fixed.micro_batch),
            precisions,
            dispatchers,
            overlaps,
        ):
            yield Choice(
                tp=tp,
                cp=cp,
                ep=ep,
                etp=etp,
                micro_batch=size,
                precision=precision,
                dispatcher=dispatcher,
                overlap_experts=overlap,
                global_batch=batch,
            )


def _stages(engine: EngineSpace, job: Job, choice: Choice, fixed: Fixed) -> list[int]:
    """Return the numbers of stages of which a rank has whole samples and whole experts."""
    inner = choice.tp * choice.cp
    found = []
    most = job.model.num_layers if engine.pipelines else 1
    for pp in kept(divisors(job.world // inner), fixed.pp):
        dp = job.world // (inner * pp)
        if pp > most or (fixed.dp is not None and dp not in fixed.dp):
            continue
        if choice.global_batch % (choice.micro_batch * dp):
            continue
        if (inner * dp) % (choice.ep * choice.etp):
            continue
        number = choice.global_batch // (choice.micro_batch * dp)
        if pp > 1 and number < pp:
            continue
        found.append(pp)
    return found


class _Search:
    def __init__(self, prices: Prices, fixed: Fixed, top: int) -> None:
        self.prices = prices
        self.engine, self.job = prices.engine, prices.job
        self.fixed = fixed
        self.top = top
        self.queue: list[_Entry] = []
        self.number = 0
        self.opened = self.timed = self.counted = 0
        self.recompute = kept(self.engine.recompute(self.job.model), fixed.recompute)

    def push(self, entry: _Entry) -> None:
        self.number += 1
        heapq.heappush(self.queue, entry._replace(number=self.number))

    def run(self) -> tuple[tuple[Solution, ...], int]:
        legal = 0
        for choice in choices(self.engine, self.job, self.fixed):
            if not _stages(self.engine, self.job, choice, self.fixed):
                continue
            with suppress(InputError):
                unit = self.prices.unit(choice)
                legal += 1
                least = self.prices.least_s(unit, choice) / choice.global_batch
                self.push(_Entry(least, 3, choice, 0, unit))
        found: dict[tuple[object, ...], Solution] = {}
        while self.queue and len(found) < self.top:
            entry = heapq.heappop(self.queue)
            if _family(entry.choice) in found and entry.level < 3:
                continue
            if entry.level == 3:
                self.open(entry)
            elif entry.level == 2:
                self.recompute_next(entry)
            elif entry.level == 1:
                self.time(entry)
            else:
                solution = self.priced(entry)
                if solution is not None:
                    found[_family(entry.choice)] = solution
        return tuple(found.values()), legal

    def spread(self, unit: Unit, choice: Choice, recompute: str) -> float:
        return self.prices.spread_s(unit, choice, recompute) / choice.global_batch

    def open(self, entry: _Entry) -> None:
        """Push the layouts of some degrees."""
        unit = entry.unit
        assert unit is not None, "degrees have their times"
        self.opened += 1
        words = self.prices.recomputations(unit, self.recompute)
        for choice in self.layouts(unit, entry.choice):
            blocks = self.blocks(choice)
            for options in filter(None, (words, blocks)):
                # the least that any of a chain takes is what its first one does
                seconds = self.spread(unit, choice, NONE if options == blocks else options[0])
                self.push(_Entry(seconds, 2, choice, 0, unit, 0, options))

    def blocks(self, choice: Choice) -> tuple[str, ...]:
        """Return the words for some layers of each chunk, from one on: ever more time."""
        if not self.engine.blocks:
            return ()
        longest = max(len(chunk[1]) for stage in choice.chunks for chunk in stage)
        words = tuple(f"block {number}" for number in range(1, longest))
        return kept(words, self.fixed.recompute)

    def recompute_next(self, entry: _Entry) -> None:
        """Push a layout with one recomputation, and with all later ones."""
        unit, options = entry.unit, entry.options
        assert unit is not None, "degrees have their times"
        for at in range(entry.at, len(options)):
            if self.prices.may_fit(unit, entry.choice, options[at]):
                choice = replace(entry.choice, recompute=options[at])
                seconds = self.prices.stages_s(unit, choice) / choice.global_batch
                self.push(_Entry(seconds, 1, choice, 0, unit))
                if at + 1 < len(options):
                    # of a layout more layers take more; other words do so of a whole model
                    blocks = options[at].startswith("block")
                    after = seconds if blocks else self.spread(unit, choice, options[at + 1])
                    self.push(entry._replace(seconds=after, at=at + 1))
                return

    def time(self, entry: _Entry) -> None:
        """Price the step of a choice."""
        with suppress(InputError):
            launch = self.prices.launch(entry.choice)
            timing = self.prices.timing(launch)
            assert timing.step is not None, "a job that is timed has a step"
            self.timed += 1
            seconds = timing.step.total_s / entry.choice.global_batch
            self.push(_Entry(seconds, 0, entry.choice, 0, timing=timing, launch=launch))

    def layouts(self, unit: Unit, choice: Choice) -> Iterator[Choice]:
        """Yield choices with stages, chunks, layers on them and sharding."""
        job, engine = self.job, self.engine
        seconds = unit.layer_s
        for pp in _stages(engine, job, choice, self.fixed):
            dp = job.world // (choice.tp * choice.cp * pp)
            number = choice.global_batch // (choice.micro_batch * dp)
            most = job.model.num_layers // pp if pp > 1 else 1
            # an interleaved pipeline runs groups of as many micro-batches as there are stages
            chunks = [v for v in range(1, most + 1) if v == 1 or number % pp == 0]
            sharded = engine.zero if pp == 1 else engine.zero_with_stages
            # one data rank has nothing to share: all of them are one
            zeros = kept(sharded, self.fixed.zero)
            if dp * choice.cp == 1 and self.fixed.zero is None:
                zeros = zeros[:1]
            for vpp in kept(chunks, self.fixed.vpp):
                for chunk in layouts(
                    seconds,
                    unit.first_s,
                    unit.last_s,
                    pp,
                    vpp,
                    mtp=job.model.mtp,
                    any_layout=engine.any_layout,
                ):
                    for zero in zeros:
                        yield replace(choice, pp=pp, vpp=vpp, zero=zero, chunks=chunk)

    def priced(self, entry: _Entry) -> Solution | None:
        """Return a choice with its memory, None where it does not fit."""
        assert entry.launch is not None, "its step is priced"
        assert entry.timing is not None, "its step is priced"
        self.counted += 1
        # the first stage is nearly always the fullest, and the others take as long to count
        for stages in ((0,), None):
            whole = self.prices.counted(entry.launch, entry.timing, stages)
            if not self.prices.fits(whole):
                return None
        return Solution(choice=entry.choice, launch=entry.launch, assessment=whole)


def _family(choice: Choice) -> tuple[object, ...]:
    """Return what alternatives differ in: degrees and sharding, not settings of them."""
    return (choice.pp, choice.tp, choice.cp, choice.ep, choice.etp, choice.zero, choice.precision)


def solve(
    engine: EngineSpace, job: Job, target: Target, fixed: Fixed | None = None, *, top: int = 1
) -> Solved:
    """Return the fastest launches of an engine that fit, the best of each family of degrees.

    Raises InputError where the engine runs no launch of this job at all.
    """
    began = time.process_time()
    search = _Search(Prices(engine, job, target), fixed or Fixed(), top)
    solutions, legal = search.run()
    return Solved(
        engine=engine,
        solutions=solutions,
        smallest=None,
        effort=Effort(
            degrees=legal,
            opened=search.opened,
            timed=search.timed,
            counted=search.counted,
            cpu_s=time.process_time() - began,
        ),
    )

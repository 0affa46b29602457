"""Best-first search for the plan with the smallest peak memory, used if no plan fits.

The method is that of `search.planning.uniform.best_first`, with bytes in place of seconds. The
result is the minimum memory; error messages report the missing memory with it.
"""

from __future__ import annotations

import heapq
import time
from typing import NamedTuple

import numpy as np

from autopar.arrays import I64
from autopar.errors import InputError
from autopar.records import replace
from autopar.run.run import Run
from search.engines.candidate import Candidate
from search.planning.uniform.bounds.candidates import ActivationPolicies
from search.planning.uniform.bounds.layer_times import DegreeTimes, arrangement_of
from search.planning.uniform.expansion import CandidateExpander
from search.planning.uniform.space import DegreeArrays, UniformSearchSpace


class LeastMemoryPlan(NamedTuple):
    """Plan with the smallest peak memory."""

    choice: Candidate
    run: Run
    stages: tuple[int, ...]
    """Indices of the stages with counted memory; of equal stages the one with the largest peak."""
    least_bytes: float
    """Lower bound of the peak of any plan, bytes."""


class _QueueEntry(NamedTuple):
    """Candidate in the queue."""

    size: float
    """Peak memory or a lower bound of it, bytes."""
    level: int
    """0: counted plan; 1: layout; 2: stages; 3: degrees."""
    number: int
    """Order of insertion, which decides between equal sizes and levels."""
    choice: Candidate
    unit: DegreeTimes | None = None
    options: ActivationPolicies | None = None
    at: int = 0
    """Index of the next policy in `options`."""


def least_memory_plan(
    space: UniformSearchSpace, degrees: DegreeArrays, openings: CandidateExpander, deadline: float
) -> LeastMemoryPlan | None:
    """Return the plan with the smallest peak; None if the engine has no legal plan.

    deadline : process CPU time in seconds, after which the smallest plan that was counted is
        returned
    """
    return _Search(space, openings).run(degrees, deadline)


_DIVES = 96
"""Degrees for which a plan is counted before the search, so that a search that runs out of time has
a small one."""


class _Search:
    """One search for the plan with the smallest peak."""

    def __init__(self, space: UniformSearchSpace, openings: CandidateExpander) -> None:
        self.space = space
        self.openings = openings
        self.prices = openings.prices
        self.queue: list[_QueueEntry] = []
        self.pushed = 0

    def push(self, size: float, level: int, choice: Candidate, **known: object) -> None:
        self.pushed += 1
        heapq.heappush(
            self.queue,
            _QueueEntry(size, level, self.pushed, choice, **known),  # type: ignore[arg-type]
        )

    def run(self, degrees: DegreeArrays, deadline: float) -> LeastMemoryPlan | None:
        order = np.argsort(degrees.bytes, kind="stable")
        counted = self.dives(degrees, order)
        self.queue = [counted] if counted else []
        following = 0
        while self.queue or following < len(order):
            while following < len(order):
                size = float(degrees.bytes[order[following]])
                if self.queue and size > self.queue[0].size:
                    break
                self.push(size, 3, self.choice(degrees, order[following]))
                following += 1
            entry = heapq.heappop(self.queue)
            if entry.level == 0:
                return self.found(entry, entry.size)
            if time.process_time() > deadline:
                counted = min((one for one in self.queue if one.level == 0), default=None)
                if counted is not None:
                    return self.found(counted, entry.size)
            self.open(entry)
        return None

    def choice(self, degrees: DegreeArrays, place: int) -> Candidate:
        return self.space.choice(
            self.space.expert_degrees[degrees.way[place]],
            self.space.attention_degrees[degrees.laid[place]],
            int(degrees.batch[place]),
        )

    def dives(self, degrees: DegreeArrays, order: I64) -> _QueueEntry | None:
        """Return the smallest plan counted for a few degrees with the smallest micro-batch.

        For each, the expansion with the lowest bound of the deepest level comes first.
        """
        sizes = np.array([one.micro_batch for one in self.space.attention_degrees])[degrees.laid]
        found: list[_QueueEntry] = []
        smallest = order[sizes[order] == min(sizes, default=0)]
        for place in smallest[:_DIVES]:
            self.queue = []
            self.open_degrees(self.choice(degrees, place))
            while self.queue:
                entry = min(self.queue, key=lambda one: (one.level, one.size, one.number))
                if entry.level == 0:
                    found.append(entry)
                    break
                self.queue.remove(entry)
                self.open(entry)
        return min(found, default=None)

    def found(self, entry: _QueueEntry, least_bytes: float) -> LeastMemoryPlan:
        assert entry.unit is not None, "a launch has a unit"
        return LeastMemoryPlan(
            choice=entry.choice,
            run=self.prices.run(entry.choice),
            stages=arrangement_of(entry.unit, entry.choice).at,
            least_bytes=least_bytes,
        )

    def open(self, entry: _QueueEntry) -> None:
        if entry.level == 3:
            self.open_degrees(entry.choice)
        elif entry.level == 2:
            self.open_stages(entry)
        else:
            self.count(entry)

    def open_degrees(self, one: Candidate) -> None:
        # TP overlap needs more memory, so the first of both values has the smallest plan
        degrees = self.openings.overlaps(one)[:1]
        try:
            units = [self.prices.unit(choice) for choice in degrees]
        except InputError:
            return
        for degree, unit in zip(degrees, units, strict=True):
            for choice in self.openings.stages(degree):
                for zero in self.openings.zeros(choice):
                    sharded = self.openings.sharded(choice, zero)
                    least = self.openings.min_stage_bytes(unit, sharded)
                    self.push(least, 2, sharded, unit=unit)

    def open_stages(self, entry: _QueueEntry) -> None:
        unit, one = entry.unit, entry.choice
        assert unit is not None, "stages have a unit"
        for pipeline in self.openings.pipelines(one):
            for choice in self.openings.layouts(unit, pipeline):
                if choice.zero != one.zero:
                    continue
                options = self.openings.smallest(unit, choice)
                if len(options.places):
                    self.push(float(options.values[0]), 1, choice, unit=unit, options=options)

    def count(self, entry: _QueueEntry) -> None:
        """Count the memory of a layout under its next policy; push it for the policies after."""
        assert entry.unit is not None, "a layout has a unit"
        assert entry.options is not None, "a layout has options"
        recompute, offload = self.openings.saving(entry.options, entry.at)
        at = entry.at + 1
        if at < len(entry.options.places):
            self.push(
                float(entry.options.values[at]),
                1,
                entry.choice,
                unit=entry.unit,
                options=entry.options,
                at=at,
            )
        if offload is None:
            options = self.openings.smallest_sets(entry.unit, entry.choice, recompute)
            if len(options.places):
                size = float(options.values[0])
                self.push(size, 1, entry.choice, unit=entry.unit, options=options)
            return
        choice = replace(entry.choice, recompute=recompute, offload=offload)
        if self.prices.timed(choice) is None:
            return
        run = self.prices.run(choice)
        peaks = [
            self.prices.account(choice, stage, run).peak_bytes
            for stage in arrangement_of(entry.unit, choice).at
        ]
        self.push(float(max(peaks)), 0, choice, unit=entry.unit)

"""What a choice of degrees can still be: stages, chunks, layouts, sharding and recomputation.

The values of each, in their order, and what of them may fit by bounds. Which of them is fastest is
`search.uniform.solve`'s, which is smallest `search.uniform.smallest`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from autopar.arrays import F64, Bool
from autopar.pipeline.schedules import SCHEDULES, Engine, Schedule, schedule_problem
from search.space import divisors
from search.uniform.choice import NONE, Choice, Fixed, kept
from search.uniform.layout import layouts
from search.uniform.memory import Room
from search.uniform.prices import Prices, Unit, arrangement_of
from search.uniform.space import Degrees, Space

__all__ = ["Openings", "Options"]


_BETTER: dict[Schedule, Schedule] = {"gpipe": "1f1b", "looped_bfs": "interleaved"}
"""Schedule -> one that is as fast or faster, with less memory, wherever it can be run."""


def _chunks_of(schedule: Schedule, most: int) -> range:
    """Return the numbers of chunks that a schedule has of a stage with so many layers."""
    facts = SCHEDULES[schedule]
    return range(facts.least_chunks, min(most, facts.most_chunks or most) + 1)


class Options(NamedTuple):
    """Recomputations of a layout, and what they are ordered by."""

    values: F64
    words: tuple[str, ...]


class Openings:
    """The values that somebody has left of an engine's, for a job."""

    def __init__(self, prices: Prices, fixed: Fixed, room: Room) -> None:
        self.prices = prices
        self.engine, self.job = prices.engine, prices.job
        self.fixed = fixed
        self.room = room
        self.words = np.array(
            [bool(kept((word,), fixed.recompute)) for word in prices.words], dtype=bool
        )
        self._sharded: dict[object, tuple[int, ...]] = {}
        self._copies: dict[object, tuple[int, ...]] = {}
        self._orders: dict[tuple[int, int], tuple[tuple[Schedule, int], ...]] = {}
        self._limits: dict[object, tuple[F64, float]] = {}
        self._plain = np.array([word == NONE for word in prices.words], dtype=bool)

    # ----------------------------------------------------------------------------------------------
    # Values

    def overlaps(self, choice: Choice) -> tuple[Choice, ...]:
        """Return a choice of degrees with transfers of tensor ranks beside products, or before.

        Beside them they take less time and more memory.
        """
        both = (False, True) if choice.tp > 1 and self.engine.overlaps_tensor else (False,)
        wanted = self.fixed.tp_overlap
        # without tensor ranks there is nothing to send
        left = both if wanted is None or choice.tp == 1 else kept(both, (wanted,))
        return tuple(replace(choice, tp_overlap=one) for one in left)

    def stages(self, choice: Choice) -> Iterator[Choice]:
        """Yield a choice of degrees with its numbers of stages."""
        for pp in self.prices.stages(choice, self.fixed):
            yield replace(choice, pp=pp)

    def zeros(self, choice: Choice) -> tuple[int, ...]:
        """Return the shardings over data ranks."""
        zeros = self._zeros(choice, choice.pp)
        return tuple(zero for zero in zeros if self.copies(replace(choice, zero=zero)))

    def _zeros(self, choice: Choice, pp: int) -> tuple[int, ...]:
        """Return the same of a choice with other stages."""
        single = self.job.world == choice.tp * pp == choice.ep * choice.etp * pp
        key = (pp == 1, choice.precision)
        found = self._sharded.get(key)
        if found is None:
            sharded = self.engine.zero if pp == 1 else self.engine.zero_with_stages
            left = kept(sharded, self.fixed.zero)
            found = tuple(zero for zero in left if self.prices.has(choice.precision, zero))
            self._sharded[key] = found
        if single and self.fixed.zero is None:
            # one rank has nothing to share: all of them are one, which the engine runs
            one = replace(choice, pp=pp)
            found = tuple(zero for zero in found if self._runs(replace(one, zero=zero)))[:1]
        return found

    def copies(self, choice: Choice) -> tuple[int, ...]:
        """Return the numbers of copies of what is sharded, the fewest first.

        More of them take no less memory and leave kernels and stages as they are.
        """
        data = self.job.world // (choice.tp * choice.cp * choice.pp)
        of_experts = self.job.world // (choice.ep * choice.etp * choice.pp)
        wanted = self.fixed.dp_replicate
        if choice.zero not in self.engine.replicated or wanted == (1,):
            return kept((1,), wanted)
        experts = self.job.model.experts is not None
        key = (choice.tp, choice.cp, choice.pp, choice.ep, choice.etp, choice.zero)
        if key not in self._copies:
            self._copies[key] = tuple(
                number
                for number in kept(divisors(data), wanted)
                # where nothing is shared there are only copies, which is no sharding
                if number == 1
                or (
                    number < data * choice.cp
                    and not (experts and of_experts % number)
                    and self._runs(replace(choice, dp_replicate=number))
                )
            )
        return self._copies[key]

    def _runs(self, choice: Choice) -> bool:
        """Return whether the engine has such a sharding beside these degrees."""
        alone = replace(choice, overlap_experts=False)
        return next(self.engine.refused(self.job, alone), None) is None

    def pipelines(self, choice: Choice) -> tuple[Choice, ...]:
        """Return a choice of stages with each schedule and number of chunks that may be best."""
        found = self._pipelines(choice)
        there = {(one.schedule, one.vpp) for one in found}
        return tuple(one for one in found if (_BETTER.get(one.schedule), one.vpp) not in there)

    def _pipelines(self, choice: Choice) -> tuple[Choice, ...]:
        """Return a choice of stages with each legal schedule and number of chunks."""
        if choice.pp == 1:
            one = replace(choice, vpp=1)
            named = bool(kept((one.schedule,), self.fixed.schedule))
            return (one,) if named and kept((one.vpp,), self.fixed.vpp) else ()
        most = self.job.model.num_layers // choice.pp
        number = self.prices.micro_batches(choice)
        key = (choice.pp, number)
        if key not in self._orders:
            self._orders[key] = tuple(
                (schedule, vpp)
                for schedule in kept(self.engine.schedules, self.fixed.schedule)
                for vpp in kept(_chunks_of(schedule, most), self.fixed.vpp)
                if schedule_problem(
                    schedule,
                    stages=choice.pp,
                    chunks=vpp,
                    micro_batches=number,
                    engine=cast(Engine, self.engine.name),
                )
                is None
            )
        return tuple(
            replace(choice, schedule=schedule, vpp=vpp) for schedule, vpp in self._orders[key]
        )

    def layouts(self, unit: Unit, choice: Choice) -> Iterator[Choice]:
        """Yield a choice of stages and chunks with its layouts and shardings in fewest copies."""
        found = layouts(
            unit.layer_s,
            unit.first_s,
            unit.last_s,
            choice.pp,
            choice.vpp,
            mtp=self.job.model.mtp,
            any_layout=self.engine.any_layout,
            schedule=choice.schedule,
        )
        for layout in found:
            for zero in self.zeros(choice):
                one = self.sharded(replace(choice, chunks=layout), zero)
                if next(self.engine.refused(self.job, one), None) is None:
                    yield one

    def sharded(self, choice: Choice, zero: int) -> Choice:
        """Return a choice with a sharding, in as few copies as there may be."""
        one = replace(choice, zero=zero)
        return replace(one, dp_replicate=self.copies(one)[0])

    def blocks(self, longest: int) -> list[int]:
        """Return of how many layers of each chunk all may be computed again, from 1 on."""
        if not self.engine.blocks:
            return []
        if self.fixed.recompute is None:
            return [*range(1, longest)]
        return [one for one in range(1, longest) if f"block {one}" in self.fixed.recompute]

    @property
    def blocks_are_free(self) -> bool:
        """Whether some layers of each chunk may be computed again whole."""
        fixed = self.fixed.recompute
        free = fixed is None or any(word.startswith("block ") for word in fixed)
        return self.engine.blocks and free

    def number(self, space: Space, degrees: Degrees) -> int:
        """Return how many choices there are: degrees with all stages, chunks and the rest.

        Counted, not made: the layouts of as many chunks are one choice, with as many layers to
        make again as even ones have.
        """
        if self.fixed not in space.numbers:
            space.numbers[self.fixed] = self._number(space, degrees)
        return space.numbers[self.fixed]

    def _number(self, space: Space, degrees: Degrees) -> int:
        laid = np.array([(one.tp, one.cp, one.micro_batch) for one in space.laid])[degrees.laid]
        # where any degrees of experts go together, all else depends on their product
        whole = self.engine.expert_tensor is None
        ways = np.array(
            [(one.ep * one.etp, 1) if whole else (one.ep, one.etp) for one in space.ways]
        )[degrees.way]
        rows = np.column_stack([laid, ways, degrees.batch])
        words: dict[tuple[int, int], int] = {}
        total = 0
        for row, times in zip(*np.unique(rows, axis=0, return_counts=True), strict=True):
            tp, cp, size, ep, etp, batch = map(int, row)
            degree = Choice(tp=tp, cp=cp, ep=ep, etp=etp, micro_batch=size, global_batch=batch)
            for pp in self.prices.stages(degree, self.fixed):
                key = (pp, batch * tp * cp * pp // (size * self.job.world))
                if key not in words:
                    words[key] = sum(map(self._words_of, self._longest(replace(degree, pp=pp))))
                shardings = sum(
                    len(self.copies(replace(degree, pp=pp, zero=zero)))
                    for zero in self._zeros(degree, pp)
                )
                total += int(times) * shardings * words[key] * len(self.overlaps(degree))
        return total

    def _longest(self, choice: Choice) -> list[int]:
        """Return the layers of a longest chunk, by schedule and number of chunks."""
        layers = self.job.model.num_layers
        return [-(-layers // (choice.pp * one.vpp)) for one in self._pipelines(choice)]

    def _words_of(self, longest: int) -> int:
        return int(self.words.sum()) + len(self.blocks(longest))

    # ----------------------------------------------------------------------------------------------
    # What may fit

    def limits(self, unit: Unit, choice: Choice) -> tuple[F64, float]:
        """Return the bytes that tensors may take, by recomputation, and with `block N`."""
        key = (choice.precision, choice.dispatcher, choice.tp_overlap, choice.zero)
        found = self._limits.get(key)
        if found is None:
            plain, again = (
                self.prices.room_bytes(unit, choice, self.room, again=again)
                for again in (False, True)
            )
            found = self._limits[key] = (np.where(self._plain, plain, again), again)
        return found

    def least_whole_s(self, unit: Unit, choice: Choice, whole_s: F64) -> float:
        """Return the seconds of a micro-batch of the whole model, as it is recomputed to fit.

        Infinite where nothing fits on so many stages.
        """
        size, off = self.prices.spread_bytes(unit, choice)
        limits, again = self.limits(unit, choice)
        fits = self.words & (size[:-2] <= limits)
        least = float(whole_s[:-2][fits].min()) if fits.any() else np.inf
        if self.blocks_are_free and size[-1] <= again:
            lacking = max(0.0, float(size[-2]) - again)
            least = min(least, self.prices.partly_s(unit, lacking, off))
        return least

    def fits(self, unit: Unit, choice: Choice) -> bool:
        """Return whether a layout with its recomputation may fit."""
        words, blocks, _ = self.sizes(unit, choice)
        limits, again = self.limits(unit, choice)
        if choice.recompute in self.prices.words:
            at = self.prices.words.index(choice.recompute)
            return bool(words[at] <= limits[at])
        return bool(blocks[int(choice.recompute.removeprefix("block "))] <= again)

    def sizes(self, unit: Unit, choice: Choice) -> tuple[F64, F64, list[int]]:
        """Return bytes of a layout at least, by recomputation and by `block N`, and these N."""
        arrangement = arrangement_of(unit, choice)
        words, blocks = self.prices.least_bytes(unit, choice, arrangement)
        return words, blocks, self.blocks(arrangement.longest)

    def fastest(self, unit: Unit, choice: Choice) -> Options:
        """Return the recomputations of a layout that may fit by their steps' seconds at least."""
        words, blocks, numbers = self.sizes(unit, choice)
        limits, again = self.limits(unit, choice)
        may = self.words & (words <= limits)
        free = [number for number in numbers if blocks[number] <= again]
        if not (may.any() or free):
            return Options(np.zeros(0), ())
        arrangement = arrangement_of(unit, choice)
        of_words, of_blocks = self.prices.stages_s(unit, choice, arrangement)
        batch = choice.global_batch
        return self._ordered(may, of_words / batch, free, of_blocks / batch)

    def smallest(self, unit: Unit, choice: Choice) -> Options:
        """Return the recomputations of a layout by the bytes of its fullest stage at least."""
        words, blocks, numbers = self.sizes(unit, choice)
        return self._ordered(self.words, words, numbers, blocks)

    def _ordered(self, may: Bool, words: F64, numbers: list[int], blocks: F64) -> Options:
        names = [word for word, one in zip(self.prices.words, may, strict=True) if one]
        names += [f"block {number}" for number in numbers]
        values = np.concatenate([words[may], blocks[numbers]])
        order = np.argsort(values, kind="stable")
        return Options(values[order], tuple(names[at] for at in order))

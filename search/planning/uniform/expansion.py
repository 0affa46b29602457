"""Expand a set of degrees into stages, chunks, layer layouts, sharding and activation policies.

This module lists the allowed values at each level, without those that cannot fit according to lower
bounds. The fastest plan is searched in `search.planning.uniform.best_first`, the plan with the
smallest peak in `search.planning.uniform.least_memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import cast

import numpy as np

from autopar.arrays import F64, I64, Bool
from autopar.pipeline.schedules import SCHEDULES, Engine, Schedule, schedule_problem
from autopar.records import replace
from autopar.run.rules import holds_all
from autopar.units import divisors
from search.engines.candidate import (
    FULL,
    NONE,
    Candidate,
    Constraints,
    Precision,
    allowed_values,
)
from search.engines.space import needs_one_queue, values_of
from search.planning.uniform.bounds.candidates import (
    DEVICE,
    OPEN,
    ActivationPolicies,
    ActivationPolicy,
    PipelineClass,
    PolicyBytes,
    StageCandidate,
    StageCandidates,
    pipeline_classes,
)
from search.planning.uniform.bounds.layer_times import (
    DegreeTimes,
    arrangement_of,
    layer_total_s,
    partial_recompute_s,
)
from search.planning.uniform.bounds.live import spread_stages
from search.planning.uniform.bounds.offload import (
    hosted_spread_bytes,
    least_hosted_bytes,
    least_offloaded_bytes,
    offload_model_time_s,
    offload_of_unit,
    offload_time_s,
    sets_bytes,
    sets_s,
)
from search.planning.uniform.bounds.partitions import (
    Partitions,
    early_stages,
    partition_bytes,
    partitions_of,
    partly_recomputed_s,
    peaks_of,
    reduced_s,
    spread_pipeline_s,
    stages_s,
    words_s,
)
from search.planning.uniform.cost_model import Pipeline, UniformCostModel
from search.planning.uniform.layout import Layout, layouts
from search.planning.uniform.memory import MemoryBudget

_MORE, _ROUNDING = 1.0 + 1e-9, 1.0 - 1e-9
"""Rounding factors of memory limits and of bounds, for sums in another order."""
_BETTER: dict[Schedule, Schedule] = {"gpipe": "1f1b", "looped_bfs": "interleaved"}
"""Schedule -> schedule that, where legal, is never slower and needs less memory."""


def _chunks_of(schedule: Schedule, most: int) -> range:
    """Return the possible numbers of chunks per stage of a schedule; most : layers per stage."""
    facts = SCHEDULES[schedule]
    return range(facts.least_chunks, min(most, facts.most_chunks or most) + 1)


class _Known:
    """Caches of expanders with the same pipelines; their values hold for any memory budget."""

    def __init__(self) -> None:
        self.sharded: dict[object, tuple[int, ...]] = {}
        self.copies: dict[object, tuple[int, ...]] = {}
        self.orders: dict[tuple[int, int], tuple[Pipeline, ...]] = {}
        self.classes: dict[tuple[int, int], tuple[PipelineClass, ...]] = {}
        self.tables: dict[object, StageCandidates] = {}
        self.stagings: dict[object, StageCandidate] = {}
        self.spread: dict[object, tuple[F64, F64]] = {}
        self.layouts: dict[object, tuple[Candidate, ...]] = {}
        self.partitions: dict[object, tuple[Layout, ...]] = {}


class CandidateExpander:
    """Expansion of candidates into the values that engine, job and constraints allow."""

    def __init__(
        self,
        prices: UniformCostModel,
        fixed: Constraints,
        room: MemoryBudget,
        alike: CandidateExpander | None = None,
    ) -> None:
        """Store constraints and memory budget.

        alike : expander with the same pipelines (`has_pipelines_of`), whose caches are shared
        """
        self.prices = prices
        self.engine, self.job = prices.engine, prices.job
        self.fixed = fixed
        self.room = room
        self.words = np.array(
            [bool(allowed_values((word,), fixed.recompute)) for word in prices.words], dtype=bool
        )
        """True for recomputation policies that the constraints allow, shape [policies]."""
        self.device = bool(allowed_values((NONE,), fixed.offload))
        """True if the constraints allow policies without activation offload."""
        self.sets = np.array(
            [bool(allowed_values((word,), fixed.offload)) for word in prices.hosted.words],
            dtype=bool,
        )
        hosted = self.words & bool(self.sets.any())
        hosted[prices.modules.full] = False
        self.hosted = hosted
        """True for recomputation policies that allow activation offload, shape [policies]."""
        self.offloads = bool(hosted.any())
        self._known: _Known = alike._known if alike else _Known()
        self._sizes: dict[object, PolicyBytes] = {}
        self._limits: dict[object, tuple[F64, float]] = {}
        self._rooms: dict[object, tuple[F64, F64]] = {}
        self._plain = np.array([word == NONE for word in prices.words], dtype=bool)
        self._of_copies = tuple(
            rule for rule in self.engine.rules if {"dp_replicate", "dp_shard"} & {*rule.over}
        )
        """Rules that depend on the number of HSDP replicas."""

    def has_pipelines_of(self, fixed: Constraints) -> bool:
        """Return True if stages, pipelines and shardings are those of other constraints."""
        names = ("pp", "dp", "zero", "dp_replicate", "vpp", "schedule")
        return all(getattr(self.fixed, name) == getattr(fixed, name) for name in names)

    def within(self, room: MemoryBudget) -> CandidateExpander:
        """Return a copy for another memory budget; it shares caches for any memory limit."""
        found = copy(self)
        found.room = room
        found._limits, found._rooms = {}, {}
        return found

    # ----------------------------------------------------------------------------------------------
    # Values

    def overlaps(self, choice: Candidate) -> tuple[Candidate, ...]:
        """Return the candidate without and with TP overlap, as far as allowed.

        Overlap takes less time and more memory.
        """
        left = self.overlap_values(choice.tp, choice.overlap_experts)
        return tuple(
            choice if one == choice.tp_overlap else replace(choice, tp_overlap=one) for one in left
        )

    def overlap_values(self, tp: int, experts: bool) -> tuple[bool, ...]:
        """Return the allowed values of TP overlap; experts : True with overlap of experts."""
        may = self.engine.overlaps_tensor(self.job, tp)
        both = (
            (False, True) if may and not (experts and needs_one_queue(self.job.gpu)) else (False,)
        )
        wanted = self.fixed.tp_overlap
        # without tensor ranks there is no communication
        return both if wanted is None or tp == 1 else allowed_values(both, (wanted,))

    def stages(self, choice: Candidate) -> Iterator[Candidate]:
        """Yield the candidate with each allowed number of stages."""
        for pp in self.prices.stages(choice, self.fixed):
            yield replace(choice, pp=pp)

    def zeros(self, choice: Candidate) -> tuple[int, ...]:
        """Return the allowed ZeRO stages."""
        zeros = self.zeros_at(choice, choice.pp)
        if self.fixed.dp_replicate is None:
            return zeros
        return tuple(zero for zero in zeros if self.copies(replace(choice, zero=zero)))

    def zeros_at(self, choice: Candidate, pp: int) -> tuple[int, ...]:
        """Return the allowed ZeRO stages for `pp` pipeline stages, for any HSDP replicas."""
        single = self.job.world == choice.tp * pp == choice.ep * choice.etp * pp
        found = self.any_zeros(choice.precision, staged=pp > 1)
        if single and self.fixed.zero is None and not self.job.training.offload:
            # All ZeRO stages are equal on one rank: take the first that the engine runs. With
            # offload they are not, as DeepSpeed moves gradients to the host at different times.
            one = replace(choice, pp=pp)
            found = tuple(zero for zero in found if self._runs(replace(one, zero=zero)))[:1]
        return found

    def any_zeros(self, precision: Precision, *, staged: bool) -> tuple[int, ...]:
        """Return the ZeRO stages allowed for any degrees; staged : True for several stages."""
        key = (staged, precision)
        found = self._known.sharded.get(key)
        if found is None:
            sharded = self.engine.zero_with_stages if staged else self.engine.zero
            left = allowed_values(sharded, self.fixed.zero)
            found = tuple(zero for zero in left if self.prices.has(precision, zero))
            self._known.sharded[key] = found
        return found

    def copies(self, choice: Candidate) -> tuple[int, ...]:
        """Return the allowed numbers of HSDP replicas, in ascending order.

        More replicas never need less memory, and change neither kernels nor stages.
        """
        data = self.job.world // (choice.tp * choice.cp * choice.pp)
        of_experts = self.job.world // (choice.ep * choice.etp * choice.pp)
        wanted = self.fixed.dp_replicate
        if choice.zero not in self.engine.replicated or wanted == (1,):
            return allowed_values((1,), wanted)
        experts = self.job.model.experts is not None
        inner = (choice.tp, choice.cp, choice.cp_kind, choice.ep, choice.etp)
        key = (*inner, choice.pp, choice.zero)
        if key not in self._known.copies:
            # as many replicas as ranks would shard nothing
            numbers = [
                number
                for number in allowed_values(divisors(data), wanted)
                if number == 1
                or (number < data * choice.cp and not (experts and of_experts % number))
            ]
            if self._of_copies and numbers not in ([], [1]):
                alone = replace(choice, overlap_experts=False)
                values = values_of(self.engine, self.job, alone)
                # rules hold for arrays
                values["dp_replicate"] = np.array(numbers)
                runs = np.broadcast_to(holds_all(self._of_copies, values), len(numbers)).tolist()
                numbers = [n for n, legal in zip(numbers, runs, strict=True) if legal or n == 1]
            self._known.copies[key] = tuple(numbers)
        return self._known.copies[key]

    def _runs(self, choice: Candidate) -> bool:
        """Return True if the engine runs the candidate, with or without expert overlap."""
        alone = replace(choice, overlap_experts=False)
        return self.prices.runs(alone)

    def pipelines(self, choice: Candidate) -> tuple[Candidate, ...]:
        """Return the candidate with each legal, non-dominated schedule and number of chunks."""
        best = self._best(choice.pp, self.prices.micro_batches(choice))
        return tuple(replace(choice, schedule=schedule, vpp=vpp) for schedule, vpp in best)

    def classes(self, pp: int, micro_batches: int) -> tuple[PipelineClass, ...]:
        """Return the pipelines of a number of stages, in classes with common bounds."""
        key = (pp, micro_batches)
        if key not in self._known.classes:
            layers = self.job.model.num_layers
            self._known.classes[key] = tuple(pipeline_classes(self._best(*key), layers, *key))
        return self._known.classes[key]

    def _best(self, pp: int, micro_batches: int) -> tuple[Pipeline, ...]:
        """Return the legal pipelines that are not dominated by another schedule."""
        legal = self.legal_pipelines(pp, micro_batches)
        return tuple(
            (schedule, vpp) for schedule, vpp in legal if (_BETTER.get(schedule), vpp) not in legal
        )

    def legal_pipelines(self, pp: int, micro_batches: int) -> tuple[Pipeline, ...]:
        """Return each legal schedule and number of chunks for a number of stages."""
        if pp == 1:
            named = bool(allowed_values(("1f1b",), self.fixed.schedule))
            return (("1f1b", 1),) if named and allowed_values((1,), self.fixed.vpp) else ()
        most = self.job.model.num_layers // pp
        key = (pp, micro_batches)
        if key not in self._known.orders:
            self._known.orders[key] = tuple(
                (schedule, vpp)
                for schedule in allowed_values(self.engine.schedules, self.fixed.schedule)
                for vpp in allowed_values(_chunks_of(schedule, most), self.fixed.vpp)
                if schedule_problem(
                    schedule,
                    stages=pp,
                    chunks=vpp,
                    micro_batches=micro_batches,
                    engine=cast(Engine, self.engine.name),
                )
                is None
            )
        return self._known.orders[key]

    def layouts(self, unit: DegreeTimes, choice: Candidate) -> tuple[Candidate, ...]:
        """Return the candidate with each layout and ZeRO stage, and the fewest HSDP replicas."""
        key = (unit, choice)
        if key not in self._known.layouts:
            self._known.layouts[key] = tuple(self._laid_out(unit, choice))
        return self._known.layouts[key]

    def _partitions(self, unit: DegreeTimes, choice: Candidate) -> tuple[Layout, ...]:
        """Return the layer partitions to try for a candidate's stages and chunks."""
        key = (unit, choice.pp, choice.vpp, choice.schedule)
        if key not in self._known.partitions:
            self._known.partitions[key] = tuple(
                layouts(
                    unit.layer_s,
                    unit.first_s,
                    unit.end_s,
                    choice.pp,
                    choice.vpp,
                    mtp=self.job.model.mtp,
                    any_layout=self.engine.any_layout,
                    schedule=choice.schedule,
                    reused=self.job.model.reused,
                )
            )
        return self._known.partitions[key]

    def _laid_out(self, unit: DegreeTimes, choice: Candidate) -> Iterator[Candidate]:
        # no rule reads the layout
        every = [self.sharded(choice, zero) for zero in self.zeros(choice)]
        legal = [one for one in every if self.prices.runs(one)]
        for layout in self._partitions(unit, choice):
            for one in legal:
                yield replace(one, chunks=layout)

    def sharded(self, choice: Candidate, zero: int) -> Candidate:
        """Return the candidate with a ZeRO stage and the fewest HSDP replicas allowed."""
        fewest = self.fixed.dp_replicate
        one = replace(choice, zero=zero, dp_replicate=1)
        return one if fewest is None else replace(one, dp_replicate=self.copies(one)[0])

    def blocks(self, longest: int) -> list[int]:
        """Return the allowed N of `block N` below the number of layers of the longest chunk."""
        if not (self.engine.blocks and self.device):
            return []
        if self.fixed.recompute is None:
            return [*range(1, longest)]
        return [one for one in range(1, longest) if f"block {one}" in self.fixed.recompute]

    @property
    def blocks_are_free(self) -> bool:
        """True if `block N` recomputation is allowed."""
        fixed = self.fixed.recompute
        free = fixed is None or any(word.startswith("block ") for word in fixed)
        return self.engine.blocks and free and self.device

    # ----------------------------------------------------------------------------------------------
    # Policies that may fit

    def limits(self, choice: Candidate) -> tuple[F64, float]:
        """Return the largest peak allocated that fits, bytes: by policy, and for `block N`."""
        return self._limits_of(choice, choice.zero)

    def _limits_of(self, choice: Candidate, zero: int) -> tuple[F64, float]:
        """Return `limits` for another ZeRO stage."""
        key = (choice.precision, choice.dispatcher, choice.tp_overlap, zero)
        found = self._limits.get(key)
        if found is None:
            one = replace(choice, zero=zero)
            plain, again = (
                self.prices.max_peak_bytes(one, self.room, again=again) for again in (False, True)
            )
            found = self._limits[key] = (np.where(self._plain, plain, again), again)
        return found

    def hosted_limit(self, limits: F64) -> F64:
        """Return the largest peak allocated that fits with activation offload, bytes, by policy.

        limits : limits without offload. If the constraints require offload, these apply too, as all
        tensors of the required modules may be too small to be offloaded.
        """
        hosted = np.full(limits.shape, self.room.bytes_of("offloaded") * _MORE)
        return hosted if self.device else np.maximum(hosted, limits)

    def _rooms_of(self, degree: Candidate, staging: StageCandidate) -> tuple[F64, F64]:
        """Return `limits` of all shardings, shapes [shardings, policies] and [shardings]."""
        key = (degree.precision, degree.dispatcher, degree.tp_overlap, staging.zeros)
        found = self._rooms.get(key)
        if found is None:
            plain, again = zip(
                *(self._limits_of(degree, zero) for zero in staging.zeros), strict=True
            )
            found = self._rooms[key] = np.array(plain), np.array(again)
        return found

    def table(self, unit: DegreeTimes, degree: Candidate) -> StageCandidates:
        """Return the stages and shardings of a candidate's degrees, for any memory limit."""
        key = (unit, degree.global_batch)
        if key not in self._known.tables:
            self._known.tables[key] = self._table(unit, degree)
        return self._known.tables[key]

    def _table(self, unit: DegreeTimes, degree: Candidate) -> StageCandidates:
        # rules on stages and ZeRO stages may read kind and dispatcher
        key = (degree.tp, degree.cp, degree.ep, degree.etp, degree.micro_batch, degree.global_batch,
               degree.precision, degree.cp_kind, degree.dispatcher)  # fmt: skip
        if key not in self._known.stagings:
            self._known.stagings[key] = self._staging_of(unit, degree)
        staging = self._known.stagings[key]
        # overlap of experts changes no memory
        of_memory = (unit.bounds, *key)
        if of_memory not in self._known.spread:
            self._known.spread[of_memory] = self.prices.many_spread_bytes(unit, staging.spread)
        sizes, freed = (each[None] for each in self._known.spread[of_memory])
        plain = self.prices.rows_s(unit, replace(degree, zero=0))
        rows = [
            self.prices.rows_s(unit, replace(degree, pp=pp, zero=zero, dp_replicate=copies))
            if zero == 3
            else plain
            for pp, zero, copies in staging.shardings
        ]
        model, early = staging.of, None
        if len(model) and not any(self.job.model.reused):
            own, slopes, early = early_stages(self.prices, unit, staging, rows)
            sizes, freed = np.concatenate([sizes, own]), np.concatenate([freed, slopes])
        offload, hosted = None, sizes.max(axis=0)[:, :-2]
        if rows and self.prices.hosted.words:
            offload = offload_of_unit(unit, rows)
            hosted = hosted_spread_bytes(offload, sizes, freed, staging.spread.most).max(axis=0)
        return StageCandidates(
            staging=staging,
            bytes=sizes,
            freed=freed,
            hosted=hosted,
            offload=offload,
            model=model,
            whole_s=np.array([one.whole_s for one in rows])[model],
            layer_s=np.array([one.layer_s for one in rows])[model],
            again=np.array([one.again for one in rows])[model],
            early=early,
        )

    def _staging_of(self, unit: DegreeTimes, degree: Candidate) -> StageCandidate:
        prices = self.prices
        staged = [
            (one, self.classes(one.pp, prices.micro_batches(one))) for one in self.stages(degree)
        ]
        staged = [(one, classes) for one, classes in staged if classes]
        shardings = [
            (at, self.sharded(one, zero))
            for at, (one, _) in enumerate(staged)
            for zero in self.zeros(one)
        ]
        sends = [
            [prices.transfer_s(unit, replace(one, vpp=each.fewest)) for each in classes]
            for one, classes in staged
        ]
        rows = [
            (at, of, each, sent)
            for of, (at, _) in enumerate(shardings)
            for each, sent in zip(staged[at][1], sends[at], strict=True)
        ]
        of = np.array([of for _, of, _, _ in rows], dtype=np.int64)
        numbers = [(one.pp, prices.micro_batches(one)) for _, one in shardings]
        pp, micro_batches = np.array(numbers, dtype=np.int64).reshape(-1, 2)[of].T
        states = np.array([prices.states_of(unit, one) for _, one in shardings]).reshape(-1, 5)
        return StageCandidate(
            stages=tuple(one.pp for one, _ in staged),
            shardings=tuple((one.pp, one.zero, one.dp_replicate) for _, one in shardings),
            zeros=tuple(one.zero for _, one in shardings),
            at=np.array([at for at, _, _, _ in rows], dtype=np.int64),
            of=of,
            pp=pp,
            micro_batches=micro_batches,
            layers=np.array([each.layers for _, _, each, _ in rows], dtype=np.int64),
            bubbles=np.array([each.bubble for _, _, each, _ in rows]),
            sends_s=np.array([sent for _, _, _, sent in rows]),
            spread=spread_stages(states[of], [each.live for _, _, each, _ in rows]),
        )

    def least_whole_s(self, table: StageCandidates, limits: F64, room: F64) -> tuple[F64, F64]:
        """Return lower bounds of seconds per micro-batch for activation policies that fit.

        They are those of the whole model and of its longest stage, one per row; infinite if no
        policy fits.

        limits, room : `limits` by row, shapes [rows, policies] and [rows]
        """
        staging = table.staging
        sizes = table.bytes.max(axis=0)
        fits = self.words & self.device & (sizes[:, :-2] <= limits)
        whole_s, layer_s = table.whole_s[:, :-2], table.layer_s[:, :-2]
        mean, longest_s = 1.0 / staging.pp, staging.layers[:, None] * layer_s
        found = np.where(fits, whole_s, np.inf).min(axis=1, initial=np.inf)
        stage_s = np.maximum(whole_s * mean[:, None], longest_s)
        longest = np.where(fits, stage_s, np.inf).min(axis=1, initial=np.inf)
        if self.blocks_are_free:
            lacking = np.maximum(0.0, table.bytes[:, :, -2] - room)
            # more micro-batches than in the mean may be live of recomputed layers
            freed = lacking[0] / (table.freed[0, :, -2] * staging.spread.most[:, 0])
            least = staging.layers * table.layer_s[:, -2]
            if table.early is not None:
                # other stages may recompute fewer layers
                early, own = table.early, lacking[1:] / table.early.live
                freed = np.maximum(freed, own.max(axis=0))
                again_s = layer_total_s(
                    early.device_s + own * table.again[:, 2],
                    early.host_s + own * table.again[:, 3],
                )
                least = np.maximum(least, again_s.max(axis=0))
            partly = partial_recompute_s(table.again, freed)
            free = sizes[:, -1] <= room
            found = np.where(free, np.minimum(found, partly), found)
            least = np.maximum(least, partly * mean)
            longest = np.where(free, np.minimum(longest, least), longest)
        if self.offloads and table.offload is not None:
            # offload is not faster than a faster recomputation that fits
            most = self.hosted_limit(limits)
            may = (whole_s < found[:, None]) | (stage_s < longest[:, None])
            may &= self.hosted & (table.hosted <= most)
            some = np.flatnonzero(may.any(axis=1))
            if len(some):
                model = table.offload.only(table.model[some])
                freed = least_offloaded_bytes(
                    model,
                    np.maximum(0.0, table.bytes[:, some, :-2] - most[some]),
                    table.freed[:, some, :-2],
                    staging.spread.most[some],
                ).max(axis=0)
                hosted = np.where(
                    may[some], offload_model_time_s(self.prices, model, freed), np.inf
                )
                found[some] = np.minimum(found[some], hosted.min(axis=1))
                hosted = np.maximum(hosted * mean[some, None], longest_s[some])
                longest[some] = np.minimum(longest[some], hosted.min(axis=1))
        return found, longest

    def stages_s(self, unit: DegreeTimes, degree: Candidate) -> tuple[tuple[int, ...], F64]:
        """Return numbers of stages, and lower bounds of pipeline seconds; infinite if none fits."""
        table = self.table(unit, degree)
        staging = table.staging
        least = np.full(len(staging.stages), np.inf)
        if staging.shardings:
            rooms = (each[staging.of] for each in self._rooms_of(degree, staging))
            whole, longest = self.least_whole_s(table, *rooms)
            fits = whole < np.inf
            found = spread_pipeline_s(
                self.prices, staging, np.where(fits, whole, 0.0), np.where(fits, longest, 0.0)
            )
            np.minimum.at(least, staging.at, np.where(fits, found, np.inf))
        return staging.stages, least

    def reduced_s(self, unit: DegreeTimes, choice: Candidate, seconds: float) -> float:
        """Return a lower bound of step seconds from that of pipeline seconds.

        Infinite if no sharding is legal: numbers of stages are shared by all settings of degrees.
        """
        shardings = [self.sharded(choice, zero) for zero in self.zeros(choice)]
        found = (float(reduced_s(self.prices, unit, one, seconds)) for one in shardings)
        return min(found, default=np.inf)

    def pipelines_s(
        self, unit: DegreeTimes, choice: Candidate
    ) -> Iterator[tuple[Candidate, float]]:
        """Yield the pipelines with a layout that may fit, and lower bounds of step seconds."""
        laid = [(one, self._partitions(unit, one)) for one in self.pipelines(choice)]
        laid = [(one, some) for one, some in laid if some]
        shardings = [self.sharded(choice, zero) for zero in self.zeros(choice)]
        if not laid or not shardings:
            return
        parts = partitions_of(
            self.prices,
            unit,
            [replace(one, chunks=layout) for one, some in laid for layout in some],
        )
        every = [self._least_s(unit, one, parts) for one in shardings]
        first = np.cumsum([0, *(len(some) for _, some in laid[:-1])])
        least = np.minimum.reduceat(np.min(every, axis=0), first)
        for (one, _), seconds in zip(laid, least.tolist(), strict=True):
            if seconds < np.inf:
                yield one, seconds

    def _least_s(self, unit: DegreeTimes, choice: Candidate, parts: Partitions) -> F64:
        """Return lower bounds of step seconds for activation policies that fit, by partition."""
        limits, again = self.limits(choice)
        sizes = partition_bytes(self.prices, unit, choice, parts)
        peaks = peaks_of(parts, sizes)
        fits = self.words & self.device & (peaks[:, :-2] <= limits)
        seconds = np.where(fits, words_s(self.prices, unit, choice, parts).T, np.inf)
        found: F64 = seconds.min(axis=1, initial=np.inf)
        if self.blocks_are_free:
            partly = partly_recomputed_s(self.prices, unit, choice, parts, sizes[:, -2] - again)
            found = np.where(peaks[:, -1] <= again, np.minimum(found, partly), found)
        if self.offloads:
            most = self.hosted_limit(limits)
            may = self.hosted & ~fits & (least_hosted_bytes(unit, parts, sizes[:, :-2]) <= most)
            if may.any():
                hosted = offload_time_s(self.prices, unit, choice, parts, sizes[:, :-2], most)
                found = np.minimum(found, np.where(may, hosted.T, np.inf).min(axis=1))
        return found

    def fits(self, unit: DegreeTimes, choice: Candidate) -> bool:
        """Return True if a layout with its recomputation and offload may fit."""
        if choice.offload != NONE:
            plain = replace(choice, recompute=NONE, offload=NONE)
            return len(self.sets_of(unit, plain, choice.recompute, (choice.offload,)).sets) > 0
        sizes = self.sizes(unit, choice)
        limits, again = self.limits(choice)
        if choice.recompute in self.prices.words:
            at = self.prices.words.index(choice.recompute)
            return bool(sizes.words[at] <= limits[at])
        return bool(sizes.blocks[int(choice.recompute.removeprefix("block "))] <= again)

    def sizes(self, unit: DegreeTimes, choice: Candidate) -> PolicyBytes:
        """Return lower bounds of the peak stage's memory, bytes, one per recomputation policy."""
        key = (unit, choice, self.prices.rounding_of(choice) is None)
        found = self._sizes.get(key)
        if found is None:
            arrangement = arrangement_of(unit, choice)
            words, blocks = self.prices.least_bytes(unit, choice, arrangement)
            numbers = np.array(self.blocks(arrangement.longest), dtype=np.int64)
            found = self._sizes[key] = PolicyBytes(words, blocks, numbers)
        return found

    def fastest(self, unit: DegreeTimes, choice: Candidate) -> ActivationPolicies:
        """Return the activation policies of a layout that may fit, by lower bounds of step time.

        Recomputation policies that fit are listed without offload, which would only add time. The
        others are listed once, with the offload set `OPEN`, if some set may fit.
        """
        sizes = self.sizes(unit, choice)
        limits, again = self.limits(choice)
        may = self.words & self.device & (sizes.words <= limits)
        free = sizes.numbers[sizes.blocks[sizes.numbers] <= again]
        lacks = self.hosted & ~may
        if lacks.any():
            most = self.hosted_limit(limits)
            lacks &= self._hosted_bytes(unit, choice) <= most
        if not (may.any() or len(free) or lacks.any()):
            none = np.zeros(0, dtype=np.int64)
            return ActivationPolicies(np.zeros(0), none, none)
        hosted = np.full(len(may), np.inf)
        parts = self._parts(unit, choice)
        if lacks.any():
            words = partition_bytes(self.prices, unit, choice, parts)[:, :-2]
            found = offload_time_s(self.prices, unit, choice, parts, words, most)[:, 0]
            hosted[lacks] = found[lacks] / choice.global_batch
        if sizes.seconds is None:
            of_words, of_blocks = stages_s(self.prices, unit, choice, parts)
            sizes.seconds = of_words / choice.global_batch, of_blocks / choice.global_batch
        return self._ordered(may, free, *sizes.seconds, hosted)

    def _parts(self, unit: DegreeTimes, choice: Candidate) -> Partitions:
        """Return a layout, without recomputation and offload, as the only one of `Partitions`."""
        sizes = self.sizes(unit, choice)
        if sizes.parts is None:
            sizes.parts = partitions_of(self.prices, unit, [choice])
        return sizes.parts

    def _hosted_bytes(self, unit: DegreeTimes, choice: Candidate) -> F64:
        """Return lower bounds of the peak stage's bytes by policy, for any offload set."""
        sizes = self.sizes(unit, choice)
        if sizes.hosted is None:
            parts = self._parts(unit, choice)
            words = partition_bytes(self.prices, unit, choice, parts)[:, :-2]
            sizes.hosted = least_hosted_bytes(unit, parts, words)[0]
        return sizes.hosted

    def smallest(self, unit: DegreeTimes, choice: Candidate) -> ActivationPolicies:
        """Return the activation policies of a layout, by lower bounds of the peak stage's bytes."""
        sizes = self.sizes(unit, choice)
        hosted = np.full(len(sizes.words), np.inf)
        if self.offloads:
            hosted = np.where(self.hosted, self._hosted_bytes(unit, choice), np.inf)
        may = self.words & self.device
        return self._ordered(may, sizes.numbers, sizes.words, sizes.blocks, hosted)

    def _ordered(
        self, may: Bool, numbers: I64, of_words: F64, of_blocks: F64, hosted: F64
    ) -> ActivationPolicies:
        """Return allowed policies sorted by value.

        may : mask of recomputation policies without offload, with values `of_words`
        numbers : allowed N of `block N`, with values `of_blocks[N]`
        hosted : values of recomputation policies with offload; infinite if excluded
        """
        words, beside = np.flatnonzero(may), np.flatnonzero(hosted < np.inf)
        values = np.concatenate([of_words[words], of_blocks[numbers], hosted[beside]])
        places = np.concatenate([words, len(self.words) + numbers, beside])
        sets = np.full(len(places), DEVICE)
        sets[len(places) - len(beside) :] = OPEN
        order = np.argsort(values, kind="stable")
        return ActivationPolicies(values[order], places[order], sets[order])

    def recomputes_superset(self, options: ActivationPolicies, at: int) -> Bool:
        """Return a mask of the policies that recompute all modules of the policy at index `at`.

        They are no faster than that policy, with or without offload. All False if that policy is
        full or `block N` recomputation.
        """
        words = self.prices.words
        place = int(options.places[at])
        if place >= len(words) or words[place] == FULL:
            return np.zeros(len(options.places), dtype=bool)
        # `block N` is a superset only of the policy without recomputation
        known = np.append(self._covers[place], words[place] == NONE)
        return known[np.minimum(options.places, len(words))]

    @cached_property
    def _covers(self) -> Bool:
        """True if the second policy recomputes all modules of the first, shape [first, second]."""
        sets = [
            frozenset() if one == NONE else frozenset(one.split("+")) for one in self.prices.words
        ]
        return np.array(
            [[one <= other or FULL in other for other in sets] for one in sets], dtype=bool
        )

    def saving(self, options: ActivationPolicies, at: int) -> ActivationPolicy:
        """Return the activation policy at an index."""
        place, one = int(options.places[at]), int(options.sets[at])
        words = self.prices.words
        recompute = words[place] if place < len(words) else f"block {place - len(words)}"
        if one < 0:
            return ActivationPolicy(recompute, NONE if one == DEVICE else None)
        return ActivationPolicy(recompute, self.prices.hosted.words[one])

    def min_stage_bytes(self, unit: DegreeTimes, choice: Candidate) -> float:
        """Return a lower bound of the peak stage's bytes, for any layout and activation policy."""
        sizes, freed = self.prices.balanced_stage_bound_bytes(unit, choice)
        least = float(sizes.min())
        if self.offloads:
            model = offload_of_unit(unit, [self.prices.rows_s(unit, replace(choice, zero=0))])
            hosted = hosted_spread_bytes(model, sizes[None], freed[None], np.ones((1, 1)))[0]
            least = min(least, float(hosted[self.hosted].min()))
        return least

    # ----------------------------------------------------------------------------------------------
    # Activation offload

    def can_offload(self, recompute: str) -> bool:
        """Return True if activation offload is allowed with a recomputation policy."""
        words = self.prices.words
        return recompute in words and bool(self.hosted[words.index(recompute)])

    def fastest_sets(
        self, unit: DegreeTimes, choice: Candidate, recompute: str, full: Sequence[str] = ()
    ) -> ActivationPolicies:
        """Return the offload sets of a policy that may fit, by lower bounds of step time.

        A set is dropped if another one offloads no more in any layer type, as the other is no
        slower.

        full : sets that exceeded memory when counted; they are excluded and do not hide others.
        """
        words = [word for word in self.prices.hosted.words if word not in full]
        found = self.sets_of(unit, choice, recompute, words)
        at = self.prices.words.index(recompute)
        rows = (self.prices.hosted.has @ unit.bounds.offloaded_activation_bytes.copied[at])[
            found.sets
        ]
        less = (rows[:, None] <= rows[None]).all(axis=2) & ~np.eye(len(rows), dtype=bool)
        return found.only(np.flatnonzero(~less.any(axis=0)))

    def sets_of(
        self, unit: DegreeTimes, choice: Candidate, recompute: str, words: Sequence[str]
    ) -> ActivationPolicies:
        """Return those of some offload sets that may fit, by lower bounds of step time."""
        at = self.prices.words.index(recompute)
        sizes, most = self._sets_bytes(unit, choice, at)
        some = np.array([word in words for word in self.prices.hosted.words], dtype=bool)
        seconds = sets_s(self.prices, unit, choice, self._parts(unit, choice), at)
        may = self.sets & some & (sizes <= most)
        return self._ordered_sets(unit, at, may, seconds / choice.global_batch)

    def smallest_sets(
        self, unit: DegreeTimes, choice: Candidate, recompute: str
    ) -> ActivationPolicies:
        """Return the offload sets of a policy, by lower bounds of the peak stage's bytes."""
        at = self.prices.words.index(recompute)
        sizes = sets_bytes(self.prices, unit, choice, arrangement_of(unit, choice), at)
        return self._ordered_sets(unit, at, self.sets, sizes)

    def _sets_bytes(self, unit: DegreeTimes, choice: Candidate, word: int) -> tuple[F64, F64]:
        """Return lower bounds of the peak stage's bytes, and the limits, both by offload set."""
        sizes = sets_bytes(self.prices, unit, choice, arrangement_of(unit, choice), word)
        limits, _ = self.limits(choice)
        leaves = (self.prices.hosted.has @ unit.bounds.offloaded_activation_bytes.copied[word]).any(
            axis=1
        )
        most = np.where(leaves, self.room.bytes_of("offloaded") * _MORE, limits[word])
        return sizes, most

    def _ordered_sets(
        self, unit: DegreeTimes, word: int, may: Bool, values: F64
    ) -> ActivationPolicies:
        copied = self.prices.hosted.has @ unit.bounds.offloaded_activation_bytes.copied[word]
        # keep one of the sets that offload equal bytes; drop sets that offload nothing if policies
        # without offload are allowed
        seen = {(0.0,) * copied.shape[1]} if self.device else set()
        found: list[int] = []
        rows = copied.tolist()
        for at in np.lexsort((copied @ unit.number, values)).tolist():
            leaves = tuple(rows[at])
            if may[at] and leaves not in seen:
                seen.add(leaves)
                found.append(at)
        order = np.array(found, dtype=np.int64)
        return ActivationPolicies(values[order], np.full(len(order), word), order)

"""Lower bounds of step time for many combinations of degrees at once, with forced recomputation.

The bounds of `search.planning.uniform.space` ignore memory. Most large micro-batches fit only with
recomputation or offload, and in pipelines. These bounds are those of
`CandidateExpander.stages_s`, with times of `ModelTimeBounds`, of the sharding with the smallest
model states, and of the kind of plan with the largest memory limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.arrays import F64, I64
from autopar.errors import InputError
from autopar.rates.parts.data_parallel import overlapped_traffic_s
from autopar.records import replace
from search.engines.candidate import Candidate
from search.planning.uniform.bounds.candidates import (
    ModelOffload,
    PipelineClass,
    StageCandidate,
    StageCandidates,
)
from search.planning.uniform.bounds.degrees import ExpertDegrees
from search.planning.uniform.bounds.layer_times import model_times
from search.planning.uniform.bounds.live import spread_bytes, spread_stages
from search.planning.uniform.bounds.offload import hosted_spread_bytes, leaves_of
from search.planning.uniform.bounds.partitions import spread_pipeline_s
from search.planning.uniform.expansion import CandidateExpander
from search.planning.uniform.memory import MemoryBounds, stacked
from search.planning.uniform.space import UniformSearchSpace

_MORE = 1.0 + 1e-9
"""Rounding factor of memory limits: sums in another order may exceed them by rounding."""


class Degrees(NamedTuple):
    """One combination of degrees."""

    choice: Candidate
    way: ExpertDegrees
    laid: int
    """Index into `UniformSearchSpace.attention_degrees`."""


class _Stages(NamedTuple):
    """Numbers of stages with their pipeline classes, one per row."""

    pp: I64
    micro_batches: I64
    classes: tuple[PipelineClass, ...]


class DegreeBlocks:
    """Bounds of combinations of degrees under the constraints and memory limit of an expander."""

    def __init__(self, space: UniformSearchSpace, openings: CandidateExpander) -> None:
        self._space = space
        self._openings = openings
        self._prices = openings.prices
        self._stages: dict[object, _Stages] = {}

    def seconds(self, degrees: Sequence[Degrees]) -> F64:
        """Return lower bounds of step seconds per sequence; infinite if nothing fits.

        0 for degrees that the engine may reject.
        """
        found = np.zeros(len(degrees))
        bounds = [self._memory(one.choice) for one in degrees]
        some = [at for at, one in enumerate(bounds) if one is not None]
        if some:
            memory = [one for one in bounds if one is not None]
            found[some] = self._seconds([degrees[at] for at in some], memory)
        return found

    def _memory(self, choice: Candidate) -> MemoryBounds | None:
        try:
            return self._prices.memory(choice)
        except InputError:
            return None

    def _seconds(self, degrees: Sequence[Degrees], memory: Sequence[MemoryBounds]) -> F64:
        batches = np.array([one.choice.global_batch for one in degrees])
        found = np.full(len(degrees), np.inf)
        staging = self._staging(degrees, memory)
        if len(staging.of):
            table = self._table(degrees, memory, staging)
            most = np.full(len(staging.of), self._openings.room.most_bytes * _MORE)
            whole, longest = self._openings.least_whole_s(table, most[:, None], most)
            fits = whole < np.inf
            least = spread_pipeline_s(
                self._prices, staging, np.where(fits, whole, 0.0), np.where(fits, longest, 0.0)
            )
            np.minimum.at(found, staging.at, np.where(fits, least, np.inf))
        found /= batches
        return found

    def _staging(
        self, degrees: Sequence[Degrees], memory: Sequence[MemoryBounds]
    ) -> StageCandidate:
        """Return the numbers of stages of all degrees, without and with ZeRO-3.

        `at` are indices of degrees. `shardings` are (index of degrees, ZeRO stage, stages); those
        without ZeRO-3 come first, one for each of the degrees, with 0 for both.
        """
        stages = [self._stages_of(one.choice) for one in degrees]
        at = np.repeat(np.arange(len(degrees)), [len(one.pp) for one in stages])
        pp, micro_batches = (np.concatenate([one[field] for one in stages]) for field in range(2))
        classes = [each for one in stages for each in one.classes]
        choices = [one.choice for one in degrees]
        shardings = {(one, 0, 0): one for one in range(len(degrees))}
        of, rows, states = [], [], []
        for full in (False, True):
            own = self._states(choices, memory, at, pp, micro_batches, full=full)
            legal = np.flatnonzero(own[:, 0] < np.inf)
            keys = zip(at[legal].tolist(), pp[legal].tolist(), strict=True)
            of += [
                shardings.setdefault((one, 3, staged) if full else (one, 0, 0), len(shardings))
                for one, staged in keys
            ]
            rows.append(legal)
            states.append(own[legal])
        left = np.concatenate(rows)
        return StageCandidate(
            stages=(),
            shardings=tuple(shardings),
            zeros=(),
            at=at[left],
            of=np.array(of, dtype=np.int64),
            pp=pp[left],
            micro_batches=micro_batches[left],
            layers=np.array([one.layers for one in classes], dtype=np.int64)[left],
            bubbles=np.array([one.bubble for one in classes])[left],
            sends_s=np.zeros(len(left)),
            spread=spread_stages(np.concatenate(states), [classes[one].live for one in left]),
        )

    def _stages_of(self, choice: Candidate) -> _Stages:
        openings, prices = self._openings, self._prices
        rank_samples = choice.micro_batch * prices.job.world // (choice.tp * choice.cp)
        key = (prices.stages(choice, openings.fixed), choice.global_batch, rank_samples)
        if key not in self._stages:
            rows = [
                (pp, micro_batches, each)
                for pp in key[0]
                for micro_batches in (choice.global_batch * pp // rank_samples,)
                for each in openings.classes(pp, micro_batches)
            ]
            pp, number = (np.array([row[at] for row in rows], dtype=np.int64) for at in (0, 1))
            self._stages[key] = _Stages(pp, number, tuple(each for _, _, each in rows))
        return self._stages[key]

    def _states(
        self,
        choices: Sequence[Candidate],
        memory: Sequence[MemoryBounds],
        of: I64,
        pp: I64,
        micro_batches: I64,
        *,
        full: bool,
    ) -> F64:
        """Return the least state bytes of any ZeRO stage by row, as `StateBytes`, shape [rows, 5].

        Infinite if no ZeRO stage is allowed. full : True for ZeRO-3 alone, False for the others
        """
        world = self._prices.job.world
        tensor = np.array([one.tp for one in choices])[of]
        experts = np.array([one.ep * one.etp for one in choices])[of]
        precisions = np.array([one.precision for one in choices])[of]
        found = np.full((len(of), 5), np.inf)
        for precision in {*precisions.tolist()}:
            for staged, several in ((False, False), (False, True), (True, False), (True, True)):
                some = np.flatnonzero(
                    (precisions == precision)
                    & ((pp > 1) == staged)
                    & ((micro_batches > 1) == several)
                )
                if not len(some):
                    continue
                ranks = world / (pp[some] * tensor[some]), world / (pp[some] * experts[some])
                for zero in self._openings.any_zeros(precision, staged=staged):
                    if (zero == 3) != full:
                        continue
                    states = memory[of[some[0]]].state_bytes(
                        zero, *ranks, staged=staged, several=several
                    )
                    own = np.stack([np.broadcast_to(one, len(some)) for one in states], axis=1)
                    found[some] = np.minimum(found[some], own)
        return found

    def _table(
        self, degrees: Sequence[Degrees], memory: Sequence[MemoryBounds], staging: StageCandidate
    ) -> StageCandidates:
        kinds, at = self._prices.kinds, staging.at
        device, host, forward, ends = self._layers_s(degrees)
        sizes = stacked([one.sizes for one in memory])
        # rows of ZeRO-3 follow those of the other stages
        model = np.array([one for one, _, _ in staging.shardings])
        traffic_s, tables_s = self._traffic_s(degrees, staging)
        exposed = np.where(
            traffic_s[:, None] > 0.0,
            overlapped_traffic_s(self._prices.target.machine, device[model], traffic_s[:, None]),
            device[model],
        )
        times = model_times(
            exposed,
            host[model],
            kinds.number + kinds.further,
            ends[model] + tables_s,
            (sizes.plain - sizes.full)[model],
        )
        own = sizes.only(at).without_activations(staging.spread.states.T[:, :, None])
        peaks, freed = spread_bytes(own, sizes.rows[at], kinds.number, staging.spread)
        offload, hosted = None, peaks[:, :-2]
        if self._openings.offloads:
            gone = [one.offloaded_activation_bytes for one in memory]
            overlap = self._prices.target.machine.stack.figures.overlap["fully_sharded"]
            offload = ModelOffload(
                forward_s=(forward @ kinds.number)[model, None],
                layers_s=(device[:, :-2] @ kinds.number)[model],
                device_s=times.device_of_all_s[:, :-2],
                host_s=times.host_of_all_s[:, :-2],
                more=np.where(traffic_s.any(axis=1), min(1.0, overlap), 1.0)[:, None],
                padding=np.array([[one.padding] for one in gone])[model],
                **leaves_of(kinds.number, np.array([one.leaves for one in gone])[model]),
            )
            hosted = hosted_spread_bytes(
                offload.only(staging.of), peaks, freed, staging.spread.most
            )
        return StageCandidates(
            staging=staging,
            bytes=peaks[None],
            freed=freed[None],
            hosted=hosted,
            offload=offload,
            model=staging.of,
            whole_s=times.whole_s[staging.of],
            layer_s=times.layer_s[staging.of],
            again=times.again[staging.of],
        )

    def _traffic_s(self, degrees: Sequence[Degrees], staging: StageCandidate) -> tuple[F64, F64]:
        """Return the ZeRO-3 traffic of a layer by type, and of both tables, by sharding.

        Both are 0 without ZeRO-3; shapes [shardings, layer types] and [shardings].
        """
        layers = np.zeros((len(staging.shardings), len(self._prices.kinds.blocks)))
        tables = np.zeros(len(layers))
        for row, (at, zero, pp) in enumerate(staging.shardings):
            if zero == 3:
                one = replace(degrees[at].choice, pp=pp, zero=3)
                layers[row], table = self._prices.least_traffic_s(one)
                tables[row] = 2.0 * table
        return layers, tables

    def _layers_s(self, degrees: Sequence[Degrees]) -> tuple[F64, F64, F64, F64]:
        """Return (device, host, forward, ends) seconds of layers by degrees, for `model_times`."""
        blocks, words = self._prices.kinds.blocks, len(self._prices.words) + 2
        device, host = np.empty((2, len(degrees), words, len(blocks)))
        forward, ends = np.empty((len(degrees), len(blocks))), np.empty(len(degrees))
        ways: dict[ExpertDegrees, list[int]] = {}
        for at, one in enumerate(degrees):
            ways.setdefault(one.way, []).append(at)
        for way, some in ways.items():
            laid = np.array([degrees[at].laid for at in some])
            ends[some] = self._space.times.ends_s(way, laid)
            for kind, block in enumerate(blocks):
                layer = self._space.times.layer(way, block, laid)
                device[some, :, kind], host[some, :, kind] = layer.device_s.T, layer.host_s.T
                forward[some, kind] = layer.forward_s
        return device, host, forward, ends

"""What a choice takes: its step time and memory as `autopar check` prices them, and lower bounds.

Exact prices are those of `autopar.estimate.step` and `autopar.memory.account`. The bounds are never
above them, and cost a hundredth: they say which choices need no price.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.errors import InputError
from autopar.estimate.job import Block, Experts, Job as StepJob, Recomputation, parameters
from autopar.estimate.layer import optimizer_time_s
from autopar.estimate.stack import STRAGGLERS
from autopar.estimate.step import (
    KnownLayers,
    ends_seconds,
    layer_seconds,
    stage_transfer_s,
    step_time,
)
from autopar.memory.activations import input_bytes, layer_saved_bytes
from autopar.memory.launch import Launch, chunks_of_sizes
from autopar.memory.risk import CONTEXT_BYTES, reserve_share
from autopar.memory.states import states_per_parameter
from autopar.records import dataclass
from search.check.assessment import Assessment, Target, Timing, assess
from search.check.job import job_of_launch
from search.uniform.choice import FULL, NONE, Choice, recompute_of
from search.uniform.engines import EngineSpace, Job, launch_of

__all__ = ["LayerPrice", "Prices", "Unit"]


class LayerPrice(NamedTuple):
    """One kind of layer on one rank, for one micro-batch."""

    block: Block
    number: int
    """Layers of this kind in the model."""
    device_s: float
    host_s: float
    expert_weights: float
    dense_weights: float
    """Of a rank."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """What choices of the same degrees, micro-batch and precision have in common."""

    choice: Choice
    """Of one stage, on as few ranks as these degrees have."""
    job: StepJob
    layers: tuple[LayerPrice, ...]
    kinds: tuple[int, ...]
    """Of every layer in execution order, which of `layers` it is."""
    first_s: float
    last_s: float
    """Of embedding, and of head and loss."""

    @property
    def layer_s(self) -> tuple[float, ...]:
        """Of every layer in execution order."""
        return tuple(self.layers[kind].device_s for kind in self.kinds)


class Prices:
    """Prices of the choices of one engine for one job."""

    def __init__(self, engine: EngineSpace, job: Job, target: Target) -> None:
        self.engine = engine
        self.job = job
        self.target = target
        self._known = KnownLayers(target.machine)
        self._counts: dict[object, tuple[tuple[tuple[int, int], ...], ...]] = {}
        self._transfers: dict[tuple[int, int, int], float] = {}
        self._updates: dict[tuple[int, int, int], float] = {}
        self._recomputed: dict[tuple[int, str], tuple[tuple[float, float], ...]] = {}
        self._saved: dict[tuple[int, str], tuple[int, ...]] = {}
        self._states: dict[object, float] = {}
        self._bases: dict[object, StepJob] = {}
        self._launches: dict[int, Launch] = {}
        self._zero = engine.zero[-1]
        self._with_trainer = engine.name != "megatron"
        nodes = max(1.0, job.world / target.machine.card.max_gpus_per_node)
        self._stragglers = 1.0 + STRAGGLERS * math.log2(nodes)
        # of kinds of launches that with the least to leave free
        least = min(reserve_share(kind, target.oom_risk) for kind in ("dense", "experts"))
        self._most_bytes = (target.capacity_bytes - CONTEXT_BYTES) / (1.0 + least)

    # ----------------------------------------------------------------------------------------------
    # What choices have in common, and bounds.

    def unit(self, choice: Choice) -> Unit:
        """Return what choices of these degrees have in common; raises InputError."""
        dp = math.lcm(choice.tp * choice.cp, choice.ep * choice.etp) // (choice.tp * choice.cp)
        plain = replace(
            choice,
            pp=1,
            vpp=1,
            recompute=NONE,
            global_batch=choice.micro_batch * dp,
            chunks=chunks_of_sizes([self.job.model.num_layers], 1, mtp=self.job.model.mtp),
        )
        for problem in self.engine.refused(self.job, plain):
            raise InputError(problem)
        job = replace(
            self._base(plain),
            cp=choice.cp,
            dp=dp,
            gpus=choice.tp * choice.cp * dp,
            ep=choice.ep,
            etp=choice.etp,
            micro_batch=choice.micro_batch,
            global_batch=plain.global_batch,
        )
        layers: list[LayerPrice] = []
        kinds: list[int] = []
        alike: dict[Block, int] = {}
        for block in job.blocks:
            one = replace(block, number=1)
            if one not in alike:
                alike[one] = len(layers)
                device, host = layer_seconds(self.target.machine, job, one, self._known)
                experts, dense = parameters(one)
                layers.append(
                    LayerPrice(
                        block=one,
                        number=0,
                        device_s=device,
                        host_s=host,
                        expert_weights=experts / (choice.ep * choice.etp),
                        dense_weights=dense / choice.tp,
                    )
                )
            at = alike[one]
            layers[at] = layers[at]._replace(number=layers[at].number + block.number)
            kinds += [at] * block.number
        first, last = ends_seconds(job, self._known)
        return Unit(
            choice=plain,
            job=job,
            layers=tuple(layers),
            kinds=tuple(kinds),
            first_s=first,
            last_s=last,
        )

    def _base(self, choice: Choice) -> StepJob:
        """Return a job of one data rank that has the settings of a choice."""
        ranks = choice.tp
        key = (ranks, choice.precision, choice.dispatcher, choice.overlap_experts)
        found = self._bases.get(key)
        if found is None:
            one = replace(
                choice, cp=1, ep=1, etp=choice.tp, micro_batch=1, global_batch=1, zero=self._zero
            )
            launch = self.engine.launch(replace(self.job, world=ranks), one)
            found = self._bases[key] = self._step_job(launch)
        return found

    def _unit_launch(self, unit: Unit) -> Launch:
        """Return the launch of a unit, of which memory is counted."""
        found = self._launches.get(id(unit))
        if found is None:
            world = replace(self.job, world=unit.job.gpus)
            found = self._launches[id(unit)] = self.engine.launch(world, unit.choice)
        return found

    def least_s(self, unit: Unit, choice: Choice, recompute: str = NONE) -> float:
        """Return seconds that no step of these degrees falls below, whatever its stages.

        M micro-batches of the whole model spread evenly over its ranks: no bubble, and nothing
        visible of the data-parallel ranks.
        """
        replicas = self.job.world / (choice.tp * choice.cp)
        rounds = choice.global_batch / (choice.micro_batch * replicas)
        return self._stragglers * rounds * self._whole_s(unit, recompute)

    def spread_s(self, unit: Unit, choice: Choice, recompute: str) -> float:
        """Return the same of a choice with its stages: as if all were equally long."""
        dp = self.job.world // (choice.tp * choice.cp * choice.pp)
        number = choice.global_batch // (choice.micro_batch * dp)
        rounds = number + (choice.pp - 1) / choice.vpp
        stage = self._whole_s(unit, recompute) / choice.pp + self._transfer_s(unit, choice)
        return self._stragglers * rounds * stage

    def recomputations(self, unit: Unit, words: Sequence[str]) -> tuple[str, ...]:
        """Return words of recomputation in the order of their times."""
        return tuple(sorted(words, key=lambda one: (self._whole_s(unit, one), one)))

    def stages_s(self, unit: Unit, choice: Choice) -> float:
        """Return seconds that the step of a choice does not fall below.

        Everything but the visible reduction of gradients, and the traffic of sharded weights: M
        times the longest stage, and the others once for each chunk.
        """
        dp = self.job.world // (choice.tp * choice.cp * choice.pp)
        number = choice.global_batch // (choice.micro_batch * dp)
        send = self._transfer_s(unit, choice)
        times = [seconds + send for seconds in self._stage_s(unit, choice)]
        longest = max(times)
        chunks = choice.vpp if choice.pp > 1 else 1
        pipeline = number * longest + (sum(times) - longest) / chunks
        return self._stragglers * pipeline + self._update_s(unit, choice)

    def _stage_s(self, unit: Unit, choice: Choice) -> list[float]:
        """Return the seconds of a micro-batch on each stage, transfers between them left out."""
        again, recompute = 0, choice.recompute
        if recompute.startswith("block"):
            again, recompute = int(recompute.removeprefix("block ")), NONE
        plain = self._seconds(unit, recompute)
        full = self._seconds(unit, FULL) if again else plain
        found = []
        for stage in self._kinds(unit, choice, again):
            device = sum(
                n * plain[kind][0] + r * full[kind][0] for kind, (n, r) in enumerate(stage)
            )
            host = sum(n * plain[kind][1] + r * full[kind][1] for kind, (n, r) in enumerate(stage))
            found.append([device, host])
        found[0][0] += unit.first_s
        found[-1][0] += unit.last_s
        return [_both_s(device, host) for device, host in found]

    def _kinds(
        self, unit: Unit, choice: Choice, again: int
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return of each stage how many layers of each kind there are: kept, and made again."""
        key = (unit.kinds, choice.chunks, again)
        found = self._counts.get(key)
        if found is None:
            found = self._counts[key] = tuple(
                _counted(unit.kinds, [chunk[1] for chunk in stage], len(unit.layers), again)
                for stage in choice.chunks
            )
        return found

    def _transfer_s(self, unit: Unit, choice: Choice) -> float:
        if choice.pp == 1:
            return 0.0
        key = (id(unit), choice.pp, choice.vpp)
        found = self._transfers.get(key)
        if found is None:
            dp = self.job.world // (choice.tp * choice.cp * choice.pp)
            job = replace(unit.job, pp=choice.pp, vpp=choice.vpp, dp=dp)
            found = self._transfers[key] = stage_transfer_s(self.target.machine, job)
        return found

    def _update_s(self, unit: Unit, choice: Choice) -> float:
        """Return what the optimizer takes of an average stage: no less than of the largest."""
        key = (id(unit), choice.pp, choice.zero)
        found = self._updates.get(key)
        if found is None:
            pp = choice.pp
            data = self.job.world // (choice.tp * pp)
            of_experts = self.job.world // (choice.ep * choice.etp * pp)
            dense = sum(layer.number * layer.dense_weights for layer in unit.layers) / pp
            experts = sum(layer.number * layer.expert_weights for layer in unit.layers) / pp
            resident = dense + experts
            own = dense / data + experts / of_experts if choice.zero else resident
            if choice.zero == 3:
                resident = own
            found = optimizer_time_s(self.target.machine, unit.job, own, resident)
            self._updates[key] = found
        return found

    def _whole_s(self, unit: Unit, recompute: str) -> float:
        device = host = 0.0
        for layer, (one, waited) in zip(unit.layers, self._seconds(unit, recompute), strict=True):
            device += layer.number * one
            host += layer.number * waited
        # the time of both together is convex and of the first degree: no sum of stages is below it
        return _both_s(device + unit.first_s + unit.last_s, host)

    def _seconds(self, unit: Unit, recompute: str) -> tuple[tuple[float, float], ...]:
        """Return the seconds of device and host of each kind of layer that computes this again."""
        key = (id(unit), recompute)
        found = self._recomputed.get(key)
        if found is None:
            what = _step_words(recompute)
            found = self._recomputed[key] = tuple(
                layer_seconds(
                    self.target.machine, unit.job, replace(layer.block, recompute=what), self._known
                )
                for layer in unit.layers
            )
        return found

    def may_fit(self, unit: Unit, choice: Choice, recompute: str) -> bool:
        """Return whether states and saved activations of the first stage leave room for the rest.

        Counted without what else there is, so that False is certain. recompute : instead of the
        choice's own.
        """
        return self.least_bytes(unit, choice, recompute) <= self._most_bytes

    def least_bytes(self, unit: Unit, choice: Choice, recompute: str) -> float:
        """Return bytes that the first stage has allocated at least, at its fullest moment."""
        if self._with_trainer:
            # moments of units that come and go: only the exact count is right, and it is quick
            return 0.0
        again = 0
        if recompute.startswith("block"):
            again, recompute = int(recompute.removeprefix("block ")), NONE
        kept, full = self._kept_bytes(unit, recompute), self._kept_bytes(unit, FULL)
        smallest = min(
            sum(one * kept[kind] + other * full[kind] for kind, (one, other) in enumerate(chunk))
            for chunk in self._first_stage(unit, choice, again)
        )
        # of chunks that differ each live one is the smallest at least
        return self._state_bytes(unit, choice) + self._live(choice) * smallest

    def _first_stage(
        self, unit: Unit, choice: Choice, again: int
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return of each chunk of the first stage its layers by kind: kept, and made again."""
        key = (unit.kinds, choice.chunks[0], again)
        found = self._counts.get(key)
        if found is None:
            found = self._counts[key] = tuple(
                _counted(unit.kinds, [chunk[1]], len(unit.layers), again)
                for chunk in choice.chunks[0]
            )
        return found

    def _live(self, choice: Choice) -> int:
        """Return how many forwards of chunks the first stage has saved at least, at the most."""
        dp = self.job.world // (choice.tp * choice.cp * choice.pp)
        number = choice.global_batch // (choice.micro_batch * dp)
        ahead = 1 if choice.overlap_experts else 0
        if choice.vpp == 1:
            return min(choice.pp - 1 + ahead + 1, number)
        warm = 2 * (choice.pp - 1) + (choice.vpp - 1) * choice.pp + ahead
        return min(warm + 1, number * choice.vpp)

    def _state_bytes(self, unit: Unit, choice: Choice) -> float:
        """Return weights, gradients and optimizer of the first stage, padding left out."""
        key = (id(unit), choice.chunks[0], choice.zero, choice.pp)
        found = self._states.get(key)
        if found is None:
            data = self.job.world // (choice.tp * choice.pp)
            of_experts = self.job.world // (choice.ep * choice.etp * choice.pp)
            precision = self._unit_launch(unit).precision
            each, of_expert = (
                states_per_parameter(precision, replicas=replicas, sharding=_SHARDING[choice.zero])
                for replicas in (data, of_experts)
            )
            model = self.job.model
            found = each * model.vocab * model.hidden / choice.tp
            for chunk in self._first_stage(unit, choice, 0):
                for layer, (number, _) in zip(unit.layers, chunk, strict=True):
                    found += number * each * layer.dense_weights
                    found += number * of_expert * layer.expert_weights
            self._states[key] = found
        return found

    def _kept_bytes(self, unit: Unit, recompute: str) -> tuple[int, ...]:
        """Return what a layer of each kind saves of a micro-batch."""
        key = (id(unit), recompute)
        found = self._saved.get(key)
        if found is None:
            launch = replace(self._unit_launch(unit), recompute=recompute_of(recompute))
            if recompute == FULL:
                found = (input_bytes(launch),) * len(unit.layers)
            else:
                found = tuple(
                    layer_saved_bytes(launch, experts=isinstance(layer.block.mlp, Experts))
                    for layer in unit.layers
                )
            self._saved[key] = found
        return found

    # ----------------------------------------------------------------------------------------------
    # Prices.

    def launch(self, choice: Choice) -> Launch:
        """Return the launch of a choice; raises InputError with what its engine refuses."""
        return launch_of(self.engine, self.job, choice)

    def timing(self, launch: Launch) -> Timing:
        """Return the step time of a launch; raises InputError where it has none."""
        job = self._step_job(launch)
        return Timing(job, step_time(self.target.machine, job, self._known), None)

    def counted(
        self, launch: Launch, timing: Timing, stages: Sequence[int] | None = None
    ) -> Assessment:
        """Return the price of a launch with the memory of some stages; default: of all."""
        return assess(launch, self.target, stages, timing)

    def fits(self, one: Assessment) -> bool:
        """Return whether the odds of running out of memory are as asked for."""
        return one.odds_of_oom <= self.target.oom_risk

    def _step_job(self, launch: Launch) -> StepJob:
        job = job_of_launch(launch)
        return job if self.job.skew is None else replace(job, skew=self.job.skew)


_SHARDING = ("none", "distributed", "zero2", "fsdp")


def _counted(
    kinds: tuple[int, ...], chunks: Sequence[tuple[int, ...]], number: int, again: int
) -> tuple[tuple[int, int], ...]:
    """Return the layers of chunks by kind: kept ones, and the first few that are made again."""
    counts = [[0, 0] for _ in range(number)]
    for chunk in chunks:
        for place, layer in enumerate(chunk):
            counts[kinds[layer]][place < again] += 1
    return tuple((one, other) for one, other in counts)


_HOST_POWER = 6.0
_ROUNDING = 1.0 - 1e-12
"""So that sums in another order are no larger than the exact ones."""


def _both_s(device_s: float, host_s: float) -> float:
    """Return `together_s` of two numbers, in a tenth of its time."""
    longest = max(device_s, host_s, 1e-300)
    powers = (device_s / longest) ** _HOST_POWER + (host_s / longest) ** _HOST_POWER
    return float(longest * powers ** (1.0 / _HOST_POWER) * _ROUNDING)


def _step_words(recompute: str) -> Recomputation:
    """Return what a choice's words make the backward compute again, as step times know it."""
    if recompute == FULL:
        return "full"
    if recompute == "op":
        return frozenset({"per_op"})
    return recompute_of(recompute).modules

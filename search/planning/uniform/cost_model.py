"""Step time and memory of a candidate: exact values as in `autopar check`, and lower bounds.

Exact values come from `autopar.price.step` and `autopar.price.account`. The bounds never exceed
them and take about 1 % of their CPU time, so most candidates are excluded by bounds. Memory bounds
are in `search.planning.uniform.memory`, vectorised time bounds of all degrees in
`search.planning.uniform.bounds.degrees`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from autopar.arrays import F64, I64
from autopar.errors import InputError
from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.price.account import Account, account_of
from autopar.price.assessment import Assessment, Target, Timing, assess
from autopar.price.job import job_of_run
from autopar.price.parameters import stage_weights
from autopar.price.states import states_of
from autopar.price.step import (
    LayerTimeCache,
    embedding_and_head_s,
    forward_seconds,
    further_exposed_experts,
    recompute_s,
    routing_job,
    seconds_of_times,
    stage_transfer_s,
    step_time,
    tied_s,
)
from autopar.rates.layer import LayerTimes
from autopar.rates.parts.data_parallel import (
    dense_group,
    dense_traffic_s,
    expert_group,
    expert_traffic_s,
    overlapped_traffic_s,
    reduction_s,
    table_traffic_s,
)
from autopar.rates.parts.operations import CommunicationTime
from autopar.rates.parts.optimizer import host_of, optimizer_time_s
from autopar.rates.stack import HIDDEN_REDUCTION, STRAGGLERS
from autopar.records import replace
from autopar.run.architecture import Mlp
from autopar.run.job import Block, Job as StepJob, Recomputation, halves, mtp_blocks, parameters
from autopar.run.run import Run
from autopar.run.strategy import Chunk, chunks_of_sizes, recomputing
from autopar.units import divisors
from search.engines.candidate import (
    NONE,
    Candidate,
    Constraints,
    Precision,
    allowed_values,
    recomputation_of,
)
from search.engines.space import (
    EngineContext,
    EngineSpace,
    fields_of,
    keeps_stages_busy,
    run_of,
    runs,
)
from search.planning.uniform.bounds.layer_times import (
    DegreeTimes,
    LayerParameterCounts,
    LayerTypes,
    MicroBatchTimes,
    SublayerTimes,
    attention_of,
    degrees_of,
    rows_of,
)
from search.planning.uniform.bounds.live import (
    SpreadStages,
    StageRows,
    spread_bytes,
    spread_live,
    spread_stages,
    stage_rows,
)
from search.planning.uniform.bounds.states import StateBytes
from search.planning.uniform.layout import Arrangement
from search.planning.uniform.memory import (
    MemoryBounds,
    MemoryBudget,
    OffloadBounds,
    RecomputedModules,
    StageBytes,
)

Pipeline = tuple[Schedule, int]
"""(schedule, chunks per stage)."""

_ROUNDING = 1.0 - 1e-9
"""Rounding factor: sums in another order must not exceed the exact ones."""
_MORE = 1.0 + 1e-9
"""Rounding factor of memory limits: sums in another order may exceed them by rounding."""
_LARGE = 1e9
"""Factor on the weights of a stage, large enough for transfers at peak bandwidth."""


class UniformCostModel:
    """Step times, memory and lower bounds of the candidates of one engine for one job."""

    def __init__(self, engine: EngineSpace, job: EngineContext, target: Target) -> None:
        self.engine = engine
        self.job = job
        self.target = target
        self.words = engine.recompute(job.model)
        self.modules = RecomputedModules(self.words)
        self.hosted = OffloadBounds(engine.offload(job.model))
        self.link_bytes_per_s = (
            host_of(target.machine).link_bytes_per_s if self.hosted.words else math.inf
        )
        self.known = LayerTimeCache(target.machine)
        self._units: dict[object, DegreeTimes] = {}
        self._bounds: dict[object, MemoryBounds] = {}
        self._layers: dict[object, dict[object, object]] = {}
        self._states: dict[Precision, dict[object, tuple[float, float, float, float]]] = {}
        self._transfers: dict[object, float] = {}
        self._updates: dict[object, float] = {}
        self._rows: dict[object, MicroBatchTimes] = {}
        self._traffic: dict[object, float] = {}
        self._bases: dict[object, StepJob] = {}
        self._halves: dict[object, SublayerTimes] = {}
        self._ends: dict[object, tuple[float, float]] = {}
        self._empty: dict[object, F64] = {}
        self._kinds: dict[object, Run] = {}
        self._trains: dict[object, bool] = {}
        self._runs: dict[object, bool] = {}
        self._layouts_bytes: dict[object, list[StageBytes]] = {}
        self._roundings: dict[object, list[int]] = {}
        self._timings: dict[Candidate, Timing | None] = {}
        self._accounts: dict[tuple[Candidate, int], Account] = {}
        self._stages: dict[object, tuple[int, ...]] = {}
        self._reductions: dict[object, float] = {}
        self._exposed: dict[object, float] = {}
        self._ties: dict[object, float] = {}
        # some optimizers are not sharded
        trained = (zero for zero in reversed(engine.zero) if self.has("bf16", zero))
        self._zero = next(trained, engine.zero[-1])
        domains = max(1.0, job.world / target.machine.domain_gpus)
        self.stragglers = 1.0 + STRAGGLERS * math.log2(domains)

    # ----------------------------------------------------------------------------------------------
    # Data shared by candidates

    def base(self, choice: Candidate) -> StepJob:
        """Return a step job on one stage and `tp` ranks, with the settings of a candidate."""
        settings = (choice.dispatcher, choice.overlap_experts, choice.tp_overlap)
        key = (choice.tp, choice.precision, *settings)
        found = self._bases.get(key)
        if found is None:
            one = Candidate(
                tp=choice.tp,
                etp=choice.tp,
                zero=self._zero,
                precision=choice.precision,
                dispatcher=choice.dispatcher,
                overlap_experts=choice.overlap_experts,
                tp_overlap=choice.tp_overlap,
                compiled=self.engine.compiled,
                chunks=self._one_stage(),
            )
            run = self.engine.launch(replace(self.job, world=choice.tp), one)
            found = self._bases[key] = self._step_job(run)
        return found

    def _one_stage(self) -> tuple[tuple[Chunk, ...], ...]:
        return chunks_of_sizes([self.job.model.num_layers], 1, mtp=self.job.model.mtp)

    def single_stage(self, choice: Candidate) -> Candidate:
        """Return a candidate with one stage and the fewest data-parallel ranks of its degrees."""
        inner = choice.tp * choice.cp
        dp = math.lcm(inner, choice.ep * choice.etp) // inner
        return replace(
            choice,
            pp=1,
            vpp=1,
            recompute=NONE,
            offload=NONE,
            global_batch=choice.micro_batch * dp,
            chunks=self._one_stage(),
        )

    def has(self, precision: Precision, zero: int) -> bool:
        """Return True if the engine supports the job's training at a precision and ZeRO stage."""
        key = (precision, zero)
        if key not in self._trains:
            compiled = self.engine.compiled
            one = self.single_stage(Candidate(precision=precision, zero=zero, compiled=compiled))
            try:
                self.engine.launch(replace(self.job, world=1), one)
                self._trains[key] = True
            except InputError:
                self._trains[key] = False
        return self._trains[key]

    def runs(self, choice: Candidate) -> bool:
        """Return True if a candidate meets the rules of the engine."""
        key = fields_of(choice)
        found = self._runs.get(key)
        if found is None:
            found = self._runs[key] = runs(self.engine, self.job, choice)
        return found

    def unit(self, choice: Candidate) -> DegreeTimes:
        """Return the times and sizes that candidates of equal degrees share.

        Raises InputError if the engine rejects the degrees.
        """
        key = degrees_of(choice)
        found = self._units.get(key)
        if found is None:
            found = self._units[key] = self._unit(self.single_stage(choice))
        return found

    @cached_property
    def kinds(self) -> LayerTypes:
        """Layer types of the model."""
        job = self.base(Candidate())
        alike: dict[Block, int] = {}
        kinds: list[int] = []
        for block in job.blocks:
            at = alike.setdefault(replace(block, number=1), len(alike))
            kinds += [at] * block.number
        of_mtp = mtp_blocks(job) if job.mtp else ()
        places = [alike.setdefault(replace(one, number=1), len(alike)) for one in of_mtp]
        number = [float(kinds.count(at)) for at in range(len(alike))]
        further = [float(job.mtp * places.count(at)) for at in range(len(alike))]
        return LayerTypes(
            tuple(alike),
            tuple(kinds),
            tuple(parameters(block) for block in alike),
            np.array(number),
            np.array(further),
        )

    def memory(self, choice: Candidate) -> MemoryBounds:
        """Return the memory bounds of a candidate's degrees; raises InputError as `unit` does."""
        return self._memory(self.single_stage(choice), self.kinds.of_layers)

    def _unit(self, plain: Candidate) -> DegreeTimes:
        dp = plain.global_batch // plain.micro_batch
        job = replace(
            self.base(plain),
            cp=plain.cp,
            heads_exchanged=plain.cp_kind == "a2a",
            keys_gathered=plain.cp_kind == "all-gather",
            dp=dp,
            gpus=plain.tp * plain.cp * dp,
            ep=plain.ep,
            etp=plain.etp,
            micro_batch=plain.micro_batch,
            global_batch=plain.global_batch,
        )
        kinds = self.kinds
        seconds = [self._layer_s(plain, job, at) for at in range(len(kinds.blocks))]
        key = ("ends", plain.tp, plain.cp, plain.micro_batch, plain.precision)
        if key not in self._ends:
            self._ends[key] = embedding_and_head_s(job, self.known)
        first, last = self._ends[key]
        return DegreeTimes(
            choice=plain,
            job=job,
            kinds=kinds.of_layers,
            blocks=kinds.blocks,
            weights=tuple(
                LayerParameterCounts(int(count), dense / job.tp, experts / (job.ep * job.etp))
                for (experts, dense), count in zip(kinds.parameters, kinds.number, strict=True)
            ),
            number=kinds.number,
            further=kinds.further,
            device_s=np.stack([one.device_s for one in seconds], axis=1),
            host_s=np.stack([one.host_s for one in seconds], axis=1),
            forward_s=np.array([one.forward_s for one in seconds]),
            experts_s=np.array([one.experts_s for one in seconds]),
            first_s=first,
            last_s=last,
            bounds=self._memory(plain, kinds.of_layers),
        )

    def _layer_s(self, plain: Candidate, job: StepJob, at: int) -> SublayerTimes:
        """Return the micro-batch seconds of a layer, as the sum of attention and MLP.

        Attention does not depend on the expert sharding. Experts depend on the number of tokens
        that a rank routes, not on the degrees that result in this number.

        at : index of the layer type.
        """
        block = self.kinds.blocks[at]
        if block.attention is None or block.mlp is None:
            return self._half(job, block, (*degrees_of(plain), at))
        attention = attention_of(plain)
        alone = replace(job, ep=1, etp=1, dispatcher="all_to_all", skew=1.0)
        mixer, other = halves(block)
        first = self._half(alone, mixer, (*attention, at, "attention"))
        if isinstance(block.mlp, Mlp):
            tokens = replace(alone, heads_exchanged=False)
            second = self._half(tokens, other, (*attention, at, "mlp"))
        else:
            routed = routing_job(job, block.mlp)
            way = (plain.ep, plain.etp, plain.dispatcher, plain.overlap_experts, plain.precision)
            # layers with shared experts use the whole job, as these communicate between tensor
            # ranks
            key = attention if routed is job else (routed.seq,)
            second = self._half(routed, other, (*key, *way, at, "experts"))
        # each half contains the host overhead of a whole layer
        return SublayerTimes(
            first.device_s + second.device_s,
            first.host_s + second.host_s - self.empty_s(job),
            first.forward_s + second.forward_s,
            first.experts_s + second.experts_s,
        )

    def empty_s(self, job: StepJob) -> F64:
        """Return the host overhead of an empty layer by recomputation policy, seconds."""
        if job.graphs not in self._empty:
            nothing = LayerTimes(
                (), CommunicationTime(), CommunicationTime(), CommunicationTime(), 0.0, held=None
            )
            self._empty[job.graphs] = self.by_word(job, nothing).host_s
        return self._empty[job.graphs]

    def _half(self, job: StepJob, block: Block, key: object) -> SublayerTimes:
        """Return the seconds of a layer or sublayer; key : all degrees that determine them."""
        found = self._halves.get(key)
        if found is None:
            found = self._halves[key] = self.by_word(job, self.known.times(job, block))
        return found

    def by_word(self, job: StepJob, times: LayerTimes, size: tuple[int, ...] = ()) -> SublayerTimes:
        """Return the seconds of a layer or sublayer by recomputation policy.

        size : shape of the fields of `times`, such as one value per degree.
        """
        machine = self.target.machine
        plain = seconds_of_times(machine, job, times)
        full = seconds_of_times(machine, replace(job, recompute="full"), times)
        device, host = (np.full((len(self.words) + 2, *size), one, dtype=float) for one in plain)
        # host overhead increases with full recomputation of a layer only
        again = np.zeros((len(self.modules.names), *size))
        for at, one in enumerate(self.modules.names):
            again[at] = recompute_s(machine, job, times, _step_words(one))
        device[:-2] += self.modules.sums(again)
        for row, most in zip((device, host), full, strict=True):
            row[self.modules.full] = row[-1] = most
        sent = times.experts.forward_s + times.experts.backward_s if job.overlap_experts else 0.0
        return SublayerTimes(device, host, forward_seconds(machine, job, times), sent)

    def _memory(self, plain: Candidate, kinds: tuple[int, ...]) -> MemoryBounds:
        """Return memory bounds of a candidate; they ignore overlap of expert communication.

        kinds : type index of every layer.
        """
        own = replace(plain, overlap_experts=False)
        key = degrees_of(own)
        found = self._bounds.get(key)
        if found is None:
            world = plain.tp * plain.cp * (plain.global_batch // plain.micro_batch)

            def variant(zero: int, several: bool) -> Run:
                batch = (1 + several) * own.global_batch
                one = replace(own, zero=zero, global_batch=batch)
                return self.engine.launch(replace(self.job, world=world), one)

            # TP overlap needs buffers, but layers save no more
            alone = replace(own, tp_overlap=False)
            known = self._layers.setdefault(attention_of(alone), {})
            modules, hosted = self.modules, self.hosted
            states = self._states.setdefault(own.precision, {})
            one = variant(self._zero, False)
            found = MemoryBounds(one, modules, hosted, kinds, variant, known, states)
            self._bounds[key] = found
        return found

    def stages(self, choice: Candidate, fixed: Constraints) -> tuple[int, ...]:
        """Return the allowed numbers of pipeline stages.

        Ranks, experts and global batch must divide evenly over them, and `keeps_stages_busy` must
        hold.
        """
        inner, expert = choice.tp * choice.cp, choice.ep * choice.etp
        key = (inner, expert, choice.micro_batch, choice.global_batch, fixed.pp, fixed.dp)
        found = self._stages.get(key)
        if found is None:
            most = self.job.model.num_layers if self.engine.schedules else 1
            found = self._stages[key] = tuple(
                pp
                for pp in allowed_values(divisors(self.job.world // inner), fixed.pp)
                if pp <= most
                and allowed_values((self.job.world // (inner * pp),), fixed.dp)
                and self.job.world // pp % expert == 0
                and choice.global_batch % (choice.micro_batch * self.job.world // (inner * pp)) == 0
                and keeps_stages_busy(self.micro_batches(replace(choice, pp=pp)), pp)
            )
        return found

    # ----------------------------------------------------------------------------------------------
    # Bounds

    def rows_s(self, unit: DegreeTimes, choice: Candidate) -> MicroBatchTimes:
        """Return micro-batch times with the weight traffic of ZeRO-3, which overlaps with layers.

        Other ZeRO stages have no such traffic. The traffic is the minimum over all numbers of HSDP
        replicas.
        """
        key = (unit, choice.pp if choice.zero == 3 else 0)
        found = self._rows.get(key)
        if found is None:
            device, traffic, table = unit.device_s, np.zeros(len(unit.number)), 0.0
            if choice.zero == 3:
                traffic, table = self.least_traffic_s(choice)
                device = np.asarray(overlapped_traffic_s(self.target.machine, device, traffic))
            visible = min(1.0, self.target.machine.stack.figures.overlap["fully_sharded"])
            found = self._rows[key] = rows_of(unit, device, traffic, table, visible)
        return found

    def least_traffic_s(self, choice: Candidate) -> tuple[F64, float]:
        """Return the ZeRO-3 traffic seconds of a layer by type, and of one embedding table.

        Both are minima over the numbers of HSDP replicas.
        """
        data = self.job.world // (choice.tp * choice.cp * choice.pp)
        numbers = divisors(data) if choice.zero in self.engine.replicated else [1]
        layers, tables = zip(
            *(self._traffic_s(choice, data, copies) for copies in numbers), strict=True
        )
        # one transfer of both tables takes no longer than two; each end gets half of it
        return np.min(layers, axis=0), min(tables) / 2.0

    def _traffic_s(self, choice: Candidate, data: int, copies: int) -> tuple[list[float], float]:
        """Return the ZeRO-3 traffic seconds of a layer by type, and of all embedding tables.

        Traffic of adapters is ignored, as they are small.

        data : data-parallel size.
        copies : number of HSDP replicas.
        """
        machine = self.target.machine
        job = None
        found = []
        inner = {"dense": choice.tp, "experts": choice.ep * choice.etp, "tables": choice.tp}
        for part, at in (
            *((part, at) for at in range(len(self.kinds.blocks)) for part in ("dense", "experts")),
            ("tables", 0),
        ):
            key = (part, at, inner[part], choice.pp, copies, choice.precision)
            if key not in self._traffic:
                if job is None:
                    unit = self.unit(choice)
                    job = replace(
                        unit.job, pp=choice.pp, dp=data, gpus=self.job.world, replicas=copies
                    )
                if part == "dense":
                    seconds = dense_traffic_s(machine, job, unit.blocks[at])
                elif part == "experts":
                    seconds = expert_traffic_s(machine, job, unit.blocks[at])
                else:
                    table = job.vocab * job.blocks[0].hidden / job.tp
                    seconds = table_traffic_s(machine, job, (1 if job.tied else 2) * table)
                self._traffic[key] = seconds
            found.append(self._traffic[key])
        return [sum(found[at : at + 2]) for at in range(0, len(found) - 1, 2)], found[-1]

    def micro_batches(self, choice: Candidate) -> int:
        """Return the number of micro-batches per step and data-parallel rank."""
        dp = self.job.world // (choice.tp * choice.cp * choice.pp)
        return choice.global_batch // (choice.micro_batch * dp)

    def transfer_s(self, unit: DegreeTimes, choice: Candidate) -> float:
        """Return the seconds that sends between stages add to a stage, per micro-batch."""
        if choice.pp == 1:
            return 0.0
        key = (choice.tp, choice.cp, choice.micro_batch, choice.pp, choice.vpp, choice.precision)
        found = self._transfers.get(key)
        if found is None:
            dp = self.job.world // (choice.tp * choice.cp * choice.pp)
            job = replace(unit.job, pp=choice.pp, vpp=choice.vpp, dp=dp)
            found = self._transfers[key] = stage_transfer_s(self.target.machine, job)
        return found

    def exposed_experts(self, unit: DegreeTimes, choice: Candidate) -> float:
        """Return the share of `DegreeTimes.experts_s` that adds to the device seconds."""
        key = (choice.overlap_experts, choice.pp, choice.vpp, self.micro_batches(choice))
        if key not in self._exposed:
            dp = self.job.world // (choice.tp * choice.cp * choice.pp)
            batch = choice.global_batch
            job = replace(unit.job, pp=choice.pp, vpp=choice.vpp, dp=dp, global_batch=batch)
            self._exposed[key] = further_exposed_experts(job)
        return self._exposed[key]

    def visible_s(self, reduction_s: F64 | float, pipeline_s: F64, micro_batches: int | I64) -> F64:
        """Return the exposed gradient reduction, seconds.

        Adding it to a lower bound of pipeline time gives a lower bound of the sum: the part hidden
        in the last backward grows with the pipeline time, but more slowly.

        reduction_s : results of `reduction_s`
        pipeline_s : lower bounds of pipeline seconds
        """
        hiding = self.target.machine.stack.figures.overlap["gradients"]
        seen = np.maximum(0.0, reduction_s - hiding * pipeline_s / micro_batches)
        return np.asarray(seen + HIDDEN_REDUCTION * reduction_s)

    def reduction_s(self, unit: DegreeTimes, choice: Candidate) -> float:
        """Return a lower bound of the gradient reduction and weight gathering time, seconds.

        It is that of an average stage at peak bandwidth: then time is linear in the weights, and
        the largest stage takes no less. The result is the minimum over the numbers of HSDP
        replicas; 0 with ZeRO-3, or if only adapters are trained.
        """
        if choice.zero == 3 or unit.job.frozen:
            return 0.0
        degrees = (choice.tp, choice.cp, choice.ep, choice.etp, choice.pp)
        key = (*degrees, choice.zero, choice.precision)
        if key not in self._reductions:
            self._reductions[key] = self._reduction_s(unit, choice)
        return self._reductions[key]

    def tied_s(self, unit: DegreeTimes, choice: Candidate) -> float:
        """Return the seconds of the all-reduce between copies of the embedding.

        0 if MTP modules may be on the first stage, as in V-shaped schedules.
        """
        key = (choice.tp, choice.cp, choice.pp, choice.zero, choice.precision)
        if key not in self._ties:
            found = 0.0
            v_shaped = any(SCHEDULES[one].v_shaped for one in self.engine.schedules)
            if choice.pp > 1 and (unit.job.tied or (unit.job.mtp and not v_shaped)):
                job = self._step_job(unit.bounds.variant(choice.zero))
                dp = self.job.world // (choice.tp * choice.cp * choice.pp)
                own = replace(job, pp=choice.pp, dp=dp, gpus=self.job.world, stage_mtp=())
                found = tied_s(self.target.machine, own)
            self._ties[key] = found
        return self._ties[key]

    def _reduction_s(self, unit: DegreeTimes, choice: Candidate) -> float:
        data = self.job.world // (choice.tp * choice.cp * choice.pp)
        numbers = divisors(data) if choice.zero in self.engine.replicated else [1]
        job = self._step_job(unit.bounds.variant(choice.zero))
        dense = sum(one.number * one.dense for one in unit.weights) / choice.pp
        experts = sum(one.number * one.experts for one in unit.weights) / choice.pp
        least = math.inf
        for copies in numbers:
            own = replace(
                job,
                pp=choice.pp,
                dp=data,
                gpus=self.job.world,
                replicas=copies,
                zero=choice.zero,
                ep=choice.ep,
                etp=choice.etp,
            )
            held = {dense_group(own): dense * _LARGE}
            if experts:
                held[expert_group(own)] = experts * _LARGE
            least = min(least, sum(reduction_s(self.target.machine, own, held)[:2]) / _LARGE)
        return least

    def update_s(self, unit: DegreeTimes, choice: Candidate) -> float:
        """Return the optimizer seconds of an average stage, a lower bound for the largest stage.

        0 if only adapters are trained, as these are small.
        """
        if unit.job.frozen:
            return 0.0
        degrees = (choice.tp, choice.cp, choice.ep, choice.etp, choice.pp)
        key = (*degrees, choice.zero, choice.dp_replicate, choice.precision)
        found = self._updates.get(key)
        if found is None:
            pp = choice.pp
            data, of_experts = self._shards(choice)
            dense = sum(one.number * one.dense for one in unit.weights) / pp
            experts = sum(one.number * one.experts for one in unit.weights) / pp
            resident = dense + experts
            own = dense / data + experts / of_experts if choice.zero else resident
            if choice.zero == 3:
                resident = own
            job = self._step_job(unit.bounds.variant(choice.zero))
            found = optimizer_time_s(self.target.machine, job, own, resident)
            self._updates[key] = found
        return found

    # ----------------------------------------------------------------------------------------------
    # Memory

    def max_peak_bytes(self, choice: Candidate, room: MemoryBudget, *, again: bool) -> float:
        """Return the largest peak allocated that fits, bytes; again : True for recomputation."""
        key = (choice.precision, choice.dispatcher, choice.tp_overlap, choice.zero, again)
        run = self._kinds.get(key)
        if run is None:
            run = self.memory(choice).variant(choice.zero)
            if again and not run.kernels.torch_layers:
                run = replace(run, strategy=recomputing(run.strategy, "full"))
            self._kinds[key] = run
        return room.bytes_for(run) * _MORE

    def least_bytes(
        self, unit: DegreeTimes, choice: Candidate, arrangement: Arrangement
    ) -> tuple[F64, F64]:
        """Return lower bounds of the peak stage's bytes, by policy and by N of `block N`."""
        stages = self.stage_bytes(unit, choice, arrangement)
        words, blocks = [one.words for one in stages], [one.blocks for one in stages]
        return np.max(words, axis=0) * _ROUNDING, np.max(blocks, axis=0) * _ROUNDING

    def stage_bytes(
        self, unit: DegreeTimes, choice: Candidate, arrangement: Arrangement
    ) -> list[StageBytes]:
        """Return lower bounds of bytes of each distinct stage, without activation offload."""
        key = (unit, choice)
        if key not in self._layouts_bytes:
            self._layouts_bytes[key] = self._bytes_of_stages(unit, choice, arrangement)
        found, more = self._layouts_bytes[key], self.rounding_of(choice)
        if more is None:
            return found
        return [
            one._replace(words=one.words + rounding, blocks=one.blocks + rounding)
            for one, rounding in zip(found, more, strict=True)
        ]

    def rounding_of(self, choice: Candidate) -> list[int] | None:
        """Return the rounding of the states to allocator blocks by distinct stage, bytes.

        None before `count_rounding` for a candidate with these states.
        """
        return self._roundings.get(self._same_states(choice))

    def count_rounding(self, choice: Candidate, run: Run, stages: Sequence[int]) -> None:
        """Let the memory bounds of candidates with these states include their rounding to blocks.

        It takes as long as an exact count, so it is known only where one has exceeded the memory.

        run, stages : run of the candidate, and its distinct stages
        """
        key = self._same_states(choice)
        if key not in self._roundings and not run.kernels.torch_layers:
            self._roundings[key] = [
                states_of(run, stage_weights(run, stage)).rounding_bytes(run) for stage in stages
            ]

    def _same_states(self, choice: Candidate) -> object:
        """Return a key that candidates with the same model states in the same layout share."""
        several = self.micro_batches(choice) > 1
        same = replace(choice, micro_batch=1, global_batch=1, recompute=NONE, offload=NONE)
        return (same, several)

    def _bytes_of_stages(
        self, unit: DegreeTimes, choice: Candidate, arrangement: Arrangement
    ) -> list[StageBytes]:
        rows, states = self.stage_rows(choice, arrangement), self.states_of(unit, choice)
        return unit.bounds.of_stages(rows, zero=choice.zero, states=states)

    def stage_rows(self, choice: Candidate, arrangement: Arrangement) -> StageRows:
        """Return the distinct stages of a layer partition with their live micro-batches."""
        return stage_rows(
            arrangement,
            schedule=choice.schedule,
            stages=choice.pp,
            chunks=choice.vpp,
            micro_batches=self.micro_batches(choice),
        )

    def states_of(self, unit: DegreeTimes, choice: Candidate) -> StateBytes:
        """Return the state bytes of a candidate per trained parameter, and its frozen part."""
        staged, several = choice.pp > 1, self.micro_batches(choice) > 1
        ranks = self._shards(choice)
        return unit.bounds.state_bytes(choice.zero, *ranks, staged=staged, several=several)

    def _shards(self, choice: Candidate) -> tuple[int, int]:
        """Return the numbers of ranks that shard the states of dense layers, and of experts."""
        ranks = self.job.world // (choice.pp * choice.dp_replicate)
        return ranks // choice.tp, ranks // (choice.ep * choice.etp)

    def balanced_stage_bound_bytes(self, unit: DegreeTimes, choice: Candidate) -> tuple[F64, F64]:
        """Return the results of `many_spread_bytes` for the stages and sharding of a candidate.

        They hold for any pipeline.
        """
        states = np.array([self.states_of(unit, choice)])
        live = spread_live(choice.pp, self.micro_batches(choice))
        found, most = self.many_spread_bytes(unit, spread_stages(states, [live]))
        return found[0], most[0]

    def many_spread_bytes(self, unit: DegreeTimes, stages: SpreadStages) -> tuple[F64, F64]:
        """Return the results of `spread_bytes` for the layers of some degrees."""
        sizes = unit.bounds.sizes
        own = sizes.without_activations(stages.states.T[:, :, None])  # [row, kind]
        return spread_bytes(own, sizes.rows[None], unit.number, stages)

    # ----------------------------------------------------------------------------------------------
    # Prices

    def run(self, choice: Candidate) -> Run:
        """Return the run of a candidate; raises InputError if its engine rejects it."""
        return run_of(self.engine, self.job, choice)

    def timed(self, choice: Candidate) -> Timing | None:
        """Return the timing of a candidate; None if it is illegal or has no step time."""
        if choice not in self._timings:
            try:
                job = self._step_job(self.run(choice))
                step = step_time(self.target.machine, job, self.known)
                self._timings[choice] = Timing(job, step, None)
            except InputError:
                self._timings[choice] = None
        return self._timings[choice]

    def account(self, choice: Candidate, stage: int, run: Run) -> Account:
        """Return the exact memory account of a stage."""
        key = (choice, stage)
        found = self._accounts.get(key)
        if found is None:
            found = self._accounts[key] = account_of(run, stage)
        return found

    def price_run(
        self, choice: Candidate, run: Run, target: Target, stages: Sequence[int]
    ) -> Assessment:
        """Return the assessment of a candidate; stages : stages with counted memory."""
        return assess(
            run,
            target,
            stages,
            timing=self.timed(choice),
            count=lambda one, stage: self.account(choice, stage, one),
        )

    def _step_job(self, run: Run) -> StepJob:
        job = job_of_run(run)
        if self.job.attended is not None:
            job = replace(job, attended=self.job.attended)
        return job if self.job.skew is None else replace(job, skew=self.job.skew)


def _step_words(recompute: str) -> Recomputation:
    """Return a recomputation policy in the representation of `autopar.price.step`."""
    found = recomputation_of(recompute)
    return frozenset({"per_op"}) if found == "op" else found

"""Time of a training step, from the times of layers, stages and the pipeline.

Layer times are from `autopar.rates.layer`. This module adds recomputation, exposed host overhead,
communication of sharded weights, the pipeline bubble, the gradient reduction and the optimizer. The
terms of a `StepTime` add up to its total.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from autopar.pipeline.formulas import step_s
from autopar.pipeline.orders import rank_of, warmup_chunks
from autopar.pipeline.schedules import schedule_of_chunks
from autopar.rates.collectives import TRANSFER_SYNCHRONISE_S, p2p_time_s
from autopar.rates.constants import ELEMENT_BYTES
from autopar.rates.layer import (
    LayerTimes,
    embedding_times,
    head_sends_s,
    head_times,
    layer_times,
    mtp_times,
    overlapped_tensor_share,
    recomputed_s,
    sent_again,
    tensor_parallel_comm,
)
from autopar.rates.measured import host_device_time_s
from autopar.rates.parts.data_parallel import (
    ReplicaGroup,
    dense_group,
    expert_group,
    frozen_bytes,
    gradient_bytes,
    reduction_s,
    sharding_s,
    table_traffic_s,
    update_s,
)
from autopar.rates.parts.operations import (
    CommunicationTime,
    KernelTime,
    Machine,
    Real,
    as_number,
    transfer_s,
)
from autopar.rates.parts.optimizer import (
    activation_copies_s,
    orthogonalization_s,
    weight_copies_s,
    weights_cast_s,
)
from autopar.rates.stack import HIDDEN_REDUCTION, STRAGGLERS
from autopar.records import Record, replace
from autopar.run.architecture import Experts, Mlp
from autopar.run.job import (
    Block,
    Job,
    Recomputation,
    adapter_parameters,
    data_shards,
    expert_shards,
    halves,
    mtp_blocks,
    parameters,
    stage_blocks,
)
from autopar.run.rules import BLOCK, JOB, POSITIVE, refuse

TERMS = (
    "gemm",
    "attention",
    "memory",
    "cast",
    "recompute",
    "tensor",
    "context",
    "experts",
    "transfer",
    "host",
    "offload",
    "sharding",
    "bubble",
    "gradients",
    "optimizer",
    "stragglers",
)
"""Terms of a step: kernels by kind, recomputation, communication by axis, host and pipeline."""

_INTERLEAVED_TRANSFER = 0.6
"""Exposed share of the transfers between stages of an interleaved pipeline."""
_PLAIN_EXPERT = 0.5
"""Host time of a local expert in 16 bits or more over that in fewer bits, `host.expert_s`."""
_EXPOSED_EXPERTS = 0.5
"""Exposed share of dispatch and combine that overlap with another micro-batch."""


def _exposed_experts(job: Job) -> float:
    """Return the exposed share of the time of dispatch and combine in a step, 0 to 1.

    Warm-up forwards have no backward to overlap with, and final backwards no forward. With a single
    micro-batch nothing is hidden (moe_a2a_overlap.md of Megatron-LM). The share is that of the last
    stage, whose warm-up is the shortest; warm-up of earlier stages is part of the bubble.
    """
    if not job.overlap_experts:
        return 1.0
    chunks = job.vpp if job.pp > 1 else 1
    number = job.micro_batches * chunks
    sizes = {"stages": job.pp, "chunks": chunks, "micro_batches": job.micro_batches}
    alone = warmup_chunks(schedule_of_chunks(chunks), job.pp - 1, **sizes, ahead=1)
    return 1.0 - (1.0 - _EXPOSED_EXPERTS) * (number - alone) / number


def further_exposed_experts(job: Job) -> float:
    """Return the exposed share of dispatch and combine above that of many micro-batches."""
    return _exposed_experts(job) - _least_exposed_experts(job)


def _least_exposed_experts(job: Job) -> float:
    return _EXPOSED_EXPERTS if job.overlap_experts else 1.0  # the limit for many micro-batches


class StageTime(NamedTuple):
    """Seconds of one pipeline stage: per micro-batch by term, and once per step."""

    terms_s: Mapping[str, float]
    """Seconds of a micro-batch by term, transfers between stages included."""
    forward_s: Mapping[str, float]
    """Forward part of `terms_s`."""
    weight_s: Mapping[str, float]
    """Weight-gradient part of `terms_s`; the remainder is input gradients and recomputation."""
    reduction_s: float
    """Seconds of the gradient reduction over data-parallel ranks, before overlap."""
    gather_s: float
    """Seconds of the parameter all-gather after the optimizer step, before overlap."""
    reduction_bytes: float
    """Bytes of the gradient reduction."""
    gather_bytes: float
    """Bytes of the parameter all-gather."""
    optimizer_s: float
    """Seconds of the optimizer step."""


class StepTime(Record):
    """Seconds of a step, by term and stage."""

    total_s: float
    terms_s: Mapping[str, float]
    """Seconds by term of `TERMS`; they add up to the total."""
    stage_s: tuple[float, ...]
    """Seconds of one micro-batch on each stage."""
    optimizer_s: float
    pipeline_s: float
    """Seconds of all micro-batches, without the terms that occur once per step."""
    weight_cast_s: float
    """Seconds of the term `cast` that occur once per step."""
    early_reduction_s: float
    """Exposed seconds of the term `gradients` after each micro-batch but the last."""
    tied_s: float
    """Seconds of the term `gradients` for the two copies of a tied embedding."""
    transfer_bytes: float
    """Bytes that a rank sends to the next stage per micro-batch and chunk."""
    stages: tuple[StageTime, ...]


class _Stage(NamedTuple):
    """Seconds of one micro-batch on a stage."""

    terms: dict[str, float]
    total_s: float
    weights: Mapping[ReplicaGroup, float]
    """Number of parameters per rank, by replica group."""
    forward: Mapping[str, float]
    weight: Mapping[str, float]
    """Weight-gradient part of `terms`; `forward` is the forward part. The remainder is input
    gradients and recomputation."""


_STEP_ONLY = frozenset({
    "name", "blocks", "global_batch", "tied", "gpus", "pp", "dp", "vpp", "stage_layers",
    "vocab_tp", "vocab_zero", "zero", "replicas", "reshard", "recompute", "graphs",
    "overlap_experts", "orthogonalized", "overlap_tensor", "overlap_gradients",
    "reduce_every_micro_batch", "optimizer_bytes", "optimizer", "mtp", "stage_mtp", "schedule",
    "state_bytes", "optimizer_offload", "offloaded_master", "overlap_offload",
    "offloaded_weights", "host_adam", "paged_bytes",
})  # fmt: skip
"""Job fields that affect the step but not the times of a single layer."""


class LayerTimeCache:
    """Cache of the times of layers, embedding and head on one machine, shared by all jobs."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        names = [name for name in Job.__struct_fields__ if name not in _STEP_ONLY]
        self._sizes = attrgetter(*names)
        self._layers: dict[object, LayerTimes] = {}
        self._embeddings: dict[object, tuple[KernelTime, ...]] = {}
        self._heads: dict[object, tuple[tuple[KernelTime, ...], float]] = {}
        self._modules: dict[object, tuple[tuple[KernelTime, ...], float]] = {}

    def times(self, job: Job, block: Block) -> LayerTimes:
        """Return the times of one layer of a block with the job's degrees."""
        # number of layers, recomputation and sharding do not affect the kernels of a layer
        alike = replace(
            block, number=1, recompute=None, zero=None, tp=None, cp=None, offloaded_bytes=0.0
        )
        key = (self._sizes(job), alike)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = self._both_halves(job, alike)
        return found

    def _both_halves(self, job: Job, block: Block) -> LayerTimes:
        """Return the times of a layer from separately cached times of its attention and its MLP.

        Attention does not depend on the degrees of experts. Experts depend only on the number of
        tokens that a rank routes.
        """
        if block.attention is None or block.mlp is None:
            return layer_times(self._machine, job, block)
        # attention is independent of experts, and an MLP of the distribution of heads and tokens
        plain = replace(job, ep=1, etp=1, dispatcher="all_to_all", skew=1.0)
        mixer, other = halves(block)
        first = self._half(plain, mixer)
        if isinstance(block.mlp, Mlp):
            second = self._half(replace(plain, heads_exchanged=False), other)
        else:
            second = self._half(routing_job(job, block.mlp), other)
        return LayerTimes(
            parts=(*first.parts, *second.parts),
            tensor=_together(first.tensor, second.tensor),
            context=first.context,
            experts=second.experts,
            # one kernel quantises all weights of a layer, with the job's own degrees
            weight_cast_s=weights_cast_s(self._machine, job, block),
            held=second.held,
        )

    def _half(self, job: Job, block: Block) -> LayerTimes:
        key = (self._sizes(job), block)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = layer_times(self._machine, job, block)
        return found

    def embedding(self, job: Job) -> tuple[KernelTime, ...]:
        """Return the kernel times of the embedding.

        job : job with the degrees of embedding and head.
        """
        key = (self._sizes(job), job.blocks[0].hidden)
        found = self._embeddings.get(key)
        if found is None:
            found = self._embeddings[key] = embedding_times(self._machine, job)
        return found

    def mtp(self, job: Job) -> tuple[tuple[KernelTime, ...], float]:
        """Return (kernel times, seconds of communication) of an MTP layer's norms and projection.

        Its transformer layer, embedding and head are excluded.
        """
        key = (self._sizes(job), job.blocks[-1].hidden)
        found = self._modules.get(key)
        if found is None:
            sends = tensor_parallel_comm(self._machine, job, job.blocks[-1].hidden)
            seconds = sends.forward_s + sends.backward_s
            found = self._modules[key] = mtp_times(self._machine, job), seconds
        return found

    def head(self, job: Job) -> tuple[tuple[KernelTime, ...], float]:
        """Return (kernel times, seconds of communication) of head and loss.

        job : job with the degrees of embedding and head.
        """
        key = (self._sizes(job), job.blocks[-1].hidden)
        found = self._heads.get(key)
        if found is None:
            found = head_times(self._machine, job), head_sends_s(self._machine, job)
            self._heads[key] = found
        return found


def routing_job(job: Job, experts: Experts) -> Job:
    """Return a job with tp 1 and cp 1 whose experts process equally many tokens per rank.

    Jobs that differ only in TP and CP degree thereby share cached times. The job is returned
    unchanged if no such job exists, for example with shared experts.
    """
    routed, rest = divmod(job.micro_batch * job.seq, job.cp * job.tp)
    scattered = job.sequence_parallel or job.tp == 1
    if experts.shared_width or experts.latent or rest or not scattered:
        return job
    return replace(
        job, tp=1, cp=1, micro_batch=1, seq=routed, sequence_parallel=False, heads_exchanged=False
    )


def _together(one: CommunicationTime, other: CommunicationTime) -> CommunicationTime:
    return CommunicationTime(*map(sum, zip(one, other, strict=True)))


def kernel_times(job: Job, block: Block, known: LayerTimeCache) -> LayerTimes:
    """Return the times of kernels and communication of one layer, with the degrees of its block.

    known : cache of layer times on the machine.
    """
    return known.times(_own(job, block), block)


def seconds_of_times(machine: Machine, job: Job, times: LayerTimes) -> tuple[Real, Real]:
    """Return lower bounds of (device, host) seconds of a layer per micro-batch.

    ZeRO-3 communication is excluded. Dispatch and combine overlap as in a step of many
    micro-batches.

    times : times of a layer, or of its attention or MLP. Its fields may be arrays that broadcast
        over micro-batch sizes and degrees; the results are then arrays.
    """
    found, host = _layer(machine, job, times, 0.0, _least_exposed_experts(job))
    return sum(found.values()), host


def recompute_s(machine: Machine, job: Job, times: LayerTimes, recompute: Recomputation) -> float:
    """Return a lower bound of the device seconds that recomputation adds to a layer.

    Dispatch and combine overlap as in `seconds_of_times`.

    job : job without recomputation.
    times : times of one layer.
    """
    tensor, experts = sent_again(machine, job, times, recompute)
    return recomputed_s(recompute, times) + tensor + _least_exposed_experts(job) * experts


def forward_seconds(machine: Machine, job: Job, times: LayerTimes) -> float:
    """Return a lower bound of the device seconds of a layer's forward, per micro-batch."""
    return sum(_forward_terms(machine, job, times, _least_exposed_experts(job)).values())


def embedding_and_head_s(job: Job, known: LayerTimeCache) -> tuple[float, float]:
    """Return device seconds per micro-batch of (embedding, head and loss).

    The second includes MTP layers, except for their transformer layers.
    """
    ends = _ends(job)
    parts, sends = known.head(ends)
    embedding, head = (_seconds(found) for found in (known.embedding(ends), parts))
    last = (1 + job.mtp) * (head + sends)
    if job.mtp:
        parts, sends = known.mtp(ends)
        last += job.mtp * (_seconds(parts) + sends + embedding)
    return embedding, last


def _seconds(parts: Iterable[KernelTime]) -> float:
    return sum(float(part.forward_s + part.input_s + part.weight_s) for part in parts)


def stage_transfer_s(machine: Machine, job: Job) -> float:
    """Return the seconds that communication between stages adds to a micro-batch of a stage."""
    return _transfer_s(machine, job)


def step_time(machine: Machine, job: Job, known: LayerTimeCache | None = None) -> StepTime:
    """Return the time of a training step of a job on a machine.

    T = (pipeline + exposed reduction + weight casts) (1 + 0.0013 log2(nodes)) + optimizer. With M
    micro-batches and v chunks per stage, the pipeline of 1F1B and interleaved schedules takes M
    times the longest stage plus 1/v of the sum of the others. Other schedules use
    `autopar.pipeline.formulas`.

    known : cache of layer times for jobs on this machine.

    Raises RuleError for sizes and degrees that no engine runs.
    """
    _check(job)
    if known is None:
        known = LayerTimeCache(machine)
    # most stages of a pipeline are equal
    alike: dict[object, _Stage] = {}
    stages = []
    heads, further, held = _head_stage(job), _further(job), held_blocks(job)
    for index, (blocks, mtp) in enumerate(zip(held, further, strict=True)):
        key = (blocks, mtp, index == 0, index == heads)
        if key not in alike:
            alike[key] = _stage(
                machine, job, blocks, mtp, known, embeds=index == 0, heads=index == heads
            )
        stages.append(alike[key])
    times = [stage.total_s for stage in stages]
    longest = max(range(len(times)), key=times.__getitem__)
    number = job.micro_batches
    pipeline = _pipeline_s(job, stages)
    terms = {key: number * value for key, value in stages[longest].terms.items()}
    terms["bubble"] = pipeline - number * times[longest]

    window = machine.stack.figures.overlap["gradients"] * pipeline / number

    def exposed_s(seconds: float) -> float:
        if not job.overlap_gradients:
            return seconds
        return max(0.0, seconds - window) + HIDDEN_REDUCTION * seconds

    unlike = alike.values()
    reductions = {id(stage): reduction_s(machine, job, stage.weights) for stage in unlike}
    summed, gathered = max((found[:2] for found in reductions.values()), key=sum)
    visible = exposed_s(summed + gathered)
    early = 0.0
    if job.reduce_every_micro_batch:
        # updated weights are gathered once, after the last micro-batch
        early = exposed_s(summed)
        visible += (number - 1) * early
    tied = tied_s(machine, job)
    visible += tied
    terms["gradients"] = visible
    # frozen weights keep their values, and are quantised once before the first step
    once = (
        0.0
        if job.frozen
        else sum(
            block.number * known.times(_own(job, block), block).weight_cast_s
            for block in held[longest]
        )
    )
    terms["cast"] += once
    domains = max(1.0, job.gpus / machine.domain_gpus)
    terms["stragglers"] = (pipeline + visible + once) * STRAGGLERS * math.log2(domains)
    updates = {id(stage): update_s(machine, job, stage.weights) for stage in unlike}
    # equal stages have equal matrices
    for known_id, matrices in dict(zip(map(id, stages), job.orthogonalized, strict=False)).items():
        updates[known_id] += orthogonalization_s(machine, matrices)
    terms["optimizer"] = optimizer = max(updates.values())
    split = {
        id(stage): StageTime(
            stage.terms, stage.forward, stage.weight, *reductions[id(stage)], updates[id(stage)]
        )
        for stage in unlike
    }
    return StepTime(
        total_s=sum(terms.values()),
        terms_s={key: terms.get(key, 0.0) for key in TERMS},
        stage_s=tuple(times),
        optimizer_s=optimizer,
        pipeline_s=pipeline,
        weight_cast_s=once,
        early_reduction_s=early,
        tied_s=tied,
        transfer_bytes=_transfer_bytes(job),
        stages=tuple(split[id(stage)] for stage in stages),
    )


def tied_s(machine: Machine, job: Job) -> float:
    """Return the seconds of the all-reduce between stages with copies of the embedding.

    The first stage and another stage have copies, whose gradients are summed: the head's stage if
    embeddings are tied, or stages of MTP layers, which embed their tokens. 0 without copies.
    """
    if not (job.tied or any(_further(job)[1:])) or job.pp == 1 or job.frozen:
        return 0.0
    size = (
        job.vocab / (job.vocab_tp or job.tp) * job.blocks[0].hidden * gradient_bytes(machine, job)
    )
    return transfer_s(machine, "allreduce", size, 2, _stride_of_stages(job) * (job.pp - 1))


def _head_stage(job: Job) -> int:
    """Return the index of the stage with head and loss, which is 0 in V-shaped schedules."""
    schedule = job.schedule or schedule_of_chunks(job.vpp)
    return rank_of(schedule, job.pp * job.vpp - 1, job.pp)


def _pipeline_s(job: Job, stages: Sequence[_Stage]) -> float:
    """Return the seconds of all micro-batches, transfers between stages included."""
    times = [stage.total_s for stage in stages]
    chunks = job.vpp if job.pp > 1 else 1
    schedule = job.schedule or schedule_of_chunks(chunks)
    if job.pp == 1 or schedule in ("1f1b", "interleaved"):
        # the site constants were fitted to published runs with this formula, messages included
        return job.micro_batches * max(times) + (sum(times) - max(times)) / chunks
    forward = [sum(stage.forward.values()) for stage in stages]
    weight = [sum(stage.weight.values()) for stage in stages]
    return step_s(
        schedule,
        forward,
        [
            total - before - after
            for total, before, after in zip(times, forward, weight, strict=True)
        ],
        weight,
        micro_batches=job.micro_batches,
        chunks=chunks,
    )


def _further(job: Job) -> tuple[int, ...]:
    """Return the number of MTP layers of every stage."""
    last = _head_stage(job)
    return job.stage_mtp or tuple(job.mtp if stage == last else 0 for stage in range(job.pp))


def held_blocks(job: Job) -> list[tuple[Block, ...]]:
    """Return the blocks of every stage, including the transformer layers of its MTP layers."""
    own = mtp_blocks(job) if job.mtp else ()
    return [
        (*blocks, *number * own)
        for blocks, number in zip(stage_blocks(job), _further(job), strict=True)
    ]


def _check(job: Job) -> None:
    """Raise RuleError for sizes and degrees that no engine runs."""
    degrees = {name: getattr(job, name) for name in ("tp", "cp", "pp", "dp", "ep", "etp", "vpp")}
    sizes = {name: getattr(job, name) for name in ("micro_batch", "global_batch", "gpus", "seq")}
    sizes["vocab"] = job.vocab or 1  # 0 for a model without vocabulary
    # one rule covers all of them: the smallest value is the one that violates it
    name, size = min((sizes | degrees).items(), key=itemgetter(1))
    refuse(POSITIVE, {"name": name, "size": size})
    refuse(
        JOB,
        {
            **degrees,
            **sizes,
            "world": job.gpus,
            "seq_length": job.seq,
            "layers": sum(block.number for block in job.blocks),
            "mtp": job.mtp,
            "mtp_stages": len(job.stage_mtp) or None,
            "stage_mtp": sum(job.stage_mtp),
        },
    )
    for block in job.blocks:
        refuse(
            BLOCK,
            {
                **degrees,
                "heads": None if block.attention is None else block.attention.heads,
                "mixer_heads": None if block.recurrent is None else block.recurrent.heads,
                "experts": block.mlp.number if isinstance(block.mlp, Experts) else None,
                "expert_width": block.mlp.width if isinstance(block.mlp, Experts) else None,
            },
        )


def _stage(
    machine: Machine,
    job: Job,
    blocks: tuple[Block, ...],
    mtp: int,
    known: LayerTimeCache,
    *,
    embeds: bool,
    heads: bool,
) -> _Stage:
    """Return the seconds of one micro-batch on a stage, and the stage's parameters per rank.

    mtp : number of MTP layers, whose transformer layers are among the blocks.
    embeds : True if the stage has the embedding.
    heads : True if the stage has head and loss.
    """
    terms = dict.fromkeys(TERMS, 0.0)
    weights: dict[ReplicaGroup, float] = {}
    host = loaded = 0.0
    forward = dict.fromkeys(TERMS, 0.0)
    weight = dict.fromkeys(TERMS, 0.0)
    exposed = _exposed_experts(job)
    for block in blocks:
        own = _own(job, block)
        times = known.times(own, block)
        found, waited = _layer(machine, own, times, block.offloaded_bytes, exposed)
        for key, value in _forward_terms(machine, own, times, exposed).items():
            forward[key] += block.number * value
        for part in times.parts:
            weight[part.kind] += block.number * float(part.weight_s)
        for key, value in found.items():
            terms[key] += block.number * value
        host += block.number * as_number(waited)
        # only trained weights have gradients and states; with a frozen base these are the adapters
        of_experts, others = (
            parameters(block) if job.adapters is None else adapter_parameters(own, block)
        )
        _hold(weights, dense_group(own), block.number * others / own.tp)
        _hold(weights, expert_group(own), block.number * of_experts / (own.ep * own.etp))
        if own.offloaded_weights:
            base_experts, base = parameters(block)
            base_experts /= own.ep * own.etp * expert_shards(own)
            share = base / (own.tp * data_shards(own)) + base_experts
            loaded += block.number * share * frozen_bytes(own)
        if own.zero == 3:
            terms["sharding"] += block.number * sharding_s(machine, own, block, found)
    ends = _ends(job)
    table = ends.vocab * ends.blocks[0].hidden / ends.tp
    if mtp:
        parts, sends = known.mtp(ends)
        for _ in range(mtp):
            _add(terms, (*parts, *known.embedding(ends)))
            terms["tensor"] += sends
        for part in parts:
            forward[part.kind] += mtp * float(part.forward_s)
            weight[part.kind] += mtp * float(part.weight_s)
        # two hidden states are projected to one; the table is a copy unless embedded on this stage
        joined = mtp * 2.0 * job.blocks[-1].hidden ** 2 / ends.tp
        copied = 0.0 if embeds else table
        _hold(weights, dense_group(ends), 0.0 if job.adapters else joined + copied)
    if embeds:
        _add(terms, known.embedding(ends))
        _hold(weights, dense_group(ends), 0.0 if job.adapters else table)
    if heads:
        parts, sends = known.head(ends)
        for _ in range(1 + job.mtp):
            _add(terms, parts)
            terms["tensor"] += sends
        # the head's communication is mostly that of its input gradient, so it is in neither part
        for part in parts:
            forward[part.kind] += (1 + job.mtp) * float(part.forward_s)
            weight[part.kind] += (1 + job.mtp) * float(part.weight_s)
        if not (job.tied and embeds):
            _hold(weights, dense_group(ends), 0.0 if job.adapters else table)
    if ends.zero == 3 and (embeds or heads):
        tables = (2 if embeds and heads and not job.tied else 1) * table
        terms["sharding"] += table_traffic_s(machine, ends, tables)
    terms["offload"] += weight_copies_s(machine, loaded, sum(terms.values()))
    device = sum(terms.values())
    # host overhead, sharding traffic and copies are distributed in proportion to compute
    compute = device - terms["sharding"] - terms["offload"]
    total = float(host_device_time_s(device, host))
    terms["host"] = total - device
    transfer = _transfer_s(machine, job)
    terms["transfer"] = transfer
    for phase in (forward, weight):
        share = sum(phase.values()) / compute if compute else 0.0
        for key in ("host", "sharding", "offload", "transfer"):
            phase[key] = share * terms[key]
    return _Stage(terms, total + transfer, weights, forward, weight)


def _own(job: Job, block: Block) -> Job:
    """Return the job with the degrees, recomputation, precision and ZeRO stage of a block."""
    recompute, zero = block.recompute, block.zero
    same = block.precision in (None, job.precision)
    if same and (recompute is None or recompute == job.recompute) and zero in (None, job.zero):
        return _split(job, block.tp, block.cp)
    own = replace(
        job,
        recompute=job.recompute if recompute is None else recompute,
        zero=job.zero if zero is None else zero,
        precision=job.precision if block.precision is None else block.precision,
    )
    return _split(own, block.tp, block.cp)


def _ends(job: Job) -> Job:
    """Return the job with the degrees of embedding and head."""
    zero = job.zero if job.vocab_zero is None else job.vocab_zero
    # embedding and head are replicated over context-parallel ranks, so the CP degree is irrelevant
    cp = None if job.vocab_tp in (None, job.tp) else 1
    return _split(job if zero == job.zero else replace(job, zero=zero), job.vocab_tp, cp)


def _split(job: Job, tp: int | None, cp: int | None) -> Job:
    """Return the job with other TP and CP degrees on equally many ranks and samples."""
    tp, cp = job.tp if tp is None else tp, job.cp if cp is None else cp
    if (tp, cp) == (job.tp, job.cp):
        return job
    # each split covers all ranks of a stage and the same samples of a micro-batch
    dp = job.tp * job.cp * job.dp // (tp * cp)
    return replace(job, tp=tp, cp=cp, dp=dp, micro_batch=job.micro_batch * job.dp // dp)


def _hold(weights: dict[ReplicaGroup, float], group: ReplicaGroup, number: float) -> None:
    if number:
        weights[group] = weights.get(group, 0.0) + number


def _add(terms: dict[str, float], parts: Iterable[KernelTime]) -> None:
    for part in parts:
        terms[part.kind] += as_number(part.forward_s + part.input_s + part.weight_s)


def _layer(
    machine: Machine, job: Job, times: LayerTimes, offloaded_bytes: float, exposed_experts: float
) -> tuple[dict[str, float], Real]:
    """Return (device seconds of a layer per micro-batch by term, host seconds).

    offloaded_bytes : offloaded activation bytes of the layer.
    exposed_experts : exposed share of dispatch and combine, 0 to 1.
    """
    terms = dict.fromkeys(("gemm", "attention", "memory", "cast"), 0.0)
    _add(terms, times.parts)
    again = recomputed_s(job.recompute, times)
    tensor_again, experts_again = sent_again(machine, job, times, job.recompute)
    hidden = overlapped_tensor_share(machine, job)
    tensor = (1 - hidden) * (times.tensor.forward_s + times.tensor.backward_s) + tensor_again
    experts = times.experts.forward_s + times.experts.backward_s + experts_again
    terms["recompute"] = again
    terms["tensor"] = tensor
    terms["context"] = times.context.forward_s + times.context.backward_s
    terms["experts"] = exposed_experts * experts
    if offloaded_bytes:
        device = sum(terms.values())
        forward = sum(_forward_terms(machine, job, times, exposed_experts).values())
        terms["offload"] = activation_copies_s(machine, offloaded_bytes, forward, device)
    return terms, _host_s(machine, job, times)


def _forward_terms(
    machine: Machine, job: Job, times: LayerTimes, exposed_experts: float
) -> dict[str, float]:
    """Return the device seconds of a layer's forward by term, without recomputation."""
    hidden = overlapped_tensor_share(machine, job)
    terms: dict[str, float] = {}
    for part in times.parts:
        terms[part.kind] = terms.get(part.kind, 0.0) + as_number(part.forward_s)
    terms["tensor"] = (1 - hidden) * times.tensor.forward_s
    terms["experts"] = exposed_experts * times.experts.forward_s
    terms["context"] = times.context.forward_s
    return terms


def _host_s(machine: Machine, job: Job, times: LayerTimes) -> Real:
    """Return the host seconds of a layer, forward and backward; 0 with full CUDA graphs.

    Experts without grouped GEMMs add host time for each expert that a rank holds.
    """
    if job.graphs == "full":
        return 0.0
    host = machine.stack.figures.host
    calls = times.tensor.calls + times.context.calls + times.experts.calls
    forward_s, backward_s = (
        (1 + share) * host[f"{side}_s"]
        for side, share in zip(("forward", "backward"), times.loops, strict=True)
    )
    seconds = forward_s + backward_s + calls * host["collective_s"]
    if job.recompute == "full":
        seconds += forward_s
    launches: Real = 0.0
    if times.held is not None:
        # merged forward and backward are launched in pieces, on streams that wait for each other;
        # graphs replay the pieces
        merged = job.overlap_experts and job.graphs == "none"
        pieces = host["merged"] if merged else 1.0
        seconds += pieces * host["experts_s"]
        if not job.fused_experts:
            # in 8 bits and fewer the inputs of each expert are quantised one by one
            narrow = ELEMENT_BYTES[job.precision] < ELEMENT_BYTES["bf16"]
            launches = pieces * (1.0 if narrow else _PLAIN_EXPERT) * host["expert_s"] * times.held
    if job.graphs == "partial":
        seconds *= host["partial_graphs"]
        # graphs need constant shapes: as many tokens for each expert in every step
        if job.padded_capacity:
            launches *= host["partial_graphs"]
    return seconds + launches


# --------------------------------------------------------------------------------------------------
# Pipeline


def _stride_of_stages(job: Job) -> int:
    """Return the difference of the ranks of neighbouring stages: the number of ranks of a stage."""
    return job.tp * job.cp * job.dp


def _transfer_bytes(job: Job) -> float:
    """Return the bytes that a tensor rank sends to the next stage per micro-batch, b s h 2 / tp."""
    size = job.tokens * job.blocks[0].hidden * job.element_bytes / job.tp
    return size if job.pp > 1 else 0.0


def _transfer_s(machine: Machine, job: Job) -> float:
    """Return the seconds that communication between stages adds to a micro-batch of a stage.

    Every tensor rank sends its share of b s h 2 bytes and receives the gradient of it. Interleaved
    pipelines send v times and hide part of it.
    """
    if job.pp == 1:
        return 0.0
    size = _transfer_bytes(job)
    crosses = _stride_of_stages(job) * job.pp > machine.domain_gpus
    once = TRANSFER_SYNCHRONISE_S + p2p_time_s(
        machine.card.network, size, crosses=crosses, site=machine.factors
    )
    if job.vpp > 1:
        return _INTERLEAVED_TRANSFER * job.vpp * once
    return 2 * once

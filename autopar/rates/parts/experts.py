"""Mixture of experts: kernels of one rank, dispatch and combine.

Overlap of this communication is in `autopar.price.step`.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.rates.collectives import moe_exchange_time_s
from autopar.rates.constants import ELEMENT_BYTES
from autopar.rates.kernels import grouped_linear_s
from autopar.rates.memory_bound import elements_s, permute_s
from autopar.rates.parts.linear import (
    Beside,
    adapter_parts,
    dequantised_parts,
    linear_parts,
    mlp_parts,
)
from autopar.rates.parts.operations import (
    CommunicationTime,
    KernelTime,
    Machine,
    RankShape,
    as_number,
    cast_parts,
    element_part,
    group,
    product_part,
    split_of,
    transfer_s,
)
from autopar.records import replace
from autopar.run.architecture import Experts
from autopar.run.job import Job
from autopar.training.mixtures import processed_share

_ROUTER_BYTES = 40.0
"""Bytes per token and expert in each direction: scores, their softmax, the selected ones and the
routing maps, in fp32 and int32 (counted from Megatron-Core's router)."""
_UNFUSED_PERMUTE = 1.7
"""Permutation time without a fused dispatcher over that with one: 25 bytes at half of the HBM rate,
the share that SimuMax measured on B200 (github.com/MooreThreads/SimuMax)."""


def expert_parts(
    machine: Machine, job: Job, hidden: int, mlp: Experts, split: RankShape, *, biases: bool
) -> Iterator[KernelTime]:
    """Yield kernel times of an MoE block: experts, permutation, router and shared expert.

    biases : True if the matrices of experts have biases.
    """
    n = split.routed
    own = n * mlp.per_token * _taken(job)
    # Ranks that share an expert (expert tensor parallelism) each have all of its tokens.
    copies = own * job.etp
    held = mlp.number / job.ep
    rows = copies * job.ep / mlp.number
    inner, width = mlp.latent or hidden, mlp.width / split.expert_tensor
    first = (2 if mlp.gated else 1) * width
    # Scales have blocks of 128 rows; 16-bit kernels accept any number of rows.
    pad = 128 if ELEMENT_BYTES[job.precision] < ELEMENT_BYTES["bf16"] else 1
    up: Beside = [("expert_fc1", width)] * (2 if mlp.gated else 1)
    down: Beside = [("expert_fc2", inner)]
    for name, outputs, inputs, beside in (("up", first, inner, up), ("down", inner, width, down)):
        times = grouped_linear_s(
            machine.kernels,
            rows,
            held,
            outputs,
            inputs,
            dtype=job.precision,
            fused=job.fused_experts,
            clock=machine.kernels.product_clock(job.precision, machine.clock),
            sustained=True,
            pad=pad,
            cast=False,
        )
        weights = held * outputs * inputs
        yield product_part(machine, job, f"experts {name}", "moe", times, weights, job.precision)
        # A fused kernel writes the tensor between both GEMMs in low precision: forward the input of
        # the second, backward the output gradient of the first.
        last = name == "down"
        read = None if job.fused_experts and last else copies * inputs
        back = None if job.fused_experts and not last else copies * outputs
        yield from cast_parts(machine, job, f"experts {name}", "moe", job.precision, read, back)
        yield from dequantised_parts(machine, job, f"experts {name}", "moe", weights)
        shared = job.adapters is not None and job.adapters.shared_by_experts
        yield from adapter_parts(
            machine,
            job,
            f"experts {name}",
            "moe",
            copies if shared else rows,
            inputs,
            beside,
            groups=None if shared else held,
        )
    if not job.fused_experts:
        yield element_part(
            machine,
            job,
            "experts activation",
            "moe_act",
            "activation",
            copies * first,
            gated=mlp.gated,
        )
        if mlp.clamped:
            yield element_part(machine, job, "experts clamp", "moe_act", "clamp", copies * first)
    if biases:
        outputs = copies * (inner + first) if job.fused_experts else copies * inner
        operation = "fused_expert_bias" if job.fused_experts else "expert_bias"
        yield element_part(machine, job, "experts bias", "moe", operation, outputs)
    slow = 1.0 if job.dispatcher == "fused" else _UNFUSED_PERMUTE
    # Sorted by rank, and with expert tensor parallelism again by expert: two passes of half a
    # factor.
    sorted_copies = own * (1 + job.etp) / 2
    forward, backward = (
        slow
        * permute_s(
            machine.kernels, sorted_copies, inner, backward=side, fused=job.fused_permutation
        )
        for side in (False, True)
    )
    yield KernelTime("permute", "moe", "memory", forward, backward)
    plain = job if job.precision in ("fp16", "fp32") else replace(job, precision="bf16")
    yield from linear_parts(machine, plain, "router", "moe", n, mlp.number, hidden)
    scores = elements_s(machine.kernels, n * mlp.number, _ROUTER_BYTES, count=12)
    yield KernelTime("routing", "moe", "memory", scores, scores)
    if mlp.latent:
        yield from linear_parts(machine, job, "latent down", "moe", n, mlp.latent, hidden)
        yield from linear_parts(machine, job, "latent up", "moe", n, hidden, mlp.latent)
    if mlp.shared_width:
        name = "shared_experts"
        yield from mlp_parts(machine, job, hidden, mlp.shared_width, mlp.gated, name, split)


def _taken(job: Job) -> float:
    """Return the tokens that the busiest expert rank processes over the mean."""
    return processed_share(job.skew, capacity=job.capacity, padded=job.padded_capacity)


def expert_sends(machine: Machine, job: Job, hidden: int, mlp: Experts) -> CommunicationTime:
    """Return the times of dispatch and combine, and of the reverse exchange of their gradients."""
    if job.dispatcher == "allgather":
        return _gathered_sends(machine, job, mlp.latent or hidden)
    shared = _shared_expert_s(machine, job, mlp.latent or hidden, mlp)
    if job.ep == 1:
        return CommunicationTime(shared, shared, 4 if job.etp > 1 else 0)
    # Expert groups are neighbours: they fold over tensor, context and data ranks, outside the ranks
    # that share an expert.
    shape = group(machine, job.ep, job.etp)
    # A card's own figures are for few tokens, as in inference, and too slow for many.
    network = replace(machine.card.network, exchange=None)
    routed = split_of(job).routed * _taken(job)
    dispatch, combine = (
        as_number(
            moe_exchange_time_s(
                network,
                direction,
                routed,
                shape,
                hidden=mlp.latent or hidden,
                top_k=mlp.per_token,
                groups=mlp.groups,
                groups_per_token=mlp.groups_per_token,
                bytes_per_element=job.element_bytes,
                fused=job.dispatcher == "fused",
                site=machine.factors,
            )
        )
        for direction in ("dispatch", "combine")
    )
    once = dispatch + combine + shared
    return CommunicationTime(once, once, 12 if job.etp > 1 else 8)


def _gathered_sends(machine: Machine, job: Job, width: int) -> CommunicationTime:
    """Return the time of dispatch by all-gather and combine by reduce-scatter.

    The all-gather moves t h (EP ETP - 1) elements, for any number of experts per token. So does the
    reduce-scatter, in fp32 if router probabilities are fp32. The backward is the reverse
    (Megatron-Core moe/token_dispatcher.py, MoEAllGatherTokenDispatcher).
    """
    ranks = job.ep * job.etp
    if ranks == 1:
        return CommunicationTime()
    elements = split_of(job).routed * ranks * width
    summed = 4.0 if job.router_fp32 else job.element_bytes
    there = [
        transfer_s(machine, operation, elements * each, ranks, 1)
        for operation, each in (("allgather", job.element_bytes), ("reducescatter", summed))
    ]
    back = [
        transfer_s(machine, operation, elements * each, ranks, 1)
        for operation, each in (("allgather", summed), ("reducescatter", job.element_bytes))
    ]
    # The routing maps are gathered as well.
    return CommunicationTime(sum(there), sum(back), 6)


def _shared_expert_s(machine: Machine, job: Job, width: int, mlp: Experts) -> float:
    """Return the seconds of expert-tensor-parallel communication of one layer.

    An all-gather precedes the experts, and a reduce-scatter follows them.
    """
    if job.etp == 1:
        return 0.0
    copies = split_of(job).routed * mlp.per_token * _taken(job)
    size = copies * job.etp * width * job.element_bytes
    return sum(
        transfer_s(machine, operation, size, job.etp, 1)
        for operation in ("allgather", "reducescatter")
    )

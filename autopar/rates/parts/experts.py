"""A mixture of experts: its kernels on a rank, and what its tokens take to them and back.

Which of that runs under other work is `autopar.price.step`.
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
    Machine,
    Part,
    Sends,
    Split,
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
from autopar.training.mixtures import taken_share

_ROUTER_BYTES = 40.0
"""Per token and expert, forward and backward each: scores, their softmax, the chosen ones and the
maps of who goes where, in fp32 and int32 (counted from Megatron-Core's router)."""
_UNFUSED_PERMUTE = 2.7
"""Permutation without a fused dispatcher over one with, from published steps of mixtures."""


def expert_parts(
    machine: Machine, job: Job, hidden: int, mlp: Experts, split: Split
) -> Iterator[Part]:
    n = split.routed
    own = n * mlp.per_token * _taken(job)
    # ranks that share an expert have all tokens of each other
    copies = own * job.etp
    held = mlp.number / job.ep
    rows = copies * job.ep / mlp.number
    inner, width = mlp.latent or hidden, mlp.width / split.expert_tensor
    first = (2 if mlp.gated else 1) * width
    # 128: blocks of scales; 16-bit kernels take any number of rows
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
        # a fused kernel puts out what lies between both products in few bits: forward what the
        # second reads, backward the gradient that the first does
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
    slow = 1.0 if job.dispatcher == "fused" else _UNFUSED_PERMUTE
    # sorted by rank, and where they were gathered again by expert: two passes of half a factor
    sorted_copies = own * (1 + job.etp) / 2
    forward, backward = (
        slow * permute_s(machine.kernels, sorted_copies, inner, backward=side)
        for side in (False, True)
    )
    yield Part("permute", "moe", "memory", forward, backward)
    plain = job if job.precision in ("fp16", "fp32") else replace(job, precision="bf16")
    yield from linear_parts(machine, plain, "router", "moe", n, mlp.number, hidden)
    scores = elements_s(machine.kernels, n * mlp.number, _ROUTER_BYTES, count=12)
    yield Part("routing", "moe", "memory", scores, scores)
    if mlp.latent:
        yield from linear_parts(machine, job, "latent down", "moe", n, mlp.latent, hidden)
        yield from linear_parts(machine, job, "latent up", "moe", n, hidden, mlp.latent)
    if mlp.shared_width:
        name = "shared_experts"
        yield from mlp_parts(machine, job, hidden, mlp.shared_width, mlp.gated, name, split)


def _taken(job: Job) -> float:
    """Return the tokens of the busiest rank's experts over the mean."""
    return taken_share(job.skew, capacity=job.capacity, padded=job.padded_capacity)


def expert_sends(machine: Machine, job: Job, hidden: int, mlp: Experts) -> Sends:
    """Return dispatch and combine, and their gradients', which go the other way."""
    if job.dispatcher == "allgather":
        return _gathered_sends(machine, job, mlp.latent or hidden)
    shared = _shared_expert_s(machine, job, mlp.latent or hidden, mlp)
    if job.ep == 1:
        return Sends(shared, shared, 4 if job.etp > 1 else 0)
    # expert groups are neighbours: they fold over tensor, context and data ranks, behind the ranks
    # that share an expert
    shape = group(machine, job.ep, job.etp)
    # a card's own figures are of few tokens, as in inference, and too slow for many
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
                bytes_per_element=job.element_bytes,
                fused=job.dispatcher == "fused",
                site=machine.factors,
            )
        )
        for direction in ("dispatch", "combine")
    )
    once = dispatch + combine + shared
    return Sends(once, once, 12 if job.etp > 1 else 8)


def _gathered_sends(machine: Machine, job: Job, width: int) -> Sends:
    """Return what it takes that all tokens come to all ranks of experts, and their sums go back.

    An all-gather of t h (EP ETP - 1) elements in front and a reduce-scatter of as many behind, in
    fp32 where probabilities are, whatever the number of experts that a token visits; the backward
    has the reverse (Megatron-Core moe/token_dispatcher.py, MoEAllGatherTokenDispatcher).
    """
    ranks = job.ep * job.etp
    if ranks == 1:
        return Sends()
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
    # maps of who goes where are gathered, too
    return Sends(sum(there), sum(back), 6)


def _shared_expert_s(machine: Machine, job: Job, width: int, mlp: Experts) -> float:
    """Return what ranks that share an expert gather in front of it and scatter behind it."""
    if job.etp == 1:
        return 0.0
    copies = split_of(job).routed * mlp.per_token * _taken(job)
    size = copies * job.etp * width * job.element_bytes
    return sum(
        transfer_s(machine, operation, size, job.etp, 1)
        for operation in ("allgather", "reducescatter")
    )

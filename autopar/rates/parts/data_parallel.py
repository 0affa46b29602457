"""Data parallelism: communication of sharded weights and gradients, and the optimizer update.

The position of this communication in a step and its overlap are in `autopar.price.step`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from autopar.rates.memory_bound import elements_s
from autopar.rates.parts.operations import Machine, Real, transfer_s
from autopar.rates.parts.optimizer import optimizer_time_s
from autopar.run.job import (
    Block,
    Job,
    adapter_parameters,
    data_ranks,
    data_shards,
    expert_ranks,
    expert_shards,
    parameters,
)
from autopar.training.adapters import base_bytes


class ReplicaGroup(NamedTuple):
    """Ranks that hold the same weights, `stride` apart, and their sharding."""

    experts: bool
    shards: int
    """Sharding degree: number of neighbouring ranks over which states are sharded."""
    copies: int
    """Number of replicas of the sharded states."""
    stride: int
    zero: int


def dense_group(job: Job) -> ReplicaGroup:
    """Return the ranks that hold the same weights outside experts."""
    shards = data_shards(job)
    return ReplicaGroup(False, shards, data_ranks(job) // shards, job.tp, job.zero)


def expert_group(job: Job) -> ReplicaGroup:
    """Return the ranks that hold the same experts."""
    shards = expert_shards(job)
    return ReplicaGroup(True, shards, expert_ranks(job) // shards, job.ep * job.etp, job.zero)


def gradient_bytes(machine: Machine, job: Job) -> float:
    """Return the bytes per element of the gradient reduction."""
    return job.gradient_bytes or machine.stack.figures.gradient["reduce_bytes"]


def _trains_nothing(job: Job) -> bool:
    """Return True if a step has no weight gradients."""
    return job.frozen and job.adapters is None


def _gather_s(machine: Machine, job: Job, weights: float, each_bytes: float) -> float:
    """Return the seconds of an all-gather of `weights` sharded weights."""
    size = weights * each_bytes
    return transfer_s(machine, "allgather", size, data_shards(job), job.tp) / _network(machine)


def frozen_bytes(job: Job) -> float:
    """Return the bytes per element of a layer's gathered weights, which may be quantised."""
    if job.adapters is not None:
        return min(job.element_bytes, base_bytes(job.adapters))
    return job.element_bytes if job.gathered_bytes is None else job.gathered_bytes


def _scatter_s(machine: Machine, job: Job, weights: float) -> float:
    """Return the seconds of the reduction of gradients to shards; 0 for frozen weights."""
    if job.frozen:
        return 0.0
    size = weights * gradient_bytes(machine, job)
    return _sum_s(machine, size, dense_group(job)) / _network(machine)


def _sum_s(machine: Machine, size_bytes: float, group: ReplicaGroup) -> float:
    """Return the seconds of a gradient reduction: reduce-scatter within shards, then all-reduce.

    The all-reduce sums each rank's shard over all replicas.
    """
    shards, stride = group.shards, group.stride
    once = transfer_s(machine, "reducescatter", size_bytes, shards, stride)
    own = size_bytes / shards
    return once + transfer_s(machine, "allreduce", own, group.copies, stride * shards)


def _network(machine: Machine) -> float:
    return machine.stack.figures.overlap["sharded_network"]


def sharding_s(machine: Machine, job: Job, block: Block, terms: Mapping[str, float]) -> float:
    """Return the exposed seconds of a layer's ZeRO-3 communication."""
    traffic = dense_traffic_s(machine, job, block) + expert_traffic_s(machine, job, block)
    if job.adapters is not None:
        own = sum(adapter_parameters(job, block)) / job.tp * gradient_bytes(machine, job)
        traffic += _sum_s(machine, own, dense_group(job))
    device = sum(terms.values())
    exposed = float(overlapped_traffic_s(machine, device, traffic)) - device
    return exposed + _copies_s(machine, job, block)


def _copies_s(machine: Machine, job: Job, block: Block) -> float:
    """Return the seconds of copies between a layer's weights and its communication buffers.

    FSDP2 copies gathered weights out of their buffer, and gradients into the buffer of the
    reduction.
    """
    copies = machine.stack.figures.copies
    if copies is None:
        return 0.0
    experts, dense = parameters(block)
    weights = dense / job.tp if data_shards(job) > 1 else 0.0
    if expert_shards(job) > 1:
        weights += experts / (job.ep * job.etp)
    moved = copies["gather"] * frozen_bytes(job) * (2 if job.reshard else 1)
    if not job.frozen:
        moved += copies["gradient_bytes"]
    return float(elements_s(machine.kernels, weights, moved, count=0))


def dense_traffic_s(machine: Machine, job: Job, block: Block) -> float:
    """Return the seconds of a layer's ZeRO-3 communication without its experts, per micro-batch.

    2 all-gathers (1 without resharding) and a reduce-scatter.
    """
    _, dense = parameters(block)
    weights = dense / job.tp
    once = _gather_s(machine, job, weights, frozen_bytes(job))
    return (2 if job.reshard else 1) * once + _scatter_s(machine, job, weights)


def expert_traffic_s(machine: Machine, job: Job, block: Block) -> float:
    """Return the seconds of ZeRO-3 communication of a layer's experts; 0 without experts."""
    experts, _ = parameters(block)
    if not experts:
        return 0.0
    group = expert_group(job)
    size = experts / group.stride * frozen_bytes(job)
    once = transfer_s(machine, "allgather", size, group.shards, group.stride)
    routed = (2 if job.reshard else 1) * once
    if not job.frozen:
        grads = experts / group.stride * gradient_bytes(machine, job)
        routed += _sum_s(machine, grads, group)
    return routed / _network(machine)


def overlapped_traffic_s(machine: Machine, device_s: Real, traffic_s: Real) -> Real:
    """Return the time of kernels with concurrent ZeRO-3 communication.

    t = max(device, traffic) + x min(device, traffic), for numbers or arrays.
    """
    visible = machine.stack.figures.overlap["fully_sharded"]
    return np.maximum(device_s, traffic_s) + visible * np.minimum(device_s, traffic_s)


def table_traffic_s(machine: Machine, job: Job, weights: float) -> float:
    """Return the exposed seconds of ZeRO-3 communication of embedding or head, per micro-batch.

    Each is a separate FSDP unit, gathered once per micro-batch. Nothing runs before the first
    gather and after the last reduction.
    """
    return _gather_s(machine, job, weights, job.element_bytes) + _scatter_s(machine, job, weights)


def reduction_s(
    machine: Machine, job: Job, held: Mapping[ReplicaGroup, float]
) -> tuple[float, float, float, float]:
    """Return (reduction s, all-gather s, reduced bytes, gathered bytes) of a stage and step.

    The reduction is that of gradients, the all-gather that of weights. ZeRO-3 and frozen groups are
    excluded: ZeRO-3 communicates per layer (`dense_traffic_s`, `expert_traffic_s`). Bytes are those
    of unsharded tensors, before the reduction and after the all-gather.

    held : parameters of a rank by group
    """
    grads = gradient_bytes(machine, job)
    summed = gathered = summed_bytes = gathered_bytes = 0.0
    for group, weights in held.items():
        if group.zero == 3 or _trains_nothing(job):
            continue
        shards, stride = group.shards, group.stride
        summed_bytes += weights * grads
        if group.zero:
            summed += _sum_s(machine, weights * grads, group)
            each = job.element_bytes if job.gathered_bytes is None else job.gathered_bytes
            gathered += transfer_s(machine, "allgather", weights * each, shards, stride)
            gathered_bytes += weights * each
        else:
            ranks = shards * group.copies
            summed += transfer_s(machine, "allreduce", weights * grads, ranks, stride)
    return summed, gathered, summed_bytes, gathered_bytes


def update_s(machine: Machine, job: Job, held: Mapping[ReplicaGroup, float]) -> float:
    """Return the seconds of the optimizer on a rank; `held` as in `reduction_s`."""
    if _trains_nothing(job) or not job.optimizer:
        return 0.0
    own = resident = 0.0
    for group, weights in held.items():
        share = weights / group.shards if group.zero else weights
        own += share
        resident += share if group.zero == 3 else weights
    return optimizer_time_s(machine, job, own, resident)

"""HardwareProfile from a card: alpha-beta times of every group a plan can use.

A group is described by its *shape*: ranks per node and nodes. Times follow NCCL's own cost model
(src/graph/tuning.cc): a latency per step of the ring or tree and a bandwidth that the slowest
link sets. All groups of a kind run at the same time, as in training: every GPU brings its own
NVLink ports and its own network adapter, so groups do not share links.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from autopar.errors import InputError
from autopar.estimate.cards import Card, load_card
from autopar.hardware import Curve, HardwareProfile
from autopar.units import MIB

__all__ = [
    "GroupShape",
    "all2all_time_s",
    "allreduce_time_s",
    "estimate_hardware",
    "p2p_time_s",
    "parse_hardware",
]

_REFERENCE_BYTES = tuple(float(MIB << k) for k in range(4, 10))
"""Sizes over which a documented bandwidth is averaged: 16 to 512 MiB (nccl-tests' average)."""
_CURVE_BYTES = tuple(float(MIB << k) for k in range(11))
"""Sizes of the documented collective times: 1, 2, 4, ... 1024 MiB."""

GroupShape = tuple[int, int, int]
"""(fewest ranks of the group on one of its nodes, most, number of nodes)."""


def parse_hardware(text: str) -> tuple[str, int, int]:
    """Return (card, number of nodes, GPUs per node) of `CARD:NxG`, for example `h100:4x8`."""
    match = re.fullmatch(r"(.+):(\d{1,6})[xX](\d{1,4})", text)
    if match is None or not int(match[2]) or not int(match[3]):
        raise InputError(
            f"hardware {text!r} is not CARD:NxG, for example h100:4x8 for 4 nodes of 8 GPUs"
        )
    return match[1], int(match[2]), int(match[3])


def estimate_hardware(card: str, *, num_nodes: int, gpus_per_node: int) -> HardwareProfile:
    """Return the estimated profile of `num_nodes` x `gpus_per_node` devices of a card.

    Bandwidths exist for all divisors of the world (groups of neighbours and strided ones),
    times for groups of neighbours at 1, 2, 4, ... 1024 MiB. Raises InputError.
    """
    device = load_card(card)
    if num_nodes < 1 or gpus_per_node < 1:
        raise InputError(f"{num_nodes} nodes x {gpus_per_node} GPUs is not a cluster; both from 1")
    if gpus_per_node > device.max_gpus_per_node:
        raise InputError(
            f"card {device.name!r} connects at most {device.max_gpus_per_node} GPUs of a node, "
            f"got {gpus_per_node}; use more nodes or a card with a larger intra_node.max_gpus"
        )
    world = num_nodes * gpus_per_node
    degrees = [g for g in range(2, world + 1) if world % g == 0]
    allreduce: dict[tuple[int, bool], float] = {}
    curves: dict[tuple[str, int], Curve] = {}
    p2p: dict[int, float] = {}
    for size in degrees:
        for consecutive in (True, False):
            shapes = _group_shapes(world, gpus_per_node, size, consecutive=consecutive)
            allreduce[size, consecutive] = min(_mean_busbw(device, size, shape) for shape in shapes)
        shapes = _group_shapes(world, gpus_per_node, size, consecutive=True)
        for operation, time_s in (("allreduce", allreduce_time_s), ("all2all", all2all_time_s)):
            times = [max(time_s(device, s, shape) for shape in shapes) for s in _CURVE_BYTES]
            curves[operation, size] = Curve(
                sizes_bytes=np.array(_CURVE_BYTES), times_s=np.array(times)
            )
        # all ranks send at once and a step waits for the slowest pair: with several nodes, some
        # neighbouring stages always lie on different ones
        crosses = num_nodes > 1
        p2p[size] = float(
            np.mean([s / p2p_time_s(device, s, inter_node=crosses) for s in _REFERENCE_BYTES])
        )
    return HardwareProfile(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        allreduce_bytes_per_s=allreduce,
        p2p_bytes_per_s=p2p,
        overlap_coefficient=device.overlap_coefficient,
        curves=curves,
        memory_bytes=device.memory_bytes,
        memory_bytes_per_s=device.memory_bytes_per_s * device.memory_efficiency,
        name=f"{device.name}_{num_nodes}x{gpus_per_node}",
        estimated=True,
        sources=(device.source,),
    )


def allreduce_time_s(card: Card, size_bytes: float, shape: GroupShape) -> float:
    """Return the seconds of an all-reduce of a tensor of `size_bytes` in a group.

    alpha + 2(n-1)/n * S / B. B = intra-node ring bandwidth, across nodes at most the adapters of
    the group's ranks on one node. alpha = base + the steps of the quicker of NCCL's algorithms:
    ring 2(n-k) intra + 2(k-1) inter hops, tree 2(n/k-1) intra + 2 log2(k) inter (tuning.cc).
    """
    fewest, most, nodes = shape
    ranks = max(fewest * nodes, most)
    intra, inter = card.intra_node, card.inter_node
    ring = 2 * (ranks - nodes) * intra.hop_s + 2 * (nodes - 1) * inter.hop_s
    tree = 2 * (most - 1) * intra.hop_s + 2 * math.ceil(math.log2(nodes)) * inter.hop_s
    bandwidth = math.inf
    if most > 1:
        bandwidth = intra.bytes_per_s * intra.collective_efficiency
    if nodes > 1:
        bandwidth = min(bandwidth, fewest * inter.bytes_per_s * inter.collective_efficiency)
    steps_s = min(ring, tree) if nodes > 1 else ring
    return card.collective_base_s + steps_s + 2 * (ranks - 1) / ranks * size_bytes / bandwidth


def all2all_time_s(card: Card, size_bytes: float, shape: GroupShape) -> float:
    """Return the seconds of an all-to-all of `size_bytes` local input per rank.

    alpha + max(S(n-1)/n / B_intra, S(n-r)/n / B_inter): each rank sends 1/n of its input to every
    peer, the part for the other n-r ranks through its adapter. alpha = base + one hop per peer of
    the node (and one across nodes).
    """
    fewest, most, nodes = shape
    ranks = max(fewest * nodes, most)
    intra, inter = card.intra_node, card.inter_node
    latency = card.collective_base_s + (most - 1) * intra.hop_s
    local = size_bytes * (most - 1) / ranks / (intra.bytes_per_s * intra.p2p_efficiency)
    if nodes == 1:
        return latency + local
    remote = size_bytes * (ranks - fewest) / ranks / (inter.bytes_per_s * inter.p2p_efficiency)
    return latency + inter.hop_s + max(local, remote)


def p2p_time_s(card: Card, size_bytes: float, *, inter_node: bool) -> float:
    """Return the seconds of sending `size_bytes` from every rank of a stage to the next stage.

    alpha + S/B; every rank has its own link or adapter.
    """
    link = card.inter_node if inter_node else card.intra_node
    bandwidth = link.bytes_per_s * link.p2p_efficiency
    return card.collective_base_s + link.hop_s + size_bytes / bandwidth


def _mean_busbw(card: Card, size: int, shape: GroupShape) -> float:
    """Return the bus bandwidth 2(n-1)/n * S / t averaged over the reference sizes, bytes/s."""
    factor = 2 * (size - 1) / size
    return float(np.mean([factor * s / allreduce_time_s(card, s, shape) for s in _REFERENCE_BYTES]))


def _group_shapes(
    world: int, gpus_per_node: int, size: int, *, consecutive: bool
) -> Sequence[GroupShape]:
    """Return the distinct shapes of all groups of a kind (groups can straddle nodes unevenly)."""
    step = 1 if consecutive else world // size
    starts = range(0, world, size) if consecutive else range(world // size)
    shapes = set()
    for start in starts:
        per_node = Counter((start + k * step) // gpus_per_node for k in range(size)).values()
        shapes.add((min(per_node), max(per_node), len(per_node)))
    return sorted(shapes)

"""Card: the datasheet of one device and its network, and how much of it software reaches.

Datasheet numbers (with `source`) and efficiency assumptions (with `basis`) are separate entries
of `hardware_configs/cards/*.json`, so that either can be replaced without touching the other.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopar.documents import catalog
from autopar.documents.json import load_object, shorten
from autopar.errors import DocumentError, InputError
from autopar.hardware import Curve, HardwareProfile
from autopar.sources import Source
from autopar.units import MIB

__all__ = [
    "Card",
    "GroupShape",
    "Link",
    "all2all_time_s",
    "allreduce_time_s",
    "estimate_hardware",
    "load_card",
    "p2p_time_s",
    "parse_hardware",
]


@dataclass(frozen=True, kw_only=True)
class Link:
    """One level of the network, per GPU and direction."""

    bytes_per_s: float
    collective_efficiency: float
    """Share of the bandwidth that rings of collectives reach on long messages."""
    p2p_efficiency: float
    """The same for send/receive and all-to-all."""
    hop_s: float
    """Latency of one step of a ring."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """One device and its network, in base units."""

    name: str
    description: str
    memory_bytes: float
    memory_bytes_per_s: float
    flop_per_s: dict[str, float]
    """Peak by precision (bf16, fp16, fp32), without sparsity."""
    num_sms: int
    gemm_efficiency: float
    attention_efficiency: float
    attention_half_seq_length: float
    memory_efficiency: float
    kernel_launch_s: float
    collective_base_s: float
    overlap_coefficient: float
    max_gpus_per_node: int
    intra_node: Link
    inter_node: Link
    source: Source


_BYTES = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_RATES = {"MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
_FLOPS = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_TIMES = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_PERCENT = {"percent": 0.01}


@dataclass(frozen=True, kw_only=True)
class _Range:
    """Plausible values of one number and the units that it is mistaken for."""

    least: float
    most: float
    unit: str = ""
    mistaken: Mapping[str, float]
    whole: bool = False

    @property
    def expected(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        unit = f" in {self.unit}" if self.unit else ""
        return f"{kind} from {self.least:.6g} to {self.most:.6g}{unit}"

    def guess(self, value: object) -> str | None:
        """Return the unit that a value outside the range looks to be in, and what to write."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if self.holds(value) or not abs(value) < _HUGE:
            return None
        fits = {u: value * f for u, f in self.mistaken.items() if self.holds(value * f)}
        if not fits:
            return None
        written = " or ".join(f"{scaled:.6g}" for scaled in fits.values())
        return f"it looks like {' or '.join(fits)}: write {written}"

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most


_HUGE = 1e300
"""Far above every range; larger integers cannot be scaled."""
_EFFICIENCY = _Range(least=0.02, most=1.0, mistaken=_PERCENT)
_PEAK = _Range(least=1e12, most=1e17, unit="FLOP/s", mistaken=_FLOPS)
_RANGES: dict[str, dict[str, _Range]] = {
    "device": {
        "memory_bytes": _Range(least=2.0**30, most=2.0**44, unit="bytes", mistaken=_BYTES),
        "memory_bytes_per_s": _Range(least=1e10, most=1e15, unit="bytes/s", mistaken=_RATES),
        "bf16_flop_per_s": _PEAK,
        "fp16_flop_per_s": _PEAK,
        "fp32_flop_per_s": _PEAK,
        "num_sms": _Range(least=1, most=10_000, mistaken={}, whole=True),
    },
    "efficiency": {
        "gemm": _EFFICIENCY,
        "attention": _EFFICIENCY,
        "attention_half_seq_length": _Range(least=1, most=1e6, unit="tokens", mistaken={}),
        "memory": _EFFICIENCY,
    },
    "overhead": {
        "kernel_launch_s": _Range(least=1e-7, most=1e-3, unit="s", mistaken=_TIMES),
        "collective_base_s": _Range(least=1e-7, most=1e-2, unit="s", mistaken=_TIMES),
        "overlap_coefficient": _Range(least=1.0, most=10.0, mistaken=_PERCENT),
    },
    "intra_node": {
        "max_gpus": _Range(least=1, most=4096, mistaken={}, whole=True),
        "bytes_per_s": _Range(least=1e9, most=1e13, unit="bytes/s", mistaken=_RATES),
        "collective_efficiency": _EFFICIENCY,
        "p2p_efficiency": _EFFICIENCY,
        "hop_s": _Range(least=1e-8, most=1e-3, unit="s", mistaken=_TIMES),
    },
    "inter_node": {
        "bytes_per_s": _Range(least=1e8, most=1e13, unit="bytes/s", mistaken=_RATES),
        "collective_efficiency": _EFFICIENCY,
        "p2p_efficiency": _EFFICIENCY,
        "hop_s": _Range(least=1e-8, most=1e-2, unit="s", mistaken=_TIMES),
    },
}
"""Every number of a card: far wider than devices differ, far narrower than units do."""
_TEXTS = ("name", "description")
_KEYS = ("format", "version", "aliases", *_TEXTS, *_RANGES)
_ENTRY_KEYS = ("value", "source", "basis")


def load_card(name: str) -> Card:
    """Return a card by name, alias or path; raises InputError naming file, key and value."""
    document = load_object(catalog.find_card(name))
    path, data = document.path, document.data
    for key, expected in (("format", "autopar-card"), ("version", 1)):
        if key not in data:
            shown = f'"{expected}"' if isinstance(expected, str) else str(expected)
            remedy = f'a device card starts with "{key}": {shown}'
            raise DocumentError(path, "this key is missing", key=key, remedy=remedy)
        if data[key] != expected:
            raise _unexpected(path, key, data[key], repr(expected))
    _refuse_unknown(path, data, _KEYS)
    for key in _TEXTS:
        if not isinstance(data.get(key, ""), str):
            raise _unexpected(path, key, data[key], "a text")
    values = {section: _numbers(path, data, section) for section in _RANGES}
    device, efficiency, overhead = values["device"], values["efficiency"], values["overhead"]
    return Card(
        name=data.get("name", path.stem),
        description=data.get("description", ""),
        memory_bytes=device["memory_bytes"],
        memory_bytes_per_s=device["memory_bytes_per_s"],
        flop_per_s={p: device[f"{p}_flop_per_s"] for p in ("bf16", "fp16", "fp32")},
        num_sms=int(device["num_sms"]),
        gemm_efficiency=efficiency["gemm"],
        attention_efficiency=efficiency["attention"],
        attention_half_seq_length=efficiency["attention_half_seq_length"],
        memory_efficiency=efficiency["memory"],
        kernel_launch_s=overhead["kernel_launch_s"],
        collective_base_s=overhead["collective_base_s"],
        overlap_coefficient=overhead["overlap_coefficient"],
        max_gpus_per_node=int(values["intra_node"]["max_gpus"]),
        intra_node=_link(values["intra_node"]),
        inter_node=_link(values["inter_node"]),
        source=Source(
            role="hardware card",
            path=f"{path.parent.name}/{path.name}",
            sha256=document.sha256,
            estimated=True,
        ),
    )


def _link(values: Mapping[str, float]) -> Link:
    keys = ("bytes_per_s", "collective_efficiency", "p2p_efficiency", "hop_s")
    return Link(**{key: values[key] for key in keys})


def _numbers(path: Path, data: Mapping[str, Any], section: str) -> dict[str, float]:
    """Return the numbers of one section, every one present and in its range."""
    ranges = _RANGES[section]
    entries = _object(path, data, section, "", f"an object of {', '.join(ranges)}")
    _refuse_unknown(path, entries, ranges, f"{section}.")
    found = {}
    for key, known in ranges.items():
        where = f"{section}.{key}"
        shape = f'{{"value": {known.expected}, "source" or "basis": where it is from}}'
        entry = _object(path, entries, key, f"{section}.", shape)
        _refuse_unknown(path, entry, _ENTRY_KEYS, f"{where}.")
        where += ".value"
        if "value" not in entry:
            raise DocumentError(path, f"this key is missing, expected {known.expected}", key=where)
        value = entry["value"]
        legal = not isinstance(value, bool) and isinstance(value, int | float)
        if not legal or not known.holds(value) or (known.whole and value != int(value)):
            raise _unexpected(path, where, value, known.expected, known.guess(value))
        found[key] = float(value)
    return found


def _object(
    path: Path, data: Mapping[str, Any], key: str, prefix: str, shape: str
) -> dict[str, Any]:
    if key not in data:
        raise DocumentError(path, f"this key is missing, expected {shape}", key=prefix + key)
    value = data[key]
    if not isinstance(value, dict):
        raise _unexpected(path, prefix + key, value, shape)
    return value


def _refuse_unknown(
    path: Path, data: Iterable[str], known: Iterable[str], prefix: str = ""
) -> None:
    names = list(known)
    for key in data:
        if key not in names and not key.startswith("_"):  # `_...` is a comment for people
            (near,) = difflib.get_close_matches(key[:200], names, n=1, cutoff=0.0)
            shown = key if len(key) <= 120 else key[:120] + "..."
            raise DocumentError(
                path,
                f"this key is unknown; the nearest known key is {near!r}",
                key=prefix + shown,
            )


def _unexpected(
    path: Path, key: str, value: object, expected: str, remedy: str | None = None
) -> DocumentError:
    problem = f"the value is {shorten(value)}, expected {expected}"
    return DocumentError(path, problem, key=key, remedy=remedy)


# --------------------------------------------------------------------------------------------------
# HardwareProfile from a card: alpha-beta times of every group a plan can use.
#
# A group is described by its *shape*: ranks per node and nodes. Times follow NCCL's own cost model
# (src/graph/tuning.cc): a latency per step of the ring or tree and a bandwidth that the slowest
# link sets. All groups of a kind run at the same time, as in training: every GPU brings its own
# NVLink ports and its own network adapter, so groups do not share links.


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

"""Card: the datasheet of one device and its network, with the efficiency that software reaches.

Datasheet numbers (with `source`) and efficiency assumptions (with `basis`) are separate entries of
`hardware_configs/cards/*.json`, so that either can be replaced without touching the other. All
numbers of a device are in its card; estimates and the systems of the closed-form models are derived
from it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from msgspec import Meta, field
from numpy.typing import NDArray

from autopar.documents import catalog
from autopar.documents.checks import published
from autopar.documents.json import (
    Fault,
    JsonDocument,
    converted,
    headed,
    load_object,
    own_reader,
    read_record,
)
from autopar.errors import DocumentError, InputError
from autopar.rates.collectives import (
    NOMINAL,
    TRANSFER_SYNCHRONISE_S,
    FusedDispatcher,
    GroupShape,
    Network,
    SiteFactors,
    collective_time_s,
    p2p_time_s,
)
from autopar.rates.constants import ELEMENT_BYTES, KernelsSection
from autopar.rates.measured import COLLECTIVES, OPERATIONS, Curve, HardwareProfile
from autopar.records import Record, expected_of, fields_of, record_of, replace, shorten, typed
from autopar.sources import CARD_ROLE, Source
from autopar.units import MIB

if TYPE_CHECKING:
    from autopar.rates.site import Site
    from autopar.rates.stack import Stack

FORMAT = "autopar-card"
"""Value of `format` that identifies a card."""


class Link(Record):
    """One level of the network, per GPU and direction."""

    bytes_per_s: float
    collective_efficiency: float
    """Fraction of the bandwidth that ring collectives reach with long messages, 0 to 1."""
    hop_s: float
    """Latency of one step of a ring, seconds."""


class Card(Record):
    """One device and its network, in base units."""

    name: str
    description: str
    architecture: str | None
    """Compute capability, such as sm_90, or LLVM target, such as gfx942; None if unknown."""
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
    network: Network
    """Links with the bandwidth that collectives reach, for `autopar.rates.collectives`."""
    domain_gpus: int | None
    """GPUs joined by `intra_node` links across several nodes; None where the links join one node.
    """
    more: Mapping[str, float]
    """Optional numbers by "section.key" in base units, such as "host.bytes_per_s"; read by
    closed-form models and estimates of offload."""
    kernels: KernelsSection | None
    """Constants of kernel times; None for a custom card without them."""
    path: Path
    source: Source

    def peak(self, precision: str) -> float:
        """Return the dense peak of GEMMs in a precision, FLOP/s.

        A card without a figure for 8 or 4 bits has twice, or four times, its peak in bf16.
        """
        if precision in self.flop_per_s:
            return self.flop_per_s[precision]
        times = ELEMENT_BYTES["bf16"] / ELEMENT_BYTES[precision]
        figure = self.more.get("device.nvfp4_flop_per_s" if times > 2 else "device.fp8_flop_per_s")
        return times * self.flop_per_s["bf16"] if figure is None else figure

    @property
    def gpu(self) -> str:
        """Name of the GPU model for rules and kernels: a custom card has that of a shipped one.

        It is the card of equal architecture with the closest bf16 peak and bandwidth of links in
        a node, as ratios.
        """
        if catalog.shipped_card(self.name) == self.path or self.architecture is None:
            return self.name
        shipped = [load_card(name) for name in catalog.card_names()]
        alike = [card for card in shipped if card.architecture == self.architecture]

        def distance(card: Card) -> float:
            peaks = math.log(card.flop_per_s["bf16"] / self.flop_per_s["bf16"])
            links = math.log(card.network.link_bytes_per_s / self.network.link_bytes_per_s)
            return abs(peaks) + abs(links)

        return min(alike, key=distance, default=self).name

    def need(self, key: str, reader: str) -> float:
        """Return one entry of `more`, such as "host.memory_bytes", in base units.

        Raises DocumentError with the card, the missing key and the `reader` that needs it.
        """
        if key not in self.more:
            raise DocumentError(
                self.path,
                f"this key is missing, and {reader} needs it",
                key=key,
                remedy=f"Add {_OPTIONAL[key]}",
            )
        return self.more[key]


# Datasheets give memory sizes in powers of 1024, rates and FLOP in powers of 1000.
_BYTES = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}
_RATES = {"MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
_FLOPS = {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_TIMES = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_PERCENT = {"percent": 0.01}
_HUGE = 1e300
"""Upper limit of integers that are scaled by a unit, far above every valid range."""
_QUALITIES = Literal["measured", "derived", "nominal"]
"""Origin of a figure.

measured : on this device; derived : from a related device or a fit over several; nominal : from the
datasheet or the vendor.
"""
_SPREAD = Meta(
    ge=0.0,
    le=10.0,
    description="Nine of ten values differ by at most this share.",
    extra={"expected": "a share from 0 to 10"},
)
_OTHERS: dict[str, Any] = {
    "source": Annotated[Any, Meta(description="Source datasheet.")],
    "basis": Annotated[Any, Meta(description="Reason of the assumption.")],
    "quality": _QUALITIES,
    "spread": Annotated[float, _SPREAD],
}
"""Keys of an entry other than its value."""


def _range(
    least: float,
    most: float,
    mistaken: Mapping[str, float] = MappingProxyType({}),
    *,
    unit: str = "",
    whole: bool = False,
) -> Meta:
    """Return the `Meta` that reads a card entry {"value", "source" or "basis"} as its value.

    least, most : limits, far wider than devices differ and narrower than units differ
    mistaken : units that users confuse with `unit`, with their factors to it
    unit : base unit in messages
    whole : True for an integer
    """
    unit_of = f" in {unit}" if unit else ""
    expected = f"a {'whole ' if whole else ''}number from {least:.6g} to {most:.6g}{unit_of}"

    def problem(value: object) -> str:
        guess = _guess(value, least, most, mistaken)
        return f"the value is {shorten(value)}, expected {expected}{guess}"

    bounds = Meta(
        ge=least,
        le=most,
        description=f"In {unit}." if unit else None,
        extra={"expected": expected, "problem": problem},
    )
    kind: Any = int if whole else float
    no_others = {"source": None, "basis": None, "quality": "nominal", "spread": 0.0}
    entry: Any = record_of("Entry", {"value": Annotated[kind, bounds], **_OTHERS}, no_others)

    def read(value: Any, key: str, found: list[Fault]) -> float | None:
        made = converted(entry, value, key, found)
        return None if made is None else made.value

    shape = f'{{"value": {expected}, "source" or "basis": where it is from}}'
    return own_reader(read, entry, shape)


def _guess(value: object, least: float, most: float, mistaken: Mapping[str, float]) -> str:
    """Return a hint with the likely unit of an out-of-range value and the value to write, or ""."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    # Written with "not <" so that NaN is rejected as well.
    if not abs(value) < _HUGE:
        return ""
    fits = {u: value * f for u, f in mistaken.items() if least <= value * f <= most}
    if not fits:
        return ""
    written = " or ".join(f"{scaled:.6g}" for scaled in fits.values())
    return f". It looks like {' or '.join(fits)}: write {written}"


_EFFICIENCY = _range(0.02, 1.0, _PERCENT)
_SHARE = _range(0.0, 0.9, _PERCENT)
_PEAK = _range(1e12, 1e17, _FLOPS, unit="FLOP/s")
_MEMORY = _range(2.0**30, 2.0**44, _BYTES, unit="bytes")
_GPUS = _range(1, 4096, whole=True)
_MANY_GPUS = _range(1, 10**7, whole=True)
_SMS = _range(1, 10_000, whole=True)
_TOKENS = _range(1, 1e6, unit="tokens")
# A slow-down factor is at least 1.
_OVERLAP = _range(1.0, 10.0, _PERCENT)


def _rate(least: float, most: float) -> Meta:
    return _range(least, most, _RATES, unit="bytes/s")


def _time(least: float, most: float) -> Meta:
    return _range(least, most, _TIMES, unit="s")


_ARCHITECTURE = "such as sm_90 (NVIDIA) or gfx942 (AMD)"


def _read_architecture(value: Any, key: str, found: list[Fault]) -> str | None:
    made = converted(_ArchitectureEntry, value, key, found)
    if made is not None and re.fullmatch("sm_[0-9]{2,3}|gfx[0-9a-f]{3,4}", made.value) is None:
        found.append((key, f"the value is {shorten(made.value)}, expected one {_ARCHITECTURE}"))
    return None if made is None else made.value


_ArchitectureEntry: Any = record_of(
    "Entry", {"value": str, "source": _OTHERS["source"]}, {"source": None}
)


class _Device(Record):
    """Datasheet numbers of one device; peaks are without sparsity."""

    architecture: Annotated[
        str | None, own_reader(_read_architecture, _ArchitectureEntry, _ARCHITECTURE)
    ] = None
    """Compute capability (NVIDIA) or LLVM target (AMD): decides which precisions have tensor cores
    and whether flash attention runs; None where unknown."""
    memory_bytes: Annotated[float, _MEMORY]
    memory_bytes_per_s: Annotated[float, _rate(1e10, 1e15)]
    bf16_flop_per_s: Annotated[float, _PEAK]
    fp16_flop_per_s: Annotated[float, _PEAK]
    fp32_flop_per_s: Annotated[float, _PEAK]
    num_sms: Annotated[int, _SMS]
    fp8_flop_per_s: Annotated[float | None, _PEAK] = None
    nvfp4_flop_per_s: Annotated[float | None, _PEAK] = None
    vector_fp16_flop_per_s: Annotated[float | None, _PEAK] = None
    """Peak of the vector units in fp16, FLOP/s; in fp32 it is `fp32_flop_per_s`."""
    vector_bf16_flop_per_s: Annotated[float | None, _PEAK] = None


class _Efficiency(Record):
    """Fractions of the device's rates that kernels reach."""

    gemm: Annotated[float, _EFFICIENCY]
    attention: Annotated[float, _EFFICIENCY]
    attention_half_seq_length: Annotated[float, _TOKENS]
    memory: Annotated[float, _EFFICIENCY]
    vector: Annotated[float | None, _EFFICIENCY] = None


class _Overhead(Record):
    """Overheads of kernels and collectives that do not depend on their work."""

    kernel_launch_s: Annotated[float, _time(1e-7, 1e-3)]
    collective_base_s: Annotated[float, _time(1e-7, 1e-2)]
    overlap_coefficient: Annotated[float, _OVERLAP]


class _InterNode(Record):
    """The network between nodes, per GPU and direction."""

    bytes_per_s: Annotated[float, _rate(1e8, 1e13)]
    collective_efficiency: Annotated[float, _EFFICIENCY]
    p2p_efficiency: Annotated[float, _EFFICIENCY]
    hop_s: Annotated[float, _time(1e-8, 1e-2)]
    max_gpus: Annotated[int | None, _MANY_GPUS] = None
    """Largest number of GPUs that the fabric connects; None where unknown."""
    collective_sm_share: Annotated[float | None, _SHARE] = None
    """Fraction of the multiprocessors that a running collective occupies."""


class _IntraNode(_InterNode):
    """The network inside a node, per GPU and direction."""

    bytes_per_s: Annotated[float, _rate(1e9, 1e13)]
    hop_s: Annotated[float, _time(1e-8, 1e-3)]
    max_gpus: Annotated[int, _GPUS]
    tray_gpus: Annotated[int | None, _GPUS] = None
    """Number of GPUs of a compute tray, which a job gets as a whole; None: one GPU or more."""


_BUS_SHARE = _range(0.02, 2.0, _PERCENT)
"""Values exceed 1 with in-switch reduction: bus bandwidth is defined by the traffic of a ring."""
_FACTOR = _range(0.1, 10.0, _PERCENT)
_STEP = _time(0.0, 1e-2)
_COPIES = _range(0.0, 100.0)


class _Collectives(Record):
    """Bandwidth fractions of collectives on the links, and latencies of the NCCL protocols."""

    domain_gpus: Annotated[int | None, _GPUS] = None
    """GPUs joined by the links of a node, where the switch of a rack joins several nodes."""
    all_reduce: Annotated[float, _BUS_SHARE]
    """Bus bandwidth of long messages over the nominal link, for 8 ranks or more in a domain."""
    all_gather: Annotated[float, _EFFICIENCY]
    """Bandwidth fraction of an all-gather and a reduce-scatter over the nominal link."""
    all_to_all: Annotated[float, _EFFICIENCY]
    p2p: Annotated[float, _EFFICIENCY]
    ring_2_ranks: Annotated[float, _EFFICIENCY]
    """Fraction of the ring bandwidths that 2 ranks in a domain reach."""
    ring_4_ranks: Annotated[float, _EFFICIENCY]
    all_to_all_2_ranks: Annotated[float, _EFFICIENCY]
    all_to_all_4_ranks: Annotated[float, _EFFICIENCY]
    adapter: Annotated[float, _EFFICIENCY]
    """Fraction of the nominal adapter rate that long messages reach."""
    tree: Annotated[float, _EFFICIENCY]
    """Tree bandwidth over ring bandwidth inside a domain."""
    all_to_all_latency: Annotated[float, _FACTOR]
    """Latencies (base and steps) of an all-to-all over those of a ring."""
    ll_share: Annotated[float, _EFFICIENCY]
    """Fraction of the bandwidth left for data by the flags of the LL protocol."""
    ll_base_s: Annotated[float, _STEP]
    ll_hop_s: Annotated[float, _STEP]
    ll_net_hop_s: Annotated[float, _STEP]
    ll128_share: Annotated[float, _EFFICIENCY]
    ll128_base_s: Annotated[float, _STEP]
    ll128_hop_s: Annotated[float, _STEP]
    ll128_net_hop_s: Annotated[float, _STEP]
    simple_base_s: Annotated[float, _STEP]
    simple_hop_s: Annotated[float, _STEP]
    simple_net_hop_s: Annotated[float, _STEP]
    simple_fill_s: Annotated[float, _STEP]
    """Time constant of filling the pipeline of chunks, seconds."""
    p2p_base_s: Annotated[float, _STEP]
    p2p_net_base_s: Annotated[float, _STEP]


class _MoeExchange(Record):
    """Speed at which a fused dispatcher sends tokens to experts and back."""

    dispatch_base_s: Annotated[float, _STEP]
    combine_base_s: Annotated[float, _STEP]
    dispatch_sm_bytes_per_s: Annotated[float, _rate(1e8, 1e13)]
    """Copy rate of one multiprocessor, bytes/s."""
    combine_sm_bytes_per_s: Annotated[float, _rate(1e8, 1e13)]
    dispatch_token_s: Annotated[float, _STEP]
    """Time of one multiprocessor per copied token, in addition to its bytes, seconds."""
    combine_token_s: Annotated[float, _STEP]
    dispatch_own_copies: Annotated[float, _COPIES]
    """Copies per token in addition to those sent to the ranks of its experts."""
    combine_own_copies: Annotated[float, _COPIES]
    link: Annotated[float, _EFFICIENCY]


class _Host(Record):
    """Host memory of one GPU and the link to it, per direction."""

    memory_bytes: Annotated[float, _MEMORY]
    bytes_per_s: Annotated[float, _rate(1e8, 1e13)]
    """Rate of the link between device and host."""
    memory_bytes_per_s: Annotated[float | None, _rate(1e8, 1e13)] = None
    """Rate of the host memory, which limits optimizer updates on the host, bytes/s."""
    efficiency: Annotated[float, _EFFICIENCY]


@published("card")
class CardDocument(Record):
    """One device and its network: every number with its source or the basis of its assumption."""

    format: Literal["autopar-card"]
    version: Literal[1]
    name: str | None = None
    """Name of the card; the file name without suffix by default."""
    description: str = ""
    aliases: list[str] = field(default_factory=list)
    device: _Device
    efficiency: _Efficiency
    overhead: _Overhead
    intra_node: _IntraNode
    inter_node: _InterNode
    host: _Host | None = None
    """Host memory for offload; None where it is unknown."""
    kernels: KernelsSection | None = None
    collectives: _Collectives | None = None
    """None: link efficiencies and the latencies of NCCL's own tables are used."""
    moe_exchange: _MoeExchange | None = None
    """None: dispatch and combine are estimated as all-to-alls."""

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `data` after a check of its header; raises an error for another document type."""
        return headed(data, FORMAT, "a device card")


_SECTIONS: dict[str, type[Record]] = {
    "device": _Device,
    "efficiency": _Efficiency,
    "overhead": _Overhead,
    "intra_node": _IntraNode,
    "inter_node": _InterNode,
    "host": _Host,
}
_OPTIONAL = {
    f"{section}.{one.name}": expected_of(one.type)
    for section, part in _SECTIONS.items()
    for one in fields_of(part).values()
    # A card may omit `host`, so that keys required inside it are optional here.
    if (section == "host" or not one.required) and one.name != "architecture"
}
"""Expected value of every optional number of a card, by "section.key"."""


@typed
def load_card(name: str) -> Card:
    """Return a card by name, alias or path; raises InputError if it is unknown or invalid."""
    return read_card(load_object(catalog.find_card(name)))


def read_card(document: JsonDocument) -> Card:
    """Return the card of a document; raises DocumentError if a key is missing or invalid."""
    path = document.path
    card = read_record(CardDocument, path, document.data)
    device, efficiency, overhead = card.device, card.efficiency, card.overhead
    found = Card(
        name=path.stem if card.name is None else card.name,
        description=card.description,
        architecture=device.architecture,
        memory_bytes=device.memory_bytes,
        memory_bytes_per_s=device.memory_bytes_per_s,
        flop_per_s={
            # Profiles know three precisions; other peaks, such as fp8, are in `more`.
            "bf16": device.bf16_flop_per_s,
            "fp16": device.fp16_flop_per_s,
            "fp32": device.fp32_flop_per_s,
        },
        num_sms=device.num_sms,
        gemm_efficiency=efficiency.gemm,
        attention_efficiency=efficiency.attention,
        attention_half_seq_length=efficiency.attention_half_seq_length,
        memory_efficiency=efficiency.memory,
        kernel_launch_s=overhead.kernel_launch_s,
        collective_base_s=overhead.collective_base_s,
        overlap_coefficient=overhead.overlap_coefficient,
        max_gpus_per_node=card.intra_node.max_gpus,
        intra_node=_link(card.intra_node),
        inter_node=_link(card.inter_node),
        network=_network(card),
        domain_gpus=None if card.collectives is None else card.collectives.domain_gpus,
        more=dict(_more(card)),
        kernels=card.kernels,
        path=path,
        source=Source(
            role=CARD_ROLE,
            # Folder and name only: the same card must give the same document wherever it is stored.
            path=f"{path.parent.name}/{path.name}",
            sha256=document.sha256,
            estimated=True,
        ),
    )
    _require_rates(found)
    return found


def _require_rates(card: Card) -> None:
    """Raise DocumentError for an attention rate above the peak; rates of GEMMs are shares of it."""
    for name, kernel in ({} if card.kernels is None else card.kernels.attention).items():
        precisions = ("fp8",) if "fp8" in name else ("bf16", "fp16")
        peak = max(map(card.peak, precisions))
        for direction, figure in (("forward", kernel.forward), ("backward", kernel.backward)):
            if figure is not None and figure["flop_per_s"] > peak:
                raise DocumentError(
                    card.path,
                    f"the value is {figure['flop_per_s']:.6g}, more than the peak in "
                    f"{precisions[0]} ({peak:.6g})",
                    key=f"kernels.attention.{name}.{direction}.value.flop_per_s",
                    remedy="Write a rate that the device reaches",
                )


def _link(part: _InterNode) -> Link:
    return Link(
        bytes_per_s=part.bytes_per_s,
        collective_efficiency=part.collective_efficiency,
        hop_s=part.hop_s,
    )


def _network(card: CardDocument) -> Network:
    """Return the network of a card; link efficiencies replace missing collective figures."""
    intra, inter, found = card.intra_node, card.inter_node, card.collectives
    if found is None:
        return Network(
            link_bytes_per_s=intra.bytes_per_s,
            adapter_bytes_per_s=inter.bytes_per_s,
            allreduce_share=intra.collective_efficiency,
            allgather_share=intra.collective_efficiency,
            all2all_share=intra.p2p_efficiency,
            p2p_share=intra.p2p_efficiency,
            adapter_share=inter.collective_efficiency,
        )
    # Tree latencies are NCCL's own figures: no public table lists them separately.
    low, packed, simple = NOMINAL
    protocols = (
        replace(
            low,
            base_s=found.ll_base_s,
            hop_s=found.ll_hop_s,
            net_hop_s=found.ll_net_hop_s,
            share=found.ll_share,
        ),
        replace(
            packed,
            base_s=found.ll128_base_s,
            hop_s=found.ll128_hop_s,
            net_hop_s=found.ll128_net_hop_s,
            share=found.ll128_share,
        ),
        replace(
            simple,
            base_s=found.simple_base_s,
            hop_s=found.simple_hop_s,
            net_hop_s=found.simple_net_hop_s,
            fill_s=found.simple_fill_s,
        ),
    )
    return Network(
        link_bytes_per_s=intra.bytes_per_s,
        adapter_bytes_per_s=inter.bytes_per_s,
        allreduce_share=found.all_reduce,
        allgather_share=found.all_gather,
        all2all_share=found.all_to_all,
        p2p_share=found.p2p,
        ring_few_ranks=(found.ring_2_ranks, found.ring_4_ranks),
        all2all_few_ranks=(found.all_to_all_2_ranks, found.all_to_all_4_ranks),
        adapter_share=found.adapter,
        tree_share=found.tree,
        all2all_latency=found.all_to_all_latency,
        protocols=protocols,
        p2p_base_s=found.p2p_base_s,
        p2p_net_base_s=found.p2p_net_base_s,
        exchange=_exchange(card.moe_exchange),
    )


def _exchange(found: _MoeExchange | None) -> FusedDispatcher | None:
    if found is None:
        return None
    return FusedDispatcher(
        base_s=(found.dispatch_base_s, found.combine_base_s),
        sm_bytes_per_s=(found.dispatch_sm_bytes_per_s, found.combine_sm_bytes_per_s),
        token_s=(found.dispatch_token_s, found.combine_token_s),
        own_copies=(found.dispatch_own_copies, found.combine_own_copies),
        link_share=found.link,
    )


def _more(card: CardDocument) -> Iterator[tuple[str, float]]:
    for key in _OPTIONAL:
        section, name = key.split(".")
        # `card.host` may be None, which has none of these attributes.
        value = getattr(getattr(card, section), name, None)
        if value is not None:
            yield key, value


# --------------------------------------------------------------------------------------------------
# HardwareProfile from a card, for every group that a plan can use.
#
# It contains what a hardware profiler would measure: curves of every collective in every group,
# computed by `autopar.rates.collectives`, and bandwidths that are averages over these curves.


_CURVE_BYTES = np.array([float(MIB << k) for k in range(11)])
"""Message sizes of collective times in Galvatron's files, bytes: 1, 2, 4, ... 1024 MiB."""
_REFERENCE = slice(4, 10)
"""Indices of 16 to 512 MiB, over which bandwidths in Galvatron's files are averaged."""


def parse_hardware(text: str) -> tuple[str, int, int]:
    """Return (card, number of nodes, GPUs per node) of `CARD:NODESxGPUS`, for example `h100:4x8`.

    Raises InputError for text in another form.
    """
    match = re.fullmatch(r"(.+):([0-9]{1,6})[xX]([0-9]{1,4})", text)
    if match is None or not int(match[2]) or not int(match[3]):
        number = re.fullmatch(r"([^:]+):([1-9][0-9]{0,3})", text)
        remedy = "Use, for example, h100:4x8 for 4 nodes of 8 GPUs"
        if number is not None:
            remedy = f"Use {number[1]}:1x{number[2]} for one node of {number[2]} GPUs"
        raise InputError(f"--hardware {text}: expected CARD:NODESxGPUS", remedy=remedy)
    return match[1], int(match[2]), int(match[3])


def require_node(device: Card, gpus_per_node: int) -> None:
    """Raise InputError if a node has more GPUs than the card connects."""
    if gpus_per_node > device.max_gpus_per_node:
        raise InputError(
            f"card {device.name!r} connects at most {device.max_gpus_per_node} GPUs of a node, "
            f"got {gpus_per_node}",
            remedy="Use more nodes, or a card with a larger intra_node.max_gpus",
        )


def estimate_hardware(
    card: str,
    *,
    num_nodes: int,
    gpus_per_node: int,
    stack: Stack | None = None,
    site: Site | None = None,
) -> HardwareProfile:
    """Return the estimated profile of `num_nodes` x `gpus_per_node` devices of a card.

    Bandwidths and times at 1, 2, 4, ... 1024 MiB are given for every divisor of the world size, for
    consecutive and for strided groups. Known link factors of `site` replace the card's. The overlap
    coefficient of `stack` replaces the card's, and the other overlap factors of the stack become
    `hiding`. Raises InputError for an unknown card, or more GPUs per node than it connects.
    """
    device = load_card(card)
    if num_nodes < 1 or gpus_per_node < 1:
        raise InputError(
            f"{num_nodes} nodes x {gpus_per_node} GPUs is not a cluster", remedy="Both from 1"
        )
    require_node(device, gpus_per_node)
    world = num_nodes * gpus_per_node
    # Degrees of a plan divide the world size, so that no other group occurs.
    degrees = [g for g in range(2, world + 1) if world % g == 0]
    domain = gpus_per_node * nodes_joined(device, num_nodes, gpus_per_node)
    if site is not None:
        site.require_card(device)
    network = device.network if site is None else site.network(device.network)
    factors = SiteFactors() if site is None else site.factors
    priced = _Priced(network, factors)
    allreduce: dict[tuple[int, bool], float] = {}
    curves: dict[tuple[str, int], Curve] = {}
    strided: dict[tuple[str, int], Curve] = {}
    for size in degrees:
        for consecutive in (True, False):
            shapes = _group_shapes(world, domain, size, consecutive=consecutive)
            found = {name: priced.curve(name, shapes) for name in COLLECTIVES}
            allreduce[size, consecutive] = _mean_busbw(found["allreduce"], size)
            # There is one world group, whether strided or not.
            if consecutive or size < world:
                kind = curves if consecutive else strided
                kind.update({(name, size): curve for name, curve in found.items()})
    transfer = _transfer(network, factors, crosses=world > domain)
    # Message size over total time: bandwidths in Galvatron's files include the latency.
    p2p_bytes_per_s = float(np.mean((transfer.sizes_bytes / transfer.times_s)[_REFERENCE]))
    return HardwareProfile(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        allreduce_bytes_per_s=allreduce,
        p2p_bytes_per_s=dict.fromkeys(degrees, p2p_bytes_per_s),
        overlap_coefficient=(
            device.overlap_coefficient if stack is None else stack.overlap_coefficient
        ),
        hiding=None if stack is None else stack.hiding,
        curves=curves,
        strided_curves=strided,
        p2p_curves=dict.fromkeys(degrees, transfer),
        domain_gpus=domain if domain > gpus_per_node else None,
        memory_bytes=device.memory_bytes,
        # The rate that kernels reach, as a measurement would give it.
        memory_bytes_per_s=device.memory_bytes_per_s * device.memory_efficiency,
        name=f"{device.name}_{num_nodes}x{gpus_per_node}",
        estimated=True,
        sources=(device.source, *(found.source for found in (stack, site) if found is not None)),
    )


def nodes_joined(card: Card, num_nodes: int, gpus_per_node: int) -> int:
    """Return the number of whole nodes joined by the links of one domain, at least 1.

    Racks are filled equally and as far as possible, such as 64 of 72 GPUs in each of two racks for
    128 GPUs: jobs are placed so that groups of neighbours stay in a rack. Where that would leave
    more than half of a rack empty, all racks but the last are full.
    """
    most = 1 if card.domain_gpus is None else max(1, card.domain_gpus // gpus_per_node)
    equal = max(n for n in range(1, min(most, num_nodes) + 1) if num_nodes % n == 0)
    return equal if equal == num_nodes or 2 * equal >= most else most


def tray_gpus(card: Card) -> int | None:
    """Return the GPUs of a compute tray, a host of a rack; None: a node is a host."""
    found = card.more.get("intra_node.tray_gpus")
    return None if found is None else int(found)


def hosts_of(card: Card, num_nodes: int, gpus_per_node: int) -> tuple[int, int]:
    """Return (hosts, GPUs of each), which are the trays of racks, for a launcher of processes."""
    tray = tray_gpus(card)
    if tray is None or gpus_per_node % tray:
        return num_nodes, gpus_per_node
    return num_nodes * gpus_per_node // tray, tray


def domain_of(card: Card, gpus: int) -> int:
    """Return the number of a run's GPUs in each domain, nodes or racks, of a cluster of `card`.

    Racks are filled as in `nodes_joined`: 128 GPUs are 64 in each of two racks of 72.
    """
    if card.domain_gpus is None:
        return card.max_gpus_per_node
    node = min(card.max_gpus_per_node, gpus)
    if gpus % node:
        node = 1  # racks that are not full
    return node * nodes_joined(card, gpus // node, node)


def _transfer(network: Network, factors: SiteFactors, *, crosses: bool) -> Curve:
    """Return the times of messages between neighbouring stages, all ranks sending at once.

    The slowest pair counts: with several domains, some neighbours are always in different ones.
    """
    moving = p2p_time_s(network, _CURVE_BYTES, crosses=crosses, site=factors)
    times = moving + TRANSFER_SYNCHRONISE_S
    return Curve(sizes_bytes=_CURVE_BYTES, times_s=times)


class _Priced:
    """Collective times on one network, computed once per operation and group shape."""

    def __init__(self, network: Network, factors: SiteFactors) -> None:
        self._network = network
        self._factors = factors
        self._times: dict[tuple[str, GroupShape], NDArray[np.float64]] = {}

    def curve(self, operation: str, shapes: Sequence[GroupShape]) -> Curve:
        """Return the times of the slowest of these groups by message size."""
        # Groups of a kind run at the same time, and the slowest decides.
        times = np.max([self._of(operation, shape) for shape in shapes], axis=0)
        return Curve(sizes_bytes=_CURVE_BYTES, times_s=times)

    def _of(self, operation: str, shape: GroupShape) -> NDArray[np.float64]:
        key = operation, shape
        if key not in self._times:
            self._times[key] = collective_time_s(
                self._network, operation, _CURVE_BYTES, shape, self._factors
            )
        return self._times[key]


def _mean_busbw(curve: Curve, size: int) -> float:
    """Return the bus bandwidth 2(n-1)/n * S / t averaged over the reference sizes, bytes/s."""
    rates = OPERATIONS["allreduce"].bus_factor(size) * curve.sizes_bytes / curve.times_s
    return float(np.mean(rates[_REFERENCE]))


def _group_shapes(world: int, domain: int, size: int, *, consecutive: bool) -> Sequence[GroupShape]:
    """Return the distinct shapes of all consecutive, or all strided, groups of `size` ranks.

    Groups can straddle domains unevenly.
    """
    # Ranks are numbered node by node, so that the rank number gives the domain.
    step = 1 if consecutive else world // size
    starts = range(0, world, size) if consecutive else range(world // size)
    shapes = set()
    for start in starts:
        per_node = Counter((start + k * step) // domain for k in range(size)).values()
        shapes.add(GroupShape(size, min(per_node), max(per_node), len(per_node)))
    return sorted(shapes)

"""Seconds of collectives, transfers and expert exchanges on a card's network.

Without it nothing would say how long ranks talk that have only a card and no measurement. Groups
are described by their *shape*: ranks, those in an NVLink domain, and domains. Formulas follow
NCCL's own cost model (src/graph/tuning.cc): every protocol has a latency per step of its ring or
tree and a share of the bandwidth that the slowest link sets, and the quickest protocol is taken.
All groups of a kind run at the same time, as in training: every GPU has its own NVLink ports and
its own share of the adapters, so groups do not share links.

Sizes are those of `autopar.rates.measured.OPERATIONS`, which are nccl-tests' too: all-reduce: the
tensor; all-gather: what is gathered; reduce-scatter: what is scattered; all-to-all: the send buffer
of one rank; all in bytes. Every function takes one size or an array of sizes.
"""

from __future__ import annotations

import math
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.records import Record

F64 = NDArray[np.float64]

TRANSFER_SYNCHRONISE_S = 80e-6
"""What two pipeline stages wait for each other beside the message; no part of `p2p_time_s`.

Fitted to published training steps; nccl-tests' transfers do not have it.
"""


class GroupShape(NamedTuple):
    """How the ranks of a group lie on NVLink domains, which they may straddle unevenly."""

    ranks: int
    fewest: int
    """Ranks of the group in the domain that has the fewest of them."""
    most: int
    nodes: int
    """Domains: nodes, or racks where a switch joins several nodes."""

    @classmethod
    def even(cls, *, ranks: int, per_node: int) -> GroupShape:
        """Return the shape of `ranks` of which `per_node` lie in every domain.

        The last domain has the rest. Raises ValueError for numbers below 1.
        """
        if ranks < 1 or per_node < 1:
            raise ValueError(f"{ranks} ranks, {per_node} in a domain is no group; both from 1")
        nodes = -(-ranks // per_node)
        fewest = ranks - (nodes - 1) * per_node
        return cls(ranks, min(fewest, per_node), min(ranks, per_node), nodes)


class Protocol(Record):
    """What one protocol of NCCL (LL, LL128 or Simple) takes besides the bytes."""

    base_s: float
    hop_s: float
    """Latency of a step of a ring inside a domain, and of a step across domains."""
    net_hop_s: float
    tree_hop_s: float
    """The same for a tree."""
    tree_net_hop_s: float
    share: float
    """Of the bus bandwidth, that its flags leave to data."""
    fill_s: float = 0.0
    """Time constant of filling the pipeline of chunks; see `_filled_s`."""


# NCCL's tuning.cc (baseLat, hwLat; Hopper's row): what stands in for a card that has no figures
_LL = Protocol(
    base_s=6.6e-6,
    hop_s=0.6e-6,
    net_hop_s=2.7e-6,
    tree_hop_s=0.6e-6,
    tree_net_hop_s=5e-6,
    share=0.25,
)
_LL128 = Protocol(
    base_s=14e-6,
    hop_s=1.9e-6,
    net_hop_s=4e-6,
    tree_hop_s=1.25e-6,
    tree_net_hop_s=8.5e-6,
    share=0.92,
)
_SIMPLE = Protocol(
    base_s=8.4e-6,
    hop_s=3.4e-6,
    net_hop_s=14e-6,
    tree_hop_s=4e-6,
    tree_net_hop_s=14e-6,
    share=1.0,
)
NOMINAL = (_LL, _LL128, _SIMPLE)
"""LL, LL128 and Simple by NCCL's own tables."""


class Exchange(Record):
    """How fast a fused dispatcher (DeepEP, HybridEP) moves tokens to experts and back.

    A multiprocessor copies a token in `token_s` and its bytes at `sm_bytes_per_s`; `own_copies`
    are the copies besides those to the token's ranks (read, received). Each a pair: dispatch,
    combine.
    """

    base_s: tuple[float, float]
    sm_bytes_per_s: tuple[float, float]
    token_s: tuple[float, float]
    own_copies: tuple[float, float]
    link_share: float
    """Of the link's nominal rate, reached with many multiprocessors."""


class Network(Record):
    """The links of one GPU, per direction, and how much of them collectives reach."""

    link_bytes_per_s: float
    """Nominal rate inside a domain."""
    adapter_bytes_per_s: float
    """Nominal rate across domains of the adapters that one GPU has to itself."""
    allreduce_share: float
    """Bus bandwidth of long messages over the nominal link, with 8 ranks or more in a domain.

    Above 1 where a switch adds (NVLS): then fewer bytes cross a link than a ring's.
    """
    allgather_share: float
    """The same for an all-gather and a reduce-scatter."""
    all2all_share: float
    p2p_share: float
    ring_few_ranks: tuple[float, float] = (1.0, 1.0)
    """Of the ring shares, what 2 and 4 ranks in a domain reach."""
    all2all_few_ranks: tuple[float, float] = (1.0, 1.0)
    adapter_share: float = 0.9
    """Of the nominal adapters, which long messages reach."""
    tree_share: float = 0.9
    """Of a ring's bandwidth inside a domain, which a tree reaches."""
    all2all_latency: float = 1.0
    """Base and steps of an all-to-all over those of a ring."""
    protocols: tuple[Protocol, Protocol, Protocol] = NOMINAL
    p2p_base_s: float = 8e-6
    p2p_net_base_s: float = 12e-6
    exchange: Exchange | None = None
    """None: experts are reached by all-to-alls."""


class SiteFactors(Record):
    """What a cluster's links reach over what the card says; measured by a probe."""

    in_node: float = 1.0
    cross_node: float = 1.0


_AS_THE_CARD = SiteFactors()
_RING_ROUNDS = {"allreduce": 2, "allgather": 1, "reducescatter": 1}
"""Times that a ring goes around: an all-reduce reduces first and gathers then."""


@overload
def collective_time_s(
    network: Network,
    operation: str,
    size_bytes: float,
    shape: GroupShape,
    site: SiteFactors = ...,
) -> float: ...


@overload
def collective_time_s(
    network: Network,
    operation: str,
    size_bytes: F64,
    shape: GroupShape,
    site: SiteFactors = ...,
) -> F64: ...


def collective_time_s(
    network: Network,
    operation: str,
    size_bytes: float | F64,
    shape: GroupShape,
    site: SiteFactors = _AS_THE_CARD,
) -> float | F64:
    """Return the seconds of a collective of `size_bytes` in a group, all groups at once.

    Shapes: a number gives a number, an array (any shape) an array. `operation` is a key of
    `autopar.rates.measured.COLLECTIVES`; KeyError for another. One rank takes no time. The quickest
    of three protocols, and of ring and tree for an all-reduce across domains, as NCCL chooses.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    if operation == "all2all":
        times = _all2all_s(network, size, shape, site)
    else:
        times = _ring_s(network, operation, size, shape, site)
        if operation == "allreduce" and shape.nodes > 1:
            times = np.minimum(times, _tree_s(network, size, shape, site))
    return _like(size_bytes, times)


def _ring_s(
    network: Network, operation: str, size: F64, shape: GroupShape, site: SiteFactors
) -> F64:
    """base + (steps - across) l_in + across l_net + volume / (bus share); tuning.cc."""
    rounds = _RING_ROUNDS[operation]
    if shape.ranks == 1:
        return np.zeros_like(size)
    steps = rounds * (shape.ranks - 1)
    # a ring that visits every domain leaves each of them once a round
    across = min(rounds * shape.nodes, steps) if shape.nodes > 1 else 0
    # (n-1)/n of the tensor passes every link once a round
    volume = rounds * (shape.ranks - 1) / shape.ranks * size
    bus = bus_bytes_per_s(network, operation, shape, site)
    return _quickest(
        [
            _filled_s(
                protocol.base_s + (steps - across) * protocol.hop_s + across * protocol.net_hop_s,
                volume / (bus * protocol.share),
                protocol.fill_s,
            )
            for protocol in network.protocols
        ]
    )


def _tree_s(network: Network, size: F64, shape: GroupShape, site: SiteFactors) -> F64:
    """Chains inside the domains and a double binary tree over them, up and down again."""
    depth = math.ceil(math.log2(shape.nodes))
    inside, across = _rates(network, "allreduce", shape, site)
    # inside a domain the chain passes what a ring passes
    local = 2 * (shape.ranks - 1) / shape.ranks * size / (network.tree_share * inside)
    # of two domains each is the root of one half: the tensor leaves each of them once. In larger
    # trees some domain has two children and a parent, and sends as much as in a ring
    leaving = 1.0 if shape.nodes == 2 else 2 * (shape.ranks - 1) / shape.ranks
    remote = leaving * size / across
    slowest = np.maximum(local, remote)
    return _quickest(
        [
            _filled_s(
                protocol.base_s
                + 2 * ((shape.most - 1) * protocol.tree_hop_s + depth * protocol.tree_net_hop_s),
                slowest / protocol.share,
                protocol.fill_s,
            )
            for protocol in network.protocols
        ]
    )


def _all2all_s(network: Network, size: F64, shape: GroupShape, site: SiteFactors) -> F64:
    """All peers of the domain at once, one step for every other domain; LL or Simple only."""
    ranks, fewest, most, nodes = shape
    if ranks == 1:
        return np.zeros_like(size)
    inside, _ = _rates(network, "all2all", shape, site)
    # 1/n of the input goes to each of the most - 1 peers in the domain
    slowest = size * (most - 1) / ranks / inside
    if nodes > 1:
        adapter = network.adapter_bytes_per_s * network.adapter_share * site.cross_node
        # a rank's own adapter carries what goes elsewhere, most for ranks of the smallest domain
        slowest = np.maximum(slowest, size * (ranks - fewest) / ranks / adapter)
    low, _, simple = network.protocols  # send and receive have no LL128
    return _quickest(
        [
            _filled_s(
                network.all2all_latency
                * (protocol.base_s + protocol.hop_s + (nodes - 1) * protocol.net_hop_s),
                slowest / protocol.share,
                protocol.fill_s,
            )
            for protocol in (low, simple)
        ]
    )


def _filled_s(latency_s: float, moving_s: F64, fill_s: float) -> F64:
    """Return latency + moving + 2 sqrt(fill moving).

    c chunks in a pipeline of depth d cost l c to start and d moving / c to drain, which is least at
    c = sqrt(d moving / l), where both are sqrt(d l moving): fill is d l. Measured bandwidths rise
    like this up to a GiB.
    """
    if fill_s == 0.0:
        return latency_s + moving_s
    return latency_s + moving_s + 2.0 * np.sqrt(fill_s * moving_s)


def _quickest(times: list[F64]) -> F64:
    best = times[0]
    for other in times[1:]:
        best = np.minimum(best, other)
    return np.asarray(best)


def bus_bytes_per_s(
    network: Network, operation: str, shape: GroupShape, site: SiteFactors = _AS_THE_CARD
) -> float:
    """Return the bus bandwidth of long messages in a ring, bytes/s; inf for one rank.

    The link of a domain, or across domains the adapters of the group's ranks in the domain with
    the fewest of them, whichever is slower. KeyError for an unknown operation.
    """
    return min(_rates(network, operation, shape, site))


def allreduce_busbw_limit(ranks: int) -> float:
    """Return the bus bandwidth over the link's rate that no all-reduce exceeds.

    A ring reaches 1. A switch that adds takes S + S/n from every rank, against 2(n-1)/n S of bus
    traffic (nccl-tests, doc/PERFORMANCE.md): 2(n-1)/(n+1).
    """
    return max(1.0, 2.0 * (ranks - 1) / (ranks + 1))


def _rates(
    network: Network, operation: str, shape: GroupShape, site: SiteFactors
) -> tuple[float, float]:
    """Return the bytes/s inside a domain and across them; inf where there is no such link."""
    share, few = {
        "allreduce": (network.allreduce_share, network.ring_few_ranks),
        "allgather": (network.allgather_share, network.ring_few_ranks),
        "reducescatter": (network.allgather_share, network.ring_few_ranks),
        "all2all": (network.all2all_share, network.all2all_few_ranks),
    }[operation]
    inside = across = math.inf
    if shape.most > 1:
        # between 2, 4 and 8 ranks in their logarithm; more than 8 are as fast as 8
        reached = float(np.interp(math.log2(shape.most), (1.0, 2.0, 3.0), (*few, 1.0)))
        inside = network.link_bytes_per_s * share * reached * site.in_node
    if shape.nodes > 1:
        each = network.adapter_bytes_per_s * network.adapter_share * site.cross_node
        across = each * shape.fewest
    return inside, across


@overload
def p2p_time_s(
    network: Network, size_bytes: float, *, crosses: bool, site: SiteFactors = ...
) -> float: ...


@overload
def p2p_time_s(
    network: Network, size_bytes: F64, *, crosses: bool, site: SiteFactors = ...
) -> F64: ...


def p2p_time_s(
    network: Network,
    size_bytes: float | F64,
    *,
    crosses: bool,
    site: SiteFactors = _AS_THE_CARD,
) -> float | F64:
    """Return the seconds of sending `size_bytes` from every rank of a stage to the next stage.

    base + S / rate; every rank has its own link or, where the message `crosses` domains, adapter.
    The waiting of pipeline stages is not in it (`TRANSFER_SYNCHRONISE_S`).
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    if crosses:
        rate = network.adapter_bytes_per_s * network.adapter_share * site.cross_node
        return _like(size_bytes, network.p2p_net_base_s + size / rate)
    rate = network.link_bytes_per_s * network.p2p_share * site.in_node
    return _like(size_bytes, network.p2p_base_s + size / rate)


# --------------------------------------------------------------------------------------------------
# Experts: a token goes once to every rank that holds one of its experts, and comes back summed.


def distinct_ranks(num_ranks: float, top_k: float) -> float:
    """Return the expected ranks that hold the `top_k` experts of a token, evenly routed.

    ranks (1 - (1 - 1/ranks)^k), at most k: a rank that holds several of them gets the token once.
    """
    return float(min(top_k, num_ranks * (1.0 - (1.0 - 1.0 / num_ranks) ** top_k)))


_FUSED_RATE = 1.3
"""Of an all-to-all's bandwidth, what a fused dispatcher reaches where a card does not say."""
_PLAIN_EXCHANGE = 3.3
"""An exchange by all-to-alls over a fused one: bytes are also permuted and counted on the host.
Both were fitted to published steps of mixture models."""


def moe_exchange_time_s(
    network: Network,
    direction: str,
    tokens: ArrayLike,
    shape: GroupShape,
    *,
    hidden: int,
    top_k: int,
    bytes_per_element: float = 2.0,
    num_sms: int = 20,
    fused: bool = True,
    site: SiteFactors = _AS_THE_CARD,
) -> F64:
    """Return the seconds of one `dispatch` or `combine` of `tokens` per rank, as an array.

    `shape` is the group of experts. Inside a domain the copies by `num_sms` multiprocessors and
    the link run at the same time: (copies^4 + link^4)^(1/4); across domains a token crosses once
    per domain it visits, and the adapters join them. A network without `exchange` takes an
    all-to-all of the distinct copies at 1.3 of its rate; where nothing is `fused` (all-to-alls of
    the framework), 3.3 times that. Raises KeyError for another direction.
    """
    side = {"dispatch": 0, "combine": 1}[direction]
    number = np.asarray(tokens, dtype=np.float64)
    if shape.ranks == 1:
        return np.zeros_like(number)
    copies = distinct_ranks(shape.ranks, top_k)
    token_bytes = hidden * bytes_per_element
    exchange = network.exchange
    if exchange is None or not fused:
        inside = shape._replace(ranks=shape.most, fewest=shape.most, nodes=1)
        near = number * copies * token_bytes * shape.most / shape.ranks
        near_s = collective_time_s(network, "all2all", near, inside, site) / _FUSED_RATE
        # a fused dispatcher sends a token to a domain once, all-to-alls to each of its ranks
        far = distinct_ranks(shape.nodes, top_k) * (shape.nodes - 1) / shape.nodes
        if not fused:
            near_s, far = _PLAIN_EXCHANGE * near_s, copies * (1 - shape.fewest / shape.ranks)
        far_s = _crossing_s(network, number * far * token_bytes, shape, site)
        return np.asarray((near_s**4 + far_s**4) ** 0.25)
    copying = (
        number
        * (copies + exchange.own_copies[side])
        * (token_bytes / exchange.sm_bytes_per_s[side] + exchange.token_s[side])
        / num_sms
    )
    link = network.link_bytes_per_s * exchange.link_share * site.in_node
    # of the copies, those to the other ranks of the domain
    linked = number * copies * (shape.most - 1) / shape.ranks * token_bytes / link
    joined = copying**4 + linked**4
    base = exchange.base_s[side]
    if shape.nodes > 1:
        far = distinct_ranks(shape.nodes, top_k) * (shape.nodes - 1) / shape.nodes
        joined = joined + _crossing_s(network, number * far * token_bytes, shape, site) ** 4
        # there, and the notice that it arrived
        base += 2 * network.protocols[-1].net_hop_s
    return np.asarray(base + joined**0.25)


def _crossing_s(network: Network, size: F64, shape: GroupShape, site: SiteFactors) -> F64:
    """Return the seconds of `size` bytes of a rank through its adapter."""
    if shape.nodes == 1:
        return np.zeros_like(size)
    return size / (network.adapter_bytes_per_s * network.adapter_share * site.cross_node)


def _like(asked: float | F64, times: F64) -> float | F64:
    """Return an array for an array and a number for a number."""
    return times if isinstance(asked, np.ndarray) else float(times)

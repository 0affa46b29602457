"""Seconds of collectives, transfers, and MoE dispatch and combine on a card's network.

This gives communication times for clusters with a card but no measurement. Groups are described by
their *shape*: ranks, ranks per NVLink domain, and domains. Formulas follow NCCL's own cost model
(src/graph/tuning.cc): every protocol has a latency per step of its ring or tree and a fraction of
the bandwidth of the slowest link, and the fastest protocol is taken. All groups of a kind run at
the same time, as in training. Groups do not share links, because every GPU has separate NVLink
ports and an equal share of the adapters.

Sizes are in bytes and defined as in `autopar.rates.measured.OPERATIONS` and nccl-tests. All-reduce:
the tensor; all-gather: the gathered tensor; reduce-scatter: the scattered tensor; all-to-all: the
send buffer of one rank. Every function takes one size or an array of sizes.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.records import Record

F64 = NDArray[np.float64]
_Size = TypeVar("_Size", float, F64)

TRANSFER_SYNCHRONISE_S = 80e-6
"""Synchronisation time of two pipeline stages per transfer, seconds; not part of `p2p_time_s`.

Fitted to published training steps; transfers of nccl-tests do not contain it.
"""


class GroupShape(NamedTuple):
    """Placement of the ranks of a group on NVLink domains, which it may straddle unevenly."""

    ranks: int
    fewest: int
    """Smallest number of the group's ranks in any of its domains."""
    most: int
    nodes: int
    """Number of domains: nodes, or racks where a switch joins several nodes."""

    @classmethod
    def even(cls, *, ranks: int, per_node: int) -> GroupShape:
        """Return the shape of a group of `ranks` with `per_node` of them in every domain.

        The last domain contains the remainder. Raises ValueError for numbers below 1.
        """
        if ranks < 1 or per_node < 1:
            raise ValueError(f"{ranks} ranks, {per_node} in a domain is no group; both from 1")
        nodes = -(-ranks // per_node)
        fewest = ranks - (nodes - 1) * per_node
        return cls(ranks, min(fewest, per_node), min(ranks, per_node), nodes)


class Protocol(Record):
    """Latencies and bandwidth fraction of one NCCL protocol (LL, LL128 or Simple)."""

    base_s: float
    hop_s: float
    """Latency of one ring step inside a domain, seconds; `net_hop_s`: across domains."""
    net_hop_s: float
    tree_hop_s: float
    """Latency of one tree step inside a domain, seconds; `tree_net_hop_s`: across domains."""
    tree_net_hop_s: float
    share: float
    """Fraction of the bus bandwidth left for data by the flags of the protocol."""
    fill_s: float = 0.0
    """Time constant of filling the pipeline of chunks, seconds; see `_filled_s`."""


# Defaults for cards without figures: NCCL's tuning.cc (baseLat, hwLat; Hopper's row).
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
"""LL, LL128 and Simple with the figures of NCCL's own tables."""


class FusedDispatcher(Record):
    """Speed of dispatch and combine with a fused dispatcher (DeepEP, HybridEP).

    A multiprocessor needs `token_s` per copied token and copies its bytes at `sm_bytes_per_s`.
    `own_copies` counts copies (read, received) in addition to those sent to the token's ranks. Each
    tuple is (dispatch, combine).
    """

    base_s: tuple[float, float]
    sm_bytes_per_s: tuple[float, float]
    token_s: tuple[float, float]
    own_copies: tuple[float, float]
    link_share: float
    """Fraction of the link's nominal rate, reached with many multiprocessors."""


class Network(Record):
    """Links of one GPU, per direction, with the fractions that collectives reach."""

    link_bytes_per_s: float
    """Nominal rate inside a domain, bytes/s."""
    adapter_bytes_per_s: float
    """Nominal rate across domains of the adapters of one GPU, bytes/s."""
    allreduce_share: float
    """Bus bandwidth of long messages over the nominal link, with 8 ranks or more in a domain.

    Above 1 for in-switch reduction (NVLS), where fewer bytes cross a link than in a ring.
    """
    allgather_share: float
    """Bandwidth fraction of an all-gather and a reduce-scatter over the nominal link."""
    all2all_share: float
    p2p_share: float
    ring_few_ranks: tuple[float, float] = (1.0, 1.0)
    """Fractions of the ring bandwidths that 2 and 4 ranks in a domain reach."""
    all2all_few_ranks: tuple[float, float] = (1.0, 1.0)
    adapter_share: float = 0.9
    """Fraction of the nominal adapter rate that long messages reach."""
    tree_share: float = 0.9
    """Tree bandwidth over ring bandwidth inside a domain, 0 to 1."""
    all2all_latency: float = 1.0
    """Latencies (base and steps) of an all-to-all over those of a ring."""
    protocols: tuple[Protocol, Protocol, Protocol] = NOMINAL
    p2p_base_s: float = 8e-6
    p2p_net_base_s: float = 12e-6
    exchange: FusedDispatcher | None = None
    """Constants of a fused dispatcher; None: estimated from all-to-alls."""


class SiteFactors(Record):
    """Measured over nominal bandwidth of a cluster, inside and across nodes; from a probe."""

    in_node: float = 1.0
    cross_node: float = 1.0


_AS_THE_CARD = SiteFactors()
_RING_ROUNDS = {"allreduce": 2, "allgather": 1, "reducescatter": 1}
"""Rounds of a ring: an all-reduce is a reduce-scatter and an all-gather."""


def collective_time_s(
    network: Network,
    operation: str,
    size_bytes: _Size,
    shape: GroupShape,
    site: SiteFactors = _AS_THE_CARD,
) -> _Size:
    """Return the seconds of a collective of `size_bytes`, all groups running at once.

    The result is a number or an array, like `size_bytes`, and 0 for one rank. Like NCCL, it assumes
    the fastest of three protocols, and the faster of ring and tree for an all-reduce across
    domains. `operation` is a member of `autopar.rates.measured.COLLECTIVES`; raises KeyError for
    another.
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
    """Return the seconds of a ring with its fastest protocol.

    Time = base + (steps - across) l_in + across l_net + volume / (bus share); NCCL's tuning.cc.
    """
    rounds = _RING_ROUNDS[operation]
    if shape.ranks == 1:
        return np.zeros_like(size)
    steps = rounds * (shape.ranks - 1)
    # A ring that visits every domain leaves each of them once per round.
    across = min(rounds * shape.nodes, steps) if shape.nodes > 1 else 0
    # (n-1)/n of the tensor crosses every link once per round.
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
    """Return the seconds of a tree all-reduce: chains in domains, a double binary tree across."""
    depth = math.ceil(math.log2(shape.nodes))
    inside, across = _rates(network, "allreduce", shape, site)
    # Inside a domain a chain sends as many bytes as a ring.
    local = 2 * (shape.ranks - 1) / shape.ranks * size / (network.tree_share * inside)
    # With two domains, each is the root of one half, so that the tensor leaves each of them once.
    # In larger trees some domain has two children and a parent and sends as much as in a ring.
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
    """Return the seconds of an all-to-all: all peers of a domain at once, then one step per domain.

    Only LL or Simple is used.
    """
    ranks, fewest, most, nodes = shape
    if ranks == 1:
        return np.zeros_like(size)
    inside, _ = _rates(network, "all2all", shape, site)
    # 1/n of the input goes to each of the most - 1 peers in the domain.
    slowest = size * (most - 1) / ranks / inside
    if nodes > 1:
        adapter = network.adapter_bytes_per_s * network.adapter_share * site.cross_node
        # A rank's own adapter carries the traffic to other domains, most in the smallest domain.
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
    """Return the seconds of a pipelined transfer, latency + moving + 2 sqrt(fill moving).

    With c chunks in a pipeline of depth d and a latency l per chunk, starting costs l c and
    draining d moving / c. The sum is least at c = sqrt(d moving / l), where both are sqrt(d l
    moving), so that fill is d l. Measured bandwidths rise in this way up to one GiB.
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

    The limit is the slower of two rates: the link inside a domain, or the adapters of the group's
    ranks in the domain with the fewest of them. Raises KeyError for an unknown operation.
    """
    return min(_rates(network, operation, shape, site))


def _rates(
    network: Network, operation: str, shape: GroupShape, site: SiteFactors
) -> tuple[float, float]:
    """Return (bytes/s inside a domain, bytes/s across domains); inf where there is no such link."""
    share, few = {
        "allreduce": (network.allreduce_share, network.ring_few_ranks),
        "allgather": (network.allgather_share, network.ring_few_ranks),
        "reducescatter": (network.allgather_share, network.ring_few_ranks),
        "all2all": (network.all2all_share, network.all2all_few_ranks),
    }[operation]
    inside = across = math.inf
    if shape.most > 1:
        # Interpolated in log2 of the ranks between 2, 4 and 8; more than 8 are as fast as 8.
        reached = float(np.interp(math.log2(shape.most), (1.0, 2.0, 3.0), (*few, 1.0)))
        inside = network.link_bytes_per_s * share * reached * site.in_node
    if shape.nodes > 1:
        each = network.adapter_bytes_per_s * network.adapter_share * site.cross_node
        across = each * shape.fewest
    return inside, across


def p2p_time_s(
    network: Network, size_bytes: _Size, *, crosses: bool, site: SiteFactors = _AS_THE_CARD
) -> _Size:
    """Return the seconds of sending `size_bytes` from every rank of a stage to the next stage.

    base + S / rate. Every rank has its own link or, if the message `crosses` domains, its own
    adapter. Synchronisation of the stages is not included (`TRANSFER_SYNCHRONISE_S`).
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    if crosses:
        rate = network.adapter_bytes_per_s * network.adapter_share * site.cross_node
        return _like(size_bytes, network.p2p_net_base_s + size / rate)
    rate = network.link_bytes_per_s * network.p2p_share * site.in_node
    return _like(size_bytes, network.p2p_base_s + size / rate)


# --------------------------------------------------------------------------------------------------
# Experts: each token is sent once to every rank with one of its experts, and returns summed.


def distinct_ranks(num_ranks: float, top_k: float) -> float:
    """Return the expected number of ranks with one of a token's `top_k` experts, evenly routed.

    ranks (1 - (1 - 1/ranks)^k), at most k: a rank with several of them receives the token once.
    """
    return float(min(top_k, num_ranks * (1.0 - (1.0 - 1.0 / num_ranks) ** top_k)))


_FUSED_RATE = 1.3
"""Fused-dispatcher over all-to-all bandwidth, for cards without a figure; fitted to published steps
of mixture-of-experts models."""


def _visited_domains(domains: int, top_k: int, groups: int, groups_per_token: int) -> float:
    """Return the mean number of domains with an expert of a token.

    A token chooses `groups_per_token` of `groups` at random, then experts in these. Domains hold
    whole groups, or groups span several domains.
    """
    if groups_per_token >= groups:
        return distinct_ranks(domains, top_k)
    if domains >= groups:
        return distinct_ranks(domains * groups_per_token / groups, top_k)
    held, chosen = groups // domains, groups_per_token
    ways = math.comb(groups, chosen)
    visited = sum(
        math.comb(held, here)
        * math.comb(groups - held, chosen - here)
        / ways
        * (1.0 - (1.0 - here / chosen) ** top_k)
        for here in range(1, min(held, chosen) + 1)
    )
    return domains * visited


def moe_exchange_time_s(
    network: Network,
    direction: str,
    tokens: ArrayLike,
    shape: GroupShape,
    *,
    hidden: int,
    top_k: int,
    groups: int = 1,
    groups_per_token: int = 1,
    bytes_per_element: float = 2.0,
    num_sms: int = 20,
    fused: bool = True,
    site: SiteFactors = _AS_THE_CARD,
) -> F64:
    """Return the seconds of one `dispatch` or `combine` of `tokens` per rank, as an array.

    shape : expert-parallel group.
    groups, groups_per_token : groups of experts, and number of them that a token goes to.
    num_sms : SMs used for copying.
    fused : True for DeepEP or HybridEP; False for the all-to-alls of the framework.

    Copying, the link and the adapters overlap: base + (copying^4 + link^4 + adapters^4)^(1/4). A
    fused dispatcher sends a token to another domain once. Without `network.exchange` the part
    inside a domain is an all-to-all of the distinct copies at 1.3 times its rate. Unfused, all
    `top_k` copies are sent at the rate of all-to-alls, since they are sorted by expert, not by
    rank. Raises KeyError for another direction.
    """
    side = {"dispatch": 0, "combine": 1}[direction]
    number = np.asarray(tokens, dtype=np.float64)
    if shape.ranks == 1:
        return np.zeros_like(number)
    copies = distinct_ranks(shape.ranks, top_k) if fused else float(top_k)
    visited = _visited_domains(shape.nodes, top_k, groups, groups_per_token)
    token_bytes = hidden * bytes_per_element
    exchange = network.exchange
    if exchange is None or not fused:
        inside = shape._replace(ranks=shape.most, fewest=shape.most, nodes=1)
        near = number * copies * token_bytes * shape.most / shape.ranks
        near_s = collective_time_s(network, "all2all", near, inside, site)
        if fused:
            # A fused dispatcher sends a token to a domain once.
            near_s, far = near_s / _FUSED_RATE, visited * (shape.nodes - 1) / shape.nodes
        else:
            far = copies * (1 - shape.fewest / shape.ranks)
        far_s = _crossing_s(network, number * far * token_bytes, shape, site)
        return np.asarray((near_s**4 + far_s**4) ** 0.25)
    copying = (
        number
        * (copies + exchange.own_copies[side])
        * (token_bytes / exchange.sm_bytes_per_s[side] + exchange.token_s[side])
        / num_sms
    )
    link = network.link_bytes_per_s * exchange.link_share * site.in_node
    # Only the copies to the other ranks of the domain cross the link.
    linked = number * copies * (shape.most - 1) / shape.ranks * token_bytes / link
    joined = copying**4 + linked**4
    base = exchange.base_s[side]
    if shape.nodes > 1:
        far = visited * (shape.nodes - 1) / shape.nodes
        joined = joined + _crossing_s(network, number * far * token_bytes, shape, site) ** 4
        # One hop for the data and one for the notice of its arrival.
        base += 2 * network.protocols[-1].net_hop_s
    return np.asarray(base + joined**0.25)


def _crossing_s(network: Network, size: F64, shape: GroupShape, site: SiteFactors) -> F64:
    """Return the seconds of sending `size` bytes of one rank through its adapter."""
    if shape.nodes == 1:
        return np.zeros_like(size)
    return size / (network.adapter_bytes_per_s * network.adapter_share * site.cross_node)


def _like(asked: _Size, times: F64) -> _Size:
    """Return `times` as an array if `asked` is an array, else as a number."""
    return times if isinstance(asked, np.ndarray) else float(times)

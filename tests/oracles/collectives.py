"""An independent implementation of the collective formulas: one size, one loop, no arrays.

Without it, `autopar.rates.collectives` would be compared with itself. It is written from the
formulas in docs/concepts/estimates.md and shares no line with the product.
"""

from __future__ import annotations

from math import ceil, inf, log2, sqrt

from autopar.rates.collectives import GroupShape, Network, SiteFactors


def seconds(
    network: Network, operation: str, size: float, shape: GroupShape, site: SiteFactors
) -> float:
    """Return the seconds of one collective of `size` bytes."""
    n, fewest, most, domains = shape
    if n == 1:
        return 0.0
    candidates = []
    for index, protocol in enumerate(network.protocols):
        net = network.adapter_bytes_per_s * network.adapter_share * site.cross_node
        link = network.link_bytes_per_s * _share(network, operation, most) * site.in_node
        if operation == "all2all":
            if index == 1:
                continue
            moving = size / n * (most - 1) / link
            if domains > 1:
                moving = max(moving, size / n * (n - fewest) / net)
            steps = protocol.hop_s + (domains - 1) * protocol.net_hop_s
            latency = network.all2all_latency * (protocol.base_s + steps)
            candidates.append(_pipelined(latency, moving / protocol.share, protocol.fill_s))
            continue
        rounds = 2 if operation == "allreduce" else 1
        bus = min(link if most > 1 else inf, net * fewest if domains > 1 else inf)
        latency = protocol.base_s
        for step in range(rounds * (n - 1)):
            leaves = domains > 1 and step < rounds * domains
            latency += protocol.net_hop_s if leaves else protocol.hop_s
        moving = rounds * size * (n - 1) / n / bus
        candidates.append(_pipelined(latency, moving / protocol.share, protocol.fill_s))
        if operation == "allreduce" and domains > 1:
            up = (most - 1) * protocol.tree_hop_s + ceil(log2(domains)) * protocol.tree_net_hop_s
            inside = 2 * size * (n - 1) / n / link / network.tree_share if most > 1 else 0.0
            across = (size if domains == 2 else 2 * size * (n - 1) / n) / (net * fewest)
            moving = max(inside, across) / protocol.share
            candidates.append(_pipelined(protocol.base_s + 2 * up, moving, protocol.fill_s))
    return min(candidates)


def exchange_s(
    network: Network, side: int, tokens: float, shape: GroupShape, *, top_k: int, token: float
) -> float:
    """Return the seconds of a dispatch (0) or combine (1) of `tokens` of `token` bytes, 20 SMs."""
    found = network.exchange
    assert found is not None
    n, _, most, domains = shape
    copies = min(top_k, n * (1 - (1 - 1 / n) ** top_k))
    one = token / found.sm_bytes_per_s[side] + found.token_s[side]
    parts = [tokens * (copies + found.own_copies[side]) * one / 20]
    parts.append(
        tokens * copies * (most - 1) / n * token / network.link_bytes_per_s / found.link_share
    )
    base = found.base_s[side]
    if domains > 1:
        visited = min(top_k, domains * (1 - (1 - 1 / domains) ** top_k)) * (1 - 1 / domains)
        rate = network.adapter_bytes_per_s * network.adapter_share
        parts.append(tokens * visited * token / rate)
        base += 2 * network.protocols[2].net_hop_s
    return base + sum(part**4 for part in parts) ** 0.25


def _pipelined(latency: float, moving: float, fill: float) -> float:
    return latency + moving + 2 * sqrt(fill * moving)


def _share(network: Network, operation: str, most: int) -> float:
    whole = {
        "allreduce": network.allreduce_share,
        "allgather": network.allgather_share,
        "reducescatter": network.allgather_share,
        "all2all": network.all2all_share,
    }[operation]
    two, four = network.all2all_few_ranks if operation == "all2all" else network.ring_few_ranks
    if most >= 8:
        return whole
    if most >= 4:
        return whole * (four + (1 - four) * (log2(most) - 2))
    return whole * (two + (four - two) * (log2(max(most, 2)) - 1))

"""Time of a collective over GPUs, some of which share a fast domain.

Source: arXiv 2410.00273; corrections are named in `quirks`.
"""

from __future__ import annotations

from typing import Literal

from search.closed_form.tensor2d.documents import System
from search.closed_form.tensor2d.engine import Quirks

Operation = Literal["allgather", "reducescatter", "allreduce", "reduce", "broadcast", "p2p"]


def collective_s(
    system: System, quirks: Quirks, operation: str, volume_gb: float, ranks: int, in_domain: int
) -> float:
    """Return the seconds of a collective.

    volume_gb : the whole (gathered, or not yet reduced) tensor, 1e9 bytes.
    ranks, in_domain : size of the group, and its ranks per domain, which divide `ranks`.
    """
    if not volume_gb > 0 or ranks == 1:
        return 0.0
    if operation == "p2p":
        return transfer_s(system, quirks, volume_gb, fast=in_domain > 1)
    share = 1.0 if operation in ("reduce", "broadcast") else (ranks - 1) / ranks
    fast = system.nvlink_bandwidth * system.nvlink_eff
    slow = system.ib_bandwidth * system.ib_eff
    adapters = system.nic_factor
    domains = ranks // in_domain
    twice = operation == "allreduce"
    repeated = 2.0 if twice and not quirks.single_allreduce else 1.0
    if in_domain == 1:
        gain = 1.0 if quirks.one_adapter else max(1.0, adapters)
        return repeated * (system.ib_latency * (ranks - 1) + share * volume_gb / (slow * gain))
    if domains == 1:
        return repeated * (system.nvlink_latency * (ranks - 1) + share * volume_gb / fast)
    moved = max(share * volume_gb / (adapters * in_domain * slow), share * volume_gb / fast)
    latency = system.ib_latency * (domains - 1) + system.nvlink_latency * (ranks - domains)
    return moved * (2.0 if twice else 1.0) + repeated * latency


def transfer_s(system: System, quirks: Quirks, volume_gb: float, *, fast: bool) -> float:
    """Return the seconds of one transfer between two GPUs."""
    if fast:
        return system.nvlink_latency + volume_gb / (system.nvlink_bandwidth * system.nvlink_eff)
    gain = 1.0 if quirks.one_adapter else max(1.0, system.nic_factor)
    return system.ib_latency + volume_gb / (system.ib_bandwidth * system.ib_eff * gain)


def hop_s(system: System, quirks: Quirks, volume_gb: float, pipeline: int, in_domain: int) -> float:
    """Return the mean seconds of a transfer to the next stage; some stages share a domain."""
    if pipeline == 1:
        return 0.0
    if in_domain == 1:
        return transfer_s(system, quirks, volume_gb, fast=False)
    slow_links = int(pipeline / in_domain - 1)
    fast_links = pipeline - 1 - slow_links
    seconds = fast_links * transfer_s(system, quirks, volume_gb, fast=True)
    if not quirks.free_slow_links:
        seconds += slow_links * transfer_s(system, quirks, volume_gb, fast=False)
    return seconds / (pipeline - 1)

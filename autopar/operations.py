"""The communication operations: what their message size means and the bus traffic they cause.

Bus bandwidth is message bytes times the factor over time; it does not depend on the number of
ranks where the link is the limit. Source of the factors: nccl-tests, doc/PERFORMANCE.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["OPERATIONS", "Operation"]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation over a group of ranks."""

    name: str
    message: str
    """What the message size counts."""
    bus_factor: Callable[[int], float]
    """Bus traffic per byte of message in a group of n ranks."""


def _whole(num_ranks: int) -> float:
    return 1.0


def _others_share(num_ranks: int) -> float:
    return (num_ranks - 1) / num_ranks


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation(
            name="allreduce", message="the tensor", bus_factor=lambda n: 2.0 * _others_share(n)
        ),
        Operation(name="allgather", message="the gathered tensor", bus_factor=_others_share),
        Operation(
            name="reducescatter", message="the tensor that is scattered", bus_factor=_others_share
        ),
        Operation(name="all2all", message="the tensor of one rank", bus_factor=_others_share),
        Operation(name="p2p", message="the message", bus_factor=_whole),
        # both directions at once; the bytes are those of one direction
        Operation(name="p2p_bidirectional", message="the message each way", bus_factor=_whole),
        # a device that copies reads and writes every byte
        Operation(name="memcopy", message="the tensor copied", bus_factor=lambda n: 2.0),
    )
}
"""Operations by their key in files."""

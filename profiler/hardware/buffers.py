"""The tensors of one rank in one cell: their sizes, what they hold, and for how long it lasts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from profiler.hardware import patterns
from profiler.hardware.cells import Group

if TYPE_CHECKING:
    import torch

__all__ = ["Buffers", "Layout", "make_room", "out_of_place", "summed_in_place", "transfer"]

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where one rank stands in one cell."""

    ranks: Group
    """Global ranks of the group, in order; of a transfer the sender and the receiver."""
    rank: int
    group: Any
    """The torch process group of `ranks`; None where nothing is communicated."""
    size_bytes: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        assert self.rank in self.ranks, f"rank {self.rank} is not in {self.ranks}"
        assert self.size_bytes > 0, self.size_bytes

    @property
    def position(self) -> int:
        """Index of this rank in the group."""
        return self.ranks.index(self.rank)

    @property
    def share_elements(self) -> int:
        """Elements of a message divided by the group size, rounded up."""
        element_bytes: int = self.dtype.itemsize
        return -(-self.size_bytes // (len(self.ranks) * element_bytes))

    @property
    def num_elements(self) -> int:
        """Elements of a message: as many as fit the size, rounded up to whole shares."""
        return self.share_elements * len(self.ranks)


@dataclass(kw_only=True)
class Buffers:
    """One rank's tensors, flat; empty where it sends or receives nothing."""

    send: torch.Tensor
    receive: torch.Tensor
    """`send` itself where the operation works in place."""
    values: torch.Tensor
    """Random values, the same on every rank, with which both are filled."""
    transfers: list[Any] = field(default_factory=list)
    """Point-to-point operations of one run."""
    limit: int = _NO_LIMIT
    """Sums in place after which freshly filled values would leave the range of their type."""
    room: int = _NO_LIMIT
    """Sums in place that are left."""
    capturing: bool = False
    """Whether the last run was captured in a graph instead of carried out."""
    replayed: bool = False
    """Whether a graph holds a run, whose replays nobody counts."""

    def refill(self) -> None:
        """Fill the tensors with random values again."""
        patterns.tile(self.send, self.values)
        if self.receive is not self.send:
            patterns.tile(self.receive, self.values)
        self.room = self.limit


def out_of_place(sends: int, receives: int, layout: Layout) -> Buffers:
    """Return filled buffers of so many shares of the message each."""
    import torch

    share = layout.share_elements
    buffers = Buffers(
        send=torch.empty(sends * share, dtype=layout.dtype, device=layout.device),
        receive=torch.empty(receives * share, dtype=layout.dtype, device=layout.device),
        values=patterns.random_values(layout.dtype, layout.device),
    )
    buffers.refill()
    return buffers


def summed_in_place(layout: Layout) -> Buffers:
    """Return one tensor, whose values can be summed in place `limit` times.

    torch reduces in place, so every run multiplies the values by the group size. They begin at
    the bottom of their type's normal range and are filled in anew before they reach its top: in
    bf16 after 249 sums over 2 ranks and 83 over 8. In groups of another size than a power of two
    rounding thins them out: to some dozen different values in bf16. A mean or a maximum would keep
    them bounded, but NCCL's fastest algorithm (NVLS) has no mean, and no maximum in fp32.
    """
    import torch

    info = torch.finfo(layout.dtype)
    lowest, highest = (math.frexp(value)[1] - 1 for value in (info.tiny, info.max))
    tensor = torch.empty(layout.num_elements, dtype=layout.dtype, device=layout.device)
    buffers = Buffers(
        send=tensor,
        receive=tensor,
        values=patterns.random_values(layout.dtype, layout.device, lowest),
    )
    count = len(layout.ranks)
    if count > 1:
        # four octaves are spare for the values themselves and the rounding of many sums
        buffers.limit = max(1, int((highest - lowest - 4) / math.log2(count)))
    buffers.refill()
    return buffers


def make_room(buffers: Buffers, layout: Layout, loops: int) -> None:
    """Fill a tensor that is summed in place anew unless `loops` further sums are sure to fit."""
    if buffers.replayed or buffers.room < loops:
        buffers.refill()
    if buffers.replayed:
        buffers.room = max(0, buffers.limit - loops)


def transfer(sends: bool, receives: bool, layout: Layout) -> Buffers:
    """Return filled buffers of the message in each direction, and the operations that move it."""
    import torch.distributed as dist

    assert len(layout.ranks) == 2, f"a transfer has a sender and a receiver, got {layout.ranks}"
    peer = layout.ranks[1 - layout.position]
    buffers = out_of_place(2 * sends, 2 * receives, layout)
    if sends:
        buffers.transfers.append(dist.P2POp(dist.isend, buffers.send, peer, layout.group))
    if receives:
        buffers.transfers.append(dist.P2POp(dist.irecv, buffers.receive, peer, layout.group))
    return buffers

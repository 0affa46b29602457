"""The operations that are measured, one row each: buffers, one run of it, and its check.

Sizes are messages as `autopar.operations` defines them, rounded up to a multiple of the group size
times the element size. Buffers hold random values: a device computes faster on zeros, and what
infinities and denormals cost is nobody's bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from autopar.operations import OPERATIONS
from profiler.hardware import patterns
from profiler.hardware.buffers import (
    Buffers,
    Layout,
    make_room,
    out_of_place,
    summed_in_place,
    transfer,
)

if TYPE_CHECKING:
    import torch

__all__ = ["COLLECTIVES", "Buffers", "Collective", "Layout"]


def _no_preparation(buffers: Buffers, layout: Layout, loops: int) -> None:
    """Leave the buffers as they are: nothing in them changes by repetition."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One operation: `make` its buffers, `check` it once, then `prepare` and `run` it often."""

    name: str
    """Key of `autopar.operations.OPERATIONS`, which has the bus factor."""
    tensor_bytes: Callable[[int, int], int]
    """Bytes a rank allocates, of message size and group size; a check takes a few MiB more."""
    make: Callable[[Layout], Buffers]
    run: Callable[[Buffers, Layout], None]
    """One operation; it may still be under way on the device's current stream on return."""
    sent: Callable[[Layout, int], torch.Tensor]
    """Pattern that this rank sends in a block; a block is a share of the message."""
    expected: Callable[[Layout, int], torch.Tensor]
    """Pattern that this rank must find in a block afterwards."""
    prepare: Callable[[Buffers, Layout, int], None] = _no_preparation
    """Make room for so many runs; untimed, before every repetition and before its barrier."""

    def __post_init__(self) -> None:
        assert self.name in OPERATIONS, self.name

    def check(self, buffers: Buffers, layout: Layout) -> str | None:
        """Return what is wrong with one run's result on this rank, None when it is exact.

        Sends known patterns into a poisoned output; all ranks of the group must call it. The
        buffers hold random values afterwards.
        """
        buffers.refill()
        for index, block in _blocks(buffers.send, layout):
            patterns.tile(block, self.sent(layout, index).to(block))
        if buffers.receive is not buffers.send:
            buffers.receive.fill_(math.nan)
        _synchronize(layout.device)
        self.run(buffers, layout)
        _synchronize(layout.device)
        wrong = None
        for index, block in _blocks(buffers.receive, layout):
            pattern = self.expected(layout, index).to(block)
            at = patterns.first_difference(block, pattern)
            if at is not None:
                wrong = (
                    f"{self.name}: rank {layout.rank}, number {layout.position} of "
                    f"{len(layout.ranks)}, found {float(block[at]):g} at element "
                    f"{index * layout.share_elements + at} of {buffers.receive.numel()}, "
                    f"expected {float(pattern[at % patterns.PERIOD]):g}"
                )
                break
        buffers.refill()
        return wrong


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _blocks(tensor: torch.Tensor, layout: Layout) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the shares that a tensor consists of, with their numbers."""
    share = layout.share_elements
    for index in range(tensor.numel() // share):
        yield index, tensor[index * share : (index + 1) * share]


def _run_allreduce(buffers: Buffers, layout: Layout) -> None:
    import torch
    import torch.distributed as dist

    capturing = layout.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing and not buffers.capturing:
        # replays begin with what `prepare` leaves, not with what is in the tensor now
        buffers.replayed, buffers.room = True, buffers.limit
    buffers.capturing = capturing
    if buffers.room == 0:
        buffers.refill()
    buffers.room -= 1
    dist.all_reduce(buffers.send, group=layout.group)


@cache
def _function(name: str, older: str) -> Callable[..., Any]:
    """Return a function of torch.distributed, by the name it had before torch 2.13 if need be."""
    import torch.distributed as dist

    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return found


def _run_allgather(buffers: Buffers, layout: Layout) -> None:
    gather = _function("all_gather_single", "all_gather_into_tensor")
    gather(buffers.receive, buffers.send, group=layout.group)


def _run_reducescatter(buffers: Buffers, layout: Layout) -> None:
    scatter = _function("reduce_scatter_single", "reduce_scatter_tensor")
    scatter(buffers.receive, buffers.send, group=layout.group)


def _run_all2all(buffers: Buffers, layout: Layout) -> None:
    import torch.distributed as dist

    dist.all_to_all_single(buffers.receive, buffers.send, group=layout.group)


def _run_transfers(buffers: Buffers, layout: Layout) -> None:
    # As a batch even if it is one: NCCL then uses the group's communicator, and both directions
    # of an exchange are one launch.
    import torch.distributed as dist

    for work in dist.batch_isend_irecv(buffers.transfers):
        work.wait()


def _run_memcopy(buffers: Buffers, layout: Layout) -> None:
    buffers.receive.copy_(buffers.send)


def _from(position: int, layout: Layout, block: int) -> torch.Tensor:
    """Return what the rank at a position of the group sends in a block, different from all else."""
    return patterns.labelled(position * len(layout.ranks) + block, layout.device)


def _from_me(layout: Layout, block: int) -> torch.Tensor:
    return _from(layout.position, layout, block)


def _from_peer(layout: Layout, block: int) -> torch.Tensor:
    return _from(1 - layout.position, layout, block)


def _my_summand(layout: Layout, block: int) -> torch.Tensor:
    return patterns.summand(layout.position, block, len(layout.ranks), layout.device)


def _total(block: int, layout: Layout) -> torch.Tensor:
    return patterns.total(block, len(layout.ranks), layout.device)


_ROWS = (
    Collective(
        name="allreduce",
        tensor_bytes=lambda size, n: size,
        make=summed_in_place,
        prepare=make_room,
        run=_run_allreduce,
        sent=_my_summand,
        expected=lambda layout, block: _total(block, layout),
    ),
    Collective(
        name="allgather",
        tensor_bytes=lambda size, n: size + -(-size // n),
        make=lambda layout: out_of_place(1, len(layout.ranks), layout),
        run=_run_allgather,
        sent=_from_me,
        expected=lambda layout, block: _from(block, layout, 0),
    ),
    Collective(
        name="reducescatter",
        tensor_bytes=lambda size, n: size + -(-size // n),
        make=lambda layout: out_of_place(len(layout.ranks), 1, layout),
        run=_run_reducescatter,
        sent=_my_summand,
        expected=lambda layout, block: _total(layout.position, layout),
    ),
    Collective(
        name="all2all",
        tensor_bytes=lambda size, n: 2 * size,
        make=lambda layout: out_of_place(len(layout.ranks), len(layout.ranks), layout),
        run=_run_all2all,
        sent=_from_me,
        expected=lambda layout, block: _from(block, layout, layout.position),
    ),
    Collective(
        name="p2p",
        tensor_bytes=lambda size, n: size,
        make=lambda layout: transfer(layout.position == 0, layout.position == 1, layout),
        run=_run_transfers,
        sent=_from_me,
        expected=_from_peer,
    ),
    Collective(
        name="p2p_bidirectional",
        tensor_bytes=lambda size, n: 2 * size,
        make=lambda layout: transfer(True, True, layout),
        run=_run_transfers,
        sent=_from_me,
        expected=_from_peer,
    ),
    Collective(
        name="memcopy",
        tensor_bytes=lambda size, n: 2 * size,
        make=lambda layout: out_of_place(1, 1, layout),
        run=_run_memcopy,
        sent=_from_me,
        expected=_from_me,
    ),
)
COLLECTIVES: dict[str, Collective] = {row.name: row for row in _ROWS}
"""Collectives by their key in files."""

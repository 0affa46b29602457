"""Activations between two layers that lie differently on the ranks of a stage.

A rank holds a block of the micro-batch: some tokens of some samples. Going to another layout, every
rank sends the others what of its block they lack, all in one all-to-all. Where activations are
replicated, a rank gets its block from the copy at its own place of the tensor group. The backward
goes the same way back: gradients are whole where activations are replicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from profiler.plan.groups import PlanGroups
from profiler.plan.layout import Layout

__all__ = ["is_exchanged", "local_shape", "relayout"]

Block = tuple[int, int, int, int]
"""First and end of the tokens, first and end of the samples."""


def local_shape(layout: Layout, *, seq_length: int, batch: int, hidden: int) -> tuple[int, ...]:
    """Return the shape of a rank's activations, (sequence, batch, hidden).

    batch : samples of a micro-batch on all ranks together.
    """
    split = layout.degree if layout.splits_sequence else 1
    return (seq_length // split, batch // layout.data_degree, hidden)


def relayout(x: torch.Tensor, groups: PlanGroups, old: Layout, new: Layout) -> torch.Tensor:
    """Return activations of the old layout, (sequence, batch, hidden), in the new one."""
    size = (
        x.shape[0] * (old.degree if old.splits_sequence else 1),
        x.shape[1] * old.data_degree,
    )
    there, back = _moves(old, new, size, groups.place), _moves(new, old, size, groups.place)
    if there.is_nothing and back.is_nothing:
        return x
    group = None if there.is_local and back.is_local else groups.whole_stage
    result: torch.Tensor = _Relayout.apply(x, there, back, group)
    return result


def is_exchanged(old: Layout, new: Layout) -> bool:
    """Return whether ranks have to exchange anything between two layouts, either way."""
    size = (_splits(old)[0] * _splits(new)[0], _splits(old)[1] * _splits(new)[1])
    return not (_is_local(old, new, size) and _is_local(new, old, size))


# --- what moves ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Moves:
    """What one rank sends and receives; blocks are relative to its own."""

    shape: tuple[int, int]
    """Tokens and samples of the rank's block afterwards."""
    sent: tuple[Block | None, ...]
    """By place in the stage; None: nothing."""
    received: tuple[Block | None, ...]
    is_local: bool
    """True where no rank needs anything of another one."""
    is_nothing: bool
    """True where every rank has its block already."""


def _splits(layout: Layout) -> tuple[int, int]:
    """Return into how many pieces tokens and samples are divided."""
    return (layout.degree if layout.splits_sequence else 1, layout.data_degree)


@lru_cache(maxsize=256)
def _blocks(layout: Layout, size: tuple[int, int]) -> NDArray[np.int64]:
    """Return the block of every rank of the stage, (ranks, 4)."""
    pieces = _splits(layout)
    steps = (size[0] // pieces[0], size[1] // pieces[1])
    cube = layout.cube
    rows = []
    for place in range(cube.num_ranks):
        token = cube.index(place, layout.tensor_axes) if layout.splits_sequence else 0
        sample = cube.index(place, layout.data_axes)
        rows.append(
            (
                token * steps[0],
                (token + 1) * steps[0],
                sample * steps[1],
                (sample + 1) * steps[1],
            )
        )
    return np.array(rows, dtype=np.int64)


def _copies(layout: Layout) -> NDArray[np.int64]:
    """Return which copy of its block every rank has, (ranks,)."""
    axes = () if layout.splits_sequence else layout.tensor_axes
    cube = layout.cube
    return np.array([cube.index(place, axes) for place in range(cube.num_ranks)], dtype=np.int64)


def _overlap(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what blocks have in common; empty where an end is not beyond its beginning."""
    low = np.maximum(one[..., ::2], other[..., ::2])
    high = np.minimum(one[..., 1::2], other[..., 1::2])
    return np.stack([low[..., 0], high[..., 0], low[..., 1], high[..., 1]], axis=-1)


@lru_cache(maxsize=256)
def _is_local(old: Layout, new: Layout, size: tuple[int, int]) -> bool:
    after = _blocks(new, size)
    return bool((_overlap(_blocks(old, size), after) == after).all())


@lru_cache(maxsize=1024)
def _moves(old: Layout, new: Layout, size: tuple[int, int], place: int) -> _Moves:
    before, after = _blocks(old, size), _blocks(new, size)
    copies = _copies(old)
    same_copy = copies == copies[place]
    is_local = _is_local(old, new, size)
    if is_local:
        same_copy = np.arange(len(copies)) == place
    own_before, own_after = before[place], after[place]
    return _Moves(
        shape=(int(own_after[1] - own_after[0]), int(own_after[3] - own_after[2])),
        sent=_relative(_overlap(own_before, after), own_before, same_copy),
        received=_relative(_overlap(before, own_after), own_after, same_copy),
        is_local=is_local,
        is_nothing=bool((before == after).all()),
    )


def _relative(
    blocks: NDArray[np.int64], own: NDArray[np.int64], chosen: NDArray[np.bool_]
) -> tuple[Block | None, ...]:
    origin = np.array([own[0], own[0], own[2], own[2]])
    filled = chosen & (blocks[:, 1] > blocks[:, 0]) & (blocks[:, 3] > blocks[:, 2])
    rows = (blocks - origin).tolist()
    return tuple(
        tuple(row) if is_filled else None
        for row, is_filled in zip(rows, filled.tolist(), strict=True)
    )


# --- moving it -----------------------------------------------------------------------------


class _Relayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, there: _Moves, back: _Moves, group: Any) -> Any:
        ctx.back, ctx.group = back, group
        return _move(x, there, group)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _move(grad, ctx.back, ctx.group), None, None, None


def _move(x: torch.Tensor, moves: _Moves, group: Any) -> torch.Tensor:
    if moves.is_nothing:
        return x.view_as(x)
    hidden = x.shape[-1]
    if moves.is_local:
        (block,) = (block for block in moves.sent if block is not None)
        return _cut(x, block).contiguous()
    send = [_num_tokens(block) * hidden for block in moves.sent]
    receive = [_num_tokens(block) * hidden for block in moves.received]
    # other copies may send all there is to send, and then a rank has nothing
    pieces = [x.new_empty(0), *(_cut(x, block).flatten() for block in moves.sent if block)]
    found = x.new_empty(sum(receive))
    dist.all_to_all_single(found, torch.cat(pieces), receive, send, group=group)
    del pieces
    out = x.new_empty((*moves.shape, hidden))
    for piece, target in zip(found.split(receive), moves.received, strict=True):
        if target is not None:
            part = _cut(out, target)
            part.copy_(piece.view(part.shape))
    return out


def _cut(x: torch.Tensor, block: Block) -> torch.Tensor:
    first, end, first_sample, end_sample = block
    return x[first:end, first_sample:end_sample]


def _num_tokens(block: Block | None) -> int:
    return 0 if block is None else (block[1] - block[0]) * (block[3] - block[2])

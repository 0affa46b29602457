"""Attention over a sequence that is sharded over a context-parallel group.

Every rank holds the queries of two pieces of the sequence, one from the front and one from the back
(`sharding.held_tokens`), as in Megatron-LM, so that causal work is balanced. It receives the keys
and values of the other ranks and combines the partial results by their softmax denominators (Liu et
al., "Ring Attention with Blockwise Transformers for Near-Infinite Context"). Sharding of heads is
not part of this module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import InputError
from autopar.records import Record
from profiler.model.layers.parallel import all_gather, reduce_scatter
from profiler.model.layers.sharding import ContextExchange


class ContextGroup(Record):
    """Context-parallel group of a layer and its exchange of keys and values."""

    degree: int = 1
    group: Any = None
    """A torch process group, an object with the methods of SoleRank, or None at degree 1."""
    exchange: ContextExchange = "ring"

    def __post_init__(self) -> None:
        size = 1 if self.group is None else self.group.size()
        if size != self.degree:
            raise InputError(
                f"the context group has {size} ranks, but the layer has context "
                f"degree {self.degree}",
                remedy="Use a group of that size",
            )

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return 0 if self.group is None else int(self.group.rank())


def context_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, on: ContextGroup, causal: bool
) -> torch.Tensor:
    """Return attention of this rank's queries to all keys.

    Tensors are (sequence, batch, heads, width), with the two pieces of this rank in order. Saves q,
    k, v, the output and one log-sum-exp per row. Raises InputError in fp32 on a GPU.
    """
    return _ContextAttention.apply(q, k, v, on, causal)


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, on: ContextGroup, causal: bool) -> Any:
        out: Any = None
        sums: Any = None
        for source, (k_now, v_now) in _met(on, k, v):
            rows, columns = _seen(on.rank, source, len(q), causal=causal)
            part, part_sums = _attended(
                q[rows], k_now[columns], v_now[columns], causal=causal and source == on.rank
            )
            if out is None:
                # this rank's own keys come first, so that every query attends to some of them
                out, sums = part.to(part_sums.dtype), part_sums
                continue
            _add(out[rows], sums[..., rows], part, part_sums)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.on, ctx.causal = on, causal
        return out

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        q, k, v, out, sums = ctx.saved_tensors
        on, causal = ctx.on, ctx.causal
        g = g.contiguous()
        g_q = torch.zeros_like(q, dtype=sums.dtype)
        round_ = _Gradients(on, k, v, sums.dtype)
        for source, (k_now, v_now) in _met(on, k, v):
            rows, columns = _seen(on.rank, source, len(q), causal=causal)
            # with the sums over all keys, each part reproduces its piece of the full softmax
            part_q, part_k, part_v = _attended_backward(
                g[rows],
                q[rows],
                k_now[columns],
                v_now[columns],
                out[rows],
                sums[..., rows],
                causal=causal and source == on.rank,
            )
            g_q[rows] += part_q
            round_.add(source, columns, part_k, part_v)
        g_k, g_v = round_.finish()
        return g_q.to(q.dtype), g_k.to(k.dtype), g_v.to(v.dtype), None, None


def _attended(q: Any, k: Any, v: Any, *, causal: bool) -> tuple[Any, Any]:
    """Return the attention output and the log of the softmax denominators, (batch, heads, rows)."""
    if not q.is_cuda:
        # registered in `kernels`, which every module that uses this one imports
        out, sums = torch.ops.autopar.attention(q, k, v, None, causal, 0)
        return out, sums
    found = torch.ops.aten._scaled_dot_product_flash_attention(
        *_heads_first(q, k, v), 0.0, causal, False
    )
    return found[0].permute(2, 0, 1, 3), found[1]


def _attended_backward(
    g: Any, q: Any, k: Any, v: Any, out: Any, sums: Any, *, causal: bool
) -> tuple[Any, Any, Any]:
    """Return the gradients of q, k and v; `sums` are the log denominators over all keys."""
    if not q.is_cuda:
        g_q, g_k, g_v = torch.ops.autopar.attention_backward(
            g, q, k, v, None, out, sums.contiguous(), causal, 0
        )
        return g_q, g_k, g_v
    heads = _heads_first(q, k, v)
    # without dropout the kernel needs no random state
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        *_heads_first(g),
        *heads,
        *_heads_first(out),
        sums.contiguous(),
        None,
        None,
        len(q),
        len(k),
        0.0,
        causal,
        state,
        state,
    )
    g_q, g_k, g_v = (x.permute(2, 0, 1, 3) for x in found)
    times = q.shape[2] // k.shape[2]
    if times > 1:  # several query heads share each key-value head
        g_k, g_v = (x.unflatten(2, (-1, times)).sum(3) for x in (g_k, g_v))
    return g_q, g_k, g_v


def _heads_first(q: Any, *others: Any) -> list[Any]:
    """Return tensors as (batch, heads, rows, width) for flash attention, with equal head counts.

    Raises InputError in fp32, which flash attention does not support.
    """
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise InputError(
            "context degrees above 1 need bf16 or fp16 on a GPU",
            remedy="Use --dtype bf16",
        )
    found = [x.permute(1, 2, 0, 3) for x in (q, *others)]
    heads = found[0].shape[1]
    return [x.repeat_interleave(heads // x.shape[1], dim=1) for x in found]


def _add(out: Any, sums: Any, part: Any, part_sums: Any) -> None:
    """Merge the attention to another set of keys into `out` and `sums`, in place.

    out, part : outputs for the two sets of keys, (sequence, batch, heads, width).
    sums, part_sums : logs of their softmax denominators, (batch, heads, sequence).
    """
    both = torch.logaddexp(sums, part_sums)
    for weight, target in (((sums - both).exp(), None), ((part_sums - both).exp(), part)):
        factor = weight.permute(2, 0, 1)[..., None]
        if target is None:
            out.mul_(factor)
        else:
            out.add_(target * factor)
    sums.copy_(both)


def _seen(rank: int, source: int, length: int, *, causal: bool) -> tuple[slice, slice]:
    """Return the slices of this rank's queries and of `source`'s keys that interact under the mask.

    rank, source : context ranks; rank i of c holds the pieces i and 2c-1-i.
    length : tokens per rank.
    """
    half, everything = length // 2, slice(None)
    if not causal or source == rank:
        return everything, everything
    # the front piece of `source` is before both pieces of this rank, its back piece after both
    if source < rank:
        return everything, slice(0, half)
    # both pieces of `source` are before the back piece of this rank, and after its front one
    return slice(half, None), everything


def _met(on: ContextGroup, k: Any, v: Any) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """Yield (rank, (keys, values)) for every rank of the group, starting with this rank."""
    c, rank = on.degree, on.rank
    if on.exchange == "all_gather":
        all_k, all_v = (all_gather(x[None], on.group) for x in (k, v))
        for step in range(c):
            source = (rank - step) % c
            yield source, (all_k[source], all_v[source])
        return
    now = (k, v)
    for step in range(c):
        # the next tensors are in transit while these are used
        arriving = [_Shift(x, on) for x in now] if step + 1 < c else []
        yield (rank - step) % c, now
        if arriving:
            now = (arriving[0].wait(), arriving[1].wait())


class _Gradients:
    """Sums of the gradients of keys and values.

    In a ring they move with their keys; with all-gather they are reduce-scattered at the end.
    """

    def __init__(self, on: ContextGroup, k: Any, v: Any, dtype: torch.dtype) -> None:
        self._on = on
        pieces = (on.degree,) if on.exchange == "all_gather" else ()
        self._sums = [x.new_zeros((*pieces, *x.shape), dtype=dtype) for x in (k, v)]
        self._is_new = True

    def add(self, source: int, columns: slice, g_k: Any, g_v: Any) -> None:
        if self._on.exchange == "all_gather":
            for total, part in zip(self._sums, (g_k, g_v), strict=True):
                total[source][columns] += part
            return
        if not self._is_new:
            # receive the sums of these keys from the rank that processed them before
            self._shift()
        self._is_new = False
        for total, part in zip(self._sums, (g_k, g_v), strict=True):
            total[columns] += part

    def finish(self) -> tuple[Any, Any]:
        """Return the gradients of this rank's keys and values."""
        if self._on.exchange == "all_gather":
            k, v = (reduce_scatter(total, self._on.group)[0] for total in self._sums)
            return k, v
        # one more shift returns the sums to the owners of the keys
        self._shift()
        return self._sums[0], self._sums[1]

    def _shift(self) -> None:
        self._sums = [shift.wait() for shift in [_Shift(x, self._on) for x in self._sums]]


class _Shift:
    """Asynchronous ring shift: sends a tensor to the next rank, receives the previous rank's."""

    def __init__(self, x: Any, on: ContextGroup) -> None:
        c, rank = on.degree, on.rank
        self._work: Any = None
        self._sent = x = x.contiguous()
        if not isinstance(on.group, dist.ProcessGroup):
            # ranks that do not exist would send equal tensors
            self._out = x.clone()
            return
        self._out = torch.empty_like(x)
        # one message to one rank: an all-to-all whose other pieces are empty
        sent, received = [0] * c, [0] * c
        sent[(rank + 1) % c] = received[(rank - 1) % c] = x.numel()
        self._work = dist.all_to_all_single(
            self._out.view(-1), x.view(-1), received, sent, group=on.group, async_op=True
        )

    def wait(self) -> Any:
        """Return the received tensor."""
        if self._work is not None:
            self._work.wait()
        del self._sent
        return self._out

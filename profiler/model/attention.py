"""Rotary positions and attention that keep exactly what a GPU's fused kernels keep.

Tensors are (sequence, batch, heads, width), as Megatron-LM lays them out. Attention is registered
as an operator, so that whoever watches operators sees one, on every version of torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn import functional

from autopar.errors import InputError
from profiler.model.norms import statistics_like

__all__ = ["attention", "open_attention", "rotary"]

# --- positions -----------------------------------------------------------------------------


def _rotate(x: Any, cos: Any, sin: Any, sign: int) -> Any:
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=sign)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, cos: Any, sin: Any) -> Any:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(g, cos, sin, -1), None, None


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return heads turned by their positions; keeps only the tables.

    `x` is (sequence, batch, heads, width), the tables are (sequence, 1, 1, width / 2).
    """
    return _Rotary.apply(x, cos, sin)


# --- attention -----------------------------------------------------------------------------


def _heads_first(x: Any) -> Any:
    return x.permute(1, 2, 0, 3)


def _sequence_first(x: Any) -> Any:
    return x.permute(2, 0, 1, 3).contiguous()


def _repeated(x: Any, like: Any) -> Any:
    """Return key-value heads, each as often as query heads share it; (batch, heads, ...)."""
    times = like.shape[2] // x.shape[2]
    heads = _heads_first(x)
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)


def _summed(grad: Any, like: Any) -> Any:
    """Return the gradient of key-value heads from that of their repetitions."""
    batch, heads, seq, width = grad.shape
    own = like.shape[2]
    return _sequence_first(grad.view(batch, own, heads // own, seq, width).sum(2))


@torch.library.custom_op(
    "autopar::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, bool causal) -> Tensor[]",
)
def _attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _heads_first(q), _repeated(k, q), _repeated(v, q), 0.0, causal
    )
    return [_sequence_first(out), lse]


@_attention.register_fake
def _(q: Any, k: Any, v: Any, causal: bool) -> Any:
    seq, batch, heads, _ = q.shape
    return [torch.empty_like(q), statistics_like(q).view(seq, batch, heads).permute(1, 2, 0)]


@torch.library.custom_op(
    "autopar::attention_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool causal)"
    " -> Tensor[]",
)
def _attention_backward(g: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool) -> Any:
    g_q, g_k, g_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _heads_first(g),
        _heads_first(q),
        _repeated(k, q),
        _repeated(v, q),
        _heads_first(out),
        lse,
        0.0,
        causal,
    )
    return [_sequence_first(g_q), _summed(g_k, k), _summed(g_v, v)]


@_attention_backward.register_fake
def _(g: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, causal: bool) -> Any:
    return [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)]


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, causal: bool) -> Any:
        out, lse = _attention(q, k, v, causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return (*_attention_backward(g.contiguous(), *ctx.saved_tensors, ctx.causal), None)


_repeats: dict[tuple[Any, ...], bool] = {}
"""What `_must_repeat` found out, by sizes: asking takes longer than a short kernel."""


def _must_repeat(q: Any, k: Any, v: Any, causal: bool, dropout: float) -> bool:
    """Return whether fused kernels of a CUDA device want as many key-value heads as query heads.

    They do in fp32, and on devices before compute capability 8.0.
    Which of the kernels runs is torch's choice; they keep the same. The kernel of last resort
    keeps the matrix of scores, and takes times that nobody trains with: none is better than it.
    """
    key = (q.shape, k.shape, q.dtype, q.device, causal, dropout)
    if key not in _repeats:
        times = q.shape[1] // k.shape[1]
        if _is_fused(q, k, v, causal, dropout):
            _repeats[key] = False
        elif times > 1 and _is_fused(
            q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), causal, dropout
        ):
            _repeats[key] = True
        else:
            name = str(q.dtype).removeprefix("torch.")
            raise InputError(
                f"this device has no fused attention for heads of width {q.shape[-1]} in {name}; "
                "choose another --dtype or another device"
            )
    return _repeats[key]


def _is_fused(q: Any, k: Any, v: Any, causal: bool, dropout: float) -> bool:
    params = SDPAParams(q, k, v, None, dropout, causal, q.shape[1] != k.shape[1])
    kernels = (can_use_flash_attention, can_use_cudnn_attention, can_use_efficient_attention)
    return any(can_use(params) for can_use in kernels)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, dropout: float = 0.0
) -> torch.Tensor:
    """Return attention that never holds the matrix of scores; keeps q, k, v, out, one sum a row.

    `q` is (sequence, batch, heads, width), `k` and `v` may have fewer heads and another sequence.
    The dropout exists on CUDA alone: its mask is not kept, so it changes no memory. Raises
    InputError where a CUDA device has no fused kernel for it.
    """
    if not q.is_cuda:
        return _FlashAttention.apply(q, k, v, causal)
    heads = (_heads_first(q), _heads_first(k), _heads_first(v))
    grouped = q.shape[2] != k.shape[2]
    if _must_repeat(*heads, causal, dropout):
        heads, grouped = (heads[0], _repeated(k, q), _repeated(v, q)), False
    out = functional.scaled_dot_product_attention(
        *heads, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
    )
    return out.permute(2, 0, 1, 3)


def open_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, dropout: float = 0.0
) -> torch.Tensor:
    """Return the same with the softmax in the open; keeps softmax, dropout mask and its product.

    As counted by Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models" (5 a s^2 b bytes in 16 bit); tensors as in `attention`.
    """
    seq, batch, heads, width = q.shape
    flat_q = q.reshape(seq, batch * heads, width).transpose(0, 1)
    flat_k, flat_v = (_repeated(x, q).flatten(0, 1) for x in (k, v))
    scores = torch.bmm(flat_q, flat_k.transpose(1, 2)) * (1 / math.sqrt(width))
    if causal:
        # adding the mask keeps nothing, filling by it would keep it
        scores = scores + torch.full_like(scores[0], -math.inf).triu(1)
    weights = torch.softmax(scores, dim=-1)
    if dropout:
        weights = torch.native_dropout(weights, dropout, True)[0]
    out = torch.bmm(weights, flat_v)
    return out.view(batch, heads, seq, width).permute(2, 0, 1, 3)

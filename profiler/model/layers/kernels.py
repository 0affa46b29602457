"""Norms, rotary positions and attention that save the tensors of a GPU's fused kernels.

`profiler.model.layers.attention` and `blocks` use them.
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

# --------------------------------------------------------------------------------------------------
# RMSNorm and LayerNorm that save the tensors of a GPU's fused kernels.
#
# On a CPU, torch decomposes them and saves fp32 copies. Here they are autograd functions that
# choose their saved tensors. The formulas are registered as operators, so that a dispatch mode sees
# one operator, as on a GPU, and not the temporary fp32 copies.


def _wide(x: torch.Tensor) -> torch.Tensor:
    # fused kernels compute in fp32, whatever the dtype of x
    return x if x.dtype == torch.float64 else x.float()


def statistics_like(x: torch.Tensor) -> torch.Tensor:
    """Return an uninitialised tensor with one element per row of x, in fp32 (fp64 for fp64 x)."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty((*x.shape[:-1], 1), dtype=dtype)


@torch.library.custom_op(
    "autopar::rms_norm", mutates_args=(), schema="(Tensor x, Tensor w, float eps) -> Tensor[]"
)
def _rms_norm(x: Any, w: Any, eps: float) -> Any:
    wide = _wide(x)
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return [(wide * rstd * w).to(x.dtype), rstd]


@_rms_norm.register_fake
def _(x: Any, w: Any, eps: float) -> Any:
    return [torch.empty_like(x), statistics_like(x)]


@torch.library.custom_op(
    "autopar::rms_norm_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor w, Tensor rstd) -> Tensor[]",
)
def _rms_norm_backward(g: Any, x: Any, w: Any, rstd: Any) -> Any:
    wide, g_wide = _wide(x), _wide(g)
    normal = wide * rstd
    g_normal = g_wide * w
    # gradients through x itself, and through the mean square, which depends on the whole row
    g_x = rstd * (g_normal - normal * (g_normal * normal).mean(-1, keepdim=True))
    return [g_x.to(x.dtype), (g_wide * normal).flatten(0, -2).sum(0).to(w.dtype)]


@_rms_norm_backward.register_fake
def _(g: Any, x: Any, w: Any, rstd: Any) -> Any:
    return [torch.empty_like(x), torch.empty_like(w)]


@torch.library.custom_op(
    "autopar::layer_norm",
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor b, float eps) -> Tensor[]",
)
def _layer_norm(x: Any, w: Any, b: Any, eps: float) -> Any:
    wide = _wide(x)
    mean = wide.mean(-1, keepdim=True)
    centred = wide - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return [(centred * rstd * w + b).to(x.dtype), mean, rstd]


@_layer_norm.register_fake
def _(x: Any, w: Any, b: Any, eps: float) -> Any:
    return [torch.empty_like(x), statistics_like(x), statistics_like(x)]


@torch.library.custom_op(
    "autopar::layer_norm_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor w, Tensor mean, Tensor rstd) -> Tensor[]",
)
def _layer_norm_backward(g: Any, x: Any, w: Any, mean: Any, rstd: Any) -> Any:
    g_wide = _wide(g)
    normal = (_wide(x) - mean) * rstd
    g_normal = g_wide * w
    # gradients through x itself, the mean and the variance
    g_x = rstd * (
        g_normal
        - g_normal.mean(-1, keepdim=True)
        - normal * (g_normal * normal).mean(-1, keepdim=True)
    )
    g_w = (g_wide * normal).flatten(0, -2).sum(0).to(w.dtype)
    return [g_x.to(x.dtype), g_w, g_wide.flatten(0, -2).sum(0).to(w.dtype)]


@_layer_norm_backward.register_fake
def _(g: Any, x: Any, w: Any, mean: Any, rstd: Any) -> Any:
    return [torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)]


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, eps: float) -> Any:
        # older versions of torch have the forward operator for other devices, without a backward
        ctx.fused = x.is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm_backward")
        if ctx.fused:
            y, rstd = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], w, eps)
        else:
            y, rstd = _rms_norm(x, w, eps)
        ctx.save_for_backward(x, w, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w, rstd = ctx.saved_tensors
        if ctx.fused:
            g_x, g_w = torch.ops.aten._fused_rms_norm_backward(
                g.contiguous(), x, [x.shape[-1]], rstd, w, [True, True]
            )
        else:
            g_x, g_w = _rms_norm_backward(g, x, w, rstd)
        return g_x, g_w, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, b: Any, eps: float) -> Any:
        if x.is_cuda:
            y, mean, rstd = torch.ops.aten.native_layer_norm(x, [x.shape[-1]], w, b, eps)
        else:
            y, mean, rstd = _layer_norm(x, w, b, eps)
        ctx.save_for_backward(x, w, b, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w, b, mean, rstd = ctx.saved_tensors
        if x.is_cuda:
            found = torch.ops.aten.native_layer_norm_backward(
                g.contiguous(), x, [x.shape[-1]], mean, rstd, w, b, [True, True, True]
            )
        else:
            found = _layer_norm_backward(g, x, w, mean, rstd)
        return (*found, None)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Return RMSNorm of x over its last dimension; saves x and one fp32 number per row."""
    return _RmsNorm.apply(x, weight, eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Return LayerNorm of x over its last dimension; saves x and two fp32 numbers per row."""
    return _LayerNorm.apply(x, weight, bias, eps)


# --------------------------------------------------------------------------------------------------
# Rotary positions and attention that save the tensors of a GPU's fused kernels.
#
# Tensors are (sequence, batch, heads, width), as in Megatron-LM. Attention is registered as an
# operator, so that a dispatch mode sees one operator in every version of torch.


# --- positions -----------------------------------------------------------------------------


def _rotate(x: Any, cos: Any, sin: Any, sign: int) -> Any:
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    # written into the output, which avoids a temporary of the size of x
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
        # the backward of a rotation is the inverse rotation
        return _rotate(g, cos, sin, -1), None, None


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x with rotary position embedding; saves only the tables.

    `x` is (sequence, batch, heads, width); `cos` and `sin` are (sequence, 1, 1, width / 2).
    """
    return _Rotary.apply(x, cos, sin)


# --- attention -----------------------------------------------------------------------------


def _heads_first(x: Any) -> Any:
    return x.permute(1, 2, 0, 3)


def _sequence_first(x: Any) -> Any:
    return x.permute(2, 0, 1, 3).contiguous()


def _repeated(x: Any, like: Any) -> Any:
    """Return keys or values, repeated to the number of query heads of `like`; (batch, heads, ...).

    x, like : (sequence, batch, heads, width).
    """
    times = like.shape[2] // x.shape[2]
    heads = _heads_first(x)
    return heads if times == 1 else heads.repeat_interleave(times, dim=1)


def _summed(grad: Any, like: Any) -> Any:
    """Return the gradient of the key-value heads `like`: the sum over the query heads of each."""
    batch, heads, seq, width = grad.shape
    own = like.shape[2]
    return _sequence_first(grad.view(batch, own, heads // own, seq, width).sum(2))


def _narrow(q: Any, keys: int, causal: bool, window: int) -> dict[str, Any]:
    """Return the mask arguments of the CPU attention operator.

    keys : number of keys.
    window : as in `attention`. A window becomes an additive mask, 0 for visible keys and -inf for
        others; without one only the causal flag is returned.
    """
    if not window:
        return {"is_causal": causal}
    places = torch.arange(q.shape[0], device=q.device)[:, None]
    places = places - torch.arange(keys, device=q.device)
    seen = places < window
    # without a causal mask, the window extends as far ahead as back
    seen &= (places >= 0) if causal else (places > -window)
    mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
    return {"is_causal": False, "attn_mask": mask.masked_fill_(~seen, -math.inf)}


def _as_wide(x: Any, width: int) -> Any:
    """Return heads padded with zeros to `width`; this does not change their dot products."""
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def _for_cpu(*tensors: Any) -> tuple[list[Any], float]:
    """Return heads padded to equal width, as the CPU kernel requires, and the score scale.

    The scale is 1 / sqrt(width of the first tensor) before padding.
    """
    width = max(x.shape[-1] for x in tensors)
    return [_as_wide(x, width) for x in tensors], 1 / math.sqrt(tensors[0].shape[-1])


@torch.library.custom_op(
    "autopar::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, bool causal, int window) -> Tensor[]",
)
def _attention(q: Any, k: Any, v: Any, sinks: Any, causal: bool, window: int) -> Any:
    heads, scale = _for_cpu(_heads_first(q), _repeated(k, q), _repeated(v, q))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *heads, 0.0, **_narrow(q, k.shape[0], causal, window), scale=scale
    )
    out = out[..., : v.shape[-1]]
    if sinks is not None:
        # a sink adds one term to the softmax denominator of each row
        more = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out = out * (lse - more).exp().to(out.dtype)[..., None]
        lse = more
    return [_sequence_first(out), lse]


@_attention.register_fake
def _(q: Any, k: Any, v: Any, sinks: Any, causal: bool, window: int) -> Any:
    seq, batch, heads, _ = q.shape
    return [
        q.new_empty((seq, batch, heads, v.shape[-1])),
        statistics_like(q).view(seq, batch, heads).permute(1, 2, 0),
    ]


@torch.library.custom_op(
    "autopar::attention_backward",
    mutates_args=(),
    schema="(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse,"
    " bool causal, int window) -> Tensor[]",
)
def _attention_backward(
    g: Any, q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any, causal: bool, window: int
) -> Any:
    (g_out, *heads, own), scale = _for_cpu(
        _heads_first(g), _heads_first(q), _repeated(k, q), _repeated(v, q), _heads_first(out)
    )
    scale = 1 / math.sqrt(q.shape[-1])
    # the kernel recomputes the softmax from the row sums, which include the sink
    g_q, g_k, g_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        g_out, *heads, own, lse, 0.0, **_narrow(q, k.shape[0], causal, window), scale=scale
    )
    found = [
        _sequence_first(g_q[..., : q.shape[-1]]),
        _summed(g_k[..., : k.shape[-1]], k),
        _summed(g_v[..., : v.shape[-1]], v),
    ]
    if sinks is not None:
        # a sink has no value vector: its gradient depends only on the weight that it takes
        weights = (sinks.to(lse.dtype)[:, None] - lse).exp()
        taken = weights * (g_out * own).to(lse.dtype).sum(-1)
        found.append(-taken.sum((0, 2)).to(sinks.dtype))
    return found


@_attention_backward.register_fake
def _(
    g: Any, q: Any, k: Any, v: Any, sinks: Any, out: Any, lse: Any, causal: bool, window: int
) -> Any:
    found = [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)]
    return found if sinks is None else [*found, torch.empty_like(sinks)]


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, sinks: Any, causal: bool, window: int) -> Any:
        out, lse = _attention(q, k, v, sinks, causal, window)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.mask = (causal, window)
        return out

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        found = _attention_backward(g.contiguous(), *ctx.saved_tensors, *ctx.mask)
        g_sinks = found[3] if len(found) > 3 else None
        return (*found[:3], g_sinks, None, None)


_repeats: dict[tuple[Any, ...], bool] = {}
"""Results of `_must_repeat` by shapes, dtype, device and options. They are cached because asking
torch takes longer than a short kernel."""


def _must_repeat(q: Any, k: Any, v: Any, causal: bool, dropout: float) -> bool:
    """Return True if the fused CUDA kernels do not support grouped key-value heads here.

    This is the case in fp32, and below compute capability 8.0. torch chooses the kernel; all fused
    kernels save equal tensors. Raises InputError if no fused kernel is available: torch's fallback
    saves the score matrix, and its times do not represent training.
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
                f"this device has no fused attention for heads of width {q.shape[-1]} in {name}",
                remedy="Use another --dtype or device",
            )
    return _repeats[key]


def _is_fused(q: Any, k: Any, v: Any, causal: bool, dropout: float) -> bool:
    params = SDPAParams(q, k, v, None, dropout, causal, q.shape[1] != k.shape[1])
    kernels = (can_use_flash_attention, can_use_cudnn_attention, can_use_efficient_attention)
    return any(can_use(params) for can_use in kernels)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Return fused attention; saves q, k, v, the output and one log-sum-exp per row.

    `q` is (sequence, batch, heads, width). `k` and `v` may have fewer heads and another sequence
    length, and `v` another width.

    sinks : one additional score per head in the softmax denominator, without a value vector.

    window : largest number of keys that a query attends to, including its own; 0 for all.
    dropout : applied on CUDA only. Its mask is not saved, so it does not change memory.

    Raises InputError if a CUDA device has no fused kernel for the inputs.
    """
    if not q.is_cuda:
        return _FlashAttention.apply(q, k, v, sinks, causal, window)
    for what, there in (("sinks", sinks is not None), ("windows", 0 < window < k.shape[0])):
        if there:
            raise InputError(
                f"torch has no fused attention with {what} on this device, so "
                "its times would be those of another kernel",
                remedy="Use --profile-type memory",
            )
    heads = (_heads_first(q), _heads_first(k), _heads_first(v))
    grouped = q.shape[2] != k.shape[2]
    if _must_repeat(*heads, causal, dropout):
        heads, grouped = (heads[0], _repeated(k, q), _repeated(v, q)), False
    out = functional.scaled_dot_product_attention(
        *heads, dropout_p=dropout, is_causal=causal, enable_gqa=grouped
    )
    return out.permute(2, 0, 1, 3)


def open_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    dropout: float = 0.0,
    sinks: torch.Tensor | None = None,
    window: int = 0,
) -> torch.Tensor:
    """Return unfused attention; saves the softmax, the dropout mask and their product.

    Memory is as in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
    Models" (5 a s^2 b bytes in 16 bit). Tensors are as in `attention`. Raises InputError for sinks
    and windows, which need a fused kernel.
    """
    if sinks is not None or window:
        raise InputError(
            "layers with sliding windows or attention sinks need fused attention",
            remedy="Use fused attention",
        )
    seq, batch, heads, width = q.shape
    flat_q = q.reshape(seq, batch * heads, width).transpose(0, 1)
    flat_k, flat_v = (_repeated(x, q).flatten(0, 1) for x in (k, v))
    # a dot product of heads has variance `width`; this scale makes it 1
    scores = torch.bmm(flat_q, flat_k.transpose(1, 2)) * (1 / math.sqrt(width))
    if causal:
        # adding the mask saves no tensor, masked_fill would save the mask
        scores = scores + torch.full_like(scores[0], -math.inf).triu(1)
    weights = torch.softmax(scores, dim=-1)
    if dropout:
        weights = torch.native_dropout(weights, dropout, True)[0]
    out = torch.bmm(weights, flat_v)
    return out.view(batch, heads, seq, v.shape[-1]).permute(2, 0, 1, 3)

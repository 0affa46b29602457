"""Transformer layers of a spec, with the shapes of one rank: what is counted and what is timed.

Pre-norm layers: RMSNorm or LayerNorm, self-attention (grouped keys and values, rotary positions),
cross-attention, a gated (SwiGLU) or plain (GELU) MLP or a mixture of them. Activations are
(sequence, batch, hidden), as in Megatron-LM.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn import functional

from autopar.errors import InputError
from autopar.model import LayerSpec, head_dim
from profiler.model.layers.context import ContextGroup, context_attention
from profiler.model.layers.experts import Experts, Mlp
from profiler.model.layers.parallel import ColumnParallel, RowParallel, TensorGroup
from profiler.model.layers.recompute import discarding, recomputed
from profiler.model.layers.sharding import Sharding, held_tokens

__all__ = [
    "Norm",
    "attention",
    "build_layer",
    "has_norm_biases",
    "layer_inputs",
    "layer_norm",
    "made_of",
    "open_attention",
    "rms_norm",
    "rotary",
    "statistics_like",
]


# --------------------------------------------------------------------------------------------------
# RMSNorm and LayerNorm that keep exactly what a GPU's fused kernels keep.
#
# On a CPU torch decomposes them and keeps fp32 copies; here they are autograd functions whose saved
# tensors are written down. The formulas are registered as operators, so that whoever watches
# operators sees one, as on a GPU, and not the temporary fp32 copies.


def _wide(x: torch.Tensor) -> torch.Tensor:
    # fused kernels compute in fp32, whatever the type of x
    return x if x.dtype == torch.float64 else x.float()


def statistics_like(x: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor for one number per row of x: fp32, or fp64 where x is that."""
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
    # through x itself, and through the mean square, which holds every element of the row
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
    # through x itself, through the mean and through the variance
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
        # older versions of torch have an operator of that name for other devices, no backward
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
    """Return x over its root mean square; keeps x and one fp32 number per token."""
    return _RmsNorm.apply(x, weight, eps)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5
) -> torch.Tensor:
    """Return x with mean 0 and variance 1; keeps x and two fp32 numbers per token."""
    return _LayerNorm.apply(x, weight, bias, eps)


# --------------------------------------------------------------------------------------------------
# Rotary positions and attention that keep exactly what a GPU's fused kernels keep.
#
# Tensors are (sequence, batch, heads, width), as Megatron-LM lays them out. Attention is registered
# as an operator, so that whoever watches operators sees one, on every version of torch.


# --- positions -----------------------------------------------------------------------------


def _rotate(x: Any, cos: Any, sin: Any, sign: int) -> Any:
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    # into the output: no temporary of the size of x is there beside it
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
        # the backward of a rotation is the rotation back
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
    # a product of rows has the variance of their width: over its root it is 1 again
    scores = torch.bmm(flat_q, flat_k.transpose(1, 2)) * (1 / math.sqrt(width))
    if causal:
        # adding the mask keeps nothing, filling by it would keep it
        scores = scores + torch.full_like(scores[0], -math.inf).triu(1)
    weights = torch.softmax(scores, dim=-1)
    if dropout:
        weights = torch.native_dropout(weights, dropout, True)[0]
    out = torch.bmm(weights, flat_v)
    return out.view(batch, heads, seq, width).permute(2, 0, 1, 3)


# --------------------------------------------------------------------------------------------------
# A layer of a spec, put together on one rank.


_ROTARY_BASE = 10000.0


@contextlib.contextmanager
def made_of(dtype: torch.dtype, device: torch.device | str) -> Iterator[None]:
    """Make new tensors of this type on this device, for as long as the context lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def build_layer(
    spec: LayerSpec,
    sharding: Sharding,
    *,
    group: Any = None,
    dtype: torch.dtype,
    device: torch.device | str,
    expert_group: Any = None,
    context_group: Any = None,
) -> nn.Module:
    """Return one layer of a spec with its shapes on one rank; `module(x, context=None) -> x`.

    `group` is a torch process group of the sharding's degree, an object with the methods of
    `parallel.SoleRank`, or None at degree 1; `expert_group` and `context_group` likewise for its
    expert and context degrees. A decoder layer with cross-attention takes the encoder's output as
    `context`. Where a group has more ranks than key-value heads, ranks share them, and a trainer
    has to sum their gradients; so has it for norms and row biases with sequence parallelism.

    Specs do not say which layers turn heads by their position: causal ones with RMSNorm and
    without cross-attention do (it changes no memory). Raises InputError for what cannot be built.
    """
    if spec.num_heads is None or spec.ffn_hidden_size is None:
        raise InputError("heads and MLP width are unknown; give a model spec (--model)")
    sharding.check(spec)
    on = TensorGroup(degree=sharding.degree, kind=sharding.kind, group=group)
    context = ContextGroup(
        degree=sharding.context_degree, group=context_group, exchange=sharding.context_exchange
    )
    with made_of(dtype, device):
        return _Layer(spec, sharding, on, context, expert_group)


def layer_inputs(
    spec: LayerSpec,
    sharding: Sharding,
    *,
    batch: int,
    dtype: torch.dtype,
    device: torch.device | str,
    encoder_seq_length: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """Return random inputs of a layer on one rank, (sequence, batch, hidden), which want gradients.

    A layer with cross-attention has the encoder's output as the second one; its sequence is as
    long as the layer's own unless said otherwise.
    """
    lengths = [spec.seq_length]
    if spec.cross_attention:
        lengths.append(encoder_seq_length or spec.seq_length)
    for length in lengths:
        if sharding.shards_sequence and length % sharding.degree:
            raise InputError(
                f"degree {sharding.degree} does not divide the sequence length {length}; choose a "
                "degree that does"
            )
    with made_of(dtype, device):
        return tuple(
            torch.randn(
                sharding.local_seq_length(length), batch, spec.hidden_size, requires_grad=True
            )
            for length in lengths
        )


# --- parts ---------------------------------------------------------------------------------


class Norm(nn.Module):
    """RMSNorm, or LayerNorm where it has a bias."""

    def __init__(self, width: int, *, bias: bool) -> None:
        """Make a norm over the last dimension."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, normalised token by token."""
        if self.bias is None:
            return rms_norm(x, self.weight)
        return layer_norm(x, self.weight, self.bias)


def has_norm_biases(spec: LayerSpec) -> bool:
    """Return whether the norms of a layer have biases (LayerNorm) or not (RMSNorm).

    Raises InputError when its norm parameters are those of neither.
    """
    # one before each: attention, cross-attention, MLP
    norms = 3 if spec.cross_attention else 2
    per_norm = spec.norm_parameters_per_hidden / norms
    if per_norm not in (1, 2):
        raise InputError(
            f"norm_parameters_per_hidden {spec.norm_parameters_per_hidden} is neither that of "
            f"{norms} RMSNorms ({norms}) nor of {norms} LayerNorms ({2 * norms}); measure the "
            "model as a module of your own (--model py:package.module:factory)"
        )
    return per_norm == 2


class _Attention(nn.Module):
    def __init__(
        self,
        spec: LayerSpec,
        sharding: Sharding,
        on: TensorGroup,
        *,
        context: ContextGroup,
        cross: bool = False,
    ) -> None:
        super().__init__()
        self.context = context
        if spec.qk_norms:
            raise InputError(
                "layers with norms of queries and keys are not built here; measure the model as a "
                "module of your own (--model py:package.module:factory)"
            )
        self.on, self.cross = on, cross
        self.causal = spec.causal and not cross
        self.dropout = sharding.dropout
        self.core = attention if sharding.flash else open_attention
        self.recompute = sharding.checkpoint == "selective" or "core_attn" in sharding.recompute
        self.width = head_dim(spec)
        heads = spec.num_heads or 1
        kv_heads = spec.num_kv_heads or heads
        # ranks share key-value heads where there are more ranks than heads
        own, own_kv = heads // on.weight_ranks, max(1, kv_heads // on.weight_ranks)
        query, pair = own * self.width, [own_kv * self.width] * 2
        bias = spec.biases or spec.qkv_biases
        h = spec.hidden_size
        self.query = ColumnParallel(h, [query] if cross else [query, *pair], bias=bias, on=on)
        self.key_value = ColumnParallel(h, pair, bias=bias, on=on) if cross else None
        self.out = RowParallel(query, h, bias=spec.biases, on=on)
        if self.causal and not spec.cross_attention and not has_norm_biases(spec):
            tables = self._tables(spec.seq_length)
        else:
            tables = None
        self.register_buffer("cos", tables[0] if tables else None, persistent=False)
        self.register_buffer("sin", tables[1] if tables else None, persistent=False)

    def _tables(self, seq_length: int) -> tuple[Any, Any]:
        """Return cosines and sines of the positions whose heads this rank turns."""
        # Ulysses turns heads before the exchange, while a rank has its own tokens alone
        ulysses = self.on.splits_sequence and not self.on.splits_weights
        held = held_tokens(
            seq_length,
            context=(self.context.degree, self.context.rank),
            shard=(self.on.degree, self.on.rank) if ulysses else (1, 0),
        )
        # bf16 has no exact integers above 256
        places = torch.cat([torch.arange(*ends, dtype=torch.float32) for ends in held])
        powers = torch.arange(0, self.width, 2, dtype=torch.float32) / self.width
        # frequencies of rotary positions: base^(-2i / width)
        angles = torch.outer(places, _ROTARY_BASE**-powers)[:, None, None, :]
        dtype = torch.get_default_dtype()
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, x: Any, context: Any = None) -> Any:
        if self.key_value is None:
            flat = self.query(x)
        else:
            flat = (*self.query(x), *self.key_value(context))
        q, k, v = (part.view(*part.shape[:2], -1, self.width) for part in flat)
        # else heads as they were before turning would be held until the end
        del flat
        if self.cos is not None:
            q, k = rotary(q, self.cos, self.sin), rotary(k, self.cos, self.sin)
        if self.on.splits_weights or self.on.degree == 1:
            out = self._scores(q, k, v)
        else:
            q, k, v = self._to_heads(q), self._to_heads(k), self._to_heads(v)
            out = self._to_sequence(self._scores(q, k, v))
        return self.out(out.reshape(*out.shape[:2], -1))

    def _scores(self, q: Any, k: Any, v: Any) -> Any:
        def core(q: Any, k: Any, v: Any) -> Any:
            if self.context.degree > 1:
                return context_attention(q, k, v, on=self.context, causal=self.causal)
            return self.core(q, k, v, causal=self.causal, dropout=self.dropout)

        if not self.recompute:
            return core(q, k, v)
        return recomputed(core, q, k, v, dropout=self.dropout)

    def _to_heads(self, x: Any) -> Any:
        """Return all tokens of this rank's heads, from this rank's tokens of all heads."""
        t = self.on.degree
        if x.shape[2] < t:  # more ranks than heads: several ranks get the same one
            x = x.repeat_interleave(t // x.shape[2], dim=2)
        pieces = x.unflatten(2, (t, -1)).permute(2, 0, 1, 3, 4)
        return self.on.exchange(pieces).flatten(0, 1)

    def _to_sequence(self, x: Any) -> Any:
        """Return this rank's tokens of all heads, from all tokens of this rank's heads."""
        pieces = self.on.exchange(x.unflatten(0, (self.on.degree, -1)))
        return pieces.permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Layer(nn.Module):
    def __init__(
        self,
        spec: LayerSpec,
        sharding: Sharding,
        on: TensorGroup,
        context: ContextGroup,
        expert_group: Any,
    ) -> None:
        super().__init__()
        self.dropout = sharding.dropout
        self.recompute = sharding.checkpoint == "full"
        self.discards_norms = "layernorm" in sharding.recompute
        has_experts = spec.num_experts is not None
        self.recompute_mlp = ("moe" if has_experts else "mlp") in sharding.recompute
        bias = has_norm_biases(spec)
        h = spec.hidden_size
        self.attention_norm = Norm(h, bias=bias)
        self.attention = _Attention(spec, sharding, on, context=context)
        self.cross_norm = Norm(h, bias=bias) if spec.cross_attention else None
        self.cross_attention = (
            _Attention(spec, sharding, on, context=context, cross=True)
            if spec.cross_attention
            else None
        )
        self.mlp_norm = Norm(h, bias=bias)
        if spec.num_experts is None:
            self.mlp: nn.Module = Mlp(spec, on, width=spec.ffn_hidden_size or 0)
        else:
            self.mlp = Experts(spec, on, sharding, expert_group=expert_group)

    def forward(self, x: Any, context: Any = None) -> Any:
        if self.recompute:
            return recomputed(self._forward, x, context, dropout=self.dropout)
        return self._forward(x, context)

    def _forward(self, x: Any, context: Any) -> Any:
        x = x + self._dropped(self._normed(self.attention_norm, self.attention, x))
        if self.cross_attention is not None and self.cross_norm is not None:
            cross = self.cross_attention
            taken = self._normed(self.cross_norm, lambda normed: cross(normed, context), x)
            x = x + self._dropped(taken)
        if not self.recompute_mlp:
            return x + self._dropped(self._normed(self.mlp_norm, self.mlp, x))
        if not self.discards_norms:
            return x + self._dropped(recomputed(self.mlp, self.mlp_norm(x), dropout=self.dropout))
        # the input of what is recomputed is a norm's output: both are made again together
        both = recomputed(lambda x: self.mlp(self.mlp_norm(x)), x, dropout=self.dropout)
        return x + self._dropped(both)

    def _normed(self, norm: nn.Module, take: Callable[[Any], Any], x: Any) -> Any:
        return discarding(norm, take, x) if self.discards_norms else take(norm(x))

    def _dropped(self, x: Any) -> Any:
        # F.dropout keeps a wider mask on CPUs than on GPUs
        return torch.native_dropout(x, self.dropout, True)[0] if self.dropout else x

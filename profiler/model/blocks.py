"""Transformer layers of a spec, with the shapes of one rank: what is counted and what is timed.

Pre-norm layers: RMSNorm or LayerNorm, self-attention (grouped keys and values, rotary positions),
cross-attention, a gated (SwiGLU) or plain (GELU) MLP or a mixture of them. Activations are
(sequence, batch, hidden), as in Megatron-LM.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.errors import InputError
from autopar.model import LayerSpec
from autopar.specs import head_dim
from profiler.model.attention import attention, open_attention, rotary
from profiler.model.experts import Experts
from profiler.model.norms import layer_norm, rms_norm
from profiler.model.parallel import ColumnParallel, RowParallel, TensorGroup
from profiler.model.sharding import Sharding

__all__ = ["Norm", "build_layer", "has_norm_biases", "layer_inputs", "made_of"]

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
) -> nn.Module:
    """Return one layer of a spec with its shapes on one rank; `module(x, context=None) -> x`.

    `group` is a torch process group of the sharding's degree, an object with the methods of
    `collectives.SoleRank`, or None at degree 1; `expert_group` likewise for its expert degree. A
    decoder layer with cross-attention takes the encoder's output as `context`. Where a group has
    more ranks than key-value heads, ranks share them, and a trainer has to sum their gradients;
    so has it for norms and row biases with sequence parallelism.

    Specs do not say which layers turn heads by their position: causal ones with RMSNorm and
    without cross-attention do (it changes no memory). Raises InputError for what cannot be built.
    """
    if spec.num_heads is None or spec.ffn_hidden_size is None:
        raise InputError("heads and MLP width are unknown; give a model spec (--model)")
    sharding.check(spec)
    on = TensorGroup(degree=sharding.degree, kind=sharding.kind, group=group)
    with made_of(dtype, device):
        return _Layer(spec, sharding, on, expert_group)


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
        self, spec: LayerSpec, sharding: Sharding, on: TensorGroup, *, cross: bool = False
    ) -> None:
        super().__init__()
        self.on, self.cross = on, cross
        self.causal = spec.causal and not cross
        self.dropout = sharding.dropout
        self.core = attention if sharding.flash else open_attention
        self.recompute = sharding.checkpoint == "selective"
        self.width = head_dim(spec)
        heads = spec.num_heads or 1
        kv_heads = spec.num_kv_heads or heads
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
        ulysses = self.on.splits_sequence and not self.on.splits_weights
        length = seq_length // self.on.degree if ulysses else seq_length
        start = length * self.on.rank if ulysses else 0
        places = torch.arange(start, start + length, dtype=torch.float32)
        powers = torch.arange(0, self.width, 2, dtype=torch.float32) / self.width
        angles = torch.outer(places, _ROTARY_BASE**-powers)[:, None, None, :]
        dtype = torch.get_default_dtype()
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(self, x: Any, context: Any = None) -> Any:
        if self.key_value is None:
            flat = self.query(x)
        else:
            flat = (*self.query(x), *self.key_value(context))
        q, k, v = (part.view(*part.shape[:2], -1, self.width) for part in flat)
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
            return self.core(q, k, v, causal=self.causal, dropout=self.dropout)

        if not self.recompute:
            return core(q, k, v)
        return _recomputed(core, q, k, v, dropout=self.dropout)

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


class _Mlp(nn.Module):
    def __init__(self, spec: LayerSpec, on: TensorGroup) -> None:
        super().__init__()
        ffn = (spec.ffn_hidden_size or 0) // on.weight_ranks
        ups = [ffn] * (2 if spec.gated_mlp else 1)
        self.up = ColumnParallel(spec.hidden_size, ups, bias=spec.biases, on=on)
        self.down = RowParallel(ffn, spec.hidden_size, bias=spec.biases, on=on)

    def forward(self, x: Any) -> Any:
        first, *second = self.up(x)
        if second:
            return self.down(nn.functional.silu(first) * second[0])
        return self.down(nn.functional.gelu(first))


class _Layer(nn.Module):
    def __init__(
        self, spec: LayerSpec, sharding: Sharding, on: TensorGroup, expert_group: Any
    ) -> None:
        super().__init__()
        self.dropout = sharding.dropout
        self.recompute = sharding.checkpoint == "full"
        bias = has_norm_biases(spec)
        h = spec.hidden_size
        self.attention_norm = Norm(h, bias=bias)
        self.attention = _Attention(spec, sharding, on)
        self.cross_norm = Norm(h, bias=bias) if spec.cross_attention else None
        self.cross_attention = (
            _Attention(spec, sharding, on, cross=True) if spec.cross_attention else None
        )
        self.mlp_norm = Norm(h, bias=bias)
        if spec.num_experts is None:
            self.mlp: nn.Module = _Mlp(spec, on)
        else:
            self.mlp = Experts(spec, on, degree=sharding.expert_degree, expert_group=expert_group)

    def forward(self, x: Any, context: Any = None) -> Any:
        if self.recompute:
            return _recomputed(self._forward, x, context, dropout=self.dropout)
        return self._forward(x, context)

    def _forward(self, x: Any, context: Any) -> Any:
        x = x + self._dropped(self.attention(self.attention_norm(x)))
        if self.cross_attention is not None and self.cross_norm is not None:
            x = x + self._dropped(self.cross_attention(self.cross_norm(x), context))
        return x + self._dropped(self.mlp(self.mlp_norm(x)))

    def _dropped(self, x: Any) -> Any:
        # F.dropout keeps a wider mask on CPUs than on GPUs
        return torch.native_dropout(x, self.dropout, True)[0] if self.dropout else x


def _recomputed(function: Any, *arguments: Any, dropout: float) -> Any:
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)

"""Attention modules with the shapes of one rank: multi-head and multi-head latent attention.


Supports grouped keys and values, rotary positions, norms of queries and keys, windows and sinks.
The kernels are in `profiler.model.layers.kernels`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.run.model import LayerSpec, head_dim, layer_norms
from profiler.model.layers.context import ContextGroup, context_attention
from profiler.model.layers.kernels import attention, layer_norm, open_attention, rms_norm, rotary
from profiler.model.layers.parallel import ColumnParallel, RowParallel, TensorGroup
from profiler.model.layers.recompute import discarding, recomputed
from profiler.model.layers.sharding import Sharding, held_tokens

_ROTARY_BASE = 10000.0


class Norm(nn.Module):
    """LayerNorm with a bias, RMSNorm without."""

    def __init__(self, width: int, *, bias: bool) -> None:
        """Create a norm over the last dimension, with `width` elements."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, normalised over its last dimension."""
        if self.bias is None:
            return rms_norm(x, self.weight)
        return layer_norm(x, self.weight, self.bias)


def has_norm_biases(spec: LayerSpec) -> bool:
    """Return True if the norms of a layer are LayerNorms, False if they are RMSNorms.


    Raises InputError if the number of norm parameters fits neither.
    """
    norms = layer_norms(spec)
    per_norm = spec.norm_parameters_per_hidden / norms
    if per_norm not in (1, 2):
        raise InputError(
            f"norm_parameters_per_hidden {spec.norm_parameters_per_hidden} fits "
            f"neither {norms} RMSNorms ({norms}) nor {norms} LayerNorms "
            f"({2 * norms})",
            remedy=("Measure the model as a custom module (--model py:package.module:factory)"),
        )
    return per_norm == 2


class _Core(nn.Module):
    """Core attention of one rank, without projections; base class of both kinds of attention."""

    def __init__(
        self, spec: LayerSpec, sharding: Sharding, on: TensorGroup, *, context: ContextGroup
    ) -> None:
        super().__init__()
        self.on, self.context = on, context
        self.causal = spec.causal
        self.window = spec.window or 0
        self.dropout = sharding.dropout
        self.core = attention if sharding.flash else open_attention
        self.recompute = sharding.checkpoint == "selective" or "core_attn" in sharding.recompute
        # sinks of this rank's heads; with Ulysses, of all heads, and `attended` selects this rank's
        own = (spec.num_heads or 1) // on.weight_ranks
        self.sinks = nn.Parameter(torch.zeros(own)) if spec.attention_sinks else None

    def heads(self, q: Any, k: Any, v: Any) -> Any:
        """Return core attention of q, k and v, (tokens, batch, heads * width).

        The exchange of Ulysses before and after it is included.
        """
        return self.attended(*self.exchanged(q, k, v), recompute=self.recompute)

    def exchanged(self, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
        """Return q, k and v of the heads that this rank computes, for all tokens of its group.

        With Ulysses this is an all-to-all; otherwise the tensors are unchanged.
        """
        if self.on.splits_weights or self.on.degree == 1:
            return q, k, v
        return self._to_heads(q), self._to_heads(k), self._to_heads(v)

    def attended(self, q: Any, k: Any, v: Any, *, recompute: bool) -> Any:
        """Return the output of `heads` from the result of `exchanged`.

        recompute : True to recompute core attention in the backward.
        """
        if self.on.splits_weights or self.on.degree == 1:
            out = self._scores(q, k, v, self.sinks, recompute=recompute)
        else:
            # each Ulysses rank uses the sinks of the heads that it computes
            sinks = None if self.sinks is None else self.sinks.chunk(self.on.degree)[self.on.rank]
            out = self._to_sequence(self._scores(q, k, v, sinks, recompute=recompute))
        return out.reshape(*out.shape[:2], -1)

    def _scores(self, q: Any, k: Any, v: Any, sinks: Any, *, recompute: bool) -> Any:
        def core(q: Any, k: Any, v: Any, sinks: Any) -> Any:
            if self.context.degree > 1:
                # sinks and windows are refused with context parallelism
                return context_attention(q, k, v, on=self.context, causal=self.causal)
            return self.core(
                q,
                k,
                v,
                causal=self.causal,
                dropout=self.dropout,
                sinks=sinks,
                window=self.window,
            )

        if not recompute:
            return core(q, k, v, sinks)
        return recomputed(core, q, k, v, sinks, dropout=self.dropout)

    def _to_heads(self, x: Any) -> Any:
        """Return all tokens of this rank's heads, from this rank's tokens of all heads."""
        t = self.on.degree
        if x.shape[2] < t:  # more ranks than heads: several ranks receive the same head
            x = x.repeat_interleave(t // x.shape[2], dim=2)
        pieces = x.unflatten(2, (t, -1)).permute(2, 0, 1, 3, 4)
        return self.on.exchange(pieces).flatten(0, 1)

    def _to_sequence(self, x: Any) -> Any:
        """Return this rank's tokens of all heads, from all tokens of this rank's heads."""
        pieces = self.on.exchange(x.unflatten(0, (self.on.degree, -1)))
        return pieces.permute(1, 2, 0, 3, 4).flatten(2, 3)


def _rotary_tables(
    on: TensorGroup, context: ContextGroup, seq_length: int, width: int
) -> tuple[Any, Any]:
    """Return rotary tables (cos, sin) of this rank's positions, (tokens, 1, 1, width / 2)."""
    # Ulysses rotates heads before the exchange, when a rank holds only its own tokens
    ulysses = on.splits_sequence and not on.splits_weights
    held = held_tokens(
        seq_length,
        context=(context.degree, context.rank),
        shard=(on.degree, on.rank) if ulysses else (1, 0),
    )
    # bf16 cannot represent all integers above 256
    places = torch.cat([torch.arange(*ends, dtype=torch.float32) for ends in held])
    powers = torch.arange(0, width, 2, dtype=torch.float32) / width
    # frequencies of rotary positions: base^(-2i / width)
    angles = torch.outer(places, _ROTARY_BASE**-powers)[:, None, None, :]
    dtype = torch.get_default_dtype()
    return angles.cos().to(dtype), angles.sin().to(dtype)


class Attention(_Core):
    """Multi-head or grouped-query attention, as self-attention or cross-attention."""

    def __init__(
        self,
        spec: LayerSpec,
        sharding: Sharding,
        on: TensorGroup,
        *,
        context: ContextGroup,
        cross: bool = False,
    ) -> None:
        """Create the shard of one rank; raise InputError for an unsupported sharding.

        cross : True for cross-attention, whose keys and values come from the encoder's output.
        """
        super().__init__(spec, sharding, on, context=context)
        self.cross = cross
        self.causal = spec.causal and not cross
        self.width = head_dim(spec)
        heads = spec.num_heads or 1
        kv_heads = spec.num_kv_heads or heads
        # with more ranks than key-value heads, ranks share them
        own, own_kv = heads // on.weight_ranks, max(1, kv_heads // on.weight_ranks)
        query, pair = own * self.width, [own_kv * self.width] * 2
        bias = spec.biases or spec.qkv_biases
        h = spec.hidden_size
        self.query = ColumnParallel(h, [query] if cross else [query, *pair], bias=bias, on=on)
        self.key_value = ColumnParallel(h, pair, bias=bias, on=on) if cross else None
        self.out = RowParallel(query, h, bias=spec.biases, on=on)
        self.query_norm, self.key_norm = self._norms(spec, query, pair[0])
        if self.causal and not spec.cross_attention and not has_norm_biases(spec):
            tables = _rotary_tables(on, context, spec.seq_length, self.width)
        else:
            tables = None
        self.register_buffer("cos", tables[0] if tables else None, persistent=False)
        self.register_buffer("sin", tables[1] if tables else None, persistent=False)

    def _norms(self, spec: LayerSpec, query: int, key: int) -> tuple[Norm | None, Norm | None]:
        """Return the norms of queries and keys (or None): per head, or over all heads."""
        if not spec.qk_norms:
            return None, None
        if not spec.wide_qk_norms:
            return Norm(self.width, bias=False), Norm(self.width, bias=False)
        if self.on.splits_weights:
            raise InputError(
                "a norm of all queries needs all heads, but tensor parallelism divides them",
                remedy="Use tensor degree 1",
            )
        return Norm(query, bias=False), Norm(key, bias=False)

    def _normed(self, flat: Any, norm: Norm | None) -> Any:
        """Return projected queries or keys, split into heads and normalised by `norm` (or not)."""
        if norm is not None and norm.weight.numel() != self.width:
            flat = norm(flat)
        heads = flat.view(*flat.shape[:2], -1, self.width)
        return norm(heads) if norm is not None and norm.weight.numel() == self.width else heads

    def forward(self, x: Any, context: Any = None) -> Any:
        if self.key_value is None:
            flat = self.query(x)
        else:
            flat = (*self.query(x), *self.key_value(context))
        q, k = self._normed(flat[0], self.query_norm), self._normed(flat[1], self.key_norm)
        v = flat[2].view(*flat[2].shape[:2], -1, self.width)
        # otherwise the heads before rotation would be kept until the end
        del flat
        if self.cos is not None:
            q, k = rotary(q, self.cos, self.sin), rotary(k, self.cos, self.sin)
        return self.out(self.heads(q, k, v))


class LatentAttention(_Core):
    """Multi-head latent attention (arXiv 2405.04434, section 2.1), sharded as in Megatron-LM.

    Down projections and their norms are replicated on every tensor-parallel rank; up projections
    are sharded by heads. With sequence parallelism, each rank computes the down projections of its
    tokens, and the rotary key, which all heads share, is gathered. Keys and values are expanded to
    all heads of the rank.
    """

    def __init__(
        self, spec: LayerSpec, sharding: Sharding, on: TensorGroup, *, context: ContextGroup
    ) -> None:
        """Create the shard of one rank."""
        super().__init__(spec, sharding, on, context=context)
        latent = spec.latent
        assert latent is not None, "a layer with latent attention"
        self.latent = latent
        self.recompute_up = "mla_up_proj" in sharding.recompute
        h, own = spec.hidden_size, (spec.num_heads or 1) // on.weight_ranks
        query = own * (latent.key_width + latent.rotary_width)
        rank, narrow = latent.query_rank, latent.key_value_rank
        whole = TensorGroup(degree=1, kind=on.kind)
        self.query_down = None if rank is None else ColumnParallel(h, [rank], bias=False, on=whole)
        self.query_latent_norm = (
            Norm(rank, bias=False) if rank is not None and spec.qk_norms else None
        )
        self.query = ColumnParallel(rank or h, [query], bias=False, on=on)
        self.down = ColumnParallel(h, [narrow + latent.rotary_width], bias=False, on=whole)
        self.latent_norm = Norm(narrow, bias=False) if spec.qk_norms else None
        pair = [own * latent.key_width, own * latent.value_width]
        self.key_value = ColumnParallel(narrow, pair, bias=False, on=on)
        self.out = RowParallel(own * latent.value_width, h, bias=False, on=on)
        cos, sin = _rotary_tables(on, context, spec.seq_length, latent.rotary_width)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Any, context: Any = None) -> Any:
        """Return the self-attention of x."""
        latent = self.latent
        if self.query_down is None:
            query = x
        else:
            (query,) = self.query_down(x)
            query = query if self.query_latent_norm is None else self.query_latent_norm(query)
        (narrow,) = self.down(x)
        narrow, turning = narrow.split([latent.key_value_rank, latent.rotary_width], -1)
        narrow = narrow if self.latent_norm is None else self.latent_norm(narrow)
        if not self.recompute_up:
            q, k, v = self._expanded(query, narrow, turning)
            del query, narrow, turning
            return self.out(self.heads(q, k, v))
        if self.recompute:
            # recomputed attention would keep its queries, keys and values: recompute both together
            found = recomputed(self._attended_again, query, narrow, turning, dropout=self.dropout)
        else:
            attended = partial(self.attended, recompute=False)
            found = discarding(self._all_heads, attended, query, narrow, turning)
        return self.out(found)

    def _attended_again(self, *latents: Any) -> Any:
        return self.attended(*self._all_heads(*latents), recompute=False)

    def _all_heads(self, *latents: Any) -> tuple[Any, Any, Any]:
        return self.exchanged(*self._expanded(*latents))

    def _expanded(self, query: Any, narrow: Any, turning: Any) -> tuple[Any, Any, Any]:
        """Return queries, keys and values of this rank's heads, expanded from the latents.

        query : latent of the queries, or the layer's input without query compression.
        narrow : latent of keys and values.
        turning : rotary key before rotation.
        """
        latent = self.latent
        (flat,) = self.query(query)
        keys, values = self.key_value(narrow)
        q = flat.view(*flat.shape[:2], -1, latent.key_width + latent.rotary_width)
        still, turned = q.split([latent.key_width, latent.rotary_width], -1)
        q = torch.cat([still, rotary(turned.contiguous(), self.cos, self.sin)], -1)
        del flat, still, turned
        # one rotary key for all heads; with sharded heads, gathered for all tokens
        shared = self.on.enter(turning) if self.on.splits_weights else turning
        shared = rotary(shared.unsqueeze(2).contiguous(), self.cos, self.sin)
        keys = keys.view(*keys.shape[:2], -1, latent.key_width)
        k = torch.cat([keys, shared.expand(*keys.shape[:3], -1)], -1)
        return q, k, values.view(*values.shape[:2], -1, latent.value_width)

"""Transformer layers of a spec, with the shapes of one rank: what is counted and what is timed.

RMSNorm or LayerNorm, attention (`profiler.model.layers.attention`), cross-attention, a gated
(SwiGLU) or plain (GELU) MLP or a mixture of them. Activations are (sequence, batch, hidden), as in
Megatron-LM.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.model import LayerSpec, layer_norms
from profiler.model.layers.attention import (
    Attention,
    LatentAttention,
    Norm,
    has_norm_biases,
    recomputed,
)
from profiler.model.layers.parallel import ColumnParallel, RowParallel, TensorGroup
from profiler.model.layers.sharding import Sharding

__all__ = ["Experts", "build_layer", "layer_inputs", "made_of"]


# --------------------------------------------------------------------------------------------------
# A mixture-of-experts MLP with the shapes of one rank and evenly spread tokens.


class _Combine(torch.autograd.Function):
    """Sums the rows of each token; keeps their tokens, and not the rows as torch's own does."""

    @staticmethod
    def forward(ctx: Any, rows: Any, token: Any, count: int) -> Any:
        ctx.save_for_backward(token)
        return rows.new_zeros(count, rows.shape[-1]).index_add_(0, token, rows)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.index_select(0, *ctx.saved_tensors), None, None


class Experts(nn.Module):
    """A router and the experts of one rank, between which tokens are spread evenly.

    The router computes its choice and its weights, but the n-th visit of all tokens, sample after
    sample, goes to the n-th expert in turn: time and memory of balanced routing, on every run the
    same, and on any number of ranks where a rank's tokens of a sample come out even. Tokens go to
    the ranks of their experts, are gathered over the tensor group there, and come back in the
    reverse order, as in Megatron-LM's all-to-all dispatcher.
    """

    def __init__(
        self, spec: LayerSpec, on: TensorGroup, *, degree: int, expert_group: Any = None
    ) -> None:
        """Make the experts of one rank; raises InputError where they cannot be spread so."""
        super().__init__()
        count, visited = spec.num_experts or 1, spec.experts_per_token or 1
        if degree < 1 or count % degree:
            raise InputError(
                f"expert degree {degree} does not divide the {count} experts; choose a degree that "
                "does"
            )
        self.on = on
        # of this group only the exchange is used, which is the same for every kind
        self.across = TensorGroup(degree=degree, kind="ulysses", group=expert_group)
        self.count, self.visited = count, visited
        h, ffn = spec.hidden_size, (spec.ffn_hidden_size or 1) // on.weight_ranks
        own = count // degree
        self.router = nn.Parameter(torch.empty(count, h).normal_(std=0.02))
        self.router_bias = nn.Parameter(torch.zeros(count)) if spec.router_biases else None
        self.gated = spec.gated_mlp
        self.ups = nn.ParameterList(
            nn.Parameter(torch.empty(own, h, ffn).normal_(std=0.02))
            for _ in range(2 if spec.gated_mlp else 1)
        )
        self.down = nn.Parameter(torch.empty(own, ffn, h).normal_(std=0.02))
        biases = [ffn] * len(self.ups) + [h] if spec.biases else []
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(own, 1, n)) for n in biases)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs of the experts that each token visits."""
        tokens = x.flatten(0, 1)
        visits = tokens.shape[0] * self.visited
        scores = nn.functional.linear(tokens, self.router, self.router_bias)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores, _ = scores.topk(self.visited)
        weights = torch.softmax(scores, dim=-1).to(x.dtype).flatten()
        # expert by expert; where they do not come out even, some places stay empty
        places = math.ceil(visits / self.count)
        order = torch.arange(places * self.count, device=x.device).view(places, self.count)
        order = order.t().flatten()
        length, batch = x.shape[:2]
        # places that stay empty take the last token; their weight is 0 below
        token = (order // self.visited).clamp(max=length * batch - 1)
        # visits are counted sample after sample, rows lie (sequence, batch)
        token = token % length * batch + token // length
        sent = tokens.index_select(0, token)
        returned = self._away_and_back(sent.view(self.count, places, -1))
        weights = weights.index_select(0, token * self.visited + order % self.visited)
        if visits % self.count:
            weights = weights * (order < visits)
        weighted = returned.flatten(0, 1) * weights[:, None]
        return _Combine.apply(weighted, token, tokens.shape[0]).view_as(x)

    def _away_and_back(self, x: Any) -> Any:
        """Return the experts' outputs for their tokens, (experts, tokens of each, hidden)."""
        e, t = self.across.degree, self._ranks
        own, places = self.count // e, x.shape[1]
        x = self.across.exchange(x.view(e, own, places, -1))
        x = self.on.enter(x)  # (t * e, own, places, hidden)
        # (own, t * e * places, hidden): a batch of the product for each expert
        x = x.transpose(0, 1).flatten(1, 2)
        inner = self._product(x, 0)
        if self.gated:
            inner = nn.functional.silu(inner) * self._product(x, 1)
        else:
            inner = nn.functional.gelu(inner)
        x = torch.bmm(inner, self.down)
        x = x.unflatten(1, (t * e, places)).transpose(0, 1)
        x = self.on.leave(x)
        if self.biases:
            # once, not once per rank whose sums are added up
            x = x + self.biases[len(self.ups)]
        return self.across.exchange(x).view(self.count, places, -1)

    def _product(self, x: Any, place: int) -> Any:
        """Return each expert's product in front of its activation, with its bias if it has one."""
        if not self.biases:
            return torch.bmm(x, self.ups[place])
        return torch.baddbmm(self.biases[place], x, self.ups[place])

    @property
    def _ranks(self) -> int:
        """Ranks of the tensor group whose tokens come together here."""
        # without sequence parallelism every rank has all tokens before
        return self.on.degree if self.on.splits_weights and self.on.splits_sequence else 1


# --------------------------------------------------------------------------------------------------
# A layer of a spec, put together on one rank.


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
    if spec.whole_every:
        # what a window changes is time alone, which is that of one kind of layers
        spec = replace(spec, whole_every=0)
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


class _Mlp(nn.Module):
    def __init__(self, spec: LayerSpec, on: TensorGroup, *, width: int | None = None) -> None:
        super().__init__()
        ffn = (width or spec.ffn_hidden_size or 0) // on.weight_ranks
        ups = [ffn] * (2 if spec.gated_mlp else 1)
        self.up = ColumnParallel(spec.hidden_size, ups, bias=spec.biases, on=on)
        self.down = RowParallel(ffn, spec.hidden_size, bias=spec.biases, on=on)

    def forward(self, x: Any) -> Any:
        first, *second = self.up(x)
        if second:
            return self.down(nn.functional.silu(first) * second[0])
        return self.down(nn.functional.gelu(first))


class _WithShared(nn.Module):
    """Experts, and an MLP that every token visits, which may have a gate."""

    def __init__(self, spec: LayerSpec, experts: Experts, on: TensorGroup) -> None:
        super().__init__()
        self.experts = experts
        self.shared = _Mlp(spec, on, width=spec.shared_expert_width)
        gate = torch.empty(1, spec.hidden_size).normal_(std=0.02)
        self.gate = nn.Parameter(gate) if spec.shared_expert_gate else None

    def forward(self, x: Any) -> Any:
        shared = self.shared(x)
        if self.gate is not None:
            shared = shared * torch.sigmoid(nn.functional.linear(x, self.gate))
        return self.experts(x) + shared


class _Layer(nn.Module):
    def __init__(
        self, spec: LayerSpec, sharding: Sharding, on: TensorGroup, expert_group: Any
    ) -> None:
        super().__init__()
        self.dropout = sharding.dropout
        self.recompute = sharding.checkpoint == "full"
        bias = has_norm_biases(spec)
        h = spec.hidden_size
        number = layer_norms(spec)
        if number not in ((3,) if spec.cross_attention else (1, 2, 4)):
            raise InputError(
                f"layers of {number} norms are not built here; measure the model as a module of "
                "your own (--model py:package.module:factory)"
            )
        self.attention_norm = Norm(h, bias=bias)
        self.attention: nn.Module = (
            Attention(spec, sharding, on)
            if spec.latent is None
            else LatentAttention(spec, sharding, on)
        )
        self.cross_norm = Norm(h, bias=bias) if spec.cross_attention else None
        self.cross_attention = (
            Attention(spec, sharding, on, cross=True) if spec.cross_attention else None
        )
        self.mlp_norm = Norm(h, bias=bias) if number > 1 else None
        if spec.num_experts is None:
            self.mlp: nn.Module = _Mlp(spec, on)
        else:
            experts = Experts(spec, on, degree=sharding.expert_degree, expert_group=expert_group)
            self.mlp = _WithShared(spec, experts, on) if spec.shared_expert_width else experts
        # of what attention and MLP put out
        self.attention_behind = Norm(h, bias=bias) if number == 4 else None
        self.mlp_behind = Norm(h, bias=bias) if number == 4 else None

    def forward(self, x: Any, context: Any = None) -> Any:
        if self.recompute:
            return recomputed(self._forward, x, context, dropout=self.dropout)
        return self._forward(x, context)

    def _forward(self, x: Any, context: Any) -> Any:
        if self.mlp_norm is None:
            # attention and MLP stand side by side
            normed = self.attention_norm(x)
            return x + self._dropped(self.attention(normed)) + self._dropped(self.mlp(normed))
        attended = _behind(self.attention(self.attention_norm(x)), self.attention_behind)
        x = x + self._dropped(attended)
        del attended
        if self.cross_attention is not None and self.cross_norm is not None:
            x = x + self._dropped(self.cross_attention(self.cross_norm(x), context))
        return x + self._dropped(_behind(self.mlp(self.mlp_norm(x)), self.mlp_behind))

    def _dropped(self, x: Any) -> Any:
        # F.dropout keeps a wider mask on CPUs than on GPUs
        return torch.native_dropout(x, self.dropout, True)[0] if self.dropout else x


def _behind(x: Any, norm: Norm | None) -> Any:
    return x if norm is None else norm(x)

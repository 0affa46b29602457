"""MLPs and mixtures of experts (router, dispatch, experts, combine) with the shapes of one rank.

Experts are sharded over a tensor-parallel group (every rank has a shard of each expert),
distributed over an expert-parallel group (every rank has some complete experts), or both. No token
is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.errors import InputError
from autopar.run.model import LayerSpec
from profiler.model.layers.parallel import (
    ColumnParallel,
    RowParallel,
    TensorGroup,
    all_gather,
)
from profiler.model.layers.recompute import discarding, recomputed
from profiler.model.layers.sharding import Sharding

EXPERT_WEIGHTS = "experts"
"""Attribute of `Experts` that holds the expert weights, as in parameter names."""


class Mlp(nn.Module):
    """Gated (SwiGLU) or plain (GELU) MLP, sharded over a tensor-parallel group."""

    def __init__(self, spec: LayerSpec, on: TensorGroup, *, width: int) -> None:
        """Create the shard of one rank; `width` is the hidden width of the whole MLP."""
        super().__init__()
        ffn = width // on.weight_ranks
        ups = [ffn] * (2 if spec.gated_mlp else 1)
        self.up = ColumnParallel(spec.hidden_size, ups, bias=spec.biases, on=on)
        self.down = RowParallel(ffn, spec.hidden_size, bias=spec.biases, on=on)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the MLP for every token."""
        first, *second = self.up(x)
        functions = nn.functional
        out: torch.Tensor = self.down(
            functions.silu(first) * second[0] if second else functions.gelu(first)
        )
        return out


class _SharedExperts(nn.Module):
    """Shared experts of an MoE layer: one MLP for all tokens, optionally with a sigmoid gate."""

    def __init__(self, spec: LayerSpec, on: TensorGroup) -> None:
        super().__init__()
        self.mlp = Mlp(spec, on, width=spec.shared_expert_width)
        h = spec.hidden_size
        gate = torch.empty(h).normal_(std=0.02) if spec.shared_expert_gate else None
        self.gate = None if gate is None else nn.Parameter(gate)

    def forward(self, x: Any) -> Any:
        out = self.mlp(x)
        return out if self.gate is None else out * torch.sigmoid(x @ self.gate)[..., None]


class Experts(nn.Module):
    """Router and experts of one rank.

    With even routing, the router computes scores and weights, but assignments go to the experts in
    round-robin order, sample by sample. Time and memory are those of balanced routing. The output
    is equal in every run. It is also equal for every number of ranks if the number of assignments
    per sample and rank is divisible by the number of experts.

    With top-k routing, every token goes to the experts with its highest scores, without a capacity
    limit.

    As in Megatron-LM's all-to-all dispatcher, tokens are sent to the ranks of their experts and
    gathered over the tensor-parallel group that shards the experts; the combine reverses both.
    """

    def __init__(
        self, spec: LayerSpec, on: TensorGroup, sharding: Sharding, *, expert_group: Any = None
    ) -> None:
        """Create the experts of one rank; raise InputError for an unsupported sharding."""
        super().__init__()
        count, visited = spec.num_experts or 1, spec.experts_per_token or 1
        degree = sharding.expert_degree
        if degree < 1 or count % degree:
            raise InputError(
                f"expert degree {degree} does not divide the {count} experts",
                remedy="Use a divisor",
            )
        # complete experts do not use the tensor-parallel group; its ranks process different tokens
        self.on = TensorGroup(degree=1, kind=on.kind) if sharding.whole_experts else on
        # only the all-to-all of this group is used, which is equal for every kind
        self.across = TensorGroup(degree=degree, kind="ulysses", group=expert_group)
        if sharding.routing == "top_k" and degree > 1 and self.on.splits_weights:
            raise InputError(
                "routed tokens cannot be gathered over a tensor group within an expert group",
                remedy="Use whole experts, or even routing",
            )
        self.count, self.visited, self.routing = count, visited, sharding.routing
        h = spec.hidden_size
        self.router = nn.Parameter(torch.empty(count, h).normal_(std=0.02))
        self.router_bias = nn.Parameter(torch.zeros(count)) if spec.router_biases else None
        # always sharded over the tensor-parallel group, even if the other experts are not
        self.shared = _SharedExperts(spec, on) if spec.shared_expert_width else None
        self.recompute_shared = "shared_experts" in sharding.recompute
        ffn = (spec.ffn_hidden_size or 1) // self.on.weight_ranks
        self.experts = _ExpertWeights(
            count // degree,
            h,
            ffn,
            gated=spec.gated_mlp,
            discards="moe_act" in sharding.recompute,
            biases=spec.biases,
            adds_last=not self.on.splits_weights,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of expert outputs per token, plus that of the shared experts."""
        if self.shared is None:
            return self._visited(x)
        # first, as in Megatron-Core: its gradient is then computed last
        shared = recomputed(self.shared, x) if self.recompute_shared else self.shared(x)
        return self._visited(x) + shared

    def _visited(self, x: torch.Tensor) -> Any:
        tokens = x.flatten(0, 1)
        scores = tokens @ self.router.t()
        if self.router_bias is not None:
            scores = scores + self.router_bias
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores, chosen = scores.topk(self.visited)
        weights = torch.softmax(scores, dim=-1).to(x.dtype)
        if self.routing == "top_k":
            return self._routed(tokens, chosen, weights).view_as(x)
        return self._even(x, tokens, weights.flatten())

    # --- even routing --------------------------------------------------------------------

    def _even(self, x: Any, tokens: Any, weights: Any) -> Any:
        visits = tokens.shape[0] * self.visited
        # expert by expert; if the assignments do not divide evenly, some places stay empty
        places = math.ceil(visits / self.count)
        order = torch.arange(places * self.count, device=x.device).view(places, self.count)
        order = order.t().flatten()
        length, batch = x.shape[:2]
        # empty places process the last token; their weight is 0 below
        token = (order // self.visited).clamp(max=length * batch - 1)
        # assignments are numbered sample by sample, rows are ordered (sequence, batch)
        token = token % length * batch + token // length
        sent = tokens.index_select(0, token)
        returned = self._away_and_back(sent.view(self.count, places, -1))
        weights = weights.index_select(0, token * self.visited + order % self.visited)
        if visits % self.count:
            weights = weights * (order < visits)
        weighted = returned.flatten(0, 1) * weights[:, None]
        return _Combine.apply(weighted, token, tokens.shape[0]).view_as(x)

    def _away_and_back(self, x: Any) -> Any:
        """Dispatch x, (experts, tokens per expert, hidden), and return the experts' outputs."""
        e, t = self.across.degree, self._ranks
        own, places = self.count // e, x.shape[1]
        x = self.across.exchange(x.view(e, own, places, -1))
        x = self.on.enter(x)  # (t * e, own, places, hidden)
        # (own, t * e * places, hidden): one batch of the GEMM per expert
        x = x.transpose(0, 1).flatten(1, 2)
        x = self.experts(x)
        x = x.unflatten(1, (t * e, places)).transpose(0, 1)
        x = self.on.leave(x)
        if self.experts.last_bias is not None and self.on.splits_weights:
            # added once, not on every rank, since the outputs are summed over ranks
            x = x + self.experts.last_bias
        return self.across.exchange(x).view(self.count, places, -1)

    @property
    def _ranks(self) -> int:
        """Number of tensor-parallel ranks whose tokens are gathered on this rank."""
        # without sequence parallelism every rank already has all tokens
        return self.on.degree if self.on.splits_weights and self.on.splits_sequence else 1

    # --- routing by the router -----------------------------------------------------------

    def _routed(self, tokens: Any, chosen: Any, weights: Any) -> Any:
        """Return the weighted sum over the chosen experts, (tokens, hidden).

        chosen, weights : expert numbers and router weights, (tokens, experts per token).
        """
        on = self.on
        biases: Any = 0.0
        if self.experts.last_bias is not None and on.splits_weights:
            # added once, by the rank of the token, since outputs are summed over the ranks
            shares = weights.new_zeros(len(tokens), self.count).scatter(1, chosen, weights)
            biases = shares @ self.experts.last_bias.squeeze(1)
        # this rank has a shard of every expert, and needs the tokens of the whole group
        tokens, weights = on.enter(tokens), on.enter(weights)
        if on.splits_weights and on.splits_sequence:
            chosen = all_gather(chosen, on.group)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        token = order // self.visited
        counts = torch.bincount(flat, minlength=self.count)
        rows = tokens.index_select(0, token)
        if self.across.degree > 1:
            rows = self._dispatched(rows, counts)
        else:
            rows = self.experts(rows, counts.tolist())
        weighted = rows * weights.flatten().index_select(0, order)[:, None]
        return on.leave(_Combine.apply(weighted, token, tokens.shape[0])) + biases

    def _dispatched(self, rows: Any, counts: Any) -> Any:
        """Return the expert outputs of all rows, computed on the ranks of their experts.

        rows : hidden states sorted by expert.
        counts : number of rows per expert.
        """
        e, group = self.across.degree, self.across.group
        own = self.count // e
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        by_rank = arriving.view(e, own)
        sent, received = counts.view(e, own).sum(1).tolist(), by_rank.sum(1).tolist()
        rows = _ExchangeRows.apply(rows, received, sent, group)
        # received rows are sorted by source rank, and by expert within each
        expert = torch.arange(own, device=rows.device).repeat(e)
        order = expert.repeat_interleave(by_rank.flatten()).argsort(stable=True)
        out = self.experts(rows.index_select(0, order), by_rank.sum(0).tolist())
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return _ExchangeRows.apply(out.index_select(0, back), sent, received, group)


class _ExpertWeights(nn.Module):
    """Weights and computation of the experts of one rank."""

    def __init__(
        self,
        count: int,
        hidden: int,
        ffn: int,
        *,
        gated: bool,
        discards: bool,
        biases: bool,
        adds_last: bool,
    ) -> None:
        """Create `count` experts with this rank's MLP width `ffn`.

        discards : True to recompute the activation function in the backward.
        adds_last : True if `forward` adds the bias of the down projection.
        """
        super().__init__()
        self.gated, self.discards, self.adds_last = gated, discards, adds_last
        self.ups = nn.ParameterList(
            nn.Parameter(torch.empty(count, hidden, ffn).normal_(std=0.02))
            for _ in range(2 if gated else 1)
        )
        self.down = nn.Parameter(torch.empty(count, ffn, hidden).normal_(std=0.02))
        widths = [ffn] * len(self.ups) + [hidden] if biases else []
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(count, 1, n)) for n in widths)

    @property
    def last_bias(self) -> Any:
        """Bias of the down projection, (experts, 1, hidden); None without biases."""
        return self.biases[-1] if self.biases else None

    def forward(self, x: Any, counts: list[int] | None = None) -> Any:
        """Return the outputs of the experts, in the shape of x.

        x : (experts, tokens, hidden), or (rows, hidden) with the rows sorted by expert.
        counts : rows per expert; None for the first shape.
        """
        biases = list(self.biases) or [None] * (len(self.ups) + 1)
        ups = [_product(x, *pair, counts) for pair in zip(self.ups, biases[:-1], strict=True)]
        last = biases[-1] if self.adds_last else None
        return self._down(lambda inner: _product(inner, self.down, last, counts), ups)

    def _down(self, down: Callable[[Any], Any], ups: list[Any]) -> Any:
        return discarding(self._inner, down, *ups) if self.discards else down(self._inner(*ups))

    def _inner(self, first: Any, *second: Any) -> Any:
        if self.gated:
            return nn.functional.silu(first) * second[0]
        return nn.functional.gelu(first)


def _product(x: Any, weight: Any, bias: Any, counts: list[int] | None) -> Any:
    """Return x @ weight + bias per expert; shapes as in `_ExpertWeights.forward`."""
    if counts is None:
        return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias, x, weight)
    pairs = zip(x.split(counts), weight.unbind(), strict=True)
    if bias is None:
        return torch.cat([piece @ matrix for piece, matrix in pairs])
    sums = zip(bias.unbind(), pairs, strict=True)
    return torch.cat([torch.addmm(row, piece, matrix) for row, (piece, matrix) in sums])


class _ExchangeRows(torch.autograd.Function):
    """All-to-all of rows over a group, with a different number of rows for each pair of ranks."""

    @staticmethod
    def forward(ctx: Any, x: Any, received: list[int], sent: list[int], group: Any) -> Any:
        ctx.sizes = received, sent, group
        out = x.new_empty(sum(received), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        received, sent, group = ctx.sizes
        # backward sends the received rows back
        out = g.new_empty(sum(sent), g.shape[1])
        dist.all_to_all_single(out, g.contiguous(), sent, received, group=group)
        return out, None, None, None


class _Combine(torch.autograd.Function):
    """Sum of the rows of each token; saves only token indices, where torch also saves the rows."""

    @staticmethod
    def forward(ctx: Any, rows: Any, token: Any, count: int) -> Any:
        ctx.save_for_backward(token)
        return rows.new_zeros(count, rows.shape[-1]).index_add_(0, token, rows)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.index_select(0, *ctx.saved_tensors), None, None

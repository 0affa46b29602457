"""A mixture-of-experts MLP with the shapes of one rank and evenly spread tokens."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.model import LayerSpec
from profiler.model.parallel import TensorGroup

__all__ = ["Experts"]


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
    reverse order, as in Megatron-LM's all-to-all dispatcher. Experts have no biases.
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
        self.across = TensorGroup(degree=degree, kind="ulysses", group=expert_group)
        self.count, self.visited = count, visited
        h, ffn = spec.hidden_size, (spec.ffn_hidden_size or 1) // on.weight_ranks
        own = count // degree
        self.router = nn.Parameter(torch.empty(count, h).normal_(std=0.02))
        self.gated = spec.gated_mlp
        self.ups = nn.ParameterList(
            nn.Parameter(torch.empty(own, h, ffn).normal_(std=0.02))
            for _ in range(2 if spec.gated_mlp else 1)
        )
        self.down = nn.Parameter(torch.empty(own, ffn, h).normal_(std=0.02))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weighted outputs of the experts that each token visits."""
        tokens = x.flatten(0, 1)
        visits = tokens.shape[0] * self.visited
        scores = tokens @ self.router.t()
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        scores, _ = scores.topk(self.visited)
        weights = torch.softmax(scores, dim=-1).to(x.dtype).flatten()
        # expert by expert; where they do not come out even, some places stay empty
        places = math.ceil(visits / self.count)
        order = torch.arange(places * self.count, device=x.device).view(places, self.count)
        order = order.t().flatten()
        length, batch = x.shape[:2]
        token = (order // self.visited).clamp(max=length * batch - 1)
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
        x = x.transpose(0, 1).flatten(1, 2)
        inner = torch.bmm(x, self.ups[0])
        if self.gated:
            inner = nn.functional.silu(inner) * torch.bmm(x, self.ups[1])
        else:
            inner = nn.functional.gelu(inner)
        x = torch.bmm(inner, self.down)
        x = x.unflatten(1, (t * e, places)).transpose(0, 1)
        return self.across.exchange(self.on.leave(x)).view(self.count, places, -1)

    @property
    def _ranks(self) -> int:
        """Ranks of the tensor group whose tokens come together here."""
        return self.on.degree if self.on.splits_weights and self.on.splits_sequence else 1

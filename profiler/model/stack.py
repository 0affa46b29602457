"""A whole model of a spec with few layers, on one device: embedding, layers, head and loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.model import ModelSpec
from profiler.model.blocks import build_layer
from profiler.model.modules import Built
from profiler.model.outer import build_outer, outer_inputs
from profiler.model.sharding import Sharding

__all__ = ["build_stack"]


def build_stack(spec: ModelSpec, *, dtype: torch.dtype, device: torch.device | str) -> Built:
    """Return the model of a spec, with as many layers and tokens as the spec says.

    `make_batch` gives tokens and labels as (sequence, batch), for an encoder-decoder the
    encoder's tokens after them, at the lengths of the spec. Raises InputError for what cannot be
    built.
    """
    whole = Sharding()
    first = build_outer(spec, "first", dtype=dtype, device=device)
    layers = [
        [build_layer(layer, whole, dtype=dtype, device=device) for _ in range(layer.num_layers)]
        for layer in spec.layers
    ]
    last = build_outer(spec, "last", dtype=dtype, device=device)
    if spec.tied_embeddings:
        last.head.weights[0] = first.table

    def make_batch(batch: int, seq_length: int) -> Any:
        if seq_length != spec.layers[-1].seq_length:
            raise InputError(
                f"model {spec.name!r} was built for {spec.layers[-1].seq_length} tokens and is "
                f"called with {seq_length}; build it for them"
            )
        return outer_inputs(spec, "only", batch=batch, dtype=dtype, device=device)

    crosses = [layer.cross_attention for layer in spec.layers]
    return Built(_Stack(first, layers, crosses, last), make_batch, layers)


class _Stack(nn.Module):
    def __init__(
        self, first: nn.Module, layers: list[list[nn.Module]], crosses: list[bool], last: nn.Module
    ) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.layers = nn.ModuleList(nn.ModuleList(of_type) for of_type in layers)
        self.crosses = crosses

    def forward(self, tokens: Any, labels: Any, *encoder_tokens: Any) -> Any:
        x = self.first(tokens, *encoder_tokens)
        context = None
        if encoder_tokens:
            x, context = x.split([len(tokens), len(encoder_tokens[0])])
        for of_type, crosses in zip(self.layers, self.crosses, strict=True):
            for layer in of_type:
                if encoder_tokens and not crosses:
                    context = layer(context)
                else:
                    x = layer(x, context) if crosses else layer(x)
        return self.last(x, labels) if context is None else self.last(x, labels, context)

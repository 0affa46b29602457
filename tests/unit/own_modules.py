"""Modules of somebody else, in small: what the tests of model sources are made of."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from profiler.model.sources import module_source


class Layer(nn.Module):
    """A layer of two products, which may return a tuple as older models do."""

    def __init__(self, hidden=8, returns="hidden"):
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 16), nn.Linear(16, hidden)
        self.returns = returns

    def forward(self, x, scale=None):
        y = self.down(self.up(x).relu())
        y = y if scale is None else y * scale
        if self.returns == "hidden":
            return x + y
        return {"pair": (x + y, None), "flags": (x.shape, y), "narrow": (y[..., :1], y)}[
            self.returns
        ]


class Model(nn.Module):
    """The smallest model with an embedding, layers in a list and an output."""

    def __init__(self, num_layers, hidden=8, layer="hidden", output="tensor"):
        super().__init__()
        self.embed = nn.Embedding(32, hidden)
        self.blocks = nn.ModuleList(Layer(hidden, layer) for _ in range(num_layers))
        self.output = output

    def make_batch(self, batch, seq_length):
        return {"tokens": torch.randint(0, 32, (batch, seq_length))}

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, scale=torch.full((), 0.5))
            x = x[0] if isinstance(x, tuple) else x
        outputs = {
            "tensor": x,
            "pair": (x, tokens),
            "logits": SimpleNamespace(logits=x),
            "loss": {"loss": x.sum()},
            "tokens": tokens,
            "dict": {"x": x},
            "late": (tokens, x),
            "none": None,
        }
        return outputs[self.output]


def source_of(factory, **options):
    """Return the source of a factory called `py:x`, tried at eight tokens."""
    return module_source(factory, text="py:x", label="x", seq_lengths=[8], **options)


def model_of(**options):
    """Return the factory of small models."""
    return lambda num_layers, seq_length, dtype: Model(num_layers, **options)

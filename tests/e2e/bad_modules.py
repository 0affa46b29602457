"""Factories with one thing wrong each, which rows of the table of bad input name."""

from __future__ import annotations

import torch
from torch import nn

returned = "hidden"


class Layer(nn.Module):
    """A layer that returns what it should, or not."""

    def __init__(self, returns="hidden"):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.returns = returns

    def forward(self, x):
        y = x + self.down(self.up(x).relu())
        wrong = {"nothing": None, "dict": {"out": y}, "flags": (len(x), y), "nan": y / 0 * 0}
        if self.returns == "cuda":
            return y.cuda()
        return wrong.get(self.returns, y)


class OtherLayer(Layer):
    """A layer of another class."""


class Constant(nn.Module):
    """A layer of buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(16))

    def forward(self, x):
        return x * self.table


class Model(nn.Module):
    """A small model whose batch and layers can be replaced."""

    num_heads = 4

    def __init__(self, num_layers, batch=None, **layer):
        super().__init__()
        self.embed, self.positions = nn.Embedding(64, 16), nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Layer(**layer) for _ in range(num_layers))
        self.batch = batch

    def make_batch(self, batch, seq_length):
        if self.batch is not None:
            return self.batch(batch, seq_length)
        return torch.randint(0, 64, (batch, seq_length))

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[-1]))
        for block in self.blocks:
            x = block(x)
        return x


def good(num_layers, seq_length, dtype):
    return Model(num_layers)


def returns_nothing(num_layers, seq_length, dtype):
    return Model(num_layers, returns="nothing")


def returns_a_dict(num_layers, seq_length, dtype):
    return Model(num_layers, returns="dict")


def returns_flags(num_layers, seq_length, dtype):
    return Model(num_layers, returns="flags")


def nan_activations(num_layers, seq_length, dtype):
    return Model(num_layers, returns="nan")


def needs_cuda(num_layers, seq_length, dtype):
    return Model(num_layers, returns="cuda")


def nan_weights(num_layers, seq_length, dtype):
    model = Model(num_layers)
    nn.init.constant_(model.blocks[0].up.weight, torch.nan)
    return model


def raises(num_layers, seq_length, dtype):
    raise FileNotFoundError("weights.bin\nis not here")


def too_few_arguments(num_layers):
    return Model(num_layers)


def makes_nothing(num_layers, seq_length, dtype):
    return None


def makes_a_layer(num_layers, seq_length, dtype):
    return Layer()


def other_number(num_layers, seq_length, dtype):
    return Model(num_layers + 1)


def no_list(num_layers, seq_length, dtype):
    model = Model(num_layers)
    model.blocks = nn.Sequential(*model.blocks)
    return model


def two_classes(num_layers, seq_length, dtype):
    model = Model(num_layers)
    model.blocks[0] = OtherLayer()
    return model


def no_parameters(num_layers, seq_length, dtype):
    model = Model(0)
    model.blocks = nn.ModuleList(Constant() for _ in range(num_layers))
    return model


def frozen(num_layers, seq_length, dtype):
    return Model(num_layers).requires_grad_(False)


def one_sample(num_layers, seq_length, dtype):
    return Model(num_layers, batch=lambda batch, seq: torch.randint(0, 64, (1, seq)))


def no_tokens(num_layers, seq_length, dtype):
    return Model(num_layers, batch=torch.rand)


def other_device(num_layers, seq_length, dtype):
    return Model(num_layers, batch=lambda *size: torch.randint(0, 64, size, device="meta"))


def large_tokens(num_layers, seq_length, dtype):
    return Model(num_layers, batch=lambda *size: torch.randint(64, 99, size))

"""One half of a layer, attention or MLP, with its norm and its residual connection."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.model import LayerSpec
from autopar.model_measurements import ModelMeasurement
from profiler.model.blocks import build_layer, layer_inputs
from profiler.model.cells import ModelCell
from profiler.model.collectives import SoleRank
from profiler.model.counting import count_memory
from profiler.model.options import Unit
from profiler.model.sharding import Sharding
from profiler.model.timing import torch_dtype

__all__ = ["build_half", "half_memory"]


def build_half(
    spec: LayerSpec,
    sharding: Sharding,
    unit: Unit,
    *,
    group: Any,
    dtype: torch.dtype,
    device: torch.device | str,
) -> nn.Module:
    """Return one half of a layer on one rank, called like the whole layer.

    Cross-attention belongs to the attention half; the halves' figures add up to those of a layer.
    """
    return _Half(build_layer(spec, sharding, group=group, dtype=dtype, device=device), unit)


def half_memory(spec: LayerSpec, cell: ModelCell, unit: Unit, dtype: str) -> ModelMeasurement:
    """Return the memory of one half, counted without a device (see `profiler.model.exact`)."""
    on: dict[str, Any] = {"dtype": torch_dtype(dtype), "device": "cpu"}
    group = SoleRank(cell.degree) if cell.degree > 1 else None
    with FakeTensorMode():
        module = build_half(spec, cell.sharding, unit, group=group, **on)
        inputs = layer_inputs(
            spec,
            cell.sharding,
            batch=cell.batch,
            encoder_seq_length=cell.encoder_seq_length,
            **on,
        )
        counted = count_memory(module, inputs, shared=inputs[1:])
    found = replace(
        counted,
        batch=cell.batch,
        seq_lengths=cell.seq_lengths,
        degree=cell.degree,
        kind=cell.kind,
        checkpoint=cell.checkpoint,
    )
    return found.measurement(key=cell.key, layer_type=cell.layer_type)


class _Half(nn.Module):
    def __init__(self, layer: Any, unit: Unit) -> None:
        super().__init__()
        names = ("attention_norm", "attention", "cross_norm", "cross_attention")
        for name in names if unit == "attention" else ("mlp_norm", "mlp"):
            setattr(self, name, getattr(layer, name))
        self.unit = unit

    def forward(self, x: Any, context: Any = None) -> Any:
        if self.unit == "mlp":
            return x + self.mlp(self.mlp_norm(x))
        x = x + self.attention(self.attention_norm(x))
        if self.cross_attention is not None:
            x = x + self.cross_attention(self.cross_norm(x), context)
        return x

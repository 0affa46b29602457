"""Memory of layers and of what surrounds them, counted exactly, without a device.

A part runs forward and backward on tensors that have shapes and no contents, on one rank of a
group that exchanges nothing; `counting` says what is counted.
"""

from __future__ import annotations

import dataclasses

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autopar.errors import OptionError
from autopar.model import LayerSpec, ModelSpec
from autopar.model_measurements import TensorKind
from profiler.model.blocks import build_layer, layer_inputs
from profiler.model.collectives import SoleRank
from profiler.model.counting import ExactMemory, count_memory
from profiler.model.outer import OuterPart, build_outer, outer_inputs
from profiler.model.sharding import Sharding

__all__ = ["DTYPES", "ExactMemory", "count_memory", "layer_memory", "outer_memory"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def layer_memory(
    spec: LayerSpec,
    sharding: Sharding,
    *,
    batch: int = 1,
    dtype: str = "bf16",
    encoder_seq_length: int | None = None,
) -> ExactMemory:
    """Return the memory of one layer on one rank; raises InputError for what cannot be built."""
    torch_dtype = _torch_dtype(dtype)
    notes = []
    if spec.cross_attention:
        notes.append("the encoder's output is not counted here: all decoder layers share it")
    if not sharding.flash:
        notes.append("attention keeps its matrix of scores, which grows with the sequence squared")
    if spec.num_experts is not None:
        notes.append("tokens are spread evenly over the experts")
    with FakeTensorMode():
        module = build_layer(
            spec,
            sharding,
            group=_alone(sharding.degree),
            dtype=torch_dtype,
            device="cpu",
            expert_group=_alone(sharding.expert_degree),
        )
        inputs = layer_inputs(
            spec,
            sharding,
            batch=batch,
            dtype=torch_dtype,
            device="cpu",
            encoder_seq_length=encoder_seq_length,
        )
        counted = count_memory(module, inputs, shared=inputs[1:])
    return dataclasses.replace(
        counted,
        batch=batch,
        seq_lengths=(spec.seq_length,),
        degree=sharding.degree,
        kind=sharding.kind,
        checkpoint=sharding.checkpoint,
        notes=tuple(notes),
    )


def outer_memory(
    spec: ModelSpec,
    part: OuterPart,
    *,
    degree: int = 1,
    kind: TensorKind = "sp",
    batch: int = 1,
    dtype: str = "bf16",
) -> ExactMemory:
    """Return the memory of what surrounds the layers, on one rank of a vocabulary group."""
    torch_dtype = _torch_dtype(dtype)
    with FakeTensorMode():
        module = build_outer(
            spec,
            part,
            degree=degree,
            kind=kind,
            group=_alone(degree),
            dtype=torch_dtype,
            device="cpu",
        )
        inputs = outer_inputs(
            spec, part, degree=degree, kind=kind, batch=batch, dtype=torch_dtype, device="cpu"
        )
        counted = count_memory(module, inputs)
    notes = []
    if part == "last" and spec.tied_embeddings:
        notes.append("the table is tied to the first stage's, of which this stage has a copy")
    return dataclasses.replace(
        counted,
        part=part,
        batch=batch,
        seq_lengths=tuple(layer.seq_length for layer in spec.layers),
        degree=degree,
        kind=kind,
        notes=tuple(notes),
    )


def _torch_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise OptionError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _alone(degree: int) -> SoleRank | None:
    return SoleRank(degree) if degree > 1 else None

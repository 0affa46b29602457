"""Memory of a layer on a rank, in bytes: states, transient peaks, shared buffers.

Source: cost-model.md "Memory of a rank"; activations are in `activations`. Every function works on
flat arrays of rows; layers, embedding and head share the formulas of states and ZeRO transients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.units import MIB
from search.cost.rows import Rows
from search.options import SearchOptions

__all__ = [
    "COMMUNICATOR_BYTES",
    "Recipe",
    "gathered_bytes",
    "layer_shared_bytes",
    "prefetched_bytes",
    "reserved_bytes",
    "stage_fixed_bytes",
    "state_bytes",
    "to_bytes",
    "zero_transient_bytes",
]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
_Bool = NDArray[np.bool_]

COMMUNICATOR_BYTES = 64 * MIB
"""Buffers of one communicator; charged only when the hardware is estimated."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Bytes per parameter and per activation element of a training precision."""

    weight: float
    gradient: float
    optimizer: float
    element: float

    @staticmethod
    def of(options: SearchOptions) -> Recipe:
        """Return the recipe of the options: fp32 4+4+8; bf16 and fp16 2+2+12 (fp32 grads 4)."""
        if options.mixed_precision == "fp32":
            return Recipe(weight=4.0, gradient=4.0, optimizer=8.0, element=4.0)
        gradient = 4.0 if options.fp32_gradients else 2.0
        return Recipe(weight=2.0, gradient=gradient, optimizer=12.0, element=2.0)

    @property
    def step_bytes(self) -> float:
        """Memory traffic of the optimizer per parameter: gradient and states read and written."""
        return self.gradient + 24.0


def to_bytes(values: F64) -> I64:
    """Return whole bytes, rounded up (a millionth of a byte of float noise is ignored)."""
    return np.ceil(values - 1e-6).astype(np.int64)


def state_bytes(
    parameters: F64 | float,
    group_size: F64,
    zero3: _Bool,
    zero2: _Bool,
    recipe: Recipe,
    *,
    shard_gradients: bool,
) -> F64:
    """Return weights, gradients and optimizer of `parameters`, exactly shared by ZeRO, in bytes.

    ZeRO-2 shards the optimizer and gradients, ZeRO-3 weights too; with one reduction per step
    (`shard_gradients` False) full gradients are kept until then.
    """
    sharded = np.where(zero3 | zero2, group_size, 1.0)
    weights = recipe.weight / np.where(zero3, group_size, 1.0)
    gradients = recipe.gradient / (sharded if shard_gradients else 1.0)
    result: F64 = parameters * (weights + gradients + recipe.optimizer / sharded)
    return result


def zero_transient_bytes(
    parameters: F64 | float,
    group_size: F64,
    zero3: _Bool,
    zero2: _Bool,
    recipe: Recipe,
    *,
    shard_gradients: bool,
) -> F64:
    """Return what ZeRO holds for a moment, in bytes.

    ZeRO-3: two gathered layers (2*w*N) and the reduce-scatter buffer (N*e_g); where gradients are
    sharded at once, one layer's unsharded gradients (N*e_g).
    """
    sharded = group_size > 1.0
    gathered = np.where(zero3 & sharded, 2.0 * recipe.weight + recipe.gradient, 0.0)
    whole = np.where((zero3 | zero2) & sharded, recipe.gradient if shard_gradients else 0.0, 0.0)
    result: F64 = parameters * (gathered + whole)
    return result


def prefetched_bytes(parameters: F64 | float, group_size: F64, zero3: _Bool, recipe: Recipe) -> F64:
    """Return the weights that ZeRO-3 gathers early, one of the two layers of its transient.

    They may be there while another layer, or the loss, has its own peak: shared bytes.
    """
    result: F64 = parameters * np.where(zero3 & (group_size > 1.0), recipe.weight, 0.0)
    return result


def gathered_bytes(
    rows: Rows, seq_length: int, hidden_size: int, recipe: Recipe, options: SearchOptions
) -> F64:
    """Return the input that Megatron TP gathers with SP, b*S*h*e/c bytes, else 0.

    It lies in the shared buffer, or without `global_memory_buffer` in memory of its own for as
    long as it is used.
    """
    gathers = ~rows.ulysses & (rows.tensor > 1.0) & options.sequence_parallel
    token_bytes = float(seq_length) * hidden_size * recipe.element
    result: F64 = np.where(gathers, rows.batch * token_bytes / rows.context, 0.0)
    return result


def layer_shared_bytes(
    rows: Rows,
    seq_length: int,
    hidden_size: int,
    recipe: Recipe,
    options: SearchOptions,
    *,
    estimated: bool,
) -> F64:
    """Return the buffers that layers of a stage share, in bytes.

    With SP the gather buffer b*S*h*e/c, if `global_memory_buffer`; without SP the replicated part
    of the pipeline's receive buffers, 2*(t-1) of the sharded one; when estimated 64 MiB per
    communicator.
    """
    shared = np.zeros_like(rows.batch)
    if options.sequence_parallel and options.global_memory_buffer:
        shared = gathered_bytes(rows, seq_length, hidden_size, recipe, options)
    elif not options.sequence_parallel:
        tensor_parallel = ~rows.ulysses & (rows.tensor > 1.0)
        token_bytes = float(seq_length) * hidden_size * recipe.element
        base = rows.samples * token_bytes / rows.ranks
        replicated = tensor_parallel & (rows.stages > 1.0)
        shared = np.where(replicated, 2.0 * (rows.tensor - 1.0) * base, 0.0)
    if estimated:
        same = rows.ulysses & (rows.zero_size == rows.tensor)
        count = (
            (rows.tensor > 1.0).astype(np.float64)
            + (rows.context > 1.0)
            + ((rows.zero_size > 1.0) & ~same)
        )
        shared = shared + count * COMMUNICATOR_BYTES
    result: F64 = shared
    return result


def stage_fixed_bytes(
    stages: I64, samples: I64, world_size: int, token_bytes: float, *, estimated: bool
) -> I64:
    """Return (N, 4) bytes by stage kind: pipeline receive buffers and, estimated, communicators.

    token_bytes : S*h*e of the widest layer type. An end stage receives from one side, a middle
    stage from two.
    """
    base = samples * stages / world_size * token_bytes
    fixed = base[:, None] * np.array([0.0, 1.0, 2.0, 1.0])
    if estimated:
        fixed = fixed + COMMUNICATOR_BYTES * (1.0 + (stages > 1))[:, None]
    return to_bytes(fixed)


def reserved_bytes(allocated_bytes: int, options: SearchOptions) -> int:
    """Return what the allocator reserves for `allocated_bytes`, context included, in bytes."""
    reserved = allocated_bytes * (1.0 + options.reserve_fraction) + options.context_bytes
    return int(np.ceil(reserved))

"""Time of a layer on a rank, in seconds: forward and backward of one micro-batch, tail of a step.

Source: cost-model.md sections 1 to 5, 7 and 10. Every function works on flat arrays of rows; the
result is split into the categories that a person wants to see.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.model import LayerSpec
from search.cost.comm import Groups
from search.cost.computation import ComputeFits
from search.cost.memory import Recipe
from search.cost.optimizer import OptimizerCurve
from search.cost.overlap import overlap_s, overlapped_backward_s
from search.cost.rows import Rows
from search.options import SearchOptions

__all__ = [
    "BACKWARD_FACTOR",
    "LayerTime",
    "TensorParallelTime",
    "gradient_sync_s",
    "layer_time",
    "optimizer_s",
    "ring_s",
    "tensor_parallel_s",
    "ulysses_s",
]

F64 = NDArray[np.float64]

BACKWARD_FACTOR = 2.0
"""Backward divided by forward, where the backward is not measured."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTime:
    """Seconds by category, each (n,): of one micro-batch, and `step` once per training step."""

    forward: dict[str, F64]
    """forward, tp, ulysses, cp, zero3"""
    backward: dict[str, F64]
    """backward, recompute, tp, ulysses, cp, zero3, sync (reduction in every micro-batch)"""
    step: dict[str, F64]
    """tail (exposed reduction and ZeRO-2 gather), optimizer"""


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorParallelTime:
    """Communication of Megatron tensor parallelism, each (n,) seconds."""

    forward_s: F64
    exposed_backward_s: F64
    input_gradient_s: F64
    """Hides under the input-gradient GEMMs of the column-parallel linears."""
    weight_gradient_s: F64


def tensor_parallel_s(
    rows: Rows, spec: LayerSpec, groups: Groups, recipe: Recipe, options: SearchOptions
) -> TensorParallelTime:
    """Return the messages of Megatron tensor parallelism, V = b*S*h*e/c bytes each, in seconds.

    With SP: forward 2 AG + 2 RS; backward 2 AG exposed, 2 re-gathers beside the input-gradient
    and 2 RS beside the weight-gradient GEMMs. Without: forward 2 AR, backward 2 AR beside the
    weight-gradient GEMMs. A layer with cross attention has three such blocks instead of two.
    """
    blocks = 3.0 if spec.cross_attention else 2.0
    megatron = np.flatnonzero(~rows.ulysses & (rows.tensor > 1.0))
    count = np.zeros_like(rows.batch)
    zero = np.zeros_like(count)
    if not megatron.size:
        return TensorParallelTime(
            forward_s=zero, exposed_backward_s=zero, input_gradient_s=zero, weight_gradient_s=zero
        )
    token_bytes = float(spec.seq_length) * spec.hidden_size * recipe.element
    message = (rows.batch[megatron] / rows.context[megatron]) * token_bytes
    group = rows.tensor_group[megatron]
    if not options.sequence_parallel:
        reduce = count
        reduce[megatron] = blocks * groups.seconds("allreduce", message, group)
        return TensorParallelTime(
            forward_s=reduce,
            exposed_backward_s=zero,
            input_gradient_s=zero,
            weight_gradient_s=reduce,
        )
    gather, scatter = count, np.zeros_like(count)
    gather[megatron] = blocks * groups.seconds("allgather", message, group)
    scatter[megatron] = blocks * groups.seconds("reducescatter", message, group)
    return TensorParallelTime(
        forward_s=gather + scatter,
        exposed_backward_s=gather,
        input_gradient_s=gather,
        weight_gradient_s=scatter,
    )


def ulysses_s(rows: Rows, spec: LayerSpec, groups: Groups, recipe: Recipe) -> F64:
    """Return the all-to-alls of Ulysses in one direction, in seconds.

    q and the output move b*(S/c)*heads*head_dim*e/t each (h where heads are unknown), k and v are
    scaled by max(kv_heads, t)/heads.
    """
    result = np.zeros_like(rows.batch)
    at = np.flatnonzero(rows.ulysses & (rows.tensor > 1.0))
    if at.size:
        attentions = 2.0 if spec.cross_attention else 1.0
        heads = spec.num_heads
        width = spec.hidden_size
        if heads is not None:
            width = heads * (spec.head_dim or spec.hidden_size // heads)
        token_bytes = float(spec.seq_length) * width * recipe.element
        query = rows.batch[at] * token_bytes / rows.shards[at]
        key_value = query
        if heads is not None:
            key_value = query * (np.maximum(spec.num_kv_heads or heads, rows.tensor[at]) / heads)
        group = rows.tensor_group[at]
        result[at] = (2.0 * attentions) * (
            groups.seconds("all2all", query, group) + groups.seconds("all2all", key_value, group)
        )
    return result


def ring_s(
    rows: Rows,
    spec: LayerSpec,
    attention_sample_s: float,
    groups: Groups,
    recipe: Recipe,
    coefficient: float,
) -> tuple[F64, F64]:
    """Return the exposed ring exchanges of context parallelism, forward and backward, in seconds.

    An exchange moves K and V, 2*b*(S/c)*(kv_heads*head_dim/t)*e bytes. Forward: c-1 of them, one
    beside each attention step; backward: in c-1 steps K,V and dK,dV, in the last dK,dV alone.
    """
    forward, backward = np.zeros_like(rows.batch), np.zeros_like(rows.batch)
    at = np.flatnonzero(rows.context > 1.0)
    if not at.size:
        return forward, backward
    t, c, b = rows.tensor[at], rows.context[at], rows.batch[at]
    width = np.full_like(t, float(spec.hidden_size)) / t
    if spec.num_heads is not None:
        head_dim = spec.head_dim or spec.hidden_size // spec.num_heads
        width = np.maximum(spec.num_kv_heads or spec.num_heads, t) * head_dim / t
    message = 2.0 * b * (spec.seq_length / c) * width * recipe.element
    exchange = message / groups.bus_bytes_per_s(rows.context_group[at])
    step = b * attention_sample_s / rows.shards[at] / c
    rings = 2.0 if spec.cross_attention else 1.0
    forward[at] = rings * (c - 1.0) * (overlap_s(step, exchange, coefficient) - step)
    back = BACKWARD_FACTOR * step
    backward[at] = rings * (
        (c - 1.0) * (overlap_s(back, 2.0 * exchange, coefficient) - back)
        + (overlap_s(back, exchange, coefficient) - back)
    )
    return forward, backward


def gradient_sync_s(
    parameters: F64,
    sharded: NDArray[np.bool_],
    group: NDArray[np.int64],
    groups: Groups,
    recipe: Recipe,
) -> tuple[F64, F64]:
    """Return gradient reduction and parameter gathering of a layer, in seconds.

    ddp: AR(N*e_g); sharded by ZeRO: RS(N*e_g). The gathering AG(w*N) is 0 without ZeRO.
    """
    gradients = parameters * recipe.gradient
    reduce = np.zeros_like(parameters)
    gather = np.zeros_like(parameters)
    yes, no = np.flatnonzero(sharded), np.flatnonzero(~sharded)
    if yes.size:
        reduce[yes] = groups.seconds("reducescatter", gradients[yes], group[yes])
        weights = parameters[yes] * recipe.weight
        gather[yes] = groups.seconds("allgather", weights, group[yes])
    if no.size:
        reduce[no] = groups.seconds("allreduce", gradients[no], group[no])
    return reduce, gather


def optimizer_s(
    parameters: F64,
    group_size: F64,
    sharded: NDArray[np.bool_],
    recipe: Recipe,
    memory_bytes_per_s: float | None,
    measured: OptimizerCurve | None,
) -> F64:
    """Return the optimizer step of the parameters on the ZeRO shard, in seconds.

    The measured curve; without one 26 bytes per parameter (28 with fp32 gradients) over the memory
    bandwidth, 0 when that is unknown.
    """
    if measured is not None:
        return measured.step_s(parameters / np.where(sharded, group_size, 1.0))
    if memory_bytes_per_s is None:
        return np.zeros_like(parameters)
    shard = parameters / np.where(sharded, group_size, 1.0)
    result: F64 = shard * (recipe.step_bytes / memory_bytes_per_s)
    return result


def layer_time(
    rows: Rows,
    spec: LayerSpec,
    fits: ComputeFits,
    parameter_count: float,
    attention_sample_s: float,
    groups: Groups,
    recipe: Recipe,
    options: SearchOptions,
    *,
    coefficient: float,
    memory_bytes_per_s: float | None,
    optimizer: OptimizerCurve | None = None,
) -> LayerTime:
    """Return the time of every row by category, in seconds.

    attention_sample_s : attention part of one sample's unsharded forward, the ring's window;
    coefficient : overlap coefficient k; optimizer : its measured step, if there is one.
    """
    compute = fits.seconds("forward", rows)
    backward = fits.seconds("backward", rows, BACKWARD_FACTOR * compute)
    again = np.where(rows.checkpoint, 1.0, 0.0)
    recompute = again * fits.seconds("recompute", rows, compute)
    tensor = tensor_parallel_s(rows, spec, groups, recipe, options)
    ulysses = ulysses_s(rows, spec, groups, recipe)
    ring_forward, ring_backward = ring_s(
        rows, spec, attention_sample_s, groups, recipe, coefficient
    )
    parameters = parameter_count / np.where(rows.ulysses, 1.0, rows.tensor)
    sharded = rows.zero3 | rows.zero2
    reduce, gather = gradient_sync_s(parameters, sharded, rows.zero_group, groups, recipe)
    gather3 = np.where(rows.zero3, gather, 0.0)

    # Exposed part of what the windows hide, then of the parameters, then of the reduction.
    exposed = tensor.exposed_backward_s
    windows: tuple[tuple[F64, F64], ...] = ()
    if options.tp_overlap:
        window = backward / 2.0 * options.column_parallel_share
        windows = ((window, tensor.input_gradient_s), (window, tensor.weight_gradient_s))
    else:
        exposed = exposed + tensor.input_gradient_s + tensor.weight_gradient_s
    busy = backward + recompute
    nothing = np.zeros_like(busy)
    with_tensor = overlapped_backward_s(busy, windows, nothing, coefficient)
    with_gather = overlapped_backward_s(busy, windows, gather3, coefficient)
    with_reduce = overlapped_backward_s(busy, windows, gather3 + reduce, coefficient)
    sync = np.maximum(with_reduce - with_gather, 0.0)
    gather_tail = np.where(rows.zero2, overlap_s(compute, gather, coefficient) - compute, 0.0)

    backward_parts = {
        "backward": backward,
        "recompute": recompute,
        "tp": exposed + again * tensor.forward_s + (with_tensor - busy),
        "ulysses": ulysses * (1.0 + again),
        "cp": ring_backward + again * ring_forward,
        "zero3": with_gather - with_tensor,
        "sync": nothing if options.async_grad_reduce else sync,
    }
    return LayerTime(
        forward={
            "forward": compute,
            "tp": tensor.forward_s,
            "ulysses": ulysses,
            "cp": ring_forward,
            "zero3": overlap_s(compute, gather3, coefficient) - compute,
        },
        backward=backward_parts,
        step={
            "tail": (sync if options.async_grad_reduce else nothing) + gather_tail,
            "optimizer": optimizer_s(
                parameters, rows.zero_size, sharded, recipe, memory_bytes_per_s, optimizer
            ),
        },
    )

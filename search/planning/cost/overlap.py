"""Overlap of communication with compute: by one coefficient, or by factors of a software stack.

Measured profiles contain one coefficient, the slowdown of overlapping compute and communication.
Estimates use the overlap factors of the engine's software stack
(`autopar.run.runtime.OverlapFactors`), with the formulas of `autopar.price.step`. Compute and
messages are in `search.planning.cost.time`. Source: cost-model.md sections 3, 5 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.arrays import F64, I64
from autopar.rates.measured import CollectiveCounts, host_calls, host_device_time_s
from autopar.records import Record, replace
from autopar.run.model import ModelProfile, ModelSpec
from autopar.run.plan import PipelineType
from autopar.run.runtime import OverlapFactors
from search.planning.cost.tables import Pricing, Rows, sum_of
from search.request.options import SearchOptions


class LayerTime(Record, eq=False):
    """Time of rows by category, (n,) seconds. Estimates add `stragglers` to each field."""

    forward: dict[str, F64]
    """Seconds per micro-batch: forward, tp, ulysses, cp, zero3."""
    backward: dict[str, F64]
    """Seconds per micro-batch: backward, recompute, tp, ulysses, cp, zero3, sync (exposed reduction
    in every micro-batch); for estimates also host (exposed host overhead)."""
    step: dict[str, F64]
    """Seconds once per step: tail (exposed reduction, ZeRO-1 and 2 gather), optimizer."""


# --------------------------------------------------------------------------------------------------
# Overlap with one coefficient k: compute and communication are k times slower while both run.
#
# Source: cost-model.md sections 3, 5 and 7. All times in seconds, arrays broadcast.


def overlap_s(window_s: F64, comm_s: F64, coefficient: float) -> F64:
    """Return the total time of overlapping compute x and communication y, seconds.

    min(k*min(x, y) + |x - y|, x + y): both are k times slower while both run.

    window_s : time x of the compute.
    comm_s : time y of the communication.
    coefficient : k.
    """
    # both run for k times the shorter time, then the rest of the longer one is not slowed down
    both = coefficient * np.minimum(window_s, comm_s) + np.abs(window_s - comm_s)
    # k above 2 would make overlap slower than one after the other
    return np.minimum(both, window_s + comm_s)


def overlapped_backward_s(
    compute_s: F64,
    windows: tuple[tuple[F64, F64], ...],
    other_comm_s: F64,
    coefficient: float,
) -> F64:
    """Return the time of a layer's backward with overlapped communication, seconds.

    max(B + sum_i (overlap(w_i, y_i) - w_i), overlap(B, sum_i y_i + y_other))

    Each tensor-parallel message y_i overlaps only with its GEMM w_i; all messages together overlap
    with the compute B.

    compute_s : B.
    windows : pairs (w_i, y_i).
    other_comm_s : y_other, data-parallel communication.
    """
    separate = compute_s
    together = other_comm_s
    for window_s, comm_s in windows:
        # the window is already part of B: only its excess lengthens the backward
        separate = separate + (overlap_s(window_s, comm_s, coefficient) - window_s)
        together = together + comm_s
    # both limits of the overlap hold, so the longer time applies
    return np.maximum(separate, overlap_s(compute_s, together, coefficient))


# --------------------------------------------------------------------------------------------------
# Overlap factors of an engine's software stack, for estimates only.
#
# Source: cost-model.md "Traffic of estimates"; the terms are those of `autopar.price.step`.


def exposed_tensor_s(
    seconds: Sequence[F64], hiding: OverlapFactors, options: SearchOptions
) -> tuple[F64, F64]:
    """Return the exposed tensor-parallel communication of a layer, (forward, backward) seconds.

    An equal share is overlapped with GEMMs in both directions.

    seconds : total time of [all-gathers, reduce-scatters] of the forward with sequence parallelism,
        else [all-reduces].
    """
    seen = 1.0 - (hiding.tensor if options.tp_overlap else 0.0)
    if not options.sequence_parallel:
        (reduced,) = seconds
        return seen * reduced, seen * reduced
    gather, scatter = seconds
    # the backward gathers the gradient of a block's output, and its input for the weight gradient
    return seen * (gather + scatter), seen * (scatter + hiding.regather * gather)


def exposed_reduction_s(comm_s: F64, microbatch_s: F64, hiding: OverlapFactors) -> F64:
    """Return the exposed time of a reduction that overlaps with the last micro-batch, seconds.

    max(0, y - gradients*w) + reduction*y, with the factors `gradients` and `reduction` of `hiding`.

    comm_s : time y of the reduction.
    microbatch_s : time w of the micro-batch.
    """
    late = np.maximum(0.0, comm_s - hiding.gradients * microbatch_s)
    return late + hiding.reduction * comm_s


def stragglers_share(pricing: Pricing) -> float:
    """Return the waiting time for the slowest node as a share of the step; 0 if measured."""
    if pricing.hiding is None:
        return 0.0
    return pricing.hiding.stragglers * math.log2(pricing.hardware.num_nodes)


def with_stragglers(times: LayerTime, pricing: Pricing) -> LayerTime:
    """Return the times with the category `stragglers`, a share of all times but the optimizer."""
    share = stragglers_share(pricing)
    if not share:
        return times
    waited = {name: part for name, part in times.step.items() if name != "optimizer"}
    parts = [
        {**part, "stragglers": share * sum_of(waits)}
        for part, waits in (
            (times.forward, times.forward),
            (times.backward, times.backward),
            (times.step, waited),
        )
    ]
    return LayerTime(forward=parts[0], backward=parts[1], step=parts[2])


class IsolatedTimes(NamedTuple):
    """Compute and communication of a layer before overlap, (n,) seconds."""

    forward: F64
    backward: F64
    recompute: F64
    again: F64
    """1 with full recomputation, else 0."""
    tensor: tuple[F64, F64] | None
    """Exposed tensor-parallel communication, (forward, backward); None if there is none."""
    ulysses: F64
    """Seconds of the all-to-alls in each direction."""
    ring: tuple[F64, F64]
    """Exposed context-parallel communication, (forward, backward)."""
    reduce: F64
    """Seconds of the gradient reduction."""
    gather: F64
    """All-gather of the weights; 0 with DDP."""
    optimizer: F64
    routing_s: float
    """Host seconds of routing tokens to experts."""


def _host_waited_s(
    device_s: F64, rows: Rows, raw: IsolatedTimes, pricing: Pricing, hiding: OverlapFactors
) -> F64:
    """Return the exposed host overhead of forward and backward of a layer, seconds.

    device_s : device time of both.
    """

    megatron = "sp" if pricing.options.sequence_parallel else "tp"
    exchanges = rows.ulysses & (rows.tensor > 1.0)
    # a ring has c - 1 calls forward and twice as many backward; a gather, one more and a scatter
    gathers = pricing.options.cp_kind == "all-gather"
    calls = 3.0 * ((rows.context > 1.0) if gathers else (rows.context - 1.0))
    for kind, which in ((megatron, rows.megatron), ("ulysses", exchanges)):
        calls = calls + np.where(which, float(sum(host_calls(kind))), 0.0)
    host = hiding.host_forward_s * (1.0 + raw.again) + hiding.host_backward_s
    host = host + calls * hiding.host_collective_s + raw.routing_s
    # also works with arrays for both arguments
    waited: F64 = host_device_time_s(device_s, host) - device_s
    return waited


def estimated_time(
    raw: IsolatedTimes, rows: Rows, pricing: Pricing, hiding: OverlapFactors
) -> LayerTime:
    """Return the estimated time of every row by category, seconds.

    Communication of ZeRO-3 runs at a share of the network bandwidth (`sharded_network`) and
    overlaps with the layer: gathers with forward and backward, the reduce-scatter with the
    backward. Other reductions, and the gathers of ZeRO-1 and 2, overlap with a share of the last
    micro-batch.
    """
    coefficient = pricing.hardware.overlap_coefficient
    late = pricing.options.async_grad_reduce
    nothing = np.zeros_like(rows.batch)
    tensor_forward, tensor_backward = raw.tensor or (nothing, nothing)
    ring_forward, ring_backward = raw.ring
    backward_parts = {
        "backward": raw.backward,
        "recompute": raw.recompute,
        # recomputation repeats the communication of the forward
        "tp": tensor_backward + raw.again * tensor_forward,
        "ulysses": raw.ulysses * (1.0 + raw.again),
        "cp": ring_backward + raw.again * ring_forward,
    }
    forward_parts = {
        "forward": raw.forward,
        "tp": tensor_forward,
        "ulysses": raw.ulysses,
        "cp": ring_forward,
    }
    ahead, back = sum_of(forward_parts), sum_of(backward_parts)
    gather3 = np.where(rows.zero3, raw.gather / hiding.sharded_network, 0.0)
    scatter3 = np.where(rows.zero3, raw.reduce / hiding.sharded_network, 0.0)
    with_forward = overlap_s(ahead, gather3, coefficient)
    with_gather, with_scatter = overlap_s(
        back, np.array((gather3, gather3 + scatter3)), coefficient
    )
    scattered = np.maximum(with_scatter - with_gather, 0.0)
    device = with_forward + with_gather
    waited = _host_waited_s(device, rows, raw, pricing, hiding)
    # reductions other than ZeRO-3's run once, overlapped with a whole micro-batch
    microbatch = device + waited
    summed = np.where(rows.zero3, 0.0, raw.reduce)
    seen = scattered + exposed_reduction_s(summed, microbatch, hiding)
    gathered = np.where(rows.whole_weights, raw.gather, 0.0)
    whole = scattered + exposed_reduction_s(summed + gathered, microbatch, hiding)
    times = LayerTime(
        forward={**forward_parts, "zero3": with_forward - ahead},
        backward={
            **backward_parts,
            "zero3": with_gather - back,
            "sync": nothing if late else seen,
            # for both directions; split over both, the search would have more partial plans
            "host": waited,
        },
        step={"tail": whole if late else whole - seen, "optimizer": raw.optimizer},
    )
    return with_stragglers(times, pricing)


def exposed_transfer_s(
    sends_s: F64, stages: I64, pricing: Pricing, pipeline_type: PipelineType
) -> F64:
    """Return the transfer times between stages for the step formula, (N, K, Y) seconds.

    In estimates, a stage waits for a full message in each direction. The 1F1B formula multiplies
    transfers by (p - 1)/p, which is compensated here; GPipe has no such factor. Measured times are
    returned unchanged.
    """
    if pricing.hiding is None:
        return sends_s
    p = stages.astype(np.float64)
    whole = np.ones_like(p) if pipeline_type == "gpipe" else p / np.maximum(p - 1.0, 1.0)
    return sends_s * (whole * (1.0 + stragglers_share(pricing)))[:, None, None]


# --------------------------------------------------------------------------------------------------
# Estimated times without host overhead.


def without_host(model: ModelProfile, spec: ModelSpec, hiding: OverlapFactors) -> ModelProfile:
    """Return an estimated profile with device times only, without host overhead.

    Reverses the combination of device and host times in `layer_cells`. Host overhead is added later
    to compute and communication together, because it overlaps with both.
    """
    layers = []
    for kind, layer in zip(spec.layers, model.layers, strict=True):
        experts = hiding.host_experts_s / 2.0 if kind.num_experts is not None else 0.0
        ahead, back = (experts + s for s in (hiding.host_forward_s, hiding.host_backward_s))
        cells = []
        for cell in layer.sharded_times:
            calls = host_calls(cell.kind) if cell.degree > 1 else CollectiveCounts(0, 0)
            forward_s = ahead + calls.forward * hiding.host_collective_s
            backward_s = back + calls.backward * hiding.host_collective_s
            cells.append(
                replace(
                    cell,
                    forward_s=_alone_s(cell.forward_s, forward_s),
                    backward_s=cell.backward_s and _alone_s(cell.backward_s, backward_s),
                    recompute_s=cell.recompute_s and _alone_s(cell.recompute_s, forward_s),
                )
            )
        whole = (replace(x, forward_s=_alone_s(x.forward_s, ahead)) for x in layer.times)
        layers.append(replace(layer, times=tuple(whole), sharded_times=tuple(cells)))
    return replace(model, layers=tuple(layers))


def _alone_s(both_s: float, host_s: float) -> float:
    """Return the device time, seconds; both_s : `host_device_time_s` of device and host time."""
    # (device^p + host^p)^(1/p) of 1 and 1 is 2^(1/p)
    power = math.log(2.0) / math.log(float(host_device_time_s(1.0, 1.0)))
    # times in edited files may be shorter than the host overhead; the result is never 0
    left = max(1.0 - (host_s / both_s) ** power, 1e-30)
    return both_s * float(left ** (1.0 / power))

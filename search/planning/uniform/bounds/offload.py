"""Bounds for activation offload: bytes freed on the device and seconds of exposed copies.

Offload sets are enumerated when a layer partition and a recomputation policy are expanded. Before,
one bound covers all sets that free enough bytes: the time to copy these bytes. Let each of n_k
layers of type k copy c_k bytes over a link of r bytes/s, during a forward of f_k and a backward of
b_k seconds. The exposed time is sum_k n_k ((c_k / r - f_k)+ + (c_k / r - b_k)+). With the sums
C, F, B over the layers of a stage or model, it is at least (C / r - F)+ + (C / r - B)+, because
(.)+ is subadditive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from autopar.arrays import F64
from autopar.rates.measured import host_device_time_s
from autopar.rates.parts.data_parallel import overlapped_traffic_s
from search.engines.candidate import Candidate
from search.planning.uniform.bounds.candidates import ModelOffload
from search.planning.uniform.bounds.layer_times import DegreeTimes, MicroBatchTimes
from search.planning.uniform.bounds.partitions import Partitions, exposed_s, peaks_of, pipeline_s
from search.planning.uniform.cost_model import UniformCostModel
from search.planning.uniform.layout import Arrangement
from search.planning.uniform.memory import OffloadedBytes

_ROUNDING = 1.0 - 1e-9
"""Rounding factor: sums in another order must not exceed the exact ones."""
_FEW = 1e-9
"""Live micro-batches of stages without layers of the usual type, to divide by."""


def offload_of_unit(unit: DegreeTimes, rows: Sequence[MicroBatchTimes]) -> ModelOffload:
    """Return the offload values of some degrees; rows : micro-batch times, one per row."""
    gone = unit.bounds.offloaded_activation_bytes
    return ModelOffload(
        forward_s=(unit.forward_s @ unit.number).reshape(1, 1),
        layers_s=(unit.device_s[:-2] @ unit.number)[None],
        device_s=np.array([one.device_of_all_s[:-2] for one in rows]),
        host_s=rows[0].host_of_all_s[None, :-2],
        more=np.array([one.more for one in rows]),
        padding=np.full((1, 1), gone.padding),
        **leaves_of(unit.number, gone.leaves[None]),
    )


def leaves_of(number: F64, leaves: F64) -> dict[str, Any]:
    """Return the fields of `ModelOffload` that depend on bytes.

    number : number of layers by type
    leaves : `OffloadedBytes.leaves` by row, shape [rows, policies, layer types]
    """
    usual = int(number.argmax())
    every = leaves @ number
    others = every - leaves[:, :, usual] * number[usual]
    return {"leaves": every, "others": others, "share": float(number.sum() / number[usual])}


def _least_copied(gone: OffloadedBytes, needed: F64) -> F64:
    """Return the bytes that a layer of the usual type copies at least to free `needed` bytes.

    Infinite if no offload set frees as much.

    needed : device bytes, shape [policies, n]
    """
    fewer = (gone.freed[:, None] < needed[:, :, None]).sum(axis=2)
    return np.take_along_axis(gone.least, fewer, axis=1)


def offload_model_time_s(prices: UniformCostModel, model: ModelOffload, freed_bytes: F64) -> F64:
    """Return lower bounds of whole-model seconds with `freed_bytes` offloaded, by policy.

    The result has shape [rows, policies].

    freed_bytes : device bytes freed per micro-batch, shape [rows, policies]; at most those that
        modules can offload
    """
    copied, forward = freed_bytes / model.padding, model.forward_s
    seen = _copies_s(prices, copied, forward, model.layers_s - forward)
    return np.asarray(host_device_time_s(model.device_s + seen * model.more, model.host_s))


def _copies_s(
    prices: UniformCostModel, copied_bytes: F64, forward_s: F64 | float, backward_s: F64
) -> F64:
    """Return the exposed seconds of copies to the host and back.

    copied_bytes : bytes in each direction.
    forward_s, backward_s : seconds that hide the copies.
    """
    copy = copied_bytes / prices.link_bytes_per_s
    found: F64 = np.maximum(0.0, copy - forward_s) + np.maximum(0.0, copy - backward_s)
    return found


def offload_time_s(
    prices: UniformCostModel,
    unit: DegreeTimes,
    choice: Candidate,
    parts: Partitions,
    sizes: F64,
    limit_bytes: F64,
) -> F64:
    """Return lower bounds of step seconds, with enough activations offloaded to fit.

    The result has shape [policies, partitions]; infinite if no offload set frees enough.

    sizes : bytes of every stage without offload, shape [stages, policies]
    limit_bytes : largest peak that fits, by policy
    """
    stages, sharded = parts.stages, prices.rows_s(unit, choice)
    gone = unit.bounds.offloaded_activation_bytes
    lacking = sizes - limit_bytes
    copied = np.maximum(0.0, lacking.T) / (stages.most * gone.padding)
    # one offload set must free enough on every stage, and copies whole tensors of every layer
    usual = np.zeros_like(unit.number)
    usual[gone.usual] = 1.0
    lacking -= (stages.live * (1.0 - usual)) @ gone.leaves.T
    live = np.maximum(stages.live @ usual, _FEW)
    needed = np.maximum.reduceat(lacking / live[:, None], parts.first).T
    least = _least_copied(gone, needed)
    enough = least < np.inf
    layers = np.where(enough, least, 0.0)[:, parts.at] * (stages.layers @ usual)
    copied = np.maximum(copied, layers)
    # the exposed exchange of tokens also hides copies, in the forward or in the backward
    forward, more = stages.layers @ unit.forward_s, exposed_s(unit, parts)
    backward = unit.device_s[:-2] @ stages.layers.T - forward
    seen = _copies_s(prices, copied, forward + more, backward + more)
    device, host = (rows[:-2] @ parts.timed.T for rows in (sharded.device_s, unit.host_s))
    device += seen * sharded.more[:, None]
    return np.where(enough, pipeline_s(prices, unit, choice, parts, device, host), np.inf)


def hosted_spread_bytes(model: ModelOffload, sizes: F64, freed: F64, most: F64) -> F64:
    """Return lower bounds of the peak stage's bytes by policy, for any layers and offload set.

    sizes, freed : bounds and slopes as in `spread_bytes`, shape [..., rows, policies + 2].
    most : `SpreadStages.most`
    """
    share, more = _share_of_others(model, most)
    gone = share * model.leaves + more
    found: F64 = sizes[..., :-2] - freed[..., :-2] * gone
    return found


def least_offloaded_bytes(model: ModelOffload, lacking: F64, freed: F64, most: F64) -> F64:
    """Return lower bounds of the bytes per micro-batch to offload, shape [..., rows, policies].

    lacking : bytes that `hosted_spread_bytes` must be lower than without offload
    freed, most : as in `hosted_spread_bytes`, for the policies alone
    """
    share, more = _share_of_others(model, most)
    found: F64 = np.maximum(0.0, lacking / freed - more) / share
    return found


def _share_of_others(model: ModelOffload, most: F64) -> tuple[F64, F64]:
    """Return (f, e), with which offload of F bytes in all layers frees at most f F + e bytes b_t.

    Shapes [rows, 1] and [rows, policies]. With the b_t of `spread_bytes`, and
    c_t bytes offloaded by each of n_t layers, b_u decreases by c_u, and the other b_t by at most
    c_u + s c_t. With one layer type, or s = 1, f is 1 and e is 0.
    """
    if model.share == 1.0:
        return np.ones((1, 1)), np.zeros((1, 1))
    share = np.where(most == 1.0, 1.0, model.share)
    return share, np.maximum(0.0, most - share) * model.others


def least_hosted_bytes(unit: DegreeTimes, parts: Partitions, sizes: F64) -> F64:
    """Return lower bounds of the peak stage's bytes for any offload set.

    The result has shape [partitions, policies].

    sizes : bytes of every stage without offload, shape [stages, policies]
    """
    return peaks_of(
        parts, sizes - parts.stages.live @ unit.bounds.offloaded_activation_bytes.leaves.T
    )


def sets_s(
    prices: UniformCostModel,
    unit: DegreeTimes,
    choice: Candidate,
    parts: Partitions,
    word: int,
) -> F64:
    """Return lower bounds of step seconds by offload set, for one recomputation policy.

    parts : one layer partition
    word : index of the policy
    """
    copied = prices.hosted.has @ unit.bounds.offloaded_activation_bytes.copied[word]
    device, host = unit.device_s[word], unit.host_s[word]
    forward = np.minimum(unit.forward_s, device)
    more = parts.exposed[0] * unit.experts_s
    seen = _copies_s(prices, copied, forward + more, device - forward + more)
    traffic = prices.rows_s(unit, choice).traffic_s
    rows = np.asarray(overlapped_traffic_s(prices.target.machine, device + seen, traffic))
    of_host = np.tile(host @ parts.timed.T, (len(rows), 1))
    found: F64 = pipeline_s(prices, unit, choice, parts, rows @ parts.timed.T, of_host)[:, 0]
    return found


def sets_bytes(
    prices: UniformCostModel,
    unit: DegreeTimes,
    choice: Candidate,
    arrangement: Arrangement,
    word: int,
) -> F64:
    """Return lower bounds of the peak stage's bytes by offload set, for one policy.

    word : index of the recomputation policy.
    """
    gone, has = unit.bounds.offloaded_activation_bytes, prices.hosted.has
    copied, blocks = has @ gone.copied[word], has @ gone.blocks[word]
    found = []
    for one in prices.stage_bytes(unit, choice, arrangement):
        size = one.words[word] - blocks @ one.live
        if one.kind is not None:
            # the backward of a layer first copies its offloaded activations back to the device
            back = copied[:, one.kind]
            more = unit.bounds.backward_bytes(word)[one.kind] + back - one.forward
            size += np.where(back > 0, np.maximum(0.0, more), 0.0)
        found.append(size)
    least: F64 = np.max(found, axis=0) * _ROUNDING
    return least

"""Bounds for activation offload: bytes freed on the device and seconds of exposed copies.

Sets of modules are enumerated once a recomputation policy and a layout are expanded. Before that,
every set that frees enough bytes is bounded by the time to copy these bytes. Copies of c bytes
over a link of r bytes/s, during forwards of f and backwards of b seconds, are exposed for
sum_k n_k (c_k / r - f_k)+ + (c_k / r - b_k)+. With sums C, F, B over the layers of a stage or model
this is at least (C / r - F)+ + (C / r - B)+, because (.)+ is subadditive.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.arrays import F64
from autopar.rates.measured import host_device_time_s
from autopar.rates.parts.data_parallel import overlapped_traffic_s
from search.engines.candidate import Candidate
from search.planning.uniform.bounds.layer_times import (
    DegreeTimes,
    MicroBatchTimes,
    stage_layer_counts,
)
from search.planning.uniform.cost_model import UniformCostModel
from search.planning.uniform.layout import Arrangement

_ROUNDING = 1.0 - 1e-9
"""Rounding factor: sums in another order must not exceed the exact ones."""


def offload_model_time_s(
    prices: UniformCostModel, unit: DegreeTimes, rows: Sequence[MicroBatchTimes], freed_bytes: F64
) -> F64:
    """Return lower bounds of whole-model seconds with `freed_bytes` offloaded, by policy.

    rows : one entry per sharding; freed_bytes : bytes per micro-batch, shape [shardings, policies],
    at most those that modules can offload. The result has the same shape.
    """
    number = unit.number
    forward = unit.forward_s @ number
    copied = freed_bytes / unit.bounds.padding
    seen = _copies_s(prices, copied, forward, unit.device_s[:-2] @ number - forward)
    device = np.array([one.device_of_all_s[:-2] for one in rows])
    more = np.array([one.more for one in rows])
    return np.asarray(host_device_time_s(device + seen * more, rows[0].host_of_all_s[:-2]))


def _copies_s(
    prices: UniformCostModel, copied_bytes: F64, forward_s: F64 | float, backward_s: F64
) -> F64:
    """Return the exposed seconds of copies to the host and back."""
    copy = copied_bytes / prices.link_bytes_per_s
    found: F64 = np.maximum(0.0, copy - forward_s) + np.maximum(0.0, copy - backward_s)
    return found


def offload_time_s(
    prices: UniformCostModel,
    unit: DegreeTimes,
    choice: Candidate,
    arrangement: Arrangement,
    limit_bytes: F64,
) -> F64:
    """Return `stages_s` by recomputation policy with enough activations offloaded to fit.

    limit_bytes : limit of the peak stage by policy; at least `least_hosted_bytes`.
    """
    stages, sharded = prices.stage_bytes(unit, choice, arrangement), prices.rows_s(unit, choice)
    layers = arrangement.layers.astype(np.float64)
    lacking = np.array([one.words for one in stages]).T * _ROUNDING - limit_bytes[:, None]
    times = np.array([one.most for one in stages])
    copied = np.maximum(0.0, lacking) / (times * unit.bounds.padding)
    forward = layers @ unit.forward_s
    seen = _copies_s(prices, copied, forward, unit.device_s[:-2] @ layers.T - forward)
    every = stage_layer_counts(unit, arrangement)
    device, host = (rows[:-2] @ every.T for rows in (sharded.device_s, unit.host_s))
    device += seen * sharded.more[:, None]
    return prices.pipeline_s(unit, choice, arrangement, device, host)


def hosted_spread_bytes(unit: DegreeTimes, sizes: F64, freed: F64) -> F64:
    """Return lower bounds of `many_spread_bytes` by policy, for any activation offload.

    sizes, freed : results of `many_spread_bytes`, shape [i, row].
    """
    found: F64 = sizes[:, :-2] - freed[:, :-2] * (unit.bounds.leaves @ unit.number)
    return found


def least_hosted_bytes(
    prices: UniformCostModel, unit: DegreeTimes, choice: Candidate, arrangement: Arrangement
) -> F64:
    """Return lower bounds of the peak stage's bytes by policy, for any activation offload."""
    stages = prices.stage_bytes(unit, choice, arrangement)
    gone = [one.words - unit.bounds.leaves @ one.live for one in stages]
    least: F64 = np.max(gone, axis=0) * _ROUNDING
    return least


def sets_s(
    prices: UniformCostModel,
    unit: DegreeTimes,
    choice: Candidate,
    arrangement: Arrangement,
    word: int,
) -> F64:
    """Return `stages_s` by set of offloaded modules, for one recomputation policy."""
    layers = stage_layer_counts(unit, arrangement)
    copied = prices.hosted.has @ unit.bounds.offloaded_activation_bytes.copied[word]
    device, host = unit.device_s[word], unit.host_s[word]
    forward = np.minimum(unit.forward_s, device)
    seen = _copies_s(prices, copied, forward, device - forward)
    traffic = prices.rows_s(unit, choice).traffic_s
    rows = np.asarray(overlapped_traffic_s(prices.target.machine, device + seen, traffic))
    of_host = np.tile(host @ layers.T, (len(rows), 1))
    return prices.pipeline_s(unit, choice, arrangement, rows @ layers.T, of_host)


def sets_bytes(
    prices: UniformCostModel,
    unit: DegreeTimes,
    choice: Candidate,
    arrangement: Arrangement,
    word: int,
) -> F64:
    """Return lower bounds of the peak stage's bytes by offload set, for one policy."""
    gone, has = unit.bounds.offloaded_activation_bytes, prices.hosted.has
    copied, blocks = has @ gone.copied[word], has @ gone.blocks[word]
    found = []
    for one in prices.stage_bytes(unit, choice, arrangement):
        size = one.words[word] - blocks @ one.live
        if one.kind is not None:
            # the backward of a layer needs its own offloaded activations on the device again
            more = unit.bounds.forward_bytes[one.kind] + copied[:, one.kind] - one.forward
            size += np.where(copied.any(axis=1), np.maximum(0.0, more), 0.0)
        found.append(size)
    least: F64 = np.max(found, axis=0) * _ROUNDING
    return least

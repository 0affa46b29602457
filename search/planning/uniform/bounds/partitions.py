"""Lower bounds of step time and memory of many layer partitions at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autopar.arrays import F64, I64, Bool
from autopar.pipeline.schedules import SCHEDULES
from search.engines.candidate import Candidate
from search.planning.uniform.bounds.candidates import EarlyStages, StageCandidate
from search.planning.uniform.bounds.layer_times import (
    DegreeTimes,
    MicroBatchTimes,
    arrangement_of,
    layer_total_s,
)
from search.planning.uniform.bounds.live import StageRows, early_bytes
from search.planning.uniform.cost_model import UniformCostModel
from search.planning.uniform.layout import least_early_layers

_ROUNDING = 1.0 - 1e-9
"""Rounding factor: sums in another order must not exceed the exact ones."""


class Partitions(NamedTuple):
    """Layer partitions with equal numbers of stages and micro-batches, by their distinct stages."""

    stages: StageRows
    """Distinct stages of all partitions."""
    first: I64
    """Index of the first distinct stage of each partition."""
    at: I64
    """Index of the partition of each distinct stage."""
    ends: tuple[I64, I64]
    """Indices of the distinct stages with embedding and with head, by partition."""
    timed: F64
    """Number of layers, those of MTP modules included, shape [distinct stages, layer types]."""
    times: F64
    """Number of pipeline stages per distinct stage."""
    chunks: F64
    """Number of chunks per stage, by partition."""
    sends_s: F64
    """Seconds that sends add to a stage per micro-batch, by partition."""
    exposed: F64
    """Results of `UniformCostModel.exposed_experts`, by partition."""
    splits: Bool
    """True if weight gradients are deferred, by partition."""


def partitions_of(
    prices: UniformCostModel, unit: DegreeTimes, choices: Sequence[Candidate]
) -> Partitions:
    """Return the layer partitions of candidates with equal stages and micro-batches."""
    found = [arrangement_of(unit, one) for one in choices]
    stages = [prices.stage_rows(*each) for each in zip(choices, found, strict=True)]
    counts = np.array([len(one.at) for one in found])
    first = np.cumsum(counts) - counts
    ends = first + np.array([one.ends for one in found]).T
    rows = StageRows(
        layers=np.concatenate([one.layers for one in stages]),
        live=np.concatenate([one.live for one in stages]),
        again=(),
        most=np.concatenate([one.most for one in stages]),
        ends=tuple(end for one in stages for end in one.ends),
    )
    timed = rows.layers.copy()
    timed[ends[1]] += unit.further
    return Partitions(
        stages=rows,
        first=first,
        at=np.repeat(np.arange(len(found)), counts),
        ends=(ends[0], ends[1]),
        timed=timed,
        times=np.concatenate([one.times for one in found]),
        chunks=np.array([one.vpp if one.pp > 1 else 1 for one in choices], dtype=np.float64),
        sends_s=np.array([prices.transfer_s(unit, one) for one in choices]),
        exposed=np.array([prices.exposed_experts(unit, one) for one in choices]),
        splits=np.array([SCHEDULES[one.schedule].splits for one in choices]),
    )


# --------------------------------------------------------------------------------------------------
# Bytes


def partition_bytes(
    prices: UniformCostModel, unit: DegreeTimes, choice: Candidate, parts: Partitions
) -> F64:
    """Return lower bounds of bytes of every stage, shape [stages, policies + 2].

    choice : degrees with their sharding of model states
    """
    states = np.array([prices.states_of(unit, choice)])
    found: F64 = unit.bounds.many_stages_bytes(parts.stages, (choice.zero,), states)[0]
    return found * _ROUNDING


def peaks_of(parts: Partitions, sizes: F64) -> F64:
    """Return the bytes of the peak stage of each partition; sizes : bytes by distinct stage."""
    found: F64 = np.maximum.reduceat(sizes, parts.first, axis=0)
    return found


def early_stages(
    prices: UniformCostModel,
    unit: DegreeTimes,
    staging: StageCandidate,
    rows: Sequence[MicroBatchTimes],
) -> tuple[F64, F64, EarlyStages]:
    """Return the results of `early_bytes` with the embedding, their slopes, and the stages.

    As in `spread_bytes`, a slope is per byte that all layers of the model save less.

    rows : times of each sharding
    """
    engine, number = prices.engine, prices.job.model.num_layers
    v_shaped = any(SCHEDULES[one].v_shaped for one in engine.schedules)
    of_stages = {
        pp: least_early_layers(
            unit.layer_s,
            unit.first_s,
            unit.end_s,
            pp,
            number // pp,
            any_layout=engine.any_layout,
            v_shaped=v_shaped,
        )
        for pp in staging.stages
    }
    layers = np.array([of_stages[pp] for pp in staging.pp.tolist()], dtype=np.float64).T
    stages, sizes = staging.spread, unit.bounds.sizes
    own = sizes.without_activations(stages.states.T[:, :, None])
    found = early_bytes(own, sizes.rows[None], unit.number, layers[:, :, None], stages)
    found[0] += (stages.states @ unit.bounds.embedding)[:, None]
    slopes = stages.early * np.maximum(layers, 1.0)[:, :, None] / unit.number.max()
    early = EarlyStages(
        live=(stages.early * stages.most)[:, :, 0],
        device_s=layers * np.array([one.device_s[-2].min() for one in rows])[staging.of],
        host_s=layers * unit.host_s[-2].min(),
    )
    return found, np.broadcast_to(slopes, found.shape), early


# --------------------------------------------------------------------------------------------------
# Seconds


def exposed_s(unit: DegreeTimes, parts: Partitions) -> F64:
    """Return the seconds of dispatch and combine that a few micro-batches expose, by stage."""
    found: F64 = parts.exposed[parts.at] * (parts.timed @ unit.experts_s)
    return found


def pipeline_s(
    prices: UniformCostModel,
    unit: DegreeTimes,
    choice: Candidate,
    parts: Partitions,
    device: F64,
    host: F64,
) -> F64:
    """Return lower bounds of step seconds from the layer seconds of each stage.

    The result has shape [rows, partitions]. The bound with M micro-batches is the sum of M times
    the slowest stage, one chunk of each other stage, the exposed gradient reduction and the
    optimizer. GPipe schedules are not faster. With deferred weight gradients, the pipeline takes at
    least the work of any one stage after the forwards of one chunk on all earlier stages.

    choice : degrees with their sharding of model states
    device, host : device and host seconds of a stage's layers per micro-batch, shape
        [rows, stages]; `device` is modified in place.
    """
    number, sharded = prices.micro_batches(choice), prices.rows_s(unit, choice)
    device[:, parts.ends[0]] += sharded.first_s
    device[:, parts.ends[1]] += sharded.last_s
    if choice.zero < 3:
        # traffic of ZeRO-3 hides the exchange of tokens, or is hidden by it
        device += exposed_s(unit, parts)
    times = layer_total_s(device, host) + parts.sends_s[parts.at]
    longest = np.maximum.reduceat(times, parts.first, axis=1)
    others = np.add.reduceat(times * parts.times, parts.first, axis=1) - longest
    pipeline = number * longest + others / parts.chunks
    if parts.splits.any():
        forward = parts.stages.layers @ unit.forward_s / parts.chunks[parts.at]
        before = np.cumsum(forward) - forward
        begin = before - before[parts.first][parts.at]
        split = np.maximum.reduceat(number * times + begin, parts.first, axis=1)
        pipeline = np.where(parts.splits, split, pipeline)
    return reduced_s(prices, unit, choice, prices.stragglers * pipeline * _ROUNDING)


def spread_pipeline_s(
    prices: UniformCostModel, staging: StageCandidate, whole_s: F64, longest_s: F64
) -> F64:
    """Return lower bounds of pipeline seconds for any layer partition, by row.

    whole_s, longest_s : micro-batch seconds of the whole model and of its longest stage
    """
    every = whole_s + staging.pp * staging.sends_s
    more = staging.micro_batches - staging.bubbles
    pipeline = more * (longest_s + staging.sends_s) + staging.bubbles * every
    return np.asarray(prices.stragglers * pipeline * _ROUNDING)


def reduced_s(
    prices: UniformCostModel, unit: DegreeTimes, choice: Candidate, seconds: F64 | float
) -> F64:
    """Return lower bounds of step seconds with gradient reduction and optimizer.

    seconds : lower bounds of pipeline seconds, stragglers included
    """
    number, reduction = prices.micro_batches(choice), prices.reduction_s(unit, choice)
    seen = prices.visible_s(reduction, np.asarray(seconds) / prices.stragglers, number)
    seen += prices.tied_s(unit, choice)
    update = prices.update_s(unit, choice)
    return np.asarray(seconds + (prices.stragglers * seen + update) * _ROUNDING)


def words_s(
    prices: UniformCostModel, unit: DegreeTimes, choice: Candidate, parts: Partitions
) -> F64:
    """Return lower bounds of step seconds without offload, shape [policies, partitions]."""
    device, host = (
        rows[:-2] @ parts.timed.T for rows in (prices.rows_s(unit, choice).device_s, unit.host_s)
    )
    return pipeline_s(prices, unit, choice, parts, device, host)


def partly_recomputed_s(
    prices: UniformCostModel,
    unit: DegreeTimes,
    choice: Candidate,
    parts: Partitions,
    lacking_bytes: F64,
) -> F64:
    """Return lower bounds of step seconds by partition, with some layers fully recomputed.

    lacking_bytes : bytes that each distinct stage must free; negative values count as 0
    """
    rows = prices.rows_s(unit, choice)
    freed = np.maximum(0.0, lacking_bytes) / parts.stages.most
    device, host = (
        (each[-2] @ parts.timed.T + freed * more)[None]
        for each, more in zip((rows.device_s, unit.host_s), rows.again[2:], strict=True)
    )
    found: F64 = pipeline_s(prices, unit, choice, parts, device, host)[0]
    return found


def stages_s(
    prices: UniformCostModel, unit: DegreeTimes, choice: Candidate, parts: Partitions
) -> tuple[F64, F64]:
    """Return lower bounds of step seconds, by recomputation policy and by N of `block N`.

    parts : the layer partition of the candidate
    """
    plain, full = slice(-2, -1), slice(-1, None)
    again = arrangement_of(unit, choice).again
    device, host = (
        (rows[plain] @ parts.timed.T)[0] + again @ (rows[full] - rows[plain])[0]
        for rows in (prices.rows_s(unit, choice).device_s, unit.host_s)
    )
    blocks = pipeline_s(prices, unit, choice, parts, device, host)
    return words_s(prices, unit, choice, parts)[:, 0], blocks[:, 0]

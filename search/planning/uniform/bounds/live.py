"""Live micro-batches of the stages of layer partitions, for lower bounds of their memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.arrays import F64
from autopar.pipeline.orders import warmup_chunks
from autopar.pipeline.schedules import SCHEDULES, Schedule, default_group
from search.planning.uniform.layout import Arrangement

_ROUNDING = 1.0 - 1e-9
"""Rounding factor: sums in another order must not exceed the exact ones."""


class LiveMicroBatches(NamedTuple):
    """Live micro-batches of a stage after a forward pass."""

    chunks: F64
    """Number of live micro-batches by model chunk, shape [chunks]."""
    forward: int
    """Index of the model chunk that ran this forward."""


@lru_cache(maxsize=1 << 14)
def live_forwards(
    stage: int,
    *,
    schedule: Schedule,
    stages: int,
    chunks: int,
    micro_batches: int,
) -> LiveMicroBatches:
    """Return the live micro-batches of a stage at their maximum, after a forward pass.

    For 1F1B and interleaved 1F1B, this is the last forward before the first backward. It is a lower
    bound if expert communication overlaps with another micro-batch: then the warm-up has one
    forward more, and later forwards are merged with a backward that frees their bytes.
    """
    behind = stages - stage - 1
    if schedule in ("gpipe", "looped_bfs"):
        return LiveMicroBatches(np.full(chunks, float(micro_batches)), chunks - 1)
    if SCHEDULES[schedule].v_shaped:
        # the last forward of the second chunk before a gradient of it is complete; DualPipeV runs
        # one more forward of the first chunk
        first = stages + behind + (schedule == "dual_pipe_v")
        return LiveMicroBatches(
            np.minimum([float(first), float(stage + 1)], float(micro_batches)), 1
        )
    if chunks == 1:
        return LiveMicroBatches(np.array([float(min(behind + 1, micro_batches))]), 0)
    group = default_group(stages, micro_batches)
    warm = warmup_chunks(
        schedule,
        stage,
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        group=group,
    )
    # one more forward for each deferred weight gradient
    waiting = stage if SCHEDULES[schedule].splits else 0
    number = min(warm + 1 + waiting, micro_batches * chunks)
    groups, rest = divmod(number, group * chunks)
    places = np.arange(chunks) * group
    live = groups * group + np.clip(rest - places, 0, group)
    return LiveMicroBatches(live.astype(np.float64), (number - 1) % (group * chunks) // group)


class SpreadLive(NamedTuple):
    """Lower bounds of the live micro-batches of stages, for any layer partition."""

    levels: F64
    """Live micro-batches in the mean over the layers of a stage, shape [levels].

    They are in ascending order; levels without a stage repeat the last one."""
    times: F64
    """Number of stages by level, shape [levels]."""
    least: float
    most: float
    """Smallest and largest ratio of the live micro-batches of a layer to the level of its stage."""
    early: tuple[float, float]
    """Live micro-batches in the mean over the layers of the first and of the second stage."""


_LEVELS = 16
"""Levels of `SpreadLive`; of more stages, several share the smallest of their levels."""


@lru_cache(maxsize=1 << 14)
def spread_live(
    stages: int, micro_batches: int, pipelines: tuple[tuple[Schedule, int], ...] = ()
) -> SpreadLive:
    """Return the live micro-batches that all layer partitions of some pipelines have at least.

    The v chunks of a stage have q or q + 1 layers, q >= 1 (`search.planning.uniform.layout`). They
    have l_1 <= l_2 <= ... live micro-batches, L in sum. If r chunks are longer, the mean over
    layers is at least (q L + l_1 + ... + l_r) / (q v + r). It is smallest for q = 1. Stage k of p
    has at least p - k in any pipeline.

    pipelines : (schedule, chunks per stage); empty for any.
    """
    means, ends = [], []
    for schedule, chunks in pipelines:
        live = np.sort(
            [
                live_forwards(
                    stage,
                    schedule=schedule,
                    stages=stages,
                    chunks=chunks,
                    micro_batches=micro_batches,
                ).chunks
                for stage in range(stages)
            ],
            axis=1,
        )
        longer = np.cumsum(live, axis=1) - live + live.sum(axis=1, keepdims=True)
        means.append((longer / (chunks + np.arange(chunks))).min(axis=1))
        ends.append((live[:, 0], live[:, -1]))
    mean = np.min(means, axis=0) if pipelines else np.arange(stages, 0, -1.0)
    order = np.argsort(mean)
    alike = np.array_split(order, min(stages, _LEVELS))
    levels, times = (np.array([of(mean[one]) for one in alike], float) for of in (np.min, len))
    ratios = np.array(ends or [(mean, mean)])[:, :, order] / np.repeat(levels, times.astype(int))
    further = (0, _LEVELS - len(levels))
    return SpreadLive(
        levels=np.pad(levels, further, mode="edge"),
        times=np.pad(times, further),
        least=float(ratios[:, 0].min()),
        most=float(ratios[:, 1].max()),
        early=(float(mean[0]), float(mean[min(1, stages - 1)])),
    )


class SpreadStages(NamedTuple):
    """Stages with shardings of model states, whose memory is bounded for any layer partition."""

    states: F64
    """Results of `UniformCostModel.states_of`, shape [rows, 5]."""
    levels: F64
    times: F64
    """`SpreadLive.levels` and `times`, shape [rows, levels]."""
    first: F64
    last: F64
    """Smallest and largest of the levels, shape [rows, 1]."""
    least: F64
    most: F64
    """`SpreadLive.least` and `most`, shape [rows, 1]."""
    early: F64
    """`SpreadLive.early`, shape [2, rows, 1]."""


def spread_stages(states: F64, live: Sequence[SpreadLive]) -> SpreadStages:
    """Return stages and shardings as arrays; states, live : values by row."""
    levels = np.array([one.levels for one in live]).reshape(-1, _LEVELS)
    return SpreadStages(
        states=states,
        levels=levels,
        times=np.array([one.times for one in live]).reshape(-1, _LEVELS),
        first=levels[:, :1],
        last=levels[:, -1:],
        least=np.array([one.least for one in live]).reshape(-1, 1),
        most=np.array([one.most for one in live]).reshape(-1, 1),
        early=np.array([one.early for one in live]).reshape(-1, 2).T[:, :, None],
    )


def spread_bytes(own: F64, saved: F64, number: F64, stages: SpreadStages) -> tuple[F64, F64]:
    """Return lower bounds of the peak stage's bytes for any layer partition, and their slopes.

    Both results have shape [rows, policies + 2]. The slope is the largest reduction of the bound
    per byte of b_t.

    The bound is a weighted mean over stages, which the peak stage cannot be below. Stage k has at
    least l_k live micro-batches in the mean over its layers, and r l_k to s l_k of any one. The n_t
    layers of type t have w_t bytes without activations, and a_t bytes of activations per
    micro-batch. With a = a_u of any type u, let b_t = a + r (a_t - a)+ - s (a - a_t)+. The
    activations of a stage are at least l_k times the sum of b_t over its layers. With weights g_k
    of the stages, the mean is at least sum_t n_t min_k g_k (w_t + l_k b_t).

    own : w_t, shape [rows, layer types]
    saved : a_t, shape [rows or 1, policies + 2, layer types]
    number : n_t, shape [layer types]
    """
    count = number.sum()
    if len(number) > 1:
        saved = _even_saved(saved, int(number.argmax()), stages)
    mean_own = (own @ number / count)[:, None]
    mean_saved = np.maximum(0.0, saved @ number / count)
    shares = 1.0 / (mean_own[:, :, None] + mean_saved[:, :, None] * stages.levels[:, None])
    whole = np.matmul(shares, stages.times[:, :, None])[:, :, 0]
    found = count / whole
    if len(number) > 1:
        # the share (w + l b) / (mean w + l mean b) of a layer is monotone in its live micro-batches
        # l, so its minimum is at an end of the range
        first, last = (
            (own[:, None] + some[:, :, None] * saved) / (mean_own + some * mean_saved)[:, :, None]
            for some in (stages.last, stages.first)
        )
        found = np.minimum(first, last) @ number / whole
    # max of g_k l_k: l / (mean w + l mean b) is largest for the most live micro-batches
    most = stages.last / (mean_own + stages.last * mean_saved) / whole
    return found * _ROUNDING, most


def early_bytes(own: F64, saved: F64, number: F64, layers: F64, stages: SpreadStages) -> F64:
    """Return lower bounds of the bytes of the first and second stage, [2, rows, policies + 2].

    All layers but those of other types are of the most frequent type u, of w_u + l a_u bytes each.
    Layers of other types count without activations.

    own, saved, number : as in `spread_bytes`
    layers : fewest layers of both stages, shape [2, rows, 1]
    """
    usual = int(number.argmax())
    live = stages.early if len(number) == 1 else stages.early * stages.least
    each = own[:, usual : usual + 1] + live * saved[:, :, usual]
    others = np.where(np.arange(len(number)) == usual, 0.0, number)
    less = np.maximum(0.0, each[..., None] - own[:, None]) @ others
    return np.asarray((layers * each - less) * _ROUNDING)


def _even_saved(saved: F64, usual: int, stages: SpreadStages) -> F64:
    """Return the b_t of `spread_bytes`, shape [rows, policies + 2, types].

    saved : bytes of saved activations, shape [rows or 1, policies + 2, types]
    usual : index of the type with the most layers
    """
    more = saved - saved[:, :, usual : usual + 1]
    ratio = np.where(more > 0, stages.least[:, :, None], stages.most[:, :, None])
    return np.asarray(saved - more + ratio * more)


class StageEnds(NamedTuple):
    """Properties of a stage that decide its buffers and transient bytes."""

    present: tuple[bool, ...]
    """True for the layer types of the stage."""
    first: bool
    last: bool
    """True for the stages with embedding and with head."""
    forward: int
    """Type index of the last layer of the forward with the most live micro-batches."""
    head: bool
    """True if that forward contains the head."""
    final: int
    """Type index of the last layer of the last chunk."""


class StageRows(NamedTuple):
    """Distinct stages of layer partitions, one per row, with their live micro-batches."""

    layers: F64
    """Number of layers, shape [rows, layer types]."""
    live: F64
    """Live micro-batches summed over layers, shape [rows, layer types]."""
    again: tuple[F64, ...]
    """`live` of the layers that `block N` recomputes, by row, shape [N, layer types]."""
    most: F64
    """Largest number of live micro-batches of a chunk, shape [rows]."""
    ends: tuple[StageEnds, ...]


@lru_cache(maxsize=1 << 14)
def stage_rows(
    arrangement: Arrangement, *, schedule: Schedule, stages: int, chunks: int, micro_batches: int
) -> StageRows:
    """Return the distinct stages of a layer partition with their live micro-batches."""
    lives = [
        live_forwards(
            stage, schedule=schedule, stages=stages, chunks=chunks, micro_batches=micro_batches
        )
        for stage in arrangement.at
    ]
    return StageRows(
        layers=arrangement.layers.astype(np.float64),
        live=np.array(
            [live.chunks @ own for live, own in zip(lives, arrangement.chunks, strict=True)]
        ),
        again=tuple(
            live.chunks @ own for live, own in zip(lives, arrangement.chunks_again, strict=True)
        ),
        most=np.array([live.chunks.max() for live in lives]),
        ends=tuple(
            StageEnds(
                present=tuple((layers > 0).tolist()),
                first=place == arrangement.ends[0],
                last=place == arrangement.ends[1],
                forward=arrangement.final[place][live.forward],
                head=place == arrangement.ends[1] and live.forward == chunks - 1,
                final=arrangement.final[place][-1],
            )
            for place, (live, layers) in enumerate(zip(lives, arrangement.layers, strict=True))
        ),
    )

"""Layer partitions in the search: assignments of layers to pipeline stages and chunks.

The search tries the even default partitions of engines, with embedding and head counted as a layer
or not, and one balanced partition, which minimises the time of the slowest stage. The balanced
partition is tried only if the layers of the largest stage divide evenly into its chunks. Uneven
chunks would make neighbouring stages wait, which a step time computed from whole stages does not
include. Chunks do not begin with a layer that reuses the keys of an earlier one: stages of the
balanced partition begin at the nearest other layer. Step times of partitions are computed in
`search.planning.uniform.cost_model`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from autopar.arrays import F64
from autopar.errors import InputError
from autopar.pipeline.orders import part_of
from autopar.pipeline.placement import equal_layer_counts, spread_count
from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.records import Record
from autopar.run.strategy import Chunk, chunks_of_sizes, even_chunks

Layout = tuple[tuple[Chunk, ...], ...]
"""Model chunks of every pipeline stage."""
_ENDS = ((0, 0), (1, 1), (0, 1), (1, 0))
"""(embedding, head) sizes assumed in even partitions, layers."""
_MOST_LAYOUTS = 1 << 14
"""Cache size, layer partitions."""


def layouts(
    layer_s: Sequence[float],
    first_s: float,
    last_s: float,
    stages: int,
    chunks: int,
    *,
    mtp: int = 0,
    any_layout: bool = True,
    schedule: Schedule = "1f1b",
    reused: Sequence[bool] = (),
) -> Iterator[Layout]:
    """Yield the distinct layer partitions to try for a number of stages and of chunks per stage.

    layer_s : seconds of every layer in execution order
    first_s, last_s : seconds of the embedding, and of everything after the last layer
    mtp : number of MTP modules
    any_layout : True adds the balanced partition, if the engine supports uneven partitions
    schedule : only its placement of chunks on stages is used
    reused : True for layers that no chunk may begin with (`Model.reused`); empty: none
    """
    number, v_shaped = len(layer_s), SCHEDULES[schedule].v_shaped
    if stages == 1:
        if chunks == 1:
            yield _of_sizes((number,), 1, mtp)
        return
    # all schedules that are not V-shaped place chunks alike and share cached layouts
    placed = schedule if v_shaped else None
    seen = _even(number, stages, chunks, mtp, placed)
    if any(reused):
        seen = tuple(
            one
            for one in seen
            if not any(reused[chunk.layers[0]] for stage in one for chunk in stage)
        )
    yield from seen
    if any_layout:
        sizes = balanced_sizes(layer_s, first_s, last_s, stages, chunks, schedule)
        if sizes is not None and any(reused):
            sizes = _with_starts(sizes, reused) if chunks == 1 else None
        if sizes is not None:
            found = _of_sizes(tuple(sizes), stages, mtp, placed)
            if found not in seen:
                yield found


@lru_cache(maxsize=_MOST_LAYOUTS)
def _of_sizes(
    sizes: tuple[int, ...], stages: int, mtp: int, schedule: Schedule | None = None
) -> Layout:
    return chunks_of_sizes([*sizes], stages, mtp=mtp, schedule=schedule)


@lru_cache(maxsize=_MOST_LAYOUTS)
def _even(
    number: int, stages: int, chunks: int, mtp: int, schedule: Schedule | None
) -> tuple[Layout, ...]:
    seen: list[Layout] = []
    for ends in _ENDS:
        with suppress(InputError):
            found = even_chunks(number, stages, chunks, mtp=mtp, ends=ends, schedule=schedule)
            if min(len(chunk.layers) for stage in found for chunk in stage) > 0:
                seen.append(found)
    return tuple(seen)


def balanced_sizes(
    layer_s: Sequence[float],
    first_s: float,
    last_s: float,
    stages: int,
    chunks: int,
    schedule: Schedule = "1f1b",
) -> list[int] | None:
    """Return the number of layers of every chunk that minimises the time of the slowest stage.

    Chunks are in execution order. None if there are fewer layers than chunks, or if the layers of
    the largest stage do not divide evenly into its chunks.

    chunks : chunks per stage; other parameters as in `layouts`.
    """
    parts = stages * chunks
    if len(layer_s) < parts:
        return None
    # median layer time; layers of other types, such as dense layers of MoE models, come first
    usual = sorted(layer_s)[len(layer_s) // 2]
    around = [0.0] * stages
    around[0] += first_s + sum(seconds - usual for seconds in layer_s[: len(layer_s) // parts])
    around[0 if SCHEDULES[schedule].v_shaped else -1] += last_s
    counts = _counts(tuple(around), usual, len(layer_s), 1)
    if min(counts) < chunks:
        counts = _counts(tuple(around), usual, len(layer_s), chunks)
    if max(counts) % chunks:
        return None
    sizes = [0] * parts
    for stage, count in enumerate(counts):
        for chunk, size in enumerate(spread_count(schedule, stage, count, chunks)):
            sizes[part_of(schedule, stage, chunk, stages)] = size
    return sizes


def least_early_layers(
    layer_s: Sequence[float],
    first_s: float,
    last_s: float,
    stages: int,
    chunks: int,
    *,
    any_layout: bool = True,
    v_shaped: bool = False,
) -> tuple[int, int]:
    """Return the fewest layers of the first and of the second stage in any result of `layouts`.

    The second stage counts as empty if it is the last one.

    chunks : largest number of chunks per stage
    v_shaped : True if the first stage may hold the head
    """
    number = len(layer_s)
    if stages == 1:
        return number, 0
    found = [
        (total // stages - ends[0] - v_shaped * ends[1], total // stages)
        for ends in _ENDS
        if not (total := number + sum(ends)) % stages
    ]
    if any_layout:
        usual = sorted(layer_s)[number // 2]
        sums = [0.0, *accumulate(seconds - usual for seconds in layer_s[: number // stages])]
        longest = (number // (stages * one) for one in range(1, chunks + 1))
        for begin in {first_s + sums[one] for one in longest}:
            for at in (0, -1) if v_shaped else (-1,):
                around = [begin, *(0.0 for _ in range(stages - 1))]
                around[at] += last_s
                counts = _counts(tuple(around), usual, number, 1)
                found.append((counts[0], counts[1]))
                for least in range(min(counts) + 1, chunks + 1):
                    counts = _counts(tuple(around), usual, number, least)
                    found.append((counts[0], counts[1]))
    first, second = map(min, zip(*found, strict=True)) if found else (0, 0)
    return first, second if stages > 2 else 0


def _with_starts(sizes: Sequence[int], reused: Sequence[bool]) -> list[int] | None:
    """Return sizes of stages that begin at the nearest layer that is not reused, or None."""
    allowed = [layer for layer, one in enumerate(reused) if not one]
    starts = [
        min(allowed, key=lambda layer: abs(layer - start)) for start in accumulate(sizes, initial=0)
    ]
    starts[-1] = len(reused)
    found = [end - start for start, end in pairwise(starts)]
    return found if min(found) > 0 else None


@lru_cache(maxsize=_MOST_LAYOUTS)
def _counts(around_s: tuple[float, ...], each_s: float, number: int, least: int) -> list[int]:
    """Return `equal_layer_counts` with at least `least` layers per stage."""
    return equal_layer_counts(around_s, each_s, number, [least] * len(around_s))


# --------------------------------------------------------------------------------------------------
# Layer partitions by layer type


class Arrangement(Record, eq=False):
    """Layer partition as numbers of layers by type; equal stages are stored once.

    The recomputation policy `block N` recomputes the first N layers of each chunk; N is 0 to
    `longest`.
    """

    layers: F64
    """Number of layers, shape [stages, layer types]."""
    again: F64
    """Number of layers that `block N` recomputes, shape [N, stages, layer types]."""
    times: F64
    """Number of pipeline stages per stored stage; 1 for the first and for the last."""
    ends: tuple[int, int]
    """Indices of the stored stages with embedding and with head."""
    at: tuple[int, ...]
    """Index of the first pipeline stage of each stored stage.

    Of equal stages it has the most live micro-batches."""
    chunks: tuple[F64, ...]
    """Number of layers by stored stage, each of shape [chunks, layer types]."""
    chunks_again: tuple[F64, ...]
    """Number of layers that `block N` recomputes, by stored stage.

    Each array has shape [N, chunks, layer types]."""
    final: tuple[tuple[int, ...], ...]
    """Type index of the last layer of each chunk, by stored stage."""
    longest: int
    """Largest number of layers of a chunk."""


@lru_cache(maxsize=_MOST_LAYOUTS)
def arranged(layout: Layout, kinds: tuple[int, ...], *, apart: bool = False) -> Arrangement:
    """Return a layer partition as numbers of layers by type.

    kinds : type index of every layer
    apart : True stores equal stages separately; required by schedules in which the first of equal
        stages does not always have the most live micro-batches
    """
    number = max(kinds) + 1
    of_stages = [
        tuple(tuple(kinds[layer] for layer in chunk.layers) for chunk in stage) for stage in layout
    ]
    longest = max(len(chunk) for stage in of_stages for chunk in stage)
    places: dict[object, int] = {}
    counts: list[F64] = []
    times: list[int] = []
    first: list[int] = []
    ends = [0, 0]
    for at, stage in enumerate(of_stages):
        embeds = any(chunk.embeds for chunk in layout[at])
        heads = any(chunk.head for chunk in layout[at])
        key = (stage, embeds, heads, apart and at)
        if key not in places:
            places[key] = len(counts)
            # counts of the first N layers, shape [chunks, N, layer types]
            counts.append(np.stack([_prefixes(chunk, number, longest) for chunk in stage]))
            times.append(0)
            first.append(at)
        times[places[key]] += 1
        for end, there in enumerate((embeds, heads)):
            if there:
                ends[end] = places[key]
    summed = np.stack([one.sum(axis=0) for one in counts], axis=1)
    return Arrangement(
        layers=summed[-1],
        again=summed,
        times=np.array(times, dtype=np.float64),
        ends=(ends[0], ends[1]),
        at=tuple(first),
        chunks=tuple(one[:, -1] for one in counts),
        chunks_again=tuple(one.swapaxes(0, 1) for one in counts),
        final=tuple(tuple(chunk[-1] for chunk in of_stages[at]) for at in first),
        longest=longest,
    )


@lru_cache(maxsize=_MOST_LAYOUTS)
def _prefixes(chunk: tuple[int, ...], kinds: int, longest: int) -> F64:
    """Return layers by type among the first N of a chunk, shape [longest + 1, layer types]."""
    found = np.zeros((longest + 1, kinds))
    for place in range(longest):
        found[place + 1] = found[place]
        if place < len(chunk):
            found[place + 1, chunk[place]] += 1
    return found

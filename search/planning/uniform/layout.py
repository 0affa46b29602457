"""Where layers lie: the chunks of a pipeline that a choice of stages can have, and what they hold.

Even chunks as trainers make them by themselves, with embedding and head counted as a layer or not,
and one layout whose longest stage is shortest. Where that stage's layers do not divide into its
chunks there is no such layout: chunks of a stage take turns, and those that are one layer short
would let its neighbours wait, which a step time that knows stages alone does not see. What a layout
takes is `search.planning.uniform.prices`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache

import numpy as np

from autopar.arrays import F64
from autopar.errors import InputError
from autopar.pipeline.orders import part_of
from autopar.pipeline.placement import alike_counts, spread_count
from autopar.pipeline.schedules import SCHEDULES, Schedule
from autopar.records import Record
from autopar.run.strategy import Chunk, chunks_of_sizes, even_chunks

Layout = tuple[tuple[Chunk, ...], ...]
"""Chunks of every stage."""
_ENDS = ((0, 0), (1, 1), (0, 1), (1, 0))
"""For how many layers embedding and head count."""
_MOST_LAYOUTS = 1 << 14


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
) -> Iterator[Layout]:
    """Yield the layouts that are tried of so many stages and chunks of each, no two alike.

    layer_s : seconds of every layer in execution order; first_s, last_s : of embedding and head.
    schedule : of it only which stage comes behind which is asked for.
    """
    number, v_shaped = len(layer_s), SCHEDULES[schedule].v_shaped
    if stages == 1:
        if chunks == 1:
            yield _of_sizes((number,), 1, mtp)
        return
    # of schedules whose stages follow each other alike, the layouts are the same
    placed = schedule if v_shaped else None
    seen = _even(number, stages, chunks, mtp, placed)
    yield from seen
    if any_layout:
        sizes = balanced_sizes(layer_s, first_s, last_s, stages, chunks, schedule)
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
    """Return the layers of every chunk in execution order, so that the longest stage is short.

    None: a chunk would be empty, or the layers of the longest stage do not divide into its chunks.
    """
    parts = stages * chunks
    if len(layer_s) < parts:
        return None
    # what most layers take; the others are few, in front of them
    usual = sorted(layer_s)[len(layer_s) // 2]
    around = [0.0] * stages
    around[0] += first_s + sum(seconds - usual for seconds in layer_s[: len(layer_s) // parts])
    around[0 if SCHEDULES[schedule].v_shaped else -1] += last_s
    counts = alike_counts(around, usual, len(layer_s), [chunks] * stages)
    if max(counts) % chunks:
        return None
    sizes = [0] * parts
    for stage, count in enumerate(counts):
        for chunk, size in enumerate(spread_count(schedule, stage, count, chunks)):
            sizes[part_of(schedule, stage, chunk, stages)] = size
    return sizes


# --------------------------------------------------------------------------------------------------
# Layouts by the kinds of their layers


class Arrangement(Record, eq=False):
    """A layout by how many layers of each kind its stages have, stages that are alike once.

    `again` is what `block N` computes again, the first N of each chunk, for N from 0 to the layers
    of the longest chunk.
    """

    layers: F64
    """[stage, kind]"""
    again: F64
    """[N, stage, kind]"""
    times: F64
    """Of each stage how many there are: 1 of the first and of the last."""
    ends: tuple[int, int]
    """Where the stages with embedding and with head are in these arrays."""
    at: tuple[int, ...]
    """The first of the stages that are alike, which has the most micro-batches live."""
    chunks: tuple[F64, ...]
    """Of each stage: [chunk, kind]."""
    chunks_again: tuple[F64, ...]
    """[N, chunk, kind]"""
    final: tuple[tuple[int, ...], ...]
    """Of each stage, the kinds of the last layers of its chunks."""
    longest: int
    """Layers of a chunk at the most."""


@lru_cache(maxsize=_MOST_LAYOUTS)
def arranged(layout: Layout, kinds: tuple[int, ...], *, apart: bool = False) -> Arrangement:
    """Return a layout by kinds of layers; `kinds` are those of the model's, counted from 0.

    apart : each stage is one of its own, since what is live is not the most on the first.
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
            # [chunk, N, kind]: of the first N layers
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
    """Return [N, kind]: of the first N layers of a chunk, how many are of each kind."""
    found = np.zeros((longest + 1, kinds))
    for place in range(longest):
        found[place + 1] = found[place]
        if place < len(chunk):
            found[place + 1, chunk[place]] += 1
    return found

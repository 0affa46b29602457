"""Partition of layers over pipeline chunks that minimises the time of the longest stage.

The longest stage sets the pace of a pipeline. Layers are divided, in the order of the model,
into parts, one per model chunk. The embedding precedes them; MTP layers and the head follow.
Step times of a given partition are in `autopar.pipeline.formulas`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from autopar.errors import InputError
from autopar.pipeline.orders import rank_of
from autopar.pipeline.schedules import SCHEDULES, Schedule, schedule_of_chunks
from autopar.records import Record

_MOVES = 200
"""Maximum number of single-layer moves; few are needed in practice."""


class Placement(Record):
    """Partition of layers over pipeline parts, in the order of the model."""

    sizes: tuple[int, ...]
    """Number of layers of every part."""
    mtp: tuple[int, ...]
    """Number of MTP layers of every part."""
    stage_s: tuple[float, ...]
    """Seconds of a micro-batch on every stage."""
    exact: bool
    """True if no other allowed partition has a shorter longest stage; False if the partition was
    found by moves of single layers."""


def stage_seconds(
    sizes: Sequence[int],
    mtp: Sequence[int],
    layer_s: Sequence[float],
    *,
    stages: int,
    schedule: Schedule,
    embedding_s: float = 0.0,
    head_s: float = 0.0,
    mtp_s: float = 0.0,
) -> tuple[float, ...]:
    """Return the seconds of a micro-batch on every stage, with embedding, MTP layers and head.

    sizes, mtp : numbers of layers and of MTP layers of every part, in the order of the model.
    layer_s, mtp_s : seconds of every layer, and of one MTP layer.
    """
    found = [0.0] * stages
    first = 0
    for part, (size, further) in enumerate(zip(sizes, mtp, strict=True)):
        rank = rank_of(schedule, part, stages)
        found[rank] += math.fsum(layer_s[first : first + size]) + further * mtp_s
        first += size
    found[rank_of(schedule, 0, stages)] += embedding_s
    found[rank_of(schedule, len(sizes) - 1, stages)] += head_s
    return tuple(found)


def place_layers(
    layer_s: Sequence[float],
    *,
    stages: int,
    chunks: int = 1,
    schedule: Schedule | None = None,
    embedding_s: float = 0.0,
    head_s: float = 0.0,
    mtp: int = 0,
    mtp_s: float = 0.0,
    least_layers: int = 1,
) -> Placement:
    """Return the partition with the shortest longest stage.

    layer_s : seconds of every layer in the order of the model, forward and backward of a
        micro-batch.
    embedding_s, head_s : seconds of the embedding and of the head.
    mtp, mtp_s : number of MTP layers, and seconds of one. All of them share a part between the last
        layer and the head.
    least_layers : minimum layers of a part. If it is 0, parts may be empty, and embedding, MTP
        layers and head may have separate parts, the last two of the pipeline at most (Megatron-LM's
        layout).

    Exact with one chunk per stage, and with equal layers. Unequal layers in several chunks are
    moved one by one off the longest stage while that helps. Raises InputError for too few layers.
    """
    parts = stages * chunks
    if stages < 1 or chunks < 1:
        raise InputError(f"stages({stages}) and chunks({chunks}) must be at least 1")
    if len(layer_s) < max(parts * least_layers, 1):
        raise InputError(
            f"{len(layer_s)} layers are fewer than {least_layers} for each of "
            f"{parts} pipeline chunks"
        )
    ends = _PartitionInputs(
        stages=stages,
        chunks=chunks,
        schedule=schedule or schedule_of_chunks(chunks),
        layer_s=tuple(map(float, layer_s)),
        embedding_s=embedding_s,
        head_s=head_s,
        mtp=mtp,
        mtp_s=mtp_s,
        least=least_layers,
    )
    alike = len(set(ends.layer_s)) == 1
    best: Placement | None = None
    for bare, further in _tails(parts, mtp, least_layers):
        sizes = ends.cut(bare, further, alike=alike)
        if sizes is None:
            continue
        found = Placement(
            sizes=tuple(sizes),
            mtp=further,
            stage_s=ends.stage_s(sizes, further),
            exact=chunks == 1 or alike,
        )
        # ties of the longest stage: shorter other stages, then fewer parts without layers
        if best is None or sorted(found.stage_s, reverse=True) < sorted(best.stage_s, reverse=True):
            best = found
    assert best is not None, "with as many layers as parts there is a placement"
    return best


def equal_layer_counts(
    around_s: Sequence[float], each_s: float, number: int, parts: Sequence[int], *, least: int = 1
) -> list[int]:
    """Return the number of layers of every stage, for `number` equal layers of `each_s` seconds.

    around_s : seconds of every stage without layers.
    parts : number of parts of every stage that hold layers.
    least : minimum layers of such a part.

    Each layer goes to the stage that is shortest with it, in a tie to the one nearest the middle.
    No exchange of a layer then shortens the longest stage.
    """
    counts = [least * own for own in parts]
    stages = len(counts)
    if each_s > 0.0:
        # layers that end well before the mean go to their stages in whatever order
        mean_s = (sum(around_s) + number * each_s) / stages
        most = [int((mean_s - one) / each_s - 1.5) for one in around_s]
        early = [max(*both) if own else 0 for own, *both in zip(parts, counts, most, strict=True)]
        if sum(early) + stages <= number:
            counts = early
    queue = [
        (around_s[at] + counts[at] * each_s, abs(2 * at - stages + 1), at)
        for at in range(stages)
        if parts[at]
    ]
    heapq.heapify(queue)
    for _ in range(number - sum(counts)):
        _, middle, at = queue[0]
        counts[at] += 1
        heapq.heapreplace(queue, (around_s[at] + counts[at] * each_s, middle, at))
    return counts


def spread_count(schedule: Schedule, stage: int, count: int, parts: int) -> list[int]:
    """Return the number of layers of each part of a stage, `count` in total.

    On the first stage later parts are longer, on the last one earlier parts, because the others
    hold embedding and head. In V-shaped schedules the first stage holds both.
    """
    if not parts:
        return []
    base, more = divmod(count, parts)
    longer = stage == 0 and not SCHEDULES[schedule].v_shaped
    sizes = [base + 1] * more + [base] * (parts - more)
    return sizes[::-1] if longer else sizes


def _tails(parts: int, mtp: int, least: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (number of final parts without layers, MTP layers of each part).

    The last part has the head, with or without layers. MTP layers share that part or the part
    before it.
    """
    beside = (0,) * (parts - 1)
    yield 0, (*beside, mtp)
    if least or parts == 1:
        return
    yield 1, (*beside, mtp)
    if mtp:
        yield 1, (*beside[1:], mtp, 0)
        if parts > 2:
            yield 2, (*beside[1:], mtp, 0)


class _PartitionInputs(Record):
    """Inputs of a partition: layer times, embedding, MTP layers, head, and the pipeline."""

    stages: int
    chunks: int
    schedule: Schedule
    layer_s: tuple[float, ...]
    embedding_s: float
    head_s: float
    mtp: int
    mtp_s: float
    least: int

    def stage_s(self, sizes: Sequence[int], mtp: Sequence[int]) -> tuple[float, ...]:
        """Return the seconds of a micro-batch on every stage."""
        return stage_seconds(
            sizes,
            mtp,
            self.layer_s,
            stages=self.stages,
            schedule=self.schedule,
            embedding_s=self.embedding_s,
            head_s=self.head_s,
            mtp_s=self.mtp_s,
        )

    def cut(self, bare: int, mtp: Sequence[int], *, alike: bool) -> list[int] | None:
        """Return the layer count of every part, 0 in the last `bare`; None for too few layers."""
        parts = self.stages * self.chunks
        filled = parts - bare
        if len(self.layer_s) < filled * self.least or filled < 1:
            return None
        around = self.stage_s([0] * parts, mtp) if bare == parts else self._around(mtp)
        if alike:
            return self._alike(around, filled)
        if self.chunks == 1:
            return self._one_chunk(around, filled)
        return self._improved(self._alike(around, filled), mtp, filled)

    def _around(self, mtp: Sequence[int]) -> list[float]:
        """Return the seconds of embedding, MTP layers and head on every stage."""
        found = [0.0] * self.stages
        for part, further in enumerate(mtp):
            found[rank_of(self.schedule, part, self.stages)] += further * self.mtp_s
        found[rank_of(self.schedule, 0, self.stages)] += self.embedding_s
        found[rank_of(self.schedule, len(mtp) - 1, self.stages)] += self.head_s
        return found

    def _alike(self, around: Sequence[float], filled: int) -> list[int]:
        """Return the partition of equal layers over the first `filled` parts."""
        own: list[list[int]] = [[] for _ in range(self.stages)]
        for part in range(filled):
            own[rank_of(self.schedule, part, self.stages)].append(part)
        each = math.fsum(self.layer_s) / len(self.layer_s)
        counts = equal_layer_counts(
            around, each, len(self.layer_s), [*map(len, own)], least=self.least
        )
        sizes = [0] * (self.stages * self.chunks)
        for stage, (count, parts) in enumerate(zip(counts, own, strict=True)):
            spread = spread_count(self.schedule, stage, count, len(parts))
            for part, size in zip(parts, spread, strict=True):
                sizes[part] = size
        return sizes

    def _one_chunk(self, around: Sequence[float], filled: int) -> list[int]:
        """Return the exact partition of one chunk per stage, by bisection of the longest stage.

        A greedy fill up to a limit leaves the fewest layers for later parts. A limit at which it
        fails is therefore infeasible.
        """
        until = [0.0, *accumulate(self.layer_s)]

        def load(part: int, at: int, end: int) -> float:
            return around[part] + (until[end] - until[at])

        def fill(limit: float) -> list[int] | None:
            if limit < max(around):
                return None
            sizes, at = [], 0
            for part in range(filled):
                # layers reserved for the minimum of later parts
                most = len(self.layer_s) - (filled - part - 1) * self.least
                end = at + self.least
                while end < most and load(part, at, end + 1) <= limit:
                    end += 1
                if load(part, at, end) > limit:
                    return None
                sizes.append(end - at)
                at = end
            return sizes if at == len(self.layer_s) else None

        def longest(sizes: Sequence[int]) -> float:
            cuts = pairwise([0, *accumulate(sizes)])
            return max(*around, *(load(part, *cut) for part, cut in enumerate(cuts)))

        best = fill(math.inf)
        assert best is not None, "there are enough layers"
        low, high = max(around), longest(best)
        while True:
            # bisect the interval, then try the next smaller float
            middle = (low + high) / 2
            if not low < middle < high:
                middle = math.nextafter(high, 0.0)
            found = fill(middle)
            if found is not None:
                best, high = found, longest(found)
            elif middle >= math.nextafter(high, 0.0):
                break
            else:
                low = middle
        return [*best, *[0] * (self.stages - filled)]

    def _improved(self, sizes: list[int], mtp: Sequence[int], filled: int) -> list[int]:
        """Return the partition after moves of single layers that shorten the longest stage."""
        best, seen = sizes, self.stage_s(sizes, mtp)
        for _ in range(_MOVES):
            rank = seen.index(max(seen))
            # the step gets faster only if the longest stage gives a layer away
            givers = [
                part
                for part in range(filled)
                if best[part] > self.least and rank_of(self.schedule, part, self.stages) == rank
            ]
            tried = [
                (giver, taker) for giver in givers for taker in range(filled) if taker != giver
            ]
            found = min(
                (self._moved(best, mtp, *pair) for pair in tried),
                key=lambda each: sorted(each[1], reverse=True),
                default=None,
            )
            if found is None or sorted(found[1], reverse=True) >= sorted(seen, reverse=True):
                break
            best, seen = found
        return best

    def _moved(
        self, sizes: Sequence[int], mtp: Sequence[int], giver: int, taker: int
    ) -> tuple[list[int], tuple[float, ...]]:
        """Return (partition, stage seconds) after moving one layer from giver to taker."""
        tried = list(sizes)
        tried[giver] -= 1
        tried[taker] += 1
        return tried, self.stage_s(tried, mtp)

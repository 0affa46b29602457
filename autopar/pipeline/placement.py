"""Which layers stand on which part of a pipeline, so that the longest stage is shortest.

The pace of a pipeline is that of its longest stage. Layers come in the order of the model and are
cut into as many parts as there are chunks of all stages; the embedding is in front of them, modules
that predict further tokens and the head behind. What a schedule makes of the stages is
`autopar.pipeline.formulas`'.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from autopar.errors import InputError
from autopar.pipeline.orders import rank_of
from autopar.pipeline.schedules import Schedule, schedule_of_chunks
from autopar.records import dataclass

__all__ = ["Placement", "place_layers", "stage_seconds"]

_MOVES = 200
"""Single layers that are moved at most; few are."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where layers stand; parts are in the order of the model."""

    sizes: tuple[int, ...]
    """Layers of every part."""
    mtp: tuple[int, ...]
    """Modules of further tokens of every part."""
    stage_s: tuple[float, ...]
    """Of a micro-batch on every stage."""
    exact: bool
    """No other of the placements that are tried has a shorter longest stage; otherwise it is the
    best that moves of single layers find."""

    @property
    def longest_s(self) -> float:
        """Of the longest stage."""
        return max(self.stage_s)


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
    """Return what a micro-batch takes on every stage, with embedding, further tokens and head."""
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
    """Return the parts whose longest stage is shortest; raises InputError.

    layer_s : seconds of every layer in the order of the model, forward and backward of a
    micro-batch. embedding_s, head_s : of the ends; mtp_s : of one of `mtp` modules of further
    tokens, all of which stand together between the last layer and the head. least_layers : of a
    part; with 0 parts may be empty, and embedding, those modules and head may stand on parts of
    their own, the last two of the pipeline at most, as a layout of Megatron-LM can say it. Exact
    with one chunk a stage, and where layers are alike; of unlike layers in several chunks single
    layers are moved off the longest stage as long as that helps.
    """
    parts = stages * chunks
    if stages < 1 or chunks < 1:
        raise InputError(f"stages({stages}) and chunks({chunks}) are not all 1 or more")
    if len(layer_s) < max(parts * least_layers, 1):
        raise InputError(
            f"{len(layer_s)} layers are fewer than {least_layers} on each of {parts} parts of the "
            "pipeline"
        )
    ends = _Ends(
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
        # of equally long ones the shortest others, and then as few parts without layers
        if best is None or sorted(found.stage_s, reverse=True) < sorted(best.stage_s, reverse=True):
            best = found
    assert best is not None, "with as many layers as parts there is a placement"
    return best


def _tails(parts: int, mtp: int, least: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield how many parts at the end hold no layer, and the further tokens' modules of each part.

    All of them beside the head; before it, beside layers or alone; or the head alone.
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


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """A model to cut: its layers, what stands around them, and the pipeline."""

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
        """Return what a micro-batch takes on every stage."""
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
        """Return the layers of every part, of which the last `bare` have none; None: too few."""
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
        """Return what stages take without layers."""
        found = [0.0] * self.stages
        for part, further in enumerate(mtp):
            found[rank_of(self.schedule, part, self.stages)] += further * self.mtp_s
        found[rank_of(self.schedule, 0, self.stages)] += self.embedding_s
        found[rank_of(self.schedule, len(mtp) - 1, self.stages)] += self.head_s
        return found

    def _alike(self, around: Sequence[float], filled: int) -> list[int]:
        """Return parts of equal layers: each goes to the stage that is shortest with it.

        No exchange of a layer then shortens the longest stage. Of equally long stages the middle
        ones come first, and the layers of a stage are spread over its parts.
        """
        each = math.fsum(self.layer_s) / len(self.layer_s)
        own: list[list[int]] = [[] for _ in range(self.stages)]
        for part in range(filled):
            own[rank_of(self.schedule, part, self.stages)].append(part)
        counts = [self.least * len(parts) for parts in own]
        middle = [abs(2 * stage - self.stages + 1) for stage in range(self.stages)]
        for _ in range(len(self.layer_s) - sum(counts)):
            at = min(
                (stage for stage in range(self.stages) if own[stage]),
                key=lambda stage: (around[stage] + (counts[stage] + 1) * each, middle[stage]),
            )
            counts[at] += 1
        sizes = [0] * (self.stages * self.chunks)
        for count, parts in zip(counts, own, strict=True):
            for place, part in enumerate(parts):
                base, more = divmod(count, len(parts))
                # embedding and head make the outer parts long enough
                late = place >= len(parts) - more if parts[0] == 0 else place < more
                sizes[part] = base + late
        return sizes

    def _one_chunk(self, around: Sequence[float], filled: int) -> list[int]:
        """Return the parts of one chunk a stage: the shortest limit that filling up keeps; exact.

        Filling every part as far as a limit allows leaves the fewest layers behind, so that a limit
        which it breaks cannot be kept.
        """
        until = [0.0, *accumulate(self.layer_s)]

        def load(part: int, at: int, end: int) -> float:
            return around[part] + (until[end] - until[at])

        def fill(limit: float) -> list[int] | None:
            if limit < max(around):
                return None
            sizes, at = [], 0
            for part in range(filled):
                # those that later parts have to have
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
            # first halve what is left, then ask for anything shorter at all
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
        """Return parts after moves of a layer from one part to another, cuts between following."""
        best, seen = sizes, self.stage_s(sizes, mtp)
        for _ in range(_MOVES):
            rank = seen.index(max(seen))
            # nothing is gained where the longest stage gives nothing away
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
        """Return parts of which one gave a layer to another, and what the stages take."""
        tried = list(sizes)
        tried[giver] -= 1
        tried[taker] += 1
        return tried, self.stage_s(tried, mtp)

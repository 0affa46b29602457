"""Execution order of the chunks of each pipeline rank, for each schedule.

Orders are those of the engines: Megatron-Core's for 1F1B and interleaved pipelines, with groups of
any size, and those of `torch.distributed.pipelining` (torch 2.13) for all schedules. This module
contains no durations; the dependencies between ranks are in `autopar.pipeline.replay`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from autopar.pipeline.schedules import SCHEDULES, Schedule, default_group

Kind = Literal["F", "B", "I", "W"]
"""Work of an action: forward (F), whole backward (B), input gradient (I), weight gradient (W)."""


class Action(NamedTuple):
    """One piece of work of a rank."""

    kind: Kind
    chunk: int
    """Index of the chunk on its rank, in the order of the model."""
    micro_batch: int


def part_of(schedule: Schedule, rank: int, chunk: int, stages: int) -> int:
    """Return the index of a rank's chunk among all model chunks, in the order of the model."""
    if SCHEDULES[schedule].v_shaped and chunk % 2:
        return (chunk + 1) * stages - 1 - rank
    return chunk * stages + rank


def rank_of(schedule: Schedule, part: int, stages: int) -> int:
    """Return the rank that holds a model chunk."""
    chunk, place = divmod(part, stages)
    return stages - 1 - place if SCHEDULES[schedule].v_shaped and chunk % 2 else place


def warmup_chunks(
    schedule: Schedule,
    rank: int,
    *,
    stages: int,
    chunks: int,
    micro_batches: int,
    group: int = 0,
    ahead: int = 0,
) -> int:
    """Return the number of forwards that a rank runs before its first forward-backward pair.

    Defined for schedules whose steady state consists of such pairs.

    ahead : additional forwards, 1 if the next forward overlaps with a backward.
    """
    behind = stages - 1 - rank
    if schedule == "1f1b":
        return min(behind + ahead, micro_batches)
    assert schedule in ("interleaved", "interleaved_zero_bubble"), "has a separate warm-up"
    group = group or default_group(stages, micro_batches)
    # arXiv 2104.04473: two for each later stage, and a group for each chunk but the last. A
    # zero-bubble pipeline needs one, since it sends input gradients before it computes weight
    # gradients
    each = 2 if schedule == "interleaved" else 1
    return min(each * behind + (chunks - 1) * group + ahead, micro_batches * chunks)


def actions(
    schedule: Schedule,
    rank: int,
    *,
    stages: int,
    chunks: int,
    micro_batches: int,
    group: int = 0,
    ahead: int = 0,
) -> list[Action]:
    """Return the actions of a rank in one step, in execution order.

    group : consecutive micro-batches per chunk, 0 for the default.
    ahead : additional warm-up forwards.

    A pipeline of one stage and one chunk runs one micro-batch after the other under any schedule.
    Deadlocks are not detected here, see `autopar.pipeline.schedules.schedule_problem`.
    """
    if stages == chunks == 1 and not ahead:
        return [
            Action(kind, 0, at)
            for at in range(micro_batches)
            for kind in (("F", "I", "W") if SCHEDULES[schedule].splits else ("F", "B"))
        ]
    if schedule == "zero_bubble_v":
        return [
            action for action in _zero_bubble_v(rank, stages, micro_batches)
            if action.micro_batch < micro_batches
        ]  # fmt: skip
    if schedule == "dual_pipe_v":
        return list(_dual_pipe_v(rank, stages, micro_batches))
    if schedule in ("gpipe", "looped_bfs"):
        return list(_all_forwards_first(schedule, chunks, micro_batches))
    group = group or default_group(stages, micro_batches)
    forwards = [
        Action("F", chunk, at)
        for first in range(0, micro_batches, group)
        for chunk in range(chunks)
        for at in range(first, min(first + group, micro_batches))
    ]
    kind: Kind = "I" if SCHEDULES[schedule].splits else "B"
    # backwards run chunks from the last, micro-batches in the same groups
    backwards = [Action(kind, chunks - 1 - chunk, at) for _, chunk, at in forwards]
    warmup = warmup_chunks(
        schedule,
        rank,
        stages=stages,
        chunks=chunks,
        micro_batches=micro_batches,
        group=group,
        ahead=ahead,
    )
    # a rank delays as many weight gradients as there are ranks before it, so that the input
    # gradients that those ranks wait for are sent earlier
    delay = rank if kind == "I" else None
    return list(_pairs(forwards, backwards, warmup, delay))


def _pairs(
    forwards: list[Action], backwards: list[Action], warmup: int, delay: int | None
) -> Iterator[Action]:
    """Yield the warm-up, the pairs of one forward and one backward, and the remaining backwards.

    delay : number of backwards between an input gradient and its weight gradient; None: backwards
        are not split.
    """
    yield from forwards[:warmup]
    for at, backward in enumerate(backwards):
        if warmup + at < len(forwards):
            yield forwards[warmup + at]
        yield backward
        if delay is not None and at >= delay:
            _, chunk, micro_batch = backwards[at - delay]
            yield Action("W", chunk, micro_batch)
    if delay:
        for _, chunk, micro_batch in backwards[-delay:]:
            yield Action("W", chunk, micro_batch)


def _all_forwards_first(schedule: Schedule, chunks: int, micro_batches: int) -> Iterator[Action]:
    numbers = range(micro_batches)
    for chunk in range(chunks):
        yield from (Action("F", chunk, at) for at in numbers)
    # breadth-first runs backwards from the last micro-batch
    back = numbers if schedule == "gpipe" else numbers[::-1]
    for chunk in reversed(range(chunks)):
        yield from (Action("B", chunk, at) for at in back)


class _Counter:
    """Generator of the actions of a rank with two chunks, counted per kind and chunk."""

    def __init__(self) -> None:
        """Start at micro-batch 0 for each kind and chunk."""
        self.done: dict[tuple[str, int], int] = {}

    def next(self, kind: Kind, chunk: int) -> Action:
        """Return the next action of a kind; a whole backward counts as an input gradient."""
        key = ("I" if kind == "B" else kind, chunk)
        at = self.done.get(key, 0)
        self.done[key] = at + 1
        return Action(kind, chunk, at)

    def count(self, kind: Kind, chunk: int) -> int:
        """Return the number of actions of this kind and chunk so far."""
        return self.done.get((kind, chunk), 0)


def _zero_bubble_v(rank: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Yield ZBV's order for at least 2 stages - 1 micro-batches; callers drop the surplus ones."""
    counter = _Counter()
    number, behind = max(micro_batches, 2 * stages - 1), stages - rank

    def several(*names: str) -> Iterator[Action]:
        for name in names:
            yield counter.next(*_KINDS[name])

    for _ in range(2 * behind - 1):
        yield from several("F0")
    for _ in range(rank):
        yield from several("F1", "F0")
    for _ in range(behind):
        yield from several("F1", "I1", "W1")
    while counter.count("F", 1) < number:
        if counter.count("F", 0) < number:
            yield from several("F0")
        yield from several("I0", "W0", "F1", "I1", "W1")
    for _ in range(rank):
        yield from several("I0", "I1")
    for _ in range(behind):
        yield from several("I0", "W0")
    for name in ("1", "0"):
        while counter.count("W", int(name)) < number:
            yield from several("W" + name)


_KINDS: dict[str, tuple[Kind, int]] = {
    "F0": ("F", 0), "F1": ("F", 1), "B0": ("B", 0), "B1": ("B", 1),
    "I0": ("I", 0), "I1": ("I", 1), "W0": ("W", 0), "W1": ("W", 1),
}  # fmt: skip


def _dual_pipe_v(rank: int, stages: int, micro_batches: int) -> Iterator[Action]:
    """Yield DualPipeV's order; a forward and a backward that may overlap run one after the other.

    The phases are those of the published schedule; the number of later ranks sets their lengths.
    """
    counter, behind = _Counter(), stages - 1 - rank
    waiting: list[Action] = []

    def several(*names: str) -> Iterator[Action]:
        for name in names:
            if name == "W":
                # the oldest delayed weight gradient, of either chunk
                if waiting:
                    yield waiting.pop(0)
                continue
            action = counter.next(*_KINDS[name])
            if action.kind == "I":
                waiting.append(Action("W", action.chunk, action.micro_batch))
            yield action

    def repeat(times: int, *names: str) -> Iterator[Action]:
        for _ in range(times):
            yield from several(*names)

    yield from repeat(2 * behind, "F0")
    yield from repeat(rank + 1, "F0", "F1")
    yield from repeat(behind, "I1", "W", "F1")
    yield from repeat(micro_batches - 2 * stages + rank + 1, "F0", "B1", "F1", "B0")
    yield from repeat(behind, "B1", "F1", "B0")
    # whole backwards, then split ones from the middle on: one earlier on odd ranks
    whole, odd = (rank + 1) // 2, rank % 2
    yield from repeat(whole, "B1", "B0")
    if odd:
        yield from repeat(rank + 1 - whole, "I1", "I0")
    else:
        yield from several("B1", "I0")
        yield from repeat(rank - whole, "I1", "I0")
    yield from repeat(behind, "W", "I0")
    yield from repeat(rank + 1, "W")


def live_peak(work: list[Action]) -> int:
    """Return the peak number of chunks whose activations are live in one execution order.

    A whole backward frees saved activations, and for split backwards the weight gradient.
    """
    live = most = 0
    for action in work:
        if action.kind == "F":
            live += 1
            most = max(most, live)
        elif action.kind in "BW":
            live -= 1
    return most

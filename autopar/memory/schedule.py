"""The order in which a pipeline stage runs its chunks, and what is live at each moment.

1F1B (Narayanan et al., arXiv 1806.03377) and its interleaved form (arXiv 2104.04473, section 2.2),
with groups of micro-batches as Megatron-Core counts them. Bytes come from the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from autopar.memory.launch import Launch
from autopar.records import dataclass

__all__ = ["Event", "Moment", "moments", "order", "warmup_chunks"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One chunk's forward or backward of one micro-batch."""

    kind: Literal["forward", "backward"]
    chunk: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What is live while an event runs."""

    event: Event
    live: tuple[int, ...]
    """Micro-batches that each chunk has saved and not freed; with this one, before its backward
    frees it, or after its forward saved it."""
    waiting_logits: bool
    """The head has run for a micro-batch whose backward is still to come, or just begins."""


def _forwards(launch: Launch) -> Iterator[tuple[int, int]]:
    """Yield (chunk, micro-batch) in the order of a stage's forwards.

    Groups of micro-batches pass through all chunks before the next group.
    """
    degrees, total = launch.degrees, _replayed(launch)
    group = degrees.group or degrees.pp
    for first in range(0, total, group):
        for chunk in range(degrees.vpp):
            for micro_batch in range(first, min(first + group, total)):
                yield chunk, micro_batch


def _replayed(launch: Launch) -> int:
    """Return how many micro-batches show everything that a stage of the pipeline ever holds.

    After the warm-up of the first stage, each further group repeats the one before it; the last one
    may be smaller than the others.
    """
    degrees = launch.degrees
    group = degrees.group or degrees.pp
    first = 2 * degrees.pp + degrees.vpp * group + 1
    groups = first // group + 3
    return min(launch.micro_batches, groups * group + launch.micro_batches % group)


def warmup_chunks(launch: Launch, stage: int) -> int:
    """Return how many forwards a stage runs before its first backward."""
    degrees = launch.degrees
    behind = degrees.pp - stage - 1
    total = _replayed(launch) * degrees.vpp
    # beside the backward of a micro-batch the next one's forward runs
    ahead = 1 if degrees.overlap_experts else 0
    if degrees.vpp == 1:
        return min(behind + ahead, total)
    group = degrees.group or degrees.pp
    # arXiv 2104.04473: two for each stage behind, and a group for each chunk but the last
    warmup = 2 * behind + (degrees.vpp - 1) * group + ahead
    return min(warmup, total)


def order(launch: Launch, stage: int) -> tuple[Event, ...]:
    """Return the events of a stage's step: warm-up, one forward and one backward, cool-down.

    Of many micro-batches so many that nothing new comes.
    """
    degrees = launch.degrees
    forwards = [
        Event(kind="forward", chunk=chunk, micro_batch=micro_batch)
        for chunk, micro_batch in _forwards(launch)
    ]
    # backwards take chunks from the last, micro-batches in the same groups
    backwards = [
        Event(
            kind="backward",
            chunk=degrees.vpp - 1 - event.chunk,
            micro_batch=event.micro_batch,
        )
        for event in forwards
    ]
    warmup = warmup_chunks(launch, stage)
    steady = len(forwards) - warmup
    found = forwards[:warmup]
    for at in range(steady):
        found += [forwards[warmup + at], backwards[at]]
    return (*found, *backwards[steady:])


def moments(launch: Launch, stage: int) -> Iterator[Moment]:
    """Yield every event of a stage's step with what is live."""
    chunks = launch.degrees.chunks[stage]
    live = [0] * len(chunks)
    waiting: set[int] = set()
    for event in order(launch, stage):
        if event.kind == "forward":
            live[event.chunk] += 1
        yield Moment(event=event, live=tuple(live), waiting_logits=bool(waiting))
        if event.kind == "backward":
            live[event.chunk] -= 1
        if chunks[event.chunk][3]:
            if event.kind == "forward":
                waiting.add(event.micro_batch)
            else:
                waiting.discard(event.micro_batch)

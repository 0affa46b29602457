"""Event simulation of one pipelined step, from the dependencies between actions.

A rank runs its work in the order of its schedule (`autopar.pipeline.orders`). A forward waits for
the preceding model chunk, an input gradient for the following one. A message between two ranks
takes `send_s`, one within a rank takes no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autopar.errors import InputError
from autopar.pipeline.orders import Action, actions, live_peak, part_of, rank_of
from autopar.pipeline.schedules import Schedule, check_schedule
from autopar.records import Record


class TimedAction(NamedTuple):
    """An action with its start and end, in seconds since the step began."""

    rank: int
    action: Action
    start_s: float
    end_s: float


class Replay(Record):
    """Result of a replayed step."""

    step_s: float
    in_flight: tuple[float, ...]
    """Peak live micro-batches of every rank; a chunk counts as its share of the rank's chunks."""
    timeline: tuple[TimedAction, ...] = ()
    """Events in the order in which ranks were visited; empty unless `timeline` was set."""


Seconds = Sequence[float] | Sequence[Sequence[float]]
"""Seconds per rank: one number for all of its chunks together, or one for each chunk."""


def _by_chunk(seconds: Seconds, chunks: int, name: str) -> list[list[float]]:
    """Return the seconds of each chunk of each rank; a single number is divided evenly.

    Raises InputError, with the argument `name`, if a rank has another number of chunks.
    """
    found = []
    for each in seconds:
        row = [each / chunks] * chunks if isinstance(each, int | float) else [*each]
        if len(row) != chunks:
            raise InputError(f"{name} has {len(row)} chunks on a rank, not {chunks}")
        found.append([float(one) for one in row])
    return found


def replay(
    schedule: Schedule,
    forward_s: Seconds,
    input_s: Seconds,
    weight_s: Seconds,
    *,
    micro_batches: int,
    chunks: int = 1,
    send_s: float = 0.0,
    group: int = 0,
    ahead: int = 0,
    overlapped: bool = False,
    timeline: bool = False,
) -> Replay:
    """Return the replay of one step of p ranks; all seconds are per micro-batch.

    forward_s, input_s, weight_s : (p,) for all chunks of a rank, or (p, chunks); the backward is
        input_s + weight_s.
    send_s : seconds of a message between two model chunks on different ranks.
    overlapped : True if messages do not occupy ranks and each link carries one at a time in each
        direction; otherwise the sender waits until its message has arrived.
    group, ahead : as in `autopar.pipeline.orders.actions`.
    timeline : True to return the events.

    Raises InputError if the schedule cannot run or lengths differ.
    """
    stages = len(forward_s)
    forward, inputs, weights = (
        _by_chunk(seconds, chunks, name)
        for seconds, name in (
            (forward_s, "forward_s"), (input_s, "input_s"), (weight_s, "weight_s")
        )
    )  # fmt: skip
    if not stages == len(inputs) == len(weights):
        raise InputError("forward_s, input_s and weight_s have different numbers of stages")
    if stages * chunks > 1:
        check_schedule(
            schedule, stages=stages, chunks=chunks, micro_batches=micro_batches, group=group
        )
    work = [
        actions(
            schedule,
            rank,
            stages=stages,
            chunks=chunks,
            micro_batches=micro_batches,
            group=group,
            ahead=ahead,
        )
        for rank in range(stages)
    ]
    duration = {
        "F": forward,
        "I": inputs,
        "W": weights,
        "B": [
            [i + w for i, w in zip(*row, strict=True)] for row in zip(inputs, weights, strict=True)
        ],
    }
    parts = stages * chunks
    part = [[part_of(schedule, rank, at, stages) for at in range(chunks)] for rank in range(stages)]
    holder = [rank_of(schedule, at, stages) for at in range(parts)]
    # arrival times of the inputs of each part's forward and backward; None: not yet
    there: tuple[list[list[float | None]], ...] = tuple(
        [[None] * micro_batches for _ in range(parts)] for _ in range(2)
    )
    there[0][0] = [0.0] * micro_batches
    there[1][-1] = [0.0] * micro_batches
    clock = [0.0] * stages
    free: dict[tuple[int, int], float] = {}
    position = [0] * stages
    events: list[TimedAction] = []
    left = list(reversed(range(stages)))
    while left:
        rank = left.pop()
        todo = work[rank]
        while position[rank] < len(todo):
            action = todo[position[rank]]
            kind, chunk, at = action
            here = part[rank][chunk]
            start = clock[rank]
            if kind != "W":
                came = there[kind != "F"][here][at]
                if came is None:
                    # the rank is queued again when the input arrives
                    break
                start = max(start, came)
            end = clock[rank] = start + duration[kind][rank][chunk]
            position[rank] += 1
            if timeline:
                events.append(TimedAction(rank, action, start, end))
            to = here + 1 if kind == "F" else here - 1
            if kind == "W" or not 0 <= to < parts:
                continue
            receiver = holder[to]
            if receiver != rank:
                if overlapped:
                    end = max(end, free.get((rank, receiver), 0.0)) + send_s
                    free[rank, receiver] = end
                else:
                    end = clock[rank] = end + send_s
                left.append(receiver)
            there[kind != "F"][to][at] = end
    assert position == [len(todo) for todo in work], "an order that waits for itself"
    return Replay(
        step_s=max(clock),
        in_flight=tuple(live_peak(todo) / chunks for todo in work),
        timeline=tuple(events),
    )

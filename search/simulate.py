"""Event-level replay of one training step: only what depends on what, no formula.

It is printed beside the step time T of the search as a check. A stage runs its micro-batches in
the order of its schedule; an activation or gradient leaves when its computation ends, transfers
do not occupy the stages, and each direction of a link carries one of them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.plan import PipelineType

__all__ = ["Event", "ReplayResult", "replay"]

_FORWARD, _BACKWARD = 0, 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """One piece of work of one stage, in seconds since the start of the step."""

    stage: int
    kind: Literal["forward", "backward", "tail"]
    microbatch: int
    """-1 for the tail, which belongs to the step."""
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What happened in one step."""

    step_time_s: float
    idle_s: tuple[float, ...]
    """Per stage, the time of the step in which it neither computes nor does its tail."""
    timeline: tuple[Event, ...] | None
    """In the order in which stages work; None unless asked for."""


def replay(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
    tail_s: Sequence[float],
    num_microbatches: int,
    pipeline_type: PipelineType,
    *,
    timeline: bool = False,
) -> ReplayResult:
    """Return the time of one step of p stages and m micro-batches, in O(p*m).

    `forward_s`, `backward_s`: seconds per micro-batch, `tail_s`: per step, one entry per stage.
    `send_s[j]`: transfer between stages j and j+1, the same both ways; p - 1 entries, and a p-th
    for the last stage, which sends nothing, is ignored. Raises ValueError for lists of unequal
    length and for fewer than one micro-batch.
    """
    p, m = len(forward_s), num_microbatches
    if p == 0 or len(backward_s) != p or len(tail_s) != p or len(send_s) not in (p - 1, p):
        raise ValueError(
            f"{p} forward, {len(backward_s)} backward, {len(tail_s)} tail and {len(send_s)} send "
            "times do not describe one pipeline"
        )
    if m < 1:
        raise ValueError(f"a step has at least one micro-batch, not {m}")
    orders = [_order(j, p, m, pipeline_type) for j in range(p)]
    arrival = [[[0.0] * m, [0.0] * m] for _ in range(p)]  # stage, direction, micro-batch
    arrived = [[m if j == 0 else 0, m if j == p - 1 else 0] for j in range(p)]
    link_free = [[0.0, 0.0] for _ in range(p)]  # of the sender, by direction
    clock = [0.0] * p
    position = [0] * p
    duration = (forward_s, backward_s)
    events: list[Event] = []
    waiting = list(range(p - 1, -1, -1))
    while waiting:
        j = waiting.pop()
        order = orders[j]
        while position[j] < len(order):
            kind, i = order[position[j]]
            if arrived[j][kind] <= i:
                break  # woken when it arrives
            start = max(clock[j], arrival[j][kind][i])
            end = start + duration[kind][j]
            clock[j] = end
            position[j] += 1
            if timeline:
                name: Literal["forward", "backward"] = "backward" if kind else "forward"
                events.append(Event(stage=j, kind=name, microbatch=i, start_s=start, end_s=end))
            to = j - 1 if kind else j + 1
            if 0 <= to < p:
                link_free[j][kind] = max(end, link_free[j][kind]) + send_s[min(j, to)]
                arrival[to][kind][i] = link_free[j][kind]
                arrived[to][kind] = i + 1
                waiting.append(to)
    assert all(position[j] == 2 * m for j in range(p)), "the schedule waits for itself"
    step = max(c + t for c, t in zip(clock, tail_s, strict=True))
    if timeline:
        events += [
            Event(stage=j, kind="tail", microbatch=-1, start_s=clock[j], end_s=clock[j] + tail_s[j])
            for j in range(p)
        ]
        events.sort(key=lambda e: (e.start_s, e.stage))
    busy = (m * (f + g) + t for f, g, t in zip(forward_s, backward_s, tail_s, strict=True))
    return ReplayResult(
        step_time_s=step,
        idle_s=tuple(max(0.0, step - b) for b in busy),
        timeline=tuple(events) if timeline else None,
    )


def _order(j: int, p: int, m: int, pipeline_type: PipelineType) -> list[tuple[int, int]]:
    """Return the (direction, micro-batch) sequence of stage j of p."""
    if pipeline_type == "gpipe":
        return [(kind, i) for kind in (_FORWARD, _BACKWARD) for i in range(m)]
    warm_up = min(m, p - 1 - j)
    order = [(_FORWARD, i) for i in range(warm_up)]
    for i in range(m - warm_up):
        order += [(_FORWARD, warm_up + i), (_BACKWARD, i)]
    return order + [(_BACKWARD, i) for i in range(m - warm_up, m)]

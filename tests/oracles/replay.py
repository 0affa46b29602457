"""The event replay of one training step in plain Python, the reference of the compiled one.

A stage runs its micro-batches in the order of its schedule; an activation or gradient leaves when
its computation ends, transfers do not occupy the stages, and each direction of a link carries one
of them at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from autopar.run.plan import PipelineType
from search.planning.cost.pipeline import Event, ReplayResult

_FORWARD, _BACKWARD = 0, 1
_NAMES: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


def replay(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
    tail_s: Sequence[float],
    num_microbatches: int,
    pipeline_type: PipelineType,
) -> ReplayResult:
    """Return one step of p stages and m micro-batches with its timeline, of any length."""
    p, m = len(forward_s), num_microbatches
    orders = [_order(j, p, m, pipeline_type) for j in range(p)]
    arrival = [[[0.0] * m, [0.0] * m] for _ in range(p)]  # stage, direction, micro-batch
    # micro-batches come in order, so a count identifies those that arrived; the ends never wait
    arrived = [[m if j == 0 else 0, m if j == p - 1 else 0] for j in range(p)]
    link_free = [[0.0, 0.0] for _ in range(p)]  # of the sender, by direction
    clock = [0.0] * p
    position = [0] * p
    duration = (forward_s, backward_s)
    events: list[Event] = []
    # the first stage is popped first
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
            events.append(Event(stage=j, kind=_NAMES[kind], microbatch=i, start_s=start, end_s=end))
            to = j - 1 if kind else j + 1
            if 0 <= to < p:
                # one message at a time in each direction: it waits for the one before
                link_free[j][kind] = max(end, link_free[j][kind]) + send_s[min(j, to)]
                arrival[to][kind][i] = link_free[j][kind]
                arrived[to][kind] = i + 1
                waiting.append(to)
    assert all(position[j] == 2 * m for j in range(p)), "the schedule waits for itself"
    step = max(c + t for c, t in zip(clock, tail_s, strict=True))
    events += [
        Event(stage=j, kind="tail", microbatch=-1, start_s=clock[j], end_s=clock[j] + tail_s[j])
        for j in range(p)
    ]
    events.sort(key=lambda e: (e.start_s, e.stage))
    busy = (m * (f + g) + t for f, g, t in zip(forward_s, backward_s, tail_s, strict=True))
    return ReplayResult(
        step_time_s=step,
        idle_s=tuple(max(0.0, step - b) for b in busy),
        timeline=tuple(events),
    )


def _order(j: int, p: int, m: int, pipeline_type: PipelineType) -> list[tuple[int, int]]:
    """Return the (direction, micro-batch) sequence of stage j of p."""
    if pipeline_type == "gpipe":
        return [(kind, i) for kind in (_FORWARD, _BACKWARD) for i in range(m)]
    # one warm-up forward per later stage, so that a gradient meets its micro-batch without waiting
    warm_up = min(m, p - 1 - j)
    order = [(_FORWARD, i) for i in range(warm_up)]
    for i in range(m - warm_up):
        order += [(_FORWARD, warm_up + i), (_BACKWARD, i)]
    return order + [(_BACKWARD, i) for i in range(m - warm_up, m)]

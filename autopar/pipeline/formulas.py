"""Time and memory of a pipelined step in closed form, schedule by schedule.

Every time is an upper bound of the event replay (`autopar.pipeline.replay`) of the schedule's own
order, exact where that is said. Counts of what is in flight are those of the order.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import InputError
from autopar.pipeline.orders import warmup_chunks
from autopar.pipeline.schedules import SCHEDULES, Schedule, check_schedule, default_group

__all__ = ["in_flight", "step_s"]


def step_s(
    schedule: Schedule,
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    *,
    micro_batches: int,
    chunks: int = 1,
    send_s: float = 0.0,
) -> float:
    """Return seconds of a step that no replay of the schedule exceeds; raises InputError.

    forward_s, input_s, weight_s : (p,) of a micro-batch through all chunks of a stage, which are
    alike; the backward is input_s + weight_s. send_s : of a message between two parts of the model,
    for which its sender waits.
    """
    p, m, v = len(forward_s), micro_batches, chunks
    if not p == len(input_s) == len(weight_s):
        raise InputError("forward_s, input_s and weight_s are of different numbers of stages")
    if p == v == 1:
        return m * (forward_s[0] + input_s[0] + weight_s[0])
    check_schedule(schedule, stages=p, chunks=v, micro_batches=m)
    down, up = _sends(p, v)
    forward = [f + send_s * n / v for f, n in zip(forward_s, down, strict=True)]
    inputs = [i + send_s * n / v for i, n in zip(input_s, up, strict=True)]
    stage = [sum(each) for each in zip(forward, inputs, weight_s, strict=True)]
    if schedule in ("1f1b", "interleaved"):
        # arXiv 2104.04473, section 2.2, with unequal stages: checked by replay
        return (m - 1 / v) * max(stage) + sum(stage) / v
    if schedule in ("gpipe", "looped_bfs"):
        backward = [i + w for i, w in zip(inputs, weight_s, strict=True)]
        return _sweep_s(forward, m, v) + _sweep_s(backward, m, v)
    return m * (max(forward) + max(inputs) + max(weight_s)) + (p - 1) / v * (
        max(forward) + max(inputs) + max(weight_s)
    )


def _sends(stages: int, chunks: int) -> tuple[list[int], list[int]]:
    """Return how many activations, and how many gradients, a stage sends per micro-batch."""
    down, up = [chunks] * stages, [chunks] * stages
    if chunks == 1:
        # of several chunks those at the ends differ from the others, which a bound may leave out
        down[-1] = up[0] = 0
    return down, up


def _sweep_s(seconds: Sequence[float], m: int, v: int) -> float:
    """Return the time in which m micro-batches pass v chunks of all stages, chunk by chunk; exact.

    A critical path goes through `v - w` rounds of all stages and meets a slow one in
    `m (1 + w) - 1` further micro-batches, w of 0 to v - 1; it is linear in w.
    """
    rounds, slowest = sum(seconds) / v, max(seconds) / v
    return max(v * rounds + (m - 1) * slowest, rounds + (m * v - 1) * slowest)


def in_flight(
    schedule: Schedule,
    stages: int,
    chunks: int,
    micro_batches: int,
    group: int = 0,
    *,
    ahead: int = 0,
) -> tuple[float, ...]:
    """Return of every stage the most micro-batches whose activations are there; raises InputError.

    A chunk counts as its share of the stage's chunks, from its forward to its backward, and where
    that is split to the gradient of its weights. group : micro-batches that pass a chunk in a row,
    0 for the default; ahead : forwards more in the warm-up.
    """
    p, v, m = stages, chunks, micro_batches
    if p == v == 1:
        return (1.0,)
    check_schedule(schedule, stages=p, chunks=v, micro_batches=m, group=group)
    return tuple(_live_chunks(schedule, rank, p, v, m, group, ahead) / v for rank in range(p))


def _live_chunks(
    schedule: Schedule, rank: int, p: int, v: int, m: int, group: int, ahead: int
) -> int:
    if schedule in ("gpipe", "looped_bfs"):
        return m * v
    if schedule == "dual_pipe_v":
        # 2 p of the warm-up, and one forward beside the first backward of the steady state
        return 2 * p + 1
    if schedule == "zero_bubble_v":
        # those of the warm-up, of which the second chunk's first frees as the next one comes
        return min(m, 2 * p - rank - 1) + min(m, rank + 1)
    group = group or default_group(p, m)
    warmup = warmup_chunks(
        schedule, rank, stages=p, chunks=v, micro_batches=m, group=group, ahead=ahead
    )
    # the first forward of the steady state, and as many as wait for gradients of their weights
    waiting = rank if SCHEDULES[schedule].splits else 0
    return min(warmup + 1 + waiting, m * v)

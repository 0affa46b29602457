"""Time and memory of a pipelined step in closed form, for each schedule.

Every time is an upper bound of the event replay (`autopar.pipeline.replay`) of the same schedule,
for stages of any imbalance. Counts of live micro-batches follow from the execution order.

**Where the bounds come from.** A step lasts as long as its critical path: a chain of work in which
each piece waits for the one before, on the same rank or for a message from a neighbour. The steady
state of most schedules repeats a forward and a backward; number these pairs of each rank by k.
Staying on a rank for one k costs its pair. Going up to the next rank costs a forward there and
advances k by some pairs. Going down costs a gradient of inputs and advances k by none or one. So
all paths through a slowest rank x are at most as long as

    entry(x) + exit(x) + (pairs between) * pair(x)

where entry and exit are maxima over the ranks at which the path leaves the warm-up and reaches the
cool-down. The maximum over x is never below the replay, and mostly equals it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from autopar.errors import InputError
from autopar.pipeline.orders import warmup_chunks
from autopar.pipeline.replay import replay
from autopar.pipeline.schedules import SCHEDULES, Schedule, check_schedule, default_group
from autopar.records import Record

# --------------------------------------------------------------------------------------------------
# Time.


def step_s(
    schedule: Schedule,
    forward_s: Sequence[float],
    input_s: Sequence[float],
    weight_s: Sequence[float],
    *,
    micro_batches: int,
    chunks: int = 1,
    send_s: float = 0.0,
    group: int = 0,
    ahead: int = 0,
) -> float:
    """Return an upper bound of step time in seconds, never below the replay of the schedule.

    forward_s, input_s, weight_s : (p,) seconds per micro-batch for all chunks of a stage, assumed
        equal; the backward is input_s + weight_s.
    send_s : seconds of a message between two model chunks, for which its sender waits. The bound
        also holds if ranks do not wait for messages.
    group, ahead : as in `autopar.pipeline.orders.actions`.

    Exact for GPipe and breadth-first. V-shaped schedules use a replay of 2 p micro-batches plus the
    time of the slowest stage for each additional one. Fewer than p micro-batches are replayed.
    Raises InputError if the schedule cannot run.
    """
    p, m, v = len(forward_s), micro_batches, chunks
    if not p == len(input_s) == len(weight_s):
        raise InputError("forward_s, input_s and weight_s have different numbers of stages")
    if p == v == 1:
        return m * (forward_s[0] + input_s[0] + weight_s[0])
    check_schedule(schedule, stages=p, chunks=v, micro_batches=m, group=group)
    if SCHEDULES[schedule].v_shaped:
        return _v_shaped_s(schedule, forward_s, input_s, weight_s, m, send_s)
    down, up = _sends(p, v)
    forward = [f + send_s * n for f, n in zip(forward_s, down, strict=True)]
    inputs = [i + send_s * n for i, n in zip(input_s, up, strict=True)]
    if schedule in ("gpipe", "looped_bfs"):
        backward = [i + w for i, w in zip(inputs, weight_s, strict=True)]
        # the last chunk of each sweep has no receiver
        last = 2 * send_s * (v > 1)
        return _sweep_s(forward, m, v) + _sweep_s(backward, m, v) - last
    if m < p:
        # no rank reaches a steady state, and the replay is short
        return replay(
            schedule,
            forward_s,
            input_s,
            weight_s,
            micro_batches=m,
            chunks=v,
            send_s=send_s,
            group=group,
            ahead=ahead,
        ).step_s
    group = group or default_group(p, m)
    return _Rounds.of(schedule, forward, inputs, weight_s, m, v, group, ahead).step_s()


def bubble_s(
    schedule: Schedule,
    forward_s: float,
    input_s: float,
    weight_s: float,
    *,
    stages: int,
    chunks: int = 1,
) -> float:
    """Return the pipeline bubble of p equal stages in seconds per step, without message times.

    Valid from 2 p micro-batches. Arguments are seconds of a micro-batch on a stage: F, I, W, and
    B = I + W. GPipe and 1F1B: (p - 1)(F + B); interleaved: 1 / v of it (arXiv 2104.04473, section
    2.2). Interleaved zero-bubble: (p - 1) max(F, I, F + I - W) / v
    (arXiv 2401.10241 gives F + I - W). Other schedules use `step_s`.
    """
    behind = stages - 1
    if schedule in ("gpipe", "1f1b", "interleaved", "looped_bfs"):
        return behind * (forward_s + input_s + weight_s) / chunks
    if schedule == "interleaved_zero_bubble":
        return behind * max(forward_s, input_s, forward_s + input_s - weight_s) / chunks
    number = 2 * stages
    step = step_s(
        schedule,
        [forward_s] * stages,
        [input_s] * stages,
        [weight_s] * stages,
        micro_batches=number,
        chunks=chunks,
    )
    return step - number * (forward_s + input_s + weight_s)


def _sends(stages: int, chunks: int) -> tuple[list[int], list[int]]:
    """Return the numbers of activations and of gradients that each stage sends per micro-batch."""
    down, up = [chunks] * stages, [chunks] * stages
    if chunks == 1:
        # with several chunks only those at the model's ends differ, and an upper bound may ignore
        # that
        down[-1] = up[0] = 0
    return down, up


def _sweep_s(seconds: Sequence[float], m: int, v: int) -> float:
    """Return the exact seconds of a sweep: m micro-batches pass v chunks of all stages in turn.

    A critical path goes through v - w rounds of all stages and waits for a slow one for
    m (1 + w) - 1 more micro-batches, w from 0 to v - 1. Its length is linear in w.
    """
    rounds, slowest = sum(seconds) / v, max(seconds) / v
    return max(v * rounds + (m - 1) * slowest, rounds + (m * v - 1) * slowest)


def _v_shaped_s(
    schedule: Schedule,
    forward: Sequence[float],
    inputs: Sequence[float],
    weights: Sequence[float],
    m: int,
    send_s: float,
) -> float:
    """Return the replayed time of 2 p micro-batches, plus the slowest stage for each other one.

    The critical path through the steady state of a rank grows by that rank's time with every
    micro-batch. A step is therefore the maximum of straight lines over the number of micro-batches:
    it is convex, and its final slope is the time of the slowest stage.
    """
    p = len(forward)
    first = min(m, 2 * p)
    found = replay(schedule, forward, inputs, weights, micro_batches=first, chunks=2, send_s=send_s)
    # each chunk sends up and down, except at the ends of the model and within a rank
    sends = [4 - 2 * (rank == 0) - 2 * (rank == p - 1) for rank in range(p)]
    slowest = max(
        sum(each) + send_s * number
        for *each, number in zip(forward, inputs, weights, sends, strict=True)
    )
    return found.step_s + (m - first) * slowest


class _Rounds(Record):
    """Pipeline of pairs of one forward and one backward; seconds are per chunk, not per stage."""

    number: int
    """Number of forwards of a rank: micro-batches times chunks."""
    wraps: bool
    """True if a rank holds several chunks, so that the last rank sends on to the first."""
    group: int
    """Consecutive micro-batches per chunk in the smallest group (the last may be smaller)."""
    ups: int
    """Lead of a rank over the next one in pairs: its additional warm-up forwards."""
    lag: int
    """Delay of weight gradients in pairs, per preceding rank: 1 or 0."""
    warmup: list[int]
    forward: list[float]
    back: list[float]
    """Seconds of the backward that the preceding rank waits for: input gradients, or all of it."""
    apart: list[float]
    """Seconds of the delayed part of the backward: weight gradients, or 0."""

    @staticmethod
    def of(
        schedule: Schedule,
        forward_s: Sequence[float],
        input_s: Sequence[float],
        weight_s: Sequence[float],
        m: int,
        v: int,
        group: int,
        ahead: int,
    ) -> _Rounds:
        """Return the pipeline of a schedule from (p,) seconds of all chunks of a stage."""
        p, splits = len(forward_s), SCHEDULES[schedule].splits
        later = weight_s if splits else [0.0] * p
        whole = zip(input_s, weight_s, strict=True)
        back = input_s if splits else [i + w for i, w in whole]
        warmup = [
            warmup_chunks(
                schedule,
                rank,
                stages=p,
                chunks=v,
                micro_batches=m,
                group=group,
                ahead=ahead,
            )
            for rank in range(p)
        ]
        return _Rounds(
            number=m * v,
            wraps=v > 1,
            group=min(group, m % group or group),
            ups=2 if schedule == "interleaved" else 1,
            lag=int(splits),
            # one warm-up forward less gives the same order and leaves a pair
            warmup=[min(each, m * v - 1) for each in warmup],
            forward=[f / v for f in forward_s],
            back=[b / v for b in back],
            apart=[w / v for w in later],
        )

    def step_s(self) -> float:
        """Return the seconds of the longest possible critical path."""
        p, f, b, w = len(self.forward), self.forward, self.back, self.apart
        pair = [sum(each) for each in zip(f, b, w, strict=True)]
        # no pair of a path counts less than contiguous work outside of the steady state
        least = max(max(f), max(map(sum, zip(b, w, strict=True))))
        if self.lag:
            least = max(least, max(map(sum, zip(f, b, strict=True))))
        entries, exits = self._entries(), self._exits()
        f_until, b_until = [0.0, *accumulate(f)], [0.0, *accumulate(b)]
        # a forward of the last rank goes to the first rank, `group` forwards later
        forth = self.group - self.ups * (p - 1)
        early = max(0, -forth)

        def up(start: int, end: int, rate: float) -> float:
            return (
                f_until[end + 1] - f_until[start + 1] - (end - start) * (self.ups - self.lag) * rate
            )

        def down(start: int, end: int, rate: float) -> float:
            return b_until[start + 1] - b_until[end + 1] - (start - end) * self.lag * rate

        def way(start: int, end: int, rate: float, others: float, *, entering: bool) -> float:
            """Return the seconds that a path from `start` to `end` adds to staying on a rank.

            A pair takes `rate` seconds. Before the first rank's steady state, or after the last
            rank's, a path can only stay on other ranks, at `others` seconds per pair.
            """
            found = up(start, end, rate) if end >= start else down(start, end, rate)
            if not self.wraps or start == end:
                return found
            if end < start:
                around = f[0] - (forth + self.lag * (p - 1)) * rate
                around += up(start, p - 1, rate) + up(0, end, rate)
                around -= early * (rate - others) if entering else 0.0
            else:
                around = b[0] - (self.group - self.lag * (p - 1)) * rate
                around += down(start, 0, rate) + down(p - 1, end, rate)
                around -= 0.0 if entering else early * (rate - others)
            return max(found, around)

        longest = 0.0
        for x in range(p):
            rate = max(pair[x], least)
            slower = [each for at, each in enumerate(pair) if at != x and each <= pair[x]]
            others = min(rate, max([*slower, least]))
            entry = max(entries[at] + way(at, x, rate, others, entering=True) for at in range(p))
            leaving = max(
                way(x, at, rate, others, entering=False)
                + (self.number - 1 - self.warmup[at] - self.lag * at) * rate
                + exits[at]
                for at in range(p)
            )
            longest = max(longest, entry + leaving)
        return longest

    def _entries(self) -> list[float]:
        """Return the longest path to the end of each rank's first complete pair, seconds.

        Only forwards run until the warm-up ends; pairs then lack weight gradients while those are
        delayed.
        """
        p, f, b = len(self.forward), self.forward, self.back
        until = [0.0, *accumulate(f)]
        found = []
        for rank, stays in enumerate(self.warmup):
            most = stays * max(f[: rank + 1])
            if self.wraps and stays >= self.group:
                # once around all ranks, and from then on at any of them
                most = max(most, until[p] + (stays - self.group) * max(f))
            found.append(until[rank + 1] + most)
        if not self.lag:
            return found
        light = max(map(sum, zip(f, b, strict=True)))
        gone = [0.0, *accumulate(b)]
        return [
            max(
                found[start] + (
                    start * light + until[rank + 1] - until[start + 1]
                    if start <= rank
                    else rank * light + gone[start + 1] - gone[rank + 1]
                )
                for start in range(p)
            )
            for rank in range(p)
        ]  # fmt: skip

    def _exits(self) -> list[float]:
        """Return the longest path from each rank's last pair to the end (backwards only), s."""
        b, w = self.back, self.apart
        until = [0.0, *accumulate(b)]
        whole = [x + y for x, y in zip(b, w, strict=True)]
        found = []
        for rank, stays in enumerate(self.warmup):
            around = 0.0
            if self.wraps and stays >= self.group:
                around = until[-1] + (stays - self.group) * max(whole)
            most = 0.0
            slowest = 0.0
            for end in range(rank, -1, -1):
                slowest = max(slowest, whole[end])
                # delayed weight gradients, and that of the last micro-batch
                left = (end + 1) * w[end] if self.lag else 0.0
                most = max(most, until[rank] - until[end] + max(stays * slowest, around) + left)
            found.append(b[rank] + most)
        return found


# --------------------------------------------------------------------------------------------------
# Memory.


def in_flight(
    schedule: Schedule,
    stages: int,
    chunks: int,
    micro_batches: int,
    group: int = 0,
    *,
    ahead: int = 0,
) -> tuple[float, ...]:
    """Return the peak number of live micro-batches of every stage.

    A live micro-batch has saved activations on the stage. A chunk counts as 1 / chunks,
    from its forward to its backward, or to its weight gradient if backwards are split.

    group : consecutive micro-batches per chunk, 0 for the default.
    ahead : additional warm-up forwards.

    Raises InputError if the schedule cannot run.
    """
    p, v, m = stages, chunks, micro_batches
    if p == v == 1:
        return (float(min(1 + ahead, m)),)
    check_schedule(schedule, stages=p, chunks=v, micro_batches=m, group=group)
    return tuple(_live_chunks(schedule, rank, p, v, m, group, ahead) / v for rank in range(p))


def _live_chunks(
    schedule: Schedule, rank: int, p: int, v: int, m: int, group: int, ahead: int
) -> int:
    if schedule in ("gpipe", "looped_bfs"):
        return m * v
    if schedule == "dual_pipe_v":
        # 2 p warm-up forwards, plus the forward paired with the first backward of the steady state
        return 2 * p + 1
    if schedule == "zero_bubble_v":
        # warm-up forwards; the first of the second chunk is freed when the next one starts
        return min(m, 2 * p - rank - 1) + min(m, rank + 1)
    group = group or default_group(p, m)
    warmup = warmup_chunks(
        schedule, rank, stages=p, chunks=v, micro_batches=m, group=group, ahead=ahead
    )
    # the first forward of the steady state, plus those whose weight gradients are delayed
    waiting = rank if SCHEDULES[schedule].splits else 0
    return min(warmup + 1 + waiting, m * v)

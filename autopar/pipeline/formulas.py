"""Time and memory of a pipelined step in closed form, schedule by schedule.

Every time is an upper bound of the event replay (`autopar.pipeline.replay`) of the schedule's own
order, for stages as unequal as they may be. Counts of what is in flight are those of the order.

**Where the bounds come from.** A step lasts as long as its critical path: a chain of work in which
each piece waits for the one before, on the same rank or for a message of a neighbour. Of the
schedules whose steady state repeats a forward and a backward, number the pairs of each rank by k.
Staying on a rank for one k costs its pair, going up to the next rank costs a forward there and
advances k by some pairs, going down costs a gradient of inputs and advances it by none or one. So
all paths through a slowest rank x are at most as long as

    entry(x) + exit(x) + (pairs between) * pair(x)

where entry and exit are maxima over the ranks at which the path leaves the warm-up and reaches the
cool-down. Maximised over x this is never below the replay, and mostly is the replay.
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
    """Return seconds of a step that no replay of the schedule exceeds; raises InputError.

    forward_s, input_s, weight_s : (p,) of a micro-batch through all chunks of a stage, which are
    alike; the backward is input_s + weight_s. send_s : of a message between two parts of the model,
    for which its sender waits; those that ranks need not wait for take no longer. group, ahead : as
    in `autopar.pipeline.orders.actions`. Exact for GPipe and breadth-first; of the V-shaped ones a
    replay of 2 p micro-batches and the slowest stage for each further one. Fewer than p
    micro-batches are replayed.
    """
    p, m, v = len(forward_s), micro_batches, chunks
    if not p == len(input_s) == len(weight_s):
        raise InputError("forward_s, input_s and weight_s are of different numbers of stages")
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
        # what each sweep ends with has nobody to send to
        last = 2 * send_s * (v > 1)
        return _sweep_s(forward, m, v) + _sweep_s(backward, m, v) - last
    if m < p:
        # no rank comes to a steady state; there is little to replay
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
    """Return the idle seconds of equal stages, with 2 p micro-batches or more and free messages.

    Seconds are of a micro-batch on a stage. GPipe and 1F1B (p - 1)(F + B), interleaved 1 / v of it
    (arXiv 2104.04473, section 2.2); interleaved zero-bubble (p - 1) max(F, I, F + I - W) / v
    (arXiv 2401.10241 has F + I - W); the others as `step_s` finds them.
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
    """Return how many activations, and how many gradients, a stage sends per micro-batch."""
    down, up = [chunks] * stages, [chunks] * stages
    if chunks == 1:
        # of several chunks those at the ends differ from the others, which a bound may leave out
        down[-1] = up[0] = 0
    return down, up


def _sweep_s(seconds: Sequence[float], m: int, v: int) -> float:
    """Return the time in which m micro-batches pass v chunks of all stages, chunk by chunk; exact.

    A critical path goes through v - w rounds of all stages and meets a slow one in m (1 + w) - 1
    further micro-batches, w of 0 to v - 1; it is linear in w.
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
    """Return the replay of 2 p micro-batches, and the slowest stage for each one more.

    The critical path through the steady state of a rank grows by that rank's time with every
    micro-batch, so a step is the largest of straight lines over their number: convex, and at the
    end as steep as the slowest stage.
    """
    p = len(forward)
    first = min(m, 2 * p)
    found = replay(schedule, forward, inputs, weights, micro_batches=first, chunks=2, send_s=send_s)
    # each chunk sends up and down, but not at the ends of the model, nor within a rank
    sends = [4 - 2 * (rank == 0) - 2 * (rank == p - 1) for rank in range(p)]
    slowest = max(
        sum(each) + send_s * number
        for *each, number in zip(forward, inputs, weights, sends, strict=True)
    )
    return found.step_s + (m - first) * slowest


class _Rounds(Record):
    """A pipeline of pairs of one forward and one backward; seconds are of one chunk, not stage."""

    number: int
    """Of forwards of a rank: micro-batches times chunks."""
    wraps: bool
    """A rank has several chunks: behind the last rank comes the first."""
    group: int
    """Micro-batches that pass a chunk in a row, where they are fewest: the last group may have
    fewer than the others."""
    ups: int
    """Pairs by which a rank is ahead of the next one: forwards of its warm-up more."""
    lag: int
    """Pairs by which gradients of weights are put off, per rank before: 1, or 0."""
    warmup: list[int]
    forward: list[float]
    back: list[float]
    """What the rank before waits for: gradients of inputs, or the whole backward."""
    apart: list[float]
    """What follows later: gradients of weights, or nothing."""

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
        """Return the pipeline of a schedule, of (p,) seconds of all chunks."""
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
            # one forward less in the warm-up is the same order, and leaves a pair
            warmup=[min(each, m * v - 1) for each in warmup],
            forward=[f / v for f in forward_s],
            back=[b / v for b in back],
            apart=[w / v for w in later],
        )

    def step_s(self) -> float:
        """Return the longest that a critical path can be."""
        p, f, b, w = len(self.forward), self.forward, self.back, self.apart
        pair = [sum(each) for each in zip(f, b, w, strict=True)]
        # no pair of a path counts less than what is done at once outside of the steady state
        least = max(max(f), max(map(sum, zip(b, w, strict=True))))
        if self.lag:
            least = max(least, max(map(sum, zip(f, b, strict=True))))
        entries, exits = self._entries(), self._exits()
        f_until, b_until = [0.0, *accumulate(f)], [0.0, *accumulate(b)]
        # from the last rank a forward goes to the first, `group` forwards later
        forth = self.group - self.ups * (p - 1)
        early = max(0, -forth)

        def up(start: int, end: int, rate: float) -> float:
            return (
                f_until[end + 1] - f_until[start + 1] - (end - start) * (self.ups - self.lag) * rate
            )

        def down(start: int, end: int, rate: float) -> float:
            return b_until[start + 1] - b_until[end + 1] - (start - end) * self.lag * rate

        def way(start: int, end: int, rate: float, others: float, *, entering: bool) -> float:
            """Return what a way between two ranks adds over staying, whose pair costs `rate`.

            Pairs that lie in front of the first rank's steady state, or behind the last one's, are
            met on other ranks.
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
        """Return the longest path to the end of each rank's first pair that is whole.

        Forwards alone till the warm-up ends; pairs without gradients of weights while those lag.
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
        """Return the longest path from each rank's last pair to the end: backwards alone."""
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
                # of its weights, those that wait, and the last one's own
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
    """Return of every stage the most micro-batches whose activations are there; raises InputError.

    A chunk counts as its share of the stage's chunks, from its forward to its backward, and where
    that is split to the gradient of its weights. group : micro-batches that pass a chunk in a row,
    0 for the default; ahead : forwards more in the warm-up.
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

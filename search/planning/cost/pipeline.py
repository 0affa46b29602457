"""Step time and memory of every stage of one plan, computed from the planner's tables.

Source: cost-model.md section 9 and "Memory of a rank"; the formulas are in the docstring of
`search.planning.cost.tables`. This is the reference implementation for the C++ core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import F64
from autopar.records import Record
from autopar.run.plan import PipelineType
from search.planning.cost.tables import PlanTables

# --------------------------------------------------------------------------------------------------
# Event-level replay of one training step, from the dependencies alone, without formulas.
#
# It is printed with the step time T of the search as a check. The rules of the schedules are in
# csrc/planner/step/replay.cpp, and once more in plain Python in tests/oracles/replay.py.


_WORK: tuple[Literal["forward", "backward", "tail"], ...] = ("forward", "backward", "tail")
"""Kinds of work in the order of the compiled codes."""


class Event(Record):
    """Work of one stage with start and end, seconds since the start of the step."""

    stage: int
    kind: Literal["forward", "backward", "tail"]
    microbatch: int
    """-1 for the tail, which belongs to the step."""
    start_s: float
    end_s: float


_MOST_MICROBATCHES = 1 << 21
"""Maximum number of micro-batches, summed over stages, that are replayed: about 10 ms of work."""
_RHYTHM = 840
"""Micro-batches between the two replays of `_long_step`: a multiple of all periods up to 8."""


class ReplayResult(Record):
    """Result of a replayed step."""

    step_time_s: float
    idle_s: tuple[float, ...]
    """Idle time of each stage, seconds."""
    timeline: tuple[Event, ...] | None
    """Events of the step; None unless requested."""


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
    """Return step time and idle times of p stages and m micro-batches from an event replay.

    Long steps (about 2^21 micro-batches summed over stages) are replayed in part and extrapolated
    by `_long_step`, unless a timeline is requested. Ctrl-C interrupts the replay.

    forward_s, backward_s : seconds of one micro-batch on each stage.

    send_s : seconds of a transfer between stages j and j+1; p - 1 entries. A p-th one is ignored.

    tail_s : seconds of each stage once per step.
    timeline : True to return all events.

    Raises ValueError: lists of unequal length, or fewer than one micro-batch.
    """
    p, m = len(forward_s), num_microbatches
    if p == 0 or len(backward_s) != p or len(tail_s) != p or len(send_s) not in (p - 1, p):
        raise ValueError(
            f"{p} forward, {len(backward_s)} backward, {len(tail_s)} tail and {len(send_s)} send "
            "times do not describe one pipeline"
        )
    if m < 1:
        raise ValueError(f"a step has at least one micro-batch, not {m}")
    shares = (forward_s, backward_s, send_s, tail_s)
    # the pipeline is full long before the part that is extrapolated
    most = max(_MOST_MICROBATCHES // p, 4 * p) + _RHYTHM
    events: tuple[Event, ...] | None = None
    if m > most and not timeline:
        step = _long_step(shares, m, most, pipeline_type)
    else:
        step, columns = _whole_step(shares, m, pipeline_type, timeline=timeline)
        if columns is not None:
            rows = zip(*(column.tolist() for column in columns), strict=True)
            events = tuple(
                Event(stage=stage, kind=_WORK[code], microbatch=i, start_s=start, end_s=end)
                for stage, code, i, start, end in rows
            )
    busy = (m * (f + g) + t for f, g, t in zip(forward_s, backward_s, tail_s, strict=True))
    return ReplayResult(
        step_time_s=step, idle_s=tuple(max(0.0, step - b) for b in busy), timeline=events
    )


_Shares = tuple[Sequence[float], Sequence[float], Sequence[float], Sequence[float]]
"""Seconds of (forwards, backwards, transfers, tails) by stage."""


def _whole_step(
    shares: _Shares, num_microbatches: int, pipeline_type: PipelineType, *, timeline: bool = False
) -> tuple[float, tuple[NDArray[Any], ...] | None]:
    """Return (step time in seconds, columns of events if requested, else None)."""
    # imported here: commands that replay nothing start without the compiled core
    from search.planning.layered.core import core

    return core.replay(*shares, num_microbatches, pipeline_type == "gpipe", timeline)


def _long_step(
    shares: _Shares, num_microbatches: int, replayed: int, pipeline_type: PipelineType
) -> float:
    """Return the step time, seconds, extrapolated from the first `replayed` micro-batches.

    Once the pipeline is full, the slowest stage or link determines a periodic pattern: start times
    are linear in (max, +) algebra, so the step grows by a constant time per period.
    """
    whole, _ = _whole_step(shares, replayed, pipeline_type)
    part, _ = _whole_step(shares, replayed - _RHYTHM, pipeline_type)
    return whole + (num_microbatches - replayed) * ((whole - part) / _RHYTHM)


# --------------------------------------------------------------------------------------------------
# The objective: a step from its stages, and their memory.


class Evaluation(Record):
    """Time and memory of a plan; lists have one entry per stage."""

    step_time_s: float
    forward_s: tuple[float, ...]
    """Seconds of one micro-batch, with redistribution and vocabulary layers, without transfers."""
    backward_s: tuple[float, ...]
    send_s: tuple[float, ...]
    """Seconds of a transfer to the next stage; 0 for the last."""
    tail_s: tuple[float, ...]
    allocated_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    redistribute_forward_s: tuple[float, ...]
    """Part of `forward_s`."""
    redistribute_backward_s: tuple[float, ...]
    parts_s: Mapping[str, float]
    """Step time by part: `first_microbatch` (sum of f+g), `steady` (m-1 times the slowest),
    `transfer`, `tail`; sums to `step_time_s`."""
    bytes_by_category: tuple[Mapping[str, int], ...]
    """states, activations, vocab_states, vocab_activations, transient, shared, fixed."""


def in_flight(pipeline_type: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Return the number of live micro-batches of a stage: min(m, p - stage) (1F1B) or m (GPipe).

    1 for a single stage with either schedule.
    """
    if num_stages == 1:
        return 1
    if pipeline_type == "gpipe":
        return num_microbatches
    return min(num_microbatches, num_stages - stage)


def stage_kind(stage: int, num_stages: int) -> int:
    """Return the index of a stage's kind in STAGE_KINDS."""
    if num_stages == 1:
        return 0
    return 1 if stage == 0 else 3 if stage == num_stages - 1 else 2


def vocab_position(stage: int, num_stages: int) -> int | None:
    """Return the index in POSITIONS of a stage with embedding or head; None for a middle stage."""
    kind = stage_kind(stage, num_stages)
    return None if kind == 2 else min(kind, 2)


def evaluate(
    tables: PlanTables,
    *,
    table: int,
    num_microbatches: int,
    stage_sizes: Sequence[int],
    strategy_index: Sequence[int],
    vocab_index: int,
) -> Evaluation:
    """Return step time and memory of a plan from the planner's tables.

    table, vocab_index : indices of the table and of the vocabulary strategy.
    stage_sizes : number of layers of each stage.
    strategy_index : strategy of each layer.
    """
    n, e, m = table, vocab_index, num_microbatches
    p = len(stage_sizes)
    assert p == int(tables.table_stages[n]), "stages of the plan and of the table"
    assert sum(stage_sizes) == len(tables.layer_type) == len(strategy_index)
    # index of [m == 1, m > 1]
    now = 0 if m == 1 else 1
    kinds = tables.layer_type.astype(np.int64)
    chosen = np.asarray(strategy_index, dtype=np.int64)
    layout = tables.strategy_layout[chosen].astype(np.int64)
    vocab_layout = int(tables.vocab_layout[e])
    # before each layer: from the previous layer's layout, for the first from the embedding's
    before = np.concatenate(([vocab_layout], layout[:-1]))
    # a message has the size of the producing layer's output
    producer = np.concatenate((kinds[:1], kinds[:-1]))
    change_forward = tables.redistribute_forward_s[n, producer, before, layout]
    change_backward = tables.redistribute_backward_s[n, producer, before, layout]
    # from the last layer to the head, charged to the last stage
    head = (n, int(kinds[-1]), int(layout[-1]), vocab_layout)

    forward, backward, send, tail = [], [], [], []
    redistribute_forward, redistribute_backward = [], []
    allocated, flights, categories = [], [], []
    start = 0
    for j, size in enumerate(stage_sizes):
        run = slice(start, start + size)
        k, s = kinds[run], chosen[run]
        start += size
        f_change = float(change_forward[run].sum())
        g_change = float(change_backward[run].sum())
        f = float(tables.forward_s[n, k, s].sum())
        g = float(tables.backward_s[n, k, s].sum())
        end = float(tables.tail_s[n, k, s].sum())
        flight = in_flight(tables.pipeline_type, j, p, m)
        # two layers do not peak at the same time: the largest counts
        transient = int(tables.transient_bytes[now, n, k, s].max(initial=0))
        shared = int(tables.shared_bytes[n, k, s].max(initial=0))
        vocab_states = vocab_activations = 0
        position = vocab_position(j, p)
        if position is not None:
            at = (n, position, e)
            f += float(tables.vocab_forward_s[at])
            g += float(tables.vocab_backward_s[at])
            end += float(tables.vocab_tail_s[at])
            vocab_states = int(tables.vocab_static_bytes[(now, *at)])
            vocab_activations = int(tables.vocab_activation_bytes[at]) * flight
            transient = max(transient, int(tables.vocab_transient_bytes[(now, *at)]))
            shared = max(shared, int(tables.vocab_shared_bytes[at]))
        if j == p - 1:
            f_change += float(tables.redistribute_forward_s[head])
            g_change += float(tables.redistribute_backward_s[head])
        forward.append(f + f_change)
        backward.append(g + g_change)
        redistribute_forward.append(f_change)
        redistribute_backward.append(g_change)
        tail.append(end)
        last = start - 1
        send.append(float(tables.send_s[n, kinds[last], layout[last]]) if j < p - 1 else 0.0)
        category = {
            "states": int(tables.static_bytes[now, n, k, s].sum()),
            "activations": int(tables.activation_bytes[n, k, s].sum()) * flight,
            "vocab_states": vocab_states,
            "vocab_activations": vocab_activations,
            "transient": transient,
            "shared": shared,
            "fixed": int(tables.stage_fixed_bytes[n, stage_kind(j, p)]),
        }
        categories.append(category)
        allocated.append(sum(category.values()))
        flights.append(flight)

    parts = _step_parts(tables.pipeline_type, m, forward, backward, send, tail)
    return Evaluation(
        step_time_s=sum(parts.values()),
        forward_s=tuple(forward),
        backward_s=tuple(backward),
        send_s=tuple(send),
        tail_s=tuple(tail),
        allocated_bytes=tuple(allocated),
        in_flight=tuple(flights),
        redistribute_forward_s=tuple(redistribute_forward),
        redistribute_backward_s=tuple(redistribute_backward),
        parts_s=parts,
        bytes_by_category=tuple(categories),
    )


def replica_step_times(
    tables: PlanTables,
    drawn: tuple[F64, F64, F64],
    vocab: tuple[F64, F64, F64] | None,
    *,
    num_microbatches: int,
    stage_sizes: Sequence[int],
    strategy_index: Sequence[int],
) -> F64:
    """Return the step times of a plan for R random draws of its compute times, (R,) seconds.

    Redistribution and transfers are those of the tables.

    tables : arrays with one table and one vocabulary strategy.
    drawn : (R, K, S) forward, backward and tail of layers, seconds.
    vocab : (R, 3, 1) forward, backward and tail of embedding and head; None: those of the tables.
    """
    seen = evaluate(
        tables,
        table=0,
        num_microbatches=num_microbatches,
        stage_sizes=stage_sizes,
        strategy_index=strategy_index,
        vocab_index=0,
    )
    chosen = np.asarray(strategy_index, dtype=np.int64)
    layers = [values[:, tables.layer_type, chosen] for values in drawn]
    if vocab is None:
        vocab = (tables.vocab_forward_s, tables.vocab_backward_s, tables.vocab_tail_s)
    sums: tuple[list[F64], list[F64], list[F64]] = ([], [], [])
    start = 0
    for j, size in enumerate(stage_sizes):
        run = slice(start, start + size)
        start += size
        position = vocab_position(j, len(stage_sizes))
        for stages, of_layers, of_vocab in zip(sums, layers, vocab, strict=True):
            seconds: F64 = of_layers[:, run].sum(axis=1)
            stages.append(seconds if position is None else seconds + of_vocab[:, position, 0])
    forward, backward, tail = sums
    parts = _step_parts(
        tables.pipeline_type,
        num_microbatches,
        [f + change for f, change in zip(forward, seen.redistribute_forward_s, strict=True)],
        [g + change for g, change in zip(backward, seen.redistribute_backward_s, strict=True)],
        list(seen.send_s),
        tail,
        lambda values: reduce(np.maximum, values),
    )
    times: F64 = sum(parts.values(), np.zeros(len(drawn[0])))
    return times


_Seconds = TypeVar("_Seconds", float, F64)


def _step_parts(
    pipeline_type: str,
    m: int,
    forward: list[_Seconds],
    backward: list[_Seconds],
    send: list[float],
    tail: list[_Seconds],
    most: Callable[[list[Any]], Any] = max,
) -> dict[str, _Seconds]:
    """Return the step time T by part (`Evaluation.parts_s`), seconds.

    1F1B: T = sum s_j + (m-1)*max s_j + max tail_j with s_j = f_j + g_j + 2*cbar*(p-1)/p. GPipe: T =
    sum (f_j+g_j) + (m-1)*(max(f_j, c_j) + max(g_j, c_j)) + 2*sum c_j + max tail_j, the maxima over
    all stages and links: a link slower than every stage is the bottleneck.

    most : function for the maximum of several times, which may be arrays.
    """
    p = len(forward)
    stage = [f + g for f, g in zip(forward, backward, strict=True)]
    if pipeline_type == "gpipe":
        slowest = most([*forward, *send, 0.0]) + most([*backward, *send, 0.0])
        # an activation forward and a gradient back, on every link
        transfer = 2.0 * sum(send)
    else:
        slowest = most(stage)
        # 2*cbar*(p-1)/p in every s_j: p times in the sum, m - 1 times in the maximum
        transfer = (p + m - 1) * (2.0 * max(send) * (p - 1) / p)
    return {
        "first_microbatch": sum(stage),
        "steady": (m - 1) * slowest,
        "transfer": transfer,
        "tail": most(tail),
    }

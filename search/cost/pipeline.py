"""The one objective T and the memory of every stage, evaluated for one plan on the tables.

Source: cost-model.md section 9 and "Memory of a rank"; the formulas are those of the docstring
of `search.tables`. Plain float64 and int64, so it is the yardstick for every faster kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from search.tables import PlanTables

__all__ = ["Evaluation", "evaluate", "in_flight", "stage_kind", "vocab_position"]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Time and memory of a plan; lists have one entry per stage."""

    step_time_s: float
    forward_s: tuple[float, ...]
    """One micro-batch, with redistribution and vocabulary layers, without transfers."""
    backward_s: tuple[float, ...]
    send_s: tuple[float, ...]
    """To the next stage; 0 for the last."""
    tail_s: tuple[float, ...]
    allocated_bytes: tuple[int, ...]
    in_flight: tuple[int, ...]
    redistribute_forward_s: tuple[float, ...]
    """Part of `forward_s`."""
    redistribute_backward_s: tuple[float, ...]
    parts_s: Mapping[str, float]
    """The step time split: `first_microbatch` (sum of f+g), `steady` (m-1 times the slowest),
    `transfer`, `tail`; sums to `step_time_s`."""
    bytes_by_category: tuple[Mapping[str, int], ...]
    """states, activations, vocab_states, vocab_activations, transient, shared, fixed."""


def in_flight(pipeline_type: str, stage: int, num_stages: int, num_microbatches: int) -> int:
    """Return the micro-batches whose activations stage j holds: p - j (1F1B), m (GPipe).

    A single stage runs one micro-batch after the other under either name, and never more than
    all of them are in flight (m < p is illegal with 1F1B, but still priced).
    """
    if num_stages == 1:
        return 1
    if pipeline_type == "gpipe":
        return num_microbatches
    return min(num_microbatches, num_stages - stage)


def stage_kind(stage: int, num_stages: int) -> int:
    """Return the index into STAGE_KINDS of a stage."""
    if num_stages == 1:
        return 0
    return 1 if stage == 0 else 3 if stage == num_stages - 1 else 2


def vocab_position(stage: int, num_stages: int) -> int | None:
    """Return the index into POSITIONS of the vocabulary layers of a stage, None for a middle."""
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
    """Return T and the stages of the plan that takes `strategy_index[l]` for layer l.

    stage_sizes : layers per stage, length p, sums to L.
    """
    n, e, m = table, vocab_index, num_microbatches
    p = len(stage_sizes)
    assert p == int(tables.table_stages[n]), "stages of the plan and of the table"
    assert sum(stage_sizes) == len(tables.layer_type) == len(strategy_index)
    now = 0 if m == 1 else 1
    kinds = tables.layer_type.astype(np.int64)
    chosen = np.asarray(strategy_index, dtype=np.int64)
    layout = tables.strategy_layout[chosen].astype(np.int64)
    outer = int(tables.vocab_layout[e])
    before = np.concatenate(([outer], layout[:-1]))
    producer = np.concatenate((kinds[:1], kinds[:-1]))
    change_forward = tables.redistribute_forward_s[n, producer, before, layout]
    change_backward = tables.redistribute_backward_s[n, producer, before, layout]
    head = (n, int(kinds[-1]), int(layout[-1]), outer)

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


def _step_parts(
    pipeline_type: str,
    m: int,
    forward: list[float],
    backward: list[float],
    send: list[float],
    tail: list[float],
) -> dict[str, float]:
    """1F1B: T = sum s_j + (m-1)*max s_j + max tail_j with s_j = f_j + g_j + 2*cbar*(p-1)/p.

    GPipe: T = sum (f_j+g_j) + (m-1)*(max(f_j, c_j) + max(g_j, c_j)) + 2*sum c_j + max tail_j,
    the maxima over all stages and links: a link slower than every stage is the bottleneck.
    """
    p = len(forward)
    stage = [f + g for f, g in zip(forward, backward, strict=True)]
    if pipeline_type == "gpipe":
        slowest = max(*forward, *send, 0.0) + max(*backward, *send, 0.0)
        transfer = 2.0 * sum(send)
    else:
        slowest = max(stage)
        transfer = (p + m - 1) * (2.0 * max(send) * (p - 1) / p)
    return {
        "first_microbatch": sum(stage),
        "steady": (m - 1) * slowest,
        "transfer": transfer,
        "tail": max(tail),
    }

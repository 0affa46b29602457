"""A plan priced in plain Python, term by term, by the docstring of `planning/cost/tables.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from search.planning.cost.tables import PlanTables

ONLY, FIRST, MIDDLE, LAST = "only", "first", "middle", "last"
POSITION = {ONLY: 0, FIRST: 1, LAST: 2}
STAGE_KIND = {ONLY: 0, FIRST: 1, MIDDLE: 2, LAST: 3}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Step time and memory of one plan."""

    valid: bool
    """Every row that the plan uses is valid and every stage has a layer."""
    step_time_s: float
    samples_per_s: float
    stage_bytes: tuple[int, ...]

    @property
    def peak_bytes(self) -> int:
        """Return the memory of the peak stage, bytes."""
        return max(self.stage_bytes)


def stage_kind(j: int, p: int) -> str:
    """Return the kind of stage j of p."""
    if p == 1:
        return ONLY
    return FIRST if j == 0 else LAST if j == p - 1 else MIDDLE


def evaluate(
    tables: PlanTables,
    candidate: int,
    stage_sizes: Sequence[int],
    strategy_index: Sequence[int],
    vocab_index: int,
) -> Evaluation:
    """Return step time (s) and allocated bytes of every stage of one plan."""
    n = int(tables.candidate_table[candidate])
    m = int(tables.candidate_microbatches[candidate])
    p = int(tables.table_stages[n])
    g = int(tables.table_microbatch[n])
    many = 0 if m == 1 else 1
    e = vocab_index
    num_layers = len(tables.layer_type)
    types = [int(k) for k in tables.layer_type]
    layout = [int(tables.strategy_layout[s]) for s in strategy_index]
    vocab_layout = int(tables.vocab_layout[e])
    assert len(stage_sizes) == p
    assert len(strategy_index) == num_layers == sum(stage_sizes)

    valid = bool(tables.vocab_valid[n, e]) and min(stage_sizes) >= 1
    forward, backward, tail, send, memory = [], [], [], [], []
    layer = 0
    for j in range(p):
        kind = stage_kind(j, p)
        in_flight = min(m, p - j) if tables.pipeline_type == "1f1b" or p == 1 else m
        f = b = t = 0.0
        kept = int(tables.stage_fixed_bytes[n, STAGE_KIND[kind]])
        transients, shared = [0], [0]
        if kind in POSITION:
            v = POSITION[kind]
            f += float(tables.vocab_forward_s[n, v, e])
            b += float(tables.vocab_backward_s[n, v, e])
            t += float(tables.vocab_tail_s[n, v, e])
            kept += int(tables.vocab_static_bytes[many, n, v, e])
            kept += int(tables.vocab_activation_bytes[n, v, e]) * in_flight
            transients.append(int(tables.vocab_transient_bytes[many, n, v, e]))
            shared.append(int(tables.vocab_shared_bytes[n, v, e]))
        for _ in range(stage_sizes[j]):
            k, s = types[layer], strategy_index[layer]
            valid = valid and bool(tables.valid[n, k, s])
            producer_type = types[layer - 1] if layer else k
            producer_layout = layout[layer - 1] if layer else vocab_layout
            move = (n, producer_type, producer_layout, layout[layer])
            f += float(tables.forward_s[n, k, s]) + float(tables.redistribute_forward_s[move])
            b += float(tables.backward_s[n, k, s]) + float(tables.redistribute_backward_s[move])
            t += float(tables.tail_s[n, k, s])
            kept += int(tables.static_bytes[many, n, k, s])
            kept += int(tables.activation_bytes[n, k, s]) * in_flight
            transients.append(int(tables.transient_bytes[many, n, k, s]))
            shared.append(int(tables.shared_bytes[n, k, s]))
            layer += 1
        if j == p - 1:
            move = (n, types[-1], layout[-1], vocab_layout)
            f += float(tables.redistribute_forward_s[move])
            b += float(tables.redistribute_backward_s[move])
        else:
            send.append(float(tables.send_s[n, types[layer - 1], layout[layer - 1]]))
        forward.append(f)
        backward.append(b)
        tail.append(t)
        memory.append(kept + max(transients) + max(shared))

    time = pipeline_time(forward, backward, send, tail, m, tables.pipeline_type)
    return Evaluation(
        valid=valid,
        step_time_s=time,
        samples_per_s=g * m / time,
        stage_bytes=tuple(memory),
    )


def pipeline_time(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    send_s: Sequence[float],
    tail_s: Sequence[float],
    num_microbatches: int,
    pipeline_type: str,
) -> float:
    """Return T in seconds; `send_s` has one entry per boundary between stages."""
    p, m = len(forward_s), num_microbatches
    work = [f + g for f, g in zip(forward_s, backward_s, strict=True)]
    if pipeline_type == "gpipe":
        bottleneck = max([*forward_s, *send_s]) + max([*backward_s, *send_s])
        return sum(work) + (m - 1) * bottleneck + 2 * sum(send_s) + max(tail_s)
    assert pipeline_type == "1f1b"
    slowest_send = max(send_s, default=0.0)
    slot = [w + 2 * slowest_send * (p - 1) / p for w in work]
    return sum(slot) + (m - 1) * max(slot) + max(tail_s)

"""T and memory of a plan: the docstring of `planning.cost.tables` written out layer by layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar.records import replace
from autopar.run.plan import LayerStrategy, VocabStrategy
from search.planning.cost.model import CostModel
from search.planning.cost.pipeline import evaluate, in_flight, stage_kind, vocab_position
from search.planning.cost.tables import PlanTables
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec

STRATEGIES = [
    LayerStrategy(),
    LayerStrategy(zero3=True),
    LayerStrategy(tp=2),
    LayerStrategy(tp=2, checkpoint=True),
    LayerStrategy(tp=2, ulysses=True),
]
VOCAB = [VocabStrategy(), VocabStrategy(tp=2)]
TABLES: list[Any] = [(1, 8, "ddp"), (2, 8, "zero2"), (4, 8, "zero2")]


def plan_tables(pipeline: Any, *, sequence_parallel: bool = True) -> PlanTables:
    """Return tables of two layer types, four layers each."""
    spec = toy_spec()
    two = replace(
        spec,
        layers=(spec.layers[0], replace(spec.layers[0], hidden_size=1024)),
        tied_embeddings=True,
    )
    model = toy_model(kinds=2, sequence_parallel=sequence_parallel)
    options = SearchOptions(sequence_parallel=sequence_parallel)
    cost = CostModel(two, model, toy_hardware(estimated=True), options)
    return cost.tables(STRATEGIES, VOCAB, TABLES, [(0, 4)], pipeline)


def by_hand(
    t: PlanTables, n: int, m: int, sizes: list[int], choice: list[int], e: int
) -> tuple[float, list[int]]:
    """Return T and the allocated bytes, one layer after the other."""
    p, now = len(sizes), 0 if m == 1 else 1
    stage = [j for j, size in enumerate(sizes) for _ in range(size)]
    f, g, tail, c = [0.0] * p, [0.0] * p, [0.0] * p, [0.0] * p
    memory, transient, shared = [0] * p, [0] * p, [0] * p
    layout, kind = int(t.vocab_layout[e]), int(t.layer_type[0])
    for layer, s in enumerate(choice):
        j, k = stage[layer], int(t.layer_type[layer])
        to = int(t.strategy_layout[s])
        flight = m if t.pipeline_type == "gpipe" and p > 1 else min(m, p - j)
        f[j] += t.forward_s[n, k, s] + t.redistribute_forward_s[n, kind, layout, to]
        g[j] += t.backward_s[n, k, s] + t.redistribute_backward_s[n, kind, layout, to]
        tail[j] += t.tail_s[n, k, s]
        memory[j] += int(t.static_bytes[now, n, k, s])
        memory[j] += int(t.activation_bytes[n, k, s]) * flight
        transient[j] = max(transient[j], int(t.transient_bytes[now, n, k, s]))
        shared[j] = max(shared[j], int(t.shared_bytes[n, k, s]))
        c[j] = float(t.send_s[n, k, to]) if j < p - 1 else 0.0
        layout, kind = to, k
    f[-1] += t.redistribute_forward_s[n, kind, layout, t.vocab_layout[e]]
    g[-1] += t.redistribute_backward_s[n, kind, layout, t.vocab_layout[e]]
    for j, position in [(0, 0)] if p == 1 else [(0, 1), (p - 1, 2)]:
        flight = m if t.pipeline_type == "gpipe" and p > 1 else min(m, p - j)
        f[j] += t.vocab_forward_s[n, position, e]
        g[j] += t.vocab_backward_s[n, position, e]
        tail[j] += t.vocab_tail_s[n, position, e]
        memory[j] += int(t.vocab_static_bytes[now, n, position, e])
        memory[j] += int(t.vocab_activation_bytes[n, position, e]) * flight
        transient[j] = max(transient[j], int(t.vocab_transient_bytes[now, n, position, e]))
        shared[j] = max(shared[j], int(t.vocab_shared_bytes[n, position, e]))
    for j in range(p):
        kinds = 0 if p == 1 else 1 if j == 0 else 3 if j == p - 1 else 2
        memory[j] += transient[j] + shared[j] + int(t.stage_fixed_bytes[n, kinds])
    if t.pipeline_type == "gpipe":
        step = sum(f) + sum(g) + (m - 1) * (max(f + c) + max(g + c)) + 2 * sum(c) + max(tail)
    else:
        s = [x + y + 2 * max(c) * (p - 1) / p for x, y in zip(f, g, strict=True)]
        step = sum(s) + (m - 1) * max(s) + max(tail)
    return step, memory


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_evaluation_is_the_formula(pipeline: str, sequence_parallel: bool, seed: int) -> None:
    """Random plans: the same T and the same bytes; parts and categories add up."""
    random = np.random.default_rng(seed)
    tables = plan_tables(pipeline, sequence_parallel=sequence_parallel)
    n = seed % 3
    p = TABLES[n][0]
    m = 1 if seed < 2 else int(random.integers(p, 9))
    sizes = [1] * p
    for _ in range(8 - p):
        sizes[int(random.integers(p))] += 1
    valid = np.flatnonzero(tables.valid[n].all(axis=0))
    choice = random.choice(valid, size=8).tolist()
    e = int(random.choice(np.flatnonzero(tables.vocab_valid[n])))
    found = evaluate(
        tables, table=n, num_microbatches=m, stage_sizes=sizes, strategy_index=choice, vocab_index=e
    )
    step_s, allocated = by_hand(tables, n, m, sizes, choice, e)

    assert found.step_time_s == pytest.approx(step_s, rel=1e-12)
    assert list(found.allocated_bytes) == allocated
    assert sum(found.parts_s.values()) == pytest.approx(found.step_time_s, rel=1e-12)
    assert [sum(c.values()) for c in found.bytes_by_category] == allocated
    assert found.send_s[-1] == 0.0


def test_positions_of_stages() -> None:
    """One stage is the only one; otherwise first, middle and last."""
    assert [stage_kind(j, 4) for j in range(4)] == [1, 2, 2, 3]
    assert stage_kind(0, 1) == 0
    assert [vocab_position(j, 4) for j in range(4)] == [1, None, None, 2]
    assert vocab_position(0, 1) == 0
    assert [in_flight("1f1b", j, 4, 8) for j in range(4)] == [4, 3, 2, 1]
    assert in_flight("gpipe", 3, 4, 8) == 8
    assert in_flight("gpipe", 0, 1, 8) == in_flight("1f1b", 0, 1, 8) == 1
    assert [in_flight("1f1b", j, 8, 2) for j in range(8)] == [2, 2, 2, 2, 2, 2, 2, 1]

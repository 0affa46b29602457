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
from tests.oracles import reference

STRATEGIES = [
    LayerStrategy(),
    LayerStrategy(zero3=True),
    LayerStrategy(tp=2),
    LayerStrategy(tp=2, checkpoint=True),
    LayerStrategy(tp=2, ulysses=True),
]
VOCAB = [VocabStrategy(), VocabStrategy(tp=2)]
TABLES: list[Any] = [(1, 8, "ddp"), (2, 8, "zero2"), (4, 8, "zero2")]


def plan_tables(
    pipeline: Any, candidate: tuple[int, int], *, sequence_parallel: bool
) -> PlanTables:
    """Return tables of two layer types, four layers each; candidate: table, micro-batches."""
    spec = toy_spec()
    two = replace(
        spec,
        layers=(spec.layers[0], replace(spec.layers[0], hidden_size=1024)),
        tied_embeddings=True,
    )
    model = toy_model(kinds=2, sequence_parallel=sequence_parallel)
    options = SearchOptions(sequence_parallel=sequence_parallel)
    cost = CostModel(two, model, toy_hardware(estimated=True), options)
    return cost.tables(STRATEGIES, VOCAB, TABLES, [candidate], pipeline)


@pytest.mark.parametrize("pipeline", ["1f1b", "gpipe"])
@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_evaluation_is_the_formula(pipeline: str, sequence_parallel: bool, seed: int) -> None:
    """Random plans: the same T and the same bytes; parts and categories add up."""
    random = np.random.default_rng(seed)
    n = seed % 3
    p = TABLES[n][0]
    m = 1 if seed < 2 else int(random.integers(p, 9))
    tables = plan_tables(pipeline, (n, m), sequence_parallel=sequence_parallel)
    sizes = [1] * p
    for _ in range(8 - p):
        sizes[int(random.integers(p))] += 1
    valid = np.flatnonzero(tables.valid[n].all(axis=0))
    choice = random.choice(valid, size=8).tolist()
    e = int(random.choice(np.flatnonzero(tables.vocab_valid[n])))
    found = evaluate(
        tables, table=n, num_microbatches=m, stage_sizes=sizes, strategy_index=choice, vocab_index=e
    )
    plain = reference.evaluate(tables, 0, sizes, choice, e)
    allocated = list(plain.stage_bytes)

    assert found.step_time_s == pytest.approx(plain.step_time_s, rel=1e-12)
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

"""Searches that keep what earlier ones of the same tables have proven: the answers of fresh ones.

AUTOPAR_ORACLE_INSTANCES=2000 checks as many instances.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from autopar.errors import InputError
from autopar.records import replace
from search.planning.cost.tables import PlanTables
from search.planning.layered.core import TableSolution, core, solve_tables
from tests.oracles.deep import deep_instance
from tests.oracles.instances import GRAIN_BYTES, Shape, random_tables
from tests.oracles.wild import wild_instance

NUM_INSTANCES = int(os.environ.get("AUTOPAR_ORACLE_INSTANCES", "60"))


def without_effort(answer: TableSolution) -> TableSolution:
    """Return the answer without what kept knowledge is there to save."""
    return replace(answer, states=0, opened=0, items=0)


def budgets(tables: PlanTables, start: int, options: dict[str, Any], seed: int) -> list[int]:
    """Return constraints up and down around `start`, and at and below the smallest that works."""
    rng = np.random.default_rng([seed, 3])
    rest = {name: value for name, value in options.items() if name != "alternatives"}
    smallest = solve_tables(tables, 0, **rest).smallest_budget_bytes
    found = [start]
    for _ in range(5):
        low, high = sorted((smallest, max(start, smallest + 8 * GRAIN_BYTES)))
        found.append(int(rng.integers(low, high + 1)))
    return [*found, smallest, smallest - 1, start, found[1], smallest]


def check(tables: PlanTables, start: int, options: dict[str, Any], seed: int) -> None:
    """Every answer of a row of searches is the one that a fresh search gives."""
    known = core.Knowledge()
    rest = dict(options)
    for n, budget in enumerate(budgets(tables, start, options, seed)):
        rest["alternatives"] = (options.get("alternatives", 0), 0, 2)[n % 3]
        fresh = solve_tables(tables, budget, **rest)
        again = solve_tables(tables, budget, known=known, **rest)
        assert without_effort(again) == without_effort(fresh), f"search {n}, {budget} bytes"


@pytest.mark.parametrize("seed", range(NUM_INSTANCES))
def test_wild_instances_at_many_budgets(seed: int) -> None:
    instance = wild_instance(seed)
    check(instance.tables, instance.budget_bytes, instance.options, seed)


@pytest.mark.parametrize("seed", range(NUM_INSTANCES))
def test_deep_instances_at_many_budgets(seed: int) -> None:
    instance = deep_instance(seed, small=True)
    check(instance.tables, instance.budget_bytes, instance.options, seed)


def _tables(seed: int = 0) -> PlanTables:
    shape = Shape(
        layers=10, types=2, strategies=6, layouts=2, vocab=2, stages=(1, 2, 4),
        candidates=((0, 4), (1, 4), (1, 8), (2, 8)),
    )  # fmt: skip
    return random_tables(np.random.default_rng(seed), shape, {"1f1b"})


def test_the_same_question_again_opens_nothing() -> None:
    known = core.Knowledge()
    first = solve_tables(_tables(), 1 << 40, known=known)
    again = solve_tables(_tables(), 1 << 40, known=known)
    assert first.opened > 0
    assert again.opened == 0
    assert again.strategy_index == first.strategy_index


def test_what_a_limited_search_met_is_where_the_next_one_starts() -> None:
    known = core.Knowledge()
    best = solve_tables(_tables(), 1 << 40)
    solve_tables(_tables(), 1 << 40, time_limit_s=1e-6, known=known)
    finished = solve_tables(_tables(), 1 << 40, known=known)
    assert without_effort(finished) == without_effort(best)
    limited = solve_tables(_tables(), 1 << 40, time_limit_s=1e-6, known=known)
    assert limited.step_time_s == best.step_time_s


def test_knowledge_of_other_tables_is_refused() -> None:
    known = core.Knowledge()
    solve_tables(_tables(), 1 << 40, known=known)
    with pytest.raises(InputError, match="other tables"):
        solve_tables(_tables(1), 1 << 40, known=known)

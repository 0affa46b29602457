"""A time limit ends a search inside a sub-problem too, with a plan and an honest bound."""

from __future__ import annotations

import time

import numpy as np

from search.planner.core import solve_tables
from tests.oracles.instances import Shape, random_tables
from tests.oracles.reference import evaluate


def test_a_hard_sub_problem_stops_with_its_best_plan() -> None:
    """60 layouts on 64 stages take minutes to prove; the limit returns what is known."""
    shape = Shape(
        layers=96,
        types=2,
        strategies=12,
        layouts=60,
        vocab=2,
        stages=(64,),
        candidates=((0, 64), (0, 67)),
    )
    tables = random_tables(np.random.default_rng(3), shape, {"1f1b"})
    start = time.monotonic()

    solution = solve_tables(tables, 1 << 40, time_limit_s=0.5)

    assert solution.status == "time_limit"
    assert time.monotonic() - start < 30  # minutes without a limit; machines may be slow
    assert 0 < solution.bound_step_time_s < solution.step_time_s
    actual = evaluate(
        tables,
        solution.candidate,
        solution.stage_sizes,
        solution.strategy_index,
        solution.vocab_index,
    )
    assert actual.valid
    assert abs(actual.step_time_s / solution.step_time_s - 1) < 1e-9

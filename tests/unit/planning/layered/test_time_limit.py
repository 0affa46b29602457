"""A time limit ends a search inside a sub-problem too, with a plan and an honest bound."""

from __future__ import annotations

import math
import time
from io import StringIO
from typing import Any
from unittest.mock import patch

import numpy as np
from msgspec.structs import asdict
from rich.console import Console

from autopar.records import replace
from autopar.units import GIB
from search.planning.layered.core import TableSolution, solve_tables
from search.planning.layered.planner import Planner
from search.planning.layered.summary import summary_of
from search.planning.session import open_session
from search.request.options import SearchOptions
from search.request.request import InputSpec
from search.show.terminal import show_answer
from tests.interrupts import interrupted
from tests.oracles.instances import Shape, hard_tables, random_tables
from tests.oracles.reference import evaluate


def test_a_hard_sub_problem_stops_with_its_best_plan() -> None:
    """60 layouts on 64 stages take minutes to prove; the limit returns what is known."""
    tables = hard_tables()
    start = time.process_time()

    solution = solve_tables(tables, 1 << 40, time_limit_s=0.5)

    assert solution.status == "time_limit"
    assert time.process_time() - start < 30  # minutes without a limit
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


UNLIKE = Shape(
    layers=340, types=31, strategies=11, layouts=3, vocab=2, stages=(16,), candidates=((0, 32),)
)
"""Every strategy of every type has transients of its own: a million pairs of maxima."""


def test_unlike_layer_types_have_a_plan_in_time() -> None:
    """What is tried when no plan is known once took minutes, as did why nothing fits."""
    tables = random_tables(np.random.default_rng(0), UNLIKE, {"gpipe", "transients"})
    start = time.process_time()
    nothing = solve_tables(tables, 0, time_limit_s=60.0)
    assert nothing.status == "infeasible"
    smallest = nothing.smallest_budget_bytes

    for budget in (smallest, 2 * smallest):
        solution = solve_tables(tables, budget, time_limit_s=0.3)
        assert solution.candidate == 0
        plan = (solution.stage_sizes, solution.strategy_index, solution.vocab_index)
        assert evaluate(tables, 0, *plan).peak_bytes <= budget
    assert solve_tables(tables, smallest - 1, time_limit_s=60.0).status == "infeasible"
    assert time.process_time() - start < 60  # seconds on an idle machine


def test_the_bound_of_a_stopped_search_holds() -> None:
    """No limit makes the bound more than the optimum, or the plan faster than it."""
    shape = Shape(
        layers=60,
        types=2,
        strategies=8,
        layouts=5,
        vocab=2,
        stages=(4, 8, 2),
        candidates=((0, 8), (0, 16), (1, 16), (1, 8), (2, 5)),
    )
    tables = random_tables(np.random.default_rng(11), shape, {"1f1b", "transients"})
    best = solve_tables(tables, 100 * GIB)
    assert best.status == "optimal"
    least = best.step_time_s / int(tables.candidate_batch[best.candidate])

    for limit_s in (1e-6, 1e-3, 1e-2, 0.03, 0.1, 0.3):
        found = solve_tables(tables, 100 * GIB, time_limit_s=limit_s, alternatives=3)
        assert found.bound_s_per_sample <= least * (1 + 1e-9)
        assert found.status == "optimal" or not found.alternatives_complete
        if found.candidate >= 0:
            batch = int(tables.candidate_batch[found.candidate])
            assert found.step_time_s / batch >= least * (1 - 1e-9)


def planner(**options: Any) -> Planner:
    """Return a planner of a space of 30,000 rows on estimated inputs."""
    values = SearchOptions(
        sp_space="tp+sp",
        default_dp_type="any",
        min_bsz=8,
        max_bsz=512,
        memory_constraint_bytes=79 * GIB,
        top=0,
        **options,
    )
    return open_session(InputSpec(model="llama2-7b", hardware="h100:2x8"), values).planner


def test_tables_priced_in_parts_are_the_same() -> None:
    """In their order, to the bit."""
    whole = planner()._tables((64, 96), None).tables
    with patch("search.planning.layered.planner._ROWS_AT_ONCE", 0):
        parts = planner()._tables((64, 96), time.perf_counter() + 1000.0)

    assert parts.unpriced == 0
    for name, array in asdict(whole).items():
        other = getattr(parts.tables, name)
        if isinstance(array, np.ndarray):
            assert array.dtype == other.dtype, name
            assert array.tobytes() == other.tobytes(), name
        else:
            assert array == other, name


def test_a_limit_while_tables_are_priced() -> None:
    """The best of what was priced is a plan, of whose distance from the best nothing is known."""
    start = time.process_time()
    # no table but the first slice is priced in so little time, however fast that is
    with patch("search.planning.layered.planner._PRICED_SHARE", 0.0):
        result = planner(time_limit_s=0.05).solve()

    assert time.process_time() - start < 10
    assert result.status == "time_limit"
    assert result.plan is not None
    assert result.bound_samples_per_s == math.inf
    assert result.gap == math.inf
    assert "sizes of micro-batches and numbers of stages were not priced" in result.unfinished[0]
    console = Console(record=True, width=200, file=StringIO())
    show_answer(console, summary_of(result, title="t"))
    text = console.export_text()
    assert "stopped by the time limit, gap unknown" in text
    assert "were not priced" in text


def test_alternatives_that_the_limit_cut_off_are_told() -> None:
    """The plan is proven the best, but the list of others is not all of them."""

    def stopped(*given: Any, **named: Any) -> TableSolution:
        return replace(solve_tables(*given, **named), alternatives_complete=False)

    with patch("search.planning.layered.planner.solve_tables", stopped):
        result = planner().solve(global_batch_sizes=[64])

    assert result.status == "optimal"
    early = "the time limit ended the search early: "
    assert result.unfinished == (early + "no alternatives were looked for",)


def test_ctrl_c_while_tables_are_priced() -> None:
    """At once, without any limit."""
    big = planner(max_pp_deg=4)
    with interrupted(0.1):
        big.solve(global_batch_sizes=range(64, 4096, 4))

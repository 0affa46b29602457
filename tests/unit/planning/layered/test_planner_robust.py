"""The planner's core under hard questions, time limits, Ctrl-C and arrays that make no sense."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from autopar.errors import InputError
from autopar.records import replace
from autopar.units import GIB
from search.planning.layered.core import TableSolution, core, solve_stage, solve_tables
from search.planning.layered.planner import Planner
from search.planning.session import open_session
from search.request.options import SearchOptions
from search.request.request import InputSpec
from tests.interrupts import interrupted
from tests.oracles.instances import Shape, hard_tables, random_tables

LIMIT_S = 100.0
"""Far above what any of these takes, on a busy machine too; a search that needs more has failed."""


def estimated(model: str, hardware: str, **options: Any) -> Planner:
    """Return a planner with GPipe on estimated inputs."""
    values = SearchOptions(
        pipeline_type="gpipe", time_profile_mode="batch", time_limit_s=LIMIT_S, **options
    )
    return open_session(InputSpec(model=model, hardware=hardware), values).planner


def test_little_memory_and_many_equally_good_plans_are_answered() -> None:
    """Of little memory, few plans are known early; a planner that is asked again agrees."""
    planner = estimated("t5-3b", "h100:4x8", settle_bsz=16, memory_constraint_bytes=10 * GIB)
    found = [planner.solve() for _ in range(2)]

    assert [result.status for result in found] == ["optimal"] * 2
    assert found[0].plan == found[1].plan
    others = [[other.plan for other in result.alternatives] for result in found]
    assert others[0] == others[1]
    assert len(others[0]) == 5


def test_one_micro_batch_on_many_stages_is_not_harder_than_several() -> None:
    """With one micro-batch only sums and the largest tail count, not forward and backward apart."""
    result = estimated("gpt2-xl", "h100:8x8", memory_constraint_bytes=79 * GIB).solve()

    assert result.status == "optimal"
    assert result.plan is not None
    assert result.plan.num_microbatches == 1
    assert result.plan.num_stages == 8
    assert result.stats.states < 5_000_000  # not hundreds of millions


def test_a_time_limit_holds_inside_a_sub_problem() -> None:
    """The clock is looked at within it, not only between sub-problems."""
    tables = hard_tables()
    start = time.process_time()

    solution = solve_tables(tables, 1 << 40, time_limit_s=0.3)

    assert solution.status == "time_limit"
    assert solution.candidate >= 0
    assert time.process_time() - start < 5  # 0.2 s more on an idle machine


def test_ctrl_c_ends_a_search() -> None:
    """The signal's exception comes out of the call."""
    tables = hard_tables()
    with interrupted(0.3):
        solve_tables(tables, 1 << 40, time_limit_s=LIMIT_S)


def test_a_bound_of_no_time_has_no_rate() -> None:
    """A search that was stopped at once may know no better bound than 0 seconds."""
    planner = estimated("bert-large", "h100:1x8", memory_constraint_bytes=79 * GIB)

    def stopped(*given: Any, **named: Any) -> TableSolution:
        found = solve_tables(*given, **named)
        return replace(found, status="time_limit", bound_s_per_sample=0.0, bound_step_time_s=0.0)

    with patch("search.planning.layered.planner.solve_tables", stopped):
        result = planner.solve()

    assert result.status == "time_limit"
    assert result.bound_samples_per_s == float("inf")
    assert result.gap == float("inf")


SMALL = Shape(
    layers=3, types=1, strategies=2, layouts=2, vocab=1, stages=(1,), candidates=((0, 2),)
)


def given() -> list[Any]:
    """Return the arguments of one call of the core."""
    calls: list[list[Any]] = []
    original = core.search_plan

    def record(*arguments: Any) -> Any:
        calls.append(list(arguments))
        return original(*arguments)

    with patch.object(core, "search_plan", record):
        solve_tables(random_tables(np.random.default_rng(0), SMALL, {"1f1b"}), 1 << 40)
    return calls[0]


def spoiled(array: Any, value: Any) -> Any:
    """Return a copy whose first element is the value."""
    copy = np.array(array)
    copy.flat[0] = value
    return copy


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("forward_s", lambda a: spoiled(a, np.nan), "nan"),
        ("tail_s", lambda a: spoiled(a, -1.0), "-1"),
        ("send_s", lambda a: spoiled(a, np.inf), "inf"),
        ("static_bytes", lambda a: spoiled(a, -5), "-5"),
        ("stage_fixed_bytes", lambda a: spoiled(a, 2**62), str(2**62)),
        ("layer_type", lambda a: spoiled(a, 7), "contains 7"),
        ("candidate_table", lambda a: spoiled(a, -1), "contains -1"),
        ("candidate_microbatches", lambda a: spoiled(a, 0), "contains 0"),
        ("table_stages", lambda a: a[:0], "table_stages"),
        ("backward_s", lambda a: a[:, :, :1], "expected (1, 1, 2)"),
        ("shared_bytes", lambda a: a.astype(np.float64), "float64, expected int64"),
        ("valid", lambda a: a[0], "dimensions, expected 3"),
        ("vocab_layout", lambda a: a.tolist(), "not a numpy array"),
        ("layer_type", lambda a: np.zeros(100_000, dtype=np.int32), "100000 layers"),
    ],
)
def test_the_core_names_the_array_that_it_refuses(name: str, change: Any, says: str) -> None:
    """NaN, signs, overflow, indices, shapes and types."""
    arguments = given()
    arguments[0][name] = change(arguments[0][name])

    with pytest.raises(ValueError, match=r"expected|numpy") as refusal:
        core.search_plan(*arguments)

    if name != "table_stages":  # its length is what the others are compared with
        assert name in str(refusal.value)
        assert says in str(refusal.value)


def test_a_missing_array_is_named() -> None:
    """Not a KeyError of an inner name."""
    arguments = given()
    del arguments[0]["send_s"]

    with pytest.raises(ValueError, match="send_s is missing"):
        core.search_plan(*arguments)


def test_tables_with_nan_are_an_input_error() -> None:
    """From Python the refusal is one of the project's own errors."""
    tables = random_tables(np.random.default_rng(0), SMALL, {"1f1b"})

    with pytest.raises(InputError, match="send_s contains nan"):
        solve_tables(replace(tables, send_s=spoiled(tables.send_s, np.nan)), 1 << 40)


def stage(layers: int, strategies: int) -> list[Any]:
    """Return arguments of `core.solve_stage` in which no two layers are equal."""
    time_s = np.arange(1.0, layers * strategies + 1).reshape(layers, strategies)
    moves = np.zeros((layers, strategies, strategies))
    return [time_s, np.ones((layers, strategies)), moves, 1e9, None]


@pytest.mark.parametrize(
    ("position", "value", "says"),
    [
        (0, np.ones(4), "time_s has 1 dimensions"),
        (0, np.full((2, 3), np.nan), "time_s contains nan"),
        (1, np.full((2, 3), -1.0), "memory_bytes contains -1"),
        (1, np.ones((3, 2)), "memory_bytes does not have the shape"),
        (2, np.full((2, 3, 3), 1e200), "transition_s contains 1e"),
        (3, float("nan"), "budget_bytes is nan"),
        (4, np.ones(2), "transient_bytes does not have the shape"),
    ],
)
def test_the_stage_solver_names_what_it_refuses(position: int, value: Any, says: str) -> None:
    """As the planner does."""
    arguments = stage(2, 3)
    arguments[position] = value

    with pytest.raises(ValueError, match=says):
        core.solve_stage(*arguments)


def test_stages_too_large_are_refused_before_memory_is_taken() -> None:
    """By number of layers, and by how many differ."""
    with pytest.raises(InputError, match="100000 layers, expected at most 2000"):
        solve_stage(np.ones((100_000, 1)), np.ones((100_000, 1)), np.zeros((100_000, 1, 1)), 1.0)
    with pytest.raises(ValueError, match="2000 different layers of 2000"):
        core.solve_stage(*stage(2000, 40))

"""The joint planner on wild instances, and defects that such instances once found.

AUTOPAR_ORACLE_INSTANCES=20000 runs as many instead of 250.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from autopar.records import replace
from search.planning.cost.tables import PlanTables
from search.planning.layered.core import TableChoice, TableSolution, solve_stage, solve_tables
from tests.oracles.instances import Shape, random_tables
from tests.oracles.wild import NO_PLAN, Kind, WildInstance, wild_instance

NUM_INSTANCES = int(os.environ.get("AUTOPAR_ORACLE_INSTANCES", "250"))


def solved(instance: WildInstance) -> TableSolution:
    """Return the planner's answer."""
    return solve_tables(instance.tables, instance.budget_bytes, **instance.options)


def check(instance: WildInstance) -> None:
    """Optimum, bound and alternatives are right."""
    answer = solved(instance)
    best = instance.best_samples_per_s()
    if best == NO_PLAN:
        assert answer.status == "infeasible"
        assert answer.smallest_budget_bytes == instance.smallest_budget_bytes
        return
    assert answer.status == "optimal"
    assert instance.samples_per_s(answer) == pytest.approx(best, rel=1e-9)
    assert answer.bound_s_per_sample == pytest.approx(1 / best, rel=1e-9, abs=0.0)
    plans: list[TableChoice | TableSolution] = [answer, *answer.alternatives]
    better: list[Kind] = []
    for plan in plans:
        time_s, peak_bytes = instance.priced(plan)
        assert plan.step_time_s == pytest.approx(time_s, rel=1e-9, abs=0.0)
        assert peak_bytes <= instance.budget_bytes
        wanted = instance.best_samples_per_s(better)
        assert instance.samples_per_s(plan) == pytest.approx(wanted, rel=1e-9)
        better.append(instance.kind(plan))
    if len(answer.alternatives) < instance.alternatives:
        assert instance.best_samples_per_s(better) == NO_PLAN
    assert len(answer.alternatives) <= instance.alternatives


@pytest.mark.parametrize("seed", range(NUM_INSTANCES))
def test_planner_agrees_with_exhaustive_search(seed: int) -> None:
    check(wild_instance(seed))


def test_instances_are_of_every_sort() -> None:
    """The generator does not lose what makes the instances wild."""
    instances = [wild_instance(seed) for seed in range(200)]
    assert any(i.best_samples_per_s() == NO_PLAN for i in instances)
    assert any(not i.blocks for i in instances)
    assert any(i.uniform for i in instances)
    assert any(i.division for i in instances)
    assert any(i.stage_allowed is not None for i in instances)
    assert any(i.alternatives for i in instances)
    assert any(not i.tables.forward_s.any() for i in instances)
    assert any(i.smallest_budget_bytes > 10**13 for i in instances)
    assert {i.tables.pipeline_type for i in instances} == {"1f1b", "gpipe"}


@pytest.mark.parametrize(
    ("seed", "samples_per_s"), [(2834, 3318.278481012658), (71998, 34952.53333333333)]
)
def test_cell_cut_off_by_sends_does_not_cut_off_longer_ones(
    seed: int, samples_per_s: float
) -> None:
    """A stage of fewer layers may be excluded by what it would send, one of more may be best."""
    instance = wild_instance(seed)
    assert instance.best_samples_per_s() == pytest.approx(samples_per_s)  # still that instance
    check(instance)


def test_smallest_budget_with_several_layer_types() -> None:
    instance = wild_instance(512742)
    assert len(set(instance.tables.layer_type.tolist())) > 1
    assert instance.smallest_budget_bytes == 5

    answer = solved(instance)

    assert answer.status == "infeasible"
    assert answer.smallest_budget_bytes == 5
    enough = solve_tables(instance.tables, 5, **instance.options)
    assert enough.status == "optimal"


def tails_only(tail_s: list[float]) -> PlanTables:
    """Return 31 equal layers on two stages whose three strategies differ in tail and bytes."""
    shape = Shape(
        layers=31,
        types=1,
        strategies=3,
        layouts=1,
        vocab=1,
        stages=(2,),
        candidates=((0, 2),),
    )
    tables = random_tables(np.random.default_rng(0), shape, {"1f1b"})
    names = [name for name in tables.__struct_fields__ if name.endswith(("_s", "_bytes"))]
    fields = {name: np.zeros_like(getattr(tables, name)) for name in names}
    fields["valid"] = np.ones_like(tables.valid)
    fields["vocab_valid"] = np.ones_like(tables.vocab_valid)
    fields["forward_s"] += 0.01
    fields["tail_s"][...] = tail_s
    fields["static_bytes"][...] = [1 << 28, 1 << 29, 1 << 31]
    return replace(tables, **fields)


def test_a_tail_of_zero_is_not_lost_to_cancellation() -> None:
    """Sixteen tails summed and taken away again leave no remainder that excludes a plan."""
    for tail_s in np.arange(0.1, 2.8, 0.0137).tolist():
        answer = solve_tables(tails_only([tail_s, tail_s / 3, 0.0]), 80 << 30)
        assert answer.status == "optimal", tail_s
        assert set(answer.strategy_index) == {2}
        # 31 layers once, the longer stage's 16 once more
        assert answer.step_time_s == pytest.approx(0.47, rel=1e-9)


@pytest.mark.parametrize("num_layers", [10, 31, 33, 40, 60])
def test_stage_that_has_to_alternate(num_layers: int) -> None:
    """Two strategies that must not follow themselves, however many layers there are."""
    moves = np.zeros((num_layers, 2, 2))
    moves[:, [0, 1], [0, 1]] = np.inf
    ones = np.ones((num_layers, 2))

    answer = solve_stage(ones, ones, moves, 1e9)

    assert answer.status == "optimal"
    assert answer.total_s == float(num_layers)
    assert set(np.diff(answer.choice)) == {-1, 1}


@pytest.mark.parametrize(
    ("time_s", "memory_bytes", "budget_bytes", "total_s"),
    [
        ([1.0, 2.0, 0.5], [50.0, 40.0, 4e15], 149.0, 4.0),
        ([1.0, 2.0], [1e17, 40.0], 119.0, np.inf),
        ([1.0, 2.0], [1e17, 40.0], 120.0, 6.0),
        ([1.0, 2.0], [0.0, 0.0], -1.0, np.inf),
        ([1.0, 2.0], [0.0, 1e15], -1.0, np.inf),
    ],
)
def test_stage_keeps_its_budget_to_the_byte(
    time_s: list[float], memory_bytes: list[float], budget_bytes: float, total_s: float
) -> None:
    """Bytes of a forbidden size beside small ones do not blur the budget."""
    size = len(time_s)

    answer = solve_stage([time_s] * 3, [memory_bytes] * 3, np.zeros((3, size, size)), budget_bytes)

    assert answer.total_s == total_s
    assert answer.status == ("optimal" if np.isfinite(total_s) else "infeasible")
    if answer.status == "optimal":
        assert answer.memory_bytes <= budget_bytes


def test_stage_tells_times_apart_far_below_the_slowest() -> None:
    answer = solve_stage([[1e4, 1.04e-12, 1e-12]], [[1, 1, 1]], np.zeros((1, 3, 3)), 10)
    assert answer.choice == (2,)
    assert answer.total_s == 1e-12

"""The joint planner on deep instances: certificates, and equal problems in other words.

AUTOPAR_ORACLE_INSTANCES=2000 checks as many of the full depth instead of the slow ones' 300.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from autopar.records import replace
from search.planning.layered.core import TableChoice, TableSolution, solve_tables
from tests.oracles import milp
from tests.oracles.deep import (
    PATTERNS,
    DeepInstance,
    deep_instance,
    split_types,
    with_strategies_shuffled,
)
from tests.oracles.instances import TIME_FIELDS
from tests.oracles.reference import evaluate

NUM_SLOW = int(os.environ.get("AUTOPAR_ORACLE_INSTANCES", "300"))
QUICK = (0, 3, 6, 8, 9, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
LIMIT_S = 5.0
"""Of one search where any instance is asked: some are hard for any exact method."""


def solved(instance: DeepInstance, limit_s: float | None = LIMIT_S) -> TableSolution:
    """Return the planner's answer."""
    return solve_tables(
        instance.tables,
        instance.budget_bytes,
        time_limit_s=limit_s,
        **instance.options,
    )


def check_plan(instance: DeepInstance, answer: TableSolution) -> None:
    """The plan is legal, fits, takes as long as it says, and no less than its bound."""
    plans: list[TableChoice | TableSolution] = [answer, *answer.alternatives]
    for plan in plans:
        own = evaluate(
            instance.tables,
            plan.candidate,
            plan.stage_sizes,
            plan.strategy_index,
            plan.vocab_index,
        )
        assert own.valid
        assert own.peak_bytes <= instance.budget_bytes
        assert plan.step_time_s == pytest.approx(own.step_time_s, rel=1e-9, abs=0.0)
    assert answer.bound_step_time_s <= answer.step_time_s * (1 + 1e-12)


def agree(instance: DeepInstance, one: TableSolution, two: TableSolution) -> None:
    """Two answers to equal problems: the same optimum, or bounds that hold the other's plan."""
    batch = instance.tables.candidate_batch
    seconds = [a.step_time_s / int(batch[a.candidate]) for a in (one, two) if a.candidate >= 0]
    if one.status == two.status == "optimal":
        assert seconds[0] == pytest.approx(seconds[1], rel=1e-12, abs=0.0)
    elif one.status == two.status == "infeasible":
        assert one.smallest_budget_bytes == two.smallest_budget_bytes
    else:
        assert "time_limit" in (one.status, two.status)
        assert max(one.bound_s_per_sample, two.bound_s_per_sample) <= min(
            seconds, default=float("inf")
        ) * (1 + 1e-12)


def check(instance: DeepInstance, limit_s: float | None) -> None:
    """Plan and certificate hold, and do not depend on words or bytes that are not used."""

    def again(**changes: Any) -> TableSolution:
        return solved(replace(instance, **changes), limit_s)

    answer = again()
    if answer.candidate >= 0:
        check_plan(instance, answer)
    if answer.status == "time_limit":
        return
    agree(instance, answer, solved(with_strategies_shuffled(instance), limit_s=limit_s))
    agree(instance, answer, solved(split_types(instance), limit_s=limit_s))
    smallest = answer.smallest_budget_bytes
    if answer.status == "infeasible":
        if smallest:
            assert again(budget_bytes=smallest).status != "infeasible"
            assert again(budget_bytes=smallest - 1).status == "infeasible"
        return
    # a power of two scales every time exactly
    doubled: dict[str, Any] = {name: 2.0 * getattr(instance.tables, name) for name in TIME_FIELDS}
    slow = again(tables=replace(instance.tables, **doubled))
    if slow.status == "optimal":
        assert slow.bound_s_per_sample == pytest.approx(
            2.0 * answer.bound_s_per_sample, rel=1e-12, abs=0.0
        )
    less = again(budget_bytes=instance.budget_bytes - 1)
    if less.status == "optimal":
        assert less.bound_s_per_sample >= answer.bound_s_per_sample * (1 - 1e-12)


@pytest.mark.parametrize("seed", QUICK)
def test_quick_instances_are_solved(seed: int) -> None:
    check(deep_instance(seed), limit_s=None)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_SLOW))
def test_every_instance_has_a_certificate(seed: int) -> None:
    check(deep_instance(seed), LIMIT_S)


@pytest.mark.parametrize(
    "seed", [seed if seed < 8 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(40)]
)
def test_small_ones_agree_with_the_integer_program(seed: int) -> None:
    instance = deep_instance(seed, small=True)

    answer = solved(instance)
    wanted = milp.solve_tables(instance.tables, instance.budget_bytes)

    assert answer.status == wanted.status
    if answer.status == "optimal":
        check_plan(instance, answer)
        batch = int(instance.tables.candidate_batch[answer.candidate])
        assert batch / answer.step_time_s == pytest.approx(wanted.samples_per_s, rel=1e-6)


def test_instances_are_of_every_sort() -> None:
    """The generator does not lose what makes the instances deep."""
    instances = [deep_instance(seed) for seed in range(150)]
    labels = Counter(label for i in instances for label in i.labels)
    for label in (*PATTERNS, "short", "just", "tight", "loose", "gpipe", "1f1b", "ties", "smooth"):
        assert labels[label] >= 3, label
    depths = [len(i.tables.layer_type) for i in instances]
    assert min(depths) < 25
    assert max(depths) > 350
    assert max(i.tables.valid.shape[1] for i in instances) > 25
    assert max(int(i.tables.table_stages.max()) for i in instances) > 50

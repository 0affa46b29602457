"""`solve_stage` against exhaustive search and integer programs on random one-stage problems."""

from __future__ import annotations

import os

import numpy as np
import pytest

from search.planning.layered.core import StageSolution, solve_stage
from tests.oracles import milp
from tests.oracles.brute import StageInstance, stage_optimum
from tests.oracles.instances import TICK_S, stage_instance

NUM_SMALL = int(os.environ.get("AUTOPAR_ORACLE_INSTANCES", "180"))
NUM_LARGE = max(1, NUM_SMALL // 9)


def solve(instance: StageInstance) -> StageSolution:
    """Return the planner's answer."""
    return solve_stage(
        instance.time_s,
        instance.memory_bytes,
        instance.transition_s,
        instance.budget_bytes,
        instance.transient_bytes,
    )


def check(instance: StageInstance, answer: StageSolution, best_s: float, rel: float) -> None:
    """The optimum is found, fits, and the figures are those of the choice."""
    if np.isinf(best_s):
        assert answer.status == "infeasible"
        assert answer.choice == ()
        return
    assert answer.status == "optimal"
    assert len(answer.choice) == len(instance.time_s)
    total = memory = transient = 0.0
    for layer, s in enumerate(answer.choice):
        total += instance.time_s[layer, s]
        memory += instance.memory_bytes[layer, s]
        if layer:
            total += instance.transition_s[layer, answer.choice[layer - 1], s]
        if instance.transient_bytes is not None:
            transient = max(transient, instance.transient_bytes[layer, s])
    assert memory + transient <= instance.budget_bytes
    assert answer.memory_bytes == pytest.approx(memory + transient, rel=1e-12)
    assert answer.total_s == pytest.approx(total, rel=1e-12)
    assert total == pytest.approx(best_s, rel=rel)
    assert answer.bound_s == pytest.approx(best_s, rel=max(rel, 1e-9))


@pytest.mark.parametrize("seed", range(NUM_SMALL))
def test_stage_optimum_is_that_of_brute_force(seed: int) -> None:
    """Same optimum to the last digit that a sum of times has."""
    instance = stage_instance(seed)

    check(instance, solve(instance), stage_optimum(instance), 1e-9)


@pytest.mark.parametrize("seed", range(NUM_LARGE))
def test_stage_optimum_is_that_of_the_integer_program(seed: int) -> None:
    """Same optimum where choices cannot be enumerated."""
    instance = stage_instance(seed, large=True)

    check(instance, solve(instance), milp.solve_stage(instance), 1e-6)


def test_stage_oracles_agree() -> None:
    """Exhaustive search and integer program give the same totals."""
    for seed in range(40):
        instance = stage_instance(seed)
        best, other = stage_optimum(instance), milp.solve_stage(instance)
        assert np.isinf(best) == np.isinf(other), seed
        if np.isfinite(best):
            assert other == pytest.approx(best, rel=1e-6), seed


def test_stage_instances_have_the_promised_mix() -> None:
    """Enough problems are infeasible, tied, bound by memory and by transients."""
    kinds = {"infeasible": 0, "ties": 0, "binding": 0, "transients": 0}
    for seed in range(180):
        instance = stage_instance(seed)
        best = stage_optimum(instance)
        kinds["infeasible"] += bool(np.isinf(best))
        kinds["ties"] += "ties" in instance.labels
        kinds["binding"] += bool(best > stage_optimum(instance, unlimited=True) + TICK_S / 2)
        light = stage_optimum(instance, transients=False)
        kinds["transients"] += bool(best > light + TICK_S / 2)
    assert {kind: n for kind, n in kinds.items() if n < 18} == {}

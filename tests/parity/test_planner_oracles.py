"""The joint planner against exhaustive search and integer programs on random instances.

AUTOPAR_ORACLE_INSTANCES=1800 runs the full sets (1,800 by brute force, 200 integer programs).
"""

from __future__ import annotations

import os
import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from autopar.records import replace
from search.planning.layered.core import TableSolution, solve_tables
from tests.oracles import milp
from tests.oracles.brute import MEMORY_TERMS, TIME_TERMS, PlanSpace
from tests.oracles.instances import (
    GRAIN_BYTES,
    MAX_PLANS,
    TICK_S,
    Instance,
    Shape,
    large_instance,
    random_tables,
    small_instance,
)
from tests.oracles.mutations import MUTATIONS, Mutation, is_wrong, restricted
from tests.oracles.reference import Evaluation, evaluate

NUM_SMALL = int(os.environ.get("AUTOPAR_ORACLE_INSTANCES", "180"))
NUM_LARGE = max(1, NUM_SMALL // 9)
SUITE = range(min(NUM_SMALL, 180))
UNLIMITED = int(np.iinfo(np.int64).max // 4)

small = lru_cache(maxsize=200)(small_instance)


def priced(instance: Instance, answer: TableSolution) -> Evaluation:
    """Return the independent evaluation of the planner's plan."""
    return evaluate(
        instance.tables,
        answer.candidate,
        answer.stage_sizes,
        answer.strategy_index,
        answer.vocab_index,
    )


def check_answer(instance: Instance, answer: TableSolution) -> None:
    """The planner's figures are those of its plan, and its plan can be used."""
    own = priced(instance, answer)
    assert own.valid
    assert own.peak_bytes <= instance.budget_bytes
    assert answer.step_time_s == pytest.approx(own.step_time_s, rel=1e-9)
    assert answer.bound_step_time_s == pytest.approx(own.step_time_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(NUM_SMALL))
def test_planner_finds_the_brute_force_optimum(seed: int) -> None:
    """Same status, same throughput; when nothing fits, the same smallest budget."""
    instance = small(seed)
    assert instance.space is not None
    best = instance.space.optimum(instance.budget_bytes)

    answer = solve_tables(instance.tables, instance.budget_bytes)

    assert answer.status == best.status, sorted(instance.labels)
    if best.status == "infeasible":
        assert answer.smallest_budget_bytes == best.smallest_budget_bytes
        return
    check_answer(instance, answer)
    assert priced(instance, answer).samples_per_s == pytest.approx(best.samples_per_s, rel=1e-9)


def test_smallest_budget_is_enough() -> None:
    """What an infeasible search names as the smallest budget has a plan, one byte less has none."""
    checked = 0
    for seed in SUITE:
        instance = small(seed)
        answer = solve_tables(instance.tables, instance.budget_bytes)
        if answer.status == "optimal" or answer.smallest_budget_bytes == 0:
            continue
        enough = answer.smallest_budget_bytes
        assert solve_tables(instance.tables, enough).status == "optimal"
        assert solve_tables(instance.tables, enough - 1).status == "infeasible"
        checked += 1
    assert checked >= len(SUITE) // 15


@pytest.mark.parametrize(
    ("candidates", "first"),
    [
        (((0, 2), (1, 3), (1, 1)), (1, 1)),
        (((1, 1), (1, 3), (0, 2)), (1, 1)),
        (((0, 2), (1, 3)), (1, 3)),
    ],
)
def test_of_equally_fast_plans_fewer_stages_then_fewer_micro_batches_come_first(
    candidates: tuple[tuple[int, int], ...], first: tuple[int, int]
) -> None:
    """Two stages of two layers of 4 ticks, m = 2, are as fast as one of four layers of 3, any m."""
    shape = Shape(
        layers=4,
        types=1,
        strategies=1,
        layouts=1,
        vocab=1,
        stages=(2, 1),
        candidates=candidates,
    )
    drawn = random_tables(np.random.default_rng(0), shape, {"1f1b"})
    names = [name for name in drawn.__struct_fields__ if name.endswith(("_s", "_bytes"))]
    arrays: dict[str, Any] = {name: np.zeros_like(getattr(drawn, name)) for name in names}
    arrays["forward_s"][0], arrays["forward_s"][1] = 4 * TICK_S, 3 * TICK_S
    arrays |= {name: np.ones_like(getattr(drawn, name)) for name in ("valid", "vocab_valid")}
    tables = replace(drawn, table_microbatch=np.ones(2, dtype=np.int64), **arrays)

    answer = solve_tables(tables, 0)
    assert candidates[answer.candidate] == first
    assert tables.candidate_batch[answer.candidate] / answer.step_time_s == 1 / (12 * TICK_S)


@pytest.mark.whole
@pytest.mark.parametrize(
    "seed",
    [seed if seed < 6 else pytest.param(seed, marks=pytest.mark.slow) for seed in range(NUM_LARGE)],
)
def test_planner_finds_the_integer_programs_optimum(seed: int) -> None:
    """Same status and throughput on instances with more plans than can be enumerated."""
    instance = large_instance(seed)
    best = milp.solve_tables(instance.tables, instance.budget_bytes)

    answer = solve_tables(instance.tables, instance.budget_bytes)

    assert answer.status == best.status, sorted(instance.labels)
    if best.status == "optimal":
        check_answer(instance, answer)
        rate = priced(instance, answer).samples_per_s
        assert rate == pytest.approx(best.samples_per_s, rel=1e-6)


@pytest.mark.whole
@pytest.mark.parametrize("number", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_integer_program_agrees_with_brute_force(number: int) -> None:
    """Two oracles that share no formula code give the same throughput."""
    for seed in range(number):
        instance = small_instance(seed, grains=True)
        assert instance.space is not None
        best = instance.space.optimum(instance.budget_bytes)
        other = milp.solve_tables(instance.tables, instance.budget_bytes)
        assert other.status == best.status, seed
        if best.status == "optimal":
            assert other.samples_per_s == pytest.approx(best.samples_per_s, rel=1e-6), seed


def test_brute_force_agrees_with_the_reference() -> None:
    """Every formula of the exhaustive search equals the plain evaluation, on random plans."""
    chosen = random.Random(0)
    for seed in SUITE:
        instance = small(seed)
        assert instance.space is not None
        for block in chosen.sample(instance.space.blocks, min(3, len(instance.space.blocks))):
            i = chosen.randrange(block.step_time_s.size)
            choice = block.choices[:, i].tolist()
            plain = evaluate(
                instance.tables, block.candidate, block.stage_sizes, choice, block.vocab_index
            )
            assert plain.valid
            assert plain.peak_bytes == block.peak_bytes[i]
            slack = 1e-12 if "inexact" in instance.labels else 0.0
            assert plain.step_time_s == pytest.approx(block.step_time_s[i], rel=slack, abs=0.0)


def test_small_instances_have_the_promised_mix() -> None:
    """Shares of every kind of problem, measured on what they do, not on how they were drawn."""
    share: dict[str, float] = {}
    for seed in SUITE:
        instance = small(seed)
        assert instance.space is not None
        assert instance.space.num_plans <= MAX_PLANS
        found = set(instance.labels)
        best = instance.space.optimum(instance.budget_bytes)
        free = instance.space.optimum(UNLIMITED)
        found.add("infeasible" if best.status == "infeasible" else "feasible")
        found.discard("binding")
        if best.status == "optimal" and best.plan != free.plan:
            found.add("binding")
        drop = {"transient", "shared", "vocab_transient", "vocab_shared"}
        light = PlanSpace(instance.tables, frozenset(drop)).optimum(instance.budget_bytes)
        if (light.status, light.plan) != (best.status, best.plan):
            found.add("transients decide")
        for label in found:
            share[label] = share.get(label, 0.0) + 1 / len(SUITE)
    if len(SUITE) < 100:
        pytest.skip("too few instances for shares")
    least = {
        "binding": 0.3,
        "infeasible": 0.09,
        "detour pays": 0.2,
        "ties": 0.2,
        "transients decide": 0.2,
        "several layer types": 0.3,
        "several candidates": 0.3,
        "several vocabulary strategies": 0.3,
        "m equals p": 0.1,
        "gpipe": 0.2,
        "1f1b": 0.2,
        "invalid rows": 0.1,
        "p=1": 0.1,
        "p=2": 0.1,
        "p=3": 0.1,
        "p=4": 0.1,
    }
    assert {k: share.get(k, 0.0) for k, v in least.items() if share.get(k, 0.0) < v} == {}


@pytest.mark.whole
def test_large_instances_are_beyond_brute_force_and_off_the_solvers_tolerance() -> None:
    """Sizes of the integer programs, and budgets that no sum of bytes comes near."""
    for seed in range(20):
        instance = large_instance(seed)
        tables = instance.tables
        assert len(tables.strategies) ** len(tables.layer_type) > MAX_PLANS / 5
        assert instance.budget_bytes % GRAIN_BYTES == GRAIN_BYTES // 2
        assert not (tables.static_bytes % GRAIN_BYTES).any()


@pytest.mark.parametrize("term", TIME_TERMS + MEMORY_TERMS)
def test_brute_force_without_a_term_is_wrong_somewhere(term: str) -> None:
    """The instances notice when any one term of step time or memory is missing."""
    for seed in SUITE:
        instance = small(seed)
        assert instance.space is not None
        truth = instance.space.optimum(instance.budget_bytes)
        other = PlanSpace(instance.tables, frozenset({term})).optimum(instance.budget_bytes)
        if is_wrong(instance.tables, instance.budget_bytes, truth, other):
            return
    pytest.fail(f"no instance of {len(SUITE)} notices that {term} is missing")


def test_every_term_is_mutated() -> None:
    """The planner is tried without each term that the exhaustive search can leave out."""
    assert {mutation.term for mutation in MUTATIONS} == {*TIME_TERMS, *MEMORY_TERMS}


@pytest.mark.whole
@pytest.mark.parametrize(
    "mutation", MUTATIONS, ids=lambda m: "-".join([m.term, *sorted(m.needs & {"gpipe", "1f1b"})])
)
def test_planner_without_a_term_is_wrong_somewhere(mutation: Mutation) -> None:
    """Fed tables that lack one term, the planner answers wrongly for at least one instance."""
    solved = 0
    for seed in range(3 * len(SUITE)):  # single terms in single places are rare
        instance = small(seed)
        tables = restricted(instance, mutation)
        if tables is None:
            continue
        truth = PlanSpace(tables).optimum(instance.budget_bytes)
        answer = solve_tables(*mutation.mutate(tables, instance.budget_bytes))
        solved += 1
        if mutation.exact and answer.status == "optimal":  # the mutation is what it says
            lacking = PlanSpace(tables, frozenset({mutation.term})).optimum(instance.budget_bytes)
            assert lacking.status == "optimal"
            if lacking.step_time_s > 0:
                batch = int(tables.candidate_batch[answer.candidate])
                rate = batch / answer.step_time_s
                assert rate == pytest.approx(lacking.samples_per_s, rel=1e-9), seed
        if is_wrong(tables, instance.budget_bytes, truth, answer):
            return
    pytest.fail(f"none of {solved} instances notices that {mutation.term} is missing")

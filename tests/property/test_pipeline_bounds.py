"""Schedule formulas never fall below the replay of their order, for any unequal stages."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st

from autopar.pipeline.formulas import step_s
from autopar.pipeline.replay import replay
from autopar.pipeline.schedules import SCHEDULES, Schedule, schedule_problem
from benchmarks.schedules import PAGE, compare, summary_of, table
from tests.often import often

_ROUNDING = 1 + 1e-12


def _any_pipeline(
    schedule: Schedule, chance: random.Random
) -> tuple[list[list[float]], dict[str, int]]:
    """Return seconds of unequal stages, some almost zero, and a legal shape."""
    facts = SCHEDULES[schedule]
    while True:
        stages = chance.randint(2, 10)
        chunks = facts.most_chunks or chance.randint(2, 6)
        shape = {"chunks": chunks, "micro_batches": chance.randint(1, 4 * stages)}
        if schedule == "interleaved":
            shape["group"] = chance.choice([0, 0, stages, stages + 1, stages + 3])
        if not schedule_problem(schedule, stages=stages, **shape):
            break
    wide, missing = chance.choice([0.1, 1.0, 2.0]), chance.choice([0.0, 0.5])
    seconds = [
        [
            1e-9 if chance.random() < missing else chance.lognormvariate(0.0, wide)
            for _ in range(stages)
        ]
        for _ in range(3)
    ]
    return seconds, shape


@often(60, 3000, st.sampled_from(sorted(SCHEDULES)), st.integers(0, 2**32))
def test_no_step_is_faster_than_its_bound_says(schedule: Schedule, seed: int) -> None:
    seconds, shape = _any_pipeline(schedule, random.Random(seed))
    found = replay(schedule, *seconds, **shape).step_s
    assert step_s(schedule, *seconds, **shape) * _ROUNDING >= found


@often(60, 1000, st.sampled_from(sorted(SCHEDULES)), st.integers(0, 2**32))
def test_stages_within_a_tenth_are_priced_within_three_percent(
    schedule: Schedule, seed: int
) -> None:
    """Forwards and backwards of stages differ together, as those of layers do."""
    chance = random.Random(seed)
    seconds, shape = _any_pipeline(schedule, chance)
    if shape.get("group", 0) > shape["micro_batches"]:
        shape["group"] = 0
        if schedule_problem(schedule, stages=len(seconds[0]), **shape):
            return
    sizes = [1 + chance.uniform(-0.05, 0.05) for _ in seconds[0]]
    kinds = [1.0, chance.uniform(0.8, 1.5), chance.uniform(0.5, 1.2)]
    seconds = [[kind * size for size in sizes] for kind in kinds]
    found = replay(schedule, *seconds, **shape).step_s
    assert found <= step_s(schedule, *seconds, **shape) * _ROUNDING <= 1.03 * found


@often(60, 1000, st.sampled_from(sorted(SCHEDULES)), st.integers(0, 2**32))
def test_a_slower_stage_makes_no_step_faster(schedule: Schedule, seed: int) -> None:
    chance = random.Random(seed)
    seconds, shape = _any_pipeline(schedule, chance)
    slower = [list(each) for each in seconds]
    slower[chance.randrange(3)][chance.randrange(len(seconds[0]))] *= 1.5
    before = replay(schedule, *seconds, **shape).step_s
    assert replay(schedule, *slower, **shape).step_s * _ROUNDING >= before


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_study_of_the_page_holds(schedule: Schedule) -> None:
    """For some of its pipelines: none below, near stages within 3 %, equal numbers in flight."""
    found = summary_of(schedule, list(compare(schedule, 30, seed=1)))
    assert found.below == 0
    assert found.same_in_flight == found.instances == 30
    assert found.near_worst < 0.03
    assert found.median < 0.005
    # the page has the row of a whole study
    title = SCHEDULES[schedule].title
    assert f"| {title} | 30 | 0 | " in table([found])
    assert f"| {title} | 1000 | 0 | " in PAGE.read_text(encoding="utf-8")

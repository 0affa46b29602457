"""The compiled replay of schedules against the one in plain Python, to the last bit."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from autopar.errors import InputError
from autopar.pipeline import SCHEDULES, Schedule, replay, schedule_problem
from search.planning.cost.pipeline import replay_schedule_s


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_replays_are_one(schedule: Schedule) -> None:
    """Stages and chunks of unequal times, groups, forwards ahead, messages of both kinds."""
    chance, compared = random.Random(schedule), 0
    facts = SCHEDULES[schedule]
    pairs = schedule in ("1f1b", "interleaved")
    while compared < 60:
        stages = chance.randint(1, 8)
        chunks = facts.most_chunks or chance.randint(2, 4)
        number = chance.randint(1, 3 * stages)
        group = chance.choice([0, stages + 1]) if schedule == "interleaved" else 0
        if schedule_problem(
            schedule, stages=stages, chunks=chunks, micro_batches=number, group=group
        ):
            continue
        seconds = [
            [[chance.lognormvariate(0, 1) for _ in range(chunks)] for _ in range(stages)]
            for _ in range(3)
        ]
        send_s, overlapped = chance.choice([0.0, 0.2]), chance.random() < 0.5
        ahead = chance.choice([0, 1]) if pairs else 0
        more: dict[str, Any] = {
            "micro_batches": number, "chunks": chunks, "send_s": send_s, "group": group,
            "ahead": ahead, "overlapped": overlapped,
        }  # fmt: skip
        expected = replay(schedule, *seconds, **more)
        found = replay_schedule_s(schedule, *seconds, **more)
        # a single stage adds I and W apart in one of them
        assert found == pytest.approx(expected.step_s, rel=1e-12)
        assert found == expected.step_s or stages == 1
        compared += 1


def test_what_cannot_run_is_refused_as_in_python() -> None:
    one = [1.0] * 4
    with pytest.raises(InputError, match="ZBV has 2 chunks"):
        replay_schedule_s("zero_bubble_v", one, one, one, micro_batches=8)
    with pytest.raises(InputError, match="groups of 2 micro-batches"):
        replay_schedule_s("interleaved", one, one, one, micro_batches=8, chunks=2, group=2)


def test_a_large_pipeline_takes_seconds_at_most() -> None:
    """64 stages of 8 chunks and 2,048 micro-batches: two million pieces of work."""
    one = [1.0] * 64
    begun = time.process_time()
    found = replay_schedule_s("interleaved", one, one, one, micro_batches=2048, chunks=8)
    assert found == pytest.approx(3 * (2048 + 63 / 8))
    assert time.process_time() - begun < 3.0

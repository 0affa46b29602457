"""Schedules of a pipeline: orders drawn by hand, published bubbles, what is in flight, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import InputError
from autopar.pipeline.formulas import bubble_s, in_flight, step_s
from autopar.pipeline.orders import actions, part_of
from autopar.pipeline.replay import replay
from autopar.pipeline.schedules import (
    SCHEDULES,
    TORCH_NAMES,
    Engine,
    Schedule,
    schedule_named,
    schedule_problem,
)
from autopar.price.step import step_time
from autopar.records import replace
from tests.step_cases import DENSE, job_with, machine_named


def drawn(schedule: Schedule, rank: int, **shape: int) -> str:
    """Return a rank's order as `F0.0 B0.0`: kind, chunk and micro-batch."""
    return " ".join(
        f"{kind}{chunk}.{micro_batch}"
        for kind, chunk, micro_batch in actions(schedule, rank, **{"chunks": 1, **shape})
    )


def test_orders_drawn_by_hand() -> None:
    two = {"stages": 2, "micro_batches": 3}
    assert drawn("gpipe", 0, **two) == "F0.0 F0.1 F0.2 B0.0 B0.1 B0.2"
    assert drawn("1f1b", 0, **two) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert drawn("1f1b", 1, **two) == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2"
    pair = {"stages": 2, "chunks": 2, "micro_batches": 2}
    assert drawn("interleaved", 1, **pair) == "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 B0.0 B0.1"
    # back from the last micro-batch
    assert drawn("looped_bfs", 1, **pair) == "F0.0 F0.1 F1.0 F1.1 B1.1 B1.0 B0.1 B0.0"
    # the second rank puts off one gradient of weights
    assert drawn("interleaved_zero_bubble", 1, **pair) == (
        "F0.0 F0.1 F1.0 I1.0 F1.1 I1.1 W1.0 I0.0 W1.1 I0.1 W0.0 W0.1"
    )
    assert drawn("zero_bubble_v", 1, **pair) == (
        "F0.0 F1.0 F0.1 F1.1 I1.0 W1.0 I0.0 W0.0 I1.1 W1.1 I0.1 W0.1"
    )


def test_one_stage_runs_one_micro_batch_after_the_other() -> None:
    for schedule in SCHEDULES:
        found = replay(schedule, [1.0], [0.7], [0.3], micro_batches=5)
        assert found.step_s == pytest.approx(10.0)
        assert found.in_flight == in_flight(schedule, 1, 1, 5) == (1.0,)
        assert step_s(schedule, [1.0], [0.7], [0.3], micro_batches=5) == pytest.approx(10.0)


def test_a_v_has_both_ends_of_the_model_on_the_first_rank() -> None:
    assert [part_of("zero_bubble_v", rank, 1, 4) for rank in range(4)] == [7, 6, 5, 4]
    assert [part_of("interleaved", rank, 1, 4) for rank in range(4)] == [4, 5, 6, 7]


PUBLISHED: list[tuple[Schedule, int, tuple[float, float, float], float]] = [
    # arXiv 2104.04473, section 2: (p - 1)(F + B), and 1 / v of it
    ("gpipe", 1, (1, 1, 1), 21),
    ("1f1b", 1, (1, 1, 1), 21),
    ("interleaved", 2, (1, 1, 1), 10.5),
    ("interleaved", 4, (1, 1, 1), 5.25),
    # arXiv 2401.10241: a third of 1F1B's where F = I = W, here over two chunks
    ("interleaved_zero_bubble", 2, (1, 1, 1), 3.5),
    ("zero_bubble_v", 2, (1, 1, 1), 3.5),
    ("dual_pipe_v", 2, (1, 1, 1), 3.5),
    # attention has no weights: the V keeps less of it than the loop
    ("interleaved_zero_bubble", 2, (1, 1.3, 0.7), 5.6),
    ("zero_bubble_v", 2, (1, 1.3, 0.7), 4.55),
    ("dual_pipe_v", 2, (1, 1.3, 0.7), 6.15),
    ("interleaved_zero_bubble", 2, (1, 1, 0.6), 4.9),
    ("zero_bubble_v", 2, (1, 1, 0.6), 3.5),
    ("dual_pipe_v", 2, (1, 1, 0.6), 4.9),
]


@pytest.mark.parametrize(("schedule", "chunks", "seconds", "bubble"), PUBLISHED)
def test_bubbles_of_equal_stages(
    schedule: Schedule, chunks: int, seconds: tuple[float, float, float], bubble: float
) -> None:
    """Eight stages and 32 micro-batches, in seconds of a forward."""
    assert bubble_s(schedule, *seconds, stages=8, chunks=chunks) == pytest.approx(bubble)
    stages = [[each] * 8 for each in seconds]
    found = replay(schedule, *stages, micro_batches=32, chunks=chunks)
    assert found.step_s == pytest.approx(32 * sum(seconds) + bubble)
    bound = step_s(schedule, *stages, micro_batches=32, chunks=chunks)
    assert bound == pytest.approx(found.step_s)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_flight_is_that_of_the_order(schedule: Schedule) -> None:
    """All shapes of up to six stages, with groups and forwards ahead where there are such."""
    facts, compared = SCHEDULES[schedule], 0
    pairs = schedule in ("1f1b", "interleaved")
    for stages in range(1, 7):
        for chunks in [facts.most_chunks] if facts.most_chunks else [2, 3]:
            for number in range(1, 15):
                for group in (0, stages, stages + 2) if schedule == "interleaved" else (0,):
                    shape = {"stages": stages, "chunks": chunks, "micro_batches": number}
                    if schedule_problem(schedule, group=group, **shape):
                        continue
                    for ahead in (0, 1) if pairs else (0,):
                        found = in_flight(schedule, stages, chunks, number, group, ahead=ahead)
                        one = [1.0] * stages
                        told = {"micro_batches": number, "chunks": chunks, "group": group}
                        seen = replay(schedule, one, one, one, **told, ahead=ahead)
                        assert found == seen.in_flight
                        compared += 1
    assert compared > 40


def test_in_flight_of_what_is_published() -> None:
    assert in_flight("1f1b", 4, 1, 16) == (4, 3, 2, 1)
    # arXiv 2104.04473: p + (p - 1) / v on the first stage; the last one keeps (v - 1) p / v and one
    assert in_flight("interleaved", 4, 2, 16) == (5.5, 4.5, 3.5, 2.5)
    assert in_flight("interleaved", 4, 2, 16, 8) == (7.5, 6.5, 5.5, 4.5)
    assert in_flight("gpipe", 4, 1, 16) == (16,) * 4
    # as much as 1F1B's first stage, everywhere
    assert in_flight("interleaved_zero_bubble", 4, 2, 16) == (4,) * 4
    assert in_flight("zero_bubble_v", 4, 2, 16) == (4,) * 4
    assert in_flight("dual_pipe_v", 4, 2, 16) == (4.5,) * 4


def test_messages_that_overlap_take_no_longer_than_those_that_ranks_wait_for() -> None:
    seconds = [[1.0, 1.2, 0.9, 1.1], [1.0] * 4, [1.0] * 4]
    for schedule, facts in SCHEDULES.items():
        told: dict[str, Any] = {"micro_batches": 8, "chunks": facts.least_chunks}
        free = replay(schedule, *seconds, **told).step_s
        hidden = replay(schedule, *seconds, send_s=0.1, overlapped=True, **told).step_s
        waited = replay(schedule, *seconds, send_s=0.1, **told).step_s
        bound = step_s(schedule, *seconds, send_s=0.1, **told)
        assert free < hidden <= waited <= bound * (1 + 1e-12)
        assert bound <= waited * 1.03


def test_chunks_of_a_rank_may_differ() -> None:
    """A head on the last chunk alone: the replay knows, and equal chunks as slow take longer."""
    layers = [[0.5, 0.5]] * 3 + [[0.5, 0.8]]
    found = replay("interleaved", layers, layers, layers, micro_batches=8, chunks=2)
    slowest = [1.0, 1.0, 1.0, 1.6]
    even = replay("interleaved", slowest, slowest, slowest, micro_batches=8, chunks=2)
    assert 8 * 3 * 1.3 < found.step_s < even.step_s
    with pytest.raises(InputError, match="forward_s has 2 chunks on a rank, not 3"):
        replay("interleaved", layers, layers, layers, micro_batches=8, chunks=3)


def test_a_timeline_has_every_action_once() -> None:
    one = [1.0] * 3
    found = replay("zero_bubble_v", one, one, one, micro_batches=6, chunks=2, timeline=True)
    assert len(found.timeline) == len({(rank, action) for rank, action, _, _ in found.timeline})
    assert len(found.timeline) == 3 * 2 * 6 * 3
    assert max(each.end_s for each in found.timeline) == found.step_s


PROBLEMS: list[tuple[Schedule, dict[str, Any], str]] = [
    ("interleaved", {"micro_batches": 10, "engine": "megatron"}, "10) % stages(4) = 2 != 0"),
    ("interleaved", {"micro_batches": 9}, "9) % rounds of stages(2) = 1 != 0"),
    ("interleaved", {"group": 6}, "groups of 6 micro-batches leave 2 of 8"),
    ("interleaved", {"group": 3}, "stages(4)"),
    ("interleaved", {"chunks": 1}, "interleaved 1F1B has 2 or more chunks a stage, not 1"),
    ("zero_bubble_v", {"chunks": 3}, "ZBV has 2 chunks a stage, not 3"),
    ("zero_bubble_v", {"engine": "megatron"}, "megatron has no ZBV schedule"),
    ("dual_pipe_v", {"micro_batches": 7}, "2 * stages(4) = 8"),
    ("1f1b", {"chunks": 1, "micro_batches": 3, "engine": "torchtitan"}, "as many micro-batches(3)"),
    ("interleaved_zero_bubble", {"group": 5}, "has groups of 4 micro-batches, not 5"),
    ("1f1b", {"chunks": 0}, "are not all 1 or more"),
]


@pytest.mark.parametrize(("schedule", "given", "said"), PROBLEMS)
def test_what_cannot_run_says_why(schedule: Schedule, given: dict[str, Any], said: str) -> None:
    shape = {"stages": 4, "chunks": 2, "micro_batches": 8, **given}
    problem = schedule_problem(schedule, **shape)
    assert problem is not None
    assert said in problem
    if "engine" not in given:
        one = [1.0] * 4
        with pytest.raises(InputError):
            step_s(schedule, one, one, one, micro_batches=shape["micro_batches"],
                   chunks=shape["chunks"], group=shape.get("group", 0))  # fmt: skip


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "deepspeed", "galvatron"])
def test_engines_run_what_they_have(engine: Engine) -> None:
    for schedule, facts in SCHEDULES.items():
        problem = schedule_problem(
            schedule, stages=4, chunks=facts.least_chunks, micro_batches=8, engine=engine
        )
        assert (problem is None) == (engine in facts.engines)


def test_names_of_torch_are_read_in_any_case() -> None:
    for schedule, name in TORCH_NAMES.items():
        assert schedule_named(name) == schedule_named(name.upper()) == schedule
    assert schedule_named("interleaved_1f1b") == "interleaved"
    assert schedule_named("PipelineScheduleMulti") is None


def test_a_job_is_priced_by_its_schedule() -> None:
    """Gradients of weights fill the bubble: bubbles in the order of the papers, the rest as is."""
    machine = machine_named("h100-80gb", "torchtitan-compiled")
    job = job_with(DENSE, gpus=4, pp=4, vpp=2, global_batch=16)
    found = {
        name: step_time(machine, replace(job, schedule=name))
        for name in ("interleaved", "looped_bfs", "interleaved_zero_bubble", "zero_bubble_v")
    }
    plain = step_time(machine, job)
    assert found["interleaved"] == plain
    bubbles = {name: each.terms_s["bubble"] for name, each in found.items()}
    assert bubbles["zero_bubble_v"] < bubbles["interleaved_zero_bubble"] < bubbles["interleaved"]
    for each in found.values():
        assert sum(each.terms_s.values()) == pytest.approx(each.total_s)
    # where chunks come back up, head and loss are of the first stage
    v_shaped = found.pop("zero_bubble_v").stage_s
    assert v_shaped[0] > plain.stage_s[0]
    assert v_shaped[-1] == pytest.approx(plain.stage_s[1], rel=1e-9)
    assert sum(v_shaped) == pytest.approx(sum(plain.stage_s), rel=0.02)
    for each in found.values():
        assert each.stage_s == plain.stage_s
    single = replace(job, vpp=1)
    # forwards alone, then backwards alone: no stage is slower than 1F1B where stages are alike
    assert step_time(machine, replace(single, schedule="gpipe")).total_s == pytest.approx(
        step_time(machine, single).total_s, rel=0.02
    )
    with pytest.raises(InputError, match="has 2 chunks a stage, not 1"):
        step_time(machine, replace(single, schedule="zero_bubble_v"))

"""The event replay on schedules small enough to draw by hand."""

from __future__ import annotations

import pytest

from search.planning.cost.pipeline import replay
from search.planning.layered.core import core
from tests.interrupts import interrupted
from tests.oracles.reference import pipeline_time


def test_one_stage_is_a_sum() -> None:
    """Without a pipeline nothing waits."""
    result = replay([1.0], [2.0], [], [0.5], 4, "1f1b")

    assert result.step_time_s == 12.5
    assert result.idle_s == (0.0,)
    assert result.timeline is None


def test_1f1b_of_two_stages_event_by_event() -> None:
    """Stage 0 runs one forward ahead; every transfer takes half a second."""
    result = replay([1.0, 1.0], [2.0, 2.0], [0.5], [0.0, 1.0], 2, "1f1b", timeline=True)

    assert result.timeline is not None
    seen = [(e.stage, e.kind, e.microbatch, e.start_s, e.end_s) for e in result.timeline]
    assert seen == [
        (0, "forward", 0, 0.0, 1.0),
        (0, "forward", 1, 1.0, 2.0),
        (1, "forward", 0, 1.5, 2.5),
        (1, "backward", 0, 2.5, 4.5),
        (1, "forward", 1, 4.5, 5.5),
        (0, "backward", 0, 5.0, 7.0),
        (1, "backward", 1, 5.5, 7.5),
        (1, "tail", -1, 7.5, 8.5),
        (0, "backward", 1, 8.0, 10.0),
        (0, "tail", -1, 10.0, 10.0),
    ]
    assert result.step_time_s == 10.0
    assert result.idle_s == (4.0, 3.0)


def test_gpipe_runs_all_forwards_first() -> None:
    """Every stage finishes its forwards before the first backward."""
    result = replay([1.0, 2.0], [1.0, 1.0], [0.0], [0.0, 0.0], 3, "gpipe", timeline=True)

    assert result.step_time_s == 11.0  # 1 + 3*2 forwards, 3*1 + 1 backwards
    assert result.timeline is not None
    for stage in (0, 1):
        kinds = [e.kind for e in result.timeline if e.stage == stage]
        assert kinds == ["forward"] * 3 + ["backward"] * 3 + ["tail"]


def test_a_link_carries_one_transfer_at_a_time_each_way() -> None:
    """Three activations of 2 s queue on the link although they are computed every second."""
    result = replay([1.0, 1.0], [1.0, 1.0], [2.0], [0.0, 0.0], 3, "gpipe", timeline=True)

    assert result.timeline is not None
    starts = [e.start_s for e in result.timeline if e.stage == 1 and e.kind == "forward"]
    assert starts == [3.0, 5.0, 7.0]
    assert result.step_time_s == 16.0


def test_the_last_stage_sends_nothing() -> None:
    """An entry for the last stage changes nothing."""
    arguments = ([1.0, 2.0], [2.0, 1.0]), ([0.1, 0.2], 5, "1f1b")

    without = replay(*arguments[0], [0.3], *arguments[1])
    assert replay(*arguments[0], [0.3, 99.0], *arguments[1]) == without


def test_a_tail_that_hides_behind_an_earlier_stage_costs_nothing() -> None:
    """Stage 1 is done before stage 0, which needs another backward."""
    step = replay([1.0, 1.0], [2.0, 2.0], [0.0], [0.0, 2.0], 3, "1f1b").step_time_s

    assert step == replay([1.0, 1.0], [2.0, 2.0], [0.0], [0.0, 0.0], 3, "1f1b").step_time_s


@pytest.mark.parametrize(
    ("forward", "backward", "send", "tail", "m", "message"),
    [
        ([], [], [], [], 1, "0 forward"),
        ([1.0], [1.0, 1.0], [], [0.0], 1, "2 backward"),
        ([1.0, 1.0], [1.0, 1.0], [], [0.0, 0.0], 1, "0 send"),
        ([1.0], [1.0], [], [], 1, "0 tail"),
        ([1.0], [1.0], [], [0.0], 0, "at least one micro-batch, not 0"),
    ],
)
def test_impossible_pipelines_are_refused(
    forward: list[float],
    backward: list[float],
    send: list[float],
    tail: list[float],
    m: int,
    message: str,
) -> None:
    """Lists that do not belong together are named."""
    with pytest.raises(ValueError, match=message):
        replay(forward, backward, send, tail, m, "1f1b")


def test_a_replay_can_be_interrupted() -> None:
    """An exception of a signal handler ends the compiled part, which would run for hours."""
    with interrupted(0.2):
        core.replay([1.0] * 4, [1.0] * 4, [0.0] * 3, [0.0] * 4, 1 << 60, False, False)


@pytest.mark.parametrize(
    ("forward", "backward", "formula_s", "replay_s"),
    [
        ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0], 4.0, 5.0),
        ([1.0, 4.0, 1.0], [4.0, 1.0, 1.0], 22.0, 23.0),
    ],
)
def test_where_the_1f1b_formula_is_too_low(
    forward: list[float], backward: list[float], formula_s: float, replay_s: float
) -> None:
    """The smallest pipelines whose replay exceeds T: the stage with the longest forward is not
    the one with the longest backward, and stages are far from balanced."""
    free, tails = [0.0, 0.0], [0.0, 0.0, 0.0]

    assert pipeline_time(forward, backward, free, tails, 3, "1f1b") == formula_s
    assert replay(forward, backward, free, tails, 3, "1f1b").step_time_s == replay_s


def test_a_slow_link_is_the_bottleneck_of_gpipe() -> None:
    """A link slower than every stage sets the pace, in T and in the replay."""
    arguments = ([1.0, 1.0], [1.0, 1.0], [2.0], [0.0, 0.0], 2)

    assert pipeline_time(*arguments, "gpipe") == 12.0
    assert replay(*arguments, "gpipe").step_time_s == 12.0

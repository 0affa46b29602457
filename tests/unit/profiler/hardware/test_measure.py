"""How often is measured: loops, warm-ups, when to stop, and how long all of it takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import repeat

import numpy as np
import pytest
from hypothesis import given, strategies as st

from profiler.measure import (
    BLOCK,
    Policy,
    burn_in,
    choose_loops,
    expected_seconds,
    next_block,
    warmups,
)
from tests.often import often
from tests.unit.replay import ReplayTimer

POLICY = Policy()

durations = st.floats(-7.0, 2.0).map(lambda power: 10.0**power)
policies = st.builds(
    Policy,
    iters=st.integers(1, 100),
    warmup=st.integers(1, 20),
    max_seconds=st.floats(1e-3, 100.0),
    half_width=st.sampled_from([0.0, 0.02, 0.5]),
    max_loops=st.sampled_from([1, 16, 1000, 1024]),
)


def drive(
    draw: Callable[[], float], operation_s: float, barrier_s: float, policy: Policy
) -> tuple[list[float], float, float]:
    """Return samples, seconds of the warm-up and of the timed repetitions of a cell."""
    loops = choose_loops(operation_s, policy)
    warm_s = sum(draw() + barrier_s for _ in range(warmups(operation_s, policy)))
    samples: list[float] = []
    spent_s = 0.0
    while block := next_block(samples, spent_s, policy):
        for _ in range(block):
            samples.append(draw())
            spent_s += loops * samples[-1] + barrier_s
        spent_s += barrier_s  # the samples are brought together
    return samples, warm_s, spent_s


def lognormal(seed: int, median_s: float, variation: float) -> Callable[[], float]:
    """Return a source of timings with this median and standard deviation over mean."""
    generator = np.random.default_rng(seed)
    sigma = math.sqrt(math.log1p(variation * variation))
    return lambda: median_s * math.exp(sigma * generator.standard_normal())


@pytest.mark.parametrize(
    ("operation_s", "loops"),
    [(10e-6, 128), (0.6e-3, 2), (1e-3, 1), (5.0, 1), (0.0, 1024), (1e-9, 1024)],
)
def test_loops_fill_a_repetition(operation_s: float, loops: int) -> None:
    """A repetition takes a millisecond; slow operations stay alone, a clock of 0 ends."""
    assert choose_loops(operation_s, POLICY) == loops


@often(25, 100, operation_s=durations, policy=policies)
def test_loops_are_the_fewest_that_are_allowed(operation_s: float, policy: Policy) -> None:
    """A power of two, within both limits, and never twice as many as needed."""
    loops = choose_loops(operation_s, policy)

    assert loops & (loops - 1) == 0
    assert 1 <= loops <= policy.max_loops
    assert loops == 1 or loops * operation_s * policy.fewest <= policy.max_seconds
    assert loops == 1 or loops / 2 * operation_s < policy.sample_s


@given(operation_s=durations, policy=policies)
def test_warm_up_is_short(operation_s: float, policy: Policy) -> None:
    """At least one, at most what was asked for, and a quarter of the time."""
    found = warmups(operation_s, policy)

    assert 1 <= found <= policy.warmup
    assert found == 1 or found * operation_s <= policy.max_seconds / 4
    assert found == policy.warmup or (found + 1) * operation_s > policy.max_seconds / 4


@given(
    recorded=st.lists(durations, min_size=1, max_size=20),
    barrier_s=st.sampled_from([0.0, 1e-4, 0.3]),
    policy=policies,
)
def test_measuring_ends_within_its_limits(
    recorded: list[float], barrier_s: float, policy: Policy
) -> None:
    """Any times: it ends, no block is too large, and nothing begins when the time is spent."""
    perform = ReplayTimer(recorded, repeat=True).bind(lambda: None, 1)
    samples: list[float] = []
    spent_s = 0.0
    while block := next_block(samples, spent_s, policy):
        assert block <= min(BLOCK, policy.iters - len(samples))
        assert len(samples) < policy.least or spent_s < policy.max_seconds
        for _ in range(block):
            samples.append(perform())
            spent_s += samples[-1] + barrier_s

    assert min(policy.least, policy.iters) <= len(samples) <= policy.iters


@given(
    recorded=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=100),
    barrier_s=st.sampled_from([0.0, 0.05]),
)
def test_budget_is_overrun_by_one_repetition_at_most(
    recorded: list[float], barrier_s: float
) -> None:
    """When the slowest operation comes first, after the least samples nothing is misjudged."""
    policy = Policy(half_width=0.0, iters=1000)
    perform = ReplayTimer([1.0, *recorded], repeat=True).bind(lambda: None, 1)
    samples: list[float] = []
    spent_s = 0.0
    while block := next_block(samples, spent_s, policy):
        for _ in range(block):
            samples.append(perform())
            spent_s += samples[-1] + barrier_s

    assert len(samples) <= policy.least or spent_s <= policy.max_seconds + 1.0 + barrier_s + 1e-9


def test_blocks_of_a_slow_operation_do_not_overrun() -> None:
    """0.3 s each and 2 s in all: six, then the one that the time has room to begin."""
    samples: list[float] = []
    blocks = []
    while block := next_block(samples, 0.3 * len(samples), Policy(half_width=0.0)):
        blocks.append(block)
        samples += [0.3, 0.31] * block
        samples = samples[: sum(blocks)]

    assert blocks == [3, 3, 1]


@pytest.mark.parametrize("operation_s", [3.0, 1e4])
def test_an_operation_beyond_the_budget_is_measured_three_times(operation_s: float) -> None:
    """One repetition alone exceeds the budget: the least samples, after one warm-up."""
    samples, warm_s, spent_s = drive(lambda: operation_s, operation_s, 0.0, POLICY)

    assert len(samples) == 3
    assert (warm_s, spent_s) == (operation_s, 3 * operation_s)


def test_a_narrow_interval_ends_it() -> None:
    """Steady samples: not before six, then at once; scattered ones go on."""
    steady, scattered = [1.0e-3, 1.01e-3] * 3, [1.0e-3, 2.0e-3] * 3

    assert next_block(steady[:5], 5e-3, POLICY) == 1
    assert next_block(steady, 6e-3, POLICY) == 0
    assert next_block(scattered, 9e-3, POLICY) == BLOCK
    assert next_block(steady, 6e-3, Policy(fewest=10)) == 4


def test_few_iterations_are_obeyed() -> None:
    """`--iters` below the least number of samples wins."""
    assert next_block([], 0.0, Policy(iters=2)) == 2
    assert next_block([1.0, 2.0], 3.0, Policy(iters=2)) == 0


def test_time_beside_the_operations_counts() -> None:
    """A barrier that lasts as long as the operation halves what fits."""
    samples = [0.1, 0.12] * 4

    assert next_block(samples, 1.0, POLICY) == 7
    assert next_block(samples, 1.2, POLICY) < next_block(samples, 1.0, POLICY)


def test_a_clock_that_stands_still_ends_it() -> None:
    """Samples of 0 s have an interval of no width, before any division by them."""
    assert next_block([0.0] * 3, 0.0, POLICY) == 3
    assert next_block([0.0] * 6, 0.0, POLICY) == 0


def test_looking_often_leaves_the_median_right() -> None:
    """Ended by a narrow interval, the median is within it in nine cells of ten."""
    policy = Policy(iters=200)
    inside, ended_early = 0, 0
    for seed in range(300):
        samples, _, _ = drive(lognormal(seed, 1e-3, 0.04), 1e-3, 0.0, policy)
        ended_early += len(samples) < policy.iters
        inside += abs(float(np.median(samples)) / 1e-3 - 1.0) <= policy.half_width

    assert ended_early >= 290
    assert inside >= 270


@pytest.mark.parametrize("variation", [0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5])
@pytest.mark.parametrize("operation_s", [10e-6, 1e-3, 30e-3, 0.1, 0.3, 2.0])
def test_prediction_is_what_a_driver_takes(operation_s: float, variation: float) -> None:
    """The mean over random cells is predicted within 20 %, from 10 us to 2 s."""
    barrier_s = 2e-4
    taken = [
        sum(drive(lognormal(seed, operation_s, variation), operation_s, barrier_s, POLICY)[1:])
        for seed in range(60)
    ]
    expected = expected_seconds(operation_s, barrier_s, variation, POLICY)

    assert expected == pytest.approx(float(np.mean(taken)), rel=0.2)
    assert expected == expected_seconds(operation_s, barrier_s, variation, POLICY)


def test_prediction_without_scatter_is_exact() -> None:
    """Equal samples: 5 warm-ups, two blocks of 3 of 2^7 operations, and their barriers."""
    by_hand = 5 * (10e-6 + 1e-4) + 6 * (128 * 10e-6) + (3 + 1 + 3 + 1) * 1e-4

    assert expected_seconds(10e-6, 1e-4, 0.0, POLICY) == pytest.approx(by_hand)


def test_replay_performs_and_returns_what_was_recorded() -> None:
    """The double runs the operation `loops` times and refuses to make up a value."""
    runs: list[None] = []
    timer = ReplayTimer([1.0, 2.0])
    once, twice = (timer.bind(lambda: runs.append(None), loops) for loops in (1, 2))

    assert [once(), twice()] == [1.0, 2.0]
    assert len(runs) == 3
    assert timer.loops == [1, 2]
    with pytest.raises(AssertionError, match="only 2 repetitions"):
        once()
    assert [f() for f in repeat(ReplayTimer([5.0], repeat=True).bind(timer.synchronize, 1), 3)] == [
        5.0
    ] * 3


class Load:
    """Blocks of given durations on a clock that they advance; the last duration repeats."""

    def __init__(self, *durations_s: float) -> None:
        self._durations_s = list(durations_s)
        self.now_s = 0.0
        self.blocks = 0

    def block(self) -> float:
        duration_s = self._durations_s[min(self.blocks, len(self._durations_s) - 1)]
        self.blocks += 1
        self.now_s += duration_s
        return duration_s


@pytest.mark.parametrize(
    ("durations_s", "blocks"),
    [
        # equal blocks, but the clock has not had the time to fall
        ((0.1,), 21),
        # the clock falls for three seconds
        ((*(0.5 + 0.1 * k for k in range(5)), 1.0), 10),
    ],
)
def test_burn_in_ends_when_blocks_are_equally_long(
    durations_s: tuple[float, ...], blocks: int
) -> None:
    load = Load(*durations_s)
    assert burn_in(load.block, lambda: load.now_s)
    assert abs(load.blocks - blocks) <= 1


def test_burn_in_that_never_settles_ends() -> None:
    load = Load(*(0.5 + 0.05 * (k % 2) for k in range(1000)))
    assert not burn_in(load.block, lambda: load.now_s)
    assert 25.0 < load.now_s < 35.0

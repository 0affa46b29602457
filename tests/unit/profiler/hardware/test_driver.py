"""What the driver makes of the times that it has collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from profiler.hardware.driver import Driver, GroupTimes, combined, stragglers
from profiler.hardware.options import plan_cells
from profiler.measure import Policy
from tests.unit.measured import make_cluster, make_options
from tests.unit.record_support import planned

HOSTS = ("a", "a", "b", "b")


@pytest.mark.parametrize(
    ("groups", "medians_s", "expected"),
    [
        # one group: nothing to compare with
        ([(0, 1, 2, 3)], [5.0], {}),
        # two: the quicker one is normal
        ([(0, 1), (2, 3)], [1.0, 2.0], {2: 2.0, 3: 2.0}),
        ([(0, 1), (2, 3)], [1.0, 1.4], {}),
        # a chain of transfers: rank 1 is quick with rank 0, so it is not the slow one
        ([(0, 1), (2, 3), (1, 2)], [1.0, 1.0, 4.0], {}),
        ([(0, 1), (1, 2), (2, 3)], [1.0, 1.0, 4.0], {3: 4.0}),
    ],
)
def test_only_ranks_that_are_always_slow_are_named(
    groups: list[tuple[int, ...]], medians_s: list[float], expected: dict[int, float]
) -> None:
    """Ranks wait for each other, so a rank is slow when all of its groups are."""
    found = stragglers(groups, np.array(medians_s), HOSTS)

    assert {s.rank: s.ratio for s in found} == expected
    assert all(s.host == HOSTS[s.rank] for s in found)


def test_the_slowest_group_is_the_value_whatever_its_round() -> None:
    """Rounds differ in loops and repetitions; medians stand in the order of the groups."""
    cell = next(cell for cell in planned("p2p") if cell.group_size == 4)
    rounds = [[((0, 1), [3.0, 1.0, 2.0]), ((2, 3), [9.0, 5.0, 1.0])], [((1, 2), [4.0, 3.0])]]
    found = [
        GroupTimes(group=group, samples_s=np.array(samples), loops=loops)
        for loops, of_round in zip((8, 2), rounds, strict=True)
        for group, samples in of_round
    ]

    measurement = combined(cell, found, HOSTS, checked=True)

    assert measurement.worst_group == [2, 3]
    assert measurement.samples_s == {"time": [9.0, 5.0, 1.0]}
    assert measurement.loops == 8
    assert measurement.group_medians_s == [2.0, 3.5, 5.0]


class Clock:
    """A timer whose repetitions last as long as they are told to; the last time goes on."""

    def __init__(self, times_s: Sequence[float]) -> None:
        self._times_s = list(times_s)
        self.loops: list[int] = []

    def bind(self, run: Callable[[], None], loops: int) -> Callable[[], float]:
        """Return a repetition that does nothing."""

        def repetition() -> float:
            self.loops.append(loops)
            return self._times_s.pop(0) if len(self._times_s) > 1 else self._times_s[0]

        return repetition


def driven(clock: Clock) -> Driver:
    """Return the driver of one rank that has this clock."""
    torch = pytest.importorskip("torch", reason="the profilers need torch")
    session: Any = SimpleNamespace(
        rank=0,
        world_size=1,
        cluster=make_cluster(1, 1),
        device=torch.device("cpu"),
        dtype=torch.float32,
        timer=lambda cuda_graph: clock,
        free_bytes=lambda: 1e12,
        join=lambda groups: None,
        group=lambda ranks: None,
        barrier=lambda: None,
        gather=lambda values: np.array([list(values)]),
        release_memory=lambda: None,
    )
    watch: Any = SimpleNamespace(step=lambda during: None)
    policy = Policy(iters=12, sample_s=1e-3, max_loops=64)
    return Driver(session, watch, policy, check=False)


@pytest.mark.parametrize(
    ("times_s", "loops", "taken"),
    [
        # 0.5 s to connect, then a message of 20 us: 64 of them make a repetition
        ([0.5, 20e-6], 64, [1, 1, 1, 1]),
        # a message of 0.5 s is what it is
        ([0.5], 1, []),
        # a little quicker than the warm-up: nothing is thrown away
        ([1.1e-3] * 5 + [0.9e-3], 1, []),
    ],
)
def test_a_first_use_that_connects_does_not_decide(
    times_s: list[float], loops: int, taken: list[int]
) -> None:
    """What a repetition holds rests on operations, not on what came before the first of them."""
    clock = Clock(times_s)
    cell = plan_cells(make_options(Path("unused"), sizes=(4096,)), make_cluster(1, 1))[0]

    measurement = driven(clock).measure(cell)

    assert measurement.loops == loops
    assert len(measurement.samples_s["time"]) >= 3
    assert clock.loops[: len(taken)] == taken
    assert clock.loops.count(loops) >= len(measurement.samples_s["time"])

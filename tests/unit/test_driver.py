"""What the driver makes of the times that it has collected."""

from __future__ import annotations

import numpy as np
import pytest

from profiler.hardware.outcome import GroupTimes, combined, stragglers
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

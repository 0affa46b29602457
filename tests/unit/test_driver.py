"""What the driver makes of the times that it has collected."""

from __future__ import annotations

import numpy as np
import pytest

from profiler.hardware.driver import stragglers

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

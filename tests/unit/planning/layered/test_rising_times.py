"""Noisy curves: message times never fall with size, and no plan wins by a lucky size."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from autopar.rates.measured import Curve
from autopar.records import replace
from autopar.statistics import rising_fit
from search.planning.cost.communication import Groups
from tests.cost_cases import toy_hardware
from tests.unit.planning.layered.test_cost_latency import line, shape, solve

SIZES = np.array([2.0**k for k in range(16, 27)])
TIMES = st.lists(st.floats(min_value=1e-6, max_value=10.0), min_size=1, max_size=11)


def dipped(latency_s: float, size_bytes: float, factor: float) -> Curve:
    """Return a line from 64 KiB to 64 MiB whose time at one size is `factor` of what it was."""
    curve = line(latency_s, 50e9)
    times = np.where(curve.sizes_bytes == size_bytes, factor * curve.times_s, curve.times_s)
    return replace(curve, times_s=times)


def test_runs_that_fall_become_their_geometric_mean() -> None:
    """By hand: 4 and 1 fall to 2, which is above 1.5, so that three of them share one mean."""
    found = rising_fit(np.array([1.5, 4.0, 1.0, 16.0, 16.0, 32.0]))
    np.testing.assert_allclose(found, [1.5, 2.0, 2.0, 16.0, 16.0, 32.0])

    found = rising_fit(np.array([3.0, 4.0, 1.0, 9.0]))
    np.testing.assert_allclose(found, [12.0 ** (1 / 3)] * 3 + [9.0])


@given(times=TIMES)
def test_the_fit_is_the_nearest_rising_row(times: list[float]) -> None:
    """Against its other definition: of every size the largest over starts of the smallest mean."""
    logs = np.log(times)
    n = len(times)
    expected = [
        max(min(logs[a : b + 1].mean() for b in range(i, n)) for a in range(i + 1))
        for i in range(n)
    ]

    np.testing.assert_allclose(rising_fit(np.array(times)), np.exp(expected), rtol=1e-12)


@given(times=TIMES)
def test_what_rises_stays_as_it_is(times: list[float]) -> None:
    """To the last bit, also where the fit made it rise."""
    rising = np.array(sorted(times))
    np.testing.assert_array_equal(rising_fit(rising), rising)
    once = rising_fit(np.array(times))
    np.testing.assert_allclose(rising_fit(once), once, rtol=1e-15)


@given(
    times=TIMES,
    latency=st.none() | st.floats(min_value=0.0, max_value=20.0),
    sizes=st.lists(st.floats(min_value=1.0, max_value=1e12), min_size=2, max_size=6),
)
def test_larger_messages_never_take_less_time(
    times: list[float], latency: float | None, sizes: list[float]
) -> None:
    """Collectives and transfers, below, inside and above what was measured, with any latency."""
    curve = Curve(sizes_bytes=SIZES[: len(times)], times_s=np.array(times), latency_s=latency)
    hardware = toy_hardware(curves={("allreduce", 4): curve}, p2p_curves={2: curve})
    groups = Groups(hardware, lambda text: None)
    messages = np.array(sorted(sizes))
    index = np.full(messages.shape, groups.index(4, 1))

    for found in (
        groups.seconds("allreduce", messages, index),
        groups.seconds("allgather", messages, index),
        groups.transfers_s(np.full(messages.shape, 2), messages[:, None], np.ones(1))[:, 0, 0],
    ):
        assert all(small <= large * (1 + 1e-12) for small, large in pairwise(found.tolist()))


@pytest.mark.parametrize("size_mib", [1, 2, 4])
def test_a_lucky_size_does_not_choose_the_plan(size_mib: int) -> None:
    """Transfers of 5 ms, one size at half of it: as many micro-batches as without that size."""
    quiet = solve({p: line(5e-3, 50e9) for p in (2, 4, 8)})
    lucky = solve({p: dipped(5e-3, size_mib * 2.0**20, 0.5) for p in (2, 4, 8)})

    assert shape(quiet) == (2, 4)
    assert shape(lucky) == (2, 4)

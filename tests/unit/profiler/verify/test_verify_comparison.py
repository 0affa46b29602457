"""Predicted against measured: ranks, errors, intervals, and the fit of a calibration."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy import stats

from autopar.documents.calibration import MOST, MOST_S
from profiler.verify.calibrate import LEAST, TimeColumns, fit_bytes, fit_times, left_out_s
from profiler.verify.compare import (
    MeasuredPlan,
    RunSamples,
    compare,
    ranks_of,
    resampled_s,
    spearman,
)
from tests.often import often

VALUES = st.lists(st.integers(0, 6).map(float), min_size=2, max_size=12)


def plan(
    name: str, predicted_s: float, *rounds: Sequence[float], peaks: Sequence[int] = (90, 80)
) -> MeasuredPlan:
    """Return a plan of one stage on two ranks; 100 bytes are predicted."""
    return MeasuredPlan(
        name=name,
        label=name,
        chosen="for the test",
        predicted_s=predicted_s,
        predicted_bytes=(100,),
        rounds=tuple(RunSamples(step_s=tuple(r), peak_bytes=tuple(peaks)) for r in rounds),
        strategy={},
    )


@given(VALUES, st.randoms(use_true_random=False))
def test_rank_correlation_is_that_of_scipy(values: list[float], random: object) -> None:
    """Ties included."""
    first = np.array(values)
    second = np.array(sorted(values, key=lambda _: random.random()))  # type: ignore[attr-defined]
    found = spearman(first, second)

    assert np.array_equal(ranks_of(first), stats.rankdata(first))
    if np.ptp(first) == 0.0:
        assert found is None
    else:
        assert found == pytest.approx(stats.spearmanr(first, second).statistic)


def test_exact_predictions_have_no_error() -> None:
    """Every figure is what it must be, and intervals have no width."""
    found = compare([plan(f"p{k}", k / 10, [k / 10] * 4, [k / 10] * 4) for k in (3, 1, 2)])

    assert [row.plan.name for row in found.plans] == ["p1", "p2", "p3"]
    assert [row.error for row in found.plans] == [0.0, 0.0, 0.0]
    assert [row.interval_s for row in found.plans] == [(k / 10, k / 10) for k in (1, 2, 3)]
    assert (found.median_error, found.spearman, found.spearman_interval) == (0.0, 1.0, (1.0, 1.0))
    assert (found.regret, found.best_predicted, found.best_measured) == (0.0, "p1", "p1")
    assert found.measured_spread == pytest.approx(3.0)
    assert found.measured_noise == 0.0


def test_errors_and_ranks_are_signed_and_ordered() -> None:
    """A best that is not the best costs what it takes longer; memory counts the fullest rank."""
    plans = [plan("a", 1.0, [2.0]), plan("b", 1.5, [1.0]), plan("c", 4.0, [4.0], peaks=(125, 50))]
    found = compare(plans)

    assert [row.error for row in found.plans] == [-0.5, 0.5, 0.0]
    assert [row.predicted_rank for row in found.plans] == [1, 2, 3]
    assert [row.measured_rank for row in found.plans] == [2, 1, 3]
    assert found.spearman == pytest.approx(0.5)
    assert (found.best_predicted, found.best_measured, found.regret) == ("a", "b", 1.0)
    assert found.worst_error == -0.5
    assert [row.memory_error for row in found.plans] == pytest.approx([1 / 9, 1 / 9, -0.2])
    assert found.median_memory_error == pytest.approx(1 / 9)


def test_uncounted_memory_is_no_error_of_memory() -> None:
    """Nothing is made up of what was not said."""
    found = compare([plan("a", 1.0, [1.0], peaks=()), plan("b", 2.0, [2.0], peaks=())])

    assert [row.memory_error for row in found.plans] == [None, None]
    assert found.median_memory_error is None


def test_intervals_hold_the_scatter_of_rounds() -> None:
    """They contain the median and most of what other rounds say, and are the same every time."""
    generator = np.random.default_rng(3)
    rounds = [[0.1 * generator.lognormal(0.0, 0.05) for _ in range(5)] for _ in range(6)]
    (row,) = compare([plan("a", 0.1, *rounds)]).plans
    low, high = row.interval_s

    assert low < row.measured_s < high
    assert low < 0.1 < high
    assert high / low < 1.2
    assert compare([plan("a", 0.1, *rounds)]).plans[0].interval_s == row.interval_s
    assert compare([plan("a", 0.1, *rounds)]).spearman is None


def test_resamples_draw_the_same_rounds_for_all_plans() -> None:
    """A slow round is slow for everybody, and says nothing of their order."""
    slow = [[1.0], [1.0], [5.0]]
    drawn = resampled_s([plan("a", 1.0, *slow), plan("b", 2.0, *([2 * x] for [x] in slow))])

    assert np.array_equal(drawn[:, 1], 2.0 * drawn[:, 0])
    assert set(drawn[:, 0]) == {1.0, 5.0}


def test_peaks_are_by_stage_over_ranks_and_rounds() -> None:
    """Ranks of a stage follow one another."""
    runs = (
        RunSamples(step_s=(1.0,), peak_bytes=(1, 2, 3, 4)),
        RunSamples(step_s=(1.0,), peak_bytes=(5, 1, 1, 1)),
    )
    subject = MeasuredPlan(
        name="a",
        label="a",
        chosen="",
        predicted_s=1.0,
        predicted_bytes=(7, 7),
        rounds=runs,
        strategy={},
    )

    assert subject.peak_bytes == (5, 4)


# --- the fit ---------------------------------------------------------------------------------

COLUMNS = TimeColumns(
    computation=np.array([0.10, 0.12, 0.15, 0.20, 0.11, 0.14, 0.18, 0.16]),
    communication=np.array([0.02, 0.05, 0.01, 0.03, 0.08, 0.00, 0.06, 0.02]),
)


@often(25, 100, st.floats(0.2, 5.0), st.floats(0.2, 5.0), st.floats(0.0, 0.1))
def test_fit_finds_the_factors(computation: float, communication: float, fixed_s: float) -> None:
    """Exactly, when the plans follow them, and for a plan that is left out too."""
    times = computation * COLUMNS.computation + communication * COLUMNS.communication + fixed_s
    found = fit_times(COLUMNS, times)

    assert found.computation == pytest.approx(computation, rel=1e-6)
    assert found.communication == pytest.approx(communication, rel=1e-6)
    assert found.fixed_s == pytest.approx(fixed_s, abs=1e-7)
    assert left_out_s(COLUMNS, times) == pytest.approx(times, rel=1e-6)


def test_one_odd_plan_hardly_moves_the_fit() -> None:
    """Least squares would give it all it asks for."""
    times = 1.2 * COLUMNS.computation + 0.8 * COLUMNS.communication + 0.01
    odd = times.copy()
    odd[3] *= 3.0
    found = fit_times(COLUMNS, odd)

    assert found.computation == pytest.approx(1.2, rel=0.05)
    assert found.communication == pytest.approx(0.8, rel=0.15)
    # and its error shows where it is left out
    assert left_out_s(COLUMNS, odd)[3] == pytest.approx(times[3], rel=0.05)


def test_factors_are_never_below_the_least() -> None:
    """Times that fall with communication leave its factor at the bound, not below 0."""
    times = 2.0 * COLUMNS.computation - 0.5 * COLUMNS.communication
    found = fit_times(COLUMNS, times)

    assert found.communication == pytest.approx(LEAST)
    assert found.fixed_s >= 0.0


def test_factors_are_never_above_what_a_calibration_holds() -> None:
    """A profile of quite another machine; the file would be refused."""
    times = 5e6 * COLUMNS.computation

    assert fit_times(COLUMNS, times).computation == MOST
    assert fit_times(COLUMNS, times + 1e6).fixed_s == MOST_S
    assert fit_bytes(np.array([1.0]), np.array([5e3])) == MOST


def test_plans_without_communication_say_nothing_of_it() -> None:
    """One rank: the factor is unknown, not 1."""
    alone = TimeColumns(computation=COLUMNS.computation, communication=np.zeros(8))
    found = fit_times(alone, 1.5 * alone.computation)

    assert found.communication is None
    assert found.computation == pytest.approx(1.5)
    assert found.times_s(alone) == pytest.approx(1.5 * alone.computation)


def test_memory_is_a_robust_factor() -> None:
    """Of one stage that is far off, nothing is seen."""
    predicted = np.array([100.0, 200.0, 300.0, 150.0, 120.0])
    counted = 1.1 * predicted
    counted[2] *= 2.0

    assert fit_bytes(predicted, 1.1 * predicted) == pytest.approx(1.1)
    assert fit_bytes(predicted, counted) == pytest.approx(1.1, rel=0.02)

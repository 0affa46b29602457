"""Summaries of timings: the interval of the median, and warnings that are rarely false."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec.structs import asdict
from numpy.typing import NDArray
from scipy.stats import binom

from autopar.statistics import Summary, median_half_width, summarize, warnings_of

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]

timings = st.lists(st.floats(1e-7, 1e3), min_size=1, max_size=60)

DISTRIBUTIONS: dict[str, tuple[Draw, float]] = {  # how to draw, and the true median
    "lognormal": (lambda g, n: g.lognormal(0.0, 0.3, n), 1.0),
    "exponential": (lambda g, n: 1.0 + g.exponential(size=n), 1.0 + math.log(2.0)),
    "uniform": (lambda g, n: g.uniform(1.0, 2.0, n), 1.5),
    "heavy tail": (lambda g, n: 1.0 + g.pareto(1.0, n), 2.0),
}


def lognormal(generator: np.random.Generator, count: int, sigma: float) -> NDArray[np.float64]:
    """Return timings around a millisecond."""
    return generator.lognormal(math.log(1e-3), sigma, count)


def test_summary_of_known_samples() -> None:
    """Every figure of 1 .. 9 s, by hand; ranks 2 and 8 leave 10/512 on either side."""
    assert summarize([9, 1, 8, 2, 7, 3, 6, 4, 5]) == Summary(
        num_samples=9,
        median_s=5.0,
        low_s=pytest.approx(1.4),
        high_s=pytest.approx(8.6),
        mad_s=2.0,
        mean_s=5.0,
        variation=pytest.approx(math.sqrt(7.5) / 5.0),
        half_width=pytest.approx((8 - 2) / 2 / 5),
    )


@given(samples=timings, factor=st.sampled_from([1e-6, 1e-3, 60.0, 1e3]))
def test_summaries_scale_with_the_unit(samples: list[float], factor: float) -> None:
    """Times follow the unit, ratios and counts do not."""
    here = asdict(summarize(samples))
    there = asdict(summarize([factor * sample for sample in samples]))

    for name, value in here.items():
        expected = value * factor if name.endswith("_s") else value
        tiny = 1e-9 * max(samples) * (factor if name.endswith("_s") else 1 / min(samples))
        assert there[name] == pytest.approx(expected, rel=1e-9, abs=tiny), name


@given(samples=timings)
def test_summaries_are_ordered_and_ignore_the_order(samples: list[float]) -> None:
    """Percentiles enclose the median, which is of the samples' range, in any order of them."""
    found = summarize(samples)

    assert min(samples) <= found.low_s <= found.median_s <= found.high_s <= max(samples)
    assert found.mad_s <= found.high_s - found.low_s or found.num_samples < 40
    assert median_half_width(samples[::-1]) == found.half_width
    assert math.isinf(found.half_width) == (len(samples) < 6)


@pytest.mark.parametrize("count", [6, 9, 30, 50, 401])
def test_interval_is_the_narrowest_that_the_binomial_distribution_allows(count: int) -> None:
    """With samples 1 .. n the width tells the ranks: 95 % inside them, less one rank further."""
    samples = np.arange(1.0, count + 1.0)
    width = median_half_width(samples.tolist()) * 2.0 * float(np.median(samples))
    rank = round((count + 1 - width) / 2.0)

    assert 2.0 * binom.cdf(rank - 1, count, 0.5) <= 0.05 < 2.0 * binom.cdf(rank, count, 0.5)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("count", [6, 10, 25, 60])
def test_interval_covers_the_true_median(name: str, count: int) -> None:
    """In 95 % of many cells, whatever the distribution; ends by scipy's ranks, widths are ours."""
    draw, median = DISTRIBUTIONS[name]
    cells = np.sort(draw(np.random.default_rng(count), 2000 * count).reshape(2000, count), axis=1)
    rank = int(binom.ppf(0.025, count, 0.5))
    rank -= 2.0 * binom.cdf(rank - 1, count, 0.5) > 0.05
    low, high = cells[:, rank - 1], cells[:, count - rank]
    covered = float(((low <= median) & (median <= high)).mean())
    ours = [median_half_width(cell.tolist()) for cell in cells[:50]]

    assert 0.94 <= covered <= 0.99
    np.testing.assert_allclose(ours, ((high - low) / 2.0 / np.median(cells, axis=1))[:50])


def test_equal_samples_have_no_width() -> None:
    """A clock that always says the same gives an interval of one point and no warning."""
    for sample in (0.1, 0.0):
        found = summarize([sample] * 20)
        assert (found.variation, found.half_width, found.mad_s) == (0.0, 0.0, 0.0)
        assert warnings_of([sample] * 20) == ()


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [-1.0], [[1.0], [2.0]]])
def test_what_is_no_sample_is_our_mistake(samples: list[float]) -> None:
    """No samples, no number, a negative time and a table are refused."""
    with pytest.raises(AssertionError):
        summarize(samples)


@given(samples=st.lists(st.floats(0.0, 1e3), min_size=1, max_size=30))
def test_warnings_of_anything_are_sentences(samples: list[float]) -> None:
    """Any samples at all, few or zero, give words and no failure."""
    assert all(text.startswith("the samples ") for text in warnings_of(samples))


def test_scatter_is_told() -> None:
    """Above a variation of 0.2 it is named, below it is not."""
    assert warnings_of([1.0, 2.0, 1.0]) == ("the samples scatter: variation 0.43",)
    assert warnings_of([1.0, 1.2, 1.0]) == ()


@pytest.mark.whole
@pytest.mark.parametrize("count", [8, 10, 14, 18, 20, 30, 50, 200])
def test_noise_alone_is_rarely_called_clusters_or_drift(count: int) -> None:
    """Lognormal noise of sigma 0.1: each warning in at most one cell of a hundred."""
    generator = np.random.default_rng(count)
    found = [warnings_of(lognormal(generator, count, 0.1).tolist()) for _ in range(2000)]

    for word in ("clusters", "drift"):
        assert sum(any(word in text for text in texts) for texts in found) <= 20, word


@pytest.mark.parametrize("share", [0.3, 0.5])
@pytest.mark.parametrize("count", [20, 50, 200])
def test_two_clusters_are_found_and_named(count: int, share: float) -> None:
    """1.2 and 3.4 ms under the same noise, mixed at random: nearly always, with both centres."""
    generator = np.random.default_rng(count)
    slow = [generator.permutation(count) < share * count for _ in range(200)]
    cells = [np.where(s, 3.4, 1.2) * lognormal(generator, count, 0.1) for s in slow]
    found = sum(any("clusters" in text for text in warnings_of(c.tolist())) for c in cells)
    exact = np.where(slow[0], 3.4e-3, 1.2e-3).tolist()

    assert found >= 195
    assert "the samples form two clusters: 1.2 ms and 3.4 ms" in warnings_of(exact)


def test_an_outlier_is_no_cluster() -> None:
    """Two slow samples of thirty are the tail that percentiles show."""
    samples = lognormal(np.random.default_rng(0), 30, 0.02)
    samples[[7, 20]] *= 5.0

    assert not any("clusters" in text for text in warnings_of(samples.tolist()))


@pytest.mark.parametrize("factor", [1.3, 1 / 1.3])
def test_drift_is_told_in_either_direction(factor: float) -> None:
    """Times that grow or shrink by 30 % drift; the same times shuffled do not."""
    ramp = 2e-3 * factor ** np.linspace(0.0, 1.0, 30)
    shuffled = np.random.default_rng(0).permutation(ramp)
    ends = [f"{1e3 * float(np.median(part)):.3g} ms" for part in (ramp[:10], ramp[-10:])]

    assert warnings_of(ramp.tolist()) == (
        f"the samples drift: {ends[0]} in the first third, {ends[1]} in the last",
    )
    assert warnings_of(shuffled.tolist()) == ()


def test_a_drift_too_small_to_matter_is_not_told() -> None:
    """Four percent, however clearly ordered, change no plan."""
    assert warnings_of((1.04 ** np.linspace(0.0, 1.0, 60)).tolist()) == ()

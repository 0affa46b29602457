"""Intervals and odds of made-up ratios, whose answers are known; measured ones are elsewhere."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.memory_odds import (
    Ratio,
    binned,
    by_configuration,
    classes_left_out,
    configurations_left_out,
    interval_of,
    intervals_of,
    likelihoods,
    odds_table,
    reliability,
)


def ratio(value: float, config: str, kind: str = "dense", *classes: str) -> Ratio:
    """Return a ratio given as its logarithm."""
    return Ratio(kind=kind, config=config, classes=frozenset(classes), ratio=math.exp(value))


def students(number: int, kind: str, scale: float, *classes: str) -> list[Ratio]:
    """Return ratios whose logarithms are Student's t of two degrees."""
    draw = random.Random(f"{kind} {number}")
    found = []
    for at in range(number):
        # the quantile function of t with two degrees
        u = draw.random()
        value = scale * (2 * u - 1) / math.sqrt(2 * u * (1 - u))
        found.append(ratio(value, f"{kind} {at}", kind, *classes))
    return found


def test_nine_tenths_about_the_median() -> None:
    """Of nine distances the largest, of nineteen the second largest, of fewer all."""
    nine = [math.exp(0.01 * step) for step in range(-4, 5)]
    assert interval_of(nine) == pytest.approx((math.exp(-0.04), math.exp(0.04)))
    more = [math.exp(0.01 * step) for step in (*range(-9, 9), 90)]
    # the 18th of 19 distances from the median, 0
    assert interval_of(more) == pytest.approx((math.exp(-0.09), math.exp(0.09)))
    assert interval_of([1.0, 1.0, 1.0]) == (1.0, 1.0)


def test_the_next_one_is_inside_nine_times_of_ten() -> None:
    """Intervals of twenty draws hold the next draw as often as they say."""
    draw = random.Random(1)
    inside = 0
    for _ in range(2000):
        values = [math.exp(draw.gauss(0.0, 0.01)) for _ in range(21)]
        low, high = interval_of(values[:20])
        inside += low <= values[20] <= high
    assert inside / 2000 == pytest.approx(0.9, abs=0.03)


def test_one_ratio_of_every_configuration() -> None:
    """Repetitions are one, the ninth decile by distance; kinds of fewer than nine are pooled."""
    repeated = [ratio(0.001 * at, "same") for at in range(11)]
    assert by_configuration(repeated) == {
        "dense": [pytest.approx(math.exp(0.009))],
        "pooled": [pytest.approx(math.exp(0.009))],
    }
    many = students(9, "dense", 0.01) + students(8, "experts", 0.01)
    assert set(intervals_of(many)) == {"dense", "pooled"}


def test_what_is_left_out_has_no_say() -> None:
    """A class that is far off is not inside what the others make, as its kind; as unseen it is."""
    near = students(40, "dense", 0.001)
    wide = students(40, "few runs", 0.03)
    far = [ratio(0.01, f"far {at}", "dense", "far") for at in range(3)]
    found = {name: rest for name, *rest in classes_left_out([*near, *wide, *far])}
    assert found == {"far": [3, 0.0, 1.0]}
    assert [*classes_left_out(far)] == []
    dense, few = configurations_left_out([*near, *wide, *far])
    assert (dense.rows, dense.sources, few.rows) == (43, 43, 40)
    assert 0.85 < (dense.inside + few.inside) / 83 < 0.96
    # the widths of Student's t of two degrees are 2 x 2.92 scales
    assert 4 < dense.width / 0.001 < 12
    assert 4 < few.width / 0.03 < 12


def test_odds_of_what_is_drawn_as_said() -> None:
    """Odds of Student's errors happen as often as they say, and the normal is less likely."""
    drawn = students(150, "dense", 0.005)
    for each in reliability(drawn):
        assert each.happened == pytest.approx(each.predicted, abs=0.1)
    student, normal = likelihoods(drawn)["dense"]
    assert student > normal


def test_bins_of_odds() -> None:
    """Both ends have a bin, what nobody predicted has none, and the table is in percent."""
    bins = [*binned([(0.0, False), (0.5, True), (0.6, False), (1.0, True)])]
    assert [(each.low, each.number, each.happened) for each in bins] == [
        (0.0, 1, 0.0),
        (0.3, 2, 0.5),
        (0.999, 1, 1.0),
    ]
    assert "| 30 to 70 % | 2 | 55.0 % | 50.0 % |" in odds_table(bins)

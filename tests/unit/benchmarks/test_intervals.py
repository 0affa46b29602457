"""Intervals of made-up errors, whose answers are known."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from benchmarks.intervals import (
    Covered,
    Error,
    covered_table,
    deviations_of,
    interval_of,
    levels_of,
    widest_of,
)


def drawn(draw: random.Random, sources: int, rows: int, spread: float) -> list[Error]:
    """Return errors of sources whose levels have a deviation of 0.1."""
    found = []
    for source in range(sources):
        level = draw.gauss(0.0, 0.1)
        found += [Error("a", str(source), level + draw.gauss(0.0, spread)) for _ in range(rows)]
    return found


@pytest.mark.parametrize("spread", [0.02, 0.1, 0.2])
def test_the_next_source_is_inside_nine_times_of_ten(spread: float) -> None:
    """Whether clusters or the plans on them differ more."""
    draw = random.Random(1)
    inside = []
    for _ in range(400):
        errors = drawn(draw, 19, 12, spread)
        low, high = interval_of(levels_of(errors).values(), deviations_of(errors)["a"])
        inside += [low <= math.exp(e.log) <= high for e in drawn(draw, 1, 12, spread)]
    assert np.mean(inside) == pytest.approx(0.9, abs=0.03)


def test_an_interval_is_of_sums_of_level_and_deviation() -> None:
    """An oracle adds each level to each deviation, with half of one more level at each extreme."""
    levels, deviations = [0.0, 0.1, 0.3], [(-0.02, 1.0), (0.0, 1.0), (0.04, 1.0)]
    sums = sorted(
        level + deviation
        for level, times in zip(levels, (3, 2, 3), strict=True)
        for deviation, _ in deviations
        for _ in range(times)
    )
    low, high = interval_of(levels, deviations)
    assert math.log(low) == pytest.approx(np.quantile(sums, 0.05, method="hazen"), abs=0.01)
    assert math.log(high) == pytest.approx(np.quantile(sums, 0.95, method="hazen"), abs=0.01)


def test_deviations_are_from_the_own_source() -> None:
    """A source weighs the root of its rows; a single row has a level and no deviation."""
    errors = [Error("a", "x", 1.0), Error("a", "x", 1.2), Error("a", "y", 5.0)]
    assert levels_of(errors) == {("a", "x"): pytest.approx(1.1), ("a", "y"): 5.0}
    weight = pytest.approx(1.0 / math.sqrt(2.0))
    found = deviations_of(errors)
    assert found == {"a": [(pytest.approx(-0.1), weight), (pytest.approx(0.1), weight)]}


def test_few_deviations_give_the_widest_interval() -> None:
    """Twenty are enough for a class of its own, however wide others are."""
    wide = [(0.1 * k, 1.0) for k in range(-10, 11)]
    own = [(0.01 * k, 1.0) for k in range(-10, 10)]
    assert widest_of([0.0], own, {"b": wide}) == interval_of([0.0], own)
    assert widest_of([0.0], own[:19], {"b": wide}) == interval_of([0.0], wide)
    # an own class that is wider still keeps its width
    assert widest_of([0.0], [(-3.0, 1.0), (3.0, 1.0)], {"b": wide})[1] == math.exp(3.0)
    with pytest.raises(ValueError, match="no class"):
        widest_of([0.0], [], {"b": own[:3]})


def test_a_table_has_counts_for_few_rows() -> None:
    """Twenty rows have a share; the last line has all rows, and their mean width."""
    found = covered_table(
        [Covered("a", 20, 3, 18, math.log(1.5)), Covered("b", 19, 2, 19, math.log(1.2))],
        "sources",
    )
    assert "| a | 20 | 3 | 90 % | 50.0 | 0.365 |" in found
    assert "| b | 19 | 2 | 19 of 19 | 20.0 | 0.182 |" in found
    assert found.splitlines()[-1].startswith("| all | 39 | 5 | 95 % | 34.5 |")

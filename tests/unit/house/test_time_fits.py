"""The fit of times over batch and sequence length: optimal, non-negative, honest on its scatter."""

from __future__ import annotations

from itertools import product
from typing import cast

import numpy as np
import pytest
from hypothesis import given, strategies as st
from scipy.optimize import nnls

from autopar.documents.sidecar import Form, Term
from autopar.statistics import (
    INTERVAL,
    bootstrap_times,
    fit_times,
    nonnegative_fit,
    nonnegative_fits,
    relative_weights,
    terms_of,
)
from tests.often import often

POWERS = {
    "launch_s": (0, 0),
    "s_per_sample": (1, 0),
    "s_per_token": (1, 1),
    "s_per_token_squared": (1, 2),
}
TRUTH: dict[Term, float] = {"launch_s": 4e-4, "s_per_token": 1e-6, "s_per_token_squared": 3e-10}

times = st.floats(1e-6, 10.0)
points = st.lists(
    st.tuples(st.integers(1, 16), st.sampled_from([128, 256, 512, 1024, 4096]), times),
    min_size=1,
    max_size=10,
)
forms = st.sampled_from(["static", "batch", "sequence"])


def time_s(batch: int, tokens: int) -> float:
    """Return the time of a model whose coefficients are known."""
    return sum(x * batch ** POWERS[t][0] * tokens ** POWERS[t][1] for t, x in TRUTH.items())


@often(25, 100, points=points, form=forms, quadratic=st.booleans())
def test_fit_is_the_one_of_scipy(
    points: list[tuple[int, int, float]], form: Form, quadratic: bool
) -> None:
    """Of all non-negative coefficients these have the least squares of relative errors."""
    batches, tokens, seconds = (list(column) for column in zip(*points, strict=True))
    terms = terms_of(form, batches, tokens, quadratic=quadratic)
    found = fit_times(batches, tokens, seconds, terms)
    design = np.array(
        [[b ** POWERS[t][0] * float(s) ** POWERS[t][1] for t in terms] for b, s, _ in points]
    )
    floor = np.maximum(seconds, 1e-3 * max(seconds))
    # of columns of one length, which scipy's solver needs
    weighted = design / floor[:, None]
    scale = np.sqrt((weighted**2).sum(axis=0))
    _, residual = nnls(weighted / scale, np.array(seconds) / floor)

    assert (found.coefficients >= 0.0).all()
    assert np.linalg.norm(found.errors) == pytest.approx(residual, abs=1e-6)
    np.testing.assert_allclose(found.fitted_s, design @ found.coefficients, rtol=1e-9)
    assert abs(found.errors[found.worst]) == np.abs(found.errors).max()


@given(points=points, form=forms, factor=st.floats(1e-3, 1e3))
def test_another_unit_of_time_is_the_same_fit(
    points: list[tuple[int, int, float]], form: Form, factor: float
) -> None:
    """Times in other units give the same relative errors and fitted times in these units."""
    batches, tokens, seconds = (list(column) for column in zip(*points, strict=True))
    terms = terms_of(form, batches, tokens, quadratic=True)
    one = fit_times(batches, tokens, seconds, terms)
    other = fit_times(batches, tokens, [factor * t for t in seconds], terms)

    np.testing.assert_allclose(other.errors, one.errors, atol=1e-5)
    np.testing.assert_allclose(other.fitted_s, factor * one.fitted_s, rtol=1e-5, atol=1e-6 * factor)


@often(
    25,
    100,
    rows=st.lists(
        st.tuples(*[st.floats(0, 10).map(lambda x: round(x, 3))] * 5), min_size=1, max_size=8
    ),
    unknowns=st.integers(1, 3),
)
def test_many_fits_at_once_are_as_good_as_one_by_one(
    rows: list[tuple[float, ...]], unknowns: int
) -> None:
    """Also of columns that depend on each other and of targets that are 0."""
    design = np.array(rows)[:, :unknowns]
    targets = np.array(rows)[:, 3:].T
    found = nonnegative_fits(design, targets)

    assert (found >= 0.0).all()
    for row, coefficients in zip(targets, found, strict=True):
        weights = relative_weights(row)
        one = nonnegative_fit(design, row)
        errors = [np.linalg.norm(weights * (design @ x - row)) for x in (coefficients, one)]
        assert errors[0] == pytest.approx(errors[1], abs=1e-6)


@pytest.mark.parametrize(
    ("form", "batches", "lengths", "quadratic", "expected"),
    [
        ("static", (1, 2), (64,), True, "s_per_sample"),
        ("batch", (1, 2), (64,), True, "launch_s s_per_sample"),
        ("sequence", (1,), (64, 128), True, "s_per_token s_per_token_squared"),
        ("sequence", (1, 2), (64, 128), True, "launch_s s_per_token s_per_token_squared"),
        ("sequence", (1, 2), (64, 128), False, "launch_s s_per_sample s_per_token"),
        ("sequence", (1, 2), (64,), True, "launch_s s_per_token"),
    ],
)
def test_terms_are_those_that_the_times_can_tell_apart(
    form: Form, batches: tuple[int, ...], lengths: tuple[int, ...], quadratic: bool, expected: str
) -> None:
    """A launch needs two batches, attention two lengths; the rest has a part per sample instead."""
    assert terms_of(form, batches, lengths, quadratic=quadratic) == tuple(expected.split())


def test_known_coefficients_come_back() -> None:
    """Exact times of six cells give all three, and say what was not fitted."""
    cells = list(product((1, 4), (256, 1024, 4096)))
    found = fit_times(
        [b for b, _ in cells],
        [s for _, s in cells],
        [time_s(b, s) for b, s in cells],
        ("launch_s", "s_per_token", "s_per_token_squared"),
    )

    for term, value in TRUTH.items():
        assert found.coefficient(term) == pytest.approx(value, rel=1e-6)
    assert found.coefficient("s_per_sample") == 0.0
    assert found.sample_s(2048) == pytest.approx(time_s(1, 2048) - TRUTH["launch_s"])
    assert np.abs(found.errors).max() < 1e-9


def test_replicas_are_the_same_every_time_and_follow_the_samples() -> None:
    """The same samples give the same numbers; equal samples leave nothing open."""
    samples = [[1.0, 1.1, 0.9, 1.05], [2.0, 2.3, 1.9, 2.1]]
    terms: tuple[Term, ...] = ("launch_s", "s_per_sample")
    first, second = (bootstrap_times([1, 2], [64, 64], samples, terms) for _ in range(2))
    still = bootstrap_times([1, 2], [64, 64], [[1.0] * 4, [2.0] * 4], terms)

    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])
    assert first[0].shape == first[1].shape == (200, 2)
    assert np.ptp(first[1]) > 0.0
    assert np.ptp(still[0], axis=0).max() < 1e-12


@pytest.mark.whole
def test_intervals_contain_the_truth_as_often_as_they_say() -> None:
    """On 150 synthetic profiles with 5 % of noise, 90 % intervals hold it 90 % of the time."""
    generator = np.random.default_rng(5)
    cells = list(product((1, 4), (256, 1024, 4096)))
    batches, tokens = [b for b, _ in cells], [s for _, s in cells]
    terms = cast("tuple[Term, ...]", tuple(TRUTH))
    truth = np.array([*TRUTH.values(), *(time_s(b, s) for b, s in cells)])
    held = []
    for _ in range(150):
        samples = [
            (time_s(b, s) * np.exp(generator.normal(0.0, 0.05, 25))).tolist() for b, s in cells
        ]
        replicas = np.hstack(bootstrap_times(batches, tokens, samples, terms))
        low, high = np.quantile(replicas, INTERVAL, axis=0)
        held.append((low <= truth) & (truth <= high))

    for share in np.mean(held, axis=0):
        assert 0.83 <= share <= 0.97  # three deviations of 150 trials at 0.9

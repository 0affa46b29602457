"""Launches that were published of one job, in the order in which they are predicted."""

from __future__ import annotations

import pytest

from benchmarks.published_plans import FIVE, five_priced, priced, published


@pytest.fixture(scope="module")
def five() -> dict[str, tuple[float, float]]:
    return five_priced()


def test_of_five_published_launches_of_one_job_the_best_is_chosen(
    five: dict[str, tuple[float, float]],
) -> None:
    """Regret: how much slower the one predicted fastest was than the fastest."""
    assert len(five) == 5
    chosen = max(five.values(), key=lambda one: one[1])
    assert chosen[0] == max(measured for measured, _ in five.values())


def test_what_overlap_and_fewer_tensor_ranks_gain_has_the_measured_sign(
    five: dict[str, tuple[float, float]],
) -> None:
    plain, overlapped, _, deep, split = five.values()
    # the plan with 32 stages and all-to-alls is priced 23 % too fast, as fast as the first
    for faster, slower in ((overlapped, plain), (plain, split), (deep, split)):
        assert faster[0] > slower[0]
        assert faster[1] > slower[1]


def test_every_published_mixture_of_known_sizes_is_legal_and_has_a_price() -> None:
    found = list(published())
    assert len(found) >= 25
    assert {one.model for one in found} >= {"deepseek-v3", "gpt-oss-120b", "qwen3-235b-a22b"}
    for one in found:
        assessment = priced(one)
        assert assessment.step is not None
        assert (assessment.tokens_per_s or 0.0) > 0


def test_the_five_are_of_one_batch() -> None:
    assert {choice.global_batch for choice, _ in FIVE.values()} == {2048}

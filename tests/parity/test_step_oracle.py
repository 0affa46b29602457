"""The step of random dense jobs is that of a plain second writing of the formulas, term by term."""

from __future__ import annotations

import pytest

from autopar.price.step import TERMS, step_time
from tests.oracles.step import step_terms
from tests.step_cases import dense_case

BLOCKS = (*range(25), *(pytest.param(block, marks=pytest.mark.slow) for block in range(25, 200)))
"""Of ten jobs each."""
TIES = {1278, 1325}
"""Jobs with two stages of different blocks and equal time: rounding decides which one is shown."""


@pytest.mark.parametrize("block", BLOCKS)
def test_terms_are_the_oracles(block: int) -> None:
    """Every term to 1e-9, and their sum."""
    for seed in range(10 * block, 10 * block + 10):
        site, machine, job = dense_case(seed)
        expected = step_terms(site, job)
        found = step_time(machine, job)
        wrong = {
            term: (found.terms_s[term], expected.get(term, 0.0))
            for term in TERMS
            if found.terms_s[term] != pytest.approx(expected.get(term, 0.0), rel=1e-9, abs=1e-15)
        }
        assert wrong == {} or seed in TIES, f"seed {seed}: {job}"
        assert found.total_s == pytest.approx(sum(expected.values()), rel=1e-9)

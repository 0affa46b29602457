"""Searches on hosts with little memory, against pricing every launch."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.records import replace
from search.engines.candidate import NONE
from search.planning.uniform import best_first
from tests.oracles.uniform import Question
from tests.parity.test_uniform_search import asked, check, with_host

pytestmark = pytest.mark.whole


def with_little_host(seed: int, share: float) -> Question:
    """Return a question whose host has room for this share of its plans with offload."""
    one = asked(seed)
    needed = sorted({each.host for each in one.priced if each.choice.offload != NONE})
    return replace(one, uniform=with_host(one.uniform, 1.0001 * float(np.quantile(needed, share))))


@pytest.mark.parametrize("share", [0.02, 0.1, 0.4, 0.7])
@pytest.mark.parametrize("seed", [1, 9, 21, 24, 28, 37])
def test_the_answer_fits_on_the_host(seed: int, share: float) -> None:
    """Sets of modules that need less of the host replace those that need too much."""
    one = with_little_host(seed, share)
    check(one, one.uniform)


def test_other_sets_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that tries no other sets of modules than the first misses an answer."""
    monkeypatch.setattr(best_first._Search, "open_other_sets", lambda self, choice, unit: None)
    one = with_little_host(1, 0.02)
    with pytest.raises(AssertionError):
        check(one, one.uniform)

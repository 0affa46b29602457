"""The choice among plans that are as fast: the rule applied to every priced plan is the oracle."""

from __future__ import annotations

from functools import lru_cache

import pytest

from autopar.price.oom_risk import SAFE_RISK
from search.engines.candidate import NONE, Candidate
from search.planning.uniform.best_first import UniformSearch
from search.planning.uniform.choice import choose, is_safe
from search.request.options import Shares
from tests.oracles.uniform import Priced, Question, question

pytestmark = pytest.mark.whole

SEEDS = range(36)
NAMED = 4.0
"""Share of the throughput that a named plan may cost, as large for the same reason."""
WITHIN = 0.2
"""Share of the throughput: small questions have few plans within 1 % of the fastest."""


@lru_cache(maxsize=64)
def asked_of(seed: int) -> Question:
    return question(seed, most=40)


def complexity(choice: Candidate) -> tuple[bool, ...]:
    """Return the traits of a plan, the most avoided first."""
    overlap = choice.tp > 1 and choice.tp_overlap
    return (choice.offload != NONE, "+" in choice.recompute, choice.cp > 1, overlap)


def expected(asked: Question) -> tuple[bool, tuple[bool, ...], float]:
    """Return (unsafe, traits, seconds per sequence) of the choice, from all plans that fit."""
    fit = [one for one in asked.priced if one.fits(asked.target)]
    fastest = min(fit, key=lambda one: one.seconds)
    near = (
        one
        for one in fit
        if one.seconds <= fastest.seconds * (1.0 + WITHIN)
        and one.choice.precision == fastest.choice.precision
    )
    return min((unsafe(asked, one), complexity(one.choice), one.seconds) for one in near)


def unsafe(asked: Question, one: Priced) -> bool:
    return asked.target.oom_probability(one.run, max(one.peaks)) > SAFE_RISK


def test_choice_is_that_of_all_priced_plans() -> None:
    """Each step of the rule finds the plan that pricing every plan finds."""
    changed = 0
    for seed in SEEDS:
        asked = asked_of(seed)
        if asked.best is None:
            continue
        old = asked.uniform
        uniform = UniformSearch(old.engine, old.job, asked.target)
        fastest = uniform.solve(asked.fixed).solutions[0]
        chosen, _ = choose(
            uniform, asked.fixed, fastest, within=WITHIN, named=0.0, shares=Shares(None, 1)
        )
        plan = chosen or fastest
        risky, traits, seconds = expected(asked)
        assert (not is_safe(plan), complexity(plan.choice)) == (risky, traits), seed
        assert plan.sample_s == pytest.approx(seconds, rel=1e-9), seed
        changed += chosen is not None
    assert changed > 1


def test_safer_plan_is_named_where_it_costs_more() -> None:
    """Without a choice, the fastest safe plan is named within its own share of the throughput."""
    named = 0
    for seed in SEEDS:
        asked = asked_of(seed)
        if asked.best is None or not unsafe(asked, asked.best):
            continue
        old = asked.uniform
        uniform = UniformSearch(old.engine, old.job, asked.target)
        fastest = uniform.solve(asked.fixed).solutions[0]
        chosen, safer = choose(
            uniform, asked.fixed, fastest, within=0.0, named=NAMED, shares=Shares(None, 1)
        )
        most_s = fastest.sample_s * (1.0 + NAMED)
        precision = fastest.choice.precision
        safe = [
            one.seconds
            for one in asked.priced
            if one.fits(asked.target)
            and not unsafe(asked, one)
            and one.seconds <= most_s
            and one.choice.precision == precision
        ]
        found = chosen or safer
        assert (found is not None) == bool(safe), seed
        if found is not None:
            assert found.sample_s == pytest.approx(min(safe), rel=1e-9), seed
            named += 1
    assert named > 1

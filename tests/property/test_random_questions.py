"""Properties of the answers to random planning questions.

Questions draw a shipped model, a cluster of cards, a schedule, a memory constraint and a batch.
More of a resource is never slower, and a rule never faster. A plan that is priced again costs as
much as in the search, and a repeated question has the same answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from autopar.errors import InputError
from autopar.records import replace
from autopar.units import GB, GIB
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import SearchResult
from search.planning.session import Session, open_session
from search.questions.gains import add_bandwidth
from search.request.options import SearchOptions
from search.request.request import InputSpec

pytestmark = pytest.mark.whole

ROUNDING = 1e-9
"""Relative difference of sums in another order, at most."""
LIMIT_S = 5.0
"""Time limit of one search in seconds; stopped searches are not compared."""


MODELS = (
    "bert-large",
    "gpt2-xl",
    "gpt-6.7b",
    "llama2-7b",
    "llama2-13b",
    "llama3-8b",
    "llama3-70b",
    "mixtral-8x7b",
    "qwen2.5-7b",
    "t5-3b",
)
CLUSTERS = ("h100:1x8", "h100:4x8", "h100:8x8", "a100-80gb:2x8", "a100-80gb:16x8")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One random question."""

    model: str
    cluster: str
    options: SearchOptions


def drawn(seed: int) -> Question:
    """Return the question of this seed."""
    rng = random.Random(seed)
    return Question(
        model=rng.choice(MODELS),
        cluster=rng.choice(CLUSTERS),
        options=SearchOptions(
            pipeline_type=rng.choice(("gpipe", "pipedream_flush")),
            default_dp_type=rng.choice(("ddp", "zero2", "any")),
            sp_space=rng.choice(("tp", "tp+sp")),
            settle_bsz=rng.choice((8, 16, 64, 256)),
            memory_constraint_bytes=rng.choice((6, 8, 10, 14, 20, 30, 45, 75)) * GIB,
            time_profile_mode="batch",
            top=rng.choice((0, 5)),
        ),
    )


def opened(seed: int) -> Session | None:
    """Return the session of a question, None if its memory or batch is invalid."""
    question = drawn(seed)
    options = replace(question.options, time_limit_s=LIMIT_S)
    try:
        return open_session(InputSpec(model=question.model, hardware=question.cluster), options)
    except InputError:
        return None


def speed(result: SearchResult) -> float:
    """Return samples per second, 0 where nothing fits."""
    return result.prediction.samples_per_s if result.prediction is not None else 0.0


def solved(planner: Planner, memory: float) -> SearchResult | None:
    """Return the answer, None where the limit of time ended it."""
    result = planner.solve(memory_constraint_bytes=memory)
    return None if result.status == "time_limit" else result


def check(seed: int) -> bool:
    """Check all properties for one question; return True if the question was valid."""
    session = opened(seed)
    if session is None:
        return False
    rng = random.Random(seed)
    memory = session.options.memory_constraint_bytes
    planner = session.planner
    try:
        best = solved(planner, memory)
    except InputError:
        return False  # no batch splits on these GPUs
    if best is None:
        return False
    more = solved(planner, memory * rng.uniform(1.01, 1.5))
    if more is not None:
        assert speed(more) >= speed(best) * (1 - ROUNDING), seed
    repeated = solved(planner, memory)  # knows what was proven at both constraints
    if repeated is not None:
        assert (repeated.plan, repeated.prediction) == (best.plan, best.prediction), seed
        # alternatives are looked for while there is time
        if max(repeated.stats.wall_s, best.stats.wall_s) < LIMIT_S:
            assert repeated.alternatives == best.alternatives, seed
    quicker = session.rebuilt(
        hardware=add_bandwidth(session.hardware, collective=GB * rng.uniform(1, 50), p2p=GB)
    )
    faster = solved(quicker, memory)
    if faster is not None:
        assert speed(faster) >= speed(best) * (1 - ROUNDING), seed
    rule = rng.choice(("tp=1", "ckpt=0", "zero3=1", "pp=2", "zero3=0", "vtp=1"))
    bound = session.rebuilt(options=replace(session.options, pin=(rule,)))
    try:
        pinned = solved(bound, memory)
    except InputError:
        pinned = None  # nothing is left to search
    if pinned is not None:
        assert speed(pinned) <= speed(best) * (1 + ROUNDING), (seed, rule)
    if best.plan is not None and best.prediction is not None:
        again = planner.evaluate(best.plan, memory)
        assert again == best.prediction, seed
        assert again.legal, seed
        assert again.fits, seed
        # no alternative is faster than the best, and none is the best
        for other in best.alternatives:
            assert other.samples_per_s <= speed(best) * (1 + ROUNDING), seed
            assert other.plan != best.plan, seed
    return True


SLOW = [pytest.param(range(at, at + 100), marks=pytest.mark.slow) for at in range(12, 1012, 100)]


@pytest.mark.parametrize("seeds", [range(12), *SLOW], ids=str)
def test_answers_are_monotone_and_the_same_when_asked_again(seeds: range) -> None:
    """Nearly all questions are valid, so that the checks are meaningful."""
    asked = sum(check(seed) for seed in seeds)
    assert asked > 0.9 * len(seeds)

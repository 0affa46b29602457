"""Random planning questions: what must hold of every answer, with one thread and with three.

Questions are those of the benchmark of threads: a shipped model, a cluster of cards, a schedule, a
memory constraint and a batch. More of a resource is never slower, a rule never faster, and a plan
that is priced again costs what the search said.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from autopar.errors import InputError
from autopar.units import GB
from benchmarks.bench_threads import drawn
from search.planner.planner import Planner
from search.planner.prediction import SearchResult
from search.question import Session, open_session
from search.report.explain import add_bandwidth
from search.request import InputSpec

pytest.importorskip("_autopar_core", reason="the C++ core is not built: run `make build`")

ROUNDING = 1e-9
"""Sums in another order."""
LIMIT_S = 5.0
"""Of one search; what was stopped by it says nothing."""


def opened(seed: int) -> Session | None:
    """Return the session of a question, None where its memory or batch cannot be asked for."""
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
    """Check all that must hold of one question; return whether it could be asked."""
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
    threads = session.rebuilt(options=replace(session.options, threads=3))
    several = solved(threads, memory)
    if several is not None:
        assert (several.plan, several.prediction) == (best.plan, best.prediction), seed
        # alternatives are looked for while there is time
        if max(several.stats.wall_s, best.stats.wall_s) < LIMIT_S:
            assert several.alternatives == best.alternatives, seed
    more = solved(planner, memory * rng.uniform(1.01, 1.5))
    if more is not None:
        assert speed(more) >= speed(best) * (1 - ROUNDING), seed
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
def test_answers_are_monotone_and_the_same_with_any_threads(seeds: range) -> None:
    """Nearly all questions can be asked, so that the checks are of something."""
    asked = sum(check(seed) for seed in seeds)
    assert asked > 0.9 * len(seeds)

"""`solve_stage` on the stage problems of the public peer: its optimum, at a fraction of the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.records import replace
from benchmarks.bench_stage_cases import StageCase, read_cases, wrong

NAMES = 68


@pytest.fixture(scope="module")
def cases(data_dir: Path) -> list[StageCase]:
    """Return all stage problems."""
    return read_cases(data_dir)


def test_every_optimum_is_the_peers(cases: list[StageCase]) -> None:
    """All of them, to 1e-9, with a choice that fits and adds up, and a bound that equals it."""
    assert len(cases) == NAMES
    assert {c.name: text for c in cases if (text := wrong(c, c.solve()))} == {}


def test_some_budgets_bind(cases: list[StageCase]) -> None:
    """Without its budget a bound problem is faster, so the test above is about memory too."""
    bound = 0
    for case in cases:
        free = case.time_s.min(axis=1).sum()
        bound += free < case.best_s * (1 - 1e-6)
    assert bound > NAMES // 2


def test_one_megabyte_less_is_never_faster(cases: list[StageCase]) -> None:
    """Optima do not improve when the budget shrinks, and the memory of the choice is a budget."""
    for case in cases[::4]:
        answer = case.solve()
        if answer.status != "optimal":
            continue
        exact = replace(case, budget_mb=int(answer.memory_bytes / 2**20))
        less = replace(case, budget_mb=exact.budget_mb - 1)
        assert exact.solve().total_s == pytest.approx(answer.total_s, rel=1e-12)
        assert less.solve().total_s >= answer.total_s * (1 - 1e-12)

"""The planning problems in tests/data/planner are what today's code would write.

C++ tests read the same files (csrc/tests/planner_dump.hpp); `python -m tests.oracles.dump` rewrites
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.oracles.dump import (
    FOLDER,
    ORACLES,
    REAL,
    Problem,
    answer_of,
    as_text,
    large_problem,
    problem_texts,
    read_problems,
    real_problem,
    small_problem,
    wild_problem,
)

EFFORT = {"states", "items", "opened", "alternatives_complete", "too_large"}
"""What an answer tells about the work, which is not dumped."""


@pytest.fixture(scope="module")
def dumped() -> dict[str, Problem]:
    """Return every problem of the folder by its name."""
    return {p.name: p for name in problem_texts() for p in read_problems(FOLDER / name)}


def text_of(name: str, file: str) -> str:
    """Return the lines of one problem as they stand in the file."""
    text = (FOLDER / file).read_text(encoding="utf-8")
    start = text.index(f"problem {name}\n")
    return text[start : text.index("\nend\n", start) + len("\nend\n")]


@pytest.mark.parametrize(
    ("file", "name", "make"),
    [
        ("small.dump", "small-3", lambda: small_problem(3)),
        ("small.dump", "small-19", lambda: small_problem(19)),
        ("wild.dump", "wild-8", lambda: wild_problem(8)),
        ("wild.dump", "wild-30", lambda: wild_problem(30)),
        ("large.dump", "large-1", lambda: large_problem(1)),
    ],
)
def test_problem_is_written_the_same_again(file: str, name: str, make) -> None:
    """The generators, the layout of the arrays, the oracles and the answers are today's."""
    assert as_text(make()) == text_of(name, file)


def test_real_problem_has_todays_arrays(dumped: dict[str, Problem]) -> None:
    """Same arrays, types and axes as a search hands over; figures may be of an older cost model."""
    today, old = real_problem("pins"), dumped["pins"]
    assert {k: (a.dtype, a.ndim) for k, a in old.arrays.items()} == {
        k: (a.dtype, a.ndim) for k, a in today.arrays.items()
    }


def test_files_hold_every_problem_and_nothing_else(dumped: dict[str, Problem]) -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(problem_texts())
    assert set(REAL) <= set(dumped)
    assert {p.oracle for p in dumped.values()} == set(ORACLES)
    assert len(dumped) >= 80
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2**20


def test_reading_and_writing_changes_nothing(dumped: dict[str, Problem]) -> None:
    for file in problem_texts():
        text = (FOLDER / file).read_text(encoding="utf-8")
        problems = read_problems(FOLDER / file)
        assert text.split("\n", 1)[1] == "".join(map(as_text, problems)), file


def test_the_binding_gives_the_recorded_answers(dumped: dict[str, Problem]) -> None:
    """What the C++ tests see without Python is what Python sees."""
    for name, problem in dumped.items():
        answer = {k: v for k, v in answer_of(problem).items() if k not in EFFORT}
        assert answer == problem.answer, name


def test_unknown_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "wrong.dump"
    path.write_text("problem x\nbudgets 3\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"wrong\.dump: unknown line 'budgets 3'"):
        list(read_problems(path))

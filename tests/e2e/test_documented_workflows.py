"""Everything that five documents describe, run with this product: what works, and what does not.

A row is a command line, an option, a file, a key or a behaviour. Rows stand in `documented_*.py`
by document; each checks an outcome, not merely an exit code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import (
    documented_calculon,
    documented_files,
    documented_paddle,
    documented_search,
    documented_tensor2d,
    documented_training,
)
from tests.e2e.documented_lab import Lab, Row, prepare

pytestmark = pytest.mark.whole

TABLES = (
    documented_files.TABLE,
    documented_search.TABLE,
    documented_training.TABLE,
    documented_tensor2d.TABLE,
    documented_paddle.TABLE,
    documented_calculon.TABLE,
    documented_paddle.CARD,
    documented_files.TRIAL,
)
SOURCES = {
    "000": "000 Galvatron's search engine",
    "001": "001 Galvatron's models: profile, search, train",
    "002": "002 the code of arXiv 2410.00273",
    "003": "003 PaddleNLP's Galvatron",
    "004": "004 tuning with Calculon",
    "card": "card of this project",
    "use": "use: what no page says",
}
HEAD = """# Documented workflows

What five documents and the card of this project describe, row by row, as it is with this product.
This page is written from the rows in `tests/e2e/documented_*.py` by `make golden`;
`tests/e2e/test_documented_workflows.py` runs each of them.
A row under *not yet* checks what happens today, and fails as soon as that changes.
A row under *needs a GPU* is skipped where there is none, and counts there only.
"""
ROWS = [row for table in TABLES for row in table]
GPU_ONLY = "by `pytest -m gpu`"


def _shown(row: Row) -> str:
    """Return the column of a row; a row that needs a GPU is not shown to work elsewhere."""
    return "needs a GPU" if "gpu" in row.marks else row.state


def _parameter(row: Row) -> object:
    marks = [getattr(pytest.mark, name) for name in row.marks]
    return pytest.param(row, id=f"{row.source} {row.feature}", marks=marks)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Return the laboratory of all rows; none changes its files."""
    return prepare(tmp_path_factory.mktemp("lab"))


@pytest.mark.parametrize("row", [_parameter(row) for row in ROWS])
def test_row(row: Row, shared: Lab) -> None:
    """The documented outcome, or what is done in its place."""
    row.check(shared)


def test_golden_page_counts(golden: Callable[[str, str], None]) -> None:
    """What works, what differs on purpose and why, what is open and what happens instead."""
    states = ("works", "different", "not yet", "needs a GPU")
    lines = [HEAD, f"| document | rows | {' | '.join(states)} |", "|---|---|---|---|---|---|"]
    for source, name in [*SOURCES.items(), ("", "in all")]:
        rows = [row for row in ROWS if row.source.startswith(source)]
        counts = [sum(_shown(row) == state for row in rows) for state in states]
        lines.append(f"| {name} | {len(rows)} | {' | '.join(map(str, counts))} |")
    for state, title, told in (
        ("different", "Different on purpose", "why"),
        ("not yet", "Not yet", "today"),
        ("needs a GPU", "Needs a GPU", "checked"),
    ):
        lines += ["", f"## {title}", "", f"| document | row | {told} |", "|---|---|---|"]
        for row in (row for row in ROWS if _shown(row) == state):
            lines.append(f"| {row.source} | {row.feature} | {row.why or GPU_ONLY} |")

    golden("documented_workflows.md", "\n".join(lines) + "\n")


def test_rows_say_why() -> None:
    """What is not as documented says so in words, what is says nothing; no row stands twice."""
    assert [row.feature for row in ROWS if bool(row.why) == (row.state == "works")] == []
    assert max(Counter((row.source, row.feature) for row in ROWS).values()) == 1


def test_every_documented_row_is_here(cases_dir: Path) -> None:
    """The list of what the documents describe, one line each, is the list of rows."""
    listed = set()
    for line in (cases_dir / "documented_rows.md").read_text(encoding="utf-8").splitlines():
        found = re.match(r"\| (\d{3}|card) \| (.+?) \| (?:works|partly|absent|different)", line)
        if found:
            listed.add((found[1], found[2]))

    assert len(listed) == 290
    own = {(row.source, row.feature) for row in ROWS if row.source != "use"}
    assert listed ^ own == set()

"""Published peaks: every row of the tables is compared or named, and no source gets worse unseen.

What `benchmarks.memory_goldens` prices is tested in test_memory_goldens.py; single terms are in
test_memory_terms.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.units import MIB
from benchmarks import published_peaks
from benchmarks.memory_odds import odds_table
from benchmarks.published_peaks import (
    PAGE,
    Compared,
    errors_by_source,
    first_counts,
    not_compared,
    reserve_odds,
    reserved_ratios,
    summary_table,
)
from benchmarks.torchtitan_peaks import torch_layers_left_out
from tests.data.read import read_csv

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "published_peaks.json"
SLACK = 5e-4
"""By how much a source may get worse: half of what is left of the mixtures."""
HOW = (
    "if that is meant, `make golden` records it and `python -m benchmarks.published_peaks --docs` "
    "shows it"
)


@pytest.fixture(scope="module")
def rows() -> list[Compared]:
    """Return every compared stage, counted once."""
    return published_peaks.published_peaks()


def test_golden_no_source_is_worse(rows: list[Compared], request: pytest.FixtureRequest) -> None:
    """Median and worst error of every source are at most those recorded."""
    found = errors_by_source(rows)
    if request.config.getoption("--update-golden"):
        rounded = {name: {k: round(v, 6) for k, v in e.items()} for name, e in found.items()}
        GOLDEN.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")
        return

    known = json.loads(GOLDEN.read_text(encoding="utf-8"))

    assert found.keys() == known.keys(), HOW
    for name, was in known.items():
        assert found[name]["rows"] == was["rows"], HOW
        for which in ("median", "worst"):
            assert found[name][which] <= was[which] + SLACK, f"{name}: {which}; {HOW}"


def test_every_published_memory_is_compared_or_named(rows: list[Compared], data_dir: Path) -> None:
    """The rows of SimuMax stand for those that repeat them; others have their reason."""
    printed = [row for row in read_csv(data_dir, "published_runs") if row["peak_mem_gb"]]
    simumax = [row for row in printed if row["source"].startswith("SimuMax")]
    counted = [row for row in rows if row.what == "counted"]

    assert len(printed) - len(simumax) == len(counted) + sum(not_compared().values())
    # GiB of the fullest stage, to two digits
    peaks = {
        round(max(float(row["allocated_mib"]) for row in group) * MIB / 2**30, 2)
        for group in _launches(data_dir).values()
    }
    assert {float(row["peak_mem_gb"]) for row in simumax} <= peaks


def _launches(data_dir: Path) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for row in read_csv(data_dir, "published_peaks"):
        found.setdefault(row["where"], []).append(row)
    return found


def test_the_fullest_stage_is_the_measured_one(rows: list[Compared]) -> None:
    """Of launches with two stages the fuller one is the fuller one, and by about as much."""
    pairs: dict[str, dict[int, Compared]] = {}
    for row in rows:
        if row.what == "allocated" and row.run.strategy.pp == 2:
            pairs.setdefault(row.name, {})[row.stage] = row
    assert len(pairs) == 4
    for first, last in (pair.values() for pair in pairs.values()):
        gap = last.published_bytes - first.published_bytes
        ours = last.ours_bytes - first.ours_bytes
        assert gap * ours > 0
        assert ours == pytest.approx(gap, abs=64 * MIB)


def test_reserves_are_above_what_is_allocated(rows: list[Compared]) -> None:
    """One figure of every measured stage, the fullest rank's."""
    ratios = reserved_ratios(rows)
    assert len(ratios) == sum(row.source.startswith("SimuMax") for row in rows) == 23
    assert 1.0 < min(ratios) < 1.03 < max(ratios) < 1.1


def test_intervals_hold_first_counts_of_runs_that_nobody_had_counted(
    rows: list[Compared],
) -> None:
    """85 to 95 % of what was reserved is inside, and probabilities of OOM are what happened."""
    peaks, reserved = first_counts(rows)
    assert (peaks.rows, reserved.rows) == (25, 23)
    assert peaks.inside == 25
    assert 0.85 <= reserved.coverage <= 0.95
    for each in reserve_odds(rows)[1]:
        if each.high <= 0.7:
            assert each.happened == pytest.approx(each.predicted, abs=0.05), each


def test_runs_of_torch_layers_are_inside_the_interval_of_the_others() -> None:
    """Eighteen of twenty; the shipped ends are near those that all of them make."""
    found = torch_layers_left_out()
    assert (found.rows, found.inside) == (20, 18)


def test_the_page_has_the_tables(rows: list[Compared]) -> None:
    """docs/concepts/memory.md shows what the benchmark prints."""
    text = PAGE.read_text(encoding="utf-8")
    assert summary_table(rows) in text, "python -m benchmarks.published_peaks --docs"
    share, bins = reserve_odds(rows)
    assert odds_table(bins) in text, "python -m benchmarks.published_peaks --docs"
    # 9 of 10 hold as much as they say
    assert share >= 0.9


def test_rows_and_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Terms of chosen rows add up to what a document has of all of them."""
    assert published_peaks.main(["--rows", "deepseekv3, 4 layers, ep 8"]) == 0
    shown = capsys.readouterr().out
    assert "tokens between experts" in shown
    assert published_peaks.main(["--json", str(tmp_path / "out.json")]) == 0
    assert "are not compared" in capsys.readouterr().out
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["rows"]
    measured = [row for row in written if row["what"] == "allocated"]
    assert all(row["ours_bytes"] == sum(row["terms_bytes"].values()) for row in measured)

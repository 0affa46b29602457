"""The published figures in tests/data: each file is described, small, and what `make.py` writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.data import make, read

LARGEST_BYTES = 3 * 2**20


def test_every_table_is_described(data_dir: Path) -> None:
    """The page beside the tables has a row for each, and each says itself where it is from."""
    page = (data_dir / "README.md").read_text(encoding="utf-8")
    files = sorted(data_dir.glob("*.gz"))
    named = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]

    assert sorted(named) == [path.name for path in files]
    assert sum(path.stat().st_size for path in files) < LARGEST_BYTES
    for path in files:
        name = path.name.split(".")[0]
        if path.name.endswith(".jsonl.gz"):
            settings = read.read_settings(path)
            assert settings
            assert all(isinstance(of_row, dict) for of_row in settings.values())
        elif path.name.endswith(".json.gz"):
            document = read.read_file(data_dir, name)
            assert list(document) == ["what", "source", "obtained", "units", "tables"]
            assert all(document.values())
        else:
            assert all(row["source"] and row["where"] for row in read.read_csv(data_dir, name))


def test_absent_and_plain_tables_of_runs(tmp_path: Path) -> None:
    """A plain table is read as a compressed one; of two, the compressed one counts."""
    with pytest.raises(FileNotFoundError, match=r"runs\.csv'"):
        list(read.read_csv(tmp_path, "runs"))
    (tmp_path / "runs.csv").write_text('a,b\n1,"2\n3"\n', encoding="utf-8")
    assert list(read.read_csv(tmp_path, "runs")) == [{"a": "1", "b": "2\n3"}]
    (tmp_path / "runs.csv.gz").write_bytes(gzip.compress(b"a\n5\n"))
    assert list(read.read_csv(tmp_path, "runs")) == [{"a": "5"}]


def test_absent_cells_are_no_figures() -> None:
    """Rows of different columns make one table, and a document without numbers is refused."""
    assert make.columns([{"a": 1}, {"b": 0.1}]) == {"a": [1, None], "b": [None, 0.1]}
    with pytest.raises(ValueError, match="Out of range"):
        make.compressed({"a": float("inf")})
    assert json.loads(gzip.decompress(make.compressed({"a": 0.1}))) == {"a": 0.1}
    assert make.compressed({"a": 1}) == make.compressed({"a": 1})


UNCORRECTED = "published_runs_settings.jsonl.gz"
"""Settings as the constants of the ledger were fitted to; corrected ones come with their refit."""


@pytest.mark.whole
def test_tables_are_those_of_the_reference_cases(
    cases_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    """Written again from the originals, and compared with them, they hold the same."""
    sizes = make.write(cases_dir, tmp_path)
    make.check(cases_dir, tmp_path)

    # made from transformers instead (tests/data/defaults.py)
    others = {"transformers_defaults.json.gz"}
    assert {*sizes} == {path.name for path in data_dir.glob("*.gz")} - others
    for name in sizes:
        ours, again = (folder / name for folder in (data_dir, tmp_path))
        one, other = (gzip.decompress(path.read_bytes()) for path in (ours, again))
        if name == UNCORRECTED:
            one, other = map(_rows, (one, other))
        assert one == other, name


def _rows(lines: bytes) -> bytes:
    """Return the numbers of the rows that have settings."""
    return b" ".join(str(json.loads(line)["row"]).encode() for line in lines.splitlines())

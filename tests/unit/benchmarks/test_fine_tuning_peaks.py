"""Published memory of fine-tuning runs: all rows are priced, and errors do not grow unseen."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.fine_tuning_peaks import Compared, compared, launch_of, read_rows


@pytest.fixture(scope="module")
def rows() -> list[Compared]:
    """Return every row with its prediction."""
    found = [*compared(read_rows())]
    assert all(isinstance(one, Compared) for one in found), found
    return [one for one in found if isinstance(one, Compared)]


def test_every_row_is_priced_from_its_launch(rows: list[Compared]) -> None:
    """DoRA and activation offload alone have no verdict."""
    assert len(rows) == 24
    assert {one.row["id"] for one in rows if not one.verdict} == {"27", "42"}


def test_errors_are_those_of_the_docs(rows: list[Compared]) -> None:
    """docs/concepts/memory.md gives both figures."""
    assert round(100 * median(abs(one.error) for one in rows)) == 7
    assert sum(one.covered for one in rows) == 20


def test_a_launch_has_the_settings_of_its_row() -> None:
    row = next(one for one in read_rows() if one["id"] == "12")
    files = launch_of(row)
    assert "fsdp_offload_params: true" in files["accelerate.yaml"]
    assert "--max_length 2048 --per_device_train_batch_size 4" in files["run.sh"]
    assert '"hidden_size": 7168' in files["model/config.json"]

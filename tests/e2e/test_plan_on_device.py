"""The matrix of one-rank plans on a device: its commands, its figures, and a cell on a CPU."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.plan import read_strategy
from autopar.documents.strategy import strategy_document
from benchmarks.plan_on_device import Cell, Row, main, row
from profiler.verify.plans import SMALL_MODEL

ROOT = Path(__file__).resolve().parent.parent.parent
CELL = Cell(layers=2, seq_length=64, batch=2, checkpoint=True)
RUN: dict[str, Any] = {
    "step_time_s": [0.2, 0.1, 0.1],
    "peak_bytes": [1000],
    "predicted": {"step_time_s": 0.11, "peak_bytes": [990]},
}


def test_a_cell_is_a_legal_plan_of_one_rank() -> None:
    """Its strategy file says the same."""
    plan = CELL.plan
    assert read_strategy(strategy_document(plan)) == plan
    assert (plan.world_size, plan.global_batch, plan.num_microbatches) == (1, 2, 1)
    assert [layer.checkpoint for layer in plan.layers] == [True, True]


def test_differences_are_signed() -> None:
    """Medians of the steps; the dry run against what was measured."""
    found = row(CELL, RUN, {"ranks": [{"peak_bytes": 1020}]})
    assert found.differences == pytest.approx((0.1, -0.01, 0.02))
    assert found.text.startswith("| 2 | 64 | 2 | yes | 110.00 | 100.00 | +10.0 % |")


def test_commands_make_the_matrix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The device once, the model once a length, three commands a cell; nothing is written."""
    assert main(["--commands", "--device", "cuda", "--layers", "2,8", "--seq", "1024,4096"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    programs = [words[words.index("-m") + 1] if "-m" in words else words[0] for words in lines]

    num_cells = 2 * 2 * 3 * 2
    assert {name: programs.count(name) for name in set(programs)} == {
        "profiler.hardware": 1,
        "profile-model": 2,
        "autopar-search": num_cells,
        "profiler.plan": num_cells,
        "profile-plan": num_cells,
    }
    assert all("bf16" in words for words in lines[1:])
    searches = [words for words in lines if words[0] == "autopar-search"]
    # both sum gradients in fp32
    assert not any("--no-fp32-gradients" in words for words in searches)
    assert list(folder.iterdir()) == []


def test_unusable_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """In one sentence, before anything runs."""
    assert main(["--commands", "--device", "cpu", "--layers", "0"]) == 2
    assert "--layers: expected the number of layers" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cell_on_a_cpu(tmp_path: Path) -> None:
    """Profiled, priced, run and counted by real processes; again, everything is there."""
    pytest.importorskip("torch", reason="torch is not installed")
    (tmp_path / "small.json").write_text(json.dumps(SMALL_MODEL), encoding="utf-8")
    words = (
        *("--device", "cpu", "--model", "small.json", "--layers", "2", "--seq", "32"),
        *("--batch", "2", "--ckpt", "1", "--steps", "2", "--max-seconds", "0.1"),
        *("--work", "w", "--json", "ledger.jsonl"),
    )
    texts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.plan_on_device", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    (found,) = json.loads((tmp_path / "ledger.jsonl").read_text("utf-8").splitlines()[0])["rows"]
    read = Row(**{**found, "cell": Cell(**found["cell"])})
    assert read.text in texts[0]
    assert read.cell == Cell(layers=2, seq_length=32, batch=2, checkpoint=True)
    # bytes do not depend on how busy the machine is
    _, memory, dry_run = read.differences
    assert abs(memory) < 0.1
    assert abs(dry_run) < 0.005

"""The documented command of a run: strategy file and config.json in, a document out."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launching import Copies, Finished, Launch
from tests.e2e.profiling import CONFIG as TINY, SMALLER
from tests.plan_cases import STRATEGY

pytestmark = pytest.mark.whole

pytest.importorskip("torch", reason="a run needs torch")

CONFIG = TINY | SMALLER


def launched(folder: Path, ranks: int, *arguments: str) -> Finished:
    """Return how the command ends under torchrun."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with Launch.of(
        [sys.executable, *launcher, "-m", "profiler.plan", *arguments], cwd=folder
    ) as launch:
        return launch.wait(240)


def copied(folder: Path, ranks: int, *arguments: str) -> Finished:
    """Return how the command ends in copies of a warm process."""
    with Copies.of(ranks, "profiler.plan", *arguments, cwd=folder) as copies:
        return copies.wait(120)


Run = Callable[..., Finished]
BOTH = pytest.mark.parametrize("run", [copied, pytest.param(launched, marks=pytest.mark.ranks)])


@BOTH
def test_documented_command(run: Run, tmp_path: Path) -> None:
    """A value per step, all of them those of one process, and one report for four ranks."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "plan.json").write_text(json.dumps(STRATEGY), encoding="utf-8")
    options = ["--seq", "32", "--mode", "run", "--steps", "2", "--backend", "gloo"]
    done = run(tmp_path, 4, "plan.json", "--model", "config.json", *options, "--json", "found.json")
    assert done.code == 0, done.stderr
    assert done.stdout.count("Steps compared with one process") == 1
    found = json.loads((tmp_path / "found.json").read_text("utf-8"))
    for key in ("loss", "grad_norm", "reference_loss", "reference_grad_norm"):
        assert len(found[key]) == 2
    assert found["loss"] == pytest.approx(found["reference_loss"], rel=2e-4)
    assert found["grad_norm"] == pytest.approx(found["reference_grad_norm"], rel=1e-3)
    assert found["loss"][1] != found["loss"][0]
    assert len(found["step_time_s"]) == 3
    assert len(found["peak_bytes"]) == 4
    assert min(found["peak_bytes"]) > 0
    assert found["reference"]["matches"] is True
    assert found["predicted"] is None


@BOTH
def test_wrong_number_of_ranks(run: Run, tmp_path: Path) -> None:
    """One rank says it, once, before torchrun ends the others."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "plan.json").write_text(json.dumps(STRATEGY), encoding="utf-8")
    done = run(tmp_path, 2, "plan.json", "--model", "config.json", "--seq", "32")
    assert done.rank_code == 2
    assert done.stderr.count("profile-plan: ") == 1
    assert "the plan is for 4 ranks, but torchrun started 2" in done.stderr

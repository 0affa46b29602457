"""autopar-verify with real processes: profilers, searches and two gloo ranks per plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.calibration import read_calibration

pytestmark = pytest.mark.whole

pytest.importorskip("torch", reason="torch is not installed")
ROOT = Path(__file__).resolve().parent.parent.parent
CODE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from autopar.cli import verify; verify()"


def verified(folder: Path, *arguments: str, timeout: int = 900) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder."""
    return subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_given_files_are_read_before_anything_is_done(tmp_path: Path) -> None:
    """A folder without hardware files is refused in one sentence, and no work folder is made."""
    for name in ("links", "profiles"):
        (tmp_path / name).mkdir()
    done = verified(
        tmp_path,
        *("--model", "llama2-7b", "--layers", "2", "--device", "cpu", "--work", "w"),
        *("--hardware", "links", "--profiles", "profiles"),
    )

    assert done.returncode == 2
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("autopar-verify: links/allreduce_")
    assert "this file does not exist" in sentence
    assert not (tmp_path / "w").exists()


@pytest.mark.slow
def test_two_ranks_from_nothing_to_a_calibration(tmp_path: Path) -> None:
    """Measured links and model, searched plans, real runs; again, everything is there already."""
    arguments = (
        *("--layers", "2", "--seq", "32", "--plans", "1", "--contrast", "3", "--repeats", "1"),
        *("--steps", "2", "--device", "cpu", "--work", "w", "--json", "out.json"),
    )
    done = verified(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "out.json").read_text("utf-8"))

    assert "rank correlation (Spearman)" in done.stdout
    assert (found["hardware"], found["world_size"], found["precision"]) == ("cpu_1x2", 2, "fp32")
    assert found["summary"]["num_plans"] >= 3
    for plan in found["plans"]:
        assert plan["label"].split()[0] in done.stdout
        assert plan["measured_s"] > 0.0
        assert len(plan["rounds_s"]) == 1
        assert len(plan["rounds_s"][0]) == 2
        assert len(plan["peak_bytes"]) == len(plan["predicted_bytes"])
    # memory is counted and bytes do not depend on how busy the machine is
    assert found["summary"]["median_memory_error"] < 0.1
    if found["summary"]["num_plans"] >= 4:
        assert read_calibration(tmp_path / "w" / "calibration.json").hardware == "cpu_1x2"

    again = verified(tmp_path, *arguments)
    assert (again.returncode, again.stdout, again.stderr) == (0, done.stdout, "")

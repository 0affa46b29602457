"""Processes that are copies of a warm one: ends, signals, streams, and nothing left from before."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.gloo import RanksFailedError, run_ranks


@pytest.mark.whole
def test_a_command_is_a_process_like_any_other(tmp_path: Path) -> None:
    """Exit code, both streams, arguments, folder and environment are those of a new interpreter."""
    environment = {**os.environ, "COLUMNS": "70"}
    arguments = ("--evaluate", "häuser.json")
    done = warm.command("autopar-search", *arguments, cwd=tmp_path, env=environment).completed()
    code = "from autopar.cli import search; search()"
    cold = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(warm.ROOT), "PYTHONUTF8": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )

    assert cold.returncode == 2
    assert "häuser.json" in cold.stderr
    assert (done.returncode, done.stdout, done.stderr) == (2, cold.stdout, cold.stderr)


def _say(*numbers: int) -> None:
    """Write in both streams and wait for a signal."""
    sys.stdout.write(" ".join(map(str, numbers)) + "\n")
    sys.stdout.flush()
    sys.stderr.write("begun\n")
    time.sleep(60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_ends_a_process(number: signal.Signals) -> None:
    """What it wrote is there, and its exit code is the signal's."""
    with warm.Warm(_say, 1, 2, name="say") as process:
        assert process.stderr.readline() == "begun\n"
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(number)
        assert process.communicate(10) == ("1 2\n", "")

    assert process.returncode == -number


def test_nothing_outlives_a_context() -> None:
    """A process that nobody ended ends with the block."""
    with warm.Warm(_say, name="say") as process:
        assert process.stderr.readline() == "begun\n"

    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def _spoil() -> None:
    """Change all that is a process's own."""
    import torch

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(5)
    torch.set_grad_enabled(False)
    os.environ["LEFT"] = "behind"
    random.seed(5)
    os.chdir("/")


def _state() -> dict[str, Any]:
    """Return what a rank begins with."""
    import torch

    return {
        "dtype": str(torch.get_default_dtype()),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "seed": torch.initial_seed(),
        "modules": "tests.unit.house.test_warm" in sys.modules,
        "variables": {name: os.environ.get(name) for name in ("LEFT", "GIVEN")},
        "folder": str(Path.cwd()),
        "random": random.random(),
    }


def test_ranks_find_nothing_of_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call has processes of its own, with the environment of the call."""
    pytest.importorskip("torch", reason="ranks need torch")
    first = run_ranks(_state, 2)
    run_ranks(_spoil, 2)
    monkeypatch.setenv("GIVEN", "now")
    second = run_ranks(_state, 2)

    assert len({found.pop("random") for found in [*first, *second]}) == 4
    assert first[0] == first[1]
    assert first[0]["variables"] == {"LEFT": None, "GIVEN": None}
    assert second == [first[0] | {"variables": {"LEFT": None, "GIVEN": "now"}}] * 2
    assert (first[0]["dtype"], first[0]["gradients"], first[0]["threads"]) == (
        "torch.float32", True, 1,
    )  # fmt: skip


def _end_on_rank_1(how: str) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        if how == "exit":
            os._exit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exit", "rank 1 died with exit code 3"),
        ("kill", "rank 1 died with exit code -9"),
        ("hang", "rank 1 is not done after 2 s"),
    ],
)
def test_a_rank_that_ends_or_hangs_is_named(how: str, said: str) -> None:
    """And the next call has whole ranks again."""
    pytest.importorskip("torch", reason="ranks need torch")
    with pytest.raises(RanksFailedError, match=said):
        run_ranks(_end_on_rank_1, 2, how, timeout_s=2.0)

    assert run_ranks(os.getpid, 1) != [os.getpid()]

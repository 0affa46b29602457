"""Runs of a plan that cannot go on: every process ends, and rank 0 says why in one sentence."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.launching import Copies, Finished, Launch
from tests.e2e.profiling import CONFIG, SMALLER
from tests.warm import ROOT

pytestmark = pytest.mark.whole

pytest.importorskip("torch", reason="a run needs torch")

_MODEL = CONFIG | SMALLER | {"num_hidden_layers": 2, "num_key_value_heads": 4}
_PLAN = ("--pp-deg", "2", "--chunks", "2", "--global-train-batch-size", "4", "--seq", "16")
_ENDLESS = ("--steps", "100000", "--no-reference")


def _arguments(folder: Path, plan: tuple[str, ...], changes: Mapping[str, Any]) -> list[str]:
    """Write the model; return the arguments of a run of a plan."""
    model = folder / "config.json"
    model.write_text(json.dumps(_MODEL | changes), encoding="utf-8")
    return ["--model", str(model), *plan, "--backend", "gloo"]


def _launch(
    folder: Path,
    *arguments: str,
    plan: tuple[str, ...] = _PLAN,
    most_kib: int | None = None,
    **changes: Any,
) -> Launch:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    limit = () if most_kib is None else ("sh", "-c", f'ulimit -v {most_kib}; exec "$@"', "-")
    command = [*limit, sys.executable, *launcher, "-m", "profiler.plan"]
    return Launch.of([*command, *_arguments(folder, plan, changes), *arguments])


def _copies(folder: Path, *arguments: str, plan: tuple[str, ...] = _PLAN, **changes: Any) -> Copies:
    return Copies.of(2, "profiler.plan", *_arguments(folder, plan, changes), *arguments)


def _sentences(done: Finished) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("profile-plan: ")]


def _check(launch: Launch | Copies, done: Finished) -> str:
    """Return the only sentence of a launch that left nothing behind and no traceback of ours."""
    assert launch.ranks() == []
    assert f"{ROOT}/profiler" not in done.stderr  # torchrun's own traceback is its business
    (sentence,) = _sentences(done)
    return sentence


@pytest.mark.parametrize("start", [_copies, pytest.param(_launch, marks=pytest.mark.ranks)])
def test_a_rank_that_is_killed_is_named(
    start: Callable[..., Launch | Copies], tmp_path: Path
) -> None:
    with start(tmp_path, *_ENDLESS) as launch:
        _when_it_runs(launch)
        os.kill(launch.pid(1), signal.SIGKILL)
        done = launch.wait(60)
        sentence = _check(launch, done)
    assert "rank 1 on host " in sentence
    assert " stopped answering, during step " in sentence
    assert done.code == 1


@pytest.mark.ranks
def test_a_rank_without_memory_is_named(tmp_path: Path) -> None:
    # an embedding of 137 GB where a process may have half of it
    with _launch(tmp_path, most_kib=60_000_000, vocab_size=1 << 22, hidden_size=8192) as launch:
        done = launch.wait(60)
        sentence = _check(launch, done)
    assert re.search(r"rank ([01]) in stage \1 ran out of memory \(.*tried to allocate", sentence)
    assert sentence.endswith("(--mode dryrun)")
    assert done.code == 1


@pytest.mark.ranks
def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path: Path) -> None:
    with _copies(tmp_path, *_ENDLESS, "--timeout", "5") as launch:
        _when_it_runs(launch)
        os.kill(launch.pid(1), signal.SIGSTOP)
        sentence = _check(launch, launch.wait(60))
    assert "rank 1 on host " in sentence
    assert " stopped answering, during step " in sentence


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("start", "send"),
    [
        (_launch, lambda launch: launch.interrupt()),
        (_copies, lambda launch: os.kill(launch.pid(0), signal.SIGINT)),
    ],
    ids=["launcher", "rank 0"],
)
def test_an_interrupted_run_says_so_once(
    tmp_path: Path,
    start: Callable[..., Launch | Copies],
    send: Callable[[Launch | Copies], None],
) -> None:
    with start(tmp_path, *_ENDLESS) as launch:
        _when_it_runs(launch)
        send(launch)
        done = launch.wait(60)
        assert launch.ranks() == []
        assert len(_sentences(done)) == 1
    assert "profile-plan: interrupted (SIG" in done.stderr


@pytest.mark.ranks
def test_what_all_ranks_find_is_said_once(tmp_path: Path) -> None:
    experts = {
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 4,
    }
    with _copies(tmp_path, "--seq", "18", plan=_PLAN[:-2], **experts) as launch:
        done = launch.wait(60)
        sentence = _check(launch, done)
    assert sentence.startswith("profile-plan: layer 0: the 36 visits of the 18 tokens of a sample")
    assert sentence.endswith("--no-reference")
    assert done.rank_code == 2


def _when_it_runs(launch: Launch | Copies) -> None:
    """Wait until the ranks have met: then each has a thread that works off its communication."""
    until_s = time.monotonic() + 90
    while not all(_is_connected(launch, rank) for rank in (0, 1)):
        assert time.monotonic() < until_s, launch.stderr
        time.sleep(0.1)
    time.sleep(2)  # the first step


def _is_connected(launch: Launch | Copies, rank: int) -> bool:
    if rank not in launch.ranks():
        return False
    tasks = Path(f"/proc/{launch.pid(rank)}/task").glob("*/comm")
    return any("gloo" in task.read_text("utf-8") for task in tasks)

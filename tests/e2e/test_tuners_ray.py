"""Ray and SMAC3 for real: a local Ray of two workers, and both tuners against the whole space.

Skipped where the extras are not installed; `pip install 'autopar[ray,smac]'` installs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import InputError
from benchmarks.tuners_vs_exhaustive import APPLICATION, SPACE, SYSTEM
from search.closed_form.tuners import tune
from search.closed_form.tuners.packages import cluster
from search.closed_form.tuners.tune import CHUNK

ROOT = Path(__file__).resolve().parent.parent.parent
# Ray and SMAC3 bring their own warnings, which are not ours to mend.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
SMALL = SPACE | {
    "data_par_net": 1,
    "microbatch_size": [1, 4],
    "activation_recompute": ["none", "full"],
}
"""2,048 points, two in five of which run; the same best point as the whole space."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Any]:
    """Yield Ray, connected to two workers on this machine."""
    pytest.importorskip("ray")
    with cluster("local", 2) as ray:
        yield ray


def test_shards_are_the_exhaustive_search(workers: Any) -> None:
    """Several tasks on two workers give the answer of one process, trace and counts included."""
    large = SPACE | {"batch_size": {"from": 64, "to": 2048, "step": 64}}
    exact = tune(APPLICATION, SYSTEM, large)
    assert exact.evaluations == 32 * 9216 > 2 * CHUNK, "otherwise one task would do"

    assert workers.cluster_resources()["CPU"] == 2
    assert tune(APPLICATION, SYSTEM, large, ray="local", threads=2) == exact
    assert workers.is_initialized(), "a connection that was there before is kept"


def test_ray_tune_reaches_the_optimum(workers: Any) -> None:
    """Optuna through Ray Tune, with a tenth of the evaluations, on three of five seeds in 300.

    Equal seeds ask for the same points.
    """
    pytest.importorskip("optuna")
    exact = tune(APPLICATION, SYSTEM, SMALL)
    results = [
        tune(APPLICATION, SYSTEM, SMALL, tuner="ray", evaluations=200, seed=2) for _ in range(2)
    ]

    assert results[0].evaluations == 200
    assert results[0].trace[-1].value == exact.trace[-1].value
    assert results[0].best == exact.best
    assert results[0].feasible_share > exact.feasible_share, "it learns where executions run"
    assert results[1] == results[0]


def test_ray_tune_prints_nothing(workers: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """stdout is for results."""
    tune(APPLICATION, SYSTEM, SMALL, tuner="ray", evaluations=3, ray_search="random")
    assert capfd.readouterr().out == ""


def test_no_cluster_is_one_sentence() -> None:
    """An address where nobody answers."""
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        pytest.skip("connected already, so that the address is not tried")
    with pytest.raises(InputError, match=r"^--ray 127\.0\.0\.1:1: no Ray cluster answers"):
        tune(APPLICATION, SYSTEM, SMALL, ray="127.0.0.1:1")


_SMAC = """
import json, sys
from benchmarks.tuners_vs_exhaustive import APPLICATION, SYSTEM
from search.closed_form.tuners import tune
result = tune(APPLICATION, SYSTEM, json.loads(sys.argv[1]), tuner="smac", evaluations=150, seed=1)
print(json.dumps([result.evaluations, result.feasible_share, result.trace[-1].value,
                  result.best.execution, [[s.evaluations, s.value] for s in result.trace]]))
"""


def test_smac_reaches_the_optimum() -> None:
    """SMAC3, with a fourteenth of the evaluations; equal where hashes are fixed too."""
    pytest.importorskip("smac")
    exact = tune(APPLICATION, SYSTEM, SMALL)
    answers = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", _SMAC, json.dumps(SMALL)],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": "0"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout))

    evaluations, share, value, execution, _ = answers[0]
    assert evaluations == 150
    assert value == exact.trace[-1].value
    assert exact.best is not None
    assert execution == exact.best.execution
    assert share > exact.feasible_share, "it learns where executions run"
    assert answers[1] == answers[0]

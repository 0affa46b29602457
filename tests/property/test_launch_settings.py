"""The settings in which one launch differs from another define it completely."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from autopar.errors import DocumentError
from autopar.run.run import Run
from autopar.training.launch_settings import settings_of, with_settings
from tests.often import often
from tests.run_cases import megatron_runs, some, titan_runs, torch_runs

FILE = Path("launch.json")
ANY = megatron_runs() | titan_runs() | torch_runs(keeper="accelerate")


@often(30, 400, ANY, ANY)
def test_settings_make_one_launch_of_another(run: Run, usual: Run) -> None:
    """Settings survive JSON, for any engines, sizes and stages of the two launches."""
    settings = json.loads(json.dumps(settings_of(run, usual)))

    assert with_settings(usual, settings, FILE) == run


@often(10, 100, ANY)
def test_a_launch_has_no_settings_beside_itself(run: Run) -> None:
    """So the file of a launch found by a search contains none."""
    assert settings_of(run, run) == {}


@cache
def _run() -> Run:
    """Return a run of Megatron-LM, one sequence a micro-batch."""
    return next(one for one in some(megatron_runs(), 10) if one.strategy.micro_batch == 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"runtime.states.buckett": 5}, "Did you mean 'bucket'?"),
        (
            {"runtime.states.bucket": "large"},
            "expected a whole number from 1",
        ),
        (
            {"runtime.states.bucket": True},
            "expected a whole number from 1",
        ),
        ({"runtime.adapters.rank": 3}, "Set it as a whole"),
        ({"runtime.states": {"bucket": 4, "rows": 1}}, "expected"),
        ({"seq_length": 1001, "strategy.micro_batch": 3}, "global batch("),
        (
            {"runtime.offload": {"layers": 0}, "runtime.offload.fraction": 0.5},
            "offload is also set as a whole",
        ),
        (
            {"runtime.precision.fp8": True, "runtime.precision.fp4": True},
            "fp8 and fp4",
        ),
    ],
)
def test_settings_that_no_launch_takes_are_refused(settings: dict[str, object], said: str) -> None:
    """An unknown field, another type, and a value that the launch refuses."""
    with pytest.raises(DocumentError) as raised:
        with_settings(_run(), settings, FILE)

    assert said in str(raised.value)
    assert "launch.settings" in str(raised.value)

"""What one launch says otherwise than another one is all that makes it the other one."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from autopar.errors import DocumentError
from autopar.run.launch import Launch
from autopar.training.launch_settings import settings_of, with_settings
from tests.launch_cases import megatron_launches, some, titan_launches, torch_launches
from tests.often import often

FILE = Path("launch.json")
ANY = megatron_launches() | titan_launches() | torch_launches(keeper="accelerate")


@often(30, 400, ANY, ANY)
def test_settings_make_one_launch_of_another(launch: Launch, usual: Launch) -> None:
    """Through JSON, of whatever trainers, sizes and stages the two are."""
    settings = json.loads(json.dumps(settings_of(launch, usual)))

    assert with_settings(usual, settings, FILE) == launch


@often(10, 100, ANY)
def test_a_launch_has_no_settings_beside_itself(launch: Launch) -> None:
    """So that a launch that a search found has none in its file."""
    assert settings_of(launch, launch) == {}


@cache
def _launch() -> Launch:
    """Return a launch of Megatron-LM, one sequence a micro-batch."""
    return next(one for one in some(megatron_launches(), 10) if one.micro_batch == 1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer.buckets": 5}, "is no field of a launch; did you mean 'bucket'?"),
        ({"optimizer.bucket": "large"}, "expected int | None, got 'large'"),
        ({"optimizer.bucket": True}, "expected int | None, got true"),
        ({"trainer.zero": 3}, "has no fields in this launch; set it as a whole"),
        ({"optimizer": {"bucket": 4, "rows": 1}}, "expected"),
        ({"seq": 1001, "micro_batch": 3}, "global batch("),
        ({"offload": {"modules": []}, "offload.fraction": 0.5}, "offload is set as a whole"),
        ({"precision.fp8": True, "precision.fp4": True}, "products are of 8 bits or of 4"),
    ],
)
def test_settings_that_no_launch_takes_are_refused(settings: dict[str, object], said: str) -> None:
    """An unknown field, another type, and what the launch itself refuses."""
    launch = _launch()

    with pytest.raises(DocumentError) as raised:
        with_settings(launch, settings, FILE)

    assert said in str(raised.value)
    assert "launch.settings" in str(raised.value)

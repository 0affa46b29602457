"""States of DeepSpeed as `autopar.price.state_layouts` has them, against DeepSpeed itself.

It runs on fake ranks on the CPU, in a process of its own, with the Python that
`test_export_packages.py` loads configurations with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.price.state_layouts import layout_of
from autopar.run.runtime import Buckets
from tests.e2e.test_export_packages import has, loaded

RANKS = 8
BUCKET = 100_000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not has("deepspeed", "0.19.8"),
        reason="needs deepspeed 0.19.8: pip install --group exports",
    ),
]


@pytest.mark.parametrize(
    ("stage", "wide", "after_backward"),
    [
        # bytes of a parameter that a backward leaves: all gradients, or the rank's own
        (0, False, 2.0),
        (1, False, 2.0 / RANKS),
        (1, True, 2.0),
        (2, False, 2.0 / RANKS),
        (2, True, 4.0 / RANKS),
        (3, False, 0.0),
        (3, True, 0.0),
    ],
)
def test_states_are_those_of_the_recipe(
    stage: int, wide: bool, after_backward: float, tmp_path: Path
) -> None:
    """After a step and after a backward, to a hundredth."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET},
    }
    if wide:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    found: Any = loaded("states_deepspeed.py", [json.dumps(config)], tmp_path)
    recipe = layout_of(
        "deepspeed", stage, "bf16", fp32_gradients=wide or None, buckets=Buckets(reduce=BUCKET)
    )
    size = found["parameters"]
    always = size * recipe.per_parameter(RANKS, always=True)
    # stage 3 keeps its bucket
    always += 2 * BUCKET if stage == 3 else 0
    assert found["step"] == pytest.approx(always, rel=0.01)
    assert found["backward"] - found["step"] == pytest.approx(
        size * after_backward, abs=0.02 * size
    )

"""A small model, its plans and the files that the tests of `profile-plan` read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from profiler.plan.command import COMMAND
from profiler.plan.job import PlanOptions, build_options
from tests.plan_cases import STRATEGY

MODEL: dict[str, Any] = {
    "format": "autopar-model",
    "version": 1,
    "name": "small",
    "vocab_size": 250,
    "make_vocab_size_divisible_by": 8,
    "layers": [
        {
            "num_layers": 4,
            "seq_length": 16,
            "hidden_size": 32,
            "num_heads": 4,
            "num_kv_heads": 2,
            "ffn_hidden_size": 48,
            "gated_mlp": True,
        }
    ],
}
_STAGE = {
    "forward_s": 0.002,
    "backward_s": 0.004,
    "tail_s": 0.001,
    "allocated_bytes": 3000,
    "memory_bytes": {"states": 1500, "activations": 900, "transient": 500, "fixed": 100},
}
PREDICTED: dict[str, Any] = {
    "format": "autopar-plan",
    "version": 1,
    "plan": STRATEGY,
    "step_time_s": 0.02,
    "prediction": {
        "step_time_interval_s": [0.018, 0.023],
        "stages": [{**_STAGE, "stage": 0}, {**_STAGE, "stage": 1, "forward_s": 0.003}],
    },
    "estimated": True,
    "synthetic": False,
    "options": {
        "sequence_parallel": True,
        "async_grad_reduce": False,
        "mixed_precision": "fp32",
    },
    "request": {"model": "small.json", "hardware": "h100:1x4"},
}
"""A plan file as autopar-search writes it, as far as it is read here."""


def write(path: Path, content: object) -> Path:
    """Write JSON and return its path."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def small_files(folder: Path) -> None:
    """Put the model, a strategy file and a plan file into a folder."""
    write(folder / "small.json", MODEL)
    write(folder / "strategy.json", STRATEGY)
    write(folder / "plan.json", PREDICTED)


def read(*arguments: str) -> PlanOptions:
    """Return the options of a command line."""
    raw = COMMAND.read(arguments, lambda _: None)
    assert raw is not None
    return build_options(**raw)


def set_launcher(patch: pytest.MonkeyPatch, rank: int, world: int | str) -> None:
    """Set the variables that torchrun sets."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": 29500}
    for name, value in {**values, "MASTER_ADDR": "127.0.0.1"}.items():
        patch.setenv(name, str(value))

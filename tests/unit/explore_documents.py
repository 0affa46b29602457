"""Small documents that the tests of autopar-explore search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.parity.test_calculon_engine import APPLICATION, SYSTEM

MODEL: dict[str, Any] = {"l": 2048, "e": 4096, "h": 32, "depth": 32, "f": 16384}
TENSOR2D_SYSTEM: dict[str, Any] = {
    "matrix_flops_fp16": 300,
    "vector_flops_fp16": 75,
    "hbm_bandwidth": 1500,
    "hbm_capacity": 40,
    "nvlink_bandwidth": 300,
    "nvlink_eff": 0.8,
    "nvlink_latency": 2e-6,
    "ib_bandwidth": 25,
    "ib_eff": 0.8,
    "ib_latency": 5e-6,
    "nvlink_size": 4,
}


def calculon(folder: Path, procs: str = "8", batch: int = 8) -> list[str]:
    """Write the documents and return the arguments of a search."""
    return [
        "calculon",
        *("--application", _written(folder / "small.json", APPLICATION)),
        *("--system", _written(folder / "machine.json", SYSTEM)),
        *("--num-procs", procs, "--max-batch", str(batch)),
    ]


def tensor2d(folder: Path, gpus: str = "8", batch: int = 16) -> list[str]:
    """Write the documents and return the arguments of a search."""
    return [
        "tensor2d",
        *("--model", _written(folder / "model.json", MODEL)),
        *("--system", _written(folder / "gpus.json", TENSOR2D_SYSTEM)),
        *("--num-gpus", gpus, "--batch", str(batch)),
    ]


def _written(path: Path, data: dict[str, Any]) -> str:
    path.write_text(json.dumps(data), encoding="utf-8")
    return str(path)

"""Small documents that the tests of closed forms price and search."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.parity.test_calculon_engine import APPLICATION, SYSTEM

EXECUTION: dict[str, Any] = {
    "tensor_par": 1,
    "pipeline_par": 1,
    "data_par": 1,
    "tensor_par_net": 0,
    "pipeline_par_net": 1,
    "data_par_net": 1,
    "batch_size": 8,
    "microbatch_size": 1,
    "datatype": "float16",
    "fused_activation": False,
    "attention_type": "multihead",
    "activation_recompute": "none",
    "pipeline_interleaving": 1,
    "optimizer_sharding": False,
    "tensor_par_comm_type": "ar",
    "tensor_par_overlap": "none",
    "seq_par_ag_redo": False,
    "data_par_overlap": False,
    "weight_offload": False,
    "activations_offload": False,
    "optimizer_offload": False,
}
"""An execution of Calculon with nothing switched on; processors and training are not said."""
EXAMPLE: dict[str, Any] = EXECUTION | {
    "tensor_par": 4,
    "data_par": 8,
    "attention_type": "flash",
    "structure_type": "llama",
    "optimizer_sharding": True,
    "tensor_par_comm_type": "rs_ag",
    "data_par_overlap": True,
}
"""The 22 parameters that are documented to span the space, as a user writes them for a Llama."""
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

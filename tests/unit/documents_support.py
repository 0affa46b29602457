"""Valid documents and readers that the document tests share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.documents.hardware import read_hardware
from autopar.documents.model import memory_keys, read_model_profile
from autopar.documents.sidecar import sidecar_path
from autopar.documents.times import computation_keys
from autopar.run.model import LayerSpec, ModelProfile, ModelSpec

SPEC = ModelSpec(
    name="tiny",
    layers=(LayerSpec(num_layers=4, seq_length=2048, hidden_size=1024, num_heads=16),),
)
T5 = ModelSpec(
    name="t5",
    layers=(
        LayerSpec(num_layers=4, seq_length=512, hidden_size=1024, num_heads=16),
        LayerSpec(num_layers=4, seq_length=512, hidden_size=1024, num_heads=16),
    ),
)


def other(scale: float = 1.0) -> dict[str, Any]:
    """Return an `other_memory_*` table."""
    entry = {"model_states": {"1": 400.0 * scale, "2": 200.0}, "activation": {"1": 60.0, "2": 0.0}}
    return {"2048": entry}


DOCUMENTS: dict[str, dict[str, Any]] = {
    "allreduce": {
        "allreduce_size_4_consec_1": 150.5,
        "allreduce_size_2_consec_1": 140.25,
        "allreduce_size_2_consec_0": 20,
    },
    "p2p": {"pp_size_2": 20.5, "pp_size_4": 19.0},
    "overlap": {"overlap_coe": 1.125},
    "sp_time": {
        "allreduce_size_4_1MB_time": 0.08,
        "allreduce_size_4_64MB_time": 0.6,
        "all2all_size_2_1MB_time": 0.05,
        "all2all_size_2_64MB_time": 0.4,
    },
    "computation": {
        "layernum[2]_bsz1_seq2048": 12.0,
        "layernum[4]_bsz1_seq2048": 20.0,
        "layertype_0_bsz1_seq2048": 4.0,
        "layertype_0_bsz8_seq2048": 3.5,
        "layertype_other_bsz1_seq2048": 4.0,
        "layertype_other_bsz8_seq2048": 2.5,
    },
    "memory": {
        "1_1_4_sp": {"layernum[1]_bsz8_seq2048_rank0_ms": 100.0},
        "layertype_0_sp": {
            "2048": {
                "parameter_size": 48.0,
                "tp_activation_per_bsz_dict": {"1": 80.0, "2": 40.0, "checkpoint": 4.0},
            }
        },
        "other_memory_pp_off_sp": other(),
        "other_memory_pp_on_first_sp": other(0.5),
        "other_memory_pp_on_last_sp": other(0.5),
    },
}
"""A valid file of every kind, for 2 nodes x 2 GPUs and the model SPEC."""

SIDECAR: dict[str, Any] = {
    "version": 1,
    "document": "sp_time",
    "unit": "ms",
    "source": "measured in a test",
    "memory_bytes": 8e10,
    "curves": [
        {
            "operation": "allgather",
            "group_size": 4,
            "sizes_bytes": [1000.0, 1e6],
            "times_s": [1e-5, 1e-4],
        }
    ],
    "runs": [{"metadata": {"host": "a"}, "samples": {"allreduce_size_4_1MB_time": [0.08, 0.09]}}],
}

HARDWARE = ("allreduce", "p2p", "overlap", "sp_time")


def write_all(folder: Path) -> dict[str, Path]:
    """Write every valid document as `<kind>.json`; return the paths by kind."""
    paths = {kind: folder / f"{kind}.json" for kind in DOCUMENTS}
    for kind, data in DOCUMENTS.items():
        paths[kind].write_text(json.dumps(data), encoding="utf-8")
    paths["sidecar"] = sidecar_path(paths["sp_time"])
    return paths


def read(paths: dict[str, Path], kind: str) -> object:
    """Read the profile that the document of `kind` belongs to."""
    if kind in (*HARDWARE, "sidecar"):
        return read_hardware(
            num_nodes=2,
            gpus_per_node=2,
            allreduce=paths["allreduce"],
            p2p=paths["p2p"],
            overlap=paths["overlap"],
            sp_time=paths["sp_time"],
        )
    return read_model_profile(
        computation=paths["computation"],
        memory=paths["memory"],
        spec=SPEC,
        sequence_parallel=True,
        precision="bf16",
    )


def read_dir(folder: Path, spec: ModelSpec = SPEC) -> ModelProfile:
    """Read a profile from a directory."""
    return read_model_profile(
        computation=folder,
        memory=folder,
        spec=spec,
        sequence_parallel=True,
        precision="bf16",
    )


def write(path: Path, data: object) -> Path:
    """Write a JSON file and return its path."""
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def assert_same(a: ModelProfile, b: ModelProfile) -> None:
    """Compare the numbers of two profiles to 1e-12."""
    assert computation_keys(a) == pytest.approx(computation_keys(b), rel=1e-12)
    left, right = flat(memory_keys(a)), flat(memory_keys(b))
    assert left == pytest.approx(right, rel=1e-12)
    for field in ("sequence_parallel", "precision", "estimated", "logits_peak_bytes_per_sample"):
        assert getattr(a, field) == getattr(b, field)


def flat(node: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Return a nested object as one level with dotted keys."""
    result: dict[str, float] = {}
    for key, value in node.items():
        name = f"{prefix}.{key}"
        result |= flat(value, name) if isinstance(value, dict) else {name: value}
    return result

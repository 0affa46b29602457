"""Documents for the tests of the cost model: small synthetic ones, and the published llama2-7b.

The published files are read by hand here, so that the cost model is tested without the readers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from autopar.rates.measured import Curve, HardwareProfile
from autopar.run.model import (
    LayerMemory,
    LayerProfile,
    LayerSpec,
    ModelProfile,
    ModelSpec,
    OtherMemory,
    OtherTime,
    TimePoint,
)
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from autopar.units import MIB, MS

__all__ = [
    "TOY_PLAN",
    "llama_hardware",
    "llama_model",
    "llama_spec",
    "toy_hardware",
    "toy_model",
    "toy_spec",
]

TOY_PLAN = Plan(
    world_size=8,
    num_stages=2,
    stage_sizes=(2, 2),
    layers=(LayerStrategy(tp=2, zero3=True, checkpoint=True), *(LayerStrategy(tp=2),) * 3),
    vocab=VocabStrategy(tp=2),
    global_batch=32,
    num_microbatches=4,
)
"""Plan of the toy model: two stages, and a different strategy for one layer of four."""


def toy_spec(**layer: object) -> ModelSpec:
    """Return a model of 4 equal layers, 8 heads, 1024 tokens, width 512."""
    values: dict[str, object] = {
        "num_layers": 4,
        "seq_length": 1024,
        "hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 8,
        "ffn_hidden_size": 2048,
    }
    return ModelSpec(name="toy", layers=(LayerSpec(**{**values, **layer}),), vocab_size=1000)  # type: ignore[arg-type]


def toy_model(*, sequence_parallel: bool = True, kinds: int = 1, **other: object) -> ModelProfile:
    """Return round figures: forward 1 ms + 2 ms per sample, 3e6 parameters, 8 MB activations."""
    layer = LayerProfile(
        times=tuple(
            TimePoint(batch=b, seq_length=1024, forward_s=1e-3 + 2e-3 * b) for b in (1, 2, 4, 8)
        ),
        memory={
            1024: LayerMemory(
                parameter_count=3_000_000.0,
                activation_bytes_per_sample={1: 8e6, 2: 4.5e6, 4: 2.5e6},
                checkpoint_bytes_per_sample=1e6,
            )
        },
    )
    lengths = (1024,) * kinds
    memory = OtherMemory(
        model_state_bytes={1: 16e6, 2: 8e6, 4: 4e6, 8: 2e6},
        activation_bytes_per_sample={1: 4e6, 2: 2e6, 4: 1e6, 8: 5e5},
    )
    values: dict[str, object] = {
        "layers": (layer,) * kinds,
        "other_times": tuple(
            OtherTime(batch=b, seq_lengths=lengths, forward_s=5e-4 + 1e-3 * b) for b in (1, 2, 4)
        ),
        "other_memory": {name: {lengths: memory} for name in ("only", "first", "last")},
        "sequence_parallel": sequence_parallel,
    }
    return ModelProfile(**{**values, **other})  # type: ignore[arg-type]


def toy_hardware(num_nodes: int = 1, gpus_per_node: int = 8, **other: object) -> HardwareProfile:
    """Return 100 GB/s inside a node, 10 GB/s across, no curves, k = 1.2, 1 TB/s of memory."""
    world = num_nodes * gpus_per_node
    bandwidth = {
        (g, consecutive): 100e9 if num_nodes == 1 or (consecutive and g <= gpus_per_node) else 10e9
        for g in range(2, world + 1)
        if world % g == 0
        for consecutive in (True, False)
    }
    values: dict[str, object] = {
        "num_nodes": num_nodes,
        "gpus_per_node": gpus_per_node,
        "allreduce_bytes_per_s": bandwidth,
        "p2p_bytes_per_s": {p: 50e9 for p in range(2, world + 1) if world % p == 0},
        "overlap_coefficient": 1.2,
        "memory_bytes_per_s": 1e12,
    }
    return HardwareProfile(**{**values, **other})  # type: ignore[arg-type]


def llama_spec() -> ModelSpec:
    """Return llama2-7b at 2048 tokens."""
    layer = LayerSpec(
        num_layers=32,
        seq_length=2048,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        ffn_hidden_size=11008,
        gated_mlp=True,
    )
    return ModelSpec(name="llama2-7b", layers=(layer,), vocab_size=32000)


def llama_model(cases: Path) -> ModelProfile:
    """Return the published llama2-7b profile (with sequence parallelism)."""
    folder = cases / "galvatron" / "model"
    times = json.loads((folder / "computation_profiling_bf16_llama2-7b_all.json").read_text())
    layers, others = [], []
    for key, value in times.items():
        match = re.fullmatch(r"layertype_(0|other)_bsz(\d+)_seq2048", key)
        if match is None:
            continue
        batch = int(match[2])
        if match[1] == "0":
            layers.append(TimePoint(batch=batch, seq_length=2048, forward_s=value * batch * MS))
        else:
            others.append(OtherTime(batch=batch, seq_lengths=(2048,), forward_s=value * batch * MS))
    memory = json.loads((folder / "memory_profiling_bf16_llama2-7b_all.json").read_text())
    layer = memory["layertype_0_sp"]["2048"]
    activations = dict(layer["tp_activation_per_bsz_dict"])
    kept = activations.pop("checkpoint")
    names = {"only": "pp_off", "first": "pp_on_first", "last": "pp_on_last"}
    return ModelProfile(
        layers=(
            LayerProfile(
                times=tuple(layers),
                memory={
                    2048: LayerMemory(
                        parameter_count=layer["parameter_size"] * MIB / 4,
                        activation_bytes_per_sample={
                            int(t): x * MIB for t, x in activations.items()
                        },
                        checkpoint_bytes_per_sample=kept * MIB,
                    )
                },
            ),
        ),
        other_times=tuple(others),
        other_memory={
            position: {(2048,): _other(memory[f"other_memory_{name}_sp"]["2048"])}
            for position, name in names.items()
        },
        sequence_parallel=True,
    )


def _other(entry: dict[str, dict[str, float]]) -> OtherMemory:
    return OtherMemory(
        model_state_bytes={int(t): x * MIB for t, x in entry["model_states"].items()},
        activation_bytes_per_sample={int(t): x * MIB for t, x in entry["activation"].items()},
    )


def llama_hardware(cases: Path, num_nodes: int = 1) -> HardwareProfile:
    """Return the published A100 measurements of 1 or 2 nodes of 8, read as MiB/ms."""
    folder = cases / "galvatron" / "hardware"
    suffix = f"{num_nodes}nodes_8gpus_per_node.json"
    unit = MIB / MS
    world = num_nodes * 8
    bandwidth: dict[tuple[int, bool], float] = {}
    for key, value in json.loads((folder / f"allreduce_bandwidth_{suffix}").read_text()).items():
        match = re.fullmatch(r"allreduce_size_(\d+)_consec_([01])", key)
        assert match is not None
        bandwidth[int(match[1]), match[2] == "1"] = value * unit
    bandwidth[world, False] = bandwidth[world, True]
    p2p = json.loads((folder / f"p2p_bandwidth_{suffix}").read_text())
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for key, value in json.loads((folder / f"sp_time_{suffix}").read_text()).items():
        match = re.fullmatch(r"(allreduce|all2all)_size_(\d+)_(\d+)MB_time", key)
        assert match is not None
        points.setdefault((match[1], int(match[2])), []).append((int(match[3]) * MIB, value * MS))
    overlap = json.loads((folder / "overlap_coefficient.json").read_text())
    return HardwareProfile(
        num_nodes=num_nodes,
        gpus_per_node=8,
        allreduce_bytes_per_s=bandwidth,
        p2p_bytes_per_s={int(k.removeprefix("pp_size_")): v * unit for k, v in p2p.items()},
        overlap_coefficient=overlap["overlap_coe"],
        curves={
            key: Curve(
                sizes_bytes=np.array([x for x, _ in sorted(values)], dtype=np.float64),
                times_s=np.array([y for _, y in sorted(values)], dtype=np.float64),
            )
            for key, values in points.items()
        },
    )

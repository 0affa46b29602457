"""A model that nobody measures: its times and bytes follow formulas that a test can check."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.documents.sidecar import ModelMeasurement
from autopar.records import replace
from autopar.run.model import LayerSpec, ModelSpec
from profiler.environment import Metadata
from profiler.model.cells import ModelCell, plan_cells, tensor_kinds
from profiler.model.measuring import OUT_OF_MEMORY
from profiler.model.options import ModelOptions, build_options
from profiler.model.record import ModelRecord, describe_model
from profiler.model.run import profile_paths

LLAMA = ModelSpec(
    name="tiny-llama",
    layers=(
        LayerSpec(
            num_layers=8,
            seq_length=128,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            ffn_hidden_size=128,
            gated_mlp=True,
        ),
    ),
    vocab_size=1000,
)
T5 = ModelSpec(
    name="tiny-t5",
    layers=(
        LayerSpec(
            num_layers=2,
            seq_length=64,
            hidden_size=64,
            num_heads=4,
            ffn_hidden_size=128,
            causal=False,
        ),
        LayerSpec(
            num_layers=2,
            seq_length=32,
            hidden_size=64,
            num_heads=4,
            ffn_hidden_size=128,
            cross_attention=True,
            norm_parameters_per_hidden=3,
        ),
    ),
    vocab_size=1000,
    tied_embeddings=True,
)
METADATA: Metadata = {
    "time_utc": "2026-01-02T03:04:05+00:00",
    "command": "profile-model --model tiny-llama",
    "torch": "2.11.0",
    "device": "Some GPU",
    "dtype": "bf16",
    "model": describe_model(LLAMA),
    "unit": "all",
    "tp_impl": "megatron",
    "mode": "static",
}
SAMPLE_S = 1e-3
"""Forward of one sample of one unsharded layer per 128 tokens; layer type 1 takes twice that."""
OTHER_S = 5e-4
"""Forward of what surrounds the layers, by the same measure."""
_SPREAD = (0.98, 1.0, 1.03, 0.99, 1.01, 1.0, 1.02)


class MadeUp:
    """A measurer whose cells take no time; `limit` is the largest batch that fits."""

    def __init__(self, *, limit: int = 10**9, failing: Sequence[str] = ()) -> None:
        self.limit = limit
        self.failing = set(failing)
        self.measured: list[str] = []

    def measure(self, cell: ModelCell) -> ModelMeasurement:
        """Return what the formulas say of a cell."""
        self.measured.append(cell.key)
        if cell.key in self.failing:
            return cell.filled(status="failed", reason="made up")
        if cell.quantity == "memory":
            return self._memory(cell)
        if cell.batch > self.limit:
            return cell.filled(status="failed", reason=f"{OUT_OF_MEMORY} at batch {cell.batch}")
        forward_s = cell.batch * self._sample_s(cell)
        samples = {"forward": [forward_s * x for x in _SPREAD]}
        if cell.num_layers is None:
            samples["backward"] = [2.0 * forward_s * x for x in _SPREAD]
        if cell.part == "layer":
            samples["recompute"] = [forward_s * x for x in _SPREAD]
            samples["optimizer"] = [1e-4 for _ in _SPREAD]
        return replace(cell.filled(), samples_s=samples)

    def _sample_s(self, cell: ModelCell) -> float:
        if cell.layer_type is not None:
            return SAMPLE_S * (1 + cell.layer_type) * cell.seq_lengths[0] / 128 / cell.degree
        total = OTHER_S * sum(cell.seq_lengths) / 128
        for kind, count in enumerate(cell.num_layers or ()):
            total += count * SAMPLE_S * (1 + kind) * cell.seq_lengths[kind] / 128
        return total

    def _memory(self, cell: ModelCell) -> ModelMeasurement:
        kept = 2**20 * cell.batch * sum(cell.seq_lengths) / 128
        if cell.checkpoint == "full":
            kept /= 8
        elif cell.kind != "tp":
            kept /= cell.degree
        return replace(
            cell.filled(),
            bytes={"parameters": 2e6, "activation": kept, "peak": kept / 2},
            num_parameters=2**20 // cell.degree,
        )


def make_options(**changes: Any) -> ModelOptions:
    """Return options of a run on the made-up model."""
    return build_options(**{"model": "tiny-llama", "tp": "1,2", **changes})


def opened(
    out: Path, options: ModelOptions, spec: ModelSpec = LLAMA, **metadata: Any
) -> ModelRecord:
    """Return the record of a folder."""
    options = replace(options, out=out)
    described = {**METADATA, "model": describe_model(spec), "mode": options.mode, **metadata}
    return ModelRecord(
        profile_paths(spec, options, "Some GPU"),
        spec,
        options,
        metadata=described,
        kinds=tensor_kinds(options),
        memory_bytes=80e9,
    )


def put_all(
    record: ModelRecord, options: ModelOptions, spec: ModelSpec = LLAMA, *, most: int = 10**9
) -> None:
    """Measure what is missing, but at most so many cells."""
    measurer = MadeUp()
    for cell in record.missing(plan_cells(spec, options))[:most]:
        record.put(measurer.measure(cell))


def measured_dir(out: Path, spec: ModelSpec = LLAMA, **changes: Any) -> ModelOptions:
    """Fill a folder with a whole run; return its options."""
    options = make_options(**changes)
    with opened(out, options, spec) as record:
        put_all(record, options, spec)
    return options

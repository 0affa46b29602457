"""What only a GPU can show of `profile-model`: memory beside counts, times, and running out of it.

Everything here is skipped without a CUDA device.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from autopar.documents.sidecar import ModelMeasurement, read_sidecar
from autopar.documents.spec import load_spec
from benchmarks.device_vs_exact import chosen_cells
from tests.e2e.profiling import COMPUTATION, LLAMA, MEMORY, own_module, profiled, write_model

pytest.importorskip("torch", reason="torch is not installed")

import torch

from profiler.model.cells import ModelCell, plan_cells
from profiler.model.documents import ON_DEVICE
from profiler.model.layers.kernels import attention
from profiler.model.measuring import SpecMeasurer, is_out_of_memory
from profiler.model.options import ModelOptions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICE = torch.device("cuda", 0)
CASES = [
    (name, seq)
    for name, seqs in (
        ("gpt-6.7b", (512, 2048)),
        ("llama2-7b", (1024, 4096)),
        ("llama3-8b", (1024, 4096)),
    )
    for seq in seqs
]
"""Layers of three kinds, alone: whole models would not fit, and have nothing else in them."""
ON_GPU = ("--device", "cuda", "--max-seconds", "0.2", "--out", "profiles")


def measurer_of(name: str, seq_length: int, **changes: Any) -> tuple[SpecMeasurer, list[ModelCell]]:
    """Return what measures a shipped model on the GPU, and its cells."""
    spec = load_spec(name)
    wanted: dict[str, Any] = {
        "source": "device",
        "batches": (1,),
        "degrees": (1, 2),
        "seq_lengths": ((seq_length,),),
    }
    options = ModelOptions(model=name, **{**wanted, **changes})
    return SpecMeasurer(spec, options, DEVICE), chosen_cells(plan_cells(spec, options))


def cells_of(path: Path) -> dict[str, ModelMeasurement]:
    """Return the cells of the last run of a file by key."""
    sidecar = read_sidecar(path)
    assert sidecar is not None
    return {cell.key: cell for cell in sidecar.runs[-1].model_measurements}


def names(dtype: str = "bf16") -> tuple[str, str]:
    """Return the names of the tiny models' files of times and of memory."""
    computation, memory = (name.replace("fp32", dtype) for name in (COMPUTATION, MEMORY))
    return computation, memory


# --- memory --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "seq_length"), CASES)
def test_the_allocator_agrees_with_the_count(name: str, seq_length: int) -> None:
    """What layers and their surroundings keep is what was counted, within 1 %, at every kind."""
    measurer, cells = measurer_of(name, seq_length, profile_types=("memory",))
    found = [measurer.measure(cell) for cell in cells]

    missing = {m.key: m.notes for m in found if "device_activation" not in m.bytes}
    if any("out of memory" in " ".join(notes).lower() for notes in missing.values()):
        pytest.skip(f"this GPU has no memory for {', '.join(missing)}")
    assert missing == {}
    ratios = {m.key: m.bytes["device_activation"] / m.bytes["activation"] for m in found}
    assert {key: ratio for key, ratio in ratios.items() if abs(ratio - 1.0) > 0.01} == {}
    assert {m.degree for m in found} == {1, 2}
    assert all(m.bytes["device_peak"] > 0.0 for m in found if m.part == "layer")


@pytest.mark.parametrize("unit", ["attention", "mlp"])
def test_halves_are_measured_too(unit: str) -> None:
    """With --profile-unit the device's figure stands beside the count as well."""
    measurer, cells = measurer_of("llama3-8b", 1024, profile_types=("memory",), unit=unit)
    for cell in cells:
        found = measurer.measure(cell).bytes
        assert found["device_activation"] == pytest.approx(found["activation"], rel=0.01), cell.key


def test_differences_are_warned_of_with_their_cause(tmp_path: Path) -> None:
    """Tensors of a tiny model are rounded up by more than 1 %, which the run says once."""
    layer = {"num_layers": 2, "seq_length": 36, "hidden_size": 56, "num_heads": 7}
    tiny = {**LLAMA, "name": "odd", "layers": [{**layer, "ffn_hidden_size": 72}]}
    model = write_model(tmp_path, tiny)
    wanted = ("--model", model.name, "--source", "device", "--tp", "1", "--profile-type", "memory")
    _, err = profiled(tmp_path, *wanted, *ON_GPU)
    cells = cells_of(tmp_path / "profiles" / "memory_profiling_bf16_hidden_56_head_7.json")

    noted = {key for key, m in cells.items() if any(ON_DEVICE in note for note in m.notes)}
    apart = {
        key
        for key, m in cells.items()
        if abs(m.bytes["device_activation"] / m.bytes["activation"] - 1.0) > 0.01
    }
    whole = "memory_layertype_0_bsz1_seq36"
    assert whole in apart
    assert noted == apart
    assert "rounds every tensor up" in " ".join(cells[whole].notes)
    assert f"warning: {len(apart)} cells differ from their device by over 1 %" in err


# --- time ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "seq_length"), [("gpt-6.7b", 2048), ("llama3-8b", 4096)])
def test_a_layer_takes_what_whole_forwards_differ_by(name: str, seq_length: int) -> None:
    """Timed alone and by difference it is the same within 10 %; backward is 1 to 4 forwards."""
    measurer, cells = measurer_of(name, seq_length, profile_types=("computation",), max_seconds=1.0)
    found = {cell.key: measurer.measure(cell) for cell in cells if cell.degree == 1}
    alone = found[f"time_layertype_0_bsz1_seq{seq_length}"]
    whole_s = [
        median(found[f"time_layernum[{count}]_bsz1_seq{seq_length}"].samples_s["forward"])
        for count in (2, 4)
    ]
    times_s = {key: median(samples) for key, samples in alone.samples_s.items()}

    assert (whole_s[1] - whole_s[0]) / 2 == pytest.approx(times_s["forward"], rel=0.1)
    assert 1.0 < times_s["backward"] / times_s["forward"] < 4.0
    assert times_s["recompute"] == pytest.approx(times_s["forward"], rel=0.2)
    assert times_s["optimizer"] > 0.0


def test_a_shard_is_faster_than_the_whole() -> None:
    """A rank of two computes about half a layer, in more than a third of its time."""
    measurer, cells = measurer_of("llama3-8b", 4096, profile_types=("computation",))
    forward_s = {
        cell.degree: median(measurer.measure(cell).samples_s["forward"])
        for cell in cells
        if cell.part == "layer" and cell.num_layers is None
    }

    assert 0.33 < forward_s[2] / forward_s[1] < 0.8


# --- out of memory -------------------------------------------------------------------------


def test_running_out_of_memory_is_a_marked_cell(tmp_path: Path) -> None:
    """A batch that does not fit fails, a larger one is left out, and the next cell is measured."""
    from profiler.model.run import measure_cells

    seq = 2048
    measurer, cells = measurer_of(
        "gpt-6.7b",
        seq,
        source="auto",
        batches=(1, 1 << 14, 1 << 15),
        profile_types=("computation",),
    )
    layers = {c.batch: c for c in cells if c.part == "layer" and c.degree == 1}
    shards = [c for c in cells if c.degree == 2 and c.batch == 1]
    record = Kept()
    measure_cells([*layers.values(), *shards], measurer, record)  # type: ignore[arg-type]

    assert [m.status for m in record.found] == ["ok", "failed", "skipped", "ok"]
    assert is_out_of_memory(record.found[1])
    assert record.found[1].reason == f"out of memory at batch 16384, sequence {seq}"
    assert "already ran out of memory" in str(record.found[2].reason)
    # what the failed cell held is free again
    assert torch.cuda.memory_reserved(DEVICE) < 1 << 30


class Kept:
    """Takes cells as `ModelRecord` does, and writes no file."""

    def __init__(self) -> None:
        """Begin without cells."""
        self.found: list[ModelMeasurement] = []

    def put(self, measurement: ModelMeasurement) -> None:
        """Keep a cell."""
        self.found.append(measurement)


# --- attention -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_attention_is_fused_whatever_the_type(dtype: str) -> None:
    """Shared key-value heads are fused in fp32 too: nothing as large as the scores is kept."""
    measurer, cells = measurer_of(
        "llama3-8b", 2048, profile_types=("memory",), unit="attention", dtype=dtype
    )
    found = measurer.measure(next(c for c in cells if c.degree == 1)).bytes
    scores = 32 * 2048 * 2048 * (4 if dtype == "fp32" else 2)

    assert found["device_activation"] - found["activation"] < 0.5 * scores


def test_attention_that_no_kernel_fuses_is_refused() -> None:
    """Heads wider than any fused kernel takes are one sentence, not a matrix of scores."""
    from autopar.errors import InputError

    q = torch.randn(64, 1, 2, 1022, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(InputError, match="no fused attention for heads of width 1022 in bfloat16"):
        attention(q, q, q, causal=True)


# --- the command ---------------------------------------------------------------------------


def test_sequence_mode(tmp_path: Path) -> None:
    """Three lengths on the GPU: all measured, times in a folder that is named after the device."""
    model = write_model(tmp_path, LLAMA)
    wanted = ("--model", model.name, "--mode", "sequence", "--seq", "32:128:x2")
    profiled(tmp_path, *wanted, "--device", "cuda", "--max-seconds", "0.2")
    computation, memory = names()
    folder = tmp_path / "models" / "tiny-llama" / "configs"
    [times] = folder.glob(f"*/{computation}")
    cells = cells_of(times)

    assert times.parent.name in torch.cuda.get_device_name(DEVICE).lower().replace(" ", "-")
    assert (folder / memory).exists()
    assert {m.status for m in cells.values()} == {"ok"}
    assert {m.seq_lengths[0] for m in cells.values()} == {32, 64, 128}
    assert all(min(m.samples_s["forward"]) > 0.0 for m in cells.values())
    sidecar = read_sidecar(times)
    assert sidecar is not None
    metadata = sidecar.runs[-1].metadata
    assert metadata is not None
    assert metadata["device"] == torch.cuda.get_device_name(DEVICE)
    assert metadata["cuda"] == torch.version.cuda


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    """Its layers run on the GPU, where the factory and its batches are told to make tensors."""
    (tmp_path / "own_model.py").write_text(own_module(256), encoding="utf-8")
    wanted = ("--model", "py:own_model:build", "--seq", "128", "--bsz", "2", "--tp", "1")
    profiled(tmp_path, *wanted, "--source", "device", *ON_GPU)
    folder = tmp_path / "profiles"
    times, memory = (cells_of(next(folder.glob(f"{kind}*4.json"))) for kind in ("comp", "mem"))

    layer = times["time_layertype_0_bsz2_seq128"]
    assert {m.status for m in times.values()} == {"ok"}
    assert {"forward", "backward", "recompute", "optimizer"} <= set(layer.samples_s)
    whole = memory["memory_layertype_0_bsz1_seq128"].bytes
    assert whole["device_activation"] == pytest.approx(whole["activation"], rel=0.05)

"""`profile-model` as a command, on this machine's CPU: real files, and plans made from them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.model_files import read_model_profile
from autopar.sidecar import read_sidecar
from autopar.specs import load_spec

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).resolve().parents[2]
CODE = "from profiler.model_cli import main; main()"
COMPUTATION = "computation_profiling_fp32_hidden_64_head_4.json"
MEMORY = "memory_profiling_fp32_hidden_64_head_4.json"
LAYER = {"hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 128}
LLAMA = {
    "format": "autopar-model",
    "version": 1,
    "name": "tiny-llama",
    "layers": [{**LAYER, "num_layers": 8, "seq_length": 128, "num_kv_heads": 2, "gated_mlp": True}],
    "vocab_size": 1000,
}
T5 = {
    "format": "autopar-model",
    "version": 1,
    "name": "tiny-t5",
    "layers": [
        {**LAYER, "num_layers": 4, "seq_length": 64, "causal": False},
        {
            **LAYER,
            "num_layers": 4,
            "seq_length": 32,
            "cross_attention": True,
            "norm_parameters_per_hidden": 3,
        },
    ],
    "vocab_size": 1000,
    "tied_embeddings": True,
}
SHORT = ("--device", "cpu", "--dtype", "fp32", "--max-seconds", "0.05", "--iters", "4")
MODULE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.num_heads = 4
        self.table, self.head = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def make_batch(self, batch, seq_length):
        return torch.randint(0, 100, (batch, seq_length))


def build(num_layers, seq_length, dtype):
    return Model(num_layers)
"""


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the command in a folder."""
    kept = {k: v for k, v in os.environ.items() if k != "AUTOPAR_DEBUG"}
    return subprocess.Popen(
        [sys.executable, "-c", CODE, *arguments],
        cwd=folder,
        env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def profiled(folder: Path, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Run the command in a folder; return what it printed."""
    with started(folder, *arguments) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out, err


def write_model(folder: Path, model: dict[str, Any]) -> Path:
    """Write a model where the command can read it."""
    path = folder / f"{model['name']}.json"
    path.write_text(json.dumps(model), encoding="utf-8")
    return path


def check_search(model: Path, files: Path, mode: str, *options: str) -> None:
    """Check that the planner takes the two files, each with its sidecar."""
    pytest.importorskip("_autopar_core", reason="the C++ core is not built: run `make build`")
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from search.cli import main; main()"),
            *("--model", str(model), "--hardware", "a100:1x4", "--mixed-precision", "fp32"),
            *("--memory-profiling-path", str(files), "--time-profiling-path", str(files)),
            *("--time-profile-mode", mode, "--output-config-path", "none", *options),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in (COMPUTATION, MEMORY):
        assert f"{files / name}\n" in done.stdout
        assert f"{files / name}.meta.json\n" in done.stdout


def check_files(files: Path, model: Path) -> None:
    """Check that all four files are there and that every cell was measured."""
    names = {path.name for path in files.iterdir() if not path.name.startswith(".")}
    assert names == {n for name in (COMPUTATION, MEMORY) for n in (name, f"{name}.meta.json")}
    for name in (COMPUTATION, MEMORY):
        sidecar = read_sidecar(files / name)
        assert sidecar is not None
        assert sidecar.runs
        assert not sidecar.estimated
        for run in sidecar.runs:
            assert run.metadata["device"].startswith("cpu (")  # type: ignore[union-attr]
            assert all(m.status == "ok" for m in run.model_measurements)
    spec = load_spec(str(model))
    for sequence_parallel in (True, False):
        read_model_profile(
            computation=files,
            memory=files,
            spec=spec,
            sequence_parallel=sequence_parallel,
            precision="fp32",
        )


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [
        ("static", ("--bsz", "2")),
        ("batch", ("--bsz", "1:8")),
        ("sequence", ("--seq", "32:128:x2")),
    ],
)
def test_a_tiny_llama_is_profiled_and_planned(
    mode: str, sizes: tuple[str, ...], tmp_path: Path
) -> None:
    """In every mode: all documented files, and a plan from them; sequence mode at a new length."""
    model = write_model(tmp_path, LLAMA)
    options = ("--model", model.name, "--mode", mode, *sizes, "--tp", "1,2", *SHORT)
    out, err = profiled(tmp_path, *options, "--out", "profiles")

    files = tmp_path / "profiles"
    assert out.splitlines() == [
        f"profiles/{n}" for name in (COMPUTATION, MEMORY) for n in (name, f"{name}.meta.json")
    ]
    assert err.splitlines()[-1].endswith(" cells measured, 0 failed, 0 left out")
    check_files(files, model)
    if mode == "sequence":
        longer = ("--seq-length", "96", "--memory-profile-mode", "sequence")
        check_search(model, files, mode, *longer)
    else:
        check_search(model, files, mode)


def test_an_encoder_and_a_decoder(tmp_path: Path) -> None:
    """Two layer types with lengths of their own; files where the model's and the device's lie."""
    model = write_model(tmp_path, T5)
    profiled(tmp_path, "--model", model.name, "--bsz", "2", "--tp", "1,2", *SHORT)

    configs = tmp_path / "models" / "tiny-t5" / "configs"
    times = json.loads((configs / "cpu" / COMPUTATION).read_text(encoding="utf-8"))
    assert set(times) == {
        "layertype_0_bsz2_seq64",
        "layertype_1_bsz2_seq32",
        "layertype_other_bsz2_seq[64,32]",
        "layernum[2,2]_bsz2_seq[64,32]",
        "layernum[4,2]_bsz2_seq[64,32]",
        "layernum[2,4]_bsz2_seq[64,32]",
    }
    together = tmp_path / "together"
    together.mkdir()
    for path in (*configs.glob("memory*"), *(configs / "cpu").glob("computation*")):
        (together / path.name).write_bytes(path.read_bytes())
    check_files(together, model)
    check_search(model, together, "static")


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    """Ctrl-C keeps every finished cell and says one sentence; --resume adds the others."""
    model = write_model(tmp_path, LLAMA)
    options = ("--model", model.name, "--mode", "batch", "--bsz", "1:8", "--tp", "1,2", *SHORT)
    with started(tmp_path, *options, "--out", "broken") as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "] time_layertype_0_bsz3" in line:
                process.send_signal(signal.SIGINT)
                break
        rest = process.stderr.read().splitlines()
        assert process.wait(timeout=60) == 130
    assert rest[-1] == "profile-model: interrupted; the same command with --resume goes on"
    assert not [line for line in rest[:-1] if not line.startswith("[")]
    done = len(lines) + len(rest) - 1
    kept = _cells(tmp_path / "broken")
    assert len(kept) == done

    out, err = profiled(tmp_path, *options, "--out", "broken", "--resume")
    assert len(out.splitlines()) == 4
    first = next(line for line in err.splitlines() if line.startswith("["))
    now = _cells(tmp_path / "broken")
    assert f"/{len(now) - done}]" in first
    assert {key: now[key] for key in kept} == kept
    profiled(tmp_path, *options, "--out", "whole")
    memory = [(tmp_path / out / MEMORY).read_bytes() for out in ("broken", "whole")]
    assert memory[0] == memory[1]
    times = [json.loads((tmp_path / out / COMPUTATION).read_text()) for out in ("broken", "whole")]
    assert list(times[0]) == list(times[1])


def _cells(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the cells of all runs in a folder."""
    found = {}
    for name in (COMPUTATION, MEMORY):
        sidecar = read_sidecar(folder / name)
        for run in sidecar.runs if sidecar is not None else ():
            found.update({m.key: m.model_dump() for m in run.model_measurements})
    return found


def test_a_module_of_ones_own(tmp_path: Path) -> None:
    """A factory in the working directory: layers as the model calls them, the rest derived."""
    (tmp_path / "own_model.py").write_text(MODULE, encoding="utf-8")
    name = ("--model", "py:own_model:build", "--seq", "32", "--bsz", "2")
    profiled(tmp_path, *name, *SHORT, "--out", "profiles")

    times = json.loads((tmp_path / "profiles" / COMPUTATION).read_text(encoding="utf-8"))
    assert {"layertype_0_bsz2_seq32", "layertype_other_bsz2_seq32"} <= set(times)
    tables = json.loads((tmp_path / "profiles" / MEMORY).read_text(encoding="utf-8"))
    parameters = 2 * 64 + 64 * 128 + 128 + 128 * 64 + 64
    assert tables["layertype_0"]["32"]["parameter_size"] == parameters * 4 / 2**20
    states = tables["other_memory_pp_off"]["32"]["model_states"]["1"]
    assert states == (100 * 64 + 64 * 100 + 100) * 16 / 2**20


def test_dry_run_and_half_a_layer(tmp_path: Path) -> None:
    """A dry run writes nothing; halves add up to the layer, in files of their own names."""
    model = write_model(tmp_path, LLAMA)
    options = ("--model", model.name, "--out", "profiles", "--bsz", "2", "--tp", "1,2", *SHORT)
    out, _ = profiled(tmp_path, *options, "--dry-run")
    assert not (tmp_path / "profiles").exists()
    assert "time_layernum[4]_bsz2_seq128" in out
    assert "nothing was written" in out

    sizes = {}
    memory = ("--profile-type", "memory")
    for unit in ("all", "attention", "mlp"):
        profiled(tmp_path, *options, *memory, "--profile-unit", unit)
        name = MEMORY if unit == "all" else f"{MEMORY.removesuffix('.json')}_{unit}.json"
        tables = json.loads((tmp_path / "profiles" / name).read_text(encoding="utf-8"))
        sizes[unit] = tables["layertype_0"]["128"]["parameter_size"]
    assert sizes["attention"] + sizes["mlp"] == pytest.approx(sizes["all"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "no-such-model"], "no model 'no-such-model'"),
        (["--model", "tiny-llama.json", "--tp", "3"], "does not divide the attention heads"),
        (["--model", "tiny-llama.json", "--source", "device"], "counts it exactly without one"),
        (["--model", "gpt2-xl", "--seq", "4096"], "rows of the position table"),
        (["--model", "py:no_such_module:build"], "there is no Python module 'no_such_module'"),
        (["--model", "config.json"], "the value is 'wat', expected one of"),
        (["--model", "broken.json"], "not valid JSON"),
    ],
)
def test_bad_input_gets_one_sentence(arguments: list[str], said: str, tmp_path: Path) -> None:
    """Exit code 2, one line on stderr that names what is wrong, and no file."""
    write_model(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text('{"model_type": "wat"}', encoding="utf-8")
    (tmp_path / "broken.json").write_text('{"model_type": ', encoding="utf-8")
    before = sorted(path.name for path in tmp_path.iterdir())
    out, err = profiled(tmp_path, *arguments, "--device", "cpu", code=2)

    assert out == ""
    assert said in err
    assert len(err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """Times are taken on the GPU, and its memory stands beside the exact counts."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = write_model(tmp_path, LLAMA)
    options = ("--model", model.name, "--bsz", "2", "--tp", "1,2", "--source", "device")
    profiled(tmp_path, *options, "--max-seconds", "0.2", "--out", "profiles")

    name = MEMORY.replace("fp32", "bf16")
    sidecar = read_sidecar(tmp_path / "profiles" / name)
    assert sidecar is not None
    cells = {m.key: m for m in sidecar.runs[-1].model_measurements}
    whole = cells["memory_layertype_0_bsz1_seq128"].bytes
    assert whole["device_activation"] == pytest.approx(whole["activation"], rel=0.05)

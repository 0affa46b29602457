"""Starts `profile-model` as a real process on tiny models, to be read, disturbed and planned from.

with started(folder, "--model", "tiny-llama.json") as process:
    wait_for(process, "] time_layertype_0_bsz3")
    process.kill()

Processes are copies of a warm one; a new interpreter with `new=True`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from autopar.documents.sidecar import ModelMeasurement, read_sidecar
from tests.warm import ROOT, Warm, command

COMPUTATION = "computation_profiling_fp32_hidden_64_head_4.json"
MEMORY = "memory_profiling_fp32_hidden_64_head_4.json"
SHORT = ("--device", "cpu", "--dtype", "fp32", "--max-seconds", "0.05", "--iters", "4")
_CODE = "from autopar.cli import model; model()"
_Process = subprocess.Popen[str] | Warm
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
"""The config.json of a tiny llama."""
SMALLER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 250,
    "max_position_embeddings": 64,
}
"""Sizes of one that is run on ranks."""
_LAYER = {"hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 128}
LLAMA: dict[str, Any] = {
    "format": "autopar-model",
    "version": 1,
    "name": "tiny-llama",
    "layers": [
        {**_LAYER, "num_layers": 8, "seq_length": 128, "num_kv_heads": 2, "gated_mlp": True}
    ],
    "vocab_size": 1000,
}
T5: dict[str, Any] = {
    "format": "autopar-model",
    "version": 1,
    "name": "tiny-t5",
    "layers": [
        {**_LAYER, "num_layers": 4, "seq_length": 64, "causal": False},
        {
            **_LAYER,
            "num_layers": 4,
            "seq_length": 32,
            "cross_attention": True,
            "norm_parameters_per_hidden": 3,
        },
    ],
    "vocab_size": 1000,
    "tied_embeddings": True,
}
_MODULE = """
import torch
from torch import nn

WIDTH = 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.num_heads = 4
        self.table, self.head = nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100)
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


def own_module(width: int) -> str:
    """Return the source of a module of somebody's own, `build`, with layers of such a width."""
    return _MODULE.replace("WIDTH = 0", f"WIDTH = {width}")


def started(folder: Path, *arguments: str, new: bool = False) -> _Process:
    """Start the command in a folder."""
    kept = {k: v for k, v in os.environ.items() if k != "AUTOPAR_DEBUG"}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if not new:
        return command("profile-model", *arguments, cwd=folder, env=environment)
    return subprocess.Popen(
        [sys.executable, "-c", _CODE, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def profiled(folder: Path, *arguments: str, code: int = 0, new: bool = False) -> tuple[str, str]:
    """Run the command in a folder; return what it printed."""
    with started(folder, *arguments, new=new) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    assert "Traceback" not in err
    return out, err


def wait_for(process: _Process, text: str) -> list[str]:
    """Read stderr up to a line that contains the text; return its lines so far."""
    assert process.stderr is not None
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line.rstrip("\n"))
        if text in line:
            return lines
    raise AssertionError(f"it ended before {text!r}:\n" + "\n".join(lines))


def write_model(folder: Path, model: dict[str, Any]) -> Path:
    """Write a model where the command can read it."""
    path = folder / f"{model['name']}.json"
    path.write_text(json.dumps(model), encoding="utf-8")
    return path


def measured_cells(folder: Path) -> dict[str, ModelMeasurement]:
    """Return the cells of all runs in a folder by key; no key may be there twice."""
    found: dict[str, ModelMeasurement] = {}
    for name in (COMPUTATION, MEMORY):
        sidecar = read_sidecar(folder / name)
        for run in sidecar.runs if sidecar is not None else ():
            for cell in run.model_measurements:
                assert cell.key not in found, f"{cell.key} was measured twice"
                found[cell.key] = cell
    return found


def visible_names(folder: Path) -> set[str]:
    """Return the names in a folder, without the hidden ones of locks."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}

"""Published peaks of torchtitan, over those that are counted from their settings.

The runs are those of torchtitan's `benchmarks/llama3_h100_202412_torchtitan.md` and of
`llama3-8b_h200_202506_trainy-whitefiber.md`. Their files are written from the settings given there.
Memory is the maximum that PyTorch's allocator had reserved, as in the log
(`tests/data/torchtitan_peaks.csv`).
"""

from __future__ import annotations

import csv
import math
import tomllib
from pathlib import Path
from typing import NamedTuple

from autopar.price.account import account_of
from autopar.run.run import Run
from autopar.units import GIB
from benchmarks.intervals import Covered, interval_of
from search.engines.torchtitan.read import read_titan

PEAKS = Path(__file__).resolve().parent.parent / "tests" / "data" / "torchtitan_peaks.csv"

__all__ = ["RUNS", "Published", "peak_bytes", "read", "torch_layers_left_out"]

_2024 = """
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "{flavor}"
norm_type = "rmsnorm"
[optimizer]
name = "AdamW"
lr = 3e-4
[training]
batch_size = {batch}
seq_len = {seq}
warmup_steps = 200
max_norm = 1.0
steps = 1000
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = {tp}
compile = {compile}
dataset = "c4"
[experimental]
context_parallel_degree = {cp}
pipeline_parallel_degree = {pp}
{pipeline}
[checkpoint]
enable_checkpoint = false
[activation_checkpoint]
mode = "{mode}"
{option}
[float8]
enable_float8_linear = {float8}
enable_fsdp_float8_all_gather = {float8}
precompute_float8_dynamic_scale_for_fsdp = {float8}
"""
_H200 = """
[model]
name = "llama3"
flavor = "8B"
tokenizer_path = "./assets/tokenizer/original/tokenizer.model"
converters = ["float8"]
[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8
[lr_scheduler]
warmup_steps = 200
[training]
local_batch_size = 2
seq_len = 8192
max_norm = 1.0
steps = 2000
compile = true
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1
[checkpoint]
enable_checkpoint = false
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
[float8]
enable_fsdp_float8_all_gather = true
precompute_float8_dynamic_scale_for_fsdp = true
force_recompute_fp8_weight_in_bwd = true
filter_fqns = ["output"]
"""


class Published(NamedTuple):
    """A published run: its file, its GPUs, and the GiB that it reserved."""

    text: str
    gpus: int
    memory_gib: float


def _run(
    flavor: str, gpus: int, *, batch: int, seq: int = 8192, tp: int = 1,
    cp: int = 1, pp: int = 1, compiled: bool = True, float8: bool = True, op: bool = False,
    pipeline: str = "",
) -> tuple[str, int]:  # fmt: skip
    yes = {True: "true", False: "false"}
    text = _2024.format(
        flavor=flavor, batch=batch, seq=seq, tp=tp, cp=cp, pp=pp, compile=yes[compiled],
        float8=yes[float8], mode="selective" if op else "full",
        option='selective_ac_option = "op"' if op else "", pipeline=pipeline,
    )  # fmt: skip
    return text, gpus


_FILES: dict[str, tuple[str, int]] = {
    "8B eager": _run("8B", 8, batch=2, compiled=False, float8=False, op=True),
    "8B compiled": _run("8B", 8, batch=2, float8=False, op=True),
    "8B fp8": _run("8B", 8, batch=2, op=True),
    "8B eager, 128": _run("8B", 128, batch=2, compiled=False, float8=False, op=True),
    "8B compiled, 128": _run("8B", 128, batch=2, float8=False, op=True),
    "8B fp8, 128": _run("8B", 128, batch=2, op=True),
    "8B 32k": _run("8B", 8, batch=1, seq=32768),
    "8B 64k": _run("8B", 8, batch=1, seq=65536, cp=2),
    "8B 128k": _run("8B", 8, batch=1, seq=131072, cp=4),
    "8B 256k": _run("8B", 8, batch=1, seq=262144, cp=8),
    "70B": _run("70B", 256, batch=16, tp=8),
    "70B async": _run(
        "70B", 256, batch=16, tp=8, pipeline="enable_async_tensor_parallel = true"
    ),
    "405B": _run("405B", 512, batch=32, tp=8, pp=8,
                 pipeline="enable_async_tensor_parallel = true"),
    "405B looped": _run(
        "405B", 512, batch=32, tp=8, pp=8,
        pipeline='pipeline_parallel_schedule = "interleaved_1f1b"\n'
        "pipeline_parallel_microbatches = 16\nenable_async_tensor_parallel = true",
    ),
    "405B 32k": _run("405B", 512, batch=8, seq=32768, tp=8, pp=8),
    "405B 64k": _run("405B", 512, batch=8, seq=65536, tp=8, pp=8, cp=2),
    "405B 128k": _run("405B", 512, batch=8, seq=131072, tp=8, pp=8, cp=4),
    "405B 256k": _run("405B", 512, batch=8, seq=262144, tp=8, pp=8, cp=8),
    "8B H200": (_H200, 32),
    "8B H200, 64": (_H200, 64),
}  # fmt: skip
"""File and number of GPUs by run."""


def _published() -> dict[str, Published]:
    with PEAKS.open(encoding="utf-8", newline="") as file:
        peaks = {row["run"]: float(row["reserved_gib"]) for row in csv.DictReader(file)}
    return {name: Published(*found, peaks[name]) for name, found in _FILES.items()}


RUNS = _published()


def read(text: str, gpus: int) -> Run:
    """Return the run of a file for H100."""
    return read_titan(tomllib.loads(text), world_size=gpus, gpu="h100-80gb").run


def peak_bytes(run: Run) -> int:
    """Return the counted peak of the peak stage."""
    return max(account_of(run, at).peak_bytes for at in range(run.strategy.pp))


def torch_layers_left_out() -> Covered:
    """Return how many runs are in the interval of reserved over counted bytes of the others."""
    logs = [
        math.log(run.memory_gib * GIB / peak_bytes(read(run.text, run.gpus)))
        for run in RUNS.values()
    ]
    inside, widths = 0, []
    for at, log in enumerate(logs):
        # a configuration has one row, and so a level only
        low, high = map(math.log, interval_of(logs[:at] + logs[at + 1 :], [(0.0, 1.0)]))
        inside += low <= log <= high
        widths.append(high - low)
    return Covered("torch layers, reserved", len(logs), len(logs), inside, sum(widths) / len(logs))

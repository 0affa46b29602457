"""Launches of Megatron-Bridge for tests: published rows as arguments, and files of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.ledger import read_runs
from search.engines.reader import CheckedFile
from search.engines.table import read_checked

__all__ = [
    "CARDS",
    "LLAMA",
    "MODELS",
    "QWEN",
    "SETUP",
    "checked",
    "dtype_of",
    "model_of",
    "overrides",
    "recipe_run",
    "runs",
    "spread",
    "texts",
    "words_of_row",
]

MODELS = {
    "LLAMA3_8B": "llama3_8b",
    "LLAMA3_70B": "llama3_70b",
    "LLAMA3.1_405B": "llama31_405b",
    "DeepSeekV3": "deepseek_v3",
    "GPT OSS 120B": "gpt_oss_120b",
    "Qwen3_30B_a3B": "qwen3_30b_a3b",
    "Qwen3_235B_a22B": "qwen3_235b_a22b",
}
CARDS = {"H100-SXM": "h100-80gb", "GB200": "gb200", "GB300": "gb300", "B200": "b200",
         "B300": "b300"}  # fmt: skip
DTYPES = {"MXFP8": "fp8_mx", "FP8-MX": "fp8_mx", "BF16": "bf16", "NVFP4": "nvfp4"}
"""Precisions by their names in tables; all others are fp8 with a scale per tensor."""


@cache
def runs() -> dict[int, Mapping[str, str]]:
    """Return the rows of the first table by their line."""
    return dict(read_runs()[0])


def model_of(row: Mapping[str, str]) -> str | None:
    """Return the name of a row's model in the scripts, None for those that have none."""
    return MODELS.get(row["model"].split(" (")[0])


def dtype_of(row: Mapping[str, str]) -> str:
    """Return a row's precision as the scripts name it."""
    return DTYPES.get(row["precision"], "fp8_cs")


def words_of_row(line: int) -> list[str]:
    """Return the arguments of `setup_experiment.py` for a row and its recipe's settings."""
    row, settings = runs()[line], read_runs()[1].get(line, {})
    model = model_of(row)
    assert model is not None, row["model"]
    words = ["-m", model.split("_")[0], "-mr", model, "-c", dtype_of(row)]
    words += ["-g", CARDS[row["gpu_type"]].split("-")[0], "-ng", row["num_gpus"]]
    container = re.search(r"2[0-9]\.[0-9]{2}", row["source"])
    if container is not None:
        words += ["-i", f"nvcr.io/nvidia/nemo:{container[0]}", "-cv", "v2"]
    columns = (("-sl", "seq"), ("-gb", "global_batch"), ("-mb", "micro_batch"), ("-tp", "tp"),
               ("-pp", "pp"), ("-cp", "cp"))  # fmt: skip
    for flag, column in columns:
        words += [flag, row[column]]
    words += ["-vp", row["vpp"] if int(row["vpp"]) > 1 else "None"]
    if int(row["ep"]) > 1:
        words += ["-ep", row["ep"], "-et", "1"]
    if "FSDP=" in row["notes"] and "FSDP=0" not in row["notes"]:
        words += ["--use_megatron_fsdp", "true"]
    for key, flag in (
        ("recompute_num_layers", "-rl"),
        ("recompute_modules", "--recompute_modules"),
        ("cpu_offloading_num_layers", "-ol"),
        ("moe_flex_dispatcher_backend", "--moe_flex_dispatcher_backend"),
        ("moe_a2a_overlap", "--moe_a2a_overlap"),
        ("cuda_graph_impl", "--cuda_graph_impl"),
        ("cuda_graph_scope", "--cuda_graph_scope"),
        ("pp_layout", "--pipeline_model_parallel_layout"),
    ):
        value = settings.get(key)
        if value:
            words += [flag, f"'{','.join(value) if isinstance(value, list) else value}'"]
    if "w/o MTP" in row["model"]:
        words.append("model.mtp_num_layers=null")
    for key, dotted in (
        ("cutedsl_fused_grouped_mlp", "model.use_transformer_engine_op_fuser"),
        ("fp8_dot_product_attention", "mixed_precision.fp8_dot_product_attention"),
    ):
        if settings.get(key):
            words.append(f"{dotted}=true")
    return words


def spread(text: str) -> list[str]:
    """Return the words of a command line."""
    return text.split()


SETUP = "uv run python scripts/performance/setup_experiment.py -a account -p batch"
LLAMA = spread("-m llama -mr llama3_70b -g h100 -c fp8_cs -ng 64 -gb 128")
QWEN = spread("-m qwen -mr qwen3_235b_a22b -g h100 -c bf16 -ng 256 -gb 2048")


def checked(
    folder: Path, words: list[str], *, gpu: str = "h100-80gb", world: int | None = None
) -> CheckedFile:
    """Return the check of a script with these arguments."""
    path = folder / "launch.sh"
    path.write_text(f"{SETUP} \\\n    {' '.join(words)}\n", encoding="utf-8")
    return read_checked(str(path), world_size=world, gpu=gpu)


def recipe_run(folder: Path, words: str, *, gpus: int = 64, gpu: str = "h100-80gb") -> CheckedFile:
    """Return the check of a script that runs a library recipe."""
    path = folder / "recipe.sh"
    path.write_text(
        f"torchrun --nnodes {gpus // 8} --nproc-per-node 8 run_recipe.py {words}\n",
        encoding="utf-8",
    )
    return read_checked(str(path), world_size=None, gpu=gpu)


def overrides(folder: Path, document: Mapping[str, Any], *, name: str, gpus: int) -> CheckedFile:
    """Return the check of a YAML file of overrides."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return read_checked(str(path), world_size=gpus, gpu="h100-80gb")


def texts(file: CheckedFile, kind: str | None = None) -> list[str]:
    """Return the sentences of a file's findings."""
    return [one.text for one in file.findings if kind is None or one.kind == kind]

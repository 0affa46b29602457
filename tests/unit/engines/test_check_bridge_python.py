"""Recipes of Megatron-Bridge: those of its releases by name, and those of users in Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.errors import DocumentError
from search.engines.bridge.recipes import (
    LIBRARY,
    model_of,
    named_recipe,
    performance_recipe,
    release_of,
    releases,
)
from search.engines.reader import CheckedFile
from search.engines.table import read_checked
from search.engines.text.shell import scripts_started_with
from tests.bridge_cases import checked, recipe_run, spread, texts

START = """
import os
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.recipes.deepseek import deepseek_v3_pretrain_config
from megatron.bridge.recipes.llama import llama3_8b_peft_config, llama3_70b_pretrain_config
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
from megatron.bridge.training.pretrain import pretrain

def my_config():
    cfg = llama3_70b_pretrain_config()
"""


def python_file(folder: Path, text: str, *, gpus: int = 64) -> CheckedFile:
    """Return the check of a Python file."""
    path = folder / "recipe.py"
    path.write_text(text, encoding="utf-8")
    return read_checked(str(path), world_size=gpus, gpu="h100-80gb")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", ""),
        ("cfg.model.tensor_model_parallel_size = 8", "model.tensor_model_parallel_size=8"),
        ("cfg.train.global_batch_size = 2 ** 8", "-gb 256"),
        ("cfg.mixed_precision = 'bf16_with_fp8_current_scaling_mixed'",
         "mixed_precision=bf16_with_fp8_current_scaling_mixed"),
        ("for n, x in (('global', 64), ('micro', 2)): setattr(cfg.train, n + '_batch_size', x)",
         "-gb 64 -mb 2"),
        ("cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)",
         "comm_overlap.tp_comm_overlap=false"),
        ("cfg.checkpoint.save = os.environ['SAVE']", ""),
        ("cfg.validate()", ""),
    ],
)  # fmt: skip
def test_a_recipe_in_python_is_its_overrides(lines: str, words: str, tmp_path: Path) -> None:
    """The run is that of the launcher with the same recipe and the overrides."""
    text = f"{START}    {lines}\n    return cfg\n"
    file = python_file(tmp_path, text)
    other = recipe_run(tmp_path, f"--recipe llama3_70b_pretrain_config {words}")
    assert file.run is not None, file.findings
    assert other.run is not None
    assert (file.run.strategy, file.run.runtime) == (other.run.strategy, other.run.runtime)
    assert file.run.model == other.run.model
    assert not file.withdrawn


def test_a_variable_that_is_not_set_has_its_default(tmp_path: Path) -> None:
    """With a note, which --env replaces."""
    own = "cfg.model.seq_length = cfg.dataset.seq_length = int(os.getenv('SEQ', '4096'))"
    text = f"{START}    {own}\n    return cfg\n"
    file = python_file(tmp_path, text)
    assert file.run is not None, file.findings
    assert file.run.seq_length == 4096
    assert "line 13: SEQ is not set: '4096' counts" in texts(file, "read")
    with scripts_started_with(None, {"SEQ": "2048"}):
        file = python_file(tmp_path, text)
    assert file.run is not None, file.findings
    assert file.run.seq_length == 2048
    with (
        scripts_started_with(("--tp", "4"), {}),
        pytest.raises(DocumentError, match="read without arguments"),
    ):
        python_file(tmp_path, text)


def test_a_program_that_trains_is_read(tmp_path: Path) -> None:
    """The configuration that it passes on counts, and not that of another function."""
    text = f"""{START}    return cfg

def main():
    cfg = my_config()
    cfg.model.context_parallel_size = 4
    pretrain(config=cfg, forward_step_func=None)

if __name__ == "__main__":
    main()
"""
    run = python_file(tmp_path, text).run
    assert run is not None
    assert run.split.cp == 4


def test_a_model_of_the_hub_is_read(tmp_path: Path) -> None:
    """Its sizes are those that autopar has, with the common settings of the library."""
    text = f"""{START}    cfg = _pretrain_common()
    hub = AutoBridge.from_hf_pretrained("Qwen/Qwen3-30B-A3B")
    cfg.model = hub.to_megatron_provider(load_weights=False)
    cfg.model.expert_model_parallel_size = 8
    cfg.model.seq_length = cfg.dataset.seq_length
    cfg.mixed_precision = MixedPrecisionConfig(bf16=True, grad_reduce_in_fp32=False)
    return cfg
"""
    run = python_file(tmp_path, text, gpus=8).run
    assert run is not None
    assert run.model.experts is not None
    assert (run.model.experts.number, run.split.ep, run.seq_length) == (128, 8, 4096)
    assert run.strategy.global_batch == 32


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("cfg.train.global_batch_size = int(os.environ['GBS'])",
         "line 13: train.global_batch_size is not known"),
        ("if os.getenv('X'):\n        cfg.model.seq_length = 4096", "line 13: model.seq_length"),
        ("os.tune(cfg.model)", "line 13: os.tune may change the configuration"),
        ("cfg.model.tune()", "line 13: cfg.model.tune may change the configuration"),
        ("cfg.model.new_switch = 7", "model.new_switch = 7 may change"),
    ],
)  # fmt: skip
def test_what_only_the_run_knows_is_named(lines: str, said: str, tmp_path: Path) -> None:
    """There is no estimate, and the line is told."""
    file = python_file(tmp_path, f"{START}    {lines}\n    return cfg\n")
    assert any(said in text for text in texts(file, "not understood")), file.findings
    assert set(file.withdrawn) == {"memory", "time"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{START}    return cfg\n\ndef other():\n    return my_config\n", None),
        (f"{START}    return cfg\n\ndef other():\n    return llama3_70b_pretrain_config()\n",
         "has 2 recipes"),
        ("from megatron.bridge import AutoBridge\n", "that returns ConfigContainer"),
        ("import torch\n", "is a Python program, not a launch script"),
        ("from megatron.bridge import x\ndef f(:\n", "line 2: Python does not accept it"),
        ("from megatron.bridge import x\ndef f():\n" + "".join(
            f"{' ' * (4 * at + 4)}for i{at} in range(999):\n" for at in range(3)) + " " * 16 +
            "x = 1\n", "computes too much to be followed"),
    ],
)  # fmt: skip
def test_other_programs_are_refused(text: str, said: str | None, tmp_path: Path) -> None:
    """The reason is that of the file."""
    if said is None:
        assert python_file(tmp_path, text).run is not None
        return
    with pytest.raises(DocumentError) as found:
        python_file(tmp_path, text)
    assert said in str(found.value)


def test_recipes_are_those_of_a_release(tmp_path: Path) -> None:
    """The container selects the release; without one it is the newest."""
    newest, *older = releases()
    assert [release_of(f"nvcr.io/nvidia/nemo:{tag}") for tag in ("26.04.01", "25.07", "27.01")] == [
        "0.4", older[-1].rpartition(".")[0], None]  # fmt: skip
    assert newest.startswith("0.6.")
    words = "-m qwen -mr qwen3_30b_a3b -g gb200 -c fp8_mx -ng 8"
    runs = [
        checked(tmp_path, spread(f"{words} -i nvcr.io/nvidia/nemo:{tag} -cv v1"), gpu="gb200").run
        for tag in ("26.04", "26.06")
    ]
    # Fused experts and graphs of the whole step are in the recipe since 26.06.
    kernels = [(run.runtime.experts.fused_mlp, run.kernels.graphs) for run in runs if run]
    assert kernels == [(False, "partial"), (True, "full")]


@pytest.mark.parametrize(
    "start",
    [
        "srun --container-image=nvcr.io/nvidia/nemo:{tag} {run}",
        'srun --container-image nvcr.io/nvidia/nemo:{tag} bash -c "{run}"',
        "docker run --gpus all nvcr.io/nvidia/nemo:{tag} {run}",
    ],
)
def test_the_container_of_a_recipe_runner_is_that_of_its_launcher(
    start: str, tmp_path: Path
) -> None:
    """run_recipe.py has no argument for it."""
    run = "torchrun --nproc-per-node 8 --nnodes 2 scripts/training/run_recipe.py --recipe "
    words = start.replace("{run}", f"{run}qwen3_30b_a3b_pretrain_config")
    micro = list[int]()
    for tag in ("26.04", "26.08"):
        path = tmp_path / "run.sh"
        path.write_text(words.replace("{tag}", tag) + "\n", encoding="utf-8")
        found = read_checked(str(path), world_size=16, gpu="h100-80gb").run
        assert found is not None
        micro.append(found.strategy.micro_batch)
    assert micro == [2, 1]


def test_the_numbers_of_known_recipes() -> None:
    """Sources: `perf_recipes` and `recipes` of the wheel of 0.6.2, and configs of v0.5.1."""
    keys = [f"model.{name}_parallel_size" for name in (
        "tensor_model", "pipeline_model", "context", "virtual_pipeline_model")]  # fmt: skip
    keys += ["train.global_batch_size", "train.micro_batch_size"]

    def numbers(name: str) -> list[int]:
        settings = named_recipe(name).settings
        return [settings[key] or 1 for key in keys]

    assert numbers("llama3_70b_pretrain_64gpu_h100_bf16_config") == [4, 4, 2, 5, 256, 1]
    assert numbers("llama3_70b_pretrain_64gpu_h100_bf16_v1_config") == [4, 4, 2, 5, 128, 1]
    assert numbers("kimi_k2_pretrain_1024gpu_h100_bf16_config") == [8, 16, 1, 2, 8192, 1]
    name = "deepseek_v3_pretrain_1024gpu_h100_bf16_config"
    assert numbers(name) == [2, 8, 1, 4, 16384, 1]
    assert numbers(LIBRARY + name) == [2, 16, 1, 1, 4096, 1]
    assert numbers("deepseek_v3_pretrain_config") == numbers(LIBRARY + name)
    # The default is the recipe of the fewest GPUs for some models.
    small = performance_recipe("llama3_8b", "h100", "bf16", None)
    assert small.num_gpus == 8
    assert performance_recipe("llama31_405b", "h100", "bf16", None).num_gpus == 1024


def test_a_recipe_for_another_number_of_gpus_is_scaled() -> None:
    """The batch is in proportion, which a note reports."""
    found = named_recipe("llama3_70b_pretrain_128gpu_h100_fp8cs_config")
    assert (found.num_gpus, found.settings["train.global_batch_size"]) == (128, 512)
    assert "using the recipe of 64 GPUs" in found.notes[0]


@pytest.mark.parametrize(
    ("hub", "model"),
    [
        ("meta-llama/Meta-Llama-3-8B", "llama3_8b"),
        ("meta-llama/Meta-Llama-3.1-405B", "llama31_405b"),
        ("meta-llama/Llama-3.2-1B", "llama32_1b"),
        ("meta-llama/Llama-2-7b-hf", "llama2_7b"),
        ("Qwen/Qwen2.5-72B", "qwen25_72b"),
        ("Qwen/Qwen3-0.6B", "qwen3_600m"),
        ("Qwen/Qwen3-1.7B", "qwen3_1p7b"),
        ("Qwen/Qwen3-235B-A22B", "qwen3_235b_a22b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek_v3"),
        ("moonshotai/Kimi-K2-Instruct", "kimi_k2"),
        ("openai/gpt-oss-20b", "gpt_oss_20b"),
    ],
)
def test_names_on_the_hub_are_those_of_architectures(hub: str, model: str) -> None:
    """Names are spelled as in recipes."""
    assert model_of(hub) == model

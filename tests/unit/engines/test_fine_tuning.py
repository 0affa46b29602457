"""Fine-tuning with the scripts of other projects: their YAML, its defaults, and its price."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar import ask
from autopar.errors import AutoparError, DocumentError
from autopar.price import torch_layers
from autopar.price.account import account_of
from autopar.price.job import job_of_run
from autopar.rates.layer import head_times
from autopar.records import replace
from autopar.run.run import Run
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.reader import CheckedFile
from search.engines.table import as_trained, read_checked
from tests.run_cases import some, torch_runs
from tests.step_cases import dense_case

LORA: dict[str, Any] = {
    "model_name_or_path": "meta-llama/Meta-Llama-3-8B",
    "dtype": "bfloat16",
    "max_length": 4096,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "use_peft": True,
    "lora_r": 8,
    "lora_target_modules": "all-linear",
}
COMMAND = 'torchrun --nproc-per-node 4 -m trl.scripts.sft --config sft.yaml --dataset_name "$D"\n'


def checked(folder: Path, document: dict[str, Any], command: str = COMMAND) -> CheckedFile:
    """Return the result of checking a script that starts TRL with a YAML file."""
    (folder / "sft.yaml").write_text(yaml.safe_dump(document))
    (folder / "launch.sh").write_text(command)
    return read_checked(str(folder / "launch.sh"), world_size=4, gpu="h100-80gb")


def run_in(found: CheckedFile) -> Run:
    """Return the priced run of a file; its absence fails the test."""
    assert found.run is not None, found.findings
    return found.run


def test_the_yaml_of_trl_is_its_command(tmp_path: Path) -> None:
    """The same words give the same run in a file and on the command, where they count more."""
    words = " ".join(f"--{key} {value}" for key, value in LORA.items())
    command = f"torchrun --nproc-per-node 4 -m trl.scripts.sft {words}\n"
    in_file, alone = checked(tmp_path, LORA), checked(tmp_path, {}, command)
    assert run_in(in_file) == replace(run_in(alone), name=run_in(in_file).name)
    assert not in_file.withdrawn
    over = checked(tmp_path, LORA, COMMAND.replace("--config", "--max_length 2048 --config"))
    assert run_in(over).seq_length == 2048


def test_a_yaml_alone_is_checked(tmp_path: Path) -> None:
    """sft.yaml is read without the script that starts it, as plain data parallelism."""
    path = tmp_path / "sft.yaml"
    path.write_text(yaml.safe_dump(LORA))
    alone = read_checked(str(path), world_size=4, gpu="h100-80gb")
    assert replace(run_in(alone), name="") == replace(run_in(checked(tmp_path, LORA)), name="")


def test_defaults_of_trl(tmp_path: Path) -> None:
    """Without words, TRL 1.16 has 1,024 tokens, 8 sequences, recomputation and bf16."""
    found = run_in(checked(tmp_path, {"model_name_or_path": "Qwen/Qwen3-8B"}))
    assert (found.seq_length, found.strategy.micro_batch, found.strategy.micro_batches) == (
        1024,
        8,
        1,
    )
    assert found.strategy.recomputed.kind == "full"
    assert found.runtime.precision.kind == "bf16"
    assert found.runtime.optimizer.fused
    assert found.kernels.loss == "trl"
    off = run_in(checked(tmp_path, {**LORA, "gradient_checkpointing": False, "bf16": False}))
    assert off.strategy.recomputed.kind == "none"


def test_harmless_words_keep_it(tmp_path: Path) -> None:
    """Words of data, output and packing, and switches that are off, change nothing."""
    more = {
        "packing": True,
        "dataset_name": "a/b",
        "lora_alpha": 64,
        "activation_offloading": False,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "report_to": "none",
    }
    plain, found = checked(tmp_path, LORA), checked(tmp_path, {**LORA, **more})
    assert not found.withdrawn
    assert run_in(found) == run_in(plain)


def test_a_missing_yaml_is_no_crash(tmp_path: Path) -> None:
    """Without its file, the words of the command alone are read, and the model is missing."""
    (tmp_path / "launch.sh").write_text(COMMAND.replace("torchrun", "accelerate launch"))
    found = read_checked(str(tmp_path / "launch.sh"), world_size=4, gpu="h100-80gb")
    assert found.run is None


def test_shipped_models_are_named_by_their_repository(tmp_path: Path) -> None:
    """An export names weights of the Hugging Face hub, and asks for the data alone."""
    run = run_in(checked(tmp_path, LORA))
    place = ExportTarget(num_nodes=1, gpus_per_node=4, model="llama3-8b")
    found = written(run, engine="accelerate", place=place)
    document = yaml.safe_load(found.files["sft.yaml"])
    assert document["model_name_or_path"] == "meta-llama/Meta-Llama-3-8B"
    assert {*found.files} == {"autopar_accelerate.yaml", "sft.yaml"}
    assert found.launch.count(":?") == 1
    assert "DATA_PATH:?" in found.launch
    assert found.losses == ()
    # the number of steps is that of the file, or else of the user
    open_, fixed = (
        written(replace(run, steps=steps), engine="accelerate", place=place).launch
        for steps in (None, 50)
    )
    assert "--max_steps" in open_
    assert "--max_steps" not in fixed


@pytest.mark.parametrize("keeper", ["accelerate", "deepspeed"])
def test_what_is_written_has_the_price_of_what_runs(keeper: Any) -> None:
    """Peak and time of the files, read back, are those of the run."""
    for run in some(torch_runs(keeper=keeper, trl=True), 12):
        place = ExportTarget(num_nodes=1, gpus_per_node=run.strategy.gpus)
        found = written(run, engine=keeper, place=place).runs
        assert account_of(found).peak_bytes == account_of(run).peak_bytes
        assert replace(job_of_run(found), name="") == replace(job_of_run(run), name="")


def test_the_repository_that_was_asked_for_is_fine_tuned(tmp_path: Path) -> None:
    """A tuned model has the sizes of the shipped one, and other weights."""
    name, plan = "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", tmp_path / "plan.json"
    ask(
        "search", model=name, hardware="h100:1x4", lora=16, engine="accelerate", seq_length=2048,
        global_batch_size=16, output_config_path=str(plan),
    )  # fmt: skip
    ask("export", str(plan), out=str(tmp_path / "files"))
    document = yaml.safe_load((tmp_path / "files" / "sft.yaml").read_text(encoding="utf-8"))
    assert document["model_name_or_path"] == name


def test_memory_of_the_tiled_loss() -> None:
    """One tile and gradients, counted by hand: no tensor of tokens times vocabulary."""
    run = next(
        one
        for one in some(torch_runs(keeper="accelerate", trl=True), 60)
        if one.runtime.adapters is not None and one.runtime.precision.kind == "bf16"
    )
    tokens = run.strategy.micro_batch * run.seq_length // run.split.cp
    tile = min(tokens, 4096) * min(run.padded_vocab, 32768) * 2
    hidden = run.model.hidden
    # the gradient of the hidden states is summed in fp32, then cast
    assert torch_layers.loss_bytes(run) == tile + (4 + 2) * tokens * hidden
    # the normed hidden states are the input of a head that is computed again
    kernels = replace(run.kernels, loss="whole")
    whole = replace(run, runtime=replace(run.runtime, kernels=kernels))
    saved = torch_layers.final_bytes(run) - torch_layers.final_bytes(whole)
    assert saved == 2 * tokens * hidden
    trained = replace(run, runtime=replace(run.runtime, adapters=None))
    head = torch_layers.loss_bytes(trained) - torch_layers.loss_bytes(run)
    assert head == 4 * run.model.vocab * hidden


FACTORY: dict[str, Any] = {
    # examples/train_qlora/llama3_lora_sft_bnb_npu.yaml and train_lora/qwen3_lora_sft.yaml
    "model_name_or_path": "Qwen/Qwen3-8B",
    "quantization_bit": 4,
    "trust_remote_code": True,
    "image_max_pixels": 262144,
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "lora_rank": 16,
    "lora_target": "all",
    "dataset": "identity,alpaca_en_demo",
    "template": "qwen3_nothink",
    "cutoff_len": 2048,
    "max_samples": 1000,
    "preprocessing_num_workers": 16,
    "output_dir": "saves/qwen3-8b/lora/sft",
    "logging_steps": 10,
    "plot_loss": True,
    "report_to": "none",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "learning_rate": 1.0e-4,
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "bf16": True,
    "ddp_timeout": 180000000,
    "resume_from_checkpoint": None,
}


def factory(folder: Path, document: dict[str, Any], command: str = "") -> CheckedFile:
    """Return the result of checking a YAML file of LLaMA-Factory, alone or started by a command."""
    (folder / "train.yaml").write_text(yaml.safe_dump(document))
    (folder / "run.sh").write_text(command)
    path = folder / ("run.sh" if command else "train.yaml")
    return read_checked(str(path), world_size=8, gpu="h100-80gb")


def test_a_yaml_of_llamafactory(tmp_path: Path) -> None:
    """A published example is priced: QLoRA of all linear layers, recomputed by default."""
    found = factory(tmp_path, FACTORY)
    run = run_in(found)
    assert found.trainer == "LLaMA-Factory"
    assert not found.withdrawn
    assert run.runtime.adapters is not None
    assert (run.runtime.adapters.rank, run.runtime.adapters.base) == (16, "nf4")
    assert len(run.runtime.adapters.targets) == 6
    assert run.strategy.recomputed.kind == "full"
    assert (run.strategy.micro_batch, run.strategy.micro_batches) == (2, 8)
    assert run.kernels.loss == "whole"


def test_commands_of_llamafactory(tmp_path: Path) -> None:
    """Its launcher, torchrun and accelerate start the same run; KEY=VALUE overrides the file."""
    alone = run_in(factory(tmp_path, FACTORY))
    for command in (
        "FORCE_TORCHRUN=1 NPROC_PER_NODE=8 llamafactory-cli train train.yaml\n",
        "torchrun --nproc_per_node 8 src/train.py train.yaml\n",
        "accelerate launch --num_processes 8 --multi_gpu -m llamafactory.launcher train.yaml\n",
    ):
        found = factory(tmp_path, FACTORY, command)
        assert replace(run_in(found), name="") == replace(alone, name="")
    command = "FORCE_TORCHRUN=1 llamafactory-cli train train.yaml cutoff_len=1024 dataset=$D\n"
    assert run_in(factory(tmp_path, FACTORY, command)).seq_length == 1024
    with pytest.raises(DocumentError):
        factory(tmp_path, FACTORY, "NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train train.yaml\n")


def test_llamafactory_with_deepspeed(tmp_path: Path) -> None:
    """The file of DeepSpeed that the YAML names is read from the folder of the YAML."""
    zero = {"stage": 3, "overlap_comm": False}
    auto = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}
    (tmp_path / "ds.json").write_text(json.dumps({**auto, "zero_optimization": zero}))
    found = factory(tmp_path, {**FACTORY, "deepspeed": "ds.json"})
    assert found.trainer == "LLaMA-Factory"
    assert run_in(found).split.zero == 3
    assert run_in(found).runtime.states.keeper == "deepspeed"


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("fp16", True, "illegal"),  # next to bf16
        ("lora_rank", -8, "illegal"),
        ("lora_dropout", 7, "illegal"),
        ("cutoff_len", "2,048", "not priced"),
        ("per_device_train_batch_size", 0, "not understood"),
        ("gradient_accumulation_steps", -1, "not understood"),
        ("max_steps", "ten", "not understood"),
    ],
)
def test_unusable_values_leave_no_verdict(tmp_path: Path, key: str, value: Any, kind: str) -> None:
    """A value that the program refuses is not replaced by its default."""
    found = factory(tmp_path, {**FACTORY, "bf16": True, key: value})
    assert kind in {one.kind for one in found.findings}
    assert found.withdrawn or found.run is None
    without = factory(tmp_path, {**FACTORY, "bf16": True, "max_steps": -1, "lora_dropout": 5e-2})
    assert not without.withdrawn


AXOLOTL: dict[str, Any] = {
    # examples/llama-3/qlora-1b.yml of axolotl, with its kernels off
    "base_model": "meta-llama/Meta-Llama-3-8B",
    "load_in_8bit": False,
    "load_in_4bit": True,
    "datasets": [{"path": "teknium/GPT4-LLM-Cleaned", "type": "alpaca"}],
    "val_set_size": 0.1,
    "output_dir": "./outputs/lora-out",
    "adapter": "qlora",
    "sequence_len": 2048,
    "sample_packing": True,
    "eval_sample_packing": True,
    "lora_r": 32,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_modules": ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "o_proj"],
    "wandb_project": None,
    "gradient_accumulation_steps": 4,
    "micro_batch_size": 2,
    "num_epochs": 1,
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": 0.0002,
    "bf16": "auto",
    "tf32": False,
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "flash_attention": True,
    "warmup_ratio": 0.1,
    "evals_per_epoch": 4,
    "saves_per_epoch": 1,
    "weight_decay": 0.0,
    "special_tokens": {"pad_token": "<|end_of_text|>"},
    "lora_mlp_kernel": False,
}


def axolotl(folder: Path, document: dict[str, Any], command: str = "") -> CheckedFile:
    """Return the result of checking a YAML file of axolotl, alone or started by a command."""
    (folder / "a.yaml").write_text(yaml.safe_dump(document))
    (folder / "run.sh").write_text(command)
    path = folder / ("run.sh" if command else "a.yaml")
    return read_checked(str(path), world_size=4, gpu="h100-80gb")


def test_a_yaml_of_axolotl(tmp_path: Path) -> None:
    """A published example is priced, alone and with its commands."""
    found = axolotl(tmp_path, AXOLOTL)
    run = run_in(found)
    assert (found.trainer, not found.withdrawn) == ("axolotl", True)
    assert run.runtime.adapters is not None
    assert (run.runtime.adapters.rank, run.runtime.adapters.base) == (32, "nf4")
    assert run.runtime.optimizer.kind == "adam8bit"
    assert (run.seq_length, run.strategy.micro_batch, run.strategy.micro_batches) == (2048, 2, 4)
    assert not run.kernels.repeated_heads
    for command in (
        "axolotl train a.yaml\n",
        "torchrun --nproc-per-node 4 -m axolotl.cli.train a.yaml\n",
        "accelerate launch --num_processes 4 --multi_gpu -m axolotl.cli.train a.yaml\n",
    ):
        started = axolotl(tmp_path, AXOLOTL, command)
        assert replace(run_in(started), name="") == replace(run, name="")


def test_common_words_of_axolotl_keep_the_verdict(tmp_path: Path) -> None:
    """Words of axolotl's examples without effect, and switches of quantisation that are off."""
    section = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
    words = {
        "tokenizer_type": "AutoTokenizer",
        "is_llama_derived_model": True,
        "wandb_name": "first",
        "loss_watchdog_threshold": 5.0,
        "loss_watchdog_patience": 3,
        "cosine_min_lr_ratio": 0.1,
        "eot_tokens": ["<|eot_id|>"],
    }
    assert not axolotl(tmp_path, {**AXOLOTL, **words}).withdrawn
    full = {key: value for key, value in AXOLOTL.items() if "lora" not in key and key != "adapter"}
    full |= {"optimizer": "adamw_torch_8bit", "fsdp_version": 2, "fsdp_config": section}
    off = {"load_in_8bit": False, "load_in_4bit": False}
    assert not axolotl(tmp_path, {**full, **off}).withdrawn
    on = axolotl(tmp_path, {**full, **off, "load_in_4bit": True})
    assert [one.kind for one in on.findings if one.withdraws] == ["not priced"]


def test_fsdp_of_axolotl(tmp_path: Path) -> None:
    """Its section of FSDP is that of accelerate, without a prefix."""
    section = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
    own = {**AXOLOTL, "optimizer": "adamw_torch_8bit", "fsdp_version": 2, "fsdp_config": section}
    found = axolotl(tmp_path, own)
    assert not found.withdrawn
    assert run_in(found).split.zero == 3


@pytest.mark.parametrize(
    ("read", "base", "key", "value"),
    [
        (checked, LORA, "loss_type", "dft"),
        (checked, LORA, "model_init_kwargs", {"use_kernels": True}),
        (checked, LORA, "gradient_checkpointing_kwargs", {"selective": True}),
        (checked, LORA, "activation_offloading", True),
        (checked, LORA, "use_dora", True),
        (checked, LORA, "lora_modules_to_save", ["lm_head"]),
        (checked, LORA, "load_in_2bit", True),
        (checked, LORA, "no_such_word", 3),
        (factory, FACTORY, "use_galore", True),
        (factory, FACTORY, "use_unsloth", True),
        (factory, FACTORY, "stage", "dpo"),
        (factory, FACTORY, "finetuning_type", "freeze"),
        (factory, FACTORY, "shift_attn", True),
        (factory, FACTORY, "additional_target", "embed_tokens"),
        (factory, FACTORY, "use_dft_loss", True),
        (factory, FACTORY, "no_such_word", 3),
        (axolotl, AXOLOTL, "lora_mlp_kernel", None),  # on by default
        (axolotl, AXOLOTL, "gradient_checkpointing", "offload"),
        (axolotl, AXOLOTL, "plugins", ["axolotl.integrations.liger.LigerPlugin"]),
        (axolotl, AXOLOTL, "chunked_cross_entropy", True),
        (axolotl, AXOLOTL, "context_parallel_size", 2),
        (axolotl, AXOLOTL, "adapter", None),  # states in 16 bits
        (axolotl, AXOLOTL, "no_such_word", 3),
    ],
)
def test_words_without_a_price_withdraw_the_verdict(
    read: Callable[[Path, dict[str, Any]], CheckedFile],
    base: dict[str, Any],
    key: str,
    value: Any,
    tmp_path: Path,
) -> None:
    """A word, or a default, that is not known or changes memory or time without a formula."""
    assert not read(tmp_path, base).withdrawn
    found = read(tmp_path, {**base, key: value})
    assert found.withdrawn or found.run is None


@pytest.mark.parametrize("program", ["llamafactory", "axolotl"])
def test_a_plan_for_another_program_has_its_price(tmp_path: Path, program: str) -> None:
    """Other programs hold all logits; an export prices them, in search plans and read ones."""
    run = run_in(checked(tmp_path, LORA))
    trained = as_trained(program, run)
    place = ExportTarget(num_nodes=1, gpus_per_node=4, model="llama3-8b")
    found = written(trained, engine=program, place=place)
    assert found.losses == ()
    assert account_of(found.runs).peak_bytes == account_of(trained).peak_bytes
    assert account_of(trained).peak_bytes > account_of(run).peak_bytes
    assert found.launch.count(":?") == 1
    assert "DATA_PATH:?" in found.launch


def test_time_of_the_tiled_loss() -> None:
    """The head runs again in the backward pass, and logits are read in 16 bits."""
    _, machine, job = dense_case(3)
    plain = {one.name: one for one in head_times(machine, replace(job, tiled_loss=False))}
    tiled = {one.name: one for one in head_times(machine, replace(job, tiled_loss=True))}
    head, again = plain["head"], tiled["head"]
    assert again.input_s == pytest.approx(head.input_s + head.forward_s)
    assert (again.forward_s, again.weight_s) == (head.forward_s, head.weight_s)
    assert tiled["loss"].forward_s < plain["loss"].forward_s
    assert tiled["final norm"] == plain["final norm"]


@pytest.mark.parametrize(
    ("change", "ids"),
    [
        ({}, set()),
        ({"packing": True}, {"trl.context-packing"}),
        ({"eval_packing": True}, {"trl.context-packing"}),
        ({"attn_implementation": "sdpa"}, set()),
        ({"attn_implementation": "flash_attention_2"}, {"accelerate.context-attention"}),
    ],
)
@pytest.mark.parametrize("cp", [1, 2])
def test_context_ranks_exclude_packing_and_flash_attention(
    tmp_path: Path, change: dict[str, Any], ids: set[str], cp: int
) -> None:
    """Two refusals: of `SFTTrainer` in TRL 1.16, and of the Trainer in transformers 5.24."""
    degrees = {"dp_shard": 4 // cp, "cp": cp}
    document = {
        "distributed_type": "FSDP",
        "num_processes": 4,
        "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
        "parallelism_config": {
            f"parallelism_config_{name}_size": size for name, size in degrees.items()
        },
    }
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(document))
    command = "accelerate launch --config_file fsdp.yaml -m trl.scripts.sft --config sft.yaml\n"
    found = checked(tmp_path, {**LORA, **change}, command)
    assert {one.id for one in found.findings if one.kind == "illegal"} == (ids if cp > 1 else set())


def test_packed_samples_are_trained_without_context_ranks() -> None:
    """A search has the rule of the check: TRL refuses packing with context ranks."""
    asked: dict[str, Any] = {
        "model": "qwen3-8b",
        "hardware": "h100:1x4",
        "engine": "accelerate",
        "lora": 16,
        "seq_length": 8192,
        "global_batch_size": 16,
        "cp": 2,
        "output_config_path": "none",
    }
    ask("search", **asked)
    lengths = {"lengths": "p50=300,p90=900,max=8192", "batching": "packed"}
    with pytest.raises(AutoparError, match="packed samples"):
        ask("search", **asked, **lengths)


@pytest.mark.parametrize(
    ("read", "base", "default", "off"),
    [
        (checked, {**LORA, "load_in_4bit": True}, False, {"use_bnb_nested_quant": False}),
        (checked, {**LORA, "load_in_4bit": True, "use_bnb_nested_quant": True}, True, None),
        (factory, {**FACTORY, "quantization_bit": 4}, True, {"double_quantization": False}),
        (axolotl, AXOLOTL, True, {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}),
        (axolotl, {**AXOLOTL, "bnb_4bit_use_double_quant": False}, True, None),
    ],
)
def test_scales_of_four_bits_by_program(
    tmp_path: Path, read: Any, base: dict[str, Any], default: bool, off: dict[str, Any] | None
) -> None:
    """An fp32 scale per 64 elements, or one of 8 bits and an fp32 one per 256 of these."""
    found = run_in(read(tmp_path, base))
    assert found.runtime.adapters is not None
    assert found.runtime.adapters.nested == default
    if off is not None:
        plain = run_in(read(tmp_path, {**base, **off}))
        assert plain.runtime.adapters is not None
        nested, flat = (
            account_of(replace(found, runtime=replace(found.runtime, adapters=one))).states_bytes
            for one in (
                replace(plain.runtime.adapters, nested=True),
                plain.runtime.adapters,
            )
        )
        llama = (32, 14336, 32 * 128)
        layers, width, heads = (36, 12288, 32 * 128) if read is factory else llama
        quantised = layers * (4096 * (2 * heads + 2 * 1024) + 3 * 4096 * width)
        assert flat - nested == pytest.approx(
            quantised * (4 / 64 - 1 / 64 - 4 / (64 * 256)), rel=1e-3
        )


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        ({}, True),
        ({"trust_remote_code": True}, False),
        ({"trust_remote_code": False}, True),
        ({"lora_o_kernel": False}, False),
        ({"adapter": "lora", "load_in_4bit": False, "load_in_8bit": True}, False),
        ({"fsdp": ["full_shard", "auto_wrap"]}, False),
        ({"fsdp_version": 1}, False),
        ({"fsdp_version": 2, "optimizer": "adamw_torch_8bit"}, True),
    ],
)
def test_fused_kernels_of_axolotl(tmp_path: Path, change: dict[str, Any], fused: bool) -> None:
    """They are on by default except with FSDP1 on several GPUs, int8 and code of the model.

    Source: `check_auto_enable_lora_kernels` of axolotl 0.19.
    """
    own = {key: value for key, value in AXOLOTL.items() if key != "lora_mlp_kernel"} | change
    if "fsdp" in " ".join(change):
        prefix = "" if change.get("fsdp_version") == 2 else "fsdp_"
        own["fsdp_config"] = {f"{prefix}auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    found = axolotl(tmp_path, own)
    withdrawn = {one.values["flag"] for one in found.findings if one.withdraws}
    assert withdrawn == ({"--lora-mlp-kernel"} if fused else set())
    sharded = "fsdp_config" in own
    assert found.described is None or found.described.split.zero == 3 * sharded


@pytest.mark.parametrize(
    ("degrees", "grid", "ids"),
    [
        ({"dp_shard_size": 2}, (2, 2), set()),
        ({"dp_replicate_size": 2}, (2, 2), set()),
        ({"dp_shard_size": 2, "dp_replicate_size": 2}, (2, 2), set()),
        ({"dp_shard_size": 1}, (1, 4), set()),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, None, {"accelerate.grid"}),
        ({"dp_shard_size": 2, "context_parallel_size": 2}, None, {"read.unpriced"}),
        ({"dp_shard_size": 2, "tensor_parallel_size": 2}, None, {"read.unpriced"}),
        ({"context_parallel_size": 1, "heads_k_stride": 1}, (1, 4), set()),
    ],
)
def test_degrees_of_axolotl(
    tmp_path: Path, degrees: dict[str, Any], grid: tuple[int, int] | None, ids: set[str]
) -> None:
    """Replicas and shards on four GPUs; the rest has no price, and no plan is shown.

    Source: `_get_parallel_config_kwargs` in axolotl/utils/distributed.py of 0.19.
    """
    section = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}
    own = {**AXOLOTL, "optimizer": "adamw_torch_8bit", "fsdp_version": 2, "fsdp_config": section}
    found = axolotl(tmp_path, {**own, **degrees})
    kinds = ("illegal", "not priced", "not understood")
    assert {one.id for one in found.findings if one.kind in kinds} == ids
    if grid is None:
        assert found.described is None
    else:
        split, strategy = run_in(found).split, run_in(found).strategy
        assert (split.replicas, strategy.dp // split.replicas, split.cp) == (*grid, 1)


def test_quantised_experts_of_axolotl_are_named(tmp_path: Path) -> None:
    """Experts are in 16 bits with bitsandbytes alone, and in 4 bits with axolotl's own argument."""
    attention = {"lora_target_linear": False, "lora_target_modules": ["q_proj", "v_proj"]}
    mixture = {**AXOLOTL, "base_model": "Qwen/Qwen3-30B-A3B", **attention}
    for experts, key in ((False, "--load_in_4bit"), (True, "--quantize_moe_experts")):
        found = axolotl(tmp_path, {**mixture, "quantize_moe_experts": experts})
        (one,) = (one for one in found.findings if one.withdraws)
        assert (one.id, one.values["key"]) == ("read.unpriced", key)


def test_offloaded_checkpoints_of_axolotl_are_recomputed(tmp_path: Path) -> None:
    """`offload` is recomputation with activations on the host, which have no price."""
    for value in ("offload", "offload_disk"):
        found = axolotl(tmp_path, {**AXOLOTL, "gradient_checkpointing": value})
        assert found.withdrawn
        assert found.described is not None
        assert found.described.strategy.recomputed.kind == "full"

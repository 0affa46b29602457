"""Commands and YAML of ms-swift: their words, defaults and limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.errors import DocumentError
from autopar.price.account import account_of
from autopar.records import replace
from autopar.run.run import Run
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.reader import CheckedFile
from search.engines.table import as_trained, read_checked

# examples/train/lora_sft.sh of ms-swift, with another model
_WORDS = (
    "CUDA_VISIBLE_DEVICES=0",
    "swift sft",
    "--model Qwen/Qwen3-8B",
    "--tuner_type lora",
    "--dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500'",
    "'swift/self-cognition#500'",
    "--torch_dtype bfloat16",
    "--num_train_epochs 1",
    "--per_device_train_batch_size 1",
    "--per_device_eval_batch_size 1",
    "--learning_rate 1e-4",
    "--lora_rank 8",
    "--lora_alpha 32",
    "--target_modules all-linear",
    "--gradient_accumulation_steps 16",
    "--eval_steps 50",
    "--save_steps 50",
    "--save_total_limit 2",
    "--logging_steps 5",
    "--max_length 2048",
    "--output_dir output",
    "--system 'You are a helpful assistant.'",
    "--warmup_ratio 0.05",
    "--dataset_num_proc 4",
    "--dataloader_num_workers 4",
    "--model_author swift",
    "--model_name swift-robot",
)
LORA = " \\\n    ".join(_WORDS) + "\n"


def checked(folder: Path, command: str, gpus: int = 1) -> CheckedFile:
    """Return the result of checking a script."""
    (folder / "run.sh").write_text(command)
    return read_checked(str(folder / "run.sh"), world_size=gpus, gpu="h100-80gb")


def run_in(found: CheckedFile) -> Run:
    """Return the priced run of a file; its absence fails the test."""
    assert found.run is not None, found.findings
    return replace(found.run, name="")


def with_words(more: str) -> str:
    """Return the published command with further words at its end."""
    return LORA.rstrip() + f" {more}\n"


def test_a_published_command(tmp_path: Path) -> None:
    """LoRA of all linear layers with fp32 adapters, recomputed by default."""
    found = checked(tmp_path, LORA)
    run = run_in(found)
    assert (found.trainer, not found.withdrawn) == ("ms-swift", True)
    assert run.runtime.adapters is not None
    assert (run.runtime.adapters.rank, len(run.runtime.adapters.targets)) == (8, 6)
    assert run.runtime.optimizer.master_bytes == 4
    assert run.strategy.recomputed.kind == "full"
    assert (run.strategy.micro_batch, run.strategy.micro_batches) == (1, 16)
    assert run.kernels.repeated_heads
    assert run.kernels.loss == "whole"


def test_a_file_is_its_command(tmp_path: Path) -> None:
    """YAML and JSON give the run of the same words, alone and with other launchers."""
    document: dict[str, Any] = {
        "model": "Qwen/Qwen3-8B",
        "torch_dtype": "bfloat16",
        "tuner_type": "lora",
        "target_modules": "all-linear",
        "dataset": ["a#500"],
        "max_length": 2048,
        "model_name": "swift-bot",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 16,
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "sft.json").write_text(json.dumps(document))
    alone = read_checked(str(tmp_path / "sft.yaml"), world_size=1, gpu="h100-80gb")
    want = run_in(checked(tmp_path, LORA))
    assert run_in(alone) == want
    assert alone.trainer == "ms-swift"
    for command in ("swift sft sft.yaml\n", "swift pt sft.json\n",
                    "torchrun --nproc_per_node 1 swift/cli/sft.py sft.yaml\n"):  # fmt: skip
        assert run_in(checked(tmp_path, command)) == want
    over = checked(tmp_path, "swift sft sft.yaml --max_length 1024\n")
    assert run_in(over).seq_length == 1024


def test_defaults(tmp_path: Path) -> None:
    """Rank 8, one sequence, and 16 sequences a step over all ranks (`TrainArgumentsMixin`)."""
    command = "NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-8B --dataset a --max_length 4096\n"
    run = run_in(checked(tmp_path, command, 4))
    assert run.runtime.adapters is not None
    assert run.runtime.adapters.rank == 8
    assert (run.strategy.micro_batch, run.strategy.micro_batches) == (1, 4)
    assert run.runtime.precision.kind == "bf16"
    # `--torch_dtype float32` computes in fp16
    wide = run_in(checked(tmp_path, command.replace("\n", " --torch_dtype float32\n"), 4))
    assert wide.runtime.precision.kind == "fp16"


def test_base_of_four_bits(tmp_path: Path) -> None:
    """bitsandbytes quantises the base; other methods have no price."""
    found = checked(tmp_path, with_words("--quant_method bnb --quant_bits 4"))
    assert not found.withdrawn
    adapters = run_in(found).runtime.adapters
    assert adapters is not None
    assert adapters.base == "nf4"
    # PEFT makes adapters in fp32
    assert run_in(found).runtime.optimizer.master_bytes == 4
    assert checked(tmp_path, with_words("--quant_method hqq --quant_bits 4")).withdrawn


@pytest.mark.parametrize(
    ("name", "zero", "host"),
    [("zero1", 1, 0.0), ("zero2", 2, 0.0), ("zero3", 3, 0.0), ("zero3_offload", 3, 1.0)],
)
def test_configurations_by_name(tmp_path: Path, name: str, zero: int, host: float) -> None:
    """`--deepspeed zero3` is a file of ms-swift."""
    found = checked(tmp_path, f"NPROC_PER_NODE=4 {with_words(f'--deepspeed {name}').lstrip()}", 4)
    run = run_in(found)
    assert not found.withdrawn
    assert (run.runtime.states.keeper, run.split.zero) == ("deepspeed", zero)
    assert run.runtime.optimizer.offload == host


def test_fsdp(tmp_path: Path) -> None:
    """`--fsdp fsdp2` shards and recomputes; a file may do less."""
    start = f"NPROC_PER_NODE=4 {with_words('--fsdp').lstrip()}".rstrip()
    run = run_in(checked(tmp_path, f"{start} fsdp2\n", 4))
    assert (run.runtime.states.keeper, run.split.zero) == ("accelerate", 3)
    section = {"fsdp_version": 2, "activation_checkpointing": False}
    own = {"fsdp": "shard_grad_op auto_wrap offload", "fsdp_config": section}
    (tmp_path / "own.json").write_text(json.dumps(own))
    other = run_in(checked(tmp_path, f"{start} own.json --gradient_checkpointing false\n", 4))
    assert other.split.zero == 2
    assert other.runtime.optimizer.offload_weights
    assert other.strategy.recomputed.kind == "none"
    own["fsdp_config"] = {**section, "activation_cpu_offload": True}
    (tmp_path / "own.json").write_text(json.dumps(own))
    assert checked(tmp_path, f"{start} own.json\n", 4).withdrawn


def test_one_process_on_several_gpus(tmp_path: Path) -> None:
    """Without NPROC_PER_NODE, layers are placed on all GPUs of one process."""
    several = LORA.replace("DEVICES=0 ", "DEVICES=0,1 ")
    with pytest.raises(DocumentError):
        checked(tmp_path, several, 1)
    started = "NPROC_PER_NODE=2 \\" + several
    assert run_in(checked(tmp_path, started, 2)).strategy.dp == 2
    with pytest.raises(DocumentError):
        checked(tmp_path, LORA, 8)


def test_packing_needs_flash_attention(tmp_path: Path) -> None:
    """It refuses packed samples with other kernels (`_check_padding_free`)."""
    for word in ("--packing true", "--padding_free true"):
        found = checked(tmp_path, with_words(word))
        assert [one.id for one in found.findings if one.kind == "illegal"] == [
            "ms-swift.packing-attention"
        ]
        kernel = checked(tmp_path, with_words(f"{word} --attn_impl flash_attn"))
        assert not any(one.kind == "illegal" for one in kernel.findings)
        assert kernel.batching is not None
    longer = "--packing true --attn_impl flash_attention_3 --packing_length 8192"
    assert run_in(checked(tmp_path, with_words(longer))).seq_length == 8192


@pytest.mark.parametrize(
    "words",
    [
        "--tuner_type adalora",
        "--tuner_backend unsloth",
        "--use_galore true",
        "--optimizer muon",
        "--freeze_parameters_ratio 0.5",
        "--loss_scale hermes",
        "--task_type seq_cls",
        "--sequence_parallel_size 2",
        "--lora_dtype bfloat16",
        "--modules_to_save embed_tokens",
        "--new_special_tokens a.txt",
        "--experts_impl grouped_mm",
        "--use_liger_kernel nonsense",
        "--no_such_word 3",
    ],
)
def test_words_without_a_price_withdraw_the_verdict(tmp_path: Path, words: str) -> None:
    """A word that is unknown, or that changes memory or time without a formula."""
    found = checked(tmp_path, with_words(words))
    assert found.withdrawn or found.run is None


def test_a_plan_has_its_price(tmp_path: Path) -> None:
    """An export names weights, data and nothing else, and is the run of its Trainer."""
    run = run_in(checked(tmp_path, LORA))
    trained = as_trained("ms-swift", run)
    place = ExportTarget(num_nodes=1, gpus_per_node=1, model="qwen3-8b")
    found = written(trained, engine="ms-swift", place=place)
    assert found.losses == ()
    assert account_of(found.runs).peak_bytes == account_of(trained).peak_bytes
    assert found.launch.count(":?") == 1
    assert "DATA_PATH:?" in found.launch
    document = yaml.safe_load(found.files["swift.yaml"])
    assert (document["model"], document["use_hf"]) == ("Qwen/Qwen3-8B", True)
    # without flash attention samples are padded
    assert document["packing"] is False


def test_variables_in_a_file(tmp_path: Path) -> None:
    """`ENV` sets variables that are not set, such as the number of ranks (`parse_yaml_args`)."""
    document = {"ENV": {"NPROC_PER_NODE": 4, "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
                "model": "Qwen/Qwen3-8B", "tuner_type": "lora", "dataset": ["a#500"],
                "torch_dtype": "bfloat16", "max_length": 2048}  # fmt: skip
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(document))
    alone = read_checked(str(tmp_path / "sft.yaml"), world_size=None, gpu="h100-80gb")
    assert not alone.withdrawn
    assert run_in(alone).strategy.gpus == 4
    assert run_in(checked(tmp_path, "swift sft sft.yaml\n", 4)) == run_in(alone)
    assert run_in(checked(tmp_path, "NPROC_PER_NODE=2 swift sft sft.yaml\n", 2)).strategy.gpus == 2
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump({**document, "ENV": "NPROC_PER_NODE"}))
    with pytest.raises(DocumentError, match="ENV"):
        read_checked(str(tmp_path / "sft.yaml"), world_size=4, gpu="h100-80gb")

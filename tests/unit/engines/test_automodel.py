"""Recipes of NeMo Automodel: their keys, defaults and limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.price.account import account_of
from autopar.price.torch_layers import layer_saved_bytes
from autopar.records import replace
from autopar.run.run import Run
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.reader import CheckedFile
from search.engines.table import as_trained, read_checked
from search.engines.tuners import automodel

# examples/llm_finetune/qwen/qwen3_0p6b_hellaswag.yaml of Automodel, with layers of transformers
RECIPE: dict[str, Any] = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
    "step_scheduler": {"global_batch_size": 64, "local_batch_size": 8, "ckpt_every_steps": 200},
    "dist_env": {"backend": "nccl", "timeout_minutes": 1},
    "rng": {"_target_": "nemo_automodel.components.training.rng.StatefulRNG", "seed": 1111},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": "Qwen/Qwen3-8B",
        "force_hf": True,
        "use_liger_kernel": False,
    },
    "checkpoint": {"enabled": False},
    "distributed": {
        "strategy": "fsdp2",
        "dp_size": "none",
        "tp_size": 1,
        "cp_size": 1,
        "reshard_after_forward": True,
    },
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
    "dataset": {
        "_target_": "nemo_automodel.components.datasets.llm.hellaswag.HellaSwag",
        "seq_length": 2048,
    },
    "packed_sequence": {"packed_sequence_size": 0},
    "dataloader": {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader"},
    "validation_dataset_other": {"split": "validation"},
    "optimizer": {"_target_": "torch.optim.AdamW", "fused": True, "lr": 1e-5},
    "lr_scheduler": {"lr_decay_style": "cosine"},
}


def with_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe with other values, by dotted key."""
    found = {key: dict(one) if isinstance(one, dict) else one for key, one in RECIPE.items()}
    for key, value in values.items():
        section, _, name = key.partition(".")
        found.setdefault(section, {})[name] = value
    return found


def checked(folder: Path, values: Mapping[str, Any], gpus: int = 8) -> CheckedFile:
    """Return the result of checking a recipe."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(with_values(values)))
    return read_checked(str(folder / "recipe.yaml"), world_size=gpus, gpu="h100-80gb")


def run_in(found: CheckedFile) -> Run:
    """Return the priced run of a file; its absence fails the test."""
    assert found.run is not None, found.findings
    return replace(found.run, name="")


def test_a_recipe(tmp_path: Path) -> None:
    """Weights of the checkpoint's 16 bits, gradients reduced in fp32, tables as FSDP units."""
    found = checked(tmp_path, {})
    run = run_in(found)
    assert (found.trainer, found.withdrawn) == ("NeMo Automodel", {})
    assert (run.split.zero, run.split.replicas, run.seq_length) == (3, 1, 2048)
    assert (run.strategy.micro_batch, run.strategy.micro_batches) == (8, 1)
    optimizer, states = run.runtime.optimizer, run.runtime.states
    assert (optimizer.master_bytes, optimizer.moments_bytes) == (0, 4)
    assert (states.wide_gradients, states.apart) == (True, True)
    assert (run.kernels.loss, run.kernels.quirks.logit_bytes) == ("whole", 12)
    wide = run_in(checked(tmp_path, {"model.torch_dtype": "float32"}))
    assert (wide.runtime.optimizer.master_bytes, wide.runtime.optimizer.moments_bytes) == (4, 8)


def test_reduction_in_32_bits_needs_memory(tmp_path: Path) -> None:
    """A unit is copied to fp32 before its reduction; 16 bits need half of it."""
    small = {"step_scheduler.global_batch_size": 8, "step_scheduler.local_batch_size": 1}
    small["distributed.activation_checkpointing"] = True
    one = run_in(checked(tmp_path, small))
    policy = {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    other = run_in(checked(tmp_path, {**small, "distributed.mp_policy": policy}))
    assert other.runtime.states.wide_gradients is None
    # nothing accumulates, so the two copies of the largest unit that is reduced differ
    table = one.model.vocab * one.model.hidden
    difference = account_of(one).peak_bytes - account_of(other).peak_bytes
    assert 0 < difference <= 2 * 2 * table


def test_a_command_overrides_its_file(tmp_path: Path) -> None:
    """`automodel recipe.yaml --key.subkey=value`, and torchrun with its module."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    starts = (
        "automodel recipe.yaml --nproc-per-node 4",
        "torchrun --nproc-per-node 4 -m nemo_automodel.cli.app recipe.yaml",
    )
    for start in starts:
        words = f"{start} --step_scheduler.local_batch_size=2 --dataset.seq_length 1024\n"
        (tmp_path / "run.sh").write_text(words)
        run = run_in(read_checked(str(tmp_path / "run.sh"), world_size=None, gpu="h100-80gb"))
        assert (run.strategy.gpus, run.strategy.micro_batch, run.seq_length) == (4, 2, 1024)


def test_adapters(tmp_path: Path) -> None:
    """Adapters have the type of the weights that they are next to."""
    lora = {
        "peft._target_": "nemo_automodel.components._peft.lora.PeftConfig",
        "peft.target_modules": "*_proj",
        "peft.dim": 16,
    }
    found = checked(tmp_path, lora)
    run = run_in(found)
    assert not found.withdrawn
    assert run.runtime.adapters is not None
    assert (run.runtime.adapters.rank, len(run.runtime.adapters.targets)) == (16, 6)
    # frozen tables stay in the root
    assert (run.runtime.optimizer.master_bytes, run.runtime.states.apart) == (0, False)
    wide = run_in(checked(tmp_path, {**lora, "model.torch_dtype": "float32"}))
    assert wide.runtime.adapters is not None
    assert wide.runtime.adapters.wide
    assert wide.runtime.optimizer.master_bytes == 4


@pytest.mark.parametrize(
    ("values", "zero", "replicas", "host"),
    [
        ({"reshard_after_forward": False}, 2, 1, False),
        ({"dp_replicate_size": 4}, 3, 4, False),
        ({"dp_replicate_size": "none", "cp_size": "none"}, 3, 1, False),
        ({"offload_policy": {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}}, 3, 1, True),
        ({"strategy": "ddp"}, 0, 1, False),
    ],
)
def test_sharding(
    tmp_path: Path, values: dict[str, Any], zero: int, replicas: int, host: bool
) -> None:
    """Resharding is ZeRO-3, replicas of shards are HSDP, and DDP shards nothing."""
    if values.get("strategy") == "ddp":
        found = checked(tmp_path, {"distributed.strategy": "ddp"})
    else:
        found = checked(tmp_path, {f"distributed.{key}": value for key, value in values.items()})
    run = run_in(found)
    assert (run.split.zero, run.split.replicas) == (zero, replicas)
    assert run.runtime.optimizer.offload_weights is host
    assert (run.runtime.states.wide_gradients is True) is (zero > 0)


@pytest.mark.parametrize(
    "values",
    [
        {"distributed.tp_size": 2},
        {"distributed.cp_size": 2},
        {"distributed.pp_size": 2},
        {"distributed.ep_size": 2},
        {"distributed.strategy": "megatron_fsdp"},
        {"loss_fn._target_": "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy"},
        {"loss_fn._target_": "nemo_automodel.components.loss.chunked_ce.ChunkedCrossEntropy"},
        {"optimizer._target_": "flashoptim.FlashAdamW"},
        {"distributed.activation_checkpointing": "selective"},
        {"model.torch_dtype": "float16"},
        {"recipe": "KnowledgeDistillationRecipeForNextTokenPrediction"},
    ],
)
def test_settings_without_a_price(tmp_path: Path, values: dict[str, Any]) -> None:
    """They leave no run, with one finding that names the key."""
    document = with_values({k: v for k, v in values.items() if "." in k})
    document |= {key: value for key, value in values.items() if "." not in key}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    found = read_checked(str(tmp_path / "recipe.yaml"), world_size=8, gpu="h100-80gb")
    assert found.run is None
    (one,) = [one for one in found.findings if one.id == "read.unpriced"]
    assert one.values["key"] == next(iter(values))


@pytest.mark.parametrize(
    "values",
    [
        {"model.use_liger_kernel": True},
        {"fp8.enabled": True},
        {"compile.enabled": True},
        {"distributed.enable_fsdp2_prefetch": True},
        {"quantization.load_in_4bit": True},
        {"distributed.no_such_key": 3},
        {"model.backend": {"attn": "te"}},
    ],
)
def test_keys_that_withdraw_the_verdict(tmp_path: Path, values: dict[str, Any]) -> None:
    """A key that is unknown, or that changes memory or time without a formula, keeps the run."""
    found = checked(tmp_path, values)
    assert found.run is not None
    assert found.withdrawn


TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512,
    "intermediate_size": 1408, "num_hidden_layers": 1, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1000, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip


def test_own_layers_with_compiled_norms(tmp_path: Path) -> None:
    """Bytes per token are those that autograd saves in Automodel 0.7.0 (torch 2.13)."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    values = {"model.pretrained_model_name_or_path": ".", "dataset.seq_length": 256}
    found = checked(tmp_path, {**values, "model.force_hf": False})
    run = run_in(found)
    # 8 bytes of both norms are not saved; with a mask, keys and values are repeated for all heads
    seen, repeated = 17_952, 2 * 2 * 6 * 64
    assert layer_saved_bytes(run.rank_layers[0]) == run.tokens * (seen + repeated + 8)
    assert found.withdrawn.keys() == {"time"}
    theirs = run_in(checked(tmp_path, values))
    more = layer_saved_bytes(theirs.rank_layers[0]) - layer_saved_bytes(run.rank_layers[0])
    assert more == 2 * run.tokens * 512 * (4 + 2 - 2)


def test_own_layers_of_qwen3(tmp_path: Path) -> None:
    """Their bytes are those of transformers, as autograd sees them in Automodel 0.7.0."""
    sizes = {**TINY, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    values = {"model.pretrained_model_name_or_path": ".", "dataset.seq_length": 256}
    run = run_in(checked(tmp_path, {**values, "model.force_hf": False}))
    seen, repeated = 25_936, 2 * 2 * 6 * 64
    assert layer_saved_bytes(run.rank_layers[0]) == run.tokens * (seen + repeated)


@pytest.mark.parametrize(
    ("model", "withdrawn"),
    [
        ("Qwen/Qwen3-8B", set()),
        ("Qwen/Qwen2.5-7B", {"time"}),
        ("Qwen/Qwen3-30B-A3B", {"memory", "time"}),
        ("mistralai/Mistral-7B-v0.1", set()),
    ],
)
def test_layers_of_classes(tmp_path: Path, model: str, withdrawn: set[str]) -> None:
    """Automodel has separate layers for some classes; Mistral is not one of them."""
    values = {"model.pretrained_model_name_or_path": model, "model.force_hf": False}
    found = checked(tmp_path, values)
    assert found.withdrawn.keys() == withdrawn
    forced = run_in(checked(tmp_path, {**values, "model.force_hf": True}))
    assert (run_in(found) == forced) == (withdrawn != {"time"})


@pytest.mark.parametrize(
    ("classes", "withdrawn"),
    [
        (["LlamaForCausalLM"], {"time"}),
        (["Qwen3_5ForConditionalGeneration"], {"memory", "time"}),
        ("LlamaForCausalLM", {"memory", "time"}),
        ({"a": 1}, {"memory", "time"}),
        (5, {"memory", "time"}),
        ([], set()),
    ],
)
def test_class_of_a_configuration(tmp_path: Path, classes: Any, withdrawn: set[str]) -> None:
    """`architectures` names the class; without one Automodel takes the layers of transformers."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": classes}))
    values = {"model.pretrained_model_name_or_path": ".", "model.force_hf": False}
    assert checked(tmp_path, values).withdrawn.keys() == withdrawn


def test_a_folder_has_no_class_by_its_name(tmp_path: Path) -> None:
    """Only names of models tell the class, not a folder that is called like one."""
    assert automodel._class_of("meta-llama/Llama-3.1-8B-Instruct", tmp_path) == "Llama"
    (tmp_path / "llama-2-mine").mkdir()
    assert automodel._class_of(str(tmp_path / "llama-2-mine"), tmp_path) is None
    assert automodel._class_of("qwen2-mine", tmp_path) is None


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """A builder of transformers makes the layers of transformers for every class."""
    values = {"model.pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B"}
    builder = {"model._target_": "transformers.AutoModelForCausalLM.from_pretrained"}
    found = checked(tmp_path, {**values, **builder, "model.force_hf": False})
    assert found.withdrawn == {}
    assert run_in(found) == run_in(checked(tmp_path, values))


def test_packed_samples_of_own_layers(tmp_path: Path) -> None:
    """Transformer Engine's attention reads packed tokens, if it is installed."""
    packed = {"packed_sequence.packed_sequence_size": 2048}
    assert checked(tmp_path, packed).withdrawn == {}
    found = checked(tmp_path, {**packed, "model.force_hf": False})
    assert found.withdrawn.keys() == {"memory", "time"}


def test_compiled_norms_of_wide_hidden_states(tmp_path: Path) -> None:
    """Norms in fp32 save their input alone, 4 bytes per element less than those of transformers."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    wide = {
        "model.pretrained_model_name_or_path": ".", "model.torch_dtype": "float32",
        "distributed.strategy": "ddp", "distributed.autocast_dtype": "bfloat16",
    }  # fmt: skip
    own, theirs = (
        run_in(checked(tmp_path, {**wide, "model.force_hf": forced})) for forced in (False, True)
    )
    more = layer_saved_bytes(theirs.rank_layers[0]) - layer_saved_bytes(own.rank_layers[0])
    assert more == 2 * own.tokens * 512 * 4


@pytest.mark.parametrize(
    "config", ["Qwen/Qwen3-8B", {"pretrained_model_name_or_path": "Qwen/Qwen3-8B"}]
)
def test_a_model_from_its_configuration(tmp_path: Path, config: Any) -> None:
    """`from_config` takes a name, or a section that loads the configuration."""
    values = {"model.pretrained_model_name_or_path": None, "model.config": config}
    assert run_in(checked(tmp_path, values)) == run_in(checked(tmp_path, {}))


def test_changes_of_keys(tmp_path: Path) -> None:
    """A suggested change is a key with a value, after which the recipe describes the other run."""
    found = checked(tmp_path, {"step_scheduler.global_batch_size": 128})
    run = run_in(found)
    other = run_in(
        checked(
            tmp_path,
            {"step_scheduler.global_batch_size": 128, "step_scheduler.local_batch_size": 4},
        )
    )
    assert found.run is not None
    changes = found.written(replace(other, name=found.run.name))
    assert changes == (("step_scheduler.local_batch_size", "8", "4"),)
    assert run.strategy.micro_batches == 2


def test_a_plan_has_its_price(tmp_path: Path) -> None:
    """An export names weights, data and nothing else, and is the run of Automodel."""
    trained = as_trained("automodel", run_in(checked(tmp_path, {})))
    place = ExportTarget(num_nodes=1, gpus_per_node=8, model="qwen3-8b")
    found = written(trained, engine="automodel", place=place)
    assert found.losses == ()
    assert account_of(found.runs).peak_bytes == account_of(trained).peak_bytes
    assert found.launch.count(":?") == 1
    assert "DATA_PATH:?" in found.launch
    document = yaml.safe_load(found.files["automodel.yaml"])
    assert document["model"]["pretrained_model_name_or_path"] == "Qwen/Qwen3-8B"
    assert document["model"]["force_hf"] is True

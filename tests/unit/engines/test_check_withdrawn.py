"""Arguments that no reader understands withdraw the estimates that they may change.

Launch files are constructed; their shapes are those of published scripts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import DocumentError
from autopar.price.account import account_of
from autopar.run.rules import Estimate
from search.commands import check
from search.engines.huggingface import names
from search.engines.huggingface.script import ScriptWords, program_of, translated
from search.engines.reader import CheckedFile
from search.engines.table import read_checked
from search.engines.text import problem_of_text

BOTH = {"memory", "time"}
ZERO3: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
}
TRAINER = (
    "deepspeed --num_gpus 8 run_clm.py --deepspeed ds.json --model_name_or_path "
    "meta-llama/Llama-2-7b-hf --per_device_train_batch_size 1 --gradient_accumulation_steps 2 "
    "--bf16 --output_dir out "
)
LONG = "--block_size 2048 "
FSDP = {
    "distributed_type": "FSDP",
    "num_processes": 8,
    "num_machines": 1,
    "mixed_precision": "bf16",
    "fsdp_config": {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    },
}
MEGATRON = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 "
    "--num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 "
    "--vocab-size 32000 --micro-batch-size 4 --global-batch-size 32 --train-iters 10 --bf16 "
)
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
seq_len = 8192
local_batch_size = 1
steps = 10
[parallelism]
data_parallel_shard_degree = -1
"""
BRIDGE = (
    "python scripts/performance/setup_experiment.py -m llama -mr llama3_70b -ng 64 -g h100 -c bf16 "
)
Read = Callable[..., CheckedFile]


@pytest.fixture
def checked(tmp_path: Path) -> Read:
    """Return a function that checks a script with a DeepSpeed or accelerate configuration."""

    def read(text: str, document: Mapping[str, Any] = ZERO3, **asked: Any) -> CheckedFile:
        for name in ("ds.json", "a.yaml"):
            # JSON is YAML.
            (tmp_path / name).write_text(json.dumps(document), encoding="utf-8")
        path = tmp_path / ("job.toml" if text.startswith("\n[") else "run.sh")
        path.write_text(text, encoding="utf-8")
        return read_checked(str(path), **{"world_size": None, "gpu": "h100-80gb", **asked})

    return read


@pytest.fixture
def configured(tmp_path: Path) -> Read:
    """Return a function that checks a configuration without its script."""

    def read(document: Mapping[str, Any], name: str = "a.yaml", **asked: Any) -> CheckedFile:
        path = tmp_path / name
        path.write_text(json.dumps(document), encoding="utf-8")
        given = {"model": "llama-2-7b", "seq_length": 2048, "world_size": 8, "gpu": "h100-80gb"}
        return read_checked(str(path), **(given | asked))

    return read


def _withdrawn(file: CheckedFile) -> dict[Estimate, set[str]]:
    return {one: {each.id for each in found} for one, found in file.withdrawn.items()}


def _with(document: Mapping[str, Any], **keys: Any) -> dict[str, Any]:
    """Return a configuration with other keys; a mapping is merged into its section."""
    found = dict(document)
    for key, value in keys.items():
        found[key] = {**found.get(key, {}), **value} if isinstance(value, Mapping) else value
    return found


def _peak_gib(file: CheckedFile) -> float:
    assert file.run is not None, file.findings
    return account_of(file.run).peak_bytes / 2**30


# --------------------------------------------------------------------------------------------------
# Arguments of every engine.


@pytest.mark.parametrize(
    ("text", "gpus", "changes", "ident"),
    [
        (MEGATRON + "--new-switch 8", None, BOTH, "megatron.unknown"),
        (MEGATRON + "--no-bias-dropout-fusion", None, BOTH, "megatron.unpriced"),
        (MEGATRON + "--softmax-type learnable", None, {"time"}, "megatron.unpriced"),
        (MEGATRON + "--vocab-extra-ids 100", None, BOTH, "megatron.unpriced"),
        (
            MEGATRON + "--no-clone-scatter-output-in-embedding",
            None,
            {"memory"},
            "megatron.unpriced",
        ),
        ("export NVTE_OF_TOMORROW=1\n" + MEGATRON, None, BOTH, "megatron.unknown"),
        ("export FSDP_USE_ORIG=1\n" + TRAINER + LONG, None, BOTH, "deepspeed.unknown"),
        (TRAINER + LONG + "--new_switch 3", None, BOTH, "deepspeed.unknown"),
        (TRAINER + LONG + "--liger_kernel_config x", None, BOTH, "deepspeed.unpriced"),
        (TRAINER + LONG + "--optim ademamix", None, BOTH, "deepspeed.unpriced"),
        (TRAINER + LONG + "--optim adamw_torch_4bit", None, BOTH, "deepspeed.unpriced"),
        (TRAINER + LONG + "--optim galore_adamw", None, BOTH, "deepspeed.unpriced"),
        (TRAINER + LONG + "--my_own_offload on", None, BOTH, "deepspeed.unpriced"),
        (TRAINER + LONG + "--attn_implementation xformers", None, BOTH, "deepspeed.unknown"),
        (TRAINER + LONG + "--torch_compile perhaps", None, BOTH, "deepspeed.unpriced"),
        (TRAINER + LONG + "--max_steps many", None, BOTH, "deepspeed.unknown"),
        (TRAINER + LONG + "--gradient_checkpointing $ON", None, BOTH, "deepspeed.unpriced"),
        (TITAN + "[training.more]\nkey = 1\n", 8, BOTH, "torchtitan.unknown"),
        (TITAN + '[compile]\nenable = true\nbackend = "eager"\n', 8, BOTH, "torchtitan.unpriced"),
        (TITAN + "[debug]\ndeterministic = true\n", 8, {"time"}, "torchtitan.unpriced"),
        (BRIDGE + "model.new_switch=7", None, BOTH, "bridge.unknown"),
        (BRIDGE + "--lock_gpu_freq 1200", None, {"time"}, "bridge.unpriced"),
    ],
)
def test_an_argument_withdraws_what_it_may_change(
    text: str, gpus: int | None, changes: set[Estimate], ident: str, checked: Read
) -> None:
    """And nothing else; without it, both estimates are given."""
    file = checked(text, world_size=gpus)
    assert _withdrawn(file) == {one: {ident} for one in changes}
    assert file.run is not None
    (found,) = (one for one in file.findings if one.withdraws)
    flag = str(found.values["flag"])
    left = checked(text, world_size=gpus, ignored=[flag.lstrip("-").replace("-", "_")])
    assert not left.withdrawn
    assert flag in {one.flag for one in left.harmless}


@pytest.mark.parametrize(
    "words",
    [
        "--logging_steps 5 --save_strategy no --report_to wandb --warmup_ratio 0.03 --tf32 True",
        "--optim adamw_torch --max_grad_norm 1.0 --lr_scheduler_type cosine --seed 1",
        "--max_steps -1 --gradient_checkpointing no --torch_compile False --bf16 yes",
        "--use_liger_kernel false --label_smoothing_factor 0.0 --torch_compile_mode default",
        "--dataset_name a/b --packing true --ddp_timeout 1800 --push_to_hub False",
        "--eval_strategy steps --per_device_eval_batch_size 4 --dataloader_num_workers 8",
        "--use_peft False --lora_r 16 --lora_target_modules q_proj --use_dora true",
        "--output_dir $OUT --run_name $(date)",
        "--gradient_checkpointing_kwargs '{\"use_reentrant\": false}' --torch_dtype bfloat16",
    ],
)
def test_common_arguments_of_trainers_are_harmless(words: str, checked: Read) -> None:
    file = checked(TRAINER + LONG + words)
    assert not file.withdrawn, file.findings
    assert file.run == checked(TRAINER + LONG).run


def test_a_name_has_one_row() -> None:
    rows = [name for text in names._HARMLESS.values() for name in text.split()]
    rows += names._UNPRICED
    assert sorted(name for name in {*rows} if rows.count(name) > 1) == []


def test_what_is_looked_up_has_no_row(checked: Read) -> None:
    """Arguments with a price are neither harmless nor without one, but for values of them."""
    words = ScriptWords(words=translated({"use-peft": ("True",)}, "").flags, asked=set())
    found = checked(TRAINER + LONG + "--use_peft --lora_r 8 --load_in_4bit --torch_compile")
    assert not found.withdrawn
    assert words.yes("use-peft")
    for flag in ("per-device-train-batch-size", "gradient-checkpointing", "max-length", "lora-r"):
        assert not names.harmless(flag)
        assert names.unpriced(flag) is None


def test_arguments_that_the_script_declares_are_harmless(checked: Read, tmp_path: Path) -> None:
    """But for names of a setting with an effect; the script is read, not run."""
    program = tmp_path / "run_clm.py"
    program.write_text(
        "import argparse\nraise SystemExit\n"
        "class Own:\n    tone: str = 'low'\n    pack_all: bool = False\n"
        "p = argparse.ArgumentParser()\np.add_argument('-s', '--my-style', type=int)\n",
        encoding="utf-8",
    )
    assert program_of(program).flags == {"tone", "pack-all", "my-style"}
    assert not checked(TRAINER + LONG + "--my_style 3 --tone high").withdrawn
    assert _withdrawn(checked(TRAINER + LONG + "--pack_all true")).keys() == BOTH
    program.write_text("def broken(:\n", encoding="utf-8")
    assert program_of(program).flags == set()
    assert _withdrawn(checked(TRAINER + LONG + "--my_style 3")).keys() == BOTH


# --------------------------------------------------------------------------------------------------
# Aliases.


@pytest.mark.parametrize(
    ("own", "known"),
    [
        ("--use_peft_lora True --lora_r 16 --lora_target_modules q_proj,v_proj",
         "--use_peft True --lora_r 16 --lora_target_modules q_proj v_proj"),
        ("--use_lora --lora_rank 4 --use_4bit_quantization True",
         "--use_peft --lora_r 4 --load_in_4bit True"),
        ("--use_gradient_checkpointing True", "--gradient_checkpointing True"),
        ("--finetuning_type lora --lora_target q_proj,v_proj --quantization_bit 4",
         ("--use_peft --lora_r 8 --lora_dropout 0 --lora_target_modules q_proj v_proj "
         "--load_in_4bit --use_bnb_nested_quant --gradient_checkpointing")),
        ("--finetuning_type full --disable_gradient_checkpointing True", ""),
        ("--bits 4 --lora_r 64 --full_finetune False --optim paged_adamw_32bit",
         ("--use_peft --load_in_4bit --use_bnb_nested_quant --lora_r 64 --lora_dropout 0.0 "
             "--gradient_checkpointing "
         "--lora_target_modules all-linear --optim paged_adamw_32bit")),
    ],
)  # fmt: skip
def test_words_of_own_parsers_are_taken_for_those_of_trl(
    own: str, known: str, checked: Read
) -> None:
    """A finding names it."""
    file, same = checked(TRAINER + LONG + own), checked(TRAINER + LONG + known)
    assert file.run is not None, file.findings
    assert file.run == same.run
    assert not file.withdrawn
    assert own.startswith("--finetuning_type full") or any(
        one.id == "read.note" for one in file.findings
    )


def test_source_and_target_are_one_sequence(checked: Read) -> None:
    run = checked(TRAINER + "--max_source_length 1024 --max_target_length 512").run
    assert run is not None
    assert run.seq_length == 1536


def test_adapters_of_fused_projections(checked: Read) -> None:
    """A base that is frozen needs no moments, and one adapter for queries, keys and values."""
    whole = _peak_gib(checked(TRAINER + LONG))
    file = checked(TRAINER + LONG + "--use_peft --lora_target_modules qkv_proj o_proj")
    assert _peak_gib(file) < 0.6 * whole
    assert file.run is not None
    adapters = file.run.runtime.adapters
    assert adapters is not None
    assert (adapters.fused, len(adapters.targets)) == (True, 4)


def test_arguments_in_a_file_of_trl_are_read(checked: Read, tmp_path: Path) -> None:
    """The command takes precedence; a file that is not there withdraws the estimates."""
    words = "accelerate launch --config_file a.yaml sft.py --config {} --max_length 1024"
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: mistralai/Mistral-7B-v0.1\nper_device_train_batch_size: 4\n"
        "max_length: 2048\ngradient_checkpointing: true\npacking: false\nuse_peft: false\n",
        encoding="utf-8",
    )
    file = checked(words.format("sft.yaml"), FSDP)
    run = file.run
    assert run is not None, file.findings
    assert not file.withdrawn
    assert (run.strategy.micro_batch, run.seq_length, run.split.recompute) == (4, 1024, "full")
    lost = checked(words.format("lost.yaml"), FSDP, model="mistral-7b")
    assert _withdrawn(lost).keys() == BOTH


# --------------------------------------------------------------------------------------------------
# Keys of DeepSpeed and accelerate.


@pytest.mark.parametrize(
    "document",
    [
        _with(FSDP, fsdp_config={"fsdp_auto_wrap_policy": "HYBRID"}),
        _with(FSDP, fsdp_config={"fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}),
        _with(FSDP, dynamo_config={"dynamo_backend": "CUDAGRAPHS"}),
        _with(FSDP, dynamo_config={"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}),
        _with(FSDP, parallelism_config={"parallelism_config_cp_size": 2}),
        _with(FSDP, parallelism_config={"parallelism_config_new": 2}),
        _with(FSDP, new_switch=1),
    ],
)
def test_keys_of_accelerate_withdraw(document: dict[str, Any], configured: Read) -> None:
    assert _withdrawn(configured(document)).keys() == BOTH
    assert not configured(FSDP).withdrawn


@pytest.mark.parametrize(
    "section",
    [
        {"fsdp_auto_wrap_policy": "NO_WRAP"},
        {"fsdp_auto_wrap_policy": None},
        {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000000},
        {"fsdp_version": 2, "fsdp_auto_wrap_policy": None},
    ],
)
def test_units_that_are_no_layers_withdraw_the_time(
    section: dict[str, Any], configured: Read
) -> None:
    """Wrapping that is missing is NO_WRAP; memory of such units is counted."""
    file = configured(_with(FSDP, fsdp_config=section))
    assert _withdrawn(file).keys() == {"time"}
    assert file.run is not None
    assert (file.run.runtime.states.least_unit > 10**9) == ("fsdp_min_num_params" not in section)


def test_the_configuration_of_the_trainer_precedes_that_of_the_launcher(checked: Read) -> None:
    words = TRAINER.replace("deepspeed --num_gpus 8", "accelerate launch --config_file a.yaml")
    file = checked(words + LONG, _with(ZERO3, zero_optimization={"stage": 2}), world_size=8)
    assert file.run is not None
    assert (file.trainer, file.run.split.zero) == ("DeepSpeed", 2)


def test_settings_that_are_off_withdraw_nothing(configured: Read, checked: Read) -> None:
    """Not even with a value that has no price."""
    idle = "--moe-expert-capacity-factor 1.0 --moe-apply-probs-on-input --fsdp-double-buffer "
    idle += "--no-batch-p2p-comm --tp-comm-overlap-rs-dgrad --cuda-graph-modules attn"
    file = checked(MEGATRON + idle)
    assert not file.withdrawn, file.findings
    assert len([one for one in file.findings if one.id == "megatron.no-effect"]) == 6
    words = "--cuda-graph-impl none --tensor-parallel-num-weight-shards 1"
    assert not checked(MEGATRON + words).withdrawn
    assert checked(MEGATRON + words.replace("1", "8")).run is None
    off = {"dynamo_backend": "NO", "dynamo_mode": "max-autotune"}
    assert not configured(_with(FSDP, dynamo_config=off)).withdrawn
    text = TITAN + '[compile]\nenable = false\nbackend = "eager"\n'
    assert not checked(text, world_size=8).withdrawn


def test_accelerate_compiles_layers(configured: Read) -> None:
    for words in ({"dynamo_backend": "INDUCTOR"}, {"backend": "inductor"}):
        file = configured(_with(FSDP, dynamo_config=words))
        assert not file.withdrawn, file.findings
        assert file.run is not None
        assert (file.run.kernels.compiled, file.stack) == (True, "torchtitan-compiled")


def test_arguments_of_the_launcher_override_the_file(checked: Read) -> None:
    words = (
        "accelerate launch --config_file a.yaml {} train.py --per_device_train_batch_size 2 "
        "--max_seq_length 2048 --model_name_or_path mistralai/Mistral-7B-v0.1"
    )
    asked = "--mixed_precision fp16 --fsdp_sharding_strategy SHARD_GRAD_OP --main_process_port 1"
    run = checked(words.format(asked), FSDP).run
    assert run is not None
    assert (run.runtime.precision.kind, run.split.zero) == ("fp16", 2)
    assert _withdrawn(checked(words.format("--use_new_kind"), FSDP)).keys() == BOTH


OWN = (
    "train.py --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --bf16 True "
    "--max_seq_length 2048 --model_name_or_path mistralai/Mistral-7B-v0.1 --output_dir x "
)


@pytest.mark.parametrize(
    ("launcher", "document"),
    [
        ("--num_processes 8 --mixed_precision bf16", {"distributed_type": "MULTI_GPU"}),
        ("--num_processes 8 --mixed_precision bf16 --multi_gpu", {"distributed_type": "MULTI_GPU"}),
        ("--num_processes 1 --mixed_precision bf16", {"distributed_type": "NO"}),
        (
            "--num_processes 8 --mixed_precision bf16 --use_deepspeed --zero_stage 3",
            {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
        ),
        (
            ("--num_processes 8 --mixed_precision bf16 --use_fsdp --fsdp_version 1 "
             "--fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"),
            _with({}, distributed_type="FSDP", fsdp_config={
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}),
        ),
    ],
)  # fmt: skip
def test_accelerate_without_a_file_is_that_of_its_arguments(
    launcher: str, document: dict[str, Any], checked: Read
) -> None:
    """Several processes are MULTI_GPU; a file without their number is read with that of a user."""
    alone = checked(f"accelerate launch {launcher} {OWN}")
    given = {"mixed_precision": "bf16"} | document
    world = 1 if "processes 1" in launcher else 8
    same = checked(f"accelerate launch --config_file a.yaml {OWN}", given, world_size=world)
    assert alone.run is not None, alone.findings
    assert (alone.run, alone.world_size, alone.trainer) == (same.run, world, "accelerate")
    assert not alone.withdrawn


@pytest.mark.parametrize(
    "submitter",
    [
        "uv run python mason.py --image x --num_nodes 1 --gpus 8 --env A=1 --",
        "python x/submit.py --preemptible -- source setup.sh '&&' cd x \\&\\&",
    ],
)
def test_the_command_after_two_hyphens_is_the_launch(submitter: str, checked: Read) -> None:
    """The arguments in front of them are those of the submitter."""
    launch = f"accelerate launch --num_processes 8 --mixed_precision bf16 {OWN}"
    file, same = checked(f"{submitter} {launch}"), checked(launch)
    assert file.run is not None, file.findings
    assert (file.run, file.world_size, file.withdrawn) == (same.run, 8, {})


def test_a_submitter_gives_variables_and_nodes(checked: Read) -> None:
    """Variables count; nodes do, too, unless the command itself has them."""
    launch = f"accelerate launch --num_processes 8 --mixed_precision bf16 {OWN}"
    file = checked(f"python mason.py --env ACCELERATE_NEW=1 -- {launch}")
    assert _withdrawn(file).keys() == BOTH
    with pytest.raises(DocumentError, match=r"mason\.py starts .* --num_nodes 4"):
        checked(f"python mason.py --num_nodes 4 -- {launch}")
    file = checked(f"python mason.py --num_nodes 2 -- torchrun --nnodes 2 --nproc_per_node 8 {OWN}")
    assert file.world_size == 16


def test_a_file_of_one_process_starts_one(configured: Read) -> None:
    file = configured({"distributed_type": "NO", "mixed_precision": "fp8",
                       "fp8_config": {"backend": "TE"}}, world_size=None)  # fmt: skip
    assert (file.world_size, file.run) == (1, None)
    assert [one.kind for one in file.findings if one.withdraws] == ["not priced"]


@pytest.mark.parametrize(
    ("words", "section"),
    [
        ("--fsdp 'full_shard auto_wrap' --fsdp_transformer_layer_cls_to_wrap X",
         {"fsdp_sharding_strategy": "FULL_SHARD"}),
        ('--fsdp "shard_grad_op auto_wrap offload"',
         {"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_offload_params": True}),
        ("""--fsdp full_shard\\ auto_wrap --fsdp_config '{"activation_checkpointing": true}'""",
         {"fsdp_activation_checkpointing": True}),
        ("""--fsdp full_shard\\ auto_wrap --fsdp_config '{"limit_all_gathers": true}'""",
         {"fsdp_sharding_strategy": "FULL_SHARD"}),
        ("", None),
    ],
)  # fmt: skip
def test_arguments_of_the_trainer_are_a_configuration(
    words: str, section: dict[str, Any] | None, checked: Read
) -> None:
    module = "python -m torch.distributed.run --nnodes 2 --nproc_per_node 4"
    for launcher in ("torchrun --nproc_per_node 8", module):
        file = checked(f"{launcher} {OWN} {words}")
        document = FSDP if section else {"distributed_type": "MULTI_GPU", "num_processes": 8}
        document = _with(document, mixed_precision="no", fsdp_config=section or {})
        same = checked(f"accelerate launch --config_file a.yaml {OWN}", document)
        assert file.run is not None, file.findings
        assert (file.run, file.trainer) == (same.run, "Hugging Face's Trainer")
        assert not file.withdrawn


@pytest.mark.parametrize(
    "words", ["--fsdp True", "--fsdp 'full_shard auto_wrap new'",
              "--fsdp 'full_shard auto_wrap' --fsdp_config f.json"],
)  # fmt: skip
def test_what_the_trainer_does_not_say_withdraws(words: str, checked: Read) -> None:
    """No wrapping, a word that is no option, and a file."""
    assert _withdrawn(checked(f"torchrun --nproc_per_node 8 {OWN} {words}")).keys() == BOTH


def test_the_file_of_fsdp_config_is_its_content(checked: Read, tmp_path: Path) -> None:
    """An unknown key of it is not understood."""
    words = f"torchrun --nproc_per_node 8 {OWN} --fsdp 'full_shard auto_wrap' --fsdp_config f.json"
    (tmp_path / "f.json").write_text('{"activation_checkpointing": true}', encoding="utf-8")
    content = """'{"activation_checkpointing": true}'"""
    file, same = checked(words), checked(words.replace("f.json", content))
    assert file.run is not None, file.findings
    assert (file.run, file.withdrawn) == (same.run, {})
    (tmp_path / "f.json").write_text('{"fsdp_min_num_params": 100000}', encoding="utf-8")
    assert _withdrawn(checked(words)).keys() == {"time"}
    (tmp_path / "f.json").write_text('{"new": true}', encoding="utf-8")
    assert _withdrawn(checked(words)).keys() == BOTH


def test_a_configuration_that_is_not_there_breaks_no_rule(checked: Read) -> None:
    with pytest.raises(DocumentError, match="neither in the folder"):
        checked(f"accelerate launch --num_processes 8 --use_deepspeed --deepspeed_config_file "
                f"lost.conf {OWN}")  # fmt: skip


PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


@pytest.mark.parametrize(
    ("document", "changes"),
    [
        (_with(PLAIN, zero_optimization={"stage3_param_persistence_threshold": 10**9}), {"time"}),
        (_with(PLAIN, zero_optimization={"stage3_param_persistence_threshold": 10**5}), set()),
        (_with(PLAIN, zero_optimization={"zenflow": {"topk_ratio": 0.1}}), BOTH),
        (_with(PLAIN, bf16={"bf16_optimizer_states": True}), BOTH),
        (_with(PLAIN, activation_checkpointing={"cpu_checkpointing": True}), BOTH),
        (_with(PLAIN, activation_checkpointing={"cpu_checkpointing": False}), set()),
        (_with(PLAIN, autotuning={"enabled": True, "fast": False}), BOTH),
        (_with(PLAIN, autotuning={"enabled": False, "fast": True}), set()),
        (_with(PLAIN, communication_data_type="fp32"), {"time"}),
        (
            _with(PLAIN, zero_optimization={"stage": 2, "stage3_module_granularity_threshold": 8}),
            set(),
        ),
        (_with(PLAIN, _comment="on 8 GPUs", wandb={"enabled": True}), set()),
    ],
)
def test_keys_of_deepspeed_withdraw(
    document: dict[str, Any], changes: set[str], configured: Read
) -> None:
    assert _withdrawn(configured(document, "ds.json")).keys() == changes


def test_numbers_of_any_form_are_one_number(configured: Read) -> None:
    """In quotes, as floats, with ten digits; in findings as in the run."""
    plain = _with(PLAIN, zero_optimization={"stage": 2, "reduce_bucket_size": 5 * 10**9,
                                            "overlap_comm": True})  # fmt: skip
    file = configured(plain, "ds.json")
    assert file.run is not None
    assert file.run.runtime.states.buckets.reduce == 5 * 10**9
    for stage, bucket in (("2", "5000000000"), (2.0, 5e9)):
        other = _with(plain, zero_optimization={"stage": stage, "reduce_bucket_size": bucket})
        found = configured(other, "ds.json")
        assert found.run == file.run
        assert [one.id for one in found.findings] == [one.id for one in file.findings]
    quoted = _with(FSDP, num_processes="8", parallelism_config={
        "parallelism_config_dp_shard_size": "3", "parallelism_config_tp_size": "2"})  # fmt: skip
    assert next(one.kind for one in configured(quoted).findings) == "illegal"


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        ((64, 2, 4), 8),
        (("64", 2.0, "4"), 8),
        ((64, 2, 5), None),
        ((64, 2, "auto"), None),
        ((64, 2, None), None),
        ((64, 0, 4), None),
    ],
)
def test_three_sizes_of_a_batch_say_the_number_of_gpus(
    sizes: tuple[object, ...], world: int | None, configured: Read
) -> None:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    document = _with(PLAIN, **dict(zip(names, sizes, strict=True)))
    if world is None:
        with pytest.raises(DocumentError, match="no number of GPUs"):
            configured(document, "ds.json", world_size=None)
        return
    file = configured(document, "ds.json", world_size=None)
    assert file.run is not None, file.findings
    assert (file.world_size, file.run.strategy.global_batch) == (8, 64)
    split = _with(document, tensor_parallel={"autotp_size": 2})
    assert configured(split, "ds.json", world_size=None).world_size == 16
    other = configured(document, "ds.json", world_size=16)
    assert next(one.kind for one in other.findings) == "illegal"


def test_auto_is_asked_for_by_name(configured: Read) -> None:
    """And is the number of the option, of a micro-batch or of a step; the precision likewise."""
    (found,) = (one for one in configured(ZERO3, "ds.json").findings if one.withdraws)
    assert (found.id, found.kind) == ("read.unpriced", "not priced")
    assert "--micro-batch-size or --global-batch-size" in found.remedy
    (found,) = (
        one for one in configured(ZERO3, "ds.json", micro_batch=1).findings if one.withdraws
    )
    assert "--precision" in found.remedy
    for asked, sizes in (
        ({"micro_batch": 2}, (2, 16)),
        ({"global_batch": 32}, (4, 32)),
        ({"micro_batch": 2, "global_batch": 64}, (2, 64)),
    ):
        run = configured(ZERO3, "ds.json", **asked, precision="bf16").run
        assert run is not None
        assert run.runtime.precision.kind == "bf16"
        assert (run.strategy.micro_batch, run.strategy.global_batch) == sizes
    run = configured(FSDP, micro_batch=2, global_batch=64).run
    assert run is not None
    assert run.strategy.micro_batches == 4
    with pytest.raises(DocumentError, match="--micro-batch-size is 3"):
        configured(PLAIN, "ds.json", micro_batch=3)


def test_engines_with_their_own_batch_take_no_other(checked: Read) -> None:
    with pytest.raises(DocumentError, match="sets its own batch"):
        checked(MEGATRON, micro_batch=2)


# --------------------------------------------------------------------------------------------------
# Answers.


def _asked(path: Path, *words: str) -> tuple[int, dict[str, Any]]:
    target = path.parent / "answer.json"
    code = check.run([str(path), "--hardware", "h100:1x8", "--json", str(target), *words])
    (launch,) = json.loads(target.read_text())["launches"]
    return code, launch


def test_an_answer_has_no_figure_of_what_is_withdrawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In JSON by id, on the screen and in the exit code of --strict."""
    path = tmp_path / "run.sh"
    start = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" + MEGATRON
    for words, gone in (
        ("--new-switch 8", BOTH),
        ("--softmax-type learnable", {"time"}),
        ("--no-clone-scatter-output-in-embedding", {"memory"}),
        ("", set()),
    ):
        path.write_text(start + words, encoding="utf-8")
        code, launch = _asked(path, "--no-neighbours", "--strict")
        out = capsys.readouterr().out
        assert code == (1 if gone else 0)
        assert launch["withdrawn"].keys() == gone
        assert ("odds_of_oom" in launch, "stages" in launch) == (("memory" not in gone,) * 2)
        assert (launch.get("step_time_s") is not None) == ("time" not in gone)
        assert ("OOM" in out) == ("memory" not in gone)
        assert ("Step time" in out and "tokens/s" in out.lower()) == ("time" not in gone)
    path.write_text(start + "--new-switch 8", encoding="utf-8")
    code, launch = _asked(path, "--no-neighbours", "--strict", "--check-ignore", "new_switch")
    assert (code, launch["withdrawn"]) == (0, {})
    assert check.run([str(path), "--hardware", "h100:1x8", "--html", str(tmp_path / "a")]) == 2


# --------------------------------------------------------------------------------------------------
# Launches of no supported engine.

TUNED = (
    "accelerate launch --num_processes 8 --mixed_precision bf16 {} --max_length 1024 "
    "--model_name_or_path meta-llama/Meta-Llama-3-8B --per_device_train_batch_size 1\n"
)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.sh", ("deepspeed pretrain_gpt.py --num-layers 2 --hidden-size 64 --micro-batch-size 1 "
         "--seq-length 8 --deepspeed --deepspeed_config ds.json\n"), "Megatron-DeepSpeed"),
        ("a.sh", MEGATRON + "--zero-stage 1\n", "Megatron-DeepSpeed"),
        ("a.sh", ("deepspeed main.py --model_name_or_path llama --zero_stage 3 --deepspeed "
         "--max_seq_len 512\n"), "configuration that main.py makes"),
        ("a.sh", "deepspeed x/train.py --num_layers 12 --hidden_dim 8 --seq_length 8\n",
         "configuration that train.py makes"),
        ("a.sh", "torchrun train.py --deepspeed $CONFIG --model_name_or_path x\n",
         "$CONFIG, which is no JSON file"),
        ("a.sh", "NPROC_PER_NODE=8 megatron sft \\\n  --load x --micro_batch_size 2\n",
         "Megatron-SWIFT"),
        ("a.sh", "CUDA_VISIBLE_DEVICES=0 swift rlhf --model x\n",
         "ms-swift other than sft"),
        ("a.sh", "deepspeed --module openrlhf.cli.train_sft --max_len 2048\n", "OpenRLHF"),
        ("a.sh", "python3 -m verl.trainer.main_ppo --x 1 data.train_batch_size=8\n", "verl"),
        ("a.sh", "cd x && python run.py --config-path ./examples --config-name config action=run\n",
         "FlagScale"),
        ("a.sh", ("M=(--num-layers 2 --hidden-size 8 --seq-length 8)\nray job submit "
         "--address=x -- python3 train.py \\\n  --actor-num-nodes 2 ${M[@]}\n"), "slime"),
        ("a.sh", "llamafactory-cli chat x.yaml\n", "LLaMA-Factory"),
        ("a.sh", TUNED.format("x/scripts/dpo.py"), "trains on preferences"),
        ("a.sh", TUNED.format("-m x.train_orpo"), "trains on preferences"),
        ("a.sh", TUNED.format("run_grpo.py"), "trains by reinforcement learning"),
        ("a.sh", TUNED.format("reward_modeling.py"), "trains a reward model"),
        ("a.sh", TUNED.format("gkd.py"), "trains with a teacher"),
        ("a.yaml", "model: q\nmodel_class: llm\ndist_config:\n  name: fsdp2\n",
         "LLaMA-Factory 1.0"),
        ("a.sh", ("python mason.py --num_nodes 2 --gpus 8 -- source x.sh \\&\\& python \\\n"
         "  open_instruct/grpo_fast.py --beta 0.0\n"), "reinforcement learning"),
        ("a.sh", ("python submit.py --image x -- torchrun --nproc_per_node 8 olmo_core_finetune.py "
         "--model_name_or_path x --per_device_train_batch_size 1\n"), "OLMo-core"),
        ("a.sh", "bash train.sh tasks/train_torch.py x.yaml\ntorchrun tasks/train_torch.py --x 1\n",
         "VeOmni"),
        ("a.yaml", ("model:\n  model_path: q\ndata:\n  train_path: t\ntrain:\n"
         "  micro_batch_size: 1\n  global_batch_size: 8\n"), "VeOmni"),
        ("a.yaml", ("system:\n  checkpoint:\n    save_interval: 5\nmodel:\n  num_layers: 24\n"
         "  hidden_size: 2048\n"), "FlagScale"),
        ("a.yaml", "actor_rollout_ref:\n  model:\n    path: x\n", "verl"),
        ("a.yaml", "extends:\n  - base.yaml\nnum_layers: 2\nhidden_size: 8\n", "Primus"),
        ("a.yaml", "bases: [base.yaml]\nhidden_size: 8\nseq_length: 8\n", "Primus"),
        ("a.sh", "axolotl inference x.yaml\n", "axolotl"),
        ("a.sh", ("torchrun tools/run_text_generation_server.py --num-layers 2 --hidden-size 8 "
         "--micro-batch-size 1 --seq-length 8\n"), "generates text"),
        ("a.sh", MEGATRON + "--skip-train\n", "--skip-train"),
        ("a.yaml", "MODEL_ARGS:\n  --num-layers: 2\n  --hidden-size: 8\n  --prompts: x\n",
         "generates text"),
        ("a.sh", TRAINER + "--do_eval\n", "--do_eval without --do_train"),
        ("a.sh", "torchrun tools/evaluate_gpt.py --num-layers 2 --hidden-size 8\n", "evaluates"),
    ],
)  # fmt: skip
def test_other_launches_are_named(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is named, with exit code 2."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert check.run([str(path), "--hardware", "h100:1x8"]) == 2
    assert said in capsys.readouterr().err


def test_what_an_array_misses_is_not_illegal(checked: Read) -> None:
    """A script that others source: the rest is in their launch command."""
    array = "MODEL_ARGS=(--num-layers 24 --hidden-size 2048 --num-attention-heads 16 {})\n"
    full = "--micro-batch-size 1 --max-position-embeddings 8 --recompute-granularity full"
    for words in ("", "--seq-length 8", "--seq-length 8 --micro-batch-size 1",
                  f"--seq-length 8 --vocab-size 8 {full}"):  # fmt: skip
        file = checked(array.format(words), world_size=8)
        assert not [one for one in file.findings if one.kind == "illegal"]
        assert _withdrawn(file).keys() == BOTH
        said = checked(f"torchrun pretrain_gpt.py {array[12:-2].format(words)}\n", world_size=8)
        assert any(one.kind == "illegal" for one in said.findings)


def test_a_variable_in_the_name_of_an_argument_breaks_no_rule(checked: Read) -> None:
    file = checked(MEGATRON + "--$TRAINING_DTYPE --use-${KIND}_x")
    assert not [one for one in file.findings if one.kind == "illegal"]
    assert _withdrawn(file).keys() == BOTH


@pytest.mark.parametrize(
    "folder",
    ["`pwd`", "$(pwd)", "$PWD", "${PWD}", '$(dirname "$0")', '$(dirname "${BASH_SOURCE[0]}")',
     '$(cd "$(dirname "$0")" && pwd)',
     '$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &> /dev/null && pwd -P)'],
)  # fmt: skip
def test_files_beside_a_script_are_found(folder: str, checked: Read) -> None:
    """However the script spells its folder or the one that it is started in."""
    words = f"DIR={folder}\n{TRAINER}{LONG}"
    file = checked(words.replace("ds.json", '"$DIR/ds.json"'))
    same = checked(TRAINER + LONG)
    assert file.run is not None, file.findings
    assert (file.run, file.withdrawn) == (same.run, {})
    with pytest.raises(DocumentError, match="neither in the folder"):
        checked(words.replace("ds.json", '"$DIR/../other/ds.json"'))


def test_deepspeed_with_words_of_the_program_is_deepspeed(checked: Read) -> None:
    """Its own `--num_layers` and `--seq_length` are those of no Megatron."""
    for flag in ("deepspeed_config", "ds_config"):
        file = checked(
            f"deepspeed --num_gpus 2 train.py --{flag} ds.json --model_name llama-2-7b "
            "--num_layers 12 --hidden_dim 8 --seq_length 512 --batch_size 4\n"
        )
        assert (file.trainer, file.world_size) == ("DeepSpeed", 2)
        assert not [one for one in file.findings if one.kind == "illegal"]
        assert _withdrawn(file).keys() == BOTH


@pytest.mark.parametrize(
    "text",
    [
        "# swift sft is the other way\necho done\n",
        "echo run megatron sft later\n",
        "python prepare.py --module openrlhf_data\n",
        "sed -i s/vllm serve/x/ run.sh\n",
    ],
)
def test_names_that_are_no_commands_are_not_taken_for_engines(text: str) -> None:
    assert problem_of_text(text) is None


def test_training_programs_are_no_servers(checked: Read) -> None:
    """A word of their purpose in the name is not enough."""
    for name in ("train_inference_gpt.py", "pretrain_gpt.py", "sft_chat.py"):
        assert checked(MEGATRON.replace("pretrain_gpt.py", name)).run is not None
    file = checked(TRAINER + LONG + "--do_train --do_eval")
    assert file.run is not None

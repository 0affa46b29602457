"""Configurations of DeepSpeed and accelerate under `autopar check`: read, priced, found broken.

Those of DeepSpeed are written from the settings of its tutorials on ZeRO and of Hugging Face's
documentation (`auto`), those of accelerate from what `accelerate config` writes.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import DocumentError
from autopar.price.account import account_of
from autopar.price.sharded_peak import live_points
from autopar.records import replace
from autopar.run.run import Run, run_with_split
from search.check.alternatives import _single_changes
from search.commands import check
from search.engines.huggingface.models import flavour, model_named
from search.engines.reader import CheckedFile
from search.engines.table import engine_of, read_checked
from search.engines.text import read_configuration

ZERO1: dict[str, Any] = {
    "train_batch_size": 512,
    "train_micro_batch_size_per_gpu": 8,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 500000000},
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "weight_decay": 1e-2}},
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
    "wall_clock_breakdown": True,
}
ZERO2: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "contiguous_gradients": True,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "allgather_bucket_size": 5e8,
    },
}
ZERO3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
    "fp16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1e5,
        "reduce_bucket_size": 1e7,
        "sub_group_size": 1e9,
    },
}
AUTO2: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
AUTO3: dict[str, Any] = {
    **AUTO2,
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}
PLAIN: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 0},
}
SCRIPT = """#!/bin/bash
deepspeed --num_gpus=8 {nodes} run_clm.py \\
    --deepspeed ds.json \\
    --model_name_or_path meta-llama/Llama-2-7b-hf \\
    --per_device_train_batch_size 4 \\
    --gradient_accumulation_steps 2 \\
    --block_size 4096 \\
    --bf16 --gradient_checkpointing True \\
    --learning_rate 2e-5 --output_dir out --num_train_epochs 1 {more}
"""
Read = Callable[..., CheckedFile]


@pytest.fixture
def checked(tmp_path: Path) -> Read:
    """Return what reads a configuration, alone or with a script."""

    def read(
        document: Mapping[str, Any], gpus: int | None = 8, script: str | None = None, **asked: Any
    ) -> CheckedFile:
        path = tmp_path / "ds.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        if script is not None:
            path = tmp_path / "run.sh"
            path.write_text(script, encoding="utf-8")
        return read_checked(str(path), world_size=gpus, gpu="a100-80gb", **asked)

    return read


def _script(more: str = "", nodes: str = "") -> str:
    return SCRIPT.format(more=more, nodes=nodes)


def _with(document: Mapping[str, Any], path: str, value: object) -> dict[str, Any]:
    found = copy.deepcopy(dict(document))
    section, _, name = path.rpartition(".")
    (found[section] if section else found)[name] = value
    return found


def _states(run: Run) -> dict[str, int]:
    return {term.name: term.num_bytes for term in account_of(run).states}


ASKED: dict[str, Any] = {"model": "opt-1.3b", "seq_length": 1024}
OPT = 1_315_753_984
"""Parameters of OPT 1.3B: its embedding once, and two rows of positions more than tokens."""


@pytest.mark.parametrize(
    ("document", "gpus", "weights", "rest"),
    [
        # bytes of a parameter that each rank has, and that all of them share: 2 + 12/N
        (ZERO1, 64, 2.0, 12.0),
        (ZERO2, 8, 2.0, 12.0),
        # weights, a whole buffer of gradients, masters and moments: 2 + 2 + 12 over N
        (ZERO3, 8, 0.0, 16.0),
        (PLAIN, 8, 14.0, 0.0),
        # gradients in fp32 are a buffer that is there before the first backward
        ({**PLAIN, "data_types": {"grad_accum_dtype": "fp32"},
          "zero_optimization": {"stage": 1}}, 8, 6.0, 12.0),
    ],
)  # fmt: skip
def test_published_configurations_are_priced(
    document: dict[str, Any], gpus: int, weights: float, rest: float, checked: Read
) -> None:
    """Nothing is wrong with them, and states after a step are those of the table of ZeRO."""
    file = checked(document, gpus, **ASKED)
    assert file.run is not None, file.findings
    assert {one.kind for one in file.findings} <= {"read"}, file.findings
    states = _states(file.run)
    kept = sum(states.values()) - states["cuBLAS workspaces"]
    assert kept == pytest.approx(OPT * (weights + rest / gpus), rel=2e-3)
    assert file.stack == "torchtitan-eager"


def test_a_bucket_is_as_large_as_it_is_given(checked: Read) -> None:
    """Of ZeRO-2 half a billion elements by default, twice with overlap_comm."""
    peaks = {}
    for name, document in (
        ("two", ZERO2),
        ("one", _with(ZERO2, "zero_optimization.overlap_comm", False)),
        ("small", _with(ZERO2, "zero_optimization.reduce_bucket_size", 1e8)),
    ):
        run = checked(document, 8, model="llama-2-7b", seq_length=512).run
        assert run is not None
        parts = [part for instant in live_points(run, 0) for part in instant.parts]
        sizes = {part.num_bytes for part in parts if part.name == "buckets of the reduction"}
        (peaks[name],) = sizes
    assert peaks == {"two": 2_000_000_000, "one": 1_000_000_000, "small": 400_000_000}


@pytest.mark.parametrize(("document", "stage"), [(AUTO2, 2), (AUTO3, 3)])
def test_auto_is_what_the_script_says(document: dict[str, Any], stage: int, checked: Read) -> None:
    """Batch, precision and checkpoints of the Trainer's arguments, buckets of the model's width."""
    file = checked(document, None, _script(nodes="--num_nodes=2"))
    run = file.run
    assert run is not None, file.findings
    assert not file.findings
    assert file.world_size == 16
    assert (run.strategy.micro_batch, run.strategy.global_batch) == (4, 4 * 2 * 16)
    assert run.seq_length == 4096
    assert run.runtime.precision.kind == "bf16"
    assert (run.split.zero, run.split.recompute) == (stage, "full")
    assert run.runtime.states.buckets.reduce == (4096**2 if stage == 3 else 2 * 10**8)


def test_other_stages_are_next_to_a_run(checked: Read) -> None:
    run = checked(AUTO2, None, _script(nodes="--num_nodes=2")).run
    assert run is not None
    found = _single_changes(run, frozenset({"optimizer"}), lambda _: frozenset())
    assert {one.split.zero for one in found} == {1, 3}


def test_a_larger_stage_never_needs_more(checked: Read) -> None:
    peaks = []
    for stage in (0, 1, 2, 3):
        document = _with(_with(AUTO2, "zero_optimization", {"stage": stage}), "fp16", {})
        document["zero_optimization"]["reduce_bucket_size"] = 10**7
        run = checked(document, 8, _script()).run
        assert run is not None
        peaks.append(account_of(run).peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


@pytest.mark.parametrize(
    ("document", "script", "kind", "said"),
    [
        (_with(ZERO1, "train_batch_size", 500), None, "illegal",
         "!= train_batch_size(500)"),
        (_with(ZERO2, "fp16", {"enabled": True}), None, "illegal",
         "bf16.enabled and fp16.enabled exclude each other"),
        (_with(ZERO2, "zero_optimization.stage", 4), None, "illegal", "expected 0 to 3, got 4"),
        (_with(ZERO2, "zero_optimization.bucket_size", 4), None, "illegal",
         "zero_optimization.bucket_size"),
        (_with(ZERO3, "tensor_parallel", {"autotp_size": 2}), None, "illegal",
         "autotp_size(2) needs zero_optimization.stage 2 at most"),
        (_with(ZERO2, "zero_optimization.allgather_bucket_size", 4000001), None, "illegal",
         "allgather_bucket_size(4000001) % 2 = 1 != 0"),
        (_with(ZERO2, "zero_optimization.stage3_prefetch_bucket_size", 4), None, "no effect",
         "stage3_prefetch_bucket_size (zero_optimization.stage is 2)"),
        (_with(ZERO3, "zero_optimization.allgather_bucket_size", 4), None, "no effect",
         "allgather_bucket_size (zero_optimization.stage is 3)"),
        (_with(PLAIN, "zero_optimization.overlap_comm", True), None, "no effect",
         "overlap_comm (zero_optimization.stage is 0)"),
        (_with(ZERO2, "zero_optimization.contiguous_gradients", False), None, "no effect",
         "leaves no second bucket"),
        (_with(ZERO3, "zero_optimization.offload_optimizer", {"device": "nvme"}), None,
         "not priced", "states are on nvme"),
        (_with(ZERO3, "zero_optimization.offload_param", {"device": "cpu"}), None,
         "not priced", "only weights are on cpu"),
        (_with(ZERO3, "zero_optimization.offload_optimizer", {"device": "cpu", "ratio": 2}), None,
         "illegal", "expected 0 to 1, got '2'"),
        (_with(ZERO2, "optimizer", {"type": "OneBitAdam"}), None, "not priced",
         "'OneBitAdam'"),
        (_with(ZERO2, "gradient_acumulation", 3), None, "not understood",
         '"gradient_acumulation": 3'),
        (_with(AUTO2, "train_micro_batch_size_per_gpu", 2), _script(), "illegal",
         "train_micro_batch_size_per_gpu(2) != --per_device_train_batch_size(4)"),
        (_with(AUTO2, "fp16", {"enabled": True}), _script(), "illegal",
         "exclude each other"),
        (AUTO2, _script().replace("meta-llama/Llama-2-7b-hf", "someone/unheard-of"),
         "not priced", "'someone/unheard-of'"),
    ],
)  # fmt: skip
def test_what_is_wrong_or_idle(
    document: dict[str, Any], script: str | None, kind: str, said: str, checked: Read
) -> None:
    """In one sentence with the key."""
    asked = {} if script else ASKED
    file = checked(document, 8, script, **asked)
    assert any(one.kind == kind and said in one.text for one in file.findings), file.findings


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "--model"),
        ({"model": "opt-1.3b"}, "--seq-length"),
    ],
)
def test_what_no_file_says_is_asked_for(asked: dict[str, Any], said: str, checked: Read) -> None:
    file = checked(ZERO2, 8, **asked)
    assert [one.text for one in file.findings if one.kind == "not priced"]
    assert any(said in one.text for one in file.findings), file.findings


def test_a_folder_with_its_config_is_a_model(checked: Read, tmp_path: Path) -> None:
    """Hugging Face's config.json, beside the script."""
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008,
        "vocab_size": 32000, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    named = checked(AUTO2, 8, _script()).run
    own = checked(AUTO2, 8, _script().replace("meta-llama/Llama-2-7b-hf", "./mine")).run
    assert own is not None
    assert own == named
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": "wide"}), "utf-8")
    file = checked(AUTO2, 8, _script().replace("meta-llama/Llama-2-7b-hf", "./mine"))
    assert any("hidden_size" in one.text and "'wide'" in one.text for one in file.findings)


def test_changes_are_lines_of_either_file(checked: Read) -> None:
    """The stage is the configuration's, the batch of `auto` the script's."""
    file = checked(AUTO2, 8, _script())
    run = file.run
    assert run is not None
    smaller = replace(run, strategy=replace(run.strategy, micro_batch=2))
    assert file.written(smaller) == (
        ("--per-device-train-batch-size", "4", "2"), ("--gradient-accumulation-steps", "2", "4"),
    )  # fmt: skip
    assert file.written(run_with_split(run, zero=3)) == (("zero_optimization.stage", "2", "3"),)
    assert file.spelled("zero_optimization.stage", "3") == '"zero_optimization.stage": 3'
    assert file.spelled("--per-device-train-batch-size", "2") == "--per_device_train_batch_size 2"


def test_a_check_is_quick_and_says_its_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(AUTO3), encoding="utf-8")
    path = tmp_path / "run.sh"
    path.write_text(_script(), encoding="utf-8")
    check.run([str(path), "--hardware", "a100-80gb:1x8"])
    assert capsys.readouterr().out.startswith(f"{path}: DeepSpeed on 8 a100-80gb\n")
    check.run([str(path), "--hardware", "a100-80gb:1x8", "--json", "-"])
    (launch,) = json.loads(capsys.readouterr().out)["launches"]
    assert launch["understood"]["degrees"] == "dp8, ZeRO-3"
    assert launch["understood"]["recomputes"] == "full"
    begun = time.process_time()
    assert check.run([str(path), "--hardware", "a100-80gb:1x8", "--no-neighbours"]) == 0
    assert time.process_time() - begun < 1.0


# --------------------------------------------------------------------------------------------------
# accelerate.


FSDP2 = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
use_cpu: false
"""
FSDP1 = FSDP2.replace("fsdp_version: 2", "fsdp_version: 1").replace(
    "fsdp_reshard_after_forward: true", "fsdp_sharding_strategy: SHARD_GRAD_OP"
)
DEEPSPEED = """
compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 1.0
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
MULTI = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_machines: 1\nnum_processes: 8\n"
LAUNCH = """
accelerate launch --config_file a.yaml train.py --model_name_or_path mistralai/Mistral-7B-v0.1 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_seq_length 2048
"""


CLIENT = """
deepspeed --num_gpus 8 train.py --deepspeed ds.json --model_name_or_path meta-llama/Llama-2-7b-hf \\
    --per_device_train_batch_size 1 --block_size 1024 --gradient_checkpointing --fp16 {optim}
"""


@pytest.mark.parametrize(
    ("optim", "section", "fused", "named"),
    [
        ("", None, False, True),
        ("--optim adamw_torch", None, False, False),
        ("--optim adamw_torch_fused", None, True, False),
        ("--optim adamw_bnb_8bit", None, True, False),
        ("", {"type": "AdamW", "params": {"lr": 1e-4}}, True, False),
        ("", {"type": "AdamW", "params": {"torch_adam": True}}, False, False),
        ("--optim adamw_torch", {"type": "AdamW"}, True, False),
    ],
)
def test_an_update_without_a_fused_kernel_needs_a_partition_more(
    optim: str, section: dict[str, Any] | None, fused: bool, named: bool, tmp_path: Path
) -> None:
    """The optimizer is torch.optim.AdamW where the JSON has none. A release is not in the file."""
    document = {
        "train_micro_batch_size_per_gpu": "auto",
        "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2},
    }
    if section is not None:
        document["optimizer"] = section
    (tmp_path / "ds.json").write_text(json.dumps(document), encoding="utf-8")
    path = tmp_path / "in.sh"
    path.write_text(CLIENT.format(optim=optim), encoding="utf-8")
    file = read_checked(str(path), world_size=8, gpu="v100")
    assert file.run is not None, file.findings

    run = file.run
    assert run.runtime.optimizer.fused == fused
    assert ("trainer.optimizer" in {one.id for one in file.findings}) == named
    terms = {term.name: term.num_bytes for term in account_of(run, 0).peak}
    partition = 4 * 6_738_415_616 / 8
    assert terms.get("temporary of the update", 0) == (
        0 if fused else pytest.approx(partition, rel=1e-3)
    )
    if not fused:
        # 28.28 GiB were allocated and 3.14 GiB more asked for: hiyouga/LLaMA-Factory#1221
        peak = account_of(run, 0).peak_bytes / 2**30
        assert peak == pytest.approx(28.28 + 3.14, rel=2e-3)


@pytest.mark.parametrize("zero", ["true", "false", None])
def test_an_unfused_update_of_accelerate(zero: str | None, accelerated: Read) -> None:
    """Shards of FSDP and whole weights of DDP alike; a file of autopar asks for a fused one."""
    text = MULTI if zero is None else FSDP2.replace("forward: true", f"forward: {zero}")
    plain, fused = (
        accelerated(text, LAUNCH.rstrip() + f" --optim adamw_torch{kind}\n").run
        for kind in ("", "_fused")
    )
    shares = 1 if zero is None else 8
    steps = [
        next(one.num_bytes for one in live_points(run, 0) if one.name == "step")
        for run in (plain, fused)
    ]
    # transformers 5 loads 16 bits, which FSDP with mixed precision casts to fp32
    each = 2 if zero is None else 4
    assert steps[0] - steps[1] == pytest.approx(each * 7_241_732_096 / shares, rel=1e-3)


@pytest.fixture
def accelerated(tmp_path: Path) -> Read:
    """Return what reads a configuration of accelerate, alone or with a script."""

    def read(text: str, script: str | None = None, gpus: int | None = None, **asked: Any) -> Any:
        path = tmp_path / "a.yaml"
        path.write_text(text, encoding="utf-8")
        if script is not None:
            path = tmp_path / "run.sh"
            path.write_text(script, encoding="utf-8")
        return read_checked(str(path), world_size=gpus, gpu="h100-80gb", **asked)

    return read


@pytest.mark.parametrize(
    ("text", "keeper", "zero"),
    [
        (FSDP2, "accelerate", 3),
        (FSDP2.replace("forward: true", "forward: false"), "accelerate", 2),
        (FSDP1, "accelerate", 2),
        (DEEPSPEED, "deepspeed", 3),
        (MULTI, "accelerate", 0),
    ],
)
def test_configurations_of_accelerate_are_read(
    text: str, keeper: str, zero: int, accelerated: Read
) -> None:
    """Of every kind, with a script that says the rest; and its processes are the GPUs."""
    file = accelerated(text, LAUNCH)
    run = file.run
    assert run is not None, file.findings
    # the type of weights that nothing casts is a default of transformers
    notes = ["read.note"] if (keeper, zero) == ("accelerate", 0) else []
    assert [one.id for one in file.findings] == ["trainer.optimizer", *notes]
    assert file.world_size == 8
    assert (run.runtime.states.keeper, run.split.zero) == (keeper, zero)
    assert (run.strategy.micro_batch, run.strategy.micro_batches, run.seq_length) == (2, 4, 2048)
    assert run.runtime.precision.kind == "bf16"
    states = _states(run)
    size = 7_241_732_096
    if keeper == "accelerate":
        # weights and moments, whole in 16 bits or shared in fp32
        kept = states["weights"] + states["Adam moments"]
        assert kept == pytest.approx(6 * size if zero == 0 else 12 * size / 8, rel=1e-3)
    # what a rank has does not depend on where the file is
    alone = accelerated(text, model="mistral-7b", seq_length=2048)
    assert alone.run is not None
    assert [one.id for one in alone.findings] == ["accelerate.batch", "trainer.optimizer"]


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (MULTI + "parallelism_config:\n  parallelism_config_dp_shard_size: 3\n"
         "  parallelism_config_tp_size: 2\n", "illegal", "= 6 != num_processes(8)"),
        (FSDP2 + "parallelism_config:\n  parallelism_config_cp_size: 2\n"
         "  parallelism_config_sp_size: 2\n  parallelism_config_dp_shard_size: 2\n", "illegal",
         "cp_size(2) and sp_size(2) exclude each other"),
        (FSDP2.replace("fsdp_version: 2", "fsdp_version: 2\n  fsdp_sharding_strategy: FULL_SHARD"),
         "no effect", "fsdp_sharding_strategy (fsdp_version is 2)"),
        (MULTI + "fsdp_config:\n  fsdp_version: 2\n", "no effect",
         "fsdp_config (distributed_type is MULTI_GPU)"),
        (DEEPSPEED.replace("optimizer_device: none", "optimizer_device: nvme"), "not priced",
         "states are on nvme"),
        (FSDP1.replace("SHARD_GRAD_OP", "HALF"), "illegal", "expected one of FULL_SHARD"),
        (FSDP2.replace("use_cpu", "use_gpus"), "not understood", "use_gpus: false may change"),
        (MULTI.replace("bf16", "fp8"), "not priced", "fp8"),
    ],
)  # fmt: skip
def test_what_accelerate_refuses_or_leaves(
    text: str, kind: str, said: str, accelerated: Read
) -> None:
    file = accelerated(text, model="mistral-7b", seq_length=2048)
    assert any(one.kind == kind and said in one.text for one in file.findings), file.findings


def test_checkpoints_are_changed_where_they_are_said(accelerated: Read) -> None:
    file = accelerated(FSDP2, LAUNCH)
    run = file.run
    assert run is not None
    other = run_with_split(run, recompute=frozenset())
    assert file.written(other) == (("fsdp_config.fsdp_activation_checkpointing", "true", "false"),)


@pytest.mark.parametrize(
    ("name", "text", "trainer"),
    [
        ("a.json", json.dumps(ZERO2), "DeepSpeed"),
        ("a.yaml", FSDP2, "accelerate"),
        ("a.sh", _script(), "DeepSpeed"),
        ("a.sh", LAUNCH, "accelerate"),
    ],
)  # fmt: skip
def test_whose_a_file_is(name: str, text: str, trainer: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert engine_of(read_configuration(path)).title == trainer


def test_shipped_names_are_models_of_scripts() -> None:
    """Those of `autopar models` are the same models as by the names of their repositories."""
    assert model_named("llama3-8b") == model_named("meta-llama/Meta-Llama-3-8B")
    assert model_named("llama3-8b") == flavour("llama3", "8B")
    assert model_named("mixtral-8x7b") is not None
    # encoders, and unknown names
    assert model_named("t5-3b") is None
    assert model_named("llama9-1t") is None


def test_a_typed_model_is_of_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that a user names is not looked for beside the file; an unknown name is refused."""
    sizes = {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
        "vocab_size": 32000,
    }
    (tmp_path / "sizes").mkdir()
    (tmp_path / "sizes" / "config.json").write_text(json.dumps(sizes), encoding="utf-8")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "ds.json").write_text(json.dumps(ZERO2), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    words = ["jobs/ds.json", "--hardware", "h100:1x8", "--seq-length", "2048", "--no-neighbours"]

    assert check.run([*words, "--model", "sizes", "--json", "-"]) == 0
    (launch,) = json.loads(capsys.readouterr().out)["launches"]
    assert launch["understood"]["model"].startswith("4 layers, hidden 1,024")
    assert check.run([*words, "--model", "nope"]) == 2
    assert capsys.readouterr().err.startswith("autopar-check: --model 'nope': ")


def test_the_path_of_a_configuration_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Variants of a run are searched in a JSON file of any folder, which is no config.json."""
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(ZERO2), encoding="utf-8")
    words = ["--hardware", "a100-80gb:1x8", "--model", "llama3-8b", "--seq-length", "4096"]
    assert check.run([str(path), *words, "--json", "-"]) == 0
    (launch,) = json.loads(capsys.readouterr().out)["launches"]
    assert launch["neighbours"] is not None


@pytest.mark.parametrize("where", ["beside", "working", "both"])
@pytest.mark.parametrize("kind", ["deepspeed", "accelerate", "plugged in"])
def test_a_configuration_is_found_from_the_working_folder(
    kind: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launchers find it, too; that of the script's folder comes first, with a note."""
    folder = tmp_path / "examples" / "a"
    (folder / "conf").mkdir(parents=True)
    (tmp_path / "conf").mkdir()
    monkeypatch.chdir(tmp_path)
    files = {
        "deepspeed": {"ds.json": json.dumps(ZERO2)},
        "accelerate": {"a.yaml": FSDP2},
        "plugged in": {
            "ds.json": json.dumps(ZERO2),
            "a.yaml": DEEPSPEED.replace(
                "deepspeed_config:", "deepspeed_config:\n  deepspeed_config_file: conf/ds.json"
            ),
        },
    }[kind]
    places = {"beside": (folder,), "working": (tmp_path,), "both": (folder, tmp_path)}[where]
    for place in places:
        for name, text in files.items():
            # equal files need no note
            own = text if place == folder else f"{text}\n"
            (place / "conf" / name).write_text(own, encoding="utf-8")
    script = SCRIPT.format(nodes="", more="").replace("ds.json", "./conf/ds.json")
    if kind != "deepspeed":
        script = LAUNCH.replace("a.yaml", "conf/a.yaml")
    (folder / "run.sh").write_text(script, encoding="utf-8")

    file = read_checked("examples/a/run.sh", world_size=8, gpu="h100-80gb")
    assert file.run is not None, file.findings
    said = [one.values["note"] for one in file.findings if one.id == "read.note"]
    first = "ds.json" if kind == "deepspeed" else "a.yaml"
    assert len(said) == (where == "both")
    assert all(text.startswith(f"examples/a/conf/{first} is read") for text in said)


def test_a_configuration_that_is_nowhere_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both folders in which it was looked for; a name that no file can have as well."""
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere.json", "x" * 5000 + ".json"):
        path = tmp_path / "run.sh"
        path.write_text(SCRIPT.format(nodes="", more="").replace("ds.json", name), encoding="utf-8")
        with pytest.raises(DocumentError, match="working folder"):
            read_checked(str(path), world_size=8, gpu="h100-80gb")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"zero_optimization": 7}, "zero_optimization: expected an object, got 7"),
        ({"zero_optimization": [1]}, "zero_optimization: expected an object, got [1]"),
        ({"zero_optimization": True}, "zero_optimization is true, expected an object"),
        ({"zero_optimization": {"stage": {}}}, "stage: expected a value, got an object"),
        ({"zero_optimization": {"stage": {"a": 1}}}, "stage: expected a value, got an object"),
        ({"bf16": 1}, "bf16: expected an object, got 1"),
        ({"bf16": {"enabled": 7}}, "bf16.enabled: expected true, false or auto, got '7'"),
        ({"optimizer": 7}, "optimizer: expected an object, got 7"),
        ({"tensor_parallel": 3}, "tensor_parallel: expected an object, got 3"),
    ],
)
def test_values_of_a_wrong_type_are_findings(
    change: dict[str, Any], problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A value in place of a section is no default."""
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({**ZERO2, **change}), encoding="utf-8")
    options = ("--model", "gpt2-xl", "--seq-length", "1024", "--hardware", "h100:1x8")
    check.run([str(path), *options])
    assert problem in " ".join(capsys.readouterr().out.split())


def test_a_key_is_reported_once(checked: Read) -> None:
    """A key that the stage leaves without effect is not listed among the harmless ones, too."""
    found = checked(_with(AUTO3, "zero_optimization.stage", 1), 8, _script())
    idle = {one.values["key"] for one in found.findings if one.kind == "no effect"}
    assert "zero_optimization.stage3_gather_16bit_weights_on_model_save" in idle
    assert not idle & {one.flag for one in found.harmless}

"""Adapters, small moments and states on the host, as configurations of trainers say them."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import DocumentError, InputError
from autopar.price.account import account_of
from autopar.price.job import job_of_run
from autopar.run.rules import RuleError
from autopar.run.run import Run
from autopar.run.runtime import ActivationOffload
from autopar.training.adapters import Adapters
from search.engines.arguments import UnpricedError
from search.engines.bridge.read import run_of_settings
from search.engines.bridge.recipes import named_recipe
from search.engines.deepspeed.read import read_deepspeed
from search.engines.huggingface.read import read_accelerate
from search.engines.megatron.findings import findings_of
from search.engines.torchtitan.read import read_titan

SCRIPT = {
    "model-name-or-path": ("meta-llama/Llama-2-7b-hf",),
    "per-device-train-batch-size": ("1",),
    "max-seq-length": ("2048",),
    "bf16": ("true",),
    "gradient-checkpointing": ("true",),
}
ZERO3: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
}


def deepspeed(zero: dict[str, Any], **flags: tuple[str, ...]) -> Run:
    """Return the run of a configuration with more keys of ZeRO, and of a script's flags."""
    document = {**ZERO3, "zero_optimization": {"stage": 3, **zero}}
    given = SCRIPT | {name.replace("_", "-"): words for name, words in flags.items()}
    return read_deepspeed(document, given, world_size=4, gpu="RTX 4090").run


def test_flash_attention_needs_a_card_that_has_it() -> None:
    """PyTorch's own kernel runs on V100; flash attention does not, and is refused by its key."""
    flash = {**SCRIPT, "attn-implementation": ("flash_attention_2",)}
    assert read_deepspeed(ZERO3, SCRIPT, world_size=4, gpu="v100").run.gpu == "v100"
    assert not read_deepspeed(ZERO3, flash, world_size=4, gpu="a100").run.kernels.repeated_heads
    for read in (read_deepspeed, read_accelerate):
        document = ZERO3 if read is read_deepspeed else {"distributed_type": "FSDP"}
        with pytest.raises(DocumentError) as found:
            read(document, flash, world_size=4, gpu="v100")
        assert found.value.key == "--attn_implementation"


@pytest.mark.parametrize(
    ("zero", "wanted"),
    [
        ({}, (0.0, False, False)),
        ({"offload_optimizer": {"device": "none"}}, (0.0, False, False)),
        ({"offload_optimizer": {"device": "cpu"}}, (1.0, True, False)),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.4}}, (0.4, True, False)),
        # the word of releases before 0.3.16
        ({"stage": 2, "cpu_offload": True}, (1.0, True, False)),
        (
            {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            (1.0, True, True),
        ),
        # which has no effect without divided weights, nor anything without divided states
        (
            {
                "stage": 2,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
            (1.0, True, False),
        ),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, (0.0, False, False)),
    ],
)
def test_deepspeed_offloads(zero: dict[str, Any], wanted: tuple[Any, ...]) -> None:
    """Share on the host, whether fp32 weights are there, and whether all weights are."""
    found = deepspeed(zero).runtime.optimizer
    assert (found.offload, found.offload_master, found.offload_weights) == wanted


def test_a_script_trains_adapters() -> None:
    """TRL's arguments: rank, modules by their names in transformers, and bits of the base."""
    assert deepspeed({}).runtime.adapters is None
    plain = deepspeed({}, use_peft=(), lora_r=("8",), lora_dropout=("0",))
    assert plain.runtime.adapters == Adapters(rank=8, targets=frozenset({"query", "value"}))
    whole = deepspeed(
        {}, use_peft=(), lora_target_modules=("all-linear",), load_in_4bit=(), lora_dropout=("0.1",)
    )
    assert whole.runtime.adapters == Adapters(rank=16, base="nf4", nested=False, dropout=0.1)
    some = deepspeed({}, use_peft=(), lora_target_modules=("o_proj", "up_proj"))
    assert some.runtime.adapters is not None
    assert some.runtime.adapters.targets == {"projection", "fc1"}
    assert job_of_run(whole).frozen
    with pytest.raises(InputError, match="lm_head"):
        deepspeed({}, use_peft=(), lora_target_modules=("lm_head",))


@pytest.mark.parametrize("name", ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"])
def test_a_script_has_moments_of_8_bits(name: str) -> None:
    """A quarter of fp32's bytes and scales; paged moments can move to the host."""
    assert deepspeed({}, optim=(name,)).runtime.optimizer.kind == "adam8bit"
    small, wide = (
        {term.name: term.num_bytes for term in account_of(run).states}.get("Adam moments", 0)
        for run in (deepspeed({}, optim=(name,)), deepspeed({}, optim=("adamw_torch",)))
    )
    share = 0.0 if name.startswith("paged") else (2 + 8 / 256) / 8
    assert small == pytest.approx(share * wide, rel=1e-6)


def test_accelerate_offloads_what_is_sharded() -> None:
    """All of it with FSDP; replicas keep theirs."""
    document: dict[str, Any] = {
        "distributed_type": "FSDP",
        "num_processes": 4,
        "mixed_precision": "bf16",
        "fsdp_config": {"fsdp_version": 2, "fsdp_offload_params": True},
    }
    found = read_accelerate(document, SCRIPT, world_size=4, gpu="RTX 4090").run
    optimizer = found.runtime.optimizer
    assert (optimizer.offload, optimizer.offload_weights) == (1.0, True)
    names = {term.name for term in account_of(found).states}
    assert names.isdisjoint({"weights", "Adam moments"})
    plain = {**document, "fsdp_config": {"fsdp_version": 2}}
    kept = read_accelerate(plain, SCRIPT, world_size=4, gpu="RTX 4090").run
    assert kept.runtime.optimizer.offload == 0.0
    assert account_of(found).peak_bytes < account_of(kept).peak_bytes


BRIDGE: dict[str, Any] = {
    "model.num_layers": 8,
    "model.hidden_size": 1024,
    "model.num_attention_heads": 8,
    "model.seq_length": 2048,
    "model.vocab_size": 32000,
    "train.micro_batch_size": 1,
    "train.global_batch_size": 8,
    "mixed_precision.bf16": True,
    "ddp.use_distributed_optimizer": True,
}


def bridge(**more: Any) -> Run:
    """Return the run of settings, dots of whose names are two underscores here."""
    settings = BRIDGE | {name.replace("__", "."): value for name, value in more.items()}
    return run_of_settings(settings, world_size=4, environment={}, gpu="H100", source="here").run


def test_bridge_has_adapters() -> None:
    """Those of `peft`, whose modules are Megatron-Core's: one adapter beside each matrix."""
    assert bridge().runtime.adapters is None
    every = bridge(peft__dim=16).runtime.adapters
    assert every == Adapters(rank=16, fused=True)
    found = bridge(peft__dim=8, peft__target_modules=["linear_qkv"], peft__dropout=0.1)
    assert found.runtime.adapters == Adapters(
        rank=8, targets=frozenset({"query", "key", "value"}), fused=True, dropout=0.1
    )
    mixture = bridge(peft__dim=8, model__num_moe_experts=8, model__moe_ffn_hidden_size=512)
    adapters = mixture.runtime.adapters
    assert adapters is not None
    assert adapters.shared_by_experts
    assert {"expert_fc1", "expert_fc2"} < adapters.targets
    with pytest.raises(InputError, match="linear_x is not priced"):
        bridge(peft__target_modules=["linear_x"])


def test_bridge_offloads() -> None:
    """States by share, which is none unless it is given, and activations by layer or module."""
    assert bridge(optimizer__optimizer_cpu_offload=True).runtime.optimizer.offload == 0.0
    half = bridge(
        optimizer__optimizer_cpu_offload=True,
        optimizer__optimizer_offload_fraction=0.5,
        optimizer__overlap_cpu_optimizer_d2h_h2d=True,
    ).runtime
    assert (half.optimizer.offload, half.optimizer.offload_master) == (0.5, False)
    assert half.overlap.optimizer_host
    layers = bridge(model__cpu_offloading=True, model__cpu_offloading_num_layers=4)
    assert (layers.split.offload, layers.runtime.offload) == (
        frozenset(),
        ActivationOffload(layers=4),
    )
    fine = bridge(
        model__fine_grained_activation_offloading=True,
        model__offload_modules=["core_attn"],
        model__activation_offload_fraction=0.2,
    )
    assert (fine.split.offload, fine.runtime.offload) == (
        {"core_attn"},
        ActivationOffload(fraction=0.2),
    )


TITAN: dict[str, Any] = {
    "model": {"name": "llama3", "flavor": "8B"},
    "training": {"local_batch_size": 1, "seq_len": 4096},
    "parallelism": {"data_parallel_shard_degree": 8},
}


@pytest.mark.parametrize(
    ("training", "wanted"),
    [
        ({}, (0.0, False, 4, 8)),
        ({"enable_cpu_offload": True}, (1.0, True, 4, 8)),
        ({"dtype": "bfloat16"}, (0.0, False, 0, 4)),
    ],
)
def test_torchtitan_offloads_and_trains_in_16_bits(
    training: dict[str, Any], wanted: tuple[Any, ...]
) -> None:
    """Share on the host, the weights too, and bytes of fp32 weights and of both moments."""
    document = {**TITAN, "training": TITAN["training"] | training}
    found = read_titan(document, world_size=8, gpu="H100").run.runtime.optimizer
    assert (
        found.offload,
        found.offload_weights,
        found.master_bytes,
        found.moments_bytes,
    ) == wanted


def test_arguments_without_effect_are_said() -> None:
    """Those of offload and of precisions where nothing turns them on."""
    words: dict[str, tuple[str, ...]] = {
        "optimizer-offload-fraction": ("0.5",),
        "offload-modules": ("core_attn",),
        "fp4-recipe": ("nvfp4",),
        "num-layers-at-start-in-bf16": ("1",),
        "exp-avg-dtype": ("bf16",),
    }
    said = findings_of(words, world_size=8, environment={}, gpu="H100")
    idle = [one.text for one in said if one.kind == "no effect"]
    for flag in words:
        assert any(text.startswith(f"--{flag} (no --") for text in idle)


PEFT = {"use-peft": ("true",), "lora-r": ("8",), "lora-dropout": ("0",)}
PARALLEL = {"parallelism_config": {"parallelism_config_tp_size": 2}}


@pytest.mark.parametrize(
    ("trainer", "document", "given", "rule"),
    [
        ("deepspeed", {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
         {}, "deepspeed.adapters-tensor"),
        ("deepspeed", {}, {"load-in-8bit": ("true",)}, "deepspeed.base-int8"),
        ("accelerate", {"distributed_type": "FSDP"}, {"load-in-8bit": ("true",)},
         "accelerate.base-int8"),
        ("accelerate", {"distributed_type": "MULTI_GPU", **PARALLEL}, {"load-in-4bit": ("true",)},
         "transformers.base-tensor"),
    ],
)  # fmt: skip
def test_files_break_the_rules_on_adapters_that_a_search_keeps(
    trainer: str, document: dict[str, Any], given: dict[str, tuple[str, ...]], rule: str
) -> None:
    flags = {**SCRIPT, **PEFT, **given}
    read = read_deepspeed if trainer == "deepspeed" else read_accelerate
    whole = {**(ZERO3 if trainer == "deepspeed" else {}), **document}
    with pytest.raises(RuleError) as found:
        read(whole, flags, world_size=4, gpu="H100")
    assert found.value.ids == (rule,)


def test_quantised_weights_with_experts_have_no_price() -> None:
    """bitsandbytes leaves experts of transformers 5 in 16 bits, and says nothing."""
    flags = {**SCRIPT, **PEFT, "model-name-or-path": ("mistralai/Mixtral-8x7B-v0.1",)}
    assert read_deepspeed(ZERO3, flags, world_size=4, gpu="H100").run.runtime.adapters is not None
    with pytest.raises(UnpricedError) as found:
        read_deepspeed(ZERO3, {**flags, "load-in-4bit": ("1",)}, world_size=4, gpu="H100")
    assert found.value.key == "--load_in_4bit"


def test_recipes_for_adapters_say_their_ranks() -> None:
    """Rows of A are split over tensor ranks."""
    settings = named_recipe("llama3_70b_peft_config").settings
    place: dict[str, Any] = {"world_size": 8, "environment": {}, "gpu": "H100", "source": "x.sh"}
    assert run_of_settings(settings, **place).run.runtime.adapters is not None
    with pytest.raises(RuleError) as found:
        run_of_settings({**settings, "peft.dim": 4}, **place)
    assert found.value.ids == ("megatron.adapters.rank",)

"""Launches of Megatron-Bridge: what files say, what is wrong with them, and advice that runs.

Published configurations are in `test_check_bridge_published.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import asdict

from autopar.price.assessment import assess
from autopar.price.job import job_of_run
from autopar.records import replace
from autopar.run.run import run_with_split
from benchmarks.ledger_models import known_architecture
from search.check.alternatives import neighbours_of
from search.commands import check
from search.engines.bridge.recipes import PRECISIONS, named_recipe
from search.engines.huggingface.architectures import architecture, architecture_names
from search.engines.reader import CheckedFile
from search.engines.table import engine_of, read_checked
from search.engines.text import read_configuration
from tests.bridge_cases import (
    LLAMA,
    QWEN,
    SETUP,
    checked,
    overrides,
    recipe_run,
    spread,
    texts,
    words_of_row,
)
from tests.step_cases import target_named

H100 = target_named()

# --------------------------------------------------------------------------------------------------
# What a file says.


@pytest.mark.parametrize(
    ("name", "document", "asked"),
    [
        # A recipe that fine-tunes, no recipe at all, and files without some of the sizes.
        ("llama32_1b_finetune", {}, "model.num_layers, model.hidden_size"),
        ("llama3_8b_sft", {"peft": {"dim": 8}}, "model.num_layers, model.hidden_size"),
        ("my_run", {"model": {"seq_length": 8, "num_layers": 3}}, "add model.hidden_size"),
        ("my_run", {"model": {"tensor_model_parallel_size": 2, "num_layers": 3,
                              "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 8}},
         "add model.seq_length"),
    ],
)  # fmt: skip
def test_sizes_that_a_file_does_not_have_are_not_illegal(
    name: str, document: dict[str, Any], asked: str, tmp_path: Path
) -> None:
    plain = {"train": {"global_batch_size": 128, "micro_batch_size": 2}}
    file = overrides(tmp_path, plain | document, name=name, gpus=8)
    (found,) = (one for one in file.findings if one.id == "bridge.sizes")
    assert (found.kind, {*found.withdraws}) == ("not priced", {"memory", "time"})
    assert "the file" in found.text
    assert asked in found.text
    assert not [one for one in file.findings if one.kind == "illegal"]
    assert file.run is None


def test_three_ways_to_say_the_same(tmp_path: Path) -> None:
    """Arguments, overrides of Hydra and a YAML file of them are one launch."""
    plain = recipe_run(
        tmp_path, "--recipe llama3_8b_pretrain_config -tp 4 -pp 2 -cp 1 -gb 64 -mb 2 -sl 4096"
    )
    hydra = recipe_run(
        tmp_path,
        "--recipe llama3_8b_pretrain_config model.tensor_model_parallel_size=4 "
        "++model.sequence_parallel=True +model.pipeline_model_parallel_size=2 "
        "model.context_parallel_size=1 train.global_batch_size=64 train.micro_batch_size=2 "
        "'model.seq_length=4096' dataset.seq_length=4096",
    )
    document = {
        "model": {"tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 4096,
                  "pipeline_model_parallel_size": 2, "context_parallel_size": 1},
        "train": {"global_batch_size": 64, "micro_batch_size": 2},
        "optimizer": {"lr": 1e-4}, "checkpoint": {"save": None},
        "dataset": {"sequence_length": 4096},
    }  # fmt: skip
    name = "llama3_8b_pretrain_override_example"
    files = [
        plain,
        hydra,
        overrides(tmp_path, document, name=name, gpus=64),
        overrides(tmp_path, {"ConfigContainer": document}, name=name, gpus=64),
    ]
    first = plain.run
    assert first is not None
    assert (first.split.tp, first.strategy.pp, first.split.splits_sequence) == (4, 2, True)
    for file in files:
        assert file.run is not None
        assert job_of_run(file.run).blocks == job_of_run(first).blocks
        assert {**asdict(file.run), "name": ""} == {**asdict(first), "name": ""}
    said = "recipe from the name of the file: llama3_8b_pretrain_config"
    assert texts(files[2]) == [said]
    assert [one.flag for one in files[2].harmless] == ["checkpoint.save", "optimizer.lr"]


def test_defaults_are_those_of_bridge(tmp_path: Path) -> None:
    """Distributed optimizer, overlap, fused loss, no dropout; benchmarks reduce in bf16."""
    library = recipe_run(tmp_path, "--recipe llama3_70b_pretrain_config").run
    benchmark = checked(tmp_path, LLAMA).run
    for run in (library, benchmark):
        assert run is not None
        assert run.split.zero == 1
        assert run.runtime.overlap.gradients
        # 128 Mi parameters where overlaps are configured
        assert run.runtime.states.bucket == 134217728
        assert (run.kernels.loss, run.runtime.overlap.tensor) == ("te", True)
        assert run.model.dropout == run.model.attention.dropout == 0.0
        assert not run.runtime.masks
    assert library is not None
    assert benchmark is not None
    assert [one.runtime.precision.gradient_bytes for one in (library, benchmark)] == [4, 2]
    assert (library.split.tp, library.strategy.pp, library.strategy.vpp) == (4, 4, 5)
    assert (library.split.cp, library.seq_length, library.strategy.global_batch) == (2, 8192, 512)
    precision = benchmark.runtime.precision
    assert (precision.fp8_recipe, precision.fp8_weights) == ("tensorwise", True)
    small = recipe_run(tmp_path, "--recipe llama3_8b_pretrain_config").run
    assert small is not None
    assert small.runtime.states.bucket is None
    experts = checked(tmp_path, QWEN).run
    assert experts is not None
    assert experts.model.experts is not None
    assert experts.runtime.experts.skew == 1.0
    assert (experts.runtime.experts.dispatcher, experts.runtime.overlap.experts) == (
        "alltoall",
        True,
    )
    # 94 layers, embedding and loss in 32 parts
    sizes = [len(chunk.layers) for stage in experts.strategy.stages for chunk in stage]
    assert (min(sizes), max(sizes), sum(sizes)) == (2, 3, 94)


@pytest.mark.parametrize(
    ("name", "recipe", "eight_bit_weights"),
    [
        ("bf16_mixed", None, False),
        ("bf16_with_mxfp8_mixed", "mxfp8", True),
        ("bf16-with-fp8-current-scaling-mixed", "tensorwise", True),
        ("bf16_with_fp8_delayed_scaling_mixed", "delayed", True),
        ("bf16_with_fp8_subchannel_scaling_mixed", "blockwise", False),
    ],
)
def test_precisions_by_their_names(
    name: str, recipe: str | None, eight_bit_weights: bool, tmp_path: Path
) -> None:
    """As an override, and fields of it one by one."""
    words = f"--recipe llama3_8b_pretrain_config mixed_precision={name}"
    run = recipe_run(tmp_path, words, gpu="b200").run
    assert run is not None
    precision = run.runtime.precision
    assert precision.fp8 == (recipe is not None)
    assert recipe in (None, precision.fp8_recipe)
    assert precision.fp8_weights == eight_bit_weights
    assert precision.gradient_bytes == 4
    assert name.replace("-", "_") in PRECISIONS
    more = recipe_run(tmp_path, f"{words} mixed_precision.grad_reduce_in_fp32=false", gpu="b200")
    assert more.run is not None
    assert more.run.runtime.precision.gradient_bytes == 2


def test_what_counts_where_two_say_it(tmp_path: Path) -> None:
    """Performance scripts get the argument, the recipe runner the override."""
    words = "-tp 2 model.tensor_model_parallel_size=8 -mb 2 train.micro_batch_size=1"
    for file, tp, micro in (
        (checked(tmp_path, [*LLAMA, *spread(words)]), 2, 2),
        (recipe_run(tmp_path, f"--recipe llama3_70b_pretrain_config {words}"), 8, 1),
    ):
        assert file.run is not None, file.findings
        assert (file.run.split.tp, file.run.strategy.micro_batch) == (tp, micro)
        assert len(texts(file, "no effect")) == 2


def test_precision_aware_optimizers(tmp_path: Path) -> None:
    """Of bf16 weights the fp32 ones keep the other 16 bits; 8-bit weights have none of them."""
    bf16, fp8 = (
        checked(tmp_path, spread(f"-m llama -mr llama3_8b -g h100 -c {dtype} -ng 8 -cv v1")).run
        for dtype in ("bf16", "fp8_cs")
    )
    assert bf16 is not None
    assert fp8 is not None
    assert (bf16.runtime.optimizer.master_bytes, fp8.runtime.optimizer.master_bytes) == (2, 4)
    account = assess(bf16, H100).fullest
    terms = {term.name: term.num_bytes for term in account.peak}
    # 8.03 billion parameters over 8 ranks
    assert terms["fp32 weights"] == pytest.approx(8.03e9 / 8 * 2, rel=0.01)
    assert terms["Adam moments"] == 4 * terms["fp32 weights"]
    words = "--recipe llama3_8b_pretrain_config optimizer.use_precision_aware_optimizer=true"
    more = recipe_run(tmp_path, f"{words} optimizer.store_param_remainders=false").run
    assert more is not None
    assert more.runtime.optimizer.master_bytes == 4


def test_a_whole_configuration_needs_no_recipe(tmp_path: Path) -> None:
    """What a dry run dumps: sizes, degrees and types, and hundreds of keys that are off."""
    function = {"_call_": False, "_target_": "megatron.core.fusions.fused_bias_geglu.quick_gelu"}
    model = {
        "_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider",
        **(architecture("gpt_oss_120b") or {}),
        "activation_func": function,
        "attention_backend": None, "cuda_graph_impl": "none", "cuda_graph_scope": "full",
        "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1,
        "pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "seq_length": 4096,
        "moe_grouped_gemm": True, "moe_permute_fusion": True, "apply_rope_fusion": True,
        "moe_token_dispatcher_type": "alltoall", "moe_router_force_load_balancing": True,
        "recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"],
        "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te",
        "cp_comm_type": "a2a", "softmax_type": "learnable", "mamba_head_dim": 64,
        "moe_deepep_num_sms": 20, "heterogeneous_block_specs": False,
    }  # fmt: skip
    document = {
        "_target_": "megatron.bridge.training.config.ConfigContainer",
        "model": model,
        "train": {"global_batch_size": 1280, "micro_batch_size": 1, "manual_gc": True},
        "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True,
                "overlap_param_gather": True, "bucket_size": None},
        "mixed_precision": {"bf16": True, "fp8": None, "grad_reduce_in_fp32": False,
                            "params_dtype": {"_call_": False, "_target_": "torch.bfloat16"}},
        "comm_overlap": None,
        "logger": {"log_interval": 1},
    }  # fmt: skip
    file = overrides(tmp_path, document, name="config", gpus=64)
    published = checked(tmp_path, words_of_row(79)).run

    assert texts(file) == []
    assert file.run is not None
    assert published is not None
    # of the launcher's own: padding, and a bucket
    assert file.run.strategy == published.strategy
    assert file.run.model.attention == published.model.attention
    found = [assess(run, H100) for run in (file.run, published)]
    assert found[0].step is not None
    assert found[1].step is not None
    assert found[0].step.total_s == pytest.approx(found[1].step.total_s, rel=0.01)


def test_windows_graphs_and_small_moments(tmp_path: Path) -> None:
    """What Megatron-LM's arguments are not read for, and times and memory follow."""
    job = job_of_run(checked(tmp_path, words_of_row(79)).run)  # type: ignore[arg-type]
    windows = [block.attention.window for block in job.blocks if block.attention is not None]
    assert windows[:4] == [128, None, 128, None]
    plain = recipe_run(tmp_path, "--recipe deepseek_v3_pretrain_config", gpus=1024)
    whole = recipe_run(
        tmp_path,
        "--recipe deepseek_v3_pretrain_config optimizer.exp_avg_dtype=float32 "
        "optimizer.exp_avg_sq_dtype=torch.float32 model.cuda_graph_impl=full_iteration",
        gpus=1024,
    )
    assert plain.run is not None
    assert whole.run is not None
    both = (plain.run, whole.run)
    assert [one.runtime.optimizer.moments_bytes for one in both] == [4, 8]
    assert [one.kernels.graphs for one in both] == ["none", "full"]
    first, second = (assess(one, H100) for one in both)
    moments = [
        sum(term.num_bytes for term in found.accounts[1].peak if term.name == "Adam moments")
        for found in (first, second)
    ]
    assert 2 * moments[0] == moments[1]
    assert first.step is not None
    assert second.step is not None
    # the host that graphs spare, and the bytes that wider moments move
    assert second.step.terms_s["host"] < first.step.terms_s["host"]
    assert second.step.optimizer_s > first.step.optimizer_s
    assert any("CUDA" in text for text in texts(whole, "not priced"))
    # 61 layers in 16 stages, of which the last has one and the further token's
    stages = plain.run.strategy.stages
    assert [len(stage[0].layers) for stage in stages] == [4] * 15 + [1]
    assert (stages[-1][0].mtp, stages[-1][0].head) == (1, True)


def test_published_sizes() -> None:
    """Those of the ledger's models, and the numbers of parameters that their names say."""
    for name in ("deepseek_v3", "kimi_k2", "qwen3_30b_a3b", "qwen3_235b_a22b", "gpt_oss_20b",
                 "gpt_oss_120b"):  # fmt: skip
        sizes = architecture(name)
        ours = known_architecture(name)
        assert sizes is not None
        assert ours is not None
        mixture = ours.last.experts
        assert mixture is not None
        assert sizes["num_layers"] == ours.num_layers
        assert sizes["hidden_size"] == ours.hidden
        assert sizes["num_moe_experts"] == mixture.number
        assert sizes["moe_router_topk"] == mixture.per_token
        assert sizes["moe_ffn_hidden_size"] == mixture.width
        assert sizes["vocab_size"] == ours.vocab
        assert sizes.get("mtp_num_layers", 0) == ours.mtp
        assert sizes["num_attention_heads"] == ours.attention.heads
    billions = {"llama32_1b": 1.24, "llama32_3b": 3.21, "llama3_8b": 8.03, "llama31_405b": 405.9,
                "qwen3_600m": 0.6, "qwen3_4b": 4.02, "qwen3_8b": 8.19, "qwen3_14b": 14.8,
                "qwen3_32b": 32.8, "mixtral_8x7b": 46.7, "qwen25_7b": 7.6}  # fmt: skip
    for name, size in billions.items():
        sizes = architecture(name)
        assert sizes is not None
        assert _billions(sizes) == pytest.approx(size, rel=0.01), name
    assert architecture("llama5") is None
    assert list(architecture_names()) == sorted(architecture_names(), key=lambda n: (-len(n), n))


def _billions(sizes: Mapping[str, Any]) -> float:
    """Return the parameters of a model with norms left out, counted by hand."""
    hidden, width = sizes["hidden_size"], sizes["kv_channels"]
    heads, groups = sizes["num_attention_heads"], sizes["num_query_groups"]
    attention = hidden * width * (2 * heads + 2 * groups)
    mlp = 3 * hidden * sizes["ffn_hidden_size"] * sizes.get("num_moe_experts", 1)
    tables = 1 if sizes["share_embeddings_and_output_weights"] else 2
    layers = sizes["num_layers"] * (attention + mlp)
    return float(layers + tables * sizes["vocab_size"] * hidden) / 1e9


# --------------------------------------------------------------------------------------------------
# Findings.


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ([*LLAMA, "model.num_attention_heads=62"], "illegal", "heads(62) % tp(4) = 2 != 0"),
        ([*LLAMA, "-gb", "127"], "illegal",
         "global batch(127) % (micro batch(1) * dp(2)) = 1"),
        ([*LLAMA, "-pp", "6", "-vp", "None"], "illegal", "world size(64) % (tp(4) * cp(1) * pp(6)"),
        ([*LLAMA, "-vp", "3"], "illegal", "layers(80) % (pp(8) * chunks(3)) = 8"),
        ([*LLAMA, "-tp", "x"], "illegal", "-tp: expected a positive integer, got 'x'"),
        ([*LLAMA, "-tp", "$TP"], "not priced", "-tp is '$TP'"),
        ([*LLAMA, "model.recompute_granularity=full"], "illegal",
         "model.recompute_method: this key is missing"),
        ([*LLAMA, "-c", "fp8_mx"], "not priced",
         "no release of Megatron-Bridge up to 0.6.2 has a recipe of llama3_70b on h100 in fp8_mx"),
        ([*LLAMA, "mixed_precision=bf16_with_mxfp8_mixed"], "illegal",
         "mixed_precision mxfp8 needs Blackwell"),
        ([*LLAMA, "--use_megatron_fsdp", "true"], "not priced",
         "--use_megatron_fsdp with 8 pipeline stages is not priced"),
        ([*QWEN, "-ep", "48"], "illegal", "experts(128) % ep(48) = 32 != 0"),
        ([*QWEN, "-ep", "64"], "illegal", "world size(256) % (etp(1) * ep(64) * pp(8)) = 256"),
        ([*QWEN, "-pp", "5", "-vp", "4"], "illegal", "(pp(5) * chunks(4)) = 16"),
        ([*QWEN, "model.sequence_parallel=false"], "illegal", "experts with tp(2) need"),
        ([*QWEN, "--recompute_modules", "moe"], "illegal",
         "comm_overlap.overlap_moe_expert_parallel_comm needs no recomputation"),
        ([*QWEN, "-mb", "2", "-pp", "8", "-vp", "4", "-gb", "320"], "illegal",
         "% 8 = 2, between 0 and pp(8)"),
        ([*LLAMA, "-ep", "8"], "illegal", "-ep 8 needs model.num_moe_experts"),
        ([*LLAMA, "model.pipeline_model_parallel_layout='Et*3|tL'"], "illegal",
         "model.pipeline_model_parallel_layout: the layout has 2 parts"),
        ([*LLAMA, "-pp", "1", "-vp", "5"], "no effect",
         "-vp (-pp is 1)"),
        ([*LLAMA, "ddp.overlap_grad_reduce=false"], "no effect",
         "ddp.overlap_grad_reduce (comm_overlap.overlap_grad_reduce is true)"),
        ([*LLAMA, "ddp.grad_reduce_in_fp32=true"], "no effect",
         "(mixed_precision.grad_reduce_in_fp32 is false)"),
        ([*LLAMA, "-tp", "1", "comm_overlap.tp_comm_overlap=true"], "no effect",
         "comm_overlap.tp_comm_overlap (no sequence parallelism)"),
        ([*LLAMA, "-et", "2"], "no effect", "-et (no model.num_moe_experts)"),
        ([*LLAMA, "model.new_switch=7"], "not understood", "model.new_switch=7 may change"),
        ([*LLAMA, "model.tensor_model_paralel_size=2"], "not understood",
         "Did you mean 'model.tensor_model_parallel_size'?"),
        ([*LLAMA, "--recompute_module", "mlp"], "not understood",
         "--recompute_module"),
        ([*LLAMA, "-tp", "8", "model.tensor_model_parallel_size=2"], "no effect",
         "model.tensor_model_parallel_size (-tp takes precedence)"),
        ([*LLAMA, "-tp", "8", "model.sequence_parallel=false"], "no effect",
         "model.sequence_parallel (-tp takes precedence)"),
        ([*LLAMA, "--new_flag", "7"], "not understood", "--new_flag 7 may change time"),
        ([*LLAMA, "--task", "lora"], "not priced", "packs samples"),
        ([*LLAMA, "-mr", "llama9_1t"], "not priced", "recipe of llama9_1t on h100 in fp8_cs"),
        (["-m", "nemotronh", "-mr", "nemotron_3_nano", "-g", "h100", "-ng", "16"], "not priced",
         "memory of CUDA graphs"),
        ([*LLAMA, "-g", "gb200"], "read", "the recipe is that of gb200, and it is priced for h100"),
        ([*LLAMA, "-cv", "v7"], "not priced", "its variants are v1, v2"),
        ([*LLAMA, "model.cuda_graph_impl=local"], "not priced", "CUDA"),
        ([*LLAMA, "model.cuda_graph_impl=null"], "illegal", "or none, got null"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_in_the_words_of_the_file(
    words: list[str], kind: str, said: str, tmp_path: Path
) -> None:
    """The later of two arguments counts."""
    file = checked(tmp_path, words)
    assert any(said in text for text in texts(file, kind)), file.findings
    # nothing of a recipe is called by a name that the file's reader does not know
    assert not any("--tensor-model" in text or "--num-experts" in text for text in texts(file))


def test_good_launches_have_nothing_to_be_found(tmp_path: Path) -> None:
    """And their arguments of cluster and logging are counted."""
    file = checked(tmp_path, [*LLAMA, "--wandb_project_name", "x", "logger.log_interval=5"])
    assert texts(file) == []
    named = [one.flag for one in file.harmless]
    assert named == ["-a", "-p", "--wandb_project_name", "logger.log_interval"]
    assert texts(recipe_run(tmp_path, "--recipe llama3_8b_pretrain_config")) == []


def test_scripts_as_people_have_them(tmp_path: Path) -> None:
    """Arrays of overrides in a quoted launch, and a blank behind a backslash, which ends it."""
    path = tmp_path / "job.sh"
    path.write_text(
        "OVERRIDES=(\n  model.tensor_model_parallel_size=8\n"
        "  'model.recompute_modules=[layernorm,mlp]' model.recompute_granularity=selective\n)\n"
        'srun --container-image=x bash -c "uv run python -m torch.distributed.run '
        "--nproc_per_node=8 --nnodes=8 run_recipe.py --recipe llama3_70b_pretrain_config "
        '${OVERRIDES[*]} train.global_batch_size=128"\n',
        encoding="utf-8",
    )
    file = read_checked(str(path), world_size=None, gpu="h100-80gb")
    assert file.run is not None
    assert (file.world_size, file.run.split.tp, file.run.strategy.global_batch) == (64, 8, 128)
    assert sorted(file.run.split.modules) == ["layernorm", "mlp"]
    path.write_text(f"{SETUP} -m llama -mr llama3_70b -ng 64 -g h100 \\ \n  -c fp8_cs\n", "utf-8")
    broken = read_checked(str(path), world_size=None, gpu="h100-80gb")
    assert any("line 2 begins a command with -c" in text for text in texts(broken, "read"))


def test_variables_that_bridge_sets_are_not_asked_for(tmp_path: Path) -> None:
    """Connections of devices before Blackwell, and what makes a run deterministic."""
    for words in ([*LLAMA, "--deterministic"], [*LLAMA, "-tp", "8"]):
        assert texts(checked(tmp_path, words), "environment") == []
    document = {"dist": {"use_megatron_fsdp": True}, "model": {"seq_length": 4096},
                "train": {"global_batch_size": 8, "micro_batch_size": 1},
                "ddp": {"data_parallel_sharding_strategy": "optim_grads_params"}}  # fmt: skip
    file = overrides(tmp_path, document, name="llama3_8b_pretrain_fsdp", gpus=8)
    assert file.run is not None
    assert file.run.split.zero == 3
    assert texts(file, "environment") == []
    own = checked(tmp_path, [*LLAMA, "-ce", "CUDA_DEVICE_MAX_CONNECTIONS=8"])
    said = "set CUDA_DEVICE_MAX_CONNECTIONS=1 (is 8)"
    assert texts(own, "environment")[0].startswith(said)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama3_8b_sft_config", "packs samples"),
        ("qwen3_30b_a3b_peft_config", "packs samples"),
        ("gemma2_9b_peft_config", "trains adapters or task samples"),
        ("olmoe_dpo_config", "trains adapters or task samples"),
        ("nemotron_3_nano_4b_pretrain_config", "add model.mamba_num_heads"),
        ("mixtral_8x7b_pretrain_config", "sizes of the model of mixtral_8x7b_pretrain_config"),
    ],
)
def test_what_is_not_known_of_a_recipe_is_said(name: str, said: str, tmp_path: Path) -> None:
    """Never guessed in silence."""
    file = recipe_run(tmp_path, f"--recipe {name} -gb 128")
    assert any(said in text for text in texts(file)), file.findings
    assert file.run is None


@pytest.mark.parametrize(
    ("words", "length", "said"),
    [
        ("-sl 4096", 4096, None),
        ("model.seq_length=4096 dataset.seq_length=4096", 4096, None),
        ("model.seq_length=8192", 8192, None),
        ("model.seq_length=4096", 4096, "model.seq_length=4096 is without effect in run_recipe.py"),
        ("dataset.sequence_length=4096", 4096,
         "dataset.sequence_length=4096 is taken for the model's length as well, as run_recipe.py"),
        ("model.seq_length=2048 dataset.seq_length=4096", 4096,
         "model.seq_length 2048"),
    ],
)  # fmt: skip
def test_samples_are_as_long_as_the_model_takes_them(
    words: str, length: int, said: str | None, tmp_path: Path
) -> None:
    """One length without the other trains with another length than the file reads, or not."""
    file = recipe_run(tmp_path, f"--recipe llama3_8b_pretrain_config {words}")
    assert file.run is not None
    assert file.run.seq_length == length
    found = [text for text in texts(file) if "seq_length" in text or "sequence_length" in text]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert not any("length" in one.flag for one in file.harmless)


@pytest.mark.parametrize(
    "key", ["model.seq_length", "dataset.seq_length", "dataset.sequence_length"]
)
@pytest.mark.parametrize("value", ["8", float("nan"), 2048.5, True, [8]])
def test_a_length_of_another_type_is_refused(key: str, value: object, tmp_path: Path) -> None:
    section, name = key.split(".")
    document: dict[str, Any] = {
        "model": {"seq_length": 4096},
        "dataset": {"seq_length": 4096},
        "train": {"global_batch_size": 64, "micro_batch_size": 2},
    }
    document[section] = {name: value}
    file = overrides(tmp_path, document, name="llama3_8b_pretrain", gpus=8)
    assert file.run is None
    assert any(key in str(one) for one in file.findings)


def test_the_small_models_of_a_family_have_recipes(tmp_path: Path) -> None:
    """Degrees alone, two samples a rank, and nothing scattered: `recipes/qwen/qwen3.py`."""
    for name, tp, pp in (("600m", 1, 1), ("4b", 2, 1), ("14b", 8, 1), ("32b", 8, 2)):
        file = recipe_run(tmp_path, f"--recipe qwen3_{name}_pretrain_config -gb 128")
        run = file.run
        assert run is not None
        assert (run.split.tp, run.strategy.pp, run.split.splits_sequence) == (tp, pp, False)
        assert (run.strategy.micro_batch, run.split.recompute == "full") == (2, name == "32b")
        assert texts(file) == []


def test_sizes_in_the_file_need_no_recipe(tmp_path: Path) -> None:
    """A recipe of somebody's own, whose model is told by overrides."""
    sizes = architecture("llama3_8b")
    assert sizes is not None
    words = " ".join(f"model.{key}={json.dumps(value)}" for key, value in sizes.items())
    more = "model.seq_length=8192 train.micro_batch_size=1 train.global_batch_size=128"
    file = recipe_run(tmp_path, f"--recipe my_pretrain_config {words} {more}")
    assert file.run is not None, file.findings
    assert file.run.model.num_layers == 32
    assert named_recipe("my_pretrain_config").model is None


@pytest.mark.parametrize(
    ("text", "trainer"),
    [
        (f"{SETUP} -m llama -mr llama3_8b -ng 8 -g h100", "Megatron-Bridge"),
        ("python run_script.py --model_family_name llama --model_recipe_name x", "Megatron-Bridge"),
        ("torchrun pretrain_llama3_8b.py --config-file x.yaml train.micro_batch_size=2",
         "Megatron-Bridge"),
        ("./scripts/training/train.sh --nodes 2 --gpus-per-node 8 --model gpt_oss_20b --mode x",
         "Megatron-Bridge"),
        ("torchrun pretrain_gpt.py --num-layers 2 --hidden-size 8 --micro-batch-size 1",
         "Megatron-LM"),
        ("torchrun nemo.py model.tensor_model_parallel_size=2 trainer.devices=8 --x 1",
         None),
        ("python main_ppo.py actor_rollout_ref.model.path=x train.micro_batch_size=2 --y", None),
    ],
)  # fmt: skip
def test_whose_a_script_is(text: str, trainer: str | None, tmp_path: Path) -> None:
    """Others have keys of the same names beside their own."""
    path = tmp_path / "x.sh"
    path.write_text(text + "\n", encoding="utf-8")
    source = read_configuration(path)
    if trainer is None:
        with pytest.raises(Exception, match=r"is not a launch script|reinforcement learning"):
            engine_of(source)
    else:
        assert engine_of(source).title == trainer


# --------------------------------------------------------------------------------------------------
# Better launches, in the words of the file.


def _changed(words: list[str], file: CheckedFile, changes: Any) -> list[str]:
    """Return the arguments as somebody edits them who follows the advice."""
    text = " " + " ".join(words) + " "
    for key, before, after in changes:
        if before is None:
            text += f"{file.spelled(key, after)} "
            continue
        line = f" {file.spelled(key, before)} "
        assert text.count(line) == 1, (line, text)
        text = text.replace(line, f" {file.spelled(key, after)} " if after is not None else " ")
    return text.split()


@pytest.mark.whole
@pytest.mark.parametrize(
    "words",
    [
        [*LLAMA, "-tp", "4", "-pp", "8", "-vp", "5"],
        [*LLAMA, "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
        [*LLAMA, "-rl", "2"],
        spread("-m llama -mr llama3_8b -g h100 -c fp8_cs -ng 64 -rl 5"),
    ],
    ids=["arguments", "dotted", "recomputed", "recomputed by the recipe"],
)
def test_advice_is_in_the_words_of_the_file(words: list[str], tmp_path: Path) -> None:
    """With the changes made by hand, the file has the time and the memory that were said."""
    file = checked(tmp_path, words)
    assert file.run is not None
    found = neighbours_of(assess(file.run, H100), H100, file.written, file.moves)

    assert found.any is not None
    for neighbour in (found.one, found.two, found.any):
        if neighbour is None:
            continue
        again = checked(tmp_path, _changed(words, file, neighbour.changes))
        assert texts(again, "illegal") == texts(again, "no effect") == []
        assert again.run is not None
        priced = assess(again.run, H100)
        assert priced.step == neighbour.assessment.step
        assert priced.fullest.peak_bytes == neighbour.assessment.fullest.peak_bytes


def test_degrees_of_experts_are_written(tmp_path: Path) -> None:
    """Each by its argument, chunks and recomputation with them; and that is the launch wanted."""
    words = [*QWEN, "--recompute_modules", "layernorm,moe_act"]
    file = checked(tmp_path, words)
    run = file.run
    assert run is not None
    wanted = run_with_split(run, ep=16, etp=2, recompute=frozenset({"core_attn"}))
    changes = file.written(wanted)
    assert changes == (
        ("--recompute_modules", "layernorm,moe_act", None),
        ("model.recompute_granularity", None, "selective"),
        ("model.recompute_modules", None, "[core_attn]"),
        ("-ep", None, "16"),
        ("-et", None, "2"),
    )
    again = checked(tmp_path, _changed(words, file, changes)).run
    assert again is not None
    assert replace(again, name=wanted.name) == wanted
    # no neighbour has another length, and none is written
    assert file.written(replace(run, seq_length=2048)) is None


def test_advice_for_yaml(tmp_path: Path) -> None:
    """Keys are dotted, and their values as YAML has them."""
    document: dict[str, Any] = {
        "model": {"tensor_model_parallel_size": 4, "sequence_parallel": True,
                  "context_parallel_size": 1, "recompute_granularity": "full",
                  "recompute_method": "uniform", "recompute_num_layers": 1},
        "train": {"global_batch_size": 128},
    }  # fmt: skip
    file = overrides(tmp_path, document, name="llama3_8b_pretrain", gpus=16)
    assert file.run is not None
    best = neighbours_of(assess(file.run, H100), H100, file.written, file.moves).any
    assert best is not None
    for key, _, after in best.changes:
        section, _, name = key.partition(".")
        document[section][name] = yaml.safe_load(after or "null")
        assert file.spelled(key, after) == f"{key}: {after}"
    again = overrides(tmp_path, document, name="llama3_8b_pretrain", gpus=16)
    assert again.run is not None
    assert assess(again.run, H100).step == best.assessment.step


def test_a_key_without_a_section_is_not_advised(tmp_path: Path) -> None:
    """A recipe without configured overlaps has nothing that an override could be laid over."""
    words = "--recipe llama3_8b_pretrain_config -tp 4 -cp 1 -gb 128"
    file = recipe_run(tmp_path, words)
    run = file.run
    assert run is not None
    overlap = replace(run.runtime.overlap, tensor=True)
    assert file.written(replace(run, runtime=replace(run.runtime, overlap=overlap))) is None
    strategy = replace(run.strategy, micro_batch=2)
    changes = file.written(replace(run, strategy=strategy))
    assert changes == (("train.micro_batch_size", None, "2"),)


def test_the_command_speaks_the_words_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables, advice and the object."""
    path = tmp_path / "launch.sh"
    words = "-m llama -mr llama3_8b -g h100 -c fp8_cs -ng 16 -rl 5 -mb 1"
    path.write_text(f"{SETUP} {words}\n", encoding="utf-8")
    assert check.run([str(path), "--hardware", "h200:2x8", "--verbose"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: Megatron-Bridge on 16 h200")
    for text in ("  - -rl 5\n", "ddp.use_distributed_optimizer", "-mb, model.seq_length"):
        assert text in out
    assert "--use-distributed-optimizer" not in out
    assert check.run([str(path), "--hardware", "h200:2x8", "--json", "-"]) == 0
    (launch,) = json.loads(capsys.readouterr().out)["launches"]
    assert (launch["trainer"], launch["stack"]) == ("Megatron-Bridge", "megatron-core")
    flags = {change["flag"] for change in launch["neighbours"]["any"]["arguments"]}
    assert "-rl" in flags


def test_the_device_of_the_recipe_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing else is asked for; others are as they are."""
    path = tmp_path / "launch.sh"
    path.write_text(f"{SETUP} -m llama -mr llama3_8b -g gb200 -c fp8_cs -ng 8\n", "utf-8")
    plain = tmp_path / "plain.json"
    plain.write_text('{"--num-layers": 2, "--hidden-size": 8}', "utf-8")
    assert check.run([str(path), str(plain), "--no-neighbours"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith(f"{path}: Megatron-Bridge on 8 gb200\n")
    assert "the recipe is that of" not in out
    assert "--hardware" in err
    assert "--hardware" in err
    path.write_text(f"{SETUP} -m llama -mr llama3_8b -g vr200 -c fp8_cs -ng 8\n", "utf-8")
    assert check.run([str(path), "--no-neighbours", "--hardware", "h100:1x8"]) in (0, 3)
    assert "the recipe is that of vr200, and it is priced for h100-80gb" in " ".join(
        capsys.readouterr().out.split()
    )

"""Launches of Megatron-Bridge: published ones are read and priced, broken ones found, advice runs.

Published configurations are rows of NVIDIA's performance tables, written as the arguments of the
project's own scripts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from autopar.estimate.accuracy import load_accuracy
from autopar.estimate.job import Experts
from autopar.estimate.layer import machine_of
from benchmarks.ledger import read_runs
from benchmarks.ledger_models import known_architecture
from search.check.assessment import Target, assess
from search.check.job import job_of_launch
from search.check.neighbours import neighbours_of
from search.check.read import read_checked, trainer_of
from search.check.trainer import CheckedFile
from search.commands import check
from search.configuration import read_configuration
from search.launches.architectures import architecture, architecture_names
from search.launches.bridge_presets import preset_of
from search.launches.bridge_recipes import PRECISIONS, named_recipe
from tests.step_cases import card_named, stack_named

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
"""Of tables; the others are scales of a tensor."""
LINES = (
    # H100: 30B, GPT-OSS, 235B, 70B, 405B; 70B and 235B of 25.11; 8B fully sharded, 70B, 405B and
    # DeepSeek-V3 of 25.09
    59, 79, 86, 140, 144, 164, 166, 171, 172, 173, 174,
    # Blackwell, some of them with graphs of the whole step: DeepSeek-V3, 235B, 70B, GPT-OSS, 235B,
    # 405B, 235B, 8B, 405B, 8B
    43, 44, 47, 70, 75, 85, 99, 127, 154, 162, 167,
)  # fmt: skip
"""Lines of the table of published runs."""


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
    """Return the arguments of `setup_experiment.py` that a row and its recipe's settings are."""
    row, settings = runs()[line], read_runs()[1].get(line, {})
    model = model_of(row)
    assert model is not None, row["model"]
    words = ["-m", model.split("_")[0], "-mr", model, "-c", dtype_of(row)]
    words += ["-g", CARDS[row["gpu_type"]].split("-")[0], "-ng", row["num_gpus"]]
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
    """Return what a script with these arguments says."""
    path = folder / "launch.sh"
    path.write_text(f"{SETUP} \\\n    {' '.join(words)}\n", encoding="utf-8")
    return read_checked(str(path), world_size=world, gpu=gpu)


def recipe_run(folder: Path, words: str, *, gpus: int = 64, gpu: str = "h100-80gb") -> CheckedFile:
    """Return what a script that runs a library recipe says."""
    path = folder / "recipe.sh"
    path.write_text(
        f"torchrun --nnodes {gpus // 8} --nproc-per-node 8 run_recipe.py {words}\n",
        encoding="utf-8",
    )
    return read_checked(str(path), world_size=None, gpu=gpu)


def overrides(folder: Path, document: Mapping[str, Any], *, name: str, gpus: int) -> CheckedFile:
    """Return what a YAML file of overrides says."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return read_checked(str(path), world_size=gpus, gpu="h100-80gb")


def texts(file: CheckedFile, kind: str | None = None) -> list[str]:
    """Return the sentences of a file's findings."""
    return [one.text for one in file.findings if kind is None or one.kind == kind]


def target(card: str = "h100-80gb") -> Target:
    """Return a device with the software of the file's trainer."""
    return Target(
        machine=machine_of(card_named(card), stack_named("megatron-core")),
        accuracy=load_accuracy(),
        site_known=False,
        oom_risk=0.01,
    )


# --------------------------------------------------------------------------------------------------
# Published configurations.


@pytest.mark.parametrize("line", LINES)
def test_published_configurations_are_read_and_priced(line: int, tmp_path: Path) -> None:
    """Nothing is illegal or not understood; the step is one of nine of ten, and there is room."""
    row = runs()[line]
    card = CARDS[row["gpu_type"]]
    began = time.process_time()
    file = checked(tmp_path, words_of_row(line), gpu=card)
    launch = file.launch

    assert launch is not None, file.findings
    assert {one.kind for one in file.findings} <= {"not priced", "read"}
    assert all("memory" in text or "save" in text for text in texts(file, "not priced"))
    degrees = launch.degrees
    said = {"num_gpus": degrees.world, "tp": degrees.tp, "pp": degrees.pp, "cp": degrees.cp,
            "ep": degrees.ep, "vpp": degrees.vpp, "dp": degrees.dp, "seq": launch.seq,
            "micro_batch": launch.micro_batch, "global_batch": launch.global_batch}  # fmt: skip
    # a table has the GPUs of a data-parallel group under FSDP, of experts of one expert too
    assert {key: int(row[key]) for key in said} == said
    found = assess(launch, target(card))
    assert time.process_time() - began < 1.0
    assert found.interval_s is not None, found.untimed
    low, high = found.interval_s
    assert low < float(row["iter_time_s"]) < high
    # it ran
    assert found.odds_of_oom < 0.5


def test_published_configurations_are_many() -> None:
    """More than twenty, of every model and device of the tables."""
    rows = [runs()[line] for line in LINES]
    assert len(set(LINES)) == len(LINES) > 20
    assert {model_of(row) for row in rows} == set(MODELS.values())
    assert {row["gpu_type"] for row in rows} >= {"H100-SXM", "GB200", "GB300", "B200"}


def test_nine_of_ten_published_steps_lie_in_their_intervals(tmp_path: Path) -> None:
    """Of all rows of these models, as far as anybody can price them; and why not the others."""
    inside, refused = [], {}
    for line, row in runs().items():
        known = row["source"].startswith("NVIDIA Megatron-Bridge") and model_of(row)
        if not known or row["notes"] in ("SFT", "LoRA"):
            continue
        card = CARDS[row["gpu_type"]]
        world = int(row["num_gpus"])
        file = checked(tmp_path, words_of_row(line), gpu=card, world=world)
        kinds = {one.kind for one in file.findings}
        if file.launch is None:
            refused[line] = "illegal" if "illegal" in kinds else texts(file, "not priced")[0]
            continue
        found = assess(file.launch, target(card))
        assert found.interval_s is not None
        low, high = found.interval_s
        inside.append(low < float(row["iter_time_s"]) < high)
    assert len(inside) >= 85
    assert sum(inside) / len(inside) > 0.9
    # without its further token DeepSeek-V3 had layouts that no table has
    assert {line for line, why in refused.items() if why == "illegal"} == {157, 160}
    others = [why for why in refused.values() if why != "illegal"]
    assert all("4 bits" in why or "offloaded" in why for why in others)


def test_presets_are_what_was_published() -> None:
    """The rows of the two newest containers have the degrees and the batch of the newest preset."""
    others = {}
    compared = 0
    for line, row in runs().items():
        model = model_of(row)
        newest = row["source"].startswith("NVIDIA Megatron-Bridge") and "26.06" in row["source"]
        if not newest or model is None or row["notes"] in ("SFT", "LoRA"):
            continue
        gpu = CARDS[row["gpu_type"]].split("-")[0]
        preset = preset_of(model, gpu, dtype_of(row), None)
        assert preset is not None, row
        compared += 1
        ours = (preset.num_gpus, preset.global_batch, preset.micro_batch, preset.tp, preset.pp,
                preset.cp, preset.vp or 1, preset.ep)  # fmt: skip
        columns = ("num_gpus", "global_batch", "micro_batch", "tp", "pp", "cp", "vpp", "ep")
        if ours != tuple(int(row[column]) for column in columns):
            others[line] = ours
    assert compared == 15
    # DeepSeek-V3 on B300 was measured with two sequences in whole stages
    assert others == {54: (256, 4096, 1, 1, 8, 1, 2, 8)}


def test_a_recipe_alone_says_it_all(tmp_path: Path) -> None:
    """A published row is what its recipe sets; of twice the GPUs the batch is twice as large."""
    short = spread("-m llama -mr llama3_70b -g h100 -c fp8_cs")
    explicit = checked(tmp_path, words_of_row(140)).launch
    for words in (short, [*short, "-cv", "v2"]):
        assert checked(tmp_path, [*words, "-ng", "64"]).launch == explicit
    doubled = checked(tmp_path, [*short, "-ng", "128"]).launch
    assert explicit is not None
    assert doubled is not None
    assert (explicit.global_batch, doubled.global_batch) == (256, 512)
    older = checked(tmp_path, [*short, "-ng", "64", "-cv", "v1"])
    assert older.launch is not None
    assert older.launch.global_batch == 128
    assert texts(older) == []
    said = "of the variants v1, v2 of llama3_70b on h100 in fp8_cs, v2 is taken"
    assert texts(checked(tmp_path, [*short, "-ng", "64"])) == [said]
    # family and size apart, as the first releases had them
    first = [
        "-m",
        "llama3",
        "-s",
        "70b",
        "-g",
        "h100",
        "-c",
        "fp8",
        "--fp8_recipe",
        "cs",
        "-cv",
        "v1",
        "-ng",
        "64",
    ]
    assert checked(tmp_path, first).launch == older.launch
    flat = recipe_run(tmp_path, "--recipe llama3_70b_pretrain_64gpu_h100_fp8cs_config").launch
    assert flat is not None
    assert flat.degrees == explicit.degrees
    assert flat.precision == explicit.precision


# --------------------------------------------------------------------------------------------------
# What a file says.


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
        "'model.seq_length=4096'",
    )
    document = {
        "model": {"tensor_model_parallel_size": 4, "sequence_parallel": True, "seq_length": 4096,
                  "pipeline_model_parallel_size": 2, "context_parallel_size": 1},
        "train": {"global_batch_size": 64, "micro_batch_size": 2},
        "optimizer": {"lr": 1e-4}, "checkpoint": {"save": None},
    }  # fmt: skip
    name = "llama3_8b_pretrain_override_example"
    files = [
        plain,
        hydra,
        overrides(tmp_path, document, name=name, gpus=64),
        overrides(tmp_path, {"ConfigContainer": document}, name=name, gpus=64),
    ]
    first = plain.launch
    assert first is not None
    assert (first.degrees.tp, first.degrees.pp, first.degrees.scattered) == (4, 2, True)
    for file in files:
        assert file.launch is not None
        assert job_of_launch(file.launch).blocks == job_of_launch(first).blocks
        assert {**vars(file.launch), "name": ""} == {**vars(first), "name": ""}
    said = "the recipe is taken from the file's name: llama3_8b_pretrain_config"
    assert texts(files[2]) == [said]
    assert [one.flag for one in files[2].harmless] == ["checkpoint.save", "optimizer.lr"]


def test_defaults_are_those_of_bridge(tmp_path: Path) -> None:
    """Distributed optimizer, overlap, fused loss, no dropout; benchmarks reduce in bf16."""
    library = recipe_run(tmp_path, "--recipe llama3_70b_pretrain_config").launch
    benchmark = checked(tmp_path, LLAMA).launch
    for launch in (library, benchmark):
        assert launch is not None
        assert launch.optimizer.sharding == "distributed"
        assert launch.optimizer.overlap_gradients
        # 128 Mi parameters where overlaps are configured
        assert launch.optimizer.bucket == 134217728
        assert (launch.loss_fusion, launch.tensor_overlap) == ("te", True)
        assert launch.model.hidden_dropout == launch.model.attention.dropout == 0.0
        assert not launch.attention_masks
    assert library is not None
    assert benchmark is not None
    assert [library.precision.gradient_bytes, benchmark.precision.gradient_bytes] == [4, 2]
    assert (library.degrees.tp, library.degrees.pp, library.degrees.vpp) == (4, 4, 5)
    assert (library.degrees.cp, library.seq, library.global_batch) == (2, 8192, 512)
    assert (benchmark.precision.fp8_recipe, benchmark.precision.fp8_weights) == ("tensorwise", True)
    small = recipe_run(tmp_path, "--recipe llama3_8b_pretrain_config").launch
    assert small is not None
    assert small.optimizer.bucket is None
    experts = checked(tmp_path, QWEN).launch
    assert experts is not None
    assert experts.model.experts is not None
    assert experts.model.experts.skew == 1.0
    assert (experts.model.experts.dispatcher, experts.degrees.overlap_experts) == ("alltoall", True)
    # 94 layers, embedding and loss in 32 parts
    sizes = [len(chunk[1]) for stage in experts.degrees.chunks for chunk in stage]
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
    launch = recipe_run(tmp_path, words, gpu="b200").launch
    assert launch is not None
    precision = launch.precision
    assert precision.fp8 == (recipe is not None)
    assert recipe in (None, precision.fp8_recipe)
    assert precision.fp8_weights == eight_bit_weights
    assert precision.gradient_bytes == 4
    assert name.replace("-", "_") in PRECISIONS
    more = recipe_run(tmp_path, f"{words} mixed_precision.grad_reduce_in_fp32=false", gpu="b200")
    assert more.launch is not None
    assert more.launch.precision.gradient_bytes == 2


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
    published = checked(tmp_path, words_of_row(79)).launch

    assert texts(file) == []
    assert file.launch is not None
    assert published is not None
    # of the launcher's own: padding, and a bucket
    assert file.launch.degrees == published.degrees
    assert file.launch.model.attention == published.model.attention
    assert file.launch.recompute == published.recompute
    found = [assess(launch, target()) for launch in (file.launch, published)]
    assert found[0].step is not None
    assert found[1].step is not None
    assert found[0].step.total_s == pytest.approx(found[1].step.total_s, rel=0.01)


def test_windows_graphs_and_small_moments(tmp_path: Path) -> None:
    """What Megatron-LM's arguments are not read for, and times and memory follow."""
    job = job_of_launch(checked(tmp_path, words_of_row(79)).launch)  # type: ignore[arg-type]
    windows = [block.attention.window for block in job.blocks if block.attention is not None]
    assert windows[:4] == [128, None, 128, None]
    plain = recipe_run(tmp_path, "--recipe deepseek_v3_pretrain_config", gpus=1024)
    whole = recipe_run(
        tmp_path,
        "--recipe deepseek_v3_pretrain_config optimizer.exp_avg_dtype=float32 "
        "optimizer.exp_avg_sq_dtype=torch.float32 model.cuda_graph_impl=full_iteration",
        gpus=1024,
    )
    assert plain.launch is not None
    assert whole.launch is not None
    assert (plain.launch.optimizer.moments_bytes, whole.launch.optimizer.moments_bytes) == (4, 8)
    assert (plain.launch.graphs, whole.launch.graphs) == ("none", "full")
    first, second = (assess(one, target()) for one in (plain.launch, whole.launch))
    moments = [
        sum(term.num_bytes for term in found.accounts[1].peak if term.name == "Adam moments")
        for found in (first, second)
    ]
    assert 2 * moments[0] == moments[1]
    assert first.step is not None
    assert second.step is not None
    assert second.step.total_s < first.step.total_s
    assert any("CUDA graphs keep memory" in text for text in texts(whole, "not priced"))
    # 61 layers in 16 stages, of which the last has one and the further token's
    stages = plain.launch.degrees.chunks
    assert [len(stage[0][1]) for stage in stages] == [4] * 15 + [1]
    assert stages[-1][0][2:] == (1, True)


def test_published_sizes() -> None:
    """Those of the ledger's models, and the numbers of parameters that their names say."""
    for name in ("deepseek_v3", "kimi_k2", "qwen3_30b_a3b", "qwen3_235b_a22b", "gpt_oss_20b",
                 "gpt_oss_120b"):  # fmt: skip
        sizes = architecture(name)
        ours = known_architecture(name)
        assert sizes is not None
        assert ours is not None
        blocks = ours.blocks
        mixture = blocks[-1].mlp
        assert isinstance(mixture, Experts)
        assert sizes["num_layers"] == sum(block.number for block in blocks)
        assert sizes["hidden_size"] == blocks[0].hidden
        assert sizes["num_moe_experts"] == mixture.number
        assert sizes["moe_router_topk"] == mixture.per_token
        assert sizes["moe_ffn_hidden_size"] == mixture.width
        assert sizes["vocab_size"] == ours.vocab
        assert sizes.get("mtp_num_layers", 0) == ours.mtp
        attention = blocks[0].attention
        assert attention is not None
        assert sizes["num_attention_heads"] == attention.heads
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
        ([*LLAMA, "-pp", "6", "-vp", "None"], "illegal", "world size(64) % (tp(4) * pp(6)"),
        ([*LLAMA, "-vp", "3"], "illegal", "layers(80) % (pp(8) * chunks(3)) = 8"),
        ([*LLAMA, "-tp", "x"], "illegal", "-tp: expected a positive integer, got 'x'"),
        ([*LLAMA, "-tp", "$TP"], "not priced", "-tp is '$TP'"),
        ([*LLAMA, "model.recompute_granularity=full"], "illegal",
         "model.recompute_method: is missing"),
        ([*LLAMA, "-c", "fp8_mx"], "illegal",
         "mixed_precision.fp8_recipe mxfp8 needs Blackwell"),
        ([*LLAMA, "--use_megatron_fsdp", "true"], "not priced",
         "--use_megatron_fsdp beside 8 pipeline stages is not priced"),
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
         "model.pipeline_model_parallel_layout: has 2 parts"),
        ([*LLAMA, "-pp", "1", "-vp", "5"], "no effect",
         "-vp, since -pp is 1"),
        ([*LLAMA, "ddp.overlap_grad_reduce=false"], "no effect",
         "ddp.overlap_grad_reduce, since comm_overlap.overlap_grad_reduce counts, and is true"),
        ([*LLAMA, "ddp.grad_reduce_in_fp32=true"], "no effect",
         "since mixed_precision.grad_reduce_in_fp32 counts, and is false"),
        ([*LLAMA, "-tp", "1", "comm_overlap.tp_comm_overlap=true"], "no effect",
         "comm_overlap.tp_comm_overlap, since nothing is scattered"),
        ([*LLAMA, "-et", "2"], "no effect", "-et, since there are no model.num_moe_experts"),
        ([*LLAMA, "model.new_switch=7"], "not understood", "model.new_switch=7 may change"),
        ([*LLAMA, "--new_flag", "7"], "not understood", "--new_flag 7 may change time"),
        ([*LLAMA, "-ol", "20"], "not priced", "-ol activations are offloaded"),
        ([*LLAMA, "-c", "nvfp4"], "not priced", "products of 4 bits keep copies"),
        ([*LLAMA, "--task", "lora"], "not priced", "--task lora trains adapters"),
        ([*LLAMA, "-mr", "llama9_1t"], "not priced", "the sizes of llama9_1t on h100 in fp8_cs"),
        (["-m", "nemotronh", "-mr", "nemotron_3_nano", "-g", "h100", "-ng", "16"], "not priced",
         "the sizes of nemotron_3_nano on h100 in bf16's model are not known"),
        ([*LLAMA, "-g", "gb200"], "read", "the recipe is that of gb200, and it is priced for h100"),
        ([*LLAMA, "-cv", "v7"], "read", "the preset of llama3_70b on h100 in fp8_cs is not known"),
        ([*LLAMA, "model.cuda_graph_impl=local"], "not priced", "CUDA graphs keep memory"),
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


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama3_8b_sft_config", "trains adapters or samples of a task"),
        ("qwen3_30b_a3b_peft_config", "trains adapters or samples of a task"),
        ("nemotron_3_nano_pretrain_config", "model are not known; add model.num_layers"),
        ("qwen3_8b_pretrain_config", "what qwen3_8b_pretrain_config sets besides its model"),
    ],
)
def test_what_is_not_known_of_a_recipe_is_said(name: str, said: str, tmp_path: Path) -> None:
    """Never guessed in silence."""
    file = recipe_run(tmp_path, f"--recipe {name} -gb 128")
    assert any(said in text for text in texts(file)), file.findings
    assert (file.launch is None) == ("besides" not in said)


def test_sizes_in_the_file_need_no_recipe(tmp_path: Path) -> None:
    """A recipe of somebody's own, whose model is told by overrides."""
    sizes = architecture("llama3_8b")
    assert sizes is not None
    words = " ".join(f"model.{key}={json.dumps(value)}" for key, value in sizes.items())
    more = "model.seq_length=8192 train.micro_batch_size=1 train.global_batch_size=128"
    file = recipe_run(tmp_path, f"--recipe my_pretrain_config {words} {more}")
    assert file.launch is not None, file.findings
    assert file.launch.model.num_layers == 32
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
        with pytest.raises(Exception, match="is no launch of"):
            trainer_of(source)
    else:
        assert trainer_of(source).name == trainer


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


@pytest.mark.parametrize(
    "words",
    [
        [*LLAMA, "-tp", "4", "-pp", "8", "-vp", "5"],
        [*LLAMA, "model.tensor_model_parallel_size=2", "model.sequence_parallel=true"],
        [*LLAMA, "-rl", "2"],
        spread("-m llama -mr llama3_8b -g h100 -c fp8_cs -ng 16 -rl 5"),
    ],
    ids=["arguments", "dotted", "recomputed", "recomputed by the recipe"],
)
def test_advice_is_in_the_words_of_the_file(words: list[str], tmp_path: Path) -> None:
    """With the changes made by hand, the file has the time and the memory that were said."""
    file = checked(tmp_path, words)
    assert file.launch is not None
    found = neighbours_of(assess(file.launch, target()), target(), file.written, file.moves)

    assert found.any is not None
    for neighbour in (found.one, found.two, found.any):
        if neighbour is None:
            continue
        again = checked(tmp_path, _changed(words, file, neighbour.changes))
        assert texts(again, "illegal") == texts(again, "no effect") == []
        assert again.launch is not None
        priced = assess(again.launch, target())
        assert priced.step == neighbour.assessment.step
        assert priced.fullest.peak_bytes == neighbour.assessment.fullest.peak_bytes


def test_degrees_of_experts_are_written(tmp_path: Path) -> None:
    """Each by its argument, chunks and recomputation with them; and that is the launch wanted."""
    words = [*QWEN, "--recompute_modules", "layernorm,moe_act"]
    file = checked(tmp_path, words)
    launch = file.launch
    assert launch is not None
    wanted = replace(
        launch,
        degrees=replace(launch.degrees, ep=16, etp=2),
        recompute=replace(launch.recompute, modules=frozenset({"core_attn"})),
    )
    changes = file.written(wanted)
    assert changes == (
        ("--recompute_modules", "layernorm,moe_act", None),
        ("model.recompute_granularity", None, "selective"),
        ("model.recompute_modules", None, "[core_attn]"),
        ("-ep", None, "16"),
        ("-et", None, "2"),
    )
    again = checked(tmp_path, _changed(words, file, changes)).launch
    assert again is not None
    assert replace(again, name=wanted.name) == wanted
    # no neighbour has another length, and none is written
    assert file.written(replace(launch, seq=2048)) is None


def test_advice_for_yaml(tmp_path: Path) -> None:
    """Keys are dotted, and their values as YAML has them."""
    document: dict[str, Any] = {
        "model": {"tensor_model_parallel_size": 4, "sequence_parallel": True,
                  "context_parallel_size": 1, "recompute_granularity": "full",
                  "recompute_method": "uniform", "recompute_num_layers": 1},
        "train": {"global_batch_size": 128},
    }  # fmt: skip
    file = overrides(tmp_path, document, name="llama3_8b_pretrain", gpus=16)
    assert file.launch is not None
    best = neighbours_of(assess(file.launch, target()), target(), file.written, file.moves).any
    assert best is not None
    for key, _, after in best.changes:
        section, _, name = key.partition(".")
        document[section][name] = yaml.safe_load(after or "null")
        assert file.spelled(key, after) == f"{key}: {after}"
    again = overrides(tmp_path, document, name="llama3_8b_pretrain", gpus=16)
    assert again.launch is not None
    assert assess(again.launch, target()).step == best.assessment.step


def test_a_key_without_a_section_is_not_advised(tmp_path: Path) -> None:
    """A recipe without configured overlaps has nothing that an override could be laid over."""
    words = "--recipe llama3_8b_pretrain_config -tp 4 -cp 1 -gb 128"
    file = recipe_run(tmp_path, words)
    launch = file.launch
    assert launch is not None
    assert file.written(replace(launch, tensor_overlap=True)) is None
    changes = file.written(replace(launch, micro_batch=2))
    assert changes == (("train.micro_batch_size", None, "2"),)


def test_the_command_speaks_the_words_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables, advice and the object."""
    path = tmp_path / "launch.sh"
    words = "-m llama -mr llama3_8b -g h100 -c fp8_cs -ng 16 -rl 5 -mb 1"
    path.write_text(f"{SETUP} {words}\n", encoding="utf-8")
    assert check.run([str(path), "--hardware", "h100:2x8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{path}: Megatron-Bridge on 16 h100-80gb")
    assert "as megatron-core runs it" in out
    for text in ("  - -rl 5\n", "ddp.use_distributed_optimizer", "-mb, model.seq_length"):
        assert text in out
    assert "--use-distributed-optimizer" not in out
    assert check.run([str(path), "--hardware", "h100:2x8", "--json", "-"]) == 0
    (launch,) = json.loads(capsys.readouterr().out)["launches"]
    assert launch["trainer"] == "Megatron-Bridge"
    flags = {change["flag"] for change in launch["neighbours"]["any"]["arguments"]}
    assert "-rl" in flags

"""Documented workflow of PaddleNLP's Galvatron, and what the card of this project promises.

The sources are PaddleNLP's page (003) and the card (card). What both share with Galvatron's own
pages is in the other tables.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.documented_files import MEASURE
from tests.e2e.documented_lab import (
    BASE,
    COMPUTATION,
    GPT,
    HARDWARE,
    LAYERS,
    MEMORY,
    MODEL,
    SEQ,
    SHAPE,
    Lab,
    Table,
    memory_file,
    shape,
    write,
)
from tests.e2e.documented_search import sweep
from tests.e2e.documented_training import (
    LAUNCH,
    SPACE,
    TIMES,
    batches_of,
    lengths_of,
    profiled,
    tiny,
)
from tests.e2e.test_paddlenlp_flow import LINE as SEARCH_DIST_LINE, write_configs
from tests.warm import ROOT

TABLE = Table("003")
CARD = Table("card")
SIZES = ("--hidden_size_list", "2048", "--layer_num_list", str(LAYERS), "--seqlen_list", str(SEQ))
PATHS = (
    *("--time_profile_data_path", str(MODEL), "--memory_profile_data_path", str(MODEL)),
    *("--allreduce_coe_path", str(HARDWARE), "--p2p_coe_path", str(HARDWARE)),
    *("--overlap_coe_path", str(HARDWARE), "--sp_time_path", str(HARDWARE)),
)
LINE = (*SIZES, "--num_attention_heads", "16", *PATHS, "--settle_bsz", "32")
OWN = {
    "pp_size": 1,
    "vtp": 2,
    "vsp_flag": 0,
    "embed_sdp": 1,
    "global_batch_size": 32,
    "gradient_accumulation_steps": 4,
    **{
        key: ",".join([value] * LAYERS)
        for key, value in {
            "dp_size_list": "4",
            "sharding_stage_list": "3",
            "tp_size_list": "2",
            "usp_flag_list": "0",
            "recompute_list": "0",
            "pp_stage_idx_list": "0",
        }.items()
    },
}
"""A plan in the spelling of its fine_grained_config.json."""


def _runs(*runs: tuple[int, int]) -> str:
    """Return a list of values, given as (value, number of layers)."""
    return ",".join(str(value) for value, count in runs for _ in range(count))


MIXED = OWN | {
    "pp_size": 2,
    "gradient_accumulation_steps": 8,
    "embed_sdp": 0,
    "pp_stage_idx_list": _runs((0, 12), (1, 12)),
    "tp_size_list": _runs((2, 8), (1, 8), (4, 8)),
    "dp_size_list": _runs((2, 8), (4, 8), (1, 8)),
    "sharding_stage_list": _runs((3, 4), (2, 20)),
    "usp_flag_list": _runs((1, 2), (0, 22)),
    "recompute_list": _runs((0, 6), (1, 10), (0, 8)),
}
"""A plan whose lists all differ, none of them the same for all layers."""


def found(lab: Lab, *words: object, expected: int = 0) -> Any:
    """Return what the search answers to PaddleNLP's spellings."""
    return lab.found(*LINE, *words, expected=expected)


@TABLE.works("profile_hardware.sh and PROFILE_HARDWARE_ARGS", "ranks")
def _(lab: Lab) -> None:
    """One command takes the arguments and measures what five scripts do."""
    arguments = ("--num_nodes", 1, "--num_gpus_per_node", 2, "--max_tp_size", 8, "--max_pp_deg", 8)
    sizes = ("--start_mb", 1, "--end_mb", 2, "--scale", 2, "--reference-size", "1M")
    words = (*arguments, *sizes, *LAUNCH, "--backend", "paddle", "--max-seconds", "0.02")
    done = lab.fresh().ranks(2, "profiler.hardware", *words, "--dry-run")
    rows = {line.split()[0]: line.split()[3] for line in done.stdout.splitlines() if line.strip()}
    for operation in ("allreduce", "all2all", "p2p"):
        assert rows[operation] == "2", done.stdout
    assert "overlap_allreduce" in rows


@TABLE.works("launch environment variables", "ranks")
def _(lab: Lab) -> None:
    """What torchrun sets says the number of ranks; what steers NCCL is kept with the figures."""
    lab = lab.fresh()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NCCL_ALGO", "Ring")
        lab.ranks(2, "profiler.hardware", "--out", "hw", *MEASURE, "allreduce")
    sidecar = lab.load("hw", "allreduce_bandwidth_1nodes_2gpus_per_node.json.meta.json")
    assert sidecar["runs"][0]["metadata"]["env.NCCL_ALGO"] == "Ring"


@TABLE.different(
    "five generated scripts profile_allreduce/p2p/allreduce_sp/all2all/overlap",
    "They are operations of one command; the all-reduce gives bandwidths and times by size.",
)
def _(lab: Lab) -> None:
    from profiler.hardware.command import run

    out = " ".join(lab.during(run, "--help", "all").out.split())
    for operation in ("allreduce", "p2p", "all2all", "overlap"):
        assert operation in out
    said = lab.during(run, "allreduce_sp", expected=2).err
    assert "unknown operation 'allreduce_sp'" in said


@TABLE.works("json files in configs", "ranks")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    lab.ranks(2, "profiler.hardware", "--out", "configs", *MEASURE, "p2p")
    assert set(lab.load("configs", "p2p_bandwidth_1nodes_2gpus_per_node.json")) == {"pp_size_2"}


@TABLE.different("hostfile / MPI", "torchrun starts the ranks, on every machine of a cluster.")
def _(lab: Lab) -> None:
    from profiler.hardware.command import run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        said = lab.during(run, "allreduce", expected=2).err
    assert "Run `torchrun --standalone --nproc-per-node N -m profiler.hardware" in said
    assert "--nnodes" in said


SCRIPT = (
    *("--tokenizer_name_or_path", "llama", "--num_hidden_layers", 16, "--vocab_size", 320),
    *("--hidden_size", 32, "--intermediate_size", 96, "--seq_length", 16),
    *("--num_attention_heads", 4, "--num_key_value_heads", 2, "--weight_decay", "0.01"),
    *("--warmup_ratio", "0.01", "--max_grad_norm", "1.0", "--learning_rate", "3e-05"),
    *("--min_learning_rate", "3e-06", "--max_steps", 10, "--logging_steps", 1),
    *("--continue_training", 0, "--do_train", "true", "--do_eval", "false", "--do_predict"),
    *("false", "--disable_tqdm", "true", "--skip_profile_timer", "false"),
    *("--skip_memory_metrics", 0, "--save_total_limit", 2, "--device", "gpu"),
    *("--dataloader_num_workers", 1, "--distributed_dataloader", 0, "--enable_auto_parallel", 1),
    *("--per_device_train_batch_size", 8, "--gradient_accumulation_steps", 1),
    *("--recompute", "false", "--recompute_use_reentrant", "true"),
    *("--recompute_granularity", "full", "--pp_recompute_interval", 0, "--bf16", "true"),
    *("--fp16_opt_level", "O2", "--amp_master_grad", "true", "--amp_custom_black_list"),
    *("reduce_sum", "c_softmax_with_cross_entropy", "--amp_custom_white_list"),
    *("lookup_table", "lookup_table_v2", "--to_static", 0, "--sharding_parallel_degree", 1),
    *("--sharding", "stage2", "--tensor_parallel_degree", 2, "--sequence_parallel", "true"),
    *("--pipeline_parallel_degree", 2, "--virtual_pp_degree", 1, "--pipeline_schedule_mode"),
    *("1F1B", "--sep_parallel_degree", 1, "--pipeline_parallel_config"),
    *("enable_send_recv_overlap", "--data_parallel_config", "gradient_sync_after_accumulate"),
    *("--sharding_parallel_config", "enable_overlap", "--tensor_parallel_config"),
    *("enable_mp_async_allreduce", "--fuse_attention_ffn", "true", "--fuse_attention_qkv"),
    *("true", "--fused_linear_param_grad_add", 1, "--fuse_sequence_parallel_allreduce", "true"),
    *("--use_flash_attention", "true", "--use_fused_rope", "true", "--use_fused_rms_norm"),
    *("true", "--enable_linear_fused_grad_add", "true", "--input_dir", "./data", "--split"),
    *("949,50,1", "--max_seq_length", 32768, "--profile_memory_flag", 1, "--save_memory_flag", 1),
    *("--profile_fixed_batch_size", 8, "--layernum_min", 1, "--layernum_max", 2),
    *("--num_layertype", 1, "--max_tp_deg", 2, "--max_per_device_train_batch_size", 4),
)
"""profile_memory.sh with small sizes."""


@TABLE.works("MODEL_ARGS in profile_memory/computation.sh")
def _(lab: Lab) -> None:
    """The whole line: `llama` has the sizes of the line; memory is counted without its GPU."""
    lab = lab.fresh()
    words = ("--model_name_or_path", "llama", *SCRIPT, "--profile_type", SPACE)
    words = (*words, "--profile_mode", "static", "--profile_fixed_seq_length_list", 64)
    answer = lab.torch("profile-model", *words, "--out", "pm")
    assert "--seq-length is not used: other options set the lengths" in answer.err
    found = lab.load("pm", "memory_profiling_bf16_hidden_32_head_4.json")["layertype_0"]
    parameters = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96 + 2 * 32
    assert found["64"]["parameter_size"] == pytest.approx(4 * parameters / 2**20)
    assert set(found["64"]["tp_activation_per_bsz_dict"]) == {"1", "2", "checkpoint"}


@TABLE.works("memory profile_mode static")
def _(lab: Lab) -> None:
    words = ("--profile_mode", "static", "--seq", 64, "--tp", 1)
    assert set(profiled(tiny(lab), SPACE, *words)["layertype_0"]) == {"64"}


@TABLE.works("memory profile_mode sequence with profile_max_seq_length", "ranks")
def _(lab: Lab) -> None:
    words = ("--profile_mode", "sequence", "--profile_min_seq_length", 64)
    words = (*words, "--profile_max_seq_length", 128, "--tp", 1)
    assert set(profiled(tiny(lab), SPACE, *words)["layertype_0"]) == {"64", "128"}
    # the last alone, as the page has it: the first is taken, and said
    lab = tiny(lab)
    words = ("--profile_mode", "sequence", "--profile_max_seq_length", 128, "--tp", 1)
    words = ("--profile_type", SPACE, *words, "--out", "pm")
    answer = lab.torch("profile-model", "--model", "tiny/config.json", *words)
    assert "--profile-min-seq-length not given; using 64" in answer.err
    tables = lab.load("pm", "memory_profiling_bf16_hidden_64_head_4.json")
    assert set(tables["layertype_0"]) == {"64", "128"}


@TABLE.works("profile_fixed_seq_length_list")
def _(lab: Lab) -> None:
    words = ("--profile_fixed_seq_length_list", "64,128", "--tp", 1)
    assert set(profiled(tiny(lab), SPACE, *words)["layertype_0"]) == {"64", "128"}


@TABLE.works("computation profile_mode batch", "ranks")
def _(lab: Lab) -> None:
    words = ("--profile_mode", "batch", "--profile_fixed_seq_length_list", 16, "--bsz", "1:2")
    assert batches_of(profiled(tiny(lab), TIMES, *words, "--tp", 1, "--backward", 0)) == {1, 2}


@TABLE.works("computation profile_mode sequence", "ranks")
def _(lab: Lab) -> None:
    words = ("--profile_mode", "sequence", "--profile_min_seq_length", 16)
    words = (*words, "--profile_max_seq_length", 64, "--tp", 1, "--backward", 0)
    assert lengths_of(profiled(tiny(lab), TIMES, *words)) == {16, 32, 64}


@TABLE.works(
    "layernum_min/max, max_tp_deg, num_layertype, max_per_device_train_batch_size", "ranks"
)
def _(lab: Lab) -> None:
    words = ("--layernum_min", 1, "--layernum_max", 3, "--bsz", 1, "--seq", 16, "--backward", 0)
    ignored = ("--num_layertype", 1, "--max_per_device_train_batch_size", 8)
    times = profiled(tiny(lab), TIMES, *words, "--max_tp_deg", 1, *ignored)
    raw = {key for key in times if key.startswith("layernum")}
    assert raw == {"layernum[1]_bsz1_seq16", "layernum[3]_bsz1_seq16"}
    memory = profiled(tiny(lab), SPACE, "--seq", 16, "--max_tp_deg", 2)
    degrees = memory["layertype_0"]["16"]["tp_activation_per_bsz_dict"]
    assert set(degrees) == {"1", "2", "checkpoint"}


@TABLE.works("time_profile_mode / memory_profile_mode in the search")
def _(lab: Lab) -> None:
    lab = sweep(lab, (1, 2, 4, 8), (512, SEQ, 2048))
    words = ("--time_profile_mode", "batch", "--memory_profile_mode", "static", *BASE)
    batch = found(lab, *words)["samples_per_s"]
    static = found(lab, "--time_profile_mode", "static", *BASE)["samples_per_s"]
    assert batch != static


@TABLE.works("hidden_size_list")
def _(lab: Lab) -> None:
    """The width says which file is meant."""
    said = found(lab, "--hidden_size_list", 4096, expected=2)
    assert "computation_profiling_bf16_hidden_4096_head_16.json" in said


@TABLE.works("layer_num_list / layernum_list / layernum")
def _(lab: Lab) -> None:
    for name in ("--layer_num_list", "--layernum_list", "--layernum"):
        assert shape(found(lab, name, 12))["layers"] == 12


@TABLE.works("seqlen_list")
def _(lab: Lab) -> None:
    said = found(lab, "--seqlen_list", 2048, expected=2)
    assert f"at sequence length 2048 (measured: {SEQ})" in said


@TABLE.works("time_profile_data_path, memory_profile_data_path")
def _(lab: Lab) -> None:
    plain = found(lab, *BASE)
    files = [
        *("--time_profile_data_path", MODEL / COMPUTATION),
        *("--memory_profile_data_path", MODEL / MEMORY),
    ]
    assert found(lab, *BASE, *files)["plan"] == plain["plan"] == lab.search(*BASE)["plan"]


@TABLE.works("allreduce_coe_path, p2p_coe_path, overlap_coe_path, sp_time_path")
def _(lab: Lab) -> None:
    names = {
        "--allreduce_coe_path": f"allreduce_bandwidth_{SHAPE}",
        "--p2p_coe_path": f"p2p_bandwidth_{SHAPE}",
        "--overlap_coe_path": "overlap_coefficient.json",
        "--sp_time_path": f"sp_time_{SHAPE}",
    }
    files = [word for option, name in names.items() for word in (option, HARDWARE / name)]
    plan = found(lab, *BASE)["plan"]
    assert found(lab, *BASE, *files)["plan"] == plan
    for option in names:
        assert "does not exist" in found(lab, option, "nowhere.json", expected=2)


@TABLE.works("max_tp_size, max_pp_size")
def _(lab: Lab) -> None:
    room = ("--memory_upper_limit", 16, "--disable_sdp", 1)
    assert max(shape(found(lab, *room, "--max_tp_size", 2, "--max_pp_size", 1))["tp"]) == 2
    assert shape(found(lab, *room, "--max_tp_size", 1, "--max_pp_size", 2))["pp"] == 2
    none = found(lab, *room, "--max_tp_size", 1, "--max_pp_size", 1, expected=3)
    assert none["status"] == "infeasible"


@TABLE.works("memory_upper_limit")
def _(lab: Lab) -> None:
    for limit in (10, 16):
        words = ("--settle_bsz", 32, "--memory_constraint", limit)
        assert found(lab, "--memory_upper_limit", limit)["plan"] == lab.search(*words)["plan"]


@TABLE.works(
    "world_size, min/max_bsz, bsz_step, mixed_precision_type, sp_space, disable_sdp, disable_vtp"
)
def _(lab: Lab) -> None:
    words = [
        *("--settle_bsz", -1, "--world_size", 8, "--min_bsz", 16, "--max_bsz", 48),
        *("--bsz_step", 16, "--mixed_precision_type", "bf16", "--sp_space", "tp+sp"),
        *("--disable_sdp", 1, "--disable_vtp", 1, "--memory_upper_limit", 16),
    ]
    plan = shape(found(lab, *words))
    assert (plan["world_size"], plan["zero3"], plan["vtp"]) == (8, {0}, 1)
    assert plan["bsz"] in {16, 32, 48}


@TABLE.works("search_granularity coarse/fine")
def _(lab: Lab) -> None:
    rates = {
        kind: found(lab, *BASE, "--search_granularity", f"{kind}-grained")["samples_per_s"]
        for kind in ("coarse", "fine")
    }
    assert rates["coarse"] == lab.rate("--fine_grained_mode", 0)
    assert rates["fine"] == lab.rate()


@TABLE.works("PaddleNLP line verbatim")
def _(lab: Lab) -> None:
    """Arguments of search_dist.sh as written there, and then files without its raw keys.

    These were measured without sequence parallelism, which then is off and said.
    """
    lab = lab.fresh()
    write_configs(lab.folder)
    lab.ask("autopar-search", *SEARCH_DIST_LINE)
    (path,) = lab.path("configs").glob("autopar_plan_*.json")
    own = lab.load(path)
    options = own["options"]
    assert (options["engine"], options["sequence_parallel"]) == ("paddlenlp", True)
    (path,) = lab.path("configs").glob("galvatron_config_*.json")
    plan = lab.load(path)
    assert (plan["world_size"], plan["global_bsz"]) == (64, 64)
    assert len(plan["tp_sizes_enc"].split(",")) == 72
    assert max(map(int, plan["tp_sizes_enc"].split(","))) <= 8
    assert plan["pp_deg"] <= 8
    assert set(plan["use_sp"].split(",")) == {"0"}
    lab = lab.fresh()
    write(lab.path(MODEL, MEMORY), memory_file(""))
    told = found(lab, *BASE)
    off = found(lab, *BASE, "--no-sequence-parallel")
    assert (told["plan"], told["samples_per_s"]) == (off["plan"], off["samples_per_s"])
    line = f"--no-sequence-parallel ({MEMORY} was measured without it)"
    assert line in told["defaults_used"]
    assert line not in off["defaults_used"]
    said = found(lab, *BASE, "--sequence-parallel", 1, expected=2)
    assert "--no-sequence-parallel" in said
    # the plan file says it, and so do what explains and exports it
    lab.ask("autopar-search", *LINE, *BASE, "--output_config_path", "s.json")
    plan = "autopar_plan_s.json"
    assert lab.load(plan)["request"]["sequence-parallel"] is False
    assert lab.ask("autopar-explain", plan).err == ""
    lab.ask("autopar-export", plan, "--to", "galvatron", "--out", "g")
    script = lab.path("g", "train_dist_v2.4.sh").read_text(encoding="utf-8")
    assert "--sequence-parallel" not in script


@TABLE.works("allreduce_size_{g} without consec")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    file = lab.load(HARDWARE, f"allreduce_bandwidth_{SHAPE}")
    # strided groups have no keys in this spelling
    neighbours = {k: v for k, v in file.items() if k.endswith("_1")}
    write(lab.path(HARDWARE, f"allreduce_bandwidth_{SHAPE}"), neighbours)
    plain = found(lab, *BASE)["samples_per_s"]
    lab = lab.fresh()
    short = {k.removesuffix("_consec_1"): v for k, v in neighbours.items()}
    write(lab.path(HARDWARE, f"allreduce_bandwidth_{SHAPE}"), short)
    assert set(short) == {"allreduce_size_2", "allreduce_size_4", "allreduce_size_8"}
    assert found(lab, *BASE)["samples_per_s"] == plain


@TABLE.works("computation_profiling_bf16_llama_rank[0].json")
def _(lab: Lab) -> None:
    """Raw forwards of two depths: a layer is their difference, the rest what remains."""
    plain = lab.rate()
    lab = lab.fresh()
    lab.path(MODEL, COMPUTATION).unlink()
    raw = {f"layernum[{n}]_bsz8_seq{SEQ}": 8 * (n * 1.5 + 0.5) for n in (2, 4)}
    path = write(lab.path(MODEL, "computation_profiling_bf16_llama_rank[0].json"), raw)
    for value in (path, MODEL):
        seen = found(lab, *BASE, "--time_profile_data_path", value)["samples_per_s"]
        assert seen == pytest.approx(plain, rel=1e-9)


@TABLE.works("memory_profiling_bf16_llama_first/_last + merged")
def _(lab: Lab) -> None:
    """Its raw keys say that parameters count 2 bytes and states 18."""
    lab = lab.fresh()
    words = (*BASE, "--memory_upper_limit", 60, "--search_space", "dp", "--no-sequence-parallel")
    write(lab.path(MODEL, MEMORY), memory_file(""))
    told = found(lab, *words, "--parameter_bytes", 2)["memory"]
    assert told != found(lab, *words)["memory"]
    raw = {"1_1_8_False": {f"layernum[2]_bsz8_seq{SEQ}_first_ms": 10.0}}
    lab.path(MODEL, MEMORY).unlink()
    path = write(lab.path("memory_profiling_bf16_llama.json"), memory_file("") | raw)
    words = (*words, "--engine", "none", "--memory_profile_data_path", path)
    assert lab.found(*LINE, *words)["memory"] == told


@TABLE.works("optimum as JSON in configs")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    lab.ask("autopar-search", *LINE, "--memory_upper_limit", 10)
    (path,) = lab.path("configs").glob("galvatron_config_*.json")
    assert len(lab.load(path)["tp_sizes_enc"].split(",")) == LAYERS


@TABLE.works(
    "optimum in PaddleNLP's own spelling (fine_grained_config.json), for train_qwen_fine_grained.sh"
)
def _(lab: Lab) -> None:
    """What is read is written with the same keys and values, with the launch that reads it."""
    lab = lab.fresh()
    room = ("--memory_constraint", "60", "--sp_space", "tp+sp")
    for name, own in (("same", OWN), ("mixed", MIXED)):
        write(lab.path(f"{name}.json"), own)
        priced = lab.search(*BASE, *room, "--evaluate", f"{name}.json")
        assert (priced["legal"], shape(priced)["vtp"]) == (True, 2)
        plan = priced["plan"]
        assert plan["tp_sizes_enc"] == own["tp_size_list"]
        assert plan["use_sp"] == own["usp_flag_list"]
        assert plan["checkpoint"] == own["recompute_list"]
        sharded = [stage == "3" for stage in own["sharding_stage_list"].split(",")]
        assert [flag == "1" for flag in plan["dp_types_enc"].split(",")] == sharded
        assert plan["pp_deg"] == own["pp_size"]
        words = (f"{name}.json", "--to", "paddlenlp", *GPT, *room, "--out", name)
        assert "train_qwen_fine_graine.py" in lab.ask("autopar-export", *words).out
        assert lab.load(name, "fine_grained_config.json") == own
    lab.search(*BASE, "--engine", "paddlenlp", "--output_config_path", "s.json")
    lab.ask("autopar-export", "autopar_plan_s.json", "--to", "paddlenlp", "--out", "q")
    again = lab.search(*BASE, "--evaluate", "q/fine_grained_config.json")
    assert again["plan"] == lab.load("s.json")


@TABLE.works("coarse result optimal_solution.json")
def _(lab: Lab) -> None:
    """One strategy for all layers, which `--model` or the files of the model count."""
    lab = lab.fresh()
    coarse = {"bsz": 32, "accumulation_steps": 4, "strategy": "pp1_tp2_dp4_stage3_recompute0"}
    costs = {"memory_cost": [20000.0], "time_cost": 1.5, "throughput": 21.3}
    write(lab.path("optimal_solution.json"), coarse | costs)
    write(lab.path("fine_grained_config.json"), OWN)
    found = lab.search(*BASE, "--evaluate", "optimal_solution.json")
    same = lab.search(*BASE, "--evaluate", "fine_grained_config.json")
    assert (found["plan"], found["step_time_s"]) == (same["plan"], same["step_time_s"])
    words = ("--from", "paddlenlp", "optimal_solution.json", "--num_layers", LAYERS)
    imported = json.loads(lab.ask("autopar-export", *words).out)
    assert imported == same["plan"]
    coarse["strategy"] = "pp2_tp4_dp1_stage2_recompute1"
    write(lab.path("optimal_solution.json"), coarse | costs)
    other = json.loads(lab.ask("autopar-export", *words).out)
    assert (other["pp_deg"], other["default_dp_type"]) == (2, "zero2")
    keys = ("tp_sizes_enc", "dp_types_enc", "checkpoint")
    assert [set(other[key].split(",")) for key in keys] == [{"4"}, {"0"}, {"1"}]


@TABLE.different(
    "training by the searched plan (qwen)", "Plans are handed to engines by autopar-export."
)
def _(lab: Lab) -> None:
    lab = lab.fresh()
    words = ("--model", "qwen2.5-7b", "--hardware", "h100:1x8", "--settle_bsz", 16)
    words += ("--engine", "galvatron")
    lab.ask("autopar-search", *words, "--output_config_path", "s.json")
    out = lab.ask("autopar-export", "autopar_plan_s.json", "--to", "galvatron", "--out", "g").out
    assert "torchrun --nnodes 1 --nproc-per-node 8" in out
    assert "hidden_size: 3584\n" in lab.path("g", "model_config.yaml").read_text("utf-8")


@TABLE.different(
    "pip install -e . ; C++ core built by hand", "pip and make build the C++ core with the package."
)
def _(lab: Lab) -> None:
    import _autopar_core

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["build-system"]["build-backend"] == "scikit_build_core.build"
    assert _autopar_core.__file__.endswith(".so")


@TABLE.works("editable install is clean")
def _(lab: Lab) -> None:
    """The install adds the clone to the path, and no folder above it."""
    import site

    paths = [Path(folder) / "_editable_skbc_autopar.pth" for folder in site.getsitepackages()]
    paths = [path for path in paths if path.is_file()]
    if not paths:
        pytest.skip("this is no editable install")
    for path in paths:
        lines = (Path(line) for line in path.read_text(encoding="utf-8").splitlines())
        added = {line.resolve() for line in lines if line.is_absolute()}
        assert added <= {ROOT.resolve()}


@TABLE.works("qwen models")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    sizes = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16}
    sizes |= {"num_key_value_heads": 8, "intermediate_size": 3072, "vocab_size": 151936}
    sizes |= {"max_position_embeddings": 4096}
    for kind in ("qwen2", "qwen3"):
        write(lab.path(kind, "config.json"), {"model_type": kind, **sizes})
    words = ("--hardware", "h100:1x8", "--settle_bsz", 8, "--engine", "galvatron")
    assert shape(lab.found("--model", "qwen2/config.json", *words))["layers"] == 28
    assert shape(lab.found("--model", "qwen2.5-7b", *words))["layers"] == 28
    assert shape(lab.found("--model", "qwen3/config.json", *words))["layers"] == 28


def _top_level(*names: str) -> None:
    """Add a row for each name of the tree that the card draws."""
    for name in names:

        @CARD.works(f"top level {name}")
        def _(lab: Lab, name: str = name) -> None:
            path = ROOT / name
            assert path.is_dir() if name.endswith("/") else path.is_file()


_top_level(
    *("pyproject.toml", "profiler/", "search/", "csrc/", "models/", "hardware_configs/", "tests/"),
    "Makefile",
)


@CARD.works("packages torch, numpy, pybind11, typer, rich, pytest")
def _(lab: Lab) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = {
        "numpy": project["project"]["dependencies"],
        "typer": project["project"]["dependencies"],
        "rich": project["project"]["dependencies"],
        "torch": project["project"]["optional-dependencies"]["profile"],
        "pybind11": project["build-system"]["requires"],
        "pytest": project["dependency-groups"]["test"],
    }
    for name, entries in wanted.items():
        assert any(entry.startswith(name) for entry in entries), name


@CARD.works("`torchrun -m profiler.hardware`", "ranks")
def _(lab: Lab) -> None:
    """The literal line: torchrun with one rank, and then with two."""
    from tests.e2e.launching import Launch, torchrun

    lab = lab.fresh()
    with Launch.of(torchrun(1, "--dry-run"), cwd=lab.folder) as launch:
        done = launch.wait(120.0)
    assert done.code == 0, done.stderr
    assert "nothing was written" in done.stdout
    lab.ranks(2, "profiler.hardware", "--out", "hw", *MEASURE, "allreduce")
    assert lab.load("hw", "allreduce_bandwidth_1nodes_2gpus_per_node.json")


@CARD.works("`profile-model --mode sequence`")
def _(lab: Lab) -> None:
    """The literal line profiles the model that is searched by default; here its memory, short."""
    from profiler.model.options import build_options

    literal = build_options(mode="sequence")
    assert (literal.model, literal.mode, literal.seq_lengths) == ("llama2-7b", "sequence", None)
    lab = lab.fresh()
    short = ("--profile-type", SPACE, "--tp", 1, "--seq", "32,64")
    answer = lab.torch("profile-model", "--mode", "sequence", *short)
    assert "--model not given; using the shipped llama2-7b" in answer.err
    name = "memory_profiling_bf16_hidden_4096_head_32.json"
    assert set(lab.load("models/llama2-7b/configs", name)["layertype_0"]) == {"32", "64"}


@CARD.works("`autopar-search --sp-space tp+sp`")
def _(lab: Lab) -> None:
    """The literal line plans the shipped default."""
    lab = lab.fresh()
    answer = lab.ask("autopar-search", "--sp-space", "tp+sp")
    assert answer.out.startswith("llama2-7b (32 layers) on a100-80gb_1x8, 1 x 8 GPUs")
    assert len(list(lab.path("configs").iterdir())) == 2


@CARD.works("NCCL GPUs", "gpu", "ranks")
def _(lab: Lab) -> None:
    """Two ranks over NCCL, on one GPU where there is no second; times say so then."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    lab = lab.fresh()
    words = ["--out", "hw", "--backend", "nccl", "--sizes", "1M:4M:x2", "--max-seconds", "0.2"]
    if torch.cuda.device_count() < 2:
        words.append("--allow-shared-gpu")
    lab.ranks(2, "profiler.hardware", *words, "--reference-size", "1M", "allreduce")
    sidecar = lab.load("hw", "allreduce_bandwidth_1nodes_2gpus_per_node.json.meta.json")
    assert sidecar["runs"][0]["metadata"]["backend"] == "nccl"


@CARD.works("overlap coefficients, all2all, p2p, allreduce", "ranks")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    lab.ranks(2, "profiler.hardware", "--out", "hw", *MEASURE, "all2all", "p2p", "allreduce")
    names = {path.name for path in lab.path("hw").glob("*.json")}
    shape_of_two = "1nodes_2gpus_per_node.json"
    for kind in ("allreduce_bandwidth", "p2p_bandwidth", "sp_time"):
        assert f"{kind}_{shape_of_two}" in names


@CARD.works("per-layer time/memory across batch and sequence sweeps", "ranks")
def _(lab: Lab) -> None:
    """Two modes into one folder: the second adds its cells to those of the first."""
    lab = tiny(lab)
    one = ("--tp", 1, "--backward", 0, "--resume")
    profiled(lab, TIMES, "--mode", "batch", "--bsz", "1:2", "--seq", 32, *one)
    times = profiled(lab, TIMES, "--mode", "sequence", "--seq", "16,32,64", *one)
    assert (batches_of(times), lengths_of(times)) == ({1, 2}, {16, 32, 64})
    memory = profiled(lab, SPACE, "--mode", "sequence", "--seq", "16,32", "--tp", 1)
    assert set(memory["layertype_0_sp"]) == {"16", "32"}


@CARD.works("C++-accelerated search consumes the documented JSON")
def _(lab: Lab) -> None:
    """The compiled core plans, and no uniform strategy is faster than its plan."""
    import _autopar_core

    assert _autopar_core.__file__
    answer = lab.ask("autopar-search", *GPT, *BASE, "--output_config_path", "none", "--verbose")
    assert "CPU time: " in answer.out
    best = lab.rate()
    for degree in (2, 4):
        words = (*BASE, "--fine_grained_mode", 0, "--pin", f"tp={degree}")
        assert lab.search(*words)["samples_per_s"] < best

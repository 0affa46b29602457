"""Documented options of the search: model, cluster, batch, dimensions, cost model, old releases.

The source is the page of Galvatron's models (001), its part on `search_dist.sh`, and the options
that its releases 2.0 to 2.4 and the newest one have in their scripts. `documented_training.py` has
the rest of that page.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.e2e.documented_files import TRIAL
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
    hardware_files,
    memory_file,
    shape,
    write,
)

TABLE = Table("001")
CLUSTER = ("--hardware", "a100-80gb:1x8", "--settle_bsz", "8", "--engine", "galvatron")
SIXTEEN = ("--memory_constraint", "16")


def sweep(lab: Lab, batches: tuple[int, ...], lengths: tuple[int, ...] = (SEQ,)) -> Lab:
    """Return a laboratory whose model was measured at batch sizes and lengths.

    A forward of one layer takes 0.2 ms and 1.3 ms for every sample of 1,024 tokens.
    """
    lab = lab.fresh()
    times_ms = {
        f"layertype_{kind}_bsz{batch}_seq{length}": share * (0.2 / batch + 1.3 * length / SEQ)
        for kind, share in (("0", 1.0), ("other", 0.4))
        for batch in batches
        for length in lengths
    }
    write(lab.path(MODEL, COMPUTATION), times_ms)
    write(lab.path(MODEL, MEMORY), memory_file(lengths=lengths))
    return lab


def forward_s(plan: dict[str, Any]) -> float:
    """Return the seconds of the forward of all layers on the only stage of a plan file."""
    (stage,) = plan["prediction"]["stages"]
    seconds: float = stage["time_s"]["forward"]
    return seconds


@TABLE.works("search saves the optimum as JSON in configs")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    lab.ask("autopar-search", *GPT, *BASE)
    # what else makes the plan another one stands behind the documented name
    name = f"custom_{SHAPE.removesuffix('.json')}_10GB_bf16_bsz32"
    (strategy,) = lab.path("configs").glob(f"galvatron_config_{name}_*.json")
    (own,) = lab.path("configs").glob(f"autopar_plan_{name}_*.json")
    assert {*lab.path("configs").iterdir()} == {strategy, own}


@TABLE.works("model_size picks a predefined model")
def _(lab: Lab) -> None:
    assert shape(lab.found("--model_size", "llama2-7b", *CLUSTER))["layers"] == 32
    assert shape(lab.found("--model_size", "gpt-6.7b", *CLUSTER))["layers"] == 32


@TABLE.different(
    "set_model_config_manually 1 + sizes (search)",
    "Without measured files the sizes are laid over the default model; what is not given follows "
    "in proportion, or is asked for.",
)
def _(lab: Lab) -> None:
    lab = lab.fresh()
    sizes = ("--hidden_size", "2048", "--num_attention_heads", "16", "--num_hidden_layers", "24")
    words = ("--set_model_config_manually", "1", *sizes, *CLUSTER)
    answer = lab.ask("autopar-search", *words, "--output_config_path", "own.json")
    assert "using the shipped llama2-7b" in answer.err
    assert answer.out.startswith("llama2-7b_hidden2048_head16 (24 layers)")
    assert "the 16 attention heads" in lab.found("--num_kv_heads", "5", *words, expected=2)
    assert "Add --head-dim" in lab.found("--num_attention_heads", 3, *words[:4], expected=2)
    # with measured files, as documented, the sizes say which files
    assert shape(lab.search(*BASE, "--set_model_config_manually", "1"))["layers"] == LAYERS


@TABLE.works("set_model_config_manually 0 / set_layernum_manually 0 (sizes then ignored)")
def _(lab: Lab) -> None:
    words = (
        *("--model_size", "llama2-7b", "--set_model_config_manually", "0"),
        *("--set_layernum_manually", "0", "--num_hidden_layers", "24", *CLUSTER),
    )
    assert shape(lab.found(*words))["layers"] == 32
    assert shape(lab.found(*words, "--set_layernum_manually", "1"))["layers"] == 24


@TABLE.works("set_layernum_manually 1 + layers (search)")
def _(lab: Lab) -> None:
    words = ("--model_size", "llama2-7b", "--set_layernum_manually", "1", "--num_layers", "16")
    assert shape(lab.found(*words, *CLUSTER))["layers"] == 16


@TABLE.works("num_nodes, num_gpus_per_node")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    hardware_files(lab.path(HARDWARE), 2, 8)
    for nodes, expected in ((1, 8), (2, 16)):
        words = (*BASE, "--num_nodes", nodes, "--num_gpus_per_node", 8)
        assert shape(lab.search(*words))["world_size"] == expected
    for nodes, gpus in ((3, 4), (1, 6), (16, 8)):
        words = ("--model", "llama2-7b", "--hardware", f"a100-80gb:{nodes}x{gpus}")
        words += ("--engine", "galvatron")
        found = shape(lab.found(*words, "--settle_bsz", nodes * gpus * 2))
        assert found["world_size"] == nodes * gpus


@TABLE.works("memory_constraint per GPU")
def _(lab: Lab) -> None:
    """The budget that a refusal names is the smallest: a hundredth of a GiB less does not do."""
    said = lab.said("--settle_bsz", 32, "--memory_constraint", 3, expected=3)
    smallest = float(re.findall(r"--memory-constraint ([0-9.]+)", said)[-1])
    assert smallest == 4.29
    assert lab.search("--settle_bsz", 32, "--memory_constraint", smallest)["fits"]
    lab.search("--settle_bsz", 32, "--memory_constraint", smallest - 0.01, expected=3)


@TABLE.works("min_bsz, max_bsz, bsz_scale")
def _(lab: Lab) -> None:
    for low, high, step, best in ((8, 64, 8, 64), (16, 48, 16, 48)):
        words = ("--min_bsz", low, "--max_bsz", high, "--bsz_scale", step)
        words = (*words, "--memory_constraint", "20")
        assert shape(lab.search(*words))["bsz"] == best
    assert shape(lab.search("--min_bsz", 24, *SIXTEEN))["bsz"] == 24


@TABLE.works("settle_bsz")
def _(lab: Lab) -> None:
    assert shape(lab.search("--settle_bsz", 24, *SIXTEEN))["bsz"] == 24
    words = ("--settle_bsz", -1, "--min_bsz", 8, "--max_bsz", 16, *SIXTEEN)
    assert shape(lab.search(*words))["bsz"] == 16


@TABLE.works("settle_chunk")
def _(lab: Lab) -> None:
    assert shape(lab.search(*BASE, "--settle_chunk", 8))["m"] == 8
    said = lab.said(*BASE, "--settle_chunk", 3, expected=2)
    assert "3 does not divide --global-batch-size 32 (32 % 3 = 2)" in said
    found = shape(lab.search("--min_bsz", 16, "--max_bsz", 32, "--settle_chunk", 4, *SIXTEEN))
    assert found["m"] == 4


TABLE.plans("dimension dp", "--search_space", "dp", "--memory_constraint", "60", tp={1}, pp=1, m=1)
TABLE.plans("dimension sdp (ZeRO-3)", "--search_space", "sdp", *SIXTEEN, zero3={1}, tp={1}, pp=1)
TABLE.plans("dimension tp", "--search_space", "tp", *SIXTEEN, tp={8}, zero3={0}, pp=1)


@TABLE.works("dimension vtp")
def _(lab: Lab) -> None:
    assert shape(lab.search(*BASE))["vtp"] == 4
    for degree in (1, 2, 8):
        found = shape(lab.search(*BASE, "--pin", f"vtp={degree}"))
        assert (found["vtp"], found["rate"] < lab.rate()) == (degree, True)


@TABLE.works("dimension pp")
def _(lab: Lab) -> None:
    found = shape(lab.search(*BASE, "--pin", "pp=4", "--num_layers", 23))
    assert found["pp"] == 4
    assert sum(found["stages"]) == 23
    assert max(found["stages"]) > min(found["stages"])


TABLE.plans("dimension ckpt", "--disable_tp", "1", "--memory_constraint", "13", ckpt={0, 1}, tp={1})


@TABLE.works("--search_space full")
def _(lab: Lab) -> None:
    """The default, and what the narrower spaces have not: ZeRO-3 with mixed tensor degrees."""
    found = shape(lab.search(*BASE, "--search_space", "full"))
    assert found == shape(lab.search(*BASE))
    assert (found["zero3"], found["tp"], found["pp"]) == ({1}, {2, 4}, 1)


TABLE.plans("--search_space 3d", "--search_space", "3d", zero3={0}, ckpt={0}, tp={4}, pp=1, m=8)


@TABLE.works("--search_space dp+tp")
def _(lab: Lab) -> None:
    """One stage, also where several are faster."""
    words = ("--search_space", "dp+tp")
    found = shape(lab.search(*BASE, *words))
    assert (found["tp"], found["pp"], found["zero3"]) == ({2, 4}, 1, {0})
    found = shape(lab.search(*BASE, *words, "--disable_dp", 1))
    assert (found["tp"], found["pp"]) == ({8}, 1)


TABLE.plans("--search_space dp+pp", "--search_space", "dp+pp", tp={1}, pp=8, zero3={0})


@TABLE.works("--search_space dp")
def _(lab: Lab) -> None:
    said = lab.said(*BASE, "--search_space", "dp", expected=3)
    assert "Use --memory-constraint 28.91" in said
    found = shape(lab.search(*BASE, "--search_space", "dp", "--memory_constraint", "28.91"))
    assert (found["tp"], found["pp"], found["zero3"], found["ckpt"]) == ({1}, 1, {0}, {0})


TABLE.plans("--search_space sdp", "--search_space", "sdp", *SIXTEEN, zero3={1}, ckpt={0}, m=4)


@TABLE.works("--search_space tp")
def _(lab: Lab) -> None:
    for limit in (8, 4):
        words = ("--search_space", "tp", "--max_tp_deg", limit)
        assert shape(lab.search(*BASE, *SIXTEEN, *words))["tp"] == {limit}


@TABLE.works("--search_space pp")
def _(lab: Lab) -> None:
    """The plan has as many stages as GPUs, also if memory is enough for one."""
    for limit in (10, 60):
        found = shape(lab.search(*BASE, "--search_space", "pp", "--memory_constraint", limit))
        assert (found["pp"], found["tp"], found["stages"]) == (8, {1}, (3,) * 8)


@TABLE.works("--sp_space tp")
def _(lab: Lab) -> None:
    """Megatron's tensor parallelism alone: no layer may have the other kind."""
    words = ("--sp_space", "tp")
    found = shape(lab.search(*BASE, *words))
    assert (found["tp"], found["ulysses"]) == ({2, 4}, {0})
    lab.search(*BASE, *words, "--pin", "ulysses=1", expected=3)


@TABLE.works("--sp_space sp")
def _(lab: Lab) -> None:
    words = ("--sp_space", "sp", "--disable_sdp", 1, "--memory_constraint", "24.30")
    found = shape(lab.search(*BASE, *words, "--disable_pp", 1))
    assert (found["ulysses"], found["tp"], found["vsp"]) == ({1}, {8}, 1)


@TABLE.works("--sp_space tp+sp")
def _(lab: Lab) -> None:
    words = (
        *("--memory_constraint", "60", "--settle_bsz", "8", "--sp_space", "tp+sp"),
        *("--pin", "layers 0-11:ulysses=1", "--pin", "layers 12-23:ulysses=0"),
    )
    found = shape(lab.search(*words))
    assert found["ulysses"] == {0, 1}
    assert shape(lab.search(*words, "--pin", "vulysses=1"))["vsp"] == 1


TABLE.plans("--disable_dp 1", "--disable_dp", "1", pp=4, tp={2}, zero3={0})
TABLE.plans("--disable_tp 1", "--disable_tp", "1", tp={1}, vtp=1)
TABLE.plans("--disable_vtp 1", "--disable_vtp", "1", vtp=1, tp={2, 4})
TABLE.plans("--disable_pp 1", "--disable_pp", "1", "--disable_dp", "1", pp=1, tp={8})
TABLE.plans("--disable_sdp 1", "--disable_sdp", "1", zero3={0}, tp={2, 4})


@TABLE.works("--disable_ckpt 1")
def _(lab: Lab) -> None:
    words = (*BASE, "--memory_constraint", "13", "--disable_tp", 1)
    with_it = shape(lab.search(*words))
    without = shape(lab.search(*words, "--disable_ckpt", 1))
    assert (with_it["ckpt"], without["ckpt"]) == ({0, 1}, {0})
    assert without["rate"] < with_it["rate"]


@TABLE.works("--disable_tp_consec 1")
def _(lab: Lab) -> None:
    """It leaves strided groups out, which are not tried unless asked for."""
    strided = ("--strided_tp", 1, "--pin", "strided=1", "--pin", "tp=2")
    assert shape(lab.search(*BASE, *strided))["consecutive"] == {0}
    said = lab.said(*BASE, *strided, "--disable_tp_consec", 1, expected=3)
    assert "--disable-tp-consec" in said


@TABLE.works("--disable_sp 1")
def _(lab: Lab) -> None:
    words = ("--sp_space", "tp+sp", "--pin", "ulysses=1", "--memory_constraint", "60")
    assert shape(lab.search(*BASE, *words))["ulysses"] == {1}
    lab.search(*BASE, *words, "--disable_sp", 1, expected=3)


@TABLE.works("--disable_cp 1")
def _(lab: Lab) -> None:
    words = ("--max_cp_deg", 2, "--pin", "cp=2", "--memory_constraint", "60")
    assert lab.search(*BASE, *words)["legal"]
    lab.search(*BASE, *words, "--disable_cp", 1, expected=3)


@TABLE.works("--disable_fsdp 1")
def _(lab: Lab) -> None:
    words = (*BASE, "--disable_fsdp", 1)
    assert lab.search(*words)["plan"] == lab.search(*BASE, "--disable_sdp", 1)["plan"]


@TABLE.works("--disable_embedding_lmhead_tp 1")
def _(lab: Lab) -> None:
    words = (*BASE, "--disable_embedding_lmhead_tp", 1)
    assert lab.search(*words)["plan"] == lab.search(*BASE, "--disable_vtp", 1)["plan"]


@TABLE.works("--disable_embedding_lmhead_sp 1")
def _(lab: Lab) -> None:
    words = ("--sp_space", "tp+sp", "--pin", "vulysses=1", "--memory_constraint", "60")
    assert shape(lab.search(*BASE, *words))["vsp"] == 1
    said = lab.said(*BASE, *words, "--disable_embedding_lmhead_sp", 1, expected=2)
    assert "no strategy is possible for embedding and head" in said


@TABLE.works("--disable_* 0 keeps it")
def _(lab: Lab) -> None:
    names = ("dp", "tp", "vtp", "pp", "sdp", "ckpt", "tp_consec", "sp", "cp", "fsdp")
    words = [word for name in names for word in (f"--disable_{name}", "0")]
    assert lab.search(*BASE, *words)["plan"] == lab.search(*BASE)["plan"]


TABLE.plans(
    *("disable several (dp+sdp)", "--disable_dp", "1", "--disable_sdp", "1"),
    pp=4,
    tp={2},
    zero3={0},
)


@TABLE.works("--max_tp_deg")
def _(lab: Lab) -> None:
    one = ("--disable_sdp", 1, "--disable_pp", 1, *SIXTEEN)
    assert "--memory-constraint 24.83" in lab.said(*BASE, *one, "--max_tp_deg", 1, expected=3)
    for limit in (2, 4, 8):
        assert max(shape(lab.search(*BASE, *one, "--max_tp_deg", limit))["tp"]) <= limit


@TABLE.works("--max_pp_deg")
def _(lab: Lab) -> None:
    stages = ("--disable_sdp", 1, "--disable_tp", 1)
    for limit in (1, 2):
        lab.search(*BASE, *stages, "--max_pp_deg", limit, expected=3)
    assert shape(lab.search(*BASE, *stages, "--max_pp_deg", 4))["pp"] == 4
    assert shape(lab.search(*BASE, *stages, *SIXTEEN, "--max_pp_deg", 2))["pp"] == 2
    # more than the 8 of older releases need no option
    wide = ("--model", "llama2-7b", "--hardware", "a100-40gb:2x8", "--settle_bsz", 32)
    assert shape(lab.found(*wide, "--search_space", "pp"))["pp"] == 16


@TABLE.works("--max_sp_deg / --max_cp_deg")
def _(lab: Lab) -> None:
    ulysses = ("--sp_space", "sp", "--pin", "ulysses=1", "--memory_constraint", "60")
    found = shape(lab.search(*BASE, *ulysses, "--max_sp_deg", 2))
    assert found["tp"] == {2}
    rings = ("--pin", "cp=2", "--memory_constraint", "60")
    assert "cp" in lab.said(*BASE, *rings, expected=3)
    assert lab.search(*BASE, *rings, "--max_cp_deg", 2)["legal"]


@TABLE.works("sequence-parallel in the cost model")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    write(lab.path(MODEL, MEMORY), memory_file("") | memory_file())
    on, off = lab.rate(), lab.rate("--no-sequence-parallel")
    assert on != off
    assert lab.rate("--sequence-parallel") == lab.rate("--sequence_parallel", "1") == on
    assert lab.rate("--sequence_parallel", "0") == off


@TABLE.different(
    "default of sequence_parallel (seed: off until set)",
    "It costs nothing and saves memory, so it is on until switched off or never measured.",
)
def _(lab: Lab) -> None:
    assert lab.search(*BASE)["plan"] == lab.search(*BASE, "--sequence_parallel")["plan"]
    lab = lab.fresh()
    write(lab.path(MODEL, MEMORY), memory_file(""))
    assert any("--no-sequence-parallel" in line for line in lab.search(*BASE)["defaults_used"])
    said = lab.said(*BASE, "--sequence-parallel", expected=2)
    assert "--no-sequence-parallel" in said


@TABLE.works("fine_grained_mode 0/1")
def _(lab: Lab) -> None:
    one = shape(lab.search(*BASE, "--fine_grained_mode", 0))
    assert [len(one[key]) for key in ("tp", "zero3", "ckpt", "ulysses")] == [1, 1, 1, 1]
    assert one["rate"] < lab.rate("--fine_grained_mode", 1) == lab.rate()


@TABLE.works("profile_mode in the search (both modes at once)")
def _(lab: Lab) -> None:
    lab = sweep(lab, (1, 2, 4, 8), (512, SEQ, 2048))
    both = ("--time_profile_mode", "batch", "--memory_profile_mode", "batch")
    assert lab.rate("--profile_mode", "batch") == lab.rate(*both) != lab.rate()
    longer = (*BASE, "--seq_length", 1536, "--profile_mode")
    assert lab.search(*longer, "sequence")["fits"]
    assert "1536" in lab.said(*longer, "static", expected=2)


@TABLE.works("time_profile_mode hybrid (v2.4 choice)")
def _(lab: Lab) -> None:
    lab = sweep(lab, (1, 2, 4, 8), (512, SEQ, 2048))
    rate = lab.rate("--time_profile_mode", "hybrid")
    assert rate == pytest.approx(lab.rate("--time_profile_mode", "batch"), rel=0.02)


@TABLE.works("static: time proportional to batch")
def _(lab: Lab) -> None:
    """Twice the samples in twice the micro-batches of the same size take twice as long."""
    one = ("--search_space", "dp", "--memory_constraint", "80", "--settle_chunk", 1)
    seconds = [
        forward_s(lab.planned(*one, "--settle_bsz", batch, "--time_profile_mode", "static"))
        for batch in (8, 16, 32)
    ]
    assert seconds == pytest.approx([0.036, 0.072, 0.144])


@TABLE.works("batch: linear with intercept")
def _(lab: Lab) -> None:
    """0.2 ms and 1.3 ms for every sample, in each of 24 layers."""
    one = ("--search_space", "dp", "--memory_constraint", "80", "--settle_chunk", 1)
    for batches in ((1, 8), (1, 2, 4, 8)):
        measured = sweep(lab, batches)
        for batch in (8, 32):
            words = (*one, "--settle_bsz", batch, "--time_profile_mode", "batch")
            expected = LAYERS * (0.2e-3 + 1.3e-3 * batch / 8)
            assert forward_s(measured.planned(*words)) == pytest.approx(expected, rel=1e-6)
    said = lab.said(*BASE, "--profile_mode", "batch", expected=2)
    assert "only batch size 8 was measured" in said


@TABLE.different("8 batch sizes required", "Two points make a line; more make it a better one.")
def _(lab: Lab) -> None:
    words = ("--time_profile_mode", "batch")
    two, eight = (sweep(lab, batches).rate(*words) for batches in ((1, 8), tuple(range(1, 9))))
    assert two == pytest.approx(eight, rel=1e-6)


@TABLE.works("sequence: other lengths modelled (time and memory)")
def _(lab: Lab) -> None:
    lab = sweep(lab, (1, 8), (512, SEQ, 2048))
    said = lab.said(*BASE, "--seq_length", 1536, expected=2)
    assert "no computation time was measured at sequence length 1536" in said
    rates = [
        lab.rate("--seq_length", length, "--profile_mode", "sequence")
        for length in (512, SEQ, 1536, 2048)
    ]
    assert rates == sorted(rates, reverse=True)
    far = (*BASE, "--seq_length", 8192, "--profile_mode", "sequence")
    assert "--extrapolate" in lab.said(*far, expected=2)
    assert lab.search(*far, "--extrapolate", *SIXTEEN)["fits"]


@TABLE.different(
    "no_global_memory_buffer",
    "Without a shared buffer every layer gathers into its own, so that memory does not fall.",
)
def _(lab: Lab) -> None:
    words = (*BASE, *SIXTEEN, "--pin", "tp=4", "--pin", "pp=1", "--disable_sdp", 1)
    parts = []
    for option in ((), ("--no_global_memory_buffer",)):
        (stage,) = lab.planned(*words, *option)["prediction"]["stages"]
        parts.append((stage["allocated_bytes"], stage["memory_bytes"]))
    (all_with, with_it), (all_without, without) = parts
    assert all_with == all_without
    assert (with_it["shared"], without["shared"]) == (16 * 2**20, 0)
    assert without["transient"] - with_it["transient"] == 16 * 2**20


@TABLE.works("no_async_grad_reduce (search)")
def _(lab: Lab) -> None:
    words = (
        *(*BASE, *SIXTEEN, "--default_dp_type", "zero2", "--disable_sdp", 1, "--pin", "tp=1"),
        *("--settle_chunk", 4, "--pin", "pp=1"),
    )
    once, always = lab.search(*words), lab.search(*words, "--no_async_grad_reduce")
    assert once["samples_per_s"] == pytest.approx(71.731, rel=1e-3)
    assert always["samples_per_s"] == pytest.approx(69.747, rel=1e-3)
    gib = [found["memory"][0]["allocated_bytes"] / 2**30 for found in (once, always)]
    assert gib == pytest.approx([13.740, 9.330], abs=1e-3)


@TABLE.works("mixed_precision bf16/fp16/fp32 (search)")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    for name in (COMPUTATION, MEMORY):
        for precision in ("fp16", "fp32"):
            write(lab.path(MODEL, name.replace("bf16", precision)), lab.load(MODEL, name))
    rates = [lab.rate("--mixed_precision", precision) for precision in ("bf16", "fp16", "fp32")]
    assert rates[0] == rates[1] > rates[2]


@TABLE.works("pipeline_type gpipe / pipedream_flush")
def _(lab: Lab) -> None:
    """All micro-batches of GPipe are alive at once: the same memory allows less speed."""
    found = [
        shape(lab.search(*BASE, *SIXTEEN, "--pin", "pp=2", "--pipeline_type", kind))
        for kind in ("gpipe", "pipedream_flush")
    ]
    assert [item["pipeline_type"] for item in found] == ["gpipe", "pipedream_flush"]
    assert [item["rate"] for item in found] == pytest.approx([50.503, 63.493], rel=1e-3)


@TABLE.works("default_dp_type ddp / zero2")
def _(lab: Lab) -> None:
    rates = [
        shape(lab.search(*BASE, *SIXTEEN, "--default_dp_type", kind))["rate"]
        for kind in ("ddp", "zero2", "any")
    ]
    assert rates == pytest.approx([69.772, 71.731, 71.731], rel=1e-3)


@TABLE.works("embed_sdp given on the search command")
def _(lab: Lab) -> None:
    """1 requires ZeRO-3 of embedding and head; 0 leaves it to the search, as the other switches."""
    roomy = ("--settle_bsz", 32, "--memory_constraint", 60)
    asked = lab.search(*roomy, "--embed_sdp", 1)
    assert shape(asked)["embed_sdp"] == 1
    assert asked["plan"] == lab.search(*roomy, "--pin", "vzero3=1")["plan"]
    none = (*roomy, "--disable_sdp", 1)
    assert lab.search(*none, "--embed_sdp", 0)["plan"] == lab.search(*none)["plan"]
    said = lab.said(*none, "--embed_sdp", 1, expected=2)
    assert "no strategy is possible for embedding and head" in said


@TABLE.works("embed_sdp, vsp in the output")
def _(lab: Lab) -> None:
    plan = lab.search(*BASE)["plan"]
    assert (plan["embed_sdp"], plan["vocab_sdp"], plan["vsp"]) == (1, 1, 0)


@TABLE.different(
    "recommend_min_bsz, parallel_search, worker, log_dir, costmodel_coe, use_pipeline_costmodel",
    "They steer another program's search; each is accepted with the reason why it has no effect.",
)
def _(lab: Lab) -> None:
    reasons = {
        "recommend_min_bsz": "every batch of the range is considered",
        "parallel_search": "the search runs on one core",
        "worker": "the search runs on one core",
        "log_dir": "no log files are written",
        "costmodel_coe": "costs are not scaled",
        "use_pipeline_costmodel": "the pipeline is always part of the cost",
    }
    for name, reason in reasons.items():
        words = (*BASE, f"--{name}", "1")
        assert lab.said(*words) == f"autopar-search: --{name} is ignored: {reason}\n"
        assert lab.rate(f"--{name}", "1") == lab.rate()


@TABLE.works("check_cost_model printing")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    lab.ask("autopar-search", *GPT, *BASE, "--output_config_path", "s.json")
    out = lab.ask("autopar-explain", "autopar_plan_s.json", "--why-not", "tp=8").out
    for words in ("Why not tp=8: ", "Difference per sequence"):
        assert words in out
    priced = lab.found(*GPT, *BASE, "--evaluate", "s.json")
    (stage,) = priced["prediction"]["stages"]
    assert set(stage["memory_bytes"]) >= {"states", "activations", "vocab_states", "transient"}
    assert sum(stage["memory_bytes"].values()) == pytest.approx(stage["allocated_bytes"])


@TABLE.works("hydra overrides of the newest release")
def _(lab: Lab) -> None:
    words = (
        "search_engine.hardware_info.memory_constraint=16",
        "++search_engine.batch_size_info.settle_bsz=32",
    )
    typed = lab.search("--settle_bsz", 32, "--memory_constraint", 16)
    assert lab.search(*words)["plan"] == typed["plan"]


@TABLE.works("underscore/hyphen/= spellings")
def _(lab: Lab) -> None:
    plan = lab.search("--settle_bsz", 32, "--memory_constraint", 16)["plan"]
    for words in (
        ("--settle-bsz", "32", "--memory-constraint", "16"),
        ("--settle_bsz=32", "--memory-constraint=16"),
        ("settle_bsz=32", "memory_constraint=16"),
    ):
        assert lab.search(*words)["plan"] == plan


@TABLE.works("old strategy files (v2.0-2.4)")
def _(lab: Lab) -> None:
    """The keys of release 2.0; what it does not say is 0 or 1."""
    lab = lab.fresh()
    many = {
        "tp_sizes_enc": ",".join(["2"] * 8 + ["4"] * 16),
        "tp_consecutive_flags": ",".join(["1"] * 20 + ["0"] * 4),
        "dp_types_enc": ",".join(["1"] * 6 + ["0"] * 18),
        "checkpoint": ",".join(["0"] * 4 + ["1"] * 20),
    }
    old = {
        "pp_deg": 1,
        **many,
        "global_bsz": 32,
        "chunks": 4,
        "pp_division": str(LAYERS),
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "zero2",
    }
    write(lab.path("old.json"), old)
    found = lab.search(*BASE, "--memory_constraint", 60, "--evaluate", "old.json")
    assert found["legal"]
    assert {key: found["plan"][key] for key in old} == old
    assert {key: found["plan"][key] for key in ("vtp", "vsp", "embed_sdp")} == {
        "vtp": 1,
        "vsp": 0,
        "embed_sdp": 0,
    }


@TRIAL.works("plan files from any folder")
def _(lab: Lab) -> None:
    """Inputs that are not below the current folder are those beside the plan file."""
    lab = lab.fresh()
    lab.ask("autopar-search", *GPT, *BASE, "--output_config_path", "s.json")
    plan = "autopar_plan_s.json"
    here = lab.ask("autopar-explain", plan)
    assert here.err == ""
    lab.path("deeper").mkdir()
    elsewhere = Lab(folder=lab.path("deeper"))
    there = elsewhere.ask("autopar-explain", f"../{plan}")
    assert there.out.replace("../", "") == here.out
    for words in (("autopar-explain",), ("autopar-export", "--to", "galvatron")):
        said = elsewhere.ask(words[0], f"../{plan}", *words[1:]).err
        assert "not in this folder" not in said

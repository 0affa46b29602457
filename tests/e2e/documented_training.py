"""Documented steps around the search: measuring a model, training by a plan, and its files.

The source is the page of Galvatron's models (001), without its part on the search, which is in
`documented_search.py`, and with the command lines of release 2.4. Nothing trains here: what is
documented of training is checked on `profile-plan`, which runs a plan, and on exported files.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.documented_files import SHORT, TINY
from tests.e2e.documented_lab import BASE, GPT, LAYERS, Lab, Table, shape, write
from tests.warm import ROOT

TABLE = Table("001")
GLOBAL = (
    *("--model", "llama2-7b", "--world-size", "8", "--global_train_batch_size", "16"),
    *("--mode", "static", "--json", "-"),
)
TIMES, SPACE = "computation", "memory"
RUN = ("--model", "tiny/config.json", "--seq", "32", "--steps", "1", "--timed-steps", "1")


def tiny(lab: Lab, *, kind: str = "llama", **changes: object) -> Lab:
    """Return a laboratory with the config.json of a small model."""
    lab = lab.fresh()
    write(lab.path("tiny", "config.json"), {**TINY, "model_type": kind, **changes})
    return lab


def profiled(lab: Lab, what: str, *words: object) -> dict[str, Any]:
    """Return the documented file of a small model that profile-model writes with these words."""
    source = SHORT if what == TIMES else ("--source", "exact", "--dtype", "fp32")
    lab.torch(
        *("profile-model", "--model", "tiny/config.json", "--profile_type", what, "--out", "pm"),
        *(*words, *source),
    )
    found: dict[str, Any] = lab.load("pm", f"{what}_profiling_fp32_hidden_64_head_4.json")
    return found


def lengths_of(times: dict[str, float]) -> set[int]:
    """Return the sequence lengths of the layers of a computation file."""
    return {int(key.rpartition("seq")[2]) for key in times if key.startswith("layertype_0")}


def batches_of(times: dict[str, float]) -> set[int]:
    """Return the batch sizes of the layers of a computation file."""
    keys = (key for key in times if key.startswith("layertype_0"))
    return {int(key.split("_bsz")[1].split("_")[0]) for key in keys}


def static(lab: Lab, *words: object, expected: int = 0) -> Any:
    """Return what profile-plan says of a GLOBAL strategy for llama2-7b on 8 GPUs."""
    answer = lab.ask("profile-plan", *GLOBAL, *words, expected=expected)
    return answer.data if expected == 0 else answer.err


@TABLE.works("profile_computation step")
def _(lab: Lab) -> None:
    words = ("--bsz", 2, "--seq", 32, "--tp", 1, "--backward", 0)
    found = profiled(tiny(lab), TIMES, *words)
    assert set(found) == {
        *("layertype_0_bsz2_seq32", "layertype_other_bsz2_seq32"),
        *("layernum[2]_bsz2_seq32", "layernum[4]_bsz2_seq32"),
    }
    assert all(value > 0.0 for value in found.values())


@TABLE.works("profile_memory step (needed for user models)")
def _(lab: Lab) -> None:
    found = profiled(tiny(lab), SPACE, "--seq", 32, "--tp", "1,2")
    other = {f"other_memory_pp_{place}" for place in ("off", "on_first", "on_last")}
    names = {"layertype_0", *other}
    assert set(found) == names | {f"{name}_sp" for name in names}
    table = found["layertype_0_sp"]["32"]
    assert set(table["tp_activation_per_bsz_dict"]) == {"1", "2", "checkpoint"}
    # attention with two key-value heads, gated MLP, two norms; 4 bytes each
    parameters = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert table["parameter_size"] == pytest.approx(4 * parameters / 2**20)


@TABLE.works("models of the zoo already profiled")
def _(lab: Lab) -> None:
    """Memory of each is counted, times are estimated; the sizes are those of its publication."""
    words = ("--hardware", "a100:1x8", "--settle_bsz", 16, "--engine", "galvatron")
    layers = {
        "llama-30b": 60,
        "gpt-0.3b": 24,
        "gpt-1.5b": 48,
        "gpt-2.7b": 32,
        "bert-base": 12,
        "bert-huge-32": 32,
        "t5-large": 48,
    }
    for name, number in layers.items():
        assert shape(lab.found("--model_size", name, *words))["layers"] == number
    for name, own in (("llama-7b", "llama2-7b"), ("llama-13b", "llama2-13b")):
        alike = lab.found("--model", own, "--seq_length", 2048, *words)["plan"]
        assert lab.found("--model_size", name, *words)["plan"] == alike
    out = lab.ask("autopar-search", "--output_config_path", "none").out
    assert "ESTIMATES from datasheets" in out
    assert "memory counted exactly" in out


@TABLE.works("profile_min/max_batch_size, profile_batch_size_step = range(min,max+1,step)")
def _(lab: Lab) -> None:
    words = ("--profile_min_batch_size", 1, "--profile_max_batch_size", 8)
    words += ("--profile_batch_size_step", 3, "--mode", "batch", "--seq", 32)
    found = profiled(tiny(lab), TIMES, *words, "--tp", 1, "--backward", 0)
    assert batches_of(found) == {1, 4, 7}


@TABLE.works("profile_min/max_seq_length, profile_seq_length_step")
def _(lab: Lab) -> None:
    words = ("--profile_min_seq_length", 32, "--profile_max_seq_length", 128)
    words += ("--profile_seq_length_step", 32, "--mode", "sequence")
    found = profiled(tiny(lab), TIMES, *words, "--tp", 1, "--backward", 0)
    assert lengths_of(found) == {32, 64, 96, 128}
    words = ("--profile_min_seq_length", 32, "--profile_max_seq_length", 95)
    words += ("--profile_seq_length_step", 32, "--mode", "sequence")
    memory = profiled(tiny(lab), SPACE, *words, "--tp", 1)
    assert set(memory["layertype_0"]) == {"32", "64"}


@TABLE.works("profile_mode batch")
def _(lab: Lab) -> None:
    words = ("--profile_mode", "batch", "--bsz", "1:8", "--seq", 16)
    found = profiled(tiny(lab), TIMES, *words, "--tp", 1, "--backward", 0)
    assert batches_of(found) == set(range(1, 9))


@TABLE.works("profile_mode sequence")
def _(lab: Lab) -> None:
    """Without lengths: up to five, the model's own and halves of it, none below 64."""
    words = ("--profile_mode", "sequence", "--tp", 1)
    found = profiled(tiny(lab), SPACE, *words)
    assert set(found["layertype_0"]) == {"128", "64"}


@TABLE.works("profile_mode static")
def _(lab: Lab) -> None:
    words = ("--profile_mode", "static", "--seq", 16, "--tp", 1, "--backward", 0)
    found = profiled(tiny(lab), TIMES, *words)
    assert (batches_of(found), lengths_of(found)) == ({8}, {16})


@TABLE.works("set_model_config_manually (profilers)")
def _(lab: Lab) -> None:
    """1 measures these sizes, and what follows from them; 0 the model's own, saying so."""
    lab = tiny(lab)
    sizes = ("--vocab_size", 500, "--hidden_size", 128, "--num_attention_heads", 8)
    words = ("--seq", 32, "--tp", 1, "--profile_type", SPACE, "--source", "exact", "--out", "pm")
    words = ("profile-model", "--model_size", "tiny/config.json", *sizes, *words)
    lab.torch(*words, "--num_hidden_layers", 2, "--set_model_config_manually", 1)
    found = lab.load("pm", "memory_profiling_bf16_hidden_128_head_8.json")
    # four key-value heads, and an MLP twice as wide
    parameters = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256 + 2 * 128
    size = found["layertype_0"]["32"]["parameter_size"]
    assert size == pytest.approx(4 * parameters / 2**20)
    answer = lab.torch(*words, "--set_model_config_manually", 0)
    assert "--hidden_size 128 is not used: --set_model_config_manually 0" in answer.err
    assert lab.path("pm", "memory_profiling_bf16_hidden_64_head_4.json").is_file()
    # the executor: the same words, the same sizes
    plan = ("--world-size", 2, "--global_train_batch_size", 4, "--mode", "static", "--json", "-")
    plan = ("profile-plan", "--model", "tiny/config.json", *plan, *sizes, "--num_hidden_layers", 2)
    stage = lab.ask(*plan, "--set_model_config_manually", 1).data["stages"][0]
    # the vocabulary is padded to 512; embedding, head and the last norm
    assert stage["num_parameters"] == 2 * parameters + 2 * 512 * 128 + 128


@TABLE.works("set_seqlen_manually + seq_length")
def _(lab: Lab) -> None:
    model = ("--model", "llama2-7b", "--hardware", "a100:1x8", "--settle_bsz", "8")
    model += ("--engine", "galvatron")
    words = ("--set_seqlen_manually", 1, "--seq_length", 2048)
    short, long = lab.found(*model, *words), lab.found(*model)
    assert short["samples_per_s"] > 1.8 * long["samples_per_s"]
    assert static(lab, *words)["seq_length"] == [2048]
    memory = profiled(tiny(lab), SPACE, "--seq_length", 64, "--tp", 1)
    assert set(memory["layertype_0"]) == {"64"}
    off = ("--set_seqlen_manually", 0, "--seq_length", 64)
    assert set(profiled(tiny(lab), SPACE, *off, "--tp", 1)["layertype_0"]) == {"128"}
    assert static(lab, *off)["seq_length"] == [4096]


@TABLE.different(
    "train_dist (training)",
    "profile-plan runs a plan to check it; training is the work of the engines that plans go to.",
)
def _(lab: Lab) -> None:
    out = lab.ask("profile-plan", "--help", "all").out
    assert "saves no checkpoint" in " ".join(out.split())


@TABLE.works("NUM_NODES, NUM_GPUS_PER_NODE, MASTER_ADDR, MASTER_PORT, NODE_RANK")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    words = ("--model", "llama2-7b", "--hardware", "a100-80gb:2x8", "--settle_bsz", "32")
    words += ("--engine", "galvatron")
    lab.ask("autopar-search", *words, "--output_config_path", "s.json")
    lab.ask("autopar-export", "autopar_plan_s.json", "--to", "galvatron", "--out", "g")
    script = lab.path("g", "launch.sh").read_text(encoding="utf-8")
    assert "torchrun --nnodes 2 --nproc-per-node 8" in script
    for variable in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
        assert f"${{{variable}" in script


def run_matches(lab: Lab, *words: object, num_ranks: int = 4) -> dict[str, Any]:
    """Run a strategy for the small model on copies; return the document, whose losses match."""
    lab.ranks(num_ranks, "profiler.plan", *words, "--json", "run.json")
    found: dict[str, Any] = lab.load("run.json")
    assert found["reference"]["matches"] is True
    return found


def strategy(**changes: object) -> dict[str, object]:
    """Return a strategy file of four layers on 4 ranks."""
    return {
        "pp_deg": 1,
        "tp_sizes_enc": "1,1,1,1",
        "tp_consecutive_flags": "1,1,1,1",
        "dp_types_enc": "0,0,0,0",
        "use_sp": "0,0,0,0",
        "checkpoint": "0,0,0,0",
        "world_size": 4,
        "global_bsz": 8,
        "chunks": 1,
        "pp_division": "4",
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "ddp",
        "vtp": 1,
        "vsp": 0,
        "embed_sdp": 0,
        **changes,
    }


@TABLE.works("JSON config mode (galvatron_config_path)", "ranks")
def _(lab: Lab) -> None:
    lab = tiny(lab)
    mixed = strategy(
        tp_sizes_enc="2,2,1,1", use_sp="1,1,0,0", dp_types_enc="0,0,1,1", checkpoint="0,0,0,1"
    )
    write(lab.path("mixed.json"), mixed)
    found = run_matches(lab, "--galvatron_config_path", "mixed.json", *RUN)
    assert found["plan"]["tp_sizes_enc"] == "2,2,1,1"


@TABLE.works("GLOBAL mode (galvatron_config_path None)", "ranks")
def _(lab: Lab) -> None:
    words = ("--world-size", 4, "--global_train_batch_size", 8, "--pp_deg", 2, "--sdp", 1)
    found = run_matches(tiny(lab), *RUN, *words, "--chunks", 2)
    assert (found["plan"]["pp_deg"], found["plan"]["dp_types_enc"]) == (2, "1,1,1,1")


def _global_row(feature: str, *words: object, **outcome: object) -> None:
    """Add a row: GLOBAL arguments give a plan with these keys; lists name one value for all."""

    @TABLE.works(feature)
    def _(lab: Lab) -> None:
        plan = static(lab, *words)["plan"]
        for key, value in outcome.items():
            seen = plan[key]
            one = {int(item) for item in seen.split(",")} if isinstance(seen, str) else {seen}
            assert one == {value}, key


_global_row("GLOBAL pp_deg", "--pp_deg", 2, pp_deg=2, pp_division=16)


@TABLE.works("GLOBAL global_tp_deg")
def _(lab: Lab) -> None:
    for given, degree in ((2, 2), (-1, 1)):
        found = static(lab, "--global_tp_deg", given)
        assert set(found["plan"]["tp_sizes_enc"].split(",")) == {str(degree)}
        weights = found["stages"][0]["num_parameters"]
        assert 6.4e9 / degree < weights < 7.1e9 / degree + 0.3e9


_global_row(
    *("GLOBAL global_tp_consec", "--global_tp_deg", 2, "--global_tp_consec", 0),
    tp_consecutive_flags=0,
)
_global_row("GLOBAL sdp", "--sdp", 1, dp_types_enc=1)
_global_row(
    "GLOBAL global_train_batch_size", "--global_train_batch_size", 32, "--chunks", 2, global_bsz=32
)


@TABLE.works("GLOBAL chunks")
def _(lab: Lab) -> None:
    for given, chunks in ((2, 2), (4, 4), (-1, 2)):
        words = ("--pp_deg", 2, "--global_tp_deg", 2, "--chunks", given)
        assert static(lab, *words)["plan"]["chunks"] == chunks


_global_row("GLOBAL global_checkpoint", "--global_checkpoint", 1, checkpoint=1)


@TABLE.works("GLOBAL pipeline_type")
def _(lab: Lab) -> None:
    """GPipe keeps all micro-batches, 1F1B as many as stages follow."""
    words = ("--pp_deg", 2, "--global_tp_deg", 2, "--chunks", 4, "--pipeline_type")
    flight = {
        kind: [stage["microbatches_in_flight"] for stage in static(lab, *words, kind)["stages"]]
        for kind in ("gpipe", "pipedream_flush")
    }
    assert flight == {"gpipe": [4, 4], "pipedream_flush": [2, 1]}


_global_row("GLOBAL vocab_tp", "--vocab_tp", 2, vtp=2)


@TABLE.works("JSON overrides GLOBAL arguments")
def _(lab: Lab) -> None:
    lab = tiny(lab)
    write(lab.path("s.json"), strategy())
    answer = lab.ask(
        *("profile-plan", "--galvatron_config_path", "s.json", "--model", "tiny/config.json"),
        *("--pp_deg", 2, "--sdp", 1, "--json", "-"),
    )
    assert (answer.data["plan"]["pp_deg"], answer.data["plan"]["dp_types_enc"]) == (1, "0,0,0,0")
    assert "--pp-deg" in answer.err.replace("_", "-")


@TABLE.works("training mixed_precision bf16", "ranks")
def _(lab: Lab) -> None:
    words = ("--world-size", 2, "--global_train_batch_size", 4, "--mixed_precision", "bf16")
    assert run_matches(tiny(lab), *RUN, *words, num_ranks=2)["precision"] == "bf16"


@TABLE.works("training mixed_precision fp16", "ranks")
def _(lab: Lab) -> None:
    words = ("--world-size", 2, "--global_train_batch_size", 4, "--mixed_precision", "fp16")
    found = run_matches(tiny(lab), *RUN, *words, num_ranks=2)
    assert found["precision"] == "fp16"
    assert all(norm > 0 for norm in found["grad_norm"])
    states = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    half, other = (
        [
            [stage[key] for key in states]
            for stage in static(lab, "--mixed_precision", name)["stages"]
        ]
        for name in ("fp16", "bf16")
    )
    assert half == other


@TABLE.different(
    "use-flash-attn", "Attention never keeps the matrix of scores here, so there is no other one."
)
def _(lab: Lab) -> None:
    answer = lab.ask("profile-plan", *GLOBAL, "--use-flash-attn")
    assert "ignored: attention never stores the score matrix" in answer.err
    assert answer.data["stages"] == static(lab)["stages"]


@TABLE.works("use_ulysses", "ranks")
def _(lab: Lab) -> None:
    words = ("--world-size", 2, "--global_train_batch_size", 4, "--global_tp_deg", 2)
    found = run_matches(tiny(lab), *RUN, *words, "--use_ulysses", num_ranks=2)
    assert found["plan"]["use_sp"] == "1,1,1,1"


@TABLE.works("sequence-parallel in training", "ranks")
def _(lab: Lab) -> None:
    """Both ways the losses are those of one process, and scattering keeps less."""
    words = ("--world-size", 2, "--global_train_batch_size", 4, "--global_tp_deg", 2)
    found = [
        run_matches(tiny(lab), *RUN, *words, "--sequence-parallel", on, num_ranks=2)
        for on in (1, 0)
    ]
    assert [item["sequence_parallel"] for item in found] == [True, False]
    assert max(found[0]["peak_bytes"]) < max(found[1]["peak_bytes"])


@TABLE.works("no_async_grad_reduce in training", "ranks")
def _(lab: Lab) -> None:
    words = ("--world-size", 2, "--global_train_batch_size", 8, "--chunks", 2, "--sdp", 1)
    found = run_matches(tiny(lab), *RUN, *words, "--no_async_grad_reduce", num_ranks=2)
    assert found["async_grad_reduce"] is False


@TABLE.works("vocab_sp, embed_sdp in training", "ranks")
def _(lab: Lab) -> None:
    words = ("--world-size", 4, "--global_train_batch_size", 8, "--vocab_tp", 2)
    found = run_matches(tiny(lab), *RUN, *words, "--vocab_sp", 1, "--embed_sdp", 1)
    assert [found["plan"][key] for key in ("vtp", "vsp", "embed_sdp")] == [2, 1, 1]


def exported(lab: Lab, *words: object) -> Lab:
    """Return a laboratory where the plan of a search lies in `g`, exported for Galvatron."""
    lab = lab.fresh()
    lab.ask("autopar-search", *words, "--output_config_path", "s.json")
    lab.ask("autopar-export", "autopar_plan_s.json", "--to", "galvatron", "--out", "g")
    return lab


LLAMA = ("--model", "llama2-7b", "--hardware", "a100:1x8", "--settle_bsz", "8")
LLAMA += ("--engine", "galvatron")


@TABLE.different(
    "HF weight conversion (tools/convert_*.sh)",
    "Weights are the engines' work: files have their keys, and the pages name their converters.",
)
def _(lab: Lab) -> None:
    text = exported(lab, *LLAMA).path("g", "train_dist.yaml").read_text(encoding="utf-8")
    assert 'load: "${oc.env:LOAD,null}"' in text
    page = (ROOT / "docs" / "guides" / "export.md").read_text(encoding="utf-8")
    assert "convert_checkpoints.py import" in page


@TABLE.works("--initialize_on_meta 1 / --load")
def _(lab: Lab) -> None:
    """Exported launches take LOAD and SAVE; `profile-plan` trains nothing and loads nothing."""
    answer = lab.ask("profile-plan", *GLOBAL, "--initialize_on_meta", 1, "--load", "checkpoints")
    assert "--initialize_on_meta is ignored: weights are created piece by" in answer.err
    assert "--load is ignored: weights are random" in answer.err
    folder = exported(lab, *LLAMA).path("g")
    script = (folder / "train_dist_v2.4.sh").read_text(encoding="utf-8")
    assert "--initialize_on_meta 1" in script
    assert '${LOAD:+--load "$LOAD"}' in script
    text = (folder / "train_dist.yaml").read_text(encoding="utf-8")
    assert "initialize_on_meta: 1" in text
    assert 'load: "${oc.env:LOAD,null}"' in text


@TABLE.different(
    "Megatron dataset",
    "Data are the engines' work: exported scripts have the keys; profile-plan makes up tokens.",
)
def _(lab: Lab) -> None:
    folder = exported(lab, *LLAMA).path("g")
    script = (folder / "train_dist_v2.4.sh").read_text(encoding="utf-8")
    for words in ("--data-path", "--split 949,50,1", "--tokenizer-type HuggingFaceTokenizer"):
        assert words in script
    assert "data_path: ${oc.env:DATA_PATH}" in (folder / "train_dist.yaml").read_text("utf-8")


T5 = (
    *("--model", "t5-3b", "--num_layers", "12,12", "--seq_length", "512,128"),
    *("--hardware", "a100-40gb:1x8", "--settle_bsz", "32"),
)


@TABLE.works("multi-layer-type models (T5) through search")
def _(lab: Lab) -> None:
    assert shape(lab.found(*T5, "--sp_space", "tp+sp"))["layers"] == 24
    found = shape(lab.found(*T5, "--pin", "pp=2"))
    assert (len(found["stages"]), sum(found["stages"])) == (2, 24)


@TABLE.works("T5 in the executor (run and dryrun)", "ranks")
def _(lab: Lab) -> None:
    lab = lab.fresh()
    lab.ask("autopar-search", *T5, "--pin", "pp=2", "--output_config_path", "s.json")
    answer = lab.ask("profile-plan", "autopar_plan_s.json", "--json", "-")
    assert answer.data["executor"]["runs"] is True
    words = ("--mode", "dryrun", "--layers", 4, "--ranks", "all", "--json", "-")
    ranks = lab.torch("profile-plan", "autopar_plan_s.json", *words).data["ranks"]
    assert [rank["stage"] for rank in ranks] == [0, 1]
    assert all(rank["peak_bytes"] > rank["parameter_bytes"] > 0 for rank in ranks)
    shape = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "num_layers": 2}
    small = {"model_type": "t5", "vocab_size": 250, "tie_word_embeddings": True, **shape}
    write(lab.path("t5", "config.json"), small)
    names = ("--model", "t5/config.json", "--seq", 32, "--steps", 2, "--timed-steps", 1)
    degrees = ("--pp-deg", 2, "--global_tp_deg", 2, "--vocab_tp", 2, "--chunks", 2)
    sizes = ("--world-size", 4, "--global_train_batch_size", 8)
    assert run_matches(lab, *names, *degrees, *sizes)["plan"]["pp_deg"] == 2


@TABLE.works("T5 in exports")
def _(lab: Lab) -> None:
    """The launch of v2.4 has T5 with both numbers of layers; a refusal names who takes it."""
    # a plan that all of them can run
    lab = exported(lab, *T5, "--pin", "pp=1,tp=1,vtp=1")
    script = lab.path("g", "train_dist_v2.4.sh").read_text(encoding="utf-8")
    for words in (
        *("--model_size t5-3B", "--set_layernum_manually 1"),
        *("--num_encoder_layers 12", "--num_decoder_layers 12"),
        *("--encoder_seq_length 512", "--decoder_seq_length 128"),
    ):
        assert f"{words} " in script
    # the newest launch has no file of the model, and asks for it
    assert not lab.path("g", "model_config.yaml").exists()
    assert "${MODEL_CONFIG:?" in lab.path("g", "launch.sh").read_text(encoding="utf-8")
    for engine in ("megatron", "torchtitan", "paddlenlp"):
        answer = lab.ask("autopar-export", "autopar_plan_s.json", "--to", engine, expected=2)
        assert "galvatron, deepspeed or accelerate" in answer.err
    for engine in ("deepspeed", "accelerate"):
        lab.ask("autopar-export", "autopar_plan_s.json", "--to", engine, "--out", "none")


@TABLE.works("gpt / llama / bert / mixtral through profiler and executor", "ranks")
def _(lab: Lab) -> None:
    heads = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128}
    bert = {"max_position_embeddings": 128, "type_vocab_size": 2}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    for kind, changes in (("gpt2", heads), ("llama", {}), ("bert", bert), ("mixtral", experts)):
        one = tiny(lab, kind=kind, **changes)
        tables = profiled(one, SPACE, "--seq", 16, "--tp", 1)
        assert tables["layertype_0_sp"]["16"]["parameter_size"] > 0.1
        words = ("--model", "tiny/config.json", "--world-size", 2, "--global-train-batch-size", 4)
        found = one.ask("profile-plan", *words, "--global_tp_deg", 2, "--json", "-").data
        assert (found["legal"], found["executor"]["runs"]) == (True, True), kind


@TABLE.works("full list of search arguments of v2.4 (arguments.py)")
def _(lab: Lab) -> None:
    switches = ("dp", "tp", "vtp", "pp", "sdp", "ckpt")
    words = [
        *("--set_model_config_manually", 1, "--set_layernum_manually", 1),
        *("--set_seqlen_manually", 1, "--vocab_size", 32000, "--min_bsz", 64, "--max_bsz", 64),
        *("--bsz_scale", 16, "--settle_bsz", -1, "--recommend_min_bsz", 0),
        *("--search_space", "full", "--sp_space", "tp+sp", "--disable_tp_consec", 1),
        *(word for name in switches for word in (f"--disable_{name}", 0)),
        *("--max_tp_deg", 8, "--max_pp_deg", 8, "--fine_grained_mode", 1),
        *("--time_profile_mode", "static", "--memory_profile_mode", "static"),
        *("--sequence_parallel", "--no_async_grad_reduce", "--num_nodes", 1),
        *("--num_gpus_per_node", 8, "--memory_constraint", 16, "--mixed_precision", "bf16"),
        *("--pipeline_type", "pipedream_flush", "--default_dp_type", "zero2", "--embed_sdp", 0),
    ]
    assert shape(lab.search(*words))["bsz"] == 64
    named = ("--model_size", "llama-7b", "--hardware", "a100-80gb:1x8", "--load_params", 1)
    named += ("--engine", "galvatron")
    off = ("--set_model_config_manually", 0, "--set_layernum_manually", 0)
    named = (*named, *off, "--num_hidden_layers", 24, "--seq_length", 8192)
    answer = lab.ask("autopar-search", *named, "--settle_bsz", 16, "--output_config_path", "none")
    assert answer.out.startswith("llama-7b (32 layers)")
    assert "--load_params is ignored: plans do not depend on it" in answer.err


@TABLE.works("v2.4 profile_memory.sh / profile_computation.sh lines verbatim", "ranks")
def _(lab: Lab) -> None:
    """As written but for the model and its length, which are small here."""
    lab = tiny(lab)
    model = [
        *("--model_size", "tiny/config.json", "--set_model_config_manually", 0),
        *("--set_layernum_manually", 0, "--vocab_size", 32000, "--hidden_size", 4096),
        *("--num_hidden_layers", 32, "--num_attention_heads", 32, "--ffn_hidden_size", 11008),
        *("--set_seqlen_manually", 1, "--seq_length", 32),
    ]
    common = [
        *("--layernum_min", 1, "--layernum_max", 2, "--mixed_precision", "fp32"),
        *("--use-flash-attn", "--use-fused-rmsnorm", "--use-fused-swiglu", "--save", "x"),
    ]
    memory = [
        *("--profile_type", SPACE, "--profile_mode", "static", "--profile_batch_size", 8),
        *("--max_tp_deg", 4, "--profile_dp_type", "zero3", "--sequence_parallel"),
    ]
    answer = lab.torch("profile-model", *model, *memory, *common, "--out", "pm")
    for option in ("--use-fused-rmsnorm", "--use-fused-swiglu"):
        assert f"{option} is ignored: kernels are those of torch" in answer.err
    tables = lab.load("pm", "memory_profiling_fp32_hidden_64_head_4.json")
    degrees = tables["layertype_0_sp"]["32"]["tp_activation_per_bsz_dict"]
    assert set(degrees) == {"1", "2", "4", "checkpoint"}
    times = [
        *("--profile_type", TIMES, "--profile_mode", "batch", "--profile_min_batch_size", 1),
        *("--profile_max_batch_size", 3, "--profile_batch_size_step", 1),
    ]
    quick = ("--device", "cpu", "--max-seconds", "0.02", "--iters", 3, "--tp", 1, "--backward", 0)
    lab.torch("profile-model", *model, *times, *common, *quick, "--out", "pm")
    found = lab.load("pm", "computation_profiling_fp32_hidden_64_head_4.json")
    assert (batches_of(found), lengths_of(found)) == ({1, 2, 3}, {32})


@TABLE.works("v2.4 train_dist.sh line verbatim")
def _(lab: Lab) -> None:
    """The line of a GLOBAL strategy; what has no part in checking it is said."""
    model = [
        *("--set_model_config_manually", 0, "--set_layernum_manually", 0, "--vocab_size", 32000),
        *("--hidden_size", 4096, "--num_hidden_layers", 32, "--num_attention_heads", 32),
        *("--set_seqlen_manually", 1, "--seq_length", 1024),
    ]
    train = [
        *("--train-iters", 25, "--lr", "1e-4", "--adam_weight_decay", 0.01, "--dropout_prob", 0.1),
        *("--check_loss", 1, "--profile", 1, "--save_profiled_memory", 0, "--eval-iters", 1),
        *("--lr-decay-style", "cosine", "--min-lr", "1.25e-7", "--lr-warmup-fraction", 0.1),
        *("--weight-decay", 0.1, "--adam-beta1", 0.9, "--adam-beta2", 0.95, "--adam-eps", "1e-5"),
        *("--init-method-std", 0.01, "--clip-grad", 1.0),
    ]
    data = [
        *("--data-path", "data/text_document", "--split", "949,50,1", "--num-workers", 0),
        *("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "tokenizer"),
        *("--vocab-file", "vocab.json", "--merge-file", "merges.txt"),
    ]
    stored = ["--load", "checkpoints", "--load_iteration", 10, "--distributed_checkpoint"]
    stored += ["--save", "checkpoints", "--save-interval", 10]
    rest = [
        *("--pp_deg", 2, "--global_tp_deg", 2, "--global_tp_consec", 1, "--sdp", 1),
        *("--global_checkpoint", 0, "--vocab_tp", 2, "--chunks", 2),
        *("--pipeline_type", "pipedream_flush", "--default_dp_type", "zero2"),
        *("--mixed_precision", "bf16", "--sequence-parallel", "--use-flash-attn"),
        *("--initialize_on_meta", 1),
    ]
    words = [*model, *train, *data, *stored, *rest]
    answer = lab.ask("profile-plan", *GLOBAL, *words, "--model_size", "llama-7b")
    assert answer.data["legal"] is True
    assert answer.data["seq_length"] == [1024]
    assert answer.data["plan"]["tp_sizes_enc"] == ",".join(["2"] * 32)
    for option in [word for word in (*data, *stored) if str(word).startswith("--")]:
        assert f"{option} is ignored: " in answer.err


LAUNCH = (
    *("--hostfile", "hostfile", "--master_addr", "$MASTER_ADDR", "--master_port", "$MASTER_PORT"),
    *("--node_rank", "$NODE_RANK", "--nccl_test_dir", "../site_package/nccl-tests"),
    *("--mpi_path", "/usr/local/mpi/", "--envs", "NCCL_IB_DISABLE=0", "NCCL_IB_HCA=mlx5_2"),
    *("--avg_or_min_or_first", "first", "--overlap_time_multiply", 4),
)
"""Arguments of profile_hardware.sh that torchrun, or nothing, has in this project."""


@TABLE.works("v2.4 profile_hardware.sh line verbatim", "ranks")
def _(lab: Lab) -> None:
    """Sizes, stages and groups are those of the line; what means nothing here is said."""
    lab = lab.fresh()
    sizes = ("--start_mb", 1, "--end_mb", 4, "--scale", 4, "--max_tp_size", 2, "--max_pp_deg", 2)
    line = ("--num_nodes", 1, "--num_gpus_per_node", 4, *sizes, *LAUNCH, "--backend", "torch")
    short = ("--max-seconds", "0.02", "--iters", 2, "--reference-size", "1M")
    done = lab.ranks(4, "profiler.hardware", *line, *short, "allreduce", "p2p", "all2all")
    for name in LAUNCH:
        if str(name).startswith("--"):
            assert f"{name} is ignored: " in done.stderr
    assert "IB_HCA" not in done.stderr
    shape_of_four = "1nodes_4gpus_per_node.json"
    assert set(lab.load("hardware", f"p2p_bandwidth_{shape_of_four}")) == {"pp_size_2"}
    assert set(lab.load("hardware", f"sp_time_{shape_of_four}")) == {
        f"{name}_{mb}MB_time"
        for name in ("allreduce_size_4", "allreduce_size_2", "all2all_size_2")
        for mb in (1, 4)
    }
    done = lab.ranks(2, "profiler.hardware", *line, "--dry-run", expected=2)
    assert "--num-nodes(1) * --num-gpus-per-node(4) = 4 != 2" in done.stderr


@TABLE.works("exported v2.4 launch of a searched plan")
def _(lab: Lab) -> None:
    """Its name of the model, and the number of layers where it is another."""
    for number, words in ((32, "--set_layernum_manually 0 "), (16, "--num_hidden_layers 16 ")):
        folder = exported(lab, *LLAMA, "--num_layers", number).path("g")
        script = (folder / "train_dist_v2.4.sh").read_text(encoding="utf-8")
        assert "--model_size llama-7b " in script
        assert words in script
        assert "--galvatron_config_path" in script


@TABLE.works("exported newest launch")
def _(lab: Lab) -> None:
    folder = exported(lab, *LLAMA, "--num_layers", 16, "--pin", "vtp=1").path("g")
    assert "num_layers: 16\n" in (folder / "model_config.yaml").read_text(encoding="utf-8")
    text = (folder / "train_dist.yaml").read_text(encoding="utf-8")
    for line in ("global_batch_size: 8\n", "vocab_tp: 1\n", "mixed_precision: bf16\n"):
        assert line in text
    bare = exported(lab, *GPT, *BASE)
    assert not bare.path("g", "model_config.yaml").exists()
    assert len(bare.load("g", "galvatron_config.json")["tp_sizes_enc"].split(",")) == LAYERS


@TABLE.works("attention/mlp profile units", "ranks")
def _(lab: Lab) -> None:
    lab = tiny(lab)
    for unit in ("attention", "mlp"):
        lab.torch(
            *("profile-model", "--model", "tiny/config.json", "--profile_type", TIMES, "--bsz", 1),
            *("--seq", 16, "--tp", 1, "--backward", 0, "--profile_unit", unit, "--out", "pm"),
            *SHORT,
        )
        name = f"computation_profiling_fp32_hidden_64_head_4_{unit}.json"
        assert lab.load("pm", name)["layertype_0_bsz1_seq16"] > 0.0

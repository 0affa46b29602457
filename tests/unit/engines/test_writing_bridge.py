"""Launches as recipes of Megatron-Bridge: every recipe that is known comes back as itself."""

from __future__ import annotations

import re
from typing import Any

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError, UnsupportedError
from autopar.price.parameters import stage_weights
from autopar.records import replace
from autopar.run.of_plan import uniform_model
from autopar.run.rules import RuleError
from autopar.run.run import Run
from autopar.run.strategy import even_chunks
from search.engines.bridge.read import run_of_settings
from search.engines.bridge.recipes import (
    Recipe,
    layout_of,
    named_recipe,
    performance_recipe,
)
from search.engines.bridge.write import settings_of
from search.engines.candidate import Candidate, TrainingSettings
from search.engines.differences import without_effect
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.huggingface.architectures import architecture_names
from search.engines.megatron.stages import pattern_of
from search.engines.space import EngineContext, run_of
from search.engines.table import engine_space, writer_of

HYBRIDS = ("nemotron_3_nano", "nemotron_3_super", "qwen3_next_80b_a3b")
"""Models with mixers other than attention."""
WRITTEN = sorted({*architecture_names()} - {"glm45_air_106b"})
"""Without GLM-4.5-Air, whose recipes split 46 layers over 4 stages, which Megatron-Core refuses."""
KNOWN = [name for name in WRITTEN if named_recipe(f"{name}_pretrain_config").model == name]
TUNED = [name for name in WRITTEN if named_recipe(f"{name}_peft_config").model == name]
FINE_TUNED = [name for name in WRITTEN if named_recipe(f"{name}_sft_config").model == name]
PERFORMANCE = [
    ("llama3_70b", "h100", "bf16", 64),
    ("llama31_405b", "gb200", "fp8_cs", 128),
    ("qwen3_30b_a3b", "gb300", "fp8_mx", 8),
    ("qwen3_235b_a22b", "h100", "fp8_cs", 256),
    ("deepseek_v3", "gb200", "fp8_mx", 256),
    ("gpt_oss_120b", "h100", "bf16", 64),
]


NULLABLE = {
    *(f"model.{name}" for name in (
        "activation_func_clamp_value", "attention_backend", "cp_comm_type", "cuda_graph_scope",
        "hierarchical_context_parallel_sizes", "microbatch_group_size_per_vp_stage",
        "moe_expert_capacity_factor", "moe_flex_dispatcher_backend", "moe_router_dtype",
        "moe_router_num_groups", "moe_router_group_topk",
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
        "moe_shared_expert_intermediate_size", "mtp_num_layers", "offload_modules",
        "pipeline_model_parallel_layout", "recompute_granularity", "recompute_method",
        "recompute_modules", "recompute_num_layers", "virtual_pipeline_model_parallel_size",
    )),
    *(f"comm_overlap.{name}" for name in ("bucket_size", "wgrad_deferral_limit")),
    "ddp.bucket_size", "dataset.hf_dataset", "dataset.hf_validation_proportion",
}  # fmt: skip
"""Keys that are `Optional` in Megatron-Core and Megatron-Bridge, or null in recipes."""


def of_recipe(recipe: Recipe, gpus: int, gpu: str) -> Run:
    """Return the run of a recipe on so many GPUs, with the layout that it chooses itself."""
    settings = {**recipe.settings}
    key = "model.pipeline_model_parallel_layout"
    pp = settings["model.pipeline_model_parallel_size"]
    chunks = settings.get("model.virtual_pipeline_model_parallel_size") or 1
    own = layout_of(recipe.model, pp, chunks, settings.get("model.mtp_num_layers") or 0)
    settings[key] = settings.get(key) or own
    read = run_of_settings(settings, world_size=gpus, environment={}, gpu=gpu, source=recipe.name)
    return read.run


def check(run: Run, model: str, kind: str = "pretrain") -> None:
    """Check that overrides of the model's recipe say a launch."""
    gpus = run.strategy.gpus
    place = ExportTarget(num_nodes=gpus // 8, gpus_per_node=8, model=model)

    found = written(run, engine="megatron-bridge", place=place)

    assert found.losses == ()
    assert without_effect(found.runs) == without_effect(run)
    script = found.files["bridge_overrides.sh"]
    assert f"--recipe {model}_{kind}_config" in script
    assert {*re.findall(r"([\w.]+)=null", script)} <= NULLABLE


@pytest.mark.parametrize("name", KNOWN)
def test_library_recipes_come_back(name: str) -> None:
    """Degrees, batch, overlaps and recomputation of a recipe, said again on top of it."""
    recipe = named_recipe(f"{name.removesuffix('_32nodes')}_pretrain_config")
    assert recipe.model is not None
    ranks = 1
    for key in ("tensor_model", "pipeline_model", "context"):
        ranks *= recipe.settings.get(f"model.{key}_parallel_size") or 1
    ranks *= recipe.settings.get("model.expert_model_parallel_size", 1)
    check(of_recipe(recipe, max(ranks, 8), "h100"), recipe.model)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_recipe_of_other_mixers_has_the_shipped_model(name: str) -> None:
    recipe = named_recipe(f"{name}_pretrain_config")
    shipped = uniform_model(load_spec(name.replace("_", "-").removesuffix("-a3b")))
    own = of_recipe(recipe, 64, "h100").model
    assert [one.mixers for one in own.each_layer] == [one.mixers for one in shipped.each_layer]
    assert [one.mlp for one in own.each_layer] == [one.mlp for one in shipped.each_layer]
    assert (own.vocab, own.hidden, own.tied) == (shipped.vocab, shipped.hidden, shipped.tied)


@pytest.mark.parametrize(
    ("name", "gpus", "gpu"),
    [("pretrain_8gpu_gb200_bf16", 8, "gb200"), ("pretrain_16gpu_h100_bf16", 16, "h100-80gb"),
     ("pretrain", 16, "h100-80gb"), ("sft", 8, "h100-80gb"), ("peft", 8, "h100-80gb")],
)  # fmt: skip
def test_lightning_is_nemotron_3_nano_with_mtp(name: str, gpus: int, gpu: str) -> None:
    """Two MTP layers of attention and experts that share their weights; sizes are those of Nano."""
    run = of_recipe(named_recipe(f"nemotron_3_5_lightning_{name}_config"), gpus, gpu)
    nano = uniform_model(load_spec("nemotron-3-nano"))
    assert (
        run.model.each_layer
        == of_recipe(named_recipe("nemotron_3_nano_pretrain_config"), 8, gpu).model.each_layer
    )
    assert (run.model.vocab, run.model.mtp, run.model.mtp_shared) == (nano.vocab, 2, True)
    assert [one.mlp is None for one in run.model.each_mtp] == [True, False]


def of_search(
    name: str, *, lora: int | None = None, sft: bool = False, pp: int = 1, vpp: int = 1, **more: Any
) -> Run:
    """Return a run of Megatron-LM with a shipped model, as a search makes it."""
    model = uniform_model(load_spec(name))
    job = EngineContext(
        name=name, model=model, seq=4096, global_batches=(64,), world=16, gpu="h100-80gb",
        domain=8, training=TrainingSettings(lora_rank=lora, sft=sft),
    )  # fmt: skip
    chunks = even_chunks(model.num_layers, pp, vpp, mtp=model.mtp)
    choice = Candidate(
        global_batch=64, micro_batch=1, zero=1, ep=1 if model.experts is None else 8,
        dispatcher="flex", pp=pp, vpp=vpp, chunks=chunks,
        schedule="interleaved" if vpp > 1 else "1f1b", **more,
    )  # fmt: skip
    return run_of(engine_space("megatron"), job, choice)


def test_adapters_of_a_hybrid_are_those_of_its_recipe() -> None:
    """Ranks of 32 in both matrices of a mixer; local experts share theirs (`peft/lora.py`)."""
    run = of_search("nemotron-3-nano", lora=32)
    weights = stage_weights(run, 0)[0]
    trained = {one.name: one for one in weights if one.trained}
    hidden, inner, projected = 2688, 64 * 64, 2 * 64 * 64 + 2 * 8 * 128 + 64
    own = {name: trained[f"mixer {name} adapter A"].elements
           + trained[f"mixer {name} adapter B"].elements for name in ("in", "out")}  # fmt: skip
    assert own == {"in": 32 * (hidden + projected), "out": 32 * (inner + hidden)}
    attention = (hidden + 32 * 128 + 2 * 2 * 128) + (32 * 128 + hidden)
    mixture = 2 * (hidden + 3712) + 2 * (hidden + 1856)
    mixer = (hidden + projected) + (inner + hidden)
    total = 32 * (23 * mixer + 6 * attention + 23 * mixture)
    assert sum(one.elements for one in weights if one.trained) == total
    check(run, "nemotron_3_nano", "peft")
    read = of_recipe(named_recipe("nemotron_3_nano_peft_config"), 16, "h100-80gb")
    assert read.runtime.adapters == run.runtime.adapters


def test_stages_of_a_hybrid_are_in_its_pattern() -> None:
    run = of_search("nemotron-3-nano", pp=2)
    place = ExportTarget(num_nodes=2, gpus_per_node=8, model="nemotron-3-nano")
    found = written(run, engine="megatron-bridge", place=place)
    assert found.losses == ()
    # the default of Megatron-Core, which is not that of `comm_overlap`
    assert "comm_overlap.bucket_size=40000000" in found.files["bridge_overrides.sh"]
    text = found.files["bridge_overrides.sh"]
    assert f'"model.hybrid_layer_pattern={pattern_of(run)}"' in text
    assert str(pattern_of(run)).count("|") == 1
    with pytest.raises(InputError, match=r"no model chunks .*vpp\(2\)"):
        written(of_search("nemotron-3-nano", pp=2, vpp=2), engine="megatron-bridge", place=place)


def test_a_hybrid_without_a_recipe_changes_that_of_nemotron() -> None:
    run = of_search("granite-4-small", pp=2)
    spec = load_spec("granite-4-small")
    place = ExportTarget(num_nodes=2, gpus_per_node=8, model="granite-4-small", spec=spec)
    found = written(run, engine="megatron-bridge", place=place)
    assert found.losses == ()
    assert "--recipe nemotron_3_nano_pretrain_config" in found.files["bridge_overrides.sh"]
    assert any("model.moe_router_*" in note for note in found.notes)
    tuned = replace(run, runtime=replace(run.runtime, sft=True))
    with pytest.raises(UnsupportedError, match="no SFT recipe for granite-4-small"):
        written(tuned, engine="megatron-bridge", place=place)


def place_of(name: str) -> ExportTarget:
    return ExportTarget(num_nodes=2, gpus_per_node=8, model=name, spec=load_spec(name))


@pytest.mark.parametrize("name", ["qwen3-next-80b", "glm-4.5-air"])
def test_a_recipe_keeps_the_positions_of_its_model(name: str) -> None:
    """`partial_rotary_factor` is `rotary_percent` of the provider (`model_bridge.py`)."""
    run = of_search(name)
    before = replace(run, model=uniform_model(replace(load_spec(name), rotary_share=1.0)))
    for one in (run, before):  # plan files of earlier releases lack the fraction
        found = written(one, engine="megatron-bridge", place=place_of(name))
        text = found.files["bridge_overrides.sh"]
        assert "rotary" not in text
        assert "ROTARY" not in text
        assert found.losses == ()
        share = load_spec(name).rotary_share
        assert found.runs.model.attention.rotary_share == share


def test_a_recipe_of_another_model_gets_positions_and_router() -> None:
    run = of_search("glm-4.5-air")
    uneven = replace(run, model=replace(run.model, vocab=151000))
    found = written(uneven, engine="megatron-bridge", place=place_of("glm-4.5-air"))
    text = found.files["bridge_overrides.sh"]
    assert "--recipe vanilla_gpt_pretrain_config" in text
    for setting in (
        "rotary_base=1000000", "rotary_percent=0.5", "moe_router_score_function=sigmoid",
        "moe_router_enable_expert_bias=true", "moe_router_topk_scaling_factor=1.0",
        "moe_router_load_balancing_type=seq_aux_loss",
    ):  # fmt: skip
        assert f'"model.{setting}"' in text
    other = place_of("glm-4.5-air")
    spec = replace(load_spec("glm-4.5-air"), rotary_base=None)
    found = written(uneven, engine="megatron-bridge", place=replace(other, model="x", spec=spec))
    text = found.files["bridge_overrides.sh"]
    assert "--recipe vanilla_gpt_pretrain_config" in text
    assert "model.rotary_percent=0.5" in text
    assert "model.rotary_base=${ROTARY_BASE:?" in text
    assert any("ROTARY_BASE" in note for note in found.notes)
    found = written(of_search("qwen3-30b-a3b"), engine="megatron-bridge",
                    place=replace(place_of("qwen3-30b-a3b"), model="other"))  # fmt: skip
    assert "rotary" not in found.files["bridge_overrides.sh"]


def test_an_overlap_of_experts_ends_that_of_the_shared_expert() -> None:
    """The recipe of Kimi K2 sets the other, which `TransformerConfig` refuses with it."""
    recipe = named_recipe("kimi_k2_pretrain_config")
    assert recipe.settings["model.moe_shared_expert_overlap"] is True
    run = of_search("kimi-k2", overlap_experts=True)
    found = written(run, engine="megatron-bridge", place=place_of("kimi-k2"))
    assert "model.moe_shared_expert_overlap=false" in found.files["bridge_overrides.sh"]
    assert found.runs.runtime.overlap.experts


@pytest.mark.parametrize("name", ["llama3-8b", "llama3-70b", "qwen3-32b", "phi-4"])
def test_plans_with_overlapped_tensor_communication_are_exact(name: str) -> None:
    """With a `comm_overlap` section of the recipe and without, and with its own buckets."""
    run = of_search(name, tp=2, tp_overlap=True)
    assert run.runtime.overlap.tensor
    assert run.runtime.states.bucket is None
    found = written(run, engine="megatron-bridge", place=place_of(name))
    assert found.losses == ()
    text = found.files["bridge_overrides.sh"]
    sections = [key for key in ("comm_overlap", "model") if f'"{key}.tp_comm_overlap=true"' in text]
    assert len(sections) == 1


def test_stages_of_a_recipe_do_not_stay() -> None:
    """Layers of its first and last stage are for its own number of stages."""
    recipe = replace(named_recipe("llama3_70b_pretrain_config"))
    uneven = {"model.num_layers_in_first_pipeline_stage": 14, "dist.use_megatron_fsdp": True}
    recipe = replace(recipe, settings={**recipe.settings, **uneven})
    run = of_recipe(named_recipe("llama3_8b_pretrain_config"), 8, "h100")
    settings = settings_of(run, recipe)
    assert [settings[key] for key in uneven] == [None, None]


def test_glm_air_has_a_recipe() -> None:
    found = written(of_search("glm-4.5-air"), engine="megatron-bridge",
                    place=place_of("glm-4.5-air"))  # fmt: skip
    assert "--recipe glm45_air_106b_pretrain_config" in found.files["bridge_overrides.sh"]
    assert not any("no recipe" in note for note in found.notes)
    assert named_recipe("glm45_air_106b_pretrain_config").model == "glm45_air_106b"


def test_gated_delta_nets_need_a_recipe() -> None:
    run = of_search("qwen3-next-80b")
    other = replace(run, model=replace(run.model, vocab=1000))
    place = ExportTarget(num_nodes=2, gpus_per_node=8, model="other")
    with pytest.raises(UnsupportedError, match="no recipe for other"):
        written(other, engine="megatron-bridge", place=place)


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"lora": 32, "pp": 2, "vpp": 2}, "megatron.hybrid.chunks"),
        ({"sft": True, "pp": 2, "vpp": 2}, "megatron.hybrid.chunks"),
        ({"overlap_experts": True}, "megatron.moe-overlap.hybrid"),
    ],
)
def test_plans_that_no_hybrid_runs_are_not_searched(more: dict[str, Any], rule: str) -> None:
    with pytest.raises(RuleError) as caught:
        of_search("nemotron-3-nano", **more)
    assert caught.value.ids == (rule,)


def test_graphs_are_switched_off_by_name() -> None:
    """`TransformerConfig.__post_init__` asserts an implementation, which null is not."""
    recipe = named_recipe("llama3_8b_peft_config")
    run = of_recipe(recipe, 8, "H100")
    place = ExportTarget(num_nodes=1, gpus_per_node=8, model="llama3-8b")
    found = written(run, engine="megatron-bridge", place=place)
    assert '"model.cuda_graph_impl=none"' in found.files["bridge_overrides.sh"]
    assert found.runs.kernels.graphs == "none"


@pytest.mark.parametrize(("model", "gpu", "precision", "gpus"), PERFORMANCE)
def test_performance_recipes_come_back(model: str, gpu: str, precision: str, gpus: int) -> None:
    """The presets of NVIDIA's tables become overrides of the library's recipe."""
    check(of_recipe(performance_recipe(model, gpu, precision, None), gpus, gpu), model)


@pytest.mark.parametrize("name", TUNED)
def test_recipes_for_adapters_come_back(name: str) -> None:
    """Rank, modules and samples as well, which other recipes do not have."""
    recipe = named_recipe(f"{name}_peft_config")
    ranks = 1
    for key in ("tensor_model", "pipeline_model"):
        ranks *= recipe.settings[f"model.{key}_parallel_size"]
    run = of_recipe(recipe, max(ranks, 8), "H100")
    adapters = run.runtime.adapters
    assert adapters is not None
    assert adapters.rank == recipe.settings["peft.dim"]
    check(run, name, "peft")


@pytest.mark.parametrize("name", FINE_TUNED)
def test_recipes_of_fine_tuning_come_back(name: str) -> None:
    """All weights on unpacked samples, from a checkpoint that the user names."""
    recipe = named_recipe(f"{name}_sft_config")
    ranks = 1
    for key in ("tensor_model", "pipeline_model", "context", "expert_model"):
        ranks *= recipe.settings.get(f"model.{key}_parallel_size") or 1
    run = of_recipe(recipe, max(ranks, 8), "H100")
    assert (run.runtime.adapters, run.runtime.sft) == (None, True)
    assert run.runtime.fine_tunes
    check(run, name, "sft")
    gpus = run.strategy.gpus
    place = ExportTarget(num_nodes=gpus // 8, gpus_per_node=8, model=name)
    # Megatron-LM has no script of fine-tuning, so its files are those of Megatron-Bridge
    script = written(run, engine=writer_of("megatron", run), place=place).files
    assert "--mode sft" in script["bridge_overrides.sh"]
    assert "checkpoint.pretrained_checkpoint=${LOAD:?" in script["bridge_overrides.sh"]


def test_a_model_without_a_recipe_of_fine_tuning_is_refused() -> None:
    run = of_recipe(named_recipe("llama3_8b_sft_config"), 8, "H100")
    other = replace(run, model=replace(run.model, vocab=1000))
    place = ExportTarget(num_nodes=1, gpus_per_node=8, model="other")
    with pytest.raises(UnsupportedError, match="no SFT recipe for other"):
        written(other, engine="megatron-bridge", place=place)

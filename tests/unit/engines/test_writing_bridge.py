"""Launches as recipes of Megatron-Bridge: every recipe that is known comes back as itself."""

from __future__ import annotations

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import UnsupportedError
from autopar.records import replace
from autopar.run.of_plan import uniform_model
from autopar.run.run import Run
from search.engines.bridge.read import run_of_settings
from search.engines.bridge.recipes import (
    Recipe,
    layout_of,
    named_recipe,
    performance_recipe,
)
from search.engines.differences import without_effect
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.huggingface.architectures import architecture_names
from search.engines.table import writer_of

UNWRITTEN = ("nemotron_3_nano", "nemotron_3_super", "qwen3_next_80b_a3b")
"""Models with layers that no file is written for."""
WRITTEN = sorted({*architecture_names()} - {*UNWRITTEN})
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
    assert f"--recipe {model}_{kind}_config" in found.files["bridge_overrides.sh"]


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


@pytest.mark.parametrize("name", UNWRITTEN)
def test_a_recipe_of_other_mixers_is_read_and_not_written(name: str) -> None:
    """Its model is that of the shipped spec, and an export for Bridge says what it lacks."""
    recipe = named_recipe(f"{name}_pretrain_config")
    shipped = uniform_model(load_spec(name.replace("_", "-").removesuffix("-a3b")))
    run = of_recipe(recipe, 64, "h100")
    own = run.model
    assert [one.mixers for one in own.each_layer] == [one.mixers for one in shipped.each_layer]
    assert [one.mlp for one in own.each_layer] == [one.mlp for one in shipped.each_layer]
    assert (own.vocab, own.hidden, own.tied) == (shipped.vocab, shipped.hidden, shipped.tied)
    place = ExportTarget(num_nodes=8, gpus_per_node=8)
    with pytest.raises(UnsupportedError, match="no file of Megatron-Bridge is written"):
        written(run, engine="megatron-bridge", place=place)


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

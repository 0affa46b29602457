"""Releases of torchtitan that runs are written for, and the modules of adapters."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.errors import UnsupportedError
from autopar.price.parameters import layer_weights
from autopar.records import replace
from autopar.run.run import Run
from autopar.training.adapters import DENSE_TARGETS, Adapters
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.huggingface.models import FLAVOURS, flavour
from search.engines.torchtitan.flavours import (
    JOB_FILES,
    RECIPES,
    adapted_modules,
    flavour_of,
    has_flavour,
    linear_modules,
    needs_recipe,
)
from search.engines.torchtitan.recipe import FILE
from tests.unit.engines.test_writing import NODE, searched, told


def with_adapters(run: Run, **more: Any) -> Run:
    """Return a run in bf16 with adapters of its attention."""
    targets = frozenset({"query", "key", "value", "projection"})
    adapters = Adapters(**{"rank": 8, "targets": targets, "fused": "qkv", **more})
    run = told(run, optimizer={"master_bytes": 0, "moments_bytes": 4})
    return replace(run, runtime=replace(run.runtime, adapters=adapters))


@pytest.mark.parametrize(
    ("name", "releases"),
    [
        ("llama3 1B", {RECIPES}),
        ("gpt_oss 20b", {RECIPES}),
        ("llama4 17bx16e", {JOB_FILES}),
        ("llama3 8B", {JOB_FILES, RECIPES}),
        ("qwen3 30B-A3B", {JOB_FILES, RECIPES}),
    ],
)
def test_models_of_releases(name: str, releases: set[str]) -> None:
    family, size = name.split()
    model = flavour(family, size)
    assert model is not None
    found = {release for release in (JOB_FILES, RECIPES) if has_flavour(model, release)}
    assert found == releases
    assert all(flavour_of(model, release) == (family, size) for release in found)
    assert needs_recipe(model, 0) is (JOB_FILES not in releases)
    assert needs_recipe(model, 8)


def test_a_model_without_a_flavour_is_compared_with_the_closest() -> None:
    """DeepSeek-V3 is published with an MTP layer, which torchtitan's 671B does not have."""
    model = flavour("deepseek_v3", "671B")
    assert model is not None
    with pytest.raises(UnsupportedError, match=r"deepseek_v3 671B .*: MTP layers$"):
        flavour_of(replace(model, mtp=1), JOB_FILES)


@pytest.mark.parametrize(
    ("name", "modules", "adapted"),
    [
        ("llama3 8B", "wqkv wo w1 w2 w3 lm_head", "wqkv wo w1 w3 w2"),
        ("qwen3 30B-A3B", "wqkv wo gate lm_head", "wqkv wo"),
        ("gpt_oss 20b", "wqkv wo gate lm_head", "wqkv wo"),
        # those of shared experts and of the first layer; `wkv_a` cannot have adapters
        ("deepseek_v3 16B", "wq wkv_a wkv_b wo w1 w2 w3 gate lm_head", ""),
        ("deepseek_v3 671B", "wq_a wq_b wkv_a wkv_b wo w1 w2 w3 gate lm_head", ""),
    ],
)
def test_modules_of_models(name: str, modules: str, adapted: str) -> None:
    """Sources: `models/*/__init__.py` of 0.3.0; the slow test compares all flavors with it."""
    family, size = name.split()
    model = flavour(family, size)
    assert model is not None
    assert linear_modules(model) == {*modules.split()}
    assert adapted_modules(model, frozenset(DENSE_TARGETS)) == tuple(adapted.split())
    assert {*FLAVOURS[family]} >= {size}


@pytest.mark.parametrize(
    ("run", "release"),
    [
        (searched("torchtitan", tp=2, pp=2, zero=3), RECIPES),
        (searched("torchtitan", recompute="op"), RECIPES),
        (searched("torchtitan", "qwen3-30b-a3b", ep=8), RECIPES),
        (searched("torchtitan", "gpt-oss-20b", ep=8), RECIPES),
        (searched("torchtitan", zero=0), JOB_FILES),
        (searched("torchtitan", precision="fp8"), JOB_FILES),
        (told(searched("torchtitan", tp=2), kernels={"loss_parallel": False}), JOB_FILES),
        (searched("torchtitan", "qwen3-30b-a3b", tp=2, ep=4, etp=2), JOB_FILES),
        (with_adapters(searched("torchtitan")), RECIPES),
    ],
)
def test_the_newest_release_that_describes_a_run_is_used(run: Run, release: str) -> None:
    found = written(run, engine="torchtitan", place=NODE)
    assert found.engine_version == release
    assert found.losses == ()


def test_converters_of_adapters_are_last() -> None:
    """The order of `validate_converter_order`; base weights are required, too."""
    run = with_adapters(searched("torchtitan"))
    run = told(run, precision={"fp8": True, "fp8_recipe": "mxfp8"})
    found = written(run, engine="torchtitan", place=NODE)
    text = found.files[FILE]
    assert text.index("MXFP8LinearConverter.Config(") < text.index("LoRAConverter.Config(")
    assert 'target_modules=["wqkv", "wo"]' in text
    assert 'LOAD="${LOAD:?' in found.launch
    assert found.runs.runtime.adapters == run.runtime.adapters


@pytest.mark.parametrize(
    "more",
    [
        {"targets": frozenset({"query", "value"})},
        {"targets": frozenset({"expert_fc1"})},
        {"dropout": 0.1},
        {"base": "nf4"},
        {"fused": True, "targets": frozenset(DENSE_TARGETS)},
        {"fused": False},
    ],
)
def test_adapters_that_names_cannot_describe_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="wqkv"):
        written(with_adapters(searched("torchtitan"), **more), engine="torchtitan", place=NODE)


def test_a_run_that_no_release_describes_is_refused() -> None:
    run = told(searched("torchtitan", "gpt-oss-20b", ep=8), states={"gathered_fp8": True})
    with pytest.raises(UnsupportedError, match="weights gathered in fp8"):
        written(run, engine="torchtitan", place=ExportTarget(num_nodes=1, gpus_per_node=8))


def test_tensor_ranks_keep_one_side_of_adapters_whole() -> None:
    """`_lora_adapter_sharding`: A of a split output, and B of a split input."""
    run = with_adapters(searched("torchtitan", tp=2))
    shapes = {weight.name: weight.shape for weight in layer_weights(run.rank_layers[0])}
    hidden, rows = 4096, (32 + 8 + 8) * 128
    assert shapes["qkv adapter A"] == (8, hidden)
    assert shapes["qkv adapter B"] == (rows // 2, 8)
    assert shapes["proj adapter A"] == (8, hidden // 2)
    assert shapes["proj adapter B"] == (hidden, 8)

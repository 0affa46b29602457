"""Layers with heads of two widths, as in Gemma 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.documents.spec import load_spec
from autopar.price.job import job_of_run
from autopar.price.parameters import stage_weights
from autopar.price.torch_layers import loss_bytes, parts_without_recompute
from autopar.rates.card import load_card
from autopar.rates.kernels import WIDE, efficient_attention_s
from autopar.rates.parts.operations import machine_of
from autopar.rates.stack import load_stack
from autopar.records import replace
from autopar.run.model import model_parameter_count
from autopar.run.of_plan import uniform_model
from autopar.run.run import Run
from autopar.run.strategy import even_chunks
from search.engines.candidate import Candidate, Constraints, TrainingSettings
from search.engines.exporter_types import ExportTarget
from search.engines.files import written
from search.engines.space import EngineContext, run_of
from search.engines.table import engine_space
from search.planning.uniform.infeasibility import violated_rule

TOKENS = 4096


def context(name: str, **more: Any) -> EngineContext:
    own = uniform_model(load_spec(name))
    values: dict[str, Any] = {"name": name, "seq": TOKENS, "global_batches": (64,), "world": 8}
    return EngineContext(model=own, gpu="h200", domain=8, **{**values, **more})


def run_in(engine: str, name: str, **more: Any) -> Run:
    job = context(name, **more)
    choice = Candidate(
        global_batch=64, micro_batch=1, zero=3, chunks=even_chunks(job.model.num_layers, 1)
    )
    return run_of(engine_space(engine), job, choice)


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-26b-a4b"])
@pytest.mark.parametrize("engine", ["deepspeed", "accelerate"])
def test_an_export_names_the_model_and_its_attention(engine: str, name: str) -> None:
    run = run_in(engine, name)
    weights = sum(one.elements for one in stage_weights(run, 0)[0])
    assert weights == model_parameter_count(load_spec(name))
    place = ExportTarget(num_nodes=1, gpus_per_node=8, model=name, spec=load_spec(name))
    found = written(run, engine=engine, place=place)
    assert found.losses == ()
    assert "--attn_implementation sdpa" in found.launch


@pytest.mark.parametrize(
    ("engine", "name", "degrees", "rule"),
    [
        ("megatron", "gemma-4-31b", {}, "torch-mixers.engine"),
        ("torchtitan", "gemma-4-31b", {}, "torchtitan.flavour"),
        ("deepspeed", "gemma-4-31b", {"tp": (4,)}, "torch-mixers.tensor"),
        ("accelerate", "gemma-4-26b-a4b", {"cp": (2,)}, "torch-mixers.context"),
        ("accelerate", "gemma-4-e4b", {}, "layer-inputs"),
        ("megatron", "gemma-4-e4b", {}, "layer-inputs"),
    ],
)
def test_what_is_not_priced_is_refused(
    engine: str, name: str, degrees: dict[str, Any], rule: str
) -> None:
    found = violated_rule(engine_space(engine), context(name), Constraints(**degrees))
    assert found is not None
    assert found.id == rule


def test_heads_differ_between_layers_with_and_without_a_window() -> None:
    """A layer without a window has one projection for keys and values, and wider heads."""
    run = run_in("deepspeed", "gemma-4-31b")
    narrow, wide = (dict(parts_without_recompute(run.rank_layers[at])) for at in (0, 5))
    assert wide["query"] == 2 * narrow["query"]
    # keys and values are repeated for each head
    assert wide["key"] == wide["value"] == wide["query"]
    assert narrow["mask"] == TOKENS * TOKENS * 2
    assert "mask" not in wide
    sizes = {one.name: one.shape for one in stage_weights(run, 0)[0] if one.name == "qkv"}
    assert sizes["qkv"] == ((32 + 4) * 512, 5376)


def test_attention_of_wide_heads_has_the_published_time() -> None:
    """72 ms, forward and backward, of a layer with a window of Gemma 4 26B at 8,192 tokens.

    Source: verl-project/verl#7131, on an H200.
    """
    kernels = machine_of(load_card("h200"), load_stack("torchtitan-eager")).kernels
    found = sum(
        efficient_attention_s(kernels, 16, 8192, head_dim=256, phase=phase, causal=False)
        for phase in ("forward", "backward")
    )
    assert found == pytest.approx(0.072, rel=0.05)
    assert job_of_run(run_in("deepspeed", "gemma-4-31b")).attention_kernel == WIDE
    assert job_of_run(run_in("deepspeed", "gemma-3-27b")).attention_kernel is None


def test_capped_logits_are_held_once_more() -> None:
    run = run_in("deepspeed", "gemma-4-31b")
    plain = replace(run, model=replace(run.model, capped_logits=False))
    assert loss_bytes(run) - loss_bytes(plain) == TOKENS * 262144 * 2


def test_adapters_are_those_of_peft() -> None:
    """Trainable parameters of PEFT 0.21.2 with `all-linear`, for two layers of Gemma 4 31B.

    The full-attention layer has no projection of values.
    """
    run = run_in("deepspeed", "gemma-4-31b", training=TrainingSettings(lora_rank=16))
    hidden, ffn, rank = 5376, 21504, 16
    mlp = 3 * (hidden + ffn)
    narrow = hidden + 32 * 256 + 2 * (hidden + 16 * 256) + 32 * 256 + hidden
    wide = hidden + 32 * 512 + hidden + 4 * 512 + 32 * 512 + hidden
    trained = sum(one.elements for one in stage_weights(run, 0)[0] if one.trained)
    assert trained == rank * (50 * (narrow + mlp) + 10 * (wide + mlp))


def test_a_script_with_flash_attention_is_refused(tmp_path: Path) -> None:
    """Its kernels have heads of at most 256 elements."""
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 3},
    }))  # fmt: skip
    words = (
        f"deepspeed train.py --deepspeed {config} --model_name_or_path google/gemma-4-31B "
        "--block_size 4096 --bf16 --optim adamw_torch"
    )
    script = tmp_path / "run.sh"
    for kernel, problems in (("sdpa", []), ("flash_attention_2", ["read.key"])):
        script.write_text(f"{words} --attn_implementation {kernel}\n")
        found = autopar.check(str(script), hardware="h200:1x8")
        assert [one["id"] for one in found["launches"][0]["findings"]] == problems

"""torchtitan's recipe: its keys follow the plan, and what it cannot say is a loss."""

from __future__ import annotations

import ast

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, VocabStrategy
from search.engines.engine import Lowered
from search.engines.torchtitan.plan import lower
from tests.often import often
from tests.unit.export_plans import (
    SMALL,
    check_lowered,
    job_of,
    jobs,
    lowered_or_refused,
    uniform_plan,
)


def keys(lowered: Lowered) -> dict[str, object]:
    """Return the keyword arguments of the recipe's calls and its constants; names as their text."""
    found: dict[str, object] = {}
    for node in ast.walk(ast.parse(lowered.files["autopar_recipe.py"])):
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(k.arg, k.value) for k in node.keywords if k.arg]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            pairs = [(node.targets[0].id, node.value)]
        for key, value in pairs:
            try:
                found[key] = ast.literal_eval(value)
            except ValueError:
                found[key] = ast.unparse(value)
    return found


@often(40, 150, jobs())
def test_lowered_plans_are_legal_and_every_change_is_a_loss(job):
    """The recipe's degrees are those of the plan that the exporter says it makes."""
    lowered = lowered_or_refused(lower, job)
    if lowered is None:
        return

    check_lowered(lower, job, lowered)
    near, found = lowered.plan, keys(lowered)
    layer, dp = near.layers[0], near.data_degree(0)
    assert found["tensor_parallel_degree"] == layer.tp
    assert found["context_parallel_degree"] == layer.cp
    assert found["pipeline_parallel_degree"] == near.num_stages
    replicate = found["data_parallel_replicate_degree"]
    assert replicate * found["data_parallel_shard_degree"] == dp
    assert not any(s.ulysses and s.tp > 1 for s in near.layers)
    steps = 1 if near.num_stages > 1 else near.num_microbatches
    assert found["local_batch_size"] * dp * steps == near.global_batch
    if near.num_stages > 1:
        micro = found["pipeline_parallel_microbatch_size"]
        assert micro * near.num_microbatches == found["local_batch_size"]
        assert found["STAGE_SIZES"] == list(near.stage_sizes)


@pytest.mark.parametrize(
    ("layer", "default", "replicate", "reshard"),
    [
        (LayerStrategy(), "ddp", 4, "never"),
        (LayerStrategy(), "zero2", 1, "never"),
        (LayerStrategy(zero3=True), "ddp", 1, "always"),
    ],
)
def test_data_parallelism(layer, default, replicate, reshard):
    """Replicas, sharded gradients and sharded parameters are told apart by two keys."""
    lowered = lower(job_of(uniform_plan(4, layer, default_dp_type=default)))

    found = keys(lowered)
    assert lowered.losses == ()
    assert found["data_parallel_replicate_degree"] == replicate
    assert found["fsdp_reshard_after_forward"] == reshard


@pytest.mark.parametrize(
    ("checkpointed", "policy"),
    [((), None), (range(5), "FullAC.Config()"), ((0, 3), "LayersAC.Config()")],
)
def test_checkpoints_per_layer(checkpointed, policy):
    """No layer, all layers and some layers are three policies, none of them a loss."""
    plan = uniform_plan(2, LayerStrategy())
    layers = tuple(LayerStrategy(checkpoint=i in checkpointed) for i in range(5))
    lowered = lower(job_of(replace(plan, layers=layers)))

    found = keys(lowered)
    assert lowered.losses == ()
    assert found["activation_checkpoint"] == policy
    assert found.get("CHECKPOINTED") == (set(checkpointed) if len(checkpointed) == 2 else None)


def test_several_degrees_take_the_largest_or_the_one_asked_for():
    """Every loss names its layers and what is taken instead."""
    layers = (LayerStrategy(tp=2, zero3=True),) * 2 + (LayerStrategy(tp=6),) * 3
    plan = uniform_plan(12, LayerStrategy(tp=2), layers=5)
    job = job_of(replace(plan, layers=layers))

    largest, asked = lower(job), lower(replace(job, tensor_degree=2))
    assert {s.tp for s in largest.plan.layers} == {6}
    assert all(s.zero3 for s in largest.plan.layers)
    assert {s.tp for s in asked.plan.layers} == {2}
    texts = {loss.field: loss.what for loss in largest.losses}
    assert texts["tp_sizes_enc"] == (
        "the plan has degree 2 (layers 0-1), degree 6 (layers 2-4); torchtitan 0.3.0 has one "
        "tensor degree for all layers, so it takes degree 6"
    )
    assert texts["vtp"].endswith("so it takes degree 6 for embedding and head")
    assert [loss.field for loss in asked.losses] == ["tp_sizes_enc", "dp_types_enc", "embed_sdp"]
    with pytest.raises(InputError, match=r"of tp 5: kv_heads"):
        lower(replace(job, tensor_degree=5))


def test_a_degree_above_the_kv_heads_is_lowered():
    """12 heads and 6 key-value heads: tp 12 is legal for us, not for torchtitan."""
    lowered = lower(job_of(uniform_plan(12, LayerStrategy(tp=12))))

    assert lowered.plan.layers[0].tp == 6
    assert "(kv_heads(6) % tp(12) = 6 != 0)" in lowered.losses[0].what


def test_fp16_becomes_bf16_and_fp32_stays():
    """Of the three precisions torchtitan has two."""
    job = job_of(uniform_plan(2, LayerStrategy()))

    half = lower(replace(job, precision="fp16"))
    assert [loss.field for loss in half.losses] == ["mixed_precision"]
    assert keys(half)["mixed_precision_param"] == "bfloat16"
    whole = lower(replace(job, precision="fp32"))
    assert keys(whole)["mixed_precision_param"] == "float32"


@pytest.mark.parametrize(
    ("name", "theta", "factor"),
    [
        ("llama2-7b", 10000.0, None),
        ("llama3-8b", 500000.0, None),
        ("llama3-70b", 500000.0, None),
        ("llama3-405b", 500000.0, 8.0),
        ("mistral-7b", 10000.0, None),
    ],
)
def test_rotary_positions_are_the_models_own(name, theta, factor):
    """torchtitan's 8B and 70B are Llama 3.1, with scaled frequencies: none of them is named."""
    spec = load_spec(name)
    plan = uniform_plan(8, LayerStrategy(tp=8), layers=spec.num_layers)

    found = keys(lower(job_of(plan, spec)))
    assert (found["ROPE_THETA"], found.get("scaling_factor")) == (theta, factor)
    assert found.get("scaling") == (None if factor is None else "llama")
    assert found["model"] == "model"


def test_an_unknown_rotary_base_is_asked_for():
    """The launch and the recipe both end without it; no default stands in."""
    lowered = lower(job_of(uniform_plan(2, LayerStrategy())))

    recipe = lowered.files["autopar_recipe.py"]
    assert 'if "ROTARY_BASE" not in environ:' in recipe
    assert 'raise ValueError("set ROTARY_BASE to the base' in recipe
    assert keys(lowered)["ROPE_THETA"] == "float(environ['ROTARY_BASE'])"
    assert 'ROTARY_BASE="${ROTARY_BASE:?set ROTARY_BASE to' in lowered.launch
    known = replace(SMALL, rotary_base=10000.0)
    assert "ROTARY_BASE" not in lower(job_of(lowered.plan, known)).launch


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("t5-3b", "2 layer types"),
        ("gpt2-xl", "biases"),
        ("mixtral-8x7b", "experts"),
        ("qwen2.5-7b", "biases of the QKV projection"),
        ("bert-large", "attention that is not causal"),
    ],
)
def test_models_that_torchtitan_lacks_are_refused(name, what):
    """The refusal says what of the model stands in the way."""
    spec = load_spec(name)
    plan = uniform_plan(2, LayerStrategy(), layers=spec.num_layers)

    with pytest.raises(InputError, match=f"has no model like {name}, which has .*{what}"):
        lower(job_of(plan, spec))


def test_tied_embeddings_have_no_pipeline():
    """Tied tables are written down, and refused with stages, which is torchtitan's own rule."""
    tied = replace(SMALL, tied_embeddings=True)
    plan = uniform_plan(2, LayerStrategy())

    assert keys(lower(job_of(plan, tied)))["enable_weight_tying"] is True
    staged = replace(plan, num_stages=2, stage_sizes=(2, 3))
    with pytest.raises(InputError, match="no pipeline for models with tied embeddings"):
        lower(job_of(staged, tied))


def test_names_cannot_break_the_recipe():
    """Model names come from users; the file stays Python."""
    spec = replace(SMALL, name='a"b\n"""\\c')

    lowered = lower(job_of(uniform_plan(2, LayerStrategy()), spec))
    assert keys(lowered)["flavor"] == "a_b_____c"


def test_context_groups_shard_what_ddp_would_keep_whole():
    """torchtitan's FSDP covers the context ranks, so replicas become ZeRO-2."""
    lowered = lower(job_of(uniform_plan(4, LayerStrategy(cp=2), VocabStrategy(cp=2))))

    assert [loss.field for loss in lowered.losses] == ["default_dp_type"]
    assert keys(lowered)["context_parallel_degree"] == 2

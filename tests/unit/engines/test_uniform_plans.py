"""Plans of accelerate, DeepSpeed and torchtitan: the launch that a plan becomes, and its losses.

That files describe a launch is `tests/property/test_written_launches`; here each drawn plan is read
back too (`check_lowered`).
"""

from __future__ import annotations

import ast
from typing import Any, get_args

import pytest
from hypothesis import strategies as st

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from autopar.run.run import Run
from autopar.run.runtime import Engine, Trainer
from search.engines.plans import ExportedPlan, ExportJob, lower_for
from search.engines.table import EXPORTERS
from search.planning.choose import TRAINERS
from tests.often import often
from tests.unit.export_plans import (
    SMALL,
    check_lowered,
    job_of,
    jobs,
    lowered_or_refused,
    uniform_plan,
)


def test_the_table_names_the_engines_that_options_take() -> None:
    """Options and files are typed by literals, which the table has to name in its order."""
    assert get_args(Engine) == EXPORTERS
    assert get_args(Trainer) == TRAINERS


def check_run(near: Plan, run: Run) -> None:
    """Fail unless a launch has the degrees, the stages and the batch of a plan."""
    layer, strategy, split = near.layers[0], run.strategy, run.split
    exchanged = layer.tp if layer.ulysses else 1
    assert (split.tp, split.cp) == (layer.tp // exchanged, layer.cp * exchanged)
    assert split.exchanges_heads == (exchanged > 1)
    assert (strategy.pp, strategy.dp) == (near.num_stages, near.data_degree(0))
    sizes = [sum(len(chunk.layers) for chunk in stage) for stage in strategy.stages]
    assert sizes == list(near.stage_sizes)
    assert strategy.global_batch == near.global_batch
    assert strategy.micro_batches == near.num_microbatches
    if strategy.dp > 1:
        stages = {"ddp": 0, "zero1": 1, "zero2": 2}
        assert split.zero == (3 if layer.zero3 else stages[near.default_dp_type])


def check_drawn(engine: str, job: ExportJob) -> None:
    lower = lower_for(engine)
    lowered = lowered_or_refused(lower, job)
    if lowered is not None and lowered.runs is not None:
        check_lowered(lower, job, lowered)
        check_run(lowered.plan, lowered.runs)


@often(60, 250, st.sampled_from(["accelerate", "deepspeed"]), jobs(max_stages=1))
def test_lowered_plans_are_legal_and_every_change_is_a_loss(engine: str, job: ExportJob) -> None:
    """The files' degrees are those of the plan that the exporter returns."""
    check_drawn(engine, job)


@often(40, 150, jobs())
def test_lowered_plans_of_stages_are_legal(job: ExportJob) -> None:
    """The same with stages, which torchtitan has."""
    check_drawn("torchtitan", job)


def lowered(engine: str, plan: Plan, **changes: Any) -> ExportedPlan:
    return lower_for(engine)(job_of(plan, **changes))


def keeping(found: ExportedPlan) -> tuple[str, int]:
    """Return who keeps the states of a launch, and at which stage."""
    assert found.runs is not None
    return found.runs.runtime.states.keeper, found.runs.split.zero


ZERO3 = LayerStrategy(zero3=True)
ULYSSES = LayerStrategy(tp=3, ulysses=True, zero3=True)
WHOLE = {"sequence_parallel": False}


@pytest.mark.parametrize(
    ("engine", "world", "layer", "default", "kept", "losses"),
    [
        ("accelerate", 1, LayerStrategy(), "ddp", ("ddp", 0), []),
        ("accelerate", 4, LayerStrategy(), "ddp", ("ddp", 0), []),
        ("accelerate", 4, LayerStrategy(), "zero2", ("accelerate", 2), []),
        ("accelerate", 4, ZERO3, "ddp", ("accelerate", 3), []),
        ("accelerate", 6, ULYSSES, "ddp", ("deepspeed", 3), []),
        # a single tensor group leaves FSDP nothing to shard
        ("accelerate", 2, LayerStrategy(tp=2), "ddp", ("ddp", 0), []),
        # it refuses DDP beside tensor parallelism
        ("accelerate", 4, LayerStrategy(tp=2), "ddp", ("accelerate", 2), ["default_dp_type"]),
        ("deepspeed", 4, LayerStrategy(), "ddp", ("deepspeed", 0), []),
        ("deepspeed", 4, LayerStrategy(), "zero2", ("deepspeed", 2), []),
        ("deepspeed", 4, ZERO3, "ddp", ("deepspeed", 3), []),
        ("deepspeed", 6, ULYSSES, "ddp", ("deepspeed", 3), []),
        ("deepspeed", 4, LayerStrategy(tp=2), "zero2", ("deepspeed", 2), []),
        # it asserts a stage of 2 at most there
        ("deepspeed", 4, LayerStrategy(tp=2, zero3=True), "ddp", ("deepspeed", 2),
         ["dp_types_enc", "default_dp_type", "embed_sdp"]),
        ("torchtitan", 4, LayerStrategy(), "ddp", ("ddp", 0), []),
        ("torchtitan", 4, LayerStrategy(), "zero2", ("torchtitan", 2), []),
        ("torchtitan", 4, ZERO3, "ddp", ("torchtitan", 3), []),
    ],
)  # fmt: skip
def test_data_parallelism(
    engine: str,
    world: int,
    layer: LayerStrategy,
    default: Any,
    kept: tuple[str, int],
    losses: list[str],
) -> None:
    """Replicas and the three stages; Ulysses ranks of accelerate are DeepSpeed's."""
    found = lowered(engine, uniform_plan(world, layer, default_dp_type=default), **WHOLE)

    assert keeping(found) == kept
    assert [loss.field for loss in found.losses] == losses


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed"])
def test_whole_sequences_are_a_loss_where_the_plan_counts_on_pieces(engine: str) -> None:
    plan = uniform_plan(4, LayerStrategy(tp=2), default_dp_type="zero2")

    found = lowered(engine, plan)
    assert found.plan == plan
    assert [loss.field for loss in found.losses] == ["sequence_parallel"]
    assert lowered(engine, plan, **WHOLE).losses == ()


def test_context_ranks_become_what_an_engine_has() -> None:
    """Of DeepSpeed a tensor degree, of accelerate beside Ulysses a Ulysses degree of that size."""
    found = lowered("deepspeed", uniform_plan(6, LayerStrategy(cp=2), VocabStrategy()))
    assert {(s.tp, s.cp) for s in found.plan.layers} == {(2, 1)}
    fields = [loss.field for loss in found.losses]
    assert fields == ["tp_sizes_enc", "cp_sizes_enc", "vtp", "sequence_parallel"]

    layer = LayerStrategy(tp=2, cp=3, ulysses=True, zero3=True)
    vocab = VocabStrategy(tp=6, ulysses=True, zero3=True)
    both = lowered("accelerate", uniform_plan(6, layer, vocab))
    assert {(s.tp, s.cp, s.ulysses) for s in both.plan.layers} == {(6, 1, True)}

    # the FSDP of torchtitan covers context ranks, so that replicas become ZeRO-2
    titan = lowered("torchtitan", uniform_plan(4, LayerStrategy(cp=2), VocabStrategy(cp=2)))
    assert [loss.field for loss in titan.losses] == ["default_dp_type"]


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("accelerate", "accelerate has no pipeline, but the plan has 2 stages"),
        ("deepspeed", r"2 stages of 2\+3 layers: .*PipelineModule"),
    ],
)
def test_stages_are_refused(engine: str, said: str) -> None:
    plan = uniform_plan(4, LayerStrategy(), num_stages=2, stage_sizes=(2, 3))

    with pytest.raises(InputError, match=said):
        lowered(engine, plan)


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed", "torchtitan"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_precision(engine: str, precision: Any) -> None:
    """torchtitan has two of the three."""
    found = lowered(engine, uniform_plan(2, LayerStrategy()), precision=precision)

    lost = engine == "torchtitan" and precision == "fp16"
    assert [loss.field for loss in found.losses] == (["mixed_precision"] if lost else [])
    assert found.runs is not None
    assert found.runs.runtime.precision.kind == ("bf16" if lost else precision)


def test_fp32_gradients_of_deepspeed_need_zero() -> None:
    """With ZeRO they are a key, without it sums are in the precision of the model."""
    plan, sharded = uniform_plan(2, LayerStrategy()), uniform_plan(2, ZERO3)

    for precision, digits in (("fp16", 11), ("bf16", 8)):
        narrow = lowered("deepspeed", plan, precision=precision)
        assert (narrow.losses, narrow.as_run) == ((), {"fp32_gradients": False})
        assert any(f"{digits} binary digits of each sum" in n for n in narrow.notes)
        assert ("fp32_gradients", False) in narrow.search
    wide = lowered("deepspeed", plan, precision="fp32")
    assert (wide.losses, wide.as_run) == ((), {})
    assert lowered("deepspeed", plan, fp32_gradients=False).as_run == {}
    kept, summed = lowered("deepspeed", sharded), []
    assert (kept.losses, kept.as_run.get("fp32_gradients")) == ((), None)
    for found in (kept, lowered("deepspeed", sharded, fp32_gradients=False), wide):
        assert found.runs is not None
        states = found.runs.runtime.states
        summed.append((states.wide_gradients, states.buckets.overlap))
    assert summed == [(True, True), (None, True), (None, None)]


def test_a_wished_degree_keeps_ulysses() -> None:
    """A plan of several Ulysses degrees stays one of Ulysses at any degree asked for."""
    plan = uniform_plan(12, LayerStrategy(tp=2, ulysses=True))
    layers = (*plan.layers[:3], *(LayerStrategy(tp=6, ulysses=True),) * 2)

    found = lowered("deepspeed", replace(plan, layers=layers), tensor_degree=3)
    assert {(s.tp, s.ulysses) for s in found.plan.layers} == {(3, True)}


@pytest.mark.parametrize(
    ("engine", "checkpointed", "again", "losses"),
    [
        ("accelerate", (), [], []),
        ("accelerate", range(5), [0, 1, 2, 3, 4], []),
        ("deepspeed", (1, 2), [0, 1, 2, 3, 4], ["checkpoint"]),
        ("torchtitan", (), [], []),
        ("torchtitan", range(5), [0, 1, 2, 3, 4], []),
        ("torchtitan", (0, 3), [0, 3], []),
    ],
)
@pytest.mark.parametrize("default", ["ddp", "zero2"])
def test_recomputed_layers(
    engine: str, checkpointed: Any, again: list[int], losses: list[str], default: Any
) -> None:
    """The nearest plan needs no more memory than the plan; who sets it is one of two."""
    layers = tuple(LayerStrategy(checkpoint=i in checkpointed) for i in range(5))
    plan = uniform_plan(2, LayerStrategy(), default_dp_type=default)
    job = job_of(replace(plan, layers=layers))

    found = lower_for(engine)(job)
    assert [loss.field for loss in found.losses] == losses
    assert [i for i, layer in enumerate(found.plan.layers) if layer.checkpoint] == again
    assert found.runs is not None
    assert (found.runs.split.recompute == "full") == bool(again)
    if engine != "torchtitan":
        # accelerate has a key beside FSDP, and Hugging Face's Trainer refuses both
        keyed = engine == "accelerate" and default == "zero2"
        assert ("--gradient_checkpointing True" in found.launch) == (bool(again) and not keyed)


def test_several_degrees_take_the_largest_or_the_one_asked_for() -> None:
    """Every loss names its layers and what is taken instead."""
    layers = (LayerStrategy(tp=2, zero3=True),) * 2 + (LayerStrategy(tp=6),) * 3
    plan = replace(uniform_plan(12, LayerStrategy(tp=2)), layers=layers)

    largest, asked = lowered("torchtitan", plan), lowered("torchtitan", plan, tensor_degree=2)
    assert {s.tp for s in largest.plan.layers} == {6}
    assert all(s.zero3 for s in largest.plan.layers)
    assert {s.tp for s in asked.plan.layers} == {2}
    texts = {loss.field: loss.what for loss in largest.losses}
    assert texts["tp_sizes_enc"] == (
        "the plan has degree 2 (layers 0-1), degree 6 (layers 2-4), but "
        "torchtitan 0.3.0 has one tensor degree for all layers: it uses degree "
        "6"
    )
    assert texts["vtp"].endswith("it uses degree 6 for embedding and head")
    assert [loss.field for loss in asked.losses] == ["tp_sizes_enc", "dp_types_enc", "embed_sdp"]
    with pytest.raises(InputError, match=r"of tp 5: kv_heads"):
        lowered("torchtitan", plan, tensor_degree=5)


def test_a_degree_above_the_kv_heads_is_lowered() -> None:
    """12 heads and 6 key-value heads: tp 12 is legal for us, not for torchtitan."""
    found = lowered("torchtitan", uniform_plan(12, LayerStrategy(tp=12)))

    assert found.plan.layers[0].tp == 6
    assert "(kv_heads(6) % tp(12) = 6 != 0)" in found.losses[0].what


@pytest.mark.parametrize("engine", ["accelerate", "deepspeed"])
@pytest.mark.parametrize("name", ["t5-3b", "gpt2-xl", "deepseek-v2-lite"])
def test_a_script_builds_what_no_configuration_describes(engine: str, name: str) -> None:
    """The files are those of another model of as many layers, and the launch asks for LOAD."""
    spec = load_spec(name)
    plan = uniform_plan(8, ZERO3, layers=spec.num_layers, default_dp_type="zero2")

    found = lowered(engine, plan, spec=spec)
    check_lowered(lower_for(engine), job_of(plan, spec), found)
    assert f"${{LOAD:?set LOAD to the weights or the folder of {name}}}" in found.launch
    assert not any("config.json" in file for file in found.files)


# --------------------------------------------------------------------------------------------------
# The model of a recipe.


def keys(found: ExportedPlan) -> dict[str, object]:
    """Return the keyword arguments of the recipe's calls and its constants; names as their text."""
    values: dict[str, object] = {}
    for node in ast.walk(ast.parse(found.files["autopar_recipe.py"])):
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(k.arg, k.value) for k in node.keywords if k.arg]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            pairs = [(node.targets[0].id, node.value)]
        for key, value in pairs:
            try:
                values[key] = ast.literal_eval(value)
            except ValueError:
                values[key] = ast.unparse(value)
    return values


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
def test_rotary_positions_are_the_models_own(name: str, theta: float, factor: float | None) -> None:
    """torchtitan's 8B and 70B are Llama 3.1, with scaled frequencies: none of them is named."""
    spec = load_spec(name)
    plan = uniform_plan(8, LayerStrategy(tp=8), layers=spec.num_layers)

    found = keys(lowered("torchtitan", plan, spec=spec))
    assert (found["ROPE_THETA"], found.get("scaling_factor")) == (theta, factor)
    assert found.get("scaling") == (None if factor is None else "llama")
    assert found["model"] == "model"


def test_an_unknown_rotary_base_is_asked_for() -> None:
    """The launch and the recipe both end without it; no default stands in."""
    found = lowered("torchtitan", uniform_plan(2, LayerStrategy()))

    recipe = found.files["autopar_recipe.py"]
    assert 'if "ROTARY_BASE" not in environ:' in recipe
    assert 'raise ValueError("set ROTARY_BASE to the base' in recipe
    assert keys(found)["ROPE_THETA"] == "float(environ['ROTARY_BASE'])"
    assert 'ROTARY_BASE="${ROTARY_BASE:?set ROTARY_BASE to' in found.launch
    known = replace(SMALL, rotary_base=10000.0)
    assert "ROTARY_BASE" not in lowered("torchtitan", found.plan, spec=known).launch


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
def test_models_that_torchtitan_lacks_are_refused(name: str, what: str) -> None:
    """The refusal says what of the model stands in the way."""
    spec = load_spec(name)
    plan = uniform_plan(2, LayerStrategy(), layers=spec.num_layers)

    with pytest.raises(InputError, match=f"does not support .*{what}.* of {name}"):
        lowered("torchtitan", plan, spec=spec)


def test_tied_embeddings_have_no_pipeline() -> None:
    """Tied tables are written down, and refused with stages, which is torchtitan's own rule."""
    tied = replace(SMALL, tied_embeddings=True)
    plan = uniform_plan(2, LayerStrategy())

    assert keys(lowered("torchtitan", plan, spec=tied))["enable_weight_tying"] is True
    staged = replace(plan, num_stages=2, stage_sizes=(2, 3))
    with pytest.raises(InputError, match="no pipeline for models with tied embeddings"):
        lowered("torchtitan", staged, spec=tied)


def test_names_cannot_break_the_recipe() -> None:
    """Model names come from users; the file stays Python."""
    spec = replace(SMALL, name='a"b\n"""\\c')

    found = lowered("torchtitan", uniform_plan(2, LayerStrategy()), spec=spec)
    assert keys(found)["flavor"] == "a_b_____c"

"""Specs as models and plans as runs: nothing is lost on the way."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from autopar.documents.catalog import model_names
from autopar.documents.spec import load_spec
from autopar.records import replace
from autopar.run.architecture import LayerGroup, grouped
from autopar.run.of_plan import (
    layers_of_spec,
    model_of_spec,
    run_of_plan,
    uniform_model,
    uniform_plan,
)
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from autopar.run.run import run_with_split


@pytest.mark.parametrize("name", model_names())
def test_shipped_models_are_architectures(name: str) -> None:
    """Layers, their kinds and their order are those of the spec."""
    spec = load_spec(name)
    model = model_of_spec(spec)
    assert model.num_layers == spec.num_layers
    for layer, kind in zip(model.each_layer, spec.layer_types, strict=True):
        own = spec.layers[kind]
        assert layer.hidden == own.hidden_size
        assert (layer.experts is not None) == (own.num_experts is not None)
        assert layer.cross == own.cross_attention
        heads = None if layer.attention is None else layer.attention.heads
        assert heads == own.num_heads
        assert (layer.recurrent,) == (own.mixers or (None,))


def test_alternating_layers_are_a_repeated_pair() -> None:
    """24 pairs of two kinds are two groups of one layer; one kind is one group."""
    spec = load_spec("gpt-oss-20b")
    model = model_of_spec(spec)
    assert (model.repeat, len(model.layers)) == (spec.num_layers // 2, 2)
    layer, other = model.each_layer[:2]
    assert layer != other
    assert grouped((layer,) * 5) == ((LayerGroup(count=5, layer=layer),), 1)
    assert grouped((layer, layer, other)) == (
        (LayerGroup(count=2, layer=layer), LayerGroup(count=1, layer=other)),
        1,
    )


def test_learned_positions_are_as_many_as_tokens() -> None:
    """A longer sequence needs a longer table, which Megatron-LM is told, and a shorter one none."""
    rows = {length: load_spec("gpt-6.7b", seq_length=(length,)) for length in (1024, 8192)}
    assert {length: model_of_spec(spec).max_positions for length, spec in rows.items()} == {
        1024: 2048,
        8192: 8192,
    }


def plans() -> st.SearchStrategy[Plan]:
    """Return plans of llama2-7b on 16 GPUs; not all are legal."""
    layer = st.builds(
        LayerStrategy,
        tp=st.sampled_from([1, 2, 4]),
        ulysses=st.just(False),
        cp=st.sampled_from([1, 2]),
        zero3=st.booleans(),
        checkpoint=st.booleans(),
    )

    def plan(
        stages: int, kinds: list[LayerStrategy], vocab: int, batches: int, default: int
    ) -> Plan:
        layers = tuple(kinds[number % len(kinds)] for number in range(32))
        return Plan(
            world_size=16,
            num_stages=stages,
            stage_sizes=(32 // stages,) * stages,
            layers=layers,
            vocab=VocabStrategy(tp=vocab),
            global_batch=128,
            num_microbatches=batches,
            default_dp_type=("ddp", "zero1", "zero2")[default],
        )

    return st.builds(
        plan,
        stages=st.sampled_from([1, 2, 4]),
        kinds=st.lists(layer, min_size=1, max_size=3),
        vocab=st.sampled_from([1, 2]),
        batches=st.sampled_from([4, 8]),
        default=st.integers(0, 2),
    )


@given(plans())
def test_a_run_of_a_plan_is_that_plan(plan: Plan) -> None:
    """Splits of all layers, stages and batch; the default of layers without ZeRO-3."""
    spec = load_spec("llama2-7b")
    if violations(plan, spec, sequence_parallel=True):
        return
    run = run_of_plan(plan, spec, engine="galvatron", gpu="a100-80gb")
    strategy, default = run.strategy, ("ddp", "zero1", "zero2").index(plan.default_dp_type)
    for split, layer in zip(
        (*strategy.each_layer, strategy.ends), (*plan.layers, plan.vocab.as_layer()), strict=True
    ):
        assert (split.tp, split.cp, split.tp_kind) == (layer.tp, layer.cp, "megatron")
        assert split.zero == (3 if layer.zero3 else default)
        assert split.recompute == ("full" if layer.checkpoint else frozenset())
    sizes = tuple(sum(len(chunk.layers) for chunk in stage) for stage in strategy.stages)
    assert (strategy.pp, strategy.vpp, sizes) == (plan.num_stages, 1, plan.stage_sizes)
    assert (strategy.gpus, strategy.global_batch) == (plan.world_size, plan.global_batch)
    assert strategy.micro_batches == plan.num_microbatches


@pytest.mark.parametrize("name", ["llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_a_uniform_model_has_the_layers_of_its_spec(name: str) -> None:
    """What memory and time depend on is the same; the model has no name."""
    spec = load_spec(name)
    found, own = uniform_model(spec), model_of_spec(spec)
    assert found.name == ""
    assert found.layers == own.layers
    assert (found.vocab, found.tied, found.mtp) == (own.vocab, own.tied, own.mtp)


def test_layers_of_a_uniform_hybrid_have_one_part() -> None:
    """Mamba-2 and experts of Granite 4 are two layers, as the letters of a pattern."""
    spec = load_spec("granite-4-small")
    found, own = uniform_model(spec), model_of_spec(spec)
    assert (own.num_layers, found.num_layers) == (40, 80)
    assert {(len(one.mixers), one.mlp is not None, one.norms) for one in found.kinds} == {
        (1, False, 1),
        (0, True, 1),
    }
    mixers = [one.mixers for one in found.each_layer[::2]]
    assert [type(one[0]) for one in mixers] == [type(one.mixers[0]) for one in own.each_layer]
    # Megatron-LM has no argument for the chunks of a scan
    assert found.first_mamba is not None
    assert found.first_mamba.chunk == 128


@pytest.mark.parametrize(("name", "kept"), [("llama2-7b", None), ("mixtral-8x7b", 1)])
def test_only_experts_have_an_expert_tensor_degree(name: str, kept: int | None) -> None:
    """A dense run of a search has the degree 1, which closed forms then refused to compare."""
    spec = load_spec(name)
    plan = Plan(
        world_size=8,
        num_stages=1,
        stage_sizes=(spec.num_layers,),
        layers=(LayerStrategy(tp=2),) * spec.num_layers,
        vocab=VocabStrategy(tp=2),
        global_batch=8,
        num_microbatches=2,
        default_dp_type="zero1",
    )
    run = run_of_plan(plan, spec, engine="megatron", gpu="h100-80gb")
    assert {layer.etp for layer in uniform_plan(run_with_split(run, etp=1)).layers} == {kept}


@pytest.mark.parametrize(
    ("parameters", "norm"), [(0, "plain"), (2, "rms"), (4, "layer"), (1, "layer"), (7, "layer")]
)
def test_norms_of_layers_that_no_uniform_plan_has(parameters: int, norm: str) -> None:
    """Planners of layers take any number of norm parameters, which measured files may have."""
    spec = load_spec("llama3-8b")
    (layer,) = spec.layers
    changed = replace(spec, layers=(replace(layer, norm_parameters_per_hidden=parameters),))
    assert {one.norm for one in layers_of_spec(changed)} == {norm}

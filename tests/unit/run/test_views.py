"""Runs as launches and plans: nothing is lost on the way there and back."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from autopar.documents.catalog import model_names
from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.pipeline.schedules import schedule_of_chunks
from autopar.price.account import account_of
from autopar.records import replace
from autopar.run.architecture import LayerGroup, grouped
from autopar.run.launch import Launch
from autopar.run.of_launch import launch_of_run, model_of_launch, run_of_launch
from autopar.run.of_plan import model_of_spec, plan_of_run, run_of_plan
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy, violations
from autopar.run.strategy import split_groups
from search.check.job import job_of_launch
from tests.launch_cases import megatron_launches, some, titan_launches, torch_launches
from tests.often import often

LAUNCHES = st.one_of(
    megatron_launches(),
    torch_launches(keeper="deepspeed"),
    torch_launches(keeper="accelerate"),
    titan_launches(),
)


@often(60, 600, LAUNCHES)
def test_a_run_of_a_launch_is_that_launch(launch: Launch) -> None:
    """What a launch writes in two ways is written in one; a second round changes nothing."""
    run = run_of_launch(launch)
    again = launch_of_run(run)
    assert run_of_launch(again) == run
    assert launch_of_run(run_of_launch(again)) == again
    assert again.degrees.world == launch.degrees.world
    assert run.strategy.dp == launch.degrees.dp
    assert run.strategy.micro_batches == launch.micro_batches
    assert run.tokens == launch.tokens


@pytest.mark.parametrize(
    "launch", some(LAUNCHES, 24), ids=lambda one: f"{one.trainer and one.trainer.keeper}"
)
def test_the_launch_of_a_run_has_the_price_of_the_first(launch: Launch) -> None:
    """Memory of every stage, to the byte, and what a step time is made of."""
    if not any(launch.model.expert_layers):
        # experts of no layer are none
        launch = replace(launch, model=replace(launch.model, experts=None))
    again = launch_of_run(run_of_launch(launch))
    for stage in range(launch.degrees.pp):
        assert account_of(again, stage).peak_bytes == account_of(launch, stage).peak_bytes
    if launch.optimizer.kind != "muon":
        job = job_of_launch(launch)
        if job.schedule == schedule_of_chunks(job.vpp):
            # the schedule of so many chunks need not be named
            job = replace(job, schedule=None)
        assert job_of_launch(again) == job


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
        assert layer.attention is not None
        assert layer.attention.heads == own.num_heads


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
    assert len(run.strategy.each_layer) == spec.num_layers
    again = plan_of_run(run)
    if all(one.zero3 for one in plan.layers) and plan.vocab.zero3:
        # nothing is left that the default is of
        again = replace(again, default_dp_type=plan.default_dp_type)
    assert again == plan


def test_a_launch_has_one_split() -> None:
    """Layers that are split unlike are refused, and so is Ulysses as a tensor degree."""
    launch = next(one for one in some(megatron_launches(), 20) if one.model.num_layers > 1)
    run = run_of_launch(launch)
    splits = list(run.strategy.each_layer)
    splits[0] = replace(splits[0], tp=splits[0].tp * 2)
    unlike = replace(run, strategy=replace(run.strategy, layers=split_groups(splits)))
    with pytest.raises(InputError, match="one for all layers"):
        launch_of_run(unlike)
    ulysses = [replace(one, tp_kind="ulysses") for one in run.strategy.each_layer]
    with pytest.raises(InputError, match="Ulysses"):
        launch_of_run(replace(run, strategy=replace(run.strategy, layers=split_groups(ulysses))))


def test_a_model_of_a_launch_is_that_of_its_spec() -> None:
    """Two ways to one architecture."""
    from autopar.price.profile import launch_model

    for name in ("llama3-8b", "mixtral-8x7b", "deepseek-v3"):
        spec = load_spec(name)
        found = model_of_launch(launch_model(spec), name=spec.name)
        own = model_of_spec(spec)
        assert found.layers == own.layers
        assert (found.vocab, found.tied, found.mtp) == (own.vocab, own.tied, own.mtp)

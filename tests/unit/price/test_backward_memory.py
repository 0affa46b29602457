"""What a layer's backward needs for a moment: the rule beside counts, and plans that heed it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import strategies as st

from autopar.documents import catalog
from autopar.documents.catalog import model_file_name
from autopar.documents.model import read_model_memory
from autopar.documents.sidecar import newest_cells, read_sidecar
from autopar.documents.spec import load_spec
from autopar.rates.model import ShardKind, backward_bytes
from autopar.records import replace
from autopar.run.model import LayerMemory, LayerSpec, ModelProfile, ModelSpec
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from search.planning.cost.memory import layer_backward_bytes, tensor_bytes
from search.planning.cost.model import CostModel
from search.planning.cost.state_layouts import Recipe
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import predict
from search.planning.session import open_session
from search.request.options import SearchOptions
from search.request.request import InputSpec
from tests.cost_cases import toy_hardware, toy_model, toy_spec
from tests.often import often
from tests.shipped import PROFILED

RECIPE = Recipe.of(SearchOptions())
GIB = 2.0**30


@cache
def counted(name: str, sequence_parallel: bool = True) -> tuple[tuple[LayerSpec, LayerMemory], ...]:
    """Return the layer types of a shipped model with what was counted of them."""
    spec = load_spec(name)
    memory = read_model_memory(
        catalog.find_model(name).parent / "configs" / model_file_name("memory", "bf16", spec),
        spec=spec,
        sequence_parallel=sequence_parallel,
        precision="bf16",
    )
    tables = zip(spec.layers, memory.layers, strict=True)
    return tuple((layer, table[layer.seq_length]) for layer, table in tables)


def uneven(layer: LayerSpec, degree: int, kind: str) -> float:
    """Return by how much more is counted where experts do not share visits evenly."""
    if layer.num_experts is None:
        return 1.0
    tokens = layer.seq_length // (1 if kind == "tp" else degree)
    visits = tokens * (layer.experts_per_token or 1)
    return -(-visits // layer.num_experts) * layer.num_experts / visits


# --- the rule ---


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("name", PROFILED)
def test_the_rule_is_what_was_counted_of_shipped_models(name: str, sequence_parallel: bool) -> None:
    """Equal at every degree and kind; a mixture's router makes 0.02 % of it."""
    kind: ShardKind = "sp" if sequence_parallel else "tp"
    for layer, memory in counted(name, sequence_parallel):
        for own, table in (
            (kind, memory.backward_bytes_per_sample),
            ("ulysses", memory.ulysses_backward_bytes_per_sample),
        ):
            assert own == "ulysses" or 1 in table
            for degree, value in table.items():
                rule = backward_bytes(layer, layer.seq_length, degree, own, 0.0)  # type: ignore[arg-type]
                if layer.num_experts is None and layer.num_norms is None:
                    assert rule == pytest.approx(value, rel=1e-12)
                else:
                    least = value / uneven(layer, degree, own)
                    assert least <= rule * (1 + 1e-12) <= value * 1.0003


ODD = [
    {"ffn_hidden_size": 32},
    {"ffn_hidden_size": 32, "gated_mlp": True, "num_kv_heads": 2},
    {"ffn_hidden_size": 32, "head_dim": 64, "gated_mlp": True},
    {"ffn_hidden_size": 256, "head_dim": 64, "norm_parameters_per_hidden": 4},
    {"ffn_hidden_size": 128, "cross_attention": True, "norm_parameters_per_hidden": 3},
    {"ffn_hidden_size": 64, "num_experts": 8, "experts_per_token": 1},
    {"ffn_hidden_size": 1024, "num_experts": 8, "experts_per_token": 1},
    {"ffn_hidden_size": 512, "num_experts": 16, "experts_per_token": 4, "gated_mlp": True},
    {"ffn_hidden_size": 128, "num_experts": 8, "experts_per_token": 1, "head_dim": 64},
]


@pytest.mark.parametrize("fields", ODD)
@pytest.mark.parametrize(
    ("degree", "kind"), [(1, "sp"), (2, "sp"), (8, "sp"), (4, "tp"), (8, "ulysses")]
)
def test_the_rule_is_never_below_a_count(
    fields: dict[str, Any], degree: int, kind: ShardKind
) -> None:
    """Narrow MLPs, wide attention, shared heads, cross-attention, mixtures."""
    pytest.importorskip("torch", reason="counting needs torch")
    from profiler.model.counting import layer_memory
    from profiler.model.layers.sharding import Sharding

    values: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 16, **fields}
    layer = LayerSpec(num_layers=1, seq_length=256, hidden_size=128, **values)
    found = layer_memory(layer, Sharding(degree=degree, kind=kind))
    rule = backward_bytes(layer, 256, degree, kind, found.activation_bytes)

    assert found.peak_bytes <= rule * (1 + 1e-12) <= found.peak_bytes * 1.8


@pytest.mark.parametrize("name", PROFILED)
def test_unknown_widths_take_no_less(name: str) -> None:
    """Half of what the layer keeps, and one activation more on several ranks."""
    for kind, sequence_parallel in (("sp", True), ("tp", False)):
        for layer, memory in counted(name, sequence_parallel):
            bare = replace(layer, ffn_hidden_size=None)
            for degree, value in memory.backward_bytes_per_sample.items():
                kept = memory.activation_bytes_per_sample[degree]
                rule = backward_bytes(bare, layer.seq_length, degree, kind, kept)  # type: ignore[arg-type]
                assert value / uneven(layer, degree, kind) <= rule <= 3.3 * value


@pytest.mark.parametrize("name", ["gpt-6.7b", "llama2-7b", "llama3-8b", "mixtral-8x7b", "t5-3b"])
def test_a_checkpointed_layer_recomputes_and_then_runs_backward(name: str) -> None:
    """Its counted peak is what both need, less one input, which it keeps anyway."""
    spec = load_spec(name)
    path = catalog.find_model(name).parent / "configs" / model_file_name("memory", "bf16", spec)
    sidecar = read_sidecar(path)
    assert sidecar is not None
    cells = [c for c in newest_cells(sidecar.runs).values() if c.degree == 1]
    for number, (_, memory) in enumerate(counted(name)):
        (full,) = (c for c in cells if c.checkpoint == "full" and c.layer_type == number)
        both = memory.activation_bytes_per_sample[1] + memory.backward_bytes_per_sample[1]
        saved = memory.checkpoint_bytes_per_sample
        assert saved is not None
        assert full.bytes["peak"] == pytest.approx(both - saved, rel=1e-4)


# --- degrees that were not counted ---


def test_a_missing_backward_follows_the_rule_and_the_nearest_count() -> None:
    """A layer that needs twice what the rule says at one degree does so at its neighbours."""
    ((layer, memory),) = counted("llama3-8b")
    exact = memory.backward_bytes_per_sample

    def found(table: dict[int, float], degree: int) -> float:
        changed = replace(memory, backward_bytes_per_sample=table)
        return layer_backward_bytes(changed, degree, "sp", layer, RECIPE, 1.0)[0]

    assert found({1: exact[1]}, 4) == exact[4]
    assert found({1: exact[1], 8: 2 * exact[8]}, 4) == exact[4]  # 1 is not farther than 8
    assert found({2: 2 * exact[2], 32: exact[32]}, 4) == 2 * exact[4]
    assert found({2: 0.5 * exact[2]}, 4) == exact[4]
    assert found({}, 4) == exact[4]


@pytest.mark.parametrize("name", PROFILED)
def test_a_missing_tensor_degree_keeps_no_less_than_was_counted(name: str) -> None:
    """With sequence parallelism: copies of k and v, and the tokens of experts, are added."""
    for layer, memory in counted(name):
        table = memory.activation_bytes_per_sample
        for known in table:
            one = replace(memory, activation_bytes_per_sample={known: table[known]})
            for degree, value in table.items():
                found, source = tensor_bytes(one, degree, layer, RECIPE, sequence_parallel=True)
                assert found is not None
                assert found >= value / uneven(layer, degree, "sp") * (1 - 1e-12)
                assert (source == "") == (degree == known)
                if degree > known and layer.num_experts is None:
                    assert found == pytest.approx(value, rel=1e-3)


def test_more_ranks_than_key_value_heads_share_copies() -> None:
    """t*A(t) of llama3-8b is 1345 MiB at t = 16, beside 1313 MiB of the whole layer."""
    ((layer, memory),) = counted("llama3-8b")
    whole = memory.activation_bytes_per_sample[1]
    alone = replace(memory, activation_bytes_per_sample={1: whole})
    found, source = tensor_bytes(alone, 16, layer, RECIPE, sequence_parallel=True)

    assert found is not None
    assert found * 16 / 2**20 == pytest.approx(1345.06, abs=0.01)
    assert source == "those at tp=1 times 1/16, and copies of k and v"
    bare = replace(layer, num_heads=None, num_kv_heads=None)
    assert tensor_bytes(alone, 16, bare, RECIPE, sequence_parallel=True)[0] == whole


# --- planning ---


def without_backward(profile: ModelProfile) -> ModelProfile:
    """Return a profile that says of every layer that its backward needs nothing."""

    def bare(memory: LayerMemory) -> LayerMemory:
        nothing = {2**k: 0.0 for k in range(8)}
        return replace(
            memory,
            backward_bytes_per_sample=nothing,
            ulysses_backward_bytes_per_sample=nothing,
        )

    return replace(
        profile,
        layers=tuple(
            replace(layer, memory={s: bare(m) for s, m in layer.memory.items()})
            for layer in profile.layers
        ),
    )


@pytest.mark.parametrize("gib", [19, 43])
def test_a_plan_that_left_backwards_out_does_not_fit(gib: int) -> None:
    """llama2-7b on 8 GPUs: it would be some MiB over, and the plan chosen now fits."""
    options = SearchOptions(settle_bsz=64, top=0, reserve_fraction=0.05)
    session = open_session(InputSpec(model="llama2-7b", hardware="a100-80gb:1x8"), options)
    documents = (session.hardware, session.options)
    blind = Planner.from_documents(session.spec, without_backward(session.profile), *documents)
    planner = Planner.from_documents(session.spec, session.profile, *documents)
    before, after = blind.solve(gib * GIB), planner.solve(gib * GIB)
    assert before.plan is not None
    assert before.prediction is not None
    assert after.prediction is not None

    assert before.prediction.fits
    assert not planner.evaluate(before.plan, gib * GIB).fits
    assert after.prediction.fits
    assert after.prediction.samples_per_s < before.prediction.samples_per_s


@often(
    10,
    40,
    counts=st.dictionaries(st.sampled_from([1, 2, 4, 8]), st.floats(0.0, 1e8), max_size=4),
    raised=st.floats(0.0, 1e7),
    tp=st.sampled_from([1, 2, 4]),
    checkpoint=st.booleans(),
    zero3=st.booleans(),
    stages=st.sampled_from([1, 2]),
)
def test_memory_never_falls_when_a_backward_needs_more(
    counts: dict[int, float], raised: float, tp: int, checkpoint: bool, zero3: bool, stages: int
) -> None:
    """Nor by more than what the samples of one micro-batch need more."""
    strategy = LayerStrategy(tp=tp, checkpoint=checkpoint, zero3=zero3)
    plan = Plan(
        world_size=8,
        num_stages=stages,
        stage_sizes=(4 // stages,) * stages,
        layers=(strategy,) * 4,
        vocab=VocabStrategy(tp=tp),
        global_batch=32,
        num_microbatches=4,
    )

    def stage_bytes(more: float) -> list[int]:
        model = toy_model()
        memory = replace(
            model.layers[0].memory[1024],
            backward_bytes_per_sample={t: value + more for t, value in counts.items()},
        )
        layers = (replace(model.layers[0], memory={1024: memory}),)
        options = SearchOptions(time_profile_mode="batch")
        cost = CostModel(toy_spec(), replace(model, layers=layers), toy_hardware(), options)
        return [s.allocated_bytes for s in predict(cost, plan, 2.0**40).stages]

    samples = 32 / 4 * tp * stages / 8
    low, high = stage_bytes(0.0), stage_bytes(raised)
    for before, after in zip(low, high, strict=True):
        assert before <= after <= before + samples * raised + 1 or tp not in counts
        assert before <= after


def test_a_run_of_layers_shows_its_backward() -> None:
    """Apart from what is recomputed; the largest sum of both is the stage's transient."""
    plan = Plan(
        world_size=8,
        num_stages=1,
        stage_sizes=(4,),
        layers=(LayerStrategy(), LayerStrategy(), *(LayerStrategy(checkpoint=True),) * 2),
        vocab=VocabStrategy(tp=1),
        global_batch=16,
        num_microbatches=1,
    )
    options = SearchOptions(time_profile_mode="batch")
    cost = CostModel(toy_spec(), toy_model(), toy_hardware(), options)
    (stage,) = predict(cost, plan, 2.0**40).stages
    plain, saved = (run.memory_bytes for run in stage.runs)
    backward = 2 * 5 * 1024 * 512 * 2
    gradient = 2 * 512 * 2048  # of the MLP's last matrix

    assert (plain["backward"], plain["transient"]) == (backward, gradient)
    assert (saved["backward"], saved["transient"]) == (backward, 2 * 8e6 + gradient)
    assert stage.memory_bytes["transient"] == backward + 2 * 8e6 + gradient


def test_defaults_say_where_the_rule_stands_in() -> None:
    """With its degrees; nothing is said where a sidecar has counts."""

    def said(spec: ModelSpec, **fields: Any) -> list[str]:
        model = toy_model()
        memory = replace(model.layers[0].memory[1024], **fields)
        layers = (replace(model.layers[0], memory={1024: memory}),)
        options = SearchOptions(time_profile_mode="batch")
        cost = CostModel(spec, replace(model, layers=layers), toy_hardware(), options)
        cost.layer_rows(0, [LayerStrategy(), LayerStrategy(tp=2)], [(1, 16, "ddp")])
        return [text for text in cost.defaults_used if "backward at" in text]

    assert said(toy_spec()) == [
        "layer type 0: memory of its backward at tp=1, tp=2 is by a rule (not counted)"
    ]
    assert said(toy_spec(), backward_bytes_per_sample={1: 5e6}) == [
        "layer type 0: memory of its backward at tp=2 is by a rule (not counted)"
    ]
    assert said(toy_spec(), backward_bytes_per_sample={1: 5e6, 2: 3e6}) == []
    (unknown,) = said(toy_spec(num_heads=None))
    assert unknown.endswith(
        "tp=2 is half of its activations, and its input at tp > 1 (not counted, widths unknown)"
    )

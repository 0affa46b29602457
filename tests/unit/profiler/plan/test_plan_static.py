"""The arithmetic of a plan: parameters against real modules, bytes by hand, all llama2-7b."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.records import replace
from autopar.run.model import (
    LayerSpec,
    ModelSpec,
    embedding_parameter_counts,
    padded_vocab_size,
    parameter_count,
)
from autopar.run.plan import LayerStrategy, PipelineType, Plan, VocabStrategy
from profiler.plan.arithmetic import examine, micro_batches_in_flight
from profiler.plan.job import PlanJob
from profiler.plan.weights import Tensors, first_shapes, held, last_shapes, layer_shapes
from search.planning.cost.pipeline import in_flight
from tests.plan_cases import T5, make_job
from tests.unit import small_models

PLAIN = replace(small_models.LLAMA, num_kv_heads=4, gated_mlp=False)
LAYERS = {
    **small_models.LAYERS,
    "qwen": replace(small_models.LLAMA, qkv_biases=True),
    "narrow heads": replace(PLAIN, head_dim=4, num_kv_heads=1),
    "latent at once": replace(
        small_models.LATENT, latent=replace(small_models.LATENT.latent, query_rank=None)
    ),
    "one norm": replace(PLAIN, biases=True, num_norms=1, norm_parameters_per_hidden=2),
}
MODELS = {
    "untied": ModelSpec(
        name="untied", layers=(replace(LAYERS["llama"], num_layers=4),), vocab_size=250
    ),
    "tied": ModelSpec(
        name="tied",
        layers=(replace(LAYERS["gpt"], num_layers=4),),
        vocab_size=250,
        tied_embeddings=True,
        learned_positions=64,
        make_vocab_size_divisible_by=8,
        extra_embedding_parameters=5,
        extra_head_parameters=7,
    ),
    "norms": ModelSpec(name="norms", layers=(LAYERS["normed"],), vocab_size=250),
}


def numbers(module: Any, pieces: int = 1) -> int:
    """Return the elements of a module's parameters that the first of so many ranks holds."""
    return sum(p.chunk(pieces)[0].numel() if p.numel() else 0 for p in module.parameters())


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_shapes_are_those_of_the_blocks(name: str, degree: int) -> None:
    """Built for one rank of a group, and divided by rows as FSDP2 divides them."""
    pytest.importorskip("torch")
    import torch

    from profiler.model.layers.blocks import build_layer
    from profiler.model.layers.parallel import SoleRank
    from profiler.model.layers.sharding import Sharding

    group = SoleRank(degree) if degree > 1 else None
    module = build_layer(
        LAYERS[name],
        Sharding(degree=degree, kind="sp"),
        group=group,
        dtype=torch.float32,
        device="meta",
    )
    shapes = layer_shapes(LAYERS[name], degree)

    for pieces in (1, 3, 8):
        assert held(shapes, pieces) == numbers(module, pieces)
    if degree == 1:
        assert held(shapes) == parameter_count(LAYERS[name])


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_outer_shapes_are_those_of_the_blocks(name: str, degree: int) -> None:
    """Embedding and head on the first and last stage, and both on one."""
    pytest.importorskip("torch")
    import torch

    from profiler.model.layers.parallel import SoleRank
    from profiler.model.layers.vocab import build_vocab

    spec = MODELS[name]
    group = SoleRank(degree) if degree > 1 else None
    how: dict[str, Any] = {"dtype": torch.float32, "device": "meta"}
    first, last, only = (
        build_vocab(spec, part, degree=degree, group=group, **how)
        for part in ("first", "last", "only")
    )
    ahead, behind = first_shapes(spec, degree), last_shapes(spec, degree, own_table=True)
    shared = last_shapes(spec, degree, own_table=not spec.tied_embeddings)

    for pieces in (1, 3):
        assert held(ahead, pieces) == numbers(first, pieces)
        assert held(behind, pieces) == numbers(last, pieces)
        assert held((*ahead, *shared), pieces) == numbers(only, pieces)
    if degree == 1:
        whole = embedding_parameter_counts(spec, padded_vocab_size(spec))
        assert held((*ahead, *shared)) == sum(whole)


def test_rows_are_whole() -> None:
    """5 rows over 4 ranks are 2 on the first; over 8, one."""
    assert held((Tensors(5, 10),), 4) == 20
    assert held((Tensors(5, 10, 3),), 8) == 30
    assert held((Tensors(0, 1),), 8) == 0


def llama(world: int, **changes: Any) -> PlanJob:
    """Return llama2-7b under one strategy for all layers."""
    spec = load_spec("llama2-7b")
    strategy = changes.pop("layer", LayerStrategy())
    precision = changes.pop("precision", "bf16")
    plan = Plan(
        **{
            "world_size": world,
            "num_stages": 1,
            "stage_sizes": (32,),
            "layers": (strategy,) * 32,
            "vocab": VocabStrategy(tp=strategy.tp, zero3=strategy.zero3),
            "global_batch": 1024,
            "num_microbatches": 1,
            **changes,
        }
    )
    return PlanJob(plan=plan, spec=spec, precision=precision)


TOTAL = 6_738_415_616
"""Parameters of llama2-7b."""


def test_llama_on_one_rank_has_the_documented_recipe() -> None:
    """All 6.74 G parameters; bf16 beside fp32 sums and fp32 weights, or sums in bf16."""
    for precision, wide, bytes_ in (
        ("fp32", True, (4, 4, 8)),
        ("bf16", True, (2, 4, 12)),
        ("bf16", False, (2, 2, 12)),
    ):
        (stage,) = examine(replace(llama(1, precision=precision), fp32_gradients=wide)).stages
        own = stage.held
        assert own.num_parameters == TOTAL
        assert (own.parameter_bytes, own.gradient_bytes, own.optimizer_bytes) == tuple(
            n * TOTAL for n in bytes_
        )
        assert (own.gathered_bytes, own.accumulated_bytes) == (0, 0)


def test_llama_on_64_ranks_with_zero3_and_tp2() -> None:
    """Weights over all 64 ranks, norms over the 32 of a data group; fp32 shards."""
    (stage,) = examine(llama(64, layer=LayerStrategy(tp=2, zero3=True))).stages
    norms = 65 * 4096
    expected = (TOTAL - norms) // 64 + norms // 32

    assert stage.held.num_parameters == expected
    assert stage.held.state_bytes == 16 * expected
    assert stage.runs[0].samples == 32


def test_uneven_rows_over_1024_ranks() -> None:
    """11008/8 = 1376 rows of the MLP over 128 ranks are 11 on most of them, not 10.75."""
    (stage,) = examine(llama(1024, layer=LayerStrategy(tp=8, zero3=True))).stages
    attention = 4 * 4096 * 4096 // 1024
    up = 2 * 11 * 4096
    down = 32 * 1376
    assert stage.runs[0].held.num_parameters == 32 * (attention + up + down + 2 * 32)


def test_zero2_gathers_and_accumulates() -> None:
    """ZeRO-2 keeps gathered weights; whole gradients stay until the last micro-batch."""
    job = llama(8, default_dp_type="zero2", num_microbatches=4)
    own = examine(job).stages[0].held
    assert own.gathered_bytes == 2 * TOTAL
    assert own.accumulated_bytes == 4 * TOTAL
    assert own.state_bytes == 16 * TOTAL // 8
    eager = examine(replace(job, async_grad_reduce=False)).stages[0].held
    assert eager.accumulated_bytes == 0


def test_ulysses_has_whole_weights_that_zero_divides_over_all_ranks() -> None:
    """Its tensor ranks hold the same weights, so they are one group with the data ranks."""
    strategy = LayerStrategy(tp=4, ulysses=True, zero3=True)
    (stage,) = examine(llama(8, layer=strategy, vocab=VocabStrategy(zero3=True))).stages
    assert stage.held.num_parameters == TOTAL // 8
    assert (stage.runs[0].label, stage.runs[0].data_degree) == ("ulysses4-dp2-zero3", 2)


def test_stages_samples_and_micro_batches_in_flight() -> None:
    """1F1B keeps p - j micro-batches on stage j, GPipe all of them."""
    job = llama(8, num_stages=4, stage_sizes=(7, 8, 8, 9), num_microbatches=8)
    report = examine(job)

    assert [s.in_flight for s in report.stages] == [4, 3, 2, 1]
    assert [s.ranks for s in report.stages] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [s.layers for s in report.stages] == [(0, 6), (7, 14), (15, 22), (23, 31)]
    assert [s.runs[0].samples for s in report.stages] == [64] * 4
    assert report.bubble_share == pytest.approx(3 / 11)
    assert report.largest == 3
    assert sum(s.held.num_parameters for s in report.stages) == TOTAL
    gpipe = replace(job.plan, pipeline_type="gpipe")
    assert [micro_batches_in_flight(gpipe, j) for j in range(4)] == [8] * 4


@pytest.mark.parametrize("kind", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("m", [1, 4, 8])
def test_micro_batches_in_flight_are_those_of_the_prediction(
    kind: PipelineType, stages: int, m: int
) -> None:
    """What is priced is what is run, a single stage included: it accumulates gradients."""
    plan = replace(
        llama(8).plan,
        num_stages=stages,
        stage_sizes=(32 // stages,) * stages,
        num_microbatches=m,
        pipeline_type=kind,
    )
    run = [micro_batches_in_flight(plan, j) for j in range(stages)]
    assert run == [in_flight(kind, j, stages, m) for j in range(stages)]


def test_tied_table_is_on_both_ends() -> None:
    """Once on one stage, twice on two."""
    spec = MODELS["tied"]
    strategies = (LayerStrategy(),) * 4
    plan = Plan(
        world_size=2,
        num_stages=2,
        stage_sizes=(2, 2),
        layers=strategies,
        vocab=VocabStrategy(),
        global_batch=4,
        num_microbatches=2,
    )
    two = examine(PlanJob(plan=plan, spec=spec)).stages
    whole = replace(plan, world_size=1, num_stages=1, stage_sizes=(4,))
    (one,) = examine(PlanJob(plan=whole, spec=spec)).stages
    assert sum(s.held.num_parameters for s in two) == one.held.num_parameters + 256 * 32


def test_mesh_and_axes() -> None:
    """Strided groups take the first axis, consecutive ones the last."""
    strategies = (
        LayerStrategy(tp=2),
        LayerStrategy(tp=2, strided=True),
        LayerStrategy(tp=4),
        LayerStrategy(),
    )
    plan = Plan(
        world_size=8,
        num_stages=1,
        stage_sizes=(4,),
        layers=strategies,
        vocab=VocabStrategy(),
        global_batch=8,
        num_microbatches=1,
    )
    report = examine(PlanJob(plan=plan, spec=MODELS["untied"]))
    assert report.mesh == (2, 2, 2)
    assert [run.tensor_axes for run in report.stages[0].runs] == [(2,), (0,), (1, 2), ()]
    assert report.stages[0].runs[1].label == "tp2-strided-dp4"


def test_what_the_executor_does_not_run_is_said() -> None:
    """Groups of 3 beside groups of 2 are legal; their arithmetic is given all the same."""
    strategy = LayerStrategy(tp=2, zero3=True)
    job = llama(6, layer=strategy)
    plan = replace(job.plan, layers=(LayerStrategy(cp=3), *job.plan.layers[1:]), global_batch=24)
    spec = replace(job.spec, layers=(replace(job.spec.layers[0], seq_length=1536),))
    report = examine(replace(job, plan=plan, spec=spec))
    assert report.mesh is None
    assert report.obstacle is not None
    assert "the context groups of 3 of layer 0" in report.obstacle
    assert report.stages[0].held.num_parameters
    assert strategy.label(3, job.plan.default_dp_type) == "tp2-dp3-zero3"


def test_model_without_widths_is_refused() -> None:
    """Documented files alone do not say what a layer is made of."""
    job = llama(1)
    bare = replace(job.spec, layers=(replace(job.spec.layers[0], ffn_hidden_size=None),))
    with pytest.raises(InputError, match="width of the MLP is unknown"):
        examine(replace(job, spec=bare))


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 2), (3, 1), (1, 1, 1, 1)])
def test_stages_of_an_encoder_and_a_decoder_hold_the_model_once(sizes: tuple[int, ...]) -> None:
    """Whichever layer a stage ends with; a tied table is on both ends."""
    job = make_job(len(sizes), LayerStrategy(), stages=sizes, m=4, model=T5)
    report = examine(job)
    layers = sum(layer.num_layers * parameter_count(layer) for layer in T5.layers)
    outer = sum(embedding_parameter_counts(T5, padded_vocab_size(T5)))
    copies = padded_vocab_size(T5) * 32 if len(sizes) > 1 else 0
    assert sum(stage.held.num_parameters for stage in report.stages) == layers + outer + copies
    assert report.obstacle is None


def _stacks(*layers: LayerSpec) -> ModelSpec:
    return replace(T5, layers=layers)


@pytest.mark.parametrize(
    ("model", "strategy", "words"),
    [
        (_stacks(*reversed(T5.layers)), LayerStrategy(), "need an encoder"),
        (_stacks(*(replace(T5.layers[1], num_layers=2),) * 2), LayerStrategy(), "encoder before"),
        (
            _stacks(replace(T5.layers[0], hidden_size=64), T5.layers[1]),
            LayerStrategy(),
            "hidden sizes 64, 32",
        ),
    ],
)
def test_layers_that_are_no_encoder_and_decoder_are_not_run(
    model: ModelSpec, strategy: LayerStrategy, words: str
) -> None:
    """The arithmetic is there all the same."""
    report = examine(make_job(2, strategy, model=model))
    assert report.obstacle is not None
    assert words in report.obstacle


def test_a_decoder_reads_pieces_of_the_encoder() -> None:
    """Its own degree must divide the encoder's tokens, which no rule of legality asks for."""
    odd = _stacks(replace(T5.layers[0], seq_length=15), T5.layers[1])
    one, two = LayerStrategy(), LayerStrategy(tp=2)
    report = examine(make_job(2, one, one, one, two, model=odd))
    assert report.obstacle is not None
    assert "layer 3 reads the encoder's output in pieces" in report.obstacle
    assert examine(make_job(2, one, one, one, two, model=T5)).obstacle is None
    whole = make_job(2, one, one, one, two, model=odd, sequence_parallel=False)
    assert examine(whole).obstacle is None

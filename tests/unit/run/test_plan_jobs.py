"""Plans as jobs of the bottom-up step: every field of a strategy, or why it has no price."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.price.job import job_of_run
from autopar.price.step import StepTime, step_time
from autopar.rates.parts.operations import Machine
from autopar.records import replace
from autopar.run.architecture import Experts
from autopar.run.job import Job, blocks_of, stage_blocks
from autopar.run.model import ModelSpec, padded_vocab_size
from autopar.run.of_plan import run_of_plan
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from autopar.run.runtime import Overlap

LLAMA = load_spec("llama2-7b")


def plan(*strategies: tuple[int, LayerStrategy], spec: ModelSpec = LLAMA, **changes: Any) -> Plan:
    """Return a plan of runs of layers; without any, tensor degree 4 for all."""
    runs = strategies or ((spec.num_layers, LayerStrategy(tp=4)),)
    layers = tuple(strategy for number, strategy in runs for _ in range(number))
    fields = {
        "world_size": 16,
        "num_stages": 1,
        "stage_sizes": (spec.num_layers,),
        "vocab": VocabStrategy(tp=layers[0].tp),
        "global_batch": 32,
        "num_microbatches": 2,
        **changes,
    }
    return Plan(layers=layers, **fields)


def job_of_plan(one: Plan, spec: ModelSpec, **options: Any) -> Job:
    """Return the job of a plan's run, whose communication overlaps unless options differ."""
    options = {"overlap": Overlap(tensor=True, gradients=True), **options}
    return job_of_run(run_of_plan(one, spec, engine="galvatron", gpu="h100-80gb", **options))


def priced(machine: Machine, one: Plan, **options: Any) -> StepTime:
    """Return the step of a plan of llama2-7b."""
    return step_time(machine, job_of_plan(one, LLAMA, **options))


def test_uniform_plan_is_the_job_that_says_the_same(machine: Machine) -> None:
    """To the bit: what a plan says by layer and of the vocabulary changes nothing where it is one.

    16 GPUs = 1 stage x tp 4 x dp 4, 32 samples in 2 micro-batches: 4 on a rank.
    """
    job = job_of_plan(plan(default_dp_type="zero2"), LLAMA)
    same = Job(
        name="llama2-7b",
        blocks=blocks_of(LLAMA),
        vocab=padded_vocab_size(LLAMA, 4),
        seq=4096,
        micro_batch=4,
        global_batch=32,
        gpus=16,
        tp=4,
        dp=4,
        sequence_parallel=True,
        zero=2,
        gradient_bytes=4.0,
    )

    assert job.micro_batches == same.micro_batches == 2
    assert step_time(machine, job) == step_time(machine, same)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"default_dp_type": "zero2"}, "zero", 2),
        ({"default_dp_type": "zero1"}, "zero", 1),
        ({"default_dp_type": "ddp"}, "zero", 0),
        ({"num_microbatches": 8}, "micro_batch", 1),
        ({"num_stages": 4, "stage_sizes": (7, 9, 9, 7)}, "stage_layers", (7, 9, 9, 7)),
        ({"num_stages": 2, "stage_sizes": (16, 16)}, "dp", 2),
        ({"vocab": VocabStrategy(tp=8)}, "vocab_tp", 8),
        ({"vocab": VocabStrategy(tp=4, zero3=True)}, "vocab_zero", 3),
    ],
)
def test_fields_of_plans(changes: dict[str, Any], field: str, value: object) -> None:
    """Stages, batch, data parallelism, embedding and head."""
    if "num_stages" in changes:
        changes = {"num_microbatches": 4, **changes}
    job = job_of_plan(plan(**changes), LLAMA)

    assert getattr(job, field) == value
    assert job.tp * job.cp * job.pp * job.dp == job.gpus == 16
    counts = [sum(block.number for block in blocks) for blocks in stage_blocks(job)]
    assert tuple(counts) == changes.get("stage_sizes", (32,))


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"precision": "fp16"}, "precision", "fp16"),
        ({"precision": "fp32"}, "gradient_bytes", 4.0),
        ({"fp32_gradients": False}, "gradient_bytes", 2.0),
        ({}, "gradient_bytes", 4.0),
        ({"sequence_parallel": False}, "sequence_parallel", False),
        ({"async_grad_reduce": False}, "reduce_every_micro_batch", True),
        ({"overlap": Overlap()}, "overlap_tensor", False),
        ({"overlap": Overlap(tensor=True)}, "overlap_tensor", True),
    ],
)
def test_options_of_searches(options: dict[str, Any], field: str, value: object) -> None:
    """What a plan is priced with besides what it says."""
    assert getattr(job_of_plan(plan(), LLAMA, **options), field) == value


def test_degrees_of_strategies() -> None:
    """Tensor and context degrees are the job's, the data degree is what is left."""
    job = job_of_plan(plan((32, LayerStrategy(tp=2, cp=4))), LLAMA)

    assert (job.tp, job.cp, job.dp) == (2, 4, 2)


def test_layers_may_differ_in_recomputation_and_sharding(machine: Machine) -> None:
    """Blocks keep both; each recomputed layer adds as much, and so does each sharded one."""
    plain, again = LayerStrategy(tp=4), LayerStrategy(tp=4, checkpoint=True)
    sharded = LayerStrategy(tp=4, zero3=True)
    job = job_of_plan(plan((10, again), (20, plain), (2, sharded)), LLAMA)

    assert [(b.number, b.recompute, b.zero) for b in job.blocks] == [
        (10, "full", None),
        (20, frozenset(), None),
        (2, frozenset(), 3),
    ]
    for strategy, term in ((again, "recompute"), (sharded, "sharding")):
        part = priced(machine, plan((8, strategy), (24, plain))).terms_s[term]
        whole = priced(machine, plan((32, strategy))).terms_s[term]
        assert part > 0
        assert whole == pytest.approx(4 * part, rel=1e-12)


def test_layers_may_differ_in_degrees(machine: Machine) -> None:
    """Every block is priced as in a plan of its own: device terms are sums over layers."""
    one, other = LayerStrategy(tp=4), LayerStrategy(tp=2, cp=2)
    vocab = VocabStrategy(tp=4)
    mixed = plan((24, one), (8, other), vocab=vocab)
    job = job_of_plan(mixed, LLAMA)
    whole = [priced(machine, plan((32, strategy), vocab=vocab)) for strategy in (one, other)]
    found = step_time(machine, job)

    degrees = [(block.number, block.tp, block.cp) for block in job.blocks]
    assert degrees == [(24, None, None), (8, 2, 2)]
    assert (job.tp, job.cp) == (4, 1)
    for term in ("gemm", "attention", "memory", "tensor", "context"):
        expected = 0.75 * whole[0].terms_s[term] + 0.25 * whole[1].terms_s[term]
        assert found.terms_s[term] == pytest.approx(expected, rel=1e-9)
    assert found.terms_s["context"] > 0
    # degrees change who shares weights, not how much all ranks update
    assert whole[0].optimizer_s < found.optimizer_s < whole[1].optimizer_s


def test_first_layer_is_no_other_than_the_rest(machine: Machine) -> None:
    """What the job itself has, the first layer's degrees, is a matter of counting only."""
    wide, narrow = LayerStrategy(tp=4), LayerStrategy(tp=1)
    vocab = VocabStrategy(tp=2)
    changes = {"vocab": vocab, "default_dp_type": "zero2"}
    first = priced(machine, plan((16, wide), (16, narrow), **changes))
    last = priced(machine, plan((16, narrow), (16, wide), **changes))

    assert first.total_s == pytest.approx(last.total_s, rel=1e-12)
    for term, seconds in first.terms_s.items():
        assert seconds == pytest.approx(last.terms_s[term], rel=1e-12), term


def test_sharded_layers_are_not_reduced_again(machine: Machine) -> None:
    """Gradients of half the layers are half the message, and their optimizer a quarter of it."""
    plain, sharded = LayerStrategy(tp=4), LayerStrategy(tp=4, zero3=True)
    none, half, every = (
        priced(machine, plan((32 - n, plain), *([(n, sharded)] if n else []))) for n in (0, 16, 31)
    )

    assert none.terms_s["gradients"] > half.terms_s["gradients"] > every.terms_s["gradients"]
    assert none.optimizer_s > half.optimizer_s > every.optimizer_s > none.optimizer_s / 4


def test_stages_are_as_long_as_the_plan_says(machine: Machine) -> None:
    """The longest stage sets the pace: 20 of 32 layers in one of two stages."""
    even, uneven = (
        priced(machine, plan(num_stages=2, stage_sizes=sizes, num_microbatches=8))
        for sizes in ((16, 16), (20, 12))
    )

    assert uneven.terms_s["gemm"] > 1.2 * even.terms_s["gemm"]
    assert uneven.stage_s[0] > uneven.stage_s[1]
    assert even.total_s < uneven.total_s


def test_vocabulary_of_another_degree(machine: Machine) -> None:
    """All ranks share its work whatever the degree: products stay, collectives grow with it."""
    alone = VocabStrategy(tp=1)
    shared, apart = (priced(machine, plan(vocab=v)) for v in (VocabStrategy(tp=4), alone))

    assert apart.terms_s["tensor"] < shared.terms_s["tensor"]
    assert apart.terms_s["gemm"] == pytest.approx(shared.terms_s["gemm"], rel=0.02)
    # every rank has the whole tables, and reduces and updates them
    assert apart.terms_s["gradients"] > shared.terms_s["gradients"]
    assert apart.optimizer_s > shared.optimizer_s


def test_gradients_of_every_micro_batch(machine: Machine) -> None:
    """Twice in two micro-batches; with ZeRO-2 new weights are gathered once all the same."""
    for kind, most in (("ddp", 2.0), ("zero2", 1.95)):
        one = plan(default_dp_type=kind, num_microbatches=2)
        once, twice = (
            priced(machine, one, async_grad_reduce=wanted).terms_s["gradients"]
            for wanted in (True, False)
        )
        assert 1.2 * once < twice <= most * once * (1 + 1e-12)


def test_gpipe_has_a_price_of_its_own() -> None:
    """It is the schedule of the job, unlike 1F1B."""
    pipeline = plan(num_stages=2, stage_sizes=(16, 16), num_microbatches=4, pipeline_type="gpipe")
    assert job_of_plan(pipeline, LLAMA).schedule == "gpipe"
    assert job_of_plan(replace(pipeline, pipeline_type="1f1b"), LLAMA).schedule is None


def test_mixtures_are_at_expert_degree_1() -> None:
    """As the planner has them, whole on every rank."""
    spec = load_spec("mixtral-8x7b")
    job = job_of_plan(plan((32, LayerStrategy(zero3=True)), spec=spec), spec)

    assert (job.ep, job.etp, job.dispatcher) == (1, 1, "all_to_all")
    assert isinstance(job.blocks[0].mlp, Experts)
    assert job.blocks[0].mlp.number == 8


def test_expert_degrees_are_those_of_all_layers() -> None:
    """A job has one expert degree."""
    spec = load_spec("mixtral-8x7b")
    mixed = plan((16, LayerStrategy()), (16, LayerStrategy(ep=2)), spec=spec)
    with pytest.raises(InputError, match="expert degrees that differ by layer"):
        job_of_plan(mixed, spec)


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (
            plan((32, LayerStrategy(tp=4, ulysses=True))),
            "only the planner prices Ulysses sequence parallelism, not bottom-up",
        ),
        (
            plan(vocab=VocabStrategy(tp=4, ulysses=True)),
            "only the planner prices Ulysses sequence parallelism, not bottom-up",
        ),
        (
            plan((32, LayerStrategy(tp=4, strided=True))),
            "only the planner prices tensor groups of ranks that are no neighbours, not bottom-up",
        ),
    ],
)
def test_what_a_job_cannot_say_is_refused(one: Plan, sentence: str) -> None:
    """In one sentence with the reason."""
    with pytest.raises(InputError) as caught:
        job_of_plan(one, LLAMA)
    assert str(caught.value) == sentence


def test_models_that_a_job_cannot_say_are_refused() -> None:
    """Encoders with decoders, several lengths, unknown widths, no vocabulary."""
    for spec, sentence in (
        (load_spec("t5-3b"), "t5-3b"),
        (
            replace(
                LLAMA,
                layers=(
                    replace(LLAMA.layers[0], num_layers=16),
                    replace(LLAMA.layers[0], num_layers=16, seq_length=512),
                ),
            ),
            "llama2-7b",
        ),
        (
            replace(LLAMA, layers=(replace(LLAMA.layers[0], ffn_hidden_size=None),)),
            "heads and MLP width are unknown",
        ),
        (replace(LLAMA, vocab_size=None), "vocabulary size is unknown"),
    ):
        one = plan((spec.num_layers, LayerStrategy(tp=4)), stage_sizes=(spec.num_layers,))
        with pytest.raises(InputError) as caught:
            job_of_plan(one, spec)
        assert sentence in str(caught.value)

"""What a rank of a plan would hold: exact states, and the peak that real processes have."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.documents.spec import load_spec
from autopar.errors import InputError
from autopar.records import replace
from autopar.run.model import LayerSpec, ModelSpec
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from profiler.model.counting import PARTS
from profiler.plan.arithmetic import examine
from profiler.plan.dryrun import dry_run, fake_world, first_ranks
from profiler.plan.job import DryRunRank, PlanJob
from tests.gloo import run_ranks
from tests.plan_cases import T5

pytestmark = pytest.mark.whole

_TINY = ModelSpec(
    name="tiny",
    layers=(
        LayerSpec(
            num_layers=4,
            seq_length=64,
            hidden_size=64,
            num_heads=4,
            ffn_hidden_size=128,
            gated_mlp=True,
        ),
    ),
    vocab_size=256,
)


_PAIR = replace(_TINY, layers=(replace(_TINY.layers[0], num_layers=2),))


def _plan(*layers: LayerStrategy, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "world_size": 2,
        "num_stages": 1,
        "layers": layers if len(layers) > 1 else layers * 4,
        "vocab": VocabStrategy(),
        "global_batch": 8,
        "num_microbatches": 2,
    } | changes
    stages = values["num_stages"]
    values.setdefault("stage_sizes", (len(values["layers"]) // stages,) * stages)
    return Plan(**values)


_L = LayerStrategy
_JOBS = {
    "ddp": PlanJob(plan=_plan(_L()), spec=_TINY),
    "ddp in bf16": PlanJob(plan=_plan(_L()), spec=_TINY, precision="bf16"),
    "zero1": PlanJob(plan=_plan(_L(), default_dp_type="zero1"), spec=_TINY),
    "zero1 in bf16": PlanJob(
        plan=_plan(_L(), default_dp_type="zero1"), spec=_TINY, precision="bf16"
    ),
    "zero2": PlanJob(plan=_plan(_L(), default_dp_type="zero2"), spec=_TINY),
    "zero3 in bf16, checkpointed": PlanJob(
        plan=_plan(*[_L(zero3=True, checkpoint=True)] * 2, vocab=VocabStrategy(zero3=True)),
        spec=_PAIR,
        precision="bf16",
    ),
    "tp2": PlanJob(plan=_plan(_L(tp=2), vocab=VocabStrategy(tp=2)), spec=_TINY),
    "tp2 without sp": PlanJob(
        plan=_plan(_L(tp=2), vocab=VocabStrategy(tp=2)), spec=_TINY, sequence_parallel=False
    ),
    "mixed": PlanJob(
        plan=_plan(
            _L(tp=2),
            _L(zero3=True),
            _L(tp=2, ulysses=True, zero3=True),
            _L(tp=2),
            vocab=VocabStrategy(tp=2),
            pipeline_type="gpipe",
        ),
        spec=_TINY,
    ),
    "encoder and decoder": PlanJob(
        plan=_plan(
            _L(tp=2),
            _L(tp=2, ulysses=True),
            _L(zero3=True),
            _L(tp=2, checkpoint=True),
            vocab=VocabStrategy(tp=2),
        ),
        spec=T5,
    ),
    "zero3 beside ddp in fp16": PlanJob(
        plan=_plan(_L(zero3=True), _L(), _L(zero3=True), _L()), spec=_TINY, precision="fp16"
    ),
    "encoder and decoder in zero3": PlanJob(
        plan=_plan(_L(zero3=True), vocab=VocabStrategy(zero3=True)), spec=T5
    ),
}
_EXPERTS = replace(_TINY.layers[0], num_experts=4, experts_per_token=2, ffn_hidden_size=64)
_JOBS |= {
    "rings, and recomputation": PlanJob(
        plan=_plan(
            _L(cp=2),
            _L(cp=2, zero3=True, recompute=("core_attn", "layernorm")),
            _L(cp=2, recompute=("mlp",)),
            _L(tp=2, recompute=("layernorm", "mlp")),
            vocab=VocabStrategy(cp=2),
        ),
        spec=_TINY,
    ),
    "gathered keys": PlanJob(
        plan=_plan(_L(cp=2)), spec=_TINY, precision="bf16", context_exchange="all_gather"
    ),
    "experts": PlanJob(
        plan=_plan(
            _L(ep=2),
            _L(tp=2, ep=2, zero3=True),
            _L(ep=2, zero3=True, recompute=("moe_act",)),
            _L(ep=2, recompute=("layernorm", "moe")),
        ),
        spec=replace(_TINY, layers=(_EXPERTS,)),
    ),
}
_QUICK = (
    "zero1 in bf16",
    "zero3 in bf16, checkpointed",
    "mixed",
    "rings, and recomputation",
    "experts",
)
"""ZeRO-3, tensor and Ulysses ranks, checkpoints, and the precision that has masters of weights;
context and expert ranks, and recomputed modules."""
_PIPELINE = PlanJob(plan=_plan(_L(), num_stages=2, num_microbatches=4), spec=_TINY)


def _count_real(jobs: dict[str, PlanJob]) -> dict[str, tuple[int, dict[str, int]]]:
    """Return what a rank of real processes counts in a step, by job."""
    import torch
    import torch.distributed as dist

    from profiler.model.counting import count_step
    from profiler.plan.arithmetic import check_job
    from profiler.plan.exchange import local_batch
    from profiler.plan.run import Trainer
    from profiler.plan.stage import build_stages, open_groups

    device = torch.device("cpu")
    found = {}
    for name, job in jobs.items():
        groups = open_groups(job, check_job(job), rank=dist.get_rank(), device_type="cpu")
        stages = build_stages(job, groups, device=device)
        optimizers = [unit.optimizer for stage in stages for unit in stage.units]
        trainer = Trainer(stages, job, device)
        model = trainer.stages
        batch = local_batch(job, stages[0].vocab, groups.place, step=0, device=device)
        counts = []
        for _ in range(6):
            counts.append(
                count_step(lambda: trainer.step(batch), model=model, optimizers=optimizers)  # noqa: B023
            )
            dist.barrier()
        # Gloo's threads may hold what they have sent for a moment longer.
        most, parts = min(counts[1:], key=lambda pair: pair[0])
        found[name] = (most, dict(parts))
    return found


def _llama(plan: Plan) -> PlanJob:
    spec = load_spec("llama2-7b", num_layers=[len(plan.layers)], seq_length=[4096])
    return PlanJob(plan=plan, spec=spec, precision="bf16")


def _first(job: PlanJob) -> DryRunRank:
    return dry_run(job, ranks=[0])[0]


def _check_real(jobs: dict[str, PlanJob]) -> None:
    real = run_ranks(_count_real, 2, jobs)
    for name, job in jobs.items():
        for rank in dry_run(job, ranks=[0, 1]):
            most, parts = real[rank.rank][name]
            assert abs(rank.peak_bytes - most) <= 8, (name, rank, parts)  # a loss or two


def test_real_processes_count_what_the_dry_run_says() -> None:
    """Without a pipeline a step of two gloo processes has the same storages at its peak."""
    _check_real({name: _JOBS[name] for name in _QUICK})


@pytest.mark.slow
def test_real_processes_count_what_the_dry_run_says_of_other_plans() -> None:
    """The same for the other ways to parallelise."""
    _check_real({name: job for name, job in _JOBS.items() if name not in _QUICK})


@pytest.mark.slow
def test_real_pipelines_hold_more_than_the_dry_run_says() -> None:
    """Torch's stages keep outputs of micro-batches in flight, which ours let go.

    They have a receive buffer for every micro-batch too, where ours has one for each in flight.
    """
    real = run_ranks(_count_real, 2, {"pipeline": _PIPELINE})
    first, last = dry_run(_PIPELINE, ranks=[0, 1])
    activations = 64 * 2 * 64 * 4  # sequence, samples, hidden, bytes

    assert real[0]["pipeline"][0] - first.peak_bytes == pytest.approx(2 * activations, abs=8)
    assert 0 <= real[1]["pipeline"][0] - last.peak_bytes <= 5 * activations


@pytest.mark.parametrize("sizes", [(1, 3), (2, 2), (3, 1)])
def test_stages_of_an_encoder_and_a_decoder_hold_what_their_arithmetic_says(
    sizes: tuple[int, int],
) -> None:
    """The norm between both lies behind the encoder's last layer, wherever a stage ends."""
    plan = _plan(_L(), num_stages=2, stage_sizes=sizes, num_microbatches=4)
    job = PlanJob(plan=plan, spec=T5)
    stages = examine(job).stages
    for found in dry_run(job, ranks=[0, 1]):
        held = stages[found.stage].held
        assert (found.num_parameters, found.parameter_bytes, found.optimizer_bytes) == (
            held.num_parameters,
            held.parameter_bytes,
            held.optimizer_bytes,
        )


def test_parameters_and_optimizer_of_llama_are_those_of_its_arithmetic() -> None:
    """ZeRO-3 over 32 ranks at tp 2 holds 1/64 of the weights in fp32, norms 1/32."""
    strategy = LayerStrategy(tp=2, zero3=True)
    found = _first(
        _llama(
            _plan(
                *[strategy] * 2,
                world_size=64,
                global_batch=32,
                num_microbatches=1,
                vocab=VocabStrategy(tp=2, zero3=True),
            )
        )
    )

    h, ffn, vocab = 4096, 11008, 32000
    divided = 2 * (4 * h * h + 3 * h * ffn) + 2 * vocab * h
    norms = (2 * 2 + 1) * h
    assert found.num_parameters == divided // 64 + norms // 32
    assert found.parameter_bytes == 4 * found.num_parameters
    assert found.gradient_bytes == 4 * found.num_parameters
    assert found.optimizer_bytes == 8 * found.num_parameters


def test_rows_that_do_not_divide_are_rounded_up() -> None:
    """FSDP2 shards whole rows, so that the first of 128 ranks holds more than 1/1024 of them."""
    found = _first(
        _llama(
            _plan(
                *[LayerStrategy(tp=8, zero3=True)] * 2,
                world_size=1024,
                global_batch=128,
                num_microbatches=1,
                vocab=VocabStrategy(tp=8, zero3=True),
            )
        )
    )

    h, ffn, vocab = 4096, 11008, 32768 // 8
    attention = 3 * (h // 8 // 128) * h + h // 128 * (h // 8)
    mlp = 2 * -(-ffn // 8 // 128) * h + h // 128 * (ffn // 8)
    tables = 2 * -(-vocab // 128) * h
    norms = (2 * 2 + 1) * h // 128
    assert found.num_parameters == 2 * (attention + mlp) + tables + norms
    assert found.optimizer_bytes == 8 * found.num_parameters


def test_replicas_in_bf16_have_fp32_masters() -> None:
    """ddp holds 2 bytes per parameter, 12 in its optimizer, and gradients as they are summed."""
    job = _JOBS["ddp in bf16"]
    wide, narrow = _first(job), _first(replace(job, fp32_gradients=False))

    assert wide.gradient_bytes == 4 * wide.num_parameters
    assert narrow.gradient_bytes == 2 * narrow.num_parameters
    for found in (wide, narrow):
        assert found.parameter_bytes == 2 * found.num_parameters
        assert found.optimizer_bytes == 12 * found.num_parameters
    assert wide.peak_bytes - narrow.peak_bytes <= 2 * wide.num_parameters


def test_narrow_shards_of_an_engine_are_counted_beside_fp32_ones() -> None:
    """2 bytes of each element that ZeRO-3 divides, at the peak as at any other moment."""
    job = _JOBS["zero3 in bf16, checkpointed"]
    own, engine = _first(job), _first(replace(job, narrow_shards=True))

    assert engine.engine_bytes == 2 * own.num_parameters
    assert engine.peak_bytes - own.peak_bytes == engine.engine_bytes
    assert sum(engine.peak_parts.values()) == engine.peak_bytes
    # in fp32 the shards that are stepped are those that are gathered, and replicas have none
    for name in ("encoder and decoder in zero3", "ddp in bf16"):
        assert _first(replace(_JOBS[name], narrow_shards=True)).engine_bytes == 0


def test_layers_that_are_alike_share_their_tables_of_positions() -> None:
    """Two layers and four have one cosine and one sine of 8 pairs at 64 positions."""
    few, many = (
        _first(replace(_JOBS["ddp"], spec=spec, plan=_plan(_L(), **changes)))
        for spec, changes in (
            (_PAIR, {"layers": (_L(),) * 2, "stage_sizes": (2,)}),
            (_TINY, {}),
        )
    )

    assert few.peak_parts["parameters"] - few.parameter_bytes == 2 * 64 * 8 * 4
    assert many.peak_parts["parameters"] - many.parameter_bytes == 2 * 64 * 8 * 4


def test_each_way_to_save_memory_saves_some() -> None:
    """ddp > zero1 > zero2 > zero3, and checkpointing keeps a fraction of the activations."""

    def peak(strategy: LayerStrategy, **changes: Any) -> DryRunRank:
        changes |= {"world_size": 8, "global_batch": 16, "num_microbatches": 1}
        return _first(_llama(_plan(*[strategy] * 2, **changes)))

    ddp = peak(LayerStrategy())
    zero1 = peak(LayerStrategy(), default_dp_type="zero1")
    zero2 = peak(LayerStrategy(), default_dp_type="zero2")
    zero3 = peak(LayerStrategy(zero3=True), vocab=VocabStrategy(zero3=True))
    checkpointed = peak(LayerStrategy(zero3=True, checkpoint=True), vocab=VocabStrategy(zero3=True))

    peaks = [found.peak_bytes for found in (ddp, zero1, zero2, zero3, checkpointed)]
    assert peaks == sorted(set(peaks), reverse=True)
    # states alone are divided, by eight
    assert (zero1.parameter_bytes, zero1.gradient_bytes) == (
        ddp.parameter_bytes,
        ddp.gradient_bytes,
    )
    assert 8 * zero1.optimizer_bytes == ddp.optimizer_bytes
    assert checkpointed.peak_parts["activations"] < zero3.peak_parts["activations"] / 3
    for found in (ddp, zero1, zero2, zero3, checkpointed):
        assert tuple(found.peak_parts) == PARTS
        assert sum(found.peak_parts.values()) == found.peak_bytes


def test_micro_batches_in_flight_are_those_of_the_schedule() -> None:
    """1F1B holds p - j of them on stage j however many there are, GPipe all of them."""

    def found(m: int, kind: str) -> tuple[DryRunRank, ...]:
        changes: dict[str, Any] = {"num_stages": 4, "world_size": 4, "pipeline_type": kind}
        plan = _plan(_L(), num_microbatches=m, global_batch=2 * m, **changes)
        return dry_run(PlanJob(plan=plan, spec=_TINY), ranks=[1, 2])

    many = found(8, "1f1b")
    kept = [rank.peak_parts["activations"] for rank in many]

    assert found(6, "1f1b") == many
    assert [rank.num_microbatches_run for rank in many] == [3 + 2, 2 + 2]
    # at the peak a part of one of them has gone
    each = kept[0] - kept[1]
    assert kept[1] == pytest.approx(2 * each, rel=0.1)
    for rank in found(16, "gpipe"):
        assert rank.num_microbatches_run == 16
        assert rank.peak_parts["activations"] == pytest.approx(16 * each, rel=0.01)


def test_one_stage_holds_one_micro_batch_under_either_name() -> None:
    """Without a pipeline GPipe accumulates gradients, and keeps no activations meanwhile."""
    one, many, other = (
        _first(
            PlanJob(
                plan=_plan(_L(), num_microbatches=m, global_batch=4 * m, pipeline_type=kind),
                spec=_TINY,
            )
        )
        for m, kind in ((2, "gpipe"), (4, "gpipe"), (4, "1f1b"))
    )

    assert many == other
    assert many.peak_bytes == pytest.approx(one.peak_bytes, rel=1e-3)  # tokens of one more


def test_first_ranks_of_the_stages_that_matter() -> None:
    """The largest stage has the most layers; of equal ones the last, which has the head."""
    plan = _plan(_L(), num_stages=2, world_size=4, num_microbatches=2)

    assert first_ranks(PlanJob(plan=plan, spec=_TINY)) == {"first": 0, "last": 2, "largest": 2}
    uneven = replace(plan, stage_sizes=(3, 1))
    assert first_ranks(PlanJob(plan=uneven, spec=_TINY))["largest"] == 0


def test_communicators_are_those_that_the_stage_uses() -> None:
    """NCCL makes one on first use: no stage has those of another stage's layers."""
    plan = _plan(
        *[_L(tp=2)] * 2,
        *[_L(cp=4)] * 2,
        world_size=8,
        num_stages=2,
        vocab=VocabStrategy(tp=4, zero3=True),
    )

    first, last = dry_run(PlanJob(plan=plan, spec=_TINY), ranks=[0, 4])

    # world, pipeline, head of 4; tensor and data pairs, and all four that exchange between both
    assert first.num_communicators == 2 + 1 + 2
    # rings and their sums have the four ranks that the head has
    assert last.num_communicators == 2 + 1


def test_a_plan_that_cannot_run_is_refused() -> None:
    """The reason is a sentence of the plan kernel's."""
    plan = _plan(_L(tp=2), global_batch=7)

    with pytest.raises(InputError, match="the plan cannot run"):
        dry_run(PlanJob(plan=plan, spec=_TINY), ranks=[0])


def test_a_dry_run_is_no_part_of_a_job() -> None:
    """Its process groups are its own."""
    with fake_world(rank=0, world_size=2), pytest.raises(InputError, match="without torchrun"):
        dry_run(_JOBS["ddp"], ranks=[0])

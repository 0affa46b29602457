"""DeepSpeed's configuration: its keys follow the plan, and what it cannot say is a loss."""

from __future__ import annotations

import json

import pytest

from autopar.errors import InputError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, VocabStrategy
from search.engines.deepspeed.plan import lower
from search.engines.engine import Lowered
from tests.often import often
from tests.unit.export_plans import (
    check_lowered,
    job_of,
    jobs,
    lowered_or_refused,
    uniform_plan,
)


def document(lowered: Lowered) -> dict:
    """Return the configuration."""
    return json.loads(lowered.files["autopar_deepspeed.json"])


@often(40, 150, jobs(max_stages=1))
def test_lowered_plans_are_legal_and_every_change_is_a_loss(job):
    """The file's degrees are those of the plan that the exporter says it makes."""
    lowered = lowered_or_refused(lower, job)
    if lowered is None:
        return

    check_lowered(lower, job, lowered)
    near, found = lowered.plan, document(lowered)
    layer = near.layers[0]
    tensor = found.get("tensor_parallel", {}).get("autotp_size", 1)
    sequence = found.get("sequence_parallel_size", 1)
    assert tensor * sequence == layer.tp
    assert 1 in (tensor, sequence)
    product = found["train_micro_batch_size_per_gpu"] * found["gradient_accumulation_steps"]
    assert product * near.data_degree(0) == near.global_batch
    if tensor == 1:
        assert found["train_batch_size"] == near.global_batch
    copies = near.world_size // tensor
    stage = found["zero_optimization"]["stage"]
    if copies > 1:
        assert (stage == 3) == all(s.zero3 for s in near.layers)
        assert stage == 3 or (stage == 2) == (near.default_dp_type == "zero2")


@pytest.mark.parametrize(
    ("layer", "default", "stage"),
    [
        (LayerStrategy(), "ddp", 0),
        (LayerStrategy(), "zero2", 2),
        (LayerStrategy(zero3=True), "ddp", 3),
    ],
)
def test_data_parallelism_is_a_zero_stage(layer, default, stage):
    """ddp, zero2 and zero3 are the stages 0, 2 and 3, and nothing is lost."""
    lowered = lower(job_of(uniform_plan(4, layer, default_dp_type=default)))

    assert lowered.losses == ()
    assert document(lowered)["zero_optimization"]["stage"] == stage
    assert document(lowered)["zero_optimization"].get("overlap_comm", False) == (stage > 0)


def test_ulysses_is_a_sequence_parallel_size():
    """Ulysses is exact; the script's part of it is a note."""
    layer = LayerStrategy(tp=3, ulysses=True, zero3=True)
    lowered = lower(job_of(uniform_plan(6, layer)))

    assert lowered.losses == ()
    assert document(lowered)["sequence_parallel_size"] == 3
    assert any("register_with_transformers(sequence_parallel_size=3" in n for n in lowered.notes)


def test_tensor_parallelism_loses_sequence_parallelism_only():
    """The plan is kept; that activations are whole is a loss unless the plan says so too."""
    job = job_of(uniform_plan(4, LayerStrategy(tp=2), default_dp_type="zero2"))

    lowered = lower(job)
    assert lowered.plan == job.plan
    assert [loss.field for loss in lowered.losses] == ["sequence_parallel"]
    assert "train_batch_size" not in document(lowered)
    assert lower(replace(job, sequence_parallel=False)).losses == ()


def test_weights_are_not_sharded_beside_tensor_groups():
    """DeepSpeed asserts a stage of 2 at most there: the nearest it runs is a loss that says so."""
    job = job_of(uniform_plan(4, LayerStrategy(tp=2, zero3=True)), sequence_parallel=False)

    lowered = lower(job)
    assert document(lowered)["zero_optimization"]["stage"] == 2
    fields = {loss.field: loss.what for loss in lowered.losses}
    assert "has no ZeRO-3 beside tensor groups" in fields["dp_types_enc"]


def test_stages_are_refused_with_the_partition():
    """The layers of the stages are in the sentence, for whoever writes a PipelineModule."""
    plan = uniform_plan(4, LayerStrategy(), num_stages=2, stage_sizes=(2, 3))

    with pytest.raises(InputError, match=r"2 stages of 2\+3 layers: .*PipelineModule"):
        lower(job_of(plan))


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_precision(precision):
    """One of the two switches is on, none for fp32."""
    found = document(lower(job_of(uniform_plan(2, LayerStrategy()), precision=precision)))

    assert (found["bf16"]["enabled"], found["fp16"]["enabled"]) == (
        precision == "bf16",
        precision == "fp16",
    )


def test_fp32_gradients_need_zero():
    """With ZeRO they are a key, without it sums are in the precision of the model."""
    plan = uniform_plan(2, LayerStrategy())
    sharded = uniform_plan(2, LayerStrategy(zero3=True))

    for precision, digits in (("fp16", 11), ("bf16", 8)):
        narrow = lower(job_of(plan, precision=precision))
        assert narrow.losses == ()
        assert narrow.as_run == {"fp32_gradients": False}
        assert any("DeepSpeed without ZeRO sums gradients" in note for note in narrow.notes)
        assert any(f"of each sum {digits} binary digits are kept" in n for n in narrow.notes)
        assert ("fp32_gradients", False) in narrow.search
        assert "data_types" not in document(narrow)
    wide = lower(job_of(plan, precision="fp32"))
    assert (wide.losses, wide.as_run) == ((), {})
    assert not any("sums gradients" in note for note in wide.notes)
    assert lower(job_of(plan, fp32_gradients=False)).as_run == {}
    kept = lower(job_of(sharded))
    assert (kept.losses, kept.as_run.get("fp32_gradients")) == ((), None)
    assert document(kept)["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "data_types" not in document(lower(job_of(sharded, fp32_gradients=False)))


def test_context_parallelism_becomes_a_tensor_degree_of_the_same_size():
    """Activations stay as small, and every key that changes is a loss."""
    plan = uniform_plan(6, LayerStrategy(cp=2), VocabStrategy())

    lowered = lower(job_of(plan))
    assert {(s.tp, s.cp) for s in lowered.plan.layers} == {(2, 1)}
    assert [loss.field for loss in lowered.losses] == [
        "tp_sizes_enc",
        "cp_sizes_enc",
        "vtp",
        "sequence_parallel",
    ]


def test_a_wished_degree_keeps_ulysses():
    """A plan of several Ulysses degrees stays one of Ulysses at any degree asked for."""
    plan = uniform_plan(12, LayerStrategy(tp=2, ulysses=True))
    layers = (*plan.layers[:3], *(LayerStrategy(tp=6, ulysses=True),) * 2)
    job = job_of(replace(plan, layers=layers), tensor_degree=3)

    lowered = lower(job)
    assert {(s.tp, s.ulysses) for s in lowered.plan.layers} == {(3, True)}
    assert document(lowered)["sequence_parallel_size"] == 3


def test_one_checkpointed_layer_checkpoints_all():
    """The nearest plan needs no more memory than the plan."""
    plan = uniform_plan(2, LayerStrategy())
    layers = tuple(LayerStrategy(checkpoint=i in (1, 2)) for i in range(5))

    lowered = lower(job_of(replace(plan, layers=layers)))
    assert all(s.checkpoint for s in lowered.plan.layers)
    (loss,) = lowered.losses
    assert loss.what == (
        "the plan has no checkpoints (layers 0 and 3-4), checkpoints (layers 1-2); DeepSpeed "
        "recomputes all layers or none, so it takes checkpoints"
    )
    assert any("gradient_checkpointing_enable" in note for note in lowered.notes)

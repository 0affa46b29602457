"""accelerate's configuration: its keys follow the plan, and what it cannot say is a loss."""

from __future__ import annotations

import json

import pytest

from autopar.errors import InputError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, VocabStrategy
from search.engines.engine import Lowered
from search.engines.huggingface.plan import lower
from tests.often import often
from tests.unit.export_plans import (
    check_lowered,
    job_of,
    jobs,
    lowered_or_refused,
    uniform_plan,
)


def document(lowered: Lowered) -> dict[str, object]:
    """Return the keys of the YAML, inner ones beside outer ones; every scalar is JSON too."""
    found: dict[str, object] = {}
    for line in lowered.files["autopar_accelerate.yaml"].splitlines():
        key, _, value = line.strip().partition(":")
        if not key.startswith("#"):
            found[key.removeprefix("parallelism_config_")] = json.loads(value) if value else {}
    return found


@often(40, 150, jobs(max_stages=1))
def test_lowered_plans_are_legal_and_every_change_is_a_loss(job):
    """The file's degrees are those of the plan that the exporter says it makes."""
    lowered = lowered_or_refused(lower, job)
    if lowered is None:
        return

    check_lowered(lower, job, lowered)
    near, found = lowered.plan, document(lowered)
    layer = near.layers[0]
    tensor, sequence = found.get("tp_size", 1), found.get("sp_size", 1)
    assert tensor * sequence == layer.tp
    assert (sequence > 1) == (layer.ulysses and layer.tp > 1)
    assert found.get("cp_size", 1) == layer.cp
    assert found["num_processes"] == near.world_size
    if "tp_size" in found:
        assert found["dp_replicate_size"] == 1
        size = found["dp_shard_size"] * tensor * sequence * layer.cp
        assert size == near.world_size
        if found["distributed_type"] == "MULTI_GPU":
            assert found["dp_shard_size"] == layer.cp == 1
    if found["distributed_type"] == "FSDP":
        assert found["fsdp_reshard_after_forward"] == layer.zero3
        assert found["fsdp_activation_checkpointing"] == layer.checkpoint
        assert found["dp_shard_size"] * layer.cp > 1


@pytest.mark.parametrize(
    ("world", "layer", "default", "kind"),
    [
        (1, LayerStrategy(), "ddp", "NO"),
        (4, LayerStrategy(), "ddp", "MULTI_GPU"),
        (4, LayerStrategy(), "zero2", "FSDP"),
        (4, LayerStrategy(zero3=True), "ddp", "FSDP"),
        (4, LayerStrategy(tp=2, ulysses=True), "zero2", "DEEPSPEED"),
        (2, LayerStrategy(tp=2), "ddp", "MULTI_GPU"),
    ],
)
def test_kinds(world, layer, default, kind):
    """What shards decides which engine accelerate starts."""
    plan = uniform_plan(world, layer, default_dp_type=default)
    lowered = lower(job_of(plan, sequence_parallel=False))

    assert lowered.losses == ()
    assert document(lowered)["distributed_type"] == kind


def test_replicas_beside_tensor_groups_become_zero2():
    """accelerate refuses DDP with tensor parallelism."""
    lowered = lower(job_of(uniform_plan(4, LayerStrategy(tp=2)), sequence_parallel=False))

    (loss,) = lowered.losses
    assert loss.field == "default_dp_type"
    assert loss.what == (
        "the plan has ddp; accelerate has no replicas beside tensor or context groups, so it "
        "takes zero2"
    )
    assert document(lowered)["fsdp_reshard_after_forward"] is False


def test_context_and_ulysses_exclude_each_other():
    """Both in one layer become a Ulysses degree of the same size."""
    layer = LayerStrategy(tp=2, cp=3, ulysses=True, zero3=True)
    vocab = VocabStrategy(tp=6, ulysses=True, zero3=True)
    lowered = lower(job_of(uniform_plan(6, layer, vocab)))

    assert {(s.tp, s.cp, s.ulysses) for s in lowered.plan.layers} == {(6, 1, True)}
    assert document(lowered)["sp_size"] == 6


def test_stages_are_refused():
    """There is no pipeline at all."""
    plan = uniform_plan(4, LayerStrategy(), num_stages=2, stage_sizes=(2, 3))

    with pytest.raises(InputError, match="accelerate has no pipeline, and the plan has 2 stages"):
        lower(job_of(plan))


@pytest.mark.parametrize(("precision", "name"), [("bf16", "bf16"), ("fp32", "no")])
def test_precision_and_accumulation(precision, name):
    """Micro-batches are steps of accumulation, which the launch hands over."""
    job = job_of(uniform_plan(8, LayerStrategy()), precision=precision)

    lowered = lower(job)
    assert document(lowered)["mixed_precision"] == name
    assert lowered.launch.startswith("ACCELERATE_GRADIENT_ACCUMULATION_STEPS=2 ")
    assert '--machine_rank "${NODE_RANK:?' in lowered.launch
    assert "batch_size=3" in lowered.notes[0]


def test_a_checkpoint_without_fsdp_is_a_note():
    """DDP has no key for it; the model has a switch."""
    lowered = lower(job_of(uniform_plan(2, LayerStrategy(checkpoint=True))))

    assert lowered.losses == ()
    assert any("gradient_checkpointing_enable" in note for note in lowered.notes)
    sharded = replace(lowered.plan, default_dp_type="zero2")
    assert document(lower(job_of(sharded)))["fsdp_activation_checkpointing"] is True

"""Every rule of legality, each broken once, with the arithmetic in the sentence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autopar.plans import (
    LayerStrategy,
    Plan,
    VocabStrategy,
    fewest_microbatches,
    layer_problems,
    tensor_degrees,
    violations,
)
from tests.unit.cli_results import PLAN, SPEC


def changed(**fields: Any) -> Plan:
    """Return the legal plan with some fields changed."""
    return dataclasses.replace(PLAN, **fields)


def with_layers(strategy: LayerStrategy, **fields: Any) -> Plan:
    """Return a one-stage plan with one strategy for all layers."""
    return changed(
        num_stages=1,
        stage_sizes=(4,),
        layers=(strategy,) * 4,
        **{"global_batch": 24, "num_microbatches": 1, **fields},
    )


def test_legal_plan_has_no_violation() -> None:
    """The plan that all cases below start from is legal."""
    assert violations(PLAN, SPEC, sequence_parallel=True) == ()


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (changed(layers=PLAN.layers[:3], stage_sizes=(2, 1)), "layers of the plan(3) != "),
        (changed(stage_sizes=(4,)), "entries of pp_division(1) != pp(2)"),
        (changed(stage_sizes=(2, 1)), "2 + 1 = 3 != layers(4)"),
        (changed(stage_sizes=(4, 0)), "stage 1 has 0 layers"),
        (
            changed(num_stages=8, stage_sizes=(1,) * 4 + (0,) * 4, num_microbatches=8),
            "pp(8) > layers(4)",
        ),
        (changed(world_size=9), "world_size(9) % pp(2) = 1 != 0"),
        (changed(num_microbatches=1), "1F1B needs micro-batches(1) >= pp(2)"),
        (changed(num_microbatches=5), "global_batch(16) % micro-batches(5) = 1 != 0"),
        (
            with_layers(LayerStrategy(tp=8), world_size=128),
            "global_batch(24) / (micro-batches(1) * dp(16)) = 1.5 samples",
        ),
        (
            with_layers(LayerStrategy(tp=8, cp=1), world_size=28),
            "tp(8) * cp(1) * dp(3) * pp(1) = 24 != world_size(28)",
        ),
        (with_layers(LayerStrategy(tp=3), world_size=24), "heads(16) % tp(3) = 1 != 0"),
        (
            with_layers(LayerStrategy(tp=3), world_size=24),
            "kv_heads(8) % tp(3) = 2 and tp(3) % kv_heads(8) = 3",
        ),
        (with_layers(LayerStrategy(tp=3), world_size=24), "ffn_hidden_size(4096) % tp(3) = 1"),
        (with_layers(LayerStrategy(tp=3), world_size=24), "seq_length(2048) % tp(3) = 2 != 0"),
        (
            with_layers(LayerStrategy(cp=3), world_size=24),
            "seq_length(2048) % (2 * cp(3)) = 2 != 0",
        ),
        (
            with_layers(LayerStrategy(tp=2, cp=3), world_size=24),
            "seq_length(2048) % (2 * cp(3) * tp(2)) = 8 != 0",
        ),
        (
            with_layers(LayerStrategy(), world_size=24, vocab=VocabStrategy(tp=3)),
            "embedding and head: seq_length(2048) % vtp(3) = 2 != 0",
        ),
        (
            with_layers(LayerStrategy(tp=8), world_size=8, vocab=VocabStrategy(tp=3)),
            "embedding and head: vtp(3) * dp(2) * pp(1) = 6 != world_size(8)",
        ),
        (
            with_layers(LayerStrategy(tp=8), global_batch=4, vocab=VocabStrategy(tp=1)),
            "embedding and head: global_batch(4) / (micro-batches(1) * dp(8)) = 0.5 samples",
        ),
    ],
)
def test_violation_shows_the_arithmetic(plan: Plan, expected: str) -> None:
    """Each broken rule is named with its numbers."""
    found = violations(plan, SPEC, sequence_parallel=True)

    assert any(expected in text for text in found), found


def test_sequence_parallelism_restricts_only_where_it_is_used() -> None:
    """Without it tensor parallelism does not shard the sequence; Ulysses always does."""
    spec = dataclasses.replace(SPEC, layers=(dataclasses.replace(SPEC.layers[0], seq_length=2047),))
    tensor = with_layers(LayerStrategy(tp=8), vocab=VocabStrategy(tp=8))
    ulysses = with_layers(LayerStrategy(tp=8, ulysses=True), vocab=VocabStrategy())

    assert violations(tensor, spec, sequence_parallel=False) == ()
    assert len(violations(tensor, spec, sequence_parallel=True)) == 2
    assert violations(ulysses, spec, sequence_parallel=False) == (
        "layers 0-3: seq_length(2047) % ulysses(8) = 7 != 0",
    )


def test_ulysses_does_not_shard_the_mlp() -> None:
    """ffn % t is a rule of tensor parallelism only."""
    layer = dataclasses.replace(SPEC.layers[0], ffn_hidden_size=4095)
    spec = dataclasses.replace(SPEC, layers=(layer,))

    assert (
        violations(with_layers(LayerStrategy(tp=8, ulysses=True)), spec, sequence_parallel=True)
        == ()
    )
    assert violations(with_layers(LayerStrategy(tp=8)), spec, sequence_parallel=True) == (
        "layers 0-3: ffn_hidden_size(4095) % tp(8) = 7 != 0",
    )


def test_unknown_sizes_are_not_checked() -> None:
    """A spec from documented files alone knows no heads."""
    layer = dataclasses.replace(
        SPEC.layers[0], num_heads=None, num_kv_heads=None, ffn_hidden_size=None, seq_length=2049
    )
    spec = dataclasses.replace(SPEC, layers=(layer,))
    plan = with_layers(LayerStrategy(tp=3), world_size=24, vocab=VocabStrategy(tp=3))

    assert violations(plan, spec, sequence_parallel=True) == ()


def test_gpipe_needs_no_full_pipeline() -> None:
    """m < p is legal for GPipe."""
    plan = changed(pipeline_type="gpipe", num_microbatches=1)

    assert violations(plan, SPEC, sequence_parallel=True) == ()


def test_equal_layers_are_reported_once() -> None:
    """A rule that all layers break is one sentence with their range."""
    fine = with_layers(LayerStrategy(tp=16), world_size=16)
    broken = with_layers(LayerStrategy(tp=32), world_size=32)

    assert violations(fine, SPEC, sequence_parallel=True) == ()
    found = violations(broken, SPEC, sequence_parallel=True)
    assert [text for text in found if "heads(16)" in text] == [
        "layers 0-3: heads(16) % tp(32) = 16 != 0"
    ]


def test_tensor_degrees_are_those_that_widths_allow() -> None:
    """Heads, key-value heads and the MLP's width; the sequence is asked of a strategy."""
    layer = SPEC.layers[0]

    assert tensor_degrees(layer) == (1, 2, 4, 8, 16)
    assert tensor_degrees(dataclasses.replace(layer, ffn_hidden_size=4100)) == (1, 2, 4)
    assert tensor_degrees(dataclasses.replace(layer, num_kv_heads=6)) == (1, 2)
    assert tensor_degrees(dataclasses.replace(layer, num_heads=None)) == (1,)
    found = list(layer_problems(layer, LayerStrategy(tp=16), sequence_parallel=True))
    assert found == []


@pytest.mark.parametrize(
    ("schedule", "stages", "fewest"), [("1f1b", 4, 4), ("1f1b", 1, 1), ("gpipe", 4, 1)]
)
def test_fewest_microbatches(schedule: Any, stages: int, fewest: int) -> None:
    """One for every stage of 1F1B, as many as one likes of GPipe."""
    assert fewest_microbatches(schedule, stages) == fewest

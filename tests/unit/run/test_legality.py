"""Every rule of legality, each broken once, with the arithmetic in the sentence."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.records import replace
from autopar.run.plan import (
    LayerStrategy,
    Plan,
    VocabStrategy,
    fewest_microbatches,
    layer_problems,
    refinements,
    tensor_degrees,
    violations,
)
from tests.unit.cli_results import PLAN, SPEC


def changed(**fields: Any) -> Plan:
    """Return the legal plan with some fields changed."""
    return replace(PLAN, **fields)


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
        (changed(world_size=9), "world size(9) % pp(2) = 1 != 0"),
        (changed(num_microbatches=1), "1f1b needs micro-batches(1) >= 2 with pp(2)"),
        (changed(num_microbatches=5), "global batch(16) % micro-batches(5) = 1 != 0"),
        (
            with_layers(LayerStrategy(tp=8), world_size=128),
            "global batch(24) % (micro-batches(1) * dp(16)) = 8 != 0",
        ),
        (
            with_layers(LayerStrategy(tp=8, cp=1), world_size=28),
            "world size(28) % (tp(8) * cp(1) * pp(1)) = 4 != 0",
        ),
        (with_layers(LayerStrategy(tp=3), world_size=24), "heads(16) % tp(3) = 1 != 0"),
        (
            with_layers(LayerStrategy(tp=3), world_size=24),
            "kv_heads(8) and tp(3) do not divide each other",
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
            "embedding and head: world size(8) % (vtp(3) * vcp(1) * pp(1)) = 2 != 0",
        ),
        (
            with_layers(LayerStrategy(tp=8), global_batch=4, vocab=VocabStrategy(tp=1)),
            "embedding and head: global batch(4) % (micro-batches(1) * dp(8)) = 4 != 0",
        ),
    ],
)
def test_violation_shows_the_arithmetic(plan: Plan, expected: str) -> None:
    """Each broken rule is named with its numbers."""
    found = violations(plan, SPEC, sequence_parallel=True)

    assert any(expected in text for text in found), found


EXPERTS = replace(SPEC, layers=(replace(SPEC.layers[0], num_experts=6, experts_per_token=2),))
INTERLEAVED: dict[str, Any] = {"pipeline_type": "interleaved", "num_chunks": 2}


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (LayerStrategy(ep=4), "experts(6) % ep(4) = 2 != 0"),
        (LayerStrategy(ep=5), "world size(24) % (etp(1) * ep(5) * pp(1)) = 4 != 0"),
        (LayerStrategy(ep=3, etp=5), "ffn_hidden_size(4096) % etp(5) = 1 != 0"),
        (LayerStrategy(ep=3, etp=16), "world size(24) % (etp(16) * ep(3) * pp(1)) = 24 != 0"),
        (
            LayerStrategy(ep=2, checkpoint=True, recompute=("moe",)),
            (
                "the whole layer is recomputed, so moe cannot be recomputed "
                "separately. Remove one of them"
            ),
        ),
    ],
)
def test_experts_have_a_grid_of_their_own(strategy: LayerStrategy, expected: str) -> None:
    """Expert degrees divide the ranks of a stage, the experts and their width, and nothing else."""
    found = violations(with_layers(strategy, world_size=24), EXPERTS, sequence_parallel=True)

    assert any(expected in text for text in found), found


def test_the_two_grids_of_a_stage_share_its_ranks_alone() -> None:
    """Expert groups lie across tensor, context and data groups (Megatron-Core's folding)."""
    folded = LayerStrategy(tp=4, cp=2, ep=6)

    assert not violations(with_layers(folded, world_size=24), EXPERTS, sequence_parallel=True)
    dense = violations(with_layers(folded, world_size=24), SPEC, sequence_parallel=True)
    assert dense == ("layers 0-3: ep(6) needs a model with experts",)


def test_experts_may_be_of_a_width_that_the_tensor_degree_does_not_divide() -> None:
    """Whole experts are not divided by the tensor group; without a degree of their own they are."""
    layer = replace(EXPERTS.layers[0], ffn_hidden_size=4095)
    spec = replace(EXPERTS, layers=(layer,))

    def of(strategy: LayerStrategy) -> tuple[str, ...]:
        return violations(with_layers(strategy, world_size=24), spec, sequence_parallel=True)

    assert of(LayerStrategy(tp=8, ep=2)) == of(LayerStrategy(tp=8, etp=1)) == ()
    assert of(LayerStrategy(tp=8)) == ("layers 0-3: ffn_hidden_size(4095) % tp(8) = 7 != 0",)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_chunks": 2}, "num_chunks(2)"),
        ({"pipeline_type": "looped_bfs"}, "looped_bfs"),
        ({"pipeline_type": "dual_pipe_v"}, "dual_pipe_v"),
        (
            {**INTERLEAVED, "pipeline_type": "dual_pipe_v", "num_microbatches": 2},
            "dual_pipe_v needs micro-batches(2) >= 4 with pp(2)",
        ),
        (
            {**INTERLEAVED, "num_microbatches": 1},
            "interleaved needs micro-batches(1) >= 2 with pp(2)",
        ),
        (
            {**INTERLEAVED, "global_batch": 24, "num_microbatches": 3},
            "pp(2) = 1",
        ),
        ({**INTERLEAVED, "stage_sizes": (1, 3)}, "layers of stage 0(1) % num_chunks(2) = 1 != 0"),
        (
            {**INTERLEAVED, "chunk_sizes": (1, 2, 1)},
            "entries of chunk_sizes(3) != pp(2) * num_chunks(2)",
        ),
        (
            {**INTERLEAVED, "chunk_sizes": (1, 2, 0, 1)},
            "layers in chunks of stage 0(1) != layers of the stage(2)",
        ),
        ({**INTERLEAVED, "chunk_sizes": (3, 1, -1, 1)}, "chunk 2 has -1 layers"),
    ],
)
def test_chunks_fill_the_stages(changes: dict[str, Any], expected: str) -> None:
    """A schedule runs so many chunks, and they have the layers of their stages."""
    found = violations(changed(**changes), SPEC, sequence_parallel=True)

    assert any(expected in text for text in found), found


def test_layers_of_chunks_go_round_the_stages_or_there_and_back() -> None:
    """Of four chunks on two stages the third is on the first stage, in a V on the second."""
    loop = changed(**INTERLEAVED, chunk_sizes=(0, 1, 2, 1))
    v_shape = changed(pipeline_type="zero_bubble_v", num_chunks=2)

    assert violations(loop, SPEC, sequence_parallel=True) == ()
    assert violations(v_shape, SPEC, sequence_parallel=True) == ()
    assert loop.stage_of_layer() == (1, 0, 0, 1)
    assert v_shape.stage_of_layer() == (0, 1, 1, 0)
    assert v_shape.chunks == (1, 1, 1, 1)


def test_vocabulary_may_be_split_by_context_too() -> None:
    """Its tokens are the two pieces that a rank of a ring has."""
    plan = with_layers(LayerStrategy(cp=3), world_size=24, vocab=VocabStrategy(tp=2, cp=3))
    found = violations(plan, SPEC, sequence_parallel=True)

    assert "embedding and head: seq_length(2048) % (2 * vcp(3) * vtp(2)) = 8 != 0" in found


def test_strategies_have_an_order() -> None:
    """That of their fields; a degree that is not given comes first."""
    ordered = [
        LayerStrategy(),
        LayerStrategy(recompute=("mlp",)),
        LayerStrategy(etp=1),
        LayerStrategy(ep=2),
        LayerStrategy(checkpoint=True),
        LayerStrategy(tp=2),
    ]

    mixed = ordered[3:] + ordered[:3]
    assert sorted(mixed) == ordered


def test_a_plan_says_in_words_what_few_programs_know() -> None:
    """Nothing of a plan of degrees, ZeRO and checkpoints; everything else in turn."""
    assert refinements(PLAN) == ()
    strategy = LayerStrategy(tp=2, ep=4, etp=2, recompute=("core_attn", "moe"))
    plan = changed(
        layers=(strategy,) * 4, vocab=VocabStrategy(cp=2), pipeline_type="looped_bfs", num_chunks=2
    )

    assert refinements(plan) == (
        "expert degree 4",
        "expert tensor degree 2",
        "recomputation of core_attn, moe",
        "context degree 2 of embedding and head",
        "schedule looped_bfs",
        "2 chunks a stage",
    )
    assert strategy.label(2, "ddp") == "tp2-ep4-etp2-dp2-core_attn+moe"


def test_sequence_parallelism_restricts_only_where_it_is_used() -> None:
    """Without it tensor parallelism does not shard the sequence; Ulysses always does."""
    spec = replace(SPEC, layers=(replace(SPEC.layers[0], seq_length=2047),))
    tensor = with_layers(LayerStrategy(tp=8), vocab=VocabStrategy(tp=8))
    ulysses = with_layers(LayerStrategy(tp=8, ulysses=True), vocab=VocabStrategy())

    assert violations(tensor, spec, sequence_parallel=False) == ()
    assert len(violations(tensor, spec, sequence_parallel=True)) == 2
    assert violations(ulysses, spec, sequence_parallel=False) == (
        "layers 0-3: seq_length(2047) % ulysses(8) = 7 != 0",
    )


def test_ulysses_does_not_shard_the_mlp() -> None:
    """ffn % t is a rule of tensor parallelism only."""
    layer = replace(SPEC.layers[0], ffn_hidden_size=4095)
    spec = replace(SPEC, layers=(layer,))

    assert (
        violations(with_layers(LayerStrategy(tp=8, ulysses=True)), spec, sequence_parallel=True)
        == ()
    )
    assert violations(with_layers(LayerStrategy(tp=8)), spec, sequence_parallel=True) == (
        "layers 0-3: ffn_hidden_size(4095) % tp(8) = 7 != 0",
    )


def test_unknown_sizes_are_not_checked() -> None:
    """A spec from documented files alone knows no heads."""
    layer = replace(
        SPEC.layers[0], num_heads=None, num_kv_heads=None, ffn_hidden_size=None, seq_length=2049
    )
    spec = replace(SPEC, layers=(layer,))
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
    assert tensor_degrees(replace(layer, ffn_hidden_size=4100)) == (1, 2, 4)
    assert tensor_degrees(replace(layer, num_kv_heads=6)) == (1, 2)
    assert tensor_degrees(replace(layer, num_heads=None)) == (1,)
    found = list(layer_problems(layer, LayerStrategy(tp=16), sequence_parallel=True))
    assert found == []


@pytest.mark.parametrize(
    ("schedule", "stages", "fewest"), [("1f1b", 4, 4), ("1f1b", 1, 1), ("gpipe", 4, 1)]
)
def test_fewest_microbatches(schedule: Any, stages: int, fewest: int) -> None:
    """One for every stage of 1F1B, as many as one likes of GPipe."""
    assert fewest_microbatches(schedule, stages) == fewest

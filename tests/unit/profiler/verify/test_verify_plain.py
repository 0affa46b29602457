"""Plans that differ only in words are one plan: what two ranks have nothing to shard of."""

from __future__ import annotations

import pytest

from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from profiler.verify.plans import describe, plain_plan

TENSOR = Plan(
    world_size=2,
    num_stages=1,
    stage_sizes=(2,),
    layers=(LayerStrategy(tp=2),) * 2,
    vocab=VocabStrategy(tp=2),
    global_batch=8,
    num_microbatches=1,
)
"""Tensor parallel over all ranks: no two ranks hold the same shard."""


@pytest.mark.parametrize(
    "words",
    [
        {"default_dp_type": "zero2"},
        {"layers": (LayerStrategy(tp=2, zero3=True),) * 2},
        {"vocab": VocabStrategy(tp=2, zero3=True)},
        {"layers": (LayerStrategy(tp=2, strided=True),) * 2},
        {"pipeline_type": "gpipe"},
    ],
)
def test_words_that_change_nothing_are_dropped(words: dict[str, object]) -> None:
    """ZeRO without anything to shard, strides of everybody, GPipe of one micro-batch."""
    other = replace(TENSOR, **words)
    assert other != TENSOR
    assert plain_plan(other) == TENSOR == plain_plan(TENSOR)


@pytest.mark.parametrize(
    "plan",
    [
        replace(TENSOR, default_dp_type="zero2", vocab=VocabStrategy()),
        replace(TENSOR, vocab=VocabStrategy(zero3=True)),
        replace(TENSOR, layers=(LayerStrategy(tp=2, ulysses=True, zero3=True),) * 2),
        replace(TENSOR, layers=(LayerStrategy(tp=2), LayerStrategy(zero3=True))),
        replace(TENSOR, pipeline_type="gpipe", num_microbatches=2),
        replace(TENSOR, world_size=4, layers=(LayerStrategy(tp=2, strided=True),) * 2),
    ],
)
def test_words_that_change_something_stay(plan: Plan) -> None:
    """Something is sharded, or in another order, or elsewhere."""
    assert plain_plan(plan) == plan


def test_stages_of_one_rank_shard_nothing() -> None:
    """ZeRO of any kind is ddp there, and the label says so."""
    layers = (LayerStrategy(zero3=True), LayerStrategy(ulysses=True))
    stages = replace(
        TENSOR,
        num_stages=2,
        stage_sizes=(1, 1),
        layers=layers,
        vocab=VocabStrategy(ulysses=True, zero3=True),
        num_microbatches=2,
        default_dp_type="zero2",
    )
    plain = plain_plan(stages)
    assert plain.layers == (LayerStrategy(),) * 2
    assert (plain.vocab, plain.default_dp_type) == (VocabStrategy(), "ddp")
    assert describe(plain) == "pp2 m2"

"""Predictions of plans from other tools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autopar.documents.spec import load_spec
from autopar.rates.card import estimate_hardware
from autopar.rates.model import estimate_model
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from autopar.units import GIB
from search.planning.cost.model import CostModel
from search.planning.cost.pipeline import evaluate, replica_step_times
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import predict
from search.request.options import SearchOptions


def planner(model: str = "llama2-7b", nodes: int = 1, gib: float = 80.0, **options: Any) -> Planner:
    spec = load_spec(model)
    return Planner.from_documents(
        spec,
        estimate_model(spec, "h100"),
        estimate_hardware("h100", num_nodes=nodes, gpus_per_node=8),
        SearchOptions(memory_constraint_bytes=gib * GIB, time_profile_mode="batch", **options),
    )


def test_zero3_in_a_group_of_one_shards_nothing() -> None:
    """Peers write ZeRO-3 where no data group is left; such a plan costs what it costs without."""
    plain = Plan(
        world_size=8,
        num_stages=1,
        stage_sizes=(32,),
        layers=(LayerStrategy(tp=8),) * 32,
        vocab=VocabStrategy(tp=8),
        global_batch=8,
        num_microbatches=1,
    )
    marked = replace(
        plain,
        layers=(LayerStrategy(tp=8, zero3=True),) * 32,
        vocab=VocabStrategy(tp=8, zero3=True),
    )
    expected, actual = planner().evaluate(plain), planner().evaluate(marked)

    assert actual.legal
    assert actual.problems == expected.problems
    assert actual.step_time_s == expected.step_time_s
    assert [s.allocated_bytes for s in actual.stages] == [
        s.allocated_bytes for s in expected.stages
    ]


def test_vocabulary_degrees_do_not_depend_on_heads() -> None:
    """gpt2-xl has 25 heads; its padded vocabulary still splits over 2, 4 and 8 ranks."""
    subject = planner("gpt2-xl")
    pinned = Planner.from_documents(
        subject.spec,
        subject.profile,
        subject.hardware,
        replace(subject.options, pin=("vtp=8",), sequence_parallel=True),
    )

    result = pinned.solve()

    assert result.plan is not None
    assert result.plan.vocab.tp == 8


def _with_vocab(degree: int) -> Plan:
    return Plan(
        world_size=8,
        num_stages=1,
        stage_sizes=(32,),
        layers=(LayerStrategy(tp=8),) * 32,
        vocab=VocabStrategy(tp=degree),
        global_batch=32,
        num_microbatches=2,
    )


def test_an_impossible_vocabulary_degree_has_no_price() -> None:
    """Three ranks do not divide eight: no time, not a faster one, and every reason is given."""
    found = planner().evaluate(_with_vocab(3))

    assert not found.legal
    assert not found.fits
    assert found.step_time_s == float("inf")
    assert any("vtp(3)" in problem for problem in found.problems)
    assert any(
        "cannot be estimated" in problem and "degree 3" in problem for problem in found.problems
    )


def test_an_unmeasured_vocabulary_degree_has_no_price() -> None:
    """A legal degree without an entry in the memory table is not free either."""
    subject = planner()
    memory = {
        position: {
            lengths: replace(
                entry,
                model_state_bytes={1: entry.model_state_bytes[1]},
                activation_bytes_per_sample={1: entry.activation_bytes_per_sample[1]},
            )
            for lengths, entry in table.items()
        }
        for position, table in subject.profile.other_memory.items()
    }
    subject = Planner.from_documents(
        subject.spec,
        replace(subject.profile, other_memory=memory),
        subject.hardware,
        subject.options,
    )

    found = subject.evaluate(_with_vocab(8))

    assert (found.legal, found.fits, found.step_time_s) == (False, False, float("inf"))
    assert any("degree 8" in problem for problem in found.problems)


def test_alternating_rank_orders_costs_more_than_either() -> None:
    """Between strided and neighbouring tensor ranks the activations have to move."""
    near, far = LayerStrategy(tp=2, zero3=True), LayerStrategy(tp=2, zero3=True, strided=True)
    subject = planner()

    def step_s(layers: tuple[LayerStrategy, ...]) -> float:
        return subject.evaluate(
            replace(_with_vocab(1), layers=layers, vocab=VocabStrategy())
        ).step_time_s

    assert step_s((near, far) * 16) > 1.001 * max(step_s((near,) * 32), step_s((far,) * 32))


@pytest.mark.parametrize(
    ("model", "batch", "options"),
    [
        ("llama2-7b", 16, {}),
        ("llama2-7b", 512, {}),
        ("llama2-7b", 64, {"nodes": 2, "gib": 16, "sp_space": "tp+sp", "strided_tp": True}),
        # tied weights, and a pipeline
        ("gpt2-xl", 64, {"nodes": 4, "gib": 6, "pipeline_type": "gpipe"}),
        # two layer types
        ("t5-3b", 32, {"nodes": 2, "gib": 12, "sp_space": "tp+sp", "default_dp_type": "any"}),
        ("mistral-7b", 2048, {"nodes": 2, "gib": 24, "sp_space": "tp+sp", "max_cp_deg": 4}),
    ],
)
def test_a_searched_plan_has_the_figures_and_notes_of_one_that_is_given(
    model: str, batch: int, options: dict[str, Any]
) -> None:
    """Its rows are those of the search, or priced again: neither is seen in the answer."""
    session = planner(model, **options)
    found = session.solve(global_batch_sizes=[batch])
    assert found.plan is not None
    # a model that has priced nothing else
    cost = CostModel(session.spec, session.profile, session.hardware, session.options)

    alone = predict(cost, found.plan, session.options.memory_constraint_bytes)

    assert alone == found.prediction
    assert tuple(cost.notes) == found.notes
    assert tuple(cost.defaults_used) == found.defaults_used


def test_every_replica_of_a_plan_is_its_step_with_the_times_of_the_replica() -> None:
    """All replicas at once cost what the plan costs on tables of each, one after the other."""
    session = planner()
    found = session.solve(global_batch_sizes=[32])
    assert found.plan is not None
    plan = replace(
        found.plan,
        num_stages=4,
        stage_sizes=(7, 9, 8, 8),
        num_microbatches=4,
        layers=(LayerStrategy(tp=2), LayerStrategy(checkpoint=True)) * 16,
    )
    strategies = tuple(sorted(set(plan.layers)))
    index = [strategies.index(s) for s in plan.layers]
    rng = np.random.default_rng(3)
    for pipeline in ("1f1b", "gpipe"):
        tables = session._cost.tables(
            strategies, [plan.vocab], [(4, 8, "ddp")], [(0, 4)], pipeline, price_illegal=True
        )
        names = ("forward_s", "backward_s", "tail_s")
        drawn = [rng.uniform(0.5, 2.0, (5, 1, 1)) * getattr(tables, name) for name in names]
        shape = {"num_microbatches": 4, "stage_sizes": plan.stage_sizes, "strategy_index": index}

        together = replica_step_times(tables, tuple(drawn), None, **shape)

        for r, time_s in enumerate(together):
            times = {name: part[r : r + 1] for name, part in zip(names, drawn, strict=True)}
            one = evaluate(replace(tables, **times), table=0, vocab_index=0, **shape)
            # sums of several Pythons differ in their last bit
            assert time_s == pytest.approx(one.step_time_s, rel=1e-14)

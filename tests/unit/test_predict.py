"""Predictions of plans that somebody else made."""

from __future__ import annotations

from dataclasses import replace

from autopar.documents.spec import load_spec
from autopar.estimate import estimate_hardware, estimate_model
from autopar.plans import LayerStrategy, Plan, VocabStrategy
from search.options import SearchOptions
from search.planner.planner import Planner
from search.planner.prediction import allocation_budget


def planner(model: str = "llama2-7b") -> Planner:
    spec = load_spec(model)
    return Planner.from_documents(
        spec,
        estimate_model(spec, "h100"),
        estimate_hardware("h100", num_nodes=1, gpus_per_node=8),
        SearchOptions(memory_constraint_bytes=80 * 2.0**30, time_profile_mode="batch"),
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


def test_the_allocation_budget_is_the_largest_that_fits() -> None:
    """One byte more than the budget reserves more than the constraint."""
    from search.cost.memory import reserved_bytes

    options = SearchOptions()
    for memory in (2**34, 24 * 2**30 + 1, 80 * 10**9):
        budget = allocation_budget(memory, options)
        assert reserved_bytes(budget, options) <= memory < reserved_bytes(budget + 1, options)


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
    assert any("no price" in problem and "degree 3" in problem for problem in found.problems)


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

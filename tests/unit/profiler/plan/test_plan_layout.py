"""The cube of a plan: axes, groups of consecutive and strided ranks, and what has no cube."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.records import replace
from autopar.run.plan import LayerStrategy, Plan, VocabStrategy
from profiler.plan.arithmetic import Cube, Layout, check_job, cube_of, layer_layout, vocab_layout
from profiler.plan.job import PlanJob
from tests.often import often
from tests.plan_cases import LLAMA, MOE, T5, make_job

_L = LayerStrategy
Groups = set[tuple[int, ...]]


def _plan(world: int, *layers: LayerStrategy, stages: int = 1, vocab: int = 1) -> Plan:
    return Plan(
        world_size=world,
        num_stages=stages,
        stage_sizes=(len(layers),) * stages,
        layers=layers * stages,
        vocab=VocabStrategy(tp=vocab),
        global_batch=world,
        num_microbatches=stages,
    )


def _consecutive(ranks: int, degree: int) -> Groups:
    return {tuple(range(first, first + degree)) for first in range(0, ranks, degree)}


def _strided(ranks: int, degree: int) -> Groups:
    stride = ranks // degree
    return {tuple(range(first, ranks, stride)) for first in range(stride)}


@pytest.mark.parametrize(
    ("plan", "factors"),
    [
        (_plan(1, _L()), (1,)),
        (_plan(8, _L()), (2, 2, 2)),
        (_plan(16, _L(tp=4), _L(tp=2, strided=True), stages=2), (2, 2, 2)),
        (_plan(6, _L(tp=2)), (3, 2)),
        (_plan(6, _L(tp=3)), (2, 3)),
        (_plan(6, _L(tp=2, strided=True)), (2, 3)),
        (_plan(6, _L(tp=6)), (3, 2)),
        (_plan(12, _L(tp=3), _L(tp=6)), (2, 2, 3)),
        (_plan(12, _L(tp=2), _L(tp=6)), (2, 3, 2)),
        (_plan(12, _L(tp=4), vocab=2), (3, 2, 2)),
        (_plan(12, _L(tp=4, strided=True), vocab=3), (2, 2, 3)),
        (_plan(7, _L(tp=7)), (7,)),
    ],
)
def test_axes_are_prime_factors_in_an_order_that_fits_all_degrees(
    plan: Plan, factors: tuple[int, ...]
) -> None:
    assert cube_of(plan).factors == factors


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (
            _plan(6, _L(tp=2), _L(tp=3)),
            (
                "the consecutive groups of 2 of layer 0 and the consecutive "
                "groups of 3 of layer 1 do not fit on one mesh of 6 ranks (2 "
                "does not divide 3). Use degrees that divide each other"
            ),
        ),
        (
            _plan(12, _L(tp=4), vocab=6),
            (
                "the consecutive groups of 4 of layer 0 and the groups of 6 of "
                "embedding and head do not fit on one mesh of 12 ranks (4 does "
                "not divide 6). Use degrees that divide each other"
            ),
        ),
        (
            _plan(6, _L(tp=2), _L(tp=2, strided=True)),
            (
                "the consecutive groups of 2 of layer 0 and the strided groups "
                "of 2 of layer 1 do not fit on one mesh of 6 ranks (2 does not "
                "divide 3). Use degrees that divide each other"
            ),
        ),
        (
            _plan(6, _L(), stages=4),
            "world_size(6) % pp(4) = 2 != 0. Use a number of stages that divides the ranks",
        ),
    ],
)
def test_degrees_that_fit_on_no_mesh_are_refused(plan: Plan, sentence: str) -> None:
    with pytest.raises(InputError) as caught:
        cube_of(plan)
    assert str(caught.value) == sentence


def test_places_on_the_axes() -> None:
    cube = Cube(factors=(2, 3))
    assert [cube.coordinates(rank) for rank in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert cube.num_ranks == 6
    assert cube.size((1,)) == 3
    assert cube.size(()) == 1
    assert [cube.index(rank, (1,)) for rank in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [cube.index(rank, (0, 1)) for rank in range(6)] == list(range(6))
    assert [cube.index(rank, ()) for rank in range(6)] == [0] * 6
    assert cube.groups((0,)) == ((0, 3), (1, 4), (2, 5))
    assert cube.groups(()) == ((0,), (1,), (2,), (3,), (4,), (5,))


@st.composite
def _plans(draw: st.DrawFn) -> Plan:
    """Plans whose groups, consecutive and strided, are chains of divisors of one another."""
    primes = draw(st.lists(st.sampled_from([2, 2, 2, 3, 5]), min_size=1, max_size=4))
    ranks = math.prod(primes)
    sizes = [math.prod(primes[:k]) for k in range(len(primes) + 1)]
    layers = []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.sampled_from(sizes))
        if draw(st.booleans()):
            layers.append(_L(tp=ranks // size, strided=True))
        else:
            layers.append(_L(tp=size, ulysses=draw(st.booleans())))
    stages = draw(st.sampled_from([1, 2]))
    return _plan(ranks * stages, *layers, stages=stages, vocab=draw(st.sampled_from(sizes)))


@often(25, 100, _plans(), st.booleans())
def test_groups_are_the_consecutive_and_strided_ranks_of_every_degree(
    plan: Plan, sequence_parallel: bool
) -> None:
    cube = cube_of(plan)
    ranks = plan.world_size // plan.num_stages
    assert cube.num_ranks == ranks
    job = PlanJob(plan=plan, spec=LLAMA, sequence_parallel=sequence_parallel)
    for index, strategy in enumerate(plan.layers):
        layout = layer_layout(job, cube, index)
        t = strategy.tp
        expected = _strided(ranks, t) if strategy.strided else _consecutive(ranks, t)
        others = (
            _consecutive(ranks, ranks // t) if strategy.strided else _strided(ranks, ranks // t)
        )
        _check_groups(layout, expected, others)
    vocab = vocab_layout(job, cube)
    _check_groups(vocab, _consecutive(ranks, vocab.degree), _strided(ranks, ranks // vocab.degree))
    assert vocab.degree == plan.vocab.tp


def _check_groups(layout: Layout, tensor: Groups, data: Groups) -> None:
    cube = layout.cube
    found = cube.groups(layout.tensor_axes)
    assert set(found) == tensor
    assert set(cube.groups(layout.data_axes)) == data
    assert layout.degree * layout.data_degree == cube.num_ranks
    for group in found:  # the order of a group is that of its pieces
        assert [cube.index(rank, layout.tensor_axes) for rank in group] == list(range(len(group)))


@pytest.mark.parametrize(
    ("strategy", "sequence_parallel", "expected"),
    [
        (_L(tp=2), True, ("sp", True, True, 4, False)),
        (_L(tp=2), False, ("tp", True, False, 4, False)),
        (_L(tp=2, ulysses=True), False, ("ulysses", False, True, 8, False)),
        (_L(), True, ("sp", False, False, 8, False)),
        (_L(tp=8, zero3=True), True, ("sp", True, True, 1, False)),  # nothing left to divide
        (_L(tp=8, ulysses=True, zero3=True), True, ("ulysses", False, True, 8, True)),
        (_L(tp=4, zero3=True), True, ("sp", True, True, 2, True)),
    ],
)
def test_what_a_strategy_divides(
    strategy: LayerStrategy, sequence_parallel: bool, expected: tuple[object, ...]
) -> None:
    job = make_job(8, strategy, sequence_parallel=sequence_parallel)
    layout = layer_layout(job, cube_of(job.plan), 0)
    assert expected == (
        layout.kind,
        layout.splits_weights,
        layout.splits_sequence,
        layout.sync_degree,
        layout.is_sharded,
    )


@pytest.mark.parametrize(
    ("zero2", "zero3", "expected"),
    [(False, False, "ddp"), (True, False, "zero2"), (True, True, "zero3"), (False, True, "zero3")],
)
def test_zero_of_layers_and_of_the_vocabulary(zero2: bool, zero3: bool, expected: str) -> None:
    vocab = VocabStrategy(zero3=zero3)
    job = make_job(2, _L(zero3=zero3), vocab=vocab, zero2=zero2)
    cube = check_job(job)
    assert layer_layout(job, cube, 0).zero == expected
    assert vocab_layout(job, cube).zero == expected


def test_what_is_not_run_is_refused_in_one_sentence() -> None:
    with pytest.raises(InputError, match=r"^the plan cannot run: layers 0-3: heads\(4\) % tp\(8\)"):
        check_job(make_job(8, _L(tp=8)))
    crossing = make_job(2, _L(), _L(), _L(cp=2), _L(), model=T5)
    with pytest.raises(InputError, match=r"^layer 2 has cross-attention .* context degree 1$"):
        check_job(crossing)
    with pytest.raises(InputError, match=r"^layer 0 has expert tensor degree 2 with expert degr"):
        check_job(make_job(4, _L(ep=2, etp=2), model=MOE))
    with pytest.raises(InputError, match=r"whole experts .* Remove --no-sequence-parallel$"):
        check_job(make_job(2, _L(tp=2, ep=2), model=MOE, sequence_parallel=False))
    late = make_job(2, _L(), stages=(2, 2), v=2, m=4)
    late = replace(late, plan=replace(late.plan, pipeline_type="interleaved_zero_bubble"))
    with pytest.raises(InputError, match=r"^the plan has schedule interleaved_zero_bub"):
        check_job(late)
    assert check_job(make_job(2, _L(tp=2), model=MOE)) == Cube(factors=(2,))

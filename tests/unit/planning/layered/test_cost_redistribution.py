"""Redistribution between layouts and transfer between stages."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopar.run.plan import LayerStrategy, VocabStrategy
from search.planning.cost.communication import Groups, batched_prices
from search.planning.cost.tables import ActivationLayout
from search.planning.cost.time import (
    Exchange,
    layout_of,
    plan_exchange,
    redistribution,
    send_s,
)
from tests.cost_cases import toy_hardware

X = np.array([[8e6], [2e6]])  # bytes of the fully sharded activation, two tables, one type


def layout(shards: int, cp: int = 1, replicas: int = 1, strided: bool = False) -> ActivationLayout:
    """Return a layout in short."""
    return ActivationLayout(sequence_shards=shards, cp=cp, replicas=replicas, strided=strided)


def costs(*layouts: ActivationLayout) -> tuple[np.ndarray, np.ndarray]:
    """Return forward and backward redistribution of the first table, (Y, Y)."""
    stages = np.array([1, 1], dtype=np.int64)
    groups = Groups(toy_hardware(), print)
    price = redistribution(layouts, X, stages, 8, groups)
    forward, backward = batched_prices(groups, price)[0]
    assert forward.shape == (2, 1, len(layouts), len(layouts))
    np.testing.assert_allclose(forward[1], forward[0] / 4)
    return forward[0, 0], backward[0, 0]


def a2a(size: int, num_bytes: float = 8e6) -> float:
    """Return an all-to-all (or all-gather) in one node of 100 GB/s."""
    return (size - 1) / size * num_bytes / 100e9


def test_layouts() -> None:
    """SP and Ulysses of one degree share a layout; TP without SP is replicated."""
    tp, ulysses = LayerStrategy(tp=4, cp=2), LayerStrategy(tp=4, cp=2, ulysses=True)

    assert layout_of(tp, sequence_parallel=True) == layout(8, 2)
    assert layout_of(ulysses, sequence_parallel=False) == layout(8, 2)
    assert layout_of(tp, sequence_parallel=False) == layout(2, 2, 4)
    assert layout_of(VocabStrategy(tp=4).as_layer(), sequence_parallel=False) == layout(1, 1, 4)
    assert layout_of(
        VocabStrategy(tp=4, ulysses=True).as_layer(), sequence_parallel=False
    ) == layout(4)


def test_equal_layouts_are_free() -> None:
    """Nothing moves."""
    layouts = [layout(q, c, r) for q, c, r in itertools.product((1, 2), (1, 2), (1, 2))]
    forward, backward = costs(*layouts)

    assert not forward.diagonal().any()
    assert not backward.diagonal().any()


def test_sharded_to_sharded() -> None:
    """All-to-all over the ratio, both ways; 2 and 3 shards meet in groups of 6."""
    forward, backward = costs(layout(2), layout(8), layout(1))

    assert forward[0, 1] == forward[1, 0] == backward[0, 1] == pytest.approx(a2a(4))
    assert forward[1, 2] == pytest.approx(a2a(8))
    assert plan_exchange(layout(2), layout(3))[0][0][0].size == 6


def test_another_context_degree() -> None:
    """Only cp differs: over the larger; the shards differ as well: the slower of both."""
    forward, _ = costs(layout(4, 1), layout(4, 4), layout(2, 1))

    assert forward[0, 1] == forward[1, 0] == pytest.approx(a2a(4))
    assert forward[2, 1] == pytest.approx(a2a(4))
    assert forward[0, 2] == pytest.approx(a2a(2))


def test_replicas() -> None:
    """Growing replicas gather forward and slice backward; shrinking ones the reverse."""
    forward, backward = costs(layout(1, 1, 2), layout(1, 1, 8))

    assert forward[0, 1] == pytest.approx(a2a(4, 8 * 8e6))
    assert backward[0, 1] == 0.0
    assert (forward[1, 0], backward[1, 0]) == (0.0, pytest.approx(a2a(4, 8 * 8e6)))


def test_replicas_that_do_not_divide_each_other() -> None:
    """2 and 3 copies: samples are missing in both directions."""
    forward, backward = plan_exchange(layout(1, 1, 2), layout(1, 1, 3))

    assert forward == backward != ()


def test_mixed() -> None:
    """Replicated over 4 to sharded over 4 is a slice; over 8 an all-to-all comes on top."""
    forward, backward = costs(layout(1, 1, 4), layout(4), layout(8))

    assert forward[0, 1] == 0.0
    assert backward[0, 1] == pytest.approx(a2a(4, 4 * 8e6))
    assert forward[1, 0] == pytest.approx(a2a(4, 4 * 8e6))
    assert forward[0, 2] == pytest.approx(a2a(2))
    assert backward[0, 2] == pytest.approx(a2a(2) + a2a(4, 4 * 8e6))


def test_strides() -> None:
    """The group steps over ranks that already share a shard; neighbours when cp differs."""
    assert plan_exchange(layout(2), layout(8))[0] == (
        (Exchange(operation="all2all", size=4, stride=2, multiple=1),),
    )
    assert plan_exchange(layout(2), layout(8, 2))[0][0][0].stride == 1
    assert plan_exchange(layout(1, 1, 2), layout(1, 1, 4))[0][0][0].stride == 2


def test_send() -> None:
    """Nothing with one stage; replicated activations are sent whole by every rank."""
    stages = np.array([1, 4], dtype=np.int64)
    found = send_s([layout(4), layout(1, 1, 4)], X, stages, Groups(toy_hardware(), print))

    np.testing.assert_allclose(found[0, 0], [0.0, 0.0])
    np.testing.assert_allclose(found[1, 0], [2e6 / 50e9, 4 * 2e6 / 50e9])


def test_strided_layouts() -> None:
    """Only tensor ranks can be strided; the embedding's never are."""
    strided = LayerStrategy(tp=2, strided=True)

    assert layout_of(strided, sequence_parallel=True) == layout(2, strided=True)
    assert layout_of(strided, sequence_parallel=False) == layout(1, 1, 2, strided=True)
    assert not layout_of(LayerStrategy(strided=True), sequence_parallel=True).strided
    assert not layout_of(VocabStrategy(tp=2).as_layer(), sequence_parallel=True).strided


def test_another_rank_order_moves_everything_over_the_stage() -> None:
    """Strided 2, neighbouring 2, one rank: all-to-all over 8, both ways; strided 4 as well."""
    forward, backward = costs(
        layout(2), layout(2, strided=True), layout(1), layout(4, strided=True), layout(4)
    )

    for move in (forward, backward):
        assert move[0, 1] == move[1, 0] == pytest.approx(a2a(8))
        assert move[1, 2] == move[2, 1] == pytest.approx(a2a(8))
        assert move[1, 3] == pytest.approx(a2a(8))
        assert move[1, 1] == 0.0
        assert move[0, 4] == pytest.approx(a2a(2))


def test_rank_order_with_copies() -> None:
    """Every rank moves all its copies, or gathers them where that takes longer."""
    forward, backward = costs(
        layout(1, 1, 2), layout(1, 1, 2, strided=True), layout(1, 1, 4, strided=True)
    )

    assert forward[0, 1] == backward[0, 1] == pytest.approx(a2a(8, 2 * 8e6))
    assert forward[0, 2] == backward[0, 2] == pytest.approx(a2a(8, 4 * 8e6))


def test_a_group_of_the_whole_stage_has_one_order() -> None:
    """Eight strided ranks of eight are eight neighbours; of the two per stage for p = 4, too."""
    forward, backward = costs(layout(8), layout(8, strided=True))

    assert not forward.any()
    assert not backward.any()
    groups, stages = Groups(toy_hardware(), print), np.array([4, 2], dtype=np.int64)
    layouts = [layout(2), layout(2, strided=True)]
    pipelined, _ = batched_prices(groups, redistribution(layouts, X, stages, 8, groups))[0]
    assert pipelined[0, 0, 0, 1] == 0.0
    assert pipelined[1, 0, 0, 1] == pytest.approx(a2a(4, 2e6))


def test_an_unknown_bandwidth_of_the_stage_leaves_equal_layouts_free() -> None:
    """Infinite where the rank order differs, zero where it does not; never nan."""
    hardware = toy_hardware(num_nodes=2, allreduce_bytes_per_s={(8, True): 1e11, (2, True): 1e11})
    groups = Groups(hardware, lambda _: None)
    layouts = [layout(2), layout(2, strided=True)]
    stages = np.array([1, 1], dtype=np.int64)
    forward, _ = batched_prices(groups, redistribution(layouts, X, stages, 16, groups))[0]

    np.testing.assert_array_equal(forward[0, 0], [[0.0, np.inf], [np.inf, 0.0]])

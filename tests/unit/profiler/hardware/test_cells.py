"""Groups, rounds and cells of a sweep."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
from hypothesis import given, strategies as st

from autopar.rates.measured import OPERATIONS
from autopar.records import replace
from autopar.units import divisors
from profiler.hardware.options import (
    COLLECTIVES,
    OVERLAP_SIZES_BYTES,
    PIPELINE,
    Cell,
    Cluster,
    build_options,
    plan_cells,
    rounds,
)

SIZES = build_options(sizes="64K,64M", reference_size="32M")
WORLDS = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24, 36, 64])


def cluster(num_nodes: int, gpus_per_node: int) -> Cluster:
    """Return hosts h0, h1, ... with as many ranks each."""
    return Cluster(hosts=tuple(f"h{n}" for n in range(num_nodes) for _ in range(gpus_per_node)))


def planned(operation: str, num_nodes: int, gpus_per_node: int) -> list[Cell]:
    """Return the cells of one operation."""
    options = replace(SIZES, operations=(operation,))
    return list(plan_cells(options, cluster(num_nodes, gpus_per_node)))


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (7, (1, 7)),
        (6, (1, 2, 3, 6)),
        (12, (1, 2, 3, 4, 6, 12)),
        (24, (1, 2, 3, 4, 6, 8, 12, 24)),
    ],
)
def test_divisors(number: int, expected: tuple[int, ...]) -> None:
    """All divisors, not only powers of two."""
    assert divisors(number) == expected


def test_consecutive_and_strided_groups() -> None:
    """Consecutive groups are neighbours; strided ones take every (W/g)-th rank."""
    assert rounds("allreduce", 4, True, 8, False) == (((0, 1, 2, 3), (4, 5, 6, 7)),)
    assert rounds("allreduce", 2, False, 8, False) == (((0, 4), (1, 5), (2, 6), (3, 7)),)
    assert rounds("allreduce", 3, False, 6, False) == (((0, 2, 4), (1, 3, 5)),)


def test_pipeline_groups() -> None:
    """Stages are W/p ranks apart; boundaries alternate, so that no rank sends and receives."""
    assert rounds("p2p", 2, True, 8, False) == (((0, 4), (1, 5), (2, 6), (3, 7)),)
    assert rounds("p2p", 4, True, 8, False) == (
        ((0, 2), (1, 3), (4, 6), (5, 7)),
        ((2, 4), (3, 5)),
    )
    assert rounds("p2p", 3, True, 3, False) == (((0, 1),), ((1, 2),))


def test_isolated_groups() -> None:
    """One group at a time, the same groups in the same order."""
    together = rounds("p2p", 4, True, 8, False)

    assert rounds("p2p", 4, True, 8, True) == tuple((g,) for g in chain(*together))


@given(WORLDS, st.data())
def test_groups_partition_the_world(world: int, data: st.DataObject) -> None:
    """Every rank is in exactly one group of a collective's round, in either kind of group."""
    sizes = divisors(world)
    size = data.draw(st.sampled_from(sizes))
    consecutive = data.draw(st.booleans())
    (groups,) = rounds("allreduce", size, consecutive, world, False)

    assert sorted(chain(*groups)) == list(range(world))
    assert {len(group) for group in groups} == {size}
    distances = {b - a for group in groups for a, b in pairwise(group)}
    assert distances <= {1 if consecutive else world // size}


@given(WORLDS, st.data())
def test_no_rank_is_twice_in_a_round_of_transfers(world: int, data: st.DataObject) -> None:
    """Every boundary of every pipeline is crossed once, and no rank has two tasks in a round."""
    stages = data.draw(st.sampled_from(divisors(world)))
    arranged = rounds("p2p", stages, True, world, False)
    stride = world // stages

    for groups in arranged:
        taking_part = list(chain(*groups))
        assert len(taking_part) == len(set(taking_part))
    crossed = sorted(chain(*arranged))
    assert crossed == [(rank, rank + stride) for rank in range(world - stride)]


@pytest.mark.parametrize(("num_nodes", "gpus_per_node"), [(1, 1), (1, 2), (1, 3), (2, 4), (3, 2)])
def test_plan_is_complete(num_nodes: int, gpus_per_node: int) -> None:
    """Names are unique, all rounds use ranks of the world, and every size of group is there."""
    world = num_nodes * gpus_per_node
    cells = plan_cells(SIZES, cluster(num_nodes, gpus_per_node))

    assert len({cell.key for cell in cells}) == len(cells)
    ranks = {r for cell in cells for groups in cell.rounds for group in groups for r in group}
    assert ranks == set(range(world))
    for operation in COLLECTIVES:
        own = {
            (c.group_size, c.size_bytes)
            for c in cells
            if c.operation == operation and c.consecutive
        }
        # alone there is nobody to communicate with: one size shows that it works
        swept = SIZES.sizes_bytes if world > 1 else (SIZES.reference_bytes,)
        assert own == {(g, size) for g in divisors(world)[1:] or (1,) for size in swept}
    strided = {c.group_size for c in cells if not c.consecutive}
    assert strided == {g for g in divisors(world)[1:] if g < world}
    assert {c.operation for c in cells if not c.consecutive} <= {"allreduce"}
    pipeline = {c.group_size for c in cells if c.operation in PIPELINE}
    assert pipeline == (set(divisors(world)[1:]) if world > 1 else set())
    named = {c.operation for c in cells if not c.operation.startswith("overlap_")}
    assert named <= set(OPERATIONS)


def test_plan_of_one_rank() -> None:
    """A single rank has nobody to send to; collectives and overlap still run, on one device."""
    cells = plan_cells(SIZES, cluster(1, 1))

    assert {cell.scope for cell in cells} == {"one device"}
    assert {cell.group_size for cell in cells} == {1}
    assert not {cell.operation for cell in cells} & set(PIPELINE)


def test_documented_cells_come_first() -> None:
    """Cells of the reference size precede all others, so that a run that ends early is usable."""
    cells = plan_cells(SIZES, cluster(2, 2))
    waits = [
        cell.size_bytes != SIZES.reference_bytes
        and (cell.operation, cell.size_bytes) != ("overlap_allreduce", 64 << 20)
        for cell in cells
    ]

    assert waits == sorted(waits)
    assert True in waits
    assert False in waits


@pytest.mark.parametrize(
    ("group_size", "consecutive", "expected"),
    [
        (2, True, "intra-node"),
        (4, True, "intra-node"),
        (8, True, "inter-node"),
        (2, False, "inter-node"),
        (4, False, "inter-node"),
    ],
)
def test_scope_of_collectives(group_size: int, consecutive: bool, expected: str) -> None:
    """On 2 hosts of 4 a strided pair crosses hosts and a consecutive one does not."""
    found = {
        cell.scope
        for cell in planned("allreduce", 2, 4)
        if (cell.group_size, cell.consecutive) == (group_size, consecutive)
    }

    assert found == {expected}


def test_scope_is_that_of_the_slowest_group() -> None:
    """One group across hosts makes the cell inter-node: the worst group is the value."""
    cells = planned("p2p", 2, 4)  # 8 stages: three boundaries inside each host, one between them

    assert {c.scope for c in cells if c.group_size == 8} == {"inter-node"}
    assert {c.scope for c in planned("p2p", 1, 4)} == {"intra-node"}


def test_chosen_groups_and_operations() -> None:
    """Only what was asked for is planned."""
    options = replace(SIZES, operations=("allgather",), groups=(2,))
    cells = plan_cells(options, cluster(1, 8))

    assert {(c.operation, c.group_size) for c in cells} == {("allgather", 2)}
    assert len(cells) == len(SIZES.sizes_bytes)


def test_transfers_both_ways_at_the_reference_size_alone() -> None:
    """The bidirectional transfer is recorded for one size."""
    both = [c for c in planned("p2p", 1, 4) if c.operation == "p2p_bidirectional"]

    assert {c.size_bytes for c in both} == {SIZES.reference_bytes}


def test_overlap_has_sizes_of_its_own() -> None:
    """Overlap is measured over the whole world, at its sizes up to the largest that was asked."""
    cells = [c for c in planned("overlap", 1, 4) if c.operation.startswith("overlap_")]

    assert {c.group_size for c in cells} == {4}
    assert {c.size_bytes for c in cells} == {
        size for size in OVERLAP_SIZES_BYTES if size <= SIZES.sizes_bytes[-1]
    }


def test_keys() -> None:
    """Keys name operation, group, kind and size."""
    keys = {cell.key for cell in plan_cells(SIZES, cluster(1, 4))}

    assert {
        "allreduce_size_4_consec_1_33554432B",
        "allreduce_size_2_consec_0_65536B",
        "p2p_stages_4_67108864B",
        "overlap_allreduce_size_4_consec_1_67108864B",
    } <= keys

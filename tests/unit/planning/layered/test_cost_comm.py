"""Message times: curves between, below and above what was measured; bandwidth of any group."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.errors import InputError
from autopar.rates.measured import Curve, HardwareProfile
from search.planning.cost.communication import CurveTable, Groups, Message, curve_s
from search.planning.cost.overlap import overlap_s, overlapped_backward_s
from tests.cost_cases import toy_hardware

CURVE = Curve(sizes_bytes=np.array([1e6, 2e6, 8e6]), times_s=np.array([1e-3, 1.5e-3, 4e-3]))


def groups_of(hardware: HardwareProfile) -> tuple[Groups, list[str]]:
    """Return the groups of this hardware and where their notes go."""
    notes: list[str] = []
    return Groups(hardware, notes.append), notes


def seconds(groups: Groups, operation: str, num_bytes: float, size: int, stride: int = 1) -> float:
    """Return the time of one message."""
    index = np.array([groups.index(size, stride)])
    return float(groups.seconds(operation, np.array([num_bytes]), index)[0])


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (1e6, 1e-3),
        (4e6, math.sqrt(1.5e-3 * 4e-3)),  # the middle in log-log
        (0.5e6, 0.75e-3),  # the line through the two smallest
        (80e6, 40e-3),  # constant bandwidth
    ],
)
def test_curve(num_bytes: float, expected: float) -> None:
    """Each of the four regions of a curve."""
    assert curve_s(CURVE, np.array([num_bytes]))[0] == pytest.approx(expected)


def test_curve_is_never_negative() -> None:
    """Below the smallest size the line is cut at 0."""
    steep = Curve(sizes_bytes=np.array([1e6, 2e6]), times_s=np.array([1e-3, 5e-3]))

    assert curve_s(steep, np.array([1.0]))[0] == 0.0


def test_curve_of_one_size_is_proportional() -> None:
    """A single measurement gives a bandwidth."""
    one = Curve(sizes_bytes=np.array([1e6]), times_s=np.array([1e-3]))

    np.testing.assert_allclose(curve_s(one, np.array([1e5, 1e6, 1e7])), [1e-4, 1e-3, 1e-2])


def test_factors_without_curves() -> None:
    """all-reduce 2(g-1)/g, the others (g-1)/g of the bytes over the bus bandwidth."""
    groups, _ = groups_of(toy_hardware())

    assert seconds(groups, "allreduce", 1e9, 4) == pytest.approx(1.5 * 1e9 / 100e9)
    for operation in ("allgather", "reducescatter", "all2all"):
        assert seconds(groups, operation, 1e9, 4) == pytest.approx(0.75 * 1e9 / 100e9)
    assert seconds(groups, "allreduce", 1e9, 1) == 0.0


def test_curves_come_first_and_half_an_allreduce_is_a_gather() -> None:
    """A measured operation wins; without it a gather is half an all-reduce of that size."""
    own = Curve(sizes_bytes=np.array([1e6]), times_s=np.array([9e-3]))
    groups, notes = groups_of(
        toy_hardware(curves={("allreduce", 4): CURVE, ("reducescatter", 4): own})
    )

    assert seconds(groups, "allgather", 2e6, 4) == pytest.approx(0.75e-3)
    assert seconds(groups, "reducescatter", 1e6, 4) == pytest.approx(9e-3)
    assert seconds(groups, "all2all", 1e9, 4) == pytest.approx(0.75e-2)
    assert notes == []
    seconds(groups, "allreduce", 9e6, 4)
    assert len(notes) == 1
    assert "extrapolated" in notes[0]


def test_curve_of_a_strided_group() -> None:
    """In one node stride does not matter; across nodes a curve is for consecutive groups only."""
    curves = {("allreduce", 4): CURVE}
    inside, _ = groups_of(toy_hardware(curves=curves))
    across, _ = groups_of(toy_hardware(num_nodes=2, curves=curves))

    assert seconds(inside, "allreduce", 1e6, 4, 2) == pytest.approx(1e-3)
    assert seconds(across, "allreduce", 1e6, 4, 1) == pytest.approx(1e-3)
    assert seconds(across, "allreduce", 1e6, 4, 4) == pytest.approx(1.5e6 / 10e9)


MEASURED = {
    (16, True): 40e9,
    (16, False): 40e9,
    (8, True): 150e9,
    (8, False): 20e9,
    (4, True): 160e9,
    (4, False): 16e9,
    (2, True): 140e9,
    (2, False): 8e9,
}


@pytest.mark.parametrize(
    ("size", "stride", "expected", "derived"),
    [
        (4, 1, 160e9, False),  # its own entry
        (4, 4, 16e9, False),  # ranks i, i + 16/4, ...: its own entry
        (4, 2, 160e9, False),  # ranks 0 2 4 6: the shape of four neighbours
        (2, 4, 140e9, False),  # ranks 0 4, one node
        (4, 8, 5e9, True),  # one rank on each of four nodes: 40 * 1/8
        (8, 4, 10e9, True),  # two ranks on each of four nodes: 40 * 2/8
        (6, 1, 10e9, True),  # ranks 6 to 11 straddle nodes, two of them on the first: 40 * 2/8
    ],
)
def test_bandwidth_of_any_group(size: int, stride: int, expected: float, derived: bool) -> None:
    """Own entry, entry of the same shape, else derived and said so (2 nodes of 8)."""
    groups, notes = groups_of(toy_hardware(num_nodes=2, allreduce_bytes_per_s=MEASURED))
    index = np.array([groups.index(size, stride)])

    assert groups.bus_bytes_per_s(index)[0] == pytest.approx(expected)
    assert bool(notes) == derived
    assert all(note.startswith("derived") for note in notes)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (3, 150e9),  # 0-2, 3-5: inside a node
        (4, 20e9 * 2 / 6),  # 4-7 has two ranks on each of two nodes
        (6, 150e9),
        (12, 20e9),
    ],
)
def test_neighbours_that_straddle_nodes(size: int, expected: float) -> None:
    """On 2 nodes of 6 a group of 4 is not inside a node, though it would fit in one."""
    hardware = toy_hardware(
        num_nodes=2,
        gpus_per_node=6,
        allreduce_bytes_per_s={(2, True): 200e9, (6, True): 150e9, (12, True): 20e9},
    )
    groups, notes = groups_of(hardware)
    index = np.array([groups.index(size, 1)])

    assert groups.bus_bytes_per_s(index)[0] == pytest.approx(expected)
    assert any("2 nodes, 2 ranks on each" in note for note in notes) == (size == 4)


def test_a_measured_group_that_straddles_nodes_stands_for_none_inside() -> None:
    """A group of 3 inside a node of 6 takes the measured 2, not the slow 4."""
    hardware = toy_hardware(
        num_nodes=2,
        gpus_per_node=6,
        allreduce_bytes_per_s={(2, True): 200e9, (4, True): 15e9, (12, True): 20e9},
    )
    groups, _ = groups_of(hardware)

    assert groups.bus_bytes_per_s(np.array([groups.index(3, 1)]))[0] == 200e9


def test_unknown_bandwidth_is_left_out() -> None:
    """Nothing measured across nodes: such a group is unknown, and the note names the remedy."""
    groups, notes = groups_of(toy_hardware(num_nodes=2, allreduce_bytes_per_s={(8, True): 150e9}))
    index = np.array([groups.index(16, 1), groups.index(8, 1)])

    assert [groups.has(number) for number in index.tolist()] == [False, True]
    assert "allreduce_size_16_consec_1" in notes[0]


def test_point_to_point() -> None:
    """Exact, nearest smaller, nearest larger, refused."""
    groups, notes = groups_of(toy_hardware(p2p_bytes_per_s={2: 5e9, 4: 7e9}))

    assert groups.point_to_point_bytes_per_s(4) == 7e9
    assert notes == []
    assert groups.point_to_point_bytes_per_s(3) == 5e9
    assert groups.point_to_point_bytes_per_s(8) == 7e9
    assert len(notes) == 2
    only, _ = groups_of(toy_hardware(p2p_bytes_per_s={4: 7e9}))
    assert only.point_to_point_bytes_per_s(2) == 7e9
    none, _ = groups_of(toy_hardware(p2p_bytes_per_s={}))
    with pytest.raises(InputError, match=r"pp_size_2.*--p2p-bandwidth-config-path"):
        none.point_to_point_bytes_per_s(2)


def test_overlap() -> None:
    """k*min + |difference|, never worse than one after the other."""
    x, y = np.array([4.0, 2.0, 3.0, 0.0]), np.array([1.0, 5.0, 3.0, 2.0])

    np.testing.assert_allclose(overlap_s(x, y, 1.5), [4.5, 6.0, 4.5, 2.0])
    np.testing.assert_allclose(overlap_s(x, y, 3.0), x + y)


def test_windows_hold_only_their_own_message() -> None:
    """A small window leaves its message exposed although the whole backward has room."""
    compute, window, message = np.array([10.0]), np.array([1.0]), np.array([4.0])
    nothing = np.array([0.0])
    one = overlapped_backward_s(compute, ((window, message),), nothing, 1.0)
    crowded = overlapped_backward_s(compute, ((window, message),), np.array([20.0]), 1.0)

    assert one[0] == 13.0  # 3 of 4 exposed
    assert crowded[0] == 24.0  # all communications are longer than all compute


def test_curves_of_one_table_are_looked_up_as_each_alone() -> None:
    """Messages of many curves at once have the bits of an interpolation in log-log of each."""
    rng = np.random.default_rng(7)
    table, curves, messages = CurveTable(), [], []
    for number in range(12):
        sizes = np.sort(rng.uniform(1e3, 1e9, number + 1))
        times = np.sort(rng.uniform(1e-6, 1.0, number + 1))
        curves.append(Curve(sizes_bytes=sizes, times_s=times))
        assert table.add(curves[-1], 0.5 if number % 2 else 1.0) == number
        # below, inside, above, and at every measured size
        messages.append(np.concatenate((np.exp(rng.uniform(1.0, 24.0, 40)), sizes)))
    which = np.concatenate([np.full(len(m), n) for n, m in enumerate(messages)])

    found = np.split(
        table.seconds(which, np.concatenate(messages)), np.cumsum([len(m) for m in messages])[:-1]
    )

    for number, (curve, sent, got) in enumerate(zip(curves, messages, found, strict=True)):
        sizes, times = curve.sizes_bytes, curve.times_s
        inside = (sent >= sizes[0]) & (sent <= sizes[-1])
        logs = np.interp(np.log(sent), np.log(sizes), np.log(times))
        np.testing.assert_array_equal(
            got[inside], ((0.5 if number % 2 else 1.0) * np.exp(logs))[inside]
        )
        np.testing.assert_array_equal(got, (0.5 if number % 2 else 1.0) * curve_s(curve, sent))


def test_messages_of_many_kinds_cost_what_each_alone_costs() -> None:
    """Looked up together or one by one: the same seconds, and the same note once."""
    hardware = toy_hardware(
        curves={("allreduce", 4): CURVE, ("all2all", 2): CURVE}, memory_bytes_per_s=None
    )
    groups, notes = groups_of(hardware)
    group = np.array([groups.index(4, 1), groups.index(2, 1), groups.index(1, 1)])
    sent = np.array([3e6, 9e7, 1e6])
    asked = [
        Message(operation="allgather", num_bytes=sent, group=group, sequence=True),
        Message(operation="all2all", num_bytes=sent, group=group),
        Message(operation="allreduce", num_bytes=sent, group=group),
    ]
    assert groups.silent

    together = groups.seconds_of(asked)

    assert notes == [
        (
            "extrapolated: all2all_size_2 messages larger than the largest measured size, "
            "at constant bandwidth"
        )
    ]
    assert not groups.silent
    again: list[str] = []
    other = groups.without_notes(again.append)
    assert [other.index(size, 1) for size in (4, 2, 1)] == group.tolist()
    other.note_messages(asked)
    assert again == notes
    for message, got in zip(asked, together, strict=True):
        alone = groups.seconds(
            message.operation, message.num_bytes, message.group, sequence=message.sequence
        )
        np.testing.assert_array_equal(got, alone)
    assert len(set(notes)) == 1
    assert groups.seconds_of([]) == []

"""Messages of measured groups: latency, strided groups, transfers, and plans that follow them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from autopar.rates.measured import Curve, HardwareProfile
from search.planning.cost.communication import Groups, curve_s, half_allreduces
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import SearchResult
from search.questions.gains import add_bandwidth
from search.request.options import SearchOptions
from tests.cost_cases import toy_hardware, toy_model, toy_spec


def line(latency_s: float, bytes_per_s: float, *, fitted: bool = True) -> Curve:
    """Return times latency + size / rate from 64 KiB to 64 MiB."""
    sizes = np.array([2.0**k for k in range(16, 27)])
    return Curve(
        sizes_bytes=sizes,
        times_s=latency_s + sizes / bytes_per_s,
        latency_s=latency_s if fitted else None,
    )


def groups_of(hardware: HardwareProfile) -> tuple[Groups, list[str]]:
    """Return the groups of this hardware and where their notes go."""
    notes: list[str] = []
    return Groups(hardware, notes.append), notes


def seconds(groups: Groups, operation: str, num_bytes: float, size: int, stride: int = 1) -> float:
    """Return the time of one message."""
    index = np.array([groups.index(size, stride)])
    return float(groups.seconds(operation, np.array([num_bytes]), index)[0])


def transfer(groups: Groups, stages: int, num_bytes: float) -> float:
    """Return the time of one message between stages."""
    sent = np.array([[num_bytes]])
    return float(groups.transfers_s(np.array([stages]), sent, np.array([1.0]))[0, 0, 0])


def test_small_messages_meet_the_fitted_latency() -> None:
    """Below the smallest size: the line from the latency at size 0 to the smallest time."""
    curve = Curve(
        sizes_bytes=np.array([1e5, 1e6]), times_s=np.array([3e-5, 4e-5]), latency_s=2.5e-5
    )

    found = curve_s(curve, np.array([1.0, 5e4, 1e5]))

    np.testing.assert_allclose(found, [2.5e-5 + 5e-11, 2.75e-5, 3e-5])
    # without a fit the two smallest say 3e-5 - 1e5 * 1e-5 / 9e5 for an empty message
    plain = Curve(sizes_bytes=curve.sizes_bytes, times_s=curve.times_s)
    assert curve_s(plain, np.array([5e4]))[0] == pytest.approx(3e-5 - 5e4 * 1e-5 / 9e5)


def test_a_latency_above_the_smallest_time_never_goes_below_zero() -> None:
    """A negative one is cut at 0, as the line through two sizes is."""
    curve = Curve(sizes_bytes=np.array([1e5]), times_s=np.array([1e-5]), latency_s=-1e-5)

    np.testing.assert_allclose(curve_s(curve, np.array([1e3, 7.5e4])), [0.0, 5e-6])


STRIDED = {("allreduce", 4): line(2e-4, 1e9), ("allreduce", 2): line(1e-4, 2e9)}
NEAR = {("allreduce", 4): line(1e-5, 1e11), ("all2all", 4): line(3e-5, 1e11)}


def test_strided_groups_across_nodes_have_their_curve() -> None:
    """Ranks i, i + W/g: the strided curve, and half of it for gathers, all-to-all bandwidth."""
    groups, notes = groups_of(toy_hardware(num_nodes=2, curves=NEAR, strided_curves=STRIDED))

    assert seconds(groups, "allreduce", 2.0**20, 4, 4) == pytest.approx(2e-4 + 2.0**20 / 1e9)
    assert seconds(groups, "allreduce", 2.0**10, 4, 4) == pytest.approx(2e-4 + 2.0**10 / 1e9)
    for half in ("allgather", "reducescatter"):
        found = seconds(groups, half, 2.0**20, 4, 4)
        assert found == pytest.approx((2e-4 + 2.0**20 / 1e9) / 2)
    assert seconds(groups, "all2all", 1e6, 4, 4) == pytest.approx(0.75e6 / 10e9)
    assert seconds(groups, "allreduce", 2.0**20, 4) == pytest.approx(1e-5 + 2.0**20 / 1e11)
    assert notes == []


def test_a_strided_gather_that_was_measured_is_no_half() -> None:
    """Its own strided curve wins, and the note on large messages names it."""
    strided = {**STRIDED, ("allgather", 4): line(7e-4, 1e9)}
    groups, notes = groups_of(toy_hardware(num_nodes=2, strided_curves=strided))

    assert seconds(groups, "allgather", 2.0**20, 4, 4) == pytest.approx(7e-4 + 2.0**20 / 1e9)
    seconds(groups, "allgather", 1e9, 4, 4)
    seconds(groups, "reducescatter", 1e9, 4, 4)
    assert [note.split(" messages")[0] for note in notes] == [
        "extrapolated: allgather_size_4_consec_0",
        "extrapolated: allreduce_size_4_consec_0",
    ]


def test_groups_of_a_measured_shape_have_its_curve() -> None:
    """2 nodes of 8: ranks 0 2 4 6 are shaped like four neighbours, and so is their latency."""
    bandwidth = {(16, True): 40e9, (4, True): 160e9, (4, False): 16e9, (2, False): 8e9}
    timed = toy_hardware(
        num_nodes=2, allreduce_bytes_per_s=bandwidth, curves=NEAR, strided_curves=STRIDED
    )
    groups, notes = groups_of(timed)

    assert seconds(groups, "allreduce", 2.0**20, 4, 2) == pytest.approx(1e-5 + 2.0**20 / 1e11)
    assert seconds(groups, "allreduce", 2.0**20, 2, 8) == pytest.approx(1e-4 + 2.0**20 / 2e9)
    assert notes == []
    # nobody timed strided groups: all that are not neighbours have bandwidth alone, as documented
    plain, _ = groups_of(toy_hardware(2, allreduce_bytes_per_s=bandwidth, curves=NEAR))
    assert seconds(plain, "allreduce", 2.0**20, 4, 2) == pytest.approx(1.5 * 2.0**20 / 160e9)
    assert seconds(plain, "allreduce", 2.0**20, 4, 4) == pytest.approx(1.5 * 2.0**20 / 16e9)


def test_groups_without_times_beside_timed_ones_are_noted() -> None:
    """A derived group has no latency where its neighbours in the plan have one."""
    groups, notes = groups_of(toy_hardware(num_nodes=2, strided_curves=STRIDED))

    assert seconds(groups, "allreduce", 1e6, 8, 2) == pytest.approx(1.75e6 / 10e9)
    (note,) = notes
    assert note == (
        "without latency: a group of 8 ranks with stride 2 has no measured times and is priced "
        "by bandwidth alone"
    )


def test_defaults_name_the_groups_whose_gathers_take_half_an_all_reduce() -> None:
    """None measured, some, all of them, and strided groups by themselves."""
    one = line(1e-5, 1e9)

    def said(near: list[tuple[str, int]], far: list[tuple[str, int]]) -> list[str]:
        return half_allreduces(
            toy_hardware(curves=dict.fromkeys(near, one), strided_curves=dict.fromkeys(far, one))
        )

    reduced = [("allreduce", g) for g in (2, 4, 8)]
    halves = [(name, g) for name in ("allgather", "reducescatter") for g in (2, 4)]
    sentence = "all-gather and reduce-scatter"
    assert said(reduced, reduced) == [f"{sentence} cost half of an all-reduce"]
    assert said(reduced + halves, []) == [f"{sentence} of groups of 8 cost half of an all-reduce"]
    assert said(reduced[:2] + halves, []) == []
    assert said(reduced + halves[1:], reduced[:2]) == [
        f"{sentence} of groups of 2, 8 cost half of an all-reduce",
        f"{sentence} of strided groups cost half of an all-reduce",
    ]


def test_strided_groups_of_one_node() -> None:
    """They share links otherwise than neighbours do: their own curve first, else neighbours'."""
    groups, notes = groups_of(toy_hardware(curves=NEAR, strided_curves=STRIDED))

    assert seconds(groups, "allreduce", 2.0**20, 4, 2) == pytest.approx(2e-4 + 2.0**20 / 1e9)
    # ranks 0 2: the bandwidth of strided pairs stands for them, and so does their curve
    assert seconds(groups, "allreduce", 2.0**20, 2, 2) == pytest.approx(1e-4 + 2.0**20 / 2e9)
    assert seconds(groups, "all2all", 2.0**20, 4, 2) == pytest.approx(3e-5 + 2.0**20 / 1e11)
    assert notes == []


def test_transfers_have_latency_where_they_were_timed() -> None:
    """The curve of the stages, of those that stand for them, else bytes over bandwidth."""
    curves = {2: line(4e-5, 1e10)}
    groups, notes = groups_of(toy_hardware(p2p_bytes_per_s={2: 9e9, 4: 8e9}, p2p_curves=curves))

    assert transfer(groups, 2, 1024.0) == pytest.approx(4e-5 + 1024.0 / 1e10)
    assert notes == []
    assert transfer(groups, 3, 2.0**20) == pytest.approx(4e-5 + 2.0**20 / 1e10)
    assert notes.pop() == "derived: p2p bandwidth pp_size_3 taken from pp_size_2"
    assert transfer(groups, 4, 8e6) == pytest.approx(1e-3)
    assert notes.pop().startswith("without latency: transfers between 4 stages")
    transfer(groups, 2, 1e9)
    assert notes.pop().startswith("extrapolated: pp_size_2 messages")
    timed_only, _ = groups_of(toy_hardware(p2p_bytes_per_s={}, p2p_curves=curves))
    assert transfer(timed_only, 2, 1024.0) == pytest.approx(4e-5 + 1024.0 / 1e10)


def solve(p2p_curves: Mapping[int, Curve], **options: object) -> SearchResult:
    """Return the best plan where gradients are slow, so that a pipeline is worth while."""
    hardware = toy_hardware(
        allreduce_bytes_per_s={(g, kind): 1e8 for g in (2, 4, 8) for kind in (True, False)},
        p2p_curves=p2p_curves,
    )
    chosen = SearchOptions(
        settle_bsz=64,
        search_space="dp+pp",
        disable_sdp=True,
        disable_vtp=True,
        memory_constraint_bytes=40e9,
        # messages of 2 bytes per parameter, for which the latencies below are chosen
        fp32_gradients=False,
        **options,  # type: ignore[arg-type]
    )
    return Planner.from_documents(toy_spec(), toy_model(), hardware, chosen).solve()


def shape(result: SearchResult) -> tuple[int, int]:
    """Return (stages, micro-batches) of the plan."""
    assert result.plan is not None
    return result.plan.num_stages, result.plan.num_microbatches


def test_latency_changes_the_plan() -> None:
    """The dearer a message whatever its size, the fewer micro-batches, then stages, are best."""
    by_latency = {
        latency: shape(solve({p: line(latency, 50e9) for p in (2, 4, 8)}))
        for latency in (0.0, 1e-3, 5e-3)
    }

    assert by_latency == {0.0: (4, 32), 1e-3: (4, 16), 5e-3: (2, 4)}
    assert shape(solve({})) == (4, 32)


def test_the_plan_without_latency_is_slower_with_it() -> None:
    """What bandwidth alone chose loses a quarter where every message takes 5 ms."""
    curves = {p: line(5e-3, 50e9) for p in (2, 4, 8)}
    best = solve(curves).prediction
    pinned = solve(curves, pin=("pp=4", "m=32")).prediction
    assert best is not None
    assert pinned is not None

    assert pinned.step_time_s > 1.25 * best.step_time_s
    # p + m - 1 times the latency, both ways, at (p-1)/p each
    free = solve({}, pin=("pp=4", "m=32")).prediction
    assert free is not None
    gained = pinned.step_time_s - free.step_time_s
    assert math.isclose(gained, 35 * 2 * 0.75 * 5e-3, rel_tol=1e-9)


def test_transfer_curves_without_latency_change_nothing() -> None:
    """A curve at the documented bandwidth prices every plan as the bandwidth does."""
    flat = solve({p: line(0.0, 50e9) for p in (2, 4, 8)}).prediction
    plain = solve({}).prediction
    assert flat is not None
    assert plain is not None

    assert flat.step_time_s == pytest.approx(plain.step_time_s, rel=1e-12)


def test_more_bandwidth_reaches_strided_groups_and_transfers() -> None:
    """What-if hardware is faster at every size, at both percentiles, and never below 0."""
    slow = line(1e-4, 1e9)
    noisy = Curve(
        sizes_bytes=slow.sizes_bytes,
        times_s=slow.times_s,
        low_s=slow.times_s * 0.9,
        high_s=slow.times_s * 1.1,
        latency_s=slow.latency_s,
    )
    hardware = toy_hardware(strided_curves={("allreduce", 4): noisy}, p2p_curves={2: noisy})

    more = add_bandwidth(hardware, collective=1e9, p2p=1e9)

    for found, factor in ((more.strided_curves["allreduce", 4], 1.5), (more.p2p_curves[2], 1.0)):
        wire = factor * slow.sizes_bytes
        np.testing.assert_allclose(wire / found.times_s, wire / slow.times_s + 1e9)
        assert found.low_s is not None
        assert found.high_s is not None
        assert (found.low_s < found.times_s).all()
        assert (found.times_s < found.high_s).all()
        assert found.latency_s is not None
        assert 0.0 < found.latency_s <= found.times_s[0]
    same = add_bandwidth(hardware, collective=1e9)
    assert same.p2p_curves[2] is noisy

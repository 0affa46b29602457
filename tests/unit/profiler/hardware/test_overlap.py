"""How GEMMs and communication slow each other down: the arithmetic, the lanes, the verdict."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st

from profiler.hardware.overlap import (
    LEAST_SHARED,
    QUANTITIES,
    LaneTimes,
    OverlapSamples,
    PreparedLanes,
    Queues,
    ThreadLanes,
    Track,
    efficiency,
    interleaved,
    local_overlap,
    measure_overlap,
    plan_overlap,
    slowdowns,
)
from tests.gloo import run_ranks

GEMM_S, MESSAGE_S = 0.004, 0.012


def alone(value: float) -> float:
    """Agree with nobody else."""
    return value


def measured(
    compute: Callable[[], Any], communicate: Callable[[], Any], repetitions: int = 2
) -> OverlapSamples:
    """Return the samples of two doubles in threads."""
    return measure_overlap(
        ThreadLanes(compute, communicate),
        alone,
        gemm="double",
        window_s=0.04,
        repetitions=repetitions,
        max_seconds=20.0,
    )


class Machine:
    """Lanes without a clock: how fast each works while the other does, and whether they can.

    Operations have fixed lengths, so every number that comes out is known beforehand.
    """

    can_stop = False

    def __init__(
        self,
        *,
        compute_slowdown: float = 1.0,
        communication_slowdown: float = 1.0,
        first: str | None = None,
        turns: bool = False,
    ) -> None:
        self.slowdown = {True: compute_slowdown, False: communication_slowdown}
        self.first = first
        self.turns = turns
        self.played: list[Queues] = []

    def play(self, queues: Queues) -> LaneTimes:
        """Return the times of both queues, one event after the other."""
        self.played.append(queues)
        length = {True: GEMM_S * queues.gemms_per_block, False: MESSAGE_S}
        left = {True: queues.blocks, False: queues.communications}
        ends: dict[bool, list[float]] = {True: [], False: []}
        now_s = 0.0
        if self.first is not None or self.turns:
            order = list(interleaved(queues))
            if self.first is not None:
                order.sort(reverse=self.first == "compute")
            for kind in order:
                now_s += length[kind]
                ends[kind].append(now_s)
        else:
            work = dict(length)  # seconds alone that the operation in progress still needs
            while any(left.values()):
                active = [kind for kind in left if left[kind]]
                speed = {k: 1.0 / self.slowdown[k] if len(active) == 2 else 1.0 for k in active}
                step_s = min(work[k] / speed[k] for k in active)
                now_s += step_s
                for kind in active:
                    work[kind] -= step_s * speed[kind]
                    if work[kind] < 1e-12:
                        ends[kind].append(now_s)
                        left[kind] -= 1
                        work[kind] = length[kind]
        return LaneTimes(
            compute=Track(start_s=0.0, ends_s=tuple(ends[True])),
            communication=Track(start_s=0.0, ends_s=tuple(ends[False])),
        )


def on_machine(machine: Machine, repetitions: int = 2) -> OverlapSamples:
    """Return the samples of a machine without a clock."""
    return measure_overlap(
        machine,
        alone,
        gemm="double",
        window_s=0.24,
        repetitions=repetitions,
        max_seconds=20.0,
    )


def test_slowdowns_and_efficiency_of_known_samples() -> None:
    """Medians are compared; the larger slowdown is the coefficient, which is never below 1."""
    samples = {
        "compute_alone": [1.0, 1.0, 9.0],
        "communication_alone": [2.0],
        "compute_overlapped": [1.25],
        "communication_overlapped": [3.0],
        "both": [2.5, 2.5],
    }
    found = slowdowns(samples)

    assert (found.compute, found.communication) == (1.25, 1.5)
    assert found.efficiency == pytest.approx((1.0 + 2.0 - 2.5) / 1.0)
    assert found.coefficient == 1.5
    quicker = {"compute_overlapped": [0.9], "communication_overlapped": [1.9]}
    assert slowdowns(samples | quicker).coefficient == 1.0
    with pytest.raises(ValueError, match="no samples of both"):
        slowdowns(samples | {"both": []})
    with pytest.raises(KeyError):
        slowdowns({"compute_alone": [1.0]})


@pytest.mark.parametrize(("both_s", "expected"), [(3.0, 0.0), (2.0, 1.0), (2.5, 0.5), (3.5, -0.5)])
def test_efficiency_is_the_hidden_share_of_the_shorter(both_s: float, expected: float) -> None:
    """All of the shorter one hidden is 1, nothing 0, and worse than one by one is negative."""
    assert efficiency(1.0, 2.0, both_s) == pytest.approx(expected)


@given(
    gemm_s=st.floats(1e-6, 1e-1),
    communication_s=st.floats(1e-6, 2.0),
    cover=st.sampled_from([1.5, 3.0, 12.0]),
)
def test_covering_queues_are_longer(gemm_s: float, communication_s: float, cover: float) -> None:
    """By the calibration, the lane in the background has `cover` times the measured one's work."""
    plan = plan_overlap(gemm_s, communication_s, 0.02)

    def seconds(queues: Queues) -> tuple[float, float]:
        return (
            queues.blocks * queues.gemms_per_block * gemm_s,
            queues.communications * communication_s,
        )

    compute_s, with_s = seconds(plan.covered(cover))
    if plan.covered(cover).blocks > 1:  # one block cannot be shortened
        assert with_s >= cover * compute_s * (1 - 1e-9)
    with_s, communicating_s = seconds(plan.covering(cover))
    assert with_s >= cover * communicating_s * (1 - 1e-9)
    with_s, communicating_s = seconds(plan.stopping(24.0))
    assert plan.stopping(24.0).communications == plan.communications
    assert with_s >= 10 * communicating_s
    compute_s, communicating_s = seconds(plan.equal)
    block_s = plan.equal.gemms_per_block * gemm_s
    assert abs(compute_s - communicating_s) <= block_s * (1 + 1e-9)


@pytest.mark.parametrize(("compute", "communication"), [(1.0, 1.0), (2.0, 1.0), (1.25, 1.6)])
def test_known_slowdowns_come_out(compute: float, communication: float) -> None:
    """Each lane's slowdown is found on its own, exactly, with the queues of all phases."""
    machine = Machine(compute_slowdown=compute, communication_slowdown=communication)
    found = on_machine(machine)

    assert found.overlapped
    assert {len(values) for values in found.samples_s.values()} == {2}
    assert slowdowns(found.samples_s).compute == pytest.approx(compute)
    assert slowdowns(found.samples_s).communication == pytest.approx(communication)
    assert found.communication_alone == pytest.approx((MESSAGE_S,) * 2)
    assert found.compute_alone == pytest.approx((MESSAGE_S,) * 2)  # three go with one message
    assert found.gemm == "double x 3"
    assert found.shared_fraction > 0.5
    if compute == communication == 1.0:
        assert slowdowns(found.samples_s).efficiency == pytest.approx(1.0)


def test_the_first_gemms_run_alone() -> None:
    """Loading their kernels waits for the device, which must not be waiting for another rank."""
    machine = Machine()
    measure_overlap(machine, alone, gemm="double", window_s=0.05, repetitions=1, max_seconds=9.0)

    assert machine.played[0].blocks > 0
    assert machine.played[0].communications == 0


def test_a_lane_that_ends_too_early_gets_a_longer_queue() -> None:
    """Where GEMMs slow the communication to an eighth, 1.5 times as many GEMMs end first."""
    machine = Machine(communication_slowdown=8.0)
    found = on_machine(machine)

    assert found.overlapped
    assert slowdowns(found.samples_s).communication == pytest.approx(8.0)
    assert slowdowns(found.samples_s).compute == pytest.approx(1.0)
    ratios = {
        queues.blocks * GEMM_S / (queues.communications * MESSAGE_S)
        for queues in machine.played
        if queues.blocks and queues.communications
    }
    assert 5.9 < max(ratios) < 6.5  # not at 3 and not at 12 times the length


@pytest.mark.parametrize("first", ["compute", "communication"])
def test_one_lane_after_the_other_is_no_overlap(first: str) -> None:
    """A device that finishes one queue first gives a reason, not a slowdown of 1."""
    found = on_machine(Machine(first=first))

    assert not found.overlapped
    assert found.reason is not None
    assert "did not advance" in found.reason
    assert found.samples_s == {name: [] for name in QUANTITIES}


def test_lanes_that_take_turns_are_no_overlap() -> None:
    """Where operations of the lanes alternate, every queue advances, and still nothing overlaps."""
    found = on_machine(Machine(turns=True))

    assert not found.overlapped
    assert found.reason is not None
    assert "took turns" in found.reason
    assert found.shared_fraction == pytest.approx(0.0)


@pytest.mark.parametrize("neighbour", [Machine(), Machine(turns=True), Machine(first="compute")])
def test_ranks_agree_on_counts_and_on_the_verdict(neighbour: Machine) -> None:
    """Ranks whose devices differ make the same communications, and share a failure."""
    meeting = threading.Barrier(2, timeout=30.0)
    values = [0.0, 0.0]
    found: dict[int, OverlapSamples] = {}
    machines = (Machine(compute_slowdown=1.5, communication_slowdown=3.0), neighbour)

    def run(rank: int) -> None:
        def agree(value: float) -> float:
            values[rank] = value
            meeting.wait()
            largest = max(values)
            meeting.wait()
            return largest

        found[rank] = measure_overlap(
            machines[rank], agree, gemm="double", window_s=0.24, repetitions=2, max_seconds=20.0
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert machines[0].played == machines[1].played
    assert found[0].reason == found[1].reason
    assert found[0].overlapped == (not neighbour.turns and neighbour.first is None)
    assert found[0].shared_fraction == found[1].shared_fraction


def test_repetitions_end_with_the_time() -> None:
    """One repetition where already that is too long, two at least otherwise, and a bound."""

    def repeated(max_seconds: float, repetitions: int, seconds: float) -> int:
        def late(value: float) -> float:
            time.sleep(seconds)
            return value

        found = measure_overlap(
            Machine(),
            late,
            gemm="double",
            window_s=0.24,
            repetitions=repetitions,
            max_seconds=max_seconds,
        )
        return len(found.both)

    assert repeated(0.0, 9, 0.0) == 1
    assert repeated(60.0, 3, 0.0) == 3
    assert repeated(0.2, 99, 0.02) == 2  # seven agreements in a repetition


@pytest.mark.whole
def test_sleeping_operations_overlap_in_threads() -> None:
    """Operations that need no core keep their speed, and are proven to have run together."""
    found = measured(lambda: time.sleep(GEMM_S), lambda: time.sleep(MESSAGE_S))

    assert found.overlapped, found.reason
    assert found.shared_fraction > 0.3
    assert 0.6 < slowdowns(found.samples_s).compute < 1.6
    assert 0.6 < slowdowns(found.samples_s).communication < 1.6
    assert slowdowns(found.samples_s).efficiency > 0.3


@pytest.mark.whole
def test_communication_that_slows_compute_is_seen_in_threads() -> None:
    """GEMMs that take twice as long while a message is under way have a slowdown near 2."""
    under_way = threading.Event()

    def communicate() -> None:
        under_way.set()
        time.sleep(MESSAGE_S)
        under_way.clear()

    found = measured(lambda: time.sleep(2 * GEMM_S if under_way.is_set() else GEMM_S), communicate)

    assert found.overlapped, found.reason
    assert 1.5 < slowdowns(found.samples_s).compute < 2.6
    assert slowdowns(found.samples_s).communication < 1.5
    assert slowdowns(found.samples_s).coefficient > 1.5


@pytest.mark.whole
def test_a_shared_lock_is_no_overlap_in_threads() -> None:
    """Threads that exclude each other are reported, whichever of them gets the lock more often."""
    lock = threading.Lock()

    def hold(seconds: float) -> None:
        with lock:
            time.sleep(seconds)

    found = measured(lambda: hold(GEMM_S), lambda: hold(MESSAGE_S), repetitions=1)

    assert not found.overlapped
    assert found.reason is not None
    assert "took turns" in found.reason or "did not advance" in found.reason
    assert found.shared_fraction < LEAST_SHARED


def gloo_overlap(size: int) -> dict[str, Any]:
    """Measure GEMMs and an all-reduce on one rank of a gloo group."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    control, work = dist.new_group(), dist.new_group()
    message = torch.ones(size)
    count = 0

    def communicate() -> None:
        nonlocal count
        count += 1
        dist.all_reduce(message, group=work)

    def agree(value: float) -> float:
        largest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=control)
        return float(largest)

    found = local_overlap(
        communicate,
        "cpu",
        dtype=torch.float32,
        gemm_size=256,
        agree=agree,
        repetitions=2,
        max_seconds=1.0,
    )
    return {
        "samples": found.samples_s,
        "overlapped": found.overlapped,
        "reason": found.reason,
        "shared": found.shared_fraction,
        "gemm": found.gemm,
        "count": count,
    }


@pytest.mark.whole
def test_two_gloo_ranks() -> None:
    """Real communication gives finite numbers on both ranks, as many, and one verdict."""
    pytest.importorskip("torch")
    ranks = run_ranks(gloo_overlap, 2, 1 << 20)

    assert ranks[0]["count"] == ranks[1]["count"] > 5
    assert ranks[0]["overlapped"], ranks[0]["reason"]
    assert (ranks[0]["shared"], ranks[0]["gemm"]) == (ranks[1]["shared"], ranks[1]["gemm"])
    assert ranks[0]["gemm"].startswith("256x256x256 fp32 x ")
    for rank in ranks:
        assert set(rank["samples"]) == set(QUANTITIES)
        lengths = {len(values) for values in rank["samples"].values()}
        assert lengths == {len(ranks[0]["samples"]["both"])}
        assert all(v > 0.0 for values in rank["samples"].values() for v in values)
        assert 1.0 <= slowdowns(rank["samples"]).coefficient < 1e6


@pytest.mark.gpu
def test_one_gpu_with_a_copy_in_place_of_communication() -> None:
    """Streams, gate and events work; a copy and a GEMM share the device and slow each other."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    source = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = local_overlap(
        lambda: target.copy_(source),
        "cuda",
        dtype=torch.bfloat16,
        agree=alone,
        repetitions=5,
        max_seconds=5.0,
    )

    assert found.overlapped, found.reason
    assert found.gemm.startswith("4096x4096x4096 bf16 x ")
    assert 2 <= len(found.both) <= 5
    assert 0.9 < slowdowns(found.samples_s).compute < 20.0
    assert 0.9 < slowdowns(found.samples_s).communication < 20.0


@pytest.mark.parametrize("most", [3, 20, 1024])
def test_buffers_are_prepared_before_each_window(most: int) -> None:
    """A refill in a window would be timed, so no window has more sums than a refill allows."""
    machine = Machine()
    prepared: list[int] = []

    def prepare(number: int) -> None:
        prepared.append(number)
        # nothing was played since the last preparation
        assert len(machine.played) == len(prepared) - 1

    measure_overlap(
        PreparedLanes(machine, prepare),
        alone,
        gemm="double",
        window_s=1.0,
        repetitions=2,
        max_seconds=20.0,
        most=most,
    )
    assert prepared == [queues.communications + queues.lead for queues in machine.played]
    # the calibration has at most eight
    assert max(queues.communications for queues in machine.played) <= max(most, 8)


def test_windows_without_a_limit_are_as_long_as_asked() -> None:
    assert plan_overlap(1e-3, 1e-3, 0.1).communications == 100
    assert plan_overlap(1e-3, 1e-3, 0.1, 82).communications == 82

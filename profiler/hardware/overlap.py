"""How much GEMMs and communication slow each other down while both run.

Measured per repetition: both alone, GEMMs while communication runs all the time, communication
while GEMMs run all the time, and the makespan of two queues of equal length. All times are per
communication: the GEMMs that "go with" one take as long as it does, both alone.

A measurement in which the two did not really run at the same time says so and is none.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from autopar.records import Record, replace
from autopar.statistics import summarize

# --------------------------------------------------------------------------------------------------
# Two queues of work that start together: GEMMs in one lane, communications in the other.
#
# A GPU has a stream per lane and CUDA events, a CPU a thread per lane and the clock of the process.
# Both hand back when each operation ended, on one clock, so that what is done with the times is the
# same code for both.


_GATE_CYCLES = 1_000_000
"""Of one sleeping kernel; half a millisecond at 2 GHz."""
_SHORTEST_GATE_S, _LONGEST_GATE_S = 1e-3, 0.1


class Track(Record):
    """When the operations of one lane ended, in seconds on the clock of both lanes."""

    start_s: float
    ends_s: tuple[float, ...]

    @property
    def end_s(self) -> float:
        """End of the last operation, in seconds; the start where there was none."""
        return self.ends_s[-1] if self.ends_s else self.start_s

    @property
    def window_s(self) -> float:
        """Length of the whole queue in seconds."""
        return self.end_s - self.start_s

    @property
    def durations_s(self) -> tuple[float, ...]:
        """Seconds from the end of each operation's predecessor to its own end."""
        return tuple(b - a for a, b in pairwise((self.start_s, *self.ends_s)))


class Played(Record):
    """What both lanes did in one window."""

    compute: Track
    communication: Track

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first lane to the end of the last."""
        tracks = (self.compute, self.communication)
        return max(t.end_s for t in tracks) - min(t.start_s for t in tracks)


class Queues(Record):
    """How much each lane gets in one window; the communications are the same on every rank."""

    blocks: int
    """Blocks of GEMMs; an end is noted per block."""
    gemms_per_block: int = 1
    communications: int
    blocks_per_communication: float = 1.0
    """How many blocks take as long as one communication, both alone."""
    until_communicated: bool = False
    """Whether the blocks may stop when the communications have ended; ignored by lanes that
    cannot take back what they have queued."""
    lead: bool = False
    """One communication more, before the window: its end opens the window on all ranks at once."""


class Lanes(Protocol):
    """Whatever can play two queues at the same time."""

    can_stop: bool
    """Whether blocks stop when they are asked to."""

    def play(self, queues: Queues) -> Played:
        """Return the times of both lanes after both have ended."""
        ...


def interleaved(queues: Queues) -> Iterator[bool]:
    """Yield True for a block and False for a communication, in the order they would start.

    Work that is issued in this order overlaps also where all streams share one hardware queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1), and neither lane waits for the other to be issued.
    """
    blocks = communications = 0
    while blocks < queues.blocks or communications < queues.communications:
        # as many blocks go first as take as long as the communications issued so far
        compute = communications == queues.communications or (
            blocks < queues.blocks and blocks < communications * queues.blocks_per_communication
        )
        blocks, communications = blocks + compute, communications + (not compute)
        yield compute


def inside(inner: Track, outer: Track) -> Track:
    """Return what ended in the inner lane before the outer one was done."""
    return Track(
        start_s=inner.start_s, ends_s=tuple(end for end in inner.ends_s if end <= outer.end_s)
    )


def evidence(a: Track, a_alone_s: float, b: Track, b_alone_s: float) -> tuple[float, float]:
    """Return for how many seconds both lanes certainly worked at once, and the most it could be.

    A start on record proves nothing: a kernel that waits for the other lane has "started" too.
    But an operation is never quicker than alone, so it was at work for the last `alone` seconds
    before its end. Lanes that take turns share none of these. The most is what the lane with
    less of such time has while the other has not ended.
    """
    # after the shorter lane's end nothing can be shared
    until_s = min(a.end_s, b.end_s)
    busy_a, busy_b = _busy(a, a_alone_s, until_s), _busy(b, b_alone_s, until_s)
    shared_s, i, j = 0.0, 0, 0
    while i < len(busy_a) and j < len(busy_b):
        start_s = max(busy_a[i][0], busy_b[j][0])
        end_s = min(busy_a[i][1], busy_b[j][1])
        shared_s += max(end_s - start_s, 0.0)
        # the interval that ends first meets no later one of the other lane
        if busy_a[i][1] <= busy_b[j][1]:
            i += 1
        else:
            j += 1
    return shared_s, min(sum(end - start for start, end in busy) for busy in (busy_a, busy_b))


def _busy(track: Track, alone_s: float, until_s: float) -> list[tuple[float, float]]:
    intervals = (
        # the last alone_s before the end, but not before the predecessor ended
        (max(before, end - alone_s), min(end, until_s))
        for before, end in pairwise((track.start_s, *track.ends_s))
    )
    return [(start, end) for start, end in intervals if start < end]


class ThreadLanes:
    """Lanes of a CPU: GEMMs in the calling thread, communications in a second one.

    Both release the interpreter's lock while they work.
    """

    can_stop = True

    def __init__(self, compute: Callable[[], Any], communicate: Callable[[], Any]) -> None:
        self._compute = compute
        self._communicate = communicate

    def play(self, queues: Queues) -> Played:
        """Return the times of both lanes; an exception of either lane is raised here."""
        gate = threading.Barrier(2)
        ends: list[float] = []
        starts: list[float] = []
        failures: list[BaseException] = []
        communicated = threading.Event()

        def communicate() -> None:
            try:
                # it ends on all ranks at about the same time, so that their windows begin together
                if queues.lead:
                    self._communicate()
                gate.wait()
                starts.append(time.perf_counter())
                for _ in range(queues.communications):
                    self._communicate()
                    ends.append(time.perf_counter())
            except BaseException as error:  # raised again in the calling thread
                failures.append(error)
                # else the calling thread waits at the gate for ever
                gate.abort()
            communicated.set()

        # a daemon, so that an interrupted run does not wait for an operation that hangs
        thread = threading.Thread(target=communicate, name="communication", daemon=True)
        thread.start()
        blocks_s: list[float] = []
        try:
            gate.wait()
            start_s = time.perf_counter()
            for _ in range(queues.blocks):
                for _ in range(queues.gemms_per_block):
                    self._compute()
                blocks_s.append(time.perf_counter())
                if communicated.is_set() and (queues.until_communicated or failures):
                    break
        except threading.BrokenBarrierError:
            # the other lane failed before the gate; its error is raised below
            start_s = time.perf_counter()
        thread.join()
        if failures:
            raise failures[0]
        return Played(
            compute=Track(start_s=start_s, ends_s=tuple(blocks_s)),
            communication=Track(start_s=starts[0], ends_s=tuple(ends)),
        )


class StreamLanes:
    """Lanes of a CUDA device: two streams that wait for one event.

    A gate holds that event back until the host has issued the work, so that the time the host
    takes to launch is not in the window. The gate is the sleeping kernel of torch, which is not
    part of its documented interface; GEMMs take its place where it is missing.
    """

    can_stop = False

    def __init__(
        self,
        compute: Callable[[], Any],
        communicate: Callable[[], Any],
        device: Any,
        *,
        gate: Callable[[], Any] | None = None,
        cuda: Any = None,
    ) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._cuda = cuda
        self._compute = compute
        self._communicate = communicate
        self._device = device
        self._compute_stream = cuda.Stream(device)
        self._communication_stream = cuda.Stream(device)
        sleep = getattr(cuda, "_sleep", None)
        if gate is None:
            gate = compute if sleep is None else lambda: sleep(_GATE_CYCLES)
        self._gate = gate
        self._gate_unit_s = self._seconds_of(gate)
        self._issue_s = 0.0

    def play(self, queues: Queues) -> Played:
        """Return the times of both lanes by events on the device, zero being the gate's end."""
        self._cuda.synchronize(self._device)
        opened = self._event()
        with self._cuda.stream(self._communication_stream):
            # what issuing took per operation so far, with a margin
            operations = queues.blocks * queues.gemms_per_block + queues.communications
            wanted_s = _SHORTEST_GATE_S + 1.5 * self._issue_s * operations
            for _ in range(math.ceil(min(wanted_s, _LONGEST_GATE_S) / self._gate_unit_s)):
                self._gate()
            if queues.lead:
                self._communicate()
            opened.record(self._communication_stream)
        # both lanes are behind the same event, so that they start together
        self._compute_stream.wait_event(opened)

        blocks: list[Any] = []
        communications: list[Any] = []
        began = time.perf_counter()
        for compute in interleaved(queues):
            stream = self._compute_stream if compute else self._communication_stream
            with self._cuda.stream(stream):
                if compute:
                    for _ in range(queues.gemms_per_block):
                        self._compute()
                else:
                    self._communicate()
                end = self._event()
                end.record(stream)
                (blocks if compute else communications).append(end)
        # the next gate is as long as issuing took this time
        self._issue_s = (time.perf_counter() - began) / max(operations, 1)
        self._cuda.synchronize(self._device)
        return Played(compute=_track(opened, blocks), communication=_track(opened, communications))

    def _event(self) -> Any:
        return self._cuda.Event(enable_timing=True)

    def _seconds_of(self, action: Callable[[], Any]) -> float:
        with self._cuda.stream(self._compute_stream):
            action()  # loads the kernel
            start, end = self._event(), self._event()
            start.record(self._compute_stream)
            action()
            end.record(self._compute_stream)
        self._cuda.synchronize(self._device)
        # events count milliseconds; not 0, since the gate's length is divided by it
        return max(float(start.elapsed_time(end)) * 1e-3, 1e-6)


def _track(zero: Any, ends: list[Any]) -> Track:
    # events count milliseconds
    return Track(start_s=0.0, ends_s=tuple(float(zero.elapsed_time(end)) * 1e-3 for end in ends))


# --------------------------------------------------------------------------------------------------
# How many GEMMs and communications fill the windows of an overlap measurement.


# an end is recorded for every communication and every block: both bound how many
_MOST_OPERATIONS = 1024
_MOST_BLOCKS = 256
_LEAD_FROM = 4
"""Windows of at least so many communications spend one more on starting together."""


class OverlapPlan(Record):
    """What one window holds: two queues of the same length in time, each alone."""

    communications: int
    blocks: int
    gemms_per_block: int
    blocks_per_communication: float
    """By the calibration: how many blocks take as long as one communication."""

    @property
    def gemms_per_communication(self) -> float:
        """GEMMs that go with one communication; the scale of all times of the GEMMs."""
        return self.blocks * self.gemms_per_block / self.communications

    def queues(self, blocks: int, communications: int) -> Queues:
        """Return two queues of this plan's operations."""
        return Queues(
            blocks=blocks,
            gemms_per_block=self.gemms_per_block,
            communications=communications,
            blocks_per_communication=self.blocks_per_communication,
            lead=communications >= _LEAD_FROM,
        )

    @property
    def equal(self) -> Queues:
        """Both queues in full."""
        return self.queues(self.blocks, self.communications)

    def covered(self, cover: float) -> Queues:
        """Return queues in which the communications outlast the blocks `cover` times."""
        # rounded down: fewer blocks end earlier, and the cover is at least what was asked for
        blocks = int(self.communications * self.blocks_per_communication / cover)
        return self.queues(min(max(blocks, 1), self.blocks), self.communications)

    def covering(self, cover: float) -> Queues:
        """Return queues in which the blocks outlast the communications `cover` times."""
        # the measured queue shrinks by the cover, so that the window grows little
        communications = max(int(self.communications / cover), 1)
        blocks = math.ceil(cover * communications * self.blocks_per_communication)
        return self.queues(max(blocks, 2), communications)

    def stopping(self, cover: float) -> Queues:
        """Return queues in which blocks go on until all communications have ended.

        They give up when they would outlast them `cover` times, both alone.
        """
        blocks = max(math.ceil(cover * self.blocks), 2)
        return replace(self.queues(blocks, self.communications), until_communicated=True)


def plan_overlap(gemm_s: float, communication_s: float, window_s: float) -> OverlapPlan:
    """Return how many operations fill a window, of times that are the same on every rank."""
    communications = min(max(math.ceil(window_s / communication_s), 1), _MOST_OPERATIONS)
    # as many as take as long as the communications, both alone
    gemms = communications * communication_s / gemm_s
    # several GEMMs in a block where single ones would be more than are recorded
    per_block = max(math.ceil(gemms / _MOST_BLOCKS), 1)
    return OverlapPlan(
        communications=communications,
        blocks=max(round(gemms / per_block), 1),
        gemms_per_block=per_block,
        blocks_per_communication=communication_s / gemm_s / per_block,
    )


# --------------------------------------------------------------------------------------------------
# What a rank measured of overlap, and what its samples say; needs no torch.
#
# All times are per communication: the GEMMs that go with one communication take as long as it does,
# both alone. So the five quantities can be compared with one another.


QUANTITIES = (
    "compute_alone",
    "communication_alone",
    "compute_overlapped",
    "communication_overlapped",
    "both",
)
"""Names of the samples in a sidecar."""


class OverlapSamples(Record):
    """Samples of one rank, in seconds per communication; of GEMMs, those that go with one."""

    compute_alone: tuple[float, ...]
    communication_alone: tuple[float, ...]
    compute_overlapped: tuple[float, ...]
    """With communication at work during the whole window."""
    communication_overlapped: tuple[float, ...]
    """With GEMMs at work during the whole window."""
    both: tuple[float, ...]
    """Makespan of two queues that take equally long alone."""
    gemm: str
    """Such as `4096x4096x4096 bf16 x 3.5`: the shape, and how many go with one communication."""
    shared_fraction: float
    """Share of the overlapped windows in which both were certainly at work; the worst rank's."""
    reason: str | None = None
    """Why this is no measurement of overlap; None where it is one."""

    @property
    def overlapped(self) -> bool:
        """True when both really ran at the same time, on every rank."""
        return self.reason is None

    @property
    def samples_s(self) -> dict[str, list[float]]:
        """The samples by their names in a sidecar."""
        return {name: list(getattr(self, name)) for name in QUANTITIES}


SIDES = ("compute", "communication")


class Slowdown(NamedTuple):
    """How many times slower one side is while both work, and the relative spread of that."""

    ratio: float
    spread: float


def slowdown(samples_s: Mapping[str, Sequence[float]], side: str) -> Slowdown | None:
    """Return the slow-down of a side by the medians of its samples, None without samples.

    side : `compute` or `communication`.
    """
    alone, both = (samples_s.get(f"{side}_{how}") for how in ("alone", "overlapped"))
    if not alone or not both:
        return None
    before, after = summarize(alone), summarize(both)
    if not before.median_s or not after.median_s:
        return None
    return Slowdown(after.median_s / before.median_s, math.hypot(before.spread, after.spread))


class Slowdowns(Record):
    """Medians of samples, compared."""

    compute: float
    """GEMMs with communication over GEMMs alone."""
    communication: float
    """Communication with GEMMs over communication alone."""
    efficiency: float
    """Share of the shorter of the two that was hidden; negative where both lost by overlapping."""

    @property
    def coefficient(self) -> float:
        """The documented `overlap_coe`: the larger slowdown, and at least 1."""
        return max(1.0, self.compute, self.communication)


def efficiency(compute_s: float, communication_s: float, both_s: float) -> float:
    """Return (t_c + t_m - T_both) / min(t_c, t_m): 1 is all hidden, 0 as slow as one by one."""
    return (compute_s + communication_s - both_s) / min(compute_s, communication_s)


def slowdowns(samples_s: Mapping[str, Sequence[float]]) -> Slowdowns:
    """Return the slowdowns by the medians of samples that are named as in a sidecar.

    Raises KeyError where one of the five names is missing, and ValueError where one is empty.
    """
    medians = {}
    for name in QUANTITIES:
        if not samples_s[name]:
            raise ValueError(f"there are no samples of {name}")
        medians[name] = statistics.median(samples_s[name])
    return Slowdowns(
        compute=medians["compute_overlapped"] / medians["compute_alone"],
        communication=medians["communication_overlapped"] / medians["communication_alone"],
        efficiency=efficiency(
            medians["compute_alone"], medians["communication_alone"], medians["both"]
        ),
    )


# --------------------------------------------------------------------------------------------------
# The measurement: windows of computation and communication, alone and together.


OVERLAP_WINDOW_S = {"cuda": 0.02, "cpu": 0.05}
"""Length of a queue that runs alone, by device type; at least one communication is in it."""
LEAST_SHARED = 0.05
"""Share of the time in which a lane was certainly at work that must be so for both lanes.

Lanes that slow each other down to a third still reach a third; lanes that take turns reach nothing
but the jitter of their operations.
"""
_COVERS = (1.5, 3.0, 6.0, 12.0)
"""How many times longer than the measured queue the other one is, both alone. The first that
outlasts half of the measured queue on every rank is taken; what is after its end does not count."""
_MOST_COVER = 200.0
"""The same where the covering queue can stop as soon as it has outlasted the measured one."""
_CALIBRATION_S = 0.25
_GEMMS_ALONE = Queues(blocks=8, communications=0)
_REMEDY = (
    "nothing was measured of overlap (unset CUDA_DEVICE_MAX_CONNECTIONS and CUDA_LAUNCH_BLOCKING "
    "where they are set, or try again on a machine with nothing else to do)"
)
_GEMM_SIZE = {"cuda": 4096, "cpu": 384}
"""The hidden size of a 7B model; on a CPU what takes a core about a millisecond."""


def local_overlap(
    communicate: Callable[[], Any],
    device: Any,
    *,
    dtype: Any,
    gemm_size: int | None = None,
    agree: Callable[[float], float],
    repetitions: int,
    max_seconds: float,
) -> OverlapSamples:
    """Return this rank's times of GEMMs and communication, alone and together, in seconds.

    Every rank calls this at the same time, with the same arguments but its own communication.

    Parameters
    ----------
    communicate : puts one communication on the current stream; on a CPU completes one. It is
        called in another thread there.
    device, dtype : of the matrices.
    gemm_size : edge of the square matrices; None takes the default of the device.
    agree : returns the largest of the values that all ranks call it with. It keeps the ranks'
        numbers of operations the same, and the phases apart.
    repetitions : most repetitions of all phases.
    max_seconds : after so long no further repetition begins; two are made in any case, or one
        where already the first took longer.
    """
    import torch

    where = torch.device(device)
    kind = "cuda" if where.type == "cuda" else "cpu"
    size = gemm_size if gemm_size is not None else _GEMM_SIZE[kind]
    left = torch.randn(size, size, device=where, dtype=dtype)
    right = torch.randn(size, size, device=where, dtype=dtype)
    product = torch.empty_like(left)

    def compute() -> None:
        torch.mm(left, right, out=product)

    lanes: Lanes
    if kind == "cuda":
        lanes = StreamLanes(compute, communicate, where)
    else:
        lanes = ThreadLanes(compute, communicate)
    name = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    spelt = str(dtype).removeprefix("torch.")
    return measure_overlap(
        lanes,
        agree,
        gemm=f"{size}x{size}x{size} {name.get(spelt, spelt)}",
        # a short budget shortens the window: it must hold repetitions of all five phases
        window_s=min(OVERLAP_WINDOW_S[kind], max_seconds / 40),
        repetitions=repetitions,
        max_seconds=max_seconds,
    )


def measure_overlap(
    lanes: Lanes,
    agree: Callable[[float], float],
    *,
    gemm: str,
    window_s: float,
    repetitions: int,
    max_seconds: float,
) -> OverlapSamples:
    """Return the samples of two lanes; see `local_overlap`."""
    plan = plan_overlap(*_calibrate(lanes, agree), window_s)
    phases = _Phases(lanes=lanes, agree=agree, plan=plan)
    first_s = 0.0
    began = time.perf_counter()
    while phases.reason is None and phases.repetitions < max(repetitions, 1):
        phases.repeat()
        # the slowest rank's clock decides, and so the same on every rank
        elapsed_s = agree(time.perf_counter() - began)
        done = phases.repetitions
        first_s = first_s or elapsed_s
        # elapsed * (1 + 1/done) is where one more repetition would end
        if first_s > max_seconds or (done >= 2 and elapsed_s * (1 + 1 / done) > max_seconds):
            break
    return phases.result(f"{gemm} x {plan.gemms_per_communication:.3g}")


def _calibrate(lanes: Lanes, agree: Callable[[float], float]) -> tuple[float, float]:
    """Return seconds of one GEMM and of one communication: the quickest seen, slowest rank's."""
    # whoever agrees waits for all ranks: they begin together
    agree(0.0)
    # CUDA loads a kernel on its first launch, and waits for the device to do so: were that device
    # at a communication whose peer is as far, neither would end. So the GEMMs come alone at first.
    lanes.play(Queues(blocks=1, communications=0))
    connected = lanes.play(Queues(blocks=3, communications=1))
    communication_s, spent_s = agree(connected.communication.window_s), 0.0
    # the quickest of three, since what disturbs a GEMM only adds time
    gemm_s = agree(min(_mean(lanes.play(_GEMMS_ALONE).compute) for _ in range(3)))
    for _ in range(5):
        # several in a row where that costs nothing: one alone is measured with its launch
        several = communication_s < _CALIBRATION_S / 20
        queues = Queues(blocks=0, communications=8 if several else 1, lead=several)
        track = lanes.play(queues).communication
        communication_s = min(communication_s, agree(_mean(track)))
        spent_s += agree(track.window_s)
        if spent_s > _CALIBRATION_S:
            break
    # both are divisors later, and a coarse clock may have seen nothing
    return max(gemm_s, 1e-7), max(communication_s, 1e-7)


def _mean(track: Track) -> float:
    return track.window_s / len(track.ends_s)


@dataclass(kw_only=True)
class _Phases:
    """The samples so far, and what they prove."""

    lanes: Lanes
    agree: Callable[[float], float]
    plan: OverlapPlan
    cover: dict[str, float] = field(
        default_factory=lambda: {"compute": _COVERS[0], "communication": _COVERS[0]}
    )
    quickest_s: dict[str, float] = field(
        default_factory=lambda: {"compute": math.inf, "communication": math.inf}
    )
    """Shortest operation alone."""
    samples_s: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in QUANTITIES}
    )
    shared_s: float = 0.0
    shareable_s: float = 0.0
    reason: str | None = None

    @property
    def repetitions(self) -> int:
        """Complete repetitions so far."""
        return len(self.samples_s["both"])

    def repeat(self) -> None:
        """Measure every phase once; stop where one lane does not advance beside the other."""
        plan = self.plan
        found = {
            "compute_alone": self._play(plan.queues(plan.blocks, 0)).compute,
            "communication_alone": self._play(plan.queues(0, plan.communications)).communication,
        }
        for lane in self.quickest_s:
            alone = found[f"{lane}_alone"]
            # no operation beside the other lane was at work for less than this
            self.quickest_s[lane] = min(self.quickest_s[lane], *alone.durations_s)
        for lane in self.quickest_s:
            measured = self._covered(lane)
            if measured is None:
                return
            found[f"{lane}_overlapped"] = measured
        makespan_s = self._play(plan.equal).makespan_s
        for name, track in found.items():
            # of GEMMs the mean block, times the blocks that go with one communication
            scale = plan.blocks / plan.communications if name.startswith("compute") else 1.0
            self.samples_s[name].append(_mean(track) * scale)
        self.samples_s["both"].append(makespan_s / plan.communications)

    def _play(self, queues: Queues) -> Played:
        self.agree(0.0)  # no rank is still at the phase before
        return self.lanes.play(queues)

    def _covered(self, lane: str) -> Track | None:
        """Return what one lane did while the other was at work all the time."""
        if lane == "compute":
            tries = [(cover, self.plan.covered(cover)) for cover in _COVERS]
        elif self.lanes.can_stop:
            tries = [(_COVERS[0], self.plan.stopping(_MOST_COVER))]
        else:
            tries = [(cover, self.plan.covering(cover)) for cover in _COVERS]
        for cover, queues in tries:
            # what was too short once stays too short: all ranks have agreed on that
            if cover < self.cover[lane]:
                continue
            played = self._play(queues)
            inner, outer = played.compute, played.communication
            if lane != "compute":
                inner, outer = outer, inner
            counted = inside(inner, outer)
            missed = 1.0 - len(counted.ends_s) / len(inner.ends_s)
            # the worst rank's share, so that all ranks take the same try
            if self.agree(missed) <= 0.5:
                self.cover[lane] = cover
                self._weigh(played)
                return counted
        self.reason = (
            "the GEMMs did not advance while communication ran, and waited for its end"
            if lane == "compute"
            else "the communication did not advance while GEMMs ran, and waited for their end"
        )
        return None

    def _weigh(self, played: Played) -> None:
        quickest_s = self.quickest_s
        shared_s, shareable_s = evidence(
            played.compute,
            quickest_s["compute"],
            played.communication,
            quickest_s["communication"],
        )
        self.shared_s += shared_s
        self.shareable_s += shareable_s

    def result(self, gemm: str) -> OverlapSamples:
        """Return what was measured, with the verdict of all ranks."""
        # where nothing could be shared nothing is proved
        own = self.shared_s / self.shareable_s if self.shareable_s > 0.0 else 0.0
        # agree() returns the largest: of 1 - share that is the smallest share of any rank
        shared = max(1.0 - self.agree(1.0 - own), 0.0)
        if self.reason is None and shared < LEAST_SHARED:
            self.reason = (
                f"the GEMMs and the communication took turns: both worked in {shared:.1%} of the "
                f"time, at least {LEAST_SHARED:.0%} is expected"
            )
        return OverlapSamples(
            **{name: tuple(values) for name, values in self.samples_s.items()},
            gemm=gemm,
            shared_fraction=shared,
            reason=None if self.reason is None else f"{self.reason}; {_REMEDY}",
        )

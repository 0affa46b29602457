"""Mutual slowdown of GEMMs and communication that run concurrently.

Every repetition has five phases: GEMMs only, communication only, GEMMs during continuous
communication, communication during continuous GEMMs, and the makespan of two queues with equal
separate durations. All times are per communication, with as many GEMMs as take equally long.
A measurement is rejected, with a reason, if the two did not run concurrently.
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
# On a GPU, each lane is a stream timed by CUDA events; on a CPU, each is a thread timed by the
# process clock. Both return the end of each operation on one clock, so that the analysis is shared.


_GATE_CYCLES = 1_000_000
"""Cycles of one sleeping kernel; half a millisecond at 2 GHz."""
_SHORTEST_GATE_S, _LONGEST_GATE_S = 1e-3, 0.1


class Track(Record):
    """End times of the operations of one lane, in seconds on the clock of both lanes."""

    start_s: float
    ends_s: tuple[float, ...]

    @property
    def end_s(self) -> float:
        """End of the last operation, in seconds; the start if there is none."""
        return self.ends_s[-1] if self.ends_s else self.start_s

    @property
    def window_s(self) -> float:
        """Length of the whole queue in seconds."""
        return self.end_s - self.start_s

    @property
    def durations_s(self) -> tuple[float, ...]:
        """Seconds from the end of the previous operation to the end of each operation."""
        return tuple(b - a for a, b in pairwise((self.start_s, *self.ends_s)))


class LaneTimes(Record):
    """Times of both lanes in one window."""

    compute: Track
    communication: Track

    @property
    def makespan_s(self) -> float:
        """Seconds from the earlier start to the later end of the two lanes."""
        tracks = (self.compute, self.communication)
        return max(t.end_s for t in tracks) - min(t.start_s for t in tracks)


class Queues(Record):
    """Work of each lane in one window; the number of communications is equal on all ranks."""

    blocks: int
    """Number of GEMM blocks; an end time is recorded per block."""
    gemms_per_block: int = 1
    communications: int
    blocks_per_communication: float = 1.0
    """Number of blocks with the duration of one communication, without overlap."""
    until_communicated: bool = False
    """True if the blocks may stop when the communications have ended. Ignored by lanes that cannot
    cancel queued work."""
    lead: bool = False
    """True to run one more communication first, whose end opens the window on all ranks at once."""


class Lanes(Protocol):
    """Interface that runs two queues concurrently."""

    can_stop: bool
    """True if blocks can stop early."""

    def play(self, queues: Queues) -> LaneTimes:
        """Return the times of both lanes after both have ended."""
        ...


def interleaved(queues: Queues) -> Iterator[bool]:
    """Yield True for a block and False for a communication, in the order of their start.

    Work issued in this order also overlaps if all streams share one hardware queue
    (CUDA_DEVICE_MAX_CONNECTIONS=1), and neither lane waits for the other to be issued.
    """
    blocks = communications = 0
    while blocks < queues.blocks or communications < queues.communications:
        # Issue as many blocks first as take as long as the communications issued so far.
        compute = communications == queues.communications or (
            blocks < queues.blocks and blocks < communications * queues.blocks_per_communication
        )
        blocks, communications = blocks + compute, communications + (not compute)
        yield compute


def inside(inner: Track, outer: Track) -> Track:
    """Return the operations of `inner` that ended before `outer` did."""
    return Track(
        start_s=inner.start_s, ends_s=tuple(end for end in inner.ends_s if end <= outer.end_s)
    )


def evidence(a: Track, a_alone_s: float, b: Track, b_alone_s: float) -> tuple[float, float]:
    """Return (proven, maximum possible) seconds during which both lanes ran concurrently.

    A recorded start proves nothing: a kernel that waits for the other lane has "started" too. But
    an operation is never faster than alone, so it was running during the last `alone` seconds
    before its end. Lanes that take turns share none of this time. The maximum is the smaller of the
    two lanes' running times until the first lane ends.
    """
    # Nothing overlaps after the end of the shorter lane.
    until_s = min(a.end_s, b.end_s)
    busy_a, busy_b = _busy(a, a_alone_s, until_s), _busy(b, b_alone_s, until_s)
    shared_s, i, j = 0.0, 0, 0
    while i < len(busy_a) and j < len(busy_b):
        start_s = max(busy_a[i][0], busy_b[j][0])
        end_s = min(busy_a[i][1], busy_b[j][1])
        shared_s += max(end_s - start_s, 0.0)
        # The interval that ends first overlaps no later one of the other lane.
        if busy_a[i][1] <= busy_b[j][1]:
            i += 1
        else:
            j += 1
    return shared_s, min(sum(end - start for start, end in busy) for busy in (busy_a, busy_b))


def _busy(track: Track, alone_s: float, until_s: float) -> list[tuple[float, float]]:
    intervals = (
        # The last alone_s before the end, but not before the previous operation ended.
        (max(before, end - alone_s), min(end, until_s))
        for before, end in pairwise((track.start_s, *track.ends_s))
    )
    return [(start, end) for start, end in intervals if start < end]


class PreparedLanes:
    """Lanes whose buffers are prepared before each window, so that no refill is in its times."""

    def __init__(self, lanes: Lanes, prepare: Callable[[int], Any]) -> None:
        """Wrap lanes.

        prepare : prepares the buffers for a number of communications, on the current stream. Lanes
            on a GPU synchronize before they open their window.
        """
        self._lanes = lanes
        self._prepare = prepare
        self.can_stop = lanes.can_stop

    def play(self, queues: Queues) -> LaneTimes:
        """Return the times of both lanes after the buffers were prepared."""
        self._prepare(queues.communications + queues.lead)
        return self._lanes.play(queues)


class ThreadLanes:
    """Lanes on a CPU: GEMMs in the calling thread, communications in a second thread.

    Both release the interpreter lock while they work.
    """

    can_stop = True

    def __init__(self, compute: Callable[[], Any], communicate: Callable[[], Any]) -> None:
        self._compute = compute
        self._communicate = communicate

    def play(self, queues: Queues) -> LaneTimes:
        """Return the times of both lanes; re-raises an exception of either lane."""
        gate = threading.Barrier(2)
        ends: list[float] = []
        starts: list[float] = []
        failures: list[BaseException] = []
        communicated = threading.Event()

        def communicate() -> None:
            try:
                # It ends on all ranks at about the same time, so that their windows begin together.
                if queues.lead:
                    self._communicate()
                gate.wait()
                starts.append(time.perf_counter())
                for _ in range(queues.communications):
                    self._communicate()
                    ends.append(time.perf_counter())
            except BaseException as error:  # re-raised in the calling thread
                failures.append(error)
                # Otherwise the calling thread would wait at the gate forever.
                gate.abort()
            communicated.set()

        # A daemon, so that an interrupted run does not wait for an operation that hangs.
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
            # The other lane failed before the gate; its error is raised below.
            start_s = time.perf_counter()
        thread.join()
        if failures:
            raise failures[0]
        return LaneTimes(
            compute=Track(start_s=start_s, ends_s=tuple(blocks_s)),
            communication=Track(start_s=starts[0], ends_s=tuple(ends)),
        )


class StreamLanes:
    """Lanes on a CUDA device: two streams that wait for one event.

    A gate delays that event until the host has issued the work, so that launch overhead is not in
    the window. The gate is torch's sleeping kernel, an undocumented function; GEMMs replace it
    where it is missing.
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

    def play(self, queues: Queues) -> LaneTimes:
        """Return the times of both lanes from device events, relative to the end of the gate."""
        self._cuda.synchronize(self._device)
        opened = self._event()
        with self._cuda.stream(self._communication_stream):
            # Issue time per operation of the previous window, with a margin.
            operations = queues.blocks * queues.gemms_per_block + queues.communications
            wanted_s = _SHORTEST_GATE_S + 1.5 * self._issue_s * operations
            for _ in range(math.ceil(min(wanted_s, _LONGEST_GATE_S) / self._gate_unit_s)):
                self._gate()
            if queues.lead:
                self._communicate()
            opened.record(self._communication_stream)
        # Both lanes wait for one event, so that they start together.
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
        # The next gate is as long as issuing took this time.
        self._issue_s = (time.perf_counter() - began) / max(operations, 1)
        self._cuda.synchronize(self._device)
        return LaneTimes(
            compute=_track(opened, blocks), communication=_track(opened, communications)
        )

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
        # Events count milliseconds; not 0, since the gate's length is divided by it.
        return max(float(start.elapsed_time(end)) * 1e-3, 1e-6)


def _track(zero: Any, ends: list[Any]) -> Track:
    # Events count milliseconds.
    return Track(start_s=0.0, ends_s=tuple(float(zero.elapsed_time(end)) * 1e-3 for end in ends))


# --------------------------------------------------------------------------------------------------
# Number of GEMMs and communications in the windows of an overlap measurement.


# An end time is recorded per communication and per block, which limits both numbers.
_MOST_OPERATIONS = 1024
_MOST_BLOCKS = 256
_LEAD_FROM = 4
"""Minimum communications of a window that spends one more on a common start."""


class OverlapPlan(Record):
    """Numbers of operations of one window: two queues with equal separate durations."""

    communications: int
    blocks: int
    gemms_per_block: int
    blocks_per_communication: float
    """Number of blocks that take as long as one communication, from the calibration."""

    @property
    def gemms_per_communication(self) -> float:
        """Number of GEMMs per communication; GEMM times are multiplied by it."""
        return self.blocks * self.gemms_per_block / self.communications

    def queues(self, blocks: int, communications: int) -> Queues:
        """Return two queues with this plan's operations."""
        return Queues(
            blocks=blocks,
            gemms_per_block=self.gemms_per_block,
            communications=communications,
            blocks_per_communication=self.blocks_per_communication,
            lead=communications >= _LEAD_FROM,
        )

    @property
    def equal(self) -> Queues:
        """Queues of the whole plan."""
        return self.queues(self.blocks, self.communications)

    def covered(self, cover: float) -> Queues:
        """Return queues whose communications take `cover` times as long as their blocks."""
        # Rounded down: fewer blocks end earlier, so the cover is at least the requested one.
        blocks = int(self.communications * self.blocks_per_communication / cover)
        return self.queues(min(max(blocks, 1), self.blocks), self.communications)

    def covering(self, cover: float) -> Queues:
        """Return queues whose blocks take `cover` times as long as their communications."""
        # Dividing the measured queue by the cover keeps the window short.
        communications = max(int(self.communications / cover), 1)
        blocks = math.ceil(cover * communications * self.blocks_per_communication)
        return self.queues(max(blocks, 2), communications)

    def stopping(self, cover: float) -> Queues:
        """Return queues in which blocks continue until all communications have ended.

        The blocks stop at the latest when they would outlast the communications `cover` times, both
        alone.
        """
        blocks = max(math.ceil(cover * self.blocks), 2)
        return replace(self.queues(blocks, self.communications), until_communicated=True)


def plan_overlap(
    gemm_s: float, communication_s: float, window_s: float, most: int = _MOST_OPERATIONS
) -> OverlapPlan:
    """Return the operations that fill a window, from times that are equal on all ranks.

    most : largest number of communications of a window.
    """
    most = min(most, _MOST_OPERATIONS)
    communications = min(max(math.ceil(window_s / communication_s), 1), max(most, 1))
    # As many as take as long as the communications, both alone.
    gemms = communications * communication_s / gemm_s
    # Several GEMMs per block if single ones would exceed the recorded number.
    per_block = max(math.ceil(gemms / _MOST_BLOCKS), 1)
    return OverlapPlan(
        communications=communications,
        blocks=max(round(gemms / per_block), 1),
        gemms_per_block=per_block,
        blocks_per_communication=communication_s / gemm_s / per_block,
    )


# --------------------------------------------------------------------------------------------------
# Overlap samples of one rank and their evaluation; does not need torch.
#
# All times are per communication, with as many GEMMs as take equally long without overlap.
# The five quantities are therefore comparable.


QUANTITIES = (
    "compute_alone",
    "communication_alone",
    "compute_overlapped",
    "communication_overlapped",
    "both",
)
"""Names of the samples in a sidecar."""


class OverlapSamples(Record):
    """Samples of one rank, in seconds per communication; GEMM times are scaled accordingly."""

    compute_alone: tuple[float, ...]
    communication_alone: tuple[float, ...]
    compute_overlapped: tuple[float, ...]
    """GEMM times while communication runs during the whole window."""
    communication_overlapped: tuple[float, ...]
    """Communication times while GEMMs run during the whole window."""
    both: tuple[float, ...]
    """Makespans of two queues with equal separate durations."""
    gemm: str
    """Shape and number of GEMMs per communication, such as `4096x4096x4096 bf16 x 3.5`."""
    shared_fraction: float
    """Proven over maximum concurrent time of the overlapped windows, 0 to 1; worst rank."""
    reason: str | None = None
    """Reason why the samples do not measure overlap; None if they do."""

    @property
    def overlapped(self) -> bool:
        """True if GEMMs and communication ran concurrently on every rank."""
        return self.reason is None

    @property
    def samples_s(self) -> dict[str, list[float]]:
        """Samples by their names in a sidecar."""
        return {name: list(getattr(self, name)) for name in QUANTITIES}


SIDES = ("compute", "communication")


class Slowdown(NamedTuple):
    """Slowdown factor of one side while both run, and its relative spread."""

    ratio: float
    spread: float


def slowdown(samples_s: Mapping[str, Sequence[float]], side: str) -> Slowdown | None:
    """Return the slowdown of a side from the medians of its samples, None without samples.

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
    """Slowdowns and overlap efficiency from the medians of samples."""

    compute: float
    """GEMM time with communication over GEMM time without."""
    communication: float
    """Communication time with GEMMs over communication time without."""
    efficiency: float
    """Hidden fraction of the shorter side; negative if overlapping made both slower."""

    @property
    def coefficient(self) -> float:
        """Galvatron's `overlap_coe`: the larger slowdown, at least 1."""
        return max(1.0, self.compute, self.communication)


def efficiency(compute_s: float, communication_s: float, both_s: float) -> float:
    """Return (t_c + t_m - T_both) / min(t_c, t_m): 1 is fully hidden, 0 as slow as in sequence."""
    return (compute_s + communication_s - both_s) / min(compute_s, communication_s)


def slowdowns(samples_s: Mapping[str, Sequence[float]]) -> Slowdowns:
    """Return the slowdowns from the medians of samples named as in a sidecar.

    Raises KeyError if one of the five names is missing, and ValueError if one is empty.
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
# The measurement: windows of computation and communication, alone and concurrently.


OVERLAP_WINDOW_S = {"cuda": 0.02, "cpu": 0.05}
"""Target duration of a queue without overlap, by device type, seconds."""
LEAST_SHARED = 0.05
"""Minimum fraction of a lane's proven running time that must be concurrent with the other lane.

Lanes that slow each other down to a third still reach a third. Lanes that take turns reach only the
jitter of their operations.
"""
_COVERS = (1.5, 3.0, 6.0, 12.0)
"""Duration of the covering queue over that of the measured queue, both alone. The first value is
used that outlasts half of the measured queue on every rank; operations after its end do not count.
"""
_MOST_COVER = 200.0
"""Maximum cover if the covering queue can stop once it has outlasted the measured one."""
_CALIBRATION_S = 0.25
_GEMMS_ALONE = Queues(blocks=8, communications=0)
_REMEDY = (
    "Overlap was not measured: unset CUDA_DEVICE_MAX_CONNECTIONS and CUDA_LAUNCH_BLOCKING, or "
    "measure again on an idle machine"
)
_GEMM_SIZE = {"cuda": 4096, "cpu": 384}
"""Edge of the square GEMMs: the hidden size of a 7B model, or about 1 ms of a CPU core."""


def local_overlap(
    communicate: Callable[[], Any],
    device: Any,
    *,
    dtype: Any,
    gemm_size: int | None = None,
    agree: Callable[[float], float],
    repetitions: int,
    max_seconds: float,
    prepare: Callable[[int], Any] = lambda number: None,
    most: int = _MOST_OPERATIONS,
) -> OverlapSamples:
    """Return this rank's times of GEMMs and communication, alone and concurrently, in seconds.

    Every rank calls this at the same time, with equal arguments except its own communication.

    communicate : puts one communication on the current stream; on a CPU it completes one and is
        called in another thread.
    device, dtype : device and element type of the matrices.
    gemm_size : edge of the square matrices; None takes the default of the device.
    agree : returns the maximum over all ranks of the values they pass. It keeps the numbers of
        operations equal on all ranks, and separates the phases.
    repetitions : maximum repetitions of all phases.
    max_seconds : seconds after which no further repetition begins. At least two are made, or one if
        the first already took longer.
    prepare : prepares the buffers for a number of communications, before each window.
    most : largest number of communications that the buffers can be prepared for.
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
        PreparedLanes(lanes, prepare),
        agree,
        # A window may begin with one more communication.
        most=most - 1,
        gemm=f"{size}x{size}x{size} {name.get(spelt, spelt)}",
        # A short time limit shortens the window: it must fit repetitions of all five phases.
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
    most: int = _MOST_OPERATIONS,
) -> OverlapSamples:
    """Return the samples of two lanes; see `local_overlap`."""
    plan = plan_overlap(*_calibrate(lanes, agree), window_s, most)
    phases = _Phases(lanes=lanes, agree=agree, plan=plan)
    first_s = 0.0
    began = time.perf_counter()
    while phases.reason is None and phases.repetitions < max(repetitions, 1):
        phases.repeat()
        # The slowest rank's clock decides, so that all ranks agree.
        elapsed_s = agree(time.perf_counter() - began)
        done = phases.repetitions
        first_s = first_s or elapsed_s
        # elapsed * (1 + 1/done) is the expected end of one more repetition.
        if first_s > max_seconds or (done >= 2 and elapsed_s * (1 + 1 / done) > max_seconds):
            break
    return phases.result(f"{gemm} x {plan.gemms_per_communication:.3g}")


def _calibrate(lanes: Lanes, agree: Callable[[float], float]) -> tuple[float, float]:
    """Return seconds of one GEMM and of one communication: best of several, on the slowest rank."""
    # agree() waits for all ranks, so that they begin together.
    agree(0.0)
    # CUDA loads a kernel on its first launch and waits for the device. If that device waited in a
    # communication whose peer is in this state too, neither would end. So the first window has
    # GEMMs only.
    lanes.play(Queues(blocks=1, communications=0))
    connected = lanes.play(Queues(blocks=3, communications=1))
    communication_s, spent_s = agree(connected.communication.window_s), 0.0
    # The fastest of three, since disturbances only add time.
    gemm_s = agree(min(_mean(lanes.play(_GEMMS_ALONE).compute) for _ in range(3)))
    for _ in range(5):
        # Several in sequence if that is cheap: a single one would include its launch overhead.
        several = communication_s < _CALIBRATION_S / 20
        queues = Queues(blocks=0, communications=8 if several else 1, lead=several)
        track = lanes.play(queues).communication
        communication_s = min(communication_s, agree(_mean(track)))
        spent_s += agree(track.window_s)
        if spent_s > _CALIBRATION_S:
            break
    # Both are divisors later, and a coarse clock may return 0.
    return max(gemm_s, 1e-7), max(communication_s, 1e-7)


def _mean(track: Track) -> float:
    return track.window_s / len(track.ends_s)


@dataclass(kw_only=True)
class _Phases:
    """Samples of the phases so far, and the evidence of overlap."""

    lanes: Lanes
    agree: Callable[[float], float]
    plan: OverlapPlan
    cover: dict[str, float] = field(
        default_factory=lambda: {"compute": _COVERS[0], "communication": _COVERS[0]}
    )
    quickest_s: dict[str, float] = field(
        default_factory=lambda: {"compute": math.inf, "communication": math.inf}
    )
    """Shortest operation of each lane without overlap, seconds."""
    samples_s: dict[str, list[float]] = field(
        default_factory=lambda: {name: [] for name in QUANTITIES}
    )
    shared_s: float = 0.0
    shareable_s: float = 0.0
    reason: str | None = None

    @property
    def repetitions(self) -> int:
        """Number of complete repetitions so far."""
        return len(self.samples_s["both"])

    def repeat(self) -> None:
        """Measure every phase once; stop if one lane makes no progress while the other runs."""
        plan = self.plan
        found = {
            "compute_alone": self._play(plan.queues(plan.blocks, 0)).compute,
            "communication_alone": self._play(plan.queues(0, plan.communications)).communication,
        }
        for lane in self.quickest_s:
            alone = found[f"{lane}_alone"]
            # No operation concurrent with the other lane was running for less than this.
            self.quickest_s[lane] = min(self.quickest_s[lane], *alone.durations_s)
        for lane in self.quickest_s:
            measured = self._covered(lane)
            if measured is None:
                return
            found[f"{lane}_overlapped"] = measured
        makespan_s = self._play(plan.equal).makespan_s
        for name, track in found.items():
            # GEMMs: the mean block, times the blocks per communication.
            scale = plan.blocks / plan.communications if name.startswith("compute") else 1.0
            self.samples_s[name].append(_mean(track) * scale)
        self.samples_s["both"].append(makespan_s / plan.communications)

    def _play(self, queues: Queues) -> LaneTimes:
        self.agree(0.0)  # no rank is still in the previous phase
        return self.lanes.play(queues)

    def _covered(self, lane: str) -> Track | None:
        """Return the track of one lane while the other ran all the time; None if that failed."""
        if lane == "compute":
            tries = [(cover, self.plan.covered(cover)) for cover in _COVERS]
        elif self.lanes.can_stop:
            tries = [(_COVERS[0], self.plan.stopping(_MOST_COVER))]
        else:
            tries = [(cover, self.plan.covering(cover)) for cover in _COVERS]
        for cover, queues in tries:
            # A cover that was too short once stays too short, as all ranks have agreed.
            if cover < self.cover[lane]:
                continue
            played = self._play(queues)
            inner, outer = played.compute, played.communication
            if lane != "compute":
                inner, outer = outer, inner
            counted = inside(inner, outer)
            missed = 1.0 - len(counted.ends_s) / len(inner.ends_s)
            # The worst rank's fraction, so that all ranks use the same try.
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

    def _weigh(self, played: LaneTimes) -> None:
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
        """Return the samples with the verdict of all ranks."""
        # Without time in which both could run, nothing is proven.
        own = self.shared_s / self.shareable_s if self.shareable_s > 0.0 else 0.0
        # agree() returns the maximum: for 1 - share, that is the smallest share of any rank.
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
            reason=None if self.reason is None else f"{self.reason}. {_REMEDY}",
        )

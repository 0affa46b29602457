"""Two queues of work that start together: GEMMs in one lane, communications in the other.

A GPU has a stream per lane and CUDA events, a CPU a thread per lane and the clock of the process.
Both hand back when each operation ended, on one clock, so that what is done with the times is the
same code for both.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

__all__ = [
    "Lanes",
    "Played",
    "Queues",
    "StreamLanes",
    "ThreadLanes",
    "Track",
    "evidence",
    "inside",
    "interleaved",
]

_GATE_CYCLES = 1_000_000
"""Of one sleeping kernel; half a millisecond at 2 GHz."""
_SHORTEST_GATE_S, _LONGEST_GATE_S = 1e-3, 0.1


@dataclass(frozen=True, kw_only=True)
class Track:
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


@dataclass(frozen=True, kw_only=True)
class Played:
    """What both lanes did in one window."""

    compute: Track
    communication: Track

    @property
    def makespan_s(self) -> float:
        """Seconds from the start of the first lane to the end of the last."""
        tracks = (self.compute, self.communication)
        return max(t.end_s for t in tracks) - min(t.start_s for t in tracks)


@dataclass(frozen=True, kw_only=True)
class Queues:
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

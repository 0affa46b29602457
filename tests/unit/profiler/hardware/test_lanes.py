"""Two queues that start together: in threads, in streams, and what their times prove."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from profiler.hardware.overlap import (
    Queues,
    StreamLanes,
    ThreadLanes,
    Track,
    evidence,
    inside,
    interleaved,
    measure_overlap,
)


def test_interleaved_work_is_in_the_order_it_would_start() -> None:
    """Two blocks per communication; what is left of the longer queue comes last."""
    queues = Queues(blocks=5, communications=2, blocks_per_communication=2.0)
    shown = "".join("g" if compute else "m" for compute in interleaved(queues))

    assert shown == "mggmggg"
    assert not any(interleaved(Queues(blocks=0, communications=3)))
    assert list(interleaved(Queues(blocks=2, communications=0))) == [True, True]


def test_evidence_of_two_tracks() -> None:
    """Only the last `alone` seconds before an end count, while neither lane has ended."""
    blocks = Track(start_s=0.0, ends_s=(2.0, 4.0))
    messages = Track(start_s=0.0, ends_s=(3.0, 8.0))

    # blocks work for certain in (1, 2) and (3, 4), messages in (1, 3) and (6, 8)
    assert evidence(blocks, 1.0, messages, 2.0) == pytest.approx((1.0, 2.0))
    assert inside(messages, blocks).ends_s == (3.0,)
    assert inside(blocks, messages) == blocks


def test_evidence_is_none_where_lanes_take_turns() -> None:
    """An operation that waited for the other lane has a start on record, and proves nothing."""
    blocks = Track(start_s=0.0, ends_s=(1.0, 4.0, 7.0))
    messages = Track(start_s=0.0, ends_s=(3.0, 6.0, 9.0))

    assert evidence(blocks, 1.0, messages, 2.0)[0] == 0.0


@pytest.mark.parametrize("lead", [False, True])
def test_a_failing_communication_is_raised_by_the_caller(lead: bool) -> None:
    """What the second thread raises ends the window at once."""

    def fail() -> None:
        raise RuntimeError("the peer is gone")

    blocks: list[float] = []

    def block() -> None:
        blocks.append(time.perf_counter())
        time.sleep(0.001)

    lanes = ThreadLanes(block, fail)
    with pytest.raises(RuntimeError, match="the peer is gone"):
        lanes.play(Queues(blocks=100_000, communications=2, lead=lead))
    assert len(blocks) < 50_000


def test_blocks_stop_with_the_communications() -> None:
    """A covering queue in a thread is as long as it must be, the last block included."""
    lanes = ThreadLanes(lambda: time.sleep(0.001), lambda: time.sleep(0.02))
    played = lanes.play(Queues(blocks=100_000, communications=2, until_communicated=True))

    assert 1 <= len(played.compute.ends_s) < 100_000
    assert played.compute.end_s >= played.communication.end_s
    assert len(played.communication.ends_s) == 2


class Clock:
    """A double of torch.cuda: streams are clocks, events readings of them, nothing is computed."""

    def __init__(self) -> None:
        self.streams: list[Clock.Stream] = []
        self.current: Clock.Stream | None = None
        self.slept = 0
        self.order: list[str] = []
        clock = self

        class Bound(Clock.Stream):
            def __init__(self, device: str) -> None:
                self.now_s = 0.0
                clock.streams.append(self)

        self.Stream = Bound  # type: ignore[assignment,misc]

    class Stream:
        """Work in order."""

        now_s = 0.0

        def wait_event(self, event: Clock.Event) -> None:
            """Wait for what the event's stream did before it."""
            self.now_s = max(self.now_s, event.at_s)

    class Event:
        """A reading of a stream's clock."""

        at_s = 0.0

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: Clock.Stream) -> None:
            """Read the clock."""
            self.at_s = stream.now_s

        def elapsed_time(self, end: Clock.Event) -> float:
            """Return milliseconds, as events of CUDA do."""
            return (end.at_s - self.at_s) * 1e3

    @contextmanager
    def stream(self, stream: Clock.Stream) -> Iterator[None]:
        """Make a stream the current one."""
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self, device: str) -> None:
        """Wait for everything."""
        latest = max(stream.now_s for stream in self.streams)
        for stream in self.streams:
            stream.now_s = latest

    def _sleep(self, cycles: int) -> None:
        self.slept += 1
        self.work(cycles / 2e9, "")

    def work(self, seconds: float, name: str) -> None:
        """Keep the current stream busy."""
        assert self.current is not None
        self.current.now_s += seconds
        self.order.append(name)


def test_streams_start_at_the_end_of_the_gate() -> None:
    """Times count from the event that both streams wait for; work is issued in turn."""
    clock = Clock()
    lanes = StreamLanes(
        lambda: clock.work(0.001, "g"), lambda: clock.work(0.004, "m"), "cuda", cuda=clock
    )
    gates = clock.slept
    clock.order.clear()
    queues = Queues(
        blocks=3, gemms_per_block=2, communications=2, blocks_per_communication=2.0, lead=True
    )
    for _ in range(2):
        played = lanes.play(queues)

        assert played.compute.ends_s == pytest.approx((0.002, 0.004, 0.006))
        assert played.communication.ends_s == pytest.approx((0.004, 0.008))
        assert played.makespan_s == pytest.approx(0.008)
    assert "".join(clock.order) == "mmggggmgg" * 2
    assert clock.slept - gates >= 2 * 2  # a millisecond of half-millisecond sleeps, each time
    assert not any(lanes.play(Queues(blocks=0, communications=1)).compute.ends_s)


def test_gemms_gate_where_there_is_no_sleep() -> None:
    """Without the sleeping kernel, the stream of communication is held back by GEMMs."""

    class Sleepless(Clock):
        _sleep = None  # type: ignore[assignment]

    clock = Sleepless()
    lanes = StreamLanes(
        lambda: clock.work(0.0002, "g"), lambda: clock.work(0.001, "m"), "cuda", cuda=clock
    )
    clock.order.clear()
    played = lanes.play(Queues(blocks=1, communications=1))

    assert clock.order.count("g") >= 1 + 5
    assert played.compute.ends_s == pytest.approx((0.0002,))
    assert played.communication.ends_s == pytest.approx((0.001,))


@pytest.mark.gpu
@pytest.mark.parametrize("gemms_as_gate", [False, True])
def test_one_stream_is_no_overlap_on_a_gpu(gemms_as_gate: bool) -> None:
    """Communication that waits for all GEMMs of the device is reported, with either gate."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    matrix = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(matrix)
    source = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    one = torch.cuda.Stream()

    def in_turn(action: Callable[[], Any]) -> None:
        caller = torch.cuda.current_stream()
        one.wait_stream(caller)
        with torch.cuda.stream(one):
            action()
        caller.wait_stream(one)

    def compute() -> None:
        torch.mm(matrix, matrix, out=product)

    lanes = StreamLanes(
        lambda: in_turn(compute),
        lambda: in_turn(lambda: target.copy_(source)),
        "cuda",
        gate=compute if gemms_as_gate else None,
    )
    found = measure_overlap(
        lanes, float, gemm="8192", window_s=0.02, repetitions=2, max_seconds=5.0
    )

    assert not found.overlapped
    assert found.reason is not None

"""How often to measure: repetitions, loops and warm-ups of one cell, decided from its samples.

Rank 0 decides and tells the others. Everything here is a pure function of its arguments, so the
same code predicts how long a run takes. One repetition is `loops` operations back to back; its
sample is their mean in seconds.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from random import Random
from statistics import NormalDist
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from autopar.command.run import say
from autopar.records import Record
from autopar.statistics import median_half_width
from autopar.units import format_count, format_duration
from profiler.options import MeasuringOptions

if TYPE_CHECKING:
    import torch

# --------------------------------------------------------------------------------------------------
# The only clocks of the profilers: what is measured never times itself.
#
# A timer binds an operation to a number of loops; what it returns performs one repetition when it
# is called and answers the seconds of one operation. Whoever calls it decides when, and how often.


_WARMUPS = 3
"""Runs before a capture: connections, workspaces and lazily loaded kernels exist afterwards."""


class Timer(Protocol):
    """Times an operation that is repeated back to back."""

    def bind(self, run: Callable[[], None], loops: int) -> Callable[[], float]:
        """Return what performs `loops` operations per call and returns seconds of one of them."""
        ...

    def synchronize(self) -> None:
        """Wait until everything started so far is done."""
        ...


class HostTimer:
    """Host clock, for operations that are over when their call returns."""

    def bind(self, run: Callable[[], None], loops: int) -> Callable[[], float]:
        """Return what performs `loops` operations per call and returns seconds of one of them."""
        assert loops >= 1, loops

        def repetition() -> float:
            begun_s = time.perf_counter()
            for _ in range(loops):
                run()
            return (time.perf_counter() - begun_s) / loops

        return repetition

    def synchronize(self) -> None:
        """Return at once: nothing is ever pending."""


class DeviceTimer:
    """Events of a CUDA device around the operations on its current stream.

    Without a graph the time of a short operation is that of its launch by the host, as it is in
    training without graphs. With `cuda_graph` the loops are captured once and replayed: the device
    alone is timed. All ranks of an operation must then capture it, with the same number of loops.
    """

    def __init__(self, device: torch.device, *, cuda_graph: bool = False) -> None:
        self._device = device
        self._cuda_graph = cuda_graph

    def bind(self, run: Callable[[], None], loops: int) -> Callable[[], float]:
        """Return what performs `loops` operations per call and returns seconds of one of them.

        With a graph `run` is called a few times here before it is captured. What is returned owns
        the graph; drop it before the process group, whose destruction waits for its graphs.
        """
        import torch

        assert loops >= 1, loops
        replay = self._capture(run, loops) if self._cuda_graph else None
        stream = torch.cuda.current_stream(self._device)
        begun = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)

        def repetition() -> float:
            begun.record(stream)
            if replay is not None:
                replay()
            else:
                for _ in range(loops):
                    run()
            ended.record(stream)
            # elapsed_time asks for two events that are over
            ended.synchronize()
            # events count milliseconds
            return float(begun.elapsed_time(ended)) * 1e-3 / loops

        return repetition

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        import torch

        torch.cuda.synchronize(self._device)

    def _capture(self, run: Callable[[], None], loops: int) -> Callable[[], Any]:
        import torch

        with torch.cuda.device(self._device):
            # Warm-up on a side stream, as capture demands. It also connects NCCL: connecting
            # allocates memory, which a capture does not allow.
            side = torch.cuda.Stream(self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                for _ in range(_WARMUPS):
                    run()
            torch.cuda.current_stream(self._device).wait_stream(side)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # thread_local: NCCL's watchdog asks for the state of earlier operations from a thread
            # of its own, which in the global mode would spoil the capture.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                for _ in range(loops):
                    run()
            replay: Callable[[], Any] = graph.replay
            replay()  # the first launch uploads the graph
            torch.cuda.synchronize(self._device)
        return replay


def make_timer(device: torch.device, cuda_graph: bool = False) -> Timer:
    """Return the timer of a device, with graphs of a CUDA device alone."""
    if device.type == "cuda":
        return DeviceTimer(device, cuda_graph=cuda_graph)
    assert not cuda_graph, "options refuse graphs without a CUDA device"
    return HostTimer()


_ALLOCATION_FAILURES = (
    "out of memory",  # CUDA, also where a library or the driver reports it
    "can't allocate memory",  # torch's allocator on CPU
    "not enough memory",  # the same on Windows
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory could not be allocated, on any device."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _ALLOCATION_FAILURES)


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def torch_dtype(name: str) -> torch.dtype:
    """Return the element type of `bf16`, `fp16` or `fp32`."""
    import torch

    result: torch.dtype = getattr(torch, _DTYPES[name])
    return result


@cache
def renamed(name: str, older: str) -> Callable[..., Any]:
    """Return a function of torch.distributed, by the name it had before torch 2.13 if need be."""
    import torch.distributed as dist

    # torch warns about the older names
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return found


# --------------------------------------------------------------------------------------------------
# How many repetitions: enough that the median is known, no more than the time allows.


BLOCK = 8
"""Most repetitions between two decisions."""

_PREDICTIONS = 16
_WARMUP_SHARE = 0.25


class Policy(Record):
    """When the samples of a cell are enough."""

    iters: int = 50
    """Most timed repetitions."""
    warmup: int = 5
    """Most untimed operations, each a repetition of its own."""
    max_seconds: float = 2.0
    """After so many seconds no further repetition begins once there are `least`."""
    fewest: int = 6
    """Samples before a narrow interval ends the cell; the interval of the median needs 6."""
    least: int = 3
    """Samples that are taken however long they last, unless `iters` is smaller."""
    half_width: float = 0.02
    """Relative half width of the median's 95 % interval that is narrow enough."""
    sample_s: float = 1e-3
    """A repetition of fast operations is made to last so long, far above what a clock adds."""
    max_loops: int = 1024
    """Most operations in a repetition."""

    def __post_init__(self) -> None:
        assert min(self.iters, self.warmup) >= 1, "a cell has repetitions"
        assert 0.0 < self.max_seconds < math.inf, "a cell ends"
        assert 1 <= self.least <= self.fewest, "a cell may end early, but not late"
        assert self.half_width >= 0.0, "a width is not negative"
        assert self.sample_s >= 0.0, "a duration is not negative"
        assert self.max_loops >= 1, "a repetition has an operation"


_MAX_LOOPS = 64


def policy_of(options: MeasuringOptions, sample_s: float) -> Policy:
    """Return when the samples of a cell are enough, by the options of a run.

    sample_s : seconds that a repetition lasts at least, so that starting and stopping it does not
    count.
    """
    return Policy(
        iters=options.iters,
        warmup=options.warmup,
        max_seconds=options.max_seconds,
        sample_s=sample_s,
        max_loops=_MAX_LOOPS,
    )


def choose_loops(operation_s: float, policy: Policy) -> int:
    """Return how many operations of so many seconds make one repetition, a power of two.

    The smallest with which a repetition takes `sample_s`, as far as `max_loops` allows and the
    fewest repetitions stay within `max_seconds`; 1 for slow operations.
    """
    assert operation_s >= 0.0, "an operation takes time"
    loops = 1
    while (
        loops * operation_s < policy.sample_s
        and 2 * loops <= policy.max_loops
        and 2 * loops * operation_s * policy.fewest <= policy.max_seconds
    ):
        loops *= 2
    return loops


def warmups(operation_s: float, policy: Policy) -> int:
    """Return the number of untimed operations, at least 1: `warmup`, or a quarter of the budget."""
    assert operation_s >= 0.0, "an operation takes time"
    if operation_s * policy.warmup <= _WARMUP_SHARE * policy.max_seconds:
        return policy.warmup
    return max(1, int(_WARMUP_SHARE * policy.max_seconds / operation_s))


def next_block(samples: Sequence[float], spent_s: float, policy: Policy) -> int:
    """Return how many repetitions to take now, at most 8; 0 when the samples are enough.

    samples : seconds of one operation, in the order they were taken, of this cell so far.
    spent_s : wall seconds since the first timed repetition began, barriers included.
    After `least` samples a block ends within `max_seconds`, if no repetition is slower than the
    slowest so far; where not even one fits, one is taken.
    """
    count = len(samples)
    if count >= policy.iters:
        return 0
    if count < policy.least:
        return min(policy.least, policy.iters, count + BLOCK) - count
    if spent_s >= policy.max_seconds:
        return 0
    if count >= policy.fewest and median_half_width(samples) <= policy.half_width:
        return 0
    # first to where the interval exists, then a block at a time
    wanted = policy.fewest - count if count < policy.fewest else BLOCK
    wanted = min(wanted, BLOCK, policy.iters - count)
    slowest = max(samples)
    # what a repetition costs besides its operations is known from the clock on the wall only
    repetition_s = max(slowest, spent_s / count * slowest / max(float(np.mean(samples)), 1e-300))
    if repetition_s * wanted <= policy.max_seconds - spent_s:
        return wanted
    return max(1, int((policy.max_seconds - spent_s) / repetition_s))


def expected_seconds(
    operation_s: float, barrier_s: float, variation: float, policy: Policy
) -> float:
    """Return the wall seconds that warm-up and timed repetitions of one cell will take.

    operation_s : median of an operation; barrier_s : what a repetition costs beside its
    operations, and each decision once more; variation : standard deviation over mean of the
    samples, which are taken to be lognormal.
    Plays the loop with quantiles of that distribution in a few fixed orders, and averages.
    """
    assert barrier_s >= 0.0, "a barrier takes time"
    assert variation >= 0.0, "a scatter is not negative"
    loops = choose_loops(operation_s, policy)
    # a lognormal varies by sqrt(exp(sigma^2) - 1)
    sigma = math.sqrt(math.log1p(variation * variation))
    scattered = operation_s * np.exp(sigma * _normal_orders(policy.iters))
    total_s = 0.0
    # without scatter all orders are the same, and one is played
    for samples in scattered.tolist() if sigma > 0.0 else scattered[:1].tolist():
        count, spent_s = 0, 0.0
        while block := next_block(samples[:count], spent_s, policy):
            spent_s += loops * sum(samples[count : count + block]) + (block + 1) * barrier_s
            count += block
        total_s += spent_s
    played = _PREDICTIONS if sigma > 0.0 else 1
    # of a lognormal with median 1 the mean is sqrt(1 + variation^2)
    warmup_s = operation_s * math.hypot(1.0, variation) + barrier_s
    return warmups(operation_s, policy) * warmup_s + total_s / played


@lru_cache(maxsize=8)
def _normal_orders(count: int) -> NDArray[np.float64]:
    """Return the `count` quantiles of the standard normal in fixed orders, one order a row.

    Every row is of the same numbers, so the average is steady; the orders differ, since it is
    the order that decides when an interval becomes narrow.
    """
    normal = NormalDist()
    # midpoints of equal shares, since the quantiles of 0 and 1 are infinite
    quantiles = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    return np.array([Random(seed).sample(quantiles, count) for seed in range(_PREDICTIONS)])


# --------------------------------------------------------------------------------------------------
# How long a run will take, for `--dry-run`.


class ForecastPart(NamedTuple):
    """A cell, or cells that differ only in size: how many, and how long they take together."""

    name: str
    """In columns, like the heading."""
    num_cells: int
    seconds: float
    remark: str = ""


class Forecast(Record):
    """What a run would do."""

    heading: str
    """Of the columns before that of the seconds."""
    parts: tuple[ForecastPart, ...]
    probe_s: float
    """What probing took."""

    @property
    def seconds(self) -> float:
        """Expected duration of the whole run."""
        return sum(part.seconds for part in self.parts)

    def show(self) -> int:
        """Print the forecast; return the exit code of a run that does no more."""
        sys.stdout.write(self.describe())
        sys.stdout.flush()
        return 0

    def describe(self) -> str:
        """Return the forecast as lines of text."""
        lines = [f"{self.heading} {'seconds':>8s}"]
        lines += [f"{part.name} {part.seconds:>8.1f}{part.remark}" for part in self.parts]
        num_cells = sum(part.num_cells for part in self.parts)
        lines.append(
            f"{format_count(num_cells, 'cell')} in about {format_duration(self.seconds)}; nothing "
            f"was written (this forecast took {format_duration(self.probe_s)})"
        )
        return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------
# How far a run is: a bar on a terminal, plain lines elsewhere.


class Progress:
    """Reports finished cells to stderr; a context manager."""

    def __init__(self, num_cells: int, *, enabled: bool) -> None:
        self._num_cells = num_cells
        self._done = 0
        self._begun_s = time.monotonic()
        self._enabled = enabled
        self._bar: object | None = None

    def __enter__(self) -> Self:
        if self._enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress as Bar,
                TextColumn,
                TimeElapsedColumn,
            )

            bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            bar.add_task("measuring", total=self._num_cells)
            bar.start()
            self._bar = bar
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away, so that what follows is readable."""
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]
            self._bar = None

    def begin(self, name: str) -> None:
        """Show what is being measured."""
        if self._bar is not None:
            self._bar.update(0, description=name)  # type: ignore[attr-defined]

    def report(self, line: str) -> None:
        """Report a finished cell in these words."""
        self._done += 1
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)  # type: ignore[attr-defined]
            self._bar.advance(0)  # type: ignore[attr-defined]
        else:
            count = f"[{self._done:>{len(str(self._num_cells))}d}/{self._num_cells}]"
            say(f"{count} {line}")

"""Number of repetitions, loops and warm-ups of one cell, decided from its samples.

Rank 0 decides and informs the other ranks. The decisions are pure functions, so the same code also
predicts the duration of a run. One repetition is `loops` operations back to back; its sample is
their mean in seconds.
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
# The only clocks of the profilers: measured code never times itself.
#
# A timer binds an operation to a number of loops. The returned function performs one repetition per
# call and returns the seconds of one operation; the caller decides when and how often to call it.


_WARMUPS = 3
"""Runs before a graph capture; they create connections, workspaces and lazily loaded kernels."""


class Timer(Protocol):
    """Timer of an operation that is repeated back to back."""

    def bind(self, run: Callable[[], None], loops: int) -> Callable[[], float]:
        """Return a function that performs `loops` operations and returns seconds per operation."""
        ...

    def synchronize(self) -> None:
        """Wait until all pending operations are done."""
        ...


class HostTimer:
    """Timer on the host clock, for operations that are finished when their call returns."""

    def bind(self, run: Callable[[], None], loops: int) -> Callable[[], float]:
        """Return a function that performs `loops` operations and returns seconds per operation."""
        assert loops >= 1, loops

        def repetition() -> float:
            begun_s = time.perf_counter()
            for _ in range(loops):
                run()
            return (time.perf_counter() - begun_s) / loops

        return repetition

    def synchronize(self) -> None:
        """Return immediately: no operation is pending."""


class DeviceTimer:
    """Timer based on CUDA events around the operations of the current stream.

    Without a graph, the time of a short operation is its launch overhead on the host, as in
    training without graphs. With `cuda_graph`, the loops are captured once and replayed, so only
    device time is measured. All ranks of an operation must then capture it with equal `loops`.
    """

    def __init__(self, device: torch.device, *, cuda_graph: bool = False) -> None:
        self._device = device
        self._cuda_graph = cuda_graph

    def bind(self, run: Callable[[], None], loops: int) -> Callable[[], float]:
        """Return a function that performs `loops` operations and returns seconds per operation.

        With a graph, `run` is called a few times before the capture. The returned function owns the
        graph. Release it before the process group, whose destruction waits for its graphs.
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
            # elapsed_time requires that both events are complete.
            ended.synchronize()
            # elapsed_time returns milliseconds.
            return float(begun.elapsed_time(ended)) * 1e-3 / loops

        return repetition

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        import torch

        torch.cuda.synchronize(self._device)

    def _capture(self, run: Callable[[], None], loops: int) -> Callable[[], Any]:
        import torch

        with torch.cuda.device(self._device):
            # Capture requires warm-up on a side stream. The warm-up also connects NCCL: connecting
            # allocates memory, which is not allowed during capture.
            side = torch.cuda.Stream(self._device)
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                for _ in range(_WARMUPS):
                    run()
            torch.cuda.current_stream(self._device).wait_stream(side)
            torch.cuda.synchronize(self._device)
            graph = torch.cuda.CUDAGraph()
            # thread_local: NCCL's watchdog queries earlier operations from its own thread, which
            # would invalidate a capture in global mode.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                for _ in range(loops):
                    run()
            replay: Callable[[], Any] = graph.replay
            replay()  # the first launch uploads the graph
            torch.cuda.synchronize(self._device)
        return replay


def make_timer(device: torch.device, cuda_graph: bool = False) -> Timer:
    """Return the timer of a device; CUDA graphs require a CUDA device."""
    if device.type == "cuda":
        return DeviceTimer(device, cuda_graph=cuda_graph)
    assert not cuda_graph, "options refuse graphs without a CUDA device"
    return HostTimer()


_ALLOCATION_FAILURES = (
    "out of memory",  # CUDA, also when a library or the driver reports it
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",  # torch's CPU allocator on Windows
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
)


def out_of_memory(error: BaseException) -> bool:
    """Return True if an exception reports a failed memory allocation on any device."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _ALLOCATION_FAILURES)


_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of `bf16`, `fp16` or `fp32`."""
    import torch

    result: torch.dtype = getattr(torch, _DTYPES[name])
    return result


@cache
def renamed(name: str, older: str) -> Callable[..., Any]:
    """Return a torch.distributed function by its name, or by its name before torch 2.13."""
    import torch.distributed as dist

    # The new name comes first, since torch warns about the older names.
    found: Callable[..., Any] = getattr(dist, name, None) or getattr(dist, older)
    return found


# --------------------------------------------------------------------------------------------------
# Burn-in: a GPU begins with a high clock and lowers it under load, as in training.


_BURN_SIZE = 4096
"""Edge of the square matrices of the load, the hidden size of a 7B model."""
_BURN_LOOPS = 100
_STEADY_BLOCKS, _STEADY_SHARE = 5, 0.01
"""Number of last blocks that must agree, and their largest relative difference."""
_LEAST_BURN_S, _MOST_BURN_S = 2.0, 30.0
"""Limits of a burn-in, seconds: power limits act within seconds, and temperatures rise longer."""


def burn_in(block: Callable[[], float], clock: Callable[[], float] = time.perf_counter) -> bool:
    """Run blocks of equal work until their durations agree; return False if they never did.

    block : runs the work and returns its seconds.
    """
    begun_s = clock()
    last_s: list[float] = []
    while (spent_s := clock() - begun_s) < _MOST_BURN_S:
        last_s = [*last_s, block()][-_STEADY_BLOCKS:]
        steady = max(last_s) <= (1 + _STEADY_SHARE) * min(last_s)
        if steady and len(last_s) == _STEADY_BLOCKS and spent_s >= _LEAST_BURN_S:
            return True
    return False


@cache
def reach_sustained_clock(device: torch.device) -> None:
    """Load a GPU with GEMMs until it has its sustained clock, once per process; warn if it has not.

    Times of the first seconds would otherwise be those of a clock that training does not have.
    """
    import torch

    left, right = (
        torch.randn(_BURN_SIZE, _BURN_SIZE, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    product = torch.empty_like(left)
    block = make_timer(device).bind(lambda: torch.mm(left, right, out=product), _BURN_LOOPS)
    if not burn_in(block):
        say(
            f"warning: times of GEMMs on {device} still change after {_MOST_BURN_S:g} s of load. "
            "Fix the clocks, or use an idle GPU"
        )


# --------------------------------------------------------------------------------------------------
# Number of repetitions: enough for a precise median, within the time limit.


BLOCK = 8
"""Maximum repetitions between two decisions."""

_PREDICTIONS = 16
_WARMUP_SHARE = 0.25


class Policy(Record):
    """Stopping rules for the samples of a cell."""

    iters: int = 50
    """Maximum timed repetitions."""
    warmup: int = 5
    """Maximum untimed operations, each a repetition of one loop."""
    max_seconds: float = 2.0
    """Seconds after which no further repetition starts, once `least` samples exist."""
    fewest: int = 6
    """Samples needed before a narrow interval ends the cell; the interval of the median needs 6."""
    least: int = 3
    """Minimum number of samples, even beyond the time limit, unless `iters` is smaller."""
    half_width: float = 0.02
    """Relative half width of the median's 95 % interval at which sampling stops."""
    sample_s: float = 1e-3
    """Minimum seconds of a repetition of fast operations, far above the overhead of the clock."""
    max_loops: int = 1024
    """Maximum operations in a repetition."""

    def __post_init__(self) -> None:
        assert min(self.iters, self.warmup) >= 1, "a cell has repetitions"
        assert 0.0 < self.max_seconds < math.inf, "a cell ends"
        assert 1 <= self.least <= self.fewest, "a cell may end early, but not late"
        assert self.half_width >= 0.0, "a width is not negative"
        assert self.sample_s >= 0.0, "a duration is not negative"
        assert self.max_loops >= 1, "a repetition has an operation"


_MAX_LOOPS = 64


def policy_of(options: MeasuringOptions, sample_s: float) -> Policy:
    """Return the stopping rules for the options of a run.

    sample_s : minimum seconds of a repetition, so that the cost of starting and stopping it is
        negligible.
    """
    return Policy(
        iters=options.iters,
        warmup=options.warmup,
        max_seconds=options.max_seconds,
        sample_s=sample_s,
        max_loops=_MAX_LOOPS,
    )


def choose_loops(operation_s: float, policy: Policy) -> int:
    """Return the number of operations per repetition, a power of two.

    This is the smallest number with which a repetition of operations of `operation_s` takes
    `sample_s`. It is limited by `max_loops` and by `fewest` repetitions within `max_seconds`; it is
    1 for slow operations.
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
    """Return the number of repetitions to take next, at most 8; 0 if there are enough samples.

    samples : seconds per operation of this cell so far, in order.
    spent_s : wall seconds since the first timed repetition began, barriers included.
    After `least` samples a block ends within `max_seconds`, if no repetition is slower than the
    slowest so far. At least one repetition is taken even if none fits.
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
    # First up to the number at which the interval exists, then one block at a time.
    wanted = policy.fewest - count if count < policy.fewest else BLOCK
    wanted = min(wanted, BLOCK, policy.iters - count)
    slowest = max(samples)
    # The overhead of a repetition (barriers) is visible only in wall time.
    repetition_s = max(slowest, spent_s / count * slowest / max(float(np.mean(samples)), 1e-300))
    if repetition_s * wanted <= policy.max_seconds - spent_s:
        return wanted
    return max(1, int((policy.max_seconds - spent_s) / repetition_s))


def expected_seconds(
    operation_s: float, barrier_s: float, variation: float, policy: Policy
) -> float:
    """Return the expected wall seconds of warm-up and timed repetitions of one cell.

    operation_s : median seconds of an operation.
    barrier_s : overhead in seconds of a repetition, and once more of each decision.
    variation : standard deviation over mean of the samples, assumed lognormal.
    The loop is simulated with quantiles of that distribution in a few fixed orders, and averaged.
    """
    assert barrier_s >= 0.0, "a barrier takes time"
    assert variation >= 0.0, "a scatter is not negative"
    loops = choose_loops(operation_s, policy)
    # The coefficient of variation of a lognormal is sqrt(exp(sigma^2) - 1).
    sigma = math.sqrt(math.log1p(variation * variation))
    scattered = operation_s * np.exp(sigma * _normal_orders(policy.iters))
    total_s = 0.0
    # Without variation all orders are equal, so one is enough.
    for samples in scattered.tolist() if sigma > 0.0 else scattered[:1].tolist():
        count, spent_s = 0, 0.0
        while block := next_block(samples[:count], spent_s, policy):
            spent_s += loops * sum(samples[count : count + block]) + (block + 1) * barrier_s
            count += block
        total_s += spent_s
    played = _PREDICTIONS if sigma > 0.0 else 1
    # The mean of a lognormal with median 1 is sqrt(1 + variation^2).
    warmup_s = operation_s * math.hypot(1.0, variation) + barrier_s
    return warmups(operation_s, policy) * warmup_s + total_s / played


@lru_cache(maxsize=8)
def _normal_orders(count: int) -> NDArray[np.float64]:
    """Return the `count` quantiles of the standard normal in fixed orders, one order per row.

    All rows contain the same numbers, which keeps the average stable. The orders differ, since the
    order determines when an interval becomes narrow.
    """
    normal = NormalDist()
    # Midpoints of equal shares, since the quantiles of 0 and 1 are infinite.
    quantiles = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    return np.array([Random(seed).sample(quantiles, count) for seed in range(_PREDICTIONS)])


# --------------------------------------------------------------------------------------------------
# Expected duration of a run, for `--dry-run`.


class ForecastPart(NamedTuple):
    """Expected seconds of one cell, or of several cells that differ only in size."""

    name: str
    """Name, padded to the columns of the heading."""
    num_cells: int
    seconds: float
    remark: str = ""


class Forecast(Record):
    """Forecast of a run: its cells and their expected duration."""

    heading: str
    """Heading of the columns before the seconds."""
    parts: tuple[ForecastPart, ...]
    probe_s: float
    """Seconds spent on probing."""

    @property
    def seconds(self) -> float:
        """Expected seconds of the whole run."""
        return sum(part.seconds for part in self.parts)

    def show(self) -> int:
        """Print the forecast and return exit code 0."""
        sys.stdout.write(self.describe())
        sys.stdout.flush()
        return 0

    def describe(self) -> str:
        """Return the forecast as text, one line per part."""
        lines = [f"{self.heading} {'seconds':>8s}"]
        lines += [f"{part.name} {part.seconds:>8.1f}{part.remark}" for part in self.parts]
        num_cells = sum(part.num_cells for part in self.parts)
        lines.append(
            f"{format_count(num_cells, 'cell')} in about {format_duration(self.seconds)}; nothing "
            f"was written (this forecast took {format_duration(self.probe_s)})"
        )
        return "\n".join(lines) + "\n"


# --------------------------------------------------------------------------------------------------
# Progress of a run: a bar on a terminal, plain lines elsewhere.


class Progress:
    """Context manager that reports finished cells on stderr."""

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
        """Remove the bar, so that later output is readable."""
        if self._bar is not None:
            self._bar.stop()  # type: ignore[attr-defined]
            self._bar = None

    def begin(self, name: str) -> None:
        """Show the name of the cell being measured."""
        if self._bar is not None:
            self._bar.update(0, description=name)  # type: ignore[attr-defined]

    def report(self, line: str) -> None:
        """Report a finished cell with this line."""
        self._done += 1
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.console.print(line, highlight=False)  # type: ignore[attr-defined]
            self._bar.advance(0)  # type: ignore[attr-defined]
        else:
            count = f"[{self._done:>{len(str(self._num_cells))}d}/{self._num_cells}]"
            say(f"{count} {line}")

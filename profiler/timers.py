"""The only clocks of the profilers: what is measured never times itself.

A timer binds an operation to a number of loops; what it returns performs one repetition when it is
called and answers the seconds of one operation. Whoever calls it decides when, and how often.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from autopar.errors import OptionError

if TYPE_CHECKING:
    import torch

__all__ = ["DeviceTimer", "HostTimer", "Timer", "make_timer"]

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
            ended.synchronize()
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
    """Return the timer of a device.

    Raises
    ------
    OptionError: a graph is asked for on a device that has none.
    """
    if device.type == "cuda":
        return DeviceTimer(device, cuda_graph=cuda_graph)
    if cuda_graph:
        raise OptionError(
            f"--cuda-graph needs a CUDA device, and this run measures on {device.type}; leave the "
            "option out"
        )
    return HostTimer()

"""A timer that counts what this process computes, so that others on the machine do not matter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CpuTimer:
    """Seconds that the CPU spent in this process, instead of those on the wall."""

    def bind(self, run: Callable[[], None], loops: int) -> Callable[[], float]:
        """Return what performs `loops` operations per call and returns seconds of one of them."""

        def repetition() -> float:
            begun_s = time.process_time()
            for _ in range(loops):
                run()
            return (time.process_time() - begun_s) / loops

        return repetition

    def synchronize(self) -> None:
        """Return at once: nothing is ever pending."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute in one thread: several of them burn time while they wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

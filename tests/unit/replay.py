"""A timer that yields recorded seconds, so that what measures can be tested without a clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import cycle


class ReplayTimer:
    """Performs operations and returns recorded seconds in place of the time they took.

    seconds : seconds of one operation, one value per repetition, over all operations bound to
    the timer in the order they are called. `repeat` begins again at the end; otherwise a
    repetition more than was recorded is an error.
    """

    def __init__(self, seconds: Iterable[float], *, repeat: bool = False) -> None:
        recorded = tuple(seconds)
        assert recorded, "a recording has a value"
        self._seconds = cycle(recorded) if repeat else iter(recorded)
        self._length = len(recorded)
        self.loops: list[int] = []
        """Loops of every repetition so far."""

    def bind(self, run: Callable[[], None], loops: int) -> Callable[[], float]:
        """Return what calls `run` so many times and returns the next recorded seconds."""
        assert loops >= 1, loops

        def repetition() -> float:
            value = next(self._seconds, None)
            if value is None:
                raise AssertionError(f"only {self._length} repetitions were recorded")
            for _ in range(loops):
                run()
            self.loops.append(loops)
            return value

        return repetition

    def synchronize(self) -> None:
        """Return at once: nothing runs beside the caller."""

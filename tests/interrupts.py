"""Signals at chosen moments: at each in a module, or after some CPU time."""

from __future__ import annotations

import contextlib
import dis
import gc
import itertools
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

import pytest

_HANDLING = ("CALL", "RESUME", "JUMP_BACKWARD")
"""Instructions after which CPython looks for signals."""


class _Ended(BaseException):
    """What a handler raises."""


def ended_at_each_moment(call: Callable[[], object], *modules: ModuleType) -> Iterator[int]:
    """Run a call until its first moment, its second and so on; yield after each of these.

    A moment is where CPython runs handlers of signals: after a call, at the begin of a function and
    of a round of a loop. Only those in functions of the modules count. The last call is not ended.
    """
    files = {module.__file__ for module in modules}
    before = sys.gettrace()
    earlier: dict[FrameType, str] = {}
    for last in itertools.count(1):
        done = 0

        def end(frame: FrameType, event: str, _: object, last: int = last) -> Any:
            nonlocal done
            if frame.f_code.co_filename not in files:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode":
                done += earlier.get(frame, "").startswith(_HANDLING)
                earlier[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
                if done == last:
                    raise _Ended
            return end

        try:
            sys.settrace(end)
            call()
            return
        except _Ended:
            pass
        finally:
            sys.settrace(before)
            earlier.clear()
        yield last


@contextlib.contextmanager
def interrupted(after_s: float, *, within_s: float = 2.0) -> Iterator[None]:
    """Press Ctrl-C after some CPU time; the block must then end by KeyboardInterrupt.

    Parameters
    ----------
    within_s : CPU seconds that the block may take to end; others on the machine do not matter
    """
    pressed_s = math.nan

    def press(*_: object) -> None:
        nonlocal pressed_s
        pressed_s = time.process_time()
        raise KeyboardInterrupt

    # Hypothesis leaves a callback in every process, and errors raised in a callback are lost.
    callbacks = gc.callbacks[:]
    gc.callbacks.clear()
    before = signal.signal(signal.SIGPROF, press)
    signal.setitimer(signal.ITIMER_PROF, after_s)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
        gc.callbacks[:] = callbacks
    assert time.process_time() - pressed_s < within_s

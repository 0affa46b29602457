"""What the commands of the planner share: talk on stderr, long work in a thread, and the end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

from autopar.command import run as commands

__all__ = ["leave", "talk", "working"]

_Result = TypeVar("_Result")


def talk(text: str) -> None:
    """Write one line to stderr, where everything that is not a result goes."""
    sys.stderr.write(text.rstrip("\n") + "\n")


def working(text: str, call: Callable[[], _Result]) -> _Result:
    """Return what `call` returns; shows a spinner with the elapsed time on a terminal's stderr.

    The call runs in a thread of its own, so that Ctrl-C is answered while the core works.
    """
    results: list[_Result] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(0.2)  # most searches are over before anything is worth showing
    if thread.is_alive():
        _wait(thread, text)
    if errors:
        raise errors[0]
    return results[0]


def _wait(thread: threading.Thread, text: str) -> None:
    if not sys.stderr.isatty():
        while thread.is_alive():
            thread.join(0.5)  # in pieces, so that Ctrl-C is seen
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True), transient=True, refresh_per_second=5
    ) as bar:
        bar.add_task(f"{text} (Ctrl-C stops; --time-limit returns the best found)", total=None)
        while thread.is_alive():
            thread.join(0.5)


def leave(code: int) -> None:
    """End the process with an exit code, without waiting for a search that was interrupted."""
    if code != commands.INTERRUPTED:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""Calls of tools in processes with a time limit.

Each call has its own process, because only a process can be stopped while it runs compiled code or
a regular expression. Processes are forked from one that has imported the commands, so that a call
does not wait for imports. A process that is stopped removes its unfinished files; its temporary
files are in a folder that the server removes.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from autopar.cli import start_quickly
from autopar.command.answers import error_document
from autopar.command.options import files_among
from autopar.command.python_api import Answer, ask, compare, explain, search
from autopar.command.run import describe_failure
from autopar.command.tools.answers import answer_text
from autopar.command.tools.arguments import RefusedError, Tool, read_arguments, spelled
from autopar.errors import (
    TERMINATED,
    AutoparError,
    DocumentError,
    OptionError,
    shortened,
    with_remedy,
)
from autopar.output import OutsideError, is_outside, only_below

_IMPORTED = (
    *(f"search.commands.{name}" for name in ("search", "check", "explain", "compare")),
    *("search.planning.choose", "search.planning.uniform.summary", "search.show.uniform_files"),
    *("search.planning.layered.planner", "search.planning.uniform.imports"),
    *("search.questions.given", "search.questions.compare", "search.check.alternatives"),
    *("search.engines.megatron.check", "autopar.command.lists", "autopar.command.parser"),
)
"""Modules imported before the first call."""
_GRACE_S = 2.0
"""Seconds that a stopped process has to remove its unfinished files."""
_MESSAGE = 2_000
"""Maximum characters of an error."""


class Outcome(NamedTuple):
    """Result of a call: an answer, or an error."""

    text: str
    """The answer as JSON, or the message of an error."""
    error: dict[str, Any] | None = None
    """Object of an error, with an `id` if the server refuses the call; None for an answer."""


def outcome_of(tool: Tool, given: Mapping[str, Any], folder: Path) -> Outcome:
    """Return the result of a tool in this process; files are written only below `folder`.

    given : arguments as received
    """
    calls: dict[str, Callable[..., Answer]] = {
        "search": search,
        "explain": explain,
        "compare": compare,
    }
    try:
        options, detail = read_arguments(tool, given)
        with only_below(folder):
            answer = calls.get(tool.asks, partial(ask, tool.asks))(**options)
        return Outcome(_named(answer_text(answer.to_dict(), detail)))
    except Exception as error:
        return _failed(tool, given, error, folder)


def _failed(tool: Tool, given: Mapping[str, Any], error: Exception, folder: Path) -> Outcome:
    text = describe_failure(error).text
    # The path of a document may be in another document, such as a plan.
    read = [_named(error.path)] if isinstance(error, DocumentError) else []
    if not isinstance(error, RefusedError):
        with only_below(folder):
            if any(map(is_outside, read + _files(given))):
                text = _without_quotes(error, text)
    if isinstance(error, OptionError):
        text = spelled(text, tool.rows)
    text = shortened(_named(text), _MESSAGE)
    found = error_document(error, text)
    if isinstance(error, RefusedError):
        found["error"]["id"] = error.id
    elif isinstance(error, OutsideError):
        found["error"]["id"] = "outside-folder"
    return Outcome(text, found)


def _named(text: str) -> str:
    """Return a text with arguments in place of the temporary files of given answers."""
    folder = re.escape(tempfile.gettempdir())
    return re.sub(rf"{folder}/autopar\w+/(plan|first|second)\.json", r"\1", text)


def _files(value: Any) -> list[str]:
    """Return the texts in a JSON value that name existing files."""
    found: list[str] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            found += files_among([one])
        elif isinstance(one, dict | list):
            waiting += one.values() if isinstance(one, dict) else one
    return found


def _without_quotes(error: Exception, text: str) -> str:
    """Return a message without the words that it quotes, which may be content of a file."""
    hidden = r"\1... (not quoted: a file is outside the folder of the server)"
    if not isinstance(error, AutoparError):
        return re.sub(r"""^([^'"]*)['"].*""", hidden, text, flags=re.DOTALL)
    problem = re.sub(r"""^([^'"]*)['"].*""", hidden, error.problem, flags=re.DOTALL)
    if isinstance(error, DocumentError):
        problem = f"{error.path}: {problem}"
    return with_remedy(problem, error.remedy)


# --------------------------------------------------------------------------------------------------
# Processes


def prepare() -> None:
    """Start the process that calls are forked from; it imports the commands meanwhile."""
    # Before NumPy is imported there.
    start_quickly()
    _CONTEXT.set_forkserver_preload(list(_IMPORTED))
    forkserver.ensure_running()


_CONTEXT = multiprocessing.get_context("forkserver")


class Worker:
    """One call in a separate process."""

    def __init__(
        self, call: Callable[[], Outcome], *, name: str, folder: Path, seconds: float
    ) -> None:
        """Prepare the call, whose time begins now.

        call : function that the process runs in `folder`; it is pickled. name : name in errors
        """
        self.name = name
        self._ends = time.monotonic() + seconds
        self._seconds = seconds
        self._temporary = tempfile.mkdtemp(prefix="autopar-")
        self._lock = threading.Lock()
        self._stopped = False
        self._receiving, self._sending = _CONTEXT.Pipe(duplex=False)
        self._process = _CONTEXT.Process(
            target=_work,
            args=(self._sending, call, str(folder), self._temporary, seconds),
            daemon=True,
        )

    @property
    def pid(self) -> int | None:
        """Id of the process; None before it starts."""
        return self._process.pid

    def outcome(self) -> Outcome:
        """Return the result of the call, or an error after its time limit."""
        with self._lock:
            if not self._stopped:
                self._process.start()
        self._sending.close()
        try:
            if self._receiving.poll(max(self._ends - time.monotonic(), 0.0)):
                return Outcome(*self._receiving.recv())
        except (EOFError, OSError):  # killed by the system, or stopped
            return _refusal("no-answer", "the process of the call ended without an answer")
        finally:
            self.stop()
        return self.late()

    def late(self) -> Outcome:
        """Return the error of a call that reached its time limit."""
        ways = {"search": "Fix degrees such as tp and pp, name an engine"}
        return _refusal(
            "time-limit",
            f"{self.name} was stopped after {self._seconds:g} s",
            f"{ways.get(self.name, 'Ask for less')}, or start the server with a larger "
            "--time-limit",
        )

    def stop(self) -> None:
        """End the process and remove its temporary files; has no effect on an ended one."""
        with self._lock:
            first, self._stopped = not self._stopped, True
        if not first:
            return
        if self._process.pid is not None:
            self._process.terminate()
            self._process.join(_GRACE_S)
            self._process.kill()
            self._process.join()
        shutil.rmtree(self._temporary, ignore_errors=True)


def _refusal(id: str, problem: str, remedy: str = "") -> Outcome:
    error = RefusedError(id, problem, remedy=remedy)
    return Outcome(str(error), {"error": {"kind": "failure", "message": str(error), "id": id}})


def _work(
    sending: Connection,
    call: Callable[[], Outcome],
    folder: str,
    temporary: str,
    seconds: float,
) -> None:
    """Answer a call in its process."""
    # Not the streams of the protocol, which `/dev/stdin` and `/dev/stdout` would name.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _end)
    # The system ends the process even if the server no longer can.
    signal.alarm(math.ceil(seconds + 2 * _GRACE_S))
    start_quickly()
    os.chdir(folder)
    tempfile.tempdir = os.environ["MPLCONFIGDIR"] = temporary
    sys.dont_write_bytecode = True
    sending.send(tuple(call()))


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(TERMINATED)

"""Answers of `--json`: their common head, and their output to stdout or to a Python caller.

An answer is the head (`HEAD`), then the document of the command or its error. For a command called
within this process (`autopar.command.python_api`), the caller receives the answer and the messages,
and nothing is printed.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from autopar import __version__
from autopar.errors import (
    AutoparError,
    DocumentError,
    InfeasibleError,
    InputError,
    InstallError,
    OptionError,
)
from autopar.run.rules import RuleError

SCHEMA = "autopar/answer/1"
"""Schema name of the head; the number changes when a key is removed or changes its meaning."""
HEAD = ("schema", "command", "release", "exit_code", "question", "notices")
"""Keys at the beginning of every answer."""
OUTPUTS = frozenset(
    {"all", "html", "json", "out", "output-config-path", "peers", "plot", "trace", "write-skeleton"}
)
"""Options of all commands that name output files or folders; not part of a question."""


class ActiveCommand:
    """State of a running command: its options, its messages and its JSON answer."""

    def __init__(self, command: str, *, asked: bool = False) -> None:
        self.command = command
        self.asked = asked
        """True if a caller in this process receives answer and messages; nothing is printed."""
        self.question: dict[str, Any] = {}
        """Given options by name, without those that name output files."""
        self.notices: list[str] = []
        """Messages of the command, without its name at the beginning."""
        self.answer: dict[str, Any] | None = None
        """Answer written to stdout or passed to the caller; None before `emit_answer`."""
        self.on_stdout = False
        """True if the command line requests the answer on stdout."""

    def asks(self, given: Mapping[str, Any]) -> None:
        """Store the given options as `question`, without those that name output files."""
        self.question = {name: value for name, value in given.items() if name not in OUTPUTS}

    def record_message(self, text: str) -> bool:
        """Store a message for the head; return True if it must not be printed."""
        self.notices.append(text.removeprefix(f"{self.command}: "))
        return self.asked


_RUNNING: ContextVar[ActiveCommand | None] = ContextVar("running", default=None)


def running_now() -> ActiveCommand | None:
    """Return the command that this process is running, or None."""
    return _RUNNING.get()


@contextlib.contextmanager
def running(command: str, *, asked: bool = False) -> Iterator[ActiveCommand]:
    """Make a command the active one, which collects messages and the answer, until the block ends.

    asked : True if a caller in this process receives answer and messages; nothing is printed
    """
    found = ActiveCommand(command, asked=asked)
    token = _RUNNING.set(found)
    try:
        yield found
    finally:
        _RUNNING.reset(token)


def headed(document: Mapping[str, Any], exit_code: int = 0) -> dict[str, Any]:
    """Return the answer of the running command: the head, then the document.

    Without a running command, the document is returned without a head. Infinite numbers become the
    text "Infinity", since JSON has none.

    exit_code : exit code of the command
    """
    now = _RUNNING.get()
    found = {key: _plain(value) for key, value in document.items()}
    if now is None:  # a document made outside of a command has no head
        return found
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "command": now.command,
        "release": __version__,
        "exit_code": exit_code,
        "question": now.question,
        "notices": list(now.notices),
    }
    clashes = head.keys() & document.keys()
    assert not clashes, f"documents have keys of the head: {clashes}"
    return head | found


def is_answer(data: Mapping[str, Any]) -> bool:
    """Return True if an object is the answer of a command."""
    return data.get("schema") == SCHEMA


def without_head(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of an answer without its head; other objects are returned unchanged."""
    if not is_answer(data):
        return dict(data)
    return {key: value for key, value in data.items() if key not in HEAD}


def emit_answer(document: Mapping[str, Any], exit_code: int = 0) -> None:
    """Write the answer of `--json -` to stdout, or pass it to the caller within this process."""
    found = headed(document, exit_code)
    now = _RUNNING.get()
    if now is not None:
        now.answer = found
    if now is None or not now.asked:
        sys.stdout.write(json.dumps(found, indent=2, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return "Infinity" if isinstance(value, float) and math.isinf(value) else value


def answers_stdout(arguments: Sequence[str]) -> bool:
    """Return True if a command line, even an invalid one, requests its answer on stdout."""
    for place, word in enumerate(arguments):
        name, equals, value = word.removeprefix("--").partition("=")
        if name == "json" and (equals or word.startswith("--")):
            following = value if equals else next(iter(arguments[place + 1 :]), "-")
            if following == "-" or (not equals and following.startswith("--")):
                return True
    return False


_KINDS: tuple[tuple[type[BaseException], str], ...] = (
    (DocumentError, "document"),
    (OptionError, "option"),
    (InputError, "input"),
    (InfeasibleError, "infeasible"),
    (InstallError, "installation"),
    (AutoparError, "failure"),
    (KeyboardInterrupt, "interrupted"),
)
"""(error class, `kind` in the answer), subclasses first; other errors are `internal`."""


def error_document(error: BaseException, text: str) -> dict[str, Any]:
    """Return the document `{"error": ...}` of a command that ends with an error.

    text : the message on stderr
    """
    kind = next((name for cls, name in _KINDS if isinstance(error, cls)), "internal")
    # Errors of the operating system concern the input: a missing file, a full disk.
    if kind == "internal" and isinstance(error, OSError | MemoryError):
        kind = "input"
    found: dict[str, Any] = {"kind": kind, "message": text}
    if isinstance(error, DocumentError):
        found |= {"file": str(Path(error.path)), "key": error.key, "remedy": error.remedy}
    if isinstance(error, RuleError):
        found["rules"] = [one.entry for one in error.broken]
    return {"error": found}

"""The object of `--json`: one head for the answers of all commands, errors too, and who takes it.

What stands behind the head is the document of a command. An answer goes to stdout or to a file; of
a command that is asked in this process (`autopar.command.asking`) whoever asks takes it, and no
sentence is printed.
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
"""Of the head; another number where a key of it changes its meaning or goes."""
HEAD = ("schema", "command", "release", "exit_code", "question", "notices")
"""Keys that every answer begins with."""
OUTPUTS = frozenset({"all", "html", "json", "out", "output-config-path", "peers", "plot", "trace"})
"""Options of all commands that name files to write, or folders; no part of a question."""


class Running:
    """A command at work: what it is asked, what it has said, and the answer where it is taken."""

    def __init__(self, command: str, *, asked: bool = False) -> None:
        self.command = command
        self.asked = asked
        """Whoever asks in this process takes the answer and the sentences; nothing is printed."""
        self.question: dict[str, Any] = {}
        """Options as they were given, by name; without those of files to write."""
        self.notices: list[str] = []
        """Sentences beside the answer, without the command's name before them."""
        self.answer: dict[str, Any] | None = None
        """What was given, to stdout or to whoever asks; None until then."""
        self.on_stdout = False
        """The command line asks for the answer on stdout."""

    def asks(self, given: Mapping[str, Any]) -> None:
        """Keep the options of a command line as its question."""
        self.question = {name: value for name, value in given.items() if name not in OUTPUTS}

    def hears(self, text: str) -> bool:
        """Keep a sentence for the head; return whether it is not to be printed."""
        self.notices.append(text.removeprefix(f"{self.command}: "))
        return self.asked


_RUNNING: ContextVar[Running | None] = ContextVar("running", default=None)


def running_now() -> Running | None:
    """Return the command that this process is at, None outside of them."""
    return _RUNNING.get()


@contextlib.contextmanager
def running(command: str, *, asked: bool = False) -> Iterator[Running]:
    """Let a command be the one that answers are of, until the block ends."""
    found = Running(command, asked=asked)
    token = _RUNNING.set(found)
    try:
        yield found
    finally:
        _RUNNING.reset(token)


def headed(document: Mapping[str, Any], exit_code: int = 0) -> dict[str, Any]:
    """Return the answer of the command at work: the head, then the document.

    A number that nothing bounds is the text "Infinity", since JSON has none.

    exit_code : with which the command will end.
    """
    now = _RUNNING.get()
    found = {key: _plain(value) for key, value in document.items()}
    if now is None:  # a document that is made outside of commands is one without a head
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
    """Return whether an object is the answer of a command."""
    return data.get("schema") == SCHEMA


def without_head(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document of an answer; of another object what it is."""
    if not is_answer(data):
        return dict(data)
    return {key: value for key, value in data.items() if key not in HEAD}


def give(document: Mapping[str, Any], exit_code: int = 0) -> None:
    """Give the answer of `--json -`: to stdout, or to whoever asked the command."""
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
    """Return whether a command line, which may be no good, asks for its answer on stdout."""
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
"""What an error is called, the narrowest first; anything else is `internal`."""


def error_document(error: BaseException, text: str) -> dict[str, Any]:
    """Return what stands behind the head where a command ends without an answer.

    text : the sentence on stderr.
    """
    kind = next((name for cls, name in _KINDS if isinstance(error, cls)), "internal")
    # the machine's own errors are of what was given: a file that is not there, a full disk
    if kind == "internal" and isinstance(error, OSError | MemoryError):
        kind = "input"
    found: dict[str, Any] = {"kind": kind, "message": text}
    if isinstance(error, DocumentError):
        found |= {"file": str(Path(error.path)), "key": error.key, "remedy": error.remedy}
    if isinstance(error, RuleError):
        found["rules"] = [one.entry for one in error.broken]
    return {"error": found}

"""What every command does when something goes wrong: one sentence and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from autopar.errors import AutoparError

__all__ = [
    "DEBUG_VARIABLE",
    "INTERRUPTED",
    "Failure",
    "describe_failure",
    "guarded",
    "one_line",
    "reader_left",
]

DEBUG_VARIABLE = "AUTOPAR_DEBUG"
"""Environment variable that asks for tracebacks instead of sentences."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""


class Failure(NamedTuple):
    """Why a command ends: a sentence without the command's name, and its exit code."""

    text: str
    exit_code: int
    internal: bool = False
    """It is a mistake of the program, not of what it was given."""


def describe_failure(error: BaseException, *, interrupted: str = "interrupted") -> Failure:
    """Return what a command says of an error that ended it.

    Parameters
    ----------
    interrupted : what is said of Ctrl-C.

    Raises
    ------
    BaseException: the error itself, where its traceback is asked for or it ends the interpreter.
    """
    if isinstance(error, KeyboardInterrupt):
        return Failure(interrupted, INTERRUPTED)
    if not isinstance(error, Exception):
        raise error
    message = getattr(error, "format_message", None)
    if callable(message):  # typer's own usage errors, whose classes it does not export
        return Failure(f"{one_line(str(message())).rstrip('.')}; see --help", 2)
    if os.environ.get(DEBUG_VARIABLE):
        raise error
    if isinstance(error, AutoparError):
        return Failure(one_line(str(error)), error.exit_code)
    text = one_line(f"{type(error).__name__}: {error}")
    return Failure(
        f"internal error, please report it: {text} (set {DEBUG_VARIABLE}=1 for the traceback)",
        1,
        internal=True,
    )


def guarded(
    call: Callable[[], object], say: Callable[[str], None], *, interrupted: str = "interrupted"
) -> int:
    """Return the exit code of a command; whatever goes wrong in it is one sentence.

    Parameters
    ----------
    call : the command; what it returns is the exit code if it is a number.
    say : takes the sentence.
    interrupted : what is said of Ctrl-C.
    """
    try:
        code = call()
        sys.stdout.flush()
    except BrokenPipeError:
        return reader_left()
    except (Exception, KeyboardInterrupt) as error:
        failure = describe_failure(error, interrupted=interrupted)
        say(failure.text)
        return failure.exit_code
    if code == INTERRUPTED:  # typer makes an exit code of Ctrl-C, and says nothing
        say(interrupted)
    return code if isinstance(code, int) else 0


def reader_left() -> int:
    """Return the exit code after whoever reads stdout left, as `| head` does.

    The interpreter must not complain while it flushes, so stdout leads nowhere from here on.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def one_line(text: str) -> str:
    """Return a text with every run of white space as one space."""
    return " ".join(text.split())

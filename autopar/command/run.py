"""What every command says on stderr, and does when something goes wrong: a sentence and a code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from autopar.errors import AutoparError

__all__ = [
    "DEBUG_VARIABLE",
    "INTERRUPTED",
    "Failure",
    "describe_failure",
    "end_of_rank",
    "environment_rank",
    "guarded",
    "one_line",
    "reader_left",
    "say",
]

DEBUG_VARIABLE = "AUTOPAR_DEBUG"
"""Environment variable that asks for tracebacks instead of sentences."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_GRACE_S = 2.0
"""torchrun ends all ranks as soon as one of them fails: the silent ones give the one that
speaks the time to say why."""


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
    # what ends the interpreter is no failure
    if not isinstance(error, Exception):
        raise error
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
        # whoever left is noticed here, while it can still be answered
        sys.stdout.flush()
    except BrokenPipeError:
        return reader_left()
    except (Exception, KeyboardInterrupt) as error:
        failure = describe_failure(error, interrupted=interrupted)
        say(failure.text)
        return failure.exit_code
    if code == INTERRUPTED:  # a command that keeps what it has by then leaves the sentence to this
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


def say(text: str, *, command: str | None = None, speaks: bool = True) -> None:
    """Write one line to stderr at once, where everything goes that is no result.

    Ranks share stderr, so a line is one write.

    Parameters
    ----------
    command : the name that stands before the text, of which all white space is then single spaces.
    speaks : False: say nothing, because of several processes another one says it.
    """
    if not speaks:
        return
    line = text.rstrip("\n") if command is None else f"{command}: {one_line(text)}"
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def environment_rank(name: str) -> int:
    """Return the number that torchrun gave this process, such as RANK; 0 without one."""
    text = os.environ.get(name, "0")
    return int(text) if text.isdecimal() else 0


def end_of_rank(text: str, code: int, *, command: str, speaks: bool) -> int:
    """Return the exit code of one of several processes, after its sentence or a short wait."""
    say(text, command=command, speaks=speaks)
    if not speaks:
        time.sleep(_GRACE_S)
    return code

"""Messages of commands on stderr, and error handling: one message and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from autopar.command.answers import emit_answer, error_document, running_now
from autopar.errors import (
    INTERRUPTED,
    OS_REMEDY,
    TERMINATED,
    UNUSABLE,
    AutoparError,
    fitted,
    message_of,
    os_problem,
    with_remedy,
)

if TYPE_CHECKING:
    from pathlib import Path

DEBUG_VARIABLE = "AUTOPAR_DEBUG"
"""Environment variable that enables tracebacks instead of messages."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Control characters: C0 except tab and newline, DEL, C1, line separators, and marks of text
direction."""
_STDOUT_LOST = frozenset({errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT})
"""errno of a full or closed stdout, for errors without a file name."""
_INTERNAL = 150
"""Maximum characters quoted of an internal error; the sentence around it is as long."""
_GRACE_S = 2.0
"""Seconds that silent ranks wait before they exit. torchrun ends all ranks as soon as one of them
fails, so the rank that reports needs this time."""


class Failure(NamedTuple):
    """Failure of a command: a message without the command's name, and the exit code."""

    text: str
    exit_code: int
    internal: bool = False
    """True for a bug of the program, False for invalid input."""


def describe_failure(error: BaseException, *, interrupted: str = "interrupted") -> Failure:
    """Return the message and exit code for an error that ended a command.

    interrupted : message for Ctrl-C

    Raises BaseException: the error itself, if its traceback is requested or it ends the
    interpreter.
    """
    # Python 3.11 wraps errors raised while a class collects its fields (`__set_name__`).
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        return Failure(interrupted, INTERRUPTED)
    # An exception that ends the interpreter is no failure.
    if not isinstance(error, Exception):
        raise error
    if os.environ.get(DEBUG_VARIABLE):
        raise error
    if isinstance(error, AutoparError):
        return Failure(visible(message_of(error)), error.exit_code)
    if isinstance(error, MemoryError):
        return Failure("out of host memory. Free some, or use a smaller problem", UNUSABLE)
    if isinstance(error, OSError) and error.errno in _STDOUT_LOST and error.filename is None:
        # Otherwise the interpreter would try to write the rest again and print an error.
        closed_pipe_exit_code()
        return Failure(f"stdout cannot be written ({error.strerror})", UNUSABLE)
    if isinstance(error, OSError) and error.filename is not None:
        text = with_remedy(os_problem(error), OS_REMEDY)
        return Failure(fitted(one_line(text)), UNUSABLE)
    # The error of a missing working directory names no file.
    if isinstance(error, FileNotFoundError):
        return Failure("the working directory no longer exists. Change to another", UNUSABLE)
    if _lacks_threads(error):
        return Failure(
            "no further thread or process can be started. End others, or raise `ulimit -u` or "
            "`ulimit -v`",
            UNUSABLE,
        )
    text = fitted(one_line(f"{type(error).__name__}: {error}"), _INTERNAL)
    return Failure(
        f"internal error, please report it: {text} (set {DEBUG_VARIABLE}=1 for the traceback)",
        1,
        internal=True,
    )


def _lacks_threads(error: Exception) -> bool:
    """Return True if the system refused a new thread or process."""
    if isinstance(error, OSError):
        return error.errno in (errno.EAGAIN, errno.ENOMEM)
    # Python has no separate error class for it.
    return type(error) is RuntimeError and error.args == ("can't start new thread",)


def guarded(
    call: Callable[[], object], say: Callable[[str], None], *, interrupted: str = "interrupted"
) -> int:
    """Run a command and return its exit code; an error becomes one message.

    call : the command; its result is the exit code if it is a number
    say : receives the message
    interrupted : message for Ctrl-C
    """
    closed = not make_stdout_usable()
    try:
        with _ended_by_sigterm():
            code = call()
        # A closed pipe shows up here, while it can still be handled.
        sys.stdout.flush()
    except BrokenPipeError:
        return closed_pipe_exit_code()
    except (Exception, KeyboardInterrupt) as error:
        failure = describe_failure(error, interrupted=interrupted)
        answer_failure(error, failure)
        say(failure.text)
        return failure.exit_code
    if closed:
        say("stdout is closed: the output is lost. Redirect it to a file or a terminal")
        return code if isinstance(code, int) and code else UNUSABLE
    if code == INTERRUPTED:  # a command that keeps partial results
        say(interrupted)
    return code if isinstance(code, int) else 0


def answer_failure(error: BaseException, failure: Failure) -> None:
    """Write the error as JSON to stdout if `--json -` was given and no answer was written."""
    now = running_now()
    # After an answer, even a partial one, no reader could parse a second object.
    if now is None or not now.on_stdout or now.answer is not None:
        return
    try:
        emit_answer(error_document(error, failure.text), failure.exit_code)
        sys.stdout.flush()
    except OSError:  # the message on stderr remains, and nothing is written a second time
        closed_pipe_exit_code()


def make_stdout_usable() -> bool:
    """Make stdout accept any text; return False if it was closed, and then discard output."""
    closed = sys.stdout is None
    if closed:
        # Do the work anyway: the command may write files.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for good
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may contain characters that the terminal cannot encode.
        sys.stdout.reconfigure(errors="backslashreplace")
    return not closed


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM unwind the command, so that temporary files and child processes end with it."""

    ended: list[int] = []

    def unwind(number: int, frame: object) -> None:
        ended.append(TERMINATED)
        raise SystemExit(TERMINATED)

    # Only the main thread can set handlers; ranks of torchrun have other handlers.
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    except Exception as error:
        # Python 3.11 wraps errors raised while a class collects its fields (`__set_name__`).
        if ended:
            raise SystemExit(ended[0]) from error
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def closed_pipe_exit_code() -> int:
    """Discard all output to stdout after its reader closed the pipe, as with `| head`; return 0.

    Stdout is redirected to the null device, so that the interpreter prints no error when it
    flushes. The result is the exit code of the command.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def one_line(text: str) -> str:
    """Return a text with single spaces for white space, and with control characters escaped.

    Content of files and command lines is part of messages: an escape sequence in it must be shown,
    not executed by the terminal.
    """
    return visible(" ".join(text.split()))


def _hinted(text: str) -> str:
    """Return a text on one line, except for the lines of `message_of`: a long list, a remedy."""
    first, *others = _LINES.split(text)
    return "\n".join((one_line(first), *map(visible, others)))


_LINES = re.compile(r"\n(?=hint: |  \S)")


def visible(text: str) -> str:
    """Return a text with control characters, except tab and newline, written as escapes."""
    return _CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def say(
    text: str, *, command: str | None = None, speaks: bool = True, passing: bool = False
) -> None:
    """Write one line to stderr immediately; stderr takes all output that is no result.

    A line is one write, because ranks share stderr. A running command also records the message for
    its answer; for a Python caller it is only recorded.

    command : name before the text, whose white space then becomes single spaces; None for no name
    speaks : False to write nothing, because another process writes the message
    passing : True for a temporary message, such as progress, that is not part of an answer
    """
    if not speaks:
        return
    now = running_now()
    if now is not None and ((not passing and now.record_message(one_line(text))) or now.asked):
        return
    line = visible(text.rstrip("\n")) if command is None else f"{command}: {_hinted(text)}"
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except BrokenPipeError:
        # The reader, such as `2>&1 | head -1`, closed the pipe; discard all output from now on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def say_kept(command: str) -> Callable[[Path, Path], None]:
    """Return a callback for `autopar.output` that reports on stderr where earlier content is."""
    return lambda path, kept: say(
        f"{command}: {path} had another content, which is kept as {kept.name}"
    )


def environment_rank(name: str) -> int:
    """Return a number that torchrun set for this process, such as RANK; 0 if not set."""
    text = os.environ.get(name, "0")
    return int(text) if text.isascii() and text.isdecimal() else 0


def rank_exit_code(text: str, code: int, *, command: str, speaks: bool) -> int:
    """Return the exit code of a rank that failed, after its message or a short wait.

    text, code : message and exit code
    speaks : True on the rank that reports; the others wait, because torchrun ends all ranks as soon
        as one exits
    """
    say(text, command=command, speaks=speaks)
    if not speaks:
        time.sleep(_GRACE_S)
    return code

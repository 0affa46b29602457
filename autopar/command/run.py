"""What every command says on stderr, and does when something goes wrong: a sentence and a code."""

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

from autopar.command.answers import error_document, give, running_now
from autopar.errors import INTERRUPTED, TERMINATED, UNUSABLE, AutoparError, fitted

if TYPE_CHECKING:
    from pathlib import Path

DEBUG_VARIABLE = "AUTOPAR_DEBUG"
"""Environment variable that asks for tracebacks instead of sentences."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""C0 without tab and new line, delete, C1, and what ends lines or turns their direction."""
_STDOUT_LOST = frozenset({errno.ENOSPC, errno.EIO, errno.EBADF, errno.EFBIG, errno.EDQUOT})
"""Errors of a stdout that is full or gone; those of files name their file."""
_INTERNAL = 150
"""Characters of an error that is the program's; the words around it take as many."""
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
    # Python 3.11 wraps what is raised while a class takes its fields (`__set_name__`)
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        return Failure(interrupted, INTERRUPTED)
    # what ends the interpreter is no failure
    if not isinstance(error, Exception):
        raise error
    if os.environ.get(DEBUG_VARIABLE):
        raise error
    if isinstance(error, AutoparError):
        return Failure(fitted(one_line(str(error))), error.exit_code)
    if isinstance(error, MemoryError):
        return Failure("there is not enough memory for that; ask for less, or free some", UNUSABLE)
    if isinstance(error, OSError) and error.errno in _STDOUT_LOST and error.filename is None:
        # the interpreter would try to write the rest once more, and complain
        reader_left()
        return Failure(f"stdout cannot be written ({error.strerror})", UNUSABLE)
    if isinstance(error, OSError) and error.filename is not None:
        where = os.fsdecode(error.filename) if not isinstance(error.filename, int) else "stdout"
        text = f"{where}: {error.strerror}; give another path, or make this one usable"
        return Failure(fitted(one_line(text)), UNUSABLE)
    # asking for the working directory names no file
    if isinstance(error, FileNotFoundError):
        return Failure("the working directory does not exist any more; change to another", UNUSABLE)
    text = fitted(one_line(f"{type(error).__name__}: {error}"), _INTERNAL)
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
    closed = not make_stdout_usable()
    try:
        with _ended_by_sigterm():
            code = call()
        # whoever left is noticed here, while it can still be answered
        sys.stdout.flush()
    except BrokenPipeError:
        return reader_left()
    except (Exception, KeyboardInterrupt) as error:
        failure = describe_failure(error, interrupted=interrupted)
        answer_failure(error, failure)
        say(failure.text)
        return failure.exit_code
    if closed:
        say("stdout is closed: what was printed is lost; give it a file or a terminal")
        return code if isinstance(code, int) and code else UNUSABLE
    if code == INTERRUPTED:  # a command that keeps what it has by then leaves the sentence to this
        say(interrupted)
    return code if isinstance(code, int) else 0


def answer_failure(error: BaseException, failure: Failure) -> None:
    """Give the answer of a command that has none where its stdout is for one: why it ended."""
    now = running_now()
    # of what is there already, half of it maybe, no reader would make two objects
    if now is None or not now.on_stdout or now.answer is not None:
        return
    try:
        give(error_document(error, failure.text), failure.exit_code)
        sys.stdout.flush()
    except OSError:  # the sentence on stderr is left, and nothing is written a second time
        reader_left()


def make_stdout_usable() -> bool:
    """Let stdout take whatever is printed; return False where it was closed and takes nothing."""
    closed = sys.stdout is None
    if closed:
        # the work is done all the same: it may be files that are asked for
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for good
    if isinstance(sys.stdout, io.TextIOWrapper):
        # names of files may hold what no terminal shows
        sys.stdout.reconfigure(errors="backslashreplace")
    return not closed


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind the command, so that temporary files and other processes end with it."""

    ended: list[int] = []

    def unwind(number: int, frame: object) -> None:
        ended.append(TERMINATED)
        raise SystemExit(TERMINATED)

    # handlers belong to the main thread; ranks of torchrun have their own
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
        # Python 3.11 wraps what is raised while a class takes its fields (`__set_name__`)
        if ended:
            raise SystemExit(ended[0]) from error
        raise
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def reader_left() -> int:
    """Return the exit code after whoever reads stdout left, as `| head` does.

    The interpreter must not complain while it flushes, so stdout leads nowhere from here on.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def one_line(text: str) -> str:
    """Return a text with every run of white space as one space, and nothing that steers a terminal.

    What a file or a command line holds ends up in sentences: an escape sequence in it must be seen,
    not obeyed.
    """
    return visible(" ".join(text.split()))


def visible(text: str) -> str:
    """Return a text whose control characters but tab and new line are written as escapes."""
    return _CONTROL.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def say(
    text: str, *, command: str | None = None, speaks: bool = True, passing: bool = False
) -> None:
    """Write one line to stderr at once, where everything goes that is no result.

    Ranks share stderr, so a line is one write.

    Parameters
    ----------
    command : the name that stands before the text, of which all white space is then single spaces.
    speaks : False: say nothing, because of several processes another one says it.
    passing : it is of the moment, such as how far something is, and no part of an answer.
    """
    if not speaks:
        return
    now = running_now()
    if now is not None and ((not passing and now.hears(one_line(text))) or now.asked):
        return
    line = visible(text.rstrip("\n")) if command is None else f"{command}: {one_line(text)}"
    try:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    except BrokenPipeError:
        # `2>&1 | head -1` reads no more; what is still to be written is written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def say_kept(command: str) -> Callable[[Path, Path], None]:
    """Return what says on stderr that a file had another content, as `autopar.output` takes it."""
    return lambda path, kept: say(
        f"{command}: {path} had another content, which is kept as {kept.name}"
    )


def environment_rank(name: str) -> int:
    """Return the number that torchrun gave this process, such as RANK; 0 without one."""
    text = os.environ.get(name, "0")
    return int(text) if text.isascii() and text.isdecimal() else 0


def end_of_rank(text: str, code: int, *, command: str, speaks: bool) -> int:
    """Return the exit code of one of several processes, after its sentence or a short wait."""
    say(text, command=command, speaks=speaks)
    if not speaks:
        time.sleep(_GRACE_S)
    return code

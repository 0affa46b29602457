"""What a command says of an error that ends it, and with which exit code."""

from __future__ import annotations

import errno
import os
import signal
from typing import cast

import pytest

from autopar.command.run import describe_failure, guarded
from autopar.errors import INTERRUPTED, AutoparError, InfeasibleError, InstallError, OptionError
from tests.warm import new_interpreter

COMMANDS = {
    "autopar-profile-estimate": "autopar.rates.command",
    "profile-show": "profiler.show.command",
    "profile-model": "profiler.model.command",
    "autopar-search": "search.commands.search",
    "autopar-explain": "search.commands.explain",
}


@pytest.fixture(autouse=True)
def sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the traceback that the surroundings may ask for."""
    monkeypatch.delenv("AUTOPAR_DEBUG", raising=False)


@pytest.mark.parametrize(
    ("error", "code"),
    [(OptionError("a\n  b"), 2), (InfeasibleError("c"), 3), (InstallError("d"), 1)],
)
def test_errors_for_users_keep_their_words(error: AutoparError, code: int) -> None:
    """The sentence is the error's, on one line, and the exit code its own."""
    assert describe_failure(error) == (" ".join(str(error).split()), code, False)


def test_other_errors_are_the_programs() -> None:
    """They are named with a way to the traceback, and marked."""
    failure = describe_failure(ValueError("x\ny"))

    assert failure.text.startswith("internal error, please report it: ValueError: x y (set ")
    assert (failure.exit_code, failure.internal) == (1, True)


def test_a_lack_of_memory_is_no_mistake_of_the_program() -> None:
    """Whoever asked can ask for less."""
    failure = describe_failure(MemoryError("std::bad_alloc"))

    assert failure.text.startswith("out of host memory")
    assert (failure.exit_code, failure.internal) == (2, False)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("can't start new thread"),
        BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_no_thread_or_process_to_be_had_is_said(error: Exception) -> None:
    """`threading` and `os.fork` raise these; the limit of the system is the reason."""
    failure = describe_failure(error)
    assert failure.text.startswith("no further thread or process can be started")
    assert (failure.exit_code, failure.internal) == (2, False)


def test_interrupts_and_exits() -> None:
    """Ctrl-C is 130 with the command's own words; what ends the interpreter goes on."""
    assert describe_failure(KeyboardInterrupt(), interrupted="stopped") == ("stopped", 130, False)
    with pytest.raises(SystemExit):
        describe_failure(SystemExit(4))


@pytest.mark.parametrize("error", [OptionError("a"), ValueError("b")])
def test_tracebacks_on_request(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """With AUTOPAR_DEBUG the error itself comes back, but for Ctrl-C."""
    monkeypatch.setenv("AUTOPAR_DEBUG", "1")
    with pytest.raises(type(error)) as caught:
        describe_failure(error)

    assert caught.value is error
    assert describe_failure(KeyboardInterrupt()).exit_code == 130


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_ends_in_one_sentence(command: str) -> None:
    """Whatever a command runs into, a mistake of its own included, no traceback is shown."""
    code = (
        "import builtins, importlib, sys\n"
        f"module = importlib.import_module({COMMANDS[command]!r})\n"
        "real = builtins.__import__\n"
        "def broken(name, *rest, **kwargs):\n"
        "    if name in ('autopar.errors', 'autopar.rates.card', 'profiler.environment',\n"
        "                'search.planning.session', 'profiler.show.read',\n"
        "                'search.show.terminal'):\n"
        "        raise RuntimeError('boom')\n"
        "    return real(name, *rest, **kwargs)\n"
        "builtins.__import__ = broken\n"
        "sys.exit(module.run(sys.argv[1:]))"
    )
    arguments = {
        "autopar-profile-estimate": ["--model", "llama2-7b", "--hardware", "h100:1x8"],
        "profile-model": ["--model", "llama2-7b"],
        "profile-show": ["."],
        "autopar-search": [],
        "autopar-explain": ["README.md"],
    }[command]
    if command == "autopar-profile-estimate":
        arguments += ["--out", "nowhere"]
    done = new_interpreter(code, *arguments)

    assert done.returncode == 1
    expected = "internal error, please report it: RuntimeError: boom"
    assert done.stderr == f"{command}: {expected} (set AUTOPAR_DEBUG=1 for the traceback)\n"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, INTERRUPTED)]
)
def test_a_signal_while_a_class_is_made_ends_a_command(number: int, code: int) -> None:
    """Python 3.11 wraps in RuntimeError what is raised while a class takes its fields."""

    class Field:
        def __set_name__(self, owner: type, name: str) -> None:
            os.kill(os.getpid(), number)
            # handlers run between byte codes
            for _ in range(1000):
                pass

    def makes_a_class() -> None:
        type("Made", (), {"field": Field()})

    said: list[str] = []
    # the first unwinds as the interpreter's end does
    try:
        ended = guarded(makes_a_class, said.append)
    except SystemExit as end:
        ended = cast(int, end.code)
    assert ended == code
    assert said in ([], ["interrupted"])

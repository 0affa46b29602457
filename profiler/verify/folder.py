"""The commands that `autopar-verify` drives: how they are written, started, and how they fail."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from filelock import FileLock, Timeout

from autopar.command.run import one_line
from autopar.documents.json import load_object, write_json
from autopar.errors import AutoparError, InstallError, OptionError
from profiler.verify.options import (
    OWN_FOLDERS,
    VerifyOptions,
    differences,
    question_of,
    require_own_inputs,
)

__all__ = [
    "Command",
    "CommandError",
    "Folder",
    "Start",
    "Usage",
    "environment",
    "start_process",
]


# --------------------------------------------------------------------------------------------------
# How much of the machine other processes took while a command ran: what disturbs a measurement.
#
# Linux alone says it (`/proc/stat`, proc(5)); elsewhere, and where the processors of the machine
# are not those of this process, as in a container with a part of them, it is unknown.


_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and iowait of user nice system idle iowait irq softirq steal ...
_NUM_FIELDS = 8  # guest times after them are contained in user and nice


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Processor time since some moment, in seconds."""

    wall_s: float
    busy_s: float
    """Of all processors, whoever used them."""
    own_s: float
    """Of the processes that this one started and that have ended."""
    num_processors: int

    @classmethod
    def now(cls, stat: Path = _STAT) -> Self | None:
        """Return the usage so far; None where it is unknown."""
        try:
            lines = stat.read_text("ascii").splitlines()
            usable = len(os.sched_getaffinity(0))
            ticks = os.sysconf("SC_CLK_TCK")
        except (OSError, AttributeError, ValueError):
            return None
        processors = [line for line in lines if line.startswith("cpu") and line[3:4].isdigit()]
        if len(processors) != usable:
            return None
        fields = [int(word) for word in lines[0].split()[1 : 1 + _NUM_FIELDS]]
        busy = sum(value for place, value in enumerate(fields) if place not in _IDLE)
        own = os.times()
        return cls(
            wall_s=time.monotonic(),
            busy_s=busy / ticks,
            own_s=own.children_user + own.children_system + own.user + own.system,
            num_processors=usable,
        )

    def others_since(self, before: Self) -> float:
        """Return the share of the processors' time that other processes took since then, 0 to 1."""
        # the most that all processors can give
        time_s = (self.wall_s - before.wall_s) * self.num_processors
        others_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return min(max(others_s / time_s, 0.0), 1.0) if time_s > 0.0 else 0.0


# --------------------------------------------------------------------------------------------------
# Commands: written, started, waited for, and what they said when they failed.


_GRACE_S = 10.0
_QUESTION = "question.json"
_CALIBRATION = "calibration.json"


class CommandError(AutoparError):
    """A command ended with an error; it has its exit code, and its sentence in ours."""

    def __init__(self, text: str, *, exit_code: int, sentence: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code
        self.sentence = sentence


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command line, and the files that are there when it is done."""

    name: str
    """Of its log; unique in a work folder, may contain slashes."""
    title: str
    """What it does, for people."""
    words: tuple[str, ...]
    """As somebody types it."""
    outputs: tuple[Path, ...]

    @property
    def line(self) -> str:
        """The command as a shell reads it."""
        return shlex.join(self.words)


Start = Callable[[Command, Path, Mapping[str, str]], int]
"""Runs a command with a log and an environment; returns its exit code."""


class Folder:
    """The work folder: what is in it counts, if it answers the same question.

    Parameters
    ----------
    say : takes one line for stderr.
    start : runs the commands.

    Raises
    ------
    OptionError : the folder holds the answers to another question, or given files that
        --no-resume would delete, or cannot be written.
    InputError : a given file is unusable.
    """

    def __init__(
        self, options: VerifyOptions, say: Callable[[str], None], start: Start | None = None
    ) -> None:
        require_own_inputs(options)
        self.path = options.work
        self.calibration = self.path / _CALIBRATION
        self.say = say
        self.num_started = 0
        self._start = start or start_process
        self._environment = environment(options)
        question = question_of(options)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self.held():
                self._open(question, resume=options.resume)
        except OSError as error:
            raise OptionError(
                f"--work: {self.path} cannot be written ({error.strerror or error}); choose "
                "another folder"
            ) from None

    def _open(self, question: dict[str, str], *, resume: bool) -> None:
        path = self.path / _QUESTION
        known = path.is_file()
        if known and resume:
            differ = differences(load_object(path).data, question)
            if differ:
                raise OptionError(
                    f"--work: {self.path} answers another question ({'; '.join(differ)}); choose "
                    "another folder, or empty it with --no-resume"
                )
        if known and not resume:
            self.drop_calibration()
            for name in OWN_FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
        write_json(path, dict(question))

    def drop_calibration(self) -> None:
        """Delete the calibration of an earlier call, which rests on other runs.

        Raises
        ------
        OptionError : it cannot be deleted.
        """
        try:
            self.calibration.unlink(missing_ok=True)
        except OSError as error:
            raise OptionError(
                f"--work: {self.calibration} cannot be deleted ({error.strerror or error}); "
                "choose another folder"
            ) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep every other call out of the folder; raises an OptionError where one is in it."""
        # a second call is refused at once instead of waiting for minutes
        lock = FileLock(self.path / ".lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise OptionError(
                f"--work: another autopar-verify works in {self.path}; wait for it, or choose "
                "another folder"
            ) from None
        try:
            yield
        finally:
            lock.release()

    def run(self, command: Command) -> None:
        """Run a command unless its files are there from an earlier call.

        Raises
        ------
        CommandError : it failed; names the command, its sentence and its log.
        """
        stamp = self.path / "done" / f"{command.name}.json"
        if _is_done(stamp, command):
            return
        self.say(command.title)
        log = self.path / "logs" / f"{command.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        for path in command.outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.num_started += 1
        log.write_text(f"$ {command.line}\n", encoding="utf-8")
        before = Usage.now()
        code = self._start(command, log, self._environment)
        after = Usage.now()
        missing = [path for path in command.outputs if not path.exists()]
        if code or missing:
            sentence = _last_sentence(log) if code else f"wrote no {missing[0].name}"
            program = _program(command)
            raise CommandError(
                f"{program} failed (exit {code}): {sentence.rstrip('.')}; all that it said is in "
                f"{log}",
                # 2 and 3 mean something to callers; any other end is a failure
                exit_code=code if code in (2, 3) else 1,
                sentence=sentence,
            )
        others = None if before is None or after is None else after.others_since(before)
        # last: only what has written its files is done
        write_json(stamp, {"command": list(command.words), "others": others})

    def others(self, folder: str) -> tuple[float, ...]:
        """Return the share of the machine that others took during each command of a folder.

        Empty where it is unknown.
        """
        stamps = sorted((self.path / "done" / folder).glob("*.json"))
        shares = [load_object(stamp).data.get("others") for stamp in stamps]
        return tuple(share for share in shares if isinstance(share, float))


def environment(options: VerifyOptions) -> Mapping[str, str]:
    """Return the environment of the commands: as many threads per process as a rank can have.

    The model is profiled by one process and run by several; with the threads of a rank in both,
    the profile is of what a rank does.
    """
    found = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // options.nproc)))
    return found


def _is_done(stamp: Path, command: Command) -> bool:
    if not stamp.is_file() or not all(path.exists() for path in command.outputs):
        return False
    # another command line under this name asks something else
    return bool(load_object(stamp).data.get("command") == list(command.words))


def start_process(command: Command, log: Path, variables: Mapping[str, str]) -> int:
    """Run a command as a process and return its exit code; what it says is added to the log."""
    words = (_executable(command.words[0]), *command.words[1:])
    with log.open("a", encoding="utf-8") as stream:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=variables
        )
        try:
            return process.wait()
        finally:
            if process.poll() is None:  # interrupted: torchrun ends its ranks when it is asked to
                process.terminate()
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _executable(name: str) -> str:
    """Return the path of a command of the same installation as this process, else of PATH."""
    beside = Path(sys.executable).with_name(name)
    if beside.is_file():
        return str(beside)
    found = shutil.which(name)
    if found is None:
        remedy = "'autopar[profile]'" if name == "torchrun" else "autopar"
        raise InstallError(f"{name}: this command is not installed; pip install {remedy}")
    return found


def _program(command: Command) -> str:
    """Return the name by which people know the command: `profiler.plan` of a torchrun."""
    words = command.words
    return f"torchrun -m {words[words.index('-m') + 1]}" if "-m" in words else words[0]


def _last_sentence(log: Path) -> str:
    """Return the last line of a log that a command of ours said of itself, else its last line."""
    lines = [one_line(line) for line in log.read_text("utf-8", errors="replace").splitlines()[1:]]
    lines = [line for line in lines if line]
    ours = [
        text
        for line in lines
        for name in ("autopar", "autopar-search", "profile-model", "profile-plan")
        if line.startswith(f"{name}: ") and (text := line.removeprefix(f"{name}: "))
    ]
    return (ours or lines or ["it said nothing"])[-1]

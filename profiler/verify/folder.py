"""Options of `autopar-verify`, and the work folder that keeps its results.

A folder holds the results of one question: its options and the contents of the given files. The
folder runs the commands that measure, search and run plans, and reuses their outputs in later
calls.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, Self

from autopar import __version__
from autopar.command.fields import json_option, option, validate
from autopar.command.run import one_line
from autopar.documents import catalog
from autopar.documents.hardware import read_hardware_dir
from autopar.documents.json import load_object, write_json
from autopar.errors import AutoparError, InstallError, OptionError
from autopar.records import Record
from autopar.sources import Source
from profiler.options import FILES, HOW, MAX_REPETITIONS, MAX_SIZE
from profiler.record import Lock

# --------------------------------------------------------------------------------------------------
# The options, and the question that they define.


Device = Literal["cuda", "cpu"]
MINIMUM_PLANS = 8
"""Minimum plans for a meaningful rank correlation: with 8, a correlation of 0.64 is chance once in
20 times (one-sided, table of Zar, J. Am. Stat. Assoc. 67 (1972) 578)."""
OWN_FOLDERS = ("hardware", "model", "search", "plans", "runs", "probes", "logs", "done")
"""Subfolders of the work folder that are written, and emptied by --no-resume."""
_MOST_RANKS = 1024
_WHAT = "What to verify"
PANELS = (_WHAT, HOW, FILES)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of one verification; defaults are those of the command."""

    PANEL: ClassVar[str] = _WHAT

    model: str | None = option(
        None,
        help="shipped name or model file [a small model for CPUs]",
        metavar="MODEL",
        most_used=True,
    )
    """Model name or file; None writes a small model into the work folder."""
    layers: str | None = option(
        None,
        help="layers to keep of the model: 4, or 2,2 by layer type",
        metavar="K",
        shown="all",
        most_used=True,
    )
    seq_length: int | None = option(
        None,
        name="seq",
        help="sequence length, tokens",
        shown="the model's own",
        between=(1, MAX_SIZE),
    )
    nproc: int = option(
        2, help="number of ranks, all on this machine", between=(1, _MOST_RANKS), most_used=True
    )
    batch: int = option(
        8, help="global batch size, samples per step", between=(1, 1 << 20), most_used=True
    )
    plans: int = option(4, help="number of best plans to run", between=(1, 100), most_used=True)
    contrast: int = option(
        8, help="number of other plans to run, for a range of step times", between=(0, 100)
    )
    memory_constraint: float | None = option(
        None,
        help="memory per rank for the search, GiB",
        above=0,
        high=1 << 20,
        expects="GiB above {above}",
    )
    """Memory of a rank, GiB; None uses the default of the search."""
    repeats: int = option(3, help="rounds; each runs every plan once", panel=HOW, between=(1, 1000))
    steps: int = option(5, help="timed steps per run", panel=HOW, between=(1, MAX_REPETITIONS))
    device: Device | None = option(
        None,
        help="auto: GPUs if torch finds one per rank",
        panel=HOW,
        choices={"auto": None, "cuda": "cuda", "cpu": "cpu"},
        shown="auto",
        most_used=True,
    )
    precision: Literal["fp32", "bf16"] | None = option(
        None,
        help="auto: bf16 on GPUs, fp32 on CPUs",
        panel=HOW,
        choices={"auto": None, "bf16": "bf16", "fp32": "fp32"},
        shown="auto",
    )
    work: Path = option(
        Path("verify"),
        help="folder of measurements and results",
        panel=FILES,
        metavar="DIR",
        most_used=True,
    )
    resume: bool = option(
        True,
        help="reuse matching results in the folder",
        panel=FILES,
        most_used=True,
    )
    hardware: str | None = option(
        None,
        help="hardware profile [measured first]",
        panel=FILES,
        metavar="DIR",
        most_used=True,
    )
    profiles: str | None = option(
        None,
        help="model profile [measured first]",
        panel=FILES,
        metavar="DIR",
        most_used=True,
    )
    json: str | None = json_option(FILES, most_used=True)
    dry_run: bool = option(
        False, help="print the commands without running them", panel=FILES, most_used=True
    )

    def __post_init__(self) -> None:
        validate(self)


def checked_options(options: VerifyOptions) -> VerifyOptions:
    """Return the options after checking that they are consistent.

    Raises OptionError: a folder or a combination of options is invalid.
    """
    if options.batch % options.nproc:
        raise OptionError(
            f"--batch {options.batch}: does not divide among --nproc "
            f"{options.nproc} ranks ({options.batch} % {options.nproc} = "
            f"{options.batch % options.nproc})"
        )
    if options.layers is not None and not re.fullmatch(
        r"[1-9][0-9]{0,4}(,[1-9][0-9]{0,4})*", options.layers
    ):
        raise OptionError(
            f"--layers: expected the number of layers, such as 4, or one number per layer type, "
            f"such as 2,2, got {options.layers!r:.60}"
        )
    if options.model is None and options.profiles is not None:
        raise OptionError("--profiles needs --model", remedy="Add --model")
    for name, folder in (("--hardware", options.hardware), ("--profiles", options.profiles)):
        if folder is not None and not Path(folder).is_dir():
            raise OptionError(
                f"{name} {folder}: expected a folder", remedy="Use the folder of the measured files"
            )
    require_own_inputs(options)
    return options


def require_own_inputs(options: VerifyOptions) -> None:
    """Raise OptionError if given files are inside folders that --no-resume empties."""
    # Links are resolved: the location of the files counts, not their names.
    work = options.work.resolve()
    for name, given in (
        ("--hardware", options.hardware),
        ("--profiles", options.profiles),
        ("--model", options.model),
    ):
        if given is None or not Path(given).exists():  # a shipped name
            continue
        inside = Path(given).resolve()
        for folder in OWN_FOLDERS:
            if inside.is_relative_to(work / folder):
                raise OptionError(
                    f"{name}: {given} is in {options.work / folder}, which autopar-verify writes "
                    "and --no-resume empties",
                    remedy="Copy these files to another folder, or use another --work",
                )


# --------------------------------------------------------------------------------------------------
# The question of a work folder: its options, the given files, the release.


_NOT_ASKED = {"work", "resume", "json", "dry_run", "repeats", "plans", "contrast"}
"""Options that may change between two calls in one folder without invalidating its content."""
_NOT_GIVEN = "not given"
_SHOWN = 12
"""Characters of a hash in a message."""


def question_of(options: VerifyOptions) -> dict[str, str]:
    """Return the question; a given file with different content makes it a different question.

    Raises InputError: a given file is missing or invalid.
    """
    found = {
        name: _NOT_GIVEN if value is None else str(value)
        for name, value in vars(options).items()
        if name not in _NOT_ASKED
    }
    # Another release may price a plan differently.
    found["autopar"] = __version__
    if options.model is not None:
        found["model_sha256"] = load_object(catalog.find_model(options.model)).sha256
    if options.hardware is not None:
        hardware = read_hardware_dir(options.hardware, num_nodes=1, gpus_per_node=options.nproc)
        found["hardware_sha256"] = _digest(hardware.sources)
    if options.profiles is not None:
        found["profiles_sha256"] = _digest(profile_sources(options.profiles))
    return found


def differences(before: dict[str, object], now: dict[str, str]) -> list[str]:
    """Return the differences between two questions, with both values."""
    said = []
    for name, value in now.items():
        then = str(before.get(name, _NOT_GIVEN))
        if then != value:
            shown = _SHOWN if name.endswith("_sha256") else None
            said.append(f"{name} {then[:shown]} then, {value[:shown]} now")
    return said


def profile_sources(folder: str) -> tuple[Source, ...]:
    """Return the profile files of a model in a folder, with their hashes.

    Raises DocumentError: a file cannot be read.
    """
    return tuple(
        Source(role="model profile", path=str(path), sha256=load_object(path).sha256)
        for path in sorted(Path(folder).glob("*_profiling_*.json"))
    )


def _digest(sources: Sequence[Source]) -> str:
    """Return one hash of the names and contents of files."""
    # Names without folders, so that moved files have the same hash.
    lines = sorted(f"{Path(source.path).name} {source.sha256}\n" for source in sources)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# --------------------------------------------------------------------------------------------------
# Processor time of other processes while a command ran, which disturbs a measurement.
#
# Only Linux reports it (`/proc/stat`, proc(5)). It is unknown elsewhere, and if this process may
# not use all processors of the machine, as in a container with some of them.


_STAT = Path("/proc/stat")
_IDLE = (3, 4)  # idle and iowait of user nice system idle iowait irq softirq steal ...
_NUM_FIELDS = 8  # later guest times are included in user and nice


class Usage(Record):
    """Cumulative processor time, seconds."""

    wall_s: float
    busy_s: float
    """Busy seconds of all processors, by any process."""
    own_s: float
    """Seconds of this process and of its child processes that have ended."""
    num_processors: int

    @classmethod
    def now(cls, stat: Path = _STAT) -> Self | None:
        """Return the usage so far; None if it is unknown."""
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
        """Return the fraction of processor time used by other processes since `before`, 0 to 1."""
        # Maximum time of all processors.
        time_s = (self.wall_s - before.wall_s) * self.num_processors
        others_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        return min(max(others_s / time_s, 0.0), 1.0) if time_s > 0.0 else 0.0


# --------------------------------------------------------------------------------------------------
# Commands: creation, execution, and the error messages of failed ones.


_GRACE_S = 10.0
_QUESTION = "question.json"
_CALIBRATION = "calibration.json"


class CommandError(AutoparError):
    """Failure of a command, with its exit code and its error message."""

    def __init__(self, problem: str, *, remedy: str, exit_code: int, sentence: str) -> None:
        super().__init__(problem, remedy=remedy)
        self.exit_code = exit_code
        self.sentence = sentence


class Command(Record):
    """One command line, and the files that it writes."""

    name: str
    """Name of its log; unique in a work folder, may contain slashes."""
    title: str
    """Description of the command for messages."""
    words: tuple[str, ...]
    """Words of the command line."""
    outputs: tuple[Path, ...]

    @property
    def line(self) -> str:
        """Command line in shell syntax."""
        return shlex.join(self.words)


Start = Callable[[Command, Path, Mapping[str, str]], int]
"""Function that runs a command with a log and an environment, and returns its exit code."""


class Folder:
    """Work folder, whose files are reused if they answer the same question.

    say : prints one line on stderr.
    start : runs the commands.

    Raises OptionError: the folder belongs to another question, contains given files that
    --no-resume would delete, or cannot be written. Raises InputError: a given file is invalid.
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
                f"--work {self.path}: cannot be written ({error.strerror or error})",
                remedy="Use another folder",
            ) from None

    def _open(self, question: dict[str, str], *, resume: bool) -> None:
        path = self.path / _QUESTION
        known = path.is_file()
        if known and resume:
            differ = differences(load_object(path).data, question)
            if differ:
                raise OptionError(
                    f"--work {self.path}: contains results for other inputs ({'; '.join(differ)})",
                    remedy="Use another folder, or empty it with --no-resume",
                )
        if known and not resume:
            self.drop_calibration()
            for name in OWN_FOLDERS:
                shutil.rmtree(self.path / name, ignore_errors=True)
        write_json(path, dict(question))

    def drop_calibration(self) -> None:
        """Delete the calibration of an earlier call, which is based on other runs.

        Raises OptionError: it cannot be deleted.
        """
        try:
            self.calibration.unlink(missing_ok=True)
        except OSError as error:
            raise OptionError(
                f"--work {self.calibration}: cannot be deleted ({error.strerror or error})",
                remedy="Use another folder",
            ) from None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other calls; raises OptionError if another call holds it."""
        lock = Lock(self.path, "--work")
        if lock.note is not None:
            self.say(lock.note)
        try:
            yield
        finally:
            lock.release()

    def run(self, command: Command) -> None:
        """Run a command unless an earlier call has completed it.

        Raises CommandError: it failed; the message contains the command, its error and its log.
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
                f"{program} failed (exit {code}): {sentence.rstrip('.')}",
                remedy=f"See {log}",
                # Callers distinguish exit codes 2 and 3; any other code is a failure.
                exit_code=code if code in (2, 3) else 1,
                sentence=sentence,
            )
        others = None if before is None or after is None else after.others_since(before)
        # Written last: a command is done only after it has written its files.
        write_json(stamp, {"command": list(command.words), "others": others})

    def others(self, folder: str) -> tuple[float, ...]:
        """Return the processor fraction used by other processes during each command of a folder.

        Empty if unknown.
        """
        stamps = sorted((self.path / "done" / folder).glob("*.json"))
        shares = [load_object(stamp).data.get("others") for stamp in stamps]
        return tuple(share for share in shares if isinstance(share, float))


def environment(options: VerifyOptions) -> Mapping[str, str]:
    """Return the environment of the commands, with OMP_NUM_THREADS of one rank.

    One process profiles the model and several run it. With equal threads in both, the profile
    describes a rank of the run.
    """
    found = dict(os.environ)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // options.nproc)))
    return found


def _is_done(stamp: Path, command: Command) -> bool:
    if not stamp.is_file() or not all(path.exists() for path in command.outputs):
        return False
    # A different command line under this name has to run again.
    return bool(load_object(stamp).data.get("command") == list(command.words))


def start_process(command: Command, log: Path, variables: Mapping[str, str]) -> int:
    """Run a command as a process and return its exit code; its output is appended to the log."""
    words = (_executable(command.words[0]), *command.words[1:])
    with log.open("a", encoding="utf-8") as stream:
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, env=variables
        )
        try:
            return process.wait()
        finally:
            if process.poll() is None:  # interrupted: torchrun ends its ranks on SIGTERM
                process.terminate()
                try:
                    process.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _executable(name: str) -> str:
    """Return the path of a command in this Python installation, else in PATH."""
    beside = Path(sys.executable).with_name(name)
    if beside.is_file():
        return str(beside)
    found = shutil.which(name)
    if found is None:
        remedy = "'autopar[profile]'" if name == "torchrun" else "autopar"
        raise InstallError(
            f"{name}: this command is not installed", remedy=f"Run `pip install {remedy}`"
        )
    return found


def _program(command: Command) -> str:
    """Return the display name of a command, such as `torchrun -m profiler.plan`."""
    words = command.words
    return f"torchrun -m {words[words.index('-m') + 1]}" if "-m" in words else words[0]


def _last_sentence(log: Path) -> str:
    """Return the last error message of one of our commands in a log, else its last line."""
    lines = [one_line(line) for line in log.read_text("utf-8", errors="replace").splitlines()[1:]]
    lines = [line for line in lines if line]
    ours = [
        text
        for line in lines
        for name in ("autopar", "autopar-search", "profile-model", "profile-plan")
        if line.startswith(f"{name}: ") and (text := line.removeprefix(f"{name}: "))
    ]
    return (ours or lines or ["no output"])[-1]

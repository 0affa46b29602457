"""Starts the runs of `hostile` under limits, watches the files they touch, and classifies their
ends.

    python -m tests.property.hostile_runs 17 [KIND]

repeats the run of a seed and prints all of it. Processes are copies of one that has imported every
command, so that a run costs milliseconds; that one is itself a copy of `tests.warm`.
"""

from __future__ import annotations

import contextlib
import gc
import os
import re
import resource
import shlex
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autopar.cli import SUBCOMMANDS
from tests.property.hostile import CANARY, Run, make
from tests.warm import Warm, context

LIMIT_S = 20.0
"""CPU seconds; other work on the machine does not count. The run ends after six times as long."""
LIMIT_BYTES = 2 << 30
"""Bytes of address space beyond those of the process that the runs are copies of."""
LONGEST = 300
"""Largest number of characters of a sentence."""
OUTCOMES = ("ok", "refused", "infeasible", "said")
"""Allowed outcomes: done, exit 2, exit 3, and exit 1 of commands that define it."""
BAD = (
    "TRACEBACK",
    "INTERNAL",
    "HANG",
    "MEMORY",
    "SPECIAL",
    "CRASH",
    "WARNING",
    "LONG",
    "CONTROL",
    "SENTENCES",
    "NONSENSE",
    "IGNORED",
)
"""Forbidden outcomes, also for: a Python warning, a sentence that is too long, a control character
on a stream, no or several sentences with a refusal, nan or inf as a result, a value of a wrong type
that is passed over (`hostile_shapes`).
"""
_STYLE = re.compile(r"\x1b\[[0-9;]*m|\x1b\]8;[^\x1b]*\x1b\\")
_STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]")
_NONSENSE = re.compile(r"(?<![\w/.'\"=-])(?:nan|inf)\b(?![/.])")
_QUOTED = re.compile(r"(got|\(is|\([\w.]+ is) [^ ]*(nan|inf)\b")
_EXTRA_USE_OF_1 = {"profile show", "plan", "profile model", "verify"}


@dataclass(frozen=True, kw_only=True)
class Ended:
    """Exit code, peak memory and output of a process."""

    code: int | None
    """Exit code; None if it was killed at the time limit."""
    peak_bytes: int
    wall_s: float
    cpu_s: float
    out: bytes
    err: bytes


@dataclass(frozen=True, kw_only=True)
class Done:
    """A run, its end and the class of that end."""

    run: Run
    ended: Ended
    outcome: str
    detail: str
    folder: str

    def command(self) -> str:
        """Return the command that repeats this run."""
        if self.run.kind == "shapes":
            return f".venv/bin/python -m benchmarks.hostile_runs --seed {self.run.seed}"
        return f".venv/bin/python -m tests.property.hostile_runs {self.run.seed} {self.run.kind}"


# --------------------------------------------------------------------------------------------------
# The process that the others are copies of.

_USED = (
    *(
        "encodings.utf_8_sig",
        "rich._emoji_codes",
        "yaml",
        "search.planning.session",
        "search.request.request",
    ),
    *("search.planning.layered.planner", "search.show.terminal", "search.questions.gains"),
    *("search.show.files", "search.show.closed_form", "search.closed_form.files"),
    *(
        "search.closed_form.session",
        "search.closed_form.validation",
        "search.closed_form.questions",
    ),
    *("search.closed_form.calculon.exploration", "search.closed_form.tensor2d.exploration"),
    *("search.closed_form.tuners.tune", "search.engines.text", "search.planning.exports"),
    *(
        "search.engines.galvatron.plan",
        "search.engines.megatron.plan",
        "search.planning.layered.parts",
    ),
    *(
        "search.engines.torchtitan.plan",
        "search.engines.deepspeed.plan",
        "search.engines.huggingface.plan",
    ),
    *("profiler.plan.question", "profiler.plan.report", "profiler.plan.arithmetic"),
)
"""Modules that commands import on demand."""


def serve(connection: Connection) -> None:
    """Start a copy of this process for each job, and send its result."""
    for name, (_, module, _) in SUBCOMMANDS.items():
        if name not in ("profile hardware", "profile site"):  # torchrun starts them
            import_module(module)
    for module in _USED:
        import_module(module)
    gc.collect()
    gc.freeze()
    connection.send("ready")
    while (job := connection.recv()) is not None:
        connection.send(_one(job))


def _one(job: dict[str, Any]) -> tuple[int | None, int, float, float]:
    master = slave = fifo = -1
    if job["stdout"] == "terminal":
        master, slave = os.openpty()
    with contextlib.suppress(OSError):
        # a pipe needs a reader
        fifo = os.open(Path(job["cwd"]) / "fifo", os.O_RDWR | os.O_NONBLOCK)
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _child(job, slave)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    if slave >= 0:
        os.close(slave)
    shown = open(job["out"], "ab") if master >= 0 else None  # noqa: SIM115, PTH123
    code: int | None = None
    peak = 0
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        for handle in (master, fifo):
            _drain(handle, shown if handle == master else None)
        if found:
            code = os.waitstatus_to_exitcode(status)
            code = None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code
            peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
            break
        if time.monotonic() - start > 6 * LIMIT_S:
            os.killpg(pid, signal.SIGKILL)
            usage = os.wait4(pid, 0)[2]
            peak = usage.ru_maxrss * 1024
            break
        time.sleep(0.002)
    wall_s = time.monotonic() - start
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)  # child processes of the command
    for handle in (master, fifo):
        if handle >= 0:
            os.close(handle)
    if shown is not None:
        shown.close()
    return code, peak, wall_s, usage.ru_utime + usage.ru_stime


def _drain(handle: int, into: Any) -> None:
    if handle < 0:
        return
    os.set_blocking(handle, False)
    with contextlib.suppress(OSError):  # nothing there, or the other end is closed
        while data := os.read(handle, 65536):
            if into is not None:
                into.write(data)


def _child(job: dict[str, Any], slave: int) -> None:
    """Become the command; never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (int(LIMIT_S), int(LIMIT_S) + 1))
        _streams(job, slave)
        os.environ.clear()
        os.environ.update(job["environment"])
        os.chdir(job["cwd"])
        if job["gone"]:
            gone = Path("../was_here").absolute()
            gone.mkdir()
            os.chdir(gone)
            gone.rmdir()
        command, module, _ = SUBCOMMANDS[job["name"]]
        sys.argv[:] = [command, *job["arguments"]]
        try:
            code = import_module(module).run(sys.argv[1:])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _streams(job: dict[str, Any], slave: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    os.dup2(os.open(job["err"], flags), 2)
    kind = job["stdout"]
    if kind == "closed":
        os.close(1)
    elif kind == "terminal":
        os.dup2(slave, 1)
    else:
        os.dup2(os.open("/dev/full" if kind == "full" else job["out"], flags), 1)
    encoding = "ascii" if kind == "ascii" or job["environment"].get("LANG") == "C" else "utf-8"
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding=encoding, errors="backslashreplace", buffering=1, closefd=False
    )
    # the interpreter has no stdout where it starts with a closed one
    sys.stdout = (
        None  # type: ignore[assignment]
        if kind == "closed"
        else open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    )
    sys.__stdout__ = sys.stdout  # type: ignore[misc]
    sys.__stderr__ = sys.stderr  # type: ignore[misc]


# --------------------------------------------------------------------------------------------------
# The side of the test.


class Runner:
    """Runs seeds one after another, each in a separate folder below one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mine, theirs = context().Pipe()
        self._server = Warm(serve, theirs, name="hostile")
        theirs.close()
        assert self._mine.recv() == "ready"

    def close(self) -> None:
        """End the process that the runs are copies of."""
        with contextlib.suppress(OSError):
            self._mine.send(None)
        self._server.wait(30)
        self._server.stdout.close()
        self._server.stderr.close()

    def run(
        self,
        seed: int,
        *,
        kind: str | None = None,
        keep: bool = False,
        make: Callable[..., Run] = make,
    ) -> Done:
        """Run a seed and return its result; its output is removed.

        make : fills a folder and returns the run of a seed.
        """
        top = self.folder / f"run{seed}"
        here = top / "a" / "b"
        here.mkdir(parents=True)
        done = self.start(make(seed, here, kind=kind), here, str(top))
        if not keep:
            _remove(top)
        return done

    def start(self, run: Run, here: Path, folder: str = "") -> Done:
        """Start a prepared run."""
        before = _state(here, run.inputs)
        outside = here.parent / "canary"
        outside.write_bytes(CANARY)
        names = {name: here.parent / f"std{name}" for name in ("out", "err")}
        for path in names.values():
            path.write_bytes(b"")
        environment = {
            **{k: v for k, v in os.environ.items() if k != "AUTOPAR_DEBUG"},
            "HOME": str(here.parent),
            "TERM": "xterm",
            **run.environment,
        }
        job = {
            "name": run.name,
            "arguments": list(run.arguments),
            "stdout": run.stdout,
            "environment": {k: v for k, v in environment.items() if v is not None},
            "gone": run.gone,
            "cwd": str(here),
            **{name: str(path) for name, path in names.items()},
        }
        self._mine.send(job)
        code, peak, wall, cpu = self._mine.recv()
        out, err = (path.read_bytes() for path in names.values())
        ended = Ended(code=code, peak_bytes=peak, wall_s=wall, cpu_s=cpu, out=out, err=err)
        touched = [
            *(name for name, was in before.items() if _state(here, (name,))[name] != was),
            *(["../canary"] if outside.read_bytes() != CANARY else []),
            *(str(path.relative_to(here.parent)) for path in here.parent.rglob("pwned*")),
            *(str(path.relative_to(here.parent)) for path in here.parent.rglob("*.part")),
        ]
        outcome, detail = classify(run, ended, touched)
        return Done(run=run, ended=ended, outcome=outcome, detail=detail, folder=folder)


@contextlib.contextmanager
def runner(folder: Path) -> Iterator[Runner]:
    """Yield a runner, and end it afterwards."""
    one = Runner(folder)
    try:
        yield one
    finally:
        one.close()


def _state(here: Path, inputs: tuple[str, ...]) -> dict[str, tuple[object, ...]]:
    """Return the state that must not change: special files, content of inputs, targets of links."""
    special = ("null", "full", "fifo", "socket", "loop", "dangling", "canary_link")
    found: dict[str, tuple[object, ...]] = {}
    for name in (*special, *inputs):
        path = here / name
        try:
            status = path.lstat()
        except OSError as error:
            found[name] = (error.errno,)
            continue
        content: object = None
        if stat.S_ISREG(status.st_mode) and status.st_size < 1 << 26:
            content = path.read_bytes()
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path)  # noqa: PTH115 - text, whatever it is
        found[name] = (stat.S_IFMT(status.st_mode), status.st_rdev, content)
    return found


def _remove(top: Path) -> None:
    for path in top.rglob("closed"):
        path.chmod(0o700)
    shutil.rmtree(top, ignore_errors=True)


def classify(run: Run, ended: Ended, touched: list[str]) -> tuple[str, str]:
    """Return the class of a run, in `OUTCOMES` or `BAD`, and the evidence for it."""
    out, err = (raw.decode("utf-8", "replace") for raw in (ended.out, ended.err))
    if run.stdout == "terminal":
        out = _STYLE.sub("", out).replace("\r\n", "\n")
    elif run.environment.get("FORCE_COLOR"):
        out = _STYLE.sub("", out)
    last = err.strip().split("\n")[-1]
    for name, found in (
        ("HANG", ended.code is None),
        ("MEMORY", ended.peak_bytes > LIMIT_BYTES or "MemoryError" in err or "bad_alloc" in err),
        ("SPECIAL", bool(touched)),
        ("CRASH", ended.code is not None and ended.code < 0),
        ("TRACEBACK", "Traceback (most" in out + err or "Exception ignored" in err),
        ("INTERNAL", "internal error" in err),
        ("WARNING", re.search(r"\.py:\d+: \w*Warning", err) is not None),
    ):
        if found:
            return name, ", ".join(touched) if name == "SPECIAL" else last
    steering = _STEERS.search(out) or _STEERS.search(err)
    if steering:
        text = steering.string[max(0, steering.start() - 60) : steering.end() + 60]
        return "CONTROL", repr(text)
    return _sentences(run, ended, out, err, last)


def _sentences(run: Run, ended: Ended, out: str, err: str, last: str) -> tuple[str, str]:
    """Return the class of a run that ended by itself, and the evidence for it."""
    if ended.code == 0:
        # a value of a file may be quoted, as in `expected a positive integer, got inf`
        found = _NONSENSE.search("" if "--help" in run.arguments else _QUOTED.sub("", out))
        if found:
            return "NONSENSE", found.string[max(0, found.start() - 60) : found.end() + 60]
        return "ok", last
    if ended.code not in (1, 2, 3, 130):
        return "CRASH", f"exit code {ended.code}: {last}"
    said = err.strip("\n")
    if ended.code == 1 and run.name in _EXTRA_USE_OF_1 and (out or said):
        return "said", last
    if not said:
        return "SENTENCES", f"exit code {ended.code} and no word"
    # an escape replaces a character that the encoding of the stream lacks
    plain = re.sub(r"\\x[0-9a-f]{2}|\\u[0-9a-f]{4}", "?", said)
    # a hint is to be typed, so it is never cut
    lines = [line for line in plain.split("\n") if not line.startswith("hint: ")]
    longest = max(lines, key=len, default="")
    if len(longest) >= LONGEST:
        return "LONG", f"{len(longest)}: {longest}"
    if ended.code == 1:
        return "SENTENCES", f"exit code 1: {last}"
    return "refused" if ended.code == 2 else "infeasible", last


def repeat(seed: int, kind: str | None = None) -> int:
    """Run a seed again and print everything; return 1 if its end is forbidden."""
    folder = Path(tempfile.mkdtemp(prefix="hostile-"))
    with runner(folder) as one:
        done = one.run(seed, kind=kind, keep=True)
    command = SUBCOMMANDS[done.run.name][0]
    words = shlex.join([command, *done.run.arguments])
    print(f"{done.run.kind}: {done.run.what}\n{words!a:.2000}\nin {done.folder}/a/b")
    print(f"stdout {done.run.stdout}, environment {done.run.environment}, gone {done.run.gone}")
    ended = done.ended
    print(f"exit code {ended.code}, {ended.wall_s:.2f} s, {ended.peak_bytes / 2**30:.2f} GiB")
    print(f"--- stdout\n{ended.out.decode('utf-8', 'replace')!a:.3000}")
    print(f"--- stderr\n{ended.err.decode('utf-8', 'replace')!a:.3000}")
    print(f"=> {done.outcome}: {done.detail!a:.600}")
    return 1 if done.outcome in BAD else 0


if __name__ == "__main__":
    sys.exit(repeat(int(sys.argv[1]), *sys.argv[2:3]))

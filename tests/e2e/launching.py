"""Starts `torchrun ... -m profiler.hardware` as real processes, to be watched and disturbed.

    with Launch(2, "p2p", "--out", str(folder)) as launch:
        launch.wait_for(r"\\[1/")
        os.kill(launch.pid(1), signal.SIGKILL)
        code = launch.wait(60)

No process outlives the block, whatever becomes of the test.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

__all__ = ["ROOT", "Finished", "Launch", "finished", "measured", "torchrun"]

ROOT = Path(__file__).resolve().parent.parent.parent
_TOKEN = "AUTOPAR_TEST_LAUNCH"
_POLL_S = 0.02


class Finished:
    """How a launch ended."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr

    @property
    def said(self) -> list[str]:
        """Lines of stderr that begin with the command's name: its sentences."""
        return [line for line in self.stderr.splitlines() if line.startswith("autopar: ")]

    @property
    def progress(self) -> list[str]:
        """Lines of stderr that report a finished cell."""
        return [line for line in self.stderr.splitlines() if re.match(r"\[ *\d+/\d+\] ", line)]


def torchrun(num_ranks: int, *arguments: str) -> list[str]:
    """Return the command that measures with so many ranks on this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(num_ranks), "-m", "profiler.hardware", *arguments),
    ]


class Launch:
    """A running torchrun with its ranks; a context manager that leaves no process behind."""

    def __init__(self, num_ranks: int, *arguments: str) -> None:
        self._start(torchrun(num_ranks, *arguments))

    @classmethod
    def of(cls, command: Sequence[str]) -> Self:
        """Return the launch of a command that starts torchrun itself."""
        launch = cls.__new__(cls)
        launch._start(command)
        return launch

    def _start(self, command: Sequence[str]) -> None:
        self._token = uuid.uuid4().hex
        hidden = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "AUTOPAR_DEBUG")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        environment |= {
            _TOKEN: self._token,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            # a host whose own name does not resolve has a loopback all the same
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._stdout, self._stderr = list[str](), list[str]()
        self._readers = [
            threading.Thread(target=_collect, args=arguments, daemon=True)
            for arguments in (
                (self._process.stdout, self._stdout),
                (self._process.stderr, self._stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # ranks are leaders of sessions of their own: a signal to torchrun's group misses them
        until_s = time.monotonic() + 10
        while (alive := self.processes()) and time.monotonic() < until_s:
            for pid in alive:
                _kill(pid)
            self._process.poll()
            time.sleep(_POLL_S)
        self._process.wait(10)
        for reader in self._readers:
            reader.join(10)
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    @property
    def stderr(self) -> str:
        """What was written to stderr so far."""
        return "".join(self._stderr)

    def processes(self) -> dict[int, dict[str, str]]:
        """Return the environments of the living processes of this launch, by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                raw = (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:  # it ended, or is somebody else's
                continue
            if f"{_TOKEN}={self._token}" in raw:
                pairs = (line.partition("=") for line in raw.split("\0") if line)
                found[int(entry.name)] = {name: value for name, _, value in pairs}
        return found

    def ranks(self) -> list[int]:
        """Return the ranks that have a living process."""
        return sorted(int(e["RANK"]) for e in self.processes().values() if "RANK" in e)

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        pids = [p for p, e in self.processes().items() if e.get("RANK") == str(rank)]
        # what a rank starts, such as nvidia-smi, inherits its environment
        assert pids, f"rank {rank} does not run\n{self.stderr}"
        return min(pids)

    @property
    def launcher_pid(self) -> int:
        """Process id of torchrun."""
        return self._process.pid

    def wait_for(self, pattern: str, timeout_s: float = 120.0) -> None:
        """Wait until a line of stderr matches."""
        until_s = time.monotonic() + timeout_s
        while not re.search(pattern, self.stderr, re.MULTILINE):
            running = self._process.poll() is None
            assert running, f"it ended before {pattern!r}:\n{self.stderr}"
            assert time.monotonic() < until_s, f"no {pattern!r} in {timeout_s} s:\n{self.stderr}"
            time.sleep(_POLL_S)

    def wait(self, timeout_s: float) -> Finished:
        """Return how the launch ended, which must be within so many seconds."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.stderr}") from None
        for reader in self._readers:  # a rank that is left holds the pipes open
            reader.join(10)
        return Finished(code, "".join(self._stdout), self.stderr)


def finished(num_ranks: int, *arguments: str, timeout_s: float = 240.0) -> Finished:
    """Return how an undisturbed launch ended."""
    with Launch(num_ranks, *arguments) as launch:
        return launch.wait(timeout_s)


def measured(num_ranks: int, out: Path, *arguments: str) -> Finished:
    """Measure everything into a folder, which must succeed.

    On a busy machine the processes may take turns instead of overlapping, which fails those
    cells; the command's own remedy is to try again.
    """
    done = finished(num_ranks, "--out", str(out), *arguments)
    for _ in range(2):
        failed = [line for line in done.progress if " failed: " in line]
        if done.code == 0 or not all("] overlap_" in line for line in failed):
            break
        done = finished(num_ranks, "--out", str(out), *arguments, "--resume")
    assert done.code == 0, done.stderr
    return done


def _collect(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line)  # one by one: others look at them meanwhile


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

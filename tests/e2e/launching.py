"""Starts `torchrun ... -m profiler.hardware` as real processes, to be watched and disturbed.

    with Launch(2, "p2p", "--out", str(folder)) as launch:
        launch.wait_for(r"\\[1/")
        os.kill(launch.pid(1), signal.SIGKILL)
        code = launch.wait(60)

No process outlives the block, whatever becomes of the test.

`Copies` is the same without torchrun, whose processes import torch for seconds: ranks that are
copies of a warm process, in the environment that torchrun gives them and ended as it ends them.
What torchrun itself does is tested with `Launch`, in tests that are marked `ranks`.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Self

import pytest

from tests import warm
from tests.warm import ROOT

_TOKEN = "AUTOPAR_TEST_LAUNCH"
_POLL_S = 0.02
_END_S = 30.0
"""What torchrun gives ranks that it asked to end."""


class Finished:
    """How a launch ended."""

    def __init__(self, code: int, stdout: str, stderr: str, rank_code: int | None = None) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr
        self._rank_code = rank_code

    @property
    def rank_code(self) -> int:
        """Exit code of the rank that failed first: torchrun's own is always 1, and it says this."""
        if self._rank_code is not None:
            return self._rank_code
        found = re.findall(r"^ +exitcode +: (-?\d+) ", self.stderr, re.MULTILINE)
        return int(found[-1]) if found else 0

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


class _Read:
    """What both kinds of ranks have: threads that collect all that is written."""

    def _read(self, *processes: subprocess.Popen[str] | warm.Warm) -> None:
        """Start to collect what these processes write."""
        self._stdout, self._stderr = list[str](), list[str]()
        self._readers = [
            threading.Thread(target=_collect, args=arguments, daemon=True)
            for one in processes
            for arguments in ((one.stdout, self._stdout), (one.stderr, self._stderr))
        ]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    @property
    def stderr(self) -> str:
        """What was written to stderr so far."""
        return "".join(self._stderr)


class Launch(_Read):
    """A running torchrun with its ranks; a context manager that leaves no process behind."""

    def __init__(self, num_ranks: int, *arguments: str) -> None:
        self._start(torchrun(num_ranks, *arguments))

    @classmethod
    def of(cls, command: Sequence[str], cwd: Path = ROOT) -> Self:
        """Return the launch of a command that starts torchrun itself."""
        launch = cls.__new__(cls)
        launch._start(command, cwd)
        return launch

    def _start(self, command: Sequence[str], cwd: Path = ROOT) -> None:
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
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._read(self._process)

    def __exit__(self, *error: object) -> None:
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
        _wait_for(self, pattern, lambda: self._process.poll() is None, timeout_s)

    def interrupt(self) -> None:
        """Do what typing Ctrl-C does."""
        os.kill(self.launcher_pid, signal.SIGINT)

    def wait(self, timeout_s: float) -> Finished:
        """Return how the launch ended, which must be within so many seconds."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s:\n{self.stderr}") from None
        for reader in self._readers:  # a rank that is left holds the pipes open
            reader.join(10)
        return Finished(code, "".join(self._stdout), self.stderr)


class Copies(_Read):
    """Running ranks without torchrun; a context manager that leaves no process behind."""

    def __init__(self, num_ranks: int, *arguments: str) -> None:
        self._start(num_ranks, "profiler.hardware", arguments, ROOT)

    @classmethod
    def of(cls, num_ranks: int, name: str, *arguments: str, cwd: Path = ROOT) -> Self:
        """Return the ranks of another module."""
        copies = cls.__new__(cls)
        copies._start(num_ranks, name, arguments, cwd)
        return copies

    def _start(self, num_ranks: int, name: str, arguments: Sequence[str], cwd: Path) -> None:
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        kept = {k: v for k, v in os.environ.items() if k != "AUTOPAR_DEBUG"} | {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        }
        self._ranks = [
            warm.module(
                name,
                *arguments,
                cwd=cwd,
                env=kept | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(num_ranks)
        ]
        self._read(*self._ranks)

    def __exit__(self, *error: object) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait(10)
        for reader in self._readers:
            reader.join(10)
        for rank in self._ranks:
            rank.__exit__(*error)

    def processes(self) -> list[int]:
        """Return the process ids of the ranks that live."""
        return [rank.pid for rank in self._ranks if rank.poll() is None]

    def ranks(self) -> list[int]:
        """Return the ranks that have a living process."""
        return [number for number, rank in enumerate(self._ranks) if rank.poll() is None]

    def pid(self, rank: int) -> int:
        """Return the process id of a rank."""
        assert self._ranks[rank].poll() is None, f"rank {rank} does not run\n{self.stderr}"
        return self._ranks[rank].pid

    def wait_for(self, pattern: str, timeout_s: float = 120.0) -> None:
        """Wait until a line of stderr matches."""
        _wait_for(self, pattern, lambda: bool(self.ranks()), timeout_s)

    def interrupt(self) -> None:
        """Do what typing Ctrl-C does, which torchrun passes on to every rank."""
        for rank in self._ranks:
            rank.send_signal(signal.SIGINT)

    def wait(self, timeout_s: float) -> Finished:
        """Return how the ranks ended, which must be within so many seconds.

        As torchrun does: once one has failed, the others are asked to end, and made to after a
        while.
        """
        until_s = time.monotonic() + timeout_s
        first, kill_s = 0, float("inf")
        while self.ranks():
            now_s = time.monotonic()
            assert now_s < until_s, f"still running after {timeout_s} s:\n{self.stderr}"
            failed = [code for rank in self._ranks if (code := rank.poll())]
            if failed and not first:
                first, kill_s = failed[0], now_s + _END_S
                for rank in self._ranks:
                    rank.send_signal(signal.SIGTERM)
            if now_s > kill_s:
                for rank in self._ranks:
                    rank.kill()
            time.sleep(_POLL_S)
        for reader in self._readers:
            reader.join(10)
        first = first or next((code for rank in self._ranks if (code := rank.poll())), 0)
        return Finished(1 if first else 0, "".join(self._stdout), self.stderr, first)


Start = type[Launch] | type[Copies]
STARTS = (Copies, pytest.param(Launch, marks=pytest.mark.ranks))
"""For tests of both: what starts the ranks of `profiler.hardware`."""

TWO_RANKS = (
    *("--backend", "gloo", "--sizes", "64K:4M:x4", "--reference-size", "1M"),
    *("--max-seconds", "0.05", "--iters", "5", "--warmup", "2"),
)
"""How the fixture `two` measures."""


def finished(
    num_ranks: int, *arguments: str, timeout_s: float = 240.0, start: Start = Launch
) -> Finished:
    """Return how an undisturbed launch ended."""
    with start(num_ranks, *arguments) as launch:
        return launch.wait(timeout_s)


def measured(num_ranks: int, out: Path, *arguments: str, start: Start = Launch) -> Finished:
    """Measure everything into a folder, which must succeed.

    On a busy machine the processes may take turns instead of overlapping, which fails those
    cells; the command's own remedy is to try again.
    """
    done = finished(num_ranks, "--out", str(out), *arguments, start=start)
    for _ in range(2):
        failed = [line for line in done.progress if " failed: " in line]
        if done.code == 0 or not all("] overlap_" in line for line in failed):
            break
        done = finished(num_ranks, "--out", str(out), *arguments, "--resume", start=start)
    assert done.code == 0, done.stderr
    return done


def _wait_for(
    launch: Launch | Copies, pattern: str, runs: Callable[[], bool], timeout_s: float
) -> None:
    until_s = time.monotonic() + timeout_s
    while not re.search(pattern, launch.stderr, re.MULTILINE):
        running = runs()
        if not running:
            time.sleep(10 * _POLL_S)  # what it wrote last is still being read
        found = re.search(pattern, launch.stderr, re.MULTILINE)
        assert running or found, f"it ended before {pattern!r}:\n{launch.stderr}"
        assert time.monotonic() < until_s, f"no {pattern!r} in {timeout_s} s:\n{launch.stderr}"
        time.sleep(_POLL_S)


def _collect(stream: IO[str], lines: list[str]) -> None:
    for line in stream:
        lines.append(line)  # one by one: others look at them meanwhile


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

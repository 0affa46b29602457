"""Processes that start at once: copies of one that has torch imported, once in a test session.

    process = command("profile-model", "--model", "tiny.json", cwd=folder)
    out, err = process.communicate(60)

They are ordinary processes, with a number to send signals to, an environment, a working directory,
streams and an exit code. Earlier tests leave no trace in them, because no test uses the process
that they are copies of. They do not prove that a command starts by itself: each command also has a
test with a new interpreter. Settings that are read while torch is imported come too late: such
tests start an interpreter as well.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, Self

import pytest

ROOT = Path(__file__).resolve().parent.parent


@cache
def context() -> ForkServerContext:
    """Return the context of warm processes; the process that they copy ends with the session."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["tests.preloaded"])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)  # the first folder of its module search path
        # a copy has one thread, and none that libraries started before
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        forkserver.ensure_running()
    return found


def command(name: str, *arguments: object, **others: Any) -> Warm:
    """Start a command of the project by its installed name; see `Warm`."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    return Warm(_call, entry.module, entry.attr, name=name, arguments=arguments, **others)


def module(name: str, *arguments: object, **others: Any) -> Warm:
    """Start a module as `python -m` does; see `Warm`."""
    return Warm(_run_module, name, name=name, arguments=arguments, **others)


def new_interpreter(
    code: str, *arguments: str, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Return the result of code in a new interpreter without any imports.

    environment : variables in addition to those of this process.
    """
    kept = {k: v for k, v in os.environ.items() if k != "AUTOPAR_DEBUG"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def renew_environment(environment: Mapping[str, str]) -> None:
    """Replace the environment of this process, which was copied at another time."""
    os.environ.clear()
    os.environ.update(environment)


class Warm:
    """A running process: the part of `subprocess.Popen` that tests use, with text in pipes.

    Leaving its context ends the process.

    cwd : working directory.
    env : whole environment; default: that of this process.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *values: Any,
        name: str,
        arguments: tuple[object, ...] = (),
        cwd: Path = ROOT,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.args = [name, *map(str, arguments)]
        environment = dict(os.environ if env is None else env)
        (out, child_out), (err, child_err) = (context().Pipe(duplex=False) for _ in range(2))
        self._process = context().Process(
            target=_begin,
            args=(function, values, self.args, str(cwd), environment, child_out, child_err),
            daemon=True,
        )
        self._process.start()
        for pipe in (child_out, child_err):
            pipe.close()  # so that the end of the process ends its pipes
        self.stdout, self.stderr = (
            os.fdopen(os.dup(pipe.fileno()), encoding="utf-8") for pipe in (out, err)
        )
        for pipe in (out, err):
            pipe.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self._process.join()
        self.stdout.close()
        self.stderr.close()

    @property
    def returncode(self) -> int | None:
        """The exit code, minus the number of the signal that ended it, or None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit code."""
        self._process.join(timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            # its parent, another process, may have reaped it already
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return all of stdout and stderr once the process has ended."""
        texts = ["", ""]

        def read(place: int) -> None:
            texts[place] = (self.stdout, self.stderr)[place].read()

        readers = [threading.Thread(target=read, args=(place,), daemon=True) for place in (0, 1)]
        for reader in readers:
            reader.start()
        try:
            self.wait(timeout)
        finally:
            if self.returncode is None:
                self.kill()
            for reader in readers:
                reader.join(10)
        return texts[0], texts[1]

    def completed(self, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Return the result of the process."""
        with self:
            out, err = self.communicate(timeout)
            return subprocess.CompletedProcess(self.args, self.wait(), out, err)


def _begin(
    function: Callable[..., object],
    values: tuple[Any, ...],
    arguments: list[str],
    cwd: str,
    environment: dict[str, str],
    out: Connection,
    err: Connection,
) -> None:
    """Turn this copy into the requested process."""
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    # the streams of the copied process wrote elsewhere
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(  # noqa: SIM115
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )
    renew_environment(environment)
    os.chdir(cwd)
    sys.argv = arguments
    function(*values)


def _call(name: str, function: str) -> None:
    """Call an entry point."""
    getattr(importlib.import_module(name), function)()


def _run_module(name: str) -> None:
    """Run a module like `python -m`."""
    sys.path[0] = ""  # where `python -m` puts the working directory
    runpy.run_module(name, run_name="__main__", alter_sys=True)

"""Metadata of every benchmark result: machine, versions, commit, and the raw seconds."""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

__all__ = ["ROOT", "Timed", "append", "metadata", "peak_memory_bytes", "summary", "timed"]

ROOT = Path(__file__).resolve().parent.parent
FORMAT = 1
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Raw seconds of several runs; statistics are computed when they are read."""

    cpu_s: tuple[float, ...]
    wall_s: tuple[float, ...]

    @property
    def median_cpu_s(self) -> float:
        """Median CPU seconds of one run."""
        return statistics.median(self.cpu_s)

    @property
    def least_cpu_s(self) -> float:
        """CPU seconds of the fastest run."""
        return min(self.cpu_s)


def timed(work: Callable[[], T], repeats: int) -> tuple[T, Timed]:
    """Return the last answer of `work()` and the CPU and wall seconds of every run."""
    cpu, wall = [], []
    for _ in range(repeats):
        gc.collect()  # garbage of earlier runs must not count for this run
        wall_0, cpu_0 = time.perf_counter(), time.process_time()
        answer = work()
        cpu.append(time.process_time() - cpu_0)
        wall.append(time.perf_counter() - wall_0)
    return answer, Timed(cpu_s=tuple(cpu), wall_s=tuple(wall))


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def metadata() -> dict[str, Any]:
    """Return machine, versions and commit; results of different machines are not compared."""
    return {
        "processor": _processor(),
        "cpu_count": os.cpu_count(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "compiler": _output("g++", "--version").partition("\n")[0],
        "commit": _output("git", "rev-parse", "--short=12", "HEAD"),
        "modified": bool(_output("git", "status", "--porcelain", "--untracked-files=no")),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def append(path: Path | None, benchmark: str, values: dict[str, Any]) -> None:
    """Append one line of JSON with metadata to the ledger `path`; None writes nothing."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    entry = {"format": FORMAT, "benchmark": benchmark, "metadata": metadata(), **values}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")


def summary(values: Sequence[float]) -> str:
    """Return `median M, least L of N` of seconds, in ms."""
    least, middle = min(values) * 1e3, statistics.median(values) * 1e3
    return f"median {middle:.2f} ms, least {least:.2f} ms of {len(values)}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30
        )
    except OSError:
        return ""
    return done.stdout.strip()

"""CPU seconds of whole commands, from the shell to the exit, to separate start-up from work.

`python -m benchmarks.bench_startup [--runs N] [--beside ROOT] [--json LEDGER]`. Every command runs
with a bytecode cache of our modules and without one (that of other packages stays), from copies of
the packages, so that neither depends on earlier runs. `--beside` takes another checkout with the
same core; the runs of both are interleaved. `python -c pass` and `import numpy` are the floor.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.metadata import ROOT, append, summary

__all__ = ["COMMANDS", "main"]

COPIED = ("autopar", "search", "profiler", "models", "hardware_configs")
FLOOR = {"python -c pass": "pass", "import numpy": "import numpy", "import typer": "import typer"}
COMMANDS = {
    "autopar-search --help": ("search", "--help"),
    "autopar-search": ("search",),
    "autopar-search, card": (
        *("search", "--model", "llama2-7b", "--hardware", "h100:1x8"),
        *("--settle-bsz", "64", "--output-config-path", "none"),
    ),
    "autopar-search --json -": ("search", "--json", "-"),
    "autopar-search, files": (
        *("search", "--model", "llama2-7b"),
        *("--time-profiling-path", "models/llama2-7b/configs"),
        *("--memory-profiling-path", "models/llama2-7b/configs"),
        *("--allreduce-bandwidth-config-path", "hardware_configs/a100-80gb_1x8"),
        *("--p2p-bandwidth-config-path", "hardware_configs/a100-80gb_1x8"),
        *("--overlap-coe-path", "hardware_configs/a100-80gb_1x8"),
        *("--sp-time-path", "hardware_configs/a100-80gb_1x8"),
    ),
    "autopar-estimate calculon": (
        *("estimate", "calculon", "--application", "llama2-7b"),
        *("--system", "a100", "--execution", "1x8-tp8"),
    ),
    "autopar-estimate tensor2d": (
        *("estimate", "tensor2d", "--model", "gpt-6.7b", "--system", "a100", "--strategy", "1d"),
        *("--config", "dp=2,tp=4,pp=1,mbs=1", "--batch", "64"),
    ),
}
# the finder of an editable install would import its own modules instead of the copies
RUN = """
import sys

sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]
sys.path.insert(0, {root!r})
from autopar.cli import {entry}

sys.argv[0] = "autopar-{entry}"
{entry}()
"""


@dataclass(frozen=True)
class Run:
    """One process to measure."""

    command: list[str]
    cached: bool
    where: Path
    asks: str
    """Question of the process; equal questions have equal answers."""


def main() -> None:
    """Print the table after checking that answers do not depend on where modules come from."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--beside", type=Path, help="another checkout, to be compared with")
    parser.add_argument("--only", default="", help="commands whose name holds this")
    parser.add_argument("--json", type=Path, help="ledger that a line is appended to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = _measured(arguments, Path(folder))
    print("CPU seconds, user and system, of the whole process")
    for name, values in seconds.items():
        print(f"{name:<52} {summary(values)}")
    append(arguments.json, "startup", {"cpu_s": seconds})


def _measured(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    roots = {"": ROOT} | ({"beside: ": arguments.beside} if arguments.beside else {})
    runs: dict[str, Run] = {}
    for name, code in FLOOR.items():
        runs[name] = Run([sys.executable, "-c", code], True, folder, name)
    for cached in (True, False):
        for label, root in roots.items():
            copy = folder / f"{label[:-2] or 'here'}_{'cached' if cached else 'bare'}"
            for part in COPIED:
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(root / part, copy / part, ignore=ignored)
            for name, (entry, *words) in COMMANDS.items():
                if arguments.only in name:
                    command = [sys.executable, "-c", RUN.format(root=str(copy), entry=entry)]
                    full = f"{label}{name}, {'cache' if cached else 'no cache'}"
                    runs[full] = Run([*command, *words], cached, copy, name)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    said: dict[str, str] = {}
    for number in range(arguments.runs + 1):
        for name, run in runs.items():
            taken, out = _cpu_seconds(run)
            if said.setdefault(run.asks, out) != out:
                sys.exit(f"{name}: the answer of run {number} differs")
            if number:  # the first run writes the bytecode
                seconds[name].append(taken)
    return seconds


def _cpu_seconds(run: Run) -> tuple[float, str]:
    """Return the CPU seconds of a process and its output without its seconds and folder."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    if not run.cached:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        run.command, env=environment, cwd=run.where, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{run.asks}: ended with {done.returncode}: {done.stderr}")
    out = re.sub(r'in \S+ m?s of CPU|"(?:cpu|wall)_s": \S+', "", done.stdout)
    taken = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return taken, out.replace(str(run.where), "")


if __name__ == "__main__":
    main()

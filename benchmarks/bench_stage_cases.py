"""Stage problems of the public peer: CPU seconds of ours, the peer's and a dense 1-MB program.

`python -m benchmarks.bench_stage_cases [--cases DIR] [--repeats N] [--json LEDGER]`; the dense
program is `autopar_bench`, which `make bench` builds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.units import MIB
from benchmarks.metadata import ROOT, append, summary, timed
from search.planning.layered.core import StageSolution, solve_stage
from tests.data.read import stage_problems

__all__ = ["TARGET_RATIO", "StageCase", "main", "read_cases", "wrong"]

TARGET_RATIO = 300.0
BENCH = ROOT / "build" / "release" / "autopar_bench"
DATA = ROOT / "tests" / "data"


@dataclass(frozen=True, kw_only=True, eq=False)
class StageCase:
    """One stage problem with the peer's optimum and its CPU seconds."""

    name: str
    time_s: NDArray[np.float64]
    memory_mb: NDArray[np.int32]
    transition_s: NDArray[np.float64]
    budget_mb: int
    best_s: float
    peer_cpu_s: float

    def solve(self) -> StageSolution:
        """Return our answer."""
        return solve_stage(
            self.time_s, self.memory_mb * float(MIB), self.transition_s, self.budget_mb * MIB
        )

    def record(self) -> bytes:
        """Return the problem in the format of `autopar_bench`."""
        layers, strategies = self.time_s.shape
        head = np.array([layers, strategies, self.budget_mb], dtype=np.int32)
        arrays = (head, self.time_s, self.memory_mb, self.transition_s)
        return b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)


def read_cases(folder: Path) -> list[StageCase]:
    """Return the stage problems of a folder of tables, by name."""
    return [
        StageCase(
            name=row["name"],
            time_s=np.array(row["time_s"], dtype=np.float64),
            memory_mb=np.array(row["memory_mb"], dtype=np.int32),
            transition_s=np.array(row["transition_s"], dtype=np.float64),
            budget_mb=row["budget_mb"] - row["fixed_mb"],
            best_s=row["best_s"],
            peer_cpu_s=row["peer_cpu_s"],
        )
        for row in stage_problems(folder)
    ]


def wrong(case: StageCase, answer: StageSolution, tolerance: float = 1e-9) -> str:
    """Return the error of an answer, an empty string if there is none."""
    if np.isinf(case.best_s):
        return "" if answer.status == "infeasible" else f"{answer.status} instead of infeasible"
    if answer.status != "optimal":
        return f"{answer.status} instead of optimal"
    rows = np.arange(len(case.time_s))
    choice = np.array(answer.choice)
    used = int(case.memory_mb[rows, choice].sum())
    total = case.time_s[rows, choice].sum()
    total += case.transition_s[rows[1:], choice[:-1], choice[1:]].sum()
    if used > case.budget_mb:
        return f"uses {used} MB of {case.budget_mb}"
    for what, value in (("choice", total), ("total_s", answer.total_s), ("bound", answer.bound_s)):
        if abs(value - case.best_s) > tolerance * case.best_s:
            return f"{what} {value!r} s, the optimum is {case.best_s!r} s"
    return ""


def dense_runs(cases: list[StageCase], repeats: int) -> list[dict[str, float]]:
    """Return the results of `autopar_bench` per repeat; it compares the optima itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stages.bin"
        path.write_bytes(b"".join(case.record() for case in cases))
        done = subprocess.run(
            [str(BENCH), str(path), str(repeats)], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise RuntimeError(f"autopar_bench: {done.stderr.strip()}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def each(cases: list[StageCase], repeats: int) -> dict[str, float]:
    """Return our CPU seconds of each case by name, of a hundred calls in a row."""
    calls = 100  # the first ones find cold caches

    def often(case: StageCase) -> None:
        for _ in range(calls):
            case.solve()

    runs = {case.name: timed(partial(often, case), repeats)[1] for case in cases}
    return {name: run.median_cpu_s / calls for name, run in runs.items()}


def main() -> int:
    """Print the comparison; return 1 when an optimum is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases", type=Path, default=DATA, help="folder that tests.data.make wrote"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    if not (arguments.cases / "galvatron_stages.json.gz").is_file():
        print(f"skipped: no galvatron_stages.json.gz in {arguments.cases}; give --cases DIR")
        return 0
    cases = read_cases(arguments.cases)
    if not BENCH.is_file():
        print(f"{BENCH.relative_to(ROOT)} is not built; run `make bench`", file=sys.stderr)
        return 2
    for case in cases:
        if problem := wrong(case, case.solve()):
            print(f"{case.name}: {problem}", file=sys.stderr)
            return 1
    peer_s = sum(case.peer_cpu_s for case in cases)
    _, ours = timed(lambda: [case.solve() for case in cases], arguments.repeats)
    dense = dense_runs(cases, arguments.repeats)
    kernel_s = [run["exact_cpu_s"] for run in dense]
    dense_s = [run["dense_1mb_cpu_s"] for run in dense]
    infeasible = sum(np.isinf(case.best_s) for case in cases)
    print(f"{len(cases)} stage problems ({infeasible} infeasible), every optimum within 1e-9")
    rows: tuple[tuple[str, list[float]], ...] = (
        ("solve_stage from Python", list(ours.cpu_s)),
        ("the same kernel from C++", kernel_s),
        ("dense 1-MB program, C++", dense_s),
    )
    print(f"  {'peer, its own CPU seconds':28s} {peer_s * 1e3:10.1f} ms")
    for name, seconds in rows:
        ratio = peer_s / statistics.median(seconds)
        print(f"  {name:28s} {summary(seconds):44s} peer / this: {ratio:7.1f}")
    ratio = peer_s / ours.median_cpu_s
    beside = statistics.median(dense_s) / ours.median_cpu_s
    print(f"  ratio to the peer {ratio:.0f} (target {TARGET_RATIO:.0f}), to dense {beside:.0f}")
    seconds_of = each(cases, arguments.repeats)
    ratios = {case.name: case.peer_cpu_s / seconds_of[case.name] for case in cases}
    below = sum(value < TARGET_RATIO for value in ratios.values())
    name = min(ratios, key=ratios.__getitem__)
    print(
        f"  the lowest ratio of one problem {ratios[name]:.0f} ({name}, "
        f"{seconds_of[name] * 1e6:.1f} us); {below} of {len(cases)} are below the target"
    )
    values: dict[str, Any] = {
        "cases": len(cases),
        "case_cpu_s": seconds_of,
        "peer_cpu_s": peer_s,
        "solve_stage_cpu_s": ours.cpu_s,
        "kernel_cpu_s": kernel_s,
        "dense_1mb_cpu_s": dense_s,
    }
    append(arguments.json, "stage_cases", values)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How the search grows: 1,024 GPUs x 96 layers x 32 batch sizes, and re-solving on built tables.

`python -m benchmarks.bench_scale [--repeats N] [--json LEDGER]`. Each large search runs in a
process of its own, so that its peak memory is its own; inputs are estimated, no file is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autopar.units import GIB
from benchmarks.metadata import ROOT, append, peak_memory_bytes, summary, timed
from search.options import SearchOptions
from search.planner.planner import Planner
from search.planner.prediction import SearchResult
from search.question import open_session
from search.request import InputSpec

__all__ = ["RANGES", "large", "main", "small"]

RANGES = {
    "1024..4992 step 128": tuple(range(1024, 4993, 128)),
    # mostly powers of two and their small multiples: many more ways to split a batch
    "2^k, 3*2^k, 5*2^k, 7*2^k": tuple(sorted(f * 2**k for f in (1, 3, 5, 7) for k in range(9, 17))),
}
TARGETS = {"cpu_s": 1.0, "peak_mib": 500.0, "resolve_ms": 50.0}
OPTIONS = SearchOptions(
    memory_constraint_bytes=80.0 * GIB, sp_space="tp+sp", default_dp_type="zero2", top=0
)


def large(
    batches: tuple[int, ...], budgets_gib: tuple[float, ...] = (72.0, 64.0, 56.0, 79.0)
) -> dict[str, Any]:
    """Return what one search of llama3-70b with 96 layers on 128 x 8 H100 took, and re-solves."""
    before = peak_memory_bytes()
    start = time.process_time()
    inputs = InputSpec(
        model="llama3-70b", hardware="h100:128x8", num_layers=(96,), seq_length=(4096,)
    )
    planner = open_session(inputs, OPTIONS).planner
    loaded = time.process_time()
    result = planner.solve(global_batch_sizes=batches)
    solved = time.process_time()
    found = _record(result)
    found |= {
        "load_cpu_s": loaded - start,
        "search_cpu_s": solved - loaded,
        "peak_bytes": peak_memory_bytes(),
        "baseline_bytes": before,
    }
    resolve = []
    for gib in budgets_gib:
        start = time.process_time()
        again = planner.solve(gib * GIB, global_batch_sizes=batches)
        resolve.append(time.process_time() - start)
        assert again.prediction is not None
        assert again.status == "optimal"
        assert again.prediction.samples_per_s <= result.bound_samples_per_s * (1 + 1e-12)
    return found | {"budgets_gib": budgets_gib, "resolve_cpu_s": resolve}


def small(repeats: int) -> dict[str, Any]:
    """Return the CPU seconds of re-solves of llama2-7b on 1 x 8 A100 after budget changes."""
    inputs = InputSpec(model="llama2-7b", hardware="a100-80gb:1x8", seq_length=(2048,))
    options = replace(OPTIONS, settle_bsz=64, time_profile_mode="batch")
    session = open_session(inputs, options)

    def build() -> SearchResult:
        return Planner.from_documents(
            session.spec, session.profile, session.hardware, options
        ).solve()

    _, first = timed(build, repeats)
    session.planner.solve()
    budgets = tuple(range(20, 81, 4))
    resolve = []
    for gib in budgets:
        result, again = timed(partial(session.planner.solve, gib * GIB), repeats)
        assert result.prediction is not None
        resolve.append(again.median_cpu_s)
    return {"first_cpu_s": first.cpu_s, "budgets_gib": budgets, "resolve_cpu_s": resolve}


def _record(result: SearchResult) -> dict[str, Any]:
    assert result.plan is not None
    assert result.prediction is not None
    assert result.status == "optimal"
    assert result.prediction.legal
    assert result.prediction.fits
    assert result.plan.world_size == 1024
    plan = result.plan
    return {
        "plan": f"G={plan.global_batch} m={plan.num_microbatches} p={plan.num_stages}",
        "samples_per_s": result.prediction.samples_per_s,
        "step_time_s": result.prediction.step_time_s,
        "replay_s": result.prediction.replay_s,
        "candidates": result.stats.candidates,
        "opened": result.stats.opened,
        "states": result.stats.states,
    }


def _in_own_process(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_scale", "--one", name],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> int:
    """Print the figures beside their targets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append the result to this file")
    parser.add_argument("--one", choices=RANGES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(large(RANGES[arguments.one])))
        return 0
    ledger: dict[str, Any] = {"targets": TARGETS}
    print("llama3-70b with 96 layers, 4096 tokens, h100:128x8, tp+sp, zero2, 80 GiB, 1 thread")
    for name, batches in RANGES.items():
        runs = [_in_own_process(name) for _ in range(arguments.repeats)]
        ledger[name] = runs
        assert len({json.dumps([r["plan"], r["samples_per_s"]]) for r in runs}) == 1
        one = runs[0]
        cpu_s = statistics.median(r["search_cpu_s"] for r in runs)
        peak = max(r["peak_bytes"] for r in runs) / 2**20
        base = max(r["baseline_bytes"] for r in runs) / 2**20
        again = [1e3 * s for r in runs for s in r["resolve_cpu_s"]]
        print(f"\n{len(batches)} batch sizes, {name}: {one['plan']}, T {one['step_time_s']:.3f} s,")
        print(f"  replay {one['replay_s']:.3f} s, {one['samples_per_s']:.1f} samples/s")
        print(f"  {one['candidates']} sub-problems, {one['opened']} opened, {one['states']} labels")
        print(
            f"  search {cpu_s:.2f} CPU s (target {TARGETS['cpu_s']:g}), of "
            f"{[round(r['search_cpu_s'], 2) for r in runs]}, besides loading "
            f"{statistics.median(r['load_cpu_s'] for r in runs):.2f} CPU s"
        )
        print(
            f"  peak {peak:.0f} MiB (target {TARGETS['peak_mib']:g}), of which {base:.0f} MiB are "
            "interpreter and imports"
        )
        budgets = ", ".join(f"{gib:g}" for gib in one["budgets_gib"])
        print(
            f"  re-solve at {budgets} GiB: median {statistics.median(again):.0f} CPU ms, worst "
            f"{max(again):.0f} CPU ms (target {TARGETS['resolve_ms']:g})"
        )
    found = small(arguments.repeats)
    ledger["llama2-7b 1x8"] = found
    again = [1e3 * s for s in found["resolve_cpu_s"]]
    print("\nllama2-7b, a100-80gb:1x8, G = 64")
    print(f"  first search {summary(found['first_cpu_s'])} of CPU")
    print(
        f"  re-solve at 20, 24, ... 80 GiB: median {statistics.median(again):.1f} CPU ms, worst "
        f"{max(again):.1f} CPU ms (target {TARGETS['resolve_ms']:g})"
    )
    append(arguments.json, "scale", ledger)
    return 0


if __name__ == "__main__":
    sys.exit(main())

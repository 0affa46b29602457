"""Growth of searches with depth, GPUs, batches, layer types, budgets, limits and commands.

`python -m benchmarks.bench_growth [--before FOLDER] [--only WORD ...] [--limit S] [--rounds N]
[--json LEDGER]`. Every case runs in a separate process, so that peak memory is measured per case
and an endless case can be ended. `--before` is another checkout with a built `.venv`: its code
answers the same cases alternately with this one, and the table lists both. Inputs are estimated.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import search
from autopar.rates.card import estimate_hardware
from autopar.rates.model import estimate_model
from autopar.records import replace
from autopar.run.model import ModelSpec
from autopar.units import GIB
from benchmarks.growth_cases import CASES, Case
from benchmarks.metadata import ROOT, append, peak_memory_bytes
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import SearchResult
from search.planning.session import open_session
from search.request.options import SearchOptions
from search.request.request import InputSpec

__all__ = ["KINDS", "exponent", "main", "measure"]


# --------------------------------------------------------------------------------------------------
# One case in this process.


def _planner(case: Case) -> Callable[[], Planner]:
    """Return a factory of fresh planners of the case; its documents are loaded already."""
    options = SearchOptions(
        memory_constraint_bytes=case.gib * GIB,
        time_profile_mode="batch",
        **{"top": 0, "settle_bsz": case.batches[0], **case.options},
    )
    nodes, gpus = case.cluster
    if case.types > 1:
        spec = _typed(case)
        profile = estimate_model(spec, "h100")
        hardware = estimate_hardware("h100", num_nodes=nodes, gpus_per_node=gpus)
    else:
        inputs = InputSpec(
            model=case.model,
            hardware=f"h100:{nodes}x{gpus}",
            num_layers=(case.layers,) if case.layers else None,
            seq_length=(4096,) if case.model == "llama3-70b" else None,
        )
        session = open_session(inputs, options, ("memory-constraint", "settle-bsz"))
        spec, profile, hardware = session.spec, session.profile, session.hardware

    def fresh() -> Planner:
        return Planner.from_documents(spec, profile, hardware, options)

    if case.times_smallest is None:
        return fresh
    refused = fresh().solve(1.0, case.batches).infeasibility
    assert refused is not None
    budget = math.ceil(refused.smallest_budget_bytes * case.times_smallest)
    options = replace(options, memory_constraint_bytes=float(budget))
    return fresh


def _typed(case: Case) -> ModelSpec:
    """Return the model with its layers in runs of `types` different layer types."""

    inputs = InputSpec(model=case.model, hardware="h100:1x8", seq_length=(4096,))
    spec = open_session(inputs, SearchOptions(settle_bsz=8)).spec
    layer = spec.layers[0]
    total = case.layers or layer.num_layers
    ends = [total * k // case.types for k in range(case.types + 1)]
    width = layer.ffn_hidden_size
    assert width is not None
    # widths stay divisible by every degree
    runs = tuple(
        replace(layer, num_layers=b - a, ffn_hidden_size=width + 64 * (7 * k % case.widths))
        for k, (a, b) in enumerate(itertools.pairwise(ends))
    )
    return replace(spec, layers=runs)


def _outcome(result: SearchResult) -> dict[str, Any]:
    """Return the answer without its duration."""
    found: dict[str, Any] = {
        "status": result.status,
        "gap": result.gap,
        "bound_samples_per_s": result.bound_samples_per_s,
        "opened": result.stats.opened,
        "states": result.stats.states,
    }
    if result.plan is not None and result.prediction is not None:
        assert result.prediction.legal
        assert result.prediction.fits
        found["samples_per_s"] = result.prediction.samples_per_s
        plan = result.plan
        found["plan"] = f"G={plan.global_batch} m={plan.num_microbatches} p={plan.num_stages}"
    elif result.infeasibility is not None:
        found["smallest_bytes"] = result.infeasibility.smallest_budget_bytes
    return found


_REPEATED_S = 0.3
"""Seconds below which a case is repeated, because the first answer also imports modules."""


def _first(case: Case) -> dict[str, Any]:
    """Search from loaded documents: tables, search and prediction."""
    fresh = _planner(case)
    seconds = []
    for _ in range(15):
        planner = fresh()
        start = time.process_time()
        result = planner.solve(global_batch_sizes=case.batches)
        seconds.append(time.process_time() - start)
        if seconds[0] > _REPEATED_S:
            break
    return _outcome(result) | {"seconds": seconds[1:] or seconds}


def _again(case: Case) -> dict[str, Any]:
    """Re-solve on built tables after changes of the memory constraint."""
    planner = _planner(case)()
    planner.solve(global_batch_sizes=case.batches)
    seconds, found = [], []
    for gib in case.resolve_gib:
        start = time.process_time()
        result = planner.solve(gib * GIB, case.batches)
        seconds.append(time.process_time() - start)
        found.append(_outcome(result))
    gap = max(one["gap"] for one in found)
    rates = [one.get("samples_per_s") for one in found]
    status = "/".join(sorted({one["status"] for one in found}))
    return {"seconds": seconds, "status": status, "gap": gap, "samples_per_s": rates}


def _frontier(case: Case) -> dict[str, Any]:
    """Find every constraint at which the optimum changes."""
    fresh = _planner(case)
    seconds = []
    for _ in range(3):
        planner = fresh()
        start = time.process_time()
        results = planner.frontier()
        seconds.append(time.process_time() - start)
    rates = [_outcome(r).get("samples_per_s") for r in results]
    status = f"{len(results)} points"
    return {"seconds": seconds, "status": status, "gap": 0.0, "samples_per_s": rates}


def _limit(case: Case) -> dict[str, Any]:
    """Measure the wall seconds beyond the time limit, tables included."""
    planner = _planner(case)()
    allowed = planner.options.time_limit_s
    assert allowed is not None
    start = time.perf_counter()
    result = planner.solve(global_batch_sizes=case.batches)
    wall = time.perf_counter() - start
    return _outcome(result) | {"seconds": [max(0.0, wall - allowed)], "wall_s": wall}


def _interrupt(case: Case) -> dict[str, Any]:
    """Measure the wall seconds from Ctrl-C, after two seconds of searching, to the exception."""
    planner = _planner(case)()
    pressed = 0.0

    def press(number: int, frame: object) -> None:
        nonlocal pressed
        del number, frame
        pressed = pressed or time.perf_counter()
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, press)
    # Python runs the handler late, and that delay is measured: so the time is the alarm's
    due = time.perf_counter() + 2.0
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    try:
        result = planner.solve(global_batch_sizes=case.batches)
    except KeyboardInterrupt:
        return {"seconds": [time.perf_counter() - due], "status": "interrupted", "gap": 0.0}
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    late = time.perf_counter() - due
    return _outcome(result) | {"seconds": [max(0.0, late)], "status": "over before"}


def _command(case: Case) -> dict[str, Any]:
    """Measure the CPU seconds of a whole command, from a warm cache of byte code."""
    program = str(Path(sys.executable).parent / "autopar")
    seconds = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        # an empty folder, because files of the current one may be used for planning
        with tempfile.TemporaryDirectory() as folder:
            command = [program, *case.arguments]
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return {"seconds": seconds[1:], "status": "exit 0", "gap": 0.0}


def _stage(case: Case) -> dict[str, Any]:
    """Measure the CPU seconds of one call for a stage of two layers: call overhead only."""
    from search.planning.layered.core import solve_stage

    del case
    times, memory = np.array([[1.0, 2.0]] * 2), np.array([[2.0, 1.0]] * 2)
    moves = np.zeros((2, 2, 2))
    seconds = []
    for _ in range(9):
        start = time.process_time()
        for _ in range(2000):
            answer = solve_stage(times, memory, moves, 3.0)
        seconds.append((time.process_time() - start) / 2000)
    assert answer.total_s == 3.0
    return {"seconds": seconds, "status": answer.status, "gap": 0.0, "samples_per_s": 3.0}


def _dictionaries(case: Case) -> dict[str, Any]:
    """Measure the CPU seconds per execution of Calculon's model, given as dictionaries."""
    from benchmarks.bench_analytic_calculon import APPLICATIONS, SYSTEM
    from search.closed_form.calculon import evaluate_many
    from search.closed_form.files import calculon_system

    del case
    application, system = APPLICATIONS["gpt3-175B"], calculon_system(SYSTEM)
    count, seconds = 4000, []
    documents = [_execution(2 ** (k % 6)) for k in range(count)]
    for _ in range(5):
        start = time.process_time()
        answers = evaluate_many(application, documents, system)
        seconds.append((time.process_time() - start) / count)
    feasible = f"{int(answers['ok'].sum())} of {count} run"
    total = float(answers["total_time_s"][answers["ok"]].sum())
    return {"seconds": seconds, "status": feasible, "gap": 0.0, "samples_per_s": total}


def _execution(data_par: int) -> dict[str, Any]:
    return {
        "num_procs": 64 * data_par, "tensor_par": 8, "pipeline_par": 8, "data_par": data_par,
        "tensor_par_net": 0, "pipeline_par_net": 1, "data_par_net": 1,
        "batch_size": 64, "microbatch_size": 1, "datatype": "float16",
        "fused_activation": True, "attention_type": "multihead", "activation_recompute": "full",
        "pipeline_interleaving": 1, "optimizer_sharding": True, "tensor_par_comm_type": "ar",
        "tensor_par_overlap": "none", "seq_par_ag_redo": False, "data_par_overlap": False,
        "weight_offload": False, "activations_offload": False, "optimizer_offload": False,
    }  # fmt: skip


KINDS: dict[str, Callable[[Case], dict[str, Any]]] = {
    "first": _first,
    "again": _again,
    "frontier": _frontier,
    "limit": _limit,
    "interrupt": _interrupt,
    "command": _command,
    "stage": _stage,
    "dictionaries": _dictionaries,
}


def measure(case: Case) -> dict[str, Any]:
    """Return the time and memory of the case in this process, and its answer."""
    base = peak_memory_bytes()
    found = KINDS[case.kind](case)
    middle = statistics.median(found["seconds"])
    return found | {"middle": middle, "peak_bytes": peak_memory_bytes(), "base_bytes": base}


# --------------------------------------------------------------------------------------------------
# All cases, each in a separate process, with the code of one checkout or of two in turns.


def _in_own_process(name: str, checkout: Path, limit_s: float) -> dict[str, Any]:
    """Return `measure` of a case by the interpreter and packages of a checkout."""
    command = [checkout / ".venv" / "bin" / "python", "-m", "benchmarks.bench_growth"]
    if checkout == ROOT:
        command[0] = Path(sys.executable)
    process = subprocess.Popen(
        [*map(str, command), "--one", name, "--checkout", str(checkout)],
        cwd=ROOT,  # cases are those of this checkout, whichever answers
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, problem = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"status": f"not done in {limit_s:g} s", "middle": math.inf, "gap": math.inf}
    if process.returncode:
        last = problem.strip().splitlines()[-1:] or [f"exit {process.returncode}"]
        return {"status": f"failed: {last[0]:.120}", "middle": math.nan, "gap": math.nan}
    found: dict[str, Any] = json.loads(out)
    return found


def _asked(case: Case, checkouts: list[Path], rounds: int, limit_s: float) -> list[dict[str, Any]]:
    """Return one answer per checkout, with the median over the rounds."""
    runs: list[list[dict[str, Any]]] = [[] for _ in checkouts]
    for _ in range(rounds):
        for own, checkout in zip(runs, checkouts, strict=True):
            # one run measures a long case well enough
            if not own or own[0]["middle"] < limit_s / 12:
                own.append(_in_own_process(case.name, checkout, limit_s))
    rows = []
    for own in runs:
        middle = statistics.median(run["middle"] for run in own)
        peaks = [run.get("peak_bytes", 0) for run in own]
        rows.append(own[0] | {"middle": middle, "peak_bytes": max(peaks), "rounds": len(own)})
    return rows


_UNITS = {"limit": "s late", "interrupt": "s late"}


def _value(row: dict[str, Any]) -> str:
    middle = row["middle"]
    if not math.isfinite(middle):
        return str(row["status"])
    return f"{middle:.3g}" if middle >= 1e-4 else f"{middle * 1e6:.1f}e-6"


def _line(case: Case, rows: list[dict[str, Any]]) -> str:
    """Return the line of a case; the last row is this checkout's."""
    own = rows[-1]
    parts = [
        f"{case.name:28s} {_UNITS.get(case.kind, 'CPU s'):9s}",
        *(f"{_value(row):>9s}" for row in rows),
    ]
    if len(rows) == 2 and own["middle"]:
        ratio = rows[0]["middle"] / own["middle"]
        parts.append(f"{ratio:7.1f}x" if math.isfinite(ratio) else "       -")
    parts.append(f"target {case.target:g}" if case.target is not None else "")
    peaks = "/".join(f"{row['peak_bytes'] / 2**20:.0f}" for row in rows)
    gaps = "/".join(dict.fromkeys(f"{row['status']} gap {row['gap']:.2g}" for row in rows))
    return " ".join([*parts, f" {peaks} MiB  {gaps}", _same(rows)]).rstrip()


def _same(rows: list[dict[str, Any]]) -> str:
    """Return a note if two checkouts found different throughput."""
    rates = [row.get("samples_per_s") for row in rows]
    stopped = any("time_limit" in row["status"] for row in rows)
    if len(rates) < 2 or None in rates or stopped:
        return ""
    if rates[0] == rates[1]:
        return " equal"
    before, now = np.ravel(np.array(rates[0])), np.ravel(np.array(rates[1]))
    if before.shape != now.shape:
        return " DIFFERENT in number"
    return f" DIFFERENT by {np.abs(now / before - 1).max():.2g}"


def exponent(sizes: list[float], values: list[float]) -> float:
    """Return the slope of the values over the sizes, both logarithmic."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def _growth(ledger: dict[str, list[dict[str, Any]]], names: list[str]) -> Iterator[str]:
    """Yield the exponent of every line that has three finished points."""
    for axis in dict.fromkeys(CASES[name].axis for name in ledger if CASES[name].axis):
        cases = [CASES[name] for name in ledger if CASES[name].axis == axis]
        for side, name in enumerate(names):
            rows = [(case.size, ledger[case.name][side]) for case in cases]
            done = [(size, row["middle"]) for size, row in rows if math.isfinite(row["middle"])]
            proven = sum(row["status"] == "optimal" and row["gap"] == 0.0 for _, row in rows)
            slope = "-"
            if len(done) > 2:
                slope = f"{exponent(*map(list, zip(*done, strict=True))):.2f}"
            yield f"{axis:18s} {name:7s} exponent {slope}, {proven} of {len(rows)} proven optimal"


def main() -> int:
    """Print one line per case and one per axis."""
    parser = argparse.ArgumentParser(description="How searches grow.")
    parser.add_argument("--before", type=Path, help="another checkout with a built .venv")
    parser.add_argument("--only", nargs="+", default=[""], help="cases, or words in their names")
    parser.add_argument("--limit", type=float, default=60.0, help="wall seconds of a process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="append the result to this file")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--checkout", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        # an interpreter that took this folder's packages would compare it with itself
        assert Path(search.__file__).is_relative_to(given.checkout), search.__file__
        print(json.dumps(measure(CASES[given.one])))
        return 0
    checkouts = [ROOT] if given.before is None else [given.before.resolve(), ROOT]
    names = ["before", "now"][-len(checkouts) :]
    print(f"{'case':28s} {'unit':9s} " + " ".join(f"{name:>9s}" for name in names))
    ledger: dict[str, list[dict[str, Any]]] = {}
    for name, case in CASES.items():
        if not any(word == name or (word not in CASES and word in name) for word in given.only):
            continue
        ledger[name] = _asked(case, checkouts, given.rounds, given.limit)
        print(_line(case, ledger[name]), flush=True)
    for line in _growth(ledger, names):
        print(line)
    append(given.json, "growth", {"checkouts": names, "cases": ledger})
    failed = [n for n, rows in ledger.items() if any("failed" in row["status"] for row in rows)]
    differ = [n for n, rows in ledger.items() if "DIFFERENT" in _same(rows)]
    return 1 if failed or differ else 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())

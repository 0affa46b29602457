"""Do two checkouts' planner cores find the same optima? Random deep problems, asked of both.

`python -m benchmarks.compare_cores --before FOLDER [--now FOLDER] [--seeds FIRST COUNT] [--limit S]
[--save FILE] [--worst N]`. A folder is a checkout with a built `.venv`; a file that `--save` wrote
stands for one that has answered already. Problems are those of `tests/oracles/deep.py`; every plan
is priced by the term-by-term reference, and an answer that a limit ended has to hold the other's
optimum within its bounds. Exit 1 where an optimum differs or a plan is wrong.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import search
from benchmarks.metadata import ROOT
from search.planning.layered.core import TableChoice, TableSolution, solve_tables
from tests.oracles.deep import DeepInstance, deep_instance
from tests.oracles.reference import evaluate

__all__ = ["answer", "differences", "main"]

ROUNDING = 1e-12
"""Relative difference of sums of the same terms in another order or other units, at most."""
PATIENCE_S = 4.0
"""Wall seconds after its limit when the process of a core is ended."""


# --------------------------------------------------------------------------------------------------
# One answer, in this process.


def answer(instance: DeepInstance, limit_s: float) -> dict[str, Any]:
    """Return the answer of this process's core, and its errors according to the reference."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = solve_tables(
        instance.tables, instance.budget_bytes, time_limit_s=limit_s, **instance.options
    )
    record: dict[str, Any] = {
        "seed": instance.seed,
        "limit_s": limit_s,
        "words": instance.words,
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "status": found.status,
        "bound_s_per_sample": found.bound_s_per_sample,
        "smallest_budget_bytes": found.smallest_budget_bytes,
        "opened": found.opened,
        "states": found.states,
        "wrong": [],
    }
    plans: list[TableChoice | TableSolution] = [found, *found.alternatives]
    if found.candidate < 0:
        plans = []
    rates = []
    for plan in plans:
        batch = int(instance.tables.candidate_batch[plan.candidate])
        rates.append(plan.step_time_s / batch)
        record["wrong"] += _wrong(instance, plan)
    record["s_per_sample"] = rates
    if plans:
        record["plan"] = [
            found.candidate, found.stage_sizes, found.strategy_index, found.vocab_index,
        ]  # fmt: skip
    return record


def _wrong(instance: DeepInstance, plan: TableChoice | TableSolution) -> Iterator[str]:
    own = evaluate(
        instance.tables, plan.candidate, plan.stage_sizes, plan.strategy_index, plan.vocab_index
    )
    if not own.valid:
        yield "not a legal plan"
    if own.peak_bytes > instance.budget_bytes:
        yield f"needs {own.peak_bytes} of {instance.budget_bytes} bytes"
    if abs(own.step_time_s - plan.step_time_s) > 1e-9 * own.step_time_s:
        yield f"takes {own.step_time_s!r} s, not {plan.step_time_s!r} s"


# --------------------------------------------------------------------------------------------------
# All answers of a checkout, from processes that are ended when they hang.


def _answers(checkout: Path, first: int, count: int, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield one record per seed."""
    at, last = first, first + count
    while at < last:
        process = _process(checkout, at, last, limit_s)
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read, args=(process, lines), daemon=True).start()
        while at < last:
            try:
                # starting an interpreter takes its time too
                line = lines.get(timeout=limit_s + PATIENCE_S + (30.0 if at == first else 5.0))
            except queue.Empty:
                line = ""
            if not line:
                process.kill()
                code = process.wait()
                how = "not done" if code == -9 else f"ended with {code}"
                yield {"seed": at, "words": deep_instance(at).words, "status": how}
                at += 1
                break
            yield json.loads(line)
            at += 1
        process.kill()
        process.wait()


def _process(checkout: Path, first: int, last: int, limit_s: float) -> subprocess.Popen[str]:
    own = sys.executable if checkout == ROOT else str(checkout / ".venv" / "bin" / "python")
    command = [own, "-m", "benchmarks.compare_cores", "--before", str(checkout)]
    command += ["--answer", "--seeds", str(first), str(last - first), "--limit", str(limit_s)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Put every line, and an empty one at the end."""
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put("")


# --------------------------------------------------------------------------------------------------
# Two answers to one question.


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return contradictions between two answers; equal optima with other bits are `rounding`."""
    if not {a["status"], b["status"]} <= {"optimal", "infeasible", "time_limit"}:
        return []
    found = []
    for one, other in ((a, b), (b, a)):
        # nothing is faster than a bound, or slower than a plan that was found
        if one["s_per_sample"] and other["s_per_sample"]:
            best, bound = one["s_per_sample"][0], other["bound_s_per_sample"]
            if best < bound * (1 - ROUNDING):
                found.append(f"{best!r} s per sample is below the other's bound {bound!r}")
        elif one["s_per_sample"] and other["status"] == "infeasible":
            found.append("a plan where the other says that there is none")
    smallest = a["smallest_budget_bytes"], b["smallest_budget_bytes"]
    if a["status"] == b["status"] == "infeasible" and smallest[0] != smallest[1]:
        found.append(f"smallest budget {smallest[0]} or {smallest[1]}")
    if a["status"] == b["status"] == "optimal":
        pairs = list(zip(a["s_per_sample"], b["s_per_sample"], strict=False))
        worst = max(abs(x / y - 1) if y else float(x != y) for x, y in pairs)
        if worst > ROUNDING:
            found.append(f"optimum or alternatives differ by {worst:.2g}")
        elif worst > 0:
            found.append("rounding")
        # a limit that ends the alternatives does not change the optimum
        stopped = any(r["wall_s"] >= r["limit_s"] for r in (a, b))
        if len(a["s_per_sample"]) != len(b["s_per_sample"]) and not stopped:
            found.append("another number of alternatives")
    return found


def _compare(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> int:
    """Print the comparison; return the number of seeds with a wrong or another answer."""
    after = {record["seed"]: record for record in now}
    pairs = [(record, after[record["seed"]]) for record in before if record["seed"] in after]
    statuses = Counter((a["status"], b["status"]) for a, b in pairs)
    for (a_status, b_status), count in statuses.most_common():
        print(f"  {count:5d} before {a_status}, now {b_status}")
    failed = rounding = same_plan = both = 0
    for a, b in pairs:
        found = differences(a, b)
        rounding += "rounding" in found
        found = [text for text in found if text != "rounding"]
        for side, record in (("before", a), ("now", b)):
            found += [f"{side}: {text}" for text in record.get("wrong", [])]
        if found:
            failed += 1
            print(f"seed {a['seed']}: {'; '.join(found)}\n  {a['words']}")
        if a["status"] == b["status"] == "optimal":
            both += 1
            same_plan += a["plan"] == b["plan"]
    print(
        f"{len(pairs)} problems, {failed} differ; of {both} solved by both {both - rounding} "
        f"to the bit, {rounding} within {ROUNDING:g}, {same_plan} with the same plan"
    )
    long = [(a, b) for a, b in pairs if _both(a, b)]
    slower = sorted((b["cpu_s"] / a["cpu_s"], b["seed"], b["words"]) for a, b in long)
    for ratio, seed, words in slower[-5:]:
        print(f"  {ratio:7.1f} times as long now: seed {seed} {words}")
    for name, mine in (("before", [a for a, _ in pairs]), ("now", [b for _, b in pairs])):
        cpu = sorted(record["cpu_s"] for record in mine if "cpu_s" in record)
        late = sum("cpu_s" not in record for record in mine)
        print(
            f"{name}: CPU {sum(cpu):.1f} s, median {cpu[len(cpu) // 2] * 1e3:.2f} ms, most "
            f"{cpu[-1]:.2f} s; {late} not answered"
        )
    return failed


def _both(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Return True if both were answered, and at least one took over 0.1 s."""
    return min(a.get("cpu_s", 0.0), b.get("cpu_s", 0.0)) > 0 and max(a["cpu_s"], b["cpu_s"]) > 0.1


def _worst(records: list[dict[str, Any]], number: int) -> None:
    """Print the questions that took longest."""
    for r in sorted(records, key=lambda r: -r.get("cpu_s", float("inf")))[:number]:
        took = f"{r['cpu_s']:7.2f} CPU s" if "cpu_s" in r else " " * 13
        print(f"  seed {r['seed']:6d} {took} {r['status']:10s} {r['words']}")


def _records(
    given: Path, seeds: tuple[int, int], limit_s: float, save: Path | None
) -> list[dict[str, Any]]:
    """Return the answers in a file, or those of a checkout, saved as they come."""
    if given.is_file():
        lines = given.read_text(encoding="utf-8").splitlines()
        known = [json.loads(line) for line in lines]
        return [r for r in known if seeds[0] <= r["seed"] < sum(seeds)]
    records = []
    with save.open("a", encoding="utf-8") if save else nullcontext() as file:
        for record in _answers(given.resolve(), *seeds, limit_s):
            records.append(record)
            if file is not None:
                file.write(json.dumps(record) + "\n")
                file.flush()
    return records


def main() -> int:
    """Run both cores and print their differences; return 1 if an optimum differs."""
    parser = argparse.ArgumentParser(description="Two cores on random deep problems.")
    parser.add_argument("--before", type=Path, required=True, help="a checkout, or its answers")
    parser.add_argument("--now", type=Path, default=ROOT, help="another, or its answers")
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 2000), metavar=("FIRST", "COUNT"))
    parser.add_argument("--limit", type=float, default=2.0, help="seconds of one problem")
    parser.add_argument("--save", type=Path, help="only append --before's answers to it")
    parser.add_argument("--worst", type=int, default=20, help="longest ones to list")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    seeds: tuple[int, int] = tuple(given.seeds)
    if given.answer:
        # an interpreter that took this folder's packages would compare it with itself
        assert Path(search.__file__).is_relative_to(given.before), search.__file__
        for seed in range(seeds[0], sum(seeds)):
            print(json.dumps(answer(deep_instance(seed), given.limit)), flush=True)
        return 0
    if given.save is not None:
        _worst(_records(given.before, seeds, given.limit, given.save), given.worst)
        return 0
    with ThreadPoolExecutor() as pool:
        sides = [
            pool.submit(_records, side, seeds, given.limit, None)
            for side in (given.before, given.now)
        ]
        before, now = (side.result() for side in sides)
    print("longest before:")
    _worst(before, given.worst)
    print("longest now:")
    _worst(now, given.worst)
    return 1 if _compare(before, now) else 0


if __name__ == "__main__":
    sys.exit(main())

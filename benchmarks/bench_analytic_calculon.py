"""How fast the Calculon engine prices executions in four orders, and searches two whole spaces.

`python -m benchmarks.bench_analytic_calculon [--repeats N] [--json LEDGER]`. Inputs are shipped or
written below. The published tool prices 60 to 620 executions per second and core.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleExecution
from benchmarks.metadata import append, metadata, timed
from search.closed_form.answers import Answer
from search.closed_form.calculon import Application, System, evaluate_many
from search.closed_form.calculon.engine import unpack_execution
from search.closed_form.calculon.exploration import Space, explore
from search.closed_form.files import calculon_system
from tests.oracles.calculon import evaluate

__all__ = ["APPLICATIONS", "feasible", "main", "orders"]

APPLICATIONS = {
    "turing-530B": Application(
        hidden=20480,
        feedforward=81920,
        seq_size=2048,
        attn_heads=128,
        attn_size=160,
        num_blocks=105,
    ),
    "gpt3-175B": Application(
        hidden=12288, feedforward=49152, seq_size=2048, attn_heads=96, attn_size=128, num_blocks=96
    ),
}
SYSTEM = "a100-80gb"
SEARCHES = (  # model, processors, largest batch, points, target in CPU seconds
    ("turing-530B", 5128, 2520, 10_944, 0.05),
    ("gpt3-175B", 1024, 1536, 11_698_528, 15.0),
)
TARGET_PER_S = 1_000_000
DICTIONARIES_PER_S, MOST_DICTIONARIES = 300_000, 100_000
PEER_PER_S = (60, 620)
"""Executions per second and core that the published tool prices."""


def feasible(count: int, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Return `count` executions of gpt3-175B on 1,024 processors in each of four orders.

    "One of each block" has fewer: nothing in it can be looked up.
    """
    parts: list[NDArray[Any]] = []
    explore(
        APPLICATIONS["gpt3-175B"],
        calculon_system(SYSTEM),
        _space(1024, 1536, "both"),
        each=lambda executions, _: parts.append(executions),
    )
    found = np.concatenate(parts)
    assert found.size >= count, f"the space has {found.size} feasible executions, {count} are asked"
    chosen = np.random.default_rng(seed).permutation(found.size)[:count]
    return {
        "enumerated": found[np.sort(chosen)],
        "shuffled": found[chosen],
        "one of each block": found[chosen[_one_of_each(found[chosen])]],
        "repeated": np.repeat(found[chosen[:1]], count),
    }


def orders(count: int, repeats: int) -> list[dict[str, Any]]:
    """Return executions per second in each order with one and two threads, checked first."""
    application, system = APPLICATIONS["gpt3-175B"], calculon_system(SYSTEM)
    rows = []
    for order, executions in feasible(count).items():
        _check(application, system, executions)
        for threads in (1, 2):
            price = partial(evaluate_many, application, executions, system, threads=threads)
            calls = max(1, count // executions.size)  # of small arrays, many in one run
            answer, run = timed(partial(_last, price, calls), repeats)
            assert answer["ok"].all()
            priced = calls * executions.size
            wall_s = statistics.median(run.wall_s)
            rows.append(
                {
                    "order": order,
                    "threads": threads,
                    "blocks": len(_one_of_each(executions)),
                    "cpu_s": run.cpu_s,
                    "wall_s": run.wall_s,
                    "per_cpu_s": priced / run.median_cpu_s,
                    "per_wall_s": priced / wall_s,
                }
            )
    return rows


def dictionaries(count: int, repeats: int) -> dict[str, Any]:
    """Return executions per second that are given as a list of dictionaries."""
    application, system = APPLICATIONS["gpt3-175B"], calculon_system(SYSTEM)
    executions = feasible(count)["shuffled"]
    documents = [unpack_execution(x) for x in executions]
    answer, run = timed(partial(evaluate_many, application, documents, system), repeats)
    assert (answer == evaluate_many(application, executions, system)).all()
    return {"count": count, "cpu_s": run.cpu_s, "per_cpu_s": count / run.median_cpu_s}


def searches(repeats: int) -> list[dict[str, Any]]:
    """Return the seconds of two searches for the best ten, in the published tool's space."""
    system, rows = calculon_system(SYSTEM), []
    for name, num_procs, batch, points, target_s in SEARCHES:
        space = _space(num_procs, batch, "true")
        search = partial(explore, APPLICATIONS[name], system, space, top=10)
        found, run = timed(search, repeats)
        assert found.considered == points, found.considered
        _check_best(APPLICATIONS[name], system, found)
        rows.append(
            {
                "search": f"{name}, {num_procs} processors",
                "points": points,
                "feasible": found.feasible,
                "target_s": target_s,
                "cpu_s": run.cpu_s,
                "wall_s": run.wall_s,
                "median_cpu_s": run.median_cpu_s,
            }
        )
    return rows


def _last(work: Callable[[], NDArray[Any]], calls: int) -> NDArray[Any]:
    for _ in range(calls - 1):
        work()
    return work()


def _space(num_procs: int, batch: int, fused: Any) -> Space:
    return Space(
        num_procs=num_procs,
        max_batch=batch,
        fused_activation=fused,
        fixed_batch=False,
        uneven=False,
    )


def _check(application: Application, system: System, executions: NDArray[Any]) -> None:
    """Compare some answers with a model in plain Python."""
    some = executions[:: max(1, executions.size // 20)]
    for x, fast in zip(some, evaluate_many(application, some, system), strict=True):
        slow = evaluate(application, unpack_execution(x), system)
        assert abs(fast["total_time_s"] / slow["total_time"] - 1) < 1e-9
        assert abs(fast["tier1_bytes"] / slow["proc_mem_tier1_cap_req"] - 1) < 1e-9


def _check_best(application: Application, system: System, found: Answer) -> None:
    """Compare the best with a model in plain Python, and their order."""
    rates = [best.rate_per_s for best in found.best]
    assert len(rates) == 10, len(rates)
    assert rates == sorted(rates, reverse=True)
    for best in found.best:
        try:
            slow = evaluate(application, best.execution, system)
        except InfeasibleExecution as error:
            raise AssertionError(f"the best cannot run: {error}") from error
        assert abs(best.rate_per_s / slow["sample_rate"] - 1) < 1e-9


def _one_of_each(executions: NDArray[Any]) -> NDArray[np.int64]:
    """Return the first execution of each different block; shards are no part of a block."""
    names = (
        "microbatch_size",
        "tensor_par",
        "tensor_par_net",
        "activation_recompute",
        "tensor_par_comm_type",
        "tensor_par_overlap",
        "fused_activation",
        "seq_par_ag_redo",
    )
    keys = np.stack([executions[name].astype(np.int64) for name in names], axis=1)
    return np.sort(np.unique(keys, axis=0, return_index=True)[1])


def main() -> None:
    """Print a table of each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="executions of each order")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append the raw seconds to this file")
    args = parser.parse_args()
    about = metadata()
    print(f"{about['processor']}, Python {about['python']}, {SYSTEM}, {args.count:,} executions")
    rows = orders(args.count, args.repeats)
    print("| order | blocks | threads | per CPU second | target | per wall second | x the peer |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        rate = row["per_cpu_s"]
        ratio = f"{rate / PEER_PER_S[1]:,.0f} to {rate / PEER_PER_S[0]:,.0f}"
        print(
            f"| {row['order']} | {row['blocks']:,} | {row['threads']} | {rate:,.0f} "
            f"| {TARGET_PER_S:,} | {row['per_wall_s']:,.0f} | {ratio} |"
        )
    documents = dictionaries(min(args.count, MOST_DICTIONARIES), args.repeats)
    print(
        f"of dictionaries {documents['per_cpu_s']:,.0f} per CPU second "
        f"(target {DICTIONARIES_PER_S:,})"
    )
    print()
    found = searches(args.repeats)
    print("| search | points | feasible | CPU s, median (least) | target | the peer at 620/s |")
    print("|---|---|---|---|---|---|")
    for row in found:
        print(
            f"| {row['search']} | {row['points']:,} | {row['feasible']:,} "
            f"| {row['median_cpu_s']:.4f} ({min(row['cpu_s']):.4f}) | {row['target_s']} "
            f"| {row['points'] / PEER_PER_S[1]:,.0f} s |"
        )
    append(
        args.json,
        "analytic_calculon",
        {"orders": rows, "dictionaries": documents, "searches": found},
    )


if __name__ == "__main__":
    main()

"""How fast the two-dimensional engine prices candidates in three orders, and searches whole spaces.

`python -m benchmarks.bench_analytic_tensor2d [--repeats N] [--json LEDGER]`. Inputs are shipped or
written below. The published tool prices 200 candidates per second and core.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.records import replace
from benchmarks.metadata import append, metadata, summary, timed
from search.closed_form.answers import Point
from search.closed_form.files import tensor2d_system
from search.closed_form.tensor2d import (
    CANDIDATE,
    STRATEGIES,
    Model,
    Strategy,
    System,
    evaluate_many,
    survey,
)
from search.closed_form.tensor2d.engine import unpack_candidate
from tests.oracles.tensor2d import evaluate as readable

__all__ = ["MODELS", "main", "orders", "searches"]

MODELS = {
    "gpt3-1T": Model(l=2048, e=25600, h=160, depth=128, f=4 * 25600),
    "gpt3-1T, all": Model(
        l=2048,
        e=25600,
        h=160,
        depth=128,
        f=4 * 25600,
        kv_heads=32,
        causal=True,
        structure="llama",
        vocab=51200,
    ),
}
SYSTEM, DOMAIN = "b200", 64
GPUS, BATCH = 16384, 4096
TARGET_PER_S, TARGET_S = 1_000_000, 0.3
DICTIONARIES_PER_S, MOST_DICTIONARIES = 300_000, 100_000
POINTS = {"1d": 3_816, "2d": 115_938, "2d-seqp": 49_897}
"""Number of points of the published space, which `compat` searches."""
PEER_PER_S = 200
"""Candidates per second and core that the published tool prices."""
_LAYER = ("tp1", "tp2", "mbs", "nb", "nv_tp1", "nv_tp2")


def orders(count: int, repeats: int) -> list[dict[str, Any]]:
    """Return candidates per second of SUMMA in each order, one and two threads, checked first."""
    rows = []
    for name, model in MODELS.items():
        for order, candidates in _orders(model, count).items():
            _check("2d", model, candidates)
            for threads in (1, 2):
                calls = max(1, count // candidates.size)
                price = partial(_price, model, candidates, calls, threads)
                answer, run = timed(price, repeats)
                assert answer["ok"].all()
                rows.append(
                    {
                        "model": name,
                        "order": order,
                        "threads": threads,
                        "cpu_s": run.cpu_s,
                        "wall_s": run.wall_s,
                        "per_cpu_s": calls * candidates.size / run.median_cpu_s,
                        "per_wall_s": calls * candidates.size / statistics.median(run.wall_s),
                    }
                )
    return rows


def dictionaries(count: int, repeats: int) -> dict[str, Any]:
    """Return candidates per second that are given as a list of dictionaries."""
    model = MODELS["gpt3-1T"]
    candidates = _orders(model, count)["shuffled"]
    documents = [dict(c, **p) for c, p in (unpack_candidate("2d", row) for row in candidates)]
    answer, run = timed(partial(_price, model, documents, 1, 1), repeats)
    assert (answer == _price(model, candidates, 1, 1)).all()
    return {"count": count, "cpu_s": run.cpu_s, "per_cpu_s": count / run.median_cpu_s}


def searches(repeats: int) -> list[dict[str, Any]]:
    """Return the seconds of whole searches for the best ten, and their counts of points."""
    rows = []
    for name, model in MODELS.items():
        for strategy in STRATEGIES:
            for compat in (True, False) if model.kv_heads is None else (False,):
                for keep_all in (False, True):
                    search = partial(
                        survey,
                        strategy,
                        model,
                        GPUS,
                        BATCH,
                        _system(),
                        compat=compat,
                        each=(lambda *_: None) if keep_all else None,
                    )
                    found, run = timed(search, repeats)
                    # the default space excludes panels without effect
                    points = POINTS[strategy]
                    assert found.considered == points if compat else found.considered <= points
                    _check_best(strategy, model, found.best, compat=compat)
                    rows.append(
                        {
                            "model": name,
                            "strategy": strategy,
                            "compat": compat,
                            "keep_all": keep_all,
                            "candidates": found.considered,
                            "feasible": found.feasible,
                            "bounded": found.bounded,
                            "cpu_s": run.cpu_s,
                            "wall_s": run.wall_s,
                            "median_cpu_s": run.median_cpu_s,
                        }
                    )
    return rows


def _system() -> System:
    return replace(tensor2d_system(SYSTEM), nvlink_size=DOMAIN)


def _orders(model: Model, count: int) -> dict[str, NDArray[Any]]:
    """Return feasible candidates as enumerated, shuffled, and one for each layer."""
    every: list[NDArray[Any]] = []
    survey("2d", model, GPUS, BATCH, _system(), each=lambda candidates, _: every.append(candidates))
    packed = np.ascontiguousarray(every[0], dtype=CANDIDATE)
    layers = np.stack([packed[name] for name in _LAYER], axis=1)
    _, first = np.unique(layers, axis=0, return_index=True)
    rng = np.random.default_rng(0)
    shuffled = packed[rng.permutation(packed.size)]
    return {
        "enumerated": np.resize(packed, count),
        "shuffled": np.resize(shuffled, count),
        f"{first.size:,} layers, each once": packed[rng.permutation(first)],
    }


def _price(model: Model, candidates: Any, calls: int, threads: int) -> NDArray[Any]:
    """Price candidates in `calls` calls; no result is kept from one call to the next."""
    system = _system()
    for _ in range(calls):
        found = evaluate_many("2d", model, candidates, GPUS, BATCH, system, threads=threads)
    return found


def _check(strategy: Strategy, model: Model, candidates: NDArray[Any]) -> None:
    """Compare some answers with the readable model."""
    some = candidates[:: max(1, candidates.size // 20)]
    fast = evaluate_many(strategy, model, some, GPUS, BATCH, _system())
    for row, ours in zip(some, fast, strict=True):
        config, placement = unpack_candidate(strategy, row)
        slow = readable(strategy, model, config, placement, GPUS, BATCH, _system())
        assert abs(ours["total_time_s"] / slow["t"] - 1) < 1e-9
        assert abs(ours["memory_bytes"] / (slow["mem"] * 1e9) - 1) < 1e-9


def _check_best(strategy: Strategy, model: Model, best: tuple[Point, ...], *, compat: bool) -> None:
    """Compare the best with the readable model, and their order."""
    rates = [found.rate_per_s for found in best]
    assert len(rates) == 10, len(rates)
    assert rates == sorted(rates, reverse=True)
    for found in best:
        slow = readable(
            strategy,
            model,
            found.execution["config"],
            found.execution["placement"],
            GPUS,
            BATCH,
            _system(),
            compat=compat,
        )
        assert abs(found.rate_per_s * slow["t"] / BATCH - 1) < 1e-9


def main() -> None:
    """Print a table of each measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000, help="candidates of each order")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="append the raw seconds to this file")
    args = parser.parse_args()
    about = metadata()
    print(
        f"{about['processor']}, Python {about['python']}, {about['compiler']}, {SYSTEM} in domains "
        f"of {DOMAIN}, {GPUS:,} GPUs, batch {BATCH:,}, {args.count:,} candidates"
    )
    rows = orders(args.count, args.repeats)
    print("| model | order | threads | per CPU second | target | per wall second | x the peer |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['model']} | {row['order']} | {row['threads']} | {row['per_cpu_s']:,.0f} "
            f"| {TARGET_PER_S:,} | {row['per_wall_s']:,.0f} "
            f"| {row['per_cpu_s'] / PEER_PER_S:,.0f} |"
        )
    documents = dictionaries(min(args.count, MOST_DICTIONARIES), args.repeats)
    print(
        f"of dictionaries {documents['per_cpu_s']:,.0f} per CPU second "
        f"(target {DICTIONARIES_PER_S:,})"
    )
    found = searches(args.repeats)
    print()
    print("| model | strategy | figures | rows | candidates | feasible | bounded | CPU | peer |")
    print("|---|---|---|---|---|---|---|---|---|")
    for row in found:
        assert row["median_cpu_s"] < TARGET_S or row["strategy"] != "2d", row
        print(
            f"| {row['model']} | {row['strategy']} | {'compat' if row['compat'] else 'default'} "
            f"| {'all' if row['keep_all'] else 'best 10'} | {row['candidates']:,} "
            f"| {row['feasible']:,} | {row['bounded']:,} | {summary(row['cpu_s'])} "
            f"| {row['candidates'] / PEER_PER_S:,.0f} s |"
        )
    append(
        args.json,
        "analytic_tensor2d",
        {"orders": rows, "dictionaries": documents, "searches": found},
    )


if __name__ == "__main__":
    main()

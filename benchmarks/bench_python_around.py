"""Python time of a search outside its core: documents to tables, and answer to prediction.

`python -m benchmarks.bench_python_around [--repeats N] [--json LEDGER]`. Each run makes a new
planner on loaded documents, so no result of an earlier search is reused. Inputs are estimated or
the toy ones of the tests; no file is needed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autopar.records import replace
from autopar.units import GIB
from benchmarks.metadata import Timed, append, summary, timed
from search.planning.layered import planner as module
from search.planning.layered.planner import Planner
from search.planning.layered.prediction import SearchResult
from search.planning.session import open_session
from search.request.options import SearchOptions
from search.request.request import InputSpec

__all__ = ["main", "searches", "tables"]

TARGET_MS = 1.5
"""Target of llama2-7b on 8 GPUs, milliseconds with the core."""
SMALL = SearchOptions(
    memory_constraint_bytes=80.0 * GIB, settle_bsz=64, time_profile_mode="batch", top=0
)
QUESTIONS = {
    "llama2-7b, 8 GPUs": SMALL,
    "the same with 5 alternatives": replace(SMALL, top=5),
    "the same with one strategy for all layers": replace(SMALL, fine_grained_mode=False),
    "the same with Ulysses and ZeRO-2": replace(SMALL, sp_space="tp+sp", default_dp_type="zero2"),
}
LARGE = SearchOptions(
    memory_constraint_bytes=80.0 * GIB, sp_space="tp+sp", default_dp_type="zero2", top=0
)
BATCHES = {count: tuple(range(1024, 1024 + 128 * count, 128)) for count in (1, 8, 32, 128)}


def searches(options: SearchOptions, repeats: int) -> tuple[SearchResult, Timed, list[float]]:
    """Return the answer of a question on 8 GPUs, its times, and seconds in the core alone."""
    inputs = InputSpec(model="llama2-7b", hardware="a100-80gb:1x8", seq_length=(2048,))
    session = open_session(inputs, options)
    core: list[float] = []
    solve = module.solve_tables

    def watched(*tables: Any, **keywords: Any) -> Any:
        start = time.process_time()
        found = solve(*tables, **keywords)
        core.append(time.process_time() - start)
        return found

    def search() -> SearchResult:
        documents = session.spec, session.profile, session.hardware
        return Planner.from_documents(*documents, options).solve()

    with patch.object(module, "solve_tables", watched):
        search()  # compiles and caches what all searches share
        result, times = timed(search, repeats)
    assert result.status == "optimal"
    assert result.plan is not None
    # pricing the plan separately gives the prediction of the search
    assert session.planner.evaluate(result.plan) == result.prediction
    return result, times, core[1:]


def tables(repeats: int) -> dict[int, Timed]:
    """Return the times of pricing llama3-70b's 96 layers on 1,024 GPUs, by number of batches."""
    inputs = InputSpec(
        model="llama3-70b", hardware="h100:128x8", num_layers=(96,), seq_length=(4096,)
    )
    session = open_session(inputs, LARGE)
    found = {}
    for count, batches in BATCHES.items():

        def build(batches: tuple[int, ...] = batches) -> int:
            documents = session.spec, session.profile, session.hardware
            planner = Planner.from_documents(*documents, LARGE)
            return len(planner._build(batches, None).space.candidates)

        candidates, found[count] = timed(build, repeats)
        assert candidates >= count
    return found


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    ledger: dict[str, Any] = {"target_ms": TARGET_MS}
    print(f"CPU time of a first search (target of the first line {TARGET_MS:g} ms)")
    for name, options in QUESTIONS.items():
        _, times, core = searches(options, arguments.repeats)
        ledger[name] = {"cpu_s": times.cpu_s, "wall_s": times.wall_s, "core_cpu_s": core}
        print(f"  {name}: {summary(times.cpu_s)}")
        print(f"    of which in the core {summary(core)}; wall {summary(times.wall_s)}")
    print("tables of llama3-70b with 96 layers, h100:128x8, tp+sp, zero2")
    found = tables(max(3, arguments.repeats // 8))
    for count, times in found.items():
        ledger[f"tables of {count} batches"] = {"cpu_s": times.cpu_s, "wall_s": times.wall_s}
        print(f"  {count} batch sizes: {summary(times.cpu_s)}; wall {summary(times.wall_s)}")
    append(arguments.json, "python_around", ledger)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Random planning questions with one thread and with three: are more threads ever slower?

`python -m benchmarks.bench_threads [--questions N] [--threads N] [--limit S] [--json LEDGER]`.
Questions draw a shipped model, a cluster, a schedule, a memory constraint and a batch; inputs are
estimated. The core is asked with both numbers of threads on the same tables, in turns. On a machine
that does other work too, CPU seconds say more than wall seconds: those of one thread are its own
time, those of several count also what was tried in vain.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from autopar.errors import AutoparError
from autopar.units import GIB
from benchmarks.metadata import append, summary
from search.options import SearchOptions
from search.planner.core import core
from search.question import open_session
from search.request import InputSpec

__all__ = ["Question", "asked", "drawn", "main"]

MODELS = (
    "bert-large",
    "gpt2-xl",
    "gpt-6.7b",
    "llama2-7b",
    "llama2-13b",
    "llama3-8b",
    "llama3-70b",
    "mixtral-8x7b",
    "qwen2.5-7b",
    "t5-3b",
)
CLUSTERS = ("h100:1x8", "h100:4x8", "h100:8x8", "a100-80gb:2x8", "a100-80gb:16x8")


@dataclass(frozen=True, kw_only=True)
class Question:
    """One random question."""

    model: str
    cluster: str
    options: SearchOptions


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the core said, and how long it took."""

    said: dict[str, Any]
    wall_s: float
    cpu_s: float


def drawn(seed: int) -> Question:
    """Return the question of this seed."""
    rng = random.Random(seed)
    return Question(
        model=rng.choice(MODELS),
        cluster=rng.choice(CLUSTERS),
        options=SearchOptions(
            pipeline_type=rng.choice(("gpipe", "pipedream_flush")),
            default_dp_type=rng.choice(("ddp", "zero2", "any")),
            sp_space=rng.choice(("tp", "tp+sp")),
            settle_bsz=rng.choice((8, 16, 64, 256)),
            memory_constraint_bytes=rng.choice((6, 8, 10, 14, 20, 30, 45, 75)) * GIB,
            time_profile_mode="batch",
            top=rng.choice((0, 5)),
        ),
    )


def _captured(question: Question) -> list[Any] | None:
    """Return the arguments of the core's call; None when the question cannot be asked."""
    calls: list[list[Any]] = []

    class CapturedError(Exception):
        pass

    def record(*given: Any) -> dict[str, Any]:
        calls.append(list(given))
        raise CapturedError

    inputs = InputSpec(model=question.model, hardware=question.cluster)
    try:
        with patch.object(core, "search_plan", record):
            open_session(inputs, question.options).planner.solve()
    except CapturedError:
        return calls[0]
    except AutoparError:
        return None
    raise AssertionError("the core was not asked")


def asked(given: list[Any], threads: int, limit_s: float) -> Answer:
    """Return the core's answer with so many threads."""
    arguments = list(given)
    arguments[4], arguments[5] = threads, limit_s
    wall, cpu = time.perf_counter(), time.process_time()
    said = core.search_plan(*arguments)
    return Answer(
        said={k: v for k, v in said.items() if k not in ("states", "opened")},
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
    )


def _least(given: list[Any], threads: int, limit_s: float, repeats: int) -> Answer:
    """Return the fastest of some answers: what other processes take from one is noise."""
    answers = [asked(given, threads, limit_s) for _ in range(repeats)]
    return min(answers, key=lambda a: a.wall_s)


def main(arguments: list[str] | None = None) -> int:
    """Ask and print medians and the worst ratio; 1 when answers differ or a search was stopped."""
    parser = argparse.ArgumentParser(
        description="Random questions with one thread and with several."
    )
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one search")
    parser.add_argument("--first", type=int, default=0, help="seed of the first question")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    rows = []
    failures = 0
    for seed in range(given.first, given.first + given.questions):
        call = _captured(drawn(seed))
        if call is None:
            continue
        one = _least(call, 1, given.limit, given.repeats)
        many = _least(call, given.threads, given.limit, given.repeats)
        stopped = "time_limit" in (one.said["status"], many.said["status"])
        if stopped or one.said != many.said:
            failures += 1
            what = "not answered in time" if stopped else "answers differ"
            print(f"seed {seed}: {what}: {drawn(seed)}")
        rows.append((seed, one, many))
    ratios = sorted((many.wall_s / one.wall_s, seed) for seed, one, many in rows)
    # what takes a millisecond is mostly the call itself
    long = sorted((many.wall_s / one.wall_s, seed) for seed, one, many in rows if one.wall_s > 5e-3)
    print(f"{len(rows)} questions, {failures} failures")
    for name, answers in (("1 thread", [r[1] for r in rows]), ("more", [r[2] for r in rows])):
        wall, cpu = [a.wall_s for a in answers], [a.cpu_s for a in answers]
        print(
            f"{name}: wall median {statistics.median(wall) * 1e3:.2f} ms, most {max(wall):.3f} s; "
            f"CPU median {statistics.median(cpu) * 1e3:.2f} ms, sum {sum(cpu):.2f} s"
        )
    print(f"wall, more / one: median {statistics.median(r for r, _ in ratios):.2f}")
    if long:
        print(f"worst of those above 5 ms: {long[-1][0]:.2f} (seed {long[-1][1]})")
    if given.json is not None:
        record = {
            "one_wall_s": summary([one.wall_s for _, one, _ in rows]),
            "more_wall_s": summary([many.wall_s for _, _, many in rows]),
            "ratio": summary([ratio for ratio, _ in ratios]),
            "failures": failures,
        }
        append(given.json, "threads", record)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

"""Replays random pipelines of every schedule, and prints how far the formulas are above them.

`python -m benchmarks.schedules [--instances N] [--seed S] [--write]`

Pipelines have 2 to 16 stages, up to 8 chunks per stage, and one to four micro-batches per stage. In
three of ten pipelines, stages differ by a factor of two and more, separately in every kind of work.
In the others stages are within a tenth of each other, as in returned plans. A third has messages
that ranks wait for, of up to a twentieth of a chunk. No formula may be below the replay, and the
number in flight must equal the replay's. `--write` writes the table to its page.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from autopar.pipeline.formulas import in_flight, step_s
from autopar.pipeline.replay import replay
from autopar.pipeline.schedules import SCHEDULES, Schedule, schedule_problem
from benchmarks.ledger_docs import write_tables

__all__ = ["Compared", "Summary", "compare", "main", "summary_of", "table"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "concepts" / "cost-model.md"
_ROUNDING = 1e-12


class Compared(NamedTuple):
    """One pipeline: formula over replay, and True if the numbers in flight are equal."""

    ratio: float
    near: bool
    """True if stages are within a tenth of each other."""
    same_in_flight: bool


class Summary(NamedTuple):
    """All pipelines of a schedule; excesses are shares of the replay."""

    schedule: Schedule
    instances: int
    below: int
    median: float
    worst: float
    near_median: float
    near_worst: float
    same_in_flight: int


def _any_shape(schedule: Schedule, chance: random.Random) -> tuple[int, int, int]:
    """Return a legal number of stages, chunks and micro-batches."""
    facts = SCHEDULES[schedule]
    while True:
        stages = chance.randint(2, 16)
        chunks = facts.most_chunks or chance.randint(2, 8)
        number = chance.randint(1, 4 * stages)
        if not schedule_problem(schedule, stages=stages, chunks=chunks, micro_batches=number):
            return stages, chunks, number


def _seconds(stages: int, chance: random.Random, *, near: bool) -> list[list[float]]:
    """Return forwards and gradients of inputs and of weights of unequal stages."""
    if not near:
        return [[chance.lognormvariate(0.0, 0.7) for _ in range(stages)] for _ in range(3)]
    # attention has no weights, so gradients of inputs take longer than those of weights
    kinds = [1.0, chance.uniform(0.9, 1.6), chance.uniform(0.4, 1.1)]
    sizes = [1 + chance.uniform(-0.05, 0.05) for _ in range(stages)]
    # head and embedding have other shares of each kind than layers
    return [[kind * size * (1 + chance.uniform(-0.01, 0.01)) for size in sizes] for kind in kinds]


def compare(schedule: Schedule, instances: int, seed: int = 0) -> Iterator[Compared]:
    """Yield random pipelines of a schedule, the same for the same seed."""
    chance = random.Random(f"{schedule} {seed}")
    for _ in range(instances):
        stages, chunks, number = _any_shape(schedule, chance)
        near = chance.random() < 0.7
        seconds = _seconds(stages, chance, near=near)
        chunk_s = sum(map(sum, seconds)) / (stages * chunks)
        send_s = chance.choice([0.0, 0.0, chance.uniform(0.0, 0.05) * chunk_s])
        found = replay(schedule, *seconds, micro_batches=number, chunks=chunks, send_s=send_s)
        bound = step_s(schedule, *seconds, micro_batches=number, chunks=chunks, send_s=send_s)
        yield Compared(
            ratio=bound / found.step_s,
            near=near,
            same_in_flight=found.in_flight == in_flight(schedule, stages, chunks, number),
        )


def summary_of(schedule: Schedule, found: Sequence[Compared]) -> Summary:
    """Return the figures of a schedule's pipelines."""
    ratios = [one.ratio for one in found]
    near = [one.ratio for one in found if one.near]
    return Summary(
        schedule=schedule,
        instances=len(found),
        below=sum(ratio < 1 - _ROUNDING for ratio in ratios),
        median=median(ratios) - 1,
        worst=max(ratios) - 1,
        near_median=median(near) - 1,
        near_worst=max(near) - 1,
        same_in_flight=sum(one.same_in_flight for one in found),
    )


def table(summaries: Sequence[Summary]) -> str:
    """Return the figures as a table of a page, in percent above the replay."""
    heads = (
        "schedule",
        "pipelines",
        "below",
        "median, %",
        "worst, %",
        "of near stages: median, %",
        "worst, %",
        "in flight equal",
    )
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for each in summaries:
        percent = (each.median, each.worst, each.near_median, each.near_worst)
        cells = (
            SCHEDULES[each.schedule].title,
            str(each.instances),
            str(each.below),
            *(f"{max(0.0, 100 * value):.2f}" for value in percent),
            str(each.same_in_flight),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a formula is below a replay, or a number in flight differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--instances", type=int, default=1000, help="pipelines of each schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"write the table to {PAGE.name}")
    options = parser.parse_args(arguments)
    found = [
        summary_of(schedule, list(compare(schedule, options.instances, options.seed)))
        for schedule in SCHEDULES
    ]
    text = table(found)
    print(text, end="")
    if options.write:
        write_tables({"schedules": text}, PAGE)
    return int(any(one.below or one.same_in_flight < one.instances for one in found))


if __name__ == "__main__":
    sys.exit(main())

"""Commands on hostile files, and the class of each end.

    python -m benchmarks.hostile_runs --runs 15000

changes values in every kind of file (`tests.property.hostile_shapes`) and prints the counts by
class, and every run with a forbidden end. `--seed N` repeats one run and prints its output.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

from tests.property.hostile_runs import BAD, Done, runner
from tests.property.hostile_shapes import judged, make
from tests.property.test_hostile_input import report


def main() -> int:
    """Run the command line; return 1 if an end is forbidden."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="repeat this run and keep its folder")
    asked = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with runner(Path(tempfile.mkdtemp(prefix="hostile-"))) as runs:
        if asked.seed is not None:
            done = runs.run(asked.seed, keep=True, make=make)
            print(
                f"{done.run.name} {' '.join(done.run.arguments)}\n{done.run.what}\nin {done.folder}"
            )
            print(done.ended.out.decode("utf-8", "replace")[:4000])
            print(done.ended.err.decode("utf-8", "replace")[:4000])
            print(f"exit code {done.ended.code}, {done.ended.cpu_s:.1f} CPU s => {done.outcome}")
            return int(done.outcome in BAD)
        found: list[Done] = []
        last = time.monotonic()
        for seed in range(asked.first, asked.first + asked.runs):
            found.append(judged(runs, seed))
            if found[-1].outcome in BAD:
                one = found[-1]
                print(
                    f"{one.outcome} {seed}: {one.run.what!a:.150}: {one.detail!a:.300}", flush=True
                )
            if time.monotonic() - last > 60:
                last = time.monotonic()
                print(f"{len(found)} of {asked.runs} runs", file=sys.stderr, flush=True)
    print(report(found))
    return int(any(done.outcome in BAD for done in found))


if __name__ == "__main__":
    sys.exit(main())

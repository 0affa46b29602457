"""Random launch scripts: compare the words that the reader finds with those that bash starts.

`python -m benchmarks.bash_differential [--scripts 10000] [--seed 1]` draws scripts, runs them with
a stub for the launcher, and counts three outcomes: equal, refused (an error of the reader), and
silent (other words than those of bash). It prints each silent difference as the smallest script
that still has it, and exits with 1 if there is one.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.oracles.bash import Outcome, bash_version, manual_scripts, outcomes, shown
from tests.oracles.bash_scripts import Script, minimised, random_script

BATCH = 200
"""Scripts that one process runs in turn."""
MOST_SHOWN = 40


def drawn(scripts: int, seed: int) -> Iterator[tuple[Script, Outcome]]:
    """Yield random scripts with their outcomes."""
    for start in range(seed, seed + scripts, BATCH):
        batch = [random_script(n) for n in range(start, min(start + BATCH, seed + scripts))]
        yield from zip(batch, outcomes([script.text for script in batch]), strict=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the scripts, and print the counts and the silent differences."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scripts", type=int, default=10_000, help="random scripts [10000]")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first script [1]")
    parser.add_argument("--manual", action="store_true", help="scripts by construct instead")
    parser.add_argument("--constructs", action="store_true", help="count outcomes by construct")
    asked = parser.parse_args(arguments)
    if bash_version() < 4:
        print("needs bash 4 or later", file=sys.stderr)
        return 2
    begun = time.time(), time.process_time()
    kinds: Counter[str] = Counter()
    constructs: Counter[tuple[str, str]] = Counter()
    silent = list[Outcome]()
    if asked.manual:
        texts = manual_scripts()
        found = [
            (Script(text, frozenset({name})), outcome)
            for (name, text), outcome in zip(texts, outcomes([t for _, t in texts]), strict=True)
        ]
    else:
        found = drawn(asked.scripts, asked.seed)
    for script, outcome in found:
        kinds[outcome.kind] += 1
        constructs.update((name, outcome.kind) for name in script.constructs)
        if outcome.kind == "silent":
            silent.append(outcome)
    print(", ".join(f"{kind} {kinds[kind]:,}" for kind in ("equal", "refused", "silent")), end="")
    print(f"; {time.time() - begun[0]:.0f} s, {time.process_time() - begun[1]:.0f} s of it reading")
    if asked.constructs:
        for name in sorted({name for name, _ in constructs}):
            counts = [constructs[name, kind] for kind in ("equal", "refused", "silent")]
            print("  {:5} {:5} {:5}  ".format(*counts) + name.replace("\n", "\\n"))
    for outcome in dict.fromkeys(minimised(one) for one in silent[:MOST_SHOWN]):
        print(shown(outcome), flush=True)
    if len(silent) > MOST_SHOWN:
        print(f"{len(silent) - MOST_SHOWN:,} more silent differences are not shown")
    return 1 if silent else 0


if __name__ == "__main__":
    sys.exit(main())

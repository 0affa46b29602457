"""Fits the constants of training steps to published runs, and prints how far that moves them.

`python -m benchmarks.ledger_fit [--rounds N]` prints the shipped value of every constant, the
fitted one and its prior. `--left-out` holds out one source after the other and prices its rows;
`--docs` writes the results into docs/concepts/accuracy.md. No card and no stack is written: their
figures are changed by hand. It runs for minutes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.intervals import covered_table
from benchmarks.ledger import Priced, price_rows, read_runs
from benchmarks.ledger_constants import (
    CONSTANTS,
    FITTED,
    Entry,
    Sensitivity,
    fit,
    groups_of,
    load_entries,
    log_ratio,
    misfit,
    ranges_around,
)
from benchmarks.ledger_docs import constants_table, left_out_table, write_tables
from benchmarks.ledger_left_out import (
    classes_left_out,
    fits_without_each,
    leave_out_each,
    left_out_rows,
)

__all__ = ["fit_shipped", "main"]


def fit_shipped(entries: Sequence[Entry], rounds: int) -> list[float]:
    """Return the constants fitted to all sources, with the shipped values as priors."""
    centre = [constant.shipped for constant in CONSTANTS]
    priors = [(math.log(c.shipped), c.width) for c in CONSTANTS]
    groups = groups_of(entries)
    for number in range(rounds):
        # three deviations to both sides at first, then narrower ranges
        widths = [3.0 * constant.width / 3.0**number for constant in CONSTANTS]
        nodes = 5 if number == 0 else 3
        sensitivity = Sensitivity(entries, centre, ranges_around(centre, widths), nodes)
        logs = fit(sensitivity, groups, priors)
        centre = [float(value) for value in np.exp(logs)]
        exact = np.array([[log_ratio(entry.run, centre)] for entry in entries])
        summed = misfit(groups, sensitivity.log_ratios(logs)[:, None])[0]
        start = misfit(groups, sensitivity.base[:, None])[0]
        print(
            f"round {number + 1}: misfit {start:.3f} -> {misfit(groups, exact)[0]:.3f} "
            f"(as sums {summed:.3f})",
            flush=True,
        )
    return centre


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit the constants, or hold out sources, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="grids around the last answer")
    parser.add_argument(
        "--left-out", action="store_true", help="fit without each source, and price its rows"
    )
    parser.add_argument(
        "--docs", action="store_true", help="write the table into docs/concepts/accuracy.md"
    )
    asked = parser.parse_args(arguments)
    start = time.process_time()
    if asked.left_out:
        print(f"{'left out':52s} rows    bias  median    MAPE     p90  covered  | with it: MAPE")
        cases, fits = [], fits_without_each()
        priced = [e for e in price_rows(*read_runs()) if isinstance(e, Priced)]
        everything = left_out_rows(((e.line, e) for e in priced), fits)
        for case in leave_out_each(fits, everything):
            cases.append(case)
            f = case.found
            print(
                f"{case.name:52s} {f['rows']:4.0f} {f['bias']:+7.1%} {f['median']:7.1%} "
                f"{f['mape']:7.1%} {f['p90']:7.1%} {f['coverage']:8.0%}  | {case.mape_with:14.1%}",
                flush=True,
            )
        classes = covered_table(classes_left_out(everything), "sources")
        print("\n" + classes)
        table = {"left-out": left_out_table(cases), "left-out classes": classes}
    else:
        entries = [entry for entry in load_entries() if entry.group in FITTED]
        fitted = fit_shipped(entries, asked.rounds)
        print(f"\n{'constant':40s} {'shipped':>9s} {'fitted':>9s}   prior: deviation of ln")
        for constant, value in zip(CONSTANTS, fitted, strict=True):
            moved = math.log(value / constant.shipped) / constant.width
            print(
                f"{constant.name:40s} {constant.shipped:9.4g} {value:9.4g}   "
                f"{constant.width:.2f} ({moved:+.1f} deviations)\n"
                f"    without runs {constant.neutral:g}, deviation {constant.doubt:g}: "
                f"{constant.basis}"
            )
        table = {"constants": constants_table(CONSTANTS, fitted)}
    if asked.docs:
        write_tables(table)
    print(f"\n{time.process_time() - start:.0f} CPU seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Print signed errors of closed-form models against published training runs, in time and memory.

`python -m benchmarks.accuracy [--cases DIR] [--rows] [--csv PATH]`. Every table covers one source.
The closed forms were not fitted to these rows; constants of the planner's estimates were
(docs/concepts/accuracy.md). `accuracy_rows.py` lists the values that replace missing settings, and
unusable rows are counted by reason.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autopar.output import write_text
from benchmarks.accuracy_models import MODELS, Answer
from benchmarks.accuracy_rows import FILES, Run, UnusableError, read_rows, run_of
from benchmarks.metadata import ROOT
from tests.data.read import csv_path

__all__ = ["Compared", "compare", "coverage", "main", "spread"]

DATA = ROOT / "tests" / "data"
_COLUMNS = (
    *("source", "quality", "run", "seq", "taken", "model", "reason"),
    *("measured_time_s", "time_s", "time_s_error", "time_s_low", "time_s_high"),
    *("measured_memory_bytes", "memory_bytes", "memory_bytes_error"),
)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row and the answer of every model, or the reason why a model has none."""

    source: str
    quality: str
    label: str
    run: Run | None
    answers: dict[str, Answer | str]

    def error(self, model: str, what: str) -> float | None:
        """Return the signed error of 'time_s' or 'memory_bytes' as a share, None without one."""
        answer = self.answers[model]
        if self.run is None or isinstance(answer, str):
            return None
        measured = getattr(self.run, what)
        return None if measured is None else getattr(answer, what) / measured - 1.0

    def covered(self, model: str) -> bool | None:
        """Return True if the measured time lies in a model's interval, None without an interval."""
        answer = self.answers[model]
        if self.run is None or isinstance(answer, str):
            return None
        measured, interval = self.run.time_s, answer.interval_s
        if measured is None or interval is None:
            return None
        return interval[0] <= measured <= interval[1]


def compare(rows: Iterable[dict[str, str]]) -> list[Compared]:
    """Return every row with the answers of all models, in order."""
    found = []
    for row in rows:
        run: Run | None = None
        answers: dict[str, Answer | str] = {}
        try:
            run = run_of(row)
        except UnusableError as error:
            answers = dict.fromkeys(MODELS, str(error))
        else:
            for name, model in MODELS.items():
                try:
                    answers[name] = model(run)
                except UnusableError as error:
                    answers[name] = str(error)
        degrees = f"{row['tp'] or '?'}.{row['pp'] or '?'}.{row['dp'] or '?'}"
        found.append(
            Compared(
                source=row["source"],
                quality=row["quality"],
                label=f"{row['model']} {row['num_gpus']}x{row['gpu_type'].split(' ')[0]} {degrees}"
                f" {row['micro_batch'] or '?'}/{row['global_batch'] or '?'} {row['recompute']}",
                run=run,
                answers=answers,
            )
        )
    return found


def spread(errors: Sequence[float]) -> str:
    """Return bias, median, 90th percentile and worst of errors, in percent."""
    size = np.abs(errors)
    worst = max(errors, key=abs)
    # the 90th percentile is an error that occurred
    return (
        f"{100 * np.median(errors):+.1f} | {100 * np.median(size):.1f} "
        f"| {100 * np.quantile(size, 0.9, method='higher'):.1f} | {100 * worst:+.1f}"
    )


def coverage(rows: Iterable[Compared], model: str) -> str:
    """Return the share of a model's steps inside its interval, in percent; empty without any."""
    inside = [found for row in rows if (found := row.covered(model)) is not None]
    return f"{100 * sum(inside) / len(inside):.0f} %" if inside else ""


def summary(compared: Sequence[Compared]) -> list[str]:
    """Return lines of a table: one per source, quality label, figure and model that has any."""
    heads = ("source", "quality", "figure", "model", "rows")
    errors = ("bias %", "median %", "p90 %", "worst %", "in its 90 % interval")
    lines = [f"| {' | '.join((*heads, *errors))} |", "|---" * len((*heads, *errors)) + "|"]
    groups = dict.fromkeys((row.source, row.quality) for row in compared)
    for source, quality in groups:
        rows = [row for row in compared if (row.source, row.quality) == (source, quality)]
        for what, text in (("time_s", "time"), ("memory_bytes", "memory")):
            for model in MODELS:
                errors = [e for row in rows if (e := row.error(model, what)) is not None]
                if errors:
                    lines.append(
                        f"| {source} | {quality} | {text} | {model} "
                        f"| {len(errors)} of {len(rows)} | {spread(errors)} "
                        f"| {coverage(rows, model) if what == 'time_s' else ''} |"
                    )
    return lines


def reasons(compared: Sequence[Compared]) -> list[str]:
    """Return lines with the number of missing answers by reason."""
    lines = [
        "| rows | of them without any model | why |",
        "|---|---|---|",
    ]
    whole = Counter(str(row.answers["calculon"]) for row in compared if row.run is None)
    lines += [f"| {count} | {count} | {reason} |" for reason, count in whole.most_common()]
    for model in MODELS:
        parts = Counter(
            answer
            for row in compared
            if row.run is not None and isinstance(answer := row.answers[model], str)
        )
        lines += [f"| {count} | - | {model}: {why} |" for why, count in parts.most_common()]
    return lines


def table(compared: Sequence[Compared], source: str) -> list[str]:
    """Return the rows of one source with the errors of all models in percent."""
    lines = [
        f"### {source}",
        "",
        "| run: GPUs, tp.pp.dp, micro/global batch | figure | measured | "
        + " | ".join(f"{model} %" for model in MODELS)
        + " |",
        "|---|---|---|" + "---|" * len(MODELS),
    ]
    for row in compared:
        if row.source != source or row.run is None:
            continue
        for what, text, unit in (("time_s", "s", 1.0), ("memory_bytes", "GiB", 2.0**30)):
            errors = [row.error(model, what) for model in MODELS]
            if any(error is not None for error in errors):
                cells = " | ".join("" if e is None else f"{100 * e:+.1f}" for e in errors)
                measured = getattr(row.run, what) / unit
                lines.append(f"| {row.label} | {text} | {measured:.4g} | {cells} |")
    return lines


def as_csv(compared: Sequence[Compared]) -> str:
    """Return one line per row and model, base units; errors as shares."""
    text = io.StringIO()
    out = csv.DictWriter(text, _COLUMNS, restval="", lineterminator="\n")
    out.writeheader()
    for row in compared:
        for model, answer in row.answers.items():
            line: dict[str, object] = {"source": row.source, "quality": row.quality}
            line |= {"run": row.label, "model": model}
            if row.run is None or isinstance(answer, str):
                out.writerow(line | {"reason": answer})
                continue
            line |= {"seq": row.run.seq, "taken": " ".join(row.run.taken)}
            for what in ("time_s", "memory_bytes"):
                line[f"measured_{what}"] = getattr(row.run, what)
                line[what] = getattr(answer, what)
                line[f"{what}_error"] = row.error(model, what)
            if answer.interval_s is not None:
                line["time_s_low"], line["time_s_high"] = answer.interval_s
            out.writerow(line)
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; returns 0, also where the rows are absent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases", type=Path, default=DATA, help="folder of published_runs*.csv[.gz]"
    )
    parser.add_argument("--rows", action="store_true", help="print every row, a table per source")
    parser.add_argument("--csv", type=Path, help="write every row and model to this file")
    args = parser.parse_args(arguments)
    if missing := [name for name in FILES if not csv_path(args.cases, name).is_file()]:
        names = " and no ".join(f"{name}.csv" for name in missing)
        print(f"skipped: {args.cases} has no {names}", file=sys.stderr)
        return 0
    compared = compare(read_rows(args.cases))
    for row in compared:  # a NaN would be hidden in a median
        for answer in row.answers.values():
            if isinstance(answer, Answer):
                assert math.isfinite(answer.time_s), row.label
                assert answer.memory_bytes > 0, row.label
    usable = [row for row in compared if row.run is not None]
    if args.rows:
        for source in dict.fromkeys(row.source for row in usable):
            print("\n".join([*table(usable, source), ""]))
    print("\n".join([*summary(usable), "", *reasons(compared)]))
    print(f"\n{len(usable)} of {len(compared)} rows can be priced")
    if args.csv is not None:
        write_text(args.csv, as_csv(compared))
    return 0


if __name__ == "__main__":
    sys.exit(main())

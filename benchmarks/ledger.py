"""Prices every published training run from cards, stacks and sites, and prints the errors.

Each row is priced with its own settings. By source: rows, bias (median signed error), median and
mean absolute error, 90th percentile, coverage of the 90 % interval. Then follow the rows that were
not priced, with reasons, and the order of plans of one model on one cluster. The composed rows of
`published_runs_single_node` are not measurements and are not included.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from scipy.stats import spearmanr

from autopar.documents.json import write_json
from autopar.errors import InputError
from autopar.price.step import StepTime, step_time
from autopar.rates.accuracy import Accuracy, load_accuracy
from autopar.run.architecture import Experts
from benchmarks.ledger_docs import (
    intervals_table,
    order_table,
    reasons_table,
    sources_table,
    write_tables,
)
from benchmarks.ledger_rows import Run, UnusableError, run_of
from tests.data.read import read_csv, read_settings

__all__ = [
    "ClassKey",
    "Compared",
    "Priced",
    "Refused",
    "architectures_of",
    "class_key",
    "interval_s",
    "main",
    "price_rows",
    "read_runs",
    "statistics_of",
]

DATA = Path(__file__).resolve().parent.parent / "tests" / "data"
SEEN = ("published_runs", "published_runs_more")
"""Tables that the constants before this release were fitted to."""
TABLES = (*SEEN, "published_runs_later")
ACCURACY = (
    Path(__file__).resolve().parent.parent / "hardware_configs" / "accuracy" / "published.json"
)


ClassKey = tuple[str, bool, bool, bool]
"""Stack, experts or none, adapters or none, site known or not."""


class Compared(Protocol):
    """A measured run and its estimate."""

    @property
    def group(self) -> str:
        """Source of the row."""

    @property
    def run(self) -> Run:
        """Job and machine of the row."""

    @property
    def total_s(self) -> float:
        """Estimated seconds of a step."""

    @property
    def error(self) -> float:
        """Estimated over measured time, less one."""


class Priced(NamedTuple):
    """A row with its estimate."""

    line: int
    group: str
    row: Mapping[str, str]
    run: Run
    step: StepTime

    @property
    def source(self) -> str:
        """Source as named in the row."""
        return self.row["source"]

    @property
    def total_s(self) -> float:
        """Estimated seconds of a step."""
        return self.step.total_s

    @property
    def error(self) -> float:
        """Estimated over measured time, less one."""
        return self.step.total_s / self.run.measured_s - 1.0


class Refused(NamedTuple):
    """A row without an estimate."""

    line: int
    group: str
    source: str
    reason: str


def group_of(row: Mapping[str, str]) -> str:
    """Return the source of a row; sources of one engine and kind of machine are merged."""
    name = row["source"]
    mixture = row["arch"].startswith("moe")
    if name.startswith(("NVIDIA Megatron-Bridge skills", "NVIDIA Megatron-Bridge verification")):
        return "Moonlight" if "Moonlight" in row["model"] else "Megatron-Bridge cards"
    if name.startswith("NVIDIA NeMo performance: "):
        tuned = " SFT" in name or " LoRA" in name
        kind = "MLPerf 5.1" if "MLPerf" in name else "NeMo benchmarks"
        if row["gpu_type"] == "MI350X":
            # of another maker: these runs fit no constant of NVIDIA's kernels
            return f"{kind} MI350X"
        return f"{kind} fine-tuning" if tuned else f"{kind} {'mixtures' if mixture else 'dense'}"
    if name.startswith("torchtitan") and "Table" not in name and "docs" not in name:
        later = {"like": "fms-fsdp", "B200": "torchtitan B200", "nvfp4": "torchtitan GB200",
                 "nocompile": "torchao eager", "torchao": "torchao"}  # fmt: skip
        for part, group in later.items():
            if part in name:
                return group
    if name.startswith("NVIDIA Megatron-Bridge"):
        if "Container, " in name:
            return "Megatron-Bridge fine-tuning"
        return "Megatron-Bridge " + ("mixtures" if mixture else "dense")
    if name.startswith("MosaicML"):
        kind = "fp8" if "fp8" in row["precision"] else row["gpu_type"].partition("-")[0]
        return f"MPT {kind}"
    if name.startswith("SimuMax"):
        long = row["cp"] not in ("", "1")
        return "SimuMax " + ("mixtures" if mixture else "context" if long else "dense")
    known = (
        ("BigScience", "BLOOM"),
        ("torchtitan", "torchtitan"),
        ("Korthikanti", "Korthikanti"),
        ("Narayanan", "Narayanan"),
        ("NVIDIA NeMo long", "NeMo long context"),
        ("NVIDIA NeMo AutoModel", "NeMo AutoModel"),
        ("NVIDIA NeMo", "NeMo"),
        ("Megatron-LM examples", "NeMo"),
        ("Megatron-Core r0.8", "Megatron-Core r0.8"),
        ("Megatron-MoE-ModelZoo", "Megatron-MoE-ModelZoo"),
        ("Llama 3 405B", "Llama 3 405B"),
        ("vTrain", "vTrain"),
        ("UCCL", "UCCL"),
        ("cuDNN", "transformers on one GPU"),
        ("Colossal", "Colossal-AI"),
    )
    return next((group for start, group in known if name.startswith(start)), name)


_DOUBTFUL: tuple[tuple[str, str, str, str], ...] = (
    ("26.06.01", "GPT OSS", "GB200", "1.6 times the time of the releases before and after it"),
    ("UCCL", "", "", "0.6 s of every step are not explained"),
    ("Megatron-Bridge skills", "Moonlight", "", "0.23 s of every step are not explained"),
    (
        "NeMo AutoModel",
        "DeepSeek",
        "",
        "its configuration recomputes all layers, its time none",
    ),
    (
        "Megatron-MoE-ModelZoo",
        "Qwen3-Next",
        "",
        "its authors call it not well tuned, and whether MTP is trained is unknown",
    ),
)
"""Parts of source, model and GPU of rows that are scored apart, with the reason."""


def doubt_of(row: Mapping[str, str]) -> str | None:
    """Return why a row is scored apart and neither fitted nor part of an interval, or None."""
    if "doubtful" in row["quality"]:
        return row["quality"].partition("doubtful: ")[2]
    for source, model, gpu, reason in _DOUBTFUL:
        if source in row["source"] and model in row["model"] and gpu in row["gpu_type"]:
            return reason
    return None


def price_rows(
    rows: Iterable[tuple[int, Mapping[str, str]]], settings: Mapping[int, Mapping[str, Any]]
) -> Iterator[Priced | Refused]:
    """Yield every row with its estimate, or with the reason why it has none."""
    for line, row in rows:
        group = group_of(row)
        if doubt_of(row) is not None:
            group += ", doubtful"
        try:
            run = run_of(row, settings.get(line, {}))
            step = step_time(run.machine, run.job)
        except (UnusableError, InputError) as error:
            yield Refused(line, group, row.get("source") or "", str(error))
            continue
        yield Priced(line, group, row, run, step)


def class_key(priced: Compared) -> ClassKey:
    """Return the class of a run: stack, experts, adapters, site known."""
    run = priced.run
    experts = any(isinstance(block.mlp, Experts) for block in run.job.blocks)
    return run.machine.stack.name, experts, run.job.adapters is not None, run.site_known


def architectures_of(priced: Iterable[Compared]) -> list[str]:
    """Return the architectures of the devices of rows from at least two sources."""
    sources: dict[str, set[str]] = defaultdict(set)
    for entry in priced:
        # groups are parts of a source, which the first word names
        sources[entry.run.machine.card.architecture or ""].add(entry.group.split()[0])
    return sorted(name for name, found in sources.items() if name and len(found) > 1)


# --------------------------------------------------------------------------------------------------
# Statistics


def statistics_of(priced: Sequence[Compared], accuracy: Accuracy) -> dict[str, dict[str, float]]:
    """Return rows, bias, median, MAPE, 90th percentile and coverage of every source, in shares."""
    by_group: dict[str, list[Compared]] = defaultdict(list)
    for entry in priced:
        by_group[entry.group].append(entry)
    found = {}
    for group, entries in sorted(by_group.items()):
        errors = np.array([entry.error for entry in entries])
        inside = [_covered(entry, accuracy) for entry in entries]
        found[group] = {
            "rows": len(entries),
            "bias": float(np.median(errors)),
            "median": float(np.median(np.abs(errors))),
            "mape": float(np.mean(np.abs(errors))),
            "p90": float(np.quantile(np.abs(errors), 0.9)),
            "coverage": float(np.mean(inside)),
        }
    return found


def interval_s(entry: Compared, accuracy: Accuracy) -> tuple[float, float]:
    """Return the ends of the 90 % interval of the measured step time of a run, in seconds."""
    stack, experts, adapters, known = class_key(entry)
    found = accuracy.of(stack, experts=experts, adapters=adapters, site_known=known)
    return found.interval_s(entry.total_s)


def _covered(entry: Compared, accuracy: Accuracy) -> bool:
    low, high = interval_s(entry, accuracy)
    return low <= entry.run.measured_s <= high


def rankings_of(priced: Sequence[Priced]) -> Iterator[tuple[str, int, float, float]]:
    """Yield (group, plans, Spearman's rank correlation, regret) where one model ran several plans.

    Regret is how much longer the plan estimated to be fastest took than the fastest. Repetitions
    of a plan count once, with their mean.
    """
    groups: dict[str, dict[Any, list[Priced]]] = defaultdict(lambda: defaultdict(list))
    for entry in priced:
        key = _group_of_plans(entry)
        if key is not None:
            groups[key][entry.run.job].append(entry)
    for key, plans in sorted(groups.items()):
        if len(plans) < 2:
            continue
        estimated = [entries[0].step.total_s for entries in plans.values()]
        # per sequence: plans of one model may have other batches
        sizes = [job.global_batch for job in plans]
        measured = [np.mean([e.run.measured_s for e in entries]) for entries in plans.values()]
        estimated = [t / s for t, s in zip(estimated, sizes, strict=True)]
        measured = [float(t / s) for t, s in zip(measured, sizes, strict=True)]
        order = float(spearmanr(estimated, measured).statistic)
        regret = measured[int(np.argmin(estimated))] / min(measured) - 1.0
        yield key, len(plans), order, regret


def _group_of_plans(entry: Priced) -> str | None:
    job, row = entry.run.job, entry.row
    if entry.group == "BLOOM":
        shape = f"{row['layers']} x {row['hidden']}, {row['heads']} heads"
        return f"BLOOM {shape}, {job.gpus} GPUs, {row['precision']}"
    if row["source"].startswith("Narayanan et al. 2021 arXiv 2104.04473 Table 2"):
        return "Narayanan table 2"
    if entry.group == "Megatron-MoE-ModelZoo" and "real routing" not in row["notes"]:
        return f"ModelZoo {job.name}, {row['gpu_type']}, {job.seq} tokens"
    return None


# --------------------------------------------------------------------------------------------------
# Output


def _print(entries: Sequence[Priced | Refused], accuracy: Accuracy) -> None:
    priced = [entry for entry in entries if isinstance(entry, Priced)]
    print(f"{'source':30s} rows    bias  median    MAPE     p90  covered")
    for group, found in statistics_of(priced, accuracy).items():
        print(
            f"{group:30s} {found['rows']:4.0f} "
            f"{found['bias']:+7.1%} {found['median']:7.1%} {found['mape']:7.1%} "
            f"{found['p90']:7.1%} {found['coverage']:7.0%}"
        )
    reasons = Counter((e.group, e.reason) for e in entries if isinstance(e, Refused))
    print(f"\n{len(priced)} rows priced, {len(entries) - len(priced)} not:")
    for (group, reason), number in sorted(reasons.items()):
        print(f"  {number:3d} of {group}: {reason}")
    ranked = list(rankings_of(priced))
    if ranked:
        print("\norder of plans of one model                         plans  Spearman  regret")
        for key, number, order, regret in ranked:
            print(f"  {key:48s} {number:5d} {order:9.2f} {regret:7.1%}")


def _print_rows(entries: Sequence[Priced | Refused], wanted: str) -> None:
    for entry in entries:
        if wanted.lower() not in entry.group.lower():
            continue
        if isinstance(entry, Refused):
            print(f"{entry.line:4d} {entry.group:24s} not priced: {entry.reason}")
            continue
        job, terms = entry.run.job, entry.step.terms_s
        total = entry.step.total_s
        listed = sorted(terms.items(), key=lambda term: -term[1])
        shares = " ".join(f"{k} {v / total:.0%}" for k, v in listed if v > 0.01 * total)
        print(
            f"{entry.line:4d} {job.name[:20]:20s} {entry.run.machine.card.name:10s} {job.gpus:5d} "
            f"tp{job.tp} cp{job.cp} pp{job.pp}x{job.vpp} dp{job.dp} ep{job.ep} "
            f"{job.micro_batches}x{job.micro_batch} {job.precision} "
            f"{entry.run.measured_s:.3f} s, estimated {total:.3f} ({entry.error:+.1%}): {shares}"
        )


def _tables(entries: Sequence[Priced | Refused], accuracy: Accuracy) -> dict[str, str]:
    priced = [entry for entry in entries if isinstance(entry, Priced)]
    refused = Counter((e.group, e.reason) for e in entries if isinstance(e, Refused))
    return {
        "sources": sources_table(statistics_of(priced, accuracy)),
        "reasons": reasons_table(refused),
        "order": order_table(rankings_of(priced)),
        "intervals": intervals_table(accuracy),
    }


def _document(entries: Sequence[Priced | Refused], accuracy: Accuracy) -> dict[str, Any]:
    rows = []
    for entry in entries:
        found: dict[str, Any] = {
            "row": entry.line,
            "source": entry.source,
            "group": entry.group,
            "predicted_s": None,
            "interval_s": None,
            "measured_s": None,
            "reason": None,
        }
        if isinstance(entry, Refused):
            found["reason"] = entry.reason
        else:
            found["predicted_s"] = entry.step.total_s
            found["interval_s"] = list(interval_s(entry, accuracy))
            found["measured_s"] = entry.run.measured_s
            found["taken"] = list(entry.run.taken)
        rows.append(found)
    return {"rows": rows}


def read_runs(
    runs: Path | None = None, settings: Path | None = None
) -> tuple[list[tuple[int, Mapping[str, str]]], dict[int, Any]]:
    """Return the rows of a table by line number, and recipes' settings; default: the shipped."""
    if runs is not None:
        empty = dict.fromkeys(next(iter(read_csv(DATA, TABLES[0]))), "")
        # line 1 names the columns
        text = runs.read_text(encoding="utf-8")
        reader = csv.DictReader(io.StringIO(text, newline=""), restkey="more", restval="")
        # columns that a table does not have are empty in all of its rows
        rows: list[Any] = [(line, {**empty, **cells}) for line, cells in enumerate(reader, start=2)]
        return rows, {} if settings is None else read_settings(settings)
    shipped: list[Any] = []
    said: dict[int, Any] = {} if settings is None else read_settings(settings)
    for name in TABLES:
        # lines of a table go on where the one before it ends
        before = len(shipped)
        shipped += enumerate(read_csv(DATA, name), start=2 + before)
        path = DATA / f"{name}_settings.jsonl.gz"
        if settings is None and path.exists():
            said |= {before + line: found for line, found in read_settings(path).items()}
    return shipped, said


def main(arguments: Sequence[str] | None = None) -> int:
    """Price the rows and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, help="table of runs; default: those that are shipped")
    parser.add_argument("--settings", type=Path, help="recipes' settings by line number")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every row's estimate")
    parser.add_argument("--rows", metavar="TEXT", help="print the rows of the sources with TEXT")
    parser.add_argument(
        "--write", action="store_true", help="write the shipped errors that intervals are made of"
    )
    parser.add_argument(
        "--docs",
        action="store_true",
        help="write the tables of docs/concepts/accuracy.md",
    )
    asked = parser.parse_args(arguments)
    if asked.docs and asked.runs is not None:
        parser.error("--docs is of the shipped runs, and --runs names others")
    entries = list(price_rows(*read_runs(asked.runs, asked.settings)))
    if asked.write:
        from benchmarks.ledger_left_out import classes_of, fits_without_each, left_out_rows

        ACCURACY.parent.mkdir(exist_ok=True)
        priced = ((e.line, e) for e in entries if isinstance(e, Priced))
        found = left_out_rows(priced, fits_without_each())
        document = {
            "format": "autopar-accuracy",
            "version": 1,
            "source": "python -m benchmarks.ledger --write: published runs of tests/data",
            "classes": classes_of(found),
            "architectures": architectures_of(found),
        }
        write_json(ACCURACY, document)
    accuracy = load_accuracy()
    if asked.docs:
        write_tables(_tables(entries, accuracy))
    if asked.rows is not None:
        _print_rows(entries, asked.rows)
    else:
        _print(entries, accuracy)
    if asked.json is not None:
        write_json(asked.json, _document(entries, accuracy))
    return 0


if __name__ == "__main__":
    sys.exit(main())

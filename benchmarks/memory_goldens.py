"""Prices the memory of measured Megatron-LM launches to the byte, and prints the errors.

`python -m benchmarks.memory_goldens [--goldens FILE.csv.gz] [--json OUT] [--left-out]`

Each row is read from its own arguments, environment, device and release. By class of launches it
prints rows, configurations, and the shares of rows whose steady-state memory, and peak, is within
0.5, 2 and 5 % of the measurement; then the rows that were not read, with reasons. If the number of
GPUs was not published, it is the power of two with the nearest memory after a step; such rows are
in the class "world size inferred".
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autopar.documents.json import write_json
from autopar.errors import InputError
from autopar.price.account import Account, account_of
from autopar.price.oom_risk import PEAK_RATIOS, kind_of
from autopar.run.run import Run
from benchmarks import memory_odds as odds
from benchmarks.intervals import LEAST, covered_table
from benchmarks.ledger_docs import write_tables
from benchmarks.memory_odds import COVERAGE, Ratio
from benchmarks.published_peaks import first_counts, published_peaks
from benchmarks.torchtitan_peaks import torch_layers_left_out
from search.engines.megatron.read import ReadRun, read_run
from search.engines.megatron.release import Release
from tests.data.read import csv_path, read_csv

__all__ = [
    "Priced",
    "Refused",
    "class_table",
    "classes_of",
    "classes_table",
    "errors_by_class",
    "first_met",
    "intervals_of",
    "left_out_table",
    "main",
    "price_row",
    "ratios_of",
    "read_goldens",
    "unseen_table",
]

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data"
TABLE = "memory_goldens"
PAGE = ROOT / "docs" / "concepts" / "memory.md"
WITHIN = (0.005, 0.02, 0.05)
_WITHIN_2 = 1
"""Index of the limit that the page shows."""
_UNITS = "configurations"
"""Name of the held-out units in tables."""
_MOST_GPUS = 4096


class Priced(NamedTuple):
    """A row with its account."""

    id: str
    config: str
    row: Mapping[str, str]
    read: ReadRun
    account: Account
    inferred_world: bool
    measured_states_bytes: int
    measured_peak_bytes: int

    @property
    def states_error(self) -> float:
        """Predicted over measured memory after a step, less one."""
        return self.account.states_bytes / self.measured_states_bytes - 1.0

    @property
    def peak_error(self) -> float:
        """Predicted over measured peak, less one."""
        return self.account.peak_bytes / self.measured_peak_bytes - 1.0


class Refused(NamedTuple):
    """A row without an account."""

    id: str
    row: Mapping[str, str]
    reason: str


def read_goldens(path: Path | None = None) -> list[dict[str, str]]:
    """Return the rows of a table; default: the shipped one."""
    if path is None:
        path = csv_path(DATA, TABLE)
        return list(read_csv(DATA, TABLE))
    content = path.read_bytes()
    text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8")
    return list(csv.DictReader(io.StringIO(text, newline="")))


def price_row(row: Mapping[str, str]) -> Priced | Refused:
    """Return a row with its account, or with the reason why it has none."""
    name = row.get("id") or ""
    try:
        arguments = json.loads(row.get("args") or "{}")
        variables = json.loads(row.get("env_vars") or "{}")
        states, peak = int(row["mem_alloc_last"]), int(row["mem_max_last"])
    except (KeyError, ValueError):
        return Refused(name, row, "arguments or measured bytes are missing")
    if not arguments:
        return Refused(name, row, "arguments or measured bytes are missing")
    world = row.get("world_size") or ""

    def priced(gpus: int) -> tuple[ReadRun, Account]:
        read = read_run(
            arguments,
            world_size=gpus,
            environment=variables,
            # goldens without a device are of A100
            gpu=row.get("platform") or "A100",
            release=Release(
                date=row.get("golden_date") or "9999",
                container="lts" if row.get("env") == "lts" else "dev",
            ),
            source=name.rsplit("/", 2)[-2] if "/" in name else name,
        )
        return read, account_of(read.run)

    try:
        if world.isdigit():
            read, account = priced(int(world))
        else:
            read, account = _inferred(priced, states)
    except InputError as error:
        return Refused(name, row, str(error))
    return Priced(
        id=name,
        config=row.get("config_key") or row.get("args", ""),
        row=row,
        read=read,
        account=account,
        inferred_world=not world.isdigit(),
        measured_states_bytes=states,
        measured_peak_bytes=peak,
    )


def _inferred(priced: Any, states_bytes: int) -> tuple[ReadRun, Account]:
    """Return the account with the number of GPUs that fits the measured states best."""
    found, problem = [], InputError("no number of GPUs is legal")
    gpus = 1
    while gpus <= _MOST_GPUS:
        try:
            found.append(priced(gpus))
        except InputError as error:
            problem = error
        gpus *= 2
    if not found:
        raise problem
    best: tuple[ReadRun, Account] = min(
        found, key=lambda pair: abs(pair[1].states_bytes - states_bytes)
    )
    return best


# --------------------------------------------------------------------------------------------------
# Classes and their errors.


def _architecture(run: Run) -> str:
    model = run.model
    if model.is_hybrid:
        return "hybrid"
    if model.experts is not None:
        return "mla+moe" if model.attention.latent is not None else "moe"
    if model.attention.latent is not None:
        return "mla dense"
    return "llama-like dense" if model.last.gates == 2 else "gpt dense"


def classes_of(entry: Priced) -> Iterator[str]:
    """Yield the classes of a row: all, its architecture, and the features its launch turns on."""
    run = entry.read.run
    split, strategy, runtime = run.split, run.strategy, run.runtime
    if run.kernels.graphs != "none":
        yield "CUDA graphs"  # their memory is not counted
        return
    yield "all"
    yield _architecture(run)
    experts = run.model.experts is not None
    flags = {
        "TP": split.tp > 1,
        "PP": strategy.pp > 1,
        "VPP": strategy.vpp > 1,
        "CP": split.cp > 1,
        "EP": split.ep > 1,
        "ETP": experts and split.etp > 1,
        "SP": split.splits_sequence,
        "MTP": run.model.mtp > 0,
        "fp16": runtime.precision.kind == "fp16",
        "fp8": runtime.precision.fp8,
        "FSDP": split.zero == 3,
        "distributed optimizer": split.zero == 1,
        "several instances": split.replicas > 1,
        "muon": runtime.optimizer.kind == "muon",
        "activation offload": run.offloads_activations,
        "recomputation": strategy.recomputed.kind != "none",
        "cross-entropy fusion": run.kernels.loss != "none",
        "local layers": run.kernels.own_layers,
        "expandable segments": runtime.allocator.expandable,
        "second run": entry.row.get("second_run") == "1",
        "world size inferred": entry.inferred_world,
    }
    yield from (name for name, given in flags.items() if given)


def errors_by_class(entries: Iterable[Priced]) -> dict[str, dict[str, Any]]:
    """Return rows, configurations, shares within limits, and median error of states and peak."""
    by_class: dict[str, list[Priced]] = defaultdict(list)
    for entry in entries:
        for name in classes_of(entry):
            by_class[name].append(entry)
    found: dict[str, dict[str, Any]] = {}
    for name, members in by_class.items():
        found[name] = {"rows": len(members), "configurations": len({e.config for e in members})}
        for what in ("states", "peak"):
            errors = np.abs([getattr(entry, f"{what}_error") for entry in members])
            found[name][what] = {
                "within": [float(np.mean(errors <= limit)) for limit in WITHIN],
                "median": float(np.median(errors)),
            }
    return found


# --------------------------------------------------------------------------------------------------
# Intervals of the peak.


def ratios_of(entries: Iterable[Priced]) -> list[Ratio]:
    """Return the ratios of measured over counted peaks of rows, with kinds and classes.

    Activation offload has one measured configuration, so its errors are a separate kind.
    """
    return [
        Ratio(
            kind=kind_of(entry.read.run),
            config=entry.config,
            classes=frozenset(classes_of(entry)) - {"all"},
            ratio=entry.measured_peak_bytes / entry.account.peak_bytes,
        )
        for entry in entries
        if not entry.read.run.offloads_activations and entry.read.run.kernels.graphs == "none"
    ]


def first_met() -> list[Ratio]:
    """Return published peaks over the counts made before their causes of error were known.

    They represent a kind of launch that no measured run covers.
    """
    return [
        Ratio(
            kind="few runs",
            config=f"{row.source}, {row.name}",
            classes=frozenset({"published when first met"}),
            ratio=row.published_bytes / row.first_bytes,
        )
        for row in published_peaks()
        if row.first_bytes is not None
    ]


def intervals_of(entries: Iterable[Priced]) -> dict[str, tuple[float, float]]:
    """Return the 90 % interval of measured over predicted peaks, by kind.

    Kinds with few runs also use the published peaks at their first count. Intervals contain the
    shipped ones, which are for runs that nobody had counted.
    """
    return odds.intervals_of([*ratios_of(entries), *first_met()], PEAK_RATIOS)


# --------------------------------------------------------------------------------------------------
# Output.


def _shares(found: Mapping[str, Any]) -> str:
    return "/".join(f"{100 * share:3.0f}" for share in found["within"])


def _print(entries: Sequence[Priced | Refused]) -> None:
    priced = [entry for entry in entries if isinstance(entry, Priced)]
    print(f"{'class':24s} rows configs   states 0.5/2/5 %  median    peak 0.5/2/5 %  median")
    for name, found in errors_by_class(priced).items():
        states, peak = found["states"], found["peak"]
        print(
            f"{name:24s} {found['rows']:4d} {found['configurations']:7d}   "
            f"{_shares(states):>15s}  {states['median']:6.2%}   {_shares(peak):>15s}  "
            f"{peak['median']:6.2%}"
        )
    refused = Counter(_reason(entry) for entry in entries if isinstance(entry, Refused))
    print(f"\n{len(priced)} rows read, {len(entries) - len(priced)} not:")
    for reason, number in sorted(refused.items()):
        print(f"  {number:3d}: {reason}")


def _reason(entry: Refused) -> str:
    """Return the reason why a row is not read, without its name."""
    return entry.reason.partition(": ")[2] or entry.reason


def _print_rows(entries: Sequence[Priced | Refused], wanted: str) -> None:
    for entry in entries:
        if wanted.lower() not in entry.id.lower():
            continue
        if isinstance(entry, Refused):
            print(f"{entry.id}: not read: {entry.reason}")
            continue
        print(
            f"{entry.id} ({entry.row.get('golden_date')}): after a step "
            f"{entry.measured_states_bytes / 2**20:.2f} MiB ({entry.states_error:+.2%}), peak "
            f"{entry.measured_peak_bytes / 2**20:.2f} MiB ({entry.peak_error:+.2%})"
        )
        for term in entry.account.peak:
            print(f"    {term.num_bytes / 2**20:12.3f} MiB  {term.name} ({term.switch})")


def _document(entries: Sequence[Priced | Refused]) -> dict[str, Any]:
    """Return every row's bytes; intervals are those of the shipped rows, whatever is priced."""
    shipped = (price_row(row) for row in read_goldens())
    intervals = intervals_of(entry for entry in shipped if isinstance(entry, Priced))
    rows = []
    for entry in entries:
        found: dict[str, Any] = {
            "id": entry.id,
            "reason": None,
            "predicted_states_bytes": None,
            "measured_states_bytes": _whole(entry.row.get("mem_alloc_last")),
            "predicted_peak_bytes": None,
            "measured_peak_bytes": _whole(entry.row.get("mem_max_last")),
            "interval_peak_bytes": None,
        }
        if isinstance(entry, Refused):
            found["reason"] = entry.reason
        else:
            found["predicted_states_bytes"] = entry.account.states_bytes
            found["predicted_peak_bytes"] = entry.account.peak_bytes
            ends = intervals.get(kind_of(entry.read.run), intervals["pooled"])
            found["interval_peak_bytes"] = [round(entry.account.peak_bytes * end) for end in ends]
        rows.append(found)
    return {"rows": rows}


def _print_left_out(priced: Sequence[Priced]) -> None:
    ratios = [*ratios_of(priced), *first_met()]
    # A kind of one configuration has no other to fit to.
    densities = odds.likelihoods(ratios)
    for kind, (low, high) in sorted(odds.intervals_of(ratios, PEAK_RATIOS).items()):
        number = len(odds.by_configuration(ratios)[kind])
        print(
            f"\n{kind}: {number} configurations, 9 of 10 between {low - 1:+.2%} and {high - 1:+.2%}"
        )
        if kind in densities:
            t, normal = densities[kind]
            print(f"  mean log density outside the fit: {t:.2f} Student's t, {normal:.2f} normal")
    print("\n" + unseen_table())
    print(left_out_table(ratios))
    print(classes_table(ratios))
    print(odds.odds_table(odds.reliability(ratios, at_least=PEAK_RATIOS)))


def unseen_table() -> str:
    """Return the coverage of runs that no count had used, for docs/concepts/memory.md."""
    return covered_table([*first_counts(published_peaks()), torch_layers_left_out()], _UNITS)


def left_out_table(ratios: Sequence[Ratio]) -> str:
    """Return the coverage by kind with one configuration held out, for docs/concepts/memory.md."""
    return covered_table(odds.configurations_left_out(ratios, PEAK_RATIOS), _UNITS)


def classes_table(ratios: Sequence[Ratio], below: float = math.inf) -> str:
    """Return the coverage of intervals by held-out classes, for docs/concepts/memory.md.

    Classes of fewer than `LEAST` rows have counts.

    below : coverage below which a class is listed; the page lists those below the nominal one.
    """
    lines = [
        "| held out | rows | inside, as its own kind | as a kind with few runs |",
        "|---|---|---|---|",
    ]

    def shown(number: int, share: float) -> str:
        if number >= LEAST:
            return f"{100 * share:.0f} %"
        return f"{round(number * share)} of {number}"

    lines += [
        f"| {name} | {number} | {shown(number, own)} | {shown(number, unseen)} |"
        for name, number, own, unseen in sorted(
            odds.classes_left_out(ratios, PEAK_RATIOS),
            key=lambda found: (found[3], found[2], found[0]),
        )
        if own < below
    ]
    return "\n".join(lines) + "\n"


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def class_table(entries: Sequence[Priced]) -> str:
    """Return the errors of every class as a table of docs/concepts/memory.md."""
    heads = "class | rows | configurations | states within 2 % | peak within 2 % | peak, median"
    lines = [f"| {heads} |", "|---|---|---|---|---|---|"]
    for name, found in errors_by_class(entries).items():
        near = (f"{100 * found[what]['within'][_WITHIN_2]:.0f} %" for what in ("states", "peak"))
        lines.append(
            f"| {name} | {found['rows']} | {found['configurations']} "
            f"| {' | '.join(near)} | {100 * found['peak']['median']:.2f} % |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Price the rows and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--goldens", type=Path, help="table of runs; default: the shipped one")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every row's bytes")
    parser.add_argument("--rows", metavar="TEXT", help="print rows whose id has TEXT, by terms")
    parser.add_argument(
        "--left-out", action="store_true", help="print the coverage of intervals without a class"
    )
    parser.add_argument(
        "--docs", action="store_true", help="write the table of docs/concepts/memory.md"
    )
    asked = parser.parse_args(arguments)
    if asked.docs and asked.goldens is not None:
        parser.error("--docs is of the shipped rows, and --goldens names others")
    entries = [price_row(row) for row in read_goldens(asked.goldens)]
    priced = [entry for entry in entries if isinstance(entry, Priced)]
    if asked.docs:
        ratios = [*ratios_of(priced), *first_met()]
        tables = {
            "classes": class_table(priced),
            "unseen": unseen_table(),
            "left out": left_out_table(ratios),
            "features": classes_table(ratios, COVERAGE),
            "odds": odds.odds_table(odds.reliability(ratios, at_least=PEAK_RATIOS)),
        }
        write_tables(tables, PAGE)
    if asked.rows is not None:
        _print_rows(entries, asked.rows)
    else:
        _print(entries)
    if asked.left_out:
        _print_left_out(priced)
    if asked.json is not None:
        write_json(asked.json, _document(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())

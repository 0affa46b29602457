"""Print models of collectives against 1,329 measured rows of NCCL tests on A100 nodes.

`python -m benchmarks.accuracy_collectives [--cases DIR] [--csv PATH]`. The measurements are a file
of another project and are not in this repository. Nodes have four A100 joined by NVLink and one 200
Gb/s adapter per GPU; a row is the mean of in-place and out-of-place time. Nothing was fitted to
these rows.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from autopar.documents.checks import load_document
from autopar.output import write_text
from autopar.rates.card import load_card
from autopar.rates.collectives import GroupShape, collective_time_s
from autopar.records import replace
from benchmarks.metadata import ROOT
from search.closed_form.files import tensor2d_system
from search.closed_form.tensor2d import COMPAT, CORRECT, Quirks, System
from search.closed_form.tensor2d.engine import link_s
from tests.data.read import tensor2d_documents

__all__ = ["Measured", "compare", "main", "read"]

CASES = ROOT.parent / "shared" / "cases" / "perf_estimates"
FILE = "comm_measurements/perlmutter_model_vs_measured.csv"
PUBLISHED_SYSTEM = "A100-NVS4"
CARD = "a100-80gb"
GPUS_PER_NODE = 4
MODELS = ("published", "corrected", "shipped", "shipped --compat", "card")
_SIZES = ((2**15, "32 KiB to 512 KiB"), (2**20, "1 to 16 MiB"), (2**25, "32 MiB and more"))

Model = Callable[["Measured"], float | None]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measured collective."""

    operation: str
    """'allreduce', 'allgather' or 'reducescatter'."""
    num_nodes: int
    gpus_per_node: int
    size_bytes: int
    """Size of the whole tensor, bytes."""
    time_s: float
    published_s: float
    """Time estimated by the published model, seconds."""

    @property
    def ranks(self) -> int:
        """Return the GPUs of the group."""
        return self.num_nodes * self.gpus_per_node

    @property
    def topology(self) -> str:
        """Return the topology of the group in words."""
        if self.num_nodes == 1:
            return "in a node"
        if self.gpus_per_node == 1:
            return "one GPU of each node"
        return "several GPUs of each node"


def read(folder: Path) -> list[Measured]:
    """Return the measured rows in `folder`."""
    with (folder / FILE).open(encoding="utf-8", newline="") as file:
        return [
            Measured(
                operation=row["op"],
                num_nodes=int(row["num_nodes"]),
                gpus_per_node=int(row["gpus_per_node"]),
                size_bytes=int(row["size"]),
                time_s=float(row["t_meas_s"]),
                published_s=float(row["t_estimates"]),
            )
            for row in csv.DictReader(file)
        ]


def compare(rows: Sequence[Measured]) -> dict[str, list[float | None]]:
    """Return the seconds of every row by model, None where a model has no answer."""
    systems = tensor2d_documents(ROOT / "tests" / "data")["systems"]
    published = load_document(System, systems[PUBLISHED_SYSTEM])
    shipped = replace(tensor2d_system(CARD), nvlink_size=GPUS_PER_NODE)
    network = load_card(CARD).network

    def by(system: System, quirks: Quirks) -> Model:
        return lambda row: link_s(
            system, quirks, row.operation, row.size_bytes / 1e9, row.ranks, row.gpus_per_node
        )

    def ours(row: Measured) -> float | None:
        shape = GroupShape.even(ranks=row.ranks, per_node=row.gpus_per_node)
        return collective_time_s(network, row.operation, row.size_bytes, shape)

    models: tuple[Model, ...] = (
        by(published, COMPAT),
        by(published, CORRECT),
        by(shipped, CORRECT),
        by(shipped, COMPAT),
        ours,
    )
    found = {name: [model(row) for row in rows] for name, model in zip(MODELS, models, strict=True)}
    for row, seconds in zip(rows, found["published"], strict=True):
        assert seconds is not None
        assert abs(seconds / row.published_s - 1) < 1e-9, row
    return found


def table(rows: Sequence[Measured], found: dict[str, list[float | None]]) -> list[str]:
    """Return lines of a table: median signed error and 90th percentile of its size, in percent."""
    lines = [
        "| operation | group | size | rows | median time | "
        + " | ".join(f"{name}, median (p90) %" for name in MODELS)
        + " |",
        "|---|---|---|---|---|" + "---|" * len(MODELS),
    ]
    keys = dict.fromkeys((row.operation, row.topology) for row in rows)
    for operation, topology in sorted(keys):
        for k, (least, text) in enumerate(_SIZES):
            most = _SIZES[k + 1][0] if k + 1 < len(_SIZES) else float("inf")
            chosen = [
                i
                for i, row in enumerate(rows)
                if (row.operation, row.topology) == (operation, topology)
                and least <= row.size_bytes < most
            ]
            cells = [_cell(rows, found[name], chosen) for name in MODELS]
            middle_s = median(rows[i].time_s for i in chosen)
            lines.append(
                f"| {operation} | {topology} | {text} | {len(chosen)} | {middle_s * 1e3:.3g} ms | "
                + " | ".join(cells)
                + " |"
            )
    return lines


def _cell(rows: Sequence[Measured], seconds: list[float | None], chosen: Sequence[int]) -> str:
    errors = [s / rows[i].time_s - 1.0 for i in chosen if (s := seconds[i]) is not None]
    if not errors:
        return ""
    size = np.quantile(np.abs(errors), 0.9, method="higher")
    return f"{100 * median(errors):+.0f} ({100 * size:.0f})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns 0, also where the cases are absent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=Path, default=CASES, help="folder of comm_measurements")
    parser.add_argument("--csv", type=Path, help="write every row to this file, in seconds")
    args = parser.parse_args(arguments)
    if not (args.cases / FILE).is_file():
        print(f"skipped: {args.cases} has no {FILE}", file=sys.stderr)
        return 0
    rows = read(args.cases)
    found = compare(rows)
    print("\n".join(table(rows, found)))
    print(f"\n{len(rows)} rows; the published column is the published figure to 1e-9")
    if args.csv is not None:
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        out.writerow(
            ["operation", "num_nodes", "gpus_per_node", "size_bytes", "measured_s", *MODELS]
        )
        for i, row in enumerate(rows):
            head = (row.operation, row.num_nodes, row.gpus_per_node, row.size_bytes, row.time_s)
            out.writerow([*head, *(found[name][i] for name in MODELS)])
        write_text(args.csv, text.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main())

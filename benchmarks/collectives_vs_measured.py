"""Scores the collectives of cards on public measurements, which are files of another project.

`python -m benchmarks.collectives_vs_measured [--kernels DIR]`. Without DIR/collectives.csv.gz
nothing is scored, and the reason is printed. The constants in the cards were fitted to one half of
the rows inside a node, chosen by a checksum of device, operation, ranks and size. The other half,
every row across nodes and the frameworks' own all-reduces are held out and scored separately.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np

from autopar.rates.card import load_card
from autopar.rates.collectives import (
    GroupShape,
    Network,
    collective_time_s,
    moe_exchange_time_s,
    p2p_time_s,
)
from autopar.records import replace
from autopar.units import MIB
from benchmarks.metadata import ROOT

__all__ = ["Row", "main", "predict", "read", "score"]

KERNELS = ROOT.parent / "shared" / "cases" / "kernels"
FILE = "collectives.csv.gz"

CARDS = {
    "A100-SXM": "a100-80gb",
    "A100-SXM4-80GB": "a100-80gb",
    "A100-SXM4-40GB": "a100-40gb",
    "H100-SXM5-80GB": "h100-80gb",
    "H200-SXM-141GB": "h200",
    "B200-SXM-180GB": "b200",
    # the same links and switches as the B200
    "B300-SXM": "b200",
    "GB200": "b200",
    "GB300": "b200",
}
"""Cards by the names of devices in the file."""
OPERATIONS = {
    # sizes are nccl-tests' in the file and in `autopar.rates.measured.OPERATIONS` alike
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "all2all",
}
ADAPTERS = {
    # Gb/s of one GPU's share of a node's adapters, by their names in the file
    "EFA 4x100G (p4de)": 50,
    "EFA 32x100G (p5)": 400,
    "GCP a3-mega TCPXO 8x200G": 200,
    "IB 8x400G": 400,
    "IB CX7 8x400G": 400,
    "IB-NDR400 x4": 400,
    "IB-NDR400 x8": 400,
    "RoCE 8x400G": 400,
    "RoCE 16x100G": 200,
}
RACK_GPUS = 72
WIRE_BYTES = {"bf16": 2.0, "bfloat16": 2.0, "fp8": 1.0 + 4 / 128}
"""Bytes per element on the wire; fp8 has one fp32 scale for 128 elements."""
CLASSES = ((0.0, "< 1 MiB"), (1.0 * MIB, "1 to 32 MiB"), (32.0 * MIB, ">= 32 MiB"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured time; fields are those of the file, in base units."""

    source: str
    gpu: str
    operation: str
    ranks: int
    nodes: int
    rack: bool
    """True if one switch joins the nodes."""
    adapters: str
    size_bytes: float
    """Size in bytes; moe_*: tokens x hidden x 2 per rank, whatever is sent."""
    time_s: float
    fitted: bool
    """True for the half that the cards' constants were fitted to."""
    tokens: int = 0
    hidden: int = 0
    top_k: int = 0
    num_sms: int = 0
    dtype: str = ""

    @property
    def size_class(self) -> str:
        """Return the words for its size."""
        return [text for least, text in CLASSES if self.size_bytes >= least][-1]

    @property
    def refused(self) -> str | None:
        """Return the reason why the row is not priced, None if it is."""
        if self.gpu not in CARDS:
            return f"no card of {self.gpu}"
        if self.nodes > 1 and not self.rack and self.adapters.startswith("IB (Azure"):
            return "the file calls its network slow and does not say how slow"
        if self.operation.startswith("moe"):
            if "low-latency" in self.source or self.operation not in (
                "moe_dispatch",
                "moe_combine",
            ):
                return "kernels of inference"
            if not self.num_sms:
                return "the file does not say how many multiprocessors sent"
        elif self.operation != "p2p" and self.operation not in OPERATIONS:
            return f"no formula of {self.operation}"
        return None


def read(path: Path) -> Iterator[Row]:
    """Yield the rows of the file; KeyError or ValueError where it is another."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            nodes = int(row["nodes"])
            rack = "NVL72 rack" in row["inter_link"] or (
                row["gpu"] in ("GB200", "GB300") and not row["inter_link"]
            )
            yield Row(
                source=_family(row["source"]),
                gpu=row["gpu"],
                operation=row["op"],
                ranks=int(row["ranks"]),
                nodes=nodes,
                rack=rack,
                adapters=row["inter_link"],
                size_bytes=float(row["bytes"]),
                time_s=float(row["time_us"]) * 1e-6,
                fitted=_fitted(row),
                tokens=int(row["tokens"] or 0),
                hidden=int(row["hidden"] or 0),
                top_k=int(row["topk"] or 0),
                num_sms=int(row["sms"] or 0),
                dtype=row["dtype"],
            )


def _family(source: str) -> str:
    """Return a source without commit, version and file; that of a collection with its part."""
    match = re.match(r"ai-dynamo/aiconfigurator@\w+:([^/]+)", source)
    if match is not None:
        return match[1]
    return re.split(r"[@:(]", source)[0].strip()


def _fitted(row: dict[str, str]) -> bool:
    # the frameworks' all-reduces repeat one measurement under several versions: none was used
    if row["gpu"] not in CARDS or int(row["nodes"]) > 1 or "custom_allreduce" in row["source"]:
        return False
    key = row["gpu"] + row["op"] + row["ranks"] + row["bytes"]
    if row["op"].startswith("moe"):
        key += row["sms"] + row["topk"] + row["hidden"]
    # transfers of two ranks are too few to split: their one share was read from all
    return row["op"] == "p2p" or crc32(key.encode()) % 2 == 0


def predict(row: Row) -> float:
    """Return the seconds estimated from the card; the row must not be refused."""
    network = load_network(row.gpu, row.adapters)
    shape = shape_of(row)
    if row.operation == "p2p":
        return p2p_time_s(network, row.size_bytes, crosses=shape.nodes > 1)
    if row.operation.startswith("moe"):
        return float(
            moe_exchange_time_s(
                network,
                row.operation.removeprefix("moe_"),
                row.tokens,
                shape,
                hidden=row.hidden,
                top_k=row.top_k,
                bytes_per_element=WIRE_BYTES[row.dtype],
                num_sms=row.num_sms,
            )
        )
    return collective_time_s(network, OPERATIONS[row.operation], row.size_bytes, shape)


_NETWORKS: dict[tuple[str, str], Network] = {}


def load_network(gpu: str, adapters: str) -> Network:
    """Return the network of a device's card with the adapters that the file names."""
    key = gpu, adapters
    if key not in _NETWORKS:
        network = load_card(CARDS[gpu]).network
        if adapters in ADAPTERS:
            network = replace(network, adapter_bytes_per_s=ADAPTERS[adapters] * 1e9 / 8)
        _NETWORKS[key] = network
    return _NETWORKS[key]


def shape_of(row: Row) -> GroupShape:
    """Return the distribution of a row's ranks over domains."""
    if row.nodes == 1 or row.rack:
        return GroupShape.even(ranks=row.ranks, per_node=row.ranks)
    if row.gpu in ("GB200", "GB300"):
        racks = -(-row.ranks // RACK_GPUS)
        return GroupShape.even(ranks=row.ranks, per_node=row.ranks // racks)
    return GroupShape.even(ranks=row.ranks, per_node=row.ranks // row.nodes)


def score(errors: Sequence[float]) -> str:
    """Return rows, bias (median), median and 90th percentile of the size, cells in percent."""
    if not errors:
        return "0 | | | "
    found = np.asarray(errors)
    sizes = np.abs(found)
    return (
        f"{len(found)} | {100 * np.median(found):+.1f} | {100 * np.median(sizes):.1f} | "
        f"{100 * np.quantile(sizes, 0.9):.1f}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; returns 0, also where the file is absent."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", type=Path, default=KERNELS, help=f"folder of {FILE}")
    args = parser.parse_args(arguments)
    path = args.kernels / FILE
    if not path.is_file():
        print(f"skipped: {args.kernels} has no {FILE}", file=sys.stderr)
        return 0
    tables: dict[tuple[str, ...], list[float]] = defaultdict(list)
    totals: dict[tuple[str, ...], tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    refused: dict[str, int] = defaultdict(int)
    for row in read(path):
        reason = row.refused
        if reason is not None:
            refused[reason] += 1
            continue
        error = predict(row) / row.time_s - 1.0
        where = "in a node" if row.nodes == 1 else "one rack" if row.rack else "across nodes"
        ranks = str(row.ranks)
        tables[row.source, where, row.operation, ranks, row.size_class].append(error)
        kind = "frameworks' own all_reduce" if "custom" in row.source else row.operation
        for operation in (kind,) if kind != row.operation else (kind, "_all but moe and p2p"):
            if operation.startswith("_") and row.operation not in OPERATIONS:
                continue
            totals[where, operation.lstrip("_"), row.size_class][not row.fitted].append(error)
    head = "rows | bias % | median % | p90 %"
    print(f"| source | where | operation | ranks | size | {head} |\n" + "|---" * 9 + "|")
    for key in sorted(tables, key=lambda key: (*key[:3], int(key[3]), key[4])):
        print(f"| {' | '.join(key)} | {score(tables[key])} |")
    print(
        f"\n| where | operation | size | fitted: {head} | kept back: {head} |\n" + "|---" * 11 + "|"
    )
    for key, (fitted, kept) in sorted(totals.items()):
        print(f"| {' | '.join(key)} | {score(fitted)} | {score(kept)} |")
    for reason, number in sorted(refused.items()):
        print(f"\n{number} rows are not priced: {reason}", end="")
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

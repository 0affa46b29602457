"""Results of the hardware profiler on a link of known rate, compared with the rate of TCP.

`python -m benchmarks.bench_shaped_network [--repeats N] [--no-user-namespace] [--json LEDGER]`; two
nodes are two network namespaces on this machine, joined by a veth pair that `tc tbf` shapes.
Skipped where the kernel refuses that; `--no-user-namespace` requires root instead.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autopar.documents.json import load_object
from autopar.documents.sidecar import CurveData, Measurement, read_sidecar
from autopar.statistics import latency_bandwidth_fit
from autopar.units import GB, MIB, MS, format_bytes
from benchmarks.metadata import append
from tests.e2e.shaped_network import GOODPUT, MBIT, refusal, run_on_two_nodes

__all__ = [
    "LARGE_BYTES",
    "RATES_MBIT",
    "SHARED_MBIT",
    "SMALL_BYTES",
    "TARGETS",
    "Link",
    "Sharing",
    "link",
    "main",
    "sharing",
]

RATES_MBIT = (100, 250, 500, 1000)
SHARED_MBIT = 1000
SMALL_BYTES = 4096
LARGE_BYTES = {100: 8 * MIB, 250: 8 * MIB, 500: 8 * MIB, 1000: 16 * MIB}
"""Large message by rate: 8 MiB takes 70 ms at 1000 Mbit, which a busy machine disturbs. The slope
is measured between it and an eighth of it.
"""
TARGETS: dict[str, tuple[float, float]] = {
    "slope": (1.0, 0.05),
    "fit": (1.0, 0.05),
    "bus": (1.0, 0.10),
    "ratio": (0.5, 0.05),
}
"""Expected value and tolerance of a median over the repeats."""
_PROFILER = ("-m", "profiler.hardware")


@dataclass(frozen=True, kw_only=True)
class Link:
    """One run with a rank on each node; bandwidths over what TCP can carry at the rate."""

    slope: float
    """p2p, from the times of the large message and an eighth of it."""
    fit: float
    """p2p, from the profiler's fit through the same two sizes. 4 KiB is excluded: an idle link
    passes 256 KiB at once at any rate, and a line through that has another slope.
    """
    bus: float
    """Documented all-reduce bus bandwidth at the large message."""
    bidirectional: float
    """Each way of p2p in both directions at once, at the large message."""
    latency_s: float
    """p2p of 4 KiB, seconds. The link adds no delay: this is the time of two processes on a busy
    machine, and at 100 Mbit, where messages come as fast as they may, that of the rate.
    """
    wall_s: float
    """Wall seconds of the whole command, start of Python and torch on both nodes included."""


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """All-reduce of two pairs of ranks across two nodes: bus bandwidth over TCP's."""

    isolated: float
    """Bus bandwidth of one pair at a time over TCP's."""
    concurrent: float
    """Bus bandwidth of the slower of two concurrent pairs over TCP's."""
    wall_s: float
    """Wall seconds of both commands."""

    @property
    def ratio(self) -> float:
        """Concurrent over isolated."""
        return self.concurrent / self.isolated


def link(rate_mbit: int, user_namespace: bool = True) -> Link:
    """Return the profiler's results between two nodes with one rank each."""
    large = LARGE_BYTES[rate_mbit]
    eighth = large // 8
    arguments = ["allreduce", "p2p", "--sizes", f"{SMALL_BYTES},{eighth},{large}"]
    arguments += ["--reference-size", str(large)]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out"
        wall_s = _profile(rate_mbit, 1, arguments, out, user_namespace)
        allreduce = out / "allreduce_bandwidth_2nodes_1gpus_per_node.json"
        p2p = out / "p2p_bandwidth_2nodes_1gpus_per_node.json"
        cells = _cells(p2p, "inter-node")
        both_s = statistics.median(cells[f"p2p_bidirectional_stages_2_{large}B"].samples_s["time"])
        _cells(allreduce, "inter-node")
        curve = _curve(p2p)
        times_s = dict(zip(curve.sizes_bytes, curve.times_s, strict=True))
        bus = load_object(allreduce).data["allreduce_size_2_consec_1"] * GB
    goodput = GOODPUT * rate_mbit * MBIT
    fit = latency_bandwidth_fit([eighth, large], [times_s[eighth], times_s[large]])
    return Link(
        slope=(large - eighth) / (times_s[large] - times_s[eighth]) / goodput,
        fit=fit.bytes_per_s / goodput,
        bus=bus / goodput,
        bidirectional=large / both_s / goodput,
        latency_s=times_s[SMALL_BYTES],
        wall_s=wall_s,
    )


def sharing(rate_mbit: int, user_namespace: bool = True) -> Sharing:
    """Return the results of strided pairs of 2 x 2 ranks, alone and concurrently on one link."""
    large = LARGE_BYTES[rate_mbit]
    arguments = ["allreduce", "--groups", "2", "--sizes", str(large)]
    arguments += ["--reference-size", str(large)]
    found, wall_s = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, extra in (("isolated", ["--isolated"]), ("concurrent", [])):
            out = Path(folder) / name
            wall_s += _profile(rate_mbit, 2, [*arguments, *extra], out, user_namespace)
            path = out / "allreduce_bandwidth_2nodes_2gpus_per_node.json"
            cells = _cells(path, None)
            assert cells[f"allreduce_size_2_consec_0_{large}B"].scope == "inter-node"
            assert cells[f"allreduce_size_2_consec_1_{large}B"].scope == "intra-node"
            found.append(load_object(path).data["allreduce_size_2_consec_0"] * GB)
    goodput = GOODPUT * rate_mbit * MBIT
    return Sharing(isolated=found[0] / goodput, concurrent=found[1] / goodput, wall_s=wall_s)


def _profile(
    rate_mbit: int, ranks_per_node: int, arguments: Sequence[str], out: Path, user_namespace: bool
) -> float:
    begun_s = time.perf_counter()
    run_on_two_nodes(
        rate_mbit,
        ranks_per_node,
        [*_PROFILER, *arguments, "--out", str(out)],
        user_namespace=user_namespace,
    )
    return time.perf_counter() - begun_s


def _cells(path: Path, scope: str | None) -> dict[str, Measurement]:
    """Return the measured cells of a document after checking their results."""
    sidecar = read_sidecar(path)
    assert sidecar is not None
    (run,) = sidecar.runs
    for cell in run.measurements:
        assert cell.status == "ok", cell.reason
        assert cell.checked
        assert scope in (None, cell.scope)
    return {cell.key: cell for cell in run.measurements}


def _curve(path: Path) -> CurveData:
    sidecar = read_sidecar(path)
    assert sidecar is not None
    (curve,) = sidecar.curves
    return curve


def _summary(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def main() -> int:
    """Print figures and targets; return 1 if a median misses one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-user-namespace", action="store_true", help="needs root")
    parser.add_argument("--json", type=Path, help="append the result to this file")
    arguments = parser.parse_args()
    inside = not arguments.no_user_namespace
    if reason := refusal(inside):
        print(f"skipped: {reason}")
        return 0
    ledger: dict[str, Any] = {"user_namespace": inside, "uid": os.geteuid(), "goodput": GOODPUT}
    ledger |= {"torch": importlib.metadata.version("torch"), "load_before": os.getloadavg()[0]}
    missed: list[str] = []

    def median(name: str, values: Sequence[float], where: str) -> str:
        expected, tolerance = TARGETS[name]
        if abs(statistics.median(values) - expected) > tolerance:
            missed.append(
                f"{name}, {where}: {_summary(values)}, expected {expected} +- {tolerance}"
            )
        return _summary(values)

    print(
        f"uid {os.geteuid()}, {'user namespace' if inside else 'root, no user namespace'}, "
        f"{arguments.repeats} runs: median (least-most); bandwidths over {GOODPUT:.4f} of the rate"
    )
    head = ("rate", "large", "p2p slope", "p2p fit", "all-reduce bus", "each way", "4 KiB", "wall")
    print("".join(f"{word:>{10 if i < 2 else 21}s}" for i, word in enumerate(head)))
    for rate in RATES_MBIT:
        links = [link(rate, inside) for _ in range(arguments.repeats)]
        ledger[f"link_{rate}"] = [asdict(found) for found in links]
        columns = {name: [getattr(found, name) for found in links] for name in asdict(links[0])}
        latency, wall = (statistics.median(columns[name]) for name in ("latency_s", "wall_s"))
        words = (
            median("slope", columns["slope"], f"{rate} Mbit"),
            median("fit", columns["fit"], f"{rate} Mbit"),
            median("bus", columns["bus"], f"{rate} Mbit"),
            _summary(columns["bidirectional"]),
            f"{latency / MS:.2f} ms",
            f"{wall:.1f} s",
        )
        large = format_bytes(LARGE_BYTES[rate])
        row = "".join(f"{word:>21s}" for word in words)
        print(f"{rate:5d} Mbit{large:>10s}{row}", flush=True)
    pairs = [sharing(SHARED_MBIT, inside) for _ in range(arguments.repeats)]
    ledger["sharing"] = [asdict(found) for found in pairs]
    print(
        f"2 x 2 ranks, {SHARED_MBIT} Mbit, two pairs across the nodes: "
        f"alone {_summary([found.isolated for found in pairs])}, "
        f"at once {_summary([found.concurrent for found in pairs])}, "
        f"ratio {median('ratio', [found.ratio for found in pairs], '2 x 2')}, "
        f"{statistics.median([found.wall_s for found in pairs]):.1f} s",
        flush=True,
    )
    append(arguments.json, "shaped_network", ledger)
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Measurements of a cluster that does not exist: every time follows one latency and bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autopar.documents.sidecar import Measurement
from autopar.rates.measured import OPERATIONS
from autopar.records import replace
from profiler.environment import Metadata
from profiler.hardware.options import Cell, Cluster, HardwareOptions, plan_cells

__all__ = [
    "BYTES_PER_S",
    "COMPUTE_SLOWDOWN",
    "COPY_BYTES_PER_S",
    "LATENCY_S",
    "METADATA",
    "MIB",
    "SLOWDOWN",
    "SPREAD",
    "make_cluster",
    "make_options",
    "measure",
    "measure_all",
    "unmeasured",
]

MIB = 1 << 20
LATENCY_S = {"intra-node": 5e-6, "inter-node": 20e-6, "one device": 2e-6}
BYTES_PER_S = {"intra-node": 200e9, "inter-node": 20e9, "one device": 2e12}
"""Bus bandwidth by scope; strided groups share it."""
COPY_BYTES_PER_S = 2e12
SLOWDOWN, COMPUTE_SLOWDOWN = 1.25, 1.1
"""Of communication and of computation while both run."""
SPREAD = (0.98, 1.0, 1.03, 0.99, 1.01, 1.0, 1.02)
"""Samples over their median."""
METADATA: Metadata = {
    "time_utc": "2026-01-02T03:04:05+00:00",
    "command": "torchrun ... -m profiler.hardware",
    "backend": "nccl",
    "dtype": "bf16",
    "device": "Some GPU",
    "hosts": "a,b",
    "isolated": False,
}


def make_cluster(num_nodes: int = 1, gpus_per_node: int = 4) -> Cluster:
    """Return hosts a, b, ... with as many ranks each."""
    return Cluster(
        hosts=tuple("abcdefgh"[n] for n in range(num_nodes) for _ in range(gpus_per_node))
    )


def make_options(
    out: Path, *, sizes: Sequence[int] | None = None, **changes: object
) -> HardwareOptions:
    """Return options with 1 MiB to 1 GiB, every size twice the one before, and the changes."""
    chosen = tuple(sizes) if sizes is not None else tuple(MIB << n for n in range(11))
    return replace(HardwareOptions(out=out, sizes_bytes=chosen), **changes)


def measure(cell: Cell, *, factor: float = 1.0) -> Measurement:
    """Return the cell of the cluster that does not exist, its times multiplied by `factor`."""
    groups = [group for groups in cell.rounds for group in groups]
    latency_s, bytes_per_s = LATENCY_S[cell.scope], BYTES_PER_S[cell.scope]
    if not cell.consecutive:
        bytes_per_s /= len(groups)
    name = cell.operation.removeprefix("overlap_")
    if name == "memcopy":
        bytes_per_s = COPY_BYTES_PER_S
    bus = OPERATIONS[name].bus_factor(cell.group_size)
    time_s = (latency_s + cell.size_bytes * bus / bytes_per_s) * factor
    medians = {"time": time_s}
    if cell.operation.startswith("overlap_"):
        medians = {
            "compute_alone": time_s,
            "communication_alone": time_s,
            "compute_overlapped": time_s * COMPUTE_SLOWDOWN,
            "communication_overlapped": time_s * SLOWDOWN,
            "both": time_s * SLOWDOWN,
        }
    return Measurement(
        key=cell.key,
        operation=cell.operation,
        group_size=cell.group_size,
        consecutive=cell.consecutive,
        size_bytes=float(cell.size_bytes),
        status="ok",
        scope=cell.scope,
        samples_s={what: [median * x for x in SPREAD] for what, median in medians.items()},
        worst_group=list(groups[0]),
        group_medians_s=[time_s] * len(groups),
        checked=True,
        emulated=cell.scope == "one device" and cell.operation.startswith("overlap_"),
        elapsed_s=time_s * len(SPREAD),
    )


def unmeasured(cell: Cell, status: str, reason: str) -> Measurement:
    """Return a cell that failed or was skipped."""
    changes = {"status": status, "reason": reason, "samples_s": {}, "checked": False}
    return replace(measure(cell), **changes, worst_group=[], group_medians_s=[])


def measure_all(options: HardwareOptions, cluster: Cluster) -> list[Measurement]:
    """Return every cell of a run, in the order of the run."""
    return [measure(cell) for cell in plan_cells(options, cluster)]

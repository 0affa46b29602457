"""Which measurements stand in which sidecar, and which of several runs count."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.measurements import Measurement
from autopar.sidecar import DocumentKind, Run
from profiler.hardware.cells import Cluster
from profiler.hardware.options import HardwareOptions

__all__ = [
    "KINDS",
    "MEASURED_FOR",
    "REPLACES",
    "UNITS",
    "family",
    "kinds_of",
    "newest_measurements",
    "requested_kinds",
]

KINDS: tuple[DocumentKind, ...] = ("allreduce", "p2p", "overlap", "sp_time")
"""The documents of a cluster, in the order they are written."""
UNITS: dict[DocumentKind, str] = {
    "allreduce": "GB/s",
    "p2p": "GB/s",
    "overlap": "1",
    "sp_time": "ms",
}
"""Unit of every document."""
MEASURED_FOR: dict[DocumentKind, tuple[str, ...]] = {
    "allreduce": ("allreduce",),
    "p2p": ("p2p",),
    "overlap": ("overlap",),
    "sp_time": ("allreduce", "all2all", "allgather", "reducescatter"),
}
"""What is measured for a document, in the words of the command line."""
REPLACES = "replaces"
"""Key of a run's metadata: operations, joined by commas, whose earlier measurements it
supersedes; they stay in the sidecar and are no longer used."""


def family(operation: str) -> str:
    """Return the operation that a user asks for to measure this one."""
    if operation.startswith("overlap_") or operation == "memcopy":
        return "overlap"
    return operation.removesuffix("_bidirectional")


def kinds_of(measurement: Measurement) -> tuple[DocumentKind, ...]:
    """Return the documents whose numbers or curves rest on a measurement."""
    operation = family(measurement.operation)
    if operation == "allreduce":
        return ("allreduce", "sp_time") if measurement.consecutive else ("allreduce",)
    if operation == "p2p":
        return ("p2p",)
    return ("overlap",) if operation == "overlap" else ("sp_time",)


def newest_measurements(runs: Iterable[Run]) -> dict[str, Measurement]:
    """Return what counts of runs in their order, by cell: the newest ok one, else the newest."""
    found: dict[str, Measurement] = {}
    for run in runs:
        replaced = set(str(run.metadata.get(REPLACES, "")).split(","))
        found = {key: m for key, m in found.items() if family(m.operation) not in replaced}
        for measurement in run.measurements:
            earlier = found.get(measurement.key)
            if measurement.status == "ok" or earlier is None or earlier.status != "ok":
                found[measurement.key] = measurement
    return found


def requested_kinds(options: HardwareOptions, cluster: Cluster) -> frozenset[DocumentKind]:
    """Return the documents that rest on the operations asked for."""
    asked = {kind for kind in KINDS if set(MEASURED_FOR[kind]) & set(options.operations)}
    if cluster.world_size == 1 and "allreduce" in asked:
        asked.add("p2p")  # it has no keys, and a planner wants to see it
    return frozenset(asked)

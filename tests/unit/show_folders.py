"""Small made-up hardware profiles with sidecars, and what tests of `profile-show` ask of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from autopar.command.console import make_console
from autopar.documents.json import write_json
from autopar.documents.sidecar import (
    SIDECAR_VERSION,
    CurveData,
    DocumentKind,
    Measurement,
    Run,
    Sidecar,
    Straggler,
    write_sidecar,
)
from autopar.rates.measured import OPERATIONS
from autopar.records import replace
from autopar.units import GB, MIB, MS
from profiler.show.read import Profile, load_folder

Cells = dict[DocumentKind, list[Measurement]]
ALLREDUCE = "allreduce_bandwidth_2nodes_2gpus_per_node.json"
P2P = "p2p_bandwidth_2nodes_2gpus_per_node.json"
SP_TIME = "sp_time_2nodes_2gpus_per_node.json"

REFERENCE_BYTES = 32 * MIB
SIZES = (65536, 262144, *(MIB << i for i in range(11)))
_STEPS = (3, -4, 1, 5, -2, 0, -5, 2, 4, -1, -3)
"""In an order that does not drift; their median is 0."""
METADATA: dict[str, str | int | float | bool | None] = {
    "time_utc": "2026-01-02T03:04:05+00:00",
    "command": "torchrun ... -m profiler.hardware --out box",
    "autopar": "0.1.0",
    "python": "3.11.9",
    "torch": "2.11.0",
    "cuda": "13.0",
    "nccl": "2.28.9",
    "driver": "580.65.06",
    "backend": "nccl",
    "dtype": "bf16",
    "isolated": False,
    "cuda_graph": False,
    "reference_bytes": REFERENCE_BYTES,
    "world_size": 4,
    "num_nodes": 2,
    "gpus_per_node": 2,
    "ranks_per_gpu": 1,
    "hosts": "node-a,node-b",
    "device": "Example GPU",
}


def samples(time_s: float, step: float = 0.004) -> list[float]:
    """Return eleven samples around a time, which is their median."""
    return [time_s * (1.0 + step * k) for k in _STEPS]


def cell(
    operation: str, group_size: int, size_bytes: int, time_s: float, **more: Any
) -> Measurement:
    """Return a measured cell of a cluster of two nodes with two GPUs."""
    consecutive = more.pop("consecutive", True)
    kind = f"size_{group_size}_consec_{int(consecutive)}"
    if operation.startswith("p2p"):
        kind = f"stages_{group_size}"
    inside = group_size == 2 and consecutive and not operation.startswith("p2p")
    fields: dict[str, Any] = {
        "key": f"{operation}_{kind}_{size_bytes}B",
        "operation": operation,
        "group_size": group_size,
        "consecutive": consecutive,
        "size_bytes": float(size_bytes),
        "status": "ok",
        "scope": "intra-node" if inside else "inter-node",
        "samples_s": {"time": samples(time_s)},
        "checked": True,
    }
    return Measurement(**{**fields, **more})


def _times(
    operation: str, group_size: int, consecutive: bool, latency_s: float, bytes_per_s: float
) -> list[Measurement]:
    factor = OPERATIONS[operation].bus_factor(group_size)
    return [
        cell(
            operation,
            group_size,
            size,
            latency_s + factor * size / bytes_per_s,
            consecutive=consecutive,
        )
        for size in SIZES
    ]


def measured() -> dict[DocumentKind, list[Measurement]]:
    """Return the cells of a profile of 2 nodes x 2 GPUs by the document they belong to."""
    near, far = (20e-6, 150.0 * GB), (60e-6, 20.0 * GB)
    ranks = [
        *_times("allreduce", 4, True, *far),
        *_times("allreduce", 2, True, *near),
        *_times("allreduce", 2, False, 60e-6, 10.0 * GB),
    ]
    others = [
        measurement
        for operation in ("all2all", "allgather", "reducescatter")
        for group_size, line in ((4, far), (2, near))
        for measurement in _times(operation, group_size, True, *line)
    ]
    transfers = [
        *_times("p2p", 2, True, 50e-6, 9.0 * GB),
        *_times("p2p", 4, True, 55e-6, 18.0 * GB),
        cell("p2p_bidirectional", 2, REFERENCE_BYTES, REFERENCE_BYTES / (8.0 * GB)),
        cell("p2p_bidirectional", 4, REFERENCE_BYTES, REFERENCE_BYTES / (15.0 * GB)),
    ]
    overlap = [
        cell(
            f"overlap_{operation}",
            4,
            64 * MIB,
            1.0,
            samples_s={
                "compute_alone": samples(5e-3),
                "communication_alone": samples(5e-3),
                "compute_overlapped": samples(5.5e-3),
                "communication_overlapped": samples(slower * 5e-3),
                "both": samples(6e-3),
            },
        )
        for operation, slower in (("allreduce", 1.2), ("allgather", 1.15))
    ]
    return {"allreduce": ranks, "p2p": transfers, "sp_time": others, "overlap": overlap}


def documents(cells: Mapping[DocumentKind, list[Measurement]]) -> dict[str, dict[str, float]]:
    """Return the documented files of a profile of 2 nodes x 2 GPUs by their names."""
    allreduce: dict[str, float] = {}
    p2p: dict[str, float] = {}
    sp_time: dict[str, float] = {}
    for m in (m for of_kind in cells.values() for m in of_kind):
        if m.status != "ok" or "time" not in m.samples_s:
            continue
        time_s = median(m.samples_s["time"])
        rate = OPERATIONS[m.operation].bus_factor(m.group_size) * m.size_bytes / time_s / GB
        if m.size_bytes == REFERENCE_BYTES and m.operation == "allreduce":
            allreduce[f"allreduce_size_{m.group_size}_consec_{int(m.consecutive)}"] = rate
        if m.size_bytes == REFERENCE_BYTES and m.operation == "p2p":
            p2p[f"pp_size_{m.group_size}"] = rate
        if m.operation in ("allreduce", "all2all") and m.consecutive and m.size_bytes >= MIB:
            mib = int(m.size_bytes) // MIB
            sp_time[f"{m.operation}_size_{m.group_size}_{mib}MB_time"] = time_s / MS
    return {
        ALLREDUCE: allreduce,
        P2P: p2p,
        SP_TIME: sp_time,
        "overlap_coefficient.json": {"overlap_coe": 1.2},
    }


def write_folder(
    path: Path,
    cells: Mapping[DocumentKind, list[Measurement]] | None = None,
    metadata: Mapping[str, Any] = METADATA,
    **more: Any,
) -> Path:
    """Write a profile of 2 nodes x 2 GPUs with its sidecars; `more` goes into every sidecar."""
    cells = measured() if cells is None else cells
    kinds: dict[str, DocumentKind] = {
        "allreduce": "allreduce",
        "p2p": "p2p",
        "sp": "sp_time",
        "overlap": "overlap",
    }
    units = {"allreduce": "GB/s", "p2p": "GB/s", "sp_time": "ms", "overlap": "1"}
    for name, data in documents(cells).items():
        kind = kinds[name.split("_")[0]]
        write_json(path / name, data)
        run = Run(id="run-1", metadata=dict(metadata), measurements=cells[kind])
        fields: dict[str, Any] = {
            "version": SIDECAR_VERSION,
            "document": kind,
            "unit": units[kind],
            "source": f"measured by `{METADATA['command']}` on node-a,node-b",
            "tool": "autopar 0.1.0",
            "name": "box",
            "memory_bytes": float(80 << 30),
            "memory_bytes_per_s": 2.5e12,
            "runs": [run],
        }
        write_sidecar(path / name, Sidecar(**{**fields, **more}))
    return path


def troubled() -> dict[DocumentKind, list[Measurement]]:
    """Return the profile with failed and skipped cells, a straggler and two clusters."""
    cells = measured()
    ranks = [replace(m, **_trouble(m.key)) if _trouble(m.key) else m for m in cells["allreduce"]]
    return {**cells, "allreduce": ranks}


def _trouble(key: str) -> dict[str, Any]:
    gone = {"samples_s": {}, "checked": False}
    clusters = [1e-3, 2e-3] * 6
    return {
        f"allreduce_size_2_consec_0_{MIB << 10}B": {
            **gone,
            "status": "failed",
            "reason": "rank 3 on host node-b did not answer within 60 s",
        },
        f"allreduce_size_4_consec_1_{MIB << 10}B": {
            **gone,
            "status": "skipped",
            "reason": "2 buffers of 1 GiB do not fit in the 1.5 GiB that are free",
        },
        f"allreduce_size_2_consec_1_{MIB << 4}B": {
            "stragglers": [Straggler(rank=1, host="node-a", ratio=2.5)]
        },
        f"allreduce_size_4_consec_1_{MIB << 2}B": {"samples_s": {"time": clusters}},
    }.get(key, {})


def curve(operation: str, group_size: int, **more: Any) -> CurveData:
    """Return a curve of two sizes without spread."""
    return CurveData(
        operation=operation,
        group_size=group_size,
        sizes_bytes=[float(MIB), float(2 * MIB)],
        times_s=[1e-3, 2e-3],
        **more,
    )


def printed(
    show: Callable[..., None],
    *arguments: Any,
    encoding: str = "utf-8",
    columns: int = 80,
    **more: Any,
) -> str:
    """Return what a function prints on a console that is no terminal."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    show(make_console(stream, columns), *arguments, **more)
    stream.flush()
    return raw.getvalue().decode(encoding)


def one(path: Path) -> Profile:
    """Return the only profile in a folder."""
    (profile,) = load_folder(path).profiles
    return profile


def changed(cells: Cells, key: str, **update: Any) -> Cells:
    """Return the cells with one of them changed."""
    assert any(m.key == key for of_kind in cells.values() for m in of_kind)
    return {
        kind: [replace(m, **update) if m.key == key else m for m in of_kind]
        for kind, of_kind in cells.items()
    }


def rewrite(path: Path, **keys: Any) -> None:
    """Change keys of a file; None takes a key out."""
    data = {**json.loads(path.read_text(encoding="utf-8")), **keys}
    write_json(path, {key: value for key, value in data.items() if value is not None})

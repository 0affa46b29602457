"""Records of a made-up cluster, for tests of what they write."""

from __future__ import annotations

import json
from pathlib import Path

from autopar.documents.sidecar import Sidecar, read_sidecar
from profiler.environment import Metadata
from profiler.hardware.options import Cell, plan_cells
from profiler.hardware.record import HardwareRecord
from tests.unit.measured import METADATA, MIB, make_cluster, make_options, measure

__all__ = [
    "ALLREDUCE",
    "CLUSTER",
    "OVERLAP",
    "P2P",
    "SHORT",
    "SP_TIME",
    "contents",
    "load",
    "measured_dir",
    "opened",
    "planned",
    "sidecar_of",
]

CLUSTER = make_cluster(1, 4)
SHORT = (16 * MIB, 32 * MIB)
ALLREDUCE, P2P, SP_TIME, OVERLAP = (
    "allreduce_bandwidth_1nodes_4gpus_per_node.json",
    "p2p_bandwidth_1nodes_4gpus_per_node.json",
    "sp_time_1nodes_4gpus_per_node.json",
    "overlap_coefficient.json",
)


def opened(
    out: Path,
    *,
    metadata: Metadata = METADATA,
    synthetic: bool = False,
    num_gpus: int = 4,
    sizes: tuple[int, ...] = SHORT,
    **changes: object,
) -> HardwareRecord:
    """Return the record of a directory, for a cluster of one host."""
    return HardwareRecord(
        out,
        cluster=make_cluster(1, num_gpus),
        options=make_options(out, sizes=sizes, **changes),
        metadata=metadata,
        memory_bytes=80e9,
        synthetic=synthetic,
        name="made-up_1x4",
    )


def planned(operation: str, sizes: tuple[int, ...] = SHORT) -> list[Cell]:
    """Return the cells of one operation, or of all."""
    options = make_options(Path("unused"), sizes=sizes)
    cells = plan_cells(options, CLUSTER)
    return [c for c in cells if operation in ("all", c.operation)]


def load(path: Path) -> dict[str, object]:
    """Return the content of a file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def sidecar_of(path: Path) -> Sidecar:
    """Return the sidecar of a document, which must have one."""
    found = read_sidecar(path)
    assert found is not None
    return found


def measured_dir(out: Path, operation: str = "all") -> list[Cell]:
    """Measure all cells of an operation in a directory; return them."""
    cells = planned(operation)
    with opened(out) as record:
        for cell in cells:
            record.put(measure(cell))
    return cells


def contents(out: Path) -> dict[str, bytes]:
    """Return the bytes of every visible file."""
    return {p.name: p.read_bytes() for p in sorted(out.iterdir()) if not p.name.startswith(".")}

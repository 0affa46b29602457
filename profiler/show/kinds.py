"""The kinds of file that `profile-show` knows by their names, and the shape a name says.

A new kind of document is one row here and, if it has something of its own to show, one section.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from autopar.patterns import INT
from autopar.sidecar import DocumentKind

__all__ = ["KINDS", "Family", "FileKind", "Shape", "kind_of"]

Family = Literal["hardware", "model"]
Shape = tuple[int, int]
"""Nodes, GPUs per node."""

_SHAPE = rf"_(?P<nodes>{INT})nodes_(?P<gpus>{INT})gpus_per_node\.json"


@dataclass(frozen=True, kw_only=True)
class FileKind:
    """One kind of documented file."""

    kind: DocumentKind
    family: Family
    pattern: str
    """Of the whole file name."""


KINDS = (
    FileKind(kind="allreduce", family="hardware", pattern="allreduce_bandwidth" + _SHAPE),
    FileKind(kind="p2p", family="hardware", pattern="p2p_bandwidth" + _SHAPE),
    FileKind(kind="sp_time", family="hardware", pattern="sp_time" + _SHAPE),
    FileKind(kind="overlap", family="hardware", pattern=r"overlap_coefficient\.json"),
    FileKind(kind="computation", family="model", pattern=r"computation_profiling_.*\.json"),
    FileKind(kind="memory", family="model", pattern=r"memory_profiling_.*\.json"),
)


def kind_of(path: Path) -> tuple[FileKind, Shape | None] | None:
    """Return the kind of a file by its name and the shape it is of, None for any other file."""
    if path.name.endswith(".meta.json"):
        return None
    for row in KINDS:
        match = re.fullmatch(row.pattern, path.name)
        if match:
            found = match.groupdict()
            shape = (int(found["nodes"]), int(found["gpus"])) if "nodes" in found else None
            return row, shape
    return None

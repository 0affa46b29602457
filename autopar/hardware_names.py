"""The documented names of the hardware files, and the shape of the cluster that they say."""

from __future__ import annotations

import re
from pathlib import Path

from autopar.errors import DocumentError
from autopar.patterns import INT
from autopar.sidecar import DocumentKind

__all__ = ["hardware_file_name", "hardware_shapes", "shape_of_name"]


def hardware_file_name(kind: DocumentKind, num_nodes: int, gpus_per_node: int) -> str:
    """Return the documented name of a hardware file."""
    if kind == "overlap":
        return "overlap_coefficient.json"
    stem = {"allreduce": "allreduce_bandwidth", "p2p": "p2p_bandwidth", "sp_time": "sp_time"}[kind]
    return f"{stem}_{num_nodes}nodes_{gpus_per_node}gpus_per_node.json"


def hardware_shapes(folder: Path | str) -> tuple[tuple[int, int], ...]:
    """Return (nodes, GPUs per node) of every all-reduce file in a folder, increasing.

    Raises
    ------
    DocumentError: the folder cannot be read.
    """
    folder = Path(folder)
    try:
        found = [shape_of_name(path.name) for path in folder.iterdir()]
    except OSError as error:
        raise DocumentError(
            folder, f"this folder cannot be read ({error.strerror})", remedy="check its permissions"
        ) from None
    return tuple(sorted(shape for shape in found if shape is not None))


def shape_of_name(name: str) -> tuple[int, int] | None:
    """Return (nodes, GPUs per node) of the documented name of an all-reduce file, else None."""
    match = re.fullmatch(rf"allreduce_bandwidth_({INT})nodes_({INT})gpus_per_node\.json", name)
    return (int(match[1]), int(match[2])) if match else None

"""Tells whether a counted memory file that came with a model already says what a run would count.

Counting is exact: the same model, precision, torch and implementation of tensor parallelism give
the same bytes, so that such a file need be neither counted again nor replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from autopar.errors import DocumentError
from autopar.model import ModelSpec
from autopar.model_measurements import TensorKind
from autopar.sidecar import read_sidecar
from profiler.hardware.storage import read_document
from profiler.metadata import Metadata
from profiler.model.cells import ModelCell
from profiler.model.documents import derive_memory
from profiler.model.metadata import model_differences

__all__ = ["is_counted"]


def is_counted(
    path: Path,
    cells: Sequence[ModelCell],
    spec: ModelSpec,
    *,
    metadata: Metadata,
    kinds: tuple[TensorKind, TensorKind],
) -> bool:
    """Return whether the file of another command counted everything that these cells would give.

    path : the documented file. cells : of the run, those of memory are looked at. kinds : as
    `derive_memory` takes them. Files that this command wrote itself are left to `--resume`.
    """
    try:
        sidecar = read_sidecar(path, "memory")
    except DocumentError:  # whoever writes the file says what is wrong with it
        return False
    there = read_document(path)
    if sidecar is None or sidecar.estimated or not sidecar.runs or there is None:
        return False
    now = {**metadata, "torch": _release(metadata)}
    for run in sidecar.runs:
        earlier = {**run.metadata, "torch": _release(run.metadata)}
        if run.id is not None or model_differences("memory", earlier, now):
            return False
    made_up = {
        cell.key: cell.filled().model_copy(
            update={"bytes": {"activation": 1.0, "peak": 1.0}, "num_parameters": 1}
        )
        for cell in cells
        if cell.quantity == "memory"
    }
    return bool(made_up) and _has_keys(there, derive_memory(made_up, spec, kinds).data)


def _release(metadata: Mapping[str, object]) -> str:
    """Return the version of torch without the device that it was built for."""
    return str(metadata.get("torch")).split("+")[0]


def _has_keys(there: object, wanted: object) -> bool:
    """Return whether every key of nested tables is in others."""
    if not isinstance(wanted, Mapping):
        return not isinstance(there, Mapping)
    return isinstance(there, Mapping) and all(
        key in there and _has_keys(there[key], value) for key, value in wanted.items()
    )

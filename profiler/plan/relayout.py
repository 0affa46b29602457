"""Activations between two layers that lie differently on the mesh of a stage."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from profiler.plan.layout import Layout

__all__ = ["local_shape", "relayout"]

_SEQUENCE, _BATCH = 0, 1


class _Known(logging.Filter):
    """Drops what torch says on every rank of redistributions that are meant as they are."""

    _TEXTS = (
        # gloo gathers everything and takes a piece: no other result, and CPU times are no promise
        "CPU process group does not support alltoall yet",
        # axis after axis, which only happens without sequence parallelism; groups of several axes
        # for DTensor's own use would be made through an interface that torch keeps to itself
        "While redistributing from",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith(self._TEXTS)


for _module in ("_collective_utils", "_redistribute"):
    logging.getLogger(f"torch.distributed.tensor.{_module}").addFilter(_Known())


def local_shape(layout: Layout, *, seq_length: int, batch: int, hidden: int) -> tuple[int, ...]:
    """Return the shape of a rank's activations, (sequence, batch, hidden).

    batch : samples of a micro-batch on all ranks together.
    """
    split = layout.degree if layout.splits_sequence else 1
    return (seq_length // split, batch // layout.data_degree, hidden)


def relayout(x: torch.Tensor, mesh: DeviceMesh, old: Layout, new: Layout) -> torch.Tensor:
    """Return activations of the old layout in the new one; backward goes the other way.

    Both gradients are whole where activations are replicated, as Megatron's functions leave them.
    """
    before, after = _placements(old), _placements(new)
    if before == after:
        return x
    whole = DTensor.from_local(x, mesh, before, run_check=False)
    result: torch.Tensor = whole.redistribute(placements=after).to_local()
    return result


def _placements(layout: Layout) -> list[Any]:
    along = Shard(_SEQUENCE) if layout.splits_sequence else Replicate()
    result: list[Any] = []
    for axis, size in enumerate(layout.cube.factors):
        if size == 1:
            result.append(Replicate())
        else:
            result.append(along if axis in layout.tensor_axes else Shard(_BATCH))
    return result

"""The module behind a cell of a spec, as a device holds it: what exact counts are held against.

It is built as for the count, but of real tensors: its collectives allocate what those of a real
group would, and exchange nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.model import ModelSpec
from profiler.model.blocks import build_layer, layer_inputs
from profiler.model.cells import ModelCell
from profiler.model.collectives import SoleRank
from profiler.model.halves import build_half
from profiler.model.options import Dtype, Unit
from profiler.model.outer import build_outer, outer_inputs
from profiler.model.sizes import with_seq_lengths
from profiler.model.timing import torch_dtype

__all__ = ["CellPart", "cell_part"]


@dataclass(frozen=True, kw_only=True)
class CellPart:
    """One part of a model at one size, ready to be built."""

    build: Callable[[], nn.Module]
    make_inputs: Callable[[], tuple[torch.Tensor, ...]]
    num_own: int
    """Leading inputs that belong to the part; others belong to somebody else."""


def cell_part(
    spec: ModelSpec, cell: ModelCell, *, unit: Unit, dtype: Dtype, device: torch.device | str
) -> CellPart:
    """Return the part of a memory cell; building it raises InputError for what cannot be built."""
    on: dict[str, Any] = {"dtype": torch_dtype(dtype), "device": device}
    group = SoleRank(cell.degree) if cell.degree > 1 else None
    if cell.part == "layer":
        layer = replace(spec.layers[cell.layer_type or 0], seq_length=cell.seq_lengths[0])
        return CellPart(
            build=lambda: (
                build_layer(layer, cell.sharding, group=group, **on)
                if unit == "all"
                else build_half(layer, cell.sharding, unit, group=group, **on)
            ),
            make_inputs=lambda: layer_inputs(
                layer,
                cell.sharding,
                batch=cell.batch,
                encoder_seq_length=cell.encoder_seq_length,
                **on,
            ),
            num_own=1,
        )
    sized, part = with_seq_lengths(spec, cell.seq_lengths), cell.part
    how: dict[str, Any] = {"degree": cell.degree, "kind": cell.kind, **on}
    return CellPart(
        build=lambda: build_outer(sized, part, group=group, **how),
        make_inputs=lambda: outer_inputs(sized, part, batch=cell.batch, **how),
        num_own=len(sized.layers) + 1,
    )

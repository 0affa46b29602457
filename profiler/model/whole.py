"""Times what surrounds the layers of a model, and whole forwards of models with few layers.

Whole forwards are what the documented raw keys `layernum[...]` hold, and what a layer measured
alone is checked against: the difference of two of them is a layer among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autopar.model import ModelSpec
from autopar.model_measurements import TensorKind
from profiler.measure import Policy
from profiler.model.local_group import timed_group
from profiler.model.outer import OuterPart, build_outer, outer_inputs
from profiler.model.sizes import seqs_text, with_seq_lengths
from profiler.model.stack import build_stack
from profiler.model.timing import Timed, time_module, torch_dtype
from profiler.timers import Timer

__all__ = ["time_outer", "time_stack"]


def time_outer(
    spec: ModelSpec,
    *,
    part: OuterPart = "only",
    degree: int = 1,
    kind: TensorKind = "sp",
    batch: int,
    seq_lengths: tuple[int, ...],
    dtype: str,
    device: torch.device,
    policy: Policy,
    backward: bool = True,
    optimizer: bool = True,
    timer: Timer | None = None,
) -> Timed:
    """Return the times of embedding, head and loss on one rank of a vocabulary group.

    seq_lengths : of all layer types. Collectives cost nothing here (see `LocalGroup`). Nothing
    of it is ever recomputed. Raises InputError for what cannot be laid out like this.
    """
    sized = with_seq_lengths(spec, seq_lengths)
    element = torch_dtype(dtype)
    return time_module(
        lambda: build_outer(
            sized,
            part,
            degree=degree,
            kind=kind,
            group=timed_group(degree),
            dtype=element,
            device=device,
        ),
        lambda: outer_inputs(
            sized, part, degree=degree, kind=kind, batch=batch, dtype=element, device=device
        ),
        policy,
        device,
        where=f"batch {batch}, sequence {seqs_text(seq_lengths)}",
        backward=backward,
        checkpoint=False,
        optimizer=optimizer,
        timer=timer,
    )


def time_stack(
    spec: ModelSpec,
    num_layers: Sequence[int],
    *,
    batch: int,
    seq_lengths: tuple[int, ...],
    dtype: str,
    device: torch.device,
    policy: Policy,
    timer: Timer | None = None,
) -> Timed:
    """Return the times of the whole forward of a model with so many layers of each type.

    seq_lengths : of all layer types. Autograd is on, as it is where a layer is timed alone.
    Raises InputError for what cannot be built.
    """
    sized = with_seq_lengths(spec, seq_lengths)
    layers = (
        replace(layer, num_layers=count)
        for layer, count in zip(sized.layers, num_layers, strict=True)
    )
    sized = replace(sized, layers=tuple(layers))
    element = torch_dtype(dtype)
    counts = seqs_text(tuple(num_layers))
    return time_module(
        lambda: build_stack(sized, dtype=element, device=device).module,
        lambda: outer_inputs(sized, "only", batch=batch, dtype=element, device=device),
        policy,
        device,
        where=f"batch {batch}, sequence {seqs_text(seq_lengths)}, {counts} layers",
        backward=False,
        checkpoint=False,
        optimizer=False,
        timer=timer,
    )

"""What measuring a model leaves in a sidecar: raw figures by cell, and the times made of them.

A `ModelMeasurement` is one cell of `profile-model`; statistics are computed on read. `LayerTimes`
is the summary that the planner reads where documented keys cannot express it: backward apart from
forward, layers sharded over a tensor group, recomputation, spread.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autopar.measurements import BytesOrZero, Seconds
from autopar.patterns import StrictObject

__all__ = ["LayerTimes", "ModelMeasurement", "OtherTimes", "Part", "TensorKind"]

Part = Literal["layer", "only", "first", "last"]
"""A layer, or what surrounds the layers: on the only stage, the first or the last of several."""
TensorKind = Literal["tp", "sp", "dtensor", "dtensor_sp", "ulysses"]
"""Tensor parallelism without and with Megatron's sequence parallelism, each also as DTensor does
it, and Ulysses sequence parallelism; all the same at degree 1."""


class ModelMeasurement(StrictObject):
    """One cell: a part of the model at one size, sharded one way."""

    key: str
    """Unique name, such as `time_layertype_0_bsz1_seq2048_tp2_sp`."""
    quantity: Literal["time", "memory"]
    part: Part
    layer_type: int | None = None
    """Index of the layer's type; None for what is not a layer."""
    batch: int
    seq_lengths: list[int]
    """Of the layer's type; of all types for what is not a layer."""
    degree: int = 1
    """Tensor, Ulysses or vocabulary degree."""
    kind: TensorKind = "sp"
    checkpoint: Literal["none", "full", "selective"] = "none"
    num_layers: list[int] | None = None
    """Of a whole forward: the layers of each type that it had, besides the part around them."""
    source: Literal["device", "exact"]
    """Measured on a device, or counted without one."""
    status: Literal["ok", "failed", "skipped"]
    reason: str | None = None
    """Why it failed or was skipped; `out of memory` is a failure with a reason."""
    samples_s: dict[str, list[Seconds]] = Field(default_factory=dict)
    """Seconds for the whole batch by `forward`, `backward`, `recompute`, `optimizer`."""
    bytes: dict[str, BytesOrZero] = Field(default_factory=dict)
    """Bytes on a rank for the whole batch by `parameters` (bytes of the parameters in the
    measured type), `activation` (kept from forward to backward), `peak` (above what is kept)."""
    num_parameters: int | None = None
    """Parameters on the rank."""
    notes: list[str] = Field(default_factory=list)
    elapsed_s: float = 0.0


class LayerTimes(StrictObject):
    """Median times of one layer at one size on a rank, in seconds for the whole batch."""

    layer_type: int
    batch: int
    seq_length: int
    degree: int = 1
    kind: str = "sp"
    """A `TensorKind`; readers leave out those that they do not know."""
    forward_s: Seconds
    backward_s: Seconds | None = None
    recompute_s: Seconds | None = None
    """Forward again inside the backward, where the layer is checkpointed."""
    optimizer_s: Seconds | None = None
    forward_low_s: Seconds | None = None
    forward_high_s: Seconds | None = None
    """5th and 95th percentile of the samples."""
    backward_low_s: Seconds | None = None
    backward_high_s: Seconds | None = None
    recompute_low_s: Seconds | None = None
    recompute_high_s: Seconds | None = None


class OtherTimes(StrictObject):
    """Median times of everything that is not a layer, in seconds for the whole batch."""

    batch: int
    seq_lengths: list[int]
    """Of all layer types."""
    forward_s: Seconds
    backward_s: Seconds | None = None
    forward_low_s: Seconds | None = None
    forward_high_s: Seconds | None = None
    """5th and 95th percentile of the samples."""
    backward_low_s: Seconds | None = None
    backward_high_s: Seconds | None = None

"""What measuring a model leaves in a sidecar: raw figures by cell, and the times made of them.

A `ModelMeasurement` is one cell of `profile-model`; statistics are computed on read. `LayerTimes`
is the summary that the planner reads where documented keys cannot express it: backward apart from
forward, layers sharded over a tensor group, recomputation, spread. A `TimeFit` says how well a
formula goes through such times, and how sure it is.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from autopar.measurements import BytesOrZero, Seconds, SecondsOrZero
from autopar.patterns import StrictObject

__all__ = [
    "FitCell",
    "Form",
    "LayerTimes",
    "ModelMeasurement",
    "OtherTimes",
    "Part",
    "TensorKind",
    "Term",
    "TimeCoefficients",
    "TimeFit",
]

Part = Literal["layer", "only", "first", "last"]
"""A layer, or what surrounds the layers: on the only stage, the first or the last of several."""
TensorKind = Literal["tp", "sp", "dtensor", "dtensor_sp", "ulysses"]
"""Tensor parallelism without and with Megatron's sequence parallelism, each also as DTensor does
it, and Ulysses sequence parallelism; all the same at degree 1."""

Form = Literal["static", "batch", "sequence"]
"""Of a fit: proportional to the batch, with a launch cost, or also over sequence lengths."""
Term = Literal["launch_s", "s_per_sample", "s_per_token", "s_per_token_squared"]
"""Of a fit, with its unit: seconds of a launch, then seconds times b, b*s and b*s^2 of a batch of b
samples of s tokens each."""


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


class TimeCoefficients(StrictObject):
    """Non-negative coefficients of a fit; None for terms that its times cannot tell apart."""

    launch_s: SecondsOrZero | None = None
    """Seconds that neither batch nor length changes."""
    s_per_sample: SecondsOrZero | None = None
    s_per_token: SecondsOrZero | None = None
    """Seconds per token of every sample."""
    s_per_token_squared: SecondsOrZero | None = None
    """Seconds per square of the tokens of a sample, for every sample."""


class FitCell(StrictObject):
    """One time that a fit goes through, or near."""

    batch: int
    seq_lengths: list[int]
    """Of the layer's type; of all types for what is not a layer."""
    measured_s: SecondsOrZero
    """Median of the samples, for the whole batch; 0 for a difference of which nothing is left."""
    fitted_s: SecondsOrZero
    fitted_low_s: SecondsOrZero | None = None
    fitted_high_s: SecondsOrZero | None = None
    """90 % interval of the fit here; None where the samples cannot tell."""
    relative: float
    """Fitted over measured time, less 1; times below a thousandth of the longest count as that."""


class TimeFit(StrictObject):
    """The fit of one time over its cells: launch_s + b*(s_per_sample + s_per_token*s + ...)."""

    layer_type: int | None = None
    """None for everything that is not a layer; s is then the sum of all types' lengths."""
    time: Literal["forward", "backward", "recompute"]
    degree: int = 1
    kind: str = "sp"
    """A `TensorKind`."""
    form: Form
    coefficients: TimeCoefficients
    low: TimeCoefficients | None = None
    high: TimeCoefficients | None = None
    """90 % intervals by a bootstrap over the raw samples; None where a cell has only one."""
    cells: list[FitCell]
    worst_relative: float
    """Of the cell that is farthest from the fit, with its sign."""
    batches: list[int]
    """Smallest and largest that were measured."""
    tokens: list[int]
    """Shortest and longest s that were measured."""
    usable_batch: int
    usable_tokens: int
    """Largest b and s that the fit may be used for; at one length this and no other."""

"""The file of a launch with one set of degrees: what it was searched for, every degree, a forecast.

Read and written strictly; what a launch is made of again is `search.uniform`'s.
"""

from __future__ import annotations

from typing import Any, Literal

from autopar.documents.checks import StrictObject, published

__all__ = ["FORMAT", "DegreesEntry", "HardwareEntry", "LaunchDocument", "LaunchEntry"]

FORMAT = "autopar-launch"


class DegreesEntry(StrictObject):
    """Every degree and setting of a launch."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int
    edp: int
    """Ranks that hold the same experts; of a model without them those of a layer."""
    vpp: int
    schedule: str
    zero: int
    micro_batch_size: int
    num_microbatches: int
    global_batch_size: int
    precision: Literal["bf16", "fp8", "fp8-blockwise", "mxfp8"]
    recompute: str
    dispatcher: Literal["alltoall", "flex"]
    overlap_experts: bool
    layers_of_chunks: list[list[int]]
    """Of every stage, the layers of each of its chunks."""


class HardwareEntry(StrictObject):
    """The cluster."""

    card: str
    num_nodes: int
    num_gpus_per_node: int


class LaunchEntry(StrictObject):
    """A launch, and what is predicted of it."""

    engine: str
    degrees: DegreesEntry
    samples_per_s: float
    predicted: dict[str, Any]
    """Seconds, bytes and shares: as `autopar check --json` has them."""


@published("launch")
class LaunchDocument(StrictObject):
    """A launch of a trainer with one set of degrees, as `autopar-search` writes it."""

    format: Literal["autopar-launch"]
    version: Literal[1]
    autopar: str
    status: Literal["optimal", "infeasible"]
    request: dict[str, Any]
    """Options of the search, as typed."""
    model: str
    hardware: HardwareEntry
    seq_length: int
    launch: LaunchEntry | None
    assumed: list[str]

"""The file of a launch with one set of degrees: what it was searched for, every degree, a forecast.

Read and written strictly; what a launch is made of again is `search.planning.uniform`'s.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import field

from autopar.documents.checks import published
from autopar.documents.plan import EngineEntry
from autopar.pipeline.schedules import Schedule
from autopar.records import Record, whole_number
from autopar.run.runtime import Trainer

FORMAT = "autopar-launch"
_Count = Annotated[int, whole_number(1, 1 << 28)]
_Layers = Annotated[int, whole_number(0, 1 << 16)]


class DegreesEntry(Record):
    """Every degree and setting of a launch."""

    tp: _Count
    """Tensor ranks, with sequence parallelism."""
    tp_overlap: bool
    """Products run beside the transfers of tensor ranks."""
    cp: _Count
    """Context ranks."""
    cp_kind: Literal["ring", "all-gather", "a2a"]
    """Whether they pass keys and values on, exchange heads for tokens (Ulysses), or gather."""
    pp: _Count
    """Pipeline stages."""
    dp: _Count
    """Data ranks of dense layers: tp * cp * pp * dp GPUs."""
    ep: _Count
    """Ranks over which experts are spread."""
    etp: _Count
    """Ranks that share the widths of an expert."""
    edp: _Count
    """Ranks that hold the same experts; of a model without them those of a layer."""
    vpp: _Count
    """Chunks of layers of a stage."""
    schedule: Schedule
    """Order of the micro-batches of a pipeline."""
    zero: Literal[0, 1, 2, 3]
    """0: replicas; 1 to 3: optimizer, gradients, weights as well are sharded."""
    dp_replicate: _Count
    """Copies of what is sharded (HSDP, instances of a distributed optimizer)."""
    micro_batch_size: _Count
    """Sequences of a micro-batch on one data rank."""
    num_microbatches: _Count
    """Of a step, in each pipeline."""
    global_batch_size: _Count
    """Sequences of a step."""
    precision: Literal["bf16", "fp8", "fp8-blockwise", "mxfp8", "nvfp4"]
    """Of products."""
    compiled: bool = False
    """Each layer, and the loss, by torch.compile."""
    recompute: str
    """`none`, `full`, `op`, `block N`, or modules joined by `+`."""
    offload: str = "none"
    """Modules of each layer whose activations wait on the host, joined by `+`, or `none`."""
    dispatcher: Literal["alltoall", "flex"]
    overlap_experts: bool
    """Exchanges of one micro-batch run beside the compute of another."""
    layers_of_chunks: list[list[_Layers]]
    """Of every stage, the layers of each of its chunks."""


class HardwareEntry(Record):
    """The cluster."""

    card: str
    """Name of the device's datasheet."""
    num_nodes: _Count
    """Machines."""
    num_gpus_per_node: _Count
    """Of each machine."""


class LaunchEntry(Record):
    """A launch, and what is predicted of it."""

    engine: Trainer
    """Trainer that it is of."""
    degrees: DegreesEntry
    settings: dict[str, Any] = field(default_factory=dict)
    """What it says otherwise than its trainer does by itself, by dotted field of the launch."""
    samples_per_s: float
    """Of all GPUs together."""
    predicted: dict[str, Any]
    """Seconds, bytes and shares: as `autopar check --json` has them."""


_EXAMPLE: dict[str, Any] = {
    "format": FORMAT,
    "version": 1,
    "autopar": "0.1.0",
    "status": "optimal",
    "request": {"model": "mixtral-8x7b", "hardware": "h100:1x8", "tp": "2", "ep": "4"},
    "model": "mixtral-8x7b",
    "hardware": {"card": "h100-80gb", "num_nodes": 1, "num_gpus_per_node": 8},
    "seq_length": 4096,
    "launch": {
        "engine": "megatron",
        "degrees": {
            "tp": 2,
            "tp_overlap": True,
            "cp": 1,
            "cp_kind": "ring",
            "pp": 2,
            "dp": 2,
            "ep": 4,
            "etp": 1,
            "edp": 1,
            "vpp": 2,
            "schedule": "interleaved",
            "zero": 1,
            "dp_replicate": 1,
            "micro_batch_size": 1,
            "num_microbatches": 32,
            "global_batch_size": 64,
            "precision": "bf16",
            "recompute": "layernorm",
            "dispatcher": "flex",
            "overlap_experts": True,
            "layers_of_chunks": [[8, 8], [8, 8]],
        },
        "samples_per_s": 9.5,
        "predicted": {"step_time_s": 6.7},
    },
    "assumed": ["--moe-skew 1 (tokens are spread evenly over experts)"],
}


@published("launch", example=_EXAMPLE)
class LaunchDocument(Record):
    """A launch of a trainer with one set of degrees, as `autopar-search` writes it."""

    format: Literal["autopar-launch"]
    version: Literal[1]
    autopar: str
    """Release that wrote it."""
    status: Literal["optimal", "infeasible", "evaluated"]
    """Whether the launch is the fastest that fits, or one that somebody had."""
    request: dict[str, Any]
    """Options of the search, as typed."""
    model: str
    """Its name."""
    hardware: HardwareEntry
    seq_length: _Count
    """Tokens of a sequence."""
    launch: LaunchEntry | None
    """None: nothing fits."""
    assumed: list[str]
    """Defaults that nobody had said otherwise, one sentence each."""
    engines: list[EngineEntry] = field(default_factory=list)
    """Each one's own best launch or plan, from the fastest on, where several were looked at."""

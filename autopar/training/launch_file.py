"""Result of a search for uniform plans: options, degrees, settings, predicted time and memory.

`--json` prints this object. Earlier releases wrote it as the file of a uniform plan; such files are
still read, and `search.planning.uniform` converts them to runs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, field

from autopar.documents.checks import published
from autopar.documents.plan import EngineEntry, HardwareEntry, TypedOption
from autopar.pipeline.schedules import Schedule
from autopar.records import Record, whole_number
from autopar.run.plan import Module
from autopar.run.runtime import Trainer
from autopar.run.strategy import OFFLOADED

FORMAT = "autopar-launch"
_Count = Annotated[int, whole_number(1, 1 << 28)]
_Layers = Annotated[int, whole_number(0, 1 << 16)]


def _words(others: tuple[str, ...], modules: tuple[str, ...]) -> Meta:
    """Return the annotation of a text: `none`, one of `others`, or modules joined by `+`.

    others : regular expressions of other valid texts.
    """
    one = f"({'|'.join(modules)})"
    shown = ", ".join(("none", *others)).replace("[1-9][0-9]{0,8}", "N")
    return Meta(
        pattern=f"^({'|'.join(('none', *others))}|{one}([+]{one})*)$",
        extra={"expected": f"{shown}, or modules joined by + ({', '.join(modules)})"},
    )


class DegreesEntry(Record):
    """Parallel degrees and main settings of a uniform plan."""

    tp: _Count
    """Tensor-parallel degree; sequence parallelism is on."""
    tp_overlap: bool
    """True if GEMMs overlap with tensor-parallel communication."""
    cp: _Count
    """Context-parallel degree."""
    cp_kind: Literal["ring", "all-gather", "a2a"]
    """Context-parallel communication: ring attention, all-gather, or all-to-all (Ulysses)."""
    pp: _Count
    """Number of pipeline stages."""
    dp: _Count
    """Data-parallel degree of dense layers; tp * cp * pp * dp GPUs."""
    ep: _Count
    """Expert-parallel degree."""
    etp: _Count
    """Tensor-parallel degree of each expert."""
    edp: _Count
    """Number of ranks with the same experts; for dense models with the same layer."""
    vpp: _Count
    """Virtual pipeline size: model chunks per stage."""
    schedule: Schedule
    """Pipeline schedule."""
    zero: Literal[0, 1, 2, 3]
    """ZeRO stage. 0: replicas; 1: sharded optimizer; 2: also gradients; 3: also weights."""
    dp_replicate: _Count
    """Number of HSDP replicas, or of distributed-optimizer instances."""
    micro_batch_size: _Count
    """Sequences of a micro-batch on one data-parallel rank."""
    num_microbatches: _Count
    """Number of micro-batches per step and pipeline."""
    global_batch_size: _Count
    """Sequences per step."""
    precision: Literal["bf16", "fp8", "fp8-blockwise", "mxfp8", "nvfp4"]
    """Precision of GEMMs."""
    compiled: bool = False
    """True if each layer and the loss are compiled by torch.compile."""
    recompute: Annotated[str, _words(("full", "op", "block [1-9][0-9]{0,8}"), get_args(Module))]
    """`none`, `full`, `op`, `block N`, or modules joined by `+`."""
    offload: Annotated[str, _words((), OFFLOADED)] = "none"
    """Modules of each layer with offloaded activations, joined by `+`, or `none`."""
    dispatcher: Literal["alltoall", "flex"]
    overlap_experts: bool
    """True if dispatch and combine of one micro-batch overlap with the compute of another."""
    layers_of_chunks: list[list[_Layers]]
    """Number of layers of each chunk, for every stage."""


class LaunchEntry(Record):
    """Uniform plan with its predicted time and memory."""

    engine: Trainer
    """Engine of the run."""
    degrees: DegreesEntry
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from the engine's defaults, by dotted field of the run."""
    samples_per_s: float
    """Samples per second of all GPUs together."""
    predicted: dict[str, Any]
    """Predicted seconds, bytes and shares, in the format of `autopar check --json`."""


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
    """Uniform plan printed by `--json`; earlier releases wrote files with equal keys."""

    format: Literal["autopar-launch"]
    version: Literal[1]
    autopar: str
    """Release that wrote the file."""
    status: Literal["optimal", "within_gap", "time_limit", "infeasible", "evaluated"]
    """`optimal` for the fastest plan that fits, `within_gap` for one within `--gap` of it,
    `time_limit` for the best so far, `evaluated` for a given one, `infeasible` for none."""
    request: dict[str, TypedOption]
    """Options of the search as the user typed them."""
    model: str
    """Name of the model."""
    hardware: HardwareEntry
    seq_length: _Count
    """Tokens per sequence."""
    launch: LaunchEntry | None
    """Best plan; null if no plan fits."""
    assumed: list[str]
    """Defaults that the user did not override, one sentence each."""
    engines: list[EngineEntry] = field(default_factory=list)
    """Best plan of each engine, fastest first, if several were searched."""

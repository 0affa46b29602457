"""Input documents of the Calculon model: application, system, execution.

Files of the published Calculon are read unchanged. Unknown keys, such as a name or a comment, are
ignored in applications. In executions and systems they are rejected, because a misspelt key would
silently change the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, get_type_hints

from msgspec import Meta

from autopar.documents.json import value_reader
from autopar.records import KeyFault, Record, number, shorten, whole_number
from autopar.units import GIB
from search.closed_form import LARGEST_RATE, LONGEST_S, SMALLEST_RATE

DATATYPE_BYTES = {"float8": 1, "float16": 2, "bfloat16": 2, "float32": 4}
CHOICES = {
    "datatype": tuple(DATATYPE_BYTES),
    "attention_type": ("multihead", "multiquery", "flash"),
    "activation_recompute": ("none", "attn_only", "full"),
    "tensor_par_comm_type": ("ar", "p2p_rs_ag", "rs_ag"),
    "tensor_par_overlap": ("none", "ring", "pipe"),
    "structure_type": ("gpt", "llama"),
}
"""Accepted words of each execution key, in the order of their codes in the compiled engine."""

OPERATIONS = ("p2p", "reduce_scatter", "all_gather", "all_reduce")
"""Names of network operations, in the order of the compiled engine."""


def _flag(value: object) -> bool:
    if type(value) not in (bool, int) or value not in (0, 1):
        raise KeyFault("", f"the value is {shorten(value)}, expected true or false")
    return bool(value)


_Flag = Annotated[bool, value_reader(_flag, "true or false", bool)]
_Count = Annotated[int, whole_number(1, 10**9)]
_MOST = 2**31 - 1
_Whole = Annotated[int, Meta(le=_MOST, extra={"expected": f"a whole number of at most {_MOST}"})]
"""Integer that fits in a packed execution; the engine rejects values below 1."""
_Place = Annotated[int, whole_number(0, _MOST)]


class Application(Record, forbid_unknown_fields=False):
    """Sizes of a transformer: its blocks, and optionally embedding and head."""

    hidden: _Count
    feedforward: _Count
    seq_size: _Count
    """Sequence length, tokens."""
    attn_heads: _Count
    attn_size: _Count
    """Head dimension, elements."""
    num_blocks: _Count
    attn_kv_heads: _Count | None = None
    """Key-value heads (grouped-query attention); None for as many as attention heads."""
    vocab_size: Annotated[int, whole_number(0, 10**9)] = 0
    """Vocabulary size, tokens; 0 excludes embedding, head and loss."""
    tied_embeddings: _Flag = False
    causal: _Flag = True
    """True if flash attention skips the scores that a causal mask hides."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters, assuming a vocabulary of 51,200 tokens and learned positions."""
        h, f, width = self.hidden, self.feedforward, self.attn_heads * self.attn_size
        # Matrices of MLP and attention, their biases, gain and bias of two norms.
        block = 2 * h * f + 4 * h * width + h + f + 3 * width + h + 4 * h
        return self.num_blocks * block + (51200 + self.seq_size) * h


class Execution(Record):
    """Settings of a run: degrees, network tiers, batch, overlap and offload."""

    num_procs: _Whole
    tensor_par: _Whole
    pipeline_par: _Whole
    data_par: _Whole
    tensor_par_net: _Place
    """Index of the tier in `System.networks` that tensor parallelism uses; the next two keys are
    those of pipeline and data parallelism."""
    pipeline_par_net: _Place
    data_par_net: _Place
    batch_size: _Whole
    microbatch_size: _Whole
    datatype: str
    fused_activation: _Flag
    attention_type: str
    activation_recompute: str
    pipeline_interleaving: _Whole
    optimizer_sharding: _Flag
    tensor_par_comm_type: str
    tensor_par_overlap: str
    seq_par_ag_redo: _Flag
    data_par_overlap: _Flag
    weight_offload: _Flag
    activations_offload: _Flag
    optimizer_offload: _Flag
    training: _Flag = True
    structure_type: str = "gpt"
    """'gpt' for LayerNorm, GELU and dropout, 'llama' for RMSNorm and a gated SiLU."""

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the data; a missing `num_procs` becomes the product of the degrees."""
        if "num_procs" in data:
            return data
        degrees = [data.get(f"{name}_par") for name in ("tensor", "pipeline", "data")]
        # A missing or non-integer degree is refused under its own name.
        if any(type(degree) is not int for degree in degrees):
            return data
        return {**data, "num_procs": math.prod(degrees)}


_HINTS = get_type_hints(Execution)
WHOLE_NUMBERS = frozenset(name for name, kind in _HINTS.items() if kind is int)
"""Names of the integer fields of an execution; the others are words and flags."""

_Peak = Annotated[float, number(SMALLEST_RATE, LARGEST_RATE, "TFLOP/s")]
"""Rate in the range that keeps times finite and above 0."""
_Bandwidth = Annotated[float, number(SMALLEST_RATE, LARGEST_RATE, "GB/s")]
_Share = Annotated[float, number(SMALLEST_RATE, 1)]
_Curve = list[Annotated[list[float], Meta(min_length=2, max_length=2)]]


class _Engine(Record):
    tflops: _Peak
    gflops_efficiency: _Curve


class _Memory(Record):
    GiB: Annotated[float, number(0, LARGEST_RATE, "GiB")]
    GBps: _Bandwidth
    MB_efficiency: _Curve


class _Network(Record):
    bandwidth: _Bandwidth
    efficiency: _Share
    size: _Count
    """Maximum number of processors that the network connects."""
    latency: Annotated[float, number(0, LONGEST_S, "s")]
    """Latency of every operation, seconds."""
    ops: dict[str, Annotated[list[float | None], Meta(min_length=2, max_length=2)]]
    """Operation -> (scalar, offset): traffic over g ranks is bytes * scalar * (1 + offset / g)."""
    must_be_filled: _Flag
    processor_usage: Annotated[float, Meta(ge=0, lt=1, extra={"expected": "a share below 1"})]
    """Fraction of the processor that a running network operation occupies."""

    @property
    def bytes_per_s(self) -> float:
        """Achieved bandwidth, bytes/s."""
        # 1 GB/s is 1e9 bytes/s.
        return self.bandwidth * 1e9 * self.efficiency

    def __post_init__(self) -> None:
        for operation, (scalar, offset) in self.ops.items():
            if operation not in OPERATIONS:
                raise KeyFault(
                    f"ops.{operation}",
                    f"unknown operation, expected one of {', '.join(OPERATIONS)}",
                )
            if scalar is None or not scalar > 0:
                raise KeyFault(
                    f"ops.{operation}", f"Invalid network scalar for {operation}: {scalar}"
                )
            if not SMALLEST_RATE <= scalar <= LARGEST_RATE or (offset or 0.0) > LARGEST_RATE:
                raise KeyFault(
                    f"ops.{operation}",
                    f"the value is {shorten([scalar, offset])}, expected a scalar from "
                    f"{SMALLEST_RATE:g} to {LARGEST_RATE:g} and an offset of at most the latter",
                )
            if operation == "p2p" and offset is not None:
                raise KeyFault(f"ops.{operation}", f"Can't give offset for {operation}")
            if operation != "p2p" and offset is None:
                raise KeyFault(f"ops.{operation}", f"Must give offset for {operation}")
            if offset is not None and offset < -2:
                raise KeyFault(
                    f"ops.{operation}",
                    f"the offset is {offset}, expected at least -2: traffic between two processors "
                    "would be negative",
                )
        for operation in OPERATIONS:
            if operation not in self.ops:
                raise KeyFault(f"ops.{operation}", "this key is missing and is required")


class System(Record):
    """A machine: compute rates by datatype, two memories, and network tiers.

    An efficiency curve is a list of [smallest size, efficiency] in descending order, ending at 0.
    """

    matrix: dict[str, _Engine]
    """Rates of the matrix units (tensor cores), by datatype."""
    vector: dict[str, _Engine]
    """Rates of the vector units, by datatype."""
    mem1: _Memory
    """Device memory."""
    mem2: _Memory
    """Memory for offload, such as host memory."""
    processing_mode: Literal["no_overlap", "roofline"]
    """'roofline' takes the maximum of compute and memory time, 'no_overlap' the sum."""
    networks: Annotated[list[_Network], Meta(min_length=1)]
    """Network tiers; executions refer to them by index."""

    def __post_init__(self) -> None:
        for name in ("matrix", "vector"):
            for datatype, engine in getattr(self, name).items():
                _check_curve(engine.gflops_efficiency, name, datatype, "gflops_efficiency")
        for name in ("mem1", "mem2"):
            _check_curve(getattr(self, name).MB_efficiency, name, "MB_efficiency")

    def memory_bytes(self, tier: Literal[1, 2]) -> float:
        """Return the capacity of memory 1 or 2, bytes."""
        # A GiB is 2^30 bytes, while rates and curve sizes use powers of 10.
        return (self.mem1 if tier == 1 else self.mem2).GiB * GIB


def _check_curve(curve: _Curve, *key: str) -> None:
    sizes = [size for size, _ in curve]
    if not curve or sizes[-1] != 0:
        raise KeyFault(".".join(key), "the last step of a curve is not at 0")
    if any(a <= b for a, b in pairwise(sizes)):
        raise KeyFault(".".join(key), f"the sizes are {shorten(sizes)}, expected a descending list")
    if any(not 0 < share <= 1 for _, share in curve):
        raise KeyFault(".".join(key), "an efficiency is not in (0, 1]")
    if any(share < SMALLEST_RATE for _, share in curve):
        raise KeyFault(".".join(key), f"an efficiency is below {SMALLEST_RATE:g}")

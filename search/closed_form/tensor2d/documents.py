"""Input documents of the two-dimensional model: model, system and candidate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from autopar.records import Entry, KeyFault, Record, number, whole_number
from search.closed_form import LARGEST_RATE, LONGEST_S, SMALLEST_RATE

Strategy = Literal["1d", "2d", "2d-seqp"]
STRATEGIES: tuple[Strategy, ...] = ("1d", "2d", "2d-seqp")
"""Tensor parallelism over heads; SUMMA over rows and columns; heads with context parallelism."""
Attention = Literal["flash", "plain", "summa"]
ATTENTIONS: tuple[Attention, ...] = ("flash", "plain", "summa")
"""Attention: scores not stored; scores stored; scores stored and SUMMA GEMMs in attention."""

_Count = Annotated[int, whole_number(1, 10**9)]
# Beyond these limits a time would be infinite or NaN, and could not be ordered.
_Positive = Annotated[float, number(SMALLEST_RATE, LARGEST_RATE)]
_Share = Annotated[float, number(SMALLEST_RATE, 1)]
_Latency = Annotated[float, number(0, LONGEST_S, "s")]
_Peak = Annotated[float, number(SMALLEST_RATE, LARGEST_RATE, "TFLOP/s")]
_Bandwidth = Annotated[float, number(SMALLEST_RATE, LARGEST_RATE, "GB/s")]
_Capacity = Annotated[float, number(SMALLEST_RATE, LARGEST_RATE, "GB")]


class Model(Record):
    """Sizes of a transformer.

    The published model has only the first five fields. The defaults of the others do not change its
    results.
    """

    l: _Count  # noqa: E741
    """Sequence length, tokens."""
    e: _Count
    """Hidden size, elements."""
    h: _Count
    """Number of attention heads."""
    depth: _Count
    """Number of layers."""
    f: _Count
    """Feed-forward width, elements."""
    kv_heads: _Count | None = None
    """Key-value heads (grouped-query attention); None for as many as h."""
    causal: bool = False
    """True if flash attention skips the masked part of the scores; all GPUs skip equal amounts."""
    structure: Literal["gpt", "llama"] = "gpt"
    """'llama' for RMSNorm and a gated SiLU of width f, without biases and dropout."""
    vocab: Annotated[int, whole_number(0, 10**9)] = 0
    """Vocabulary size, tokens; 0 excludes embedding, head and loss."""
    tied: bool = False
    """True if embedding and output matrix share their weights."""
    gradient_bytes: Literal[2, 4] = 2
    """Gradient bytes per parameter; with weights and optimizer states 16 or 18 bytes in total."""

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the data; a missing feed-forward width becomes 4 * e."""
        if "f" not in data and type(data.get("e")) is int:
            return {**data, "f": 4 * data["e"]}
        return data

    def __post_init__(self) -> None:
        if self.e < self.h:
            raise KeyFault(
                "e",
                f"the value is {self.e}, expected at least h = {self.h}: heads would have no width",
            )
        if self.h % self.key_heads:
            raise KeyFault(
                "kv_heads", f"the value is {self.kv_heads}, expected a divisor of h = {self.h}"
            )

    @property
    def key_heads(self) -> int:
        """Number of key-value heads."""
        return self.kv_heads or self.h

    def published(self) -> Model:
        """Return this model with only the fields of the published model."""
        return Model(l=self.l, e=self.e, h=self.h, depth=self.depth, f=self.f)


class System(Record):
    """A machine with two network tiers: NVLink domains (`nvlink_`) and InfiniBand (`ib_`).

    Peaks are in TFLOP/s, bandwidths in GB/s, capacity in GB and latencies in seconds.
    """

    matrix_flops_fp16: _Peak
    vector_flops_fp16: _Peak
    vector_flops_fp32: _Peak | None = None
    hbm_bandwidth: _Bandwidth
    hbm_capacity: _Capacity
    nvlink_bandwidth: _Bandwidth
    nvlink_eff: _Share
    nvlink_latency: _Latency
    ib_bandwidth: _Bandwidth
    ib_eff: _Share
    ib_latency: _Latency
    nvlink_size: _Count
    nic_factor: _Positive = 1
    empirical: bool = False
    summa_nb: _Count = 4
    element_size: _Positive = 2e-9
    mask_element_size: _Positive = 1e-9
    flops_units: _Positive = 1e-12

    def __post_init__(self) -> None:
        if self.empirical:
            raise KeyFault(
                "empirical",
                "the value is true, but its measurement file is not published. Set it to false",
            )


_Whole = Annotated[int, Meta(ge=1, extra={"expected": "a positive integer"})]


class CandidateFile(Entry):
    """Content of a candidate file; command-line options supply missing keys.

    Field defaults are not used. `content` contains the given keys.
    """

    strategy: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    placement: dict[str, Any] = field(default_factory=dict)
    n_gpus: _Whole = 1
    global_batch_size: _Whole = 1

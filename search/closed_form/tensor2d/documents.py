"""Model, system and candidate of the two-dimensional model, as its users have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from autopar.records import Entry, KeyFault, Record, number, whole_number
from search.closed_form import LARGEST_RATE, LONGEST_S, SMALLEST_RATE

Strategy = Literal["1d", "2d", "2d-seqp"]
STRATEGIES: tuple[Strategy, ...] = ("1d", "2d", "2d-seqp")
"""Tensor parallelism over heads; SUMMA over rows and columns; heads beside context parallelism."""
Attention = Literal["flash", "plain", "summa"]
ATTENTIONS: tuple[Attention, ...] = ("flash", "plain", "summa")
"""Without scores in memory; with them; with them and products that are SUMMA, too."""

_Count = Annotated[int, whole_number(1, 10**9)]
# beyond these a time would be infinite, or no number, and no order is right
_Positive = Annotated[float, number(SMALLEST_RATE, LARGEST_RATE)]
_Share = Annotated[float, number(SMALLEST_RATE, 1)]
_Latency = Annotated[float, number(0, LONGEST_S)]


class Model(Record):
    """A transformer: sequence length l, hidden size e, heads h, layers, feed-forward width f.

    The other fields are not in the published model; as they are, none changes a figure.
    """

    l: _Count  # noqa: E741
    e: _Count
    h: _Count
    depth: _Count
    f: _Count
    kv_heads: _Count | None = None
    """Heads of keys and values (grouped-query attention); as many as h without."""
    causal: bool = False
    """Flash attention skips what a causal mask hides, evenly over the GPUs that divide it."""
    structure: Literal["gpt", "llama"] = "gpt"
    """'llama' for RMSNorm and a gated SiLU of width f, without biases and dropout."""
    vocab: Annotated[int, whole_number(0, 10**9)] = 0
    """Rows of embedding and output matrix; 0 leaves them, head and loss out."""
    tied: bool = False
    """Embedding and output matrix are one."""
    gradient_bytes: Literal[2, 4] = 2
    """Of a parameter's gradient: 16 or 18 bytes a parameter with weight and optimizer states."""

    @classmethod
    def prepared(cls, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give a width that is not said its usual one."""
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
        """Return the heads of keys and values."""
        return self.kv_heads or self.h

    def published(self) -> Model:
        """Return what the published model knows of this one."""
        return Model(l=self.l, e=self.e, h=self.h, depth=self.depth, f=self.f)


class System(Record):
    """A machine: peaks in TFLOP/s, bandwidths in GB/s, capacity in GB, two network tiers."""

    matrix_flops_fp16: _Positive
    vector_flops_fp16: _Positive
    vector_flops_fp32: _Positive | None = None
    hbm_bandwidth: _Positive
    hbm_capacity: _Positive
    nvlink_bandwidth: _Positive
    nvlink_eff: _Share
    nvlink_latency: _Latency
    ib_bandwidth: _Positive
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
                "the value is true, and its measurement file is not published; set it to false",
            )


_Whole = Annotated[int, Meta(ge=1, extra={"expected": "a positive integer"})]


class CandidateFile(Entry):
    """What a file says of a candidate; what is left out is said elsewhere.

    Nobody looks at the defaults: `content` has what was given.
    """

    strategy: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    placement: dict[str, Any] = field(default_factory=dict)
    n_gpus: _Whole = 1
    global_batch_size: _Whole = 1

"""Model and system of the two-dimensional tensor-parallel model, as its users have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from autopar.patterns import StrictObject, key_error

__all__ = ["STRATEGIES", "Model", "Strategy", "System"]

Strategy = Literal["1d", "2d", "2d-seqp"]
STRATEGIES: tuple[Strategy, ...] = ("1d", "2d", "2d-seqp")
"""Tensor parallelism over heads; SUMMA over rows and columns; heads beside context parallelism."""

_Count = Annotated[int, Field(ge=1, le=10**9)]
_Positive = Annotated[float, Field(gt=0)]
_Share = Annotated[float, Field(gt=0, le=1)]
_Latency = Annotated[float, Field(ge=0)]


class Model(StrictObject):
    """A transformer: sequence length l, hidden size e, heads h, layers, feed-forward width f."""

    l: _Count  # noqa: E741
    e: _Count
    h: _Count
    depth: _Count
    f: _Count

    @model_validator(mode="before")
    @classmethod
    def _default_width(cls, data: Any) -> Any:
        if isinstance(data, dict) and "f" not in data and type(data.get("e")) is int:
            return {**data, "f": 4 * data["e"]}
        return data


class System(StrictObject):
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

    @model_validator(mode="after")
    def _analytic(self) -> System:
        if self.empirical:
            raise key_error(
                "the value is true, and its measurement file is not published; set it to false",
                "empirical",
            )
        return self

"""What one measuring run leaves in a sidecar: raw samples by cell, and the curves made of them.

A `Measurement` is one cell of a sweep with every raw sample in seconds; statistics are computed on
read. `CurveData` is the summary that the planner reads: time over size with its spread.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from autopar.patterns import Quantity, StrictObject, key_error

__all__ = [
    "Bytes",
    "BytesOrZero",
    "BytesPerSecond",
    "CurveData",
    "Measurement",
    "Seconds",
    "SecondsOrZero",
    "Straggler",
]

Bytes = Annotated[
    float, Quantity(what="a size", unit="bytes", maximum=1e15, too_large="is beyond any device")
]
BytesPerSecond = Annotated[
    float,
    Quantity(
        what="a memory bandwidth",
        unit="bytes/s",
        minimum=1e6,
        maximum=1e15,
        too_large="is beyond any device",
        too_small="looks like GB/s or TB/s",
    ),
]
BytesOrZero = Annotated[
    float,
    Quantity(
        what="a size",
        unit="bytes",
        maximum=1e15,
        exclusive=False,
        too_large="is beyond any device",
    ),
]
Seconds = Annotated[
    float, Quantity(what="a time", unit="s", maximum=1e5, too_large="looks like milliseconds")
]
SecondsOrZero = Annotated[
    float,
    Quantity(
        what="a time",
        unit="s",
        maximum=1e5,
        exclusive=False,
        too_large="looks like milliseconds",
    ),
]
_Ratio = Annotated[
    float, Quantity(what="a ratio", unit="", maximum=1e9, too_large="is no ratio of two times")
]
_Operation = Annotated[str, Field(pattern="^[a-z][a-z0-9_]{0,40}$")]


class CurveData(StrictObject):
    """Times of one operation over message size, in base units, with their spread and fit."""

    operation: _Operation
    """allreduce, allgather, reducescatter: bytes of the full tensor; all2all: of a rank's own
    tensor; p2p: of the message."""
    group_size: int
    """Ranks of the group; for p2p the number of pipeline stages."""
    consecutive: bool = True
    """Ranks i*g .. i*g+g-1; otherwise i, i+W/g, i+2W/g, ..."""
    sizes_bytes: list[Bytes]
    times_s: list[Seconds]
    """Median of the slowest rank of the slowest group."""
    low_s: list[Seconds] | None = None
    """5th percentile of the samples."""
    high_s: list[Seconds] | None = None
    """95th percentile of the samples."""
    latency_s: SecondsOrZero | None = None
    """Intercept of the fit time = latency + size * seconds_per_byte."""
    seconds_per_byte: SecondsOrZero | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        smallest = 2 if self.operation != "memcopy" else 1
        if not smallest <= self.group_size <= 10**9:
            raise key_error(
                f"the value is {self.group_size}, expected a group of at least {smallest}",
                "group_size",
            )
        for name in ("times_s", "low_s", "high_s"):
            times = getattr(self, name)
            if times is not None and (len(self.sizes_bytes) != len(times) or not times):
                raise key_error(
                    f"there are {len(times)} times for {len(self.sizes_bytes)} sizes, "
                    "expected one time per size",
                    name,
                )
        if any(b <= a for a, b in zip(self.sizes_bytes, self.sizes_bytes[1:], strict=False)):
            raise key_error("the sizes are not increasing", "sizes_bytes")
        return self


class Straggler(StrictObject):
    """A rank whose groups were all much slower than the median group of its cell."""

    rank: int
    host: str
    ratio: _Ratio
    """The median time of its slowest group over that of the median group."""


class Measurement(StrictObject):
    """One cell of a sweep: what was measured, every raw sample, and how it ended."""

    key: str
    """Unique name, such as `allreduce_size_4_consec_0_33554432B`."""
    operation: _Operation
    group_size: int
    consecutive: bool = True
    size_bytes: BytesOrZero
    status: Literal["ok", "failed", "skipped"]
    reason: str | None = None
    """Why it failed or was skipped."""
    scope: Literal["one device", "intra-node", "inter-node"]
    samples_s: dict[str, list[Seconds]] = Field(default_factory=dict)
    """Seconds of one operation, by quantity. Collectives have `time`: of every repetition the
    slowest rank, in the group with the largest median."""
    loops: int = 1
    """Operations back to back in one repetition; a sample is their mean."""
    worst_group: list[int] = Field(default_factory=list)
    """Ranks of the group that the samples are of."""
    group_medians_s: list[Seconds] = Field(default_factory=list)
    """Median of every group, in the order of their first ranks."""
    stragglers: list[Straggler] = Field(default_factory=list)
    checked: bool = False
    """True when the operation's result was compared with the expected one."""
    emulated: bool = False
    """True when one device played both sides, such as a copy in place of a message."""
    elapsed_s: SecondsOrZero = 0.0
    """Wall time that the cell took, set-up and warm-up included."""

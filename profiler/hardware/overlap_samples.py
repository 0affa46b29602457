"""What a rank measured of overlap, and what its samples say; needs no torch.

All times are per communication: the GEMMs that go with one communication take as long as it does,
both alone. So the five quantities can be compared with one another.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["QUANTITIES", "OverlapSamples", "Slowdowns", "efficiency", "slowdowns"]

QUANTITIES = (
    "compute_alone",
    "communication_alone",
    "compute_overlapped",
    "communication_overlapped",
    "both",
)
"""Names of the samples in a sidecar."""


@dataclass(frozen=True, kw_only=True)
class OverlapSamples:
    """Samples of one rank, in seconds per communication; of GEMMs, those that go with one."""

    compute_alone: tuple[float, ...]
    communication_alone: tuple[float, ...]
    compute_overlapped: tuple[float, ...]
    """With communication at work during the whole window."""
    communication_overlapped: tuple[float, ...]
    """With GEMMs at work during the whole window."""
    both: tuple[float, ...]
    """Makespan of two queues that take equally long alone."""
    gemm: str
    """Such as `4096x4096x4096 bf16 x 3.5`: the shape, and how many go with one communication."""
    shared_fraction: float
    """Share of the overlapped windows in which both were certainly at work; the worst rank's."""
    reason: str | None = None
    """Why this is no measurement of overlap; None where it is one."""

    @property
    def overlapped(self) -> bool:
        """True when both really ran at the same time, on every rank."""
        return self.reason is None

    @property
    def samples_s(self) -> dict[str, list[float]]:
        """The samples by their names in a sidecar."""
        return {name: list(getattr(self, name)) for name in QUANTITIES}


@dataclass(frozen=True, kw_only=True)
class Slowdowns:
    """Medians of samples, compared."""

    compute: float
    """GEMMs with communication over GEMMs alone."""
    communication: float
    """Communication with GEMMs over communication alone."""
    efficiency: float
    """Share of the shorter of the two that was hidden; negative where both lost by overlapping."""

    @property
    def coefficient(self) -> float:
        """The documented `overlap_coe`: the larger slowdown, and at least 1."""
        return max(1.0, self.compute, self.communication)


def efficiency(compute_s: float, communication_s: float, both_s: float) -> float:
    """Return (t_c + t_m - T_both) / min(t_c, t_m): 1 is all hidden, 0 as slow as one by one."""
    return (compute_s + communication_s - both_s) / min(compute_s, communication_s)


def slowdowns(samples_s: Mapping[str, Sequence[float]]) -> Slowdowns:
    """Return the slowdowns by the medians of samples that are named as in a sidecar.

    Raises KeyError where one of the five names is missing, and ValueError where one is empty.
    """
    medians = {}
    for name in QUANTITIES:
        if not samples_s[name]:
            raise ValueError(f"there are no samples of {name}")
        medians[name] = statistics.median(samples_s[name])
    return Slowdowns(
        compute=medians["compute_overlapped"] / medians["compute_alone"],
        communication=medians["communication_overlapped"] / medians["communication_alone"],
        efficiency=efficiency(
            medians["compute_alone"], medians["communication_alone"], medians["both"]
        ),
    )

"""What a search returns; the prediction of its plan is `autopar.plan.Prediction`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.plan import Plan, Prediction
from autopar.sources import Source

__all__ = [
    "Alternative",
    "Infeasibility",
    "SearchResult",
    "SearchStats",
    "Status",
]

Status = Literal["optimal", "infeasible", "time_limit"]


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """The best plan that differs in kind from every better one."""

    plan: Plan
    step_time_s: float
    samples_per_s: float
    bound_samples_per_s: float
    differs_by: str
    """What distinguishes it, e.g. `p=2`, `no tp8 layers`, `vtp=4`."""
    probability_faster: float | None = None
    """Share of the replicas of computation in which it beats the plan; None without spread."""


@dataclass(frozen=True, kw_only=True)
class Infeasibility:
    """Why nothing fits: the plan nearest to fitting and what it lacks."""

    stage: int
    num_stages: int
    missing_bytes: int
    smallest_budget_bytes: int
    """The smallest memory constraint per GPU, in bytes, for which a plan exists (0: none)."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchStats:
    """What the search did."""

    states: int
    """Labels created by the exact kernels."""
    candidates: int
    """(G, m, p, embedding) sub-problems considered."""
    opened: int
    """Sub-problems that had to be solved exactly."""
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Answer of one search; `plan` is None exactly when `status` is `infeasible`."""

    status: Status
    plan: Plan | None
    prediction: Prediction | None
    bound_samples_per_s: float
    gap: float
    """(bound - found) / found throughput; 0 when optimal."""
    alternatives: tuple[Alternative, ...]
    infeasibility: Infeasibility | None
    defaults_used: tuple[str, ...]
    notes: tuple[str, ...]
    """Derived, extrapolated or estimated inputs, in plain words."""
    options: Mapping[str, object]
    sources: tuple[Source, ...]
    estimated: bool
    stats: SearchStats
    synthetic: bool = False
    """True when some input exercises the code and describes no machine."""

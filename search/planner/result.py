"""What a search or an evaluation returns; reports, files and exports read nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autopar.plan import Plan
from autopar.sources import Source

__all__ = [
    "Alternative",
    "Infeasibility",
    "LayerRun",
    "Prediction",
    "SearchResult",
    "SearchStats",
    "StagePrediction",
    "Status",
    "WidestCell",
]

Status = Literal["optimal", "infeasible", "time_limit"]


@dataclass(frozen=True, kw_only=True)
class LayerRun:
    """Consecutive layers of one stage with the same type and strategy, priced together."""

    first_layer: int
    num_layers: int
    layer_type: int
    label: str
    """Short name of the strategy, e.g. `tp4-dp2-zero3-ckpt`."""
    time_s: Mapping[str, float]
    """Seconds of one micro-batch by category (forward, backward, recompute, tp, ulysses, cp,
    zero3, redistribution) and, per step, `tail` and `optimizer`; sums over the run."""
    memory_bytes: Mapping[str, float]
    """Bytes by category (states, activations, backward, transient, shared) on this stage; backward
    and transient are one layer's, and the largest sum of both is the stage's `transient`."""


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """Predicted time and memory of one pipeline stage."""

    stage: int
    forward_s: float
    """One micro-batch, redistribution and vocabulary layers included, transfers excluded."""
    backward_s: float
    send_s: float
    """Transfer of one micro-batch's activation to the next stage (0 for the last)."""
    tail_s: float
    """Exposed gradient synchronisation, parameter gathering and optimizer, once per step."""
    allocated_bytes: int
    reserved_bytes: int
    budget_bytes: int
    in_flight: int
    memory_bytes: Mapping[str, int]
    """By category (states, activations, vocab_states, vocab_activations, transient, shared,
    fixed); sums to `allocated_bytes`."""
    time_s: Mapping[str, float]
    """Seconds of one micro-batch by category, vocabulary layers as `vocab`; sums to
    `forward_s + backward_s`."""
    runs: tuple[LayerRun, ...] = ()


@dataclass(frozen=True, kw_only=True)
class WidestCell:
    """The measured time whose spread moves the step time most."""

    name: str
    """In words, e.g. `backward of layer type 0, batch 4, sequence length 2048`."""
    share: float
    """Of the variance of the step time that the spread of computation causes, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A plan priced: the one objective T, its parts and the replay beside it."""

    step_time_s: float
    samples_per_s: float
    replay_s: float
    stages: tuple[StagePrediction, ...]
    legal: bool
    fits: bool
    problems: tuple[str, ...] = ()
    """Why the plan is illegal or does not fit, each with its arithmetic."""
    waterfall_s: Mapping[str, float] = field(default_factory=dict)
    """The step time split into named parts; sums to `step_time_s`."""
    step_time_interval_s: tuple[float, float] | None = None
    """The step time with all communication at its 5th and at its 95th percentile, widened by that
    of the replicas of computation; None where no spread was measured."""
    interval_of: tuple[str, ...] = ("communication",)
    """What the interval is the measured spread of: communication, computation or both."""
    widest_cell: WidestCell | None = None
    """The measurement of computation to repeat first; None where computation has no spread."""


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

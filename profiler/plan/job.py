"""What is to be run, what was found, and whether the two match: the records of `profile-plan`.

Reading options and plan files is in `question`, running in `run`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autopar.documents.plan import PeakSource
from autopar.model import ModelSpec
from autopar.plans import Plan

__all__ = [
    "TOLERANCE",
    "DryRunRank",
    "PlanJob",
    "Precision",
    "RunResult",
    "Verdict",
    "judge",
]


Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """A plan, the model it is of, and what a strategy file does not say."""

    plan: Plan
    spec: ModelSpec
    """Has as many layers as the plan, at the sequence length that is run."""
    sequence_parallel: bool = True
    """Megatron sequence parallelism of tensor-parallel layers."""
    async_grad_reduce: bool = True
    """One reduction of gradients per step, in the last micro-batch; otherwise in every one."""
    precision: Precision = "fp32"
    """bf16: computes in bf16 and keeps weights and optimizer states in fp32 as well; gradients that
    ZeRO divides are summed in fp32, those of ddp in bf16."""
    seed: int = 0
    """Of weights and tokens: the same on any number of ranks."""
    learning_rate: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class DryRunRank:
    """What one rank of a plan would hold, in bytes, counted on tensors without contents."""

    stage: int
    rank: int
    """Global rank: the first of its stage."""
    num_parameters: int
    """Elements of the parameters that this rank holds when nothing is gathered."""
    parameter_bytes: int
    gradient_bytes: int
    """Sharded or replicated, as they are when the optimizer steps."""
    optimizer_bytes: int
    """AdamW's two moments, and fp32 copies of the weights where those are not fp32."""
    peak_bytes: int
    """The most that was alive at once in one step after the first."""
    peak_parts: Mapping[str, int]
    """What `peak_bytes` was made of at that moment: parameters, gathered parameters, gradients,
    optimizer, activations, other; sums to it."""
    num_microbatches_run: int


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What real processes found; one value per step where not said otherwise."""

    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    reference_loss: tuple[float, ...] = ()
    """Of one process and no parallelism; empty when it was not asked for."""
    reference_grad_norm: tuple[float, ...] = ()
    step_time_s: tuple[float, ...] = ()
    """Of every timed step: the slowest rank's."""
    stage_time_s: tuple[Mapping[str, float], ...] = ()
    """By stage: median seconds of forwards, backwards and optimizer of a step on its slowest rank
    (`forward_s`, `backward_s`, `optimizer_s`)."""
    peak_bytes: tuple[int, ...] = ()
    """By rank."""
    peak_source: PeakSource = "counted"
    """allocated: torch's CUDA allocator said so; counted: storages were counted in one step."""
    notes: tuple[str, ...] = field(default=())


# --------------------------------------------------------------------------------------------------
# Whether a run matches its reference: losses and gradient norms, step by step.


TOLERANCE: Mapping[Precision, Mapping[str, float]] = {
    "fp32": {"loss": 2e-4, "grad_norm": 1e-3},
    # one rounding to bf16 is 2e-3 and not 6e-8; over many tokens and parameters they cancel
    "bf16": {"loss": 2e-3, "grad_norm": 1e-2},
}
"""Largest difference, as a share of the reference's value."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The comparison of a run with one process."""

    tolerance: Mapping[str, float]
    largest: Mapping[str, float]
    """Largest relative difference over the steps; infinite where a value is not finite."""

    @property
    def matches(self) -> bool:
        """Whether everything is within its tolerance."""
        return all(self.largest[key] <= most for key, most in self.tolerance.items())

    @property
    def sentence(self) -> str:
        """What is wrong, in words."""
        worst = [
            f"{name} {self.largest[key]:.2g} (at most {self.tolerance[key]:g})"
            for key, name in (("loss", "loss"), ("grad_norm", "gradient norm"))
            if not self.largest[key] <= self.tolerance[key]
        ]
        return f"the run does not match one process without parallelism: {', '.join(worst)}"


def judge(result: RunResult, precision: Precision) -> Verdict | None:
    """Return how far a run is from its reference; None where it has none."""
    if not result.reference_loss:
        return None
    return Verdict(
        tolerance=TOLERANCE[precision],
        largest={
            "loss": _largest(result.loss, result.reference_loss),
            "grad_norm": _largest(result.grad_norm, result.reference_grad_norm),
        },
    )


def _largest(values: Sequence[float], references: Sequence[float]) -> float:
    pairs = list(zip(values, references, strict=True))
    if not all(math.isfinite(number) for pair in pairs for number in pair):
        return math.inf
    return max(_difference(value, reference) for value, reference in pairs)


def _difference(value: float, reference: float) -> float:
    # also where both are 0, which has no relative difference
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf

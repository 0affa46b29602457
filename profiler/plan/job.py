"""What is to be run, and what was found: the records that the modes of `profile-plan` exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autopar.model import ModelSpec
from autopar.plan import Plan

__all__ = ["DryRunRank", "PlanJob", "Precision", "RunResult"]

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
    peak_source: Literal["allocated", "counted"] = "counted"
    """allocated: torch's CUDA allocator said so; counted: storages were counted in one step."""
    notes: tuple[str, ...] = field(default=())

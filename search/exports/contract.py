"""What every exporter takes and gives: a job in, files and the list of what they lose out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from autopar.model import ModelSpec
from autopar.plan import Plan

__all__ = ["Engine", "Job", "Loss", "Lower", "Lowered"]

Engine = Literal["galvatron", "megatron", "torchtitan", "deepspeed", "accelerate"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A plan and everything else that a launch needs."""

    plan: Plan
    spec: ModelSpec
    model: str
    """As the user named it: a shipped name or a file."""
    num_nodes: int
    gpus_per_node: int
    sequence_parallel: bool = True
    async_grad_reduce: bool = True
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    fp32_gradients: bool = False
    tensor_degree: int | None = None
    """The one tensor (or Ulysses) degree to take for a plan of several where the engine has one;
    None: the largest of the plan. `autopar-export` prices every one and takes the fastest that
    fits; a plan of one degree keeps it whatever this says."""

    @property
    def seq_length(self) -> int:
        """Tokens per sample of the last layer type."""
        return self.spec.layers[-1].seq_length


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One thing that the engine cannot express."""

    field: str
    """Key of the strategy file, such as `tp_sizes_enc`."""
    what: str
    """One sentence: what the plan says, for which layers, and what the engine takes instead."""


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A plan as one engine takes it."""

    engine: Engine
    engine_version: str
    """Release that the keys were taken from."""
    plan: Plan
    """What the files make the engine do; the plan itself where nothing is lost."""
    files: Mapping[str, str]
    """Text by file name; the first is the configuration."""
    losses: tuple[Loss, ...]
    """Empty when the engine does exactly what the plan says."""
    launch: str
    """The command of one node, with its environment; ends in a newline."""
    notes: tuple[str, ...] = field(default=())
    """What the user has to know besides: memory-neutral choices, keys to fill in."""
    as_run: Mapping[str, bool] = field(default_factory=dict)
    """Fields of `SearchOptions` as the engine runs the plan, where they differ from the job's; the
    plan is priced with them."""
    search: str = ""
    """Options of autopar-search that find plans which the engine runs as they were priced, of the
    degrees of this one; empty where any search does."""


Lower = Callable[[Job], Lowered]
"""Raises InputError, one sentence, where the engine has nothing near the plan at all."""

"""Where time and memory of one execution go, by part: what tables and pictures are made from.

The parts of time add up to the step, those of memory to what a processor needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Part", "calculon_memory", "calculon_time", "tensor2d_memory", "tensor2d_time"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part: seconds or bytes, and what of it is behind something else."""

    name: str
    amount: float
    """Seconds that nothing hides, or bytes."""
    whole: float | None = None
    """Seconds on the network, hidden ones included; None for everything else."""


def calculon_time(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of `total_time`, in seconds."""
    s = statistics
    parts = (
        Part(name="forward", amount=s["fw_time"]),
        Part(name="backward", amount=s["bw_time"]),
        Part(name="recomputation", amount=s["recompute_time"]),
        Part(
            name="tensor parallel",
            amount=s["tp_comm_exposed_time"],
            whole=s["tp_comm_link_time"],
        ),
        Part(
            name="tensor parallel, repeated",
            amount=s["recomm_exposed_time"],
            whole=s["recomm_link_time"],
        ),
        Part(name="stage transfer", amount=s["pp_comm_exposed_time"], whole=s["pp_comm_link_time"]),
        Part(name="pipeline bubble", amount=s["bubble_time"]),
        Part(name="data parallel", amount=s["dp_comm_exposed_time"], whole=s["dp_comm_link_time"]),
        Part(name="offload", amount=s["fw_offload_exposed_time"] + s["bw_offload_exposed_time"]),
        Part(name="optimizer", amount=s["optim_step_time"]),
        Part(name="embedding", amount=s.get("embedding_time", 0.0)),
        Part(name="head and loss", amount=s.get("head_time", 0.0)),
    )
    return _present(parts)


def calculon_memory(
    statistics: Mapping[str, Any], *, weights: bool, activations: bool, optimizer: bool
) -> tuple[Part, ...]:
    """Return the parts of `proc_mem_tier1_cap_req`, in bytes.

    weights, activations, optimizer : what is offloaded, of which only two blocks are here.
    """
    s = statistics

    def size(name: str, offloaded: bool) -> float:
        return float(s[f"{name}_with_offload" if offloaded else name] or 0.0)

    parts = (
        Part(name="weights", amount=size("weight_space", weights)),
        Part(name="weight gradients", amount=size("weight_grad_space", optimizer)),
        Part(name="optimizer states", amount=size("optimizer_space", optimizer)),
        Part(name="activations", amount=size("act_space", activations)),
        Part(name="checkpoints", amount=size("act_checkpoint_size", activations)),
        Part(name="activation gradients", amount=s["act_grad_space"]),
        Part(name="embedding, head, logits", amount=s.get("outer_space", 0.0)),
    )
    return _present(parts)


def tensor2d_time(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of `t`, in seconds."""
    names = {
        "comp": "computation",
        "mem": "memory traffic",
        "tp_comm": "tensor parallel",
        "pp_comm": "stage transfer",
        "bubble": "pipeline bubble",
        "dp_comm": "data parallel",
    }
    return _present(
        tuple(Part(name=text, amount=statistics[f"t_{key}"]) for key, text in names.items())
    )


def tensor2d_memory(statistics: Mapping[str, Any]) -> tuple[Part, ...]:
    """Return the parts of `mem`, in bytes."""
    names = {
        "wts_mem": "weights",
        "wts_grad_mem": "weight gradients",
        "wts_optimizer_states_mem": "optimizer states",
        "acts_mem": "activations",
    }
    return _present(
        tuple(Part(name=text, amount=statistics[key] * 1e9) for key, text in names.items())
    )


def _present(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    return tuple(part for part in parts if part.amount or part.whole)

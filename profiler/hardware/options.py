"""What `torchrun -m profiler.hardware` is asked to do, as one validated value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["OPERATIONS", "Backend", "Dtype", "HardwareOptions"]

OPERATIONS = ("allreduce", "p2p", "all2all", "allgather", "reducescatter", "overlap")
"""What can be asked for by name; `all` is all of them."""

Backend = Literal["auto", "nccl", "gloo"]
Dtype = Literal["auto", "bf16", "fp16", "fp32"]


@dataclass(frozen=True, kw_only=True)
class HardwareOptions:
    """Options of one measuring run; defaults are those of the command."""

    operations: tuple[str, ...] = OPERATIONS
    out: Path
    sizes_bytes: tuple[int, ...]
    """Increasing message sizes; the reference size is one of them."""
    reference_bytes: int = 32 << 20
    """Size whose bandwidth is the documented one."""
    groups: tuple[int, ...] | None = None
    """Group sizes; None is every divisor of the world size above 1."""
    iters: int = 50
    """Most timed repetitions of a cell."""
    warmup: int = 5
    """Most untimed repetitions of a cell; slow cells take fewer, at least one."""
    max_seconds: float = 2.0
    """After so many seconds a cell begins no further repetition once it has the fewest allowed."""
    timeout_s: float = 60.0
    """An operation that takes longer has failed."""
    backend: Backend = "auto"
    dtype: Dtype = "auto"
    isolated: bool = False
    """One group at a time; otherwise all groups of a size at once."""
    check: bool = True
    resume: bool = False
    force: bool = False
    dry_run: bool = False
    cuda_graph: bool = False
    allow_shared_gpu: bool = False

"""Memory of one part of a model as a GPU's allocator sees it, to be held against exact counts.

Figures are differences of what torch has allocated, in bytes for the whole batch: `kept` is what a
forward leaves behind, its input included and its output not, as in an exact count; `peak` is the
most that forward and backward need beyond that. Gradients of parameters are freed as soon as they
are complete, so that those on their way count and those that an optimizer waits for do not.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from profiler.model.checks import ON_DEVICE
from profiler.model.counting import End

__all__ = [
    "APART",
    "Allocated",
    "allocated_by",
    "device_memory",
    "explain_difference",
    "figures_of",
]

APART = 0.01
"""Relative difference between device and exact count that is reported."""
_GRANULE_BYTES = 512
"""The allocator rounds every tensor up to a multiple of it."""
_FEW_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True)
class Allocated:
    """What the allocator of a device said of one forward and backward."""

    kept_bytes: int
    """Left behind by the forward, in blocks of the allocator."""
    peak_bytes: int
    """Most that was allocated at once, above `kept_bytes`."""
    requested_bytes: int | None
    """`kept_bytes` as it was asked for, before any rounding; None where the allocator in use does
    not say it."""


def allocated_by(
    build: Callable[[], nn.Module],
    make_inputs: Callable[[], Sequence[torch.Tensor]],
    device: torch.device,
    *,
    shared: int = 1,
) -> Allocated:
    """Return what a module that returns one tensor has allocated on a CUDA device.

    shared : number of leading inputs that are the part's own; others belong to somebody else.
    Raises RuntimeError where the device has no memory for it.
    """
    with torch.cuda.device(device):
        module = build().train()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_forget_gradient)
        # Workspaces of matrix products and lazily loaded kernels exist afterwards, those of the
        # thread that runs backwards too.
        _run(module, make_inputs())
        # A block that is at most 1 MiB too large is not split, and counts as a whole: without
        # blocks of earlier work there is less choice.
        gc.collect()
        torch.cuda.empty_cache()
        inputs = make_inputs()
        for x in inputs:
            x.grad = None  # they may be those of the pass before
        own = sum(_rounded(x.nbytes) for x in inputs[:shared])
        asked = sum(x.nbytes for x in inputs[:shared])
        before = _allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        end = End.apply(module(*inputs))
        after = _allocated(device)
        end.backward(torch.empty_like(end))
        most = torch.cuda.max_memory_allocated(device)
    kept = max(0, after[0] - before[0] + own)
    return Allocated(
        kept_bytes=kept,
        peak_bytes=max(0, most - before[0] + own - kept),
        requested_bytes=max(0, after[1] - before[1] + asked) if after[1] else None,
    )


def device_memory(
    build: Callable[[], nn.Module],
    make_inputs: Callable[[], Sequence[torch.Tensor]],
    device: torch.device,
    *,
    shared: int = 1,
) -> dict[str, float]:
    """Return `device_activation` and `device_peak` of a module, in bytes (see `allocated_by`)."""
    return figures_of(allocated_by(build, make_inputs, device, shared=shared))


def figures_of(found: Allocated) -> dict[str, float]:
    """Return the figures that a memory cell keeps, by their names there."""
    return {
        "device_activation": float(found.kept_bytes),
        "device_peak": float(found.peak_bytes),
    }


def explain_difference(
    exact_bytes: float, device_bytes: float, requested_bytes: float | None = None
) -> str | None:
    """Return a sentence on two figures that differ by more than 1 %, None where they agree.

    requested_bytes : what the allocator was asked for, which tells its rounding from a kernel's
    memory.
    """
    if exact_bytes <= 0.0 or abs(device_bytes / exact_bytes - 1.0) <= APART:
        return None
    apart = device_bytes - exact_bytes
    if requested_bytes is not None:
        rounded = abs(requested_bytes / exact_bytes - 1.0) <= APART
    else:
        rounded = 0.0 < apart <= _FEW_BYTES
    if rounded:
        cause = (
            f"the allocator rounds every tensor up to {_GRANULE_BYTES} bytes, and leaves up to "
            "1 MiB of a block unused"
        )
    elif apart > 0.0:
        cause = "a kernel of this device keeps more than the reference, such as a mask or a copy"
    else:
        cause = "a kernel of this device keeps less than the reference, such as a fused one"
    return f"{100 * apart / exact_bytes:+.1f} {ON_DEVICE}{cause}"


def _run(module: nn.Module, inputs: Sequence[Any]) -> None:
    end = End.apply(module(*inputs))
    end.backward(torch.empty_like(end))


def _forget_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _allocated(device: torch.device) -> tuple[int, int]:
    """Return bytes in use, as blocks and as they were asked for (0: unknown)."""
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return (
        int(stats["allocated_bytes.all.current"]),
        int(stats.get("requested_bytes.all.current", 0)),
    )


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES

"""Memory of one part of a model as a GPU's allocator sees it, to be held against exact counts.

Figures are differences of what torch has allocated, in bytes for the whole batch: `kept` is what a
forward leaves behind, its input included and its output not, as in an exact count; `peak` is the
most that forward and backward need beyond that, the gradients of parameters not included.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from profiler.model.checks import ON_DEVICE

__all__ = ["APART", "device_memory", "explain_difference"]

APART = 0.01
"""Relative difference between device and exact count that is reported."""
_GRANULE_BYTES = 512
"""The allocator rounds every tensor up to a multiple of it."""
_FEW_BYTES = 64 << 10


def device_memory(
    build: Callable[[], nn.Module],
    make_inputs: Callable[[], tuple[torch.Tensor, ...]],
    device: torch.device,
    *,
    shared: int = 1,
) -> dict[str, float]:
    """Return `device_activation` and `device_peak` of a module that returns one tensor, in bytes.

    shared : number of leading inputs that are the part's own; others belong to somebody else.
    Raises RuntimeError where the device has no memory for it.
    """
    module = build().train()
    _pass(module, make_inputs())  # workspaces and lazily loaded kernels exist afterwards
    module.zero_grad(set_to_none=True)
    gc.collect()
    inputs = make_inputs()
    own = sum(_rounded(x.nbytes) for x in inputs[:shared])
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output = module(*inputs)
    torch.cuda.synchronize(device)
    kept = torch.cuda.memory_allocated(device) - before - _rounded(output.nbytes) + own
    output.backward(torch.ones_like(output))
    torch.cuda.synchronize(device)
    gradients = sum(_rounded(p.grad.nbytes) for p in module.parameters() if p.grad is not None)
    peak = torch.cuda.max_memory_allocated(device) - before + own - gradients
    return {"device_activation": float(max(0, kept)), "device_peak": float(max(0, peak - kept))}


def explain_difference(exact_bytes: float, device_bytes: float) -> str | None:
    """Return a sentence on two figures that differ by more than 1 %, None where they agree."""
    if exact_bytes <= 0.0 or abs(device_bytes / exact_bytes - 1.0) <= APART:
        return None
    apart = device_bytes - exact_bytes
    if 0.0 < apart <= _FEW_BYTES:
        cause = f"the allocator rounds every tensor up to {_GRANULE_BYTES} bytes"
    elif apart > 0.0:
        cause = "a kernel of this device keeps more than the reference, such as a mask or a copy"
    else:
        cause = "a kernel of this device keeps less than the reference, such as a fused one"
    return f"{100 * apart / exact_bytes:+.1f} {ON_DEVICE}{cause}"


def _pass(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    output = module(*inputs)
    output.backward(torch.ones_like(output))


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES

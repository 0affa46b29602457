"""Times one part of a model on one device: forward, backward, recomputation and optimizer apart.

`time_module` measures any module, `time_layer` a layer of a spec as one rank of a tensor group
holds it. Data are random, autograd is on as in training, and what a forward keeps stays alive
until its backward; gradients and graphs are dropped between repetitions. The cache of the device
is not flushed: in training, too, a layer finds there what the one before it has left.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autopar.model import LayerSpec
from profiler.measure import Policy
from profiler.model.passes import Passes, optimizer_step, out_of_memory, sample
from profiler.model.sharding import Sharding
from profiler.timers import Timer, make_timer

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["DEVICE_SAMPLE_S", "Timed", "time_layer", "time_module", "torch_dtype"]

_LOG = logging.getLogger(__name__)

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DEVICE_SAMPLE_S = 1e-2
"""A repetition on a GPU begins with an idle device: up to 50 us pass before its first kernel."""
_OPTIMIZER_SHARE = 0.25
"""Of the seconds of a cell, in addition to them."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What was measured of one cell, or why nothing was."""

    samples_s: Mapping[str, list[float]] = field(default_factory=dict)
    """Seconds for the whole batch, in the order they were taken, by `forward`, `backward`,
    `recompute` and `optimizer`; empty where the cell failed."""
    reason: str | None = None
    """Why it failed, in one phrase; None where it did not."""
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    """Seconds on the wall, with everything that surrounds the repetitions."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the element type of `bf16`, `fp16` or `fp32`."""
    import torch

    result: torch.dtype = getattr(torch, _DTYPES[name])
    return result


def time_layer(
    spec: LayerSpec,
    sharding: Sharding,
    *,
    batch: int,
    dtype: str,
    device: torch.device,
    policy: Policy,
    encoder_seq_length: int | None = None,
    backward: bool = True,
    checkpoint: bool = True,
    optimizer: bool = True,
    timer: Timer | None = None,
) -> Timed:
    """Return the times of one layer on one rank of its tensor group.

    The rank's share of weights and activations lies on `device`; collectives cost nothing here
    (see `LocalGroup`). A layer that `sharding` checkpoints recomputes inside its `backward`.
    Raises InputError where the layer cannot be laid out like this.
    """
    from profiler.model.blocks import build_layer, layer_inputs
    from profiler.model.local_group import timed_group

    sharding.check(spec)
    element = torch_dtype(dtype)
    return time_module(
        lambda: build_layer(
            spec,
            sharding,
            group=timed_group(sharding.degree),
            dtype=element,
            device=device,
            expert_group=timed_group(sharding.expert_degree),
        ),
        lambda: layer_inputs(
            spec,
            sharding,
            batch=batch,
            dtype=element,
            device=device,
            encoder_seq_length=encoder_seq_length,
        ),
        policy,
        device,
        where=f"batch {batch}, sequence {spec.seq_length}",
        backward=backward,
        checkpoint=checkpoint and sharding.checkpoint == "none",
        optimizer=optimizer,
        timer=timer,
    )


def time_module(
    module: nn.Module | Callable[[], nn.Module],
    make_inputs: Callable[[], tuple[Any, ...]],
    policy: Policy,
    device: torch.device,
    *,
    where: str = "the given size",
    backward: bool = True,
    checkpoint: bool = True,
    optimizer: bool = True,
    timer: Timer | None = None,
) -> Timed:
    """Return the times of a module that returns one tensor.

    module : on `device`, or what builds it there, with the same random numbers every time.
    make_inputs : what a call of the module gets; a tensor of floating point also gets a gradient,
    as in the middle of a model. where : the size, for messages.
    `recompute` (asked for by `checkpoint`) is the forward that a checkpointed module repeats in
    its backward: from detached inputs, with autograd, so that it keeps what the backward needs.
    `optimizer` is AdamW on float32 copies of the parameters, and back to their own type.
    Memory that is missing, or an output that is not finite, fails the cell.
    Raises InputError where the module fails by itself, or returns something else.
    """
    import torch

    def measure() -> Timed:
        built = module if isinstance(module, torch.nn.Module) else module()
        passes = Passes(built, make_inputs())
        flaw = passes.rehearse(where, backward=backward)
        if flaw is not None:
            return Timed(reason=flaw)
        stages: dict[str, Callable[[], None]] = {"forward": passes.forward}
        if backward:
            stages["backward"] = passes.backward
        if checkpoint:
            stages["recompute"] = passes.recompute
        samples_s = sample(stages, passes.drop, clock, own_policy)
        if optimizer and (step := optimizer_step(passes.parameters, device)) is not None:
            shorter = replace(own_policy, max_seconds=policy.max_seconds * _OPTIMIZER_SHARE)
            samples_s |= sample({"optimizer": step}, lambda: None, clock, shorter)
        return Timed(samples_s=samples_s)

    clock = timer if timer is not None else make_timer(device)
    own_policy = policy
    if device.type == "cuda":
        own_policy = replace(policy, sample_s=max(policy.sample_s, DEVICE_SAMPLE_S))
        with torch.cuda.device(device):
            return _guarded(measure, device, where)
    return _guarded(measure, device, where)


def _guarded(measure: Callable[[], Timed], device: torch.device, where: str) -> Timed:
    """Return what `measure` returns, or a failed cell where memory is missing."""
    import torch

    began_s = time.perf_counter()
    result: Timed | None = None
    # the caller's random numbers are left alone
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        try:
            result = measure()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            _LOG.debug("no memory for %s: %s", where, error)
    if result is None:  # here the exception is gone, and with it the frames that hold tensors
        gc.collect()
        result = Timed(reason=f"out of memory at {where}")
    if device.type == "cuda":
        gc.collect()  # what lies in cycles would be missing for a larger cell
        torch.cuda.empty_cache()
    return replace(result, elapsed_s=time.perf_counter() - began_s)

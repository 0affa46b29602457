"""Time one module on one device: forward, backward, recomputation and optimizer separately.

Inputs are random, and autograd is on as in training. Saved activations stay alive until the
backward; gradients and graphs are freed between repetitions. The device's cache is not flushed,
since in training it also contains data of the previous layer.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from msgspec import field
from torch import nn

from autopar.errors import InputError
from autopar.records import Record, replace
from profiler.measure import (
    Policy,
    Timer,
    choose_loops,
    make_timer,
    next_block,
    out_of_memory,
    reach_sustained_clock,
    warmups,
)
from profiler.model.counting import End
from profiler.model.documents import ON_DEVICE

# --------------------------------------------------------------------------------------------------
# The passes of a module and their samples: the timed work, and the untimed work in between.


class Passes:
    """Forward, backward and recomputation of one module with fixed inputs."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Set the module to training mode; floating-point inputs require gradients."""
        # evaluation mode would skip work of training, such as dropout
        self._module = module.train()
        self._inputs = tuple(
            # leaves, so that the backward ends here
            x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x
            for x in inputs
        )
        self._leaves = [x for x in self._inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        """Parameters that require gradients."""
        self._outputs: list[torch.Tensor] = []
        self._gradient: torch.Tensor | None = None

    def forward(self) -> None:
        """Run the module and store its output, which keeps the saved activations alive."""
        self._outputs.append(self._module(*self._inputs))

    def backward(self) -> None:
        """Run the backward of the latest forward, into new gradients."""
        output = self._outputs.pop()
        self._drop_gradients()  # otherwise autograd would add to the earlier gradients
        output.backward(self._gradient)

    def recompute(self) -> None:
        """Run the module from detached inputs, as a checkpoint does, and store its output."""
        inputs = (
            # a checkpoint recomputes from its detached input
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in self._inputs
        )
        self._outputs.append(self._module(*inputs))

    def drop(self) -> None:
        """Free the outputs and gradients of all passes."""
        self._outputs.clear()
        self._drop_gradients()

    def rehearse(self, where: str, *, backward: bool) -> str | None:
        """Run forward and backward once; return a phrase if the output is not finite, else None.

        where : size of the cell, for messages.
        backward : True if the backward will be timed.

        Raises InputError if the module fails, returns anything but one tensor, or allows no
        backward, and the original exception if memory runs out.
        """
        name = type(self._module).__name__
        try:
            self.forward()
            output = self._outputs[-1]
            if not isinstance(output, torch.Tensor):
                raise InputError(
                    f"the module {name} returns a {type(output).__name__}",
                    remedy="Return one tensor",
                )
            if not bool(torch.isfinite(output).all()):
                return f"the output of {name} is not finite at {where}"
            if backward:
                if not output.requires_grad:
                    raise InputError(
                        f"the output of the module {name} has no gradient, so "
                        "there is no backward to measure",
                        remedy=("Use parameters with gradients, or measure only the forward"),
                    )
                scalar = output.dim() == 0
                # a loss starts from 1, the output of a layer from any gradient
                self._gradient = (torch.ones_like if scalar else torch.randn_like)(output.detach())
                self.backward()
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            # lack of memory depends on the size, not on the module
            if out_of_memory(error):
                raise
            said = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise InputError(f"the module {name} fails at {where}: {said}") from error
        finally:
            self.drop()
        return None

    def _drop_gradients(self) -> None:
        for tensor in (*self.parameters, *self._leaves):
            tensor.grad = None


def optimizer_step(
    parameters: list[nn.Parameter], device: torch.device
) -> Callable[[], None] | None:
    """Return a function that runs AdamW on fp32 copies and casts them back; None if there are none.

    parameters : weights whose sizes and dtypes are used; they are not changed.
    """
    if not parameters:
        return None
    # mixed precision updates fp32 copies, whatever the dtype of the weights
    copies = [p.detach().to(torch.float32, copy=True).requires_grad_() for p in parameters]
    for copy in copies:
        copy.grad = torch.randn_like(copy)
    cuda = device.type == "cuda"
    adam = torch.optim.AdamW(copies, lr=1e-6, fused=cuda, foreach=not cuda)
    # into separate tensors, so that the measured module keeps its weights
    pairs = [(torch.empty_like(p), c) for p, c in zip(parameters, copies, strict=True)]
    # fp32 weights are updated directly: nothing is copied back
    pairs = [(own, copy) for own, copy in pairs if own.dtype != copy.dtype]

    def step() -> None:
        adam.step()
        with torch.no_grad():
            for own, copy in pairs:
                own.copy_(copy)

    return step


def sample(
    stages: Mapping[str, Callable[[], None]],
    drop: Callable[[], None],
    timer: Timer,
    policy: Policy,
) -> dict[str, list[float]]:
    """Return the samples of each stage, in seconds; stages run in order in every repetition.

    If a stage is shorter than the policy's smallest sample, a repetition runs it several times.
    Then all forwards precede all backwards, as in a model with several layers.

    stages : operations by name.
    drop : frees the results of a repetition; not timed.
    policy : precision and time budget of each stage.
    """

    def play(repetitions: Mapping[str, Callable[[], float]]) -> dict[str, float]:
        found = {name: repetition() for name, repetition in repetitions.items()}
        drop()
        return found

    def bound(loops: int) -> dict[str, Callable[[], float]]:
        return {name: timer.bind(run, loops) for name, run in stages.items()}

    once = bound(1)
    probe = play(once)
    for _ in range(warmups(sum(probe.values()), policy) - 1):
        probe = play(once)
    # all stages use the same number of loops, and the shortest needs the most
    loops = choose_loops(min(probe.values()), policy)
    repetitions = bound(loops)
    if loops > 1:
        try:
            # run once untimed, to see if the activations of all loops fit
            play(repetitions)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            repetitions = once  # each forward of a repetition keeps its own activations
        drop()
    samples_s: dict[str, list[float]] = {name: [] for name in stages}
    begun_s, spent_s = time.perf_counter(), 0.0
    # until every stage is precise enough, since all stages run together
    while count := max(next_block(taken, spent_s, policy) for taken in samples_s.values()):
        for _ in range(count):
            for name, seconds in play(repetitions).items():
                samples_s[name].append(seconds)
        spent_s = (time.perf_counter() - begun_s) / len(stages)  # each stage has its own budget
    return samples_s


# --------------------------------------------------------------------------------------------------
# Memory of one part of a model from a GPU's allocator, for comparison with exact counts.
#
# Results are differences of bytes allocated by torch, for the whole batch. As in an exact count,
# `kept` is the memory that a forward leaves allocated, including its input and without its output,
# and `peak` is the maximum above `kept` in forward and backward. Gradients of parameters are freed
# as soon as they are complete, so that only gradients in progress count.


APART = 0.01
"""Smallest relative difference between device and exact count that is reported."""
_GRANULE_BYTES = 512
"""Multiple to which the allocator rounds every tensor up, bytes."""
_FEW_BYTES = 64 << 10


class Allocated(Record):
    """Memory that torch's CUDA allocator reports for one forward and backward, bytes."""

    kept_bytes: int
    """Bytes that stay allocated after the forward, in blocks of the allocator."""
    peak_bytes: int
    """Peak allocated bytes above `kept_bytes`."""
    requested_bytes: int | None
    """`kept_bytes` as requested, before rounding to blocks; None if the allocator does not report
    it."""


def allocated_by(
    build: Callable[[], nn.Module],
    make_inputs: Callable[[], Sequence[torch.Tensor]],
    device: torch.device,
    *,
    shared: int = 1,
) -> Allocated:
    """Return the CUDA memory that a module with one output tensor allocates.

    shared : number of leading inputs that count for the module; the others are shared.

    Raises RuntimeError if the device runs out of memory.
    """
    with torch.cuda.device(device):
        module = build().train()
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_forget_gradient)
        # GEMM workspaces and lazily loaded kernels exist after this run, including those of the
        # autograd thread.
        _run(module, make_inputs())
        # The allocator does not split a block that is at most 1 MiB too large, and counts all of
        # it. Without cached blocks of earlier work this is rarer.
        gc.collect()
        torch.cuda.empty_cache()
        inputs = make_inputs()
        for x in inputs:
            x.grad = None  # the tensors may be those of the first run
        # the input counts as kept, but was allocated before the count began
        own = sum(_rounded(x.nbytes) for x in inputs[:shared])
        asked = sum(x.nbytes for x in inputs[:shared])
        before = _allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        end = End.apply(module(*inputs))
        # End has released the output
        after = _allocated(device)
        end.backward(torch.empty_like(end))
        most = torch.cuda.max_memory_allocated(device)
    kept = max(0, after[0] - before[0] + own)
    return Allocated(
        kept_bytes=kept,
        peak_bytes=max(0, most - before[0] + own - kept),
        requested_bytes=max(0, after[1] - before[1] + asked) if after[1] else None,
    )


def figures_of(found: Allocated) -> dict[str, float]:
    """Return the device results, in bytes, by their keys in a memory cell."""
    return {
        "device_activation": float(found.kept_bytes),
        "device_peak": float(found.peak_bytes),
    }


def explain_difference(
    exact_bytes: float, device_bytes: float, requested_bytes: float | None = None
) -> str | None:
    """Return a note if exact and device bytes differ by more than 1 %, None if they agree.

    requested_bytes : bytes requested from the allocator before its rounding; None if unknown. They
    show whether rounding or a kernel causes the difference.
    """
    if exact_bytes <= 0.0 or abs(device_bytes / exact_bytes - 1.0) <= APART:
        return None
    apart = device_bytes - exact_bytes
    if requested_bytes is not None:
        # requested bytes equal the count, so only the rounding to blocks differs
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
    """Return allocated bytes, in blocks and as requested; the latter is 0 if unknown."""
    torch.cuda.synchronize(device)
    stats = torch.cuda.memory_stats(device)
    return (
        int(stats["allocated_bytes.all.current"]),
        int(stats.get("requested_bytes.all.current", 0)),
    )


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _GRANULE_BYTES) * _GRANULE_BYTES


# --------------------------------------------------------------------------------------------------
# Timing of one part: layers, vocabulary, optimizer, and custom modules.


_LOG = logging.getLogger(__name__)

DEVICE_SAMPLE_S = 1e-2
"""Shortest repetition on a GPU, seconds; long compared with the launch delay of up to 50 us after
an idle time."""
OPTIMIZER_SHARE = 0.25
"""Time budget of the optimizer step, as a fraction of a cell's budget and in addition to it."""


class Timed(Record):
    """Time samples of one cell, or the reason of its failure."""

    samples_s: Mapping[str, list[float]] = field(default_factory=dict)
    """Seconds for the whole batch, in measured order, by `forward`, `backward`, `recompute` and
    `optimizer`; empty if the cell failed."""
    reason: str | None = None
    """Reason of a failure, in one phrase; None if the cell is ok."""
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    """Wall-clock seconds, including all work around the repetitions."""


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
    """Return time samples, in seconds, of the passes of a module that returns one tensor.

    If memory runs out or the output is not finite, the result contains a reason and no samples.

    module : module on `device`, or a function that builds it there.

    make_inputs : function that returns the inputs of a call; floating-point tensors require
        gradients.
    where : size of the cell, for messages.
    backward : True to time the backward.
    checkpoint : True to time `recompute`, the forward that a checkpointed module repeats in its
        backward.
    optimizer : True to time AdamW on fp32 copies of the parameters, with the cast to their dtype.

    Raises InputError if the module fails, or returns anything but one tensor.
    """

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
            shorter = replace(own_policy, max_seconds=policy.max_seconds * OPTIMIZER_SHARE)
            samples_s |= sample({"optimizer": step}, lambda: None, clock, shorter)
        return Timed(samples_s=samples_s)

    clock = timer if timer is not None else make_timer(device)
    own_policy = policy
    if device.type == "cuda":
        own_policy = replace(policy, sample_s=max(policy.sample_s, DEVICE_SAMPLE_S))
        with torch.cuda.device(device):
            reach_sustained_clock(device)
            return _guarded(measure, device, where)
    return _guarded(measure, device, where)


def _guarded(measure: Callable[[], Timed], device: torch.device, where: str) -> Timed:
    """Return the result of `measure`; if memory runs out, a result with that reason.

    Runs with seed 0 and restores the caller's random state.
    """
    began_s = time.perf_counter()
    result: Timed | None = None
    # keep the caller's random state
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        try:
            result = measure()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            _LOG.debug("no memory for %s: %s", where, error)
    if result is None:  # outside `except`: the exception's frames, which hold tensors, are gone
        gc.collect()
        result = Timed(reason=f"out of memory at {where}")
    if device.type == "cuda":
        gc.collect()  # tensors in reference cycles would take memory from a larger cell
        torch.cuda.empty_cache()
    return replace(result, elapsed_s=time.perf_counter() - began_s)

"""Times one module on one device: forward, backward, recomputation and optimizer apart.

Which module stands for a cell is in `measuring`. Data are random, autograd is on as in training,
and what a forward keeps stays alive until its backward; gradients and graphs are dropped between
repetitions. The cache of the device is not flushed: in training, too, a layer finds there what the
one before it has left.
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
    warmups,
)
from profiler.model.counting import End
from profiler.model.documents import ON_DEVICE

# --------------------------------------------------------------------------------------------------
# The passes of a module, and their samples: what runs while a clock does, and what between.
#
# What a forward keeps stays alive until its backward, as in training; gradients and graphs are
# dropped between repetitions.


class Passes:
    """The passes of one module through one set of inputs, and what they leave behind."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Prepare passes; tensors of floating point among the inputs get gradients."""
        # evaluation would skip what training does, such as dropout
        self._module = module.train()
        self._inputs = tuple(
            # leaves, so that gradients end here
            x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x
            for x in inputs
        )
        self._leaves = [x for x in self._inputs if isinstance(x, torch.Tensor) and x.requires_grad]
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        """Those that an optimizer changes."""
        self._outputs: list[torch.Tensor] = []
        self._gradient: torch.Tensor | None = None

    def forward(self) -> None:
        """Run the module and keep its output, and with it everything that its backward needs."""
        self._outputs.append(self._module(*self._inputs))

    def backward(self) -> None:
        """Run the backward of the forward before, into fresh gradients."""
        output = self._outputs.pop()
        self._drop_gradients()  # else it would add to those of the one before
        output.backward(self._gradient)

    def recompute(self) -> None:
        """Run the module again as a checkpoint does in its backward, and keep its output."""
        inputs = (
            # a checkpoint recomputes from its input, not through it
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x
            for x in self._inputs
        )
        self._outputs.append(self._module(*inputs))

    def drop(self) -> None:
        """Free what the passes so far have left."""
        self._outputs.clear()
        self._drop_gradients()

    def rehearse(self, where: str, *, backward: bool) -> str | None:
        """Run each pass once; return what is wrong with the output, None where nothing is.

        where : the size, for messages; backward : whether the backward will be run.
        Raises InputError where the module fails by itself, or returns what has no backward.
        """
        name = type(self._module).__name__
        try:
            self.forward()
            output = self._outputs[-1]
            if not isinstance(output, torch.Tensor):
                raise InputError(
                    f"the module {name} returns a {type(output).__name__}; let it return one tensor"
                )
            if not bool(torch.isfinite(output).all()):
                return f"the output of {name} is not finite at {where}"
            if backward:
                if not output.requires_grad:
                    raise InputError(
                        f"the output of the module {name} needs no gradient, so that there is no "
                        "backward to measure; give it parameters that do, or measure the forward"
                    )
                scalar = output.dim() == 0
                # a loss starts from 1, the middle of a model from any gradient
                self._gradient = (torch.ones_like if scalar else torch.randn_like)(output.detach())
                self.backward()
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            # missing memory is a matter of the size, not of the module
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
    """Return a step of AdamW on float32 copies, and back to the parameters; None without any."""
    if not parameters:
        return None
    # mixed precision steps float32 copies, whatever the weights are
    copies = [p.detach().to(torch.float32, copy=True).requires_grad_() for p in parameters]
    for copy in copies:
        copy.grad = torch.randn_like(copy)
    cuda = device.type == "cuda"
    adam = torch.optim.AdamW(copies, lr=1e-6, fused=cuda, foreach=not cuda)
    # into tensors of their own: what is measured keeps its weights
    pairs = [(torch.empty_like(p), c) for p, c in zip(parameters, copies, strict=True)]
    # float32 weights are what is stepped: nothing is copied back
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
    """Return the samples of stages that follow one another in every repetition.

    stages : operations by name; drop : frees what a repetition has left, outside of the clock.
    With several loops all forwards come before all backwards, as those of several layers do.
    Each stage has the seconds of the policy.
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
    # the shortest stage needs most loops, and all stages take the same number
    loops = choose_loops(min(probe.values()), policy)
    repetitions = bound(loops)
    if loops > 1:
        try:
            # whether so many activations fit shows before anything is timed
            play(repetitions)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            repetitions = once  # every forward of a repetition keeps its own activations
        drop()
    samples_s: dict[str, list[float]] = {name: [] for name in stages}
    begun_s, spent_s = time.perf_counter(), 0.0
    # until the least certain stage is certain, since all are played together
    while count := max(next_block(taken, spent_s, policy) for taken in samples_s.values()):
        for _ in range(count):
            for name, seconds in play(repetitions).items():
                samples_s[name].append(seconds)
        spent_s = (time.perf_counter() - begun_s) / len(stages)  # each has its own budget
    return samples_s


# --------------------------------------------------------------------------------------------------
# Memory of one part of a model as a GPU's allocator sees it, to be held against exact counts.
#
# Figures are differences of what torch has allocated, in bytes for the whole batch: `kept` is what
# a forward leaves behind, its input included and its output not, as in an exact count; `peak` is
# the most that forward and backward need beyond that. Gradients of parameters are freed as soon as
# they are complete, so that those on their way count and those that an optimizer waits for do not.


APART = 0.01
"""Relative difference between device and exact count that is reported."""
_GRANULE_BYTES = 512
"""The allocator rounds every tensor up to a multiple of it."""
_FEW_BYTES = 64 << 10


class Allocated(Record):
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
        # the input belongs to what is kept, but was there before the count began
        own = sum(_rounded(x.nbytes) for x in inputs[:shared])
        asked = sum(x.nbytes for x in inputs[:shared])
        before = _allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        end = End.apply(module(*inputs))
        # the output is gone: End has let go of it
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
        # what was asked for is what was counted, so that only blocks differ
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


# --------------------------------------------------------------------------------------------------
# One part timed: layers, vocabulary, optimizer, and modules of others.


_LOG = logging.getLogger(__name__)

DEVICE_SAMPLE_S = 1e-2
"""A repetition on a GPU begins with an idle device: up to 50 us pass before its first kernel."""
OPTIMIZER_SHARE = 0.25
"""Of the seconds of a cell, in addition to them."""


class Timed(Record):
    """What was measured of one cell, or why nothing was."""

    samples_s: Mapping[str, list[float]] = field(default_factory=dict)
    """Seconds for the whole batch, in the order they were taken, by `forward`, `backward`,
    `recompute` and `optimizer`; empty where the cell failed."""
    reason: str | None = None
    """Why it failed, in one phrase; None where it did not."""
    notes: tuple[str, ...] = ()
    elapsed_s: float = 0.0
    """Seconds on the wall, with everything that surrounds the repetitions."""


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
            return _guarded(measure, device, where)
    return _guarded(measure, device, where)


def _guarded(measure: Callable[[], Timed], device: torch.device, where: str) -> Timed:
    """Return what `measure` returns, or a failed cell where memory is missing."""
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

"""The passes of a module, and their samples: what runs while a clock does, and what between.

What a forward keeps stays alive until its backward, as in training; gradients and graphs are
dropped between repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError
from profiler.measure import Policy, choose_loops, next_block, warmups
from profiler.timers import Timer

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["Passes", "optimizer_step", "out_of_memory", "sample"]

_ALLOCATION_FAILURES = (
    "out of memory",  # CUDA, also where a library or the driver reports it
    "can't allocate memory",  # torch's allocator on CPU
    "not enough memory",  # the same on Windows
    "alloc_failed",  # CUBLAS_STATUS_ALLOC_FAILED, CUDNN_STATUS_ALLOC_FAILED
    "allocation_failed",  # CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED
)


def out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory could not be allocated, on any device."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _ALLOCATION_FAILURES)


class Passes:
    """The passes of one module through one set of inputs, and what they leave behind."""

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Prepare passes; tensors of floating point among the inputs get gradients."""
        import torch

        self._module = module.train()
        self._inputs = tuple(
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
        import torch

        inputs = (
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
        import torch

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
                self._gradient = (torch.ones_like if scalar else torch.randn_like)(output.detach())
                self.backward()
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
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
    import torch

    if not parameters:
        return None
    copies = [p.detach().to(torch.float32, copy=True).requires_grad_() for p in parameters]
    for copy in copies:
        copy.grad = torch.randn_like(copy)
    cuda = device.type == "cuda"
    adam = torch.optim.AdamW(copies, lr=1e-6, fused=cuda, foreach=not cuda)
    # into tensors of their own: what is measured keeps its weights
    pairs = [(torch.empty_like(p), c) for p, c in zip(parameters, copies, strict=True)]
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
    loops = choose_loops(min(probe.values()), policy)
    repetitions = bound(loops)
    if loops > 1:
        try:
            play(repetitions)
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            repetitions = once  # every forward of a repetition keeps its own activations
        drop()
    samples_s: dict[str, list[float]] = {name: [] for name in stages}
    begun_s, spent_s = time.perf_counter(), 0.0
    while count := max(next_block(taken, spent_s, policy) for taken in samples_s.values()):
        for _ in range(count):
            for name, seconds in play(repetitions).items():
                samples_s[name].append(seconds)
        spent_s = (time.perf_counter() - begun_s) / len(stages)  # each has its own budget
    return samples_s

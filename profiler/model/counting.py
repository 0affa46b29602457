"""Counts what one forward and backward of a module takes, storage by storage.

Two figures come out, for one rank and the whole batch:

    activation  bytes of the storages that autograd saves in the forward and that are still held
                at its end, each once; the part's input belongs to it, its parameters, buffers and
                the encoder's output (which all decoder layers share) do not
    peak        the most bytes alive at any moment of forward and backward, above `activation`;
                outputs, incoming gradients and whatever operators return count, parameters and
                their gradients do not, nor does what happens inside an operator

Not in either: rounding and fragmentation of an allocator, workspaces of matrix products,
communication buffers outside the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.model_measurements import ModelMeasurement, Part, TensorKind
from profiler.model.sharding import Checkpoint

__all__ = ["End", "ExactMemory", "count_memory"]


@dataclass(frozen=True, kw_only=True)
class ExactMemory:
    """Memory of one part of a model on one rank, in bytes for the whole batch."""

    num_parameters: int
    parameter_bytes: int
    activation_bytes: int
    """Kept from forward to backward."""
    peak_bytes: int
    """The most that is alive at once, above what is kept."""
    part: Part = "layer"
    batch: int = 1
    seq_lengths: tuple[int, ...] = ()
    degree: int = 1
    kind: TensorKind = "sp"
    checkpoint: Checkpoint = "none"
    notes: tuple[str, ...] = ()

    def measurement(
        self, *, key: str, layer_type: int | None = None, elapsed_s: float = 0.0
    ) -> ModelMeasurement:
        """Return the cell that a sidecar keeps of this."""
        return ModelMeasurement(
            key=key,
            quantity="memory",
            part=self.part,
            layer_type=layer_type,
            batch=self.batch,
            seq_lengths=list(self.seq_lengths),
            degree=self.degree,
            kind=self.kind,
            checkpoint=self.checkpoint,
            source="exact",
            status="ok",
            bytes={
                "parameters": float(self.parameter_bytes),
                "activation": float(self.activation_bytes),
                "peak": float(self.peak_bytes),
            },
            num_parameters=self.num_parameters,
            notes=list(self.notes),
            elapsed_s=elapsed_s,
        )


def count_memory(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    shared: Sequence[torch.Tensor] = (),
) -> ExactMemory:
    """Return what one forward and backward of an `nn.Module` takes (figures: see module).

    `shared` tensors belong to somebody else. The module returns one tensor. It and its inputs may
    be real, or made inside a `FakeTensorMode` that is still active.
    """
    parameters = list(module.parameters())
    own = [_local(parameter) for parameter in parameters]
    tracker = _Tracker()
    for tensor in (*parameters, *module.buffers(), *shared):
        tracker.ignore(tensor)
    for tensor in inputs:
        tracker.see(tensor)
    saved: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(tracker.see(tensor))
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with tracker:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            end = End.apply(module(*inputs))
        activation = sum(tracker.alive_bytes(number) for number in saved)
        end.backward(torch.empty_like(end))
    for parameter in parameters:
        if parameter.grad is not None:
            tracker.ignore(parameter.grad)
            parameter.grad = None
    return ExactMemory(
        num_parameters=sum(p.numel() for p in own),
        parameter_bytes=sum(p.numel() * p.element_size() for p in own),
        activation_bytes=activation,
        peak_bytes=tracker.peak_bytes() - activation,
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a rank holds of a distributed tensor, any other tensor itself."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


class End(torch.autograd.Function):
    """Takes an output, lets go of it, and has a gradient for it, as the next layer would."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor, whose backward makes a gradient for `out`."""
        ctx.like = (out.shape, out.dtype, out.device)
        return out.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return ones in the shape of the output."""
        shape, dtype, device = ctx.like
        return torch.ones(shape, dtype=dtype, device=device)


@dataclass
class _Storage:
    num_bytes: int
    counts: bool = True
    alive: bool = True


@dataclass(eq=False)
class _Changes:
    """What came and went: storages by number, and the order of events."""

    storages: list[_Storage] = field(default_factory=list)
    events: list[tuple[int, int]] = field(default_factory=list)


class _Tracker(TorchDispatchMode):
    """Watches which storages operators make, and when they are gone."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[int, int] = {}
        self._changes = _Changes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return out

    def see(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage, which is alive from now on if it is new."""
        storage = _local(tensor).untyped_storage()
        address = storage._cdata
        if address in self._numbers:
            return self._numbers[address]
        changes = self._changes
        number = self._numbers[address] = len(changes.storages)
        changes.storages.append(_Storage(storage.nbytes()))
        changes.events.append((number, 1))
        weakref.finalize(storage, _gone, self._numbers, changes, address).atexit = False
        return number

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave a tensor's storage out of every figure."""
        self._changes.storages[self.see(tensor)].counts = False

    def alive_bytes(self, number: int) -> int:
        """Return the bytes of a storage, 0 when it is gone or ignored."""
        storage = self._changes.storages[number]
        return storage.num_bytes if storage.alive and storage.counts else 0

    def peak_bytes(self) -> int:
        """Return the most bytes that were alive at once."""
        alive = peak = 0
        for number, sign in self._changes.events:
            storage = self._changes.storages[number]
            if storage.counts:
                alive += sign * storage.num_bytes
                peak = max(peak, alive)
        return peak


def _gone(numbers: dict[int, int], changes: _Changes, address: int) -> None:
    number = numbers.pop(address)
    changes.storages[number].alive = False
    changes.events.append((number, -1))

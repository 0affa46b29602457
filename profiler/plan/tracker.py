"""Counts the memory of one training step, storage by storage, with or without contents.

Every storage that an operator makes, that is resized or that goes away is an event; the peak is
the largest sum. What a storage is for follows from who holds it:

    parameters            a rank's own shards or copies, and buffers of the model
    optimizer             the optimizer's state, and what it steps where that is no model parameter
    gathered parameters   unsharded parameters of FSDP2, and what they are gathered from and into
    gradients             of parameters, whole or sharded, and buffers that they are reduced in
    activations           what autograd saved in a forward and keeps for the backward
    other                 the rest: outputs, incoming gradients, temporaries, recomputed tensors

Not counted: rounding and fragmentation of an allocator, workspaces, communicators and what a
backend copies for itself, the context of a device, tensors that were there before and belong to
none of these. Works on real tensors and inside a `FakeTensorMode`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["PARTS", "count_step", "held_bytes"]

PARTS = (
    "parameters",
    "optimizer",
    "gathered parameters",
    "gradients",
    "activations",
    "other",
)
"""What bytes are divided into; a storage that is several of these is the first."""

# FSDP2's own operators, by name: torch registers them when the first module is sharded.
_FSDP_PARTS = {
    "fsdp::all_gather_copy_in": "gathered parameters",
    "fsdp::split_with_sizes_copy": "gathered parameters",
    "fsdp::chunk_cat": "gradients",
}

# Returns what it waited for, except among fake tensors, where it would be counted twice.
_WAIT = "_c10d_functional::wait_tensor"


def count_step(
    step: Callable[[], None],
    *,
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
) -> tuple[int, Mapping[str, int]]:
    """Return the most bytes alive at once while `step` runs, and what they were, by `PARTS`.

    `step` runs forwards, backwards and the optimizers. Run one step before: optimizer states exist
    only after it, and what DTensor works out once would be counted.
    """
    ledger = _Ledger()
    ledger.label((*model.parameters(), *model.buffers()), "parameters")

    def label_held(optimizer: torch.optim.Optimizer, *_: object) -> None:
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        ledger.label((stepped, list(optimizer.state.values())), "optimizer")
        ledger.label([parameter.grad for parameter in stepped], "gradients")

    def label_gradient(parameter: torch.Tensor) -> None:
        ledger.label([parameter.grad], "gradients")

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        ledger.label([tensor], "activations")
        return tensor

    ledger.label([parameter.grad for parameter in model.parameters()], "gradients")
    hooks = []
    for optimizer in optimizers:
        label_held(optimizer)
        hooks.append(optimizer.register_step_pre_hook(label_held))
    hooks += [
        parameter.register_post_accumulate_grad_hook(label_gradient)
        for parameter in model.parameters()
        if parameter.requires_grad
    ]
    try:
        with (
            _seen_resizes(ledger),
            _Watch(ledger),
            torch.autograd.graph.saved_tensors_hooks(saved, _unchanged),
        ):
            step()
    finally:
        for hook in hooks:
            hook.remove()
    return ledger.peak()


def held_bytes(tensors: object) -> int:
    """Return the bytes of the storages of all tensors in nested containers, each storage once.

    Distributed tensors count as what the rank holds of them; what is no tensor counts nothing.
    """
    held = {s._cdata: s.nbytes() for s in _storages(tree_leaves(tensors))}
    return sum(held.values())


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _storages(leaves: Iterable[object]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the tensors among some objects; wrappers have those of what they wrap.

    DTensor and the results of asynchronous functional collectives are wrappers.
    """
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            continue
        flatten = getattr(leaf, "__tensor_flatten__", None)
        if flatten is None:
            yield leaf.untyped_storage()
        else:
            yield from _storages(getattr(leaf, name) for name in flatten()[0])


class _Ledger:
    """What came, grew, shrank and went: storages by number, changes of bytes in their order."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._sizes: list[int] = []
        self._parts: list[int] = []
        self._before: list[tuple[int, int]] = []
        """Numbers and sizes of storages that were there when counting began."""
        self._events: list[tuple[int, int]] = []
        self._foreign: set[int] = set()
        """Storages that came from elsewhere and do not count."""

    def made(self, storage: torch.UntypedStorage) -> None:
        """Note a storage that an operator returned: alive from now on if it is new."""
        number = self._numbers.get(storage._cdata)
        self._resize(self._enter(storage) if number is None else number, storage.nbytes())

    def taken(self, storage: torch.UntypedStorage) -> None:
        """Note a storage that an operator takes; one that no operator made does not count."""
        if storage._cdata not in self._numbers:
            self._foreign.add(self._enter(storage))

    def label(self, tensors: object, part: str) -> None:
        """Say what the storages of all tensors in nested containers are for.

        Those that no operator made were there from the beginning.
        """
        for storage in _storages(tree_leaves(tensors)):
            self.label_storage(storage, part)

    def label_storage(self, storage: torch.UntypedStorage, part: str) -> None:
        """Say what one storage is for."""
        self.taken(storage)
        number = self._numbers[storage._cdata]
        if number in self._foreign:
            self._foreign.remove(number)
            self._sizes[number] = storage.nbytes()
            self._before.append((number, storage.nbytes()))
        self._parts[number] = min(self._parts[number], PARTS.index(part))

    def peak(self) -> tuple[int, Mapping[str, int]]:
        """Return the most bytes that were alive at once, and what they were."""
        alive = [0] * len(PARTS)
        for number, size in self._before:
            alive[self._parts[number]] += size
        total = most = sum(alive)
        parts = list(alive)
        for number, change in self._events:
            alive[self._parts[number]] += change
            total += change
            if total > most:
                most, parts = total, list(alive)
        return most, dict(zip(PARTS, parts, strict=True))

    def _enter(self, storage: torch.UntypedStorage) -> int:
        address = storage._cdata
        number = self._numbers[address] = len(self._sizes)
        self._sizes.append(0)
        self._parts.append(len(PARTS) - 1)
        weakref.finalize(storage, self._gone, address).atexit = False
        return number

    def _resize(self, number: int, size: int) -> None:
        change = size - self._sizes[number]
        if change and number not in self._foreign:
            self._sizes[number] = size
            self._events.append((number, change))

    def _gone(self, address: int) -> None:
        self._resize(self._numbers.pop(address), 0)


class _Watch(TorchDispatchMode):
    """Shows a ledger what operators take and return."""

    def __init__(self, ledger: _Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper's own operators come here one by one
        kwargs = kwargs or {}
        ledger = self._ledger
        for storage in _storages(tree_leaves((args, kwargs))):
            ledger.taken(storage)
        out = func(*args, **kwargs)
        name = func._schema.name
        if name == _WAIT:
            out = args[0]
        leaves = tree_leaves(out)
        for storage in _storages(leaves):
            ledger.made(storage)
        part = _FSDP_PARTS.get(name)
        if part is not None:
            ledger.label((args, kwargs, leaves), part)
        return out


@contextlib.contextmanager
def _seen_resizes(ledger: _Ledger) -> Iterator[None]:
    """Tell a ledger of every storage whose size is changed: no operator runs when FSDP2 does it."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        # FSDP2 keeps its unsharded parameters as storages without contents between uses
        ledger.label_storage(storage, "gathered parameters")
        out = resize(storage, size)
        ledger.made(storage)
        return out

    inherited = "resize_" not in vars(torch.UntypedStorage)
    torch.UntypedStorage.resize_ = resize_and_tell
    try:
        yield
    finally:
        if inherited:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = resize

"""Count the memory of one forward and backward pass of a module, storage by storage.

There are two results, in bytes of one rank for the whole batch:

    activation  bytes of saved activations: storages that autograd saves in the forward pass and
                that are still alive at its end, each counted once. The input of the part is
                included. Parameters, buffers and the encoder's output, which all decoder layers
                share, are not
    peak        largest number of bytes alive at any point of forward and backward, above
                `activation`. Outputs, incoming gradients and results of operators are included.
                Parameters, their gradients and memory inside an operator are not

Neither includes rounding and fragmentation of an allocator, GEMM workspaces, or communication
buffers outside the process.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.documents.sidecar import TensorKind
from autopar.records import Record, replace
from autopar.run.model import LayerSpec, ModelSpec
from profiler.measure import torch_dtype
from profiler.model.layers.blocks import build_layer, layer_inputs
from profiler.model.layers.parallel import sole_group
from profiler.model.layers.sharding import Sharding
from profiler.model.layers.vocab import VocabPart, build_vocab, vocab_inputs

# --------------------------------------------------------------------------------------------------
# Memory of one training step, storage by storage, with real or fake tensors.
#
# Every storage that an operator creates, and every resize or release of one, is an event. The peak
# is the largest running sum. The owner of a storage determines its category:
#
#     parameters            shards or copies of the rank, and buffers of the model
#     optimizer             the optimizer's state, and parameters that it steps outside the model
#     gathered parameters   unsharded parameters of FSDP2, and the buffers of their all-gather
#     gradients             of parameters, whole or sharded, and the buffers of their reduction
#     activations           tensors that autograd saves in a forward for the backward
#     other                 outputs, incoming gradients, temporaries, recomputed tensors
#
# Not counted: rounding and fragmentation of an allocator, workspaces, communicators, internal
# copies of a communication backend, the device context, and tensors that existed before the step
# and belong to none of the first five categories. Works with real tensors and inside a
# `FakeTensorMode`.


PARTS = (
    "parameters",
    "optimizer",
    "gathered parameters",
    "gradients",
    "activations",
    "other",
)
"""Memory categories by priority: a storage with several labels belongs to the first of them."""

# FSDP2 operators by name: torch registers them only when the first module is sharded.
_FSDP_PARTS = {
    "fsdp::all_gather_copy_in": "gathered parameters",
    "fsdp::split_with_sizes_copy": "gathered parameters",
    "fsdp::chunk_cat": "gradients",
}

# This operator returns its input, except that it copies fake tensors. The copy is not counted.
_WAIT = "_c10d_functional::wait_tensor"


def count_step(
    step: Callable[[], None],
    *,
    model: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
) -> tuple[int, Mapping[str, int]]:
    """Return the peak of the bytes alive while `step` runs: (total, bytes by category of `PARTS`).

    `step` runs forward passes, backward passes and the optimizers. Run one step before this call:
    the first step creates the optimizer states and the caches of DTensor, which would otherwise be
    counted as new tensors.
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

    # gradients of an earlier pass exist from the start
    ledger.label([parameter.grad for parameter in model.parameters()], "gradients")
    hooks = []
    for optimizer in optimizers:
        label_held(optimizer)
        hooks.append(optimizer.register_step_pre_hook(label_held))
    # a storage is recognized as a gradient, not a temporary, only after accumulation
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

    For a distributed tensor, only the local part on this rank counts. Other objects count as 0.
    """
    # views of one storage share its address
    held = {s._cdata: s.nbytes() for s in _storages(tree_leaves(tensors))}
    return sum(held.values())


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _storages(leaves: Iterable[object]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of all tensors in `leaves`; for a wrapper, those of its inner tensors.


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
    """Log of storages: their numbers, categories and size changes in order of time."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._sizes: list[int] = []
        self._parts: list[int] = []
        self._before: list[tuple[int, int]] = []
        """(number, bytes) of labelled storages that existed when counting began."""
        self._events: list[tuple[int, int]] = []
        self._foreign: set[int] = set()
        """Numbers of storages that no watched operator created. They are not counted unless they
        receive a label."""

    def made(self, tensors: object) -> None:
        """Record the results of an operator; their new storages are alive from now on."""
        for storage in _storages(tree_leaves(tensors)):
            self.sized(storage)

    def sized(self, storage: torch.UntypedStorage) -> None:
        """Record the current size of a storage, which may be new."""
        number = self._numbers.get(storage._cdata)
        self._resize(self._enter(storage) if number is None else number, storage.nbytes())

    def taken(self, storage: torch.UntypedStorage) -> None:
        """Record an operator's input; a storage that no operator created is not counted."""
        if storage._cdata not in self._numbers:
            self._foreign.add(self._enter(storage))

    def label(self, tensors: object, part: str) -> None:
        """Assign the storages of all tensors in nested containers to category `part`.

        Storages that no operator created are counted as alive from the beginning.
        """
        for storage in _storages(tree_leaves(tensors)):
            self.label_storage(storage, part)

    def label_storage(self, storage: torch.UntypedStorage, part: str) -> None:
        """Assign one storage to category `part`."""
        self.taken(storage)
        number = self._numbers[storage._cdata]
        if number in self._foreign:
            self._foreign.remove(number)
            self._sizes[number] = storage.nbytes()
            self._before.append((number, storage.nbytes()))
        # the earliest category wins, so that the order of labels does not matter
        self._parts[number] = min(self._parts[number], PARTS.index(part))

    def alive(self, part: str) -> int:
        """Return the bytes in category `part` that are alive now."""
        wanted = PARTS.index(part)
        sizes = zip(self._parts, self._sizes, strict=True)
        return sum(size for found, size in sizes if found == wanted)

    def peak(self, first: int = 0) -> tuple[int, Mapping[str, int]]:
        """Return the peak of the bytes alive at once: (total, bytes by category at that point).

        first : index in `PARTS`; the total excludes the categories before it.
        """
        alive = [0] * len(PARTS)
        for number, size in self._before:
            alive[self._parts[number]] += size
        total = most = sum(alive[first:])
        parts = list(alive)
        for number, change in self._events:
            # the category is read at the end, since a storage may be labelled after its release
            alive[self._parts[number]] += change
            total += change if self._parts[number] >= first else 0
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
        # removed, since another storage may reuse the address
        self._resize(self._numbers.pop(address), 0)


class _Watch(TorchDispatchMode):
    """Dispatch mode that reports the inputs and results of operators to a ledger.

    closely : True counts the inner operators of wrapper tensors, and ignores tensors that no
    watched operator created. False counts the results of every operator.
    """

    def __init__(self, ledger: _Ledger, *, closely: bool = True) -> None:
        super().__init__()
        self._ledger = ledger
        self._closely = closely

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ledger = self._ledger
        if not self._closely:
            out = func(*args, **kwargs)
            ledger.made(out)
            return out
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the inner operators of a wrapper are dispatched one by one
        # before the call, so that returned inputs are not counted as new
        for storage in _storages(tree_leaves((args, kwargs))):
            ledger.taken(storage)
        out = func(*args, **kwargs)
        name = func._schema.name
        if name == _WAIT:
            out = args[0]
        leaves = tree_leaves(out)
        ledger.made(leaves)
        part = _FSDP_PARTS.get(name)
        if part is not None:
            ledger.label((args, kwargs, leaves), part)
        return out


@contextlib.contextmanager
def _seen_resizes(ledger: _Ledger) -> Iterator[None]:
    """Report every resize of a storage to a ledger; FSDP2 resizes storages without an operator."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        # FSDP2 reuses the storages of its unsharded parameters; their size is 0 between uses
        ledger.label_storage(storage, "gathered parameters")
        out = resize(storage, size)
        ledger.sized(storage)
        return out

    # delete the attribute if it was inherited: a copy on the class would hide the base's method
    inherited = "resize_" not in vars(torch.UntypedStorage)
    torch.UntypedStorage.resize_ = resize_and_tell
    try:
        yield
    finally:
        if inherited:
            del torch.UntypedStorage.resize_
        else:
            torch.UntypedStorage.resize_ = resize


# --------------------------------------------------------------------------------------------------
# Memory of a module: saved activations and peak.


class ExactMemory(Record):
    """Memory of one part of a model on one rank, in bytes for the whole batch."""

    num_parameters: int
    parameter_bytes: int
    activation_bytes: int
    """Bytes of tensors that autograd saves from forward to backward."""
    peak_bytes: int
    """Peak of the bytes alive in forward and backward, minus `activation_bytes`. Parameters and
    their gradients are not included."""
    notes: tuple[str, ...] = ()


def count_memory(
    module: nn.Module,
    inputs: Sequence[torch.Tensor],
    *,
    shared: Sequence[torch.Tensor] = (),
) -> ExactMemory:
    """Return the memory of one forward and backward pass of a module; see the module docstring.

    The module must return one tensor. It and its inputs may be real, or created inside a
    `FakeTensorMode` that is still active. Gradients of parameters are set to None.

    shared : inputs that belong to other parts of the model and are not counted.
    """
    parameters = list(module.parameters())
    own = [local_tensor(parameter) for parameter in parameters]
    ledger = _Ledger()
    ledger.label((*parameters, *module.buffers(), *shared), "parameters")
    ledger.made(inputs)

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        # counted even if no operator created it, for example a table that the module stores
        ledger.made([tensor])
        ledger.label([tensor], "activations")
        return tensor

    with _Watch(ledger, closely=False):
        with torch.autograd.graph.saved_tensors_hooks(saved, _unchanged):
            end = End.apply(module(*inputs))
        # between the passes: storages that autograd saved and that are alive, each once
        activation = ledger.alive("activations")
        end.backward(torch.empty_like(end))
    for parameter in parameters:
        ledger.label([parameter.grad], "gradients")
        parameter.grad = None
    # parameters and their gradients are model states, which the cost model counts itself
    peak, _ = ledger.peak(PARTS.index("activations"))
    return ExactMemory(
        num_parameters=sum(p.numel() for p in own),
        parameter_bytes=sum(p.numel() * p.element_size() for p in own),
        activation_bytes=activation,
        # saved activations count per micro-batch in flight, the rest of the peak once
        peak_bytes=peak - activation,
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a distributed tensor; return any other tensor unchanged."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


class End(torch.autograd.Function):
    """Replacement of the next layer: releases an output, and provides its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor whose backward creates a gradient for `out`."""
        ctx.like = (out.shape, out.dtype, out.device)
        return out.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """Return a gradient of ones with the shape of the output."""
        shape, dtype, device = ctx.like
        return torch.ones(shape, dtype=dtype, device=device)


# --------------------------------------------------------------------------------------------------
# Exact memory of layers and of embedding and head, counted without a device.
#
# Each part runs forward and backward with fake tensors, as one rank of a group without
# communication. The module docstring defines the results.


def layer_memory(
    spec: LayerSpec,
    sharding: Sharding,
    *,
    batch: int = 1,
    dtype: str = "bf16",
    encoder_seq_length: int | None = None,
) -> ExactMemory:
    """Return the memory of one layer on one rank; raise InputError if it cannot be built.

    encoder_seq_length : encoder tokens that cross-attention reads; None means the length of the
    layer.
    """
    element = torch_dtype(dtype)
    notes = []
    if spec.cross_attention:
        notes.append("the encoder's output is not counted: all decoder layers share it")
    if not sharding.flash:
        notes.append(
            "attention stores its score matrix, which grows with the square of the sequence"
        )
    if spec.num_experts is not None:
        notes.append("tokens are spread evenly over the experts")
    with FakeTensorMode():
        module = build_layer(
            spec,
            sharding,
            group=sole_group(sharding.degree),
            dtype=element,
            device="cpu",
            expert_group=sole_group(sharding.expert_degree),
            context_group=sole_group(sharding.context_degree),
        )
        inputs = layer_inputs(
            spec,
            sharding,
            batch=batch,
            dtype=element,
            device="cpu",
            encoder_seq_length=encoder_seq_length,
        )
        # inputs after the first are the encoder's output, which all decoder layers share
        counted = count_memory(module, inputs, shared=inputs[1:])
    return replace(counted, notes=tuple(notes))


def vocab_memory(
    spec: ModelSpec,
    part: VocabPart,
    *,
    degree: int = 1,
    kind: TensorKind = "sp",
    batch: int = 1,
    dtype: str = "bf16",
) -> ExactMemory:
    """Return the memory of embedding, head or both on one rank of a vocabulary-parallel group.

    part : as in `build_vocab`.

    Raises InputError if the part cannot be built.
    """
    element = torch_dtype(dtype)
    with FakeTensorMode():
        module = build_vocab(
            spec,
            part,
            degree=degree,
            kind=kind,
            group=sole_group(degree),
            dtype=element,
            device="cpu",
        )
        inputs = vocab_inputs(
            spec, part, degree=degree, kind=kind, batch=batch, dtype=element, device="cpu"
        )
        counted = count_memory(module, inputs)
    notes = []
    if part == "last" and spec.tied_embeddings:
        notes.append("the table is tied to that of the first stage; this stage has a copy")
    return replace(counted, notes=tuple(notes))

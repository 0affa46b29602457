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
# Counts the memory of one training step, storage by storage, with or without contents.
#
# Every storage that an operator makes, that is resized or that goes away is an event; the peak is
# the largest sum. What a storage is for follows from who holds it:
#
#     parameters            a rank's own shards or copies, and buffers of the model
#     optimizer             the optimizer's state, and what it steps where that is no model
#     parameter
#     gathered parameters   unsharded parameters of FSDP2, and what they are gathered from and into
#     gradients             of parameters, whole or sharded, and buffers that they are reduced in
#     activations           what autograd saved in a forward and keeps for the backward
#     other                 the rest: outputs, incoming gradients, temporaries, recomputed tensors
#
# Not counted: rounding and fragmentation of an allocator, workspaces, communicators and what a
# backend copies for itself, the context of a device, tensors that were there before and belong to
# none of these. Works on real tensors and inside a `FakeTensorMode`.


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

    # gradients that an earlier pass has left are there from the beginning
    ledger.label([parameter.grad for parameter in model.parameters()], "gradients")
    hooks = []
    for optimizer in optimizers:
        label_held(optimizer)
        hooks.append(optimizer.register_step_pre_hook(label_held))
    # only once it is accumulated is a storage known as a gradient, not as a temporary
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
    # tensors that view one storage share its address, and count once
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

    def made(self, tensors: object) -> None:
        """Note what an operator returned: its storages are alive from now on if they are new."""
        for storage in _storages(tree_leaves(tensors)):
            self.sized(storage)

    def sized(self, storage: torch.UntypedStorage) -> None:
        """Note that a storage, which may be new, is as large as it is now."""
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
        # the first of PARTS wins, so that the order of labels does not matter
        self._parts[number] = min(self._parts[number], PARTS.index(part))

    def alive(self, part: str) -> int:
        """Return the bytes that are alive now of what is for `part`."""
        wanted = PARTS.index(part)
        sizes = zip(self._parts, self._sizes, strict=True)
        return sum(size for found, size in sizes if found == wanted)

    def peak(self, first: int = 0) -> tuple[int, Mapping[str, int]]:
        """Return the most bytes that were alive at once, and what they were.

        first : the earliest of `PARTS` that counts.
        """
        alive = [0] * len(PARTS)
        for number, size in self._before:
            alive[self._parts[number]] += size
        total = most = sum(alive[first:])
        parts = list(alive)
        for number, change in self._events:
            # asked at the end: what a storage is for may be known only after it has gone
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
        # popped, since another storage may soon have the address
        self._resize(self._numbers.pop(address), 0)


class _Watch(TorchDispatchMode):
    """Shows a ledger what operators take and return.

    closely : also what happens inside the operators of wrappers; and leaves out tensors that no
    operator made while it watched. Otherwise what any operator returns counts.
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
            return NotImplemented  # a wrapper's own operators come here one by one
        # before the call, so that inputs that it returns are not taken for new
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
    """Tell a ledger of every storage whose size is changed: no operator runs when FSDP2 does it."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        # FSDP2 keeps its unsharded parameters as storages without contents between uses
        ledger.label_storage(storage, "gathered parameters")
        out = resize(storage, size)
        ledger.sized(storage)
        return out

    # put back as it was: an own attribute would shadow the inherited one for good
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
# The count of a module: what is kept, and the most that is there at once.


class ExactMemory(Record):
    """Memory of one part of a model on one rank, in bytes for the whole batch."""

    num_parameters: int
    parameter_bytes: int
    activation_bytes: int
    """Kept from forward to backward."""
    peak_bytes: int
    """The most that is alive at once, above what is kept."""
    notes: tuple[str, ...] = ()


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
    own = [local_tensor(parameter) for parameter in parameters]
    ledger = _Ledger()
    ledger.label((*parameters, *module.buffers(), *shared), "parameters")
    ledger.made(inputs)

    def saved(tensor: torch.Tensor) -> torch.Tensor:
        # whoever made it: a table that a module keeps as an attribute is kept for the backward, too
        ledger.made([tensor])
        ledger.label([tensor], "activations")
        return tensor

    with _Watch(ledger, closely=False):
        with torch.autograd.graph.saved_tensors_hooks(saved, _unchanged):
            end = End.apply(module(*inputs))
        # between the passes: what autograd holds and is still alive, each storage once
        activation = ledger.alive("activations")
        end.backward(torch.empty_like(end))
    for parameter in parameters:
        ledger.label([parameter.grad], "gradients")
        parameter.grad = None
    # parameters and their gradients belong to the states, which the cost model counts itself
    peak, _ = ledger.peak(PARTS.index("activations"))
    return ExactMemory(
        num_parameters=sum(p.numel() for p in own),
        parameter_bytes=sum(p.numel() * p.element_size() for p in own),
        activation_bytes=activation,
        # what is kept counts for each micro-batch in flight, the rest of the peak once
        peak_bytes=peak - activation,
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
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


# --------------------------------------------------------------------------------------------------
# Memory of layers and of what surrounds them, counted exactly, without a device.
#
# A part runs forward and backward on tensors that have shapes and no contents, on one rank of a
# group that exchanges nothing; `counting` says what is counted.


def layer_memory(
    spec: LayerSpec,
    sharding: Sharding,
    *,
    batch: int = 1,
    dtype: str = "bf16",
    encoder_seq_length: int | None = None,
) -> ExactMemory:
    """Return the memory of one layer on one rank; raises InputError for what cannot be built."""
    element = torch_dtype(dtype)
    notes = []
    if spec.cross_attention:
        notes.append("the encoder's output is not counted here: all decoder layers share it")
    if not sharding.flash:
        notes.append("attention keeps its matrix of scores, which grows with the sequence squared")
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
        # beyond the first there is the encoder's output, which all decoder layers share
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
    """Return the memory of what surrounds the layers, on one rank of a vocabulary group."""
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
        notes.append("the table is tied to the first stage's, of which this stage has a copy")
    return replace(counted, notes=tuple(notes))

"""Recomputation in the backward: of functions with their saved tensors, or of outputs only.

With torch's checkpoint, the output of a function stays alive if the next function saves it as its
input. Recomputing a cheap function then does not reduce memory. `discarding` also frees the
output and recomputes it in the backward, like Megatron-Core's CheckpointWithoutOutput.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(function: Any, *arguments: Any, dropout: float = 0.0) -> Any:
    """Return `function(*arguments)` with torch's checkpoint: only the arguments are saved.

    dropout : dropout probability in the function; if positive, the random state is saved too.
    """
    # the recomputation needs the dropout mask of the forward; without dropout nothing is random
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)


def discarding(make: Callable[..., Any], take: Callable[..., Any], *arguments: Any) -> Any:
    """Return `take(make(*arguments))` without saving the output of `make` for the backward.

    The backward of `take` recomputes that output. If `make` returns a tuple, `take` receives its
    elements as arguments. Tensors that `make` saves for its backward stay alive.
    """
    made = make(*arguments)
    outputs = made if isinstance(made, tuple) else (made,)
    again = _Again(make, arguments, outputs)

    keep, take_back = _outer_hooks()

    def pack(tensor: torch.Tensor) -> Any:
        output = again.output_of(tensor)
        if output is None:
            return keep(tensor)
        again.waiting += 1
        return _Part(output, tensor.shape, tensor.stride(), tensor.storage_offset())

    def unpack(packed: Any) -> Any:
        return again.part(packed) if isinstance(packed, _Part) else take_back(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return take(*outputs)


def _outer_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Return the (pack, unpack) hooks for saved tensors that are already active.

    autograd calls only the innermost hooks, so the hooks of `discarding` call these, which may
    count saved tensors.
    """
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return (ask(False) if ask is not None else None) or (_same, _same)


def _same(tensor: Any) -> Any:
    return tensor


class _Part(NamedTuple):
    """View of an output: its index, shape, stride and offset."""

    output: int
    """Index of the output among those of the function."""
    shape: Any
    stride: Any
    offset: int


class _Again:
    """Outputs of a function, recomputed when the backward reads the first part of them."""

    def __init__(
        self, make: Callable[..., Any], arguments: tuple[Any, ...], made: tuple[Any, ...]
    ) -> None:
        self._make, self._arguments = make, arguments
        # addresses only, so that the storages themselves are not kept alive
        self._storages = [output.untyped_storage()._cdata for output in made]
        self._made: Any = None
        self.waiting = 0
        """Number of saved parts that the backward has not read yet."""

    def output_of(self, tensor: torch.Tensor) -> int | None:
        """Return the index of the output that contains a tensor, or None."""
        storage = tensor.untyped_storage()._cdata
        return self._storages.index(storage) if storage in self._storages else None

    def part(self, at: _Part) -> torch.Tensor:
        """Return a part of an output; free the outputs after the last part."""
        if self._made is None:
            with torch.no_grad():
                made = self._make(*(x.detach() for x in self._arguments))
            self._made = made if isinstance(made, tuple) else (made,)
        whole: torch.Tensor = self._made[at.output]
        found = whole.as_strided(at.shape, at.stride, at.offset)
        self.waiting -= 1
        if self.waiting <= 0:
            self._made = None
        return found

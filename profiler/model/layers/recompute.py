"""Recomputation in the backward: of whole functions, or of their outputs only.

torch's checkpoint keeps the input and the output of a function. This saves nothing if the consumer
keeps that output as its own input. `discarding` recomputes the output where it is needed, like
Megatron-Core's CheckpointWithoutOutput.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(function: Any, *arguments: Any, dropout: float = 0.0) -> Any:
    """Return the result of a function; only its arguments are kept, and backward recomputes it."""
    # the recomputation needs the dropout mask of the forward; without dropout nothing is random
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)


def discarding(make: Callable[..., Any], take: Callable[..., Any], *arguments: Any) -> Any:
    """Return `take(make(*arguments))`; its backward recomputes the output of `make`.

    `take` receives several outputs as separate arguments. Tensors that `make` saves for its own
    backward are kept.
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
    """Return the (pack, unpack) hooks that are already active for saved tensors.

    They may count saved tensors, for example. autograd calls only the innermost hooks, so `pack`
    and `unpack` call these.
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
    """Outputs that are recomputed when their first part is needed."""

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

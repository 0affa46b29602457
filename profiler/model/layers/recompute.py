"""What the backward computes again instead of keeping it: whole functions, or their outputs alone.

torch's checkpoint keeps the input and the output of a function. Where whoever takes the output
keeps it as its own input, that saves nothing; `discarding` has it made again where it is needed, as
Megatron-Core's CheckpointWithoutOutput does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint


def recomputed(function: Any, *arguments: Any, dropout: float = 0.0) -> Any:
    """Return what a function returns, of which the backward keeps the arguments alone."""
    # the second forward needs the dropout mask of the first; else nothing is drawn
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=dropout > 0)


def discarding(make: Callable[..., Any], take: Callable[..., Any], *arguments: Any) -> Any:
    """Return `take(make(*arguments))`, whose backward has made's output made again.

    Of several outputs `take` takes each. What `make` keeps for its own backward stays.
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
    """Return what is done already to tensors that are kept, such as counting them.

    autograd calls the innermost hooks alone.
    """
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return (ask(False) if ask is not None else None) or (_same, _same)


def _same(tensor: Any) -> Any:
    return tensor


class _Part(NamedTuple):
    """Where a part of an output lies in it."""

    output: int
    """Which of several."""
    shape: Any
    stride: Any
    offset: int


class _Again:
    """Outputs that are made again when the first of their parts is asked for."""

    def __init__(
        self, make: Callable[..., Any], arguments: tuple[Any, ...], made: tuple[Any, ...]
    ) -> None:
        self._make, self._arguments = make, arguments
        # numbers alone, so that the storages themselves are not kept
        self._storages = [output.untyped_storage()._cdata for output in made]
        self._made: Any = None
        self.waiting = 0
        """Parts that have not been asked for since it was made."""

    def output_of(self, tensor: torch.Tensor) -> int | None:
        """Return which output a tensor is, or is a part of; None: of none."""
        storage = tensor.untyped_storage()._cdata
        return self._storages.index(storage) if storage in self._storages else None

    def part(self, at: _Part) -> torch.Tensor:
        """Return a part of an output; after the last one all are let go."""
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

"""Tensor and sequence parallelism as in Megatron-LM: autograd functions and linear layers.

With sequence parallelism, the column-parallel linear saves its shard of the sequence and gathers it
again in the backward. With kind `dtensor_sp` it saves the gathered input, as torch's
`parallelize_module` does. All tensors are (sequence, batch, ...), and ranks hold consecutive pieces
of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from autopar.documents.sidecar import TensorKind
from autopar.errors import InputError
from autopar.records import Record
from profiler.measure import renamed

# --------------------------------------------------------------------------------------------------
# Collectives for a torch process group, a simulated group with one process, or no group (None).
#
# They work along dimension 0, the sequence.


class SoleRank:
    """Simulated group of `degree` ranks in one process, which is rank 0; for counting memory.

    Results have the sizes of a real group's, and are allocated if a process group would allocate
    them. Values are finite and come from this rank. torch.distributed is not initialised and may be
    used for other purposes. Any object with these methods can be the group of a layer.
    """

    def __init__(self, degree: int) -> None:
        """Create a group of `degree` ranks."""
        self._degree = degree

    def size(self) -> int:
        """Return the number of ranks."""
        return self._degree

    def rank(self) -> int:
        """Return this rank's number."""
        return 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return x unchanged; a real group would sum over the ranks in place."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `degree` copies of x, concatenated along dimension 0."""
        return x.repeat(self._degree, *[1] * (x.dim() - 1))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return the first of `degree` equal pieces of x."""
        # a real group allocates its result, and a view would not be counted
        return x[: len(x) // self._degree].clone(memory_format=torch.contiguous_format)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return a copy of x; a real group would exchange its pieces between the ranks."""
        # a real group allocates its result
        return x.clone()


def sole_group(degree: int) -> SoleRank | None:
    """Return a simulated group of `degree` ranks for counting memory; None for one rank."""
    return SoleRank(degree) if degree > 1 else None


def _is_real(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup)


def all_gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the x of all ranks, concatenated along dimension 0; it must not be written to."""
    # process groups accept only contiguous tensors
    x = x.contiguous()
    if not _is_real(group):
        return x if group is None else group.all_gather(x)
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    renamed("all_gather_single", "all_gather_into_tensor")(out, x, group=group)
    return out


def reduce_scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return this rank's piece of the sum of x over all ranks; it must not be written to."""
    x = x.contiguous()
    if not _is_real(group):
        return x if group is None else group.reduce_scatter(x)
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    renamed("reduce_scatter_single", "reduce_scatter_tensor")(out, x, group=group)
    return out


def all_reduce(x: torch.Tensor, group: Any, *, largest: bool = False) -> torch.Tensor:
    """Sum x over all ranks in place (maximum if `largest`) and return it; x must be contiguous."""
    if not _is_real(group):
        return x if group is None else group.all_reduce(x)
    assert x.is_contiguous(), x.stride()
    dist.all_reduce(x, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return x


def all_to_all(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return this rank's piece from every rank; x has one piece per rank in dimension 0."""
    x = x.contiguous()
    if not _is_real(group):
        return x if group is None else group.all_to_all(x)
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out


# --------------------------------------------------------------------------------------------------
# A simulated group whose collectives take no time.
#
# A layer of a tensor-parallel group is timed on one device with the computation of one rank. Its
# communication is measured separately. Results of collectives are views, or random values that are
# created in the warm-up, so that no kernel runs for a collective.


class LocalGroup(SoleRank):
    """Simulated group of `degree` ranks in one process, for timing; collectives launch no kernel.

    Results may alias the input or each other, so they must not be written to. For counting memory,
    use `SoleRank`.
    """

    def __init__(self, degree: int) -> None:
        """Create a group of `degree` ranks."""
        assert degree >= 1, degree
        super().__init__(degree)
        self._kept: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return random values with the shape of an all-gather of x.

        Values are normally distributed, like activations after norms, since kernels run faster on
        zeros. They are created at the first call for each shape.
        """
        shape = torch.Size((len(x) * self._degree, *x.shape[1:]))
        key = (shape, x.dtype, x.device)
        if key not in self._kept:
            self._kept[key] = torch.randn(shape, dtype=x.dtype, device=x.device)
        # .data: an alias without the graph of another caller
        return self._kept[key].data

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of x, as a view."""
        return x.data[: len(x) // self._degree]

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """Return an alias of x, detached from the autograd graph."""
        return x.data


def timed_group(degree: int) -> LocalGroup | None:
    """Return a group of `degree` ranks for timing; None for one rank."""
    return LocalGroup(degree) if degree > 1 else None


# --------------------------------------------------------------------------------------------------
# Entry to and exit from the tensor-parallel region, forward and backward.


class _Enter(torch.autograd.Function):
    """Entry to the tensor-parallel region: all-gather if split, else identity.

    The backward is the reduce-scatter or all-reduce of the gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, split: bool) -> Any:
        ctx.group, ctx.split = group, split
        return all_gather(x, group) if split else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        if ctx.split:
            # all ranks used the shard, so its gradient is the sum over ranks
            return reduce_scatter(g, ctx.group), None, None
        # all-reduce is in place, and g may be used elsewhere
        return all_reduce(g.clone(memory_format=torch.contiguous_format), ctx.group), None, None


class _Leave(torch.autograd.Function):
    """Exit from the tensor-parallel region: reduce-scatter if split, else all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, split: bool) -> Any:
        ctx.group, ctx.split = group, split
        if split:
            return reduce_scatter(x, group)
        # all-reduce is in place, and x may be used elsewhere
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        # the gradient of a sum applies to every term: each rank needs all of it
        return (all_gather(g, ctx.group) if ctx.split else g), None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        # pieces return to their source ranks
        return all_to_all(g, ctx.group), None


class _Column(torch.autograd.Function):
    """Column-parallel linears with one common input; saves the input before any all-gather."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any, split: bool, *parameters: Any) -> Any:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.group, ctx.split = group, split
        ctx.has_bias = [bias is not None for bias in biases]
        ctx.save_for_backward(x, *weights)
        full = all_gather(x, group) if split else x
        return tuple(functional.linear(full, *pair) for pair in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, *weights = ctx.saved_tensors
        # gathered again instead of kept: one more all-gather for 1/t of the memory
        full = (all_gather(x, ctx.group) if ctx.split else x).flatten(0, -2)
        flat = [grad.flatten(0, -2) for grad in grads]
        found: list[Any] = []
        for grad, has_bias in zip(flat, ctx.has_bias, strict=True):
            found += [grad.t() @ full, grad.sum(0) if has_bias else None]
        shape = full.shape
        # freed before the gradient of equal size is allocated
        del full
        grad_x = flat[0] @ weights[0]
        for grad, weight in zip(flat[1:], weights[1:], strict=True):
            # in place, to avoid a second gradient of this size
            grad_x.addmm_(grad, weight)
        assert grad_x.shape == shape
        grad_x = grad_x.view(*grads[0].shape[:-1], -1)
        exchange = reduce_scatter if ctx.split else all_reduce
        return exchange(grad_x, ctx.group), None, None, *found


class _Row(torch.autograd.Function):
    """Row-parallel linear; saves its input, a shard of the features."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, group: Any, split: bool) -> Any:
        ctx.group, ctx.split, ctx.has_bias = group, split, bias is not None
        ctx.save_for_backward(x, weight)
        if group is None:
            return functional.linear(x, weight, bias)
        out = functional.linear(x, weight)
        out = reduce_scatter(out, group) if split else all_reduce(out, group)
        return out if bias is None else out + bias  # once, not once per rank

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        # gradient of this rank's tokens only, with sequence parallelism; the engine sums it
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        full = all_gather(grad, ctx.group) if ctx.split else grad
        grad_weight = full.flatten(0, -2).t() @ x.flatten(0, -2)
        return full @ weight, grad_weight, grad_bias, None, None


# --- the group of a layer ------------------------------------------------------------------


class TensorGroup(Record):
    """Tensor-parallel or Ulysses group of a layer, with its collectives."""

    degree: int
    kind: TensorKind
    group: Any = None
    """A torch process group, an object with the methods of SoleRank, or None at degree 1."""

    def __post_init__(self) -> None:
        if self.degree > 1 and self.group is None:
            raise InputError(
                f"a layer of degree {self.degree} needs a process group",
                remedy=f"Pass one, or SoleRank({self.degree}) to run one rank alone",
            )
        if self.group is not None:
            size = self.group.size()
            if size != self.degree:
                raise InputError(
                    f"the process group has {size} ranks, but the layer has degree {self.degree}",
                    remedy="Use a group of that size",
                )

    @property
    def splits_weights(self) -> bool:
        """True if weights are sharded over the group."""
        return self.kind != "ulysses" and self.degree > 1

    @property
    def splits_sequence(self) -> bool:
        """True if the residual stream is sharded over the group along the sequence."""
        return self.kind in ("sp", "dtensor_sp", "ulysses") and self.degree > 1

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return 0 if self.group is None else int(self.group.rank())

    @property
    def weight_ranks(self) -> int:
        """Number of shards of the weights; 1 for Ulysses."""
        return self.degree if self.splits_weights else 1

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return x as the input of the tensor-parallel region; saves no tensor.

        x is gathered if the kind splits the sequence, and unchanged if weights are not sharded.
        """
        return _Enter.apply(x, self.group, self.splits_sequence) if self.splits_weights else x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x over the group, for this rank's tokens if the sequence is split."""
        return _Leave.apply(x, self.group, self.splits_sequence) if self.splits_weights else x

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece from every rank; x has one piece per rank in dimension 0."""
        return x if self.degree == 1 else _Exchange.apply(x, self.group)


class ColumnParallel(nn.Module):
    """Linears with one common input and output features sharded over a tensor-parallel group."""

    def __init__(self, inputs: int, outputs: Sequence[int], *, bias: bool, on: TensorGroup) -> None:
        """Create one linear per entry of `outputs`, the numbers of output features on this rank."""
        super().__init__()
        self.on = on
        self.weights = nn.ParameterList(_weight(n, inputs) for n in outputs)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in outputs if bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of all linears for x of shape (sequence, batch, inputs)."""
        on = self.on
        split = on.splits_sequence and on.splits_weights
        if split and on.kind == "dtensor_sp":
            x, split = on.enter(x), False
            group = None  # `enter` gathers, and its backward reduces
        else:
            group = on.group if on.splits_weights else None
        biases = list(self.biases) or [None] * len(self.weights)
        parameters = [p for pair in zip(self.weights, biases, strict=True) for p in pair]
        outputs: tuple[torch.Tensor, ...] = _Column.apply(x, group, split, *parameters)
        return outputs


class RowParallel(nn.Module):
    """Linear whose input features are sharded over a tensor-parallel group."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, on: TensorGroup) -> None:
        """Create the linear with `inputs` input features on this rank."""
        super().__init__()
        self.on = on
        self.weight = _weight(outputs, inputs)
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, summed over the ranks, (sequence, batch, outputs)."""
        group = self.on.group if self.on.splits_weights else None
        split = self.on.splits_sequence and group is not None
        return _Row.apply(x, self.weight, self.bias, group, split)


def _weight(outputs: int, inputs: int) -> Any:
    return nn.Parameter(torch.empty(outputs, inputs).normal_(std=0.02))

"""Collectives of one rank: of a process group, of a group that has no other rank, or of none.

They work along dimension 0: activations are (sequence, batch, ...), ranks hold consecutive pieces.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["SoleRank", "all_gather", "all_reduce", "all_to_all", "reduce_scatter"]


class SoleRank:
    """Rank 0 of a group whose other ranks do not exist: results are as large as in a real one.

    Every result that a process group would allocate is allocated, so that memory can be counted;
    the values are finite and this rank's own. Nothing global is set up: a process may count while
    it uses torch.distributed. Any object with these methods can be the group of a layer.
    """

    def __init__(self, degree: int) -> None:
        """Make a group of so many ranks."""
        self._degree = degree

    def size(self) -> int:
        """Return the number of ranks."""
        return self._degree

    def rank(self) -> int:
        """Return this rank's number."""
        return 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return x, into which a real group would sum."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return x as often as there are ranks, along `dim`."""
        times = [1] * x.dim()
        times[dim] = self._degree
        return x.repeat(times)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the first of as many pieces of x as there are ranks, along `dim`."""
        return x.narrow(dim, 0, x.shape[dim] // self._degree).clone(
            memory_format=torch.contiguous_format
        )

    def all_to_all(self, x: torch.Tensor, split_dim: int, concat_dim: int) -> torch.Tensor:
        """Return the pieces of x along `split_dim`, joined along `concat_dim`."""
        return torch.cat(x.chunk(self._degree, split_dim), concat_dim)


def _is_real(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup)


def _function(name: str, older: str) -> Any:
    # torch renamed them and warns about the older names
    return getattr(dist, name, None) or getattr(dist, older)


def all_gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the pieces of all ranks one after the other along dimension 0; not to be written."""
    x = x.contiguous()
    if not _is_real(group):
        return x if group is None else group.all_gather(x, 0)
    out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    _function("all_gather_single", "all_gather_into_tensor")(out, x, group=group)
    return out


def reduce_scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return this rank's piece along dimension 0 of the sum over all ranks; not to be written."""
    x = x.contiguous()
    if not _is_real(group):
        return x if group is None else group.reduce_scatter(x, 0)
    out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    _function("reduce_scatter_single", "reduce_scatter_tensor")(out, x, group=group)
    return out


def all_reduce(x: torch.Tensor, group: Any, *, largest: bool = False) -> torch.Tensor:
    """Return x, contiguous, summed over all ranks in place (or the largest values of all)."""
    if not _is_real(group):
        return x if group is None else group.all_reduce(x)
    assert x.is_contiguous(), x.stride()
    dist.all_reduce(x, op=dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group=group)
    return x


def all_to_all(x: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the rank's pieces of all ranks; x has a piece for each rank in dimension 0."""
    x = x.contiguous()
    if not _is_real(group):
        return x if group is None else group.all_to_all(x, 0, 0)
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, group=group)
    return out

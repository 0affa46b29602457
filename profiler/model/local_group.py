"""A group whose other ranks do not exist and whose collectives take no time.

A layer built for a tensor group computes on one device exactly what a rank of that group computes,
while its communication is measured and priced elsewhere. Results are views, or random values of
the right shape that were made before a clock ran: no kernel runs for a collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["LocalGroup", "timed_group"]


class LocalGroup:
    """Rank 0 of a group of `degree` ranks; a group for the parts of a model that are timed.

    Results may alias what went in, or one another: they may be kept and read, but not written to.
    Where memory is counted, a group that allocates like a real one is needed instead.
    """

    def __init__(self, degree: int) -> None:
        """Make a group of so many ranks."""
        assert degree >= 1, degree
        self._degree = degree
        self._kept: dict[tuple[torch.Size, torch.dtype, torch.device], torch.Tensor] = {}

    def size(self) -> int:
        """Return the number of ranks."""
        return self._degree

    def rank(self) -> int:
        """Return this rank's number."""
        return 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return what has the shape of the sum over the ranks: x itself."""
        return x

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return random values in the shape of all ranks' x side by side along `dim`.

        They are normal, as norms and their gradients leave them: with zeros, kernels are fast.
        """
        import torch

        shape = list(x.shape)
        shape[dim] *= self._degree
        key = (torch.Size(shape), x.dtype, x.device)
        if key not in self._kept:
            self._kept[key] = torch.randn(shape, dtype=x.dtype, device=x.device)
        # .data: an alias that no caller's graph is attached to
        return self._kept[key].data

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part of x along `dim`."""
        return x.data.narrow(dim, 0, x.shape[dim] // self._degree)

    def all_to_all(self, x: torch.Tensor, split_dim: int, concat_dim: int) -> torch.Tensor:
        """Return what has the shape of the parts of x along `split_dim`, joined along `concat_dim`.

        Where both are the first, of a contiguous x, that is x itself.
        """
        import torch

        if split_dim == concat_dim:
            return x.data
        return torch.cat(x.chunk(self._degree, split_dim), concat_dim)


def timed_group(degree: int) -> LocalGroup | None:
    """Return a group of so many ranks; None for one."""
    return LocalGroup(degree) if degree > 1 else None

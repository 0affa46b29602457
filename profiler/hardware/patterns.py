"""What measured tensors hold: random values while they are timed, known ones in a check.

All of them repeat with one period, so that a tensor of any size is filled and compared without a
second one of its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["PERIOD", "first_difference", "labelled", "random_values", "summand", "tile", "total"]

PERIOD = 65521
"""Elements after which patterns repeat: a prime, so that no misplaced block lands on a copy."""
_BASE = 251
"""Number of different pattern values, -125..125: sums of two are exact in bf16."""
_SPREAD = 17
"""Shifts the values from one run of `_BASE` places to the next."""
_COMPARED_PERIODS = 32
"""Periods that are compared at once; it bounds the memory of a comparison."""


def random_values(dtype: torch.dtype, device: torch.device, exponent: int = 0) -> torch.Tensor:
    """Return values of both signs in 2^exponent..2^(exponent+1), shape (65521,).

    They are the same on every rank, so that sums over ranks cancel nowhere.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(PERIOD, generator=generator, dtype=torch.float64) * 2 - 1
    values = (uniform.sign() + uniform) * 2.0**exponent
    return values.to(device=device, dtype=dtype)


def tile(tensor: torch.Tensor, pattern: torch.Tensor) -> None:
    """Fill a flat tensor with repetitions of a pattern."""
    whole = tensor.numel() // pattern.numel() * pattern.numel()
    tensor[:whole].view(-1, pattern.numel()).copy_(pattern)
    tensor[whole:].copy_(pattern[: tensor.numel() - whole])


def first_difference(tensor: torch.Tensor, pattern: torch.Tensor) -> int | None:
    """Return the first element of a flat tensor that differs from the repeated pattern."""
    period = pattern.numel()
    step = _COMPARED_PERIODS * period
    for start in range(0, tensor.numel(), step):
        part = tensor[start : start + step]
        whole = part.numel() // period * period
        for offset, differs in (
            (0, (part[:whole].view(-1, period) != pattern).view(-1)),
            (whole, part[whole:] != pattern[: part.numel() - whole]),
        ):
            if bool(differs.any()):
                return start + offset + int(differs.nonzero()[0])
    return None


def labelled(label: int | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return integers in -125..125, shape (65521,), that tell labels and places apart.

    The three digits of a label to base 251 take turns: labels below 251^3 differ within any three
    consecutive places. A tensor has one label for every place.
    """
    import torch

    at = torch.arange(PERIOD, device=device)
    weight = torch.tensor([1, _BASE, _BASE**2], device=device)[at % 3]
    digit = torch.div(label, weight, rounding_mode="floor")
    return (at + _SPREAD * (at // _BASE) + digit) % _BASE - _BASE // 2


def summand(position: int, block: int, count: int, device: torch.device) -> torch.Tensor:
    """Return what one of `count` ranks adds: at every place two of them have a value, others 0.

    So no order of summation leaves the integers that the narrowest type represents, however many
    ranks there are, and every rank's turn comes.
    """
    import torch

    at = torch.arange(PERIOD, device=device)
    own = labelled(position * count + block, device)
    return own.where((at - position) % count < 2, 0)


def total(block: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the sum of what `count` ranks add in a block."""
    import torch

    at = torch.arange(PERIOD, device=device)
    result = labelled(at % count * count + block, device)
    if count > 1:
        result = result + labelled((at - 1) % count * count + block, device)
    return result

"""Modules of others made of tensors that have shapes and no contents.

A module is not built inside FakeTensorMode: there, `module.to(dtype)` fails, which most factories
call. It is built of meta tensors outside, or in earnest where its code does not work with those,
and its tensors are replaced afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from autopar.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["fake_tensors", "made_here", "needs_values", "replace_tensors"]


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors without contents meanwhile, whose failures are raised and not logged as well."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = before


def needs_values() -> tuple[type[Exception], ...]:
    """Return what torch raises where tensors without contents are asked for them."""
    from torch._subclasses import fake_tensor

    names = (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "UnsupportedFakeTensorException",
        "UnsupportedOperatorException",
    )
    return tuple(getattr(fake_tensor, name) for name in names if hasattr(fake_tensor, name))


def made_here(
    make: Callable[[torch.device | str], Any],
    module_of: Callable[[Any], Any],
    device: torch.device | str,
) -> Any:
    """Return what `make` makes on a device; inside FakeTensorMode, without contents.

    make : gets the device, and says its failures as InputError. module_of : the module of what it
    made.
    """
    from torch import nn
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily() as mode:
        if mode is None:
            return make(device)
        try:
            made = make("meta")
        except InputError as error:
            if "meta" not in str(error).lower():
                raise
            made = make("cpu")
    module = module_of(made)
    if isinstance(module, nn.Module):
        replace_tensors(module, device)
    return made


def replace_tensors(module: nn.Module, device: torch.device | str) -> None:
    """Replace every tensor that a module holds by a new one on a device; tied ones stay tied."""
    import torch
    from torch import nn

    new: dict[int, torch.Tensor] = {}
    old: list[torch.Tensor] = []  # alive, so that no id is used twice

    def replaced(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in new:
            old.append(tensor)
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
            new[id(tensor)] = (
                nn.Parameter(empty, requires_grad=tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
        return new[id(tensor)]

    for owner in module.modules():
        held = [
            *owner.named_parameters(recurse=False, remove_duplicate=False),
            *owner.named_buffers(recurse=False, remove_duplicate=False),
            *((name, x) for name, x in vars(owner).items() if isinstance(x, torch.Tensor)),
        ]
        for name, tensor in held:
            setattr(owner, name, replaced(tensor))

"""Bytes of a step are those of its storages, whatever makes, shares, resizes or frees them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from profiler.model.counting import PARTS, count_step, held_bytes

KIB = 1024


class _Nothing(nn.Module):
    """A model without parameters."""


def _count(step: Callable[[], None]) -> int:
    return count_step(step, model=_Nothing(), optimizers=())[0]


def _kib(number: int = 1) -> torch.Tensor:
    return torch.empty(number * KIB, dtype=torch.uint8)


def test_storages_count_while_they_are_alive() -> None:
    """The most at once is the peak, not the sum of all, and a view is nothing new."""

    def step() -> None:
        first = _kib(4)
        second = first.view(2, -1)[1]
        del first
        third = second.add(1)  # half as large, beside what the view keeps alive
        del second
        fourth = _kib(3)
        del third, fourth

    assert _count(step) == (4 + 2) * KIB


def test_a_resized_storage_counts_what_it_holds_now() -> None:
    """FSDP2 frees and fills its unsharded parameters without an operator."""
    # torch's own tracker leaves an attribute behind where other tests used it
    before = vars(torch.UntypedStorage).get("resize_")

    def step() -> None:
        held = _kib(4)
        held.untyped_storage().resize_(0)
        other = _kib(1)
        held.untyped_storage().resize_(3 * KIB)
        other.untyped_storage().resize_(0)
        del held, other

    most, parts = count_step(step, model=_Nothing(), optimizers=())

    assert most == 4 * KIB
    assert parts["gathered parameters"] == 4 * KIB
    assert vars(torch.UntypedStorage).get("resize_") is before


def test_what_was_there_before_counts_if_it_is_the_models() -> None:
    """A stranger's tensor is not the step's, even where operators take it."""
    model = nn.Linear(16, 16, bias=False)
    stranger = torch.ones(4096)

    most, parts = count_step(lambda: stranger[0].item() and None, model=model, optimizers=())

    assert (most, parts["parameters"]) == (1024, 1024)


def test_parts_of_a_step_of_a_linear() -> None:
    """Weights, gradients, moments and the saved input, each from its shape."""
    model = nn.Linear(64, 32, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        out = model(torch.ones(128, 64).mul(2)).square()
        out.sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    most, parts = count_step(step, model=model, optimizers=[optimizer])

    weight = 32 * 64 * 4
    assert parts["parameters"] == weight
    assert parts["optimizer"] == 2 * weight + 4  # a counter of steps
    assert parts["activations"] == (128 * 64 + 128 * 32) * 4
    assert sum(parts.values()) == most
    assert tuple(parts) == PARTS


def test_gradients_that_stay_are_there_from_the_beginning() -> None:
    """Sums over micro-batches that a step begins with are gradients."""
    model = nn.Linear(64, 32, bias=False)
    model.weight.grad = torch.zeros(32, 64)

    most, parts = count_step(lambda: None, model=model, optimizers=())

    assert parts["gradients"] == parts["parameters"] == most // 2


def test_checkpointed_layers_keep_their_input() -> None:
    """What is recomputed is no activation: it was not kept from the forward."""
    layer = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def step(is_recomputed: bool) -> None:
        x = torch.ones(128, 64, requires_grad=True).mul(1)
        for _ in range(4):
            x = checkpoint(layer, x, use_reentrant=False) if is_recomputed else layer(x)
        x.sum().backward()

    kept, recomputed = (
        count_step(lambda flag=flag: step(flag), model=layer, optimizers=())
        for flag in (False, True)
    )

    # the last layer's own input is gone when its backward is at its peak
    assert recomputed[1]["activations"] == 3 * 128 * 64 * 4
    assert kept[1]["activations"] == 4 * (128 * 64 + 2 * 128 * 256) * 4
    assert recomputed[0] < kept[0]


def test_fake_tensors_count_as_real_ones() -> None:
    """A step without contents has the same bytes in the same parts."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.ones(8, 64)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def counted() -> tuple[int, object]:
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step(model, optimizer)
        return count_step(lambda: step(model, optimizer), model=model, optimizers=[optimizer])

    with FakeTensorMode():
        fake = counted()

    assert counted() == fake


def test_a_failing_step_leaves_torch_as_it_was() -> None:
    """No hook and no replaced method outlives the count."""
    before = vars(torch.UntypedStorage).get("resize_")
    model = nn.Linear(2, 2)

    def step() -> None:
        raise KeyError("nothing")

    with pytest.raises(KeyError):
        count_step(step, model=model, optimizers=())

    assert vars(torch.UntypedStorage).get("resize_") is before
    assert not model.weight._post_accumulate_grad_hooks


def test_held_bytes_counts_every_storage_once() -> None:
    """Views share a storage; containers may nest; other objects hold nothing."""
    whole = torch.zeros(256)

    assert held_bytes([whole, {"half": whole[:128]}, (None, 3, torch.zeros(2))]) == 1024 + 8

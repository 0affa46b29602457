"""The parameters of one part of a model on one rank, with their optimizer: replicated or divided.

What a part computes is no matter of this file.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from profiler.measure import torch_dtype
from profiler.model.counting import local_tensor
from profiler.model.layers.parallel import all_gather
from profiler.options import Precision

# --------------------------------------------------------------------------------------------------
# Parameters that every rank of a data group has whole: ddp, ZeRO-1, and groups of one rank.
#
# Parameters and gradients of a part lie in one buffer each. Its gradients are summed by one
# all-reduce that starts as soon as the last of them is there, while the backward goes on: in the
# last micro-batch, or in every one. With ZeRO-1 each rank keeps the optimizer's states of its part
# of the buffer, steps that, and gathers the others' parts. Megatron-LM's distributed optimizer
# holds the same; its reduce-scatter moves half the bytes of this all-reduce, which stays since
# tensor ranks, tied tables and the norm take whole gradients.


_MAIN = "main_grad"
"""The attribute in which a narrow parameter has its sum in fp32, by the name engines gave it."""


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient that the optimizer will get of a parameter, None before there is one.

    In fp32 where gradients are summed so beside narrower weights.
    """
    found: torch.Tensor | None = getattr(parameter, _MAIN, parameter.grad)
    return found


class Replica:
    """The parameters of one part of a model, replicated over a group, and their optimizer.

    The states of that may be divided over the group (ZeRO-1).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Any,
        *,
        precision: Precision,
        fp32_gradients: bool,
        learning_rate: float,
        divides_states: bool = False,
    ) -> None:
        """Move the parameters into one buffer; `group` is None where the rank is alone.

        In bf16 and fp16 the optimizer has fp32 copies of the weights, and with `fp32_gradients` so
        has their sum over micro-batches and ranks, as Megatron-LM's has. divides_states : each rank
        has those of its part of the buffer.
        """
        self._group = group
        self._parameters = list(parameters)
        self._ranks: int = group.size() if divides_states and group is not None else 1
        place = group.rank() if self._ranks > 1 else 0
        with torch.no_grad():
            whole = [p.detach().flatten() for p in self._parameters]
            # parts of equal length
            rest = -sum(piece.numel() for piece in whole) % self._ranks
            self._weights = torch.cat([*whole, *([whole[0].new_zeros(rest)] if rest else [])])
            del whole
            wide = precision != "fp32"
            # summed apart from where autograd puts them, whose type is that of the weights
            self._sums_wide = wide and fp32_gradients
            self._gradients = torch.zeros_like(
                self._weights, dtype=torch.float32 if self._sums_wide else None
            )
            start = 0
            for parameter in self._parameters:
                end = start + parameter.numel()
                parameter.data = self._weights[start:end].view_as(parameter)
                gradient = self._gradients[start:end].view_as(parameter)
                if self._sums_wide:
                    setattr(parameter, _MAIN, gradient)
                else:
                    parameter.grad = gradient
                start = end
            part = self._weights.numel() // self._ranks
            self._own = slice(place * part, (place + 1) * part)
            own = self._weights[self._own]
            # in fp32 the buffer itself is stepped, without a copy
            self._master = nn.Parameter(own.float() if wide else own)
        self.optimizer = make_optimizer([self._master], learning_rate)
        self._work: Any = None
        self._arrived = 0
        self._reduces = False
        if group is not None or self._sums_wide:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def before_backward(self, *, reduces: bool) -> None:
        """Say whether the next backward sums the gradients over the group, as the last one does."""
        self._reduces, self._arrived = reduces, 0
        if self._work is not None:
            # every rank has the sum so far, which the next sum would multiply
            self._work.wait()
            self._work = None
            self._gradients.div_(self._group.size())

    def finish_backward(self) -> None:
        """Wait until the gradients are summed over the group."""
        if self._group is None:
            return
        if self._work is None:  # parameters that nothing uses never have a gradient
            self._reduce()
        self._work.wait()
        self._work = None

    def step(self, loss_scale: float = 1.0) -> None:
        """Let the optimizer step with gradients of a scaled loss, and clear them."""
        own, gradients = self._weights[self._own], self._gradients[self._own]
        if self._master.dtype == self._weights.dtype:  # then they are one tensor
            self._master.grad = gradients
            self.optimizer.step()
        else:
            # unscaled in fp32, where what fp16 cannot hold is not lost; sums in fp32 are taken as
            # they are, since they are cleared below
            self._master.grad = gradients.float().div_(loss_scale)
            self.optimizer.step()
            with torch.no_grad():
                own.copy_(self._master)
        self._master.grad = None
        if self._ranks > 1:
            with torch.no_grad():
                self._weights.copy_(all_gather(own, self._group))
        self.skip()

    def skip(self) -> None:
        """Clear the gradients."""
        self._gradients.zero_()

    def _on_gradient(self, parameter: Any) -> None:
        if self._sums_wide:
            getattr(parameter, _MAIN).add_(parameter.grad)
            parameter.grad = None
        if self._group is None:
            return
        self._arrived += 1
        if self._reduces and self._arrived == len(self._parameters):
            self._reduce()

    def _reduce(self) -> None:
        self._work = dist.all_reduce(self._gradients, group=self._group, async_op=True)


def make_optimizer(parameters: Sequence[nn.Parameter], learning_rate: float) -> Any:
    """Return AdamW that keeps no temporary copies of the parameters."""
    return torch.optim.AdamW(list(parameters), lr=learning_rate, fused=True)


# --------------------------------------------------------------------------------------------------
# Parameters that ZeRO divides over a data group: FSDP2's fully_shard, one unit per part.


class Shard:
    """The parameters of one part of a model, divided over a group, and their optimizer."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        gathers_twice: bool,
        precision: Precision,
        fp32_gradients: bool,
        learning_rate: float,
        others: Collection[nn.Parameter] = (),
    ) -> None:
        """Divide the parameters of modules, in place.

        gathers_twice : ZeRO-3, where weights are given back after the forward; others : parameters
        of these modules that another unit has.
        """
        self.modules = list(modules)
        self._gathers_twice = gathers_twice
        self.mesh, self._size = mesh, mesh.size()
        kept = set(others)
        for module in self.modules:
            for parameter in module.parameters():
                if parameter not in kept:
                    # the optimizer steps fp32 shards; narrower weights are gathered from them
                    parameter.data = parameter.data.float()
        fully_shard(
            self.modules if len(self.modules) > 1 else self.modules[0],
            mesh=mesh,
            reshard_after_forward=gathers_twice,
            mp_policy=_policy(precision, fp32_gradients=fp32_gradients),
            ignored_params=kept,
        )
        self._unit: Any = self.modules[0]
        self._is_sum = _reduce_by_sum(self._unit)
        own = (p for m in self.modules for p in m.parameters() if p not in kept)
        self._parameters = list(dict.fromkeys(own))
        self.optimizer = make_optimizer(self._parameters, learning_rate)

    def before_backward(self, *, is_last: bool, reduces: bool) -> None:
        """Say whether the next backward is the last of the step, and whether it sums gradients."""
        self._unit.set_requires_gradient_sync(reduces, recurse=False)
        # ZeRO-2 keeps its gathered weights for the micro-batches that follow
        self._unit.set_reshard_after_backward(self._gathers_twice or is_last, recurse=False)

    def finish_backward(self) -> None:
        """Correct for versions of torch that can only average over the group."""
        if not self._is_sum:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._size)

    def step(self, loss_scale: float = 1.0) -> None:
        """Let the optimizer step with gradients of a scaled loss, and drop them."""
        if loss_scale != 1:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    local_tensor(parameter.grad).div_(loss_scale)
        self.optimizer.step()
        self.skip()

    def skip(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)


def sums_by_itself() -> bool:
    """Return whether this torch sums gradients over a group; before 2.8 it can only average."""
    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def make_root(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the module that runs all units one of FSDP's, so that they share streams and order."""
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)


def _policy(precision: Precision, *, fp32_gradients: bool) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    narrow = torch_dtype(precision)
    # weights are gathered in bf16 or fp16; shards of gradients are fp32 as the weights' are
    return MixedPrecisionPolicy(
        param_dtype=narrow, reduce_dtype=torch.float32 if fp32_gradients else narrow
    )


def _reduce_by_sum(unit: Any) -> bool:
    """Let a unit sum gradients over its group; return False where it can only average them."""
    if not sums_by_itself():
        return False
    # sums, not means: the loss is divided by the number of ranks already
    unit.set_gradient_divide_factor(1.0)
    # otherwise the factor is NCCL's own kind of reduction, which gloo has not
    unit.set_force_sum_reduction_for_comms(True)
    return True

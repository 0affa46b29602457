"""Parameters of one part of a model on one rank with their optimizer, replicated or sharded.

The computation of a part is defined elsewhere.
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
# Parameters replicated on every rank of a data-parallel group: ddp, ZeRO-1, and single ranks.
#
# Parameters and gradients of a part are in one buffer each. One all-reduce sums its gradients. It
# starts when the last gradient is ready, while the backward continues: in the last micro-batch, or
# in every one. With ZeRO-1 each rank keeps the optimizer states of its part of the buffer, steps
# that part, and gathers the others. Megatron-LM's distributed optimizer keeps the same tensors. Its
# reduce-scatter moves half the bytes of this all-reduce, which is needed here since tensor-parallel
# sums, tied tables and the norm use whole gradients.


_MAIN = "main_grad"
"""Attribute of a bf16 or fp16 parameter with its fp32 gradient sum, named as in engines."""


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient of a parameter for the optimizer; None before the first backward.

    It is the fp32 sum if gradients of bf16 or fp16 weights are summed in fp32.
    """
    found: torch.Tensor | None = getattr(parameter, _MAIN, parameter.grad)
    return found


class Replica:
    """Parameters of one part of a model, replicated over a group, and their optimizer.

    The optimizer states may be sharded over the group (ZeRO-1).
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
        """Move the parameters into one buffer; `group` is None for a single rank.

        In bf16 and fp16 the optimizer has fp32 copies of the weights. With `fp32_gradients`, sums
        over micro-batches and ranks are fp32 too, as in Megatron-LM. divides_states : True shards
        the optimizer states by parts of the buffer.
        """
        self._group = group
        self._parameters = list(parameters)
        self._ranks: int = group.size() if divides_states and group is not None else 1
        place = group.rank() if self._ranks > 1 else 0
        with torch.no_grad():
            whole = [p.detach().flatten() for p in self._parameters]
            # padded to parts of equal length
            rest = -sum(piece.numel() for piece in whole) % self._ranks
            self._weights = torch.cat([*whole, *([whole[0].new_zeros(rest)] if rest else [])])
            del whole
            wide = precision != "fp32"
            # autograd writes gradients in the dtype of the weights, so fp32 sums are separate
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
            # for fp32 weights the optimizer steps the buffer itself, without a copy
            self._master = nn.Parameter(own.float() if wide else own)
        self.optimizer = make_optimizer([self._master], learning_rate)
        self._work: Any = None
        self._arrived = 0
        self._reduces = False
        if group is not None or self._sums_wide:
            for parameter in self._parameters:
                parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def before_backward(self, *, reduces: bool) -> None:
        """Set whether the next backward reduces the gradients over the group."""
        self._reduces, self._arrived = reduces, 0
        if self._work is not None:
            # every rank has the sum so far, which the next all-reduce would multiply
            self._work.wait()
            self._work = None
            self._gradients.div_(self._group.size())

    def finish_backward(self) -> None:
        """Wait until the gradients are summed over the group."""
        if self._group is None:
            return
        if self._work is None:  # unused parameters never get a gradient, so the hook did not start
            self._reduce()
        self._work.wait()
        self._work = None

    def step(self, loss_scale: float = 1.0) -> None:
        """Step the optimizer with gradients of a scaled loss, and clear them."""
        own, gradients = self._weights[self._own], self._gradients[self._own]
        if self._master.dtype == self._weights.dtype:  # then both are one tensor
            self._master.grad = gradients
            self.optimizer.step()
        else:
            # unscaled in fp32, which avoids underflow of fp16; fp32 sums are divided in place,
            # since they are cleared below
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
        """Clear the gradients without a step."""
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
    """Return a fused AdamW, which needs no temporary copies of the parameters."""
    return torch.optim.AdamW(list(parameters), lr=learning_rate, fused=True)


# --------------------------------------------------------------------------------------------------
# Parameters that ZeRO shards over a data-parallel group: FSDP2's fully_shard, one unit per part.


class Shard:
    """Parameters of one part of a model, sharded over a group, and their optimizer."""

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
        """Shard the parameters of the modules in place.

        gathers_twice : True for ZeRO-3, which frees weights after the forward. others : parameters
        of these modules that belong to another unit.
        """
        self.modules = list(modules)
        self._gathers_twice = gathers_twice
        self.mesh, self._size = mesh, mesh.size()
        kept = set(others)
        for module in self.modules:
            for parameter in module.parameters():
                if parameter not in kept:
                    # the optimizer steps fp32 shards; bf16 or fp16 weights are gathered from them
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
        """Set whether the next backward is the last of the step, and reduces gradients."""
        self._unit.set_requires_gradient_sync(reduces, recurse=False)
        # ZeRO-2 keeps its gathered weights for the following micro-batches
        self._unit.set_reshard_after_backward(self._gathers_twice or is_last, recurse=False)

    def finish_backward(self) -> None:
        """Multiply gradients by the group size if torch can only average over the group."""
        if not self._is_sum:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._size)

    def step(self, loss_scale: float = 1.0) -> None:
        """Step the optimizer with gradients of a scaled loss, and drop them."""
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
    """Return True if FSDP2 can sum gradients over a group; before torch 2.8 it only averages."""
    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def make_root(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the module that runs all units the FSDP root, so that they share streams and order."""
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)


def _policy(precision: Precision, *, fp32_gradients: bool) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    narrow = torch_dtype(precision)
    # weights are gathered in bf16 or fp16; gradient shards are fp32 like the weight shards
    return MixedPrecisionPolicy(
        param_dtype=narrow, reduce_dtype=torch.float32 if fp32_gradients else narrow
    )


def _reduce_by_sum(unit: Any) -> bool:
    """Let a unit sum gradients over its group; return False if torch can only average them."""
    if not sums_by_itself():
        return False
    # sums, not means: the loss is already divided by the number of ranks
    unit.set_gradient_divide_factor(1.0)
    # otherwise the factor uses a reduction of NCCL that gloo does not have
    unit.set_force_sum_reduction_for_comms(True)
    return True

"""Units of parameters with their gradients and optimizer: replicated (DDP, ZeRO-1) or sharded.

A unit contains the parameters of one part of a model, such as a layer.
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
# The parameters of a unit are in one buffer, and its gradients in another. One all-reduce sums the
# gradients over the group. It starts when the last gradient is ready and overlaps with the backward
# of other units, in the last micro-batch or in every one. With ZeRO-1, each rank has the optimizer
# states of a part of the buffer, steps that part, and all-gathers the others. Megatron-LM's
# distributed optimizer has equal tensors, but uses a reduce-scatter, which moves half the bytes.
# Here, tensor-parallel sums, tied tables and the gradient norm need complete gradients.


_MAIN = "main_grad"
"""Attribute of a bf16 or fp16 parameter for its fp32 gradient, as in Megatron-LM."""


def gradient_of(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return the gradient of a parameter for the optimizer; None before the first backward.

    This is `main_grad` if gradients of bf16 or fp16 weights are accumulated in fp32, else `grad`.
    """
    found: torch.Tensor | None = getattr(parameter, _MAIN, parameter.grad)
    return found


class Replica:
    """Unit of parameters that are replicated over a group, with their optimizer.

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
        """Move the parameters into one buffer.

        In bf16 and fp16, the optimizer has fp32 copies of the weights.

        group : process group of the replicas; None for a single rank.
        fp32_gradients : True to accumulate and reduce gradients in fp32, as in Megatron-LM.
        divides_states : True to shard the optimizer states over the group.
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
        """Prepare the next backward; `reduces` is True if it sums the gradients over the group."""
        self._reduces, self._arrived = reduces, 0
        if self._work is not None:
            # every rank has the sum so far, which the next all-reduce would multiply
            self._work.wait()
            self._work = None
            self._gradients.div_(self._group.size())

    def finish_backward(self) -> None:
        """Wait for the all-reduce of the gradients, after the last backward of a step."""
        if self._group is None:
            return
        if self._work is None:  # unused parameters never get a gradient, so the hook did not start
            self._reduce()
        self._work.wait()
        self._work = None

    def step(self, loss_scale: float = 1.0) -> None:
        """Divide the gradients by `loss_scale`, step the optimizer, and set the gradients to 0."""
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
        """Set the gradients to 0 without a step."""
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
    """Return a fused AdamW optimizer; fused steps allocate no temporary copies of parameters."""
    return torch.optim.AdamW(list(parameters), lr=learning_rate, fused=True)


# --------------------------------------------------------------------------------------------------
# Parameters that ZeRO-2 or ZeRO-3 shards over a data-parallel group, with FSDP2's fully_shard.


class Shard:
    """Unit of parameters that are sharded over a group (ZeRO-2, ZeRO-3), with their optimizer."""

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

        gathers_twice : True for ZeRO-3, which frees gathered weights after the forward and gathers
            them again for the backward; False for ZeRO-2.
        others : parameters of these modules that belong to another unit.
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
        """Prepare the next backward.

        is_last : True for the last micro-batch of a step.
        reduces : True to reduce the gradients over the group.
        """
        self._unit.set_requires_gradient_sync(reduces, recurse=False)
        # ZeRO-2 keeps its gathered weights for the following micro-batches
        self._unit.set_reshard_after_backward(self._gathers_twice or is_last, recurse=False)

    def finish_backward(self) -> None:
        """Multiply gradients by the group size if torch has averaged them instead of summing."""
        if not self._is_sum:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(self._size)

    def step(self, loss_scale: float = 1.0) -> None:
        """Divide the gradients by `loss_scale`, step the optimizer, and free the gradients."""
        if loss_scale != 1:
            for parameter in self._parameters:
                if parameter.grad is not None:
                    local_tensor(parameter.grad).div_(loss_scale)
        self.optimizer.step()
        self.skip()

    def skip(self) -> None:
        """Free the gradients without a step."""
        self.optimizer.zero_grad(set_to_none=True)


def sums_by_itself() -> bool:
    """Return True if FSDP2 can sum gradients with gloo too, that is from torch 2.8."""
    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def make_root(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make `module` the FSDP root, so that all units in it share communication streams."""
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
    """Configure an FSDP unit to sum gradients over its group; return False if torch cannot."""
    if not sums_by_itself():
        return False
    # sums, not means: the loss is already divided by the number of ranks
    unit.set_gradient_divide_factor(1.0)
    # otherwise the factor uses a reduction of NCCL that gloo does not have
    unit.set_force_sum_reduction_for_comms(True)
    return True

"""Parameters that ZeRO divides over a data group: FSDP2's fully_shard, one unit per part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from profiler.plan.job import Precision
from profiler.plan.replicas import make_optimizer

__all__ = ["Shard", "make_root", "sums_by_itself"]


class Shard:
    """The parameters of one part of a model, divided over a group, and their optimizer."""

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mesh: DeviceMesh,
        *,
        gathers_twice: bool,
        precision: Precision,
        learning_rate: float,
    ) -> None:
        """Divide the parameters of modules, in place.

        gathers_twice : ZeRO-3, where weights are given back after the forward.
        """
        self.modules = list(modules)
        self._gathers_twice = gathers_twice
        self._size = mesh.size()
        for module in self.modules:
            for parameter in module.parameters():
                parameter.data = parameter.data.float()
        fully_shard(
            self.modules if len(self.modules) > 1 else self.modules[0],
            mesh=mesh,
            reshard_after_forward=gathers_twice,
            mp_policy=_policy(precision),
        )
        self._unit: Any = self.modules[0]
        self._is_sum = _reduce_by_sum(self._unit)
        self._parameters = list(dict.fromkeys(p for m in self.modules for p in m.parameters()))
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

    def step(self) -> None:
        """Let the optimizer step, and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def sums_by_itself() -> bool:
    """Return whether this torch sums gradients over a group; before 2.8 it can only average."""
    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def make_root(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make the module that runs all units one of FSDP's, so that they share streams and order."""
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    assert isinstance(module, FSDPModule)


def _policy(precision: Precision) -> MixedPrecisionPolicy:
    if precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _reduce_by_sum(unit: Any) -> bool:
    """Let a unit sum gradients over its group; return False where it can only average them."""
    if not sums_by_itself():
        return False
    unit.set_gradient_divide_factor(1.0)
    # otherwise the factor is NCCL's own kind of reduction, which gloo has not
    unit.set_force_sum_reduction_for_comms(True)
    return True

"""Parameters that every rank of a data group has whole: ddp, and groups of one rank.

Parameters and gradients of a part lie in one buffer each. Its gradients are summed by one
all-reduce that starts as soon as the last of them is there, while the backward goes on: in the
last micro-batch, or in every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from profiler.plan.job import Precision

__all__ = ["Replica", "make_optimizer"]


class Replica:
    """The parameters of one part of a model, replicated over a group, and their optimizer."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: Any,
        *,
        precision: Precision,
        learning_rate: float,
    ) -> None:
        """Move the parameters into one buffer; `group` is None where the rank is alone.

        In bf16 the optimizer has fp32 copies of the weights, as Megatron-LM's has.
        """
        self._group = group
        self._parameters = list(parameters)
        with torch.no_grad():
            self._weights = torch.cat([p.detach().flatten() for p in self._parameters])
            self._gradients = torch.zeros_like(self._weights)
            start = 0
            for parameter in self._parameters:
                end = start + parameter.numel()
                parameter.data = self._weights[start:end].view_as(parameter)
                parameter.grad = self._gradients[start:end].view_as(parameter)
                start = end
            wide = precision == "bf16"
            self._master = nn.Parameter(self._weights.float() if wide else self._weights)
        self.optimizer = make_optimizer([self._master], learning_rate)
        self._work: Any = None
        self._arrived = 0
        self._reduces = False
        if group is not None:
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

    def step(self) -> None:
        """Let the optimizer step, and clear the gradients."""
        if self._master.dtype == self._weights.dtype:  # then they are one tensor
            self._master.grad = self._gradients
            self.optimizer.step()
        else:
            self._master.grad = self._gradients.float()
            self.optimizer.step()
            with torch.no_grad():
                self._weights.copy_(self._master)
        self._master.grad = None
        self._gradients.zero_()

    def _on_gradient(self, _: Any) -> None:
        self._arrived += 1
        if self._reduces and self._arrived == len(self._parameters):
            self._reduce()

    def _reduce(self) -> None:
        self._work = dist.all_reduce(self._gradients, group=self._group, async_op=True)


def make_optimizer(parameters: Sequence[nn.Parameter], learning_rate: float) -> Any:
    """Return AdamW that keeps no temporary copies of the parameters."""
    return torch.optim.AdamW(list(parameters), lr=learning_rate, fused=True)

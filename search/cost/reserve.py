"""What a device has to hold beside the tensors of a plan: what the allocator reserves, the context.

How sure predictions are is `autopar.memory.risk`'s; what is allocated is `search.cost.memory`'s.
"""

from __future__ import annotations

import math

from autopar.memory.risk import LaunchKind, odds_of_kind, reserve_share
from autopar.model import ModelSpec
from autopar.records import dataclass
from autopar.units import GIB
from search.options import SearchOptions

__all__ = ["Reserve", "reserve_of"]


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """The memory of a device that no plan may fill."""

    share: float
    """Of what is allocated."""
    context_bytes: float
    kind: LaunchKind
    """Whose errors the odds are of."""
    odds: float | None
    """Of running out of memory that `share` stands for; None: it was given."""

    def reserved_bytes(self, allocated_bytes: int) -> int:
        """Return what is taken of a device for `allocated_bytes`, context included."""
        # fragments are a share of what is allocated, the context is there before
        return math.ceil(allocated_bytes * (1.0 + self.share) + self.context_bytes)

    def budget_bytes(self, memory_bytes: float) -> int:
        """Return the largest allocation whose reservation fits in `memory_bytes`."""
        # two bytes more than rounding may have taken, then down to the largest that fits
        budget = int((memory_bytes - self.context_bytes) / (1.0 + self.share)) + 2
        while self.reserved_bytes(budget) > memory_bytes:
            budget -= 1
        return budget

    def odds_of_oom(self, allocated_bytes: int, memory_bytes: float) -> float:
        """Return the probability that a device of such memory runs out of it."""
        return odds_of_kind(self.kind, allocated_bytes, memory_bytes - self.context_bytes)

    @property
    def sentence(self) -> str:
        """What is reserved, as one of the lines of `defaults used`."""
        why = "" if self.odds is None else f" (--oom-risk {self.odds:g})"
        context = f"{self.context_bytes / GIB:g} GiB"
        return f"reserved memory is allocated * {1.0 + self.share:.4g} + {context}{why}"


def reserve_of(options: SearchOptions, spec: ModelSpec) -> Reserve:
    """Return the reserve of options: `--reserve` as it was given, else that of `--oom-risk`."""
    mixture = any(layer.num_experts is not None for layer in spec.layers)
    kind: LaunchKind = "experts" if mixture else "dense"
    given = options.reserve_fraction
    return Reserve(
        share=reserve_share(kind, options.oom_risk) if given is None else given,
        context_bytes=options.context_bytes,
        kind=kind,
        odds=options.oom_risk if given is None else None,
    )

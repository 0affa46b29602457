"""Activation policies of a layout: recomputation and offload."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.arrays import F64, I64, Bool
from search.engines.candidate import NONE

DEVICE, OPEN = -1, -2
"""Values in `ActivationPolicies.sets`: no activation offload; any offload set, not yet expanded."""


class ActivationPolicy(NamedTuple):
    """Activation policy of a layout: recomputation and offload."""

    recompute: str
    """Recomputation policy: modules joined by +, `full`, `block N` or none."""
    offload: str | None = NONE
    """Offloaded modules joined by +; None: any set, not yet expanded."""


class ActivationPolicies(NamedTuple):
    """Activation policies of a layout, sorted by `values`."""

    values: F64
    """Lower bounds of step seconds per sequence, or of the peak stage's bytes."""
    places: I64
    """Indices into `UniformCostModel.words`; len(words) + N means `block N`."""
    sets: I64
    """Indices into `OffloadBounds.words`, or `DEVICE` or `_OPEN`."""

    @property
    def last_without_offload(self) -> int:
        """Index of the last policy without offload, the most likely to fit if sorted by time.

        If all policies use offload, the index of the last one.
        """
        plain = np.flatnonzero(self.sets == DEVICE)
        return int(plain[-1]) if len(plain) else len(self.sets) - 1

    def only(self, some: I64) -> ActivationPolicies:
        """Return the policies at these indices."""
        return ActivationPolicies(self.values[some], self.places[some], self.sets[some])

    def dominated(self, at: int, which: Bool, least: float) -> ActivationPolicies:
        """Return the policies after index `at`, with raised bounds and sorted again.

        which : mask of policies that are known to be no faster than `least`.
        """
        values = np.where(
            which[at + 1 :], np.maximum(self.values[at + 1 :], least), self.values[at + 1 :]
        )
        order = np.argsort(values, kind="stable")
        rest = self.only(at + 1 + order)
        return rest._replace(values=values[order])


class PolicyBytes:
    """Lower bounds of a layout's bytes, by policy and by N of `block N`, and the allowed N."""

    def __init__(self, words: F64, blocks: F64, numbers: I64) -> None:
        self.words, self.blocks, self.numbers = words, blocks, numbers
        self.hosted: F64 | None = None
        """Bytes by policy, for any activation offload; None until requested."""
        self.seconds: tuple[F64, F64] | None = None
        """Lower bounds of step seconds per sequence, by policy and by N; None until requested."""

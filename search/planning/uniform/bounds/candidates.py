"""Values of expanded candidates: stages with shardings of states, and activation policies."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.arrays import F64, I64, Bool
from search.engines.candidate import NONE
from search.planning.uniform.bounds.layer_times import MicroBatchTimes

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


class StageCandidate(NamedTuple):
    """Numbers of stages and shardings of model states, for one set of degrees."""

    stages: tuple[int, ...]
    shardings: tuple[tuple[int, int, int], ...]
    """(stages, ZeRO stage, HSDP replicas) of every combination."""
    zeros: tuple[int, ...]
    """ZeRO stage of every combination."""
    at: I64
    """Index into `stages`, shape [shardings]."""
    pp: I64
    micro_batches: I64
    """Numbers of stages and of micro-batches, shape [shardings]."""
    layers: I64
    """Number of layers of the longest stage at least, shape [shardings]."""
    bubbles: F64
    """Lower bounds of the part of each other stage that adds to the longest, shape [shardings].

    The bubble is shortest with the most chunks, and it may be 0 if weight gradients are deferred.
    """
    sends_s: F64
    """Lower bounds of `UniformCostModel.transfer_s`, shape [shardings]."""
    states: F64
    """Results of `UniformCostModel.states_of`, shape [shardings, 4]."""


class StageCandidates(NamedTuple):
    """Stages and shardings of one set of degrees, with bounds that hold for any memory limit."""

    staging: StageCandidate
    bytes: F64
    freed: F64
    """Results of `UniformCostModel.many_spread_bytes`, shape [shardings, policies + 2]."""
    hosted: F64
    """Lower bounds of bytes for any activation offload, shape [shardings, policies]."""
    rows: tuple[MicroBatchTimes, ...]
    """Micro-batch times of each sharding."""
    whole_s: F64
    layer_s: F64
    again: F64
    """`whole_s`, `layer_s` and `again` of `MicroBatchTimes` of each sharding.

    Shapes [shardings, policies + 2], twice, and [shardings, 4]."""

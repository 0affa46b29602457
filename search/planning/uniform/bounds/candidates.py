"""Values of expanded candidates: stages with shardings of states, and activation policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autopar.arrays import F64, I64, Bool
from autopar.pipeline.schedules import SCHEDULES, Schedule
from search.engines.candidate import NONE
from search.planning.uniform.bounds.live import SpreadLive, SpreadStages, spread_live

if TYPE_CHECKING:
    from search.planning.uniform.bounds.partitions import Partitions

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
        self.parts: Partitions | None = None
        """The layout as the only one of `Partitions`; None until requested."""
        self.hosted: F64 | None = None
        """Bytes by policy, for any activation offload; None until requested."""
        self.seconds: tuple[F64, F64] | None = None
        """Lower bounds of step seconds per sequence, by policy and by N; None until requested."""


class PipelineClass(NamedTuple):
    """Pipelines of one number of stages that share lower bounds."""

    fewest: int
    """Smallest number of chunks per stage, with the shortest sends."""
    layers: int
    """Number of layers of the longest stage at least."""
    bubble: float
    """Lower bound of the part of each other stage that adds to the longest.

    The bubble is shortest with the most chunks, and it may be 0 if weight gradients are deferred.
    """
    live: SpreadLive


def pipeline_classes(
    pipelines: Sequence[tuple[Schedule, int]], layers: int, stages: int, micro_batches: int
) -> Iterator[PipelineClass]:
    """Yield classes of pipelines, by similar numbers of chunks and by length of the longest stage.

    pipelines : (schedule, chunks per stage)
    layers : number of layers of the model
    """
    mean = -(-layers // stages)
    classes: dict[tuple[bool, bool, int], list[tuple[int, tuple[Schedule, int]]]] = {}
    for schedule, vpp in pipelines:
        # some stage has a multiple of its chunks; both of two may be a layer shorter
        longest = max(mean, -(-mean // vpp) * vpp - (stages == 2))
        longer = longest > mean
        few = 0 if longer else sum(vpp > most for most in (1, 2, 4))
        like = SCHEDULES[schedule].splits, longer, few
        classes.setdefault(like, []).append((longest, (schedule, vpp)))
    for (splits, longer, _), some in classes.items():
        alike = tuple(pipeline for _, pipeline in some)
        chunks = [vpp for _, vpp in alike]
        yield PipelineClass(
            fewest=min(chunks),
            layers=min(longest for longest, _ in some),
            bubble=0.0 if splits else 1.0 / max(chunks),
            # a longer stage is slow, so that its memory seldom decides
            live=spread_live(stages, micro_batches, () if longer else alike),
        )


class StageCandidate(NamedTuple):
    """Numbers of stages, shardings of model states and pipelines, for one set of degrees.

    A row is a combination of all three.
    """

    stages: tuple[int, ...]
    shardings: tuple[tuple[int, int, int], ...]
    """(stages, ZeRO stage, HSDP replicas) of every combination."""
    zeros: tuple[int, ...]
    """ZeRO stage of every combination."""
    at: I64
    """Index into `stages`, shape [rows]."""
    of: I64
    """Index into `shardings`, shape [rows]."""
    pp: I64
    micro_batches: I64
    """Numbers of stages and of micro-batches, shape [rows]."""
    layers: I64
    """`PipelineClass.layers`, shape [rows]."""
    bubbles: F64
    """`PipelineClass.bubble`, shape [rows]."""
    sends_s: F64
    """Lower bounds of `UniformCostModel.transfer_s`, shape [rows]."""
    spread: SpreadStages


class ModelOffload(NamedTuple):
    """Values of whole models that bound activation offload, by row; one row may hold for all."""

    forward_s: F64
    """Device seconds of the forward of all layers, shape [rows, 1]."""
    layers_s: F64
    """Device seconds of all layers without traffic of weights, shape [rows, policies]."""
    device_s: F64
    host_s: F64
    more: F64
    """`MicroBatchTimes.device_of_all_s`, `host_of_all_s` and `more`, shape [rows, policies]."""
    leaves: F64
    others: F64
    """Bytes that all layers can offload, and those of all types but the most frequent one.

    Shape [rows, policies]."""
    padding: F64
    """`OffloadedBytes.padding`, shape [rows, 1]."""
    share: float
    """Number of all layers over that of the most frequent type."""

    def only(self, some: I64) -> ModelOffload:
        """Return the rows at these indices."""
        columns = {name: getattr(self, name) for name in self._fields if name != "share"}
        return self._replace(
            **{name: one if len(one) == 1 else one[some] for name, one in columns.items()}
        )


class EarlyStages(NamedTuple):
    """Lower bounds of the first and second stage without recomputation; shapes [2, rows]."""

    live: F64
    """Largest number of live micro-batches of a layer."""
    device_s: F64
    host_s: F64
    """Device and host seconds per micro-batch."""


class StageCandidates(NamedTuple):
    """Stages and shardings of one set of degrees, with bounds that hold for any memory limit."""

    staging: StageCandidate
    bytes: F64
    freed: F64
    """Results of `UniformCostModel.many_spread_bytes`, then those of `early_bytes` with `early`.

    Shape [1 or 3, rows, policies + 2]."""
    hosted: F64
    """Lower bounds of bytes for any activation offload, shape [rows, policies]."""
    offload: ModelOffload | None
    """Values of activation offload; None if it is not allowed."""
    model: I64
    """Index of the row in `offload`, shape [rows]."""
    whole_s: F64
    layer_s: F64
    again: F64
    """`whole_s`, `layer_s` and `again` of `MicroBatchTimes` of each row.

    Shapes [rows, policies + 2], twice, and [rows, 4]."""
    early: EarlyStages | None = None
    """Bounds of the first two stages; None if their numbers of layers are not known."""

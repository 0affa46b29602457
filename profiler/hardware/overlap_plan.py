"""How many GEMMs and communications fill the windows of an overlap measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from profiler.hardware.lanes import Queues

__all__ = ["OverlapPlan", "plan_overlap"]

_MOST_OPERATIONS = 1024
_MOST_BLOCKS = 256
_LEAD_FROM = 4
"""Windows of at least so many communications spend one more on starting together."""


@dataclass(frozen=True, kw_only=True)
class OverlapPlan:
    """What one window holds: two queues of the same length in time, each alone."""

    communications: int
    blocks: int
    gemms_per_block: int
    blocks_per_communication: float
    """By the calibration: how many blocks take as long as one communication."""

    @property
    def gemms_per_communication(self) -> float:
        """GEMMs that go with one communication; the scale of all times of the GEMMs."""
        return self.blocks * self.gemms_per_block / self.communications

    def queues(self, blocks: int, communications: int) -> Queues:
        """Return two queues of this plan's operations."""
        return Queues(
            blocks=blocks,
            gemms_per_block=self.gemms_per_block,
            communications=communications,
            blocks_per_communication=self.blocks_per_communication,
            lead=communications >= _LEAD_FROM,
        )

    @property
    def equal(self) -> Queues:
        """Both queues in full."""
        return self.queues(self.blocks, self.communications)

    def covered(self, cover: float) -> Queues:
        """Return queues in which the communications outlast the blocks `cover` times."""
        blocks = int(self.communications * self.blocks_per_communication / cover)
        return self.queues(min(max(blocks, 1), self.blocks), self.communications)

    def covering(self, cover: float) -> Queues:
        """Return queues in which the blocks outlast the communications `cover` times."""
        communications = max(int(self.communications / cover), 1)
        blocks = math.ceil(cover * communications * self.blocks_per_communication)
        return self.queues(max(blocks, 2), communications)

    def stopping(self, cover: float) -> Queues:
        """Return queues in which blocks go on until all communications have ended.

        They give up when they would outlast them `cover` times, both alone.
        """
        blocks = max(math.ceil(cover * self.blocks), 2)
        return replace(self.queues(blocks, self.communications), until_communicated=True)


def plan_overlap(gemm_s: float, communication_s: float, window_s: float) -> OverlapPlan:
    """Return how many operations fill a window, of times that are the same on every rank."""
    communications = min(max(math.ceil(window_s / communication_s), 1), _MOST_OPERATIONS)
    gemms = communications * communication_s / gemm_s
    per_block = max(math.ceil(gemms / _MOST_BLOCKS), 1)
    return OverlapPlan(
        communications=communications,
        blocks=max(round(gemms / per_block), 1),
        gemms_per_block=per_block,
        blocks_per_communication=communication_s / gemm_s / per_block,
    )

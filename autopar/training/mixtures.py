"""How unevenly tokens are routed to experts, and what an expert takes of them.

Published steps with and without forced balance, the skew that they are explained by, and the
capacity that bounds it; memory and time both ask for these.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from autopar.errors import InputError


class NaturalLoss(NamedTuple):
    """A model's rate with forced balance, and with the routing that it learns."""

    seq: int
    """Tokens of a sequence."""
    forced_tflops: float
    """Model TFLOP/s of a GPU."""
    natural_tflops: float

    @property
    def share(self) -> float:
        """Of the rate with forced balance, what is lost."""
        return 1.0 - self.natural_tflops / self.forced_tflops


NATURAL_LOSSES = (
    NaturalLoss(16_384, 295.0, 237.0),
    NaturalLoss(32_768, 335.0, 277.0),
    NaturalLoss(65_536, 368.0, 320.0),
    NaturalLoss(131_072, 389.0, 357.0),
)
"""Qwen3-235B-A22B on H100 (Megatron-MoE-ModelZoo best_practice/qwen3/readme.md): 20, 17, 13, 8 %.
The longer a sequence, the more of a step is attention, which knows no experts."""

NATURAL_SKEW = 1.5
"""Tokens of the busiest rank over the mean that explains these losses: the estimated steps of the
first three lose 21, 17 and 13 % with it (benchmarks/ledger_rows.py), of the half of a mixture that
waits for the busiest rank."""


_ALONE = 1.10
_SEVERAL = 1.025
_LATER = 1.17
"""Skew of routing at the worst step of a run, see `worst_skew`."""
_MANY_STEPS = 1000


def worst_skew(*, alone: bool, steps: int | None) -> float:
    """Return the tokens of a rank's experts over the mean, at the worst step of a run.

    Measured peaks of mixtures after 50 to 200 steps want 1.09 to 1.14 with one expert a rank, and
    1.01 to 1.06 with two to eight, whose loads even out; after thousands of steps 1.15 to 1.24 with
    one to eight.

    alone : a rank has one expert. steps : of the run; None: thousands.
    """
    if steps is None or steps >= _MANY_STEPS:
        return _LATER
    return _ALONE if alone else _SEVERAL


def published_loss(seq: int) -> float:
    """Return the share of the rate that learned routing costs at a length, between published ones.

    Linear in the length, and beyond the ends as at them; raises InputError for no tokens.
    """
    if seq < 1:
        raise InputError(f"a sequence has {seq} tokens, and needs 1 at least")
    rows = NATURAL_LOSSES
    if seq <= rows[0].seq:
        return rows[0].share
    for before, after in pairwise(rows):
        if seq <= after.seq:
            place = (seq - before.seq) / (after.seq - before.seq)
            return before.share + place * (after.share - before.share)
    return rows[-1].share


def taken_share(skew: float, *, capacity: float | None = None, padded: bool = False) -> float:
    """Return the tokens that a rank's experts take over the mean.

    capacity : tokens that an expert takes over the mean, of which more are dropped (arXiv
    2101.03961, section 2.2); None: none are. padded : it computes as many in any case.
    """
    if capacity is None:
        return skew
    if capacity <= 0:
        raise InputError(f"the capacity of experts is {capacity}, and has to be above 0")
    return capacity if padded else min(skew, capacity)

"""Imbalance of MoE routing: token skew of the busiest rank, and the capacity that limits it.

The skew of step times is fitted to published throughput with and without forced balance.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.errors import InputError


class NaturalLoss(NamedTuple):
    """Published throughput of a model with forced balance and with learned routing."""

    seq: int
    """Tokens per sequence."""
    forced_tflops: float
    """Model TFLOP/s per GPU with forced balance."""
    natural_tflops: float
    """Model TFLOP/s per GPU with learned routing."""

    @property
    def share(self) -> float:
        """Relative loss of throughput from forced balance to learned routing, 0 to 1."""
        return 1.0 - self.natural_tflops / self.forced_tflops


NATURAL_LOSSES = (
    NaturalLoss(16_384, 295.0, 237.0),
    NaturalLoss(32_768, 335.0, 277.0),
    NaturalLoss(65_536, 368.0, 320.0),
    NaturalLoss(131_072, 389.0, 357.0),
)
"""Qwen3-235B-A22B on H100 (Megatron-MoE-ModelZoo best_practice/qwen3/readme.md): 20, 17, 13, 8 %.
Longer sequences lose less, because attention, which has no experts, takes more of the step."""

NATURAL_SKEW = 1.5
"""Tokens of the busiest rank over the mean, fitted to `NATURAL_LOSSES`. With it, the estimated
steps of the first three rows lose 21, 17 and 13 % (benchmarks/ledger_rows.py). The skew applies to
the half of an MoE layer that waits for the busiest rank."""


_ALONE = 1.10
_SEVERAL = 1.025
_LATER = 1.17
"""Routing skew at the worst step of a run: one expert per rank, several, and long runs."""
_MANY_STEPS = 1000


def worst_skew(*, alone: bool, steps: int | None) -> float:
    """Return the tokens of the busiest rank over the mean, at the worst step of a run.

    Measured peaks of MoE models after 50 to 200 steps imply 1.09 to 1.14 with one expert per rank.
    Two to eight experts even out to 1.01 to 1.06. After thousands of steps it is 1.15 to 1.24 with
    one to eight.

    Parameters
    ----------
    alone : True if a rank has one expert.
    steps : number of steps of the run; None: thousands.
    """
    if steps is None or steps >= _MANY_STEPS:
        return _LATER
    return _ALONE if alone else _SEVERAL


def processed_share(skew: float, *, capacity: float | None = None, padded: bool = False) -> float:
    """Return the tokens that the busiest rank's experts process, over the mean of all ranks.

    Parameters
    ----------
    skew : tokens of the busiest rank over the mean.
    capacity : expert capacity over the mean; tokens above it are dropped (arXiv 2101.03961,
        section 2.2). None: no limit.
    padded : True if inputs of experts are padded to their capacity.

    Raises InputError for a capacity that is not positive.
    """
    if capacity is None:
        return skew
    if capacity <= 0:
        raise InputError(f"expert capacity {capacity}: expected a number above 0")
    return capacity if padded else min(skew, capacity)

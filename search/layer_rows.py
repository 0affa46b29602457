"""One layer type priced: seconds and bytes of every (table, strategy), by category."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["LayerRows", "sum_of"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRows:
    """One layer type priced, axes (N tables, S strategies), split by category.

    Rows without a price hold inf seconds in `forward`, `backward` and `tail`, and 0 elsewhere.
    """

    valid: NDArray[np.bool_]
    priced: NDArray[np.bool_]
    """Also true for rows that only break a divisibility rule, when those were asked for."""
    forward: dict[str, F64]
    """Seconds of a micro-batch's forward: forward, tp, ulysses, cp, zero3."""
    backward: dict[str, F64]
    """Seconds of a micro-batch's backward: backward, recompute, tp, ulysses, cp, zero3, sync."""
    step: dict[str, F64]
    """Seconds once per step: tail, optimizer."""
    states: I64
    """(2, N, S)"""
    activations: I64
    """(N, S) per micro-batch in flight"""
    transient: I64
    """(2, N, S)"""
    backward_peak: I64
    """(N, S), a part of `transient`: what a layer's backward needs above what is kept."""
    shared: I64

    @property
    def forward_s(self) -> F64:
        """(N, S) sum of `forward`."""
        return sum_of(self.forward)

    @property
    def backward_s(self) -> F64:
        """(N, S) sum of `backward`."""
        return sum_of(self.backward)

    @property
    def tail_s(self) -> F64:
        """(N, S) sum of `step`."""
        return sum_of(self.step)

    def time_s(self, table: int, strategy: int) -> dict[str, float]:
        """Return the seconds of one row by category, per micro-batch and per step."""
        result: dict[str, float] = {}
        for part in (self.forward, self.backward, self.step):
            for name, values in part.items():
                result[name] = result.get(name, 0.0) + float(values[table, strategy])
        return result


def sum_of(parts: dict[str, F64]) -> F64:
    """Return the sum of the categories, in their order."""
    values = iter(parts.values())
    total = next(values).copy()
    for value in values:
        total += value
    return total

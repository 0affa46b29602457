"""The optimizer step as it was measured: seconds over the parameters that a rank updates.

Source: cost-model.md "Compute". Sidecars time the step of one layer at every tensor degree, for the
parameters that a rank of the tensor group holds, not sharded by data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.fit import latency_bandwidth_fit, rising_fit
from autopar.model import LayerProfile

__all__ = ["OptimizerCurve", "fit_optimizer"]

F64 = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class OptimizerCurve:
    """Seconds of one module's step over its parameters on a rank, rising."""

    parameters: F64
    """(n + 1,) 0, then the numbers that were measured."""
    times_s: F64
    """(n + 1,) what a step takes however few parameters it has, then the measured steps."""

    def step_s(self, parameters: F64) -> F64:
        """Return the step of so many parameters on a rank, 0 without any, in seconds.

        Straight between the points; beyond the largest at its seconds per parameter.
        """
        inside = np.interp(parameters, self.parameters, self.times_s)
        beyond = parameters * (self.times_s[-1] / self.parameters[-1])
        known = np.where(parameters > self.parameters[-1], beyond, inside)
        result: F64 = np.where(parameters > 0.0, known, 0.0)
        return result


def fit_optimizer(layers: Iterable[tuple[LayerProfile, float]]) -> OptimizerCurve | None:
    """Return the curve through the measured steps of all layer types; None without any.

    layers : profile and parameters of an unsharded layer. A rank of a tensor group holds them over
    the degree, one of Ulysses all. Lengths and batches do not matter to a step, so a number of
    parameters has the median of its cells. The launch is that of the non-negative line through all
    points, 0 with one, and at most the smallest step.
    """
    found: dict[float, list[float]] = {}
    for profile, parameters in layers:
        for cell in profile.sharded_times:
            if cell.optimizer_s is not None:
                share = 1 if cell.kind == "ulysses" else cell.degree
                found.setdefault(parameters / share, []).append(cell.optimizer_s)
    if not found:
        return None
    sizes = sorted(found)
    times = rising_fit(np.array([float(np.median(found[size])) for size in sizes]))
    launch = min(latency_bandwidth_fit(sizes, list(times)).latency_s, float(times[0]))
    return OptimizerCurve(
        parameters=np.array([0.0, *sizes]), times_s=np.array([launch, *times], dtype=np.float64)
    )

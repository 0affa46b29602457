"""The optimizer step as it was measured: seconds over the parameters that a rank updates.

Source: cost-model.md "Compute". Sidecars time the step of one layer at every tensor degree, for the
parameters that a rank of the tensor group holds, not sharded by data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.fit import latency_bandwidth_fit
from autopar.model import LayerProfile

__all__ = ["OptimizerLine", "fit_optimizer"]

F64 = NDArray[np.float64]
_Note = Callable[[str], None]

_BAD_FIT = 0.1
"""A line that is farther than this from one of its times is noted."""


@dataclass(frozen=True, kw_only=True)
class OptimizerLine:
    """Seconds of one module's step: launch_s + parameters * parameter_s."""

    launch_s: float
    """What a step takes however few parameters it has; 0 where one number was measured."""
    parameter_s: float

    def step_s(self, parameters: F64) -> F64:
        """Return the step of so many parameters on a rank, 0 without any, in seconds."""
        result: F64 = np.where(parameters > 0.0, self.launch_s + parameters * self.parameter_s, 0.0)
        return result


def fit_optimizer(
    layers: Iterable[tuple[LayerProfile, float]], note: _Note
) -> OptimizerLine | None:
    """Return the line through the measured steps of all layer types; None without any.

    layers : profile and parameters of an unsharded layer. A rank of a tensor group holds them over
    the degree, one of Ulysses all. Sizes and batches do not matter to a step, so a number of
    parameters has the median of its cells. The line is not negative and its weights are relative.
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
    line = latency_bandwidth_fit(sizes, [float(np.median(found[size])) for size in sizes])
    if line.residual > _BAD_FIT:
        note(
            f"bad fit: optimizer step is up to {line.residual * 100:.3g} % off its line over "
            f"{len(sizes)} numbers of parameters"
        )
    return OptimizerLine(launch_s=line.latency_s, parameter_s=line.seconds_per_byte)

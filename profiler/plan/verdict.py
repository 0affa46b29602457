"""Whether a run matches its reference: losses and gradient norms, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from profiler.plan.job import Precision, RunResult

__all__ = ["TOLERANCE", "Verdict", "judge"]

TOLERANCE: Mapping[Precision, Mapping[str, float]] = {
    "fp32": {"loss": 2e-4, "grad_norm": 1e-3},
    # one rounding to bf16 is 2e-3 and not 6e-8; over many tokens and parameters they cancel
    "bf16": {"loss": 2e-3, "grad_norm": 1e-2},
}
"""Largest difference, as a share of the reference's value."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The comparison of a run with one process."""

    tolerance: Mapping[str, float]
    largest: Mapping[str, float]
    """Largest relative difference over the steps; infinite where a value is not finite."""

    @property
    def matches(self) -> bool:
        """Whether everything is within its tolerance."""
        return all(self.largest[key] <= most for key, most in self.tolerance.items())

    @property
    def sentence(self) -> str:
        """What is wrong, in words."""
        worst = [
            f"{name} {self.largest[key]:.2g} (at most {self.tolerance[key]:g})"
            for key, name in (("loss", "loss"), ("grad_norm", "gradient norm"))
            if not self.largest[key] <= self.tolerance[key]
        ]
        return f"the run does not match one process without parallelism: {', '.join(worst)}"


def judge(result: RunResult, precision: Precision) -> Verdict | None:
    """Return how far a run is from its reference; None where it has none."""
    if not result.reference_loss:
        return None
    return Verdict(
        tolerance=TOLERANCE[precision],
        largest={
            "loss": _largest(result.loss, result.reference_loss),
            "grad_norm": _largest(result.grad_norm, result.reference_grad_norm),
        },
    )


def _largest(values: Sequence[float], references: Sequence[float]) -> float:
    pairs = list(zip(values, references, strict=True))
    if not all(math.isfinite(number) for pair in pairs for number in pair):
        return math.inf
    return max(_difference(value, reference) for value, reference in pairs)


def _difference(value: float, reference: float) -> float:
    if value == reference:
        return 0.0
    return abs(value - reference) / abs(reference) if reference else math.inf

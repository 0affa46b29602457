"""Measured times as a sum of effects of batch and sequence length: their fit and its uncertainty.

A time is t = c0 + b*(c1*s + c2*s^2): a launch that nothing changes, work that grows with the
tokens, attention that grows with their square. Which of these terms a set of times can tell apart
is decided here once, for the planner and for what a profiler writes. Source: cost-model.md,
"Compute".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.fit import nonnegative_fit, nonnegative_fits, relative_weights
from autopar.model_measurements import Form, Term

__all__ = [
    "BAD_FIT",
    "INTERVAL",
    "REACH",
    "FittedTimes",
    "bootstrap_times",
    "fit_times",
    "terms_of",
]

F64 = NDArray[np.float64]

BAD_FIT = 0.1
"""A fit that is farther than this from one of its times is said to be bad."""
REACH = 2.0
"""A fit may be used up to so many times its largest batch and its longest sequence."""
INTERVAL = (0.05, 0.95)
"""Quantiles of the replicas that an interval goes from and to."""
_NUM_REPLICAS = 200
_SEED = 20240901

_POWERS: dict[Term, tuple[int, int]] = {
    "launch_s": (0, 0),
    "s_per_sample": (1, 0),
    "s_per_token": (1, 1),
    "s_per_token_squared": (1, 2),
}
"""Exponents of batch and sequence length."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedTimes:
    """Non-negative coefficients of the terms of times, and how far they are from each."""

    terms: tuple[Term, ...]
    coefficients: F64
    """(k,) in the unit that the name of each term says."""
    fitted_s: F64
    """(n,) the fit at every measured cell."""
    errors: F64
    """(n,) fitted over measured time, less 1; times below a thousandth of the longest count as
    that, as they do in the fit."""

    @property
    def launch_s(self) -> float:
        """Seconds that neither batch nor length changes; 0 where the times cannot tell."""
        return self.coefficient("launch_s")

    @property
    def worst(self) -> int:
        """Index of the cell that the fit is farthest from."""
        return int(np.abs(self.errors).argmax())

    def coefficient(self, term: Term) -> float:
        """Return a coefficient, 0 for a term that is not fitted."""
        return float(self.coefficients[self.terms.index(term)]) if term in self.terms else 0.0

    def sample_s(self, length: float) -> float:
        """Return the seconds that a further sample of this length takes."""
        return sum(
            float(x) * length ** _POWERS[term][1]
            for term, x in zip(self.terms, self.coefficients, strict=True)
            if term != "launch_s"
        )


def terms_of(
    form: Form, batches: Iterable[int], lengths: Iterable[int], *, quadratic: bool
) -> tuple[Term, ...]:
    """Return the terms that times of these batches and sequence lengths can tell apart.

    static: proportional to the batch, and batch: with a launch cost, both at one length; sequence:
    also over lengths. quadratic : of layers, whose attention grows with the square of the length;
    what surrounds them has a part per sample instead.
    """
    if form == "static":
        return ("s_per_sample",)
    launch: tuple[Term, ...] = ("launch_s",)
    if form == "batch":
        return (*launch, "s_per_sample")
    terms = launch if len(set(batches)) > 1 else ()
    if len(set(lengths)) == 1:
        return (*terms, "s_per_token")
    if quadratic:
        return (*terms, "s_per_token", "s_per_token_squared")
    return (*terms, "s_per_sample", "s_per_token")


def fit_times(
    batches: Sequence[int],
    lengths: Sequence[int],
    times_s: Sequence[float],
    terms: tuple[Term, ...],
) -> FittedTimes:
    """Return the non-negative, relatively weighted fit of times of whole batches, in seconds."""
    design = _design(batches, lengths, terms)
    measured = np.array(times_s, dtype=np.float64)
    coefficients = nonnegative_fit(design, measured)
    fitted = design @ coefficients
    return FittedTimes(
        terms=terms,
        coefficients=coefficients,
        fitted_s=fitted,
        errors=(fitted - measured) * relative_weights(measured),
    )


def bootstrap_times(
    batches: Sequence[int],
    lengths: Sequence[int],
    samples_s: Sequence[Sequence[float]],
    terms: tuple[Term, ...],
) -> tuple[F64, F64]:
    """Return replicas of the coefficients (r, k) and of the fit at every cell (r, n), in seconds.

    Each replica draws as many samples of every cell as it has, with replacement, and fits their
    medians; the same cells give the same replicas. They say what the scatter of the samples leaves
    open, not whether the form is right: that is in the errors of the fit.
    """
    design = _design(batches, lengths, terms)
    generator = np.random.default_rng(_SEED)
    medians = np.stack(
        [
            np.median(generator.choice(np.array(cell), (_NUM_REPLICAS, len(cell))), axis=1)
            for cell in samples_s
        ],
        axis=1,
    )
    coefficients = nonnegative_fits(design, medians)
    return coefficients, coefficients @ design.T


def _design(batches: Sequence[int], lengths: Sequence[int], terms: tuple[Term, ...]) -> F64:
    batch = np.array(batches, dtype=np.float64)
    length = np.array(lengths, dtype=np.float64)
    powers = (_POWERS[term] for term in terms)
    return np.stack([batch**p * length**q for p, q in powers], axis=1)

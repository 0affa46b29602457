"""Gain or loss of low precision: a comparison of two precisions of one run, term by term.

A step in low precision has shorter GEMMs and additional casts. GPUs wait longer for the host, whose
overhead does not shrink. The times come from `autopar.price.step`.
"""

from __future__ import annotations

from typing import Literal, get_args

from autopar.errors import InputError
from autopar.price.account import account_of
from autopar.price.job import job_of_run
from autopar.price.step import StepTime, step_time
from autopar.rates.parts.operations import Machine
from autopar.records import Record, replace
from autopar.run.run import Run
from autopar.run.runtime import Precision

PrecisionName = Literal["bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"]
"""Precision of the GEMMs of layers.

`fp8` has one scale per tensor, `fp8_block` one per 128 x 128 elements, `mxfp8` one per 32 elements
and `nvfp4` one per 16.
"""
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)

_RECIPES: dict[PrecisionName, Literal["tensorwise", "blockwise", "mxfp8"]] = {
    "fp8": "tensorwise",
    "fp8_block": "blockwise",
    "mxfp8": "mxfp8",
}
_SENDS = ("tensor", "context", "experts", "transfer", "sharding", "gradients")


def run_in(run: Run, name: PrecisionName, *, low_weights: bool | None = None) -> Run:
    """Return a run with GEMMs in another precision.

    low_weights : True if weights are stored in low precision only, without a 16-bit copy; None
    keeps the setting of the run.

    Raises InputError for an unknown precision and for a run that is not in bf16.
    """
    if name not in PRECISIONS:
        raise InputError(f"products are in {', '.join(PRECISIONS)}, got {name}")
    before = run.runtime.precision
    if before.kind != "bf16":
        raise InputError(
            f"products of fewer bits stand beside bf16, and the launch is {before.kind}"
        )
    kept = before.low_weights if low_weights is None else low_weights
    fp8 = name in _RECIPES
    after: Precision = replace(
        before,
        fp8=fp8,
        fp8_weights=fp8 and kept,
        fp8_recipe=_RECIPES.get(name, before.fp8_recipe),
        fp8_attention=fp8 and before.fp8_attention,
        fp4=name == "nvfp4",
        fp4_weights=name == "nvfp4" and kept,
    )
    return replace(run, runtime=replace(run.runtime, precision=after))


class PrecisionTerms(Record):
    """Difference of step time, by term, and of peak memory between two precisions of a run."""

    low: PrecisionName
    high: PrecisionName
    low_s: float
    """Step time in the precision `low`, seconds."""
    high_s: float
    products_saved_s: float
    """Seconds per step saved by GEMMs of layers, including recomputed ones."""
    casts_added_s: float
    """Seconds per step added by quantization of activations and weights."""
    waiting_added_s: float
    """Seconds per step added by exposed host overhead, which low precision does not reduce."""
    sends_saved_s: float
    """Seconds per step saved by communication, where weights are gathered in low precision."""
    others_saved_s: float
    """Seconds per step saved by all other terms, such as pipeline bubbles and stragglers."""
    peak_added_bytes: int
    """Peak bytes added on the peak stage by low-precision copies of 16-bit weights."""

    @property
    def saved_s(self) -> float:
        """Seconds per step saved in total, the sum of the terms."""
        return self.high_s - self.low_s

    @property
    def pays(self) -> bool:
        """True if the step is shorter in the precision `low`."""
        return self.saved_s > 0

    @property
    def reason(self) -> str:
        """Largest gain and largest loss, as shares of the step in `high`, without a period."""
        # Each term has two names, one for each sign.
        terms = {
            ("shorter products", "longer products"): self.products_saved_s,
            ("smaller transfers", "larger transfers"): self.sends_saved_s,
            ("shorter bubbles", "longer bubbles"): self.others_saved_s,
            ("fewer casts", "casts"): -self.casts_added_s,
            ("less waiting for the host", "waiting for the host"): -self.waiting_added_s,
        }
        gain, loss = max(terms, key=terms.__getitem__), min(terms, key=terms.__getitem__)
        gained, paid = (100 * abs(terms[name]) / self.high_s for name in (gain, loss))
        verdict = "pays" if self.pays else "does not pay"
        return (
            f"{self.low} {verdict} against {self.high} ({100 * self.saved_s / self.high_s:+.1f} % "
            f"of the step): {gain[0]} save {gained:.1f} %, {loss[1]} take {paid:.1f} %"
        )


def precision_terms(
    machine: Machine, run: Run, low: PrecisionName, high: PrecisionName = "bf16"
) -> PrecisionTerms:
    """Return the differences of a run between two precisions, `low` against `high`.

    Raises InputError if the machine has no kernel times of one of them.
    """
    runs = [run_in(run, name) for name in (low, high)]
    small, large = (step_time(machine, job_of_run(found)) for found in runs)
    peaks = [
        max(account_of(found, stage).peak_bytes for stage in range(found.strategy.pp))
        for found in runs
    ]

    def saved(*names: str) -> float:
        return _sum(large, names) - _sum(small, names)

    known = ("gemm", "recompute", "cast", "host", *_SENDS)
    return PrecisionTerms(
        low=low,
        high=high,
        low_s=small.total_s,
        high_s=large.total_s,
        products_saved_s=saved("gemm", "recompute"),
        casts_added_s=-saved("cast"),
        waiting_added_s=-saved("host"),
        sends_saved_s=saved(*_SENDS),
        others_saved_s=saved(*(name for name in large.terms_s if name not in known)),
        peak_added_bytes=peaks[0] - peaks[1],
    )


def _sum(step: StepTime, names: tuple[str, ...]) -> float:
    return sum(step.terms_s[name] for name in names)

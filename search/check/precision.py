"""Why products of fewer bits pay, or do not: two precisions of one launch, term by term.

A step in fewer bits has shorter products, and casts that the other has not; where the host is as
slow as before, devices wait for it. Prices come from `autopar.price.step`; nothing is ranked.
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
"""In what products of layers are: 16 bits; 8 with a scale of a tensor, of 128 x 128 elements or of
32; 4 with one of 16."""
PRECISIONS: tuple[PrecisionName, ...] = get_args(PrecisionName)

_RECIPES: dict[PrecisionName, Literal["tensorwise", "blockwise", "mxfp8"]] = {
    "fp8": "tensorwise",
    "fp8_block": "blockwise",
    "mxfp8": "mxfp8",
}
_SENDS = ("tensor", "context", "experts", "transfer", "sharding", "gradients")


def run_in(run: Run, name: PrecisionName, *, low_weights: bool | None = None) -> Run:
    """Return a run whose products are in another precision; raises InputError.

    low_weights : weights are kept as products take them, and not in 16 bits beside; None: as the
    run has it.
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
    """What a step gains and loses by another precision, in seconds and bytes."""

    low: PrecisionName
    high: PrecisionName
    low_s: float
    """Of a step."""
    high_s: float
    products_saved_s: float
    """By products of the layers, those that are computed again as well."""
    casts_added_s: float
    """By quantisation of activations and weights."""
    waiting_added_s: float
    """By a host that is no faster: what devices wait for it more than before."""
    sends_saved_s: float
    """By transfers, where weights are gathered in fewer bits."""
    others_saved_s: float
    """By what follows from these: bubbles, stragglers."""
    peak_added_bytes: int
    """By the fullest device, where copies in fewer bits are kept beside weights of 16."""

    @property
    def saved_s(self) -> float:
        """By the step: the sum of the terms."""
        return self.high_s - self.low_s

    @property
    def pays(self) -> bool:
        """Whether the step is shorter."""
        return self.saved_s > 0

    @property
    def reason(self) -> str:
        """A sentence without its end: what decides, with its share of the step before."""
        # a term that turns round has another name
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
    """Return what a run's step gains and loses by one precision against another.

    Raises InputError where the machine has no times of one of them.
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

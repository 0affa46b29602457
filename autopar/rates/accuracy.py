"""Errors of estimated step times against published runs, and the 90 % interval of an estimate.

`python -m benchmarks.ledger --write` writes `hardware_configs/accuracy/published.json`. It contains
the spread of measured over estimated time for every class of runs. A class is a software stack, MoE
or dense models, adapters or all weights trained, and known or unknown site figures. Errors are
those of constants that were fitted without the source of the run (`benchmarks.intervals`). The
spread determines the interval of an estimate and the probability that one of two plans is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from autopar.documents import catalog
from autopar.documents.checks import published
from autopar.documents.json import load_object, read_record
from autopar.rates.devices import architecture_of
from autopar.records import KeyFault, Record, number, replace, whole_number
from autopar.sources import CARD_ROLE, Source, stacks_of

COVERAGE = 0.90
"""Fraction of runs whose measured time is in the interval of their estimate."""

_MOST = 100.0
"""Largest ratio of measured and estimated time in either direction."""


_Ratio = Annotated[float, number(1.0 / _MOST, _MOST)]
_Spread = Annotated[float, number(0.0, _MOST)]
_Count = Annotated[int, whole_number(1)]


class RunClass(Record):
    """Errors of one class of published runs."""

    stack: str
    experts: bool
    adapters: bool = False
    """True if a frozen base is trained with adapters (LoRA)."""
    site_known: bool
    rows: _Count
    sources: _Count
    low: _Ratio
    """Lower end of the 90 % interval of measured over estimated time; `high` is the upper end."""
    high: _Ratio
    plan_spread: _Spread
    """Standard deviation of ln(measured / estimated) among plans of one model on one cluster."""
    unlike: str = ""
    """Hardware or layers with few published runs, such as `few or none on gfx942`; else empty."""

    @property
    def basis(self) -> str:
        """Runs that the interval is made of, such as `132 published megatron-core runs`."""
        if self.unlike:
            return f"all published runs ({self.unlike})"
        kind = " MoE" if self.experts else ""
        return f"{self.rows} published {self.stack}{kind} runs"

    def __post_init__(self) -> None:
        if self.low > self.high:
            problem = f"the value is {self.low:g}, expected at most {self.high:g}"
            raise KeyFault("low", problem)

    def interval_s(self, estimated_s: float) -> tuple[float, float]:
        """Return the ends of the 90 % interval of the measured step time, in seconds."""
        return self.low * estimated_s, self.high * estimated_s


@published("accuracy")
class AccuracyDocument(Record):
    """Errors of estimated step times, by class of runs."""

    format: Literal["autopar-accuracy"]
    version: Literal[1]
    source: str
    classes: Annotated[tuple[RunClass, ...], Meta(min_length=1)]
    architectures: tuple[str, ...] = ()
    """Architectures of the devices of these runs, such as sm_90; empty: not recorded."""


class Accuracy(Record):
    """All classes of published runs."""

    classes: tuple[RunClass, ...]
    path: Path
    architectures: tuple[str, ...] = ()

    def of(
        self,
        stack: str,
        *,
        experts: bool,
        site_known: bool,
        adapters: bool = False,
        architecture: str | None = None,
        few_runs: str = "",
    ) -> RunClass:
        """Return the class of runs whose errors apply to a job.

        architecture : of the device, such as sm_90; None: unknown
        few_runs : layers with few published runs, such as `few with gated delta nets`

        The interval spans those of all classes if the architecture has no published run, and with
        `few_runs`.

        Without a class of the stack, the class with the widest interval is returned, of those with
        the same use of experts and the same knowledge of the site. Classes with adapters never
        count for runs without them.
        """
        if architecture and self.architectures and architecture not in self.architectures:
            few_runs = f"few or none on {architecture}"
        if few_runs:
            kind = self.of(stack, experts=experts, site_known=site_known, adapters=adapters)
            low, high = min(c.low for c in self.classes), max(c.high for c in self.classes)
            return replace(kind, low=low, high=high, unlike=few_runs)
        possible = [c for c in self.classes if adapters or not c.adapters]
        alike = [c for c in possible if c.experts == experts]
        same = [c for c in alike if c.site_known == site_known]
        exact = [c for c in same if c.stack == stack and c.adapters == adapters]
        if adapters:  # of adapters few runs are known, whatever the site
            same += [c for c in alike if c.adapters]
        candidates = exact or same or alike or possible
        return max(candidates, key=_width)


def _width(entry: RunClass) -> float:
    return entry.high / entry.low


def class_of_sources(sources: Iterable[Source], *, experts: bool) -> RunClass:
    """Return the class of runs whose errors apply to estimates made from `sources`.

    Sources of one stack give a class of that stack; without a stack, or with several, the widest
    class is returned. A site with only nominal figures counts as unknown. Raises InputError if the
    shipped file is unusable.
    """
    sources = tuple(sources)
    stacks = stacks_of(sources)
    site = next((source for source in sources if source.role == "site"), None)
    card = next((source for source in sources if source.role == CARD_ROLE), None)
    # Files of two stacks belong to the class of neither.
    return _shipped().of(
        stacks[0] if len(stacks) == 1 else "",
        experts=experts,
        site_known=site is not None and not site.estimated,
        architecture=None if card is None else architecture_of(Path(card.path).stem),
    )


@cache
def _shipped() -> Accuracy:
    return load_accuracy()


def load_accuracy() -> Accuracy:
    """Return the shipped prediction errors; raises InputError if their file is unusable."""
    return read_accuracy(catalog.find_document("accuracy", "accuracy file", "published"))


def read_accuracy(path: Path) -> Accuracy:
    """Return the classes of an accuracy file; raises DocumentError if it is invalid."""
    document = read_record(AccuracyDocument, path, load_object(path).data)
    return Accuracy(classes=document.classes, architectures=document.architectures, path=path)


def probability_faster(one_s: float, other_s: float, plan_spread: float) -> float:
    """Return the probability that a plan estimated at `one_s` is faster than one at `other_s`.

    Errors of machine and engine are equal in both estimates and cancel. In addition, each estimate
    has an independent error: `plan_spread` is the standard deviation of its logarithm.
    """
    if plan_spread == 0.0:
        return 0.5 if one_s == other_s else float(one_s < other_s)
    gap = math.log(other_s / one_s) / (plan_spread * math.sqrt(2.0))
    return 0.5 * (1.0 + math.erf(gap / math.sqrt(2.0)))

"""Records of a search result: plans, their time and memory, and the basis of these figures.

The uniform search, the per-layer search and the estimate of a given plan fill these records;
reports, pages and documents read them. Nothing is computed or printed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autopar.records import Record
from autopar.run.rules import Notice

if TYPE_CHECKING:
    from autopar.run.plan import Plan, Prediction
    from autopar.training.throughput import Throughput


WarningKind = Literal["synthetic", "estimated", "exact"]


class MemoryTerm(NamedTuple):
    """One term of the peak memory of a stage."""

    name: str
    num_bytes: float
    switch: str = ""
    """Setting that changes the term; empty for none."""


class StagePrice(NamedTuple):
    """Memory of one pipeline stage, bytes per GPU."""

    stage: int
    steady_bytes: float
    """Steady-state memory, between steps."""
    peak_bytes: float
    """Peak of allocated memory, bytes."""
    reserved_bytes: tuple[float, float]
    """90 % interval of the reserved bytes; both ends are equal if there is a single figure."""
    budget_bytes: float
    oom_probability: float
    terms: tuple[MemoryTerm, ...]
    """Terms of the peak."""

    @property
    def terms_bytes(self) -> dict[str, float]:
        """Peak memory by name of the term, bytes; equal names are added."""
        found: dict[str, float] = {}
        for name, num_bytes, _ in self.terms:
            found[name] = found.get(name, 0.0) + num_bytes
        return found


class Price(Record):
    """Time and memory of one plan."""

    throughput: Throughput | None
    """Throughput of the plan; None if it has no step time."""
    samples_per_s: float
    terms_s: Mapping[str, float]
    """Seconds of a step by term; the sum is the step time."""
    stage_s: tuple[float, ...]
    """Time of every stage, seconds; used only to compare stages with each other."""
    global_batch: int
    micro_batches: int
    stages: tuple[StagePrice, ...]
    """Stages whose memory was counted; a uniform search counts the largest ones."""
    oom_probability: float
    """Probability that any GPU of the run is out of memory, 0 to 1."""
    oom_risk: float | None = None
    """Highest allowed OOM probability; None: the reserved bytes decide whether the plan fits."""
    verdict: str
    """`fits`, or the reason why the plan does not fit."""
    problems: tuple[str, ...] = ()
    """Reasons why the plan is illegal or does not fit, each with its arithmetic."""
    host_bytes: float = 0.0
    """Host memory needed per GPU, bytes."""
    host_capacity_bytes: float | None = None
    """Host memory available per GPU, bytes; None if unknown."""
    basis: tuple[str, ...]
    """Basis of the figures and of their 90 % interval."""
    interval: str = ""
    """90 % interval of the step time as text, with the runs that it is based on; empty for none."""
    notes: tuple[str, ...] = ()
    """Caveats about the figures, one sentence each."""
    reserve_bytes: float
    """Bytes of the peak stage's budget that no tensor can use."""
    reserve_of: str
    """Purpose of the reserve, as text."""
    few_runs: tuple[str, ...] = ()
    """Features of the plan that few measured runs use."""

    @property
    def fits(self) -> bool:
        """True if the plan is legal and fits in memory."""
        return self.verdict == "fits"

    def term_differences(self, other: Price) -> dict[str, float]:
        """Return the seconds per sequence by term minus those of another plan."""
        return {
            name: self.terms_s.get(name, 0.0) / self.global_batch
            - other.terms_s.get(name, 0.0) / other.global_batch
            for name in (*other.terms_s, *self.terms_s)
        }

    @property
    def fullest(self) -> StagePrice:
        """The peak stage: the one that reserves the largest share of its budget."""
        return max(self.stages, key=lambda one: one.reserved_bytes[1] / max(one.budget_bytes, 1.0))


class OtherPrecision(NamedTuple):
    """Comparison with the fastest plan of the other precision: 16 bits, or fp8 and lower."""

    precision: str
    gain: float
    """Relative gain in throughput of the chosen plan, as a fraction."""
    terms_s: Mapping[str, float]
    """Additional seconds per step of the other plan by term, at the batch of the chosen plan."""


class Priced(Record):
    """A plan with its time and memory."""

    engine: str = ""
    """Name of the engine; empty for any engine."""
    title: str = ""
    """Display name of the engine."""
    words: str
    """Degrees and settings in one line."""
    uniform: bool
    """True if all layers have the same strategy."""
    price: Price
    rows: tuple[tuple[str, str], ...] = ()
    """(label, text) of additional figures, such as the effect of a chosen setting."""
    other_precision: OtherPrecision | None = None
    """Fastest plan in 16 bits if this one is in lower precision, and vice versa; None: unknown."""
    unequal_stages: str = ""
    """Layers of each stage, chunk by chunk; empty if all are equal."""
    layered: tuple[Plan, Prediction] | None = None
    """The per-layer plan, with times of each stage and group of layers; None for a uniform plan."""
    key: object
    """Key that is equal for equal plans."""
    fastest: bool = True
    """False if a plan was chosen that is safer or simpler than the fastest one."""


class Gain(NamedTuple):
    """Effect of more of one resource on the fastest plan."""

    name: str
    samples_per_s: float
    gain: float
    """Relative gain in samples/s, as a fraction."""
    same_plan: bool
    """True if the fastest plan stays the same."""


class RequestedPlan(NamedTuple):
    """A plan to compare with, or the reason why there is none."""

    rule: str
    """Constraint of the plan as typed, such as `tp=8`; empty for the fastest plan."""
    plan: Priced | None
    reason: str
    freed: str = ""
    """Constraints of the original search that were dropped; empty for none."""
    probability_faster: float | None = None
    """Probability that the plan is faster than the compared one; None: unknown."""
    options: str = ""
    """Search options that find the plan, in addition to those of the question."""


class Alternative(NamedTuple):
    """A plan with other degrees."""

    words: str
    samples_per_s: float
    probability_faster: float | None
    """Probability that it is faster than the best plan; None: unknown."""
    peak_bytes: float | None
    """Peak allocated; None: not counted."""


class EngineBest(Record):
    """The fastest plan of one engine, or the reason why there is none."""

    engine: str
    samples_per_s: float | None
    plan: Plan | None = None
    """Per-layer plan."""
    launch: Mapping[str, Any] | None = None
    """Degrees of a uniform plan, as in its file."""
    words: str = ""
    """The plan in one line."""
    options: str = ""
    """Options that find the per-layer plan, in addition to the typed ones."""
    reason: str = ""
    """Reason why there is no plan."""
    broken: tuple[Notice, ...] = ()
    """Rules that exclude all plans; if there is a plan, the rules on adapters that exclude some of
    the others."""
    missing_bytes: float | None = None
    """Memory per GPU that the smallest plan needs beyond the budget, bytes; None: not counted."""
    smallest: str = ""
    """The smallest plan in one line, where none fits; empty if unknown."""


class Answer(Record):
    """Result of a search, or the estimate of a given plan."""

    title: str
    """Model, cluster and batch."""
    warnings: tuple[tuple[WarningKind, str], ...] = ()
    """Inputs that were not measured, one line each; `exact` marks results that are exact
    nevertheless."""
    best: Priced
    """The fastest plan that fits, or the given one."""
    uniform: Priced | None = None
    """The fastest uniform plan if the best plan is a per-layer plan."""
    others: tuple[Alternative, ...] = ()
    """Fastest plans of other degrees, the fastest first."""
    by_engine: tuple[EngineBest, ...] = ()
    """Best plan of each engine, the fastest first; empty for one engine."""
    tokens: float | None = None
    """Sequence length over number of GPUs, to convert samples/s to tokens/s/GPU; None: rates are
    shown in samples/s."""
    gpu_hour_price: float | None = None
    searched: str = ""
    """Size of the search space and proof of optimality, in one line."""
    unfinished: tuple[str, ...] = ()
    """Parts of the search space not searched because of a time limit."""
    space: str = ""
    """The search space in full."""
    not_searched: tuple[str, ...] = ()
    """Options that were not searched."""
    assumed: tuple[str, ...] = ()
    """Defaults that were used, one line each."""
    notes: tuple[str, ...] = ()
    """Caveats about the inputs, one sentence each."""
    inputs: tuple[str, ...] = ()
    """Input files, one line each."""
    effort: str = ""
    """CPU time of the search, as text."""

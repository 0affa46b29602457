"""The answer of a search: ranked plans, their prices, and the basis of both.

The uniform search, the per-layer search and the price of a given plan all fill these records;
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
    """One part of a peak."""

    name: str
    num_bytes: float
    switch: str = ""
    """Setting that changes it."""


class StagePrice(NamedTuple):
    """Memory of one pipeline stage, in bytes of one GPU."""

    stage: int
    steady_bytes: float
    """Between steps."""
    peak_bytes: float
    """Peak allocated."""
    reserved_bytes: tuple[float, float]
    """90 % interval of the allocator's total; both ends are equal where it is one figure."""
    budget_bytes: float
    oom_probability: float
    terms: tuple[MemoryTerm, ...]
    """Parts of the peak."""

    @property
    def terms_bytes(self) -> dict[str, float]:
        """Peak by name of the term."""
        found: dict[str, float] = {}
        for name, num_bytes, _ in self.terms:
            found[name] = found.get(name, 0.0) + num_bytes
        return found


class Price(Record):
    """Time and memory of one plan."""

    throughput: Throughput | None
    """None: the plan has no step time."""
    samples_per_s: float
    terms_s: Mapping[str, float]
    """Seconds of a step by term; they add up to the step."""
    stage_s: tuple[float, ...]
    """Seconds of every stage; only their ratios count."""
    global_batch: int
    micro_batches: int
    stages: tuple[StagePrice, ...]
    """Stages whose memory was counted; a uniform search counts the largest ones."""
    oom_probability: float
    """Of the run as a whole."""
    oom_risk: float | None = None
    """Highest probability that is allowed; None: the reserved bytes decide."""
    verdict: str
    """`fits`, or why not."""
    problems: tuple[str, ...] = ()
    """Why the plan is illegal or does not fit, each with its arithmetic."""
    host_bytes: float = 0.0
    """Host memory that each GPU needs."""
    host_room_bytes: float | None = None
    """Host memory that each GPU has; None: unknown."""
    basis: tuple[str, ...]
    """Basis of the figures and of their 90 % interval."""
    interval: str = ""
    """90 % interval of the step and the runs or measurements behind it; empty: none."""
    notes: tuple[str, ...] = ()
    """Further doubts about the figures."""
    reserve_bytes: float
    """Part of the budget of the peak stage that no tensor can use."""
    reserve_of: str
    """What uses it."""
    few_runs: tuple[str, ...] = ()
    """Parts of the plan that few measured runs have."""

    @property
    def fits(self) -> bool:
        """True if the plan is legal and fits in memory."""
        return self.verdict == "fits"

    def terms_against(self, other: Price) -> dict[str, float]:
        """Return by term the seconds of a sequence above those of another plan."""
        return {
            name: self.terms_s.get(name, 0.0) / self.global_batch
            - other.terms_s.get(name, 0.0) / other.global_batch
            for name in (*other.terms_s, *self.terms_s)
        }

    @property
    def fullest(self) -> StagePrice:
        """The peak stage: the one that reserves the largest share of its budget."""
        return max(self.stages, key=lambda one: one.reserved_bytes[1] / max(one.budget_bytes, 1.0))


class Priced(Record):
    """A plan with its price."""

    engine: str = ""
    """Name of the engine; empty: any engine."""
    title: str = ""
    """Name of the engine in prose."""
    words: str
    """Degrees and settings in one line."""
    uniform: bool
    """True if all layers have one strategy."""
    price: Price
    rows: tuple[tuple[str, str], ...] = ()
    """Label and text of further figures: what a chosen setting brings."""
    unequal_stages: str = ""
    """Layers of each stage, chunk by chunk; empty where all are equal."""
    layered: tuple[Plan, Prediction] | None = None
    """A per-layer plan, with times of each stage and group of layers."""
    key: object
    """Equal for equal plans."""


class Gain(NamedTuple):
    """What more of one resource brings to the fastest plan."""

    name: str
    samples_per_s: float
    gain: float
    """Of the rate, as a share of it."""
    same_plan: bool


class Asked(NamedTuple):
    """A plan that was asked for, or why there is none."""

    heading: str
    plan: Priced | None
    reason: str


class Alternative(NamedTuple):
    """A plan of other degrees."""

    words: str
    samples_per_s: float
    probability_faster: float | None
    """Probability that it is faster than the best plan; None: unknown."""
    peak_bytes: float | None
    """Peak allocated; None: not counted."""


class EngineBest(Record):
    """The fastest plan of one engine, or why there is none."""

    engine: str
    samples_per_s: float | None
    plan: Plan | None = None
    """Per-layer plan."""
    launch: Mapping[str, Any] | None = None
    """Degrees of a uniform plan, as its file contains them."""
    words: str = ""
    """The plan in one line."""
    options: str = ""
    """Options that find the per-layer plan, besides those that were typed."""
    reason: str = ""
    """Why there is no plan."""
    broken: tuple[Notice, ...] = ()
    """Broken rules that leave no plan."""


class Answer(Record):
    """What a search found, or what a given plan costs."""

    title: str
    """Model, cluster and batch."""
    warnings: tuple[tuple[WarningKind, str], ...] = ()
    """Inputs that were not measured, one line each; `exact` marks what is sure all the same."""
    best: Priced
    """The fastest plan that fits, or the given one."""
    uniform: Priced | None = None
    """The fastest uniform plan, where the best one is a per-layer plan."""
    others: tuple[Alternative, ...] = ()
    """Fastest plans of other degrees, the fastest first."""
    by_engine: tuple[EngineBest, ...] = ()
    """Best plan of each engine, the fastest first; empty for one engine."""
    tokens: float | None = None
    """Tokens of a sample over all GPUs: rates are shown per GPU; None: in samples."""
    gpu_hour_price: float | None = None
    searched: str = ""
    """Size of the search space and proof of optimality, in one line."""
    unfinished: tuple[str, ...] = ()
    """Parts of the space that a time limit left out."""
    space: str = ""
    """The search space in full."""
    not_searched: tuple[str, ...] = ()
    """Excluded options."""
    assumed: tuple[str, ...] = ()
    """Defaults that were used, one line each."""
    notes: tuple[str, ...] = ()
    """Doubts about the inputs."""
    inputs: tuple[str, ...] = ()
    """Input files, one line each."""
    effort: str = ""
    """CPU time of the search, in words."""

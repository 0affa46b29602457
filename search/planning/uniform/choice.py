"""Choice among plans that are as fast as the fastest: the safest, then the simplest.

Estimates of one engine do not decide between plans whose step times differ by less than about 1 %
(`search.engines.table.NOISE`). Among these, a plan that rarely runs out of memory and that needs
fewer features of the engine is better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from autopar.price.oom_risk import SAFE_RISK
from autopar.records import replace
from search.engines.candidate import NONE, Constraints
from search.planning.uniform.best_first import PricedRun, UniformSearch
from search.planning.uniform.infeasibility import field_values
from search.request.options import Shares

SAFE_SHARE = 0.03
"""Largest share of the throughput that a safer plan may cost to be named next to the chosen one."""


class Trait(NamedTuple):
    """A property that makes a plan harder to launch or to keep stable."""

    name: str
    """Name in JSON and in reports."""
    field: str
    """Field of `Candidate` and of `Constraints`."""
    of: Callable[[Any], bool]
    """Function (value of the field) -> True if the plan has the property."""

    def has(self, plan: PricedRun) -> bool:
        """Return True if a plan has the property."""
        return self.of(getattr(plan.choice, self.field))


TRAITS = (
    Trait("activation offload", "offload", lambda words: words != NONE),
    Trait("recomputation of several modules", "recompute", lambda words: "+" in words),
    Trait("context ranks", "cp", lambda size: size > 1),
    Trait("TP overlap", "tp_overlap", bool),
)
"""Traits that a choice among equally fast plans avoids, the most avoided first."""
OOM_TRAIT = "OOM probability"


def avoided(fastest: PricedRun, chosen: PricedRun) -> tuple[str, ...]:
    """Return the names of `TRAITS` of the fastest plan that the chosen one avoids.

    `OOM_TRAIT` stands first if only the chosen plan has an OOM probability of at most `SAFE_RISK`.
    """
    risks = [OOM_TRAIT] if not is_safe(fastest) and is_safe(chosen) else []
    traits = (trait.name for trait in TRAITS if trait.has(fastest) and not trait.has(chosen))
    return (*risks, *traits)


def is_safe(plan: PricedRun) -> bool:
    """Return True if the OOM probability of a plan is at most `SAFE_RISK`."""
    return plan.assessment.odds_of_oom <= SAFE_RISK


def choose(
    space: UniformSearch,
    fixed: Constraints,
    fastest: PricedRun,
    *,
    within: float,
    named: float,
    shares: Shares,
) -> tuple[PricedRun | None, PricedRun | None]:
    """Return (chosen plan, safer plan); None for the fastest plan, and for no safer plan.

    The choice is among the plans at most `within` slower than the fastest. First, it keeps those
    with an OOM probability of at most `SAFE_RISK`, if there are any. Then it keeps those without
    the first of `TRAITS`, if there are any, then those without the second, and so on. It returns
    the fastest of the rest. Each step is a proven search. If all safe plans cost more than
    `within`, the fastest of them is the safer plan.

    fixed : constraints of the user. A trait that they require is kept.
    within, named : shares of the throughput that a chosen and a safer plan may cost.
    shares : division of the time limit among searches.
    """
    fixed = replace(fixed, precision=(fastest.choice.precision,))

    def found(asked: Constraints, risk: float | None, share: float) -> PricedRun | None:
        solved = space.solve(
            asked,
            seconds=shares.following(),
            grace_s=0.0,
            oom_risk=risk,
            smallest_s=None,
            within_s=fastest.sample_s * (1.0 + share),
            numbered=False,
        )
        return solved.solutions[0] if solved.solutions and solved.complete else None

    chosen, safer = fastest, None
    if not is_safe(fastest):
        safer = found(fixed, SAFE_RISK, max(within, named))
        if safer is not None and safer.sample_s <= fastest.sample_s * (1.0 + within):
            chosen, safer = safer, None
    risk = SAFE_RISK if is_safe(chosen) else None
    for trait in TRAITS if within else ():
        simpler = _without(trait, fixed, space)
        if simpler is None:
            continue
        if trait.has(chosen):
            plan = found(simpler, risk, within)
            if plan is None:
                continue
            chosen = plan
        fixed = simpler
    return (None if chosen.choice == fastest.choice else chosen), safer


def _without(trait: Trait, fixed: Constraints, space: UniformSearch) -> Constraints | None:
    """Return constraints that exclude a trait; None if those of the user require it."""
    allowed: Any = getattr(fixed, trait.field)
    if trait.field == "tp_overlap":
        return None if allowed else replace(fixed, tp_overlap=False)
    values = field_values(space.engine, space.job, trait.field) if allowed is None else allowed
    left: Any = tuple(value for value in values if not trait.of(value))
    return replace(fixed, **{trait.field: left}) if left else None

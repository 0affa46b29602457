"""Prices what an engine makes of a plan, and chooses among the degrees that it could take.

What the engine does otherwise than the search took for granted (`Lowered.as_run`) is priced too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from autopar.documents.strategy import strategy_document
from autopar.errors import InputError, UnsupportedError
from autopar.records import Record, replace
from autopar.run.plan import Plan, Prediction
from autopar.units import GIB, format_seconds
from search.engines.engine import EXPORTERS, Job, Lower, Lowered, lower_for, search_words
from search.planning.space import divisors

Price = Callable[[Plan, Mapping[str, bool | str]], Prediction]
"""Prices a plan with these fields of `SearchOptions` changed; InputError where the inputs cannot,
such as memory tables that were measured otherwise."""
_Offers = dict[Plan, tuple[int, Lowered, Prediction]]


_SEEN_BYTES = 0.05 * GIB
"""Less than the one digit behind the point shows."""


class Choice(Record):
    """What is exported, and why this."""

    lowered: Lowered
    before: Prediction | None
    """The plan as it was given; None where there is nothing to price it with."""
    after: Prediction | None
    """What is exported, as the engine runs it."""
    how: str
    """How the one degree was chosen where there was a choice; empty otherwise."""
    not_priced: str = ""
    """Why there is no price of it as the engine runs it, though there are profiles."""

    @property
    def too_large(self) -> bool:
        """True when what is exported is known not to fit."""
        return self.after is not None and not (self.after.legal and self.after.fits)


def choose(job: Job, lower: Lower, first: Lowered, price: Price | None) -> Choice:
    """Return what an engine makes of a plan: the nearest one where something is lost.

    Parameters
    ----------
    first : what `lower` gives without a wish for a degree.
    price : prices a plan as the search does; None where no hardware is known.
    """
    if price is None:
        return Choice(lowered=first, before=None, after=None, how="")
    before = price(job.plan, {})
    if not first.losses:
        return _only(first, before, price)
    offers: _Offers = {}
    for degree in divisors(job.plan.world_size // job.plan.num_stages):
        try:
            offer = lower(replace(job, tensor_degree=degree))
        except InputError:
            continue  # this degree is legal nowhere near the plan; others are
        _add(offers, degree, offer, price)
    # last: a plan that a degree gives as well is called by the degree
    _add(offers, 0, first, price)
    if not offers:
        return _only(first, before, price)
    degree, best, after = min(offers.values(), key=lambda offer: _rank(offer[2]))
    return Choice(
        lowered=best,
        before=before,
        after=after,
        how=_how(degree, offers) if len(offers) > 1 else "",
    )


def advised(job: Job, engine: str, error: UnsupportedError) -> InputError:
    """Return the refusal of one engine with those that take the job, as they say when asked."""
    whole, near = list[str](), list[str]()
    for other in EXPORTERS:
        if other == engine:
            continue
        with suppress(InputError):
            (near if lower_for(other)(job).losses else whole).append(other)
    names = whole or near
    if not names:
        return InputError(f"{error.problem}; {error.remedy or 'no other engine takes it either'}")
    listed = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    advice = f"export to {listed} instead" + ("" if whole else " with --allow-approx")
    more = f", or {error.remedy}" if error.remedy else ""
    return InputError(f"{error.problem}; {advice}{more}")


def _only(lowered: Lowered, before: Prediction, price: Price) -> Choice:
    """Return what there is no choice about, without a price where it has none."""
    after, why = None, ""
    try:
        lowered, after = _as_kept(lowered, price)
    except InputError as error:
        why = str(error)
    return Choice(lowered=lowered, before=before, after=after, how="", not_priced=why)


def _add(offers: _Offers, degree: int, offer: Lowered, price: Price) -> None:
    """Add what a degree gives, unless it is there or has no price as the engine runs it."""
    if offer.plan not in offers:
        with suppress(InputError):
            offers[offer.plan] = (degree, *_as_kept(offer, price))


def _as_kept(lowered: Lowered, price: Price) -> tuple[Lowered, Prediction]:
    """Return what an engine makes of a plan with its price, in the bytes that the engine keeps.

    That these are its own is among what it runs otherwise where they are others than were planned.
    """
    alike = price(lowered.plan, lowered.as_run)
    own = {**lowered.as_run, "memory_of": lowered.engine}
    found = price(lowered.plan, own)
    changes = [
        abs(new.reserved_bytes - old.reserved_bytes)
        for new, old in zip(found.stages, alike.stages, strict=True)
    ]
    if max(changes, default=0) < _SEEN_BYTES:
        return lowered, found
    return replace(lowered, as_run=own), found


def _rank(prediction: Prediction) -> tuple[bool, float, float]:
    """Order predictions: those that fit by time, the others by how much is too much."""
    over = max(
        (stage.reserved_bytes - stage.budget_bytes for stage in prediction.stages), default=0
    )
    fits = prediction.legal and prediction.fits
    return (not fits, 0.0 if fits else float(over), prediction.step_time_s)


def _how(chosen: int, offers: _Offers) -> str:
    parts = []
    for degree, _, prediction in sorted(offers.values(), key=lambda offer: offer[0]):
        time = (
            format_seconds(prediction.step_time_s)
            if math.isfinite(prediction.step_time_s)
            else "illegal"
        )
        parts.append(f"{degree or 'its own'}: {time}" + ("" if prediction.fits else ", too large"))
    best = next(prediction for degree, _, prediction in offers.values() if degree == chosen)
    why = "the fastest that fits" if best.fits else "the one that misses the least memory"
    return f"tensor degree {chosen or 'of the plan'} is {why} ({'; '.join(parts)})"


def change_sentence(before: Prediction, after: Prediction) -> str:
    """Return the difference: `+4.1 % time, +0.7 GiB on stage 2`."""
    if not (math.isfinite(before.step_time_s) and math.isfinite(after.step_time_s)):
        return "the time of one of them cannot be priced"
    share = (after.step_time_s / before.step_time_s - 1) * 100
    text = f"{share:+.1f} % time"
    changes = [
        (new.reserved_bytes - old.reserved_bytes, new.stage)
        for old, new in zip(before.stages, after.stages, strict=False)
    ]
    grown = max(changes, default=(0, 0))
    change, stage = grown if grown[0] > 0 else min(changes, default=(0, 0))
    if abs(change) < _SEEN_BYTES:
        return f"{text}, same memory"
    return f"{text}, {change / GIB:+.1f} GiB on stage {stage}"


# --------------------------------------------------------------------------------------------------
# The object that `autopar-export --json` prints.


def export_document(choice: Choice, *, status: str, files: Sequence[str]) -> dict[str, object]:
    """Return the object of an export: `status` is exported or refused."""
    lowered = choice.lowered
    return {
        "status": status,
        "engine": lowered.engine,
        "engine_version": lowered.engine_version,
        "losses": [{"field": loss.field, "what": loss.what} for loss in lowered.losses],
        "plan": strategy_document(lowered.plan),
        "as_run": dict(lowered.as_run),
        "search": search_words(lowered) or None,
        "price": _prices(choice),
        "chosen_by": choice.how or None,
        "notes": list(lowered.notes),
        "files": list(files),
        "launch": lowered.launch,
    }


def import_document(engine: str, plan: Plan, notes: Sequence[str]) -> dict[str, object]:
    """Return the object of a configuration that was read."""
    return {
        "status": "imported",
        "engine": engine,
        "plan": strategy_document(plan),
        "notes": list(notes),
    }


def _prices(choice: Choice) -> Mapping[str, object] | None:
    if choice.before is None:
        return None
    if choice.after is None:
        return {"before": _price(choice.before), "after": None, "why": choice.not_priced}
    return {"before": _price(choice.before), "after": _price(choice.after)}


def _price(prediction: Prediction) -> dict[str, object]:
    time = prediction.step_time_s
    return {
        "step_time_s": time if math.isfinite(time) else None,
        "samples_per_s": prediction.samples_per_s,
        "reserved_bytes": [stage.reserved_bytes for stage in prediction.stages],
        "legal": prediction.legal,
        "fits": prediction.fits,
        "problems": list(prediction.problems),
    }


def lowered_files(lowered: Lowered) -> dict[str, str]:
    """Return all files of an export, the launch command as a script behind the engine's own."""
    head = "#!/usr/bin/env bash\nset -euo pipefail\n"
    # the command names its files without a folder
    home = 'cd "$(dirname "${BASH_SOURCE[0]}")"\n'
    return {**lowered.files, "launch.sh": head + home + lowered.launch}

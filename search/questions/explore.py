"""Exploration: a search for every combination of models, clusters, engines, lengths and batches.

A combination is the command line of one `autopar-search`: the options with one value, and one value
of each option with several. This module builds, searches and ranks combinations.
`search.show.exploration` prints them, and `search.commands.what_if` reads the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autopar.command.dialect import own_names
from autopar.errors import DocumentError, InfeasibleError, InputError, OptionError
from autopar.records import Record
from autopar.run.plan import PUBLISHED_RUNS
from autopar.training.throughput import BILLION
from autopar.units import GIB
from search.request.profiles import named_card
from search.request.request import ROWS, Request, build_request, model_spec

if TYPE_CHECKING:
    from autopar.answer import Price, Priced
    from autopar.exploration import EffectEntry, LeadEntry
    from autopar.rates.accuracy import RunClass
    from search.planning.layered.prediction import SearchResult
    from search.planning.session import Session
    from search.planning.uniform.answer import EngineResult, UniformResult as Launches

AXES = ("model", "seq-length", "hardware", "stack", "site", "global-batch-size", "engine")
"""Search options that may have several values, in the order of combination."""
TRAINED = ("model", "seq-length")
"""Options that define the workload: throughput is not comparable between their values."""
MOST_COMBINATIONS = 1000
"""Maximum number of combinations per command; each takes a tenth of a second or more."""

By = Literal["tokens", "step", "cost"]


# --------------------------------------------------------------------------------------------------
# Combinations of option values.


class Combination(Record):
    """One combination of option values and its search request."""

    words: Mapping[str, str]
    """Typed value of each option in `AXES` that was given."""
    request: Request


def choices(raw: Mapping[str, object]) -> tuple[Combination, ...]:
    """Return every combination of a command line, in the order of the given values.

    raw : option name -> text, bool or list of texts, in the format of `autopar-search`. Options in
        `AXES` are lists of values.

    Raises OptionError: a value is invalid, options contradict each other, or there are too many
    combinations.
    """
    raw = own_names(raw, ROWS)
    common = {name: value for name, value in raw.items() if name not in AXES}
    axes: list[tuple[str, tuple[str, ...]]] = []
    for name in AXES:
        values = raw.get(name)
        if isinstance(values, list) and values:
            axes.append((name, tuple(dict.fromkeys(map(str, values)))))
    count = math.prod(len(values) for _, values in axes)
    if count > MOST_COMBINATIONS:
        raise OptionError(
            f"{count:,} combinations are too many, expected "
            f"{MOST_COMBINATIONS:,} at most. Use fewer "
            + " or ".join(f"--{name}" for name, values in axes if len(values) > 1)
        )
    found = []
    for values in product(*(values for _, values in axes)):
        words = dict(zip((name for name, _ in axes), values, strict=True))
        asked = {
            name: word
            for name, word in words.items()
            if not (name == "stack" and word.lower() == "none")
        }
        found.append(Combination(words=words, request=build_request({**common, **asked})))
    return tuple(found)


def check_values(asked: Iterable[Combination]) -> None:
    """Raise InputError if a value is invalid in every combination.

    An unknown name is an error. A site of another card, or a sequence length that one of two models
    does not support, only excludes a combination.
    """
    from autopar.documents import catalog
    from autopar.rates.card import load_card, parse_hardware
    from autopar.rates.site import load_site
    from autopar.rates.stack import load_stack

    def check_hardware(name: str) -> None:
        if named_card(name):
            load_card(parse_hardware(name)[0])
        elif not Path(name).is_dir():
            catalog.find_hardware(name)

    checks: dict[str, Callable[[str], object]] = {
        "hardware": check_hardware,
        "stack": load_stack,
        "site": load_site,
    }
    models: dict[str | None, list[InputError]] = {}
    usable: set[str | None] = set()
    seen: set[tuple[str, str]] = set()
    for choice in asked:
        inputs = choice.request.inputs
        for name, check in checks.items():
            value = getattr(inputs, name)
            if value is not None and (name, value) not in seen:
                seen.add((name, value))
                check(value)
        # A model is valid if it supports at least one of the sequence lengths.
        key = ("model", f"{inputs.model} {inputs.seq_length}")
        if key not in seen:
            seen.add(key)
            try:
                model_spec(inputs)
            except InputError as error:
                models.setdefault(inputs.model, []).append(error)
            else:
                usable.add(inputs.model)
    for model, errors in models.items():
        if model not in usable:
            raise errors[0]


# --------------------------------------------------------------------------------------------------
# Answers: one search per combination.


class Figures(NamedTuple):
    """Figures of a plan for ranking and tables."""

    num_gpus: int
    global_batch: int
    tokens_per_sample: int
    step_time_s: float
    step_time_interval_s: tuple[float, float] | None
    tokens_per_s_per_gpu: float
    interval_tokens_per_s_per_gpu: tuple[float, float] | None
    mfu: float | None
    """Model FLOP utilisation, 0 to 1; None if the peak of the hardware is unknown."""
    reserved_bytes: int
    budget_bytes: int
    """Memory budget of the peak stage, bytes."""
    cost_per_mtoken: float | None
    """Cost of a million tokens in the currency of `--price`; None without a price of the
    hardware."""


class CombinationResult(Record, eq=False):
    """Result of the search of one combination."""

    choice: Combination
    status: Literal["found", "no plan", "not tried"]
    reason: str = ""
    """Reason why there is no plan or no search; the optimality gap if a search ended early."""
    request: Request | None = None
    """Request that was searched, with the engine that was chosen."""
    session: Session | None = None
    result: SearchResult | None = None
    """Result of the search of per-layer plans; None if a uniform plan is the answer."""
    launches: Launches | None = None
    """Result of the search of uniform plans; None if a per-layer plan is the answer."""
    priced: Priced | None = None
    """Fastest plan; None if there is none."""
    figures: Figures | None = None
    notices: tuple[str, ...] = ()
    error: InputError | None = None
    """Error that prevented the search; None if there was none."""

    @property
    def launch(self) -> EngineResult | None:
        """Result of the engine with the fastest uniform plan; None if there is no such plan."""
        return None if self.launches is None else self.launches.best

    @property
    def engine(self) -> str | None:
        """Name of the engine of the plan; None if the plan is not specific to an engine."""
        if self.launch is not None:
            return self.launch.engine.name
        return None if self.request is None else self.request.engine

    @property
    def estimated(self) -> bool:
        """True if some input was not measured."""
        return self.launch is not None or (self.result is not None and self.result.estimated)

    @property
    def synthetic(self) -> bool:
        """True if timings are synthetic and describe no machine."""
        return self.result is not None and self.result.synthetic

    @property
    def runs(self) -> RunClass | None:
        """Published runs that the 90 % interval is based on; None if it has another basis."""
        if self.launch is not None:
            assert self.launch.best is not None, "it is the fastest"
            return self.launch.best.assessment.runs
        prediction = self.result.prediction if self.result is not None else None
        if prediction is None or PUBLISHED_RUNS not in prediction.interval_of:
            return None
        from autopar.rates.accuracy import class_of_sources

        session = self.session
        assert session is not None, "it has the prediction"
        experts = any(layer.num_experts is not None for layer in session.spec.layers)
        sources = (*session.profile.sources, *session.hardware.sources)
        return class_of_sources(sources, experts=experts)

    @property
    def defaults_used(self) -> tuple[str, ...]:
        """Options that were not given, with their defaults."""
        if self.launches is not None:
            return self.launches.question.assumed
        return () if self.result is None else self.result.defaults_used

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the inputs of the search."""
        return () if self.result is None else self.result.notes


class ProfileCache:
    """Cache of profiles that combinations share."""

    def __init__(self) -> None:
        self._made: dict[object, Any] = {}

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """Return the cached result of `make` for a key; errors are not cached."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def search_one(
    choice: Combination,
    parts: ProfileCache,
    *,
    alternatives: bool = False,
    prices: Mapping[str, float] | None = None,
) -> CombinationResult:
    """Return the result of the search of one combination, as with `autopar-search`.

    Errors and infeasible combinations are results, too; they are not raised.

    parts : cache of profiles that combinations share.
    alternatives : True to search alternative plans too, which doubles the time.
    prices : price of a GPU-hour by typed hardware or by card.
    """
    from search.planning.choose import completed, solve

    notices: tuple[str, ...] = ()
    try:
        asked, notices = completed(choice.request)
        solved = solve(asked, alternatives=alternatives, once=parts.once)
    except InputError as error:
        return CombinationResult(
            choice=choice, status="not tried", reason=_reason(error), error=error
        )
    except InfeasibleError as error:
        return CombinationResult(choice=choice, status="no plan", reason=str(error))
    if solved.per_layer is None:
        assert solved.found.launches is not None, "a uniform plan is the answer"
        return _launched(choice, solved.found.launches, notices, prices or {})
    request, (session, result) = solved.found.request, solved.per_layer
    notices += session.notices
    if result.plan is None or result.prediction is None:
        return CombinationResult(
            choice=choice,
            status="no plan",
            reason=_why_none(session, result),
            request=request,
            session=session,
            result=result,
            notices=notices,
        )
    return CombinationResult(
        choice=choice,
        status="found",
        reason="" if result.status == "optimal" else _early(result.gap),
        request=request,
        session=session,
        result=result,
        priced=(priced := session.priced(result.plan, result.prediction)),
        figures=_figures(priced.price, request.inputs.hardware, prices or {}),
        notices=notices,
    )


def _launched(
    choice: Combination,
    found: Launches,
    notices: tuple[str, ...],
    prices: Mapping[str, float],
) -> CombinationResult:
    """Return the answer of a combination from the result of its uniform search."""
    from search.planning.uniform.summary import priced_of

    best = found.best
    if best is None:
        return CombinationResult(
            choice=choice,
            status="no plan",
            reason=found.why_none,
            launches=found,
            notices=notices,
        )
    assert best.solved is not None, "it was searched"
    priced = priced_of(found, best)
    return CombinationResult(
        choice=choice,
        status="found",
        reason="" if best.solved.complete else _early(best.solved.gap),
        request=choice.request,
        launches=found,
        priced=priced,
        figures=_figures(priced.price, choice.request.inputs.hardware, prices),
        notices=notices,
    )


def _early(gap: float) -> str:
    """Return a sentence with the gap of a search that its time limit ended."""
    if not math.isfinite(gap):
        return "stopped early: how far below the best is unknown"
    return f"stopped early: at most {gap * 100:.3g} % below the best"


def _reason(error: InputError) -> str:
    """Return the problem without folder and remedy, which apply to a single search only."""
    if isinstance(error, DocumentError):
        return f"{Path(error.path).name}: {error.problem}"
    return str(error)


def _why_none(session: Session, result: SearchResult) -> str:
    found = result.infeasibility
    if found is None:
        limit = session.options.time_limit_s
        return f"no plan was found within --time-limit {limit:g}"
    if found.smallest_budget_bytes <= 0:
        return found.reason
    budget = session.options.memory_constraint_bytes / GIB
    # Rounded up, so that a budget of the printed size is sufficient.
    need = math.ceil(found.smallest_budget_bytes / GIB * 100) / 100
    return f"no plan fits in {budget:.4g} GiB per GPU, the smallest needs {need:.2f}"


def price_of(hardware: str | None, prices: Mapping[str, float]) -> float | None:
    """Return the price of a GPU-hour for typed hardware, or for its card; None if not given."""
    name = hardware or ""
    return prices.get(name, prices.get(name.rpartition(":")[0]))


def _figures(price: Price, hardware: str | None, prices: Mapping[str, float]) -> Figures:
    """Return the figures of a plan.

    prices : price of a GPU-hour by typed hardware or by card
    """
    found, full, hour = price.throughput, price.fullest, price_of(hardware, prices)
    assert found is not None, "a searched plan has a step time"
    speed, ends = found.tokens_per_s, found.ends
    low, high = full.reserved_bytes
    return Figures(
        num_gpus=found.gpus,
        global_batch=price.global_batch,
        tokens_per_sample=round(found.tokens / price.global_batch),
        step_time_s=found.step_s,
        step_time_interval_s=found.interval_s,
        tokens_per_s_per_gpu=speed,
        interval_tokens_per_s_per_gpu=None if ends is None else (speed * ends[0], speed * ends[1]),
        mfu=found.mfu,
        # If reserved memory is an interval, the peak allocated memory is reported instead.
        reserved_bytes=round(high if low == high else full.peak_bytes),
        budget_bytes=round(full.budget_bytes),
        cost_per_mtoken=None if hour is None else found.cost(hour) / (BILLION / 1e6),
    )


# --------------------------------------------------------------------------------------------------
# Ranking and its explanation.


def value_of(figures: Figures, by: By) -> float:
    """Return the ranked value, lower is better: GPU-seconds per token, step seconds or cost."""
    if by == "cost":
        assert figures.cost_per_mtoken is not None, "the command asks for every price"
        return figures.cost_per_mtoken
    return figures.step_time_s if by == "step" else 1.0 / figures.tokens_per_s_per_gpu


def _ends(figures: Figures, by: By) -> tuple[float, float] | None:
    """Return the ranked value at both ends of the step time interval; None without interval."""
    interval = figures.step_time_interval_s
    if interval is None:
        return None
    # Each of the three values is proportional to the step time.
    scale = value_of(figures, by) / figures.step_time_s
    return interval[0] * scale, interval[1] * scale


class ComparableGroup(Record):
    """Comparable answers: those for one model and one sequence length."""

    trained: Mapping[str, str]
    """Typed value of each option in `TRAINED`."""
    ranked: tuple[CombinationResult, ...]
    """Answers with a plan, best first; equal ones in the order of the command line."""
    left: tuple[CombinationResult, ...]
    """Answers without a plan, in the order of the command line."""


def grouped(answers: Sequence[CombinationResult], by: By) -> tuple[ComparableGroup, ...]:
    """Return the answers grouped by model and sequence length, in the order of the command line."""
    of: dict[tuple[tuple[str, str], ...], list[CombinationResult]] = {}
    for answer in answers:
        words = answer.choice.words
        key = tuple((name, words[name]) for name in TRAINED if name in words)
        of.setdefault(key, []).append(answer)

    def order(answer: CombinationResult) -> float:
        assert answer.figures is not None
        return value_of(answer.figures, by)

    return tuple(
        ComparableGroup(
            trained=dict(key),
            ranked=tuple(sorted((a for a in own if a.figures is not None), key=order)),
            left=tuple(a for a in own if a.figures is None),
        )
        for key, own in of.items()
    )


def leads(group: ComparableGroup, by: By) -> tuple[LeadEntry, ...]:
    """Return the lead of the best answer over the second, and over the best on other hardware.

    The second answer may run on the same hardware with another engine; the best one on other
    hardware is the alternative for a purchase.
    """
    if len(group.ranked) < 2:
        return ()
    own = group.ranked[0].choice.words["hardware"]
    other = (p for p, a in enumerate(group.ranked) if a.choice.words["hardware"] != own)
    places = sorted({1, next(other, 1)})
    return tuple(_lead(group.ranked[0], group.ranked[place], place + 1, by) for place in places)


def _lead(first: CombinationResult, second: CombinationResult, place: int, by: By) -> LeadEntry:
    from autopar.exploration import LeadEntry
    from autopar.rates.accuracy import probability_faster

    assert first.figures is not None
    assert second.figures is not None
    one, other = value_of(first.figures, by), value_of(second.figures, by)
    runs, overlap = _shared_class(first, second), None
    ends = _ends(first.figures, by), _ends(second.figures, by)
    if runs is None and ends[0] is not None and ends[1] is not None:
        overlap = ends[0][1] >= ends[1][0]
    return LeadEntry(
        over=place,
        ratio=other / one,
        intervals_overlap=overlap,
        probability_faster=(
            None if runs is None else probability_faster(one, other, runs.plan_spread)
        ),
    )


def _shared_class(first: CombinationResult, second: CombinationResult) -> RunClass | None:
    """Return the published runs that both estimates are based on, if only the plans differ.

    None for different clusters or engines, whose estimation errors do not cancel.
    """
    words, others = first.choice.words, second.choice.words
    if any(words[name] != others[name] for name in words if name != "global-batch-size"):
        return None
    if first.engine != second.engine or (first.launch is None) != (second.launch is None):
        return None
    return first.runs


def effects(answers: Sequence[CombinationResult], by: By) -> tuple[EffectEntry, ...]:
    """Return the effect of each varied option outside `TRAINED`, largest first.

    The ratio of an effect is the geometric mean of worst over best with all else equal.
    """
    from autopar.exploration import EffectEntry

    found = []
    for option in AXES:
        if option in TRAINED:
            continue
        alike: dict[tuple[str, ...], list[CombinationResult]] = {}
        for answer in answers:
            words = answer.choice.words
            if answer.figures is not None and option in words:
                rest = tuple(word for name, word in words.items() if name != option)
                alike.setdefault(rest, []).append(answer)
        sets = [
            sorted((value_of(a.figures, by), a.choice.words[option]) for a in own if a.figures)
            for own in alike.values()
            if len(own) > 1
        ]
        if not sets:
            continue
        best = [own[0][1] for own in sets]
        winner = max(dict.fromkeys(best), key=best.count)
        logs = [math.log(own[-1][0] / own[0][0]) for own in sets]
        found.append(
            EffectEntry(
                option=option,
                ratio=math.exp(math.fsum(logs) / len(logs)),
                comparisons=len(sets),
                best=winner,
                wins=best.count(winner),
            )
        )
    return tuple(sorted(found, key=lambda effect: -effect.ratio))

"""What if: every combination of models, clusters, trainers, lengths and batches, each searched.

A combination is the command line of one `autopar-search`: its words are those that were given once
and one of each option that was given several times. Here combinations are made, searched and put
in order. What is printed is in `search.show.what_if`, options are read in
`search.commands.what_if`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from autopar.command.dialect import own_names
from autopar.errors import DocumentError, InfeasibleError, InputError, OptionError
from autopar.records import Record, replace
from autopar.run.plan import PUBLISHED_RUNS
from autopar.training.throughput import BILLION, Throughput
from autopar.units import GIB
from search.request.profiles import named_card
from search.request.request import ROWS, Request, build_request, model_spec

if TYPE_CHECKING:
    from autopar.exploration import EffectEntry, LeadEntry
    from autopar.rates.accuracy import RunClass
    from search.planning.layered.prediction import SearchResult
    from search.planning.question import Session
    from search.planning.route import Both
    from search.planning.uniform.answer import Answer as Launches, EngineAnswer

AXES = ("model", "seq-length", "hardware", "stack", "site", "global-batch-size", "engine")
"""Options of a search of which every value is a choice, in the order in which they are combined."""
TRAINED = ("model", "seq-length")
"""What is trained: tokens of another model, or of other lengths, are another work."""
MOST_COMBINATIONS = 1000
"""Of one command; each takes a tenth of a second and more."""

By = Literal["tokens", "step", "cost"]


# --------------------------------------------------------------------------------------------------
# What is asked: combinations of words.


class Choice(Record):
    """One combination, as words and as the request that they are."""

    words: Mapping[str, str]
    """Option of `AXES` -> what was typed; those that were not given are missing."""
    request: Request


def choices(raw: Mapping[str, object]) -> tuple[Choice, ...]:
    """Return every combination of a command line, in the order in which its values were given.

    Parameters
    ----------
    raw : option name -> text, bool or list of texts, as `autopar-search` takes them, but options
        of `AXES` are lists of such texts.

    Raises
    ------
    OptionError: a value is unusable, two options contradict each other, or there are too many.
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
            f"there are {count:,} combinations, expected {MOST_COMBINATIONS:,} at most; give fewer "
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
        found.append(Choice(words=words, request=build_request({**common, **asked})))
    return tuple(found)


def check_values(asked: Iterable[Choice]) -> None:
    """Raise InputError where a value is unusable by itself, whatever it is combined with.

    A name that nobody knows is a mistake; a site of another device, or a length that one of two
    models does not have, only leaves a combination out.
    """
    from autopar import rates as estimate
    from autopar.documents import catalog
    from autopar.rates.site import load_site
    from autopar.rates.stack import load_stack

    def check_hardware(name: str) -> None:
        if named_card(name):
            estimate.load_card(estimate.parse_hardware(name)[0])
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
        # a model is usable where one of the lengths is
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
# What is answered: one search for each.


class Figures(NamedTuple):
    """What a plan is compared by; rates are of all samples of a step in a step's time."""

    num_gpus: int
    global_batch: int
    tokens_per_sample: int
    step_time_s: float
    step_time_interval_s: tuple[float, float] | None
    tokens_per_s_per_gpu: float
    interval_tokens_per_s_per_gpu: tuple[float, float] | None
    mfu: float | None
    """FLOP of the model over what the card's peak does in a step; None off cards."""
    reserved_bytes: int
    budget_bytes: int
    """Of the fullest stage."""
    cost_per_mtoken: float | None
    """Price of a million tokens, None without a price of the hardware."""


class Answer(Record, eq=False):
    """What became of a combination."""

    choice: Choice
    status: Literal["found", "no plan", "not tried"]
    reason: str = ""
    """Why there is no plan, or why nobody searched for one; of a plan that a limit of time cut
    short, how far it may be from the best."""
    request: Request | None = None
    """Of `--engine` the one that was searched in the end."""
    session: Session | None = None
    result: SearchResult | None = None
    """Of plans whose layers may differ."""
    launches: Launches | None = None
    """Where a launch of a trainer answers: what `autopar-search` shows of it."""
    figures: Figures | None = None
    notices: tuple[str, ...] = ()
    error: InputError | None = None
    """Why it was not tried, as it was raised."""

    @property
    def launch(self) -> EngineAnswer | None:
        """The trainer with the fastest launch; None where a plan answers, or nothing does."""
        return None if self.launches is None else self.launches.best

    @property
    def engine(self) -> str | None:
        """Whose launch or plan it is; None: whatever runs it."""
        if self.launch is not None:
            return self.launch.engine.name
        return None if self.request is None else self.request.engine

    @property
    def estimated(self) -> bool:
        """Whether some input was not measured."""
        return self.launch is not None or (self.result is not None and self.result.estimated)

    @property
    def synthetic(self) -> bool:
        """Whether timings are of no machine."""
        return self.result is not None and self.result.synthetic

    @property
    def runs(self) -> RunClass | None:
        """The published runs that its interval is of, None where it is of something else."""
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
        """What nobody gave, and what was taken."""
        if self.launches is not None:
            return self.launches.question.assumed
        return () if self.result is None else self.result.defaults_used

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth a word about its inputs."""
        return () if self.result is None else self.result.notes


class Parts:
    """Profiles that questions have in common, each made once."""

    def __init__(self) -> None:
        self._made: dict[object, Any] = {}

    def once(self, key: object, make: Callable[[], Any]) -> Any:
        """Return what `make` returned for this key; what it raises is not kept."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def search_one(
    choice: Choice,
    parts: Parts,
    *,
    alternatives: bool = False,
    prices: Mapping[str, float] | None = None,
) -> Answer:
    """Return the answer of one combination: the search that `autopar-search` does with its words.

    Parameters
    ----------
    parts : profiles that combinations share.
    alternatives : whether plans of other kinds are looked for, which takes as long again.
    prices : of a GPU hour, by hardware as typed or by card.
    """
    from search.planning.question import open_session

    request, notices = choice.request, tuple[str, ...]()
    try:
        from search.planning.route import with_site

        request, notices = with_site(request)
        request, both = _routed(request)
        if both is not None and not both.layers_differ:
            return _launched(choice, both.answer, notices, prices or {})
        session = open_session(request.inputs, request.options, request.given, once=parts.once)
        result = session.solve() if alternatives else session.planner.solve(top=0)
    except InputError as error:
        return Answer(choice=choice, status="not tried", reason=_reason(error), error=error)
    except InfeasibleError as error:
        return Answer(choice=choice, status="no plan", reason=str(error))
    result = replace(result, defaults_used=session.defaults + result.defaults_used)
    notices += session.notices
    if result.plan is None or result.prediction is None:
        return Answer(
            choice=choice,
            status="no plan",
            reason=_why_none(session, result),
            request=request,
            session=session,
            result=result,
            notices=notices,
        )
    full = max(result.prediction.stages, key=lambda s: s.reserved_bytes / max(s.budget_bytes, 1))
    return Answer(
        choice=choice,
        status="found",
        reason="" if result.status == "optimal" else _early(result.gap),
        request=request,
        session=session,
        result=result,
        figures=_figures(
            session.throughput(result.plan, result.prediction),
            price_of(request.inputs.hardware, prices or {}),
            global_batch=result.plan.global_batch,
            tokens_per_sample=session.tokens_per_sample,
            reserved_bytes=full.reserved_bytes,
            budget_bytes=full.budget_bytes,
        ),
        notices=notices,
    )


def _routed(request: Request) -> tuple[Request, Both | None]:
    """Return the request of the plans that answer, and what launches and plans have together.

    As `autopar-search` has it: without the second plans whose layers may differ answer alone.
    """
    from search.planning.best_plan import choose, choose_any
    from search.planning.route import best_of_both, route_of, with_rules

    route = route_of(request)
    if route.launches is not None:
        both = best_of_both(request, route)
        return (both.part.request if both.part is not None else request), both
    request = with_rules(request, route.reason)
    if not route.layered:
        return replace(request, engine=None), None
    if len(route.layered) == 1:
        return choose(request).request, None
    return choose_any(request, route.layered).request, None


def _launched(
    choice: Choice,
    found: Launches,
    notices: tuple[str, ...],
    prices: Mapping[str, float],
) -> Answer:
    """Return the answer of a combination that a launch answers, or that has none."""
    best = found.best
    if best is None:
        return Answer(
            choice=choice,
            status="no plan",
            reason=_why_no_launch(found),
            launches=found,
            notices=notices,
        )
    assert best.best is not None, "it is the fastest"
    assert best.solved is not None, "it was searched"
    assessment, job = best.best.assessment, found.question.job
    return Answer(
        choice=choice,
        status="found",
        reason="" if best.solved.complete else _early(best.solved.gap),
        request=choice.request,
        launches=found,
        figures=_figures(
            assessment.throughput,
            price_of(choice.request.inputs.hardware, prices),
            global_batch=best.best.choice.global_batch,
            tokens_per_sample=job.seq,
            reserved_bytes=round(assessment.fullest.peak_bytes),
            budget_bytes=round(best.target.capacity_bytes),
        ),
        notices=notices,
    )


def _early(gap: float) -> str:
    """Return how far a search that its time limit ended may be from the best."""
    if not math.isfinite(gap):
        return "stopped early: how far below the best is unknown"
    return f"stopped early: at most {gap * 100:.3g} % below the best"


def _why_no_launch(found: Launches) -> str:
    """Return why no launch fits: of several trainers the one that lacks least says it."""

    def missing(one: EngineAnswer) -> float:
        shortage = None if one.solved is None else one.solved.shortage
        return math.inf if shortage is None else shortage.missing_bytes

    nearest = min(found.engines, key=missing)
    return nearest.reason if len(found.engines) == 1 else f"{nearest.engine.name}: {nearest.reason}"


def _reason(error: InputError) -> str:
    """Return what is wrong without the folder and the remedy, which is that of a single search."""
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
    # rounded up, so that the number shown does work
    need = math.ceil(found.smallest_budget_bytes / GIB * 100) / 100
    return f"no plan fits in {budget:.4g} GiB per GPU, the smallest needs {need:.2f}"


def price_of(hardware: str | None, prices: Mapping[str, float]) -> float | None:
    """Return the price of a GPU hour of hardware as typed: its own, else that of its card."""
    name = hardware or ""
    return prices.get(name, prices.get(name.rpartition(":")[0]))


def _figures(
    found: Throughput | None,
    price: float | None,
    *,
    global_batch: int,
    tokens_per_sample: int,
    reserved_bytes: int,
    budget_bytes: int,
) -> Figures:
    """Return the figures of a plan or launch; `price` is that of a GPU hour."""
    assert found is not None, "what was searched has a step time"
    speed, ends = found.tokens_per_s, found.ends
    return Figures(
        num_gpus=found.gpus,
        global_batch=global_batch,
        tokens_per_sample=tokens_per_sample,
        step_time_s=found.step_s,
        step_time_interval_s=found.interval_s,
        tokens_per_s_per_gpu=speed,
        interval_tokens_per_s_per_gpu=None if ends is None else (speed * ends[0], speed * ends[1]),
        mfu=found.mfu,
        reserved_bytes=reserved_bytes,
        budget_bytes=budget_bytes,
        cost_per_mtoken=None if price is None else found.cost(price) / (BILLION / 1e6),
    )


# --------------------------------------------------------------------------------------------------
# In which order, and what follows.


def value_of(figures: Figures, by: By) -> float:
    """Return what is compared, the less the better: seconds of a GPU or step, or the price."""
    if by == "cost":
        assert figures.cost_per_mtoken is not None, "the command asks for every price"
        return figures.cost_per_mtoken
    return figures.step_time_s if by == "step" else 1.0 / figures.tokens_per_s_per_gpu


def _ends(figures: Figures, by: By) -> tuple[float, float] | None:
    """Return the same at both ends of the interval of its step time."""
    interval = figures.step_time_interval_s
    if interval is None:
        return None
    # each of the three is proportional to the time of a step
    scale = value_of(figures, by) / figures.step_time_s
    return interval[0] * scale, interval[1] * scale


class Group(Record):
    """Answers for one model at one length, which can be compared."""

    trained: Mapping[str, str]
    """Words of `TRAINED`."""
    ranked: tuple[Answer, ...]
    """The best first; of equals that which was asked first."""
    left: tuple[Answer, ...]
    """Those without a plan, in the order in which they were asked."""


def grouped(answers: Sequence[Answer], by: By) -> tuple[Group, ...]:
    """Return the answers by what is trained, in the order in which that was asked."""
    of: dict[tuple[tuple[str, str], ...], list[Answer]] = {}
    for answer in answers:
        words = answer.choice.words
        key = tuple((name, words[name]) for name in TRAINED if name in words)
        of.setdefault(key, []).append(answer)

    def order(answer: Answer) -> float:
        assert answer.figures is not None
        return value_of(answer.figures, by)

    return tuple(
        Group(
            trained=dict(key),
            ranked=tuple(sorted((a for a in own if a.figures is not None), key=order)),
            left=tuple(a for a in own if a.figures is None),
        )
        for key, own in of.items()
    )


def leads(group: Group, by: By) -> tuple[LeadEntry, ...]:
    """Return how the first of a group compares with the second, and with the first elsewhere.

    Elsewhere is other hardware, which is another purchase; the second may be another trainer there.
    """
    if len(group.ranked) < 2:
        return ()
    own = group.ranked[0].choice.words["hardware"]
    other = (p for p, a in enumerate(group.ranked) if a.choice.words["hardware"] != own)
    places = sorted({1, next(other, 1)})
    return tuple(_lead(group.ranked[0], group.ranked[place], place + 1, by) for place in places)


def _lead(first: Answer, second: Answer, place: int, by: By) -> LeadEntry:
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


def _shared_class(first: Answer, second: Answer) -> RunClass | None:
    """Return the published runs of two estimates that differ in the plan alone, else None.

    Of another cluster or trainer the errors do not cancel.
    """
    words, others = first.choice.words, second.choice.words
    if any(words[name] != others[name] for name in words if name != "global-batch-size"):
        return None
    if first.engine != second.engine or (first.launch is None) != (second.launch is None):
        return None
    return first.runs


def effects(answers: Sequence[Answer], by: By) -> tuple[EffectEntry, ...]:
    """Return the effects of the options that were varied, but what is trained; largest first."""
    from autopar.exploration import EffectEntry

    found = []
    for option in AXES:
        if option in TRAINED:
            continue
        alike: dict[tuple[str, ...], list[Answer]] = {}
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

"""A fast plan whose layers may differ that an engine runs as it is, or that of several engines.

An engine with one tensor and one context degree for the whole model, embedding and head included,
runs few of all plans. Its space is the union of smaller ones, one for each pair of degrees and kind
of data parallelism, each given by options that anybody could type. Every one is searched exactly
and its plan is handed to the exporter; where that loses something, the alternatives of the search
are tried, and the first that loses nothing narrows the part to its stages and recomputed layers.
The fastest of what the parts give is taken. A part whose best plan is lossy may hold a faster
lossless plan than its alternatives: the answer is the best of the parts, no bound of the engine's
whole space. Which requests are answered so, and which by launches, is `search.planning.choose`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, cast

from autopar.answer import EngineBest
from autopar.command.fields import words_of
from autopar.errors import InfeasibleError, InputError
from autopar.records import Record, replace
from autopar.run.plan import Plan
from autopar.run.runtime import Engine
from autopar.units import GIB, divisors
from search.engines.plans import Job, Part, Space, lower_for, space_of
from search.engines.table import ALIKE, EXPORTERS
from search.planning.layered.prediction import SearchResult
from search.planning.layered.summary import one_line
from search.planning.question import Session, open_session
from search.planning.space import context_degrees
from search.request.options import SearchOptions, Shares
from search.request.profiles import named_card
from search.request.request import ROWS, Once, Request, extended, fill_options, with_places

if TYPE_CHECKING:
    from search.planning.uniform.answer import Answer

_ALTERNATIVES = 5
"""How many plans of another kind are looked at where the best of a part loses something."""
_REASON_LENGTH = 160
_LEAST_S = 1e-3
"""Of a search that begins when time is up: it takes a plan where the first look has one."""


class NoPlanError(InfeasibleError):
    """An engine runs no plan of a search as it is."""

    def __init__(self, engine: str, reasons: Sequence[tuple[str, int]], tried: int) -> None:
        """Keep the reasons with their numbers of parts, the first one alone, too."""
        self.why = reasons[0][0]
        shown = "; ".join(
            f"{why} ({count} of {tried}{'' if at else ' parts of its space'})"
            for at, (why, count) in enumerate(reasons)
        )
        super().__init__(
            f"{engine} runs no plan of this search as it is: {shown}; search with --engine none "
            "and let autopar-export --allow-approx take the nearest plan"
        )


class Chosen(Record):
    """The plans that answer a request."""

    request: Request
    """Whose search finds the per-layer plan, where one answers."""
    launches: Answer | None = None
    """Uniform plans, the fastest first; None: a per-layer plan answers."""
    lines: tuple[EngineBest, ...] = ()
    """Best plan of each engine, the fastest first; none where one engine was asked."""
    result: SearchResult | None = None
    """The per-layer plan as it was found, without alternatives; None: it was not searched."""
    notices: tuple[str, ...] = ()
    why: str = ""
    """Why a per-layer plan answers where one may have expected a uniform one."""

    @property
    def layers_differ(self) -> bool:
        """True if the answer is a per-layer plan: faster by more than the two prices differ by."""
        if self.launches is None:
            return True
        best = self.launches.fastest
        plan = next((line for line in self.lines if line.plan is not None), None)
        if plan is None or plan.samples_per_s is None:
            return False
        if best is None:
            return True
        return plan.samples_per_s / best.samples_per_s - 1.0 > ALIKE


class _Found(Record):
    """A plan without losses: its speed as the engine runs it, and the search that finds it."""

    samples_per_s: float
    plan: Plan
    request: Request
    result: SearchResult


class _Sessions:
    """The inputs of a command line, with and without sequence parallelism, and what time is left.

    Memory is estimated or measured for one of them; the other needs inputs of its own.
    """

    def __init__(self, request: Request, once: Once = lambda key, make: make()) -> None:
        self._request = request
        self._once = once
        self._opened: dict[bool, Session] = {}
        self.seconds: float | None = request.options.time_limit_s
        """Of each search from now on."""

    def of(self, options: SearchOptions) -> Session:
        """Return the session that answers options; InputError where nothing was measured so."""
        key = options.sequence_parallel
        if key not in self._opened:
            asked, own = self._request, replace(self._request.options, sequence_parallel=key)
            given = {*asked.given, "sequence-parallel"}
            self._opened[key] = open_session(asked.inputs, own, given, once=self._once)
        return self._opened[key]


def choose(request: Request) -> Chosen:
    """Return the request whose search finds the fastest of the best plans of an engine's parts.

    What the request says itself is never changed: where that leaves its engine nothing, it is said.

    Raises InfeasibleError: no plan that the engine runs fits; InputError: the request has no plan
    for any engine, such as pins that no search has.
    """
    assert request.engine not in (None, "any", "none"), "without one there is nothing to choose"
    engine = cast(Engine, request.engine)
    request = as_engine(request, engine)
    if not space_of(engine).parts:  # runs every plan
        return Chosen(request=request)
    best, tried = _best_part(request, engine, _Sessions(request))
    notice = (
        f"{engine}: of {tried} searches the fastest plan without losses, "
        f"{best.samples_per_s:.5g} samples/s, is that of {_typed(request, best.request)}"
    )
    return Chosen(request=best.request, notices=(notice,), result=best.result)


def choose_any(
    request: Request,
    engines: Sequence[Engine] = cast(tuple[Engine, ...], EXPORTERS),
    shares: Shares | None = None,
) -> Chosen:
    """Return the request that finds the fastest plan of engines, and each one's own fastest.

    Engines come from the fastest to those without a plan; where none has one, the request is as it
    was. shares : of the time of several searches, of which each engine is one.
    """
    shares = shares or Shares(request.options.time_limit_s, len(engines))
    made: dict[object, Any] = {}

    def once(key: object, make: Callable[[], Any]) -> Any:
        # engines have cluster and model in common unless their software differs
        if key not in made:
            made[key] = make()
        return made[key]

    lines: list[EngineBest] = []
    best: _Found | None = None
    chosen: Engine | None = None
    for engine in engines:
        asked = as_engine(request, engine)
        sessions = _Sessions(asked, once)
        sessions.seconds = shares.following()
        try:
            if space_of(engine).parts:
                found, _ = _best_part(asked, engine, sessions)
            else:
                found = _whole_space(asked, sessions)
        except (InputError, InfeasibleError) as refused:
            why = refused.why if isinstance(refused, NoPlanError) else _short(refused)
            lines.append(EngineBest(engine=engine, samples_per_s=None, reason=why))
            continue
        lines.append(
            EngineBest(
                engine=engine,
                samples_per_s=found.samples_per_s,
                plan=found.plan,
                words=one_line(found.plan),
                options=_typed(request, found.request),
            )
        )
        if best is None or found.samples_per_s > best.samples_per_s:
            best, chosen = found, engine
    # equally fast ones stay in the order of EXPORTERS
    lines.sort(key=lambda line: -(line.samples_per_s or 0.0))
    if best is None:
        return Chosen(request=replace(request, engine=None), lines=tuple(lines))
    asked = replace(best.request, engine=chosen)
    return Chosen(request=asked, lines=tuple(lines), result=best.result)


def _whole_space(request: Request, sessions: _Sessions) -> _Found:
    """Return the best plan of an engine that runs every one; InfeasibleError where none fits."""
    _, result = _solved(sessions, request)
    if result.plan is None or result.prediction is None:
        raise InfeasibleError(_why_none(result) + _needed(result))
    return _Found(
        samples_per_s=result.prediction.samples_per_s,
        plan=result.plan,
        request=request,
        result=result,
    )


def _needed(result: SearchResult) -> str:
    """Return what the smallest plan needs, where a budget helps."""
    why = result.infeasibility
    if why is None or why.smallest_budget_bytes <= 0:
        return ""
    # rounded up, so that the number shown does work
    return f", its smallest plan needs {math.ceil(why.smallest_budget_bytes / GIB * 100) / 100} GiB"


def _why_none(result: SearchResult) -> str:
    """Return why a search has no plan."""
    why = result.infeasibility
    if why is None:
        return "nothing was found before the time limit"
    # 0: no amount of memory would help
    return "the degree is not legal" if why.smallest_budget_bytes == 0 else "nothing fits"


def _best_part(request: Request, engine: Engine, sessions: _Sessions) -> tuple[_Found, int]:
    """Return the fastest plan of the parts of an engine's space, and how many were searched.

    Errors as `choose`.
    """
    space = space_of(engine)
    session = sessions.of(request.options)
    best: _Found | None = None
    reasons: dict[str, int] = {}
    refused: set[str] = set()
    tried: list[Mapping[str, object]] = []
    degrees: tuple[int | None, ...] = (None,)
    if space.one_degree:
        most = session.options.max_tp_deg
        degrees = tuple(d for d in divisors(session.hardware.world_size) if d <= most)
    every = list(product(space.parts, degrees, _contexts(session, space)))
    shares = Shares(sessions.seconds, len(every))
    for (changes, rules), degree, context in every:
        sessions.seconds = shares.following()
        part = _added(request, changes, rules, degree, context, space)
        if part.given in tried:  # what was typed leaves no difference between two parts
            continue
        tried.append(part.given)
        try:
            found = _fastest(sessions, part, engine, best.samples_per_s if best else 0.0)
        except InputError as error:  # such as measured tables without what the part needs
            found = _short(error)
            refused.add(found)
        if isinstance(found, str):
            reasons[found] = reasons.get(found, 0) + 1
        elif best is None or found.samples_per_s > best.samples_per_s:
            best = found
    if best is None:
        if refused:
            session.planner.solve()  # raises what is wrong without our additions too
        # the engine's before those of our own options, the commonest first: it may be shown alone
        often = sorted(reasons.items(), key=lambda reason: (reason[0] in refused, -reason[1]))
        raise NoPlanError(engine, often, len(tried))
    return best, len(tried)


def as_engine(request: Request, engine: Engine) -> Request:
    """Return a request whose plans are priced as an engine runs them: software and memory.

    What was typed stays. Measured times are of the software that they were measured with.
    """
    space = space_of(engine)
    changes: dict[str, object] = {**space.priced, "memory_of": engine}
    inputs = request.inputs
    if space.stack is not None and inputs.time_profiling_path is None:
        measured = with_places(inputs, request.options)[1].times is not None
        estimated = inputs.uses_default_hardware or named_card(inputs.hardware) is not None
        if estimated and not measured:
            changes["stack"] = space.stack
    return extended(request, changes)


def _short(error: InputError | InfeasibleError) -> str:
    """Return the problem of an error, without its remedy: options that nobody typed."""
    text = error.short
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 3] + "..."


def _contexts(session: Session, space: Space) -> list[int]:
    """Return the context degrees of an engine's parts."""
    if not space.context:
        return [1]
    tokens = min(layer.seq_length for layer in session.spec.layers)
    return context_degrees(session.options, divisors(session.hardware.world_size), tokens)


def _added(
    request: Request,
    part: Part,
    rules: str,
    degree: int | None,
    context: int,
    space: Space,
) -> Request:
    """Return a request with the options of a part where it does not have them itself."""
    changes: Part = {**part}
    if context == 1:
        changes["disable_cp"] = True
    else:
        rules = ",".join((*filter(None, [rules]), f"cp={context},vcp={context}"))
        if space.gathers:
            changes["cp_kind"] = "all-gather"
    if degree is not None and degree > 1 and space.whole_sequences:
        changes["sequence_parallel"] = False
    pins = [f"tp={degree},vtp={degree}"] if degree is not None else []
    pins += [rules] if rules else []
    if pins:
        changes["pin"] = (",".join(pins),)
    return extended(request, changes)


def _fastest(sessions: _Sessions, request: Request, engine: Engine, floor: float) -> _Found | str:
    """Return the plan without losses of a part, or why there is none.

    floor : samples per second of what is known already; slower alternatives are not looked at.
    """
    options, result = _solved(sessions, request)
    if result.plan is None or result.prediction is None:
        return _why_none(result)
    rate = _rate(sessions, request, options, result.plan, engine)
    if not isinstance(rate, str):
        return _Found(samples_per_s=rate, plan=result.plan, request=request, result=result)
    if result.prediction.samples_per_s <= floor:
        return rate
    # alternatives take as long again, and few parts need them
    options, result = _solved(sessions, request, top=max(options.top, _ALTERNATIVES))
    for alternative in result.alternatives:
        plan = alternative.plan
        if alternative.samples_per_s <= floor:
            continue
        if isinstance(_rate(sessions, request, options, plan, engine), str):
            continue
        # as a search of its own, so that options lead to this plan
        narrow = _narrowed(request, plan)
        its_options, again = _solved(sessions, narrow)
        if again.plan is not None:
            its_rate = _rate(sessions, narrow, its_options, again.plan, engine)
            if not isinstance(its_rate, str):
                return _Found(samples_per_s=its_rate, plan=again.plan, request=narrow, result=again)
    return rate


def _narrowed(request: Request, plan: Plan) -> Request:
    """Return a request for the stages and the recomputed layers of a plan only."""
    rules = [f"pp={plan.num_stages}"]
    first = 0
    for checkpoint, run in groupby(strategy.checkpoint for strategy in plan.layers):
        behind = first + len(list(run))
        rules.append(f"layers {first}-{behind - 1}:ckpt={int(checkpoint)}")
        first = behind
    changes: Part = {"pin": tuple(rules)}
    # a single stage has all layers
    if plan.num_stages > 1:
        changes["pp_division"] = plan.stage_sizes
    return extended(request, changes)


def _solved(
    sessions: _Sessions, request: Request, *, top: int = 0
) -> tuple[SearchOptions, SearchResult]:
    session = sessions.of(request.options)
    options, _ = fill_options(request.options, request.given, session.profile, session.hardware)
    # read when the session was opened; filled options do not have it
    seconds = None if sessions.seconds is None else max(sessions.seconds, _LEAST_S)
    options = replace(options, calibration=session.options.calibration, time_limit_s=seconds)
    planner = session.rebuilt(options=options)
    # why a part is empty is said of the search without an engine, where no part has a plan
    return options, planner.solve(top=top, explained=False)


def _rate(
    sessions: _Sessions, request: Request, options: SearchOptions, plan: Plan, engine: Engine
) -> float | str:
    """Return samples per second of a plan as an engine runs it, or why it does not."""
    session = sessions.of(options)
    job = Job(
        plan=plan,
        spec=session.spec,
        model=request.inputs.model or session.spec.name,
        num_nodes=session.hardware.num_nodes,
        gpus_per_node=session.hardware.gpus_per_node,
        sequence_parallel=options.sequence_parallel,
        async_grad_reduce=options.async_grad_reduce,
        precision=options.mixed_precision,
        fp32_gradients=options.fp32_gradients,
        tp_overlap=options.tp_overlap,
    )
    try:
        lowered = lower_for(engine)(job)
    except InputError as error:
        return str(error)
    if lowered.losses:
        fields = dict.fromkeys(loss.field for loss in lowered.losses)
        return f"its best plan loses {', '.join(fields)}"
    changes: dict[str, Any] = dict(lowered.as_run)
    changed = replace(options, **changes)
    # a change of sequence parallelism needs tables of its own
    prediction = sessions.of(changed).rebuilt(options=changed).evaluate(lowered.plan)
    if not prediction.fits:
        return "its best plan does not fit as the engine runs it"
    return float(prediction.samples_per_s)


def _typed(typed: Request, request: Request) -> str:
    """Return the options that a request has beside what was typed, as one would type them."""
    words: list[str] = []
    for row in ROWS:
        value, known = request.given.get(row.name), typed.given.get(row.name)
        if isinstance(value, list):
            # rules are added behind the typed ones
            words += words_of(row, value[len(known) if isinstance(known, list) else 0 :])
        elif value != known:
            words += words_of(row, value)
    return " ".join(words)

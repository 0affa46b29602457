"""Search for per-layer plans that one or several engines can run without changes.

An engine with one tensor and one context degree for the whole model, embedding and head included,
supports few per-layer plans. Its search space is divided into parts: one for each pair of degrees
and type of data parallelism. The options of each part are also valid on the command line.

1. Each part is searched exactly, and its best plan is passed to the exporter of the engine.
2. If the engine does not support a setting of that plan, the alternatives of the search are tried.
3. The first supported alternative fixes stages and recomputed layers, and the part is searched
   again.

The result is the fastest supported plan of all parts. It is not proven optimal for the engine: a
part whose best plan is not supported may contain a faster supported plan than its alternatives.
`search.planning.choose` selects between this search and that for uniform plans.
"""

from __future__ import annotations

import math
import re
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
from search.engines.plans import ExporterSpace, ExporterSubspace, ExportJob, lower_for, space_of
from search.engines.table import ALIKE, EXPORTERS
from search.planning.layered.prediction import SearchResult
from search.planning.layered.summary import infeasible_sentence, one_line
from search.planning.session import Session, open_session
from search.planning.space import PRESETS, context_degrees
from search.request.options import SearchOptions, Shares
from search.request.profiles import named_card
from search.request.request import ROWS, Once, Request, extended, fill_options, with_places

if TYPE_CHECKING:
    from search.planning.uniform.answer import UniformResult

_ALTERNATIVES = 5
"""Number of alternatives to try if the engine does not support the best plan of a part."""
_CONTEXT_RULE = re.compile(r"\bv?cp=")
_ILLEGAL = "the degree is not legal"
"""Reason of a part without a legal strategy."""
_LEAST_S = 1e-3
"""Time limit of a search that begins after the deadline, seconds.

Such a search returns a plan only if its first step finds one."""


class NoPlanError(InfeasibleError):
    """Error: an engine supports no plan of a search without changes."""

    def __init__(self, engine: str, reasons: Sequence[tuple[str, int]], tried: int) -> None:
        """Store the first reason as `why`.

        reasons : (reason, number of parts with it), the most important first.
        tried : number of parts searched.
        """
        self.why = reasons[0][0]
        shown = "; ".join(
            f"{why} ({count} of {tried}{'' if at else ' parts of its space'})"
            for at, (why, count) in enumerate(reasons)
        )
        super().__init__(
            f"{engine} supports no plan of this search without changes: {shown}",
            remedy="Use --engine none, then autopar-export --allow-approx",
        )


class TooLargeError(InfeasibleError):
    """Error: no plan fits in memory, for an engine that supports every per-layer plan."""

    def __init__(self, why: str, smallest_bytes: float, missing_bytes: float) -> None:
        """Store memory per GPU of the smallest plan, and the memory missing for it, bytes."""
        self.smallest_bytes = smallest_bytes
        self.missing_bytes = missing_bytes
        super().__init__(why)


class ChosenPlans(Record):
    """Best uniform and per-layer plans of a request."""

    request: Request
    """Request whose search finds the best per-layer plan."""
    launches: UniformResult | None = None
    """Uniform plans, the fastest first; None if only per-layer plans were searched."""
    lines: tuple[EngineBest, ...] = ()
    """Best plan of each engine, the fastest first; empty if one engine was searched."""
    result: SearchResult | None = None
    """Search result of the best per-layer plan, without alternatives; None if not searched yet."""
    notices: tuple[str, ...] = ()
    why: str = ""
    """Reason why per-layer plans were searched, not uniform ones; empty if not needed."""

    @property
    def layers_differ(self) -> bool:
        """True if the best plan is a per-layer plan.

        It must be faster than the best uniform plan by more than `ALIKE`, the difference between
        both cost models.
        """
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
    """Plan that the engine supports, its throughput there, and the request that finds it."""

    samples_per_s: float
    plan: Plan
    request: Request
    result: SearchResult


class _Sessions:
    """Sessions of a request with and without sequence parallelism, and the time limit.

    Memory is estimated or measured for one value of sequence parallelism, so each needs a session.
    """

    def __init__(self, request: Request, once: Once = lambda key, make: make()) -> None:
        self._request = request
        self._once = once
        self._opened: dict[bool, Session] = {}
        self.seconds: float | None = request.options.time_limit_s
        """Time limit of each next search, seconds; None for no limit."""

    def of(self, options: SearchOptions) -> Session:
        """Return the session with the sequence parallelism of `options`.

        Raises InputError if the measured memory tables are for the other setting.
        """
        key = options.sequence_parallel
        if key not in self._opened:
            asked, own = self._request, replace(self._request.options, sequence_parallel=key)
            given = {*asked.given, "sequence-parallel"}
            self._opened[key] = open_session(asked.inputs, own, given, once=self._once)
        return self._opened[key]


def choose(request: Request) -> ChosenPlans:
    """Return the request that finds the fastest per-layer plan of its engine, and this plan.

    Options of the user are never changed; options that restrict the search are added. If the engine
    supports every per-layer plan, the request is returned without a search.

    Raises InfeasibleError: no plan that the engine supports fits. Raises InputError: no engine has
    a plan, such as with pins that contradict each other.
    """
    assert request.engine not in (None, "any", "none"), "without one there is nothing to choose"
    engine = cast(Engine, request.engine)
    request = as_engine(request, engine)
    if not space_of(engine).parts:  # the engine runs every plan
        return ChosenPlans(request=request)
    best, tried = _best_part(request, engine, _Sessions(request))
    notice = (
        f"{engine}: of {tried} searches the fastest plan without losses, "
        f"{best.samples_per_s:.5g} samples/s, is that of {_typed(request, best.request)}"
    )
    return ChosenPlans(request=best.request, notices=(notice,), result=best.result)


def choose_any(
    request: Request,
    engines: Sequence[Engine] = cast(tuple[Engine, ...], EXPORTERS),
    shares: Shares | None = None,
) -> ChosenPlans:
    """Return the request that finds the fastest plan of several engines, and all engines' best.

    Engines are sorted by throughput; engines without a plan are last, with the reason. If none has
    a plan, the request is returned without an engine.

    shares : division of the time limit among engines; default: equal shares.
    """
    shares = shares or Shares(request.options.time_limit_s, len(engines))
    made: dict[object, Any] = {}

    def once(key: object, make: Callable[[], Any]) -> Any:
        # engines share cluster and model unless their software stacks differ
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
            # A remedy may name options that the search added.
            why = refused.why if isinstance(refused, NoPlanError) else refused.short
            missing, smallest = None, ""
            if isinstance(refused, TooLargeError):
                missing = refused.missing_bytes
                smallest = f"per-layer plan of {refused.smallest_bytes / GIB:.2f} GiB"
            lines.append(
                EngineBest(
                    engine=engine,
                    samples_per_s=None,
                    reason=why,
                    missing_bytes=missing,
                    smallest=smallest,
                )
            )
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
    # the sort is stable: equally fast engines keep the order of EXPORTERS
    lines.sort(key=lambda line: -(line.samples_per_s or 0.0))
    if best is None:
        return ChosenPlans(request=replace(request, engine=None), lines=tuple(lines))
    asked = replace(best.request, engine=chosen)
    return ChosenPlans(request=asked, lines=tuple(lines), result=best.result)


def _whole_space(request: Request, sessions: _Sessions) -> _Found:
    """Return the best plan of an engine that supports every per-layer plan.

    Raises InfeasibleError if none is found; `TooLargeError` if more memory would suffice.
    """
    options, result = _solved(sessions, request)
    if result.plan is None or result.prediction is None:
        why = result.infeasibility
        if why is None or why.smallest_budget_bytes <= 0:
            # With 0, no amount of memory would help.
            raise InfeasibleError(_why_none(result))
        # Rounded up, so that the printed budget is sufficient.
        smallest = math.ceil(why.smallest_budget_bytes / GIB * 100) / 100
        budget = options.memory_constraint_bytes
        text = f"{_why_none(result)}, the smallest plan needs {smallest:.2f} GiB"
        raise TooLargeError(text, smallest * GIB, smallest * GIB - budget)
    return _Found(
        samples_per_s=result.prediction.samples_per_s,
        plan=result.plan,
        request=request,
        result=result,
    )


def _why_none(result: SearchResult) -> str:
    """Return why a search found no plan: the time limit, an illegal degree, or memory."""
    why = result.infeasibility
    if why is None:
        return "nothing was found before the time limit"
    # 0: no amount of memory would help
    return _ILLEGAL if why.smallest_budget_bytes == 0 else "nothing fits"


def _best_part(request: Request, engine: Engine, sessions: _Sessions) -> tuple[_Found, int]:
    """Return (fastest plan of all parts of an engine's space, number of parts searched).

    Raises the errors of `choose`.
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
        if part.given in tried:  # the user's options leave no difference between two parts
            continue
        tried.append(part.given)
        try:
            found = _fastest(sessions, part, engine, best.samples_per_s if best else 0.0)
        except InputError as error:  # such as a part without measured tables
            found = error.short
            refused.add(found)
        if isinstance(found, str):
            reasons[found] = reasons.get(found, 0) + 1
        elif best is None or found.samples_per_s > best.samples_per_s:
            best = found
    if best is None:
        # The engine is not the cause of errors, or of an empty space, that the user's options have
        # without it.
        if not reasons.keys() - refused - {_ILLEGAL}:
            result = session.planner.solve()
            why = result.infeasibility
            if why is not None and why.smallest_budget_bytes == 0:
                budget = session.options.memory_constraint_bytes
                raise InfeasibleError(infeasible_sentence(why, budget, options=result.options))
        # Reasons of the engine come before errors of added options, the most frequent first: a
        # table shows only the first reason.
        often = sorted(reasons.items(), key=lambda reason: (reason[0] in refused, -reason[1]))
        raise NoPlanError(engine, often, len(tried))
    return best, len(tried)


def as_engine(request: Request, engine: Engine) -> Request:
    """Return a request with software stack, memory model and settings of an engine.

    Options that the user gave are unchanged. The stack is set only for estimated times, since
    measured times include the stack that was measured.
    """
    space = space_of(engine)
    if engine == "galvatron":
        request = within_strategy_file(request)
    changes: dict[str, object] = {**space.priced, "memory_of": engine}
    inputs = request.inputs
    if space.stack is not None and inputs.time_profiling_path is None:
        measured = with_places(inputs, request.options)[1].times is not None
        estimated = inputs.uses_default_hardware or named_card(inputs.hardware) is not None
        if estimated and not measured:
            changes["stack"] = space.stack
    return extended(request, changes)


def within_strategy_file(request: Request) -> Request:
    """Return a request without context parallelism unless an option of the user allows it.

    Galvatron's v2.4 ignores the context degrees of strategy files and would run another plan.
    """
    options, given = request.options, request.given
    rules = ",".join((*options.pin, *options.forbid))
    if {"enable-cp", "disable-cp", "max-cp-deg", "cp-kind"} & given.keys() or _CONTEXT_RULE.search(
        rules
    ):
        return request
    if PRESETS[options.search_space].context is False:
        return request
    line = "--disable-cp (Galvatron v2.4 ignores context degrees; --enable-cp searches them)"
    found = replace(request, found=(*request.found, line))
    return extended(found, {"disable_cp": True})


def _contexts(session: Session, space: ExporterSpace) -> list[int]:
    """Return the context-parallel degrees to search for an engine."""
    if not space.context:
        return [1]
    tokens = min(layer.seq_length for layer in session.spec.layers)
    return context_degrees(session.options, divisors(session.hardware.world_size), tokens)


def _added(
    request: Request,
    part: ExporterSubspace,
    rules: str,
    degree: int | None,
    context: int,
    space: ExporterSpace,
) -> Request:
    """Return a request restricted to one part of an engine's space.

    Options that the user gave take precedence. part : options of the data-parallel type. rules :
    its pins. degree : tensor degree; None: not restricted. context : context degree.
    """
    changes: ExporterSubspace = {**part}
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
    """Return the fastest found plan of a part that the engine supports, or why there is none.

    floor : throughput of the best known plan, samples/s; slower alternatives are not tried.
    """
    options, result = _solved(sessions, request)
    if result.plan is None or result.prediction is None:
        return _why_none(result)
    rate = _rate(sessions, request, options, result.plan, engine)
    if not isinstance(rate, str):
        return _Found(samples_per_s=rate, plan=result.plan, request=request, result=result)
    if result.prediction.samples_per_s <= floor:
        return rate
    # alternatives double the search time, and few parts need them
    options, result = _solved(sessions, request, top=max(options.top, _ALTERNATIVES))
    for alternative in result.alternatives:
        plan = alternative.plan
        if alternative.samples_per_s <= floor:
            continue
        if isinstance(_rate(sessions, request, options, plan, engine), str):
            continue
        # search again with narrower options, so that these options lead to the plan
        narrow = _narrowed(request, plan)
        its_options, again = _solved(sessions, narrow)
        if again.plan is not None:
            its_rate = _rate(sessions, narrow, its_options, again.plan, engine)
            if not isinstance(its_rate, str):
                return _Found(samples_per_s=its_rate, plan=again.plan, request=narrow, result=again)
    return rate


def _narrowed(request: Request, plan: Plan) -> Request:
    """Return a request restricted to the stages and the recomputed layers of a plan."""
    rules = [f"pp={plan.num_stages}"]
    first = 0
    for checkpoint, run in groupby(strategy.checkpoint for strategy in plan.layers):
        behind = first + len(list(run))
        rules.append(f"layers {first}-{behind - 1}:ckpt={int(checkpoint)}")
        first = behind
    changes: ExporterSubspace = {"pin": tuple(rules)}
    # a single stage has all layers
    if plan.num_stages > 1:
        changes["pp_division"] = plan.stage_sizes
    return extended(request, changes)


def _solved(
    sessions: _Sessions, request: Request, *, top: int = 0
) -> tuple[SearchOptions, SearchResult]:
    session = sessions.of(request.options)
    options, _ = fill_options(request.options, request.given, session.profile, session.hardware)
    # the calibration was read when the session was opened; filled options do not contain it
    seconds = None if sessions.seconds is None else max(sessions.seconds, _LEAST_S)
    options = replace(options, calibration=session.options.calibration, time_limit_s=seconds)
    planner = session.rebuilt(options=options)
    # if no part has a plan, the search without an engine explains why parts are empty
    return options, planner.solve(top=top, explained=False)


def _rate(
    sessions: _Sessions, request: Request, options: SearchOptions, plan: Plan, engine: Engine
) -> float | str:
    """Return the throughput of a plan on an engine, samples/s, or why the engine cannot run it."""
    session = sessions.of(options)
    job = ExportJob(
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
    # a change of sequence parallelism needs separate tables
    prediction = sessions.of(changed).rebuilt(options=changed).evaluate(lowered.plan)
    if not prediction.fits:
        return "its best plan does not fit as the engine runs it"
    return float(prediction.samples_per_s)


def _typed(typed: Request, request: Request) -> str:
    """Return the options of `request` that are not in `typed`, in command-line syntax."""
    words: list[str] = []
    for row in ROWS:
        value, known = request.given.get(row.name), typed.given.get(row.name)
        if isinstance(value, list):
            # rules are appended to the given ones
            words += words_of(row, value[len(known) if isinstance(known, list) else 0 :])
        elif value != known:
            words += words_of(row, value)
    return " ".join(words)

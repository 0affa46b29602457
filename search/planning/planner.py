"""Planner of Python: the searches of `autopar search` for one model and cluster.

With documents in place of names, only per-layer plans for any engine are searched, as the command
does with measured files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from autopar.errors import InfeasibleError, InputError, input_errors
from autopar.price.assessment import assess
from autopar.records import PositiveNumber, replace, typed
from autopar.run.of_plan import UniformPlan
from autopar.run.plan import Plan, Prediction
from search.engines.table import engine_space
from search.planning.choose import SearchChoice, completed, opened, route_of, solve
from search.planning.frontier import frontier
from search.planning.layered.parts import ChosenPlans, TooLargeError
from search.planning.layered.planner import (
    Planner as LayeredPlanner,
    changes_of,
    solve_by_family,
)
from search.planning.layered.prediction import SearchResult, result_without_plan
from search.planning.uniform.answer import UniformRequest, answer, target_of
from search.planning.uniform.best_first import PricedRun
from search.planning.uniform.files import choice_of
from search.planning.uniform.result import UniformSearchResult, prediction_of, result_of
from search.request.interface import (
    changed,
    checked_documents,
    fixed_by_rule,
    open_documents,
    request_of,
)
from search.request.options import EngineChoice, batches_of, option_record

if TYPE_CHECKING:
    from pathlib import Path

    from autopar.rates.measured import HardwareProfile
    from autopar.run.model import ModelProfile, ModelSpec
    from search.request.request import Request


class Planner(LayeredPlanner):
    """Search for the fastest plan of one model on one cluster, as `autopar search`.

    model : value of `--model`, or (ModelSpec, ModelProfile)
    hardware : value of `--hardware` such as `h100:4x8`, or a HardwareProfile
    options : keywords of `request_of`: the options of the command

    Raises InputError: an input or option is missing or invalid.
    """

    @input_errors()
    def __init__(
        self,
        model: str | Path | tuple[ModelSpec, ModelProfile],
        hardware: str | Path | HardwareProfile,
        **options: Any,
    ) -> None:
        model, hardware = checked_documents(model, hardware)
        if not (isinstance(model, str) and isinstance(hardware, str)):
            self._set(*open_documents(model, hardware, options))
            return
        self._request, _ = completed(request_of(model, hardware, options))
        self._route = route_of(self._request)
        if not self._searches_engines:
            self._open()

    _request: Request | None = None
    """The question; None if documents or loaded inputs are given."""
    _route: SearchChoice = SearchChoice()

    @property
    def _searches_engines(self) -> bool:
        return self._route.launches is not None or bool(self._route.layered)

    def __getattr__(self, name: str) -> Any:
        # Inputs of per-layer plans are loaded on first use: uniform plans do not need them.
        if name in _LOADED and "_request" in self.__dict__ and "spec" not in self.__dict__:
            self._open()
            return getattr(self, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _open(self) -> None:
        assert self._request is not None, "names are given"
        # the question without an engine, which restricts per-layer plans
        request = (
            self._request if not self._searches_engines else replace(self._request, engine=None)
        )
        session = opened(ChosenPlans(request=request))
        self._set(session.spec, session.profile, session.hardware, session.options)

    @input_errors()
    def best(self) -> SearchResult:
        """Return the answer of the command: `solve` with its alternatives."""
        if self._searches_engines:
            return self.solve()
        if self._request is None:
            return solve_by_family(self, self.options.top)
        return _solved(self._request, self._route)

    @input_errors()
    def solve(
        self,
        memory_constraint_bytes: float | None = None,
        global_batch_sizes: Sequence[int] | None = None,
        *,
        memory_constraint_gib: float | None = None,
        top: int | None = None,
        explained: bool = True,
    ) -> SearchResult:
        """Return the plan with the highest throughput within the memory constraint.

        Arguments that are None default to the options of the planner.

        memory_constraint_bytes, memory_constraint_gib : memory per GPU; the first has precedence.
        global_batch_sizes : batch sizes to search
        top : number of alternatives
        explained : True to find the option that excludes all plans, if no per-layer plan is legal

        Raises OptionError for an invalid value.
        """
        if self._request is None or not self._searches_engines:
            return super().solve(
                memory_constraint_bytes,
                global_batch_sizes,
                memory_constraint_gib=memory_constraint_gib,
                top=top,
                explained=explained,
            )
        changes = changes_of(memory_constraint_bytes, memory_constraint_gib, top)
        options = replace(self._request.options, **changes)  # for its checks
        request = changed(self._request, {name: getattr(options, name) for name in changes})
        batches = batches_of(global_batch_sizes)
        if not batches:
            return _solved(request)
        found = [_solved(changed(request, {"settle_bsz": batch})) for batch in batches]
        return max(found, key=_rate)

    @typed
    def evaluate(
        self, plan: Plan, memory_constraint_bytes: PositiveNumber | None = None
    ) -> Prediction:
        """Return step time and memory of a plan, which may be illegal or too large.

        memory_constraint_bytes : memory per GPU; None: that of the options.

        Raises as `predict`; InputError for a uniform plan if its question had none.
        """
        if not isinstance(plan, UniformPlan):
            return super().evaluate(plan, memory_constraint_bytes)
        question = self._question()
        if memory_constraint_bytes is not None:
            card = replace(question.card, memory_bytes=memory_constraint_bytes)
            question = replace(question, card=card)
        choice = choice_of(plan.run)
        target = target_of(question, engine_space(plan.engine, compiled=choice.compiled))
        return prediction_of(
            PricedRun(choice=choice, run=plan.run, assessment=assess(plan.run, target)), target
        )

    def _question(self) -> UniformRequest:
        question = self._route.launches
        if question is None:
            raise InputError(
                "a uniform plan needs the names of model and hardware, and options of uniform "
                "plans",
                remedy="Construct the Planner with them",
            )
        return question

    @typed
    def frontier(self, first: SearchResult | None = None) -> list[SearchResult]:
        """Return the best plans under decreasing memory constraints, largest first.

        The constraint of search n is one byte less than the memory of the last plan, and at most
        M * (1 - n/64), with M of the options. At most 64 searches follow the first, and some plans
        may be skipped. The last result has no plan if nothing fits. Only the first result has
        alternatives.

        first : result of the first search, if known; not used if engines are searched
        """
        if self._request is None or not self._searches_engines:
            return super().frontier(first)
        try:
            first_of_all = solve(self._request, self._route)
        except InfeasibleError as error:
            return [_none(self._request, error)]
        return frontier(self._route, first_of_all)

    @typed
    def why_not(self, rule: str, baseline: SearchResult) -> SearchResult:
        """Return the best plan under one additional rule, such as `tp=8`.

        The global batch and the engine are those of the plan in `baseline`. Raises OptionError for
        an invalid rule.
        """
        if self._request is None or not self._searches_engines:
            return super().why_not(rule, baseline)
        batch = {} if baseline.plan is None else {"settle_bsz": baseline.plan.global_batch}
        request = changed(self._request, batch)
        if not isinstance(baseline, UniformSearchResult):
            names = (one.engine for one in baseline.engines if one.plan is not None)
            engine = cast(EngineChoice | None, next(names, None))
            pinned = replace(
                changed(request, {"pin": (*request.options.pin, rule)}),
                engine=engine or request.engine,
            )
            return _solved(pinned)
        question = self._question()
        if baseline.plan is not None:
            job = replace(question.job, global_batches=(baseline.plan.global_batch,))
            question = replace(question, job=job)
        one = baseline.found.best
        engines = question.engines if one is None else (one.engine,)
        fixed = fixed_by_rule(rule, question.fixed)
        try:
            found = answer(replace(question, fixed=fixed, engines=engines))
        except InputError as error:
            return _none(request, error)
        return result_of(found, request)


_LOADED = frozenset({"spec", "profile", "hardware", "options", "rules", "_built", "_cost"})
"""Attributes that are set when the inputs of per-layer plans are loaded."""


def _rate(result: SearchResult) -> float:
    return 0.0 if result.prediction is None else result.prediction.samples_per_s


def _solved(request: Request, route: SearchChoice | None = None) -> SearchResult:
    """Return the answer of a request, also if it is that no plan fits."""
    try:
        return solve(request, route).result
    except InfeasibleError as error:
        return _none(request, error)


def _none(request: Request, error: Exception) -> SearchResult:
    """Return the result of a search that raised an error because it has no plan."""
    options = request.options
    record = option_record(options, options.memory_constraint_bytes)
    if not isinstance(error, TooLargeError):
        return result_without_plan(record, str(error))
    return result_without_plan(
        record,
        str(error),
        missing_bytes=round(error.missing_bytes),
        smallest_budget_bytes=round(error.smallest_bytes),
    )

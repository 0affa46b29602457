"""The best plans of a request at decreasing memory budgets.

Every point is the answer of the request with that budget. A search with a larger budget bounds the
throughput of one with a smaller budget, and its plan stays the best as long as it fits. So at each
point only those engines are searched again whose bound exceeds the throughput of the others. A time
limit holds for each search of an engine; points are then the best plans found in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from autopar.answer import EngineBest
from autopar.errors import InputError
from autopar.records import Record, replace
from autopar.run.plan import Prediction
from autopar.run.runtime import Engine
from search.engines.space import EngineSpace
from search.engines.table import ALIKE
from search.planning.choose import SearchChoice, Solved, opened, plans_of
from search.planning.layered.planner import FRONTIER_STEPS
from search.planning.layered.prediction import SearchResult, result_without_plan
from search.planning.uniform.answer import EngineResult, UniformRequest, UniformResult, searched_in
from search.planning.uniform.best_first import UniformSearch
from search.planning.uniform.memory import MemoryBudget
from search.planning.uniform.result import result_of
from search.request.interface import changed
from search.request.options import Shares
from search.request.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence


def frontier(route: SearchChoice, first: Solved) -> list[SearchResult]:
    """Return the best plans under decreasing memory budgets, largest first.

    The first search uses the budget M of the request. The budget of search n is one byte less than
    the memory of the last plan, and at most M * (1 - n/64). At most 64 searches follow, and some
    plans may be skipped. The last result has no plan if nothing fits. Only the first result has
    alternatives.

    route : result of `route_of`
    first : answer of the request
    """
    request = first.request
    if route.launches is None and not route.layered:
        session = opened(first.found)
        return session.planner.frontier(first.result)
    most = _budget(first)
    engines = _engines(request, route, first)
    results = [first.result]
    while results[-1].prediction is not None and len(results) <= FRONTIER_STEPS:
        grid = most - most * len(results) / FRONTIER_STEPS
        budget = min(least_budget(results[-1]) - 1, grid)
        options = {**results[-1].options, "memory_constraint_bytes": budget}
        none = result_without_plan(options, "no plan fits")
        results.append(_best(engines, budget) or none)
    return results


class _At(Record, eq=False):
    """Best plan of one engine at a memory budget."""

    value: float
    """Throughput, samples/s, over the margin required of per-layer plans; 0 without a plan."""
    least_bytes: float = math.inf
    """Smallest budget in which the plan fits, bytes."""
    result: Callable[[float], SearchResult] | None = None
    """Function from the budget to the result; None if the plan is not known, only its value."""


class _Engine:
    """Searches of one engine at decreasing budgets."""

    def __init__(self, first: _At, search: Callable[[float], _At]) -> None:
        self.at = first
        self._search = search

    def is_known(self, budget: float) -> bool:
        """Return True if the last result, a plan or none, also holds at a smaller budget."""
        if self.at.value == 0.0:
            return True
        return self.at.result is not None and self.at.least_bytes <= budget

    def search(self, budget: float) -> None:
        """Search again, with a smaller budget."""
        self.at = self._search(budget)


def _best(engines: Sequence[_Engine], budget: float) -> SearchResult | None:
    """Return the fastest plan of all engines at a budget; None if nothing fits."""
    while True:
        first = max(engines, key=lambda one: one.at.value)
        if first.is_known(budget):
            break
        first.search(budget)
    return None if first.at.result is None else first.at.result(budget)


def _budget(first: Solved) -> float:
    memory = first.result.options["memory_constraint_bytes"]
    assert isinstance(memory, int | float), "it is an option of every search"
    return float(memory)


def least_budget(result: SearchResult) -> float:
    """Return the smallest memory budget per GPU, bytes, in which the plan of a result fits."""
    from search.planning.uniform.result import UniformSearchResult

    if isinstance(result, UniformSearchResult):
        one = result.found.best
        assert one is not None, "there is a plan"
        return _least_of_uniform(one)
    return _least_of_layers(result.prediction)


def _least_of_layers(prediction: Prediction | None) -> float:
    assert prediction is not None, "there is a plan"
    return float(max(stage.reserved_bytes for stage in prediction.stages))


def _least_of_uniform(one: EngineResult) -> float:
    """Return the smallest budget of an engine's best plan, bytes."""
    assert one.best is not None, "there is a plan"
    found, target = one.best.assessment, one.target
    budget = MemoryBudget(target.capacity_bytes, target.oom_risk)
    # one byte for the rounding of floats, but no more than the budget in which the plan was found
    least = math.ceil(budget.capacity_for(found.run, found.fullest.peak_bytes)) + 1
    return min(float(least), target.capacity_bytes)


def _engines(request: Request, route: SearchChoice, first: Solved) -> list[_Engine]:
    """Return the engines of a request, with their results at the first budget."""
    rates = {line.engine: line.samples_per_s or 0.0 for line in first.found.lines}
    found: list[_Engine] = []
    question = route.launches
    if question is not None:
        launches = first.found.launches
        assert launches is not None, "its uniform plans were searched"
        for one in launches.engines:
            search = _uniform_search(request, question, one.engine)
            found.append(_Engine(_of_uniform(request, question, one), search))
    for engine in route.layered:
        # with a single engine there are no lines, but its result
        result = first.result
        rate = rates.get(engine)
        if rate is None:
            rate = 0.0 if result.prediction is None else result.prediction.samples_per_s
        known = _At(value=rate / (1.0 + ALIKE) if question is not None else rate)
        found.append(_Engine(known, _layered_search(request, question, engine)))
    return found


def _of_uniform(request: Request, question: UniformRequest, one: EngineResult) -> _At:
    # the frontier is that of the fastest plans, whatever was chosen among those alike
    one = replace(one, chosen=None, safer=None, other_precision=None, without_host=None)
    if one.best is None:
        return _At(value=0.0)
    solved = one.solved
    assert solved is not None, "it has a plan"

    def result(budget: float) -> SearchResult:
        card = replace(question.card, memory_bytes=budget)
        machine = replace(one.target.machine, card=card)
        single = replace(
            one,
            target=replace(one.target, machine=machine),
            solved=replace(solved, solutions=solved.solutions[:1]),
        )
        asked = replace(question, card=card)
        return result_of(UniformResult(question=asked, engines=(single,)), request)

    return _At(value=one.best.samples_per_s, least_bytes=_least_of_uniform(one), result=result)


def _uniform_search(
    request: Request, question: UniformRequest, engine: EngineSpace
) -> Callable[[float], _At]:
    """Return the search of an engine's uniform plans at a budget; bounds are kept between them."""
    spaces: dict[EngineSpace, UniformSearch] = {}

    def search(budget: float) -> _At:
        one = searched_in(question, engine, spaces, budget)
        return _of_uniform(request, question, one)

    return search


def _layered_search(
    request: Request, question: UniformRequest | None, engine: Engine
) -> Callable[[float], _At]:
    """Return the search of an engine's per-layer plans at a budget."""

    def search(budget: float) -> _At:
        asked = changed(request, {"memory_constraint_bytes": budget})
        shares = Shares(request.options.time_limit_s, 1)
        try:
            found = plans_of(asked, question, (engine,), shares)
        except InputError:
            return _At(value=0.0)
        line: EngineBest = found.lines[0]
        if found.result is None or line.samples_per_s is None:
            return _At(value=0.0)
        own = found.result
        margin = 1.0 + ALIKE if question is not None else 1.0

        def result(budget: float) -> SearchResult:
            options = {**own.options, "memory_constraint_bytes": budget}
            prediction = own.prediction
            if budget != own.options["memory_constraint_bytes"]:
                assert own.plan is not None, "the engine has a plan"
                prediction = opened(found).planner.evaluate(own.plan, budget)
            return replace(own, options=options, prediction=prediction, alternatives=())

        return _At(
            value=line.samples_per_s / margin,
            least_bytes=_least_of_layers(own.prediction),
            result=result,
        )

    return search

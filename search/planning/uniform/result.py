"""The result of a uniform search in the types of the Python interface.

A uniform plan becomes a `Plan` with its run, and its assessment a `Prediction`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from autopar.pipeline.formulas import in_flight
from autopar.price.account import account_of
from autopar.price.assessment import Assessment, Target
from autopar.rates.accuracy import probability_faster
from autopar.records import replace
from autopar.run.of_plan import uniform_plan
from autopar.run.plan import PUBLISHED_RUNS, Infeasibility, Prediction, StagePrediction
from search.planning.layered.prediction import Alternative, SearchResult, SearchStats, Status
from search.planning.uniform.answer import EngineResult, UniformResult
from search.planning.uniform.best_first import PricedRun, family_of
from search.planning.uniform.summary import price_of
from search.request.options import option_record
from search.request.request import Request


class UniformSearchResult(SearchResult):
    """Result of a search whose fastest plan is uniform, or that found no uniform plan.

    `plan` is a `UniformPlan`. The settings that only uniform plans have are in its `run`.
    """

    found: UniformResult
    """Results of the engines, the fastest first."""
    request: Mapping[str, object]
    """Options of the search as typed."""

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object that `--json` prints, without its header fields."""
        # reports import results, so importing them here at run time avoids a cycle
        found: dict[str, Any] = import_module("search.show.uniform_files").launch_result(
            self.found, self.request
        )
        return found

    def rows(self) -> list[dict[str, Any]]:
        """Return one row per plan, best first: plan in words, step time (s), samples/s."""
        words = ["", *(other.differs_by for other in self.alternatives)]
        rows = super().rows()
        return [row | {"plan": own or row["plan"]} for row, own in zip(rows, words, strict=False)]

    def words(self, *, batch: bool = False) -> str:
        """Return engine and plan in one line; batch : True to add the global batch."""
        one, best = self.found.best, self.found.chosen
        assert one is not None, "there is a plan"
        assert best is not None, "its engine has a plan"
        size = f", batch {best.choice.global_batch}" if batch else ""
        return f"{one.engine.title}, {best.line}{size}"


def result_of(found: UniformResult, request: Request) -> UniformSearchResult:
    """Return the result of the uniform search of a request."""
    question, one, best = found.question, found.best, found.chosen
    searched = [each.solved for each in found.engines if each.solved is not None]
    complete = all(each.complete for each in searched)
    status: Status = found.status
    efforts = [each.effort for each in searched]
    memory = question.card.memory_bytes
    return UniformSearchResult(
        status=status,
        plan=None if best is None else uniform_plan(best.run),
        prediction=None if best is None or one is None else prediction_of(best, one.target),
        bound_samples_per_s=found.bound_samples_per_s,
        gap=found.gap if best is not None or complete else float("inf"),
        alternatives=() if one is None else _alternatives(found, one),
        infeasibility=_infeasibility(found) if status == "infeasible" else None,
        defaults_used=question.assumed,
        notes=(),
        options=option_record(request.options, memory),
        sources=(),
        estimated=True,
        stats=SearchStats(
            states=sum(each.timed for each in efforts),
            candidates=sum(each.choices for each in efforts),
            opened=sum(each.opened for each in efforts),
            cpu_s=found.cpu_s,
            wall_s=found.wall_s,
        ),
        engines=found.lines,
        found=found,
        request=request.given,
    )


def _alternatives(found: UniformResult, one: EngineResult) -> tuple[Alternative, ...]:
    """Return the plans of an engine with other degrees."""
    assert one.solved is not None, "the engine has a plan"
    best = one.best
    assert best is not None, "the engine has a plan"
    runs = best.assessment.runs
    listed = []
    for other in one.solved.solutions:
        if family_of(other.choice) == family_of(best.choice):
            continue
        step, share = other.assessment.step, best.samples_per_s / other.samples_per_s
        assert step is not None, "every solution has a step time"
        listed.append(
            Alternative(
                plan=uniform_plan(other.run),
                step_time_s=step.total_s,
                samples_per_s=other.samples_per_s,
                bound_samples_per_s=other.samples_per_s,
                differs_by=other.line,
                probability_faster=None
                if runs is None
                else probability_faster(share, 1.0, runs.plan_spread),
            )
        )
    return tuple(listed)


def _infeasibility(found: UniformResult) -> Infeasibility:
    """Return the missing memory of the plan nearest to fitting, or why no plan is legal."""
    nearest = found.nearest
    solved = nearest.solved
    shortage = None if solved is None else solved.shortage
    smallest = None if solved is None else solved.smallest
    if shortage is None or smallest is None or shortage.host:
        return Infeasibility(
            stage=0,
            num_stages=0,
            missing_bytes=0,
            smallest_budget_bytes=0,
            reason=found.why_none,
        )
    # one byte more than the exact limit, whose comparison is rounded
    missing = math.ceil(shortage.missing_bytes) + 1
    return Infeasibility(
        stage=shortage.stage,
        num_stages=smallest.choice.pp,
        missing_bytes=missing,
        smallest_budget_bytes=round(found.question.card.memory_bytes) + missing,
        reason=found.why_none,
    )


def prediction_of(solution: PricedRun, target: Target) -> Prediction:
    """Return step time and memory of every stage of a uniform plan.

    The seconds of a stage are those of a micro-batch. Its `tail_s` is its optimizer step and the
    exposed gradient reduction of the whole step.
    """
    assessment = _whole(solution.assessment)
    price, step, run = price_of(assessment, target), assessment.step, assessment.run
    assert step is not None, "a solution has a step time"
    exposed = step.terms_s.get("gradients", 0.0)
    strategy = run.strategy
    flights = in_flight(
        strategy.schedule,
        strategy.pp,
        strategy.vpp,
        strategy.micro_batches,
        strategy.group,
        ahead=int(run.runtime.overlap.experts),
    )
    stages = []
    for stage, times, flight in zip(price.stages, step.stages, flights, strict=True):
        time_s = {name: value for name, value in times.terms_s.items() if value}
        sent = time_s.pop("transfer", 0.0)
        forward = sum(value for name, value in times.forward_s.items() if name != "transfer")
        stages.append(
            StagePrediction(
                stage=stage.stage,
                forward_s=forward,
                backward_s=sum(time_s.values()) - forward,
                send_s=sent,
                tail_s=times.optimizer_s + exposed,
                allocated_bytes=round(stage.peak_bytes),
                reserved_bytes=round(stage.reserved_bytes[1]),
                odds_of_oom=stage.oom_probability,
                budget_bytes=round(stage.budget_bytes),
                in_flight=math.ceil(flight),
                memory_bytes={name: round(size) for name, size in stage.terms_bytes.items()},
                time_s=time_s,
            )
        )
    return Prediction(
        step_time_s=step.total_s,
        samples_per_s=solution.samples_per_s,
        # the step time is itself that of the replayed schedule
        replay_s=step.total_s,
        stages=tuple(stages),
        legal=True,
        fits=price.fits,
        problems=price.problems if price.fits else (*price.problems, f"the plan {price.verdict}"),
        waterfall_s={name: value for name, value in step.terms_s.items() if value},
        step_time_interval_s=assessment.interval_s,
        interval_of=(PUBLISHED_RUNS,),
    )


def _whole(found: Assessment) -> Assessment:
    """Return an assessment with the memory of every stage; a search counts only the largest."""
    counted = {one.stage: one for one in found.accounts}
    stages = range(found.run.strategy.pp)
    every = tuple(counted.get(at) or account_of(found.run, at) for at in stages)
    return replace(found, accounts=every)

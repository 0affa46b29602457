"""Uniform plans as documents: the object of `--json` and the plan file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec.structs import asdict

from autopar import __version__
from autopar.documents.plan import RunDocument, VersionsEntry
from autopar.output import safe_name
from autopar.records import content_of
from autopar.run.rules import Notice
from autopar.training.launch_file import LaunchDocument, LaunchEntry
from autopar.training.launch_settings import settings_of
from search.engines.space import run_of
from search.engines.table import engine_space
from search.planning.layered.prediction import SearchResult
from search.planning.uniform.answer import EngineResult, UniformResult as Launches
from search.planning.uniform.best_first import PricedRun
from search.planning.uniform.choice import avoided
from search.planning.uniform.files import cluster_of, degrees_entry
from search.planning.uniform.summary import price_of
from search.questions.suggestions import Suggestion
from search.show.files import engine_entries, frontier_entries, options_digest, typed_request
from search.show.terms import assessed_entry


def _launch(answer: Launches, engine: EngineResult, solution: PricedRun) -> LaunchEntry:
    job = answer.question.job
    space = engine_space(engine.engine.name, compiled=solution.choice.compiled)
    usual = run_of(space, job, solution.choice)
    return LaunchEntry(
        engine=cast(Any, engine.engine.name),
        degrees=degrees_entry(solution.choice, job.world),
        settings=settings_of(solution.run, usual),
        samples_per_s=solution.samples_per_s,
        predicted=assessed_entry(solution.assessment, engine.target, answer.question.price),
    )


def launch_text(answer: Launches, request: Mapping[str, object], status: str = "") -> str:
    """Return the text of the plan file of the best uniform plan.

    status : see `PlanFigures`; by default, that of the search
    """
    one, best = answer.best, answer.chosen
    assert one is not None, "nothing is written where nothing fits"
    assert best is not None, "the fastest engine has a launch"
    step = best.assessment.step
    figures = {
        "status": status or answer.status,
        "step_time_s": None if step is None else step.total_s,
        "samples_per_s": best.samples_per_s,
        "defaults_used": list(answer.question.assumed),
        "request": typed_request(request),
        "engines": engine_entries(answer.lines),
        "versions": VersionsEntry(autopar=__version__),
        "price": assessed_entry(best.assessment, one.target, answer.question.price),
    }
    return RunDocument.of(best.run, cluster_of(answer.question), figures).text()


def launch_document(answer: Launches, request: Mapping[str, Any]) -> LaunchDocument:
    """Return the document of a search for uniform plans: request, best plan and its prediction."""
    question, one, best = answer.question, answer.best, answer.chosen
    launch = None if one is None or best is None else _launch(answer, one, best)
    return LaunchDocument(
        format="autopar-launch",
        version=1,
        autopar=__version__,
        status=answer.status if launch else "infeasible",
        request=dict[str, Any](sorted(request.items())),
        model=question.spec.name,
        hardware=cluster_of(question),
        seq_length=question.job.seq,
        launch=launch,
        assumed=list(question.assumed),
        engines=engine_entries(answer.lines),
    )


def launch_result(
    answer: Launches,
    request: Mapping[str, object],
    frontier: Sequence[SearchResult] | None = None,
) -> dict[str, Any]:
    """Return the object of `--json`: the best uniform plan and all engine results.

    frontier : best plans by memory budget.
    """
    found: dict[str, Any] = content_of(launch_document(answer, request), whole=True)
    searched = {one.engine.name: one for one in answer.engines}
    # A search of a single engine has no lines.
    lines = found["engines"] or [{"engine": name} for name in searched]
    found["engines"] = [
        line | (_searched(answer, searched[line["engine"]]) if line["engine"] in searched else {})
        for line in lines
    ]
    if frontier is not None:
        found["frontier"] = [content_of(one, whole=True) for one in frontier_entries(frontier)]
    return found


def remedy_entry(remedy: Suggestion) -> dict[str, Any]:
    """Return a suggestion as an object: its options and the plan that fits with them."""
    assessment = remedy.solution.assessment
    return {
        "options": remedy.words,
        "engine": remedy.engine.name,
        "degrees": asdict(degrees_entry(remedy.solution.choice, remedy.world)),
        "tokens_per_s_per_gpu": assessment.tokens_per_s,
        "peak_bytes": round(assessment.fullest.peak_bytes),
        "host_bytes": round(remedy.host_bytes),
    }


def _searched(answer: Launches, one: EngineResult) -> dict[str, Any]:
    """Return the uniform plans of an engine and the statistics of their search."""
    solved = one.solved
    return {
        "stack": one.target.machine.stack.name,
        "reason": one.reason or None,
        "rules": [rule.entry for rule in one.broken] or None,
        "launches": []
        if solved is None
        else [content_of(_launch(answer, one, each), whole=True) for each in solved.solutions],
        "avoided": []
        if one.chosen is None or one.fastest is None
        else list(avoided(one.fastest, one.chosen)),
        "safer": one.safer and content_of(_launch(answer, one, one.safer), whole=True),
        "search": None
        if solved is None
        else {
            "degrees": solved.effort.degrees,
            "launches": solved.effort.choices,
            "complete": solved.complete,
            "gap": solved.gap,
            "timed": solved.effort.timed,
            "counted": solved.effort.counted,
        },
    }


def against_entry(
    answer: Launches, other: PricedRun | None, reason: str, broken: Sequence[Notice] = ()
) -> dict[str, Any]:
    """Return a comparison of another uniform plan with the best one of `answer`, as a JSON object.

    It contains the gain in throughput and the differences by term in seconds per sequence, since
    global batches may differ.

    other : None if there is no such plan.
    reason : why there is none.
    broken : violated rules that exclude it.
    """
    (one,) = answer.engines
    assert one.best is not None, "a launch is shown"
    if other is None:
        rules = [one.entry for one in broken] or None
        found: dict[str, Any] = {"launch": None, "reason": reason, "rules": rules}
        return found | {"gain": None, "terms_s_per_sample": {}}
    return {
        "launch": content_of(_launch(answer, one, other), whole=True),
        "reason": None,
        "rules": None,
        "gain": other.samples_per_s / one.best.samples_per_s - 1.0,
        "terms_s_per_sample": price_of(other.assessment, one.target).term_differences(
            price_of(one.best.assessment, one.target)
        ),
    }


_OF_LAUNCH_NAME = frozenset(
    {*("nodes", "gpus-per-node", "gpus", "seq-length", "global-batch-size", "engine")}
)
"""Options that are part of the name of a uniform plan's file."""


def launch_file_name(answer: Launches, request: Mapping[str, object]) -> Path:
    """Return the file name of a uniform plan, which contains every option that affects the plan.

    request : options as typed.
    """
    question, best = answer.question, answer.best
    assert best is not None, "nothing is written where nothing fits"
    assert best.best is not None, "the fastest engine has a launch"
    choice = best.best.choice
    card = safe_name(question.card.name, most=40)
    parts = (
        safe_name(question.spec.name),
        f"{question.num_nodes}nodes_{question.gpus_per_node}gpus_{card}",
        best.engine.name,
        choice.precision,
        f"seq{question.job.seq}_bsz{choice.global_batch}",
        *filter(None, [options_digest(request, _OF_LAUNCH_NAME)]),
    )
    return Path(f"autopar_plan_{'_'.join(parts)}.json")

"""Conversion of results to documents: the object of `--json` and autopar's plan file.

The documents do not depend on the time or the machine, so equal inputs give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from autopar import __version__
from autopar.answer import EngineBest, Gain
from autopar.command.fields import read_values
from autopar.documents.catalog import (
    hardware_names,
    model_names,
    portable_options,
    portable_path,
    published_name,
)
from autopar.documents.plan import (
    AlternativeEntry,
    BrokenRuleEntry,
    EngineEntry,
    FrontierEntry,
    HardwareEntry,
    MemoryEntry,
    OptionsEntry,
    PlanDocument,
    PredictionEntry,
    ResultDocument,
    RunDocument,
    StatisticsEntry,
    ThroughputEntry,
    VersionsEntry,
    document_text,
    finite,
    plain,
    spread_of,
)
from autopar.documents.strategy import (
    galvatron_document,
    strategy_document,
    strategy_file_name,
    unsaid_by_galvatron,
)
from autopar.errors import InputError
from autopar.rates.measured import HardwareProfile
from autopar.records import (
    replace,
)
from autopar.run.model import ModelSpec
from autopar.run.of_plan import run_of_plan
from autopar.run.plan import Plan, Prediction, violations
from autopar.run.run import Run
from autopar.run.runtime import Overlap
from autopar.training.throughput import Throughput, throughput_entry
from autopar.units import GIB
from search.planning.layered.prediction import Alternative, SearchResult
from search.planning.layered.summary import priced_of_result
from search.planning.session import ConstrainedResult
from search.request.options import SearchOptions
from search.request.profiles import named_card
from search.request.request import ROWS

_NAMED = frozenset(
    {
        *("nodes", "gpus-per-node", "gpus", "memory-constraint", "mixed-precision"),
        *("seq-length", "global-batch-size", "engine", "disable-dp", "disable-tp", "disable-pp"),
        *("disable-sdp", "disable-ckpt", "disable-tp-consec"),
    }
)
"""Options that are part of the name of a strategy file."""
_OF_THE_FILE = frozenset(
    {
        *("top", "frontier", "evaluate", "json", "html", "trace"),
        *("verbose", "price", "goal", "tokens-per-s", "use"),
    }
)
"""Options that affect the output only, not the plan."""

# Names of disabled dimensions in Galvatron's strategy file names, by option.
_OFF_NAMES = (
    ("disable_dp", "dp"),
    ("disable_tp", "tp"),
    ("disable_pp", "pp"),
    ("disable_sdp", "sdp"),
    ("disable_ckpt", "ckpt"),
    ("disable_tp_consec", "tpconsec"),
)


def result_document(
    result: SearchResult,
    frontier: Sequence[SearchResult] | None = None,
    engines: Sequence[EngineBest] = (),
    throughput: Throughput | None = None,
    price: float | None = None,
) -> ResultDocument:
    """Return the object of `--json` for a search of per-layer plans.

    frontier : best plans by memory budget.
    engines : fastest plan of each engine, if all were searched.
    throughput : throughput of the plan.
    price : price of a GPU-hour.
    """
    there: dict[str, Any] = _where_it_applies(result.prediction, synthetic=result.synthetic)
    there |= _throughput(throughput, price)
    if result.infeasibility is not None:
        there["infeasible"] = result.infeasibility
    if frontier is not None:
        there["frontier"] = frontier_entries(frontier)
    if engines:
        there["engines"] = engine_entries(engines)
    return ResultDocument(
        **_head(result.status, result.plan, result.prediction),
        bound_samples_per_s=finite(result.bound_samples_per_s),
        gap=finite(result.gap),
        memory=_memory(result.prediction),
        plan=_strategy(result.plan),
        alternatives=[_alternative(item) for item in result.alternatives],
        defaults_used=list(result.defaults_used),
        search=StatisticsEntry(
            states=result.stats.states, cpu_s=result.stats.cpu_s, wall_s=result.stats.wall_s
        ),
        **there,
    )


def engine_entries(engines: Sequence[EngineBest]) -> list[EngineEntry]:
    """Return the best plan of each engine as document entries."""
    return [
        EngineEntry(
            engine=line.engine,
            samples_per_s=line.samples_per_s,
            plan=_strategy(line.plan),
            launch=None if line.launch is None else dict(line.launch),
            options=line.options or None,
            reason=line.reason or None,
            rules=[BrokenRuleEntry(**one.entry) for one in line.broken] or None,
        )
        for line in engines
    ]


def evaluation_document(
    plan: Plan,
    prediction: Prediction,
    *,
    defaults: Sequence[str] = (),
    synthetic: bool = False,
    estimated: bool = False,
    options: Mapping[str, object] | None = None,
    request: Mapping[str, object] | None = None,
    throughput: Throughput | None = None,
    price: float | None = None,
) -> ResultDocument:
    """Return the object of `--evaluate --json`, with violated rules in `problems`.

    The keys `prediction`, `options` and `request` have the format of autopar's plan file, so that
    tools can read either document.
    """
    return ResultDocument(
        **_head("evaluated", plan, prediction),
        bound_samples_per_s=None,
        gap=None,
        memory=_memory(prediction),
        plan=strategy_document(plan),
        alternatives=[],
        defaults_used=list(defaults),
        search=StatisticsEntry(states=0, cpu_s=0.0, wall_s=0.0),
        problems=list(prediction.problems),
        prediction=PredictionEntry.of(plan, prediction),
        estimated=estimated,
        options=OptionsEntry(**plain(options or {})),
        request=typed_request(request),
        **_where_it_applies(prediction, synthetic=synthetic),
        **_throughput(throughput, price),
    )


def explanation_document(
    baseline: SearchResult,
    pinned: Sequence[tuple[str, ConstrainedResult]],
    gains: Sequence[Gain],
) -> dict[str, Any]:
    """Return the keys that `autopar-explain --json` adds to the prediction of a plan.

    baseline : result of the search without additional rules.
    pinned : (rule, best plan under it).
    gains : gains of more memory or bandwidth.
    """
    return {
        "best": _found(baseline),
        "what_more_would_bring": [one._asdict() for one in gains],
        "why_not": [{"rule": rule, **_against(baseline, found)} for rule, found in pinned],
    }


def _against(baseline: SearchResult, found: ConstrainedResult) -> dict[str, Any]:
    """Return the best plan under a rule, or why there is none, as a JSON object.

    Differences to the plan of `baseline` are in seconds per sample by term.
    """
    result, terms = found.result, dict[str, float]()
    other = None if result is None else priced_of_result(result)
    best = priced_of_result(baseline)
    if other is not None and best is not None:
        more = other.price.term_differences(best.price)
        # Sorted by difference, the largest slowdown first.
        terms = dict(sorted(more.items(), key=lambda item: -item[1]))
    return {
        **({"status": "infeasible"} if result is None else _found(result)),
        "reason": found.reason,
        "left_out": list(found.left_out),
        "terms_s_per_sample": terms,
    }


def _found(result: SearchResult) -> dict[str, Any]:
    """Return the plan and throughput of a search, or why it is infeasible."""
    prediction = result.prediction
    return {
        "status": result.status,
        "plan": None if result.plan is None else strategy_document(result.plan),
        "step_time_s": None if prediction is None else prediction.step_time_s,
        "samples_per_s": None if prediction is None else prediction.samples_per_s,
        "infeasible": plain(result.infeasibility),
    }


def frontier_entries(results: Sequence[SearchResult]) -> list[FrontierEntry]:
    """Return the frontier as entries with budget, throughput and plan."""
    return [
        FrontierEntry(
            memory_constraint_bytes=finite(_budget(result)),
            samples_per_s=finite(result.prediction.samples_per_s),
            step_time_s=finite(result.prediction.step_time_s),
            **_frontier_plan(result),
        )
        for result in results
        if result.plan is not None and result.prediction is not None
    ]


def _frontier_plan(result: SearchResult) -> dict[str, Any]:
    """Return the plan of a result: a strategy, or engine and degrees of a uniform plan."""
    from search.planning.uniform.files import degrees_entry
    from search.planning.uniform.result import UniformSearchResult

    if not isinstance(result, UniformSearchResult):
        return {"plan": _strategy(result.plan)}
    one, best = result.found.best, result.found.chosen
    assert one is not None, "there is a plan"
    assert best is not None, "its engine has a plan"
    degrees = asdict(degrees_entry(best.choice, result.found.question.job.world))
    return {"plan": None, "engine": one.engine.name, "launch": degrees}


def plan_document(
    result: SearchResult,
    *,
    request: Mapping[str, object] | None = None,
    engine: str | None = None,
    engines: Sequence[EngineBest] = (),
    throughput: Throughput | None = None,
    path: Path | None = None,
) -> PlanDocument:
    """Return autopar's plan file for a result.

    request : options as typed, so that `autopar-explain` can repeat the search.
    engine : engine whose plans were searched; recorded in the options.
    engines : fastest plan of each engine, if several were searched.
    throughput : throughput of the plan.
    path : location of the plan file, to which input paths are made relative.
    """
    sources = [
        replace(source, path=portable_path(source.path, path)) if path is not None else source
        for source in result.sources
    ]
    plan, prediction = result.plan, result.prediction
    searched = {} if engine is None else {"engine": engine}
    # A search of one engine has no key `engines`.
    there: dict[str, Any] = {"engines": engine_entries(engines)} if engines else {}
    there |= _throughput(throughput, None)
    return PlanDocument(
        plan=_strategy(plan),
        **_head(result.status, plan, prediction),
        bound_samples_per_s=finite(result.bound_samples_per_s),
        gap=finite(result.gap),
        prediction=None
        if plan is None or prediction is None
        else PredictionEntry.of(plan, prediction),
        alternatives=[_alternative(item) for item in result.alternatives],
        infeasibility=result.infeasibility,
        defaults_used=list(result.defaults_used),
        notes=list(result.notes),
        estimated=result.estimated,
        synthetic=result.synthetic,
        inputs=sources,
        options=OptionsEntry(**plain({**result.options, **searched})),
        request=typed_request(request),
        **there,
        versions=_versions(),
    )


# --------------------------------------------------------------------------------------------------
# Names of files.


def options_digest(request: Mapping[str, object], named: Collection[str]) -> str:
    """Return a digest (8 hex digits) of the options that affect a plan, for its file name.

    Options with default values, shipped models and cards, and `named` are ignored. Empty if no
    other option is given.

    request : options as typed.
    named : options that the file name contains in words.
    """
    rows = {row.name: row for row in ROWS}
    left = {}
    for name, value in request.items():
        row = rows.get(name)
        if row is None or name in named or name in _OF_THE_FILE:
            continue
        chosen = read_values([row], {name: value}).get(name, value)
        if chosen == row.default or (name, chosen) == ("site", "none"):
            continue
        if _says_itself(name, str(value)):
            continue
        # One path has many spellings.
        left[name] = os.path.normpath(chosen) if isinstance(chosen, str) else repr(chosen)
    if not left:
        return ""
    text = json.dumps(left, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:8]


def _says_itself(option: str, value: str) -> bool:
    """Return True if a value names a shipped model or card rather than a file of the user."""
    if option == "model":
        return value in model_names() or published_name(value) is not None
    if option != "hardware":
        return False
    card = named_card(value)
    return value in hardware_names() or (card is not None and not Path(_card_of(card)).is_file())


def _card_of(text: str) -> str:
    return text.rpartition(":")[0]


def output_paths(
    *,
    spec: ModelSpec,
    options: SearchOptions,
    hardware: HardwareProfile,
    config_path: str,
    request: Mapping[str, object],
    engine: str | None = None,
) -> tuple[Path, Path]:
    """Return the paths of the strategy file and of autopar's plan file next to it.

    config_path : folder, in which Galvatron's file name is used, or a file ending in `.json`.
    request, engine : see `plan_document`.
    """
    target = Path(config_path)
    # A folder may have any name, even x.json.
    if target.suffix != ".json" or target.is_dir():
        target = target / strategy_file_name(
            model_name=spec.name,
            num_nodes=hardware.num_nodes,
            gpus_per_node=hardware.gpus_per_node,
            memory_gib=options.memory_constraint_bytes / GIB,
            precision=options.mixed_precision,
            hardware_name=hardware.name,
            seq_lengths=[layer.seq_length for layer in spec.layers],
            settle_bsz=options.settle_bsz,
            engine=None if engine == "none" else engine,
            disabled=[name for field, name in _OFF_NAMES if getattr(options, field)],
            digest=options_digest(request, _NAMED),
        )
    stem = target.name.removeprefix("galvatron_config_")
    return target, target.with_name(f"autopar_plan_{stem}")


def output_texts(
    result: SearchResult,
    paths: tuple[Path, Path],
    *,
    spec: ModelSpec,
    hardware: HardwareEntry,
    options: SearchOptions,
    request: Mapping[str, object],
    engine: str | None = None,
    engines: Sequence[EngineBest] = (),
    throughput: Throughput | None = None,
) -> dict[Path, str]:
    """Return path -> text of Galvatron's strategy file and autopar's plan file.

    Empty without a plan. The strategy file is omitted for plans that its format does not support.
    The plan file contains the run, or only the strategy if some model sizes are unknown.

    paths : result of `output_paths`. Others as in `plan_document`.
    """
    if result.plan is None:
        return {}
    problems = violations(result.plan, spec, sequence_parallel=options.sequence_parallel)
    # The planner returns only legal plans.
    assert not problems, problems
    asked = portable_options(request, paths[1])
    plan = plan_document(
        result,
        request=asked,
        engine=engine,
        engines=engines,
        throughput=throughput,
        path=paths[1],
    )
    run = _run_of_plan(result.plan, spec, hardware.card, options, engine)
    if run is None:
        own = document_text(plan.content())
    else:
        named = plan.given - {"format", "version", "plan"}
        figures = {name: getattr(plan, name) for name in named}
        own = RunDocument.of(run, hardware, figures).text()
    if unsaid_by_galvatron(result.plan):
        return {paths[1]: own}
    return {paths[0]: document_text(galvatron_document(result.plan)), paths[1]: own}


def _run_of_plan(
    plan: Plan, spec: ModelSpec, gpu: str, options: SearchOptions, engine: str | None
) -> Run | None:
    """Return the run of a per-layer plan; None if the profiles do not contain all model sizes."""
    try:
        return run_of_plan(
            plan,
            spec,
            engine=engine or "none",
            gpu=gpu,
            sequence_parallel=options.sequence_parallel,
            precision=options.mixed_precision,
            overlap=Overlap(tensor=options.tp_overlap, gradients=options.async_grad_reduce),
            keeper=options.memory_of or "galvatron",
            fp32_gradients=options.fp32_gradients,
            async_grad_reduce=options.async_grad_reduce,
        )
    except InputError:
        return None


def _head(status: str, plan: Plan | None, prediction: Prediction | None) -> dict[str, Any]:
    return {
        "status": status,
        "legal": prediction.legal if prediction is not None else None,
        "fits": prediction.fits if prediction is not None else plan is not None,
        "step_time_s": finite(prediction.step_time_s) if prediction is not None else None,
        "replay_s": finite(prediction.replay_s) if prediction is not None else None,
        "samples_per_s": finite(prediction.samples_per_s) if prediction is not None else None,
    }


def _where_it_applies(prediction: Prediction | None, *, synthetic: bool) -> dict[str, Any]:
    """Return the optional keys: interval of the step time, and `synthetic` for such inputs."""
    document: dict[str, Any] = {}
    if prediction is not None and prediction.step_time_interval_s is not None:
        document["step_time_interval_s"] = plain(prediction.step_time_interval_s)
        document |= spread_of(prediction)
    if synthetic:
        document["synthetic"] = True
    return document


def _throughput(found: Throughput | None, price: float | None) -> dict[str, Any]:
    """Return the key `throughput`; empty without a throughput."""
    if found is None:
        return {}
    entry: dict[str, Any] = throughput_entry(found, price)
    return {"throughput": ThroughputEntry(**entry)}


def _strategy(plan: Plan | None) -> dict[str, object] | None:
    return None if plan is None else strategy_document(plan)


def _memory(prediction: Prediction | None) -> list[MemoryEntry]:
    return [
        MemoryEntry(
            stage=stage.stage,
            allocated_bytes=int(stage.allocated_bytes),
            reserved_bytes=int(stage.reserved_bytes),
            budget_bytes=int(stage.budget_bytes),
            odds_of_oom=finite(stage.odds_of_oom),
        )
        for stage in (prediction.stages if prediction is not None else ())
    ]


def _alternative(alternative: Alternative) -> AlternativeEntry:
    share = alternative.probability_faster
    likely = {} if share is None else {"probability_faster": finite(share)}
    return AlternativeEntry(
        differs_by=alternative.differs_by,
        step_time_s=finite(alternative.step_time_s),
        samples_per_s=finite(alternative.samples_per_s),
        bound_samples_per_s=finite(alternative.bound_samples_per_s),
        **likely,
        plan=strategy_document(alternative.plan),
    )


def typed_request(request: Mapping[str, object] | None) -> dict[str, Any]:
    # Sorted by name, so that the order of typing does not matter.
    return {key: plain(value) for key, value in sorted((request or {}).items())}


def _budget(result: SearchResult) -> float:
    value = result.options.get("memory_constraint_bytes", math.nan)
    return float(value) if isinstance(value, int | float) else math.nan


def _versions() -> VersionsEntry:
    """Return the versions of autopar and its compiled core that computed a plan.

    Python and library versions are not included: they do not affect a plan, and files would differ
    between environments.
    """
    # Imported here because it loads the compiled core, which readers of results do not need.
    from search.planning.layered.core import ABI_VERSION

    return VersionsEntry(autopar=__version__, core_interface=ABI_VERSION)

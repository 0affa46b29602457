"""Turns results into documents: the object of `--json` and our own plan file.

Nothing here depends on the clock, on the number of threads or on where the program runs, so the
same inputs give the same bytes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from autopar.documents.plan import (
    PLAN_FILE_FORMAT,
    PLAN_FILE_VERSION,
    strategy_document,
    strategy_file_name,
    write_document,
    write_strategy,
)
from autopar.model import ModelSpec
from autopar.plan import Plan, Prediction, StagePrediction, violations
from search.options import SearchOptions
from search.planner.result import Alternative, SearchResult

__all__ = [
    "evaluation_document",
    "frontier_document",
    "json_document",
    "plan_document",
    "write_outputs",
    "write_plan_file",
]

_NOT_KEPT = frozenset({"threads", "time_limit_s"})
# Names of dimensions in the documented file name, by the option that disables them.
_OFF_NAMES = (
    ("disable_dp", "dp"),
    ("disable_tp", "tp"),
    ("disable_pp", "pp"),
    ("disable_sdp", "sdp"),
    ("disable_ckpt", "ckpt"),
    ("disable_tp_consec", "tpconsec"),
)


def json_document(result: SearchResult) -> dict[str, object]:
    """Return the object that `--json` prints for a search."""
    prediction = result.prediction
    document = _head(result.status, result.plan, prediction)
    document |= {
        "bound_samples_per_s": _number(result.bound_samples_per_s),
        "gap": _number(result.gap),
        "memory": _memory(prediction),
        "plan": strategy_document(result.plan) if result.plan is not None else None,
        "alternatives": [_alternative(item) for item in result.alternatives],
        "defaults_used": list(result.defaults_used),
        "search": {
            "states": result.stats.states,
            "cpu_s": result.stats.cpu_s,
            "wall_s": result.stats.wall_s,
        },
    }
    document |= _where_it_applies(prediction, synthetic=result.synthetic)
    if result.infeasibility is not None:
        document["infeasible"] = _plain(result.infeasibility)
    return document


def evaluation_document(
    plan: Plan,
    prediction: Prediction,
    *,
    defaults: Sequence[str] = (),
    synthetic: bool = False,
    estimated: bool = False,
    options: Mapping[str, object] | None = None,
    request: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the object that `--evaluate --json` prints; `problems` holds the arithmetic.

    `prediction`, `options` and `request` are as in our plan file, so that whoever checks a plan
    finds in either what was predicted, and of what.
    """
    document = _head("evaluated", plan, prediction)
    document |= {
        "bound_samples_per_s": None,
        "gap": None,
        "memory": _memory(prediction),
        "plan": strategy_document(plan),
        "alternatives": [],
        "defaults_used": list(defaults),
        "search": {"states": 0, "cpu_s": 0.0, "wall_s": 0.0},
        "problems": list(prediction.problems),
        "prediction": _prediction(plan, prediction),
        "estimated": estimated,
        "options": _kept(options or {}),
        "request": {key: _plain(value) for key, value in sorted((request or {}).items())},
    }
    return document | _where_it_applies(prediction, synthetic=synthetic)


def frontier_document(results: list[SearchResult]) -> list[object]:
    """Return the frontier as a list of (budget, throughput, plan) objects."""
    return [
        {
            "memory_constraint_bytes": _number(_budget(result)),
            "samples_per_s": _number(result.prediction.samples_per_s),
            "step_time_s": _number(result.prediction.step_time_s),
            "plan": strategy_document(result.plan),
        }
        for result in results
        if result.plan is not None and result.prediction is not None
    ]


def plan_document(
    result: SearchResult, *, request: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return our own plan file of a result.

    Parameters
    ----------
    request : options as typed, so that `autopar-explain` can ask the same question again.
    """
    prediction = result.prediction
    document: dict[str, object] = {"format": PLAN_FILE_FORMAT, "version": PLAN_FILE_VERSION}
    document |= {
        "plan": strategy_document(result.plan) if result.plan is not None else None,
        **_head(result.status, result.plan, prediction),
        "bound_samples_per_s": _number(result.bound_samples_per_s),
        "gap": _number(result.gap),
        "prediction": _prediction(result.plan, prediction),
        "alternatives": [_alternative(item) for item in result.alternatives],
        "infeasibility": _plain(result.infeasibility),
        "defaults_used": list(result.defaults_used),
        "notes": list(result.notes),
        "estimated": result.estimated,
        "synthetic": result.synthetic,
        "inputs": [_plain(source) for source in result.sources],
        "options": _kept(result.options),
        "request": {key: _plain(value) for key, value in sorted((request or {}).items())},
        "versions": _versions(),
    }
    return document


def write_plan_file(
    path: Path | str, result: SearchResult, *, request: Mapping[str, object] | None = None
) -> None:
    """Write our own plan file of a result, atomically and byte for byte reproducibly."""
    write_document(path, plan_document(result, request=request))


def write_outputs(
    result: SearchResult,
    *,
    spec: ModelSpec,
    options: SearchOptions,
    num_nodes: int,
    gpus_per_node: int,
    config_path: str,
    request: Mapping[str, object],
) -> tuple[Path, ...]:
    """Write the strategy file and our plan file beside it, and return their paths.

    `config_path` is a folder, where the documented name is used, or a file ending in `.json`.
    An infeasible result writes nothing.
    """
    if result.plan is None:
        return ()
    target = Path(config_path)
    if target.suffix != ".json" or target.is_dir():
        target = target / strategy_file_name(
            model_name=spec.name,
            num_nodes=num_nodes,
            gpus_per_node=gpus_per_node,
            memory_gib=options.memory_constraint_bytes / 2**30,
            precision=options.mixed_precision,
            settle_bsz=options.settle_bsz,
            disabled=[name for field, name in _OFF_NAMES if getattr(options, field)],
        )
    problems = violations(result.plan, spec, sequence_parallel=options.sequence_parallel)
    assert not problems, problems
    write_strategy(result.plan, target)
    stem = target.name.removeprefix("galvatron_config_")
    own = target.with_name(f"autopar_plan_{stem}")
    write_plan_file(own, result, request=request)
    return (target, own)


def _head(status: str, plan: Plan | None, prediction: Prediction | None) -> dict[str, object]:
    return {
        "status": status,
        "legal": prediction.legal if prediction is not None else None,
        "fits": prediction.fits if prediction is not None else plan is not None,
        "step_time_s": _number(prediction.step_time_s) if prediction is not None else None,
        "replay_s": _number(prediction.replay_s) if prediction is not None else None,
        "samples_per_s": _number(prediction.samples_per_s) if prediction is not None else None,
    }


def _where_it_applies(prediction: Prediction | None, *, synthetic: bool) -> dict[str, object]:
    """Return the spread of the step time where it is known, and that inputs are synthetic."""
    document: dict[str, object] = {}
    if prediction is not None and prediction.step_time_interval_s is not None:
        document["step_time_interval_s"] = _plain(prediction.step_time_interval_s)
        document |= _computation(prediction)
    if synthetic:
        document["synthetic"] = True
    return document


def _computation(prediction: Prediction) -> dict[str, object]:
    """Return what the spread of computation adds, nothing where it is unknown."""
    if "computation" not in prediction.interval_of:
        return {}
    return {
        "interval_of": list(prediction.interval_of),
        "widest_cell": _plain(prediction.widest_cell),
    }


def _memory(prediction: Prediction | None) -> list[object]:
    return [
        {
            "stage": stage.stage,
            "allocated_bytes": int(stage.allocated_bytes),
            "reserved_bytes": int(stage.reserved_bytes),
            "budget_bytes": int(stage.budget_bytes),
        }
        for stage in (prediction.stages if prediction is not None else ())
    ]


def _alternative(alternative: Alternative) -> dict[str, object]:
    share = alternative.probability_faster
    likely = {} if share is None else {"probability_faster": _number(share)}
    return {
        "differs_by": alternative.differs_by,
        "step_time_s": _number(alternative.step_time_s),
        "samples_per_s": _number(alternative.samples_per_s),
        "bound_samples_per_s": _number(alternative.bound_samples_per_s),
        **likely,
        "plan": strategy_document(alternative.plan),
    }


def _prediction(plan: Plan | None, prediction: Prediction | None) -> object:
    if plan is None or prediction is None:
        return None
    ranks = plan.world_size // plan.num_stages
    return {
        "step_time_interval_s": _plain(prediction.step_time_interval_s),
        **_computation(prediction),
        "waterfall_s": _plain(prediction.waterfall_s),
        "problems": list(prediction.problems),
        "stages": [_stage(stage, ranks) for stage in prediction.stages],
    }


def _kept(options: Mapping[str, object]) -> dict[str, object]:
    return {k: _plain(value) for k, value in sorted(options.items()) if k not in _NOT_KEPT}


def _stage(stage: StagePrediction, ranks: int) -> dict[str, object]:
    """Return a stage; its ranks are alike, so one entry stands for all of them."""
    content = _plain(stage)
    assert isinstance(content, dict)
    first = stage.stage * ranks
    interval = [int(stage.allocated_bytes), int(stage.reserved_bytes)]
    return {"ranks": [first, first + ranks - 1], "memory_interval_bytes": interval, **content}


def _budget(result: SearchResult) -> float:
    value = result.options.get("memory_constraint_bytes", math.nan)
    return float(value) if isinstance(value, int | float) else math.nan


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _plain(value: object) -> object:
    """Return a value as JSON has it: dataclasses as objects, what is not finite as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return _number(value)
    if hasattr(value, "item"):  # numpy scalars
        return _plain(value.item())
    return str(value)


def _versions() -> dict[str, object]:
    """Return what a plan was computed with; the version of the file's format stands at its top.

    Interpreter and libraries are left out: they do not shape a plan, and its file would differ
    between two environments of one machine.
    """
    # Loads the compiled core, which no reader of results needs.
    from search.planner.core import ABI_VERSION

    try:
        release = metadata.version("autopar")
    except metadata.PackageNotFoundError:  # run from a source tree
        release = "unknown"
    return {"autopar": release, "core_interface": ABI_VERSION}

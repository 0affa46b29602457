"""The JSON documents of `profile-plan`: one format, with the keys of the mode that wrote it."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.errors import OptionError
from autopar.jsonio import write_json
from autopar.plan_files import strategy_document
from profiler.plan.job import DryRunRank, RunResult
from profiler.plan.options import Mode
from profiler.plan.prediction import Prediction
from profiler.plan.prediction_parts import book, gradient_note
from profiler.plan.question import Question
from profiler.plan.static import Held, StageArithmetic, StaticReport, examine
from profiler.plan.verdict import Verdict

__all__ = [
    "FORMAT",
    "VERSION",
    "dry_run_document",
    "illegal_document",
    "run_document",
    "static_document",
    "write_result",
]

FORMAT = "autopar-plan-check"
# 1: first version.
VERSION = 1


def illegal_document(question: Question, mode: Mode) -> dict[str, object]:
    """Return the document of a plan that cannot run."""
    return {**_head(question, mode), "legal": False, "problems": list(question.problems)}


def static_document(question: Question, report: StaticReport) -> dict[str, object]:
    """Return the document of `--mode static`."""
    return {
        **_head(question, "static"),
        "legal": True,
        "problems": [],
        "executor": {
            "runs": report.obstacle is None,
            "obstacle": report.obstacle,
            "mesh": None if report.mesh is None else list(report.mesh),
        },
        "bubble_share": report.bubble_share,
        "vocab": {"label": report.vocab_label, "samples_per_microbatch": report.vocab_samples},
        "stages": [_stage(stage) for stage in report.stages],
        "predicted": _predicted_memory(question.prediction),
    }


def dry_run_document(question: Question, ranks: Sequence[DryRunRank]) -> dict[str, object]:
    """Return the document of `--mode dryrun`; every rank has its prediction beside it."""
    job, prediction = question.job, question.prediction
    predicted = _predicted_memory(prediction)
    stages = examine(job).stages
    return {
        **_head(question, "dryrun"),
        "ranks": [
            {
                **{key: _plain(value) for key, value in vars(rank).items()},
                "compared": [
                    dict(vars(part))
                    for part in book(
                        job,
                        rank,
                        prediction,
                        kept_bytes=stages[rank.stage].held.gathered_bytes,
                    )
                ],
                "predicted": None if predicted is None else predicted[rank.stage],
            }
            for rank in ranks
        ],
    }


def run_document(
    question: Question, result: RunResult, verdict: Verdict | None
) -> dict[str, object]:
    """Return the document of `--mode run`: a value per step, and the prediction of the same keys.

    verdict : of the comparison with the reference; None where there was none.
    """
    return {
        **_head(question, "run"),
        **{key: _plain(value) for key, value in vars(result).items() if key != "notes"},
        "predicted": _predicted_run(question),
        "reference": None
        if verdict is None
        else {
            "matches": verdict.matches,
            "tolerance": dict(verdict.tolerance),
            "largest_difference": {k: _plain(v) for k, v in verdict.largest.items()},
        },
        "notes": [*_notes(question), *result.notes],
    }


def write_result(path: str, document: Mapping[str, Any]) -> None:
    """Write the document of `--json` to a file, atomically, or to stdout for `-`."""
    if path == "-":
        sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
        return
    try:
        write_json(Path(path), dict(document), number_rows=True)
    except OSError as error:
        raise OptionError(
            f"--json {path}: the file cannot be written ({error.strerror or error}); choose "
            "another path, or - for stdout"
        ) from None


# --- parts ---------------------------------------------------------------------------------


def _head(question: Question, mode: Mode) -> dict[str, object]:
    job = question.job
    return {
        "format": FORMAT,
        "version": VERSION,
        "mode": mode,
        "source": question.source,
        "model": job.spec.name,
        "seq_length": [layer.seq_length for layer in job.spec.layers],
        "precision": job.precision,
        "sequence_parallel": job.sequence_parallel,
        "async_grad_reduce": job.async_grad_reduce,
        "seed": job.seed,
        "plan": strategy_document(job.plan),
        "notes": _notes(question),
    }


def _notes(question: Question) -> list[str]:
    """Return what was assumed, and what the prediction of a legal plan's gradients leaves out."""
    note = None if question.problems else gradient_note(question.job, question.prediction)
    return [*question.notes, *([] if note is None else [note])]


def _stage(stage: StageArithmetic) -> dict[str, object]:
    return {
        "stage": stage.stage,
        "ranks": list(stage.ranks),
        "layers": list(stage.layers),
        "microbatches_in_flight": stage.in_flight,
        **_held(stage.held),
        "vocab": _held(stage.vocab),
        "runs": [
            {
                "layers": [run.first_layer, run.last_layer],
                "label": run.label,
                "tp": run.strategy.tp,
                "dp": run.data_degree,
                "tensor_axes": list(run.tensor_axes),
                "samples_per_microbatch": run.samples,
                **_held(run.held),
            }
            for run in stage.runs
        ],
    }


def _held(held: Held) -> dict[str, object]:
    return {**vars(held), "state_bytes": held.state_bytes}


def _predicted_memory(prediction: Prediction | None) -> list[object] | None:
    """Return predicted memory by stage."""
    if prediction is None or not prediction.stages:
        return None
    return [
        {"allocated_bytes": stage.allocated_bytes, "memory_bytes": dict(stage.memory_bytes)}
        for stage in prediction.stages
    ]


def _predicted_run(question: Question) -> dict[str, object] | None:
    """Return what was predicted of the keys of a run; null where the file does not say it."""
    prediction, plan = question.prediction, question.job.plan
    if prediction is None:
        return None
    stages = prediction.stages
    times = [s.step_times(plan.num_microbatches) for s in stages]
    each = plan.world_size // plan.num_stages
    return {
        "step_time_s": prediction.step_time_s,
        "step_time_interval_s": None
        if prediction.interval_s is None
        else list(prediction.interval_s),
        "stage_time_s": times if times and None not in times else None,
        "peak_bytes": [s.tensor_bytes for s in stages for _ in range(each)] or None,
        "rests_on": prediction.basis,
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; what is not finite is null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

"""The JSON document of `autopar-verify`; docs/verify.md explains its keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar import __version__
from autopar.verify.calibrate import Calibrated, Subject
from autopar.verify.comparison import Comparison, Row
from autopar.verify.options import VerifyOptions

__all__ = ["FORMAT", "VERSION", "verify_document"]

FORMAT = "autopar-verify"
# 1: first version.
VERSION = 1


def verify_document(
    options: VerifyOptions,
    subject: Subject,
    comparison: Comparison,
    calibrated: Calibrated | None,
    calibration_path: Path | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return what was predicted and measured, and what follows; times in s, memory in bytes."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "tool": f"autopar {__version__}",
        "hardware": subject.hardware,
        "world_size": subject.world_size,
        "model": subject.model,
        "num_layers": subject.num_layers,
        "seq_length": list(subject.seq_length),
        "precision": subject.precision,
        "global_batch": options.batch,
        "num_rounds": options.repeats,
        "steps_per_round": options.steps,
        "summary": _summary(comparison),
        "plans": [_row(row) for row in comparison.rows],
        "calibration": None if calibrated is None else _calibration(calibrated, calibration_path),
        "inputs": [
            {"role": role, "path": path, "sha256": digest} for role, path, digest in subject.inputs
        ],
        "notes": list(notes),
    }


def _summary(comparison: Comparison) -> dict[str, Any]:
    interval = comparison.spearman_interval
    return {
        "num_plans": len(comparison.rows),
        "median_error": comparison.median_error,
        "median_error_interval": list(comparison.median_error_interval),
        "worst_error": comparison.worst_error,
        "spearman": comparison.spearman,
        "spearman_interval": None if interval is None else list(interval),
        "best_predicted": comparison.best_predicted,
        "best_measured": comparison.best_measured,
        "regret": comparison.regret,
        "regret_interval": list(comparison.regret_interval),
        "measured_spread": comparison.spread,
        "measured_noise": comparison.noise,
        "median_memory_error": comparison.median_memory_error,
    }


def _row(row: Row) -> dict[str, Any]:
    plan = row.plan
    return {
        "name": plan.name,
        "label": plan.label,
        "chosen": plan.chosen,
        "predicted_s": plan.predicted_s,
        "predicted_interval_s": None if plan.interval_s is None else list(plan.interval_s),
        "measured_s": row.measured_s,
        "measured_interval_s": list(row.interval_s),
        "error": row.error,
        "predicted_rank": row.predicted_rank,
        "measured_rank": row.measured_rank,
        "predicted_bytes": list(plan.predicted_bytes),
        "peak_bytes": list(plan.peak_bytes) or None,
        "peak_source": plan.peak_source,
        "memory_error": row.memory_error,
        "rounds_s": [list(run.step_s) for run in plan.rounds],
        "plan": dict(plan.strategy),
    }


def _calibration(found: Calibrated, path: Path | None) -> dict[str, Any]:
    return {
        "path": None if path is None else str(path),
        "computation": found.times.computation,
        "communication": found.times.communication,
        "fixed_s": found.times.fixed_s,
        "memory": found.memory,
        "median_error_before": found.error(found.before_s),
        "median_error_after": found.error(found.after_s),
        "median_error_left_out": found.error(found.left_out_s),
        "advised": found.is_advised,
    }

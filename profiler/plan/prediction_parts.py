"""Predicted memory and counted memory booked alike, so that their parts can be compared.

A plan file books by what stays and what passes; a dry run by what tensors are for. Here both say:
weights and optimizer (with the whole weights that ZeRO-2 keeps during a step), gradients,
activations, and what is there for a moment.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.units import format_bytes
from profiler.plan.counts import held
from profiler.plan.job import DryRunRank, PlanJob
from profiler.plan.prediction import PredictedStage, Prediction
from profiler.plan.static import examine, stage_weights

__all__ = ["AT_THE_PEAK", "BookedPart", "book", "gradient_note"]

AT_THE_PEAK = ("activations", "passing")
"""Parts that mean the same only together: what the loss, or the layer at its peak, has saved passes
in a prediction and is an activation in a count."""


@dataclass(frozen=True, kw_only=True)
class BookedPart:
    """One part of a rank's memory at the peak, in bytes."""

    name: str
    predicted_bytes: int | None
    """None without a prediction."""
    counted_bytes: int


def book(
    job: PlanJob, rank: DryRunRank, prediction: Prediction | None, *, kept_bytes: int
) -> tuple[BookedPart, ...]:
    """Return the parts of a rank's peak, which sum to it, and the prediction of each.

    kept_bytes : whole weights that ZeRO-2 keeps on the stage (`Held.gathered_bytes`). Predicted
        communicators and receive buffers (`fixed`) are in no part.
    """
    parts = rank.peak_parts
    gathered = parts["gathered parameters"]
    kept = min(kept_bytes, gathered)
    counted = {
        "weights and optimizer": parts["parameters"] + parts["optimizer"] + kept,
        "gradients": parts["gradients"],
        "activations": parts["activations"],
        "passing": gathered - kept + parts["other"],
    }
    predicted: dict[str, int] = {}
    if prediction is not None and prediction.stages:
        stage = prediction.stages[rank.stage]
        if stage.memory_bytes:
            share = _gradient_share(job, rank.stage, fp32_gradients=bool(prediction.fp32_gradients))
            predicted = _predicted(stage, share)
    return tuple(
        BookedPart(name=name, predicted_bytes=predicted.get(name), counted_bytes=size)
        for name, size in counted.items()
    )


def gradient_note(job: PlanJob, prediction: Prediction | None) -> str | None:
    """Return in one sentence that gradients take twice what is predicted, with the figure.

    None where they do not: FSDP2 sums the gradients of several micro-batches in fp32, and a
    prediction in bf16 without `--fp32-gradients` takes 2 bytes for them. None also where the file
    does not say which it is.
    """
    if prediction is None or not prediction.stages or prediction.fp32_gradients is not False:
        return None
    if job.precision != "bf16":
        return None
    fullest = max(examine(job).stages, key=lambda stage: stage.held.accumulated_bytes)
    accumulated = fullest.held.accumulated_bytes
    if not accumulated:
        return None
    return (
        f"FSDP2 keeps {format_bytes(accumulated)} of whole fp32 gradients on stage "
        f"{fullest.stage} until the last micro-batch, and the prediction has "
        f"{format_bytes(accumulated / 2)}, 2 bytes each: what is predicted to fit may not fit in "
        "engines on FSDP2; `autopar-search --fp32-gradients` predicts 4"
    )


def _predicted(stage: PredictedStage, gradient_share: float) -> dict[str, int]:
    of = stage.memory_bytes
    states = of.get("states", 0) + of.get("vocab_states", 0)
    gradients = round(states * gradient_share)
    return {
        "weights and optimizer": states - gradients,
        "gradients": gradients,
        "activations": of.get("activations", 0) + of.get("vocab_activations", 0),
        "passing": of.get("transient", 0) + of.get("shared", 0),
    }


def _gradient_share(job: PlanJob, stage: int, *, fp32_gradients: bool) -> float:
    """Return the share of gradients in the predicted states of a stage.

    Of the planner's recipe, w + g + o bytes of a parameter: 4 + 4 + 8 in fp32, else 2 + 2 + 12 (g 4
    with fp32 gradients); ZeRO-2 divides o and ZeRO-3 also w, both g where it is reduced in every
    micro-batch.
    """
    wide = job.precision == "fp32"
    weight, optimizer = (4, 8) if wide else (2, 12)
    gradient = 4 if wide or fp32_gradients else 2
    stay_whole = job.async_grad_reduce and job.plan.num_microbatches > 1
    total = gradients = 0.0
    for shapes, zero, ranks in stage_weights(job, stage):
        count = held(shapes)
        pieces = 1 if zero == "ddp" else ranks
        own = count * gradient / (1 if stay_whole else pieces)
        gradients += own
        total += own + count * weight / (ranks if zero == "zero3" else 1)
        total += count * optimizer / pieces
    return gradients / total if total else 0.0

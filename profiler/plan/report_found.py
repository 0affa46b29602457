"""What `profile-plan` found: memory counted or measured, times and losses, beside predictions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from rich.console import Console

from autopar.units import format_bytes, format_count, format_seconds
from profiler.plan.job import DryRunRank, RunResult
from profiler.plan.prediction import PredictedStage, Prediction
from profiler.plan.prediction_parts import AT_THE_PEAK, BookedPart, book, gradient_note
from profiler.plan.question import Question
from profiler.plan.report_parts import (
    difference,
    no_prediction,
    optional_bytes,
    optional_seconds,
    print_some,
)
from profiler.plan.static import examine
from profiler.plan.verdict import Verdict
from profiler.show.frame import print_heading, print_line, print_table

__all__ = ["show_dry_run", "show_run"]

_MOST_STAGES = 24
"""Stages whose times are listed; --json has all."""


def show_dry_run(console: Console, question: Question, ranks: Sequence[DryRunRank]) -> None:
    """Print what ranks would hold, and the prediction beside it."""
    print_heading(console, "counted on tensors without contents")
    rows = [
        [
            str(rank.rank),
            str(rank.stage),
            str(rank.num_parameters),
            *(
                format_bytes(n)
                for n in (
                    rank.parameter_bytes,
                    rank.gradient_bytes,
                    rank.optimizer_bytes,
                    rank.peak_bytes,
                )
            ),
        ]
        for rank in ranks
    ]
    columns = ["rank", "stage", "parameters", "weights", "gradients", "optimizer", "peak"]
    print_some(console, columns, rows, left=2)
    prediction = question.prediction
    print_heading(console, "memory at the peak")
    stages = prediction.stages if prediction is not None else ()
    arithmetic = examine(question.job).stages
    rows = []
    for rank in ranks:
        kept = arithmetic[rank.stage].held.gathered_bytes
        parts = book(question.job, rank, prediction, kept_bytes=kept)
        rows += _memory_rows(rank, parts, stages[rank.stage] if stages else None)
    print_some(console, ["rank", "what", "predicted", "counted", "difference"], rows, left=2)
    footnotes = [
        "gradients: that are there at that moment",
        "passing: gathered weights, buffers and temporaries, predicted as the most of any moment",
        "compared together: what the loss has saved is predicted as passing, counted as kept",
    ]
    if any(stage.held.gathered_bytes for stage in arithmetic):
        footnotes.insert(0, "weights: with the whole ones that ZeRO-2 keeps")
    print_line(console, "; ".join(footnotes), style="dim")
    if not stages:
        print_line(console, no_prediction("memory"), style="dim")
        return
    print_line(
        console,
        "predicted communicators and receive buffers, and the context of the device, are not "
        "counted, nor is what an allocator wastes",
        style="dim",
    )
    note = gradient_note(question.job, prediction)
    if note is not None:
        print_line(console, note, style="yellow")


def show_run(
    console: Console, question: Question, result: RunResult, verdict: Verdict | None
) -> None:
    """Print losses against the reference, and time and memory against the prediction."""
    print_heading(console, "checked steps")
    reference = bool(result.reference_loss)
    rows = [
        [
            str(step),
            f"{loss:.6f}",
            f"{result.reference_loss[step]:.6f}" if reference else "",
            f"{norm:.6f}",
            f"{result.reference_grad_norm[step]:.6f}" if reference else "",
        ]
        for step, (loss, norm) in enumerate(zip(result.loss, result.grad_norm, strict=True))
    ]
    columns = ["step", "loss", "reference", "gradient norm", "reference"]
    print_some(console, columns, rows)
    if verdict is not None:
        print_line(
            console,
            f"largest difference: loss {verdict.largest['loss']:.2g} (at most "
            f"{verdict.tolerance['loss']:g}), gradient norm {verdict.largest['grad_norm']:.2g} "
            f"(at most {verdict.tolerance['grad_norm']:g}), as shares of the reference",
            style=None if verdict.matches else "red",
        )
    else:
        print_line(console, "not compared with one process (--no-reference)", style="dim")
    _show_times(console, question, result)
    _show_peaks(console, question, result)
    for note in result.notes:
        print_line(console, note, style="dim")


# --- parts ---------------------------------------------------------------------------------


def _show_times(console: Console, question: Question, result: RunResult) -> None:
    if not result.step_time_s:
        return
    times = sorted(result.step_time_s)
    prediction = question.prediction
    rows = [
        [
            "step",
            optional_seconds(None if prediction is None else prediction.step_time_s),
            format_seconds(median(times)),
            difference(None if prediction is None else prediction.step_time_s, median(times)),
        ]
    ]
    for stage, spans in enumerate(result.stage_time_s[:_MOST_STAGES]):
        expected = _stage_times(prediction, stage, question.job.plan.num_microbatches)
        for key, name in (("forward_s", "forwards"), ("backward_s", "backwards")):
            if key in spans:
                then = expected.get(key)
                rows.append(
                    [
                        f"stage {stage}: {name}",
                        optional_seconds(then),
                        format_seconds(spans[key]),
                        difference(then, spans[key]),
                    ]
                )
        if "optimizer_s" in spans:
            rows.append([f"stage {stage}: optimizer", "", format_seconds(spans["optimizer_s"]), ""])
    print_heading(console, "time")
    print_table(console, ["what", "predicted", "measured", "difference"], rows)
    count = format_count(len(times), "step")
    print_line(
        console,
        f"medians of {count} ({format_seconds(times[0])} to {format_seconds(times[-1])}), each on "
        "its slowest rank",
        style="dim",
    )
    if result.peak_source == "counted" and question.job.plan.world_size > 1:
        print_line(
            console,
            "on CPUs processes share cores and memory, so these are not the times of GPUs",
            style="dim",
        )
    if prediction is None:
        print_line(console, no_prediction("times"), style="dim")
        return
    print_line(
        console,
        "the optimizer has no prediction of its own: the plan file has it together with the "
        "exposed reduction of gradients",
        style="dim",
    )
    if prediction.interval_s is not None:
        low, high = prediction.interval_s
        print_line(
            console,
            f"the predicted step is {format_seconds(low)} to {format_seconds(high)} within the "
            "spread of its measurements",
        )
    if prediction.basis is not None:
        print_line(console, f"the prediction rests on {prediction.basis}", style="yellow")


def _show_peaks(console: Console, question: Question, result: RunResult) -> None:
    if not any(result.peak_bytes):
        return
    plan, prediction = question.job.plan, question.prediction
    each = plan.world_size // plan.num_stages
    # the allocator gives out receive buffers too; communicators, which are predicted where the
    # hardware is estimated, it does not see
    with_buffers = (
        result.peak_source == "allocated" and prediction is not None and prediction.basis is None
    )
    rows = []
    for rank, peak in enumerate(result.peak_bytes):
        stages = prediction.stages if prediction is not None else ()
        then = None
        if stages and prediction is not None:
            stage = stages[rank // each]
            then = stage.allocated_bytes if with_buffers else stage.tensor_bytes
        rows.append(
            [
                str(rank),
                str(rank // each),
                optional_bytes(then),
                format_bytes(peak),
                difference(then, peak),
            ]
        )
    print_heading(console, "peak memory of a step")
    print_some(console, ["rank", "stage", "predicted", "measured", "difference"], rows, left=2)
    what = {
        "allocated": "measured: the most that torch's allocator gave out",
        "counted": "measured: storages of tensors, counted in one step",
    }
    taken_off = "; predicted without communicators and receive buffers"
    if with_buffers or prediction is None or not prediction.stages:
        taken_off = ""
    print_line(console, what[result.peak_source] + taken_off, style="dim")
    if prediction is None or not prediction.stages:
        print_line(console, no_prediction("memory"), style="dim")
    note = gradient_note(question.job, prediction)
    if note is not None:
        print_line(console, note, style="yellow")


def _memory_rows(
    rank: DryRunRank, parts: Sequence[BookedPart], stage: PredictedStage | None
) -> list[list[str]]:
    rows = []
    for part in parts:
        then, now = part.predicted_bytes, part.counted_bytes
        apart = "" if part.name in AT_THE_PEAK else difference(then, now)
        rows.append(["", part.name, optional_bytes(then), format_bytes(now), apart])
    at_peak = [part for part in parts if part.name in AT_THE_PEAK]
    predicted = [part.predicted_bytes for part in at_peak if part.predicted_bytes is not None]
    if predicted:
        then, now = sum(predicted), sum(part.counted_bytes for part in at_peak)
        row = [optional_bytes(then), format_bytes(now), difference(then, now)]
        rows.append(["", " and ".join(AT_THE_PEAK), *row])
    fixed = stage.memory_bytes.get("fixed") if stage is not None else None
    if fixed is not None:
        rows.append(["", "communicators", format_bytes(fixed), "", ""])
    whole = stage.tensor_bytes if stage is not None else None
    name, peak = "all" if fixed is None else "all but communicators", rank.peak_bytes
    rows.append(["", name, optional_bytes(whole), format_bytes(peak), difference(whole, peak)])
    rows[0][0] = str(rank.rank)
    return rows


def _stage_times(
    prediction: Prediction | None, stage: int, num_microbatches: int
) -> Mapping[str, float]:
    if prediction is None or not prediction.stages:
        return {}
    return prediction.stages[stage].step_times(num_microbatches) or {}

"""What `profile-plan` shows: the arithmetic, memory against its count, a run against both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape

from autopar.units import format_bytes, format_count, format_seconds
from profiler.plan.job import DryRunRank, RunResult
from profiler.plan.prediction import PredictedStage, Prediction
from profiler.plan.question import Question
from profiler.plan.static import StaticReport
from profiler.plan.verdict import Verdict
from profiler.show.frame import print_heading, print_line, print_table

__all__ = ["show_dry_run", "show_head", "show_run", "show_static"]

_MOST_ROWS = 24
"""Ranks or stages that a table lists before it says how many there are more."""

_CATEGORIES: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]] = (
    (
        "states",
        ("states", "vocab_states"),
        ("parameters", "gradients", "optimizer"),
    ),
    ("activations", ("activations", "vocab_activations"), ("activations",)),
    ("transient", ("transient", "shared"), ("gathered", "gathered parameters", "other")),
)
"""Predicted categories and parts of a dry run's peak that mean the same."""


def show_head(console: Console, question: Question) -> None:
    """Print what plan of which model it is."""
    plan, spec = question.job.plan, question.job.spec
    lengths = ", ".join(str(layer.seq_length) for layer in spec.layers)
    console.print(
        escape(f"{question.source}: {spec.name}, {format_count(spec.num_layers, 'layer')}"),
        style="bold",
        soft_wrap=True,
    )
    schedule = "GPipe" if plan.pipeline_type == "gpipe" else "1F1B"
    m, each = plan.num_microbatches, plan.world_size // plan.num_stages
    ranks = f"{format_count(plan.world_size, 'rank')} = {format_count(plan.num_stages, 'stage')}"
    parts = f"{format_count(m, 'micro-batch', 'micro-batches')} of {plan.global_batch // m}"
    print_line(
        console,
        f"{ranks} of {each}, {schedule}, global batch {plan.global_batch} = {parts}, sequence "
        f"length {lengths}",
    )
    job = question.job
    print_line(
        console,
        f"{job.precision}; tensor-parallel layers {'with' if job.sequence_parallel else 'without'} "
        f"sequence parallelism; gradients are reduced "
        f"{'once per step' if job.async_grad_reduce else 'in every micro-batch'}",
    )
    for note in question.notes:
        print_line(console, note, style="dim")


def show_static(console: Console, question: Question, report: StaticReport) -> None:
    """Print the arithmetic of a legal plan."""
    print_line(console, "legal: yes")
    if report.obstacle is not None:
        print_line(console, f"not run by --mode run or dryrun: {report.obstacle}", style="yellow")
    print_heading(console, "layers")
    rows = [
        [
            str(stage.stage),
            f"{run.first_layer}-{run.last_layer}",
            run.label,
            ",".join(map(str, run.tensor_axes)),
            str(run.samples),
            str(run.held.num_parameters),
            format_bytes(run.held.state_bytes),
        ]
        for stage in report.stages
        for run in stage.runs
    ]
    columns = ["stage", "layers", "strategy", "tensor axes", "samples", "parameters", "states"]
    _print_some(console, columns, rows, left=4)
    print_line(
        console,
        f"embedding and head: {report.vocab_label}, "
        f"{format_count(report.vocab_samples, 'sample')} per micro-batch",
    )
    if report.mesh is not None:
        axes = " x ".join(map(str, report.mesh))
        print_line(
            console,
            f"the ranks of a stage are a mesh of {axes}; samples are divided over the axes that "
            "are not a layer's tensor axes",
        )
    print_heading(console, "a rank of each stage")
    rows = [
        [
            str(stage.stage),
            f"{stage.ranks[0]}-{stage.ranks[1]}",
            f"{stage.layers[0]}-{stage.layers[1]}",
            str(stage.in_flight),
            str(stage.held.num_parameters),
            format_bytes(stage.held.parameter_bytes),
            format_bytes(stage.held.gradient_bytes),
            format_bytes(stage.held.optimizer_bytes),
            _bytes(stage.held.gathered_bytes),
            _bytes(stage.held.accumulated_bytes),
        ]
        for stage in report.stages
    ]
    columns = ["stage", "ranks", "layers", "in flight", "parameters", "weights", "gradients"]
    columns += ["optimizer", "gathered", "accumulated"]
    _print_some(console, columns, rows, left=3)
    print_line(
        console,
        "of its first rank, which has the most; samples: of a micro-batch; in flight: "
        "micro-batches whose activations are kept at once; gathered and accumulated: weights and "
        "whole gradients that ZeRO holds during a step",
        style="dim",
    )
    if question.job.plan.num_stages > 1:
        print_line(
            console,
            f"bubble: {100 * report.bubble_share:.1f} % of a step with equal stages, "
            "(p-1) / (m+p-1)",
        )


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
    _print_some(console, columns, rows, left=2)
    prediction = question.prediction
    print_heading(console, "memory at the peak")
    stages = prediction.stages if prediction is not None else ()
    rows = []
    for rank in ranks:
        rows += _memory_rows(rank, stages[rank.stage] if stages else None)
    print_table(console, ["rank", "what", "predicted", "counted", "difference"], rows[:120], left=2)
    if not stages:
        print_line(console, _no_prediction("memory"), style="dim")
        return
    print_line(
        console,
        "states: weights, gradients and optimizer that are there at that moment; transient: "
        "gathered weights, buffers and temporaries; predicted communicators and the context of "
        "the device are not counted, nor is what an allocator wastes",
        style="dim",
    )


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
    _print_some(console, columns, rows)
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
            _seconds(None if prediction is None else prediction.step_time_s),
            format_seconds(_median(times)),
            _difference(None if prediction is None else prediction.step_time_s, _median(times)),
        ]
    ]
    for stage, spans in enumerate(result.stage_time_s[:_MOST_ROWS]):
        expected = _stage_times(prediction, stage, question.job.plan.num_microbatches)
        for key, name in (("forward_s", "forwards"), ("backward_s", "backwards")):
            if key in spans:
                then = expected.get(key)
                rows.append(
                    [
                        f"stage {stage}: {name}",
                        _seconds(then),
                        format_seconds(spans[key]),
                        _difference(then, spans[key]),
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
            "on CPUs: gloo has no all-to-all, for which torch gathers everything, and processes "
            "share cores and memory, so these are not the times of GPUs",
            style="dim",
        )
    if prediction is None:
        print_line(console, _no_prediction("times"), style="dim")
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
    rows = []
    for rank, peak in enumerate(result.peak_bytes):
        stages = prediction.stages if prediction is not None else ()
        then = stages[rank // each].tensor_bytes if stages else None
        rows.append(
            [str(rank), str(rank // each), _optional(then), format_bytes(peak), _share(then, peak)]
        )
    print_heading(console, "peak memory of a step")
    _print_some(console, ["rank", "stage", "predicted", "measured", "difference"], rows, left=2)
    what = {
        "allocated": "measured: the most that torch's allocator gave out",
        "counted": "measured: storages of tensors, counted in one step",
    }
    print_line(console, f"{what[result.peak_source]}; predicted without communicators", style="dim")
    if prediction is None or not prediction.stages:
        print_line(console, _no_prediction("memory"), style="dim")


def _memory_rows(rank: DryRunRank, stage: PredictedStage | None) -> list[list[str]]:
    parts: Mapping[str, int] = stage.memory_bytes if stage is not None else {}
    rows = []
    left = dict(rank.peak_parts)
    for name, predicted_names, counted_names in _CATEGORIES:
        counted = sum(left.pop(key, 0) for key in counted_names)
        then = sum(parts.get(key, 0) for key in predicted_names) if parts else None
        rows.append(["", name, _optional(then), format_bytes(counted), _share(then, counted)])
    rows += [["", name, "", format_bytes(size), ""] for name, size in left.items() if size]
    then = stage.tensor_bytes if stage is not None else None
    if "fixed" in parts:
        rows.append(["", "communicators", format_bytes(parts["fixed"]), "", ""])
    name, peak = "all but communicators" if parts else "all", rank.peak_bytes
    rows.append(["", name, _optional(then), format_bytes(peak), _share(then, peak)])
    rows[0][0] = str(rank.rank)
    return rows


def _stage_times(
    prediction: Prediction | None, stage: int, num_microbatches: int
) -> Mapping[str, float]:
    if prediction is None or not prediction.stages:
        return {}
    return prediction.stages[stage].step_times(num_microbatches) or {}


def _no_prediction(what: str) -> str:
    return (
        f"no predicted {what} to compare with: a plan file of autopar-search has them, a strategy "
        "file and a scaled-down plan do not"
    )


def _print_some(
    console: Console, columns: list[str], rows: list[list[str]], *, left: int = 1
) -> None:
    print_table(console, columns, rows[:_MOST_ROWS], left=left)
    if len(rows) > _MOST_ROWS:
        print_line(console, f"and {len(rows) - _MOST_ROWS} more, which --json has", style="dim")


def _median(ordered: Sequence[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _seconds(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _bytes(value: int) -> str:
    return format_bytes(value) if value else ""


def _optional(value: float | None) -> str:
    return "" if value is None else format_bytes(value)


def _difference(predicted: float | None, measured: float) -> str:
    """Return how much more was predicted than measured."""
    if predicted is None or measured <= 0:
        return ""
    return f"{100 * (predicted / measured - 1):+.1f} %"


def _share(predicted: int | None, counted: int) -> str:
    return _difference(predicted, counted)

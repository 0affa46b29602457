"""What `profile-plan` shows of a plan before it runs: what it is, and its arithmetic."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from autopar.units import format_bytes, format_count
from profiler.plan.prediction_parts import gradient_note
from profiler.plan.question import Question
from profiler.plan.report_parts import optional_bytes, print_some
from profiler.plan.static import StaticReport
from profiler.show.frame import print_heading, print_line

__all__ = ["show_head", "show_static"]


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
    has_axes = any(run.tensor_axes for stage in report.stages for run in stage.runs)
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
    print_some(console, columns, rows, left=4)
    print_line(
        console,
        f"embedding and head: {report.vocab_label}, "
        f"{format_count(report.vocab_samples, 'sample')} per micro-batch",
    )
    if report.mesh is not None:
        axes = " x ".join(map(str, report.mesh))
        print_line(
            console,
            f"the ranks of a stage are a mesh of {axes}"
            + "; samples are divided over the axes that are not a layer's tensor axes" * has_axes,
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
            optional_bytes(stage.held.gathered_bytes or None),
            optional_bytes(stage.held.accumulated_bytes or None),
        ]
        for stage in report.stages
    ]
    columns = ["stage", "ranks", "layers", "in flight", "parameters", "weights", "gradients"]
    columns += ["optimizer", "gathered", "accumulated"]
    print_some(console, columns, rows, left=3)
    kept = [stage.held for stage in report.stages]
    footnotes = [
        "of its first rank, which has the most",
        "samples: of a micro-batch",
        "in flight: micro-batches whose activations are kept at once",
    ]
    if any(held.gathered_bytes for held in kept):
        footnotes.append("gathered: weights that ZeRO-2 holds whole during a step")
    if any(held.accumulated_bytes for held in kept):
        footnotes.append("accumulated: whole gradients that ZeRO holds during a step, in fp32")
    print_line(console, "; ".join(footnotes), style="dim")
    note = gradient_note(question.job, question.prediction)
    if note is not None:
        print_line(console, note, style="yellow")
    if question.job.plan.num_stages > 1:
        print_line(
            console,
            f"bubble: {100 * report.bubble_share:.1f} % of a step with equal stages, "
            "(p-1) / (m+p-1)",
        )

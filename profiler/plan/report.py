"""Tables and JSON documents of `profile-plan` for all its modes: static, dry run and run.

Results are computed in other modules; this one formats them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec.structs import asdict

from autopar.command.console import Console, escape
from autopar.command.show import print_heading, print_line, print_note, print_table
from autopar.documents.plan import PeakSource, PlanDocument, StageEntry
from autopar.documents.strategy import strategy_document
from autopar.pipeline.schedules import SCHEDULES
from autopar.rates.measured import COMMUNICATOR_BYTES
from autopar.records import Record
from autopar.units import GIB, format_bytes, format_count, format_seconds
from profiler.plan.arithmetic import (
    Held,
    RunArithmetic,
    StageArithmetic,
    StaticReport,
    examine,
    stage_weights,
)
from profiler.plan.job import DryRunRank, Mode, PlanJob, RunResult, Verdict
from profiler.plan.question import Question
from profiler.plan.weights import held

# --------------------------------------------------------------------------------------------------
# Helpers of the tables: values, differences, limits on rows.


_MOST_ROWS = 24
"""Largest number of rows in a table; a note reports the number of omitted rows."""


def print_some(
    console: Console, columns: list[str], rows: list[list[str]], *, left: int = 1
) -> None:
    """Print the first rows of a table, and the number of rows omitted."""
    print_table(console, columns, rows[:_MOST_ROWS], left=left, ruled=False)
    if len(rows) > _MOST_ROWS:
        print_note(console, f"{len(rows) - _MOST_ROWS} more rows: --json")


def _beside(predicted: float | None, measured: float, written: Callable[[float], str]) -> list[str]:
    """Return three table cells: prediction (empty for None), measurement, relative difference."""
    then = "" if predicted is None else written(predicted)
    return [then, written(measured), difference(predicted, measured)]


def difference(predicted: float | None, measured: float) -> str:
    """Return prediction over measurement minus 1, as text in percent; empty if undefined."""
    if predicted is None or measured <= 0:
        return ""
    return f"{100 * (predicted / measured - 1):+.1f} %"


def no_prediction(what: str) -> str:
    """Return a note that explains why there is no prediction of `what` (memory or times)."""
    return (
        f"no predicted {what}: only plan files of autopar-search contain it, and scaled-down plans "
        "do not"
    )


# --------------------------------------------------------------------------------------------------
# Predicted and counted memory in the same categories, so that they can be compared.
#
# A plan file separates steady-state from transient memory; a dry run separates tensors by use. Both
# are converted to: weights and optimizer (including the gathered weights of ZeRO-2), gradients,
# activations, and transient memory.


AT_THE_PEAK = ("activations", "passing")
"""Memory categories whose sum is compared, not each of them. Tensors that the loss or the peak
layer saves are transient ("passing") in a prediction, but activations in a dry run."""


_PARTS = {"passing": "transient"}
"""Printed names of memory categories that differ from their keys."""


class BookedPart(Record):
    """One memory category of a rank at the peak, predicted and counted."""

    name: str
    predicted_bytes: int | None
    """Predicted bytes; None without a prediction."""
    counted_bytes: int


def book(
    job: PlanJob, rank: DryRunRank, prediction: PlanDocument | None, *, kept_bytes: int
) -> tuple[BookedPart, ...]:
    """Return the memory categories of a rank's peak, in bytes, counted and predicted.

    The counted bytes sum to the peak. Predicted communicators and receive buffers (`fixed`) are in
    no category.

    kept_bytes : gathered weights of ZeRO-2 on the stage (`Held.gathered_bytes`).
    """
    parts = rank.peak_parts
    gathered = parts["gathered parameters"]
    # some of them may not be gathered at the peak
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
            share = _gradient_share(
                job, rank.stage, fp32_gradients=bool(prediction.options.fp32_gradients)
            )
            predicted = _predicted(stage, share)
    return tuple(
        BookedPart(name=name, predicted_bytes=predicted.get(name), counted_bytes=size)
        for name, size in counted.items()
    )


def _predicted(stage: StageEntry, gradient_share: float) -> dict[str, int]:
    of = stage.memory_bytes
    states = of.get("states", 0) + of.get("vocab_states", 0)
    # a plan file contains weights, gradients and optimizer states as one value
    gradients = round(states * gradient_share)
    return {
        "weights and optimizer": states - gradients,
        "gradients": gradients,
        "activations": of.get("activations", 0) + of.get("vocab_activations", 0),
        "passing": of.get("transient", 0) + of.get("shared", 0),
    }


def _gradient_share(job: PlanJob, stage: int, *, fp32_gradients: bool) -> float:
    """Return gradients as a fraction of the predicted model states of a stage.

    The planner assumes w + g + o bytes per parameter for weight, gradient and optimizer: 4 + 4 + 8
    in fp32, else 2 + 2 + 12 (g is 4 with fp32 gradients). ZeRO-1, 2 and 3 shard o, and ZeRO-3
    shards w. ZeRO-2 and 3 shard g if gradients are reduced in every micro-batch. With a single
    micro-batch, the planner predicts no gradients for ZeRO-2 and 3.
    """
    wide = job.precision == "fp32"
    weight, optimizer = (4, 8) if wide else (2, 12)
    gradient = 4 if wide or fp32_gradients else 2
    one = job.plan.num_microbatches == 1
    stay_whole = job.async_grad_reduce and not one
    total = gradients = 0.0
    for shapes, zero, ranks in stage_weights(job, stage):
        count = held(shapes)
        pieces = 1 if zero == "ddp" else ranks
        own = count * gradient / (1 if stay_whole or zero == "zero1" else pieces)
        if one and pieces > 1 and zero != "zero1":
            own = 0.0
        gradients += own
        total += own + count * weight / (ranks if zero == "zero3" else 1)
        total += count * optimizer / pieces
    return gradients / total if total else 0.0


# --------------------------------------------------------------------------------------------------
# Comparison of counted memory with the memory budget of the search.


class Fit(Record):
    """Comparison of the memory that a rank needs with its budget."""

    rank: int
    stage: int
    needed_bytes: int
    """Bytes of counted tensors and communicators, plus the plan's reserved minus allocated bytes
    (allocator overhead)."""
    budget_bytes: int

    @property
    def fits(self) -> bool:
        """True if the needed bytes are within the budget."""
        return self.needed_bytes <= self.budget_bytes

    @property
    def sentence(self) -> str:
        """Error message with the missing memory; only for a rank that does not fit."""
        over = format_bytes(self.needed_bytes - self.budget_bytes)
        return (
            f"DOES NOT FIT: stage {self.stage} (rank {self.rank}) needs "
            f"{format_bytes(self.needed_bytes)} of {format_bytes(self.budget_bytes)}, {over} too "
            "much. Search again with a --memory-constraint that is smaller by this amount"
        )


def fits_of(question: Question, ranks: Sequence[DryRunRank]) -> tuple[Fit, ...]:
    """Return the fit of each rank for which the plan file contains a memory budget.

    Bytes of communicators are added only for plans from estimated hardware, whose predictions
    include them. For measured hardware they are part of the reserved device context.
    """
    prediction = question.prediction
    found = []
    for rank in ranks if prediction is not None else ():
        assert prediction is not None
        stage = prediction.stages[rank.stage] if prediction.stages else StageEntry()
        allocated, reserved, budget = (
            stage.allocated_bytes,
            stage.reserved_bytes,
            stage.budget_bytes,
        )
        if allocated is None or reserved is None or budget is None:
            continue
        opened = COMMUNICATOR_BYTES * rank.num_communicators * prediction.estimated
        found.append(
            Fit(
                rank=rank.rank,
                stage=rank.stage,
                needed_bytes=rank.peak_bytes + opened + reserved - allocated,
                budget_bytes=budget,
            )
        )
    return tuple(found)


def _print_fits(console: Console, fits: Sequence[Fit]) -> None:
    if not fits:
        return
    fullest = max(fits, key=lambda fit: fit.needed_bytes - fit.budget_bytes)
    if fullest.fits:
        room = format_bytes(fullest.budget_bytes - fullest.needed_bytes)
        print_line(
            console,
            f"FITS: stage {fullest.stage} needs {format_bytes(fullest.needed_bytes)} of "
            f"{format_bytes(fullest.budget_bytes)}, {room} left; communicators and the reserve of "
            "the plan included",
            style="green",
        )
    for fit in fits:
        if not fit.fits:
            print_line(console, fit.sentence, style="red")


# --------------------------------------------------------------------------------------------------
# Tables of results: counted or measured memory, times and losses, with predictions.


def show_dry_run(console: Console, question: Question, ranks: Sequence[DryRunRank]) -> None:
    """Print the counted memory of ranks, with the predictions of the plan file."""
    _print_fits(console, fits_of(question, ranks))
    print_heading(console, "Memory counted on meta tensors")
    rows = [
        [
            str(rank.rank),
            str(rank.stage),
            f"{rank.num_parameters:,}",
            *map(format_bytes, (*_kept(rank), rank.peak_bytes)),
        ]
        for rank in ranks
    ]
    columns = ["rank", "stage", "parameters", "weights", "gradients", "optimizer", "peak"]
    print_some(console, columns, rows, left=2)
    prediction = question.prediction
    print_heading(console, "Peak memory")
    stages = prediction.stages if prediction is not None else ()
    arithmetic = examine(question.job).stages
    rows = []
    for rank in ranks:
        kept = arithmetic[rank.stage].held.gathered_bytes
        parts = book(question.job, rank, prediction, kept_bytes=kept)
        rows += _memory_rows(rank, parts, stages[rank.stage] if stages else None)
    print_some(console, ["rank", "term", "predicted", "counted", "difference"], rows, left=2)
    footnotes = [
        "gradients: allocated at the peak",
        "transient: gathered weights, buffers and temporaries; the prediction is their maximum",
        "activations of the loss: predicted as transient, counted as activations",
    ]
    if any(stage.held.gathered_bytes for stage in arithmetic):
        footnotes.insert(0, "weights: unsharded copies of ZeRO-2 included")
    print_note(console, "; ".join(footnotes))
    if not stages:
        print_note(console, no_prediction("memory"))
        return
    print_note(
        console,
        "not counted: receive buffers of pipelines, CUDA context, fragmentation, communicators",
    )
    if any(rank.engine_bytes for rank in ranks):
        print_note(
            console,
            f"weights: {question.job.precision} shards included, which the plan's engine keeps in "
            "addition to fp32 ones",
        )
    if question.prediction is not None and question.prediction.options.engine == "megatron":
        print_note(
            console,
            "the prediction is for Megatron-LM layers, which save less than the PyTorch layers "
            "counted here; `autopar check` counts Megatron-LM",
        )


def show_run(
    console: Console, question: Question, result: RunResult, verdict: Verdict | None
) -> None:
    """Print losses and gradient norms with the reference, times and memory with the prediction.

    verdict : result of the comparison with the reference; None without one.
    """
    print_heading(console, "Steps compared with one process")
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
            f"largest relative difference: loss {verdict.largest['loss']:.2g} (at most "
            f"{verdict.tolerance['loss']:g}), gradient norm {verdict.largest['grad_norm']:.2g} "
            f"(at most {verdict.tolerance['grad_norm']:g})",
            style=None if verdict.matches else "red",
        )
    else:
        print_note(console, "not compared with one process (--no-reference)")
    skipped = [str(step) for step, norm in enumerate(result.grad_norm) if norm == math.inf]
    if skipped and question.job.precision == "fp16":
        print_note(
            console,
            f"{format_count(len(skipped), 'step')} skipped, because gradients overflowed fp16 "
            f"({', '.join(skipped[:_MOST_ROWS])}); increase --steps if none is left to compare",
        )
    _show_times(console, question, result)
    _show_peaks(console, question, result)
    for note in result.notes:
        print_note(console, note)


# --- helpers -------------------------------------------------------------------------------


def _show_times(console: Console, question: Question, result: RunResult) -> None:
    if not result.step_time_s:
        return
    times = sorted(result.step_time_s)
    prediction = question.prediction
    step_s = None if prediction is None else prediction.step_time_s
    rows = [["step", *_beside(step_s, median(times), format_seconds)]]
    for stage, spans in enumerate(result.stage_time_s[:_MOST_ROWS]):
        expected = _stage_times(prediction, stage, question.job.plan.num_microbatches)
        for key, name in (("forward_s", "forward"), ("backward_s", "backward")):
            if key in spans:
                cells = _beside(expected.get(key), spans[key], format_seconds)
                rows.append([f"stage {stage}: {name}", *cells])
        if "optimizer_s" in spans:
            rows.append([f"stage {stage}: optimizer", "", format_seconds(spans["optimizer_s"]), ""])
    print_heading(console, "Time")
    print_table(console, ["term", "predicted", "measured", "difference"], rows, ruled=False)
    count = format_count(len(times), "step")
    print_note(
        console,
        f"median of {count} ({format_seconds(times[0])} to {format_seconds(times[-1])}), slowest "
        "rank of each",
    )
    if result.peak_source == "counted" and question.job.plan.world_size > 1:
        print_note(
            console,
            "CPU processes share cores and memory: not representative of GPUs",
        )
    if prediction is None:
        print_note(console, no_prediction("times"))
        return
    print_note(
        console,
        "the plan file predicts the optimizer together with the exposed gradient reduction",
    )
    if prediction.interval_s is not None:
        low, high = prediction.interval_s
        print_line(
            console,
            f"predicted step: {format_seconds(low)} to {format_seconds(high)}, from the spread of "
            "measurements",
        )
    if prediction.basis is not None:
        print_line(console, f"Basis: {prediction.basis}", style="yellow")


def _show_peaks(console: Console, question: Question, result: RunResult) -> None:
    if not any(result.peak_bytes):
        return
    plan, prediction = question.job.plan, question.prediction
    each = plan.world_size // plan.num_stages
    stages = prediction.peak_bytes(result.peak_source) if prediction is not None else []
    rows = []
    for rank, peak in enumerate(result.peak_bytes):
        then = stages[rank // each] if stages else None
        rows.append([str(rank), str(rank // each), *_beside(then, peak, format_bytes)])
    print_heading(console, "Peak memory")
    print_some(console, ["rank", "stage", "predicted", "measured", "difference"], rows, left=2)
    what = {
        "allocated": "measured: peak allocated by PyTorch",
        "counted": "measured: tensor storages, counted in one step",
    }
    taken_off = "; the prediction excludes communicators and receive buffers"
    if prediction is None or not stages or prediction.holds_buffers(result.peak_source):
        taken_off = ""
    print_note(console, what[result.peak_source] + taken_off)
    if not stages:
        print_note(console, no_prediction("memory"))


def _kept(held: Held | DryRunRank) -> tuple[int, int, int]:
    return held.parameter_bytes, held.gradient_bytes, held.optimizer_bytes


def _memory_rows(
    rank: DryRunRank, parts: Sequence[BookedPart], stage: StageEntry | None
) -> list[list[str]]:
    rows = []
    for part in parts:
        cells = _beside(part.predicted_bytes, part.counted_bytes, format_bytes)
        if part.name in AT_THE_PEAK:  # compared as a sum below
            cells[-1] = ""
        rows.append(["", _PARTS.get(part.name, part.name), *cells])
    at_peak = [part for part in parts if part.name in AT_THE_PEAK]
    predicted = [part.predicted_bytes for part in at_peak if part.predicted_bytes is not None]
    if predicted:
        now = sum(part.counted_bytes for part in at_peak)
        cells = _beside(sum(predicted), now, format_bytes)
        rows.append(["", " and ".join(_PARTS.get(name, name) for name in AT_THE_PEAK), *cells])
    fixed = stage.memory_bytes.get("fixed") if stage is not None else None
    if fixed is not None:
        rows.append(["", "communicators", format_bytes(fixed), "", ""])
    whole = stage.tensor_bytes if stage is not None else None
    name = "total" if fixed is None else "total without communicators"
    rows.append(["", name, *_beside(whole, rank.peak_bytes, format_bytes)])
    rows[0][0] = str(rank.rank)
    return rows


def _stage_times(
    prediction: PlanDocument | None, stage: int, num_microbatches: int
) -> Mapping[str, float]:
    if prediction is None or not prediction.stages:
        return {}
    return prediction.stages[stage].step_times(num_microbatches) or {}


# --------------------------------------------------------------------------------------------------
# The JSON documents of `profile-plan`; the mode determines their keys.


FORMAT = "autopar-plan-check"
# 1: first version.
VERSION = 1


def illegal_document(question: Question, mode: Mode) -> dict[str, object]:
    """Return the JSON document of an illegal plan, with its violations."""
    return {**_head(question, mode), "legal": False, "problems": list(question.problems)}


def static_document(question: Question, report: StaticReport) -> dict[str, object]:
    """Return the JSON document of `--mode static`."""
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
    """Return the JSON document of `--mode dryrun`, with the prediction for every rank."""
    job, prediction = question.job, question.prediction
    predicted = _predicted_memory(prediction)
    stages = examine(job).stages
    fits = {fit.rank: fit for fit in fits_of(question, ranks)}
    return {
        **_head(question, "dryrun"),
        "fits": all(fit.fits for fit in fits.values()) if fits else None,
        "ranks": [
            {
                **{key: _plain(value) for key, value in asdict(rank).items()},
                "compared": [
                    asdict(part)
                    for part in book(
                        job,
                        rank,
                        prediction,
                        kept_bytes=stages[rank.stage].held.gathered_bytes,
                    )
                ],
                "predicted": None if predicted is None else predicted[rank.stage],
                "needed_bytes": fits[rank.rank].needed_bytes if rank.rank in fits else None,
                "budget_bytes": fits[rank.rank].budget_bytes if rank.rank in fits else None,
            }
            for rank in ranks
        ],
    }


def run_document(
    question: Question, result: RunResult, verdict: Verdict | None
) -> dict[str, object]:
    """Return the JSON document of `--mode run`: measured values, predictions and the verdict.

    verdict : result of the comparison with the reference; None without a comparison.
    """
    return {
        **_head(question, "run"),
        **{key: _plain(value) for key, value in asdict(result).items() if key != "notes"},
        "predicted": _predicted_run(question, result.peak_source),
        "reference": None
        if verdict is None
        else {
            "matches": verdict.matches,
            "tolerance": dict(verdict.tolerance),
            "largest_difference": {k: _plain(v) for k, v in verdict.largest.items()},
        },
        "notes": [*question.notes, *result.notes],
    }


# --- helpers -------------------------------------------------------------------------------


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
        "fp32_gradients": job.fp32_gradients,
        "seed": job.seed,
        "plan": strategy_document(job.plan),
        "notes": list(question.notes),
    }


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
    return {**asdict(held), "state_bytes": held.state_bytes}


def _predicted_memory(prediction: PlanDocument | None) -> list[object] | None:
    """Return the predicted memory of every stage, in bytes; None without a prediction."""
    if prediction is None or not prediction.stages:
        return None
    return [
        {"allocated_bytes": stage.allocated_bytes, "memory_bytes": dict(stage.memory_bytes)}
        for stage in prediction.stages
    ]


def _predicted_run(question: Question, peak_source: PeakSource) -> dict[str, object] | None:
    """Return the predictions for the measured values of a run; None for values not predicted."""
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
        "peak_bytes": [peak for peak in prediction.peak_bytes(peak_source) for _ in range(each)]
        or None,
        "rests_on": prediction.basis,
    }


def _plain(value: Any) -> Any:
    """Return a value converted to JSON types; numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    # JSON has no infinity
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --------------------------------------------------------------------------------------------------
# Terminal output of the plan and its arithmetic.


def show_head(console: Console, question: Question) -> None:
    """Print the source, model and schedule of the plan."""
    plan, spec = question.job.plan, question.job.spec
    lengths = ", ".join(f"{layer.seq_length:,}" for layer in spec.layers)
    console.print(
        escape(f"{question.source}: {spec.name}, {format_count(spec.num_layers, 'layer')}"),
        style="bold",
        soft_wrap=True,
    )
    schedule = SCHEDULES[plan.pipeline_type].title
    if plan.num_chunks > 1:
        schedule += f" with {plan.num_chunks} chunks per stage"
    m, each = plan.num_microbatches, plan.world_size // plan.num_stages
    ranks = f"{format_count(plan.world_size, 'rank')} = {format_count(plan.num_stages, 'stage')}"
    parts = f"{format_count(m, 'micro-batch', 'micro-batches')} of {plan.global_batch // m}"
    print_line(
        console,
        f"{ranks} of {each}, {schedule}, global batch {plan.global_batch} = {parts}, "
        f"{lengths} tokens",
    )
    job = question.job
    print_line(
        console,
        f"{job.precision}, {'' if job.sequence_parallel else 'no '}sequence parallelism, gradient "
        f"reduction {'once per step' if job.async_grad_reduce else 'per micro-batch'}",
    )
    for note in question.notes:
        print_note(console, note)


def show_static(console: Console, question: Question, report: StaticReport) -> None:
    """Print strategies, model states and pipeline bubble of a legal plan."""
    print_line(console, "LEGAL")
    if report.obstacle is not None:
        print_line(
            console, f"not supported by --mode run and dryrun: {report.obstacle}", style="yellow"
        )
    has_axes = any(run.tensor_axes for stage in report.stages for run in stage.runs)
    has_axes |= (has_rings := any(s.cp > 1 for s in question.job.plan.layers))
    print_heading(console, "Layers")
    rows = [
        [
            str(stage.stage),
            _layers(run),
            run.label,
            ",".join(map(str, run.tensor_axes)),
            str(run.samples),
            f"{run.held.num_parameters:,}",
            format_bytes(run.held.state_bytes),
        ]
        for stage in report.stages
        for run in stage.runs
    ]
    columns = ["stage", "layers", "strategy", "tensor axes", "mbs", "parameters", "model states"]
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
            f"device mesh of a stage: {axes}"
            + "; samples are split over the other axes than a layer's tensor axes" * has_axes
            + ", sequences over the last of them" * has_rings,
        )
    print_heading(console, "Memory of the first rank of each stage, GiB")
    rows = [
        [
            str(stage.stage),
            f"{stage.ranks[0]}-{stage.ranks[1]}",
            # without chunks the runs of a stage are contiguous
            ", ".join(map(_layers, stage.runs))
            if question.job.plan.num_chunks > 1
            else f"{stage.layers[0]}-{stage.layers[1]}",
            str(stage.in_flight),
            f"{stage.held.num_parameters / 1e6:,.1f}",
            *(f"{n / GIB:.2f}" for n in _kept(stage.held)),
            *(
                f"{n / GIB:.2f}" if n else ""
                for n in (stage.held.gathered_bytes, stage.held.accumulated_bytes)
            ),
        ]
        for stage in report.stages
    ]
    columns = ["stage", "ranks", "layers", "live", "params, M", "weights", "gradients"]
    columns += ["optimizer", "gathered", "accumulated"]
    print_some(console, columns, rows, left=3)
    kept = [stage.held for stage in report.stages]
    footnotes = [
        "mbs: micro-batch size, samples",
        "live: micro-batches with saved activations",
    ]
    if any(held.gathered_bytes for held in kept):
        footnotes.append("gathered: unsharded weights of ZeRO-2 during a step")
    if any(held.accumulated_bytes for held in kept):
        footnotes.append("accumulated: unsharded fp32 gradients during a step")
    print_note(console, "; ".join(footnotes))
    if question.job.plan.num_stages > 1:
        print_line(
            console,
            f"pipeline bubble: {100 * report.bubble_share:.1f} % of the step if stages are equal, "
            + ("(p-1) / (v m+p-1)" if question.job.plan.num_chunks > 1 else "(p-1) / (m+p-1)"),
        )


def _layers(run: RunArithmetic) -> str:
    return f"{run.first_layer}-{run.last_layer}"

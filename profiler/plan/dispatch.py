"""Runs a mode of `profile-plan` on this rank, shows what it found and writes it down."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.console import make_console
from autopar.errors import AutoparError, InputError, OptionError
from profiler.plan.options import Backend, Mode, PlanOptions
from profiler.plan.question import Question

if TYPE_CHECKING:
    from profiler.plan.job import PlanJob

__all__ = ["MismatchError", "UncheckedError", "dispatch", "refuse_illegal"]


class MismatchError(AutoparError):
    """A run has other losses or gradients than one process without parallelism (exit code 1)."""


class UncheckedError(AutoparError):
    """A run could not be compared with one process (exit code 1)."""


def refuse_illegal(
    question: Question, options: PlanOptions, mode: Mode, *, writes: bool = True
) -> None:
    """Raise InputError with every violation of an illegal plan.

    writes : whether this process writes the document before; of several one does.
    """
    if not question.problems:
        return
    if writes and options.json is not None:
        from profiler.plan.result_files import illegal_document, write_result

        write_result(options.json, illegal_document(question, mode))
    raise InputError(
        f"{question.source} is illegal for {question.job.spec.name}: {'; '.join(question.problems)}"
    )


def dispatch(question: Question, options: PlanOptions, mode: Mode) -> int:
    """Do what a mode does with a legal plan; return the exit code.

    Only `run` is for every rank; the others are for the first alone.

    Raises
    ------
    InputError: the executor does not run the plan, or not here.
    MismatchError: a run does not match its reference.
    """
    return {"static": _static, "dryrun": _dry_run, "run": _run}[mode](question, options)


def _static(question: Question, options: PlanOptions) -> int:
    from profiler.plan.report import show_head, show_static
    from profiler.plan.result_files import static_document, write_result
    from profiler.plan.static import examine

    report = examine(question.job)
    if options.json is not None:
        write_result(options.json, static_document(question, report))
    if options.json != "-":
        console = make_console(sys.stdout)
        show_head(console, question)
        show_static(console, question, report)
    return 0


def _dry_run(question: Question, options: PlanOptions) -> int:
    ranks = options.ranks
    _check_ranks(ranks, question.job)
    from profiler.environment import require_torch

    require_torch()
    from profiler.plan.dryrun import dry_run, first_ranks
    from profiler.plan.report import show_head
    from profiler.plan.report_found import show_dry_run
    from profiler.plan.result_files import dry_run_document, write_result

    plan = question.job.plan
    each = plan.world_size // plan.num_stages
    named = {key: [rank] for key, rank in first_ranks(question.job).items()}
    named["all"] = list(range(0, plan.world_size, each))
    chosen = sorted({rank for text in ranks for rank in named.get(text) or [int(text)]})
    found = dry_run(question.job, ranks=chosen)
    if options.json is not None:
        write_result(options.json, dry_run_document(question, found))
    if options.json != "-":
        console = make_console(sys.stdout)
        show_head(console, question)
        show_dry_run(console, question, found)
    return 0


def _check_ranks(ranks: Sequence[str], job: PlanJob) -> None:
    world = job.plan.world_size
    for text in ranks:
        if text.isdecimal() and int(text) >= world:
            raise OptionError(f"--ranks: the plan has the ranks 0 to {world - 1}, got {text}")


def _run(question: Question, options: PlanOptions) -> int:
    from profiler.plan.layout import check_job

    check_job(question.job)  # said before torch is loaded
    from profiler.environment import require_torch

    require_torch()
    from profiler.plan.run import run_plan

    prediction = question.prediction
    predicted = () if prediction is None else prediction.stages
    result = run_plan(
        question.job,
        backend=_backend(options),
        num_steps=options.steps,
        num_timed_steps=options.timed_steps,
        with_reference=options.reference,
        timeout_s=options.timeout_s,
        predicted_bytes=[stage.allocated_bytes for stage in predicted],
    )
    if result is None:
        return 0
    from profiler.plan.report import show_head
    from profiler.plan.report_found import show_run
    from profiler.plan.result_files import run_document, write_result
    from profiler.plan.verdict import judge

    verdict = judge(result, question.job.precision)
    if options.json is not None:
        write_result(options.json, run_document(question, result, verdict))
    if options.json != "-":
        console = make_console(sys.stdout)
        show_head(console, question)
        show_run(console, question, result, verdict)
    if verdict is None and result.notes:
        raise UncheckedError("; ".join(result.notes))
    if verdict is not None and not verdict.matches:
        raise MismatchError(verdict.sentence)
    return 0


def _backend(options: PlanOptions) -> Backend:
    """Return the backend, which decides the device: nccl on GPUs, gloo on the CPU."""
    if options.device == "auto":
        return options.backend
    return "nccl" if options.device == "cuda" else "gloo"

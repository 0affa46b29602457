"""`profile-plan` and `torchrun -m profiler.plan`: check, dry-run or run one plan."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from autopar.command.answers import answers_stdout, running
from autopar.command.options import Command
from autopar.command.run import environment_rank
from autopar.errors import FAILED, INFEASIBLE, UNUSABLE, AutoparError, InputError, OptionError
from profiler.options import Backend, SizeOptions
from profiler.plan.job import PANELS, GlobalOptions, Mode, PlanOptions, build_options
from profiler.ranks import Rank, run_rank, torchrun_line

if TYPE_CHECKING:
    from profiler.plan.job import PlanJob
    from profiler.plan.question import Question

# --------------------------------------------------------------------------------------------------
# Run a mode of `profile-plan` on this rank, print its result and write its document.


class MismatchError(AutoparError):
    """Error for losses or gradient norms that differ from those of one process (exit code 1)."""


class UncheckedError(AutoparError):
    """Error for a run that could not be compared with one process (exit code 1)."""


def refuse_illegal(
    question: Question, options: PlanOptions, mode: Mode, *, writes: bool = True
) -> None:
    """Raise InputError with all violations if the plan is illegal.

    writes : True on rank 0, which first writes the JSON document.
    """
    if not question.problems:
        return
    if writes:
        from autopar.command.show import write_result
        from profiler.plan.report import illegal_document

        write_result(options.json, illegal_document(question, mode), UNUSABLE, command=_NAME)
    raise InputError(
        f"{question.source} is illegal for {question.job.spec.name}: {'; '.join(question.problems)}"
    )


def dispatch(question: Question, options: PlanOptions, mode: Mode) -> int:
    """Run a mode with a legal plan; return the exit code.

    All ranks must call this for mode `run`, only the first rank for other modes.


    Raises InputError: the executor does not support the plan, or cannot run it here. Raises
    MismatchError: a run does not match its reference. Raises UncheckedError: a run could not be
    compared with its reference.
    """
    return {"static": _static, "dryrun": _dry_run, "run": _run}[mode](question, options)


def _static(question: Question, options: PlanOptions) -> int:
    from profiler.plan.arithmetic import examine
    from profiler.plan.report import show_static, static_document

    report = examine(question.job)
    _tell(question, options, 0, static_document(question, report), show_static, report)
    return 0


def _tell(
    question: Question,
    options: PlanOptions,
    exit_code: int,
    document: Mapping[str, object],
    show: Callable[..., None],
    *found: object,
) -> None:
    """Write the JSON document if requested; print the tables unless the document is on stdout."""
    from autopar.command.console import make_console
    from autopar.command.show import write_result
    from profiler.plan.report import show_head

    if write_result(options.json, document, exit_code, command=_NAME):
        console = make_console(sys.stdout, _WIDTH)
        show_head(console, question)
        show(console, question, *found)


def _dry_run(question: Question, options: PlanOptions) -> int:
    ranks = options.ranks
    _check_ranks(ranks, question.job)
    from profiler.environment import require_torch

    require_torch()
    from profiler.plan.dryrun import dry_run, first_ranks
    from profiler.plan.report import dry_run_document, fits_of, show_dry_run

    plan = question.job.plan
    each = plan.world_size // plan.num_stages
    named = {key: [rank] for key, rank in first_ranks(question.job).items()}
    named["all"] = list(range(0, plan.world_size, each))
    chosen = sorted({rank for text in ranks for rank in named.get(text) or [int(text)]})
    found = dry_run(question.job, ranks=chosen)
    exit_code = 0 if all(fit.fits for fit in fits_of(question, found)) else INFEASIBLE
    # the tables, or the document that replaces them, report what does not fit
    _tell(question, options, exit_code, dry_run_document(question, found), show_dry_run, found)
    return exit_code


def _check_ranks(ranks: Sequence[str], job: PlanJob) -> None:
    world = job.plan.world_size
    for text in ranks:
        if text.isdecimal() and int(text) >= world:
            raise OptionError(f"--ranks: expected 0 to {world - 1}, got {text}")


def _run(question: Question, options: PlanOptions) -> int:
    from profiler.plan.arithmetic import check_job

    check_job(question.job)  # reports errors before torch is loaded
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
    from profiler.plan.job import judge
    from profiler.plan.report import run_document, show_run

    verdict = judge(result, question.job.precision)
    document = run_document(question, result, verdict)
    unchecked = verdict is None and bool(result.notes)
    failed = unchecked or (verdict is not None and not verdict.matches)
    _tell(question, options, FAILED if failed else 0, document, show_run, result, verdict)
    if unchecked:
        raise UncheckedError("; ".join(result.notes))
    if verdict is not None and not verdict.matches:
        raise MismatchError(verdict.sentence)
    return 0


def _backend(options: PlanOptions) -> Backend:
    """Return the backend, which determines the device: nccl for GPUs, gloo for CPUs."""
    if options.device == "auto":
        return options.backend
    return "nccl" if options.device == "cuda" else "gloo"


# --------------------------------------------------------------------------------------------------
# The command line: options, and the work of each rank.


_NAME = "profile-plan"
_WIDTH = 80
"""Width of tables if stdout is not a terminal, columns."""
COMMAND = Command(
    name=_NAME,
    usage="[PLAN.json] [OPTIONS]",
    fills=(PlanOptions, GlobalOptions, SizeOptions),
    panels=PANELS,
    first=(),
    family="profile-plan",
    intro="""Check a plan by arithmetic, by a dry run (memory without a GPU) or by running it.

profile-plan PLAN.json --model llama2-7b

torchrun --standalone --nproc-per-node 4 -m profiler.plan PLAN.json --layers 4 --json OUT

The run uses random tokens and random weights, and saves no checkpoint.

Exit codes: 0 done; 1 the run does not match its reference, or failed; 2 invalid option or illegal
plan; 3 the plan does not fit in the dry run.
""",
)


def run(arguments: Sequence[str]) -> int:
    """Run the command with these arguments and return its exit code."""
    with running(_NAME) as now:
        now.on_stdout = environment_rank("RANK") == 0 and answers_stdout(arguments)
        return run_rank(
            COMMAND, arguments, lambda raw, rank: _check(raw, rank, arguments), name=_NAME
        )


def _check(raw: Mapping[str, object], rank: Rank, arguments: Sequence[str]) -> int:
    options = build_options(**raw)
    # heavy imports are delayed, so that --help and errors in options are fast
    from profiler.environment import launched_ranks
    from profiler.plan.question import ask

    launched = launched_ranks()
    mode: Mode = options.mode or ("static" if launched is None else "run")
    # only the first rank does arithmetic and counting
    if rank.number and mode != "run":
        return 0
    question = ask(options, mode=mode, launched=launched)
    if options.json == "-":  # no tables, which would contain the notes
        for note in question.notes:
            rank.say(note)
    refuse_illegal(question, options, mode, writes=rank.speaks)
    if mode == "run":
        _check_world(question, launched, arguments)
        rank.speak_of_machine()
    return dispatch(question, options, mode)


def _check_world(question: Question, launched: int | None, arguments: Sequence[str]) -> None:
    """Raise InputError, with the correct command, if the number of ranks differs from the plan."""
    world = question.job.plan.world_size
    if world == (launched or 1):
        return
    started = "this is one process" if launched is None else f"torchrun started {launched}"
    raise InputError(
        f"the plan is for {world} ranks, but {started}",
        remedy=(
            f"Run `{torchrun_line(world, 'profiler.plan', arguments)}` (with several "
            "nodes, on each of them with --nnodes and --rdzv-endpoint instead of "
            "--standalone)"
        ),
    )

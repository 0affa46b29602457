"""Names of pipeline schedules, their rules on chunks and micro-batches, and engine support.

Execution orders are in `autopar.pipeline.orders`, time and memory in `autopar.pipeline.formulas`.
This module contains only names, spellings and rules.
"""

from __future__ import annotations

from typing import Literal, get_args

from autopar.errors import InputError
from autopar.records import Record

Schedule = Literal[
    "1f1b",
    "gpipe",
    "interleaved",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zero_bubble_v",
    "dual_pipe_v",
]
"""Pipeline schedule; all of them end a step with one synchronisation."""
Engine = Literal["megatron", "torchtitan", "deepspeed", "galvatron"]
"""Engines that implement pipeline schedules."""


class ScheduleProperties(Record):
    """Properties of a schedule, apart from its execution order."""

    title: str
    """Name in documentation and messages."""
    least_chunks: int
    """Minimum number of chunks per rank."""
    most_chunks: int | None
    """Maximum number of chunks per rank; None: unlimited."""
    splits: bool
    """True if weight gradients are computed separately from input gradients, and later."""
    v_shaped: bool
    """True if chunks go down the ranks and come back up, so that the first rank also holds the last
    chunk. Otherwise they start at the first rank again."""
    engines: tuple[Engine, ...]
    source: str


SCHEDULES: dict[Schedule, ScheduleProperties] = {
    "1f1b": ScheduleProperties(
        title="1F1B",
        least_chunks=1,
        most_chunks=1,
        splits=False,
        v_shaped=False,
        engines=("megatron", "torchtitan", "deepspeed", "galvatron"),
        source="arXiv 1806.03377",
    ),
    "gpipe": ScheduleProperties(
        title="GPipe",
        least_chunks=1,
        most_chunks=1,
        splits=False,
        v_shaped=False,
        engines=("torchtitan", "galvatron"),
        source="arXiv 1811.06965",
    ),
    "interleaved": ScheduleProperties(
        title="interleaved 1F1B",
        least_chunks=2,
        most_chunks=None,
        splits=False,
        v_shaped=False,
        engines=("megatron", "torchtitan"),
        source="arXiv 2104.04473, section 2.2",
    ),
    "looped_bfs": ScheduleProperties(
        title="looped breadth-first",
        least_chunks=2,
        most_chunks=None,
        splits=False,
        v_shaped=False,
        engines=("torchtitan",),
        source="arXiv 2211.05953",
    ),
    "interleaved_zero_bubble": ScheduleProperties(
        title="interleaved zero-bubble",
        least_chunks=2,
        most_chunks=None,
        splits=True,
        v_shaped=False,
        engines=("torchtitan",),
        source="arXiv 2401.10241, ZB1P, as torch 2.13 interleaves it",
    ),
    "zero_bubble_v": ScheduleProperties(
        title="ZBV",
        least_chunks=2,
        most_chunks=2,
        splits=True,
        v_shaped=True,
        engines=("torchtitan",),
        source="arXiv 2401.10241, section 6, as in torch 2.13",
    ),
    "dual_pipe_v": ScheduleProperties(
        title="DualPipeV",
        least_chunks=2,
        most_chunks=2,
        splits=True,
        v_shaped=True,
        engines=("torchtitan",),
        source="github.com/deepseek-ai/DualPipe, as in torch 2.13",
    ),
}
assert tuple(SCHEDULES) == get_args(Schedule)

TORCH_NAMES: dict[Schedule, str] = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zero_bubble_v": "ZBVZeroBubble",
    "dual_pipe_v": "DualPipeV",
}
"""Names in `torch.distributed.pipelining` and torchtitan's `pipeline_parallel_schedule`."""
# torch ignores case in names; torchtitan of 2024 used other names
_BY_SPELLING: dict[str, Schedule] = {
    **{torch.lower(): name for name, torch in TORCH_NAMES.items()},
    **{name: name for name in SCHEDULES},
    "interleaved_1f1b": "interleaved",
}
SHORT_NAMES: dict[Schedule, str] = {
    "1f1b": "1f1b",
    "gpipe": "gpipe",
    "interleaved": "interleaved",
    "looped_bfs": "looped-bfs",
    "interleaved_zero_bubble": "zero-bubble",
    "zero_bubble_v": "zbv",
    "dual_pipe_v": "dualpipev",
}
"""Names on the command line, accepted in addition to torch's."""


def schedule_named(text: str) -> Schedule | None:
    """Return the schedule for a name in torch, torchtitan or autopar; None if unknown."""
    return _BY_SPELLING.get(text.lower())


def schedule_of_chunks(chunks: int) -> Schedule:
    """Return the default schedule of a pipeline with `chunks` chunks per stage."""
    return "interleaved" if chunks > 1 else "1f1b"


def default_group(stages: int, micro_batches: int) -> int:
    """Return the default number of consecutive micro-batches per chunk.

    It is the number of stages if that divides the micro-batches. Otherwise it follows torch's rule
    (`microbatches_per_round`): the number of complete rounds stays, and each round is longer.
    """
    return micro_batches // max(1, micro_batches // stages)


def schedule_problem(
    schedule: Schedule,
    *,
    stages: int,
    chunks: int,
    micro_batches: int,
    group: int = 0,
    engine: Engine | None = None,
) -> str | None:
    """Return the reason why a schedule cannot run, with its arithmetic; None if it can.

    group : consecutive micro-batches per chunk, 0 for the default.
    engine : engine whose rules apply; None for the rules that every order needs.
    """
    facts = SCHEDULES[schedule]
    if stages < 1 or micro_batches < 1 or chunks < 1:
        return (
            f"stages({stages}), chunks({chunks}) and micro-batches({micro_batches}) are not all 1 "
            "or more"
        )
    if engine is not None and engine not in facts.engines:
        return f"{engine} has no {facts.title} schedule"
    most = facts.most_chunks
    if chunks < facts.least_chunks or (most is not None and chunks > most):
        wanted = f"{facts.least_chunks}" + ("" if most == facts.least_chunks else " or more")
        return f"{facts.title} has {wanted} chunks a stage, not {chunks}"
    if schedule in ("interleaved", "interleaved_zero_bubble"):
        return _problem_of_groups(schedule, stages, micro_batches, group, engine)
    if schedule == "dual_pipe_v" and micro_batches < 2 * stages:
        return (
            f"{facts.title} needs as many micro-batches({micro_batches}) as there are parts of the "
            f"model, 2 * stages({stages}) = {2 * stages}"
        )
    if schedule == "1f1b" and engine == "torchtitan" and micro_batches < stages:
        return (
            f"{facts.title} needs as many micro-batches({micro_batches}) as there are "
            f"stages({stages})"
        )
    return None


def _problem_of_groups(
    schedule: Schedule, stages: int, micro_batches: int, group: int, engine: Engine | None
) -> str | None:
    title = SCHEDULES[schedule].title
    if schedule == "interleaved_zero_bubble" and group:
        # no engine has an argument for the group size
        whole = default_group(stages, micro_batches)
        if group != whole:
            return f"{title} has groups of {whole} micro-batches, not {group}"
    if group and group != stages:
        # a shorter group would deadlock around the ranks
        rest = micro_batches % group
        if group < stages or 0 < rest < stages:
            return (
                f"{title}: groups of {group} micro-batches leave {rest} of "
                f"{micro_batches}; each group needs at least stages({stages})"
            )
        return None
    # Megatron-LM requires complete rounds, torch makes longer ones
    rounds = stages if engine == "megatron" or group else max(1, micro_batches // stages)
    rest = micro_batches % rounds
    if not rest:
        return None
    name = f"stages({rounds})" if rounds == stages else f"rounds of stages({rounds})"
    return f"{title}: micro-batches({micro_batches}) % {name} = {rest} != 0"


def check_schedule(
    schedule: Schedule,
    *,
    stages: int,
    chunks: int,
    micro_batches: int,
    group: int = 0,
) -> None:
    """Raise InputError with the reason if `schedule_problem` returns one."""
    problem = schedule_problem(
        schedule, stages=stages, chunks=chunks, micro_batches=micro_batches, group=group
    )
    if problem is not None:
        raise InputError(problem)

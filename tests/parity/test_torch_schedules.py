"""Orders of a pipeline's work against the tables that the installed torch makes of its schedules.

torch makes the actions of all ranks in each process, from nothing but numbers of stages and
micro-batches, so that stages without a module do.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from autopar.pipeline.orders import actions, part_of, rank_of
from autopar.pipeline.schedules import SCHEDULES, TORCH_NAMES, Schedule, schedule_problem

pipelining = pytest.importorskip(
    "torch.distributed.pipelining.schedules", reason="torch with pipeline schedules is missing"
)
utils = pytest.importorskip("torch.distributed.pipelining._utils", reason="torch is missing")

STAGES = (2, 3, 4)
MICRO_BATCHES = (1, 2, 3, 5, 6, 8, 9)
MANY = [pytest.param(False, id="few"), pytest.param(True, marks=pytest.mark.slow, id="many")]


def torch_table(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> Any:
    """Return torch's actions of every rank; raises ValueError where it refuses."""
    own = [
        SimpleNamespace(
            num_stages=stages * chunks,
            group_size=stages,
            group_rank=0,
            stage_index=chunk * stages,
            submod=None,
            is_first=chunk == 0,
            is_last=False,
            has_backward=False,
            stage_index_to_group_rank=None,
        )
        for chunk in range(chunks)
    ]
    kind = pipelining.get_schedule_class(TORCH_NAMES[schedule])
    if issubclass(kind, pipelining.PipelineScheduleMulti):
        return kind(own, micro_batches).pipeline_order
    return kind(own[0], micro_batches)._get_pipeline_order()


def flat(table: list[Any]) -> list[tuple[str, int, int]]:
    """Return (kind, part of the model, micro-batch) of a rank, overlapped pairs in their order."""
    found = []
    for action in table:
        for one in (action.sub_actions or [action]) if action is not None else []:
            if one.computation_type.value in "FBIW":
                found.append((one.computation_type.value, one.stage_index, one.microbatch_index))
    return found


@pytest.mark.parametrize("many", MANY)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_orders_are_those_of_torch(schedule: Schedule, many: bool) -> None:
    """Every rank of every shape, and what torch refuses is refused."""
    facts = SCHEDULES[schedule]
    numbers = [facts.least_chunks] if facts.most_chunks else [2, 4 if many else 3]
    compared = refused = 0
    for stages in (*STAGES, 5, 8) if many else STAGES:
        for chunks in numbers:
            for number in (*MICRO_BATCHES, 10, 12, 16, 17, 24) if many else MICRO_BATCHES:
                problem = schedule_problem(
                    schedule,
                    stages=stages,
                    chunks=chunks,
                    micro_batches=number,
                    engine="torchtitan",
                )
                try:
                    table = torch_table(schedule, stages, chunks, number)
                except ValueError:
                    assert problem is not None
                    refused += 1
                    continue
                assert problem is None
                for rank in range(stages):
                    if schedule == "1f1b" and rank == stages - 1:
                        # its table begins with micro-batch 1 there, which its steps do not
                        continue
                    found = [
                        (kind, part_of(schedule, rank, chunk, stages), at)
                        for kind, chunk, at in actions(
                            schedule, rank, stages=stages, chunks=chunks, micro_batches=number
                        )
                    ]
                    assert found == flat(table[rank])
                    compared += 1
    assert compared > 15
    assert refused or schedule in ("gpipe", "looped_bfs", "zero_bubble_v")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parts_are_on_the_ranks_that_torch_places_them_on(schedule: Schedule) -> None:
    facts = SCHEDULES[schedule]
    chunks = facts.most_chunks or 4
    for stages in STAGES:
        style = "v" if facts.v_shaped else "loop"
        placed = utils.generate_stage_to_rank_mapping(stages, stages * chunks, style)
        assert placed == {part: rank_of(schedule, part, stages) for part in range(stages * chunks)}
        held = utils.generate_rank_to_stage_mapping(stages, stages * chunks, style)
        assert held == {
            rank: [part_of(schedule, rank, chunk, stages) for chunk in range(chunks)]
            for rank in range(stages)
        }

"""Pipeline schedules: execution orders, event replay, and closed formulas of time and memory."""

from __future__ import annotations

from autopar.pipeline.formulas import bubble_s, in_flight, step_s
from autopar.pipeline.orders import Action, actions, part_of, rank_of
from autopar.pipeline.placement import Placement, place_layers
from autopar.pipeline.replay import Replay, replay
from autopar.pipeline.schedules import (
    SCHEDULES,
    TORCH_NAMES,
    Engine,
    Schedule,
    ScheduleProperties,
    check_schedule,
    default_group,
    schedule_named,
    schedule_of_chunks,
    schedule_problem,
)

__all__ = [
    "SCHEDULES",
    "TORCH_NAMES",
    "Action",
    "Engine",
    "Placement",
    "Replay",
    "Schedule",
    "ScheduleProperties",
    "actions",
    "bubble_s",
    "check_schedule",
    "default_group",
    "in_flight",
    "part_of",
    "place_layers",
    "rank_of",
    "replay",
    "schedule_named",
    "schedule_of_chunks",
    "schedule_problem",
    "step_s",
]

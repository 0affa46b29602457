"""Prices a plan or strategy file of anyone: legal or not, within the budget or over it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import DocumentError
from autopar.plan_files import read_strategy

if TYPE_CHECKING:
    from autopar.plan import Plan
    from search.planner import Planner
    from search.result import Prediction

__all__ = ["evaluate_file", "read_plan_for"]


def read_plan_for(path: Path | str, planner: Planner) -> Plan:
    """Return the plan in a file, which must describe the planner's GPUs and layers.

    Raises
    ------
    DocumentError
        When it does not, because then there are no profiles to price it with.
    """
    world = planner.hardware.world_size
    plan = read_strategy(path, world_size=world)
    if plan.world_size != world:
        raise DocumentError(
            path,
            f"is {plan.world_size} while the hardware has {world} GPUs",
            key="world_size",
            remedy="give --hardware, --num-nodes and --num-gpus-per-node of the plan",
        )
    if len(plan.layers) != planner.spec.num_layers:
        raise DocumentError(
            path,
            f"describes {len(plan.layers)} layers while {planner.spec.name} has "
            f"{planner.spec.num_layers}",
            key="tp_sizes_enc",
            remedy=f"give --num-layers {len(plan.layers)}",
        )
    return plan


def evaluate_file(path: Path | str, planner: Planner) -> tuple[Plan, Prediction]:
    """Return the plan in a file and its prediction, with `legal`, `fits` and the arithmetic."""
    plan = read_plan_for(path, planner)
    return plan, planner.evaluate(plan)

"""Prices a plan or strategy file of anyone: legal or not, within the budget or over it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import DocumentError
from autopar.plan_files import read_strategy

if TYPE_CHECKING:
    from autopar.plan import Plan
    from search.result import Prediction
    from search.session import Session

__all__ = ["evaluate_file", "read_plan_for"]


def read_plan_for(source: Path | str | Mapping[str, object], session: Session) -> Plan:
    """Return the plan in a file, which must describe the GPUs and layers of the session.

    Raises
    ------
    DocumentError
        When it does not, because then there are no profiles to price it with.
    """
    world, spec = session.hardware.world_size, session.spec
    where = "plan" if isinstance(source, Mapping) else source
    plan = read_strategy(source, world_size=world)
    if plan.world_size != world:
        raise DocumentError(
            where,
            f"is {plan.world_size} while the hardware has {world} GPUs",
            key="world_size",
            remedy="give the plan's --hardware, or --num-nodes and --num-gpus-per-node",
        )
    if len(plan.layers) != spec.num_layers:
        raise DocumentError(
            where,
            f"describes {len(plan.layers)} layers while {spec.name} has {spec.num_layers}",
            key="tp_sizes_enc",
            remedy="give the plan's --model or --num-layers",
        )
    return plan


def evaluate_file(
    source: Path | str | Mapping[str, object], session: Session
) -> tuple[Plan, Prediction]:
    """Return the plan in a file and its prediction, with `legal`, `fits` and the arithmetic."""
    plan = read_plan_for(source, session)
    return plan, session.planner.evaluate(plan)

"""The process groups of a plan: one mesh of all stages, and the groups of every layout."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from profiler.plan.layout import Axes, Cube

__all__ = ["PlanGroups"]


class PlanGroups:
    """What one rank of a plan communicates through; every rank makes it with the same arguments.

    torch names a group by the number of groups before it, so all ranks make all groups in the
    same order, also those that they are not in.
    """

    def __init__(
        self,
        *,
        rank: int,
        num_stages: int,
        cube: Cube,
        wanted: Iterable[Axes],
        device_type: str,
        timeout_s: float | None = None,
        own_only: bool = False,
    ) -> None:
        """Make the groups along the axes `wanted`, in every stage.

        own_only : makes no groups of other ranks, which only a world that does not exist allows.
        """
        self.stage, self.place = divmod(rank, cube.num_ranks)
        self.num_stages, self.cube, self.rank = num_stages, cube, rank
        names = tuple(f"axis{axis}" for axis in range(len(cube.factors)))
        whole = init_device_mesh(
            device_type, (num_stages, *cube.factors), mesh_dim_names=("stage", *names)
        )
        self.pipeline: Any = whole.get_group("stage")
        """The ranks at this place in all stages."""
        self._device_type = device_type
        self._groups: dict[Axes, Any] = {}
        self._meshes: dict[Axes, DeviceMesh] = {}
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        for axes in sorted({axes for axes in wanted if cube.size(axes) > 1}):
            if len(axes) == 1:
                self._groups[axes] = whole.get_group(names[axes[0]])
                continue
            for stage in range(num_stages):
                first = stage * cube.num_ranks
                for members in cube.groups(axes):
                    ranks = [first + member for member in members]
                    is_own = rank in ranks
                    if own_only and not is_own:
                        continue
                    group = dist.new_group(ranks, timeout=timeout)
                    if is_own:
                        self._groups[axes] = group

        self.ends: Any = self._ends(timeout, own_only) if num_stages > 1 else None
        """First and last stage at this place; None on the stages between."""

    def _ends(self, timeout: timedelta | None, own_only: bool) -> Any:
        if self.num_stages == 2:
            return self.pipeline
        found = None
        last = (self.num_stages - 1) * self.cube.num_ranks
        for place in range(self.cube.num_ranks):
            ranks = [place, last + place]
            if own_only and self.rank not in ranks:
                continue
            group = dist.new_group(ranks, timeout=timeout)
            if self.rank in ranks:
                found = group
        return found

    def group(self, axes: Axes) -> Any:
        """Return the group of this rank along these axes; None where it would be alone."""
        return self._groups[axes] if self.cube.size(axes) > 1 else None

    @property
    def whole_stage(self) -> Any:
        """The group of all ranks of this stage; only where it was wanted."""
        return self.group(tuple(range(len(self.cube.factors))))

    def flat_mesh(self, axes: Axes) -> DeviceMesh:
        """Return the same group as a mesh of one dimension."""
        if axes not in self._meshes:
            self._meshes[axes] = DeviceMesh.from_group(self._groups[axes], self._device_type)
        return self._meshes[axes]

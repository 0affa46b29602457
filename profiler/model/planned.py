"""Layers of others laid out over a tensor group by their own plan, as one of its ranks sees them.

The group is torch's own stand-in for a process group of which one rank exists: DTensor has its
shapes, and collectives exchange nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["parallelized"]


def parallelized(layer: nn.Module, plan: Mapping[str, Any], degree: int) -> nn.Module:
    """Return the layer, changed in place by `parallelize_module` for rank 0 of `degree` ranks.

    Raises whatever a plan that does not fit the layer raises.
    """
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.distributed.tensor.parallel import parallelize_module

    with unset_fake_temporarily():  # the mesh is real: numbers of ranks are read from it
        mesh = _mesh(degree, next(layer.parameters()).device.type)
    result: nn.Module = parallelize_module(layer, mesh, dict(plan))
    return result


def _mesh(degree: int, device_type: str) -> Any:
    """Return a mesh of `degree` ranks of which this process is the first."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized() and dist.get_world_size() != degree:
        assert dist.get_backend() == "fake", dist.get_backend()
        dist.destroy_process_group()
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=degree, store=FakeStore())
    return init_device_mesh(device_type, (degree,))

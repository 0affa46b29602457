"""HardwareProfile: what is known of a cluster, in base units, whoever measured it.

The four documented files (all-reduce and point-to-point bandwidth, overlap coefficient,
collective times) meet here as one typed document; `hardware_files` reads and writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.sources import Source

__all__ = ["Curve", "HardwareProfile"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Measured times of one collective in one group.

    Parameters
    ----------
    sizes_bytes : (n,) increasing message sizes. all-reduce: the tensor; all-gather and
        reduce-scatter: the full (gathered) tensor; all-to-all: the local input tensor of a rank.
    times_s : (n,) seconds of one operation of that size.
    low_s, high_s : (n,) 5th and 95th percentile of the samples, None where unknown.
    """

    sizes_bytes: NDArray[np.float64]
    times_s: NDArray[np.float64]
    low_s: NDArray[np.float64] | None = None
    high_s: NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class HardwareProfile:
    """Bandwidths, collective times and capacities of `num_nodes` x `gpus_per_node` GPUs."""

    num_nodes: int
    gpus_per_node: int
    allreduce_bytes_per_s: Mapping[tuple[int, bool], float]
    """Bus bandwidth by (group size, consecutive): consecutive groups are ranks i*g .. i*g+g-1,
    the others ranks i, i+W/g, i+2W/g, ... The world group is stored under both."""
    p2p_bytes_per_s: Mapping[int, float]
    """Bandwidth of a transfer between neighbouring pipeline stages, by number of stages."""
    overlap_coefficient: float = 1.0
    """Slow-down of computation and communication while both run; >= 1."""
    curves: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    """Times by (operation, size of a consecutive group); operations are `allreduce`,
    `all2all` and, where a sidecar has them, `allgather` and `reducescatter`."""
    strided_curves: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    """Times by (operation, size of a group of ranks i, i+W/g, i+2W/g, ...), from sidecars."""
    p2p_curves: Mapping[int, Curve] = field(default_factory=dict)
    """Times of a transfer between neighbouring pipeline stages by number of stages, from
    sidecars; sizes are those of the message."""
    memory_bytes: float | None = None
    """Memory of one device, if known."""
    memory_bytes_per_s: float | None = None
    """Memory bandwidth of one device, if known; without it optimizer and look-up cost 0."""
    name: str = "measured"
    estimated: bool = False
    """True when the numbers come from a datasheet and not from a measurement."""
    synthetic: bool = False
    """True when the numbers exercise the code and describe no machine."""
    sources: tuple[Source, ...] = ()

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.num_nodes * self.gpus_per_node

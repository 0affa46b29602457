"""Message times: which measured group stands for a group of ranks, and what a message costs there.

A group is (size, stride): ranks i, i + stride, ..., so one number per group of a stage suffices.
Source: cost-model.md section 2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InputError
from autopar.hardware import Curve, HardwareProfile

__all__ = ["OPERATIONS", "Groups", "curve_s"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

OPERATIONS = ("allreduce", "allgather", "reducescatter", "all2all")
"""Collectives by their key; bytes are those of `Curve`: full tensor, all-to-all the local one."""


def _bus_factor(operation: str, size: int) -> float:
    """Bus traffic per byte of message: 2(g-1)/g for all-reduce, (g-1)/g for the others."""
    return (2.0 if operation == "allreduce" else 1.0) * (size - 1) / size


def curve_s(curve: Curve, num_bytes: F64) -> F64:
    """Return the time of messages of `num_bytes` (> 0) from a measured curve, in seconds.

    Piecewise linear in log-log between measured sizes; below the smallest the line through the
    two smallest, never under 0; above the largest proportional to bytes.
    """
    sizes, times = curve.sizes_bytes, curve.times_s
    inside = np.exp(np.interp(np.log(num_bytes), np.log(sizes), np.log(times)))
    above = times[-1] * num_bytes / sizes[-1]
    if len(sizes) == 1:
        below = times[0] * num_bytes / sizes[0]
    else:
        slope = (times[1] - times[0]) / (sizes[1] - sizes[0])
        below = np.maximum(times[0] + slope * (num_bytes - sizes[0]), 0.0)
    result: F64 = np.where(
        num_bytes < sizes[0], below, np.where(num_bytes > sizes[-1], above, inside)
    )
    return result


def _split(start: int, size: int, node: int) -> list[int]:
    """Return how many of the ranks start ... start + size - 1 lie on each node they touch."""
    stop = start + size
    first, last = start // node, (stop - 1) // node
    return [min(stop, (n + 1) * node) - max(start, n * node) for n in range(first, last + 1)]


class Groups:
    """The groups of ranks a search uses, each with its bus bandwidth and its measured curves.

    Group 0 is a single rank, whose messages cost nothing. `note` receives every derived or
    extrapolated value in words.
    """

    def __init__(self, hardware: HardwareProfile, note: Callable[[str], None]) -> None:
        self._hardware = hardware
        self._note = note
        self._index: dict[tuple[int, int], int] = {(1, 1): 0}
        self._bus_bytes_per_s: list[float] = [np.inf]
        self._slope_s_per_byte: dict[str, list[float]] = {op: [0.0] for op in OPERATIONS}
        self._curve: dict[str, list[int]] = {op: [-1] for op in OPERATIONS}
        self._curves: list[tuple[Curve, float, str]] = []
        self._curve_index: dict[tuple[str, int], int] = {}
        self._arrays: dict[str, tuple[F64, I64]] = {}
        self._bus: F64 = np.array([np.inf])

    def index(self, size: int, stride: int) -> int:
        """Return the number of the group of `size` ranks with this stride."""
        key = (size, stride) if size > 1 else (1, 1)
        found = self._index.get(key)
        return self._add(size, stride) if found is None else found

    def known(self, group: I64) -> NDArray[np.bool_]:
        """Return for each group whether its bandwidth is measured or can be derived."""
        result: NDArray[np.bool_] = ~np.isnan(self._bus[group])
        return result

    def bus_bytes_per_s(self, group: I64) -> F64:
        """Return the bus bandwidth of each group (inf for a single rank, nan when unknown)."""
        result: F64 = self._bus[group]
        return result

    def seconds(self, operation: str, num_bytes: F64, group: I64) -> F64:
        """Return the time of one `operation` of `num_bytes` in each group, in seconds.

        num_bytes and group have the same shape (n,).
        """
        slope, curve_of = self._table(operation)
        result: F64 = num_bytes * slope[group]
        curve_ids = curve_of[group]
        for number in set(curve_of.tolist()) - {-1}:
            rows = np.flatnonzero(curve_ids == number)
            if rows.size:
                curve, scale, label = self._curves[number]
                message = num_bytes[rows]
                if message.max() > curve.sizes_bytes[-1]:
                    self._note(
                        f"extrapolated: {label} messages larger than the largest measured size, "
                        "at constant bandwidth"
                    )
                result[rows] = scale * curve_s(curve, message)
        return result

    def point_to_point_bytes_per_s(self, num_stages: int) -> float:
        """Return the bandwidth between neighbours of `num_stages` stages, in bytes/s.

        A number of stages that was not measured takes the nearest smaller one, else the nearest
        larger. Raises InputError when no number of stages was measured.
        """
        measured = self._hardware.p2p_bytes_per_s
        if num_stages in measured:
            return measured[num_stages]
        if not measured:
            raise InputError(
                f"{self._hardware.name}: no point-to-point bandwidth is known for "
                f"pp_size_{num_stages}; give --p2p-bandwidth-config-path or --disable-pp"
            )
        smaller = [p for p in measured if p < num_stages]
        stand_in = max(smaller) if smaller else min(measured)
        self._note(f"derived: p2p bandwidth pp_size_{num_stages} taken from pp_size_{stand_in}")
        return measured[stand_in]

    def _table(self, operation: str) -> tuple[F64, I64]:
        if operation not in self._arrays:
            self._arrays[operation] = (
                np.array(self._slope_s_per_byte[operation]),
                np.array(self._curve[operation], dtype=np.int64),
            )
        return self._arrays[operation]

    def _add(self, size: int, stride: int) -> int:
        number = len(self._bus_bytes_per_s)
        self._index[(size, stride)] = number
        bandwidth = self._find_bandwidth(size, stride)
        self._bus_bytes_per_s.append(bandwidth)
        self._bus = np.array(self._bus_bytes_per_s)
        measurable = stride == 1 or self._hardware.num_nodes == 1
        for operation in OPERATIONS:
            slope = _bus_factor(operation, size) / bandwidth
            self._slope_s_per_byte[operation].append(np.inf if np.isnan(slope) else slope)
            self._curve[operation].append(self._find_curve(operation, size) if measurable else -1)
        self._arrays.clear()
        return number

    def _find_curve(self, operation: str, size: int) -> int:
        key = (operation, size)
        if key not in self._curve_index:
            curve, scale = self._hardware.curves.get(key), 1.0
            if curve is None and operation in ("allgather", "reducescatter"):
                curve, scale = self._hardware.curves.get(("allreduce", size)), 0.5
            if curve is None:
                self._curve_index[key] = -1
            else:
                self._curve_index[key] = len(self._curves)
                name = operation if scale == 1.0 else "allreduce"
                self._curves.append((curve, scale, f"{name}_size_{size}"))
        return self._curve_index[key]

    def _shape(self, size: int, stride: int) -> tuple[int, int]:
        """Fewest ranks on a node, and nodes, of a group; in one node always (size, 1).

        Neighbours whose number neither divides a node nor is divided by it straddle nodes in some
        of the groups that start at 0, size, 2*size, ...; all groups work at once, so the worst
        one counts.
        """
        if self._hardware.num_nodes == 1:
            return size, 1
        node = self._hardware.gpus_per_node
        if stride == 1 and node % size and size % node:
            starts = range(0, self._hardware.world_size - size + 1, size)
            parts = [_split(start, size, node) for start in starts]
            return min(map(min, parts), default=size), max(map(len, parts), default=1)
        per_node = max(1, min(size, node // stride))
        return per_node, -(-size // per_node)

    def _find_bandwidth(self, size: int, stride: int) -> float:
        """Bus bandwidth of a group: its own entry, one of the same shape, else derived (or nan)."""
        hardware, world = self._hardware, self._hardware.world_size
        measured = hardware.allreduce_bytes_per_s
        if stride == 1 and (size, True) in measured:
            return measured[size, True]
        if stride * size == world and (size, False) in measured:
            return measured[size, False]
        per_node, nodes = self._shape(size, stride)
        for consecutive in (True, False) if stride == 1 else (False, True):
            entry_stride = 1 if consecutive else world // size
            if (size, consecutive) in measured and (
                self._shape(size, entry_stride) == (per_node, nodes)
            ):
                return measured[size, consecutive]
        name = f"a group of {size} ranks with stride {stride}"
        neighbours = sorted(g for g, consecutive in measured if consecutive)
        inside = [g for g in neighbours if self._shape(g, 1)[1] == 1]
        across = [g for g in neighbours if g > hardware.gpus_per_node]
        if nodes == 1 and inside:
            stand_in = min((g for g in inside if g >= size), default=inside[-1])
            self._note(f"derived: bandwidth of {name} taken from allreduce_size_{stand_in}")
            return measured[stand_in, True]
        if nodes > 1 and across:
            wide = measured[across[-1], True] * per_node / hardware.gpus_per_node
            self._note(
                f"derived: bandwidth of {name} ({nodes} nodes, {per_node} ranks on each) "
                f"from allreduce_size_{across[-1]} and the bandwidth inside a node"
            )
            return min(wide, measured[inside[-1], True]) if inside else wide
        self._note(
            f"left out: no all-reduce bandwidth is measured or derivable for {name}; "
            f"measure allreduce_size_{world}_consec_1"
        )
        return float("nan")

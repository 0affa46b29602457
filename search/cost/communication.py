"""Message times: which measured group stands for a group of ranks, and what a message costs there.

A group is (size, stride): ranks i, i + stride, ..., so one number per group of a stage suffices.
Source: cost-model.md section 2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import F64, I64
from autopar.errors import InputError
from autopar.hardware import COLLECTIVES, OPERATIONS, Curve, HardwareProfile

__all__ = ["Groups", "curve_s", "half_allreduces"]


def curve_s(curve: Curve, num_bytes: F64) -> F64:
    """Return the time of messages of `num_bytes` (> 0) from a measured curve, in seconds.

    Piecewise linear in log-log between measured sizes; below the smallest the line from the
    latency, or without one through the two smallest, never under 0; above the largest
    proportional to bytes.
    """
    sizes, times = curve.sizes_bytes, curve.times_s
    inside = np.exp(np.interp(np.log(num_bytes), np.log(sizes), np.log(times)))
    # messages that large are bandwidth alone
    above = times[-1] * num_bytes / sizes[-1]
    empty = curve.empty_s
    # a line through two noisy points may fall below 0
    below = np.maximum(empty + (times[0] - empty) / sizes[0] * num_bytes, 0.0)
    return np.where(num_bytes < sizes[0], below, np.where(num_bytes > sizes[-1], above, inside))


def half_allreduces(hardware: HardwareProfile) -> list[str]:
    """Return where all-gather and reduce-scatter take half an all-reduce, one sentence each."""
    taken = "take half an all-reduce"
    halves = {"allgather", "reducescatter"}
    # timed nowhere: one sentence instead of one for every group
    if not halves & {operation for operation, _ in hardware.curves}:
        return [f"all-gather and reduce-scatter {taken}"]
    found = []
    for kind, curves in (("", hardware.curves), ("strided ", hardware.strided_curves)):
        timed = sorted(size for operation, size in curves if operation == "allreduce")
        missing = [size for size in timed if any((name, size) not in curves for name in halves)]
        if missing:
            which = "" if missing == timed else f" of {', '.join(map(str, missing))}"
            found.append(f"all-gather and reduce-scatter of {kind}groups{which} {taken}")
    return found


def _split(start: int, size: int, node: int) -> list[int]:
    """Return how many of the ranks start ... start + size - 1 lie on each node they touch."""
    stop = start + size
    first, last = start // node, (stop - 1) // node
    return [min(stop, (n + 1) * node) - max(start, n * node) for n in range(first, last + 1)]


def _name(size: int, stride: int) -> str:
    return f"a group of {size} ranks with stride {stride}"


class Groups:
    """The groups of ranks a search uses, each with its bus bandwidth and its measured curves.

    Group 0 is a single rank, whose messages cost nothing. `note` receives every derived or
    extrapolated value in words.
    """

    def __init__(self, hardware: HardwareProfile, note: Callable[[str], None]) -> None:
        self._hardware = hardware
        self._note = note
        self._index: dict[tuple[int, int], int] = {(1, 1): 0}
        # infinite bandwidth and slope 0: messages of a single rank are free without a branch
        self._bus_bytes_per_s: list[float] = [np.inf]
        self._slope_s_per_byte: dict[str, list[float]] = {op: [0.0] for op in COLLECTIVES}
        # -1: without a curve the slope prices a message; by operation, and whether it is one of
        # sequence parallelism
        self._curve: dict[tuple[str, bool], list[int]] = {
            (op, sequence): [-1] for op in COLLECTIVES for sequence in (False, True)
        }
        self._curves: list[tuple[Curve, float, str]] = []
        self._curve_index: dict[tuple[str, int, bool, bool], int] = {}
        self._transfers = {stages: curve.rising() for stages, curve in hardware.p2p_curves.items()}
        self._arrays: dict[tuple[str, bool], tuple[F64, I64]] = {}
        self._bus: F64 = np.array([np.inf])

    def index(self, size: int, stride: int) -> int:
        """Return the number of the group of `size` ranks with this stride."""
        # a group of one rank has no stride
        key = (size, stride) if size > 1 else (1, 1)
        found = self._index.get(key)
        return self._add(size, stride) if found is None else found

    def known(self, group: I64) -> NDArray[np.bool_]:
        """Return for each group whether its bandwidth is measured or can be derived."""
        return ~np.isnan(self._bus[group])

    def bus_bytes_per_s(self, group: I64) -> F64:
        """Return the bus bandwidth of each group (inf for a single rank, nan when unknown)."""
        return self._bus[group]

    def seconds(self, operation: str, num_bytes: F64, group: I64, *, sequence: bool = False) -> F64:
        """Return the time of one `operation` of `num_bytes` in each group, in seconds.

        num_bytes and group have the same shape (n,). sequence: the messages are those of sequence
        parallelism, which `sp_time` files price where they and the bandwidths are of two runs.
        """
        slope, curve_of = self._table(operation, sequence)
        # stays where there is no curve
        result: F64 = num_bytes * slope[group]
        curve_ids = curve_of[group]
        for number in set(curve_of.tolist()) - {-1}:
            rows = np.flatnonzero(curve_ids == number)
            if rows.size:
                curve, scale, label = self._curves[number]
                result[rows] = scale * self._measured_s(curve, num_bytes[rows], label)
        return result

    def point_to_point_s(self, num_stages: int, num_bytes: F64, copies: F64) -> F64:
        """Return the time of messages between neighbours of `num_stages` stages, in seconds.

        A message has num_bytes * copies (broadcast), > 0. The curve of this number of stages,
        else curve or bandwidth of the number that `point_to_point_bytes_per_s` takes; errors as
        there.
        """
        curves = self._transfers
        stand_in = num_stages if num_stages in curves else self._measured_stages(num_stages)
        if stand_in in curves:
            return self._measured_s(curves[stand_in], num_bytes * copies, f"pp_size_{stand_in}")
        if curves:
            self._note(
                f"without latency: transfers between {num_stages} stages have no measured times"
            )
        return num_bytes * (1.0 / self._hardware.p2p_bytes_per_s[stand_in]) * copies

    def point_to_point_bytes_per_s(self, num_stages: int) -> float:
        """Return the bandwidth between neighbours of `num_stages` stages, in bytes/s.

        A number of stages that was not measured takes the nearest smaller one, else the nearest
        larger. Raises InputError when no number of stages was measured.
        """
        return self._hardware.p2p_bytes_per_s[self._measured_stages(num_stages)]

    def _measured_stages(self, num_stages: int) -> int:
        measured = self._hardware.p2p_bytes_per_s
        if num_stages in measured:
            return num_stages
        if not measured:
            raise InputError(
                f"{self._hardware.name}: no point-to-point bandwidth is known for "
                f"pp_size_{num_stages}; give --p2p-bandwidth-config-path or --disable-pp"
            )
        smaller = [p for p in measured if p < num_stages]
        stand_in = max(smaller) if smaller else min(measured)
        self._note(f"derived: p2p bandwidth pp_size_{num_stages} taken from pp_size_{stand_in}")
        return stand_in

    def _measured_s(self, curve: Curve, num_bytes: F64, label: str) -> F64:
        if num_bytes.max() > curve.sizes_bytes[-1]:
            self._note(
                f"extrapolated: {label} messages larger than the largest measured size, "
                "at constant bandwidth"
            )
        return curve_s(curve, num_bytes)

    def _table(self, operation: str, sequence: bool) -> tuple[F64, I64]:
        key = operation, sequence
        if key not in self._arrays:
            self._arrays[key] = (
                np.array(self._slope_s_per_byte[operation]),
                np.array(self._curve[key], dtype=np.int64),
            )
        return self._arrays[key]

    def _add(self, size: int, stride: int) -> int:
        number = len(self._bus_bytes_per_s)
        self._index[(size, stride)] = number
        # its own or derived bandwidth first: which kind of entry it came from decides on the curves
        bandwidth, consecutive = self._find_bandwidth(size, stride)
        self._bus_bytes_per_s.append(bandwidth)
        self._bus = np.array(self._bus_bytes_per_s)
        kinds = self._curve_kinds(size, stride, consecutive)
        for operation in COLLECTIVES:
            # traffic of a ring per byte: (g-1)/g of the message, for an all-reduce twice
            slope = OPERATIONS[operation].bus_factor(size) / bandwidth
            # nan would pass through comparisons unseen, an infinite time never wins
            self._slope_s_per_byte[operation].append(np.inf if np.isnan(slope) else slope)
            for sequence in (False, True):
                found = (self._find_curve(operation, size, kind, sequence) for kind in kinds)
                self._curve[operation, sequence].append(next((n for n in found if n >= 0), -1))
        # arrays were made for fewer groups
        self._arrays.clear()
        timed = self._curve["allreduce", False][number] >= 0
        # documented files time neighbours only: nothing lacks until strided groups are timed
        if self._hardware.strided_curves and not timed and not np.isnan(bandwidth):
            self._note(
                f"without latency: {_name(size, stride)} has no measured times and is priced by "
                "bandwidth alone"
            )
        return number

    def _curve_kinds(self, size: int, stride: int, consecutive: bool | None) -> list[bool]:
        """Return whose curves price a group, neighbours (True) or strided groups, best first.

        consecutive : whose bandwidth stands for the group, None for a derived one. Across nodes
        the times of neighbours stand for others only where strided groups were timed too: else
        some groups would have a latency and the strided ones none.
        """
        hardware = self._hardware
        one_node = hardware.num_nodes == 1
        kinds = []
        if stride == 1:
            kinds.append(True)
        # strided entries are measured at stride W/size
        if stride * size == hardware.world_size or consecutive is False:
            kinds.append(False)
        # in one node all links are alike, whatever the stride
        if one_node or (consecutive and hardware.strided_curves):
            kinds.append(True)
        return kinds

    def _find_curve(self, operation: str, size: int, consecutive: bool, sequence: bool) -> int:
        key = (operation, size, consecutive, sequence)
        if key not in self._curve_index:
            curves = self._hardware.curves if consecutive else self._hardware.strided_curves
            curve, scale = curves.get((operation, size)), 1.0
            if curve is None and operation in ("allgather", "reducescatter"):
                # a ring's all-reduce is a reduce-scatter and an all-gather of the same tensor
                curve, scale = curves.get(("allreduce", size)), 0.5
                # times of neighbours, which the documents have for sequence parallelism alone
                if sequence and consecutive:
                    curve = self._hardware.sequence_curves.get(size, curve)
            if curve is None:
                self._curve_index[key] = -1
            else:
                self._curve_index[key] = len(self._curves)
                name = operation if scale == 1.0 else "allreduce"
                kind = "" if consecutive else "_consec_0"
                self._curves.append((curve.rising(), scale, f"{name}_size_{size}{kind}"))
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
        # of node // stride ranks at most: the others of a strided group are on other nodes
        per_node = max(1, min(size, node // stride))
        return per_node, -(-size // per_node)

    def _find_bandwidth(self, size: int, stride: int) -> tuple[float, bool | None]:
        """Bus bandwidth of a group, and whether its entry is that of neighbours.

        Its own entry, one of the same shape, else derived or nan, which belong to no entry.
        """
        hardware, world = self._hardware, self._hardware.world_size
        measured = hardware.allreduce_bytes_per_s
        if stride == 1 and (size, True) in measured:
            return measured[size, True], True
        if stride * size == world and (size, False) in measured:
            return measured[size, False], False
        per_node, nodes = self._shape(size, stride)
        # an entry of the group's own kind before one of the same shape alone
        for consecutive in (True, False) if stride == 1 else (False, True):
            entry_stride = 1 if consecutive else world // size
            if (size, consecutive) in measured and (
                self._shape(size, entry_stride) == (per_node, nodes)
            ):
                return measured[size, consecutive], consecutive
        name = _name(size, stride)
        neighbours = sorted(g for g, consecutive in measured if consecutive)
        inside = [g for g in neighbours if self._shape(g, 1)[1] == 1]
        across = [g for g in neighbours if g > hardware.gpus_per_node]
        if nodes == 1 and inside:
            stand_in = min((g for g in inside if g >= size), default=inside[-1])
            self._note(f"derived: bandwidth of {name} taken from allreduce_size_{stand_in}")
            return measured[stand_in, True], None
        if nodes > 1 and across:
            # all groups work at once: each has its ranks' share of a node's way out
            wide = measured[across[-1], True] * per_node / hardware.gpus_per_node
            self._note(
                f"derived: bandwidth of {name} ({nodes} nodes, {per_node} ranks on each) "
                f"from allreduce_size_{across[-1]} and the bandwidth inside a node"
            )
            # no group is faster across nodes than inside one
            return (min(wide, measured[inside[-1], True]) if inside else wide), None
        self._note(
            f"left out: no all-reduce bandwidth is measured or derivable for {name}; "
            f"measure allreduce_size_{world}_consec_1"
        )
        return float("nan"), None

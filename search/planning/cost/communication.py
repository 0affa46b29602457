"""Time of collectives and transfers in groups of ranks, from measured curves and bandwidths.

A group is (size, stride): ranks i, i + stride, .... All groups of a stage with equal size and
stride have the same time. Source: cost-model.md section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from autopar.arrays import F64, I64, Bool
from autopar.errors import InputError
from autopar.rates.measured import COLLECTIVES, OPERATIONS, Curve, HardwareProfile
from autopar.records import Record

_BLOCK = 1 << 14
"""Messages per look-up; blocks of this size fit into the CPU cache."""
_MOST_TOGETHER = 1 << 20
"""Maximum number of messages of several operations per look-up; about 100 bytes each."""


class CurveTable:
    """Table of measured curves (seconds over bytes), for look-ups in many curves at once.

    Between measured sizes: linear interpolation of logarithms. Below the smallest size: line to the
    time of an empty message (`Curve.empty_s`), at least 0. Above the largest size: proportional to
    bytes.
    """

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}
        self._curves: list[Curve] = []
        self._of: list[tuple[int, float]] = []
        self._tables: tuple[F64, F64, F64, F64] | None = None

    def add(self, curve: Curve, scale: float = 1.0) -> int:
        """Add a curve whose times are multiplied by `scale`, and return its number."""
        row = self._rows.setdefault(id(curve), len(self._curves))
        if row == len(self._curves):
            self._curves.append(curve)
        self._of.append((row, scale))
        self._tables = None
        return len(self._of) - 1

    def last_bytes(self, number: int) -> float:
        """Return the largest measured size of a curve in bytes."""
        return float(self._curves[self._of[number][0]].sizes_bytes[-1])

    def exceeded(self, number: I64, num_bytes: F64) -> Bool:
        """Return (n,) True if a message is larger than the largest measured size of its curve."""
        ends = (self._tables or self._made())[3]
        larger: Bool = num_bytes > ends[1, number]
        return larger

    def seconds(self, number: I64, num_bytes: F64) -> F64:
        """Return the time of messages, (n,) seconds.

        number : (n,) number of the curve of each message.
        num_bytes : (n,) size, above 0.
        """
        if len(number) <= _BLOCK:
            return self._seconds(number, num_bytes)
        starts = range(0, len(number), _BLOCK)
        cuts = [slice(start, start + _BLOCK) for start in starts]
        return np.concatenate([self._seconds(number[cut], num_bytes[cut]) for cut in cuts])

    def _seconds(self, number: I64, num_bytes: F64) -> F64:
        log_sizes, log_times, rises, ends = self._tables or self._made()
        logs = np.log(num_bytes)
        # The largest measured size not above the message, for smaller messages the first size.
        # The shape (points, n) keeps the summed values contiguous.
        at: I64 = np.add.reduce(log_sizes.take(number, axis=1) <= logs, axis=0) - 1
        np.maximum(at, 0, out=at)
        # one flat index over points and curves is faster than two
        at *= log_sizes.shape[1]
        at += number
        from_size = np.maximum(logs - log_sizes.take(at), 0.0)
        inside = np.exp(rises.take(at) * from_size + log_times.take(at))
        first, last, last_time, empty, slope, scale = ends.take(number, axis=1)
        # larger messages run at constant bandwidth
        above = last_time * num_bytes / last
        # a line through two noisy points may fall below 0
        below = np.maximum(empty + slope * num_bytes, 0.0)
        found = np.where(num_bytes < first, below, np.where(num_bytes > last, above, inside))
        result: F64 = scale * found
        return result

    def _made(self) -> tuple[F64, F64, F64, F64]:
        """Return the look-up arrays: log sizes, log times and slopes, (points, C), and (6, C) ends.

        The ends are smallest and largest size, largest time, empty time, slope below the smallest
        size, and scale.
        """
        counts = [len(c.sizes_bytes) for c in self._curves]
        most = max(counts)
        # curves of equal length, the common case, need no padding
        if min(counts) == most:
            sizes = np.array([c.sizes_bytes for c in self._curves])
            times = np.array([c.times_s for c in self._curves])
        else:
            sizes, times = np.empty((len(counts), most)), np.empty((len(counts), most))
            for i, (curve, n) in enumerate(zip(self._curves, counts, strict=True)):
                sizes[i, :n], times[i, :n] = curve.sizes_bytes, curve.times_s
                # flat padding, where only a message of exactly that size is looked up
                sizes[i, n:] = curve.sizes_bytes[-1] * np.arange(2.0, most - n + 2.0)
                times[i, n:] = curve.times_s[-1]
        log_sizes, log_times = np.log(sizes), np.log(times)
        rises = np.zeros_like(log_sizes)
        rises[:, :-1] = (log_times[:, 1:] - log_times[:, :-1]) / (
            log_sizes[:, 1:] - log_sizes[:, :-1]
        )
        empty = np.array([curve.empty_s for curve in self._curves])
        first = sizes[:, 0]
        last = np.array([curve.sizes_bytes[-1] for curve in self._curves])
        slope = (times[:, 0] - empty) / first
        rows = [row for row, _ in self._of]
        ends = np.empty((6, len(rows)))
        ends[:5] = np.array((first, last, times[:, -1], empty, slope))[:, rows]
        ends[5] = [scale for _, scale in self._of]
        sizes, times, rises = (
            np.ascontiguousarray(t[rows].T) for t in (log_sizes, log_times, rises)
        )
        self._tables = sizes, times, rises, ends
        return self._tables


def curve_s(curve: Curve, num_bytes: F64) -> F64:
    """Return the seconds of messages of `num_bytes` (> 0) from a measured curve.

    Interpolation follows `CurveTable`.
    """
    table = CurveTable()
    table.add(curve)
    flat = num_bytes.ravel()
    return table.seconds(np.zeros(flat.shape, dtype=np.int64), flat).reshape(num_bytes.shape)


_HALVES = frozenset({"allgather", "reducescatter"})


def half_allreduces(hardware: HardwareProfile) -> list[str]:
    """Return sentences on groups whose all-gather or reduce-scatter time is not measured.

    These use half of the all-reduce time.
    """
    taken = "cost half of an all-reduce"
    # if no group was measured, one sentence replaces a sentence per group
    if not _HALVES & {operation for operation, _ in hardware.curves}:
        return [f"all-gather and reduce-scatter {taken}"]
    found = []
    for kind, curves in (("", hardware.curves), ("strided ", hardware.strided_curves)):
        timed = sorted(size for operation, size in curves if operation == "allreduce")
        missing = [size for size in timed if any((name, size) not in curves for name in _HALVES)]
        if missing:
            which = "" if missing == timed else f" of {', '.join(map(str, missing))}"
            found.append(f"all-gather and reduce-scatter of {kind}groups{which} {taken}")
    return found


def _split(start: int, size: int, node: int) -> list[int]:
    """Return the number of ranks start ... start + size - 1 on each node that they touch."""
    stop = start + size
    first, last = start // node, (stop - 1) // node
    return [min(stop, (n + 1) * node) - max(start, n * node) for n in range(first, last + 1)]


def _name(size: int, stride: int) -> str:
    return f"a group of {size} ranks with stride {stride}"


_Found = TypeVar("_Found", covariant=True)
Asking: TypeAlias = Generator[list["Message"], list[F64], _Found]
"""Generator that yields its messages once, receives their seconds, and returns a price."""


def batched_prices(groups: Groups, *prices: Asking[Any]) -> list[Any]:
    """Return the results of the generators, whose messages are looked up together."""
    asked = [next(price) for price in prices]
    seconds = iter(groups.seconds_of([message for messages in asked for message in messages]))
    found = []
    for price, messages in zip(prices, asked, strict=True):
        try:
            price.send([next(seconds) for _ in messages])
        except StopIteration as end:
            found.append(end.value)
    assert len(found) == len(prices), "a price asks once"
    return found


_KINDS = tuple((op, sequence) for op in COLLECTIVES for sequence in (False, True))
"""Kinds of messages: (operation, True for sequence parallelism)."""
_KIND = {kind: number for number, kind in enumerate(_KINDS)}


class Message(NamedTuple):
    """Messages of one collective operation, one per row of a table."""

    operation: str
    num_bytes: F64
    """(n,) message size, bytes."""
    group: I64
    """(n,) number of the group, from `Groups.index`."""
    sequence: bool = False
    """True for messages of sequence parallelism, which use the times of `sp_time` files if these
    were not measured together with the bandwidths."""


class _Group(Record, eq=False):
    """Bandwidth and curves of one group of ranks from the hardware profile."""

    bus_bytes_per_s: float
    slope_s_per_byte: tuple[float, ...]
    """Seconds per byte of each of `_KINDS`."""
    curve: tuple[int, ...]
    """Number of the curve of each of `_KINDS`; -1: no curve, messages cost slope times bytes."""
    notes: tuple[str, ...]


class Documented:
    """Cache of bandwidth, curves and notes of the groups of ranks of one hardware profile.

    It is shared by all `Groups` of the cluster.
    """

    def __init__(self, hardware: HardwareProfile) -> None:
        self.hardware = hardware
        self.curves = CurveTable()
        self.labels: list[str] = []
        self._groups: dict[tuple[int, int], _Group] = {}
        self._curve_index: dict[tuple[int, float, str], int] = {}
        self._risen: dict[int, Curve] = {}
        self._notes: list[str] = []

    def group(self, size: int, stride: int) -> _Group:
        """Return bandwidth and curves of a group of several ranks."""
        key = (size, stride)
        if key not in self._groups:
            self._groups[key] = self._describe(size, stride)
        return self._groups[key]

    def transfer(self, num_stages: int) -> int:
        """Return the number of the measured curve of transfers between `num_stages` stages."""
        return self._number(self.hardware.p2p_curves[num_stages], 1.0, f"pp_size_{num_stages}")

    def _number(self, curve: Curve, scale: float, label: str) -> int:
        # several operations may share one curve, also with a factor of one half
        key = (id(curve), scale, label)
        if key not in self._curve_index:
            self.labels.append(label)
            if id(curve) not in self._risen:
                self._risen[id(curve)] = curve.rising()
            self._curve_index[key] = self.curves.add(self._risen[id(curve)], scale)
        return self._curve_index[key]

    def _note(self, text: str) -> None:
        self._notes.append(text)

    def _describe(self, size: int, stride: int) -> _Group:
        self._notes = []
        # the bandwidth first, because the kind of its entry determines the curves
        bandwidth, consecutive = self._find_bandwidth(size, stride)
        kinds = self._curve_kinds(size, stride, consecutive)
        slopes: list[float] = []
        curves: list[int] = []
        for operation, sequence in _KINDS:
            # only all-gathers and reduce-scatters may have separate times for sequence parallelism
            if sequence and not (operation in _HALVES and self.hardware.sequence_curves):
                slopes.append(slopes[-1])
                curves.append(curves[-1])
                continue
            # traffic of a ring per byte: (g-1)/g of the message, for an all-reduce twice
            slope = OPERATIONS[operation].bus_factor(size) / bandwidth
            # comparisons ignore nan, while an infinite time never wins
            slopes.append(np.inf if math.isnan(slope) else slope)
            number = -1
            for kind in kinds:
                number = self._find_curve(operation, size, kind, sequence)
                if number >= 0:
                    break
            curves.append(number)
        timed = curves[_KIND["allreduce", False]] >= 0
        # files of Galvatron contain times of contiguous groups only, so strided times are reported
        # as missing only if some strided group was measured
        if self.hardware.strided_curves and not timed and not math.isnan(bandwidth):
            self._note(
                f"without latency: {_name(size, stride)} has no measured times and is priced by "
                "bandwidth alone"
            )
        return _Group(
            bus_bytes_per_s=bandwidth,
            slope_s_per_byte=tuple(slopes),
            curve=tuple(curves),
            notes=tuple(self._notes),
        )

    def _curve_kinds(self, size: int, stride: int, consecutive: bool | None) -> list[bool]:
        """Return the kinds of curves for a group, best first: contiguous (True), strided (False).

        Across nodes, curves of contiguous groups are used for strided groups only if some strided
        group was measured. Otherwise only some of the strided groups would include a latency.

        consecutive : kind of the entry with the group's bandwidth; None if derived.
        """
        hardware = self.hardware
        one_domain = hardware.world_size <= hardware.joined_gpus
        kinds = []
        if stride == 1:
            kinds.append(True)
        # strided entries are measured at stride W/size
        if stride * size == hardware.world_size or consecutive is False:
            kinds.append(False)
        # within one node or rack all links are equal, whatever the stride
        if True not in kinds and (one_domain or (consecutive and hardware.strided_curves)):
            kinds.append(True)
        return kinds

    def _find_curve(self, operation: str, size: int, consecutive: bool, sequence: bool) -> int:
        curves = self.hardware.curves if consecutive else self.hardware.strided_curves
        curve, scale, name = curves.get((operation, size)), 1.0, operation
        if curve is None and operation in _HALVES:
            # a ring's all-reduce is a reduce-scatter and an all-gather of the same tensor
            curve, scale, name = curves.get(("allreduce", size)), 0.5, "allreduce"
            # `sp_time` files contain times of contiguous groups for sequence parallelism only
            if sequence and consecutive:
                curve = self.hardware.sequence_curves.get(size, curve)
        if curve is None:
            return -1
        label = f"{name}_size_{size}" + ("" if consecutive else "_consec_0")
        return self._number(curve, scale, label)

    def _shape(self, size: int, stride: int) -> tuple[int, int]:
        """Return (smallest number of ranks on a node, number of nodes) of a group.

        Nodes of one NVLink domain count as one node; a cluster of one node gives (size, 1). If the
        size of a contiguous group neither divides the node size nor is divided by it, some groups
        cross node boundaries. All groups communicate at once, so the worst one determines the
        result.
        """
        node = self.hardware.joined_gpus
        if self.hardware.world_size <= node:
            return size, 1
        if stride == 1 and node % size and size % node:
            starts = range(0, self.hardware.world_size - size + 1, size)
            parts = [_split(start, size, node) for start in starts]
            return min(map(min, parts), default=size), max(map(len, parts), default=1)
        # at most node // stride ranks on a node: the others of a strided group are on other nodes
        per_node = max(1, min(size, node // stride))
        return per_node, -(-size // per_node)

    def _find_bandwidth(self, size: int, stride: int) -> tuple[float, bool | None]:
        """Return (bus bandwidth of a group in bytes/s, kind of the measured entry).

        The kind is True for an entry of contiguous ranks, False for strided ones. It is that of the
        group or of a group with the same `_shape`. None: the bandwidth is derived, or nan if it
        cannot be derived.
        """
        hardware, world = self.hardware, self.hardware.world_size
        measured = hardware.allreduce_bytes_per_s
        if stride == 1 and (size, True) in measured:
            return measured[size, True], True
        if stride * size == world and (size, False) in measured:
            return measured[size, False], False
        per_node, nodes = self._shape(size, stride)
        # an entry of the group's kind is preferred to one that only has the same shape
        for consecutive in (True, False) if stride == 1 else (False, True):
            entry_stride = 1 if consecutive else world // size
            if (size, consecutive) in measured and (
                self._shape(size, entry_stride) == (per_node, nodes)
            ):
                return measured[size, consecutive], consecutive
        name = _name(size, stride)
        neighbours = sorted(g for g, consecutive in measured if consecutive)
        inside = [g for g in neighbours if self._shape(g, 1)[1] == 1]
        across = [g for g in neighbours if g > hardware.joined_gpus]
        if nodes == 1 and inside:
            stand_in = min((g for g in inside if g >= size), default=inside[-1])
            self._note(f"derived: bandwidth of {name} taken from allreduce_size_{stand_in}")
            return measured[stand_in, True], None
        if nodes > 1 and across:
            # all groups communicate at once, so each has per_node / joined_gpus of the uplink
            wide = measured[across[-1], True] * per_node / hardware.joined_gpus
            self._note(
                f"derived: bandwidth of {name} ({nodes} nodes, {per_node} ranks on each) "
                f"from allreduce_size_{across[-1]} and the bandwidth inside a node"
            )
            # no group is faster across nodes than inside one
            return (min(wide, measured[inside[-1], True]) if inside else wide), None
        self._note(
            "not searched: no all-reduce bandwidth is measured or derivable for "
            f"{name}. Measure allreduce_size_{world}_consec_1"
        )
        return float("nan"), None


class Groups:
    """Numbered groups of ranks of a search, with the time of messages in each group.

    Group 0 is a single rank, whose messages cost 0 s.

    note : function called with a sentence for every derived or extrapolated value.
    documented : cache shared with other `Groups` of the same cluster; None: a new one.
    """

    def __init__(
        self,
        hardware: HardwareProfile,
        note: Callable[[str], None],
        documented: Documented | None = None,
    ) -> None:
        self.documented = Documented(hardware) if documented is None else documented
        self._hardware = hardware
        self._tell = note
        self.silent = True
        """True if no value was derived or extrapolated so far."""
        self._index: dict[tuple[int, int], int] = {(1, 1): 0}
        """Numbers of the requested groups, in order of request."""
        self._numbers: dict[tuple[int, int], int] = {}
        """Numbers of groups requested from the `Groups` that this one was copied from."""
        # infinite bandwidth and slope 0 make messages of a single rank free without a branch
        nothing = (0.0,) * len(_KINDS), (-1,) * len(_KINDS)
        self._groups = [
            _Group(bus_bytes_per_s=np.inf, slope_s_per_byte=nothing[0], curve=nothing[1], notes=())
        ]
        self._arrays: tuple[F64, I64] | None = None
        self._bus: F64 | None = None

    def without_notes(self, note: Callable[[str], None]) -> Groups:
        """Return a copy with the same group numbers whose notes are reported again, to `note`."""
        other = Groups(self._hardware, note, self.documented)
        other._numbers = self._numbers | self._index
        other._groups = self._groups.copy()
        other._arrays, other._bus = self._arrays, self._bus
        return other

    def _note(self, text: str) -> None:
        self.silent = False
        self._tell(text)

    def index(self, size: int, stride: int) -> int:
        """Return the number of the group of `size` ranks with this stride."""
        # a group of one rank has no stride
        key = (size, stride) if size > 1 else (1, 1)
        found = self._index.get(key)
        return self._add(size, stride) if found is None else found

    def has(self, group: int) -> bool:
        """Return True if a group's bandwidth is measured or can be derived."""
        return not math.isnan(self._groups[group].bus_bytes_per_s)

    def bus_bytes_per_s(self, group: I64) -> F64:
        """Return the bus bandwidth of each group, bytes/s (inf for a single rank, nan: unknown)."""
        if self._bus is None:
            self._bus = np.array([found.bus_bytes_per_s for found in self._groups])
        return self._bus[group]

    def seconds(self, operation: str, num_bytes: F64, group: I64, *, sequence: bool = False) -> F64:
        """Return the time of one collective per row, (n,) seconds; arguments as in `Message`."""
        message = Message(operation=operation, num_bytes=num_bytes, group=group, sequence=sequence)
        return self.seconds_of([message])[0]

    def seconds_of(self, messages: Sequence[Message]) -> list[F64]:
        """Return the times of each message, (n,) seconds, with one look-up for all."""
        if not messages:
            return []
        # many rows are looked up one message at a time to save memory
        if len(messages) > 1 and sum(len(m.num_bytes) for m in messages) > _MOST_TOGETHER:
            return [self.seconds_of([message])[0] for message in messages]
        place, num_bytes, ends = self._laid_out(messages)
        slopes, curves = self._arrays or self._made()
        # bandwidth only; replaced for messages with a curve
        result: F64 = num_bytes * slopes[place]
        number = curves[place]
        rows = (number >= 0).nonzero()[0]
        if rows.size:
            measured, asked = number[rows], num_bytes[rows]
            result[rows] = self.documented.curves.seconds(measured, asked)
            self._note_large(rows, measured, asked, ends)
        return [result[start:end] for start, end in pairwise((0, *ends))]

    def note_messages(self, messages: Sequence[Message]) -> None:
        """Add the notes that `seconds_of` would add, without computing times."""
        if not messages:
            return
        place, num_bytes, ends = self._laid_out(messages)
        _, curves = self._arrays or self._made()
        number = curves[place]
        rows = (number >= 0).nonzero()[0]
        if rows.size:
            self._note_large(rows, number[rows], num_bytes[rows], ends)

    def _made(self) -> tuple[F64, I64]:
        """Return (seconds per byte, curve numbers) of all groups, concatenated over `_KINDS`."""
        slopes = np.array([found.slope_s_per_byte for found in self._groups]).T
        curves = np.array([found.curve for found in self._groups], dtype=np.int64).T
        self._arrays = slopes.ravel(), curves.ravel()
        return self._arrays

    def _laid_out(self, messages: Sequence[Message]) -> tuple[I64, F64, list[int]]:
        """Return the concatenated messages: (index into `_made`, bytes, end index of each)."""
        count = len(self._groups)
        lengths = [len(m.num_bytes) for m in messages]
        # the arrays contain all groups of the first kind of message, then those of the next
        place = np.repeat([count * _KIND[m.operation, m.sequence] for m in messages], lengths)
        place += np.concatenate([m.group for m in messages])
        num_bytes = np.concatenate([m.num_bytes for m in messages])
        return place, num_bytes, list(accumulate(lengths))

    def _note_large(self, row: I64, curve: I64, num_bytes: F64, ends: Sequence[int]) -> None:
        """Add a note for every curve with a message above its largest measured size.

        Notes are ordered by message, then by the first use of the curve.
        """
        large = self.documented.curves.exceeded(curve, num_bytes).nonzero()[0]
        if not large.size:
            return
        message = np.searchsorted(ends, row[large], side="right")
        used = (self._groups[number] for number in self._index.values())
        met = list(dict.fromkeys(n for found in used for n in found.curve if n >= 0))
        rank = np.zeros(max(met) + 1, dtype=np.int64)
        rank[met] = np.arange(len(met))
        for key in np.unique(message * len(met) + rank[curve[large]]).tolist():
            self._note_above(met[key % len(met)])

    def _note_above(self, curve: int) -> None:
        self._note(
            f"extrapolated: {self.documented.labels[curve]} messages larger than the largest "
            "measured size, at constant bandwidth"
        )

    def transfers_s(self, stages: I64, num_bytes: F64, copies: F64) -> F64:
        """Return the time of transfers between adjacent stages, (N, K, Y) seconds; 0 for p == 1.

        A number of stages without a measured curve uses curve or bandwidth of the number that
        `point_to_point_bytes_per_s` selects. Raises InputError without any measured bandwidth.

        stages : (N,) numbers of stages p.
        num_bytes, copies : (N, K) and (Y,); a message has num_bytes * copies bytes, above 0.
        """
        result = np.zeros((*num_bytes.shape, len(copies)))
        curves = self._hardware.p2p_curves
        for p in sorted(set(stages.tolist()) - {1}):
            rows = (stages == p).nonzero()[0]
            sent = num_bytes[rows][:, :, None]
            stand_in = p if p in curves else self._measured_stages(p)
            if stand_in in curves:
                number, sizes = self.documented.transfer(stand_in), sent * copies
                if sizes.size and sizes.max() > self.documented.curves.last_bytes(number):
                    self._note_above(number)
                which = np.full(sizes.size, number, dtype=np.int64)
                times = self.documented.curves.seconds(which, sizes.ravel())
                result[rows] = times.reshape(sizes.shape)
                continue
            if curves:
                self._note(f"without latency: transfers between {p} stages have no measured times")
            result[rows] = sent * (1.0 / self._hardware.p2p_bytes_per_s[stand_in]) * copies
        return result

    def point_to_point_bytes_per_s(self, num_stages: int) -> float:
        """Return the bandwidth between adjacent stages of a pipeline, bytes/s.

        If `num_stages` was not measured, the nearest smaller measured number is used, else the
        nearest larger. Raises InputError if no bandwidth was measured.
        """
        return self._hardware.p2p_bytes_per_s[self._measured_stages(num_stages)]

    def _measured_stages(self, num_stages: int) -> int:
        measured = self._hardware.p2p_bytes_per_s
        if num_stages in measured:
            return num_stages
        if not measured:
            raise InputError(
                f"{self._hardware.name}: no point-to-point bandwidth for pp_size_{num_stages}",
                remedy="Add --p2p-bandwidth-config-path, or --disable-pp 1",
            )
        smaller = [p for p in measured if p < num_stages]
        stand_in = max(smaller) if smaller else min(measured)
        self._note(f"derived: p2p bandwidth pp_size_{num_stages} taken from pp_size_{stand_in}")
        return stand_in

    def _add(self, size: int, stride: int) -> int:
        key = (size, stride)
        number = self._numbers.get(key)
        if number is None:
            number = len(self._groups)
            self._groups.append(self.documented.group(size, stride))
            # the arrays were made for fewer groups
            self._arrays, self._bus = None, None
        self._index[key] = number
        for text in self._groups[number].notes:
            self._note(text)
        return number

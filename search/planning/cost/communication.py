"""Message times: the measured group that represents a group of ranks, and the cost of a message.

A group is (size, stride): ranks i, i + stride, ..., so one number per group of a stage suffices.
Source: cost-model.md section 2.
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
"""Messages per look-up block: many enough to be fast, few enough for the cache."""
_MOST_TOGETHER = 1 << 20
"""Maximum messages of several kinds looked up at once; about 100 bytes each."""


class CurveTable:
    """Measured curves as rows of one table, which prices messages of many curves at once.

    Piecewise linear in log-log between measured sizes. Below the smallest size: the line from the
    latency, or without a latency through the two smallest sizes, never under 0. Above the largest
    size: proportional to bytes.
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
        """Return True for each message (n,) larger than the largest size of its curve (n,)."""
        ends = (self._tables or self._made())[3]
        larger: Bool = num_bytes > ends[1, number]
        return larger

    def seconds(self, number: I64, num_bytes: F64) -> F64:
        """Return the seconds of messages of `num_bytes` (> 0), each (n,) on its curve."""
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
        # larger messages are limited by bandwidth alone
        above = last_time * num_bytes / last
        # a line through two noisy points may fall below 0
        below = np.maximum(empty + slope * num_bytes, 0.0)
        found = np.where(num_bytes < first, below, np.where(num_bytes > last, above, inside))
        result: F64 = scale * found
        return result

    def _made(self) -> tuple[F64, F64, F64, F64]:
        """Return log sizes, log times and slopes, each (most points, C), and (6, C) ends."""
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
    """Return sentences on groups whose all-gather and reduce-scatter use half an all-reduce."""
    taken = "cost half of an all-reduce"
    # if never timed, one sentence replaces one per group
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
"""Price that requests the times of all its messages once, then continues with them."""


def batched_prices(groups: Groups, *prices: Asking[Any]) -> list[Any]:
    """Return the result of each price, with the messages of all of them looked up at once."""
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
"""(operation, True for sequence parallelism) of a message."""
_KIND = {kind: number for number, kind in enumerate(_KINDS)}


class Message(NamedTuple):
    """One type of collective for n rows: bytes and group index of each row, both of shape (n,)."""

    operation: str
    num_bytes: F64
    group: I64
    sequence: bool = False
    """True for messages of sequence parallelism, which `sp_time` files price if they and the
    bandwidths are of two runs."""


class _Group(Record, eq=False):
    """Bandwidth and curves of one group of ranks from the documents."""

    bus_bytes_per_s: float
    slope_s_per_byte: tuple[float, ...]
    """Seconds per byte, in the order of `_KINDS` like `curve`."""
    curve: tuple[int, ...]
    """Numbers in the table; -1 if there is no curve and the slope prices a message."""
    notes: tuple[str, ...]


class Documented:
    """Groups of one cluster from its documents, each looked up once.

    Shared by all `Groups` of the cluster; sentences about a group are stored with its numbers.
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
        # measured or derived bandwidth first, because the kind of its entry decides on the curves
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
        # documented files time only neighbours, so nothing is missing unless strided groups are
        # timed
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
        """Return the curves that price a group, neighbours (True) or strided (False), best first.

        consecutive : kind of entry that gives the group's bandwidth; None if derived. Across nodes
            the times of neighbours represent strided groups only if strided groups were timed too.
            Otherwise some groups would have a latency and the strided ones none.
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
            # times of neighbours, which the documents contain for sequence parallelism only
            if sequence and consecutive:
                curve = self.hardware.sequence_curves.get(size, curve)
        if curve is None:
            return -1
        label = f"{name}_size_{size}" + ("" if consecutive else "_consec_0")
        return self._number(curve, scale, label)

    def _shape(self, size: int, stride: int) -> tuple[int, int]:
        """Return (fewest ranks on a node, nodes) of a group; in one node always (size, 1).

        The nodes of a rack with a common link domain count as one. Neighbours whose number neither
        divides a node nor is divided by it straddle nodes in some of the groups that start at 0,
        size, 2*size, .... All groups communicate at once, so the worst one counts.
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
        """Return the bus bandwidth of a group, and True if its entry is of neighbours.

        The entry is the group's own or one of the same shape. Otherwise the bandwidth is derived or
        nan, and the second value is None.
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
            # all groups communicate at once, so each has its ranks' share of a node's uplink
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
    """Groups of ranks in a search, each with its bus bandwidth and its measured curves.

    Group 0 is a single rank, whose messages cost nothing.

    note : called with a sentence for every derived or extrapolated value.
    documented : look-ups shared with other groups of the same cluster.
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
        """True while nothing was derived or extrapolated."""
        self._index: dict[tuple[int, int], int] = {(1, 1): 0}
        """Numbers of the requested groups, in order of request."""
        self._numbers: dict[tuple[int, int], int] = {}
        """Numbers of groups that another user of the same numbering has requested."""
        # infinite bandwidth and slope 0 make messages of a single rank free without a branch
        nothing = (0.0,) * len(_KINDS), (-1,) * len(_KINDS)
        self._groups = [
            _Group(bus_bytes_per_s=np.inf, slope_s_per_byte=nothing[0], curve=nothing[1], notes=())
        ]
        self._arrays: tuple[F64, I64] | None = None
        self._bus: F64 | None = None

    def without_notes(self, note: Callable[[str], None]) -> Groups:
        """Return the same groups under the same numbers, with nothing noted yet."""
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
        """Return the seconds of one `operation` of `num_bytes` in each group.

        Parameters are the fields of `Message`.
        """
        message = Message(operation=operation, num_bytes=num_bytes, group=group, sequence=sequence)
        return self.seconds_of([message])[0]

    def seconds_of(self, messages: Sequence[Message]) -> list[F64]:
        """Return the seconds of all messages, looked up at once."""
        if not messages:
            return []
        # many rows are looked up one message at a time to save memory
        if len(messages) > 1 and sum(len(m.num_bytes) for m in messages) > _MOST_TOGETHER:
            return [self.seconds_of([message])[0] for message in messages]
        place, num_bytes, ends = self._laid_out(messages)
        slopes, curves = self._arrays or self._made()
        # remains valid without a curve
        result: F64 = num_bytes * slopes[place]
        number = curves[place]
        rows = (number >= 0).nonzero()[0]
        if rows.size:
            measured, asked = number[rows], num_bytes[rows]
            result[rows] = self.documented.curves.seconds(measured, asked)
            self._note_large(rows, measured, asked, ends)
        return [result[start:end] for start, end in pairwise((0, *ends))]

    def note_messages(self, messages: Sequence[Message]) -> None:
        """Add the notes of `seconds_of` without times, for groups requested by `index`."""
        if not messages:
            return
        place, num_bytes, ends = self._laid_out(messages)
        _, curves = self._arrays or self._made()
        number = curves[place]
        rows = (number >= 0).nonzero()[0]
        if rows.size:
            self._note_large(rows, number[rows], num_bytes[rows], ends)

    def _made(self) -> tuple[F64, I64]:
        """Return slopes and curves of all groups, one kind of message after the other."""
        slopes = np.array([found.slope_s_per_byte for found in self._groups]).T
        curves = np.array([found.curve for found in self._groups], dtype=np.int64).T
        self._arrays = slopes.ravel(), curves.ravel()
        return self._arrays

    def _laid_out(self, messages: Sequence[Message]) -> tuple[I64, F64, list[int]]:
        """Return (places in the arrays, sizes, end of each message), messages concatenated."""
        count = len(self._groups)
        lengths = [len(m.num_bytes) for m in messages]
        # a row of the arrays is a kind of message, a column a group
        place = np.repeat([count * _KIND[m.operation, m.sequence] for m in messages], lengths)
        place += np.concatenate([m.group for m in messages])
        num_bytes = np.concatenate([m.num_bytes for m in messages])
        return place, num_bytes, list(accumulate(lengths))

    def _note_large(self, row: I64, curve: I64, num_bytes: F64, ends: Sequence[int]) -> None:
        """Note the curves (n,) that messages exceed, by message and in the order of first use."""
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
        """Return the seconds of messages between neighbouring stages, (N, K, Y); 0 for p == 1.

        stages : (N,) p.
        num_bytes, copies : (N, K) and (Y,); a message has num_bytes * copies bytes, > 0.

        Uses the curve of this number of stages, else curve or bandwidth of the number that
        `point_to_point_bytes_per_s` selects; raises as it does.
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
        """Return the bandwidth between neighbours of `num_stages` stages, in bytes/s.

        An unmeasured number of stages uses the nearest smaller one, else the nearest larger. Raises
        InputError if no number of stages was measured.
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

"""HardwareProfile: bandwidths and times of a cluster, in base units, from any source.

Galvatron's four hardware files (all-reduce and point-to-point bandwidth, overlap coefficient,
collective times) become one record here; `documents.hardware` reads and writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from msgspec import field
from numpy.typing import NDArray

from autopar.records import Record, replace
from autopar.run.runtime import OverlapFactors
from autopar.sources import Source
from autopar.statistics import rising_fit
from autopar.units import MIB, format_message

COMMUNICATOR_BYTES = 64 * MIB
"""Buffers of one communicator; counted only for estimated hardware."""


# --------------------------------------------------------------------------------------------------
# Communication operations: definition of their message size and the bus traffic they cause.
#
# Bus bandwidth is message bytes times the factor over time; it does not depend on the number of
# ranks where the link is the limit. Source of the factors: nccl-tests, doc/PERFORMANCE.md.


class Operation(Record):
    """One operation over a group of ranks."""

    name: str
    message: str
    """Tensor whose bytes are the message size."""
    bus_factor: Callable[[int], float]
    """Bus traffic per byte of message in a group of n ranks."""


def _whole(num_ranks: int) -> float:
    return 1.0


def _others_share(num_ranks: int) -> float:
    # Every rank sends n - 1 of the n parts of a tensor.
    return (num_ranks - 1) / num_ranks


OPERATIONS = {
    operation.name: operation
    for operation in (
        # An all-reduce is a reduce-scatter and an all-gather of one tensor.
        Operation(
            name="allreduce", message="the tensor", bus_factor=lambda n: 2.0 * _others_share(n)
        ),
        Operation(name="allgather", message="the gathered tensor", bus_factor=_others_share),
        Operation(
            name="reducescatter", message="the tensor that is scattered", bus_factor=_others_share
        ),
        Operation(name="all2all", message="the tensor of one rank", bus_factor=_others_share),
        Operation(name="p2p", message="the message", bus_factor=_whole),
        # Both directions run at once; the bytes are those of one direction.
        Operation(name="p2p_bidirectional", message="the message each way", bus_factor=_whole),
        # A copy on the device reads and writes every byte.
        Operation(name="memcopy", message="the tensor copied", bus_factor=lambda n: 2.0),
    )
}
"""Operations by their key in files."""


def bus_bytes_per_s(operation: str, group_size: int, size_bytes: float, time_s: float) -> float:
    """Return the bus bandwidth of one operation, bytes/s."""
    return OPERATIONS[operation].bus_factor(group_size) * size_bytes / time_s


# --------------------------------------------------------------------------------------------------
# Curves of operations over group size and message size.


COLLECTIVES = ("allreduce", "allgather", "reducescatter", "all2all")
"""Group operations with curves; transfers between stages have their own curves."""

Speed = Literal["fast", "slow"]
"""End of the measured spread of communication times: 5th or 95th percentile."""


class Curve(Record, eq=False, dict=True):
    """Measured times of one collective in one group.

    Parameters
    ----------
    sizes_bytes : (n,) increasing message sizes. all-reduce: the tensor; all-gather and
        reduce-scatter: the full (gathered) tensor; all-to-all: the local input tensor of a rank.
    times_s : (n,) seconds of one operation of that size.
    low_s, high_s : (n,) 5th and 95th percentile of the samples, None where unknown.
    latency_s : fitted seconds of an empty message; None without a fit.
    """

    sizes_bytes: NDArray[np.float64]
    times_s: NDArray[np.float64]
    low_s: NDArray[np.float64] | None = None
    high_s: NDArray[np.float64] | None = None
    latency_s: float | None = None

    @property
    def has_spread(self) -> bool:
        """True if a percentile is known."""
        return self.low_s is not None or self.high_s is not None

    @property
    def empty_s(self) -> float:
        """Extrapolated time of an empty message, in seconds.

        The fitted latency, otherwise the line through the two smallest sizes; negative where times
        grow faster than sizes.
        """
        # The fit uses all sizes and is more accurate than a line through two noisy points.
        if self.latency_s is not None:
            return self.latency_s
        # A single time cannot be split: all of it counts as bandwidth.
        if len(self.sizes_bytes) == 1:
            return 0.0
        first, second = (float(v) for v in self.sizes_bytes[:2])
        rise = float(self.times_s[1] - self.times_s[0]) / (second - first)
        return float(self.times_s[0]) - rise * first

    def rising(self) -> Curve:
        """Return the curve smoothed so that times and percentiles never fall as messages grow.

        Medians of a busy machine scatter. A plan that sends more bytes must not win because the
        samples of its size were lucky.
        """
        return self._rising

    @cached_property
    def _rising(self) -> Curve:

        def risen(times_s: NDArray[np.float64] | None) -> NDArray[np.float64] | None:
            return None if times_s is None else rising_fit(times_s)

        # Each row separately: if low is nowhere above the median, its fit is not either.
        times = rising_fit(self.times_s)
        return Curve(
            sizes_bytes=self.sizes_bytes,
            times_s=times,
            low_s=risen(self.low_s),
            high_s=risen(self.high_s),
            # A fit over all sizes can miss the smallest; an empty message takes no longer than that
            # one.
            latency_s=None if self.latency_s is None else min(self.latency_s, float(times[0])),
        )

    def at_spread(self, speed: Speed) -> Curve:
        """Return the rising curve at its 5th (`fast`) or 95th (`slow`) percentile, without spread.

        Below the smallest size its relative spread is used, so that the fast curve is nowhere above
        this one and the slow one nowhere below.
        """
        curve = self.rising()
        # Without this percentile the curve is not moved.
        if (curve.low_s if speed == "fast" else curve.high_s) is None:
            return replace(curve, low_s=None, high_s=None)
        ratio = curve.spread_ratio(speed)
        return Curve(
            sizes_bytes=curve.sizes_bytes,
            times_s=curve.times_s * ratio,
            # Latency is scaled like the smallest size, so that fast and slow never cross below it.
            latency_s=curve.empty_s * float(ratio[0]),
        )

    def spread_ratio(self, speed: Speed) -> NDArray[np.float64]:
        """Return percentile over median for every size, (n,); 1 without percentiles."""
        edge = self.low_s if speed == "fast" else self.high_s
        if edge is None:
            return np.ones_like(self.times_s)
        # A fast curve is never above the median, a slow one never below.
        return (np.minimum if speed == "fast" else np.maximum)(edge / self.times_s, 1.0)


class HardwareProfile(Record, checked=True, eq=False):
    """Bandwidths, collective times and capacities of `num_nodes` x `gpus_per_node` GPUs."""

    num_nodes: int
    gpus_per_node: int
    allreduce_bytes_per_s: Mapping[tuple[int, bool], float]
    """Bus bandwidth by (group size, consecutive).

    Consecutive groups are ranks i*g .. i*g+g-1, the others ranks i, i+W/g, i+2W/g, ... The world
    group is stored under both.
    """
    p2p_bytes_per_s: Mapping[int, float]
    """Bandwidth of a transfer between neighbouring pipeline stages, by number of stages."""
    overlap_coefficient: float = 1.0
    """Slow-down of computation and communication while both run; >= 1."""
    hiding: OverlapFactors | None = None
    """Other overlap factors of an engine, for estimates; None: measured files, which use only the
    overlap coefficient."""
    curves: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    """Times by (operation, size of a consecutive group); Galvatron's files contain `allreduce` and
    `all2all`, sidecars all of `COLLECTIVES`."""
    strided_curves: Mapping[tuple[str, int], Curve] = field(default_factory=dict)
    """Times by (operation, size of a group of ranks i, i+W/g, i+2W/g, ...), from sidecars."""
    p2p_curves: Mapping[int, Curve] = field(default_factory=dict)
    """Times of a transfer between neighbouring pipeline stages by number of stages, from sidecars;
    sizes are those of the message."""
    sequence_curves: Mapping[int, Curve] = field(default_factory=dict)
    """All-reduce times by size of a consecutive group, used only for sequence parallelism.

    They give the times of its all-gathers and reduce-scatters if an `sp_time` file is from another
    run than the bandwidths.
    """
    domain_gpus: int | None = None
    """GPUs joined by intra-node links across several nodes, as in a rack; None: those of one node.
    """
    memory_bytes: float | None = None
    """Memory of one device in bytes; None if unknown."""
    memory_bytes_per_s: float | None = None
    """Memory bandwidth of one device; None if unknown: optimizer and look-up take 0 s."""
    threads: int | None = None
    """Threads of one operation on a CPU during the measurement; None on a GPU, or if unknown."""
    name: str = "measured"
    estimated: bool = False
    """True if the numbers come from a datasheet and not from a measurement."""
    synthetic: bool = False
    """True if the numbers are made up for tests and describe no real machine."""
    sources: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()
    """Irregularities of the files, as sentences."""

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.num_nodes * self.gpus_per_node

    @property
    def joined_gpus(self) -> int:
        """Number of GPUs between which messages cross no adapter."""
        return self.gpus_per_node if self.domain_gpus is None else self.domain_gpus

    @property
    def has_spread(self) -> bool:
        """True if at least one curve has percentiles."""
        curves = (self.curves, self.strided_curves, self.p2p_curves)
        return any(curve.has_spread for kind in curves for curve in kind.values())

    def at_spread(self, speed: Speed) -> HardwareProfile:
        """Return the profile with every curve at its 5th (`fast`) or 95th (`slow`) percentile.

        A bandwidth follows the curve of its group (all-reduce or transfer). It is divided by the
        ratio of percentile to median at the size whose bandwidth is nearest to the entry, which is
        the size that the entry was measured at. Entries without spread are unchanged.
        """

        def moved(entry: float, curve: Curve | None, factor: float) -> float:
            # A longer time is a smaller bandwidth.
            return entry if curve is None else entry / _ratio(curve, speed, entry, factor)

        return replace(
            self,
            allreduce_bytes_per_s={
                (size, consecutive): moved(
                    entry,
                    self.allreduce_curve(size, consecutive),
                    OPERATIONS["allreduce"].bus_factor(size),
                )
                for (size, consecutive), entry in self.allreduce_bytes_per_s.items()
            },
            p2p_bytes_per_s={
                stages: moved(entry, self.p2p_curves.get(stages), 1.0)
                for stages, entry in self.p2p_bytes_per_s.items()
            },
            curves={key: curve.at_spread(speed) for key, curve in self.curves.items()},
            strided_curves={
                key: curve.at_spread(speed) for key, curve in self.strided_curves.items()
            },
            p2p_curves={key: curve.at_spread(speed) for key, curve in self.p2p_curves.items()},
        )

    def allreduce_curve(self, size: int, consecutive: bool) -> Curve | None:
        """Return the all-reduce curve of a group of `allreduce_bytes_per_s`, or None."""
        # There is one world group: strided or not, it consists of all ranks.
        neighbours = consecutive or size == self.world_size
        return (self.curves if neighbours else self.strided_curves).get(("allreduce", size))


def _ratio(curve: Curve, speed: Speed, bytes_per_s: float, factor: float) -> float:
    """Return percentile over median at the size whose bandwidth is nearest to `bytes_per_s`."""
    # Galvatron's files contain bus bandwidths, so the curve is converted to them.
    rates = factor * curve.sizes_bytes / curve.times_s
    # In logarithms, half and double of the entry are equally far from it.
    nearest = int(np.argmin(np.abs(np.log(rates / bytes_per_s))))
    return float(curve.spread_ratio(speed)[nearest])


# --------------------------------------------------------------------------------------------------
# Notes on measured communication: falling times and incomplete spread.
#
# Neither is an error, since medians of a busy machine scatter; both are reported to the user.


_FALL = 0.05
"""Relative fall of times between neighbouring sizes that is not reported."""


def falling_times(hardware: HardwareProfile) -> str | None:
    """Return a sentence on curves whose times fall as messages grow; None if none does."""
    curves = dict(_named_curves(hardware))
    worst: dict[str, tuple[float, float]] = {}
    for name, curve in curves.items():
        # Positive where the next larger message was faster.
        falls = curve.times_s[:-1] / curve.times_s[1:] - 1.0
        if falls.size and falls.max() > _FALL:
            at = int(falls.argmax())
            worst[name] = float(falls[at]), float(curve.sizes_bytes[at + 1])
    if not worst:
        return None
    name = max(worst, key=lambda name: worst[name][0])
    fall, size_bytes = worst[name]
    return (
        f"smoothed: times of {len(worst)} of {len(curves)} measured curves fall "
        f"as messages grow, {name} by {100.0 * fall / (1.0 + fall):.0f} % at "
        f"{format_message(size_bytes)}. They are priced by the nearest "
        "increasing times: measure again when the machine is idle"
    )


def _named_curves(hardware: HardwareProfile) -> Iterator[tuple[str, Curve]]:
    for consecutive, kind in ((1, hardware.curves), (0, hardware.strided_curves)):
        for (operation, size), curve in kind.items():
            yield f"{operation}_size_{size}_consec_{consecutive}", curve
    for stages, curve in hardware.p2p_curves.items():
        yield f"pp_size_{stages}", curve


def partial_spread(hardware: HardwareProfile) -> str | None:
    """Return a sentence if only some curves have percentiles, else None."""
    known = [curve.has_spread for _, curve in _named_curves(hardware)]
    if all(known) or not any(known):
        return None
    return (
        f"spread: {sum(known)} of {len(known)} measured curves have percentiles; "
        "the interval of the step time ignores the spread of the others"
    )


# --------------------------------------------------------------------------------------------------
# Host overhead that runs concurrently with the device.


class CollectiveCounts(NamedTuple):
    """Number of collectives that the host launches for a layer."""

    forward: int
    backward: int


_CALLS: dict[str, CollectiveCounts] = {
    "sp": CollectiveCounts(4, 6),
    "tp": CollectiveCounts(2, 2),
    "ulysses": CollectiveCounts(4, 4),
}
"""Collectives of a sharded layer.

sp: all-gather and reduce-scatter around both halves, once more in the backward; tp: an all-reduce
after each half; ulysses: all-to-alls of queries, keys, values and the result.
"""


def host_calls(kind: str) -> CollectiveCounts:
    """Return the collective counts of a layer sharded by `kind` (a key of `_CALLS`); else 0."""
    return _CALLS.get(kind, CollectiveCounts(0, 0))


_Real = float | NDArray[np.float64]
_HOST_POWER = 3.0


def host_device_time_s(device_s: _Real, host_s: _Real) -> _Real:
    """Return the time of kernels that a host launches: (device^3 + host^3)^(1/3).

    Device and host work concurrently: the result is at least the longer of the two, and
    at most 26 % above it.
    """
    # Divided by the longer first: cubes of seconds would underflow.
    longest = np.maximum(np.maximum(device_s, host_s), 1e-300)
    powers = (device_s / longest) ** _HOST_POWER + (host_s / longest) ** _HOST_POWER
    found: _Real = longest * powers ** (1.0 / _HOST_POWER)
    return found

"""Times over message size, one series per operation and kind of group, from whatever knows them.

Raw samples come before the curves of a sidecar, and those before the documented times: the first
that has a size gives the point.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from autopar.fit import latency_bandwidth_fit
from autopar.measurements import Measurement
from autopar.operations import OPERATIONS
from autopar.stats import Summary, summarize
from profiler.show.load import Entry, Profile

__all__ = [
    "Point",
    "Series",
    "SeriesKey",
    "bus_bytes_per_s",
    "point_key",
    "reference_cell",
    "scope_by_shape",
    "series_of",
    "time_of",
]

SeriesKey = tuple[str, int, bool]
"""Operation, group size (pipeline stages for p2p), consecutive."""

_FIT_POINTS = 3
"""Fewest points a line is fitted to."""


def bus_bytes_per_s(operation: str, group_size: int, size_bytes: float, time_s: float) -> float:
    """Return the bus bandwidth of one operation, bytes/s."""
    return OPERATIONS[operation].bus_factor(group_size) * size_bytes / time_s


@dataclass(frozen=True, kw_only=True)
class Point:
    """The time of one message size with its spread."""

    size_bytes: float
    time_s: float
    low_s: float | None = None
    """5th percentile of the samples."""
    high_s: float | None = None
    """95th percentile of the samples."""
    num_samples: int | None = None

    @property
    def spread(self) -> float:
        """Half the range from the 5th to the 95th percentile over the median; 0 if unknown."""
        if self.low_s is None or self.high_s is None:
            return 0.0
        return (self.high_s - self.low_s) / 2.0 / self.time_s


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one operation in groups of one size and kind, increasing in size."""

    operation: str
    group_size: int
    consecutive: bool
    points: tuple[Point, ...]
    scope: str | None
    """intra-node or inter-node, None where neither samples nor a shape say it."""
    given_fit: tuple[float, float] | None = None
    """Latency in s and seconds per byte as a sidecar says."""

    @property
    def key(self) -> SeriesKey:
        """What tells a series from the others."""
        return self.operation, self.group_size, self.consecutive

    @property
    def label(self) -> str:
        """The group in words, for a legend."""
        if self.operation.startswith("p2p"):
            return f"{self.group_size} stages"
        return f"{self.group_size}" + ("" if self.consecutive else " strided")

    @cached_property
    def fit(self) -> tuple[float, float] | None:
        """Latency in s and seconds per byte; None for fewer than three points."""
        if self.given_fit is not None:
            return self.given_fit
        if len(self.points) < _FIT_POINTS:
            return None
        fit = latency_bandwidth_fit(
            [point.size_bytes for point in self.points], [point.time_s for point in self.points]
        )
        return fit.latency_s, fit.seconds_per_byte

    @property
    def slope_bytes_per_s(self) -> float | None:
        """Bus bandwidth of ever larger messages, from the fit; bytes/s."""
        if self.fit is None or self.fit[1] <= 0.0:
            return None
        return bus_bytes_per_s(self.operation, self.group_size, 1.0, self.fit[1])

    def bus_bytes_per_s(self, point: Point) -> float:
        """Return the bus bandwidth at a point, bytes/s."""
        return bus_bytes_per_s(self.operation, self.group_size, point.size_bytes, point.time_s)


@lru_cache(maxsize=8)
def series_of(profile: Profile) -> Mapping[SeriesKey, Series]:
    """Return every series of a profile, in the order of operations, groups and kinds."""
    points: dict[SeriesKey, dict[float, Point]] = {}
    scopes: dict[SeriesKey, str] = {}
    fits: dict[SeriesKey, tuple[float, float]] = {}

    def add(key: SeriesKey, point: Point) -> None:
        points.setdefault(key, {}).setdefault(point.size_bytes, point)

    for cell in profile.cells.values():
        summary = time_of(cell)
        if cell.operation in OPERATIONS and summary is not None and cell.size_bytes > 0:
            key = (cell.operation, cell.group_size, cell.consecutive)
            scopes[key] = cell.scope
            add(key, _measured(cell.size_bytes, summary))
    for sidecar in profile.sidecars:
        for curve in sidecar.curves:
            if curve.operation not in OPERATIONS:
                continue
            key = (curve.operation, curve.group_size, curve.consecutive)
            if curve.latency_s is not None and curve.seconds_per_byte is not None:
                fits[key] = (curve.latency_s, curve.seconds_per_byte)
            for index, (size, time) in enumerate(
                zip(curve.sizes_bytes, curve.times_s, strict=True)
            ):
                low = curve.low_s[index] if curve.low_s is not None else None
                high = curve.high_s[index] if curve.high_s is not None else None
                add(key, Point(size_bytes=size, time_s=time, low_s=low, high_s=high))
    for file in profile.files:
        for entry in file.entries:
            if entry.size_bytes is not None:
                key = (entry.operation, entry.group_size, entry.consecutive)
                add(key, Point(size_bytes=float(entry.size_bytes), time_s=entry.value))
    order = list(OPERATIONS)
    return {
        key: Series(
            operation=key[0],
            group_size=key[1],
            consecutive=key[2],
            points=tuple(points[key][size] for size in sorted(points[key])),
            scope=scopes.get(key) or scope_by_shape(profile, key),
            given_fit=fits.get(key),
        )
        for key in sorted(points, key=lambda key: (order.index(key[0]), key[1], not key[2]))
    }


def point_key(series: Series, point: Point) -> str:
    """Return the name of a curve's point, spelt like the cell it is measured in."""
    if series.operation.startswith("p2p"):
        return f"{series.operation}_stages_{series.group_size}_{point.size_bytes:.0f}B"
    kind = int(series.consecutive)
    return f"{series.operation}_size_{series.group_size}_consec_{kind}_{point.size_bytes:.0f}B"


def time_of(cell: Measurement) -> Summary | None:
    """Return the statistics of a collective's or transfer's samples, None if it has none."""
    samples = cell.samples_s.get("time")
    return summarize(samples) if samples and cell.status == "ok" else None


def _measured(size_bytes: float, summary: Summary) -> Point:
    return Point(
        size_bytes=size_bytes,
        time_s=summary.median_s,
        low_s=summary.low_s,
        high_s=summary.high_s,
        num_samples=summary.num_samples,
    )


def scope_by_shape(profile: Profile, key: SeriesKey) -> str | None:
    """Return whether groups stay on a node, as the shape says; None if it is unknown."""
    if profile.shape is None:
        return None
    nodes, gpus = profile.shape
    operation, group_size, consecutive = key
    if nodes == 1:
        return "intra-node"
    if operation.startswith("p2p") or not consecutive:
        return "inter-node"  # ranks i and i + W/g; of stages, some pair crosses
    return "intra-node" if gpus % group_size == 0 else "inter-node"


def reference_cell(profile: Profile, entry: Entry) -> Point | None:
    """Return the measured point that a documented bandwidth stands for, None if there is none.

    The newest run names the message size; without it the point with the nearest bandwidth.
    """
    if entry.size_bytes is not None or entry.operation not in OPERATIONS:
        return None
    found = [
        _measured(cell.size_bytes, summary)
        for cell in profile.cells.values()
        if (cell.operation, cell.group_size) == (entry.operation, entry.group_size)
        and (cell.consecutive == entry.consecutive or entry.group_size == profile.world_size)
        and cell.size_bytes > 0
        and (summary := time_of(cell)) is not None
    ]
    named = profile.metadata.get("reference_bytes")
    chosen = [point for point in found if point.size_bytes == named] or found

    def distance(point: Point) -> float:
        rate = bus_bytes_per_s(entry.operation, entry.group_size, point.size_bytes, point.time_s)
        return abs(math.log(rate / entry.value))

    return min(chosen, key=distance, default=None)

"""What changed between two profiles, and whether the change is more than scatter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autopar.documents.sidecar import Measurement
from autopar.statistics import relative_spread, summarize
from profiler.environment import comparable
from profiler.show.read import Folder, Profile, point_key, reference_cell, series_of

__all__ = [
    "Change",
    "Comparison",
    "Verdict",
    "circumstances",
    "compare",
    "obstacles",
    "pairs",
]

Verdict = Literal["regression", "improvement", "within the spread", "unchanged"]
Kind = Literal["bandwidth", "time", "ratio"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One value of both profiles: a documented key, or a point of a curve."""

    key: str
    kind: Kind
    """bandwidth: bytes/s, more is better; time: seconds, and ratio: less is better."""
    documented: bool
    old: float
    new: float
    spread: float
    """Of both together, relative: the root of the sum of squares of half their p5-p95 ranges."""
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """New over old."""
        return self.new / self.old


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two profiles of one shape, value by value."""

    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    """Keys and curve points that only the old profile has."""
    only_new: tuple[str, ...]

    def count(self, verdict: Verdict) -> int:
        """Return how many values have this verdict."""
        return sum(change.verdict == verdict for change in self.changes)


@dataclass(frozen=True, kw_only=True)
class _Value:
    kind: Kind
    documented: bool
    value: float
    spread: float


def pairs(old: Folder, new: Folder, *, anyway: bool) -> list[tuple[Profile, Profile]]:
    """Return the profiles of the same shape, old and new; empty where there are none.

    `anyway`: where no shape is in both and each has one profile, these two.
    """
    found = [(a, b) for b in new.profiles for a in old.profiles if a.shape == b.shape]
    if not found and len(old.profiles) == len(new.profiles) == 1:
        # an unknown shape may be that of the other
        either = None in (old.profiles[0].shape, new.profiles[0].shape)
        if anyway or either:
            found = [(old.profiles[0], new.profiles[0])]
    return found


def obstacles(old: Profile, new: Profile) -> list[str]:
    """Return why the numbers of two profiles cannot be compared, in words; empty if they can."""
    found = []
    if None not in (old.shape, new.shape) and old.shape != new.shape:
        found.append(f"the old one is of {old.title}, the new one of {new.title}")
    if bool(old.sidecars) != bool(new.sidecars):
        without = "new" if old.sidecars else "old"
        found.append(f"the {without} one has no sidecars, so its units and machine are unknown")
        return found
    for field, yes, no in (
        ("estimated", "estimated from datasheets", "measured"),
        ("synthetic", "synthetic", "of a machine"),
    ):
        a, b = (any(getattr(s, field) for s in profile.sidecars) for profile in (old, new))
        if a != b:
            found.append(f"the old one is {yes if a else no}, the new one {yes if b else no}")
    if old.metadata and new.metadata:
        found += comparable(old.metadata, new.metadata)
        sizes = [profile.metadata.get("reference_bytes") for profile in (old, new)]
        if sizes[0] != sizes[1]:
            found.append("documented bandwidths are of {} bytes and of {} bytes".format(*sizes))
    return found


def circumstances(old: Profile, new: Profile) -> list[str]:
    """Return what is different and may be the reason of a change, such as a driver, in words."""
    if not old.metadata or not new.metadata:
        return []
    known = obstacles(old, new)
    found = comparable(old.metadata, new.metadata, resume=True)
    return [clause for clause in found if clause not in known]


def compare(old: Profile, new: Profile, threshold: float) -> Comparison:
    """Return every value of two profiles with its verdict.

    A change counts when the worse value is more than `threshold` (0.05 is 5 %) above the better
    one and the change exceeds the spread of both samples together.
    """
    before, after = dict(_values(old)), dict(_values(new))
    changes = []
    for key in after:
        if key in before:
            a, b = before[key], after[key]
            spread = math.hypot(a.spread, b.spread)
            changes.append(
                Change(
                    key=key,
                    kind=b.kind,
                    documented=b.documented,
                    old=a.value,
                    new=b.value,
                    spread=spread,
                    verdict=_verdict(a, b, spread, threshold),
                )
            )
    return Comparison(
        changes=tuple(changes),
        only_old=tuple(key for key in before if key not in after),
        only_new=tuple(key for key in after if key not in before),
    )


def _verdict(old: _Value, new: _Value, spread: float, threshold: float) -> Verdict:
    # above 1 is worse, whatever the unit
    slower = new.value / old.value if new.kind != "bandwidth" else old.value / new.value
    # from the better to the worse value, whichever is the new one
    size = max(slower, 1.0 / slower) - 1.0
    if size <= threshold:
        return "unchanged"
    if size <= spread:
        return "within the spread"
    return "regression" if slower > 1.0 else "improvement"


def _values(profile: Profile) -> Iterator[tuple[str, _Value]]:
    """Yield documented keys in the order of the files, then points that no key says."""
    series = series_of(profile)
    told = set()
    for file in profile.files:
        for entry in file.entries:
            point = reference_cell(profile, entry)
            kind: Kind = "bandwidth"
            if entry.operation == "overlap":
                kind, spread = "ratio", _overlap_spread(profile)
            elif entry.size_bytes is not None:
                kind = "time"
                key = (entry.operation, entry.group_size, entry.consecutive)
                told.add((*key, float(entry.size_bytes)))
                points = series[key].points
                point = next(p for p in points if p.size_bytes == entry.size_bytes)
                spread = point.spread
            else:
                spread = point.spread if point is not None else 0.0
            yield (
                entry.key,
                _Value(kind=kind, documented=True, value=entry.value, spread=spread),
            )
    for key, one in series.items():
        for point in one.points:
            if (*key, point.size_bytes) not in told:
                value = _Value(
                    kind="time", documented=False, value=point.time_s, spread=point.spread
                )
                yield point_key(one, point), value


def _slowdown(cell: Measurement, side: str) -> tuple[float, float] | None:
    """Return how many times slower a side is while both work, and its relative spread.

    `side`: compute or communication. None where the cell has no such samples.
    """
    alone, both = cell.samples_s.get(f"{side}_alone"), cell.samples_s.get(f"{side}_overlapped")
    if not alone or not both or cell.status != "ok":
        return None
    a, b = summarize(alone), summarize(both)
    spreads = [relative_spread(s.low_s, s.median_s, s.high_s) for s in (a, b)]
    return b.median_s / a.median_s, math.hypot(*spreads)


def _overlap_spread(profile: Profile) -> float:
    """Return the relative spread of the slow-down that the coefficient is of, 0 if unknown."""
    found = [
        slowdown
        for cell in profile.cells.values()
        for side in ("compute", "communication")
        if cell.operation.startswith("overlap_") and (slowdown := _slowdown(cell, side))
    ]
    # the coefficient is the largest slow-down
    return max(found)[1] if found else 0.0

"""Plausibility of profile values: contradictions between neighbours and impossible values.

Times grow with batch and length, and memory per rank falls with the degree. For any model or
machine, both change at least and at most by a power of the ratio of sizes. A value that breaks such
a law with most others is wrong, and one wrong value can decide a plan. Readers turn
`SuspiciousValue` records into notes and errors, `profile-show --validate` into findings.

Limits are chosen on measured files (tests/unit/documents/test_plausible.py). A reported value is
beyond anything in them; a refused value breaks a law by a factor of ten.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from pathlib import Path

from autopar.errors import DocumentError
from autopar.records import Record, replace

AGAIN = "Measure it again, or remove the key where the others suffice"
IMPOSSIBLE = 10.0
"""A value is refused if it exceeds the range allowed by its neighbours by this factor."""

_PEAK = 2.0
"""Limit of achieved over peak FLOP/s; clocks above the card's explain a few per cent only."""
_FASTEST_LINK_BYTES_PER_S = 2e12
"""Upper bound of the rate of any link in one direction (NVLink 5: 0.9e12). Switches that add up
data on the way give a bus bandwidth of little more than that."""
_PARAMETERS = 0.05
"""Relative tolerance; measured layers have up to 1 % more parameters than counted (padding,
copies)."""
_FACTORS = {0.25: 1, 0.5: 2, 2.0: 8, 4.0: 16}
"""Ratio of `parameter_size` to its value at 4 bytes per parameter -> actual bytes per parameter."""
_BUMP = 2.0
"""Bandwidths of groups of two sizes differ by at most this factor times the ratio of the sizes."""
_BRIDGE = 15.0
"""Maximum speed-up of pairs over larger groups: bridges connect pairs, PCIe the rest."""


class CurvePoint(Record):
    """One value of a file and its position on a curve."""

    key: str
    x: float
    """Batch, tokens, degree or size."""
    y: float
    """Quantity that the law bounds, such as the time of the whole batch."""
    written: float
    """Value as written in the file."""
    unit: str


class GrowthLaw(Record):
    """Law of two cells: with r = x_j / x_i > 1, y_j / y_i is between r**least and r**most."""

    least: float
    most: float
    slack: float
    """Maximum excess over the law that is not reported, as a factor; noise of measured files is
    smaller."""


class SuspiciousValue(Record):
    """One unlikely or impossible value."""

    key: str
    problem: str
    """A clause that follows `the value is ...`."""
    remedy: str = AGAIN
    impossible: bool = False
    """True if a reader refuses the value."""
    certain: bool = False
    """True if the value is wrong regardless of its neighbours; a reader accepts it nevertheless."""
    factor: float = 1.0
    """Value over the nearest end of the plausible range."""


def contradictions(
    cells: Iterable[CurvePoint], law: GrowthLaw, *, most: float = IMPOSSIBLE
) -> list[SuspiciousValue]:
    """Return the cells that contradict the others under a law, worst first.

    If two cells contradict only each other, one is returned, and its text names the other. Cells of
    value 0 are ignored, because a difference of measured values may be 0.

    most : excess over the law, as a factor, above which a value is impossible
    """
    left = sorted((cell for cell in cells if cell.y > 0), key=lambda cell: cell.x)
    found: list[SuspiciousValue] = []
    while broken := _broken(left, law):
        worst = _culprit(left, broken, law)
        bad = left.pop(worst)
        low, high = _allowed(bad, left, law)
        # Distance to the nearer end of the allowed range; other cells may contradict each other,
        # too.
        below, above = low / bad.y, bad.y / high
        factor, end = (below, low) if below > above else (above, high)
        near = sorted(left, key=lambda cell: abs(math.log(cell.x / bad.x)))[:2]
        expected = bad.written / bad.y * (_between(bad, near, law) if len(near) > 1 else end)
        beside = " and ".join(cell.key for cell in sorted(near, key=lambda cell: cell.x))
        which = "" if len(left) > 1 else " (one of the two is wrong)"
        found.append(
            SuspiciousValue(
                key=bad.key,
                problem=(
                    f"{bad.written:.4g}{_unit(bad)}, {beside} "
                    f"suggest{'s' * (len(near) == 1)} about {expected:.4g}{which}"
                ),
                impossible=factor >= most,
                factor=factor,
            )
        )
    return sorted(found, key=lambda doubt: -doubt.factor)


def strongest_by_key(doubts: Iterable[SuspiciousValue]) -> list[SuspiciousValue]:
    """Return the most implausible value for every key, since a cell may be on several curves."""
    found: dict[str, SuspiciousValue] = {}
    for doubt in doubts:
        if doubt.key not in found or doubt.factor > found[doubt.key].factor:
            found[doubt.key] = doubt
    return list(found.values())


def doubtful_table(
    table: Iterable[tuple[str, float, str, CurvePoint]], by_degree: GrowthLaw, by_length: GrowthLaw
) -> list[SuspiciousValue]:
    """Return the values of a memory table, by tokens and degree, that contradict each other.

    table : (lengths as written, total tokens, degree as written, cell whose x is the degree).
        Memory of a rank falls with the degree, by at most the degree: the first law applies to the
        figure times the degree.
    """
    curves: dict[tuple[str, str], list[CurvePoint]] = {}
    for lengths, tokens, degree, cell in table:
        shared = replace(cell, y=cell.y * cell.x)
        curves.setdefault(("degree", lengths), []).append(shared)
        curves.setdefault(("length", degree), []).append(replace(cell, x=tokens))
    return strongest_by_key(
        doubt
        for (which, _), cells in curves.items()
        for doubt in contradictions(cells, by_degree if which == "degree" else by_length)
    )


def _unit(cell: CurvePoint) -> str:
    return f" {cell.unit}" if cell.unit else ""


def _allowed(cell: CurvePoint, others: Sequence[CurvePoint], law: GrowthLaw) -> tuple[float, float]:
    """Return the smallest and the largest value of a cell that the others allow, without slack."""
    lows, highs = [], []
    for other in others:
        # Lengths of several layer types may have the same sum; they are not compared.
        if other.x == cell.x:
            continue
        ratio = cell.x / other.x
        ends = sorted((other.y * ratio**law.least, other.y * ratio**law.most))
        lows.append(ends[0])
        highs.append(ends[1])
    return max(lows, default=0.0), min(highs, default=math.inf)


def _between(cell: CurvePoint, near: Sequence[CurvePoint], law: GrowthLaw) -> float:
    """Return the value of a cell on the log-log line through two others.

    The slope of the line is limited to the range of the law.
    """
    a, b = near
    slope = _growth(a, b) / math.log(b.x / a.x) if a.x != b.x else law.least
    slope = min(max(slope, law.least), law.most)
    return float(a.y * (cell.x / a.x) ** slope)


def _growth(a: CurvePoint, b: CurvePoint) -> float:
    """Return the logarithm of the ratio of two values; a ratio of tiny times may be 0."""
    return math.log(min(max(b.y / a.y, sys.float_info.min), sys.float_info.max))


def _broken(cells: Sequence[CurvePoint], law: GrowthLaw) -> list[tuple[int, int, float]]:
    """Return the pairs that break a law by more than its slack, with the log of the excess."""
    found = []
    for (i, a), (j, b) in combinations(enumerate(cells), 2):
        if a.x == b.x:
            continue
        growth = _growth(a, b)
        ratio = math.log(b.x / a.x)
        beyond = max(law.least * ratio - growth, growth - law.most * ratio)
        if beyond > math.log(law.slack):
            found.append((i, j, beyond))
    return found


def _culprit(
    cells: Sequence[CurvePoint], broken: Sequence[tuple[int, int, float]], law: GrowthLaw
) -> int:
    """Return the index of the cell without which the others agree best."""

    def left(index: int) -> tuple[float, float]:
        rest = sum(beyond for i, j, beyond in broken if index not in (i, j))
        kept = [cell for at, cell in enumerate(cells) if at != index]
        # An end cell contradicts only its one neighbour. Then the smoother curve is right.
        return rest, _roughness(kept, law)

    involved = sorted({index for i, j, _ in broken for index in (i, j)})
    return min(involved, key=left)


def _roughness(cells: Sequence[CurvePoint], law: GrowthLaw) -> float:
    """Return the roughness of a curve: changes of its log-log slope, and slopes outside the law."""
    slopes = [_growth(a, b) / math.log(b.x / a.x) if b.x > a.x else 0.0 for a, b in pairwise(cells)]
    outside = sum(max(0.0, law.least - s, s - law.most) for s in slopes)
    return outside + sum(abs(b - a) for a, b in pairwise(slopes))


def doubtful_rate(
    key: str, value: str, flop_per_s: float, peak: float, device: str
) -> SuspiciousValue | None:
    """Return a suspicious value if a forward pass is faster than the peak of the device, else None.

    value : time as in the file, with its unit
    flop_per_s, peak : FLOP/s achieved in this time, and peak of the device
    """
    if flop_per_s <= peak:
        return None
    return SuspiciousValue(
        key=key,
        problem=(
            f"{value}, which means {flop_per_s / 1e12:.4g} TFLOP/s, more than the "
            f"{peak / 1e12:.4g} of {device}"
        ),
        remedy="Measure it again, or give the model and the device of the measurement",
        impossible=flop_per_s > _PEAK * peak,
        factor=flop_per_s / peak,
    )


def doubtful_parameters(key: str, written: float, counted: float) -> SuspiciousValue | None:
    """Return a suspicious value if the parameters of a layer do not match its model, else None.

    written, counted : MiB of `parameter_size` in the file, and of the architecture with the same
        bytes per parameter
    """
    ratio = written / counted
    if abs(ratio - 1.0) <= _PARAMETERS:
        return None
    size = next((n for f, n in _FACTORS.items() if abs(ratio / f - 1.0) <= _PARAMETERS), None)
    remedy = "Check --model and its sizes, or measure it again"
    if size == 2:
        remedy = "Use --parameter-bytes 2, as in this file"
    elif size is not None:
        remedy = f"Write the file with 4 bytes per parameter instead of {size}"
    return SuspiciousValue(
        key=key,
        problem=f"{written:.5g} MiB, but a layer of this model has {counted:.5g} MiB",
        # File and model may each be wrong, so the value is reported and still used for planning.
        remedy=remedy,
        factor=max(ratio, 1.0 / ratio),
    )


def doubtful_bandwidths(
    cells: Iterable[CurvePoint], *, pairs_may_be_faster: bool = False
) -> Iterator[SuspiciousValue]:
    """Yield the bandwidths that are implausible next to those of other group sizes.

    cells : groups that use the same links, with their size as x
    pairs_may_be_faster : True inside a node, where bridges may connect pairs of GPUs
    """
    left = sorted(cells, key=lambda cell: cell.x)
    if pairs_may_be_faster and len(left) > 1 and left[0].x == 2.0:
        first, second = left[:2]
        # Compared with larger groups below, the pair would make them doubtful.
        if 1.0 < first.y / second.y <= _BRIDGE and first.y / second.y > _BUMP**2:
            left = left[1:]
    yield from contradictions(left, GrowthLaw(least=-1.0, most=1.0, slack=_BUMP), most=math.inf)


def doubtful_link(cell: CurvePoint, memory_bytes_per_s: float | None) -> SuspiciousValue | None:
    """Return a suspicious value if a bandwidth exceeds any link or the device's memory, else None.

    cell : bandwidth as y, bytes/s
    """
    limit, what = _FASTEST_LINK_BYTES_PER_S, "any link"
    if memory_bytes_per_s is not None and memory_bytes_per_s < limit:
        # A message is read from memory and written to it, so no link is faster.
        limit, what = memory_bytes_per_s, "the memory of the device"
    if cell.y <= limit:
        return None
    return SuspiciousValue(
        key=cell.key,
        problem=f"{cell.written:.4g}{_unit(cell)}, more than {what} ({limit / 1e9:.4g} GB/s)",
        remedy="Measure it again: it is probably in another unit, such as Gbit/s",
        certain=True,
        factor=cell.y / limit,
    )


class InputWarning(str):
    """A note that an input is most likely wrong, printed even on a short screen."""

    __slots__ = ()


def notes_of(path: Path, doubts: Iterable[SuspiciousValue]) -> tuple[str, ...]:
    """Return at most one note on a file: its worst suspicious value and the number of others.

    Raises DocumentError: a value is impossible; the message names the worst one.
    """
    found = sorted(doubts, key=lambda doubt: -doubt.factor)
    worst = next((doubt for doubt in found if doubt.impossible), None)
    if worst is not None:
        raise DocumentError(
            path, f"the value is {worst.problem}", key=worst.key, remedy=worst.remedy
        )
    if not found:
        return ()
    first, more = found[0], f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    text = f"suspicious: in {path.name} {first.key} is {first.problem}{more}. {first.remedy}"
    return (InputWarning(text),)

"""Lengths of the samples of a data set: record, statistics, and the values of `--lengths`.

`autopar.training.batches` makes micro-batches of them; the help of commands reads this module,
which needs no arrays.

A text is the path of a file with one length a line (`310` or `310,25` for 25 samples of 310
tokens), or percentiles such as `p50=310,p90=790,p99=1800,max=4096`.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from autopar.errors import DocumentError, InputError, OptionError
from autopar.limits import read_bytes
from autopar.records import Record, shorten

Batching = Literal[
    "maximum", "longest", "grouped", "padding-free", "packed", "packed-full", "wrapped"
]
"""How samples become rows of a micro-batch. Padded to the sequence length (`maximum`) or to the
longest row (`longest`), also of samples sorted by length (`grouped`); concatenated without padding
(`padding-free`). Packed to the sequence length with attention within samples (`packed`), or over
the whole row (`packed-full`); concatenated and cut into rows (`wrapped`)."""
BATCHINGS: tuple[Batching, ...] = get_args(Batching)
ROWS_DIFFER: tuple[Batching, ...] = ("longest", "grouped", "padding-free")
"""Ways to batch with rows of different lengths."""


class KnownBatching(NamedTuple):
    """Batching that a launch script sets."""

    batching: Batching
    multiple: int = 1
    """Padded lengths are multiples of this number of tokens."""


MOST_TOKENS = 1 << 24
"""Largest length of a sample, tokens."""
_MOST_SAMPLES = 1 << 40
_MOST_BYTES = 64 << 20
_DRAWN = 10_000
"""Number of samples that percentiles stand for."""
_LINE = re.compile(r"\s*([0-9]{1,13})\s*(?:,\s*([0-9]{1,13})\s*)?")
_POINT = re.compile(r"p([0-9]{1,2}(?:\.[0-9]{1,6})?)")


class Lengths(Record, dict=True):
    """Distribution of the lengths of samples."""

    values: tuple[int, ...]
    """Lengths in tokens, each once and ascending."""
    counts: tuple[int, ...]
    """Number of samples of each length."""

    def __post_init__(self) -> None:
        """Raise InputError without samples, or for values out of order."""
        if not self.values or len(self.values) != len(self.counts):
            raise InputError("lengths: expected at least one, each with a count")
        ordered = all(one < other for one, other in pairwise(self.values))
        if not ordered or self.values[0] < 1 or min(self.counts) < 1:
            raise InputError("lengths: expected ascending lengths and counts, both above 0")

    @cached_property
    def number(self) -> int:
        """Number of samples, n."""
        return sum(self.counts)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all samples, T."""
        return sum(value * count for value, count in zip(self.values, self.counts, strict=True))

    @cached_property
    def squares(self) -> int:
        """Sum of the squared lengths of all samples, Q."""
        pairs = zip(self.values, self.counts, strict=True)
        return sum(value * value * count for value, count in pairs)

    @property
    def mean(self) -> float:
        """Mean length, tokens."""
        return self.tokens / self.number

    @property
    def attended(self) -> float:
        """Mean over tokens of the length of their sample, Q / T."""
        return self.squares / self.tokens

    @cached_property
    def below(self) -> tuple[int, ...]:
        """Number of samples of at most each length."""
        return tuple(accumulate(self.counts))

    def quantile(self, share: float) -> int:
        """Return the smallest length that at least this share of the samples does not exceed."""
        return self.values[bisect_left(self.below, share * self.number - 1e-9)]

    def within(self, limit: int, multiple: int = 1) -> Lengths:
        """Return lengths cut at `limit` and padded to a multiple, but not beyond the limit."""
        padded = (min(limit, -(-min(one, limit) // multiple) * multiple) for one in self.values)
        return lengths_of(zip(padded, self.counts, strict=True))

    def beyond(self, limit: int) -> float:
        """Return the share of samples longer than `limit`, 0 to 1."""
        pairs = zip(self.values, self.counts, strict=True)
        return sum(count for value, count in pairs if value > limit) / self.number


def lengths_of(pairs: Iterable[tuple[int, int]]) -> Lengths:
    """Return the lengths of (length, number of samples) pairs, which may repeat a length."""
    found: Counter[int] = Counter()
    for value, count in pairs:
        found[value] += count
    values = tuple(sorted(found))
    return Lengths(values=values, counts=tuple(found[value] for value in values))


def read_lengths(text: str) -> Lengths:
    """Return the lengths that a value of `--lengths` describes.

    Raises OptionError for wrong percentiles, DocumentError for a file that cannot be read or has a
    wrong line.
    """
    if "=" in text and not Path(text).exists():
        return _of_percentiles(text)
    return _of_file(Path(text))


def _of_file(path: Path) -> Lengths:
    remedy = "Write one length per line, or use --lengths p50=310,p99=1800,max=4096"
    raw = read_bytes(path, _MOST_BYTES, "a text file with one length per line", remedy=remedy)
    pairs: Counter[int] = Counter()
    for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), 1):
        if not line.strip():
            continue
        found = _LINE.fullmatch(line)
        value, count = (0, 0) if found is None else (int(found[1]), int(found[2] or 1))
        if not (0 < value <= MOST_TOKENS and 0 < count <= _MOST_SAMPLES):
            raise DocumentError(
                path,
                f"line {number}: expected LENGTH or LENGTH,COUNT, integers above 0 and lengths of "
                f"at most {MOST_TOKENS}, got {shorten(line.strip())}",
            )
        pairs[value] += count
    if not pairs:
        raise DocumentError(path, "contains no lengths", remedy="Write one length per line")
    return lengths_of(pairs.items())


def _of_percentiles(text: str) -> Lengths:
    """Return 10,000 samples at even quantiles, log-linear between percentiles.

    Below the first percentile the slope of the first segment continues, but not below `min`.
    """
    points = _points(text)
    shares, logs = [*points], [math.log(value) for value in points.values()]
    if shares[0] > 0:
        slope = (logs[1] - logs[0]) / (shares[1] - shares[0])
        logs.insert(0, max(0.0, logs[0] - slope * shares[0]))
        shares.insert(0, 0.0)

    def quantile(share: float) -> int:
        at = bisect_left(shares, share, 1)
        part = (share - shares[at - 1]) / (shares[at] - shares[at - 1])
        return round(math.exp(logs[at - 1] + part * (logs[at] - logs[at - 1])))

    drawn = [quantile((one + 0.5) / _DRAWN) for one in range(_DRAWN - 1)]
    return lengths_of((one, 1) for one in (*drawn, points[1.0]))


def _points(text: str) -> Mapping[float, int]:
    """Return length by share of samples, ascending; raises OptionError."""
    example = "Use --lengths p50=310,p90=790,p99=1800,max=4096"
    found: dict[float, int] = {}
    for part in text.split(","):
        name, _, value = (one.strip() for one in part.partition("="))
        point = _POINT.fullmatch(name)
        share = {"min": 0.0, "max": 1.0}.get(name, float(point[1]) / 100.0 if point else -1.0)
        whole = int(value) if value.isascii() and value.isdigit() and len(value) < 9 else 0
        if share < 0 or (point and share == 0) or share in found:
            raise OptionError(
                f"--lengths: expected p1 to p99, min and max, each once, got {shorten(part)}",
                remedy=example,
            )
        if not 0 < whole <= MOST_TOKENS:
            raise OptionError(
                f"--lengths {name}: expected an integer from 1 to {MOST_TOKENS}, "
                f"got {shorten(value)}",
                remedy=example,
            )
        found[share] = whole
    if 1.0 not in found or len(found) < 2:
        raise OptionError("--lengths: expected max and at least one percentile", remedy=example)
    ordered = dict(sorted(found.items()))
    for (one, low), (other, high) in pairwise(ordered.items()):
        if low > high:
            raise OptionError(
                f"--lengths: {low} tokens at {one * 100:g} % and {high} at {other * 100:g} %: "
                "expected ascending lengths",
                remedy=example,
            )
    return ordered

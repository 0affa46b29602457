"""Tuners that need nothing else: every point, or a sample of them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from search.analytic.tuners.domains import TuningSpace
from search.analytic.tuners.pricing import Pricer, Record

__all__ = ["CHUNK", "draw_sample", "price_all", "price_range", "price_sample"]

CHUNK = 1 << 17
"""Points that are priced at a time: enough for arrays to pay, few enough to stay in memory."""
_COUNTABLE = 2**62
"""Points of a larger space have no number of 64 bits."""


def price_all(pricer: Pricer, progress: Callable[[int, int], None] | None = None) -> Record:
    """Return the record of every point of a space."""
    record, size = Record(), pricer.space.size
    for begin in range(0, size, CHUNK):
        record.join(price_range(pricer, begin, min(begin + CHUNK, size)))
        if progress is not None:
            progress(record.evaluations, size)
    return record


def price_range(pricer: Pricer, begin: int, end: int) -> Record:
    """Return the record of the points from one number to another, the last one left out."""
    record = Record()
    for start in range(begin, end, CHUNK):
        points = np.arange(start, min(start + CHUNK, end), dtype=np.int64)
        record.add(pricer.price(pricer.space.digits(points)))
    return record


def price_sample(
    pricer: Pricer,
    evaluations: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> Record:
    """Return the record of points drawn evenly, none twice; of all, if there are not more."""
    record = Record()
    digits = draw_sample(pricer.space, evaluations, np.random.default_rng(seed))
    for begin in range(0, len(digits), CHUNK):
        record.add(pricer.price(digits[begin : begin + CHUNK]))
        if progress is not None:
            progress(record.evaluations, len(digits))
    return record


def draw_sample(space: TuningSpace, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return the digits of points drawn evenly and without repeats, a row each."""
    if space.size > _COUNTABLE:  # repeats are as good as impossible
        return np.stack([rng.integers(len(d.values), size=count) for d in space.domains], axis=1)
    if space.size <= 4 * count:
        return space.digits(rng.permutation(space.size)[:count])
    points = np.empty(0, np.int64)
    while len(points) < count:
        drawn = np.concatenate([points, rng.integers(space.size, size=count - len(points))])
        points = drawn[np.sort(np.unique(drawn, return_index=True)[1])]
    return space.digits(points)

"""Micro-batches of samples of different lengths: computed tokens, attention, longest rows.

A row is a sequence of a micro-batch as it is computed: a padded sample or packed samples. The
engine cuts samples at the sequence length. Formulas treat samples as independent draws, except
where the longest row of a run of a whole epoch is known to have the longest sample.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autopar.arrays import F64, I64
from autopar.records import Record
from autopar.training.lengths import ROWS_DIFFER, Batching, Lengths

_POOL = 50
"""Steps of a rank whose samples are sorted together (`get_length_grouped_indices` of transformers,
trainer_pt_utils.py)."""
_MOST_PACKED = 20_000
"""Largest number of samples that are packed to estimate the rows of a data set."""
_MOST_TERMS = 1 << 21
"""Largest number of binomial probabilities of order statistics; others are interpolated."""
_LEAST_SHARES = 64
"""Smallest number of shares of samples for which they are computed."""
_LEAST_WEIGHT = 1e-14
"""Smallest probability of a sum of lengths."""
_MOST_SUMS = 1 << 20
"""Largest number of sums of lengths whose probabilities are computed."""


class Rows(Record, eq=False):
    """Distribution of the rows of one micro-batch, ascending."""

    tokens: F64
    """Computed tokens of a row, padding included; fractions where a micro-batch has no padding."""
    attended: F64
    """Mean over tokens of the length of their document, at most `tokens`."""
    weights: F64
    """Probabilities; their sum is 1."""
    real: float
    """Mean tokens of a row without padding."""

    @property
    def mean_tokens(self) -> float:
        """Mean computed tokens of a row."""
        return float(self.tokens @ self.weights)


class Batches(Record, dict=True, eq=False):
    """Micro-batches of a run over samples of given lengths."""

    lengths: Lengths
    """Lengths as computed: cut and padded by `Lengths.within`."""
    real: Lengths
    """Lengths without padding, cut at the sequence length."""
    batching: Batching
    seq_length: int
    micro_batch: int
    """Rows of a micro-batch, b."""
    ranks: int
    """Data-parallel ranks, D."""
    micro_batches: int
    """Micro-batches of a rank and step, m."""

    @property
    def varies(self) -> bool:
        """True if the number of computed tokens differs between micro-batches."""
        return self.batching in ROWS_DIFFER and self.rows.tokens[0] != self.rows.tokens[-1]

    @cached_property
    def rows(self) -> Rows:
        """Rows of one micro-batch."""
        if self._of_one_sample:
            tokens, weights = np.array(self._drawn.values, float), self.weights_of_longest(1)
            return Rows(tokens=tokens, attended=tokens, weights=weights, real=self.real.mean)
        if self.batching == "padding-free":
            return self._summed()
        if self.batching in ("packed", "packed-full"):
            return self._packed()
        full = np.array([float(self.seq_length)])
        real = float(self.seq_length) if self.batching == "wrapped" else self.real.mean
        return Rows(tokens=full, attended=full, weights=np.ones(1), real=real)

    # ----------------------------------------------------------------------------------------------
    # Longest rows.

    @property
    def _of_one_sample(self) -> bool:
        """True if the length of a row is that of one sample, the longest of its micro-batch."""
        single = self.batching == "padding-free" and self.micro_batch == 1
        return single or self.batching in ("longest", "grouped")

    @property
    def _drawn(self) -> Lengths:
        return self.real if self.batching == "padding-free" else self.lengths

    @cached_property
    def _above(self) -> F64:
        """Share of samples longer than each length."""
        return 1.0 - np.array(self._drawn.below) / self._drawn.number

    @property
    def _pool(self) -> int:
        """Number of micro-batches whose samples are sorted together; 1 without sorting."""
        step = self.micro_batch * self.micro_batches
        if self.batching != "grouped":
            return 1
        return max(1, min(self.lengths.number // (4 * step), _POOL)) * self.micro_batches

    def weights_of_longest(self, number: int) -> F64:
        """Return the probabilities of the longest row of `number` micro-batches in succession.

        They are those of `rows.tokens`. Without sorting, P(longest <= l) = F(l)^g with g samples in
        all. Of M sorted samples, N ~ Binomial(M, 1 - F(l)) are longer than l. Micro-batch p of b
        rows has none of them if N <= p b, and later ones have shorter samples. Micro-batches
        beyond the M samples start with the longest of the next M.
        """
        if not self._of_one_sample:
            if self.batching != "padding-free":
                return np.ones(1)
            return _differences(np.cumsum(self.rows.weights) ** number)
        pool, below = self._pool, 1.0 - self._above
        if pool == 1:
            return _differences(below ** (number * self.micro_batch))
        samples = pool * self.micro_batch
        starts = np.arange(0, pool, math.gcd(number, pool))
        further = np.maximum(0, -(-(starts + number - pool) // pool))
        shares = np.unique(below)
        if len(shares) > (most := max(_LEAST_SHARES, _MOST_TERMS // samples)):
            least = max(1.0 - shares[shares < 1.0][-1], 1e-12)
            shares = 1.0 - np.append(np.geomspace(1.0, least, most), 0.0)
        longer = _at_most(samples, 1.0 - shares)[:, starts * self.micro_batch]
        found = (longer * shares[:, None] ** (samples * further)).mean(axis=1)
        return _differences(np.interp(below, shares, found))

    def weights_of_run(self, steps: int) -> F64:
        """Return the probabilities of the longest row of `steps` steps, those of `rows.tokens`.

        Samples of one epoch are drawn without replacement: P = prod_i (k - i) / (n - i) for k of n
        samples that are not longer. An epoch has the longest sample, and sorted samples begin with
        it (`get_length_grouped_indices`).
        """
        if not self._of_one_sample:
            return self.weights_of_longest(steps * self.ranks * self.micro_batches)
        drawn = steps * self.ranks * self.micro_batches * self.micro_batch
        number = self._drawn.number
        if drawn >= number or self.batching == "grouped":
            return np.append(np.zeros(len(self._above) - 1), 1.0)
        kept = np.array(self._drawn.below)
        enough = kept >= drawn
        logs = _log_choose(np.maximum(kept, drawn), drawn) - _log_choose(np.array(number), drawn)
        return _differences(np.where(enough, np.exp(np.minimum(logs, 0.0)), 0.0))

    # ----------------------------------------------------------------------------------------------
    # Rows without padding.

    def _summed(self) -> Rows:
        """Return rows of b samples without padding, each an equal part of the micro-batch.

        The distribution of the sum of b lengths is the b-th convolution power of that of one.
        """
        own, rows = self.real, self.micro_batch
        values = np.array(own.values, dtype=np.float64)
        weights = np.array(own.counts, dtype=np.float64) / own.number
        unit = float(max(1, -(-rows * own.values[-1] // _MOST_SUMS)))
        sums, total, squares = sum_distribution(values, weights, rows, unit, values * values)
        return Rows(tokens=sums / rows, attended=squares / sums, weights=total, real=own.mean)

    def _packed(self) -> Rows:
        """Return rows of samples packed by best fit, longest first; attention may vary by row."""
        tokens, squares = packed(self.real, self.seq_length)
        real, full = float(tokens.mean()), float(self.seq_length)
        if self.batching == "packed-full":
            only = np.array([full])
            return Rows(tokens=only, attended=only, weights=np.ones(1), real=real)
        attended, counts = np.unique(squares / full, return_counts=True)
        weights = counts / counts.sum()
        if self.micro_batch > 1 and len(attended) > 1:
            unit = (attended[-1] - attended[0]) * self.micro_batch / _MOST_SUMS
            sums, weights, _ = sum_distribution(attended, weights, self.micro_batch, unit, attended)
            attended = sums / self.micro_batch
        return Rows(
            tokens=np.full(len(attended), full), attended=attended, weights=weights, real=real
        )


def packed(lengths: Lengths, seq_length: int) -> tuple[F64, F64]:
    """Return (tokens, sum of squared lengths) of each row of samples packed by best fit.

    Samples are packed longest first, each into the fullest row with room for it. Of a larger data
    set, 20,000 samples at even quantiles are packed.
    """
    number = min(lengths.number, _MOST_PACKED)
    at = (np.arange(number)[::-1] + 0.5) / number * lengths.number
    drawn = np.array(lengths.values)[np.searchsorted(lengths.below, at)]
    tokens: list[int] = []
    squares: list[int] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for value in map(int, drawn):
        fit = bisect_left(rooms, (value, -1))
        if fit < len(rooms):
            room, row = rooms.pop(fit)
        else:
            room, row = seq_length, len(tokens)
            tokens.append(0)
            squares.append(0)
        tokens[row] += value
        squares[row] += value * value
        insort(rooms, (room - value, row))
    return np.array(tokens, dtype=np.float64), np.array(squares, dtype=np.float64)


# --------------------------------------------------------------------------------------------------
# Distributions.


def sum_distribution(
    values: F64, weights: F64, number: int, unit: float, each: F64
) -> tuple[F64, F64, F64]:
    """Return (sums, probabilities, means) of the sum of `number` independent draws.

    The means are those of the sum of `each` over the draws of one sum: number times the mean of the
    first draw, whose probabilities are a convolution with those of the others.

    values, weights : values of one draw, ascending, and their probabilities.
    unit : step of the grid of sums; a value between two points is divided so that the mean stays.
    """
    at = (values - values[0]) / unit
    low = np.floor(at).astype(np.int64)
    size = (int(low[-1]) + 1) * number + 1
    padded = 1 << (size - 1).bit_length()

    def transformed(parts: F64) -> NDArray[np.complex128]:
        one = np.zeros(int(low[-1]) + 2)
        np.add.at(one, low, parts * (1.0 - (at - low)))
        np.add.at(one, low + 1, parts * (at - low))
        return np.fft.rfft(one, padded)

    single = transformed(weights)
    found = np.fft.irfft(single**number, padded)[:size]
    # rounding of the transform leaves probabilities of about 1e-17
    seen = np.flatnonzero(found > _LEAST_WEIGHT)
    weighted = np.fft.irfft(transformed(weights * each) * single ** (number - 1), padded)[seen]
    means = np.clip(number * weighted / found[seen], number * each.min(), number * each.max())
    return number * values[0] + unit * seen, found[seen] / found[seen].sum(), means


def slowest_mean(seconds: F64, weights: F64, number: int, ranks: int) -> float:
    """Return the expected largest of `ranks` means of `number` independent draws.

    E[max] = sum_t t (G(t)^D - G(t-)^D), where G is the distribution of the mean.
    """
    order = np.argsort(seconds, kind="stable")
    values, share = seconds[order], weights[order]
    if values[0] == values[-1]:
        return float(values[0])
    if number > 1:
        # a finer grid where the sum has fewer points
        unit = (values[-1] - values[0]) / max(64, (1 << 18) // number)
        values, share, _ = sum_distribution(values, share, number, unit, values)
        values = values / number
    return float(values @ _differences(np.minimum(np.cumsum(share), 1.0) ** ranks))


def _differences(shares: F64) -> F64:
    """Return the probabilities of values from P(value <= each)."""
    found = np.diff(shares, prepend=0.0)
    return np.asarray(np.maximum(found, 0.0) / np.maximum(found, 0.0).sum(), dtype=np.float64)


def _at_most(number: int, shares: F64) -> F64:
    """Return P(N <= n) for N ~ Binomial(number, shares), by share and n from 0 to `number`."""
    counts = np.arange(number + 1)
    logs = _log_choose(np.full(number + 1, number), counts)
    inside = np.clip(shares, 1e-300, 1.0 - 1e-16)[:, None]
    logs = logs + counts * np.log(inside) + (number - counts) * np.log1p(-inside)
    return np.asarray(np.minimum(np.cumsum(np.exp(logs), axis=1), 1.0), dtype=np.float64)


def _log_choose(number: I64, drawn: I64 | int) -> F64:
    """Return the logarithms of binomial coefficients; `drawn` is at most `number`."""
    return _log_gamma(number + 1) - _log_gamma(number - drawn + 1) - _log_gamma(drawn + 1)


def _log_gamma(values: I64 | int) -> F64:
    return np.array([math.lgamma(one) for one in np.ravel(values)]).reshape(np.shape(values))

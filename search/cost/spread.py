"""Computation drawn again within its measured spread: replicas of its fits.

Source: cost-model.md "Spread of computation". The draws of a cell depend on nothing but its place
in the profile, so two plans see the same replicas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.arrays import F64, I64
from autopar.model import LayerProfile, OtherTime
from search.cost.fits import (
    OTHER,
    ComputeFit,
    ComputeFits,
    MeasuredTime,
    OtherFits,
    Pass,
    fit_measured,
    measured_cells,
    other_cells,
    shard_name,
)
from search.cost.tables import Rows
from search.options import SearchOptions

__all__ = [
    "NUM_REPLICAS",
    "DrawnFits",
    "DrawnOtherFits",
    "Draws",
    "LayerDraws",
    "OtherDraws",
    "repeated",
]

_Key = tuple[Pass, bool, int]

NUM_REPLICAS = 200
_SEED = 20240229
_OTHER_PLACE = 1_000_000
"""Of embedding, head and loss, behind any layer type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnFits(ComputeFits):
    """The fits of a layer type with the coefficients of every replica, for `repeated` rows."""

    draws: LayerDraws
    rows_per_replica: int

    def seconds(self, what: Pass, rows: Rows, otherwise: F64 | None = None) -> F64:
        """Return the time of every row of every replica; as `ComputeFits.seconds`."""
        # rows are repeated replica by replica
        replica = np.arange(len(rows.batch)) // self.rows_per_replica
        if what == "forward":
            launch, sample = self.draws.coefficients(("forward", False, 1))
            result = launch[replica] + rows.batch * sample[replica] / rows.shards
        else:
            assert otherwise is not None, "only forwards are always measured"
            result = otherwise.copy()
        for at, degree, _ in self.used(what, rows):
            # whole layers have one fit for both kinds, under this name
            ulysses = bool(rows.ulysses[at[0]]) and degree > 1
            launch, sample = self.draws.coefficients((what, ulysses, degree))
            r = replica[at]
            # cells are of this degree already: only the shards beyond it divide
            result[at] = launch[r] + rows.batch[at] * sample[r] / (rows.shards[at] / degree)
        return result


@dataclass(frozen=True, kw_only=True, eq=False)
class DrawnOtherFits(OtherFits):
    """The fits of embedding, head and loss with the coefficients of every replica.

    For as many tables as there are replicas, of which each is priced in the next.
    """

    draws: OtherDraws

    def seconds(self, what: Pass, batch: F64, table: I64) -> F64 | None:
        """Return the time of every row of every replica; as `OtherFits.seconds`."""
        if super().seconds(what, batch, table) is None:
            return None
        launch, sample = self.draws.coefficients((what, False, 1))
        result: F64 = launch[table] + batch * sample[table]
        return result


class Draws(ABC):
    """Replicas of measured cells, and the fits of them, made when they are needed."""

    def __init__(self, place: int, cells: Mapping[_Key, Sequence[MeasuredTime]]) -> None:
        """Draw the cells; `place` is where they stand in the profile."""
        self._cells = cells
        # seeded by place: draws of one layer type do not depend on the others
        generator = np.random.default_rng((_SEED, place))
        self._times: dict[_Key, F64] = {
            key: np.stack([_draw(cell, generator) for cell in group])
            for key, group in cells.items()
        }
        self._fitted: dict[_Key, tuple[F64, F64]] = {}

    @abstractmethod
    def _fit(self, times: Sequence[MeasuredTime]) -> ComputeFit:
        """Return the fit of a replica."""

    @abstractmethod
    def _name(self, key: _Key) -> str:
        """Return what the cells of a fit measure, in words."""

    @property
    def has_spread(self) -> bool:
        """True when some cell is not the same in every replica."""
        return any(bool(np.ptp(times, axis=1).any()) for times in self._times.values())

    def coefficients(self, key: _Key) -> tuple[F64, F64]:
        """Return launch and per-sample seconds of every replica, each (NUM_REPLICAS,).

        key : pass, Ulysses or not, and degree.
        """
        if key not in self._fitted:
            cells, times = self._cells[key], self._times[key]
            fits = []
            # without spread all replicas are the first
            for drawn in times.T if np.ptp(times, axis=1).any() else times.T[:1]:
                again = [
                    MeasuredTime(batch=c.batch, seq_lengths=c.seq_lengths, time_s=float(t))
                    for c, t in zip(cells, drawn, strict=True)
                ]
                fits.append(self._fit(again))
            self._fitted[key] = _columns(fits)
        return self._fitted[key]

    def cells(self) -> Mapping[str, F64]:
        """Return the replicas (NUM_REPLICAS,) of every cell that has spread, by its name."""
        return {
            f"{self._name(key)}, batch {cell.batch}, "
            f"sequence length {','.join(map(str, cell.seq_lengths))}": times
            for key, cells in self._cells.items()
            for cell, times in zip(cells, self._times[key], strict=True)
            if np.ptp(times) > 0.0
        }


class LayerDraws(Draws):
    """Replicas of one layer type's cells."""

    def __init__(
        self, kind: int, profile: LayerProfile, seq_length: int, options: SearchOptions
    ) -> None:
        super().__init__(kind, measured_cells(kind, profile, options, _ignore))
        self._kind = kind
        self._seq_length = seq_length
        self._options = options

    def _fit(self, times: Sequence[MeasuredTime]) -> ComputeFit:
        name = f"layer type {self._kind}"
        lengths = (self._seq_length,)
        return fit_measured(name, times, lengths, self._options, _ignore, of_layer=True)

    def _name(self, key: _Key) -> str:
        return f"{shard_name(*key)} of layer type {self._kind}"


class OtherDraws(Draws):
    """Replicas of the cells of embedding, head and loss."""

    def __init__(
        self, times: Sequence[OtherTime], seq_lengths: tuple[int, ...], options: SearchOptions
    ) -> None:
        cells = {(what, False, 1): found for what, found in other_cells(times).items()}
        super().__init__(_OTHER_PLACE, cells)
        self._seq_lengths = seq_lengths
        self._options = options

    def _fit(self, times: Sequence[MeasuredTime]) -> ComputeFit:
        lengths = self._seq_lengths
        return fit_measured(OTHER, times, lengths, self._options, _ignore, of_layer=False)

    def _name(self, key: _Key) -> str:
        return f"{key[0]} of {OTHER}"


def repeated(rows: Rows) -> Rows:
    """Return the rows once per replica, one replica after the other."""
    return rows.take(np.tile(np.arange(len(rows.batch)), NUM_REPLICAS))


def _draw(cell: MeasuredTime, generator: np.random.Generator) -> F64:
    """Return replicas of a cell: quantiles of 5 to 95 %, straight from low over median to high."""
    # nothing is known of what lies outside the percentiles
    quantile = generator.uniform(0.05, 0.95, NUM_REPLICAS)
    # a percentile that was not measured stays at the median
    low = cell.time_s if cell.low_s is None else cell.low_s
    high = cell.time_s if cell.high_s is None else cell.high_s
    drawn: F64 = np.interp(quantile, (0.05, 0.5, 0.95), (low, cell.time_s, high))
    return drawn


def _columns(fits: list[ComputeFit]) -> tuple[F64, F64]:
    launch = np.array([fit.launch_s for fit in fits])
    sample = np.array([fit.sample_s for fit in fits])
    # one fit stands for all replicas where cells have no spread
    return (
        np.broadcast_to(launch, NUM_REPLICAS).copy(),
        np.broadcast_to(sample, NUM_REPLICAS).copy(),
    )


def _ignore(_: str) -> None:
    """Take no notes: the fit of the medians has taken them."""

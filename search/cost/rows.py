"""Rows: every (table, layer strategy) of one layer type that can be priced, as flat arrays.

Formulas are evaluated once over all rows; only `build_rows` and `Rows.scatter` know the table
axes. Rank order inside a stage: tensor or Ulysses ranks fastest, then context, then data; with
strided tensor groups context first, then data, then tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.plan import LayerStrategy, ZeroDefault
from search.cost.comm import Groups

__all__ = ["Rows", "Table", "build_rows", "table_arrays"]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
_Bool = NDArray[np.bool_]

Table = tuple[int, int, ZeroDefault]
"""(number of stages p, samples per micro-batch g, default dp type)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Flat arrays over the n priced rows; `valid` marks those that are also legal."""

    shape: tuple[int, int]
    """(tables, strategies) to scatter back into."""
    table: I64
    strategy: I64
    valid: _Bool
    stages: F64
    """(n,) p"""
    ranks: F64
    """(n,) ranks of a stage"""
    samples: F64
    """(n,) g"""
    tensor: F64
    context: F64
    shards: F64
    """(n,) t*c"""
    batch: F64
    """(n,) b = g/d"""
    zero_size: F64
    """(n,) ranks over which gradients are reduced and ZeRO shards"""
    ulysses: _Bool
    zero3: _Bool
    zero2: _Bool
    """(n,) gradients and optimizer are sharded (default zero2, not zero3)"""
    checkpoint: _Bool
    tensor_group: I64
    context_group: I64
    zero_group: I64

    def scatter(self, values: F64, fill: float = 0.0) -> F64:
        """Return (tables, strategies) with `values` (n,) in the priced places, else `fill`."""
        full = np.full(self.shape, fill)
        full[self.table, self.strategy] = values
        return full


def table_arrays(tables: Sequence[Table]) -> tuple[I64, I64, _Bool]:
    """Return p, g and "default is zero2" of every table, each of shape (N,)."""
    stages = np.array([p for p, _, _ in tables], dtype=np.int64)
    samples = np.array([g for _, g, _ in tables], dtype=np.int64)
    zero2 = np.array([kind == "zero2" for _, _, kind in tables], dtype=np.bool_)
    return stages, samples, zero2


def build_rows(
    world_size: int,
    strategies: Sequence[LayerStrategy],
    tables: Sequence[Table],
    groups: Groups,
    *,
    legal: _Bool,
    priceable: _Bool,
    price_illegal: bool = False,
) -> Rows:
    """Return the rows of one layer type.

    legal, priceable : (S,) whether the model allows the strategy, and whether it has the
    measurements for it. With `price_illegal` rows that only break divisibility rules are priced
    too (with a fractional b), still marked as not valid.
    """
    stages, samples, zero2 = table_arrays(tables)
    tensor = np.array([s.tp for s in strategies], dtype=np.int64)
    context = np.array([s.cp for s in strategies], dtype=np.int64)
    ulysses = np.array([s.ulysses for s in strategies], dtype=np.bool_)
    zero3 = np.array([s.zero3 for s in strategies], dtype=np.bool_)
    checkpoint = np.array([s.checkpoint for s in strategies], dtype=np.bool_)
    distinct, stage_index = np.unique(stages, return_inverse=True)

    size = (len(distinct), len(strategies))
    fits = np.zeros(size, dtype=np.bool_)
    data = np.ones(size, dtype=np.int64)
    zero_size = np.ones(size, dtype=np.int64)
    group = np.zeros((3, *size), dtype=np.int64)
    for i, num_stages in enumerate(distinct.tolist()):
        if num_stages < 1 or world_size % num_stages:
            continue
        ranks = world_size // num_stages
        for k, s in enumerate(strategies):
            d, rest = divmod(ranks, s.tp * s.cp)
            if rest or not priceable[k]:
                continue
            z = d * s.cp * (s.tp if s.ulysses else 1)
            group[0, i, k] = groups.index(s.tp, d * s.cp if s.strided else 1)
            group[1, i, k] = groups.index(s.cp, 1 if s.strided else s.tp)
            group[2, i, k] = groups.index(z, 1 if s.ulysses or s.strided else s.tp)
            fits[i, k], data[i, k], zero_size[i, k] = True, d, z
    fits &= groups.known(group).all(axis=0)

    priced = fits[stage_index]
    data = data[stage_index]
    whole = samples[:, None] % data == 0
    sharded = zero_size[stage_index]
    allowed = whole & (~zero3 | (sharded > 1)) & legal
    if not price_illegal:
        priced = priced & allowed
    table, strategy = np.nonzero(priced)
    t, c = tensor[strategy].astype(np.float64), context[strategy].astype(np.float64)
    p = stages[table]
    at = stage_index[table]
    return Rows(
        shape=(len(tables), len(strategies)),
        table=table,
        strategy=strategy,
        valid=allowed[table, strategy],
        stages=p.astype(np.float64),
        ranks=(world_size // p).astype(np.float64),
        samples=samples[table].astype(np.float64),
        tensor=t,
        context=c,
        shards=t * c,
        batch=samples[table] / data[table, strategy],
        zero_size=sharded[table, strategy].astype(np.float64),
        ulysses=ulysses[strategy],
        zero3=zero3[strategy],
        zero2=zero2[table] & ~zero3[strategy],
        checkpoint=checkpoint[strategy],
        tensor_group=group[0][at, strategy],
        context_group=group[1][at, strategy],
        zero_group=group[2][at, strategy],
    )

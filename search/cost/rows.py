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

from autopar.arrays import F64, I64, Bool
from autopar.model import LayerSpec
from autopar.plans import LayerStrategy, ZeroDefault
from search.cost.communication import Groups

__all__ = [
    "LayerRows",
    "Rows",
    "Table",
    "build_rows",
    "legal_strategies",
    "sum_of",
    "table_arrays",
]


# --------------------------------------------------------------------------------------------------
# One layer type priced: seconds and bytes of every (table, strategy), by category.


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRows:
    """One layer type priced, axes (N tables, S strategies), split by category.

    Rows without a price hold inf seconds in `forward`, `backward` and `tail`, and 0 elsewhere.
    """

    valid: NDArray[np.bool_]
    priced: NDArray[np.bool_]
    """Also true for rows that only break a divisibility rule, when those were asked for."""
    forward: dict[str, F64]
    """Seconds of a micro-batch's forward: forward, tp, ulysses, cp, zero3."""
    backward: dict[str, F64]
    """Seconds of a micro-batch's backward: backward, recompute, tp, ulysses, cp, zero3, sync."""
    step: dict[str, F64]
    """Seconds once per step: tail, optimizer."""
    states: I64
    """(2, N, S)"""
    activations: I64
    """(N, S) per micro-batch in flight"""
    transient: I64
    """(2, N, S)"""
    backward_peak: I64
    """(N, S), a part of `transient`: what a layer's backward needs above what is kept."""
    shared: I64

    @property
    def forward_s(self) -> F64:
        """(N, S) sum of `forward`."""
        return sum_of(self.forward)

    @property
    def backward_s(self) -> F64:
        """(N, S) sum of `backward`."""
        return sum_of(self.backward)

    @property
    def tail_s(self) -> F64:
        """(N, S) sum of `step`."""
        return sum_of(self.step)

    def time_s(self, table: int, strategy: int) -> dict[str, float]:
        """Return the seconds of one row by category, per micro-batch and per step."""
        result: dict[str, float] = {}
        for part in (self.forward, self.backward, self.step):
            for name, values in part.items():
                result[name] = result.get(name, 0.0) + float(values[table, strategy])
        return result


def sum_of(parts: dict[str, F64]) -> F64:
    """Return the sum of the categories, in their order."""
    values = iter(parts.values())
    total = next(values).copy()
    for value in values:
        total += value
    return total


# --------------------------------------------------------------------------------------------------
# Which strategies a layer's shape allows, for many at once; `autopar.plans` explains one.
#
# Source: cost-model.md "Legality". Rules about ranks and samples are those of `rows`.


def legal_strategies(
    spec: LayerSpec, strategies: Sequence[LayerStrategy], *, sequence_parallel: bool
) -> NDArray[np.bool_]:
    """Return (S,) whether heads, widths and sequence divide; unknown ones are not checked."""
    return np.array([_legal(spec, s, sequence_parallel) for s in strategies], dtype=np.bool_)


def _legal(spec: LayerSpec, strategy: LayerStrategy, sequence_parallel: bool) -> bool:
    t, c = strategy.tp, strategy.cp
    heads, kv_heads, ffn = spec.num_heads, spec.num_kv_heads, spec.ffn_hidden_size
    if heads is not None and heads % t:
        return False
    # fewer kv heads than ranks are copied, evenly
    if kv_heads is not None and kv_heads % t and t % kv_heads:
        return False
    # Ulysses leaves the MLP whole
    if not strategy.ulysses and ffn is not None and ffn % t:
        return False
    shards = t if strategy.ulysses or sequence_parallel else 1
    # zigzag: a context rank has a chunk of the front and one of the back, so causal work is even
    pieces = 2 * c * shards if c > 1 else shards
    return spec.seq_length % pieces == 0


# --------------------------------------------------------------------------------------------------
# Rows of tables: what is legal, and what is priced.


Table = tuple[int, int, ZeroDefault]
"""(number of stages p, samples per micro-batch g, default dp type)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Flat arrays over the n priced rows; `valid` marks those that are also legal."""

    shape: tuple[int, int]
    """(tables, strategies) to scatter back into."""
    table: I64
    strategy: I64
    valid: Bool
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
    ulysses: Bool
    zero3: Bool
    zero2: Bool
    """(n,) gradients and optimizer are sharded (default zero2, not zero3)"""
    checkpoint: Bool
    tensor_group: I64
    context_group: I64
    zero_group: I64

    def scatter(self, values: F64, fill: float = 0.0) -> F64:
        """Return (tables, strategies) with `values` (n,) in the priced places, else `fill`."""
        full = np.full(self.shape, fill)
        full[self.table, self.strategy] = values
        return full


def table_arrays(tables: Sequence[Table]) -> tuple[I64, I64, Bool]:
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
    legal: Bool,
    priceable: Bool,
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
    # groups depend on p alone, so tables of other batches share them
    distinct, stage_index = np.unique(stages, return_inverse=True)

    size = (len(distinct), len(strategies))
    fits = np.zeros(size, dtype=np.bool_)
    # rows that do not fit keep degrees of 1: no remainder divides by 0
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
            # context and Ulysses ranks have the weights of data ranks: they reduce together
            z = d * s.cp * (s.tp if s.ulysses else 1)
            # neighbours first: tensor, context, data; strided: context, data, tensor
            group[0, i, k] = groups.index(s.tp, d * s.cp if s.strided else 1)
            group[1, i, k] = groups.index(s.cp, 1 if s.strided else s.tp)
            group[2, i, k] = groups.index(z, 1 if s.ulysses or s.strided else s.tp)
            fits[i, k], data[i, k], zero_size[i, k] = True, d, z
    # without a bandwidth a row has no price
    fits &= groups.known(group).all(axis=0)

    priced = fits[stage_index]
    data = data[stage_index]
    # b is a whole number of samples, never rounded
    whole = samples[:, None] % data == 0
    sharded = zero_size[stage_index]
    # ZeRO-3 of one rank shards nothing: a second name for the plan without it
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
        # the default is of layers that ZeRO-3 does not shard already
        zero2=zero2[table] & ~zero3[strategy],
        checkpoint=checkpoint[strategy],
        tensor_group=group[0][at, strategy],
        context_group=group[1][at, strategy],
        zero_group=group[2][at, strategy],
    )

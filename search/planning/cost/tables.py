"""Arrays of the planner (`PlanTables`), and flat arrays of rows for the cost formulas (`Rows`).

A *table* is one (number of stages p, samples per micro-batch g = G/m, default dp type). Time and
memory of a layer depend only on the table and the layer's strategy, not on the global batch G.
Every distinct table is priced once. A *candidate* is a table and a number of micro-batches m
(global batch G = g*m).

Axes: N tables, K layer types, S layer strategies (canonical order), Y layouts of the activation
between layers, E strategies of embedding and head. `POSITIONS` lists the positions of embedding and
head in the pipeline, `STAGE_KINDS` those of a stage. A leading axis of two in arrays named
`*_bytes` is [m == 1, m > 1]: with one reduction per step, gradients of several micro-batches stay
unsharded until the reduction.

Memory of stage j of p, which must not exceed `budget_bytes`:
    stage_fixed_bytes[n, kind(j)]
  + vocab_static_bytes + vocab_activation_bytes * in_flight(j)          (first / last / only stage)
  + sum over its layers of (static_bytes + activation_bytes * in_flight(j))
  + max over its layers and vocabulary layers of transient_bytes
  + max over its layers and vocabulary layers of shared_bytes
with in_flight(j) = min(m, p - j) (1F1B) or m (GPipe), and 1 if there is only one stage.

Time: f_j and g_j are forward and backward of one micro-batch on stage j. They include layers,
embedding and head, and the redistribution before every layer, charged to the receiving stage;
before the head it is charged to the last stage. tail_j is the sum of the tails of stage j, c_j =
send_s of its last layer, cbar = max c_j:
    1F1B  s_j = f_j + g_j + 2*cbar*(p-1)/p;   T = sum s_j + (m-1)*max s_j + max tail_j
    GPipe T = sum (f_j+g_j) + (m-1)*(max(f_j, c_j) + max(g_j, c_j)) + 2*sum c_j + max tail_j
Redistribution is indexed [type of the producing layer, from layout, to layout]. Between embedding
and first layer the type is that of the first layer, between last layer and head that of the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import asdict
from numpy.typing import NDArray

from autopar.arrays import F64, I64, Bool
from autopar.rates.measured import HardwareProfile
from autopar.records import Record, replace
from autopar.run.plan import LayerStrategy, PipelineType, VocabStrategy, ZeroDefault, data_degree
from autopar.run.runtime import OverlapFactors
from search.planning.cost.communication import Groups
from search.planning.cost.state_layouts import Recipe
from search.planning.space import Table
from search.request.options import SearchOptions

POSITIONS = ("only", "first", "last")
"""Positions of embedding and head: `only` if p == 1, else `first` and `last` stage."""
STAGE_KINDS = ("only", "first", "middle", "last")


class ActivationLayout(Record, order=True):
    """Distribution of the activation between two layers over the ranks of a stage."""

    sequence_shards: int
    """Shards of the sequence dimension (t*c with SP or Ulysses, c otherwise)."""
    cp: int
    """Context-parallel degree (zigzag chunks), a factor of `sequence_shards`."""
    replicas: int
    """Copies of each shard (t for tensor parallelism without SP)."""
    strided: bool = False
    """True if tensor groups are strided, so that a sample is on other ranks than in contiguous
    groups."""


class PlanTables(Record, eq=False):
    """Inputs of the planner core; see the module docstring for axes and formulas."""

    world_size: int
    pipeline_type: PipelineType
    layer_type: NDArray[np.int32]
    """(L,) type of every layer, an index into the axis K."""
    strategies: tuple[LayerStrategy, ...]
    layouts: tuple[ActivationLayout, ...]
    strategy_layout: NDArray[np.int32]
    """(S,) index of every strategy's layout."""
    vocab: tuple[VocabStrategy, ...]
    vocab_layout: NDArray[np.int32]
    """(E,) layout of the embedding's output and of the head's input."""

    table_stages: NDArray[np.int32]
    """(N,) p, number of stages."""
    table_microbatch: I64
    """(N,) g, samples of one micro-batch over all ranks."""
    table_dp: tuple[ZeroDefault, ...]
    """(N,) default data-parallel type."""

    valid: NDArray[np.bool_]
    """(N, K, S) True if the strategy is legal and priced."""
    forward_s: F64
    """(N, K, S) seconds of one micro-batch."""
    backward_s: F64
    """(N, K, S) seconds of one micro-batch."""
    tail_s: F64
    """(N, K, S) seconds once per step: exposed reduction, optimizer."""
    static_bytes: I64
    """(2, N, K, S) bytes of weights, gradients and optimizer states."""
    activation_bytes: I64
    """(N, K, S) bytes of saved activations per micro-batch in flight."""
    transient_bytes: I64
    """(2, N, K, S) peak bytes of transient memory."""
    shared_bytes: I64
    """(N, K, S) bytes of buffers that all layers of a stage use in turn."""

    redistribute_forward_s: F64
    """(N, K, Y, Y) seconds from one layout to another."""
    redistribute_backward_s: F64
    send_s: F64
    """(N, K, Y) seconds of a transfer to the next stage."""

    vocab_valid: NDArray[np.bool_]
    """(N, E) True if the strategy is legal and priced."""
    vocab_forward_s: F64
    """(N, 3, E) seconds of a micro-batch by position."""
    vocab_backward_s: F64
    vocab_tail_s: F64
    vocab_static_bytes: I64
    """(2, N, 3, E) bytes of weights, gradients and optimizer states."""
    vocab_activation_bytes: I64
    """(N, 3, E) bytes of saved activations per micro-batch in flight."""
    vocab_transient_bytes: I64
    """(2, N, 3, E) peak bytes of transient memory."""
    vocab_shared_bytes: I64
    """(N, 3, E) bytes of shared buffers."""
    stage_fixed_bytes: I64
    """(N, 4) bytes by stage kind, independent of strategies."""

    candidate_table: NDArray[np.int32]
    """(Q,) index of every candidate's table."""
    candidate_microbatches: NDArray[np.int32]
    """(Q,) m, micro-batches per step."""

    @property
    def candidate_batch(self) -> I64:
        """(Q,) global batch of every candidate."""
        return self.table_microbatch[self.candidate_table] * self.candidate_microbatches

    def num_bytes(self) -> int:
        """Return the memory of all arrays, in bytes."""
        return sum(v.nbytes for v in asdict(self).values() if isinstance(v, np.ndarray))


_SECOND_AXIS = ("static_bytes", "transient_bytes", "vocab_static_bytes", "vocab_transient_bytes")
"""Arrays with tables on the second axis; in all others tables are on the first."""


def joined(
    parts: Sequence[tuple[I64, PlanTables]], candidates: Sequence[tuple[int, int]]
) -> PlanTables:
    """Return the concatenation of tables that were priced in parts with the same strategies.

    parts : (numbers of the tables, tables) of each part; the result is ordered by number.
    candidates : (index of a table in the result, number of micro-batches).
    """
    first = parts[0][1]
    order = np.argsort(np.concatenate([numbers for numbers, _ in parts]))
    all_dp = [kind for _, part in parts for kind in part.table_dp]
    arrays: dict[str, Any] = {}
    for name, array in asdict(first).items():
        if isinstance(array, np.ndarray) and name not in _OF_ALL_TABLES:
            axis = int(name in _SECOND_AXIS)
            whole = np.concatenate([getattr(part, name) for _, part in parts], axis=axis)
            arrays[name] = whole.take(order, axis=axis)
    return replace(
        first,
        table_dp=tuple(all_dp[i] for i in order.tolist()),
        candidate_table=np.array([n for n, _ in candidates], dtype=np.int32),
        candidate_microbatches=np.array([m for _, m in candidates], dtype=np.int32),
        **arrays,
    )


_OF_ALL_TABLES = (
    "layer_type", "strategy_layout", "vocab_layout", "candidate_table", "candidate_microbatches",
)  # fmt: skip


# --------------------------------------------------------------------------------------------------
# Priced rows: seconds and bytes of every (table, strategy), by category.


class PricedRows(Record, eq=False, dict=True):
    """Time and memory of every (table, strategy), by category.

    Seconds are stored as flat arrays of the priced rows. A search uses their sums; categories are
    reported for single plans.
    """

    at: tuple[I64, ...]
    """Indices of the priced rows, (n,) for every axis of `shape`."""
    shape: tuple[int, ...]
    seconds: tuple[Mapping[str, F64], Mapping[str, F64], Mapping[str, F64]]
    """Seconds (n,) by category: forward and backward of a micro-batch, and once per step."""
    unpriced_s: float
    """Seconds of `forward`, `backward` and `tail` in rows without a price; other categories are
    0."""
    rows: Rows
    """Degrees, groups and samples of the n rows."""
    valid: Bool
    """(N tables, strategies) True if legal."""
    priced: Bool
    """(N tables, strategies) True if priced. With `price_illegal` also for strategies that only
    break a divisibility rule."""
    states: I64
    """Bytes of weights, gradients and optimizer states; leading axis [m == 1, m > 1]."""
    activations: I64
    """Bytes of saved activations per micro-batch in flight."""
    transient: I64
    """Peak bytes of transient memory; leading axis [m == 1, m > 1]."""
    shared: I64
    """Bytes of buffers that all layers of a stage use in turn."""

    @cached_property
    def forward(self) -> dict[str, F64]:
        """Forward seconds of a micro-batch by category, arrays of `shape`."""
        return self._placed(self.seconds[0])

    @cached_property
    def backward(self) -> dict[str, F64]:
        """Backward seconds of a micro-batch by category, arrays of `shape`."""
        return self._placed(self.seconds[1])

    @cached_property
    def step(self) -> dict[str, F64]:
        """Seconds once per step by category, arrays of `shape`."""
        return self._placed(self.seconds[2])

    @cached_property
    def sums_s(self) -> F64:
        """(3, *shape) sums over the categories of `forward`, `backward` and `step`, seconds."""
        full = np.full((3, *self.shape), self.unpriced_s)
        for whole, part in zip(full, self.seconds, strict=True):
            whole[self.at] = sum_of(part)
        return full

    @property
    def forward_s(self) -> F64:
        """Forward seconds of a micro-batch, sum of all categories."""
        sums: F64 = self.sums_s[0]
        return sums

    @property
    def backward_s(self) -> F64:
        """Backward seconds of a micro-batch, sum of all categories."""
        sums: F64 = self.sums_s[1]
        return sums

    @property
    def tail_s(self) -> F64:
        """Seconds once per step, sum of all categories."""
        sums: F64 = self.sums_s[2]
        return sums

    def row(self, *place: int) -> int | None:
        """Return the number of the priced row at these indices, None if it is not priced."""
        number = int(self._numbers[place])
        return None if number < 0 else number

    @cached_property
    def _numbers(self) -> I64:
        numbers = np.full(self.shape, -1, dtype=np.int64)
        numbers[self.at] = np.arange(len(self.at[0]))
        return numbers

    def _placed(self, part: Mapping[str, F64]) -> dict[str, F64]:
        """Return the categories as arrays of `shape`."""
        found = {}
        for name, values in part.items():
            found[name] = np.full(self.shape, self._unpriced_s(name))
            found[name][self.at] = values
        return found

    def _unpriced_s(self, name: str) -> float:
        # one infinite category of a sum is enough to exclude a row
        return self.unpriced_s if name in ("forward", "backward", "tail") else 0.0


class LayerRows(PricedRows, eq=False):
    """Priced rows of one layer type, axes (N, S).

    Categories are those of `LayerTime`; estimates add `host` and `stragglers`.
    """

    backward_peak: I64
    """Part of `transient` that the backward needs in addition to saved activations, bytes."""

    def time_s(self, table: int, strategy: int) -> dict[str, float]:
        """Return the seconds of one row by category, per micro-batch and per step."""
        row = self.row(table, strategy)
        result: dict[str, float] = {}
        for part in self.seconds:
            for name, values in part.items():
                value = self._unpriced_s(name) if row is None else float(values[row])
                result[name] = result.get(name, 0.0) + value
        return result


def sum_of(parts: Mapping[str, F64]) -> F64:
    """Return the sum of the arrays of all categories."""
    values = iter(parts.values())
    total = next(values).copy()
    for value in values:
        total += value
    return total


# --------------------------------------------------------------------------------------------------
# Rows: flat arrays for the formulas. Only `build_rows` and `Rows.scatter` use the table axes.
#
# Rank order inside a stage: tensor or Ulysses ranks fastest, then context, then data; with strided
# tensor groups context first, then data, then tensor.


_Scalar = TypeVar("_Scalar", bound=np.generic)


class Pricing(Record, eq=False):
    """Inputs common to the pricing of all rows."""

    hardware: HardwareProfile
    groups: Groups
    """Groups of ranks of `hardware`."""
    options: SearchOptions
    recipe: Recipe
    """Bytes per parameter and activation of `options`."""
    hiding: OverlapFactors | None = None
    """Overlap factors of estimated times with 1F1B; None for measured times and for GPipe."""


class Rows(Record, eq=False, dict=True):
    """Flat arrays over the n priced rows; `valid` marks those that are also legal."""

    shape: tuple[int, int]
    """(tables, strategies), the last axes of the result of `scatter`."""
    table: I64
    """(n,) index of the table."""
    strategy: I64
    """(n,) index of the strategy."""
    valid: Bool
    """(n,) True if legal."""
    stages: F64
    """(n,) p, number of stages."""
    ranks: F64
    """(n,) ranks of a stage."""
    samples: F64
    """(n,) g, samples of a micro-batch."""
    tensor: F64
    """(n,) t, tensor or Ulysses degree."""
    context: F64
    """(n,) c, context-parallel degree."""
    shards: F64
    """(n,) t*c."""
    batch: F64
    """(n,) b = g/d, samples of a tensor group."""
    zero_size: F64
    """(n,) number of ranks that reduce gradients and share ZeRO states."""
    ulysses: Bool
    zero3: Bool
    zero1: Bool
    """(n,) True if the optimizer is sharded (default zero1, not zero3)."""
    zero2: Bool
    """(n,) True if gradients and optimizer are sharded (default zero2, not zero3)."""
    checkpoint: Bool
    tensor_group: I64
    context_group: I64
    zero_group: I64

    @property
    def places(self) -> tuple[I64, I64]:
        """Indices of the rows in an array of `shape`."""
        return self.table, self.strategy

    def scatter(self, values: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """Return an array (..., tables, strategies) of `values` (..., n), 0 for unpriced rows."""
        full = np.zeros((*values.shape[:-1], *self.shape), dtype=values.dtype)
        full[..., self.table, self.strategy] = values
        return full

    # cached because many formulas, and every layer type with these rows, use them

    @cached_property
    def sharded(self) -> Bool:
        """(n,) True if ZeRO shards anything."""
        return self.zero3 | self.whole_weights

    @cached_property
    def whole_weights(self) -> Bool:
        """(n,) True if ZeRO shards the optimizer while weights stay unsharded."""
        return self.zero1 | self.zero2

    def divides_gradients(self, *, at_once: bool) -> Bool:
        """Return (n,) True if a rank stores only its shard of the gradients.

        For DDP rows the value has no meaning, because the shard is the full gradient.

        at_once : True if gradients are sharded in each reduction.
        """
        return ~self.zero1 if at_once else np.zeros_like(self.zero1)

    @cached_property
    def several(self) -> Bool:
        """(n,) True if there is another rank to reduce with."""
        return self.zero_size > 1.0

    @cached_property
    def optimizer_shards(self) -> F64:
        """(n,) number of ranks that share the optimizer, and gradients if sharded."""
        return np.where(self.sharded, self.zero_size, 1.0)

    @cached_property
    def weight_shards(self) -> F64:
        """(n,) number of ranks that share the weights."""
        return np.where(self.zero3, self.zero_size, 1.0)

    @cached_property
    def megatron(self) -> Bool:
        """(n,) True if tensor ranks split GEMMs (Megatron), which Ulysses does not."""
        return ~self.ulysses & (self.tensor > 1.0)

    def take(self, places: I64) -> Rows:
        """Return the rows with these numbers, which may repeat."""
        names = (name for name in self.__struct_fields__ if name != "shape")
        taken: dict[str, Any] = {name: getattr(self, name).take(places) for name in names}
        return replace(self, **taken)


def table_arrays(tables: Sequence[Table]) -> tuple[I64, I64, Bool]:
    """Return p (N,), g (N,) and True for the default dp types ZeRO-1 and ZeRO-2 (2, N)."""
    stages = np.array([p for p, _, _ in tables], dtype=np.int64)
    samples = np.array([g for _, g, _ in tables], dtype=np.int64)
    kinds = [kind for _, _, kind in tables]
    zero = np.array([[kind == name for kind in kinds] for name in ("zero1", "zero2")])
    return stages, samples, zero


class Grid(Record, eq=False):
    """Degrees, groups and samples of every (table, strategy), shared by all layer types.

    Axes besides N and S: D distinct numbers of stages, H distinct degrees of strategies.
    """

    stages: I64
    """(N,) p, number of stages."""
    samples: I64
    """(N,) g, samples of a micro-batch."""
    zero: Bool
    """(2, N) True if the default dp type is ZeRO-1, ZeRO-2."""
    at: I64
    """(N,) index of the table's p among the distinct ones."""
    of_table: F64
    """(3, N) p, ranks of a stage, g."""
    shapes: int
    """H, number of distinct degrees."""
    degrees: I64
    """(S,) index of a strategy's degrees among the distinct ones."""
    data: I64
    """(D, H) d, data-parallel degree; 1 if the degrees do not fit."""
    fits: Bool
    """(D, S) True if the degrees divide the ranks of a stage and all bandwidths are known."""
    named: Bool
    """(D, S) False for ZeRO-3 with one rank, which equals the strategy without ZeRO-3."""
    numbers: F64
    """(5, D*H) t, c, t*c, d, and number of ranks that share ZeRO states."""
    groups: I64
    """(3, D*H) tensor, context and ZeRO group."""
    flags: Bool
    """(3, S) ulysses, zero3, checkpoint."""


_DEGREES: Callable[[LayerStrategy], tuple[int, int, bool, bool]] = attrgetter(
    "tp", "cp", "ulysses", "strided"
)
_FLAGS = attrgetter("ulysses", "zero3", "checkpoint")


def build_grid(
    strategies: Sequence[LayerStrategy],
    tables: Sequence[Table],
    pricing: Pricing,
    priceable: tuple[Bool, Bool],
) -> Grid:
    """Return degrees, groups and samples of all tables and strategies.

    priceable : (S,) True if a strategy has all measurements, for p == 1 and for p > 1.
    """
    stages, samples, zero = table_arrays(tables)
    world_size, groups = pricing.hardware.world_size, pricing.groups
    # groups depend on p only, so tables with other batches share them
    distinct = sorted(set(stages.tolist()))
    number = {p: i for i, p in enumerate(distinct)}
    # recomputation and ZeRO do not change the groups of a degree
    degrees = list(map(_DEGREES, strategies))
    wanted = [
        dict.fromkeys(key for key, has in zip(degrees, flags.tolist(), strict=True) if has)
        for flags in priceable
    ]
    shapes = {key: i for i, key in enumerate(dict.fromkeys(degrees))}
    # (p, degrees) that do not fit have d = 1, to avoid a division by 0
    cells = [
        _on_stage(world_size, p, key, groups) if key in wanted[p > 1] else _NOWHERE
        for p in distinct
        for key in shapes
    ]
    numbers = np.array(cells, dtype=np.float64).reshape(-1, len(_NOWHERE)).T
    data, zero_size = numbers[3:5].reshape(2, len(distinct), len(shapes))
    shape = np.array([shapes[key] for key in degrees], dtype=np.int64)
    flags = np.array(list(map(_FLAGS, strategies)), dtype=np.bool_).reshape(-1, 3).T
    has = np.array(priceable)[[int(p > 1) for p in distinct]]
    return Grid(
        stages=stages,
        samples=samples,
        zero=zero,
        at=np.array([number[p] for p, _, _ in tables], dtype=np.int64),
        of_table=np.array((stages, world_size // stages, samples), dtype=np.float64),
        shapes=len(shapes),
        degrees=shape,
        data=data.astype(np.int64),
        fits=(numbers[8] > 0.0).reshape(data.shape).take(shape, axis=1) & has,
        # ZeRO-3 with one rank shards nothing and is equivalent to the plan without it
        named=(zero_size > 1.0).take(shape, axis=1) | ~flags[1],
        numbers=numbers[:5],
        groups=numbers[5:8].astype(np.int64),
        flags=flags,
    )


_Cell = tuple[float, float, float, float, float, float, float, float, float]
_NOWHERE: _Cell = (1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def _on_stage(
    world_size: int,
    num_stages: int,
    degrees: tuple[int, int, bool, bool],
    groups: Groups,
) -> _Cell:
    """Return (t, c, t*c, d, ranks sharing ZeRO states, tensor, context and ZeRO group, 1.0).

    `_NOWHERE` if the degrees do not divide the ranks of a stage or a bandwidth is unknown.

    degrees : `_DEGREES` of a strategy.
    """
    tp, cp, ulysses, strided = degrees
    d = data_degree(world_size, num_stages, tp * cp)
    if not d:
        return _NOWHERE
    # context and Ulysses ranks hold the weights of data ranks, so they reduce together
    z = d * cp * (tp if ulysses else 1)
    # neighbours first: tensor, context, data; strided: context, data, tensor
    tensor = groups.index(tp, d * cp if strided else 1)
    context = groups.index(cp, 1 if strided else tp)
    zero = groups.index(z, 1 if ulysses or strided else tp)
    # without a bandwidth a row has no price
    if not (groups.has(tensor) and groups.has(context) and groups.has(zero)):
        return _NOWHERE
    return tp, cp, tp * cp, d, z, tensor, context, zero, 1.0


def note_groups(
    strategies: Sequence[LayerStrategy], num_stages: int, world_size: int, groups: Groups
) -> None:
    """Record the notes on the groups of these strategies that `build_grid` would record."""
    for degrees in map(_DEGREES, strategies):
        _on_stage(world_size, num_stages, degrees, groups)


def build_rows(grid: Grid, *, legal: Bool, price_illegal: bool = False) -> Rows:
    """Return the rows of one layer type, or of embedding and head.

    legal : (S,) True if the strategy is legal for the model by `autopar.run.plan`; divisibility of
        ranks and samples is checked here.
    price_illegal : True to include rows that only break a divisibility rule. They are not valid,
        and their batch b may be fractional.
    """
    allowed, priced = which_rows(grid, legal=legal, price_illegal=price_illegal)
    return rows_at(grid, allowed, *priced.nonzero())


def which_rows(grid: Grid, *, legal: Bool, price_illegal: bool = False) -> tuple[Bool, Bool]:
    """Return (legal, priced) masks of rows, (N, S) each; parameters as in `build_rows`."""
    # b must be an integer, without rounding: the rule of `violations`, for all rows at once
    whole = grid.samples[:, None] % grid.data[grid.at] == 0
    allowed = whole.take(grid.degrees, axis=1) & (grid.named & legal)[grid.at]
    priced = grid.fits[grid.at]
    return allowed, priced if price_illegal else priced & allowed


def rows_at(grid: Grid, allowed: Bool, table: I64, strategy: I64) -> Rows:
    """Return the rows of these tables (n,) and strategies (n,).

    allowed : (N, S) True if legal, from `which_rows`.
    """
    cell = grid.at.take(table) * grid.shapes + grid.degrees.take(strategy)
    tensor, context, shards, data, zero_size = grid.numbers.take(cell, axis=1)
    stages, ranks, samples = grid.of_table.take(table, axis=1)
    ulysses, zero3, checkpoint = grid.flags.take(strategy, axis=1)
    tensor_group, context_group, zero_group = grid.groups.take(cell, axis=1)
    zero1, zero2 = grid.zero.take(table, axis=1)
    return Rows(
        shape=allowed.shape,
        table=table,
        strategy=strategy,
        valid=allowed[table, strategy],
        stages=stages,
        ranks=ranks,
        samples=samples,
        tensor=tensor,
        context=context,
        shards=shards,
        batch=samples / data,
        zero_size=zero_size,
        ulysses=ulysses,
        zero3=zero3,
        # the default applies to layers that ZeRO-3 does not shard
        zero1=zero1 & ~zero3,
        zero2=zero2 & ~zero3,
        checkpoint=checkpoint,
        tensor_group=tensor_group,
        context_group=context_group,
        zero_group=zero_group,
    )

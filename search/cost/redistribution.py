"""Layouts of the activation between layers, and the cost of changing from one to another.

Source: cost-model.md section 8 and the transfer part of section 9. A stage has W/p ranks; the
fully sharded activation of a micro-batch is X = g*S*h*e*p/W bytes on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.plan import LayerStrategy, VocabStrategy
from search.cost.comm import Groups
from search.tables import Layout

__all__ = [
    "Exchange",
    "Way",
    "layout_of",
    "layout_of_vocab",
    "plan_exchange",
    "redistribution_s",
    "send_s",
]

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


def layout_of(strategy: LayerStrategy, *, sequence_parallel: bool) -> Layout:
    """Return the layout of a layer's input and output."""
    sharded = strategy.ulysses or sequence_parallel
    return Layout(
        sequence_shards=strategy.cp * (strategy.tp if sharded else 1),
        cp=strategy.cp,
        replicas=1 if sharded else strategy.tp,
        strided=strategy.strided and strategy.tp > 1,
    )


def layout_of_vocab(vocab: VocabStrategy, *, sequence_parallel: bool) -> Layout:
    """Return the layout of the embedding's output and of the head's input, never strided."""
    like = LayerStrategy(tp=vocab.tp, ulysses=vocab.ulysses)
    return layout_of(like, sequence_parallel=sequence_parallel)


@dataclass(frozen=True, kw_only=True, order=True)
class Exchange:
    """One collective of a redistribution; its message is `multiple` times X."""

    operation: str
    size: int
    stride: int
    multiple: int


Way = tuple[tuple[Exchange, ...], ...]
"""Collectives of one direction: a sum over alternatives, each the maximum of its members."""


def plan_exchange(source: Layout, target: Layout) -> tuple[Way, Way]:
    """Return the collectives that turn `source` into `target`: forward, and backward.

    Sharded to sharded (one copy each): an all-to-all in groups of lcm/gcd of the sequence
    shards, over the larger context degree where that differs (the slower of both where both do).
    Only the replicas differ: an all-gather in groups of their ratio, forward where they grow and
    backward where they shrink. Otherwise: an all-to-all in groups of lcm/gcd of shards*replicas
    where that differs, and the all-gather.
    """
    q1, q2, r1, r2 = (
        source.sequence_shards,
        target.sequence_shards,
        source.replicas,
        target.replicas,
    )
    stride = math.gcd(q1, q2) if source.cp == target.cp else 1
    if r1 == r2 == 1:
        moves = []
        if q1 != q2:
            moves.append(_all_to_all(q1, q2, stride, 1))
        if source.cp != target.cp:
            ring = max(source.cp, target.cp)
            moves.append(Exchange(operation="all2all", size=ring, stride=1, multiple=1))
        both: Way = (tuple(moves),) if moves else ()
        return both, both
    forward: list[tuple[Exchange, ...]] = []
    backward: list[tuple[Exchange, ...]] = []
    w1, w2 = q1 * r1, q2 * r2
    if q1 != q2 and w1 != w2:
        stride = math.gcd(w1, w2) if source.cp == target.cp else 1
        move = (_all_to_all(w1, w2, stride, min(r1, r2)),)
        forward.append(move)
        backward.append(move)
    if r1 != r2:
        stride = math.gcd(q1 * r1, q2 * r2) if q1 == q2 else math.gcd(q1, q2)
        stride = stride if source.cp == target.cp else 1
        small, large = sorted((r1, r2))
        gather = (
            Exchange(operation="allgather", size=-(-large // small), stride=stride, multiple=large),
        )
        # Degrees that do not divide each other leave samples to fetch in both directions.
        if r2 > r1 or large % small:
            forward.append(gather)
        if r2 < r1 or large % small:
            backward.append(gather)
    return tuple(forward), tuple(backward)


def _all_to_all(first: int, second: int, stride: int, multiple: int) -> Exchange:
    size = math.lcm(first, second) // math.gcd(first, second)
    return Exchange(operation="all2all", size=size, stride=stride, multiple=multiple)


def redistribution_s(
    layouts: Sequence[Layout], sharded_bytes: F64, stages: I64, world_size: int, groups: Groups
) -> tuple[F64, F64]:
    """Return forward and backward redistribution, each (N, K, Y, Y) seconds.

    sharded_bytes : (N, K) X of every table and layer type; stages : (N,) p. Where the rank order
    differs, as between strided and neighbouring tensor ranks, every sample changes its ranks: an
    all-to-all of X*max r over the whole stage, or the ordinary exchange if that is slower.
    Layouts that no stage of this world can hold together cost nothing here, their rows are not
    valid.
    """
    count = len(layouts)
    plans = [[plan_exchange(a, b) for b in layouts] for a in layouts]
    ways: dict[Way, int] = {(): 0}
    index = np.zeros((2, count, count), dtype=np.int64)
    for i, row in enumerate(plans):
        for j, pair in enumerate(row):
            for k, way in enumerate(pair):
                index[k, i, j] = ways.setdefault(way, len(ways))

    flat = sharded_bytes.ravel()
    cost = np.zeros((flat.size, len(ways)))
    known: dict[Exchange, F64] = {}
    for way, number in ways.items():
        for slowest in way:
            times = [_exchange_s(e, flat, world_size, groups, known) for e in slowest]
            cost[:, number] += np.maximum.reduce(times)
    cost = cost.reshape(*sharded_bytes.shape, len(ways))
    forward, backward = cost.take(index[0], axis=-1), cost.take(index[1], axis=-1)
    if any(layout.strided for layout in layouts):
        across = _reorder_s(layouts, sharded_bytes, stages, world_size, groups)
        forward, backward = np.maximum(forward, across), np.maximum(backward, across)
    return forward, backward


def _reorder_s(
    layouts: Sequence[Layout], sharded_bytes: F64, stages: I64, world_size: int, groups: Groups
) -> F64:
    """(N, K, Y, Y) seconds of the all-to-all over a stage where the rank order differs, else 0.

    The order is that of the data ranks: they are neighbours with strided tensor ranks, so it
    depends on the strided degree; a tensor group of the whole stage has one order only.
    """
    replicas = np.array([layout.replicas for layout in layouts], dtype=np.float64)
    copies = np.maximum.outer(replicas, replicas)
    degree = np.array([x.sequence_shards // x.cp * x.replicas for x in layouts], dtype=np.int64)
    strided = np.array([layout.strided for layout in layouts], dtype=np.bool_)
    result = np.zeros((*sharded_bytes.shape, len(layouts), len(layouts)))
    for p in sorted(set(stages.tolist())):
        ranks, rest = divmod(world_size, p)
        if rest or ranks == 1:
            continue
        order = np.where(strided & (degree < ranks), degree, 1)
        tables = np.flatnonzero(stages == p)
        local = sharded_bytes[tables].ravel()
        group = np.full(local.shape, groups.index(ranks, 1), dtype=np.int64)
        for multiple in sorted(set(replicas.tolist())):
            seconds = groups.seconds("all2all", local * multiple, group)
            where = (order[:, None] != order[None, :]) & (copies == multiple)
            # Not a product: the time is infinite where the stage's bandwidth is unknown.
            result[tables] += np.where(where, seconds.reshape(len(tables), -1, 1, 1), 0.0)
    return result


def _exchange_s(
    exchange: Exchange,
    sharded_bytes: F64,
    world_size: int,
    groups: Groups,
    known: dict[Exchange, F64],
) -> F64:
    if exchange not in known:
        if exchange.size > world_size:
            known[exchange] = np.zeros_like(sharded_bytes)
        else:
            group = np.full(
                sharded_bytes.shape, groups.index(exchange.size, exchange.stride), dtype=np.int64
            )
            known[exchange] = groups.seconds(
                exchange.operation, sharded_bytes * exchange.multiple, group
            )
    return known[exchange]


def send_s(layouts: Sequence[Layout], sharded_bytes: F64, stages: I64, groups: Groups) -> F64:
    """Return the transfer of an activation to the next stage, (N, K, Y) seconds; 0 for p == 1.

    X * replicas from every rank of a stage at once, in the time of a message between p stages.
    """
    replicas = np.array([layout.replicas for layout in layouts], dtype=np.float64)
    result = np.zeros((*sharded_bytes.shape, len(layouts)))
    for p in sorted(set(stages.tolist()) - {1}):
        rows = stages == p
        result[rows] = groups.point_to_point_s(p, sharded_bytes[rows][:, :, None], replicas)
    return result
